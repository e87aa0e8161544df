/* host.h: what the commands of infer share: the options of the command line, and the model that a command stands on. */
#ifndef HOST_H
#define HOST_H

#include "chat.h"
#include "engine.h"
#include "model.h"
#include "tokenizer.h"

/* What computes: infer.cu, or tests/reference.c. */
extern const Backend *const backend;

enum { MOST_VALUES = 64 };
typedef struct { /* whole numbers like 1,4,16 */
    int n, value[MOST_VALUES];
} Numbers;
typedef struct { /* texts of an option that may be repeated */
    int n;
    const char *text[MOST_VALUES];
} Texts;

/* The arguments of a command. What it does not take is NULL, 0 or false. */
typedef struct {
    const char *model; /* the argument: MODEL or REPO; NULL: none was given */
    const char *prompt, *file, *output, *ids, *system, *effort, *date, *revision, *token_file;
    Texts stop, include, exclude;
    Numbers prompts, depths, streams; /* of bench */
    int context, gpu, max_tokens, top, stride, tokens, repeats, jobs;
    bool plain, all, json, jsonl, special, as_ids, hide_thinking, raw, dry_run;
    Sampling sampling;
} Options;

/* Sets a number that /set may change by its option's name. */
bool setting_set(Options *o, const char *name, const char *value, Error *e);
/* Is it UTF-8? `what` is it in the message. */
bool check_text(const char *what, const char *text, size_t n, Error *e);

/* The commands, which return the exit code. */
int play(const Options *o), download(const Options *o), list(const Options *o), rm(const Options *o);
int inspect(const Options *o), doctor(const Options *o), bench(const Options *o), perplexity(const Options *o);

/* The model that a command works with, as far as it needs one. */
enum {
    NEED_TOKENIZER = 1,
    NEED_CHAT = 2,       /* and its chat format; it is an error if it has none */
    NEED_CHECKPOINT = 4, /* config and weights */
    NEED_SHAPES = 8,     /* the same, but where there are no weights config.json is enough */
    NEED_ENGINE = 16,    /* and loaded, with a context of o->context and as many sequences as o->streams says */
    USE_TOKENIZER = 32   /* only if it is there */
};
typedef struct {
    char *dir, *name; /* where it is, and as the user calls it */
    Tokenizer *tokenizer;
    Chat chat; /* if has_chat */
    bool has_chat;
    Error no_chat; /* else why not */
    Checkpoint checkpoint;
    Engine engine;
    char where[64]; /* "GPU 0 (14.1 GB of 139.8 GB)" */
    double seconds; /* that loading took */
} Session;

/* Finds o->model, or the only one there is, and opens what it needs, NEED_... Close it also if it fails. */
bool session_open(Session *s, const Options *o, int need, Error *e);
/* Loads a model that was opened without an engine: for those who first look at it to choose a context. */
bool session_load(Session *s, const Options *o, int context, Error *e);
void session_close(Session *s);

#endif
