/* download.c: what of a repository is wanted, what of that is here, and the progress of the rest. See download.h. */
#include "download.h"
#include "blob.h"
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <ftw.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { MOST_FILES = 20000, MOST_TREE = 64 << 20, MOST_PAGES = 100, SHOWN_FILES = 10 };

typedef struct {
    Repository r;
    char revision[200], only[MOST_NAME];
    Texts include, exclude;
    const char *token_file, *option; /* --revision */
    int jobs;
    bool all, dry_run;
    File *file;
    int listed, files, here, requests; /* listed: before the choice */

    bool terminal;           /* progress is redrawn in place */
    int lines;               /* of it on the screen */
    uint64_t total, fetched; /* bytes; those that were there when it was drawn last */
    double drawn, rate;
} Download;

/* ---- names ---- */

static bool is_hex(const char *text, size_t n) {
    return text && strlen(text) == n && strspn(text, "0123456789abcdef") == n;
}

/* A relative path that stays where it is put and can be shown: no empty part, "." or "..", no control character, no
 * backslash. */
static bool name_valid(const char *name) {
    size_t n = strlen(name);
    if (!n || n >= MOST_NAME || strchr(name, '\\')) return false;
    Bytes shown = {0};
    bytes_shown(&shown, name, n, false);
    bool same = !strcmp(shown.data, name);
    bytes_free(&shown);
    if (!same) return false;
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
    const char *sites[] = {hub_endpoint(d->r.hub), "https://huggingface.co", "https://hf.co"};
    char copy[MOST_NAME], *part[4] = {0}, *rest = copy, *at;
    bool url = strstr(text, "://"), here = !url;
    for (size_t i = 0; i < 3 && !here; i++) {
        size_t n = strlen(sites[i]);
        if (!strncmp(text, sites[i], n) && text[n] == '/') text += n + 1, here = true;
    }
    if (!here) return fail(e, USAGE, "'%.200s' is not at %s: HF_ENDPOINT names another hub", text, sites[0]);
    snprintf(copy, sizeof copy, "%.*s", (int)(url ? strcspn(text, "?#") : strlen(text)), text);
    at = copy + strcspn(copy, "/@");
    if (*at == '/') at += 1 + strcspn(at + 1, "/@");
    if (*at == '@') {
        snprintf(d->revision, sizeof d->revision, "%s", at + 1);
        *at = 0;
    }
    for (int i = 0; i < 4 && rest; i++) part[i] = strsep(&rest, "/");
    if (part[3] && (!strcmp(part[2], "tree") || !strcmp(part[2], "blob") || !strcmp(part[2], "resolve"))) {
        if (!url_unescape(part[3]) || (rest && !url_unescape(rest)))
            return fail(e, USAGE, "'%.200s' holds %%00, which no name does", text);
        snprintf(d->revision, sizeof d->revision, "%s", part[3]);
        if (rest && *rest && *part[2] != 't') snprintf(d->only, sizeof d->only, "%s", rest);
        part[2] = NULL;
    }
    snprintf(d->r.name, sizeof d->r.name, "%s%s%s", part[0], part[1] ? "/" : "", part[1] ? part[1] : "");
    if ((part[2] && *part[2]) || !repository_valid(d->r.name))
        return fail(e, USAGE, "'%.200s' is no repository of models: ORG/NAME is needed, or the URL of its page", text);
    if (d->option) snprintf(d->revision, sizeof d->revision, "%s", d->option);
    if (!name_valid(d->revision) || strlen(d->revision) == sizeof d->revision - 1) /* perhaps cut */
        return fail(e, USAGE, "'%.100s' is no revision", d->revision);
    return true;
}

/* ---- what is wanted ---- */

static bool matches(const Texts *globs, const char *name) {
    bool hit = false;
    for (int i = 0; i < globs->n; i++) hit |= !fnmatch(globs->text[i], name, 0);
    return hit;
}

/* By default what the engine reads, and only at the root. */
static bool wanted(const Download *d, const char *name) {
    static const Texts read = {10,
                               {"*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
                                "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
                                "merges.txt", "chat_template.*"}};
    if (matches(&d->exclude, name)) return false;
    if (*d->only) return !strcmp(d->only, name);
    if (d->include.n) return matches(&d->include, name);
    return d->all || (!strchr(name, '/') && matches(&read, name));
}

