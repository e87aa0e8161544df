/* gpu_cards.c: what gpu.c checks of gpus/: a model on several cards is the model on one. gpu.c includes it. */
#include "gpus/gpus.h"

/* Can as many cards as there are now share the model at a path? They can wherever they divide its heads, and divide or
 * share those of keys and values, unless its experts have fewer blocks of MXFP4 than there are cards: experts_mxfp4 has
 * one, true_heads two. */
static bool can_be_shared(const char *path) {
    Checkpoint c;
    Error e;
    must(checkpoint_open(&c, path, &e), &e);
    const int heads = c.model.n_heads, keys = c.model.kv_rank ? cards : c.model.n_kv_heads;
    const bool divide = heads % cards == 0 && (keys % cards == 0 || cards % keys == 0);
    const bool few_blocks = strstr(path, "/experts_mxfp4") || (cards > 2 && strstr(path, "/true_heads"));
    const bool can = can_shard(&c.model, cards);
    check(can == (divide && !few_blocks), "%s: %d and %d heads, %d cards", path, heads, keys, cards);
    checkpoint_close(&c);
    return can;
}
/* In chunks of all, of one and of seven tokens. */
static void fixtures_on_cards(void) {
    int shared = 0;
    for (int i = 0; i < FIXTURES; i++) {
        LocalText path = text_print("tests/fixtures/%s", fixtures[i]);
        if (!can_be_shared(path)) continue;
        fixture_passes(fixtures[i], 3);
        shared++;
    }
    check(shared > 4, "only %d fixtures are shared by %d cards", shared, cards);
}

static void encoding_on_cards(const char *path) {
    if (can_be_shared(path)) encoding_passes(path);
}
static void encodings_on_cards(void) {
    encoding_sizes = 3;
    each_in("tests/fixtures/encodings", "", encoding_on_cards);
    each_in("tests/fixtures/gguf", ".gguf", encoding_on_cards);
    encoding_sizes = 7;
}

/* How many cards the tests have: a single GPU stands for two. Their blocks then wait for each other on one GPU, which
 * must have room for all of them: so not for steps of thousands of tokens; and not while cuBLAS loads code. */
static int cards_there(void) {
    int there = 0;
    cudaGetDeviceCount(&there);
    one_gpu = there == 1;
    return one_gpu ? 2 : there;
}

/* Steps of fast/ on one card and on two. */
static void decode_on_cards(void) {
    enum { N = 16, LAYERS = 3 };
    int ids[N];
    uint64_t random = 14;
    Checkpoint c;
    make_up(&c, GPT_OSS_20B(SLIDING "," FULL "," SLIDING), LAYERS, 201088, NULL);
    fill_random(ids, N, 201088, &random);
    for (size_t chunk = 1; chunk <= N; chunk += 5) { /* 1, 6, 11, 16 */
        Trace one = {0}, other = {0};
        cards = 1;
        trace_run(&one, &cuda, &c.model, ids, N, chunk);
        cards = 2;
        trace_run(&other, &cuda, &c.model, ids, N, chunk);
        traces_agree(&one, &other, N, LAYERS, NULL);
        trace_free(&one), trace_free(&other);
    }
    checkpoint_close(&c);
}
/* The same without a tap, which makes a launch of each phase. */
static void instances_on_cards(void) {
    instances_agree(GPT_OSS_20B(SLIDING "," FULL "," SLIDING "," FULL "," SLIDING "," FULL "," SLIDING), 7, 0,
                    (size_t[]){2, 7, 12}, 3);
}

#define SIX_LAYERS SLIDING "," FULL "," SLIDING "," FULL "," SLIDING "," FULL
/* All layers of gpt-oss-20b: a prompt and, token by token, what follows, one card's greedy text. Four experts: a token
 * chooses all, so no router is close to a tie. */
