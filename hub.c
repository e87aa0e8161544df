/* hub.c: requests to a model hub, on libcurl's multi interface. See hub.h.
 *
 * Redirects are followed here and not by libcurl, since three things hang on them: the token goes only to the scheme,
 * host and port of the endpoint, nothing leads from https to another scheme, and what the hub itself says of a file
 * (X-Repo-Commit, X-Linked-Etag, X-Linked-Size) stands in the answer that redirects to the content host. */
#include "hub.h"
#include "model.h"

#include <ctype.h>
#include <curl/curl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum {
    MOST_REDIRECTS = 10,
    MOST_TRIES = 5,
    MOST_WAIT = 300,
    SLOW = 1000,
    USUAL_STALL = 10,
    MOST_TOKEN = 4096,
    MOST_PAGE = 1 << 20
};

struct Hub {
    CURLM *multi;
    char *endpoint, origin[300], *token;
    const char *token_from, *ca_bundle;
    int stall;   /* seconds with less than SLOW bytes each before a connection is given up */
    double hold; /* nothing begins before: the hub limits the rate */
    Request **request;
    int requests;
    char repository[200], revision[200];
    void (*say)(void *, const char *);
    void *say_data;
};

static volatile sig_atomic_t interrupted;
static struct sigaction before;

static void on_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

bool hub_interrupted(void) { return interrupted; }

/* ---- opening ---- */

/* "https://host:443" in small letters; false if it is no URL. */
static bool url_origin(const char *url, char out[300]) {
    CURLU *u = curl_url();
    char *scheme = NULL, *host = NULL, *port = NULL;
    bool ok = !curl_url_set(u, CURLUPART_URL, url, CURLU_NON_SUPPORT_SCHEME) &&
              !curl_url_get(u, CURLUPART_SCHEME, &scheme, 0) && !curl_url_get(u, CURLUPART_HOST, &host, 0) &&
              !curl_url_get(u, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT);
    ok = ok && snprintf(out, 300, "%s://%s:%s", scheme, host, port) < 300;
    for (char *c = out; ok && *c; c++) *c = (char)tolower((unsigned char)*c);
    curl_free(scheme);
    curl_free(host);
    curl_free(port);
    curl_url_cleanup(u);
    return ok;
}

bool hub_same_origin(const Hub *h, const char *url) {
    char origin[300];
    return url_origin(url, origin) && !strcmp(origin, h->origin);
}

static const char *environment(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

bool hub_offline(void) {
    static const char *const yes[] = {"1", "true", "yes", "on"};
    const char *value = environment("HF_HUB_OFFLINE");
    bool set = false;
    for (int i = 0; i < 4 && value; i++) set |= !strcasecmp(value, yes[i]);
    return set;
}

/* The token without the white space around it, or NULL: an HTTP header can carry no other bytes. */
static char *clean_token(const char *text, size_t n) {
    while (n && isspace((unsigned char)*text)) text++, n--;
    while (n && isspace((unsigned char)text[n - 1])) n--;
    for (size_t i = 0; i < n; i++)
        if (text[i] < 33 || text[i] > 126) return NULL;
    return n ? copy_text(text, n) : NULL;
}

/* As other tools find it: HF_TOKEN, the file HF_TOKEN_PATH, the file `token` in the hub's home. What was asked for must
 * be there; a file that merely may be there is passed over. */
static bool find_token(Hub *h, const char *file, Error *e) {
    const char *text = file ? NULL : environment("HF_TOKEN"), *named = environment("HF_TOKEN_PATH");
    Bytes path = {0}, content = {0};
    if (file || named)
        bytes_text(&path, file ? file : named);
    else
        hub_home(&path), bytes_text(&path, "/token");
    bool read = !text && file_read(path.data, MOST_TOKEN, &content, e);
    if (text || read) h->token = clean_token(text ? text : content.data, text ? strlen(text) : content.n);
    if (h->token)
        h->token_from = file ? "--token-file" : text ? "HF_TOKEN" : named ? "HF_TOKEN_PATH" : "the hub's token file";
    else if (text || read)
        fail(e, USAGE, "%s holds no token, or characters that no token has", text ? "HF_TOKEN" : path.data);
    bytes_free(&path);
    bytes_free(&content);
    bool ok = h->token || !(file || text);
    if (!ok) e->code = USAGE;
    return ok;
}

Hub *hub_open(const char *token_file, Error *e) {
    static bool begun;
    if (!begun) curl_global_init(CURL_GLOBAL_DEFAULT);
    begun = true;
    interrupted = 0;
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, &before);
    Hub *h = allocate_zero(1, sizeof *h);
    const char *endpoint = environment("HF_ENDPOINT"), *stall = environment("HF_HUB_DOWNLOAD_TIMEOUT");
    if (!endpoint) endpoint = "https://huggingface.co";
    size_t n = strlen(endpoint);
    while (n && endpoint[n - 1] == '/') n--;
    h->endpoint = copy_text(endpoint, n);
    h->stall = USUAL_STALL;
    if (stall) text_whole(stall, 1, INT32_MAX, &h->stall);
    h->ca_bundle = environment("CURL_CA_BUNDLE");
    h->multi = curl_multi_init();
    bool http = !strncmp(h->endpoint, "https://", 8) || !strncmp(h->endpoint, "http://", 7);
    bool ok = !strchr(h->endpoint, '@') ||
              fail(e, USAGE, "HF_ENDPOINT holds a password, which messages would show: HF_TOKEN is for secrets");
    ok = ok && ((http && url_origin(h->endpoint, h->origin)) ||
                fail(e, USAGE, "HF_ENDPOINT should be a URL like https://huggingface.co and is '%.200s'", h->endpoint));
    if (ok && find_token(h, token_file, e)) return h;
    hub_close(h);
    return NULL;
}

