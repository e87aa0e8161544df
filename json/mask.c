/* mask.c: the tokens that may come next. All tokens stand in a trie of their bytes, in the order in which a walk from
 * the root meets its nodes; a walk that carries the grammar's state skips what lies below a byte that cannot come. Four
 * things make it quick. The row of a state is kept. What may come inside of a lexeme, such as a string, does not depend
 * on what stands around it: that is walked once for a place in a lexeme, and noted where in the trie the lexeme may
 * end; only from there on each text is walked by itself. Inside of a string of any letters nothing is walked at all:
 * which tokens stay in it, and how many letters they need, is the same for every grammar. And where any letters may
 * come, all that begins with letters only is taken at once. */
#include "json.h"

#include <stdlib.h>
#include <string.h>

/* LETTERS: rows of tokens that need fewer letters. A token of more bytes than MOST_BYTES is never allowed. */
enum {
    LETTERS = 32,
    OTHER = 255,
    MOST_BYTES = 250,
    MOST_ROWS = 1024,
    MOST_PREPARED = 256,
    MOST_STATES = 16,
    MOST_WORK = 200000
};

typedef struct {
    int end, first; /* the node behind all below it; its first token, in Vocabulary.token */
    uint8_t byte, depth;
    uint8_t letters; /* the most that a token has behind it, or OTHER if one has anything else */
} Node;

typedef struct {
    int node, letters;
} Exit;

struct Vocabulary {
    size_t words; /* of a row */
    int nodes, size;
    Node *node; /* (nodes + 1) in the order of a walk; 0 is the root */
    int *token; /* (size) in the same order */
    Bytes text; /* of token id: text.data[begin[id]] .. text.data[begin[id + 1] - 1] */
    int *begin; /* (ids + 1) */
    int ids;
    /* in a string of any letters: */
    uint32_t *inside; /* (LETTERS, words) tokens that stay in it and need at most so many letters */
    Exit *longer;     /* nodes of the tokens that need more */
    Exit *exit;       /* nodes where it ends, and the letters before that */
    int exits, longers;
};

struct Local {
    uint32_t *row; /* tokens that stay inside of the lexeme or end with it */
    Ids exits;     /* nodes where it may end */
};

/* ---- the trie ---- */

static int by_bytes(const void *a, const void *b, void *data) {
    const Vocabulary *v = data;
    const int x = *(const int *)a, y = *(const int *)b, n = v->begin[x + 1] - v->begin[x],
              m = v->begin[y + 1] - v->begin[y];
    const int order = memcmp(v->text.data + v->begin[x], v->text.data + v->begin[y], (size_t)(n < m ? n : m));
    return order ? order : n != m ? n - m : x - y;
}

/* How many letters a token has, or OTHER if one of them is escaped in JSON, or not whole. */
static uint8_t letters_of(const char *s, size_t n) {
    uint8_t letters = 0;
    uint32_t c;
    for (size_t i = 0; i < n; letters++) {
        const int length = utf8_decode(s + i, n - i, &c);
        if (length < 0 || c < ' ' || c == '"' || c == '\\') return OTHER;
        i += (size_t)length;
    }
    return letters;
}

static void add_node(Vocabulary *v, int *room, uint8_t byte, size_t depth, int first) {
    if (v->nodes + 1 >= *room)
        v->node = reallocate(v->node, (size_t)(*room = *room ? 2 * *room : 1024) * sizeof *v->node);
    v->node[v->nodes++] = (Node){.first = first, .byte = byte, .depth = (uint8_t)depth};
}

static void build_trie(Vocabulary *v) {
    int path[MOST_BYTES + 1] = {0}, room = 0;
    size_t depth = 0;
    const char *before = "";
    add_node(v, &room, 0, 0, 0);
    for (int i = 0; i < v->size; i++) {
        const char *s = v->text.data + v->begin[v->token[i]];
        const size_t n = (size_t)(v->begin[v->token[i] + 1] - v->begin[v->token[i]]);
        size_t same = 0;
        while (same < n && same < depth && s[same] == before[same]) same++;
        for (; depth > same; depth--) v->node[path[depth]].end = v->nodes;
        for (; depth < n; path[++depth] = v->nodes - 1) add_node(v, &room, (uint8_t)s[depth], depth + 1, i);
        for (size_t d = 0; d <= depth; d++) {
            const uint8_t letters = letters_of(s + d, n - d);
            if (v->node[path[d]].letters < letters) v->node[path[d]].letters = letters;
        }
        before = s;
    }
    for (;; depth--) {
        v->node[path[depth]].end = v->nodes;
        if (!depth) break;
    }
    v->node[v->nodes] = (Node){.first = v->size};
}

