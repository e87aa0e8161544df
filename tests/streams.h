/* streams.h: sequences of different length through one model of a backend, for the tests of batches, chunks and
 * rewinding. */
#ifndef STREAMS_H
#define STREAMS_H

#include "check.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { STREAMS = 17, LONGEST = 100, PAGES_EACH = 2 };

static struct {
    const Backend *backend;
    const char *fixture;
    Checkpoint c;
    void *state;
    Allowed allowed;
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
    Limits limits = {.context = PAGES_EACH * PAGE, .max_seqs = STREAMS, .max_tokens = STREAMS * LONGEST, CARDS};
    limits.allowed = &streams.allowed;
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

/* Lets a slot draw one token only, or with -1 tokens at random, and says so to the draw that waits for `number`. */
static void allow(int slot, int only, uint64_t number, uint64_t *random) {
    const size_t words = (streams.vocab + 31) / 32;
    uint32_t *bits = streams.allowed.bits + (size_t)slot * words;
    for (size_t i = 0; i < words; i++) {
        int halves[2];
        fill_random(halves, 2, 1 << 16, random);
        bits[i] = (uint32_t)halves[0] << 16 | (uint32_t)halves[1];
    }
    if (only >= 0) memset(bits, 0, words * 4), bits[only / 32] = 1u << only % 32;
    __atomic_store_n(streams.allowed.ready + slot, number, __ATOMIC_RELEASE);
}
static void *allow_late(void *only) {
    usleep(300000);
    return allow(3, (int)(intptr_t)only, 2, &(uint64_t){1}), NULL;
}

/* A draw waits until it is told which tokens it may draw, after submit or later, but no longer than a second. Another
 * draw of the same step is not changed. */
static void draws_wait(void) {
    const int tokens[2] = {5, 6}, first[3] = {0, 1, 2}, slot[2] = {3, 4}, start[2] = {0}, page[2] = {0, 1};
    const Want want[2] = {WANT_TOKEN, WANT_LOGITS};
    Sampling how[2] = {greedy, greedy};
    Batch b = {2, 1, slot, first, tokens, start, page, how, want};
    Result r;
    Error e;
    pthread_t thread;
    struct timespec begun, ended;
    must(streams.backend->submit(streams.state, &b, &e) && streams.backend->collect(streams.state, &r, &e), &e);
    const int free[2] = {r.token[0], r.token[1]}, other = (free[0] + 9) % (int)streams.vocab;
    for (uint64_t number = 1; number <= 2; number++) {
        how[0].allowed = number;
        must(streams.backend->submit(streams.state, &b, &e), &e);
        if (number == 1) allow(3, other, 1, &(uint64_t){1});
        if (number == 2) check(!pthread_create(&thread, NULL, allow_late, (void *)(intptr_t)free[1]), "no thread");
        must(streams.backend->collect(streams.state, &r, &e), &e);
        check(r.token[0] == (number == 1 ? other : free[1]) && r.token[1] == free[1], "draw %d: tokens %d and %d",
              (int)number, r.token[0], r.token[1]);
    }
    pthread_join(thread, NULL);
    how[0].allowed = 3;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    must(streams.backend->submit(streams.state, &b, &e), &e);
    check(!streams.backend->collect(streams.state, &r, &e) && e.code == GPU_FAULT,
          "a draw that waits in vain ends well");
    clock_gettime(CLOCK_MONOTONIC, &ended);
    check(ended.tv_sec - begun.tv_sec + (ended.tv_nsec - begun.tv_nsec) / 1e9 >= 1, "it waited less than a second");
}

/* For the logits of a stream. */
static float *room(void) { return allocate(LONGEST * streams.vocab * 4); }

#endif