void hub_close(Hub *h) {
    if (!h) return;
    while (h->requests) request_free(h, h->request[0]);
    curl_multi_cleanup(h->multi);
    sigaction(SIGINT, &before, NULL);
    if (h->token) explicit_bzero(h->token, strlen(h->token));
    free(h->token);
    free(h->request);
    free(h->endpoint);
    free(h);
}

void hub_about(Hub *h, const char *repository, const char *revision, void (*say)(void *, const char *), void *data) {
    snprintf(h->repository, sizeof h->repository, "%s", repository);
    snprintf(h->revision, sizeof h->revision, "%s", revision);
    h->say = say;
    h->say_data = data;
}

const char *hub_endpoint(const Hub *h) { return h->endpoint; }
const char *hub_token(const Hub *h) { return h->token_from; }

void url_escape(Bytes *url, const char *text, bool slash_too) {
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if ((c < 128 && isalnum(c)) || strchr("-._~", c) || (c == '/' && !slash_too))
            bytes_add(url, text, 1);
        else
            bytes_print(url, "%%%02X", c);
    }
}

bool url_unescape(char *text) {
    int n = 0;
    char *plain = curl_easy_unescape(NULL, text, 0, &n);
    bool ok = plain && strlen(plain) == (size_t)n;
    if (ok) memcpy(text, plain, (size_t)n + 1);
    curl_free(plain);
    return ok;
}

void hub_url(const Hub *h, Bytes *url, const char *path) {
    bytes_text(url, h->endpoint);
    url_escape(url, path, false);
}

/* ---- one answer ---- */

static bool same_etag(const char *etag, const char *id) {
    size_t n = strlen(id);
    if (!strncmp(etag, "W/", 2)) etag += 2; /* a weak one */
    if (*etag == '"') etag++;
    return !strncmp(etag, id, n) && (!etag[n] || !strcmp(etag + n, "\""));
}

/* The answer's head is complete: does it contradict what was asked for? False ends the request with its error. */
static bool check_head(Request *r) {
    const char *commit = r->header[REPO_COMMIT], *etag = r->header[LINKED_ETAG];
    long long begin = -1, total = -1, size = -1;
    sscanf(r->header[LINKED_SIZE], "%lld", &size);
    sscanf(r->header[CONTENT_RANGE], "bytes %lld-%*[0-9]/%lld", &begin, &total);
    if (r->at_hub && r->status < 400) {
        if (r->commit && *commit && strcmp(commit, r->commit))
            return fail(&r->e, NO_NETWORK, "the hub answers with commit '%.60s' instead of %s: try again", commit,
                        r->commit);
        if (r->id && *etag && !same_etag(etag, r->id))
            return fail(&r->e, NO_NETWORK, "the hub's X-Linked-Etag is '%.70s', its list of files says %s: try again",
                        etag, r->id);
        if (r->size && size >= 0 && (uint64_t)size != r->size)
            return fail(&r->e, NO_NETWORK, "the hub's X-Linked-Size is %lld, its list of files says %llu: try again",
                        size, (unsigned long long)r->size);
    }
    if (r->status == 206) {
        if (begin != (long long)r->from || (r->size && total >= 0 && (uint64_t)total != r->size))
            return fail(
                &r->e, NO_NETWORK,
                "a server answers with byte %lld of %lld where byte %llu of %llu was asked for: try again later", begin,
                total, (unsigned long long)r->from, (unsigned long long)r->size);
        r->at = r->from;
    } else if (r->status == 200) {
        r->at = 0;
        r->whole = r->to;
        if (r->whole && r->body) return fail(&r->e, NO_NETWORK, "a server does not serve parts of files");
    }
    return true;
}

