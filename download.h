/* download.h: the command that fetches models from the hub, and what others need of it. How they lie on disk: blob.h.
 * Hashes and commits are checked hexadecimal digits, file names checked relative paths: nothing else that a server says
 * is ever part of a path. */
#ifndef DOWNLOAD_H
#define DOWNLOAD_H

#include "hub.h"

/* What a MODEL argument means, as model_find says; on a terminal a missing ORG/NAME is offered for download. */
char *model_get(const char *argument, Error *e);

/* Is this the name of a repository, ORG/NAME? */
bool repository_valid(const char *name);
/* models--ORG--NAME; free it. */
char *repository_folder(const char *name);
/* "there are B free" for a path that need not exist yet. */
bool disk_free(const char *path, uint64_t *bytes);

/* A repository without its weights: config.json, the index and each safetensors file's header in the new folder
 * *folder, the files with their true size and holes for data. */
typedef struct {
    char *folder;      /* to be removed with folder_remove */
    uint64_t to_fetch; /* bytes that `infer download` would fetch */
} Outline;
bool outline_open(Outline *o, const char *repository, Error *e);
void outline_close(Outline *o);
bool folder_remove(const char *path); /* with all that is in it; links are not followed */

#endif
