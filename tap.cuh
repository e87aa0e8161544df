/* tap.cuh: hands out the stages of a step to a tap (Limits::tap), for tests and `infer logits --tap`. */
#pragma once

/* Gives the tap (rows, cols) floats: value i of row r is factor times number place(r, i) of n at `from` on the card. */
template <typename From, class Place>
bool tap_rows(const Pass *a, const char *stage, const From *from, size_t n, int rows, int cols, Place place, Error *e,
              float factor = 1) {
    const Limits &limits = a->gpu->limits;
    if (!limits.tap) return true;
    std::vector<From> raw(n);
    std::vector<float> out;
    CUDA(cudaStreamSynchronize(a->gpu->stream));
    CUDA(cudaMemcpy(raw.data(), from, n * sizeof(From), cudaMemcpyDeviceToHost));
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < cols; i++) out.push_back((float)raw[place(r, i)] * factor);
    limits.tap(limits.tap_data, stage, a->w.layer, out.data(), rows, cols);
    return true;
}
/* The same for rows `pitch` apart, where column i lies at column(i). */
int as_it_is(int i) { return i; }
template <class Column = int(int)>
bool tap(const Pass *a, const char *stage, Type type, const void *from, size_t pitch, int rows, int cols, Error *e,
         Column column = as_it_is) {
    auto place = [&](int r, int i) { return r * pitch + column(i); };
    if (type == F32) return tap_rows(a, stage, (const float *)from, rows * pitch, rows, cols, place, e);
    if (type == F16) return tap_rows(a, stage, (const f16 *)from, rows * pitch, rows, cols, place, e);
    return tap_rows(a, stage, (const bf16 *)from, rows * pitch, rows, cols, place, e);
}
bool tap_x(const Pass *a, const char *stage, Error *e) {
    return tap(a, stage, F32, a->w.x, a->w.dim, a->tokens, a->w.dim, e);
}
/* The keys, or values, that this step has added; of latent attention its rows of the cache, as keys of one head. */
bool tap_cache(const Pass *a, int values, Error *e) {
    const Work &w = a->w;
    const Batch *b = a->batch;
    const int d = w.kv_rank ? cache_row(w) : w.head_dim, kv = w.n_kv_heads * d;
    const Rows dealt = {0, 1, a->gpu->model.neighbours ? 0 : d / 2};
    std::vector<bf16> page((size_t)kv * PAGE);
    std::vector<float> out;
    if (!a->gpu->limits.tap) return true;
    CUDA(cudaStreamSynchronize(a->gpu->stream));
    for (int seq = 0; seq < b->seqs; seq++)
        for (int p = b->start[seq]; p < b->start[seq] + b->first[seq + 1] - b->first[seq]; p++) {
            const bf16 *from = cache_of(w, b->page[seq * b->max_pages + p / PAGE], values, 0);
            CUDA(cudaMemcpy(page.data(), from, page.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
            for (int i = 0; i < kv; i++) {
                int at = values ? value_place(d, p, i % d) : key_place(d, p, dealt.of(i % d));
                out.push_back((float)page[(size_t)(i / d) * d * PAGE + at]);
            }
        }
    a->gpu->limits.tap(a->gpu->limits.tap_data, values ? "v" : "k", w.layer, out.data(), a->tokens, kv);
    return true;
}
bool tap_attention(const Pass *a, const DeviceLayer &l, Error *e) {
    const int width = a->w.n_heads * a->w.head_dim;
    const Rows dealt = {0, 1, a->gpu->model.neighbours ? 0 : a->w.head_dim / 2};
    return tap(a, "q", query_type(l), a->w.q, width, a->tokens, width, e, [&](int i) { return dealt.of(i); }) &&
           tap_cache(a, 0, e) && tap_cache(a, 1, e) &&
           tap(a, "attn", type_for(l.o), a->w.attn, a->w.attn_pitch, a->tokens, width, e);
}
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
template <class Column = int(int)>
bool tap_experts(const Pass *a, const DeviceLayer &l, Error *e, Column column = as_it_is) {
    const Work &w = a->w;
    auto choice = [&](int r, int i) { return r * w.top_k + i; };
    const size_t n = (size_t)a->tokens * (l.router.rows ? w.top_k : 1);
    if (l.router.rows && (!tap_rows(a, "experts", w.expert, n, a->tokens, w.top_k, choice, e) ||
                          !tap_rows(a, "weights", w.weight, n, a->tokens, w.top_k, choice, e)))
        return false;
    return tap(a, "act", type_for(l.down), w.act_out, w.act_pitch, (int)n, l.down.cols, e, column);
}
