/* tokenizer.c: byte pair encoding as tokenizer.json describes it. See tokenizer.h.
 *
 * The file describes four steps. Added tokens are cut out of the text. The rest is normalized (NFC, spaces become
 * U+2581) and split into words (PCRE2 runs the file's own pattern). Pairs of tokens merge inside each word. A
 * byte-level file writes every byte as one printable character (GPT-2's alphabet); here a token is the bytes it stands
 * for, so encoding and decoding need no alphabet. Components that are not implemented are refused by name, because a
 * tokenizer that is almost right is wrong. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "sampling.h"
#include "tokenizer.h"

#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* Limits far above any real file. They keep memory and work in proportion to the file and the text. */
enum {
    MOST_TEXT = INT32_MAX / 4, /* bytes of a text */
    MOST_IDS = 1 << 20,
    MOST_SPLITS = 8,
    MOST_ADDED = 256, /* bytes of an added token, or of one with a score, which find_merge() hashes often */
    MOST_MARKS = 256, /* combining marks in a row that NFC sorts, in time that grows with their square */
    STEPS = 100       /* steps of the matcher for a byte of text; real patterns need 5 at most */
};

#define MARK      "▁" /* U+2581, which stands for a space in SentencePiece's vocabularies */
#define JSON(...) #__VA_ARGS__

/* What a file asks for. A mark begins every text (PREPEND_MARK) or the first one (FIRST_MARK); marks replace spaces.
 * Decoding turns marks into spaces (UNMARK_SPACES) and drops the first space (STRIP_SPACE). NFC composes text. */
enum { PREPEND_MARK = 1, FIRST_MARK = 2, MARK_SPACES = 4, UNMARK_SPACES = 8, STRIP_SPACE = 16, NFC = 32 };
/* Words are bytes, not characters; a word that is a token needs no merges; scores take the place of merges. */
enum { BYTE_LEVEL = 64, IGNORE_MERGES = 128, SCORES = 256 };

/* Components of tokenizer.json without parameters. */
static const struct {
    const char *stage, *json;
    int feature;
} parts[] = {
    {"normalizer", JSON({"type" : "Prepend", "prepend" : "▁"}), PREPEND_MARK},
    {"normalizer", JSON({"type" : "Replace", "pattern" : {"String" : " "}, "content" : "▁"}), MARK_SPACES},
    {"normalizer", JSON({"type" : "NFC"}), NFC},
    {"pre_tokenizer", JSON({"type" : "Metaspace", "replacement" : "▁", "prepend_scheme" : "first", "split" : false}),
     FIRST_MARK | MARK_SPACES},
    {"decoder", JSON({"type" : "Replace", "pattern" : {"String" : "▁"}, "content" : " "}), UNMARK_SPACES},
    {"decoder", JSON({"type" : "ByteFallback"}), 0}, /* the vocabulary's model says it too */
    {"decoder", JSON({"type" : "Fuse"}), 0},
    {"decoder", JSON({"type" : "Strip", "content" : " ", "start" : 1, "stop" : 0}), STRIP_SPACE},
};

/* GPT-2's pattern, which a ByteLevel pre-tokenizer with use_regex stands for (openai/gpt-2, encoder.py). */
static const char gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

typedef struct {       /* a token */
    uint32_t begin, n; /* its bytes in Tokenizer.text; n is 0 where an id has none */
    uint32_t rank;     /* with scores: the highest score has the least */
    bool added, control;
    bool byte; /* written <0xXX> */
} Token;

struct Tokenizer {
    int size;                       /* all ids are below it */
    Bytes text;                     /* all tokens' bytes, one after the other */
    Token *token;                   /* (MOST_IDS) */
    Map by_text;                    /* a hash of the bytes -> id */
    Map merge;                      /* (left, right) -> (rank, the token that they become) */
    int features;                   /* PREPEND_MARK, ... */
    int unknown;                    /* -1: none */
    int byte_token[256];            /* byte fallback: those written <0xXX>; -1: there is none */
    pcre2_code *split[MOST_SPLITS]; /* each splits what the one before it leaves */
    int splits;
    /* Added tokens found in raw text, and in normalized text: a hash of each beginning -> id, or MOST_IDS if it goes
     * on. Hashes are compared alone: a text made to collide gets a wrong token, but no control token. */
    Map prefixes[2];
    Ids around[2];                      /* the tokens that WITH_TEMPLATE adds before and behind a text */
    Bytes chat_template, tool_template; /* see tokenizer_template() */
    cJSON *special;                     /* see tokenizer_special() */
};

/* ---- look-up ---- */

