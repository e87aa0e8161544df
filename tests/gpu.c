/* gpu.c: the tests that need a GPU: infer.cu against the goldens of transformers and against tests/reference.c at every
 * stage, and the properties that find batching bugs. One line a test, as in unit.c. Run from the top of the project. */
#include "check.h"
#include "real.h"
#include "streams.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>

#ifndef EMULATED
#define EMULATED 0 /* 1: on a processor (tests/emulated) */
#endif

/* ---- against goldens and the reference, stage by stage ---- */

/* The error that rounding to bf16 causes in the reference at each stage of a prompt; `golden` has the right values. */
typedef struct {
    struct {
        char stage[64];
        double error;
    } cost[400];
    int stages;
} Costs;

static Costs rounding_costs(const Model *m, const Trace *golden, const int *ids, size_t n) {
    Costs costs = {.stages = 0};
    Trace rounded = {0};
    reference_rounds = true;
    trace_run(&rounded, &reference, m, ids, n, 0);
    reference_rounds = false;
    for (int i = 0; i < rounded.stages; i++) {
        const Stage *r = rounded.stage + i, *g = trace_stage((Trace *)(uintptr_t)golden, r->name);
        bool alike = stage_size(r) == stage_size(g);
        check(alike, "%s: %zu numbers, not %zu", r->name, stage_size(r), stage_size(g));
        double error = alike ? stage_error(r, g) : 0;
        check(isfinite(error), "%s: rounding changes zeros", r->name); /* anything would be near them */
        snprintf(costs.cost[i].stage, sizeof costs.cost[i].stage, "%s", r->name);
        costs.cost[i].error = error < 1e-6 ? 1e-6 : error; /* where nothing is rounded: the error of floats */
    }
    costs.stages = rounded.stages;
    trace_free(&rounded);
    return costs;
}

/* A stage passes if its error is at most three times what rounding costs there. Compares the GPU's run of a prompt in
 * chunks on `m` with `golden`; returns the first stage that fails, "" if none does. */
static const char *first_wrong(const Model *m, const Costs *costs, const Trace *golden, const int *ids, size_t n,
                               size_t chunk, double *ratio) {
    static char name[64];
    Trace found = {0};
    trace_run(&found, &cuda, m, ids, n, chunk);
    check(found.stages == costs->stages, "%d stages, the reference has %d", found.stages, costs->stages);
    *name = 0;
    *ratio = 0;
    for (int i = 0; i < costs->stages; i++) {
        const Stage *s = trace_stage(&found, costs->cost[i].stage),
                    *g = trace_stage((Trace *)(uintptr_t)golden, costs->cost[i].stage);
        bool alike = stage_size(s) == stage_size(g);
        check(alike, "%s: %zu numbers, not %zu", s->name, stage_size(s), stage_size(g));
        if (!alike) break;
        double e = stage_error(s, g), allowed = costs->cost[i].error;
        if (!(e <= 3 * allowed)) fprintf(stderr, "  %s: error %.2g, rounding costs %.2g\n", s->name, e, allowed);
        if (!(e <= 3 * allowed) && !*name) snprintf(name, sizeof name, "%s", s->name);
        if (!(e / allowed <= *ratio)) *ratio = e / allowed;
    }
    trace_free(&found);
    return name;
}

/* The same in chunks of each size; 0: the whole prompt. */
static void chunks_pass(const char *what, const Model *m, const Costs *costs, const Trace *golden, const int *ids,
                        size_t n, int sizes, const size_t *size) {
    double ratio;
    for (int i = 0; i < sizes; i++) {
        const char *wrong = first_wrong(m, costs, golden, ids, n, size[i], &ratio);
        check(!*wrong, "%s, chunks of %zu: first wrong at %s (%.1f times what rounding costs)", what, size[i], wrong,
              ratio);
    }
}

static void fixture_passes(const char *fixture, int sizes) {
    Trace golden = {0};
    Ids ids = {0};
    Checkpoint c;
    at(fixture);
    trace_golden(fixture, &golden, &ids, &c);
    Costs costs = rounding_costs(&c.model, &golden, ids.data, ids.n);
    chunks_pass(fixture, &c.model, &costs, &golden, ids.data, ids.n, sizes, (size_t[]){0, 1, 7, 16, 17});
    trace_free(&golden);
    ids_free(&ids);
    checkpoint_close(&c);
}
static void fixtures_pass(void) {
    for (int i = 0; i < FIXTURES; i++) fixture_passes(fixtures[i], 5);
}

/* Prompts of many lengths, whole and in chunks, against the unrounded reference. The longest prompt says what rounding
 * costs: a short one has few numbers, whose error may be next to nothing by luck. Models with experts read the
 * beginning of the fixture's own prompt, which keeps routers away from ties. */
static void lengths_of(const char *fixture, const size_t *lengths, int n) {
    int ids[300];
    uint64_t random = 3;
    Trace whole = {0};
    Ids own = {0};
    Checkpoint c;
    Costs costs = {.stages = 0};
    trace_golden(fixture, &whole, &own, &c);
    fill_random(ids, 300, (size_t)c.model.vocab, &random);
    if (c.model.n_experts > 1) memcpy(ids, own.data, own.n * sizeof *ids);
    for (int i = 0; i < n; i++) {
        Trace golden = {0};
        double ratio;
        trace_run(&golden, &reference, &c.model, ids, lengths[i], 0);
        if (i == 0) costs = rounding_costs(&c.model, &golden, ids, lengths[i]);
        const char *wrong = first_wrong(&c.model, &costs, &golden, ids, lengths[i], i % 2 ? 0 : 40, &ratio);
        check(!*wrong, "%zu tokens of %s: first wrong at %s (%.1f times what rounding costs)", lengths[i], fixture,
              wrong, ratio);
        trace_free(&golden);
    }
    trace_free(&whole);
    ids_free(&own);
    checkpoint_close(&c);
}

