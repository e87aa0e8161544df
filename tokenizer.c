/* tokenizer.c: byte pair encoding as tokenizer.json describes it. See tokenizer.h.
 *
 * Text passes four stations, each of them data from the file: added tokens are cut out; the rest is normalized
 * (Prepend, Replace), split into words (PCRE2 runs the file's own pattern) and each word merged pair by pair. In a
 * byte-level file every byte is written as one printable character (GPT-2's alphabet); here pieces are kept as the
 * bytes they stand for, so encoding and decoding need no alphabet. Components that are not implemented are refused by
 * name: a tokenizer that is almost right is wrong. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 256 << 20, MOST_TEXT = INT32_MAX / 2, MOST_IDS = 1 << 22, MOST_STEPS = 8, MATCH_LIMIT = 20000000 };
/* Bytes of an added token and of a normalizer's text, tokens of the template: what lies far above any real file and
 * keeps the work near the length of the text. */
enum { MOST_ADDED = 256, MOST_REPLACEMENT = 16, MOST_TEMPLATE = 64 };

/* GPT-2's pattern, which a ByteLevel pre-tokenizer with use_regex stands for (openai/gpt-2, encoder.py). */
static const char gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

typedef struct { /* the bytes of a token, in Tokenizer.text */
    uint32_t begin, n;
} Piece;

typedef struct { /* replace `from` by `to`; without `from`: put `to` before any text */
    char *from, *to;
} Normalizer;

typedef struct { /* cut at the matches of `pattern`, which stay words of their own; NULL: no cut */
    pcre2_code *pattern;
    bool prefix_space; /* a space before a text that begins without one */
} Split;

typedef struct {
    int left, right, whole;
} Merge;

typedef struct { /* added tokens as a trie: an edge is (node, byte), kept in a hash table */
    struct {
        int node, child;
        unsigned char byte;
    } * edge; /* child 0: empty */
    size_t edges, room;
    int *id; /* (nodes) token that ends here, or -1 */
    int nodes;
} Trie;

enum { ADDED = 1, CONTROL = 2, SINGLE_WORD = 4, STRIP_LEFT = 8, STRIP_RIGHT = 16 };

struct Tokenizer {
    int size;             /* ids are below */
    Bytes text;           /* all tokens' bytes, one after the other */
    Piece *piece;         /* (size); n is 0 where an id has no text */
    unsigned char *flags; /* (size) ADDED, ... */
    int *by_piece;        /* hash table of ids by bytes, -1: empty */
    size_t by_piece_room;
    Merge *merge; /* by rank */
    int merges;
    int *by_pair; /* hash table of ranks by (left, right), -1: empty */
    size_t by_pair_room;
    int byte_token[256]; /* byte-level: the byte; byte fallback: <0xXX>; -1: there is none */
    int unknown;         /* -1: none */
    bool byte_level, byte_fallback, fuse_unknown, ignore_merges;
    Normalizer normalizer[MOST_STEPS];
    Split split[MOST_STEPS];
    int normalizers, splits;
    Trie raw, normalized; /* added tokens found before and after normalizing */
    Ids prefix, suffix;   /* the template */
    Normalizer unreplace; /* decoder: Replace */
    bool decode_bytes;    /* decoder: ByteFallback */
    char strip;           /* decoder: Strip, the character taken from the beginning; 0: none */
};

/* ---- hash tables ---- */

static size_t hash_bytes(const char *s, size_t n) { /* FNV-1a */
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3u;
    return (size_t)(h ^ h >> 29);
}

static size_t hash_pair(int left, int right) {
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    return (size_t)(h ^ h >> 31);
}

static int *empty_table(size_t entries, size_t *room) {
    *room = 64;
    while (*room < entries * 2) *room *= 2;
    int *table = allocate(*room * sizeof *table);
    memset(table, 0xFF, *room * sizeof *table);
    return table;
}

static bool piece_is(const Tokenizer *t, int id, const char *s, size_t n) {
    return id < t->size && t->piece[id].n == n && !memcmp(t->text.data + t->piece[id].begin, s, n);
}

/* Where a piece is, or would be, in by_piece. */
static int *piece_slot(const Tokenizer *t, const char *s, size_t n) {
    size_t i = hash_bytes(s, n) & (t->by_piece_room - 1);
    while (t->by_piece[i] >= 0 && !piece_is(t, t->by_piece[i], s, n)) i = (i + 1) & (t->by_piece_room - 1);
    return t->by_piece + i;
}

static int *pair_slot(const Tokenizer *t, int left, int right) {
    size_t i = hash_pair(left, right) & (t->by_pair_room - 1);
    for (; t->by_pair[i] >= 0; i = (i + 1) & (t->by_pair_room - 1)) {
        const Merge *m = t->merge + t->by_pair[i];
        if (m->left == left && m->right == right) break;
    }
    return t->by_pair + i;
}

/* ---- added tokens ---- */

