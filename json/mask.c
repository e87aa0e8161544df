/* mask.c: the tokens that may come next. All tokens stand in a trie of their bytes, in the order in which a walk from
 * the root meets its branches; a walk that carries the grammar's state skips what lies below a byte that cannot come.
 * Three things make it quick. The row of a state is kept. States that differ in counts out of reach share one. And
 * nothing is walked in a string where any letters, or any of a set, may come up to its end: one walk for all such
 * strings tells which tokens stay in it and how many letters they need, and where in the trie it may end; only from
 * there on each text is walked by itself. */
#include "json.h"

#include <stdlib.h>
#include <string.h>

/* A token of more bytes than MOST_BYTES is never allowed. */
enum { MOST_BYTES = 250, MOST_ROWS = 1024, MOST_WEIGHT = 50000, MOST_WORK = 5000000 };
/* Larger counts than SHORT are out of a token's reach. From MANY on, one walk for all counts is worth its room. */
enum { SHORT = 32, LETTERS = SHORT + 2, MANY = 9 };

typedef struct {
    int end, first; /* the branch behind all below it; its first token, in Vocabulary.token */
    uint8_t byte, depth;
} Branch;

struct Strings {     /* what tokens do in strings of one kind of letters */
    int letter, end; /* nodes; unset in a Vocabulary */
    uint32_t *row;   /* (LETTERS, words) tokens that stay in the string and need at most so many; the last one: all */
    Ids exits;       /* branches where the string ends, and how many it has before that */
};

struct Vocabulary {
    size_t words; /* of a row */
    int branches, size;
    Branch *branch; /* (branches + 1) in the order of a walk; 0 is the root */
    int *token;     /* (size) in the same order */
    Bytes text;     /* of token id: text.data[begin[id]] .. text.data[begin[id + 1] - 1] */
    int *begin;     /* (ids + 1) */
    int ids;
    Ids longer;            /* tokens of more than SHORT bytes; see short_state() */
    Strings letter, plain; /* of these nodes of a Grammar, which are alike in all */
};

/* ---- the trie ---- */

Bytes token_text(const Vocabulary *v, int id) {
    if (id < 0 || id >= v->ids) return (Bytes){0};
    return (Bytes){.data = v->text.data + v->begin[id], .n = (size_t)(v->begin[id + 1] - v->begin[id])};
}

static int by_bytes(const void *a, const void *b, void *data) {
    const Bytes x = token_text(data, *(const int *)a), y = token_text(data, *(const int *)b);
    const int order = memcmp(x.data, y.data, x.n < y.n ? x.n : y.n);
    return order ? order : x.n != y.n ? (x.n < y.n ? -1 : 1) : *(const int *)a - *(const int *)b;
}

static void add_branch(Vocabulary *v, int *room, uint8_t byte, size_t depth, int first) {
    if (v->branches + 1 >= *room)
        v->branch = reallocate(v->branch, (size_t)(*room = *room ? 2 * *room : 1024) * sizeof *v->branch);
    v->branch[v->branches++] = (Branch){.first = first, .byte = byte, .depth = (uint8_t)depth};
}

static void build_trie(Vocabulary *v) {
    int path[MOST_BYTES + 1] = {0}, room = 0;
    size_t depth = 0;
    Bytes before = {0};
    add_branch(v, &room, 0, 0, 0);
    for (int i = 0; i <= v->size; i++) {
        const Bytes text = i < v->size ? token_text(v, v->token[i]) : (Bytes){0};
        size_t same = 0;
        while (same < text.n && same < depth && text.data[same] == before.data[same]) same++;
        for (; depth > same; depth--) v->branch[path[depth]].end = v->branches;
        for (; depth < text.n; path[++depth] = v->branches - 1)
            add_branch(v, &room, (uint8_t)text.data[depth], depth + 1, i);
        before = text;
    }
    v->branch[0].end = v->branches;
    v->branch[v->branches] = (Branch){.first = v->size};
}