static void lengths_pass(void) {
    const size_t of_experts[] = {70, 1, 2, 7, 16, 17, 63, 64, 65};
    lengths_of("odd", of_experts, 9);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A model of random weights; encoding NULL is bf16, or MXFP4 for gpt-oss's experts. */
static void make_up(Checkpoint *c, const char *config, int layers, int vocab, const char *encoding) {
    char directory[] = "/tmp/infer-shapes-XXXXXX", path[100];
    Error e;
    if (!mkdtemp(directory)) abort();
    snprintf(path, sizeof path, "%s/config.json", directory);
    FILE *file = fopen(path, "w");
    check(file && fprintf(file, config, layers, vocab) > 0 && !fclose(file), "the config could not be written");
    must(random_weights_open(c, directory, encoding, &e), &e);
    random_weights_fill();
    check(!unlink(path) && !rmdir(directory), "%s stays behind", directory);
}

/* An engine with a model of random weights, for one sequence. */
static void open_made_up(Engine *g, Checkpoint *c, const char *config, int layers, int vocab, const char *encoding,
                         int max_tokens) {
    Error e;
    Limits limits = {.max_seqs = 1, .max_tokens = max_tokens, .plain = plain, CARDS};
    make_up(c, config, layers, vocab, encoding);
    must(engine_open(g, &cuda, &c->model, limits, 0, &e), &e);
}

/* The logits (n - cached, vocab) of ids[cached .. n), in chunks, after the tokens that the cache holds already. */
static void run_chunks(Engine *g, const int *ids, size_t cached, size_t n, size_t chunk, size_t vocab, float *logits) {
    for (size_t at = cached; at < n; at += chunk) {
        size_t now = n - at < chunk ? n - at : chunk;
        Result r = run_text(g, ids, at, at + now, WANT_ALL_LOGITS, &greedy);
        memcpy(logits + (at - cached) * vocab, r.logits, now * vocab * sizeof(float));
    }
}

/* By how much two ways to compute may differ, if each rounds to bf16 about ten times a layer, and seven matrices more
 * where weights are encoded: three standard deviations, which nearly all tokens keep. */
static double tolerance_of(int layers, const char *encoding) {
    return 3 * sqrt(2 * (encoding ? 17 : 10) * layers) * 0x1p-9;
}
#define NEARLY_ALL 0.997

/* The max difference between the logits of a token, over the `share` of the tokens that differ least. The others may
 * have chosen another expert, because a router was close to a tie. */
static double differ(const float *a, const float *b, size_t n, size_t vocab, double share) {
    double *error = allocate(n * sizeof *error);
    for (size_t i = 0; i < n; i++) error[i] = error_of(a + i * vocab, b + i * vocab, vocab);
    qsort(error, n, sizeof *error, ascending);
    double found = error[(size_t)ceil(share * (double)n) - 1];
    free(error);
    return found;
}

/* A model of random weights: prompts of many lengths, whole, in chunks, and after a cached beginning. Each must agree
 * with a run in chunks of 16, for `share` of the tokens; from 17 tokens on other kernels compute a chunk. */
static void shapes_pass(const char *config, int layers, double share, const char *encoding) {
    enum { LONG = 5000, VOCAB = 512 };
    static const struct {
        size_t cached, n, chunk;
    } runs[] = {{0, 1, 1},       {0, 2, 2},       {0, 7, 7},      {0, 16, 16},        {8, 16, 8},
                {3, 7, 4},       {1, 2, 1},       {0, 17, 17},    {0, 24, 24},        {0, 25, 25},
                {0, 32, 32},     {0, 33, 33},     {0, 48, 48},    {0, 49, 49},        {0, 63, 63},
                {0, 64, 64},     {47, 64, 17},    {0, 65, 65},    {1, 65, 64},        {0, 81, 81},
                {0, 96, 96},     {0, 97, 97},     {0, 127, 127},  {64, 127, 63},      {0, 128, 128},
                {63, 128, 65},   {0, 129, 129},   {0, 256, 256},  {0, 1000, 1000},    {127, 1000, 1000},
                {0, 5000, 5000}, {0, 5000, 5000}, {0, 5000, 700}, {1000, 5000, 5000}, {4900, 5000, 100}};
    Checkpoint c;
    Engine g;
    int ids[LONG];
    uint64_t random = 9; /* at the beginning no router is close to a tie: all that follow would see the other expert */
    size_t row = VOCAB * sizeof(float);
    open_made_up(&g, &c, config, layers, VOCAB, encoding, LONG);
    fill_random(ids, LONG, VOCAB, &random);
    float *few = allocate(LONG * row), *many = allocate(LONG * row), *last = allocate_zero(LONG, row);
    run_chunks(&g, ids, 0, LONG, 16, VOCAB, few);
    for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
        size_t cached = runs[k].cached, n = runs[k].n;
        run_chunks(&g, ids, cached, n, runs[k].chunk, VOCAB, many);
        double found = differ(many, few + cached * VOCAB, n - cached, VOCAB, share);
        check(found <= tolerance_of(layers, encoding),
              "%s, tokens %zu to %zu in chunks of %zu: %g of them differ by up to %g, more than %g",
              encoding ? encoding : "as usual", cached, n, runs[k].chunk, share, found, tolerance_of(layers, encoding));
        if (k && !memcmp(runs + k, runs + k - 1, sizeof *runs))
            check(!memcmp(last, many, (n - cached) * row), "a second run gives other bits");
        memcpy(last, many, (n - cached) * row);
    }
    free(few), free(many), free(last);
    engine_close(&g);
    checkpoint_close(&c);
}

#define SLIDING "\"sliding_attention\""
#define FULL    "\"full_attention\""
#define GPT_OSS(HIDDEN, INNER, HEADS, EXPERTS, TYPES)                                                                  \
    "{\"architectures\":[\"GptOssForCausalLM\"],\"model_type\":\"gpt_oss\",\"num_hidden_layers\":%d,"                  \
    "\"vocab_size\":%d,\"hidden_size\":" HIDDEN ",\"intermediate_size\":" INNER ",\"num_attention_heads\":" HEADS ","  \
    "\"num_key_value_heads\":8,\"head_dim\":64,\"layer_types\":[" TYPES "],"                                           \
    "\"sliding_window\":128,\"num_local_experts\":" EXPERTS ",\"num_experts_per_tok\":4,\"swiglu_limit\":7.0,"         \
    "\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-05,\"rope_theta\":150000,\"attention_bias\":true,"           \
    "\"rope_scaling\":{\"rope_type\":\"default\"},\"tie_word_embeddings\":false,\"quantization_config\":{\"quant_"     \
    "method\":\"mxfp4\"}}"
#define GPT_OSS_20B(TYPES)  GPT_OSS("2880", "2880", "64", "32", TYPES)
#define GPT_OSS_120B(TYPES) GPT_OSS("2880", "2880", "64", "128", TYPES) /* its experts; layers have the same shapes */

static void shapes_of_gpt_oss(void) {
    shapes_pass(GPT_OSS_20B(SLIDING "," FULL), 2, 0.8, NULL);
    shapes_pass(GPT_OSS_120B(SLIDING "," FULL), 2, 0.8, NULL);
}

enum { AGREEING = 49 }; /* tokens: chunks of 2, 12 and 16 leave one for the end */

/* gpt-oss's shapes, after `begin` tokens. Steps of up to 16 tokens give the same bits, whatever their number (fast/ has
 * instances for one token and for up to 4, 8 and 16), and larger steps nearly the same. Whether all tokens' logits are
 * wanted or only the last's makes no difference. */
