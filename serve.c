/* serve.c: an API like OpenAI's over HTTP (github.com/openai/openai-openapi), on libmicrohttpd. One thread, that of the
 * command, owns the model: it runs the scheduler of model.c and hands tokens out. Each connection has a thread that
 * reads a request, queues it, waits for tokens, makes text of them and writes. One more waits for signals and ends
 * connections that take too long to ask.
 *
 * What threads share is under one lock. A Request belongs to its connection; the model's thread touches its choices
 * until they are `gone`, and they are not freed before. */
#include "host.h"

#include <math.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_BODY = 16 << 20, MOST_HEADERS = 32 << 10, MOST_CHOICES = 128, MOST_STOPS = 16, MOST_TOP = 20 };
enum { READ_SECONDS = 30, WRITE_SECONDS = 60, DRAIN_SECONDS = 30, STALL_SECONDS = 60, BEAT_SECONDS = 5 };
enum { CHECK_MS = 100, STACK = 1 << 20, SPARE_CONNECTIONS = 256, BOUNDS = 12, DIGEST = 32, STATUSES = 9 };
static const char stopped[] = "stop", full[] = "length", failed[] = "error"; /* finish_reason */

/* page.html, as it is */
extern const char page_begin[], page_end[];
__asm__(".pushsection .rodata\n.globl page_begin, page_end\npage_begin: .incbin \"page.html\"\npage_end: .byte 0\n"
        ".popsection\n");

typedef struct Request Request;

typedef struct {
    int id;
    double logprob;
} Chance;

typedef struct { /* a token on its way to its connection */
    int token;
    size_t position;
    bool last, scored;
    double logprob;
    Chance *top; /* (request's top) the likeliest, or NULL */
} Drawn;

typedef struct { /* one of the answers to a request */
    Stream stream;
    Request *request;
    int index;
    /* under the lock */
    Drawn *drawn; /* (drawn_n) to be read by the connection */
    int drawn_n;
    bool added, begun, cancelled, gone; /* begun: it has a token */
    double last;                        /* when that came */
    /* of the connection */
    Reader reader;
    Decoder decoder;
    int message, calls_n; /* which of the reader's is being handed out; how many were calls */
    size_t passed;        /* of that message */
    bool opened;          /* it is begun */
    Bytes text, thoughts; /* content, reasoning_content */
    size_t shown;         /* of the text: handed out, and free of stop texts */
    Bytes calls;          /* tool_calls, where all is handed out at once */
    Bytes scores[4];      /* JSON of logprobs that are not handed out; of a chat only the first */
    size_t tokens, thought;
    const char *finish; /* finish_reason, or NULL */
} Choice;

typedef struct Client { /* a connection */
    LIST_ENTRY(Client) next;
    int fd;
    double since; /* when its request began; 0: it is here */
} Client;

typedef struct {
    const char *method, *path;
    bool open; /* without a key */
    enum MHD_Result (*run)(Request *q);
} Endpoint;

typedef struct { /* numbers of a request */
    double n, tokens, chat_tokens, seed, top_k, temperature, top_p, min_p, penalty, top, frequency, presence;
} Asked;

struct Request {
    TAILQ_ENTRY(Request) next;
    struct MHD_Connection *connection;
    Client *client;
    const Endpoint *endpoint;
    Bytes body;
    cJSON *json, *names; /* names: of functions as the model reads them, and as they were given */
    unsigned status;     /* 0, or the error that answers it */
    const char *code;
    double since, looked, wrote; /* when it was here; when we last saw its client; when we wrote to it */
    bool chat, stream, usage, echo, forever, tools, listed;
    int n, most, top; /* answers to a prompt; tokens; logprobs, -1: none */
    Sampling sampling;
    const char *stop[MOST_STOPS];
    int stops, biases, choices;
    Bias *bias;
    Choice *choice;
    pthread_cond_t wake;
    Bytes out; /* events, and so much of them is written */
    size_t written;
    bool complete; /* the last one is there */
    char id[40];
    long long created;
    Error error; /* under the lock: why its answers ended */
};

typedef struct {
    uint64_t count[BOUNDS + 1];
    double sum;
} Histogram;
static const double bounds[BOUNDS] = {.0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10};
static const unsigned statuses[STATUSES] = {200, 400, 401, 403, 404, 405, 413, 500, 503};

static struct {
    const Options *o;
    Session s;
    Bytes name; /* as JSON */
    unsigned char key[DIGEST];
    bool has_key, loopback;
    Scheduler *scheduler; /* the model's thread's */
    pthread_mutex_t lock;
    pthread_cond_t work; /* for the model's thread */
    /* under the lock */
    TAILQ_HEAD(, Request) requests; /* that have answers in the making, by arrival */
    LIST_HEAD(, Client) clients;
    bool ready, draining;
    int live; /* choices that are not gone */
    Error error;
    double moved; /* when the last step ended */
    SchedulerState state;
    Histogram first, next;
    uint64_t prompt, reused, generated, repairs, nans, status[STATUSES];
} server = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void lock(void) { pthread_mutex_lock(&server.lock); }
static void unlock(void) { pthread_mutex_unlock(&server.lock); }

static void cond_init(pthread_cond_t *cond) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
}

/* Waits a little, with the lock. */
static void wait_on(pthread_cond_t *cond) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    long ns = until.tv_nsec + CHECK_MS * 1000000L;
    until.tv_sec += ns / 1000000000, until.tv_nsec = ns % 1000000000;
    pthread_cond_timedwait(cond, &server.lock, &until);
}

static void observe(Histogram *h, double value) {
    int i = 0;
    while (i < BOUNDS && value > bounds[i]) i++;
    h->count[i]++;
    h->sum += value;
}

/* ---- the model's thread ---- */

/* It is done with a choice. With the lock. */
static void let_go(Choice *c) {
    c->gone = true;
    server.live--;
    pthread_cond_signal(&c->request->wake);
}

static void score(Drawn *d, const float *logits, int vocab, int top) {
    double all = log_sum_exp(logits, vocab);
    int n = 0;
    d->scored = true;
    d->logprob = d->token >= 0 ? (double)logits[d->token] - all : 0;
    d->top = allocate((size_t)top * sizeof *d->top);
    for (int i = 0; i < vocab && top; i++) {
        double p = (double)logits[i] - all;
        if (n == top && !(p > d->top[n - 1].logprob)) continue;
        int at = n < top ? n++ : n - 1;
        for (; at && p > d->top[at - 1].logprob; at--) d->top[at] = d->top[at - 1];
        d->top[at] = (Chance){i, p};
    }
}

/* A token comes from the scheduler. */
static void take_token(Stream *t, size_t position, int token, const float *logits, bool last) {
    Choice *c = t->owner;
    Request *q = c->request;
    double now = seconds();
    Drawn d = {.token = token, .position = position, .last = last};
    if (logits && q->top >= 0) score(&d, logits, server.s.checkpoint.model.vocab, q->top);
    lock();
    c->drawn = reallocate(c->drawn, (size_t)(c->drawn_n + 1) * sizeof d);
    c->drawn[c->drawn_n++] = d;
    if (position > t->prompt) observe(&server.next, now - c->last);
    if (position == t->prompt) {
        observe(&server.first, now - q->since);
        server.prompt += t->prompt;
        server.reused += t->reused;
    }
    server.generated += position >= t->prompt && token >= 0;
    server.nans += token == DREW_NAN;
    c->begun |= position >= t->prompt;
    c->last = now;
    pthread_cond_signal(&q->wake);
    if (last) let_go(c);
    unlock();
}

/* New choices join, cancelled ones leave. Answers to one prompt wait for the first of them, which reads it. With the
 * lock; returns how many the scheduler has. */
