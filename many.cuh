/* many.cuh: the kernels of a step with many tokens, where they differ from those of few.cuh: tiles on tensor cores. Dense
 * products are cuBLAS's; see forward in infer.cu. */
#ifndef MANY_CUH
#define MANY_CUH

#include "work.cuh"

/* RMSNorm(x) * weight. A block a token. */
template <typename Out> __global__ void norm_many(Work w, const float *weight) {
    __shared__ float scratch[33];
    wait_previous();
    float *x = w.x + (size_t)blockIdx.x * w.dim, sum = 0;
    Out *out = (Out *)w.normed + (size_t)blockIdx.x * w.normed_pitch;
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) sum += x[i] * x[i];
    float scale = rsqrtf(block_sum(sum, scratch, blockDim.x) / w.dim + w.eps);
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) out[i] = (Out)(x[i] * scale * weight[i]);
}

/* Bias and RoPE of what cuBLAS made of query, key and value, (tokens, rows). A block a token. */
template <typename Q> __global__ void rope_many(Work w, Step s, Block l) {
    wait_previous();
    int t = blockIdx.x, p = s.position[t], page = page_of(s, s.seq[t], p), half = w.head_dim / 2;
    const float *from = w.qkv + (size_t)t * l.qkv.rows;
    for (int r = 2 * threadIdx.x; r < (w.n_heads + 2 * w.n_kv_heads) * w.head_dim; r += 2 * blockDim.x) {
        float a = from[r], b = from[r + 1];
        if (l.qkv.bias) a += l.qkv.bias[r], b += l.qkv.bias[r + 1];
        store_qkv<Q>(w, t, p, page, r, a, b, w.turn[(size_t)p * half + r / 2 % half]);
    }
}

/* Attention of up to 16 neighbouring tokens (blockIdx.x: a tile) and the query heads that share a key/value head
 * (blockIdx.y), a warp for each of them. */
template <int D> __global__ void __launch_bounds__(256) attention_many(Work w, Step s, Block l) {
    wait_previous();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, group = w.n_heads / w.n_kv_heads, h = blockIdx.y * group + warp;
    int token = s.tile[2 * blockIdx.x], n = s.tile[2 * blockIdx.x + 1], seq = s.seq[token], position = s.position[token];
    Attend<D, 2> a;
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

/* Each token's choices by the router's logits, (tokens, n_experts). A warp a token. */
__global__ void route_many(Work w, Block l) {
    extern __shared__ float logit[];
    wait_previous();
    int t = blockIdx.x, expert;
    float weight;
    for (int e = threadIdx.x; e < w.n_experts; e += 32) logit[e] = w.router[(size_t)t * w.n_experts + e] + (l.router.bias ? l.router.bias[e] : 0);
    __syncwarp();
    route(logit, w.n_experts, w.top_k, threadIdx.x, expert, weight);
    if ((int)threadIdx.x < w.top_k) w.expert[t * w.top_k + threadIdx.x] = expert, w.weight[t * w.top_k + threadIdx.x] = weight;
}

/* The choices that fell on an expert (blockIdx.x), in ascending order: list (n_experts, tokens). */
__global__ void list_choices(Work w, int tokens) {
    __shared__ int counts[32];
    wait_previous();
    int e = blockIdx.x, n = 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int base = 0; base < tokens * w.top_k; base += blockDim.x) {
        int i = base + threadIdx.x;
        bool mine = i < tokens * w.top_k && w.expert[i] == e;
        unsigned all = __ballot_sync(~0u, mine);
        if (lane == 0) counts[warp] = __popc(all);
        __syncthreads();
        int at = n + __popc(all & ((1u << lane) - 1));
        for (int k = 0; k < (int)blockDim.x / 32; k++) {
            if (k < warp) at += counts[k];
            n += counts[k];
        }
        if (mine) w.list[(size_t)e * tokens + at] = i;
        __syncthreads();
    }
    if (threadIdx.x == 0) w.listed[e] = n;
}

/* Eight e2m1 values times their block's scale (a byte of a packed chunk), exactly, as bf16. */
__device__ inline uint4 fp4_to_bf16_scaled(uint32_t word, uint32_t scale) {
    uint4 v = fp4_to_bf16(word);
    uint32_t *pair = &v.x, lift = 0x78007800 /* 2^113 */, rest = (scale - 13) * 0x00800080 /* 2^(e - 114) */;
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 x = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&pair[i]), *reinterpret_cast<__nv_bfloat162 *>(&lift));
        x = __hmul2(x, *reinterpret_cast<__nv_bfloat162 *>(&rest));
        pair[i] = *reinterpret_cast<uint32_t *>(&x);
    }
    return v;
}

