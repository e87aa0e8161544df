/* latent.cuh: attention over latents of the size that all of DeepSeek's models have (families/latent.cuh), on tensor
 * cores. */
#pragma once

/* Two values of a head's weighted sum of latents, from the i-th on. */
__device__ inline void store_latent(const Work &w, const DeviceLayer &l, int t, int head, int i, float2 x) {
    const size_t row = ((size_t)t * w.n_heads + head) * w.latent_pitch;
    if (head < w.n_heads) store_pair_as(type_for(l.v_up), w.latents, row + i, x.x, x.y);
}
/* Adds up the `partial` sums (splits, LATENT_HEADS, RANK + 2) of a token, by their shares (LATENT_HEADS, MAX_SPLITS),
 * which go to shared memory: a warp takes a head, a lane a split. */
template <int RANK>
__device__ inline void merge_latents(const Work &w, const DeviceLayer &l, const float *partial, int splits,
                                     float *shares, int t, int head) {
    static_assert(MAX_SPLITS == 32);
    const int lane = threadIdx.x % 32, pitch = LATENT_HEADS * (RANK + 2);
    for (int h = threadIdx.x / 32; h < LATENT_HEADS; h += blockDim.x / 32) {
        const float *from = partial + lane * pitch + h * (RANK + 2);
        const float max_score = lane < splits ? from[0] : NO_SCORE, total = lane < splits ? from[1] : 0;
        float top = max_score;
        for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
        const float share = exp2f(max_score - top);
        shares[h * MAX_SPLITS + lane] = share / warp_sum(share * total);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < LATENT_HEADS * RANK / 2; k += blockDim.x) {
        const int h = k / (RANK / 2), i = k % (RANK / 2) * 2;
        float2 sum = {};
#pragma unroll 16
        for (int j = 0; j < splits; j++) {
            const float2 x = *(const float2 *)(partial + j * pitch + h * (RANK + 2) + 2 + i);
            sum.x += shares[h * MAX_SPLITS + j] * x.x, sum.y += shares[h * MAX_SPLITS + j] * x.y;
        }
        store_latent(w, l, t, head + h, i, sum);
    }
}

/* Attention over latents of RANK values and ROPE more. A block has a token (blockIdx.y), 16 of its query heads
 * (blockIdx.x) and a split of the context (blockIdx.z). 32 keys at a time pass through shared memory. A warp multiplies
 * a quarter of their dimensions by the queries, which stay in registers; all warps add up the scores and compute the
 * same softmax; then each sums a quarter of the values, which are the keys' first RANK dimensions. The last split to
 * finish merges the states of all. */
