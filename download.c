/* download.c: fetches a repository from a model hub into the hub's own cache, whose layout other tools share:
 *
 *   models--ORG--NAME/blobs/ID               a file's content; ID is its sha256, or its git hash if it is small
 *   models--ORG--NAME/blobs/ID.incomplete    its beginning: a download appends to it, the next one goes on behind it
 *   models--ORG--NAME/snapshots/COMMIT/FILE  a relative link to its blob
 *   models--ORG--NAME/refs/REVISION          the commit that a branch or tag was when it was fetched
 *   .locks/models--ORG--NAME/ID.lock         flock while the blob is fetched
 *
 * Several files come at once, each in a thread and over a connection of its own. Bytes are hashed as they are written;
 * a blob gets its name only when the hash is right. Commits and hashes are checked hexadecimal digits, file names
 * checked relative paths: nothing else that a server says becomes part of a path.
 *
 * libcurl follows redirects, and sends the token only to the scheme, host and port of the first address. A libcurl
 * before 7.83 without the patch for CVE-2022-27776 looks at the host alone. */
#define CURL_DISABLE_DEPRECATION /* of CURLOPT_PROTOCOLS: its successor needs 7.85 */
#include "download.h"
#include "host.h"

#include <ctype.h>
#include <curl/curl.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <ftw.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <regex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { MAX_JOBS = 64, MAX_FILES = 20000, MAX_CACHE = 2000, MAX_PATH = 4096, MAX_NAME = 256, MAX_ANSWER = 64 << 20 };
enum { MAX_TRIES = 5, MAX_WAIT = 300 /* seconds */, HASH_PART = 4 << 20, SYNC_PART = 32 << 20, SHOWN_FILES = 10 };
#define HEX_40 "^[0-9a-f]{40}$"
#define HEX_64 "^[0-9a-f]{64}$"

typedef struct Download Download;
typedef struct { /* a file; or, with `body`, a small answer of at most `size` bytes */
    Download *d;
    char *name, id[65];
    uint64_t size;
    _Atomic uint64_t done;                      /* bytes that have arrived, and are hashed */
    _Atomic enum { WAITING, OPEN, HERE } state; /* OPEN: it is being fetched */
    uint64_t best;                              /* the most of them so far */
    int fd, tries;                              /* tries: without more than that */
    EVP_MD_CTX *hash;
    Bytes *body;
    char refusal[64], problem[CURL_ERROR_SIZE]; /* X-Error-Code; libcurl's words */
    Error *e;
} File;

struct Download {
    const Options *o;
    char endpoint[300], token[MAX_PATH];
    const char *token_from; /* or NULL */
    int max_tries, stall;   /* stall: seconds without bytes until a connection is given up */
    struct sigaction before[2];

    char name[100], revision[MAX_NAME], commit[41];
    char cache[MAX_CACHE], folder[MAX_CACHE + 200]; /* folder: models--ORG--NAME in the cache */
    char foreign[MAX_NAME];                         /* weights that infer does not read */
    File *file;
    int files;
    uint64_t total; /* bytes */

    _Atomic int next, workers;
    _Atomic bool failed;
    Error e;                  /* the first one */
    pthread_mutex_t mutex;    /* for the terminal: */
    char said[4000];          /* what was said once */
    int lines, draws;         /* of progress */
    _Atomic uint64_t arrived; /* bytes, in this run */
    uint64_t drawn_arrived;
    double drawn, rate;
};

static _Atomic bool interrupted;

static void on_interrupt(int number) {
    (void)number;
    interrupted = true;
}

static bool stopped(const Download *d) { return interrupted || d->failed; }

/* ---- names ---- */

static bool is_like(const char *text, const char *pattern) {
    regex_t regex;
    regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB);
    bool like = text && !regexec(&regex, text, 0, NULL, 0);
    regfree(&regex);
    return like;
}

bool repository_valid(const char *name) {
    return strlen(name) <= 96 && !strstr(name, "--") && !strstr(name, "..") &&
           is_like(name, "^[a-zA-Z0-9_]([a-zA-Z0-9_.-]*[a-zA-Z0-9_])?(/[a-zA-Z0-9_]([a-zA-Z0-9_.-]*[a-zA-Z0-9_])?)?$");
}

/* A relative path that stays where it is put and can be shown: no empty part, "." or "..", no control character, no
 * backslash. */
static bool name_valid(const char *name) {
    Bytes shown = {0}, path = {0};
    bytes_print(&path, "/%s/", name);
    bytes_shown(&shown, path.data, path.n, false);
    bool ok = path.n < MAX_NAME && !strcmp(shown.data, path.data) && !strchr(name, '\\') && !strstr(path.data, "//") &&
              !strstr(path.data, "/./") && !strstr(path.data, "/../");
    bytes_free(&shown);
    bytes_free(&path);
    return ok;
}

char *repository_folder(const char *name) {
    Bytes text = {0};
    bytes_text(&text, "models--");
    for (; *name; name++) bytes_add(&text, *name == '/' ? "--" : name, *name == '/' ? 2 : 1);
    return text.data;
}

