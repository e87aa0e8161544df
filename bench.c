/* bench.c: the commands that measure or describe a model, and the one that checks this machine: bench, perplexity,
 * inspect, list, doctor. Results go to stdout, as text or as JSON. */
#include "host.h"

#include <curl/curl.h>
#include <libgen.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { MOST_LINE = 1 << 28 }; /* bytes of a line from a server */

/* ---- bench: how fast are prompts and generation? ----
 * The memory that a step reads limits generation. So bench counts the bytes of each step from the model's own tensors
 * and compares the step's time with a flat read of as many bytes, in the same run on the same card. */

typedef struct {
    const Options *o;
    Session model;
    cJSON *rows;
    bool json; /* else a table is printed */
} Bench;

typedef struct { /* a row of the table */
    bool prompt; /* or generation */
    int tokens, depth, streams;
    double experts; /* that a step reads of each layer, on average */
    uint64_t bytes; /* that a step of all streams reads */
    double flat;    /* seconds of a flat read of `bytes`, or 0: unknown */
    double seconds[MOST_REPEATS];
} Figure;

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report_figure(Bench *b, Figure *f) {
    int n = b->o->repeats;
    const char *kind = f->prompt ? "prompt" : "generate";
    qsort(f->seconds, (size_t)n, sizeof *f->seconds, ascending);
    double median = (f->seconds[(n - 1) / 2] + f->seconds[n / 2]) / 2, step = median / f->tokens;
    double all = (double)f->tokens * f->streams, least = all / f->seconds[n - 1], most = all / f->seconds[0];
    double bytes = (double)f->bytes, percent = f->flat / step * 100;
    cJSON *row =
        json_object("kind", json_word(kind), "tokens", json_number(f->tokens), "depth", json_number(f->depth),
                    "streams", json_number(f->streams), "tokens_per_second", json_number(all / median), "least",
                    json_number(least), "most", json_number(most), "seconds", json_number(median), NULL);
    if (!f->prompt)
        json_add(row, "experts", json_number(f->experts), "step_bytes", json_number(bytes), "bytes_per_second",
                 json_number(bytes / step), "flat_seconds", json_number(f->flat), "percent_of_flat",
                 json_number(percent), NULL);
    cJSON_AddItemToArray(b->rows, row);
    if (b->json) return;
    printf("| %s %d | %d | %d | %.1f | %.1f-%.1f | %.3f |", kind, f->tokens, f->depth, f->streams, all / median, least,
           most, (f->prompt ? median : step) * 1e3);
    printf(f->prompt ? " | | |\n" : " %.3f | %.0f | %.1f |\n", bytes / 1e9, bytes / step / 1e9, percent);
}

/* Seconds until a prompt of f->tokens random tokens has its first drawn token; or until each of f->streams texts has
 * f->tokens drawn ones, behind a context of f->depth tokens. */
static double run_once(Bench *b, const Figure *f) {
    const size_t tokens = (size_t)f->tokens, depth = (size_t)f->depth, prompt = f->prompt ? tokens : depth + 1;
    Stream *t = allocate_zero((size_t)f->streams, sizeof *t), *last = t + f->streams - 1;
    Error e;
    if (!f->prompt) srandom(1); /* every repeat has the same texts; but all prompts differ, so the cache never helps */
    for (Stream *i = t; i <= last; i++) {
        *i = (Stream){.prompt = prompt, .most = prompt + (f->prompt ? 1 : tokens), .want = WANT_TOKEN};
        i->sampling = (Sampling){.top_p = 1, .penalty = 1};
        i->sent = depth, i->filed = depth / PAGE; /* as if they were computed */
        while (i->tokens.n < prompt) ids_add(&i->tokens, (int)(random() % b->model.engine.model->vocab));
    }
    double begin = seconds();
    for (Stream *i = t; i < last; i++) scheduler_add(b->model.scheduler, i);
    if (!scheduler_run(b->model.scheduler, last, NULL, &e)) die(&e);
    double end = seconds();
    for (Stream *i = t; i <= last; i++) ids_free(&i->tokens);
    return free(t), end - begin;
}