template <int RANK, int ROPE> struct LatentShape {
    static constexpr int D = RANK + ROPE, KEYS = 32, WARPS = 4, THREADS = WARPS * 32, ROWS = LATENT_HEADS;
    static constexpr int STEPS = D / 16 / WARPS, VALUES = RANK / WARPS; /* of a warp: mma along a key, values */
    static constexpr int STAGE = KEYS * D * 2, SHARED = 2 * STAGE + WARPS * ROWS * KEYS * 4; /* bytes */
    static_assert(ROWS == 16 && D % 64 == 0 && RANK % 64 == 0 && SHARED <= 99 << 10);
};
template <int RANK, int ROPE>
__global__ void __launch_bounds__(LatentShape<RANK, ROPE>::THREADS) attention_latent(Work w, Step s, DeviceLayer l) {
    typedef LatentShape<RANK, ROPE> Shape;
    constexpr int D = Shape::D, KEYS = Shape::KEYS, ROW = RANK + 2;
    extern __shared__ __align__(128) uint8_t shared[]; /* two stages of keys; scores by warp */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, part = lane % 4, matrix = lane / 8;
    const int t = blockIdx.y, head = blockIdx.x * Shape::ROWS, split = blockIdx.z;
    launch_next();
    wait_previous();
    const int seq = s.seq[t], p = s.position[t], pages = p / PAGE + 1, splits = splits_of(pages, gridDim.z);
    if (split >= splits) return;
    const int begin = pages * split / splits * PAGE, end = min(pages * (split + 1) / splits * PAGE, p + 1);
    uint4 query[Shape::STEPS];
    auto query_of = [&](int row, int step) {
        const size_t which = (size_t)t * w.n_heads + min(head + row, w.n_heads - 1);
        return ((const uint32_t *)w.q)[(which * D + (warp * Shape::STEPS * 2 + step) * 8) / 2 + part];
    };
    for (int k = 0; k < Shape::STEPS; k++)
        query[k] = {query_of(g, 2 * k), query_of(g + 8, 2 * k), query_of(g, 2 * k + 1), query_of(g + 8, 2 * k + 1)};
    /* Keys lie as in the cache, but of the four 16 bytes for 32 dimensions those of number i lie at i ^ key / 2 % 4, so
     * that ldmatrix meets all banks. */
    auto copy = [&](int base) {
        const int key = threadIdx.x / 4 % SLAB_KEYS;
        const bf16 *from = cache_of(w, page_of(s, seq, base), 0, 0) + key_place(D, base, 0) + threadIdx.x * 8;
        uint8_t *to = shared + base / KEYS % 2 * Shape::STAGE + (threadIdx.x ^ key / 2 % 4) * 16;
#pragma unroll
        for (int i = 0; i < Shape::STAGE / 16; i += Shape::THREADS) /* zeros past the end: there may be a NaN */
            copy_16(to + i * 16, from + i * 8, base + i / (SLAB_KEYS * D / 8) * SLAB_KEYS + key < end ? 16 : 0);
    };
    TileState<Shape::VALUES, KEYS, true> state;
    copy(begin);
    copies_end();
    for (int base = begin; base < end; base += KEYS) {
        copies_done<0>();
        __syncthreads();
        if (base + KEYS < end) copy(base + KEYS);
        copies_end();
        const uint8_t *stage = shared + base / KEYS % 2 * Shape::STAGE;
        /* Dimension i of a key, a multiple of 8. */
        auto at = [&](int key, int i) {
            return stage + key / SLAB_KEYS * SLAB_KEYS * D * 2 + i / 32 * SLAB_KEYS * 64 + key % SLAB_KEYS * 64 +
                   (i / 8 % 4 ^ key / 2 % 4) * 16;
        };
        float score[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < Shape::STEPS; k++)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j += 2) {
                const int i = (warp * Shape::STEPS + k) * 16 + matrix % 2 * 8;
                const uint4 keys = load_matrices(at(j * 8 + matrix / 2 * 8 + lane % 8, i));
                mma_rows<bf16>(score[j], query[k], keys.x, keys.y);
                mma_rows<bf16>(score[j + 1], query[k], keys.z, keys.w);
            }
        float4 *scores = (float4 *)(shared + 2 * Shape::STAGE); /* (WARPS, KEYS / 8, 32) */
        for (int j = 0; j < KEYS / 8; j++) scores[(warp * (KEYS / 8) + j) * 32 + lane] = *(float4 *)score[j];
        __syncthreads();
        for (int j = 0; j < KEYS / 8; j++) {
            float4 sum = {};
            for (int i = 0; i < Shape::WARPS; i++) {
                const float4 x = scores[(i * (KEYS / 8) + j) * 32 + lane];
                sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
            }
            *(float4 *)score[j] = sum;
        }
        if (base + KEYS > end) state.mask(score, base, {p, p}, 0);
        state.softmax(score, LOG2E * w.attn_scale);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const uint4 share = state.shares_of(score, k);
#pragma unroll
            for (int j = 0; j < Shape::VALUES / 8; j += 2) {
                const int i = warp * Shape::VALUES + j * 8 + matrix / 2 * 8;
                const uint4 values = load_matrices<true>(at(k * 16 + matrix % 2 * 8 + lane % 8, i));
                mma_rows<bf16>(state.sum[j], share, values.x, values.y);
                mma_rows<bf16>(state.sum[j + 1], share, values.z, values.w);
            }
        }
    }
    const size_t which = (size_t)t * gridDim.x + blockIdx.x;
    float *partial = w.partial + which * gridDim.z * Shape::ROWS * ROW; /* (splits, ROWS, ROW) */
    for (int r = 0; r < 2; r++) {
        float total = state.total[r] + __shfl_xor_sync(~0u, state.total[r], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        float *to = partial + (split * Shape::ROWS + g + 8 * r) * ROW;
        if (splits > 1 && warp == 0 && part == 0) to[0] = state.max_score[r], to[1] = total;
        for (int j = 0; j < Shape::VALUES / 8; j++) {
            const int i = warp * Shape::VALUES + j * 8 + part * 2;
            const float2 sum = {state.sum[j][2 * r], state.sum[j][2 * r + 1]};
            if (splits > 1)
                *(float2 *)(to + 2 + i) = sum;
            else
                store_latent(w, l, t, head + g + 8 * r, i, {sum.x / total, sum.y / total});
        }
    }
    if (splits > 1 && last_block(w.attended + which, splits))
        merge_latents<RANK>(w, l, partial, splits, (float *)shared, t, head);
}

/* NotSupported: infer.cu's attention_any() computes it, in which blocks share no context. */
cudaError_t launch_attention_latent(const Pass *a, const DeviceLayer &l) {
    typedef LatentShape<512, 64> Shape;
    const Work &w = a->w;
    if (!a->gpu->fast || w.kv_rank != 512 || w.rope_dim != 64) return cudaErrorNotSupported;
    dim3 grid(latent_parts(w.n_heads), a->tokens, splits_of(a->pages, a->splits));
    return launch(a->gpu, attention_latent<512, 64>, grid, Shape::THREADS, Shape::SHARED, w, a->s, l);
}
