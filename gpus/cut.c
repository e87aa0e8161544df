/* cut.c: the part of a model that one of several GPUs has. A part's matrices are views into the same files, so that a
 * GPU reads only what it needs. */
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

/* How many rows, or columns, share an entry of a grid; 0: all do, or the entries stay whole. */
static int shared(const Linear *w, const Grid *g, bool rows) {
    const int each = rows ? g->rows : g->cols, all = rows ? w->rows : w->cols;
    return each >= all || (!rows && w->each->group) ? 0 : each;
}

/* Keeps these rows, or columns, of one matrix of w. */
static void cut_stored(Stored *one, const Linear *w, bool rows, Range keep) {
    const struct {
        const Grid *grid;
        View *view;
    } grids[] = {{&w->scale, &one->scale}, {&w->zero, &one->zero}};
    cut_view(&one->data, w->type, rows, keep);
    for (int i = 0; i < 2; i++) {
        const Grid *g = grids[i].grid;
        const int each = shared(w, g, rows);
        const Range entries = {each ? keep.first / each : 0, each ? (keep.n + each - 1) / each : 0};
        if (each) cut_view(grids[i].view, g->type, rows != g->transposed, entries);
    }
    if (rows && one->bias) one->bias += keep.first;
    if (!rows && one->group) one->group += keep.first;
}

static int least_multiple(int a, int b) {
    int x = a, y = b;
    while (y) {
        const int rest = x % y;
        x = y, y = rest;
    }
    return a / x * b;
}

/* Neighbouring rows, or columns, of w that must stay together. */
static int unit_of_linear(const Linear *w, bool rows) {
    const Grid *grids[] = {&w->scale, &w->zero};
    int unit = w->rows ? unit_of(w->type, rows) : 1;
    for (int i = 0; i < 2 && w->rows; i++) {
        const int each = shared(w, grids[i], rows);
        if (each) unit = least_multiple(unit, each * unit_of(grids[i]->type, rows != grids[i]->transposed));
    }
    return unit;
}

/* ---- a model ---- */

/* Of n things in units, of which the last may be smaller: how many units there are, and GPU number `gpu`'s share. */
static int units_of(int n, int unit) { return (n + unit - 1) / unit; }
static Range share(int n, int unit, int gpu, int gpus) {
    const int64_t units = units_of(n, unit);
    const int first = (int)(units * gpu / gpus) * unit, end = (int)(units * (gpu + 1) / gpus) * unit;
    return (Range){first, MIN(end, n) - first};
}
/* The unit, or a multiple of `larger` if there are enough. */
static int unit_for(int n, int unit, int larger, int gpus) {
    const int both = least_multiple(unit, larger);
    return units_of(n, both) >= gpus ? both : unit;
}
/* The heads of queries, or of keys and values; several GPUs may have the same one of these. */
static Range heads(int n, int gpu, int gpus) {
    return n >= gpus ? share(n, 1, gpu, gpus) : (Range){(int)((int64_t)n * gpu / gpus), 1};
}

/* Kernels store pairs of rows, prompts of MXFP4 32 at once; cuBLAS likes rows of the head that begin at 256 bytes. */
enum { EVEN = 2, BLOCK = 32, HEAD_ROWS = 64 };
/* The rows of gate and up that must stay together. */
static int width_unit(const Linear *gate, const Linear *up, const Linear *down, int gpus) {
    const int unit = least_multiple(unit_of_linear(gate, true), unit_of_linear(up, true));
    return unit_for(gate->rows, least_multiple(EVEN, least_multiple(unit, unit_of_linear(down, false))), BLOCK, gpus);
}
static int head_unit(const Linear *head, int gpus) {
    return unit_for(head->rows, least_multiple(EVEN, unit_of_linear(head, true)), HEAD_ROWS, gpus);
}

/* Whether heads of `each` rows, or columns, of w can be cut apart. */
static bool heads_fit(const Linear *w, bool rows, int heads, int each, int gpus) {
    return !w->rows || (heads > gpus ? heads / gpus : 1) * each % unit_of_linear(w, rows) == 0;
}

static bool width_fits(const Linear *gate, const Linear *up, const Linear *down, int gpus) {
    return !gate->rows || units_of(gate->rows, width_unit(gate, up, down, gpus)) >= gpus;
}