static bool wants_default(const Download *d) { return !d->all && !d->include.n && !d->exclude.n && !*d->only; }

/* An entry of the hub's list of files. */
static bool add_file(Download *d, const cJSON *entry, Error *e) {
    const char *name = json_string(entry, "path"), *type = json_string(entry, "type");
    const cJSON *lfs = json_get(entry, "lfs"), *size = json_get(lfs ? lfs : entry, "size");
    const char *id = json_string(lfs ? lfs : entry, "oid");
    int64_t bytes;
    if (!name || !type || !name_valid(name))
        return fail(e, BAD_MODEL, "the hub lists a file '%.200s' in %s, which is no safe file name: refused",
                    name ? name : "(no name)", d->r.name);
    if (strcmp(type, "file")) return true;
    d->listed++;
    if (!wanted(d, name)) return true;
    if (!is_hex(id, lfs ? 64 : 40))
        return fail(e, BAD_MODEL, "the hub lists %s with the hash '%.80s', which is none: refused", name,
                    id ? id : "(missing)");
    if (!json_whole(size, 0, INT64_MAX / 2, &bytes))
        return fail(e, BAD_MODEL, "the hub lists %s without a valid size", name);
    if (d->files == MOST_FILES)
        return fail(e, BAD_MODEL, "%s has more than %d files: choose with --include", d->r.name, MOST_FILES);
    d->file = reallocate(d->file, (size_t)(d->files + 1) * sizeof *d->file);
    File *f = d->file + d->files++;
    *f = (File){.name = copy_text(name, strlen(name)), .size = (uint64_t)bytes, .hub = d->r.hub};
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
    if (is_hex(d->revision, 40)) return memcpy(d->r.commit, d->revision, 41), true;
    bytes_print(&url, "%s/api/models/%s/revision/", hub_endpoint(d->r.hub), d->r.name);
    url_escape(&url, d->revision, true);
    bool ok = hub_get(d->r.hub, url.data, 0, 0, MOST_TREE, once, &body, NULL, e);
    cJSON *json = ok ? json_parse(body.data, body.n, "the hub's answer", e) : NULL;
    const char *commit = json_string(json, "sha"), *now = json_string(json, "id");
    if (json && !is_hex(commit, 40))
        fail(e, BAD_MODEL, "the hub names the commit '%.80s' for %s, which is none: refused",
             commit ? commit : "(missing)", d->r.name);
    else if (json)
        memcpy(d->r.commit, commit, 41);
    if (*d->r.commit && now && strcmp(now, d->r.name) && repository_valid(now))
        fprintf(stderr, "%s is now called %s\n", d->r.name, now);
    cJSON_Delete(json);
    bytes_free(&url);
    bytes_free(&body);
    return *d->r.commit;
}

/* The address behind rel="next" of a Link header. */
static bool next_page(const Download *d, const char *link, Bytes *url, Error *e) {
    const char *end = *link == '<' ? strchr(link, '>') : NULL;
    url->n = 0;
    if (!end || !strstr(end, "rel=\"next\"")) return true;
    bytes_add(url, link + 1, (size_t)(end - link - 1));
    return hub_same_origin(d->r.hub, url->data) ||
           fail(e, NO_NETWORK, "the hub's list of files goes on at another host: refused");
}

