/* infer.cu: the border of infer.h on an NVIDIA GPU. Read it beside tests/reference.c, which computes the same by the same
 * names in plain C.
 *
 * A step has one of two forms. Up to FEW tokens (generation, short ends of prompts) are one kernel, few.cuh, that reads every
 * weight once (but see MOST_CHOICES), in order: its time is the time to read them; ring.cuh and codec.cuh say how. More tokens
 * (prompts) are arithmetic: the kernels of many.cuh, of hopper.cuh and cuBLAS multiply tiles on tensor cores. draw.cuh
 * makes tokens of logits, upload.cu brings the weights to the card, work.cuh holds what all kernels share.
 *
 * On the card: the residual stream is fp32, products take bf16 and accumulate fp32 (fp32 throughout for F32 weights), the
 * cache is bf16. Weights keep their encoding and are re-laid once, while they are loaded: rows of query and key alternate
 * between the halves of a head so that the pair that RoPE turns is adjacent; rows of gate and up alternate; MXFP4 is packed
 * so that a warp reads 544 contiguous bytes for 16 rows by 64 columns; keys and values of 16 positions lie as a warp reads them. */
#include "draw.cuh"
#include "few.cuh"
#include "many.cuh"

#include <cublasLt.h>
#include <algorithm>
#include <cassert>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace {

/* cos and sin of every position and pair, in double precision: a float's product would be off by 0.01 at 131,072. */
__global__ void fill_turns(float2 *turn, const float *inv_freq, int half, float scale) {
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        double s, c;
        sincos((double)blockIdx.x * (double)inv_freq[i], &s, &c);
        turn[(size_t)blockIdx.x * half + i] = make_float2((float)(c * scale), (float)(s * scale));
    }
}

/* Reads n words of 16 bytes, eight on the way in every thread; *never is not written, but the compiler cannot know. */
__global__ void __launch_bounds__(512) read_words(const uint4 *words, size_t n, uint32_t *never) {
    size_t threads = (size_t)gridDim.x * blockDim.x, i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    uint32_t all = 0;
    for (; i < n; i += 8 * threads) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = i + k * threads < n ? __ldcs(words + i + k * threads) : make_uint4(0, 0, 0, 0);
        for (int k = 0; k < 8; k++) all |= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (all == 0x5EED5EED) *never = all;
}

/* ---- one step on the stream ---- */

constexpr size_t PRODUCT_ROOM = 32 << 20;

struct Pending { /* a step that was submitted; buffers are pinned */
    cudaEvent_t done = NULL;
    uint8_t *step = NULL; /* what goes to the card */
    int *token = NULL;    /* (seqs) what it drew */
    int rows;
    std::vector<Want> want;
    std::vector<float> logits;
};

struct Cuda {
    Model model;
    Limits limits;
    Card card = {};
    Work work = {};
    Step few = {}, many = {};
    Block *layers; /* card.layer, on the card */
    Layout layout[FEW + 1]; /* of few's shared memory, by tokens */
    int most_few;           /* tokens for which it is enough, at most FEW */
    bool timed = false;     /* the last step was a whole one of few tokens */
    uint64_t read_alone = 0; /* experts, by steps of one token */
    size_t many_bytes; /* of what is copied, without pages */
    int sms, max_pages, launch_arch;
    int shared; /* memory that a block can have */
    int wgmma;  /* this card's code has hopper.cuh's kernels */
    int tile;   /* of many tokens, how many attention takes at once */
    size_t weights_bytes;
    uint8_t *weights = NULL, *room = NULL, *cache = NULL;
    cudaStream_t stream = NULL;
    cublasLtHandle_t blas = NULL;
    std::map<std::array<int, 4>, cublasLtMatmulAlgo_t> algorithm; /* of multiply: by rows, columns, tokens and kind */
    uint8_t *product_room;                                        /* (PRODUCT_ROOM) for cuBLAS */
    std::vector<int> sent;                     /* the pages that few.page has */
    Pending pending[3]; /* [turn % 3] is next; the one before the oldest outstanding holds the last result */
    unsigned turn = 0;
    int outstanding = 0;
};

/* Launches a kernel that may begin before the one before it has ended (where the code has the instructions for it). */
template <typename... Params, typename... Args>
cudaError_t launch(const Cuda *c, void (*kernel)(Params...), dim3 grid, int threads, size_t shared, Args... args) {
    /* All kernels divide the multiprocessor's memory alike: it must be idle to divide it anew. */
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (!error && shared > 48 << 10) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error) return error;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = c->stream;
    config.attrs = &early, config.numAttrs = c->launch_arch >= 90;
    return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

/* Lays a Step out from `base` on, for so many tokens; pages come last. */
Step step_at(uint8_t *base, int tokens, size_t *bytes) {
    Step s;
    s.how = (Sampling *)base;
    s.token = (int4 *)(s.how + tokens);
    int *at = (int *)(s.token + tokens);
    for (int **array : {&s.seq, &s.position, &s.slot, &s.last, &s.row}) *array = at, at += tokens;
    s.tile = at, at += 2 * tokens;
    s.header = at, at += 4;
    s.page = at;
    *bytes = (uint8_t *)at - base;
    return s;
}

/* Whether the kernels of tensor cores do this attention; else attend_plain. */
bool tiled(const Work &w) { return w.n_heads / w.n_kv_heads <= 8 && (w.head_dim == 64 || w.head_dim == 128); }

/* Whether a step is one that norms for itself: see few.cuh. */
bool alone(const Cuda *c, int tokens, int rows) { return tokens <= 1 && rows <= 1 && has_gpt_oss_shapes(c->work, c->card); }
/* As Few::twins, of a step of few tokens. */
bool twins(const Cuda *c, int tokens) { return are_twins(tokens) && has_gpt_oss_shapes(c->work, c->card); }