const char *file_kind(const char *data, size_t n) {
    static const char *const kinds[][2] = {{"version https://git-lfs", "a Git-LFS pointer"},
                                           {"GGUF", "a GGUF file"},
                                           {"PK\3\4", "a file of PyTorch's own format"},
                                           {"<!doctype", "a web page (HTML)"},
                                           {"<html", "a web page (HTML)"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (n >= strlen(kinds[i][0]) && !strncasecmp(data, kinds[i][0], strlen(kinds[i][0]))) return kinds[i][1];
    return NULL;
}

/* ORG/NAME, ORG/NAME@REVISION, or the address of its page at the hub. */
static bool parse_target(Download *d, Error *e) {
    const char *const sites[] = {d->endpoint, "https://huggingface.co", "https://hf.co"}, *text = d->o->model;
    for (int i = 0; i < 3; i++)
        if (!strncmp(text, sites[i], strlen(sites[i])) && text[strlen(sites[i])] == '/') text += strlen(sites[i]) + 1;
    size_t n = strcspn(text, "@?#");
    const char *tree = strstr(text, "/tree/"), *revision = text[n] == '@' ? text + n + 1 : "main";
    bool url = text != d->o->model;
    if (url && tree) n = (size_t)(tree - text), revision = tree + strlen("/tree/");
    if (url && n && text[n - 1] == '/') n--;
    snprintf(d->name, sizeof d->name, "%.*s", (int)n, text);
    snprintf(d->revision, sizeof d->revision, "%s", d->o->revision ? d->o->revision : revision);
    if (url) d->revision[strcspn(d->revision, "?#")] = 0;
    if (n >= sizeof d->name || !repository_valid(d->name))
        return fail(e, USAGE, "'%.200s' is no repository at %s: ORG/NAME is needed, or its URL", text, d->endpoint);
    return name_valid(d->revision) || fail(e, USAGE, "'%.100s' is no revision", d->revision);
}

/* ---- progress ---- */

static void clear(Download *d) {
    if (d->lines) fprintf(stderr, "\r\033[%dA\033[J", d->lines);
    d->lines = 0;
}

/* A line above the progress; what several connections may say is said once. */
static void say(Download *d, const char *line, bool once) {
    pthread_mutex_lock(&d->mutex);
    clear(d);
    if (!once || !strstr(d->said, line)) fprintf(stderr, "%s\n", line);
    if (once) strncat(d->said, line, sizeof d->said - strlen(d->said) - 1);
    pthread_mutex_unlock(&d->mutex);
}

static int percent(uint64_t done, uint64_t total) { return total ? (int)(100.0 * (double)done / (double)total) : 100; }

/* One line. Of a long name the end stays, without the extension: that tells shards apart. */
static void draw_file(const File *f, int columns) {
    int room = columns > 70 ? 44 : columns > 40 ? columns - 26 : 14, n = (int)strlen(f->name), cut = 0;
    const char *dot = strrchr(f->name, '.');
    char have[24], size[24];
    if (n > room && dot && dot > f->name) n = (int)(dot - f->name);
    if (n > room) cut = n - room;
    while ((f->name[cut] & 0xC0) == 0x80) cut++; /* UTF-8 */
    fprintf(stderr, "  %-*.*s %3d%%  %s of %s\n", room, n - cut, f->name + cut, percent(f->done, f->size),
            size_text(f->done, have), size_text(f->size, size));
}

/* A line for each file that is under way and one for all, drawn over the last ones; or, where nobody watches, only the
 * latter every ten seconds. */
static void draw(Download *d) {
    bool terminal = isatty(STDERR_FILENO);
    double since = seconds() - d->drawn, last = (double)(d->arrived - d->drawn_arrived) / since;
    struct winsize window;
    int columns = !ioctl(STDERR_FILENO, TIOCGWINSZ, &window) && window.ws_col ? window.ws_col : 80;
    uint64_t done = 0;
    char a[24], b[24];
    if (since < (terminal ? 0.1 : 10)) return;
    d->draws += d->draws < 50;
    d->rate += (last - d->rate) / d->draws; /* the mean, then a moving one */
    d->drawn += since;
    d->drawn_arrived = d->arrived;
    clear(d);
    if (terminal) fputs("\033[?7l", stderr); /* long lines are cut, so that each takes one row */
    for (int i = 0; i < d->files; i++) {
        done += d->file[i].done;
        if (terminal && d->file[i].state == OPEN && d->lines < SHOWN_FILES) draw_file(d->file + i, columns), d->lines++;
    }
    fprintf(stderr, "  %d%% of %s", percent(done, d->total), size_text(d->total, a));
    long left = d->rate >= 1 ? (long)((double)(d->total - done) / d->rate) : 0;
    if (left) fprintf(stderr, ", %s/s, ", size_text((uint64_t)d->rate, b));
    if (left >= 3600)
        fprintf(stderr, "%ld h %02ld min left", left / 3600, left / 60 % 60);
    else if (left)
        fprintf(stderr, left >= 120 ? "%ld min left" : "%ld s left", left >= 120 ? left / 60 : left);
    fputs(terminal ? "\033[?7h\n" : "\n", stderr);
    d->lines += terminal;
}

/* ---- the disk ---- */

/* Fills in e from errno, with what cures it. */
static bool disk_error(Error *e, const char *path) {
    int code = errno == ENOSPC || errno == EDQUOT ? NO_ROOM : FAILED;
    if (errno == EACCES || errno == EROFS || errno == EPERM) code = NO_NETWORK;
    return fail(e, code, "%s: %s; %s", path, strerror(errno),
                code == NO_ROOM ? "free some space: the same command goes on"
                                : "HF_HOME or HF_HUB_CACHE chooses another place");
}

/* Makes the folders of `path` up to its last slash. In the cache none may be a link, which would lead elsewhere. */
static bool make_folders(const Download *d, const char *path, Error *e) {
    char part[MAX_PATH];
    struct stat st;
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        if (mkdir(part, 0777) && errno != EEXIST) return disk_error(e, part);
        if (strlen(part) > strlen(d->cache) && !lstat(part, &st) && !S_ISDIR(st.st_mode))
            return fail(e, FAILED, "%s is a link or a file where a folder should be: refused; remove it", part);
    }
    return true;
}

/* Puts a link, or a file with this text, in place of what is at the path. */
static bool put(const Download *d, const char *path, const char *text, bool link, Error *e) {
    char new[MAX_PATH + 32];
    snprintf(new, sizeof new, "%s.%d.new", path, (int)getpid());
    if (!make_folders(d, path, e)) return false;
    FILE *file = link ? NULL : fopen(new, "w");
    bool made = link ? !symlink(text, new) : file && fputs(text, file) >= 0;
    if (file && fclose(file)) made = false;
    return (made && !rename(new, path)) || disk_error(e, path);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

bool folder_remove(const char *path) { return !nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

bool disk_free(const char *path, uint64_t *bytes) {
    struct statvfs fs;
    char *copy = copy_text(path, strlen(path)), *slash;
    bool ok;
    while (!(ok = !statvfs(copy, &fs)) && (slash = strrchr(copy, '/')) && slash > copy) *slash = 0;
    *bytes = ok ? (uint64_t)fs.f_bavail * fs.f_frsize : 0;
    free(copy);
    return ok;
}

static const char *blob_path(const File *f, const char *suffix, char out[MAX_PATH]) {
    snprintf(out, MAX_PATH, "%s/blobs/%s%s", f->d->folder, f->id, suffix);
    return out;
}

/* Bytes on disk of its blob or, with the suffix, of its beginning; UINT64_MAX: there is none. */
static uint64_t bytes_at(const File *f, const char *suffix) {
    char path[MAX_PATH];
    struct stat st;
    return lstat(blob_path(f, suffix, path), &st) || !S_ISREG(st.st_mode) ? UINT64_MAX : (uint64_t)st.st_size;
}

/* It is complete: links it into the snapshot. */
static bool file_link(File *f, Error *e) {
    char path[MAX_PATH], text[MAX_PATH] = "../../", found[MAX_PATH] = "";
    snprintf(path, sizeof path, "%s/snapshots/%s/%s", f->d->folder, f->d->commit, f->name);
    for (const char *s = f->name; (s = strchr(s, '/')); s++) strcat(text, "../");
    strcat(strcat(text, "blobs/"), f->id);
    f->state = HERE;
    f->done = f->size;
    return (readlink(path, found, sizeof found - 1) > 0 && !strcmp(found, text)) || put(f->d, path, text, true, e);
}

/* Hashes what is on disk of a file: its beginning. */
static bool file_check(File *f, Error *e) {
    char head[32], *part = allocate(HASH_PART);
    bool git = strlen(f->id) == 40;
    ssize_t got = 1;
    f->done = 0;
    EVP_DigestInit_ex(f->hash, git ? EVP_sha1() : EVP_sha256(), NULL);
    /* git puts a header with the size before it */
    if (git) EVP_DigestUpdate(f->hash, head, 1 + (size_t)sprintf(head, "blob %llu", (unsigned long long)f->size));
    while (f->done < f->size && got > 0 && !stopped(f->d)) {
        uint64_t left = f->size - f->done;
        got = pread(f->fd, part, left < HASH_PART ? left : HASH_PART, (off_t)f->done);
        if (got > 0) EVP_DigestUpdate(f->hash, part, (size_t)got), f->done += (uint64_t)got;
    }
    free(part);
    return got >= 0 || disk_error(e, f->name);
}

/* ---- the wire ---- */

static bool offline(void) { return is_like(getenv("HF_HUB_OFFLINE"), "^(1|[tT][rR][uU][eE]|[yY][eE][sS]|[oO][nN])$"); }

static int on_progress(void *f, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d) {
    (void)a, (void)b, (void)c, (void)d;
    return stopped(((File *)f)->d);
}

static size_t on_header(char *line, size_t size, size_t n, void *owner) {
    File *f = owner;
    if (n > 13 && !strncasecmp(line, "X-Error-Code:", 13))
        snprintf(f->refusal, sizeof f->refusal, "%.*s", (int)n - 13, line + 13);
    return n * size;
}

/* Bytes have arrived: they are written and hashed. */
static size_t on_body(char *data, size_t size, size_t n, void *owner) {
    File *f = owner;
    n *= size;
    const char *kind = f->body || f->done || f->d->o->all ? NULL : file_kind(data, n);
    if (n > f->size - f->done)
        return fail(f->e, NO_NETWORK, "a server sends more than the %llu bytes that were to come: try again later",
                    (unsigned long long)f->size);
    if (kind && (!fnmatch("*.safetensors", f->name, 0) || !fnmatch("*.json", f->name, 0)))
        return fail(f->e, BAD_MODEL, "%s: the hub sends %s in its place: see %s/%s", f->name, kind, f->d->endpoint,
                    f->d->name);
    if (f->body) {
        bytes_add(f->body, data, n);
    } else {
        ssize_t wrote = pwrite(f->fd, data, n, (off_t)f->done);
        if (wrote >= 0 && (size_t)wrote < n) errno = ENOSPC; /* a short write is what a full disk does first */
        if (wrote != (ssize_t)n) return disk_error(f->e, f->name);
        EVP_DigestUpdate(f->hash, data, n);
        f->d->arrived += n;
    }
    f->done += n;
    if (f->done > f->best) f->best = f->done, f->tries = 0;
    /* what is written begins its way to the disk, so that the wait at the end is short */
    if (!f->body && f->done % SYNC_PART < n) sync_file_range(f->fd, 0, (off_t)f->done, SYNC_FILE_RANGE_WRITE);
    return n;
}

/* Why the hub refuses, with the page to open. */
static bool refuse(const File *f, bool at_hub, long status, Error *e) {
    static const struct {
        const char *code;
        long status;
        int exit;
        const char *text;
    } refusals[] = {
        {"GatedRepo", 0, NO_NETWORK, "asks for its licence to be accepted: open its page and accept it"},
        {"RevisionNotFound", 0, BAD_MODEL, "has no such revision (a commit needs its 40 digits); its page lists them"},
        {"EntryNotFound", 0, BAD_MODEL, "lacks a file of its own list"},
        {"DisabledRepo", 0, NO_NETWORK, "was disabled by the hub"},
        {"RepoNotFound", 404, BAD_MODEL, "is not there, or private: check the name"},
        {"-", 401, NO_NETWORK, "asks for a token: /settings/tokens makes one"},
        {"-", 403, NO_NETWORK, "denies access"},
        {"", 0, NO_NETWORK, "cannot be had now: try again later"}};
    const Download *d = f->d;
    int i = 0;
    while (!at_hub ? *refusals[i].code : !strstr(f->refusal, refusals[i].code) && status != refusals[i].status) i++;
    return fail(e, refusals[i].exit, "%s (%s) %s: %s/%s (status %ld); %s", d->name, d->revision, refusals[i].text,
                d->endpoint, d->name, status,
                d->token_from ? "the token that was given may have no access"
                              : "HF_TOKEN or --token-file gives a token");
}

/* A transfer has ended. True: that was all, well or with *e; false: it is to be tried again, the wait is over. */
static bool judge(File *f, CURL *easy, CURLcode code, Error *e) {
    Download *d = f->d;
    char *url = NULL;
    Error cause;
    long status = 0;
    curl_off_t told = 0;
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(easy, CURLINFO_EFFECTIVE_URL, &url);
    curl_easy_getinfo(easy, CURLINFO_RETRY_AFTER, &told);
    size_t n = strlen(d->endpoint);
    bool at_hub = !strncmp(url, d->endpoint, n) && url[n] == '/', passing = status == 408 || status == 429;
    if (e->code || (!code && status / 100 == 2 && (f->body || f->done == f->size))) return true;
    if (stopped(d)) return !fail(e, INTERRUPTED, "interrupted: the same command goes on");
    if (code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_TOO_MANY_REDIRECTS || code == CURLE_URL_MALFORMAT)
        return !fail(e, NO_NETWORK, "%s: an answer is refused (%s): redirects lead to https only, and not for ever",
                     d->name, f->problem);
    /* a refusal of the content host may be a signature that has expired: the hub makes a new one */
    if ((!code && status / 100 == 3) || (status / 100 == 4 && !passing && (at_hub || f->tries)))
        return !refuse(f, at_hub, status, e);
    if (code == CURLE_RANGE_ERROR && (ftruncate(f->fd, 0) || !file_check(f, e))) /* the server sends all or nothing */
        return e->code || !disk_error(e, f->name);
    int host = (int)(8 + strcspn(url + 8, "/"));
    if (status >= 400)
        fail(&cause, NO_NETWORK, "%.*s answers with status %ld%s", host, url, status,
             status == 429 ? ", it limits the rate" : "");
    else
        fail(&cause, NO_NETWORK, "%.*s: %s", host, url, curl_easy_strerror(code ? code : CURLE_PARTIAL_FILE));
    double wait = f->tries ? 0.25 * (1 << f->tries) : 0; /* at once after progress, then 0.5, 1, 2, 4 s */
    if (f->tries++ >= d->max_tries || told > MAX_WAIT)
        return !fail(e, NO_NETWORK, "%s: %s; the same command goes on",
                     status < 400 && *f->problem ? f->problem : cause.text,
                     status == 429   ? "try again later, or with a token (HF_TOKEN), which has a higher limit"
                     : status >= 400 ? "try again later"
                                     : "is the network up? HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror");
    if ((double)told > wait) wait = (double)told;
    fail(&cause, NO_NETWORK, "%s: trying again", cause.text);
    if (wait > 0) say(d, cause.text, true);
    for (double until = seconds() + wait; seconds() < until && !stopped(d);) usleep(20000);
    return false;
}

/* Gets what is missing of a file, or a small answer: all of it, or its bytes `range`. */
static bool get(File *f, const char *url, const char *range, Error *e) {
    const Download *d = f->d;
    CURL *easy = curl_easy_init();
    struct curl_slist *headers = curl_slist_append(NULL, "Accept-Encoding: identity");
    char token[sizeof d->token + 32];
    snprintf(token, sizeof token, "Authorization: Bearer %s", d->token);
    if (*d->token) headers = curl_slist_append(headers, token);
    explicit_bzero(token, sizeof token);
    long safe = !strncmp(d->endpoint, "https:", 6) ? CURLPROTO_HTTPS : CURLPROTO_HTTPS | CURLPROTO_HTTP;
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_RANGE, range);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "infer");
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(easy, CURLOPT_MAXREDIRS, 10L);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS, safe);
    curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS, safe);
    curl_easy_setopt(easy, CURLOPT_FAILONERROR, 1L); /* nobody reads the pages of errors */
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, on_progress);
    curl_easy_setopt(easy, CURLOPT_XFERINFODATA, f);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, f);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, f);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, f->problem);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)d->stall);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1000L);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, (long)d->stall);
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 512L << 10);
    if (getenv("CURL_CA_BUNDLE")) curl_easy_setopt(easy, CURLOPT_CAINFO, getenv("CURL_CA_BUNDLE"));
    f->e = e;
    f->best = f->done;
    e->code = f->tries = 0;
    if (offline())
        fail(e, NO_NETWORK, "%s is not here whole, and HF_HUB_OFFLINE forbids to fetch it: unset it", d->name);
    for (bool over = e->code; !over;) {
        if (f->body) f->body->n -= f->done, f->done = 0;
        *f->problem = *f->refusal = 0;
        curl_easy_setopt(easy, CURLOPT_RESUME_FROM_LARGE, (curl_off_t)f->done);
        over = judge(f, easy, curl_easy_perform(easy), e);
    }
    curl_easy_cleanup(easy);
    curl_slist_free_all(headers);
    return !e->code;
}

