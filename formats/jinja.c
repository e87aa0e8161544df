/* jinja.c: an interpreter of the Jinja that chat templates use (jinja.palletsprojects.com/templates). A parser makes a
 * tree of few kinds of nodes, and an evaluator walks it. Operators, filters, tests and methods are all functions: some
 * of them in C, the others, in `prelude`, in Jinja itself. Values are what JSON has, with Python's meaning. A text is
 * an array of code points, each of which knows whether the template wrote it or it came from outside, so whatever is
 * done to a text keeps that. A template is as hostile as any file: steps, depth and bytes are bounded. All memory is
 * taken from an arena, so an error may leave by longjmp. Refused: recursive loops, inheritance, includes, HTML. */
#include "jinja.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { MOST_BYTES = 1 << 28, MOST_STACK = 1 << 19, MOST_RANGE = 100000, DIGITS = 17, CHUNK = 1 << 16 };

/* Kinds of values. VIEW: the keys, values or items of a mapping. STREAM: what filters such as map return, which can be
 * read once. SPACE: a namespace. */
enum { UNDEFINED, NONE, BOOL, WHOLE, REAL, TEXT, LIST, TUPLE, RANGE, VIEW, STREAM, MAP, SPACE, LOOP, FUNCTION };
static const char *const kinds[] = {"undefined", "None", "bool",      "int",  "float",     "str",  "list",    "tuple",
                                    "range",     "view", "generator", "dict", "namespace", "loop", "function"};

typedef uint32_t Char; /* a code point and, if the template wrote it, OWN */
enum { OWN = 1 << 30, POINT = OWN - 1 };

typedef struct Function Function;
typedef struct List List;
typedef struct {
    int kind;
    bool own; /* of a number: the template wrote or computed it */
    union {
        struct {
            int64_t whole;      /* BOOL, too */
            const char *digits; /* of one that needs more than 64 bits; else NULL */
        };
        double real;
        struct { /* a text, or the name of what is undefined */
            const Char *at;
            size_t n;
        };
        List *list;
        Function *function;
    };
} Value;

struct List { /* of a mapping, namespace, loop or scope: a key, its value, the next key, ... */
    Value *item;
    size_t n, room;
    List *outer;       /* of a scope */
    const char *shown; /* how Python names a view or a range; "group" of a tuple that groupby made */
};

typedef struct { /* a text that grows */
    Char *at;
    size_t n, room;
} Buffer;

/* ---- memory and errors ---- */

typedef struct Chunk Chunk;
struct Chunk {
    Chunk *next;
    max_align_t data[];
};

