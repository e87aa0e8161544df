/* download.c: fetches a repository from a model hub into the hub's own cache, whose layout other tools share:
 *
 *   models--ORG--NAME/blobs/ID               a file's content; ID is its sha256, or its git hash if it is small
 *   models--ORG--NAME/blobs/ID.incomplete    its beginning: a download appends to it, the next one resumes there
 *   models--ORG--NAME/snapshots/COMMIT/FILE  a relative link to its blob
 *   models--ORG--NAME/refs/REVISION          the commit that a branch or tag named when it was fetched
 *   .locks/models--ORG--NAME/ID.lock         flock while the blob is fetched
 *
 * Several threads fetch files, each over a connection of its own. They hash bytes as they write them; a blob gets its
 * name only when the hash is right. The next process resumes from what is on disk, whatever happened to this one. So
 * the first error in any thread ends the process at once. Of what a server sends only commits and hashes (hexadecimal
 * digits) and file names (relative paths) become part of a path, after a check.
 *
 * libcurl follows redirects. It sends the token only to the scheme, host and port of the first address; before 7.83,
 * without the patch for CVE-2022-27776, it compares the host alone. */
#define CURL_DISABLE_DEPRECATION /* of CURLOPT_REDIR_PROTOCOLS: its successor needs 7.85 */
#include "host.h"

#include <ctype.h>
#include <curl/curl.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <libgen.h>
#include <math.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { JOBS = 8, MAX_JOBS = 64, MAX_PATH = 4096, MAX_NAME = 256, MAX_ANSWER = 64 << 20, MAX_TRIES = 5 };
enum { MAX_WAIT = 300 /* seconds */, SHOWN_FILES = 10 };
#define HEX_40  "^[0-9a-f]{40}$"
#define HEX_64  "^[0-9a-f]{64}$"
#define WEIGHTS "[.]safetensors$"

typedef struct {                  /* a file, or, with `body`, a small answer of at most `end` bytes */
    char *name, *id, *url, *blob; /* blob: path of its content in the cache */
    uint64_t size, end;           /* end: of the bytes that are wanted */
    _Atomic uint64_t done;        /* bytes that are here */
    int fd;
    EVP_MD_CTX *hash; /* of the bytes that are here */
    Bytes *body;
    char refusal[64], problem[CURL_ERROR_SIZE]; /* X-Error-Code of the hub; libcurl's message */
} File;

static struct {
    Texts include, exclude;
    const char *token_file;
    bool all;
    int jobs; /* 0: nothing is downloaded */
} given;

static struct {             /* a process works with one repository */
    char *endpoint, *token; /* token: NULL if there is none */
    const char *token_from;
    char *name, *revision, *commit;
    char *cache, *folder, *snapshot; /* folder: models--ORG--NAME in the cache; snapshot: the commit's folder in it */
    int max_tries, stall; /* tries without progress; seconds without bytes until a connection counts as lost */
    File *file;           /* config.json first */
    _Atomic int files;
    uint64_t total; /* bytes of all files */

    _Atomic int next;         /* this file and the later ones wait for a thread */
    _Atomic uint64_t arrived; /* bytes that this process fetched */
    Bytes said;               /* lines printed so far. The lock of stderr guards this, `lines` and the terminal */
    int lines;                /* of progress */
    double begun, drawn;

    pthread_t watch;
    sigset_t interrupt; /* SIGINT, which only this thread takes */
} hub = {.max_tries = MAX_TRIES, .stall = 10};

static _Thread_local Error error; /* of the last function that failed, as errno is */

/* ---- names ---- */

static bool is_like(const char *text, const char *pattern) {
    LOCAL(regfree) regex_t regex;
    regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB);
    return text && !regexec(&regex, text, 0, NULL, 0);
}

bool hub_repository(const char *name) {
    return strlen(name) <= 96 && !strstr(name, "--") && !strstr(name, "..") &&
           is_like(name, "^[a-zA-Z0-9_]([a-zA-Z0-9_.-]*[a-zA-Z0-9_])?(/[a-zA-Z0-9_]([a-zA-Z0-9_.-]*[a-zA-Z0-9_])?)?$");
}

/* Is it a relative path that stays inside its folder and can be shown? It has no empty part, "." or "..", no control
 * character and no backslash. */
static bool name_valid(const char *name) {
    LocalBytes shown = {0};
    bytes_shown(&shown, name, strlen(name), false);
    return shown.n && shown.n < MAX_NAME && !strcmp(shown.data, name) && is_like(name, "^[^/\\]+(/[^/\\]+)*$") &&
           !is_like(name, "(^|/)[.][.]?(/|$)");
}

/* ---- models here: ./models and the cache ---- */

/* A path in $HF_HOME or ~/.cache/huggingface, which all tools of the hub share. */
static char *hub_file(const char *name) {
    const char *hub = environment("HF_HOME"), *all = environment("XDG_CACHE_HOME"), *home = environment("HOME");
    if (hub) return path_join(hub, name);
    return all ? text_print("%s/huggingface/%s", all, name)
               : text_print("%s/.cache/huggingface/%s", home ? home : "", name);
}

char *hub_cache(void) {
    const char *cache = environment("HF_HUB_CACHE");
    return cache ? text_print("%s", cache) : hub_file("hub");
}

