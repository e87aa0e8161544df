/* base.c: errors, growing arrays, UTF-8, small files, strict JSON. See base.h. */
#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

bool fail(Error *e, int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    char text[sizeof e->text]; /* an argument may be e->text itself */
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    Bytes shown = {0}; /* names from files may hold anything: one line, no terminal escapes, no half characters */
    bytes_shown(&shown, text, strlen(text), false);
    e->code = code;
    snprintf(e->text, sizeof e->text, "%s", shown.data ? shown.data : "");
    bytes_free(&shown);
    return false;
}

void die(const Error *e) {
    fflush(stdout);
    fprintf(stderr, "infer: %s\n", e->text);
    exit(e->code);
}

static void *checked(void *p, size_t bytes) {
    if (!p) {
        fprintf(stderr, "infer: out of memory: %zu more bytes were needed; close other programs\n", bytes);
        exit(NO_ROOM);
    }
    return p;
}

void *allocate(size_t bytes) { return checked(malloc(bytes ? bytes : 1), bytes); }
void *allocate_zero(size_t count, size_t bytes) { return checked(calloc(count ? count : 1, bytes), count * bytes); }
void *reallocate(void *p, size_t bytes) { return checked(realloc(p, bytes ? bytes : 1), bytes); }

char *copy_text(const char *text, size_t n) {
    char *copy = allocate(n + 1);
    memcpy(copy, text, n);
    copy[n] = 0;
    return copy;
}

static size_t grown(size_t room, size_t need) { return room * 2 > need ? room * 2 : need; }

void bytes_add(Bytes *b, const void *data, size_t n) {
    if (b->n + n + 1 > b->room) b->data = reallocate(b->data, b->room = grown(b->room, b->n + n + 1));
    if (n) memcpy(b->data + b->n, data, n);
    b->data[b->n += n] = 0;
}

void bytes_text(Bytes *b, const char *text) { bytes_add(b, text, strlen(text)); }

void bytes_print(Bytes *b, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    char *text = allocate((size_t)n + 1);
    vsnprintf(text, (size_t)n + 1, format, again);
    va_end(again);
    va_end(args);
    bytes_add(b, text, (size_t)n);
    free(text);
}

void bytes_free(Bytes *b) {
    free(b->data);
    *b = (Bytes){0};
}

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

/* How many bytes at s are the beginning of a well-formed code point, and how many that code point has. Both are 0 when
 * not even the first byte can begin one. The ranges are Unicode's table 3-7. */
static int utf8_prefix(const unsigned char *s, size_t n, int *length) {
    unsigned char c = s[0], low = 0x80, high = 0xBF;
    *length = c < 0x80 ? 1 : c >= 0xC2 && c <= 0xDF ? 2 : c >= 0xE0 && c <= 0xEF ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
    if (!*length) return 0;
    if (c == 0xE0) low = 0xA0;
    if (c == 0xED) high = 0x9F;
    if (c == 0xF0) low = 0x90;
    if (c == 0xF4) high = 0x8F;
    int i = 1;
    for (; i < *length && (size_t)i < n && s[i] >= low && s[i] <= high; i++, low = 0x80, high = 0xBF) {}
    return i;
}

int utf8_decode(const char *text, size_t n, uint32_t *cp) {
    const unsigned char *s = (const unsigned char *)text;
    int length, have = utf8_prefix(s, n, &length);
    if (!have || have < length) return 0;
    if (cp) {
        *cp = length == 1 ? s[0] : s[0] & (0x7F >> length);
        for (int i = 1; i < length; i++) *cp = *cp << 6 | (s[i] & 0x3F);
    }
    return length;
}

int utf8_encode(uint32_t cp, char out[4]) {
    int n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, cp >>= 6) out[i] = (char)(0x80 | (cp & 0x3F));
    out[0] = (char)(n == 1 ? cp : (0xF00u >> n & 0xFF) | cp);
    return n;
}