static int update_choices(void) {
    Request *q;
    int n = 0;
    TAILQ_FOREACH(q, &server.requests, next)
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        const Choice *leads = c - c->index % q->n;
        if (c->gone) continue;
        if (c->cancelled || server.error.code) {
            if (c->added) scheduler_remove(server.scheduler, &c->stream);
            let_go(c);
        } else if (!c->added && (leads == c || leads->begun || leads->gone)) {
            scheduler_add(server.scheduler, &c->stream);
            c->added = true;
        }
        n += c->added && !c->gone;
    }
    return n;
}

/* Ends every answer with an error. With the lock. */
static void fail_all(const Error *e) {
    Request *q;
    server.error = *e;
    TAILQ_FOREACH(q, &server.requests, next) q->error = *e;
    update_choices();
    for (double since = seconds(); !TAILQ_EMPTY(&server.requests) && seconds() - since < 2;) wait_on(&server.work);
}

/* Runs steps until the server ends; false: it failed. */
static bool run_model(Error *e) {
    double drains = 0;
    bool ok = true;
    lock();
    server.ready = true;
    while (ok && !(server.draining && TAILQ_EMPTY(&server.requests))) {
        int n = update_choices();
        server.moved = seconds();
        if (server.draining && !drains) drains = server.moved;
        if (drains && server.moved - drains > DRAIN_SECONDS) {
            fail_all(&(Error){FAILED, "the server ends"});
            break;
        }
        if (!n && !server.state.outstanding) {
            wait_on(&server.work);
            continue;
        }
        unlock();
        ok = scheduler_step(server.scheduler, e);
        lock();
        scheduler_state(server.scheduler, &server.state);
    }
    if (!ok) fail_all(e);
    unlock();
    return ok;
}

/* ---- responses ---- */

/* Notes the error that answers a request; false, so that a check reads `return bad(q, ...)`. */
static bool __attribute__((format(printf, 4, 5)))
bad(Request *q, unsigned status, const char *code, const char *format, ...) {
    va_list args;
    char text[sizeof q->error.text];
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    q->status = status;
    q->code = code;
    return fail(&q->error, USAGE, "%s", text);
}

static enum MHD_Result queue(Request *q, unsigned status, const char *type, struct MHD_Response *r) {
    lock();
    for (int i = 0; i < STATUSES; i++) server.status[i] += statuses[i] == status;
    unlock();
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "Cache-Control", "no-store");
    if (server.o->cors) MHD_add_response_header(r, "Access-Control-Allow-Origin", server.o->cors);
    if (status == 503) MHD_add_response_header(r, "Retry-After", "1");
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (status >= 400) MHD_add_response_header(r, "Connection", "close");
    enum MHD_Result result = MHD_queue_response(q->connection, status, r);
    MHD_destroy_response(r);
    return result;
}

/* Frees the text. */
static enum MHD_Result respond(Request *q, unsigned status, const char *type, Bytes *text) {
    struct MHD_Response *r = MHD_create_response_from_buffer(text->n, text->data, MHD_RESPMEM_MUST_COPY);
    bytes_free(text);
    return queue(q, status, type, r);
}

static enum MHD_Result respond_json(Request *q, unsigned status, Bytes *text) {
    return respond(q, status, "application/json", text);
}

static void put_error(Bytes *out, const char *text, unsigned status, const char *code) {
    bytes_text(out, "{\"error\":{\"message\":");
    bytes_json(out, text, strlen(text));
    bytes_print(out, ",\"type\":\"%s\",\"param\":null,\"code\":%s%s%s}}",
                status < 500 ? "invalid_request_error" : "server_error", code ? "\"" : "", code ? code : "null",
                code ? "\"" : "");
}

static enum MHD_Result respond_error(Request *q) {
    Bytes out = {0};
    put_error(&out, q->error.text, q->status, q->code);
    return respond_json(q, q->status, &out);
}

/* ---- what a request asks for ---- */

#define ASKED(name) offsetof(Asked, name)
static const struct {
    const char *key;
    size_t field;
    double least, most;
    bool whole;
} numbers[] = {{"n", ASKED(n), 1, 16, true},
               {"max_tokens", ASKED(tokens), 0, INT32_MAX, true},
               {"max_completion_tokens", ASKED(chat_tokens), 1, INT32_MAX, true},
               {"seed", ASKED(seed), -9007199254740991, 9007199254740991, true},
               {"top_k", ASKED(top_k), -1, INT32_MAX, true},
               {"temperature", ASKED(temperature), 0, 100, false},
               {"top_p", ASKED(top_p), 0, 1, false},
               {"min_p", ASKED(min_p), 0, 1, false},
               {"repetition_penalty", ASKED(penalty), 1e-3, 100, false},
               {"frequency_penalty", ASKED(frequency), 0, 0, false}, /* not supported: use repetition_penalty */
               {"presence_penalty", ASKED(presence), 0, 0, false}};
enum { NUMBERS = sizeof numbers / sizeof *numbers };

static bool take_number(Request *q, const char *key, double least, double most, bool whole, double *to) {
    const cJSON *value = json_get(q->json, key);
    double x = cJSON_IsNumber(value) ? value->valuedouble : NAN;
    if (!value) return true;
    if (x >= least && x <= most && (!whole || x == floor(x))) return *to = x, true;
    return bad(q, 400, NULL, "%s must be a %snumber from %.16g to %.16g", key, whole ? "whole " : "", least, most);
}

static bool take_bool(Request *q, const cJSON *object, const char *key, bool *to) {
    const cJSON *value = json_get(object, key);
    if (value) *to = cJSON_IsTrue(value);
    return !value || cJSON_IsBool(value) || bad(q, 400, NULL, "%s must be true or false", key);
}

static bool take_stops(Request *q) {
    const cJSON *stop = json_get(q->json, "stop"), *each = cJSON_IsArray(stop) ? stop->child : stop;
    for (; each; each = cJSON_IsArray(stop) ? each->next : NULL) {
        const char *text = cJSON_GetStringValue(each);
        if (!text || q->stops == MOST_STOPS)
            return bad(q, 400, NULL, "stop must be a text or an array of at most %d texts", MOST_STOPS);
        if (*text) q->stop[q->stops++] = text;
    }
    return true;
}

static bool take_biases(Request *q) {
    const cJSON *all = json_get(q->json, "logit_bias"), *each;
    const int vocab = server.s.checkpoint.model.vocab;
    if (all && !cJSON_IsObject(all)) return bad(q, 400, NULL, "logit_bias must be an object");
    q->bias = allocate((size_t)cJSON_GetArraySize(all) * sizeof *q->bias);
    cJSON_ArrayForEach(each, all) {
        Bias *bias = q->bias + q->biases++;
        bias->add = cJSON_IsNumber(each) ? (float)each->valuedouble : NAN;
        if (!text_whole(each->string, 0, vocab - 1, &bias->id) || !(bias->add >= -100 && bias->add <= 100))
            return bad(q, 400, NULL, "logit_bias has token ids from 0 to %d and numbers from -100 to 100", vocab - 1);
    }
    return true;
}

/* What is not supported is refused, not ignored. */
static bool refuse_unknown(Request *q) {
    static const char *const names[] = {"functions",          "function_call", "audio",        "suffix",
                                        "web_search_options", "guided_choice", "guided_regex", "guided_grammar",
                                        "guided_json",        "best_of"};
    const cJSON *modality;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (json_get(q->json, names[i])) return bad(q, 400, "unsupported", "%s is not supported", names[i]);
    cJSON_ArrayForEach(
        modality,
        json_get(q->json, "modalities")) if (!cJSON_IsString(modality) ||
                                             strcmp(modality->valuestring,
                                                    "text")) return bad(q, 400, "unsupported",
                                                                        "modalities other than text are not supported");
    return true;
}