static void measure(Bench *b, Figure *f) {
    Engine *g = &b->model.engine;
    uint64_t read = backend->experts_read(g->state);
    scheduler_close(b->model.scheduler); /* it knows what steps cost at another depth */
    b->model.scheduler = scheduler_open(g);
    run_once(b, f); /* counts experts, and warms up */
    const double steps = (double)scheduler_state(b->model.scheduler).steps;
    f->experts = (double)(backend->experts_read(g->state) - read) / steps / g->model->n_layers;
    f->bytes = step_bytes(g->model, f->experts, f->streams, f->depth + f->tokens / 2);
    f->flat = f->prompt ? 0 : backend->flat_read(g->state, f->bytes); /* before the card heats up */
    for (int r = 0; r < b->o->repeats; r++) f->seconds[r] = run_once(b, f);
}

/* Measures all prompts, then every number of streams at every depth, if the cache has room. */
static void measure_all(Bench *b) {
    const Options *o = b->o;
    const Engine *g = &b->model.engine;
    for (int i = -o->prompts.n; i < o->streams.n * o->depths.n; i++) {
        Figure f = {.prompt = i < 0, .streams = 1};
        f.tokens = f.prompt ? o->prompts.value[i + o->prompts.n] : o->tokens;
        if (!f.prompt) f.streams = o->streams.value[i / o->depths.n], f.depth = o->depths.value[i % o->depths.n];
        int length = f.depth + f.tokens + f.prompt; /* a prompt is followed by a token */
        if (length > g->context || (length + PAGE - 1) / PAGE * f.streams > g->pages) {
            fprintf(stderr, "infer: %d tokens after %d in %d stream%s are left out: the cache holds %d, a context %d\n",
                    f.tokens, f.depth, f.streams, f.streams == 1 ? "" : "s", g->pages * PAGE, g->context);
            continue;
        }
        measure(b, &f);
        report_figure(b, &f);
    }
}

/* ---- bench --serve: how fast is a server that speaks OpenAI's API? ----
 * Each client is a thread that streams one completion after another over its own connection. Prompts are random token
 * ids, so their length is exact and a server's prefix cache does not help. */

enum { FIRST_ID = 256, PROMPT_IDS = 768 }; /* in prompts: in most vocabularies the ids below 1,024 are ordinary text */

typedef struct { /* a row of the table */
    const Options *o;
    const char *url; /* of completions */
    struct curl_slist *headers;
    int prompt, clients, requests; /* tokens of a prompt; requests of a client */
    pthread_mutex_t lock;          /* of what follows; a client that fails keeps it, so only one error is printed */
    double tokens, seconds;
    Bytes first, gaps; /* arrays of double: seconds to an answer's first text; between two texts */
} Load;

typedef struct {
    Load *load;
    CURL *easy;
    Bytes line;        /* of a stream; or the whole of an answer that is not a stream */
    double sent, last; /* last: 0 until the first text */
    int64_t tokens;
} Request;

/* Reads a line of a stream: an event is  data: {"choices":[{"text":" the"}]}  and the last one has the usage. */
static void take_line(Request *r, double now) {
    Error ignored;
    bool data = r->line.n > 5 && !strncmp(r->line.data, "data:", 5);
    LocalJson event = data ? json_parse(r->line.data + 5, r->line.n - 5, "an event", &ignored) : NULL;
    const char *text = json_string(cJSON_GetArrayItem(json_get(event, "choices"), 0), "text");
    if (text && *text) {
        double time = now - (r->last ? r->last : r->sent);
        pthread_mutex_lock(&r->load->lock);
        bytes_add(r->last ? &r->load->gaps : &r->load->first, &time, sizeof time);
        pthread_mutex_unlock(&r->load->lock);
        r->last = now;
        r->tokens++; /* until the usage gives the exact number */
    }
    json_whole(json_get(json_get(event, "usage"), "completion_tokens"), 0, INT32_MAX, &r->tokens);
}