static size_t on_header(char *line, size_t size, size_t n, void *data) {
    static const char *const names[HEADERS] = {"Link",          "X-Error-Code",  "X-Repo-Commit",
                                               "X-Linked-Etag", "X-Linked-Size", "Content-Range"};
    Request *r = data;
    size_t all = size * n;
    if (all >= 5 && !strncmp(line, "HTTP/", 5)) { /* also the head after a "100 Continue" or a proxy's */
        r->status = 0;
        memset(r->header, 0, sizeof r->header);
    }
    for (n = all; n && strchr("\r\n", line[n - 1]);) n--;
    if (!n && r->status) return all; /* behind a trailer */
    if (!n) {
        curl_easy_getinfo(r->easy, CURLINFO_RESPONSE_CODE, &r->status);
        return check_head(r) ? all : 0;
    }
    for (int i = 0; i < HEADERS; i++) {
        size_t at = strlen(names[i]);
        if (n <= at || line[at] != ':' || strncasecmp(line, names[i], at)) continue;
        while (++at < n && line[at] == ' ') {}
        snprintf(r->header[i], sizeof r->header[i], "%.*s", (int)(n - at), line + at);
    }
    return all;
}

static size_t on_body(char *data, size_t size, size_t n, void *owner) {
    Request *r = owner;
    n *= size;
    if (r->status != 200 && r->status != 206)
        return (r->skipped += n) > MOST_PAGE ? 0 : n; /* a redirect's, an error's */
    uint64_t end = r->whole ? r->size : r->to;
    if ((end && n > end - r->at) || (r->body && n > r->most - r->body->n)) {
        fail(&r->e, NO_NETWORK, "a server sends more than the %llu bytes that were to come: try again later",
             (unsigned long long)(end ? end : r->most));
        return 0;
    }
    if (r->body)
        bytes_add(r->body, data, n);
    else if (!r->sink(r, r->at, data, n))
        return 0;
    r->at += n;
    return n;
}

/* ---- a request's life ---- */

/* Asks at r->now. */
static void begin(Hub *h, Request *r) {
    Bytes text = {0};
    if (!r->easy) r->easy = curl_easy_init();
    CURL *easy = r->easy;
    curl_easy_reset(easy);
    curl_slist_free_all(r->headers);
    r->at_hub = hub_same_origin(h, r->now);
    r->headers = curl_slist_append(NULL, "Accept-Encoding: identity");
    if (h->token && r->at_hub) {
        bytes_print(&text, "Authorization: Bearer %s", h->token);
        r->headers = curl_slist_append(r->headers, text.data);
        explicit_bzero(text.data, text.n);
    }
    text.n = 0;
    bytes_print(&text, "%llu-%llu", (unsigned long long)r->from, (unsigned long long)r->to - 1);
    if (r->to) curl_easy_setopt(easy, CURLOPT_RANGE, text.data);
    bytes_free(&text);
    if (r->body) r->body->n = 0;
    *r->problem = 0;
    r->status = 0;
    r->skipped = 0;
    r->whole = false;
    curl_easy_setopt(easy, CURLOPT_URL, r->now);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, r->headers);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "infer");
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, r);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, r);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, r);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, r->problem);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)h->stall);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, (long)SLOW);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, (long)h->stall);
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 512L << 10);
    /* a connection a range; HTTP/2 would put all of them into one */
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    if (h->ca_bundle) curl_easy_setopt(easy, CURLOPT_CAINFO, h->ca_bundle);
    r->running = true;
    curl_multi_add_handle(h->multi, easy);
}

