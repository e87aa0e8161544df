/* regex.c: grammars of patterns, as JavaScript writes them (ECMA-262, "Patterns"). A pattern is of a text's own
 * letters; in a JSON string some of them are escaped. Groups, classes, alternatives and counts are known. Anchors may
 * only begin and end an alternative of the whole pattern. The other files write their grammars as patterns, too, with %
 * for nodes that they have. */
#include "json.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEPTH = 100, MOST_COUNT = 1 << 24, LAST_LETTER = 0x10FFFF };
typedef struct {
    Grammar *g;
    const char *s;
    bool json;       /* of letters in a JSON string */
    int around;      /* letters that may stand where it has no anchor, or NEVER: none */
    va_list *nodes;  /* for each %; or NULL */
    const char *bad; /* what is wrong or not supported at s, or NULL */
    int depth;
} Pattern;

/* ---- letters ---- */

static int range_node(Grammar *g, int from, int to) { return set_node(g, &(Ids){.data = (int[]){from, to}, .n = 2}); }

/* Adds the UTF-8 of the letters from .. to. They are cut until they have as many bytes, and each byte can be any of a
 * range, whatever the others are. */
static void add_utf8(Grammar *g, int from, int to, Ids *out) {
    static const int last[] = {0x7F, 0x7FF, 0xD7FF, 0xDFFF, 0xFFFF, LAST_LETTER}, size[] = {1, 2, 3, 0, 3, 4};
    static const int lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    int i = 0, cut = to, node = NOTHING;
    while (from > last[i]) i++;
    const int n = size[i]; /* 0: halves of pairs are no letters */
    if (to > last[i]) cut = last[i];
    for (int k = 1; k < n && cut == to; k++) {
        const int low = (1 << 6 * k) - 1;
        if ((from & ~low) == (to & ~low)) continue;
        if (from & low) cut = from | low;
        if (!(from & low) && (to & low) != low) cut = (to & ~low) - 1;
    }
    if (cut < to) add_utf8(g, from, cut, out), add_utf8(g, cut + 1, to, out);
    if (cut < to || !n) return;
    for (int k = 0; k < n; k++) { /* from the last byte */
        const int most = k < n - 1 ? 0x3F : 0x1F, mark = k < n - 1 ? 0x80 : lead[n];
        node = seq_node(g, range_node(g, mark | (from >> 6 * k & most), mark | (to >> 6 * k & most)), node);
    }
    ids_add(out, node);
}

/* One letter of these ranges, (first, last) each. In JSON `"`, `\` and control letters are escaped. */
static int letters_node(Grammar *g, const Ids *ranges, bool json) {
    LocalIds plain = {0}, cases = {0};
    for (size_t i = 0; i < ranges->n; i += 2) {
        const int from = ranges->data[i], to = ranges->data[i + 1];
        for (int c = from; c <= to && c < 128; c++) {
            if (!json || (c >= ' ' && c != '"' && c != '\\')) {
                ids_append(&plain, (const int[]){c, c}, 2);
            } else if (c) { /* json_parse() refuses \u0000 */
                LocalJson word = json_word((const char[]){(char)c, 0});
                LocalText text = json_text(word);
                ids_add(&cases, text_node(g, text + 1, strlen(text) - 2));
            }
        }
        if (to >= 128) add_utf8(g, from < 128 ? 128 : from, to, &cases);
    }
    ids_add(&cases, set_node(g, &plain));
    return alt_node(g, cases.data, cases.n);
}

/* The letters that are in none of the ranges. */
static void complement(Ids *ranges, int last) {
    LocalIds out = {0};
    int next = 0;
    if (ranges->n) qsort(ranges->data, ranges->n / 2, 2 * sizeof(int), by_number);
    for (size_t i = 0; i < ranges->n; i += 2) {
        if (ranges->data[i] > next) ids_append(&out, (const int[]){next, ranges->data[i] - 1}, 2);
        if (ranges->data[i + 1] >= next) next = ranges->data[i + 1] + 1;
    }
    if (next <= last) ids_append(&out, (const int[]){next, last}, 2);
    ranges->n = 0;
    ids_append(ranges, out.data, out.n);
}