static size_t trie_slot(const Trie *trie, int node, unsigned char byte) {
    size_t i = hash_pair(node, byte) & (trie->room - 1);
    while (trie->edge[i].child && (trie->edge[i].node != node || trie->edge[i].byte != byte))
        i = (i + 1) & (trie->room - 1);
    return i;
}

static int trie_child(const Trie *trie, int node, unsigned char byte) {
    return trie->room ? trie->edge[trie_slot(trie, node, byte)].child : 0;
}

static void trie_grow(Trie *trie) {
    Trie old = *trie;
    trie->room = old.room ? old.room * 2 : 1024;
    trie->edge = allocate_zero(trie->room, sizeof *trie->edge);
    for (size_t i = 0; i < old.room; i++)
        if (old.edge[i].child) trie->edge[trie_slot(trie, old.edge[i].node, old.edge[i].byte)] = old.edge[i];
    free(old.edge);
    trie->id = reallocate(trie->id, (trie->room / 2 + 2) * sizeof *trie->id);
    if (!old.room) trie->id[0] = -1, trie->nodes = 1;
}

static void trie_add(Trie *trie, const char *s, size_t n, int id) {
    int node = 0;
    for (size_t i = 0; i < n; i++) {
        if (trie->edges * 2 >= trie->room) trie_grow(trie);
        size_t slot = trie_slot(trie, node, (unsigned char)s[i]);
        if (!trie->edge[slot].child) {
            trie->edge[slot].node = node;
            trie->edge[slot].byte = (unsigned char)s[i];
            trie->edge[slot].child = trie->nodes;
            trie->id[trie->nodes++] = -1;
            trie->edges++;
        }
        node = trie->edge[slot].child;
    }
    if (trie->id[node] < 0) trie->id[node] = id;
}

static bool is_word(const char *s, size_t n) {
    return n && ((unsigned char)*s >= 0x80 || *s == '_' || (*s >= '0' && *s <= '9') ||
                 ((*s | 32) >= 'a' && (*s | 32) <= 'z'));
}

/* The longest added token that begins at text + at, and its end; -1: none. */
static int trie_match(const Tokenizer *t, const Trie *trie, const char *text, size_t n, size_t at, int flags,
                      size_t *end) {
    int node = 0, best = -1;
    for (size_t i = at; i < n && (node = trie_child(trie, node, (unsigned char)text[i]));) {
        int id = trie->id[node];
        i++;
        if (id < 0 || (t->flags[id] & CONTROL && !(flags & CONTROL_TOKENS))) continue;
        if (t->flags[id] & SINGLE_WORD && ((at && is_word(text + at - 1, 1)) || is_word(text + i, n - i))) continue;
        best = id;
        *end = i;
    }
    return best;
}

/* ---- merging ---- */

/* A heap of 64-bit keys, the least first: candidates for a merge, rank above position. */
typedef struct {
    uint64_t *key;
    size_t n, room;
} Heap;

static void heap_push(Heap *h, uint64_t key) {
    if (h->n == h->room) h->key = reallocate(h->key, (h->room = h->room ? h->room * 2 : 64) * sizeof *h->key);
    size_t i = h->n++;
    for (; i && h->key[(i - 1) / 2] > key; i = (i - 1) / 2) h->key[i] = h->key[(i - 1) / 2];
    h->key[i] = key;
}

static uint64_t heap_pop(Heap *h) {
    uint64_t top = h->key[0], key = h->key[--h->n];
    size_t i = 0;
    for (size_t c; (c = 2 * i + 1) < h->n; i = c) {
        if (c + 1 < h->n && h->key[c + 1] < h->key[c]) c++;
        if (h->key[c] >= key) break;
        h->key[i] = h->key[c];
    }
    h->key[i] = key;
    return top;
}

typedef struct {
    int id, previous, next; /* neighbours by index, -1: none; id -1: merged into its left neighbour */
} Symbol;

typedef struct { /* the work space of one encoding */
    const Tokenizer *t;
    int flags;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    pcre2_jit_stack *stack;
    Symbol *symbol;
    size_t symbols, room;
    Heap heap;
    Ids ids;
    Error *e;
} Encoder;

static void symbol_add(Encoder *w, int id) {
    if (w->symbols == w->room)
        w->symbol = reallocate(w->symbol, (w->room = w->room ? w->room * 2 : 64) * sizeof *w->symbol);
    int i = (int)w->symbols++;
    w->symbol[i] = (Symbol){id, i - 1, -1};
    if (i) w->symbol[i - 1].next = i;
}

static bool byte_add(Encoder *w, unsigned char byte) {
    int id = w->t->byte_token[byte];
    if (id < 0) return fail(w->e, BAD_MODEL, "tokenizer.json has no token for the byte 0x%02X of the text", byte);
    symbol_add(w, id);
    return true;
}

