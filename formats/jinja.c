/* jinja.c: an interpreter of the Jinja that chat templates use (jinja.palletsprojects.com/templates): a lexer, a parser
 * to a tree, and an evaluator. Values are what JSON has, with Python's meaning: whole numbers apart from others, texts
 * by code points. Each byte of a text knows whether the template wrote it or it came from outside, and whatever is done
 * to a text keeps that. A template is as hostile as any file: steps, depth and bytes are bounded. All memory is taken
 * from an arena, so an error may leave by longjmp. Refused: recursive loops, inheritance, includes, HTML. */
#include "jinja.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { MOST_BYTES = 1 << 28, MOST_STEPS = 50000000, MOST_DEPTH = 250, MOST_RANGE = 100000, CHUNK = 1 << 16 };

/* ---- memory and errors ---- */

typedef struct Chunk Chunk;
struct Chunk {
    Chunk *next;
    max_align_t data[];
};

typedef struct Buffer Buffer;
/* Names that mean something of themselves, the first ones of a template's. */
enum { LOOP_NAME, CALLER, VARARGS, KWARGS, FIXED_NAMES };
static const char *const fixed_names[] = {"loop", "caller", "varargs", "kwargs"};
typedef struct { /* a template that is being parsed or rendered */
    Chunk *chunks;
    char *free; /* `left` bytes of the first chunk */
    size_t left, bytes;
    int64_t steps;
    int line, depth;
    int code;    /* of an error */
    Buffer *out; /* what the template writes goes here */
    const struct tm *now;
    const char *const *names; /* of the template: each is one pointer wherever it stands */
    jmp_buf failed;
    Error *e;
} Work;

__attribute__((noreturn, format(printf, 2, 3))) static void wrong(Work *w, const char *format, ...) {
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail(w->e, w->code, "chat template, line %d: %s", w->line, text);
    longjmp(w->failed, 1);
}

/* Counts work that grows with n bytes or values. */
static void spend(Work *w, size_t n) {
    w->steps += 1 + (int64_t)(n / 16);
    if (w->steps > MOST_STEPS) wrong(w, "it takes more than %d steps", MOST_STEPS);
}

static void *take(Work *w, size_t n) {
    n = (n + sizeof(max_align_t) - 1) & ~(sizeof(max_align_t) - 1);
    if (n > MOST_BYTES - w->bytes) wrong(w, "it takes more than %d bytes", MOST_BYTES);
    w->bytes += n;
    if (n > w->left) {
        const size_t size = n > CHUNK ? n : CHUNK;
        Chunk *chunk = allocate(sizeof *chunk + size);
        chunk->next = w->chunks;
        w->chunks = chunk;
        w->free = (char *)chunk->data;
        w->left = size;
    }
    void *p = w->free;
    w->free += n;
    w->left -= n;
    return p;
}

static void release(Chunk *chunks) {
    for (Chunk *next; chunks; chunks = next) {
        next = chunks->next;
        free(chunks);
    }
}

static void enter(Work *w) {
    if (++w->depth > MOST_DEPTH) wrong(w, "it nests more than %d deep", MOST_DEPTH);
}

static void leave(Work *w) { w->depth--; }

/* ---- values ---- */

typedef enum {
    MISSING, /* an argument that was not given */
    UNDEFINED,
    NONE,
    BOOL,
    WHOLE,
    REAL,
    TEXT,
    LIST,
    TUPLE,
    STREAM, /* what filters such as map return: it can be read once */
    VIEW,   /* a range, or the keys, values or items of a mapping */
    MAP,
    SPACE, /* a namespace */
    LOOP,
    FUNCTION
} Kind;

typedef struct Value Value;
typedef struct { /* List.view: what Python calls a view, or "group" of a tuple of groupby */
    Value *item;
    size_t n, room;
    const char *view;
} List;
typedef struct {
    List key, value;
} Dict;
typedef struct Function Function;
typedef struct Loop Loop;

struct Value {
    Kind kind;
    bool own; /* of a number: the template wrote or computed it. Of a text each byte knows that */
    union {
        struct {
            int64_t whole;      /* BOOL, too */
            const char *digits; /* of one that needs more than 64 bits; else NULL */
        };
        double real;
        struct {
            const char *data, *by; /* (n) bytes, and for each: 1, the template wrote it */
            size_t n;
        };
        const char *name; /* of what is undefined, for the error */
        List *list;
        Dict *map;
        Function *function;
        Loop *loop;
    };
};

struct Buffer { /* a text that grows */
    char *data, *by;
    size_t n, room;
};

static const Value missing, none = {NONE, true, {{0, NULL}}};
static Value undefined(const char *name) { return (Value){UNDEFINED, .name = name}; }
static Value boolean(bool b) { return (Value){BOOL, true, .whole = b, .digits = NULL}; }
static Value whole(int64_t n) { return (Value){WHOLE, true, .whole = n, .digits = NULL}; }
static Value real(double x) { return (Value){REAL, true, .real = x}; }
static Value of_list(Kind kind, List *list) { return (Value){kind, .list = list}; }
static Value text_of(const Buffer *b) {
    return (Value){TEXT, .data = b->n ? b->data : "", .by = b->n ? b->by : "", .n = b->n};
}
static Value part_of(Value text, size_t from, size_t n) {
    return (Value){TEXT, .data = text.data + from, .by = text.by + from, .n = n};
}
static bool is_list(Value v) { return v.kind >= LIST && v.kind <= VIEW; }
static bool is_number(Value v) { return v.kind >= BOOL && v.kind <= REAL; }
static bool is_text(Value v, const char *text) {
    return v.kind == TEXT && v.n == strlen(text) && !memcmp(v.data, text, v.n);
}

static const char *kind_name(Value v) {
    static const char *const names[] = {"nothing",   "undefined", "None",      "bool",  "int",
                                        "float",     "str",       "list",      "tuple", "generator",
                                        "dict view", "dict",      "namespace", "loop",  "function"};
    return names[v.kind];
}

static char *reserve(Work *w, Buffer *b, size_t n) {
    if (b->n + n > b->room || !b->data) {
        const size_t room = b->n + n > 2 * b->room ? b->n + n : 2 * b->room;
        char *data = take(w, 2 * room);
        if (b->n) memcpy(data, b->data, b->n), memcpy(data + room, b->by, b->n);
        *b = (Buffer){data, data + room, b->n, room};
    }
    return b->data + b->n;
}

static void put_bytes(Work *w, Buffer *b, const char *data, size_t n, bool own) {
    if (n) memcpy(reserve(w, b, n), data, n), memset(b->by + b->n, own, n);
    b->n += n;
}

static void put(Work *w, Buffer *b, Value text) {
    if (text.n) memcpy(reserve(w, b, text.n), text.data, text.n), memcpy(b->by + b->n, text.by, text.n);
    b->n += text.n;
}

static void put_own(Work *w, Buffer *b, const char *text) { put_bytes(w, b, text, strlen(text), true); }

static Value text_from(Work *w, const char *data, size_t n, bool own) {
    Buffer b = {0};
    reserve(w, &b, n);
    put_bytes(w, &b, data, n, own);
    return text_of(&b);
}

static char *c_text(Work *w, Value text) { /* NUL-terminated, for messages and numbers */
    char *s = take(w, text.n + 1);
    memcpy(s, text.data, text.n);
    s[text.n] = 0;
    return s;
}

static List *new_list(Work *w, size_t room) {
    List *list = take(w, sizeof *list);
    *list = (List){.item = take(w, room * sizeof(Value)), .room = room};
    return list;
}

static void push(Work *w, List *list, Value v) {
    if (list->n == list->room) {
        Value *item = take(w, (2 * list->n + 4) * sizeof *item);
        if (list->n) memcpy(item, list->item, list->n * sizeof *item);
        list->item = item;
        list->room = 2 * list->n + 4;
    }
    list->item[list->n++] = v;
}

static Value pair_of(Work *w, Value a, Value b) {
    List *pair = new_list(w, 2);
    push(w, pair, a), push(w, pair, b);
    return of_list(TUPLE, pair);
}

static Value new_map(Work *w, Kind kind) {
    Dict *map = take(w, sizeof *map);
    *map = (Dict){0};
    return (Value){kind, .map = map};
}

static bool equal(Work *w, Value a, Value b);

static Value *map_find(Work *w, const Dict *map, Value key) {
    spend(w, map->key.n);
    for (size_t i = 0; i < map->key.n; i++)
        if (equal(w, map->key.item[i], key)) return map->value.item + i;
    return NULL;
}

static void map_set(Work *w, Dict *map, Value key, Value value) {
    if (is_list(key) || key.kind == MAP) wrong(w, "a %s cannot be a key", kind_name(key));
    Value *known = map_find(w, map, key);
    if (known)
        *known = value;
    else
        push(w, &map->key, key), push(w, &map->value, value);
}

static double number_of(Value v) {
    return v.kind == REAL ? v.real : v.digits ? strtod(v.digits, NULL) : (double)v.whole;
}

static size_t length_of(Value v) { return v.kind == TEXT ? v.n : v.kind == MAP ? v.map->key.n : v.list->n; }

static bool truth(Value v) {
    if (v.kind <= NONE) return false;
    if (is_number(v)) return number_of(v) != 0;
    return v.kind == STREAM || v.kind > MAP || length_of(v);
}

static bool equal(Work *w, Value a, Value b) {
    if (a.kind == TEXT && b.kind == TEXT) return a.n == b.n && !memcmp(a.data, b.data, a.n);
    if (is_number(a) && is_number(b)) {
        if (a.kind == REAL || b.kind == REAL) return number_of(a) == number_of(b);
        return a.digits || b.digits ? same(a.digits, b.digits) : a.whole == b.whole;
    }
    if (a.kind != b.kind) return false;
    if (a.kind == UNDEFINED || a.kind == NONE) return true;
    if (!is_list(a) && a.kind != MAP) return a.map == b.map;
    bool same_values = a.kind == MAP ? a.map->key.n == b.map->key.n : a.list->n == b.list->n;
    enter(w);
    for (size_t i = 0; same_values && i < (a.kind == MAP ? a.map->key.n : a.list->n); i++) {
        spend(w, 0);
        const Value *other = a.kind == MAP ? map_find(w, b.map, a.map->key.item[i]) : b.list->item + i;
        same_values = other && equal(w, a.kind == MAP ? a.map->value.item[i] : a.list->item[i], *other);
    }
    leave(w);
    return same_values;
}

/* < 0, 0, > 0. Bytes of UTF-8 stand in the order of code points. */
static int compare(Work *w, Value a, Value b) {
    spend(w, a.kind == TEXT ? a.n : 0);
    if (is_number(a) && is_number(b)) {
        if (a.kind != REAL && b.kind != REAL && !a.digits && !b.digits)
            return (a.whole > b.whole) - (a.whole < b.whole);
        return (number_of(a) > number_of(b)) - (number_of(a) < number_of(b));
    }
    if (a.kind == TEXT && b.kind == TEXT) {
        const int order = memcmp(a.data, b.data, a.n < b.n ? a.n : b.n);
        return order ? order : (a.n > b.n) - (a.n < b.n);
    }
    if (a.kind != b.kind || (a.kind != LIST && a.kind != TUPLE))
        wrong(w, "'%s' and '%s' cannot be ordered", kind_name(a), kind_name(b));
    enter(w);
    size_t i = 0;
    while (i < a.list->n && i < b.list->n && equal(w, a.list->item[i], b.list->item[i])) i++;
    const bool ended = i == a.list->n || i == b.list->n;
    const int order =
        ended ? (a.list->n > b.list->n) - (a.list->n < b.list->n) : compare(w, a.list->item[i], b.list->item[i]);
    leave(w);
    return order;
}

/* ---- texts ---- */

static size_t char_length(Value text, size_t at) {
    const unsigned char c = (unsigned char)text.data[at];
    return c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

static int32_t char_at(Value text, size_t at) {
    uint32_t c = 0;
    utf8_decode(text.data + at, text.n - at, &c);
    return (int32_t)c;
}

static size_t char_before(Value text, size_t end) {
    do end--;
    while (end && (text.data[end] & 0xC0) == 0x80);
    return end;
}

static size_t count_chars(Work *w, Value text) {
    size_t n = 0;
    spend(w, text.n);
    for (size_t i = 0; i < text.n; i++) n += (text.data[i] & 0xC0) != 0x80;
    return n;
}

/* White space as Python's str.strip() defines it. */
static bool is_space(int32_t c) {
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) ||
           (c >= 0x85 && (c == 0x85 || *utf8proc_category_string(c) == 'Z'));
}

/* The offset of `part` in the text from `from` on, or SIZE_MAX. */
static size_t find(Work *w, Value text, Value part, size_t from) {
    if (from > text.n) return SIZE_MAX;
    spend(w, text.n - from);
    if (!part.n) return from;
    const char *at = memmem(text.data + from, text.n - from, part.data, part.n);
    return at ? (size_t)(at - text.data) : SIZE_MAX;
}

static size_t find_last(Work *w, Value text, Value part, size_t end) {
    spend(w, text.n + part.n);
    for (size_t i = end >= part.n ? end - part.n + 1 : 0; i--;)
        if (!memcmp(text.data + i, part.data, part.n)) return i;
    return SIZE_MAX;
}

enum { LEFT = 1, RIGHT = 2 };
/* Without white space, or without the characters of `chars`, at its ends. */
static Value strip(Work *w, Value text, Value chars, int sides) {
    size_t begin = 0, end = text.n;
    const bool white = chars.kind != TEXT;
    spend(w, text.n);
    while (sides & LEFT && begin < end) {
        const size_t n = char_length(text, begin);
        if (white ? !is_space(char_at(text, begin)) : find(w, chars, part_of(text, begin, n), 0) == SIZE_MAX) break;
        begin += n;
    }
    while (sides & RIGHT && begin < end) {
        const size_t at = char_before(text, end);
        if (white ? !is_space(char_at(text, at)) : find(w, chars, part_of(text, at, end - at), 0) == SIZE_MAX) break;
        end = at;
    }
    return part_of(text, begin, end - begin);
}

static void put_char(Work *w, Buffer *b, int32_t c, bool own) {
    unsigned char bytes[4];
    put_bytes(w, b, (char *)bytes, (size_t)utf8proc_encode_char(c, bytes), own);
}

/* Which letters become large: all, none, the first, the first of a word, where words are what is not a letter apart
 * (Python) or what stands behind white space or one of -({[< (jinja2). */
typedef enum { UPPER, LOWER, CAPITALIZED, TITLE, WORDS } Case;
static Value with_case(Work *w, Value text, Case to) {
    Buffer b = {0};
    bool begins_word = true;
    spend(w, text.n);
    reserve(w, &b, text.n);
    for (size_t i = 0, n; i < text.n; i += n) {
        n = char_length(text, i);
        const int32_t c = char_at(text, i);
        const bool large = to == UPPER || (to != LOWER && begins_word);
        const int32_t other = large ? utf8proc_toupper(c) : utf8proc_tolower(c);
        const bool cased = utf8proc_toupper(c) != c || utf8proc_tolower(c) != c;
        if (large && c == 0xDF)
            put_bytes(w, &b, to == UPPER ? "SS" : "Ss", 2, text.by[i]);
        else if (other == c)
            put(w, &b, part_of(text, i, n));
        else
            put_char(w, &b, other, text.by[i]);
        begins_word = to == TITLE ? !cased : to == WORDS ? is_space(c) || (c < 128 && strchr("-({[<", c)) : false;
    }
    return text_of(&b);
}

static Value replace(Work *w, Value text, Value old, Value new, int64_t most) {
    Buffer b = {0};
    size_t from = 0;
    reserve(w, &b, text.n);
    while (most-- && from <= text.n) {
        size_t at = find(w, text, old, from), next = at + old.n;
        if (at == SIZE_MAX) break;
        put(w, &b, part_of(text, from, at - from));
        put(w, &b, new);
        if (!old.n && at == text.n) return text_of(&b);
        if (!old.n) next += char_length(text, at), put(w, &b, part_of(text, at, next - at));
        from = next;
    }
    put(w, &b, part_of(text, from, text.n - from));
    return text_of(&b);
}

