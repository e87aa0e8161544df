/* latent.cuh: latent attention (DeepSeek-AI, "DeepSeek-V2", 2024), absorbed: k_up^T multiplies the part of a query head
 * without RoPE, so that it can be compared with the cached latents; v_up turns their weighted sum into the head's
 * result. Both are products with a matrix for each head: a head takes an expert's place, and a choice is a token and a
 * head. card.cu includes the first part, which loads the matrices, infer.cu the kernels and attend_latent(). */
#pragma once

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
    *contexts = std::max(tokens, split);
    *partial = (size_t)std::max(tokens * MAX_SPLITS, split) * LATENT_HEADS * (m.kv_rank + 2);
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
bool attend_latent(const Pass *a, const DeviceLayer &l, Error *e) {
    const Work &w = a->w;
    const int job_size = job_size_of(a);
    auto by_head = [&](const Matrix &m, const void *x, int pitch, void *y, int y_pitch, Type type) {
        Product p = product_of(a, m, x, pitch);
        p.job = w.head_job, p.jobs = w.head_jobs, p.order = w.head_order;
        p.job_size = job_size, p.max_jobs = w.n_heads * ((a->tokens + job_size - 1) / job_size);
        p.y = y, p.y_pitch = y_pitch, p.y_type = type;
        return multiply(a, p, e);
    };
    if (w.layer == 0)
        CUDA(launch(a->gpu, head_jobs, (a->tokens * w.n_heads + 255) / 256, 256, 0, w, a->tokens, job_size));
    CUDA(launch(a->gpu, latent_store, a->tokens, 256, 0, w, a->s, l));
    if (l.q.rows && !multiply_to(a, l.q, w.q_low, w.q_low_pitch, w.projected, e)) return false;
    CUDA(launch(a->gpu, latent_query, dim3((w.n_heads + 7) / 8, a->tokens), 256, 0, w, a->s, l,
                l.q.rows ? l.q.rows : l.qkv.rows));
    if (!by_head(l.k_up, w.q_nope, w.nope_pitch, w.q, cache_row(w), BF16)) return false;
    cudaError_t error = fast::launch_attention_latent(a, l);
    if (error == cudaErrorNotSupported) error = launch_attention_any(a, l);
    CUDA(error);
    return by_head(l.v_up, w.latents, w.latent_pitch, w.attn, w.v_dim, type_for(l.o)) && tap_latent(a, l, e);
}

#endif
