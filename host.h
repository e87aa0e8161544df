/* host.h: what commands and rooms share: models on disk, the engine and its scheduler, the command line's options,
 * and the session that opens what a command needs. */
#ifndef HOST_H
#define HOST_H

#include "chat.h"
#include "infer.h"
#include "tokenizer.h"

#include <signal.h>
#include <stdio.h>

#define VERSION "0.1"

/* The backend of this build: card.cu, or tests/reference.c. */
extern const Backend *const backend;

enum { MOST_VALUES = 64, MOST_STREAMS = 256 };
typedef struct { /* texts of an option that may be repeated */
    int n;
    const char *text[MOST_VALUES];
} Texts;

typedef enum { SWITCH, TEXT, TEXTS, WHOLE, SEED, REAL } Kind;
typedef struct {       /* the last of a table has no name */
    char letter;       /* -p, or 0 */
    const char *name;  /* --prompt */
    const char *value; /* its value as the help names it; NULL: a switch */
    Kind kind;
    void *to;            /* bool, const char *, Texts, int, uint64_t or float, by kind */
    double least, most;  /* range of a number; TEXTS: at most so many texts */
    const char *initial; /* default value; NULL: what `to` holds */
    const char *help;    /* what it does; a REAL's begins with its range and a colon */
} Option;

/* ---- models on disk: config.json, safetensors, weights bound to infer.h's Model ---- */

enum { MOST_DIMS = 8 };
typedef struct { /* a checked range of a file; by_name() sorts them */
    char *name;
    const char *dtype;    /* safetensors' name, "BF16", "U8", ..., or a room's */
    const char *encoding; /* the same, or the type of the matrix that it is part of */
    int64_t values;       /* weights in it; 0: it holds scales, zeros or the like */
    int dims;
    int64_t shape[MOST_DIMS];
    int file;                  /* index into Tensors.file */
    size_t offset, size;       /* bytes in the file, checked against its size */
    const unsigned char *data; /* the same bytes, mapped */
    bool bound;                /* the model uses it */
} Tensor;

typedef struct {
    char *name;
    int fd;
    const unsigned char *map;
    size_t size;
} TensorFile;
typedef struct Container Container;
typedef struct Loader Loader;
typedef struct {
    const Container *container;
    Tensor *tensor; /* sorted by name */
    int n, files;
    TensorFile *file;
    cJSON *metadata; /* __metadata__ of the first file's header, or NULL */
} Tensors;

/* How a model is stored. All speak of it by the names that safetensors and the hub's files have. */
struct Container {
    /* Is a whole model stored so at this path, which may be a folder or a file? */
    bool (*fits)(const char *path);
    /* Lists its files, which need not be there, or opens them (TensorFile.fd). BAD_MODEL. */
    bool (*files)(Tensors *t, const char *path, Error *e);
    /* The header of file i, which is mapped, as safetensors' JSON. *data: where its data begins; *alignment: each
     * tensor begins at a multiple of it. NULL: BAD_MODEL. */
    cJSON *(*header)(const Tensors *t, int i, size_t *data, size_t *alignment, Error *e);
    /* What the hub's file `name` holds (config.json, tokenizer.json, ...; chat_template.jinja is a string). It may
     * share texts with t->metadata. NULL: there is no such file, or an error. */
    cJSON *(*json)(const Tensors *t, const char *path, const char *name, Error *e);
    /* A container that makes weights (both, or NULL): the type of a module's matrix; the bytes of *t, which binding
     * requires and no file has. It is of w or, w NULL, a vector. The first error fills load->e. */
    Type (*type)(const Loader *load, const char *name);
    void (*make)(Loader *load, Tensor *t, const char *suffix, Type type, const Linear *w);
    bool in_files;               /* json() reads the tensors' files, which must be open */
    bool whole_norms;            /* norms are stored as w, also in families whose safetensors have w - 1 */
    bool neighbours;             /* RoPE turns neighbouring rows of q and k, if config.json has rope_interleave */
    bool extra_biases;           /* a matrix may have a bias that its family does not */
    const char *ending, *advice; /* of file names at the hub, and how to fetch them; or NULL */
};
extern const Container safetensors;
extern const Container *const containers[];      /* the first that fits counts; extensions.c */
const Container *container_at(const char *path); /* safetensors if none fits */

