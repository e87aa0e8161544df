/* download.c: fetches a repository from a model hub into the hub's own cache, whose layout other tools share:
 *
 *   models--ORG--NAME/blobs/ID               a file's content; ID is its sha256, or its git hash if it is small
 *   models--ORG--NAME/blobs/ID.incomplete    its beginning: a download appends to it, the next download resumes there
 *   models--ORG--NAME/snapshots/COMMIT/FILE  a relative link to its blob
 *   models--ORG--NAME/refs/REVISION          the commit that a branch or tag was when it was fetched
 *   .locks/models--ORG--NAME/ID.lock         flock while the blob is fetched
 *
 * Several files come at once, each in a thread and over a connection of its own. Bytes are hashed as they are written;
 * a blob gets its name only when the hash is right. Whatever happens to a process, the next one resumes from what is on
 * disk. So the first error of any thread ends the process at once. Commits and hashes must be hexadecimal digits, file
 * names relative paths: nothing else from a server becomes part of a path.
 *
 * libcurl follows redirects, and sends the token only to the scheme, host and port of the first address. A libcurl
 * before 7.83 without the patch for CVE-2022-27776 looks at the host alone. */
#define CURL_DISABLE_DEPRECATION /* of CURLOPT_REDIR_PROTOCOLS: its successor needs 7.85 */
#include "download.h"
#include "host.h"

#include <ctype.h>
#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <ftw.h>
#include <math.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <regex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_JOBS = 64, MAX_PATH = 4096, MAX_NAME = 256, MAX_ANSWER = 64 << 20, MAX_TRIES = 5 };
enum { MAX_WAIT = 300 /* seconds */, HASH_PART = 4 << 20, SHOWN_FILES = 10 };
#define HEX_40 "^[0-9a-f]{40}$"
#define HEX_64 "^[0-9a-f]{64}$"

typedef struct { /* a file; or, with `body`, a small answer of at most `size` bytes */
    char *name, id[65];
    uint64_t size;
    _Atomic uint64_t done; /* bytes that have arrived */
    int fd;
    EVP_MD_CTX *hash; /* of them */
    Bytes *body;
    char refusal[64], problem[CURL_ERROR_SIZE]; /* X-Error-Code; libcurl's words */
    Error *e;                                   /* what is wrong with an answer */
} File;

static struct { /* a process works with one repository */
    const Options *o;
    char endpoint[300], token[MAX_PATH]; /* "" if there is none */
    Bytes token_file;
    const char *token_from;
    char name[100], revision[MAX_NAME], commit[41];
    char cache[MAX_PATH / 2], folder[MAX_PATH * 3 / 4]; /* folder: models--ORG--NAME in the cache */
    char outline[MAX_PATH];                             /* a temporary folder, or "" */
    char foreign[MAX_NAME];                             /* weights that infer does not read */
    int max_tries, stall; /* stall: seconds without bytes until a connection is given up */
    File *file;           /* config.json first */
    int files;
    uint64_t total; /* bytes */

    int end;                  /* file[next .. end - 1] wait for a thread */
    _Atomic int next, here;   /* here: files */
    _Atomic uint64_t arrived; /* bytes, in this run */
    pthread_mutex_t mutex;    /* for the terminal: */
    char said[4000];          /* what was said once */
    int lines;                /* of progress */
    double begun, drawn;
} hub = {.max_tries = MAX_TRIES, .stall = 10, .mutex = PTHREAD_MUTEX_INITIALIZER};

/* ---- names ---- */

static bool is_like(const char *text, const char *pattern) {
    regex_t regex;
    regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB);
    bool like = text && !regexec(&regex, text, 0, NULL, 0);
    regfree(&regex);
    return like;
}

static bool matches(const char *const *glob, int n, const char *name) {
    bool hit = false;
    for (int i = 0; i < n; i++) hit |= !fnmatch(glob[i], name, 0);
    return hit;
}

/* ORG/NAME? */
static bool repository_valid(const char *name) {
    return strlen(name) <= 96 && !strstr(name, "--") && !strstr(name, "..") &&
           is_like(name, "^[a-zA-Z0-9_]([a-zA-Z0-9_.-]*[a-zA-Z0-9_])?(/[a-zA-Z0-9_]([a-zA-Z0-9_.-]*[a-zA-Z0-9_])?)?$");
}

/* A relative path that stays inside its folder and can be shown: no empty part, "." or "..", no control character, no
 * backslash. */
static bool name_valid(const char *name) {
    Bytes shown = {0};
    bytes_shown(&shown, name, strlen(name), false);
    bool ok = shown.n && shown.n < MAX_NAME && !strcmp(shown.data, name) && is_like(name, "^[^/\\]+(/[^/\\]+)*$") &&
              !is_like(name, "(^|/)[.][.]?(/|$)");
    bytes_free(&shown);
    return ok;
}