static void instances_agree(const char *config, int layers, int begin, const size_t *chunks, size_t n_chunks) {
    enum { VOCAB = 201088, N = AGREEING };
    const int end = begin + N;
    const size_t row = VOCAB * sizeof(float);
    uint64_t random = 7;
    Checkpoint c;
    Engine g;
    int *ids = allocate(end * sizeof *ids);
    float *one = allocate(N * row), *other = allocate(N * row);
    open_made_up(&g, &c, config, layers, VOCAB, NULL, end);
    fill_random(ids, end, VOCAB, &random);
    for (int i = end - 15; i < end; i++) ids[i] = ids[end - 16]; /* to choose the same experts: more than MAX_CHOICES */
    if (begin) run_text(&g, ids, 0, begin, WANT_NOTHING, &greedy);
    run_chunks(&g, ids, begin, end, 1, VOCAB, one);
    for (size_t i = 0; i < n_chunks; i++) {
        run_chunks(&g, ids, begin, end, chunks[i], VOCAB, other);
        if (chunks[i] <= 16) {
            check(!memcmp(one, other, N * row), "chunks of %zu give other bits", chunks[i]);
        } else {
            double found = differ(one, other, N, VOCAB, 0.8);
            check(found <= tolerance_of(layers, NULL), "chunks of %zu: %g, more than %g", chunks[i], found,
                  tolerance_of(layers, NULL));
        }
        size_t rest = (N - 1) % chunks[i] + 1; /* the tokens of the last chunk */
        Result r = run_text(&g, ids, end - rest, end, WANT_LOGITS, &greedy);
        const float *last = other + (size_t)(N - 1) * VOCAB;
        bool same =
            rest <= 16 ? !memcmp(last, r.logits, row) : error_of(last, r.logits, VOCAB) <= tolerance_of(layers, NULL);
        check(same, "the last of %zu alone has other logits", rest);
    }
    free(one), free(other), free(ids);
    engine_close(&g);
    checkpoint_close(&c);
}

static void instances_of_20b_agree(void) {
    const size_t chunks[] = {2, 7, 12, 3, 4, 13, 16, AGREEING}; /* the first three use one instance each */
    /* attention splits this context; in layers without a window its pages come through the ring */
    instances_agree(GPT_OSS_20B(SLIDING "," FULL), 2, 700, chunks, 8);
    /* Layers take turns with three buffers: a step uses each again, and the next step meets what the last layers left.
     * After 200 tokens a warp adds up keys in two rounds; after none few warps have any. */
    instances_agree(GPT_OSS_20B(SLIDING "," FULL "," SLIDING "," FULL "," SLIDING "," FULL), 6, 200, chunks, 3);
    instances_agree(GPT_OSS_20B(SLIDING "," FULL "," SLIDING "," FULL "," SLIDING "," FULL "," SLIDING), 7, 0, chunks,
                    3);
    /* Again and again: without the fence before copies in ring.cuh, one of eight runs in chunks of 8 read weights of
     * another part. With 16 tokens an expert has more choices than MAX_CHOICES. */
    size_t again[80];
    for (int i = 0; i < 80; i++) again[i] = i % 2 ? 8 : i % 4 ? 4 : 16;
    instances_agree(GPT_OSS_20B(SLIDING "," FULL), 2, 700, again, 80);
}

/* With a tap a launch ends after each phase: a token alone has the same bits at every stage as several at once. */
static void phases_agree(const char *config, int layers) {
    const int ids[] = {1, 20000, 300, 300, 4, 200000, 7, 8, 9, 1000, 300, 12};
    const size_t n = sizeof ids / sizeof *ids, chunks[] = {2, 7, 12};
    Trace one = {0};
    Checkpoint c;
    make_up(&c, config, layers, 201088, NULL);
    trace_run(&one, &cuda, &c.model, ids, n, 1);
    for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++) {
        Trace other = {0};
        trace_run(&other, &cuda, &c.model, ids, n, chunks[k]);
        check(one.stages == layers * 9 + 1 && other.stages == one.stages, "%d and %d stages", one.stages, other.stages);
        for (int i = 0; i < one.stages; i++) {
            const Bytes *a = &one.stage[i].values, *b = &trace_stage(&other, one.stage[i].name)->values;
            check(a->n == b->n && !memcmp(a->data, b->data, a->n), "%s has other bits in chunks of %zu",
                  one.stage[i].name, chunks[k]);
        }
        trace_free(&other);
    }
    trace_free(&one);
    checkpoint_close(&c);
}
static void phases_of_gpt_oss_agree(void) {
    phases_agree(GPT_OSS_20B(SLIDING "," FULL "," SLIDING "," FULL), 4);
    phases_agree(GPT_OSS_120B(SLIDING "," FULL), 2); /* a lane compares four of 128 experts */
}

/* Two ways to compute n tokens give nearly the same at each stage. They may choose different experts where a router is
 * close to a tie, but not for a fifth of the tokens. */
static void traces_agree(Trace *one, Trace *other, size_t n, int layers, const char *encoding) {
    for (int i = 0; i < one->stages; i++) {
        const Stage *a = one->stage + i, *b = trace_stage(other, a->name);
        bool alike = stage_size(a) == stage_size(b);
        check(alike, "%s: %zu and %zu numbers", a->name, stage_size(a), stage_size(b));
        if (!alike) continue;
        double found = differ(stage_values(a), stage_values(b), n, stage_size(a) / n, 0.8);
        check(found <= tolerance_of(layers, encoding), "%s, %s: %g of the tokens differ by up to %g, more than %g",
              encoding ? encoding : "as usual", a->name, 0.8, found, tolerance_of(layers, encoding));
    }
}

/* A prompt long enough for fast/'s prefill: its stages are nearly those of plain. */
static void stages_agree(const char *config, int vocab, const char *encoding) {
    enum { N = 600, LAYERS = 2 };
    int ids[N];
    uint64_t random = 14; /* few tokens of it are close to a tie */
    Trace fast = {0}, other = {0};
    Checkpoint c;
    make_up(&c, config, LAYERS, vocab, encoding);
    fill_random(ids, N, vocab, &random);
    trace_run(&fast, &cuda, &c.model, ids, N, 0);
    plain = true;
    trace_run(&other, &cuda, &c.model, ids, N, 0);
    plain = false;
    traces_agree(&fast, &other, N, LAYERS, encoding);
    trace_free(&fast), trace_free(&other);
    checkpoint_close(&c);
}

/* So many streams that fast/'s prefill takes them: behind prompts of two tokens, one token of each has nearly plain's
 * logits. Then come steps without logits, the first makes a graph and the second uses it. */
