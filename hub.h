/* hub.h: requests to a model hub: what goes over the wire. It hides libcurl, redirects, tokens, back-off, and turns
 * refusals into messages that name the page to open. Several requests run at once in one thread. */
#ifndef HUB_H
#define HUB_H

#include "base.h"

enum { MOST_HEADER_TEXT = 2048 };
/* what is read of an answer's head */
enum { LINK, ERROR_CODE, REPO_COMMIT, LINKED_ETAG, LINKED_SIZE, CONTENT_RANGE, HEADERS };

typedef struct Hub Hub;
typedef struct Request Request;
struct Request { /* one GET, over redirects and retries, until it has all bytes or an error. Zero it and fill in: */
    char *url;   /* at the endpoint; freed with the request */
    uint64_t from, to; /* which bytes, [from, to); to 0: all there are */
    Bytes *body;       /* takes a small answer of at most `most` bytes; or `sink` gets the bytes that lie at `at` */
    size_t most;
    bool (*sink)(Request *, uint64_t at, const char *data, size_t n); /* false ends the request; tries = 0: progress */
    void *owner;
    char **direct;           /* where the content host signed this file, shared by its requests, or NULL */
    const char *commit, *id; /* what the hub's headers must not contradict, or NULL, */
    uint64_t size;           /* of the whole file, or 0 */
    int most_tries;          /* 0: the usual */

    /* the answer */
    bool whole;   /* the server ignores ranges: the bytes come from 0 on */
    bool dropped; /* the sink needs no more of it: no error */
    long status;
    char header[HEADERS][MOST_HEADER_TEXT];
    Error e; /* e.code 0: all went well */

    /* of hub.c */
    void *easy, *headers;
    char *now;            /* where it is asked after redirects */
    uint64_t at, skipped; /* the next byte; those of a page that nobody reads */
    char problem[256];
    int redirects, tries;
    double when; /* it may begin */
    bool running, at_hub;
};

/* Endpoint and token from the environment, the token from `token_file` if that is not NULL. One at a time: while it is
 * open Ctrl+C does not end the process but every wait for the hub. */
Hub *hub_open(const char *token_file, Error *e);
void hub_close(Hub *h);
/* Messages speak of this repository and revision; `say` shows a line to the user. */
void hub_about(Hub *h, const char *repository, const char *revision, void (*say)(void *, const char *), void *data);
const char *hub_endpoint(const Hub *h);
const char *hub_token(const Hub *h); /* where it was found, never the token itself; or NULL */
bool hub_offline(void);              /* HF_HUB_OFFLINE forbids the network */
bool hub_same_origin(const Hub *h, const char *url);
/* Appends the endpoint and a path; %-escapes what a URL cannot hold, and a slash where it is text. */
void hub_url(const Hub *h, Bytes *url, const char *path);
void url_escape(Bytes *url, const char *text, bool slash_too);
/* Undoes it in place; false if there is a NUL. */
bool url_unescape(char *text);

void hub_start(Hub *h, Request *r);
/* Works for at most `milliseconds`; returns a request that has ended, well or not, or NULL. */
Request *hub_step(Hub *h, int milliseconds);
void hub_wake(Hub *h); /* from any thread: ends a step early */
void request_free(Hub *h, Request *r);
/* One small answer; no other request may be running. link: (MOST_HEADER_TEXT) or NULL; once: no second try. */
bool hub_get(Hub *h, const char *url, uint64_t from, uint64_t to, size_t most, bool once, Bytes *body, char *link,
             Error *e);

bool hub_interrupted(void); /* Ctrl+C was pressed */

#endif
