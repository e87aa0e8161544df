/* decode.cuh: a step of at most MAX_DECODE tokens as one persistent kernel. A block stays on each multiprocessor from
 * the first layer to the logits. Its last warp, the producer, keeps a ring of shared memory full with the weights that
 * come next, across the borders of phases, so the memory is seldom idle while the other warps, the consumers, wait for
 * activations. Each weight is read once and in order (an expert's again for more than MAX_CHOICES tokens). With several
 * tokens the producer pauses while a fence is pending at a phase's end (Ring::hold_after_last). It also pauses while
 * its block has a part in attention, except for the pages of a long context.
 *
 * A layer has five phases; on the right each phase's share of a step's time in percent, as an earlier version measured
 * it in block 0 for 1, 4 and 16 tokens of gpt-oss-20b without context:
 *
 *     qkv        query, key and value, RoPE, to the cache                                             14  15  11
 *     attention  over the cache, split when it is long: then pages come through the ring like          1   2   1
 *                weights
 *     output     onto the residual stream; each block's share of the router's logits                  18  11  10
 *     up         router, top-k, gate and up, activation                                               27  40  47
 *     down       onto the residual stream, weighted                                                   14  17  22
 *     head       after the last layer: logits                                                         26  15   9
 *
 * With one token, output includes its wait for attention, and qkv its wait for the slowest block of up and down.
 *
 * RMSNorm is not a phase. The block that finishes a value of the residual stream also stores it times the norm's
 * weight, for the next matrix (Next); the factor 1 / root mean square is ready before that matrix's products are. With
 * a single token each block norms for itself (load_normed), which is faster. */
#pragma once

/* ---- how blocks exchange activations ---- */

/* With several tokens a barrier with a fence stands between the phase that writes activations and the one that reads
 * them. A fence takes long (see Ring::hold_after_last), so a single token's activations are published instead, and
 * readers poll them. They go to LayerBuffers; layers take turns with BUFFERED_LAYERS of them:
 *   - When a block has all of attention's results, every block has published its queries, keys and values, so it has
 *     read all that the layer before published. So phase output unpublishes the buffers of the layer before.
 *   - A fence must pass before another layer publishes there. The producers execute it in the next layer's phase up,
 *     where few copies are in flight because the experts are not known yet. In that phase each block checks that all
 *     producers have done so. So the layer after may publish there: hence three buffers.
 *   - The next step's embed unpublishes the last layer's.
 * With several tokens only the experts' activations are published: phase down then waits for the blocks that have its
 * experts, not for all. They lie in Work's act_out. Phase output unpublishes it. By then all blocks have ended the
 * layer before (they arrived at the barrier before qkv), and none publishes there until all arrive before up. Polling
 * slows the blocks that still have to publish (notebooks/speed.md). So where all blocks read the same values, a few
 * threads of each block first poll a hint: before qkv a barrier, at which blocks arrive a little early, and before
 * output, on one card, one word of each head. */
constexpr int BUFFERED_LAYERS = 3;
static_assert(BUFFERED_LAYERS <= MAX_DECODE, "split_states_of() takes the places of other tokens");
struct LayerBuffers {
    float *x, *middle; /* (tokens, dim) the residual stream after the experts, and after attention */
    void *q;           /* (tokens, n_heads * head_dim); of a single token all rows of qkv: see published_place() */
    void *attn, *act;  /* (tokens, attn_pitch), (tokens * top_k, act_pitch) */
};
/* Floats of one layer's buffers, in which all but x lie together. */
__host__ __device__ inline size_t layer_buffer_size(const DecodeWork &w) {
    return 2 * w.dim + ((w.n_heads + 2 * w.n_kv_heads) * w.head_dim + w.attn_pitch + w.top_k * w.act_pitch) / 2;
}
inline size_t layer_buffers_size(const DecodeWork &w) { return BUFFERED_LAYERS * layer_buffer_size(w); }
/* A layer's buffers; layer -1 is the embedding. A fence stands before the head, so the last layer's x is Work's. */
__host__ __device__ inline LayerBuffers layer_buffers(const DecodeWork &w, bool single, int layer) {
    if (!single) return {w.x, w.x, w.q, w.attn, w.act_out};
    float *x = w.layer_buffers + (layer + BUFFERED_LAYERS) % BUFFERED_LAYERS * layer_buffer_size(w);
    float *middle = x + w.dim;
    bf16 *q = (bf16 *)(middle + w.dim), *attn = q + (w.n_heads + 2 * w.n_kv_heads) * w.head_dim;
    return {layer == w.n_layers - 1 ? w.x : x, middle, q, attn, attn + w.attn_pitch};
}
inline size_t split_states_size(const DecodeWork &w) {
    return (size_t)MAX_DECODE * w.n_kv_heads * DECODE_SPLITS * 8 * (w.head_dim + 2);
}

/* What the next matrix after a norm reads (see DecodeWork::normed_for), and this norm's weights. */
struct Next {
    void *to;
    Type type;
    int stride;
    const float *norm;
};
/* Stores value i of a token's x times the norm's weight. */
__device__ inline void store_normed(const Next &next, int t, int i, float x) {
    store_activation(next.type, (uint8_t *)next.to + (size_t)t * next.stride * 2, i, x);
}

/* Polls this thread's two fours of the first 8 CONSUMERS of n values of x until they are published, 0 past n; returns
 * the sum of their squares. */
__device__ inline float poll_fours(float4 (&value)[2], const float *x, int n) {
    bool there;
    float sum = 0;
    do {
        there = true;
#pragma unroll
        for (int i = 0, c = threadIdx.x * 4; i < 2; i++, c += CONSUMERS * 4) {
            uint4 v = {};
            if (c < n) v = poll((const uint4 *)(x + c));
            there &= max(max(v.x, v.y), max(v.z, v.w)) != UNPUBLISHED;
            value[i] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
        }
    } while (!there && pause());
    for (float4 v : value) sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    return sum;
}

/* The sum of squares of a token's x before a layer, or the head. One block computes it, always in the same order, and
 * publishes each warp's share; readers poll these later. */
__device__ inline unsigned long long *input_square_of(const DecodeWork &w, int t, int layer) {
    return w.input_square + ((size_t)t * (w.n_layers + 1) + layer) * MAX_WARPS;
}
__device__ inline void publish_square(const float *x, int dim, unsigned long long *to, int thread) { /* consumers */
    float sum = 0;
#pragma unroll 2
    for (int i = thread * 4; i < dim; i += CONSUMERS * 4) {
        float4 v = __ldcg((const float4 *)(x + i));
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = warp_sum(sum);
    if (thread % 32 == 0) publish_flagged(to + thread / 32, sum);
}
__device__ inline float poll_square(const unsigned long long *from, int lane) { /* a warp */
    unsigned long long part = 0;
    do part = lane < CONSUMER_WARPS ? poll(from + lane) : FLAG;
    while (!(part >> 32));
    return warp_sum(__uint_as_float((uint32_t)part));
}

/* Where a token's router logit for expert e is summed. All blocks of a single token add to the same few sums at once,
 * so each sector, four sums, has the room of SECTORS_APART. Several tokens have many sectors anyway, and reading is
 * quicker if they lie together. */
constexpr int SECTORS_APART = 8;
static_assert(SECTORS_APART <= MAX_DECODE, "the room of the other tokens");
__device__ inline unsigned long long *router_sum_of(const DecodeWork &w, bool single, int t, int layer, int e) {
    unsigned long long *sums =
        w.router_sum + ((size_t)t * w.n_layers + layer) * w.n_experts * (single ? SECTORS_APART : 1);
    return sums + (single ? e / 4 * 4 * SECTORS_APART + e % 4 : e);
}

/* ---- the kernels ---- */

/* Begins a step: x (tokens, dim) = the tokens' rows of the embedding, also for `next`, if there is one. The page
 * remembers the token. The step comes as an argument, because reading the host's memory takes long; the first block
 * stores it where the other kernels read it. All blocks clear what `blocks` blocks of decode_step add up or flag;
 * with a single token they also unpublish the last layer's buffers. A block a token. */
__global__ void __launch_bounds__(1024) decode_embed(DecodeWork w, Step s, const __grid_constant__ StepArgument step,
                                                     Matrix table, int blocks, bool single, Next next) {
#if HOPPER
    launch_next();
    float *to = layer_buffers(w, single, -1).x;
    int t = blockIdx.x, words = t ? 0 : StepArgument::BYTES / 16;
    wait_previous();
    if (threadIdx.x < words) ((uint4 *)s.how)[threadIdx.x] = step.word[threadIdx.x];
    int4 mine = step.token(t);
    auto clear = [&](unsigned long long *sum, int n) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) sum[i] = 0;
    };
    for (int i = threadIdx.x; i < w.n_layers * w.n_experts; i += blockDim.x)
        *router_sum_of(w, gridDim.x == 1, t, i / w.n_experts, i % w.n_experts) = 0;
    clear(w.output_square + (size_t)t * w.n_layers * blocks, w.n_layers * blocks);
    clear(input_square_of(w, t, 0), next.to ? (w.n_layers + 1) * MAX_WARPS : 0);
    if (single)
        unpublish(layer_buffers(w, true, w.n_layers - 1).middle, layer_buffer_size(w) - w.dim, threadIdx.x, blockDim.x);
    int token = mine.x < 0 ? max(w.drawn[mine.y], 0) : mine.x; /* after a NaN the step is void */
    if (threadIdx.x == 0) w.page_token[mine.z] = token;
    for (int i = threadIdx.x * 4; i < w.dim; i += blockDim.x * 4) {
        const bf16 *from = (const bf16 *)table.data + (size_t)token * table.stride + i;
        float x[4];
        for (int j = 0; j < 4; j++) x[j] = (float)from[j];
        *(float4 *)(to + (size_t)t * w.dim + i) = make_float4(x[0], x[1], x[2], x[3]);
        for (int j = 0; j < 4 && next.to; j++) store_normed(next, t, i + j, x[j] * next.norm[i + j]);
    }