static void all_layers_on_cards(void) {
    enum { PROMPT = 40, N = 104, LAYERS = 24, VOCAB = 201088 };
    const double most = tolerance_of(LAYERS, NULL);
    float *logits[2];
    int ids[N];
    uint64_t random = 15;
    fill_random(ids, PROMPT, VOCAB, &random);
    for (cards = 1; cards <= 2; cards++) {
        float *own = logits[cards - 1] = allocate((size_t)N * VOCAB * sizeof *own);
        Engine g;
        Checkpoint c;
        open_made_up(&g, &c,
                     GPT_OSS("2880", "2880", "64", "4", SIX_LAYERS "," SIX_LAYERS "," SIX_LAYERS "," SIX_LAYERS),
                     LAYERS, VOCAB, NULL, PROMPT);
        run_chunks(&g, ids, 0, PROMPT, PROMPT, VOCAB, own);
        for (size_t i = PROMPT; i < N; i++) {
            const float *last = own + (i - 1) * VOCAB;
            int likeliest = 0;
            for (int id = 1; id < VOCAB; id++)
                if (last[id] > last[likeliest]) likeliest = id;
            if (cards == 1) ids[i] = likeliest;
            run_chunks(&g, ids, i, i + 1, 1, VOCAB, own + i * VOCAB);
        }
        engine_close(&g);
        checkpoint_close(&c);
    }
    cards = 2;
    const double found = differ(logits[0], logits[1], N, VOCAB, 0.8);
    check(found <= most, "%g, more than %g", found, most);
    free(logits[0]), free(logits[1]);
}

/* gpt-oss's shapes, which fast/ has instances for, and prompts of many tokens, on two cards. */
static void cards_long(void) {
    if (!RANDOM_WEIGHTS || cards_there() < 2) return;
    cards = 2;
    run("gpus: gpt-oss's shapes, stage by stage", phases_of_gpt_oss_agree);
    run("gpus: one card and two agree at every stage, gpt-oss-20b's shapes", decode_on_cards);
    run("gpus: one token and several without a prompt, gpt-oss-20b's shapes", instances_on_cards);
    if (one_gpu) {
        cards = 1;
        return;
    }
    run("gpus: the reference, fast and plain agree at every stage, gpt-oss-20b's shapes", stages_of_20b_pass);
    run("gpus: one token and several agree at gpt-oss-20b's shapes", instances_of_20b_agree);
    run("gpus: all layers of gpt-oss-20b, along one card's greedy text", all_layers_on_cards);
    run("gpus: steps without numbers end", nans_of_20b_end);
    run("gpus: contexts of unequal length", contexts_of_20b_agree);
    run("gpus: fast and plain agree for 256 streams", streams_agree_with_plain);
    run("gpus: fast and plain agree at every stage of a prompt", fast_agrees_with_plain);
    run("gpus: prompts of 1 to 5,000 tokens, gpt-oss's shapes and a small vocabulary", shapes_of_gpt_oss);
    cards = 1;
}

