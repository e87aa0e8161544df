/* hopper.cuh: the host's side of the kernels for Hopper: buffers, launches, taps. */
#pragma once

struct Decode {
    DecodeWork work;
    Step step;                     /* of decode, on the card; it keeps its pages until they change */
    std::vector<int> pages;        /* that step.page holds */
    DecodeLayer *layers;           /* (n_layers) on the card */
    float *columns;                /* (n_layers, dim, n_experts): see DecodeLayer */
    Layout layout[MAX_DECODE + 1]; /* by tokens */
};

void open_hopper(Gpu *gpu) {
    int hopper = 0;
    if (cudaMemcpyFromSymbol(&hopper, has_hopper, sizeof hopper) || !hopper) return;
    gpu->fast->wgmma = true;
    const Link &k = gpu->work.link;
    gpu->has_decode = (k.cards == 1 || (k.cards <= DECODE_CARDS && k.peers)) &&
                      has_gpt_oss_shapes(gpu->model, k.cards) && gpu->sms >= MIN_SMS / k.cards && gpu->sms <= MAX_COUNT;
    if (gpu->has_decode) gpu->fast->decode = new Decode;
}
void close_hopper(Gpu *gpu) { delete gpu->fast->decode; }

/* Lays out the buffers. */
void plan_decode(Gpu *gpu, Plan *p) {
    Decode *f = gpu->fast->decode;
    DecodeWork &w = f->work;
    const size_t layers = gpu->model.n_layers, dim = gpu->model.dim, experts = gpu->model.n_experts;
    (Work &)w = gpu->work;
    for (void *&normed : w.normed_for) normed = p->take<bf16>(MAX_DECODE * dim);
    w.layer_buffers = p->take<float>(layer_buffers_size(w));
    w.split_states = p->take<float>(split_states_size(w));
    w.expert_sum = p->take<unsigned long long>(MAX_DECODE * dim);
    w.router_sum = p->take<unsigned long long>(layers * MAX_DECODE * experts);
    w.output_square = p->take<unsigned long long>(layers * MAX_DECODE * gpu->sms);
    w.input_square = p->take<unsigned long long>(MAX_DECODE * (layers + 1) * MAX_WARPS);
    w.barrier = p->take<unsigned long long>(1);
    f->layers = p->take<DecodeLayer>(layers);
    f->columns = p->take<float>(layers * dim * experts);
    f->step = step_at(p->take<uint8_t>(StepArgument::BYTES + MAX_DECODE * gpu->max_pages * sizeof(int)), MAX_DECODE);
}

/* The router's matrix times the norm before it, transposed. A block a column. */
__global__ void fill_columns(float *to, Matrix router, const float *norm) {
    for (int e = threadIdx.x; e < router.rows; e += blockDim.x)
        to[(size_t)blockIdx.x * router.rows + e] =
            (float)((const bf16 *)router.data)[(size_t)e * router.stride + blockIdx.x] * norm[blockIdx.x];
}

template <int cards> cudaError_t launch_decode_step_of(const Pass *a, int first, int last) {
    const Decode *f = a->gpu->fast->decode;
    const DeviceModel &device = a->gpu->device;
    const Layout &k = f->layout[a->tokens];
    auto kernel = a->tokens == 1   ? decode_step<1, cards>
                  : a->tokens <= 4 ? decode_step<4, cards>
                  : a->tokens <= 8 ? decode_step<8, cards>
                                   : decode_step<MAX_DECODE, cards>;
    return launch(a->gpu, kernel, a->gpu->sms, THREADS, k.bytes, f->work, f->step, f->layers, device.head, device.norm,
                  k, a->tokens, a->rows, first, last);
}

cudaError_t launch_decode_step(const Pass *a, int first, int last) {
    if constexpr (DECODE_CARDS > 1)
        if (a->w.link.cards > 1) return launch_decode_step_of<DECODE_CARDS>(a, first, last);
    return launch_decode_step_of<1>(a, first, last);
}

