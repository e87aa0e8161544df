/* host.h: what the commands of infer share: models on disk, the engine that runs them, the options of the command line,
 * and the model that a command stands on. */
#ifndef HOST_H
#define HOST_H

#include "chat.h"
#include "infer.h"
#include "tokenizer.h"

#include <signal.h>
#include <stdio.h>

/* What computes: infer.cu, or tests/reference.c. */
extern const Backend *const backend;

enum { MOST_VALUES = 64, MOST_STREAMS = 256, MOST_REPEATS = 100, MOST_CLIENTS = 1000 };
typedef struct { /* whole numbers like 1,4,16 */
    int n, value[MOST_VALUES];
} Numbers;
typedef struct { /* texts of an option that may be repeated */
    int n;
    const char *text[MOST_VALUES];
} Texts;

/* ---- models on disk: config.json, safetensors, weights bound to infer.h's Model ---- */

enum { MOST_DIMS = 8 };
typedef struct { /* a checked range of a file */
    char *name;
    const char *dtype;    /* as safetensors spells it: "BF16", "U8", ..., or GGUF: "Q4_K", ... */
    const char *encoding; /* the same, or what the matrix that it belongs to is encoded in */
    int64_t values;       /* how many it has; 0: it only helps to decode others */
    int dims;
    int64_t shape[MOST_DIMS];
    int file;                  /* index into Tensors.file */
    size_t offset, size;       /* bytes from the beginning of the file, checked */
    const unsigned char *data; /* the same bytes, mapped */
    bool bound;                /* it has a place in the model */
} Tensor;

typedef struct {
    char *name;
    int fd;
    const unsigned char *map;
    size_t size;
} TensorFile;
typedef struct {
    Tensor *tensor; /* sorted by name */
    int n, files;
    TensorFile *file;
    cJSON *metadata; /* of GGUF, by its keys; else NULL */
} Tensors;

/* Opens the safetensors files of a directory (github.com/huggingface/safetensors), or one file: 8 bytes of header
 * length, a JSON header that gives every tensor's dtype, shape and data_offsets, then the data without gaps. A file
 * NAME.gguf is opened with all its parts; its tensors get the hub's names. BAD_MODEL with file, tensor, expected and
 * found. If a file of the Tensors opened last shrinks while it is mapped, reading there
 * ends the process with BAD_MODEL and a line that names the directory. */
bool tensors_open(Tensors *t, const char *path, Error *e);
void tensors_close(Tensors *t);
const Tensor *tensors_find(const Tensors *t, const char *name); /* or NULL */

typedef struct {
    Model model;
    const char *family; /* its row of families[] */
    Ids stop;           /* ids that end a text, from generation_config.json and config.json */
    uint64_t bytes;     /* of all files */
    Tensors tensors;
    void **owned; /* arrays that the model points to, freed with the checkpoint */
    int owned_n;
} Checkpoint;

/* Opens a model directory; weights are mapped, not read. BAD_MODEL with file, field or tensor, expected and found. */
bool checkpoint_open(Checkpoint *c, const char *dir, Error *e);
/* The same from config.json alone: a model of its shapes without weights (Model.made_up), encoded as `encoding`, a name
 * of types[], says; USAGE if it is none. NULL: BF16, which routers always have, and embedding and head but with GGUF's
 * types. */
bool checkpoint_make_up(Checkpoint *c, const char *dir, const char *encoding, Error *e);
/* Does config.json describe a model that infer runs? Its weights need not be there. */
bool checkpoint_known(const char *dir, Error *e);
void checkpoint_close(Checkpoint *c);

uint64_t linear_bytes(const Linear *w); /* of its weights as encoded, with their grids; 0 if it does not exist */
uint64_t model_bytes(const Model *m);   /* of all its Linears */
/* Bytes that a step reads which generates one token for each of `streams` sequences of `depth` tokens: the matrices
 * once, of a layer's experts so many, and the keys and values that each sequence sees. */
uint64_t step_bytes(const Model *m, double experts, int streams, int depth);

typedef struct {       /* what a list shows of a directory without opening its weights */
    char *path, *name; /* name: ORG/NAME, or ORG/NAME/FILE.gguf, in the hub's cache, else the path as people type it */
    char encoding[16], family[40];
    uint64_t bytes;
    bool complete; /* every file that it needs is here */
    bool known;    /* infer runs it: see checkpoint_known */
} ModelEntry;
/* All models that can be found: in ./models, ~/.cache/infer/models and the hub's cache, sorted by name, none twice. */
int models_list(ModelEntry **list);
void models_free(ModelEntry *list, int n);
/* The directory that a MODEL argument means: a path, ORG/NAME or a unique part of a name. Free it; NULL: BAD_MODEL with
 * what there is. */
