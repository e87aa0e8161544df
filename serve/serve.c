/* serve.c: an HTTP server that speaks OpenAI's API (github.com/openai/openai-openapi), on libmicrohttpd. One thread
 * owns the model: it runs the scheduler, and makes text and events of the tokens. Between steps it looks for
 * clients that have left or are too slow. Each connection has its own thread, which reads a request, queues it, waits
 * for its answers and sends them.
 *
 * One lock guards what threads share. The model's thread holds it except while the model computes. A queued request and
 * its choices belong to that thread until no choice is `left`; meanwhile the connection of a stream sends what is in
 * `out`. Then the connection writes a reply that is no stream. */
#include "host.h"

#include <ctype.h>
#include <libgen.h>
#include <math.h>
#include <microhttpd.h>
#include <netdb.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_BODY = 16 << 20, MOST_HEADERS = 32 << 10, MOST_CHOICES = 128, MOST_STOPS = 64, MOST_TOP = 20 };
enum { READ_SECONDS = 30, WRITE_SECONDS = 60, DRAIN_SECONDS = 30, STALL_SECONDS = 60 };
enum { CHECK_MS = 100, BEAT_MS = 5000, PART = 16 << 10, STACK = 1 << 20, SPARE_CONNECTIONS = 256, BOUNDS = 12 };
enum { CLIENT_LEFT = 499, STATUSES = 600 }; /* as nginx counts it; only a client that ended its sending side sees it */

/* The text of page.html. */
extern const char page_text[];
__asm__(".pushsection .rodata\n.globl page_text\npage_text: .incbin \"serve/page.html\"\n.byte 0\n.popsection\n");

typedef struct Request Request;

typedef struct { /* one of the answers to a request */
    Stream stream;
    Request *request;
    double last;   /* when the last token came, or else the request */
    Reader reader; /* of a text only its decoder is used */
    int calls_n;   /* calls so far */
    Bytes text;    /* the content; `shown` bytes are free of stop texts, `sent` bytes are written */
    size_t shown, sent, counted, letters; /* its first `counted` bytes hold so many letters */
    Bytes thoughts;                       /* reasoning_content to write */
    cJSON *calls, *scores;                /* tool_calls to write, or NULL; logprobs to write, each with the byte of
                                             `text` where its token begins */
    bool spoke, cut;                      /* something is written; a stop text ended it */
    size_t thought;                       /* tokens of reasoning */
    const char *finish;                   /* finish_reason; NULL until it has ended */
} Choice;

typedef struct {
    const char *method, *path, *type; /* type NULL: JSON */
    bool open;                        /* served without a key, and while the model loads */
    void (*run)(Request *q);          /* writes q->out, or notes an error */
} Endpoint;

struct Request { /* a connection and its request */
    TAILQ_ENTRY(Request) next;
    struct MHD_Connection *connection;
    int fd;
    pthread_cond_t wake;
    _Atomic double deadline;  /* when the client must have sent its request; INFINITY once it has */
    bool queued;              /* under the lock: accepted, and the reply is not sent yet */
    int left;                 /* under the lock: choices that have not ended */
    const Endpoint *endpoint; /* this and all below are 0 between two requests */
    const char *url;
    Bytes body;
    cJSON *json, *names; /* names: from a function's name as the model reads it to the client's; NULL: it has none */
    const char *code;    /* of the error, or NULL */
    double since;        /* when it had arrived */
    /* parameters */
    bool chat, stream, echo, usage, skip_special, ignore_eos, parallel; /* parallel: several calls in an answer */
    int n, tokens, top; /* answers to each prompt; tokens of an answer; logprobs for each token, or -1 */
    Sampling sampling;
    const char *stop[MOST_STOPS];
    Bias *bias; /* (sampling.biases) */
    int stops;
    /* answers */
    Choice *choice;
    int choices;
    char id[40];
    long long created;
    /* under the lock, once it is queued */
    Error error; /* its code is the HTTP status, or 0; below 400 an exit code of another file */
    Bytes out;   /* the reply, or events of a stream, of which `written` bytes are sent */
    size_t written;
};

typedef struct {
    size_t count[BOUNDS], n; /* values up to each bound; all */
    double sum;
} Histogram;
static const double bounds[BOUNDS] = {.0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10};

static struct {
    const char *host, *cors, *name;
    int port, streams, queue, cache, chunk, context;
    bool insecure;
} given;

static struct {
    Session s;
    const char *name, *key;         /* as clients call the model; what they must send, or NULL */
    atomic_bool ready;              /* the model is loaded */
    _Atomic double ends;            /* after a signal: when answers that are not finished are given up; else 0 */
    atomic_size_t status[STATUSES]; /* replies of each */
    pthread_mutex_t lock;
    pthread_cond_t work; /* for the model's thread */
    /* under the lock */
    TAILQ_HEAD(, Request) requests; /* of all connections */
    int live;                       /* choices that have not ended */
    Error error;                    /* why no more answers come */
    double moved;                   /* when the model's thread was last between steps */
    SchedulerState state;
    Histogram to_first_token, per_token;
    size_t prompt, reused, generated, repairs, nans;
} server = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

static void lock(void) { pthread_mutex_lock(&server.lock); }
static void unlock(void) { pthread_mutex_unlock(&server.lock); }

/* Waits on a condition. Returns whether it was signalled in time. The caller holds the lock. */
static bool wait_on(pthread_cond_t *cond, int ms) {
    const double until = seconds() + ms / 1e3;
    const struct timespec at = {(time_t)until, (long)(fmod(until, 1) * 1e9)};
    return !pthread_cond_clockwait(cond, &server.lock, CLOCK_MONOTONIC, &at);
}

static void observe(Histogram *h, double value) {
    for (int i = 0; i < BOUNDS; i++) h->count[i] += value <= bounds[i];
    h->n++;
    h->sum += value;
}

/* ---- replies ---- */

/* Appends a value to an array of the object, and makes the array if it is missing. */
static void append(cJSON *json, const char *key, cJSON *value) {
    cJSON *array = cJSON_GetObjectItemCaseSensitive(json, key);
    cJSON_AddItemToArray(array ? array : cJSON_AddArrayToObject(json, key), value);
}

/* Writes JSON and frees it: an event of a stream, or the whole reply. */
static void put_json(Request *q, cJSON *json) {
    if (q->stream) bytes_text(&q->out, "data: ");
    json_append(&q->out, json);
    if (q->stream) bytes_text(&q->out, "\n\n");
}

static void put_error(Request *q) {
    const int status = q->error.code;
    const char *type = status == 429 ? "rate_limit_error" : status < 500 ? "invalid_request_error" : "server_error";
    /* the field at fault: a message about one begins with its name */
    LocalText word = copy_text(q->error.text, strcspn(q->error.text, " .[:"));
    const char *code = status == 401 ? "invalid_api_key" : q->code, *param = json_get(q->json, word) ? word : NULL;
    cJSON *error = json_object("message", json_word(q->error.text), "type", json_word(type), "param", json_word(param),
                               "code", json_word(code), NULL);
    put_json(q, json_object("error", error, NULL));
}

/* ---- parameters of a request ---- */