static uint64_t pair(int left, int right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

/* The token with these bytes, or -1. define() refuses two tokens with the same hash. */
static int find_token(const Tokenizer *t, const char *s, size_t n) {
    int id = (int)map_get(&t->by_text, text_hash(HASH_OF_NONE, s, n));
    bool same = id >= 0 && id < t->size && t->token[id].n == n && !memcmp(t->text.data + t->token[id].begin, s, n);
    return same ? id : -1;
}

/* The same, but never a control token. */
static int find_plain(const Tokenizer *t, const char *s, size_t n) {
    int id = find_token(t, s, n);
    return id >= 0 && t->token[id].control ? -1 : id;
}

static void prefixes_add(Map *prefixes, const char *s, size_t n, int id) {
    uint64_t h = HASH_OF_NONE;
    for (size_t i = 0; i < n; i++) {
        h = text_hash(h, s + i, 1);
        int known = (int)map_get(prefixes, h);
        if (known < 0 || known == MOST_IDS) map_put(prefixes, h, i + 1 == n ? id : MOST_IDS);
    }
}

/* ---- merging ---- */

typedef struct {            /* a token of a word that is being merged */
    int id, previous, next; /* its neighbours, by index; -1: none */
} Symbol;

typedef struct { /* the work space of one encoding */
    const Tokenizer *t;
    const char *text; /* all of it */
    int flags;
    const char *part; /* the normalized text between two added tokens */
    Bytes seen;       /* the same as the matcher sees it */
    pcre2_match_data *match;
    pcre2_match_context *limits;
    size_t steps, at; /* steps that the matcher may still take; where it was at the last one */
    Symbol *symbol;   /* (bytes of the part) */
    size_t symbols;   /* of a word */
    uint64_t *best;   /* (2 * bytes of the part) see merge_word() */
    Ids *out;
    Error *e;
} Encoder;

/* Adds what merging starts with: the token of a character or, if it has none, those of its bytes. */
static bool character_add(Encoder *w, const char *s, size_t n, size_t begin) {
    const Tokenizer *t = w->t;
    int id = find_plain(t, s, n);
    if (id >= 0) return ids_add(w->out, id), true;
    for (size_t i = 0; i < n; i++) {
        unsigned char byte = (unsigned char)s[i];
        id = t->byte_token[byte];
        if (id < 0 || (id != t->unknown && t->token[id].control))
            return fail(w->e, BAD_MODEL, "tokenizer.json has no token for the byte 0x%02X of the text", byte);
        bool again = w->out->n > begin && w->out->data[w->out->n - 1] == id;
        if (id != t->unknown || !again) ids_add(w->out, id);
    }
    return true;
}

/* The rank of a merge and the token that it makes, or -1. With scores any two tokens merge whose texts together are a
 * token, but not the bytes of a character that has none. Hashes are compared alone, as for added tokens. */
static int64_t find_merge(const Tokenizer *t, int left, int right) {
    if (!(t->features & SCORES)) return map_get(&t->merge, pair(left, right));
    const Token *l = t->token + left, *r = t->token + right;
    uint64_t h = text_hash(HASH_OF_NONE, t->text.data + l->begin, l->n);
    int id = l->byte || r->byte ? -1 : (int)map_get(&t->by_text, text_hash(h, t->text.data + r->begin, r->n));
    return id < 0 ? -1 : (int64_t)pair((int)t->token[id].rank, id);
}

/* Finds the rank of merging a symbol with its right neighbour, and brings the tree above it up to date. */
static void rank_merge(Encoder *w, int at) {
    int next = w->symbol[at].next;
    int64_t merge = next < 0 ? -1 : find_merge(w->t, w->symbol[at].id, w->symbol[next].id);
    bool can = merge != -1 && !w->t->token[(int)merge].control;
    uint64_t *best = w->best;
    size_t i = w->symbols + (size_t)at;
    best[i] = can ? pair((int)(merge >> 32), at) : UINT64_MAX;
    while (i /= 2) {
        uint64_t lesser = best[2 * i] < best[2 * i + 1] ? best[2 * i] : best[2 * i + 1];
        if (best[i] == lesser) break;
        best[i] = lesser;
    }
}

/* Byte pair encoding of one word in O(n log n): of all neighbours that can merge, those with the least rank do, the
 * leftmost among equals, until none can. A tournament finds them: w->best is a binary tree whose leaves, from `symbols`
 * on, are rank << 32 | position of each merge. A parent is the lesser of its two children, best[1] the least of all. */
static bool merge_word(Encoder *w, const char *s, size_t n) {
    const Tokenizer *t = w->t;
    size_t begin = w->out->n;
    int whole = t->features & IGNORE_MERGES ? find_plain(t, s, n) : -1;
    if (whole >= 0) return ids_add(w->out, whole), true;
    uint32_t cp;
    for (size_t i = 0, length; i < n; i += length) {
        length = t->features & BYTE_LEVEL ? 1 : (size_t)utf8_decode(s + i, n - i, &cp);
        if (!character_add(w, s + i, length, begin)) return false;
    }
    Symbol *symbol = w->symbol;
    int symbols = (int)(w->out->n - begin);
    w->symbols = w->out->n - begin;
    memset(w->best, 0xFF, 2 * w->symbols * sizeof *w->best);
    for (int i = 0; i < symbols; i++) symbol[i] = (Symbol){w->out->data[begin + (size_t)i], i - 1, i + 1};
    symbol[symbols - 1].next = -1;
    for (int i = 0; i < symbols; i++) rank_merge(w, i);
    while (w->best[1] != UINT64_MAX) {
        int left = (int)(uint32_t)w->best[1], right = symbol[left].next, next = symbol[right].next;
        symbol[left].id = (int)find_merge(t, symbol[left].id, symbol[right].id);
        symbol[left].next = next;
        symbol[right].next = -1;
        if (next >= 0) symbol[next].previous = left;
        rank_merge(w, right);
        rank_merge(w, left);
        if (symbol[left].previous >= 0) rank_merge(w, symbol[left].previous);
    }
    w->out->n = begin;
    for (int i = 0; i >= 0; i = symbol[i].next) ids_add(w->out, symbol[i].id);
    return true;
}

/* ---- encoding ---- */

typedef struct { /* a part that is cut out of a text; the end of the text if there is none */
    size_t begin, end;
    int id; /* the added token that it is, or -1 */
} Cut;

/* The next added token from `from` on, the longest of those that begin there. A control token counts only with the
 * flag, or where all its bytes are the template's. */
static Cut next_added(const Encoder *w, int step, const char *s, const char *own, size_t n, size_t from) {
    const Tokenizer *t = w->t;
    Cut cut = {n, n, -1};
    for (size_t begin = from; begin < n && cut.id < 0; begin++) {
        uint64_t h = HASH_OF_NONE;
        if ((s[begin] & 0xC0) == 0x80) continue;
        for (size_t i = begin; i < n; i++) {
            h = text_hash(h, s + i, 1);
            int id = (int)map_get(t->prefixes + step, h);
            if (id < 0) break;
            const bool allowed = w->flags & CONTROL_TOKENS || (own && !memchr(own + begin, 0, i + 1 - begin));
            if (id >= t->size || (t->token[id].control && !allowed)) continue;
            if (i + 1 < n && (s[i + 1] & 0xC0) == 0x80) continue; /* amid a character: another text with this hash */
            cut = (Cut){begin, i + 1, id};
        }
    }
    return cut;
}

/* PCRE2 calls this before each item of a pattern. It limits the steps of all matches of a text together, with the
 * bytes between them. PCRE2's own limit is for one match and does not count the bytes. */
static int matcher_step(pcre2_callout_block *block, void *data) {
    Encoder *w = data;
    size_t now = block->current_position, cost = 1 + (now > w->at ? now - w->at : w->at - now);
    w->at = now;
    if (cost > w->steps) return PCRE2_ERROR_MATCHLIMIT;
    w->steps -= cost;
    return 0;
}

/* Finds the next match of a pattern from `from` on. No published pattern matches an empty text. */
static bool next_match(Encoder *w, int number, const char *s, size_t n, size_t from, Cut *cut) {
    const uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    const PCRE2_SIZE *at = pcre2_get_ovector_pointer(w->match);
    w->at = from;
    int found = pcre2_match(w->t->split[number], (PCRE2_SPTR)s, n, from, options, w->match, w->limits);
    *cut = found >= 0 ? (Cut){at[0], at[1], -1} : (Cut){n, n, -1};
    if (found >= 0 || found == PCRE2_ERROR_NOMATCH) return true;
    return fail(w->e, BAD_MODEL,
                "tokenizer.json: its split pattern exceeds the match limit on this text, near byte %zu", from);
}

/* utf8proc calls this for each character. */
static utf8proc_int32_t mark_space(utf8proc_int32_t c, void *features) {
    return c == ' ' && *(const int *)features & MARK_SPACES ? 0x2581 : c;
}

/* Appends the text as the file's normalizer wants it. `first`: the text begins here. It goes to utf8proc in parts, so
 * that none has more than MOST_MARKS combining marks in a row. own: of each byte, is it the template's? A part ends
 * where that changes, unless the next character may compose with the last. NULL: unknown. */
static void normalize(const Tokenizer *t, const char *s, const char *own, size_t n, bool first, Marked *out) {
    bool marked = *s == ' ' || !strncmp(s, MARK, 3);
    if (t->features & PREPEND_MARK || (t->features & FIRST_MARK && first && !marked)) marked_add(out, MARK, 3, false);
    uint32_t c;
    int features = t->features, options = features & NFC ? UTF8PROC_STABLE | UTF8PROC_COMPOSE : 0;
    for (size_t begin = 0, i = 0, marks = 0; begin < n;) {
        i += (size_t)utf8_decode(s + i, n - i, &c);
        const utf8proc_property_t *p = utf8proc_get_property((int32_t)c);
        bool mark = p->combining_class || p->category == UTF8PROC_CATEGORY_MN; /* U+0F73 has no class, but its parts */
        marks = mark ? marks + 1 : 0;
        const bool ends = own && i < n && own[i] != own[i - 1] && (unsigned char)s[i] < 0x80;
        if (i < n && marks < MOST_MARKS && !ends) continue;
        utf8proc_uint8_t *part = NULL;
        utf8proc_ssize_t got = utf8proc_map_custom((const utf8proc_uint8_t *)s + begin, (utf8proc_ssize_t)(i - begin),
                                                   &part, (utf8proc_option_t)options, mark_space, &features);
        if (got < 0) die(&(Error){NO_ROOM, "out of memory: close other programs"});
        marked_add(out, part, (size_t)got, own && !memchr(own + begin, 0, i - begin));
        free(part);
        begin = i;
        marks = 0;
    }
}

/* Begins a part, the normalized text between added tokens. Returns it as the matcher sees it: PCRE2's \s includes
 * U+180E, which is no white space since Unicode 6.3, so U+2060 takes its place, another format character of 3 bytes. */
static const char *begin_part(Encoder *w, const char *s, size_t n) {
    w->part = s;
    w->seen.n = 0;
    bytes_add(&w->seen, s, n);
    for (char *at = w->seen.data; (at = memmem(at, n - (size_t)(at - w->seen.data), "\u180E", 3));)
        memcpy(at, "\u2060", 3);
    w->best = reallocate(w->best, 2 * n * sizeof *w->best);
    w->symbol = reallocate(w->symbol, n * sizeof *w->symbol);
    return w->seen.data;
}

/* Encodes text by the steps from number `step` on. Each cuts out some parts, and hands the text between them to the
 * next step. 0: added tokens; 1: those that are found in normalized text; then: what each pattern matches, until words
 * are left to merge. */
static bool encode_from(Encoder *w, int step, const char *s, const char *own, size_t n) {
    const Tokenizer *t = w->t;
    LocalMarked text = {0};
    if (!n) return true;
    if (step == 1 && t->features & (PREPEND_MARK | FIRST_MARK | MARK_SPACES | NFC)) {
        normalize(t, s, own, n, s == w->text, &text);
        s = text.text.data;
        n = text.text.n;
        own = own ? text.own.data : NULL;
    }
    if (step == 2) s = begin_part(w, s, n);
    if (step == 2 + t->splits) return merge_word(w, w->part + (s - w->seen.data), n);
    Cut cut;
    for (size_t done = 0; done < n; done = cut.end) {
        if (step < 2)
            cut = next_added(w, step, s, own, n, done);
        else if (!next_match(w, step - 2, s, n, done, &cut))
            return false;
        if (!encode_from(w, step + 1, s + done, own ? own + done : NULL, cut.begin - done)) return false;
        if (cut.id >= 0)
            ids_add(w->out, cut.id);
        else if (!encode_from(w, step + 1, s + cut.begin, NULL, cut.end - cut.begin))
            return false;
    }
    return true;
}

static bool encode(const Tokenizer *t, const char *text, const char *own, size_t n, int flags, Ids *out, Error *e) {
    if (!check_text("the text", text, n, e)) return false;
    if (n > MOST_TEXT) return fail(e, USAGE, "the text has %zu bytes, at most %d can be encoded at once", n, MOST_TEXT);
    Encoder w = {.t = t, .text = text, .flags = flags, .out = out, .e = e, .steps = (n + 10000) * STEPS};
    w.match = pcre2_match_data_create(1, NULL);
    w.limits = pcre2_match_context_create(NULL);
    pcre2_set_callout(w.limits, matcher_step, &w);
    pcre2_set_heap_limit(w.limits, 1 << 20); /* KiB */
    size_t before = out->n;
    if (flags & WITH_TEMPLATE) ids_append(out, t->around[0].data, t->around[0].n);
    bool ok = encode_from(&w, 0, text, own, n);
    if (flags & WITH_TEMPLATE) ids_append(out, t->around[1].data, t->around[1].n);
    if (!ok) out->n = before;
    pcre2_match_data_free(w.match);
    pcre2_match_context_free(w.limits);
    bytes_free(&w.seen);
    free(w.symbol), free(w.best);
    return ok;
}

bool tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int flags, Ids *out, Error *e) {
    return encode(t, text, NULL, n, flags, out, e);
}

