/* unit.c: tests that need to look inside: every layer against the goldens of transformers, the real activations of
 * gpt-oss-20b, batching and rewinding bit by bit, the sampler, reading answers, UTF-8. One line a test, `ok NAME`,
 * `FAIL NAME: why` or `skip NAME: why`. Run from the top of the project; TEST_DATA names data that cannot be shipped.
 * What computes much is for an optimised build and --long; without it, it does less, for a build with sanitizers. */
#include "reading.h"
#include "check.h"
#include "real.h"
#include "streams.h"

#include <sys/param.h>
#include <unistd.h>

/* ---- layers against goldens ---- */

/* Runs a fixture's prompt and returns the first stage whose error against the golden is above `most`, "" if none is;
 * `change` may spoil the model first, and says where that should show. *worst is the largest error. */
static const char *behind;
static const char *first_wrong(const char *fixture, double most, const char *(*change)(Model *), double *worst) {
    static char name[64];
    Trace golden = {0}, found = {0};
    Ids ids = {0};
    Checkpoint c;
    trace_golden(fixture, &golden, &ids, &c);
    behind = change ? change(&c.model) : NULL;
    bool runs = !change || behind;
    if (runs) trace_run(&found, &reference, &c.model, ids.data, ids.n, 0);
    check(!runs || found.stages == golden.stages, "%s: %d stages, %d goldens", fixture, found.stages, golden.stages);
    *name = 0;
    *worst = 0;
    for (int i = 0; i < found.stages; i++) {
        const Stage *s = found.stage + i, *g = trace_stage(&golden, s->name);
        check(stage_size(s) == stage_size(g), "%s: %s has %zu numbers, its golden %zu", fixture, s->name, stage_size(s),
              stage_size(g));
        double e = stage_size(s) == stage_size(g) ? stage_error(s, g) : INFINITY;
        if (!(e <= most) && !*name) snprintf(name, sizeof name, "%s", s->name);
        if (!(e <= *worst)) *worst = e;
    }
    trace_free(&golden);
    trace_free(&found);
    ids_free(&ids);
    checkpoint_close(&c);
    return name;
}

static void layers_equal_transformers(void) {
    for (int i = 0; i < FIXTURES; i++) {
        double worst;
        const char *wrong = first_wrong(fixtures[i], 1e-4, NULL, &worst);
        check(!*wrong, "%s: first wrong at %s (%g)", fixtures[i], wrong, worst);
    }
}

/* Rounding as the GPU does costs what bf16 costs, about 2^-9 a product, and no more. */
static void rounding_is_bf16(void) {
    reference_rounds = true;
    for (int i = 0; i < FIXTURES; i++) {
        double worst;
        const char *wrong = first_wrong(fixtures[i], 0.1, NULL, &worst);
        check(!*wrong, "%s: first wrong at %s (%g)", fixtures[i], wrong, worst);
        check(worst > 1e-4, "%s: nothing was rounded (%g)", fixtures[i], worst);
    }
    reference_rounds = false;
}

static void scale(const float *x, int n) {
    for (int i = 0; i < n; i++) ((float *)(uintptr_t)x)[i] *= 1.01f;
}

static const char *stage_of(int layer, const char *stage) {
    static char name[64];
    snprintf(name, sizeof name, "layers.%d.%s", layer, stage);
    return name;
}

/* Each scales something by 1.01 and returns the first stage behind it; NULL: the model does not have it. */

static const char *norm_before_attention(Model *m) {
    int last = m->n_layers - 1;
    const Layer *l = m->layer + last;
    scale(l->attn_norm, m->dim);
    /* A later norm takes a factor out again: of each head, or of q_a's rows. Latent: the rope key keeps it. */
    return stage_of(last, l->q_norm ? "v" : l->q_a_norm ? "k" : "q");
}
static const char *norm_before_experts(Model *m) {
    scale(m->layer[0].ffn_norm, m->dim);
    return stage_of(0, m->layer[0].router.rows ? "weights" : "act");
}
static const char *norm_behind_attention(Model *m) {
    if (!m->layer[0].attn_post_norm) return NULL;
    scale(m->layer[0].attn_post_norm, m->dim);
    return stage_of(0, "attn_residual");
}
static const char *norm_behind_experts(Model *m) {
    if (!m->layer[0].ffn_post_norm) return NULL;
    scale(m->layer[0].ffn_post_norm, m->dim);
    return stage_of(0, "residual");
}
static const char *norm_of_k(Model *m) {
    if (!m->layer[0].k_norm) return NULL;
    scale(m->layer[0].k_norm, m->head_dim);
    return stage_of(0, "k");
}
static const char *norm_of_q_a(Model *m) {
    if (!m->layer[0].q_a_norm) return NULL;
    scale(m->layer[0].q_a_norm, m->layer[0].q_a.rows);
    return stage_of(0, "q");
}
static const char *norm_of_latents(Model *m) {
    if (!m->layer[0].kv_a_norm) return NULL;
    scale(m->layer[0].kv_a_norm, m->kv_rank);
    return stage_of(0, "k");
}
static const char *last_norm(Model *m) {
    scale(m->norm, m->dim);
    return "logits";
}
static const char *scale_of_scores(Model *m) {
    scale(&m->attn_scale, 1);
    return stage_of(0, "attn");
}
static const char *cap_of_scores(Model *m) {
    scale(&m->attn_cap, 1);
    return m->attn_cap > 0 ? stage_of(0, "attn") : NULL;
}
static const char *cap_of_logits(Model *m) {
    scale(&m->logit_cap, 1);
    return m->logit_cap > 0 ? "logits" : NULL;
}
static const char *scale_of_embeddings(Model *m) { /* the norm takes it out again, the residual keeps it */
    scale(&m->embed_scale, 1);
    return stage_of(0, "attn_residual");
}
static const char *scale_of_rope(Model *m, int which) {
    scale(&m->rope[which].scale, 1);
    for (int i = 0; i < m->n_layers; i++)
        if (m->layer[i].rope == m->rope + which) return stage_of(i, "q");
    return NULL;
}
static const char *scale_of_first_rope(Model *m) { return scale_of_rope(m, 0); }
static const char *scale_of_second_rope(Model *m) { return scale_of_rope(m, 1); }
static int first_router(const Model *m) {
    int i = 0;
    while (i < m->n_layers && !m->layer[i].router.rows) i++;
    return i;
}
static const char *scale_of_weights(Model *m) {
    scale(&m->route.scale, 1);
    return first_router(m) < m->n_layers ? stage_of(first_router(m), "weights") : NULL;
}
static const char *bias_of_router(Model *m) {
    int i = first_router(m);
    if (i == m->n_layers || !m->layer[i].router.each->bias) return NULL;
    scale(m->layer[i].router.each->bias, m->n_experts);
    return stage_of(i, "weights");
}
static const char *bias_of_choice(Model *m) {
    int i = first_router(m);
    if (i == m->n_layers || !m->layer[i].choice_bias) return NULL;
    scale(m->layer[i].choice_bias + 7, 1);
    return stage_of(i, "experts");
}