char *model_find(const char *argument, Error *e);
/* Are config.json, tokenizer.json and all weights here? */
bool model_complete(const char *dir);
/* Appends where other tools of the hub keep their things, $HF_HOME or ~/.cache/huggingface, and where its cache is,
 * $HF_HUB_CACHE or `hub` in there. */
void hub_home(Bytes *path);
void hub_cache(Bytes *path);

/* ---- the engine: one model on one backend, the pages of its cache and the sequences that own them ---- */

typedef struct {
    const Backend *backend;
    const Model *model;
    void *state;
    int context;              /* positions that a sequence may have: what was asked for, or what fits */
    int max_seqs, max_tokens; /* of a batch */
    Ids free_pages;
} Engine;

/* context 0: as much as the model was made for and memory holds; otherwise exactly that or NO_ROOM. The cache has room
 * for limits.max_seqs such sequences, or limits.cache tokens, or for as many as fit. limits.context is ignored. */
bool engine_open(Engine *g, const Backend *backend, const Model *m, Limits limits, int context, Error *e);
void engine_close(Engine *g);

/* A text whose keys and values lie in the cache. Zero it, give it a slot of its own, free its pages at the end. */
typedef struct {
    int slot;
    Ids tokens; /* what the cache holds, position by position */
    Ids pages;
} Sequence;
/* Forgets all but the first n tokens and gives unneeded pages back. */
void sequence_rewind(Engine *g, Sequence *s, size_t n);
void sequence_free(Engine *g, Sequence *s);
/* Submits n tokens (at most g->max_tokens) behind those of the sequence, which then has them. */
bool sequence_submit(Engine *g, Sequence *s, const int *ids, size_t n, Want want, const Sampling *how, Error *e);

/* The same, and waits for it. FAILED if the logits hold a NaN. */
bool sequence_run(Engine *g, Sequence *s, const int *ids, size_t n, Want want, const Sampling *how, Result *r,
                  Error *e);

/* An answer being written. While the host handles one token, the backend already computes the next. */
typedef struct {
    Engine *engine;
    Sequence *sequence;
    Sampling sampling;
    size_t prompt; /* tokens */
    size_t reused; /* of them were in the cache */
    bool waiting;  /* a step is outstanding */
} Generation;

/* Makes `ids` the sequence's text, keeping what it shares with it, and starts an answer. Stops with INTERRUPTED between
 * two chunks when *stop becomes true. NO_ROOM if the prompt leaves no position free. */
bool generation_begin(Generation *w, Engine *g, Sequence *s, const int *ids, size_t n, const Sampling *how,
                      const volatile sig_atomic_t *stop, Error *e);
/* The next token; DREW_NOTHING when the context is full. FAILED if the logits hold a NaN. */
bool generation_next(Generation *w, int *token, Error *e);
/* Ends it at any point; the sequence then holds the prompt and every token handed out, but for the last if the context
 * is full. */
void generation_end(Generation *w);

/* The token for `position`, drawn on the host from logits (vocab), which are changed; seen[i]: token i stands in the
 * text, or NULL. DREW_NAN if there is one. */
int draw_logits(float *logits, int vocab, const Sampling *how, int position, const bool *seen);

/* ---- the scheduler: many texts are continued at once, step by step, and share what they have in common ----
 * A step has first one token of each text that is being written, by arrival, then chunks of prompts in the room that is
 * left. Pages that texts have in common are there once, counted by reference; full pages stay when a text ends, until
 * their room is needed, those used least recently first. When pages run out the youngest text gives its own back and
 * is computed again later: a draw depends on seed and position alone, so nobody sees it. */

typedef struct {
    int id;
    float add; /* to its logit */
} Bias;

/* Zero it, fill in the first part, leave the second alone. */
typedef struct Stream Stream;
struct Stream {
    Ids tokens;    /* the prompt, and behind it what is drawn */
    size_t prompt; /* tokens of it, at least 1 */
    size_t most;   /* tokens that the text may have, more than `prompt`, at most the engine's context */
    Sampling sampling;
    const Bias *bias; /* (biases) or NULL; then the draw is made on the host */
    int biases;
    Want want;       /* WANT_LOGITS: `take` gets those of drawn tokens, WANT_ALL_LOGITS: also those of the prompt */
    const Ids *stop; /* tokens that end it, or NULL */
    /* Gets each token once with its position and the logits (vocab) that it was drawn from, or NULL: drawn ones, and
     * with WANT_ALL_LOGITS those of the prompt from the second on. DREW_NAN is always the last one. With the last one
     * the scheduler has forgotten the stream. */
    void (*take)(Stream *s, size_t position, int token, const float *logits, bool last);
    void *owner;