/* Appends a small answer, or its bytes `range`. */
static bool get_small(Download *d, const char *url, const char *range, size_t max, Bytes *out, Error *e) {
    bytes_text(out, "");
    return get(&(File){.d = d, .body = out, .size = max}, url, range, e);
}

static cJSON *get_json(Download *d, const char *url, Error *e) {
    Bytes body = {0};
    bool ok = get_small(d, url, NULL, MAX_ANSWER, &body, e);
    const char *kind = ok ? file_kind(body.data, body.n) : NULL;
    if (kind) ok = fail(e, NO_NETWORK, "%s answers with %s: does this network ask to log in?", d->endpoint, kind);
    cJSON *json = ok ? json_parse(body.data, body.n, "the hub's answer", e) : NULL;
    bytes_free(&body);
    return json;
}

/* Where the hub has it, with the name %-escaped but for its slashes. */
static char *file_url(const File *f) {
    Bytes url = {0};
    bytes_print(&url, "%s/%s/resolve/%s/", f->d->endpoint, f->d->name, f->d->commit);
    for (const char *s = f->name; *s; s++)
        bytes_print(&url, isalnum(*s & 255) || strchr("-._~/", *s) ? "%c" : "%%%02X", *s & 255);
    return url.data;
}

/* ---- fetching ---- */

