/* reference.c: the border of infer.h in plain C, to be read beside infer.cu:
 * the same steps in the same order, without anything that makes them fast. Sums are doubles, everything between stages
 * is a float. The oracle of the tests, and `infer-reference` for readers without a GPU.
 *
 * Arrays of a step have one row for each of the T tokens of the batch; a row is computed from that token alone and from
 * the cache, so batching and chunking cannot change a bit of it. */
#include "reference.h"
#include "../host.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

bool reference_rounds = false;

typedef struct { /* 64 positions of one sequence */
    int token[PAGE];
    float *k, *v; /* (n_layers, PAGE, n_kv_heads * head_dim) */
} Page;

typedef struct { /* a step that was submitted */
    int *token;
    float *logits;
    int rows;
} Step;

typedef struct {
    const Model *m;
    Limits limits;
    Page *page;
    int pages;
    int *drawn;   /* (max_seqs) the last token of each slot */
    Step step[3]; /* [0] was collected last; then the outstanding ones, oldest first */
    int outstanding;
    uint64_t experts_read;
    /* of the step being computed */
    const Batch *b;
    int tokens;          /* T */
    int *seq, *position; /* (T) */
    int *id;             /* (T) */
    float *x;            /* (T, dim) residual stream */
    float *normed;       /* (T, dim) */
    float *q, *attn;     /* (T, n_heads * head_dim) */
    float *k, *v;        /* (T, n_kv_heads * head_dim) */
    float *router;       /* (T, n_experts) */
    int *expert;         /* (T, top_k) */
    float *weight;       /* (T, top_k) */
    float *gate, *up;    /* (T, top_k, ffn_dim); gate becomes the activation */
    float *down;         /* (T, top_k, dim) */
} Reference;

/* ---- numbers ---- */

static float bf16_value(uint16_t h) { return bits_float((uint32_t)h << 16); }

