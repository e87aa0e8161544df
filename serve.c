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
enum { CHECK_MS = 100, STACK = 1 << 20, SPARE_CONNECTIONS = 256, BOUNDS = 12, DIGEST = 32, STATUSES = 10 };
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
    int top;
    Chance chance[1 + MOST_TOP]; /* its own, then those of the likeliest */
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
    Bytes text;           /* content; so much of it is free of stop texts, and so much handed out: */
    size_t shown, sent;
    Bytes thoughts;        /* what waits to be handed out: reasoning_content, */
    cJSON *calls, *scores; /* tool_calls, logprobs, or NULL */
    bool spoke;            /* something was handed out */
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

typedef struct { /* parameters of a request; those that are true or false are 1 or 0 */
    double n, tokens, seed, top_k, temperature, top_p, min_p, penalty, none, top, scored, stream, usage, echo, forever;
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
    Asked asked;
    bool chat, stream, echo, tools, listed;
    int n, top; /* answers to a prompt; logprobs, -1: none */
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
    size_t count[BOUNDS + 1];
    double sum;
} Histogram;
static const double bounds[BOUNDS] = {.0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10};
static const unsigned statuses[STATUSES] = {200, 400, 401, 403, 404, 405, 413, 429, 500, 503};

static struct {
    const Options *o;
    Session s;
    const char *name; /* as clients call the model */
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
    size_t prompt, reused, generated, repairs, nans, waiting, used, status[STATUSES];
} server = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

static void lock(void) { pthread_mutex_lock(&server.lock); }
static void unlock(void) { pthread_mutex_unlock(&server.lock); }

/* Waits a little, with the lock. */
static void wait_on(pthread_cond_t *cond) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += CHECK_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
    pthread_cond_clockwait(cond, &server.lock, CLOCK_MONOTONIC, &until);
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
    const double all = log_sum_exp(logits, vocab);
    Chance *best = d->chance + 1;
    d->scored = true;
    d->chance[0] = (Chance){d->token, d->token >= 0 ? (double)logits[d->token] - all : 0};
    for (int i = 0; i < vocab && top; i++) {
        double p = (double)logits[i] - all;
        if (d->top == top && !(p > best[top - 1].logprob)) continue;
        int at = d->top < top ? d->top++ : top - 1;
        for (; at && p > best[at - 1].logprob; at--) best[at] = best[at - 1];
        best[at] = (Chance){i, p};
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
            if (!c->cancelled) q->error = server.error, q->status = 500;
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
    server.error = *e;
    update_choices();
    for (double since = seconds(); !TAILQ_EMPTY(&server.requests) && seconds() - since < 2;) wait_on(&server.work);
}

/* Runs steps until the server ends; false: it failed. */
static bool run_model(Error *e) {
    double drains = 0;
    bool ok = true;
    lock();
    server.ready = true;
    fputs("infer: ready\n", stderr);
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
        server.state = scheduler_state(server.scheduler);
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
    if (status == 429 || status == 503) MHD_add_response_header(r, "Retry-After", "1");
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
                status == 429  ? "rate_limit_error"
                : status < 500 ? "invalid_request_error"
                               : "server_error",
                code ? "\"" : "", code ? code : "null", code ? "\"" : "");
}

static enum MHD_Result respond_error(Request *q) {
    Bytes out = {0};
    put_error(&out, q->error.text, q->status, q->code);
    return respond_json(q, q->status, &out);
}

/* ---- what a request asks for ---- */