/* Waits for the lock that other tools take too; a dead process holds none. -1: *e says why there is none. */
static int take_lock(const File *f, Error *e) {
    char path[MAX_PATH], line[MAX_NAME + 64];
    snprintf(path, sizeof path, "%s/.locks/%s/%s.lock", f->d->cache, strrchr(f->d->folder, '/') + 1, f->id);
    snprintf(line, sizeof line, "%s is being fetched already: waiting for that", f->name);
    if (!make_folders(f->d, path, e)) return -1;
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0664);
    if (lock < 0) disk_error(e, path);
    for (; lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) && !stopped(f->d); usleep(100000)) say(f->d, line, true);
    return lock;
}

/* Fetches a file or the rest of it, and once more from its beginning if its hash is wrong. */
static bool fetch(File *f, Error *e) {
    char path[MAX_PATH], blob[MAX_PATH], found[2 * EVP_MAX_MD_SIZE + 1] = "", line[MAX_NAME + 64], size[24];
    char *url = file_url(f);
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    e->code = 0;
    f->state = OPEN;
    f->fd = -1;
    f->hash = EVP_MD_CTX_new();
    int lock = take_lock(f, e);
    bool ok = lock >= 0, here = bytes_at(f, "") == f->size; /* the process that had the lock did it */
    blob_path(f, "", blob);
    if (ok && !here && (ok = make_folders(f->d, blob_path(f, ".incomplete", path), e))) {
        f->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
        ok = f->fd >= 0 || disk_error(e, path);
    }
    for (int tries = 0; ok && !here; tries++) {
        ok = file_check(f, e) && (f->done == f->size || get(f, url, NULL, e));
        EVP_DigestFinal_ex(f->hash, digest, &n);
        for (unsigned i = 0; i < n; i++) sprintf(found + 2 * i, "%02x", digest[i]);
        if (ok && !strcmp(found, f->id)) break;
        if (ok && ftruncate(f->fd, 0)) ok = disk_error(e, path);
        if (ok && tries)
            ok = fail(e, NO_NETWORK,
                      "%s arrives with the hash %.12s... instead of %.12s..., twice: something between here and the "
                      "hub changes it; try another network, or later",
                      f->name, found, f->id);
    }
    /* the name must not outlive the content */
    if (ok && !here && (ftruncate(f->fd, (off_t)f->size) || fdatasync(f->fd) || rename(path, blob)))
        ok = disk_error(e, path);
    ok = ok && file_link(f, e);
    snprintf(line, sizeof line, "✓ %s  %s", f->name, size_text(f->size, size));
    if (ok) say(f->d, line, false);
    if (!ok) f->state = WAITING;
    EVP_MD_CTX_free(f->hash);
    if (f->fd >= 0) close(f->fd);
    if (lock >= 0) close(lock);
    free(url);
    return ok;
}

