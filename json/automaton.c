/* automaton.c: grammars over bytes and the states of a text in them. See json.h. */
#include "json.h"

#include <stdlib.h>
#include <string.h>

/* A state has at most MOST_CASES alternatives, else the grammar gives up. Only patterns that can be read in very many
 * ways at once get there. */
enum { MOST_CASES = 5000, MOST_WORK = 20000000 };

/* ---- nodes ---- */

/* What the flags of a node follow from: those of its parts. */
static int flags_from(const Grammar *g, int node) {
    const int *t = tuple(g, node), n = tuple_size(g, node);
    int all = EMPTY | BARREN, any = 0;
    for (int i = 1; i < n && (*t == SEQ || *t == ALT || *t == AND); i++) {
        all &= g->node[t[i]].flags;
        any |= g->node[t[i]].flags;
    }
    switch (*t) {
    case SEQ: return (all & EMPTY) | (any & BARREN);
    case ALT: return (any & EMPTY) | (all & BARREN);
    case REPEAT: return t[2] ? g->node[t[1]].flags & BARREN : EMPTY;
    case AND: return all & EMPTY;
    case BUT: return g->node[t[1]].flags & ~g->node[t[2]].flags & EMPTY;
    case REF: return g->node[node].target < 0 ? 0 : g->node[g->node[node].target].flags & BARREN;
    default: return 0;
    }
}

static bool barren(const Grammar *g, int node) { return g->node[node].flags & BARREN; }

/* The node with this tuple, which is not one of g->data. */
static int node_of(Grammar *g, const int *t, size_t n) {
    uint64_t key = text_hash(HASH_OF_NONE, (const char *)t, n * sizeof *t);
    g->work += 4 + (int64_t)n / 4;
    for (int64_t i; (i = map_get(&g->known, key)) >= 0; key++)
        if ((size_t)tuple_size(g, (int)i) == n && !memcmp(tuple(g, (int)i), t, n * sizeof *t)) return (int)i;
    const int node = g->nodes++;
    map_put(&g->known, key, node);
    ids_append(&g->data, t, n);
    if (!(node & (node + 1))) g->node = reallocate(g->node, (2 * (size_t)node + 4) * sizeof *g->node);
    g->node[node] = (Node){.begin = (int)(g->data.n - n), .target = -1};
    g->node[node + 1].begin = (int)g->data.n;
    g->node[node].flags = flags_from(g, node);
    return node;
}

#define NODE(g, ...) node_of(g, (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))