bool tokenizer_encode_marked(const Tokenizer *t, const Marked *text, Ids *out, Error *e) {
    return !text->text.n || encode(t, text->text.data, text->own.data, text->text.n, 0, out, e);
}

size_t tokenizer_room(const Tokenizer *t, size_t tokens) {
    size_t most = 1;
    for (int id = 0; id < t->size; id++) most = t->token[id].n > most ? t->token[id].n : most;
    if (t->features & NFC) most *= 3; /* no character takes more than three times its bytes when it is decomposed */
    return t->unknown >= 0 ? SIZE_MAX : tokens * most; /* a row of unknown characters is one token */
}

/* ---- decoding ---- */

void tokenizer_bytes(const Tokenizer *t, Decoder *d, int id, Bytes *out) {
    if (id < 0 || id >= t->size || !t->token[id].n) return;
    const char *s = t->text.data + t->token[id].begin, *end = s + t->token[id].n;
    for (bool begun = d->begun; s < end; begun = true) {
        bool marked = t->features & UNMARK_SPACES && end - s >= 3 && !memcmp(s, MARK, 3);
        char c = marked ? ' ' : *s;
        if (begun || !(t->features & STRIP_SPACE) || c != ' ') bytes_add(out, &c, 1);
        s += marked ? 3 : 1;
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

/* The byte that a character of GPT-2's alphabet stands for, or -1: printable ones stand for themselves, the 68 other
 * bytes are U+0100 and up (openai/gpt-2, encoder.py). */
static int alphabet_byte(uint32_t c) {
    if ((c >= '!' && c <= '~') || (c >= 0xA1 && c <= 0xFF && c != 0xAD)) return (int)c;
    if (c >= 0x100 && c <= 0x120) return (int)c - 0x100; /* 0 to 32 */
    if (c >= 0x121 && c <= 0x142) return (int)c - 0xA2;  /* 127 to 160 */
    return c == 0x143 ? 0xAD : -1;
}

/* Appends a token's bytes to t->text. Those of a byte-level vocabulary are in GPT-2's alphabet, unless the token has a
 * character outside of it: false. */
static bool text_add(Tokenizer *t, const char *s, size_t n) {
    size_t before = t->text.n;
    uint32_t c;
    bool literal = !(t->features & BYTE_LEVEL);
    for (size_t i = 0; i < n && !literal;) {
        i += (size_t)utf8_decode(s + i, n - i, &c);
        int byte = alphabet_byte(c);
        literal = byte < 0;
        bytes_add(&t->text, &(char){(char)byte}, 1);
    }
    if (!literal) return true;
    t->text.n = before;
    bytes_add(&t->text, s, n);
    return !(t->features & BYTE_LEVEL);
}

/* Adds a token of the vocabulary, or an added one that it does not list. */
static bool define(Tokenizer *t, double number, const char *name, Error *e) {
    if (!(number >= 0 && number < MOST_IDS && number == (int)number))
        return fail(e, BAD_MODEL, "the id of '%.100s' is not a whole number below %d", name, MOST_IDS);
    int id = (int)number;
    size_t begin = t->text.n;
    text_add(t, name, strlen(name));
    size_t n = t->text.n - begin;
    uint64_t key = text_hash(HASH_OF_NONE, t->text.data + begin, n);
    if (!n || t->token[id].n || map_get(&t->by_text, key) >= 0)
        return fail(e, BAD_MODEL, "the token '%.100s', id %d, is empty, or its text or id appears twice", name, id);
    if (t->size <= id) t->size = id + 1;
    t->token[id] = (Token){.begin = (uint32_t)begin, .n = (uint32_t)n};
    map_put(&t->by_text, key, id);
    return true;
}

/* Finds the tokens for characters that have none: byte fallback's <0x00> to <0xFF>, or the unknown token. A row of
 * unknown tokens becomes one. */
static void find_byte_tokens(Tokenizer *t, bool fallback) {
    int known = 0;
    for (int b = 0; b < 256; b++) {
        LocalText name = text_print("<0x%02X>", b);
        int id = t->byte_token[b] = fallback ? find_token(t, name, 6) : -1;
        if (id < 0) continue;
        t->text.data[t->token[id].begin] = (char)b; /* what it decodes to */
        t->token[id].n = 1;
        t->token[id].byte = true;
        known++;
    }
    for (int b = 0; b < 256 && !known; b++) t->byte_token[b] = t->unknown;
}

/* Reads a token that is cut out of the text first. If the vocabulary lists its name, the id there counts. */
static bool read_added(Tokenizer *t, const cJSON *added, Error *e) {
    const char *text = json_string(added, "content");
    const double number = cJSON_GetNumberValue(json_get(added, "id")); /* NaN if it is none */
    const bool normalized = json_true(added, "normalized");
    if (!text) return fail(e, BAD_MODEL, "an added token has no content");
    if (json_true(added, "single_word") || json_true(added, "lstrip") || json_true(added, "rstrip"))
        return fail(e, BAD_MODEL, "single_word, lstrip and rstrip of '%.100s' are not implemented", text);
    size_t n = strlen(text), begin = t->text.n; /* the end of the text is work space */
    const bool listed = text_add(t, text, n);
    int id = find_token(t, t->text.data + begin, t->text.n - begin);
    t->text.n = begin;
    if (n > MOST_ADDED) return fail(e, BAD_MODEL, "the added token '%.100s' has more than %d bytes", text, MOST_ADDED);
    if ((id < 0 || (!listed && id != number)) && !define(t, number, text, e)) return false;
    if (id < 0) id = (int)number;
    if (t->token[id].added)
        return fail(e, BAD_MODEL, "the added token '%.100s', id %.15g, or its id appears twice", text, number);
    t->token[id].added = true;
    t->token[id].control = json_true(added, "special");
    LocalMarked found = {0};
    normalized ? normalize(t, text, NULL, n, false, &found) : marked_add(&found, text, n, false);
    prefixes_add(t->prefixes + normalized, found.text.data, found.text.n, id);
    return true;
}

/* A merge is "left right" or ["left", "right"]. */
static bool read_merges(Tokenizer *t, const cJSON *merges, Error *e) {
    const cJSON *merge;
    int rank = -1;
    cJSON_ArrayForEach(merge, merges) {
        const cJSON *a = cJSON_IsArray(merge) ? merge->child : NULL, *b = a ? a->next : NULL;
        const char *left = cJSON_GetStringValue(a ? a : merge), *right = cJSON_GetStringValue(b);
        const char *space = left && !a ? strchr(left, ' ') : NULL;
        rank++;
        if (space) right = space + 1;
        if (!left || !right || (b && b->next))
            return fail(e, BAD_MODEL, "merge %d is neither \"left right\" nor [left, right]", rank);
        size_t begin = t->text.n; /* the end of the text is work space */
        text_add(t, left, space ? (size_t)(space - left) : strlen(left));
        size_t cut = t->text.n;
        text_add(t, right, strlen(right));
        /* Compares hashes alone: reading the bytes costs cache misses, and a file with collisions harms only itself. */
        uint64_t hash_left = text_hash(HASH_OF_NONE, t->text.data + begin, cut - begin);
        int first = (int)map_get(&t->by_text, hash_left);
        int second = (int)map_get(&t->by_text, text_hash(HASH_OF_NONE, t->text.data + cut, t->text.n - cut));
        int whole = (int)map_get(&t->by_text, text_hash(hash_left, t->text.data + cut, t->text.n - cut));
        const char *missing = first < 0 ? "left half" : second < 0 ? "right half" : whole < 0 ? "result" : NULL;
        t->text.n = begin;
        if (missing)
            return fail(e, BAD_MODEL, "the %s of merge %d, '%.80s' '%.80s', is no token", missing, rank, left, right);
        map_put(&t->merge, pair(first, second), pair(rank, whole)); /* of a pair listed twice the later rank counts */
    }
    return true;
}

/* "scores", one for each id, take the place of merges: SentencePiece keeps its vocabularies so. No tokenizer.json of
 * the hub has this key, but what is made from files of other formats has. */
static bool read_scores(Tokenizer *t, const cJSON *scores, Error *e) {
    const cJSON *score = scores->child;
    t->features |= SCORES;
    for (int id = 0; id < t->size; id++, score = score ? score->next : NULL) {
        t->token[id].rank = ~order_key(score ? (float)score->valuedouble + 0.0f : 0); /* -0 is 0 */
        if (t->token[id].n > MOST_ADDED)
            return fail(e, BAD_MODEL, "the token %d has more than %d bytes", id, MOST_ADDED);
    }
    return true;
}

static bool read_model(Tokenizer *t, const cJSON *model, Error *e) {
    const cJSON *vocab = json_get(model, "vocab"), *merges = json_get(model, "merges"), *token;
    const cJSON *scores = json_get(model, "scores");
    const char *type = json_string(model, "type"), *unknown = json_string(model, "unk_token");
    const char *prefix = json_string(model, "continuing_subword_prefix");
    const char *suffix = json_string(model, "end_of_word_suffix");
    if ((type && strcmp(type, "BPE")) || !cJSON_IsObject(vocab) || !cJSON_IsArray(merges))
        return fail(e, BAD_MODEL, "its model (%.100s) is not BPE with vocab, an object, and merges, an array",
                    type ? type : "no type");
    if ((prefix && *prefix) || (suffix && *suffix))
        return fail(e, BAD_MODEL, "continuing_subword_prefix and end_of_word_suffix are not implemented");
    if (json_true(model, "ignore_merges")) t->features |= IGNORE_MERGES;
    cJSON_ArrayForEach(token, vocab) if (!define(t, cJSON_GetNumberValue(token), token->string, e)) return false;
    if (!read_merges(t, merges, e) || (scores && !read_scores(t, scores, e))) return false;
    t->unknown = unknown && json_true(model, "fuse_unk") ? find_token(t, unknown, strlen(unknown)) : -1;
    find_byte_tokens(t, json_true(model, "byte_fallback"));
    return true;
}

/* ---- its components; false: it is not implemented ---- */

static bool add_split(Tokenizer *t, const char *pattern) {
    int problem;
    PCRE2_SIZE offset;
    uint32_t references;
    const uint32_t options = PCRE2_UTF | PCRE2_NO_UTF_CHECK | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT |
                             PCRE2_MULTILINE; /* `tokenizers` has Ruby's ^ and $: of any line */
    if (!pattern || t->splits == MOST_SPLITS) return false;
    /* \K could move a match to before where the matcher began; the bytes that \X looks back over cannot be counted */
    if (strstr(pattern, "\\K") || strstr(pattern, "\\X")) return false;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, options, &problem, &offset, NULL);
    if (!code) return false;
    t->split[t->splits++] = code;
    pcre2_pattern_info(code, PCRE2_INFO_BACKREFMAX, &references);
    return !references; /* matcher_step() cannot count the bytes that they compare */
}

static bool read_byte_level(Tokenizer *t, const cJSON *c) {
    const cJSON *use_regex = json_get(c, "use_regex"); /* absent in old files: true */
    t->features |= BYTE_LEVEL;
    if (json_true(c, "add_prefix_space")) return false;
    return (use_regex && !cJSON_IsTrue(use_regex)) || add_split(t, gpt2_pattern);
}

/* The template puts tokens before the text and behind it. special_tokens has the ids of their names, which need not be
 * those of the vocabulary. */
static bool read_template(Tokenizer *t, const cJSON *c) {
    const cJSON *list = json_get(c, "single"), *one, *each;
    bool behind = false;
    cJSON_ArrayForEach(one, list) {
        const char *name = json_string(json_get(one, "SpecialToken"), "id");
        const cJSON *ids = name ? json_get(json_get(json_get(c, "special_tokens"), name), "ids") : NULL;
        const int known = name ? find_token(t, name, strlen(name)) : -1;
        int64_t id;
        if (name && !ids && known >= 0) ids_add(t->around + behind, known);
        cJSON_ArrayForEach(each, ids) {
            if (!json_whole(each, 0, t->size - 1, &id)) return false;
            ids_add(t->around + behind, (int)id);
        }
        if (name ? !ids && known < 0 : behind || !json_get(one, "Sequence")) return false;
        behind |= !name;
    }
    return behind;
}

static bool read_part(Tokenizer *t, const char *stage, const cJSON *c) {
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        LocalJson known = cJSON_Parse(parts[i].json);
        if (!strcmp(parts[i].stage, stage) && cJSON_Compare(known, c, true))
            return t->features |= parts[i].feature, true;
    }
    bool splits = !strcmp(stage, "pre_tokenizer"), ends = !strcmp(stage, "post_processor");
    if (json_is(c, "type", "ByteLevel")) return splits ? read_byte_level(t, c) : strcmp(stage, "normalizer");
    if (ends) return json_is(c, "type", "TemplateProcessing") && read_template(t, c);
    if (splits && json_is(c, "type", "Digits"))
        return add_split(t, json_true(c, "individual_digits") ? "\\p{N}" : "\\p{N}+");
    if (!splits || !json_is(c, "type", "Split")) return false;
    const cJSON *pattern = json_get(c, "pattern");
    if (json_is(c, "behavior", "MergedWithPrevious") && t->features & MARK_SPACES)
        return json_is(pattern, "String", " "); /* it finds no space, because all are marks */
    return json_is(c, "behavior", "Isolated") && !json_true(c, "invert") && add_split(t, json_string(pattern, "Regex"));
}