/* A thread: fetches files until there are no more, or one fails. */
static void *work(void *data) {
    Download *d = data;
    Error e;
    for (int i; (i = d->next++) < d->files && !stopped(d);) {
        File *f = d->file + i;
        if (f->state != HERE && !fetch(f, &e) && !atomic_exchange(&d->failed, true)) d->e = e;
    }
    d->workers--;
    return NULL;
}

/* Fetches all files that are not here. */
static bool fetch_files(Download *d, Error *e) {
    pthread_t thread[MAX_JOBS];
    int n = 0;
    d->drawn = seconds();
    for (; n < d->o->jobs && n < d->files; n++, d->workers++)
        if (pthread_create(thread + n, NULL, work, d)) break;
    for (; d->workers > 0; usleep(20000)) {
        pthread_mutex_lock(&d->mutex);
        draw(d);
        pthread_mutex_unlock(&d->mutex);
    }
    for (int i = 0; i < n; i++) pthread_join(thread[i], NULL);
    clear(d);
    *e = d->e;
    if (!n) fail(e, FAILED, "no thread can be started");
    if (interrupted) fail(e, INTERRUPTED, "interrupted: the same command goes on");
    return !e->code;
}

/* ---- what is wanted ---- */

static bool wants_default(const Options *o) { return !o->all && !o->include.n && !o->exclude.n; }

