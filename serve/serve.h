/* serve.h: what the files of the server share. http.c reads requests and sends replies, request.c takes what a request
 * asks for, serve.c runs the model and the queue, answer.c writes what it says, metrics.c counts.
 *
 * One thread owns the model: it runs the scheduler, and makes text and events of the tokens. Between steps it looks for
 * clients that have left or are too slow. Each connection has its own thread, which reads a request, queues it, waits
 * for its answers and sends them.
 *
 * One lock guards what threads share. The model's thread holds it except while the model computes. A queued request and
 * its choices belong to that thread until no choice is `left`; meanwhile the connection of a stream sends what is in
 * `out`. Then the connection writes a reply that is no stream. */
#ifndef SERVE_H
#define SERVE_H

#include "host.h"

#include <math.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

enum { MOST_BODY = 16 << 20, MOST_HEADERS = 32 << 10, MOST_CHOICES = 128, MOST_STOPS = 64, MOST_TOP = 20 };
enum { READ_SECONDS = 30, WRITE_SECONDS = 60, DRAIN_SECONDS = 30, STALL_SECONDS = 60 };
enum { CHECK_MS = 100, BEAT_MS = 5000, PART = 16 << 10, STACK = 1 << 20, SPARE_CONNECTIONS = 256, BOUNDS = 12 };
enum { CLIENT_LEFT = 499, STATUSES = 600 }; /* as nginx counts it; only a client that ended its sending side sees it */

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

typedef struct { /* the command's options */
    const char *host, *cors, *name;
    int port, streams, queue, cache, chunk, context;
    bool insecure;
} Given;
extern Given given;

typedef struct {
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
} Server;
extern Server server;

static inline void lock(void) { pthread_mutex_lock(&server.lock); }
static inline void unlock(void) { pthread_mutex_unlock(&server.lock); }

/* request.c. Both return false if the request has an error. */
bool is_model(Request *q, const char *name); /* is this the model here? */
bool check_model(Request *q);                /* the request's, if it names one */
bool take_request(Request *q);               /* takes everything but the prompt */
bool make_chat(Request *q);                  /* makes the choices of a chat, */
bool make_completion(Request *q);            /* of texts */
bool flag(Request *q, const cJSON *object, const char *key, bool normal);
/* Takes a prompt, a value of the request's `key`: a text, or an array of token ids. */
bool take_prompt(Request *q, const char *key, const cJSON *prompt, int flags, Ids *ids);

/* answer.c */
void append(cJSON *json, const char *key, cJSON *value); /* to an array of the object, which is made if it is missing */
void put_json(Request *q, cJSON *json);                  /* frees it: an event of a stream, or the whole reply */
void put_error(Request *q);
void put_reply(Request *q, Choice *from, const Choice *to, bool usage); /* or an event, with the choices [from, to) */
void read_token(Choice *c, size_t position, int token, const float *logits, bool last);

/* serve.c. The caller holds the lock, but for complete() and take_token(). */
bool can_answer(Request *q);       /* may an answer begin? */
void wait_for_answers(Request *q); /* for events, or a whole reply */
void complete(Request *q);         /* answers */
void take_token(Stream *t, size_t position, int token, const float *logits, bool last);
bool wait_on(pthread_cond_t *cond, int ms); /* was it signalled in time? */

/* http.c */
void end_request(Request *q);          /* frees all that it has */
struct MHD_Daemon *start_daemon(void); /* listens where --host and --port say, or ends the process */

/* metrics.c */
void observe(Histogram *h, double value);
void metrics(Request *q);

#endif
