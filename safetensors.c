/* safetensors.c: reads and checks headers. Nothing is believed: lengths are compared with the file's size before use,
 * products are checked for overflow, and the data must be covered exactly once. See safetensors.h. */
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_HEADER = 100000000, MOST_INDEX = 64 << 20, MOST_FILES = 4096 };

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
              {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
              {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8}};

static bool bad(Error *e, const TensorFile *f, const char *tensor, const char *what) {
    return fail(e, BAD_MODEL, "%s: tensor '%.200s' %s", f->name, tensor, what);
}

/* One entry of the header. */
static bool read_entry(const TensorFile *f, size_t data, const cJSON *entry, Tensor *t, Error *e) {
    const cJSON *shape = json_get(entry, "shape"), *offsets = json_get(entry, "data_offsets"), *dim;
    const char *dtype = json_string(entry, "dtype");
    size_t element = 0;
    if (!dtype) return bad(e, f, entry->string, "has no dtype");
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (!strcmp(dtype, dtypes[i].name)) element = dtypes[i].size, t->dtype = dtypes[i].name;
    if (!element)
        return fail(e, BAD_MODEL, "%s: tensor '%.200s' has the unknown dtype '%.40s'", f->name, entry->string, dtype);
    if (!cJSON_IsArray(shape)) return bad(e, f, entry->string, "has no shape");
    size_t bytes = element;
    cJSON_ArrayForEach(dim, shape) {
        if (t->dims == MOST_DIMS) return bad(e, f, entry->string, "has more than 8 dimensions");
        if (!json_whole(dim, 0, INT64_MAX, &t->shape[t->dims]))
            return bad(e, f, entry->string, "has a shape that is not whole numbers");
        if (__builtin_mul_overflow(bytes, (size_t)t->shape[t->dims++], &bytes))
            return bad(e, f, entry->string, "has a shape too large for any file");
    }
    int64_t begin, end;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !json_whole(offsets->child, 0, INT64_MAX, &begin) || !json_whole(offsets->child->next, 0, INT64_MAX, &end))
        return bad(e, f, entry->string, "has data_offsets that are not two whole numbers");
    if (begin > end || (uint64_t)end > f->size - data)
        return fail(e, BAD_MODEL,
                    "%s: tensor '%.200s' lies at bytes %lld to %lld of %zu: the file is incomplete or damaged; "
                    "download it again",
                    f->name, entry->string, (long long)begin, (long long)end, f->size - data);
    if ((uint64_t)(end - begin) != bytes)
        return fail(e, BAD_MODEL, "%s: tensor '%.200s' has %lld bytes, its dtype and shape need %zu", f->name,
                    entry->string, (long long)(end - begin), bytes);
    t->name = copy_text(entry->string, strlen(entry->string));
    t->offset = data + (size_t)begin;
    t->size = bytes;
    t->data = f->map + t->offset;
    return true;
}

static int by_offset(const void *a, const void *b) {
    const Tensor *x = *(const Tensor *const *)a, *y = *(const Tensor *const *)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->size > y->size) - (x->size < y->size); /* an empty one before its neighbour */
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const Tensor *)a)->name, ((const Tensor *)b)->name);
}

/* The tensors must cover the data exactly, without holes and overlaps. */
static bool check_cover(const TensorFile *f, const Tensor *tensor, int n, size_t data, Error *e) {
    const Tensor **order = allocate((size_t)n * sizeof *order);
    for (int i = 0; i < n; i++) order[i] = tensor + i;
    qsort(order, (size_t)n, sizeof *order, by_offset);
    size_t end = data;
    bool ok = true;
    for (int i = 0; i < n && ok; end = order[i]->offset + order[i]->size, i++)
        if (order[i]->offset != end)
            ok = bad(e, f, order[i]->name, order[i]->offset < end ? "overlaps another" : "leaves a hole before it");
    free(order);
    if (ok && end != f->size)
        return fail(e, BAD_MODEL, "%s: %zu bytes, its header describes %zu: the file is damaged; download it again",
                    f->name, f->size, end);
    return ok;
}