/* ---- JSON to values, values to Python's texts and to JSON ---- */

static Value from_json(Work *w, const cJSON *json, bool own) {
    static const char roles[] = "system developer user assistant tool";
    spend(w, 0);
    if (cJSON_IsString(json)) {
        const char *s = json->valuestring;
        const bool role = json->string && !strcmp(json->string, "role") && text_listed(roles, s);
        return text_from(w, s, strlen(s), own || role);
    }
    if (cJSON_IsNumber(json)) {
        const char *digits = json->valuestring; /* of numbers that a double may not hold */
        const double x = json->valuedouble;
        if (digits ? strpbrk(digits, ".eE") != NULL : x != floor(x) || fabs(x) > 1e15)
            return (Value){REAL, own, .real = x};
        errno = 0;
        const int64_t n = digits ? strtoll(digits, NULL, 10) : (int64_t)x;
        return (Value){WHOLE, own, .whole = n, .digits = errno ? digits : NULL};
    }
    if (cJSON_IsBool(json)) return (Value){BOOL, own, .whole = cJSON_IsTrue(json), .digits = NULL};
    if (!cJSON_IsObject(json) && !cJSON_IsArray(json)) return none;
    Value map = new_map(w, MAP);
    List *list = new_list(w, 0);
    const cJSON *each;
    enter(w);
    cJSON_ArrayForEach(each, json) {
        push(w, cJSON_IsArray(json) ? list : &map.map->value, from_json(w, each, own));
        if (cJSON_IsObject(json)) push(w, &map.map->key, text_from(w, each->string, strlen(each->string), own));
    }
    leave(w);
    return cJSON_IsArray(json) ? of_list(LIST, list) : map;
}

/* The shortest digits that give x again, as Python's repr(). */
static void put_real(Work *w, Buffer *b, double x, bool own, bool json) {
    char text[40], digits[40];
    int precision = 0, exponent;
    if (!isfinite(x)) {
        const char *name = isnan(x) ? (json ? "NaN" : "nan") : json ? "Infinity" : "inf";
        put_bytes(w, b, "-", x < 0, own), put_bytes(w, b, name, strlen(name), own);
        return;
    }
    do snprintf(text, sizeof text, "%.*e", precision, x);
    while (strtod(text, NULL) != x && ++precision < 17);
    exponent = atoi(strchr(text, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        const int decimals = precision > exponent ? precision - exponent : 0;
        snprintf(text, sizeof text, "%.*f%s", decimals, x, decimals ? "" : ".0");
    } else {
        snprintf(digits, sizeof digits, "%.*e", precision, x);
        memcpy(text, digits, sizeof text);
    }
    put_bytes(w, b, text, strlen(text), own);
}

static void put_number(Work *w, Buffer *b, Value v, bool json) {
    char text[24];
    if (v.kind == REAL) {
        put_real(w, b, v.real, v.own, json);
        return;
    }
    snprintf(text, sizeof text, "%lld", (long long)v.whole);
    const char *shown = v.kind == BOOL ? (json      ? (v.whole ? "true" : "false")
                                          : v.whole ? "True"
                                                    : "False")
                                       : (v.digits ? v.digits : text);
    put_bytes(w, b, shown, strlen(shown), v.own);
}

static bool is_printable(int32_t c) {
    const char *category = utf8proc_category_string(c);
    return c == ' ' || (*category != 'C' && *category != 'Z');
}

/* A text between quotes: as JSON, or as Python's repr(). */
static void put_quoted(Work *w, Buffer *b, Value text, bool json, bool ascii) {
    const bool doubled = json || (memchr(text.data, '\'', text.n) && !memchr(text.data, '"', text.n));
    const char quote = doubled ? '"' : '\'', *const escaped = "\n\r\t\f\b", *const letters = "nrtfb";
    spend(w, text.n);
    put_bytes(w, b, &quote, 1, true);
    for (size_t i = 0, n; i < text.n; i += n) {
        const int32_t c = char_at(text, i);
        const char *short_form = c && c < 128 ? strchr(escaped, c) : NULL;
        char code[32] = "";
        n = char_length(text, i);
        if (c == '\\' || c == quote)
            snprintf(code, sizeof code, "\\%c", (char)c);
        else if (short_form && (json || short_form - escaped < 3))
            snprintf(code, sizeof code, "\\%c", letters[short_form - escaped]);
        else if (json && ascii && c > 0xFFFF)
            snprintf(code, sizeof code, "\\u%04x\\u%04x", 0xD7C0 + (c >> 10), 0xDC00 + (c & 0x3FF));
        else if (json ? c < 32 || (ascii && c > 126) : c < 128 && !is_printable(c))
            snprintf(code, sizeof code, json ? "\\u%04x" : "\\x%02x", c);
        else if (!json && !is_printable(c))
            snprintf(code, sizeof code, c > 0xFFFF ? "\\U%08x" : c > 0xFF ? "\\u%04x" : "\\x%02x", c);
        *code ? put_bytes(w, b, code, strlen(code), text.by[i]) : put(w, b, part_of(text, i, n));
    }
    put_bytes(w, b, &quote, 1, true);
}

/* Appends str(v) or, inside of lists and mappings, repr(v). */
static void put_value(Work *w, Buffer *b, Value v, bool inside) {
    static const char *const brackets[][2] = {{"[", "]"}, {"(", ")"}, {"([", "])"}, {"{", "}"}};
    spend(w, 0);
    if (v.kind == TEXT)
        inside ? put_quoted(w, b, v, false, false) : put(w, b, v);
    else if (is_number(v))
        put_number(w, b, v, false);
    else if (v.kind == NONE || (v.kind == UNDEFINED && inside))
        put_own(w, b, v.kind == NONE ? "None" : "Undefined");
    else if (v.kind == LIST || v.kind == TUPLE || v.kind == MAP || v.kind == VIEW) {
        const char *const *bracket = brackets[v.kind == LIST ? 0 : v.kind == TUPLE ? 1 : v.kind == VIEW ? 2 : 3];
        const List *list = v.kind == MAP ? &v.map->key : v.list;
        enter(w);
        if (v.kind == VIEW) put_own(w, b, list->view);
        if (v.kind == VIEW && *list->view == 'r') {
            leave(w);
            return;
        }
        put_own(w, b, bracket[0]);
        for (size_t i = 0; i < list->n; i++) {
            if (i) put_own(w, b, ", ");
            put_value(w, b, list->item[i], true);
            if (v.kind == MAP) put_own(w, b, ": "), put_value(w, b, v.map->value.item[i], true);
        }
        put_own(w, b, v.kind == TUPLE && list->n == 1 ? ",)" : bracket[1]);
        leave(w);
    } else if (v.kind != UNDEFINED && v.kind != MISSING)
        wrong(w, "a %s has no text", kind_name(v));
}

static Value to_text(Work *w, Value v) {
    Buffer b = {0};
    if (v.kind == TEXT) return v;
    reserve(w, &b, 8);
    put_value(w, &b, v, false);
    return text_of(&b);
}

typedef struct {
    Value comma, colon, indent; /* indent: what a level adds, or not a text */
    bool ascii, sorted;
} JsonStyle;

static List *sorted(Work *w, const List *list, const List *key, bool down);

static void put_break(Work *w, Buffer *b, const JsonStyle *style, int level) {
    if (style->indent.kind != TEXT) return;
    put_own(w, b, "\n");
    for (; level; level--) put(w, b, style->indent);
}

/* Appends json.dumps(v). */
static void put_json(Work *w, Buffer *b, Value v, const JsonStyle *style, int level) {
    spend(w, 0);
    if (v.kind == TEXT)
        put_quoted(w, b, v, true, style->ascii);
    else if (is_number(v))
        put_number(w, b, v, true);
    else if (v.kind == NONE)
        put_own(w, b, "null");
    else if (v.kind != LIST && v.kind != TUPLE && v.kind != MAP)
        wrong(w, "a value of kind %s cannot become JSON", kind_name(v));
    else {
        const bool map = v.kind == MAP;
        const List *list = map && style->sorted ? sorted(w, &v.map->key, &v.map->key, false)
                           : map                ? &v.map->key
                                                : v.list;
        enter(w);
        put_own(w, b, map ? "{" : "[");
        for (size_t i = 0; i < list->n; i++) {
            if (i) put(w, b, style->comma);
            put_break(w, b, style, level + 1);
            if (map) {
                Buffer key = {0};
                if (list->item[i].kind == NONE)
                    put_own(w, &key, "null");
                else
                    is_number(list->item[i]) ? put_number(w, &key, list->item[i], true) : put(w, &key, list->item[i]);
                put_quoted(w, b, text_of(&key), true, style->ascii);
                put(w, b, style->colon);
            }
            const Value *each = !map            ? list->item + i
                                : style->sorted ? map_find(w, v.map, list->item[i])
                                                : v.map->value.item + i;
            put_json(w, b, *each, style, level + 1);
        }
        if (list->n) put_break(w, b, style, level);
        put_own(w, b, map ? "}" : "]");
        leave(w);
    }
}

/* ---- the lexer ---- */

typedef enum {
    DATA,
    OPEN_PRINT,
    CLOSE_PRINT,
    OPEN_BLOCK,
    CLOSE_BLOCK,
    NAME,
    STRING,
    WHOLE_NUMBER,
    REAL_NUMBER,
    OPERATOR,
    END
} TokenKind;
typedef struct {
    TokenKind kind;
    int line;
    const char *s; /* (n); a name ends with a NUL and is the same pointer wherever it stands */
    size_t n;
} Token;

typedef struct Node Node;
typedef struct {
    Work *w;
    const char *begin, *end; /* of the template */
    Token *token;            /* of `tokens`, the current one */
    size_t tokens, room;
    const char **name;
    size_t names;
    Node *macro; /* that is being parsed, or NULL */
} Parser;

static const char *intern(Parser *p, const char *s, size_t n) {
    for (size_t i = 0; i < p->names; i++)
        if (!strncmp(p->name[i], s, n) && !p->name[i][n]) return p->name[i];
    if (!(p->names & (p->names + 1))) { /* one less than a power of two: full */
        const char **more = take(p->w, (2 * p->names + 1) * sizeof *more);
        if (p->names) memcpy(more, p->name, p->names * sizeof *more);
        p->name = more;
    }
    spend(p->w, p->names);
    return p->name[p->names++] = c_text(p->w, (Value){TEXT, .data = s, .n = n});
}

static void add_token(Parser *p, TokenKind kind, const char *s, size_t n) {
    if (p->tokens == p->room) {
        Token *more = take(p->w, (2 * p->room + 64) * sizeof *more);
        if (p->tokens) memcpy(more, p->token, p->tokens * sizeof *more);
        p->token = more;
        p->room = 2 * p->room + 64;
    }
    p->token[p->tokens++] = (Token){kind, p->w->line, kind == NAME ? intern(p, s, n) : s, n};
}

static size_t space_at(const Parser *p, const char *s) { /* the bytes of the white space at s, or 0 */
    uint32_t c;
    if (s >= p->end) return 0;
    const int n = utf8_decode(s, (size_t)(p->end - s), &c);
    return n > 0 && is_space((int32_t)c) ? (size_t)n : 0;
}

static const char *skip_space(const Parser *p, const char *s) {
    for (size_t n; (n = space_at(p, s)); s += n) continue;
    return s;
}

static bool at(const Parser *p, const char *s, const char *text) {
    const size_t n = strlen(text);
    return s < p->end && (size_t)(p->end - s) >= n && !memcmp(s, text, n);
}

/* What follows the end of a tag at s, which may begin with a sign; NULL: it does not end here. A line break behind a
 * block or comment belongs to it. */
static const char *tag_end(const Parser *p, const char *s, const char *end) {
    const char *t = s + (at(p, s, "-") || (at(p, s, "+") && *end == '%'));
    if (!at(p, t, end)) return NULL;
    t += 2;
    return *s == '-' ? skip_space(p, t) : t + (*end != '}' && *s != '+' && at(p, t, "\n"));
}

/* Adds the text before a tag, without the white space that the tag's sign takes or, before a block or comment that
 * begins a line, the indentation. */
static void lex_data(Parser *p, const char *s, const char *tag) {
    Value text = {TEXT, .data = s, .by = s, .n = (size_t)(tag - s)};
    const char sign = tag + 2 < p->end ? tag[2] : ' ';
    const bool begins_line = s == p->begin || s[-1] == '\n';
    if (tag < p->end && sign == '-') {
        text = strip(p->w, text, missing, RIGHT);
    } else if (tag < p->end && sign != '+' && tag[1] != '{') {
        const char *line = text.n ? memrchr(s, '\n', text.n) : NULL;
        line = line ? line + 1 : begins_line ? s : tag;
        if (skip_space(p, line) >= tag) text.n = (size_t)(line - s);
    }
    if (text.n) add_token(p, DATA, s, text.n);
    for (; s < tag; s++) p->w->line += *s == '\n';
}

static size_t number_length(const char *s, const char *end, bool *is_real) {
    const char *t = s;
    *is_real = false;
    if (*t == '0' && t + 1 < end && strchr("xXoObB", t[1])) {
        for (t += 2; t < end && (isalnum((unsigned char)*t) || *t == '_'); t++) continue;
        return (size_t)(t - s);
    }
    while (t < end && (isdigit((unsigned char)*t) || *t == '_')) t++;
    if (s[-1] != '.' && t + 1 < end && *t == '.' && isdigit((unsigned char)t[1])) {
        *is_real = true;
        for (t++; t < end && (isdigit((unsigned char)*t) || *t == '_'); t++) continue;
    }
    const char *exponent = t + 1 + (t + 1 < end && (t[1] == '+' || t[1] == '-'));
    if (t < end && (*t == 'e' || *t == 'E') && exponent < end && isdigit((unsigned char)*exponent)) {
        *is_real = true;
        for (t = exponent; t < end && isdigit((unsigned char)*t); t++) continue;
    }
    return (size_t)(t - s);
}

/* Adds one token of an expression and returns what follows it. */
static const char *lex_token(Parser *p, const char *s) {
    static const char *const operators[] = {"**", "//", "==", "!=", ">=", "<=", NULL};
    const char *t = s;
    bool is_real;
    if (isdigit((unsigned char)*s)) {
        const size_t n = number_length(s, p->end, &is_real);
        add_token(p, is_real ? REAL_NUMBER : WHOLE_NUMBER, s, n);
        return s + n;
    }
    while (t < p->end && (isalnum((unsigned char)*t) || *t == '_' || (unsigned char)*t >= 0x80)) t++;
    if (t > s) {
        add_token(p, NAME, s, (size_t)(t - s));
        return t;
    }
    if (*s == '"' || *s == '\'') {
        for (t = s + 1; t < p->end && *t != *s; t++) t += *t == '\\';
        if (t >= p->end) wrong(p->w, "a text does not end");
        add_token(p, STRING, s + 1, (size_t)(t - s - 1));
        return t + 1;
    }
    if (!*s || !strchr("+-/*%~[](){}=!<>.:|,;", *s)) wrong(p->w, "unexpected character '%.1s'", s);
    size_t n = 1;
    for (int i = 0; operators[i]; i++)
        if (at(p, s, operators[i])) n = 2;
    if (*s == '!' && n == 1) wrong(p->w, "unexpected character '!'");
    add_token(p, OPERATOR, s, n);
    return s + n;
}

/* Adds the tokens of a tag whose inside begins at s, and returns what follows the tag. */
static const char *lex_tag(Parser *p, const char *s, bool block) {
    char open[MOST_DEPTH];
    size_t opened = 0;
    for (const char *next; s < p->end;) {
        const char *end = opened ? NULL : tag_end(p, s, block ? "%}" : "}}");
        const size_t space = space_at(p, s);
        if (end) {
            add_token(p, block ? CLOSE_BLOCK : CLOSE_PRINT, s, 0);
            for (; s < end; s++) p->w->line += *s == '\n';
            return end;
        }
        next = space ? s + space : lex_token(p, s);
        if (!space && strchr("([{", *s)) {
            if (opened == MOST_DEPTH) wrong(p->w, "it nests more than %d deep", MOST_DEPTH);
            open[opened++] = *s == '(' ? ')' : (char)(*s + 2);
        } else if (!space && strchr(")]}", *s) && (!opened || open[--opened] != *s)) {
            wrong(p->w, "unexpected '%c'", *s);
        }
        for (; s < next; s++) p->w->line += *s == '\n';
    }
    wrong(p->w, "a tag does not end");
}

/* If a block of this one word begins at s, which is a tag, what follows it; else NULL. */
static const char *word_tag(const Parser *p, const char *s, const char *word) {
    s = skip_space(p, s + 2 + (at(p, s + 2, "-") || at(p, s + 2, "+")));
    if (!at(p, s, word)) return NULL;
    return tag_end(p, skip_space(p, s + strlen(word)), "%}");
}

static const char *find_tag(const Parser *p, const char *s, const char *tags) {
    for (; s + 1 < p->end; s++)
        if (*s == '{' && strchr(tags, s[1])) return s;
    return p->end;
}

static void lex(Parser *p) {
    for (const char *s = p->begin, *tag, *next; s < p->end; s = next) {
        tag = find_tag(p, s, "{%#");
        lex_data(p, s, tag);
        if (tag >= p->end) break;
        if (tag[1] == '#') {
            for (next = NULL, s = tag + 2; s < p->end && !(next = tag_end(p, s, "#}")); s++) continue;
            if (!next) wrong(p->w, "a comment does not end");
            for (s = tag; s < next; s++) p->w->line += *s == '\n';
        } else if (tag[1] == '%' && (next = word_tag(p, tag, "raw"))) {
            const char *end = next, *behind = NULL;
            while (end < p->end && !(behind = word_tag(p, end = find_tag(p, end, "%"), "endraw"))) end++;
            if (!behind) wrong(p->w, "raw does not end");
            lex_data(p, next, end);
            next = behind;
        } else {
            const bool block = tag[1] == '%';
            add_token(p, block ? OPEN_BLOCK : OPEN_PRINT, tag, 2);
            s = tag + 2 + (at(p, tag + 2, "-") || at(p, tag + 2, "+"));
            next = lex_tag(p, s, block);
        }
    }
    add_token(p, END, p->end, 0);
}

/* ---- the parser ---- */

typedef enum {
    /* expressions */
    CONSTANT,
    VARIABLE,  /* name */
    ATTRIBUTE, /* a.name */
    ITEM,      /* a[b] */
    SLICE,     /* a[b:c:list] */
    CALL,      /* a(list) */
    FILTER,    /* a | row(list) */
    IS,        /* a is row(list) */
    NEGATIVE,
    POSITIVE,
    NOT,
    AND,
    OR,
    BINARY,  /* a name b; name: an operator */
    COMPARE, /* a, then each of the list with its operator as name */
    CHOICE,  /* b if a else c */
    NEW_LIST,
    NEW_TUPLE,
    NEW_MAP, /* list: a key and b value each */
    /* statements */
    WRITE, /* a */
    IF,    /* a, list, else c */
    FOR,   /* a in b if c: list, else d */
    SET,   /* a = b, or c of the text of list */
    MACRO, /* name(a: parameters with their defaults in a): list */
    WITH,  /* a in turn, in a scope of their own; then list */
    CALL_BLOCK,
    FILTER_BLOCK, /* a of the text of list */
    BREAK,
    CONTINUE
} NodeType;

typedef struct Row Row;
struct Node {
    NodeType type;
    int line;
    const char *name;
    Value value;
    const Row *row; /* of a filter or test; NULL: there is none of this name */
    Node *a, *b, *c, *d, *list;
    Node *next;          /* in the list that it belongs to */
    bool varargs, extra; /* a macro uses varargs, kwargs */
};

static const Row *find_row(bool test, const char *name);

static Node *new_node(Parser *p, NodeType type, Node *a, Node *b) {
    Node *node = take(p->w, sizeof *node);
    *node = (Node){.type = type, .line = p->token->line, .a = a, .b = b};
    return node;
}

static Node *append(Node **list, Node *node) {
    while (*list) list = &(*list)->next;
    return *list = node;
}

static bool is_operator(const Parser *p, const char *text) {
    return p->token->kind == OPERATOR && p->token->n == strlen(text) && !memcmp(p->token->s, text, p->token->n);
}

static bool is_name(const Parser *p, const char *text) { return p->token->kind == NAME && !strcmp(p->token->s, text); }

__attribute__((noreturn)) static void unexpected(Parser *p, const char *expected) {
    p->w->line = p->token->line;
    if (p->token->kind == END) wrong(p->w, "the template ends where %s should stand", expected);
    wrong(p->w, "'%.*s' stands where %s should stand", (int)(p->token->n < 40 ? p->token->n : 40), p->token->s,
          expected);
}

static bool skip_operator(Parser *p, const char *text) {
    const bool there = is_operator(p, text);
    p->token += there;
    return there;
}

static bool skip_name(Parser *p, const char *text) {
    const bool there = is_name(p, text);
    p->token += there;
    return there;
}

static void expect(Parser *p, const char *operator) {
    if (!skip_operator(p, operator)) unexpected(p, operator);
}

static const char *expect_name(Parser *p) {
    if (p->token->kind != NAME) unexpected(p, "a name");
    return p->token++->s;
}

static void expect_close(Parser *p) {
    if (p->token->kind != CLOSE_BLOCK) unexpected(p, "%}");
    p->token++;
}

static Node *parse_expression(Parser *p);
static Node *parse_unary(Parser *p, bool filtered);
static Node *parse_list(Parser *p, bool choice);

/* The value of a hexadecimal or octal escape of `digits` digits at *s, which moves behind it. */
static int32_t parse_code(Parser *p, const char **s, const char *end, int digits, int base) {
    int32_t c = 0;
    int n = 0;
    for (; n < digits && *s < end; n++, ++*s) {
        const int digit = isdigit((unsigned char)**s)    ? **s - '0'
                          : isxdigit((unsigned char)**s) ? tolower((unsigned char)**s) - 'a' + 10
                                                         : 99;
        if (digit >= base) break;
        c = c * base + digit;
    }
    if (base == 16 && n < digits) wrong(p->w, "a text has an escape that is too short");
    if (c < 0 || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000)) wrong(p->w, "a text has an escape of no character");
    return c;
}