/* A model with one norm, one scale or one bias that is 1 % off must fail, at the first stage behind it. */
static void spoiled_models_fail(void) {
    static const char *(*const spoils[])(Model *) = {norm_before_attention,
                                                     norm_before_experts,
                                                     norm_behind_attention,
                                                     norm_behind_experts,
                                                     norm_of_k,
                                                     norm_of_q_a,
                                                     norm_of_latents,
                                                     last_norm,
                                                     scale_of_scores,
                                                     cap_of_scores,
                                                     cap_of_logits,
                                                     scale_of_embeddings,
                                                     scale_of_first_rope,
                                                     scale_of_second_rope,
                                                     scale_of_weights,
                                                     bias_of_router,
                                                     bias_of_choice};
    enum { SPOILS = sizeof spoils / sizeof *spoils };
    bool tried[SPOILS] = {0};
    for (int i = 0; i < FIXTURES; i++)
        for (int j = 0; j < SPOILS; j++) {
            double worst;
            const char *wrong = first_wrong(fixtures[i], 1e-4, spoils[j], &worst);
            check(!behind || !strcmp(wrong, behind), "%s: failed first at '%s', not at %s", fixtures[i], wrong,
                  behind ? behind : "");
            tried[j] |= behind != NULL;
        }
#ifdef ROOM_families
    for (int j = 0; j < SPOILS; j++) check(tried[j], "no fixture has what spoil %d changes", j);
#endif
}

/* ---- batches, chunks, rewinding: bit by bit ---- */

static float *alone[STREAMS]; /* what each stream gives alone and in one chunk */

static void open_alone(const char *fixture) {
    open_streams(&reference, fixture);
    for (int s = 0; s < STREAMS; s++) {
        alone[s] = room();
        feed(&s, 1, 0, 0, alone + s);
    }
}

static void close_alone(void) {
    for (int s = 0; s < STREAMS; s++) free(alone[s]);
    close_streams();
}

static void same_as_alone(const int *which, int n, int chunk) {
    float *logits[STREAMS];
    size_t row = streams.vocab * 4;
    for (int i = 0; i < n; i++) logits[i] = room();
    feed(which, n, chunk, 0, logits);
    for (int i = 0; i < n; i++) {
        check(!memcmp(logits[i], alone[which[i]], (size_t)streams.length[which[i]] * row),
              "stream %d among %d, chunks of %d", which[i], n, chunk);
        free(logits[i]);
    }
}

static void alone_equals_batched(void) {
    int which[STREAMS];
    open_alone("odd");
    for (int i = 0; i < STREAMS; i++) which[i] = (i * 5 + 3) % STREAMS;
    same_as_alone(which, 3, 0);
    same_as_alone(which, STREAMS, 0);
    same_as_alone(which, STREAMS, -1); /* long chunks and single tokens mixed */
    close_alone();
}

static void one_chunk_equals_many(void) {
    const int chunks[] = {1, 2, 7, 63, 64, 65};
    int longest = 0;
    open_alone("odd");
    for (int s = 1; s < STREAMS; s++)
        if (streams.length[s] > streams.length[longest]) longest = s;
    check(streams.length[longest] > PAGE, "no stream is longer than a page");
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) same_as_alone(&longest, 1, chunks[i]);
    close_alone();
}

/* The cache behind the position that a sequence is rewound to holds other text by then, and must not matter. */
static void rewound_equals_never_there(void) {
    size_t row = streams.vocab * 4;
    float *logits = room();
    for (int s = 0; s < STREAMS; s++) {
        int keep = streams.length[s] / 2, length = streams.length[s], other = (s + 1) % STREAMS, saved[LONGEST];
        memcpy(saved, streams.id[s], sizeof saved);
        memcpy(streams.id[s] + keep, streams.id[other], (size_t)(LONGEST - keep) * sizeof *saved);
        streams.length[s] = LONGEST;
        feed(&s, 1, 0, 0, &logits);
        memcpy(streams.id[s], saved, sizeof saved);
        streams.length[s] = length;
        feed(&s, 1, 0, keep, &logits);
        check(
            !memcmp(logits + (size_t)keep * row / 4, alone[s] + (size_t)keep * row / 4, (size_t)(length - keep) * row),
            "stream %d from %d", s, keep);
    }
    free(logits);
}

static void odd_rewound_equals_never_there(void) {
    open_alone("odd");
    rewound_equals_never_there();
    close_alone();
}

/* ---- the sampler ---- */

/* ln and e^x are as near to the truth as their comments say. */
static void logarithm_and_exponential(void) {
    for (uint32_t u = 0x00800000; u < 0x7F800000; u += 9973) {
        double x = (double)bits_float(u), wrong = fabs((double)ln(bits_float(u)) - log(x));
        check(wrong <= 2.5e-7 * fabs(log(x)), "ln(%g) is off by %g", x, wrong);
    }
    for (float x = -86.9f; x <= 0; x += 0.0013f) {
        double wrong = fabs((double)exp_negative(x) / exp((double)x) - 1);
        check(wrong <= 2.5e-7, "exp(%g) is off by %g", (double)x, wrong);
    }
    uint32_t word[4], expected[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}; /* Random123's kat_vectors */
    philox(0, 0, 0, word);
    check(!memcmp(word, expected, sizeof word), "Philox4x32-10 of zeros is %08x ...", word[0]);
}

/* 100,000 draws follow the probabilities that transformers' processors leave: nothing filtered is ever drawn, and each
 * count is within five standard deviations. */