/* What both kinds of completions have. */
static bool take_parameters(Request *q) {
    Asked a = {.n = 1, .tokens = q->chat ? INT32_MAX : 16, .temperature = 1, .top_p = 1, .penalty = 1, .top = -1};
    const cJSON *model = json_get(q->json, "model");
    uint32_t random = 0;
    bool scored = true;
    Bytes name = {0};
    if (getentropy(&random, sizeof random)) random = (uint32_t)(seconds() * 1e6);
    a.seed = random;
    if (cJSON_IsString(model)) bytes_json(&name, model->valuestring, strlen(model->valuestring));
    if (model && !(name.n && !strcmp(name.data, server.name.data)))
        bad(q, 404, "model_not_found", "there is no model %.100s here, only %s", name.n ? name.data : "",
            server.name.data);
    bytes_free(&name);
    if (q->status) return false;
    for (int i = 0; i < NUMBERS; i++) {
        double *to = (double *)((char *)&a + numbers[i].field);
        if (!take_number(q, numbers[i].key, numbers[i].least, numbers[i].most, numbers[i].whole, to)) return false;
    }
    if (!refuse_unknown(q) || !take_stops(q) || !take_biases(q) || !take_bool(q, q->json, "stream", &q->stream) ||
        !take_bool(q, q->json, "ignore_eos", &q->forever) ||
        !take_bool(q, json_get(q->json, "stream_options"), "include_usage", &q->usage))
        return false;
    if (!q->chat && !take_bool(q, q->json, "echo", &q->echo)) return false;
    if (q->chat && (scored = false, !take_bool(q, q->json, "logprobs", &scored))) return false;
    if (!take_number(q, q->chat ? "top_logprobs" : "logprobs", 0, MOST_TOP, true, &a.top)) return false;
    if (a.top >= 0 && !scored) return bad(q, 400, NULL, "top_logprobs needs logprobs");
    q->sampling = (Sampling){.temperature = a.temperature < 0.01 ? 0 : (float)a.temperature,
                             .top_k = a.top_k < 0 ? 0 : (int)a.top_k,
                             .top_p = a.top_p < 1e-30 ? 1e-30f : (float)a.top_p,
                             .min_p = a.min_p < 1e-30 ? 0 : (float)a.min_p,
                             .penalty = (float)a.penalty,
                             .seed = (uint64_t)(int64_t)a.seed};
    q->n = (int)a.n;
    q->most = (int)(q->chat && a.chat_tokens ? a.chat_tokens : a.tokens);
    q->top = q->chat && scored && a.top < 0 ? 0 : (int)a.top;
    return q->most || !q->chat || bad(q, 400, NULL, "max_tokens must be at least 1");
}

/* ---- functions ---- */

/* Gives the function of {"function": {"name": ...}} a name that every chat format allows. */
static void rename_function(Request *q, const cJSON *holder) {
    cJSON *item = (cJSON *)(uintptr_t)json_get(json_get(holder, "function"), "name");
    const char *given = cJSON_GetStringValue(item);
    Bytes used = {0};
    uint32_t hash = 0;
    bool legal = given && *given && strlen(given) <= 64;
    for (const char *s = given; s && *s; s++) {
        bool fine = (unsigned char)*s > ' ' && (unsigned char)*s < 127 && !strchr("<>=", *s);
        if (used.n < 50) bytes_add(&used, fine ? s : "_", 1);
        legal = legal && (fine || (unsigned char)*s > 127);
        hash = (hash ^ (unsigned char)*s) * 16777619u;
    }
    if (!legal && given && *given) {
        bytes_print(&used, "_%08x", hash); /* the same name becomes the same, and no two are alike */
        if (!q->names) q->names = cJSON_CreateObject();
        if (!json_get(q->names, used.data)) cJSON_AddStringToObject(q->names, used.data, given);
        cJSON_SetValuestring(item, used.data);
    }
    bytes_free(&used);
}

/* What tool_choice says: *force, and a call of *name, or of any function. */
static bool take_tools(Request *q, bool *force, const char **name) {
    const cJSON *tools = json_get(q->json, "tools"), *choice = json_get(q->json, "tool_choice"), *each, *call;
    const char *word = cJSON_GetStringValue(choice);
    bool none = word && !strcmp(word, "none"), found = false;
    int n = cJSON_GetArraySize(tools);
    cJSON_ArrayForEach(each, tools) rename_function(q, each);
    cJSON_ArrayForEach(each, json_get(q->json, "messages")) cJSON_ArrayForEach(call, json_get(each, "tool_calls"))
        rename_function(q, call);
    if (choice && !word) rename_function(q, choice);
    *name = word ? NULL : json_string(json_get(choice, "function"), "name");
    *force = (word && !strcmp(word, "required")) || *name;
    if (choice && !*force && !none && !(word && !strcmp(word, "auto")))
        return bad(q, 400, NULL, "tool_choice must be auto, none, required or a function");
    cJSON_ArrayForEach(each, tools) {
        const char *has = json_string(json_get(each, "function"), "name");
        if (*force && !*name && n == 1) *name = has;
        found |= has && (!*name || !strcmp(has, *name));
    }
    if (*force && !found) return bad(q, 400, NULL, "tool_choice asks for a function that tools do not have");
    if (none) cJSON_DeleteItemFromObjectCaseSensitive(q->json, "tools");
    q->tools = n && !none;
    return true;
}

/* ---- making choices ---- */

/* Adds the request's n answers to a prompt. */
static bool add_choices(Request *q, const Ids *prompt) {
    const size_t context = (size_t)server.s.engine.context;
    if (!prompt->n) return bad(q, 400, NULL, "the prompt is empty");
    if (prompt->n >= context)
        return bad(q, 400, "context_length_exceeded", "the prompt has %zu tokens, the context %zu: shorten it",
                   prompt->n, context);
    for (int i = 0; i < q->n; i++) {
        Choice *c = q->choice + q->choices;
        Stream *t = &c->stream;
        *c = (Choice){.request = q, .index = q->choices++, .decoder.begun = !q->echo};
        ids_append(&t->tokens, prompt->data, prompt->n);
        t->prompt = prompt->n;
        t->most = prompt->n + (q->most ? (size_t)q->most : 1);
        if (t->most > context) t->most = context;
        t->sampling = q->sampling;
        t->sampling.seed += (uint64_t)c->index;
        t->bias = q->biases ? q->bias : NULL, t->biases = q->biases;
        t->want = q->top < 0 ? WANT_TOKEN : q->echo ? WANT_ALL_LOGITS : WANT_LOGITS;
        t->stop = q->forever ? NULL : &server.s.checkpoint.stop;
        t->take = take_token;
        t->owner = c;
    }
    return true;
}

/* A conversation's prompt, and how its answer begins. */
static bool make_chat(Request *q) {
    bool force;
    const char *name;
    Conversation talk;
    Ids ids = {0};
    Bytes ignored = {0};
    Error e;
    if (!server.s.has_chat) return bad(q, 400, "unsupported", "%s", server.s.no_chat.text);
    if (!take_tools(q, &force, &name)) return false;
    conversation_init(&talk);
    bool ok = conversation_parse(&talk, q->json, &e) && chat_render(&server.s.chat, &talk, true, &ids, &e);
    size_t prompt = ids.n;
    ok = ok && (!force || chat_force(&server.s.chat, talk.effort, name, &ids, &e));
    q->choice = allocate_zero((size_t)q->n, sizeof *q->choice);
    ok = ok ? add_choices(q, &ids) : bad(q, 400, NULL, "%s", e.text);
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        reader_init(&c->reader, &server.s.chat, talk.effort);
        for (size_t i = prompt; i < ids.n; i++) reader_push(&c->reader, ids.data[i], &ignored);
    }
    conversation_free(&talk);
    ids_free(&ids);
    bytes_free(&ignored);
    return ok;
}

