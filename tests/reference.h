/* reference.h: what tests may ask of tests/reference.c beyond the border. */
#ifndef REFERENCE_H
#define REFERENCE_H

#include "../infer.h"

#include <assert.h>

/* The draw at `position` from logits (vocab), as a sequence with the ids text (n) makes it: both change the logits.
 * allowed: bits as in Allowed, or NULL. DREW_NAN if a logit is NaN. */
void adjust(float *logits, int vocab, const Sampling *how, const int *text, int n, const uint32_t *allowed);
int draw(float *logits, int vocab, const Sampling *how, int position);

/* Round to bf16 what infer.cu rounds: the x of products, queries, keys and values. Not the weights, of which encodings/
 * rounds offsets, and in steps of many tokens fast/ each. Off by default: then nothing is rounded but to float between
 * stages. */
extern bool reference_rounds;

/* Decodes every row of a model: the twin does so when it opens one whose progress somebody watches. For fuzzers. */
static inline void watch_progress(uint64_t done, uint64_t total) { assert(done <= total); }
static inline void decode_all(const Model *m) {
    Error e;
    int pages = 1;
    Limits limits = {.context = PAGE, .max_seqs = 1, .max_tokens = 1, .progress = watch_progress};
    void *state = reference.open(m, &limits, &pages, &e);
    assert(state);
    reference.close(state);
}

#endif