static void draws_follow_transformers(void) {
    enum { VOCAB = 48 };
    const int draws = thorough ? 100000 : 10000;
    Error e;
    cJSON *cases = json_read("tests/goldens/sampling.json", 1 << 20, &e);
    must(cases, &e);
    const cJSON *one, *id;
    int number = 0;
    cJSON_ArrayForEach(one, cases) {
        float *logits = numbers(json_get(one, "logits"), VOCAB), *p = numbers(json_get(one, "probabilities"), VOCAB),
              copy[VOCAB];
        Bias bias[VOCAB];
        int count[VOCAB] = {0}, text[VOCAB], n = 0, biases = 0;
        cJSON_ArrayForEach(id, json_get(one, "seen")) text[n++] = id->valueint;
        const int prompt = n;
        cJSON_ArrayForEach(id, json_get(one, "answer")) text[n++] = id->valueint;
        cJSON_ArrayForEach(id, json_get(one, "bias")) bias[biases++] =
            (Bias){id->child->valueint, (float)id->child->next->valuedouble};
        const cJSON *frequency = json_get(one, "frequency"), *presence = json_get(one, "presence");
        Sampling how = {.temperature = (float)json_get(one, "temperature")->valuedouble,
                        .top_k = json_get(one, "top_k")->valueint,
                        .top_p = (float)json_get(one, "top_p")->valuedouble,
                        .min_p = (float)json_get(one, "min_p")->valuedouble,
                        .penalty = (float)json_get(one, "penalty")->valuedouble,
                        .frequency = frequency ? (float)frequency->valuedouble : 0,
                        .presence = presence ? (float)presence->valuedouble : 0,
                        .answer = prompt,
                        .seed = 42,
                        .bias = bias,
                        .biases = biases};
        for (int i = 0; i < draws; i++) {
            memcpy(copy, logits, sizeof copy);
            adjust(copy, VOCAB, &how, text, n, NULL);
            count[draw(copy, VOCAB, &how, i)]++;
        }
        for (int i = 0; i < VOCAB; i++) {
            double expected = draws * (double)p[i], spread = sqrt(expected * (1 - (double)p[i]));
            check(p[i] > 0 || !count[i], "case %d: token %d was filtered out and drawn", number, i);
            check(fabs(count[i] - expected) <= 5 * spread + 1, "case %d: token %d came %d times, not %.0f", number, i,
                  count[i], expected);
        }
        how.temperature = 0;
        memcpy(copy, logits, sizeof copy);
        adjust(copy, VOCAB, &how, text, n, NULL);
        check(p[largest(copy, VOCAB)] == p[largest(p, VOCAB)], "case %d: not the likeliest is the largest", number);
        memcpy(logits, copy, sizeof copy);
        check(draw(copy, VOCAB, &how, 0) == largest(logits, VOCAB), "case %d: temperature 0 is not the largest",
              number);
        free(logits);
        free(p);
        number++;
    }
    cJSON_Delete(cases);
}

/* ---- the scheduler ---- */

enum { SEVERAL = 60, FEW_PAGES = 14 };

static struct {
    Stream stream;
    Ids expected; /* the prompt, and what is drawn behind it one token a step, with nothing else in the cache */
    Ids drawn;
    int arrives, leaves; /* at which step */
    bool over;
} texts[SEVERAL];

static void take_of_text(Stream *t, size_t position, int token, const float *logits, bool last) {
    const int i = (int)(intptr_t)t->owner;
    check(position == t->prompt + texts[i].drawn.n, "text %d: position %zu", i, position);
    check(!logits == (t->want == WANT_TOKEN), "text %d: logits", i);
    ids_add(&texts[i].drawn, token);
    texts[i].over = last;
}

static const Bias some_biases[] = {{3, 4}, {17, -100}, {40, 2.5f}};
static bool allow_slowly;
/* A third of the tokens, another one for each length of the text. If that takes long, others must draw later. */
static void allow_some(Stream *t, uint32_t *bits) {
    if (allow_slowly && t->tokens.n % 4 == 0) usleep(60000);
    memset(bits, 0, (streams.vocab + 31) / 32 * sizeof *bits);
    for (size_t id = t->tokens.n % 3; id < streams.vocab; id += 3) bits[id / 32] |= 1u << id % 32;
}

/* Prompts with beginnings in common, and what the model writes behind each of them, one token a step. */
static void make_texts(Engine *g, int n) {
    uint64_t random = 7;
    for (int i = 0; i < n; i++) {
        int common[3];
        Stream *t = &texts[i].stream;
        memset(&texts[i], 0, sizeof texts[i]);
        fill_random(common, 3, streams.vocab, &random);
        for (int k = 0; k < 60 + common[0] % 100; k++) ids_add(&t->tokens, (k * 13 + common[1] % 3) % 50);
        t->prompt = t->tokens.n;
        t->most = t->prompt + 1 + (size_t)common[2] % 90;
        t->sampling =
            (Sampling){.temperature = i % 5 ? 1 : 0, .top_p = 1, .penalty = i % 3 ? 1 : 1.2f, .seed = (uint64_t)i};
        if (i % 4 == 1) t->sampling.bias = some_biases, t->sampling.biases = 3;
        if (i % 4 == 2) t->sampling.frequency = 0.7f, t->sampling.presence = 0.4f;
        t->sampling.answer = (int)t->prompt;
        t->want = i % 4 ? WANT_TOKEN : WANT_LOGITS;
        t->take = take_of_text;
        t->owner = (void *)(intptr_t)i;
        texts[i].arrives = i < 5 ? 0 : i * 2;
        texts[i].leaves = i % 9 == 4 ? texts[i].arrives + i % 40 : 1 << 30;
        ids_append(&texts[i].expected, t->tokens.data, t->tokens.n);
        while (texts[i].expected.n < t->most) ids_add(&texts[i].expected, 0);
        if (i % 3 == 2) t->allow = allow_some;
        for (size_t at = 0; at + 1 < t->most; at++) {
            const bool draws = at + 1 >= t->prompt;
            t->tokens.n = at + 1;
            if (t->allow && draws) t->allow(t, g->allowed.bits), g->allowed.ready[0] = t->sampling.allowed = at + 1;
            Result r = run_text(g, texts[i].expected.data, at, at + 1, draws ? WANT_TOKEN : WANT_NOTHING, &t->sampling);
            if (draws) texts[i].expected.data[at + 1] = r.token[0];
        }
        t->tokens.n = t->prompt, t->sampling.allowed = 0;
    }
    g->allowed.ready[0] = 0;
}