static size_t on_answer(char *data, size_t size, size_t n, void *request) {
    Request *r = request;
    char *type = NULL;
    double now = seconds();
    curl_easy_getinfo(r->easy, CURLINFO_CONTENT_TYPE, &type);
    bool stream = type && !strncmp(type, "text/event-stream", 17);
    for (size_t i = 0; i < n * size; i++) {
        bytes_add(&r->line, data + i, 1);
        if (stream && data[i] == '\n') take_line(r, now), r->line.n = 0;
    }
    return r->line.n < MOST_LINE ? n * size : 0;
}

static void write_body(const Load *l, Bytes *out) {
    cJSON *prompt = cJSON_CreateArray(), *model = l->o->model ? json_word(l->o->model) : NULL;
    for (int i = 0; i < l->prompt; i++)
        cJSON_AddItemToArray(prompt, json_number((double)(FIRST_ID + random() % PROMPT_IDS)));
    /* servers that know ignore_eos give answers of equal length */
    json_append(out,
                json_object("prompt", prompt, "model", model, "max_tokens", json_number(l->o->tokens), "temperature",
                            json_number(0), "ignore_eos", cJSON_CreateTrue(), "stream", cJSON_CreateTrue(),
                            "stream_options", json_object("include_usage", cJSON_CreateTrue(), NULL), NULL));
}

/* A thread: sends requests, the next one when the last is answered. The first that fails ends the measurement. */
static void *run_client(void *load) {
    Error e = {0};
    Load *l = load;
    CURL *easy = curl_easy_init();
    curl_easy_setopt(easy, CURLOPT_URL, l->url);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, l->headers);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L); /* a signal would reach another thread */
    curl_easy_setopt(easy, CURLOPT_XOAUTH2_BEARER, environment("OPENAI_API_KEY"));
    curl_easy_setopt(easy, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_answer);
    for (int i = 0; i < l->requests; i++) {
        LocalBytes body = {0};
        long status = 0;
        write_body(l, &body);
        Request r = {.load = l, .easy = easy, .sent = seconds()};
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body.data);
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, &r);
        CURLcode code = curl_easy_perform(easy);
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
        pthread_mutex_lock(&l->lock);
        if (code)
            fail(&e, NO_NETWORK, "%s: %s", l->url, curl_easy_strerror(code));
        else if (status != 200 || !r.last)
            fail(&e, status == 401 ? NO_NETWORK : FAILED, "%s: status %ld and no text%s: %.300s", l->url, status,
                 status == 401 ? " (a key is read from OPENAI_API_KEY)" : "", r.line.n ? r.line.data : "");
        if (e.code) fprintf(stderr, "infer: %s\n", e.text), _exit(e.code); /* other threads still use libraries */
        l->tokens += (double)r.tokens;
        pthread_mutex_unlock(&l->lock);
        bytes_free(&r.line);
    }
    return curl_easy_cleanup(easy), NULL;
}

static void run_load(Load *l, int requests) {
    pthread_t client[MOST_CLIENTS];
    double begin = seconds();
    l->requests = requests, l->tokens = 0, l->first.n = l->gaps.n = 0;
    for (int i = 0; i < l->clients; i++)
        if (pthread_create(client + i, NULL, run_client, l))
            die(&(Error){FAILED, "the system allows no more threads: fewer --clients"});
    for (int i = 0; i < l->clients; i++) pthread_join(client[i], NULL);
    l->seconds = seconds() - begin;
}

/* The p-quantile of times, in ms. */
static cJSON *percentile(const Bytes *times, double p) {
    double *at = (double *)(void *)times->data;
    size_t n = times->n / sizeof *at;
    if (n) qsort(at, n, sizeof *at, ascending);
    return json_number(n ? at[(size_t)ceil(p * (double)n) - 1] * 1e3 : 0);
}

