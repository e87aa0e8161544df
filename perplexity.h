/* perplexity.h: the command `infer perplexity`. */
#ifndef PERPLEXITY_H
#define PERPLEXITY_H

#include "infer.h"

extern const char perplexity_help[];
int perplexity(int argc, char **argv, const Backend *backend); /* returns the exit code */

#endif
