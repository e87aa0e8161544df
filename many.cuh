/* many.cuh: the kernels of a step with many tokens, where they differ from those of few.cuh: tiles on tensor cores. Dense
 * products are cuBLAS's (multiply in infer.cu); attention and experts are here for cards before Hopper, for Hopper in hopper.cuh.
 *
 * Of a step of 8,192 tokens of gpt-oss-20b on an H200 the experts take 58 %, attention 19, cuBLAS 15, combine 4, rope_many 2, route_many 2, the rest less than
 * 1 (each kernel alone: notebooks/speed.md). */
#ifndef MANY_CUH
#define MANY_CUH

#include "hopper.cuh"

/* RMSNorm(x) * weight. A block a token. */
template <typename Out> __global__ void __launch_bounds__(256) norm_many(Work w, const float *weight) {
    __shared__ float scratch[33];
    wait_previous();
    launch_next();
    float *x = w.x + (size_t)blockIdx.x * w.dim, sum = 0;
    Out *out = (Out *)w.normed + (size_t)blockIdx.x * w.normed_pitch;
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) sum += x[i] * x[i];
    float scale = rsqrtf(block_sum(sum, scratch, blockDim.x) / w.dim + w.eps);
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) out[i] = (Out)(x[i] * scale * weight[i]);
}

/* RoPE of what cuBLAS made of query, key and value, (tokens, rows), and their way to q and the cache. A block takes a tile of
 * tokens (blockIdx.x) and 2 rows a thread (blockIdx.y: which). Values lie by dimension: of eight tokens they go there at once. */
template <typename Q> __global__ void __launch_bounds__(256) rope_many(Work w, Step s, Block l) {
    wait_previous();
    launch_next();
    int token = s.tile[2 * blockIdx.x], n = s.tile[2 * blockIdx.x + 1], position = s.position[token], d = w.head_dim,
        r = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    int heads = w.n_heads * d, keys = heads + w.n_kv_heads * d, seq = s.seq[token];
    const float *from = w.qkv + (size_t)token * l.qkv.rows + r;
    if (r >= l.qkv.rows) return;
    if (r < keys) {
        const float2 *turn = w.turn + (size_t)position * (d / 2) + r % d / 2;
#pragma unroll 4
        for (int t = 0; t < n; t++) {
            float2 v = *(const float2 *)(from + (size_t)t * l.qkv.rows), by = turn[(size_t)t * (d / 2)];
            float a = v.x * by.x - v.y * by.y, b = v.y * by.x + v.x * by.y;
            if (r < heads) {
                Q *q = (Q *)w.q + (size_t)(token + t) * heads + r;
                q[0] = (Q)a, q[1] = (Q)b;
            } else {
                *(uint32_t *)(cache_of(w, page_of(s, seq, position + t), 0, (r - heads) / d) + key_place(d, position + t, r % d)) = pack(a, b);
            }
        }
        return;
    }
    for (int t = 0, many; t < n; t += many) {
        int p = position + t;
        bf16 *to = cache_of(w, page_of(s, seq, p), 1, (r - keys) / d) + value_place(d, p, r % d);
        many = p % 8 == 0 && t + 8 <= n ? 8 : 1;
        if (many == 8) {
            float2 v[8];
            for (int i = 0; i < 8; i++) v[i] = *(const float2 *)(from + (size_t)(t + i) * l.qkv.rows);
            *(uint4 *)to = make_uint4(pack(v[0].x, v[1].x), pack(v[2].x, v[3].x), pack(v[4].x, v[5].x), pack(v[6].x, v[7].x));
            *(uint4 *)(to + SLAB_KEYS) = make_uint4(pack(v[0].y, v[1].y), pack(v[2].y, v[3].y), pack(v[4].y, v[5].y), pack(v[6].y, v[7].y));
        } else {
            to[0] = (bf16)from[(size_t)t * l.qkv.rows];
            to[SLAB_KEYS] = (bf16)from[(size_t)t * l.qkv.rows + 1];
        }
    }
}

/* A warp's state of softmax(q k / sqrt(d)) v for 16 tokens of one query head, rows g and g + 8 in lane 4g + t, after the keys seen so far
 * (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023). */