/* The text of a string literal, with the escapes of Python. */
static void unescape(Parser *p, Buffer *b, const char *s, const char *end) {
    static const char letters[] = "ntr\\'\"abfv", meanings[] = "\n\t\r\\'\"\a\b\f\v";
    while (s < end) {
        const char *letter;
        if (*s != '\\' || s + 1 == end) {
            put_bytes(p->w, b, s++, 1, true);
        } else if ((letter = strchr(letters, s[1])) && *letter) {
            put_bytes(p->w, b, meanings + (letter - letters), 1, true);
            s += 2;
        } else if (s[1] == '\n') {
            s += 2;
        } else if (strchr("xuU", s[1])) {
            const int digits = s[1] == 'x' ? 2 : s[1] == 'u' ? 4 : 8;
            s += 2;
            put_char(p->w, b, parse_code(p, &s, end, digits, 16), true);
        } else if (s[1] >= '0' && s[1] <= '7') {
            s++;
            put_char(p->w, b, parse_code(p, &s, end, 3, 8), true);
        } else {
            put_bytes(p->w, b, s, 2, true);
            s += 2;
        }
    }
}

static Node *parse_constant(Parser *p) {
    Node *node = new_node(p, CONSTANT, NULL, NULL);
    char digits[400];
    size_t n = 0;
    Buffer text = {0};
    if (p->token->kind == STRING) {
        for (; p->token->kind == STRING; p->token++) unescape(p, &text, p->token->s, p->token->s + p->token->n);
        node->value = text_of(&text);
        return node;
    }
    const Token *token = p->token++;
    for (size_t i = 0; i < token->n && n + 1 < sizeof digits; i++)
        if (token->s[i] != '_') digits[n++] = token->s[i];
    digits[n] = 0;
    const int base = *digits == '0' && n > 1 ? (tolower(digits[1]) == 'x'   ? 16
                                                : tolower(digits[1]) == 'o' ? 8
                                                                            : 2)
                                             : 10;
    char *end;
    errno = 0;
    node->value = token->kind == REAL_NUMBER ? real(strtod(digits, &end))
                                             : whole(strtoll(digits + (base == 10 ? 0 : 2), &end, base));
    if (*end || (errno && token->kind != REAL_NUMBER)) wrong(p->w, "a malformed number: %.40s", digits);
    return node;
}

/* Arguments up to the closing parenthesis: values, name=value, *values, **mapping. */
static Node *parse_arguments(Parser *p) {
    Node *list = NULL;
    while (!skip_operator(p, ")")) {
        Node *argument = new_node(p, CONSTANT, NULL, NULL);
        argument->name = skip_operator(p, "*") ? "*" : skip_operator(p, "**") ? "**" : NULL;
        if (p->token->kind == NAME && p->token[1].kind == OPERATOR && p->token[1].n == 1 && *p->token[1].s == '=') {
            argument->name = p->token->s;
            p->token += 2;
        }
        argument->a = parse_expression(p);
        append(&list, argument);
        if (!is_operator(p, ")")) expect(p, ",");
    }
    return list;
}

static Node *parse_subscript(Parser *p, Node *of) {
    Node *node = new_node(p, ITEM, of, NULL);
    if (!is_operator(p, ":")) node->b = parse_expression(p);
    if (is_operator(p, ",")) wrong(p->w, "a value has one index");
    if (skip_operator(p, ":")) {
        node->type = SLICE;
        if (!is_operator(p, ":") && !is_operator(p, "]")) node->c = parse_expression(p);
        if (skip_operator(p, ":") && !is_operator(p, "]")) node->list = parse_expression(p);
    }
    expect(p, "]");
    return node;
}

static Node *parse_postfix(Parser *p, Node *node) {
    for (;;) {
        if (skip_operator(p, ".")) {
            if (p->token->kind == WHOLE_NUMBER) {
                node = new_node(p, ITEM, node, parse_constant(p));
            } else {
                node = new_node(p, ATTRIBUTE, node, NULL);
                node->name = expect_name(p);
                node->value = text_from(p->w, node->name, strlen(node->name), true);
            }
        } else if (skip_operator(p, "[")) {
            node = parse_subscript(p, node);
        } else if (skip_operator(p, "(")) {
            node = new_node(p, CALL, node, NULL);
            node->list = parse_arguments(p);
        } else {
            return node;
        }
    }
}

/* The name of a filter or test, which may have dots. An unknown one is an error only if it runs. */
static Node *parse_row(Parser *p, NodeType type, Node *of) {
    Node *node = new_node(p, type, of, NULL);
    Buffer name = {0};
    do put_own(p->w, &name, expect_name(p));
    while (skip_operator(p, ".") && (put_own(p->w, &name, "."), true));
    node->name = c_text(p->w, text_of(&name));
    node->row = find_row(type == IS, node->name);
    return node;
}

static Node *parse_test(Parser *p, Node *of) {
    const bool negated = skip_name(p, "not");
    Node *node = parse_row(p, IS, of);
    const bool stops = is_name(p, "else") || is_name(p, "or") || is_name(p, "and");
    if (skip_operator(p, "(")) {
        node->list = parse_arguments(p);
    } else if ((p->token->kind == NAME && !stops) || p->token->kind == STRING || p->token->kind == WHOLE_NUMBER ||
               p->token->kind == REAL_NUMBER || is_operator(p, "[") || is_operator(p, "{")) {
        if (is_name(p, "is")) wrong(p->w, "tests cannot be chained");
        node->list = new_node(p, CONSTANT, NULL, NULL);
        node->list->a = parse_unary(p, false);
    }
    return negated ? new_node(p, NOT, node, NULL) : node;
}

static Node *parse_filters(Parser *p, Node *node) {
    while (is_operator(p, "|") || is_name(p, "is") || is_operator(p, "(")) {
        if (skip_operator(p, "|")) {
            node = parse_row(p, FILTER, node);
            if (skip_operator(p, "(")) node->list = parse_arguments(p);
        } else if (skip_name(p, "is")) {
            node = parse_test(p, node);
        } else {
            node = parse_postfix(p, node);
        }
    }
    return node;
}

static Node *parse_map(Parser *p) {
    Node *node = new_node(p, NEW_MAP, NULL, NULL);
    while (!skip_operator(p, "}")) {
        Node *pair = new_node(p, CONSTANT, parse_expression(p), NULL);
        expect(p, ":");
        pair->b = parse_expression(p);
        append(&node->list, pair);
        if (!is_operator(p, "}")) expect(p, ",");
    }
    return node;
}

static Node *parse_name(Parser *p) {
    static const char *const words[] = {"true", "True", "false", "False", "none", "None"};
    Node *node = new_node(p, VARIABLE, NULL, NULL);
    node->name = expect_name(p);
    for (int i = 0; i < 6; i++)
        if (!strcmp(node->name, words[i])) {
            node->type = CONSTANT;
            node->value = i < 4 ? boolean(i < 2) : none;
        }
    if (p->macro) {
        p->macro->varargs |= !strcmp(node->name, "varargs");
        p->macro->extra |= !strcmp(node->name, "kwargs");
    }
    return node;
}

static Node *parse_primary(Parser *p) {
    Node *node = NULL;
    if (p->token->kind == NAME) return parse_name(p);
    if (p->token->kind >= STRING && p->token->kind <= REAL_NUMBER) return parse_constant(p);
    if (skip_operator(p, "(")) {
        node = is_operator(p, ")") ? new_node(p, NEW_TUPLE, NULL, NULL) : parse_list(p, true);
        expect(p, ")");
    } else if (skip_operator(p, "[")) {
        for (node = new_node(p, NEW_LIST, NULL, NULL); !skip_operator(p, "]");) {
            append(&node->list, parse_expression(p));
            if (!is_operator(p, "]")) expect(p, ",");
        }
    } else if (skip_operator(p, "{")) {
        node = parse_map(p);
    } else {
        unexpected(p, "an expression");
    }
    return node;
}

static Node *parse_unary(Parser *p, bool filtered) {
    Node *node;
    enter(p->w);
    if (is_operator(p, "-") || is_operator(p, "+")) {
        node = new_node(p, *p->token->s == '-' ? NEGATIVE : POSITIVE, NULL, NULL);
        p->token++;
        node->a = parse_unary(p, false);
    } else {
        node = parse_primary(p);
    }
    node = parse_postfix(p, node);
    leave(p->w);
    return filtered ? parse_filters(p, node) : node;
}

static Node *parse_compare(Parser *p);

/* The operators of a level, from the weakest to the strongest: or, and, not with comparisons, + -, ~, * and so on. */
static Node *parse_level(Parser *p, int level) {
    static const char *const operators[][5] = {{"or"}, {"and"}, {NULL}, {"+", "-"}, {"~"}, {"*", "/", "//", "%"},
                                               {"**"}};
    if (level == 2) return parse_compare(p);
    if (level == 7) return parse_unary(p, true);
    Node *node = parse_level(p, level + 1);
    for (bool found = true; found;) {
        found = false;
        for (int i = 0; operators[level][i] && !found; i++) {
            const char *name = operators[level][i];
            found = level < 2 ? skip_name(p, name) : skip_operator(p, name);
            if (!found) continue;
            node = new_node(p, level == 0 ? OR : level == 1 ? AND : BINARY, node, NULL);
            node->name = name;
            node->b = parse_level(p, level + 1);
        }
    }
    return node;
}