/* Reads a stage (normalizer, decoder, ...): one component, a Sequence of them under the key `list`, or absent. */
static bool read_stage(Tokenizer *t, const cJSON *file, const char *name, const char *list, Error *e) {
    const cJSON *stage = json_get(file, name), *sequence = json_get(stage, list);
    bool many = json_is(stage, "type", "Sequence") && cJSON_IsArray(sequence);
    for (const cJSON *c = many ? sequence->child : stage; c; c = many ? c->next : NULL) {
        if (read_part(t, name, c)) continue;
        LocalText text = json_text(c);
        return fail(e, BAD_MODEL, "this %s is not implemented: %.400s", name, text);
    }
    return true;
}

static bool read_tokenizer(Tokenizer *t, const cJSON *file, Error *e) {
    const cJSON *added = json_get(file, "added_tokens"), *one;
    if (!read_stage(t, file, "normalizer", "normalizers", e)) return false;
    if (!read_stage(t, file, "pre_tokenizer", "pretokenizers", e)) return false;
    if (!read_stage(t, file, "decoder", "decoders", e)) return false;
    if (!read_model(t, json_get(file, "model"), e)) return false;
    if (added && !cJSON_IsArray(added)) return fail(e, BAD_MODEL, "added_tokens is not an array");
    cJSON_ArrayForEach(one, added) if (!read_added(t, one, e)) return false;
    return read_stage(t, file, "post_processor", "processors", e);
}

