/* automaton.c: grammars over bytes and the states of a text in them. See json.h. */
#include "json.h"

#include <stdlib.h>
#include <string.h>

/* A state has at most so many cells. More are left out: what is then written still matches, though not every match can
 * be written. Only patterns that can be read in very many ways at once get there. */
enum { MOST_CELLS = 1024, MOST_PAIRS = 6000 /* of a grammar */ };
enum { BARREN = 1, EMPTY = 2 }; /* flags of nodes: no text matches; the empty text does */
enum { NODE, AT, OTHER, REST }; /* of a cell. AT: a position, a count, or a state inside; OTHER: the second of an AND */
enum { END = 0 };               /* the cell behind the last */

/* ---- tuples ---- */

static size_t tuple_slot(const Pool *p, const int *t, size_t n) {
    uint64_t h = text_hash(HASH_OF_NONE, (const char *)t, n * sizeof *t);
    size_t i = (size_t)(h ^ h >> 32) & (p->room - 1);
    for (; p->slot[i] >= 0; i = (i + 1) & (p->room - 1)) {
        const int k = p->slot[i];
        if ((size_t)tuple_size(p, k) == n && (!n || !memcmp(tuple(p, k), t, n * sizeof *t))) break;
    }
    return i;
}

/* The number of a tuple, which is new if it has the number `count` had before. t is not in the pool. */
static int tuple_add(Pool *p, const int *t, size_t n) {
    const int count = p->begin.n ? (int)p->begin.n - 1 : 0;
    if (!count) ids_add(&p->begin, 0);
    if ((size_t)count * 2 >= p->room) {
        p->room = p->room ? 2 * p->room : 64;
        p->slot = reallocate(p->slot, p->room * sizeof *p->slot);
        memset(p->slot, -1, p->room * sizeof *p->slot);
        for (int i = 0; i < count; i++) p->slot[tuple_slot(p, tuple(p, i), (size_t)tuple_size(p, i))] = i;
    }
    int *slot = p->slot + tuple_slot(p, t, n);
    if (*slot >= 0) return *slot;
    *slot = count;
    ids_append(&p->data, t, n);
    ids_add(&p->begin, (int)p->data.n);
    return count;
}

static void pool_free(Pool *p) {
    ids_free(&p->data), ids_free(&p->begin);
    free(p->slot);
}

/* ---- nodes ---- */

static char flags_of(const Grammar *g, int node) { return g->flags.data[node]; }

/* What the flags of a node follow from: those of its parts. */
static char make_flags(const Grammar *g, int node) {
    const int *t = tuple(&g->node, node), n = tuple_size(&g->node, node);
    int all = BARREN | EMPTY, any = 0;
    for (int i = 1; i < n && (*t == SEQ || *t == ALT); i++) {
        all &= flags_of(g, t[i]);
        any |= flags_of(g, t[i]);
    }
    const bool seq_empty = all & EMPTY || n == 1;
    switch (*t) {
    case SEQ: return (char)((any & BARREN) | (seq_empty && !(any & BARREN) ? EMPTY : 0));
    case ALT: return (char)((n == 1 || all & BARREN ? BARREN : 0) | (any & EMPTY));
    case REPEAT: return t[2] && !(flags_of(g, t[1]) & EMPTY) ? flags_of(g, t[1]) & BARREN : EMPTY;
    case LEX: return (char)(t[1] == DEAD ? BARREN : g->of[t[1]].ends ? EMPTY : 0);
    case AND: return (char)(t[3] ? BARREN : g->of[t[1]].ends && g->of[t[2]].ends ? EMPTY : 0);
    case REF: return g->target.data[t[1]] < 0 ? BARREN : flags_of(g, g->target.data[t[1]]);
    default: return 0;
    }
}

static int node_add(Grammar *g, const int *t, int n) {
    const int node = tuple_add(&g->node, t, (size_t)n);
    if (node == (int)g->flags.n) {
        bytes_add(&g->flags, "", 1);
        g->flags.data[node] = make_flags(g, node);
    }
    return node;
}

int text_node(Grammar *g, const char *text, size_t n) {
    LocalIds t = {0};
    if (!n) return NOTHING;
    ids_add(&t, BYTES);
    for (size_t i = 0; i < n; i++) ids_add(&t, (unsigned char)text[i]);
    return node_add(g, t.data, (int)t.n);
}

static bool set_has(const int *node, int byte) { return (uint32_t)node[1 + byte / 32] >> byte % 32 & 1; }