static void streams_agree(const char *config) {
    enum { N = 256, VOCAB = 512, LAYERS = 2, PROMPT = 2, STEPS = 4 };
    int ids[N * PROMPT], slot[N], page[N], begin[N], first[N + 1];
    float *logits[2];
    uint64_t random = 13;
    Sampling how[N];
    Want want[N];
    Checkpoint c;
    Result r;
    Error e;
    make_up(&c, config, LAYERS, VOCAB, NULL);
    fill_random(ids, N * PROMPT, VOCAB, &random);
    for (int i = 0; i < N; i++) slot[i] = page[i] = i, how[i] = greedy;
    for (int k = 0; k < 2; k++) {
        Limits limits = {.context = PAGE, .max_seqs = N, .max_tokens = N * PROMPT, .plain = k, CARDS};
        int pages = N;
        void *state = cuda.open(&c.model, &limits, &pages, &e);
        must(state, &e);
        logits[k] = allocate(N * VOCAB * sizeof(float));
        for (int step = 0; step < STEPS; step++) { /* the prompts, then a token of each stream */
            const int tokens = step ? 1 : PROMPT;
            for (int i = 0; i < N; i++) {
                begin[i] = step ? PROMPT + step - 1 : 0, first[i + 1] = (i + 1) * tokens;
                want[i] = !step ? WANT_NOTHING : step == 1 ? WANT_LOGITS : WANT_TOKEN;
            }
            first[0] = 0;
            Batch b = {N, 1, slot, first, ids, begin, page, how, want};
            must(cuda.submit(state, &b, &e) && cuda.collect(state, &r, &e), &e);
            if (step == 1) memcpy(logits[k], r.logits, N * VOCAB * sizeof(float));
            for (int i = 0; i < N && step; i++)
                check(r.token[i] >= 0 && r.token[i] < VOCAB, "stream %d drew %d", i, r.token[i]);
        }
        cuda.close(state);
    }
    double found = differ(logits[0], logits[1], N, VOCAB, 0.8);
    check(found <= tolerance_of(LAYERS, NULL), "%g of the streams differ by up to %g, more than %g", 0.8, found,
          tolerance_of(LAYERS, NULL));
    free(logits[0]), free(logits[1]);
    checkpoint_close(&c);
}

/* Two layers of gpt-oss-20b's size with weights in files (tests/make_model.py), against the reference. With these
 * tokens no router is close to a tie: each of the reference's five largest logits differs from the next by 0.02 or
 * more. With a gap of 0.002 rounding chose the order. */
static void stages_of_20b_pass(void) {
    const int ids[] = {1,   523, 193959, 135, 1497, 200000, 52137,  33, 173,
                       139, 301, 5,      198, 403,  540,    158101, 31, 177716};
    const size_t n = sizeof ids / sizeof *ids;
    char directory[] = "/tmp/infer-20b-XXXXXX", command[200];
    Trace golden = {0};
    Checkpoint c;
    Error e;
    const char *data = getenv("TEST_DATA");
    snprintf(command, sizeof command, "%s/gpt-oss-20b/config.json", data ? data : "");
    if (!file_exists(command)) {
        puts("skip gpu: the reference at gpt-oss-20b's shapes needs openai/gpt-oss-20b");
        return;
    }
    if (!mkdtemp(directory)) abort();
    snprintf(command, sizeof command, "python3 tests/make_model.py --like gpt-oss-20b --layers 2 %s", directory);
    check(!system(command), "%s failed", command);
    must(checkpoint_open(&c, directory, &e), &e);
    trace_run(&golden, &reference, &c.model, ids, n, 0);
    Costs costs = rounding_costs(&c.model, &golden, ids, n);
    for (int i = 0; i < 2; i++) {
        plain = i;
        chunks_pass(plain ? "plain" : "fast", &c.model, &costs, &golden, ids, n, 4, (size_t[]){1, 7, 16, 0});
    }
    plain = false;
    trace_free(&golden);
    checkpoint_close(&c);
    snprintf(command, sizeof command, "rm -r %s", directory);
    check(!system(command), "%s stays behind", directory);
}

/* Blocks wait for a value as long as its place holds a special NaN. A step whose values are NaNs must end all the same,
 * and say so. (With several tokens blocks wait only for experts' activations, which the clamp makes numbers.) */
static void nans_of_20b_end(void) {
    const int ids[300] = {1, 20000, 300, 300, 4, 200000, 7, 8};
    const size_t counts[] = {1, 3, 8, 16, 40, 300};
    Limits limits = {.max_seqs = 1, .max_tokens = 300, .plain = plain, CARDS};
    Checkpoint c;
    Engine g;
    Error e;
    make_up(&c, GPT_OSS_20B(SLIDING "," FULL), 2, 201088, NULL);
    c.model.eps = NAN;
    must(engine_open(&g, &cuda, &c.model, limits, 0, &e), &e);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        Result r = run_text(&g, ids, 0, counts[i], WANT_TOKEN, &greedy);
        check(r.token[0] == DREW_NAN, "%zu tokens went unnoticed", counts[i]);
    }
    engine_close(&g);
    checkpoint_close(&c);
}

/* Streams with contexts of unequal length: attention has more jobs than there are blocks, as many for each stream as
 * for the longest, so most are void. Each stream's token has the same logits in one batch as alone. */
static void contexts_of_20b_agree(void) {
    enum { N = 8, VOCAB = 201088, PAGES_OF_ONE = 34, MOST = PAGES_OF_ONE * PAGE };
    const int length[N] = {2100, 90, 700, 1, 300, 1400, 64, 40};
    const size_t row = VOCAB * sizeof(float);
    int ids[N], page[N * PAGES_OF_ONE], slot[N], first[N + 1] = {0}, pages = N * PAGES_OF_ONE;
    int *prompt = allocate(MOST * sizeof *prompt);
    float *together = allocate(N * row);
    uint64_t random = 3;
    Sampling how[N];
    Want want[N];
    Limits limits = {.context = MOST, .max_seqs = N, .max_tokens = MOST, .plain = plain, CARDS};
    Checkpoint c;
    Result r;
    Error e;
    make_up(&c, GPT_OSS_20B(SLIDING "," FULL), 2, VOCAB, NULL);
    void *state = cuda.open(&c.model, &limits, &pages, &e);
    must(state, &e);
    fill_random(ids, N, VOCAB, &random);
    for (int i = 0; i < N; i++) slot[i] = i, first[i + 1] = i + 1, how[i] = greedy, want[i] = WANT_LOGITS;
    for (int i = 0; i < N * PAGES_OF_ONE; i++) page[i] = i;
    for (int i = 0; i < N; i++) {
        const int begin = 0, ends[] = {0, length[i]};
        const Want nothing = WANT_NOTHING;
        fill_random(prompt, (size_t)length[i], VOCAB, &random);
        Batch b = {1, PAGES_OF_ONE, slot + i, ends, prompt, &begin, page + i * PAGES_OF_ONE, how, &nothing};
        must(cuda.submit(state, &b, &e) && cuda.collect(state, &r, &e), &e);
    }
    Batch all = {N, PAGES_OF_ONE, slot, first, ids, length, page, how, want};
    must(cuda.submit(state, &all, &e) && cuda.collect(state, &r, &e), &e);
    check(r.rows == N, "%d rows", r.rows);
    memcpy(together, r.logits, N * row);
    for (int i = 0; i < N; i++) {
        Batch b = {1, PAGES_OF_ONE, slot + i, first, ids + i, length + i, page + i * PAGES_OF_ONE, how, want};
        must(cuda.submit(state, &b, &e) && cuda.collect(state, &r, &e), &e);
        check(!memcmp(together + (size_t)i * VOCAB, r.logits, row), "behind %d tokens: other logits", length[i]);
    }
    cuda.close(state);
    free(prompt), free(together);
    checkpoint_close(&c);
}