/* Sets the bits of the tokens at the branches from .. to - 1. */
static void set_tokens(const Vocabulary *v, int from, int to, uint32_t *row) {
    for (int k = v->branch[from].first; k < v->branch[to].first; k++) row[v->token[k] / 32] |= 1u << v->token[k] % 32;
}

/* A text is read in one way only, so it is sure how many letters there are. */
static void read_strings(const Vocabulary *v, Grammar *g, int letter, int end, Strings *out) {
    int path[MOST_BYTES + 1], count[MOST_BYTES + 1] = {0};
    const int start = path[0] = seq_node(g, repeat_node(g, letter, 0, ENDLESS), end);
    out->row = allocate_zero(LETTERS * v->words, sizeof *out->row);
    for (int i = 1; i < v->branches;) {
        const Branch *b = v->branch + i;
        const int next = path[b->depth] = state_step(g, path[b->depth - 1], b->byte);
        const int letters = count[b->depth] = count[b->depth - 1] + (next == start);
        const int need = letters + (next != start); /* one that has begun needs room, too */
        if (next == NOTHING) ids_append(&out->exits, (const int[]){i, letters}, 2);
        if (next == NEVER || next == NOTHING) {
            i = b->end;
            continue;
        }
        set_tokens(v, i, i + 1, out->row + (size_t)(need < LETTERS ? need : LETTERS - 1) * v->words);
        i++;
    }
    for (size_t w = v->words; w < LETTERS * v->words; w++) out->row[w] |= out->row[w - v->words];
}

Vocabulary *vocabulary_open(const Tokenizer *t, int ids, const int *control, int controls) {
    Vocabulary *v = allocate_zero(1, sizeof *v);
    const int n = tokenizer_size(t) < ids ? tokenizer_size(t) : ids;
    v->words = ((size_t)ids + 31) / 32, v->ids = n;
    v->begin = allocate(((size_t)n + 1) * sizeof *v->begin);
    v->token = allocate((size_t)n * sizeof *v->token + 1);
    for (int id = 0; id < n; id++) {
        int c = 0;
        while (c < controls && control[c] != id) c++;
        const bool marks = c < controls || tokenizer_is_control(t, id);
        const char mark[] = {(char)CONTROL, (char)(id >> 14), (char)(id >> 7 & 127), (char)(id & 127)};
        const size_t begin = v->text.n;
        marks ? bytes_add(&v->text, mark, 4) : tokenizer_bytes(t, &(Decoder){.begun = true}, id, &v->text);
        const size_t size = v->text.n - begin;
        if (!marks && size && memchr(v->text.data + begin, CONTROL, size)) v->text.n = begin; /* no text is like one */
        if (v->text.n > begin && size <= MOST_BYTES) v->token[v->size++] = id;
        if (v->text.n > begin && size <= MOST_BYTES && size > SHORT) ids_add(&v->longer, id);
        v->begin[id] = (int)begin, v->begin[id + 1] = (int)v->text.n;
    }
    qsort_r(v->token, (size_t)v->size, sizeof *v->token, by_bytes, v);
    build_trie(v);
    Grammar g;
    grammar_open(&g);
    make_letters(&g);
    read_strings(v, &g, g.letter, g.quote, &v->letter);
    read_strings(v, &g, g.plain, g.quote, &v->plain);
    grammar_close(&g);
    return v;
}

void vocabulary_close(Vocabulary *v) {
    if (!v) return;
    bytes_free(&v->text), ids_free(&v->longer), ids_free(&v->letter.exits), ids_free(&v->plain.exits);
    free(v->letter.row), free(v->plain.row), free(v->branch), free(v->token), free(v->begin), free(v);
}

int state_token(Grammar *g, const Vocabulary *v, int state, int id) {
    const Bytes text = token_text(v, id);
    return text.n ? state_run(g, state, text.data, text.n) : NEVER;
}