/* Whatever comes together with it, leaves, or takes its pages, each text is the one that is written alone, and in the
 * end nobody has a page. */
static void scheduled_equals_alone(void) {
    Error e;
    Engine g;
    const int n = thorough ? SEVERAL : 16;
    Limits limits = {.max_seqs = 12, .max_tokens = 50, .cache = FEW_PAGES * PAGE};
    open_streams(&reference, "odd");
    must(engine_open(&g, &reference, &streams.c.model, limits, 256, &e), &e);
    at("alone");
    make_texts(&g, n);
    at("among others");
    allow_slowly = true;
    Scheduler *s = scheduler_open(&g);
    SchedulerState state = {0};
    int left = n;
    for (int step = 0; left; step++) {
        for (int i = 0; i < n; i++) {
            if (texts[i].arrives == step) scheduler_add(s, &texts[i].stream);
            if (texts[i].leaves == step && !texts[i].over) scheduler_remove(s, &texts[i].stream), texts[i].over = true;
        }
        must(scheduler_step(s, &e), &e);
        left = 0;
        for (int i = 0; i < n; i++) left += !texts[i].over;
    }
    while ((state = scheduler_state(s)).outstanding) must(scheduler_step(s, &e), &e);
    check(state.idle == state.pages && state.pages == FEW_PAGES, "%zu of %zu pages are idle", state.idle, state.pages);
    check(!state.running && !state.waiting && state.preempted, "%zu run, %zu wait, %zu preempted", state.running,
          state.waiting, state.preempted);
    for (int i = 0; i < n; i++) {
        const Ids *expected = &texts[i].expected;
        size_t prompt = texts[i].stream.prompt, drawn = texts[i].drawn.n;
        check(drawn == expected->n - prompt || texts[i].leaves < 1 << 30, "text %d has %zu tokens", i, drawn);
        check(!drawn || !memcmp(texts[i].drawn.data, expected->data + prompt, drawn * sizeof(int)),
              "text %d is another one", i);
        ids_free(&texts[i].expected), ids_free(&texts[i].drawn), ids_free(&texts[i].stream.tokens);
    }
    allow_slowly = false;
    scheduler_close(s);
    engine_close(&g);
    close_streams();
}

static int stuck_token, stuck_calls;
static void take_of_stuck(Stream *t, size_t position, int token, const float *logits, bool last) {
    stuck_token = last ? token : 0;
}
static void allow_a_few(Stream *t, uint32_t *bits) {
    allow_some(t, bits);
    if (++stuck_calls == 4) t->stuck = "is too hard";
}

/* A text whose next tokens are not found ends with an error. */
static void stuck_texts_end(void) {
    Error e;
    Engine g;
    Limits limits = {.max_seqs = 2, .max_tokens = 50};
    open_streams(&reference, "odd");
    must(engine_open(&g, &reference, &streams.c.model, limits, 256, &e), &e);
    Scheduler *s = scheduler_open(&g);
    Stream t = {.prompt = 3, .most = 50, .sampling = {.top_p = 1, .penalty = 1}, .want = WANT_TOKEN};
    t.take = take_of_stuck, t.allow = allow_a_few;
    ids_append(&t.tokens, (const int[]){1, 2, 3}, 3);
    check(!scheduler_run(s, &t, NULL, &e) && strstr(e.text, "pattern is too hard"), "it did not end: %s", e.text);
    check(stuck_token == DREW_NOTHING && t.tokens.n == 6, "token %d, %zu tokens", stuck_token, t.tokens.n);
    const SchedulerState state = scheduler_state(s);
    check(state.idle == state.pages && !state.running, "%zu of %zu pages are idle", state.idle, state.pages);
    ids_free(&t.tokens);
    scheduler_close(s);
    engine_close(&g);
    close_streams();
}

enum { TURN_PROMPT = 130, TURN_TEXT = 200 };

static void take_of_turn(Stream *t, size_t position, int token, const float *logits, bool last) {
    check(t->tokens.data[position] == token && !logits && last == (position + 1 == TURN_TEXT), "position %zu",
          position);
}

/* Continues a prompt and compares: `reused` tokens were in the cache, and the text is the expected one. */
static void run_turn(Scheduler *s, const Sampling *how, const int *expected, size_t reused) {
    Error e;
    Stream t = {.prompt = TURN_PROMPT, .most = TURN_TEXT, .sampling = *how, .want = WANT_TOKEN, .take = take_of_turn};
    ids_append(&t.tokens, expected, TURN_PROMPT);
    must(scheduler_run(s, &t, NULL, &e), &e);
    check(t.reused == reused, "%zu tokens were in the cache, not %zu", t.reused, reused);
    check(t.tokens.n == TURN_TEXT && !memcmp(t.tokens.data, expected, TURN_TEXT * sizeof(int)), "another text");
    ids_free(&t.tokens);
}

/* One text behind the other, as in a conversation: the full pages of a prompt are found again as long as nobody else
 * needed them, and a text may fill the context. */
static void turns_reuse_the_cache(void) {
    static const volatile sig_atomic_t stop = true;
    const Sampling how = {.temperature = 1, .top_p = 1, .penalty = 1.2f, .seed = 7};
    const Limits limits = {.max_seqs = 1, .max_tokens = 16};
    int id[2][TURN_TEXT + 1];
    uint64_t random = 3;
    Error e;
    Engine g;
    open_streams(&reference, "odd");
    must(engine_open(&g, &reference, &streams.c.model, limits, TURN_TEXT, &e), &e);
    for (int i = 0; i < 2; i++) {
        fill_random(id[i], TURN_PROMPT, streams.vocab, &random);
        write_text(&g, id[i], TURN_PROMPT, TURN_TEXT, &how);
    }
    Scheduler *s = scheduler_open(&g);
    run_turn(s, &how, id[0], 0);
    run_turn(s, &how, id[0], 2 * PAGE);
    run_turn(s, &how, id[1], 0);
    run_turn(s, &how, id[1], 2 * PAGE);
    run_turn(s, &how, id[0], 0); /* the other text took all four pages */
    Stream t = {.prompt = TURN_PROMPT, .most = TURN_TEXT, .sampling = how, .want = WANT_TOKEN, .take = take_of_turn};
    ids_append(&t.tokens, id[1], TURN_PROMPT);
    check(!scheduler_run(s, &t, &stop, &e) && e.code == INTERRUPTED, "it did not stop");
    t.prompt = TURN_TEXT;
    check(!scheduler_run(s, &t, NULL, &e) && e.code == NO_ROOM, "a prompt of the whole context was taken");
    SchedulerState state = scheduler_state(s);
    check(state.idle == 4 && state.pages == 4 && !state.outstanding, "%zu of %zu pages are idle", state.idle,
          state.pages);
    ids_free(&t.tokens);
    scheduler_close(s);
    engine_close(&g);
    close_streams();
}