/* What is often found in place of a model's file, by its first bytes; or NULL. */
static const char *file_kind(const char *data, size_t n) {
    static const char *const kinds[][2] = {{"version https://git-lfs", "a Git-LFS pointer"},
                                           {"GGUF", "a GGUF file"},
                                           {"PK\3\4", "a file of PyTorch's own format"},
                                           {"<!doctype", "a web page (HTML)"},
                                           {"<html", "a web page (HTML)"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (n >= strlen(kinds[i][0]) && !strncasecmp(data, kinds[i][0], strlen(kinds[i][0]))) return kinds[i][1];
    return NULL;
}

/* ---- messages, and the end ---- */

static void clear(void) {
    if (hub.lines) fprintf(stderr, "\r\033[%dA\033[J", hub.lines);
    hub.lines = 0;
}

/* Prints a line above the progress; a line that several connections report is printed once. */
static void say(const char *line, bool once) {
    pthread_mutex_lock(&hub.mutex);
    clear();
    if (!once || !strstr(hub.said, line)) fprintf(stderr, "%s\n", line);
    if (once) strncat(hub.said, line, sizeof hub.said - strlen(hub.said) - 1);
    pthread_mutex_unlock(&hub.mutex);
}

static uint64_t bytes_here(void) {
    uint64_t sum = 0;
    for (int i = 0; i < hub.files; i++) sum += hub.file[i].done;
    return sum;
}

/* Removes a file or an empty folder, but stops at a lock that a process holds. */
static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)ftw;
    int fd = type == FTW_F && !fnmatch("*.lock", path, 0) ? open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW) : -1;
    bool held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB);
    if (fd >= 0) close(fd);
    return held ? EWOULDBLOCK : remove(path);
}

/* 0: it is removed with all its content; links are not followed. */
static int folder_remove(const char *path) { return nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

static void remove_outline(void) {
    if (*hub.outline) folder_remove(hub.outline);
}

/* Ends the process, whatever other threads do: the line of the first error is the only one. */
__attribute__((noreturn, format(printf, 2, 3))) static void give_up(int code, const char *format, ...) {
    uint64_t here = bytes_here();
    char text[sizeof(Error)], a[24], b[24];
    Error e;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail(&e, code, "%s", text);
    pthread_mutex_lock(&hub.mutex);
    clear();
    fflush(stdout);
    fprintf(stderr, "infer: %s", e.text);
    if (here) fprintf(stderr, " (%s of %s are here)", size_text(here, a), size_text(hub.total, b));
    fputc('\n', stderr);
    remove_outline();
    _exit(code);
}

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number) { interrupted = number; }

static void check_interrupt(void) {
    if (interrupted) give_up(INTERRUPTED, "interrupted: the same command goes on");
}

/* One line. It shows the end of the name, without the extension: there shards differ. */
static void draw_file(const File *f, int columns) {
    int room = columns < 40 ? 14 : columns < 66 ? columns - 26 : 40;
    const char *name = f->name, *dot = strrchr(name, '.');
    int n = (int)(dot > name ? dot - name : (ptrdiff_t)strlen(name));
    char have[24], size[24];
    for (; n > room || (*name & 0xC0) == 0x80; n--) name++; /* not amid a letter of UTF-8 */
    fprintf(stderr, "  %-*.*s %3d%%  %s of %s\n", room, n, name, (int)(100 * f->done / f->size),
            size_text(f->done, have), size_text(f->size, size));
}

/* One line for each file that is being fetched and one for all, drawn over the previous ones. Without a terminal only
 * the last line, every ten seconds. */
static void draw(void) {
    bool terminal = isatty(STDERR_FILENO);
    struct winsize window;
    int columns = !ioctl(STDERR_FILENO, TIOCGWINSZ, &window) && window.ws_col ? window.ws_col : 80;
    uint64_t done = bytes_here();
    double now = seconds(), rate = (double)hub.arrived / (now - hub.begun);
    long left = rate >= 1 ? (long)((double)(hub.total - done) / rate) : 0;
    long part[] = {left < 3600 ? left / 60 : left / 3600, left < 3600 ? left % 60 : left / 60 % 60};
    char a[24], b[24];
    if (now - hub.drawn < (terminal ? 0.1 : 10)) return;
    hub.drawn = now;
    pthread_mutex_lock(&hub.mutex);
    clear();
    if (terminal) fputs("\033[?7l", stderr); /* long lines are cut, so that each takes one row */
    for (const File *f = hub.file; terminal && f < hub.file + hub.files && hub.lines < SHOWN_FILES; f++)
        if (f->done && f->done < f->size) draw_file(f, columns), hub.lines++;
    fprintf(stderr, "  %d%% of %s", (int)(hub.total ? 100 * done / hub.total : 100), size_text(hub.total, a));
    if (left) fprintf(stderr, ", %s/s, ", size_text((uint64_t)rate, b));
    if (left) fprintf(stderr, left < 3600 ? "%ld min %ld s left" : "%ld h %ld min left", *part, part[1]);
    fputs(terminal ? "\033[?7h\n" : "\n", stderr);
    hub.lines += terminal;
    pthread_mutex_unlock(&hub.mutex);
}

