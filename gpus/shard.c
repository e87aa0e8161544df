/* shard.c: what one of several cards has of a model. Its matrices are views into the same files, so that a card reads
 * only what it needs. */
#include "gpus/gpus.h"
#include "host.h"

#include <stdlib.h>
#include <sys/param.h>

typedef struct {
    int first, n;
} Range;

/* ---- a matrix ---- */

/* Neighbouring rows, or columns, that a view of this type cannot split. */
static int unit_of(Type type, bool rows) {
    const TypeInfo *t = types + type;
    if (rows) return t->columns ? t->values / t->columns : 1;
    return t->columns ? t->columns : t->values;
}

/* Keeps these rows, or columns, of a matrix of this type. */
static void cut_view(View *v, Type type, bool rows, Range keep) {
    const TypeInfo *t = types + type;
    const int unit = unit_of(type, rows), n = (keep.n + unit - 1) / unit;
    const bool by_lines = rows == (!t->columns && !v->step);
    const size_t pitch = by_lines ? v->stride : v->step ? v->step : (size_t)t->bytes;
    const size_t begin = (size_t)(keep.first / unit) * pitch;
    v->offset += begin, v->data = v->data ? v->data + begin : NULL;
    if (by_lines)
        v->lines = n;
    else if (!v->step)
        v->bytes = (size_t)n * pitch;
}

/* How many rows, or columns, an entry of a grid spans; 0: all, or the entries stay whole. */
static int entry_span(const Linear *w, const Grid *g, bool rows) {
    const int span = rows ? g->rows : g->cols, all = rows ? w->rows : w->cols;
    return span >= all || (!rows && w->each->group) ? 0 : span;
}
static void cut_grid(View *v, const Linear *w, const Grid *g, bool rows, Range keep) {
    const int span = entry_span(w, g, rows);
    if (span) cut_view(v, g->type, rows != g->transposed, (Range){keep.first / span, (keep.n + span - 1) / span});
}
static int grid_unit(const Linear *w, const Grid *g, bool rows) {
    const int span = entry_span(w, g, rows);
    return span ? span * unit_of(g->type, rows != g->transposed) : 1;
}

static int least_multiple(int a, int b) {
    int x = a;
    while (x % b) x += a;
    return x;
}
/* Neighbouring rows, or columns, of w that must stay together. */
static int unit_of_linear(const Linear *w, bool rows) {
    const int unit = least_multiple(unit_of(w->type, rows), grid_unit(w, &w->scale, rows));
    return least_multiple(unit, grid_unit(w, &w->zero, rows));
}

/* ---- a model ---- */

/* Of n things in units, of which the last may be smaller: how many units there are, and what a card gets. */
static int units_of(int n, int unit) { return (n + unit - 1) / unit; }
static Range part_of(int n, int unit, int card, int cards) {
    const int64_t units = units_of(n, unit);
    const int first = (int)(units * card / cards) * unit, end = (int)(units * (card + 1) / cards) * unit;
    return (Range){first, MIN(end, n) - first};
}
/* The unit, or a multiple of `larger` if there are enough. */
static int unit_for(int n, int unit, int larger, int cards) {
    const int both = least_multiple(unit, larger);
    return units_of(n, both) >= cards ? both : unit;
}
/* A card's heads of n; several cards may have the same head of keys and values. */
static Range heads_of(int n, int card, int cards) {
    return (Range){(int)((int64_t)n * card / cards), MAX(1, n / cards)};
}

/* Kernels store pairs of rows; prompts of MXFP4 store 32; cuBLAS wants rows of the head aligned to 256 bytes. */
enum { EVEN = 2, BLOCK = 32, HEAD_ROWS = 64 };

typedef struct {
    Stored *next; /* where the next matrix goes */
    int card, cards;
    bool fits; /* nothing was cut that must stay together */
} Cutter;

static void cut(Cutter *c, Linear *w, bool rows, Range keep) {
    if (!w->rows) return;
    Stored *each = c->next;
    const int unit = unit_of_linear(w, rows), all = rows ? w->rows : w->cols;
    c->fits &= keep.n > 0 && keep.first % unit == 0 && (keep.n % unit == 0 || keep.first + keep.n == all);
    for (int i = 0; i < w->n; i++) {
        each[i] = w->each[i];
        cut_view(&each[i].data, w->type, rows, keep);
        cut_grid(&each[i].scale, w, &w->scale, rows, keep);
        cut_grid(&each[i].zero, w, &w->zero, rows, keep);
        if (!rows && each[i].group) each[i].group += keep.first;
        if (rows && each[i].bias) each[i].bias += keep.first;
        if (!rows && c->card) each[i].bias = NULL; /* it is added once */
    }
    *(rows ? &w->rows : &w->cols) = keep.n;
    w->each = each, c->next += w->n;
}