static void set_tokens(const Vocabulary *v, int from, int to, uint32_t *row) {
    for (int k = v->node[from].first; k < v->node[to].first; k++) row[v->token[k] / 32] |= 1u << v->token[k] % 32;
}

static void add_exit(Exit **list, int *n, int node, int letters) {
    if (!(*n & (*n - 1))) *list = reallocate(*list, (size_t)(*n ? 2 * *n : 1) * sizeof **list);
    (*list)[(*n)++] = (Exit){node, letters};
}

/* Walks the trie inside of a string, and counts the letters. */
static void look_inside(Vocabulary *v) {
    Grammar g;
    int path[MOST_BYTES + 1], letters[MOST_BYTES + 1] = {0};
    grammar_open(&g);
    make_letters(&g);
    const int start = state_start(&g, seq_node(&g, repeat_node(&g, g.letter, 0, ENDLESS), g.quote));
    v->inside = allocate_zero(LETTERS * v->words, sizeof *v->inside);
    path[0] = start;
    for (int i = 1; i < v->nodes;) {
        const Node *n = v->node + i;
        const int next = path[n->depth] = state_step(&g, path[n->depth - 1], n->byte);
        letters[n->depth] = letters[n->depth - 1] + (next == start);
        const int need = letters[n->depth] + (next != start); /* a letter that has begun needs room, too */
        if (g.of[next].ends)
            add_exit(&v->exit, &v->exits, i, letters[n->depth]);
        else if (next && need >= LETTERS && n->first < n[1].first)
            add_exit(&v->longer, &v->longers, i, need);
        for (int k = need; next && !g.of[next].ends && k < LETTERS; k++)
            set_tokens(v, i, i + 1, v->inside + (size_t)k * v->words);
        i = next && !g.of[next].ends ? i + 1 : n->end;
    }
    grammar_close(&g);
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
        v->begin[id] = (int)v->text.n;
        marks ? bytes_add(&v->text, mark, 4) : tokenizer_bytes(t, &(Decoder){.begun = true}, id, &v->text);
        const size_t size = v->text.n - (size_t)v->begin[id];
        const bool like =
            !marks && size && memchr(v->text.data + v->begin[id], CONTROL, size); /* no text is like one */
        if (like) v->text.n = (size_t)v->begin[id];
        if (size && size <= MOST_BYTES && !like) v->token[v->size++] = id;
    }
    v->begin[n] = (int)v->text.n;
    qsort_r(v->token, (size_t)v->size, sizeof *v->token, by_bytes, v);
    build_trie(v);
    look_inside(v);
    return v;
}

void vocabulary_close(Vocabulary *v) {
    if (!v) return;
    bytes_free(&v->text);
    free(v->node), free(v->token), free(v->begin), free(v->inside), free(v->longer), free(v->exit), free(v);
}

Bytes token_text(const Vocabulary *v, int id) {
    if (id < 0 || id >= v->ids) return (Bytes){0};
    return (Bytes){.data = v->text.data + v->begin[id], .n = (size_t)(v->begin[id + 1] - v->begin[id])};
}

int state_token(Grammar *g, const Vocabulary *v, int state, int id) {
    const Bytes text = token_text(v, id);
    return text.n ? state_run(g, state, text.data, text.n) : DEAD;
}

/* ---- masks ---- */

/* Sets the bits of the tokens below the node `at` that the state there allows. A grammar may be so ambiguous that this
 * would take too long: then longer tokens are left out. exits: notes the nodes where a lexeme
 * may end; or NULL. */