/* One character of a vocabulary of characters: its token, else its bytes' tokens, else the unknown token. */
static bool character_add(Encoder *w, const char *s, size_t n) {
    const Tokenizer *t = w->t;
    int id = *piece_slot(t, s, n);
    if (id >= 0) {
        symbol_add(w, id);
        return true;
    }
    bool bytes = t->byte_fallback;
    for (size_t i = 0; i < n; i++) bytes &= t->byte_token[(unsigned char)s[i]] >= 0;
    if (bytes || t->unknown < 0) {
        for (size_t i = 0; i < n; i++)
            if (!byte_add(w, (unsigned char)s[i])) return false;
    } else if (!(t->fuse_unknown && w->symbols && w->symbol[w->symbols - 1].id == t->unknown)) {
        symbol_add(w, t->unknown);
    }
    return true;
}

static void candidate_push(Encoder *w, int at) {
    int next = at < 0 ? -1 : w->symbol[at].next;
    int rank = next < 0 ? -1 : *pair_slot(w->t, w->symbol[at].id, w->symbol[next].id);
    if (rank >= 0) heap_push(&w->heap, (uint64_t)rank << 32 | (uint32_t)at);
}

/* Byte pair encoding of one word, O(n log n): of all neighbours that can merge the pair of least rank does, the
 * leftmost among equals, until none can. */
static bool merge_word(Encoder *w, const char *s, size_t n) {
    const Tokenizer *t = w->t;
    int whole = t->ignore_merges ? *piece_slot(t, s, n) : -1;
    if (whole >= 0) {
        ids_add(&w->ids, whole);
        return true;
    }
    w->symbols = w->heap.n = 0;
    uint32_t cp;
    for (size_t i = 0; i < n;) {
        int length = t->byte_level ? 1 : utf8_decode(s + i, n - i, &cp);
        if (!(t->byte_level ? byte_add(w, (unsigned char)s[i]) : character_add(w, s + i, (size_t)length))) return false;
        i += (size_t)length;
    }
    for (int i = 0; i < (int)w->symbols; i++) candidate_push(w, i);
    while (w->heap.n) {
        uint64_t key = heap_pop(&w->heap);
        const Merge *m = t->merge + (key >> 32);
        Symbol *left = w->symbol + (uint32_t)key, *right = left->next < 0 ? NULL : w->symbol + left->next;
        if (left->id != m->left || !right || right->id != m->right) continue; /* one of them has merged meanwhile */
        left->id = m->whole;
        left->next = right->next;
        right->id = -1;
        if (left->next >= 0) w->symbol[left->next].previous = (int)(left - w->symbol);
        candidate_push(w, left->previous);
        candidate_push(w, (int)(left - w->symbol));
    }
    for (int i = 0; i >= 0 && w->symbols; i = w->symbol[i].next) ids_add(&w->ids, w->symbol[i].id);
    return true;
}

/* ---- encoding ---- */

static bool split_words(Encoder *w, int step, const char *s, size_t n) {
    const Tokenizer *t = w->t;
    if (!n) return true;
    if (step == t->splits) return merge_word(w, s, n);
    const Split *split = t->split + step;
    Bytes spaced = {0};
    if (split->prefix_space && *s != ' ') {
        bytes_text(&spaced, " ");
        bytes_add(&spaced, s, n);
        s = spaced.data;
        n = spaced.n;
    }
    size_t done = 0, from = 0;
    bool ok = true;
    while (ok && split->pattern && from < n) {
        int found = pcre2_match(split->pattern, (PCRE2_SPTR)s, n, from, PCRE2_NO_UTF_CHECK, w->match, w->limits);
        if (found == PCRE2_ERROR_NOMATCH) break;
        if (found < 0) {
            ok = fail(w->e, BAD_MODEL,
                      "tokenizer.json: its split pattern exceeds the match limit on this text, near byte %zu", from);
            break;
        }
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(w->match);
        size_t begin = at[0], end = at[1]; /* the steps below use the same match data */
        if (end <= begin) {                /* an empty match cuts nothing */
            uint32_t cp;
            from = begin + (size_t)(begin < n ? utf8_decode(s + begin, n - begin, &cp) : 1);
            continue;
        }
        ok = split_words(w, step + 1, s + done, begin - done) && split_words(w, step + 1, s + begin, end - begin);
        done = from = end;
    }
    ok = ok && split_words(w, step + 1, s + done, n - done);
    bytes_free(&spaced);
    return ok;
}

static void replace_all(const Normalizer *r, const char *s, size_t n, Bytes *out) {
    size_t length = strlen(r->from);
    for (size_t i = 0; i < n;) {
        const char *hit = n - i < length ? NULL : memmem(s + i, n - i, r->from, length);
        size_t plain = hit ? (size_t)(hit - s) - i : n - i;
        bytes_add(out, s + i, plain);
        if (hit) bytes_text(out, r->to);
        i += plain + (hit ? length : 0);
    }
}

