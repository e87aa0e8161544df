/* serve.c: an HTTP server that speaks OpenAI's API: the queue, the thread that owns the model, and the command. */
#include "serve.h"

#include <libgen.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { AHEAD = 8 /* answers that wait in the scheduler, where nobody overtakes them */ };
enum { GRACE_SECONDS = 2 /* for replies after the last answer; after SIGTERM at most half of --drain */ };

Given given;
/* Large bodies share 64 MB. Four requests are parsed and tokenised at once, of large ones only one, because that takes
 * many times its size. */
Server server = {.lock = PTHREAD_MUTEX_INITIALIZER,
                 .work = PTHREAD_COND_INITIALIZER,
                 .bodies.most = 4 * MOST_BODY,
                 .preparing.most = 4,
                 .preparing_large.most = 1};

/* Was it signalled in time? */
static bool wait_on(pthread_cond_t *cond, int ms) {
    const double until = seconds() + ms / 1e3;
    const struct timespec at = {(time_t)until, (long)(fmod(until, 1) * 1e9)};
    return !pthread_cond_clockwait(cond, &server.lock, CLOCK_MONOTONIC, &at);
}

/* Has its client? */
static bool has_left(const Request *q) {
    struct pollfd p = {.fd = q->fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0;
}

/* ---- the queue ---- */

bool can_answer(Request *q) {
    if (!server.ready) return fail(&q->error, 503, "the model is being loaded");
    if (server.error.code) return fail(&q->error, 503, "the model failed: %s", server.error.text);
    return !(server.ends > 0) || fail(&q->error, 503, "the server ends");
}

/* The last quarter of the queue is for clients that have no answer in it yet. */
bool has_place(Request *q, int choices) {
    const int all = given.streams + given.queue, most = all - (q->client->live ? given.queue / 4 : 0);
    if (choices > all)
        return fail(&q->error, 400, "this server takes %d answers at once, not %d: ask for fewer", all, choices);
    return server.live + choices <= most ||
           fail(&q->error, 429, "%d answers are being written or wait, %d of them yours: try again", server.live,
                q->client->live);
}

int retry_after(void) {
    const double running = fmax((double)server.state.running, 1), waiting = fmax(server.live - running, 0);
    const double wait = server.ends > 0 ? server.ends - seconds() : server.usual * waiting / running;
    return (int)fmin(fmax(ceil(wait), 1), 60);
}

/* Waits for events, or the end of a reply. A stream that waits long gets a comment. */
void wait_for_answers(Request *q) {
    while (q->written == q->out.n && q->left)
        if (!wait_on(&q->wake, BEAT_MS) && q->stream && q->left)
            bytes_text(&q->out, ": the answer is being computed\n\n");
}

/* Takes places in the queue, or gives them back. */
static void take_places(Request *q, int n) { server.live += n, q->client->live += n; }

/* Asks the queue, makes the choices, gives them to the model's thread, and waits for a reply that is no stream. */
void complete(Request *q) {
    const bool wanted = take_request(q);
    lock();
    const int places = wanted && can_answer(q) && has_place(q, q->answers) ? q->answers : 0;
    take_places(q, places);
    unlock();
    const bool made = places && make_choices(q);
    if (made) give_back(q, true);
    MHD_set_connection_option(q->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0); /* now the client waits for us */
    lock();
    if (made) can_answer(q);
    q->queued = !q->error.code;
    q->left = q->queued ? q->choices : 0;
    take_places(q, q->left - places);
    pthread_cond_signal(&server.work);
    q->stream &= q->queued; /* an error is an ordinary reply */
    if (!q->stream) wait_for_answers(q);
    unlock();
    MHD_set_connection_option(q->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)STALL_SECONDS);
    if (!q->stream && !q->error.code) put_reply(q, q->choice, q->choice + q->choices, true);
}

/* ---- the model's thread ---- */

/* Ends a choice, and with the last one a stream. The caller holds the lock. */
static void let_go(Choice *c) {
    Request *q = c->request;
    scheduler_remove(server.s.scheduler, &c->stream);
    if (!c->finish) c->finish = "error";
    count_answer(c);
    q->client->running -= c->stream.owner != NULL;
    take_places(q, -1);
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
    } else if (t->stuck) {
        fail(&q->error, 400, "the schema or pattern %s", t->stuck);
    } else {
        fail(&q->error, 500, "the logits hold a NaN: the weights or config.json are damaged");
        server.nans++;
    }
    if (q->stream && (c->shown > c->sent || c->thoughts.n || c->calls || c->finish)) put_reply(q, c, c + 1, false);
    if (last || c->finish) let_go(c);
    if (q->out.n > q->written) pthread_cond_signal(&q->wake);
    unlock();
}

