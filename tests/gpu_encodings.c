/* gpu_encodings.c: what gpu.c checks of encodings/, with models of families/. gpu.c includes it. */
#include "encodings/blocks.h"

#include <dirent.h>

/* A model whose weights are encoded, against the reference: in chunks of one token, of a few, of two and three groups,
 * and of so many that matrices are made bf16 for cuBLAS. Models with experts read the golden's few ids, which keep
 * routers away from ties. */
static int encoding_sizes = 7; /* of chunks */
static void encoding_passes(const char *path) {
    enum { N = 100 };
    int ids[N];
    uint64_t random = 3;
    size_t n = N;
    Checkpoint c;
    Trace golden = {0};
    Error e;
    at(path);
    must(checkpoint_open(&c, path, &e), &e);
    fill_random(ids, N, (size_t)c.model.vocab, &random);
    if (n > (size_t)c.model.context) n = (size_t)c.model.context;
    if (c.model.n_experts > 1) {
        Ids own = {0};
        Checkpoint same;
        trace_golden(path + strlen("tests/fixtures/"), &golden, &own, &same);
        memcpy(ids, own.data, own.n * sizeof *ids);
        n = own.n;
        trace_free(&golden), ids_free(&own), checkpoint_close(&same);
        golden = (Trace){0};
    }
    trace_run(&golden, &reference, &c.model, ids, n, 0);
    Costs costs = rounding_costs(&c.model, &golden, ids, n);
    chunks_pass(path, &c.model, &costs, &golden, ids, n, encoding_sizes, (size_t[]){1, 7, 0, 16, 17, 30, 50});
    trace_free(&golden);
    checkpoint_close(&c);
}

static void each_in(const char *folder, const char *ending, void (*passes)(const char *path)) {
    DIR *dir = opendir(folder);
    int found = 0;
    for (struct dirent *d; dir && (d = readdir(dir));) {
        char path[400];
        const char *dot = strrchr(d->d_name, '.');
        if (*d->d_name == '.' || strcmp(dot ? dot : "", ending)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, d->d_name);
        passes(path);
        found++;
    }
    check(found > 0, "%s holds none", folder);
    if (dir) closedir(dir);
}
static void encodings_pass(void) { each_in("tests/fixtures/encodings", "", encoding_passes); }
static void gguf_passes(void) { each_in("tests/fixtures/gguf", ".gguf", encoding_passes); }

/* Matrices of more than 16 MB, and of so many rows that tiles of 64 tokens fill the card: way_of() has limits there. */
static void shapes_wide(void) {
    const char *encodings[] = {NULL, "f16", "fp8", "gptq4", "q4_1", "q8_0", "q5_k", "q6_k"};
    for (size_t i = 0; i < sizeof encodings / sizeof *encodings; i++)
        shapes_pass(DENSE(LLAMA, "512", "8448", "8", "2", "64"), 2, NEARLY_ALL, encodings[i]);
}

/* Experts in 16 bits and in every type of codes on the card. From 21 tokens on (17, where all eight are chosen) codes
 * are rounded to bf16 before the product, so a router close to a tie may choose other experts: half of the tokens must
 * agree. Where all experts are chosen, all must. */
#define QWEN3_MOE(CHOSEN)                                                                                              \
    "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\",\"num_hidden_layers\":%d,"              \
    "\"vocab_size\":%d,\"hidden_size\":512,\"intermediate_size\":512,\"moe_intermediate_size\":256,"                   \
    "\"num_experts\":8,\"num_experts_per_tok\":" CHOSEN ",\"norm_topk_prob\":true,\"num_attention_heads\":8,"          \
    "\"num_key_value_heads\":2,\"head_dim\":64,\"hidden_act\":\"silu\",\"max_position_embeddings\":8192,"              \
    "\"rms_norm_eps\":1e-06,\"rope_theta\":10000,\"tie_word_embeddings\":false}"
static void shapes_experts(void) {
    const char *encodings[] = {NULL, "f16", "fp8", "int8", "gptq4", "q4_1", "q8_0", "q5_k", "q6_k", "q4_k_m"};
    for (size_t i = 0; i < sizeof encodings / sizeof *encodings; i++) {
        shapes_pass(QWEN3_MOE("2"), 2, 0.5, encodings[i]);
        shapes_both_ways(QWEN3_MOE("8"), 2, 1, encodings[i]);
    }
}

static void shapes_latent_coded(void) {
    const char *encodings[] = {"mxfp4", "fp8", "int8", "q4_1", "q8_0", "q5_k", "q6_k", "q4_k_m"};
    for (size_t i = 0; i < sizeof encodings / sizeof *encodings; i++)
        shapes_pass(LATENT("8", "256", "32"), 2, NEARLY_ALL, encodings[i]);
}