/* x, or the nearest bf16, ties to even, where infer.cu stores or multiplies it as bf16. */
static float rounded(float x) {
    if (!reference_rounds || isnan(x)) return x;
    uint32_t u = float_bits(x);
    return bits_float((u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000u);
}

/* x as a matrix of this type multiplies it. */
static float rounded_for(Type type, float x) {
    if (!reference_rounds || type == F32 || isnan(x)) return x;
    if (type != F16) return rounded(x);
    float size = fabsf(x), step = size < 0x1p-14f ? 0x1p-24f : ldexpf(1, ilogbf(size) - 10);
    return size > 65504 ? copysignf(65504, x) : rintf(x / step) * step; /* ties to even */
}

static void round_row(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = rounded(x[i]);
}

static const float e2m1_value[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

static float e8m0_value(int e) { return e == 255 ? NAN : ldexpf(1, e - 127); }

/* Row `row` of matrix i as floats. */
static void decode_row(const Linear *w, int i, int row, float *out) {
    const unsigned char *data = w->data.data + (size_t)i * w->data.step + (size_t)row * w->data.stride;
    if (w->type == MXFP4) {
        const unsigned char *scale = w->scale.data + (size_t)i * w->scale.step + (size_t)row * w->scale.stride;
        for (int b = 0; b < w->cols / 32; b++) {
            float factor = e8m0_value(scale[b]);
            for (int j = 0; j < 16; j++, data++) { /* low nibble first */
                *out++ = e2m1_value[*data & 15] * factor;
                *out++ = e2m1_value[*data >> 4] * factor;
            }
        }
        return;
    }
    if (w->type == F32) memcpy(out, data, (size_t)w->cols * sizeof *out);
    for (int c = 0; c < w->cols && w->type != F32; c++) {
        uint16_t h;
        memcpy(&h, data + 2 * c, 2);
        out[c] = w->type == BF16 ? bf16_value(h) : f16_value(h);
    }
}

static double dot(const float *a, const float *b, int n) {
    double lane[8] = {0}, sum = 0; /* eight sums at once, so that the compiler may use vectors */
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lane[j] += (double)a[i + j] * (double)b[i + j];
    for (; i < n; i++) sum += (double)a[i] * (double)b[i];
    for (int j = 0; j < 8; j++) sum += lane[j];
    return sum;
}

/* ---- the steps of a block, in order ---- */

/* x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019). */
static void rms_norm(const float *x, const float *weight, int dim, float eps, float *out) {
    double scale = 1 / sqrt(dot(x, x, dim) / dim + (double)eps);
    for (int i = 0; i < dim; i++) out[i] = (float)((double)x[i] * scale * (double)weight[i]);
}

/* y[t] = W_i x[t] + bias for the n rows that `row` names, or the first n; x and y are (rows, cols) and (rows, W.rows).
 */
static void linear(const Linear *w, int i, const float *x, const int *row, int n, float *y) {
    float *matrix_row = allocate((size_t)w->cols * sizeof *matrix_row),
          *in = allocate((size_t)n * (size_t)w->cols * sizeof *in);
    for (int t = 0; t < n; t++)
        for (int c = 0; c < w->cols; c++) {
            float value = x[(size_t)(row ? row[t] : t) * (size_t)w->cols + (size_t)c];
            in[(size_t)t * (size_t)w->cols + (size_t)c] = rounded_for(w->type, value);
        }
    for (int r = 0; r < w->rows; r++) {
        decode_row(w, i, r, matrix_row);
        double bias = w->bias ? (double)w->bias[(size_t)i * (size_t)w->rows + (size_t)r] : 0;
        for (int t = 0; t < n; t++)
            y[(size_t)(row ? row[t] : t) * (size_t)w->rows + (size_t)r] =
                (float)(dot(matrix_row, in + (size_t)t * (size_t)w->cols, w->cols) + bias);
    }
    free(matrix_row);
    free(in);
}

/* Norms each head, where a model does so before it turns them. */
static void norm_heads(const Model *m, const float *weight, float *x, int heads) {
    for (int h = 0; h < heads && weight; h++, x += m->head_dim) rms_norm(x, weight, m->head_dim, m->eps, x);
}

/* Turns each head's pairs (i, i + head_dim / 2) by position * inv_freq[i]. */
static void rope(const Model *m, const Rope *how, float *x, int heads, int position) {
    int half = m->rope_dim / 2;
    for (int h = 0; h < heads; h++, x += m->head_dim)
        for (int i = 0; i < half; i++) {
            double angle = (double)position * (double)how->inv_freq[i], a = (double)x[i], b = (double)x[i + half];
            double c = cos(angle) * (double)how->scale, s = sin(angle) * (double)how->scale;
            x[i] = (float)(a * c - b * s);
            x[i + half] = (float)(b * c + a * s);
        }
}

/* Where position p of sequence s lies in the cache. */
static Page *cache_page(const Reference *r, int s, int p) {
    return r->page + r->b->page[s * r->b->max_pages + p / PAGE];
}

static size_t cache_row(const Reference *r, int layer, int p) {
    return ((size_t)layer * PAGE + (size_t)(p % PAGE)) * (size_t)(r->m->n_kv_heads * r->m->head_dim);
}

static void store(Reference *r, int layer, int t) {
    int kv = r->m->n_kv_heads * r->m->head_dim, p = r->position[t];
    Page *page = cache_page(r, r->seq[t], p);
    for (int i = 0; i < kv; i++) {
        page->k[cache_row(r, layer, p) + (size_t)i] = r->k[(size_t)t * (size_t)kv + (size_t)i];
        page->v[cache_row(r, layer, p) + (size_t)i] = r->v[(size_t)t * (size_t)kv + (size_t)i];
    }
}

/* softmax(q k / sqrt(head_dim)) v over the positions that token t sees; a sink takes its share of the softmax and adds
 * nothing. Query heads share key/value heads in groups (Ainslie et al., "GQA", 2023). */
static void attention(Reference *r, int layer, int t) {
    const Model *m = r->m;
    const Layer *l = m->layer + layer;
    int d = m->head_dim, p = r->position[t], first = l->window && p >= l->window ? p - l->window + 1 : 0;
    double *score = allocate((size_t)(p - first + 1) * sizeof *score), *sum = allocate((size_t)d * sizeof *sum);
    for (int h = 0; h < m->n_heads; h++) {
        const float *q = r->q + ((size_t)t * (size_t)m->n_heads + (size_t)h) * (size_t)d;
        size_t head = (size_t)(h / (m->n_heads / m->n_kv_heads) * d);
        double most = l->sinks ? (double)l->sinks[h] : -DBL_MAX, total = 0;
        for (int j = first; j <= p; j++) {
            score[j - first] =
                dot(q, cache_page(r, r->seq[t], j)->k + cache_row(r, layer, j) + head, d) * (double)m->attn_scale;
            most = fmax(most, score[j - first]);
        }
        if (l->sinks) total = exp((double)l->sinks[h] - most);
        memset(sum, 0, (size_t)d * sizeof *sum);
        for (int j = first; j <= p; j++) {
            const float *v = cache_page(r, r->seq[t], j)->v + cache_row(r, layer, j) + head;
            double share = exp(score[j - first] - most);
            total += share;
            for (int i = 0; i < d; i++) sum[i] += share * (double)v[i];
        }
        for (int i = 0; i < d; i++)
            r->attn[((size_t)t * (size_t)m->n_heads + (size_t)h) * (size_t)d + (size_t)i] = (float)(sum[i] / total);
    }
    free(score);
    free(sum);
}

/* The top_k experts of one token by router logit, the lower number among equals, and softmax over those logits. */
static void route(const float *logit, int n, int top_k, int *expert, float *weight) {
    double total = 0;
    for (int k = 0; k < top_k; k++) {
        int best = -1;
        for (int e = 0; e < n; e++) {
            bool taken = false;
            for (int j = 0; j < k; j++) taken |= expert[j] == e;
            if (!taken && (best < 0 || logit[e] > logit[best])) best = e;
        }
        expert[k] = best;
        total += exp((double)logit[best] - (double)logit[expert[0]]);
    }
    for (int k = 0; k < top_k; k++)
        weight[k] = (float)(exp((double)logit[expert[k]] - (double)logit[expert[0]]) / total);
}

static float swiglu(const Model *m, float gate, float up) {
    if (m->act == SWIGLU) return (float)((double)gate / (1 + exp(-(double)gate)) * (double)up);
    double g = fmin((double)gate, (double)m->act_limit),
           u = fmax(fmin((double)up, (double)m->act_limit), -(double)m->act_limit);
    return (float)(g / (1 + exp(-1.702 * g)) * (u + 1));
}

/* Each expert reads its matrices once, for all tokens that chose it. `normed` is repeated for each choice. */
static void experts(Reference *r, const Layer *l) {
    const Model *m = r->m;
    int choices = r->tokens * m->top_k, *row = allocate((size_t)choices * sizeof *row);
    float *in = allocate((size_t)choices * (size_t)m->dim * sizeof *in);
    for (int c = 0; c < choices; c++)
        memcpy(in + (size_t)c * (size_t)m->dim, r->normed + (size_t)(c / m->top_k) * (size_t)m->dim,
               (size_t)m->dim * sizeof *in);
    for (int e = 0; e < m->n_experts; e++) {
        int n = 0;
        for (int c = 0; c < choices; c++)
            if (r->expert[c] == e) row[n++] = c;
        if (!n) continue;
        r->experts_read += l->router.rows > 0;
        linear(&l->gate, e, in, row, n, r->gate);
        linear(&l->up, e, in, row, n, r->up);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < m->ffn_dim; j++) {
                size_t at = (size_t)row[i] * (size_t)m->ffn_dim + (size_t)j;
                r->gate[at] = swiglu(m, r->gate[at], r->up[at]);
            }
        linear(&l->down, e, r->gate, row, n, r->down);
    }
    free(row);
    free(in);
}

/* x[t] += sum over the choices of weight * down, in the order of choice. */
static void combine(Reference *r, int t) {
    int dim = r->m->dim, top_k = r->m->top_k;
    for (int i = 0; i < dim; i++) {
        double sum = 0;
        for (int k = t * top_k; k < (t + 1) * top_k; k++)
            sum += (double)r->weight[k] * (double)r->down[(size_t)k * (size_t)dim + (size_t)i];
        r->x[(size_t)t * (size_t)dim + (size_t)i] += (float)sum;
    }
}

static void tap(const Reference *r, const char *stage, int layer, const float *values, int rows, int cols) {
    if (r->limits.tap) r->limits.tap(r->limits.tap_data, stage, layer, values, rows, cols);
}

static void block(Reference *r, int layer) {
    const Model *m = r->m;
    const Layer *l = m->layer + layer;
    int T = r->tokens, q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    size_t dim = (size_t)m->dim;
    for (int t = 0; t < T; t++)
        rms_norm(r->x + (size_t)t * dim, l->attn_norm, m->dim, m->eps, r->normed + (size_t)t * dim);
    linear(&l->q, 0, r->normed, NULL, T, r->q);
    linear(&l->k, 0, r->normed, NULL, T, r->k);
    linear(&l->v, 0, r->normed, NULL, T, r->v);
    for (int t = 0; t < T; t++) {
        norm_heads(m, l->q_norm, r->q + (size_t)t * (size_t)q, m->n_heads);
        norm_heads(m, l->k_norm, r->k + (size_t)t * (size_t)kv, m->n_kv_heads);
        rope(m, l->rope, r->q + (size_t)t * (size_t)q, m->n_heads, r->position[t]);
        rope(m, l->rope, r->k + (size_t)t * (size_t)kv, m->n_kv_heads, r->position[t]);
        round_row(r->k + (size_t)t * (size_t)kv, kv);
        round_row(r->v + (size_t)t * (size_t)kv, kv);
        if (l->q.type != F32) round_row(r->q + (size_t)t * (size_t)q, q);
        store(r, layer, t);
    }
    tap(r, "q", layer, r->q, T, q);
    tap(r, "k", layer, r->k, T, kv);
    tap(r, "v", layer, r->v, T, kv);
    for (int t = 0; t < T; t++) attention(r, layer, t);
    tap(r, "attn", layer, r->attn, T, q);
    linear(&l->o, 0, r->attn, NULL, T, r->normed);
    for (size_t i = 0; i < (size_t)T * dim; i++) r->x[i] += r->normed[i];
    tap(r, "attn_residual", layer, r->x, T, m->dim);
    for (int t = 0; t < T; t++)
        rms_norm(r->x + (size_t)t * dim, l->ffn_norm, m->dim, m->eps, r->normed + (size_t)t * dim);
    if (l->router.rows) linear(&l->router, 0, r->normed, NULL, T, r->router);
    for (int t = 0; t < T; t++) { /* dense: one expert, which every token chooses */
        if (l->router.rows) {
            route(r->router + (size_t)t * (size_t)m->n_experts, m->n_experts, m->top_k, r->expert + t * m->top_k,
                  r->weight + t * m->top_k);
        } else {
            r->expert[t] = 0;
            r->weight[t] = 1;
        }
    }
    if (r->limits.tap && l->router.rows) {
        float *ids = allocate((size_t)(T * m->top_k) * sizeof *ids);
        for (int i = 0; i < T * m->top_k; i++) ids[i] = (float)r->expert[i];
        tap(r, "experts", layer, ids, T, m->top_k);
        tap(r, "weights", layer, r->weight, T, m->top_k);
        free(ids);
    }
    experts(r, l);
    tap(r, "act", layer, r->gate, T * m->top_k, m->ffn_dim);
    for (int t = 0; t < T; t++) combine(r, t);
    tap(r, "residual", layer, r->x, T, m->dim);
}

/* ---- from logits to a token ---- */

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The least scaled logit that top-k, top-p and min-p leave in the draw. x is (n) and is not changed. */
static float filter_floor(const float *x, int n, const Sampling *s) {
    float *sorted = allocate((size_t)n * sizeof *sorted), floor = -INFINITY;
    memcpy(sorted, x, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, descending);
    if (s->top_k > 0 && s->top_k < n) floor = sorted[s->top_k - 1];
    if (s->top_p < 1) {
        uint64_t total = 0, sum = 0;
        for (int i = 0; i < n && sorted[i] >= floor; i++) total += mass(sorted[i], sorted[0]);
        uint64_t keep = top_p_mass(total, s->top_p);
        for (int i = 0; i < n && sum < keep; i++) {
            sum += mass(sorted[i], sorted[0]);
            floor = fmaxf(floor, sum < keep ? floor : sorted[i]);
        }
    }
    if (s->min_p > 0) floor = fmaxf(floor, min_p_floor(sorted[0], s->min_p));
    free(sorted);
    return floor;
}

int reference_draw(float *logit, int vocab, const Sampling *s, int position, const bool *seen) {
    for (int i = 0; i < vocab; i++) {
        if (isnan(logit[i])) return DREW_NAN;
        if (seen && seen[i]) logit[i] = penalize(logit[i], s->penalty);
        if (s->temperature > 0) logit[i] = logit[i] / s->temperature;
    }
    bool filtered = s->temperature > 0 && (s->top_k > 0 || s->top_p < 1 || s->min_p > 0);
    float floor = filtered ? filter_floor(logit, vocab, s) : -INFINITY;
    uint64_t best = 0;
    for (int i = 0; i < vocab; i++) {
        if (!(logit[i] >= floor)) continue;
        uint64_t key = draw_key(s->temperature > 0 ? logit[i] + token_noise(s->seed, position, i) : logit[i], i);
        if (key > best) best = key;
    }
    return draw_id(best);
}

/* Draws for sequence s of the batch, whose last token's logits these are. */
static int sample(Reference *r, int s, const float *logits) {
    const Sampling *how = r->b->sampling + s;
    int vocab = r->m->vocab, length = r->b->start[s] + r->b->first[s + 1] - r->b->first[s];
    float *copy = allocate((size_t)vocab * sizeof *copy);
    bool *seen = how->penalty != 1 ? allocate_zero((size_t)vocab, sizeof *seen) : NULL;
    for (int p = 0; seen && p < length; p++) seen[cache_page(r, s, p)->token[p % PAGE]] = true;
    memcpy(copy, logits, (size_t)vocab * sizeof *copy);
    int token = reference_draw(copy, vocab, how, length, seen);
    free(copy);
    free(seen);
    return token;
}

/* Logits of the tokens that are wanted, and the draws. */
static void head(Reference *r, Step *step) {
    const Model *m = r->m;
    const Batch *b = r->b;
    int *row = allocate((size_t)(r->tokens + 1) * sizeof *row), n = 0;
    for (int s = 0; s < b->seqs; s++) {
        int from = b->want[s] == WANT_ALL_LOGITS ? b->first[s] : b->first[s + 1] - 1;
        for (int t = from; t < b->first[s + 1] && b->want[s] != WANT_NOTHING; t++) row[n++] = t;
    }
    float *logits = allocate((size_t)n * (size_t)m->vocab * sizeof *logits),
          *in = allocate((size_t)n * (size_t)m->dim * sizeof *in);
    for (int i = 0; i < n; i++)
        rms_norm(r->x + (size_t)row[i] * (size_t)m->dim, m->norm, m->dim, m->eps, in + (size_t)i * (size_t)m->dim);
    linear(&m->head, 0, in, NULL, n, logits);
    tap(r, "logits", m->n_layers, logits, n, m->vocab);
    step->token = allocate((size_t)b->seqs * sizeof *step->token);
    step->logits = logits;
    step->rows = 0;
    for (int s = 0, i = 0; s < b->seqs; s++) {
        int rows = b->want[s] == WANT_NOTHING ? 0 : b->want[s] == WANT_ALL_LOGITS ? b->first[s + 1] - b->first[s] : 1;
        const float *last = logits + (size_t)(i + rows - 1) * (size_t)m->vocab;
        step->token[s] = rows ? sample(r, s, last) : DREW_NOTHING;
        if (rows) r->drawn[b->slot[s]] = step->token[s];
        if (b->want[s] == WANT_LOGITS || b->want[s] == WANT_ALL_LOGITS) { /* keep those that the caller asked for */
            memmove(logits + (size_t)step->rows * (size_t)m->vocab, logits + (size_t)i * (size_t)m->vocab,
                    (size_t)rows * (size_t)m->vocab * sizeof *logits);
            step->rows += rows;
        }
        i += rows;
    }
    free(row);
    free(in);
}

/* ---- the border ---- */

static void forward(Reference *r, const Batch *b, Step *step) {
    const Model *m = r->m;
    r->b = b;
    r->tokens = b->first[b->seqs];
    size_t kv = (size_t)m->n_layers * PAGE * (size_t)(m->n_kv_heads * m->head_dim);
    for (int s = 0; s < b->seqs; s++) {
        int end = b->start[s] + b->first[s + 1] - b->first[s];
        for (int p = 0; p < end; p += PAGE) {
            Page *page = cache_page(r, s, p);
            if (!page->k) page->k = allocate_zero(kv, sizeof *page->k), page->v = allocate_zero(kv, sizeof *page->v);
        }
        for (int t = b->first[s]; t < b->first[s + 1]; t++) {
            int p = b->start[s] + t - b->first[s];
            Page *page = cache_page(r, s, p);
            r->seq[t] = s;
            r->position[t] = p;
            r->id[t] = b->token[t] < 0 ? r->drawn[b->slot[s]] : b->token[t];
            if (r->id[t] < 0) r->id[t] = 0; /* after a NaN the step is void */
            page->token[p % PAGE] = r->id[t];
            decode_row(&m->embed, 0, r->id[t], r->x + (size_t)t * (size_t)m->dim);
        }
    }
    for (int i = 0; i < m->n_layers; i++) block(r, i);
    head(r, step);
}

/* Reads every weight once, so that loading happens here and can be seen. */
static void read_weights(const Model *m, void (*progress)(uint64_t, uint64_t)) {
    uint64_t done = 0, total = model_bytes(m);
    for (int i = 0; i <= m->n_layers; i++) {
        const Layer *l = m->layer + i;
        const Linear *of_layer[] = LINEARS(l), *ends[] = {&m->embed, &m->head};
        for (int j = 0; j < (i < m->n_layers ? (int)(sizeof of_layer / sizeof *of_layer) : 2); j++) {
            const Linear *w = i < m->n_layers ? of_layer[j] : ends[j];
            float *row = allocate((size_t)w->cols * sizeof *row);
            for (int n = 0; n < w->n; n++)
                for (int r = 0; r < w->rows; r++) decode_row(w, n, r, row);
            free(row);
            progress(done += linear_bytes(w), total);
        }
    }
}

static void *reference_open(const Model *m, const Limits *limits, int *pages, Error *e) {
    if (m->made_up) {
        fail(e, USAGE, "random weights are made on a GPU only; name a model that has some");
        return NULL;
    }
    Reference *r = allocate_zero(1, sizeof *r);
    size_t T = (size_t)limits->max_tokens, choices = T * (size_t)m->top_k;
    *r = (Reference){.m = m, .limits = *limits, .pages = *pages};
    r->page = allocate_zero((size_t)*pages, sizeof *r->page); /* their memory is taken when they are first written */
    r->drawn = allocate_zero((size_t)limits->max_seqs, sizeof *r->drawn);
    r->seq = allocate(T * sizeof *r->seq);
    r->position = allocate(T * sizeof *r->position);
    r->id = allocate(T * sizeof *r->id);
    r->x = allocate(T * (size_t)m->dim * sizeof *r->x);
    r->normed = allocate(T * (size_t)m->dim * sizeof *r->normed);
    r->q = allocate(T * (size_t)(m->n_heads * m->head_dim) * sizeof *r->q);
    r->attn = allocate(T * (size_t)(m->n_heads * m->head_dim) * sizeof *r->attn);
    r->k = allocate(T * (size_t)(m->n_kv_heads * m->head_dim) * sizeof *r->k);
    r->v = allocate(T * (size_t)(m->n_kv_heads * m->head_dim) * sizeof *r->v);
    r->router = allocate(T * (size_t)m->n_experts * sizeof *r->router);
    r->expert = allocate(choices * sizeof *r->expert);
    r->weight = allocate(choices * sizeof *r->weight);
    r->gate = allocate(choices * (size_t)m->ffn_dim * sizeof *r->gate);
    r->up = allocate(choices * (size_t)m->ffn_dim * sizeof *r->up);
    r->down = allocate(choices * (size_t)m->dim * sizeof *r->down);
    if (limits->progress) read_weights(m, limits->progress);
    return r;
}

static bool reference_submit(void *state, const Batch *b, Error *e) {
    Reference *r = state;
    if (r->outstanding == 2) return fail(e, FAILED, "submit: two steps are outstanding; collect one");
    forward(r, b, r->step + 1 + r->outstanding++);
    return true;
}

static void step_free(Step *step) {
    free(step->token);
    free(step->logits);
    *step = (Step){0};
}

static bool reference_collect(void *state, Result *result, Error *e) {
    Reference *r = state;
    if (!r->outstanding) return fail(e, FAILED, "collect: no step is outstanding");
    step_free(r->step);
    r->step[0] = r->step[1];
    r->step[1] = r->step[2];
    r->step[2] = (Step){0};
    r->outstanding--;
    *result = (Result){.token = r->step[0].token, .logits = r->step[0].logits, .rows = r->step[0].rows};
    return true;
}

static void reference_close(void *state) {
    Reference *r = state;
    for (int i = 0; i < r->pages; i++) {
        free(r->page[i].k);
        free(r->page[i].v);
    }
    for (int i = 0; i < 3; i++) step_free(r->step + i);
    void *owned[] = {r->page, r->drawn, r->seq,    r->position, r->id,     r->x,    r->normed, r->q,   r->attn,
                     r->k,    r->v,     r->router, r->expert,   r->weight, r->gate, r->up,     r->down};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    free(r);
}

static void reference_describe(Devices *d) { *d = (Devices){.problem = "infer-reference computes without one"}; }

static double reference_flat_read(void *state, uint64_t bytes) {
    (void)state, (void)bytes;
    return 0; /* it is not made for speed */
}

static int reference_phases(void *state, Phase *phase) {
    (void)state, (void)phase;
    return 0;
}

static uint64_t reference_experts_read(void *state) { return ((Reference *)state)->experts_read; }

const Backend reference = {"reference",
                           2048,
                           reference_open,
                           reference_submit,
                           reference_collect,
                           reference_close,
                           reference_flat_read,
                           reference_phases,
                           reference_experts_read,
                           reference_describe};