typedef struct { /* a template that is being parsed or rendered */
    Chunk *chunks;
    char *free; /* `left` bytes of the first chunk */
    size_t left, bytes;
    int64_t steps, most_steps;
    char *stack;    /* where it began */
    int line, code; /* code: of an error */
    Error *e;
    jmp_buf failed;
    Buffer *out;   /* what the template writes goes here, */
    List *yielded; /* what a list of the prelude gets */
    Value result;  /* what a function of the prelude returns */
    const struct tm *now;
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

/* Counts work that grows with n code points or values. Whatever nests comes here, so this looks at the stack, too. */
static void spend(Work *w, size_t n) {
    if (w->stack - (char *)__builtin_frame_address(0) > MOST_STACK) wrong(w, "it nests too deep");
    w->steps += 1 + (int64_t)(n / 16);
    if (w->steps > w->most_steps) wrong(w, "it takes more than %lld steps", (long long)w->most_steps);
}

static void *take(Work *w, size_t n) {
    n = (n + sizeof(max_align_t) - 1) & ~(sizeof(max_align_t) - 1);
    if (n > MOST_BYTES - w->bytes) wrong(w, "it takes more than %d bytes", MOST_BYTES);
    w->bytes += n;
    spend(w, n / 16);
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

/* n items of `size` bytes with room for more. */
static void *grown(Work *w, void *items, size_t n, size_t more, size_t *room, size_t size) {
    if (n + more <= *room) return items;
    *room = n + more > 2 * n ? n + more : 2 * n;
    void *moved = take(w, *room * size);
    return n ? memcpy(moved, items, n * size) : moved;
}

/* ---- texts ---- */

static void reserve(Work *w, Buffer *b, size_t n) { b->at = grown(w, b->at, b->n, n, &b->room, sizeof *b->at); }

static void put_char(Work *w, Buffer *b, Char c) {
    reserve(w, b, 1);
    b->at[b->n++] = c;
}

static void put(Work *w, Buffer *b, Value text) {
    reserve(w, b, text.n);
    if (text.n) memcpy(b->at + b->n, text.at, text.n * sizeof *text.at);
    b->n += text.n;
}

static void put_bytes(Work *w, Buffer *b, const char *s, size_t n, bool own) {
    reserve(w, b, n);
    for (uint32_t c = 0, length; n; s += length, n -= length) {
        length = (uint32_t)abs(utf8_decode(s, n, &c));
        b->at[b->n++] = c | (own ? OWN : 0);
    }
}

static Value text_of(const Buffer *b) {
    static const Char nothing;
    return (Value){TEXT, .at = b->n ? b->at : &nothing, .n = b->n};
}

static Value text_from(Work *w, const char *s, size_t n, bool own) {
    Buffer b = {0};
    put_bytes(w, &b, s, n, own);
    return text_of(&b);
}

static Value text(Work *w, const char *s) { return text_from(w, s, strlen(s), true); }
static void put_text(Work *w, Buffer *b, const char *s) { put_bytes(w, b, s, strlen(s), true); }
static Value part(Value text, size_t from, size_t n) { return (Value){TEXT, .at = text.at + from, .n = n}; }

static size_t encode(Value text, char *out) {
    size_t n = 0;
    for (size_t i = 0; i < text.n; i++)
        n += (size_t)utf8proc_encode_char((int32_t)(text.at[i] & POINT), (utf8proc_uint8_t *)out + n);
    return n;
}

static char *c_text(Work *w, Value text) { /* as UTF-8, for messages, numbers and formats */
    char *s = take(w, 4 * text.n + 1);
    s[encode(text, s)] = 0;
    return s;
}

/* A code point, or 0 behind the end. */
static int32_t point(Value text, size_t i) { return i < text.n ? (int32_t)(text.at[i] & POINT) : 0; }

static bool one_of(int32_t c, const char *chars) { return c > 0 && c < 128 && strchr(chars, c); }

static bool is_text(Value v, const char *s) {
    size_t i = 0;
    while (v.kind == TEXT && i < v.n && point(v, i) == s[i]) i++;
    return v.kind == TEXT && i == v.n && !s[i];
}

static bool stands_at(Value text, size_t from, Value part) {
    size_t i = 0;
    while (i < part.n && !((text.at[from + i] ^ part.at[i]) & POINT)) i++;
    return i == part.n;
}

/* Where `part` begins in the text from `from` on, or SIZE_MAX. */
static size_t find(Work *w, Value text, Value part, size_t from) {
    spend(w, text.n - from);
    for (; from + part.n <= text.n; from++) {
        if (part.n && point(text, from) != point(part, 0)) continue;
        spend(w, part.n);
        if (stands_at(text, from, part)) return from;
    }
    return SIZE_MAX;
}

bool is_space(int32_t c) {
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) ||
           (c >= 0x85 && (c == 0x85 || *utf8proc_category_string(c) == 'Z'));
}

/* ---- values ---- */

static const Value none = {NONE, true, {{0, NULL}}};
static Value boolean(bool b) { return (Value){BOOL, true, .whole = b, .digits = NULL}; }
static Value whole(int64_t n) { return (Value){WHOLE, true, .whole = n, .digits = NULL}; }
static Value real(double x) { return (Value){REAL, true, .real = x}; }
static Value of_list(int kind, List *list) { return (Value){kind, .list = list}; }
static Value undefined(Value name) { return (Value){UNDEFINED, .at = name.at, .n = name.n}; }
static bool is_list(Value v) { return v.kind >= LIST && v.kind <= STREAM; }
static bool is_number(Value v) { return v.kind >= BOOL && v.kind <= REAL; }

static List *new_list(Work *w) {
    List *list = take(w, sizeof *list);
    *list = (List){0};
    return list;
}

static void push(Work *w, List *list, Value v) {
    list->item = grown(w, list->item, list->n, 1, &list->room, sizeof v);
    list->item[list->n++] = v;
}

static Value pair_of(Work *w, Value a, Value b) {
    List *pair = new_list(w);
    push(w, pair, a), push(w, pair, b);
    return of_list(TUPLE, pair);
}

static double number_of(Value v) {
    return v.kind == REAL ? v.real : v.digits ? strtod(v.digits, NULL) : (double)v.whole;
}

static size_t length_of(Value v) { return v.kind == TEXT ? v.n : v.kind == MAP ? v.list->n / 2 : v.list->n; }

static bool truth(Value v) {
    if (v.kind <= NONE) return false;
    if (is_number(v)) return number_of(v) != 0;
    return v.kind == STREAM || v.kind > MAP || length_of(v);
}

static Value *map_find(Work *w, const List *map, Value key);

/* 0: they are equal. Else < 0 or > 0 or, if there is no order, an error if it is asked for. */
static int compare(Work *w, Value a, Value b, bool order) {
    int result = 0;
    spend(w, a.kind == TEXT ? a.n : 0);
    if (is_number(a) && is_number(b)) {
        if (a.kind == REAL || b.kind == REAL || (order && (a.digits || b.digits)))
            return (number_of(a) > number_of(b)) - (number_of(a) < number_of(b));
        if (a.digits || b.digits) return !same(a.digits, b.digits);
        return (a.whole > b.whole) - (a.whole < b.whole);
    }
    if (order && (a.kind != b.kind || a.kind < TEXT || a.kind > TUPLE))
        wrong(w, "'%s' and '%s' cannot be ordered", kinds[a.kind], kinds[b.kind]);
    if (a.kind != b.kind || a.kind <= NONE) return a.kind != b.kind;
    if (a.kind > MAP) return a.list != b.list;
    const size_t n = length_of(a), m = length_of(b);
    if (!order && n != m) return 1;
    for (size_t i = 0; i < n && i < m && !result; i++) {
        if (a.kind == TEXT) {
            result = point(a, i) - point(b, i);
        } else if (a.kind == MAP) {
            const Value *other = map_find(w, b.list, a.list->item[2 * i]);
            result = !other || compare(w, a.list->item[2 * i + 1], *other, false);
        } else {
            result = compare(w, a.list->item[i], b.list->item[i], false);
            if (result && order) result = compare(w, a.list->item[i], b.list->item[i], true);
        }
    }
    return result ? result : (n > m) - (n < m);
}

static bool equal(Work *w, Value a, Value b) {
    if (a.kind == TEXT && b.kind == TEXT) {
        if (a.n == b.n && a.n > 15) spend(w, a.n);
        return a.n == b.n && stands_at(a, 0, b);
    }
    return !compare(w, a, b, false);
}

static Value *map_find(Work *w, const List *map, Value key) {
    spend(w, map->n);
    for (size_t i = 0; i < map->n; i += 2)
        if (equal(w, map->item[i], key)) return map->item + i + 1;
    return NULL;
}

static void check_key(Work *w, Value key) {
    spend(w, 0);
    if (key.kind == LIST || key.kind == MAP) wrong(w, "a %s cannot be a key", kinds[key.kind]);
    for (size_t i = 0; key.kind == TUPLE && i < key.list->n; i++) check_key(w, key.list->item[i]);
}

static void map_set(Work *w, List *map, Value key, Value value) {
    check_key(w, key);
    Value *known = map_find(w, map, key);
    if (known)
        *known = value;
    else
        push(w, map, key), push(w, map, value);
}

/* The values that a loop over v sees; not to be changed. A stream gives them once. */
static List *items_of(Work *w, Value v) {
    List *list = new_list(w);
    if (v.kind == TEXT) {
        for (size_t i = 0; i < v.n; i++) push(w, list, part(v, i, 1));
    } else if (v.kind == MAP) {
        for (size_t i = 0; i < v.list->n; i += 2) push(w, list, v.list->item[i]);
    } else if (is_list(v)) {
        *list = (List){.item = v.list->item, .n = v.list->n, .room = v.list->n};
        if (v.kind == STREAM) v.list->n = 0;
    } else if (v.kind != UNDEFINED) {
        wrong(w, "a value of kind %s cannot be iterated", kinds[v.kind]);
    }
    return list;
}

static List *pairs_of(Work *w, const List *map) {
    List *list = new_list(w);
    for (size_t i = 0; i < map->n; i += 2) push(w, list, pair_of(w, map->item[i], map->item[i + 1]));
    return list;
}

/* Sorts pairs by their first values; equal ones keep their order. */
static void sort(Work *w, List *pairs, bool down) {
    for (size_t i = 0, low, high; i < pairs->n; i++) {
        const Value moved = pairs->item[i];
        for (low = 0, high = i; low < high;) {
            const size_t middle = (low + high) / 2;
            const int order = compare(w, *moved.list->item, *pairs->item[middle].list->item, true);
            if (down ? order > 0 : order < 0)
                high = middle;
            else
                low = middle + 1;
        }
        spend(w, i - low);
        memmove(pairs->item + low + 1, pairs->item + low, (i - low) * sizeof moved);
        pairs->item[low] = moved;
    }
}

/* ---- JSON to values, values to Python's texts and to JSON ---- */

static Value from_json(Work *w, const cJSON *json, bool own) {
    static const char roles[] = "system developer user assistant tool";
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
    const cJSON *each;
    List *list = new_list(w);
    cJSON_ArrayForEach(each, json) {
        if (cJSON_IsObject(json)) push(w, list, text_from(w, each->string, strlen(each->string), own));
        push(w, list, from_json(w, each, own));
    }
    return of_list(cJSON_IsObject(json) ? MAP : LIST, list);
}

typedef struct { /* how values are written */
    bool json, ascii, sorted;
    Value comma, colon, indent; /* indent: what a level adds, or none */
} Style;

/* As repr() writes it: the shortest digits that give v again, or `most` of them. */
static void put_real(Work *w, Buffer *b, Value v, bool json, int most) {
    char digits[40];
    snprintf(digits, sizeof digits, "%.*e", most - 1, v.real);
    v.real = strtod(digits, NULL);
    int precision = 0;
    do snprintf(digits, sizeof digits, "%.*e", precision, v.real);
    while (strtod(digits, NULL) != v.real && ++precision < 17);
    const char *exponent = strchr(digits, 'e');
    const int power = exponent ? atoi(exponent + 1) : 0, decimals = precision > power ? precision - power : 0;
    if (exponent && power >= -4 && power < most - 1)
        snprintf(digits, sizeof digits, decimals ? "%.*f" : "%.*f.0", decimals, v.real);
    if (!exponent && json) /* inf, nan */
        snprintf(digits, sizeof digits, "%s", isnan(v.real) ? "NaN" : v.real < 0 ? "-Infinity" : "Infinity");
    put_bytes(w, b, digits, strlen(digits), v.own);
}

/* A text between quotes: as JSON, or as Python's repr(). */
static void put_quoted(Work *w, Buffer *b, Value v, const Style *style) {
    static const char escaped[] = "\\\n\r\t\f\b", letters[] = "\\nrtfb";
    const Value apostrophe = text(w, "'"), quotes = text(w, "\"");
    const bool json = style->json;
    const bool twice = json || (find(w, v, apostrophe, 0) < v.n && find(w, v, quotes, 0) >= v.n);
    const char quote = twice ? '"' : '\'';
    put(w, b, twice ? quotes : apostrophe);
    for (size_t i = 0; i < v.n; i++) {
        const int32_t c = point(v, i);
        const char *category = utf8proc_category_string(c);
        const bool shown = c == ' ' || (*category != 'C' && *category != 'Z');
        char code[32] = "";
        if (c == quote || (one_of(c, escaped) && (json || !one_of(c, "\f\b"))))
            snprintf(code, sizeof code, "\\%c", c == quote ? quote : letters[strchr(escaped, c) - escaped]);
        else if (json && style->ascii && c > 0xFFFF)
            snprintf(code, sizeof code, "\\u%04x\\u%04x", 0xD7C0 + (c >> 10), 0xDC00 + (c & 0x3FF));
        else if (json ? c < 32 || (style->ascii && c > 126) : !shown)
            snprintf(code, sizeof code, c > 0xFFFF ? "\\U%08x" : json || c > 0xFF ? "\\u%04x" : "\\x%02x", c);
        *code ? put_bytes(w, b, code, strlen(code), v.at[i] & OWN) : put_char(w, b, v.at[i]);
    }
    put(w, b, twice ? quotes : apostrophe);
}

static void put_break(Work *w, Buffer *b, const Style *style, int level) {
    if (style->indent.kind != TEXT) return;
    put_text(w, b, "\n");
    for (; level; level--) put(w, b, style->indent);
}

static void put_value(Work *w, Buffer *b, Value v, const Style *style, int level);

static void put_items(Work *w, Buffer *b, Value v, const Style *style, int level) {
    const bool map = v.kind == MAP, tuple = v.kind == TUPLE && !style->json;
    List *list = map ? pairs_of(w, v.list) : v.list;
    if (style->sorted && map) sort(w, list, false);
    put_text(w, b, map ? "{" : tuple ? "(" : "[");
    for (size_t i = 0; i < list->n; i++) {
        const Value *item = map ? list->item[i].list->item : list->item + i;
        Buffer key = {0};
        if (i) put(w, b, style->comma);
        put_break(w, b, style, level + 1);
        if (map) {
            put_value(w, &key, *item, style, level + 1);
            style->json && item->kind != TEXT ? put_quoted(w, b, text_of(&key), style) : put(w, b, text_of(&key));
            put(w, b, style->colon);
        }
        put_value(w, b, item[map], style, level + 1);
    }
    if (list->n) put_break(w, b, style, level);
    put_text(w, b, map ? "}" : !tuple ? "]" : list->n == 1 ? ",)" : ")");
}

/* Appends json.dumps(v) or repr(v). */
static void put_value(Work *w, Buffer *b, Value v, const Style *style, int level) {
    static const char *const words[][2] = {{"None", "null"}, {"False", "false"}, {"True", "true"}};
    const bool json = style->json;
    char digits[24];
    spend(w, 0);
    if (v.kind == TEXT) {
        put_quoted(w, b, v, style);
    } else if (v.kind == REAL) {
        put_real(w, b, v, json, DIGITS);
    } else if (v.kind >= NONE && v.kind <= WHOLE) {
        snprintf(digits, sizeof digits, "%lld", (long long)v.whole);
        const char *shown = v.kind != WHOLE ? words[v.kind == NONE ? 0 : 1 + v.whole][json]
                            : v.digits      ? v.digits
                                            : digits;
        put_bytes(w, b, shown, strlen(shown), v.own);
    } else if (v.kind == LIST || v.kind == TUPLE || v.kind == MAP) {
        put_items(w, b, v, style, level);
    } else if (!json && (v.kind == RANGE || v.kind == VIEW)) {
        put_text(w, b, v.list->shown);
        if (v.kind == RANGE) return;
        put_text(w, b, "(");
        put_items(w, b, of_list(LIST, v.list), style, level);
        put_text(w, b, ")");
    } else if (!json && v.kind == UNDEFINED) {
        put_text(w, b, "Undefined");
    } else {
        wrong(w, "a value of kind %s has no %s", kinds[v.kind], json ? "JSON" : "text");
    }
}

static Value repr(Work *w, Value v) {
    Buffer b = {0};
    put_value(w, &b, v, &(Style){.comma = text(w, ", "), .colon = text(w, ": "), .indent = none}, 0);
    return text_of(&b);
}

static Value to_text(Work *w, Value v) { return v.kind == TEXT ? v : v.kind == UNDEFINED ? text(w, "") : repr(w, v); }

/* ---- nodes ---- */

/* A function of evaluated arguments; how: which of several it is. */
typedef Value Builtin(Work *w, const char *how, const Value *a, size_t n);
#define BUILTIN(name) static Value name(Work *w, const char *how, const Value *a, size_t n)

/* Expressions: a CALL is of run or, without it, a or, without that, value, each with the arguments in list; CHOICE: b
 * if a else c; WRITTEN: the text that list writes; MACRO: a function with parameters a, which are variables with their
 * defaults in a, and the body list; EACH, in the prelude: the list of what YIELD a gives in a loop. Statements: WRITE
 * a; IF a: list, else c; FOR a in b if d: list, else c; SET a = b; SCOPE: list in a scope of its own; RETURN a. */
enum { CONSTANT, VARIABLE, CALL, AND, OR, CHOICE, WRITTEN, MACRO, EACH };
enum { WRITE = EACH + 1, IF, FOR, SET, SCOPE, BREAK, CONTINUE, RETURN, YIELD };

typedef struct Node Node;
struct Node {
    int type;
    int line;    /* 0: of the prelude */
    Value value; /* of an argument, whose expression is a: its name, "*", "**" or none; of a macro: its name */
    Builtin *run;
    const char *how;
    Node *a, *b, *c, *d, *list, *next;
};

struct Function {
    const Node *node; /* value: its name; a: its parameters; run or list: what it does */
    List *scope;      /* around that of a macro's variables */
    Value self;       /* of a method: what it is applied to */
};

/* All functions by their names, made once for all templates. */
static List functions;

static Value builtin(Work *w, const char *kind, Value name) {
    Buffer b = {0};
    put_text(w, &b, kind);
    put(w, &b, name);
    const Value *found = map_find(w, &functions, text_of(&b));
    return found ? *found : undefined(text_of(&b));
}

/* ---- the lexer: within a tag, one token at a time ---- */

typedef struct {
    Work *w;
    const char *begin, *s; /* the template, which ends with a NUL, and what follows the current token */
    const char *token;     /* the current one; "": the template ends */
    const char *close;     /* of the tag: %} or }}, and ; in the prelude, which is all one tag behind another */
    int brackets;          /* open ones */
    bool prelude;
} Parser;

static const char *skip_space(const char *s) {
    uint32_t c;
    for (int n; *s && (n = utf8_decode(s, strnlen(s, 4), &c)) > 0 && is_space((int32_t)c); s += n) continue;
    return s;
}

static void advance(Parser *p, const char *to) {
    for (; p->s < to; p->s++) p->w->line += *p->s == '\n';
}

/* What follows the end of a tag at s, which may begin with a sign; NULL: it does not end here. A line break behind a
 * block or comment belongs to it. */
static const char *tag_end(const char *s, const char *end) {
    const char *t = s + (*s == '-' || (*s == '+' && *end != '}'));
    if (!begins(t, end)) return NULL;
    t += strlen(end);
    return *s == '-' ? skip_space(t) : t + (*end != '}' && *s != '+' && *t == '\n');
}

static const char *word_end(const char *s) {
    while (isalnum((unsigned char)*s) || *s == '_' || *s & 0x80) s++;
    return s;
}

static bool is_quote(char c) { return c == '"' || c == '\''; }

static const char *number_end(const char *s) {
    const bool whole = s[-1] == '.'; /* as in list.0.1 */
    s = word_end(s);
    if (!whole && *s == '.' && isdigit((unsigned char)s[1])) s = word_end(s + 1);
    return strchr("eE", s[-1]) && (*s == '-' || *s == '+') ? word_end(s + 1) : s;
}

/* Reads the next token. */
static void next(Parser *p) {
    static const char *const pairs[] = {"**", "//", "==", "!=", ">=", "<="};
    advance(p, skip_space(p->s));
    const char *begin = p->s, *s = begin, *close = p->brackets ? NULL : tag_end(s, p->close);
    if (isdigit((unsigned char)*s)) {
        s = number_end(s);
    } else if (word_end(s) > s) {
        s = word_end(s);
    } else if (is_quote(*s)) {
        for (s++; *s && *s != *begin; s++) s += *s == '\\' && s[1];
        if (!*s++) wrong(p->w, "a text does not end");
    } else if (*s && !close) {
        for (int i = 0; i < 6 && s == begin; i++) s += begins(s, pairs[i]);
        if (s == begin && !strchr("+-/*%~[](){}=<>.:|,", *s++)) wrong(p->w, "unexpected character '%c'", *begin);
        p->brackets += strchr("([{", *begin) ? 1 : strchr(")]}", *begin) && p->brackets ? -1 : 0;
    }
    char *copy = take(p->w, (size_t)(s - begin) + 1);
    memcpy(copy, begin, (size_t)(s - begin));
    copy[s - begin] = 0;
    p->token = close ? p->close : copy;
    advance(p, close ? close : s);
}

/* Is the current token this, a name, the end of the tag? */
static bool is(const Parser *p, const char *text) { return !strcmp(p->token, text); }
static bool is_name(const Parser *p) { return word_end(p->token) > p->token && !isdigit((unsigned char)*p->token); }
static bool closes(const Parser *p) { return is(p, p->close); }

static bool skip(Parser *p, const char *text) {
    const bool there = is(p, text);
    if (there) next(p);
    return there;
}

static void need(Parser *p, bool there, const char *expected) {
    if (!there && !*p->token) wrong(p->w, "the template ends where %s should stand", expected);
    if (!there) wrong(p->w, "'%.40s' stands where %s should stand", p->token, expected);
}

static void expect(Parser *p, const char *text) { need(p, skip(p, text), text); }

static Value take_name(Parser *p) {
    need(p, is_name(p), "a name");
    const Value name = text(p->w, p->token);
    next(p);
    return name;
}

/* ---- the parser: expressions ---- */

static Node *new_node(Parser *p, int type, Node *a, Node *b) {
    Node *node = take(p->w, sizeof *node);
    *node = (Node){.type = type, .line = p->prelude ? 0 : p->w->line, .value = none, .a = a, .b = b};
    return node;
}

static Node *append(Parser *p, Node **list, Node *node) {
    for (; *list; list = &(*list)->next) spend(p->w, 0);
    return *list = node;
}

static Node *constant(Parser *p, Value v) {
    Node *node = new_node(p, CONSTANT, NULL, NULL);
    node->value = v;
    return node;
}

static void add(Parser *p, Node *call, Value name, Node *argument) {
    append(p, &call->list, new_node(p, CONSTANT, argument, NULL))->value = name;
}

/* run(a, b), or fewer arguments where they are NULL. */
static Node *operation(Parser *p, Builtin *run, const char *how, Node *a, Node *b) {
    Node *node = new_node(p, CALL, NULL, NULL);
    node->run = run;
    node->how = how;
    if (a) add(p, node, none, a);
    if (b) add(p, node, none, b);
    return node;
}

static Node *parse_expression(Parser *p);
static Node *parse_or(Parser *p);
static Node *parse_unary(Parser *p);
static Node *parse_list(Parser *p, Node *(*parse)(Parser *p));
static Builtin arithmetic, concatenate, ordered, negated, with_sign, attribute, item, slice, sequence, mapping;

/* The character that an escape has as `digits` digits at *s, which moves behind them. */
static Char parse_code(Parser *p, const char **s, size_t digits, int base) {
    char code[9] = "", *end;
    strncat(code, *s, digits);
    const long c = strtol(code, &end, base);
    if (base == 16 && (size_t)(end - code) < digits) wrong(p->w, "a text has an escape that is too short");
    if (c < 0 || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000)) wrong(p->w, "a text has an escape of no character");
    *s += end - code;
    return (Char)c | OWN;
}