/* A number of the request, or `normal` if it has none. The first one that is out of range is the request's error. */
static double number(Request *q, const char *key, bool whole, double least, double most, double normal) {
    const cJSON *value = json_get(q->json, key);
    const double x = cJSON_GetNumberValue(value); /* or NaN */
    if (x >= least && x <= most && (!whole || x == floor(x))) return x;
    if (value && !q->error.code)
        fail(&q->error, 400, "%s must be a %snumber from %.16g to %.16g", key, whole ? "whole " : "", least, most);
    return normal;
}

/* The same for true or false. */
static bool flag(Request *q, const cJSON *object, const char *key, bool normal) {
    const cJSON *value = json_get(object, key);
    if (value && !cJSON_IsBool(value) && !q->error.code) fail(&q->error, 400, "%s must be true or false", key);
    return value ? cJSON_IsTrue(value) : normal;
}

static bool is_model(Request *q, const char *name) {
    if (!strcmp(name, server.name)) return true;
    q->code = "model_not_found";
    return fail(&q->error, 404, "model: there is no model %.100s here, only %s", name, server.name);
}
/* Checks the request's model, if it names one. */
static bool check_model(Request *q) {
    const cJSON *model = json_get(q->json, "model");
    const char *name = cJSON_GetStringValue(model);
    if (model && !name) return fail(&q->error, 400, "model must be a text");
    return !name || !*name || is_model(q, name);
}

/* Fields that are refused, unless their value follows a = here: in any request, in chats, in texts. Accepted values
 * change nothing; -0 is 0. A space marks where a field begins. */
#define UNSUPPORTED                                                                                                    \
    " add_generation_prompt=true allowed_token_ids= audio= bad_words=[] chat_template= continue_final_message=false "  \
    "documents=[] function_call=\"auto\" function_call=\"none\" "                                                      \
    "functions=[] grammar= guided_choice= guided_grammar= guided_json= guided_regex= include_reasoning=true "          \
    "include_stop_str_in_output=false json_schema= logits_processors= min_tokens=0 modalities=[\"text\"] "             \
    "prompt_logprobs= repeat_penalty=1 return_token_ids=false return_tokens_as_token_ids=false "                       \
    "stop_token_ids=[] structured_outputs= suffix=\"\" truncate_prompt_tokens= typical_p=1 use_beam_search=false "     \
    "verbosity=\"medium\" web_search_options="
static const char of_chats[] =
    UNSUPPORTED " add_special_tokens=false echo=false enable_thinking=true skip_special_tokens=true";
static const char of_texts[] = UNSUPPORTED " add_special_tokens=true max_completion_tokens= "
                                           "top_logprobs=0 tools=[] response_format={\"type\":\"text\"}";

static bool refuse_others(Request *q) {
    const char *unsupported = q->chat ? of_chats : of_texts;
    const cJSON *each;
    cJSON_ArrayForEach(each, q->json) {
        LocalBytes field = {0};
        bytes_print(&field, " %s=", each->string);
        if (cJSON_IsNull(each) || !strstr(unsupported, field.data)) continue;
        LocalText value = cJSON_IsNumber(each) ? text_print("%.17g", each->valuedouble + 0) : json_text(each);
        bytes_text(&field, value);
        if (!text_listed(unsupported, field.data + 1))
            return fail(&q->error, 400, "%s is not supported with this value: leave it out", each->string);
    }
    return true;
}

static bool take_stops(Request *q) {
    const cJSON *stop = json_get(q->json, "stop"), *each = cJSON_IsArray(stop) ? stop->child : stop;
    for (; each; each = cJSON_IsArray(stop) ? each->next : NULL) {
        const char *text = cJSON_GetStringValue(each);
        if (!text || q->stops == MOST_STOPS)
            return fail(&q->error, 400, "stop must be a text or an array of at most %d texts", MOST_STOPS);
        if (*text) q->stop[q->stops++] = text;
    }
    return true;
}

static bool take_biases(Request *q) {
    const cJSON *all = json_get(q->json, "logit_bias"), *each;
    const int vocab = server.s.checkpoint.model.vocab;
    const bool empty = cJSON_IsArray(all) && !all->child; /* as PHP writes an object without members */
    if (all && !cJSON_IsObject(all) && !empty) return fail(&q->error, 400, "logit_bias must be an object");
    if (cJSON_GetArraySize(all) > MOST_BIASES)
        return fail(&q->error, 400, "logit_bias has more than %d tokens", MOST_BIASES);
    q->sampling.bias = q->bias = cJSON_GetArraySize(all) ? allocate(MOST_BIASES * sizeof *q->bias) : NULL;
    cJSON_ArrayForEach(each, all) {
        Bias *bias = q->bias + q->sampling.biases++, *same = q->bias;
        bias->add = (float)cJSON_GetNumberValue(each); /* or NaN */
        if (!text_whole(each->string, 0, vocab - 1, &bias->id) || !(bias->add >= -100 && bias->add <= 100))
            return fail(&q->error, 400, "logit_bias maps token ids below %d to numbers from -100 to 100", vocab);
        while (same->id != bias->id) same++;
        if (same < bias) return fail(&q->error, 400, "logit_bias has the token %d twice", bias->id);
    }
    return true;
}

/* Takes everything but the prompt. */
static bool take_request(Request *q) {
    const double most = INT32_MAX, seed = number(q, "seed", true, -0x1p63, 0x1p63, -1); /* -1: random */
    Sampling *s = &q->sampling;
    if (getentropy(&s->seed, sizeof s->seed)) s->seed = (uint64_t)(seconds() * 1e9);
    snprintf(q->id, sizeof q->id, "%s-%016llx", q->chat ? "chatcmpl" : "cmpl", (unsigned long long)s->seed);
    q->created = time(NULL);
    const cJSON *best = json_get(q->json, "best_of"), *options = json_get(q->json, "stream_options");
    if (!refuse_others(q)) return false;
    if (options && !cJSON_IsObject(options)) return fail(&q->error, 400, "stream_options must be an object");
    q->stream = flag(q, q->json, "stream", false);
    q->usage = flag(q, options, "include_usage", false);
    q->ignore_eos = flag(q, q->json, "ignore_eos", false);
    q->echo = !q->chat && flag(q, q->json, "echo", false);
    q->skip_special = !q->chat && flag(q, q->json, "skip_special_tokens", false);
    q->parallel = !q->chat || flag(q, q->json, "parallel_tool_calls", true);
    q->n = (int)number(q, "n", true, 1, 16, 1);
    q->tokens = (int)number(q, "max_tokens", true, q->chat ? 1 : 0, most, q->chat ? most : 16);
    if (q->chat) q->tokens = (int)number(q, "max_completion_tokens", true, 1, most, q->tokens);
    const bool scored = q->chat && flag(q, q->json, "logprobs", false);
    q->top = (int)number(q, q->chat ? "top_logprobs" : "logprobs", true, 0, MOST_TOP, scored ? 0 : -1);
    if (seed != -1) s->seed = seed < 0 ? (uint64_t)(int64_t)seed : (uint64_t)seed;
    s->top_k = (int)number(q, "top_k", true, -1, most, 0);
    s->temperature = (float)number(q, "temperature", false, 0, 100, 1);
    s->top_p = fmaxf((float)number(q, "top_p", false, 0, 1, 1), 1e-30f);
    s->min_p = (float)number(q, "min_p", false, 0, 1, 0);
    s->penalty = (float)number(q, "repetition_penalty", false, 1e-3, 100, 1);
    s->frequency = (float)number(q, "frequency_penalty", false, -2, 2, 0);
    s->presence = (float)number(q, "presence_penalty", false, -2, 2, 0);
    if (s->min_p < 1e-30f) s->min_p = 0;
    if (q->error.code) return false;
    if (q->chat && q->top > 0 && !scored) return fail(&q->error, 400, "top_logprobs needs logprobs");
    if (q->chat && !scored) q->top = -1;
    if (best && cJSON_GetNumberValue(best) != q->n) return fail(&q->error, 400, "best_of must equal n: leave it out");
    return take_stops(q) && take_biases(q);
}

