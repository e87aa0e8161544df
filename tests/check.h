/* check.h: what unit.c and gpu.c share: PROGRAM [--long] [NAME]... runs the tests of these names, or all, one line a
 * test; traces of a backend stage by stage. */
#ifndef CHECK_H
#define CHECK_H

#include "../host.h"
#include "reference.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *test;
static char why[1000]; /* the first failure of the running test, or "skip " and the reason */
static int failures;
static char **names;  /* of the tests to run; none: all */
static bool thorough; /* --long: all of what takes a program with sanitizers minutes */

static inline void read_arguments(char **argv) {
    thorough = argv[1] && !strcmp(argv[1], "--long");
    names = argv + 1 + thorough;
}

static inline void check(bool ok, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void check(bool ok, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (!ok && !*why) vsnprintf(why, sizeof why, format, args);
    va_end(args);
}

/* Says where a long test is. */
static inline void at(const char *where) {
    printf("at %s\n", where);
    fflush(stdout);
}

static inline void run(const char *name, void (*body)(void)) {
    char **found = names;
    while (*found && strcmp(*found, name)) found++;
    if (*names && !*found) return;
    test = name;
    *why = 0;
    body();
    if (!strncmp(why, "skip ", 5))
        printf("skip %s: %s\n", name, why + 5);
    else if (*why)
        printf("FAIL %s: %s\n", name, why), failures++;
    else
        printf("ok %s\n", name);
    fflush(stdout);
}

static inline void must(bool ok, const Error *e) {
    if (ok) return;
    printf("FAIL %s: %s\n", test, e->text);
    exit(1);
}

static const Sampling greedy = {.top_p = 1, .penalty = 1};

static inline double error_of(const float *x, const float *golden, size_t n) { /* |x - golden| / |golden| */
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)x[i] - (double)golden[i]) * ((double)x[i] - (double)golden[i]);
        size += (double)golden[i] * (double)golden[i];
    }
    return difference == 0 ? 0 : sqrt(difference / size);
}

static inline int largest(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* n token ids of a vocabulary, the next of what `random` began with. */
static inline void fill_random(int *ids, int n, size_t vocab, uint64_t *random) {
    for (int i = 0; i < n; i++) {
        *random = *random * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int)((*random >> 33) % vocab);
    }
}

/* The numbers of a JSON array, which must be n. */
static inline float *numbers(const cJSON *array, int n) {
    float *out = allocate((size_t)n * sizeof *out);
    check(cJSON_GetArraySize(array) == n, "an array of %d, not %d", cJSON_GetArraySize(array), n);
    int i = 0;
    const cJSON *value;
    cJSON_ArrayForEach(value, array) if (i < n) out[i++] = (float)value->valuedouble;
    return out;
}

/* ---- traces ---- */

typedef struct { /* what the taps gave under one name, chunk after chunk */
    char name[64];
    Bytes values; /* floats */
    int cols;
} Stage;

typedef struct {
    Stage stage[400];
    int stages;
} Trace;

static inline Stage *trace_stage(Trace *t, const char *name) {
    for (int i = 0; i < t->stages; i++)
        if (!strcmp(t->stage[i].name, name)) return t->stage + i;
    Stage *s = t->stage + t->stages++;
    snprintf(s->name, sizeof s->name, "%s", name);
    return s;
}

static inline void trace_tap(void *data, const char *stage, int layer, const float *values, int rows, int cols) {
    char name[64];
    if (!strcmp(stage, "logits"))
        snprintf(name, sizeof name, "logits");
    else
        snprintf(name, sizeof name, "layers.%d.%s", layer, stage);
    Stage *s = trace_stage(data, name);
    s->cols = cols;
    bytes_add(&s->values, values, (size_t)rows * (size_t)cols * sizeof *values);
}

static inline const float *stage_values(const Stage *s) { return (const float *)(const void *)s->values.data; }
static inline size_t stage_size(const Stage *s) { return s->values.n / sizeof(float); }

/* The error of a stage, of `cols` numbers a row: the root of the mean square of its rows' errors, so each counts alike.
 * The first token of many models has activations a thousand times those of others ("Massive Activations", Sun et al.,
 * 2024): the error of all numbers together would be that of one, which rounding may leave next to nothing by luck. */
static inline double stage_error(const Stage *s, const Stage *golden) {
    const size_t cols = (size_t)s->cols, rows = stage_size(s) / cols;
    double sum = 0;
    for (size_t r = 0; r < rows; r++)
        sum += pow(error_of(stage_values(s) + r * cols, stage_values(golden) + r * cols, cols), 2);
    return sqrt(sum / (double)rows);
}

static inline void trace_free(Trace *t) {
    for (int i = 0; i < t->stages; i++) bytes_free(&t->stage[i].values);
    *t = (Trace){0};
}

/* How many different experts the last `rows` tokens chose, of all layers together. */
static inline uint64_t trace_experts(const Trace *t, size_t rows) {
    uint64_t n = 0;
    for (int i = 0; i < t->stages; i++) {
        const Stage *s = t->stage + i;
        if (!strstr(s->name, ".experts")) continue;
        size_t choices = rows * (size_t)s->cols;
        const float *chosen = stage_values(s) + stage_size(s) - choices;
        for (size_t a = 0; a < choices; a++) {
            size_t b = 0;
            while (b < a && chosen[b] != chosen[a]) b++;
            n += b == a;
        }
    }
    return n;
}