static Node *parse_compare(Parser *p) {
    static const char *const operators[] = {"==", "!=", "<=", ">=", "<", ">"};
    if (skip_name(p, "not")) {
        enter(p->w);
        Node *node = new_node(p, NOT, parse_compare(p), NULL);
        leave(p->w);
        return node;
    }
    Node *node = new_node(p, COMPARE, parse_level(p, 3), NULL);
    for (;;) {
        const char *found = NULL;
        for (int i = 0; i < 6 && !found; i++)
            if (skip_operator(p, operators[i])) found = operators[i];
        const bool negated = is_name(p, "not") && p->token[1].kind == NAME && !strcmp(p->token[1].s, "in");
        p->token += negated;
        if (!found && skip_name(p, "in")) found = negated ? "not in" : "in";
        if (!found) return node->list ? node : node->a;
        Node *with = new_node(p, CONSTANT, parse_level(p, 3), NULL);
        with->name = found;
        append(&node->list, with);
    }
}

static Node *parse_expression(Parser *p) {
    enter(p->w);
    Node *node = parse_level(p, 0);
    while (skip_name(p, "if")) {
        Node *choice = new_node(p, CHOICE, NULL, node);
        choice->a = parse_level(p, 0);
        if (skip_name(p, "else")) choice->c = parse_expression(p);
        node = choice;
    }
    leave(p->w);
    return node;
}

/* An expression, or several with commas between them: a tuple. choice: x if y else z may stand there. */
static Node *parse_list(Parser *p, bool choice) {
    Node *list = NULL;
    bool tuple = false;
    do {
        const bool ends = p->token->kind == CLOSE_BLOCK || p->token->kind == CLOSE_PRINT || is_operator(p, ")");
        if (tuple && ends) break;
        append(&list, choice ? parse_expression(p) : parse_level(p, 0));
    } while (skip_operator(p, ",") && (tuple = true));
    if (!tuple) return list;
    Node *node = new_node(p, NEW_TUPLE, NULL, NULL);
    node->list = list;
    return node;
}

/* What a value is assigned to: a name, an attribute of a namespace, or several. */
static Node *parse_target(Parser *p) {
    Node *list = NULL;
    bool tuple = false;
    do {
        if (p->token->kind != NAME && !is_operator(p, "(") && list) break;
        const bool enclosed = skip_operator(p, "(");
        Node *target = enclosed ? parse_target(p) : parse_name(p);
        if (enclosed) expect(p, ")");
        if (target->type == CONSTANT) unexpected(p, "a variable");
        if (target->type == VARIABLE && skip_operator(p, ".")) {
            target = new_node(p, ATTRIBUTE, target, NULL);
            target->name = expect_name(p);
            target->value = text_from(p->w, target->name, strlen(target->name), true);
        }
        append(&list, target);
    } while (skip_operator(p, ",") && (tuple = true));
    if (!tuple) return list;
    Node *node = new_node(p, NEW_TUPLE, NULL, NULL);
    node->list = list;
    return node;
}

static Node *parse_statement(Parser *p);

/* Statements up to a block that begins with one of the words in `ends`; the token is then behind that word. */
static Node *parse_body(Parser *p, const char *ends) {
    Node *list = NULL, **last = &list;
    enter(p->w);
    for (Node *node;; last = &(*last = node)->next) {
        if (p->token->kind == END && *ends) unexpected(p, ends);
        if (p->token->kind == END) break;
        if (p->token->kind == OPEN_BLOCK && p->token[1].kind == NAME && text_listed(ends, p->token[1].s)) break;
        if (p->token->kind == OPEN_BLOCK) {
            node = parse_statement(p);
            continue;
        }
        node = new_node(p, WRITE, NULL, NULL);
        if (p->token->kind == DATA) {
            node->a = new_node(p, CONSTANT, NULL, NULL);
            node->a->value = text_from(p->w, p->token->s, p->token->n, true);
        } else {
            p->token++;
            node->a = parse_list(p, true);
            if (p->token->kind != CLOSE_PRINT) unexpected(p, "}}");
        }
        p->token++;
    }
    p->token += *ends ? 2 : 0;
    leave(p->w);
    return list;
}

static Node *parse_if(Parser *p) {
    Node *node = new_node(p, IF, parse_list(p, false), NULL);
    expect_close(p);
    node->list = parse_body(p, "elif else endif");
    const char *end = p->token[-1].s;
    if (!strcmp(end, "elif")) {
        enter(p->w);
        node->c = parse_if(p);
        leave(p->w);
        return node;
    }
    expect_close(p);
    if (!strcmp(end, "else")) {
        node->c = parse_body(p, "endif");
        expect_close(p);
    }
    return node;
}

static Node *parse_for(Parser *p) {
    Node *node = new_node(p, FOR, parse_target(p), NULL);
    if (!skip_name(p, "in")) unexpected(p, "in");
    node->b = parse_list(p, false);
    if (skip_name(p, "if")) node->c = parse_expression(p);
    if (is_name(p, "recursive")) wrong(p->w, "recursive loops are not supported");
    expect_close(p);
    node->list = parse_body(p, "else endfor");
    if (!strcmp(p->token[-1].s, "else")) {
        expect_close(p);
        node->d = parse_body(p, "endfor");
    }
    expect_close(p);
    return node;
}

/* Filters of a variable without a name, which is the text of a block. `first`: they begin without a bar. */
static Node *parse_block_filters(Parser *p, bool first) {
    Node *node = new_node(p, VARIABLE, NULL, NULL);
    if (first) {
        node = parse_row(p, FILTER, node);
        if (skip_operator(p, "(")) node->list = parse_arguments(p);
    }
    return parse_filters(p, node);
}

static Node *parse_set(Parser *p) {
    Node *node = new_node(p, SET, parse_target(p), NULL);
    if (skip_operator(p, "=")) {
        node->b = parse_list(p, true);
        expect_close(p);
        return node;
    }
    node->c = parse_block_filters(p, false);
    expect_close(p);
    node->list = parse_body(p, "endset");
    expect_close(p);
    return node;
}

/* The parameters and the body of a macro or of a call block, whose end is `end`. */
static Node *parse_macro(Parser *p, const char *name, const char *end, bool parameters) {
    Node *node = new_node(p, MACRO, NULL, NULL), *outer = p->macro, *call = NULL;
    node->name = name;
    if (parameters) expect(p, "(");
    while (parameters && !skip_operator(p, ")")) {
        Node *parameter = new_node(p, VARIABLE, NULL, NULL);
        parameter->name = expect_name(p);
        if (skip_operator(p, "=")) parameter->a = parse_expression(p);
        append(&node->a, parameter);
        if (!is_operator(p, ")")) expect(p, ",");
    }
    if (!name) {
        call = parse_expression(p);
        if (call->type != CALL) wrong(p->w, "a call block needs a call");
    }
    expect_close(p);
    p->macro = node;
    node->list = parse_body(p, end);
    p->macro = outer;
    expect_close(p);
    node->b = call;
    if (!name) node->type = CALL_BLOCK;
    return node;
}

static Node *parse_with(Parser *p) {
    Node *node = new_node(p, WITH, NULL, NULL);
    while (p->token->kind != CLOSE_BLOCK) {
        Node *set = new_node(p, SET, parse_target(p), NULL);
        expect(p, "=");
        set->b = parse_expression(p);
        append(&node->a, set);
        if (p->token->kind != CLOSE_BLOCK) expect(p, ",");
    }
    expect_close(p);
    node->list = parse_body(p, "endwith");
    expect_close(p);
    return node;
}

static Node *parse_statement(Parser *p) {
    p->token++;
    p->w->line = p->token->line;
    Node *node = NULL;
    const char *word = expect_name(p);
    if (!strcmp(word, "if")) return parse_if(p);
    if (!strcmp(word, "for")) return parse_for(p);
    if (!strcmp(word, "set")) return parse_set(p);
    if (!strcmp(word, "with")) return parse_with(p);
    if (!strcmp(word, "macro")) return parse_macro(p, expect_name(p), "endmacro", true);
    if (!strcmp(word, "call")) return parse_macro(p, NULL, "endcall", is_operator(p, "("));
    if (!strcmp(word, "filter")) {
        node = new_node(p, FILTER_BLOCK, parse_block_filters(p, true), NULL);
        expect_close(p);
        node->list = parse_body(p, "endfilter");
    } else if (!strcmp(word, "generation")) {
        node = new_node(p, WITH, NULL, NULL);
        expect_close(p);
        node->list = parse_body(p, "endgeneration");
    } else if (!strcmp(word, "break") || !strcmp(word, "continue")) {
        node = new_node(p, *word == 'b' ? BREAK : CONTINUE, NULL, NULL);
    } else {
        wrong(p->w, "there is no block '%.40s' here", word);
    }
    expect_close(p);
    return node;
}

/* ---- what filters, tests, methods and functions share ---- */

typedef struct {
    Value *at;
    size_t n;
    const Dict *named; /* or NULL */
} Args;

/* v: what a filter, test or method is applied to; a: the arguments in the order of Row.takes; all: as they came. */
#define BUILTIN(name) static Value name(Work *w, int which, Value v, Value *a, const Args *all)
enum { MOST_PARAMETERS = 5, ANY = -1 };
struct Row {
    const char *name;
    Value (*run)(Work *w, int which, Value v, Value *a, const Args *all);
    int which, least; /* least: so many arguments are needed; ANY: it takes any, in `all` alone */
    const char *takes;
};

struct Function { /* a row with what it is applied to, or a macro with its scope */
    const Row *row;
    Value self;
    const Node *macro;
    struct Scope *scope;
};

static Value run_row(Work *w, const Row *row, Value v, const Args *args) {
    Value a[MOST_PARAMETERS] = {{0}};
    size_t n = 0, used = 0;
    for (const char *s = row->least == ANY ? "" : row->takes; *s; n++) {
        const size_t length = strcspn(s, " ");
        const Value key = {TEXT, .data = s, .n = length};
        const Value *named = args->named ? map_find(w, args->named, key) : NULL;
        a[n] = n < args->n ? args->at[n] : named ? *named : missing;
        used += n < args->n || named;
        s += length + (s[length] == ' ');
    }
    for (int i = 0; i < row->least; i++)
        if (a[i].kind == MISSING) wrong(w, "%s() lacks an argument", row->name);
    if (row->least != ANY && used < args->n + (args->named ? args->named->key.n : 0))
        wrong(w, "%s() got an argument that it does not take", row->name);
    return row->run(w, row->which, v, a, args);
}

static const Row *row_in(const Row *rows, const char *name) {
    while (rows->name && strcmp(rows->name, name)) rows++;
    return rows->name ? rows : NULL;
}

/* The values that a loop over v sees. A stream gives them once. */
static List *items_of(Work *w, Value v) {
    List *list = new_list(w, 0);
    spend(w, v.kind >= TEXT && v.kind <= MAP ? length_of(v) : 0);
    if (v.kind == TEXT) {
        for (size_t i = 0, n; i < v.n; i += n) push(w, list, part_of(v, i, n = char_length(v, i)));
    } else if (is_list(v)) {
        *list = *v.list;
        if (v.kind == STREAM) v.list->n = 0;
    } else if (v.kind == MAP) {
        *list = v.map->key;
    } else if (v.kind != UNDEFINED) {
        wrong(w, "a value of kind %s cannot be iterated", kind_name(v));
    }
    list->room = list->n; /* whoever appends gets a copy */
    return list;
}

static int64_t whole_of(Work *w, Value v, int64_t absent) {
    if (v.kind == MISSING) return absent;
    if ((v.kind != WHOLE && v.kind != BOOL) || v.digits) wrong(w, "a whole number is needed, not a %s", kind_name(v));
    return v.whole;
}

static Value need_text(Work *w, Value v) {
    if (v.kind != TEXT) wrong(w, "a text is needed, not a value of kind %s", kind_name(v));
    return v;
}

static Value get_attribute(Work *w, Value v, Value name);
static Value get_item(Work *w, Value v, Value key);
static Value call(Work *w, Value f, const Args *args);

/* v's part at a path like "function.name" or 0; v itself without one. */
static Value get_path(Work *w, Value v, Value path) {
    if (path.kind == MISSING || path.kind == NONE) return v;
    if (path.kind != TEXT) return get_item(w, v, path);
    for (size_t begin = 0, end; begin <= path.n; begin = end + 1) {
        const char *dot = memchr(path.data + begin, '.', path.n - begin);
        end = dot ? (size_t)(dot - path.data) : path.n;
        const Value name = part_of(path, begin, end - begin);
        char *rest;
        const Value index = whole(strtoll(c_text(w, name), &rest, 10));
        v = get_item(w, v, name.n && !*rest ? index : name);
    }
    return v;
}

/* What items are sorted and compared by: themselves, or what stands at a path or at several, "a.b,c". */
static List *keys_of(Work *w, const List *list, Value path, bool exact) {
    List *keys = new_list(w, list->n);
    for (size_t i = 0; i < list->n; i++) {
        const char *comma = path.kind == TEXT ? memchr(path.data, ',', path.n) : NULL;
        Value key = get_path(w, list->item[i], comma ? part_of(path, 0, (size_t)(comma - path.data)) : path);
        if (comma) {
            const Value rest = part_of(path, (size_t)(comma + 1 - path.data), path.n - (size_t)(comma + 1 - path.data));
            const List *one = &(List){.item = list->item + i, .n = 1};
            key = pair_of(w, key, keys_of(w, one, rest, exact)->item[0]);
        }
        push(w, keys, key.kind == TEXT && !exact ? with_case(w, key, LOWER) : key);
    }
    return keys;
}

/* A merge sort; equal ones keep their order. */
static List *sorted(Work *w, const List *list, const List *keys, bool down) {
    const size_t n = list->n;
    size_t *order = take(w, 2 * n * sizeof *order), *other = order + n;
    for (size_t i = 0; i < n; i++) order[i] = i;
    for (size_t half = 1; half < n; half *= 2) {
        for (size_t begin = 0; begin < n; begin += 2 * half) {
            const size_t middle = begin + half < n ? begin + half : n, end = middle + half < n ? middle + half : n;
            for (size_t to = begin, a = begin, b = middle; to < end; to++) {
                const int c = a < middle && b < end ? compare(w, keys->item[order[b]], keys->item[order[a]]) : 0;
                const bool second = a == middle || (b < end && (down ? c > 0 : c < 0));
                other[to] = order[second ? b++ : a++];
            }
        }
        size_t *swapped = order;
        order = other;
        other = swapped;
    }
    List *out = new_list(w, n);
    for (size_t i = 0; i < n; i++) push(w, out, list->item[order[i]]);
    return out;
}

static bool contains(Work *w, Value v, Value item) {
    if (v.kind == TEXT) return find(w, v, need_text(w, item), 0) != SIZE_MAX;
    if (v.kind == MAP) return map_find(w, v.map, item);
    const List *list = items_of(w, v);
    for (size_t i = 0; i < list->n; i++) {
        spend(w, 0);
        if (equal(w, list->item[i], item)) return true;
    }
    return false;
}

static bool ordered(Work *w, const char *operator, Value a, Value b) {
    if (*operator== '=' || * operator== '!') return equal(w, a, b) == (*operator== '=');
    if (*operator== 'i' || * operator== 'n') return contains(w, b, a) == (*operator== 'i');
    const int order = compare(w, a, b);
    return (operator[1] == '=' && !order) || (*operator== '<' ? order < 0 : order> 0);
}

/* How a value is written: %-5.2f, {:>8}. */
typedef struct {
    char align, sign, type; /* align: <, >, ^, = (zeros behind the sign) */
    bool alternate;
    Value fill;
    int64_t width, precision;
} Shape;

