/* download.c: fetches what a repository holds into the hub's cache. See download.h for the layout.
 *
 * A blob that is being fetched is ID.partial: the bytes where they belong, and behind them a journal, the number of
 * bytes that have arrived of each segment. Segments are fetched at once in any order; each write of bytes is followed
 * by one of the journal, so that whatever kills the process, what the journal counts is there. A thread for each file
 * hashes behind the contiguous frontier. Only when the hash is right the journal is cut off and the file renamed. The
 * ID.incomplete of other tools, a plain prefix, is taken over. */
#include "download.h"
#include "model.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <ftw.h>
#include <getopt.h>
#include <math.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum {
    SEGMENT = 32 << 20,
    HASH_PART = 1 << 20,
    MOST_FILES = 20000,
    MOST_TREE = 64 << 20,
    MOST_PAGES = 100,
    MOST_GLOBS = 64,
    MOST_JOBS = 64,
    MOST_NAME = 1000,
    SHOWN_FILES = 10
};

typedef struct { /* one file of the repository */
    char *name, id[65];
    uint64_t size;
    enum { WAITING, OPEN, HERE } state;
    double retry;      /* when another process had the lock */
    int lock, fd;      /* while OPEN */
    uint64_t *arrived; /* (segments) bytes of each; what the journal says */
    bool *busy;        /* (segments) a request is running */
    int requests;      /* that are */
    uint64_t done;     /* their sum */
    Request *stream;   /* the only request, of a server that takes no ranges */
    char *direct;      /* the content host's signed URL */
    bool spoiled;      /* its hash was wrong once */

    pthread_t thread; /* hashes; what follows is shared with it */
    pthread_mutex_t mutex;
    pthread_cond_t more;
    uint64_t frontier; /* all bytes before it are there */
    bool stop, hashed;
    int problem;    /* errno of reading or syncing */
    char found[65]; /* the hash */
    Hub *hub;
} File;

typedef struct {
    Hub *hub;
    char repository[100], revision[200], commit[41], only[MOST_NAME];
    const char *include[MOST_GLOBS], *exclude[MOST_GLOBS], *token_file;
    int includes, excludes, jobs;
    bool all, dry_run;
    char *cache, *folder, *locks; /* folder: models--ORG--NAME in the cache */
    File *file;
    int files, here, requests;

    bool terminal;           /* progress is redrawn in place */
    int lines;               /* of it on the screen */
    uint64_t total, fetched; /* bytes; those that were there when it was drawn last */
    double drawn, rate;
} Download;

/* ---- names ---- */

static bool is_hex(const char *text, size_t n) {
    return text && strlen(text) == n && strspn(text, "0123456789abcdef") == n;
}

/* A relative path that stays where it is put: no empty part, "." or "..", no control byte, no backslash. */
static bool name_valid(const char *name) {
    size_t n = strlen(name);
    if (!n || n >= MOST_NAME) return false;
    for (const char *s = name; *s; s++)
        if ((unsigned char)*s < 32 || *s == 127 || *s == '\\') return false;
    for (const char *part = name;; part++) {
        size_t length = strcspn(part, "/");
        if (!length || length > 255 || (length <= 2 && !strncmp(part, "..", length))) return false;
        if (!*(part += length)) return true;
    }
}