/* From the start of the request, or where the content host was last time. */
static void ask(Request *r) {
    free(r->now);
    const char *url = r->direct && *r->direct ? *r->direct : r->url;
    r->now = copy_text(url, strlen(url));
    r->redirects = 0;
}

static bool follow(Hub *h, Request *r) {
    char *to = NULL, origin[300];
    curl_easy_getinfo(r->easy, CURLINFO_REDIRECT_URL, &to);
    if (!to) return fail(&r->e, NO_NETWORK, "a server redirects to nowhere");
    if (!url_origin(to, origin)) *origin = 0;
    bool https = !strncmp(origin, "https://", 8), http = !strncmp(origin, "http://", 7);
    if (!https && !(http && !strncmp(h->origin, "http://", 7)))
        return fail(&r->e, NO_NETWORK, "a server redirects to %.*s, where only https is safe: refused",
                    (int)strcspn(to, ":"), to);
    if (++r->redirects > MOST_REDIRECTS)
        return fail(&r->e, NO_NETWORK, "more than %d redirects: the server sends in circles", MOST_REDIRECTS);
    to = copy_text(to, strlen(to));
    free(r->now);
    r->now = to;
    begin(h, r);
    return true;
}

/* Tries again after a while, or gives up with the reason. True: it goes on. */
static bool again(Hub *h, Request *r, CURLcode code) {
    curl_off_t told = 0;
    char host[300], line[200];
    if (r->status >= 400) curl_easy_getinfo(r->easy, CURLINFO_RETRY_AFTER, &told);
    if (!url_origin(r->now, host)) *host = 0;
    if (told > MOST_WAIT)
        return fail(&r->e, NO_NETWORK, "%s limits the rate and asks to wait %lld minutes: %s", host,
                    (long long)told / 60,
                    h->token ? "try again then" : "a token (HF_TOKEN) has a higher limit; or try again then");
    if (r->tries >= (r->most_tries ? r->most_tries : MOST_TRIES)) {
        if (r->status >= 400)
            return fail(&r->e, NO_NETWORK, "%s answers with status %ld: try again later", host, r->status);
        return fail(&r->e, NO_NETWORK, "%s: %s; is the network up? HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror",
                    host, *r->problem ? r->problem : curl_easy_strerror(code));
    }
    double wait = r->tries ? 0.25 * (1 << r->tries) : 0; /* at once after progress, then 0.5, 1, 2, 4 s */
    if ((double)told > wait) wait = (double)told;
    r->tries++;
    r->when = seconds() + wait;
    if (r->status == 429 && r->when > h->hold) h->hold = r->when;
    if (wait >= 2 && h->say) {
        snprintf(line, sizeof line, "%s; waiting %.0f s", r->status == 429 ? "the hub limits the rate" : "no answer",
                 wait);
        h->say(h->say_data, line);
    }
    if (!r->whole && !r->body && r->at > r->from) r->from = r->at;
    ask(r);
    if (!wait) begin(h, r);
    return true;
}

/* Fills in why the hub refuses, with the page to open. */
static void refuse(Hub *h, Request *r) {
    Error *e = &r->e;
    char host[300];
    const char *code = r->header[ERROR_CODE], *page = h->endpoint, *name = h->repository;
    const char *token =
        h->token ? "the token that was given may not read it" : "a private one needs a token: HF_TOKEN or --token-file";
    if (!r->at_hub) {
        if (!url_origin(r->now, host)) *host = 0;
        fail(e, NO_NETWORK, "%s refuses a file of %s with status %ld: try again later", host, name, r->status);
    } else if (!strcmp(code, "GatedRepo")) {
        fail(e, NO_NETWORK, "%s asks for its licence to be accepted: open %s/%s, accept it, %s", name, page, name,
             h->token ? "and use a token of that account (the one given has no access yet)"
                      : "and give a token of that account: HF_TOKEN or --token-file");
    } else if (!strcmp(code, "RevisionNotFound")) {
        fail(e, BAD_MODEL, "%s has no revision '%s' (a commit needs its 40 digits); those it has: %s/%s/tree/main",
             name, h->revision, page, name);
    } else if (!strcmp(code, "EntryNotFound")) {
        fail(e, BAD_MODEL, "%s lacks a file at revision %s: see %s/%s/tree/%s", name, h->revision, page, name,
             h->revision);
    } else if (!strcmp(code, "DisabledRepo")) {
        fail(e, NO_NETWORK, "%s was disabled by the hub: see %s/%s", name, page, name);
    } else if (!strcmp(code, "RepoNotFound") || r->status == 404) {
        fail(e, BAD_MODEL, "the hub has no repository %s, or it is private (%s): check the name at %s/%s", name, token,
             page, name);
    } else if (r->status == 401) {
        fail(e, NO_NETWORK, "the hub does not accept %s: make a token at %s/settings/tokens",
             h->token ? "the token" : "a request without a token", page);
    } else if (r->status == 403) {
        fail(e, NO_NETWORK, "the hub denies access to %s (%s): see %s/%s", name, token, page, name);
    } else {
        fail(e, NO_NETWORK, "the hub answers with status %ld: see %s/%s", r->status, page, name);
    }
}