/* String literals that follow each other, with the escapes of Python. */
static Node *parse_texts(Parser *p) {
    static const char letters[] = "ntr\\'\"abfv", meanings[] = "\n\t\r\\'\"\a\b\f\v";
    Buffer b = {0};
    for (; is_quote(*p->token); next(p)) {
        for (const char *s = p->token + 1; s[1];) {
            const char c = *s == '\\' ? s[1] : 0, *letter = c ? strchr(letters, c) : NULL, *plain = s;
            if (letter) put_char(p->w, &b, (Char)meanings[letter - letters] | OWN);
            if (letter || c == '\n') {
                s += 2;
            } else if (c && strchr("xuU01234567", c)) {
                s += isdigit((unsigned char)c) ? 1 : 2;
                put_char(p->w, &b, parse_code(p, &s, c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 3, c < '8' ? 8 : 16));
            } else {
                for (s++; s[1] && *s != '\\'; s++) continue;
                put_bytes(p->w, &b, plain, (size_t)(s - plain), true);
            }
        }
    }
    return constant(p, text_of(&b));
}

static Node *parse_number(Parser *p) {
    char digits[400], *end = digits;
    for (const char *s = p->token; *s && end < digits + sizeof digits - 1; s++)
        if (*s != '_') *end++ = *s;
    *end = 0;
    next(p);
    const char letter = *digits == '0' ? (char)tolower(digits[1]) : 0;
    const int base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
    const bool is_real = base == 10 && strpbrk(digits, ".eE");
    errno = 0;
    const Value v = is_real ? real(strtod(digits, &end)) : whole(strtoll(digits + (base == 10 ? 0 : 2), &end, base));
    if (*end || (errno && !is_real)) wrong(p->w, "a malformed number: %.40s", digits);
    return constant(p, v);
}

static Node *parse_target(Parser *p);

/* What stands behind `for`. */
static Node *parse_loop(Parser *p, int type) {
    Node *node = new_node(p, type, parse_list(p, parse_target), NULL);
    expect(p, "in");
    node->b = parse_list(p, parse_or);
    if (skip(p, "if")) node->d = parse_expression(p);
    if (is(p, "recursive")) wrong(p->w, "recursive loops are not supported");
    return node;
}

/* Adds to a node what stands in brackets up to `close`: values and, in a mapping, the value of each behind a colon; in
 * a call also name=value, *values and **mapping. */
static Node *parse_items(Parser *p, Node *node, const char *close) {
    while (!skip(p, close)) {
        const char *behind = skip_space(p->s);
        const bool named = is_name(p) && *behind == '=' && behind[1] != '=';
        Value name = none;
        if (*close == ')' && (named || is(p, "*") || is(p, "**"))) {
            name = text(p->w, p->token);
            next(p);
            if (named) next(p);
        }
        Node *value = parse_expression(p);
        if (p->prelude && *close == ']' && skip(p, "for")) {
            node = parse_loop(p, EACH);
            node->list = new_node(p, YIELD, value, NULL);
            need(p, is(p, close), close);
            continue;
        }
        add(p, node, name, value);
        if (*close == '}') {
            expect(p, ":");
            add(p, node, none, parse_expression(p));
        }
        if (!is(p, close)) expect(p, ",");
    }
    return node;
}

static Node *parse_subscript(Parser *p, Node *of) {
    Node *node = operation(p, item, "", of, NULL), *nothing = constant(p, none);
    add(p, node, none, is(p, ":") ? nothing : parse_expression(p));
    while (skip(p, ":")) {
        node->run = slice;
        add(p, node, none, is(p, ":") || is(p, "]") ? nothing : parse_expression(p));
    }
    expect(p, "]");
    return node;
}

static Node *parse_postfix(Parser *p, Node *node) {
    for (;;) {
        if (skip(p, "."))
            node = isdigit((unsigned char)*p->token) ? operation(p, item, "", node, parse_number(p))
                                                     : operation(p, attribute, "", node, constant(p, take_name(p)));
        else if (skip(p, "["))
            node = parse_subscript(p, node);
        else if (skip(p, "("))
            node = parse_items(p, new_node(p, CALL, node, NULL), ")");
        else
            return node;
    }
}

/* A call of a filter or test, whose name may have dots. An unknown one is an error only if it runs. */
static Node *parse_named(Parser *p, const char *kind, Node *of) {
    Node *node = new_node(p, CALL, NULL, NULL);
    Buffer name = {0};
    for (put(p->w, &name, take_name(p)); skip(p, "."); put(p->w, &name, take_name(p))) put_text(p->w, &name, ".");
    node->value = builtin(p->w, kind, text_of(&name));
    add(p, node, none, of);
    return node;
}

static Node *parse_test(Parser *p, Node *of) {
    const bool is_not = skip(p, "not");
    Node *node = parse_named(p, "is_", of);
    if (is(p, "is")) wrong(p->w, "tests cannot be chained");
    if (skip(p, "("))
        parse_items(p, node, ")");
    else if ((word_end(p->token) > p->token && !text_listed("else or and", p->token)) || is_quote(*p->token) ||
             is(p, "[") || is(p, "{"))
        add(p, node, none, parse_unary(p));
    return is_not ? operation(p, negated, "", node, NULL) : node;
}

static Node *parse_filters(Parser *p, Node *node) {
    for (;;) {
        if (skip(p, "|")) {
            node = parse_named(p, "filter_", node);
            if (skip(p, "(")) parse_items(p, node, ")");
        } else if (skip(p, "is")) {
            node = parse_test(p, node);
        } else if (is(p, "(")) {
            node = parse_postfix(p, node);
        } else {
            return node;
        }
    }
}

static Node *parse_name(Parser *p) {
    static const char *const words[] = {"true", "True", "false", "False", "none", "None"};
    Node *node = new_node(p, VARIABLE, NULL, NULL);
    node->value = take_name(p);
    for (int i = 0; i < 6; i++)
        if (is_text(node->value, words[i])) return constant(p, i < 4 ? boolean(i < 2) : none);
    return node;
}

static Node *parse_primary(Parser *p) {
    if (is_name(p)) return parse_name(p);
    if (is_quote(*p->token)) return parse_texts(p);
    if (isdigit((unsigned char)*p->token)) return parse_number(p);
    if (skip(p, "[")) return parse_items(p, operation(p, sequence, "list", NULL, NULL), "]");
    if (skip(p, "{")) return parse_items(p, operation(p, mapping, "", NULL, NULL), "}");
    need(p, skip(p, "("), "an expression");
    Node *node = is(p, ")") ? operation(p, sequence, "tuple", NULL, NULL) : parse_list(p, parse_expression);
    expect(p, ")");
    return node;
}

static Node *parse_unary(Parser *p) {
    const bool minus = is(p, "-"), sign = skip(p, "-") || skip(p, "+");
    Node *node = sign ? operation(p, with_sign, minus ? "-" : "+", parse_unary(p), NULL) : parse_primary(p);
    return parse_postfix(p, node);
}

/* Operators between two values, from the weakest to the strongest, as far as they are at least as strong as `least`.
 * a < b <= c means a < b and b <= c. */
enum { OR_LEVEL, AND_LEVEL, COMPARISON, LEVELS = 7 };
static Node *parse_operators(Parser *p, int least) {
    static const char *const levels[LEVELS] = {"or", "and", "== != < <= > >= in not", "+ -", "~", "* / // %", "**"};
    Node *node, *right = NULL;
    if (least <= COMPARISON && skip(p, "not"))
        node = operation(p, negated, "", parse_operators(p, COMPARISON), NULL);
    else
        node = parse_filters(p, parse_unary(p));
    for (int level = 0, before = 0;; before = level) {
        for (level = 0; level < LEVELS && !text_listed(levels[level], p->token);) level++;
        if (level < least || level == LEVELS) break;
        const char *name = is(p, "not") ? "not in" : p->token;
        next(p);
        if (*name == 'n') expect(p, "in");
        Node *left = level == COMPARISON && before == COMPARISON ? right : node;
        right = parse_operators(p, level + 1);
        Builtin *run = level == COMPARISON ? ordered : *name == '~' ? concatenate : arithmetic;
        Node *one = level < COMPARISON ? new_node(p, level == OR_LEVEL ? OR : AND, left, right)
                                       : operation(p, run, name, left, right);
        node = left == node ? one : new_node(p, AND, node, one);
    }
    return node;
}

static Node *parse_or(Parser *p) { return parse_operators(p, OR_LEVEL); }

static Node *parse_expression(Parser *p) {
    Node *node = parse_or(p);
    while (skip(p, "if")) {
        node = new_node(p, CHOICE, parse_or(p), node);
        if (skip(p, "else")) node->c = parse_expression(p);
    }
    return node;
}

/* One, or a tuple of several with commas between them. */
static Node *parse_list(Parser *p, Node *(*parse)(Parser *p)) {
    Node *node = parse(p), *tuple = NULL;
    while (skip(p, ",")) {
        if (!tuple) tuple = operation(p, sequence, "tuple", node, NULL);
        if (closes(p) || is(p, ")") || is(p, "=") || is(p, "in")) break;
        add(p, tuple, none, parse(p));
    }
    return tuple ? tuple : node;
}

/* ---- the parser: statements ---- */

/* What a value is assigned to: a variable, an attribute of a namespace, or several in brackets. */
static Node *parse_target(Parser *p) {
    if (skip(p, "(")) {
        Node *node = parse_list(p, parse_target);
        expect(p, ")");
        return node;
    }
    Node *node = parse_name(p);
    need(p, node->type == VARIABLE, "a variable");
    return skip(p, ".") ? operation(p, attribute, "", node, constant(p, take_name(p))) : node;
}

/* The text before a tag, without the white space that the tag's sign takes or, before a block or comment that begins a
 * line, the indentation; NULL: there is none. */