/* May the scheduler have it? The first answer to a prompt reads it, and the others join when the first has a token. */
static bool is_due(const Choice *c) {
    const Choice *reads = c - (c - c->request->choice) % c->request->n;
    return !c->finish && !c->stream.owner && (reads == c || reads->stream.published > reads->stream.prompt);
}

/* Is the turn with a's client before b's? The one with fewer answers in the scheduler, or which waited longer. */
static bool comes_first(const Request *a, const Request *b) {
    if (a->client->running != b->client->running) return a->client->running < b->client->running;
    return a->client->turn != b->client->turn ? a->client->turn < b->client->turn : a->since < b->since;
}

/* The next choice for the scheduler, or NULL. */
static Choice *next_choice(void) {
    Choice *best = NULL;
    Request *q;
    TAILQ_FOREACH(q, &server.requests, next) {
        if (!q->left || (best && !comes_first(q, best->request))) continue;
        Choice *c = q->choice, *end = c + q->choices;
        while (c < end && !is_due(c)) c++;
        if (c < end) best = c;
    }
    return best;
}

/* Cuts off clients that are too slow. Ends choices and waits of requests that have an error, for example because its
 * client has left. Adds new choices to the scheduler. Returns whether a queued request still waits for its reply. The
 * caller holds the lock. */
static bool update_requests(void) {
    bool busy = false;
    Request *q;
    Choice *c;
    server.moved = seconds();
    TAILQ_FOREACH(q, &server.requests, next) {
        if (server.moved > q->deadline) shutdown(q->fd, SHUT_RDWR);
        busy |= q->queued;
        if (!q->left && !q->waits) continue;
        if (server.error.code) fail(&q->error, 500, "%s", server.error.text);
        if (q->waits && can_answer(q) && server.moved - q->began > WAIT_SECONDS)
            fail(&q->error, 503, "too many large requests came at once: try again");
        if (has_left(q)) fail(&q->error, CLIENT_LEFT, "the client has left");
        if (q->waits && q->error.code) pthread_cond_signal(&q->wake);
        for (c = q->choice; c < q->choice + q->choices; c++) {
            if (!c->begun && c->stream.pages.n) observe(&server.queued, server.moved - q->since), c->begun = true;
            if (!c->finish && q->error.code) let_go(c);
        }
    }
    server.state = scheduler_state(server.s.scheduler);
    size_t *waiting = &server.state.waiting, running = server.state.running;
    while (*waiting < AHEAD && running + *waiting < (size_t)given.streams && (c = next_choice())) {
        c->stream.owner = c; /* from now on the scheduler has or had it */
        c->request->client->running++;
        c->request->client->turn = ++server.turns;
        scheduler_add(server.s.scheduler, &c->stream);
        ++*waiting;
    }
    return busy;
}

/* Runs steps until the server ends or the model fails with an error. Either way every request gets its reply, if
 * its client takes it in time. */
static void run_model(Error *e) {
    e->code = 0;
    lock();
    server.ready = true;
    LocalText ready = text_print("ready, for texts of up to %s tokens", COUNT((uint64_t)server.s.engine.context));
    put_text(stderr, NULL, "infer: ", ready);
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
    for (double since = seconds(); update_requests() && seconds() - since < GRACE_SECONDS;)
        wait_on(&server.work, CHECK_MS);
    unlock();
}

/* ---- the command ---- */

static void give_up(int number) { _exit(DONE); }

/* The first signal lets answers finish, or ends at once if the model still loads. The second one ends at once. Threads
 * that parse or tokenise cannot be stopped, so an alarm ends the process whatever they do. */
static void take_signal(int number) {
    static const char text[] = "infer: finishing answers; ^C ends now\n";
    if (server.ends > 0) _exit(INTERRUPTED);
    if (!server.ready || !given.drain) _exit(DONE);
    server.ends = seconds() + given.drain - fmin(given.drain / 2.0, GRACE_SECONDS);
    alarm((unsigned)given.drain);
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
}

