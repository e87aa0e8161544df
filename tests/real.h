/* real.h: what was recorded from real weights, on any backend: the activations of gpt-oss-20b's layer 0 and the texts
 * of two small Llama models. */
#ifndef REAL_H
#define REAL_H

#include "check.h"

#include <sys/mman.h>
#include <unistd.h>

/* Lines of bytes as a file, which any backend may read. */
static inline View view_of(const void *data, int lines, size_t bytes) {
    int fd = memfd_create("weights", 0);
    size_t n = bytes * (size_t)lines;
    if (fd < 0 || ftruncate(fd, (off_t)n) || (data && write(fd, data, n) != (ssize_t)n)) abort();
    return (View){mmap(NULL, n, PROT_READ, MAP_SHARED, fd, 0), fd, lines, 0, bytes, bytes, 0};
}

static inline void view_free(const View *v, int n) {
    munmap((void *)(uintptr_t)v->data, v->bytes * (size_t)v->lines * (size_t)n);
    close(v->fd);
}

static inline View part_of(View v, int i, int n) { /* part i of n equal ones */
    v.lines /= n, v.offset = (size_t)i * (size_t)v.lines * v.bytes, v.data += v.offset;
    return v;
}

/* n matrices whose codes are at `data`, or 0 if that is NULL. */
static inline Linear stored(Type type, int n, int rows, int cols, const void *data, const float *bias) {
    size_t row = (size_t)cols / (size_t)types[type].values * (size_t)types[type].bytes;
    View codes = view_of(data, n * rows, row), scales = {0};
    Stored *each = allocate_zero((size_t)n, sizeof *each);
    Linear w = {.type = type, .rows = rows, .cols = cols, .n = n, .each = each};
    if (type == MXFP4) w.scale = (Grid){E8M0, 1, 32, false}, scales = view_of(NULL, n * rows, row / 16);
    for (int i = 0; i < n; i++)
        each[i] = (Stored){part_of(codes, i, n), .factor = 1, .bias = bias ? bias + i * rows : NULL};
    for (int i = 0; i < n && w.scale.rows; i++) each[i].scale = part_of(scales, i, n);
    return w;
}

static inline Linear zeros(Type type, int n, int rows, int cols, const float *bias) { /* nothing but its bias */
    return stored(type, n, rows, cols, NULL, bias);
}

/* n matrices of numbers as F32, or as the nearest BF16. */
static inline Linear full(Type type, const float *data, int n, int rows, int cols) {
    uint16_t *half = allocate((size_t)n * (size_t)rows * (size_t)cols * sizeof *half);
    for (int i = 0; i < n * rows * cols; i++) half[i] = (uint16_t)((float_bits(data[i]) + 0x8000) >> 16);
    Linear w = stored(type, n, rows, cols, type == F32 ? (const void *)data : half, NULL);
    free(half);
    return w;
}

static inline void linear_free(Linear *w) {
    if (!w->rows) return;
    view_free(&w->each->data, w->n);
    if (w->scale.rows) view_free(&w->each->scale, w->n);
    free((void *)(uintptr_t)w->each);
}

static inline void model_free(Model *m) {
    Layer *l = m->layer;
    Linear *all[] = {&m->embed, &m->head, &l->q, &l->k, &l->v, &l->o, &l->router, &l->gate, &l->up, &l->down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) linear_free(all[i]);
}

static struct { /* what the taps saw of the last token */
    float experts[8], weights[8], act[2880], attn[4096], attn_residual[2880], residual[2880];
} seen;

static inline void remember_tap(void *data, const char *stage, int layer, const float *values, int rows, int cols) {
    (void)data, (void)layer;
    const float *last = values + (size_t)(rows - 1) * (size_t)cols;
    if (!strcmp(stage, "experts")) memcpy(seen.experts, last, (size_t)cols * 4);
    if (!strcmp(stage, "weights")) memcpy(seen.weights, last, (size_t)cols * 4);
    if (!strcmp(stage, "act")) memcpy(seen.act, values, (size_t)cols * 4); /* of the first choice */
    if (!strcmp(stage, "attn")) memcpy(seen.attn, last, (size_t)cols * 4);
    if (!strcmp(stage, "attn_residual")) memcpy(seen.attn_residual, last, (size_t)cols * 4);
    if (!strcmp(stage, "residual")) memcpy(seen.residual, last, (size_t)cols * 4);
}