static Node *parse_data(Parser *p, const char *tag) {
    const char *s = p->s, *end = tag, *line = tag;
    uint32_t c;
    while (line > s && line[-1] != '\n') line--;
    if (*tag && tag[2] == '-')
        for (end = s; (s = skip_space(s)) < tag; end = s) s += utf8_decode(s, (size_t)(tag - s), &c);
    else if (*tag && tag[2] != '+' && tag[1] != '{' && skip_space(line) == tag)
        end = line > s || s == p->begin || s[-1] == '\n' ? line : tag;
    const Value data = text_from(p->w, p->s, (size_t)(end - p->s), true);
    advance(p, tag);
    return data.n ? new_node(p, WRITE, constant(p, data), NULL) : NULL;
}

/* What follows the block of this one word that begins at `tag`; NULL: none does. */
static const char *word_tag(const char *tag, const char *word) {
    const char *s = skip_space(tag + 2 + (tag[2] == '-' || tag[2] == '+'));
    return tag[1] == '%' && begins(s, word) ? tag_end(skip_space(s + strlen(word)), "%}") : NULL;
}

static const char *find_tag(const char *s, const char *kinds) {
    while (*s && !(*s == '{' && s[1] && strchr(kinds, s[1]))) s++;
    return s;
}

static Node *parse_statement(Parser *p);

/* A comment, a raw block or another tag; NULL: it ends a body, as parse_body() says. */
static Node *parse_tag(Parser *p, const char *end) {
    const char *behind = word_tag(p->s, "raw"), *tag;
    Node *node = new_node(p, SCOPE, NULL, NULL);
    if (p->s[1] == '#') {
        for (tag = p->s + 2; *tag && !tag_end(tag, "#}");) tag++;
        if (!*tag) wrong(p->w, "a comment does not end");
        advance(p, tag_end(tag, "#}"));
    } else if (behind) {
        for (tag = find_tag(behind, "%"); *tag && !word_tag(tag, "endraw");) tag = find_tag(tag + 1, "%");
        if (!*tag) wrong(p->w, "raw does not end");
        advance(p, behind);
        node->list = parse_data(p, tag);
        advance(p, word_tag(tag, "endraw"));
    } else {
        const bool prints = !p->prelude && p->s[1] == '{';
        p->close = p->prelude ? ";" : prints ? "}}" : "%}";
        p->brackets = 0;
        if (!p->prelude) advance(p, p->s + 2 + (p->s[2] == '-' || p->s[2] == '+'));
        next(p);
        if (*end && !prints && (is(p, end) || is(p, "else") || is(p, "elif"))) return NULL;
        node = prints ? new_node(p, WRITE, parse_list(p, parse_expression), NULL) : parse_statement(p);
        need(p, closes(p), p->close);
    }
    return node;
}

/* Statements up to a block that begins with `end`, else or elif, which is the current token then; "": up to the end. */
static Node *parse_body(Parser *p, const char *end) {
    Node *list = NULL, **last = &list;
    for (;;) {
        *last = p->prelude ? NULL : parse_data(p, find_tag(p->s, "{%#"));
        if (*last) last = &(*last)->next;
        if (!*p->s && *end) wrong(p->w, "the template ends where %s should stand", end);
        if (!*p->s || !(*last = parse_tag(p, end))) break;
        last = &(*last)->next;
    }
    return list;
}

/* The end of a block's first tag, its body, and the word that ends it. */
static Node *parse_block(Parser *p, const char *end) {
    need(p, closes(p), p->close);
    Node *list = parse_body(p, end);
    expect(p, end);
    return list;
}

/* The same for if and for, with what they have behind elif or else. */
static Node *parse_branches(Parser *p, Node *node, const char *end) {
    need(p, closes(p), p->close);
    node->list = parse_body(p, end);
    if (node->type == IF && skip(p, "elif")) {
        node->c = parse_branches(p, new_node(p, IF, parse_list(p, parse_or), NULL), end);
    } else if (skip(p, "else")) {
        node->c = parse_block(p, end);
    } else {
        expect(p, end);
    }
    return node;
}

static Node *parse_set(Parser *p) {
    Node *target = parse_list(p, parse_target), *text = new_node(p, WRITTEN, NULL, NULL);
    if (skip(p, "=")) return new_node(p, SET, target, parse_list(p, parse_expression));
    Node *node = new_node(p, SET, target, parse_filters(p, text));
    text->list = parse_block(p, "endset");
    return node;
}

static Node *parse_scope(Parser *p, const char *end) {
    Node *node = new_node(p, SCOPE, NULL, NULL);
    while (!closes(p)) {
        Node *set = append(p, &node->list, new_node(p, SET, parse_target(p), NULL));
        expect(p, "=");
        set->b = parse_expression(p);
        if (!closes(p)) expect(p, ",");
    }
    append(p, &node->list, parse_block(p, end));
    return node;
}

/* Parameters in brackets. */
static Node *parse_parameters(Parser *p) {
    Node *list = NULL;
    for (expect(p, "("); !skip(p, ")");) {
        Node *each = append(p, &list, new_node(p, VARIABLE, NULL, NULL));
        each->value = take_name(p);
        if (skip(p, "=")) each->a = parse_expression(p);
        if (!is(p, ")")) expect(p, ",");
    }
    return list;
}

/* The body of a macro or call block, which takes these further arguments if it names them. */
static void parse_function(Parser *p, Node *macro, const char *end) {
    static const char *const further[] = {"caller", "varargs", "kwargs"};
    const char *body = p->s;
    macro->list =
        p->prelude && skip(p, "=") ? new_node(p, RETURN, parse_list(p, parse_expression), NULL) : parse_block(p, end);
    for (int i = 0; i < 3; i++)
        if (memmem(body, (size_t)(p->s - body), further[i], strlen(further[i])))
            append(p, &macro->a, new_node(p, VARIABLE, NULL, NULL))->value = text(p->w, further[i]);
}

/* {% call(parameters) f(arguments) %}: f gets a macro as the further argument caller. */
static Node *parse_call(Parser *p) {
    Node *macro = new_node(p, MACRO, is(p, "(") ? parse_parameters(p) : NULL, NULL), *node = parse_unary(p);
    need(p, node->type == CALL, "a call");
    macro->value = text(p->w, "caller");
    parse_function(p, macro, "endcall");
    add(p, node, macro->value, macro);
    return new_node(p, WRITE, node, NULL);
}

/* A block behind its first word, which is the current token. */
static Node *parse_statement(Parser *p) {
    if (skip(p, "if")) return parse_branches(p, new_node(p, IF, parse_list(p, parse_or), NULL), "endif");
    if (skip(p, "for")) return parse_branches(p, parse_loop(p, FOR), "endfor");
    if (skip(p, "set")) return parse_set(p);
    if (skip(p, "with")) return parse_scope(p, "endwith");
    if (skip(p, "generation")) return parse_scope(p, "endgeneration");
    if (skip(p, "call")) return parse_call(p);
    if (skip(p, "break")) return new_node(p, BREAK, NULL, NULL);
    if (skip(p, "continue")) return new_node(p, CONTINUE, NULL, NULL);
    if (p->prelude && skip(p, "return")) return new_node(p, RETURN, parse_list(p, parse_expression), NULL);
    if (p->prelude && skip(p, "write")) return new_node(p, WRITE, parse_list(p, parse_expression), NULL);
    if (skip(p, "macro")) {
        Node *name = parse_name(p), *macro = new_node(p, MACRO, parse_parameters(p), NULL);
        macro->value = name->value;
        parse_function(p, macro, "endmacro");
        return new_node(p, SET, name, macro);
    }
    if (skip(p, "filter")) {
        Node *text = new_node(p, WRITTEN, NULL, NULL), *node = parse_named(p, "filter_", text);
        if (skip(p, "(")) parse_items(p, node, ")");
        node = new_node(p, WRITE, parse_filters(p, node), NULL);
        text->list = parse_block(p, "endfilter");
        return node;
    }
    wrong(p->w, "there is no block '%.40s' here", p->token);
}

/* ---- the evaluator ---- */

typedef enum { GO_ON, BROKEN, CONTINUED, RETURNED } Flow;
static Flow run(Work *w, List *scope, const Node *list);
static Value eval(Work *w, List *scope, const Node *node);

static List *new_scope(Work *w, List *outer) { /* not a local variable, because a macro may keep it */
    List *scope = new_list(w);
    scope->outer = outer;
    return scope;
}

/* The text that statements write in a scope, unless they return something. */
static Value written(Work *w, List *scope, const Node *list) {
    Buffer text = {0}, *outer = w->out;
    w->out = &text;
    const Flow flow = run(w, scope, list);
    w->out = outer;
    return flow == RETURNED ? w->result : text_of(&text);
}

/* Evaluates arguments and adds them to values or, those with names, to `named`. */
static void eval_arguments(Work *w, List *scope, const Node *each, List *values, List *named) {
    for (; each; each = each->next) {
        const Value v = eval(w, scope, each->a), name = each->value;
        const bool map = is_text(name, "**");
        const List *more = map || is_text(name, "*") ? items_of(w, v) : NULL;
        if (map && v.kind != MAP) wrong(w, "** needs a mapping");
        for (size_t i = 0; more && i < more->n; i++)
            map ? map_set(w, named, more->item[i], v.list->item[2 * i + 1]) : push(w, values, more->item[i]);
        if (name.kind == NONE)
            push(w, values, v);
        else if (!more)
            map_set(w, named, name, v);
    }
}

/* Sets a function's parameters in its scope. Those named caller, varargs and kwargs get what others leave. */
static void bind(Work *w, const Function *f, List *scope, const List *values, List *named) {
    size_t used = 0;
    for (const Node *each = f->node->a; each; each = each->next) {
        Value v = undefined(each->value), *given = map_find(w, named, each->value);
        List *list = new_list(w);
        if (is_text(each->value, "varargs")) {
            while (used < values->n) push(w, list, values->item[used++]);
            v = of_list(TUPLE, list);
        } else if (is_text(each->value, "kwargs")) {
            *list = *named;
            *named = (List){0};
            v = of_list(MAP, list);
        } else if (used < values->n && !is_text(each->value, "caller")) {
            v = values->item[used++]; /* if it is named, too, the name is left over: an error */
        } else if (given) {           /* what is behind it moves up */
            v = *given;
            named->n -= 2;
            memmove(given - 1, given + 1, (size_t)(named->item + named->n - (given - 1)) * sizeof v);
        } else if (each->a) { /* which does not see a variable of this name outside */
            map_set(w, scope, each->value, v);
            v = eval(w, scope, each->a);
        } else if (!f->node->line) {
            wrong(w, "%s() lacks an argument", c_text(w, f->node->value));
        }
        map_set(w, scope, each->value, v);
    }
    if (used < values->n || named->n) wrong(w, "%s() got an argument that it does not take", c_text(w, f->node->value));
}

static Value call(Work *w, const Function *f, const List *values, List *named) {
    List *scope = new_scope(w, f->scope);
    bind(w, f, scope, values, named);
    Value v, *item = scope->item;
    if (f->node->run) {
        const size_t n = scope->n / 2;
        for (size_t i = 0; i < n; i++) item[i] = item[2 * i + 1];
        v = f->node->run(w, f->node->how, item, n);
    } else {
        v = written(w, scope, f->node->list);
    }
    return v;
}

static Value eval_call(Work *w, List *scope, const Node *node) {
    Value f = node->a ? eval(w, scope, node->a) : node->value;
    if (f.kind == UNDEFINED && !node->a) f = builtin(w, "", f); /* it was defined later */
    List values = {0}, named = {0};
    if (f.kind == FUNCTION && f.function->self.kind != UNDEFINED) push(w, &values, f.function->self);
    eval_arguments(w, scope, node->list, &values, &named);
    if (node->line) w->line = node->line;
    if (node->run) return node->run(w, node->how, values.item, values.n);
    if (f.kind == UNDEFINED) wrong(w, "'%s' is undefined", c_text(w, f));
    if (f.kind != FUNCTION) wrong(w, "a value of kind %s cannot be called", kinds[f.kind]);
    return call(w, f.function, &values, &named);
}

static Value get_variable(Work *w, const List *scope, Value name) {
    for (; scope; scope = scope->outer) {
        const Value *found = map_find(w, scope, name);
        if (found) return *found;
    }
    return undefined(name);
}

static Value function_of(Work *w, List *scope, const Node *node) {
    Function *f = take(w, sizeof *f);
    *f = (Function){node, scope, (Value){0}};
    return (Value){FUNCTION, .function = f};
}