char *hub_folder(const char *repository) {
    const int n = (int)strcspn(repository, "@"), org = (int)strcspn(repository, "/@");
    LocalText cache = hub_cache();
    if (org == n) return text_print("%s/models--%.*s", cache, n, repository);
    return text_print("%s/models--%.*s--%.*s", cache, org, repository, n - org - 1, repository + org + 1);
}

uint64_t hub_room(char **folder) {
    struct statvfs disk = {0};
    LocalText cache = hub_cache();
    char *there = cache;
    while (statvfs(there, &disk) && strcmp(there, "/") && strcmp(there, ".")) there = dirname(there);
    *folder = text_print("%s", there);
    return (uint64_t)disk.f_bavail * disk.f_frsize;
}

static char *unread; /* Models.unread */

static DIR *open_folder(const char *path) {
    DIR *dir = opendir(path);
    if (!dir && errno != ENOENT && !unread) unread = text_print("%s cannot be read: %s", path, strerror(errno));
    return dir;
}

ModelEntry model_entry(const char *path) {
    ModelEntry m = {0};
    Error missing;
    LOCAL(tensors_close) Tensors t = {.container = container_at(path)};
    struct stat st;
    LocalText config = path_join(path, "config.json");
    LocalText tokenizer = path_join(path, "tokenizer.json");
    m.complete = t.container->files(&t, path, &missing);
    m.complete &= file_exists(path) || (!access(config, F_OK) && !access(tokenizer, F_OK));
    for (int i = 0; i < t.files; i++)
        if (stat(t.file[i].name, &st))
            m.complete = false;
        else
            m.bytes += (uint64_t)st.st_size;
    return m;
}

/* Adds the model at a path, unless its name is listed or, with no download `begun`, none of its weights are here.
 * Returns whether the name is in the list. */
static bool list_add(Models *list, const char *path, const char *name, bool begun) {
    for (int i = 0; i < list->n; i++)
        if (!strcmp(list->entry[i].name, name)) return true;
    ModelEntry m = model_entry(path);
    if (!m.bytes && !begun) return false;
    m.path = text_print("%s", path);
    m.name = text_print("%s", name);
    list->entry = reallocate(list->entry, (size_t)(list->n + 1) * sizeof m);
    list->entry[list->n++] = m;
    return true;
}

/* Adds what is at a path: a model in one file, or a folder, with such files in it and one folder deeper. They are shown
 * as SHOWN/FILE. depth: 2 at the path itself. Returns whether there is a model. */
static bool add_path(Models *list, const char *path, const char *shown, bool begun, int depth) {
    const bool file = file_exists(path);
    bool any = false;
    DIR *dir = file || !depth ? NULL : opendir(path);
    for (struct dirent *d; dir && (d = readdir(dir));) {
        if (*d->d_name == '.') continue;
        LocalText inner = path_join(path, d->d_name);
        LocalText name = path_join(shown, d->d_name);
        any |= add_path(list, inner, name, false, depth - 1);
    }
    if (dir) closedir(dir);
    /* a config.json beside files that are models is no model of its own */
    if ((file || depth == 2) && container_at(path)->fits(path)) any |= list_add(list, path, shown, begun && !any);
    return any;
}

/* The snapshot of a revision in a repository's folder of the hub's cache: a branch, a tag or a commit. NULL for the
 * revision: main or, without it, any. */
static char *find_snapshot(const char *repository, const char *revision) {
    const char *name = revision ? revision : "main";
    LocalBytes commit = {0};
    LocalText ref = text_print("%s/refs/%s", repository, name);
    LocalText folder = path_join(repository, "snapshots");
    char *found = NULL;
    Error e;
    if (!file_read(ref, 64, &commit, &e)) bytes_text(&commit, name);
    DIR *dir = open_folder(folder);
    for (struct dirent *d; dir && (d = readdir(dir));) {
        const bool named = !strcmp(d->d_name, commit.data);
        if (*d->d_name == '.' || (!named && (found || revision))) continue;
        free(found);
        found = path_join(folder, d->d_name);
    }
    if (dir) closedir(dir);
    return found;
}

/* Adds what is in `parent`; `hub`: each repository, models--ORG--NAME. A folder ORG--NAME is shown as ORG/NAME. */
static void add_all(Models *list, const char *parent, bool hub) {
    DIR *dir = open_folder(parent);
    for (struct dirent *d; dir && (d = readdir(dir));) {
        bool repository = !strncmp(d->d_name, "models--", 8);
        if (*d->d_name == '.' || repository != hub) continue;
        const char *name = d->d_name + (hub ? 8 : 0), *dashes = strstr(name, "--");
        LocalText path = path_join(parent, d->d_name);
        LocalText model = hub ? find_snapshot(path, NULL) : text_print("%s", path);
        LocalText shown = dashes && !file_exists(path) ? text_print("%.*s/%s", (int)(dashes - name), name, dashes + 2)
                                                       : text_print("%s", hub ? name : path);
        if (model) add_path(list, model, shown, hub, 2);
    }
    if (dir) closedir(dir);
}

Models models_list(void) {
    Models list = {0};
    LocalText cache = hub_cache();
    add_all(&list, "models", false);
    add_all(&list, cache, true);
    if (list.n) qsort(list.entry, (size_t)list.n, sizeof *list.entry, by_name);
    list.unread = unread;
    return list;
}

void models_free(Models *list) {
    for (int i = 0; i < list->n; i++) {
        free(list->entry[i].path);
        free(list->entry[i].name);
    }
    free(list->entry);
}