/* ---- the disk ---- */

/* Ends because of errno, with the cure. */
__attribute__((noreturn)) static void disk_fails(const char *path) {
    bool full = errno == ENOSPC || errno == EDQUOT, denied = errno == EACCES || errno == EROFS || errno == EPERM;
    give_up(full     ? NO_ROOM
            : denied ? NO_NETWORK
                     : FAILED,
            "%s: %s; %s", path, strerror(errno),
            full ? "free some space: the same command goes on"
                 : "HF_HOME and HF_HUB_CACHE choose another place, of temporary files TMPDIR");
}

/* Makes the folders of `path` up to its last slash. In the cache none may be a link, because it could lead elsewhere.
 */
static void make_folders(const char *path) {
    char part[MAX_PATH];
    struct stat st;
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        if (mkdir(part, 0777) && errno != EEXIST) disk_fails(part);
        if (strlen(part) > strlen(hub.cache) && !lstat(part, &st) && !S_ISDIR(st.st_mode))
            give_up(FAILED, "%s is a link or a file where a folder should be: refused; remove it", part);
    }
}

static int open_file(const char *path) {
    make_folders(path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (fd < 0) disk_fails(path);
    return fd;
}

static const char *blob_path(const File *f, const char *suffix, char out[MAX_PATH]) {
    snprintf(out, MAX_PATH, "%s/blobs/%s%s", hub.folder, f->id, suffix);
    return out;
}

static bool is_here(const File *f) {
    char path[MAX_PATH];
    struct stat st;
    return !lstat(blob_path(f, "", path), &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size == f->size;
}

/* The file is complete: links it into the snapshot. A link is there or not, even if the process is killed. */
static void file_link(File *f) {
    char path[MAX_PATH], text[MAX_PATH] = "../../", found[MAX_PATH] = "";
    snprintf(path, sizeof path, "%s/snapshots/%s/%s", hub.folder, hub.commit, f->name);
    for (const char *s = f->name; (s = strchr(s, '/')); s++) strcat(text, "../");
    strcat(strcat(text, "blobs/"), f->id);
    if (readlink(path, found, sizeof found - 1) < 0 || strcmp(found, text)) {
        make_folders(path);
        if (remove(path) && errno != ENOENT) disk_fails(path);
        if (symlink(text, path) && errno != EEXIST) disk_fails(path); /* another process may have made it */
    }
    f->done = f->size;
    hub.here++;
}

/* Starts its hash with the bytes that are on disk. */
static void file_begin(File *f) {
    char head[32], *part = allocate(HASH_PART);
    bool git = strlen(f->id) == 40;
    f->done = 0;
    EVP_DigestInit_ex(f->hash, git ? EVP_sha1() : EVP_sha256(), NULL);
    /* git puts a header with the size before it */
    if (git) EVP_DigestUpdate(f->hash, head, 1 + (size_t)sprintf(head, "blob %llu", (unsigned long long)f->size));
    for (ssize_t got = 1; f->done < f->size && got; f->done += (uint64_t)got) {
        uint64_t left = f->size - f->done;
        got = pread(f->fd, part, left < HASH_PART ? left : HASH_PART, (off_t)f->done);
        if (got < 0) disk_fails(f->name);
        EVP_DigestUpdate(f->hash, part, (size_t)got);
    }
    free(part);
}

/* ---- the wire ---- */

static bool offline(void) { return is_like(getenv("HF_HUB_OFFLINE"), "^(1|[tT][rR][uU][eE]|[yY][eE][sS]|[oO][nN])$"); }

static int on_progress(void *f, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d) {
    (void)f, (void)a, (void)b, (void)c, (void)d;
    check_interrupt();
    return 0;
}

static size_t on_header(char *line, size_t size, size_t n, void *owner) {
    File *f = owner;
    if (n > 13 && !strncasecmp(line, "X-Error-Code:", 13))
        snprintf(f->refusal, sizeof f->refusal, "%.*s", (int)n - 13, line + 13);
    return n * size;
}

/* Writes and hashes bytes that have arrived. */
static size_t on_body(char *data, size_t size, size_t n, void *owner) {
    File *f = owner;
    n *= size;
    const char *kind = f->body || f->done || hub.o->all ? NULL : file_kind(data, n);
    if (n > f->size - f->done)
        return fail(f->e, NO_NETWORK, "a server sends more than the %llu bytes that were to come: try again later",
                    (unsigned long long)f->size);
    if (kind && (!fnmatch("*.safetensors", f->name, 0) || !fnmatch("*.json", f->name, 0)))
        return fail(f->e, BAD_MODEL, "%s: the hub sends %s in its place: see %s/%s", f->name, kind, hub.endpoint,
                    hub.name);
    if (f->body) {
        bytes_add(f->body, data, n);
    } else {
        ssize_t wrote = pwrite(f->fd, data, n, (off_t)f->done);
        if (wrote >= 0 && (size_t)wrote < n) errno = ENOSPC; /* a short write is what a full disk does first */
        if (wrote != (ssize_t)n) disk_fails(f->name);
        EVP_DigestUpdate(f->hash, data, n);
        hub.arrived += n;
    }
    f->done += n;
    return n;
}

/* Says in *e why a transfer has failed. Returns the cure; NULL: another try would fail as well. */
static const char *find_cause(const File *f, const char *url, CURLcode code, long status, bool again, Error *e) {
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
    int n = (int)strlen(hub.endpoint), host = (int)(8 + strcspn(url + 8, "/")), i = 0;
    bool at_hub = !strncmp(url, hub.endpoint, (size_t)n) && url[n] == '/', limited = status == 429;
    if (code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_TOO_MANY_REDIRECTS || code == CURLE_URL_MALFORMAT) {
        fail(e, NO_NETWORK, "%s: an answer is refused (%s): redirects lead to https only, and not for ever", hub.name,
             f->problem);
        return NULL;
    }
    /* a refusal of the content host may be a signature that has expired: the hub makes a new one */
    if ((!code && status / 100 == 3) || (status / 100 == 4 && status != 408 && !limited && (at_hub || again))) {
        while (!at_hub ? *refusals[i].code : !strstr(f->refusal, refusals[i].code) && status != refusals[i].status) i++;
        fail(e, refusals[i].exit, "%s (%s) %s: %s/%s (status %ld); %s", hub.name, hub.revision, refusals[i].text,
             hub.endpoint, hub.name, status,
             *hub.token ? "the token that was given may have no access" : "HF_TOKEN or --token-file gives a token");
        return NULL;
    }
    if (status < 400) {
        fail(e, NO_NETWORK, "%.*s: %s", host, url, curl_easy_strerror(code ? code : CURLE_PARTIAL_FILE));
        return "is the network up? HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror";
    }
    fail(e, NO_NETWORK, "%.*s answers with status %ld%s", host, url, status, limited ? ", it limits the rate" : "");
    return limited ? "try again later, or with a token (HF_TOKEN), which has a higher limit" : "try again later";
}

static CURL *connection(File *f, const char *url, const char *range) {
    CURL *easy = curl_easy_init();
    const char *trusted = environment("CURL_CA_BUNDLE");
    long safe = !strncmp(hub.endpoint, "https:", 6) ? CURLPROTO_HTTPS : CURLPROTO_HTTPS | CURLPROTO_HTTP;
    if (*hub.token) curl_easy_setopt(easy, CURLOPT_XOAUTH2_BEARER, hub.token);
    curl_easy_setopt(easy, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_RANGE, range);
    curl_easy_setopt(easy, CURLOPT_ACCEPT_ENCODING, "identity");
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "infer");
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(easy, CURLOPT_MAXREDIRS, 10L);
    curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS, safe);
    curl_easy_setopt(easy, CURLOPT_FAILONERROR, 1L); /* nobody reads the pages of errors */
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, on_progress);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, f);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, f);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, f->problem);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)hub.stall);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1000L);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, (long)hub.stall);
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 512L << 10);
    if (trusted) curl_easy_setopt(easy, CURLOPT_CAINFO, trusted);
    return easy;
}

