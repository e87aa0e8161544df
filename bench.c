/* bench.c: how fast is it? Prompts and generation at several depths and numbers of streams. A step that generates is
 * limited by the memory it reads: its bytes are counted from the model's own tensors and its time is compared with a
 * flat read of as many bytes, taken in the same run on the same card. */
#include "host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_STREAMS = 256, MOST_REPEATS = 100 };

typedef struct {
    const Options *o;
    bool json;
    Session model;
    int rows; /* printed so far */
} Bench;

/* One figure: `count` tokens took these seconds. */
typedef struct {
    const char *kind; /* "prompt" or "generate" */
    int count, depth, streams;
    double experts; /* that a step reads of a layer, on average */
    uint64_t bytes; /* of a step; 0: a prompt */
    double flat;    /* seconds of a flat read of as many */
    double seconds[MOST_REPEATS];
    Phase phase[MOST_PHASES]; /* of the last step */
    int phases;
} Figure;

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_figure(Bench *b, Figure *f) {
    int n = b->o->repeats;
    qsort(f->seconds, (size_t)n, sizeof *f->seconds, ascending);
    double total = (double)f->count * f->streams, median = (f->seconds[(n - 1) / 2] + f->seconds[n / 2]) / 2,
           step = median / f->count;
    double speed = total / median, least = total / f->seconds[n - 1], most = total / f->seconds[0];
    double percent = f->flat / step * 100;
    bool prompt = !f->bytes;
    if (b->json) {
        printf("%s\n  {\"kind\": \"%s\", \"tokens\": %d, \"depth\": %d, \"streams\": %d, \"tokens_per_second\": %.2f, "
               "\"least\": "
               "%.2f, \"most\": %.2f, \"seconds\": %.6f",
               b->rows++ ? "," : "", f->kind, f->count, f->depth, f->streams, speed, least, most, median);
        if (!prompt)
            printf(", \"experts\": %.2f, \"step_bytes\": %llu, \"bytes_per_second\": %.4g, \"flat_seconds\": %.8f, "
                   "\"percent_of_flat\": %.2f",
                   f->experts, (unsigned long long)f->bytes, (double)f->bytes / step, f->flat, percent);
        for (int i = 0; i < f->phases; i++)
            printf("%s\"%s\": %.3g", i ? ", " : ", \"phases\": {", f->phase[i].name, f->phase[i].seconds);
        printf(f->phases ? "}}" : "}");
        return;
    }
    if (!b->rows++)
        printf("| test | depth | streams | tok/s | least-most | ms | GB a step | GB/s | %% of flat |\n"
               "|---|---:|---:|---:|---:|---:|---:|---:|---:|\n");
    printf("| %s %d | %d | %d | %.1f | %.1f-%.1f | %.3f | ", f->kind, f->count, f->depth, f->streams, speed, least,
           most, (prompt ? median : step) * 1e3);
    if (prompt)
        puts("| | |");
    else if (f->flat > 0)
        printf("%.3f | %.0f | %.1f |\n", (double)f->bytes / 1e9, (double)f->bytes / step / 1e9, percent);
    else
        printf("%.3f | %.0f | |\n", (double)f->bytes / 1e9, (double)f->bytes / step / 1e9);
}

static int random_token(const Model *m, unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return (int)((*state >> 8) % (unsigned)m->vocab);
}

/* A prompt of f->count random tokens, to its first token. */
static bool measure_prompt(Bench *b, Figure *f, Error *e) {
    const Sampling how = {.top_p = 1, .penalty = 1, .temperature = b->o->sampling.temperature};
    const Model *m = b->model.engine.model;
    int n = f->count, token;
    unsigned state = 1;
    Ids ids = {0};
    Sequence s = {0};
    bool ok = true;
    for (int i = 0; i < n; i++) ids_add(&ids, random_token(m, &state));
    for (int r = -1; r < b->o->repeats && ok; r++) { /* one to warm up */
        Generation w;
        sequence_rewind(&b->model.engine, &s, 0);
        double begin = seconds();
        ok = generation_begin(&w, &b->model.engine, &s, ids.data, ids.n, &how, NULL, e) &&
             generation_next(&w, &token, e);
        if (r >= 0) f->seconds[r] = seconds() - begin;
        if (ok) generation_end(&w);
    }
    sequence_free(&b->model.engine, &s);
    ids_free(&ids);
    return ok;
}

