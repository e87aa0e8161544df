/* gpu_families.c: what gpu.c checks of families/: dense models, other sizes of heads, latent attention, shared experts,
 * two small published models. gpu.c includes it. */

static void dense_lengths_pass(void) {
    const size_t lengths[] = {300, 1, 2, 7, 16, 17, 127, 128, 129, 300};
    lengths_of("llama3", lengths, 10);
    lengths_of("qwen3", lengths, 10);
}

#define LLAMA   "\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\""
#define MISTRAL "\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\",\"sliding_window\":300"
#define DENSE(FAMILY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM)                                                        \
    "{" FAMILY ",\"num_hidden_layers\":%d,\"vocab_size\":%d,\"hidden_size\":" HIDDEN ",\"intermediate_size\":" INNER   \
    ",\"hidden_act\":\"silu\",\"max_position_embeddings\""                                                             \
    ":8192,\"rms_norm_eps\":1e-05,\"rope_theta\":10000,\"attention_bias\":false,\"mlp_bias\":false,"                   \
    "\"tie_word_embeddings\":false,\"num_attention_heads\":" HEADS ",\"num_key_value_heads\":" KV_HEADS                \
    ",\"head_dim\":" HEAD_DIM "}"

/* With the attention of fast/ and with plain's, which take other tiles. */
static void shapes_both_ways(const char *config, int layers, double share, const char *encoding) {
    for (int i = 0; i < 2; i++) plain = i, shapes_pass(config, layers, share, encoding);
    plain = false;
}
static void shapes_dense_64(void) {
    shapes_both_ways(DENSE(LLAMA, "768", "1152", "12", "3", "64"), 3, NEARLY_ALL, NULL);
    shapes_both_ways(DENSE(MISTRAL, "768", "1152", "9", "3", "64"), 3, NEARLY_ALL, NULL);
}
static void shapes_dense_128(void) {
    shapes_both_ways(DENSE(LLAMA, "768", "1152", "16", "2", "128"), 3, NEARLY_ALL, NULL);
    shapes_both_ways(DENSE(MISTRAL, "768", "1152", "14", "2", "128"), 3, NEARLY_ALL, NULL);
}

static void streams_agree_with_plain_heads_of_128(void) {
    streams_agree(DENSE(MISTRAL, "768", "1152", "14", "2", "128"));
}

/* Latent attention, whose products go head by head, and a layer with a shared expert. */
#define LATENT(HEADS, RANK, ROPE)                                                                                      \
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"model_type\":\"deepseek_v3\",\"num_hidden_layers\":%d,"          \
    "\"vocab_size\":%d,\"hidden_size\":512,\"intermediate_size\":768,\"num_attention_heads\":" HEADS                   \
    ",\"hidden_act\":"                                                                                                 \
    "\"silu\",\"q_lora_rank\":256,\"kv_lora_rank\":" RANK ",\"qk_nope_head_dim\":64,\"qk_rope_head_dim\":" ROPE ","    \
    "\"v_head_dim\":64,\"n_routed_experts\":8,\"num_experts_per_tok\":8,\"n_group\":1,\"topk_group\":1,"               \
    "\"n_shared_experts\":1,\"moe_intermediate_size\":256,\"first_k_dense_replace\":1,"                                \
    "\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-06,\"rope_theta\":10000,\"tie_word_embeddings\":false}"
static void shapes_latent(void) {
    shapes_pass(LATENT("8", "256", "32"), 2, NEARLY_ALL, NULL);
    shapes_pass(LATENT("20", "512", "64"), 2, NEARLY_ALL, NULL);
}
static void instances_of_latents_agree(void) {
    const size_t chunks[] = {2, 3, 5, 8, 9, 16};
    instances_agree(LATENT("20", "512", "64"), 2, 700, chunks, sizeof chunks / sizeof *chunks);
}

/* n random BF16 matrices (rows, cols), whose products have about the size of x. */
static Linear random_linear(int rows, int cols, int n, uint64_t *random) {
    const int size = rows * cols * n;
    int *whole = allocate((size_t)size * sizeof *whole);
    float *values = allocate((size_t)size * sizeof *values);
    fill_random(whole, size, 2001, random);
    for (int i = 0; i < size; i++) values[i] = (float)(whole[i] - 1000) / 600 / sqrtf((float)cols);
    Linear w = full(BF16, values, n, rows, cols);
    free(whole), free(values);
    return w;
}

