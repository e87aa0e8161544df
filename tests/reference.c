/* reference.c: the Backend of infer.h in plain C, to be read beside infer.cu: the same steps in the same order, with
 * nothing that makes them fast. Sums are doubles; every stage stores floats. The tests compare with it, and
 * `infer-reference` runs it without a GPU.
 *
 * Arrays of a step have one row for each of the T tokens of the batch; a row is computed from that token alone and from
 * the cache, so batching and chunking cannot change a bit of it. */
#include "reference.h"
#include "../host.h"
#ifdef ROOM_encodings
#include "../encodings/blocks.h"
#endif

#include <float.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool reference_rounds = false;

typedef struct { /* 64 positions of one sequence */
    int token[PAGE];
    float *k, *v; /* (n_layers, PAGE, k_row), (n_layers, PAGE, v_row) */
} Page;

typedef struct { /* a step that was submitted */
    Batch b;     /* with arrays of its own */
    int *token;  /* NULL: it is not computed yet */
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
    int k_row,
        v_row; /* what the cache holds of a token: n_kv_heads * head_dim and v_dim, or latent and rope key alone */
    /* of the step being computed */
    const Batch *b;
    int tokens;          /* T */
    int *seq, *position; /* (T) */
    int *id;             /* (T) */
    float *x;            /* (T, dim) residual stream */
    float *normed;       /* (T, dim) */
    float *q;            /* (T, n_heads * head_dim) */
    float *k, *v;        /* (T, k_row), (T, v_row) */
    float *attn;         /* (T, n_heads * v_dim) */
    float *q_low;        /* (T, q_rank) latent */
    float *query, *mean; /* (T, n_heads, k_row), (T, n_heads, kv_rank): attention to the latents */
    float *router;       /* (T, n_experts) */
    int *expert;         /* (T, top_k) */
    float *weight;       /* (T, top_k) */
    float *gate, *up;    /* (T, top_k, ffn_dim); gate becomes the activation */
    float *down;         /* (T, top_k, dim) */
    float *shared;       /* (T, dim) */
} Reference;

/* ---- numbers ---- */

/* x, or, when rounding like infer.cu, the nearest bf16, ties to even. */
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

/* decode_TYPE: n weights from the block on; without scales of their own, codes. A function a type, so that the compiler
 * sees its whole loop; parts of 16 are unrolled, so that it computes once what their weights share. */
