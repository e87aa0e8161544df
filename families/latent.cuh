/* latent.cuh: latent attention (DeepSeek-AI, "DeepSeek-V2", 2024), absorbed: k_up^T multiplies the part of a query head
 * without RoPE, so that it can be compared with the cached latents; v_up turns their weighted sum into the head's
 * result. Both are products with a matrix for each head: a head takes an expert's place, and a choice is a token and a
 * head. card.cu includes the first part, which loads the matrices, infer.cu the kernels and attend_latent(). */
#pragma once

/* Are there kernels for latents of this size, as in all of DeepSeek's models? Others take infer.cu's attention_any(),
 * in which blocks share no context. */
inline bool has_latent_kernel(const Work &w) { return w.kv_rank == 512 && w.rope_dim == 64; }

#ifdef LOADS /* card.cu */

bool check_latent(const Model &m, Error *e) {
    const bool even = m.head_dim % 2 == 0 && m.kv_rank % 2 == 0 && m.layer[0].q_a.rows % 2 == 0; /* pairs are aligned */
    if (!m.neighbours || !even || m.n_heads * m.v_dim % 8)
        return fail(e, BAD_MODEL, "heads of %d and %d with latents of %d are not implemented", m.head_dim, m.v_dim,
                    m.kv_rank);
    for (int i = 0; i < m.n_layers; i++) {
        const Layer &l = m.layer[i];
        for (const Linear *w : {&l.q_a, &l.q, &l.kv_a, &l.k_up, &l.v_up})
            if (w->type == F32) return fail(e, BAD_MODEL, "layer %d: latent attention in F32 is not implemented", i);
    }
    return true;
}

void load_latent(Walk *walk, const Layer &l, DeviceLayer *d) {
    const Model &m = walk->gpu->model;
    const Walk::Part q = {l.q, "query"}, low = {l.q_a, "query, low rank"};
    d->qkv = walk->matrix({l.q_a.rows ? low : q, {l.kv_a, "latent"}});
    d->q_a_norm = walk->floats(l.q_a_norm, l.q_a.rows);
    d->kv_a_norm = walk->floats(l.kv_a_norm, m.kv_rank);
    if (l.q_a.rows) d->q = walk->matrix({q});
    d->k_up = walk->matrix({{l.k_up, "key of latent", 0, !m.k_up_transposed}});
    d->v_up = walk->matrix({{l.v_up, "value of latent"}});
}

void plan_latent(Gpu *gpu, Plan *p, size_t *contexts, size_t *partial) {
    const Model &m = gpu->model;
    Work &w = gpu->work;
    const size_t T = gpu->limits.max_tokens, heads_of = T * m.n_heads; /* pairs of token and head */
    auto round = [](int n) { return (n + CHUNK - 1) / CHUNK * CHUNK; };
    w.q_low_pitch = round(m.layer[0].q.cols), w.nope_pitch = round(m.head_dim - m.rope_dim);
    w.latent_pitch = round(m.kv_rank);
    w.q_low = p->take<uint8_t>(T * w.q_low_pitch * 2);
    w.q_nope = p->take<uint8_t>(heads_of * w.nope_pitch * 2);
    w.latents = p->take<uint8_t>(heads_of * w.latent_pitch * 2);
    w.head_order = p->take<int>(heads_of);
    w.head_job = p->take<Job>(m.n_heads * (T / 8 + 1));
    w.head_jobs = p->take<int>(1);
    /* tokens * parts of a step whose contexts are split, and the same times splits: see fill_step() */
    const int tokens = MAX_DECODE * latent_parts(m.n_heads), split = 4 * gpu->sms;
    *contexts = has_latent_kernel(w) ? std::max(tokens, split) : 0;
    *partial = *contexts ? (size_t)std::max(tokens * MAX_SPLITS, split) * LATENT_HEADS * (m.kv_rank + 2) : 0;
}

#else /* infer.cu */