int by_number(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* Some SET or BYTES begins or ends at this byte. */
static void add_edge(Grammar *g, int byte) {
    const int before = byte < 256 ? g->like[byte] : byte;
    for (int b = byte; b < 256 && g->like[b] == before && before != byte; b++) g->like[b] = (uint8_t)byte;
}

int set_node(Grammar *g, const Ids *ranges) {
    bool has[257] = {false};
    LocalIds t = {0};
    ids_add(&t, SET);
    for (size_t i = 0; i < ranges->n; i += 2)
        for (int byte = ranges->data[i]; byte <= ranges->data[i + 1]; byte++) has[byte] = true;
    for (int byte = 0; byte <= 256; byte++) {
        const bool before = byte && has[byte - 1];
        if (before == has[byte]) continue;
        ids_add(&t, byte - before);
        add_edge(g, byte);
    }
    return t.n == 1 ? NEVER : node_of(g, t.data, t.n);
}

int text_node(Grammar *g, const char *text, size_t n) {
    const int begin = (int)g->text.n;
    if (!n) return NOTHING;
    bytes_add(&g->text, text, n);
    for (size_t i = 0; i < n; i++) add_edge(g, (unsigned char)text[i]), add_edge(g, (unsigned char)text[i] + 1);
    return NODE(g, BYTES, begin, (int)n);
}

int seq_node(Grammar *g, int a, int b) {
    if (barren(g, a) || barren(g, b)) return NEVER;
    return a == NOTHING ? b : b == NOTHING ? a : NODE(g, SEQ, a, b);
}

int alt_node(Grammar *g, const int *node, size_t n) {
    LocalIds t = {0};
    size_t kept = 1;
    ids_add(&t, ALT);
    for (size_t i = 0; i < n; i++)
        if (!barren(g, node[i])) ids_add(&t, node[i]);
    qsort(t.data + 1, t.n - 1, sizeof *t.data, by_number);
    for (size_t i = 1; i < t.n; i++)
        if (i == 1 || t.data[i] != t.data[kept - 1]) t.data[kept++] = t.data[i];
    if (kept > MOST_CASES) return g->work = g->most, NEVER;
    return kept == 2 ? t.data[1] : node_of(g, t.data, kept);
}

void add_cases(const Grammar *g, int node, Ids *out) {
    const bool several = node_kind(g, node) == ALT;
    ids_append(out, several ? tuple(g, node) + 1 : &node, several ? (size_t)tuple_size(g, node) - 1 : 1);
}

int repeat_node(Grammar *g, int node, int least, int most) {
    if (ends(g, node)) least = 0; /* what may be empty can be read as often as needed */
    if (most != ENDLESS && most < least) return NEVER;
    if (barren(g, node)) return least ? NEVER : NOTHING;
    if (most == 0 || node == NOTHING) return NOTHING;
    return least == 1 && most == 1 ? node : NODE(g, REPEAT, node, least, most);
}

static int and_node(Grammar *g, int a, int b) {
    if (barren(g, a) || barren(g, b)) return NEVER;
    if (a == b || a == g->all || b == g->all) return a == g->all ? b : a;
    return a < b ? NODE(g, AND, a, b) : NODE(g, AND, b, a);
}

int but_node(Grammar *g, int a, int b) {
    LocalIds cases = {0};
    add_cases(g, b, &cases);
    for (size_t i = 0; i < cases.n; i++)
        if (cases.data[i] == a || cases.data[i] == g->all) return NEVER;
    return barren(g, a) ? NEVER : barren(g, b) ? a : NODE(g, BUT, a, b);
}

int ref_node(Grammar *g, const int *key, size_t n) {
    LocalIds t = {0};
    ids_add(&t, REF);
    ids_append(&t, key, n);
    return node_of(g, t.data, t.n);
}

void grammar_open(Grammar *g) {
    *g = (Grammar){.most = MOST_WORK};
    NODE(g, ALT);                 /* NEVER */
    NODE(g, REPEAT, NEVER, 0, 0); /* NOTHING */
    g->all = repeat_node(g, set_node(g, &(Ids){.data = (int[]){0, CONTROL - 1}, .n = 2}), 0, ENDLESS);
}

void grammar_close(Grammar *g) {
    forget_masks(g);
    for (int i = 0; i < g->nodes; i++) free(g->node[i].next);
    ids_free(&g->data), map_free(&g->known), bytes_free(&g->text);
    free(g->node);
}

/* A node is barren until a text is found for it: the least fixed point. Those of an earlier call depend on no new one.
 */
bool grammar_settle(Grammar *g, int node) {
    bool changed = true;
    for (Node *n = g->node + g->settled; n < g->node + g->nodes; n++) {
        if (!(n->flags & LOOKED)) n->flags |= BARREN;
        free(n->next), n->next = NULL; /* it may know less */
    }
    while (changed) {
        changed = false;
        for (int i = g->settled; i < g->nodes; i++) {
            if (g->node[i].flags & LOOKED || !barren(g, i) || flags_from(g, i) & BARREN) continue;
            g->node[i].flags &= ~BARREN, changed = true;
        }
    }
    g->settled = g->nodes;
    return !barren(g, node);
}

/* ---- derivatives ---- */

static int derive(Grammar *g, int node, unsigned char byte);

/* So derivatives nest no deeper in a longer text. */
int first_node(Grammar *g, int node, int *rest) {
    *rest = NOTHING;
    while (node_kind(g, node) == SEQ) {
        const int first = tuple(g, node)[1];
        *rest = seq_node(g, tuple(g, node)[2], *rest), node = first;
    }
    return node;
}

/* Of alternatives: of each of them. Of a sequence: of its first part and, behind parts that may be empty, of later
 * ones. They often have their ends in common, which are looked at once. */
static int derive_all(Grammar *g, int node, unsigned char byte) {
    LocalIds work = {0}, cases = {0};
    const int round = ++g->rounds;
    ids_add(&work, node);
    while (work.n && !gave_up(g)) {
        node = work.data[--work.n];
        g->work++;
        if (g->node[node].round == round) continue;
        g->node[node].round = round;
        if (node_kind(g, node) == ALT) {
            add_cases(g, node, &work);
            continue;
        }
        int rest;
        const int first = first_node(g, node, &rest);
        add_cases(g, seq_node(g, derive(g, first, byte), rest), &cases);
        if (ends(g, first) && rest != NOTHING) ids_add(&work, rest);
    }
    return alt_node(g, cases.data, cases.n);
}

static int derive(Grammar *g, int node, unsigned char byte) {
    const int *t = tuple(g, node), n = tuple_size(g, node), kind = *t, a = n > 1 ? t[1] : 0, b = n > 2 ? t[2] : 0;
    const int most = kind == REPEAT ? t[3] : 0;
    switch (kind) {
    case SET:
        for (int i = 1; i < n; i += 2)
            if (byte >= t[i] && byte <= t[i + 1]) return NOTHING;
        return NEVER;
    case BYTES:
        if ((unsigned char)g->text.data[a] != byte) return NEVER;
        return b == 1 ? NOTHING : NODE(g, BYTES, a + 1, b - 1);
    case SEQ:
    case ALT: return derive_all(g, node, byte);
    case REPEAT:
        return seq_node(g, state_step(g, a, byte),
                        repeat_node(g, a, b ? b - 1 : 0, most == ENDLESS ? ENDLESS : most - 1));
    case AND: return and_node(g, state_step(g, a, byte), state_step(g, b, byte));
    case BUT: return but_node(g, state_step(g, a, byte), state_step(g, b, byte));
    default:
        if (g->node[node].target < 0) return g->early = true, NEVER;
        return derive(g, g->node[node].target, byte);
    }
}

int state_derive(Grammar *g, int state, unsigned char byte) {
    const int found = gave_up(g) ? NEVER : derive(g, state, byte), next = barren(g, found) ? NEVER : found;
    if (gave_up(g)) return NEVER;
    if (!g->node[state].next) {
        g->node[state].next = allocate(256 * sizeof(int));
        memset(g->node[state].next, -1, 256 * sizeof(int));
    }
    return g->node[state].next[byte] = next;
}

int state_run(Grammar *g, int state, const char *text, size_t n) {
    for (size_t i = 0; i < n && state; i++) state = state_step(g, state, (unsigned char)text[i]);
    return state;
}

int state_forced(Grammar *g, int state) {
    int only = -1;
    if (ends(g, state)) return -1;
    for (int byte = 0; byte < 256; byte++) {
        if (!state_step(g, state, (unsigned char)byte)) continue;
        if (only >= 0) return -1;
        only = byte;
    }
    return gave_up(g) ? -1 : only;
}

int letters_left(const Grammar *g, int node) {
    const int *t = tuple(g, node);
    if (*t == SEQ) return letters_left(g, t[2]) + 1; /* inside of a letter */
    return *t == REPEAT && t[1] == g->letter && !t[2] ? t[3] : -1;
}

/* Finds out, too, what can be reached from the node but not completed. */
int both_node(Grammar *g, int a, int b) {
    LocalIds found = {0}, edges = {0}; /* edges: from, to */
    const int node = and_node(g, a, b);
    bool changed = true;
    if (node_kind(g, node) != AND || g->node[node].flags & LOOKED) return node;
    g->node[node].flags |= LOOKED;
    ids_add(&found, node);
    for (size_t i = 0; i < found.n && !gave_up(g); i++) {
        const int from = found.data[i];
        for (int byte = 0, last = NEVER; byte < 256; byte++) {
            if (g->like[byte] != byte) continue; /* as the byte before */
            const int to = state_step(g, from, (unsigned char)byte);
            if (to == last || to == NEVER) continue;
            last = to;
            ids_add(&edges, from), ids_add(&edges, to);
            if (node_kind(g, to) != AND || g->node[to].flags & LOOKED) continue;
            g->node[to].flags |= LOOKED;
            ids_add(&found, to);
        }
        free(g->node[from].next), g->node[from].next = NULL; /* some may turn out to be barren */
    }
    for (size_t i = 0; i < found.n; i++)
        if (!ends(g, found.data[i])) g->node[found.data[i]].flags |= BARREN;
    while (changed) {
        changed = false;
        for (size_t i = edges.n; i > 0; i -= 2) {
            if (!barren(g, edges.data[i - 2]) || barren(g, edges.data[i - 1])) continue;
            g->node[edges.data[i - 2]].flags &= ~BARREN, changed = true;
        }
    }
    for (size_t i = 0; i < 2 * found.n; i++) {
        const int left = letters_left(g, tuple(g, found.data[i / 2])[1 + i % 2]);
        if (barren(g, found.data[i / 2]) && left > g->tight) g->tight = left;
    }
    return node;
}
