/* bench.c: how fast prompts and generation are, here or at a server. Results go to stdout, as a table or as JSON. */
#include "random.h"

#include <curl/curl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/param.h>
#include <unistd.h>

enum { MOST_REPEATS = 100, MOST_CLIENTS = 1000, MOST_LINE = 1 << 28 /* bytes of a line from a server */ };

enum { MOST_NUMBERS = 64 };
typedef struct { /* whole numbers like 1,4,16 */
    const char *text;
    int n, value[MOST_NUMBERS];
} Numbers;
static struct {
    Numbers prompts, depths, streams, clients;
    int tokens, repeats;
    const char *server, *fields, *encoding, *format;
} given;

/* ---- bench: how fast are prompts and generation? ----
 * The memory that a step reads limits generation. So bench counts the bytes of each step from the model's own tensors
 * and compares the step's time with a flat read of as many bytes, in the same run on the same card. */

/* Prints "a|b|c" as cells of a table: in a terminal aligned, as many from the left as fit; else Markdown. */
static void print_cells(const int *width, const char *row, bool header) {
    const bool aligned = isatty(STDOUT_FILENO);
    LocalText copy = text_print("%s", row);
    char *rest = copy, *cell;
    int n = 0;
    for (int room = columns(stdout); (cell = strsep(&rest, "|")); n++) {
        room -= width[n];
        if (!aligned) printf("| %s ", cell);
        if (aligned && room >= 0) printf("%*s", n ? width[n] : -width[n], cell);
    }
    puts(aligned ? "" : "|");
    while (header && !aligned && n--) fputs(n ? "|---:" : "|---:|\n", stdout);
}

typedef struct {
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

static const int figures[] = {14, 7, 8, 10, 11, 10, 11, 7, 18}; /* widths of the table's columns */

static void report_figure(Bench *b, Figure *f) {
    int n = given.repeats;
    const char *kind = f->prompt ? "prompt" : "generate";
    qsort(f->seconds, (size_t)n, sizeof *f->seconds, ascending);
    double median = (f->seconds[(n - 1) / 2] + f->seconds[n / 2]) / 2, step = median / f->tokens;
    double all = (double)f->tokens * f->streams, least = all / f->seconds[n - 1], most = all / f->seconds[0];
    double bytes = (double)f->bytes, percent = f->flat / step * 100;
    cJSON *facts =
        json_object("kind", json_word(kind), "tokens", json_number(f->tokens), "depth", json_number(f->depth),
                    "streams", json_number(f->streams), "tokens_per_second", json_number(all / median), "least",
                    json_number(least), "most", json_number(most), "seconds", json_number(median), NULL);
    if (!f->prompt)
        json_add(facts, "experts", json_number(f->experts), "step_bytes", json_number(bytes), "bytes_per_second",
                 json_number(bytes / step), "flat_seconds", json_number(f->flat), "percent_of_flat",
                 json_number(percent), NULL);
    cJSON_AddItemToArray(b->rows, facts);
    if (b->json) return;
    LocalBytes row = {0};
    bytes_print(&row, "%s %d|%d|%d|%.1f|", kind, f->tokens, f->depth, f->streams, all / median);
    if (f->prompt) bytes_print(&row, "|%.3f|||", median * 1e3);
    if (!f->prompt) bytes_print(&row, "%.1f|%.3f|%.3f|%.0f|", percent, step * 1e3, bytes / 1e9, bytes / step / 1e9);
    bytes_print(&row, "%.1f-%.1f", least, most);
    print_cells(figures, row.data, false);
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
    for (int r = 0; r < given.repeats; r++) f->seconds[r] = run_once(b, f);
}

/* Measures all prompts, then every number of streams at every depth, if the cache has room. */
static void measure_all(Bench *b) {
    const Engine *g = &b->model.engine;
    for (int i = -given.prompts.n; i < given.streams.n * given.depths.n; i++) {
        Figure f = {.prompt = i < 0, .streams = 1};
        f.tokens = f.prompt ? given.prompts.value[i + given.prompts.n] : given.tokens;
        if (!f.prompt)
            f.streams = given.streams.value[i / given.depths.n], f.depth = given.depths.value[i % given.depths.n];
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

static struct {              /* a row of the table */
    const char *model, *url; /* model: its name at the server, or NULL; url: of completions */
    struct curl_slist *headers;
    cJSON *fields;                 /* of --fields, or NULL */
    int prompt, clients, requests; /* tokens of a prompt; requests of a client */
    pthread_mutex_t lock;          /* of what follows; a client that fails keeps it, so only one error is printed */
    double tokens, seconds;
    Bytes first, gaps; /* arrays of double: seconds to an answer's first text; between two texts */
} load = {.clients = 1, .lock = PTHREAD_MUTEX_INITIALIZER};

typedef struct {
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
        pthread_mutex_lock(&load.lock);
        bytes_add(r->last ? &load.gaps : &load.first, &time, sizeof time);
        pthread_mutex_unlock(&load.lock);
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

static void write_body(Bytes *out) {
    cJSON *prompt = cJSON_CreateArray(), *model = load.model ? json_word(load.model) : NULL;
    for (int i = 0; i < load.prompt; i++)
        cJSON_AddItemToArray(prompt, json_number((double)(FIRST_ID + random() % PROMPT_IDS)));
    const cJSON *each;
    /* servers that know ignore_eos give answers of equal length */
    cJSON *body = json_object("prompt", prompt, "model", model, "max_tokens", json_number(given.tokens), "temperature",
                              json_number(0), "ignore_eos", cJSON_CreateTrue(), "stream", cJSON_CreateTrue(),
                              "stream_options", json_object("include_usage", cJSON_CreateTrue(), NULL), NULL);
    cJSON_ArrayForEach(each, load.fields) {
        cJSON_DeleteItemFromObjectCaseSensitive(body, each->string);
        json_add(body, each->string, cJSON_Duplicate(each, true), NULL);
    }
    json_append(out, body);
}

/* A thread: sends requests, the next one when the last is answered. The first that fails ends the measurement. */
static void *run_client(void *nothing) {
    Error e = {0};
    CURL *easy = curl_easy_init();
    curl_easy_setopt(easy, CURLOPT_URL, load.url);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, load.headers);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L); /* a signal would reach another thread */
    curl_easy_setopt(easy, CURLOPT_XOAUTH2_BEARER, environment("OPENAI_API_KEY"));
    curl_easy_setopt(easy, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_answer);
    for (int i = 0; i < load.requests; i++) {
        LocalBytes body = {0};
        long status = 0;
        write_body(&body);
        Request r = {.easy = easy, .sent = seconds()};
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body.data);
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, &r);
        CURLcode code = curl_easy_perform(easy);
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
        pthread_mutex_lock(&load.lock);
        if (code)
            fail(&e, NO_NETWORK, "%s: %s: is a server there?", load.url, curl_easy_strerror(code));
        else if (status != 200 || !r.last)
            fail(&e, status == 401 ? NO_NETWORK : FAILED, "%s: status %ld and no text%s: %.300s", load.url, status,
                 status == 401 ? " (a key is read from OPENAI_API_KEY)" : "", r.line.n ? r.line.data : "");
        if (e.code) put_text(stderr, NULL, "infer: ", e.text), _exit(e.code); /* other threads still use libraries */
        load.tokens += (double)r.tokens;
        pthread_mutex_unlock(&load.lock);
        bytes_free(&r.line);
    }
    curl_easy_cleanup(easy);
    return nothing;
}