static bool matches(const char *const *glob, int n, const char *name) {
    bool hit = false;
    for (int i = 0; i < n; i++) hit |= !fnmatch(glob[i], name, 0);
    return hit;
}

/* By default what the engine reads, and only at the root. */
static bool wanted(const Options *o, const char *name) {
    static const char *const read[] = {
        "*.safetensors", "*.safetensors.index.json", "config.json",       "generation_config.json",
        "tokenizer*",    "special_tokens_map.json",  "added_tokens.json", "vocab.json",
        "merges.txt",    "chat_template.*"};
    if (matches(o->exclude.text, o->exclude.n, name)) return false;
    if (o->include.n) return matches(o->include.text, o->include.n, name);
    return o->all || (!strchr(name, '/') && matches(read, sizeof read / sizeof *read, name));
}

/* An entry of the hub's list of files. */
static bool add_file(Download *d, const cJSON *entry, Error *e) {
    static const char *const foreign[] = {"*.gguf", "*.bin", "*.pt", "*.pth"};
    const char *name = json_string(entry, "rfilename");
    const cJSON *lfs = json_get(entry, "lfs"), *size = json_get(lfs ? lfs : entry, "size");
    const char *id = lfs ? json_string(lfs, "sha256") : json_string(entry, "blobId");
    int64_t bytes;
    if (!name || !name_valid(name))
        return fail(e, BAD_MODEL, "the hub lists '%.200s' in %s, which is no safe file name: refused",
                    name ? name : "(no name)", d->name);
    if (matches(foreign, 4, name)) snprintf(d->foreign, sizeof d->foreign, "%s", name);
    if (!wanted(d->o, name)) return true;
    if (d->files == MAX_FILES)
        return fail(e, BAD_MODEL, "%s has more than %d files: choose with --include", d->name, MAX_FILES);
    if (!is_like(id, lfs ? HEX_64 : HEX_40) || !json_whole(size, 0, INT64_MAX / 2, &bytes))
        return fail(e, BAD_MODEL, "the hub lists %s with an invalid hash or size: refused", name);
    d->file = reallocate(d->file, (size_t)(d->files + 1) * sizeof *d->file);
    File *f = memset(d->file + d->files++, 0, sizeof *f);
    f->d = d;
    f->name = copy_text(name, strlen(name));
    f->size = (uint64_t)bytes;
    memcpy(f->id, id, strlen(id) + 1);
    d->total += f->size;
    return true;
}

/* Asks for the commit of the revision, and its files. */
static bool list_files(Download *d, Error *e) {
    char url[1500], *revision = curl_easy_escape(NULL, d->revision, 0);
    snprintf(url, sizeof url, "%s/api/models/%s/revision/%s?blobs=true", d->endpoint, d->name, revision);
    curl_free(revision);
    cJSON *json = get_json(d, url, e);
    const cJSON *entry, *files = json_get(json, "siblings");
    const char *commit = json_string(json, "sha");
    bool ok = json, weights = !wants_default(d->o);
    if (ok && (!is_like(commit, HEX_40) || !cJSON_IsArray(files)))
        ok = fail(e, BAD_MODEL, "the hub names the commit '%.80s' for %s, or no list of files: refused",
                  commit ? commit : "(missing)", d->name);
    if (ok) memcpy(d->commit, commit, 41);
    cJSON_ArrayForEach(entry, files) ok = ok && add_file(d, entry, e);
    for (int i = 0; i < d->files; i++) weights |= !fnmatch("*.safetensors", d->file[i].name, 0);
    if (ok && !weights)
        ok = fail(e, BAD_MODEL, "%s has no safetensors files at its root, which infer reads%s%s; --all fetches it all",
                  d->name, *d->foreign ? ", but " : "", d->foreign);
    else if (ok && !d->files)
        ok = fail(e, BAD_MODEL, "%s: none of its %d files was chosen: see --include and --all", d->name,
                  cJSON_GetArraySize(files));
    cJSON_Delete(json);
    return ok;
}

/* Fetches config.json before all others: what infer cannot run need not come. */
static bool check_family(Download *d, const char *snapshot, Error *e) {
    for (int i = 0; i < d->files; i++) {
        if (strcmp(d->file[i].name, "config.json")) continue;
        if (d->file[i].state != HERE && !fetch(d->file + i, e)) return false;
        if (!checkpoint_known(snapshot, e))
            return fail(e, BAD_MODEL, "%s cannot run here: %s; --all fetches it anyway", d->name, e->text);
    }
    return true;
}

/* ---- a repository ---- */

