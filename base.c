/* base.c: errors, growing arrays, a hash table, UTF-8, small files, strict JSON. See base.h. */
#include "base.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

bool fail(Error *e, int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    char text[sizeof e->text]; /* an argument may be e->text itself */
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    LocalBytes shown = {0}; /* a name from a file may hold anything, such as line breaks and terminal escapes */
    bytes_shown(&shown, text, strlen(text), false);
    e->code = code;
    snprintf(e->text, sizeof e->text, "%s", shown.data ? shown.data : "");
    return false;
}

static void *checked(void *p) {
    if (!p) fputs("infer: out of memory: close other programs\n", stderr), exit(NO_ROOM);
    return p;
}

void *allocate(size_t bytes) { return checked(malloc(bytes ? bytes : 1)); }
void *allocate_zero(size_t count, size_t bytes) { return checked(calloc(count ? count : 1, bytes)); }
void *reallocate(void *p, size_t bytes) { return checked(realloc(p, bytes ? bytes : 1)); }

static size_t grown(size_t room, size_t need) { return room * 2 > need ? room * 2 : need; }

void bytes_add(Bytes *b, const void *data, size_t n) {
    if (b->n + n + 1 > b->room) b->data = reallocate(b->data, b->room = grown(b->room, b->n + n + 1));
    if (n) memcpy(b->data + b->n, data, n);
    b->data[b->n += n] = 0;
}

void bytes_text(Bytes *b, const char *text) { bytes_add(b, text, strlen(text)); }

char *bytes_print(Bytes *b, const char *format, ...) {
    va_list args;
    va_start(args, format);
    LocalText text = NULL;
    int n = vasprintf(&text, format, args);
    va_end(args);
    bytes_add(b, checked(n < 0 ? NULL : text), (size_t)n);
    return b->data;
}

void bytes_free(Bytes *b) {
    free(b->data);
    *b = (Bytes){0};
}

void marked_add(Marked *m, const void *data, size_t n, bool own) {
    bytes_add(&m->text, data, n);
    bytes_add(&m->own, NULL, 0);
    for (size_t i = 0; i < n; i++) bytes_add(&m->own, own ? "\1" : "", 1);
}

void marked_free(Marked *m) { bytes_free(&m->text), bytes_free(&m->own); }

void ids_append(Ids *ids, const int *more, size_t n) {
    if (ids->n + n > ids->room)
        ids->data = reallocate(ids->data, (ids->room = grown(ids->room, ids->n + n)) * sizeof(int));
    if (n) memcpy(ids->data + ids->n, more, n * sizeof(int));
    ids->n += n;
}

void ids_add(Ids *ids, int id) { ids_append(ids, &id, 1); }

void ids_free(Ids *ids) {
    free(ids->data);
    *ids = (Ids){0};
}

static size_t map_slot(const Map *m, uint64_t key) {
    uint64_t h = key * 0x9E3779B97F4A7C15u;
    size_t i = (h ^ h >> 32) & (m->room - 1);
    while (m->slot[i].value >= 0 && m->slot[i].key != key) i = (i + 1) & (m->room - 1);
    return i;
}

int64_t map_get(const Map *m, uint64_t key) { return m->room ? m->slot[map_slot(m, key)].value : -1; }

void map_put(Map *m, uint64_t key, int64_t value) {
    if (m->n * 2 >= m->room) {
        Map old = *m;
        m->room = old.room ? old.room * 2 : 64;
        m->slot = allocate(m->room * sizeof *m->slot);
        memset(m->slot, 0xFF, m->room * sizeof *m->slot);
        for (size_t i = 0; i < old.room; i++)
            if (old.slot[i].value >= 0) m->slot[map_slot(m, old.slot[i].key)] = old.slot[i];
        free(old.slot);
    }
    size_t i = map_slot(m, key);
    m->n += m->slot[i].value < 0;
    m->slot[i] = (MapSlot){key, value};
}