/* ---- masks ---- */

/* In how many ways a text may be read that has this state: a derivative takes about so long. */
static int weight(const Grammar *g, int state) {
    while (node_kind(g, state) == SEQ) state = tuple(g, state)[1];
    const int *t = tuple(g, state);
    if (*t == ALT) return tuple_size(g, state) - 1;
    return *t == AND || *t == BUT ? weight(g, t[1]) + weight(g, t[2]) : 1;
}

/* The state behind a byte. *spent: the weights of all states that this walk met. It depends on where the walk began
 * alone, and not on what the grammar knows already. */
static int walk_on(Grammar *g, int state, uint8_t byte, int64_t *spent) {
    const int next = state_step(g, state, byte);
    if (g->node[next].walk != g->walks) *spent += weight(g, next);
    g->node[next].walk = g->walks;
    return next;
}

/* Sets the bits of the tokens below a branch that the state there allows. A grammar may be so ambiguous that this would
 * take too long: then longer tokens are left out, but for the marks that end a text. */
static void walk(Grammar *g, const Vocabulary *v, int at, int state, uint32_t *row) {
    int path[MOST_BYTES + 1];
    const int end = v->branch[at].end;
    int64_t spent = 0;
    path[v->branch[at].depth] = state;
    g->walks++;
    for (int i = at + 1; i < end;) {
        const Branch *b = v->branch + i;
        const bool enough = spent > MOST_WEIGHT && b->depth > 1 && /* one byte is enough to go on */
                            (unsigned char)*token_text(v, v->token[b->first]).data != CONTROL;
        const int next = path[b->depth] = enough ? NEVER : walk_on(g, path[b->depth - 1], b->byte, &spent);
        if (next) set_tokens(v, i, i + 1, row);
        i = next ? i + 1 : b->end;
    }
}

/* What tokens do in strings of these letters up to this end, or NULL. For a repeated SET before a SET end the grammar
 * builds its own table, but only for a count of MANY or more. */
static const Strings *strings_of(Grammar *g, const Vocabulary *v, int letter, int end, bool many) {
    if (end == g->quote && letter == g->letter) return &v->letter;
    if (end == g->quote && letter == g->plain) return &v->plain;
    for (int i = 0; i < g->kinds; i++)
        if (g->strings[i].letter == letter && g->strings[i].end == end) return g->strings + i;
    if (!many || node_kind(g, letter) != SET || node_kind(g, end) != SET) return NULL;
    for (int byte = 0; byte < 256; byte++) /* may one be both a letter and the end? */
        if (state_step(g, letter, (unsigned char)byte) && state_step(g, end, (unsigned char)byte)) return NULL;
    g->strings = reallocate(g->strings, (size_t)(g->kinds + 1) * sizeof *g->strings);
    Strings *s = g->strings + g->kinds;
    *s = (Strings){.letter = letter, .end = end};
    read_strings(v, g, letter, end, s);
    if (gave_up(g)) return free(s->row), ids_free(&s->exits), NULL;
    g->kinds++, g->rows += LETTERS;
    return s;
}

/* Sets the bits of the tokens that a state allows if it is in a string of any letters, perhaps but some texts, or of
 * any of a set; false: it is not. */
static bool in_string(Grammar *g, const Vocabulary *v, int state, uint32_t *row) {
    int rest, behind;
    const int first = first_node(g, state, &rest);
    const bool but = node_kind(g, first) == BUT;
    const int repeat = but ? tuple(g, first)[1] : first;
    if (node_kind(g, repeat) != REPEAT) return false;
    const int letter = tuple(g, repeat)[1], least = tuple(g, repeat)[2], limit = tuple(g, repeat)[3];
    const int most = limit == ENDLESS ? INT32_MAX : limit, end = first_node(g, rest, &behind);
    const Strings *l = strings_of(g, v, letter, end, least >= MANY || limit >= MANY);
    if (!l) return false;
    const uint32_t *stay = l->row + (size_t)(limit == ENDLESS ? LETTERS - 1 : limit) * v->words;
    for (size_t w = 0; w < v->words; w++) row[w] |= stay[w];
    for (size_t i = 0; i < l->exits.n; i += 2) {
        const int at = l->exits.data[i], n = l->exits.data[i + 1];
        const Bytes text = token_text(v, v->token[v->branch[at].first]);
        if (n < least || n > most || (but && !state_run(g, state, text.data, v->branch[at].depth))) continue;
        set_tokens(v, at, at + 1, row);
        walk(g, v, at, behind, row);
    }
    return true;
}