/* ---- patterns ---- */

static int wrong(Pattern *p, const char *what) {
    if (!p->bad) p->bad = what;
    return -1;
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

/* Reads a letter of a pattern or of a class, or what stands behind a backslash. -1: a kind of letters, which was added
 * to `ranges`, or an error. */
static int read_letter(Pattern *p, Ids *ranges, bool *kind) {
    static const char names[] = "nrtfv", means[] = "\n\r\t\f\v";
    uint32_t c = 0;
    const bool escaped = *p->s == '\\';
    p->s += escaped;
    const char name = *p->s;
    if (escaped && !name) return wrong(p, "a backslash at the end");
    if (!escaped || !isalnum((unsigned char)name)) {
        p->s += utf8_decode(p->s, strlen(p->s), &c);
        return (int)c;
    }
    p->s++;
    if (add_kind(name, ranges)) return *kind = true, -1;
    if (strchr(names, name)) return means[strchr(names, name) - names];
    if (name == '0' && !isdigit((unsigned char)*p->s)) return 0;
    if (name == 'x') return hex_letter(p, 2);
    if (name == 'u') {
        const int letter = hex_letter(p, 4);
        const bool more = begins(p->s, "\\u");
        Pattern rest = *p;
        rest.s += 2 * more;
        const int low = more ? hex_letter(&rest, 4) : 0;
        if (letter < 0xD800 || letter > 0xDBFF || low < 0xDC00 || low > 0xDFFF) return letter;
        p->s = rest.s; /* a pair is one letter */
        return 0x10000 + ((letter - 0xD800) << 10) + (low - 0xDC00);
    }
    if (isdigit((unsigned char)name) || name == 'k') return wrong(p, "a back-reference");
    return wrong(p, strchr("bB", name) ? "a word boundary" : "an unknown escape");
}

/* [abc], behind its bracket. */
static int read_class(Pattern *p) {
    LocalIds ranges = {0};
    const bool negated = *p->s == '^';
    bool kinds = false;
    for (p->s += negated; *p->s != ']' && !p->bad;) {
        bool kind = false;
        if (!*p->s) return wrong(p, "a class without ]");
        const bool backspace = begins(p->s, "\\b");
        int from = backspace ? '\b' : read_letter(p, &ranges, &kind), to = from;
        if (backspace) p->s += 2;
        kinds |= kind;
        if (from >= 0 && *p->s == '-' && p->s[1] && p->s[1] != ']') {
            p->s++;
            to = read_letter(p, &ranges, &kind);
            if (kind || from > to) return wrong(p, "a range that does not go up");
        }
        if (from >= 0) ids_append(&ranges, (const int[]){from, to}, 2);
    }
    p->s += *p->s == ']';
    if (negated) complement(&ranges, kinds ? 127 : LAST_LETTER);
    return letters_node(p->g, &ranges, p->json);
}

static int read_alternatives(Pattern *p);

static int read_group(Pattern *p) {
    const bool named = begins(p->s, "?<") && p->s[2] != '=' && p->s[2] != '!';
    if (*p->s == '?' && p->s[1] != ':' && !named) return wrong(p, "a look-around or another special group");
    if (*p->s == '?') p->s += named ? strcspn(p->s, ">") : 2;
    p->s += *p->s == '>' && named;
    const int node = read_alternatives(p);
    if (*p->s != ')') return wrong(p, "a group without )");
    return p->s++, node;
}

static int read_atom(Pattern *p) {
    LocalIds ranges = {0};
    bool kind = false;
    const char c = *p->s++;
    if (c == '(') return read_group(p);
    if (c == '[') return read_class(p);
    if (c == '%' && p->nodes) return va_arg(*p->nodes, int);
    if (c == '.') {
        ids_append(&ranges, (const int[]){'\n', '\n', '\r', '\r', 0x2028, 0x2029}, 6);
        complement(&ranges, LAST_LETTER);
        return letters_node(p->g, &ranges, p->json);
    }
    p->s--;
    if (c == '^' || c == '$') return wrong(p, "an anchor inside of the pattern");
    if (strchr("*+?{", c)) return wrong(p, "a count of nothing");
    const int letter = read_letter(p, &ranges, &kind);
    if (letter >= 0) ids_append(&ranges, (const int[]){letter, letter}, 2);
    return letters_node(p->g, &ranges, p->json);
}

/* Reads *, +, ? or {n,m}, each perhaps with a ? behind it, which changes no match. */
static int read_count(Pattern *p, int node) {
    long least = *p->s == '+', most = *p->s == '?' ? 1 : ENDLESS;
    if (p->bad || !*p->s || !strchr("*+?{", *p->s)) return node;
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

/* Up to the end, a | or a ). */
static int read_sequence(Pattern *p) {
    LocalIds parts = {0};
    int node = NOTHING;
    while (*p->s && !strchr("|)", *p->s) && !p->bad && !(*p->s == '$' && p->depth == 1 && (!p->s[1] || p->s[1] == '|')))
        ids_add(&parts, read_count(p, read_atom(p)));
    while (parts.n && !p->bad) node = seq_node(p->g, parts.data[--parts.n], node);
    return node;
}

static int read_alternatives(Pattern *p) {
    LocalIds cases = {0};
    const bool whole = !p->depth;
    const int any = whole ? repeat_node(p->g, p->around, 0, ENDLESS) : NOTHING;
    if (++p->depth > MOST_DEPTH) return wrong(p, "too many groups inside of each other");
    for (bool more = true; more && !p->bad; more = *p->s == '|' && p->s++) {
        const bool first = whole && *p->s == '^';
        p->s += first;
        int node = read_sequence(p);
        const bool last = whole && *p->s == '$';
        p->s += last;
        if (!last) node = seq_node(p->g, node, any);
        ids_add(&cases, first ? node : seq_node(p->g, any, node));
    }
    p->depth--;
    return alt_node(p->g, cases.data, cases.n);
}

int pattern_node(Grammar *g, const char *pattern, int around, Bytes *why) {
    Pattern p = {.g = g, .s = pattern, .json = around && around == g->letter, .around = around};
    const size_t n = strlen(pattern), valid = utf8_check(pattern, n);
    if (valid < n) p.s += valid, wrong(&p, "invalid UTF-8");
    const int node = p.bad ? NEVER : read_alternatives(&p);
    if (*p.s) wrong(&p, "a ) without (");
    if (p.bad) bytes_print(why, "has %s at byte %zu, which is not supported", p.bad, (size_t)(p.s - pattern));
    return p.bad ? NEVER : node;
}

int rule_node(Grammar *g, const char *pattern, ...) {
    va_list nodes;
    va_start(nodes, pattern);
    Pattern p = {.g = g, .s = pattern, .nodes = &nodes};
    const int node = read_alternatives(&p);
    va_end(nodes);
    return node;
}

/* Escapes are those of RFC 8259, but \u0000 and halves of pairs. */
void make_letters(Grammar *g) {
    g->quote = rule_node(g, "\"");
    g->plain = rule_node(g, "[^\\x00-\\x1f\"\\\\]|\\\\[\"\\\\bfnrt]");
    g->letter = rule_node(g,
                          "%|\\\\u([1-9a-cA-CefEF][0-9a-fA-F]{3}|0[1-9a-fA-F][0-9a-fA-F]{2}|00[1-9a-fA-F][0-9a-fA-F]|"
                          "000[1-9a-fA-F]|[dD][0-7][0-9a-fA-F]{2}|"
                          "[dD][89abAB][0-9a-fA-F]{2}\\\\u[dD][c-fC-F][0-9a-fA-F]{2})",
                          g->plain);
}