void map_free(Map *m) {
    free(m->slot);
    *m = (Map){0};
}

uint64_t text_hash(uint64_t h, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3u;
    return h;
}

void text_free(char **text) { free(*text); }
void json_free(cJSON **json) { cJSON_Delete(*json); }

int utf8_decode(const char *text, size_t n, uint32_t *cp) {
    const unsigned char *s = (const unsigned char *)text;
    unsigned char c = s[0], low = 0x80, high = 0xBF; /* of the second byte: Unicode's table 3-7 */
    int length = c < 0x80 ? 1 : c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
    if (c == 0xE0) low = 0xA0;
    if (c == 0xED) high = 0x9F;
    if (c == 0xF0) low = 0x90;
    if (c == 0xF4) high = 0x8F;
    *cp = length == 1 ? c : c & (0x7F >> length);
    for (int i = 1; i < length; i++, low = 0x80, high = 0xBF) {
        if ((size_t)i == n || s[i] < low || s[i] > high) return -i;
        *cp = *cp << 6 | (s[i] & 0x3F);
    }
    return length ? length : -1;
}

size_t utf8_check(const char *s, size_t n) {
    uint32_t cp;
    size_t i = 0;
    for (int length; i < n; i += (size_t)length) {
        length = (unsigned char)s[i] < 0x80 ? 1 : utf8_decode(s + i, n - i, &cp);
        if (length < 0) break;
    }
    return i;
}

bool check_text(const char *what, const char *text, size_t n, Error *e) {
    size_t valid = utf8_check(text, n);
    return valid == n || fail(e, USAGE, "%s is not UTF-8: byte %zu is 0x%02X", what, valid, (unsigned char)text[valid]);
}

void bytes_shown(Bytes *out, const char *text, size_t n, bool lines) {
    uint32_t c;
    for (size_t i = 0; i < n;) {
        int length = utf8_decode(text + i, n - i, &c);
        bool shown = (c >= 32 && c < 127) || c > 159 || (lines && (c == '\n' || c == '\t'));
        bytes_add(out, length > 0 && shown ? text + i : "?", length > 0 && shown ? (size_t)length : 1);
        i += length > 0 ? (size_t)length : 1;
    }
}

void utf8_stream(Bytes *b, Bytes *out, bool flush) {
    uint32_t c;
    size_t done = 0;
    while (done < b->n) {
        int length = utf8_decode(b->data + done, b->n - done, &c);
        size_t part = (size_t)abs(length);
        bool begun = (unsigned char)b->data[done] >= 0xC2 && (unsigned char)b->data[done] <= 0xF4;
        if (length < 0 && begun && done + part == b->n && !flush) break; /* the next part may complete it */
        bytes_add(out, length > 0 ? b->data + done : "\xEF\xBF\xBD", length > 0 ? part : 3);
        done += part;
    }
    if (!done) return;
    memmove(b->data, b->data + done, b->n - done + 1);
    b->n -= done;
}

/* Reads a file to its end, or until there are more than `most` bytes. */
static void read_all(FILE *f, size_t most, Bytes *out) {
    char part[1 << 16];
    bytes_text(out, "");
    for (size_t n; out->n <= most && !feof(f) && (n = fread(part, 1, sizeof part, f));) bytes_add(out, part, n);
}

void text_read(const char *file, Bytes *out) {
    const size_t most = 1 << 28;
    const bool named = file && strcmp(file, "-");
    FILE *f = named ? fopen(file, "re") : stdin;
    Error e;
    if (!named && !poll(&(struct pollfd){.fd = STDIN_FILENO, .events = POLLIN}, 1, 1000))
        fputs("infer: reading stdin until its end (Ctrl+D); </dev/null if there is none\n", stderr);
    if (f) read_all(f, most, out);
    if (!f || (ferror(f) && errno != EBADF)) /* nohup's stdin is open for writing only: there is none */
        fail(&e, USAGE, "%s cannot be read: %m; give another file", named ? file : "stdin"), die(&e);
    if (out->n > most) fail(&e, USAGE, "%s has more than the 268 MB that are allowed", named ? file : "stdin"), die(&e);
    if (named) fclose(f);
}