static inline void run_tokens(const Backend *backend, const Model *m, const int *ids, size_t n, size_t chunk) {
    Error e;
    Engine g;
    if (!chunk) chunk = n;
    Limits limits = {.max_seqs = 1, .max_tokens = (int)chunk, .tap = remember_tap};
    must(engine_open(&g, backend, m, limits, 0, &e), &e);
    for (size_t at = 0; at < n; at += chunk) {
        size_t now = n - at < chunk ? n - at : chunk;
        run_text(&g, ids, at, at + now, WANT_TOKEN, &greedy);
    }
    engine_close(&g);
}

/* Tokens, all alike, through a layer of zero matrices whose biases are the real activations: the embedding is the real
 * residual stream behind attention, the router's bias the real router logits, the experts' biases what the real experts
 * computed. So routing, activation, combination and residual must give the recorded numbers, which are rounded to bf16.
 */
static inline void real_router_and_experts(const Backend *backend, size_t tokens) {
    enum { DIM = 2880, EXPERTS = 32, TOP = 4 };
    Error e;
    cJSON *golden = json_read("tests/goldens/layer0.json", 1 << 20, &e);
    must(golden, &e);
    float *residual = numbers(json_get(golden, "hidden_after_attn"), DIM),
          *router = numbers(json_get(golden, "router_logits"), EXPERTS);
    float *mlp1 = numbers(json_get(golden, "expert30_mlp1"), 2 * DIM),
          *after = numbers(json_get(golden, "hidden_after_mlp"), DIM);
    float *swiglu = numbers(json_get(golden, "expert30_swiglu"), DIM),
          *expert = numbers(json_get(golden, "experts"), TOP);
    float *weight = numbers(json_get(golden, "expert_weights"), TOP);
    float *gate = allocate_zero(EXPERTS * DIM, 4), *up = allocate_zero(EXPERTS * DIM, 4),
          *down = allocate_zero(EXPERTS * DIM, 4);
    float *ones = allocate(DIM * 4), *no_bias = allocate_zero(DIM, 4), inv_freq[32] = {0};
    const Rope rope[2] = {{inv_freq, 1}, {inv_freq, 1}};
    const cJSON *outputs = json_get(golden, "selected_expert_outputs");
    for (int i = 0; i < DIM; i++) ones[i] = 1;
    for (int k = 0; k < TOP; k++) {
        float *output = numbers(cJSON_GetArrayItem(outputs, k), DIM);
        memcpy(down + (int)expert[k] * DIM, output, DIM * 4);
        free(output);
    }
    for (int i = 0; i < EXPERTS * DIM; i++) { /* expert 30's, for all: it need not be the first choice */
        gate[i] = mlp1[2 * (i % DIM)];
        up[i] = mlp1[2 * (i % DIM) + 1];
    }
    Layer layer = {.attn_norm = ones,
                   .ffn_norm = ones,
                   .q = zeros(F32, 1, 64, DIM, NULL),
                   .k = zeros(F32, 1, 64, DIM, NULL),
                   .v = zeros(F32, 1, 64, DIM, NULL),
                   .o = zeros(F32, 1, DIM, 64, no_bias),
                   .router = zeros(F32, 1, EXPERTS, DIM, router),
                   .gate = zeros(MXFP4, EXPERTS, DIM, DIM, gate),
                   .up = zeros(MXFP4, EXPERTS, DIM, DIM, up),
                   .down = zeros(MXFP4, EXPERTS, DIM, DIM, down),
                   .rope = rope};
    Model m = {.n_layers = 1,
               .dim = DIM,
               .ffn_dim = DIM,
               .vocab = 1,
               .context = 64,
               .n_heads = 1,
               .n_kv_heads = 1,
               .head_dim = 64,
               .v_dim = 64,
               .rope_dim = 64,
               .rope = rope,
               .attn_scale = 0.125f,
               .n_experts = EXPERTS,
               .top_k = TOP,
               .route = {.normalise = true, .scale = 1, .groups = 1, .top_groups = 1},
               .eps = 1e-5f,
               .act = SWIGLU_CLAMPED,
               .act_limit = 7,
               .embed_scale = 1,
               .embed = full(F32, residual, 1, 1, DIM),
               .head = zeros(F32, 1, 1, DIM, NULL),
               .norm = ones,
               .layer = &layer};
    int ids[64] = {0};
    run_tokens(backend, &m, ids, tokens, 0);
    for (int k = 0; k < TOP; k++) {
        check(seen.experts[k] == expert[k], "choice %d is expert %g, not %g", k, (double)seen.experts[k],
              (double)expert[k]);
        check(fabsf(seen.weights[k] - weight[k]) < 0x1p-9f, "weight %d is %g, not %g", k, (double)seen.weights[k],
              (double)weight[k]);
    }
    check(error_of(seen.act, swiglu, DIM) < 0x1p-8, "activation: %g", error_of(seen.act, swiglu, DIM));
    check(error_of(seen.residual, after, DIM) < 0x1p-8, "residual: %g", error_of(seen.residual, after, DIM));
    model_free(&m);
    float *owned[] = {residual, router, mlp1, after, swiglu, expert, weight, gate, up, down, ones, no_bias};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    cJSON_Delete(golden);
}