/* A prompt in JSON: a text, or token ids. */
static bool take_prompt(Request *q, const cJSON *prompt, Ids *ids) {
    const cJSON *each;
    const char *text = cJSON_GetStringValue(prompt);
    const int vocab = server.s.checkpoint.model.vocab;
    int64_t id;
    Error e;
    if (text)
        return tokenizer_encode(server.s.tokenizer, text, strlen(text), WITH_TEMPLATE, ids, &e) ||
               bad(q, 400, NULL, "prompt: %s", e.text);
    if (!cJSON_IsArray(prompt)) return bad(q, 400, NULL, "the prompt must be a text, token ids, or an array of those");
    cJSON_ArrayForEach(each, prompt) {
        if (!json_whole(each, 0, vocab - 1, &id))
            return bad(q, 400, NULL, "token ids are whole numbers from 0 to %d", vocab - 1);
        ids_add(ids, (int)id);
    }
    return true;
}

static bool make_completion(Request *q) {
    const cJSON *prompt = json_get(q->json, "prompt"), *first = cJSON_IsArray(prompt) ? prompt->child : NULL;
    bool many = cJSON_IsString(first) || cJSON_IsArray(first), ok = true;
    int n = many ? cJSON_GetArraySize(prompt) : 1;
    if (n > MOST_CHOICES / q->n) return bad(q, 400, NULL, "at most %d answers can be asked for at once", MOST_CHOICES);
    q->choice = allocate_zero((size_t)(n * q->n), sizeof *q->choice);
    for (const cJSON *each = many ? first : prompt; n-- && ok; each = many ? each->next : NULL) {
        Ids ids = {0};
        ok = take_prompt(q, each, &ids) && add_choices(q, &ids);
        ids_free(&ids);
    }
    return ok;
}

/* Puts the choices in the queue. */
static bool enqueue(Request *q) {
    lock();
    if (server.error.code)
        bad(q, 503, NULL, "the model failed: %s", server.error.text);
    else if (server.draining)
        bad(q, 503, NULL, "the server ends");
    else if (server.live >= server.o->slots + server.o->queue)
        bad(q, 503, "overloaded", "%d answers are being written or waited for: try again", server.live);
    if (!q->status) {
        TAILQ_INSERT_TAIL(&server.requests, q, next);
        server.live += q->choices;
        q->listed = true;
        pthread_cond_signal(&server.work);
    }
    unlock();
    return !q->status;
}

/* ---- answers as JSON ---- */

static void put_usage(const Request *q, Bytes *out) {
    size_t prompt = 0, reused = 0, tokens = 0, thought = 0;
    for (const Choice *c = q->choice; c < q->choice + q->choices; c++) {
        if (c->index % q->n == 0) prompt += c->stream.prompt, reused += c->stream.reused;
        tokens += c->tokens, thought += c->thought;
    }
    bytes_print(out,
                "\"usage\":{\"prompt_tokens\":%zu,\"completion_tokens\":%zu,\"total_tokens\":%zu,"
                "\"prompt_tokens_details\":{\"cached_tokens\":%zu},"
                "\"completion_tokens_details\":{\"reasoning_tokens\":%zu}}",
                prompt, tokens, prompt + tokens, reused, thought);
}

static void put_begin(const Request *q, Bytes *out) {
    bytes_print(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":%s,\"choices\":[", q->id,
                !q->chat    ? "text_completion"
                : q->stream ? "chat.completion.chunk"
                            : "chat.completion",
                q->created, server.name.data);
}

/* An answer or a part of it, with the logprobs that wait. */
static void put_choice(Choice *c, const char *key, const Bytes *content, Bytes *out) {
    bool chat = c->request->chat;
    bytes_print(out, "%s{\"index\":%d,\"%s\":%s,\"logprobs\":", out->data[out->n - 1] == '[' ? "" : ",", c->index, key,
                content->data);
    if (!c->scores->n)
        bytes_text(out, "null");
    else if (chat)
        bytes_print(out, "{\"content\":[%s]}", c->scores->data + 1);
    else
        bytes_print(out, "{\"tokens\":[%s],\"token_logprobs\":[%s],\"top_logprobs\":[%s],\"text_offset\":[%s]}",
                    c->scores[0].data + 1, c->scores[1].data + 1, c->scores[2].data + 1, c->scores[3].data + 1);
    for (int i = 0; i < 4; i++) c->scores[i].n = 0;
    bytes_print(out, c->finish ? ",\"finish_reason\":\"%s\"}" : ",\"finish_reason\":null}", c->finish);
}

/* An event with what is new of a choice: the delta of a chat, or text. */
static void add_event(Choice *c, const Bytes *content) {
    Request *q = c->request;
    bytes_text(&q->out, "data: ");
    put_begin(q, &q->out);
    put_choice(c, q->chat ? "delta" : "text", content, &q->out);
    bytes_text(&q->out, "]}\n\n");
}

static void add_text(Choice *c, const char *key, const char *text, size_t n) {
    Bytes content = {0};
    if (c->request->chat) bytes_print(&content, "{\"%s\":", key);
    bytes_json(&content, text, n);
    if (c->request->chat) bytes_text(&content, "}");
    add_event(c, &content);
    bytes_free(&content);
}

/* A token as the key or value that OpenAI's logprobs have for it; *raw: its bytes. */
static void put_token(int token, Bytes *out, Bytes *raw) {
    Decoder d = {.begun = true};
    Bytes text = {0}, copy = {0};
    tokenizer_bytes(server.s.tokenizer, &d, token, raw);
    bytes_add(&copy, raw->data, raw->n);
    utf8_stream(&copy, &text, true);
    bytes_json(out, text.n ? text.data : "", text.n);
    bytes_free(&text), bytes_free(&copy), bytes_free(&d.held);
}

static void put_chance(int token, double logprob, Bytes *out) {
    Bytes raw = {0};
    bytes_text(out, "{\"token\":");
    put_token(token, out, &raw);
    bytes_print(out, ",\"logprob\":%.17g,\"bytes\":[", fmax(logprob, -9999)); /* JSON has no infinity */
    for (size_t i = 0; i < raw.n; i++) bytes_print(out, i ? ",%d" : "%d", (unsigned char)raw.data[i]);
    bytes_text(out, "]");
    bytes_free(&raw);
}

/* Adds a token's logprobs to those that wait; `offset` of its text is that in the answer's. */
static void add_score(Choice *c, const Drawn *d, size_t offset) {
    const int top = d->scored ? c->request->top : 0;
    Bytes *out = c->scores, raw = {0};
    for (int i = 0; i < 4; i++) bytes_text(out + i, ",");
    if (c->request->chat) {
        put_chance(d->token, d->logprob, out);
        bytes_text(out, ",\"top_logprobs\":[");
        for (int i = 0; i < top; i++) {
            if (i) bytes_text(out, ",");
            put_chance(d->top[i].id, d->top[i].logprob, out);
            bytes_text(out, "}");
        }
        bytes_text(out, "]}");
        return;
    }
    put_token(d->token, out, &raw);
    bytes_print(out + 1, d->scored ? "%.17g" : "null", fmax(d->logprob, -9999));
    bytes_text(out + 2, d->scored ? "{" : "null");
    for (int i = 0; i < top; i++) {
        if (i) bytes_text(out + 2, ",");
        put_token(d->top[i].id, out + 2, &raw);
        bytes_print(out + 2, ":%.17g", fmax(d->top[i].logprob, -9999));
    }
    bytes_text(out + 2, d->scored ? "}" : "");
    bytes_print(out + 3, "%zu", offset);
    bytes_free(&raw);
}

