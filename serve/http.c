/* http.c: requests and replies, on libmicrohttpd: endpoints, keys, hosts and origins, limits of time, size and number.
 * Where libmicrohttpd cannot read a request, its reply is a page, not JSON. */
#include "serve.h"

#include <arpa/inet.h>
#include <malloc.h>
#include <netdb.h>
#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_HEADERS = 32 << 10, SMALL = 64 << 10 /* a body that always has room */, LARGE = 1 << 20 };
enum { MOST_JSON = 2000000, SPARE_CONNECTIONS = 256, WRITE_SECONDS = 60, PART = 16 << 10, STACK = 1 << 20 };

/* The text of page.html. */
extern const char page_text[];
__asm__(".pushsection .rodata\n.globl page_text\npage_text: .incbin \"serve/page.html\"\n.byte 0\n.popsection\n");

/* ---- endpoints that need no model ---- */

/* The list of models, or the one that the path names. */
static void models(Request *q) {
    const size_t list = strlen(q->endpoint->path);
    LocalText name = text_print("%s", q->url + list + (q->url[list] == '/'));
    const size_t n = MHD_http_unescape(name);
    if (strlen(name) < n) fail(&q->error, 400, "the path holds a NUL");
    while (*name && name[strlen(name) - 1] == '/') name[strlen(name) - 1] = 0;
    if (q->error.code || (*name && !is_model(q, name))) return;
    cJSON *model = json_object("id", json_word(server.name), "object", json_word("model"), "created",
                               json_number((double)server.created), "owned_by", json_word("infer"), "max_model_len",
                               json_number(server.s.engine.context), NULL);
    cJSON *all = *name ? NULL : json_object("object", json_word("list"), NULL);
    if (all) append(all, "data", model);
    put_json(q, all ? all : model);
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

const Endpoint endpoints[ENDPOINTS] = {
    {"POST", "/v1/chat/completions", NULL, ANSWERS, complete},
    {"POST", "/v1/completions", NULL, ANSWERS, complete},
    {"GET", "/v1/models", NULL, 0, models},
    {"GET", "/metrics", "text/plain; version=0.0.4", SPARE, metrics},
    {"POST", "/tokenize", NULL, 0, to_tokens},
    {"POST", "/detokenize", NULL, 0, from_tokens},
    {"GET", "/health", NULL, OPEN | SPARE, health},
    {"GET", "/", "text/html; charset=utf-8", OPEN, page},
};

/* ---- shares: of connections, of memory, of the queue ---- */

/* Connections that an address may have, and all together. */
static int most_of_address(void) { return given.streams + given.queue + SPARE_CONNECTIONS; }
static int most_connections(void) { return 4 * most_of_address(); }

static Client *client_join(uint64_t name) {
    Client *c;
    LIST_FOREACH(c, &server.clients, next) if (c->name == name) break;
    if (!c) {
        c = allocate_zero(1, sizeof *c);
        c->name = name;
        LIST_INSERT_HEAD(&server.clients, c, next);
    }
    c->users++;
    return c;
}

static void client_leave(Client *c) {
    if (!c || --c->users) return;
    LIST_REMOVE(c, next);
    free(c);
}

/* Gives what is free of a share to those who wait for it: first to the client that got none for longest. The caller
 * holds the lock. */
static void give(Share *share) {
    while (true) {
        Request *q, *first = NULL;
        TAILQ_FOREACH(q, &server.requests, next) {
            if (q->waits != share || q->error.code) continue; /* it gives up, and takes nothing */
            if (!first || q->client->part_turn < first->client->part_turn) first = q;
        }
        if (!first || share->taken + first->wants > share->most) return;
        share->taken += first->wants;
        first->waits = NULL;
        first->client->part_turn = ++server.turns;
        pthread_cond_signal(&first->wake);
    }
}

/* Waits for n of a share; so does the client with what it has not sent yet. False: the model's thread gave it up. */
static bool hold(Request *q, Share *share, size_t n) {
    q->deadline = INFINITY;
    MHD_set_connection_option(q->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0);
    lock();
    q->waits = can_answer(q) ? share : NULL;
    q->wants = n;
    give(share);
    while (q->waits && !q->error.code) pthread_cond_wait(&q->wake, &server.lock);
    if (q->waits) q->waits = NULL, give(share);
    unlock();
    MHD_set_connection_option(q->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)WRITE_SECONDS);
    q->deadline = seconds() + READ_SECONDS;
    return !q->error.code;
}