/* ---- functions ---- */

/* Gives the function of {"function": {"name": ...}} a name that every chat format allows. The hash keeps different
 * names apart, and does not change from one request to the next. */
static void rename_function(Request *q, const cJSON *holder) {
    cJSON *item = cJSON_GetObjectItemCaseSensitive(json_get(holder, "function"), "name");
    const char *given = cJSON_GetStringValue(item);
    uint32_t hash = 0;
    if (!given || !*given || (chat_word(given) && strlen(given) <= 64)) return;
    for (const char *s = given; *s; s++) hash = (hash ^ (unsigned char)*s) * 16777619u;
    LocalText used = text_print("%.50s_%08x", given, hash);
    for (char *s = used; *s; s++)
        if (!isalnum((unsigned char)*s)) *s = '_';
    cJSON_AddStringToObject(q->names, used, given); /* of equal ones the first counts */
    cJSON_SetValuestring(item, used);
}

/* Takes tools and tool_choice. *force: the answer must be a call of the function *name, or of any if that is NULL. */
static bool take_tools(Request *q, bool *force, const char **name) {
    const cJSON *choice = json_get(q->json, "tool_choice"), *each, *call;
    const char *word = cJSON_IsString(choice) ? choice->valuestring : choice ? "" : "auto";
    if (!strcmp(word, "none")) cJSON_DeleteItemFromObjectCaseSensitive(q->json, "tools"), word = "auto";
    const cJSON *tools = json_get(q->json, "tools");
    const int n = cJSON_GetArraySize(tools);
    bool found = false;
    q->names = n ? cJSON_CreateObject() : NULL;
    cJSON_ArrayForEach(each, json_get(q->json, "messages")) cJSON_ArrayForEach(call, json_get(each, "tool_calls"))
        rename_function(q, call);
    rename_function(q, choice);
    *name = json_string(json_get(choice, "function"), "name");
    *force = *name || !strcmp(word, "required");
    if (!*force && strcmp(word, "auto"))
        return fail(&q->error, 400, "tool_choice must be auto, none, required or a function");
    cJSON_ArrayForEach(each, tools) {
        rename_function(q, each);
        const char *has = json_string(json_get(each, "function"), "name");
        if (*force && !*name && n == 1) *name = has;
        found |= has && (!*name || !strcmp(has, *name));
    }
    return !*force || found || fail(&q->error, 400, "tool_choice asks for a function that tools do not have");
}

/* ---- answers as JSON ---- */

/* all: log_sum_exp of the logits. Without logits the logprob is null. */
static cJSON *chance_json(int id, const float *logits, double all) {
    LocalBytes raw = {0}, text = {0};
    cJSON *bytes = cJSON_CreateArray();
    tokenizer_bytes(server.s.tokenizer, &(Decoder){.begun = true}, id, &raw);
    for (size_t i = 0; i < raw.n; i++) cJSON_AddItemToArray(bytes, json_number((unsigned char)raw.data[i]));
    utf8_stream(&raw, &text, true);
    cJSON *logprob = logits ? json_number(fmax((double)logits[id] - all, -9999)) : json_word(NULL); /* no infinity */
    return json_object("token", json_from_text(text.data, text.n), "logprob", logprob, "bytes", bytes, NULL);
}

/* Adds a token's logprobs to those to write, by the keys under which the API lists them. */
static void add_score(Choice *c, size_t begin, int token, const float *logits) {
    const int vocab = server.s.checkpoint.model.vocab;
    const double all = logits ? log_sum_exp(logits, vocab) : 0;
    int best[MOST_TOP], n = logits ? likeliest(logits, vocab, c->request->top, best) : 0;
    cJSON *own = chance_json(token, logits, all), *top = cJSON_AddArrayToObject(own, "top_logprobs"), *each;
    cJSON *score = json_object("begin", json_number(begin), NULL);
    cJSON_AddItemToArray(c->scores, score);
    for (int i = 0; i < n; i++) cJSON_AddItemToArray(top, chance_json(best[i], logits, all));
    if (logits && !c->request->chat) /* texts get the drawn token, too; below each counts once */
        cJSON_AddItemToArray(top, chance_json(token, logits, all));
    if (c->request->chat) {
        json_add(score, "content", own, NULL);
        return;
    }
    cJSON *chances = logits ? cJSON_CreateObject() : json_word(NULL); /* by text; parts of letters may look alike */
    cJSON_ArrayForEach(each, top) if (!json_get(chances, json_string(each, "token")))
        json_add(chances, json_string(each, "token"), cJSON_DetachItemFromObject(each, "logprob"), NULL);
    for (; c->counted < begin; c->counted++) c->letters += (c->text.data[c->counted] & 0xC0) != 0x80;
    json_add(score, "tokens", cJSON_DetachItemFromObject(own, "token"), "token_logprobs",
             cJSON_DetachItemFromObject(own, "logprob"), "top_logprobs", chances, "text_offset",
             json_number(c->letters), NULL);
    cJSON_Delete(own);
}

/* Takes the logprobs of tokens whose text begins before c->shown. At the end of an answer that no stop text cut, it
 * takes all: the last tokens may have no text. */
static cJSON *take_scores(Choice *c) {
    cJSON *taken = NULL, *score, *value;
    while ((score = c->scores->child)) {
        if (json_get(score, "begin")->valuedouble >= (double)c->shown && (c->cut || !c->finish)) break;
        cJSON_DeleteItemFromObject(score, "begin");
        if (!taken) taken = cJSON_CreateObject();
        while ((value = score->child)) append(taken, value->string, cJSON_DetachItemViaPointer(score, value));
        cJSON_Delete(cJSON_DetachItemViaPointer(c->scores, score));
    }
    return taken ? taken : json_word(NULL);
}

/* A choice as JSON: in a stream only what is new, else all of it. */
static cJSON *choice_json(Choice *c) {
    const Request *q = c->request;
    const char *key = !q->chat ? "text" : q->stream ? "delta" : "message";
    const bool some = c->shown > c->sent || !q->chat || (!q->stream && !c->calls);
    cJSON *thoughts = c->thoughts.n ? json_from_text(c->thoughts.data, c->thoughts.n) : NULL;
    cJSON *said = some || q->stream ? NULL : json_word(NULL);
    if (some) said = json_from_text(c->text.data + c->sent, c->shown - c->sent);
    if (q->chat)
        said = json_object("role", c->spoke ? NULL : json_word("assistant"), "content", said, "reasoning_content",
                           thoughts, "tool_calls", c->calls, NULL);
    cJSON *choice = json_object("index", json_number((int)(c - q->choice)), key, said, "logprobs", take_scores(c),
                                "finish_reason", json_word(c->finish), NULL);
    c->calls = NULL, c->sent = c->shown, c->thoughts.n = 0, c->spoke = true;
    return choice;
}

