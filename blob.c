/* blob.c: one file of a repository: asked for in segments, written where it belongs, hashed, renamed. See blob.h.
 *
 * A blob that is being fetched is ID.partial: the bytes where they belong, and behind them a journal, the number of
 * bytes that have arrived of each segment. Segments are fetched at once in any order; each write of bytes is followed
 * by one of the journal, so that whatever kills the process, what the journal counts is there. A thread for each file
 * hashes behind the contiguous frontier. Only when the hash is right the journal is cut off and the file renamed. The
 * ID.incomplete of other tools, a plain prefix, is taken over. */
#include "blob.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SEGMENT = 32 << 20, HASH_PART = 1 << 20 };

/* ---- the disk ---- */

bool disk_error(Error *e, const char *path) {
    char text[128];
    int code = errno;
    snprintf(text, sizeof text, "%s", strerror(code));
    if (code == ENOSPC || code == EDQUOT)
        return fail(e, NO_ROOM, "%s: %s; what has arrived is kept: free some space and run it again", path, text);
    return fail(e, code == EACCES || code == EROFS || code == EPERM ? NO_NETWORK : FAILED,
                "%s: %s; HF_HOME or HF_HUB_CACHE chooses another place", path, text);
}

bool make_folders(const char *path, size_t trusted, Error *e) {
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

bool put_link(const char *text, const char *path, Error *e) {
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

static void blob_path(const Repository *r, const File *f, const char *suffix, char out[MOST_PATH]) {
    snprintf(out, MOST_PATH, "%s/blobs/%s%s", r->folder, f->id, suffix);
}

static void link_path(const Repository *r, const File *f, char out[MOST_PATH]) {
    snprintf(out, MOST_PATH, "%s/snapshots/%s/%s", r->folder, r->commit, f->name);
}

/* Its blob, or a plain file in the snapshot, as caches without links have. */
bool file_here(const Repository *r, const File *f) {
    char blob[MOST_PATH], plain[MOST_PATH];
    blob_path(r, f, "", blob);
    link_path(r, f, plain);
    return is_file(blob, f->size) || is_file(plain, f->size);
}

bool file_link(const Repository *r, const File *f, Error *e) {
    char path[MOST_PATH];
    Bytes text = {0};
    link_path(r, f, path);
    bytes_text(&text, "../../");
    for (const char *s = f->name; *s; s++)
        if (*s == '/') bytes_text(&text, "../");
    bytes_print(&text, "blobs/%s", f->id);
    bool ok = is_file(path, f->size) || (make_folders(path, strlen(r->cache), e) && put_link(text.data, path, e));
    bytes_free(&text);
    return ok;
}

uint64_t file_begun(const Repository *r, const File *f) {
    static const char *const suffix[] = {".partial", ".incomplete"};
    for (int i = 0; i < 2; i++) {
        struct stat st;
        char path[MOST_PATH];
        blob_path(r, f, suffix[i], path);
        uint64_t bytes = lstat(path, &st) ? 0 : (uint64_t)st.st_blocks * 512; /* holes do not count */
        if (bytes) return bytes < f->size ? bytes : f->size;
    }
    return 0;
}

/* ---- hashing ---- */

/* Follows the frontier: sha256, or git's hash of a blob (sha1 behind a header with the size). */
static void *hash_file(void *data) {
    File *f = data;
    bool git = strlen(f->id) == 40;
    char head[32];
    unsigned char *part = allocate(HASH_PART), digest[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    uint64_t at = 0;
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    EVP_DigestInit_ex(md, git ? EVP_sha1() : EVP_sha256(), NULL);
    if (git) EVP_DigestUpdate(md, head, 1 + (size_t)sprintf(head, "blob %llu", (unsigned long long)f->size));
    while (at < f->size && !f->stop && !f->problem) {
        uint64_t until = f->frontier;
        if (at == until) {
            sem_wait(&f->more);
            continue;
        }
        ssize_t got = pread(f->fd, part, until - at < HASH_PART ? until - at : HASH_PART, (off_t)at);
        if (got > 0) EVP_DigestUpdate(md, part, (size_t)got);
        if (got <= 0) f->problem = got ? errno : EIO;
        at += got > 0 ? (uint64_t)got : 0;
        if (at % SEGMENT == 0) sync_file_range(f->fd, 0, (off_t)at, SYNC_FILE_RANGE_WRITE); /* the last wait is short */
    }
    if (!f->stop && !f->problem && fdatasync(f->fd)) f->problem = errno; /* the name must not outlive the content */
    EVP_DigestFinal_ex(md, digest, &n);
    EVP_MD_CTX_free(md);
    free(part);
    for (unsigned i = 0; i < n && i < 32; i++) sprintf(f->found + 2 * i, "%02x", digest[i]);
    f->hashed = true;
    hub_wake(f->hub);
    return NULL;
}

/* ---- segments ---- */

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
    f->frontier = i < n ? (uint64_t)i * SEGMENT + f->arrived[i] : f->size;
    sem_post(&f->more);
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

bool file_request(const Repository *r, File *f) {
    int i = 0;
    if (f->state != OPEN || f->stream) return false;
    while (i < segments_of(f) && (f->busy[i] || f->arrived[i] == segment_size(f, i))) i++;
    if (i == segments_of(f)) return false;
    Request *q = allocate_zero(1, sizeof *q);
    Bytes path = {0}, url = {0};
    bytes_print(&path, "/%s/resolve/%s/%s", r->name, r->commit, f->name);
    hub_url(r->hub, &url, path.data);
    bytes_free(&path);
    uint64_t begin = (uint64_t)i * SEGMENT;
    *q = (Request){.url = url.data,
                   .from = begin + f->arrived[i],
                   .to = begin + segment_size(f, i),
                   .sink = arrive,
                   .owner = f,
                   .direct = &f->direct,
                   .commit = r->commit,
                   .id = f->id,
                   .size = f->size};
    f->busy[i] = true;
    f->requests++;
    hub_start(r->hub, q);
    return true;
}

bool file_ended(File *f, const Request *q, Error *e) {
    f->busy[(q->to - 1) / SEGMENT] = false;
    if (f->stream == q) f->stream = NULL;
    f->requests--;
    if (q->e.code) *e = q->e;
    return !q->e.code;
}

/* ---- from beginning to end ---- */

/* The lock that other tools take too; a dead process holds none. -1: another process has it, or *e. */
static int take_lock(const Repository *r, const File *f, Error *e) {
    Bytes path = {0};
    struct stat st;
    bytes_print(&path, "%s/%s.lock", r->locks, f->id);
    int fd = make_folders(path.data, strlen(r->cache), e) ? 0 : -1;
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

static void let_go(File *f) {
    free(f->arrived);
    free(f->busy);
    f->arrived = NULL, f->busy = NULL;
    if (f->fd >= 0) close(f->fd);
    close(f->lock);
    f->state = WAITING;
}

bool file_open(const Repository *r, File *f, Error *e) {
    char blob[MOST_PATH], partial[MOST_PATH], other[MOST_PATH];
    struct stat st;
    blob_path(r, f, "", blob);
    blob_path(r, f, ".partial", partial);
    blob_path(r, f, ".incomplete", other);
    e->code = 0;
    f->lock = take_lock(r, f, e);
    if (f->lock < 0) return f->retry = seconds() + 0.2, !e->code;
    f->fd = -1;
    f->done = f->frontier = 0;
    f->stop = f->hashed = false;
    f->problem = 0;
    if (file_here(r, f)) { /* of the process that had the lock */
        let_go(f);
        f->state = HERE;
        f->done = f->size;
        return file_link(r, f, e);
    }
    bool ok = make_folders(blob, strlen(r->cache), e);
    if (ok && lstat(partial, &st) && !lstat(other, &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size <= f->size)
        rename(other, partial);
    if (ok) {
        f->fd = open(partial, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
        ok = (f->fd >= 0 && read_journal(f)) || disk_error(e, partial);
    }
    if (ok) {
        sem_init(&f->more, 0, 0);
        move_frontier(f);
        ok = !pthread_create(&f->thread, NULL, hash_file, f) || fail(e, FAILED, "no thread can be started");
    }
    if (ok)
        f->state = OPEN;
    else
        let_go(f);
    return ok;
}

void file_close(File *f) {
    if (f->state != OPEN) return;
    f->stop = true;
    sem_post(&f->more);
    pthread_join(f->thread, NULL);
    sem_destroy(&f->more);
    free(f->direct);
    f->direct = NULL;
    let_go(f);
}

bool file_arrived(const File *f) { return f->state == OPEN && f->done == f->size && !f->requests && f->hashed; }

bool file_finish(const Repository *r, File *f, Error *e) {
    char blob[MOST_PATH], partial[MOST_PATH], other[MOST_PATH];
    bool ok = true, right = !f->problem && !strcmp(f->found, f->id);
    blob_path(r, f, "", blob);
    blob_path(r, f, ".partial", partial);
    blob_path(r, f, ".incomplete", other);
    if (right) {
        ok = (!ftruncate(f->fd, (off_t)f->size) && !rename(partial, blob)) || disk_error(e, partial);
        if (ok) unlink(other); /* another tool's beginning of what is complete now */
        ok = ok && file_link(r, f, e);
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
    file_close(f);
    if (ok && right) f->state = HERE;
    return ok;
}