static bool normalize(const Tokenizer *t, const char *s, size_t n, Bytes *out, Error *e) {
    bytes_add(out, s, n);
    for (int i = 0; i < t->normalizers && out->n; i++) {
        Bytes next = {0};
        if (t->normalizer[i].from) {
            replace_all(t->normalizer + i, out->data, out->n, &next);
        } else {
            bytes_text(&next, t->normalizer[i].to);
            bytes_add(&next, out->data, out->n);
        }
        bytes_free(out);
        *out = next;
        if (out->n > 8 * n + 1000 || out->n > MOST_TEXT)
            return fail(e, BAD_MODEL, "tokenizer.json: its normalizers make %zu bytes of a text of %zu", out->n, n);
    }
    return true;
}

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

/* Cuts out the added tokens of one trie; what lies between goes on to `rest`. */
static bool cut_added(Encoder *w, const Trie *trie, const char *s, size_t n,
                      bool (*rest)(Encoder *, const char *, size_t)) {
    size_t done = 0, end = 0;
    for (size_t i = 0; i < n && trie->nodes;) {
        int id = trie_match(w->t, trie, s, n, i, w->flags, &end);
        if (id < 0) {
            i++;
            continue;
        }
        size_t from = i;
        if (w->t->flags[id] & STRIP_LEFT)
            while (from > done && is_space(s[from - 1])) from--;
        if (w->t->flags[id] & STRIP_RIGHT)
            while (end < n && is_space(s[end])) end++;
        if (!rest(w, s + done, from - done)) return false;
        ids_add(&w->ids, id);
        done = i = end;
    }
    return rest(w, s + done, n - done);
}

static bool encode_normalized(Encoder *w, const char *s, size_t n) { return split_words(w, 0, s, n); }

static bool encode_raw(Encoder *w, const char *s, size_t n) {
    Bytes text = {0};
    bool ok =
        normalize(w->t, s, n, &text, w->e) && cut_added(w, &w->t->normalized, text.data, text.n, encode_normalized);
    bytes_free(&text);
    return ok;
}

bool tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int flags, Ids *out, Error *e) {
    size_t valid = utf8_check(text, n);
    if (valid < n)
        return fail(e, USAGE, "the text is not UTF-8: byte %zu is 0x%02X", valid, (unsigned char)text[valid]);
    if (n > MOST_TEXT) return fail(e, USAGE, "the text has %zu bytes, at most %d can be encoded at once", n, MOST_TEXT);
    Encoder w = {.t = t, .flags = flags, .e = e};
    w.match = pcre2_match_data_create(1, NULL);
    w.limits = pcre2_match_context_create(NULL);
    if (n > 256) w.stack = pcre2_jit_stack_create(32 << 10, 8 << 20, NULL); /* dear; without it there are 32 KiB */
    pcre2_set_match_limit(w.limits, MATCH_LIMIT);
    pcre2_jit_stack_assign(w.limits, NULL, w.stack);
    if (flags & WITH_TEMPLATE) ids_append(&w.ids, t->prefix.data, t->prefix.n);
    bool ok = cut_added(&w, &t->raw, text, n, encode_raw);
    if (flags & WITH_TEMPLATE) ids_append(&w.ids, t->suffix.data, t->suffix.n);
    if (ok) ids_append(out, w.ids.data, w.ids.n);
    pcre2_match_data_free(w.match);
    pcre2_match_context_free(w.limits);
    pcre2_jit_stack_free(w.stack);
    ids_free(&w.ids);
    free(w.symbol);
    free(w.heap.key);
    return ok;
}

/* ---- decoding ---- */

/* The byte that a piece like <0x0A> stands for, or -1. */
static int fallback_byte(const char *s, size_t n) {
    static const char digits[] = "0123456789ABCDEF";
    if (n != 6 || memcmp(s, "<0x", 3) || s[5] != '>') return -1;
    const char *high = memchr(digits, s[3], 16), *low = memchr(digits, s[4], 16);
    return high && low ? (int)((high - digits) << 4 | (low - digits)) : -1;
}

void tokenizer_bytes(const Tokenizer *t, Decoder *d, int id, Bytes *out) {
    if (id < 0 || id >= t->size || !t->piece[id].n) return;
    const char *s = t->text.data + t->piece[id].begin;
    size_t n = t->piece[id].n, before = out->n;
    int byte = t->decode_bytes && !(t->flags[id] & ADDED) ? fallback_byte(s, n) : -1;
    char c = (char)byte;
    if (byte >= 0)
        bytes_add(out, &c, 1);
    else if (t->unreplace.from)
        replace_all(&t->unreplace, s, n, out);
    else
        bytes_add(out, s, n);
    if (!d->begun && t->strip && out->n > before && out->data[before] == t->strip) {
        memmove(out->data + before, out->data + before + 1, out->n - before);
        out->n--;
    }
    d->begun = true;
}

void tokenizer_decode(const Tokenizer *t, Decoder *d, int id, Bytes *out) {
    tokenizer_bytes(t, d, id, &d->held);
    utf8_stream(&d->held, out, false);
}

void tokenizer_flush(Decoder *d, Bytes *out) {
    utf8_stream(&d->held, out, true);
    bytes_free(&d->held);
    *d = (Decoder){0};
}