static const char *environment(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* As other tools find it: HF_TOKEN, the file HF_TOKEN_PATH, the file `token` in the hub's home. What was asked for must
 * be there; a file that merely may be there is passed over. */
static bool find_token(Download *d, Error *e) {
    const char *file = d->o->token_file, *text = file ? NULL : environment("HF_TOKEN");
    const char *named = environment("HF_TOKEN_PATH");
    Bytes path = {0}, content = {0};
    hub_home(&path);
    bytes_text(&path, "/token");
    const char *from = file ? file : named ? named : path.data;
    bool found = text || file_read(from, MAX_PATH, &content, e);
    if (text) bytes_text(&content, text);
    char rest[2];
    bool ok = found && sscanf(content.data, "%4095s%1s", d->token, rest) == 1 &&
              is_like(d->token, "^[!-~]+$"); /* what an HTTP header can carry */
    if (ok)
        d->token_from = text ? "HF_TOKEN" : file ? "--token-file" : named ? "HF_TOKEN_PATH" : "the hub's token file";
    if (!ok) *d->token = 0;
    if (!ok && found) fail(e, USAGE, "%s holds no token, or characters that no token has", text ? "HF_TOKEN" : from);
    if (!ok) e->code = USAGE;
    if (content.n) explicit_bzero(content.data, content.n);
    bytes_free(&path);
    bytes_free(&content);
    return ok || !(file || text);
}

/* The hub and the repository. Until download_close Ctrl+C does not end the process but every wait for the hub. */
static bool download_open(Download *d, const Options *o, Error *e) {
    const char *endpoint = environment("HF_ENDPOINT"), *stall = environment("HF_HUB_DOWNLOAD_TIMEOUT");
    *d = (Download){.o = o, .max_tries = MAX_TRIES, .stall = 10, .mutex = PTHREAD_MUTEX_INITIALIZER};
    snprintf(d->endpoint, sizeof d->endpoint, "%s", endpoint ? endpoint : "https://huggingface.co");
    for (char *end = strchr(d->endpoint, 0); end > d->endpoint && end[-1] == '/';) *--end = 0;
    curl_global_init(CURL_GLOBAL_DEFAULT);
    interrupted = false;
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, &d->before[0]);
    sigaction(SIGPIPE, &(struct sigaction){.sa_handler = SIG_IGN}, &d->before[1]);
    if (stall) text_whole(stall, 1, INT32_MAX, &d->stall);
    if (!is_like(d->endpoint, "^https?://[^/@]+(/[^@]*)?$"))
        return fail(e, USAGE, "HF_ENDPOINT should be a URL like https://huggingface.co, without a password");
    if (!find_token(d, e) || !parse_target(d, e)) return false;
    char *name = repository_folder(d->name);
    Bytes cache = {0};
    hub_cache(&cache);
    snprintf(d->cache, sizeof d->cache, "%s", cache.data);
    snprintf(d->folder, sizeof d->folder, "%s/%s", d->cache, name);
    bool ok = cache.n < sizeof d->cache || fail(e, USAGE, "the path of the cache is too long: %.200s", cache.data);
    bytes_free(&cache);
    free(name);
    return ok;
}

static void download_close(Download *d) {
    for (int i = 0; i < d->files; i++) free(d->file[i].name);
    free(d->file);
    explicit_bzero(d->token, sizeof d->token);
    sigaction(SIGINT, &d->before[0], NULL);
    sigaction(SIGPIPE, &d->before[1], NULL);
}

/* Which files are here, and whether the others find room. */
static bool plan(Download *d, Error *e) {
    uint64_t need = 0, room;
    char a[24], b[24];
    for (int i = 0; i < d->files; i++) {
        File *f = d->file + i;
        uint64_t begun = bytes_at(f, ".incomplete");
        bool here = bytes_at(f, "") == f->size;
        if (here && !d->o->dry_run && !file_link(f, e)) return false;
        if (!here) need += f->size - (begun < f->size ? begun : 0);
        if (d->o->dry_run) printf("%-40s %8s  %s\n", f->name, size_text(f->size, a), here ? "here" : "to fetch");
    }
    disk_free(d->cache, &room);
    if (d->o->dry_run) printf("%d files, %s; to fetch: %s\n", d->files, size_text(d->total, a), size_text(need, b));
    return need <= room ||
           fail(e, NO_ROOM, "%s needs %s more, %s has %s free: free some space, or choose another disk with HF_HOME",
                d->name, size_text(need, a), d->cache, size_text(room, b));
}

/* The snapshot of this revision, if it is here whole. */
static char *cached_snapshot(const Download *d) {
    char path[MAX_PATH];
    Bytes commit = {0};
    Error e;
    snprintf(path, sizeof path, "%s/refs/%s", d->folder, d->revision);
    if (is_like(d->revision, HEX_40) || !file_read(path, 64, &commit, &e)) bytes_text(&commit, d->revision);
    snprintf(path, sizeof path, "%s/snapshots/%s", d->folder, commit.data);
    bool whole = is_like(commit.data, HEX_40) && model_complete(path);
    bytes_free(&commit);
    return whole ? copy_text(path, strlen(path)) : NULL;
}

