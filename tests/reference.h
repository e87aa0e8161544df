/* reference.h: what tests may ask of tests/reference.c beyond the border. */
#ifndef REFERENCE_H
#define REFERENCE_H

#include "../sampling.h"

#include <stdbool.h>

/* Round to bf16 exactly where infer.cu does. Off by default: then nothing is rounded but to float between stages. */
extern bool reference_rounds;

/* The token for `position`, drawn from logits (vocab), which are changed; seen[i]: token i stands in the text, or NULL.
 */
int reference_draw(float *logits, int vocab, const Sampling *how, int position, const bool *seen);

#endif