#define UNROLLED _Pragma("GCC unroll 16")
#define DECODER(type, dtype, values, bytes, bits, zero, columns, card, weight, ...)                                    \
    static void decode_##type(const unsigned char *restrict block, int n, float *restrict out) {                       \
        enum { PART = values < 16 ? values : 16 };                                                                     \
        for (; n >= values; n -= values, block += bytes) {                                                             \
            UNROLLED for (int part = 0; part < values; part += PART) {                                                 \
                for (int i = part; i < part + PART; i++) {                                                             \
                    const Weight x = weight(block, i);                                                                 \
                    *out++ = x.a * x.q + x.b;                                                                          \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < n; i++) *out++ = weight(block, i).q; /* a part of a word of codes */                       \
    }
#define DECODER_NAME(type, ...) decode_##type,
CORE_TYPES(DECODER)
#ifdef ROOM_encodings
PACKED_TYPES(DECODER)
BLOCK_TYPES(DECODER)
#endif
static void (*const decoders[])(const unsigned char *restrict block, int n,
                                float *restrict out) = {CORE_TYPES(DECODER_NAME)
#ifdef ROOM_encodings
                                                            PACKED_TYPES(DECODER_NAME) BLOCK_TYPES(DECODER_NAME)
#endif
};

/* Row `row` of matrix i as floats. */
static void decode_row(const Linear *w, int i, int row, float *out) {
    const Stored *one = w->each + i;
    const View *data = &one->data;
    if (types[w->type].columns || data->step)
        for (int c = 0; c < w->cols; c++) out[c] = code_at(types + w->type, data, row, c).q;
    else
        decoders[w->type](data->data + (size_t)row * data->stride, w->cols, out);
    if (!w->scale.rows) return;
    const int shared = one->group ? 1 : w->scale.cols; /* columns of one scale and zero */
    for (int begin = 0; begin < w->cols; begin += shared) {
        const Weight first = weight_at(types, w, one, row, begin);
        for (int c = begin; c < w->cols && c - begin < shared; c++) out[c] = first.a * (out[c] - first.zero);
    }
}

static double dot(const float *a, const float *b, int n) {
    double lane[8] = {0}, sum = 0; /* eight sums at once, so that the compiler can use vectors */
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

typedef struct { /* some rows of the matrix in a call of linear() */
    const Linear *w;
    int i, first, end;
    const float *in; /* (n, W.cols) */
    const int *row;
    int n;
    float *y;
} Rows;

static void *multiply(void *of) {
    const Rows *rows = of;
    const Linear *w = rows->w;
    float *matrix_row = allocate((size_t)w->cols * sizeof *matrix_row);
    for (int r = rows->first; r < rows->end; r++) {
        decode_row(w, rows->i, r, matrix_row);
        double bias = w->each[rows->i].bias ? (double)w->each[rows->i].bias[r] : 0;
        for (int t = 0; t < rows->n; t++)
            rows->y[(size_t)(rows->row ? rows->row[t] : t) * (size_t)w->rows + (size_t)r] =
                (float)(dot(matrix_row, rows->in + (size_t)t * (size_t)w->cols, w->cols) + bias);
    }
    free(matrix_row);
    return NULL;
}

/* y[t] = W_i x[t] + bias for the n rows t that `row` names, or for the first n. x is (rows, W.cols), y is (rows,
 * W.rows). Like infer.cu it rounds x for the matrix, if reference_rounds is set, and decodes each row of W once for all
 * tokens. A second thread takes half of the rows of a large matrix. */
static void linear(const Linear *w, int i, const float *x, const int *row, int n, float *y) {
    float *in = allocate((size_t)n * (size_t)w->cols * sizeof *in);
    for (int t = 0; t < n; t++)
        for (int c = 0; c < w->cols; c++) {
            float value = x[(size_t)(row ? row[t] : t) * (size_t)w->cols + (size_t)c];
            in[(size_t)t * (size_t)w->cols + (size_t)c] = rounded_for(w->type, value);
        }
    const bool large = (size_t)w->rows * (size_t)w->cols * (size_t)n >= 1 << 18;
    const int middle = large ? w->rows / 2 : w->rows;
    Rows some = {w, i, 0, middle, in, row, n, y}, rest = {w, i, middle, w->rows, in, row, n, y};
    pthread_t other;
    const bool two = large && !pthread_create(&other, NULL, multiply, &rest);
    multiply(&some);
    if (two)
        pthread_join(other, NULL);
    else
        multiply(&rest);
    free(in);
}

/* Norms each head of q or k before RoPE; `weight` is NULL in models that do not. */
static void norm_heads(const Model *m, const float *weight, float *x, int heads) {
    for (int h = 0; h < heads && weight; h++, x += m->head_dim) rms_norm(x, weight, m->head_dim, m->eps, x);
}

/* RoPE: turns the last rope_dim of each head of `size` elements, in pairs (i, i + rope_dim / 2) or (2i, 2i + 1), by the
 * angle position * inv_freq[i]. */
static void rope(const Model *m, const Rope *how, float *x, int heads, int size, int position) {
    int half = m->rope_dim / 2, step = m->neighbours ? 2 : 1, other = m->neighbours ? 1 : half;
    for (int h = 0; h < heads; h++, x += size)
        for (int i = 0; i < half; i++) {
            float *pair = x + size - m->rope_dim + i * step;
            double angle = (double)position * (double)how->inv_freq[i], a = (double)pair[0], b = (double)pair[other];
            double c = cos(angle) * (double)how->scale, s = sin(angle) * (double)how->scale;
            pair[0] = (float)(a * c - b * s);
            pair[other] = (float)(b * c + a * s);
        }
}

/* The page of the cache that holds position p of sequence s. */
static Page *cache_page(const Reference *r, int s, int p) {
    return r->page + r->b->page[s * r->b->max_pages + p / PAGE];
}

/* The row of position p in a layer's part of a page; rows have `row` floats. */
static float *cache_row(float *part, int layer, int p, int row) {
    return part + ((size_t)layer * PAGE + (size_t)(p % PAGE)) * (size_t)row;
}

static void store(Reference *r, int layer, int t) {
    int p = r->position[t];
    Page *page = cache_page(r, r->seq[t], p);
    memcpy(cache_row(page->k, layer, p, r->k_row), r->k + (size_t)t * (size_t)r->k_row,
           (size_t)r->k_row * sizeof *r->k);
    memcpy(cache_row(page->v, layer, p, r->v_row), r->v + (size_t)t * (size_t)r->v_row,
           (size_t)r->v_row * sizeof *r->v);
}

static double capped(double x, float cap) { return cap > 0 ? (double)cap * tanh(x / (double)cap) : x; }

/* softmax(attn_scale q k) v over the positions that token t sees; a sink takes a share of the softmax and adds nothing.
 * Query heads share key/value heads in groups (Ainslie et al., "GQA", 2023). Latent attention: all heads share one key,
 * and its first part is the value. */
static void attention(Reference *r, int layer, int t) {
    const Model *m = r->m;
    const Layer *l = m->layer + layer;
    bool latent = m->kv_rank > 0;
    int size = latent ? r->k_row : m->head_dim, v_size = latent ? m->kv_rank : m->v_dim;
    int p = r->position[t], first = l->window && p >= l->window ? p - l->window + 1 : 0;
    double *score = allocate((size_t)(p - first + 1) * sizeof *score), *sum = allocate((size_t)v_size * sizeof *sum);
    for (int h = 0; h < m->n_heads; h++) {
        size_t at = (size_t)t * (size_t)m->n_heads + (size_t)h;
        const float *q = (latent ? r->query : r->q) + at * (size_t)size;
        float *out = (latent ? r->mean : r->attn) + at * (size_t)v_size;
        int head = h / (m->n_heads / m->n_kv_heads);
        double most = l->sinks ? (double)l->sinks[h] : -DBL_MAX, total = 0;
        for (int j = first; j <= p; j++) {
            const float *k = cache_row(cache_page(r, r->seq[t], j)->k, layer, j, r->k_row) + head * size;
            score[j - first] = capped(dot(q, k, size) * (double)m->attn_scale, m->attn_cap);
            most = fmax(most, score[j - first]);
        }
        if (l->sinks) total = exp((double)l->sinks[h] - most);
        memset(sum, 0, (size_t)v_size * sizeof *sum);
        for (int j = first; j <= p; j++) {
            const Page *page = cache_page(r, r->seq[t], j);
            const float *v = latent ? cache_row(page->k, layer, j, r->k_row)
                                    : cache_row(page->v, layer, j, r->v_row) + head * v_size;
            double share = exp(score[j - first] - most);
            total += share;
            for (int i = 0; i < v_size; i++) sum[i] += share * (double)v[i];
        }
        for (int i = 0; i < v_size; i++) out[i] = (float)(sum[i] / total);
    }
    free(score);
    free(sum);
}

/* Latent attention: multiplies the part of each query without RoPE by k_up transposed, so that it can be compared with
 * the latents. */
static void absorb(Reference *r, const Layer *l) {
    const Model *m = r->m;
    int rank = m->kv_rank, T = r->tokens, turned = m->rope_dim;
    float *row = allocate((size_t)l->k_up.cols * sizeof *row);
    double *sum = allocate((size_t)(T * rank) * sizeof *sum);
    for (int h = 0; h < m->n_heads; h++) {
        memset(sum, 0, (size_t)(T * rank) * sizeof *sum);
        for (int i = 0; i < l->k_up.rows; i++) {
            decode_row(&l->k_up, h, i, row);
            for (int t = 0; t < T; t++)
                for (int c = 0; c < l->k_up.cols; c++) {
                    float q = r->q[(t * m->n_heads + h) * m->head_dim + (m->k_up_transposed ? c : i)];
                    sum[t * rank + (m->k_up_transposed ? i : c)] +=
                        (double)rounded_for(l->k_up.type, q) * (double)row[c];
                }
        }
        for (int t = 0; t < T; t++) {
            float *query = r->query + (size_t)(t * m->n_heads + h) * (size_t)r->k_row;
            for (int c = 0; c < rank; c++) query[c] = (float)sum[t * rank + c];
            memcpy(query + rank, r->q + ((size_t)(t * m->n_heads + h) + 1) * (size_t)m->head_dim - turned,
                   (size_t)turned * sizeof *query);
            if (l->q.type != F32) round_row(query, r->k_row);
        }
    }
    free(row);
    free(sum);
}

/* Latent attention: turns each head's weighted sum of latents into its result, by v_up. */
static void expand(Reference *r, const Layer *l) {
    int heads = r->m->n_heads, *row = allocate((size_t)r->tokens * sizeof *row);
    for (int h = 0; h < heads; h++) {
        for (int t = 0; t < r->tokens; t++) row[t] = t * heads + h;
        linear(&l->v_up, h, r->mean, row, r->tokens, r->attn);
    }
    free(row);
}

/* Takes the largest of n that is not taken yet, ties to the lower number, and returns it. */
static int take_largest(const double *x, bool *taken, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    taken[best] = true;
    return best;
}

/* Keeps the experts of the best groups; the choice of all others becomes -inf. */
static void choose_groups(const Route *how, double *choice, int n) {
    int each = n / how->groups;
    double *best = allocate_zero((size_t)how->groups, sizeof *best);
    bool *taken = allocate_zero((size_t)n, sizeof *taken), *kept = allocate_zero((size_t)how->groups, sizeof *kept);
    for (int g = 0; g < how->groups; g++)
        for (int i = 0; i < how->group_best; i++)
            best[g] += choice[g * each + take_largest(choice + g * each, taken + g * each, each)];
    for (int i = 0; i < how->top_groups; i++) take_largest(best, kept, how->groups);
    for (int e = 0; e < n; e++)
        if (!kept[e / each]) choice[e] = -INFINITY;
    free(best);
    free(taken);
    free(kept);
}

/* The experts of one token in the order of choice, and their weights. Softmax keeps the order of the logits. */
static void route(const Model *m, const Layer *l, const float *logit, int *expert, float *weight) {
    const Route *how = &m->route;
    int n = m->n_experts;
    double *score = allocate((size_t)n * sizeof *score), *choice = allocate((size_t)n * sizeof *choice);
    bool *taken = allocate_zero((size_t)n, sizeof *taken);
    double most = -DBL_MAX, all = 0, chosen = 0;
    for (int e = 0; e < n; e++) most = fmax(most, (double)logit[e]);
    for (int e = 0; e < n; e++) {
        double z = (double)logit[e];
        score[e] = how->sigmoid ? 1 / (1 + exp(-z)) : exp(z - most);
        choice[e] = (how->sigmoid ? score[e] : z) + (l->choice_bias ? (double)l->choice_bias[e] : 0);
        all += score[e];
    }
    if (how->top_groups < how->groups) choose_groups(how, choice, n);
    for (int k = 0; k < m->top_k; k++) {
        expert[k] = take_largest(choice, taken, n);
        chosen += score[expert[k]];
    }
    double total = how->normalise ? chosen + 1e-20 : how->sigmoid ? 1 : all;
    for (int k = 0; k < m->top_k; k++) weight[k] = (float)(score[expert[k]] / total * (double)how->scale);
    free(score);
    free(choice);
    free(taken);
}

static float activation(const Model *m, float gate, float up) {
    double g = (double)gate, u = (double)up;
    if (m->act == GEGLU) return (float)(0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u);
    if (m->act == SWIGLU) return (float)(g / (1 + exp(-g)) * u);
    g = fmin(g, (double)m->act_limit);
    u = fmax(fmin(u, (double)m->act_limit), -(double)m->act_limit);
    return (float)(g / (1 + exp(-1.702 * g)) * (u + 1));
}

/* How many experts each token has in this layer; a dense layer counts as one expert. */
static int choices_of(const Model *m, const Layer *l) { return l->router.rows ? m->top_k : 1; }

/* The chosen experts. Each one's matrices are read once, for all tokens that chose it. */
static void experts(Reference *r, const Layer *l) {
    const Model *m = r->m;
    int top_k = choices_of(m, l), choices = r->tokens * top_k, *row = allocate((size_t)choices * sizeof *row);
    float *in = allocate((size_t)choices * (size_t)m->dim * sizeof *in);
    for (int c = 0; c < choices; c++)
        memcpy(in + (size_t)c * (size_t)m->dim, r->normed + (size_t)(c / top_k) * (size_t)m->dim,
               (size_t)m->dim * sizeof *in);
    for (int e = 0; e < l->gate.n; e++) {
        int n = 0;
        for (int c = 0; c < choices; c++)
            if (r->expert[c] == e) row[n++] = c;
        if (!n) continue;
        r->experts_read += l->router.rows > 0;
        linear(&l->gate, e, in, row, n, r->gate);
        linear(&l->up, e, in, row, n, r->up);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < l->gate.rows; j++) {
                size_t at = (size_t)row[i] * (size_t)l->gate.rows + (size_t)j;
                r->gate[at] = activation(m, r->gate[at], r->up[at]);
            }
        linear(&l->down, e, r->gate, row, n, r->down);
    }
    free(row);
    free(in);
}

static void shared_expert(Reference *r, const Layer *l) {
    size_t n = (size_t)r->tokens * (size_t)l->shared_gate.rows;
    if (!n) return;
    linear(&l->shared_gate, 0, r->normed, NULL, r->tokens, r->gate);
    linear(&l->shared_up, 0, r->normed, NULL, r->tokens, r->up);
    for (size_t i = 0; i < n; i++) r->gate[i] = activation(r->m, r->gate[i], r->up[i]);
    linear(&l->shared_down, 0, r->gate, NULL, r->tokens, r->shared);
}

/* normed[t] = sum over the choices of weight * down, in the order of choice, and the shared expert. */
static void combine(Reference *r, const Layer *l, int t) {
    int dim = r->m->dim, top_k = choices_of(r->m, l);
    for (int i = 0; i < dim; i++) {
        size_t at = (size_t)t * (size_t)dim + (size_t)i;
        double sum = 0;
        for (int k = t * top_k; k < (t + 1) * top_k; k++)
            sum += (double)r->weight[k] * (double)r->down[(size_t)k * (size_t)dim + (size_t)i];
        if (l->shared_gate.rows) sum += (double)r->shared[at];
        r->normed[at] = (float)sum;
    }
}

/* x += the result of attention or experts, which Gemma norms first. */
static void add_to_residual(Reference *r, const float *post_norm) {
    const Model *m = r->m;
    for (int t = 0; t < r->tokens; t++) {
        float *x = r->x + (size_t)t * (size_t)m->dim, *given = r->normed + (size_t)t * (size_t)m->dim;
        if (post_norm) rms_norm(given, post_norm, m->dim, m->eps, given);
        for (int i = 0; i < m->dim; i++) x[i] += given[i];
    }
}

static void tap(const Reference *r, const char *stage, int layer, const float *values, int rows, int cols) {
    if (r->limits.tap) r->limits.tap(r->limits.tap_data, stage, layer, values, rows, cols);
}

/* q, k and v of all tokens, before RoPE. */
static void make_qkv(Reference *r, const Layer *l) {
    const Model *m = r->m;
    int T = r->tokens;
    if (l->q_a.rows) {
        linear(&l->q_a, 0, r->normed, NULL, T, r->q_low);
        for (int t = 0; t < T; t++) {
            float *low = r->q_low + (size_t)t * (size_t)l->q_a.rows;
            rms_norm(low, l->q_a_norm, l->q_a.rows, m->eps, low);
        }
    }
    linear(&l->q, 0, l->q_a.rows ? r->q_low : r->normed, NULL, T, r->q);
    if (m->kv_rank) {
        linear(&l->kv_a, 0, r->normed, NULL, T, r->k);
        for (int t = 0; t < T; t++) {
            float *latent = r->k + (size_t)t * (size_t)r->k_row;
            rms_norm(latent, l->kv_a_norm, m->kv_rank, m->eps, latent);
        }
        return;
    }
    linear(&l->k, 0, r->normed, NULL, T, r->k);
    linear(&l->v, 0, r->normed, NULL, T, r->v);
    for (int t = 0; t < T; t++) {
        norm_heads(m, l->q_norm, r->q + (size_t)t * (size_t)(m->n_heads * m->head_dim), m->n_heads);
        norm_heads(m, l->k_norm, r->k + (size_t)t * (size_t)r->k_row, m->n_kv_heads);
    }
}

static void attention_block(Reference *r, int layer) {
    const Model *m = r->m;
    const Layer *l = m->layer + layer;
    int T = r->tokens, q_row = m->n_heads * m->head_dim;
    make_qkv(r, l);
    for (int t = 0; t < T; t++) {
        float *q = r->q + (size_t)t * (size_t)q_row, *k = r->k + (size_t)t * (size_t)r->k_row;
        rope(m, l->rope, q, m->n_heads, m->head_dim, r->position[t]);
        rope(m, l->rope, k, m->n_kv_heads, r->k_row / m->n_kv_heads, r->position[t]);
        round_row(k, r->k_row);
        round_row(r->v + (size_t)t * (size_t)r->v_row, r->v_row);
        if (l->q.type != F32) round_row(q, q_row);
        store(r, layer, t);
    }
    tap(r, "q", layer, r->q, T, q_row);
    tap(r, "k", layer, r->k, T, r->k_row);
    if (r->v_row) tap(r, "v", layer, r->v, T, r->v_row);
    if (m->kv_rank) absorb(r, l);
    for (int t = 0; t < T; t++) attention(r, layer, t);
    if (m->kv_rank) expand(r, l);
    tap(r, "attn", layer, r->attn, T, m->n_heads * m->v_dim);
    linear(&l->o, 0, r->attn, NULL, T, r->normed);
}

/* The router: which experts each token uses, and their weights. */
static void choose_experts(Reference *r, int layer) {
    const Model *m = r->m;
    const Layer *l = m->layer + layer;
    int T = r->tokens, choices = T * m->top_k;
    if (!l->router.rows) {
        for (int t = 0; t < T; t++) r->expert[t] = 0, r->weight[t] = 1;
        return;
    }
    linear(&l->router, 0, r->normed, NULL, T, r->router);
    for (int t = 0; t < T; t++)
        route(m, l, r->router + (size_t)t * (size_t)m->n_experts, r->expert + t * m->top_k, r->weight + t * m->top_k);
    float *ids = allocate((size_t)choices * sizeof *ids);
    for (int i = 0; i < choices; i++) ids[i] = (float)r->expert[i];
    tap(r, "experts", layer, ids, T, m->top_k);
    tap(r, "weights", layer, r->weight, T, m->top_k);
    free(ids);
}

static void norm_tokens(Reference *r, const float *weight) {
    size_t dim = (size_t)r->m->dim;
    for (size_t t = 0; t < (size_t)r->tokens; t++)
        rms_norm(r->x + t * dim, weight, r->m->dim, r->m->eps, r->normed + t * dim);
}

static void block(Reference *r, int layer) {
    const Layer *l = r->m->layer + layer;
    norm_tokens(r, l->attn_norm);
    attention_block(r, layer);
    add_to_residual(r, l->attn_post_norm);
    tap(r, "attn_residual", layer, r->x, r->tokens, r->m->dim);
    norm_tokens(r, l->ffn_norm);
    choose_experts(r, layer);
    experts(r, l);
    tap(r, "act", layer, r->gate, r->tokens * choices_of(r->m, l), l->gate.rows);
    shared_expert(r, l);
    for (int t = 0; t < r->tokens; t++) combine(r, l, t);
    add_to_residual(r, l->ffn_post_norm);
    tap(r, "residual", layer, r->x, r->tokens, r->m->dim);
}

/* ---- from logits to a token ---- */

void adjust(float *logit, int vocab, const Sampling *how, const int *text, int n, const uint32_t *allowed) {
    uint32_t *count = allocate_zero((size_t)vocab, sizeof *count);
    bool *seen = allocate_zero((size_t)vocab, sizeof *seen);
    for (int i = 0; i < how->biases; i++) logit[how->bias[i].id] += how->bias[i].add;
    for (int p = 0; p < n; p++) seen[text[p]] = true, count[text[p]] += p >= how->answer;
    for (int id = 0; id < vocab; id++)
        if (seen[id]) logit[id] = penalized(logit[id], how, count[id]);
    for (int id = 0; allowed && id < vocab; id++)
        if (!(allowed[id / 32] >> id % 32 & 1)) logit[id] = -INFINITY;
    free(count);
    free(seen);
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The smallest scaled logit that top-k, top-p and min-p keep. x is (n) and stays unchanged. */
static float filter(const float *x, int n, const Sampling *s) {
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

int draw(float *logit, int vocab, const Sampling *s, int position) {
    for (int i = 0; i < vocab; i++) {
        if (isnan(logit[i])) return DREW_NAN;
        logit[i] = scaled(logit[i], s->temperature);
    }
    bool filtered = s->temperature > 0 && (s->top_k > 0 || s->top_p < 1 || s->min_p > 0);
    float floor = filtered ? filter(logit, vocab, s) : -INFINITY;
    uint64_t best = 0;
    for (int i = 0; i < vocab; i++) {
        if (!(logit[i] >= floor)) continue;
        uint64_t key = draw_key(s->temperature > 0 ? logit[i] + token_noise(s->seed, position, i) : logit[i], i);
        if (key > best) best = key;
    }
    return draw_id(best);
}

/* Waits for the tokens that a slot may draw. */
static bool wait_for(const uint64_t *ready, uint64_t number, Error *e) {
    for (int ms = 0; __atomic_load_n(ready, __ATOMIC_ACQUIRE) < number; ms++, usleep(1000))
        if (ms == 1000) return fail(e, GPU_FAULT, "a draw waited a second for the tokens that it may draw");
    return true;
}

/* Draws a token for sequence s of the batch from the logits of its last token. */
static bool sample(Reference *r, int s, const float *logits, int *token, Error *e) {
    const Sampling *how = r->b->sampling + s;
    const uint32_t *bits = NULL;
    int vocab = r->m->vocab, length = r->b->start[s] + r->b->first[s + 1] - r->b->first[s];
    if (how->allowed) {
        const Allowed *from = r->limits.allowed;
        if (!wait_for(from->ready + r->b->slot[s], how->allowed, e)) return false;
        bits = from->bits + (size_t)r->b->slot[s] * (size_t)divided(vocab, 32);
    }
    float *copy = allocate((size_t)vocab * sizeof *copy);
    int *text = allocate((size_t)length * sizeof *text);
    for (int p = 0; p < length; p++) text[p] = cache_page(r, s, p)->token[p % PAGE];
    memcpy(copy, logits, (size_t)vocab * sizeof *copy);
    adjust(copy, vocab, how, text, length, bits);
    *token = draw(copy, vocab, how, length);
    free(copy);
    free(text);
    return true;
}

/* The requested logits, and the draws. */
static bool head(Reference *r, Step *step, Error *e) {
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
    for (size_t i = 0; i < (size_t)n * (size_t)m->vocab; i++)
        logits[i] = (float)capped((double)logits[i], m->logit_cap);
    tap(r, "logits", m->n_layers, logits, n, m->vocab);
    step->token = allocate((size_t)b->seqs * sizeof *step->token);
    step->logits = logits;
    step->rows = 0;
    bool ok = true;
    for (int s = 0, i = 0; ok && s < b->seqs; s++) {
        int rows = b->want[s] == WANT_NOTHING ? 0 : b->want[s] == WANT_ALL_LOGITS ? b->first[s + 1] - b->first[s] : 1;
        const float *last = logits + (size_t)(i + rows - 1) * (size_t)m->vocab;
        step->token[s] = DREW_NOTHING;
        ok = !rows || sample(r, s, last, step->token + s, e);
        if (rows) r->drawn[b->slot[s]] = step->token[s];
        if (b->want[s] == WANT_LOGITS || b->want[s] == WANT_ALL_LOGITS) { /* keep the requested ones */
            memmove(logits + (size_t)step->rows * (size_t)m->vocab, logits + (size_t)i * (size_t)m->vocab,
                    (size_t)rows * (size_t)m->vocab * sizeof *logits);
            step->rows += rows;
        }
        i += rows;
    }
    free(row);
    free(in);
    return ok;
}

/* ---- the border ---- */

static bool forward(Reference *r, Step *step, Error *e) {
    const Model *m = r->m;
    const Batch *b = r->b = &step->b;
    r->tokens = b->first[b->seqs];
    size_t rows = (size_t)m->n_layers * PAGE;
    for (int s = 0; s < b->seqs; s++) {
        int end = b->start[s] + b->first[s + 1] - b->first[s];
        for (int p = 0; p < end; p += PAGE) {
            Page *page = cache_page(r, s, p);
            if (page->k) continue;
            page->k = allocate_zero(rows * (size_t)r->k_row, sizeof *page->k);
            page->v = allocate_zero(rows * (size_t)r->v_row, sizeof *page->v);
        }
        for (int t = b->first[s]; t < b->first[s + 1]; t++) {
            int p = b->start[s] + t - b->first[s];
            Page *page = cache_page(r, s, p);
            r->seq[t] = s;
            r->position[t] = p;
            r->id[t] = b->token[t] < 0 ? r->drawn[b->slot[s]] : b->token[t];
            if (r->id[t] < 0) r->id[t] = 0; /* after a NaN the step does not count */
            page->token[p % PAGE] = r->id[t];
            float *x = r->x + (size_t)t * (size_t)m->dim;
            decode_row(&m->embed, 0, r->id[t], x);
            for (int i = 0; i < m->dim; i++) x[i] *= m->embed_scale;
        }
    }
    for (int i = 0; i < m->n_layers; i++) block(r, i);
    return head(r, step, e);
}

/* As its file encodes them; a tied embedding and head count once. */
static uint64_t weight_bytes(const Model *m) {
    uint64_t sum = linear_bytes(&m->embed) + (m->head.each == m->embed.each ? 0 : linear_bytes(&m->head));
    for (int i = 0; i < m->n_layers; i++) {
        const Linear *all[] = LINEARS(m->layer + i);
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) sum += linear_bytes(all[j]);
    }
    return sum;
}

/* Reads every weight once, so that loading happens here, with progress. */
static void read_weights(const Model *m, void (*progress)(uint64_t, uint64_t)) {
    uint64_t done = 0, total = weight_bytes(m);
    const int n_ends = m->head.each == m->embed.each ? 1 : 2;
    for (int i = 0; i <= m->n_layers; i++) {
        const Layer *l = m->layer + i;
        const Linear *of_layer[] = LINEARS(l), *ends[] = {&m->embed, &m->head};
        for (int j = 0; j < (i < m->n_layers ? (int)(sizeof of_layer / sizeof *of_layer) : n_ends); j++) {
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
    Reference *r = allocate_zero(1, sizeof *r);
    size_t T = (size_t)limits->max_tokens, choices = T * (size_t)m->top_k;
    bool latent = m->kv_rank > 0;
    int q_rank = 0;
    for (int i = 0; i < m->n_layers; i++)
        if (m->layer[i].q_a.rows > q_rank) q_rank = m->layer[i].q_a.rows;
    *r = (Reference){.m = m, .limits = *limits, .pages = *pages};
    r->k_row = latent ? m->kv_rank + m->rope_dim : m->n_kv_heads * m->head_dim;
    r->v_row = latent ? 0 : m->n_kv_heads * m->v_dim;
    r->page = allocate_zero((size_t)*pages, sizeof *r->page); /* memory is used once they are written */
    r->drawn = allocate_zero((size_t)limits->max_seqs, sizeof *r->drawn);
    if (limits->allowed) {
        size_t slots = (size_t)limits->max_seqs, words = (size_t)divided(m->vocab, 32);
        *limits->allowed = (Allowed){allocate_zero(slots, sizeof(uint64_t)), allocate_zero(slots * words, 4)};
    }
    r->seq = allocate(T * sizeof *r->seq);
    r->position = allocate(T * sizeof *r->position);
    r->id = allocate(T * sizeof *r->id);
    r->x = allocate(T * (size_t)m->dim * sizeof *r->x);
    r->normed = allocate(T * (size_t)m->dim * sizeof *r->normed);
    r->q = allocate(T * (size_t)(m->n_heads * m->head_dim) * sizeof *r->q);
    r->k = allocate(T * (size_t)r->k_row * sizeof *r->k);
    r->v = allocate(T * (size_t)r->v_row * sizeof *r->v);
    r->attn = allocate(T * (size_t)(m->n_heads * m->v_dim) * sizeof *r->attn);
    r->q_low = allocate(T * (size_t)q_rank * sizeof *r->q_low);
    r->query = allocate(T * (size_t)(latent ? m->n_heads * r->k_row : 0) * sizeof *r->query);
    r->mean = allocate(T * (size_t)(m->n_heads * m->kv_rank) * sizeof *r->mean);
    r->router = allocate(T * (size_t)m->n_experts * sizeof *r->router);
    r->expert = allocate(choices * sizeof *r->expert);
    r->weight = allocate(choices * sizeof *r->weight);
    r->gate = allocate(choices * (size_t)m->ffn_dim * sizeof *r->gate);
    r->up = allocate(choices * (size_t)m->ffn_dim * sizeof *r->up);
    r->down = allocate(choices * (size_t)m->dim * sizeof *r->down);
    r->shared = allocate(T * (size_t)m->dim * sizeof *r->shared);
    if (limits->progress) read_weights(m, limits->progress);
    return r;
}

static void *copy_of(const void *from, int n, size_t size) {
    void *to = allocate((size_t)n * size);
    return n ? memcpy(to, from, (size_t)n * size) : to;
}

/* A draw may wait for what the caller stores after submit has returned. So a step is computed when it is collected, or
 * when the next is submitted; with a tap at once, as on the card. */
static bool reference_submit(void *state, const Batch *b, Error *e) {
    Reference *r = state;
    if (r->outstanding == 2) return fail(e, FAILED, "submit: two steps are outstanding; collect one");
    if (r->outstanding && !r->step[1].token && !forward(r, r->step + 1, e)) return false;
    Sampling *how = copy_of(b->sampling, b->seqs, sizeof *how);
    for (int s = 0; s < b->seqs; s++) how[s].bias = copy_of(how[s].bias, how[s].biases, sizeof *how->bias);
    r->step[1 + r->outstanding++].b = (Batch){b->seqs,
                                              b->max_pages,
                                              copy_of(b->slot, b->seqs, sizeof *b->slot),
                                              copy_of(b->first, b->seqs + 1, sizeof *b->first),
                                              copy_of(b->token, b->first[b->seqs], sizeof *b->token),
                                              copy_of(b->start, b->seqs, sizeof *b->start),
                                              copy_of(b->page, b->seqs * b->max_pages, sizeof *b->page),
                                              how,
                                              copy_of(b->want, b->seqs, sizeof *b->want)};
    return !r->limits.tap || forward(r, r->step + r->outstanding, e);
}

static void step_free(Step *step) {
    const Batch *b = &step->b;
    for (int s = 0; s < b->seqs; s++) free((void *)b->sampling[s].bias);
    const void *owned[] = {b->slot,     b->first, b->token,    b->start,    b->page,
                           b->sampling, b->want,  step->token, step->logits};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free((void *)owned[i]);
    *step = (Step){0};
}

static bool reference_collect(void *state, Result *result, Error *e) {
    Reference *r = state;
    if (!r->outstanding) return fail(e, FAILED, "collect: no step is outstanding");
    if (!r->step[1].token && !forward(r, r->step + 1, e)) return false;
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
    if (r->limits.allowed) free(r->limits.allowed->ready), free(r->limits.allowed->bits);
    void *owned[] = {r->page,   r->drawn,  r->seq,    r->position, r->id,    r->x,     r->normed,
                     r->q,      r->k,      r->v,      r->attn,     r->q_low, r->query, r->mean,
                     r->router, r->expert, r->weight, r->gate,     r->up,    r->down,  r->shared};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    free(r);
}

static void reference_describe(Devices *d) { *d = (Devices){.problem = "infer-reference computes without one"}; }

static double reference_flat_read(void *state, uint64_t bytes) {
    (void)state, (void)bytes;
    return 0; /* it is not made for speed */
}

static uint64_t reference_experts_read(void *state) { return ((Reference *)state)->experts_read; }

const Backend reference = {"reference",         2048,
                           reference_open,      reference_submit,
                           reference_collect,   reference_close,
                           reference_flat_read, reference_experts_read,
                           weight_bytes,        reference_describe};