enum { MOST_FILES = 1000 };
/* Opens the files of a model (container NULL: as container_at() finds it), or one safetensors file
 * (github.com/huggingface/safetensors): 8 bytes of header length, a JSON header that gives every tensor's dtype, shape
 * and data_offsets, then the data without gaps. BAD_MODEL with file, tensor, expected and found. If a file of the
 * Tensors opened last shrinks later, a read of what is gone ends the process with BAD_MODEL and a line that names the
 * path. */
bool tensors_open(Tensors *t, const Container *container, const char *path, Error *e);
void tensors_close(Tensors *t);
Tensor *tensors_find(const Tensors *t, const char *name); /* or NULL */
/* Adds a file to those to open, unless it is listed. Takes `name` over. */
void tensors_add_file(Tensors *t, char *name);

/* Names what often comes in place of a model's file, by its first bytes; NULL: nothing known. */
const char *file_kind(const char *data, size_t n);

typedef struct {
    Model model;
    const char *family; /* model_type of its row of families[] */
    Ids stop;           /* ids that end a text; from generation_config.json and config.json */
    Tensors tensors;
    void **owned; /* arrays that the model points to, freed with the checkpoint */
    int owned_n;
} Checkpoint;

/* Opens a model; weights are mapped, not read. BAD_MODEL with file, field or tensor, expected
 * and found. */
bool checkpoint_open(Checkpoint *c, const char *dir, Error *e);
/* The same as this container. */
bool checkpoint_open_as(const Container *container, Checkpoint *c, const char *dir, Error *e);
void checkpoint_close(Checkpoint *c);

/* ---- reading a model: what families/ and encodings/ use ---- */

typedef struct {                          /* a family of models: straight functions, with the helpers below */
    const char *model_type;               /* of config.json */
    void (*read)(Loader *load, Model *m); /* config.json: sizes and formulas */
    void (*bind)(Loader *load, Model *m); /* tensors, by name and shape */
    bool (*left_out)(const Loader *load, const char *name); /* of a tensor that text does not need; or NULL */
} Family;
extern const Family *const families[]; /* lists that end with a row without model_type; extensions.c */

struct Loader { /* a model being read. After the first error, which fills *e, nothing more is bound */
    Checkpoint *c;
    const Family *family;
    char *path;          /* of config.json */
    cJSON *file;         /* config.json */
    const cJSON *config; /* the same, or the part of it that describes the text model */
    Rope *rope;          /* (2) Model.rope, which the family fills */
    char prefix[30];     /* of tensor names: "model.layers.3." in a layer, nothing outside */
    bool tied;           /* embed and head are one */
    const Container *container;
    /* encodings/: */
    const cJSON *quantization; /* quantization_config, or NULL */
    bool zeros;                /* all groups of compressed-tensors have zero points */
    Error *e;
};

static inline bool failed(const Loader *load) { return load->e->code; }

/* Records what is wrong with a file. Only the first error counts, because later ones may follow from it. */
#define bad_file(load, file, format, ...)                                                                              \
    ((void)(failed(load) || fail((load)->e, BAD_MODEL, "%s: " format, file, __VA_ARGS__)))

/* config.json. A value of another cJSON type, or outside its range, is an error that names the key. */
enum { REQUIRED = -1 }; /* instead of a missing key's value */
void config_bad(Loader *load, const cJSON *object, const char *key, const char *expected);
/* The value of a key; NULL: it is missing or null. */
const cJSON *config_typed(Loader *load, const cJSON *object, const char *key, int type, const char *expected);
const char *config_text(Loader *load, const cJSON *object, const char *key);
/* `absent` is what a missing key means. Null is false. */
bool config_true(Loader *load, const char *key, bool absent);
/* A number in [least, most]. A missing key has the value `absent`; if that is out of range, the key is required. */
double config_number(Loader *load, const cJSON *object, const char *key, double least, double most, double absent);
int config_whole(Loader *load, const char *key, int least, int most, int absent);
/* The same of a key that may be null, which means 0; `absent` may be 0, too. */
int config_optional(Loader *load, const char *key, int least, int most, int absent);
/* Refuse every value of a key but this one. The key may be missing. */
void config_only(Loader *load, const cJSON *object, const char *key, double value);
void config_only_text(Loader *load, const cJSON *object, const char *key, const char *text);
/* A file of the model by the hub's name; NULL: it is not there, or an error. */
cJSON *model_json(Loader *load, const char *dir, const char *name);