static int bench_server(const Options *o, bool json) {
    LocalText url = text_print("%s/v1/completions", o->server);
    static Load l = {.clients = 1, .lock = PTHREAD_MUTEX_INITIALIZER};
    cJSON *rows = cJSON_CreateArray(), *x;
    curl_global_init(CURL_GLOBAL_DEFAULT);
    l.o = o, l.url = url, l.prompt = o->prompts.value[0];
    l.headers = curl_slist_append(NULL, "Content-Type: application/json");
    srandom((unsigned)o->sampling.seed);
    run_load(&l, 1); /* to warm up */
    if (!json)
        puts("| clients | prompt | tok/s | first token, ms: p50 | p99 | a token, ms: p50 | p99 | most |\n"
             "|---:|---:|---:|---:|---:|---:|---:|---:|");
    for (int i = 0; i < o->prompts.n * o->clients.n; i++) {
        l.prompt = o->prompts.value[i / o->clients.n], l.clients = o->clients.value[i % o->clients.n];
        run_load(&l, o->repeats);
        cJSON *row =
            json_object("clients", json_number(l.clients), "prompt", json_number(l.prompt), "tokens_per_second",
                        json_number(l.tokens / l.seconds), "first_p50", percentile(&l.first, 0.5), "first_p99",
                        percentile(&l.first, 0.99), "token_p50", percentile(&l.gaps, 0.5), "token_p99",
                        percentile(&l.gaps, 0.99), "token_most", percentile(&l.gaps, 1), NULL);
        cJSON_AddItemToArray(rows, row);
        cJSON_ArrayForEach(x, row) if (!json) printf("| %.5g ", x->valuedouble);
        if (!json) puts("|");
    }
    json_print(rows, json);
    return DONE;
}

int bench(const Options *o) {
    Error e;
    static Bench b;
    Session *s = &b.model;
    b.o = o, b.json = !strcmp(o->format, "json");
    if (!b.json && strcmp(o->format, "md"))
        fail(&e, USAGE, "--output must be md or json, not '%.40s'", o->format), die(&e);
    setlinebuf(stdout); /* a row appears when it is measured */
    if (o->server) return bench_server(o, b.json);
    if (!session_open(s, o, NEED_SHAPES, &e) || !session_load(s, o, 0, &e)) die(&e);
    cJSON *out = json_object("family", json_word(s->checkpoint.family), "random",
                             cJSON_CreateBool(s->checkpoint.model.made_up), "where", json_word(s->where),
                             "weight_bytes", json_number((double)backend->weight_bytes(s->engine.model)),
                             "load_seconds", json_number(s->seconds), "rows", b.rows = cJSON_CreateArray(), NULL);
    if (!b.json)
        puts("| test | depth | streams | tok/s | least-most | ms | GB a step | GB/s | % of flat |\n"
             "|---|---:|---:|---:|---:|---:|---:|---:|---:|");
    measure_all(&b);
    const int code = cJSON_GetArraySize(b.rows) ? DONE : NO_ROOM;
    json_print(out, b.json);
    return code;
}

/* ---- perplexity: how surprised is a model by a text? exp of the mean of -log p(token | what stands before it) ---- */

typedef struct {
    int vocab;
    double cost; /* sum of -log p */
} Score;

static void add_cost(Stream *t, size_t position, int token, const float *logits, bool last) {
    Score *s = t->owner;
    if (!last) s->cost += log_sum_exp(logits, s->vocab) - (double)logits[token]; /* the last is not the text's */
}