/* Ten texts are written, and the eleventh, of 50 tokens, is read in one step: see TOKENS_PER_ANSWER. Its first token is
 * collected in the next. */
static void many_answers_lengthen_steps(void) {
    enum { WRITTEN = 10, PROMPT = 50 };
    Error e;
    Engine g;
    Stream t[WRITTEN + 1];
    const Limits limits = {.max_seqs = WRITTEN + 1, .max_tokens = 4};
    uint64_t random = 5;
    int id[PROMPT];
    open_streams(&reference, "odd");
    must(engine_open(&g, &reference, &streams.c.model, limits, 256, &e), &e);
    Scheduler *s = scheduler_open(&g);
    fill_random(id, PROMPT, streams.vocab, &random);
    for (int i = 0; i <= WRITTEN; i++) {
        const size_t prompt = i < WRITTEN ? 2 : PROMPT;
        t[i] = (Stream){.prompt = prompt, .most = 200, .sampling = greedy, .want = WANT_TOKEN};
        ids_append(&t[i].tokens, id, prompt);
    }
    for (int i = 0; i < WRITTEN; i++) scheduler_add(s, t + i);
    while (t[WRITTEN - 1].published < 5) must(scheduler_step(s, &e), &e);
    scheduler_add(s, t + WRITTEN);
    for (int i = 0; i < 2; i++) must(scheduler_step(s, &e), &e);
    check(t[WRITTEN].published == PROMPT + 1, "after two steps %zu tokens are there", t[WRITTEN].published);
    for (int i = 0; i <= WRITTEN; i++) scheduler_remove(s, t + i), ids_free(&t[i].tokens);
    while (scheduler_state(s).outstanding) must(scheduler_step(s, &e), &e);
    scheduler_close(s);
    engine_close(&g);
    close_streams();
}

enum { ODD_TEXTS = 15, EVEN_TEXTS = 8, ODD_LENGTH = 60 };
static int steps_of[ODD_TEXTS + 1], submitted[2];
static double seconds_of_all;

static bool submit_counted(void *state, const Batch *b, Error *e) {
    submitted[0] = submitted[1], submitted[1] = b->seqs;
    steps_of[b->seqs]++;
    return reference.submit(state, b, e);
}

/* As if steps took a second, or seconds_of_all. Two steps are outstanding. One of eight is slow once. */
static bool collect_timed(void *state, Result *r, Error *e) {
    bool ok = reference.collect(state, r, e);
    const bool hiccup = submitted[0] == EVEN_TEXTS && steps_of[EVEN_TEXTS] == 10;
    return r->seconds = hiccup ? 1000 : submitted[0] == ODD_TEXTS ? seconds_of_all : 1, ok;
}

/* Writes all texts from two tokens each, and returns how many steps of all there were for one of eight. All get on
 * alike, and no text changes. */
static double all_for_one_of_eight(Scheduler *s, int id[][ODD_LENGTH + 1], const Sampling *how) {
    Error e;
    Stream t[ODD_TEXTS];
    memset(steps_of, 0, sizeof steps_of);
    for (int i = 0; i < ODD_TEXTS; i++) {
        t[i] = (Stream){.prompt = 2, .most = ODD_LENGTH, .sampling = *how, .want = WANT_TOKEN};
        ids_append(&t[i].tokens, id[i], 2);
        scheduler_add(s, t + i);
    }
    while (scheduler_state(s).running || scheduler_state(s).waiting || scheduler_state(s).outstanding) {
        size_t least = ODD_LENGTH, most = 0;
        must(scheduler_step(s, &e), &e);
        for (int i = 0; i < ODD_TEXTS; i++) least = MIN(least, t[i].tokens.n), most = MAX(most, t[i].tokens.n);
        check(most - least <= 2, "a text has %zu tokens, another %zu", most, least);
    }
    for (int i = 0; i < ODD_TEXTS; i++) {
        check(!memcmp(t[i].tokens.data, id[i], ODD_LENGTH * sizeof(int)), "text %d is another one", i);
        ids_free(&t[i].tokens);
    }
    return steps_of[ODD_TEXTS] / (double)MAX(steps_of[EVEN_TEXTS], 1);
}

/* Texts pause while a step of all takes twice as long as one of eight, whatever one step took. When it takes as long
 * as one of eight, that is found out. */
static void texts_pause_in_turn(void) {
    Error e;
    Engine g;
    Backend timed = reference;
    const Limits limits = {.max_seqs = ODD_TEXTS, .max_tokens = 64};
    const Sampling how = {.temperature = 1, .top_p = 1, .penalty = 1, .seed = 3};
    uint64_t random = 5;
    int id[ODD_TEXTS][ODD_LENGTH + 1];
    timed.submit = submit_counted, timed.collect = collect_timed;
    open_streams(&reference, "odd");
    must(engine_open(&g, &timed, &streams.c.model, limits, ODD_LENGTH, &e), &e);
    for (int i = 0; i < ODD_TEXTS; i++) {
        fill_random(id[i], 2, streams.vocab, &random);
        write_text(&g, id[i], 2, ODD_LENGTH, &how);
    }
    Scheduler *s = scheduler_open(&g);
    seconds_of_all = 2;
    double ratio = all_for_one_of_eight(s, id, &how);
    check(ratio < 0.25, "%g steps of all for one of eight, which takes half as long", ratio);
    seconds_of_all = 1;
    for (int i = 0; i < 10; i++) ratio = all_for_one_of_eight(s, id, &how);
    check(ratio > 4, "%g steps of all for one of eight, which takes as long", ratio);
    scheduler_close(s);
    engine_close(&g);
    close_streams();
}

static void odd_draws_wait(void) {
    open_streams(&reference, "odd");
    draws_wait();
    close_streams();
}