typedef struct { /* what missing keys mean; 0: the key is required */
    int layers, dim, vocab, context, heads;
    double eps;
} Sizes;
void read_sizes(Loader *load, Model *m, Sizes absent);
/* The heads and their size. kv_heads and size: what missing keys mean. 0, and null in the file: n_heads and dim /
 * n_heads. */
void read_heads(Loader *load, Model *m, int kv_heads, int size);
/* What layer_types says of layer i, one of `known`, or without it `sliding`: has it a window, and its rope? */
void read_layer_type(Loader *load, Model *m, int i, const char *known, bool sliding, int window);

/* RoPE (Su et al., "RoFormer", 2021) and its scaling. config.json has an object of its parameters, rope_parameters or,
 * under the older name, rope_scaling. A file with both must say the same in both. NULL: it has none. */
const cJSON *find_rope(Loader *load);
typedef struct { /* a type of scaling that the core does not know; original: the context before it was enlarged */
    const char *type;
    Rope (*read)(Loader *load, const Model *m, const cJSON *rope, double theta, double factor, double original);
} RopeScaling;
/* Types default, linear, yarn and `own`, unless it is NULL. theta: if `rope`, which may be NULL, has none. */
Rope read_rope(Loader *load, Model *m, const cJSON *rope, double theta, const RopeScaling *own);
/* Angles per position theta^(-2i/d). share (rope_dim / 2): the part of an angle that is not divided by the factor;
 * NULL: 0. scale multiplies cos and sin. */
Rope make_rope(Loader *load, const Model *m, double theta, double factor, const double *share, double scale);
double yarn_scale(double factor, double mscale);

/* Zeroed memory that is freed with the checkpoint. */
void *keep(Checkpoint *c, size_t count, size_t bytes);
static inline int divided(int n, int by) { return n > 0 ? (n - 1) / by + 1 : 0; }

/* Types: entries of its tensor's last dimension that a block takes; the type that a tensor's dtype alone determines, or
 * NO_TYPE; has a tensor the dtype of this type (old files hold E8M0 as U8)? */
int block_entries(Type type);
Type type_of(const Tensor *t);
bool has_dtype(const Tensor *t, Type type);
bool is_float(Type type);

/* The tensor PREFIX NAME SUFFIX. NULL: the files do not have it. */
Tensor *find_tensor(const Loader *load, const char *name, const char *suffix);
/* Finds that tensor, a part of w or, w NULL, a vector, and checks its shape, of which a last 1 may be missing, and the
 * dtype of `type` (NO_TYPE: any). If it is missing, the container may make it; else, and if the check fails, returns
 * one without data. */
Tensor *bind_tensor(Loader *load, const char *name, const char *suffix, Type type, const Linear *w, int dims,
                    const int64_t *shape);
bool tensor_is(Loader *load, const Tensor *t, bool ok, const char *expected); /* refuses it unless `ok` */
const char *file_of(const Loader *load, const Tensor *t);
/* Marks a tensor as part of a matrix of this type, of whose weights it holds `values`. */
void belongs(Tensor *t, Type type, int64_t values);
View tensor_view(const Loader *load, const Tensor *t, int64_t lines);
/* (n_experts, rows) or NULL, after an error: rows first, first + step, ... of the `pitch` of NAME_bias. */
const float *bind_biases(Loader *load, const char *name, int pitch, int first, int step, int rows);
View lines_of(View v, size_t first, size_t step, int n); /* n lines of a view: first, first + step, ... */
const float *bind_floats(Loader *load, const char *name, const char *suffix, int n); /* (n) */
/* The matrix (rows, cols) of a module. bias: true, false (the file may still have one) or NO_BIAS (instead of false:
 * nothing would add it). */