size_t utf8_check(const char *s, size_t n) {
    size_t i = 0;
    while (i < n) {
        uint64_t eight;
        if (i + 8 <= n && (memcpy(&eight, s + i, 8), !(eight & 0x8080808080808080u))) { /* eight of ASCII */
            i += 8;
            continue;
        }
        int length = utf8_decode(s + i, n - i, NULL);
        if (!length) break;
        i += (size_t)length;
    }
    return i;
}

void bytes_shown(Bytes *out, const char *text, size_t n, bool lines) {
    uint32_t c;
    for (size_t i = 0; i < n;) {
        int length = utf8_decode(text + i, n - i, &c);
        bool shown = length && c >= 32 && (c < 127 || c > 159);
        if (shown || (length && lines && (c == '\n' || c == '\t')))
            bytes_add(out, text + i, (size_t)length);
        else
            bytes_text(out, "?");
        i += (size_t)(length ? length : 1);
    }
}

void utf8_stream(Bytes *b, Bytes *out, bool flush) {
    size_t i = 0;
    while (i < b->n) {
        int length, have = utf8_prefix((const unsigned char *)b->data + i, b->n - i, &length);
        if (have && have < length && i + (size_t)have == b->n && !flush) break; /* may yet complete */
        if (have && have == length)
            bytes_add(out, b->data + i, (size_t)length);
        else
            bytes_text(out, "\xEF\xBF\xBD");
        i += (size_t)(have ? have : 1);
    }
    if (!i) return;
    memmove(b->data, b->data + i, b->n - i + 1);
    b->n -= i;
}

bool file_read(const char *path, size_t most, Bytes *out, Error *e) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang us */
    if (fd < 0) return fail(e, BAD_MODEL, "%s: %s", path, strerror(errno));
    struct stat st;
    bool ok = false;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        fail(e, BAD_MODEL, "%s: not a regular file", path);
    } else if ((uint64_t)st.st_size > most) {
        fail(e, BAD_MODEL, "%s: %lld bytes, at most %zu are allowed", path, (long long)st.st_size, most);
    } else {
        size_t size = (size_t)st.st_size, have = 0;
        out->data = allocate(out->room = size + 1);
        for (ssize_t got; have < size && (got = read(fd, out->data + have, size - have)) > 0;) have += (size_t)got;
        out->data[out->n = have] = 0;
        ok = have == size || fail(e, BAD_MODEL, "%s: ends after %zu of %zu bytes", path, have, size);
        if (!ok) bytes_free(out);
    }
    close(fd);
    return ok;
}

void stdin_read(Bytes *out) {
    char part[1 << 16];
    bytes_text(out, "");
    for (size_t n; (n = fread(part, 1, sizeof part, stdin));) bytes_add(out, part, n);
}

bool file_exists(const char *path) {
    struct stat st;
    return !stat(path, &st) && S_ISREG(st.st_mode);
}

enum { MOST_VALUES = 4000000 }; /* thrice those of the largest tokenizer.json; cJSON takes 80 bytes for each */

static const char *skip_digits(const char *s, const char *end) {
    while (s < end && *s >= '0' && *s <= '9') s++;
    return s;
}

/* End of the JSON number at s (RFC 8259, section 6), or NULL if there is none. */
static const char *json_number_end(const char *s, const char *end) {
    if (s < end && *s == '-') s++;
    const char *digits = s;
    s = skip_digits(s, end);
    if (s == digits || (*digits == '0' && s > digits + 1)) return NULL;
    if (s < end && *s == '.') {
        digits = ++s;
        if ((s = skip_digits(s, end)) == digits) return NULL;
    }
    if (s < end && (*s == 'e' || *s == 'E')) {
        if (++s < end && (*s == '+' || *s == '-')) s++;
        digits = s;
        if ((s = skip_digits(s, end)) == digits) return NULL;
    }
    return s;
}