#if EMULATED
extern int emulated_peers, emulated_dead;
extern size_t emulated_memory;
/* Without --gpus a model that has no room on one card goes to two. */
static void as_many_as_it_needs(void) {
    char where[64];
    Limits limits = {.context = 64, .max_seqs = 1, .max_tokens = 16, .gpus = "1", .where = where};
    Checkpoint c;
    Error e;
    size_t fails = 0, opens = emulated_memory;
    must(checkpoint_open(&c, "tests/fixtures/true_heads", &e), &e);
    while (opens - fails > 1) { /* what one card needs, to the byte */
        int pages = 1;
        emulated_memory = (opens + fails) / 2;
        void *state = cuda.open(&c.model, &limits, &pages, &e);
        *(state ? &opens : &fails) = emulated_memory;
        if (state) cuda.close(state);
    }
    for (int i = 0; i < 2; i++) {
        int pages = 1;
        emulated_memory = i ? opens : fails, limits.gpus = NULL;
        void *state = cuda.open(&c.model, &limits, &pages, &e);
        check(state && begins(where, i ? "GPU 0 (" : "2 GPUs, each as GPU 0 ("), "%s", state ? where : e.text);
        if (state) cuda.close(state);
    }
    emulated_memory = (size_t)4 << 30;
    checkpoint_close(&c);
}
static bool loading;
static void it_loads(uint64_t done, uint64_t total) { loading = true; }
/* A card without room is named before another loads weights. */
static void a_card_has_no_room(void) {
    Limits limits = {.context = 64, .max_seqs = 1, .max_tokens = 16, .progress = it_loads, CARDS};
    Checkpoint c;
    Error e;
    void *taken;
    must(checkpoint_open(&c, "tests/fixtures/true_heads", &e), &e);
    cudaSetDevice(1), cudaMalloc(&taken, emulated_memory);
    for (int i = 0; i < 2; i++) {
        int pages = 1;
        void *state = cuda.open(&c.model, &limits, &pages, &e);
        check(!state == !i && loading == i, "%s, %d", state ? "opened" : e.text, loading);
        const bool named = !state && strstr(e.text, "GPU 1 has 0 bytes") && strstr(e.text, "take more with --gpus");
        check(state || (e.code == NO_ROOM && named), "%s", e.text);
        if (state) cuda.close(state);
        cudaFree(taken), taken = NULL;
    }
    cudaSetDevice(0);
    checkpoint_close(&c);
}
/* A card that dies ends the others within ten seconds, also where a tap waits for all. */
static void a_card_dies(void) {
    const int ids[2] = {3, 5};
    int slot = 0, first[2] = {0, 1}, start = 0, page = 0;
    const Want want = WANT_TOKEN;
    const Batch b = {1, 1, &slot, first, ids, &start, &page, &greedy, &want};
    Checkpoint c;
    Error e;
    must(checkpoint_open(&c, "tests/fixtures/true_heads", &e), &e);
    for (int tapped = 0; tapped < 2; tapped++) {
        const Limits limits = {.max_seqs = 1, .max_tokens = 16, .tap = tapped ? remember_tap : NULL, CARDS};
        const double begun = seconds();
        Engine g;
        Result r;
        must(engine_open(&g, &cuda, &c.model, limits, 0, &e), &e);
        run_text(&g, ids, 0, 1, WANT_TOKEN, &greedy);
        emulated_dead = 1;
        const bool ok = cuda.submit(g.state, &b, &e) && cuda.collect(g.state, &r, &e);
        check(!ok && e.code == GPU_FAULT && seconds() - begun < 10, "%d, %s", ok, e.text);
        engine_close(&g);
        emulated_dead = -1;
    }
    checkpoint_close(&c);
}
static void without_peer_access(void) {
    emulated_peers = 0;
    fixtures_on_cards();
    emulated_peers = 1;
}
#endif

/* --gpus: what is not a number of cards or a list of those that are there is refused; the first of these only by the
 * program, since tests take one real GPU for two. */
static void lists_are_read(void) {
    static const struct {
        const char *list;
        int code;
    } bad[] = {{"1,1", USAGE}, {"x", USAGE},    {"", USAGE},      {"17", NO_GPU},         {"0,", USAGE},
               {",1", USAGE},  {"0,-1", USAGE}, {"0,99", NO_GPU}, {"3,4294967296", USAGE}};
    Checkpoint c;
    Error e = {0};
    must(checkpoint_open(&c, "tests/fixtures/true_heads", &e), &e);
    for (size_t i = !EMULATED; i < sizeof bad / sizeof *bad; i++) {
        int pages = 1;
        const Limits limits = {.context = 64, .max_seqs = 1, .max_tokens = 16, .gpus = bad[i].list};
        check(!cuda.open(&c.model, &limits, &pages, &e) && e.code == bad[i].code, "'%s': %d %s", bad[i].list, e.code,
              e.text);
    }
    checkpoint_close(&c);
}