static void walk(Grammar *g, const Vocabulary *v, int at, int state, Ids *exits, uint32_t *row) {
    int path[MOST_BYTES + 1];
    const int end = v->node[at].end;
    path[v->node[at].depth] = state;
    for (int i = at + 1; i < end;) {
        const Node *n = v->node + i;
        if (g->work > MOST_WORK && n->depth > 1) { /* only the first byte: enough to go on, and right */
            i = n->end;
            continue;
        }
        const int next = path[n->depth] = state_step(g, path[n->depth - 1], n->byte);
        const State *s = g->of + next;
        const bool all = next && n->letters != OTHER && n->letters <= s->room && !s->ends;
        if (next) set_tokens(v, i, all ? n->end : i + 1, row);
        if (next && exits && s->ends) ids_add(exits, i);
        i = next && !all ? i + 1 : n->end;
    }
}

static const Local *local_of(Grammar *g, const Vocabulary *v, int state) {
    Local *l = g->of[state].local;
    int least, room;
    if (l) return l;
    l = allocate_zero(1, sizeof *l);
    l->row = allocate_zero(v->words, sizeof *l->row);
    g->rows++;
    if (!state_loops(g, state, &least, &room)) {
        walk(g, v, 0, state, &l->exits, l->row);
        return g->of[state].local = l;
    }
    memcpy(l->row, v->inside + (size_t)(room < LETTERS ? room : LETTERS - 1) * v->words, v->words * sizeof *l->row);
    for (const Exit *x = v->longer; x < v->longer + v->longers; x++)
        if (x->letters <= room) set_tokens(v, x->node, x->node + 1, l->row);
    for (const Exit *x = v->exit; x < v->exit + v->exits; x++) {
        if (x->letters < least || x->letters > room) continue;
        set_tokens(v, x->node, x->node + 1, l->row);
        if (v->node[x->node].end > x->node + 1) ids_add(&l->exits, x->node);
    }
    return g->of[state].local = l;
}

void prepare_masks(Grammar *g, const Vocabulary *v) {
    const int nodes = (int)g->node.begin.n - 1;
    for (int node = 0; node < nodes && g->rows < MOST_PREPARED; node++) {
        LocalIds states = {0};
        if (*tuple(&g->node, node) == LEX) ids_add(&states, tuple(&g->node, node)[1]);
        for (size_t i = 0; i < states.n && i < MOST_STATES; i++) {
            if (states.data[i] == DEAD) continue;
            g->work = 0;
            local_of(g, v, states.data[i]);
            for (int byte = 0, next = -1; byte < 256; byte++) {
                if (!g->edge[byte] || next == state_step(g, states.data[i], (unsigned char)byte)) continue;
                next = state_step(g, states.data[i], (unsigned char)byte);
                size_t k = 0;
                while (k < states.n && states.data[k] != next) k++;
                if (k == states.n) ids_add(&states, next);
            }
        }
    }
}

void forget_masks(Grammar *g) {
    for (size_t i = 0; i + 1 < g->state.begin.n; i++) {
        State *s = g->of + i;
        if (s->local) free(s->local->row), ids_free(&s->local->exits), free(s->local);
        free(s->row);
        s->local = NULL, s->row = NULL;
    }
    g->rows = 0;
}

const uint32_t *state_tokens(Grammar *g, const Vocabulary *v, int state) {
    LocalIds others = {0};
    if (g->of[state].row) return g->of[state].row;
    if (g->rows > MOST_ROWS) forget_masks(g);
    g->work = 0;
    uint32_t *row = allocate_zero(v->words, sizeof *row);
    for (int i = 0; i < tuple_size(&g->state, state); i++) {
        const int cell = tuple(&g->state, state)[i];
        int inside, rest;
        if (!cell_inside(g, cell, &inside, &rest)) {
            ids_add(&others, cell);
            continue;
        }
        const Local *l = local_of(g, v, inside);
        for (size_t w = 0; w < v->words; w++) row[w] |= l->row[w];
        for (size_t x = 0; x < l->exits.n; x++) walk(g, v, l->exits.data[x], rest, NULL, row);
    }
    if (others.n) walk(g, v, 0, state_of(g, &others), NULL, row);
    g->rows++;
    return g->of[state].row = row;
}
