/* reference.h: what tests may ask of tests/reference.c beyond the border. */
#ifndef REFERENCE_H
#define REFERENCE_H

#include <stdbool.h>

/* Round to bf16 exactly where infer.cu does. Off by default: then nothing is rounded but to float between stages. */
extern bool reference_rounds;

#endif