bool prepare_decode(Gpu *gpu, Error *e) {
    Decode *f = gpu->fast->decode;
    DecodeWork &w = f->work;
    (Work &)w = gpu->work, w.first_id = gpu->device.first_id;
    std::vector<DecodeLayer> layers;
    for (const DeviceLayer &l : gpu->device.layer) {
        layers.push_back({l, f->columns + layers.size() * w.dim * w.n_experts});
        fill_columns<<<w.dim, 32, 0, gpu->stream>>>(layers.back().router_columns, l.router, l.ffn_norm);
    }
    for (int n = 1; n <= MAX_DECODE; n++) f->layout[n] = layout_for(w, gpu->device, n, gpu->sms, gpu->shared);
    /* to UNPUBLISHED; the counted and flagged sums begin at 0, as take_memory() left them */
    CUDA(cudaMemsetAsync(w.layer_buffers, 0xFF, layer_buffers_size(w) * sizeof(float), gpu->stream));
    CUDA(cudaMemsetAsync(w.split_states, 0xFF, split_states_size(w) * sizeof(float), gpu->stream));
    CUDA(cudaMemcpyAsync(f->layers, layers.data(), layers.size() * sizeof(DecodeLayer), cudaMemcpyHostToDevice,
                         gpu->stream));
    CUDA(cudaStreamSynchronize(gpu->stream));
    return true;
}

/* ---- decode ---- */

/* Hands out a phase's results to the tap, in the columns' usual order. */
bool tap_phase(const Pass *a, int layer, int kind, Error *e) {
    const DecodeWork &w = a->gpu->fast->decode->work;
    const int n = a->tokens, width = w.n_heads * w.head_dim;
    const LayerBuffers now = layer_buffers(w, n == 1, layer);
    const Rows dealt = {0, 1, w.head_dim / 2};
    auto floats = [&](const char *stage, const float *from) { return tap(a, stage, F32, from, w.dim, n, w.dim, e); };
    switch (kind) {
    case PHASE_QKV:
        return tap(a, "q", BF16, now.q, width, n, width, e, [&](int i) { return dealt.of(i); }) && tap_cache(a, 0, e) &&
               tap_cache(a, 1, e);
    case PHASE_ATTENTION: return tap(a, "attn", BF16, now.attn, w.attn_pitch, n, width, e, Codec<BF16>::place);
    case PHASE_OUTPUT: return floats("attn_residual", now.middle);
    case PHASE_UP: {
        auto choice = [&](int r, int i) { return r * w.top_k + i; };
        auto place = [&](int r, int i) { return (size_t)r * w.act_pitch + i; };
        const int n_choices = n * w.top_k;
        return tap_rows(a, "experts", w.expert, n_choices, n, w.top_k, choice, e) &&
               tap_rows(a, "weights", w.weight, n_choices, n, w.top_k, choice, e) &&
               tap_rows(a, "act", (const bf16 *)now.act, (size_t)n_choices * w.act_pitch, n_choices, w.ffn_dim, place,
                        e, 1 / Codec<MXFP4>::LIFT);
    }
    case PHASE_DOWN: return floats("residual", now.x);
    default: return true;
    }
}

/* A step of at most MAX_DECODE tokens, to the logits of its rows: embedding and one kernel; with a tap, a kernel for
 * each phase. */
bool decode(Pass *a, uint8_t *staged, Error *e) {
    Gpu *gpu = a->gpu;
    Decode *f = gpu->fast->decode;
    const Batch *b = a->batch;
    const size_t pages = (size_t)b->seqs * b->max_pages;
    const int layers = f->work.n_layers * PHASES, all = layers + (a->rows > 0);
    const bool single = a->tokens == 1;
    StepArgument step;
    memcpy(step.word, staged, StepArgument::BYTES);
    if (f->pages.size() != pages ||
        memcmp(f->pages.data(), b->page, pages * sizeof(int))) { /* a sequence gets a page every PAGE tokens only */
        f->pages.assign(b->page, b->page + pages);
        CUDA(cudaMemcpyAsync(f->step.page, step_at(staged, MAX_DECODE).page, pages * sizeof(int),
                             cudaMemcpyHostToDevice, gpu->stream));
    }
    a->s = f->step;
    a->has_logits = true;
    const DeviceLayer &l = gpu->device.layer[0];
    const Next next = {single ? NULL : f->work.normed_for[FOR_QKV], BF16, a->w.dim, l.attn_norm};
    CUDA(launch(gpu, decode_embed, a->tokens, 1024, 0, f->work, a->s, step, gpu->device.embed, gpu->sms, single, next));
    if (!gpu->limits.tap) CUDA(launch_decode_step(a, 0, all));
    for (int phase = 0; phase < all && gpu->limits.tap; phase++) {
        a->w.layer = phase / PHASES;
        CUDA(launch_decode_step(a, phase, phase + 1));
        if (!tap_phase(a, phase / PHASES, phase == layers ? PHASES : phase % PHASES, e)) return false;
    }
    return true;
}

