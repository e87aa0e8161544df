/* bench.c: how fast is it? Prompts and generation at several depths and numbers of streams. A step that generates is
 * limited by the memory it reads: its bytes are counted from the model's own tensors and its time is compared with a
 * flat read of as many bytes, taken in the same run on the same card. */
#include "bench.h"
#include "download.h"
#include "engine.h"
#include "model.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_VALUES = 16, MOST_STREAMS = 256, MOST_REPEATS = 100 };

const char bench_help[] =
    "infer bench [MODEL] [-p 512,2048] [-n 128] [-d 0,8192,32768] [-b 1,4,16] [-r 5] [-o md|json] [--temperature T]\n"
    "Measures prompts of so many tokens, then the generation of n tokens in each of b streams behind d tokens of\n"
    "context: the median of r repeats. A directory that has only config.json gets random weights.\n"
    "  -p N,...  tokens of a prompt; the time is that to the first token\n"
    "  -n N      tokens to generate\n"
    "  -d N,...  depth of the context; what it holds does not matter and is not computed\n"
    "  -b N,...  streams at once\n"
    "  -r N      repeats\n"
    "  -o json   all figures as JSON, and in which phases a step spent its time; md: a table\n"
    "  --temperature T (0)   --gpu N\n"
    "  --plain   the plain kernels, also where faster ones know the model\n"
    "% of flat: the time that a flat read of the step's bytes takes, of the step's time. The experts of\n"
    "several streams are counted.\n";

typedef struct {
    int n, value[MOST_VALUES];
} List;

typedef struct {
    List prompts, depths, streams;
    int tokens, repeats, gpu;
    bool json, plain;
    float temperature;
} Options;