/* ---- reading the file ---- */

typedef struct {
    Tokenizer *t;
    const char *path;
    int byte_of[512]; /* code point of GPT-2's alphabet to byte, -1: none */
    Error *e;
} Reader;

static bool bad(Reader *r, const char *what, const char *detail) {
    return fail(r->e, BAD_MODEL, "%s: %s%s%.200s", r->path, what, detail ? " " : "", detail ? detail : "");
}

/* GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and up (openai/gpt-2, encoder.py). */
static void alphabet(int byte_of[512]) {
    int next = 256;
    for (int i = 0; i < 512; i++) byte_of[i] = -1;
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
        byte_of[printable ? b : next++] = b;
    }
}

/* Appends the bytes that a piece stands for. A piece with a character outside the alphabet stands for itself. */
static void piece_bytes(const Reader *r, const char *s, size_t n, Bytes *out) {
    size_t before = out->n, k = before;
    bytes_add(out, s, n); /* never fewer bytes than it stands for */
    for (size_t i = 0; r->t->byte_level && i < n;) {
        uint32_t cp = (unsigned char)s[i];
        i += cp < 0x80 ? 1 : (size_t)utf8_decode(s + i, n - i, &cp);
        int byte = cp < 512 ? r->byte_of[cp] : -1;
        if (byte < 0) {
            memcpy(out->data + before, s, n);
            return;
        }
        out->data[k++] = (char)byte;
    }
    if (r->t->byte_level) out->data[out->n = k] = 0;
}

/* Gives an id its bytes, the last ones of t->text. */
static bool piece_define(Reader *r, int id, size_t begin, const char *name) {
    Tokenizer *t = r->t;
    if (t->piece[id].n)
        return fail(r->e, BAD_MODEL, "%s: two tokens have the id %d: '%.100s' is one", r->path, id, name);
    if (t->text.n == begin) return fail(r->e, BAD_MODEL, "%s: the token with the id %d is empty", r->path, id);
    int *slot = piece_slot(t, t->text.data + begin, t->text.n - begin);
    if (*slot >= 0)
        return fail(r->e, BAD_MODEL, "%s: the token '%.100s' has two ids, %d and %d", r->path, name, *slot, id);
    t->piece[id] = (Piece){(uint32_t)begin, (uint32_t)(t->text.n - begin)};
    *slot = id;
    return true;
}

static bool read_id(Reader *r, const cJSON *value, const char *name, int *id) {
    int64_t n;
    if (!json_whole(value, 0, MOST_IDS - 1, &n))
        return fail(r->e, BAD_MODEL, "%s: the id of '%.100s' is not a whole number from 0 to %d", r->path, name,
                    MOST_IDS - 1);
    *id = (int)n;
    return true;
}

static bool read_vocabulary(Reader *r, const cJSON *vocab, const cJSON *added) {
    Tokenizer *t = r->t;
    size_t entries = 0;
    int id = 0;
    for (const cJSON *v = vocab->child; v; v = v->next, entries++) {
        if (!read_id(r, v, v->string, &id)) return false;
        if (id >= t->size) t->size = id + 1;
    }
    cJSON_ArrayForEach(added, added) {
        const char *content = json_string(added, "content");
        if (!content || !*content) return bad(r, "an added token has no content", NULL);
        if (strlen(content) > MOST_ADDED) return bad(r, "an added token has more than 256 bytes:", content);
        if (!read_id(r, json_get(added, "id"), content, &id)) return false;
        if (id >= t->size) t->size = id + 1;
        entries++;
    }
    t->piece = allocate_zero((size_t)t->size, sizeof *t->piece);
    t->flags = allocate_zero((size_t)t->size, sizeof *t->flags);
    t->by_piece = empty_table(entries, &t->by_piece_room);
    for (const cJSON *v = vocab->child; v; v = v->next) {
        size_t begin = t->text.n;
        piece_bytes(r, v->string, strlen(v->string), &t->text);
        if (!piece_define(r, v->valueint, begin, v->string)) return false;
    }
    return true;
}

static bool read_added(Reader *r, const cJSON *list) {
    static const struct {
        const char *key;
        int flag;
    } options[] = {{"special", CONTROL}, {"single_word", SINGLE_WORD}, {"lstrip", STRIP_LEFT}, {"rstrip", STRIP_RIGHT}};
    Tokenizer *t = r->t;
    const cJSON *added;
    cJSON_ArrayForEach(added, list) {
        const char *content = json_string(added, "content");
        int id = json_get(added, "id")->valueint;
        size_t n = strlen(content), begin = t->text.n;
        if (t->flags[id] & ADDED) return fail(r->e, BAD_MODEL, "%s: two added tokens have the id %d", r->path, id);
        /* A vocabulary may list it as well, under the same id. Its text is meant as it stands, not in the alphabet. */
        bool listed = t->piece[id].n == n && !memcmp(t->text.data + t->piece[id].begin, content, n);
        if (!listed) {
            bytes_add(&t->text, content, n);
            if (!piece_define(r, id, begin, content)) return false;
        }
        t->flags[id] = ADDED;
        for (size_t i = 0; i < sizeof options / sizeof *options; i++)
            if (json_true(added, options[i].key)) t->flags[id] |= (unsigned char)options[i].flag;
        if (json_true(added, "normalized")) {
            Bytes text = {0};
            bool ok = normalize(t, content, n, &text, r->e);
            if (ok) trie_add(&t->normalized, text.data, text.n, id);
            bytes_free(&text);
            if (!ok) return false;
        } else {
            trie_add(&t->raw, content, n, id);
        }
    }
    return true;
}