#endif
}

enum { PHASE_QKV, PHASE_ATTENTION, PHASE_OUTPUT, PHASE_UP, PHASE_DOWN, PHASES };

/* A block at work on phases first to last - 1 of a step; phase n_layers * PHASES is the head. All warps call each
 * phase's function: the consumers with producing = false, the producer with true, to do only its part. A phase reads
 * what others wrote after wait_phase(), or polls it. max_tokens, cards: see decode_step(). */
template <bool producing, int max_tokens, int cards> struct DecodeBlock {
    static constexpr bool single = max_tokens == 1;
    static constexpr int SPARE = CONSUMERS - 1; /* the consumer that has least other work */
    DecodeWork w;
    const Step &s;
    const Layout &k;
    uint8_t *memory; /* shared */
    int tokens, first, last, phase, block = blockIdx.x, blocks = gridDim.x;
    Ring ring;

    __device__ DecodeBlock(const DecodeWork &w, const Step &s, const Layout &k, uint8_t *memory, int tokens, int first,
                           int last)
        : w(w), s(s), k(k), memory(memory), tokens(tokens), first(first), last(last), phase(first), ring(k, memory) {}
    /* Before the first phase: all threads of the block call it. It may read w.barrier before wait_previous(), because
     * decode_step, which changes it, never calls launch_next(). */
    __device__ void init() {
        if (ring.thread == 0) {
            *at<unsigned long long>(k.barrier_base) =
                (*(volatile unsigned long long *)w.barrier / gridDim.x - barriers_up_to(first)) * gridDim.x;
            gate(FREE).init(CONSUMERS); /* of the layer before */
            gate(ROUTED).init(CONSUMERS);
            gate(SUMMED).init(32); /* the producer arrives */
            gate(CHOSEN).init(32);
            ring.hold->init(1);
        }
        if (ring.thread < k.stages) ring.full[ring.thread].init(1), ring.empty[ring.thread].init(CONSUMERS);
        if (ring.thread < 32 && single) { /* its experts cost the same */
            if (ring.thread <= w.top_k) active().cost[ring.thread] = ring.thread;
            __syncwarp();
            if (ring.thread < 4) deal_tiles(w.top_k, ring.thread);
        }
        Barrier::fence_init();
        __syncthreads();
    }
    /* What the consumers need to know about the tokens in all phases. */
    __device__ void load_positions() {
        int half = w.head_dim / 2;
        if (producing) return;
        wait_previous();
#pragma unroll 1
        for (int t = ring.thread / 32; t < tokens; t += CONSUMER_WARPS) {
            int p = s.position[t];
#pragma unroll 1
            for (int i = ring.thread % 32; i < half; i += 32)
                at<float2>(k.cos_sin)[t * half + i] = w.cos_sin[0][(size_t)p * half + i];
            at<int>(k.position)[t] = p, at<int>(k.table)[t] = s.seq[t] * s.header[0];
            at<int>(k.page)[t] = page_of(s, s.seq[t], p);
        }
        sync_consumers();
    }
    template <typename U> __device__ U *at(int offset) const { return (U *)(memory + offset); }
    __device__ LayerBuffers buffers(int layer) const {
        asm volatile("" : "+r"(layer)); /* so that addresses are computed where they are used */
        return layer_buffers(w, single, layer);
    }
    /* Writes a value for other blocks: published, or for readers after a fence. */
    template <bool PUBLISH = single, typename V> __device__ void write(V *to, V x) const {
        if constexpr (PUBLISH)
            publish(to, x);
        else
            *to = x;
    }
    /* This block's share of unpublish(): blocks take turns by warps. */
    __device__ void unpublish_share(void *floats, int n) const {
        unpublish(floats, n, (ring.thread / 32 * blocks + block) * 32 + ring.thread % 32, CONSUMERS * blocks);
    }
    /* Where a single token's rows r and r + 1 of qkv lie in LayerBuffers::q: in order, except pairs of a head's values,
     * which lie as replace_key() wants them. */
    __device__ int published_place(int r) const {
        int d = w.head_dim, i = r % d;
        return r < (w.n_heads + w.n_kv_heads) * d ? r : r - i + i % 8 / 2 * (d / 4) + i / 8 * 2;
    }
    /* A block has every `blocks`-th tile of a matrix. Returns how many; which one is number i; which row of the matrix
     * is row i of them. */
    __device__ int tiles_of_block(int tiles) const { return (tiles - block + blocks - 1) / blocks; }
    __device__ int tile_of_block(int i) const { return block + i * blocks; }
    template <Type T> __device__ int row_of_block(int i) const {
        return tile_of_block(i / Codec<T>::ROWS) * Codec<T>::ROWS + i % Codec<T>::ROWS;
    }
    /* Called at the start of a phase, and of a round. It hides the numbers of thread, block and blocks from the
     * optimizer, which would otherwise compute expressions of them for all phases at once, and spill the results. */
    __device__ void launder() {
        asm volatile("" : "+r"(ring.thread), "+r"(block), "+r"(blocks));
        __builtin_assume(ring.thread >= 0); /* so that a division by 32 is a shift */
    }

    /* ---- phases and barriers ---- */

    /* What precedes a phase. NONE: nothing, because its values are polled. HINT: a barrier that only says when to start
     * polling. PRODUCER_FENCE: a barrier whose fence the producers execute (route_tokens). FENCE: a barrier with a
     * fence of each block. */
    enum Sync { NONE, HINT, PRODUCER_FENCE, FENCE };
    __device__ static constexpr Sync sync_of(int kind) { /* PHASES: of the head */
        if (single && kind < PHASES) return kind == PHASE_QKV ? HINT : kind == PHASE_UP ? PRODUCER_FENCE : NONE;
        return !single && kind == PHASE_DOWN ? NONE : FENCE;
    }
    __device__ Sync sync_before(int phase) const {
        return sync_of(phase == w.n_layers * PHASES ? PHASES : phase % PHASES);
    }
    /* How many barriers stand before phases 1 to `phase`. */
    __device__ int barriers_up_to(int phase) const {
        int layers = phase / PHASES, ups = (phase + PHASES - PHASE_UP) / PHASES,
            downs = (phase + PHASES - PHASE_DOWN) / PHASES;
        return single ? layers + ups : phase - downs;
    }
    /* A thread arrives at a barrier for its block; one waits until all blocks have. */
    __device__ void arrive() const {
        asm volatile("red.relaxed.gpu.global.add.u64 [%0],1;" ::"l"(w.barrier) : "memory");
    }
    __device__ void wait_for_blocks() const {
        int here = phase;
        asm volatile("" : "+r"(here)); /* so that the target is computed here, not ahead */
        unsigned long long target =
            *at<unsigned long long>(k.barrier_base) + (unsigned long long)barriers_up_to(here) * blocks;
        const bool acquire = !single || sync_before(here) >= PRODUCER_FENCE;
        while ((acquire ? poll_acquire(w.barrier) : poll(w.barrier)) < target) pause();
    }
    /* The consumers wait until all blocks have ended the phase before this one, or, for a HINT, are about to. */
    __device__ void wait_phase() {
        if (phase == first) return wait_previous();
        if (sync_before(phase) == NONE) return;
        if (ring.thread == 0) wait_for_blocks();
        sync_consumers();
    }
    /* A single token never holds: only one of its fences is waited for, the one before the head. */
    __device__ void hold_after_last(bool any) {
        if (!single) ring.hold_after_last(any);
    }
    /* A gate opens once a layer, so its parity is that of the layers since this launch. */
    __device__ Barrier &gate(int i) const { return at<Barrier>(k.gates)[i]; }
    __device__ void wait_at(int i) const { gate(i).wait((w.layer - first / PHASES) % 2); }
    __device__ void end_phase() {
        phase++;
        if (producing) return;
        if (phase == last) return ring.resume(); /* the producer may not have started its last copy yet */
        const Sync next = sync_before(phase);
        if (next == HINT && ring.thread == SPARE) arrive(); /* while others add up the last tiles' sums */
        sync_consumers();
        if (next != FENCE) return;
        if (ring.thread == 0) asm volatile("red.release.gpu.global.add.u64 [%0],1;" ::"l"(w.barrier) : "memory");
        if (phase % PHASES != PHASE_ATTENTION) ring.resume(); /* there only blocks without a part resume */
    }

    /* ---- products ---- */

    /* Tiles times rows of activations: tile_data(i) is where tile i begins; store(tile, pair of rows, row of x, a, b)
     * receives the results. NORMED: x is rows of tokens, and k.scale has each one's RMSNorm factor by then. */
    template <Type T, bool NORMED = false, class Data, class Store>
    __device__ void product(const ShapedMatrix &m, int tiles, const Activations &x, Data tile_data, Store store) {
        if (producing) {
            ring.produce<T>(m, tiles * m.parts, [&](int i, int &part) {
                part = i % m.parts;
                return tile_data(i / m.parts);
            });
            return;
        }
        if constexpr (single || T == BF16) {
            multiply<T, max_tokens / 4, NORMED>(m, tiles, x, store);
        } else {
            static_assert(MAX_CHOICES <= 8, "experts come in two quads");
            if (x.n == 1)
                multiply<T, 0, NORMED>(m, tiles, x, store);
            else if (max_tokens <= 4 || x.n <= 4)
                multiply<T, 1, NORMED>(m, tiles, x, store);
            else if constexpr (max_tokens > 4)
                multiply<T, 2, NORMED>(m, tiles, x, store);
        }
    }
    /* Multiplies in rounds: a round has as many tiles as there is room for their sums. If there are several rounds, the
     * two halves of the room take turns, so that warps that are done with a round can begin the next. */
    template <Type T, int QUADS, bool NORMED, class Store>
    __device__ void multiply(const ShapedMatrix &m, int tiles, const Activations &rows, Store store) {
        constexpr int ROWS = Codec<T>::ROWS;
        int n = single ? 1 : rows.n, stride = n * ROWS, tile_sums = CONSUMER_WARPS * stride;
        int inverse = 65536 / n + 1; /* to divide by n: exact below 65536 / n */
        Fragments<T, QUADS> fragments;
        ring.load_fragments<T, QUADS>(m, rows, fragments);
        int round = (tiles * tile_sums > k.sum_room ? k.sum_room / 2 : k.sum_room) / tile_sums;
#pragma unroll 1
        for (int done = 0, half = 0; done < tiles; done += round, half ^= 1) {
            launder();
            float *sums = at<float>(k.sums) + half * (k.sum_room / 2), *mine = sums + ring.thread / 32 * stride;
            mine += Codec<T>::template Sum<QUADS>::first_sum(ring.thread % 32);
            int now = min(round, tiles - done);
#pragma unroll 1
            for (int i = 0; i < now; i++, mine += tile_sums) ring.multiply_tile<T, QUADS>(m, fragments, n, mine);
            ring.hold_if(done + now == tiles);
            copies_done<0>(); /* of biases */
#pragma unroll 1
            for (int i = ring.thread / 32; i < n && NORMED && !single && done == 0; i += CONSUMER_WARPS)
                set_scale(i, poll_square(input_square_of(w, i, w.layer), ring.thread % 32));
            sync_consumers();
#pragma unroll 1
            for (int i = ring.thread; i < now * (ROWS / 2) * n; i += CONSUMERS) {
                int p = i % (ROWS / 2), result = i / (ROWS / 2);
                int tile = single ? result : result * inverse >> 16, row = result - tile * n;
                float2 sum = warps_sum(sums + tile * tile_sums + row * ROWS + 2 * p, stride);
                store(done + tile, p, row, sum.x, sum.y);
            }
        }
    }
    /* The sum over warps for one token and two rows of a tile: sums (CONSUMER_WARPS, stride). */
    __device__ float2 warps_sum(const float *sums, int stride) const {
        float2 sum = {};
#pragma unroll
        for (int i = 0; i < CONSUMER_WARPS; i++) {
            float2 x = *(const float2 *)(sums + i * stride);
            sum.x += x.x, sum.y += x.y;
        }
        return sum;
    }
    __device__ void set_scale(int row, float square) { /* a warp */
        if (ring.thread % 32 == 0) at<float>(k.scale)[row] = rms_factor(w, square);
    }
    /* A single token's x times the norm's weights, to k.x. If SCALED, its RMSNorm factor goes to k.scale, where it is
     * after the next barrier. The weights are loaded before wait(). */
    template <Type T, bool SCALED, class Wait>
    __device__ auto load_normed(const ShapedMatrix &m, const float *weight, const float *x, const int *index,
                                Wait wait) {
        constexpr int EACH = 2; /* fours of a thread */
        static_assert(EACH * CONSUMERS * 4 >= 2880, "gpt-oss's shapes");
        Activations to = {at<bf16>(k.x), pitch_of(m.stride), 1};
        float4 times[EACH] = {}, value[EACH];
#pragma unroll
        for (int i = 0, c = ring.thread * 4; i < EACH; i++, c += CONSUMERS * 4)
            if (c < w.dim) times[i] = *(const float4 *)(weight + c);
        wait();
        if (index) x += (size_t)index[0] * w.dim;
        float sum = poll_fours(value, x, w.dim);
#pragma unroll
        for (int i = 0, c = ring.thread * 4; i < EACH; i++, c += CONSUMERS * 4) {
            float4 v = value[i], t = times[i];
            if (c < w.dim)
                Codec<T>::store_four((bf16 *)to.x + Codec<T>::place(c), v.x * t.x, v.y * t.y, v.z * t.z, v.w * t.w);
        }
        if (SCALED) sum = warp_sum(sum);
        if (SCALED && ring.thread % 32 == 0) at<float>(k.square)[ring.thread / 32] = sum;
        sync_consumers();
        if (SCALED && ring.thread < 32)
            set_scale(0, warp_sum(ring.thread < CONSUMER_WARPS ? at<float>(k.square)[ring.thread] : 0));
        return to;
    }
    /* The activations of tokens `index` (NULL: all) after the norm that a layer, or the head, begins with. With several
     * tokens a block publishes the sum of squares of its tokens. */
    template <Type T>
    __device__ auto normed_rows(const ShapedMatrix &m, const void *normed, const float *weight, int n,
                                const int *index = NULL) {
        Activations rows = {(const bf16 *)normed, m.stride, n, index};
        if (producing) return rows;
        if constexpr (single)
            return load_normed<T, true>(m, weight, buffers(w.layer - 1).x, index, [&] { wait_phase(); });
        wait_phase();
#pragma unroll 1
        for (int i = block; i < n; i += blocks)
            publish_square(w.x + (size_t)(index ? index[i] : i) * w.dim, w.dim, input_square_of(w, i, w.layer),
                           ring.thread);
        return rows;
    }

    /* ---- qkv ---- */

    /* q, k, v = W RMSNorm(x) + bias; RoPE; k and v to the cache. */
    __device__ void qkv(const DecodeLayer &l) {
        launder();
        const ShapedMatrix m = with_shape(l.qkv, BF16, (w.n_heads + 2 * w.n_kv_heads) * w.head_dim, w.dim);
        int tiles = tiles_of_block(tiles_of<BF16>(m.rows)), half = w.head_dim / 2;
        float *bias = at<float>(k.bias);
        if (!producing) {
#pragma unroll 1
            for (int i = ring.thread; i < tiles * BF16_ROWS; i += CONSUMERS)
                copy_4(bias + i, m.bias ? m.bias + row_of_block<BF16>(i) : w.x, m.bias);
            copies_end();
            hold_after_last(tiles);
        }
        product<BF16, true>(
            m, tiles, normed_rows<BF16>(m, w.normed_for[FOR_QKV], l.attn_norm, tokens),
            [&](int i) { return tile_at<BF16>(m, tile_of_block(i)); },
            [&](int tile, int p, int t, float a, float b) {
                int i = tile * BF16_ROWS + 2 * p, r = row_of_block<BF16>(i);
                float scale = at<float>(k.scale)[t];
                int keys = w.n_heads * w.head_dim, values = keys + w.n_kv_heads * w.head_dim;
                float2 pair = {a * scale + bias[i], b * scale + bias[i + 1]};
                if (r < values) pair = rotated(pair, at<float2>(k.cos_sin)[t * half + r / 2 % half]);
                if (r >= keys) store_key_or_value(w, at<int>(k.position)[t], at<int>(k.page)[t], r, pair);
                bf16 *q = (bf16 *)buffers(w.layer).q + (size_t)t * keys;
                if constexpr (single)
                    publish((uint32_t *)(q + published_place(r)), pack(pair.x, pair.y));
                else if (r < keys)
                    q[r] = (bf16)pair.x, q[r + 1] = (bf16)pair.y;
            });
    }

    /* ---- attention ---- */

    /* Token t at position p sees keys `from` to p, which lie in `pages` pages from page0 on. A job is number `split` of
     * the `used` parts of these pages, for one key/value head, or void if split >= used. Parts depend on p alone. */
    struct SplitJob {
        int head, t, split, p, from, page0, pages, used;
    };
    __device__ SplitJob split_job(int job, const DecodeLayer &l) const {
        int head = job % w.n_kv_heads, t = job / w.n_kv_heads % tokens, split = job / w.n_kv_heads / tokens,
            p = position_of(t);
        int from = first_seen(p, l.window), page0 = from / PAGE, pages = p / PAGE - page0 + 1;
        return {head, t, split, p, from, page0, pages, splits_of(pages)};
    }
    /* How many parts a context of `pages` pages is split into. */
    __device__ static int splits_of(int pages) {
        return pages <= 2 * SPLIT_PAGES ? 1 : min(DECODE_SPLITS, (pages + SPLIT_PAGES - 1) / SPLIT_PAGES);
    }
    __device__ int position_of(int t) const { return producing ? s.position[t] : at<int>(k.position)[t]; }
    /* The first position that this step adds to a token's sequence: the cache has all before it. */
    __device__ int fresh(int t) const {
        int first = t;
        while (first && s.seq[first - 1] == s.seq[t]) first--;
        return s.position[first];
    }
    __device__ float *split_states_of(int t, int head, int split) const {
        if (single) t = w.layer % BUFFERED_LAYERS; /* in turn, as LayerBuffers */
        return w.split_states + (((size_t)t * w.n_kv_heads + head) * DECODE_SPLITS + split) * 8 * (w.head_dim + 2);
    }
    __device__ void store_attention(int t, int i, float2 x) const { /* dimensions i and i + 1 */
        bf16 *attn = (bf16 *)buffers(w.layer).attn + (size_t)t * w.attn_pitch;
        write((uint32_t *)(attn + Codec<BF16>::place(i)), pack(x.x, x.y));
    }
    /* Polls a single token's queries, and its key and value too: the cache has these only for later steps. */
    template <int D>
    __device__ __forceinline__ void poll_token(const LayerBuffers &now, const bf16 *query, int head, int lane,
                                               uint4 (&q)[D / 32], uint4 (&key)[D / 32], uint4 (&value)[D / 32]) const {
        const bf16 *its_key = (const bf16 *)now.q + (w.n_heads + head) * D + lane % 4 * 8;
        const bf16 *its_value = (const bf16 *)now.q + (w.n_heads + w.n_kv_heads + head) * D + lane / 8 * (D / 4);
        uint32_t max_word;
        do {
            max_word = 0;
#pragma unroll
            for (int c = 0; c < D / 32; c++) {
                q[c] = poll((const uint4 *)(query + c * 32));
                key[c] = poll((const uint4 *)(its_key + c * 32));
                value[c] = poll((const uint4 *)(its_value + c * 8));
            }
#pragma unroll
            for (int c = 0; c < D / 32; c++)
                max_word = max_halves(max_halves(max_halves(max_word, q[c]), key[c]), value[c]);
        } while (__any_sync(~0u, half_unpublished(max_word)) && pause());
    }
    /* Merges the states of a job's warps, (attending, 8, D + 2), for phase output or, with more splits, for merge(). */
    template <int D>
    __device__ __forceinline__ void merge_warps(const SplitJob &job, const float *states, int attending,
                                                const float *sink) const {
        constexpr int ROW = D + 2, HEADS = SLAB_WARPS * 32 / (D / 2); /* heads at once, two dimensions a thread */
        static_assert(HEADS * (D / 2) == SLAB_WARPS * 32, "nothing is published twice");
        int group = w.n_heads / w.n_kv_heads;
        bar_sync<2>(SLAB_WARPS * 32);
        for (int h = ring.thread / (D / 2); h < group; h += HEADS) {
            const int pair = ring.thread % (D / 2) * 2;
            const Merged m(states + h * ROW, attending, 8 * ROW, pair);
            if (job.used == 1) {
                store_attention(job.t, (job.head * group + h) * D + pair, m.result(sink[h]));
                continue;
            }
            float *to = split_states_of(job.t, job.head, job.split) + h * ROW;
            if (pair == 0) publish(to, m.max_score), publish(to + 1, m.total);
            publish(to + 2 + pair, m.sum.x), publish(to + 3 + pair, m.sum.y);
        }
        bar_sync<2>(SLAB_WARPS * 32);
    }
    /* softmax(q k / sqrt(d)) v for each token and key/value head. A context's splits go to different blocks, the last
     * blocks first: the first ones have more rows in other phases. In a block SLAB_WARPS warps take 16 keys at a time,
     * the last keys first. Pages of a split context that earlier steps filled come through the ring. */
    template <int D> __device__ void attention(const DecodeLayer &l) {
        launder();
        constexpr int ROW = D + 2, STATE = 8 * ROW; /* floats of a head's state; of all heads' */
        int warp = ring.thread / 32, lane = ring.thread % 32, group = w.n_heads / w.n_kv_heads, heads = w.n_kv_heads;
        float *states = at<float>(k.x); /* (SLAB_WARPS, 8, ROW) */
        float *sink = at<float>(k.scale);
        bool waited = false;
        if (producing) wait_previous();
        int longest = single ? position_of(0) : __reduce_max_sync(~0u, lane < tokens ? position_of(lane) : 0);
        if (!producing && blocks - 1 - block >= tokens * heads)
            ring.resume(); /* no part in attention, or only in long contexts */
        /* no more jobs than the longest context has splits: void jobs take time too */
        int jobs = tokens * heads * splits_of(min(longest / PAGE + 1, l.window ? l.window / PAGE + 2 : INT_MAX));
#pragma unroll 1
        for (int i = blocks - 1 - block; i < jobs; i += blocks) {
            const SplitJob job = split_job(i, l);
            const int head = job.head, t = job.t, split = job.split, p = job.p, from = job.from, page0 = job.page0,
                      pages = job.pages, used = job.used;
            if (split >= used) continue;
            int begin = page0 + pages * split / used, end = page0 + pages * (split + 1) / used;
            int slab0 = max(begin * SLABS, from / SLAB_KEYS), slabs = min(end * SLABS, p / SLAB_KEYS + 1);
            int attending = min(SLAB_WARPS, slabs - slab0), slab = warp < SLAB_WARPS ? slabs - 1 - warp : -1;
            int streamed = used > 1 && k.stage_bytes >= 4 * D * PAGE ? min(end, fresh(t) / PAGE) : begin;
            const int *table = s.page + (producing ? s.seq[t] * s.header[0] : at<int>(k.table)[t]);
            if (producing) {
                ring.produce_pages(w, table, begin, streamed, head);
                continue;
            }
            Slab<D> keys;
            int direct = max(slab0, streamed * SLABS); /* the first slab that does not come through the ring */
            int page = slab >= direct ? table[slab / SLABS] : 0;
            auto load = [&] { keys.load(cache_of(w, page, 0, head), cache_of(w, page, 1, head), slab % SLABS, lane); };
            if (ring.thread < group) copy_4(sink + ring.thread, l.sinks + head * group + ring.thread, true);
            copies_end();
            bool early = single && slab >= direct; /* earlier steps wrote these keys, except one, replaced below */
            if (early) load();
            if (!single && !waited) wait_phase();
            waited = true;
            if (!single && streamed > begin) ring.resume(), hold_after_last(i + blocks >= jobs); /* of its last job */
            SlabState<D> state;
            LayerBuffers now = buffers(w.layer);
            const bf16 *query =
                (const bf16 *)now.q + ((size_t)t * w.n_heads + head * group + lane / 4) * D + lane % 4 * 8;
            uint4 q[D / 32] = {};
            if constexpr (!single) {
                for (int c = 0; c < D / 32 && lane / 4 < group; c++) q[c] = __ldcg((const uint4 *)(query + c * 32));
            } else if (warp < attending) {
                uint4 key[D / 32], value[D / 32];
                poll_token<D>(now, query, head, lane, q, key, value);
                replace_key<D>(keys, slab == p / SLAB_KEYS ? p % SLAB_KEYS : -1, key, value, lane);
            }
            static_assert(SLABS <= SLAB_WARPS, "a warp has one slab of a page at most");
            auto add = [&] {
                state.add(keys, q, slab * SLAB_KEYS, from, p, LOG2E * w.attn_scale, lane), slab -= SLAB_WARPS;
            };
#pragma unroll 1
            for (; slab >= direct; early = false) {
                if (!early) load();
                if (slab - SLAB_WARPS >= direct) page = table[(slab - SLAB_WARPS) / SLABS];
                add();
            }
#pragma unroll 1
            for (int number = streamed - 1; number >= begin; number--)
                ring.consume([&](const uint8_t *stage) {
                    if (slab < slab0 || slab / SLABS != number) return;
                    keys.template load<true>((const bf16 *)stage, (const bf16 *)stage + D * PAGE, slab % SLABS, lane);
                    add();
                });
            ring.hold_if(streamed > begin);
            if (warp < attending) state.store(states + warp * STATE + lane / 4 * ROW, lane);
            copies_done<0>();
            if (warp >= SLAB_WARPS) continue;
            merge_warps<D>(job, states, attending, sink);
        }
        if (!single && !producing && !waited) wait_phase();
        if (!producing && jobs > tokens * heads) merge<D>(l, jobs); /* some context may be split */
    }
    /* Splits publish their states. For each head one of their blocks merges them, in their order, with the sink, and
     * unpublishes them; a fence passes before anybody publishes there again. All blocks publish their states before
     * they merge, so no two wait for each other. */
    template <int D> __device__ void merge(const DecodeLayer &l, int jobs) {
        launder();
        constexpr int ROW = D + 2, STATE = 8 * ROW;
        int lane = ring.thread % 32, group = w.n_heads / w.n_kv_heads;
#pragma unroll 1
        for (int job = blocks - 1 - block; job < jobs; job += blocks) {
            SplitJob part = split_job(job, l);
            if (part.used == 1 || part.split >= part.used) continue;
#pragma unroll 1
            for (int h = ring.thread / 32; h < group; h += CONSUMER_WARPS) {
                if (h % part.used != part.split) continue;
                float *states = split_states_of(part.t, part.head, 0) + h * ROW;
                float sink = l.sinks[part.head * group + h];
#pragma unroll 1
                for (int pair = lane * 2; pair < D; pair += 64) {
                    const Merged m = merge_published<DECODE_SPLITS>(states, part.used, STATE, pair);
                    store_attention(part.t, (part.head * group + h) * D + pair, m.result(sink));
#pragma unroll 1
                    for (int j = 0; j < part.used; j++)
                        *(uint2 *)(states + j * STATE + 2 + pair) = make_uint2(UNPUBLISHED, UNPUBLISHED);
                }
                __syncwarp();
                if (lane < part.used) *(uint2 *)(states + lane * STATE) = make_uint2(UNPUBLISHED, UNPUBLISHED);
            }
        }
    }

    /* ---- output ---- */

    /* x += W attn + bias. With several tokens it also stores x for phase up. */
    __device__ void output(const DecodeLayer &l) {
        launder();
        const ShapedMatrix m = with_shape(l.o, BF16, w.dim, w.n_heads * w.head_dim);
        const Next next = {w.normed_for[FOR_UP], MXFP4, w.dim, NULL};
        int tiles = tiles_of_block(tiles_of<BF16>(m.rows)), rows = tiles * BF16_ROWS, experts = w.n_experts;
        float *own = at<float>(k.own), *bias = at<float>(k.bias), *columns = at<float>(k.columns),
              *norm = at<float>(k.norm);
        const bf16 *attn = (const bf16 *)buffers(w.layer).attn;
        if (!producing) {
#pragma unroll 1
            for (int i = ring.thread / 32; i < rows; i += CONSUMER_WARPS) {
                const int r = row_of_block<BF16>(i);
                const float *from = l.router_columns + (size_t)r * experts;
#pragma unroll 1
                for (int e = ring.thread % 32; e < experts; e += 32)
                    copy_4(columns + i * columns_pitch(experts) + e, r < w.dim ? from + e : w.x, r < w.dim);
            }
#pragma unroll 1
            for (int t = ring.thread / 32; t < tokens; t += CONSUMER_WARPS) /* a poll_acquire() since emptied L1 */
#pragma unroll 1
                for (int i = ring.thread % 32; i < rows; i += 32) {
                    int r = row_of_block<BF16>(i);
                    copy_4(own + t * rows + i, buffers(w.layer - 1).x + (r < w.dim ? (size_t)t * w.dim + r : 0),
                           r < w.dim);
                }
#pragma unroll 1
            for (int i = ring.thread; i < rows; i += CONSUMERS) {
                bool has = m.bias && row_of_block<BF16>(i) < w.dim;
                copy_4(bias + i, has ? m.bias + row_of_block<BF16>(i) : w.x, has);
                if (!single) copy_4(norm + i, l.ffn_norm + min(row_of_block<BF16>(i), w.dim - 1), true);
            }
            copies_end();
            hold_after_last(tiles);
            if (!single) unpublish_share(w.act_out, tokens * w.top_k * w.act_pitch / 2); /* while it would only wait */
            wait_phase();
            if constexpr (single && cards == 1) {
                /* the hint: the last word of each group of heads; two cards poll half as much, which is faster */
                const float *word =
                    (const float *)attn + (ring.thread + 1) * (w.n_heads / w.n_kv_heads * w.head_dim / 2) - 1;
                while (ring.thread < w.n_kv_heads && __float_as_uint(poll(word)) == UNPUBLISHED) pause();
                sync_consumers();
            }
        }
        product<BF16>(
            m, tiles, Activations{attn, m.stride, tokens, NULL, 1, single},
            [&](int i) { return tile_at<BF16>(m, tile_of_block(i)); },
            [&](int tile, int p, int t, float a, float b) {
                int i = tile * BF16_ROWS + 2 * p, r = row_of_block<BF16>(i);
                if (r >= w.dim) return;
                const LayerBuffers now = buffers(w.layer), before = buffers(w.layer - 1);
                float2 sum = {bias[i] + a, bias[i + 1] + b};
                if constexpr (cards > 1) /* the same blocks of both compute all of x */
                    sum = add_other_card(w, w.link.decode_o + (box(t) + r) / 2, sum);
                for (int j = 0; j < 2; j++) {
                    float x = own[t * rows + i + j] += j ? sum.y : sum.x;
                    write(now.middle + (size_t)t * w.dim + r + j, x);
                    if (!single) store_normed(next, t, r + j, x * norm[i + j]);
                }
                for (float *values : {before.middle, before.x})
                    if (single) *(uint2 *)(values + r) = make_uint2(UNPUBLISHED, UNPUBLISHED);
            });
        if (!producing) add_to_router(l);
    }
    /* Except for the norm's factor the router's logits are linear in x. So each block adds the contribution of its rows
     * of x to them, and publishes the sum of their squares. */
    __device__ void add_to_router(const DecodeLayer &l) {
        int rows = tiles_of_block(tiles_of<BF16>(w.dim)) * BF16_ROWS, lane = ring.thread % 32, warp = ring.thread / 32;
        int experts = w.n_experts;
        const float *own = at<float>(k.own), *columns = at<float>(k.columns);
        if (single) unpublish_share(buffers(w.layer - 1).q, layer_buffer_size(w) - 2 * w.dim);
        sync_consumers();
        constexpr int LANES = single ? 8 : 1,
                      EACH = 8 / LANES; /* for a token and an expert; a lane's of 8 partial sums */
#pragma unroll 1
        for (int i = ring.thread / LANES; i < tokens * experts; i += CONSUMERS / LANES) {
            int t = i / experts, e = i % experts;
            float part[EACH] = {};
#pragma unroll 1
            for (int r = ring.thread % LANES; r < rows; r += 8)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    part[j] += own[t * rows + r + j] * columns[(r + j) * columns_pitch(experts) + e];
#pragma unroll
            for (int o = 4; o; o >>= 1)
                for (int j = 0; j < (single ? 1 : o); j++)
                    part[j] += single ? __shfl_xor_sync(255u << (lane & 24), part[j], o) : part[j + o];
            const float bound = 1ull << (COUNT_BIT - 10);
            /* a NaN is in x too */
            long long quanta = __float2ll_rn(fminf(fmaxf(part[0] * (1 / ROUTER_QUANTUM), -bound), bound));
            if (ring.thread % LANES == 0)
                atomicAdd(router_sum_of(w, single, t, w.layer, e), (1ull << COUNT_BIT) + quanta);
        }
#pragma unroll 1
        for (int t = CONSUMER_WARPS - 1 - warp; t < tokens;
             t += CONSUMER_WARPS) { /* the last warps had fewest experts */
            float sum = 0;
#pragma unroll 1
            for (int r = lane; r < rows; r += 32) sum += own[t * rows + r] * own[t * rows + r];
            sum = warp_sum(sum);
            if (lane == 0) publish_flagged(w.output_square + ((size_t)t * w.n_layers + w.layer) * blocks + block, sum);
        }
    }

    /* ---- router ---- */

    __device__ Active active() const {
        return {at<int>(k.active_expert), at<int>(k.active_begin), at<int>(k.active_order), at<int>(k.active_cost),
                at<int>(k.active_range)};
    }
    template <int EACH> __device__ int choose_logits(const float *logit, int lane) const { /* see choose_keys() */
        unsigned key[EACH];
#pragma unroll
        for (int i = 0, e = lane; i < EACH; i++, e += 32) key[i] = e < w.n_experts ? score_key(logit[e]) : 0;
        return choose_keys(key, EACH == 1 ? 1 : (w.n_experts + 31) / 32, w.top_k);
    }
    /* A token's logits, once all blocks have added to them, and the top_k of them, by a warp: lane k has the k-th.
     * on_chosen(expert) comes before any store. */
    template <class OnChosen>
    __device__ __forceinline__ void choose_for_token(int t, const float *bias, float *logit, float *weights,
                                                     int *experts, int lane, OnChosen on_chosen) {
        constexpr int EACH = 5, SUMS = single ? 4 : 1; /* loads in flight */
        size_t place = (size_t)t * w.n_layers + w.layer;
        const unsigned long long *squares = w.output_square + place * blocks;
        float square = 0, *mine = logit + t * w.n_experts * 2; /* logits, then biases */
#pragma unroll 1
        for (int e = lane; e < w.n_experts; e += 32) mine[w.n_experts + e] = bias ? bias[e] : 0;
#pragma unroll 1
        for (int turn = 0; turn * SUMS * 32 < w.n_experts || turn * EACH * 32 < blocks; turn++) {
            int e = turn * SUMS * 32 + lane, b = turn * EACH * 32 + lane;
            unsigned long long sum[SUMS], part[EACH];
            bool there;
            do {
                there = true;
#pragma unroll
                for (int i = 0; i < SUMS; i++)
                    sum[i] = e + i * 32 < w.n_experts ? poll(router_sum_of(w, single, t, w.layer, e + i * 32))
                                                      : (unsigned long long)blocks << COUNT_BIT;
#pragma unroll
                for (int i = 0; i < EACH; i++) part[i] = b + i * 32 < blocks ? poll(squares + b + i * 32) : FLAG;
#pragma unroll
                for (int i = 0; i < SUMS; i++) there &= count_of(sum[i]) == blocks;
#pragma unroll
                for (int i = 0; i < EACH; i++) there &= part[i] >> 32 != 0;
            } while (__any_sync(~0u, !there) && pause());
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                if (e + i * 32 < w.n_experts) mine[e + i * 32] = (float)value_of(sum[i]) * ROUTER_QUANTUM;
#pragma unroll
            for (int i = 0; i < EACH; i++) square += __uint_as_float((uint32_t)part[i]);
        }
        if (single) gate(SUMMED).arrive();
        float factor = rms_factor(w, warp_sum(square));
        if (lane == 0) at<float>(k.factor)[t] = factor;
#pragma unroll 1
        for (int e = lane; e < w.n_experts; e += 32) mine[e] = mine[e] * factor + mine[w.n_experts + e];
        /* one expert a lane needs no branches, which would take as long as the choice */
        int expert = w.n_experts <= 32 ? choose_logits<1>(mine, lane) : choose_logits<FAST_EXPERTS / 32>(mine, lane);
        on_chosen(expert);
        __syncwarp(); /* for `mine` of other lanes */
        if (lane < w.top_k) experts[t * w.top_k + lane] = expert, weights[t * w.top_k + lane] = mine[expert];
    }
    /* Sorts the choices by expert, by counting; returns how many experts were chosen. next (n_experts) is free memory:
     * how many chose an expert, then where its next choice goes. */
    __device__ __forceinline__ int list_active(const Active &active, const int *experts, int *next, int lane) {
        int choices = tokens * w.top_k, n = 0;
        unsigned before_me = (1u << lane) - 1;
#pragma unroll 1
        for (int e = lane; e < w.n_experts; e += 32) next[e] = 0;
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < choices; i += 32) atomicAdd(next + experts[i], 1);
        __syncwarp();
#pragma unroll 1
        for (int e = lane, begin = 0, cost = 0; e - lane < w.n_experts; e += 32) {
            int count = e < w.n_experts ? next[e] : 0;
            int end = begin + prefix_sum(count, lane), cost_end = cost + prefix_sum(tile_cost(count), lane);
            unsigned chosen = __ballot_sync(~0u, count);
            int place = n + __popc(chosen & before_me);
            if (count) {
                active.expert[place] = e, active.begin[place] = next[e] = end - count;
                active.cost[place + 1] = cost_end;
            }
            begin = __shfl_sync(~0u, end, 31), cost = __shfl_sync(~0u, cost_end, 31), n += __popc(chosen);
        }
        if (lane == 0) active.begin[n] = choices, active.cost[0] = 0;
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i - lane < choices; i += 32) { /* in order */
            int expert = i < choices ? experts[i] : -1;
            unsigned same = __match_any_sync(~0u, expert);
            int place = i < choices ? next[expert] + __popc(same & before_me) : 0;
            if (i < choices) active.order[place] = i;
            __syncwarp();
            if (i < choices && !(same & before_me)) next[expert] += __popc(same);
            __syncwarp();
        }
        return n;
    }
    /* Divides the tiles of n experts among the blocks: lined up expert by expert and cut into ranges of equal cost, so
     * that a block has few experts. Lanes 0 and 1 find where this block's range begins and ends in phase up, lanes 2
     * and 3 in phase down. */
    __device__ void deal_tiles(int n, int lane) const {
        const int *cost = active().cost, tiles = tiles_of<MXFP4>(lane < 2 ? 2 * w.ffn_dim : w.dim);
        int from = cost[n] * tiles * (block + lane % 2) / blocks; /* a cost */
        int place = 0;                                            /* of the expert whose tiles reach it */
#pragma unroll 1
        for (int step = FAST_EXPERTS / 2; step; step /= 2)
            if (place + step < n && cost[place + step] * tiles <= from) place += step;
        active().range[lane] = place * tiles + (from - cost[place] * tiles) / (cost[place + 1] - cost[place]);
    }
    /* Finds each token's choices, their logits (k.weights) and `active`; every block does so for itself. All threads
     * call it; `active` is ready for the producer when it returns. The last warps route, because the others have more
     * to do; a single token is routed by the producer. */
    template <class OnChosen>
    __device__ void choose_experts(const DecodeLayer &l, const Active &active, OnChosen on_chosen) {
        if (!producing && single) return;
        const float *bias = l.router.bias;
        float *logit = at<float>(k.logit), *weights = at<float>(k.weights);
        int *experts = at<int>(k.experts), lane = ring.thread % 32;
#pragma unroll 1
        for (int t = CONSUMER_WARPS - ring.thread / 32; t < tokens; t += CONSUMER_WARPS + 1)
            choose_for_token(t, bias, logit, weights, experts, lane, on_chosen);
        __syncwarp();
        int n = w.top_k;
        if (single) { /* its experts differ, and may come in any order */
            if (lane < n) active.expert[lane] = experts[lane], active.begin[lane] = active.order[lane] = lane;
        } else {
            if (!producing) return gate(ROUTED).arrive();
            wait_at(ROUTED);
            n = list_active(active, experts, (int *)logit, lane);
            if (lane < 4) deal_tiles(n, lane);
        }
        if (lane == 0 && block == 0 && phase % PHASES == PHASE_UP) atomicAdd(w.experts_read, n);
        __syncwarp();
    }

    /* Once a single token's experts are known, all warps wait for their first weights. So the producer prepares the
     * first stages of phase up in advance. As soon as the experts are chosen it starts these copies (route_tokens),
     * and produce() continues after them. */
    static constexpr bool prepares_stages = producing && single;
    struct PreparedStage { /* for a tile of the expert at `place`; `from`: where expert 0 has it */
        Barrier *full;
        uint8_t *stage;
        const uint8_t *from;
        int place;
    };
    static constexpr int UP_TILE_BYTES = Codec<MXFP4>::stage_bytes(2880 / CHUNK);
    static_assert(2880 / CHUNK <= MAX_PART, "a tile is one part");
    __device__ void prepare_stages(const DecodeLayer &l, PreparedStage (&prepared)[MAX_COPIES]) {
        const ShapedMatrix m = with_shape(l.up, MXFP4, 2 * w.ffn_dim, w.dim);
        int tiles = tiles_of<MXFP4>(m.rows), begin = active().range[0];
        ring.requested = min(min(MAX_COPIES, ring.stages), active().range[1] - begin);
#pragma unroll
        for (int i = 0; i < MAX_COPIES; i++) {
            if (i >= ring.requested) break;
            ring.acquire_stage(MAX_COPIES);
            prepared[i] = {ring.full + ring.stage, ring.stage_at(), tile_at<MXFP4>(m, (begin + i) % tiles),
                           (begin + i) / tiles};
            if (ring.thread == CONSUMERS) prepared[i].full->expect_bytes(UP_TILE_BYTES);
            ring.advance();
        }
        __syncwarp();
    }
    /* The beginning of phase up, or of phase down if that is launched by itself: router, top-k. */
    __device__ void route_tokens(const DecodeLayer &l) {
        launder();
        if (producing) gate(FREE).wait((w.layer - first / PHASES) % 2 ^ 1); /* at once in the first layer */
        wait_previous();
        PreparedStage prepared[MAX_COPIES];
        if (prepares_stages && phase % PHASES == PHASE_UP) prepare_stages(l, prepared);
        if (sync_before(phase) == PRODUCER_FENCE && phase != first && ring.thread == CONSUMERS) {
            /* for all that consumers wrote before they arrived at FREE */
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            arrive();
        }
        /* SUMMED says when to poll x; one thread checks that all producers have executed their fence */
        if (!producing && single && phase % PHASES == PHASE_UP)
            load_normed<MXFP4, false>(with_shape(l.up, MXFP4, 2 * w.ffn_dim, w.dim), l.ffn_norm,
                                      buffers(w.layer).middle, NULL, [&] {
                                          wait_at(SUMMED);
                                          if (phase != first && ring.thread == SPARE) wait_for_blocks();
                                      });
        choose_experts(l, active(), [&](int expert) {
            const ShapedMatrix m = with_shape(l.up, MXFP4, 2 * w.ffn_dim, w.dim);
#pragma unroll
            for (int i = 0; i < MAX_COPIES && prepares_stages; i++) {
                if (i >= ring.requested) break;
                size_t its = __shfl_sync(~0u, expert, prepared[i].place) * m.bytes;
                if (ring.thread == CONSUMERS)
                    prepared[i].full->copy_row(prepared[i].stage, prepared[i].from + its, UP_TILE_BYTES);
            }
        });
        producing ? gate(CHOSEN).arrive() : wait_at(CHOSEN);
        if (!producing && !single)
            wait_phase(); /* only now: the counts in the router's sums say when these are complete */
#pragma unroll 1
        for (int t = ring.thread / 32; t < tokens && !producing; t += CONSUMER_WARPS)
            softmax_choices(at<float>(k.weights) + t * w.top_k, w.top_k, ring.thread % 32);
    }

    /* ---- experts ---- */

    /* Starts the copies of biases of a block's range; they are there after the next barrier. */
    __device__ void load_bias(const ShapedMatrix &m, bool down) {
        Active active = this->active();
        int rows = tiles_of<MXFP4>(m.rows) * TILE;
        int begin = active.range[down ? 2 : 0] * TILE, end = active.range[down ? 3 : 1] * TILE;
#pragma unroll 1
        for (int i = begin + ring.thread; i < end && !producing; i += CONSUMERS) {
            int row = i % rows;
            bool has = m.bias && row < m.rows;
            copy_4(at<float>(k.bias) + i - begin, has ? m.bias + (size_t)active.expert[i / rows] * m.rows + row : w.x,
                   has);
        }
        copies_end();
    }
    /* Multiplies a block's range of tiles, expert by expert. rows_of(first, n) are the activations of n choices from
     * `first` on in Active's order; in phase up of a single token one row serves all experts. store(row of the matrix,
     * choice, biases, a, b) receives two neighbouring rows of a result. */
    template <class Rows, class Store>
    __device__ void multiply_experts(const ShapedMatrix &m, bool down, Rows rows_of, Store store) {
        Active active = this->active();
        const bool all = single && !down;
        int tiles = tiles_of<MXFP4>(m.rows), begin = active.range[down ? 2 : 0], end = active.range[down ? 3 : 1];
#pragma unroll 1
        for (int from = begin, to; from < end; from = to) {
            const int *choices = active.begin + from / tiles;
            to = all ? end : min(end, (from / tiles + 1) * tiles);
#pragma unroll 1
            for (int first = choices[0], n;; first += n) {
                n = single ? 1 : min(choices[1] - first, MAX_CHOICES);
                bool done = single || first + n == choices[1], last = done && to == end;
                if (!producing && last && sync_of(down ? PHASE_QKV : PHASE_DOWN) == FENCE) hold_after_last(true);
                product<MXFP4>(
                    m, to - from, rows_of(first, n),
                    [&](int i) {
                        return tile_at<MXFP4>(m, (from + i) % tiles) + active.expert[(from + i) / tiles] * m.bytes;
                    },
                    [&](int i, int p, int row, float a, float b) {
                        int tile = from + i, choice = active.order[all ? active.begin[tile / tiles] : first + row];
                        store(tile % tiles * TILE + 2 * p, choice, at<float>(k.bias) + (tile - begin) * TILE + 2 * p, a,
                              b);
                    });
                if (!producing && !last) sync_consumers();
                if (done) break;
            }
        }
    }
    /* act = the activation of gate and up of the chosen experts. */
    __device__ void up(const DecodeLayer &l) {
        launder();
        const ShapedMatrix m = with_shape(l.up, MXFP4, 2 * w.ffn_dim, w.dim);
        const float *factors = at<float>(k.factor);
        load_bias(m, false);
        auto rows_of = [&](int first, int n) {
            if (single) return Activations{at<bf16>(k.x), m.stride, 1}; /* by route_tokens() */
            return Activations{(const bf16 *)w.normed_for[FOR_UP], m.stride, n, active().order + first, w.top_k};
        };
        multiply_experts(m, false, rows_of, [&](int r, int choice, const float *bias, float gate, float up) {
            if (r / 2 >= w.ffn_dim) return;
            bf16 *act = (bf16 *)buffers(w.layer).act + (size_t)choice * w.act_pitch;
            float factor = factors[single ? 0 : choice / w.top_k];
            write<true>(
                act + Codec<MXFP4>::place(r / 2),
                (bf16)(activation(SWIGLU_CLAMPED, w.act_limit, gate * factor + bias[0], up * factor + bias[1], false) *
                       Codec<MXFP4>::LIFT));
            for (int i = w.ffn_dim; i < w.act_pitch && r / 2 == w.ffn_dim - 1; i++) /* padding, which down polls too */
                write<true>(act + Codec<MXFP4>::place(i), (bf16)0);
        });
        if (producing || block) return;
        sync_consumers();
#pragma unroll 1
        for (int i = ring.thread; i < tokens * w.top_k; i += CONSUMERS)
            w.expert[i] = at<int>(k.experts)[i], w.weight[i] = at<float>(k.weights)[i];
    }
    /* x += the weighted sum of the chosen experts' W act + bias; with several tokens `next` receives x. */
    __device__ void down(const DecodeLayer &l, const Next &next) {
        launder();
        const ShapedMatrix m = with_shape(l.down, MXFP4, w.dim, w.ffn_dim);
        const float *weights = at<float>(k.weights);
        load_bias(m, true);
        if (!producing) wait_phase();
        auto rows_of = [&](int first, int n) {
            return Activations{(const bf16 *)buffers(w.layer).act, m.stride, n, active().order + first, 1, true};
        };
        multiply_experts(m, true, rows_of, [&](int r, int choice, const float *bias, float a, float b) {
            if (r >= w.dim) return;
            add_expert(single ? 0 : choice / w.top_k, r, weights[choice] * (a + bias[0]),
                       weights[choice] * (b + bias[1]), next);
        });
        if constexpr (cards > 1 && !single)
            if (!producing) end_sums(next);
        if (!producing) gate(FREE).arrive();
    }
    /* Adds one expert's values to rows r and r + 1 of a token's x. Experts' blocks come in any order, so their values
     * are added as integers and counted. The last one adds the sum to x, which nobody has changed meanwhile, and hands
     * x to `next`. On two cards it waits for the other's sum. With one token it may: a block's tiles are the last ones
     * of an expert and then the first ones of the next, on both cards alike, so no two wait for each other. A NaN, or a
     * value that is too large, adds a number that no valid sum can reach: it gives NAN. */
    __device__ void add_expert(int t, int r, float a, float b, const Next &next) {
        const LayerBuffers now = buffers(w.layer);
        const bool ends = cards == 1 || single; /* else end_sums() does */
        size_t at = (size_t)t * w.dim + r;
        float value[2] = {a, b}, old[2], times[2];
        unsigned long long *sum = w.expert_sum + (size_t)t * w.dim + r, total[2];
        const long long bad = (1ll << (COUNT_BIT - 2)) / w.top_k;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (ends) old[i] = poll(now.middle + at + i); /* is complete: this block has seen all of it */
            if (ends && !single) times[i] = next.norm[r + i];
            float quanta = value[i] * (1 / EXPERT_QUANTUM);
            unsigned long long mine =
                (1ull << COUNT_BIT) + (fabsf(quanta) < bad / (2 * w.top_k) ? __float2ll_rn(quanta) : bad);
            total[i] = atomicAdd(sum + i, mine) + mine;
        }