static Flow run_for(Work *w, List *scope, const Node *node);
static Value eval_each(Work *w, List *scope, const Node *node) {
    List *outer = w->yielded, *list = w->yielded = new_list(w);
    run_for(w, scope, node);
    w->yielded = outer;
    return of_list(LIST, list);
}

static Value eval(Work *w, List *scope, const Node *node) {
    Value v = node->value;
    spend(w, 0);
    switch (node->type) {
    case CONSTANT: break;
    case VARIABLE: v = get_variable(w, scope, v); break;
    case CALL: v = eval_call(w, scope, node); break;
    case AND:
    case OR:
        v = eval(w, scope, node->a);
        if (truth(v) == (node->type == AND)) v = eval(w, scope, node->b);
        break;
    case CHOICE:
        if (truth(eval(w, scope, node->a)))
            v = eval(w, scope, node->b);
        else
            v = node->c ? eval(w, scope, node->c) : undefined(text(w, "the missing else"));
        break;
    case WRITTEN: v = written(w, new_scope(w, scope), node->list); break;
    case EACH: v = eval_each(w, scope, node); break;
    default: v = function_of(w, scope, node);
    }
    return v;
}

static void assign(Work *w, List *scope, const Node *target, Value v) {
    const Node *each = target->list;
    if (target->type == VARIABLE) {
        map_set(w, scope, target->value, v);
    } else if (target->run == attribute) {
        const Value space = eval(w, scope, each->a), name = each->next->a->value;
        if (space.kind != SPACE) wrong(w, "only attributes of a namespace can be set");
        if (point(name, 0) == '_') wrong(w, "a namespace stores no names that begin with _");
        map_set(w, space.list, name, v);
    } else {
        const List *list = items_of(w, v);
        size_t i = 0;
        for (; each; each = each->next, i++) assign(w, scope, each->a, i < list->n ? list->item[i] : none);
        if (i != list->n) wrong(w, "%zu values cannot be assigned to %zu variables", list->n, i);
    }
}

/* Sets what loop.NAME is at item i of a list. */
static void set_loop(Work *w, List *loop, const List *items, size_t i) {
    static const char *const names[] = {"index",  "index0", "revindex", "revindex0", "length",  "depth",
                                        "depth0", "first",  "last",     "previtem",  "nextitem"};
    const int64_t n = (int64_t)items->n, at = (int64_t)i;
    const Value before = i ? items->item[i - 1] : (Value){0}, behind = at + 1 < n ? items->item[i + 1] : (Value){0};
    const Value values[] = {whole(at + 1), whole(at), whole(n - at), whole(n - at - 1),    whole(n),
                            whole(1),      whole(0),  boolean(!i),   boolean(at + 1 == n), before,
                            behind};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        if (!i) push(w, loop, text(w, names[k])), push(w, loop, none);
        loop->item[2 * k + 1] = values[k];
    }
}

static Flow run_for(Work *w, List *scope, const Node *node) {
    List *items = items_of(w, eval(w, scope, node->b)), *kept = new_list(w), *loop = new_list(w);
    const Value name = text(w, "loop");
    Flow flow = GO_ON;
    bool ended = false;                                /* jinja2 runs else unless an iteration reached its end */
    for (size_t i = 0; node->d && i < items->n; i++) { /* the condition sees no loop */
        List *inner = new_scope(w, scope);
        assign(w, inner, node->a, items->item[i]);
        if (truth(eval(w, inner, node->d))) push(w, kept, items->item[i]);
    }
    if (node->d) items = kept;
    for (size_t i = 0; i < items->n && flow != BROKEN && flow != RETURNED; i++) {
        List *inner = new_scope(w, scope);
        set_loop(w, loop, items, i);
        map_set(w, inner, name, of_list(LOOP, loop));
        assign(w, inner, node->a, items->item[i]);
        flow = run(w, inner, node->list);
        ended |= flow == GO_ON;
    }
    if (flow == RETURNED) return flow;
    return ended ? GO_ON : run(w, new_scope(w, scope), node->c);
}

static Flow run(Work *w, List *scope, const Node *list) {
    Flow flow = GO_ON;
    for (; list && flow == GO_ON; list = list->next) {
        spend(w, 0);
        if (list->line) w->line = list->line;
        switch (list->type) {
        case WRITE: put(w, w->out, to_text(w, eval(w, scope, list->a))); break;
        case IF: flow = run(w, scope, truth(eval(w, scope, list->a)) ? list->list : list->c); break;
        case FOR: flow = run_for(w, scope, list); break;
        case SET: assign(w, scope, list->a, eval(w, scope, list->b)); break;
        case SCOPE: flow = run(w, new_scope(w, scope), list->list); break;
        case BREAK: flow = BROKEN; break;
        case CONTINUE: flow = CONTINUED; break;
        case YIELD: push(w, w->yielded, eval(w, scope, list->a)); break;
        default: w->result = eval(w, scope, list->a); flow = RETURNED;
        }
    }
    return flow;
}

/* ---- functions in C: operators ---- */

static int64_t whole_of(Work *w, Value v) {
    if ((v.kind != WHOLE && v.kind != BOOL) || v.digits) wrong(w, "a whole number is needed, not a %s", kinds[v.kind]);
    return v.whole;
}

static Value need_text(Work *w, Value v) {
    if (v.kind != TEXT) wrong(w, "a text is needed, not a value of kind %s", kinds[v.kind]);
    return v;
}

/* Several texts, lists or tuples of one kind: those of `a` in turn, `times` times. */
static Value joined(Work *w, const Value *a, size_t n, int64_t times) {
    Buffer b = {0};
    List *list = new_list(w);
    for (int64_t k = 0; k < times && n && (n > 1 || length_of(*a)); k++) {
        spend(w, 0);
        for (size_t i = 0; i < n; i++) {
            if (a[i].kind == TEXT) put(w, &b, a[i]);
            for (size_t j = 0; a[i].kind != TEXT && j < a[i].list->n; j++) push(w, list, a[i].list->item[j]);
        }
    }
    return a->kind == TEXT ? text_of(&b) : of_list(a->kind, list);
}

static double of_reals(char op, double x, double y) {
    double rest = y ? fmod(x, y) : 0; /* with the sign of y, as Python has it */
    rest = rest == 0 ? copysign(0, y) : (rest < 0) != (y < 0) ? rest + y : rest;
    switch (op) {
    case '+': return x + y;
    case '-': return x - y;
    case '*': return x * y;
    case '/': return x / y;
    case '%': return rest;
    case 'f': return rint((x - rest) / y);
    default: return pow(x, y);
    }
}

static int64_t of_wholes(Work *w, char op, __int128 x, __int128 y) {
    __int128 z = 1, rest = y ? x % y : 0;
    if (rest && (rest < 0) != (y < 0)) rest += y;
    switch (op) {
    case '+': z = x + y; break;
    case '-': z = x - y; break;
    case '*': z = x * y; break;
    case '%': z = rest; break;
    case 'f': z = (x - rest) / y; break;
    default:
        for (; y && z == (int64_t)z; y--, spend(w, 0)) z *= x;
    }
    if (z != (int64_t)z) wrong(w, "a whole number needs more than 64 bits");
    return (int64_t)z;
}

BUILTIN(arithmetic) {
    const Value x = a[0], y = a[1];
    const char op = !how[1] ? *how : *how == '/' ? 'f' : '^'; /* f: // and ^: ** */
    const bool sequence_x = x.kind >= TEXT && x.kind <= TUPLE, sequence_y = y.kind >= TEXT && y.kind <= TUPLE;
    if (x.kind == UNDEFINED || y.kind == UNDEFINED)
        wrong(w, "'%s' is undefined", c_text(w, x.kind == UNDEFINED ? x : y));
    if (op == '%' && x.kind == TEXT)
        return call(w, builtin(w, "printed", (Value){0}).function, &(List){.item = (Value[]){x, y}, .n = 2},
                    &(List){0});
    if (op == '+' && x.kind == y.kind && sequence_x) return joined(w, a, 2, 1);
    if (op == '*' && sequence_x && y.kind != REAL) return joined(w, &x, 1, whole_of(w, y));
    if (op == '*' && sequence_y && x.kind != REAL) return joined(w, &y, 1, whole_of(w, x));
    if (!is_number(x) || !is_number(y)) wrong(w, "%s does not go with %s and %s", how, kinds[x.kind], kinds[y.kind]);
    const bool whole_result = x.kind != REAL && y.kind != REAL && op != '/' && (op != '^' || y.whole >= 0);
    if (strchr("/f%", op) && number_of(y) == 0) wrong(w, "a division by zero");
    Value v = whole_result ? whole(of_wholes(w, op, whole_of(w, x), whole_of(w, y)))
                           : real(of_reals(op, number_of(x), number_of(y)));
    v.own = x.own && y.own;
    return v;
}

BUILTIN(with_sign) {
    if (!is_number(*a)) wrong(w, "a sign needs a number, not a %s", kinds[a->kind]);
    return arithmetic(w, "*", (Value[]){*a, whole(*how == '-' ? -1 : 1)}, 2);
}

BUILTIN(concatenate) { return joined(w, (Value[]){to_text(w, a[0]), to_text(w, a[1])}, 2, 1); }
BUILTIN(negated) { return boolean(!truth(*a)); }

static bool contains(Work *w, Value v, Value item) {
    if (v.kind == TEXT) return find(w, v, need_text(w, item), 0) != SIZE_MAX;
    if (v.kind == MAP) check_key(w, item);
    if (v.kind == MAP) return map_find(w, v.list, item);
    const List *list = items_of(w, v);
    size_t i = 0;
    while (i < list->n && !equal(w, list->item[i], item)) i++;
    return i < list->n;
}

BUILTIN(ordered) { /* == != < <= > >= in, not in */
    if (*how == '=' || *how == '!') return boolean(equal(w, a[0], a[1]) == (*how == '='));
    if (*how == 'i' || *how == 'n') return boolean(contains(w, a[1], a[0]) == (*how == 'i'));
    const int order = compare(w, a[0], a[1], true);
    return boolean((how[1] && !order) || (*how == '<' ? order < 0 : order > 0));
}

BUILTIN(sequence) { /* a list, a tuple, or a tuple of groupby */
    List *list = new_list(w);
    for (size_t i = 0; i < n; i++) push(w, list, a[i]);
    if (*how == 'g') list->shown = how;
    return of_list(*how == 'l' ? LIST : TUPLE, list);
}

BUILTIN(mapping) { /* of keys and values in turn */
    List *list = new_list(w);
    for (size_t i = 0; i + 1 < n; i += 2) map_set(w, list, a[i], a[i + 1]);
    return of_list(MAP, list);
}

BUILTIN(attribute) { /* methods count before the keys of a mapping; the sandbox hides what would change a value */
    static const char *const methods[] = {
        [TEXT] = "str_", [LIST] = "list_", [TUPLE] = "list_", [MAP] = "map_", [LOOP] = "loop_", [FUNCTION] = NULL};
    const Value v = a[0], name = need_text(w, a[1]);
    if (v.kind == UNDEFINED) wrong(w, "'%s' is undefined", c_text(w, v));
    if (v.kind == TUPLE && v.list->shown && (is_text(name, "grouper") || is_text(name, "list")))
        return v.list->item[is_text(name, "list")];
    const Value method = methods[v.kind] ? builtin(w, methods[v.kind], name) : undefined(name);
    if (method.kind == FUNCTION) {
        Function *bound = take(w, sizeof *bound);
        *bound = *method.function;
        bound->self = v;
        return (Value){FUNCTION, .function = bound};
    }
    const bool hidden = v.kind == MAP && text_listed("clear fromkeys pop popitem setdefault update", c_text(w, name));
    const Value *found = v.kind >= MAP && v.kind <= LOOP && !hidden ? map_find(w, v.list, name) : NULL;
    return found ? *found : undefined(name);
}

BUILTIN(item) {
    const Value v = a[0], key = a[1], *found = v.kind == MAP ? map_find(w, v.list, key) : NULL;
    if (found) return *found;
    if (key.kind == TEXT || v.kind == UNDEFINED) return attribute(w, how, (Value[]){v, key}, 2);
    if ((key.kind == WHOLE || key.kind == BOOL) && v.kind >= TEXT && v.kind <= RANGE) {
        const int64_t length = (int64_t)length_of(v), i = key.whole < 0 ? key.whole + length : key.whole;
        if (i >= 0 && i < length) return v.kind == TEXT ? part(v, (size_t)i, 1) : v.list->item[i];
    }
    return undefined(text(w, "an item"));
}

