/* gguf.h: turns GGUF files (github.com/ggml-org/ggml, docs/gguf.md) into the JSON that the hub's files would hold, so
 * that the rest of the program knows one kind of model. */
#ifndef GGUF_H
#define GGUF_H

#include "host.h"

/* Is there a file at this path, and does its name end in .gguf? */
bool gguf_named(const char *path);
/* Turns the header of part i of n into one of safetensors: an entry under the hub's name for each tensor, or for each
 * expert or head in it. All other keys are in __metadata__; parts after the first need the first one's as `metadata`.
 * *data: where the data begins; *alignment: every tensor begins at a multiple of it. NULL: BAD_MODEL. */
cJSON *gguf_header(const TensorFile *f, int i, int n, const cJSON *metadata, size_t *data, size_t *alignment, Error *e);
/* The config.json of the model. NULL: BAD_MODEL, with the key or architecture that infer does not know. */
cJSON *gguf_config(const Tensors *t, const char *path, Error *e);

#endif