/* Fetches the missing part of a file, or a small answer: all of it, or its bytes `range`. */
static bool get(File *f, const char *url, const char *range, Error *e) {
    CURL *easy = connection(f, url, range);
    uint64_t best = f->done; /* the most bytes so far */
    f->e = e;
    e->code = 0;
    if (offline())
        fail(e, NO_NETWORK, "%s is not here whole, and HF_HUB_OFFLINE forbids to fetch it: unset it", hub.name);
    for (int tries = 0; !e->code; tries++) { /* tries: in a row without progress */
        Error cause;
        char *asked = NULL;
        long status = 0;
        curl_off_t told = 0;
        if (f->body) f->body->n -= f->done, f->done = 0;
        *f->problem = *f->refusal = 0;
        curl_easy_setopt(easy, CURLOPT_RESUME_FROM_LARGE, (curl_off_t)f->done);
        CURLcode code = curl_easy_perform(easy);
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
        curl_easy_getinfo(easy, CURLINFO_EFFECTIVE_URL, &asked);
        curl_easy_getinfo(easy, CURLINFO_RETRY_AFTER, &told);
        if (e->code || (!code && status / 100 == 2 && (f->body || f->done == f->size))) break;
        if (f->done > best) best = f->done, tries = 0;
        const char *cure = find_cause(f, asked, code, status, tries, &cause);
        double wait = fmax(told, tries ? 0.25 * (1 << tries) : 0); /* at once after progress, then 0.5, 1, 2, 4 s */
        if (!cure) {
            *e = cause;
        } else if (tries >= hub.max_tries || told > MAX_WAIT) {
            fail(e, NO_NETWORK, "%s: %s; the same command goes on",
                 status < 400 && *f->problem ? f->problem : cause.text, cure);
        } else {
            fail(&cause, NO_NETWORK, "%s: trying again", cause.text);
            if (wait > 0) say(cause.text, true);
            usleep((useconds_t)(wait * 1e6));
        }
        if (code != CURLE_RANGE_ERROR) continue;
        if (ftruncate(f->fd, 0)) disk_fails(f->name); /* the server sends all or nothing */
        file_begin(f);
    }
    curl_easy_cleanup(easy);
    return !e->code;
}