/* A fixture's latents with as many heads as two blocks take, behind as many tokens as two blocks share. Stages from the
 * router on are held loosely, because rounding changes some tokens' experts. */
static void latent_heads_pass(void) {
    enum { N = 500, HEADS = 18 };
    int ids[N];
    uint64_t random = 5;
    Trace golden = {0};
    Checkpoint c;
    Error e;
    must(checkpoint_open(&c, "tests/fixtures/deepseek_v2_lite", &e), &e);
    Model *m = &c.model;
    Layer *l = m->layer;
    const int keys = m->head_dim - m->rope_dim;
    m->n_heads = HEADS;
    l->q = random_linear(HEADS * m->head_dim, m->dim, 1, &random);
    l->k_up = random_linear(keys, m->kv_rank, HEADS, &random);
    l->v_up = random_linear(m->v_dim, m->kv_rank, HEADS, &random);
    l->o = random_linear(m->dim, HEADS * m->v_dim, 1, &random);
    fill_random(ids, N, (size_t)m->vocab, &random);
    trace_run(&golden, &reference, m, ids, N, 0);
    Costs costs = rounding_costs(m, &golden, ids, N);
    chunks_pass("many heads", m, &costs, &golden, ids, N, 4, (size_t[]){1, 16, 17, 0});
    trace_free(&golden);
    linear_free(&l->q), linear_free(&l->k_up), linear_free(&l->v_up), linear_free(&l->o);
    checkpoint_close(&c);
}

/* A file may have quantised experts beside a shared expert in F16, a router in F32 and a head in F32. All read the same
 * x, each in a type of its own, and its rows have padding. */
static void types_of_shared_x_may_differ(void) {
    Trace golden = {0};
    Ids ids = {0};
    Checkpoint c;
    trace_golden("deepseek_v3", &golden, &ids, &c);
    Costs costs = rounding_costs(&c.model, &golden, ids.data, ids.n);
    Layer *l = c.model.layer + c.model.n_layers - 1;
    check(l->shared_gate.type == BF16 && l->gate.type == BF16, "the last layer has no shared expert in BF16");
    check(l->router.type == BF16 && c.model.dim % 64, "the last layer has no router in BF16, or x no padding");
    l->shared_gate = as_type(&l->shared_gate, F16), l->shared_up = as_type(&l->shared_up, F16);
    l->router = as_type(&l->router, F32), c.model.head = as_type(&c.model.head, F32);
    chunks_pass("types of x", &c.model, &costs, &golden, ids.data, ids.n, 3, (size_t[]){0, 1, 7});
    Trace many = {0}; /* of tokens, because what lies in the padding is a NaN now and then only */
    int random_ids[300], nans = 0;
    uint64_t random = 3;
    fill_random(random_ids, 300, (size_t)c.model.vocab, &random);
    trace_run(&many, &cuda, &c.model, random_ids, 300, 7);
    const Stage *logits = trace_stage(&many, "logits");
    for (size_t i = 0; i < stage_size(logits); i++) nans += !isfinite(stage_values(logits)[i]);
    check(!nans, "%d logits are no numbers", nans);
    trace_free(&many);
    linear_free(&l->shared_gate), linear_free(&l->shared_up), linear_free(&l->router), linear_free(&c.model.head);
    trace_free(&golden);
    ids_free(&ids);
    checkpoint_close(&c);
}