/* What becomes of a request whose transfer ended. True: it is over. */
static bool settle(Hub *h, Request *r, CURLcode code) {
    long s = r->status;
    if (r->e.code || r->dropped) return true;
    if (code == CURLE_OK && s >= 300 && s < 400 && s != 304) return !follow(h, r);
    if (code == CURLE_OK && (s == 200 || s == 206)) {
        uint64_t end = r->whole ? r->size : r->to;
        if (r->direct && !*r->direct && !r->at_hub) *r->direct = copy_text(r->now, strlen(r->now));
        return (!end || r->at == end) || !again(h, r, CURLE_PARTIAL_FILE);
    }
    if (code != CURLE_OK || s == 408 || s == 429 || s >= 500) return !again(h, r, code);
    /* a signature that has expired: the hub makes a new one */
    if (!r->at_hub && r->direct && (*r->direct || !r->tries) && s != 416) {
        free(*r->direct);
        *r->direct = NULL;
        return !again(h, r, code);
    }
    refuse(h, r);
    return true;
}

void hub_start(Hub *h, Request *r) {
    h->request = reallocate(h->request, (size_t)(h->requests + 1) * sizeof *h->request);
    h->request[h->requests++] = r;
    ask(r);
}

Request *hub_step(Hub *h, int milliseconds) {
    int running, left;
    double now = seconds();
    for (int i = 0; i < h->requests && now >= h->hold; i++)
        if (!h->request[i]->running && now >= h->request[i]->when) begin(h, h->request[i]);
    curl_multi_perform(h->multi, &running);
    for (CURLMsg *m; (m = curl_multi_info_read(h->multi, &left));) {
        char *private;
        CURLcode code = m->data.result;
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &private);
        Request *r = (Request *)private;
        curl_multi_remove_handle(h->multi, r->easy);
        r->running = false;
        if (settle(h, r, code)) return r;
    }
    curl_multi_poll(h->multi, NULL, 0, milliseconds, NULL);
    return NULL;
}

void hub_wake(Hub *h) { curl_multi_wakeup(h->multi); }

void request_free(Hub *h, Request *r) {
    for (int i = 0; i < h->requests; i++)
        if (h->request[i] == r) h->request[i--] = h->request[--h->requests];
    if (r->running) curl_multi_remove_handle(h->multi, r->easy);
    if (r->easy) curl_easy_cleanup(r->easy);
    curl_slist_free_all(r->headers);
    free(r->url);
    free(r->now);
    free(r);
}

bool hub_get(Hub *h, const char *url, uint64_t from, uint64_t to, size_t most, bool once, Bytes *body, char *link,
             Error *e) {
    Request *r = allocate_zero(1, sizeof *r), *ended = NULL;
    *r = (Request){.url = copy_text(url, strlen(url)), .from = from, .to = to, .body = body, .most = most};
    r->most_tries = once ? -1 : 0;
    bytes_text(body, "");
    hub_start(h, r);
    while (!ended && !interrupted) ended = hub_step(h, 100);
    if (!ended) fail(&r->e, INTERRUPTED, "interrupted");
    if (r->e.code) *e = r->e;
    if (link) memcpy(link, r->header[LINK], MOST_HEADER_TEXT);
    bool ok = !r->e.code;
    request_free(h, r);
    return ok;
}