static void fast_agrees_with_plain(void) { stages_agree(GPT_OSS_20B(SLIDING "," FULL), 201088, NULL); }
static void streams_agree_with_plain(void) { streams_agree(GPT_OSS_20B(SLIDING "," FULL)); }

/* A BF16 matrix as F32, or as F16, where what is below 2^-14 becomes 0. */
static Linear as_type(const Linear *w, Type type) {
    uint16_t *half = allocate((size_t)w->rows * (size_t)w->cols * sizeof(float));
    uint32_t *word = (uint32_t *)half;
    for (int r = 0; r < w->rows; r++)
        for (int c = 0; c < w->cols; c++) {
            uint16_t x;
            memcpy(&x, w->each->data.data + (size_t)r * w->each->data.stride + (size_t)c * sizeof x, sizeof x);
            const int exponent = (x >> 7 & 255) - 127 + 15;
            if (type == F32)
                word[r * w->cols + c] = (uint32_t)x << 16;
            else
                half[r * w->cols + c] = (uint16_t)(exponent < 1 ? 0 : (x & 0x8000) | exponent << 10 | (x & 127) << 3);
        }
    Linear to = stored(type, 1, w->rows, w->cols, half, w->each->bias);
    free(half);
    return to;
}

/* A router and a head in F32 and queries in F16 beside matrices in BF16 read the same x, whose rows have padding. */
static void types_of_x_may_differ(void) {
    Trace golden = {0};
    Ids ids = {0};
    Checkpoint c;
    trace_golden("odd", &golden, &ids, &c);
    Costs costs = rounding_costs(&c.model, &golden, ids.data, ids.n);
    Layer *l = c.model.layer + c.model.n_layers - 1;
    check(l->router.type == BF16 && l->q.type == BF16 && c.model.dim % 64,
          "no router or queries in BF16, or no padding");
    l->q = as_type(&l->q, F16), l->router = as_type(&l->router, F32), c.model.head = as_type(&c.model.head, F32);
    chunks_pass("types of x", &c.model, &costs, &golden, ids.data, ids.n, 3, (size_t[]){0, 1, 7});
    linear_free(&l->q), linear_free(&l->router), linear_free(&c.model.head);
    trace_free(&golden);
    ids_free(&ids);
    checkpoint_close(&c);
}

/* Opens a changed model, which must fail with these words. */
static void refused(const Checkpoint *c, const char *words) {
    Engine g;
    Error e;
    const Limits limits = {.max_seqs = 1, .max_tokens = 8};
    bool opened = engine_open(&g, &cuda, &c->model, limits, 64, &e);
    check(!opened, "a model was opened: %s", words);
    if (opened) engine_close(&g);
    if (!opened) check(e.code == BAD_MODEL && strstr(e.text, words), "error %d: %s, not %s", e.code, e.text, words);
}

/* What no kernel can compute is refused before a weight is loaded. */
static void what_kernels_rely_on_is_checked(void) {
    Checkpoint c;
    Error e;
    must(checkpoint_open(&c, "tests/fixtures/odd", &e), &e);
    Model *m = &c.model;
    const Model right = *m;
    m->top_k = 33, refused(&c, "33 experts a token"), *m = right;
    m->route.groups = 33, refused(&c, "33 groups of experts"), *m = right;
    m->n_heads = 65 * m->n_kv_heads, refused(&c, "65 query heads"), *m = right;
    m->v_dim /= 2, refused(&c, "heads of 32 and 16"), *m = right;
    m->dim += 2, refused(&c, "not a multiple of 4"), *m = right;
    m->dim = 1 << 20, refused(&c, "a hidden size of 1048576"), *m = right;
    Layer *last = m->layer + m->n_layers - 1;
    const Layer before = *last;
    last->gate.rows--, refused(&c, "an odd intermediate size"), *last = before;
    last->down.type = F32, refused(&c, "experts in F32"), *last = before;
    last->o.cols -= 2, last->o.type = F32, refused(&c, "in F32 in some layers only"), *last = before;
    checkpoint_close(&c);
}

static void scale(const float *norm, int n) {
    for (int i = 0; i < n; i++) ((float *)(uintptr_t)norm)[i] *= 1.01f;
}

/* A norm that is 1 % off must be noticed at the stage after it, in steps of few tokens and of many. It is the first
 * norm: further on, three times what rounding has cost by then is more than 1 %. */
static void spoiled_models_fail(void) {
    for (int i = 0; i < FIXTURES; i++)
        for (size_t chunk = 0; chunk <= 16; chunk += 16) {
            Trace golden = {0};
            Ids ids = {0};
            Checkpoint c, right;
            Error e;
            double ratio;
            char path[100];
            snprintf(path, sizeof path, "tests/fixtures/%s", fixtures[i]);
            must(checkpoint_open(&right, path, &e), &e);
            trace_golden(fixtures[i], &golden, &ids, &c);
            /* Latents and q_a's result are normed again, which would hide it: there it is the latent's norm. */
            const Layer *l = c.model.layer;
            scale(l->kv_a_norm ? l->kv_a_norm : l->attn_norm, l->kv_a_norm ? c.model.kv_rank : c.model.dim);
            Costs costs = rounding_costs(&right.model, &golden, ids.data, ids.n);
            const char *wrong = first_wrong(&c.model, &costs, &golden, ids.data, ids.n, chunk, &ratio);
            /* Where heads of q and k are normed, their norm hides a factor of attn_norm: then v shows it first. */
            const char *behind = l->kv_a_norm ? "layers.0.k" : l->q_norm ? "layers.0.v" : "layers.0.q";
            check(!strcmp(wrong, behind), "%s: failed first at '%s', not at %s", fixtures[i], wrong, behind);
            checkpoint_close(&right);
            trace_free(&golden);
            ids_free(&ids);
            checkpoint_close(&c);
        }
}