bool file_read(const char *path, size_t most, Bytes *out, Error *e) {
    struct stat st;
    bool there = !stat(path, &st), regular = there && S_ISREG(st.st_mode); /* opening a FIFO would hang */
    FILE *f = regular ? fopen(path, "re") : NULL;
    if (!f) return fail(e, BAD_MODEL, "%s: %s", path, there && !regular ? "not a regular file" : strerror(errno));
    bool ok = st.st_size <= (off_t)most ||
              fail(e, BAD_MODEL, "%s: %lld bytes, at most %zu are allowed", path, (long long)st.st_size, most);
    if (ok) read_all(f, most, out);
    if (ferror(f)) ok = fail(e, BAD_MODEL, "%s: %m", path), out->n = 0;
    fclose(f);
    return ok;
}

bool file_exists(const char *path) {
    struct stat st;
    return !stat(path, &st) && S_ISREG(st.st_mode);
}

char *path_join(const char *folder, const char *name) { return text_print("%s/%s", folder, name); }

/* The largest tokenizer.json has a third. cJSON takes 80 bytes for each value, keep_numbers() 32 more for some. */
enum { MOST_COMMAS = 4000000 };

/* Does the dot or zero at s make a number that cJSON accepts and RFC 8259 forbids: 1., -.5, 01, -01? */
static bool json_lax_number(const char *text, const char *s, const char *end) {
    bool more = s + 1 < end && isdigit((unsigned char)s[1]);
    char before = s > text ? s[-1] : ' ';
    if (*s == '.') return !more || !isdigit((unsigned char)before);
    if (before == '-' && s - text > 1) before = s[-2]; /* 1e-07 is fine */
    return more && !strchr("0123456789.eE+", before);
}

/* The first error that cJSON would accept, or cut silently, and its place; NULL: none. cJSON finds the others. */
static const char *json_laxity(const char *text, size_t n, const char **place) {
    const char *end = text + n;
    size_t values = 0;
    bool quoted = false;
    *place = text + utf8_check(text, n);
    if (*place < end) return "invalid UTF-8";
    for (const char *s = text; s < end; s++) {
        unsigned char c = (unsigned char)*s;
        *place = s;
        if (c < 32 && (quoted || (c != '\t' && c != '\n' && c != '\r'))) return "a control byte";
        if (c == '\\' && end - s >= 6 && !memcmp(s, "\\u0000", 6)) return "\\u0000";
        if (c == '\\') s++; /* what is escaped ends no text */
        if (c == '"') quoted = !quoted;
        if (quoted) continue;
        if (c >= 128) return "a byte-order mark or other letter outside of a text";
        if ((c == '.' || c == '0') && json_lax_number(text, s, end)) return "a malformed number";
        if (c == ',' && ++values > MOST_COMMAS) return "too many values";
    }
    return NULL;
}

int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* A key that occurs twice in one object, at any depth, or NULL. cJSON limits the depth. */
static const char *json_twice(const cJSON *value) {
    size_t n = 0;
    const cJSON *m;
    const char *twice = NULL, **name = allocate((size_t)cJSON_GetArraySize(value) * sizeof *name);
    cJSON_ArrayForEach(m, value) {
        if (m->string) name[n++] = m->string; /* values of an array have none */
        if (m->child && !twice) twice = json_twice(m);
    }
    qsort(name, n, sizeof *name, by_name);
    for (size_t i = 1; i < n && !twice; i++)
        if (!strcmp(name[i - 1], name[i])) twice = name[i];
    free(name);
    return twice;
}