/* ---- from tokens to answers ---- */

/* Hands out what of the text is free of stop texts; an end that may be the beginning of one waits. */
static void pass_text(Choice *c, bool last) {
    const Request *q = c->request;
    const char *text = c->text.data ? c->text.data : "";
    size_t end = c->text.n;
    for (int i = 0; i < q->stops; i++) {
        const char *hit = memmem(text + c->shown, end - c->shown, q->stop[i], strlen(q->stop[i]));
        if (hit) c->text.n = end = (size_t)(hit - text), c->finish = stopped;
    }
    for (int i = 0; i < q->stops && !last && !c->finish; i++)
        for (size_t k = strlen(q->stop[i]) - 1; k; k--)
            if (k <= c->text.n - c->shown && !memcmp(text + c->text.n - k, q->stop[i], k) && c->text.n - k < end)
                end = c->text.n - k;
    if (q->stream && (end > c->shown || c->scores->n)) add_text(c, "content", text + c->shown, end - c->shown);
    c->shown = end;
}

/* Hands out what is new of a call, or, where all is handed out at once, a complete one. */
static void pass_call(Choice *c, const Message *m, bool complete) {
    static const char prefix[] = "functions.";
    const Request *q = c->request;
    Bytes call = {0};
    if (!q->stream && !complete) return;
    if (q->stream) bytes_print(&call, "{\"tool_calls\":[{\"index\":%d,", c->calls_n - c->opened);
    if (!q->stream) bytes_text(&call, c->calls.n ? ",{" : "{");
    if (!c->opened) {
        const char *used = m->recipient + (strncmp(m->recipient, prefix, strlen(prefix)) ? 0 : strlen(prefix));
        const char *given = json_string(q->names, used);
        bytes_print(&call, "\"id\":\"call_%s_%d_%d\",\"type\":\"function\",", q->id + strcspn(q->id, "-") + 1, c->index,
                    c->calls_n++);
        bytes_text(&call, "\"function\":{\"name\":");
        bytes_json(&call, given ? given : used, strlen(given ? given : used));
        bytes_text(&call, ",");
    } else {
        bytes_text(&call, "\"function\":{");
    }
    bytes_text(&call, "\"arguments\":");
    bytes_json(&call, m->content.n ? m->content.data + c->passed : "", m->content.n - c->passed);
    bytes_text(&call, q->stream ? "}}]}" : "}}");
    if (q->stream) add_event(c, &call);
    if (!q->stream) bytes_add(&c->calls, call.data, call.n);
    c->opened = true;
    c->passed = m->content.n;
    bytes_free(&call);
}

/* Hands out what the reader has that is new. */
static void pass_messages(Choice *c) {
    const Request *q = c->request;
    const Reader *r = &c->reader;
    for (bool complete = true; complete && !c->finish;) {
        complete = c->message < r->messages;
        const Message *m = complete ? r->message + c->message : &r->now;
        const char *text = m->content.n ? m->content.data + c->passed : "";
        size_t n = m->content.n - c->passed;
        Part part = message_part(m);
        if (part == CALL && q->tools) {
            if ((complete || r->in_content) && (n || !c->opened)) pass_call(c, m, complete);
        } else if (n) {
            if (part == REASONING && q->stream) add_text(c, "reasoning_content", text, n);
            if (part == REASONING && !q->stream) bytes_add(&c->thoughts, text, n);
            if (part != REASONING && c->text.n && !c->opened) bytes_text(&c->text, "\n\n"); /* behind a preamble */
            if (part != REASONING) bytes_add(&c->text, text, n), pass_text(c, false);
            c->opened = true;
            c->passed = m->content.n;
        }
        if (complete) c->message++, c->passed = 0, c->opened = false;
    }
}

/* The answer has ended: what waits is handed out, and why it ended. */
static void finish_choice(Choice *c, const char *why) {
    Request *q = c->request;
    Bytes nothing = {0};
    if (q->chat && !c->finish) reader_end(&c->reader, &nothing), pass_messages(c);
    if (!q->chat && !c->finish) tokenizer_flush(&c->decoder, &c->text);
    if (!c->finish) pass_text(c, true);
    if (!c->finish) c->finish = why == stopped && c->calls_n ? "tool_calls" : why;
    nothing.n = 0;
    bytes_text(&nothing, q->chat ? "{}" : "\"\"");
    if (q->stream) add_event(c, &nothing);
    bytes_free(&nothing);
    lock();
    server.repairs += (uint64_t)c->reader.repairs;
    c->cancelled = true;
    pthread_cond_signal(&server.work);
    unlock();
}

/* A token of the answer to a chat. True: it ends there. */
static bool read_chat(Choice *c, const Drawn *d) {
    Bytes ignored = {0};
    Read read = reader_push(&c->reader, d->token, &ignored);
    bool header = server.s.chat.answer.n && !c->reader.in_content; /* harmony's */
    bool content = !header && read.part != REASONING && read.part != CALL;
    bytes_free(&ignored);
    c->thought += read.part == REASONING;
    if (d->scored && content && !tokenizer_is_control(server.s.tokenizer, d->token)) add_score(c, d, 0);
    if (read.stop && !c->request->forever) return true;
    pass_messages(c);
    return false;
}

/* A token of a text, or (echo) of its prompt. */
static bool read_text(Choice *c, const Drawn *d) {
    const Ids *stops = c->stream.stop;
    bool prompt = d->position < c->stream.prompt;
    for (size_t i = 0; stops && !prompt && i < stops->n; i++)
        if (d->token == stops->data[i]) return true;
    if (d->scored || (prompt && c->request->top >= 0)) add_score(c, d, c->text.n);
    tokenizer_decode(server.s.tokenizer, &c->decoder, d->token, &c->text);
    if (prompt && !c->request->stream) c->shown = c->text.n; /* no stop text is looked for in it */
    if (!prompt) pass_text(c, false);
    return false;
}

static void read_token(Choice *c, const Drawn *d) {
    Request *q = c->request;
    bool prompt = d->position < c->stream.prompt;
    if (c->finish) return;
    if (d->token < 0) {
        lock();
        fail(&q->error, FAILED, "the logits hold a NaN: the weights or config.json are damaged");
        unlock();
        c->finish = failed;
        return;
    }
    if (!prompt && !q->most) return finish_choice(c, full);
    c->tokens += !prompt;
    bool stop = q->chat ? read_chat(c, d) : read_text(c, d);
    if (c->finish || stop || d->last) finish_choice(c, stop ? stopped : full);
}

static void drawn_free(Drawn *drawn, int n) {
    for (int i = 0; i < n; i++) free(drawn[i].top);
    free(drawn);
}

/* Makes text of the tokens that are there; true: every answer is complete. */
static bool read_choices(Request *q) {
    bool done = true;
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        lock();
        Drawn *drawn = c->drawn;
        int n = c->drawn_n;
        bool gone = c->gone;
        c->drawn = NULL, c->drawn_n = 0;
        unlock();
        for (int i = 0; i < n; i++) read_token(c, drawn + i);
        drawn_free(drawn, n);
        if (gone && !c->finish) c->finish = failed;
        done = done && c->finish;
    }
    return done;
}

/* Has the client closed its side? Looked at a few times a second. */
static bool has_departed(Request *q) {
    struct pollfd p = {.fd = q->client->fd, .events = POLLRDHUP};
    double now = seconds();
    if (now - q->looked < CHECK_MS / 1e3) return false;
    q->looked = now;
    return poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR);
}