int perplexity(const Options *o) {
    Error e;
    static Session s;
    LocalIds ids = {0};
    LocalBytes text = {0};
    if (!o->file) fail(&e, USAGE, "-f FILE is missing: the text; see infer perplexity --help"), die(&e);
    text_read(o->file, &text);
    if (!session_open(&s, o, NEED_TOKENIZER | NEED_CHECKPOINT, &e) ||
        !tokenizer_encode(s.tokenizer, text.data, text.n, WITH_TEMPLATE, &ids, &e))
        die(&e);
    int context = s.checkpoint.model.context, window = o->context ? o->context : context < 1024 ? context : 1024;
    int stride = o->stride ? o->stride : window / 2;
    if (ids.n < 2) fail(&e, USAGE, "a text of at least two tokens is needed"), die(&e);
    if (stride >= window)
        fail(&e, USAGE, "a stride of %d leaves tokens between windows of %d out", stride, window), die(&e);
    if (!session_load(&s, o, window, &e)) die(&e);
    Score score = {.vocab = s.checkpoint.model.vocab};
    size_t scored = 1; /* nothing stands before the first token; each other counts in the first window that has it */
    for (size_t begin = 0; scored < ids.n; begin += (size_t)stride) {
        size_t n = ids.n - begin < (size_t)window ? ids.n - begin : (size_t)window;
        if (!scheduler_score(s.scheduler, ids.data + begin, n, scored - begin, add_cost, &score, &e)) die(&e);
        scored = begin + n;
    }
    double mean = score.cost / (double)(ids.n - 1);
    printf("perplexity %.6g  nll %.8g  tokens %zu\n", exp(mean), mean, ids.n - 1);
    return DONE;
}

/* ---- inspect: what is a model made of, and does it fit on the GPU? ---- */

/* Adds the number of weights, and the bytes of each kind of tensor and encoding. */
static void add_weights(cJSON *out, const Tensors *t, const Model *m) {
    static const char *const kinds[][2] = {{"shared_experts", "mlp"},
                                           {"experts", "experts"},
                                           {"self_attn", "attention"},
                                           {"mlp.", "mlp"},
                                           {"embed_tokens", "embedding"},
                                           {"lm_head", "head"},
                                           {"", "rest"}};
    double bytes = 0, values = 0, active = 0; /* active: used by one token */
    for (const Tensor *x = t->tensor; x < t->tensor + t->n; x++) {
        int k = 0;
        if (!x->bound) continue;
        while (!strstr(x->name, kinds[k][0])) k++;
        const char *kind = kinds[k][1];
        const bool experts = !strcmp(kind, "experts"), table = !strcmp(kind, "embedding");
        double n = (double)x->values;
        LocalText name = text_print("bytes_of_%s_in_%s", kind, x->encoding);
        cJSON *sum = cJSON_GetObjectItemCaseSensitive(out, name);
        if (!sum) sum = cJSON_AddNumberToObject(out, name, 0);
        cJSON_SetNumberValue(sum, sum->valuedouble + (double)x->size);
        bytes += (double)x->size, values += n;
        active += experts ? n / m->n_experts * m->top_k : table && m->embed.each != m->head.each ? 0 : n;
    }
    json_add(out, "weight_bytes", json_number(bytes), "parameters", json_number(values), "active_parameters",
             json_number(active), NULL);
}

/* Adds what the GPU must hold and how much of it fits. The backend's working memory is not known before it opens the
 * model: 1 to 3 GB for 1 to 70 billion parameters. 2 GB stand for it here. */
