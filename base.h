/* base.h: what all other C files use: exit codes, one-line errors, growing arrays, a hash table, UTF-8, small files,
 * strict JSON. cJSON accepts more than RFC 8259 allows; json_parse() does not, and refuses an object with the same key
 * twice. */
#ifndef BASE_H
#define BASE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { /* exit codes, as documented in README.md */
       DONE = 0,
       FAILED = 1,
       USAGE = 2,
       BAD_MODEL = 3,    /* missing or invalid */
       NO_ROOM = 4,      /* does not fit */
       NO_NETWORK = 5,   /* network or permission */
       NO_GPU = 6,       /* none that can be used */
       GPU_FAULT = 70,   /* the GPU failed while in use */
       INTERRUPTED = 130 /* Ctrl+C */
};

typedef struct {
    int code;       /* exit code */
    char text[600]; /* one line: what was needed, what there is, what cures it */
} Error;

/* Fills *e and returns false, so that a check reads `return fail(e, ...)`. */
bool fail(Error *e, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Prints "infer: text" to stderr and exits with the error's code; infer.c */
void die(const Error *e) __attribute__((noreturn));

/* malloc, calloc and realloc that end the process with one line when memory is out. Sizes that come from a file are
 * compared with the file's size before they get here. */
void *allocate(size_t bytes);
void *allocate_zero(size_t count, size_t bytes);
void *reallocate(void *p, size_t bytes);

typedef struct { /* bytes that grow; data is NUL-terminated after every call, so that text can be used as a C string */
    char *data;
    size_t n, room;
} Bytes;
void bytes_add(Bytes *b, const void *data, size_t n);
void bytes_text(Bytes *b, const char *text);
/* Appends what printf prints, and returns all of the text. text_print: a new one; free it. copy_text: n bytes of a
 * text, or fewer if it ends before. */
char *bytes_print(Bytes *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define text_print(...)    bytes_print(&(Bytes){0}, __VA_ARGS__)
#define copy_text(text, n) text_print("%.*s", (int)(n), text)
void bytes_free(Bytes *b);

typedef struct { /* a text that knows who wrote it: own.data[i] is 1 if byte i is a template's, 0 if it is from outside
                  */
    Bytes text, own;
} Marked;
void marked_add(Marked *m, const void *data, size_t n, bool own);
void marked_free(Marked *m);

typedef struct { /* token ids that grow */
    int *data;
    size_t n, room;
} Ids;
void ids_add(Ids *ids, int id);
void ids_append(Ids *ids, const int *more, size_t n);
void ids_free(Ids *ids);

typedef struct {
    uint64_t key;
    int64_t value; /* -1: empty */
} MapSlot;
typedef struct { /* a hash table that grows; values are not negative */
    MapSlot *slot;
    size_t n, room; /* room: 0 or a power of two */
} Map;
int64_t map_get(const Map *m, uint64_t key); /* or -1 */
void map_put(Map *m, uint64_t key, int64_t value);
void map_free(Map *m);
/* FNV-1a of n bytes that follow those with the hash h. */
#define HASH_OF_NONE UINT64_C(0xcbf29ce484222325)
uint64_t text_hash(uint64_t h, const char *s, size_t n);

/* A local variable of one of these types is freed where its block ends, however the block is left. So it gets a value
 * where it is declared, one LocalText or LocalJson a line. LOCAL: of a type with another function that frees it. */
#define LOCAL(release) __attribute__((cleanup(release)))
#define LocalBytes     LOCAL(bytes_free) Bytes
#define LocalMarked    LOCAL(marked_free) Marked
#define LocalIds       LOCAL(ids_free) Ids
#define LocalText      LOCAL(text_free) char *
#define LocalJson      LOCAL(json_free) cJSON *
void text_free(char **text);
void json_free(cJSON **json);

/* The length of the code point at s, 1 to 4. If it is invalid or incomplete, the length of that part, negative (RFC
 * 3629: no surrogates, nothing above U+10FFFF, no overlong form). n > 0. */
int utf8_decode(const char *s, size_t n, uint32_t *cp);
/* Offset of the first byte that is not UTF-8, or n. */
size_t utf8_check(const char *s, size_t n);
/* USAGE, naming `what`: n bytes are not UTF-8. */
bool check_text(const char *what, const char *text, size_t n, Error *e);
/* Appends text that is safe for a terminal: control characters, which begin escape sequences, and invalid UTF-8 become
 * '?'. Line breaks and tabs stay if `lines`. */
void bytes_shown(Bytes *out, const char *text, size_t n, bool lines);
/* For output that arrives in parts: moves complete characters from b to `out`. Each maximal invalid part becomes one
 * U+FFFD (Unicode 3.9, best practice). An incomplete character at the end stays in b unless `flush`. */
void utf8_stream(Bytes *b, Bytes *out, bool flush);

/* The whole of a regular file of at most `most` bytes. */
bool file_read(const char *path, size_t most, Bytes *out, Error *e);
bool file_exists(const char *path);
char *path_join(const char *folder, const char *name); /* free it */
/* All of a file of any kind, or of stdin if `file` is NULL or "-": "" if there is no stdin. Ends the program with USAGE
 * if it cannot be read or is too large. */
void text_read(const char *file, Bytes *out);

/* Parses JSON; free it with cJSON_Delete. NULL: BAD_MODEL with `name` and the offset. Refused, although cJSON accepts
 * them: trailing text, a key twice, bad numbers, control bytes, \u0000, invalid UTF-8, a byte-order mark. */
cJSON *json_parse(const char *text, size_t n, const char *name, Error *e);
cJSON *json_read(const char *path, size_t most, Error *e);
/* Members of objects; case matters. json_get returns NULL for a missing key and for null. */
const cJSON *json_get(const cJSON *object, const char *key);
const char *json_string(const cJSON *object, const char *key); /* or NULL */
bool json_is(const cJSON *object, const char *key, const char *text);
bool json_true(const cJSON *object, const char *key);
/* A whole number in [least, most], below 2^53 in size, which a double holds exactly. */
bool json_whole(const cJSON *value, int64_t least, int64_t most, int64_t *out);
/* n bytes of UTF-8 as a JSON string. A NUL becomes U+FFFD, because json_parse() refuses it. */
cJSON *json_from_text(const char *text, size_t n);
/* Adds keys and values to an object, or to a new one if it is NULL, and returns it; NULL ends them. A value that is
 * NULL is left out. */
cJSON *json_add(cJSON *object, const char *key, ...) __attribute__((sentinel));
#define json_object(...) json_add(NULL, __VA_ARGS__)
cJSON *json_number(double x);
cJSON *json_word(const char *text); /* null for NULL */
/* The value as compact JSON text; free it. */
char *json_text(const cJSON *value);
/* Append the value, with numbers as they were written: 1.0, and all digits of what no double holds. */
void json_written(Bytes *out, const cJSON *value);
void json_append(Bytes *out, cJSON *json); /* and frees the value */
void json_print(cJSON *json, bool wanted); /* on stdout if `wanted`, as a line; frees the value */

const char *environment(const char *name); /* a variable, or NULL if it is absent or empty */

/* Looks for the first of n stop texts in text that arrives in parts. Moves *shown to the end of what is surely free of
 * them; an end that may begin one waits, unless this part is the `last`. True: found it, and cut the text there. */
bool text_stops(Bytes *text, size_t *shown, const char *const *stop, int n, bool last);

/* A decimal number in [least, most] that is all of the text. */
bool text_whole(const char *text, int least, int most, int *out);

/* Is the word one of a list, "a b c" or "a, b, c"? */
bool text_listed(const char *list, const char *word);
bool same(const char *a, const char *b);           /* NULL equals nothing */
size_t begins(const char *text, const char *with); /* the length of `with` if the text begins with it, else 0 */

int by_name(const void *a, const void *b); /* for qsort() and bsearch(): of what begins with a pointer to its name */

double log_sum_exp(const float *x, int n);
double seconds(void); /* a monotonic clock */
/* 13.8 GB, 5.1 MB, 812 bytes: decimal units, as disks and downloads are sold. 131072 as 131,072. They return `out`.
 * SIZE and COUNT: the same texts, which last until the block ends. */
char *size_text(uint64_t bytes, char out[24]);
char *count_text(uint64_t count, char out[32]);
#define SIZE(bytes)  size_text(bytes, (char[24]){0})
#define COUNT(count) count_text(count, (char[32]){0})

#ifdef __cplusplus
}
#endif
#endif