/* Sets what names the model and this program: a hash of its tensors' names and first bytes, and of the program's
 * time. */
static void name_model(void) {
    const Tensors *tensors = &server.s.checkpoint.tensors;
    struct stat program = {0}, model = {0};
    uint64_t hash = HASH_OF_NONE;
    server.name = access(server.s.name, F_OK) ? server.s.name : basename(server.s.name);
    if (given.name && *given.name) server.name = given.name;
    for (const Tensor *t = tensors->tensor; t < tensors->tensor + tensors->n; t++) {
        hash = text_hash(hash, t->name, strlen(t->name));
        if (t->data) hash = text_hash(hash, (const char *)t->data, t->size < 64 ? t->size : 64);
    }
    stat("/proc/self/exe", &program), stat(server.s.dir, &model);
    hash = text_hash(hash, (const char *)&program.st_mtim, sizeof program.st_mtim);
    snprintf(server.fingerprint, sizeof server.fingerprint, "fp_%016llx", (unsigned long long)hash);
    server.created = model.st_mtim.tv_sec;
}

static void check_options(void) {
    Error e;
    for (int i = 0; i < given.cors.n; i++) {
        const char *origin = given.cors.text[i];
        int n = 0; /* the length of the origin that it begins with */
        sscanf(origin, "%*[a-zA-Z0-9+.-]://%*[^/?#@,* \t]%n", &n);
        if (!text_listed("* null", origin) && (!n || origin[n])) /* null: of pages in files */
            fail(&e, USAGE, "--cors must be * or an origin such as http://localhost:3000, not '%.100s'", origin),
                die(&e);
    }
    if (!text_listed("off errors all", given.log))
        fail(&e, USAGE, "--log must be off, errors or all, not '%.100s'", given.log), die(&e);
    for (const char *c = server.keys ? server.keys : ""; *c; c++)
        if (*c <= ' ' || *c > '~' || (*c == ',' && (c == server.keys || !c[1] || c[1] == ',')))
            fail(&e, USAGE, "INFER_API_KEY must be a key without blanks, or several with commas between them"), die(&e);
}

static int run_serve(const char *model) {
    Error e;
    TAILQ_INIT(&server.requests);
    server.keys = environment("INFER_API_KEY");
    check_options();
    if (!session_open(&server.s, model, NEED_CHECKPOINT | NEED_TOKENIZER, &e)) die(&e);
    name_model();
    signal(SIGTERM, take_signal), signal(SIGINT, take_signal), signal(SIGALRM, give_up);
    mallopt(M_ARENA_MAX, 4), mallopt(M_MMAP_THRESHOLD, 1 << 20); /* what large requests took goes back to the system */
    struct rlimit files;                                         /* a connection takes one */
    if (!getrlimit(RLIMIT_NOFILE, &files)) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
    struct MHD_Daemon *daemon = start_daemon();
    const Limits limits = {.max_seqs = given.streams, .max_tokens = given.chunk, .cache = given.cache};
    if (session_load(&server.s, limits, given.context, &e)) {
        server.most_bytes = tokenizer_room(server.s.tokenizer, (size_t)server.s.engine.context);
        run_model(&e);
    }
    if (e.code) { /* other threads may still write the error */
        put_text(stderr, NULL, "infer: ", e.text);
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
    {0, "cors", "ORIGIN", TEXTS, &given.cors, .most = MOST_VALUES,
     .help = "web pages of this origin, such as http://localhost:3000, may send requests; *: all pages; can be "
             "repeated"},
    {0, "name", "NAME", TEXT, &given.name,
     .help = "what clients call the model (MODEL as given; of a path the last part)"},
    {0, "log", "WHICH", TEXT, &given.log, .initial = "errors",
     .help = "requests to log on stderr, a line each: off, errors or all"},
    {0, "streams", "N", WHOLE, &given.streams, 1, MOST_STREAMS, "256", "answers at once"},
    {0, "queue", "N", WHOLE, &given.queue, 0, 1 << 16, "64", "answers that may wait beyond those"},
    {0, "drain", "SECONDS", WHOLE, &given.drain, 0, 3600, "30", "seconds after SIGTERM to finish answers and end in"},
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
                       {serve_options, load_options, chat_options},
                       run_serve};