typedef struct {
    Options o;
    Checkpoint checkpoint;
    Engine engine;
    double load_seconds;
    char where[64];
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
    int n = b->o.repeats;
    qsort(f->seconds, (size_t)n, sizeof *f->seconds, ascending);
    double total = (double)f->count * f->streams, median = (f->seconds[(n - 1) / 2] + f->seconds[n / 2]) / 2,
           step = median / f->count;
    double speed = total / median, least = total / f->seconds[n - 1], most = total / f->seconds[0];
    double percent = f->flat / step * 100;
    bool prompt = !f->bytes;
    if (b->o.json) {
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
    const Sampling how = {.top_p = 1, .penalty = 1, .temperature = b->o.temperature};
    const Model *m = b->engine.model;
    int n = f->count, token;
    unsigned state = 1;
    Ids ids = {0};
    Sequence s = {0};
    bool ok = true;
    for (int i = 0; i < n; i++) ids_add(&ids, random_token(m, &state));
    for (int r = -1; r < b->o.repeats && ok; r++) { /* one to warm up */
        Generation w;
        sequence_rewind(&b->engine, &s, 0);
        double begin = seconds();
        ok = generation_begin(&w, &b->engine, &s, ids.data, ids.n, &how, NULL, e) && generation_next(&w, &token, e);
        if (r >= 0) f->seconds[r] = seconds() - begin;
        if (ok) generation_end(&w);
    }
    sequence_free(&b->engine, &s);
    ids_free(&ids);
    return ok;
}

/* f->count steps of f->streams streams behind f->depth tokens; the next step is submitted before the last is read. */
static bool generate_once(Bench *b, Figure *f, int *page, int max_pages, double *took, Error *e) {
    const Backend *backend = b->engine.backend;
    int n = f->streams, slot[MOST_STREAMS], first[MOST_STREAMS + 1], token[MOST_STREAMS], start[MOST_STREAMS];
    Sampling how[MOST_STREAMS];
    Want want[MOST_STREAMS];
    unsigned state = 1;
    for (int i = 0; i < n; i++) {
        slot[i] = i, first[i] = i, start[i] = f->depth, want[i] = WANT_TOKEN;
        token[i] = random_token(b->engine.model, &state);
        how[i] = (Sampling){.top_p = 1, .penalty = 1, .temperature = b->o.temperature, .seed = (uint64_t)i};
    }
    first[n] = n;
    Batch batch = {n, max_pages, slot, first, token, start, page, how, want};
    Result result;
    double begin = seconds();
    for (int step = 0; step < f->count; step++) {
        if (!backend->submit(b->engine.state, &batch, e)) return false;
        if (step && !backend->collect(b->engine.state, &result, e)) return false;
        for (int i = 0; i < n; i++) token[i] = -1, start[i]++;
    }
    if (!backend->collect(b->engine.state, &result, e)) return false;
    *took = seconds() - begin;
    return true;
}

static bool measure_generation(Bench *b, Figure *f, Error *e) {
    int max_pages = (f->depth + f->count + PAGE - 1) / PAGE;
    int *page = allocate((size_t)max_pages * (size_t)f->streams * sizeof *page);
    for (int i = 0; i < max_pages * f->streams; i++) page[i] = b->engine.free_pages.data[i];
    const Backend *backend = b->engine.backend;
    const Model *m = b->engine.model;
    void *state = b->engine.state;
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
    for (int r = 0; r < b->o.repeats && ok; r++) ok = generate_once(b, f, page, max_pages, f->seconds + r, e);
    if (ok) f->phases = backend->phases(state, f->phase);
    free(page);
    return ok;
}

static bool run(Bench *b, Error *e) {
    Engine *g = &b->engine;
    for (int i = 0; i < b->o.prompts.n; i++) {
        Figure f = {.kind = "prompt", .count = b->o.prompts.value[i], .streams = 1};
        if (f.count >= g->context) {
            fprintf(stderr, "infer: a prompt of %d tokens is left out: the context is %d\n", f.count, g->context);
            continue;
        }
        if (!measure_prompt(b, &f, e)) return false;
        print_figure(b, &f);
    }
    for (int i = 0; i < b->o.streams.n; i++)
        for (int j = 0; j < b->o.depths.n; j++) {
            Figure f = {.kind = "generate",
                        .count = b->o.tokens,
                        .depth = b->o.depths.value[j],
                        .streams = b->o.streams.value[i]};
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

/* "1,4,16": whole numbers in [least, most]. */
static bool parse_list(const char *text, int least, int most, List *out, Error *e) {
    out->n = 0;
    for (const char *s = text;; s++) {
        char *end;
        long value = strtol(s, &end, 10);
        if (end == s || (*end && *end != ',') || value < least || value > most || out->n == MOST_VALUES)
            return fail(e, USAGE, "'%s' is no list of whole numbers from %d to %d like 1,4,16", text, least, most);
        out->value[out->n++] = (int)value;
        s = end;
        if (!*s) return true;
    }
}

static bool parse_one(const char *text, int least, int most, int *out, Error *e) {
    return text_whole(text, least, most, out) ||
           fail(e, USAGE, "'%s' is no whole number from %d to %d", text, least, most);
}

static bool parse_options(int argc, char **argv, Options *o, Error *e) {
    static const struct option options[] = {{"gpu", required_argument, NULL, 'g'},
                                            {"temperature", required_argument, NULL, 't'},
                                            {"plain", no_argument, NULL, 'P'},
                                            {0}};
    bool ok = true;
    for (int c; ok && (c = getopt_long(argc, argv, "p:n:d:b:r:o:", options, NULL)) != -1;) {
        char *end = NULL;
        switch (c) {
        case 'p': ok = parse_list(optarg, 1, 1 << 24, &o->prompts, e); break;
        case 'd': ok = parse_list(optarg, 0, 1 << 24, &o->depths, e); break;
        case 'b': ok = parse_list(optarg, 1, MOST_STREAMS, &o->streams, e); break;
        case 'n': ok = parse_one(optarg, 1, 1 << 20, &o->tokens, e); break;
        case 'r': ok = parse_one(optarg, 1, MOST_REPEATS, &o->repeats, e); break;
        case 'g': ok = parse_one(optarg, 0, MOST_GPUS - 1, &o->gpu, e); break;
        case 'P': o->plain = true; break;
        case 't':
            o->temperature = strtof(optarg, &end);
            if (end == optarg || *end || !(o->temperature >= 0 && o->temperature <= 100))
                ok = fail(e, USAGE, "'%s' is no temperature", optarg);
            break;
        case 'o':
            o->json = !strcmp(optarg, "json");
            if (!o->json && strcmp(optarg, "md")) ok = fail(e, USAGE, "-o is md or json, not '%s'", optarg);
            break;
        default: ok = fail(e, USAGE, "wrong option; see infer bench --help");
        }
    }
    if (ok && optind + 1 < argc) ok = fail(e, USAGE, "one MODEL at most, not also '%s'", argv[optind + 1]);
    return ok;
}

/* A model with weights, or the shapes of one. */
static bool open_model(Bench *b, const char *dir, Error *e) {
    Bytes whole = {0}, index = {0};
    bytes_print(&whole, "%s/model.safetensors", dir);
    bytes_print(&index, "%s.index.json", whole.data);
    bool weights = file_exists(whole.data) || file_exists(index.data);
    bytes_free(&whole);
    bytes_free(&index);
    return weights ? checkpoint_open(&b->checkpoint, dir, e) : checkpoint_make_up(&b->checkpoint, dir, e);
}

int bench(int argc, char **argv, const Backend *backend) {
    Error e;
    Bench b = {.o = {.prompts = {2, {512, 2048}},
                     .depths = {3, {0, 8192, 32768}},
                     .streams = {3, {1, 4, 16}},
                     .tokens = 128,
                     .repeats = 5}};
    if (!parse_options(argc, argv, &b.o, &e)) die(&e);
    char *dir = model_get(optind < argc ? argv[optind] : "gpt-oss-20b", &e);
    if (!dir || !open_model(&b, dir, &e)) die(&e);
    int streams = 1;
    for (int i = 0; i < b.o.streams.n; i++) streams = b.o.streams.value[i] > streams ? b.o.streams.value[i] : streams;
    Limits limits = {
        .gpu = b.o.gpu, .max_seqs = streams, .max_tokens = backend->prompt_step, .plain = b.o.plain, .where = b.where};
    double begin = seconds();
    bool ok = engine_open(&b.engine, backend, &b.checkpoint.model, limits, 0, &e);
    if (!ok) die(&e);
    b.load_seconds = seconds() - begin;
    char size[24];
    fprintf(stderr, "%s: %s of weights%s on %s, ready after %.2f s\n", dir,
            size_text(model_bytes(&b.checkpoint.model), size), b.checkpoint.model.made_up ? " (random)" : "", b.where,
            b.load_seconds);
    if (b.o.json)
        printf(
            "{\"family\": \"%s\", \"random\": %s, \"weight_bytes\": %llu, \"where\": \"%s\", \"load_seconds\": %.3f, "
            "\"rows\": [",
            b.checkpoint.family, b.checkpoint.model.made_up ? "true" : "false",
            (unsigned long long)model_bytes(&b.checkpoint.model), b.where, b.load_seconds);
    ok = run(&b, &e);
    if (b.o.json) puts("\n]}");
    engine_close(&b.engine);
    checkpoint_close(&b.checkpoint);
    free(dir);
    if (!ok) die(&e);
    return DONE;
}