/* Waits until a request of this size may be parsed and tokenised. */
static bool prepare(Request *q, size_t bytes) {
    Share *place = bytes > LARGE ? &server.preparing_large : &server.preparing;
    if (hold(q, place, 1)) q->place = place;
    q->deadline = INFINITY;
    return q->place;
}

void give_back(Request *q, bool memory) {
    if (q->place == &server.preparing_large) malloc_trim(0);
    lock();
    if (q->place) q->place->taken--, give(q->place);
    q->place = NULL;
    if (memory) {
        server.bodies.taken -= q->held;
        q->held = 0;
        give(&server.bodies);
    }
    unlock();
}

/* ---- may this be asked? ---- */

static enum MHD_Result count_header(void *data, enum MHD_ValueKind kind, const char *key, const char *value) {
    int *hosts = data, *lengths = hosts + 1, *odd = hosts + 2;
    const bool encoding = !strcasecmp(key, "Transfer-Encoding");
    *hosts += !strcasecmp(key, "Host");
    *lengths += encoding || !strcasecmp(key, "Content-Length");
    *odd += strpbrk(key, " \t\r") || strchr(value, '\r');
    return MHD_YES;
}

static const char *header(const Request *q, const char *name) {
    return MHD_lookup_connection_value(q->connection, MHD_HEADER_KIND, name);
}

/* The key that the request was sent with, if it is one of the server's. */
static const char *find_key(const Request *q) {
    const char *given = header(q, "Authorization"), *found = NULL;
    const size_t n = given && !strncasecmp(given, "Bearer ", 7) ? strlen(given + 7) : 0;
    for (const char *key = server.keys, *end; n && key; key = *end ? end + 1 : NULL) {
        end = strchrnul(key, ',');
        if ((size_t)(end - key) == n && !CRYPTO_memcmp(given + 7, key, n)) found = given + 7; /* in constant time */
    }
    return found;
}

/* Does --cors allow pages of this origin? A key allows those of apps, whose origins are app://..., tauri://..., too: a
 * browser asks without the key whether a page may send it. */
static bool may_read(const char *origin) {
    bool listed = false;
    for (int i = 0; i < given.cors.n; i++)
        listed |= !strcmp(given.cors.text[i], "*") || !strcasecmp(given.cors.text[i], origin);
    const char *scheme = strstr(origin, "://");
    return listed || (server.keys && scheme && strncasecmp(origin, "http", 4));
}

/* May a page send requests under this Host? Where neither a key nor --insecure says that others may, another site must
 * not reach us by a name of its own (DNS rebinding). A client that sends no Host, as HTTP/1.0 allows, is no browser. A
 * browser's Origin says which page sends the request: it must be ours, or one that --cors allows, or know a key. */
static bool may_ask(const Request *q, const char *host, const char *origin) {
    const char *const local[] = {"localhost", "127.0.0.1", "[::1]", given.host};
    const char *page = origin ? strstr(origin, "://") : NULL;
    bool known = server.keys || given.insecure || !host;
    for (int i = 0; i < 4 && !known; i++) {
        const size_t n = strlen(local[i]);
        known = !strncasecmp(host, local[i], n) && (!host[n] || host[n] == ':');
    }
    return known && (!origin || q->key || may_read(origin) || (page && host && !strcasecmp(page + 3, host)));
}

/* Finds the endpoint of a path, which may end in slashes. Refuses unknown paths, and methods that it does not have. */
static bool find_endpoint(Request *q, const char *method) {
    const char *as = strcmp(method, "HEAD") ? method : "GET";
    size_t n = strlen(q->url);
    while (n > 1 && q->url[n - 1] == '/') n--;
    const char *path = strncmp(q->url, "/v1/models/", 11) ? q->url : "/v1/models"; /* the list, or one */
    if (path != q->url) n = strlen(path);
    for (int i = 0; i < ENDPOINTS; i++)
        if (strlen(endpoints[i].path) == n && !strncmp(endpoints[i].path, path, n)) q->endpoint = endpoints + i;
    if (!q->endpoint) return fail(&q->error, 404, "there is no %.20s %.100s here", method, q->url);
    return !strcmp(q->endpoint->method, as) ||
           fail(&q->error, 405, "%s takes %s, not %.20s", q->endpoint->path, q->endpoint->method, method);
}

/* Finds the endpoint. Refuses what libmicrohttpd lets through: requests that can be read in two ways, and those that
 * are not allowed. False: where its body would end is unknown, so the connection ends. */