char *model_find(const char *argument, Error *e) {
    LOCAL(models_free) Models list = {0};
    LocalBytes all = {0};
    LocalBytes near = {0};
    const ModelEntry *hit = NULL;
    int hits = 0;
    struct stat st;
    if (file_exists(argument) && container_at(argument)->fits(argument)) return text_print("%s", argument);
    const char *revision = strchr(argument, '@');
    LocalText repository = hub_folder(argument);
    LocalText snapshot = NULL;
    const bool here = !stat(argument, &st) && S_ISDIR(st.st_mode);
    if (revision && !here) snapshot = find_snapshot(repository, revision + 1);
    const char *folder = here ? argument : snapshot;
    if (!folder)
        list = models_list();
    else if (add_path(&list, folder, argument, false, 2))
        qsort(list.entry, (size_t)list.n, sizeof *list.entry, by_name);
    for (const ModelEntry *m = list.entry; m < list.entry + list.n; m++) {
        if (!strcmp(m->name, argument)) return text_print("%s", m->path);
        bytes_print(&all, "%s%s", all.n ? ", " : "", m->name);
        if (!*argument || !strcasestr(m->name, argument)) continue;
        bytes_print(&near, "%s%s", near.n ? ", " : "", m->name);
        hits++, hit = m;
    }
    if (hits == 1 || (folder && !hits)) return text_print("%s", hit ? hit->path : folder);
    if (!list.n) bytes_text(&all, unread ? unread : "none is there");
    if (hits)
        fail(e, BAD_MODEL, "'%.100s' means more than one model: %s", argument, near.data);
    else if (hints && file_exists(argument))
        hints->refuse_file(argument, e);
    else if (access(argument, F_OK) && (strspn(argument, "/.~") || (errno != ENOENT && errno != ENOTDIR)))
        fail(e, BAD_MODEL, "%s: %s", argument, strerror(errno));
    else
        fail(e, BAD_MODEL,
             "'%.100s' is no folder, and none of the models in ./models and the hub's cache: %s; %sinfer download "
             "ORG/NAME fetches one",
             argument, all.data, hints ? hints->meant(NULL, &list, argument) : "");
    return NULL;
}

char *hub_owner(const char *path, char **folder, char **locks, bool *part) {
    LocalText cache = hub_cache();
    const size_t n = strlen(cache);
    if (strncmp(path, cache, n) || !is_like(path + n, "^/models--[^/]") || strstr(path + n, "/..")) return NULL;
    *folder = copy_text(path, n + 1 + strcspn(path + n + 1, "/"));
    *locks = text_print("%s/.locks%s", cache, *folder + n);
    *part = !is_like(path + strlen(*folder), "^(/snapshots/[^/]+)?/*$");
    char *name = text_print("%s", *folder + n + strlen("/models--")), *dashes = strstr(name, "--");
    if (dashes) *dashes = '/', memmove(dashes + 1, dashes + 2, strlen(dashes + 1));
    return name;
}

/* ---- messages, and the end ---- */

static void clear(void) {
    if (hub.lines) fprintf(stderr, "\r\033[%dA\033[J", hub.lines);
    hub.lines = 0;
}

/* Prints a line above the progress, but only once, even if several connections report it. */
static void say(const char *line) {
    flockfile(stderr);
    clear();
    if (!hub.said.n || !strstr(hub.said.data, line)) {
        put_text(stderr, NULL, "", line);
        bytes_print(&hub.said, "%s\n", line);
    }
    funlockfile(stderr);
}

static uint64_t bytes_here(void) {
    uint64_t sum = 0;
    for (int i = 0; i < hub.files; i++) sum += hub.file[i].done;
    return sum;
}

/* Ends the process with this thread's error, whatever other threads do, so that only the first one prints its line. */
__attribute__((noreturn)) static void end(void) {
    const uint64_t here = bytes_here();
    const int code = error.code;
    flockfile(stderr);
    clear();
    fflush(stdout);
    LocalText line = here ? text_print("%s (%s of %s are here)", error.text, SIZE(here), SIZE(hub.total))
                          : text_print("%s", error.text);
    put_text(stderr, NULL, "infer: ", line);
    _exit(code);
}

#define give_up(...) (fail(&error, __VA_ARGS__), end())

/* What to do after a network error; empty unless this command downloads. */
static const char *goes_on(void) { return given.jobs && hub.max_tries ? "; the same command goes on" : ""; }

/* A thread that ends the process at Ctrl+C, whatever the others wait for. */
static void *watch(void *interrupt) {
    int number;
    sigwait(interrupt, &number);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL); /* not with the lock of stderr */
    give_up(INTERRUPTED, "interrupted%s", goes_on());
}

/* Draws a line for each file that is being fetched and one for all, over the lines of before. Names come last, where
 * the terminal cuts long ones. Without a terminal it prints only the line for all, every ten seconds. */