#pragma unroll
        for (int i = 0; i < 2 && cards > 1; i++) /* after both additions: each is a way to L2 and back */
            if (count_of(total[i]) == w.top_k) send_count(w, w.link.decode_down + box(t) + r + i, total[i]);
        if (!ends) return;
        const bool complete[2] = {count_of(total[0]) == w.top_k, count_of(total[1]) == w.top_k};
        values_of_sums(total, complete, box(t) + r, value);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (!complete[i]) continue;
            sum[i] = 0;
            write(now.x + at + i, old[i] + value[i]);
            if (!single) store_normed(next, t, r + i, (old[i] + value[i]) * times[i]);
        }
    }

    /* Two cards' inboxes alternate by layer. */
    __device__ int box(int t) const { return (w.layer % 2 * MAX_DECODE + t) * w.dim; }
    /* Two neighbouring rows' whole sums, with the other card's, of those that are wanted. */
    __device__ void values_of_sums(const unsigned long long (&total)[2], const bool (&wanted)[2], int place,
                                   float (&value)[2]) const {
        const long long bad = (1ll << (COUNT_BIT - 2)) / w.top_k;
        unsigned long long received[2] = {};
        if constexpr (cards > 1) receive_counts(w, w.link.decode_down + place, wanted, received);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const long long sum = value_of(total[i]), theirs = value_of(received[i]);
            value[i] = llabs(sum) < bad / 2 && llabs(theirs) < bad / 2 ? (float)(sum + theirs) * EXPERT_QUANTUM : NAN;
        }
    }
    /* With several tokens on two cards, to wait in add_expert() could be for ever: the other card may wait for what
     * this block adds next. So all add first, and then divide the sums among them. */
    __device__ void end_sums(const Next &next) const {
#pragma unroll 1
        for (int i = (block * CONSUMERS + ring.thread) * 2; i < tokens * w.dim; i += blocks * CONSUMERS * 2) {
            const int t = i / w.dim, r = i % w.dim;
            unsigned long long total[2];
            float value[2];
            do total[0] = poll(w.expert_sum + i), total[1] = poll(w.expert_sum + i + 1);
            while ((count_of(total[0]) < w.top_k || count_of(total[1]) < w.top_k) && pause());
            values_of_sums(total, {true, true}, box(t) + r, value);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float x = poll(w.x + i + j) + value[j];
                w.expert_sum[i + j] = 0, w.x[i + j] = x;
                store_normed(next, t, r + j, x * next.norm[r + j]);
            }
        }
    }

    /* ---- head ---- */

    /* Logits of the rows that are wanted, (rows, vocab). */
    __device__ void logits(const Matrix &head, const float *norm, int rows) {
        launder();
        const ShapedMatrix m = with_shape(head, BF16, w.vocab / cards, w.dim);
        int tiles = tiles_of_block(tiles_of<BF16>(m.rows));
        product<BF16, true>(
            m, tiles, normed_rows<BF16>(m, w.normed_for[FOR_HEAD], norm, rows, s.row),
            [&](int i) { return tile_at<BF16>(m, tile_of_block(i)); },
            [&](int tile, int p, int row, float a, float b) {
                int id = tile_of_block(tile) * BF16_ROWS + 2 * p;
                float *logit = w.logits + (size_t)row * w.vocab + id, scale = at<float>(k.scale)[row];
                if (cards > 1) logit += w.first_id;
                if (id < m.rows) logit[0] = a * scale;
                if (id + 1 < m.rows) logit[1] = b * scale;
            });
    }
};