static void put_shaped(Work *w, Buffer *b, Value v, Shape s) {
    char format[32], text[400];
    const bool number = s.type && strchr("dixXoeEfFgG", s.type);
    Value shown = v;
    if (s.width > 10000 || s.precision > 300) wrong(w, "a field is too wide");
    if (number && (!is_number(v) || v.digits)) wrong(w, "%%%c needs a number, not a %s", s.type, kind_name(v));
    snprintf(format, sizeof format, "%%%.1s%s.*%s%c", s.sign ? &s.sign : "", s.alternate ? "#" : "",
             strchr("dixXo", s.type) ? "ll" : "", s.type == 'i' ? 'd' : s.type);
    if (number && strchr("dixXo", s.type))
        snprintf(text, sizeof text, format, s.precision < 0 ? 1 : (int)s.precision,
                 v.kind == REAL ? (long long)v.real : (long long)v.whole);
    else if (number)
        snprintf(text, sizeof text, format, s.precision < 0 ? 6 : (int)s.precision, number_of(v));
    if (number) {
        shown = text_from(w, text, strlen(text), v.own);
    } else if (s.type == 'r') {
        Buffer repr = {0};
        put_value(w, &repr, v, true);
        shown = text_of(&repr);
    } else {
        shown = to_text(w, v);
    }
    int64_t pad = s.width - (int64_t)count_chars(w, shown);
    if (!number && s.precision >= 0)
        for (size_t i = 0, chars = 0; i < shown.n; i += char_length(shown, i))
            if (chars++ == (size_t)s.precision) shown.n = i;
    const size_t sign = s.align == '=' && shown.n && strchr("+- ", *shown.data) ? 1 : 0;
    const int64_t before = pad < 0 || s.align == '<' ? 0 : s.align == '^' ? pad / 2 : pad;
    put(w, b, part_of(shown, 0, sign));
    for (int64_t i = 0; i < before; i++) put(w, b, s.fill);
    put(w, b, part_of(shown, sign, shown.n - sign));
    for (int64_t i = before; i < pad; i++) put(w, b, s.fill);
}

static int64_t read_whole(Value text, size_t *i, int64_t absent) {
    int64_t n = absent;
    for (; *i < text.n && isdigit((unsigned char)text.data[*i]); ++*i)
        n = (n == absent ? 0 : n < 100000 ? n * 10 : n) + text.data[*i] - '0';
    return n;
}

/* Python's text % values. */
static Value print(Work *w, Value text, Value values) {
    Buffer b = {0};
    const Value space = text_from(w, " ", 1, true), zero = text_from(w, "0", 1, true);
    size_t used = 0;
    for (size_t i = 0; i < text.n; i++) {
        Shape s = {.align = '>', .fill = space};
        Value v = missing;
        if (text.data[i] != '%') {
            put(w, &b, part_of(text, i, 1));
            continue;
        }
        if (++i < text.n && text.data[i] == '(') {
            const char *end = memchr(text.data + i, ')', text.n - i);
            if (!end || values.kind != MAP) wrong(w, "%%(name) needs a mapping");
            v = get_item(w, values, part_of(text, i + 1, (size_t)(end - text.data) - i - 1));
            i = (size_t)(end - text.data) + 1;
        }
        for (; i < text.n && strchr("-+ 0#", text.data[i]); i++) {
            const char flag = text.data[i];
            if (flag == '-') s.align = '<';
            if (flag == '0' && s.align != '<') s.align = '=', s.fill = zero;
            if (flag == '+' || flag == ' ') s.sign = flag;
            s.alternate = s.alternate || flag == '#';
        }
        s.width = read_whole(text, &i, 0);
        s.precision = i < text.n && text.data[i] == '.' ? (i++, read_whole(text, &i, 0)) : -1;
        s.type = i < text.n ? text.data[i] : 0;
        if (s.type == '%') {
            put(w, &b, part_of(text, i, 1));
            continue;
        }
        if (!s.type || !strchr("srdixXoeEfFgG", s.type)) wrong(w, "a format of Python is not supported");
        if (v.kind == MISSING && values.kind == TUPLE && used == values.list->n) wrong(w, "a format lacks an argument");
        if (v.kind == MISSING) v = values.kind == TUPLE ? values.list->item[used++] : (used++, values);
        put_shaped(w, &b, v, s);
    }
    if (values.kind == TUPLE ? used < values.list->n : values.kind != MAP && used != 1)
        wrong(w, "a format does not use all arguments, or lacks one");
    return text_of(&b);
}

/* ---- filters ---- */