static void run_load(int requests) {
    pthread_t client[MOST_CLIENTS];
    double begin = seconds();
    load.requests = requests, load.tokens = 0, load.first.n = load.gaps.n = 0;
    for (int i = 0; i < load.clients; i++)
        if (pthread_create(client + i, NULL, run_client, NULL))
            die(&(Error){FAILED, "the system allows no more threads: fewer --clients"});
    for (int i = 0; i < load.clients; i++) pthread_join(client[i], NULL);
    load.seconds = seconds() - begin;
}

/* The p-quantile of times, in ms. */
static cJSON *percentile(const Bytes *times, double p) {
    double *at = (double *)(void *)times->data;
    size_t n = times->n / sizeof *at;
    if (n) qsort(at, n, sizeof *at, ascending);
    return json_number(n ? at[(size_t)ceil(p * (double)n) - 1] * 1e3 : 0);
}

static int bench_server(const char *model, bool json) {
    static const int widths[] = {7, 8, 10, 11, 11, 11, 11, 9};
    LocalText url = text_print("%s/v1/completions", given.server);
    cJSON *rows = cJSON_CreateArray(), *x;
    curl_global_init(CURL_GLOBAL_DEFAULT);
    load.model = model, load.url = url, load.prompt = given.prompts.value[0];
    load.headers = curl_slist_append(NULL, "Content-Type: application/json");
    srandom((unsigned)(seconds() * 1e6)); /* other prompts each time */
    run_load(1);                          /* to warm up */
    if (!json) print_cells(widths, "clients|prompt|tok/s|first, ms|first p99|token, ms|token p99|most", true);
    for (int i = 0; i < given.prompts.n * given.clients.n; i++) {
        load.prompt = given.prompts.value[i / given.clients.n], load.clients = given.clients.value[i % given.clients.n];
        run_load(given.repeats);
        cJSON *row =
            json_object("clients", json_number(load.clients), "prompt", json_number(load.prompt), "tokens_per_second",
                        json_number(load.tokens / load.seconds), "first_p50", percentile(&load.first, 0.5), "first_p99",
                        percentile(&load.first, 0.99), "token_p50", percentile(&load.gaps, 0.5), "token_p99",
                        percentile(&load.gaps, 0.99), "token_most", percentile(&load.gaps, 1), NULL);
        cJSON_AddItemToArray(rows, row);
        LocalBytes line = {0};
        cJSON_ArrayForEach(x, row) bytes_print(&line, line.n ? "|%.5g" : "%.5g", x->valuedouble);
        if (!json) print_cells(widths, line.data, false);
    }
    json_print(rows, json);
    return DONE;
}