static cJSON *usage_json(const Request *q) {
    size_t prompt = 0, reused = 0, tokens = 0, thought = 0;
    for (const Choice *c = q->choice; c < q->choice + q->choices; c++) {
        if ((c - q->choice) % q->n == 0) prompt += c->stream.prompt, reused += c->stream.reused;
        tokens += q->tokens ? c->stream.tokens.n - c->stream.prompt : 0;
        thought += c->thought;
    }
    return json_object("prompt_tokens", json_number(prompt), "completion_tokens", json_number(tokens), "total_tokens",
                       json_number(prompt + tokens), "prompt_tokens_details",
                       json_object("cached_tokens", json_number(reused), NULL), "completion_tokens_details",
                       json_object("reasoning_tokens", json_number(thought), NULL), NULL);
}

/* Writes a reply, or an event of a stream, with the choices [from, to). */
static void put_reply(Request *q, Choice *from, const Choice *to, bool usage) {
    const char *what = !q->chat ? "text_completion" : q->stream ? "chat.completion.chunk" : "chat.completion";
    cJSON *choices = cJSON_CreateArray(), *used = usage ? usage_json(q) : NULL;
    if (!usage && q->stream && q->usage) used = json_word(NULL); /* it comes later */
    for (Choice *c = from; c < to; c++) cJSON_AddItemToArray(choices, choice_json(c));
    put_json(q, json_object("id", json_word(q->id), "object", json_word(what), "created", json_number(q->created),
                            "model", json_word(server.name), "choices", choices, "usage", used, NULL));
}

/* ---- from tokens to answers ---- */

/* Adds arguments of a call to what is to be written. The name comes once, at the beginning. */
static void add_call(Choice *c, const Message *m, Bytes arguments) {
    const Request *q = c->request;
    const bool begins = arguments.n == m->content.n;
    const char *name = m->recipient + (strncmp(m->recipient, "functions.", 10) ? 0 : 10);
    cJSON *text = json_from_text(arguments.data, arguments.n);
    if (json_string(q->names, name)) name = json_string(q->names, name);
    c->calls_n += begins;
    LocalText id = text_print("call_%s_%d_%d", q->id + strcspn(q->id, "-") + 1, (int)(c - q->choice), c->calls_n - 1);
    if (!c->calls) c->calls = cJSON_CreateArray();
    cJSON *function = json_object("name", begins ? json_from_text(name, strlen(name)) : NULL, "arguments", text, NULL);
    cJSON_AddItemToArray(c->calls, json_object("index", q->stream ? json_number(c->calls_n - 1) : NULL, "id",
                                               begins ? json_word(id) : NULL, "type",
                                               begins ? json_word("function") : NULL, "function", function, NULL));
}

/* Reads a token of a chat; a negative one ends it. Takes the text that this adds to a message. Without a stream, a call
 * waits until it is complete. */
static Read read_message(Choice *c, int token) {
    const Request *q = c->request;
    Reader *r = &c->reader;
    LocalBytes text = {0};
    const int before = r->messages;
    const Read read = token < 0 ? reader_end(r, &text) : reader_push(r, token, &text);
    const bool complete = r->messages > before;
    const Message *m = complete ? r->message + r->messages - 1 : &r->now;
    if (read.part == CALL && q->names) {
        const bool new = q->stream ? text.n || (complete && !m->content.n) : complete;
        if (new) add_call(c, m, q->stream ? text : m->content);
    } else if (read.part == REASONING) {
        bytes_add(&c->thoughts, text.data, text.n);
    } else if (text.n) {
        if (c->text.n && text.n == m->content.n) bytes_text(&c->text, "\n\n"); /* after a preamble */
        bytes_add(&c->text, text.data, text.n);
    }
    return read;
}

/* Reads a token of an answer, or, with echo, of its prompt. logits: NULL, or those it was drawn from. */
static void read_token(Choice *c, size_t position, int token, const float *logits, bool last) {
    const Request *q = c->request;
    const bool prompt = position < c->stream.prompt, silent = !prompt && !q->tokens;
    const size_t begin = c->text.n;
    bool stop = c->stream.stopped && !silent, called = false, scored = !silent && (logits || (prompt && q->top >= 0));
    if (q->chat) {
        const Read read = read_message(c, token);
        const bool content = !read.header && read.part != REASONING && read.part != CALL;
        c->thought += read.part == REASONING;
        scored = scored && content && !tokenizer_is_control(server.s.tokenizer, token);
        called = read.closed && read.part == CALL;
        stop = stop || (read.stop && !q->ignore_eos) || (called && !q->parallel);
    } else if (!stop && !silent && !(q->skip_special && tokenizer_is_control(server.s.tokenizer, token))) {
        tokenizer_decode(server.s.tokenizer, &c->reader.decoder, token, &c->text);
    }
    if (scored) add_score(c, begin, token, logits); /* in a text a stop token has one, too */
    last = last || stop;
    if (last && q->chat && (!called || q->parallel)) read_message(c, -1); /* else the next call may have begun */
    if (last && !q->chat) tokenizer_flush(&c->reader.decoder, &c->text);
    while (q->chat && (called || (!c->reader.pending.n && !c->reader.decoder.held.n)) && c->scores->child) {
        cJSON *score = c->scores->child->prev; /* the last one */
        if (json_get(score, "begin")->valuedouble < (double)c->text.n) break;
        cJSON_Delete(cJSON_DetachItemViaPointer(c->scores, score)); /* its text was dropped, or is a call's */
    }
    if (prompt) c->shown = c->text.n; /* it may contain stop texts */
    c->cut = text_stops(&c->text, &c->shown, q->stop, q->stops, last);
    const char *end = !stop ? "length" : c->calls_n ? "tool_calls" : "stop";
    if (c->cut || last) c->finish = c->cut ? "stop" : end;
}

/* ---- the model's thread ---- */

/* Ends a choice, and with the last one a stream. The caller holds the lock. */
static void let_go(Choice *c) {
    Request *q = c->request;
    scheduler_remove(server.s.scheduler, &c->stream);
    if (!c->finish) c->finish = "error";
    server.live--;
    server.repairs += (size_t)c->reader.repairs;
    if (--q->left) return;
    if (q->stream && q->error.code) put_error(q);
    if (q->stream && !q->error.code && q->usage) put_reply(q, NULL, NULL, true);
    if (q->stream && !q->error.code) bytes_text(&q->out, "data: [DONE]\n\n");
    pthread_cond_signal(&q->wake);
}

/* Takes a token from the scheduler and writes what it brings. */
static void take_token(Stream *t, size_t position, int token, const float *logits, bool last) {
    Choice *c = t->owner;
    Request *q = c->request;
    const double now = seconds();
    lock();
    if (position >= t->prompt) {
        const bool first = position == t->prompt;
        observe(first ? &server.to_first_token : &server.per_token, now - c->last);
        server.prompt += first ? t->prompt : 0;
        server.reused += first ? t->reused : 0;
        server.generated += token >= 0;
        c->last = now;
    }
    if (token >= 0) {
        read_token(c, position, token, logits, last);
    } else {
        fail(&q->error, 500, "the logits hold a NaN: the weights or config.json are damaged");
        server.nans++;
    }
    if (q->stream && (c->shown > c->sent || c->thoughts.n || c->calls || c->finish)) put_reply(q, c, c + 1, false);
    if (last || c->finish) let_go(c);
    if (q->out.n > q->written) pthread_cond_signal(&q->wake);
    unlock();
}