/* Waits for tokens; false: nobody is there to read them. A stream that waits long says that it lives. */
static bool wait_for_tokens(Request *q) {
    bool there = false, departed = false, beat = false;
    MHD_set_connection_option(q->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0); /* it waits for us */
    while (!there && !departed && !beat) {
        lock();
        for (const Choice *c = q->choice; c < q->choice + q->choices; c++)
            there |= !c->finish && (c->drawn_n || c->gone);
        if (!there) wait_on(&q->wake);
        unlock();
        departed = has_departed(q);
        beat = !there && q->stream && seconds() - q->wrote > BEAT_SECONDS;
    }
    if (beat) bytes_text(&q->out, ": the answer is being computed\n\n");
    MHD_set_connection_option(q->connection, MHD_CONNECTION_OPTION_TIMEOUT, WRITE_SECONDS);
    return !departed;
}

/* Why the answers ended, if that is an error. */
static bool has_failed(Request *q) {
    lock();
    bool failure = q->error.code;
    if (failure) q->status = 500;
    unlock();
    return failure;
}

/* The events behind the last choice's. */
static void end_events(Request *q) {
    q->complete = true;
    if (has_failed(q)) {
        bytes_text(&q->out, "data: ");
        put_error(&q->out, q->error.text, 500, NULL);
        return bytes_text(&q->out, "\n\n");
    }
    if (q->usage) {
        bytes_text(&q->out, "data: ");
        put_begin(q, &q->out);
        bytes_text(&q->out, "],");
        put_usage(q, &q->out);
        bytes_text(&q->out, "}\n\n");
    }
    bytes_text(&q->out, "data: [DONE]\n\n");
}

static ssize_t write_events(void *data, uint64_t position, char *to, size_t room) {
    Request *q = data;
    (void)position;
    while (q->written == q->out.n) {
        q->written = q->out.n = 0;
        if (q->complete) return MHD_CONTENT_READER_END_OF_STREAM;
        if (!wait_for_tokens(q)) return MHD_CONTENT_READER_END_WITH_ERROR;
        if (read_choices(q)) end_events(q);
    }
    size_t n = q->out.n - q->written < room ? q->out.n - q->written : room;
    memcpy(to, q->out.data + q->written, n);
    q->written += n;
    q->wrote = seconds();
    return (ssize_t)n;
}

static void put_whole(Request *q, Bytes *out) {
    put_begin(q, out);
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        Bytes content = {0};
        if (q->chat) bytes_text(&content, "{\"role\":\"assistant\",\"content\":");
        if (c->calls.n && !c->text.n)
            bytes_text(&content, "null");
        else
            bytes_json(&content, c->text.n ? c->text.data : "", c->text.n);
        if (c->thoughts.n) {
            bytes_text(&content, ",\"reasoning_content\":");
            bytes_json(&content, c->thoughts.data, c->thoughts.n);
        }
        if (c->calls.n) bytes_print(&content, ",\"tool_calls\":[%s]", c->calls.data);
        if (q->chat) bytes_text(&content, "}");
        put_choice(c, q->chat ? "message" : "text", &content, out);
        bytes_free(&content);
    }
    bytes_text(out, "],");
    put_usage(q, out);
    bytes_text(out, "}");
}

/* What an answer has before its first token. */
static void begin_answers(Request *q) {
    unsigned random[2];
    if (getentropy(random, sizeof random)) random[0] = random[1] = (unsigned)(seconds() * 1e6);
    snprintf(q->id, sizeof q->id, "%s-%08x%08x", q->chat ? "chatcmpl" : "cmpl", random[0], random[1]);
    q->created = time(NULL);
    q->wrote = seconds();
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        size_t ready = !q->echo ? 0 : q->top < 0 ? c->stream.prompt : 1; /* the scheduler scores from the second on */
        for (size_t i = 0; i < ready; i++) read_text(c, &(Drawn){.token = c->stream.tokens.data[i]});
        if (q->chat && q->stream) add_text(c, "role", "assistant", 9);
    }
}

static enum MHD_Result answer(Request *q) {
    Bytes out = {0};
    if (!take_parameters(q) || !(q->chat ? make_chat(q) : make_completion(q)) || !enqueue(q)) return respond_error(q);
    begin_answers(q);
    if (q->stream)
        return queue(q, 200, "text/event-stream",
                     MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, write_events, q, NULL));
    while (!read_choices(q))
        if (!wait_for_tokens(q)) return MHD_NO;
    if (has_failed(q)) return respond_error(q);
    put_whole(q, &out);
    return respond_json(q, 200, &out);
}

static enum MHD_Result completions(Request *q) { return answer(q); }
static enum MHD_Result chat_completions(Request *q) { return q->chat = true, answer(q); }

/* ---- what else can be asked ---- */

static enum MHD_Result models(Request *q) {
    Bytes out = {0};
    bytes_print(&out,
                "{\"object\":\"list\",\"data\":[{\"id\":%s,\"object\":\"model\",\"created\":0,\"owned_by\":\"infer\","
                "\"max_model_len\":%d}]}",
                server.name.data, server.s.engine.context);
    return respond_json(q, 200, &out);
}

/* Healthy means that tokens move. */
static enum MHD_Result health(Request *q) {
    Bytes out = {0};
    lock();
    bool stalled = server.ready && seconds() - server.moved > STALL_SECONDS;
    bytes_print(&out, "{\"status\":\"%s\"}",
                server.error.code ? "failed"
                : server.draining ? "ending"
                : !server.ready   ? "loading"
                : stalled         ? "stalled"
                                  : "ok");
    unlock();
    return respond_json(q, strstr(out.data, "ok") ? 200 : 503, &out);
}

static enum MHD_Result page(Request *q) {
    Bytes out = {0};
    bytes_add(&out, page_begin, (size_t)(page_end - page_begin));
    return respond(q, 200, "text/html; charset=utf-8", &out);
}

static enum MHD_Result tokenize(Request *q) {
    const char *text = json_string(q->json, "prompt");
    Ids ids = {0};
    Bytes out = {0};
    Error e;
    fail(&e, USAGE, "prompt must be a text");
    if (!text || !tokenizer_encode(server.s.tokenizer, text, strlen(text), 0, &ids, &e)) {
        bad(q, 400, NULL, "%s", e.text);
        return respond_error(q);
    }
    bytes_print(&out, "{\"count\":%zu,\"tokens\":[", ids.n);
    for (size_t i = 0; i < ids.n; i++) bytes_print(&out, i ? ",%d" : "%d", ids.data[i]);
    bytes_text(&out, "]}");
    ids_free(&ids);
    return respond_json(q, 200, &out);
}

static enum MHD_Result detokenize(Request *q) {
    const cJSON *tokens = json_get(q->json, "tokens");
    Ids ids = {0};
    Bytes text = {0}, out = {0};
    Decoder d = {0};
    if (!cJSON_IsArray(tokens)) bad(q, 400, NULL, "tokens must be an array of token ids");
    if (!q->status) take_prompt(q, tokens, &ids);
    for (size_t i = 0; i < ids.n; i++) tokenizer_decode(server.s.tokenizer, &d, ids.data[i], &text);
    tokenizer_flush(&d, &text);
    bytes_text(&out, "{\"prompt\":");
    bytes_json(&out, text.n ? text.data : "", text.n);
    bytes_text(&out, "}");
    ids_free(&ids);
    bytes_free(&text);
    if (!q->status) return respond_json(q, 200, &out);
    bytes_free(&out);
    return respond_error(q);
}

static void put_metric(Bytes *out, const char *name, const char *type, uint64_t value) {
    bytes_print(out, "# TYPE infer_%s %s\ninfer_%s %llu\n", name, type, name, (unsigned long long)value);
}