/* The real scores and sinks of four heads of the last of 74 tokens. Token j's embedding is the unit vector j, so column
 * j of each matrix is what that token's q, k or v shall be; with q = 8 (1, 0, ...) and k = (score, 0, ...) the products
 * are the recorded scores, with v the unit vector j the output is the softmax itself, of which the first 64 keys are
 * seen. */
static inline void real_sinks(const Backend *backend, Type type, size_t chunk) {
    enum { N = 74, DIM = 256, HEAD = 64 }; /* sqrt(DIM) is a power of two, so that bf16 holds everything exactly */
    Error e;
    cJSON *golden = json_read("tests/goldens/layer0.json", 1 << 20, &e);
    must(golden, &e);
    const cJSON *head;
    cJSON_ArrayForEach(head, json_get(golden, "heads")) {
        float *score = numbers(json_get(head, "qk_scaled_pre_mask"), N),
              *share = numbers(json_get(head, "attn_probs_with_sink"), N + 1);
        float sink = (float)json_get(head, "sink")->valuedouble, inv_freq[HEAD / 2] = {0}, ones[DIM];
        const Rope rope[2] = {{inv_freq, 1}, {inv_freq, 1}};
        float *q = allocate_zero(HEAD * DIM, 4), *k = allocate_zero(HEAD * DIM, 4), *v = allocate_zero(HEAD * DIM, 4);
        float *embed = allocate_zero(N * DIM, 4), norm = sqrtf(DIM); /* of a unit vector: sqrt(DIM) (1, 0, ...) */
        for (int i = 0; i < DIM; i++) ones[i] = 1;
        for (int j = 0; j < N; j++) {
            embed[j * DIM + j] = 1;
            q[j] = 8 / norm;
            k[j] = score[j] / norm;
            if (j < HEAD) v[j * DIM + j] = 1 / norm;
        }
        Layer layer = {.attn_norm = ones,
                       .ffn_norm = ones,
                       .sinks = &sink,
                       .q = full(type, q, 1, HEAD, DIM),
                       .k = full(type, k, 1, HEAD, DIM),
                       .v = full(type, v, 1, HEAD, DIM),
                       .o = zeros(type, 1, DIM, HEAD, NULL),
                       .gate = zeros(type, 1, 32, DIM, NULL),
                       .up = zeros(type, 1, 32, DIM, NULL),
                       .down = zeros(type, 1, DIM, 32, NULL),
                       .window = 128,
                       .rope = rope};
        Model m = {.n_layers = 1,
                   .dim = DIM,
                   .ffn_dim = 32,
                   .vocab = N,
                   .context = 128,
                   .n_heads = 1,
                   .n_kv_heads = 1,
                   .head_dim = HEAD,
                   .v_dim = HEAD,
                   .rope_dim = HEAD,
                   .rope = rope,
                   .attn_scale = 0.125f,
                   .n_experts = 1,
                   .top_k = 1,
                   .eps = 1e-12f,
                   .embed_scale = 1,
                   .embed = full(type, embed, 1, N, DIM),
                   .head = zeros(type, 1, N, DIM, NULL),
                   .norm = ones,
                   .layer = &layer};
        int ids[N];
        for (int j = 0; j < N; j++) ids[j] = j;
        run_tokens(backend, &m, ids, N, chunk);
        double most = 0;
        for (int j = 0; j < N; j++) most = fmax(most, fabs((double)score[j]));
        check(error_of(seen.attn, share, HEAD) < expm1(2 * most * 0x1p-9), "head %d: %g",
              json_get(head, "head")->valueint, error_of(seen.attn, share, HEAD));
        model_free(&m);
        float *owned[] = {score, share, q, k, v, embed};
        for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    }
    cJSON_Delete(golden);
}

