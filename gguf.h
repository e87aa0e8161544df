/* gguf.h: GGUF files (github.com/ggml-org/ggml, docs/gguf.md) as the JSON that the hub's files would hold, so that
 * everything behind knows one kind of model. */
#ifndef GGUF_H
#define GGUF_H

#include "host.h"

/* Is the path a file whose name ends in .gguf? */
bool gguf_named(const char *path);
/* What stands before the data of part i of n, as in safetensors: an entry for each tensor, of experts one for each,
 * under the hub's name. All other keys are in __metadata__; later parts get that of the first. *data is where the data
 * begins; every tensor of the file begins at a multiple of *alignment. NULL: BAD_MODEL. */
cJSON *gguf_header(const TensorFile *f, int i, int n, const cJSON *metadata, size_t *data, size_t *alignment, Error *e);
/* What config.json would say. NULL: BAD_MODEL with a key or an architecture that infer does not know. */
cJSON *gguf_config(const Tensors *t, const char *path, Error *e);
/* The metadata alone. */
cJSON *gguf_metadata(const char *path, Error *e);

#endif