static void router_and_experts_of_one(void) { real_router_and_experts(&cuda, 1); }
static void router_and_experts_of_40(void) { real_router_and_experts(&cuda, 40); }
static void sinks_by_token(void) { real_sinks(&cuda, BF16, 1); }
static void sinks_of_prompt(void) { real_sinks(&cuda, BF16, 0); }
static void sinks_plain(void) { real_sinks(&cuda, F32, 0); }

/* ---- properties ---- */

/* Token by token a stream gives the same bits alone and among 2 or 15 others, at any place in the batch. */
static void alone_equals_batched(void) {
    int which[STREAMS];
    float *alone[STREAMS], *batched[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        which[i] = (i * 5 + 3) % STREAMS;
        alone[i] = room(), batched[i] = room();
        feed(which + i, 1, 1, 0, alone + i);
    }
    for (int n = 3; n <= 16; n += 13) {
        feed(which, n, 1, 0, batched);
        for (int i = 0; i < n; i++)
            check(!memcmp(alone[i], batched[i], (size_t)streams.length[which[i]] * streams.vocab * 4),
                  "stream %d among %d", which[i], n);
    }
    for (int i = 0; i < STREAMS; i++) free(alone[i]), free(batched[i]);
}

/* The same kernels compute chunks of up to 16 tokens, and give the same bits. */
static void one_chunk_equals_many(void) {
    const int chunks[] = {2, 7, 16};
    int longest = 0;
    for (int s = 1; s < STREAMS; s++)
        if (streams.length[s] > streams.length[longest]) longest = s;
    float *one = room(), *other = room();
    feed(&longest, 1, 1, 0, &one);
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        feed(&longest, 1, chunks[i], 0, &other);
        check(!memcmp(one, other, (size_t)streams.length[longest] * streams.vocab * 4), "chunks of %d", chunks[i]);
    }
    free(one), free(other);
}

/* 17 beginnings of a fixture's prompt in one batch, long and short chunks mixed: each within the tolerance of its
 * golden. */
static void golden_streams_pass(void) {
    Trace golden = {0}, rounded = {0};
    Ids ids = {0};
    Checkpoint c;
    int which[STREAMS], saved[STREAMS][LONGEST], lengths[STREAMS];
    float *logits[STREAMS];
    trace_golden(streams.fixture, &golden, &ids, &c);
    reference_rounds = true;
    trace_run(&rounded, &reference, &c.model, ids.data, ids.n, 0);
    reference_rounds = false;
    const float *truth = stage_values(trace_stage(&golden, "logits")),
                *near = stage_values(trace_stage(&rounded, "logits"));
    memcpy(saved, streams.id, sizeof saved);
    memcpy(lengths, streams.length, sizeof lengths);
    for (int s = 0; s < STREAMS; s++) {
        which[s] = s;
        logits[s] = room();
        streams.length[s] = 1 + (int)((size_t)(s * 11 + 16) % ids.n);
        memcpy(streams.id[s], ids.data, (size_t)streams.length[s] * sizeof(int));
    }
    for (int chunk = -1; chunk < 2; chunk++) {
        feed(which, STREAMS, chunk, 0, logits);
        for (int s = 0; s < STREAMS; s++) {
            size_t n = (size_t)streams.length[s] * streams.vocab;
            double e = error_of(logits[s], truth, n), allowed = 3 * error_of(near, truth, n);
            check(e <= allowed, "stream %d, chunks of %d: %g, more than %g", s, chunk, e, allowed);
        }
    }
    memcpy(streams.id, saved, sizeof saved);
    memcpy(streams.length, lengths, sizeof lengths);
    for (int s = 0; s < STREAMS; s++) free(logits[s]);
    trace_free(&golden);
    trace_free(&rounded);
    ids_free(&ids);
    checkpoint_close(&c);
}

static void rewound_equals_never_there(void) {
    float *before = room(), *after = room();
    for (int s = 0; s < STREAMS; s++)
        for (int chunk = 0; chunk < 2; chunk++) {
            int length = streams.length[s], keep = length / 2, other = (s + 1) % STREAMS, saved[LONGEST];
            feed(&s, 1, chunk, 0, &before);
            feed(&s, 1, chunk, keep, &before); /* the same chunks as below */
            memcpy(saved, streams.id[s], sizeof saved);
            memcpy(streams.id[s] + keep, streams.id[other], (size_t)(LONGEST - keep) * sizeof *saved);
            streams.length[s] = LONGEST;
            feed(&s, 1, chunk, keep, &after);
            memcpy(streams.id[s], saved, sizeof saved);
            streams.length[s] = length;
            feed(&s, 1, chunk, keep, &after);
            size_t at = (size_t)keep * streams.vocab;
            check(!memcmp(before + at, after + at, (size_t)(length - keep) * streams.vocab * 4),
                  "stream %d from %d, chunks of %d", s, keep, chunk);
        }
    free(before), free(after);
}

static void ten_runs_are_one(void) {
    int which[STREAMS];
    float *first[STREAMS], *again[STREAMS];
    for (int i = 0; i < STREAMS; i++) which[i] = i, first[i] = room(), again[i] = room();
    for (int chunk = 0; chunk < 2; chunk++) {
        feed(which, STREAMS, chunk, 0, first);
        for (int run = 1; run < 10; run++) {
            feed(which, STREAMS, chunk, 0, again);
            for (int i = 0; i < STREAMS; i++)
                check(!memcmp(first[i], again[i], (size_t)streams.length[i] * streams.vocab * 4), "run %d, stream %d",
                      run, i);
        }
    }
    for (int i = 0; i < STREAMS; i++) free(first[i]), free(again[i]);
}

/* For combinations of all that changes a draw the card draws what the C sampler draws from the same logits, which the
 * card hands out as they were before. */