static void put_histogram(Bytes *out, const char *name, const Histogram *h) {
    unsigned long long sum = 0;
    bytes_print(out, "# TYPE infer_%s_seconds histogram\n", name);
    for (int i = 0; i < BOUNDS; i++)
        bytes_print(out, "infer_%s_seconds_bucket{le=\"%g\"} %llu\n", name, bounds[i], sum += h->count[i]);
    sum += h->count[BOUNDS];
    bytes_print(out,
                "infer_%s_seconds_bucket{le=\"+Inf\"} %llu\ninfer_%s_seconds_sum %.6f\ninfer_%s_seconds_count %llu\n",
                name, sum, name, h->sum, name, sum);
}

static enum MHD_Result metrics(Request *q) {
    Bytes out = {0};
    lock();
    const SchedulerState *s = &server.state;
    bytes_text(&out, "# TYPE infer_requests_total counter\n");
    for (int i = 0; i < STATUSES; i++)
        bytes_print(&out, "infer_requests_total{status=\"%u\"} %llu\n", statuses[i],
                    (unsigned long long)server.status[i]);
    put_metric(&out, "prompt_tokens_total", "counter", server.prompt);
    put_metric(&out, "cached_tokens_total", "counter", server.reused);
    put_metric(&out, "generated_tokens_total", "counter", server.generated);
    put_metric(&out, "repairs_total", "counter", server.repairs);
    put_metric(&out, "nan_total", "counter", server.nans);
    put_metric(&out, "preemptions_total", "counter", s->preempted);
    put_metric(&out, "steps_total", "counter", s->steps);
    put_metric(&out, "answers_running", "gauge", (uint64_t)s->running);
    put_metric(&out, "answers_waiting", "gauge", (uint64_t)(server.live > s->running ? server.live - s->running : 0));
    put_metric(&out, "cache_pages_used", "gauge", (uint64_t)(s->pages - s->idle));
    put_metric(&out, "cache_pages_kept", "gauge", (uint64_t)s->kept);
    put_metric(&out, "cache_pages", "gauge", (uint64_t)s->pages);
    put_histogram(&out, "time_to_first_token", &server.first);
    put_histogram(&out, "time_per_token", &server.next);
    unlock();
    return respond(q, 200, "text/plain; version=0.0.4", &out);
}

/* ---- HTTP ---- */

static const Endpoint endpoints[] = {
    {"POST", "/v1/chat/completions", false, chat_completions},
    {"POST", "/v1/completions", false, completions},
    {"GET", "/v1/models", false, models},
    {"GET", "/metrics", false, metrics},
    {"POST", "/tokenize", false, tokenize},
    {"POST", "/detokenize", false, detokenize},
    {"GET", "/health", true, health},
    {"GET", "/", true, page},
};
enum { ENDPOINTS = sizeof endpoints / sizeof *endpoints };

typedef struct {
    int hosts, lengths;
} Framing;

static enum MHD_Result count_header(void *data, enum MHD_ValueKind kind, const char *key, const char *value) {
    Framing *f = data;
    (void)kind, (void)value;
    f->hosts += !strcasecmp(key, "Host");
    f->lengths += !strcasecmp(key, "Content-Length") || !strcasecmp(key, "Transfer-Encoding");
    return MHD_YES;
}

static const char *header(const Request *q, const char *name) {
    return MHD_lookup_connection_value(q->connection, MHD_HEADER_KIND, name);
}

static void digest(const char *text, unsigned char out[DIGEST]) {
    EVP_Digest(text, strlen(text), out, NULL, EVP_sha256(), NULL);
}

/* Compares digests, so that no time tells how much of a key is right. */
static bool has_key(const Request *q) {
    const char *given = header(q, "Authorization");
    unsigned char of[DIGEST];
    if (!server.has_key) return true;
    if (!given || strncasecmp(given, "Bearer ", 7)) return false;
    digest(given + 7, of);
    return !CRYPTO_memcmp(of, server.key, DIGEST);
}

/* On a loopback address a page of another site must not reach us by a name of its own (DNS rebinding). */
static bool known_host(const char *host) {
    const char *const names[] = {"localhost", "127.0.0.1", "[::1]", server.o->host};
    size_t n = host ? strlen(host) : 0, port = n;
    while (port && strchr("0123456789", host[port - 1])) port--;
    if (port && host[port - 1] == ':') n = port - 1;
    bool known = !server.loopback;
    for (int i = 0; i < 4; i++) known |= n == strlen(names[i]) && !strncasecmp(host, names[i], n);
    return known;
}

/* A browser says from which page a request comes: ours, or one that --cors allows. */
static bool known_origin(const Request *q) {
    const char *origin = header(q, "Origin"), *host = header(q, "Host"), *cors = server.o->cors;
    if (!origin || (cors && (!strcmp(cors, "*") || !strcasecmp(cors, origin)))) return true;
    const char *name = strstr(origin, "://");
    return name && host && !strcasecmp(name + 3, host);
}

/* What libmicrohttpd does not refuse itself: a request that could be read in two ways, or that may not be made. */
static void check_request(Request *q, const char *url, const char *method, const char *version) {
    Framing f = {0};
    bool path = false;
    MHD_get_connection_values(q->connection, MHD_HEADER_KIND, count_header, &f);
    for (int i = 0; i < ENDPOINTS; i++) {
        const char *has = endpoints[i].method;
        if (strcmp(endpoints[i].path, url)) continue;
        path = true;
        if (!strcmp(has, method) || (*has == 'G' && !strcmp(method, "HEAD"))) q->endpoint = endpoints + i;
    }
    lock();
    bool ready = server.ready;
    unlock();
    if (f.lengths > 1)
        bad(q, 400, NULL, "one Content-Length or one Transfer-Encoding at most");
    else if (f.hosts > 1 || (f.hosts < 1 && !strcmp(version, "HTTP/1.1")))
        bad(q, 400, NULL, "one Host is needed");
    else if (!known_host(header(q, "Host")) || !known_origin(q))
        bad(q, 403, NULL, "this page or host may not ask here; see infer serve --help, --cors");
    else if (server.o->cors && !strcmp(method, "OPTIONS"))
        q->status = 200;
    else if (!path)
        bad(q, 404, "not_found", "there is no %.100s here", url);
    else if (!q->endpoint)
        bad(q, 405, NULL, "%.20s is not how %.100s is asked", method, url);
    else if (!q->endpoint->open && !has_key(q))
        bad(q, 401, "invalid_api_key", "the key is missing or wrong: send it as Authorization: Bearer KEY");
    else if (!q->endpoint->open && !ready)
        bad(q, 503, NULL, "the model is being loaded");
}

/* The whole request is here. */
static enum MHD_Result run(Request *q) {
    Error e;
    if (q->status == 200) { /* a browser asks whether it may */
        struct MHD_Response *r = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
        MHD_add_response_header(r, "Access-Control-Allow-Headers", "Authorization, Content-Type");
        return queue(q, 200, "text/plain", r);
    }
    if (!q->status && *q->endpoint->method == 'P') {
        q->json = json_parse(q->body.n ? q->body.data : "", q->body.n, "the body", &e);
        if (q->json && !cJSON_IsObject(q->json)) fail(&e, USAGE, "the body is not a JSON object");
        if (!cJSON_IsObject(q->json)) bad(q, 400, NULL, "%s", e.text);
        bytes_free(&q->body);
    }
    return q->status ? respond_error(q) : q->endpoint->run(q);
}