/* What cJSON lets pass or cuts silently, found in one pass over the raw text. Grammar is left to cJSON. */
static const char *json_laxity(const char *text, size_t n, size_t *offset) {
    const char *s = text, *end = text + n, *problem = NULL;
    bool in_string = false;
    size_t valid = utf8_check(text, n), values = 0;
    if (valid < n) return *offset = valid, "invalid UTF-8";
    if (n >= 3 && !memcmp(text, "\xEF\xBB\xBF", 3)) return *offset = 0, "a byte-order mark";
    while (s < end && !problem) {
        unsigned char c = (unsigned char)*s;
        if (in_string) {
            while (s < end && (unsigned char)*s >= 32 && *s != '"' && *s != '\\') s++;
            if (s == end) break;
            if (*s == '"')
                in_string = false, s++;
            else if (*s != '\\')
                problem = "a control byte in a string";
            else if (end - s >= 6 && !memcmp(s, "\\u0000", 6))
                problem = "\\u0000 in a string";
            else
                s += s + 1 < end ? 2 : 1;
        } else if (c == ' ' || c == '\n' || c == '\r' || c == '\t') {
            s++;
        } else if (c == '"') {
            in_string = true, s++;
        } else if (c == '-' || (c >= '0' && c <= '9')) {
            const char *after = json_number_end(s, end);
            if (!after || (after < end && strchr("0123456789+-.eE", *after)))
                problem = "a malformed number";
            else
                s = after;
        } else if (c < 32) {
            problem = "a control byte";
        } else if (c == ',' && ++values > MOST_VALUES) {
            problem = "too many values";
        } else {
            s++;
        }
    }
    *offset = (size_t)(s - text);
    return problem;
}

typedef struct { /* keys seen in one object; a slot belongs to the object whose number it carries */
    struct {
        const char *key;
        uint32_t object;
    } * slot;
    size_t slots;
    uint32_t object;
    uint64_t seed; /* drawn anew, so that nobody can choose keys that collide */
} Keys;

static size_t hash_text(const char *s, uint64_t h) { /* FNV-1a */
    for (; *s; s++) h = (h ^ (unsigned char)*s) * 0x100000001b3u;
    return (size_t)(h ^ h >> 29);
}

/* A key that stands twice in one object anywhere below `value`, or NULL. cJSON limits the depth of nesting. */
static const char *json_twice(const cJSON *value, Keys *keys) {
    if (cJSON_IsObject(value)) {
        size_t n = 0;
        for (const cJSON *m = value->child; m; m = m->next) n++;
        if (n * 2 > keys->slots) {
            while (n * 2 > keys->slots) keys->slots = keys->slots ? keys->slots * 2 : 64;
            free(keys->slot);
            keys->slot = allocate_zero(keys->slots, sizeof *keys->slot);
            keys->object = 0;
        }
        uint32_t object = ++keys->object;
        for (const cJSON *m = value->child; m; m = m->next) {
            size_t i = hash_text(m->string, keys->seed) & (keys->slots - 1);
            for (; keys->slot[i].object == object; i = (i + 1) & (keys->slots - 1))
                if (!strcmp(keys->slot[i].key, m->string)) return m->string;
            keys->slot[i].key = m->string;
            keys->slot[i].object = object;
        }
    }
    for (const cJSON *m = value->child; m; m = m->next) {
        const char *twice = m->child ? json_twice(m, keys) : NULL;
        if (twice) return twice;
    }
    return NULL;
}