enum { NO_BIAS = -1 };
Linear bind_linear(Loader *load, const char *name, int rows, int cols, int bias);

/* embed, head and norm. tied: what a missing tie_word_embeddings means. */
void bind_ends(Loader *load, Model *m, bool tied);
/* Tensor names are those of layer l from here on. False: there is no such layer, or an error. */
bool begin_layer(Loader *load, const Layer *l);
typedef struct {      /* how a file holds the experts of a layer, which are a module like mlp.experts */
    const char *mark; /* MODULE MARK is a tensor that only this layout has */
    /* gate and up, each (n_experts, width, dim), and down (n_experts, dim, width) */
    void (*bind)(Loader *load, Layer *l, const char *module, int width, bool bias);
} ExpertLayout;
extern const ExpertLayout experts_in_turn;  /* gpt-oss's: MXFP4, gate and up of all experts in one tensor, row by row */
extern const ExpertLayout *const layouts[]; /* extensions.c */
/* Binds them in the last layout whose mark is there, or as `usual`. */
void bind_experts(Loader *load, Layer *l, const char *module, const ExpertLayout *usual, int width, bool bias);

typedef struct {                                 /* matrices that are not plain rows */
    void (*open)(Loader *load, const char *dir); /* reads and checks quantization_config */
    /* Binds a module's matrix w, whose shape is set, and sets its type. False: it is plain rows of w->type. */
    bool (*bind)(Loader *load, const char *name, Linear *w, Stored *one);
    /* Cuts rows first, first + 1, ... out of w's codes (g: of its type) or a grid, whose view is v. False: v's lines
     * are rows. */
    bool (*cut)(Loader *load, View *v, const Linear *w, Grid g, int first, int rows);
    bool (*left_out)(const Tensor *t); /* may it stay unbound, whatever the model's family? */
} Packing;
extern const Packing *const packings[]; /* the first that binds counts; extensions.c */

/* What one of several GPUs has of the model (gpus/), until the next call; NULL: they cannot share it. */
extern const Model *(*const share_of)(const Model *m, int gpu, int gpus); /* NULL: the room is not there */
uint64_t linear_bytes(const Linear *w); /* of its weights as encoded and their grids; 0 if it is absent */
/* Bytes that a decode step reads for `streams` texts of `depth` tokens each: the head and the layers' matrices, but
 * only `experts` experts of a layer, and the keys and values that each text attends to. */
uint64_t step_bytes(const Model *m, double experts, int streams, int depth);

/* Reads the config.json of the model at a path, whose weights need not be here; config: what it holds, or NULL, to be
 * deleted before the checkpoint is closed. False, and so for model_runs(): infer does not run what it describes. */
bool checkpoint_config(Checkpoint *c, cJSON **config, const char *path, Error *e);
bool model_runs(const char *path, Error *e);

/* ---- models here and at the hub: download.c, which alone knows the hub's cache ---- */

typedef struct {
    char *name, *path; /* name: ORG/NAME or ORG/NAME/FILE if its folder says so; else its path */
    uint64_t bytes;    /* of the weights that are here */
    bool complete;     /* all of it is here */
} ModelEntry;
typedef struct {
    ModelEntry *entry;
    int n;
    const char *unread; /* a folder that cannot be read, and why; or NULL */
} Models;
/* All models in ./models and the hub's cache, sorted by name, each name once. */
Models models_list(void);
void models_free(Models *list);
ModelEntry model_entry(const char *path); /* what is here of the model at a path; without name and path */
/* The path of the model that a MODEL argument means: a path, ORG/NAME, ORG/NAME@REVISION or a unique part of a name.
 * Free it. NULL: BAD_MODEL, and its text lists the models here. */
char *model_find(const char *argument, Error *e);
char *hub_cache(void);                    /* the path of the hub's cache; free it */
char *hub_folder(const char *repository); /* of ORG/NAME or ORG/NAME@REVISION in it; free it */
/* The ORG/NAME of the repository whose folder in the cache a path lies in; the folder; that of its locks; is it only a
 * part of a snapshot? Free all three. NULL: it lies elsewhere. */