/* libmicrohttpd calls it when the headers are here, for each piece of the body, and at its end. */
static enum MHD_Result handle(void *data, struct MHD_Connection *connection, const char *url, const char *method,
                              const char *version, const char *upload, size_t *size, void **state) {
    Request *q = *state;
    (void)data;
    if (!q) {
        *state = q = allocate_zero(1, sizeof *q);
        q->connection = connection;
        q->client = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
        cond_init(&q->wake);
        check_request(q, url, method, version);
        return MHD_YES;
    }
    if (*size) { /* what will be refused is read and forgotten, so that the client gets to the answer */
        if (q->body.n + *size > MOST_BODY && !q->status)
            bad(q, 413, NULL, "the body has more than %d bytes", MOST_BODY);
        if (q->status) bytes_free(&q->body);
        if (!q->status) bytes_add(&q->body, upload, *size);
        *size = 0;
        return MHD_YES;
    }
    lock();
    q->client->since = 0;
    unlock();
    q->since = q->looked = seconds();
    return run(q);
}

/* A request has ended, one way or another. */
static void request_free(void *data, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode why) {
    Request *q = *state;
    (void)data, (void)connection, (void)why;
    if (!q) return;
    lock();
    for (Choice *c = q->choice; q->listed && c < q->choice + q->choices; c++) {
        c->cancelled = true;
        pthread_cond_signal(&server.work);
        while (!c->gone) pthread_cond_wait(&q->wake, &server.lock);
    }
    if (q->listed) TAILQ_REMOVE(&server.requests, q, next);
    pthread_cond_signal(&server.work);
    q->client->since = seconds();
    unlock();
    for (Choice *c = q->choice; c && c < q->choice + q->choices; c++) {
        Bytes *owned[] = {&c->text,  &c->thoughts,  &c->calls,     &c->decoder.held,
                          c->scores, c->scores + 1, c->scores + 2, c->scores + 3};
        for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) bytes_free(owned[i]);
        drawn_free(c->drawn, c->drawn_n);
        ids_free(&c->stream.tokens);
        reader_free(&c->reader);
    }
    bytes_free(&q->body), bytes_free(&q->out);
    cJSON_Delete(q->json), cJSON_Delete(q->names);
    pthread_cond_destroy(&q->wake);
    free(q->choice), free(q->bias), free(q);
    *state = NULL;
}

static void connection_changed(void *data, struct MHD_Connection *connection, void **context,
                               enum MHD_ConnectionNotificationCode what) {
    Client *c = *context;
    (void)data;
    lock();
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        *context = c = allocate_zero(1, sizeof *c);
        c->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        c->since = seconds();
        LIST_INSERT_HEAD(&server.clients, c, next);
    } else if (c) {
        LIST_REMOVE(c, next);
        free(c);
    }
    unlock();
}

/* Waits for signals, which every other thread blocks; ends connections whose request takes too long to arrive. */
static void *watch(void *data) {
    const sigset_t *signals = data;
    for (int n = 0;;) {
        Client *c;
        int number = sigtimedwait(signals, NULL, &(struct timespec){.tv_nsec = 250000000});
        n += number > 0;
        lock();
        if (n > 1 || (n && !server.ready)) _exit(n > 1 ? INTERRUPTED : DONE);
        if (n && !server.draining) fputs("infer: answers are being finished; a second signal ends at once\n", stderr);
        server.draining |= n > 0;
        LIST_FOREACH(c, &server.clients, next)
        if (c->since && seconds() - c->since > READ_SECONDS) shutdown(c->fd, SHUT_RDWR);
        pthread_cond_signal(&server.work);
        unlock();
    }
}

/* ---- the command ---- */

static bool read_key(const Options *o, Error *e) {
    Bytes file = {0};
    const char *key = environment("INFER_API_KEY");
    if (o->key_file && !file_read(o->key_file, 4096, &file, e)) return e->code = USAGE, false;
    if (o->key_file) file.data[strcspn(file.data, "\r\n")] = 0, key = file.data;
    bool ok = !key || *key || fail(e, USAGE, "%s: there is no key in it", o->key_file);
    if (ok && key) digest(key, server.key), server.has_key = true;
    bytes_free(&file);
    return ok;
}

/* Listens where --host and --port say. */
static struct MHD_Daemon *start_daemon(const Options *o, Error *e) {
    char port[8];
    struct addrinfo *to = NULL;
    struct MHD_Daemon *d = NULL;
    snprintf(port, sizeof port, "%d", o->port);
    int error = getaddrinfo(o->host, port, &(struct addrinfo){.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, &to);
    if (error) return fail(e, USAGE, "--host %.100s: %s", o->host, gai_strerror(error)), NULL;
    bool v6 = to->ai_family == AF_INET6;
    server.loopback = v6 ? IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)to->ai_addr)->sin6_addr)
                         : ntohl(((const struct sockaddr_in *)(const void *)to->ai_addr)->sin_addr.s_addr) >> 24 == 127;
    if (!server.loopback && !server.has_key && !o->insecure)
        fail(e, USAGE,
             "everybody who reaches %.100s could use it: give a key (--key-file, INFER_API_KEY) or --insecure",
             o->host);
    else if (!(d = MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL |
                                        (v6 ? MHD_USE_IPv6 : MHD_NO_FLAG),
                                    (uint16_t)o->port, NULL, NULL, handle, NULL, MHD_OPTION_SOCK_ADDR, to->ai_addr,
                                    MHD_OPTION_NOTIFY_COMPLETED, request_free, NULL, MHD_OPTION_NOTIFY_CONNECTION,
                                    connection_changed, NULL, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)WRITE_SECONDS,
                                    MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)MOST_HEADERS,
                                    MHD_OPTION_THREAD_STACK_SIZE, (size_t)STACK, MHD_OPTION_CONNECTION_LIMIT,
                                    (unsigned)(o->slots + o->queue + SPARE_CONNECTIONS), MHD_OPTION_END)))
        fail(e, FAILED, "%.100s port %d: %m; choose another with --port", o->host, o->port);
    else
        fprintf(stderr, v6 ? "infer: %s on http://[%s]:%d\n" : "infer: %s on http://%s:%d\n", server.name.data, o->host,
                MHD_get_daemon_info(d, MHD_DAEMON_INFO_BIND_PORT)->port);
    freeaddrinfo(to);
    return d;
}

/* What clients call the model: --name, or as the user does, of a folder its own name. */
static void choose_name(const Options *o) {
    const char *name = o->alias ? o->alias : server.s.name;
    size_t n = strlen(name), from = 0;
    while (n > 1 && name[n - 1] == '/') n--;
    if (!o->alias && !access(name, F_OK))
        for (from = n; from && name[from - 1] != '/';) from--;
    bytes_json(&server.name, name + from, n - from);
}

int serve(const Options *o) {
    Error e;
    static sigset_t signals; /* the watcher outlives us */
    pthread_t watcher;
    server.o = o;
    TAILQ_INIT(&server.requests);
    cond_init(&server.work);
    if (!read_key(o, &e) || !session_open(&server.s, o, NEED_CHECKPOINT | NEED_TOKENIZER, &e)) die(&e);
    choose_name(o);
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM), sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    struct MHD_Daemon *daemon = start_daemon(o, &e);
    if (!daemon) die(&e);
    if (pthread_create(&watcher, NULL, watch, &signals)) fail(&e, FAILED, "no thread can be started"), die(&e);
    bool ok = session_load(&server.s, o, o->context, &e);
    if (ok) {
        server.scheduler = scheduler_open(&server.s.engine);
        fputs("infer: ready\n", stderr);
        ok = run_model(&e);
    }
    if (!ok) { /* other threads may still write the error */
        fprintf(stderr, "infer: %s\n", e.text);
        _exit(e.code);
    }
    MHD_stop_daemon(daemon);
    scheduler_close(server.scheduler);
    session_close(&server.s);
    bytes_free(&server.name);
    return DONE;
}