BUILTIN(slice) { /* v[from:to:step]; what is left out is none */
    const Value v = a[0];
    if (v.kind == UNDEFINED) wrong(w, "'%s' is undefined", c_text(w, v));
    if (v.kind < TEXT || v.kind > RANGE || n > 4) wrong(w, "a %s has no such slices", kinds[v.kind]);
    const int64_t length = (int64_t)length_of(v), given = n > 3 && a[3].kind != NONE ? whole_of(w, a[3]) : 1;
    const int64_t by = given > length ? length + 1 : given < -length ? -length - 1 : given, low = by < 0 ? -1 : 0;
    int64_t ends[2] = {by < 0 ? length - 1 : 0, by < 0 ? -1 : length};
    if (!by) wrong(w, "a slice needs a step");
    for (int i = 0; i < 2; i++) {
        if (a[1 + i].kind == NONE) continue;
        const int64_t end = whole_of(w, a[1 + i]), at = end < 0 ? end + length : end;
        ends[i] = at < low ? low : at > length + low ? length + low : at;
    }
    if (v.kind == TEXT && by == 1) return part(v, (size_t)ends[0], (size_t)(ends[1] > ends[0] ? ends[1] - ends[0] : 0));
    Buffer b = {0};
    List *list = new_list(w);
    for (int64_t i = ends[0]; by > 0 ? i < ends[1] : i > ends[1]; i += by)
        v.kind == TEXT ? put_char(w, &b, v.at[i]) : push(w, list, v.list->item[i]);
    return v.kind == TEXT ? text_of(&b) : of_list(v.kind == RANGE ? LIST : v.kind, list);
}

/* ---- functions in C: filters, tests, methods ---- */

static bool goes(Work *w, Value v, size_t i, Value chars) {
    return chars.kind == NONE ? is_space(point(v, i)) : find(w, need_text(w, chars), part(v, i, 1), 0) != SIZE_MAX;
}

BUILTIN(strip) { /* how: at the left, the right, or both */
    const Value v = to_text(w, a[0]);
    size_t begin = 0, end = v.n;
    while (strchr(how, 'l') && begin < end && goes(w, v, begin, a[1])) begin++;
    while (strchr(how, 'r') && begin < end && goes(w, v, end - 1, a[1])) end--;
    return part(v, begin, end - begin);
}

BUILTIN(change_case) {
    const Value v = to_text(w, *a);
    Buffer b = {0};
    for (size_t i = 0; i < v.n; i++) {
        const int32_t c = point(v, i), other = *how == 'u' ? utf8proc_toupper(c) : utf8proc_tolower(c);
        const bool sharp = *how == 'u' && c == 0xDF;
        if (sharp) put_char(w, &b, 'S' | (v.at[i] & OWN));
        put_char(w, &b, (sharp ? 'S' : (Char)other) | (v.at[i] & OWN));
    }
    return text_of(&b);
}

BUILTIN(has_only) { /* characters of these categories, as isalpha() */
    size_t i = 0;
    while (i < a->n && strchr(how, *utf8proc_category_string(point(*a, i)))) i++;
    return boolean(a->n && i == a->n);
}

BUILTIN(split) { /* at white space or at a text, at most so many times */
    const Value v = a[0], by = a[1];
    const bool white = by.kind == NONE;
    int64_t most = whole_of(w, a[2]);
    List *out = new_list(w);
    if (!white && !need_text(w, by).n) wrong(w, "split() needs a separator");
    for (size_t begin = 0, end = 0; end < v.n || !out->n; begin = end + (white ? 1 : by.n)) {
        while (white && begin < v.n && is_space(point(v, begin))) begin++;
        if (white && begin >= v.n) break;
        end = most-- == 0 ? v.n : white ? begin : find(w, v, by, begin);
        while (white && end < v.n && !is_space(point(v, end))) end++;
        if (end > v.n) end = v.n; /* there is no other */
        push(w, out, part(v, begin, end - begin));
    }
    return of_list(LIST, out);
}

BUILTIN(length) {
    const bool has = a->kind >= TEXT && a->kind <= MAP && a->kind != STREAM;
    if (!has && a->kind != UNDEFINED) wrong(w, "a %s has no length", kinds[a->kind]);
    return whole(has ? (int64_t)length_of(*a) : 0);
}

BUILTIN(list) { return of_list(LIST, items_of(w, *a)); }
BUILTIN(string) { return to_text(w, *a); }

/* What a text says as a number, or none. */
static Value read_number(Work *w, Value v, bool wanted, int base) {
    const char *s = c_text(w, strip(w, "lr", (Value[]){v, none}, 2));
    char *end;
    errno = 0;
    const int64_t n = strtoll(s, &end, base);
    if (wanted && *s && !*end && !errno) return whole(n);
    const double x = strtod(s, &end);
    return *s && !*end && !strpbrk(s, "xX(") ? real(x) : none;
}

BUILTIN(to_number) { /* how: int or float; a[1]: instead of what is none; a[2]: the base of a whole one */
    const bool wanted = *how == 'i', text = a->kind == TEXT;
    const Value v = text ? read_number(w, *a, wanted, wanted ? (int)whole_of(w, a[2]) : 10) : *a;
    if (v.kind == UNDEFINED) wrong(w, "'%s' is undefined", c_text(w, v));
    if (!is_number(v) || (wanted && v.kind == REAL && !(fabs(v.real) < 9e18))) return a[1];
    if (!wanted) return (Value){REAL, v.own && !text, .real = number_of(v)};
    return (Value){WHOLE, v.own && !text, .whole = v.kind == REAL ? (int64_t)v.real : v.whole,
                   .digits = v.kind == REAL ? NULL : v.digits};
}

/* A number as C's printf writes it with this type; without a type: as repr() does, with at most `most` digits. */
static Value digits_of(Work *w, Value v, char type, int most) {
    char of_whole[] = "%lx", of_real[] = "%.*f", digits[500];
    Buffer b = {0};
    of_whole[2] = of_real[3] = type;
    if (!type) put_real(w, &b, v, false, most < 0 ? DIGITS : most ? most : 1);
    if (!type || type == 'd') return type ? repr(w, v) : text_of(&b);
    const int length = one_of(type, "xXo")
                           ? snprintf(digits, sizeof digits, of_whole, (unsigned long)v.whole)
                           : snprintf(digits, sizeof digits, of_real, most < 0 ? 6 : most, number_of(v));
    if (length < 0 || length >= (int)sizeof digits) wrong(w, "a field is too wide");
    return text_from(w, digits, (size_t)length, v.own);
}

/* a[0] as Python's format() writes it; a[1]: [[fill]align][sign][0][width][,][.precision][type]. */
BUILTIN(formed) {
    const Value spec = need_text(w, a[1]);
    Buffer b = {0};
    const bool filled = one_of(point(spec, 1), "<>=^"), of_text = a->kind == TEXT;
    Value v = *a;
    if (!spec.n) return to_text(w, v);
    if (v.kind == BOOL) v.kind = WHOLE;
    char *s = c_text(w, part(spec, filled, spec.n - filled));
    const char given = one_of(*s, "<>=^") ? *s++ : 0, sign = one_of(*s, "+- ") ? *s++ : 0;
    const bool zero = *s == '0';
    const size_t width = isdigit((unsigned char)*s) ? strtoul(s, &s, 10) : 0;
    const bool commas = *s == ',';
    s += commas;
    const int most = *s == '.' ? (int)strtoul(s + 1, &s, 10) : -1;
    const char type = *s ? *s++ : of_text ? 's' : v.kind == REAL ? 0 : 'd';
    const char align = given ? given : of_text ? '<' : zero ? '=' : '>';
    const Value fill = filled ? part(spec, 0, 1) : text(w, zero ? "0" : " ");
    const bool fine = of_text ? type == 's' && !sign && !commas && align != '='
                      : one_of(type, "dxXo")
                          ? v.kind == WHOLE && most < 0 && (type == 'd' || !(commas || v.digits || v.whole < 0))
                          : is_number(v) && (type ? one_of(type, "eEfFgG") : most <= DIGITS);
    if (*s || !fine || width > MOST_RANGE || (commas && align == '=' && is_text(fill, "0")))
        wrong(w, "'%s' does not go with a %s", c_text(w, spec), kinds[v.kind]);
    Value shown =
        of_text ? part(v, 0, most >= 0 && (size_t)most < v.n ? (size_t)most : v.n) : digits_of(w, v, type, most);
    const bool minus = !of_text && point(shown, 0) == '-';
    const Value before = text(w, minus ? "-" : sign == '+' ? "+" : sign == ' ' ? " " : "");
    shown = part(shown, minus, shown.n - minus);
    size_t digits = 0;
    while (commas && one_of(point(shown, digits), "0123456789")) digits++;
    for (size_t i = 0; i < shown.n; i++) {
        if (i && i < digits && (digits - i) % 3 == 0) put_text(w, &b, ",");
        put_char(w, &b, shown.at[i]);
    }
    const size_t size = before.n + b.n, pad = width > size ? width - size : 0;
    const size_t left = align == '>' ? pad : align == '^' ? pad / 2 : 0, middle = align == '=' ? pad : 0;
    const Value pieces[] = {joined(w, &fill, 1, (int64_t)left), before, joined(w, &fill, 1, (int64_t)middle),
                            text_of(&b), joined(w, &fill, 1, (int64_t)(pad - left - middle))};
    return joined(w, pieces, 5, 1);
}

BUILTIN(json) { /* or repr(), of a[0], with the rest as Style has it */
    Buffer b = {0};
    put_value(w, &b, a[0], &(Style){*how, truth(a[1]), truth(a[2]), need_text(w, a[3]), need_text(w, a[4]), a[5]}, 0);
    return text_of(&b);
}

BUILTIN(view) { /* how: dict_keys, dict_values or dict_items */
    const bool items = how[5] == 'i';
    List *list = items ? pairs_of(w, a->list) : new_list(w);
    for (size_t i = how[5] == 'v'; !items && i < a->list->n; i += 2) push(w, list, a->list->item[i]);
    list->shown = how;
    return of_list(VIEW, list);
}

BUILTIN(changed) { /* loop.changed() */
    Value *before = map_find(w, a[0].list, text(w, "changed"));
    const bool is_new = !before || !equal(w, *before, a[1]);
    map_set(w, a[0].list, text(w, "changed"), a[1]);
    return boolean(is_new);
}

BUILTIN(is_kind) { /* how: a letter for each kind that is one */
    return boolean(strchr(how, "uNbiftlprvgmsoF"[a->kind]));
}

BUILTIN(is_same) { return boolean(a[0].kind == a[1].kind && equal(w, a[0], a[1])); }

BUILTIN(sorted) { /* pairs, by their first values */
    sort(w, a[0].list, truth(a[1]));
    return a[0];
}

BUILTIN(stream) { return of_list(STREAM, items_of(w, *a)); }

BUILTIN(make_map) { /* dict and namespace: of a mapping or pairs, and of named values */
    const List *given = a[0].list, *named = a[1].list, *pairs = new_list(w);
    List *map = new_list(w);
    if (given->n && given->item->kind == UNDEFINED) wrong(w, "'%s' is undefined", c_text(w, *given->item));
    if (given->n) pairs = given->item->kind == MAP ? pairs_of(w, given->item->list) : items_of(w, *given->item);
    for (size_t i = 0; i < pairs->n; i++) {
        const List *pair = items_of(w, pairs->item[i]);
        if (pair->n != 2) wrong(w, "dict() needs pairs");
        map_set(w, map, pair->item[0], pair->item[1]);
    }
    for (size_t i = 0; i < named->n; i += 2) map_set(w, map, named->item[i], named->item[i + 1]);
    for (size_t i = 0; *how == 's' && i < map->n; i += 2)
        if (point(need_text(w, map->item[i]), 0) == '_') wrong(w, "a namespace stores no names that begin with _");
    return of_list(*how == 's' ? SPACE : MAP, map);
}

BUILTIN(range) {
    const bool one = a[1].kind == NONE;
    const int64_t from = one ? 0 : whole_of(w, a[0]), to = whole_of(w, a[!one]), step = whole_of(w, a[2]);
    List *list = new_list(w);
    char shown[90];
    if (!step) wrong(w, "range() needs a step");
    for (int64_t i = from; (step > 0 ? i < to : i > to) && list->n <= MOST_RANGE; i += step) push(w, list, whole(i));
    if (list->n > MOST_RANGE) wrong(w, "range() gives more than %d numbers", MOST_RANGE);
    snprintf(shown, sizeof shown, step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)", (long long)from,
             (long long)to, (long long)step);
    list->shown = c_text(w, text(w, shown));
    return of_list(RANGE, list);
}