/* Cuts off clients that are too slow. Adds new choices to the scheduler, or ends them if the request has an error, for
 * example because its client has left. The first answer to a prompt reads it, and the others join when the first has a
 * token. Returns whether a queued request still waits for its reply. The caller holds the lock. */
static bool update_requests(void) {
    bool busy = false;
    Request *q;
    server.moved = seconds();
    TAILQ_FOREACH(q, &server.requests, next) {
        struct pollfd p = {.fd = q->fd, .events = POLLRDHUP};
        if (server.moved > q->deadline) shutdown(q->fd, SHUT_RDWR);
        busy |= q->queued;
        if (!q->left) continue;
        if (server.error.code) fail(&q->error, 500, "%s", server.error.text);
        if (poll(&p, 1, 0) > 0) fail(&q->error, CLIENT_LEFT, "the client has left");
        for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
            const Choice *reads = c - (c - q->choice) % q->n;
            if (c->finish) continue;
            if (q->error.code) {
                let_go(c);
            } else if (!c->stream.owner && (reads == c || reads->stream.published > reads->stream.prompt)) {
                c->stream.owner = c; /* from now on the scheduler has or had it */
                scheduler_add(server.s.scheduler, &c->stream);
            }
        }
    }
    server.state = scheduler_state(server.s.scheduler);
    return busy;
}

/* Runs steps until the server ends or the model fails with an error. Either way every request gets its reply, if
 * its client takes it within 2 s. */
static void run_model(Error *e) {
    e->code = 0;
    lock();
    server.ready = true;
    fprintf(stderr, "infer: ready, for texts of up to %d tokens\n", server.s.engine.context);
    while ((update_requests() || !(server.ends > 0)) && !server.error.code) {
        if (server.ends > 0 && server.moved > server.ends) {
            fail(&server.error, FAILED, "the server ends");
        } else if (!server.state.running && !server.state.waiting && !server.state.outstanding) {
            wait_on(&server.work, CHECK_MS);
        } else {
            unlock();
            scheduler_step(server.s.scheduler, e);
            lock();
            if (e->code) server.error = *e;
        }
    }
    for (double since = seconds(); update_requests() && seconds() - since < 2;) wait_on(&server.work, CHECK_MS);
    unlock();
}

/* ---- making choices ---- */

/* Adds the request's n answers to a prompt. With echo the prompt is part of each: it is read here, or, if the client
 * wants logprobs, by the scheduler from the second token on. */
static bool add_choices(Request *q, const Ids *prompt) {
    const size_t context = (size_t)server.s.engine.context;
    if (!prompt->n) return fail(&q->error, 400, "the prompt is empty");
    if (prompt->n >= context)
        return q->code = "context_length_exceeded",
               fail(&q->error, 400, "this model's maximum context length is %zu tokens, the prompt has %zu: shorten it",
                    context, prompt->n); /* clients look for these words */
    if (q->choices + q->n > MOST_CHOICES) return fail(&q->error, 400, "a request has at most %d answers", MOST_CHOICES);
    q->choice = reallocate(q->choice, (size_t)(q->choices + q->n) * sizeof *q->choice);
    for (int i = 0; i < q->n; i++) {
        Choice *c = q->choice + q->choices++;
        Stream *t = &c->stream;
        *c = (Choice){.request = q, .last = q->since, .scores = cJSON_CreateArray(), .reader.decoder.begun = !q->echo};
        *t = (Stream){.prompt = prompt->n, .sampling = q->sampling};
        bytes_text(&c->text, "");
        ids_append(&t->tokens, prompt->data, prompt->n);
        t->most = prompt->n + (q->tokens ? (size_t)q->tokens : 1);
        if (t->most > context) t->most = context;
        t->sampling.seed += (uint64_t)(c - q->choice);
        t->want = q->top < 0 ? WANT_TOKEN : q->echo ? WANT_ALL_LOGITS : WANT_LOGITS;
        t->stop = q->ignore_eos ? NULL : &server.s.checkpoint.stop;
        t->take = take_token;
        for (size_t k = 0; q->echo && k < (q->top < 0 ? prompt->n : 1); k++)
            read_token(c, 0, prompt->data[k], NULL, false);
    }
    return true;
}

/* Renders a conversation. The beginning of a forced call belongs to the answer, so that the reader gets it too. */
static bool make_chat(Request *q) {
    bool force;
    const char *name;
    LOCAL(conversation_free) Conversation talk = {0};
    LocalIds ids = {0};
    const Chat *chat = &server.s.chat;
    Error *e = &q->error;
    if (!server.s.has_chat) return fail(e, 400, "%s has no chat format: send a text to /v1/completions", server.name);
    if (!take_tools(q, &force, &name)) return false;
    conversation_init(&talk);
    if (!conversation_parse(&talk, q->json, e)) return false;
    if (!talk.messages && !talk.instructions) return fail(e, 400, "messages is empty");
    const cJSON *kwargs = json_get(q->json, "chat_template_kwargs"), *thinking = json_get(kwargs, "thinking");
    const cJSON *thinks = thinking ? thinking : json_get(kwargs, "enable_thinking"); /* the first is DeepSeek's name */
    const char *effort = json_string(kwargs, "reasoning_effort");
    if (kwargs && (!cJSON_IsObject(kwargs) || cJSON_GetArraySize(kwargs) != (effort != NULL) + cJSON_IsBool(thinks)))
        return fail(e, 400, "chat_template_kwargs may have only enable_thinking or thinking, and reasoning_effort");
    if (effort) conversation_set(&talk.effort, effort);
    if (cJSON_IsFalse(thinks)) conversation_set(&talk.effort, "none");
    if (!chat_render(chat, &talk, true, &ids, e)) return false;
    const size_t prompt = ids.n;
    if (force && !chat_force(chat, talk.effort, name, &ids, e)) return false;
    if (!add_choices(q, &ids)) return false;
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        reader_init(&c->reader, chat, &talk);
        for (size_t i = prompt; i < ids.n; i++) reader_push(&c->reader, ids.data[i], NULL);
    }
    return true;
}

/* Takes a prompt, a value of the request's `key`: a text, or an array of token ids. */
static bool take_prompt(Request *q, const char *key, const cJSON *prompt, int flags, Ids *ids) {
    const cJSON *each;
    const char *text = cJSON_GetStringValue(prompt);
    const int vocab = server.s.checkpoint.model.vocab;
    int64_t id;
    if (text) return tokenizer_encode(server.s.tokenizer, text, strlen(text), flags, ids, &q->error);
    if (!cJSON_IsArray(prompt)) return fail(&q->error, 400, "%s must be a text or an array of token ids", key);
    cJSON_ArrayForEach(each, prompt) {
        if (!json_whole(each, 0, vocab - 1, &id))
            return fail(&q->error, 400, "%s: token ids are whole numbers from 0 to %d", key, vocab - 1);
        ids_add(ids, (int)id);
    }
    return true;
}

