/* regex.c: grammars of patterns, as JavaScript writes them (ECMA-262, "Patterns"), and of numbers in a range. A pattern
 * is of a text's own letters; in a JSON string some of them are escaped. Groups, classes, alternatives and counts are
 * known. Anchors may only begin and end an alternative of the whole pattern. */
#include "json.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEPTH = 100, MOST_COUNT = 1 << 24, LAST_LETTER = 0x10FFFF };
typedef struct {
    Grammar *g;
    const char *s, *begin;
    bool json;       /* of letters in a JSON string */
    const char *bad; /* what is wrong or not supported at s, or NULL */
    int depth;
} Pattern;

/* ---- letters ---- */

static void add_range(uint32_t set[8], int from, int to) {
    for (int i = from; i <= to; i++) set[i / 32] |= 1u << i % 32;
}

static int range_node(Grammar *g, int from, int to) {
    uint32_t set[8] = {0};
    add_range(set, from, to);
    return set_node(g, set);
}

static int byte_node(Grammar *g, int byte) { return range_node(g, byte, byte); }

/* Adds the UTF-8 of the letters from .. to, which have as many bytes, n: where all bytes but the first of them can be
 * anything, the first are a range; other letters are cut off at both ends. */
static void add_utf8(Grammar *g, int from, int to, int n, Ids *out) {
    static const int lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    int node[4];
    for (int i = 1; i < n; i++) {
        const int low = (1 << 6 * i) - 1;
        if ((from & ~low) == (to & ~low)) continue;
        const int cut = from & low ? (from | low) + 1 : (to & low) != low ? to & ~low : 0;
        if (!cut) continue;
        add_utf8(g, from, cut - 1, n, out);
        add_utf8(g, cut, to, n, out);
        return;
    }
    for (int i = 0; i < n; i++) {
        const int shift = 6 * (n - 1 - i), most = i ? 0x3F : 0x1F, mark = i ? 0x80 : lead[n];
        node[i] = range_node(g, mark | (from >> shift & most), mark | (to >> shift & most));
    }
    ids_add(out, list_node(g, SEQ, node, n));
}

/* One letter of these ranges, (first, last) each. In JSON `"`, `\` and control letters are escaped. */
static int letters_node(Grammar *g, const Ids *ranges, bool json) {
    static const int bound[] = {0, 0x80, 0x800, 0xD800, 0xE000, 0x10000, LAST_LETTER + 1}, size[] = {1, 2, 3, 0, 3, 4};
    static const char names[] = "\b\f\n\r\t\"\\", escapes[] = "bfnrt\"\\";
    uint32_t set[8] = {0};
    LocalIds cases = {0};
    for (size_t r = 0; r < ranges->n; r += 2) {
        for (int c = ranges->data[r]; c <= ranges->data[r + 1] && c < 128; c++) {
            const char *name = c ? strchr(names, c) : NULL;
            char hex[16];
            if (!json || (c >= ' ' && !name)) {
                add_range(set, c, c);
            } else if (name) {
                ids_add(&cases, seq_node(g, byte_node(g, '\\'), byte_node(g, escapes[name - names])));
            } else if (c) { /* json_parse() refuses \u0000 */
                snprintf(hex, sizeof hex, "\\u%04x", (unsigned)c);
                int node[6];
                for (int i = 0; i < 6; i++) node[i] = byte_node(g, hex[i]);
                ids_add(&cases, list_node(g, SEQ, node, 6));
            }
        }
        for (int i = 1; i < 6; i++) {
            const int from = ranges->data[r] > bound[i] ? ranges->data[r] : bound[i];
            const int to = ranges->data[r + 1] < bound[i + 1] ? ranges->data[r + 1] : bound[i + 1] - 1;
            if (size[i] && from <= to) add_utf8(g, from, to, size[i], &cases);
        }
    }
    ids_add(&cases, set_node(g, set));
    return list_node(g, ALT, cases.data, (int)cases.n);
}