template <int D> struct Attend {
    float most[2], total[2] = {};
    float sum[D / 8][4] = {}; /* dimensions 8i + 2t, + 1 of either row */

    __device__ Attend() {
        for (float &m : most) m = -INFINITY;
    }

    /* One page of 64 keys whose first has position `base`. Row r sees positions first[r] to last[r], no row any behind `end`. Column n of the j-th
     * tile of 8 keys is key 32 (j / 4) + 8 (n / 2) + 2 (j % 4) + n % 2, so that a lane's shares belong to eight neighbouring
     * keys of either half page and meet the values, which lie by dimension, without moving. */
    __device__ void page(const bf16 *keys, const bf16 *values, const uint4 (&q)[D / 32][2], int base, const int (&first)[2], const int (&last)[2],
                         int end, float scale, int lane) {
        int g = lane / 4, t = lane % 4;
        float score[8][4] = {};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int key = j / 4 * 32 + g / 2 * 8 + j % 4 * 2 + g % 2;
#pragma unroll
            for (int c = 0; c < D / 32; c++) mma_eight(score[j], q[c][0], q[c][1], *(const uint4 *)(keys + key_place(D, key, c * 32 + t * 8)));
        }
        float now[2] = {most[0], most[1]}, factor[2];
#pragma unroll
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < 4; i++) {
                int p = base + j / 4 * 32 + t * 8 + j % 4 * 2 + i % 2;
                bool sees = p >= first[i / 2] && p <= last[i / 2];
                score[j][i] = sees ? score[j][i] * scale : -INFINITY;
                now[i / 2] = fmaxf(now[i / 2], score[j][i]);
            }
        for (int r = 0; r < 2; r++) {
            now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
            now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
            if (now[r] == -INFINITY) now[r] = 0; /* nothing seen yet */
            factor[r] = exp2f(most[r] - now[r]);
            most[r] = now[r];
            total[r] *= factor[r];
        }
        for (int i = 0; i < D / 8; i++)
            for (int j = 0; j < 4; j++) sum[i][j] *= factor[j / 2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 share, share8; /* as mma wants rows: eight neighbouring keys */
            uint32_t *low = &share.x, *high = &share8.x;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float *s = score[half * 4 + j];
                for (int i = 0; i < 4; i++) {
                    s[i] = exp2f(s[i] - most[i / 2]);
                    total[i / 2] += s[i];
                }
                low[j] = pack(s[0], s[1]);
                high[j] = pack(s[2], s[3]);
            }
            uint32_t keep[4]; /* what lies behind the end may be a NaN, and 0 times that is one */
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int key = base + half * 32 + t * 8 + 2 * j;
                keep[j] = key < end ? ~0u : key == end ? 0xFFFF : 0;
            }
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                uint4 v = *(const uint4 *)(values + value_place(D, half * 32 + t * 8, i * 8 + g));
                v.x &= keep[0], v.y &= keep[1], v.z &= keep[2], v.w &= keep[3];
                mma_eight(sum[i], share, share8, v);
            }
        }
    }
};

/* Attention of up to 16 neighbouring tokens (blockIdx.x: a tile) and the query heads that share a key/value head
 * (blockIdx.y), a warp for each of them. */
