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

enum { MOST_BODY = 16 << 20, MOST_CHOICES = 128, MOST_STOPS = 64, MOST_STOP = 4096, MOST_TOP = 20 };
enum { READ_SECONDS = 30, WAIT_SECONDS = 600, STALL_SECONDS = 60, CHECK_MS = 100, BEAT_MS = 5000, BOUNDS = 16 };
enum { CLIENT_LEFT = 499, STATUSES = 600 }; /* as nginx counts it; only a client that ended its sending side sees it */

typedef struct Request Request;

typedef struct Client { /* an address, or a key at an address; under the lock */
    LIST_ENTRY(Client) next;
    uint64_t name;     /* a hash */
    int users;         /* its connections, or requests */
    int live, running; /* answers that have not ended; those of them that the scheduler has */
    size_t turn;       /* Server.turns when it last got one of those */
    size_t part_turn;  /* and when it last got a part of a share */
} Client;

typedef struct { /* what requests take parts of, in turn; under the lock */
    size_t taken, most;
} Share;

typedef struct { /* one of the answers to a request */
    Stream stream;
    Request *request;
    double last;   /* when the last token came, or else the request */
    bool begun;    /* the scheduler has computed something of it */
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
    enum {
        OPEN = 1,  /* served without a key, and while the model loads */
        SPARE = 2, /* served even to an address with too many connections */
        ANSWERS = 4
    } is;
    void (*run)(Request *q); /* writes q->out, or notes an error */
} Endpoint;
enum { ENDPOINTS = 8 };
extern const Endpoint endpoints[ENDPOINTS];

struct Request { /* a connection and its request */
    TAILQ_ENTRY(Request) next;
    struct MHD_Connection *connection;
    int fd;
    pthread_cond_t wake;
    Client *address;
    char from[48];            /* the same as a text */
    _Atomic double deadline;  /* when the client must have sent its request; INFINITY once it has */
    bool queued;              /* under the lock: accepted, and the reply is not sent yet */
    int left;                 /* under the lock: choices that have not ended */
    const Endpoint *endpoint; /* this and all below are 0 between two requests */
    Client *client;           /* whose share of the queue it takes */
    const char *method, *url; /* url: as it was sent, without a query */
    char trace[72];           /* its id in the log and the header X-Request-Id */
    const char *key;          /* that it was sent with, or NULL */
    double began;             /* when its headers had arrived */
    unsigned status;          /* of the reply */
    Bytes body;
    size_t held, wants;   /* of Server.bodies; of the share it waits for */
    Share *waits, *place; /* waits: for its part of this share. place: it is one of Server.preparing or
                             .preparing_large. Or NULL */
    cJSON *json, *names;  /* names: from a function's name as the model reads it to the client's; NULL: it has none */
    const char *code,
        *param;   /* of the error, or NULL; param: the field at fault if its message does not begin with it */
    double since; /* when it had arrived */
    /* parameters */
    bool chat, stream, echo, usage, skip_special, ignore_eos, parallel; /* parallel: several calls in an answer */
    int n, tokens, top; /* answers to each prompt; tokens of an answer; logprobs for each token, or -1 */
    int answers;        /* to all prompts */
    Sampling sampling;
    uint64_t salt; /* see Stream */
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
    const char *host, *name, *log;
    Texts cors;
    int port, streams, queue, cache, chunk, context, drain;
    bool insecure;
} Given;
extern Given given;

typedef struct {
    Session s;
    const char *name, *keys; /* as clients call the model; what they must send one of, separated by commas, or NULL */
    char fingerprint[24];    /* of the model's files and this program */
    long long created;       /* when the model's files were, in seconds since 1970 */
    size_t most_bytes;       /* of a text that fits the context */
    atomic_bool ready;       /* the model is loaded */
    _Atomic double ends;     /* after a signal: when answers that are not finished are given up; else 0 */
    pthread_mutex_t lock;
    pthread_cond_t work; /* for the model's thread */
    /* under the lock */
    TAILQ_HEAD(, Request) requests; /* of all connections */
    LIST_HEAD(, Client) clients;
    int connections;
    Share bodies;                     /* bytes reserved for large bodies */
    Share preparing, preparing_large; /* requests that are parsed and tokenised */
    int live;                         /* choices that have not ended */
    size_t turns;                     /* choices that the scheduler got so far, and parts of shares that were given */
    Error error;                      /* why no more answers come */
    double moved;                     /* when the model's thread was last between steps */
    SchedulerState state;
    double usual; /* seconds from a request to the end of an answer, lately */
    Histogram to_first_token, per_token, to_end, queued;
    size_t count[ENDPOINTS + 1][STATUSES]; /* replies of each; the last endpoint: none that there is */
    size_t finished[5];                    /* answers by finish_reason, see metrics.c */
    size_t prompt, reused, generated, repairs, nans;
} Server;
extern Server server;

static inline void lock(void) { pthread_mutex_lock(&server.lock); }
static inline void unlock(void) { pthread_mutex_unlock(&server.lock); }

/* request.c. They return false if the request has an error. */
bool is_model(Request *q, const char *name); /* is this the model here? */
bool check_fields(Request *q); /* its model, if it names one, and that each field is one of its endpoint's */
bool take_request(Request *q); /* takes everything but the prompt, and counts its choices */
bool make_choices(Request *q);
void to_tokens(Request *q);
void from_tokens(Request *q);

/* answer.c */
void append(cJSON *json, const char *key, cJSON *value); /* to an array of the object, which is made if it is missing */
void put_json(Request *q, cJSON *json);                  /* frees it: an event of a stream, or the whole reply */
void put_error(Request *q);
void put_reply(Request *q, Choice *from, const Choice *to, bool usage); /* or an event, with the choices [from, to) */
void read_token(Choice *c, size_t position, int token, const float *logits, bool last);

/* serve.c. The caller holds the lock, but for complete() and take_token(). */
bool can_answer(Request *q);             /* may an answer begin? */
bool has_place(Request *q, int choices); /* is there room in the queue? */
int retry_after(void);                   /* seconds until the answers that wait now have probably begun */
void wait_for_answers(Request *q);       /* for events, or a whole reply */
void complete(Request *q);               /* answers */
void take_token(Stream *t, size_t position, int token, const float *logits, bool last);

/* http.c */
/* Gives back its place, where it was parsed and tokenised, and, if nothing as large as its body is left, the memory. */
void give_back(Request *q, bool memory);
void end_request(Request *q);          /* frees all that it has */
struct MHD_Daemon *start_daemon(void); /* listens where --host and --port say, or ends the process */

/* metrics.c; the caller holds the lock, but for metrics() */
void observe(Histogram *h, double value);
void count_answer(const Choice *c);
char *log_line(const Request *q); /* counts it; NULL: --log wants no line. Free it */
void metrics(Request *q);

#endif
