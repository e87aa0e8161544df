/* fast.cuh: the annex: gpt-oss's shapes on Hopper at the memory's speed. */
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#else
#define HOPPER 0
#endif

namespace fast {

/* Whether this is code with Hopper's own instructions: the host asks, since only the driver knows which of a build's architectures it took. */
__device__ int has_hopper = HOPPER;

#include "fast/publish.cuh"
#include "fast/codec.cuh"
#include "fast/ring.cuh"
#include "fast/slab.cuh"
#include "fast/decode.cuh"
#include "fast/prefill.cuh"

struct State {
    DecodeWork work;
    Step step;              /* of decode; its pages stay from step to step */
    std::vector<int> pages; /* that step.page has */
    DecodeLayer *layers;          /* (n_layers) on the card */
    float *columns;         /* (n_layers, dim, n_experts): see DecodeLayer */
    Layout layout[FEW + 1]; /* by tokens */
    bf16 *normed;           /* (tokens, normed_pitch) Work::normed in the order of fp4_column */
    bool timed = false;     /* the last step was a whole one of decode */
};

void open(Gpu *gpu) {
    int hopper = 0;
    if (gpu->limits.plain || !has_gpt_oss_shapes(gpu->model) || gpu->sms > MOST_COUNTED) return;
    if (!cudaMemcpyFromSymbol(&hopper, has_hopper, sizeof hopper) && hopper) gpu->fast = new State;
}
void close(Gpu *gpu) { delete gpu->fast; }

/* Says where its buffers lie. */
void plan(Gpu *gpu, Plan *p) {
    State *f = gpu->fast;
    DecodeWork &w = f->work;
    const size_t layers = gpu->model.n_layers, dim = gpu->model.dim, experts = gpu->model.n_experts;
    size_t bytes;
    (Work &)w = gpu->work;
    for (void *&normed : w.normed_for) normed = p->take<bf16>(FEW * dim);
    w.told = p->take<float>(told_size(w));
    w.split_partial = p->take<float>(partial_size(w));
    w.expert_sum = p->take<unsigned long long>(FEW * dim);
    w.router_sum = p->take<unsigned long long>(layers * FEW * experts);
    w.square = p->take<unsigned long long>(layers * FEW * gpu->sms);
    w.input_square = p->take<unsigned long long>(FEW * (layers + 1) * MOST_WARPS);
    w.barrier = p->take<unsigned long long>(1);
    w.ended = p->take<unsigned long long>(layers * PHASES + 2);
    f->layers = p->take<DecodeLayer>(layers);
    f->columns = p->take<float>(layers * dim * experts);
    f->normed = p->take<bf16>((size_t)gpu->limits.max_tokens * w.normed_pitch);
    f->step = step_at(p->take<uint8_t>(Posted::BYTES + FEW * gpu->max_pages * sizeof(int)), FEW, &bytes);
}

/* The router's matrix times the norm before it, column by column: a block each. */
__global__ void fill_columns(float *to, Matrix router, const float *norm) {
    for (int e = threadIdx.x; e < router.rows; e += blockDim.x)
        to[(size_t)blockIdx.x * router.rows + e] = (float)((const bf16 *)router.data)[(size_t)e * router.stride + blockIdx.x] * norm[blockIdx.x];
}

bool prepare(Gpu *gpu, Error *e) {
    State *f = gpu->fast;
    DecodeWork &w = f->work;
    (Work &)w = gpu->work;
    w.act_lift = Codec<MXFP4>::LIFT;
    std::vector<DecodeLayer> layers;
    for (const DeviceLayer &l : gpu->device.layer) {
        layers.push_back({l, f->columns + layers.size() * w.dim * w.n_experts});
        fill_columns<<<w.dim, 32, 0, gpu->stream>>>(layers.back().router_columns, l.router, l.ffn_norm);
    }
    for (int n = 1; n <= FEW; n++) f->layout[n] = layout_for(w, gpu->device, n, gpu->sms, gpu->shared);
    CUDA(cudaMemsetAsync(w.told, 0xFF, told_size(w) * sizeof(float), gpu->stream)); /* UNWRITTEN */
    CUDA(cudaMemsetAsync(w.split_partial, 0xFF, partial_size(w) * sizeof(float), gpu->stream));
    CUDA(cudaMemcpyAsync(f->layers, layers.data(), layers.size() * sizeof(DecodeLayer), cudaMemcpyHostToDevice, gpu->stream));
    CUDA(cudaStreamSynchronize(gpu->stream));
    return true;
}

/* ---- a step of few tokens ---- */

cudaError_t launch_few(const Pass *a, int first, int last) {
    const State *f = a->gpu->fast;
    const DeviceModel &device = a->gpu->device;
    const Layout &k = f->layout[a->tokens];
    auto kernel = a->tokens == 1 ? few<1> : a->tokens <= 4 ? few<4> : a->tokens <= 8 ? few<8> : few<FEW>;
    return launch(a->gpu, kernel, a->gpu->sms, THREADS, k.bytes, f->work, f->step, f->layers, device.head, device.norm, k, a->tokens, a->rows, first, last);
}

/* Hands out what a phase has left, by Codec's order of columns. */
bool tap_phase(const Pass *a, int layer, int kind, Error *e) {
    const DecodeWork &w = a->gpu->fast->work;
    const int n = a->tokens, width = w.n_heads * w.head_dim;
    const Told told = told_of(w, n == 1, layer);
    const Rows head = {0, 1, w.head_dim / 2};
    auto floats = [&](const char *stage, const float *from) { return tap_rows(a, stage, from, (size_t)n * w.dim, n, w.dim, [&](int r, int i) { return r * w.dim + i; }, e); };
    switch (kind) {
    case PHASE_QKV:
        return tap_rows(a, "q", (const bf16 *)told.q, (size_t)n * width, n, width, [&](int r, int i) { return r * width + head.of(i); }, e) && tap_cache(a, 0, e) &&
               tap_cache(a, 1, e);
    case PHASE_ATTENTION: {
        auto place = [&](int r, int i) { return are_twins(n) ? twin_at(r, Codec<BF16>::place(i), w.attn_pitch) : (size_t)r * w.attn_pitch + Codec<BF16>::place(i); };
        return tap_rows(a, "attn", (const bf16 *)told.attn, (size_t)(are_twins(n) ? FEW : n) * w.attn_pitch, n, width, place, e);
    }
    case PHASE_OUTPUT: return floats("attn_residual", told.middle);
    case PHASE_UP: {
        auto choice = [&](int r, int i) { return r * w.top_k + i; };
        auto place = [&](int r, int i) { return (size_t)r * w.act_pitch + i; };
        return tap_rows(a, "experts", w.expert, n * w.top_k, n, w.top_k, choice, e) && tap_rows(a, "weights", w.weight, n * w.top_k, n, w.top_k, choice, e) &&
               tap_rows(a, "act", (const bf16 *)told.act, (size_t)n * w.top_k * w.act_pitch, n * w.top_k, w.ffn_dim, place, e, 1 / w.act_lift);
    }
    case PHASE_DOWN: return floats("residual", told.x);
    default: return true;
    }
}

/* A step of up to FEW tokens, to the logits of its rows: one kernel behind embed. Where a tap looks, one for each phase. */
bool decode(Pass *a, uint8_t *staged, Error *e) {
    Gpu *gpu = a->gpu;
    State *f = gpu->fast;
    const Batch *b = a->batch;
    const size_t pages = (size_t)b->seqs * b->max_pages;
    const int layers = f->work.n_layers * PHASES, all = layers + (a->rows > 0);
    size_t bytes;
    Posted post;
    memcpy(post.word, staged, Posted::BYTES);
    if (f->pages.size() != pages || memcmp(f->pages.data(), b->page, pages * sizeof(int))) { /* a page is new every PAGE tokens only */
        f->pages.assign(b->page, b->page + pages);
        CUDA(cudaMemcpyAsync(f->step.page, step_at(staged, FEW, &bytes).page, pages * sizeof(int), cudaMemcpyHostToDevice, gpu->stream));
    }
    a->s = f->step;
    a->headed = true;
    f->timed = a->rows > 0;
    if (a->tokens == 1) gpu->experts_read += (uint64_t)f->work.n_layers * f->work.top_k;
    const DeviceLayer &l = gpu->device.layer[0];
    const bool alone = a->tokens == 1;
    Next next = alone ? Next{} : next_of(f->work.normed_for[FOR_QKV], l.qkv, l.attn_norm, are_twins(a->tokens));
    CUDA(launch(gpu, embed, a->tokens, 1024, 0, f->work, a->s, post, gpu->device.embed, gpu->sms, alone, next));
    if (!gpu->limits.tap) CUDA(launch_few(a, 0, all));
    for (int phase = 0; phase < all && gpu->limits.tap; phase++) {
        a->w.layer = phase / PHASES;
        CUDA(launch_few(a, phase, phase + 1));
        if (!tap_phase(a, phase / PHASES, phase == layers ? PHASES : phase % PHASES, e)) return false;
    }
    return true;
}

/* Where its time went: see Backend::phases. */
int phases(const Gpu *gpu, Phase *phase) {
    static const char *name[PHASES + 1] = {"qkv", "attention", "output", "up", "down", "head"};
    const State *f = gpu->fast;
    const int layers = gpu->model.n_layers * PHASES;
    std::vector<unsigned long long> ended(layers + 2);
    static_assert(PHASES + 1 <= MOST_PHASES, "infer.h");
    if (!f->timed || cudaMemcpy(ended.data(), f->work.ended, ended.size() * 8, cudaMemcpyDeviceToHost)) return 0;
    for (int i = 0; i <= PHASES; i++) phase[i] = {name[i], 0};
    for (int i = 0; i <= layers; i++) phase[i == layers ? PHASES : i % PHASES].seconds += (double)(ended[i + 1] - ended[i]) / 1e9;
    return PHASES + 1;
}

/* ---- a prompt ---- */

/* Whether a step has enough tokens for each expert. */
constexpr int MIN_PREFILL = 256;
bool prefills(const Pass *a) { return a->tokens >= MIN_PREFILL && a->tiles; }

/* x in the order of fp4_column. A block a token. */
__global__ void __launch_bounds__(256) order_for_wgmma(const bf16 *from, bf16 *to, int pitch) {
    launch_next();
    wait_previous();
    for (int c = 2 * threadIdx.x; c < pitch; c += 2 * blockDim.x)
        *(uint32_t *)(to + (size_t)blockIdx.x * pitch + fp4_column(c)) = *(const uint32_t *)(from + (size_t)blockIdx.x * pitch + c);
}

bool attend(Pass *a, const DeviceLayer &l, Error *e) {
    typedef WgmmaAttention<64> Shape;
    CUDA(launch(a->gpu, rope_and_store, a->tokens, 256, 0, a->w, a->s, l));
    CUDA(launch_queries<64>(a, l));
    CUDA(launch(a->gpu, attention_wgmma<64>, dim3(a->w.n_kv_heads, a->tiles), Shape::THREADS, Shape::SHARED, a->w, a->s, l));
    return tap_attention(a, l, e);
}

bool experts(Pass *a, const DeviceLayer &l, const float *next_norm, const Matrix &next, Error *e) {
    typedef ExpertShape Shape;
    const Gpu *gpu = a->gpu;
    const Work &w = a->w;
    const size_t shared = Shape::SHARED + Shape::jobs(a->tokens * w.top_k, w.n_experts) * sizeof(int);
    bf16 *normed = gpu->fast->normed;
    if (!route_tokens(a, l, Shape::CHOICES, e)) return false;
    CUDA(launch(gpu, order_for_wgmma, a->tokens, 256, 0, (const bf16 *)w.normed, normed, w.normed_pitch));
    CUDA(launch(gpu, up_wgmma, gpu->sms, Shape::THREADS, shared, w, l, (const bf16 *)normed));
    if (!tap_experts(a, l, e, fp4_column)) return false;
    CUDA(launch(gpu, down_wgmma, gpu->sms, Shape::THREADS, shared, w, l));
    return combine_experts(a, next_norm, next, e);
}
} // namespace fast