/* Everything: the snapshot's path, NULL on failure and after a dry run (e->code 0). */
static char *fetch_repository(Download *d, Error *e) {
    char *have = wants_default(d->o) && !d->o->dry_run ? cached_snapshot(d) : NULL;
    char path[MAX_PATH], refs[MAX_PATH], a[24], b[24];
    bool fixed = is_like(d->revision, HEX_40);
    uint64_t sum = 0;
    e->code = 0;
    if (have && (offline() || fixed)) return have;
    d->max_tries = have ? 0 : MAX_TRIES;
    bool ok = list_files(d, e);
    if (!ok && have && e->code != INTERRUPTED) {
        fprintf(stderr, "%s\nWhat is here is complete and is used.\n", e->text);
        return have;
    }
    free(have);
    d->max_tries = MAX_TRIES;
    ok = ok && plan(d, e);
    if (!ok || d->o->dry_run) return NULL;
    fprintf(stderr, "%s at %.12s: %d files, %s\n", d->name, d->commit, d->files, size_text(d->total, a));
    snprintf(refs, sizeof refs, "%s/refs/%s", d->folder, d->revision);
    snprintf(path, sizeof path, "%s/snapshots/%s", d->folder, d->commit);
    ok = (!wants_default(d->o) || check_family(d, path, e)) && fetch_files(d, e) &&
         (fixed || put(d, refs, d->commit, false, e));
    if (ok) return copy_text(path, strlen(path));
    for (int i = 0; i < d->files; i++) sum += d->file[i].done;
    if (sum) fail(e, e->code, "%s (%s of %s are here)", e->text, size_text(sum, a), size_text(d->total, b));
    return NULL;
}

int download(const Options *o) {
    Error e = {0};
    Download *d = allocate(sizeof *d);
    char *path = download_open(d, o, &e) ? fetch_repository(d, &e) : NULL;
    if (path) puts(path), fflush(stdout), e.code = 0;
    if (path && wants_default(o) && model_complete(path)) fprintf(stderr, "infer play %s  talks to it\n", d->name);
    if (e.code) fprintf(stderr, "infer: %s\n", e.text);
    free(path);
    download_close(d);
    free(d);
    return e.code;
}

/* ---- for other commands ---- */

char *model_get(const char *argument, Error *e) {
    char *path = model_find(argument, e), answer[16] = "";
    bool here = path && (!strcmp(path, argument) || model_complete(path));
    if (here || !strchr(argument, '/') || !repository_valid(argument) || !isatty(STDIN_FILENO) ||
        !isatty(STDERR_FILENO))
        return path;
    fprintf(stderr, "%s is not here%s. Download it? [y/N] ", argument, path ? " whole" : "");
    if (!fgets(answer, sizeof answer, stdin) || (*answer != 'y' && *answer != 'Y')) return path;
    free(path);
    Download d;
    path = download_open(&d, &(Options){.model = argument, .jobs = 8}, e) ? fetch_repository(&d, e) : NULL;
    download_close(&d);
    return path;
}

/* A small file, or the header of safetensors behind its length in eight bytes. */
static bool get_head(File *f, Bytes *out, Error *e) {
    char range[64], *url = file_url(f);
    uint64_t n = 0;
    bool weights = !fnmatch("*.safetensors", f->name, 0);
    bool ok = get_small(f->d, url, weights ? "0-7" : NULL, weights ? 8 : MAX_ANSWER, out, e);
    if (ok && weights) {
        memcpy(&n, out->data, out->n);
        n = le64toh(n);
        snprintf(range, sizeof range, "8-%llu", (unsigned long long)n + 7);
        ok = (n && n <= MAX_ANSWER && n <= f->size - out->n && get_small(f->d, url, range, n, out, e)) || e->code ||
             fail(e, BAD_MODEL, "%s: a header of %llu bytes does not fit", f->name, (unsigned long long)n);
        ok = ok && !e->code;
    }
    free(url);
    return ok;
}

bool outline_open(Outline *o, const char *repository, Error *e) {
    static const char *const read[] = {"*.safetensors", "*config.json", "*.index.json"};
    const char *tmp = environment("TMPDIR");
    char folder[MAX_PATH], path[MAX_PATH + MAX_NAME];
    Download d;
    *o = (Outline){0};
    bool ok = download_open(&d, &(Options){.model = repository}, e) && list_files(&d, e);
    snprintf(folder, sizeof folder, "%s/infer-XXXXXX", tmp ? tmp : "/tmp");
    if (ok && !mkdtemp(folder)) ok = fail(e, FAILED, "%s: %s", folder, strerror(errno));
    if (ok) o->folder = copy_text(folder, strlen(folder));
    for (File *f = d.file; ok && f < d.file + d.files; f++) {
        Bytes head = {0};
        if (bytes_at(f, "") != f->size) o->to_fetch += f->size;
        if (!matches(read, 3, f->name)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, f->name);
        ok = get_head(f, &head, e);
        FILE *file = ok ? fopen(path, "wx") : NULL;
        if (ok &&
            (!file || fwrite(head.data, 1, head.n, file) < head.n || fflush(file) || truncate(path, (off_t)f->size)))
            ok = fail(e, FAILED, "%s: %s; TMPDIR chooses another place", path, strerror(errno));
        if (file) fclose(file);
        bytes_free(&head);
    }
    download_close(&d);
    if (!ok) outline_close(o);
    return ok;
}

void outline_close(Outline *o) {
    if (o->folder) folder_remove(o->folder);
    free(o->folder);
    *o = (Outline){0};
}

bool hub_state(HubState *s, Error *e) {
    Download d;
    char url[400];
    bool ok = download_open(&d, &(Options){.model = "openai/gpt-oss-20b"}, e);
    *s = (HubState){.token = d.token_from, .offline = offline(), .seconds = seconds()};
    snprintf(s->endpoint, sizeof s->endpoint, "%s", d.endpoint);
    snprintf(url, sizeof url, "%s/api/%s", d.endpoint, d.token_from ? "whoami-v2" : "models/openai/gpt-oss-20b");
    d.max_tries = 0;
    if (ok && !s->offline) cJSON_Delete(get_json(&d, url, e)), ok = !e->code || e->code == BAD_MODEL;
    s->seconds = seconds() - s->seconds;
    download_close(&d);
    return ok;
}