char *hub_owner(const char *path, char **folder, char **locks, bool *part);
bool hub_repository(const char *name); /* may it be an ORG/NAME at the hub? */
/* Bytes free for the cache, and the nearest folder that is there, its own or one above; free it. */
uint64_t hub_room(char **folder);
/* Downloads what is missing of ORG/NAME[@REVISION] and returns the path of its folder. Ends the process if that fails,
 * or, after config.json, if infer cannot run it (unless --all is given). */
const char *hub_fetch(const char *repository);
extern const Option download_options[];
/* Asks the hub which files of ORG/NAME[@REVISION] infer reads, and returns how many of their bytes are not here. Then
 * hub_head() fetches the first n bytes of one, or all if it has fewer, and returns its size; 0: there is no such file.
 * Both end the process if they fail. */
uint64_t hub_list(const char *repository);
uint64_t hub_head(const char *name, uint64_t n, Bytes *out);
/* For doctor: does the hub answer? Says what was found of the token, and how the hub answers; with USAGE, neither. */
bool hub_check(char token[300], char answer[400], Error *e);

/* ---- the engine: one model on one backend ---- */

typedef struct {
    const Backend *backend;
    const Model *model;
    void *state;
    int context;     /* tokens that a text may have: as many as were requested, or as fit */
    int max_seqs;    /* of a batch */
    int step_tokens; /* of a step, or TOKENS_PER_ANSWER for each answer if that is more */
    int pages;       /* of the cache */
    Allowed allowed; /* written by the scheduler */
} Engine;

/* Is the model made for so many tokens of context? USAGE if not. */
bool model_has_context(const Model *m, int context, Error *e);
/* context 0: what the model was made for, or less if less fits. Else exactly that, or NO_ROOM. The cache has room for
 * limits.max_seqs such texts or for limits.cache tokens, or for less if less fits. Ignores limits.context. */
bool engine_open(Engine *g, const Backend *backend, const Model *m, Limits limits, int context, Error *e);
void engine_close(Engine *g);

/* ---- the scheduler: it continues many texts at once, step by step, and every command runs its texts through it ----
 * A step begins with one token for each text that is being generated, in order of arrival; but if steps of fewer texts
 * give more tokens a second, texts pause in turn. Chunks of prompts fill the rest, which grows with the number of
 * answers, so that new ones begin as fast as old ones end. Texts that begin alike share the pages of that beginning;
 * each page counts the texts that use it. When a text ends, its full pages stay in the cache; the least recently used
 * ones make room for others. When no page is left, the youngest text loses its pages, and the scheduler computes them
 * again later. That changes no result, because a draw depends only on the text, the seed and the position. */

/* Tokens of a step for each answer: its own and five of prompts, so prompts up to five times as long keep up. */
enum { TOKENS_PER_ANSWER = 6 };

typedef struct Stream Stream;
/* Gets each drawn token once, with its position and, if wanted, the logits (vocab) that it was drawn from. With
 * WANT_ALL_LOGITS it first gets the prompt's tokens from the second on. When the logits hold a NaN, the last token is
 * DREW_NAN; when `allow` gave up, DREW_NOTHING. When `last` is true, the scheduler has already removed the stream; else
 * `take` may remove it, but not at a token of the prompt. */
typedef void Take(Stream *s, size_t position, int token, const float *logits, bool last);

/* A text that the scheduler continues. Zero it and fill in the members above the empty line; leave the others alone. */
struct Stream {
    Ids tokens;        /* the prompt, followed by the tokens drawn so far */
    size_t prompt;     /* length of the prompt, at least 1 */
    size_t most;       /* the text ends at this length: more than `prompt`, at most the context + 1 */
    Sampling sampling; /* `answer` and `allowed` are the scheduler's */
    /* Sets the bits of the tokens that may come next, as in Allowed, while the GPU computes the step that draws one of
     * them; they still are what it set last in this or another stream. Takes at most about 50 ms, or sets some bits and
     * `stuck`. NULL: all may come. */
    void (*allow)(Stream *s, uint32_t *bits);
    /* Appends tokens that must come next, if that is certain: they are read at once. Called behind `allow`; or NULL. */
    void (*forced)(Stream *s, Ids *more);
    uint64_t salt; /* it shares kept pages only with texts of the same salt: 0, or its highest bit is set */
    Want want;     /* WANT_LOGITS: `take` gets the logits of drawn tokens; WANT_ALL_LOGITS: those of the prompt too */
    size_t published;           /* position of the next token that `take` gets. To skip a prompt's beginning, set it */
    const Ids *stop;            /* tokens that end it, or NULL */
    Take *take;                 /* or NULL */
    void (*reading)(Stream *s); /* before each step of scheduler_run() until a token is drawn; or NULL */
    void *owner;