/* Phases first to last - 1 of a step of few tokens: see few.cuh. */
cudaError_t launch_few(const Cuda *c, const Step &s, int tokens, int rows, int first, int last) {
    int n = std::max(tokens, rows);
    const Layout &k = c->layout[n];
    Work w = c->work;
    auto kernel = !has_gpt_oss_shapes(w, c->card) ? few<0> : n <= 1 ? few<1> : n <= 4 ? few<4> : n <= 8 ? few<8> : few<FEW>;
    return launch(c, kernel, c->sms, THREADS, k.bytes, w, s, c->layers, c->card.head, c->card.norm, k, tokens, rows, first, last);
}

/* y (tokens, rows) = x (tokens, cols; x_pitch) W^T + bias, or added to y, on cuBLAS. */
bool multiply(Cuda *c, const Matrix &m, const void *x, int x_pitch, int tokens, float *y, bool add, Error *e) {
    cudaDataType type = m.type == F32 ? CUDA_R_32F : CUDA_R_16BF;
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t bias = CUBLASLT_EPILOGUE_BIAS;
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w_layout, x_layout, y_layout;
    float one = 1, beta = add;
    cublasLtMatmulDescInit(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (m.bias) cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_EPILOGUE, &bias, sizeof bias);
    if (m.bias) cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &m.bias, sizeof m.bias);
    cublasLtMatrixLayoutInit(&w_layout, type, m.cols, m.rows, m.stride);
    cublasLtMatrixLayoutInit(&x_layout, type, m.cols, tokens, x_pitch);
    cublasLtMatrixLayoutInit(&y_layout, CUDA_R_32F, m.rows, tokens, m.rows);
    std::array<int, 4> kind = {m.rows, m.cols, tokens, add + 2 * (m.bias != NULL) + 4 * (m.type == F32)};
    auto known = c->algorithm.find(kind);
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (known == c->algorithm.end()) { /* asking takes longer than launching */
        cublasLtMatmulPreferenceOpaque_t preference;
        cublasLtMatmulHeuristicResult_t found;
        size_t room = PRODUCT_ROOM;
        int n = 0;
        cublasLtMatmulPreferenceInit(&preference);
        cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
        status = cublasLtMatmulAlgoGetHeuristic(c->blas, &product, &w_layout, &x_layout, &y_layout, &y_layout, &preference, 1, &found, &n);
        if (!status && !n) status = CUBLAS_STATUS_NOT_SUPPORTED;
        if (!status) known = c->algorithm.insert({kind, found.algo}).first;
    }
    if (!status)
        status = cublasLtMatmul(c->blas, &product, &one, m.data, &w_layout, x, &x_layout, &beta, y, &y_layout, y, &y_layout, &known->second, c->product_room,
                                PRODUCT_ROOM, c->stream);
    return status == CUBLAS_STATUS_SUCCESS || fail(e, GPU_FAULT, "cuBLAS failed: %s", cublasLtGetStatusString(status));
}

/* ---- taps: tests look at a step stage by stage ---- */

enum Order { IN_ORDER, FEW_ORDER, TWIN_ORDER, FP4_ORDER }; /* of activations: see Codec<BF16>::place, twin_at and fp4_column */

/* Hands out rows of the card as floats; `half`: rows of heads whose halves alternate. */
template <typename From>
bool tap_rows(const Cuda *c, const char *stage, int layer, const void *from, size_t pitch, int rows, int cols, int half, Order order, float factor, Error *e) {
    std::vector<From> raw(pitch * (order == TWIN_ORDER ? FEW : rows));
    std::vector<float> out((size_t)rows * cols);
    CUDA(cudaStreamSynchronize(c->stream));
    CUDA(cudaMemcpy(raw.data(), from, raw.size() * sizeof(From), cudaMemcpyDeviceToHost));
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < cols; i++) {
            int at = i, j = half ? i % (2 * half) : 0;
            if (half) at = i - j + (j < half ? 2 * j : 2 * (j - half) + 1);
            if (order == FEW_ORDER || order == TWIN_ORDER) at = Codec<BF16>::place(i);
            if (order == FP4_ORDER) at = fp4_column(i);
            out[(size_t)r * cols + i] = (float)raw[order == TWIN_ORDER ? twin_at(r, at, pitch) : r * pitch + at] * factor;
        }
    c->limits.tap(c->limits.tap_data, stage, layer, out.data(), rows, cols);
    return true;
}

bool tap_typed(const Cuda *c, Type type, const char *stage, int layer, const void *from, size_t pitch, int rows, int cols, int half, Order order, float factor,
               Error *e) {
    if (!c->limits.tap) return true;
    if (type == F32) return tap_rows<float>(c, stage, layer, from, pitch, rows, cols, half, IN_ORDER, factor, e);
    return tap_rows<bf16>(c, stage, layer, from, pitch, rows, cols, half, order, factor, e);
}

bool tap_floats(const Cuda *c, const char *stage, int layer, const float *from, int rows, int cols, Error *e) {
    return !c->limits.tap || tap_rows<float>(c, stage, layer, from, cols, rows, cols, 0, IN_ORDER, 1, e);
}