/* A merge is "left right" or ["left", "right"]. */
static bool merge_halves(const cJSON *value, const char **left, size_t *left_n, const char **right) {
    if (cJSON_IsString(value)) {
        const char *space = strchr(value->valuestring, ' ');
        *left = value->valuestring;
        *left_n = space ? (size_t)(space - *left) : 0;
        *right = space ? space + 1 : "";
        return space && !strchr(*right, ' ');
    }
    const cJSON *a = value->child, *b = a ? a->next : NULL;
    if (!cJSON_IsArray(value) || !cJSON_IsString(a) || !cJSON_IsString(b) || b->next) return false;
    *left = a->valuestring;
    *left_n = strlen(*left);
    *right = b->valuestring;
    return true;
}

static bool read_merges(Reader *r, const cJSON *list) {
    Tokenizer *t = r->t;
    Bytes text = {0};
    bool ok = true;
    size_t count = (size_t)cJSON_GetArraySize(list);
    int last = 0;
    t->merge = allocate(count * sizeof *t->merge);
    t->by_pair = empty_table(count, &t->by_pair_room);
    for (const cJSON *v = list->child; v && ok; v = v->next) {
        const char *left, *right;
        size_t left_n;
        if (!merge_halves(v, &left, &left_n, &right)) {
            ok = fail(r->e, BAD_MODEL, "%s: merge %d is neither \"left right\" nor [left, right]", r->path, t->merges);
            break;
        }
        text.n = 0;
        piece_bytes(r, left, left_n, &text);
        size_t cut = text.n;
        piece_bytes(r, right, strlen(right), &text);
        Merge m = {*piece_slot(t, text.data, cut), *piece_slot(t, text.data + cut, text.n - cut), last};
        if (!piece_is(t, m.whole, text.data, text.n)) m.whole++; /* most files list merges in the order of results */
        if (!piece_is(t, m.whole, text.data, text.n)) m.whole = *piece_slot(t, text.data, text.n);
        if (m.left < 0 || m.right < 0 || m.whole < 0) {
            const char *part = m.left < 0 ? "left half" : m.right < 0 ? "right half" : "result";
            ok = fail(r->e, BAD_MODEL, "%s: the %s of merge %d, '%.80s' and '%.80s', is no token", r->path, part,
                      t->merges, left, right);
            break;
        }
        last = m.whole;
        t->merge[t->merges] = m;
        *pair_slot(t, m.left, m.right) = t->merges++; /* of a pair that stands twice the later rank counts */
    }
    bytes_free(&text);
    return ok;
}

/* `\s` in PCRE2 is any white space of Unicode and U+180E, which Unicode 6.3 took out of that property; the engine that
 * tokenizer.json was written for follows Unicode. So \s and \S are spelled out before PCRE2 sees them. */
static void spell_out_space(const char *pattern, Bytes *out) {
    static const char space[] = "\\p{Z}\\t-\\r\\x{85}";
    bool in_class = false;
    for (const char *s = pattern; *s; s++) {
        if (*s == '\\' && (s[1] == 's' || (s[1] == 'S' && !in_class))) {
            if (!in_class) bytes_text(out, *++s == 's' ? "[" : "[^");
            bytes_text(out, space);
            bytes_text(out, in_class ? "" : "]");
            s += in_class;
        } else if (*s == '\\' && s[1]) {
            bytes_add(out, s++, 2);
        } else {
            if (*s == '[' || *s == ']') in_class = *s == '[';
            bytes_add(out, s, 1);
        }
    }
}

static bool compile(Reader *r, const char *pattern, bool literal, pcre2_code **code) {
    Bytes text = {0};
    if (literal)
        bytes_text(&text, pattern);
    else
        spell_out_space(pattern, &text);
    int problem;
    PCRE2_SIZE offset;
    uint32_t options = PCRE2_UTF | PCRE2_NO_UTF_CHECK | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C);
    *code = pcre2_compile((PCRE2_SPTR)text.data, text.n, options, &problem, &offset, NULL);
    bytes_free(&text);
    if (!*code) {
        char message[120];
        pcre2_get_error_message(problem, (PCRE2_UCHAR *)message, sizeof message);
        return fail(r->e, BAD_MODEL, "%s: the split pattern '%.200s' does not compile: %s", r->path, pattern, message);
    }
    pcre2_jit_compile(*code, PCRE2_JIT_COMPLETE); /* where it cannot, the interpreter runs */
    return true;
}