/* The list of files, page by page. */
static bool list_files(Download *d, bool once, Error *e) {
    Bytes url = {0}, body = {0};
    char link[MOST_HEADER_TEXT];
    bool ok = true;
    bytes_print(&url, "%s/api/models/%s/tree/%s?recursive=true", hub_endpoint(d->r.hub), d->r.name, d->r.commit);
    for (int page = 0; ok && url.n; page++) {
        ok = page < MOST_PAGES || fail(e, NO_NETWORK, "the hub's list of files has no end");
        ok = ok && hub_get(d->r.hub, url.data, 0, 0, MOST_TREE, once, &body, link, e);
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
    if (ok && !d->files)
        ok = fail(e, BAD_MODEL, "none of the %d files of %s was chosen: see --include and --all", d->listed, d->r.name);
    if (ok && !weights)
        ok = fail(e, BAD_MODEL, "%s has no safetensors files at its root, which infer reads; --all fetches it anyway",
                  d->r.name);
    if (ok) qsort(d->file, (size_t)d->files, sizeof *d->file, by_name);
    for (int i = 1; i < d->files && ok; i++)
        if (!strcmp(d->file[i].name, d->file[i - 1].name))
            ok = fail(e, BAD_MODEL, "the hub lists %s twice", d->file[i].name);
    if (ok) qsort(d->file, (size_t)d->files, sizeof *d->file, by_size); /* small ones first: they say what it is */
    return ok;
}

/* ---- the disk ---- */

bool disk_free(const char *path, uint64_t *bytes) {
    struct statvfs fs;
    char *copy = copy_text(path, strlen(path)), *slash;
    while (statvfs(copy, &fs) && (slash = strrchr(copy, '/')) && slash > copy) *slash = 0;
    bool ok = !statvfs(copy, &fs) || (*copy != '/' && !statvfs(".", &fs));
    *bytes = ok ? (uint64_t)fs.f_bavail * fs.f_frsize : 0;
    free(copy);
    return ok;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

bool folder_remove(const char *path) { return !nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

/* ---- progress ---- */

static void clear(Download *d) {
    if (d->lines) fprintf(stderr, "\r\033[%dA\033[J", d->lines);
    d->lines = 0;
}

/* A line above the progress. */
static void say(Download *d, const char *format, ...) {
    va_list args;
    va_start(args, format);
    clear(d);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    if (d->terminal) d->drawn = 0;
}

static void hub_says(void *d, const char *line) { say(d, "%s", line); }

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
    int name = columns - 48 > 40 ? 40 : columns - 48 < 12 ? 12 : columns - 48, bar = columns - name - 34;
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

/* ---- a repository ---- */

/* Opens a file that waits, if there is time for another try. */
static bool open_waiting(Download *d, File *f, Error *e) {
    bool first = f->retry == 0;
    if (f->state != WAITING || seconds() < f->retry) return true;
    if (!file_open(&d->r, f, e)) return false;
    d->fetched += f->done; /* not by us, so that it is no speed */
    if (f->state == WAITING && first) say(d, "another process is fetching %s: waiting for it", f->name);
    return true;
}

/* Fetches all files that are not here: files in their order, the segments of each in theirs. */
static bool fetch_files(Download *d, Error *e) {
    bool ok = true;
    while (ok && d->here < d->files) {
        for (int i = 0; i < d->files && d->requests < d->jobs && ok; i++) {
            ok = open_waiting(d, d->file + i, e);
            while (ok && d->requests < d->jobs && file_request(&d->r, d->file + i)) d->requests++;
        }
        Request *q = ok ? hub_step(d->r.hub, 100) : NULL;
        if (q) {
            ok = file_ended(q->owner, q, e);
            d->requests--;
            request_free(d->r.hub, q);
        }
        d->here = 0;
        for (int i = 0; i < d->files; i++) {
            File *f = d->file + i;
            if (ok && file_arrived(f)) {
                ok = file_finish(&d->r, f, e);
                if (f->state == HERE) say(d, "✓ %s  %s", f->name, size_text(f->size, (char[24]){0}));
            }
            d->here += f->state == HERE;
        }
        if (ok && hub_interrupted()) ok = fail(e, INTERRUPTED, "interrupted");
        if (ok) draw(d);
    }
    clear(d);
    for (int i = 0; i < d->files; i++) file_close(d->file + i);
    return ok;
}

/* Which files are here, and whether the others find room. */
static bool plan(Download *d, Error *e) {
    uint64_t need = 0, room;
    char a[24], b[24];
    for (int i = 0; i < d->files; i++) {
        File *f = d->file + i;
        bool here = file_here(&d->r, f);
        if (here && !d->dry_run && !file_link(&d->r, f, e)) return false;
        f->state = here ? HERE : WAITING;
        f->done = here ? f->size : 0;
        d->here += here;
        uint64_t partly = here ? f->size : file_begun(&d->r, f);
        need += f->size - partly;
        if (d->dry_run)
            printf("%-40s %8s  %s\n", f->name, size_text(f->size, a), here ? "here" : partly ? "begun" : "to fetch");
    }
    bool known = disk_free(d->r.cache, &room);
    if (d->dry_run)
        printf("%d files, %s; to fetch: %s into %s, which has %s free\n", d->files, size_text(d->total, a),
               size_text(need, b), d->r.cache, size_text(room, (char[24]){0}));
    if (known && need > room)
        return fail(e, NO_ROOM,
                    "%s needs %s more, %s has %s free: free some space, or choose another disk with HF_HOME", d->r.name,
                    size_text(need, a), d->r.cache, size_text(room, b));
    return true;
}

/* refs/REVISION, and the link in ~/.cache/infer/models. */
static bool publish(const Download *d, const char *snapshot, Error *e) {
    char path[MOST_PATH], new[MOST_PATH + 8];
    if (strcmp(d->revision, d->r.commit)) {
        snprintf(path, sizeof path, "%s/refs/%s", d->r.folder, d->revision);
        snprintf(new, sizeof new, "%s.new", path);
        if (!make_folders(path, strlen(d->r.cache), e)) return false;
        int fd = open(new, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
        bool ok = (fd >= 0 && write(fd, d->r.commit, 40) == 40 && !rename(new, path)) || disk_error(e, path);
        if (fd >= 0) close(fd);
        if (!ok) return false;
    }
    const char *home = getenv("HOME");
    char *real = realpath(snapshot, NULL), *name = repository_folder(d->r.name);
    snprintf(path, sizeof path, "%s/config.json", snapshot);
    if (home && real && file_exists(path)) {
        Error ignored; /* a home that cannot be written is no reason to fail: the model is found without the link */
        snprintf(path, sizeof path, "%s/.cache/infer/models/%s", home, name + strlen("models--"));
        if (make_folders(path, strlen(path), &ignored)) put_link(real, path, &ignored);
    }
    free(real);
    free(name);
    return true;
}

static bool set_folders(Download *d, Error *e) {
    Repository *r = &d->r;
    char *name = repository_folder(r->name);
    Bytes cache = {0};
    hub_cache(&cache);
    bool ok =
        cache.n < sizeof r->cache || fail(e, USAGE, "the path of the hub's cache is too long: %.200s", cache.data);
    snprintf(r->cache, sizeof r->cache, "%s", cache.data);
    snprintf(r->folder, sizeof r->folder, "%s/%s", r->cache, name);
    snprintf(r->locks, sizeof r->locks, "%s/.locks/%s", r->cache, name);
    bytes_free(&cache);
    free(name);
    return ok;
}

static void free_download(Download *d) {
    for (int i = 0; i < d->files; i++) free(d->file[i].name);
    free(d->file);
    hub_close(d->r.hub);
}

/* The snapshot of this revision, if it is here whole. */
static char *cached_snapshot(const Download *d) {
    char path[MOST_PATH];
    Bytes commit = {0};
    Error e;
    snprintf(path, sizeof path, "%s/refs/%s", d->r.folder, d->revision);
    if (is_hex(d->revision, 40) || !file_read(path, 64, &commit, &e)) bytes_text(&commit, d->revision);
    snprintf(path, sizeof path, "%s/snapshots/%s", d->r.folder, commit.data);
    bool whole = is_hex(commit.data, 40) && model_complete(path);
    bytes_free(&commit);
    return whole ? copy_text(path, strlen(path)) : NULL;
}

/* Everything: the snapshot's path, NULL on failure and after a dry run (e->code 0). */
static char *fetch_repository(Download *d, Error *e) {
    e->code = 0;
    char *have = wants_default(d) && !d->dry_run ? cached_snapshot(d) : NULL, size[24], done[24];
    if (have && (hub_offline() || is_hex(d->revision, 40))) return have;
    if (hub_offline())
        return fail(e, NO_NETWORK, "%s is not here whole, and HF_HUB_OFFLINE forbids to fetch it: unset it", d->r.name),
               NULL;
    if (!find_commit(d, have, e) || !list_files(d, have, e)) {
        if (!have || e->code == INTERRUPTED) return free(have), NULL;
        fprintf(stderr, "%s\nWhat is here is complete and is used.\n", e->text);
        return have;
    }
    free(have);
    if (!plan(d, e) || d->dry_run) return NULL;
    fprintf(stderr, "%s at %.12s: %d files, %s\n", d->r.name, d->r.commit, d->files, size_text(d->total, size));
    bool ok = fetch_files(d, e);
    Bytes snapshot = {0};
    bytes_print(&snapshot, "%s/snapshots/%s", d->r.folder, d->r.commit);
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

/* Hub, names and folders for `target`. To be freed also if it fails. */
static bool begin(Download *d, const char *target, Error *e) {
    if (!(d->r.hub = hub_open(d->token_file, e)) || !parse_target(d, target, e)) return false;
    hub_about(d->r.hub, d->r.name, d->revision, hub_says, d);
    return set_folders(d, e);
}

/* ---- the command ---- */

int download(const Options *o) {
    Error e = {0};
    Download d = defaults();
    char *path = NULL;
    d.include = o->include, d.exclude = o->exclude, d.jobs = o->jobs;
    d.option = o->revision, d.token_file = o->token_file;
    d.all = o->all, d.dry_run = o->dry_run;
    if (begin(&d, o->model, &e)) path = fetch_repository(&d, &e);
    if (path) puts(path);
    if (!path && e.code) fprintf(stderr, "infer: %s\n", e.text);
    free(path);
    free_download(&d);
    return path ? DONE : e.code;
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
    Download d = defaults();
    path = begin(&d, argument, e) ? fetch_repository(&d, e) : NULL;
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
    if (!hub_get(d->r.hub, url, 0, 8, 8, false, out, NULL, e)) return false;
    for (int i = 7; i >= 0; i--) n = n << 8 | (unsigned char)out->data[i];
    if (!n || n > f->size - 8 || n > MOST_TREE)
        return fail(e, BAD_MODEL, "%s: a header of %llu bytes does not fit a file of %llu", f->name,
                    (unsigned long long)n, (unsigned long long)f->size);
    bool ok = hub_get(d->r.hub, url, 8, 8 + n, n, false, &header, NULL, e);
    bytes_add(out, header.data, ok ? header.n : 0);
    bytes_free(&header);
    return ok;
}

bool outline_open(Outline *o, const char *target, Error *e) {
    Download d = defaults();
    const char *tmp = getenv("TMPDIR");
    Bytes folder = {0}, url = {0}, content = {0};
    *o = (Outline){0};
    bool ok = begin(&d, target, e);
    if (ok && hub_offline())
        ok = fail(e, NO_NETWORK, "%s is not here, and HF_HUB_OFFLINE forbids to ask the hub", target);
    ok = ok && find_commit(&d, false, e) && list_files(&d, false, e);
    bytes_print(&folder, "%s/infer-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (ok && !mkdtemp(folder.data)) ok = fail(e, FAILED, "%s: %s", folder.data, strerror(errno));
    if (ok) o->folder = copy_text(folder.data, folder.n);
    for (int i = 0; i < d.files && ok; i++) {
        const File *f = d.file + i;
        bool weights = !fnmatch("*.safetensors", f->name, 0);
        o->to_fetch += file_here(&d.r, f) ? 0 : f->size;
        if (!weights && fnmatch("*config.json", f->name, 0) && fnmatch("*.index.json", f->name, 0)) continue;
        char path[MOST_PATH];
        snprintf(path, sizeof path, "/%s/resolve/%s/%s", d.r.name, d.r.commit, f->name);
        url.n = 0;
        hub_url(d.r.hub, &url, path);
        ok = weights ? get_header(&d, f, url.data, &content, e)
                     : hub_get(d.r.hub, url.data, 0, 0, MOST_TREE, false, &content, NULL, e);
        ok = ok && outline_file(o, f, &content, e);
    }
    bytes_free(&folder);
    bytes_free(&url);
    bytes_free(&content);
    free_download(&d);
    if (!ok) outline_close(o);
    return ok;
}

void outline_close(Outline *o) {
    if (o->folder) folder_remove(o->folder);
    free(o->folder);
    *o = (Outline){0};
}