static bool make_completion(Request *q) {
    const cJSON *prompt = json_get(q->json, "prompt"), *first = cJSON_IsArray(prompt) ? prompt->child : NULL;
    const bool many = cJSON_IsString(first) || cJSON_IsArray(first);
    const cJSON *each = many ? first : prompt;
    do {
        LocalIds ids = {0};
        if (!take_prompt(q, "prompt", each, WITH_TEMPLATE, &ids) || !add_choices(q, &ids)) return false;
    } while (many && (each = each->next));
    return true;
}

/* ---- waiting for answers ---- */

/* Whether an answer may begin; if not, q->error says why. The caller holds the lock. */
static bool can_answer(Request *q) {
    if (!server.ready) return fail(&q->error, 503, "the model is being loaded");
    if (server.error.code) return fail(&q->error, 503, "the model failed: %s", server.error.text);
    return !(server.ends > 0) || fail(&q->error, 503, "the server ends");
}

/* Waits for events, or the end of a reply. A stream that waits long gets a comment. The caller holds the lock. */
static void wait_for_answers(Request *q) {
    while (q->written == q->out.n && q->left)
        if (!wait_on(&q->wake, BEAT_MS) && q->stream && q->left)
            bytes_text(&q->out, ": the answer is being computed\n\n");
}

/* Gives libmicrohttpd the next part of a reply. */
static ssize_t write_part(void *data, uint64_t position, char *to, size_t room) {
    Request *q = data;
    lock();
    wait_for_answers(q);
    const size_t left = q->out.n - q->written, n = left < room ? left : room;
    if (n) memcpy(to, q->out.data + q->written, n);
    q->written += n;
    if (n == left) q->written = q->out.n = 0;
    unlock();
    return n ? (ssize_t)n : MHD_CONTENT_READER_END_OF_STREAM;
}

/* Gives the choices to the model's thread, if the queue has room, and waits for a reply that is no stream. */
static void complete(Request *q) {
    const bool valid = take_request(q) && (q->chat ? make_chat(q) : make_completion(q));
    MHD_set_connection_option(q->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0); /* now the client waits for us */
    lock();
    if (valid && can_answer(q) && server.live >= given.streams + given.queue)
        fail(&q->error, 429, "%d answers are being written or wait: try again", server.live);
    q->queued = !q->error.code;
    q->left = q->queued ? q->choices : 0;
    server.live += q->left;
    pthread_cond_signal(&server.work);
    q->stream &= q->queued; /* an error is an ordinary reply */
    if (!q->stream) wait_for_answers(q);
    unlock();
    MHD_set_connection_option(q->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)WRITE_SECONDS);
    if (!q->stream && !q->error.code) put_reply(q, q->choice, q->choice + q->choices, true);
}

static void complete_chat(Request *q) { q->chat = true, complete(q); }

/* ---- other endpoints ---- */

/* The list of models, or the one that the path names. */
static void models(Request *q) {
    const char *name = q->url + strlen(q->endpoint->path);
    if (*name && !is_model(q, name + 1)) return;
    cJSON *model =
        json_object("id", json_word(server.name), "object", json_word("model"), "created", json_number(0), "owned_by",
                    json_word("infer"), "max_model_len", json_number(server.s.engine.context), NULL);
    cJSON *list = *name ? NULL : json_object("object", json_word("list"), NULL);
    if (list) append(list, "data", model);
    put_json(q, list ? list : model);
}

/* Healthy: answers can begin, and the model's thread moves. */
static void health(Request *q) {
    lock();
    if (can_answer(q) && seconds() - server.moved > STALL_SECONDS)
        fail(&q->error, 503, "no step has ended for %d seconds", STALL_SECONDS);
    unlock();
    if (!q->error.code) put_json(q, json_object("status", json_word("ok"), NULL));
}

static void page(Request *q) { bytes_text(&q->out, page_text); }

static void tokenize(Request *q) {
    LocalIds ids = {0};
    const int flags = flag(q, q->json, "add_special_tokens", false) ? WITH_TEMPLATE : 0;
    if (q->error.code || !take_prompt(q, "prompt", json_get(q->json, "prompt"), flags, &ids)) return;
    bytes_print(&q->out, "{\"count\":%zu,\"tokens\":[", ids.n);
    for (size_t i = 0; i < ids.n; i++) bytes_print(&q->out, i ? ",%d" : "%d", ids.data[i]);
    bytes_text(&q->out, "]}");
}

static void detokenize(Request *q) {
    LocalIds ids = {0};
    LocalBytes text = {0};
    Decoder d = {0};
    const cJSON *tokens = json_get(q->json, "tokens");
    if (!cJSON_IsArray(tokens)) fail(&q->error, 400, "tokens must be an array of token ids");
    if (q->error.code || !take_prompt(q, "tokens", tokens, 0, &ids)) return;
    for (size_t i = 0; i < ids.n; i++) tokenizer_decode(server.s.tokenizer, &d, ids.data[i], &text);
    tokenizer_flush(&d, &text);
    put_json(q, json_object("prompt", json_from_text(text.data, text.n), NULL));
}

static void put_histogram(Bytes *out, const char *name, const Histogram *h) {
    bytes_print(out, "# TYPE infer_%s histogram\n", name);
    for (int i = 0; i < BOUNDS; i++) bytes_print(out, "infer_%s_bucket{le=\"%g\"} %zu\n", name, bounds[i], h->count[i]);
    bytes_print(out, "infer_%s_bucket{le=\"+Inf\"} %zu\n", name, h->n);
    bytes_print(out, "infer_%s_sum %.6f\ninfer_%s_count %zu\n", name, h->sum, name, h->n);
}

static void put_number(Bytes *out, const char *name, size_t value) {
    const char *kind = strstr(name, "_total") ? "counter" : "gauge";
    bytes_print(out, "# TYPE infer_%s %s\ninfer_%s %zu\n", name, kind, name, value);
}

static void metrics(Request *q) {
    Bytes *out = &q->out;
    lock();
    const SchedulerState *now = &server.state;
    const size_t live = (size_t)server.live;
    bytes_text(out, "# TYPE infer_requests_total counter\n");
    for (int i = 0; i < STATUSES; i++)
        if (server.status[i]) bytes_print(out, "infer_requests_total{status=\"%d\"} %zu\n", i, server.status[i]);
    put_number(out, "prompt_tokens_total", server.prompt);
    put_number(out, "cached_tokens_total", server.reused);
    put_number(out, "generated_tokens_total", server.generated);
    put_number(out, "repairs_total", server.repairs); /* malformed headers of harmony */
    put_number(out, "nan_total", server.nans);
    put_number(out, "preemptions_total", now->preempted);
    put_number(out, "steps_total", now->steps);
    put_number(out, "answers_running", now->running);
    put_number(out, "answers_waiting", live > now->running ? live - now->running : 0);
    put_number(out, "cache_pages_used", now->pages - now->idle);
    put_number(out, "cache_pages_kept", now->kept); /* for prompts that begin alike */
    put_number(out, "cache_pages", now->pages);
    put_histogram(out, "time_to_first_token_seconds", &server.to_first_token);
    put_histogram(out, "time_per_token_seconds", &server.per_token);
    unlock();
}

/* ---- HTTP ---- */