static int by_first(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* The letters that are in none of the ranges. */
static void complement(Ids *ranges, int last) {
    LocalIds out = {0};
    int next = 0;
    if (ranges->n) qsort(ranges->data, ranges->n / 2, 2 * sizeof(int), by_first);
    for (size_t i = 0; i < ranges->n; i += 2) {
        if (ranges->data[i] > next) ids_add(&out, next), ids_add(&out, ranges->data[i] - 1);
        if (ranges->data[i + 1] >= next) next = ranges->data[i + 1] + 1;
    }
    if (next <= last) ids_add(&out, next), ids_add(&out, last);
    ranges->n = 0;
    ids_append(ranges, out.data, out.n);
}

/* ---- patterns ---- */

static int wrong(Pattern *p, const char *what) {
    if (!p->bad) p->bad = what;
    return NEVER;
}

/* Reads n hexadecimal digits. */
static int hex_letter(Pattern *p, int n) {
    int c = 0;
    for (; n; n--, p->s++) {
        if (!isxdigit((unsigned char)*p->s)) return wrong(p, "an escape without its digits");
        c = c * 16 + (int)strtol((char[2]){*p->s}, NULL, 16);
    }
    return c;
}

/* Adds the letters of \d, \w and \s: of ASCII, because programs differ in what else they are. Those of \D, \W and \S
 * are of ASCII, too. */
static bool add_kind(char kind, Ids *ranges) {
    static const char *const members[] = {"d09", "w09AZ__az", "s\t\r  "};
    LocalIds own = {0};
    for (int i = 0; i < 3; i++) {
        if (tolower(kind) != *members[i]) continue;
        for (const char *s = members[i] + 1; *s; s++) ids_add(&own, *s);
        if (isupper(kind)) complement(&own, 127);
        ids_append(ranges, own.data, own.n);
        return true;
    }
    return false;
}

/* Reads a letter of a pattern or of a class, or what stands behind a backslash. -1: that was a kind of letters, or an
 * error. */
static int read_letter(Pattern *p, Ids *ranges, bool *kind) {
    uint32_t c = 0;
    const char *at;
    if (*p->s != '\\') {
        p->s += utf8_decode(p->s, strlen(p->s), &c);
        return (int)c;
    }
    const char name = *++p->s;
    if (!name) return wrong(p, "a backslash at the end"), -1;
    p->s++;
    if (add_kind(name, ranges)) return *kind = true, -1;
    if ((at = strchr("nntrftvrrffvvt", name)) && strchr("nrtfv", name))
        return name == 'n' ? '\n' : name == 'r' ? '\r' : name == 't' ? '\t' : name == 'f' ? '\f' : '\v';
    if (name == '0' && !isdigit((unsigned char)*p->s)) return 0;
    if (name == 'x') return hex_letter(p, 2);
    if (name == 'u') return hex_letter(p, 4);
    if (isdigit((unsigned char)name) || name == 'k') return wrong(p, "a back-reference"), -1;
    if (strchr("bB", name)) return wrong(p, "a word boundary"), -1;
    if (isalpha((unsigned char)name)) return wrong(p, "an unknown escape"), -1;
    p->s--;
    p->s += utf8_decode(p->s, strlen(p->s), &c);
    return (int)c;
}

/* [abc], behind its bracket. */
static int read_class(Pattern *p) {
    LocalIds ranges = {0};
    const bool negated = *p->s == '^';
    bool kinds = false;
    for (p->s += negated; *p->s != ']' && !p->bad;) {
        bool kind = false;
        if (!*p->s) return wrong(p, "a class without ]");
        const bool backspace = p->s[0] == '\\' && p->s[1] == 'b';
        int from = backspace ? '\b' : read_letter(p, &ranges, &kind), to = from;
        if (backspace) p->s += 2;
        kinds |= kind;
        if (from >= 0 && *p->s == '-' && p->s[1] && p->s[1] != ']') {
            p->s++;
            to = read_letter(p, &ranges, &kind);
            if (kind || from > to) return wrong(p, "a range that does not go up");
        }
        if (from >= 0) ids_add(&ranges, from), ids_add(&ranges, to);
    }
    if (p->bad) return NEVER;
    p->s++;
    if (negated) complement(&ranges, kinds ? 127 : LAST_LETTER);
    return letters_node(p->g, &ranges, p->json);
}

static int read_alternatives(Pattern *p);

static int read_atom(Pattern *p) {
    LocalIds ranges = {0};
    bool kind = false;
    const char c = *p->s;
    if (c == '(') {
        p->s++;
        const bool named = begins(p->s, "?<") && p->s[2] != '=' && p->s[2] != '!';
        if (*p->s == '?' && p->s[1] != ':' && !named) return wrong(p, "a look-around or another special group");
        if (*p->s == '?') p->s += named ? strcspn(p->s, ">") : 2;
        p->s += *p->s == '>' && named;
        const int node = read_alternatives(p);
        if (*p->s != ')') return wrong(p, "a group without )");
        return p->s++, node;
    }
    if (c == '[') return p->s++, read_class(p);
    if (c == '^' || c == '$') return wrong(p, "an anchor inside of the pattern");
    if (strchr("*+?{", c)) return wrong(p, "a count of nothing");
    if (c == '.') {
        static const int breaks[] = {'\n', '\n', '\r', '\r', 0x2028, 0x2029};
        ids_append(&ranges, breaks, 6);
        complement(&ranges, LAST_LETTER);
        p->s++;
        return letters_node(p->g, &ranges, p->json);
    }
    const int letter = read_letter(p, &ranges, &kind);
    if (letter >= 0 && !p->bad) ids_add(&ranges, letter), ids_add(&ranges, letter);
    return p->bad ? NEVER : letters_node(p->g, &ranges, p->json);
}

/* Reads *, +, ? or {n,m}, each perhaps with a ? behind it, which changes no match. */
static int read_count(Pattern *p, int node) {
    long least = *p->s == '+', most = *p->s == '?' ? 1 : ENDLESS;
    if (!*p->s || !strchr("*+?{", *p->s)) return node;
    if (*p->s == '{') {
        char *end;
        if (!isdigit((unsigned char)p->s[1])) return wrong(p, "a { that is no count: write \\{");
        least = most = strtol(p->s + 1, &end, 10);
        if (*end == ',') most = isdigit((unsigned char)end[1]) ? strtol(end + 1, &end, 10) : (end++, ENDLESS);
        if (*end != '}' || least > MOST_COUNT || most > MOST_COUNT || (most >= 0 && most < least))
            return wrong(p, "a count that is none");
        p->s = end;
    }
    p->s += 1 + (p->s[1] == '?');
    return repeat_node(p->g, node, (int)least, (int)most);
}

static int read_sequence(Pattern *p) {
    LocalIds parts = {0};
    while (*p->s && !strchr("|)", *p->s) && !p->bad && !(*p->s == '$' && p->depth == 1 && (!p->s[1] || p->s[1] == '|')))
        ids_add(&parts, read_count(p, read_atom(p)));
    return list_node(p->g, SEQ, parts.data, (int)parts.n);
}

/* Alternatives of the whole pattern in JSON: any letters may stand where it has no anchor. */
static int read_alternatives(Pattern *p) {
    LocalIds cases = {0};
    const bool whole = !p->depth;
    if (++p->depth > MOST_DEPTH) return wrong(p, "too many groups inside of each other");
    for (bool more = true; more && !p->bad; more = *p->s == '|' && p->s++) {
        const int any = whole && p->json ? repeat_node(p->g, p->g->letter, 0, ENDLESS) : NOTHING;
        const bool first = whole && *p->s == '^';
        p->s += first;
        const int node = read_sequence(p);
        const bool last = whole && *p->s == '$';
        p->s += last;
        ids_add(&cases, seq_node(p->g, first ? NOTHING : any, node, last ? NOTHING : any));
    }
    p->depth--;
    return list_node(p->g, ALT, cases.data, (int)cases.n);
}

int pattern_node(Grammar *g, const char *pattern, bool json, const char **bad, size_t *at) {
    Pattern p = {g, pattern, pattern, json, .bad = NULL};
    const size_t n = strlen(pattern), valid = utf8_check(pattern, n);
    if (valid < n) return *bad = "invalid UTF-8", *at = valid, NEVER;
    const int node = read_alternatives(&p);
    if (*p.s && !p.bad) p.bad = "a ) without (";
    *bad = p.bad, *at = (size_t)(p.s - pattern);
    return p.bad ? NEVER : node;
}

int known_pattern(Grammar *g, const char *pattern) {
    const char *bad;
    size_t at;
    return pattern_node(g, pattern, false, &bad, &at);
}

/* Escapes are those of RFC 8259, but \u0000 and halves of pairs. */
void make_letters(Grammar *g) {
    static const char letter[] =
        "[^\\x00-\\x1f\"\\\\]|\\\\([\"\\\\bfnrt]|u([1-9a-cA-CefEF][0-9a-fA-F]{3}|0[1-9a-fA-F][0-9a-fA-F]{2}|"
        "00[1-9a-fA-F][0-9a-fA-F]|000[1-9a-fA-F]|[dD][0-7][0-9a-fA-F]{2}|"
        "[dD][89abAB][0-9a-fA-F]{2}\\\\u[dD][c-fC-F][0-9a-fA-F]{2}))";
    g->letter = known_pattern(g, letter);
    g->quote = text_node(g, "\"", 1);
}

/* ---- numbers in a range ---- */

static int digits_node(Grammar *g, int from, int least, int most) {
    return from > '9' ? NEVER : repeat_node(g, range_node(g, from, '9'), least, most);
}

/* The first n digits of a text, one of the digits from .. to, and what follows. */
static int differs_node(Grammar *g, const char *text, int n, int from, int to, int rest) {
    LocalIds parts = {0};
    for (int i = 0; i < n; i++) ids_add(&parts, byte_node(g, text[i]));
    ids_add(&parts, from > to ? NEVER : from ? range_node(g, from, to) : NOTHING);
    ids_add(&parts, rest);
    return list_node(g, SEQ, parts.data, (int)parts.n);
}

/* A fraction, point included, that is above or below 0.DIGITS, or, unless `strict`, equal. */
static int fraction_node(Grammar *g, const char *digits, bool above, bool strict) {
    int n = (int)strlen(digits);
    while (n && digits[n - 1] == '0') n--;
    const int any = digits_node(g, '0', 0, ENDLESS), zeros = repeat_node(g, byte_node(g, '0'), 0, ENDLESS);
    const int more = seq_node(g, zeros, range_node(g, '1', '9'), any); /* than the digits so far */
    LocalIds cases = {0};
    for (int i = 0; i < n; i++) {
        const int from = above ? digits[i] + 1 : '0', to = above ? '9' : digits[i] - 1;
        ids_add(&cases, differs_node(g, digits, i, from, to, any));
        if (!above && i) ids_add(&cases, differs_node(g, digits, i, 0, 0, NOTHING));
    }
    int equal = above ? strict ? more : any : strict ? NEVER : zeros;
    if (!n && !strict) equal = above ? digits_node(g, '0', 1, ENDLESS) : repeat_node(g, byte_node(g, '0'), 1, ENDLESS);
    ids_add(&cases, differs_node(g, digits, n, 0, 0, equal));
    const int some = seq_node(g, byte_node(g, '.'), list_node(g, ALT, cases.data, (int)cases.n));
    const bool none = n ? !above : !strict; /* 0 is on the right side */
    return alt_node(g, none ? NOTHING : NEVER, some);
}

/* A number without sign that is above or below one that is written so, or, unless `strict`, equal. */
static int size_node(Grammar *g, const char *bound, bool above, bool strict, bool whole) {
    const int n = (int)strcspn(bound, "."), any = digits_node(g, '0', 0, ENDLESS);
    const int some = seq_node(g, byte_node(g, '.'), range_node(g, '0', '9'), any);
    const int rest = whole ? NOTHING : alt_node(g, NOTHING, some);
    const int equal = whole ? NOTHING : fraction_node(g, bound + n + (bound[n] == '.'), above, strict);
    LocalIds cases = {0};
    if (above) ids_add(&cases, seq_node(g, range_node(g, '1', '9'), digits_node(g, '0', n, ENDLESS), rest));
    if (!above && n > 1) { /* fewer digits */
        const int longer = seq_node(g, range_node(g, '1', '9'), digits_node(g, '0', 0, n - 2));
        ids_add(&cases, seq_node(g, alt_node(g, byte_node(g, '0'), longer), rest));
    }
    for (int i = 0; i < n; i++) { /* digit i is the first that differs */
        const int from = above ? bound[i] + 1 : !i && n > 1 ? '1' : '0', to = above ? '9' : bound[i] - 1;
        const int then = seq_node(g, digits_node(g, '0', n - 1 - i, n - 1 - i), rest);
        ids_add(&cases, differs_node(g, bound, i, from, to, then));
    }
    ids_add(&cases, differs_node(g, bound, n, 0, 0, equal));
    return list_node(g, ALT, cases.data, (int)cases.n);
}

int bound_node(Grammar *g, const char *bound, bool above, bool strict, bool whole) {
    const bool negative = *bound == '-';
    const bool zero = strspn(bound, "-0.") == strlen(bound);
    const int sign = byte_node(g, '-'), all = size_node(g, "0", true, false, whole);
    const int size = size_node(g, bound + negative, above != negative, strict, whole);
    if (zero) { /* -0 is 0 */
        const int none = strict ? NEVER : size_node(g, "0", false, false, whole);
        return above ? alt_node(g, size, seq_node(g, sign, none))
                     : alt_node(g, none, seq_node(g, sign, size_node(g, "0", true, strict, whole)));
    }
    if (negative) return alt_node(g, above ? all : NEVER, seq_node(g, sign, size));
    return alt_node(g, size, above ? NEVER : seq_node(g, sign, all));
}