static void samplers_agree(void) {
    enum { LENGTH = 30, PROMPT = 15, BIASES = 40 };
    const float temperatures[] = {0, 0.5f, 1, 3}, top_ps[] = {1, 0.9f, 0.3f, 0.01f}, min_ps[] = {0, 0.05f, 0.5f},
                penalties[] = {1, 1.3f, 0.7f}, frequencies[] = {0, 0.3f, -1, 2, 0}, presences[] = {0, 0, 1.5f};
    const int top_ks[] = {0, 1, 5, 40, 1000};
    Error e;
    Result r;
    int text[LENGTH], all[2] = {0, LENGTH}, single[2] = {0, 1}, slot = 2, start = 0, page[2] = {0, 1}, drawn[4] = {0};
    uint64_t number = 0, random = 3;
    Want want = WANT_LOGITS;
    float *given = allocate(streams.vocab * 4), *logits = allocate(streams.vocab * 4);
    Bias bias[BIASES];
    memcpy(text, streams.id[5], sizeof text);
    Batch b = {1, 2, &slot, all, text, &start, page, &greedy, &want};
    /* What the text has shall be likely, and not all of it as often, or penalties would change nothing. */
    for (int run = 0; run < 2; run++) {
        must(cuda.submit(streams.state, &b, &e) && cuda.collect(streams.state, &r, &e), &e);
        if (!run) likeliest(r.logits, (int)streams.vocab, 11, text);
        for (int i = 11; i < LENGTH - 1 && !run; i++) text[i] = text[i * i % 11];
    }
    b.first = single, b.token = text + LENGTH - 1, start = LENGTH - 1;
    must(cuda.submit(streams.state, &b, &e) && cuda.collect(streams.state, &r, &e), &e);
    memcpy(given, r.logits, streams.vocab * 4);
    const int cases = thorough ? 4 * 5 * 4 * 3 * 3 * 5 * 3 : EMULATED ? 100 : 3000;
    for (int i = 0; i < cases; i++) {
        int at = thorough ? i : i * 7919 % 10800; /* of all combinations; 7919 is prime */
        Sampling how = {.seed = 1000 + (uint64_t)i, .answer = PROMPT, .allowed = i % 3 ? 0 : ++number, .bias = bias};
        how.temperature = temperatures[at % 4], at /= 4, how.top_k = top_ks[at % 5], at /= 5;
        how.top_p = top_ps[at % 4], at /= 4, how.min_p = min_ps[at % 3], at /= 3;
        how.penalty = penalties[at % 3], at /= 3;
        how.frequency = frequencies[at % 5], at /= 5, how.presence = presences[at % 3];
        for (int k = 0; i % 4 == 1 && k < BIASES; k++) /* 7 is prime to the size of the vocabulary */
            bias[k] = (Bias){(int)(((size_t)(i + 7 * k)) % streams.vocab), (float)(k * 37 % 11) - 6};
        how.biases = i % 4 == 1 || i % 4 == 2 ? BIASES : 0; /* once they change, and once they do not */
        b.sampling = &how, want = i % 2 ? WANT_TOKEN : WANT_LOGITS;
        must(cuda.submit(streams.state, &b, &e), &e);
        if (how.allowed) allow(slot, -1, number, &random);
        must(cuda.collect(streams.state, &r, &e), &e);
        memcpy(logits, given, streams.vocab * 4);
        const uint32_t *bits = streams.allowed.bits + (size_t)slot * ((streams.vocab + 31) / 32);
        adjust(logits, (int)streams.vocab, &how, text, LENGTH, how.allowed ? bits : NULL);
        int expected = draw(logits, (int)streams.vocab, &how, LENGTH), token = r.token[0];
        check(token == expected, "case %d: token %d, the C sampler draws %d", i, token, expected);
        check(!how.allowed || (token >= 0 && bits[token / 32] >> token % 32 & 1), "case %d: %d is not allowed", i,
              token);
        check(want == WANT_TOKEN || !memcmp(given, r.logits, streams.vocab * 4), "case %d: other logits", i);
        drawn[i % 4] += token == largest(given, (int)streams.vocab);
    }
    for (int i = 0; i < 4; i++) check(drawn[i] < cases / 4, "all draws were the likeliest token");
    free(given), free(logits);
}

static void take_nothing(Stream *t, size_t position, int token, const float *logits, bool last) {
    (void)t, (void)position, (void)token, (void)logits, (void)last;
}

/* A hundred conversations with an engine: the memory of the card does not shrink. */
static void memory_is_flat(void) {
    Error e;
    Engine g;
    size_t before = 0, after, total;
    Limits limits = {.max_seqs = 1, .max_tokens = 64};
    must(engine_open(&g, &cuda, &streams.c.model, limits, 128, &e), &e);
    Scheduler *s = scheduler_open(&g);
    for (int turn = 0; turn < 100; turn++) {
        Sampling how = {.temperature = 1,
                        .top_k = turn % 3 ? 0 : 20,
                        .top_p = 1,
                        .penalty = turn % 4 ? 1 : 1.1f,
                        .seed = (uint64_t)turn};
        Stream t = {.prompt = (size_t)(1 + turn % LONGEST), .sampling = how, .want = WANT_TOKEN, .take = take_nothing};
        t.most = t.prompt + 20;
        ids_append(&t.tokens, streams.id[turn % STREAMS], t.prompt);
        must(scheduler_run(s, &t, NULL, &e), &e);
        ids_free(&t.tokens);
        if (turn == 20) cudaMemGetInfo(&before, &total);
    }
    cudaMemGetInfo(&after, &total);
    check(after >= before, "%zu bytes fewer are free", before - after);
    scheduler_close(s);
    engine_close(&g);
}