static void draw(void) {
    const bool drawn = terminal && isatty(STDERR_FILENO);
    uint64_t done = bytes_here();
    double now = seconds(), rate = (double)hub.arrived / (now - hub.begun);
    long left = rate >= 1 ? (long)((double)(hub.total - done) / rate) : 0;
    const long unit = left < 120 ? 1 : 60;
    if (now - hub.drawn < (drawn ? 0.1 : 10)) return;
    hub.drawn = now;
    flockfile(stderr);
    clear();
    if (drawn) fputs(WRAP_OFF, stderr);
    for (const File *f = hub.file; drawn && f < hub.file + hub.files && hub.lines < SHOWN_FILES; f++)
        if (f->done && f->done < f->size)
            hub.lines++, fprintf(stderr, "  %3d%% of %s  %s\n", (int)(100 * f->done / f->size), SIZE(f->size), f->name);
    LocalBytes what = {0};
    bytes_print(&what, "of %s", SIZE(hub.total));
    if (left) bytes_print(&what, ", %s/s, %ld %s left", SIZE((uint64_t)rate), left / unit, unit == 1 ? "s" : "min");
    const double part = hub.total ? (double)done / (double)hub.total : 1;
    if (drawn) terminal->progress(stderr, part, what.data), hub.lines++;
    if (!drawn) fprintf(stderr, "%3d%% %s", (int)(100 * part), what.data);
    fputc('\n', stderr);
    funlockfile(stderr);
}

/* ---- the disk ---- */

/* Ends the process because of errno. */
__attribute__((noreturn)) static void disk_fails(const char *path) {
    bool full = errno == ENOSPC || errno == EDQUOT, denied = errno == EACCES || errno == EROFS || errno == EPERM;
    int code = full ? NO_ROOM : denied ? NO_NETWORK : FAILED;
    give_up(code, "%s: %s; %s", path, strerror(errno),
            full ? "free some space: the same command goes on" : "HF_HOME or HF_HUB_CACHE chooses another place");
}