/* A state with fewer counts that allows the same tokens of at most SHORT bytes, which do not come to the end of a
 * larger count. What such a token makes of a pattern beside a limit of letters can be completed if the limit is not
 * near. */
static int short_state(Grammar *g, int state) {
    LocalIds cases = {0};
    add_cases(g, state, &cases);
    for (size_t i = 0; i < cases.n; i++) {
        int rest, first = first_node(g, cases.data[i], &rest);
        for (int k = 1; k < 3 && node_kind(g, first) == AND; k++)
            if (letters_left(g, tuple(g, first)[k]) > g->tight + SHORT) first = tuple(g, first)[3 - k];
        const int except = node_kind(g, first) == BUT ? tuple(g, first)[2] : NEVER;
        if (except) first = tuple(g, first)[1];
        const int *t = tuple(g, first), most = *t == REPEAT ? t[3] : 0;
        if (*t == REPEAT) first = repeat_node(g, t[1], t[2] > SHORT ? SHORT + 1 : t[2], most > SHORT ? ENDLESS : most);
        if (except) first = but_node(g, first, except);
        cases.data[i] = seq_node(g, first, rest);
    }
    return alt_node(g, cases.data, cases.n);
}

/* The row of a state that is its short_state(). */
static void fill_row(Grammar *g, const Vocabulary *v, int state, uint32_t *row) {
    LocalIds cases = {0}, others = {0};
    add_cases(g, state, &cases);
    for (size_t i = 0; i < cases.n; i++)
        if (!in_string(g, v, cases.data[i], row)) ids_add(&others, cases.data[i]);
    if (others.n) walk(g, v, 0, alt_node(g, others.data, others.n), row);
}

const uint32_t *state_tokens(Grammar *g, const Vocabulary *v, int state) {
    if (g->node[state].row) return g->node[state].row;
    if (g->rows > MOST_ROWS) forget_masks(g);
    g->work = 0, g->most = MOST_WORK;
    const int simple = short_state(g, state);
    const uint32_t *known = simple == state ? NULL : state_tokens(g, v, simple);
    uint32_t *row = allocate_zero(v->words, sizeof *row);
    int64_t spent = 0;
    g->walks++;
    if (known) memcpy(row, known, v->words * sizeof *row);
    for (size_t i = 0; known && i < v->longer.n; i++) {
        const int id = v->longer.data[i];
        const Bytes text = token_text(v, id);
        int next = state;
        for (size_t k = 0; k < text.n && next; k++)
            next = spent > MOST_WEIGHT ? NEVER : walk_on(g, next, (uint8_t)text.data[k], &spent);
        row[id / 32] &= ~(1u << id % 32);
        if (next) row[id / 32] |= 1u << id % 32;
    }
    if (simple == state) fill_row(g, v, state, row);
    if (gave_up(g)) return free(row), NULL;
    g->rows++;
    return g->node[state].row = row;
}

void forget_masks(Grammar *g) {
    for (Node *n = g->node; n < g->node + g->nodes; n++) free(n->row), n->row = NULL;
    for (int i = 0; i < g->kinds; i++) free(g->strings[i].row), ids_free(&g->strings[i].exits);
    free(g->strings), g->strings = NULL;
    g->kinds = g->rows = 0;
}