/* An answer of the hub's API. */
static cJSON *get_json(const char *url, Error *e) {
    Bytes body = {0};
    bytes_text(&body, "");
    bool ok = get(&(File){.body = &body, .size = MAX_ANSWER}, url, NULL, e);
    const char *kind = ok ? file_kind(body.data, body.n) : NULL;
    if (kind) ok = fail(e, NO_NETWORK, "%s answers with %s: does this network ask to log in?", hub.endpoint, kind);
    cJSON *json = ok ? json_parse(body.data, body.n, "the hub's answer", e) : NULL;
    bytes_free(&body);
    return json;
}

/* Its address at the hub, with the name %-escaped except for slashes. */
static char *file_url(const File *f) {
    Bytes url = {0};
    bytes_print(&url, "%s/%s/resolve/%s/", hub.endpoint, hub.name, hub.commit);
    for (const char *s = f->name; *s; s++)
        bytes_print(&url, isalnum(*s & 255) || strchr("-._~/", *s) ? "%c" : "%%%02X", *s & 255);
    return url.data;
}

/* ---- fetching ---- */

/* Fetches a file or the rest of it, and once more from its beginning if its hash is wrong. */
static void fetch_blob(File *f) {
    char path[MAX_PATH], blob[MAX_PATH], found[2 * EVP_MAX_MD_SIZE + 1] = "", *url = file_url(f);
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    Error e;
    f->fd = open_file(blob_path(f, ".incomplete", path));
    f->hash = EVP_MD_CTX_new();
    for (int tries = 0;; tries++) {
        file_begin(f);
        if (f->done < f->size && !get(f, url, NULL, &e)) give_up(e.code, "%s", e.text);
        EVP_DigestFinal_ex(f->hash, digest, &n);
        for (unsigned i = 0; i < n; i++) sprintf(found + 2 * i, "%02x", digest[i]);
        if (!strcmp(found, f->id)) break;
        if (ftruncate(f->fd, 0)) disk_fails(path);
        if (tries)
            give_up(NO_NETWORK,
                    "%s arrives with the hash %.12s... instead of %.12s..., twice: something between here and the "
                    "hub changes it; try another network, or later",
                    f->name, found, f->id);
    }
    /* the name must not outlive the content */
    if (ftruncate(f->fd, (off_t)f->size) || fdatasync(f->fd) || rename(path, blob_path(f, "", blob))) disk_fails(path);
    EVP_MD_CTX_free(f->hash);
    close(f->fd);
    free(url);
}

/* Fetches a file under the lock that other tools take too; a dead process holds none. */
static void fetch(File *f) {
    char path[MAX_PATH], line[MAX_NAME + 64], size[24];
    if (!is_here(f)) {
        snprintf(path, sizeof path, "%s/.locks/%s/%s.lock", hub.cache, strrchr(hub.folder, '/') + 1, f->id);
        snprintf(line, sizeof line, "%s is being fetched already: waiting for that", f->name);
        int lock = open_file(path);
        if (flock(lock, LOCK_EX | LOCK_NB)) say(line, true), flock(lock, LOCK_EX);
        if (!is_here(f)) fetch_blob(f); /* else the process that had the lock did it */
        close(lock);
        snprintf(line, sizeof line, "✓ %s  %s", f->name, size_text(f->size, size));
        say(line, false);
    }
    file_link(f);
}

/* A thread: fetches files until there are no more. */
static void *work(void *nothing) {
    for (int i; (i = hub.next++) < hub.end;) fetch(hub.file + i);
    return nothing;
}

/* Fetches the files from .. end - 1; those before them are here. */
static void fetch_files(int from, int end) {
    pthread_t thread[MAX_JOBS];
    int n = 0;
    hub.next = from;
    hub.end = end;
    for (; n < hub.o->jobs && n < end - from; n++)
        if (pthread_create(thread + n, NULL, work, NULL)) give_up(FAILED, "too many threads: --jobs 1 needs one");
    for (; hub.here < end; usleep(20000)) {
        check_interrupt();
        draw();
    }
    for (int i = 0; i < n; i++) pthread_join(thread[i], NULL);
    clear();
}