typedef struct {
    int vocab;
    float *logits; /* (vocab) */
} LastRow;

static inline void keep_logits(Stream *t, size_t position, int token, const float *logits, bool last) {
    const LastRow *to = t->owner;
    (void)position, (void)token, (void)last;
    memcpy(to->logits, logits, (size_t)to->vocab * sizeof *logits);
}

/* Greedy generation from a prompt, whose ids must be the expected ones; the logits before the last of them (vocab). */
static inline float *generate_greedily(const Backend *backend, const Model *m, const cJSON *prompt,
                                       const cJSON *expected) {
    Error e;
    Engine g;
    LastRow row = {m->vocab, allocate((size_t)m->vocab * sizeof(float))};
    Stream t = {.sampling = greedy, .want = WANT_LOGITS, .take = keep_logits, .owner = &row};
    const cJSON *id;
    Limits limits = {.max_seqs = 1, .max_tokens = 4};
    must(engine_open(&g, backend, m, limits, 0, &e), &e);
    Scheduler *s = scheduler_open(&g);
    cJSON_ArrayForEach(id, prompt) ids_add(&t.tokens, id->valueint);
    t.prompt = t.tokens.n, t.most = t.prompt + (size_t)cJSON_GetArraySize(expected);
    must(scheduler_run(s, &t, NULL, &e), &e);
    for (size_t i = t.prompt; i < t.most; i++) {
        int golden = cJSON_GetArrayItem(expected, (int)(i - t.prompt))->valueint;
        check(t.tokens.data[i] == golden, "token %zu is %d, not %d", i - t.prompt, t.tokens.data[i], golden);
    }
    ids_free(&t.tokens);
    scheduler_close(s);
    engine_close(&g);
    return row.logits;
}

/* The ids and logits are those that double precision NumPy gave; the logits on the GPU, whose cache is bf16, up to
 * three times what that rounding costs the reference. */
static inline void small_model(const Backend *backend, const char *name) {
    char path[400];
    Error e;
    Checkpoint c;
    const char *data = getenv("TEST_DATA");
    snprintf(path, sizeof path, "%s/models/%s/model.safetensors", data ? data : "", name);
    if (!file_exists(path)) {
        check(false, "skip needs models/%s in TEST_DATA", name);
        return;
    }
    snprintf(path, sizeof path, "tests/goldens/%s.json", name);
    cJSON *golden = json_read(path, 1 << 20, &e);
    must(golden, &e);
    snprintf(path, sizeof path, "%s/models/%s", data, name);
    must(checkpoint_open(&c, path, &e), &e);
    size_t vocab = (size_t)c.model.vocab;
    const cJSON *prompt = json_get(golden, "prompt_ids"), *expected = json_get(golden, "greedy_ids");
    float *last = numbers(json_get(golden, "last_logits"), c.model.vocab),
          *found = generate_greedily(backend, &c.model, prompt, expected);
    double allowed = 1e-5, wrong = error_of(found, last, vocab);
    if (backend != &reference) {
        reference_rounds = true;
        float *rounded = generate_greedily(&reference, &c.model, prompt, expected);
        reference_rounds = false;
        allowed = 3 * error_of(rounded, last, vocab);
        free(rounded);
    }
    check(wrong < allowed, "logits: %g, more than %g", wrong, allowed);
    free(last);
    free(found);
    checkpoint_close(&c);
    cJSON_Delete(golden);
}

#endif
