/* download.h: what other commands need of the hub. How its cache lies on disk: download.c. */
#ifndef DOWNLOAD_H
#define DOWNLOAD_H

#include "base.h"

/* The directory that a MODEL argument means, as model_find says; on a terminal a missing ORG/NAME is offered for
 * download. */
char *model_get(const char *argument, Error *e);

/* A repository without its weights: a folder of its name with config.json, the index, and each safetensors file with a
 * hole for its data. It lies in a temporary folder, removed at exit, which becomes the working directory. to_fetch:
 * bytes that `infer download` would fetch. Ends the process if that fails. */
const char *outline_open(const char *repository, uint64_t *to_fetch);

/* For doctor: does the hub answer? Says what was found of the token, and how the hub answers. */
bool hub_check(char token[300], char answer[400], Error *e);

#endif