/* ---- what to fetch ---- */

static bool wants_default(const Options *o) { return !o->all && !o->include.n && !o->exclude.n; }

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
static void add_file(const cJSON *entry) {
    static const char *const foreign[] = {"*.gguf", "*.bin", "*.pt", "*.pth"};
    const char *name = json_string(entry, "rfilename");
    const cJSON *lfs = json_get(entry, "lfs"), *size = json_get(lfs ? lfs : entry, "size");
    const char *id = lfs ? json_string(lfs, "sha256") : json_string(entry, "blobId");
    int64_t bytes;
    if (!name || !name_valid(name))
        give_up(BAD_MODEL, "the hub lists '%.200s' in %s, which is no safe file name: refused",
                name ? name : "(no name)", hub.name);
    if (matches(foreign, 4, name)) snprintf(hub.foreign, sizeof hub.foreign, "%s", name);
    if (!wanted(hub.o, name)) return;
    if (!is_like(id, lfs ? HEX_64 : HEX_40) || !json_whole(size, 0, INT64_MAX / 2, &bytes))
        give_up(BAD_MODEL, "the hub lists %s with an invalid hash or size: refused", name);
    hub.file = reallocate(hub.file, (size_t)(hub.files + 1) * sizeof *hub.file);
    File *f = hub.file + hub.files++;
    if (!strcmp(name, "config.json")) *f = *hub.file, f = hub.file;
    *f = (File){.name = copy_text(name, strlen(name)), .size = (uint64_t)bytes};
    memcpy(f->id, id, strlen(id) + 1);
    hub.total += f->size;
}

/* Fetches the commit of the revision, and the list of its files. */
static bool list_files(Error *e) {
    char url[1500], *revision = curl_easy_escape(NULL, hub.revision, 0);
    snprintf(url, sizeof url, "%s/api/models/%s/revision/%s?blobs=true", hub.endpoint, hub.name, revision);
    curl_free(revision);
    cJSON *json = get_json(url, e);
    if (!json) return false;
    const cJSON *entry, *files = json_get(json, "siblings");
    const char *commit = json_string(json, "sha");
    bool weights = !wants_default(hub.o);
    if (!is_like(commit, HEX_40) || !cJSON_IsArray(files))
        give_up(BAD_MODEL, "the hub names the commit '%.80s' for %s, or no list of files: refused",
                commit ? commit : "(missing)", hub.name);
    memcpy(hub.commit, commit, 41);
    cJSON_ArrayForEach(entry, files) add_file(entry);
    for (int i = 0; i < hub.files; i++) weights |= !fnmatch("*.safetensors", hub.file[i].name, 0);
    if (!weights)
        give_up(BAD_MODEL, "%s has no safetensors files at its root, which infer reads%s%s; %s--all fetches it all",
                hub.name, *hub.foreign ? ", but " : "", hub.foreign,
                strstr(hub.foreign, ".gguf") ? "--include '*Q4_K_M*' fetches GGUF files with that in their names, "
                                             : "");
    if (!hub.files)
        give_up(BAD_MODEL, "%s: none of its %d files was chosen: see --include and --all", hub.name,
                cJSON_GetArraySize(files));
    cJSON_Delete(json);
    return true;
}

/* ---- a repository ---- */

/* As other tools find it: HF_TOKEN, the file HF_TOKEN_PATH, the file `token` in the hub's home. These files may be
 * missing; one given by --token-file may not. */
static void find_token(void) {
    const char *asked = hub.o->token_file, *text = environment("HF_TOKEN"), *named = environment("HF_TOKEN_PATH");
    Bytes content = {0};
    char rest[2];
    Error e;
    hub_home(&hub.token_file);
    bytes_text(&hub.token_file, "/token");
    hub.token_from = asked ? asked : text ? "HF_TOKEN" : named ? named : hub.token_file.data;
    if (text && !asked)
        bytes_text(&content, text);
    else if (!file_read(hub.token_from, MAX_PATH, &content, &e) && asked)
        give_up(USAGE, "%s", e.text);
    if ((content.n || asked) &&
        (sscanf(content.data, "%4095s%1s", hub.token, rest) != 1 || !is_like(hub.token, "^[!-~]+$")))
        give_up(USAGE, "%s holds no token, or characters that no token has", hub.token_from);
    bytes_free(&content);
}

/* Where the cache is, and in it the folder of a repository. */
static void find_folder(const char *repository) {
    Bytes cache = {0};
    const char *slash = strchrnul(repository, '/');
    hub_cache(&cache);
    if (cache.n >= sizeof hub.cache) give_up(USAGE, "the path of the cache is too long: %.200s", cache.data);
    snprintf(hub.cache, sizeof hub.cache, "%s", cache.data);
    snprintf(hub.folder, sizeof hub.folder, "%s/models--%.*s%s%s", hub.cache, (int)(slash - repository), repository,
             *slash ? "--" : "", slash + (*slash == '/'));
    bytes_free(&cache);
}