bool repository_valid(const char *name) {
    size_t n = strlen(name);
    const char *slash = strchr(name, '/');
    if (!n || n > 96 || strstr(name, "--") || strstr(name, "..") || (slash && strchr(slash + 1, '/'))) return false;
    for (const char *s = name; *s; s++) {
        bool first = s == name || s[-1] == '/', last = !s[1] || s[1] == '/';
        bool letter = (*s >= '0' && *s <= '9') || (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || *s == '_';
        if (!letter && (first || last || !strchr("-./", *s))) return false;
    }
    return true;
}

char *repository_folder(const char *name) {
    Bytes text = {0};
    bytes_text(&text, "models--");
    for (; *name; name++) bytes_add(&text, *name == '/' ? "--" : name, *name == '/' ? 2 : 1);
    return text.data;
}

/* ORG/NAME, ORG/NAME@REVISION, or a page of it at the hub. */
static bool parse_target(Download *d, const char *text, Error *e) {
    const char *sites[] = {hub_endpoint(d->hub), "https://huggingface.co", "https://hf.co"}, *at;
    char copy[MOST_NAME], *part[5] = {0}, *rest = copy;
    bool url = strstr(text, "://");
    for (size_t i = 0; i < 3 && url; i++) {
        size_t n = strlen(sites[i]);
        if (!strncmp(text, sites[i], n) && text[n] == '/') text += n + 1, url = false;
    }
    if (url) return fail(e, USAGE, "'%.200s' is not at %s: HF_ENDPOINT names another hub", text, hub_endpoint(d->hub));
    snprintf(copy, sizeof copy, "%.*s", (int)strcspn(text, "?#"), text);
    if ((at = strchr(copy, '@'))) {
        snprintf(d->revision, sizeof d->revision, "%s", at + 1);
        copy[at - copy] = 0;
    }
    for (int i = 0; i < 4 && rest; i++) part[i] = strsep(&rest, "/");
    if (part[2] && (!strcmp(part[2], "tree") || !strcmp(part[2], "blob") || !strcmp(part[2], "resolve")) && part[3]) {
        snprintf(d->revision, sizeof d->revision, "%s", part[3]);
        if (rest && *rest && *part[2] != 't') snprintf(d->only, sizeof d->only, "%s", rest);
        part[2] = NULL;
    }
    snprintf(d->repository, sizeof d->repository, "%s%s%s", part[0], part[1] ? "/" : "", part[1] ? part[1] : "");
    if ((part[2] && *part[2]) || !repository_valid(d->repository))
        return fail(e, USAGE, "'%.200s' is no repository of models: ORG/NAME is needed, or the URL of its page", text);
    if (!name_valid(d->revision)) return fail(e, USAGE, "'%.100s' is no revision", d->revision);
    return true;
}

/* ---- what is wanted ---- */

static bool matches(const char *const *glob, int n, const char *name) {
    bool hit = false;
    for (int i = 0; i < n; i++) hit |= !fnmatch(glob[i], name, 0);
    return hit;
}

/* By default what the engine reads, and only at the root. */
static bool wanted(const Download *d, const char *name) {
    static const char *const read[] = {
        "*.safetensors", "*.safetensors.index.json", "config.json",       "generation_config.json",
        "tokenizer*",    "special_tokens_map.json",  "added_tokens.json", "vocab.json",
        "merges.txt",    "chat_template.*"};
    if (matches(d->exclude, d->excludes, name)) return false;
    if (*d->only) return !strcmp(d->only, name);
    if (d->includes) return matches(d->include, d->includes, name);
    return d->all || (!strchr(name, '/') && matches(read, sizeof read / sizeof *read, name));
}

static bool wants_default(const Download *d) { return !d->all && !d->includes && !d->excludes && !*d->only; }

/* An entry of the hub's list of files. */
static bool add_file(Download *d, const cJSON *entry, Error *e) {
    const char *name = json_string(entry, "path"), *type = json_string(entry, "type");
    const cJSON *lfs = json_get(entry, "lfs"), *size = json_get(lfs ? lfs : entry, "size");
    const char *id = json_string(lfs ? lfs : entry, "oid");
    int64_t bytes;
    if (!name || !type || !name_valid(name))
        return fail(e, BAD_MODEL, "the hub lists a file '%.200s' in %s, which is no safe file name: refused",
                    name ? name : "(no name)", d->repository);
    if (strcmp(type, "file") || !wanted(d, name)) return true;
    if (!is_hex(id, lfs ? 64 : 40))
        return fail(e, BAD_MODEL, "the hub lists %s with the hash '%.80s', which is none: refused", name,
                    id ? id : "(missing)");
    if (!json_whole(size, 0, INT64_MAX / 2, &bytes))
        return fail(e, BAD_MODEL, "the hub lists %s without a valid size", name);
    if (d->files == MOST_FILES)
        return fail(e, BAD_MODEL, "%s has more than %d files: choose with --include", d->repository, MOST_FILES);
    d->file = reallocate(d->file, (size_t)(d->files + 1) * sizeof *d->file);
    File *f = d->file + d->files++;
    *f = (File){.name = copy_text(name, strlen(name)), .size = (uint64_t)bytes, .fd = -1, .lock = -1, .hub = d->hub};
    memcpy(f->id, id, strlen(id) + 1);
    d->total += f->size;
    return true;
}

static int by_name(const void *a, const void *b) { return strcmp(((const File *)a)->name, ((const File *)b)->name); }

static int by_size(const void *a, const void *b) {
    const File *x = a, *y = b;
    return x->size != y->size ? (x->size > y->size) - (x->size < y->size) : strcmp(x->name, y->name);
}

/* Which commit the revision is now. */
static bool find_commit(Download *d, bool once, Error *e) {
    Bytes url = {0}, body = {0};
    if (is_hex(d->revision, 40)) return memcpy(d->commit, d->revision, 41), true;
    bytes_print(&url, "%s/api/models/%s/revision/", hub_endpoint(d->hub), d->repository);
    url_escape(&url, d->revision, true);
    bool ok = hub_get(d->hub, url.data, 0, 0, MOST_TREE, once, &body, NULL, e);
    cJSON *json = ok ? json_parse(body.data, body.n, "the hub's answer", e) : NULL;
    const char *commit = json_string(json, "sha"), *now = json_string(json, "id");
    if (json && !is_hex(commit, 40))
        fail(e, BAD_MODEL, "the hub names the commit '%.80s' for %s, which is none: refused",
             commit ? commit : "(missing)", d->repository);
    else if (json)
        memcpy(d->commit, commit, 41);
    if (*d->commit && now && strcmp(now, d->repository) && repository_valid(now))
        fprintf(stderr, "%s is now called %s\n", d->repository, now);
    cJSON_Delete(json);
    bytes_free(&url);
    bytes_free(&body);
    return *d->commit;
}

/* The address behind rel="next" of a Link header. */
static bool next_page(const Download *d, const char *link, Bytes *url, Error *e) {
    const char *end = *link == '<' ? strchr(link, '>') : NULL;
    url->n = 0;
    if (!end || !strstr(end, "rel=\"next\"")) return true;
    bytes_add(url, link + 1, (size_t)(end - link - 1));
    return hub_same_origin(d->hub, url->data) ||
           fail(e, NO_NETWORK, "the hub's list of files goes on at another host: refused");
}

/* The list of files, page by page. */
static bool list_files(Download *d, bool once, Error *e) {
    Bytes url = {0}, body = {0};
    char link[MOST_HEADER_TEXT];
    bool ok = true;
    bytes_print(&url, "%s/api/models/%s/tree/%s?recursive=true", hub_endpoint(d->hub), d->repository, d->commit);
    for (int page = 0; ok && url.n; page++) {
        ok = page < MOST_PAGES || fail(e, NO_NETWORK, "the hub's list of files has no end");
        ok = ok && hub_get(d->hub, url.data, 0, 0, MOST_TREE, once, &body, link, e);
        cJSON *json = ok ? json_parse(body.data, body.n, "the hub's list of files", e) : NULL, *entry;
        ok = ok && json && (cJSON_IsArray(json) || fail(e, BAD_MODEL, "the hub's list of files is no list"));
        if (ok) cJSON_ArrayForEach(entry, json) if (!(ok = add_file(d, entry, e))) break;
        cJSON_Delete(json);
        ok = ok && next_page(d, link, &url, e);
    }
    bytes_free(&url);
    bytes_free(&body);
    bool weights = !wants_default(d);
    for (int i = 0; i < d->files && !weights; i++) weights = !fnmatch("*.safetensors", d->file[i].name, 0);
    if (ok && !d->files) ok = fail(e, BAD_MODEL, "no file of %s was chosen: see --include and --all", d->repository);
    if (ok && !weights)
        ok = fail(e, BAD_MODEL, "%s has no safetensors files at its root, which infer reads; --all fetches it anyway",
                  d->repository);
    if (ok) qsort(d->file, (size_t)d->files, sizeof *d->file, by_name);
    for (int i = 1; i < d->files && ok; i++)
        if (!strcmp(d->file[i].name, d->file[i - 1].name))
            ok = fail(e, BAD_MODEL, "the hub lists %s twice", d->file[i].name);
    if (ok) qsort(d->file, (size_t)d->files, sizeof *d->file, by_size); /* small ones first: they say what it is */
    return ok;
}

/* ---- the disk ---- */

static bool disk_error(Error *e, const char *path) {
    char text[128];
    int code = errno;
    snprintf(text, sizeof text, "%s", strerror(code));
    if (code == ENOSPC || code == EDQUOT)
        return fail(e, NO_ROOM, "%s: %s; what has arrived is kept: free some space and run it again", path, text);
    return fail(e, code == EACCES || code == EROFS || code == EPERM ? NO_NETWORK : FAILED,
                "%s: %s; HF_HOME or HF_HUB_CACHE chooses another place", path, text);
}

static char *blob_path(const Download *d, const File *f, const char *suffix) {
    Bytes path = {0};
    bytes_print(&path, "%s/blobs/%s%s", d->folder, f->id, suffix);
    return path.data;
}

/* Makes the folders of `path` up to its last slash. Those behind the first `trusted` bytes must not be links, which
 * would lead elsewhere. */
static bool make_folders(const char *path, size_t trusted, Error *e) {
    char *copy = copy_text(path, strlen(path));
    bool ok = true;
    for (char *slash = strchr(copy + 1, '/'); slash && ok; slash = strchr(slash + 1, '/')) {
        struct stat st;
        *slash = 0;
        if (mkdir(copy, 0777) && errno != EEXIST) ok = disk_error(e, copy);
        if (ok && (size_t)(slash - copy) > trusted && !lstat(copy, &st) && !S_ISDIR(st.st_mode))
            ok = fail(e, FAILED, "%s is a link or a file where a folder should be: refused; remove it", copy);
        *slash = '/';
    }
    free(copy);
    return ok;
}

bool disk_free(const char *path, uint64_t *bytes) {
    struct statvfs fs;
    char *copy = copy_text(path, strlen(path)), *slash;
    while (statvfs(copy, &fs) && (slash = strrchr(copy, '/')) && slash > copy) *slash = 0;
    bool ok = !statvfs(copy, &fs);
    *bytes = ok ? (uint64_t)fs.f_bavail * fs.f_frsize : 0;
    free(copy);
    return ok;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

bool folder_remove(const char *path) { return !nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

/* A link with this text, in place of whatever was there. */
static bool put_link(const char *text, const char *path, Error *e) {
    char found[4096];
    for (int tries = 0; tries < 3; tries++) { /* another process may do the same */
        ssize_t n = readlink(path, found, sizeof found);
        if (n > 0 && (size_t)n == strlen(text) && !memcmp(found, text, (size_t)n)) return true;
        if (unlink(path) && errno != ENOENT) break;
        if (!symlink(text, path)) return true;
        if (errno != EEXIST) break;
    }
    return disk_error(e, path);
}

static bool is_file(const char *path, uint64_t size) {
    struct stat st;
    return !lstat(path, &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size == size;
}

/* Is it here: its blob, or a plain file in the snapshot, as caches without links have? */
static bool is_here(const Download *d, const File *f) {
    char *blob = blob_path(d, f, "");
    Bytes plain = {0};
    bytes_print(&plain, "%s/snapshots/%s/%s", d->folder, d->commit, f->name);
    bool here = is_file(blob, f->size) || is_file(plain.data, f->size);
    free(blob);
    bytes_free(&plain);
    return here;
}

/* snapshots/COMMIT/NAME, a link to the blob. */
static bool link_file(const Download *d, const File *f, Error *e) {
    Bytes path = {0}, text = {0};
    bytes_print(&path, "%s/snapshots/%s/%s", d->folder, d->commit, f->name);
    bytes_text(&text, "../../");
    for (const char *s = f->name; *s; s++)
        if (*s == '/') bytes_text(&text, "../");
    bytes_print(&text, "blobs/%s", f->id);
    bool ok = is_file(path.data, f->size) ||
              (make_folders(path.data, strlen(d->cache), e) && put_link(text.data, path.data, e));
    bytes_free(&path);
    bytes_free(&text);
    return ok;
}

/* Bytes of it that are on disk though it is not complete, as far as the file system knows. */
static uint64_t have_partly(const Download *d, const File *f) {
    struct stat st = {0};
    const char *suffix[] = {".partial", ".incomplete"};
    for (int i = 0; i < 2 && !st.st_blocks; i++) {
        char *path = blob_path(d, f, suffix[i]);
        if (lstat(path, &st)) st.st_blocks = 0;
        free(path);
    }
    uint64_t bytes = (uint64_t)st.st_blocks * 512;
    return bytes < f->size ? bytes : f->size;
}

/* ---- hashing ---- */

/* Follows the frontier: sha256, or git's hash of a blob (sha1 behind a header with the size). */
static void *hash_file(void *data) {
    File *f = data;
    bool git = strlen(f->id) == 40, stop = false;
    char head[32];
    unsigned char *part = allocate(HASH_PART), digest[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    uint64_t at = 0;
    int problem = 0;
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    EVP_DigestInit_ex(md, git ? EVP_sha1() : EVP_sha256(), NULL);
    if (git) EVP_DigestUpdate(md, head, 1 + (size_t)sprintf(head, "blob %llu", (unsigned long long)f->size));
    while (at < f->size && !stop && !problem) {
        pthread_mutex_lock(&f->mutex);
        while (at == f->frontier && !f->stop) pthread_cond_wait(&f->more, &f->mutex);
        uint64_t until = f->frontier;
        stop = f->stop;
        pthread_mutex_unlock(&f->mutex);
        if (stop) break;
        ssize_t got = pread(f->fd, part, until - at < HASH_PART ? until - at : HASH_PART, (off_t)at);
        if (got > 0) EVP_DigestUpdate(md, part, (size_t)got);
        if (got <= 0) problem = got ? errno : EIO;
        at += got > 0 ? (uint64_t)got : 0;
        if (at % SEGMENT == 0) sync_file_range(f->fd, 0, (off_t)at, SYNC_FILE_RANGE_WRITE); /* the last wait is short */
    }
    if (!stop && !problem && fdatasync(f->fd)) problem = errno; /* the name must not outlive the content */
    EVP_DigestFinal_ex(md, digest, &n);
    EVP_MD_CTX_free(md);
    free(part);
    pthread_mutex_lock(&f->mutex);
    for (unsigned i = 0; i < n && i < 32; i++) sprintf(f->found + 2 * i, "%02x", digest[i]);
    f->problem = problem;
    f->hashed = true;
    pthread_mutex_unlock(&f->mutex);
    hub_wake(f->hub);
    return NULL;
}

/* ---- progress ---- */

static void clear(Download *d) {
    if (d->lines) fprintf(stderr, "\r\033[%dA\033[J", d->lines);
    d->lines = 0;
}

/* A line above the progress. */
static void say(void *data, const char *line) {
    Download *d = data;
    clear(d);
    fprintf(stderr, "%s\n", line);
    if (d->terminal) d->drawn = 0;
}

static void put_bar(uint64_t done, uint64_t total, int width) {
    for (int i = 0; i < width; i++) fputs((uint64_t)i * total < done * (uint64_t)width ? "█" : " ", stderr);
}

/* A line for each file that is under way and one for all, drawn over the last ones; or, where nobody watches, only the
 * latter every ten seconds. */
static void draw(Download *d) {
    if (!d->terminal && !d->drawn) d->drawn = seconds();
    double now = seconds(), since = now - d->drawn;
    struct winsize window;
    char have[24], size[24], line[100];
    if (since < (d->terminal ? 0.1 : 10)) return;
    int columns = !ioctl(STDERR_FILENO, TIOCGWINSZ, &window) && window.ws_col ? window.ws_col : 80, shown = 0;
    int name = columns - 60 > 40 ? 40 : columns - 60 < 12 ? 12 : columns - 60, bar = columns - name - 40;
    uint64_t done = 0;
    for (int i = 0; i < d->files; i++) done += d->file[i].done;
    double last = d->fetched > done ? 0 : (double)(done - d->fetched) / since; /* a spoiled file is taken back */
    d->rate = d->drawn > 0 && since < 60 ? (d->rate > 0 ? 0.9 * d->rate + 0.1 * last : last) : d->rate;
    d->fetched = done;
    d->drawn = now;
    clear(d);
    if (d->terminal) fputs("\033[?7l", stderr); /* long lines are cut, so that each takes one row */
    for (int i = 0; i < d->files && d->terminal && shown < SHOWN_FILES; i++) {
        const File *f = d->file + i;
        if (f->state != OPEN) continue;
        size_t length = strlen(f->name); /* the end of a long name tells more */
        const char *end = (int)length > name ? f->name + length - (size_t)name : f->name;
        fprintf(stderr, "  %-*s %8s of %-8s ", name, end, size_text(f->done, have), size_text(f->size, size));
        put_bar(f->done, f->size, bar < 0 ? 0 : bar > 24 ? 24 : bar);
        fputs(f->done == f->size ? " checking\n" : "\n", stderr);
        shown++;
    }
    double left = d->rate > 0 ? (double)(d->total - done) / d->rate : 0;
    *line = 0;
    if (d->rate > 0 && left < 100)
        snprintf(line, sizeof line, "  %s/s  %.0f s left", size_text((uint64_t)d->rate, size), left);
    else if (d->rate > 0)
        snprintf(line, sizeof line, "  %s/s  %.0f:%02d h left", size_text((uint64_t)d->rate, size), floor(left / 3600),
                 (int)fmod(left / 60, 60));
    fprintf(stderr, "  %d of %d files, %s of %s%s\n", d->here, d->files, size_text(done, have),
            size_text(d->total, size), line);
    if (d->terminal) fputs("\033[?7h", stderr);
    d->lines = d->terminal ? shown + 1 : 0;
}

/* ---- one file ---- */

/* All of it or an error: a short write is what a full disk does first. */
static bool write_at(int fd, const void *data, size_t n, off_t at) {
    ssize_t wrote = pwrite(fd, data, n, at);
    if (wrote >= 0 && (size_t)wrote < n) errno = ENOSPC;
    return wrote == (ssize_t)n;
}

static int segments_of(const File *f) { return (int)((f->size + SEGMENT - 1) / SEGMENT); }

static uint64_t segment_size(const File *f, int i) {
    uint64_t begin = (uint64_t)i * SEGMENT;
    return f->size - begin < SEGMENT ? f->size - begin : SEGMENT;
}

static void move_frontier(File *f) {
    int i = (int)(f->frontier / SEGMENT), n = segments_of(f);
    while (i < n && f->arrived[i] == segment_size(f, i)) i++;
    pthread_mutex_lock(&f->mutex);
    f->frontier = i < n ? (uint64_t)i * SEGMENT + f->arrived[i] : f->size;
    pthread_cond_signal(&f->more);
    pthread_mutex_unlock(&f->mutex);
}

/* Reads the journal, or counts the bytes of a file without one: all of them are its beginning. */
static bool read_journal(File *f) {
    size_t n = (size_t)segments_of(f), bytes = n * sizeof *f->arrived;
    struct stat st;
    if (fstat(f->fd, &st)) return false;
    if (!S_ISREG(st.st_mode)) return errno = EINVAL, false;
    uint64_t have = (uint64_t)st.st_size;
    f->arrived = allocate_zero(n, sizeof *f->arrived);
    f->busy = allocate_zero(n, sizeof *f->busy);
    if (have > f->size && pread(f->fd, f->arrived, bytes, (off_t)f->size) != (ssize_t)bytes)
        memset(f->arrived, 0, bytes);
    for (int i = 0; i < (int)n; i++) {
        uint64_t begin = (uint64_t)i * SEGMENT, size = segment_size(f, i);
        if (have <= f->size) f->arrived[i] = have <= begin ? 0 : have - begin < size ? have - begin : size;
        if (f->arrived[i] > size) f->arrived[i] = 0;
        f->done += f->arrived[i];
    }
    return write_at(f->fd, f->arrived, bytes, (off_t)f->size);
}

/* The lock that other tools take too; a dead process holds none. -1: another process has it, or *e. */
static int take_lock(const Download *d, const File *f, Error *e) {
    Bytes path = {0};
    struct stat st;
    bytes_print(&path, "%s/%s.lock", d->locks, f->id);
    int fd = make_folders(path.data, strlen(d->cache), e) ? 0 : -1;
    if (!fd && (fd = open(path.data, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0664)) < 0) disk_error(e, path.data);
    bool free_now = fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB);
    if (fd >= 0 && !free_now && errno != EWOULDBLOCK) disk_error(e, path.data);
    if (fd >= 0 && (!free_now || fstat(fd, &st) || !st.st_nlink)) { /* without a name it locks nothing */
        close(fd);
        fd = -1;
    }
    bytes_free(&path);
    return fd;
}

/* Ends what runs for the file and lets go of it; what has arrived stays on disk. */
static void close_file(File *f) {
    if (f->state != OPEN) return;
    pthread_mutex_lock(&f->mutex);
    f->stop = true;
    pthread_cond_signal(&f->more);
    pthread_mutex_unlock(&f->mutex);
    pthread_join(f->thread, NULL);
    pthread_mutex_destroy(&f->mutex);
    pthread_cond_destroy(&f->more);
    free(f->arrived);
    free(f->busy);
    free(f->direct);
    f->arrived = NULL, f->busy = NULL, f->direct = NULL;
    close(f->fd);
    close(f->lock);
    f->state = WAITING;
}

/* Locks the blob and opens what there is of it. It stays WAITING while another process fetches it. */
static bool open_file(Download *d, File *f, Error *e) {
    e->code = 0;
    f->lock = take_lock(d, f, e);
    if (f->lock < 0) return f->retry = seconds() + 0.2, !e->code;
    char *blob = blob_path(d, f, ""), *partial = blob_path(d, f, ".partial"), *other = blob_path(d, f, ".incomplete");
    struct stat st;
    bool ok = true;
    if (is_here(d, f)) { /* of the process that had the lock */
        ok = link_file(d, f, e);
        close(f->lock);
        f->state = HERE;
        f->done = f->size;
        d->here++;
    } else if ((ok = make_folders(blob, strlen(d->cache), e))) {
        if (lstat(partial, &st) && !lstat(other, &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size <= f->size)
            rename(other, partial);
        f->done = f->frontier = 0;
        f->stop = f->hashed = false;
        f->fd = open(partial, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
        ok = (f->fd >= 0 && read_journal(f)) || disk_error(e, partial);
        if (ok) {
            pthread_mutex_init(&f->mutex, NULL);
            pthread_cond_init(&f->more, NULL);
            move_frontier(f);
            if (pthread_create(&f->thread, NULL, hash_file, f)) ok = fail(e, FAILED, "no thread can be started");
            f->state = ok ? OPEN : WAITING;
        }
        if (!ok) {
            free(f->arrived);
            free(f->busy);
            if (f->fd >= 0) close(f->fd);
            close(f->lock);
        }
    }
    free(blob);
    free(partial);
    free(other);
    return ok;
}

/* Bytes have arrived. */
static bool arrive(Request *r, uint64_t at, const char *data, size_t n) {
    File *f = r->owner;
    if (r->whole && !f->stream) f->stream = r;
    if (r->whole && f->stream != r) return r->dropped = true, false; /* another brings them all */
    while (n) {
        int i = (int)(at / SEGMENT);
        uint64_t within = at % SEGMENT, left = segment_size(f, i) - within, part = n < left ? n : left;
        off_t journal = (off_t)(f->size + (uint64_t)i * sizeof *f->arrived);
        if (within + part > f->arrived[i]) {
            uint64_t now = within + part;
            if (!write_at(f->fd, data, part, (off_t)at) || !write_at(f->fd, &now, sizeof now, journal))
                return disk_error(&r->e, f->name);
            f->done += now - f->arrived[i];
            f->arrived[i] = now;
            r->tries = 0;
        }
        data += part, at += part, n -= part;
    }
    move_frontier(f);
    return true;
}

static void start_segment(Download *d, File *f, int i) {
    Request *r = allocate_zero(1, sizeof *r);
    Bytes url = {0};
    bytes_print(&url, "%s/%s/resolve/%s/", hub_endpoint(d->hub), d->repository, d->commit);
    url_escape(&url, f->name, false);
    uint64_t begin = (uint64_t)i * SEGMENT;
    *r = (Request){.url = url.data,
                   .from = begin + f->arrived[i],
                   .to = begin + segment_size(f, i),
                   .sink = arrive,
                   .owner = f,
                   .direct = &f->direct,
                   .commit = d->commit,
                   .id = f->id,
                   .size = f->size};
    f->busy[i] = true;
    f->requests++;
    d->requests++;
    hub_start(d->hub, r);
}

/* The hash of a whole file is known. */
static bool finish_file(Download *d, File *f, Error *e) {
    char *blob = blob_path(d, f, ""), *partial = blob_path(d, f, ".partial"), size[24];
    bool right = !f->problem && !strcmp(f->found, f->id), ok = true;
    if (right) {
        ok = (!ftruncate(f->fd, (off_t)f->size) && !rename(partial, blob)) || disk_error(e, partial);
        ok = ok && link_file(d, f, e);
    } else if (f->problem) {
        errno = f->problem;
        ok = disk_error(e, partial);
    } else {
        unlink(partial);
        if (f->spoiled)
            ok = fail(e, NO_NETWORK,
                      "%s arrives with the hash %.12s... instead of %.12s..., twice: something between "
                      "here and the hub changes it; try another network, or later",
                      f->name, f->found, f->id);
        f->spoiled = true;
    }
    close_file(f);
    if (ok && right) {
        f->state = HERE;
        d->here++;
        Bytes line = {0};
        bytes_print(&line, "✓ %s  %s", f->name, size_text(f->size, size));
        say(d, line.data);
        bytes_free(&line);
    }
    free(blob);
    free(partial);
    return ok;
}

/* ---- a repository ---- */

/* Starts what may start: files in their order, the segments of each in theirs. */
static bool start_requests(Download *d, Error *e) {
    for (int i = 0; i < d->files && d->requests < d->jobs; i++) {
        File *f = d->file + i;
        if (f->state == WAITING && seconds() >= f->retry) {
            bool first = f->retry == 0;
            if (!open_file(d, f, e)) return false;
            if (f->state == WAITING && first) {
                Bytes line = {0};
                bytes_print(&line, "another process is fetching %s: waiting for it", f->name);
                say(d, line.data);
                bytes_free(&line);
            }
        }
        for (int k = 0; f->state == OPEN && !f->stream && k < segments_of(f) && d->requests < d->jobs; k++)
            if (!f->busy[k] && f->arrived[k] < segment_size(f, k)) start_segment(d, f, k);
    }
    return true;
}

/* Fetches all files that are not here. */
static bool fetch_files(Download *d, Error *e) {
    bool ok = true;
    while (ok && d->here < d->files) {
        ok = start_requests(d, e);
        Request *r = ok ? hub_step(d->hub, 100) : NULL;
        if (r) {
            File *f = r->owner;
            f->busy[(r->to - 1) / SEGMENT] = false;
            if (f->stream == r) f->stream = NULL;
            if (r->e.code) *e = r->e, ok = false;
            f->requests--;
            d->requests--;
            request_free(d->hub, r);
        }
        for (int i = 0; i < d->files && ok; i++) {
            File *f = d->file + i;
            if (f->state != OPEN || f->done < f->size || f->requests) continue;
            pthread_mutex_lock(&f->mutex);
            bool hashed = f->hashed;
            pthread_mutex_unlock(&f->mutex);
            if (hashed) ok = finish_file(d, f, e);
        }
        if (ok && hub_interrupted()) ok = fail(e, INTERRUPTED, "interrupted");
        if (ok) draw(d);
    }
    clear(d);
    for (int i = 0; i < d->files; i++) close_file(d->file + i);
    return ok;
}

/* Which files are here, and whether the others find room. */
static bool plan(Download *d, Error *e) {
    uint64_t need = 0, room;
    char a[24], b[24];
    for (int i = 0; i < d->files; i++) {
        File *f = d->file + i;
        bool here = is_here(d, f);
        if (here && !d->dry_run && !link_file(d, f, e)) return false;
        f->state = here ? HERE : WAITING;
        f->done = here ? f->size : 0;
        d->here += here;
        uint64_t partly = here ? f->size : have_partly(d, f);
        need += f->size - partly;
        if (d->dry_run)
            printf("%-40s %8s  %s\n", f->name, size_text(f->size, a), here ? "here" : partly ? "begun" : "to fetch");
    }
    bool known = disk_free(d->cache, &room);
    if (d->dry_run)
        printf("%d files, %s; to fetch: %s into %s, which has %s free\n", d->files, size_text(d->total, a),
               size_text(need, b), d->cache, size_text(room, (char[24]){0}));
    if (known && need > room)
        return fail(e, NO_ROOM,
                    "%s needs %s more, %s has %s free: free some space, or choose another disk with HF_HOME",
                    d->repository, size_text(need, a), d->cache, size_text(room, b));
    return true;
}

/* refs/REVISION, and the link in ~/.cache/infer/models. */
static bool publish(const Download *d, const char *snapshot, Error *e) {
    Bytes path = {0}, new = {0}, config = {0};
    bool ok = true;
    if (strcmp(d->revision, d->commit)) {
        bytes_print(&path, "%s/refs/%s", d->folder, d->revision);
        bytes_print(&new, "%s.new", path.data);
        ok = make_folders(path.data, strlen(d->cache), e);
        int fd = ok ? open(new.data, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666) : -1;
        if (ok && (fd < 0 || write(fd, d->commit, 40) != 40 || rename(new.data, path.data)))
            ok = disk_error(e, path.data);
        if (fd >= 0) close(fd);
    }
    const char *home = getenv("HOME");
    char *real = realpath(snapshot, NULL);
    bytes_print(&config, "%s/config.json", snapshot);
    if (ok && home && real && file_exists(config.data)) {
        Error ignored; /* a home that cannot be written is no reason to fail: the model is found without the link */
        char *name = repository_folder(d->repository);
        path.n = 0;
        bytes_print(&path, "%s/.cache/infer/models/%s", home, name + strlen("models--"));
        free(name);
        if (make_folders(path.data, path.n, &ignored)) put_link(real, path.data, &ignored);
    }
    free(real);
    bytes_free(&path);
    bytes_free(&new);
    bytes_free(&config);
    return ok;
}

static void set_folders(Download *d) {
    Bytes cache = {0}, folder = {0}, locks = {0};
    char *name = repository_folder(d->repository);
    hub_cache(&cache);
    bytes_print(&folder, "%s/%s", cache.data, name);
    bytes_print(&locks, "%s/.locks/%s", cache.data, name);
    d->cache = cache.data;
    d->folder = folder.data;
    d->locks = locks.data;
    free(name);
}

static void free_download(Download *d) {
    for (int i = 0; i < d->files; i++) free(d->file[i].name);
    free(d->file);
    free(d->cache);
    free(d->folder);
    free(d->locks);
    hub_close(d->hub);
}

/* The snapshot of this revision, if it is here whole. */
static char *cached_snapshot(const Download *d) {
    Bytes path = {0}, commit = {0};
    Error e;
    bytes_print(&path, "%s/refs/%s", d->folder, d->revision);
    if (is_hex(d->revision, 40))
        bytes_text(&commit, d->revision);
    else if (!file_read(path.data, 64, &commit, &e))
        bytes_text(&commit, "");
    path.n = 0;
    bytes_print(&path, "%s/snapshots/%s", d->folder, commit.data);
    bool whole = is_hex(commit.data, 40) && model_complete(path.data);
    bytes_free(&commit);
    if (!whole) bytes_free(&path);
    return path.data;
}

/* Everything: the snapshot's path, NULL on failure and after a dry run (e->code 0). */
static char *fetch_repository(Download *d, Error *e) {
    e->code = 0;
    char *have = wants_default(d) && !d->dry_run ? cached_snapshot(d) : NULL, size[24], done[24];
    if (have && (hub_offline() || is_hex(d->revision, 40))) return have;
    if (hub_offline())
        return fail(e, NO_NETWORK, "%s is not here whole, and HF_HUB_OFFLINE forbids to fetch it: unset it",
                    d->repository),
               NULL;
    hub_about(d->hub, d->repository, d->revision, say, d);
    if (!find_commit(d, have, e) || !list_files(d, have, e)) {
        if (!have || e->code == INTERRUPTED) return free(have), NULL;
        fprintf(stderr, "%s\nWhat is here is complete and is used.\n", e->text);
        return have;
    }
    free(have);
    if (!plan(d, e) || d->dry_run) return NULL;
    fprintf(stderr, "%s at %.12s: %d files, %s\n", d->repository, d->commit, d->files, size_text(d->total, size));
    bool ok = fetch_files(d, e);
    Bytes snapshot = {0};
    bytes_print(&snapshot, "%s/snapshots/%s", d->folder, d->commit);
    if (ok && publish(d, snapshot.data, e)) return snapshot.data;
    bytes_free(&snapshot);
    if (e->code == INTERRUPTED) {
        uint64_t sum = 0;
        for (int i = 0; i < d->files; i++) sum += d->file[i].done;
        fail(e, INTERRUPTED, "interrupted; %s of %s are here, the same command goes on from there",
             size_text(sum, done), size_text(d->total, size));
    }
    return NULL;
}

static Download defaults(void) { return (Download){.revision = "main", .jobs = 8, .terminal = isatty(STDERR_FILENO)}; }

/* ---- the command ---- */

const char download_help[] =
    "infer download REPO[@REVISION] | URL [options]\n"
    "Fetches a model from the hub into the hub's own cache ($HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub),\n"
    "which other tools share, and writes where it is. What is there is not fetched again; what was interrupted goes "
    "on.\n"
    "By default that is what infer reads: safetensors files with their index, config, tokenizer and chat template.\n"
    "  --revision R    a branch, a tag or a commit (main)\n"
    "  --include G     files that match the pattern, in its place; can be repeated\n"
    "  --exclude G     no files that match the pattern; can be repeated\n"
    "  --all           all files\n"
    "  --token-file F  a file with the token of an account, for private and gated repositories; else HF_TOKEN,\n"
    "                  HF_TOKEN_PATH, $HF_HOME/token. It is sent to the hub only\n"
    "  --jobs N        connections at once (8)\n"
    "  --dry-run       says what would be fetched\n"
    "HF_ENDPOINT names another hub, HF_HUB_OFFLINE=1 forbids the network, HTTPS_PROXY names a proxy,\n"
    "CURL_CA_BUNDLE the certificates to trust, HF_HUB_DOWNLOAD_TIMEOUT the seconds until a stalled connection is\n"
    "given up (10).\n";

static bool parse_options(Download *d, int argc, char **argv, Error *e) {
    static const struct option options[] = {
        {"revision", required_argument, NULL, 'r'},   {"include", required_argument, NULL, 'i'},
        {"exclude", required_argument, NULL, 'x'},    {"all", no_argument, NULL, 'a'},
        {"token-file", required_argument, NULL, 't'}, {"jobs", required_argument, NULL, 'j'},
        {"dry-run", no_argument, NULL, 'd'},          {0}};
    const char *revision = NULL;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == '?') return fail(e, USAGE, "wrong option; see infer download --help");
        if (c == 'a') d->all = true;
        if (c == 'd') d->dry_run = true;
        if (c == 'r') revision = optarg;
        if (c == 't') d->token_file = optarg;
        if (c == 'j' && ((d->jobs = atoi(optarg)) < 1 || d->jobs > MOST_JOBS))
            return fail(e, USAGE, "--jobs needs a number from 1 to %d, not '%.40s'", MOST_JOBS, optarg);
        if (c == 'i' || c == 'x') {
            int *n = c == 'i' ? &d->includes : &d->excludes;
            if (*n == MOST_GLOBS) return fail(e, USAGE, "at most %d patterns can be given", MOST_GLOBS);
            (c == 'i' ? d->include : d->exclude)[(*n)++] = optarg;
        }
    }
    if (optind + 1 != argc) return fail(e, USAGE, "one repository is needed, ORG/NAME; see infer download --help");
    if (!(d->hub = hub_open(d->token_file, e)) || !parse_target(d, argv[optind], e)) return false;
    if (revision && (strlen(revision) >= sizeof d->revision || !name_valid(revision)))
        return fail(e, USAGE, "'%.100s' is no revision", revision);
    if (revision) snprintf(d->revision, sizeof d->revision, "%s", revision);
    return true;
}

int download(int argc, char **argv) {
    Error e = {0};
    Download d = defaults();
    hub_listen();
    char *path = NULL;
    if (parse_options(&d, argc, argv, &e)) {
        set_folders(&d);
        path = fetch_repository(&d, &e);
    }
    if (path) puts(path);
    if (!path && e.code) fprintf(stderr, "infer: %s\n", e.text);
    free(path);
    free_download(&d);
    hub_deaf();
    return path ? DONE : e.code;
}

/* ---- for other commands ---- */

char *model_get(const char *argument, Error *e) {
    char *path = model_find(argument, e), answer[16] = "";
    if (path || !strchr(argument, '/') || !repository_valid(argument) || !isatty(STDIN_FILENO) ||
        !isatty(STDERR_FILENO))
        return path;
    fprintf(stderr, "%s is not here. Download it? [y/N] ", argument);
    if (!fgets(answer, sizeof answer, stdin) || (*answer != 'y' && *answer != 'Y')) return NULL;
    Download d = defaults();
    snprintf(d.repository, sizeof d.repository, "%s", argument);
    set_folders(&d);
    hub_listen();
    if ((d.hub = hub_open(NULL, e))) path = fetch_repository(&d, e);
    hub_deaf();
    free_download(&d);
    return path;
}

/* A file of the outline: its first bytes, then a hole up to its size. */
static bool outline_file(const Outline *o, const File *f, const Bytes *content, Error *e) {
    Bytes path = {0};
    bytes_print(&path, "%s/%s", o->folder, f->name);
    int fd = open(path.data, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && write(fd, content->data, content->n) == (ssize_t)content->n && !ftruncate(fd, (off_t)f->size);
    if (!ok) fail(e, FAILED, "%s: %s; TMPDIR chooses another place", path.data, strerror(errno));
    if (fd >= 0) close(fd);
    bytes_free(&path);
    return ok;
}

/* The length of the header in eight bytes, then the header itself. */
static bool get_header(const Download *d, const File *f, const char *url, Bytes *out, Error *e) {
    Bytes header = {0};
    uint64_t n = 0;
    if (f->size < 8)
        return fail(e, BAD_MODEL, "%s: %llu bytes are too few for a safetensors file", f->name,
                    (unsigned long long)f->size);
    if (!hub_get(d->hub, url, 0, 8, 8, false, out, NULL, e)) return false;
    for (int i = 7; i >= 0; i--) n = n << 8 | (unsigned char)out->data[i];
    if (!n || n > f->size - 8 || n > MOST_TREE)
        return fail(e, BAD_MODEL, "%s: a header of %llu bytes does not fit a file of %llu", f->name,
                    (unsigned long long)n, (unsigned long long)f->size);
    bool ok = hub_get(d->hub, url, 8, 8 + n, n, false, &header, NULL, e);
    bytes_add(out, header.data, ok ? header.n : 0);
    bytes_free(&header);
    return ok;
}

bool outline_open(Outline *o, const char *target, Error *e) {
    Download d = defaults();
    const char *tmp = getenv("TMPDIR");
    Bytes folder = {0}, url = {0}, content = {0};
    *o = (Outline){0};
    hub_listen();
    bool ok = (d.hub = hub_open(NULL, e)) && parse_target(&d, target, e);
    if (ok && hub_offline())
        ok = fail(e, NO_NETWORK, "%s is not here, and HF_HUB_OFFLINE forbids to ask the hub", target);
    if (ok) set_folders(&d), hub_about(d.hub, d.repository, d.revision, NULL, NULL);
    ok = ok && find_commit(&d, false, e) && list_files(&d, false, e);
    bytes_print(&folder, "%s/infer-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (ok && !mkdtemp(folder.data)) ok = fail(e, FAILED, "%s: %s", folder.data, strerror(errno));
    if (ok) o->folder = copy_text(folder.data, folder.n);
    for (int i = 0; i < d.files && ok; i++) {
        const File *f = d.file + i;
        bool weights = !fnmatch("*.safetensors", f->name, 0);
        o->to_fetch += is_here(&d, f) ? 0 : f->size;
        if (!weights && fnmatch("*config.json", f->name, 0) && fnmatch("*.index.json", f->name, 0)) continue;
        url.n = 0;
        bytes_print(&url, "%s/%s/resolve/%s/", hub_endpoint(d.hub), d.repository, d.commit);
        url_escape(&url, f->name, false);
        ok = weights ? get_header(&d, f, url.data, &content, e)
                     : hub_get(d.hub, url.data, 0, 0, MOST_TREE, false, &content, NULL, e);
        ok = ok && outline_file(o, f, &content, e);
    }
    bytes_free(&folder);
    bytes_free(&url);
    bytes_free(&content);
    free_download(&d);
    hub_deaf();
    if (!ok) outline_close(o);
    return ok;
}

void outline_close(Outline *o) {
    if (o->folder) folder_remove(o->folder);
    free(o->folder);
    *o = (Outline){0};
}