/* ---- prefill ---- */

/* Rows of a tile of attention, each a token and a head; 0 where tiles.cuh computes it: few tokens leave most blocks
 * idle, and this kernel has no cap. */
int wgmma_rows(const Pass *a) {
    if (!a->gpu->fast->wgmma || a->tokens < 256 || a->w.attn_cap) return 0;
    return a->w.head_dim == 64 ? WgmmaAttention<64>::ROWS : a->w.head_dim == 128 ? WgmmaAttention<128>::ROWS : 0;
}
/* Attention of a step's tiles. */
template <int D> cudaError_t launch_attention_wgmma(const Pass *a, const DeviceLayer &l) {
    typedef WgmmaAttention<D> Shape;
    return launch(a->gpu, attention_wgmma<D>, dim3(a->w.n_kv_heads, a->tiles), Shape::THREADS, Shape::SHARED, a->w,
                  a->s, l);
}

/* The max number of choices of a job, in a step of prompts or of many streams; 0 where tiles.cuh computes them: with
 * few tokens each, activations other than bf16, or padded columns. */
int wgmma_job_size(const Pass *a, const DeviceLayer &l) {
    auto can = [](const Matrix &m) {
        return type_for(m) == BF16 && m.cols % (m.type == MXFP4 ? CHUNK / 2 : CHUNK) == 0;
    };
    const int choices = a->tokens * a->w.top_k;
    const bool many = choices >= 32 * a->w.n_experts && choices / CHOICES + a->w.n_experts <= MAX_JOBS;
    return a->gpu->fast->wgmma && many && can(l.up) && can(l.down) ? CHOICES : 0;
}

/* to = x in the order of column_for. A block a token. */
__global__ void __launch_bounds__(256) order_for_wgmma(const bf16 *from, bf16 *to, int pitch, Type type) {
    launch_next();
    wait_previous();
    for (int c = 2 * threadIdx.x; c < pitch; c += 2 * blockDim.x)
        *(uint32_t *)(to + (size_t)blockIdx.x * pitch + column_for(type, c)) =
            *(const uint32_t *)(from + (size_t)blockIdx.x * pitch + c);
}

/* Gate and up of the experts and the activation, from x, or, without x, down. */
template <Type T> cudaError_t launch_experts(const Pass *a, const DeviceLayer &l, const bf16 *x) {
    if constexpr (T != F16) { /* see wgmma_job_size */
        typedef ExpertShape<T> Shape;
        const size_t jobs = a->tokens * a->w.top_k / CHOICES + a->w.n_experts,
                     shared = Shape::SHARED + jobs * sizeof(int);
        return x ? launch(a->gpu, up_wgmma<T>, a->gpu->sms, Shape::THREADS, shared, a->w, l, x)
                 : launch(a->gpu, down_wgmma<T>, a->gpu->sms, Shape::THREADS, shared, a->w, l);
    }
    return cudaErrorNotSupported;
}
/* The products of the experts, to w.down, after route_tokens() with job_size. */
bool experts_wgmma(const Pass *a, const DeviceLayer &l, Error *e) {
    const Work &w = a->w;
    const bf16 *x = (const bf16 *)w.normed;
    if (l.up.type != BF16) {
        bf16 *ordered = (bf16 *)w.down; /* free until down is computed */
        CUDA(launch(a->gpu, order_for_wgmma, a->tokens, 256, 0, x, ordered, w.normed_pitch, l.up.type));
        x = ordered;
    }
    CUDA(with_type(l.up.type, [&](auto type) { return launch_experts<type>(a, l, x); }));
    if (!tap_experts(a, l, e, [&](int i) { return column_for(l.down.type, i); })) return false;
    CUDA(with_type(l.down.type, [&](auto type) { return launch_experts<type>(a, l, nullptr); }));
    return true;
}