/* f->count steps of f->streams streams behind f->depth tokens; the next step is submitted before the last is read. */
static bool generate_once(Bench *b, Figure *f, int *page, int max_pages, double *took, Error *e) {
    int n = f->streams, slot[MOST_STREAMS], first[MOST_STREAMS + 1], token[MOST_STREAMS], start[MOST_STREAMS];
    Sampling how[MOST_STREAMS];
    Want want[MOST_STREAMS];
    unsigned state = 1;
    for (int i = 0; i < n; i++) {
        slot[i] = i, first[i] = i, start[i] = f->depth, want[i] = WANT_TOKEN;
        token[i] = random_token(b->model.engine.model, &state);
        how[i] = (Sampling){.top_p = 1, .penalty = 1, .temperature = b->o->sampling.temperature, .seed = (uint64_t)i};
    }
    first[n] = n;
    Batch batch = {n, max_pages, slot, first, token, start, page, how, want};
    Result result;
    double begin = seconds();
    for (int step = 0; step < f->count; step++) {
        if (!backend->submit(b->model.engine.state, &batch, e)) return false;
        if (step && !backend->collect(b->model.engine.state, &result, e)) return false;
        for (int i = 0; i < n; i++) token[i] = -1, start[i]++;
    }
    if (!backend->collect(b->model.engine.state, &result, e)) return false;
    *took = seconds() - begin;
    return true;
}

static bool measure_generation(Bench *b, Figure *f, Error *e) {
    int max_pages = (f->depth + f->count + PAGE - 1) / PAGE;
    int *page = allocate((size_t)max_pages * (size_t)f->streams * sizeof *page);
    for (int i = 0; i < max_pages * f->streams; i++) page[i] = b->model.engine.free_pages.data[i];
    const Model *m = b->model.engine.model;
    void *state = b->model.engine.state;
    uint64_t read = backend->experts_read(state);
    int choices = m->top_k * f->streams;
    uint64_t most = step_bytes(m, choices < m->n_experts ? choices : m->n_experts, f->streams, f->depth + f->count / 2);
    double flat = backend->flat_read(state, most), ignored;      /* before the card is hot, so of about as many bytes */
    bool ok = generate_once(b, f, page, max_pages, &ignored, e); /* its steps are those of every repeat */
    if (ok) {
        f->experts = (double)(backend->experts_read(state) - read) / f->count / m->n_layers;
        f->bytes = step_bytes(m, f->experts, f->streams, f->depth + f->count / 2);
        f->flat = flat * (double)f->bytes / (double)most;
    }
    for (int r = 0; r < b->o->repeats && ok; r++) ok = generate_once(b, f, page, max_pages, f->seconds + r, e);
    if (ok) f->phases = backend->phases(state, f->phase);
    free(page);
    return ok;
}

static bool run(Bench *b, Error *e) {
    Engine *g = &b->model.engine;
    for (int i = 0; i < b->o->prompts.n; i++) {
        Figure f = {.kind = "prompt", .count = b->o->prompts.value[i], .streams = 1};
        if (f.count >= g->context) {
            fprintf(stderr, "infer: a prompt of %d tokens is left out: the context is %d\n", f.count, g->context);
            continue;
        }
        if (!measure_prompt(b, &f, e)) return false;
        print_figure(b, &f);
    }
    for (int i = 0; i < b->o->streams.n; i++)
        for (int j = 0; j < b->o->depths.n; j++) {
            Figure f = {.kind = "generate",
                        .count = b->o->tokens,
                        .depth = b->o->depths.value[j],
                        .streams = b->o->streams.value[i]};
            size_t pages = (size_t)(f.depth + f.count + PAGE - 1) / PAGE * (size_t)f.streams;
            if (f.depth + f.count > g->context || pages > g->free_pages.n) {
                fprintf(stderr,
                        "infer: %d streams at a depth of %d are left out: the cache holds %zu tokens, a context %d\n",
                        f.streams, f.depth, g->free_pages.n * PAGE, g->context);
                continue;
            }
            if (!measure_generation(b, &f, e)) return false;
            print_figure(b, &f);
            fflush(stdout);
        }
    return true;
}

int bench(const Options *o) {
    Error e;
    Bench b = {.o = o, .json = !strcmp(o->output, "json")};
    if (!b.json && strcmp(o->output, "md")) {
        fail(&e, USAGE, "-o is md or json, not '%.40s'", o->output);
        die(&e);
    }
    if (!session_open(&b.model, o, NEED_SHAPES | NEED_ENGINE, &e)) die(&e);
    const Session *s = &b.model;
    const Model *m = &s->checkpoint.model;
    char size[24];
    fprintf(stderr, "%s: %s of weights%s on %s, ready after %.2f s\n", s->dir, size_text(model_bytes(m), size),
            m->made_up ? " (random)" : "", s->where, s->seconds);
    if (b.json)
        printf(
            "{\"family\": \"%s\", \"random\": %s, \"weight_bytes\": %llu, \"where\": \"%s\", \"load_seconds\": %.3f, "
            "\"rows\": [",
            s->checkpoint.family, m->made_up ? "true" : "false", (unsigned long long)model_bytes(m), s->where,
            s->seconds);
    bool ok = run(&b, &e);
    if (b.json) puts("\n]}");
    session_close(&b.model);
    if (!ok) die(&e);
    return DONE;
}
