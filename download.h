/* download.h: what other commands need of the hub and of its cache. How that lies on disk: download.c. */
#ifndef DOWNLOAD_H
#define DOWNLOAD_H

#include "base.h"

/* The directory that a MODEL argument means, as model_find says; on a terminal a missing ORG/NAME is offered for
 * download. */
char *model_get(const char *argument, Error *e);

bool repository_valid(const char *name);           /* ORG/NAME? */
char *repository_folder(const char *name);         /* models--ORG--NAME; free it */
bool folder_remove(const char *path);              /* with all that is in it; links are not followed */
bool disk_free(const char *path, uint64_t *bytes); /* the path need not exist yet */
/* What is often found in place of a model's file, by its first bytes: "a GGUF file", ...; or NULL. */
const char *file_kind(const char *data, size_t n);

typedef struct {       /* a repository without its weights */
    char *folder;      /* temporary: config.json, the index, and each safetensors file with a hole for its data */
    uint64_t to_fetch; /* bytes that `infer download` would fetch */
} Outline;
bool outline_open(Outline *o, const char *repository, Error *e);
void outline_close(Outline *o);

typedef struct { /* for doctor */
    char endpoint[300];
    const char *token; /* where it was found, or NULL */
    bool offline;      /* HF_HUB_OFFLINE forbids to ask */
    double seconds;    /* that the answer took */
} HubState;
bool hub_state(HubState *s, Error *e);

#endif