/* Makes the folders of `path` up to its last slash. Inside the cache none may be a link, which could lead out of it. */
static void make_folders(const char *path) {
    struct stat st;
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        LocalText part = copy_text(path, (size_t)(slash - path));
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

static bool is_here(const File *f) {
    struct stat st;
    return !lstat(f->blob, &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size == f->size;
}

/* Links a complete file into the snapshot. Even if the process is killed, a link is there or not. */
static void file_link(File *f) {
    LocalText path = text_print("%s/%s", hub.snapshot, f->name);
    LocalBytes blob = {0};
    char found[MAX_PATH];
    bytes_text(&blob, "../../");
    for (const char *s = f->name; (s = strchr(s, '/')); s++) bytes_text(&blob, "../");
    bytes_print(&blob, "blobs/%s", f->id);
    make_folders(path);
    while (symlink(blob.data, path)) {
        if (errno != EEXIST) disk_fails(path);
        /* never remove a correct link: another process may have made it, and need it */
        ssize_t n = readlink(path, found, sizeof found);
        if (n == (ssize_t)blob.n && !memcmp(found, blob.data, blob.n)) break;
        if (remove(path) && errno != ENOENT) disk_fails(path);
    }
    f->done = f->size;
}

/* Begins a file's hash with the bytes that are on disk. anew: removes them before. */
static void file_begin(File *f, bool anew) {
    char head[32], part[1 << 16];
    bool git = strlen(f->id) == 40;
    f->done = 0;
    if (anew && ftruncate(f->fd, 0)) disk_fails(f->name);
    EVP_DigestInit_ex(f->hash, git ? EVP_sha1() : EVP_sha256(), NULL);
    /* git hashes a header with the size first */
    if (git) EVP_DigestUpdate(f->hash, head, 1 + (size_t)sprintf(head, "blob %llu", (unsigned long long)f->size));
    for (ssize_t got = 1; f->done < f->size && got; f->done += (uint64_t)got) {
        uint64_t left = f->size - f->done;
        got = pread(f->fd, part, left < sizeof part ? left : sizeof part, (off_t)f->done);
        if (got < 0) disk_fails(f->name);
        EVP_DigestUpdate(f->hash, part, (size_t)got);
    }
}

/* ---- the wire ---- */

static bool offline(void) { return is_like(getenv("HF_HUB_OFFLINE"), "^(1|[tT][rR][uU][eE]|[yY][eE][sS]|[oO][nN])$"); }

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
    if (f->body) bytes_add(f->body, data, n);
    const char *kind = f->done ? NULL : file_kind(data, n);
    if (n > f->end - f->done)
        return fail(&error, NO_NETWORK, "a server sends more than the %llu bytes that it should: try again later",
                    (unsigned long long)f->end);
    if (kind && !given.all && is_like(f->name, "[.](safetensors|json)$"))
        return fail(&error, BAD_MODEL, "%s: the hub sends %s in its place: see %s/%s", f->name, kind, hub.endpoint,
                    hub.name);
    if (!f->body) {
        errno = ENOSPC; /* a full disk begins with a short write, which sets no errno */
        if (pwrite(f->fd, data, n, (off_t)f->done) < (ssize_t)n) disk_fails(f->name);
        EVP_DigestUpdate(f->hash, data, n);
        hub.arrived += n;
    }
    f->done += n;
    return n;
}

/* Writes to `error` why a transfer failed, and returns what may help; NULL if another try would fail as well. again: a
 * retry that made no progress. */
static const char *find_cause(const File *f, const char *url, CURLcode code, long status, bool again) {
    static const struct {
        const char *code, *text, *cure; /* cure NULL: a token */
        int status, exit;
    } refusals[] = {
        {"GatedRepo", "asks for its licence to be accepted on its page", NULL, 0, NO_NETWORK},
        {"RevisionNotFound", "has no such revision", "its page lists them; a commit needs its 40 digits", 0, BAD_MODEL},
        {"EntryNotFound", "lacks a file of its own list", "try again later", 0, BAD_MODEL},
        {"DisabledRepo", "was disabled by the hub", "its page may say why", 0, NO_NETWORK},
        {"RepoNotFound", "is not there, or it is private; check its name", NULL, 404, BAD_MODEL},
        {"-", "asks for a token, which /settings/tokens makes", NULL, 401, NO_NETWORK},
        {"-", "denies access", NULL, 403, NO_NETWORK},
        {"", "cannot be downloaded now", NULL, 0, NO_NETWORK}}; /* also from another host */
    const char *scheme = strstr(url, "://"), *name = scheme ? scheme + 3 : url;
    int n = (int)strlen(hub.endpoint), host = (int)(name - url + (ptrdiff_t)strcspn(name, "/"));
    bool at_hub = !strncmp(url, hub.endpoint, (size_t)n) && url[n] == '/', limited = status == 429;
    if (code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_TOO_MANY_REDIRECTS || code == CURLE_URL_MALFORMAT) {
        fail(&error, NO_NETWORK, "%s: %s: refused, because redirects lead to https only, at most ten times", hub.name,
             f->problem);
        return NULL;
    }
    /* a content host refuses a signature that has expired; the next try gets a new one from the hub */
    if ((!code && status / 100 == 3) || (status / 100 == 4 && status != 408 && !limited && (at_hub || again))) {
        size_t i = at_hub ? 0 : sizeof refusals / sizeof *refusals - 1;
        while (!strstr(f->refusal, refusals[i].code) && status != refusals[i].status) i++;
        const char *cure = refusals[i].cure;
        if (!cure)
            cure = hub.token ? "the token that was given may have no access" : "HF_TOKEN or --token-file gives a token";
        fail(&error, refusals[i].exit, "%s (%s) %s: %s/%s (status %ld); %s", hub.name, hub.revision, refusals[i].text,
             hub.endpoint, hub.name, status, cure);
        return NULL;
    }
    fail(&error, NO_NETWORK, "%.*s: %s", host, url, curl_easy_strerror(code ? code : CURLE_PARTIAL_FILE));
    if (status < 400) return "is the network up? HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror";
    fail(&error, NO_NETWORK, "%.*s answers with status %ld%s", host, url, status,
         limited ? ", it limits the rate" : "");
    return limited ? "try again later, or with a token (HF_TOKEN), which has a higher limit" : "try again later";
}

static CURL *connection(File *f) {
    CURL *easy = curl_easy_init();
    const char *trusted = environment("CURL_CA_BUNDLE");
    long safe = !strncmp(hub.endpoint, "https:", 6) ? CURLPROTO_HTTPS : CURLPROTO_HTTPS | CURLPROTO_HTTP;
    if (hub.token) curl_easy_setopt(easy, CURLOPT_XOAUTH2_BEARER, hub.token);
    curl_easy_setopt(easy, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
    curl_easy_setopt(easy, CURLOPT_URL, f->url);
    curl_easy_setopt(easy, CURLOPT_ACCEPT_ENCODING, "identity");
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "infer");
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(easy, CURLOPT_MAXREDIRS, 10L);
    curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS, safe);
    curl_easy_setopt(easy, CURLOPT_FAILONERROR, 1L); /* nobody reads the pages that errors come with */
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
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

static void connection_close(CURL **easy) { curl_easy_cleanup(*easy); }

/* Fetches the missing part of a file up to its `end`, or a small answer. */
static bool get(File *f) {
    if (offline())
        return fail(&error, NO_NETWORK, "%s may be incomplete here, and HF_HUB_OFFLINE forbids downloads: unset it",
                    hub.name);
    LOCAL(connection_close) CURL *easy = connection(f);
    uint64_t best = f->done;        /* the most bytes so far */
    for (int tries = 0;; tries++) { /* tries without progress so far */
        char *asked = NULL;
        long status = 0;
        curl_off_t told = 0;
        if (f->body) f->done = f->body->n = 0;
        *f->problem = *f->refusal = 0;
        LocalText range = f->end < f->size ? text_print("%llu-%llu", (unsigned long long)f->done, f->end - 1ULL) : NULL;
        curl_easy_setopt(easy, CURLOPT_RANGE, range);
        curl_easy_setopt(easy, CURLOPT_RESUME_FROM_LARGE, (curl_off_t)(range ? 0 : f->done));
        error.code = 0;
        CURLcode code = curl_easy_perform(easy);
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
        curl_easy_getinfo(easy, CURLINFO_EFFECTIVE_URL, &asked);
        curl_easy_getinfo(easy, CURLINFO_RETRY_AFTER, &told);
        if (error.code) return false; /* of on_body() */
        if (status / 100 == 2 && (f->body ? !code : f->done == f->end)) return true;
        if (f->done > best) best = f->done, tries = 0;
        const char *cure = find_cause(f, asked, code, status, tries);
        if (!cure) return false;
        double wait = fmax(told, tries ? 0.25 * (1 << tries) : 0); /* 0 after progress, then 0.5, 1, 2, 4 s */
        if (tries >= hub.max_tries || told > MAX_WAIT)
            return fail(&error, NO_NETWORK, "%s: %s%s", status < 400 && *f->problem ? f->problem : error.text, cure,
                        goes_on());
        fail(&error, NO_NETWORK, "%s: trying again", error.text);
        if (wait > 0) say(error.text);
        usleep((useconds_t)(wait * 1e6));
        if (code == CURLE_RANGE_ERROR) file_begin(f, true); /* this server sends no parts of files */
    }
}

/* Fetches an answer of the hub's API. */
static cJSON *get_json(char *url) {
    LocalBytes body = {0};
    bytes_text(&body, "");
    if (!get(&(File){.url = url, .body = &body, .end = MAX_ANSWER})) return NULL;
    cJSON *json = json_parse(body.data, body.n, "the hub's answer", &error);
    if (cJSON_IsObject(json)) return json;
    cJSON_Delete(json);
    const char *kind = file_kind(body.data, body.n);
    fail(&error, NO_NETWORK, "%s answers with %s: does this network ask to log in?", hub.endpoint,
         kind ? kind : "no JSON object");
    return NULL;
}

/* The address of a file at the hub, with its name %-escaped except for slashes. */
static char *file_url(const char *name) {
    Bytes url = {0};
    bytes_print(&url, "%s/%s/resolve/%s/", hub.endpoint, hub.name, hub.commit);
    for (const char *s = name; *s; s++)
        bytes_print(&url, isalnum(*s & 255) || strchr("-._~/", *s) ? "%c" : "%%%02X", *s & 255);
    return url.data;
}

/* ---- fetching ---- */

/* Fetches the rest of a file. If the hash is wrong then, it fetches all of the file once more. */
static void fetch_blob(File *f) {
    char found[2 * EVP_MAX_MD_SIZE + 1] = "";
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    LocalText partial = text_print("%s.incomplete", f->blob);
    f->fd = open_file(partial);
    file_begin(f, false);
    for (int tries = 0;; tries++) {
        if (f->done < f->size && !get(f)) end();
        EVP_DigestFinal_ex(f->hash, digest, &n);
        for (unsigned i = 0; i < n; i++) sprintf(found + 2 * i, "%02x", digest[i]);
        if (!strcmp(found, f->id)) break;
        file_begin(f, true);
        if (tries)
            give_up(NO_NETWORK,
                    "%s arrives twice with the hash %.12s... instead of %.12s...: something between here and the hub "
                    "changes it; try another network, or later",
                    f->name, found, f->id);
    }
    /* a crash must not leave the name without the content */
    if (ftruncate(f->fd, (off_t)f->size) || fdatasync(f->fd) || rename(partial, f->blob)) disk_fails(partial);
    close(f->fd);
}

/* Fetches a file under the lock that other tools take, too. A dead process holds no lock. */
static void fetch(File *f) {
    LocalText path = text_print("%s/.locks/%s/%s.lock", hub.cache, strrchr(hub.folder, '/') + 1, f->id);
    LocalText waiting = text_print("%s is being fetched already: waiting", f->name);
    LocalText done = text_print("✓ %s  %s", f->name, SIZE(f->size));
    if (!is_here(f)) {
        int lock = open_file(path);
        if (flock(lock, LOCK_EX | LOCK_NB)) say(waiting), flock(lock, LOCK_EX);
        if (!is_here(f)) fetch_blob(f); /* another process may have done it meanwhile */
        close(lock);
        say(done);
    }
    file_link(f);
}

/* A thread that fetches files until none is left. */
static void *work(void *nothing) {
    for (int i; (i = hub.next++) < hub.files;) fetch(hub.file + i);
    return nothing;
}

/* ---- what to fetch ---- */

static bool wants_default(void) { return !given.all && !given.include.n && !given.exclude.n; }

static bool matches(const Texts *globs, const char *name) {
    bool hit = false;
    for (int i = 0; i < globs->n; i++) hit |= !fnmatch(globs->text[i], name, 0);
    return hit;
}

/* Is a file to be fetched? By default those at the root that infer reads. */
static bool wanted(const char *name) {
    if (matches(&given.exclude, name)) return false;
    if (given.include.n) return matches(&given.include, name);
    if (given.all) return true;
    return !is_like(name, "^consolidated") && /* another copy of the weights */
           is_like(name, "^([^/]*[.]safetensors([.]index[.]json)?|tokenizer[^/]*|chat_template[.][^/]*|merges[.]txt|"
                         "(config|generation_config|quantize_config|vocab|special_tokens_map|added_tokens)[.]json)$");
}

/* Adds an entry of the hub's list of files, and returns true, if it is wanted. */
static bool add_file(const cJSON *entry) {
    const char *name = json_string(entry, "rfilename");
    const cJSON *lfs = json_get(entry, "lfs"), *size = json_get(lfs ? lfs : entry, "size");
    const char *id = lfs ? json_string(lfs, "sha256") : json_string(entry, "blobId");
    int64_t bytes;
    if (!name || !name_valid(name))
        give_up(BAD_MODEL, "the hub lists '%.200s' in %s, which is no safe file name: refused",
                name ? name : "(no name)", hub.name);
    if (!wanted(name)) return false;
    if (!is_like(id, lfs ? HEX_64 : HEX_40) || !json_whole(size, 0, INT64_MAX / 2, &bytes))
        give_up(BAD_MODEL, "the hub lists %s with an invalid hash or size: refused", name);
    File *f = hub.file + hub.files++;
    if (!strcmp(name, "config.json")) *f = *hub.file, f = hub.file;
    *f = (File){.size = (uint64_t)bytes, .end = (uint64_t)bytes, .url = file_url(name), .hash = EVP_MD_CTX_new()};
    f->name = text_print("%s", name);
    f->id = text_print("%s", id);
    f->blob = text_print("%s/blobs/%s", hub.folder, id);
    hub.total += f->size;
    return true;
}

/* Asks the hub for the commit of the revision and the list of its files. */
static bool list_files(void) {
    char *revision = curl_easy_escape(NULL, hub.revision, 0);
    LocalText url = text_print("%s/api/models/%s/revision/%s?blobs=true", hub.endpoint, hub.name, revision);
    curl_free(revision);
    LocalJson json = get_json(url);
    if (!json) return false;
    const cJSON *entry, *files = json_get(json, "siblings");
    const char *commit = json_string(json, "sha"), *foreign = "", *advice = "";
    bool weights = !wants_default();
    if (!is_like(commit, HEX_40) || !cJSON_IsArray(files))
        give_up(BAD_MODEL, "the hub names the commit '%.80s' for %s, or no list of files: refused",
                commit ? commit : "(missing)", hub.name);
    hub.commit = text_print("%s", commit);
    free(hub.snapshot);
    hub.snapshot = text_print("%s/snapshots/%s", hub.folder, commit);
    hub.file = allocate_zero((size_t)cJSON_GetArraySize(files), sizeof *hub.file); /* in place: watch() reads it */
    cJSON_ArrayForEach(entry, files) weights |= add_file(entry) && is_like(json_string(entry, "rfilename"), WEIGHTS);
    for (entry = weights ? NULL : files->child; entry; entry = entry->next) {
        const char *name = json_string(entry, "rfilename");
        if (is_like(name, "[.](bin|pt|pth)$") && !*advice) foreign = name;
        for (int i = 0; containers[i]; i++)
            if (containers[i]->ending && is_like(name, containers[i]->ending))
                foreign = name, advice = containers[i]->advice;
    }
    if (!weights)
        give_up(BAD_MODEL, "%s has no safetensors files at its root, which infer reads%s%s; %s--all fetches it all",
                hub.name, *foreign ? ", but " : "", foreign, advice);
    if (!hub.files)
        give_up(BAD_MODEL, "%s: none of its %d files is wanted: see --include and --all", hub.name,
                cJSON_GetArraySize(files));
    return true;
}

/* ---- a repository ---- */

/* Finds the token as other tools do: HF_TOKEN, the file HF_TOKEN_PATH, the file `token` in the hub's home. These files
 * may be missing, but not the one of --token-file. */
static bool find_token(void) {
    const char *asked = given.token_file, *named = environment("HF_TOKEN_PATH");
    const char *text = asked ? NULL : environment("HF_TOKEN");
    LocalBytes content = {0};
    char rest[2];
    hub.token_from = asked ? asked : text ? "HF_TOKEN" : named ? named : hub_file("token");
    if (!text && !file_read(hub.token_from, MAX_PATH, &content, &error) && asked) return error.code = USAGE, false;
    if (!text && !content.n && !asked) return true;
    return (sscanf(text ? text : content.data, "%ms%1s", &hub.token, rest) == 1 && is_like(hub.token, "^[!-~]+$")) ||
           fail(&error, USAGE, "%s holds no token, or characters that no token has: mend or remove it", hub.token_from);
}

/* Finds the hub, the token and the repository ORG/NAME[@REVISION]. From now on Ctrl+C ends each wait. USAGE. */
static bool hub_open(const char *repository) {
    const char *endpoint = environment("HF_ENDPOINT"), *stall = environment("HF_HUB_DOWNLOAD_TIMEOUT");
    const char *at = strchrnul(repository, '@');
    hub.begun = hub.drawn = seconds();
    curl_global_init(CURL_GLOBAL_DEFAULT);
    sigemptyset(&hub.interrupt);
    sigaddset(&hub.interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &hub.interrupt, NULL);
    if (pthread_create(&hub.watch, NULL, watch, &hub.interrupt)) give_up(FAILED, "too many threads");
    if (stall) text_whole(stall, 1, INT32_MAX, &hub.stall);
    hub.endpoint = text_print("%s", endpoint ? endpoint : "https://huggingface.co");
    for (char *end = strchr(hub.endpoint, 0); end > hub.endpoint && end[-1] == '/';) *--end = 0;
    if (!is_like(hub.endpoint, "^https?://[^/@]+(/[^@]*)?$"))
        return fail(&error, USAGE, "HF_ENDPOINT should be a URL like https://huggingface.co, without a password");
    if (!find_token()) return false;
    hub.name = copy_text(repository, (size_t)(at - repository));
    hub.revision = text_print("%s", *at ? at + 1 : "main");
    if (!hub_repository(hub.name))
        return fail(&error, USAGE, "'%.200s' is no repository at %s: ORG/NAME is needed", repository, hub.endpoint);
    hub.cache = hub_cache(), hub.folder = hub_folder(hub.name);
    return name_valid(hub.revision) ||
           fail(&error, USAGE, "'%.100s' is no revision: a branch, a tag or a commit stands behind @", hub.revision);
}

/* Ends the process if the disk has no room for what is missing. */
static void check_room(void) {
    uint64_t missing = 0;
    LocalText folder = NULL;
    const uint64_t room = hub_room(&folder);
    for (const File *f = hub.file; f < hub.file + hub.files; f++) {
        struct stat st = {0};
        LocalText partial = text_print("%s.incomplete", f->blob);
        if (!is_here(f))
            missing += f->size - (stat(partial, &st) || (uint64_t)st.st_size > f->size ? 0 : (uint64_t)st.st_size);
    }
    if (missing > room)
        give_up(NO_ROOM, "%s needs %s more, and %s has %s free: free some space, or choose another disk with HF_HOME",
                hub.name, SIZE(missing), folder, SIZE(room));
}

/* Fetches the listed files. For a model that infer cannot run, it ends the process after config.json. */
static void fetch_listed(void) {
    pthread_t thread[MAX_JOBS];
    int n = 0;
    LocalText what = text_print("%s at %.12s: %d files, %s", hub.name, hub.commit, hub.files, SIZE(hub.total));
    put_text(stderr, NULL, "", what);
    check_room();
    if (wants_default() && !strcmp(hub.file->name, "config.json")) {
        fetch(hub.file + hub.next++);
        Error why;
        if (!model_runs(hub.snapshot, &why))
            give_up(BAD_MODEL, "%s cannot run here: %s; --all fetches it anyway", hub.name, why.text);
    }
    for (int rest = hub.files - hub.next; n < given.jobs && n < rest; n++)
        if (pthread_create(thread + n, NULL, work, NULL)) give_up(FAILED, "too many threads: --jobs 1 needs one");
    for (int i = 0; i < n; i++)
        for (; pthread_tryjoin_np(thread[i], NULL); usleep(20000)) draw();
    clear();
}

/* Fetches into hub.snapshot what is missing of a repository. */
static void fetch_repository(const char *repository) {
    LocalBytes known = {0}; /* the commit that the revision named last */
    if (!hub_open(repository)) end();
    LocalText ref = text_print("%s/refs/%s", hub.folder, hub.revision);
    if (!file_read(ref, 64, &known, &error)) bytes_text(&known, hub.revision);
    hub.snapshot = text_print("%s/snapshots/%s", hub.folder, known.data);
    bool fixed = is_like(hub.revision, HEX_40);
    bool whole =
        is_like(known.data, HEX_40) && (wants_default() ? model_entry(hub.snapshot).complete : given.include.n);
    for (int i = 0; i < given.include.n; i++) { /* to know what a pattern means takes the hub's list */
        LocalText path = text_print("%s/%s", hub.snapshot, given.include.text[i]);
        whole &= file_exists(path);
    }
    if (whole && (fixed || offline())) return;
    hub.max_tries = whole ? 0 : MAX_TRIES;
    if (!list_files()) {
        if (!whole) end();
        fprintf(stderr, "%s\nThe files that are here are complete: infer uses them.\n", error.text);
        return;
    }
    hub.max_tries = MAX_TRIES;
    fetch_listed();
    if (!fixed && strcmp(known.data, hub.commit)) {
        int fd = open_file(ref);
        errno = ENOSPC; /* as in on_body() */
        if (dprintf(fd, "%s", hub.commit) < 40 || ftruncate(fd, 40)) disk_fails(ref);
        close(fd);
    }
}

const char *hub_fetch(const char *repository) {
    if (!given.jobs) given.jobs = JOBS;
    fetch_repository(repository);
    pthread_cancel(hub.watch);
    pthread_join(hub.watch, NULL);
    pthread_sigmask(SIG_UNBLOCK, &hub.interrupt, NULL);
    return hub.snapshot;
}

const Option download_options[] = {
    {0, "include", "G", TEXTS, &given.include, .most = MOST_VALUES,
     .help = "fetch files that match the pattern, instead of the usual ones; can be repeated"},
    {0, "exclude", "G", TEXTS, &given.exclude, .most = MOST_VALUES,
     .help = "skip files that match the pattern; can be repeated"},
    {0, "all", NULL, SWITCH, &given.all, .help = "fetch all files"},
    {0, "token-file", "F", TEXT, &given.token_file,
     .help = "a file with your account's token, for private and gated repositories; else HF_TOKEN, HF_TOKEN_PATH or "
             "$HF_HOME/token. It is sent to the hub only"},
    {0, "jobs", "N", WHOLE, &given.jobs, 1, MAX_JOBS, "8", "files at once"},
    {0}};

uint64_t hub_list(const char *repository) {
    uint64_t to_fetch = 0;
    if (!hub_open(repository) || !list_files()) end();
    for (int i = 0; i < hub.files; i++) to_fetch += is_here(hub.file + i) ? 0 : hub.file[i].size;
    return to_fetch;
}

uint64_t hub_head(const char *name, uint64_t n, Bytes *out) {
    const File *f = hub.file;
    while (f < hub.file + hub.files && strcmp(f->name, name)) f++;
    if (f == hub.file + hub.files) return 0;
    File head = {.name = f->name, .url = f->url, .size = f->size, .end = f->size < n ? f->size : n, .body = out};
    bytes_text(out, "");
    if (!get(&head)) end();
    return f->size;
}

bool hub_check(char token[300], char answer[400], Error *e) {
    if (!hub_open("openai/gpt-oss-20b")) return *e = error, false;
    snprintf(token, 300, hub.token ? "found in %s" : "none: only private and gated repositories need one",
             hub.token_from);
    snprintf(answer, 400, "%s is not tried: HF_HUB_OFFLINE is set", hub.endpoint);
    if (offline()) return true;
    LocalText url = text_print("%s/api/%s", hub.endpoint, hub.token ? "whoami-v2" : "models/openai/gpt-oss-20b");
    hub.max_tries = 0;
    LocalJson json = get_json(url);
    bool ok = json || error.code == BAD_MODEL;
    *e = error;
    snprintf(answer, 400, ok ? "%s answers in %.0f ms" : "%s", hub.endpoint, (seconds() - hub.begun) * 1e3);
    return ok;
}