/* ---- chat templates, which also tell which tokens are control tokens ---- */

/* Appends all texts of `template` to `all`, and the model's own to `to`, unless that is NULL. In a list of {"name",
 * "template"} that is "default", and "tool_use" is the one for prompts with tools. */
static void add_template(Tokenizer *t, const cJSON *template, Bytes *to, Bytes *all) {
    const char *text = cJSON_GetStringValue(template);
    const cJSON *part;
    if (text) bytes_text(all, text);
    if (text && to) bytes_text(to, text);
    cJSON_ArrayForEach(part, template) {
        const bool counts = part->string ? !strcmp(part->string, "template") : json_is(part, "name", "default");
        const bool tools = !part->string && json_is(part, "name", "tool_use");
        add_template(t, part, !to ? NULL : counts ? to : tools ? &t->tool_template : NULL, all);
    }
}

/* The files beside tokenizer.json: the first with a template counts, and tokenizer_config.json says whether a text
 * begins with a token, and which texts a template gets by name. */
static bool read_companions(Tokenizer *t, JsonFile *json, const void *model, Bytes *all, Error *e) {
    static const char *const names[] = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja",
                                        "chat_template.json", "tokenizer_config.json"};
    static const char *const special[] = {"bos_token", "eos_token", "unk_token", "pad_token"};
    for (int i = 0; i < 4; i++) {
        LocalJson file = json(model, names[i], e);
        if (!file && e->code) return false;
        for (int k = 0; k < 4; k++) {
            const cJSON *token = json_get(file, special[k]);
            const char *name = cJSON_IsString(token) ? token->valuestring : json_string(token, "content");
            if (!name) continue;
            json_add(t->special, special[k], json_word(name), NULL);
            bytes_text(all, name);
        }
        const cJSON *add = json_get(file, "add_bos_token");
        const char *bos = json_string(t->special, "bos_token");
        const int first = cJSON_IsTrue(add) && bos ? find_token(t, bos, strlen(bos)) : -1;
        if (cJSON_IsBool(add)) t->around[0].n = 0;
        if (first >= 0) ids_add(t->around, first);
        Bytes *to = i == 1 ? &t->tool_template : t->chat_template.n ? NULL : &t->chat_template;
        add_template(t, i > 1 ? json_get(file, "chat_template") : file, to, all);
    }
    return true;
}