static bool map_file(TensorFile *f, const char *path, Error *e) {
    struct stat st;
    f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (f->fd < 0) return fail(e, BAD_MODEL, "%s: %s", path, strerror(errno));
    if (fstat(f->fd, &st) || !S_ISREG(st.st_mode)) return fail(e, BAD_MODEL, "%s: not a regular file", path);
    f->size = (size_t)st.st_size;
    if (f->size < 8) return fail(e, BAD_MODEL, "%s: %zu bytes are too few for a safetensors file", path, f->size);
    void *map = mmap(NULL, f->size, PROT_READ, MAP_SHARED, f->fd, 0);
    if (map == MAP_FAILED) return fail(e, BAD_MODEL, "%s: cannot be mapped: %s", path, strerror(errno));
    f->map = map;
    return true;
}

/* The numbers of a valid header must be plain digits: cJSON, and so json_whole, takes 1e2 and 120.0 for whole ones. */
static bool plain_numbers(const TensorFile *f, const char *s, const char *end, Error *e) {
    const char *text = s, *tensor = s; /* the last string, and the last one before a brace */
    int text_n = 0, tensor_n = 0;
    for (; s < end; s++) {
        if (*s == '"') {
            for (text = ++s; *s != '"'; s++) s += *s == '\\';
            text_n = s - text < 200 ? (int)(s - text) : 200;
        } else if (*s == '{') {
            tensor = text, tensor_n = text_n;
        } else if (*s == '.' || *s == 'e' || *s == 'E') {
            return fail(e, BAD_MODEL, "%s: tensor '%.*s' has something else than plain digits in its %.*s", f->name,
                        tensor_n, tensor, text_n, text);
        }
    }
    return true;
}

static bool read_file(Tensors *t, const char *path, Error *e) {
    t->file = reallocate(t->file, (size_t)(t->files + 1) * sizeof *t->file);
    TensorFile *f = t->file + t->files++;
    *f = (TensorFile){.name = copy_text(path, strlen(path)), .fd = -1};
    if (!map_file(f, path, e)) return false;
    uint64_t header = 0;
    for (int i = 7; i >= 0; i--) header = header << 8 | f->map[i];
    if (header > MOST_HEADER || header > f->size - 8)
        return fail(e, BAD_MODEL,
                    "%s: a header of %llu bytes does not fit a file of %zu: it is no safetensors file, or damaged",
                    path, (unsigned long long)header, f->size);
    if (!header || f->map[8] != '{')
        return fail(e, BAD_MODEL, "%s: its header does not begin with '{': it is no safetensors file", path);
    cJSON *json = json_parse((const char *)f->map + 8, header, path, e);
    if (!json) return false;
    size_t data = 8 + header;
    int first = t->n;
    bool ok = true;
    t->tensor = reallocate(t->tensor, (size_t)(t->n + cJSON_GetArraySize(json)) * sizeof *t->tensor);
    for (const cJSON *entry = json->child; entry && ok; entry = entry->next) {
        if (!strcmp(entry->string, "__metadata__")) {
            ok = cJSON_IsObject(entry) || fail(e, BAD_MODEL, "%s: its __metadata__ is not an object", path);
            continue;
        }
        t->tensor[t->n] = (Tensor){.file = t->files - 1};
        ok = read_entry(f, data, entry, t->tensor + t->n, e);
        t->n += ok;
    }
    cJSON_Delete(json);
    ok = ok && plain_numbers(f, (const char *)f->map + 8, (const char *)f->map + data, e);
    return ok && check_cover(f, t->tensor + first, t->n - first, data, e);
}

/* Opens each file that the index names, once. */
static bool read_shards(Tensors *t, const char *dir, const char *index, const cJSON *map, Error *e) {
    for (const cJSON *entry = map->child; entry; entry = entry->next) {
        const char *name = cJSON_GetStringValue(entry);
        if (!name || !*name || *name == '.' || strchr(name, '/') || strchr(name, '\\'))
            return fail(e, BAD_MODEL, "%s: tensor '%.100s' is in '%.100s', which is no file name", index, entry->string,
                        name ? name : "(no text)");
        Bytes path = {0};
        bytes_print(&path, "%s/%s", dir, name);
        bool seen = false, ok = true;
        for (int i = t->files; i-- && !seen;) seen = !strcmp(t->file[i].name, path.data);
        if (!seen && t->files == MOST_FILES)
            ok = fail(e, BAD_MODEL, "%s: names more than %d files", index, MOST_FILES);
        else if (!seen && access(path.data, F_OK))
            ok = fail(e, BAD_MODEL,
                      "%s: missing, though %s names it: the download is incomplete; infer download goes on with it",
                      path.data, index);
        else if (!seen)
            ok = read_file(t, path.data, e);
        bytes_free(&path);
        if (!ok) return false;
    }
    return true;
}