static bool check_request(Request *q, const char *method, const char *version) {
    const char *encoding = header(q, "Transfer-Encoding"), *length = header(q, "Content-Length");
    const bool preflight = !strcmp(method, "OPTIONS") && header(q, "Origin") && may_read(header(q, "Origin"));
    int count[3] = {0}; /* Host, lengths, headers that a proxy may read otherwise */
    Error *e = &q->error;
    MHD_get_connection_values(q->connection, MHD_HEADER_KIND, count_header, count);
    q->key = find_key(q);
    if (count[2] || count[1] > 1 || count[0] > 1 || (count[0] < 1 && !strcmp(version, "HTTP/1.1")))
        return fail(e, 400,
                    "the headers can be read in two ways: send one Host, at most one Content-Length or "
                    "Transfer-Encoding: chunked, and no blank in a name");
    if (encoding && strcasecmp(encoding, "chunked"))
        return fail(e, 501, "Transfer-Encoding must be chunked, not %.40s", encoding);
    if (MHD_get_connection_info(q->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE)->header_size > MOST_HEADERS)
        return fail(e, 431, "the headers have more than %d bytes", MOST_HEADERS);
    if (!may_ask(q, header(q, "Host"), header(q, "Origin"))) {
        fail(e, 403, "this page or host may not send requests; see infer serve --help, --cors");
        return true;
    }
    if (preflight || !find_endpoint(q, method)) return true;
    const char *key = q->key ? q->key : "";
    lock();
    q->client = client_join(text_hash(q->address->name, key, strlen(key) + 1)); /* never the address's own name */
    if (!(q->endpoint->is & OPEN) && server.keys && !q->key)
        fail(e, 401, "Incorrect API key provided, or none: send it as Authorization: Bearer KEY");
    else if (!(q->endpoint->is & SPARE) && q->address->users > most_of_address())
        fail(e, 503, "your address has %d connections: close some", q->address->users);
    else if (!(q->endpoint->is & SPARE) && server.connections > most_connections())
        fail(e, 503, "the server has %d connections: try again", server.connections);
    else if (!(q->endpoint->is & OPEN) && !server.ready)
        fail(e, 503, "the model is being loaded");
    else if (length && strtod(length, NULL) > MOST_BODY)
        fail(e, 413, "the body has more than %d bytes", MOST_BODY);
    else if (q->endpoint->is & ANSWERS && can_answer(q))
        has_place(q, 1);
    unlock();
    return true;
}

/* ---- replies ---- */

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
    q->status = wrong ? (unsigned)q->error.code : 200;
    const char *type = q->stream ? "text/event-stream" : q->endpoint && !wrong ? q->endpoint->type : NULL;
    const char *wanted = header(q, "Access-Control-Request-Headers"), *origin = header(q, "Origin");
    if (wrong) q->out.n = 0, put_error(q);
    struct MHD_Response *r =
        MHD_create_response_from_callback(q->stream ? MHD_SIZE_UNKNOWN : q->out.n, PART, write_part, q, NULL);
    MHD_add_response_header(r, "Content-Type", type ? type : "application/json");
    MHD_add_response_header(r, "X-Request-Id", q->trace);
    if (q->stream) /* else nginx would hold events back */
        MHD_add_response_header(r, "Cache-Control", "no-cache"), MHD_add_response_header(r, "X-Accel-Buffering", "no");
    if (origin && may_read(origin)) { /* a page */
        const bool all = given.cors.n == 1 && !strcmp(*given.cors.text, "*");
        MHD_add_response_header(r, "Access-Control-Allow-Origin", all ? "*" : origin);
        MHD_add_response_header(r, "Access-Control-Expose-Headers", "Retry-After, X-Request-Id");
        if (!all) MHD_add_response_header(r, "Vary", "Origin");
        if (wanted) MHD_add_response_header(r, "Access-Control-Allow-Headers", wanted);
    }
    if (q->status == 429 || q->status == 503) {
        lock();
        LocalText wait = text_print("%d", retry_after());
        unlock();
        MHD_add_response_header(r, "Retry-After", wait);
    }
    if (q->status == 405)
        MHD_add_response_header(r, "Allow", strcmp(q->endpoint->method, "GET") ? "POST" : "GET, HEAD");
    if (q->status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (q->status >= 400) MHD_add_response_header(r, "Connection", "close");
    enum MHD_Result result = MHD_queue_response(q->connection, q->status, r);
    MHD_destroy_response(r);
    return result;
}