/* Every added token that a chat template names is a control token, whatever the file says, so that ordinary text never
 * becomes one. Each is searched for in all of the templates, hence the limit. */
static bool mark_control(Tokenizer *t, const Bytes *template, Error *e) {
    if (template->n > UINT32_MAX / (1 + t->prefixes[0].n + t->prefixes[1].n))
        return fail(e, BAD_MODEL, "the chat template is too long for so many added tokens");
    for (int id = 0; id < t->size; id++) {
        Token *p = t->token + id;
        const char *name = t->text.data + p->begin;
        if (p->added && (unsigned char)*name > ' ' && memmem(template->data, template->n, name, p->n))
            p->control = true;
    }
    return true;
}

Tokenizer *tokenizer_open(const char *path, JsonFile *json, const void *model, Error *e) {
    LocalJson file = json(model, "tokenizer.json", e);
    if (!file && !e->code) fail(e, BAD_MODEL, "%s: missing; infer download gets the rest of a model", path);
    if (!file) return NULL;
    Tokenizer *t = allocate_zero(1, sizeof *t);
    LocalBytes templates = {0};
    t->unknown = -1;
    t->special = cJSON_CreateObject();
    t->token = allocate_zero(MOST_IDS, sizeof *t->token);
    bytes_text(&t->text, ""), bytes_text(&templates, "");
    bytes_text(&t->chat_template, ""), bytes_text(&t->tool_template, "");
    bool ok = read_tokenizer(t, file, e) || fail(e, BAD_MODEL, "%s: %s", path, e->text);
    if (ok && read_companions(t, json, model, &templates, e) && mark_control(t, &templates, e)) return t;
    tokenizer_close(t);
    return NULL;
}