static void add_memory(cJSON *out, const Model *m, int context) {
    const int row = m->kv_rank ? m->kv_rank + m->rope_dim : 2 * m->n_kv_heads * m->head_dim;
    double token = 2.0 * m->n_layers * row + 4, weights = (double)backend->weight_bytes(m), fixed = weights + 2e9;
    Devices d = {0};
    backend->describe(&d);
    LocalText estimate =
        text_print("%s of weights, %s of cache for a context of %s, about 2 GB to work in", SIZE((uint64_t)weights),
                   SIZE((uint64_t)(token * context)), COUNT((uint64_t)context));
    json_add(out, "cache_bytes_per_token", json_number(token), "gpu_bytes", json_number(fixed + token * context),
             "estimate", json_word(estimate), "gpu", json_word(d.gpus ? d.gpu[0].name : d.problem), NULL);
    if (!d.gpus) {
        json_add(out, "fits", json_word(NULL), NULL);
        return;
    }
    double room = (double)d.gpu[0].free, fits = fmin(fmax(floor((room - fixed) / token / PAGE) * PAGE, 0), m->context);
    if (!d.gpu[0].usable) fits = 0;
    LocalText cure = fits > 0 ? text_print("--ctx %.0f fits here", fits)
                              : text_print("a GPU with %s free", SIZE((uint64_t)(fixed + token * PAGE)));
    json_add(out, "gpu_bytes_free", json_number(room), "context_that_fits", json_number(fits), "fits",
             cJSON_CreateBool(fits >= context), "suggestion", fits < context ? json_word(cure) : NULL, NULL);
}

/* Adds what there is to say about the model in a folder. False: infer does not run it. */
static bool add_model(cJSON *out, const char *dir, int context, Error *e) {
    static Session s;
    const Model *m = &s.checkpoint.model;
    bool ok = session_open(&s, &(Options){.model = dir}, NEED_CHECKPOINT | USE_TOKENIZER, e);
    if (ok && !model_has_context(m, context, e)) die(e);
    cJSON_AddBoolToObject(out, "supported", ok);
    if (ok) {
        json_add(out, "family", json_word(s.checkpoint.family), "layers", json_number(m->n_layers), "width",
                 json_number(m->dim), "heads", json_number(m->n_heads), "kv_heads", json_number(m->n_kv_heads),
                 "head_size", json_number(m->head_dim), "experts", json_number(m->n_experts), "experts_per_token",
                 json_number(m->top_k), "vocabulary", json_number(m->vocab), "context", json_number(m->context), NULL);
        const char *chat = s.has_chat ? s.chat.name : "none: its text is continued raw";
        if (s.tokenizer) cJSON_AddStringToObject(out, "chat_format", chat); /* a repository's outline has none */
        add_weights(out, &s.checkpoint.tensors, m);
        add_memory(out, m, context ? context : m->context);
    }
    return ok;
}

static void print_facts(const cJSON *facts) {
    const cJSON *x;
    cJSON_ArrayForEach(x, facts) {
        const char *number = COUNT((uint64_t)x->valuedouble), *text = cJSON_IsNumber(x) ? number : x->valuestring;
        if (cJSON_IsBool(x)) text = cJSON_IsTrue(x) ? "yes" : "no";
        for (const char *c = x->string; *c; c++) putchar(*c == '_' ? ' ' : *c);
        printf("%*s%s", 31 - (int)strlen(x->string), "", text ? text : "unknown");
        if (strstr(x->string, "bytes")) printf(" (%s)", SIZE((uint64_t)x->valuedouble));
        puts("");
    }
}

int inspect(const Options *o) {
    Error e;
    uint64_t to_fetch;
    LocalText dir = model_find(o->model, &e);
    /* the hub is contacted only for an ORG/NAME that is not completely here */
    bool far = strchr(o->model, '/') && !strchr("/.~", *o->model);
    if (dir) far &= strcmp(dir, o->model) && !model_entry(dir).complete;
    if (!far && !dir) die(&e);
    cJSON *out = json_object("name", json_word(o->model), NULL);
    bool ok = add_model(out, far ? outline_open(o->model, &to_fetch) : dir, o->context, &e);
    if (far) cJSON_AddNumberToObject(out, "bytes_to_download", (double)to_fetch);
    if (!far) cJSON_AddBoolToObject(out, "complete", model_entry(dir).complete);
    if (!ok) cJSON_AddStringToObject(out, "problem", e.text);
    if (!o->json) print_facts(out);
    json_print(out, o->json);
    if (!ok) die(&e);
    return DONE;
}

/* ---- list: which models are here? ---- */

