/* random.h: models of random weights, for `bench` and tests. */
#ifndef RANDOM_H
#define RANDOM_H

#include "host.h"

/* Opens the model of a folder's config.json, with random weights in `encoding`: the name of one of types[], or Q4_K_M,
 * a mixture; NULL: BF16. Routers are always BF16; embedding and head are BF16 too, unless blocks of the type hold their
 * scales, as GGUF's do. BAD_MODEL; NO_ROOM; USAGE: there is no such encoding. */
bool random_weights_open(Checkpoint *c, const char *dir, const char *encoding, Error *e);
/* Writes the weights of the model opened last; before that its matrices are zeros. */
void random_weights_fill(void);

#endif