void tokenizer_close(Tokenizer *t) {
    if (!t) return;
    for (int i = 0; i < t->splits; i++) pcre2_code_free(t->split[i]);
    map_free(&t->by_text), map_free(&t->merge), map_free(t->prefixes), map_free(t->prefixes + 1);
    bytes_free(&t->text), bytes_free(&t->chat_template), bytes_free(&t->tool_template);
    ids_free(t->around), ids_free(t->around + 1);
    cJSON_Delete(t->special);
    free(t->token), free(t);
}

bool tokenizer_fit(Tokenizer *t, int vocab) {
    for (int id = vocab; id < t->size; id++)
        if (t->token[id].n && !t->token[id].added) return false;
    for (int id = vocab; id < t->size; id++) t->token[id].control = true; /* no merge makes it */
    for (int b = 0; b < 256; b++)
        if (t->byte_token[b] >= vocab) t->byte_token[b] = -1;
    for (int k = 0; k < 2; k++) {
        const Ids all = t->around[k];
        t->around[k].n = 0;
        for (size_t i = 0; i < all.n; i++)
            if (all.data[i] < vocab) t->around[k].data[t->around[k].n++] = all.data[i];
    }
    if (t->size > vocab) t->size = vocab;
    return true;
}

const char *tokenizer_template(const Tokenizer *t, bool tools) {
    return tools ? t->tool_template.data : t->chat_template.data;
}

int tokenizer_size(const Tokenizer *t) { return t->size; }

int tokenizer_added(const Tokenizer *t, const char *text) {
    int id = find_token(t, text, strlen(text));
    return id >= 0 && t->token[id].added ? id : -1;
}

const cJSON *tokenizer_special(const Tokenizer *t) { return t->special; }

bool tokenizer_is_control(const Tokenizer *t, int id) { return id >= 0 && id < t->size && t->token[id].control; }