/* Keeps in valuestring the text of numbers that cJSON would write differently: 1.0, 1e5, more than 15 digits.
 * cJSON_Duplicate() copies it, cJSON_Delete() frees it. s: the text that was parsed, from these values on. Returns what
 * follows the last number. */
static const char *keep_numbers(cJSON *value, const char *s) {
    for (; value; value = value->next) {
        if (cJSON_IsNumber(value)) {
            for (; *s != '-' && !isdigit((unsigned char)*s); s++)
                if (*s == '"')
                    while (*++s != '"') s += *s == '\\';
            size_t n = strspn(s, "+-.0123456789eE");
            if (n > 15 || strspn(s, "-0123456789") < n) value->valuestring = copy_text(s, n);
            s += n;
        }
        s = keep_numbers(value->child, s);
    }
    return s;
}

cJSON *json_parse(const char *text, size_t n, const char *name, Error *e) {
    const char *at, *problem = json_laxity(text, n, &at), *twice = NULL;
    cJSON *json = problem ? NULL : cJSON_ParseWithLengthOpts(text, n, &at, false);
    while (json && at < text + n && strchr(" \t\r\n", *at)) at++;
    if (!json && !problem) problem = "it ends or goes wrong";
    if (json && at < text + n) problem = "text after the end";
    if (problem)
        fail(e, BAD_MODEL, "%s: not valid JSON: %s at byte %td of %zu", name, problem, at - text, n);
    else if ((twice = json_twice(json)))
        fail(e, BAD_MODEL, "%s: the key '%.100s' appears twice in one object", name, twice);
    else
        return keep_numbers(json->child, text), json;
    cJSON_Delete(json);
    return NULL;
}

/* Makes texts of the words that Python's json writes for numbers that JSON does not have. Whoever reads such a number
 * refuses the text. */
static void quote_words(Bytes *text) {
    static const char *const words[] = {"NaN", "Infinity", "-Infinity"};
    LocalBytes quoted = {0};
    const char *end = text->data + text->n, *from = text->data;
    bool inside = false;
    for (const char *s = from; s < end; s++) {
        if (*s == '"') inside = !inside;
        if (inside && *s == '\\') s++; /* what is escaped ends no text */
        for (int i = 0; i < 3 && !inside && strchr("NI-", *s); i++) {
            const size_t n = begins(s, words[i]);
            if (!n) continue;
            bytes_add(&quoted, from, (size_t)(s - from));
            bytes_print(&quoted, "\"%s\"", words[i]);
            from = s += n;
        }
    }
    if (from == text->data) return;
    bytes_add(&quoted, from, (size_t)(end - from));
    const Bytes all = quoted;
    quoted = *text, *text = all; /* which frees the old one */
}

cJSON *json_read(const char *path, size_t most, Error *e) {
    LocalBytes text = {0};
    if (!file_read(path, most, &text, e)) return NULL;
    quote_words(&text);
    cJSON *json = json_parse(text.data, text.n, path, e);
    if (!json) fail(e, BAD_MODEL, "%s: mend or replace the file", e->text);
    return json;
}

const cJSON *json_get(const cJSON *object, const char *key) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(value) ? NULL : value;
}

const char *json_string(const cJSON *object, const char *key) { return cJSON_GetStringValue(json_get(object, key)); }

bool json_is(const cJSON *object, const char *key, const char *text) { return same(json_string(object, key), text); }

bool json_true(const cJSON *object, const char *key) { return cJSON_IsTrue(json_get(object, key)); }

bool json_whole(const cJSON *value, int64_t least, int64_t most, int64_t *out) {
    if (!cJSON_IsNumber(value)) return false;
    double x = value->valuedouble;
    if (!(fabs(x) < 9007199254740992.0) || x != floor(x) || x < (double)least || x > (double)most) return false;
    *out = (int64_t)x;
    return true;
}

cJSON *json_from_text(const char *text, size_t n) {
    LocalBytes copy = {0};
    for (size_t i = 0; i < n; i++) bytes_add(&copy, text[i] ? text + i : "\xEF\xBF\xBD", text[i] ? 1 : 3);
    return checked(cJSON_CreateString(n ? copy.data : ""));
}

