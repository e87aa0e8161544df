/* serve.c: an HTTP server that speaks OpenAI's API: the queue, the thread that owns the model, and the command. */
#include "serve.h"

#include <libgen.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

Given given;
Server server = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

/* Waits on a condition. Returns whether it was signalled in time. The caller holds the lock. */
bool wait_on(pthread_cond_t *cond, int ms) {
    const double until = seconds() + ms / 1e3;
    const struct timespec at = {(time_t)until, (long)(fmod(until, 1) * 1e9)};
    return !pthread_cond_clockwait(cond, &server.lock, CLOCK_MONOTONIC, &at);
}

/* ---- waiting for answers ---- */

/* Whether an answer may begin; if not, q->error says why. The caller holds the lock. */
bool can_answer(Request *q) {
    if (!server.ready) return fail(&q->error, 503, "the model is being loaded");
    if (server.error.code) return fail(&q->error, 503, "the model failed: %s", server.error.text);
    return !(server.ends > 0) || fail(&q->error, 503, "the server ends");
}

/* Waits for events, or the end of a reply. A stream that waits long gets a comment. The caller holds the lock. */
void wait_for_answers(Request *q) {
    while (q->written == q->out.n && q->left)
        if (!wait_on(&q->wake, BEAT_MS) && q->stream && q->left)
            bytes_text(&q->out, ": the answer is being computed\n\n");
}

/* Gives the choices to the model's thread, if the queue has room, and waits for a reply that is no stream. */
void complete(Request *q) {
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
void take_token(Stream *t, size_t position, int token, const float *logits, bool last) {
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
/* ---- the command ---- */

/* The first signal lets answers finish, or ends at once if the model still loads. The second one ends at once. */
static void take_signal(int number) {
    static const char text[] = "infer: answers are being finished; a second signal ends at once\n";
    if (server.ends > 0) _exit(INTERRUPTED);
    if (!server.ready) _exit(DONE);
    server.ends = seconds() + DRAIN_SECONDS;
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
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