    size_t reused;    /* tokens of the prompt that were in the cache */
    size_t sent;      /* tokens submitted: the cache holds them for the next step */
    size_t published; /* tokens that `take` has had */
    size_t filed;     /* pages of it that others can find */
    uint64_t chain;   /* name of the last of them */
    Ids pages;
    int slot, drawing; /* drawing: draws that are not collected */
};

typedef struct Scheduler Scheduler;
typedef struct {
    size_t running, waiting;  /* streams */
    size_t pages, kept, idle; /* all; those that hold a known text; those that no stream has */
    size_t outstanding;       /* steps */
    size_t preempted, steps;  /* so far */
} SchedulerState;

/* Takes all pages of the engine, which has no other sequences. */
Scheduler *scheduler_open(Engine *g);
void scheduler_close(Scheduler *s);
void scheduler_add(Scheduler *s, Stream *t); /* behind all others */
/* Forgets a stream, wherever it stands. */
void scheduler_remove(Scheduler *s, Stream *t);
/* Submits the next step, if anything can be computed, and collects the one before it. Errors are the backend's. */
bool scheduler_step(Scheduler *s, Error *e);
SchedulerState scheduler_state(const Scheduler *s);

/* ---- commands ---- */

/* The arguments of a command. What it does not take is NULL, 0 or false. */
typedef struct {
    const char *model; /* the argument: MODEL or REPO; NULL: none was given */
    const char *prompt, *file, *output, *tap, *ids, *system, *effort, *date, *revision, *token_file, *encoding;
    const char *server;
    Texts stop, include, exclude;
    Numbers prompts, depths, streams, clients;  /* of bench */
    const char *host, *key_file, *cors, *alias; /* of serve */
    int port, slots, queue, cache, chunk;
    int context, gpu, max_tokens, top, stride, tokens, repeats, jobs;
    bool plain, all, json, jsonl, special, as_ids, hide_thinking, raw, insecure;
    Sampling sampling;
} Options;

/* The commands, which return the exit code. */
int play(const Options *o), download(const Options *o), list(const Options *o), rm(const Options *o);
int inspect(const Options *o), doctor(const Options *o), bench(const Options *o), perplexity(const Options *o);
int serve(const Options *o);
int explain(const Options *o);

/* The model that a command works with, as far as it needs one. */
enum {
    NEED_TOKENIZER = 1,
    NEED_CHAT = 2,       /* and its chat format; it is an error if it has none */
    NEED_CHECKPOINT = 4, /* config and weights */
    NEED_SHAPES = 8,     /* the same, but where there are no weights config.json is enough */
    NEED_ENGINE = 16,  /* and loaded, with a context of o->context and as many sequences as o->streams or slots says */
    USE_TOKENIZER = 32 /* only if it is there */
};
typedef struct {
    char *dir, *name; /* where it is, and as the user calls it */
    Tokenizer *tokenizer;
    Chat chat; /* if has_chat */
    bool has_chat;
    Error no_chat; /* else why not */
    Checkpoint checkpoint;
    Engine engine;
    Tap *tap; /* set before loading: looks into each step, see infer.h */
    void *tap_data;
    char where[64]; /* "GPU 0 (14.1 GB of 139.8 GB)" */
    double seconds; /* that loading took */
} Session;

/* Finds o->model, or the only one there is, and opens what it needs, NEED_... Close it also if it fails. */
bool session_open(Session *s, const Options *o, int need, Error *e);
/* Opens a model for its logits, and makes token ids of o->prompt or o->ids: at least one, no more than its context. */
bool session_prompt(Session *s, const Options *o, Ids *ids, Error *e);
/* The `n` largest logits, or as many as there are, from the largest on; returns how many. */
int likeliest(const float *logits, int vocab, int n, int *ids);
/* Loads a model that was opened without an engine: for those who first look at it to choose a context. */
bool session_load(Session *s, const Options *o, int context, Error *e);
void session_close(Session *s);

/* ---- the terminal ---- */

int columns(FILE *f); /* of its window */
/* Writes an escape sequence where it can be shown and is wanted. */
bool put_escape(FILE *f, const char *escape);
/* A paragraph behind a name that has a column of its own where the window is wide enough. */
void print_row(FILE *f, const char *name, int column, const char *text);

#endif