static bool add_split(Reader *r, const char *pattern, bool literal, bool prefix_space) {
    Tokenizer *t = r->t;
    if (t->splits == MOST_STEPS) return bad(r, "too many pre_tokenizers", NULL);
    Split *split = t->split + t->splits;
    if (pattern && !compile(r, pattern, literal, &split->pattern)) return false;
    split->prefix_space = prefix_space;
    t->splits++;
    return true;
}

static const char *type_of(const cJSON *component) {
    const char *type = json_string(component, "type");
    return type ? type : "without a type";
}

/* Runs `one` on a component, or on each part of a Sequence (under `key`) in order. Absent is fine. */
static bool each_component(Reader *r, const cJSON *component, const char *key, bool (*one)(Reader *, const cJSON *)) {
    if (!component || cJSON_IsNull(component)) return true;
    if (strcmp(type_of(component), "Sequence")) return one(r, component);
    const cJSON *part, *list = json_get(component, key);
    if (!cJSON_IsArray(list)) return bad(r, "a Sequence has no list of", key);
    cJSON_ArrayForEach(part, list) if (!one(r, part)) return false;
    return true;
}

static bool read_pre_tokenizer(Reader *r, const cJSON *c) {
    if (!strcmp(type_of(c), "ByteLevel")) {
        const cJSON *use_regex = json_get(c, "use_regex"); /* absent in old files: true */
        bool prefix_space = json_true(c, "add_prefix_space"), regex = !use_regex || cJSON_IsTrue(use_regex);
        r->t->byte_level = true;
        return !(regex || prefix_space) || add_split(r, regex ? gpt2_pattern : NULL, false, prefix_space);
    }
    if (strcmp(type_of(c), "Split")) return bad(r, "no such pre_tokenizer is implemented:", type_of(c));
    const char *behavior = json_string(c, "behavior"), *regex = json_string(json_get(c, "pattern"), "Regex");
    const char *text = json_string(json_get(c, "pattern"), "String");
    if (!behavior || strcmp(behavior, "Isolated"))
        return bad(r, "a Split has a behavior that is not implemented:", behavior ? behavior : "none");
    if (json_true(c, "invert")) return bad(r, "a Split with invert is not implemented", NULL);
    if (!regex && !text) return bad(r, "a Split has neither a Regex nor a String pattern", NULL);
    return add_split(r, regex ? regex : text, !regex, false);
}

static bool read_replace(Reader *r, const cJSON *c, Normalizer *out) {
    const char *from = json_string(json_get(c, "pattern"), "String"), *to = json_string(c, "content");
    if (!from || !*from || !to || strlen(to) > MOST_REPLACEMENT)
        return bad(r, "a Replace needs a pattern String, no Regex, and a content of at most 16 bytes", NULL);
    out->from = copy_text(from, strlen(from));
    out->to = copy_text(to, strlen(to));
    return true;
}

static bool read_normalizer(Reader *r, const cJSON *c) {
    Tokenizer *t = r->t;
    if (t->normalizers == MOST_STEPS) return bad(r, "too many normalizers", NULL);
    Normalizer *out = t->normalizer + t->normalizers;
    if (!strcmp(type_of(c), "Prepend")) {
        const char *text = json_string(c, "prepend");
        if (!text || strlen(text) > MOST_REPLACEMENT) return bad(r, "a Prepend needs a text of at most 16 bytes", NULL);
        out->to = copy_text(text, strlen(text));
    } else if (!strcmp(type_of(c), "Replace")) {
        if (!read_replace(r, c, out)) return false;
    } else {
        return bad(r, "no such normalizer is implemented:", type_of(c));
    }
    t->normalizers++;
    return true;
}

static bool read_decoder(Reader *r, const cJSON *c) {
    Tokenizer *t = r->t;
    const char *type = type_of(c), *content = json_string(c, "content");
    int64_t start, stop;
    if (!strcmp(type, "ByteLevel") || !strcmp(type, "Fuse")) return true;
    if (!strcmp(type, "ByteFallback")) return t->decode_bytes = true;
    if (!strcmp(type, "Replace") && !t->unreplace.from) return read_replace(r, c, &t->unreplace);
    if (!strcmp(type, "Strip")) {
        if (!content || strlen(content) != 1 || !json_whole(json_get(c, "start"), 1, 1, &start) ||
            !json_whole(json_get(c, "stop"), 0, 0, &stop))
            return bad(r, "a Strip decoder other than one ASCII character from the start is not implemented", NULL);
        t->strip = *content;
        return true;
    }
    return bad(r, "no such decoder is implemented:", type);
}