/* ---- requests ---- */

/* Takes the client's name for the request if it is a word, else makes one. */
static void name_request(Request *q) {
    const char *id = header(q, "X-Request-Id");
    const size_t n = id ? strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-") : 0;
    uint64_t bits;
    if (getentropy(&bits, sizeof bits)) bits = (uint64_t)(seconds() * 1e9);
    if (n && n < sizeof q->trace && !id[n])
        memcpy(q->trace, id, n);
    else
        snprintf(q->trace, sizeof q->trace, "%016llx", (unsigned long long)bits);
}

/* Adds a part of the body, and takes memory for all of it when it is no small one. */
static void take_part(Request *q, const char *part, size_t n) {
    const char *length = header(q, "Content-Length");
    if (q->body.n + n > MOST_BODY) fail(&q->error, 413, "the body has more than %d bytes", MOST_BODY);
    if (q->endpoint && !q->error.code && q->body.n + n > SMALL && !q->held) {
        const size_t all = length ? (size_t)strtod(length, NULL) : MOST_BODY;
        if (hold(q, &server.bodies, all)) {
            q->held = all;
            q->body.data = reallocate(q->body.data, q->body.room = all + 1);
        }
    }
    if (!q->error.code) bytes_add(&q->body, part, n);
    if (q->error.code) bytes_free(&q->body);
}

/* How many values a JSON text has at most: each takes memory. */
static size_t count_values(const Bytes *text) {
    size_t values = 1;
    bool quoted = false;
    for (size_t i = 0; i < text->n; i++) {
        const char c = text->data[i];
        if (quoted && c == '\\')
            i++;
        else if (c == '"')
            quoted = !quoted;
        else
            values += !quoted && (c == ',' || c == '[' || c == '{');
    }
    return values;
}

/* The body is here. */
static void run_request(Request *q) {
    const bool body = !strcmp(q->method, "POST");
    if (q->error.code || !q->endpoint) return; /* or a browser asks whether a page may send a request */
    if (body && count_values(&q->body) > MOST_JSON) fail(&q->error, 413, "the body has more than %d values", MOST_JSON);
    if (body && !q->error.code && prepare(q, q->body.n))
        q->json = json_parse(q->body.n ? q->body.data : "", q->body.n, "the body", &q->error);
    if (q->json && !cJSON_IsObject(q->json)) fail(&q->error, 400, "the body is not a JSON object");
    bytes_free(&q->body);
    if (!q->error.code && (!body || check_fields(q))) q->endpoint->run(q);
    if (!q->error.code) give_back(q, false);
}

/* libmicrohttpd calls it when the headers are here, for each part of the body, and at its end. */
static enum MHD_Result handle(void *data, struct MHD_Connection *connection, const char *url, const char *method,
                              const char *version, const char *upload, size_t *size, void **state) {
    Request *q = *state;
    if (!q) {
        *state = q = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
        const char *host = *url == '/' ? NULL : strstr(url, "://"); /* as a proxy is asked */
        q->method = method;
        q->url = host ? strchrnul(host + 3, '/') : url; /* libmicrohttpd keeps it as long as the request */
        q->began = seconds();
        q->deadline = q->began + READ_SECONDS;
        name_request(q);
        const bool sound = check_request(q, method, version);
        return !sound || (q->error.code && header(q, "Expect")) ? respond(q) : MHD_YES; /* it waits with the body */
    }
    if (*size) { /* also reads the rest of a refused request, so that the client gets to the reply */
        take_part(q, upload, *size);
        *size = 0;
        return MHD_YES;
    }
    q->deadline = INFINITY;
    q->since = seconds();
    run_request(q);
    return respond(q);
}

void end_request(Request *q) {
    lock();
    fail(&q->error, CLIENT_LEFT, "the client has left");
    while (q->left) pthread_cond_wait(&q->wake, &server.lock);
    q->queued = false;
    client_leave(q->client);
    unlock();
    for (Choice *c = q->choice; c && c < q->choice + q->choices; c++) {
        bytes_free(&c->text), bytes_free(&c->thoughts);
        cJSON_Delete(c->calls), cJSON_Delete(c->scores);
        if (c->stream.rule) keeping->drop(c->stream.rule);
        ids_free(&c->stream.tokens);
        reader_free(&c->reader);
    }
    bytes_free(&q->body), bytes_free(&q->out);
    cJSON_Delete(q->json), cJSON_Delete(q->names);
    free(q->choice), free(q->bias);
    give_back(q, true);
    memset(&q->endpoint, 0, sizeof *q - offsetof(Request, endpoint));
}