/* Copies a fixture and puts a NaN into one of its tensors: opening must name where. */
static void nan_is_named(void) {
    const struct {
        const char *tensor, *named;
        int bytes; /* of the pattern */
        unsigned char pattern[4];
    } cases[] = {{"model.layers.1.self_attn.q_proj.weight", "layer 1, query", 2, {0xC0, 0x7F}},
                 {"model.layers.0.mlp.experts.down_proj_scales", "layer 0, down", 1, {0xFF}},
                 {"model.layers.1.mlp.experts.gate_up_proj_scales", "layer 1, gate", 1, {0xFF}},
                 {"lm_head.weight", "head", 2, {0xC0, 0x7F}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char directory[] = "/tmp/infer-nan-XXXXXX", command[200], path[100];
        Error e;
        Checkpoint c;
        int pages = 1;
        if (!mkdtemp(directory)) abort();
        snprintf(command, sizeof command, "cp tests/fixtures/true_heads/*.* %s && chmod u+w %s/*", directory,
                 directory);
        check(!system(command), "the fixture could not be copied");
        must(checkpoint_open(&c, directory, &e), &e);
        const Tensor *t = tensors_find(&c.tensors, cases[i].tensor);
        snprintf(path, sizeof path, "%s/model.safetensors", directory);
        int fd = open(path, O_WRONLY);
        check(pwrite(fd, cases[i].pattern, (size_t)cases[i].bytes, (off_t)(t->offset + t->size / 2)) == cases[i].bytes,
              "no NaN was written");
        close(fd);
        Limits limits = {.context = 64, .max_seqs = 1, .max_tokens = 16};
        void *state = cuda.open(&c.model, &limits, &pages, &e);
        check(!state && e.code == BAD_MODEL && strstr(e.text, cases[i].named), "%s: %s", cases[i].tensor,
              state ? "went unnoticed" : e.text);
        if (state) cuda.close(state);
        checkpoint_close(&c);
        snprintf(command, sizeof command, "rm -r %s", directory);
        check(!system(command), "%s stays behind", directory);
    }
}

/* The linker sends every cudaMalloc here (--wrap). */
static _Atomic int mallocs_until_failure = -1; /* threads that upload weights count, too */
cudaError_t __real_cudaMalloc(void **p, size_t n);
cudaError_t __wrap_cudaMalloc(void **p, size_t n);
cudaError_t __wrap_cudaMalloc(void **p, size_t n) {
    if (mallocs_until_failure-- == 0) return cudaErrorMemoryAllocation;
    return __real_cudaMalloc(p, n);
}

static void each_cudamalloc_may_fail(void) {
    int failed = 0;
    size_t before, after, total, lost = 1;
    /* CUDA keeps some memory for itself now and then; a leak loses some in every round. */
    for (int round = 0; round < 5 && lost; round++) {
        cudaMemGetInfo(&before, &total);
        failed = 0;
        for (bool more = true; more && failed < 1000; failed++) {
            Error e = {0};
            int pages = 2;
            Limits limits = {.context = 128, .max_seqs = 1, .max_tokens = 16, CARDS};
            mallocs_until_failure = failed;
            void *state = cuda.open(&streams.c.model, &limits, &pages, &e);
            more = mallocs_until_failure < 0 && !state;
            if (state) cuda.close(state);
            if (!state) check(e.code == NO_ROOM && strlen(e.text) > 20, "call %d: %d %s", failed, e.code, e.text);
        }
        mallocs_until_failure = -1;
        cudaMemGetInfo(&after, &total);
        lost = before > after ? before - after : 0;
    }
    check(failed > 4, "only %d calls were seen", failed);
    check(!lost, "%zu bytes were lost", lost);
}

#ifdef ROOM_families
#include "gpu_families.c"
#endif
#if defined ROOM_encodings && defined ROOM_families
#include "gpu_encodings.c"
#endif
#if defined ROOM_gpus && defined ROOM_encodings && defined ROOM_families
#define CARDS_TESTED
#include "gpu_cards.c"
#endif

/* What would take a processor minutes or hours. */
static void run_long(void) {
    if (!RANDOM_WEIGHTS) puts("skip gpu: models of random weights need commands/");
    if (RANDOM_WEIGHTS)
        run("gpu: prompts of 1 to 5,000 tokens, gpt-oss's shapes and a small vocabulary", shapes_of_gpt_oss);
    for (int i = 0; i < 2 && RANDOM_WEIGHTS; i++) { /* with fast/, and plain */
        plain = i;
        run(i ? "gpu: one token and several agree at gpt-oss-20b's shapes, plain"
              : "gpu: one token and several agree at gpt-oss-20b's shapes",
            instances_of_20b_agree);
        run(i ? "gpu: gpt-oss's shapes, stage by stage, plain" : "gpu: gpt-oss's shapes, stage by stage",
            phases_of_gpt_oss_agree);
        run(i ? "gpu: steps without numbers end, plain" : "gpu: steps without numbers end", nans_of_20b_end);
        run(i ? "gpu: contexts of unequal length, plain" : "gpu: contexts of unequal length", contexts_of_20b_agree);
    }
    plain = false;
    if (RANDOM_WEIGHTS) {
        run("gpu: fast and plain agree at every stage of a prompt", fast_agrees_with_plain);
        run("gpu: fast and plain agree for 256 streams", streams_agree_with_plain);
    }
    run("gpu: the reference, fast and plain agree at every stage, gpt-oss-20b's shapes", stages_of_20b_pass);
    for (int i = 0; i < 2; i++) {
        open_streams(&cuda, i ? "true_heads" : "odd");
        run(i ? "gpu: alone = batched, heads of 64" : "gpu: alone = batched", alone_equals_batched);
        if (i) run("gpu: one chunk = many, heads of 64", one_chunk_equals_many);
        if (i) run("gpu: 17 beginnings in one batch, heads of 64", golden_streams_pass);
        run(i ? "gpu: rewound = never there, heads of 64" : "gpu: rewound = never there", rewound_equals_never_there);
        run(i ? "gpu: ten runs, the same bits, heads of 64" : "gpu: ten runs, the same bits", ten_runs_are_one);
        if (i) run("gpu: memory is flat over 100 conversations", memory_is_flat);
        close_streams();
    }
#ifdef ROOM_families
    families_long();
#endif
#ifdef CARDS_TESTED
    cards_long();
#endif
#if defined ROOM_encodings && defined ROOM_families
    encodings_long();
#endif
}

int main(int argc, char **argv) {
    int there = 0;
    read_arguments(argv);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1); /* no card may load code while another waits for it on the same GPU */
    if (cudaGetDeviceCount(&there) || !there) {
        printf("skip gpu: there is none here\n");
        return 0;
    }
    for (int i = 0; i < 2; i++) { /* with fast/, and plain */
        plain = i;
        run(i ? "gpu: fixtures at every stage, in chunks of 1 to all, plain"
              : "gpu: fixtures at every stage, in chunks of 1 to all",
            fixtures_pass);
        run(i ? "gpu: prompts of 1 to 300 tokens, plain" : "gpu: prompts of 1 to 300 tokens", lengths_pass);
    }
    plain = false;
#ifdef ROOM_families
    families_tests();
#endif
#if defined ROOM_encodings && defined ROOM_families
    encodings_tests();
#endif
    run("gpu: a norm 1 % off fails at the stage behind it", spoiled_models_fail);
    run("gpu: the real router and experts, one token", router_and_experts_of_one);
    run("gpu: the real router and experts, 40 tokens", router_and_experts_of_40);
    run("gpu: the real scores and sinks, token by token", sinks_by_token);
    run("gpu: the real scores and sinks, one prompt", sinks_of_prompt);
    run("gpu: the real scores and sinks, F32", sinks_plain);
    run("gpu: a NaN in a weight is named", nan_is_named);
    run("gpu: a router and a head in F32, queries in F16", types_of_x_may_differ);
    run("gpu: what kernels rely on is checked", what_kernels_rely_on_is_checked);
    open_streams(&cuda, "odd");
    run("gpu: one chunk = many", one_chunk_equals_many);
    run("gpu: 17 beginnings in one batch", golden_streams_pass);
    run("gpu: C and CUDA draw alike", samplers_agree);
    run("gpu: each cudaMalloc may fail", each_cudamalloc_may_fail);
    close_streams();
    open_streams(&cuda, "true_heads");
    run("gpu: C and CUDA draw alike, heads of 64", samplers_agree);
    run("gpu: a draw waits until it is told what it may draw", draws_wait);
    close_streams();
#ifdef CARDS_TESTED
    cards_tests();
#endif
    if (!EMULATED) run_long();
    return failures != 0;
}