static bool read_post_processor(Reader *r, const cJSON *c) {
    Tokenizer *t = r->t;
    if (!strcmp(type_of(c), "ByteLevel")) return true; /* concerns offsets only */
    if (strcmp(type_of(c), "TemplateProcessing")) return bad(r, "no such post_processor is implemented:", type_of(c));
    const cJSON *part, *id;
    Ids *out = &t->prefix;
    cJSON_ArrayForEach(part, json_get(c, "single")) {
        const char *name = json_string(json_get(part, "SpecialToken"), "id");
        if (json_get(part, "Sequence")) {
            out = &t->suffix;
        } else if (name) {
            const cJSON *ids = json_get(json_get(json_get(c, "special_tokens"), name), "ids");
            if (!cJSON_IsArray(ids) || !ids->child) return bad(r, "the template names a token without ids:", name);
            cJSON_ArrayForEach(id, ids) {
                int64_t n;
                if (!json_whole(id, 0, t->size - 1, &n))
                    return bad(r, "the template has an id outside the vocabulary for", name);
                ids_add(out, (int)n);
                if (t->prefix.n + t->suffix.n > MOST_TEMPLATE) return bad(r, "the template has over 64 tokens", NULL);
            }
        } else {
            return bad(r, "the template has a part that is neither a token nor the text", NULL);
        }
    }
    return true;
}

static void find_byte_tokens(Tokenizer *t) {
    for (int b = 0; b < 256; b++) t->byte_token[b] = -1;
    for (int id = 0; id < t->size; id++) {
        const char *s = t->text.data + t->piece[id].begin;
        size_t n = t->piece[id].n;
        int byte = t->byte_level ? (n == 1 ? (unsigned char)*s : -1) : n ? fallback_byte(s, n) : -1;
        if (byte >= 0) t->byte_token[byte] = id;
    }
}

static bool read_model(Reader *r, const cJSON *file) {
    Tokenizer *t = r->t;
    const cJSON *model = json_get(file, "model"), *vocab = json_get(model, "vocab"),
                *merges = json_get(model, "merges");
    const cJSON *added = json_get(file, "added_tokens");
    const char *type = json_string(model, "type"), *unknown = json_string(model, "unk_token");
    if (!model || (type && strcmp(type, "BPE"))) return bad(r, "its model is not BPE but", type ? type : "missing");
    if (!cJSON_IsObject(vocab) || !vocab->child) return bad(r, "model.vocab is not an object with tokens", NULL);
    if (!cJSON_IsArray(merges)) return bad(r, "model.merges is not an array", NULL);
    if (added && !cJSON_IsArray(added)) return bad(r, "added_tokens is not an array", NULL);
    for (int i = 0; i < 2; i++) {
        const char *key = i ? "end_of_word_suffix" : "continuing_subword_prefix", *text = json_string(model, key);
        if (text && *text) return bad(r, "this option of the model is not implemented:", key);
    }
    t->byte_fallback = json_true(model, "byte_fallback");
    t->fuse_unknown = json_true(model, "fuse_unk");
    t->ignore_merges = json_true(model, "ignore_merges");
    if (!each_component(r, json_get(file, "normalizer"), "normalizers", read_normalizer)) return false;
    if (!each_component(r, json_get(file, "pre_tokenizer"), "pretokenizers", read_pre_tokenizer)) return false;
    if (!each_component(r, json_get(file, "decoder"), "decoders", read_decoder)) return false;
    if (!read_vocabulary(r, vocab, added) || !read_merges(r, merges)) return false;
    find_byte_tokens(t);
    t->unknown = unknown ? *piece_slot(t, unknown, strlen(unknown)) : -1;
    if (!read_added(r, added)) return false;
    return each_component(r, json_get(file, "post_processor"), "processors", read_post_processor);
}

Tokenizer *tokenizer_open(const char *path, Error *e) {
    cJSON *file = json_read(path, MOST_BYTES, e);
    if (!file) return NULL;
    Tokenizer *t = allocate_zero(1, sizeof *t);
    Reader r = {.t = t, .path = path, .e = e};
    alphabet(r.byte_of);
    bool ok = read_model(&r, file);
    cJSON_Delete(file);
    if (ok) return t;
    tokenizer_close(t);
    return NULL;
}

void tokenizer_close(Tokenizer *t) {
    if (!t) return;
    for (int i = 0; i < MOST_STEPS; i++) {
        pcre2_code_free(t->split[i].pattern);
        free(t->normalizer[i].from);
        free(t->normalizer[i].to);
    }
    free(t->unreplace.from);
    free(t->unreplace.to);
    bytes_free(&t->text);
    ids_free(&t->prefix);
    ids_free(&t->suffix);
    void *owned[] = {t->piece,    t->flags,  t->by_piece,        t->merge,        t->by_pair,
                     t->raw.edge, t->raw.id, t->normalized.edge, t->normalized.id};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    free(t);
}

int tokenizer_size(const Tokenizer *t) { return t->size; }

int tokenizer_added(const Tokenizer *t, const char *text) {
    int id = *piece_slot(t, text, strlen(text));
    return id >= 0 && t->flags[id] & ADDED ? id : -1;
}

bool tokenizer_is_control(const Tokenizer *t, int id) { return id >= 0 && id < t->size && t->flags[id] & CONTROL; }