/* Each card draws from its own logits. The token is the one that all logits together give. */
static void draws_on_cards(const Model *m, const int *ids, size_t n) {
    const Sampling how = {.temperature = 1, .top_p = 1, .penalty = 1, .seed = 9};
    const Limits limits = {.max_seqs = 1, .max_tokens = 16, .plain = plain, CARDS};
    Engine g;
    Error e;
    float *logits = allocate((size_t)m->vocab * sizeof *logits);
    must(engine_open(&g, &cuda, m, limits, 0, &e), &e);
    for (size_t i = 0; i < n; i++) {
        const Result r = run_text(&g, ids, i, i + 1, WANT_LOGITS, &how);
        memcpy(logits, r.logits, (size_t)m->vocab * sizeof *logits);
        const int expected = draw(logits, m->vocab, &how, (int)i + 1);
        const int drawn = run_text(&g, ids, i, i + 1, WANT_TOKEN, &how).token[0];
        check(drawn == expected, "behind %zu tokens %d is drawn, not %d", i + 1, drawn, expected);
    }
    free(logits);
    engine_close(&g);
}
/* A model of random weights agrees with the reference, in chunks of all, of one and of seven tokens. */
static void made_up_on_cards(const char *what, const char *config, int layers, int vocab, const char *encoding) {
    enum { N = 40 };
    int ids[N];
    uint64_t random = 23; /* no router is close to a tie: the weights of two experts differ by 6 % or more */
    Trace golden = {0};
    Checkpoint c;
    if (skips_random_weights()) return;
    at(what);
    make_up(&c, config, layers, vocab, encoding);
    check(can_shard(&c.model, cards), "%s: %d cards cannot share it", what, cards);
    fill_random(ids, N, (size_t)vocab, &random);
    trace_run(&golden, &reference, &c.model, ids, N, 0);
    Costs costs = rounding_costs(&c.model, &golden, ids, N);
    chunks_pass(what, &c.model, &costs, &golden, ids, N, 3, (size_t[]){0, 1, 7});
    draws_on_cards(&c.model, ids, 8);
    trace_free(&golden);
    checkpoint_close(&c);
}

/* Where three cards do not divide a model, the error says what does; where they do, they agree with the reference. */
static void three_cards(void) {
    Shard part;
    Checkpoint c;
    Error e;
    must(checkpoint_open(&c, "tests/fixtures/true_heads", &e), &e);
    check(!shard_model(&c.model, 0, 3, &part, &e) && e.code == USAGE && strstr(e.text, "can be 1, 2"), "%s", e.text);
    checkpoint_close(&c);
    made_up_on_cards("six heads", DENSE(LLAMA, "96", "200", "6", "3", "16"), 2, 50, NULL);
}

#define BLOCKS GPT_OSS("64", "288", "8", "4", FULL)
/* No fixture has heads and experts for eight cards. These models do, and no cut is even: four cards share a head of
 * keys and values and have 24 or 26 of 200 rows; experts have nine blocks of MXFP4, rows nine groups of scales. */
static void eight_cards(void) {
    made_up_on_cards("two heads of keys", DENSE(LLAMA, "96", "200", "8", "2", "16"), 2, 50, NULL);
    made_up_on_cards("blocks", BLOCKS, 1, 520, NULL);
    made_up_on_cards("groups", DENSE(LLAMA, "128", "1152", "8", "4", "128"), 1, 50, "gptq4");
}
#if EMULATED
static void eight_without_peer_access(void) {
    emulated_peers = 0;
    made_up_on_cards("blocks", BLOCKS, 1, 520, NULL);
    emulated_peers = 1;
}
#endif

static void cards_tests(void) {
    const int there = cards_there();
    cards = 2, plain = one_gpu;
    run("gpus: fixtures at every stage on 2", fixtures_on_cards);
    run("gpus: encodings at every stage on 2", encodings_on_cards);
    open_streams(&cuda, "odd");
    run("gpus: one chunk = many", one_chunk_equals_many);
    run("gpus: C and CUDA draw alike", samplers_agree);
    run("gpus: a draw waits until it is told what it may draw", draws_wait);
    close_streams();
#if EMULATED
    run("gpus: fixtures at every stage on 2 without peer access", without_peer_access);
    run("gpus: a card that dies ends the others", a_card_dies);
    run("gpus: a card without room is named first", a_card_has_no_room);
    run("gpus: as many as the model needs", as_many_as_it_needs);
#endif
    run("gpus: lists are read", lists_are_read);
    cards = 3;
    if (there > 2) run("gpus: fixtures on 3", three_cards);
    cards = 4;
    if (there > 3) run("gpus: fixtures at every stage on 4", fixtures_on_cards);
    cards = 8;
    if (there > 7) run("gpus: models on 8", eight_cards);
#if EMULATED
    run("gpus: a model on 8 without peer access", eight_without_peer_access);
#endif
    cards = 1, plain = false;
}