static void read_numbers(Numbers *to, const char *name, int least, int most) {
    Error e;
    for (const char *at = to->text; at;) {
        char *end;
        const double x = strtod(at, &end);
        if (end == at || !strchr(",", *end) || x != floor(x) || x < least || x > most || to->n == MOST_NUMBERS)
            fail(&e, USAGE, "--%s must be whole numbers like 1,4,16, from %d to %d, at most %d, not '%.40s'", name,
                 least, most, MOST_NUMBERS, to->text),
                die(&e);
        to->value[to->n++] = (int)x;
        at = *end ? end + 1 : NULL;
    }
}

static int run_bench(const char *model) {
    Error e;
    read_numbers(&given.prompts, "prompts", 1, 1 << 24);
    read_numbers(&given.depths, "depths", 0, 1 << 24);
    read_numbers(&given.streams, "streams", 1, MOST_STREAMS);
    read_numbers(&given.clients, "clients", 1, MOST_CLIENTS);
    static Bench b;
    Session *s = &b.model;
    Limits limits = {0};
    b.json = !strcmp(given.format, "json");
    if (!b.json && strcmp(given.format, "md"))
        fail(&e, USAGE, "--output must be md or json, not '%.40s'", given.format), die(&e);
    if (given.fields) load.fields = json_parse(given.fields, strlen(given.fields), "--fields", &e);
    if (given.fields && !cJSON_IsObject(load.fields))
        fail(&e, USAGE, "--fields must be a JSON object like {\"guided_json\": {}}, not '%.40s'", given.fields),
            die(&e);
    setlinebuf(stdout); /* a row appears when it is measured */
    if (given.server) return bench_server(model, b.json);
    for (int i = 0; i < given.streams.n; i++) limits.max_seqs = MAX(limits.max_seqs, given.streams.value[i]);
    if (!session_open(s, model, 0, &e)) die(&e);
    const bool random = !model_entry(s->dir).bytes;
    if (!random && given.encoding)
        fail(&e, USAGE, "%s has weights; --encoding is for a directory that has only config.json", s->dir), die(&e);
    bool ok = random ? random_weights_open(&s->checkpoint, s->dir, given.encoding, &e)
                     : checkpoint_open(&s->checkpoint, s->dir, &e);
    if (ok && random) random_weights_fill();
    if (!ok || !session_load(s, limits, 0, &e)) die(&e);
    cJSON *out =
        json_object("family", json_word(s->checkpoint.family), "random", cJSON_CreateBool(random), "where",
                    json_word(s->where), "weight_bytes", json_number((double)backend->weight_bytes(s->engine.model)),
                    "load_seconds", json_number(s->seconds), "rows", b.rows = cJSON_CreateArray(), NULL);
    if (!b.json) print_cells(figures, "test|depth|streams|tok/s|% of flat|ms|GB a step|GB/s|least-most", true);
    measure_all(&b);
    const int code = cJSON_GetArraySize(b.rows) ? DONE : NO_ROOM;
    json_print(out, b.json);
    return code;
}

static const Option bench_options[] = {
    {'p', "prompts", "N,...", TEXT, &given.prompts.text, .initial = "512,2048",
     .help = "tokens of a prompt; measured until the first token"},
    {'n', "tokens", "N", WHOLE, &given.tokens, 1, 1 << 20, "128", "tokens to generate"},
    {'d', "depths", "N,...", TEXT, &given.depths.text, .initial = "0,8192,32768",
     .help = "tokens of context in front; they are not computed, as their values do not matter"},
    {'b', "streams", "N,...", TEXT, &given.streams.text, .initial = "1,4,16", .help = "streams at once"},
    {'r', "repeats", "N", WHOLE, &given.repeats, 1, MOST_REPEATS, "5", "repeats"},
    {0, "encoding", "NAME", TEXT, &given.encoding,
     .help = "of random weights: fp8, int8, packed4, gptq4, awq4, nvfp4, q8_0, q4_k_m, ... (bf16; gpt-oss's experts "
             "are mxfp4)"},
    {0, "serve", "URL", TEXT, &given.server,
     .help = "measure a server with OpenAI's API instead of this GPU: http://HOST:PORT, without /v1"},
    {0, "fields", "JSON", TEXT, &given.fields,
     .help = "with --serve: more fields of each request, {\"guided_json\": ...}"},
    {'c', "clients", "N,...", TEXT, &given.clients.text, .initial = "1,8,64,256",
     .help = "with --serve: clients at once; each sends r requests, one after another"},
    {'o', "output", "FORMAT", TEXT, &given.format, .initial = "md", .help = "md, a table, or json"},
    {0}};
const Command bench = {"bench",
                       "[MODEL]",
                       "speed of prompts and generation, here or at a server",
                       {bench_options, load_options},
                       run_bench};