cJSON *json_add(cJSON *object, const char *key, ...) {
    va_list args;
    va_start(args, key);
    if (!object) object = checked(cJSON_CreateObject());
    for (; key; key = va_arg(args, const char *)) cJSON_AddItemToObject(object, key, va_arg(args, cJSON *));
    va_end(args);
    return object;
}

cJSON *json_number(double x) { return checked(cJSON_CreateNumber(x)); }
cJSON *json_word(const char *text) { return checked(text ? cJSON_CreateString(text) : cJSON_CreateNull()); }

char *json_text(const cJSON *value) { return checked(cJSON_PrintUnformatted(value)); }

/* cJSON writes raw values as they are. */
static void write_numbers(cJSON *value) {
    for (; value; value = value->next) {
        if (cJSON_IsNumber(value) && value->valuestring) value->type = cJSON_Raw;
        write_numbers(value->child);
    }
}

void json_append(Bytes *out, cJSON *json) {
    write_numbers(json);
    LocalText text = json_text(json);
    bytes_text(out, text);
    cJSON_Delete(json);
}

void json_written(Bytes *out, const cJSON *value) { json_append(out, cJSON_Duplicate(value, true)); }

void json_print(cJSON *json, bool wanted) {
    LocalBytes text = {0};
    json_append(&text, json);
    if (wanted) puts(text.data);
}

const char *environment(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

bool text_whole(const char *text, int least, int most, int *out) {
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    if (end == text || *end || errno || n < least || n > most) return false;
    *out = (int)n;
    return true;
}

bool text_stops(Bytes *text, size_t *shown, const char *const *stop, int n, bool last) {
    size_t end = text->n, unseen = end - *shown; /* a longer stop text cannot be there */
    for (int i = 0; i < n; i++) {
        char *hit = memmem(text->data + *shown, text->n - *shown, stop[i], strnlen(stop[i], unseen + 1));
        if (!hit) continue;
        text->n = (size_t)(hit - text->data);
        *hit = 0;
    }
    bool found = text->n < end;
    for (; *shown < text->n && !found && !last; ++*shown)
        for (int i = 0; i < n; i++)
            if (!strncmp(stop[i], text->data + *shown, text->n - *shown)) return false;
    *shown = text->n;
    return found;
}

double log_sum_exp(const float *x, int n) {
    double most = -INFINITY, total = 0;
    for (int i = 0; i < n; i++) most = fmax(most, (double)x[i]);
    for (int i = 0; i < n; i++) total += exp((double)x[i] - most);
    return most + log(total);
}

bool same(const char *a, const char *b) { return a && b && !strcmp(a, b); }

size_t begins(const char *text, const char *with) {
    return text && !strncmp(text, with, strlen(with)) ? strlen(with) : 0;
}

bool text_listed(const char *list, const char *word) {
    size_t n = strpbrk(word, ", ") ? 0 : strlen(word);
    for (const char *s = list; n && (s = strstr(s, word)); s += n)
        if ((s == list || s[-1] == ' ') && strchr(", ", s[n])) return true; /* or at the end */
    return false;
}

double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

char *size_text(uint64_t bytes, char out[24]) {
    const char *unit[] = {"bytes", "kB", "MB", "GB", "TB"};
    int u = 0;
    double x = (double)bytes;
    while (x >= 999.5 && u < 4) x /= 1000, u++;
    snprintf(out, 24, u && x < 99.95 ? "%.1f %s" : "%.0f %s", x, unit[u]);
    return out;
}

char *count_text(uint64_t count, char out[32]) {
    if (count < 1000)
        snprintf(out, 32, "%d", (int)count);
    else
        snprintf(out + strlen(count_text(count / 1000, out)), 5, ",%03d", (int)(count % 1000));
    return out;
}