bool can_be_cut(const Model *m, int gpus) {
    const int keys = m->kv_rank ? gpus : m->n_kv_heads; /* latents are whole on each */
    if (m->n_heads % gpus || (keys % gpus && gpus % keys) || units_of(m->head.rows, head_unit(&m->head, gpus)) < gpus)
        return false;
    for (int i = 0; i < m->n_layers; i++) {
        const Layer *l = m->layer + i;
        if (l->router.rows && l->ffn_post_norm) return false; /* no model has both */
        if (!heads_fit(&l->q, true, m->n_heads, m->head_dim, gpus) ||
            !heads_fit(&l->k, true, m->n_kv_heads, m->head_dim, gpus) ||
            !heads_fit(&l->v, true, m->n_kv_heads, m->v_dim, gpus) ||
            !heads_fit(&l->o, false, m->n_heads, m->v_dim, gpus))
            return false;
        if (!width_fits(&l->gate, &l->up, &l->down, gpus) ||
            !width_fits(&l->shared_gate, &l->shared_up, &l->shared_down, gpus))
            return false;
    }
    return true;
}

/* Where a part's matrices go, and which part it is. */
typedef struct {
    Stored *next;
    int gpu, gpus;
} Cutter;

static void cut(Cutter *c, Linear *w, bool rows, Range keep) {
    Stored *each = c->next;
    if (!w->rows) return;
    for (int i = 0; i < w->n; i++) {
        each[i] = w->each[i];
        cut_stored(each + i, w, rows, keep);
        if (!rows && c->gpu) each[i].bias = NULL; /* it is added once */
    }
    *(rows ? &w->rows : &w->cols) = keep.n;
    w->each = each, c->next += w->n;
}

static void cut_experts(Cutter *c, Linear *gate, Linear *up, Linear *down) {
    if (!gate->rows) return;
    const Range keep = share(gate->rows, width_unit(gate, up, down, c->gpus), c->gpu, c->gpus);
    cut(c, gate, true, keep), cut(c, up, true, keep), cut(c, down, false, keep);
}

static void cut_layer(Cutter *c, const Model *m, Layer *l) {
    const Range q = heads(m->n_heads, c->gpu, c->gpus), kv = heads(m->n_kv_heads, c->gpu, c->gpus);
    const int d = m->head_dim, v = m->v_dim;
    cut(c, &l->q, true, (Range){q.first * d, q.n * d});
    cut(c, &l->k, true, (Range){kv.first * d, kv.n * d});
    cut(c, &l->v, true, (Range){kv.first * v, kv.n * v});
    cut(c, &l->o, false, (Range){q.first * v, q.n * v});
    if (l->k_up.rows) l->k_up.each += q.first, l->v_up.each += q.first, l->k_up.n = l->v_up.n = q.n; /* one a head */
    if (l->sinks) l->sinks += q.first;
    cut_experts(c, &l->gate, &l->up, &l->down);
    cut_experts(c, &l->shared_gate, &l->shared_up, &l->shared_down);
}

static bool refuse(const Model *m, int gpus, Error *e) {
    char can[100] = "";
    for (int n = 1, at = 0; n <= MAX_GPUS; n++)
        if (can_be_cut(m, n)) at += snprintf(can + at, sizeof can - (size_t)at, "%s%d", at ? ", " : "", n);
    return fail(e, USAGE, "this model cannot be divided among %d GPUs, but among %s: choose with --gpus", gpus, can);
}

bool model_part(const Model *m, int gpu, int gpus, ModelPart *part, Error *e) {
    *part = (ModelPart){.model = *m};
    if (!can_be_cut(m, gpus)) return refuse(m, gpus, e);
    size_t matrices = 1; /* the head */
    for (int i = 0; i < m->n_layers; i++) {
        const Linear *const all[] = LINEARS(m->layer + i);
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) matrices += (size_t)all[k]->n;
    }
    part->layer = allocate((size_t)m->n_layers * sizeof *part->layer);
    part->stored = allocate(matrices * sizeof *part->stored);
    Model *to = &part->model;
    Cutter c = {part->stored, gpu, gpus};
    to->n_heads = heads(m->n_heads, gpu, gpus).n, to->n_kv_heads = heads(m->n_kv_heads, gpu, gpus).n;
    to->layer = part->layer, to->ffn_dim = 0;
    for (int i = 0; i < m->n_layers; i++) {
        Layer *l = part->layer + i;
        *l = m->layer[i];
        cut_layer(&c, m, l);
        to->ffn_dim = MAX(to->ffn_dim, MAX(l->gate.rows, l->shared_gate.rows));
    }
    const Range ids = share(m->head.rows, head_unit(&m->head, gpus), gpu, gpus);
    part->first_id = ids.first;
    cut(&c, &to->head, true, ids);
    return true;
}

void model_part_free(ModelPart *part) {
    free(part->layer), free(part->stored);
    *part = (ModelPart){0};
}