BUILTIN(raise_exception) { wrong(w, "%s", c_text(w, to_text(w, *a))); }

BUILTIN(strftime_now) {
    char text_of_day[1000];
    const Value format = need_text(w, *a);
    bool own = true;
    for (size_t i = 0; i < format.n; i++) own = own && format.at[i] & OWN;
    return text_from(w, text_of_day, strftime(text_of_day, sizeof text_of_day, c_text(w, format), w->now), own);
}

BUILTIN(find_builtin) { return builtin(w, "", need_text(w, *a)); }

/* Functions in C: what they take, and their names, with `how` behind a colon. */
static const struct {
    Builtin *run;
    const char *takes, *names;
} rows[] = {
    {strip, "(v, chars=none)", "filter_trim:lr str_strip:lr str_lstrip:l str_rstrip:r"},
    {change_case, "(v)", "filter_upper:u str_upper:u filter_lower:l str_lower:l"},
    {has_only, "(v)", "str_isalpha:L str_isalnum:LN str_isdigit:N"},
    {split, "(v, sep=none, maxsplit=-1)", "str_split:"},
    {length, "(v)", "filter_length: filter_count:"},
    {list, "(v)", "filter_list: list_copy:"},
    {string, "(v)", "filter_string: filter_safe:"},
    {to_number, "(v, default=0, base=10)", "filter_int:int"},
    {to_number, "(v, default=0.0)", "filter_float:float"},
    {view, "(v)", "map_items:dict_items map_keys:dict_keys map_values:dict_values"},
    {changed, "(loop, varargs)", "loop_changed:"},
    {ordered, "(v, other)",
     "is_==:== is_eq:== is_equalto:== is_!=:!= is_ne:!= is_<:< is_lt:< is_lessthan:< is_<=:<= is_le:<= "
     "is_>:> is_gt:> is_greaterthan:> is_>=:>= is_ge:>="},
    {ordered, "(v, seq)", "is_in:in"},
    {is_same, "(v, other)", "is_sameas:"},
    {is_kind, "(v)",
     "is_defined:NbiftlprvgmsoF is_undefined:u is_none:N is_boolean:b is_integer:i is_float:f is_number:bif "
     "is_string:t is_sequence:utlprm is_iterable:utlprvgmo is_mapping:m is_callable:uF is_escaped:- tuple:p"},
    {make_map, "(varargs, kwargs)", "dict:dict namespace:space"},
    {range, "(start, stop=none, step=1)", "range:"},
    {raise_exception, "(message)", "raise_exception:"},
    {strftime_now, "(format)", "strftime_now:"},
    {attribute, "(v, name)", "attribute:"}, /* from here on for the prelude alone */
    {sorted, "(pairs, reverse)", "sorted:"},
    {stream, "(list)", "stream:"},
    {sequence, "(key, items)", "group:group"},
    {formed, "(v, spec)", "formed:"},
    {json, "(v, ascii, sorted, comma, colon, indent)", "json:json repr:"},
    {find_builtin, "(name)", "builtin:"},
};

/* ---- functions in Jinja ---- */

/* A program of Jinja with a little more: the text is one tag, whose statements end with a semicolon. A macro may return
 * a value, or be an expression; [x for y in z if c] is a list. Names begin with what they are: filter_, is_ and, of
 * methods, str_, list_, map_ and loop_; others are for templates, those in `globals`, or for the prelude itself. */
static const char globals[] = "range dict namespace raise_exception strftime_now cycler joiner";
static const char prelude[] =
    "macro is_even(v) = v % 2 == 0;"
    "macro is_odd(v) = v % 2 == 1;"
    "macro is_divisibleby(v, num) = v % num == 0;"
    "macro is_true(v) = v is boolean and v;"
    "macro is_false(v) = v is boolean and not v;"
    "macro is_lower(v) = v|lower == v|string and v|upper != v|string;"
    "macro is_upper(v) = v|upper == v|string and v|lower != v|string;"
    "macro is_filter(v) = builtin('filter_' ~ v) is defined;"
    "macro is_test(v) = builtin('is_' ~ v) is defined;"

    "set str_islower, str_isupper = is_lower, is_upper;"
    "macro str_isspace(v) = v != '' and v.strip() == '';"
    "macro str_capitalize(v) = v[:1].upper() + v[1:].lower();"
    "macro cased(c) = c.upper() != c.lower();"
    "macro str_title(v) = ''.join([c.lower() if loop.index0 and cased(loop.previtem) else c.upper() for c in v]);"
    "macro several(v) = v if tuple(v) else [v + ''];"
    "macro str_startswith(v, prefix) = true in [v[:p|length] == p for p in several(prefix)];"
    "macro str_endswith(v, suffix) = true in [v[v|length - p|length:] == p for p in several(suffix)];"
    "macro str_removeprefix(v, prefix) = v[prefix|length:] if v.startswith(prefix) else v;"
    "macro str_removesuffix(v, suffix) = v[:v|length - suffix|length] if v.endswith(suffix) else v;"
    "macro str_rsplit(v, sep=none, maxsplit=-1) ="
    " [x[::-1] for x in v[::-1].split(sep[::-1] if sep else sep, maxsplit)][::-1];"
    "macro str_splitlines(v, keepends=false);"
    " set ns = namespace(v=v.replace('\\r\\n', '\\n'));"
    " for c in '\\r\\v\\f\\x1c\\x1d\\x1e\\x85\\u2028\\u2029'; set ns.v = ns.v.replace(c, '\\n'); endfor;"
    " set lines = ns.v.split('\\n');"
    " return [line + '\\n' if keepends else line for line in lines[:-1]] + (lines[-1:] if lines[-1] else []); endmacro;"
    "macro str_join(v, iterable); for x in iterable; write ('' if loop.first else v) + x; endfor; endmacro;"
    "macro str_replace(v, old, new, count=-1);"
    " if old; return new.join(v.split(old, count)); endif;"
    " for c in v; write new if count < 0 or loop.index0 < count; write c; endfor;"
    " write new if count < 0 or v|length < count; endmacro;"
    "macro str_count(v, sub) = v.split(sub)|length - 1 if sub else v|length + 1;"
    "macro str_find(v, sub) = -1 if sub not in v else v.split(sub, 1)[0]|length if sub else 0;"
    "macro str_rfind(v, sub); set at = v[::-1].find(sub[::-1]);"
    " return at if at < 0 else v|length - sub|length - at; endmacro;"
    "macro found(at) = raise_exception('index() finds nothing') if at < 0 else at;"
    "macro str_index(v, sub) = found(v.find(sub));"
    "macro str_rindex(v, sub) = found(v.rfind(sub));"
    "macro list_count(v, value) = [x for x in v if x == value]|length;"
    "macro list_index(v, value); for x in v; if x == value; return loop.index0; endif; endfor;"
    " return found(-1); endmacro;"
    "macro map_copy(v) = v;"
    "macro map_get(v, key, default=none) = v[key] if key in v else default;"
    "macro loop_cycle(loop) = varargs[loop.index0 % varargs|length];"

    /* text % values; a sign that stands for itself is the text's own */
    "macro first(v, c) = v[v.find(c):][:1];"
    "macro printed(v, values);"
    " set all = values if tuple(values) else [values];"
    " set ns = namespace(at=0, literal=true);"
    " for piece in v.split('%');"
    "  if ns.literal; write piece; set ns.literal = false;"
    "  elif not piece and not loop.last; write first(v, '%'); set ns.literal = true;"
    "  else;"
    "   set key, rest = piece[1:].split(')', 1) if piece[:1] == '(' else (none, piece);"
    "   set size = rest.lstrip('-+ 0');"
    "   set tail = size.lstrip('0123456789.');"
    "   set flags, kind = rest[:rest|length - size|length], {'r': 's', 'i': 'd'}.get(tail[:1], tail[:1]);"
    "   set x = all[ns.at] if key is none else values[key];"
    "   set x = shown(x) if tail[:1] == 'r' else x|string if kind == 's' else x|int('') if kind == 'd' and x is float "
    "else x;"
    "   set align = '<' if '-' in flags else '>' if x is string else '';"
    "   set sign = '' if x is string else '+' if '+' in flags else ' ' if ' ' in flags else '';"
    "   set zero = '0' if '0' in flags and not align else '';"
    "   write formed(x, align ~ sign ~ zero ~ size[:size|length - tail|length] ~ kind) ~ tail[1:];"
    "   set ns.at = ns.at + (1 if key is none else 0);"
    "  endif;"
    " endfor;"
    " write raise_exception('fields and values differ in number') if ns.at != all|length and values is not mapping; "
    "endmacro;"
    /* text.format(): what stands outside of fields, a field's value as its part behind the colon says, all of it */
    "macro plain(piece, v) = raise_exception('a } stands alone') if '}' in piece.replace('}}', '')"
    " else piece.replace('}}', first(v, '}')).replace('\\x01', first(v, '{'));"
    "macro str_format(v);"
    " set ns = namespace(at=0);"
    " for piece in v.replace('{{', '\\x01').split('{');"
    "  if loop.first; write plain(piece, v);"
    "  else;"
    "   set field, rest = piece.split('}', 1);"
    "   set name, spec = (field ~ ':').split(':', 1);"
    "   set first = name.split('.')[0];"
    "   set at = first if first and not first.isdigit() else first|int(ns.at);"
    "   set ns.at = ns.at + (0 if first else 1);"
    "   write raise_exception('format() lacks a value') if at not in kwargs and at not in range(varargs|length);"
    "   set value = path(kwargs[at] if at is string else varargs[at], name[first|length + 1:] or none);"
    "   write formed(value, spec[:-1]) ~ plain(rest, v);"
    "  endif;"
    " endfor; endmacro;"

    /* what filters share: the value at a path such as a.0.b, or v itself; what x is sorted by; that with each x */
    "macro path(v, at);"
    " set ns = namespace(v=v);"
    " for k in (at.split('.') if at is string else [] if at is none else [at]);"
    "  set ns.v = ns.v[k|int if k is string and k.isdigit() else k];"
    " endfor;"
    " return ns.v; endmacro;"
    "macro folded(k, exact) = k if exact or k is not string else k|lower;"
    "macro keyed(v, attribute, exact, default=nothing) ="
    " [(folded(path(x, attribute)|default(default), exact), x) for x in v];"

    "macro filter_abs(v) = -v if v < 0 else +v;"
    "macro filter_attr(v, name) ="
    " nothing if v is mapping and builtin('map_' ~ name) is undefined else attribute(v, name);"
    "macro filter_batch(v, linecount, fill_with=none);"
    " set all = v|list;"
    " set fill = [] if fill_with is none else [fill_with] * ((0 - all|length) % linecount);"
    " return stream([(all + fill)[i:i + linecount] for i in range(0, all|length, linecount)]); endmacro;"
    "macro filter_capitalize(v) = (v|string).capitalize();"
    "macro filter_center(v, width=80);"
    " set text = v|string;"
    " set pad = width - text|length;"
    " set left = pad // 2 + pad % 2 * (width % 2);"
    " return ' ' * left ~ text ~ ' ' * (pad - left); endmacro;"
    "macro filter_default(v, default_value='', boolean=false) ="
    " default_value if v is undefined or boolean and not v else v;"
    "set filter_d = filter_default;"
    "macro filter_dictsort(v, case_sensitive=false, by='key', reverse=false) ="
    " [x for k, x in sorted(keyed(v.items(), 1 if by == 'value' else 0, case_sensitive), reverse)];"
    "macro filter_first(v) = (v|list)[0];"
    "macro filter_format(v) = printed(v|string, kwargs or varargs);"
    "macro filter_groupby(v, attribute, default=nothing, case_sensitive=false);"
    " set pairs = sorted(keyed(v, attribute, case_sensitive, default), false);"
    " set first = [pairs[i] for i in range(pairs|length) if not i or pairs[i][0] != pairs[i - 1][0]];"
    " return [group(path(x, attribute)|default(default), [y for l, y in pairs if l == k]) for k, x in first]; endmacro;"
    "macro filter_indent(v, width=4, first=false, blank=false);"
    " set by = width if width is string else ' ' * width;"
    " set lines = (v + '\\n').splitlines();"
    " return '\\n'.join([by ~ line if (first if loop.first else line or blank) else line for line in lines]); endmacro;"
    "macro filter_items(v) = stream(v.items()|list if v is defined else []);"
    "macro filter_join(v, d='', attribute=none) = (d|string).join([path(x, attribute)|string for x in v]);"
    "macro filter_last(v) = (v|list)[v|length - 1];"
    "macro filter_map(v);"
    " set f = builtin('filter_' ~ varargs[0]);"
    " if varargs; return stream([f(x, *varargs[1:], **kwargs) for x in v or []]); endif;"
    " return stream([path(x, kwargs.attribute)|default(kwargs.default) for x in v or []]); endmacro;"
    "macro filter_max(v, case_sensitive=false, attribute=none) = filter_sort(v, true, case_sensitive, attribute)[0];"
    "macro filter_min(v, case_sensitive=false, attribute=none) = filter_sort(v, false, case_sensitive, attribute)[0];"
    "macro filter_replace(v, old, new, count=none) ="
    " (v|string).replace(old|string, new|string, -1 if count is none else count);"
    "macro filter_reverse(v) = v[::-1] if v is string else stream((v|list)[::-1]);"
    "macro filter_round(v, precision=0, method='common');"
    " set scale = 10 ** precision;"
    " if method == 'floor'; return v * scale // 1 / scale; endif;"
    " if method == 'ceil'; return (0 - (-v * scale // 1)) / scale; endif;"
    " if precision < 0;"
    "  set x = filter_round(v / 10 ** -precision) * 10 ** -precision;"
    "  return x|int if v is integer else x;"
    " endif;"
    " return +v if v is integer or v is boolean else formed(v, '.' ~ precision ~ 'f')|float; endmacro;"
    "macro chosen(v, wanted, attribute, test, named);"
    " set f = builtin('is_' ~ test[0]) if test else map_copy;"
    " return stream([x for x in v or [] if (not f(path(x, attribute), *test[1:], **named)) != wanted]); endmacro;"
    "macro filter_select(v) = chosen(v, true, none, varargs, kwargs);"
    "macro filter_reject(v) = chosen(v, false, none, varargs, kwargs);"
    "macro filter_selectattr(v, attr) = chosen(v, true, attr, varargs, kwargs);"
    "macro filter_rejectattr(v, attr) = chosen(v, false, attr, varargs, kwargs);"
    "macro filter_slice(v, slices, fill_with=none);"
    " set all = v|list;"
    " set n, extra = all|length // slices, all|length % slices;"
    " set ends = [n * i + (i if i < extra else extra) for i in range(slices + 1)];"
    " set fill = [] if fill_with is none else [fill_with];"
    " return stream([all[ends[i]:ends[i + 1]] + (fill if i >= extra else []) for i in range(slices)]); endmacro;"
    "macro filter_sort(v, reverse=false, case_sensitive=false, attribute=none);"
    " set paths = attribute.split(',') if attribute is string else [attribute];"
    " set pairs = [([folded(path(x, at), case_sensitive) for at in paths], x) for x in v];"
    " return [x for k, x in sorted(pairs, reverse)]; endmacro;"
    "macro filter_sum(v, attribute=none, start=0);"
    " set ns = namespace(sum=start);"
    " for x in v; set ns.sum = ns.sum + path(x, attribute); endfor;"
    " return ns.sum; endmacro;"
    "macro begins_word(before) = before is undefined or before.isspace() or before in '-({[<';"
    "macro filter_title(v) = ''.join([c.upper() if begins_word(loop.previtem) else c.lower() for c in v|string]);"
    "macro filter_tojson(v, ensure_ascii=false, indent=none, separators=none, sort_keys=false);"
    " set comma, colon = separators or (', ' if indent is none else ',', ': ');"
    " return json(v, ensure_ascii, sort_keys, comma, colon, ' ' * indent if indent is number else indent); endmacro;"
    "macro filter_truncate(v, length=255, killwords=false, end='...', leeway=none);"
    " if v|length <= length + (5 if leeway is none else leeway); return v; endif;"
    " set cut = v[:length - end|length];"
    " return (cut if killwords else cut.rsplit(' ', 1)[0]) + end; endmacro;"
    "macro filter_unique(v, case_sensitive=false, attribute=none);"
    " set pairs = keyed(v, attribute, case_sensitive);"
    " set all = [{k: 0} for k, x in pairs];"
    " return stream([pairs[i][1] for i in range(all|length) if all[i] not in all[:i]]); endmacro;"
    "macro filter_wordcount(v) = ''.join([c if c.isalnum() or c == '_' else ' ' for c in v|string]).split()|length;"
    /* as Python's textwrap has it, but for hyphens in words longer than a line: may one begin between these parts of a
     * word? A hyphen needs two letters on each side, which another one may part; a longer dash stands by itself. */
    "macro parted(a, b);"
    " if (a[-1:] == '-') == (b[:1] == '-'); return false; endif;"
    " set x, y = a.rstrip('-'), b.lstrip('-');"
    " set near = x[-3:].replace('-', '', 1)[-2:] ~ y[:3].replace('-', '', 1)[:2];"
    " set ends = (x[-1:] + 'a').strip('!\"\\'_&.,?') ~ y[:1].replace('_', 'a');"
    " if '--' in [a[-2:], b[:2]]; return x and y and ends.isalnum(); endif;"
    " return a[-1:] == '-' and near|length == 4 and near.replace('_', 'a').isalpha(); endmacro;"
    /* a text with \\x01 wherever a line may begin */
    "macro words(v, hyphens);"
    " for c in v;"
    "  set a = v[:loop.index0];"
    "  set begins = a[-1:] == '\\n' or a[-1:] in '\\t ' and c not in '\\t \\n';"
    "  write ('\\x01' if begins or hyphens and parted(a, v[loop.index0:]) else '') ~ c;"
    " endfor; endmacro;"
    "macro filter_wordwrap(v, width=79, break_long_words=true, wrapstring='\\n', break_on_hyphens=true);"
    " write raise_exception('wordwrap() needs a width') if width < 1;"
    " for text in v.splitlines();"
    "  set ns = namespace(lines=[], line='');"
    "  for word in words(text, break_on_hyphens).split('\\x01');"
    "   for part in (word if break_long_words and word.rstrip()|length > width else [word]);"
    "    set fits = (ns.line ~ part).rstrip()|length <= width;"
    "    set full = part != word and ns.line|length == width;"
    "    set ns.lines = ns.lines if fits else ns.lines + [ns.line if full else ns.line.rstrip()];"
    "    set ns.line = ns.line ~ part if fits else part;"
    "   endfor;"
    "  endfor;"
    "  write ('' if loop.first else wrapstring) ~ wrapstring.join([x for x in ns.lines + [ns.line.rstrip()] if x]);"
    " endfor; endmacro;"
    "macro shown(v) = repr(v, false, true, ', ', ': ', none);"
    "macro pretty(v, indent, behind);"
    " set text = shown(v);"
    " set ns = namespace(lines=['']);"
    " if v is not sequence or not v or text|length <= 80 - indent - behind; return text; endif;"
    " for word in (words(v, false).split('\\x01') if v is string else []);"
    "  set longer = ns.lines[-1] ~ word;"
    "  set fits = shown(longer)|length <= 80 - indent - (behind if loop.last else 0) and ns.lines[-1][-1:] != '\\n';"
    "  set ns.lines = ns.lines[:-1] + [longer] if fits else ns.lines + [word];"
    " endfor;"
    " if v is string; return ('\\n' ~ ' ' * indent).join([shown(line) for line in ns.lines if line]); endif;"
    " set close = ',)' if text[-2:] == ',)' else text[-1];"
    " for x in (v|dictsort(true) if v is mapping else v);"
    "  set key = shown(x[0]) ~ ': ' if v is mapping else '';"
    "  write (text[0] if loop.first else ',\\n' ~ ' ' * (indent + 1)) ~ key;"
    "  write pretty(x[1] if v is mapping else x, indent + 1 + key|length, behind + close|length if loop.last else 1);"
    " endfor;"
    " write close; endmacro;"
    "macro filter_pprint(v);"
    " set text = pretty(v, 1, 1) if v is string and shown(v)|length > 80 else pretty(v, 0, 0);"
    " return '(' ~ text ~ ')' if v is string and '\\n' in text else text; endmacro;"

    "macro cycler();"
    " set items, ns = varargs, namespace(at=0, current=varargs[0]);"
    " macro next();"
    "  set ns.at = (ns.at + 1) % items|length;"
    "  set ns.current = items[ns.at];"
    "  return items[ns.at - 1]; endmacro;"
    " macro reset(); set ns.at = 0; set ns.current = items[0]; return none; endmacro;"
    " set ns.next, ns.reset = next, reset;"
    " return ns; endmacro;"
    "macro joiner(sep=', ');"
    " set ns = namespace(used=false);"
    " macro next(); write sep if ns.used; set ns.used = true; endmacro;"
    " return next; endmacro;";