    size_t reused;  /* tokens of the prompt that were in the cache */
    size_t sent;    /* tokens submitted: when the next step begins, the cache holds them (bench presets it and filed) */
    size_t filed;   /* number of its pages that others can find */
    uint64_t chain; /* CachePage.name of the last of them */
    Ids pages;
    int slot, drawing; /* drawing: draws that are not collected yet */
    bool nan;          /* a NaN ended it, or the logits of its prompt hold one */
    bool stopped;      /* a token of `stop` ended it */
    bool slow;         /* `allow` took long when it ran last */
    const char *stuck; /* why `allow` gave up, which ended it: what is said of the schema or pattern; or NULL */
    struct Rule *rule; /* of Keeping: what it keeps, or NULL; how far it is, after so many tokens */
    int state;
    size_t kept;
};

typedef struct Scheduler Scheduler;
typedef struct {
    size_t running, waiting;  /* streams */
    size_t pages, kept, idle; /* all pages; those that hold a known text; those that no stream owns */
    size_t outstanding;       /* steps */
    size_t preempted, steps;  /* so far */
    int gpus;
    double busy[MAX_GPUS]; /* (gpus) seconds that each has computed */
} SchedulerState;

/* Takes all pages of the engine. */
Scheduler *scheduler_open(Engine *g);
void scheduler_close(Scheduler *s);             /* or NULL */
void scheduler_add(Scheduler *s, Stream *t);    /* after all others */
void scheduler_remove(Scheduler *s, Stream *t); /* wherever it stands; does nothing to one that it does not have */
/* Submits the next step, if anything can be computed, and collects the step before it. Errors are the backend's. */
bool scheduler_step(Scheduler *s, Error *e);
/* Adds a stream and runs until it and all others end. USAGE: its prompt is empty. NO_ROOM: it leaves no room in the
 * context. FAILED: the logits hold a NaN. INTERRUPTED: *stop became true before the first token was drawn; after that,
 * `take` must look at it. stop may be NULL. */
bool scheduler_run(Scheduler *s, Stream *t, const volatile sig_atomic_t *stop, Error *e);
/* Runs n tokens for their logits: `take` gets the tokens from position `from` on, then one more, drawn greedily. */
bool scheduler_score(Scheduler *s, const int *ids, size_t n, size_t from, Take *take, void *owner, Error *e);
SchedulerState scheduler_state(const Scheduler *s);

/* ---- answers that keep a schema: json/ ---- */

typedef struct Rule Rule;
typedef struct Session Session;
typedef struct {
    /* What the answer to a request must keep: a schema, a pattern or choices for its text (response_format,
     * guided_json, ..., structured_outputs), strict tools, or a call that is forced, of function `name` or of any if
     * that is NULL. talk: the conversation with its tools, or NULL for a text. NULL and e->code 0: nothing. Else USAGE
     * with field, keyword and place. Any thread may call it; it takes milliseconds. */
    Rule *(*make)(const Session *m, const cJSON *request, const Conversation *talk, bool force, const char *name,
                  Error *e);
    void (*keep)(Rule *r, Stream *s, size_t begin); /* a stream, whose answer begins at this token, keeps the rule */
    /* The answer that begins behind a stream's prompt keeps the schema in a file. talk: as above. */
    bool (*keep_file)(const char *path, const Session *m, const Conversation *talk, Stream *s, Error *e);
    bool (*whole)(Stream *s); /* may its text end here? For the thread that runs the scheduler */
    void (*drop)(Rule *r);    /* for what `make` returned, and for each stream that kept it */
} Keeping;
extern const Keeping *const keeping; /* or NULL; extensions.c */