typedef enum { REAL, WHOLE, FLAG } Kind;
static const struct {
    const char *key;
    char of; /* c: only of chats, t: only of texts */
    Kind kind;
    size_t field; /* of Asked */
    double least, most;
} parameters[] = {{"n", 0, WHOLE, offsetof(Asked, n), 1, 16},
                  {"max_tokens", 't', WHOLE, offsetof(Asked, tokens), 0, INT32_MAX},
                  {"max_tokens", 'c', WHOLE, offsetof(Asked, tokens), 1, INT32_MAX},
                  {"max_completion_tokens", 'c', WHOLE, offsetof(Asked, tokens), 1, INT32_MAX},
                  {"seed", 0, WHOLE, offsetof(Asked, seed), -9007199254740991, 9007199254740991},
                  {"top_k", 0, WHOLE, offsetof(Asked, top_k), -1, INT32_MAX},
                  {"temperature", 0, REAL, offsetof(Asked, temperature), 0, 100},
                  {"top_p", 0, REAL, offsetof(Asked, top_p), 0, 1},
                  {"min_p", 0, REAL, offsetof(Asked, min_p), 0, 1},
                  {"repetition_penalty", 0, REAL, offsetof(Asked, penalty), 1e-3, 100},
                  {"frequency_penalty", 0, REAL, offsetof(Asked, none), 0, 0}, /* use repetition_penalty */
                  {"presence_penalty", 0, REAL, offsetof(Asked, none), 0, 0},
                  {"logprobs", 't', WHOLE, offsetof(Asked, top), 0, MOST_TOP},
                  {"top_logprobs", 'c', WHOLE, offsetof(Asked, top), 0, MOST_TOP},
                  {"logprobs", 'c', FLAG, offsetof(Asked, scored), 0, 0},
                  {"stream", 0, FLAG, offsetof(Asked, stream), 0, 0},
                  {"include_usage", 0, FLAG, offsetof(Asked, usage), 0, 0}, /* in stream_options */
                  {"echo", 't', FLAG, offsetof(Asked, echo), 0, 0},
                  {"ignore_eos", 0, FLAG, offsetof(Asked, forever), 0, 0}};

static bool take_parameters(Request *q) {
    const cJSON *options = json_get(q->json, "stream_options");
    for (size_t i = 0; i < sizeof parameters / sizeof *parameters; i++) {
        const char *key = parameters[i].key;
        const double least = parameters[i].least, most = parameters[i].most;
        const bool whole = parameters[i].kind == WHOLE;
        const cJSON *value = json_get(strcmp(key, "include_usage") ? q->json : options, key);
        double *to = (double *)(void *)((char *)&q->asked + parameters[i].field), x;
        if (!value || (parameters[i].of && (parameters[i].of == 'c') != q->chat)) continue;
        if (parameters[i].kind == FLAG && !cJSON_IsBool(value))
            return bad(q, 400, NULL, "%s must be true or false", key);
        x = cJSON_IsNumber(value) ? value->valuedouble : NAN;
        *to = parameters[i].kind == FLAG ? cJSON_IsTrue(value) : x;
        if (parameters[i].kind != FLAG && (!(x >= least && x <= most) || (whole && x != floor(x))))
            return bad(q, 400, NULL, "%s must be a %snumber from %.16g to %.16g", key, whole ? "whole " : "", least,
                       most);
    }
    return true;
}

