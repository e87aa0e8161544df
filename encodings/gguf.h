/* gguf.h: what vocabulary.c makes of a GGUF file's metadata. The JSON shares texts with it: free the JSON first. */
#ifndef GGUF_H
#define GGUF_H

#include "base.h"

/* tokenizer.json. NULL: BAD_MODEL, with the path and the key whose value is not known. */
cJSON *gguf_tokenizer(const cJSON *metadata, const char *path, Error *e);
/* tokenizer_config.json: the chat template, and the token that begins a text. */
cJSON *gguf_tokenizer_config(const cJSON *metadata);

#endif