template <int D> __global__ void __launch_bounds__(256) attention_many(Work w, Step s, Block l) {
    wait_previous();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, group = w.n_heads / w.n_kv_heads, h = blockIdx.y * group + warp;
    int token = s.tile[2 * blockIdx.x], n = s.tile[2 * blockIdx.x + 1], seq = s.seq[token], position = s.position[token];
    Attend<D> a;
    uint4 q[D / 32][2];
    int first[2], last[2];
    for (int r = 0; r < 2; r++) {
        int row = g + 8 * r, p = position + row;
        bool real = row < n;
        for (int c = 0; c < D / 32; c++)
            q[c][r] = real ? *(const uint4 *)((const bf16 *)w.q + ((size_t)(token + row) * w.n_heads + h) * D + c * 32 + lane % 4 * 8) : make_uint4(0, 0, 0, 0);
        first[r] = l.window && p >= l.window ? p - l.window + 1 : 0;
        last[r] = real ? p : position;
    }
    int begin = l.window && position >= l.window ? position - l.window + 1 : 0;
    int end = position + n - 1;
    for (int i = begin / PAGE; i <= end / PAGE; i++) {
        int page = s.page[(size_t)seq * s.header[0] + i];
        a.page(cache_of(w, page, 0, blockIdx.y), cache_of(w, page, 1, blockIdx.y), q, i * PAGE, first, last, end, LOG2E * rsqrtf(D), lane);
    }
    float sink = l.sinks ? l.sinks[h] * LOG2E : -INFINITY;
    for (int r = 0; r < 2; r++) {
        float total = a.total[r] + __shfl_xor_sync(~0u, a.total[r], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        float most = fmaxf(a.most[r], sink), factor = exp2f(a.most[r] - most);
        total = total * factor + (l.sinks ? exp2f(sink - most) : 0);
        if (g + 8 * r >= n) continue;
        bf16 *out = (bf16 *)w.attn + (size_t)(token + g + 8 * r) * w.attn_pitch + h * D + lane % 4 * 2;
        for (int i = 0; i < D / 8; i++) *(uint32_t *)(out + i * 8) = pack(a.sum[i][2 * r] * factor / total, a.sum[i][2 * r + 1] * factor / total);
    }
}

/* What a block of route_many needs for N tokens. */
template <typename A, int N> struct RouteShape {
    static constexpr int TOKENS = N, WARPS = 16;
    static __host__ __device__ int pitch(int dim) {
        return dim + (dim * sizeof(A) % 128 ? 0 : 64 / sizeof(A));
    } /* neighbouring rows begin half the banks apart */
    static int shared(int dim, int experts) { return TOKENS * (pitch(dim) * (int)sizeof(A) + (experts + WARPS * 32) * (int)sizeof(float)); }
};

/* RMSNorm(x) * weight as the experts want it, the router's logits and each token's choices. A block takes TOKENS tokens, on tensor cores 16, or 8 where it has
 * too little memory; its warps share the columns of the product with the router. */
template <typename A, int TOKENS> __global__ void __launch_bounds__(RouteShape<A, TOKENS>::WARPS * 32) route_many(Work w, Block l, int tokens) {
    typedef RouteShape<A, TOKENS> Shape;
    extern __shared__ __align__(16) uint8_t route_memory[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * TOKENS, pitch = Shape::pitch(w.dim);
    A *rows = (A *)route_memory;
    float *logit = (float *)(rows + TOKENS * pitch), *partial = logit + TOKENS * w.n_experts; /* (WARPS, TOKENS, 32) */
    wait_previous();
    launch_next();
    for (int i = warp; i < TOKENS && first + i < tokens; i += Shape::WARPS) {
        const float2 *x = (const float2 *)(w.x + (size_t)(first + i) * w.dim);
        bf16 *out = (bf16 *)w.normed + (size_t)(first + i) * w.normed_pitch;
        constexpr int MANY = 12; /* loads on the way */
        const float2 *norm = (const float2 *)l.ffn_norm, zero = make_float2(0, 0);
        float2 v[MANY], by[MANY];
        float sum = 0;
        for (int base = lane; base < w.dim / 2; base += MANY * 32) {
#pragma unroll
            for (int k = 0; k < MANY; k++) v[k] = base + k * 32 < w.dim / 2 ? x[base + k * 32] : zero;
#pragma unroll
            for (int k = 0; k < MANY; k++) sum += v[k].x * v[k].x + v[k].y * v[k].y;
        }
        float scale = rsqrtf(warp_sum(sum) / w.dim + w.eps);
        for (int base = lane; base < w.dim / 2; base += MANY * 32) {
#pragma unroll
            for (int k = 0; k < MANY; k++) {
                bool real = base + k * 32 < w.dim / 2;
                v[k] = real ? x[base + k * 32] : zero, by[k] = real ? norm[base + k * 32] : zero;
            }
#pragma unroll
            for (int k = 0; k < MANY; k++) {
                int c = 2 * (base + k * 32);
                float a = v[k].x * scale * by[k].x, b = v[k].y * scale * by[k].y;
                if (c < w.dim) rows[i * pitch + c] = (A)a, rows[i * pitch + c + 1] = (A)b, *(uint32_t *)(out + (WGMMA ? fp4_column(c) : c)) = pack(a, b);
            }
        }
    }
    __syncthreads();
    for (int base = 0; base < w.n_experts; base += 32) {
        int experts = min(32, w.n_experts - base);
        if constexpr (sizeof(A) == 2) {
            int g = lane / 4, t = lane % 4;
            float sum[4][4] = {};
            const bf16 *router = (const bf16 *)l.router.data + (size_t)(base + g) * l.router.stride;
            for (int first = warp * 32 + t * 8; first < w.dim; first += 3 * Shape::WARPS * 32) {
                uint4 weight[3][4];
#pragma unroll
                for (int k = 0; k < 3; k++)
                    for (int i = 0; i < 4; i++) {
                        int c = first + k * Shape::WARPS * 32;
                        weight[k][i] = i * 8 < experts && c < w.dim ? *(const uint4 *)(router + (size_t)i * 8 * l.router.stride + c) : make_uint4(0, 0, 0, 0);
                    }
#pragma unroll
                for (int k = 0; k < 3; k++) {
                    int c = first + k * Shape::WARPS * 32;
                    if (c >= w.dim) break;
                    uint4 low = *(const uint4 *)(rows + g * pitch + c), high = low;
                    if (TOKENS > 8) high = *(const uint4 *)(rows + (g + 8) * pitch + c);
                    for (int i = 0; i < 4; i++) mma_eight(sum[i], low, high, weight[k][i]);
                }
            }
            for (int i = 0; i < 16; i++) {
                int row = g + i / 2 % 2 * 8;
                if (row < TOKENS) partial[(warp * TOKENS + row) * 32 + i / 4 * 8 + 2 * t + i % 2] = sum[i / 4][i % 4];
            }
        } else {
            for (int i = warp; i < experts * TOKENS; i += Shape::WARPS) {
                const float *weight = (const float *)l.router.data + (size_t)(base + i % experts) * l.router.stride;
                float sum = 0;
                for (int c = lane; c < w.dim; c += 32) sum += (float)rows[i / experts * pitch + c] * weight[c];
                sum = warp_sum(sum);
                for (int k = lane; k < Shape::WARPS; k += 32) partial[(k * TOKENS + i / experts) * 32 + i % experts] = k ? 0 : sum;
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TOKENS * experts; i += blockDim.x) {
            int token = i / experts, e = i % experts;
            float sum = l.router.bias ? l.router.bias[base + e] : 0;
            for (int k = 0; k < Shape::WARPS; k++) sum += partial[(k * TOKENS + token) * 32 + e];
            logit[token * w.n_experts + base + e] = sum;
        }
        __syncthreads();
    }
    for (int i = warp; i < TOKENS && first + i < tokens; i += Shape::WARPS) {
        size_t at = (size_t)(first + i) * w.top_k;
        route(logit + i * w.n_experts, w.n_experts, w.top_k, lane, w.expert + at, w.weight + at, [](int) {});
        weigh(w.weight + at, w.top_k, lane);
    }
}

/* The choices that fell on an expert (blockIdx.x), in ascending order: list (n_experts, tokens). */
__global__ void __launch_bounds__(1024) list_choices(Work w, int tokens) {
    constexpr int EACH = 8; /* neighbours that a thread looks at */
    __shared__ int counts[32];
    wait_previous();
    launch_next();
    int e = blockIdx.x, n = 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32, choices = tokens * w.top_k;
    for (int base = 0; base < choices; base += blockDim.x * EACH) {
        int first = base + threadIdx.x * EACH, mine = 0;
        for (int k = 0; k < EACH; k++) mine |= (first + k < choices && w.expert[first + k] == e) << k;
        int upto = __popc(mine);
        for (int o = 1; o < 32; o *= 2) {
            int before = __shfl_up_sync(~0u, upto, o);
            if (lane >= o) upto += before;
        }
        if (lane == 31) counts[warp] = upto;
        __syncthreads();
        int at = n + upto - __popc(mine);
        for (int k = 0; k < (int)blockDim.x / 32; k++) {
            if (k < warp) at += counts[k];
            n += counts[k];
        }
        for (int k = 0; k < EACH; k++)
            if (mine >> k & 1) w.list[(size_t)e * tokens + at++] = first + k;
        __syncthreads();
    }
    if (threadIdx.x == 0) w.listed[e] = n;
    if (threadIdx.x == 0 && n) atomicAdd(w.experts_read, 1);
}

/* One product for all experts: the rows of x that chose an expert times its matrix. A block takes 128 choices of one expert
 * (blockIdx.y counts over all experts' tiles) and 128 rows of the matrix, a group a warp; x passes through shared memory
 * in steps of 64 columns. done(choice, row, a, b) receives two neighbouring rows of the result. `divide`: x has a row for
 * every `divide` choices. */
template <class Done> __device__ void multiply_experts(const Work &w, const Matrix &m, const bf16 *x, int x_pitch, int divide, int tokens, Done done) {
    constexpr int TALL = 128, STEPS = 3, K = FP4_COLUMNS;
    extern __shared__ __align__(128) uint8_t memory[];
    bf16 *stage = (bf16 *)memory; /* (STEPS, TALL, K); of odd rows neighbouring eights are exchanged, so that no banks collide */
    wait_previous();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, e = 0, tile = blockIdx.y;
    for (; e < w.n_experts && tile >= (w.listed[e] + TALL - 1) / TALL; e++) tile -= (w.listed[e] + TALL - 1) / TALL;
    if (e == w.n_experts) return;
    const int *list = w.list + (size_t)e * tokens + tile * TALL;
    int n = min(TALL, w.listed[e] - tile * TALL), steps = m.stride / K, groups = (m.rows + FP4_ROWS - 1) / FP4_ROWS, group = blockIdx.x * 8 + warp;
    const uint8_t *weights = m.data + (size_t)e * m.bytes;
    auto copy = [&](int step) {
        for (int i = threadIdx.x; i < n * (K / 8) && step < steps; i += blockDim.x) {
            int row = i / (K / 8), c = i % (K / 8);
            copy_16(stage + (step % STEPS * TALL + row) * K + (c ^ row % 2) * 8, x + (size_t)(list[row] / divide) * x_pitch + step * K + c * 8);
        }
        copies_end();
    };
    uint4 words = {}; /* columns 16t .. 16t + 15 of row g and of row g + 8 */
    uint32_t scales = 0;
    auto load = [&](int step) {
        if (group >= groups || step >= steps) return;
        const uint8_t *chunk = weights + ((size_t)group * steps + step) * FP4_BYTES;
        words = *(const uint4 *)(chunk + lane * 16);
        scales = *(const uint32_t *)(chunk + 512 + g * 4) >> t / 2 * 8;
    };
    float sum[TALL / 16][2][4] = {};
    copy(0);
    copy(1);
    load(0);
    for (int step = 0; step < steps; step++) {
        Sixteen b[2] = {fp4_to_bf16_scaled(words.x, words.y, scales & 255), fp4_to_bf16_scaled(words.z, words.w, scales >> 16 & 255)}; /* rows g and g + 8 */
        copies_done<1>();
        __syncthreads();
        copy(step + 2);
        load(step + 1);
        const bf16 *rows = stage + step % STEPS * TALL * K;
#pragma unroll
        for (int k = 0; k < TALL / 16; k++) {
            if (k * 16 >= n) break;
            for (int half = 0; half < 2; half++) {
                int column = (2 * t + half ^ g % 2) * 8;
                uint4 low = *(const uint4 *)(rows + (k * 16 + g) * K + column), high = *(const uint4 *)(rows + (k * 16 + g + 8) * K + column);
                for (int i = 0; i < 2; i++) mma_eight(sum[k][i], low, high, half ? b[i].high : b[i].low);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < TALL / 16; k++)
        for (int i = 0; i < 2; i++)
            for (int r = 0; r < 2; r++) {
                int row = k * 16 + g + 8 * r;
                if (row < n && group < groups) done(list[row], group * FP4_ROWS + i * 8 + 2 * t, sum[k][i][2 * r], sum[k][i][2 * r + 1], e);
            }
}

__global__ void __launch_bounds__(256) up_many(Work w, Block l, int tokens) {
    multiply_experts(w, l.up, (const bf16 *)w.normed, w.normed_pitch, w.top_k, tokens, [&](int choice, int row, float gate, float up, int e) {
        const float *bias = l.up.bias ? l.up.bias + (size_t)e * l.up.rows + row : NULL;
        if (row / 2 >= w.ffn_dim) return;
        if (bias) gate += bias[0], up += bias[1];
        ((bf16 *)w.act_out)[(size_t)choice * w.act_pitch + row / 2] = (bf16)swiglu(w, gate, up);
    });
}

__global__ void __launch_bounds__(256) down_many(Work w, Block l, int tokens) {
    multiply_experts(w, l.down, (const bf16 *)w.act_out, w.act_pitch, 1, tokens, [&](int choice, int row, float a, float b, int e) {
        const float *bias = l.down.bias ? l.down.bias + (size_t)e * w.dim + row : NULL;
        float *out = w.down + (size_t)choice * w.dim + row;
        if (row < w.dim) out[0] = a + (bias ? bias[0] : 0);
        if (row + 1 < w.dim) out[1] = b + (bias ? bias[1] : 0);
    });
}

/* x[t] += sum of weight * down over the choices, in their order; and, unless NULL, RMSNorm(x) * norm for what comes next. A block
 * a token. */
__global__ void __launch_bounds__(256) combine(Work w, const float *norm) {
    __shared__ float scratch[33];
    wait_previous();
    launch_next();
    int t = blockIdx.x;
    float square = 0;
    float4 *x = (float4 *)(w.x + (size_t)t * w.dim);
    for (int i = threadIdx.x; i < w.dim / 4; i += blockDim.x) {
        float4 sum = {}, old = x[i];
        for (int k = t * w.top_k; k < (t + 1) * w.top_k; k++) {
            float weight = w.weight[k];
            float4 v = __ldcs((const float4 *)(w.down + (size_t)k * w.dim) + i);
            sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
        }
        x[i] = sum = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
        square += sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w;
    }
    if (!norm) return;
    float scale = rsqrtf(block_sum(square, scratch, blockDim.x) / w.dim + w.eps);
    for (int i = threadIdx.x; i < w.dim / 4; i += blockDim.x) {
        float4 v = x[i], by = ((const float4 *)norm)[i];
        *(uint2 *)((bf16 *)w.normed + (size_t)t * w.normed_pitch + 4 * i) =
            make_uint2(pack(v.x * scale * by.x, v.y * scale * by.y), pack(v.z * scale * by.z, v.w * scale * by.w));
    }
}

/* Dense: the activation of what cuBLAS made of gate and up, (tokens, rows). A block a token. */
template <typename Out> __global__ void swiglu_many(Work w, Block l) {
    wait_previous();
    const float *from = w.qkv + (size_t)blockIdx.x * l.up.rows;
    for (int i = threadIdx.x; i < w.ffn_dim; i += blockDim.x) {
        ((Out *)w.act_out)[(size_t)blockIdx.x * w.act_pitch + i] = (Out)swiglu<Out>(w, from[2 * i], from[2 * i + 1]);
    }
}

/* Attention for any head size, a block for each token and query head. */
template <typename Out> __global__ void attention_plain(Work w, Step s, Block l) {
    extern __shared__ float plain[];
    wait_previous();
    float x = attend_plain<Out>(w, s, l, blockIdx.x, blockIdx.y, plain, blockDim.x);
    if ((int)threadIdx.x < w.head_dim) ((Out *)w.attn)[(size_t)blockIdx.x * w.attn_pitch + blockIdx.y * w.head_dim + threadIdx.x] = (Out)x;
}

#endif