static bool plain; /* Limits.plain of every engine that a test opens */
#ifdef ROOM_gpus
static int cards = 1; /* and Limits.gpus */
static bool one_gpu;  /* which the cards are, where there are no more */
#define CARDS .gpus = (const char *[]){"1", one_gpu ? "0,0" : "0,1", "3", "4", "5", "6", "7", "8"}[cards - 1]
#else
#define CARDS .gpus = NULL
#endif

/* Runs tokens at .. end - 1 of a text behind those before them, which the cache holds. Nothing else may use the engine:
 * the text has the pages 0, 1, ... */
static inline Result run_text(Engine *g, const int *ids, size_t at, size_t end, Want want, const Sampling *how) {
    int slot = 0, first[2] = {0, (int)(end - at)}, start = (int)at, pages = (int)((end + PAGE - 1) / PAGE);
    int *page = allocate((size_t)pages * sizeof *page);
    Batch b = {1, pages, &slot, first, ids + at, &start, page, how, &want};
    Result r;
    Error e;
    for (int i = 0; i < pages; i++) page[i] = i;
    must(g->backend->submit(g->state, &b, &e) && g->backend->collect(g->state, &r, &e), &e);
    free(page);
    return r;
}

/* What the model writes behind the first `prompt` of n ids, one token a step. */
static inline void write_text(Engine *g, int *ids, size_t prompt, size_t n, const Sampling *how) {
    for (size_t at = 0; at + 1 < n; at++) {
        Result r = run_text(g, ids, at, at + 1, at + 1 < prompt ? WANT_NOTHING : WANT_TOKEN, how);
        if (at + 1 >= prompt) ids[at + 1] = r.token[0];
    }
}

/* Runs a prompt in chunks (0: in one) and records every stage and the logits of every token. */
static inline void trace_run(Trace *t, const Backend *backend, const Model *m, const int *ids, size_t n, size_t chunk) {
    Error e;
    Engine g;
    if (!chunk) chunk = n;
    Limits limits = {.max_seqs = 1, .max_tokens = (int)chunk, .plain = plain, .tap = trace_tap, .tap_data = t, CARDS};
    must(engine_open(&g, backend, m, limits, 0, &e), &e);
    for (size_t at = 0; at < n; at += chunk) {
        size_t now = n - at < chunk ? n - at : chunk;
        uint64_t read = backend->experts_read(g.state);
        Result r = run_text(&g, ids, at, at + now, WANT_ALL_LOGITS, &greedy);
        check(r.rows == (int)now, "%d rows of logits for %zu tokens", r.rows, now);
        read = backend->experts_read(g.state) - read;
        check(read == trace_experts(t, now), "%llu experts were read, %llu chosen", (unsigned long long)read,
              (unsigned long long)trace_experts(t, now));
    }
    engine_close(&g);
}

/* A fixture's golden as a trace, its ids, and the model. */
static inline void trace_golden(const char *fixture, Trace *t, Ids *ids, Checkpoint *c) {
    char path[200];
    Error e;
    Tensors golden;
    snprintf(path, sizeof path, "tests/fixtures/%s/golden.safetensors", fixture);
    must(tensors_open(&golden, NULL, path, &e), &e);
    *strrchr(path, '/') = 0;
    must(checkpoint_open(c, path, &e), &e);
    for (int i = 0; i < golden.n; i++) {
        const Tensor *tensor = golden.tensor + i;
        for (size_t at = 0; at < tensor->size; at += 4) {
            int32_t whole;
            float value;
            memcpy(&whole, tensor->data + at, 4);
            memcpy(&value, tensor->data + at, 4);
            if (!strcmp(tensor->name, "ids")) {
                ids_add(ids, whole);
                continue;
            }
            if (!strcmp(tensor->dtype, "I32")) value = (float)whole;
            bytes_add(&trace_stage(t, tensor->name)->values, &value, sizeof value);
        }
    }
    tensors_close(&golden);
}

/* Models of random weights. They need commands/, but not its commands: a build without rooms tests with them, too. */
#if __has_include("commands/random.h")
#include "commands/random.h"
enum { RANDOM_WEIGHTS = true };
#else
enum { RANDOM_WEIGHTS = false };
static inline bool random_weights_open(Checkpoint *c, const char *dir, const char *encoding, Error *e) { return false; }
static inline void random_weights_fill(void) {}
#endif
static inline bool skips_random_weights(void) {
    return RANDOM_WEIGHTS ? false : (check(false, "skip needs commands/"), true);
}

static const char *const fixtures[] = {
    "true_heads", "odd",
#ifdef ROOM_families
    "llama3",     "llama_bias", "qwen3",       "mistral",     "mixtral",         "qwen2", "qwen3_moe",
    "gemma2",     "gemma3",     "deepseek_v3", "deepseek_v2", "deepseek_v2_lite"
#endif
};
enum { FIXTURES = sizeof fixtures / sizeof *fixtures };

#endif