/* ---- commands ---- */

typedef struct {
    const char *name, *argument; /* argument: "MODEL", "[MODEL]" if it may be left out, or "" */
    const char *summary;
    const Option *options[5];      /* tables, and NULL */
    int (*run)(const char *model); /* returns the exit code. model: the argument, or NULL */
} Command;
extern const Command *const commands[]; /* of all rooms, as the help shows them, and NULL; extensions.c */

/* Shows models and asks for one: its number from 1, or 0. NULL without commands/; extensions.c */
extern int (*const choose)(const Models *here);

typedef struct { /* of terminal/: what helps people, and programs can do without */
    /* "did you mean X? " or "", of a word that is no option of command c, else no model here, else no command */
    const char *(*meant)(const Command *c, const Models *here, const char *word);
    const char *(*repository)(const char *text);     /* ORG/NAME[@REVISION] of a page of the hub; other texts stay */
    bool (*refuse_file)(const char *path, Error *e); /* says what a file is that is no model */
} Hints;
extern const Hints *const hints; /* or NULL; extensions.c */

/* The option of a table that has this name or, if n is 1, this letter; or NULL. */
const Option *option_find(const Option *table, const char *name, size_t n);
/* Stores an option's value. TEXT and TEXTS keep the pointer `text`, not a copy. text: NULL for a switch. USAGE. */
bool option_set(const Option *option, const char *text, Error *e);
extern const Option load_options[]; /* of commands that call session_load() */
extern const Option text_options[]; /* of commands that call session_text() */
extern const Option chat_options[]; /* of commands that use NEED_CHAT */

typedef struct {
    Sampling sampling;
    int max_tokens; /* of an answer; 0: as many as the context has room for */
    bool quiet;     /* no statistics, nothing is said of loading */
} Settings;
extern const Option settings_options[]; /* play's and /set's */

/* The parts of a session that a command needs. */
enum {
    NEED_TOKENIZER = 1,
    NEED_CHAT = 2,       /* and a chat format; an error if the model has none */
    NEED_CHECKPOINT = 4, /* config and weights */
    USE_TOKENIZER = 8    /* if there is one */
};
struct Session {
    char *dir, *name; /* its path, and its name as the user gave it */
    Tokenizer *tokenizer;
    Chat chat; /* if has_chat */
    bool has_chat;
    Error no_chat; /* why not */
    Checkpoint checkpoint;
    Engine engine;
    Scheduler *scheduler; /* of the engine */
    /* A command sets these before it opens the session: */
    Tap *tap; /* looks into each step, see infer.h; or NULL */
    void *tap_data;
    bool quiet;     /* nothing is said of loading */
    char where[64]; /* "GPU 0 (14.1 GB of 139.8 GB)" */
    double seconds; /* that loading took */
};

/* Finds a model, or the only one there is if `model` is NULL, and opens the parts in `need`. A session is static and
 * never closed: what it holds goes with the process. */
bool session_open(Session *s, const char *model, int need, Error *e);
/* Opens a model and makes token ids of -p or --ids (text_options): at least one, no more than its context. */
bool session_text(Session *s, const char *model, Ids *ids, Error *e);
/* Loads the engine, with room for limits.max_seqs texts (0: 1) of `context` tokens; 0: as many as fit. --gpu and
 * --plain (load_options) count; limits.max_tokens and .cache may be 0. */
bool session_load(Session *s, Limits limits, int context, Error *e);
/* Writes the ids of the n largest logits, largest first, and returns their number: n, or vocab if that is less. */
int likeliest(const float *logits, int vocab, int n, int *ids);

/* ---- the terminal ---- */

#define FAINT      "\033[2m"
#define RED        "\033[31m"
#define REVERSE    "\033[7m"
#define NORMAL     "\033[0m"
#define ERASE_LINE "\r\033[K"
#define WRAP_OFF   "\033[?7l" /* the terminal cuts long lines: each takes one row, which can be drawn again in place */
#define WRAP_ON    "\033[?7h"
int columns(FILE *f);                         /* of the terminal's window */
bool output_open(const char *path, Error *e); /* stdout goes to this file; a failed write will name it */
/* Writes an escape sequence if f is a terminal that understands it, and a colour only without NO_COLOR. Returns whether
 * it did. */
