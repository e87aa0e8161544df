/* families.c: what unit.c checks of families/: sizes of published configs, batches of each family, two small
 * published models. unit.c includes it. */

/* Parameters in all matrices, those that a token reads, in thousand millions, and a token's bytes in the cache. */
static void has_sizes(const char *name, const Model *m, double parameters, double read, int cache) {
    double all = (double)reference.weight_bytes(m) / 2e9, once = (double)step_bytes(m, m->top_k, 1, 0) / 2e9;
    uint64_t more = step_bytes(m, m->top_k, 1, 1) - step_bytes(m, m->top_k, 1, 0);
    check(fabs(all / parameters - 1) < 0.006, "%s: %g thousand million parameters, not %g", name, all, parameters);
    check(fabs(once / read - 1) < 0.006, "%s: %g thousand million parameters are read, not %g", name, once, read);
    check(more == (uint64_t)cache, "%s: %llu bytes in the cache, not %d", name, (unsigned long long)more, cache);
}

/* What a config.json leaves out is known: the sizes of large models come out as their makers say. */
static void sizes_are_those_of_the_makers(void) {
    static const struct {
        const char *name, *config;
        double parameters, read;
        int cache;
        double mixed; /* bits a weight that llama.cpp prints for its Q4_K_M; 0: not known */
    } models[] = {
        {"DeepSeek-V3",
         "{\"model_type\":\"deepseek_v3\",\"vocab_size\":129280,\"hidden_size\":7168,\"intermediate_size\":18432,"
         "\"num_hidden_layers\":61,\"num_attention_heads\":128,\"num_key_value_heads\":128,\"head_dim\":64,"
         "\"n_routed_experts\":256,\"num_experts_per_tok\":8,\"moe_intermediate_size\":2048,"
         "\"rms_norm_eps\":1e-6,\"max_position_embeddings\":163840}",
         671.0, 36.6, 70272, 0},
        {"DeepSeek-V2-Lite",
         "{\"model_type\":\"deepseek_v2\",\"vocab_size\":102400,\"hidden_size\":2048,\"intermediate_size\":10944,"
         "\"num_hidden_layers\":27,\"num_attention_heads\":16,\"q_lora_rank\":null,\"first_k_dense_replace\":1,"
         "\"n_routed_experts\":64,\"num_experts_per_tok\":6,\"moe_intermediate_size\":1408,\"rms_norm_eps\":1e-6,"
         "\"max_position_embeddings\":163840}",
         15.71, 2.45, 31104, 0},
        {"Gemma-3-4B",
         "{\"model_type\":\"gemma3\",\"text_config\":{\"hidden_size\":2560,\"intermediate_size\":10240,"
         "\"num_hidden_layers\":34,\"sliding_window\":1024,\"rope_scaling\":{\"rope_type\":\"linear\","
         "\"factor\":8}}}",
         3.88, 3.88, 139264, 0},
        {"Llama-2-7b", NULL, 6.74, 6.61, 524288, 4.84},
        {"Llama-3.1-8B", NULL, 8.03, 7.50, 131072, 4.89},
        {"Llama-3.2-1B", NULL, 1.24, 1.24, 32768, 5.18},
        {"Mistral-7B-v0.3", NULL, 7.25, 7.11, 131072, 0},
        {"Mixtral-8x7B-v0.1", NULL, 46.70, 12.75, 131072, 0},
        {"Qwen2.5-3B", NULL, 3.09, 3.09, 36864, 0},
        {"Qwen3-30B-A3B", NULL, 30.53, 3.04, 98304, 4.86},
        {"SmolLM2-135M", NULL, 0.1345, 0.1345, 23040, 0},
        {"TinyLlama-1.1B-Chat-v1.0", NULL, 1.10, 1.03, 22528, 0},
        {"gemma-2-2b", NULL, 2.61, 2.61, 106496, 5.21},
        {"gemma-3-1b-it", NULL, 1.00, 1.00, 26624, 0}};
    const char *data = getenv("TEST_DATA");
    if (skips_random_weights()) return;
    for (size_t i = thorough ? 0 : 1; i < sizeof models / sizeof *models; i++) { /* the first has most tensors */
        Checkpoint c;
        Error e;
        char dir[300], config[320];
        at(models[i].name);
        snprintf(dir, sizeof dir, "%s/configs/%s", data ? data : "", models[i].name);
        snprintf(config, sizeof config, "%s/config.json", dir);
        if (models[i].config)
            open_shapes(&c, models[i].config, NULL);
        else if (file_exists(config)) /* it is published, and not shipped */
            must(random_weights_open(&c, dir, NULL, &e), &e);
        else
            continue;
        has_sizes(models[i].name, &c.model, models[i].parameters, models[i].read, models[i].cache);
        double weights = (double)reference.weight_bytes(&c.model) / 2;
        checkpoint_close(&c);
        if (models[i].mixed <= 0 || !*packings) continue; /* without encodings/ */
        must(random_weights_open(&c, dir, "q4_k_m", &e), &e);
        double bits = (double)reference.weight_bytes(&c.model) * 8 / weights;
        check(fabs(bits - models[i].mixed) < 0.01, "%s: %g bits a weight as Q4_K_M", models[i].name, bits);
        checkpoint_close(&c);
    }
}

/* The same of one model of each family; "odd" is not the only kind of cache, experts and windows. */
static void families_batch_chunk_and_rewind(void) {
    static const char *const models[] = {"mistral", "mixtral",     "qwen2",       "qwen3_moe",       "gemma2",
                                         "gemma3",  "deepseek_v3", "deepseek_v2", "deepseek_v2_lite"};
    for (size_t i = 0; i < sizeof models / sizeof *models && !*why; i++) {
        int which[STREAMS];
        for (int s = 0; s < STREAMS; s++) which[s] = (s * 5 + 3) % STREAMS;
        at(models[i]);
        open_alone(models[i]);
        same_as_alone(which, STREAMS, -1);
        same_as_alone(which, 1, 7);
        if (thorough) rewound_equals_never_there();
        close_alone();
        if (*why) snprintf(strchr(why, 0), sizeof why - strlen(why), ", of %s", models[i]);
    }
}

static void tinystories_656k(void) { small_model(&reference, "TinyStories-656K"); }
static void stories_260k(void) { small_model(&reference, "stories260K"); }

static void families_tests(void) {
    run("unit: sizes of published models", sizes_are_those_of_the_makers);
    run("unit: TinyStories-656K writes the reference ids", tinystories_656k);
    run("unit: stories260K writes the reference ids", stories_260k);
    run("unit: every family alone = in a batch = in chunks = rewound", families_batch_chunk_and_rewind);
}