cJSON *json_parse(const char *text, size_t n, const char *name, Error *e) {
    size_t offset;
    const char *problem = json_laxity(text, n, &offset), *end = text;
    cJSON *json = NULL;
    if (problem) {
        fail(e, BAD_MODEL, "%s: not valid JSON: %s at byte %zu", name, problem, offset);
        return NULL;
    }
    json = cJSON_ParseWithLengthOpts(text, n, &end, 0);
    if (!json) {
        const char *stopped = cJSON_GetErrorPtr();
        offset = stopped >= text && stopped <= text + n ? (size_t)(stopped - text) : 0;
        fail(e, BAD_MODEL, "%s: not valid JSON near byte %zu of %zu", name, offset, n);
        return NULL;
    }
    while (end < text + n && strchr(" \t\r\n", *end) && *end) end++;
    Keys keys = {0};
    if (getrandom(&keys.seed, sizeof keys.seed, GRND_NONBLOCK) < 0) keys.seed = (uint64_t)(seconds() * 1e9);
    const char *twice = json_twice(json, &keys);
    free(keys.slot);
    if (end < text + n)
        fail(e, BAD_MODEL, "%s: not valid JSON: text after the end at byte %zu", name, (size_t)(end - text));
    else if (twice)
        fail(e, BAD_MODEL, "%s: the key '%.100s' stands twice in one object", name, twice);
    else
        return json;
    cJSON_Delete(json);
    return NULL;
}

cJSON *json_read(const char *path, size_t most, Error *e) {
    Bytes text = {0};
    if (!file_read(path, most, &text, e)) return NULL;
    cJSON *json = json_parse(text.data, text.n, path, e);
    bytes_free(&text);
    return json;
}

const cJSON *json_get(const cJSON *object, const char *key) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(value) ? NULL : value;
}

const char *json_string(const cJSON *object, const char *key) { return cJSON_GetStringValue(json_get(object, key)); }
bool json_true(const cJSON *object, const char *key) { return cJSON_IsTrue(json_get(object, key)); }

bool json_whole(const cJSON *value, int64_t least, int64_t most, int64_t *out) {
    if (!cJSON_IsNumber(value)) return false;
    double x = value->valuedouble;
    if (!(fabs(x) < 9007199254740992.0) || x != floor(x) || x < (double)least || x > (double)most) return false;
    *out = (int64_t)x;
    return true;
}

void json_quote(Bytes *out, const char *text, size_t n) {
    static const char letters[] = "btnvfr"; /* of the bytes 8 to 13; JSON has no \v */
    bytes_text(out, "\"");
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\')
            bytes_print(out, "\\%c", c);
        else if (c >= 8 && c <= 13 && c != 11)
            bytes_print(out, "\\%c", letters[c - 8]);
        else if (!c)
            bytes_text(out, "\xEF\xBF\xBD");
        else if (c < 32 || c == 127)
            bytes_print(out, "\\u%04x", c);
        else
            bytes_add(out, text + i, 1);
    }
    bytes_text(out, "\"");
}

cJSON *json_from_text(const char *text, size_t n) {
    Bytes whole = {0};
    bytes_text(&whole, "");
    for (size_t i = 0; i < n; i++) bytes_add(&whole, text[i] ? text + i : "\xEF\xBF\xBD", text[i] ? 1 : 3);
    cJSON *json = cJSON_CreateString(whole.data);
    bytes_free(&whole);
    return checked(json, n);
}

char *json_text(const cJSON *value) {
    char *text = cJSON_PrintUnformatted(value);
    return checked(text, 0);
}

bool text_whole(const char *text, int least, int most, int *out) {
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    if (end == text || *end || errno || n < least || n > most) return false;
    *out = (int)n;
    return true;
}

double log_sum_exp(const float *x, int n) {
    double most = -INFINITY, total = 0;
    for (int i = 0; i < n; i++) most = fmax(most, (double)x[i]);
    for (int i = 0; i < n; i++) total += exp((double)x[i] - most);
    return most + log(total);
}

float f16_value(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    float x = ldexpf((float)(exponent ? fraction + 1024 : fraction), exponent ? exponent - 25 : -24);
    if (exponent == 31) x = fraction ? NAN : INFINITY;
    return half & 0x8000 ? -x : x;
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
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%llu", (unsigned long long)count), k = 0;
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0) out[k++] = ',';
        out[k++] = digits[i];
    }
    out[k] = 0;
    return out;
}