static const Endpoint endpoints[] = {
    {"POST", "/v1/chat/completions", NULL, false, complete_chat},
    {"POST", "/v1/completions", NULL, false, complete},
    {"GET", "/v1/models", NULL, false, models},
    {"GET", "/metrics", "text/plain; version=0.0.4", false, metrics},
    {"POST", "/tokenize", NULL, false, tokenize},
    {"POST", "/detokenize", NULL, false, detokenize},
    {"GET", "/health", NULL, true, health},
    {"GET", "/", "text/html; charset=utf-8", true, page},
};

static enum MHD_Result count_header(void *data, enum MHD_ValueKind kind, const char *key, const char *value) {
    int *hosts = data, *lengths = hosts + 1, *odd = hosts + 2;
    const bool encoding = !strcasecmp(key, "Transfer-Encoding");
    *hosts += !strcasecmp(key, "Host");
    *lengths += encoding || !strcasecmp(key, "Content-Length");
    *odd += (encoding && strcasecmp(value, "chunked")) || strpbrk(key, " \t\r") || strchr(value, '\r');
    return MHD_YES;
}

static const char *header(const Request *q, const char *name) {
    return MHD_lookup_connection_value(q->connection, MHD_HEADER_KIND, name);
}

static bool has_key(const Request *q) {
    const char *given = header(q, "Authorization");
    const size_t n = server.key ? strlen(server.key) : 0;
    return !n || (given && !strncasecmp(given, "Bearer ", 7) && strlen(given + 7) == n &&
                  !CRYPTO_memcmp(given + 7, server.key, n)); /* the time does not tell which bytes are right */
}

/* May a page send requests under this Host? Where neither a key nor --insecure says that others may, another site must
 * not reach us by a name of its own (DNS rebinding). A client that sends no Host, as HTTP/1.0 allows, is no browser. A
 * browser's Origin says which page sends the request: it must be ours, or one that --cors allows. */
static bool may_ask(const char *host, const char *origin) {
    const char *const local[] = {"localhost", "127.0.0.1", "[::1]", given.host};
    const char *cors = given.cors, *page = origin ? strstr(origin, "://") : NULL;
    bool known = server.key || given.insecure || !host;
    for (int i = 0; i < 4 && !known; i++) {
        const size_t n = strlen(local[i]);
        known = !strncasecmp(host, local[i], n) && (!host[n] || host[n] == ':');
    }
    return known && (!origin || (cors && (!strcmp(cors, "*") || !strcasecmp(cors, origin))) ||
                     (page && host && !strcasecmp(page + 3, host)));
}

/* Finds the endpoint. Refuses what libmicrohttpd lets through: requests that can be read in two ways, and those that
 * are not allowed. */
static void check_request(Request *q, const char *method, const char *version) {
    const char *url = q->url, *path = strncmp(url, "/v1/models/", 11) ? url : "/v1/models"; /* the list, or one */
    const char *as = strcmp(method, "HEAD") ? method : "GET";
    int count[3] = {0}; /* Host, lengths, headers that a proxy may read otherwise */
    MHD_get_connection_values(q->connection, MHD_HEADER_KIND, count_header, count);
    for (int i = 0; i < (int)(sizeof endpoints / sizeof *endpoints); i++)
        if (!strcmp(endpoints[i].path, path) && !strcmp(endpoints[i].method, as)) q->endpoint = endpoints + i;
    if (count[2] || count[1] > 1 || count[0] > 1 || (count[0] < 1 && !strcmp(version, "HTTP/1.1")))
        fail(&q->error, 400,
             "the headers can be read in two ways: send one Host, at most one Content-Length or Transfer-Encoding: "
             "chunked, and no blank in a name");
    else if (!may_ask(header(q, "Host"), header(q, "Origin")))
        fail(&q->error, 403, "this page or host may not send requests; see infer serve --help, --cors");
    else if (given.cors && !strcmp(method, "OPTIONS"))
        q->endpoint = NULL; /* a browser asks whether a page may send a request */
    else if (!q->endpoint)
        fail(&q->error, 404, "there is no %.20s %.100s here", method, url);
    else if (!q->endpoint->open && !has_key(q))
        fail(&q->error, 401, "Incorrect API key provided, or none: send it as Authorization: Bearer KEY");
    else if (!q->endpoint->open && !server.ready)
        fail(&q->error, 503, "the model is being loaded");
}

/* Sends what the endpoint wrote, or the error. A stream has no error yet. */
static enum MHD_Result respond(Request *q) {
    const bool wrong = !q->stream && q->error.code;
    if (wrong && q->error.code < 400) q->error.code = 400;
    const unsigned status = wrong ? (unsigned)q->error.code : 200;
    const char *type = q->stream ? "text/event-stream" : q->endpoint && !wrong ? q->endpoint->type : NULL;
    const char *wanted = header(q, "Access-Control-Request-Headers"); /* of a page that --cors allows */
    if (wrong) put_error(q);
    struct MHD_Response *r =
        MHD_create_response_from_callback(q->stream ? MHD_SIZE_UNKNOWN : q->out.n, PART, write_part, q, NULL);
    server.status[status]++;
    MHD_add_response_header(r, "Content-Type", type ? type : "application/json");
    if (q->stream) /* else nginx would hold events back */
        MHD_add_response_header(r, "Cache-Control", "no-cache"), MHD_add_response_header(r, "X-Accel-Buffering", "no");
    if (given.cors) MHD_add_response_header(r, "Access-Control-Allow-Origin", given.cors);
    if (given.cors && wanted) MHD_add_response_header(r, "Access-Control-Allow-Headers", wanted);
    if (status == 429 || status == 503) MHD_add_response_header(r, "Retry-After", "1");
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (status >= 400) MHD_add_response_header(r, "Connection", "close");
    enum MHD_Result result = MHD_queue_response(q->connection, status, r);
    MHD_destroy_response(r);
    return result;
}

/* libmicrohttpd calls it when the headers are here, for each part of the body, and at its end. */
static enum MHD_Result handle(void *data, struct MHD_Connection *connection, const char *url, const char *method,
                              const char *version, const char *upload, size_t *size, void **state) {
    Request *q = *state;
    if (!q) {
        *state = q = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
        const char *host = *url == '/' ? NULL : strstr(url, "://"); /* as a proxy is asked */
        q->url = host ? strchrnul(host + 3, '/') : url;             /* libmicrohttpd keeps it as long as the request */
        q->deadline = seconds() + READ_SECONDS;
        check_request(q, method, version);
        return MHD_YES;
    }
    if (*size) { /* also reads the rest of a refused request, so that the client gets to the reply */
        if (q->body.n + *size > MOST_BODY) fail(&q->error, 413, "the body has more than %d bytes", MOST_BODY);
        if (!q->error.code) bytes_add(&q->body, upload, *size);
        *size = 0;
        return MHD_YES;
    }
    q->deadline = INFINITY;
    q->since = seconds();
    if (!q->error.code && !strcmp(method, "POST"))
        q->json = json_parse(q->body.n ? q->body.data : "", q->body.n, "the body", &q->error);
    if (q->json && !cJSON_IsObject(q->json)) fail(&q->error, 400, "the body is not a JSON object");
    bytes_free(&q->body);
    if (!q->error.code && check_model(q) && q->endpoint) q->endpoint->run(q);
    return respond(q);
}