/* The hub and the repository ORG/NAME or ORG/NAME@REVISION. From here on Ctrl+C ends every wait for the hub. */
static void hub_open(const Options *o) {
    const char *endpoint = environment("HF_ENDPOINT"), *stall = environment("HF_HUB_DOWNLOAD_TIMEOUT");
    const char *at = strchrnul(o->model, '@'), *revision = o->revision ? o->revision : *at ? at + 1 : "main";
    hub.o = o;
    hub.begun = hub.drawn = seconds();
    curl_global_init(CURL_GLOBAL_DEFAULT);
    signal(SIGINT, on_interrupt);
    if (stall) text_whole(stall, 1, INT32_MAX, &hub.stall);
    snprintf(hub.endpoint, sizeof hub.endpoint, "%s", endpoint ? endpoint : "https://huggingface.co");
    for (char *end = strchr(hub.endpoint, 0); end > hub.endpoint && end[-1] == '/';) *--end = 0;
    if (!is_like(hub.endpoint, "^https?://[^/@]+(/[^@]*)?$"))
        give_up(USAGE, "HF_ENDPOINT should be a URL like https://huggingface.co, without a password");
    find_token();
    snprintf(hub.name, sizeof hub.name, "%.*s", (int)(at - o->model), o->model);
    snprintf(hub.revision, sizeof hub.revision, "%s", revision);
    if (!repository_valid(hub.name))
        give_up(USAGE, "'%.200s' is no repository at %s: ORG/NAME is needed", o->model, hub.endpoint);
    if (!name_valid(revision)) give_up(USAGE, "'%.100s' is no revision", revision);
    find_folder(hub.name);
}

/* Fetches the listed files; if infer cannot run the model, only config.json. */
static void fetch_listed(const char *snapshot) {
    bool check = wants_default(hub.o) && !strcmp(hub.file->name, "config.json");
    char size[24];
    Error e;
    fprintf(stderr, "%s at %.12s: %d files, %s\n", hub.name, hub.commit, hub.files, size_text(hub.total, size));
    if (check) fetch_files(0, 1);
    if (check && !checkpoint_known(snapshot, &e))
        give_up(BAD_MODEL, "%s cannot run here: %s; --all fetches it anyway", hub.name, e.text);
    fetch_files(check, hub.files);
}

/* Fetches a repository unless all of it is here; returns the snapshot's path. */
static char *fetch_repository(const Options *o) {
    char path[MAX_PATH], ref[MAX_PATH];
    Bytes known = {0}; /* the commit that the revision was */
    Error e;
    hub_open(o);
    snprintf(ref, sizeof ref, "%s/refs/%s", hub.folder, hub.revision);
    if (!file_read(ref, 64, &known, &e)) bytes_text(&known, hub.revision);
    snprintf(path, sizeof path, "%s/snapshots/%s", hub.folder, known.data);
    bool fixed = is_like(hub.revision, HEX_40);
    bool whole = wants_default(o) && is_like(known.data, HEX_40) && model_complete(path);
    bool ask = !whole || (!fixed && !offline());
    if (whole) hub.max_tries = 0;
    if (ask && list_files(&e)) {
        hub.max_tries = MAX_TRIES;
        snprintf(path, sizeof path, "%s/snapshots/%s", hub.folder, hub.commit);
        fetch_listed(path);
        if (!fixed && strcmp(known.data, hub.commit)) {
            int fd = open_file(ref);
            if (dprintf(fd, "%s", hub.commit) < 40 || ftruncate(fd, 40)) disk_fails(ref);
            close(fd);
        }
    } else if (!whole) {
        give_up(e.code, "%s", e.text);
    } else if (ask) {
        fprintf(stderr, "%s\nWhat is here is complete and is used.\n", e.text);
    }
    bytes_free(&known);
    return copy_text(path, strlen(path));
}

/* ---- commands ---- */

int download(const Options *o) {
    char *path = fetch_repository(o);
    puts(path);
    if (wants_default(o) && model_complete(path))
        fprintf(stderr, "infer play %.*s  talks to it\n", (int)strcspn(o->model, "@"), o->model);
    free(path);
    return DONE;
}

char *model_get(const char *argument, Error *e) {
    char *path = model_find(argument, e), answer[16] = "";
    bool here = path && (!strcmp(path, argument) || model_complete(path));
    if (here || !strchr(argument, '/') || !repository_valid(argument) || !isatty(STDIN_FILENO) ||
        !isatty(STDERR_FILENO))
        return path;
    fprintf(stderr, "%s is not here%s. Download it? [y/N] ", argument, path ? " whole" : "");
    if (!fgets(answer, sizeof answer, stdin) || (*answer != 'y' && *answer != 'Y')) return path;
    free(path);
    path = fetch_repository(&(Options){.model = argument, .jobs = 8});
    signal(SIGINT, SIG_DFL);
    return path;
}