bool put_escape(FILE *f, const char *escape);
/* Writes a label and a text, which may come from a model or a file, as a line or more. On a terminal no escape sequence
 * in it takes effect, and a line that is too long goes on below the text. style: an escape sequence, or NULL. */
void put_text(FILE *f, const char *style, const char *label, const char *text);
/* Prints a name and a paragraph. If the window is wide enough, the paragraph begins at `column`. */
void print_row(FILE *f, const char *name, int column, const char *text);
/* Prints the text of tokens exactly; on a terminal without escape sequences, with control tokens in reverse and a line
 * break behind it. */
void print_text(const Tokenizer *t, const Ids *ids);

/* Text that arrives in parts; on a terminal it is written as put_text() writes it. */
typedef struct {
    FILE *f;           /* NULL: nothing was written */
    const char *style; /* FAINT, RED or NULL */
    char last;         /* byte of the text so far */
    /* terminal/ breaks lines between words: */
    int width, indent; /* columns of a line, 0: no breaks; spaces that begin a line behind a break */
    int column, cells; /* columns of the line so far, and of the waiting word */
    int spaces;        /* they wait in front of the word; a break takes their place */
    Bytes word;
} Wrap;
Wrap wrap_on(FILE *f, const char *style);
void wrap_text(Wrap *w, const char *text, size_t n);
void wrap_end(Wrap *w); /* ends the text with a line break, unless it ends in one */

/* ---- play ---- */

typedef struct {
    Session m;
    bool chat, loop;   /* chat: in a chat format; loop: in a terminal, for more than one prompt */
    Conversation talk; /* without a chat format: texts that follow each other */
    uint64_t answers;  /* since the seed was set; answer i, counted from 0, draws with the seed plus i */
    double bandwidth;  /* bytes a second that the model's memory can be read at; 0: unknown */
} Play;
extern Settings settings;
extern volatile sig_atomic_t interrupted; /* Ctrl+C was pressed since the last line was begun */
/* Answers the conversation, and shows the answer. Returns the exit code; a loop goes on unless the GPU failed. */
int converse(Play *p);
/* Makes the tokens that the model reads before its next answer. */
bool make_prompt(const Play *p, Ids *ids, Error *e);

typedef struct {                                       /* of terminal/ */
    int (*loop)(Play *p);                              /* asks for one question after another; the exit code */
    void (*answering)(bool on, bool loop);             /* an answer begins to be written, or has ended */
    void (*leave)(void);                               /* before the process ends inside the loop */
    void (*wrap)(Wrap *w, const char *text, size_t n); /* writes text that is safe for a terminal */
    /* What to do in a full context; a question without any answer is taken back. */
    void (*full)(Play *p, bool answered, Error *e);
    const char *(*cure)(bool limit); /* what to do without an answer. limit: it met the one of tokens */
    /* Has the model an effort to choose, and is this a date? Both or NULL. USAGE. */
    bool (*settings)(const Session *s, const char *effort, const char *date, Error *e);
    void (*row)(FILE *f, const char *name, int column, const char *text); /* as print_row() */
    int (*ask)(const char *question);                                     /* 'y', 'n' or, if nobody is there, 0 */
    void (*fit)(FILE *f, Bytes *line); /* leaves of "a · b · c" what the window has room for, less a column */
    void (*bar)(FILE *f, int cells, const double *part, int n); /* n parts of a whole of 1, at most 3 */
    /* Draws a line in place: how much is done, 0 to 1, and of what. */
    void (*progress)(FILE *f, double done, const char *what);
    void (*loading)(uint64_t done, uint64_t total); /* Limits.progress */
    void (*reading)(Stream *t); /* Stream.reading: how much of the prompt the model has read; NULL: ends that */
} Terminal;
extern const Terminal *const terminal; /* or NULL: play reads lines with getline; extensions.c */

#endif