/* What is not supported is refused, not ignored. */
static bool refuse_others(Request *q) {
    const char *model = json_string(q->json, "model");
    const cJSON *each;
    if (json_get(q->json, "model") && (!model || strcmp(model, server.name)))
        return bad(q, 404, "model_not_found", "there is no model %.100s here, only %s", model ? model : "",
                   server.name);
    cJSON_ArrayForEach(each, q->json) {
        if (!cJSON_IsNull(each) && text_listed("functions function_call audio suffix web_search_options guided_choice "
                                               "guided_regex guided_grammar guided_json best_of",
                                               each->string))
            return bad(q, 400, "unsupported", "%s is not supported", each->string);
    }
    cJSON_ArrayForEach(each, json_get(q->json, "modalities")) {
        if (!cJSON_IsString(each) || strcmp(each->valuestring, "text"))
            return bad(q, 400, "unsupported", "modalities other than text are not supported");
    }
    return true;
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

/* All but the prompt. */
static bool take_request(Request *q) {
    Asked *a = &q->asked;
    uint32_t random = 0;
    if (getentropy(&random, sizeof random)) random = (uint32_t)(seconds() * 1e6);
    *a = (Asked){.n = 1, .tokens = q->chat ? INT32_MAX : 16, .temperature = 1, .top_p = 1, .penalty = 1, .top = -1};
    a->seed = random;
    if (!refuse_others(q) || !take_parameters(q) || !take_stops(q) || !take_biases(q)) return false;
    if (q->chat && a->top >= 0 && !a->scored) return bad(q, 400, NULL, "top_logprobs needs logprobs");
    if (q->chat && a->scored && a->top < 0) a->top = 0;
    q->sampling = (Sampling){.temperature = a->temperature < 0.01 ? 0 : (float)a->temperature,
                             .top_k = a->top_k < 0 ? 0 : (int)a->top_k,
                             .top_p = a->top_p < 1e-30 ? 1e-30f : (float)a->top_p,
                             .min_p = a->min_p < 1e-30 ? 0 : (float)a->min_p,
                             .penalty = (float)a->penalty,
                             .seed = (uint64_t)(int64_t)a->seed};
    q->n = (int)a->n, q->top = (int)a->top;
    q->stream = a->stream > 0, q->echo = a->echo > 0;
    return true;
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
        bytes_text(&c->text, "");
        ids_append(&t->tokens, prompt->data, prompt->n);
        t->prompt = prompt->n;
        t->most = prompt->n + (q->asked.tokens > 0 ? (size_t)q->asked.tokens : 1);
        if (t->most > context) t->most = context;
        t->sampling = q->sampling;
        t->sampling.seed += (uint64_t)c->index;
        t->bias = q->biases ? q->bias : NULL, t->biases = q->biases;
        t->want = q->top < 0 ? WANT_TOKEN : q->echo ? WANT_ALL_LOGITS : WANT_LOGITS;
        t->stop = q->asked.forever ? NULL : &server.s.checkpoint.stop;
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
static bool take_prompt(Request *q, const cJSON *prompt, int flags, Ids *ids) {
    const cJSON *each;
    const char *text = cJSON_GetStringValue(prompt);
    const int vocab = server.s.checkpoint.model.vocab;
    int64_t id;
    Error e;
    if (text)
        return tokenizer_encode(server.s.tokenizer, text, strlen(text), flags, ids, &e) ||
               bad(q, 400, NULL, "prompt: %s", e.text);
    if (!cJSON_IsArray(prompt)) return bad(q, 400, NULL, "a text or an array of token ids is needed");
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
        ok = take_prompt(q, each, WITH_TEMPLATE, &ids) && add_choices(q, &ids);
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
        bad(q, 429, "overloaded", "%d answers are being written or waited for: try again", server.live);
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

static cJSON *token_text(int token, Bytes *raw) {
    Decoder d = {.begun = true};
    Bytes text = {0}, copy = {0};
    raw->n = 0;
    tokenizer_bytes(server.s.tokenizer, &d, token, raw);
    bytes_add(&copy, raw->data, raw->n);
    utf8_stream(&copy, &text, true);
    cJSON *json = json_from_text(text.data, text.n);
    bytes_free(&text), bytes_free(&copy), bytes_free(&d.held);
    return json;
}

/* JSON has no infinity. */
static cJSON *logprob_json(const Chance *c) { return cJSON_CreateNumber(fmax(c->logprob, -9999)); }

static cJSON *chance_json(const Chance *c) {
    Bytes raw = {0};
    cJSON *json = cJSON_CreateObject(), *bytes;
    cJSON_AddItemToObject(json, "token", token_text(c->id, &raw));
    cJSON_AddItemToObject(json, "logprob", logprob_json(c));
    bytes = cJSON_AddArrayToObject(json, "bytes");
    for (size_t i = 0; i < raw.n; i++) cJSON_AddItemToArray(bytes, cJSON_CreateNumber((unsigned char)raw.data[i]));
    bytes_free(&raw);
    return json;
}

/* Adds a value to an array of the object, which it begins. */
static void add_to(cJSON *object, const char *key, cJSON *value) {
    cJSON *array = cJSON_GetObjectItemCaseSensitive(object, key);
    cJSON_AddItemToArray(array ? array : cJSON_AddArrayToObject(object, key), value);
}

/* Adds a token's logprobs to those that wait; `offset` of its text is that in the answer's. */
static void add_score(Choice *c, const Drawn *d, size_t offset) {
    cJSON *top = d->scored ? cJSON_CreateObject() : cJSON_CreateNull(), *own = NULL;
    Bytes raw = {0};
    if (!c->scores) c->scores = cJSON_CreateObject();
    if (c->request->chat) own = chance_json(d->chance);
    for (int i = 1; i <= d->top; i++) {
        if (own) {
            add_to(own, "top_logprobs", chance_json(d->chance + i));
            continue;
        }
        cJSON *name = token_text(d->chance[i].id, &raw);
        if (!cJSON_HasObjectItem(top, name->valuestring)) /* parts of letters may look alike */
            cJSON_AddItemToObject(top, name->valuestring, logprob_json(d->chance + i));
        cJSON_Delete(name);
    }
    if (own) {
        if (!d->top) cJSON_AddArrayToObject(own, "top_logprobs");
        add_to(c->scores, "content", own);
        cJSON_Delete(top);
    } else {
        add_to(c->scores, "tokens", token_text(d->token, &raw));
        add_to(c->scores, "token_logprobs", d->scored ? logprob_json(d->chance) : cJSON_CreateNull());
        add_to(c->scores, "top_logprobs", top);
        add_to(c->scores, "text_offset", cJSON_CreateNumber((double)offset));
    }
    bytes_free(&raw);
}

/* What waits of a choice to be handed out: all of it at the end, or in a stream what the last token brought. */
static cJSON *choice_json(Choice *c) {
    const Request *q = c->request;
    cJSON *choice = cJSON_CreateObject(), *to = choice;
    const bool text = c->shown > c->sent || !q->chat || (!q->stream && !c->calls);
    cJSON_AddNumberToObject(choice, "index", c->index);
    if (q->chat) to = cJSON_AddObjectToObject(choice, q->stream ? "delta" : "message");
    if (q->chat && !c->spoke) cJSON_AddStringToObject(to, "role", "assistant");
    if (text)
        cJSON_AddItemToObject(to, q->chat ? "content" : "text",
                              json_from_text(c->text.data + c->sent, c->shown - c->sent));
    if (!text && !q->stream) cJSON_AddNullToObject(to, "content");
    if (c->thoughts.n) cJSON_AddItemToObject(to, "reasoning_content", json_from_text(c->thoughts.data, c->thoughts.n));
    if (c->calls) cJSON_AddItemToObject(to, "tool_calls", c->calls);
    cJSON_AddItemToObject(choice, "logprobs", c->scores ? c->scores : cJSON_CreateNull());
    cJSON_AddItemToObject(choice, "finish_reason", c->finish ? cJSON_CreateString(c->finish) : cJSON_CreateNull());
    c->calls = c->scores = NULL;
    c->sent = c->shown, c->thoughts.n = 0, c->spoke = true;
    return choice;
}

/* A reply with these choices, or an event of one. */
static void put_reply(const Request *q, cJSON *choices, bool usage, Bytes *out) {
    cJSON *json = cJSON_CreateObject();
    size_t prompt = 0, reused = 0, tokens = 0, thought = 0;
    cJSON_AddStringToObject(json, "id", q->id);
    cJSON_AddStringToObject(json, "object",
                            !q->chat    ? "text_completion"
                            : q->stream ? "chat.completion.chunk"
                                        : "chat.completion");
    cJSON_AddNumberToObject(json, "created", (double)q->created);
    cJSON_AddStringToObject(json, "model", server.name);
    cJSON_AddItemToObject(json, "choices", choices);
    for (const Choice *c = q->choice; c < q->choice + q->choices; c++) {
        if (c->index % q->n == 0) prompt += c->stream.prompt, reused += c->stream.reused;
        tokens += c->tokens, thought += c->thought;
    }
    if (usage) {
        cJSON *of = cJSON_AddObjectToObject(json, "usage");
        cJSON_AddNumberToObject(of, "prompt_tokens", (double)prompt);
        cJSON_AddNumberToObject(of, "completion_tokens", (double)tokens);
        cJSON_AddNumberToObject(of, "total_tokens", (double)(prompt + tokens));
        cJSON_AddNumberToObject(cJSON_AddObjectToObject(of, "prompt_tokens_details"), "cached_tokens", (double)reused);
        cJSON_AddNumberToObject(cJSON_AddObjectToObject(of, "completion_tokens_details"), "reasoning_tokens",
                                (double)thought);
    }
    char *text = json_text(json);
    bytes_print(out, q->stream ? "data: %s\n\n" : "%s", text);
    free(text);
    cJSON_Delete(json);
}

/* Streams what waits. */
static void emit(Choice *c) {
    if (!c->request->stream || !(c->shown > c->sent || c->thoughts.n || c->calls || c->scores || c->finish)) return;
    cJSON *choices = cJSON_CreateArray();
    cJSON_AddItemToArray(choices, choice_json(c));
    put_reply(c->request, choices, false, &c->request->out);
}

/* ---- from tokens to answers ---- */

/* Shows what of the text is free of stop texts; an end that may be the beginning of one waits. */
static void show_text(Choice *c, bool last) {
    const Request *q = c->request;
    const char *text = c->text.data;
    size_t end = c->text.n;
    for (int i = 0; i < q->stops; i++) {
        const char *hit = memmem(text + c->shown, end - c->shown, q->stop[i], strlen(q->stop[i]));
        if (hit) c->text.n = end = (size_t)(hit - text), c->finish = stopped;
    }
    for (int i = 0; i < q->stops && !last && !c->finish; i++)
        for (size_t k = strlen(q->stop[i]) - 1; k; k--)
            if (k <= c->text.n - c->shown && !memcmp(text + c->text.n - k, q->stop[i], k) && c->text.n - k < end)
                end = c->text.n - k;
    c->shown = end;
}

/* Adds what is new of a call to what waits. */
static void add_call(Choice *c, const Message *m) {
    const Request *q = c->request;
    cJSON *call = cJSON_CreateObject(), *function;
    if (q->stream) cJSON_AddNumberToObject(call, "index", c->calls_n - c->opened);
    if (!c->opened) {
        const char *used = m->recipient + (strncmp(m->recipient, "functions.", 10) ? 0 : 10);
        const char *given = json_string(q->names, used);
        char id[80];
        snprintf(id, sizeof id, "call_%s_%d_%d", q->id + strcspn(q->id, "-") + 1, c->index, c->calls_n++);
        cJSON_AddStringToObject(call, "id", id);
        cJSON_AddStringToObject(call, "type", "function");
        function = cJSON_AddObjectToObject(call, "function");
        cJSON_AddItemToObject(function, "name", json_from_text(given ? given : used, strlen(given ? given : used)));
    } else {
        function = cJSON_AddObjectToObject(call, "function");
    }
    cJSON_AddItemToObject(function, "arguments", json_from_text(m->content.data + c->passed, m->content.n - c->passed));
    if (!c->calls) c->calls = cJSON_CreateArray();
    cJSON_AddItemToArray(c->calls, call);
}

/* Takes what the reader has that is new. */
static void take_messages(Choice *c) {
    const Request *q = c->request;
    const Reader *r = &c->reader;
    for (bool complete = true; complete && !c->finish;) {
        complete = c->message < r->messages;
        const Message *m = complete ? r->message + c->message : &r->now;
        const size_t n = m->content.n - c->passed;
        const Part part = message_part(m);
        const bool call = part == CALL && q->tools;
        if (call ? (complete || (q->stream && r->in_content)) && (n || !c->opened) : n > 0) {
            const char *text = m->content.data + c->passed;
            if (!call && part != REASONING && c->text.n && !c->opened) bytes_text(&c->text, "\n\n"); /* a preamble */
            if (!call) bytes_add(part == REASONING ? &c->thoughts : &c->text, text, n);
            if (call)
                add_call(c, m);
            else if (part != REASONING)
                show_text(c, false);
            c->opened = true;
            c->passed = m->content.n;
        }
        if (complete) c->message++, c->passed = 0, c->opened = false;
    }
}

/* The answer has ended, and why. */
static void finish_choice(Choice *c, const char *why) {
    const Request *q = c->request;
    Bytes ignored = {0};
    if (q->chat && !c->finish) reader_end(&c->reader, &ignored), take_messages(c);
    if (!q->chat && !c->finish) tokenizer_flush(&c->decoder, &c->text);
    if (!c->finish) show_text(c, true);
    if (!c->finish) c->finish = why == stopped && c->calls_n ? "tool_calls" : why;
    bytes_free(&ignored);
    lock();
    server.repairs += (size_t)c->reader.repairs;
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
    if (read.stop && !c->request->asked.forever) return true;
    take_messages(c);
    return false;
}

/* A token of a text, or (echo) of its prompt. */
static bool read_text(Choice *c, const Drawn *d) {
    const Ids *stops = c->stream.stop;
    bool prompt = d->position < c->stream.prompt, stop = false;
    for (size_t i = 0; stops && !prompt && i < stops->n; i++) stop |= d->token == stops->data[i];
    if (d->scored || (prompt && c->request->top >= 0)) add_score(c, d, c->text.n); /* usage counts it too */
    if (stop) return true;
    tokenizer_decode(server.s.tokenizer, &c->decoder, d->token, &c->text);
    if (prompt) c->shown = c->text.n; /* no stop text is looked for in it */
    if (!prompt) show_text(c, false);
    return false;
}

static void read_token(Choice *c, const Drawn *d) {
    Request *q = c->request;
    bool prompt = d->position < c->stream.prompt, silent = !prompt && !q->asked.tokens, stop = false;
    if (c->finish) return;
    if (d->token < 0) {
        lock();
        bad(q, 500, NULL, "the logits hold a NaN: the weights or config.json are damaged");
        unlock();
        c->finish = failed;
        return;
    }
    c->tokens += !prompt && !silent;
    if (!silent) stop = q->chat ? read_chat(c, d) : read_text(c, d);
    if (c->finish || stop || d->last || silent) finish_choice(c, stop ? stopped : full);
    emit(c);
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
        free(drawn);
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

/* The events behind the last choice's. */
static void end_events(Request *q) {
    q->complete = true;
    if (q->status) {
        bytes_text(&q->out, "data: ");
        put_error(&q->out, q->error.text, 500, NULL);
        return bytes_text(&q->out, "\n\n");
    }
    if (q->asked.usage) put_reply(q, cJSON_CreateArray(), true, &q->out);
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
    cJSON *choices = cJSON_CreateArray();
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) cJSON_AddItemToArray(choices, choice_json(c));
    put_reply(q, choices, true, out);
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
        emit(c);
    }
}

static enum MHD_Result answer(Request *q) {
    Bytes out = {0};
    if (!take_request(q) || !(q->chat ? make_chat(q) : make_completion(q)) || !enqueue(q)) return respond_error(q);
    begin_answers(q);
    if (q->stream)
        return queue(q, 200, "text/event-stream",
                     MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, write_events, q, NULL));
    while (!read_choices(q))
        if (!wait_for_tokens(q)) return MHD_NO;
    if (q->status) return respond_error(q);
    put_whole(q, &out);
    return respond_json(q, 200, &out);
}

static enum MHD_Result completions(Request *q) { return answer(q); }
static enum MHD_Result chat_completions(Request *q) { return q->chat = true, answer(q); }

/* ---- what else can be asked ---- */

static enum MHD_Result models(Request *q) {
    Bytes out = {0};
    bytes_text(&out, "{\"object\":\"list\",\"data\":[{\"id\":");
    bytes_json(&out, server.name, strlen(server.name));
    bytes_print(&out,
                ",\"object\":\"model\",\"created\":0,\"owned_by\":\"infer\","
                "\"max_model_len\":%d}]}",
                server.s.engine.context);
    return respond_json(q, 200, &out);
}

/* Healthy means that tokens move. */
static enum MHD_Result health(Request *q) {
    Bytes out = {0};
    lock();
    bool stalled = server.ready && seconds() - server.moved > STALL_SECONDS;
    const char *ill = server.error.code ? "failed"
                      : server.draining ? "ending"
                      : !server.ready   ? "loading"
                      : stalled         ? "stalled"
                                        : NULL;
    unlock();
    bytes_print(&out, "{\"status\":\"%s\"}", ill ? ill : "ok");
    return respond_json(q, ill ? 503 : 200, &out);
}

static enum MHD_Result page(Request *q) {
    Bytes out = {0};
    bytes_add(&out, page_begin, (size_t)(page_end - page_begin));
    return respond(q, 200, "text/html; charset=utf-8", &out);
}

static enum MHD_Result tokenize(Request *q) {
    Ids ids = {0};
    Bytes out = {0};
    if (take_prompt(q, json_get(q->json, "prompt"), 0, &ids)) {
        bytes_print(&out, "{\"count\":%zu,\"tokens\":[", ids.n);
        for (size_t i = 0; i < ids.n; i++) bytes_print(&out, i ? ",%d" : "%d", ids.data[i]);
        bytes_text(&out, "]}");
    }
    ids_free(&ids);
    return out.n ? respond_json(q, 200, &out) : respond_error(q);
}

static enum MHD_Result detokenize(Request *q) {
    Ids ids = {0};
    Bytes text = {0}, out = {0};
    Decoder d = {0};
    if (take_prompt(q, json_get(q->json, "tokens"), 0, &ids)) {
        for (size_t i = 0; i < ids.n; i++) tokenizer_decode(server.s.tokenizer, &d, ids.data[i], &text);
        tokenizer_flush(&d, &text);
        bytes_text(&out, "{\"prompt\":");
        bytes_json(&out, text.data, text.n);
        bytes_text(&out, "}");
    }
    ids_free(&ids), bytes_free(&text), bytes_free(&d.held);
    return out.n ? respond_json(q, 200, &out) : respond_error(q);
}

static const struct {
    const char *name, *help, *kind;
    const size_t *value;
} numbers[] = {{"prompt_tokens_total", "Tokens of prompts", "counter", &server.prompt},
               {"cached_tokens_total", "Those that were in the cache", "counter", &server.reused},
               {"generated_tokens_total", "Tokens of answers", "counter", &server.generated},
               {"repairs_total", "Malformed headers in answers", "counter", &server.repairs},
               {"nan_total", "Answers that a NaN ended", "counter", &server.nans},
               {"preemptions_total", "Answers that gave up their pages", "counter", &server.state.preempted},
               {"steps_total", "Steps of the model", "counter", &server.state.steps},
               {"answers_running", "Answers being written", "gauge", &server.state.running},
               {"answers_waiting", "Answers in the queue", "gauge", &server.waiting},
               {"cache_pages_used", "Pages of answers that run", "gauge", &server.used},
               {"cache_pages_kept", "Pages whose text is known", "gauge", &server.state.kept},
               {"cache_pages", "All pages of the cache", "gauge", &server.state.pages}};

static void put_histogram(Bytes *out, const char *name, const char *help, const Histogram *h) {
    size_t sum = 0;
    bytes_print(out, "# HELP infer_%s_seconds %s\n# TYPE infer_%s_seconds histogram\n", name, help, name);
    for (int i = 0; i < BOUNDS; i++)
        bytes_print(out, "infer_%s_seconds_bucket{le=\"%g\"} %zu\n", name, bounds[i], sum += h->count[i]);
    sum += h->count[BOUNDS];
    bytes_print(out, "infer_%s_seconds_bucket{le=\"+Inf\"} %zu\n", name, sum);
    bytes_print(out, "infer_%s_seconds_sum %.6f\ninfer_%s_seconds_count %zu\n", name, h->sum, name, sum);
}

static enum MHD_Result metrics(Request *q) {
    Bytes out = {0};
    lock();
    const size_t live = (size_t)server.live, running = server.state.running;
    server.waiting = live > running ? live - running : 0;
    server.used = server.state.pages - server.state.idle;
    bytes_text(&out, "# HELP infer_requests_total Requests answered\n# TYPE infer_requests_total counter\n");
    for (int i = 0; i < STATUSES; i++)
        bytes_print(&out, "infer_requests_total{status=\"%u\"} %zu\n", statuses[i], server.status[i]);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        bytes_print(&out, "# HELP infer_%s %s\n# TYPE infer_%s %s\ninfer_%s %zu\n", numbers[i].name, numbers[i].help,
                    numbers[i].name, numbers[i].kind, numbers[i].name, *numbers[i].value);
    put_histogram(&out, "time_to_first_token", "From a request to its first token", &server.first);
    put_histogram(&out, "time_per_token", "From a token to the next", &server.next);
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

static enum MHD_Result count_header(void *data, enum MHD_ValueKind kind, const char *key, const char *value) {
    int *hosts = data, *lengths = hosts + 1;
    (void)kind, (void)value;
    *hosts += !strcasecmp(key, "Host");
    *lengths += !strcasecmp(key, "Content-Length") || !strcasecmp(key, "Transfer-Encoding");
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

/* May a page ask by this name? On a loopback address another site must not reach us by a name of its own (DNS
 * rebinding), and a browser says from which page a request comes: ours, or one that --cors allows. */
static bool may_ask(const char *host, const char *origin) {
    const char *const local[] = {"localhost", "127.0.0.1", "[::1]", server.o->host};
    const char *cors = server.o->cors, *page = origin ? strstr(origin, "://") : NULL;
    const size_t n = host ? strlen(host) : 0,
                 port = n ? (size_t)(strrchr(host, ':') ? strrchr(host, ':') - host : 0) : 0;
    bool known = !server.loopback;
    for (int i = 0; i < 4 && !known; i++) {
        const size_t length = strlen(local[i]);
        known = n >= length && (n == length || port == length) && !strncasecmp(host, local[i], length);
    }
    return known && (!origin || (cors && (!strcmp(cors, "*") || !strcasecmp(cors, origin))) ||
                     (page && host && !strcasecmp(page + 3, host)));
}

/* What libmicrohttpd does not refuse itself: a request that could be read in two ways, or that may not be made. */
static void check_request(Request *q, const char *url, const char *method, const char *version) {
    int count[2] = {0}; /* Host, lengths */
    bool path = false;
    MHD_get_connection_values(q->connection, MHD_HEADER_KIND, count_header, count);
    for (int i = 0; i < ENDPOINTS; i++) {
        const char *has = endpoints[i].method;
        if (strcmp(endpoints[i].path, url)) continue;
        path = true;
        if (!strcmp(has, method) || (*has == 'G' && !strcmp(method, "HEAD"))) q->endpoint = endpoints + i;
    }
    lock();
    bool ready = server.ready;
    unlock();
    if (count[1] > 1)
        bad(q, 400, NULL, "one Content-Length or one Transfer-Encoding at most");
    else if (count[0] > 1 || (count[0] < 1 && !strcmp(version, "HTTP/1.1")))
        bad(q, 400, NULL, "one Host is needed");
    else if (!may_ask(header(q, "Host"), header(q, "Origin")))
        bad(q, 403, NULL, "this page or host may not ask here; see infer serve --help, --cors");
    else if (server.o->cors && !strcmp(method, "OPTIONS"))
        q->status = 200;
    else if (!path)
        bad(q, 404, "not_found", "there is no %.100s here", url);
    else if (!q->endpoint)
        bad(q, 405, NULL, "%.20s is not how %.100s is asked", method, url);
    else if (!q->endpoint->open && !has_key(q))
        bad(q, 401, "invalid_api_key", "Incorrect API key provided, or none: send it as Authorization: Bearer KEY");
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
        pthread_cond_init(&q->wake, NULL);
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
        bytes_free(&c->text), bytes_free(&c->thoughts), bytes_free(&c->decoder.held);
        cJSON_Delete(c->calls), cJSON_Delete(c->scores);
        free(c->drawn);
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
        fprintf(stderr, v6 ? "infer: %s on http://[%s]:%d\n" : "infer: %s on http://%s:%d\n", server.name, o->host,
                MHD_get_daemon_info(d, MHD_DAEMON_INFO_BIND_PORT)->port);
    freeaddrinfo(to);
    return d;
}

/* What clients call the model: --name, or as the user does, of a folder its own name. */
static const char *choose_name(const Options *o) {
    char *name = server.s.name, *end = name + strlen(name);
    if (o->alias) return o->alias;
    while (end > name + 1 && end[-1] == '/') *--end = 0;
    return !access(name, F_OK) && strrchr(name, '/') && end > name + 1 ? strrchr(name, '/') + 1 : name;
}

int serve(const Options *o) {
    Error e;
    static sigset_t signals; /* the watcher outlives us */
    pthread_t watcher;
    server.o = o;
    TAILQ_INIT(&server.requests);
    if (!read_key(o, &e) || !session_open(&server.s, o, NEED_CHECKPOINT | NEED_TOKENIZER, &e)) die(&e);
    server.name = choose_name(o);
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM), sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    struct MHD_Daemon *daemon = start_daemon(o, &e);
    if (!daemon) die(&e);
    if (pthread_create(&watcher, NULL, watch, &signals)) fail(&e, FAILED, "no thread can be started"), die(&e);
    bool ok = session_load(&server.s, o, o->context, &e);
    if (ok) {
        server.scheduler = scheduler_open(&server.s.engine);
        ok = run_model(&e);
    }
    if (!ok) { /* other threads may still write the error */
        fprintf(stderr, "infer: %s\n", e.text);
        _exit(e.code);
    }
    MHD_stop_daemon(daemon);
    scheduler_close(server.scheduler);
    session_close(&server.s);
    return DONE;
}
