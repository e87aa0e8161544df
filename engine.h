/* engine.h: one model on one backend, the pages of its key/value cache and the sequences that own them. Texts become
 * batches here; the server and the chat loop stand on this file and never see a Batch. */
#ifndef ENGINE_H
#define ENGINE_H

#include "infer.h"

#include <signal.h>

typedef struct {
    const Backend *backend;
    const Model *model;
    void *state;
    int context;    /* positions that a sequence may have: what was asked for, or what fits */
    int max_tokens; /* of a batch */
    Ids free_pages;
} Engine;

/* context 0: as much as the model was made for and memory holds; otherwise exactly that or NO_ROOM. The cache has room
 * for limits.max_seqs such sequences, or for as many as fit. limits.context is ignored. */
bool engine_open(Engine *g, const Backend *backend, const Model *m, Limits limits, int context, Error *e);
void engine_close(Engine *g);

/* A text whose keys and values lie in the cache. Zero it, give it a slot of its own, free its pages at the end. */
typedef struct {
    int slot;
    Ids tokens; /* what the cache holds, position by position */
    Ids pages;
} Sequence;
/* Forgets all but the first n tokens and gives unneeded pages back. */
void sequence_rewind(Engine *g, Sequence *s, size_t n);
void sequence_free(Engine *g, Sequence *s);
/* Submits n tokens (at most g->max_tokens) behind those of the sequence, which then has them. */
bool sequence_submit(Engine *g, Sequence *s, const int *ids, size_t n, Want want, const Sampling *how, Error *e);

/* The same, and waits for it. FAILED if the logits hold a NaN. */
bool sequence_run(Engine *g, Sequence *s, const int *ids, size_t n, Want want, const Sampling *how, Result *r,
                  Error *e);

/* An answer being written. While the host handles one token, the backend already computes the next. */
typedef struct {
    Engine *engine;
    Sequence *sequence;
    Sampling sampling;
    size_t prompt; /* tokens */
    size_t reused; /* of them were in the cache */
    bool waiting;  /* a step is outstanding */
} Generation;

/* Makes `ids` the sequence's text, keeping what it shares with it, and starts an answer. Stops with INTERRUPTED between
 * two chunks when *stop becomes true. NO_ROOM if the prompt leaves no position free. */
bool generation_begin(Generation *w, Engine *g, Sequence *s, const int *ids, size_t n, const Sampling *how,
                      const volatile sig_atomic_t *stop, Error *e);
/* The next token; DREW_NOTHING when the context is full. FAILED if the logits hold a NaN. */
bool generation_next(Generation *w, int *token, Error *e);
/* Ends it at any point; the sequence then holds the prompt and every token handed out, but for the last if the context
 * is full. */
void generation_end(Generation *w);

#endif