/* ---- templates ---- */

struct Jinja {
    Chunk *chunks;
    const Node *body;
};

/* The functions that templates call by their names. */
static List common;

static Parser parser_of(Work *w, const char *source, bool prelude) {
    return (Parser){.w = w, .begin = source, .s = source, .token = "", .close = ";", .prelude = prelude};
}

static void make_functions(void) {
    static Error e; /* there is none */
    static Work w = {.e = &e, .most_steps = JINJA_STEPS};
    w.stack = __builtin_frame_address(0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Parser p = parser_of(&w, rows[i].takes, true);
        next(&p);
        Node *takes = parse_parameters(&p);
        for (const char *s = rows[i].names; *s; s += strspn(s, " ")) {
            const size_t n = strcspn(s, ":"), end = strcspn(s, " ");
            const Value how = text_from(&w, s + n + 1, end - n - 1, true);
            Node *node = operation(&p, rows[i].run, c_text(&w, how), NULL, NULL);
            node->value = text_from(&w, s, n, true);
            node->a = takes;
            map_set(&w, &functions, node->value, function_of(&w, NULL, node));
            s += end;
        }
    }
    Parser p = parser_of(&w, prelude, true);
    run(&w, &functions, parse_body(&p, ""));
    for (size_t i = 0; i < functions.n; i += 2) {
        const Value name = functions.item[i];
        if (text_listed(globals, c_text(&w, name))) map_set(&w, &common, name, functions.item[i + 1]);
    }
}

Jinja *jinja_parse(const char *source, size_t n, Error *e) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    Work w = {.code = BAD_MODEL, .e = e, .line = 1, .most_steps = JINJA_STEPS};
    Jinja *t = allocate_zero(1, sizeof *t);
    pthread_once(&once, make_functions);
    w.stack = __builtin_frame_address(0);
    if (utf8_check(source, n) < n) {
        fail(e, BAD_MODEL, "chat template: it is not UTF-8");
    } else if (!setjmp(w.failed)) {
        char *clean = take(&w, n + 1), *end = clean;
        for (size_t i = 0; i < n && source[i]; i++) /* \r\n and \r become \n; a line break at the end is dropped */
            if (source[i] != '\n' || !i || source[i - 1] != '\r') *end++ = source[i] == '\r' ? '\n' : source[i];
        if (end > clean && end[-1] == '\n') end--;
        *end = 0;
        Parser p = parser_of(&w, clean, false);
        t->body = parse_body(&p, "");
        t->chunks = w.chunks;
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

bool jinja_render(const Jinja *t, int64_t steps, const cJSON *own, const cJSON *given, const struct tm *now,
                  Marked *out, Error *e) {
    Buffer b = {0};
    Work w = {.code = USAGE, .e = e, .line = 1, .most_steps = steps, .out = &b, .now = now};
    const cJSON *const variables[] = {own, given};
    w.stack = __builtin_frame_address(0);
    const bool ok = !setjmp(w.failed);
    if (ok) {
        List *scope = new_scope(&w, &common);
        if (!now) map_set(&w, scope, text(&w, "strftime_now"), (Value){0});
        for (int i = 0; i < 2; i++) {
            List *inner = variables[i] ? from_json(&w, variables[i], !i).list : new_list(&w);
            inner->outer = scope;
            scope = inner;
        }
        run(&w, new_scope(&w, scope), t->body);
        char *bytes = take(&w, 4 * b.n);
        marked_add(out, "", 0, true);
        for (size_t from = 0, i = 1; i <= b.n; i++) {
            if (i < b.n && (b.at[i] & OWN) == (b.at[from] & OWN)) continue;
            const size_t n = encode(part(text_of(&b), from, i - from), bytes);
            marked_add(out, bytes, n, b.at[from] & OWN);
            from = i;
        }
    }
    release(w.chunks);
    return ok;
}