static void fast_agrees_with_plain_on_experts(void) {
    const char *encodings[] = {NULL, "fp8", "q4_1", "q6_k"};
    for (size_t i = 0; i < sizeof encodings / sizeof *encodings; i++) stages_agree(QWEN3_MOE("8"), 512, encodings[i]);
}

/* BF16 matrices as INT8, with a scale a row. */
static Linear as_int8(const Linear *w) {
    const size_t rows = (size_t)w->n * (size_t)w->rows, cols = (size_t)w->cols;
    signed char *code = allocate(rows * cols);
    float *scale = allocate(rows * sizeof *scale), *x = allocate(cols * sizeof *x);
    for (size_t r = 0; r < rows; r++) {
        const View *from = &w->each[r / (size_t)w->rows].data;
        float max = 0;
        for (size_t c = 0; c < cols; c++) {
            uint16_t half;
            memcpy(&half, from->data + r % (size_t)w->rows * from->stride + c * sizeof half, sizeof half);
            x[c] = bits_float((uint32_t)half << 16), max = fmaxf(max, fabsf(x[c]));
        }
        scale[r] = max / 127;
        for (size_t c = 0; c < cols; c++) code[r * cols + c] = (signed char)lrintf(x[c] / scale[r]);
    }
    Linear to = stored(INT8, w->n, w->rows, w->cols, code, NULL);
    const View scales = view_of(scale, (int)rows, sizeof *scale);
    to.scale = (Grid){F32, 1, w->cols, false};
    for (int i = 0; i < w->n; i++) ((Stored *)(uintptr_t)to.each)[i].scale = part_of(scales, i, w->n);
    free(code), free(scale), free(x);
    return to;
}

/* Rows of codes may end inside a word. What multiplies the rest of it is what a wider layer left there. */
static void rows_may_end_inside_words(void) {
    Trace golden = {0}, whole = {0};
    Ids ids = {0};
    Checkpoint c;
    trace_golden("deepseek_v3", &golden, &ids, &c);
    Layer *l = c.model.layer + c.model.n_layers - 1;
    check(l->down.type == BF16 && l->down.cols % 32 && l[-1].down.cols > l->down.cols,
          "the last layer is not narrower");
    l->down = as_int8(&l->down), l->shared_down = as_int8(&l->shared_down);
    trace_run(&whole, &reference, &c.model, ids.data, ids.n, 0);
    Costs costs = rounding_costs(&c.model, &whole, ids.data, ids.n);
    chunks_pass("ends of rows", &c.model, &costs, &whole, ids.data, ids.n, 3, (size_t[]){0, 1, 7});
    linear_free(&l->down), linear_free(&l->shared_down);
    trace_free(&golden), trace_free(&whole);
    ids_free(&ids);
    checkpoint_close(&c);
}

/* In a block of Q4_1 whose scale is 0 all weights are its minimum, whatever the codes. */
static void constant_blocks_pass(void) {
    enum { N = 20, BLOCK = 20 };
    int ids[N];
    uint64_t random = 7;
    Trace golden = {0};
    Checkpoint c;
    Error e;
    must(checkpoint_open(&c, "tests/fixtures/gguf/Q4_1.gguf", &e), &e);
    Linear *up = &c.model.layer->up;
    const View *file = &up->each->data;
    check(up->type == Q4_1 && file->stride == file->bytes, "up is not Q4_1, row by row");
    const size_t size = (size_t)file->lines * file->bytes;
    unsigned char *bytes = allocate(size);
    memcpy(bytes, file->data, size);
    for (size_t at = 0; at < size; at += 2 * BLOCK) bytes[at] = bytes[at + 1] = 0;
    Linear changed = stored(Q4_1, 1, up->rows, up->cols, bytes, NULL);
    *up = changed;
    fill_random(ids, N, (size_t)c.model.vocab, &random);
    trace_run(&golden, &reference, &c.model, ids, N, 0);
    Costs costs = rounding_costs(&c.model, &golden, ids, N);
    chunks_pass("blocks of one weight", &c.model, &costs, &golden, ids, N, 3, (size_t[]){1, 16, 0});
    linear_free(&changed), free(bytes);
    trace_free(&golden);
    checkpoint_close(&c);
}

/* What `inspect` counts: Q2_K takes more than three times its bytes in a file. Two encodings differ by as much as is
 * said in what is taken, up to the pieces of 2 MB that CUDA hands out, two for each model. */