int set_node(Grammar *g, const uint32_t set[8]) {
    int t[9] = {SET}, any = 0;
    memcpy(t + 1, set, 8 * sizeof *set);
    for (int i = 0; i < 256; i++) {
        any |= set_has(t, i);
        g->edge[i] |= set_has(t, i) != (i && set_has(t, i - 1));
    }
    return any ? node_add(g, t, 9) : NEVER;
}

int list_node(Grammar *g, int kind, const int *node, int n) {
    LocalIds t = {0};
    ids_add(&t, kind);
    for (int i = 0; i < n; i++) {
        if (kind == SEQ && node[i] == NEVER) return NEVER;
        if (node[i] != (kind == SEQ ? NOTHING : NEVER)) ids_add(&t, node[i]);
    }
    return t.n == 2 ? t.data[1] : node_add(g, t.data, (int)t.n);
}

int repeat_node(Grammar *g, int node, int least, int most) {
    if (flags_of(g, node) & EMPTY) least = 0;
    if (most != ENDLESS && most < least) return NEVER;
    if (most == 0 || node == NOTHING) return NOTHING;
    return least == 1 && most == 1 ? node : node_add(g, (const int[]){REPEAT, node, least, most}, 4);
}

int lexeme_node(Grammar *g, int node) { return node_add(g, (const int[]){LEX, state_start(g, node)}, 2); }

int ref_node(Grammar *g) {
    ids_add(&g->target, -1);
    return node_add(g, (const int[]){REF, (int)g->target.n - 1}, 2);
}

void ref_set(Grammar *g, int ref, int node) { g->target.data[tuple(&g->node, ref)[1]] = node; }

/* Nodes are barren until a text is found for them: the least fixed point. */
bool grammar_settle(Grammar *g, int node) {
    for (bool changed = true; changed;) {
        changed = false;
        for (int i = 0; i < (int)g->flags.n; i++) {
            const char now = make_flags(g, i);
            changed |= now != g->flags.data[i];
            g->flags.data[i] = now;
        }
    }
    return !(flags_of(g, node) & BARREN);
}

void grammar_open(Grammar *g) {
    *g = (Grammar){0};
    list_node(g, ALT, NULL, 0);   /* NEVER */
    list_node(g, SEQ, NULL, 0);   /* NOTHING */
    tuple_add(&g->cell, NULL, 0); /* END */
    ids_add(&g->seen, 0);
    tuple_add(&g->state, NULL, 0); /* DEAD */
    g->of = allocate_zero(64, sizeof *g->of);
}

void grammar_close(Grammar *g) {
    forget_masks(g);
    for (size_t i = 0; i + 1 < g->state.begin.n; i++) free(g->of[i].next);
    pool_free(&g->node), pool_free(&g->cell), pool_free(&g->state);
    bytes_free(&g->flags), ids_free(&g->target), ids_free(&g->seen), map_free(&g->dead);
    free(g->of);
}

/* ---- states ---- */

static int cell_add(Grammar *g, int node, int at, int other, int rest) {
    const int cell = tuple_add(&g->cell, (const int[]){node, at, other, rest}, 4);
    if (cell == (int)g->seen.n) ids_add(&g->seen, 0);
    return cell;
}

/* The cell that begins a node. */
static int enter(Grammar *g, int node, int rest) {
    const int *t = tuple(&g->node, node);
    const bool inside = *t == LEX || *t == AND;
    return cell_add(g, node, inside ? t[1] : 0, *t == AND ? t[2] : 0, rest);
}

static uint64_t pair(int a, int b) { return (uint64_t)(uint32_t)a << 32 | (uint32_t)b; }

/* Is there more of a state than its end? */
static bool goes_on(const Grammar *g, int state) { return tuple_size(&g->state, state) > g->of[state].ends; }

/* Adds the cells to `found` that read a byte, of all that can stand where `cell` stands; END if the text can end.
 * *loop: see State. */