int list(const Options *o) {
    LOCAL(models_free) Models here = models_list();
    cJSON *all = cJSON_CreateArray();
    for (const ModelEntry *m = here.entry; m < here.entry + here.n; m++) {
        cJSON_AddItemToArray(all, json_object("name", json_word(m->name), "family", json_word(m->family), "bytes",
                                              json_number((double)m->bytes), "encoding", json_word(m->encoding),
                                              "supported", cJSON_CreateBool(m->known), "complete",
                                              cJSON_CreateBool(m->complete), "path", json_word(m->path), NULL));
        const char *state = !m->known ? "not supported" : m->complete ? "complete" : "incomplete";
        LocalText row = text_print("%-36s %-10s %8s  %-7s  %-13s  %s", m->name, m->family, SIZE(m->bytes), m->encoding,
                                   state, m->path);
        LocalBytes shown = {0}; /* a row is a line, whatever the name of a folder holds */
        bytes_shown(&shown, row, strlen(row), false);
        if (!o->json) puts(shown.data);
    }
    if (!here.n) fputs("no model is here; infer download ORG/NAME fetches one\n", stderr);
    json_print(all, o->json);
    return DONE;
}

/* ---- doctor: what is wrong with this machine? ---- */

/* Prints a finding and frees its text. cure NULL: nothing is wrong. status: the code of the first fault. */
static void finding(int *status, const char *what, int code, const char *cure, char *text) {
    printf("%s %-8s  %s%s%s\n", cure ? "✗" : "✓", what, text, cure ? ": " : "", cure ? cure : "");
    if (cure && !*status) *status = code;
    free(text);
}

int doctor(const Options *o) {
    int status = DONE;
    Devices v = {0};
    backend->describe(&v); /* runtime 0: a build without CUDA, which needs no GPU */
    if (!v.gpus)
        finding(&status, "GPU", NO_GPU,
                v.runtime ? "install or update NVIDIA's driver: nvidia-smi has to show one" : NULL,
                text_print("none (%s)", v.problem));
    for (int i = 0; i < v.gpus; i++) {
        LocalText cure = text_print("this build has no code for it, make clean && make CUDA_ARCH=sm_%d%d%s",
                                    v.gpu[i].major, v.gpu[i].minor, v.gpu[i].major == 9 ? "a" : "");
        finding(&status, "GPU", NO_GPU, v.gpu[i].usable ? NULL : cure,
                text_print("%d: %s, compute capability %d.%d, %s of %s free", i, v.gpu[i].name, v.gpu[i].major,
                           v.gpu[i].minor, SIZE(v.gpu[i].free), SIZE(v.gpu[i].total)));
    }
    if (v.driver)
        finding(&status, "CUDA", 0, NULL,
                text_print("driver for %d.%d, built with toolkit %d.%d for %s", v.driver / 1000, v.driver % 1000 / 10,
                           v.runtime / 1000, v.runtime % 1000 / 10, v.built));

    struct statvfs disk = {0};
    /* the cache's folder, or the nearest one above it that exists */
    LocalText cache = hub_cache();
    LocalText copy = text_print("%s", cache);
    char *there = copy;
    while (statvfs(there, &disk) && strcmp(there, "/") && strcmp(there, ".")) there = dirname(there);
    LocalText inside = text_print("%s/.", there); /* it may be a file */
    finding(&status, "cache", NO_NETWORK,
            access(inside, W_OK) ? "it cannot be written; choose another place with HF_HOME" : NULL,
            text_print("%s, %s free", cache, SIZE((uint64_t)disk.f_bavail * disk.f_frsize)));

    char token[300] = "not checked", answer[400] = "not tried";
    Error e = {0};
    bool answers = hub_check(token, answer, &e);
    finding(&status, "token", 0, NULL, text_print("%s", token));
    finding(&status, "network", e.code, answers ? NULL : e.text, text_print("%s", answer));

    return status;
}