/* One product for all experts: the rows of x that chose an expert times its matrix. A block takes 128 choices of one expert
 * (blockIdx.y counts over all experts' tiles) and 128 rows of the matrix, a group a warp; x passes through shared memory
 * in steps of 64 columns. done(choice, row, a, b) receives two neighbouring rows of the result. `divide`: x has a row for
 * every `divide` choices. */
template <class Done> __device__ void multiply_experts(const Work &w, const Matrix &m, const bf16 *x, int x_pitch, int divide, int tokens, Done done) {
    constexpr int TALL = 128, STEPS = 3, K = FP4_COLUMNS;
    extern __shared__ __align__(128) uint8_t memory[];
    bf16 *stage = (bf16 *)memory; /* (STEPS, TALL, K); of odd rows the halves are exchanged, so that no banks collide */
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
            copy_16(stage + (step % STEPS * TALL + row) * K + (c ^ (row % 2 * 4)) * 8, x + (size_t)(list[row] / divide) * x_pitch + step * K + c * 8);
        }
        copies_end();
    };
    uint4 words = {}; /* row g in either block, row g + 8 in either */
    uint32_t scales = 0;
    auto load = [&](int step) {
        if (group >= groups || step >= steps) return;
        const uint8_t *chunk = weights + ((size_t)group * steps + step) * FP4_BYTES;
        words = *(const uint4 *)(chunk + lane * 16);
        scales = *(const uint32_t *)(chunk + 512 + g * 4);
    };
    float sum[TALL / 16][2][4] = {};
    copy(0);
    copy(1);
    load(0);
    for (int step = 0; step < steps; step++) {
        uint4 b[2][2]; /* rows g and g + 8, blocks */
        for (int i = 0; i < 4; i++) b[i / 2][i % 2] = fp4_to_bf16_scaled((&words.x)[i], scales >> 8 * i & 255);
        copies_done<1>();
        __syncthreads();
        copy(step + 2);
        load(step + 1);
        const bf16 *rows = stage + step % STEPS * TALL * K;
#pragma unroll
        for (int k = 0; k < TALL / 16; k++) {
            if (k * 16 >= n) break;
            for (int half = 0; half < 2; half++) {
                int column = (half * 4 + t ^ g % 2 * 4) * 8;
                uint4 low = *(const uint4 *)(rows + (k * 16 + g) * K + column), high = *(const uint4 *)(rows + (k * 16 + g + 8) * K + column);
                for (int i = 0; i < 2; i++) mma_eight(sum[k][i], low, high, b[i][half]);
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

/* x[t] += sum of weight * down over the choices, in their order. A block a token. */
__global__ void combine(Work w) {
    wait_previous();
    int t = blockIdx.x;
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) {
        float sum = 0;
        for (int k = t * w.top_k; k < (t + 1) * w.top_k; k++) sum += w.weight[k] * w.down[(size_t)k * w.dim + i];
        w.x[(size_t)t * w.dim + i] += sum;
    }
}

/* Dense: the activation of what cuBLAS made of gate and up, (tokens, rows). A block a token. */
template <typename Out> __global__ void swiglu_many(Work w, Block l) {
    wait_previous();
    const float *from = w.qkv + (size_t)blockIdx.x * l.up.rows;
    for (int i = threadIdx.x; i < w.ffn_dim; i += blockDim.x) {
        float gate = from[2 * i], up = from[2 * i + 1];
        if (l.up.bias) gate += l.up.bias[2 * i], up += l.up.bias[2 * i + 1];
        ((Out *)w.act_out)[(size_t)blockIdx.x * w.act_pitch + i] = (Out)swiglu(w, gate, up);
    }
}

__global__ void add_bias(Work w, const float *bias) {
    wait_previous();
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) w.x[(size_t)blockIdx.x * w.dim + i] += bias[i];
}

template <typename Out> __global__ void attention_plain(Work w, Step s, Block l) {
    extern __shared__ float plain[];
    wait_previous();
    float x = attend_plain<Out>(w, s, l, blockIdx.x, blockIdx.y, plain, blockDim.x);
    if ((int)threadIdx.x < w.head_dim) ((Out *)w.attn)[(size_t)blockIdx.x * w.attn_pitch + blockIdx.y * w.head_dim + threadIdx.x] = (Out)x;
}

#endif