/* The kernel, with an instance each for at most 1, 4, 8 and MAX_DECODE tokens, on one card and on two. They know
 * gpt-oss's types and shapes only. Arithmetic with unknown shapes would take much of a phase's time, add instructions
 * to fetch, and need registers, which are few. */
template <int max_tokens, int cards>
__global__ void __launch_bounds__(THREADS, 1)
    decode_step(DecodeWork any, Step s, const DecodeLayer *layers, Matrix head, const float *norm, Layout k, int tokens,
                int rows, int first, int last) {
#if HOPPER
    extern __shared__ __align__(128) uint8_t memory[];
    const DecodeWork w = with_gpt_oss_shapes<cards>(any);
    auto run = [&](auto f) {
        f.load_positions();
        while (f.phase < last) {
            const DecodeLayer &l = layers[f.phase / PHASES];
            f.w.layer = f.phase / PHASES;
            int phase = f.w.layer == w.n_layers ? PHASES : f.phase % PHASES;
            if (phase == PHASE_UP || (phase == PHASE_DOWN && f.phase == first)) f.route_tokens(l);
            switch (phase) {
            case PHASE_QKV: f.qkv(l); break;
            case PHASE_ATTENTION: f.template attention<64>(l); break;
            case PHASE_OUTPUT: f.output(l); break;
            case PHASE_UP: f.up(l); break;
            case PHASE_DOWN: {
                const bool end = f.w.layer + 1 == w.n_layers;
                f.down(l, end ? Next{w.normed_for[FOR_HEAD], BF16, w.dim, norm}
                              : Next{w.normed_for[FOR_QKV], BF16, w.dim, layers[f.w.layer + 1].attn_norm});
                break;
            }
            default: f.logits(head, norm, rows);
            }
            f.end_phase();
        }
    };
    if (max_tokens == 1) tokens = rows = 1;
    DecodeBlock<false, max_tokens, cards> consumer(w, s, k, memory, tokens, first, last);
    consumer.init();
    if (threadIdx.x < CONSUMERS)
        run(consumer);
    else
        run(DecodeBlock<true, max_tokens, cards>(w, s, k, memory, tokens, first, last));
#endif
}