/* The jobs of these products, for all layers: up to `job_size` tokens of a head. A thread is a token and a head. */
__global__ void __launch_bounds__(256) head_jobs(Work w, int tokens, int job_size) {
    launch_next();
    wait_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, head = i / tokens, t = i % tokens;
    const int jobs = (tokens + job_size - 1) / job_size; /* of a head */
    if (i == 0) *w.head_jobs = jobs * w.n_heads;
    if (head >= w.n_heads) return;
    w.head_order[i] = t * w.n_heads + head;
    if (t % job_size == 0) w.head_job[head * jobs + t / job_size] = {head, i, min(job_size, tokens - t)};
}

/* Norms the results of q_a and kv_a for a token: the query of low rank goes to w.q_low, the latent to the cache, and
 * the rope key, after RoPE, to the cache too. One block a token. */
__global__ void __launch_bounds__(256) latent_store(Work w, Step s, DeviceLayer l) {
    launch_next();
    wait_previous();
    const int t = blockIdx.x, p = s.position[t], d = cache_row(w);
    const float *row = w.projected + (size_t)t * l.qkv.rows, *latent = row + l.qkv.rows - d;
    bf16 *keys = cache_of(w, page_of(s, s.seq[t], p), 0, 0);
    auto norm = [&](const float *x, const float *weight, int n, auto store) {
        float square = 0;
        for (int i = threadIdx.x; i < n; i += blockDim.x) square += x[i] * x[i];
        const float factor = norm_factor(block_sum(square), n, w.eps);
        for (int i = threadIdx.x; i < n; i += blockDim.x) store(i, x[i] * factor * weight[i]);
    };
    if (l.q_a_norm)
        norm(row, l.q_a_norm, l.q.cols,
             [&](int i, float x) { store_as(type_for(l.q), w.q_low, (size_t)t * w.q_low_pitch + i, x); });
    norm(latent, l.kv_a_norm, w.kv_rank, [&](int i, float x) { keys[key_place(d, p, i)] = (bf16)x; });
    if (threadIdx.x < 32)
        norm_and_rope(w, cos_sin_of(w, l, p), latent + w.kv_rank, NULL, [&](int i, float2 x) {
            *(uint32_t *)(keys + key_place(d, p, w.kv_rank + 2 * i)) = pack(x.x, x.y);
        });
}

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
                mma<bf16>(score[j], query[k], keys.x, keys.y);
                mma<bf16>(score[j + 1], query[k], keys.z, keys.w);
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
                mma<bf16>(state.sum[j], share, values.x, values.y);
                mma<bf16>(state.sum[j + 1], share, values.z, values.w);
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

/* Splits query heads: the part without RoPE goes to w.q_nope, for k_up; the rest, after RoPE, goes to w.q, after the
 * place for k_up's result. One warp a head. */
__global__ void __launch_bounds__(256) latent_query(Work w, Step s, DeviceLayer l, int pitch) {
    launch_next();
    wait_previous();
    const int t = blockIdx.y, h = blockIdx.x * 8 + threadIdx.x / 32, nope = w.head_dim - w.rope_dim;
    if (h >= w.n_heads) return;
    const float *row = w.projected + (size_t)t * pitch + h * w.head_dim;
    const size_t which = (size_t)t * w.n_heads + h;
    for (int i = threadIdx.x % 32; i < nope; i += 32)
        store_as(type_for(l.k_up), w.q_nope, which * w.nope_pitch + i, row[i]);
    norm_and_rope(w, cos_sin_of(w, l, s.position[t]), row + nope, NULL, [&](int i, float2 x) {
        store_pair_as(BF16, w.q, which * cache_row(w) + w.kv_rank + 2 * i, x.x, x.y);
    });
}

/* ---- the host ---- */