static void expand(Grammar *g, int cell, Ids *found, int *loop) {
    LocalIds work = {0};
    ids_add(&work, cell);
    while (work.n) {
        cell = work.data[--work.n];
        if (g->seen.data[cell] == g->round) continue;
        g->seen.data[cell] = g->round;
        if (cell == END) {
            ids_add(found, END);
            continue;
        }
        int c[4];
        memcpy(c, tuple(&g->cell, cell), sizeof c);
        const int *t = tuple(&g->node, c[NODE]), n = tuple_size(&g->node, c[NODE]);
        if (*t == BYTES || *t == SET) {
            ids_add(found, cell);
        } else if (*t == LEX || *t == AND) {
            const bool and = *t == AND;
            if (goes_on(g, c[AT]) && (!and || goes_on(g, c[OTHER]))) ids_add(found, cell);
            if (g->of[c[AT]].ends && (!and || g->of[c[OTHER]].ends)) ids_add(&work, c[REST]);
        } else if (*t == SEQ) {
            const int left = n - 2 - c[AT]; /* parts behind this one. A last part forgets that it is one */
            int rest = c[REST];
            if (left == 1) rest = enter(g, t[n - 1], rest);
            if (left > 1) rest = cell_add(g, c[NODE], c[AT] + 1, 0, rest);
            ids_add(&work, left < 0 ? rest : enter(g, t[1 + c[AT]], rest));
        } else if (*t == ALT) {
            for (int i = 1; i < n; i++)
                if (!(flags_of(g, t[i]) & BARREN)) ids_add(&work, enter(g, t[i], c[REST]));
        } else if (*t == REF) {
            ids_add(&work, enter(g, g->target.data[t[1]], c[REST]));
        } else { /* REPEAT; c[AT]: how often it was read, as far as that matters */
            const int least = t[2], most = t[3], next = most == ENDLESS && c[AT] >= least ? c[AT] : c[AT] + 1;
            const bool more = most == ENDLESS || c[AT] < most, empty = flags_of(g, t[1]) & EMPTY;
            if (t[1] == g->letter) *loop = cell;
            if (c[AT] >= least) ids_add(&work, c[REST]);
            /* an empty part does not count: the cell that counts less is there, too */
            if (empty && c[AT] && g->seen.data[cell_add(g, c[NODE], c[AT] - 1, 0, c[REST])] == g->round) continue;
            if (more && !(flags_of(g, t[1]) & BARREN))
                ids_add(&work, enter(g, t[1], cell_add(g, c[NODE], next, 0, c[REST])));
        }
    }
}