BUILTIN(change_case) { return with_case(w, to_text(w, v), (Case)which); }
BUILTIN(do_strip) { return strip(w, to_text(w, v), a[0], which); }
BUILTIN(do_length) {
    if (v.kind != UNDEFINED && (v.kind < TEXT || v.kind > MAP || v.kind == STREAM))
        wrong(w, "a %s has no length", kind_name(v));
    return whole(v.kind == UNDEFINED ? 0 : (int64_t)(v.kind == TEXT ? count_chars(w, v) : length_of(v)));
}
BUILTIN(do_default) {
    const bool taken = v.kind == UNDEFINED || v.kind == MISSING || (truth(a[1]) && !truth(v));
    return taken ? (a[0].kind == MISSING ? text_from(w, "", 0, true) : a[0]) : v;
}
BUILTIN(do_first) {
    if (which && v.kind == STREAM) wrong(w, "a generator cannot be read backwards");
    const List *list = items_of(w, v);
    return list->n ? list->item[which ? list->n - 1 : 0] : undefined("the item of an empty list");
}
BUILTIN(do_list) { return of_list(LIST, items_of(w, v)); }
BUILTIN(do_string) { return to_text(w, v); }
BUILTIN(do_same) { return v; }
BUILTIN(do_join) {
    Buffer b = {0};
    const List *list = items_of(w, v);
    const Value between = a[0].kind == MISSING ? text_from(w, "", 0, true) : to_text(w, a[0]);
    reserve(w, &b, 0);
    for (size_t i = 0; i < list->n; i++) {
        if (i) put(w, &b, between);
        if (which) need_text(w, list->item[i]);
        put_value(w, &b, get_path(w, list->item[i], a[1]), false);
    }
    return text_of(&b);
}
BUILTIN(method_join) { return do_join(w, 1, a[0], (Value[]){v, missing}, all); }
BUILTIN(do_replace) {
    if (!which) v = to_text(w, v), a[0] = to_text(w, a[0]), a[1] = to_text(w, a[1]);
    return replace(w, v, need_text(w, a[0]), need_text(w, a[1]), a[2].kind == NONE ? -1 : whole_of(w, a[2], -1));
}
BUILTIN(do_items) { /* items, keys, values of a mapping */
    static const char *const names[] = {"dict_keys", "dict_values", "dict_items"};
    if (v.kind == UNDEFINED) return of_list(STREAM, new_list(w, 0));
    if (v.kind != MAP) wrong(w, "a %s has no items", kind_name(v));
    List *list = new_list(w, v.map->key.n);
    for (size_t i = 0; i < v.map->key.n; i++) {
        const Value key = v.map->key.item[i], value = v.map->value.item[i];
        push(w, list, which == 0 ? key : which == 1 ? value : pair_of(w, key, value));
    }
    list->view = names[which > 2 ? 2 : which];
    return of_list(which > 2 ? STREAM : VIEW, list);
}
BUILTIN(do_reverse) {
    const List *list = items_of(w, v);
    List *out = new_list(w, list->n);
    for (size_t i = list->n; i--;) push(w, out, list->item[i]);
    return v.kind == TEXT ? do_join(w, 0, of_list(LIST, out), (Value[]){missing, missing}, all) : of_list(STREAM, out);
}
BUILTIN(do_sort) {
    const List *list = items_of(w, v);
    return of_list(LIST, sorted(w, list, keys_of(w, list, a[2], truth(a[1])), truth(a[0])));
}
BUILTIN(do_dictsort) {
    const List *list = do_items(w, 2, v, a, all).list;
    const Value by = whole(is_text(a[1], "value"));
    return of_list(LIST, sorted(w, list, keys_of(w, list, by, truth(a[0])), truth(a[2])));
}
BUILTIN(do_extreme) {
    const List *list = items_of(w, v), *keys = keys_of(w, list, a[1], truth(a[0]));
    size_t best = 0;
    for (size_t i = 1; i < list->n; i++) {
        const int order = compare(w, keys->item[i], keys->item[best]);
        if (which ? order > 0 : order < 0) best = i;
    }
    return list->n ? list->item[best] : undefined("the extreme of an empty list");
}
BUILTIN(do_unique) {
    const List *list = items_of(w, v), *keys = keys_of(w, list, a[1], truth(a[0]));
    List *out = new_list(w, 0), *seen = new_list(w, 0);
    for (size_t i = 0; i < list->n; i++) {
        if (contains(w, of_list(LIST, seen), keys->item[i])) continue;
        push(w, out, list->item[i]), push(w, seen, keys->item[i]);
    }
    return of_list(STREAM, out);
}
BUILTIN(do_groupby) {
    const List *list = items_of(w, v), *keys = keys_of(w, list, a[0], truth(a[2]));
    List *out = new_list(w, 0), *group = NULL;
    list = sorted(w, list, keys, false), keys = sorted(w, keys, keys, false);
    for (size_t i = 0; i < list->n; i++) {
        if (!i || !equal(w, keys->item[i], keys->item[i - 1])) {
            group = new_list(w, 0);
            const Value named = get_path(w, list->item[i], a[0]);
            push(w, out, pair_of(w, named, of_list(LIST, group)));
            out->item[out->n - 1].list->view = "group";
        }
        push(w, group, list->item[i]);
    }
    return of_list(LIST, out);
}
static Value add(Work *w, const char *operator, Value a, Value b);
BUILTIN(do_sum) {
    const List *list = items_of(w, v);
    Value sum = a[1].kind == MISSING ? whole(0) : a[1];
    for (size_t i = 0; i < list->n; i++) sum = add(w, "+", sum, get_path(w, list->item[i], a[0]));
    return sum;
}
static Args behind(const Args *all, size_t n) {
    n = n < all->n ? n : all->n;
    return (Args){all->at + n, all->n - n, all->named};
}
static const Row *row_of(Work *w, bool test, Value name) {
    const Row *row = find_row(test, c_text(w, need_text(w, name)));
    if (!row) wrong(w, "there is no filter or test of this name");
    return row;
}
BUILTIN(do_map) {
    List *list = items_of(w, v), *out = new_list(w, list->n);
    const Value key = text_from(w, "attribute", 9, true), absent = text_from(w, "default", 7, true);
    const Value *path = all->named ? map_find(w, all->named, key) : NULL;
    const Value *initial = all->named ? map_find(w, all->named, absent) : NULL;
    if (!path && !all->n) wrong(w, "map() lacks an argument");
    const Args rest = behind(all, 1);
    const Row *row = path ? NULL : row_of(w, false, all->at[0]);
    for (size_t i = 0; i < list->n; i++) {
        Value each = row ? run_row(w, row, list->item[i], &rest) : get_path(w, list->item[i], *path);
        push(w, out, !row && initial && each.kind == UNDEFINED ? *initial : each);
    }
    return of_list(STREAM, out);
}
enum { REJECT = 1, BY_ATTRIBUTE = 2 };
BUILTIN(do_select) {
    const size_t skip = which & BY_ATTRIBUTE ? 1 : 0;
    List *list = items_of(w, v), *out = new_list(w, 0);
    if (all->n < skip) wrong(w, "selectattr() lacks an argument");
    const Row *row = all->n > skip ? row_of(w, true, all->at[skip]) : NULL;
    const Args rest = behind(all, skip + 1);
    for (size_t i = 0; i < list->n; i++) {
        const Value each = skip ? get_path(w, list->item[i], all->at[0]) : list->item[i];
        if (truth(row ? run_row(w, row, each, &rest) : each) != (which & REJECT)) push(w, out, list->item[i]);
    }
    return of_list(STREAM, out);
}
BUILTIN(do_batch) { /* batch: rows of so many; slice: so many rows */
    List *list = items_of(w, v), *out = new_list(w, 0);
    const int64_t count = whole_of(w, a[0], 1);
    if (count < 1 || count > MOST_RANGE) wrong(w, "batch() and slice() need a number from 1 on");
    const size_t rows = which ? (size_t)count : (list->n + (size_t)count - 1) / (size_t)count, longer = list->n % rows;
    for (size_t i = 0, at = 0; i < rows; i++) {
        List *row = new_list(w, 0);
        const size_t n = which ? list->n / rows + (i < longer) : (size_t)count;
        for (size_t k = 0; k < n && at < list->n; k++) push(w, row, list->item[at++]);
        const bool fills = a[1].kind > NONE && (which ? i >= longer && longer : true);
        while (fills && row->n < (which ? n + 1 : n)) push(w, row, a[1]);
        push(w, out, of_list(LIST, row));
    }
    return of_list(STREAM, out);
}
BUILTIN(do_whole) {
    const Value absent = a[0].kind == MISSING ? whole(0) : a[0];
    if (v.kind == WHOLE || v.kind == BOOL) return (Value){WHOLE, v.own, .whole = v.whole, .digits = v.digits};
    double x = v.kind == REAL ? v.real : NAN;
    if (v.kind == TEXT) {
        const Value text = strip(w, v, missing, LEFT | RIGHT);
        char *s = c_text(w, text), *end;
        errno = 0;
        const int64_t n = strtoll(s, &end, (int)whole_of(w, a[1], 10));
        if (text.n && !*end && !errno) return (Value){WHOLE, false, .whole = n, .digits = NULL};
        x = strtod(s, &end);
        if (*end || end == s || strpbrk(s, "xX")) return absent;
    }
    return fabs(x) < 9e18 ? (Value){WHOLE, v.kind == REAL && v.own, .whole = (int64_t)x, .digits = NULL} : absent;
}
BUILTIN(do_real) {
    char *s, *end;
    if (is_number(v)) return (Value){REAL, v.own, .real = number_of(v)};
    if (v.kind == TEXT) {
        s = c_text(w, strip(w, v, missing, LEFT | RIGHT));
        const double x = strtod(s, &end);
        if (*s && !*end && !strpbrk(s, "xX(")) return (Value){REAL, false, .real = x};
    }
    return a[0].kind == MISSING ? real(0) : a[0];
}
BUILTIN(do_abs) {
    if (!is_number(v) || v.digits) wrong(w, "abs() needs a number, not a %s", kind_name(v));
    if (v.kind == REAL) return (Value){REAL, v.own, .real = fabs(v.real)};
    return (Value){WHOLE, v.own, .whole = v.whole < 0 ? -v.whole : v.whole, .digits = NULL};
}
BUILTIN(do_round) {
    char text[400];
    const int64_t places = whole_of(w, a[0], 0);
    const bool common = a[1].kind == MISSING || is_text(a[1], "common");
    if (!is_number(v) || places < -300 || places > 300) wrong(w, "round() needs a number, not a %s", kind_name(v));
    if (common && v.kind != REAL && places >= 0) return v;
    const double scale = pow(10, (double)places), x = number_of(v);
    if (!common) return real((is_text(a[1], "ceil") ? ceil(x * scale) : floor(x * scale)) / scale);
    if (places < 0) return real(rint(x * scale) / scale);
    snprintf(text, sizeof text, "%.*f", (int)places, x);
    return (Value){REAL, v.own, .real = strtod(text, NULL)};
}
static List *split_lines(Work *w, Value v, bool keep) {
    List *list = new_list(w, 0);
    size_t begin = 0;
    for (size_t i = 0, n; i < v.n; i += n) {
        const int32_t c = char_at(v, i);
        n = char_length(v, i);
        if (!((c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029)) continue;
        const size_t end = i;
        if (c == '\r' && i + 1 < v.n && v.data[i + 1] == '\n') n++;
        push(w, list, part_of(v, begin, (keep ? i + n : end) - begin));
        begin = i + n;
    }
    if (begin < v.n) push(w, list, part_of(v, begin, v.n - begin));
    return list;
}
BUILTIN(do_splitlines) { return of_list(LIST, split_lines(w, v, truth(a[0]))); }
static Value spaces(Work *w, int64_t n) {
    Buffer b = {0};
    if (n > MOST_RANGE) wrong(w, "an indentation is too wide");
    reserve(w, &b, 0);
    for (; n > 0; n--) put_own(w, &b, " ");
    return text_of(&b);
}
BUILTIN(do_indent) {
    Buffer b = {0}, out = {0};
    const Value by = a[0].kind == TEXT ? a[0] : spaces(w, whole_of(w, a[0], 4));
    put(w, &b, to_text(w, v)), put_own(w, &b, "\n");
    const List *lines = split_lines(w, text_of(&b), false);
    for (size_t i = 0; i < lines->n; i++) {
        if (i) put_own(w, &out, "\n");
        if (i ? truth(a[2]) || lines->item[i].n : truth(a[1])) put(w, &out, by);
        put(w, &out, lines->item[i]);
    }
    return text_of(&out);
}
BUILTIN(do_center) {
    Buffer b = {0};
    const int64_t width = whole_of(w, a[0], 80), pad = width - (int64_t)count_chars(w, v = to_text(w, v));
    const int64_t before = pad > 0 ? pad / 2 + (pad & width & 1) : 0;
    put(w, &b, spaces(w, before)), put(w, &b, v), put(w, &b, spaces(w, pad - before));
    return text_of(&b);
}
static Value slice_of(Work *w, Value v, Value from, Value to, Value step);
BUILTIN(do_truncate) {
    Buffer b = {0};
    const Value end = a[2].kind == MISSING ? text_from(w, "...", 3, true) : need_text(w, a[2]);
    const int64_t length = whole_of(w, a[0], 255), leeway = a[3].kind == NONE ? 5 : whole_of(w, a[3], 5);
    if ((int64_t)count_chars(w, v = to_text(w, v)) <= length + leeway) return v;
    Value kept = slice_of(w, v, missing, whole(length - (int64_t)count_chars(w, end)), missing);
    const char *space = truth(a[1]) ? NULL : memrchr(kept.data, ' ', kept.n);
    if (space) kept.n = (size_t)(space - kept.data);
    put(w, &b, kept), put(w, &b, end);
    return text_of(&b);
}
BUILTIN(do_wordcount) {
    int64_t words = 0;
    bool inside = false;
    v = to_text(w, v);
    for (size_t i = 0; i < v.n; i += char_length(v, i)) {
        const bool letter = v.data[i] == '_' || strchr("LN", *utf8proc_category_string(char_at(v, i)));
        words += letter && !inside;
        inside = letter;
    }
    return whole(words);
}
BUILTIN(do_attr) {
    const Value found = get_attribute(w, v, need_text(w, a[0]));
    return v.kind == MAP && found.kind != FUNCTION ? undefined("an attribute") : found;
}
BUILTIN(do_print) {
    List *list = new_list(w, all->n);
    for (size_t i = 0; i < all->n; i++) push(w, list, all->at[i]);
    if (all->named && all->n) wrong(w, "format() takes values or names");
    Dict map = all->named ? *all->named : (Dict){0};
    return print(w, to_text(w, v), all->named ? (Value){MAP, .map = &map} : of_list(TUPLE, list));
}
BUILTIN(do_json) {
    Buffer b = {0};
    const bool indented = a[0].kind > NONE;
    JsonStyle style = {text_from(w, ", ", indented ? 1 : 2, true), text_from(w, ": ", 2, true), missing, truth(a[1]),
                       truth(a[3])};
    if (indented) style.indent = a[0].kind == TEXT ? a[0] : spaces(w, whole_of(w, a[0], 0));
    if (a[2].kind > NONE) {
        const List *pair = items_of(w, a[2]);
        if (pair->n != 2) wrong(w, "separators are two texts");
        style.comma = need_text(w, pair->item[0]), style.colon = need_text(w, pair->item[1]);
    }
    put_json(w, &b, v, &style, 0);
    return text_of(&b);
}

static const Row filters[] = {
    {"abs", do_abs, 0, 0, ""},
    {"attr", do_attr, 0, 1, "name"},
    {"batch", do_batch, 0, 1, "linecount fill_with"},
    {"capitalize", change_case, CAPITALIZED, 0, ""},
    {"center", do_center, 0, 0, "width"},
    {"count", do_length, 0, 0, ""},
    {"d", do_default, 0, 0, "default_value boolean"},
    {"default", do_default, 0, 0, "default_value boolean"},
    {"dictsort", do_dictsort, 0, 0, "case_sensitive by reverse"},
    {"first", do_first, 0, 0, ""},
    {"float", do_real, 0, 0, "default"},
    {"format", do_print, 0, ANY, NULL},
    {"groupby", do_groupby, 0, 1, "attribute default case_sensitive"},
    {"indent", do_indent, 0, 0, "width first blank"},
    {"int", do_whole, 0, 0, "default base"},
    {"items", do_items, 3, 0, ""},
    {"join", do_join, 0, 0, "d attribute"},
    {"last", do_first, 1, 0, ""},
    {"length", do_length, 0, 0, ""},
    {"list", do_list, 0, 0, ""},
    {"lower", change_case, LOWER, 0, ""},
    {"map", do_map, 0, ANY, NULL},
    {"max", do_extreme, 1, 0, "case_sensitive attribute"},
    {"min", do_extreme, 0, 0, "case_sensitive attribute"},
    {"reject", do_select, REJECT, ANY, NULL},
    {"rejectattr", do_select, REJECT | BY_ATTRIBUTE, ANY, NULL},
    {"replace", do_replace, 0, 2, "old new count"},
    {"reverse", do_reverse, 0, 0, ""},
    {"round", do_round, 0, 0, "precision method"},
    {"safe", do_string, 0, 0, ""},
    {"select", do_select, 0, ANY, NULL},
    {"selectattr", do_select, BY_ATTRIBUTE, ANY, NULL},
    {"slice", do_batch, 1, 1, "slices fill_with"},
    {"sort", do_sort, 0, 0, "reverse case_sensitive attribute"},
    {"string", do_string, 0, 0, ""},
    {"sum", do_sum, 0, 0, "attribute start"},
    {"title", change_case, WORDS, 0, ""},
    {"tojson", do_json, 0, 0, "indent ensure_ascii separators sort_keys"},
    {"trim", do_strip, LEFT | RIGHT, 0, "chars"},
    {"truncate", do_truncate, 0, 0, "length killwords end leeway"},
    {"unique", do_unique, 0, 0, "case_sensitive attribute"},
    {"upper", change_case, UPPER, 0, ""},
    {"wordcount", do_wordcount, 0, 0, ""},
    {NULL},
};

/* ---- tests ---- */

typedef enum {
    IS_CALLABLE,
    IS_DEFINED,
    IS_ITERABLE,
    IS_MAPPING,
    IS_NONE,
    IS_NUMBER,
    IS_WHOLE,
    IS_REAL,
    IS_SEQUENCE,
    IS_TEXT,
    IS_BOOL,
    IS_TRUE,
    IS_FALSE,
    IS_UNDEFINED,
    IS_NOTHING
} Is;
BUILTIN(is_kind) {
    const Kind k = v.kind;
    const bool answers[] = {
        [IS_CALLABLE] = k == FUNCTION,
        [IS_DEFINED] = k != UNDEFINED,
        [IS_ITERABLE] = k == UNDEFINED || (k >= TEXT && k <= MAP) || k == LOOP,
        [IS_MAPPING] = k == MAP,
        [IS_NONE] = k == NONE,
        [IS_NUMBER] = is_number(v),
        [IS_WHOLE] = k == WHOLE,
        [IS_REAL] = k == REAL,
        [IS_SEQUENCE] =
            k == UNDEFINED || k == TEXT || k == LIST || k == TUPLE || k == MAP || (k == VIEW && *v.list->view == 'r'),
        [IS_TEXT] = k == TEXT,
        [IS_BOOL] = k == BOOL,
        [IS_TRUE] = k == BOOL && v.whole,
        [IS_FALSE] = k == BOOL && !v.whole,
        [IS_UNDEFINED] = k == UNDEFINED,
        [IS_NOTHING] = false,
    };
    return boolean(answers[which]);
}
BUILTIN(is_ordered) {
    static const char *const operators[] = {"==", "!=", "<", "<=", ">", ">=", "in"};
    return boolean(ordered(w, operators[which], v, a[0]));
}
BUILTIN(is_same) { return boolean(v.kind == a[0].kind && equal(w, v, a[0])); }
BUILTIN(is_divisible) {
    const int64_t n = whole_of(w, v, 0), by = which ? 2 : whole_of(w, a[0], 0);
    if (!by) wrong(w, "a division by zero");
    return boolean(n % by == 0 ? which != 1 : which == 1); /* 1: odd, 2: even */
}
BUILTIN(is_case) { /* letters there are, and all of this case */
    bool any = false;
    v = to_text(w, v);
    for (size_t i = 0; i < v.n; i += char_length(v, i)) {
        const char *category = utf8proc_category_string(char_at(v, i));
        if (!strcmp(category, which == UPPER ? "Ll" : "Lu") || !strcmp(category, "Lt")) return boolean(false);
        any = any || !strcmp(category, which == UPPER ? "Lu" : "Ll");
    }
    return boolean(any);
}
BUILTIN(is_row) { return boolean(find_row(which, c_text(w, need_text(w, v)))); }

static const Row tests[] = {
    {"boolean", is_kind, IS_BOOL, 0, ""},
    {"callable", is_kind, IS_CALLABLE, 0, ""},
    {"defined", is_kind, IS_DEFINED, 0, ""},
    {"divisibleby", is_divisible, 0, 1, "num"},
    {"eq", is_ordered, 0, 1, "other"},
    {"equalto", is_ordered, 0, 1, "other"},
    {"==", is_ordered, 0, 1, "other"},
    {"escaped", is_kind, IS_NOTHING, 0, ""},
    {"even", is_divisible, 2, 0, ""},
    {"false", is_kind, IS_FALSE, 0, ""},
    {"filter", is_row, 0, 0, ""},
    {"float", is_kind, IS_REAL, 0, ""},
    {"ge", is_ordered, 5, 1, "other"},
    {">=", is_ordered, 5, 1, "other"},
    {"gt", is_ordered, 4, 1, "other"},
    {"greaterthan", is_ordered, 4, 1, "other"},
    {">", is_ordered, 4, 1, "other"},
    {"in", is_ordered, 6, 1, "seq"},
    {"integer", is_kind, IS_WHOLE, 0, ""},
    {"iterable", is_kind, IS_ITERABLE, 0, ""},
    {"le", is_ordered, 3, 1, "other"},
    {"<=", is_ordered, 3, 1, "other"},
    {"lower", is_case, LOWER, 0, ""},
    {"lt", is_ordered, 2, 1, "other"},
    {"lessthan", is_ordered, 2, 1, "other"},
    {"<", is_ordered, 2, 1, "other"},
    {"mapping", is_kind, IS_MAPPING, 0, ""},
    {"ne", is_ordered, 1, 1, "other"},
    {"!=", is_ordered, 1, 1, "other"},
    {"none", is_kind, IS_NONE, 0, ""},
    {"number", is_kind, IS_NUMBER, 0, ""},
    {"odd", is_divisible, 1, 0, ""},
    {"sameas", is_same, 0, 1, "other"},
    {"sequence", is_kind, IS_SEQUENCE, 0, ""},
    {"string", is_kind, IS_TEXT, 0, ""},
    {"test", is_row, 1, 0, ""},
    {"true", is_kind, IS_TRUE, 0, ""},
    {"undefined", is_kind, IS_UNDEFINED, 0, ""},
    {"upper", is_case, UPPER, 0, ""},
    {NULL},
};

static const Row *find_row(bool test, const char *name) { return row_in(test ? tests : filters, name); }

/* ---- methods and functions ---- */

/* split, rsplit: at white space or at a text, from one end, at most so many times. */
BUILTIN(do_split) {
    List *out = new_list(w, 0);
    const bool white = a[0].kind <= NONE, right = which == RIGHT;
    int64_t most = whole_of(w, a[1], -1);
    if (!white && !need_text(w, a[0]).n) wrong(w, "split() needs a separator");
    Value rest = white ? strip(w, v, missing, right ? RIGHT : LEFT) : v;
    for (; (rest.n || !white) && most; most--) {
        size_t begin = 0, end = 0;
        if (white) {
            while (!right && begin < rest.n && !is_space(char_at(rest, begin))) begin += char_length(rest, begin);
            for (begin = right ? rest.n : begin; right && begin; begin = char_before(rest, begin))
                if (is_space(char_at(rest, char_before(rest, begin)))) break;
            if (begin == (right ? 0 : rest.n)) break;
            end = begin;
        } else {
            begin = right ? find_last(w, rest, a[0], rest.n) : find(w, rest, a[0], 0);
            if (begin == SIZE_MAX) break;
            end = begin + a[0].n;
        }
        push(w, out, right ? part_of(rest, end, rest.n - end) : part_of(rest, 0, begin));
        rest = right ? part_of(rest, 0, begin) : part_of(rest, end, rest.n - end);
        if (white) rest = strip(w, rest, missing, right ? RIGHT : LEFT);
    }
    if (white && most) rest = strip(w, rest, missing, LEFT | RIGHT);
    if (rest.n || !white) push(w, out, rest);
    return right ? of_list(LIST, do_reverse(w, 0, of_list(LIST, out), a, all).list) : of_list(LIST, out);
}
BUILTIN(do_ends) { /* startswith, endswith */
    const List *list = a[0].kind == TUPLE ? a[0].list : &(List){.item = a, .n = 1};
    for (size_t i = 0; i < list->n; i++) {
        const Value part = need_text(w, list->item[i]);
        if (part.n <= v.n && !memcmp(v.data + (which == LEFT ? 0 : v.n - part.n), part.data, part.n))
            return boolean(true);
    }
    return boolean(false);
}
BUILTIN(do_find) { /* find, rfind, index, rindex: the number of code points before a part */
    const size_t at = which & RIGHT ? find_last(w, v, need_text(w, a[0]), v.n) : find(w, v, need_text(w, a[0]), 0);
    if (at == SIZE_MAX && which & 4) wrong(w, "index() finds nothing");
    return whole(at == SIZE_MAX ? -1 : (int64_t)count_chars(w, part_of(v, 0, at)));
}
BUILTIN(do_count) {
    int64_t n = 0;
    const Value part = need_text(w, a[0]);
    if (!part.n) return whole((int64_t)count_chars(w, v) + 1);
    for (size_t at = 0; (at = find(w, v, part, at)) != SIZE_MAX; at += part.n) n++;
    return whole(n);
}
BUILTIN(do_remove) { /* removeprefix, removesuffix */
    const size_t n = truth(do_ends(w, which, v, a, all)) ? a[0].n : 0;
    return part_of(v, which == LEFT ? n : 0, v.n - n);
}
BUILTIN(is_letters) { /* all characters are of these categories: isdigit and the like */
    static const char *const categories[] = {"Nd", "L", "LN"};
    for (size_t i = 0; i < v.n; i += char_length(v, i)) {
        const char *category = utf8proc_category_string(char_at(v, i));
        const bool fits = which == 3 ? is_space(char_at(v, i))
                                     : strchr(categories[which], *category) && (which || category[1] == 'd');
        if (!fits) return boolean(false);
    }
    return boolean(v.n);
}
/* text.format(): fields {}, {0}, {name}, with a path and a shape. */
BUILTIN(do_format) {
    Buffer b = {0};
    size_t used = 0;
    reserve(w, &b, v.n);
    for (size_t i = 0; i < v.n; i++) {
        const char c = v.data[i];
        if ((c == '{' || c == '}') && i + 1 < v.n && v.data[i + 1] == c)
            i++;
        else if (c == '{') {
            const char *close = memchr(v.data + i, '}', v.n - i);
            if (!close) wrong(w, "a field of format() does not end");
            Value field = part_of(v, i + 1, (size_t)(close - v.data) - i - 1), shape = part_of(field, 0, 0);
            i = (size_t)(close - v.data);
            const char *colon = memchr(field.data, ':', field.n), *dot;
            if (colon) {
                const size_t n = (size_t)(colon - field.data);
                shape = part_of(field, n + 1, field.n - n - 1), field.n = n;
            }
            dot = memchr(field.data, '.', field.n);
            const Value first = part_of(field, 0, dot ? (size_t)(dot - field.data) : field.n);
            size_t at = 0;
            const int64_t number = first.n ? read_whole(first, &at, -1) : (int64_t)used++;
            const Value *value = number >= 0 && (size_t)number < all->n ? all->at + number : NULL;
            if (number < 0 && all->named) value = map_find(w, all->named, first);
            if (!value) wrong(w, "format() lacks an argument");
            Value shown = dot ? get_path(w, *value, part_of(field, first.n + 1, field.n - first.n - 1)) : *value;
            Shape s = {.align = is_number(shown) ? '>' : '<', .fill = text_from(w, " ", 1, true)};
            at = 0;
            if (shape.n > 1 && strchr("<>^=", shape.data[1])) s.fill = part_of(shape, 0, 1), at = 1;
            if (at < shape.n && strchr("<>^=", shape.data[at])) s.align = shape.data[at++];
            if (at < shape.n && strchr("+ ", shape.data[at])) s.sign = shape.data[at++];
            if (at < shape.n && shape.data[at] == '0') s.align = '=', s.fill = text_from(w, "0", 1, true);
            s.width = read_whole(shape, &at, 0);
            s.precision = at < shape.n && shape.data[at] == '.' ? (at++, read_whole(shape, &at, 0)) : -1;
            if (at < shape.n && strchr("sdxXoeEfFgG", shape.data[at])) s.type = shape.data[at++];
            if (at < shape.n) wrong(w, "this field of format() is not supported");
            put_shaped(w, &b, shown, s);
            continue;
        } else if (c == '}')
            wrong(w, "a '}' of format() stands alone");
        put(w, &b, part_of(v, i, 1));
    }
    return text_of(&b);
}
BUILTIN(do_get) {
    const Value *found = map_find(w, v.map, a[0]);
    return found ? *found : a[1].kind == MISSING ? none : a[1];
}
BUILTIN(do_list_find) { /* index, count of a list */
    int64_t n = 0;
    for (size_t i = 0; i < v.list->n; i++) {
        spend(w, 0);
        const bool found = equal(w, v.list->item[i], a[0]);
        if (found && !which) return whole((int64_t)i);
        n += found;
    }
    if (!which) wrong(w, "index() finds nothing");
    return whole(n);
}

struct Loop {
    const List *list;
    size_t index;
    Value changed;
};
BUILTIN(loop_cycle) {
    if (!all->n) wrong(w, "cycle() lacks an argument");
    return all->at[v.loop->index % all->n];
}
BUILTIN(loop_changed) {
    List *list = new_list(w, all->n);
    for (size_t i = 0; i < all->n; i++) push(w, list, all->at[i]);
    const Value now = of_list(TUPLE, list);
    const bool changed = !equal(w, now, v.loop->changed);
    v.loop->changed = now;
    return boolean(changed);
}
BUILTIN(make_map) { /* dict, namespace */
    Value map = new_map(w, which ? SPACE : MAP);
    const List *list = all->n ? items_of(w, all->at[0]) : new_list(w, 0);
    for (size_t i = 0; i < list->n; i++) {
        const bool from_map = all->at[0].kind == MAP;
        const List *pair = from_map ? NULL : items_of(w, list->item[i]);
        if (pair && pair->n != 2) wrong(w, "dict() needs pairs");
        map_set(w, map.map, pair ? pair->item[0] : list->item[i], pair ? pair->item[1] : all->at[0].map->value.item[i]);
    }
    for (size_t i = 0; all->named && i < all->named->key.n; i++)
        map_set(w, map.map, all->named->key.item[i], all->named->value.item[i]);
    for (size_t i = 0; which && i < map.map->key.n; i++)
        if (*c_text(w, need_text(w, map.map->key.item[i])) == '_')
            wrong(w, "a namespace stores no names that begin with _");
    return map;
}
BUILTIN(make_range) {
    const bool one = a[1].kind == MISSING;
    const int64_t first = one ? 0 : whole_of(w, a[0], 0), last = whole_of(w, a[one ? 0 : 1], 0),
                  step = whole_of(w, a[2], 1);
    List *list = new_list(w, 0);
    if (!step) wrong(w, "range() needs a step");
    for (int64_t i = first; (step > 0 ? i < last : i > last) && !__builtin_add_overflow(i, step, &i);) {
        if (list->n == MOST_RANGE) wrong(w, "range() gives more than %d numbers", MOST_RANGE);
        push(w, list, whole(i - step));
    }
    char text[90];
    const int n = snprintf(text, sizeof text, step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
                           (long long)first, (long long)last, (long long)step);
    list->view = c_text(w, (Value){TEXT, .data = text, .n = (size_t)n});
    return of_list(VIEW, list);
}
BUILTIN(do_raise) { wrong(w, "%s", c_text(w, to_text(w, a[0]))); }
BUILTIN(do_strftime) {
    char text[1000];
    const size_t n = strftime(text, sizeof text, c_text(w, need_text(w, a[0])), w->now);
    return text_from(w, text, n, true);
}

static const Row text_methods[] = {
    {"strip", do_strip, LEFT | RIGHT, 0, "chars"},
    {"lstrip", do_strip, LEFT, 0, "chars"},
    {"rstrip", do_strip, RIGHT, 0, "chars"},
    {"split", do_split, LEFT, 0, "sep maxsplit"},
    {"rsplit", do_split, RIGHT, 0, "sep maxsplit"},
    {"splitlines", do_splitlines, 0, 0, "keepends"},
    {"startswith", do_ends, LEFT, 1, "prefix"},
    {"endswith", do_ends, RIGHT, 1, "suffix"},
    {"removeprefix", do_remove, LEFT, 1, "prefix"},
    {"removesuffix", do_remove, RIGHT, 1, "suffix"},
    {"replace", do_replace, 1, 2, "old new count"},
    {"upper", change_case, UPPER, 0, ""},
    {"lower", change_case, LOWER, 0, ""},
    {"title", change_case, TITLE, 0, ""},
    {"capitalize", change_case, CAPITALIZED, 0, ""},
    {"join", method_join, 0, 1, "iterable"},
    {"find", do_find, LEFT, 1, "sub"},
    {"rfind", do_find, RIGHT, 1, "sub"},
    {"index", do_find, 4 | LEFT, 1, "sub"},
    {"rindex", do_find, 4 | RIGHT, 1, "sub"},
    {"count", do_count, 0, 1, "sub"},
    {"format", do_format, 0, ANY, NULL},
    {"isdigit", is_letters, 0, 0, ""},
    {"isalpha", is_letters, 1, 0, ""},
    {"isalnum", is_letters, 2, 0, ""},
    {"isspace", is_letters, 3, 0, ""},
    {"isupper", is_case, UPPER, 0, ""},
    {"islower", is_case, LOWER, 0, ""},
    {NULL},
};
static const Row map_methods[] = {{"items", do_items, 2, 0, ""},  {"keys", do_items, 0, 0, ""},
                                  {"values", do_items, 1, 0, ""}, {"get", do_get, 0, 1, "key default"},
                                  {"copy", do_same, 0, 0, ""},    {NULL}};
static const Row list_methods[] = {{"index", do_list_find, 0, 1, "value"},
                                   {"count", do_list_find, 1, 1, "value"},
                                   {"copy", do_list, 0, 0, ""},
                                   {NULL}};
static const Row loop_methods[] = {
    {"cycle", loop_cycle, 0, ANY, NULL}, {"changed", loop_changed, 0, ANY, NULL}, {NULL}};
static const Row functions[] = {
    {"range", make_range, 0, 1, "start stop step"}, {"dict", make_map, 0, ANY, NULL},
    {"namespace", make_map, 1, ANY, NULL},          {"raise_exception", do_raise, 0, 1, "message"},
    {"strftime_now", do_strftime, 0, 1, "format"},  {NULL}};

/* ---- attributes, items, arithmetic ---- */

static Value bound(Work *w, const Row *row, Value self, const Node *macro, struct Scope *scope) {
    Function *f = take(w, sizeof *f);
    *f = (Function){row, self, macro, scope};
    return (Value){FUNCTION, .function = f};
}

static Value loop_attribute(const Loop *l, const char *name) {
    const int64_t n = (int64_t)l->list->n, i = (int64_t)l->index;
    const struct {
        const char *name;
        int64_t value;
    } numbers[] = {{"index", i + 1}, {"index0", i}, {"revindex", n - i}, {"revindex0", n - i - 1},
                   {"length", n},    {"depth", 1},  {"depth0", 0}};
    for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
        if (!strcmp(name, numbers[k].name)) return whole(numbers[k].value);
    if (!strcmp(name, "first") || !strcmp(name, "last")) return boolean(*name == 'f' ? !i : i + 1 == n);
    if (!strcmp(name, "previtem") && i) return l->list->item[i - 1];
    if (!strcmp(name, "nextitem") && i + 1 < n) return l->list->item[i + 1];
    return undefined("an attribute of loop");
}

/* v.name: methods count before the keys of a mapping. The sandbox hides what would change a value. */
static Value get_attribute(Work *w, Value v, Value name) {
    static const char hidden[] = "clear fromkeys pop popitem setdefault update";
    const char *s = c_text(w, name);
    const Row *row = NULL;
    if (v.kind == UNDEFINED) wrong(w, "'%s' is undefined", v.name);
    if (v.kind == LOOP && !row_in(loop_methods, s)) return loop_attribute(v.loop, s);
    if (v.kind == TUPLE && v.list->view && (!strcmp(s, "grouper") || !strcmp(s, "list")))
        return v.list->item[*s == 'l'];
    if (v.kind == MAP) row = row_in(map_methods, s);
    if (v.kind == TEXT) row = row_in(text_methods, s);
    if (v.kind == LIST || v.kind == TUPLE) row = row_in(list_methods, s);
    if (v.kind == LOOP) row = row_in(loop_methods, s);
    if (row) return bound(w, row, v, NULL, NULL);
    const Value *found =
        v.kind == SPACE || (v.kind == MAP && !text_listed(hidden, s)) ? map_find(w, v.map, name) : NULL;
    return found ? *found : undefined(s);
}

static Value get_item(Work *w, Value v, Value key) {
    if (v.kind == UNDEFINED) wrong(w, "'%s' is undefined", v.name);
    if (v.kind == MAP) {
        const Value *found = map_find(w, v.map, key);
        if (found) return *found;
    }
    if (key.kind == TEXT) {
        const Value found = v.kind == MAP ? undefined(c_text(w, key)) : missing;
        const bool method = v.kind != MAP || row_in(map_methods, c_text(w, key));
        return method ? get_attribute(w, v, key) : found;
    }
    if ((key.kind == WHOLE || key.kind == BOOL) &&
        (v.kind == TEXT || v.kind == LIST || v.kind == TUPLE || v.kind == VIEW)) {
        const int64_t n = (int64_t)(v.kind == TEXT ? count_chars(w, v) : v.list->n);
        const int64_t i = key.whole < 0 ? key.whole + n : key.whole;
        if (i >= 0 && i < n && v.kind != TEXT) return v.list->item[i];
        if (i >= 0 && i < n) return slice_of(w, v, whole(i), whole(i + 1), missing);
    }
    return undefined("an item");
}

static Value slice_of(Work *w, Value v, Value from, Value to, Value step) {
    if (v.kind == UNDEFINED) wrong(w, "'%s' is undefined", v.name);
    if (v.kind != TEXT && v.kind != LIST && v.kind != TUPLE && v.kind != VIEW)
        wrong(w, "a %s has no slices", kind_name(v));
    const int64_t n = (int64_t)(v.kind == TEXT ? count_chars(w, v) : v.list->n);
    const int64_t by = step.kind <= NONE ? 1 : whole_of(w, step, 1), least = by < 0 ? -1 : 0, most = by < 0 ? n - 1 : n;
    int64_t ends[2] = {by < 0 ? n - 1 : 0, by < 0 ? -1 : n};
    if (!by) wrong(w, "a slice needs a step");
    for (int i = 0; i < 2; i++) {
        const Value given = i ? to : from;
        if (given.kind <= NONE && given.kind != UNDEFINED) continue;
        const int64_t end = whole_of(w, given, 0), at = end < 0 ? end + n : end;
        ends[i] = at < least ? least : at > most ? most : at;
    }
    if (v.kind == TEXT && by == 1) {
        size_t at[2] = {0, 0};
        for (int i = 0; i < 2; i++)
            for (int64_t k = 0; k < ends[i]; k++) at[i] += char_length(v, at[i]);
        return part_of(v, at[0], at[1] > at[0] ? at[1] - at[0] : 0);
    }
    const List *list = items_of(w, v);
    List *out = new_list(w, 0);
    for (int64_t i = ends[0]; by > 0 ? i < ends[1] : i > ends[1]; i += by) push(w, out, list->item[i]);
    if (v.kind == TEXT) return do_join(w, 0, of_list(LIST, out), (Value[]){missing, missing}, NULL);
    return of_list(v.kind, out);
}

static Value repeated(Work *w, Value v, Value times) {
    Buffer b = {0};
    List *list = new_list(w, 0);
    const int64_t n = whole_of(w, times, 0);
    reserve(w, &b, 0);
    for (int64_t i = 0; i < n && length_of(v); i++) {
        spend(w, length_of(v));
        if (v.kind == TEXT) put(w, &b, v);
        for (size_t k = 0; v.kind != TEXT && k < v.list->n; k++) push(w, list, v.list->item[k]);
    }
    return v.kind == TEXT ? text_of(&b) : of_list(v.kind, list);
}

static bool repeats(Value v, Value times) {
    return (v.kind == TEXT || v.kind == LIST || v.kind == TUPLE) && (times.kind == WHOLE || times.kind == BOOL);
}

static Value of_reals(Work *w, const char *operator, double x, double y) {
    const bool divides = strchr("/%", *operator) != NULL;
    if (divides && y == 0) wrong(w, "a division by zero");
    if (!strcmp(operator, "**")) return real(pow(x, y));
    if (*operator== '%') return real(x - floor(x / y) * y);
    if (!strcmp(operator, "//")) return real(floor(x / y));
    return real(*operator== '+' ? x + y : * operator== '-' ? x - y : * operator== '*' ? x * y : x / y);
}

static Value of_wholes(Work *w, const char *operator, int64_t x, int64_t y) {
    int64_t z = 1;
    bool too_large = false;
    if (!strcmp(operator, "**")) {
        for (; y && !too_large && (x < -1 || x > 1 || z == 1); y--)
            too_large = __builtin_mul_overflow(z, x, &z), spend(w, 0);
        if (y && x == -1) z = y % 2 ? -z : z;
    } else if (*operator== '/' || * operator== '%') {
        if (!y) wrong(w, "a division by zero");
        too_large = y == -1 && x == INT64_MIN;
        const int64_t rest = too_large || y == -1 ? 0 : x % y, below = rest && (rest < 0) != (y < 0);
        z = too_large ? 0 : *operator== '%' ? rest + below * y : x / y - below;
    } else {
        too_large = *operator== '+'    ? __builtin_add_overflow(x, y, &z)
                    : * operator== '-' ? __builtin_sub_overflow(x, y, &z)
                                       : __builtin_mul_overflow(x, y, &z);
    }
    if (too_large) wrong(w, "a whole number needs more than 64 bits");
    return whole(z);
}

static Value add(Work *w, const char *operator, Value a, Value b) {
    if (a.kind == UNDEFINED || b.kind == UNDEFINED)
        wrong(w, "'%s' is undefined", a.kind == UNDEFINED ? a.name : b.name);
    if (*operator== '%' && a.kind == TEXT) return print(w, a, b);
    if (*operator== '+' && a.kind == b.kind &&(a.kind == TEXT || a.kind == LIST || a.kind == TUPLE)) {
        Buffer text = {0};
        spend(w, length_of(a) + length_of(b));
        if (a.kind == TEXT) {
            reserve(w, &text, a.n + b.n);
            put(w, &text, a), put(w, &text, b);
            return text_of(&text);
        }
        List *list = new_list(w, a.list->n + b.list->n);
        for (size_t i = 0; i < a.list->n; i++) push(w, list, a.list->item[i]);
        for (size_t i = 0; i < b.list->n; i++) push(w, list, b.list->item[i]);
        return of_list(a.kind, list);
    }
    if (!strcmp(operator, "*") && repeats(a, b)) return repeated(w, a, b);
    if (!strcmp(operator, "*") && repeats(b, a)) return repeated(w, b, a);
    if (!is_number(a) || !is_number(b) || *operator== '~')
        wrong(w, "%s does not go with %s and %s", operator, kind_name(a), kind_name(b));
    const bool divided = !strcmp(operator, "/") || (!strcmp(operator, "**") && b.kind != REAL && b.whole < 0);
    if (a.kind == REAL || b.kind == REAL || divided || a.digits || b.digits) {
        if (a.kind != REAL && b.kind != REAL && !divided) wrong(w, "a whole number needs more than 64 bits");
        Value result = of_reals(w, operator, number_of(a), number_of(b));
        return result.own = a.own && b.own, result;
    }
    Value result = of_wholes(w, operator, a.whole, b.whole);
    return result.own = a.own && b.own, result;
}

/* ---- the evaluator ---- */

typedef struct Binding Binding;
struct Binding {
    const char *name;
    Value value;
    Binding *next;
};
typedef struct Scope Scope;
struct Scope {
    Scope *outer;
    Binding *first;
};

static void set_variable(Work *w, Scope *scope, const char *name, Value v) {
    Binding *b = scope->first;
    while (b && b->name != name) b = b->next;
    if (!b) {
        b = take(w, sizeof *b);
        *b = (Binding){name, v, scope->first};
        scope->first = b;
    }
    b->value = v;
}

static Value get_variable(Work *w, const Scope *scope, const char *name) {
    spend(w, 0);
    for (; scope; scope = scope->outer)
        for (const Binding *b = scope->first; b; b = b->next)
            if (b->name == name) return b->value;
    const Row *row = row_in(functions, name);
    return row && (w->now || row->run != do_strftime) ? bound(w, row, none, NULL, NULL) : undefined(name);
}

typedef enum { NEXT, BROKEN, CONTINUED } Flow;
static Flow run(Work *w, Scope *scope, const Node *list);
static Value eval(Work *w, Scope *scope, const Node *node);

/* The text that statements write. */
static Value written(Work *w, Scope *scope, const Node *list) {
    Buffer text = {0}, *outer = w->out;
    reserve(w, &text, 0);
    w->out = &text;
    run(w, &(Scope){scope, NULL}, list);
    w->out = outer;
    return text_of(&text);
}

static Args eval_arguments(Work *w, Scope *scope, const Node *list) {
    List *values = new_list(w, 0);
    Dict *named = NULL;
    for (; list; list = list->next) {
        const Value v = eval(w, scope, list->a);
        const char *name = list->name;
        if (!name) {
            push(w, values, v);
        } else if (!strcmp(name, "*")) {
            const List *more = items_of(w, v);
            for (size_t i = 0; i < more->n; i++) push(w, values, more->item[i]);
        } else {
            if (!named) named = new_map(w, MAP).map;
            if (strcmp(name, "**"))
                map_set(w, named, text_from(w, name, strlen(name), true), v);
            else if (v.kind != MAP)
                wrong(w, "** needs a mapping");
            for (size_t i = 0; v.kind == MAP && !strcmp(name, "**") && i < v.map->key.n; i++)
                map_set(w, named, v.map->key.item[i], v.map->value.item[i]);
        }
    }
    return (Args){values->item, values->n, named};
}

/* Binds a macro's parameters, runs it, and returns the text that it writes. */
static Value call_macro(Work *w, const Function *f, const Args *args) {
    Scope *scope = take(w, sizeof *scope);
    size_t n = 0, used = 0;
    *scope = (Scope){f->scope, NULL};
    List *more = new_list(w, 0);
    Dict *extra = new_map(w, MAP).map;
    for (const Node *each = f->macro->a; each; each = each->next, n++) {
        const Value name = text_from(w, each->name, strlen(each->name), true);
        const Value *named = args->named ? map_find(w, args->named, name) : NULL;
        if (named && n < args->n) wrong(w, "a macro gets '%s' twice", each->name);
        used += named != NULL;
        const bool given = named || n < args->n;
        const Value v = n < args->n ? args->at[n] : named ? *named : undefined(each->name);
        set_variable(w, scope, each->name, given || !each->a ? v : eval(w, scope, each->a));
    }
    for (size_t i = n; i < args->n; i++) push(w, more, args->at[i]);
    for (size_t i = 0; args->named && i < args->named->key.n; i++) {
        const Value key = args->named->key.item[i];
        bool known = false;
        for (const Node *each = f->macro->a; each; each = each->next) known = known || is_text(key, each->name);
        if (known) continue;
        if (is_text(key, "caller"))
            set_variable(w, scope, w->names[CALLER], args->named->value.item[i]);
        else
            map_set(w, extra, key, args->named->value.item[i]);
    }
    if ((more->n && !f->macro->varargs) || (extra->key.n && !f->macro->extra))
        wrong(w, "the macro '%s' got an argument that it does not take", f->macro->name ? f->macro->name : "caller");
    if (f->macro->varargs) set_variable(w, scope, w->names[VARARGS], of_list(TUPLE, more));
    if (f->macro->extra) set_variable(w, scope, w->names[KWARGS], (Value){MAP, .map = extra});
    return written(w, scope, f->macro->list);
}

static Value call(Work *w, Value f, const Args *args) {
    if (f.kind == UNDEFINED) wrong(w, "'%s' is undefined, or the sandbox hides it", f.name);
    if (f.kind != FUNCTION) wrong(w, "a value of kind %s cannot be called", kind_name(f));
    enter(w);
    const Value v =
        f.function->row ? run_row(w, f.function->row, f.function->self, args) : call_macro(w, f.function, args);
    leave(w);
    return v;
}

static Value eval_compare(Work *w, Scope *scope, const Node *node) {
    Value left = eval(w, scope, node->a);
    for (const Node *with = node->list; with; with = with->next) {
        const Value right = eval(w, scope, with->a);
        w->line = node->line;
        if (!ordered(w, with->name, left, right)) return boolean(false);
        left = right;
    }
    return boolean(true);
}

static Value eval_literal(Work *w, Scope *scope, const Node *node) {
    const Value map = new_map(w, MAP);
    List *list = new_list(w, 0);
    for (const Node *each = node->list; each; each = each->next)
        if (node->type != NEW_MAP)
            push(w, list, eval(w, scope, each));
        else
            map_set(w, map.map, eval(w, scope, each->a), eval(w, scope, each->b));
    return node->type == NEW_MAP ? map : of_list(node->type == NEW_LIST ? LIST : TUPLE, list);
}

static Value eval_operator(Work *w, Scope *scope, const Node *node) {
    Value a = eval(w, scope, node->a);
    if (node->type == NEGATIVE || node->type == POSITIVE) {
        const bool own = a.own;
        a = add(w, "*", a, whole(node->type == NEGATIVE ? -1 : 1));
        if (!is_number(a)) wrong(w, "a sign needs a number, not a %s", kind_name(a));
        return a.own = own, a;
    }
    const Value b = eval(w, scope, node->b);
    w->line = node->line;
    if (*node->name != '~') return add(w, node->name, a, b);
    return add(w, "+", to_text(w, a), to_text(w, b));
}

static Value eval_applied(Work *w, Scope *scope, const Node *node) {
    const Value of = eval(w, scope, node->a);
    const Args args = eval_arguments(w, scope, node->list);
    w->line = node->line;
    if (node->type == CALL) return call(w, of, &args);
    if (!node->row) wrong(w, "there is no filter or test '%s'", node->name);
    const Value v = run_row(w, node->row, of, &args);
    return node->type == IS ? boolean(truth(v)) : v;
}

static Value eval_optional(Work *w, Scope *scope, const Node *node) { return node ? eval(w, scope, node) : missing; }

static Value eval_node(Work *w, Scope *scope, const Node *node) {
    Value a;
    switch (node->type) {
    case CONSTANT: return node->value;
    case VARIABLE: return get_variable(w, scope, node->name);
    case ATTRIBUTE:
        a = eval(w, scope, node->a);
        w->line = node->line;
        return get_attribute(w, a, node->value);
    case ITEM: a = eval(w, scope, node->a); return get_item(w, a, eval(w, scope, node->b));
    case SLICE:
        a = eval(w, scope, node->a);
        return slice_of(w, a, eval_optional(w, scope, node->b), eval_optional(w, scope, node->c),
                        eval_optional(w, scope, node->list));
    case CALL:
    case FILTER:
    case IS: return eval_applied(w, scope, node);
    case NOT: return boolean(!truth(eval(w, scope, node->a)));
    case AND:
    case OR: a = eval(w, scope, node->a); return truth(a) == (node->type == OR) ? a : eval(w, scope, node->b);
    case COMPARE: return eval_compare(w, scope, node);
    case CHOICE:
        if (truth(eval(w, scope, node->a))) return eval(w, scope, node->b);
        return node->c ? eval(w, scope, node->c) : undefined("the missing else");
    case NEW_LIST:
    case NEW_TUPLE:
    case NEW_MAP: return eval_literal(w, scope, node);
    default: return eval_operator(w, scope, node);
    }
}

static Value eval(Work *w, Scope *scope, const Node *node) {
    enter(w);
    spend(w, 0);
    const Value v = eval_node(w, scope, node);
    leave(w);
    return v;
}

static void assign(Work *w, Scope *scope, const Node *target, Value v) {
    if (target->type == VARIABLE) {
        set_variable(w, scope, target->name, v);
    } else if (target->type == ATTRIBUTE) {
        const Value space = eval(w, scope, target->a);
        if (space.kind != SPACE) wrong(w, "only attributes of a namespace can be set");
        if (*target->name == '_') wrong(w, "a namespace stores no names that begin with _");
        map_set(w, space.map, target->value, v);
    } else {
        const List *list = items_of(w, v);
        size_t i = 0;
        for (const Node *each = target->list; each; each = each->next, i++)
            assign(w, scope, each, i < list->n ? list->item[i] : missing);
        if (i != list->n) wrong(w, "%zu values cannot be assigned to %zu variables", list->n, i);
    }
}

static Flow run_for(Work *w, Scope *scope, const Node *node) {
    List *items = items_of(w, eval(w, scope, node->b));
    Flow flow = NEXT;
    if (node->c) { /* the condition sees the item, but no loop */
        List *kept = new_list(w, items->n);
        for (size_t i = 0; i < items->n; i++) {
            Scope inner = {scope, NULL};
            assign(w, &inner, node->a, items->item[i]);
            if (truth(eval(w, &inner, node->c))) push(w, kept, items->item[i]);
        }
        items = kept;
    }
    Loop *loop = take(w, sizeof *loop);
    *loop = (Loop){items, 0, missing};
    for (; loop->index < items->n && flow != BROKEN; loop->index++) {
        Scope *inner = take(w, sizeof *inner); /* a macro may keep it */
        *inner = (Scope){scope, NULL};
        set_variable(w, inner, w->names[LOOP_NAME], (Value){LOOP, .loop = loop});
        assign(w, inner, node->a, items->item[loop->index]);
        flow = run(w, inner, node->list);
    }
    return items->n ? NEXT : run(w, &(Scope){scope, NULL}, node->d);
}

/* The text that a block writes, through its filters, which begin with a variable without a name. */
static Value filtered(Work *w, Scope *scope, const Node *filters_of, const Node *list) {
    Scope inner = {scope, NULL};
    set_variable(w, &inner, NULL, written(w, scope, list));
    return eval(w, &inner, filters_of);
}

static Flow run_node(Work *w, Scope *scope, const Node *node) {
    Scope inner = {scope, NULL};
    Value v;
    switch (node->type) {
    case WRITE: put_value(w, w->out, eval(w, scope, node->a), false); return NEXT;
    case IF: return run(w, scope, truth(eval(w, scope, node->a)) ? node->list : node->c);
    case FOR: return run_for(w, scope, node);
    case SET:
        v = node->b ? eval(w, scope, node->b) : filtered(w, scope, node->c, node->list);
        assign(w, scope, node->a, v);
        return NEXT;
    case MACRO: set_variable(w, scope, node->name, bound(w, NULL, none, node, scope)); return NEXT;
    case CALL_BLOCK: {
        const Value f = eval(w, scope, node->b->a);
        Args args = eval_arguments(w, scope, node->b->list);
        Dict *named = args.named ? (Dict *)(uintptr_t)args.named : new_map(w, MAP).map;
        map_set(w, named, text_from(w, "caller", 6, true), bound(w, NULL, none, node, scope));
        args.named = named;
        put_value(w, w->out, call(w, f, &args), false);
        return NEXT;
    }
    case FILTER_BLOCK: put_value(w, w->out, filtered(w, scope, node->a, node->list), false); return NEXT;
    case WITH:
        for (const Node *set = node->a; set; set = set->next) assign(w, &inner, set->a, eval(w, &inner, set->b));
        return run(w, &inner, node->list);
    case BREAK: return BROKEN;
    default: return CONTINUED;
    }
}

static Flow run(Work *w, Scope *scope, const Node *list) {
    Flow flow = NEXT;
    enter(w);
    for (; list && flow == NEXT; list = list->next) {
        spend(w, 0);
        w->line = list->line;
        flow = run_node(w, scope, list);
    }
    leave(w);
    return flow;
}

/* ---- templates ---- */

struct Jinja {
    Chunk *chunks;
    const Node *body;
    const char *const *names;
    size_t n;
};

Jinja *jinja_parse(const char *source, size_t n, Error *e) {
    Work w = {.code = BAD_MODEL, .e = e, .line = 1};
    Jinja *t = allocate_zero(1, sizeof *t);
    LocalBytes text = {0};
    bytes_text(&text, "");
    for (size_t i = 0; i < n; i++) /* \r\n and \r become \n; a line break at the end is dropped */
        if (source[i] != '\n' || !i || source[i - 1] != '\r')
            bytes_add(&text, source[i] == '\r' ? "\n" : source + i, 1);
    if (text.n && text.data[text.n - 1] == '\n') text.n--;
    if (utf8_check(source, n) < n) {
        fail(e, BAD_MODEL, "chat template: it is not UTF-8");
    } else if (!setjmp(w.failed)) {
        Parser p = {.w = &w, .begin = text_from(&w, text.data, text.n, true).data};
        p.end = p.begin + text.n;
        for (int i = 0; i < FIXED_NAMES; i++) intern(&p, fixed_names[i], strlen(fixed_names[i]));
        lex(&p);
        w.line = 1;
        t->body = parse_body(&p, "");
        t->names = p.name, t->n = p.names, t->chunks = w.chunks;
        return t;
    }
    release(w.chunks);
    free(t);
    return NULL;
}

void jinja_free(Jinja *t) {
    if (t) release(t->chunks);
    free(t);
}

/* Sets those variables of a JSON object that the template names. */
static void set_variables(Work *w, Scope *scope, const Jinja *t, const cJSON *json, bool own) {
    const cJSON *each;
    cJSON_ArrayForEach(each, json) {
        for (size_t i = 0; i < t->n; i++)
            if (!strcmp(t->names[i], each->string)) set_variable(w, scope, t->names[i], from_json(w, each, own));
    }
}

bool jinja_render(const Jinja *t, const cJSON *own, const cJSON *given, const struct tm *now, Marked *out, Error *e) {
    Buffer text = {0};
    Work w = {.code = USAGE, .e = e, .line = 1, .now = now, .out = &text, .names = t->names};
    Scope outer = {NULL, NULL}, scope = {&outer, NULL};
    const bool ok = !setjmp(w.failed);
    if (ok) {
        set_variables(&w, &outer, t, own, true);
        set_variables(&w, &outer, t, given, false);
        run(&w, &scope, t->body);
        bytes_add(&out->text, text.data, text.n);
        bytes_add(&out->own, text.by, text.n);
    }
    release(w.chunks);
    return ok;
}