/* The stages of latent attention. q is assembled from its part without RoPE and the part that RoPE has turned. */
bool tap_latent(const Pass *a, const DeviceLayer &l, Error *e) {
    const Work &w = a->w;
    const Limits &limits = a->gpu->limits;
    const int d = cache_row(w), nope = w.head_dim - w.rope_dim, pairs = a->tokens * w.n_heads;
    if (!limits.tap) return true;
    std::vector<bf16> part((size_t)pairs * std::max(d, w.nope_pitch));
    auto value = [&](size_t i) {
        return type_for(l.k_up) == F16 ? (float)((const f16 *)part.data())[i] : (float)part[i];
    };
    std::vector<float> q((size_t)pairs * w.head_dim);
    CUDA(cudaStreamSynchronize(a->gpu->stream));
    CUDA(cudaMemcpy(part.data(), w.q_nope, (size_t)pairs * w.nope_pitch * sizeof(bf16), cudaMemcpyDeviceToHost));
    for (int i = 0; i < pairs * nope; i++)
        q[(size_t)(i / nope) * w.head_dim + i % nope] = value((size_t)(i / nope) * w.nope_pitch + i % nope);
    CUDA(cudaMemcpy(part.data(), w.q, (size_t)pairs * d * sizeof(bf16), cudaMemcpyDeviceToHost));
    for (int i = 0; i < pairs * w.rope_dim; i++)
        q[(size_t)(i / w.rope_dim) * w.head_dim + nope + i % w.rope_dim] =
            (float)part[(size_t)(i / w.rope_dim) * d + w.kv_rank + i % w.rope_dim];
    limits.tap(limits.tap_data, "q", w.layer, q.data(), a->tokens, w.n_heads * w.head_dim);
    return tap_cache(a, 0, e) && tap(a, "attn", type_for(l.o), w.attn, w.attn_pitch, a->tokens, w.n_heads * w.v_dim, e);
}

/* attend() with latents: from queries and latents in w.projected to w.attn. latent_store and latent_query do norms and
 * RoPE, and fill the cache. */
bool attend_latent(Pass *a, const DeviceLayer &l, Error *e) {
    const Work &w = a->w;
    const int job_size = a->tokens <= MAX_DECODE ? 8 : 64, jobs = w.n_heads * ((a->tokens + job_size - 1) / job_size);
    auto by_head = [&](const Matrix &m, const void *x, int pitch, void *y, int y_pitch, Type type) {
        Product p = product_of(a, m, x, pitch);
        p.job = w.head_job, p.jobs = w.head_jobs, p.order = w.head_order;
        p.y = y, p.y_pitch = y_pitch, p.y_type = type;
        return launch_for_type(a->gpu, p, job_size, jobs);
    };
    if (w.layer == 0)
        CUDA(launch(a->gpu, head_jobs, (a->tokens * w.n_heads + 255) / 256, 256, 0, w, a->tokens, job_size));
    CUDA(launch(a->gpu, latent_store, a->tokens, 256, 0, w, a->s, l));
    if (l.q.rows && !multiply_to(a, l.q, w.q_low, w.q_low_pitch, w.projected, e)) return false;
    CUDA(launch(a->gpu, latent_query, dim3((w.n_heads + 7) / 8, a->tokens), 256, 0, w, a->s, l,
                l.q.rows ? l.q.rows : l.qkv.rows));
    CUDA(by_head(l.k_up, w.q_nope, w.nope_pitch, w.q, cache_row(w), BF16));
    if (has_latent_kernel(w)) {
        typedef LatentShape<512, 64> Shape;
        dim3 grid(latent_parts(w.n_heads), a->tokens, splits_of(a->pages, a->splits));
        CUDA(launch(a->gpu, attention_latent<512, 64>, grid, Shape::THREADS, Shape::SHARED, w, a->s, l));
    } else {
        CUDA(launch(a->gpu, attention_any, dim3(a->tokens, w.n_heads), 128, (2 * cache_row(w) + 128) * sizeof(float), w,
                    a->s, l));
    }
    CUDA(by_head(l.v_up, w.latents, w.latent_pitch, w.attn, w.v_dim, type_for(l.o)));
    return tap_latent(a, l, e);
}

#endif