static void cut_experts(Cutter *c, Linear *gate, Linear *up, Linear *down) {
    if (!gate->rows) return;
    int unit = least_multiple(unit_of_linear(gate, true), unit_of_linear(up, true));
    unit = least_multiple(EVEN, least_multiple(unit, unit_of_linear(down, false)));
    const Range keep = part_of(gate->rows, unit_for(gate->rows, unit, BLOCK, c->cards), c->card, c->cards);
    cut(c, gate, true, keep), cut(c, up, true, keep), cut(c, down, false, keep);
}

static void cut_layer(Cutter *c, const Model *m, Layer *l) {
    const Range q = heads_of(m->n_heads, c->card, c->cards), kv = heads_of(m->n_kv_heads, c->card, c->cards);
    const int d = m->head_dim, v = m->v_dim;
    cut(c, &l->q, true, (Range){q.first * d, q.n * d});
    cut(c, &l->k, true, (Range){kv.first * d, kv.n * d});
    cut(c, &l->v, true, (Range){kv.first * v, kv.n * v});
    cut(c, &l->o, false, (Range){q.first * v, q.n * v});
    if (l->k_up.rows) l->k_up.each += q.first, l->v_up.each += q.first, l->k_up.n = l->v_up.n = q.n; /* one a head */
    if (l->sinks) l->sinks += q.first;
    cut_experts(c, &l->gate, &l->up, &l->down);
    cut_experts(c, &l->shared_gate, &l->shared_up, &l->shared_down);
    c->fits &= !l->router.rows || !l->ffn_post_norm; /* no model has both */
}

/* False if it cannot be cut so: only shard_free() may use it then. */
static bool make_shard(const Model *m, int card, int cards, Shard *shard) {
    const int keys = m->kv_rank ? cards : m->n_kv_heads; /* latents are whole on each card */
    size_t matrices = 1;                                 /* the head */
    for (int i = 0; i < m->n_layers; i++) {
        const Linear *const all[] = LINEARS(m->layer + i);
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) matrices += (size_t)all[k]->n;
    }
    *shard = (Shard){.model = *m, .stored = allocate(matrices * sizeof *shard->stored)};
    Model *to = &shard->model;
    Cutter c = {shard->stored, card, cards, m->n_heads % cards == 0 && (keys % cards == 0 || cards % keys == 0)};
    to->n_heads = heads_of(m->n_heads, card, cards).n, to->n_kv_heads = heads_of(m->n_kv_heads, card, cards).n;
    to->layer = allocate((size_t)m->n_layers * sizeof *to->layer), to->ffn_dim = 0;
    for (int i = 0; i < m->n_layers; i++) {
        Layer *l = to->layer + i;
        *l = m->layer[i];
        cut_layer(&c, m, l);
        to->ffn_dim = MAX(to->ffn_dim, MAX(l->gate.rows, l->shared_gate.rows));
    }
    const int unit = least_multiple(EVEN, unit_of_linear(&m->head, true));
    const Range ids = part_of(m->head.rows, unit_for(m->head.rows, unit, HEAD_ROWS, cards), card, cards);
    shard->first_id = ids.first;
    cut(&c, &to->head, true, ids);
    return c.fits;
}

void shard_free(Shard *shard) {
    free(shard->model.layer), free(shard->stored);
    *shard = (Shard){0};
}

bool can_shard(const Model *m, int cards) {
    bool fits = true;
    for (int i = 0; i < cards && fits; i++) {
        Shard shard;
        fits = make_shard(m, i, cards, &shard);
        shard_free(&shard);
    }
    return fits;
}

const Model *shard_of(const Model *m, int card, int cards) {
    static Shard one;
    shard_free(&one);
    return make_shard(m, card, cards, &one) ? &one.model : NULL;
}

bool shard_model(const Model *m, int card, int cards, Shard *shard, Error *e) {
    if (make_shard(m, card, cards, shard)) return true;
    char can[100] = "1";
    for (int n = 2, at = 1; n <= MAX_GPUS; n++)
        if (can_shard(m, n)) at += snprintf(can + at, sizeof can - (size_t)at, ", %d", n);
    return fail(e, USAGE, "%d GPUs cannot share this model; --gpus can be %s", cards, can);
}