/* Every tensor of the index must be in the file that the index says. */
static bool check_index(const Tensors *t, const char *index, const cJSON *map, Error *e) {
    for (const cJSON *entry = map->child; entry; entry = entry->next) {
        const Tensor *found = tensors_find(t, entry->string);
        const char *path = found ? t->file[found->file].name : "", *slash = strrchr(path, '/');
        if (!found || strcmp(slash ? slash + 1 : path, entry->valuestring))
            return fail(e, BAD_MODEL, "%s: tensor '%.200s' should be in %.100s and is %s", index, entry->string,
                        entry->valuestring, found ? "elsewhere" : "missing there");
    }
    return true;
}

static bool open_directory(Tensors *t, const char *dir, Error *e) {
    Bytes index = {0}, single = {0};
    bytes_print(&index, "%s/model.safetensors.index.json", dir);
    bytes_print(&single, "%s/model.safetensors", dir);
    bool ok = false;
    if (!access(index.data, F_OK)) {
        cJSON *json = json_read(index.data, MOST_INDEX, e);
        const cJSON *map = json_get(json, "weight_map");
        if (json && (!cJSON_IsObject(map) || !map->child))
            fail(e, BAD_MODEL, "%s: has no weight_map with tensors", index.data);
        else if (json)
            ok = read_shards(t, dir, index.data, map, e);
        if (t->n) qsort(t->tensor, (size_t)t->n, sizeof *t->tensor, by_name);
        ok = ok && check_index(t, index.data, map, e);
        cJSON_Delete(json);
    } else if (!access(single.data, F_OK)) {
        ok = read_file(t, single.data, e);
    } else {
        fail(e, BAD_MODEL,
             "%s: neither model.safetensors nor model.safetensors.index.json is here: it is no model directory, or its "
             "download is incomplete; infer download goes on with it",
             dir);
    }
    bytes_free(&index);
    bytes_free(&single);
    return ok;
}

static const Tensors *opened; /* the last ones: whose files on_bus_error names */

/* Files are mapped: where one has shrunk underneath, reading it raises SIGBUS. Any other ends the process as ever. */
static void on_bus_error(int number, siginfo_t *info, void *context) {
    static const char end[] = ": truncated while it was in use\n";
    (void)context;
    for (int i = 0; opened && i < opened->files; i++) {
        const TensorFile *f = opened->file + i;
        if ((uintptr_t)info->si_addr - (uintptr_t)f->map >= f->size) continue;
        if (write(STDERR_FILENO, "infer: ", 7) + write(STDERR_FILENO, f->name, strlen(f->name)) +
            write(STDERR_FILENO, end, sizeof end - 1)) {}
        _exit(BAD_MODEL);
    }
    signal(number, SIG_DFL);
}

bool tensors_open(Tensors *t, const char *dir, Error *e) {
    struct stat st;
    *t = (Tensors){0};
    opened = t;
    sigaction(SIGBUS, &(struct sigaction){.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO}, NULL);
    bool ok = stat(dir, &st) || S_ISDIR(st.st_mode) ? open_directory(t, dir, e) : read_file(t, dir, e);
    if (t->n) qsort(t->tensor, (size_t)t->n, sizeof *t->tensor, by_name);
    for (int i = 1; i < t->n && ok; i++)
        if (!strcmp(t->tensor[i - 1].name, t->tensor[i].name))
            ok = fail(e, BAD_MODEL, "%s: tensor '%.200s' is also in %s", t->file[t->tensor[i].file].name,
                      t->tensor[i].name, t->file[t->tensor[i - 1].file].name);
    if (!ok) tensors_close(t);
    return ok;
}

void tensors_close(Tensors *t) {
    for (int i = 0; i < t->n; i++) free(t->tensor[i].name);
    for (int i = 0; i < t->files; i++) {
        if (t->file[i].map) munmap((void *)(uintptr_t)t->file[i].map, t->file[i].size);
        if (t->file[i].fd >= 0) close(t->file[i].fd);
        free(t->file[i].name);
    }
    free(t->tensor);
    free(t->file);
    if (opened == t) opened = NULL;
    *t = (Tensors){0};
}

const Tensor *tensors_find(const Tensors *t, const char *name) {
    Tensor key = {.name = (char *)(uintptr_t)name};
    return t->n ? bsearch(&key, t->tensor, (size_t)t->n, sizeof key, by_name) : NULL;
}