/* Ends a request, however that comes. Only now the status of a stream is known. */
static void request_ended(void *data, struct MHD_Connection *connection, void **state,
                          enum MHD_RequestTerminationCode why) {
    Request *q = *state;
    if (!q) return;
    lock();
    if (q->stream && q->error.code) q->status = (unsigned)q->error.code;
    if (!q->status || why != MHD_REQUEST_TERMINATED_COMPLETED_OK) q->status = CLIENT_LEFT;
    LocalText line = log_line(q);
    unlock();
    if (line) fprintf(stderr, "%s\n", line); /* stderr may block */
    end_request(q);
    q->deadline = seconds() + READ_SECONDS;
    *state = NULL;
}

static void connection_changed(void *data, struct MHD_Connection *connection, void **context,
                               enum MHD_ConnectionNotificationCode what) {
    Request *q = *context, *slow;
    lock();
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const struct sockaddr *a = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr;
        const bool v6 = a->sa_family == AF_INET6;
        const void *ip = v6 ? (void *)&((struct sockaddr_in6 *)a)->sin6_addr : &((struct sockaddr_in *)a)->sin_addr;
        *context = q = allocate_zero(1, sizeof *q);
        q->connection = connection;
        q->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        q->deadline = seconds() + READ_SECONDS;
        q->address = client_join(text_hash(HASH_OF_NONE, ip, v6 ? 8 : 4)); /* v6: of a network */
        inet_ntop(a->sa_family, ip, q->from, sizeof q->from);
        pthread_cond_init(&q->wake, NULL);
        TAILQ_FOREACH(slow, &server.requests, next) if (slow->deadline < INFINITY) break;
        if (++server.connections > most_connections() && slow) shutdown(slow->fd, SHUT_RDWR); /* makes room */
        TAILQ_INSERT_TAIL(&server.requests, q, next);
    } else if (q) {
        server.connections--;
        client_leave(q->address);
        TAILQ_REMOVE(&server.requests, q, next);
        pthread_cond_destroy(&q->wake);
        free(q);
    }
    unlock();
}

/* Paths stay as they were sent, so that %2F is no slash. */
static size_t leave_escaped(void *data, struct MHD_Connection *connection, char *text) { return strlen(text); }

struct MHD_Daemon *start_daemon(void) {
    Error e;
    struct addrinfo *to = NULL;
    LocalText port = text_print("%d", given.port);
    int error =
        getaddrinfo(given.host, port, &(struct addrinfo){.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, &to);
    if (error) fail(&e, USAGE, "--host %.100s: %s", given.host, gai_strerror(error)), die(&e);
    if (!text_listed("localhost 127.0.0.1 ::1", given.host) && !server.keys && !given.insecure)
        fail(&e, USAGE, "--host %.100s needs a key (INFER_API_KEY) or --insecure: others may reach it", given.host),
            die(&e);
    const bool v6 = to->ai_family == AF_INET6;
    struct MHD_Daemon *d = MHD_start_daemon(
        MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_THREAD_PER_CONNECTION | (v6 ? MHD_USE_IPv6 : MHD_NO_FLAG),
        (uint16_t)given.port, NULL, NULL, handle, NULL, MHD_OPTION_SOCK_ADDR, to->ai_addr, MHD_OPTION_NOTIFY_COMPLETED,
        request_ended, NULL, MHD_OPTION_NOTIFY_CONNECTION, connection_changed, NULL, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)WRITE_SECONDS, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)2 * MOST_HEADERS,
        MHD_OPTION_THREAD_STACK_SIZE, (size_t)STACK, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)(most_connections() + SPARE_CONNECTIONS), MHD_OPTION_UNESCAPE_CALLBACK, leave_escaped, NULL,
        MHD_OPTION_END);
    if (!d)
        fail(&e, FAILED, "%.100s port %d: %m; choose another with --host or --port", given.host, given.port), die(&e);
    freeaddrinfo(to);
    const bool number = strchr(given.host, ':');
    fprintf(stderr, number ? "infer: %s on http://[%s]:%d\n" : "infer: %s on http://%s:%d\n", server.name, given.host,
            MHD_get_daemon_info(d, MHD_DAEMON_INFO_BIND_PORT)->port);
    return d;
}
