/* http.c: requests and replies, on libmicrohttpd: endpoints, keys, hosts and origins, limits of time and size. */
#include "serve.h"

#include <netdb.h>
#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* The text of page.html. */
extern const char page_text[];
__asm__(".pushsection .rodata\n.globl page_text\npage_text: .incbin \"serve/page.html\"\n.byte 0\n.popsection\n");

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
static void complete_chat(Request *q) { q->chat = true, complete(q); }

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
void end_request(Request *q) {
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
}

static void request_ended(void *data, struct MHD_Connection *connection, void **state,
                          enum MHD_RequestTerminationCode why) {
    Request *q = *state;
    if (!q) return;
    end_request(q);
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

struct MHD_Daemon *start_daemon(void) {
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
        request_ended, NULL, MHD_OPTION_NOTIFY_CONNECTION, connection_changed, NULL, MHD_OPTION_CONNECTION_TIMEOUT,
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
