/* model.h: from a model directory to the Model of infer.h: config.json, the table of families, and weights bound by
 * name, dtype and shape once, so that everything after may trust them. */
#ifndef MODEL_H
#define MODEL_H

#include "infer.h"
#include "safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Model model;
    const char *family; /* its row of families[] */
    Ids stop;           /* ids that end a text, from generation_config.json and config.json */
    uint64_t bytes;     /* of all files */
    Tensors tensors;
    bool *bound;  /* (tensors.n) */
    void **owned; /* arrays converted to float, freed with the checkpoint */
    int owned_n;
} Checkpoint;

/* Opens a model directory; the weights are mapped, not read. BAD_MODEL with file, field or tensor, expected and found.
 */
bool checkpoint_open(Checkpoint *c, const char *dir, Error *e);
/* The same from config.json alone: a model of its shapes without weights (Model.made_up). */
bool checkpoint_make_up(Checkpoint *c, const char *dir, Error *e);
void checkpoint_close(Checkpoint *c);

const char *type_name(Type type);
uint64_t linear_bytes(const Linear *w); /* of its weights as encoded; 0 if it does not exist */
uint64_t model_bytes(const Model *m);   /* of all its Linears */
/* Bytes that a step reads which generates one token for each of `streams` sequences of `depth` tokens: the matrices
 * once, of a layer's experts so many, and the keys and values that each sequence sees. */
uint64_t step_bytes(const Model *m, double experts, int streams, int depth);

/* What a list shows of a directory without opening its weights. */
typedef struct {
    char *path, *name; /* name: ORG/NAME for a model of the hub's cache, else the path as people type it */
    char encoding[16], family[40];
    uint64_t bytes;
    bool complete; /* every file that it needs is here */
} ModelEntry;
/* All models that can be found: in ./models, ~/.cache/infer/models and the hub's cache, sorted by name, none twice. */
int models_list(ModelEntry **list);
void models_free(ModelEntry *list, int n);
/* The directory that a MODEL argument means: a path, ORG/NAME or a unique part of a name. Free it; NULL: BAD_MODEL with
 * what is near. */
char *model_find(const char *argument, Error *e);
/* Are config.json, tokenizer.json and all weights here? */
bool model_complete(const char *dir);
/* Appends where other tools of the hub keep their things, $HF_HOME or ~/.cache/huggingface, and where its cache is,
 * $HF_HUB_CACHE or `hub` in there. */
void hub_home(Bytes *path);
void hub_cache(Bytes *path);

#ifdef __cplusplus
}
#endif
#endif