static void equals_and_nan(void) {
    float equal[4] = {1, 3, 3, 2}, nan[4] = {1, NAN, 3, 2}, infinite[4] = {-INFINITY, -INFINITY, 0, -INFINITY};
    Sampling warm = {.temperature = 1, .top_p = 1, .penalty = 1};
    check(draw(equal, 4, &greedy, 0) == 1, "of equals not the lowest id");
    check(draw(nan, 4, &greedy, 0) == DREW_NAN, "a NaN went unnoticed");
    check(draw(infinite, 4, &warm, 0) == 2, "drew what is impossible");
}

/* ---- text ---- */

/* Each maximal invalid part becomes one U+FFFD, however the bytes arrive: the Unicode standard, tables 3-8 to 3-11. */
static void invalid_utf8(void) {
    static const struct {
        const char *in, *out;
    } cases[] = {{"\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64", "a???b?c??d"},
                 {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", "????????A"},
                 {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", "????????A"},
                 {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", "?????A??B"},
                 {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", "????A"},
                 {"\xF0\x9F\x98", "?"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Bytes expected = {0};
        for (const char *c = cases[i].out; *c; c++)
            bytes_add(&expected, *c == '?' ? "\xEF\xBF\xBD" : c, *c == '?' ? 3 : 1);
        for (size_t cut = 0; cut <= strlen(cases[i].in); cut++) {
            Bytes held = {0}, out = {0};
            bytes_add(&held, cases[i].in, cut);
            utf8_stream(&held, &out, false);
            bytes_text(&held, cases[i].in + cut);
            utf8_stream(&held, &out, false);
            utf8_stream(&held, &out, true);
            check(out.n == expected.n && !memcmp(out.data, expected.data, out.n), "case %zu cut at %zu: %s", i, cut,
                  out.data);
            bytes_free(&held);
            bytes_free(&out);
        }
        bytes_free(&expected);
    }
}

/* A model with fewer rows than the tokenizer has ids: added tokens above them are as if they were not there, even where
 * a whole word is one of them. */
static void tokens_without_a_row(void) {
    Error e;
    Ids ids = {0};
    cJSON *json = json_read("tests/fixtures/parrot/tokenizer.json", 1 << 20, &e), *word;
    cJSON_AddItemToArray(cJSON_GetObjectItem(json, "added_tokens"), word = cJSON_CreateObject());
    cJSON_AddNumberToObject(word, "id", 421);
    cJSON_AddStringToObject(word, "content", "zebra");
    Tokenizer *t = parrot_open(json, &e);
    cJSON_Delete(json);
    must(t, &e);
    int end = tokenizer_added(t, "<|end|>");
    check(!tokenizer_fit(t, 300), "words without a row were left out");
    check(tokenizer_fit(t, end), "the added token was not left out");
    must(tokenizer_encode(t, "zebra<|end|>", 12, CONTROL_TOKENS, &ids, &e), &e);
    for (size_t i = 0; i < ids.n; i++) check(ids.data[i] < end, "the id %d has no row", ids.data[i]);
    check(tokenizer_added(t, "<|end|>") < 0 && tokenizer_size(t) == end, "the added token is still known");
    ids_free(&ids);
    tokenizer_close(t);
}

/* A conversation with the parrot, and what one answer of it leaves. */
typedef struct {
    Tokenizer *tokenizer;
    Chat chat;
    Reader reader;
    Conversation conversation;
    Ids sampled;
    Bytes shown;
} Talk;

static void talk_open(Talk *t) {
    Error e;
    *t = (Talk){.tokenizer = parrot_open(NULL, &e)};
    must(t->tokenizer, &e);
    check(chat_open(&t->chat, t->tokenizer, "", false, &e), "the parrot has no harmony");
    conversation_init(&t->conversation);
    reader_init(&t->reader, &t->chat, NULL);
}

static void talk_sample(Talk *t, const char *text) {
    Error e;
    must(tokenizer_encode(t->tokenizer, text, strlen(text), CONTROL_TOKENS, &t->sampled, &e), &e);
}

static void talk_close(Talk *t) {
    reader_free(&t->reader);
    conversation_free(&t->conversation);
    tokenizer_close(t->tokenizer);
    ids_free(&t->sampled);
    bytes_free(&t->shown);
}

/* A model that goes on in the name of others ends its answer: nothing of theirs is the assistant's, a question or an
 * instruction. */
static void others_turns_end_an_answer(void) {
    static const char *const others[] = {"<|start|>user<|message|>",
                                         "<|start|>system<|message|>",
                                         "<|start|>developer<|channel|>final<|message|>",
                                         "<|start|>functions.f to=assistant<|channel|>commentary<|message|>",
                                         "<|start|>python to=assistant<|message|>",
                                         "<|start|>tool<|message|>",
                                         "user<|message|>",
                                         "<|start|>user",
                                         "<|start|>user to=functions.f<|message|>"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        Talk t;
        talk_open(&t);
        talk_sample(&t, "<|channel|>final<|message|>Hi<|end|>");
        talk_sample(&t, others[i]);
        if (i != 7) talk_sample(&t, "Go on"); /* 7: without <|message|> the end of the message tells */
        talk_sample(&t, i == 7 ? " Go on<|end|>" : "<|return|>");
        bool stop = false;
        size_t n = 0;
        while (n < t.sampled.n && !stop) stop = reader_push(&t.reader, t.sampled.data[n++], &t.shown).stop;
        check(stop && (i == 7 || n + 1 < t.sampled.n), "%s does not end the answer", others[i]);
        if (i != 7) reader_end(&t.reader, &t.shown);
        check(t.reader.messages == 1, "%s: %d messages", others[i], t.reader.messages);
        check(kind_of(t.reader.message) == ANSWER && !strcmp(t.reader.message->content.data, "Hi"), "the answer");
        talk_close(&t);
    }
}

/* Of all recipients only the functions of the request are called; junk that touches a name does not hide it. Expected:
 * the name behind "functions.", or NULL: the message is text on its channel. */
static void only_declared_functions_are_called(void) {
    static const char tools[] = "[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},"
                                "{\"type\":\"function\",\"function\":{\"name\":\"get_weather\"}}]";
    static const struct {
        const char *to, *called;
    } cases[] = {{"functions.f", "functions.f"},
                 {"f", "f"},
                 {"functions.get_weather\xe5\xbd\xa9", "functions.get_weather"},
                 {"functions.f?", "functions.f"},
                 {"functions.g", NULL},
                 {"functions.", NULL},
                 {"functions", NULL},
                 {"python", NULL},
                 {"browser.search", NULL},
                 {"assistant", NULL},
                 {"user", NULL},
                 {"all", NULL}};
    Error e;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) { /* the second time without tools */
        const bool bare = i >= sizeof cases / sizeof *cases;
        const char *to = cases[i % (sizeof cases / sizeof *cases)].to, *called = bare ? NULL : cases[i].called;
        Talk t;
        talk_open(&t);
        reader_free(&t.reader);
        t.conversation.request = cJSON_CreateObject();
        if (!bare)
            cJSON_AddItemToObject(t.conversation.request, "tools", json_parse(tools, strlen(tools), "tools", &e));
        reader_init(&t.reader, &t.chat, &t.conversation);
        LocalText said = text_print("<|channel|>commentary to=%s <|constrain|>json<|message|>{}<|call|>", to);
        talk_sample(&t, said);
        for (size_t k = 0; k < t.sampled.n; k++) reader_push(&t.reader, t.sampled.data[k], &t.shown);
        const Message *m = t.reader.message;
        check(t.reader.messages == 1 && !strcmp(m->content.data, "{}"), "%s: the text", to);
        check(kind_of(m) == (called ? CALL : PREAMBLE), "%s is%s called", to, called ? " not" : "");
        check(!called || !strcmp(m->recipient, called), "%s calls %s", to, m->recipient);
        talk_close(&t);
    }
}

/* Fails with answer number i in visible characters if there is a problem; frees it. */
static void check_answer(int i, Bytes *text, const char *problem) {
    Bytes shown = {0};
    for (size_t k = 0; k < text->n; k++) bytes_print(&shown, text->data[k] >= ' ' ? "%c" : "<%d>", text->data[k]);
    check(!problem, "answer %d %s: %s", i, problem, shown.data);
    bytes_free(text);
    bytes_free(&shown);
}

/* Thousands of answers made of control tokens and words: none is lost, and what was read and repaired reads the same
 * when it is rendered, without another repair. */
static void readings_are_rendered_and_read_again(void) {
    static const char *const pieces[] = {
        "\1",      "\2",          "\3",   "\4",        "\5",   "\6",       "\7",       "\10",        "\1assistant",
        "\2final", "\2final\4",   "\5\1", "assistant", "user", "final",    "analysis", "commentary", " to=functions.f",
        "to=",     "functions.g", "json", " code",     "\13",  "\360\237", "\1",       " ",          "HELLO",
        " WORLD",  "A",           "Z ",   "{}",        "x.y"};
    enum { PIECES = sizeof pieces / sizeof *pieces };
    Talker talker;
    uint64_t state = 12;
    check(talker_open(&talker), "the parrot has no harmony");
    for (int i = 0; i < 5000; i++) {
        Bytes text = {0};
        bytes_text(&text, "");
        for (int k = 0; k < 1 + i % 20; k++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            bytes_text(&text, pieces[(state >> 33) % PIECES]);
        }
        check_answer(i, &text, reading_problem(&talker, text.data, text.n));
    }
    talker_close(&talker);
}

/* What forces a call of a function, or of any if that is NULL, is the beginning of one: with the text behind it and the
 * token of this byte it reads as a call of f. */
static void call_is_forced(Talker *m, const char *function, const char *text, unsigned char end) {
    Error e;
    Reader r;
    Ids ids = {0};
    Bytes shown = {0};
    must(chat_force(&m->chat, "medium", function, &ids, &e), &e);
    reader_init(&r, &m->chat, NULL);
    for (size_t k = 0; k < ids.n; k++) reader_push(&r, ids.data[k], &shown);
    while (*text && *text != '<') reader_push(&r, m->token_of[(unsigned char)*text++], &shown);
    if (*text) reader_push(&r, tokenizer_added(m->tokenizer, "</tool_call>"), &shown); /* a mark is one token */
    reader_push(&r, m->token_of[end], &shown);
    check(r.messages == 1 && message_part(r.message) == CALL && !strcmp(r.message->recipient, "functions.f") &&
              strstr(r.message->content.data, "1}"),
          "%s", r.messages ? r.message->content.data : "no message");
    reader_free(&r);
    ids_free(&ids), bytes_free(&shown);
}

static void calls_are_forced(void) {
    Talker m;
    check(talker_open(&m), "the parrot has no harmony");
    call_is_forced(&m, "f", "{\"a\":1}", 6);
    call_is_forced(&m, NULL, "f\3json\4{\"a\":1}", 6);
    talker_close(&m);
}

/* What cJSON lets pass, and what must pass. */
static void json_is_strict(void) {
    static const char *const bad[] = {"{} x",
                                      "{\"a\":1,\"a\":2}",
                                      "{\"a\":{\"b\":1,\"b\":1}}",
                                      "[01]",
                                      "[1.]",
                                      "[-]",
                                      "[.5]",
                                      "[1e]",
                                      "[+1]",
                                      "[1e5e5]",
                                      "[\"\\u0000\"]",
                                      "[\"\n\"]",
                                      "[\"\xC0\x80\"]",
                                      "\xEF\xBB\xBF{}",
                                      "[\"\\ud800\"]",
                                      "[NaN]",
                                      "[1,]",
                                      "",
                                      "[1]\f"};
    static const char *const good[] = {"{\"a\":1,\"A\":2}", "[0,-0,1.5e-7,\"\\\\u0000\"]", " [\"\\ud83d\\ude00\"]\n",
                                       "{\"a\":{\"a\":1}}"};
    Error e;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cJSON *json = json_parse(bad[i], strlen(bad[i]), "test", &e);
        check(!json, "took %s", bad[i]);
        cJSON_Delete(json);
    }
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        cJSON *json = json_parse(good[i], strlen(good[i]), "test", &e);
        check(json, "refused %s: %s", good[i], e.text);
        cJSON_Delete(json);
    }
}

/* ---- what config.json says ---- */

/* Opens a model of random weights of a config.json with this text, in an encoding or NULL. */
static void open_shapes(Checkpoint *c, const char *config, const char *encoding) {
    Error e;
    char dir[] = "/tmp/infer-unit-XXXXXX", path[64];
    check(mkdtemp(dir), "no folder below /tmp");
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    check(f && fputs(config, f) >= 0 && !fclose(f), "%s cannot be written", path);
    must(random_weights_open(c, dir, encoding, &e), &e);
    unlink(path);
    rmdir(dir);
}

/* However config.json spells RoPE, angles and scale are those of transformers. */
static void angles_equal_transformers(void) {
    Error e;
    if (skips_random_weights()) return;
    cJSON *cases = json_read("tests/goldens/rope.json", 1 << 20, &e);
    must(cases, &e);
    const cJSON *one;
    cJSON_ArrayForEach(one, cases) {
        const char *name = json_string(one, "name");
#ifndef ROOM_families
        if (strcmp(json_string(json_get(one, "config"), "model_type"), "gpt_oss")) continue;
#endif
        char *config = json_text(json_get(one, "config"));
        Checkpoint c;
        open_shapes(&c, config, NULL);
        free(config);
        int n = c.model.rope_dim / 2;
        const Rope *rope = c.model.layer[0].rope;
        float *golden = numbers(json_get(one, "inv_freq"), n);
        double scale = json_get(one, "scale")->valuedouble;
        check(fabs((double)rope->scale - scale) < 1e-6, "%s: scale %g, not %g", name, (double)rope->scale, scale);
        for (int i = 0; i < n; i++)
            check(fabs((double)(rope->inv_freq[i] / golden[i]) - 1) < 1e-5, "%s: angle %d is %g, not %g", name, i,
                  (double)rope->inv_freq[i], (double)golden[i]);
        free(golden);
        checkpoint_close(&c);
    }
    cJSON_Delete(cases);
}

/* Made up weights of gpt-oss have the bytes of the published checkpoints: total_size of 20b's index; 120b's model card
 * says 60.8 GiB. Biases, sinks and norms are no matrices. A token takes keys and values of 8 heads of 64 in each layer.
 */
static void sizes_of_gpt_oss(void) {
    static const struct {
        int layers, experts;
        double bytes, tolerance;
    } models[] = {{24, 32, 13761264768, 0}, {36, 128, 60.8 * (1 << 30), 0.001}};
    if (skips_random_weights()) return;
    for (int i = 0; i < 2; i++) {
        Checkpoint c;
        LocalText config = text_print(
            "{\"model_type\":\"gpt_oss\",\"vocab_size\":201088,\"hidden_size\":2880,\"intermediate_size\":2880,"
            "\"num_hidden_layers\":%d,\"num_attention_heads\":64,\"num_local_experts\":%d,\"num_experts_per_tok\":4,"
            "\"swiglu_limit\":7,\"rms_norm_eps\":1e-5,\"max_position_embeddings\":131072}",
            models[i].layers, models[i].experts);
        open_shapes(&c, config, NULL);
        const Model *m = &c.model;
        double bytes =
            (double)reference.weight_bytes(m) + 2 * (models[i].layers * (13824 + 8641.0 * models[i].experts) + 2880);
        uint64_t more = step_bytes(m, m->top_k, 1, 1) - step_bytes(m, m->top_k, 1, 0);
        check(fabs(bytes / models[i].bytes - 1) <= models[i].tolerance, "%d layers: %.0f bytes, not %.0f",
              models[i].layers, bytes, models[i].bytes);
        check(more == (uint64_t)(models[i].layers * 2 * 8 * 64 * 2), "%d layers: %llu bytes in the cache",
              models[i].layers, (unsigned long long)more);
        checkpoint_close(&c);
    }
}

static void router_and_experts(void) { real_router_and_experts(&reference, 1); }
static void sinks(void) { real_sinks(&reference, F32, 0); }
#ifdef ROOM_families
#include "families.c"
#endif
#if defined ROOM_encodings && defined ROOM_families
#include "encodings.c"
#endif
#ifdef ROOM_json
#include "json.c"
#endif
#ifdef ROOM_formats
#include "formats.c"
#include "templates.c"
#endif
#ifdef ROOM_terminal
#include "terminal.c"
#endif

int main(int argc, char **argv) {
    read_arguments(argv);
    run("unit: layers equal transformers'", layers_equal_transformers);
    run("unit: rounding is bf16's", rounding_is_bf16);
    run("unit: a norm, a scale or a bias 1 % off fails at the first stage behind it", spoiled_models_fail);
    run("unit: the real router and experts of layer 0", router_and_experts);
    run("unit: the real scores and sinks of layer 0", sinks);
    run("unit: alone = in a batch of 3 and 17", alone_equals_batched);
    run("unit: one chunk = many", one_chunk_equals_many);
    run("unit: rewound = never there", odd_rewound_equals_never_there);
    run("unit: turns reuse the cache, fill the context, give pages back", turns_reuse_the_cache);
    run("unit: scheduled among others, with few pages = alone", scheduled_equals_alone);
    run("unit: a text whose next tokens are not found ends", stuck_texts_end);
    run("unit: a step of many answers has room for a prompt", many_answers_lengthen_steps);
    run("unit: texts pause in turn while steps of fewer are faster", texts_pause_in_turn);
    run("unit: ln, exp, Philox", logarithm_and_exponential);
    run("unit: draws follow transformers' processors", draws_follow_transformers);
    run("unit: equals and NaN", equals_and_nan);
    run("unit: a draw waits until it is told what it may draw", odd_draws_wait);
    run("unit: invalid UTF-8", invalid_utf8);
    run("unit: tokens without a row", tokens_without_a_row);
    run("unit: somebody else's turn ends an answer", others_turns_end_an_answer);
    run("unit: only declared functions are called", only_declared_functions_are_called);
    run("unit: answers at random are rendered and read again", readings_are_rendered_and_read_again);
    run("unit: calls can be forced", calls_are_forced);
    run("unit: JSON is strict", json_is_strict);
    run("unit: RoPE's angles equal transformers'", angles_equal_transformers);
    run("unit: gpt-oss is as large as published", sizes_of_gpt_oss);
#ifdef ROOM_families
    families_tests();
#endif
#if defined ROOM_encodings && defined ROOM_families
    encodings_tests();
#endif
#ifdef ROOM_json
    json_tests();
#endif
#ifdef ROOM_formats
    formats_tests();
    templates_tests();
#endif
#ifdef ROOM_terminal
    terminal_tests();
#endif
    return failures != 0;
}
