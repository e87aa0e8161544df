/* streams.h: sequences of different length through one model of a backend, for the tests of batches, chunks and
 * rewinding. */
#ifndef STREAMS_H
#define STREAMS_H

#include "check.h"

enum { STREAMS = 17, LONGEST = 100, PAGES_EACH = 2 };

static struct {
    const Backend *backend;
    const char *fixture;
    Checkpoint c;
    void *state;
    size_t vocab;
    int id[STREAMS][LONGEST], length[STREAMS];
} streams;

static void open_streams(const Backend *backend, const char *fixture) {
    Error e;
    uint64_t random = 1;
    int pages = STREAMS * PAGES_EACH;
    char path[100];
    snprintf(path, sizeof path, "tests/fixtures/%s", fixture);
    streams.backend = backend, streams.fixture = fixture;
    must(checkpoint_open(&streams.c, path, &e), &e);
    Limits limits = {.context = PAGES_EACH * PAGE, .max_seqs = STREAMS, .max_tokens = STREAMS * LONGEST};
    streams.state = backend->open(&streams.c.model, &limits, &pages, &e);
    must(streams.state, &e);
    streams.vocab = (size_t)streams.c.model.vocab;
    for (int s = 0; s < STREAMS; s++) {
        streams.length[s] = 1 + (s * 37 + 69) % LONGEST;
        fill_random(streams.id[s], LONGEST, streams.vocab, &random);
    }
}

static void close_streams(void) {
    streams.backend->close(streams.state);
    checkpoint_close(&streams.c);
}

/* Feeds streams which[0 .. n) from position `from` on, each step `chunk` tokens of each (0: all; -1: 1, 2, 3, ... by
 * stream), and gives the logits of each, (length, vocab). A stream lies in pages of its own, not in their order. */
static void feed(const int *which, int n, int chunk, int from, float **logits) {
    Error e;
    Result r;
    int done[STREAMS], first[STREAMS + 1], slot[STREAMS], start[STREAMS], token[STREAMS * LONGEST],
        page[STREAMS * PAGES_EACH], row[STREAMS];
    Sampling how[STREAMS];
    Want want[STREAMS];
    for (int i = 0; i < n; i++) done[i] = from;
    for (bool more = true; more;) {
        Batch b = {.max_pages = PAGES_EACH,
                   .slot = slot,
                   .first = first,
                   .token = token,
                   .start = start,
                   .page = page,
                   .sampling = how,
                   .want = want};
        first[0] = 0;
        for (int i = 0; i < n; i++) {
            int s = which[i], rest = streams.length[s] - done[i],
                size = chunk < 0 ? i % 7 + 1
                       : chunk   ? chunk
                                 : rest,
                at = b.seqs;
            if (size > rest) size = rest;
            if (!size) continue;
            for (int p = 0; p < PAGES_EACH; p++)
                page[at * PAGES_EACH + p] = (s * PAGES_EACH + p) * 5 % (STREAMS * PAGES_EACH);
            memcpy(token + first[at], streams.id[s] + done[i], (size_t)size * sizeof *token);
            slot[at] = s, start[at] = done[i], how[at] = greedy, want[at] = WANT_ALL_LOGITS, row[at] = i;
            done[i] += size;
            first[at + 1] = first[at] + size;
            b.seqs++;
        }
        more = b.seqs;
        if (!more) break;
        must(streams.backend->submit(streams.state, &b, &e) && streams.backend->collect(streams.state, &r, &e), &e);
        check(r.rows == first[b.seqs], "%d rows for %d tokens", r.rows, first[b.seqs]);
        for (int at = 0; at < b.seqs; at++)
            memcpy(logits[row[at]] + (size_t)start[at] * streams.vocab, r.logits + (size_t)first[at] * streams.vocab,
                   (size_t)(first[at + 1] - first[at]) * streams.vocab * 4);
    }
}

/* For the logits of a stream. */
static float *room(void) { return allocate(LONGEST * streams.vocab * 4); }

#endif