/* What one layer leaves in the padding of x as floats, another would read as bf16: NaNs. So the engine refuses it. */
static void types_that_share_padding_are_refused(void) {
    Trace golden = {0};
    Ids ids = {0};
    Checkpoint c;
    Engine g;
    Error e;
    const Limits limits = {.max_seqs = 1, .max_tokens = 8};
    trace_golden("deepseek_v3", &golden, &ids, &c);
    Layer *l = c.model.layer + c.model.n_layers - 1;
    check(l->shared_down.type == BF16 && l->shared_down.cols % 64, "the last layer has no padding");
    l->shared_down = as_type(&l->shared_down, F32);
    check(!engine_open(&g, &cuda, &c.model, limits, 0, &e), "a model whose layers share padding was opened");
    check(e.code == BAD_MODEL && strstr(e.text, "F32 in some layers only"), "error %d: %s", e.code, e.text);
    linear_free(&l->shared_down);
    trace_free(&golden);
    ids_free(&ids);
    checkpoint_close(&c);
}

/* A matrix in BF16 whose lines are columns, as gpt-oss's experts lie in files without MXFP4. Its values lie `step`
 * apart, because gate and up share their lines. */
static Linear turned(const Linear *w, size_t step) {
    const size_t line = (size_t)w->rows * step, lines = (size_t)w->n * (size_t)w->cols;
    uint16_t *data = allocate_zero(lines * line, sizeof *data);
    for (int i = 0; i < w->n; i++)
        for (int c = 0; c < w->cols; c++)
            for (int r = 0; r < w->rows; r++) {
                const Weight x = weight_at(types, w, w->each + i, r, c);
                data[(size_t)(i * w->cols + c) * line + (size_t)r * step] = (uint16_t)(float_bits(x.a * x.q) >> 16);
            }
    const View all = view_of(data, (int)lines, line * sizeof *data);
    Stored *each = allocate((size_t)w->n * sizeof *each);
    for (int i = 0; i < w->n; i++) {
        each[i] = (Stored){.data = part_of(all, i, w->n), .factor = 1, .bias = w->each[i].bias};
        each[i].data.step = step * sizeof *data;
    }
    free(data);
    return (Linear){.type = BF16, .rows = w->rows, .cols = w->cols, .n = w->n, .each = each};
}

static void lines_may_be_columns(void) {
    Trace golden = {0};
    Ids ids = {0};
    Checkpoint c;
    trace_golden("odd", &golden, &ids, &c);
    for (Layer *l = c.model.layer; l < c.model.layer + c.model.n_layers; l++)
        l->gate = turned(&l->gate, 2), l->up = turned(&l->up, 2), l->down = turned(&l->down, 1);
    Costs costs = rounding_costs(&c.model, &golden, ids.data, ids.n);
    chunks_pass("columns", &c.model, &costs, &golden, ids.data, ids.n, 3, (size_t[]){0, 1, 7});
    for (Layer *l = c.model.layer; l < c.model.layer + c.model.n_layers; l++)
        linear_free(&l->gate), linear_free(&l->up), linear_free(&l->down);
    trace_free(&golden);
    ids_free(&ids);
    checkpoint_close(&c);
}

static void tinystories_656k(void) { small_model(&cuda, "TinyStories-656K"); }
static void stories_260k(void) { small_model(&cuda, "stories260K"); }

static void families_long(void) {
    run("gpu: latent attention of 18 heads and 500 tokens", latent_heads_pass);
    if (!RANDOM_WEIGHTS) return;
    run("gpu: prompts of 1 to 5,000 tokens, 4 and 3 heads of 64 share keys", shapes_dense_64);
    run("gpu: prompts of 1 to 5,000 tokens, 8 and 7 heads of 128 share keys", shapes_dense_128);
    run("gpu: fast and plain agree for 256 streams, heads of 128", streams_agree_with_plain_heads_of_128);
    run("gpu: prompts of 1 to 5,000 tokens, latent attention", shapes_latent);
    run("gpu: one token and several agree with latents", instances_of_latents_agree);
}

static void families_tests(void) {
    run("gpu: prompts of 1 to 300 tokens, no experts", dense_lengths_pass);
    run("gpu: a router and a head in F32, a shared expert in F16, experts in BF16", types_of_shared_x_may_differ);
    run("gpu: F32 in some layers only, rows with padding", types_that_share_padding_are_refused);
    run("gpu: gpt-oss's experts in BF16, whose lines are columns", lines_may_be_columns);
    run("gpu: TinyStories-656K writes the reference ids", tinystories_656k);
    run("gpu: stories260K writes the reference ids", stories_260k);
}