bool tap_cache(const Cuda *c, const Batch *b, int layer, int values, Error *e) {
    if (!c->limits.tap) return true;
    Work w = c->work;
    w.layer = layer;
    int d = w.head_dim, kv = w.n_kv_heads * d, tokens = b->first[b->seqs];
    std::vector<bf16> page((size_t)kv * PAGE);
    std::vector<float> out((size_t)tokens * kv);
    CUDA(cudaStreamSynchronize(c->stream));
    for (int seq = 0; seq < b->seqs; seq++)
        for (int t = b->first[seq]; t < b->first[seq + 1]; t++) {
            int p = b->start[seq] + t - b->first[seq], number = b->page[seq * b->max_pages + p / PAGE];
            CUDA(cudaMemcpy(page.data(), cache_of(w, number, values, 0), page.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
            for (int i = 0; i < kv; i++) {
                int h = i / d, j = i % d, k = j < d / 2 ? 2 * j : 2 * (j - d / 2) + 1;
                out[(size_t)t * kv + i] = (float)page[(size_t)h * d * PAGE + (values ? value_place(d, p, j) : key_place(d, p, k))];
            }
        }
    c->limits.tap(c->limits.tap_data, values ? "v" : "k", layer, out.data(), tokens, kv);
    return true;
}

bool tap_qkv(const Cuda *c, const Batch *b, int layer, const void *q, int tokens, Error *e) {
    const Work &w = c->work;
    int width = w.n_heads * w.head_dim;
    return tap_typed(c, c->card.layer[layer].qkv.type, "q", layer, q, width, tokens, width, w.head_dim / 2, IN_ORDER, 1, e) && tap_cache(c, b, layer, 0, e) &&
           tap_cache(c, b, layer, 1, e);
}

bool tap_attention(const Cuda *c, int layer, const void *attn, int tokens, Error *e) {
    const Work &w = c->work;
    Order order = tokens > c->most_few ? IN_ORDER : twins(c, tokens) ? TWIN_ORDER : FEW_ORDER;
    return tap_typed(c, c->card.layer[layer].o.type, "attn", layer, attn, w.attn_pitch, tokens, w.n_heads * w.head_dim, 0, order, 1, e);
}

/* The experts' choice, and what they hand to their last matrix. */
bool tap_experts(const Cuda *c, int layer, const void *act, int tokens, Error *e) {
    const Work &w = c->work;
    const Block &b = c->card.layer[layer];
    float lift = tokens <= c->most_few ? w.act_lift : 1;
    Order order = tokens <= c->most_few ? (b.up.type == BF16 ? FEW_ORDER : IN_ORDER) : c->wgmma && b.up.type == MXFP4 ? FP4_ORDER : IN_ORDER;
    if (!c->limits.tap) return true;
    if (b.router.rows && (!tap_rows<int>(c, "experts", layer, w.expert, w.top_k, tokens, w.top_k, 0, IN_ORDER, 1, e) ||
                          !tap_floats(c, "weights", layer, w.weight, tokens, w.top_k, e)))
        return false;
    return tap_typed(c, b.up.type, "act", layer, act, w.act_pitch, tokens * w.top_k, w.ffn_dim, 0, order, 1 / lift, e);
}

/* ---- forward ---- */

template <typename Q> cudaError_t launch_attention(const Cuda *c, const Work &w, const Step &s, const Block &b, int tokens, int tiles) {
    int group = w.n_heads / w.n_kv_heads;
    bool cores = sizeof(Q) == 2 && tiled(w);
    if (cores && c->wgmma) {
        dim3 grid(w.n_kv_heads, tiles);
        typedef AttentionShape<64> Small;
        typedef AttentionShape<128> Large;
        return w.head_dim == 64 ? launch(c, attention_wgmma<64>, grid, Small::THREADS, Small::SHARED, w, s, b)
                                : launch(c, attention_wgmma<128>, grid, Large::THREADS, Large::SHARED, w, s, b);
    }
    if (cores) {
        dim3 grid(tiles, w.n_kv_heads);
        return w.head_dim == 64 ? launch(c, attention_many<64>, grid, group * 32, 0, w, s, b) : launch(c, attention_many<128>, grid, group * 32, 0, w, s, b);
    }
    int threads = std::max(128, (w.head_dim + 31) / 32 * 32);
    return launch(c, attention_plain<Q>, dim3(tokens, w.n_heads), threads, (w.head_dim + threads + 33) * sizeof(float), w, s, b);
}

/* Whether combine leaves the normed input of this layer's attention, in bf16. */
bool combine_norms_for(const Cuda *c, int layer) {
    return layer > 0 && layer < c->work.n_layers && c->card.layer[layer - 1].router.rows && c->card.layer[layer].qkv.type == BF16;
}

/* Query, key and value, attention, and what it adds to x, for many tokens. */
bool attend_many(Cuda *c, const Work &w, const Step &s, const Batch *batch, const Block &b, int tokens, int tiles, Error *e) {
    bool f32 = b.qkv.type == F32;
    if (!combine_norms_for(c, w.layer)) CUDA(launch(c, f32 ? norm_many<float> : norm_many<bf16>, tokens, 256, 0, w, (const float *)b.attn_norm));
    if (!multiply(c, b.qkv, w.normed, w.normed_pitch, tokens, w.qkv, false, e)) return false;
    CUDA(launch(c, f32 ? rope_many<float> : rope_many<bf16>, dim3(tiles, (b.qkv.rows / 2 + 255) / 256), 256, 0, w, s, b));
    if (!tap_qkv(c, batch, w.layer, w.q, tokens, e)) return false;
    CUDA(f32 ? launch_attention<float>(c, w, s, b, tokens, tiles) : launch_attention<bf16>(c, w, s, b, tokens, tiles));
    return tap_attention(c, w.layer, w.attn, tokens, e) && multiply(c, b.o, w.attn, w.attn_pitch, tokens, w.x, true, e);
}

cudaError_t launch_route(const Cuda *c, const Work &w, const Block &b, int tokens) {
    auto run = [&](auto shape, auto kernel) {
        return launch(c, kernel, (tokens + shape.TOKENS - 1) / shape.TOKENS, shape.WARPS * 32, shape.shared(w.dim, w.n_experts), w, b, tokens);
    };
    if (b.router.type == F32) return run(RouteShape<float, 4>(), route_many<float, 4>);
    RouteShape<bf16, 16> wide;
    if (wide.shared(w.dim, w.n_experts) <= c->shared) return run(wide, route_many<bf16, 16>);
    return run(RouteShape<bf16, 8>(), route_many<bf16, 8>);
}

/* The feed-forward part of a layer for many tokens. */
bool feed_forward_many(Cuda *c, const Work &w, const Block &b, int tokens, Error *e) {
    if (!b.router.rows) {
        bool f32 = b.up.type == F32;
        CUDA(launch(c, f32 ? norm_many<float> : norm_many<bf16>, tokens, 256, 0, w, (const float *)b.ffn_norm));
        if (!multiply(c, b.up, w.normed, w.normed_pitch, tokens, w.qkv, false, e)) return false;
        CUDA(launch(c, f32 ? swiglu_many<float> : swiglu_many<bf16>, tokens, 256, 0, w, b));
        return tap_experts(c, w.layer, w.act_out, tokens, e) && multiply(c, b.down, w.act_out, w.act_pitch, tokens, w.x, true, e);
    }
    if (b.qkv.type == F32) CUDA(cudaMemsetAsync(w.normed, 0, (size_t)tokens * w.normed_pitch * sizeof(bf16), c->stream)); /* halves of floats lie behind dim */
    CUDA(launch_route(c, w, b, tokens));
    CUDA(launch(c, list_choices, w.n_experts, 1024, 0, w, tokens));
    int tiles = tokens * w.top_k / 128 + std::min(w.n_experts, tokens * w.top_k);
    typedef ExpertShape Shape;
    size_t plain = 3 * 128 * FP4_COLUMNS * sizeof(bf16), shared = Shape::SHARED + Shape::tiles(tokens * w.top_k, w.n_experts) * sizeof(int);
    if (c->wgmma)
        CUDA(launch(c, up_wgmma, c->sms, Shape::THREADS, shared, w, b, tokens));
    else
        CUDA(launch(c, up_many, dim3((b.up.rows + 127) / 128, tiles), 256, plain, w, b, tokens));
    if (!tap_experts(c, w.layer, w.act_out, tokens, e)) return false;
    if (c->wgmma)
        CUDA(launch(c, down_wgmma, c->sms, Shape::THREADS, shared, w, b, tokens));
    else
        CUDA(launch(c, down_many, dim3((w.dim + 127) / 128, tiles), 256, plain, w, b, tokens));
    CUDA(launch(c, combine, tokens, 256, 0, w, combine_norms_for(c, w.layer + 1) ? (const float *)c->card.layer[w.layer + 1].attn_norm : NULL));
    return true;
}

/* x after all layers. */
bool forward_many(Cuda *c, const Step &s, const Batch *batch, int tokens, int tiles, Error *e) {
    Work w = c->work;
    w.act_lift = 1;
    CUDA(launch(c, embed, tokens, 256, 0, w, s, Posted{}, c->card.embed, c->sms, false, Next{}));
    for (w.layer = 0; w.layer < w.n_layers; w.layer++) {
        const Block &b = c->card.layer[w.layer];
        if (!attend_many(c, w, s, batch, b, tokens, tiles, e) || !tap_floats(c, "attn_residual", w.layer, w.x, tokens, w.dim, e)) return false;
        if (!feed_forward_many(c, w, b, tokens, e) || !tap_floats(c, "residual", w.layer, w.x, tokens, w.dim, e)) return false;
    }
    return true;
}

/* A step of few tokens, up to the logits of `rows` of them. */
bool forward_few(const Cuda *c, const Pending *p, const Batch *batch, int tokens, int rows, Error *e) {
    const Step &s = c->few;
    const Work &w = c->work;
    int layers = w.n_layers * PHASES, all = layers + (rows > 0);
    const Block &b = c->card.layer[0];
    Posted post;
    memcpy(post.word, p->step, Posted::BYTES);
    post.there = true;
    bool one = alone(c, tokens, rows);
    Next next = one ? Next{} : next_of(w.normed_for[FOR_QKV], b.qkv, b.attn_norm, twins(c, tokens));
    CUDA(launch(c, embed, tokens, 1024, 0, w, s, post, c->card.embed, c->sms, one, next));
    if (!c->limits.tap) {
        CUDA(launch_few(c, s, tokens, rows, 0, all));
        return true;
    }
    for (int phase = 0; phase < all; phase++) {
        int layer = phase / PHASES, kind = phase == layers ? PHASES : phase % PHASES;
        CUDA(launch_few(c, s, tokens, rows, phase, phase + 1));
        Told told = told_of(w, one, layer);
        if (kind == PHASE_QKV && !tap_qkv(c, batch, layer, told.q, tokens, e)) return false;
        if (kind == PHASE_ATTENTION && !tap_attention(c, layer, told.attn, tokens, e)) return false;
        if (kind == PHASE_OUTPUT && !tap_floats(c, "attn_residual", layer, told.middle, tokens, w.dim, e)) return false;
        if (kind == PHASE_UP && !tap_experts(c, layer, told.act, tokens, e)) return false;
        if (kind == PHASE_DOWN && !tap_floats(c, "residual", layer, told.x, tokens, w.dim, e)) return false;
    }
    return true;
}

/* Draws for at most FEW rows of logits. */
bool draw_rows(const Cuda *c, const Step &s, const Pending *p, int rows, bool filtered, bool penalized, Error *e) {
    Work w = c->work;
    w.result = p->token;
    if (!tap_floats(c, "logits", w.n_layers, w.logits, rows, w.vocab, e)) return false;
    if (penalized) CUDA(launch(c, mark_seen, rows, 256, 0, w, s));
    if (filtered) CUDA(launch(c, filter, rows, 1024, 0, w, s));
    CUDA(launch(c, draw, dim3((c->sms + rows - 1) / rows, rows), 1024, 0, w, s, filtered));
    return true;
}

/* ---- the border ---- */

/* Fills a Step from a Batch, in tiles of so many tokens; returns how many rows of logits are wanted. */
int fill_step(const Step &s, const Batch *b, int tile, int *tiles) {
    int rows = 0;
    *tiles = 0;
    s.header[0] = b->max_pages;
    memcpy(s.slot, b->slot, b->seqs * sizeof(int));
    memcpy(s.how, b->sampling, b->seqs * sizeof(Sampling));
    memcpy(s.page, b->page, (size_t)b->seqs * b->max_pages * sizeof(int));
    for (int i = 0; i < b->seqs; i++) {
        s.last[i] = b->want[i] == WANT_NOTHING ? -1 : b->first[i + 1] - 1;
        for (int t = b->first[i]; t < b->first[i + 1]; t++) {
            int p = b->start[i] + t - b->first[i];
            s.token[t] = make_int4(b->token[t], b->slot[i], b->page[(size_t)i * b->max_pages + p / PAGE] * PAGE + p % PAGE, 0);
            s.seq[t] = i;
            s.position[t] = p;
            if (b->want[i] == WANT_ALL_LOGITS || t == s.last[i]) s.row[rows++] = t;
            if ((t - b->first[i]) % tile == 0) s.tile[2 * *tiles] = t, s.tile[2 * (*tiles)++ + 1] = std::min(tile, b->first[i + 1] - t);
        }
    }
    return rows;
}

/* Draws for all rows of a step, a few at a time, and the logits that the caller wants. Of few tokens the logits are there. */
bool heads(Cuda *c, Step s, const Batch *b, int tokens, int rows, bool filtered, bool penalized, Pending *p, Error *e) {
    const int *row = s.row;
    std::vector<float> found;
    bool keep = false;
    for (int i = 0; i < b->seqs; i++) keep |= b->want[i] == WANT_LOGITS || b->want[i] == WANT_ALL_LOGITS;
    if (keep) found.resize((size_t)rows * c->work.vocab);
    for (int i = 0; i < rows; i += c->most_few) {
        int n = std::min(c->most_few, rows - i);
        s.row = (int *)row + i;
        if (tokens > c->most_few) {
            Next next = next_of(c->work.normed_for[FOR_HEAD], c->card.head, c->card.norm);
            if (!alone(c, 0, n)) CUDA(launch(c, norm_for_head, n, CONSUMERS, 0, c->work, s, next));
            CUDA(launch_few(c, s, 0, n, c->work.n_layers * PHASES, c->work.n_layers * PHASES + 1));
        }
        if (!draw_rows(c, s, p, n, filtered, penalized, e)) return false;
        if (!keep) continue;
        CUDA(cudaMemcpyAsync(found.data() + (size_t)i * c->work.vocab, c->work.logits, (size_t)n * c->work.vocab * 4, cudaMemcpyDeviceToHost, c->stream));
        CUDA(cudaStreamSynchronize(c->stream));
    }
    p->logits.clear();
    p->rows = 0;
    for (int i = 0, r = 0; i < b->seqs && keep; i++) {
        int n = b->want[i] == WANT_NOTHING ? 0 : b->want[i] == WANT_ALL_LOGITS ? b->first[i + 1] - b->first[i] : 1;
        if (b->want[i] >= WANT_LOGITS) {
            p->logits.insert(p->logits.end(), found.begin() + (size_t)r * c->work.vocab, found.begin() + (size_t)(r + n) * c->work.vocab);
            p->rows += n;
        }
        r += n;
    }
    return true;
}

bool submit(Cuda *c, const Batch *b, Pending *p, Error *e) {
    int tokens = b->first[b->seqs], tiles;
    bool few = tokens <= c->most_few, filtered = false, penalized = false;
    size_t bytes;
    Step staged = step_at(p->step, few ? FEW : c->limits.max_tokens, &bytes);
    int rows = fill_step(staged, b, c->tile, &tiles);
    for (int i = 0; i < b->seqs; i++) {
        const Sampling &how = b->sampling[i];
        penalized |= how.penalty != 1;
        filtered |= how.temperature > 0 && (how.top_k > 0 || how.top_p < 1 || how.min_p > 0);
    }
    const Step &s = few ? c->few : c->many;
    size_t pages = (size_t)b->seqs * b->max_pages;
    if (!few) {
        CUDA(cudaMemcpyAsync(s.how, p->step, bytes + pages * sizeof(int), cudaMemcpyHostToDevice, c->stream));
    } else if (c->sent.size() != pages || memcmp(c->sent.data(), b->page, pages * sizeof(int))) { /* a page is new every PAGE tokens only */
        c->sent.assign(b->page, b->page + pages);
        CUDA(cudaMemcpyAsync(s.page, staged.page, pages * sizeof(int), cudaMemcpyHostToDevice, c->stream));
    }
    c->timed = few && rows;
    if (tokens == 1 && c->card.layer[0].router.rows) c->read_alone += (uint64_t)c->work.n_layers * c->work.top_k;
    p->want.assign(b->want, b->want + b->seqs);
    p->rows = 0;
    if (few ? !forward_few(c, p, b, tokens, rows, e) : !forward_many(c, s, b, tokens, tiles, e)) return false;
    if (rows && !heads(c, s, b, tokens, rows, filtered, penalized, p, e)) return false;
    CUDA(cudaEventRecord(p->done, c->stream));
    return true;
}

/* Where the buffers of a step lie, from `base` on; returns their size. With base NULL only that. */
size_t plan_work(Cuda *c, uint8_t *base) {
    const Model &m = c->model;
    const Block &b = c->card.layer[0];
    Work &w = c->work;
    size_t used = 0, T = c->limits.max_tokens, choices = T * m.top_k, pages = c->max_pages;
    size_t element = b.qkv.type == F32 ? 4 : 2, act = b.down.type == F32 ? 4 : 2;
    auto take = [&](auto *&to, size_t n, size_t size) {
        to = (std::remove_reference_t<decltype(to)>)(base ? base + used : NULL);
        used += (n * size + 255) / 256 * 256;
    };
    w.attn_pitch = b.o.stride;
    w.act_pitch = b.down.stride;
    w.normed_pitch = (m.dim + 63) / 64 * 64;
    take(w.turn, (size_t)c->limits.context * (m.head_dim / 2), sizeof(float2));
    take(c->product_room, PRODUCT_ROOM, 1);
    take(w.x, T * m.dim, 4);
    take(w.expert_sum, (size_t)FEW * m.dim, 8);
    take(w.q, T * m.n_heads * m.head_dim, element);
    take(w.attn, T * w.attn_pitch, element);
    take(w.act_out, choices * w.act_pitch, act);
    take(w.qkv, T * std::max(b.qkv.rows, b.router.rows ? 0 : b.up.rows), 4);
    take(w.down, b.router.rows ? choices * m.dim : 0, 4);
    take(w.normed, T * w.normed_pitch, element);
    auto take_normed = [&](int which, const Matrix &next) { take(w.normed_for[which], (size_t)FEW * next.stride, next.type == F32 ? 4 : 2); };
    take_normed(FOR_QKV, b.qkv);
    take_normed(FOR_UP, b.up);
    take_normed(FOR_HEAD, c->card.head);
    take(w.told, told_size(w), 4);
    take(w.router_sum, (size_t)m.n_layers * FEW * m.n_experts, 8);
    take(w.square, (size_t)m.n_layers * FEW * c->sms, 8);
    take(w.input_square, (size_t)FEW * (m.n_layers + 1) * MOST_WARPS, 8);
    take(w.barrier, 1, 8);
    take(w.experts_read, 1, 8);
    take(w.ended, m.n_layers * PHASES + 2, 8);
    take(c->layers, m.n_layers, sizeof(Block));
    take(w.expert, choices, 4);
    take(w.weight, choices, 4);
    take(w.partial, partial_size(w), 4);
    take(w.list, (size_t)m.n_experts * T, 4);
    take(w.listed, m.n_experts, 4);
    take(w.logits, (size_t)FEW * m.vocab, 4);
    take(w.seen, (size_t)FEW * ((m.vocab + 31) / 32), 4);
    take(w.floor, FEW, 4);
    take(w.best, FEW, 8);
    take(w.drawing, FEW, 4);
    take(w.drawn, c->limits.max_seqs, 4);
    uint8_t *few, *many;
    step_at(NULL, c->limits.max_tokens, &c->many_bytes);
    take(few, Posted::BYTES + FEW * pages * 4, 1);
    take(many, c->many_bytes + c->limits.max_seqs * pages * 4, 1);
    size_t bytes;
    c->few = step_at(few, FEW, &bytes);
    assert(bytes == Posted::BYTES);
    c->many = step_at(many, c->limits.max_tokens, &c->many_bytes);
    return used;
}

/* The card that was asked for, if this build has code for it. */
bool choose_card(Cuda *c, Error *e) {
    int cards;
    cudaError_t error = cudaGetDeviceCount(&cards);
    if (error || !cards)
        return fail(e, NO_GPU, "no NVIDIA GPU can be used here (%s); infer runs on GPUs only, infer-reference is its plain C twin for tests",
                    error ? cudaGetErrorString(error) : "none was found");
    if (c->limits.gpu >= cards) return fail(e, NO_GPU, "there is no GPU %d here, only 0 to %d: choose with --gpu", c->limits.gpu, cards - 1);
    if ((error = cudaSetDevice(c->limits.gpu))) return fail(e, NO_GPU, "GPU %d cannot be used: %s", c->limits.gpu, cudaGetErrorString(error));
    cudaDeviceProp properties;
    cudaFuncAttributes code;
    CUDA(cudaGetDeviceProperties(&properties, c->limits.gpu));
    if (cudaFuncGetAttributes(&code, embed)) {
        cudaGetLastError();
        return fail(e, NO_GPU, "this build has no code for GPU %d (%s, compute capability %d.%d): make clean && make CUDA_ARCH=sm_%d%d%s", c->limits.gpu,
                    properties.name, properties.major, properties.minor, properties.major, properties.minor, properties.major == 9 ? "a" : "");
    }
    c->sms = std::min(properties.multiProcessorCount, MOST_COUNTED);
    CUDA(cudaDeviceGetAttribute(&c->shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, c->limits.gpu));
    c->launch_arch = properties.major >= 9 ? code.ptxVersion : 0;
    CUDA(cudaMemcpyFromSymbol(&c->wgmma, has_wgmma, sizeof c->wgmma));
    return true;
}

/* How many tokens the kernels' shared memory is enough for. */
bool lay_out(Cuda *c, Error *e) {
    const Model &m = c->model;
    int route = m.layer[0].router.rows ? RouteShape<bf16, 8>::shared(m.dim, m.n_experts) : 0; /* that of F32 is no larger */
    for (c->most_few = 0; c->most_few < FEW; c->most_few++) {
        Layout k = layout_for(c->work, c->card, c->most_few + 1, c->sms, c->shared);
        if (k.bytes > c->shared) break;
        c->layout[c->most_few + 1] = k;
    }
    if (c->most_few && route <= c->shared) return true;
    return fail(e, NO_ROOM, "this model's rows are too wide for GPU %d, which has %d KB of shared memory for a block", c->limits.gpu, c->shared >> 10);
}

/* Takes all memory: weights, work space, and as many pages of the `wanted` ones as fit. */
bool take_memory(Cuda *c, int *pages, Error *e) {
    const Model &m = c->model;
    size_t weights, work, free, total, page = page_size(c->work) * sizeof(bf16) + PAGE * sizeof(int);
    const size_t reserve = 256 << 20; /* CUDA's and cuBLAS's own */
    c->max_pages = (c->limits.context + PAGE - 1) / PAGE;
    if (!card_plan(&c->card, &m, NULL, &weights, e)) return false;
    c->weights_bytes = weights;
    work = plan_work(c, NULL);
    if (!lay_out(c, e)) return false;
    CUDA(cudaMemGetInfo(&free, &total));
    if (free < weights + work + reserve + page) {
        char a[24], b[24], d[24];
        return fail(e, NO_ROOM,
                    "the model needs %s for its weights and %s to work, GPU %d has %s free: free memory of other programs, or choose another GPU with --gpu",
                    size_text(weights, a), size_text(work + reserve, b), c->limits.gpu, size_text(free, d));
    }
    *pages = (int)std::min<size_t>(*pages, (free - weights - work - reserve) / page);
    CUDA(cudaMalloc(&c->weights, weights));
    CUDA(cudaMalloc(&c->room, work));
    CUDA(cudaMalloc(&c->cache, *pages * page));
    CUDA(cudaMemset(c->weights, 0, weights));
    CUDA(cudaMemset(c->room, 0, work));
    CUDA(cudaMemset(c->cache, 0, *pages * page));
    if (!card_plan(&c->card, &m, c->weights, &weights, e)) return false;
    plan_work(c, c->room);
    CUDA(cudaMemset(c->work.told, 0xFF, told_size(c->work) * sizeof *c->work.told)); /* UNWRITTEN */
    CUDA(cudaMemset(c->work.partial, 0xFF, partial_size(c->work) * sizeof *c->work.partial));
    CUDA(cudaMemcpy(c->layers, c->card.layer, m.n_layers * sizeof(Block), cudaMemcpyHostToDevice));
    c->work.act_lift = c->card.layer[0].down.type == MXFP4 ? Codec<MXFP4>::LIFT : 1;
    c->work.cache = (bf16 *)c->cache;
    c->work.page_token = (int *)(c->cache + *pages * (page - PAGE * sizeof(int)));
    if (c->limits.where) {
        char used[24], all[24];
        CUDA(cudaMemGetInfo(&free, &total));
        snprintf(c->limits.where, 64, "GPU %d (%s of %s)", c->limits.gpu, size_text(total - free, used), size_text(total, all));
    }
    return true;
}

bool prepare(Cuda *c, int *pages, Error *e) {
    const Model &m = c->model;
    float *inv_freq;
    if (!choose_card(c, e)) return false;
    if (m.top_k > 32) return fail(e, BAD_MODEL, "%d experts a token are more than the 32 that a warp can choose", m.top_k);
    if ((m.n_heads + 2 * m.n_kv_heads) * m.head_dim % GROUP) return fail(e, BAD_MODEL, "the rows of query, key and value are not a multiple of %d", GROUP);
    if (m.dim % 4) return fail(e, BAD_MODEL, "a hidden size of %d is not a multiple of 4", m.dim);
    if (m.head_dim > CONSUMERS) return fail(e, BAD_MODEL, "a head size of %d is more than the %d that attention can do", m.head_dim, CONSUMERS);
    Work &w = c->work;
    w.dim = m.dim, w.ffn_dim = m.ffn_dim, w.vocab = m.vocab, w.n_layers = m.n_layers, w.n_heads = m.n_heads, w.n_kv_heads = m.n_kv_heads;
    w.head_dim = m.head_dim, w.n_experts = m.n_experts, w.top_k = m.top_k, w.eps = m.eps, w.act = m.act, w.act_limit = m.act_limit;
    c->tile = c->wgmma && tiled(w) ? AttentionShape<64>::ROWS / (m.n_heads / m.n_kv_heads) : 16;
    if (!take_memory(c, pages, e)) return false;
    CUDA(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    for (Pending &p : c->pending) {
        CUDA(cudaMallocHost(&p.step, std::max<size_t>(c->many_bytes, Posted::BYTES) + (size_t)std::max(FEW, c->limits.max_seqs) * c->max_pages * sizeof(int)));
        CUDA(cudaMallocHost(&p.token, c->limits.max_seqs * sizeof(int)));
        CUDA(cudaEventCreateWithFlags(&p.done, cudaEventDisableTiming));
    }
    CUDA(cudaMalloc(&inv_freq, m.head_dim / 2 * sizeof(float)));
    CUDA(cudaMemcpy(inv_freq, m.inv_freq, m.head_dim / 2 * sizeof(float), cudaMemcpyHostToDevice));
    fill_turns<<<c->limits.context, 32>>>((float2 *)w.turn, inv_freq, m.head_dim / 2, m.rope_scale);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(inv_freq));
    if (cublasLtCreate(&c->blas)) return fail(e, GPU_FAULT, "cuBLAS cannot be used; is its library installed whole?");
    if (!card_load(&c->card, &m, c->limits.progress, e)) return false;
    return true;
}

} /* namespace */

static void cuda_close(void *state) {
    Cuda *c = (Cuda *)state;
    if (c->stream) cudaStreamSynchronize(c->stream);
    for (Pending &p : c->pending) {
        cudaFreeHost(p.step);
        cudaFreeHost(p.token);
        if (p.done) cudaEventDestroy(p.done);
    }
    if (c->blas) cublasLtDestroy(c->blas);
    if (c->stream) cudaStreamDestroy(c->stream);
    for (uint8_t *p : {c->weights, c->room, c->cache}) cudaFree(p);
    free(c->card.layer);
    delete c;
}

static void *cuda_open(const Model *m, const Limits *limits, int *pages, Error *e) {
    Cuda *c = new Cuda;
    c->model = *m;
    c->limits = *limits;
    c->limits.max_tokens = std::max(FEW, limits->max_tokens);
    c->card.layer = (Block *)calloc(m->n_layers, sizeof(Block));
    if (prepare(c, pages, e)) return c;
    cuda_close(c);
    return NULL;
}

static bool cuda_submit(void *state, const Batch *b, Error *e) {
    Cuda *c = (Cuda *)state;
    if (c->outstanding == 2) return fail(e, FAILED, "submit: two steps are outstanding; collect one");
    if (!submit(c, b, &c->pending[c->turn % 3], e)) return false;
    c->turn++;
    c->outstanding++;
    return true;
}

static bool cuda_collect(void *state, Result *result, Error *e) {
    Cuda *c = (Cuda *)state;
    if (!c->outstanding) return fail(e, FAILED, "collect: no step is outstanding");
    Pending &p = c->pending[(c->turn - c->outstanding) % 3];
    CUDA(cudaEventSynchronize(p.done));
    c->outstanding--;
    for (size_t i = 0; i < p.want.size(); i++)
        if (p.want[i] == WANT_NOTHING) p.token[i] = DREW_NOTHING;
    *result = {p.token, p.logits.data(), p.rows};
    return true;
}

static void cuda_describe(Devices *d) {
    *d = {};
    d->built = CUDA_ARCHES;
    cudaDriverGetVersion(&d->driver);
    cudaRuntimeGetVersion(&d->runtime);
    cudaError_t error = cudaGetDeviceCount(&d->gpus);
    if (error || !d->gpus) {
        snprintf(d->problem, sizeof d->problem, "%s", error ? cudaGetErrorString(error) : "none was found");
        d->gpus = 0;
    }
    d->gpus = std::min<int>(d->gpus, MOST_GPUS);
    for (int i = 0; i < d->gpus; i++) {
        cudaDeviceProp properties;
        cudaFuncAttributes code;
        size_t free = 0, total = 0;
        auto &g = d->gpu[i];
        if (cudaSetDevice(i) || cudaGetDeviceProperties(&properties, i)) continue;
        snprintf(g.name, sizeof g.name, "%s", properties.name);
        g.major = properties.major, g.minor = properties.minor;
        g.usable = !cudaFuncGetAttributes(&code, embed) && !cudaMemGetInfo(&free, &total);
        g.free = free, g.total = total;
        cudaGetLastError();
    }
}

static double cuda_flat_read(void *state, uint64_t bytes) {
    Cuda *c = (Cuda *)state;
    uint64_t once = std::min<uint64_t>(bytes, c->weights_bytes) / 16 * 16;
    const int times = 9;
    float ms[times];
    cudaEvent_t begin, end;
    if (!once || cudaEventCreate(&begin)) return 0;
    if (cudaEventCreate(&end)) return cudaEventDestroy(begin), 0;
    for (float &t : ms) {
        cudaEventRecord(begin, c->stream);
        read_words<<<c->sms * 4, 512, 0, c->stream>>>((const uint4 *)c->weights, once / 16, (uint32_t *)c->work.drawn);
        cudaEventRecord(end, c->stream);
        t = cudaEventSynchronize(end) || cudaEventElapsedTime(&t, begin, end) ? 0 : t;
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(ms, ms + times);
    return ms[times / 2] / 1e3 * ((double)bytes / once);
}

static int cuda_phases(void *state, Phase *phase) {
    static const char *name[PHASES + 1] = {"qkv", "attention", "output", "up", "down", "head"};
    Cuda *c = (Cuda *)state;
    int layers = c->work.n_layers * PHASES;
    std::vector<unsigned long long> ended(layers + 2);
    static_assert(PHASES + 1 <= MOST_PHASES, "infer.h");
    if (!c->timed || cudaMemcpy(ended.data(), c->work.ended, ended.size() * 8, cudaMemcpyDeviceToHost)) return 0;
    for (int i = 0; i <= PHASES; i++) phase[i] = {name[i], 0};
    for (int i = 0; i <= layers; i++) phase[i == layers ? PHASES : i % PHASES].seconds += (double)(ended[i + 1] - ended[i]) / 1e9;
    return PHASES + 1;
}

static uint64_t cuda_experts_read(void *state) {
    Cuda *c = (Cuda *)state;
    unsigned long long together = 0;
    return cudaMemcpy(&together, c->work.experts_read, sizeof together, cudaMemcpyDeviceToHost) ? 0 : c->read_alone + together;
}

const Backend cuda = {"cuda", 8192, cuda_open, cuda_submit, cuda_collect, cuda_close, cuda_flat_read, cuda_phases, cuda_experts_read, cuda_describe};
