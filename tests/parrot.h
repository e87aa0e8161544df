/* parrot.h: the tokenizer of the fixture of that name, or another in its place. */
#ifndef PARROT_H
#define PARROT_H

#include "../tokenizer.h"

#include <string.h>

/* A JsonFile: tokenizer.json is `file` or, if that is NULL, the parrot's. */
static inline cJSON *parrot_json(const void *file, const char *name, Error *e) {
    *e = (Error){0};
    if (strcmp(name, "tokenizer.json")) return NULL;
    return file ? cJSON_Duplicate(file, true) : json_read("tests/fixtures/parrot/tokenizer.json", 1 << 20, e);
}

static inline Tokenizer *parrot_open(const cJSON *file, Error *e) {
    return tokenizer_open("tokenizer.json", parrot_json, file, e);
}

#endif