int rm(const Options *o) {
    char locks[MAX_PATH];
    Error e;
    bool repository = repository_valid(o->model);
    find_folder(o->model);
    if (!repository || access(hub.folder, F_OK)) { /* finds a model, as for every command */
        size_t n = strlen(hub.cache);
        char *dir = *o->model ? model_find(o->model, &e) : NULL;
        if (!dir && repository) die(&e);
        if (!dir || strncmp(dir, hub.cache, n) || strncmp(dir + n, "/models--", 9))
            give_up(USAGE, "'%.200s' is not in the hub's cache, %s", dir ? dir : o->model, hub.cache);
        snprintf(hub.folder, sizeof hub.folder, "%.*s", (int)(n + 1 + strcspn(dir + n + 1, "/")), dir);
        free(dir);
    }
    snprintf(locks, sizeof locks, "%s/.locks/%s", hub.cache, strrchr(hub.folder, '/') + 1);
    if (folder_remove(locks) == EWOULDBLOCK)
        give_up(FAILED, "%s is being downloaded by another process: end that first", o->model);
    if (folder_remove(hub.folder)) disk_fails(hub.folder);
    fprintf(stderr, "removed %s\n", hub.folder);
    return DONE;
}

/* Writes a small file, or the header of safetensors after its length in eight bytes and before a hole, to a folder with
 * the repository's name. */
static void save_head(File *f) {
    char range[64], path[MAX_PATH + MAX_NAME], *url = file_url(f);
    bool weights = !fnmatch("*.safetensors", f->name, 0);
    File head = {.name = f->name, .size = weights ? 8 : MAX_ANSWER, .body = &(Bytes){0}}, rest = head;
    uint64_t n = 0;
    Error e;
    if (!get(&head, url, weights ? "0-7" : NULL, &e)) give_up(e.code, "%s", e.text);
    if (weights) {
        memcpy(&n, head.body->data, head.body->n);
        rest.size = n = le64toh(n);
        snprintf(range, sizeof range, "8-%llu", (unsigned long long)n + 7);
        if (!n || n > MAX_ANSWER || n > f->size - head.body->n)
            give_up(BAD_MODEL, "%s: a header of %llu bytes does not fit", f->name, (unsigned long long)n);
        if (!get(&rest, url, range, &e)) give_up(e.code, "%s", e.text);
    }
    snprintf(path, sizeof path, "%s/%s", hub.name, f->name);
    make_folders(path);
    FILE *file = fopen(path, "wx");
    if (!file || fwrite(head.body->data, 1, head.body->n, file) < head.body->n || fflush(file) ||
        ftruncate(fileno(file), (off_t)f->size))
        disk_fails(path);
    fclose(file);
    bytes_free(head.body);
    free(url);
}

const char *outline_open(const char *repository, uint64_t *to_fetch) {
    static const char *const read[] = {"*.safetensors", "*config.json", "*.index.json"};
    const char *tmp = environment("TMPDIR");
    Error e;
    hub_open(&(Options){.model = repository});
    if (!list_files(&e)) give_up(e.code, "%s", e.text);
    *to_fetch = 0;
    for (int i = 0; i < hub.files; i++) *to_fetch += is_here(hub.file + i) ? 0 : hub.file[i].size;
    snprintf(hub.outline, sizeof hub.outline, "%s/infer-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(hub.outline)) disk_fails(hub.outline);
    atexit(remove_outline);
    if (chdir(hub.outline) || !getcwd(hub.outline, sizeof hub.outline)) disk_fails(hub.outline);
    for (int i = 0; i < hub.files; i++)
        if (matches(read, 3, hub.file[i].name)) save_head(hub.file + i);
    return hub.name;
}

bool hub_check(char token[300], char answer[400], Error *e) {
    bool silent = offline();
    char url[400];
    double begin = seconds();
    hub_open(&(Options){.model = "openai/gpt-oss-20b"});
    snprintf(token, 300, *hub.token ? "found in %s" : "none: only private and gated repositories need one",
             hub.token_from);
    snprintf(url, sizeof url, "%s/api/%s", hub.endpoint, *hub.token ? "whoami-v2" : "models/openai/gpt-oss-20b");
    hub.max_tries = 0;
    e->code = 0;
    if (!silent) cJSON_Delete(get_json(url, e));
    bool ok = !e->code || e->code == BAD_MODEL;
    snprintf(answer, 400,
             silent ? "%s is not tried: HF_HUB_OFFLINE is set"
             : ok   ? "%s answers in %.0f ms"
                    : "%s does not answer",
             hub.endpoint, (seconds() - begin) * 1e3);
    return ok;
}