static int by_number(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

int loop_of(const Grammar *g, int cell, int *least, int *room) {
    const int *c = tuple(&g->cell, cell), *node = tuple(&g->node, c[NODE]);
    *least = node[2] > c[AT] ? node[2] - c[AT] : 0;
    *room = node[3] == ENDLESS ? INT32_MAX : node[3] - c[AT];
    return c[REST];
}

static int state_add(Grammar *g, Ids *cells, int loop) {
    size_t n = 0;
    if (cells->n > 1) qsort(cells->data, cells->n, sizeof *cells->data, by_number);
    for (size_t i = 0; i < cells->n; i++)
        if (!i || cells->data[i] != cells->data[i - 1]) cells->data[n++] = cells->data[i];
    const int before = (int)g->state.begin.n - 1;
    const int state = tuple_add(&g->state, cells->data, n < MOST_CELLS ? n : MOST_CELLS);
    if (state < before) return state;
    if (state >= 64 && !(state & (state - 1))) g->of = reallocate(g->of, 2 * (size_t)state * sizeof *g->of);
    int least, room = 0;
    if (loop != END) loop_of(g, loop, &least, &room);
    for (size_t i = 0; i < n; i++) {
        const int *c = tuple(&g->cell, cells->data[i]);
        if (cells->data[i] != END && *tuple(&g->node, c[NODE]) == LEX && g->of[c[AT]].room > room)
            room = g->of[c[AT]].room;
    }
    g->of[state] = (State){.loop = loop, .room = room, .ends = n && cells->data[0] == END};
    return state;
}

/* The state of a text that has one cell left to read. */
static int state_at(Grammar *g, int cell) {
    LocalIds found = {0};
    int loop = END;
    g->round++;
    expand(g, cell, &found, &loop);
    return state_add(g, &found, loop);
}

int state_start(Grammar *g, int node) { return flags_of(g, node) & BARREN ? DEAD : state_at(g, enter(g, node, END)); }

/* What follows a cell behind a byte: the cell to expand, or -1. */
static int follow(Grammar *g, int cell, unsigned char byte) {
    int c[4], t, size;
    memcpy(c, tuple(&g->cell, cell), sizeof c);
    const int *node = tuple(&g->node, c[NODE]);
    t = *node, size = tuple_size(&g->node, c[NODE]);
    if (t == SET) return set_has(node, byte) ? c[REST] : -1;
    if (t == BYTES) {
        if (node[1 + c[AT]] != byte) return -1;
        return c[AT] + 2 < size ? cell_add(g, c[NODE], c[AT] + 1, 0, c[REST]) : c[REST];
    }
    const int at = state_step(g, c[AT], byte), other = t == AND && at ? state_step(g, c[OTHER], byte) : 0;
    if (!at || (t == AND && (!other || map_get(&g->dead, pair(at, other)) >= 0))) return -1;
    return cell_add(g, c[NODE], at, other, c[REST]);
}

int state_step(Grammar *g, int state, unsigned char byte) {
    if (!g->of[state].next) {
        g->of[state].next = allocate(256 * sizeof(int));
        memset(g->of[state].next, -1, 256 * sizeof(int));
    }
    if (g->of[state].next[byte] >= 0) return g->of[state].next[byte];
    LocalIds found = {0}, to = {0};
    int loop = END;
    const int n = tuple_size(&g->state, state);
    g->work += n;
    for (int i = 0; i < n; i++) {
        const int cell = tuple(&g->state, state)[i], next = cell == END ? -1 : follow(g, cell, byte);
        if (next >= 0) ids_add(&to, next);
    }
    g->round++;
    for (size_t i = 0; i < to.n; i++) expand(g, to.data[i], &found, &loop);
    const int next = state_add(g, &found, loop);
    g->of[state].next[byte] = next;
    return next;
}

int state_run(Grammar *g, int state, const char *text, size_t n) {
    for (size_t i = 0; i < n && state; i++) state = state_step(g, state, (unsigned char)text[i]);
    return state;
}

int state_of(Grammar *g, Ids *cells) { return state_add(g, cells, END); }

bool cell_inside(Grammar *g, int cell, int *inside, int *rest) {
    if (cell == END) return false;
    const int *c = tuple(&g->cell, cell), kind = *tuple(&g->node, c[NODE]);
    *inside = c[AT];
    if (kind == LEX) *rest = state_at(g, c[REST]);
    return kind == LEX;
}

bool state_loops(Grammar *g, int state, int *least, int *room) {
    const int loop = g->of[state].loop;
    if (loop == END || state_at(g, loop) != state) return false;
    return loop_of(g, loop, least, room) == enter(g, g->quote, END);
}

int state_forced(const Grammar *g, int state) {
    int only = -1;
    for (int i = 0; i < tuple_size(&g->state, state); i++) {
        const int cell = tuple(&g->state, state)[i], *c = tuple(&g->cell, cell);
        int byte = -1;
        if (cell == END) return -1;
        const int *node = tuple(&g->node, c[NODE]);
        if (*node == BYTES) byte = node[1 + c[AT]];
        if (*node == LEX) byte = state_forced(g, c[AT]);
        for (int b = 0, found = 0; *node == SET && b < 256 && found < 2; b++)
            if (set_has(node, b)) byte = found++ ? -1 : b;
        if (byte < 0 || (only >= 0 && byte != only)) return -1;
        only = byte;
    }
    return only;
}

/* ---- both ---- */

/* Finds the pairs of states that can be reached from the pair (a, b) but not completed, and puts them into g->dead.
 * False: there are too many. */
static bool find_dead(Grammar *g, int a, int b) {
    LocalIds edges = {0}; /* from, to */
    Pool pairs = {0};
    LocalBytes alive = {0};
    bool all = true, changed = true;
    tuple_add(&pairs, (const int[]){a, b}, 2);
    for (int i = 0; i < (int)pairs.begin.n - 1 && all; i++) {
        const int from[2] = {tuple(&pairs, i)[0], tuple(&pairs, i)[1]};
        bytes_add(&alive, (const char[]){g->of[from[0]].ends && g->of[from[1]].ends}, 1);
        for (int byte = 0, last = -1; byte < 256; byte++) {
            if (byte && !g->edge[byte]) continue; /* as the byte before */
            const int x = state_step(g, from[0], (unsigned char)byte);
            const int y = x ? state_step(g, from[1], (unsigned char)byte) : DEAD;
            const int to = y ? tuple_add(&pairs, (const int[]){x, y}, 2) : -1;
            if (to >= 0 && to != last) ids_add(&edges, i), ids_add(&edges, to);
            last = to;
        }
        all = ++g->pairs <= MOST_PAIRS;
    }
    while (all && changed) {
        changed = false;
        for (size_t i = edges.n; i > 0; i -= 2) {
            char *from = alive.data + edges.data[i - 2];
            if (!*from && alive.data[edges.data[i - 1]]) *from = 1, changed = true;
        }
    }
    for (int i = 0; i < (int)alive.n && all; i++)
        if (!alive.data[i]) map_put(&g->dead, pair(tuple(&pairs, i)[0], tuple(&pairs, i)[1]), 1);
    pool_free(&pairs);
    return all;
}

int both_node(Grammar *g, int a, int b, bool *ok) {
    const int x = state_start(g, a), y = state_start(g, b);
    if (!x || !y) return NEVER;
    if (!find_dead(g, x, y)) *ok = false;
    return node_add(g, (const int[]){AND, x, y, map_get(&g->dead, pair(x, y)) >= 0}, 4);
}