static void weights_take_what_is_said(void) {
    const char *encodings[] = {"q2_k", "q8_0"};
    size_t before, after, total;
    double taken[2], said[2];
    if (skips_random_weights()) return;
    for (int i = 0; i < 2; i++) {
        Checkpoint c;
        Engine g;
        cudaMemGetInfo(&before, &total);
        open_made_up(&g, &c, DENSE(LLAMA, "2048", "8192", "16", "4", "128"), 2, 512, encodings[i], 16);
        cudaMemGetInfo(&after, &total);
        taken[i] = (double)before - (double)after, said[i] = (double)cuda.weight_bytes(&c.model);
        if (i == 0) check(said[0] > 3 * (double)reference.weight_bytes(&c.model), "%g bytes", said[0]);
        engine_close(&g);
        checkpoint_close(&c);
    }
    check(fabs(taken[0] - taken[1] - said[0] + said[1]) < 8e6, "%g and %g bytes are taken, %g and %g said", taken[0],
          taken[1], said[0], said[1]);
}

/* A published model (tests/real_models.py): the reference against transformers' largest logits, and the GPU at every
 * stage against the reference; emulated, only the first tokens in one chunk. */
static void real_model_passes(const char *name) {
    Error e;
    Checkpoint c;
    Trace golden = {0};
    const char *data = getenv("TEST_DATA");
    LocalText path = text_print("%s/real/%s.gguf", data ? data : "build", name);
    if (!file_exists(path)) free(path), path = text_print("build/real/%s.gguf", name);
    if (!file_exists(path)) return check(false, "skip needs %s: python3 tests/real_models.py %s", name, name);
    LocalJson all = json_read("tests/goldens/real.json", 1 << 20, &e);
    const cJSON *row = all ? all->child : NULL;
    while (row && !json_is(row, "name", name)) row = row->next;
    must(checkpoint_open(&c, path, &e), &e);
    const int n = EMULATED ? 24 : cJSON_GetArraySize(json_get(row, "norms"));
    float *ids = numbers(json_get(row, "ids"), cJSON_GetArraySize(json_get(row, "ids")));
    int *text = allocate((size_t)n * sizeof *text);
    for (int i = 0; i < n; i++) text[i] = (int)ids[i];
    trace_run(&golden, &reference, &c.model, text, (size_t)n, 0);
    const float *logits = stage_values(trace_stage(&golden, "logits"));
    double difference = 0, size = 0;
    for (int i = 0; i < n; i++) {
        const cJSON *pair, *norm = cJSON_GetArrayItem(json_get(row, "norms"), i);
        size += norm->valuedouble * norm->valuedouble;
        cJSON_ArrayForEach(pair, cJSON_GetArrayItem(json_get(row, "largest"), i)) {
            const float x = logits[i * c.model.vocab + (int)pair->child->valuedouble];
            difference += pow((double)x - pair->child->next->valuedouble, 2);
        }
    }
    check(n > 0 && sqrt(difference / size) < 1e-4, "the reference is %.2g off", sqrt(difference / size));
    Costs costs = rounding_costs(&c.model, &golden, text, (size_t)n);
    chunks_pass(name, &c.model, &costs, &golden, text, (size_t)n, EMULATED ? 1 : 3, (size_t[]){0, 16, 1});
    free(ids), free(text);
    trace_free(&golden);
    checkpoint_close(&c);
}
static void smollm2_135m(void) { real_model_passes("SmolLM2-135M-Instruct"); }
static void gemma_3_270m(void) { real_model_passes("gemma-3-270m"); }
static void qwen_coder_0_5b(void) { real_model_passes("Qwen2.5-Coder-0.5B-Instruct"); }
static void qwen_coder_1_5b(void) { real_model_passes("Qwen2.5-Coder-1.5B-Instruct"); }

static void encodings_long(void) {
    run("gpu: Gemma 3 270M at every stage", gemma_3_270m);
    run("gpu: Qwen2.5-Coder-0.5B at every stage", qwen_coder_0_5b);
    run("gpu: Qwen2.5-Coder-1.5B at every stage", qwen_coder_1_5b);
    if (!RANDOM_WEIGHTS) return;
    run("gpu: prompts of 1 to 5,000 tokens, wide matrices in 16 bits and in codes", shapes_wide);
    run("gpu: prompts of 1 to 5,000 tokens, experts in 16 bits and in codes", shapes_experts);
    run("gpu: prompts of 1 to 5,000 tokens, latent attention in codes", shapes_latent_coded);
    run("gpu: fast and plain agree at every stage of a prompt, experts in 16 bits and in codes",
        fast_agrees_with_plain_on_experts);
}

static void encodings_tests(void) {
    run("gpu: every encoding of safetensors", encodings_pass);
    run("gpu: every type of GGUF", gguf_passes);
    run("gpu: rows of codes that end inside a word", rows_may_end_inside_words);
    run("gpu: blocks of one weight", constant_blocks_pass);
    run("gpu: weights take as much memory as is said", weights_take_what_is_said);
    run("gpu: SmolLM2-135M at every stage", smollm2_135m);
}