/* Ends a request, however that comes. The model's thread lets go of its choices first. */
static void request_end(void *data, struct MHD_Connection *connection, void **state,
                        enum MHD_RequestTerminationCode why) {
    Request *q = *state;
    if (!q) return;
    lock();
    fail(&q->error, CLIENT_LEFT, "the client has left");
    while (q->left) pthread_cond_wait(&q->wake, &server.lock);
    q->queued = false;
    unlock();
    for (Choice *c = q->choice; c && c < q->choice + q->choices; c++) {
        bytes_free(&c->text), bytes_free(&c->thoughts);
        cJSON_Delete(c->calls), cJSON_Delete(c->scores);
        ids_free(&c->stream.tokens);
        reader_free(&c->reader);
    }
    bytes_free(&q->body), bytes_free(&q->out);
    cJSON_Delete(q->json), cJSON_Delete(q->names);
    free(q->choice), free(q->bias);
    memset(&q->endpoint, 0, sizeof *q - offsetof(Request, endpoint));
    q->deadline = seconds() + READ_SECONDS;
    *state = NULL;
}

static void connection_changed(void *data, struct MHD_Connection *connection, void **context,
                               enum MHD_ConnectionNotificationCode what) {
    Request *q = *context;
    lock();
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        *context = q = allocate_zero(1, sizeof *q);
        q->connection = connection;
        q->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        q->deadline = seconds() + READ_SECONDS;
        pthread_cond_init(&q->wake, NULL);
        TAILQ_INSERT_TAIL(&server.requests, q, next);
    } else if (q) {
        TAILQ_REMOVE(&server.requests, q, next);
        pthread_cond_destroy(&q->wake);
        free(q);
    }
    unlock();
}

/* ---- the command ---- */

/* The first signal lets answers finish, or ends at once if the model still loads. The second one ends at once. */
static void take_signal(int number) {
    static const char text[] = "infer: answers are being finished; a second signal ends at once\n";
    if (server.ends > 0) _exit(INTERRUPTED);
    if (!server.ready) _exit(DONE);
    server.ends = seconds() + DRAIN_SECONDS;
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
}

/* Listens where --host and --port say, or ends the process. */
static struct MHD_Daemon *start_daemon(void) {
    Error e;
    struct addrinfo *to = NULL;
    LocalText port = text_print("%d", given.port);
    int error =
        getaddrinfo(given.host, port, &(struct addrinfo){.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, &to);
    if (error) fail(&e, USAGE, "--host %.100s: %s", given.host, gai_strerror(error)), die(&e);
    if (!text_listed("localhost 127.0.0.1 ::1", given.host) && !server.key && !given.insecure)
        fail(&e, USAGE, "--host %.100s needs a key (INFER_API_KEY) or --insecure: others may reach it", given.host),
            die(&e);
    const bool v6 = to->ai_family == AF_INET6;
    struct MHD_Daemon *d = MHD_start_daemon(
        MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_THREAD_PER_CONNECTION | (v6 ? MHD_USE_IPv6 : MHD_NO_FLAG),
        (uint16_t)given.port, NULL, NULL, handle, NULL, MHD_OPTION_SOCK_ADDR, to->ai_addr, MHD_OPTION_NOTIFY_COMPLETED,
        request_end, NULL, MHD_OPTION_NOTIFY_CONNECTION, connection_changed, NULL, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)WRITE_SECONDS, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)MOST_HEADERS, MHD_OPTION_THREAD_STACK_SIZE,
        (size_t)STACK, MHD_OPTION_CONNECTION_LIMIT, (unsigned)(given.streams + given.queue + SPARE_CONNECTIONS),
        MHD_OPTION_END);
    if (!d)
        fail(&e, FAILED, "%.100s port %d: %m; choose another with --host or --port", given.host, given.port), die(&e);
    freeaddrinfo(to);
    fprintf(stderr, v6 ? "infer: %s on http://[%s]:%d\n" : "infer: %s on http://%s:%d\n", server.name, given.host,
            MHD_get_daemon_info(d, MHD_DAEMON_INFO_BIND_PORT)->port);
    return d;
}

static int run_serve(const char *model) {
    Error e;
    TAILQ_INIT(&server.requests);
    server.key = environment("INFER_API_KEY");
    int n = 0; /* the length of the origin that --cors begins with */
    if (given.cors) sscanf(given.cors, "%*[a-zA-Z0-9+.-]://%*[^/?#@,* \t]%n", &n);
    if (given.cors && !text_listed("* null", given.cors) && (!n || given.cors[n])) /* null: of pages in files */
        fail(&e, USAGE, "--cors must be * or an origin such as http://localhost:3000, not '%.100s'", given.cors),
            die(&e);
    if (!session_open(&server.s, model, NEED_CHECKPOINT | NEED_TOKENIZER, &e)) die(&e);
    server.name = access(server.s.name, F_OK) ? server.s.name : basename(server.s.name);
    if (given.name && *given.name) server.name = given.name;
    signal(SIGTERM, take_signal), signal(SIGINT, take_signal);
    struct rlimit files; /* a connection takes one */
    if (!getrlimit(RLIMIT_NOFILE, &files)) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
    struct MHD_Daemon *daemon = start_daemon();
    const Limits limits = {.max_seqs = given.streams, .max_tokens = given.chunk, .cache = given.cache};
    if (session_load(&server.s, limits, given.context, &e)) run_model(&e);
    if (e.code) { /* other threads may still write the error */
        fprintf(stderr, "infer: %s\n", e.text);
        _exit(e.code);
    }
    MHD_stop_daemon(daemon);
    return DONE;
}

static const Option serve_options[] = {
    {0, "host", "ADDRESS", TEXT, &given.host, .initial = "127.0.0.1",
     .help = "where to listen; any but localhost, 127.0.0.1 and ::1 needs a key (INFER_API_KEY)"},
    {0, "port", "N", WHOLE, &given.port, 0, 65535, "8080", "the port; 0: any free one"},
    {0, "insecure", NULL, SWITCH, &given.insecure, .help = "listen on any address without a key"},
    {0, "cors", "ORIGIN", TEXT, &given.cors,
     .help = "web pages of this origin, such as http://localhost:3000, may send requests; *: all pages"},
    {0, "name", "NAME", TEXT, &given.name,
     .help = "what clients call the model (MODEL as given; of a path the last part)"},
    {0, "streams", "N", WHOLE, &given.streams, 1, MOST_STREAMS, "256", "answers at once"},
    {0, "queue", "N", WHOLE, &given.queue, 0, 1 << 16, "64", "answers that may wait beyond those"},
    {0, "ctx", "N", WHOLE, &given.context, 1, 1 << 24,
     .help = "tokens of context (as many as the model and the memory allow)"},
    {0, "cache", "N", WHOLE, &given.cache, 0, 1e9, "0",
     "tokens in the cache, for all answers and kept prefixes together; 0: what fits"},
    {0, "chunk", "N", WHOLE, &given.chunk, 1, 65535, "640",
     "tokens of a step, or 6 for each answer if that is more: longer steps read prompts sooner, but other answers wait "
     "longer for each token"},
    {0}};
const Command serve = {"serve",
                       "[MODEL]",
                       "an API like OpenAI's, for many clients at once, and a page to chat with",
                       {serve_options, load_options},
                       run_serve};
