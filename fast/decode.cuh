/* few.cuh: a step of at most FEW tokens, as one kernel. Its time is the time to read the weights, each of them once (but of experts that more than
 * MOST_CHOICES tokens chose) and in order. A block lives on each multiprocessor from the first layer to the logits. Its last warp, the producer, keeps a
 * ring of shared memory full with the weights that come next, over the borders of phases, so that waits for activations leave the memory idle as little as
 * may be. Of several tokens it pauses, but only while the fence at a phase's end would wait for it (Ring::expect), and in a block that has a part in attention
 * until that is done (but for the pages of a long context). The others, the consumers, multiply. A layer has five phases, between which all blocks wait for
 * each other; only what the router's sums say is known before, as they count who has added to them. A token alone of gpt-oss's shapes waits for values rather
 * than for blocks, and so does phase down of several: see Told.
 *
 *     qkv        query, key and value, rope, to the cache                                                     14  15  11
 *     attention  over the cache, split when it is long: then pages that fit a stage come through the ring       1   2   1
 *                like weights
 *     output     onto the residual stream; each block's share of the router's logits                          18  11  10
 *     up         router, top-k, gate and up, activation                                                       27  40  47
 *     down       onto the residual stream, weighted                                                           14  17  22
 *     head       behind the last layer: logits                                                                26  15   9
 *
 * On the right each phase's share of what all take for 1, 4 and 16 tokens of gpt-oss-20b without context, in percent (bench -o json; the clock is a block's
 * that has no part in attention: of one token its wait for that is output's, and the wait for the slowest block of up and down is qkv's). Embed and draw
 * (draw.cuh) add about 1.
 *
 * RMSNorm is no phase: who has a value of the residual stream leaves it times the norm's weight for the matrix that comes next (Next), and what it has to be
 * divided by is known before the matrix's products are. With the shapes that the compiler knows each warp keeps its share of the activations in registers, for
 * all rows of a matrix. A token alone of these shapes norms for itself, which is faster then (stage_normed).
 */
#pragma once

/* ---- what blocks tell each other ---- */

/* Blocks tell each other by buffers of DecodeWork, and a fence stands between a phase that writes them and one that reads. A fence takes long (see Ring::expect).
 * So for a token alone of gpt-oss's shapes values say themselves whether they are there (UNWRITTEN), in buffers of which TURNS layers in turn have one each.
 * When a block has all that attention tells, each block has told its queries, keys and values, so it has read all that others told in the layer before: phase
 * output makes that UNWRITTEN again. A fence has to stand before another layer writes there, but it is hidden: producers have it in the next layer's phase up,
 * when they have little on the way as they do not know the experts yet, and each block looks in that phase whether all have. So it is the layer behind that
 * which may write there: hence three turns. What the last layer has told the next step's embed makes UNWRITTEN.
 * Of several tokens of these shapes only the experts' activations are told: so in phase down a block waits for the blocks that have its experts, not for all.
 * These have no turns, but Work's act_out. Phase output makes it UNWRITTEN: all blocks have ended the layer before, since they arrived before qkv, and none
 * writes there until all have arrived before phase up, which each does behind that.
 * Questions for what is not there hinder those who are to tell it (notebooks/speed.md). So where all blocks read the same, few threads of each ask for a hint
 * first: a barrier before qkv, at which blocks arrive a little early, and before output a word of each head. */
constexpr int TURNS = 3;
static_assert(TURNS <= FEW, "partial_of() takes the places of other tokens");
struct Told {
    float *x, *middle; /* (tokens, dim) the residual stream behind the experts, and behind attention */
    void *q;           /* (tokens, n_heads * head_dim); of a token alone (all rows of the matrix of query, key and value): see told_place() */
    void *attn, *act;  /* (tokens, attn_pitch), (tokens * top_k, act_pitch) */
};
/* Floats of one turn; those of a layer but x lie together. */
__host__ __device__ inline size_t turn_size(const DecodeWork &w) {
    return 2 * w.dim + ((w.n_heads + 2 * w.n_kv_heads) * w.head_dim + w.attn_pitch + w.top_k * w.act_pitch) / 2;
}
inline size_t told_size(const DecodeWork &w) { return TURNS * turn_size(w); }
/* Makes n floats UNWRITTEN, a multiple of four: each of `threads` threads its share. */
__device__ inline void forget(void *floats, int n, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < n / 4; i += threads) ((uint4 *)floats)[i] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
}
/* What layer `layer` tells; layer -1 is the embedding. The head stands behind a fence, so the last layer's x is Work's. */
__host__ __device__ inline Told told_of(const DecodeWork &w, bool alone, int layer) {
    if (!alone) return {w.x, w.x, w.q, w.attn, w.act_out};
    float *x = w.told + (layer + TURNS) % TURNS * turn_size(w), *middle = x + w.dim;
    bf16 *q = (bf16 *)(middle + w.dim), *attn = q + (w.n_heads + 2 * w.n_kv_heads) * w.head_dim;
    return {layer == w.n_layers - 1 ? w.x : x, middle, q, attn, attn + w.attn_pitch};
}
inline size_t partial_size(const DecodeWork &w) { return (size_t)FEW * w.n_kv_heads * SPLITS * 8 * (w.head_dim + 2); }

/* ---- the kernel ---- */

/* What the next matrix that follows a norm reads (see DecodeWork), and this norm's weights. */
struct Next {
    void *to;
    Type type;
    int stride;
    const float *norm;
    bool twins; /* bf16, where twin_at() says */
};
__host__ __device__ inline Next next_of(void *to, const Matrix &m, const float *norm, bool twins = false) { return {to, m.type, m.stride, norm, twins}; }
/* Value i of a token's x times the norm's weight. */
__device__ inline void store_normed(const Next &next, int t, int i, float x) {
    if (next.twins)
        ((bf16 *)next.to)[twin_at(t, Codec<BF16>::place(i), next.stride)] = (bf16)x;
    else
        store_activation(next.type, (uint8_t *)next.to + (size_t)t * next.stride * 2, i, x);
}

/* This thread's two fours of the first 8 CONSUMERS of n values of x, or 0, as soon as they are there; returns the sum of their squares. */
__device__ inline float take_fours(float4 (&value)[2], const float *x, int n) {
    bool there;
    float sum = 0;
    do {
        there = true;
#pragma unroll
        for (int i = 0, c = threadIdx.x * 4; i < 2; i++, c += CONSUMERS * 4) {
            uint4 v = {};
            if (c < n) v = ask((const uint4 *)(x + c));
            there &= max(max(v.x, v.y), max(v.z, v.w)) != UNWRITTEN;
            value[i] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
        }
    } while (!there && rest());
    for (float4 v : value) sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    return sum;
}

/* RMSNorm's sum of squares, in two parts so that few have to wait for it: a block publishes the parts that its warps found, in an order that does not depend
 * on anything else, and who needs it looks for them later. */
__device__ inline unsigned long long *input_square_of(const DecodeWork &w, int t, int layer) {
    return w.input_square + ((size_t)t * (w.n_layers + 1) + layer) * MOST_WARPS;
}
__device__ inline void publish_square(const float *x, int dim, unsigned long long *to, int thread) { /* threads 0 to CONSUMERS - 1 call it */
    float sum = 0;
#pragma unroll 2
    for (int i = thread * 4; i < dim; i += CONSUMERS * 4) {
        float4 v = __ldcg((const float4 *)(x + i));
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = warp_sum(sum);
    if (thread % 32 == 0) publish(to + thread / 32, sum);
}
__device__ inline float find_square(const unsigned long long *from, int lane) { /* a warp calls it */
    unsigned long long part = 0;
    do part = lane < WARPS ? look(from + lane) : THERE;
    while (!(part >> 32));
    return warp_sum(__uint_as_float((uint32_t)part));
}

/* Where expert e's sum of a token's router logits lies. Of a token alone four of them, a sector of memory, have the place of APART sectors: so many blocks add
 * to them at once. Of several tokens there are many sectors anyway, and who looks for all is quicker if they lie together. */
constexpr int APART = 8;
static_assert(APART <= FEW, "the place of the other tokens");
__device__ inline unsigned long long *router_sum_of(const DecodeWork &w, bool alone, int t, int layer, int e) {
    unsigned long long *sums = w.router_sum + ((size_t)t * w.n_layers + layer) * w.n_experts * (alone ? APART : 1);
    return sums + (alone ? e / 4 * 4 * APART + e % 4 : e);
}

/* Begins a step: x (tokens, dim) = the tokens' rows of the embedding, also for `next`, if there is one. The page remembers the token. The step comes posted, as
 * an argument (the host is far: with asking for it this kernel took 6 us for one token and 27 for sixteen by ncu, 5 without); the first block writes it to
 * where the other kernels look for it, and all empty what few's blocks, so many of them, add up or publish. Of a token alone it also empties what the last layer
 * of the step before told. A block a token. */
__global__ void __launch_bounds__(1024) embed(DecodeWork w, Step s, const __grid_constant__ Posted post, Matrix table, int blocks, bool alone, Next next) {
#if HOPPER
    launch_next();
    float *to = told_of(w, alone, -1).x;
    int t = blockIdx.x, words = t ? 0 : Posted::BYTES / 16;
    wait_previous();
    if (threadIdx.x < words) ((uint4 *)s.how)[threadIdx.x] = post.word[threadIdx.x];
    int4 mine = post.token(t);
    auto clear = [&](unsigned long long *sum, int n) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) sum[i] = 0;
    };
    for (int i = threadIdx.x; i < w.n_layers * w.n_experts; i += blockDim.x) *router_sum_of(w, gridDim.x == 1, t, i / w.n_experts, i % w.n_experts) = 0;
    clear(w.square + (size_t)t * w.n_layers * blocks, w.n_layers * blocks);
    clear(input_square_of(w, t, 0), next.to ? (w.n_layers + 1) * MOST_WARPS : 0);
    if (alone) forget(told_of(w, true, w.n_layers - 1).middle, turn_size(w) - w.dim, threadIdx.x, blockDim.x);
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

/* A block at work on phases first to last - 1 of a step; phase n_layers * PHASES is the head. Each phase is a function that
 * all warps call. What a phase reads of the one before it is Told, or it reads it behind await(), but for what choose() looks for. */
template <bool producing, int most> struct Few { /* most: see few() */
    static constexpr bool alone = most == 1, several = most > 1; /* one token; more */
    static constexpr bool twins = are_twins(most);             /* what qkv and output read: see twin_at() */
    static constexpr int SPARE = CONSUMERS - 1; /* the consumer that has the least to do beside multiplying */
    DecodeWork w;
    const Step &s;
    const Layout &k;
    uint8_t *memory;
    int tokens, first, last, phase, block = blockIdx.x, blocks = gridDim.x;
    int origin = 0; /* adds nothing, but the compiler does not know: see renew() */
    Ring ring;

    __device__ Few(const DecodeWork &w, const Step &s, const Layout &k, uint8_t *memory, int tokens, int first, int last)
        : w(w), s(s), k(k), memory(memory), tokens(tokens), first(first), last(last), phase(first), ring(k, memory) {}
    /* Before any of them begins: all threads of the block call it. */
    __device__ void prepare(const DecodeLayer *layers) {
        if (ring.thread == 0) {
            *at<unsigned long long>(k.begun) = (*(volatile unsigned long long *)w.barrier / gridDim.x - barriers(first)) * gridDim.x;
            gate(FREE).init(CONSUMERS); /* of the last layer */
            gate(ROUTED).init(CONSUMERS);
            gate(CHOSEN).init(32); /* the producer arrives */
            ring.hold->init(1);
        }
        if (ring.thread < k.stages) ring.full[ring.thread].init(1), ring.empty[ring.thread].init(CONSUMERS);
        if (ring.thread < 4 && tokens == 1) { /* all its experts cost the same */
            const Matrix &m = ring.thread < 2 ? layers->up : layers->down;
            active().piece[ring.thread] = w.top_k * groups_of(m) * (block + ring.thread % 2) / blocks;
        }
        Barrier::show_init();
        __syncthreads();
    }
    __device__ void note_time(int at) {
        if (blockIdx.x == 0 && ring.thread == 0) asm volatile("mov.u64 %0,%globaltimer;" : "=l"(w.ended[at])::"memory");
    }
    /* A matrix of a layer, with its shape as a constant. */
    template <Type T> __device__ Shaped matrix(const Matrix &from, int rows, int cols) const { return shaped(from, T, rows, cols); }
    __device__ Told told(int layer) const {
        asm volatile("" : "+r"(layer)); /* computed where it is used */
        return told_of(w, alone, layer);
    }
    /* Writes a value for other blocks: see Told. */
    template <bool TOLD = alone, typename V> __device__ void write(V *to, V x) const {
        if constexpr (TOLD)
            tell(to, x);
        else
            *to = x; /* a fence stands before who reads it */
    }
    /* This block's share of forget(): blocks take turns by warps. */
    __device__ void forget_share(void *floats, int n) const {
        forget(floats, n, (ring.thread / 32 * blocks + block) * 32 + ring.thread % 32, CONSUMERS * blocks);
    }
    /* Where in Told::q a token alone tells rows r and r + 1 of query, key and value: in order, but pairs of a head's values as Slab::replace() wants them. */
    __device__ int told_place(int r) const {
        int d = w.head_dim, i = r % d;
        return r < (w.n_heads + w.n_kv_heads) * d ? r : r - i + i % 8 / 2 * (d / 4) + i / 8 * 2;
    }
    /* What the consumers need to know about the tokens all the time. */
    __device__ void begin() {
        int half = w.head_dim / 2;
        if (producing) return;
        wait_previous();
        note_time(first);
#pragma unroll 1
        for (int t = ring.thread / 32; t < tokens; t += WARPS) {
            int p = s.position[t];
#pragma unroll 1
            for (int i = ring.thread % 32; i < half; i += 32) at<float2>(k.turn)[t * half + i] = w.turn[(size_t)p * half + i];
            at<int>(k.position)[t] = p, at<int>(k.table)[t] = s.seq[t] * s.header[0], at<int>(k.page)[t] = page_of(s, s.seq[t], p);
        }
        sync_consumers();
    }
    /* The units (groups of rows) of this block, of `units` in all: every so many-th; which ones; which row of the matrix row i of them is. */
    __device__ int units_of_block(int units) const { return (units - block + blocks - 1) / blocks; }
    __device__ int unit_of_block(int i) const { return block + i * blocks; }
    template <Type T> __device__ int row_of_block(int i) const { return unit_of_block(i / Codec<T>::ROWS) * Codec<T>::ROWS + i % Codec<T>::ROWS; }
    template <typename U> __device__ U *at(int offset) const { return (U *)(memory + origin + offset); }

    /* A phase, or a part of one, begins. What looks as if it might have changed is not computed ahead, for all phases at once, to be kept in local memory. */
    __device__ void renew() {
        asm volatile("" : "+r"(ring.thread)); /* with what Ring::renew() says of it the instance of one token would spill registers */
        if (most > 4)
            asm volatile("mov.u32 %0,%%ctaid.x;" : "=r"(block) :); /* not even kept: registers are fewest here */
        else
            asm volatile("" : "+r"(block));
        if (!alone) asm volatile("" : "+r"(blocks)); /* only where less is spilled by it */
        if (!alone && most <= 4) asm volatile("" : "+r"(origin));
    }
    /* What stands before a phase: a barrier, behind a fence of each block; of a token alone one for which producers have the fence (route_tokens), or a barrier
     * that is only a hint; or nothing. */
    enum Border { NOTHING, HINT, FENCED, FENCE };
    __device__ static constexpr Border border_of(int kind) { /* PHASES: of the head */
        if (alone && kind < PHASES) return kind == PHASE_QKV ? HINT : kind == PHASE_UP ? FENCED : NOTHING;
        return several && kind == PHASE_DOWN ? NOTHING : FENCE;
    }
    __device__ Border border(int phase) const { return border_of(phase == w.n_layers * PHASES ? PHASES : phase % PHASES); }
    /* How many barriers stand before phases 1 to `phase`. */
    __device__ int barriers(int phase) const {
        int layers = phase / PHASES, ups = (phase + PHASES - PHASE_UP) / PHASES, downs = (phase + PHASES - PHASE_DOWN) / PHASES; /* begun, but for the first */
        return alone ? layers + ups : several ? phase - downs : phase;
    }
    /* A thread arrives at a barrier for its block, and one waits until all blocks have. */
    __device__ void arrive() const { asm volatile("red.relaxed.gpu.global.add.u64 [%0],1;" ::"l"(w.barrier) : "memory"); }
    __device__ void wait_for_blocks() const {
        int here = phase;
        asm volatile("" : "+r"(here)); /* the target is computed here, not ahead */
        unsigned long long target = *at<unsigned long long>(k.begun) + (unsigned long long)barriers(here) * blocks;
        const bool behind = !alone || border(here) >= FENCED;
        while ((behind ? look_behind(w.barrier) : look(w.barrier)) < target) rest();
    }
    /* The consumers wait, if need be, until all blocks have ended the phase before this one; if that is a HINT, are about to. */
    __device__ void await() {
        if (phase == first) return wait_previous();
        if (border(phase) == NOTHING) return;
        if (ring.thread == 0) wait_for_blocks();
        sync_consumers();
    }
    /* Makes the producer hold for the fence behind this phase's last item. Of a token alone it never does: only one in a step is waited for, the head's. */
    __device__ void expect(bool any) {
        if (!alone) ring.expect(any);
    }
    /* A gate opens once a layer, so its parity is that of the layers since this launch began. */
    __device__ Barrier &gate(int i) const { return at<Barrier>(k.gates)[i]; }
    __device__ void wait_at(int i) const { gate(i).wait((w.layer - first / PHASES) % 2); }
    __device__ void end_phase() {
        note_time(++phase);
        if (producing) return;
        if (phase == last) return ring.resume(); /* a producer with nothing to copy may not have asked for the last item yet */
        const Border next = border(phase);
        if (next == HINT && ring.thread == SPARE) arrive(); /* while others add up what the last units gave */
        sync_consumers();
        if (next != FENCE) return;
        if (ring.thread == 0) asm volatile("red.release.gpu.global.add.u64 [%0],1;" ::"l"(w.barrier) : "memory");
        if (phase % PHASES != PHASE_ATTENTION) ring.resume(); /* which is about to begin: only who has no part in it resumes */
    }

    __device__ void set_scale(int row, float square) { /* a warp calls it */
        if (ring.thread % 32 == 0) at<float>(k.scale)[row] = norm_factor(w, square);
    }
    /* The activations of a token alone behind a norm: they go to k.x, and if SCALED the factor that they lack to k.scale, to be there behind a barrier.
     * The norm's weights come in before wait(). */
    template <Type T, bool SCALED, class Wait> __device__ auto stage_normed(const Shaped &m, const float *weight, const float *x, const int *which, Wait wait) {
        typedef typename Codec<T>::Activation Activation;
        constexpr int STEP = 2; /* loads on the way at once */
        static_assert(STEP * CONSUMERS * 4 >= 2880, "gpt-oss's shapes");
        Activations<Activation> to = {at<Activation>(k.x), pitch_of<T>(m.stride), 1};
        float4 times[STEP] = {}, value[STEP];
#pragma unroll
        for (int i = 0, c = ring.thread * 4; i < STEP; i++, c += CONSUMERS * 4)
            if (c < w.dim) times[i] = *(const float4 *)(weight + c);
        wait();
        if (which) x += (size_t)which[0] * w.dim;
        float sum = take_fours(value, x, w.dim);
#pragma unroll
        for (int i = 0, c = ring.thread * 4; i < STEP; i++, c += CONSUMERS * 4) {
            float4 v = value[i], t = times[i];
            if (c < w.dim) Codec<T>::store_four((Activation *)to.x + Codec<T>::place(c), v.x * t.x, v.y * t.y, v.z * t.z, v.w * t.w);
        }
        if (SCALED) sum = warp_sum(sum);
        if (SCALED && ring.thread % 32 == 0) at<float>(k.square)[ring.thread / 32] = sum;
        sync_consumers();
        if (SCALED && ring.thread < 32) set_scale(0, warp_sum(ring.thread < WARPS ? at<float>(k.square)[ring.thread] : 0));
        return to;
    }

    /* What the warps found for one token in two rows of a unit: sums (WARPS, stride). */
    __device__ float2 total(const float *sums, int stride) const {
        float2 sum = {};
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            float2 found = *(const float2 *)(sums + i * stride);
            sum.x += found.x, sum.y += found.y;
        }
        return sum;
    }
    /* Units times rows of activations. group_of(unit) is where the weights of a unit lie; pair(unit, pair of rows, row of x, a, b) receives the results;
     * where the rows are tokens' and NORMED, k.scale has 1 / sqrt(mean of squares + eps) for each then. AS_TWINS: x lies as twin_at() says. */
    template <Type T, bool NORMED = false, bool AS_TWINS = false, class Group, class Pair>
    __device__ void stream(const Shaped &m, int units, const Activations<typename Codec<T>::Activation> &x, Group group_of, Pair pair) {
        if (producing) {
            ring.produce<T>(m, units * m.parts, [&](int item, int &part) {
                part = item % m.parts;
                return group_of(item / m.parts);
            });
            return;
        }
        if constexpr (alone || T == BF16) {
            multiply<T, AS_TWINS ? TWINS : most / 4, NORMED>(m, units, x, pair);
        } else {
            static_assert(MOST_CHOICES <= 8, "experts come in two tiles");
            if (x.n == 1)
                multiply<T, 0, NORMED>(m, units, x, pair);
            else if (most <= 4 || x.n <= 4)
                multiply<T, 1, NORMED>(m, units, x, pair);
            else if constexpr (most > 4)
                multiply<T, 2, NORMED>(m, units, x, pair);
        }
    }
    /* Pass by pass: a pass is as many units as there is room for their sums. If that is not enough for all, two halves of it
     * take turns, so that who is done with one pass can begin the next. TILES: of activations that are kept. */
    template <Type T, int TILES, bool NORMED, class Pair>
    __device__ void multiply(const Shaped &m, int units, const Activations<typename Codec<T>::Activation> &rows, Pair pair) {
        constexpr int ROWS = Codec<T>::ROWS;
        int n = alone ? 1 : rows.n, stride = n * ROWS, unit_sums = WARPS * stride, inverse = 65536 / n + 1; /* to divide by n: exact below 65536 / n */
        Kept<T, TILES> kept;
        ring.keep<T, TILES>(m, rows, kept);
        int pass = (units * unit_sums > k.room ? k.room / 2 : k.room) / unit_sums;
#pragma unroll 1
        for (int done = 0, turn = 0; done < units; done += pass, turn ^= 1) {
            ring.template renew<(most > 8)>(); /* read where registers are fewest */
            float *sums = at<float>(k.sums) + turn * (k.room / 2), *mine = sums + ring.thread / 32 * stride;
            mine += Codec<T>::template Sum<TILES>::first_of(ring.thread % 32); /* of the lane, else of the warp */
            int now = min(pass, units - done);
#pragma unroll 1
            for (int i = 0; i < now; i++, mine += unit_sums) {
                ring.multiply_kept<T, TILES>(m, kept, n, mine);
            }
            ring.items_ended(done + now == units);
            copies_done<0>(); /* of biases */
#pragma unroll 1
            for (int i = ring.thread / 32; i < n && NORMED && !alone && done == 0; i += WARPS)
                set_scale(i, find_square(input_square_of(w, i, w.layer), ring.thread % 32));
            sync_consumers();
#pragma unroll 1
            for (int i = ring.thread; i < now * (ROWS / 2) * n; i += CONSUMERS) {
                int p = i % (ROWS / 2), result = i / (ROWS / 2), unit = alone ? result : result * inverse >> 16, row = result - unit * n;
                float2 found = total(sums + unit * unit_sums + row * ROWS + 2 * p, stride);
                pair(done + unit, p, row, found.x, found.y);
            }
        }
    }
    /* The activations of tokens `which` (NULL: all) behind the norm that a layer, or the head, begins with; of several a block publishes a token's square.
     * Of a step of many tokens (0) norm_for_head() has done all that. */
    template <Type T> __device__ auto normed_rows(const Shaped &m, const void *normed, const float *weight, int n, const int *which = NULL) {
        typedef typename Codec<T>::Activation Activation;
        Activations<Activation> rows = {(const Activation *)normed, m.stride, n, which};
        if (producing) return rows;
        if constexpr (alone) return stage_normed<T, true>(m, weight, told(w.layer - 1).x, which, [&] { await(); });
        await();
#pragma unroll 1
        for (int i = block; i < n; i += blocks)
            publish_square(w.x + (size_t)(which ? which[i] : i) * w.dim, w.dim, input_square_of(w, i, w.layer), ring.thread);
        return rows;
    }

    /* q, k, v = W RMSNorm(x) + bias; RoPE; k and v to the cache. */
    template <Type T> __device__ void qkv(const DecodeLayer &l) {
        renew();
        typedef typename Codec<T>::Activation Activation;
        const Shaped m = matrix<T>(l.qkv, (w.n_heads + 2 * w.n_kv_heads) * w.head_dim, w.dim);
        int units = units_of_block(groups_of<T>(m.rows)), half = w.head_dim / 2;
        float *bias = at<float>(k.bias);
        if (!producing) {
#pragma unroll 1
            for (int i = ring.thread; i < units * Codec<T>::ROWS; i += CONSUMERS) copy_4(bias + i, m.bias ? m.bias + row_of_block<T>(i) : w.x, m.bias);
            copies_end();
            expect(units);
        }
        stream<T, true, twins>(
            m, units, normed_rows<T>(m, w.normed_for[FOR_QKV], l.attn_norm, tokens), [&](int i) { return group_at<T>(m, unit_of_block(i)); },
            [&](int unit, int p, int t, float a, float b) {
                int i = unit * Codec<T>::ROWS + 2 * p, r = row_of_block<T>(i);
                float scale = at<float>(k.scale)[t];
                int keys = w.n_heads * w.head_dim, values = keys + w.n_kv_heads * w.head_dim;
                float2 pair = {a * scale + bias[i], b * scale + bias[i + 1]};
                if (r < values) pair = turned(pair, at<float2>(k.turn)[t * half + r / 2 % half]);
                if (r >= keys) store_key_or_value(w, at<int>(k.position)[t], at<int>(k.page)[t], r, pair);
                Activation *q = (Activation *)told(w.layer).q + (size_t)t * keys;
                if constexpr (alone)
                    tell((uint32_t *)(q + told_place(r)), pack(pair.x, pair.y));
                else if (r < keys)
                    q[r] = (Activation)pair.x, q[r + 1] = (Activation)pair.y;
            });
    }

    /* Into how many parts a context of so many pages is split. */
    __device__ static int splits_of(int pages) { return pages <= 2 * SPLIT_PAGES ? 1 : min(SPLITS, (pages + SPLIT_PAGES - 1) / SPLIT_PAGES); }
    /* A job of attention, if split < used: the split-th of `used` parts of the pages, from page0 on, that token t at position p sees, which are keys
     * `from` to p, for a key/value head. */
    struct Part { int head, t, split, p, from, page0, pages, used; };
    __device__ Part part_of(int job, const DecodeLayer &l) const {
        int head = job % w.n_kv_heads, t = job / w.n_kv_heads % tokens, split = job / w.n_kv_heads / tokens, p = position_of(t);
        int from = l.window && p >= l.window ? p - l.window + 1 : 0, page0 = from / PAGE, pages = p / PAGE - page0 + 1;
        return {head, t, split, p, from, page0, pages, splits_of(pages)};
    }
    __device__ int position_of(int t) const { return producing ? s.position[t] : at<int>(k.position)[t]; }
    __device__ float *partial_of(int t, int head, int split) const {
        if (alone) t = w.layer % TURNS; /* in turns, see Told: there is room for FEW tokens */
        return w.split_partial + (((size_t)t * w.n_kv_heads + head) * SPLITS + split) * 8 * (w.head_dim + 2);
    }
    /* softmax(q k / sqrt(d)) v for each token and key/value head: the pages that the token sees are dealt to at most SPLITS blocks
     * and there, 16 keys at a time, the last ones first, to ATTENTION_WARPS; see merge() for what follows then. How the keys are dealt depends on the token's
     * position alone. The last blocks begin, because the first have more rows of other phases. */
    template <int D> __device__ void attention(const DecodeLayer &l) {
        renew();
        constexpr int ROW = D + 2, STATE = Merged<D>::STATE; /* most, total, sum; of each head of a group */
        int warp = ring.thread / 32, lane = ring.thread % 32, group = w.n_heads / w.n_kv_heads, heads = w.n_kv_heads;
        float *merged = at<float>(k.x); /* (ATTENTION_WARPS, 8, ROW) */
        float *sink = at<float>(k.scale);
        bool waited = false;
        if (producing) wait_previous();
        int longest = alone ? position_of(0) : __reduce_max_sync(~0u, lane < tokens ? position_of(lane) : 0);
        if (!producing && blocks - 1 - block >= tokens * heads) ring.resume(); /* no part in it, but for a split of a long one */
        /* at most: as the longest context is split, and no more, since each takes time */
        int jobs = tokens * heads * splits_of(min(longest / PAGE + 1, l.window ? l.window / PAGE + 2 : INT_MAX));
#pragma unroll 1
        for (int job = blocks - 1 - block; job < jobs; job += blocks) {
            const Part part = part_of(job, l);
            const int head = part.head, t = part.t, split = part.split, p = part.p, from = part.from, page0 = part.page0, pages = part.pages, used = part.used;
            if (split >= used) continue;
            int begin = page0 + pages * split / used, end = page0 + pages * (split + 1) / used, slab0 = max(begin * SLABS, from / SLAB_KEYS),
                slabs = min(end * SLABS, p / SLAB_KEYS + 1), attending = min(ATTENTION_WARPS, slabs - slab0),
                slab = warp < ATTENTION_WARPS ? slabs - 1 - warp : -1,
                streamed = used > 1 && k.stage_bytes >= 4 * D * PAGE ? min(end, fresh(t) / PAGE) : begin;
            const int *table = s.page + (producing ? s.seq[t] * s.header[0] : at<int>(k.table)[t]);
            if (producing) {
                ring.produce_pages(w, table, begin, streamed, head);
                continue;
            }
            Slab<D> keys;
            int plain = max(slab0, streamed * SLABS), page = slab >= plain ? table[slab / SLABS] : 0; /* from there on slabs do not come through the ring */
            auto load = [&] { keys.load(cache_of(w, page, 0, head), cache_of(w, page, 1, head), slab % SLABS, lane); };
            if (ring.thread < group) copy_4(sink + ring.thread, l.sinks + head * group + ring.thread, true);
            copies_end();
            bool early = alone && slab >= plain; /* earlier steps wrote these, but for one replaced below */
            if (early) load();
            if (!alone && !waited) await();
            waited = true;
            if (!alone && streamed > begin) ring.resume(), expect(job + blocks >= jobs); /* a fence follows its last part alone */
            SlabState<D> state;
            Told now = told(w.layer);
            const bf16 *query = (const bf16 *)now.q + ((size_t)t * w.n_heads + head * group + lane / 4) * D + lane % 4 * 8;
            uint4 q[D / 32] = {};
            if constexpr (!alone) {
                for (int c = 0; c < D / 32 && lane / 4 < group; c++) q[c] = __ldcg((const uint4 *)(query + c * 32));
            } else if (warp < attending) { /* its own key and value, too, are told: the cache has them only for steps to come */
                const bf16 *its_key = (const bf16 *)now.q + (w.n_heads + head) * D + lane % 4 * 8;
                const bf16 *its_value = (const bf16 *)now.q + (w.n_heads + heads + head) * D + lane / 8 * (D / 4);
                uint4 key[D / 32], value[D / 32];
                uint32_t highest;
                do {
                    highest = 0;
#pragma unroll
                    for (int c = 0; c < D / 32; c++) {
                        q[c] = ask((const uint4 *)(query + c * 32));
                        key[c] = ask((const uint4 *)(its_key + c * 32));
                        value[c] = ask((const uint4 *)(its_value + c * 8));
                    }
#pragma unroll
                    for (int c = 0; c < D / 32; c++) highest = highest_halves(highest_halves(highest_halves(highest, q[c]), key[c]), value[c]);
                } while (__any_sync(~0u, unwritten_half(highest)) && rest());
                replace_key<D>(keys, slab == p / SLAB_KEYS ? p % SLAB_KEYS : -1, key, value, lane);
            }
            static_assert(SLABS <= ATTENTION_WARPS, "a warp has one slab of a page at most");
            auto add = [&] { state.add(keys, q, slab * SLAB_KEYS, from, p, LOG2E * rsqrtf(D), lane), slab -= ATTENTION_WARPS; };
#pragma unroll 1
            for (; slab >= plain; early = false) {
                if (!early) load();
                if (slab - ATTENTION_WARPS >= plain) page = table[(slab - ATTENTION_WARPS) / SLABS];
                add();
            }
#pragma unroll 1
            for (int i = streamed - 1; i >= begin; i--)
                ring.consume([&](const uint8_t *stage) {
                    if (slab < slab0 || slab / SLABS != i) return;
                    keys.template load<true>((const bf16 *)stage, (const bf16 *)stage + D * PAGE, slab % SLABS, lane);
                    add();
                });
            ring.items_ended(streamed > begin);
            if (warp < attending) state.store(merged + warp * STATE + lane / 4 * ROW, lane);
            copies_done<0>();
            if (warp >= ATTENTION_WARPS) continue;
            sync_threads<2>(ATTENTION_WARPS * 32);
            constexpr int HEADS = ATTENTION_WARPS * 32 / (D / 2); /* at once, two dimensions a thread */
            static_assert(HEADS * (D / 2) == ATTENTION_WARPS * 32, "nothing is told twice");
            for (int h = ring.thread / (D / 2); h < group; h += HEADS) {
                Merged<D> m(ring.thread % (D / 2));
                m.template add<ATTENTION_WARPS>(merged + h * ROW, attending);
                if (used == 1)
                    store_attention(t, (head * group + h) * D + 2 * m.pair, m.result(sink[h]));
                else
                    m.tell_all(partial_of(t, head, split) + h * ROW);
            }
            sync_threads<2>(ATTENTION_WARPS * 32);
        }
        if (!alone && !producing && !waited) await();
        if (!producing && jobs > tokens * heads) merge<D>(l, jobs); /* some context may be split */
    }
    /* The parts of split contexts are told like Told, and each head has a block among those with a part that adds them up, in their order, and the sinks; it
     * makes them UNWRITTEN again, for which a fence stands before who writes there next. Blocks tell all their parts before, so nobody waits for who waits. */
    template <int D> __device__ void merge(const DecodeLayer &l, int jobs) {
        renew();
        constexpr int ROW = D + 2, STATE = Merged<D>::STATE;
        int lane = ring.thread % 32, group = w.n_heads / w.n_kv_heads;
#pragma unroll 1
        for (int job = blocks - 1 - block; job < jobs; job += blocks) {
            Part part = part_of(job, l);
            if (part.used == 1 || part.split >= part.used) continue;
#pragma unroll 1
            for (int h = ring.thread / 32; h < group; h += WARPS) {
                if (h % part.used != part.split) continue;
                float *states = partial_of(part.t, part.head, 0) + h * ROW, sink = l.sinks[part.head * group + h];
#pragma unroll 1
                for (int pair = lane; pair < D / 2; pair += 32) {
                    Merged<D> m(pair);
                    m.template add_told<SPLITS>(states, part.used);
                    store_attention(part.t, (part.head * group + h) * D + 2 * pair, m.result(sink));
#pragma unroll 1
                    for (int j = 0; j < part.used; j++) *(uint2 *)(states + j * STATE + 2 + 2 * pair) = make_uint2(UNWRITTEN, UNWRITTEN);
                }
                __syncwarp();
                if (lane < part.used) *(uint2 *)(states + lane * STATE) = make_uint2(UNWRITTEN, UNWRITTEN);
            }
        }
    }
    /* The first position that this step adds to a token's sequence: the cache has all before it. */
    __device__ int fresh(int t) const {
        int first = t;
        while (first && s.seq[first - 1] == s.seq[t]) first--;
        return s.position[first];
    }
    __device__ void store_attention(int t, int i, float2 x) const { /* dimensions i and i + 1 */
        int place = Codec<BF16>::place(i);
        write((uint32_t *)((bf16 *)told(w.layer).attn + (twins ? twin_at(t, place, w.attn_pitch) : (size_t)t * w.attn_pitch + place)), pack(x.x, x.y));
    }
    /* x += W attn + bias; and, since the router's logits are linear in x but for the norm's common factor, each block adds what
     * its rows of x contribute to them, and writes down the sum of their squares. Of several tokens it leaves x for phase up. */
    template <Type T> __device__ void output(const DecodeLayer &l) {
        renew();
        typedef typename Codec<T>::Activation Activation;
        const Shaped m = matrix<T>(l.o, w.dim, w.n_heads * w.head_dim);
        const Next next = {w.normed_for[FOR_UP], MXFP4, w.dim, NULL};
        int units = units_of_block(groups_of<T>(m.rows)), rows = units * Codec<T>::ROWS, experts = w.n_experts;
        float *own = at<float>(k.own), *bias = at<float>(k.bias), *columns = at<float>(k.columns), *norm = at<float>(k.norm);
        const Activation *attn = (const Activation *)told(w.layer).attn;
        if (!producing) {
#pragma unroll 1
            for (int unit = 0; unit < units; unit++) { /* rows of a unit lie together */
                int r = unit_of_block(unit) * Codec<T>::ROWS;
#pragma unroll 1
                for (int i = ring.thread; i < Codec<T>::ROWS * experts; i += CONSUMERS) {
                    bool real = i < (w.dim - r) * experts;
                    copy_4(columns + unit * Codec<T>::ROWS * experts + i, real ? l.router_columns + (size_t)r * experts + i : w.x, real);
                }
            }
#pragma unroll 1
            for (int t = ring.thread / 32; t < tokens; t += WARPS) /* x is as the last layer left it (what L1 had of it went with a look_behind() since) */
#pragma unroll 1
                for (int i = ring.thread % 32; i < rows; i += 32) {
                    int r = row_of_block<T>(i);
                    copy_4(own + t * rows + i, told(w.layer - 1).x + (r < w.dim ? (size_t)t * w.dim + r : 0), r < w.dim);
                }
#pragma unroll 1
            for (int i = ring.thread; i < rows; i += CONSUMERS) {
                bool has = m.bias && row_of_block<T>(i) < w.dim;
                copy_4(bias + i, has ? m.bias + row_of_block<T>(i) : w.x, has);
                if (!alone) copy_4(norm + i, l.ffn_norm + min(row_of_block<T>(i), w.dim - 1), true);
            }
            copies_end();
            expect(units);
            if (several) forget_share(w.act_out, tokens * w.top_k * w.act_pitch / 2); /* see Told; it would only wait here */
            await();
            const float *word = (const float *)attn + (ring.thread + 1) * (w.n_heads / w.n_kv_heads * w.head_dim / 2) - 1; /* the last one of a head's group */
            while (alone && ring.thread < w.n_kv_heads && __float_as_uint(ask(word)) == UNWRITTEN) rest();
            if (alone) sync_consumers();
        }
        stream<T, false, twins>(
            m, units, Activations<Activation>{attn, m.stride, tokens, NULL, 1, alone},
            [&](int i) { return group_at<T>(m, unit_of_block(i)); },
            [&](int unit, int p, int t, float a, float b) {
                int i = unit * Codec<T>::ROWS + 2 * p, r = row_of_block<T>(i);
                if (r >= w.dim) return;
                const Told now = told(w.layer), before = told(w.layer - 1);
                for (int j = 0; j < 2; j++) {
                    float x = own[t * rows + i + j] += bias[i + j] + (j ? b : a);
                    write(now.middle + (size_t)t * w.dim + r + j, x);
                    if (!alone) store_normed(next, t, r + j, x * norm[i + j]);
                }
                for (float *values : {before.middle, before.x})
                    if (alone) *(uint2 *)(values + r) = make_uint2(UNWRITTEN, UNWRITTEN);
            });
        if (!producing) add_to_router<T>(l);
    }
    /* What this block's rows of x are worth to the router: of each token its share of the logits, and the sum of its squares. */
    template <Type T> __device__ void add_to_router(const DecodeLayer &l) {
        if (most > 8) renew(); /* only where registers are fewest, since that takes time, too */
        int rows = units_of_block(groups_of<T>(w.dim)) * Codec<T>::ROWS, lane = ring.thread % 32, warp = ring.thread / 32;
        int experts = w.n_experts;
        const float *own = at<float>(k.own), *columns = at<float>(k.columns);
        if (alone) forget_share(told(w.layer - 1).q, turn_size(w) - 2 * w.dim);
        sync_consumers();
        constexpr int LANES = alone ? 8 : 1, EACH = 8 / LANES; /* for a token and an expert; parts of its sum for a lane, of eight */
#pragma unroll 1
        for (int i = ring.thread / LANES; i < tokens * experts; i += CONSUMERS / LANES) {
            int t = i / experts, e = i % experts;
            float part[EACH] = {};
#pragma unroll 1
            for (int r = ring.thread % LANES; r < rows; r += 8)
#pragma unroll
                for (int j = 0; j < EACH; j++) part[j] += own[t * rows + r + j] * columns[(r + j) * experts + e];
#pragma unroll
            for (int o = 4; o; o >>= 1)
                for (int j = 0; j < (alone ? 1 : o); j++) part[j] += alone ? __shfl_xor_sync(255u << (lane & 24), part[j], o) : part[j + o];
            const float bound = 1ull << (COUNTED - 10);
            long long steps = __float2ll_rn(fminf(fmaxf(part[0] * (1 / ROUTER_STEP), -bound), bound)); /* (a NaN is in x too) */
            if (ring.thread % LANES == 0) atomicAdd(router_sum_of(w, alone, t, w.layer, e), (1ull << COUNTED) + steps);
        }
#pragma unroll 1
        for (int t = WARPS - 1 - warp; t < tokens; t += WARPS) { /* the last warps have had the fewest experts */
            float sum = 0;
#pragma unroll 1
            for (int r = lane; r < rows; r += 32) sum += own[t * rows + r] * own[t * rows + r];
            sum = warp_sum(sum);
            if (lane == 0) publish(w.square + ((size_t)t * w.n_layers + w.layer) * blocks + block, sum);
        }
    }

    __device__ Active active() const {
        return {at<int>(k.active_expert), at<int>(k.active_begin), at<int>(k.active_order), at<int>(k.active_cost), at<int>(k.active_piece)};
    }

    /* What each token chose, its logits in `weights`, and `active` from it: every block finds it for itself from what the blocks added up in phase output.
     * All threads call it; the producer has `active` when it returns. The last warps route: others have more to do, and of one
     * token the producer knows all without waiting for anybody. found: see route(). */
    template <class Found> __device__ void choose(const DecodeLayer &l, const Active &active, Found found) {
        if (!producing && alone) return;
        const float *bias = l.router.bias;
        float *logit = at<float>(k.logit), *weights = at<float>(k.weights);
        int *experts = at<int>(k.experts), lane = ring.thread % 32;
#pragma unroll 1
        for (int t = WARPS - ring.thread / 32; t < tokens; t += WARPS + 1) {
            constexpr int STEP = 5; /* loads on the way at once */
            size_t place = (size_t)t * w.n_layers + w.layer;
            const unsigned long long *squares = w.square + place * blocks;
            float square = 0, *mine = logit + t * w.n_experts * 2;
#pragma unroll 1
            for (int e = lane; e < w.n_experts; e += 32) mine[w.n_experts + e] = bias ? bias[e] : 0;
#pragma unroll 1
            for (int turn = 0; turn * 32 < w.n_experts || turn * STEP * 32 < blocks; turn++) {
                int e = turn * 32 + lane, b = turn * STEP * 32 + lane;
                unsigned long long sum, part[STEP];
                bool there;
                do {
                    sum = e < w.n_experts ? look(router_sum_of(w, alone, t, w.layer, e)) : (unsigned long long)blocks << COUNTED;
#pragma unroll
                    for (int i = 0; i < STEP; i++) part[i] = b + i * 32 < blocks ? look(squares + b + i * 32) : THERE;
                    there = counted(sum) == blocks;
#pragma unroll
                    for (int i = 0; i < STEP; i++) there &= part[i] >> 32 != 0;
                } while (__any_sync(~0u, !there) && rest());
                if (e < w.n_experts) mine[e] = (float)collected(sum) * ROUTER_STEP;
#pragma unroll
                for (int i = 0; i < STEP; i++) square += __uint_as_float((uint32_t)part[i]);
            }
            float factor = norm_factor(w, warp_sum(square));
            if (lane == 0) at<float>(k.factor)[t] = factor;
#pragma unroll 1
            for (int e = lane; e < w.n_experts; e += 32) mine[e] = mine[e] * factor + mine[w.n_experts + e];
            route(mine, w.n_experts, w.top_k, lane, experts + t * w.top_k, weights + t * w.top_k, found);
        }
        __syncwarp();
        if (alone) { /* its experts differ, and may come in any order */
            if (lane < w.top_k) active.expert[lane] = experts[lane], active.begin[lane] = active.order[lane] = lane;
            __syncwarp();
            return;
        }
        if (!producing) return gate(ROUTED).arrive();
        wait_at(ROUTED);
        int choices = tokens * w.top_k, *next = (int *)logit, n = 0; /* in place of logits: how many chose an expert, then where its next choice goes */
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
            /* of at most FEW * top_k choices: 16 bits are enough for either */
            unsigned both = sum_to(cost_of(count) << 16 | count, lane), chosen = __ballot_sync(~0u, count);
            int place = n + __popc(chosen & before_me), from = begin + (both & 0xFFFF) - count;
            if (count) active.expert[place] = e, active.begin[place] = next[e] = from, active.cost[place + 1] = cost + (both >> 16);
            both = __shfl_sync(~0u, both, 31), n += __popc(chosen), begin += both & 0xFFFF, cost += both >> 16;
        }
        if (lane == 0) active.begin[n] = choices, active.cost[0] = 0;
        if (lane == 0 && block == 0 && phase % PHASES == PHASE_UP) atomicAdd(w.experts_read, n);
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
        /* The experts' units lie expert by expert, each behind its visit, and each block has one piece of them, so that it meets few experts. All pieces
         * cost the same. Lanes 0 and 1 find with which unit the piece of this block begins and that of the next one in phase up, 2 and 3 in phase down. */
        auto groups_of_lane = [&](int i) { return groups_of<MXFP4>(i < 2 ? 2 * w.ffn_dim : w.dim); };
        auto before = [&](int place, int groups) { return active.cost[place] * groups + place * VISIT; };
        int groups = groups_of_lane(lane), from = before(n, groups) * (block + lane % 2) / blocks, place = 0; /* of the last expert that begins before that */
#pragma unroll 1
        for (int i = lane + 1; i - lane < n; i += 32)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int its = __shfl_sync(~0u, from, j), passed = __popc(__ballot_sync(~0u, i < n && before(i, groups_of_lane(j)) <= its));
                place += lane == j ? passed : 0;
            }
        if (lane < 4) active.piece[lane] = place * groups + max(from - before(place, groups) - VISIT, 0) / (active.cost[place + 1] - active.cost[place]);
        __syncwarp();
    }
    static constexpr bool gets_ready = producing && alone; /* see get_ready() */
    struct Ready { /* a stage for a unit of phase up, and where it lies if the expert at `place` is this lane's */
        Barrier *full;
        uint8_t *stage;
        const uint8_t *from;
        int place;
    };
    /* From when the experts of a token alone are known until their first weights are here everybody waits. So the producer gets the first stages ready before,
     * whatever the experts are, and the lane that finds its own expert chosen asks for what belongs there (route()); produce() goes on behind them. */
    static constexpr int UP_UNIT = Codec<MXFP4>::stage_bytes(2880 / CHUNK);
    static_assert(2880 / CHUNK <= FP4_ITEM, "a unit is one item");
    __device__ void get_ready(const DecodeLayer &l, Ready (&ready)[MOST_COPIES]) {
        const Shaped m = matrix<MXFP4>(l.up, 2 * w.ffn_dim, w.dim);
        int groups = groups_of<MXFP4>(m.rows), begin = active().piece[0], lane = ring.thread % 32;
        ring.asked = min(min(MOST_COPIES, ring.stages), active().piece[1] - begin);
#pragma unroll
        for (int i = 0; i < MOST_COPIES; i++) {
            if (i >= ring.asked) break;
            ring.begin_stage(MOST_COPIES);
            ready[i] = {ring.full + ring.at, ring.stage + ring.at * ring.stage_bytes, group_at<MXFP4>(m, (begin + i) % groups) + lane * m.bytes,
                        (begin + i) / groups};
            if (lane == 0) ready[i].full->expect_bytes(UP_UNIT);
            ring.advance();
        }
        __syncwarp();
    }
    /* The beginning of phase up, or of phase down if that is launched alone: router, top-k. */
    __device__ void route_tokens(const DecodeLayer &l) {
        renew();
        if (producing) gate(FREE).wait((w.layer - first / PHASES) % 2 ^ 1); /* at once in the first layer */
        wait_previous();
        Ready ready[MOST_COPIES];
        if (gets_ready && phase % PHASES == PHASE_UP && w.n_experts <= ONE_EACH) get_ready(l, ready);
        if (border(phase) == FENCED && phase != first && ring.thread == CONSUMERS) { /* for all that consumers wrote before they arrived at FREE */
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            arrive();
        }
        choose(l, active(), [&](int place) {
#pragma unroll
            for (int i = 0; i < MOST_COPIES; i++)
                if (gets_ready && i < ring.asked && ready[i].place == place) ready[i].full->copy_row(ready[i].stage, ready[i].from, UP_UNIT);
        });
        producing ? gate(CHOSEN).arrive() : wait_at(CHOSEN);
        if (!producing && !alone) await(); /* only now: the router's sums say themselves that they are there */
        if (!producing && alone && phase % PHASES == PHASE_UP) /* and then all of x has been told */
            stage_normed<MXFP4, false>(matrix<MXFP4>(l.up, 2 * w.ffn_dim, w.dim), l.ffn_norm, told(w.layer).middle, NULL, [&] {
                if (phase != first && ring.thread == SPARE) wait_for_blocks();
            });
#pragma unroll 1
        for (int t = ring.thread / 32; t < tokens && !producing; t += WARPS) weigh(at<float>(k.weights) + t * w.top_k, w.top_k, ring.thread % 32);
    }
    /* Their biases, to be there behind a barrier. */
    template <Type T> __device__ void ask_for_bias(const Shaped &m, bool down) {
        Active active = this->active();
        int groups = groups_of<T>(m.rows), begin = active.piece[down ? 2 : 0] * Codec<T>::ROWS, end = active.piece[down ? 3 : 1] * Codec<T>::ROWS;
#pragma unroll 1
        for (int i = begin + ring.thread; i < end && !producing; i += CONSUMERS) {
            int row = i % (groups * Codec<T>::ROWS);
            bool has = m.bias && row < m.rows;
            copy_4(at<float>(k.bias) + i - begin, has ? m.bias + (size_t)active.expert[i / (groups * Codec<T>::ROWS)] * m.rows + row : w.x, has);
        }
        copies_end();
    }
    /* Multiplies a block's piece, expert by expert: rows_of(first, n) are the activations of n choices from the first on, in Active's order; in phase up of
     * a token alone one row serves all. pair(row of the matrix, choice, bias, a, b) receives two neighbouring rows of a result, and the place of their
     * biases. */
    template <Type T, class Of, class Pair> __device__ void multiply_chosen(const Shaped &m, bool down, Of rows_of, Pair pair) {
        Active active = this->active();
        const bool all = alone && !down;
        int groups = groups_of<T>(m.rows), begin = active.piece[down ? 2 : 0], end = active.piece[down ? 3 : 1];
#pragma unroll 1
        for (int from = begin, to; from < end; from = to) {
            const int *choices = active.begin + from / groups;
            to = all ? end : min(end, (from / groups + 1) * groups);
#pragma unroll 1
            for (int first = choices[0], n;; first += n) {
                n = alone ? 1 : min(choices[1] - first, MOST_CHOICES);
                bool done = alone || first + n == choices[1], last = done && to == end;
                if (!producing && last && border_of(down ? PHASE_QKV : PHASE_DOWN) == FENCE) expect(true);
                stream<T>(
                    m, to - from, rows_of(first, n), [&](int i) { return group_at<T>(m, (from + i) % groups) + active.expert[(from + i) / groups] * m.bytes; },
                    [&](int i, int p, int row, float a, float b) {
                        int unit = from + i, choice = active.order[all ? active.begin[unit / groups] : first + row];
                        pair(unit % groups * Codec<T>::ROWS + 2 * p, choice, at<float>(k.bias) + (unit - begin) * Codec<T>::ROWS + 2 * p, a, b);
                    });
                if (!producing && !last) sync_consumers();
                if (done) break;
            }
        }
    }
    /* The activations of the chosen experts (dense: of the one there is). */
    template <Type T> __device__ void up(const DecodeLayer &l) {
        renew();
        typedef typename Codec<T>::Activation Activation;
        const Shaped m = matrix<T>(l.up, 2 * w.ffn_dim, w.dim);
        const float *factors = at<float>(k.factor);
        ask_for_bias<T>(m, false);
        auto rows_of = [&](int first, int n) {
            if (alone) return Activations<Activation>{at<Activation>(k.x), m.stride, 1}; /* by route_tokens() */
            return Activations<Activation>{(const Activation *)w.normed_for[FOR_UP], m.stride, n, active().order + first, w.top_k};
        };
        multiply_chosen<T>(m, false, rows_of, [&](int r, int choice, const float *bias, float gate, float up) {
            if (r / 2 >= w.ffn_dim) return;
            float factor = factors[alone ? 0 : choice / w.top_k];
            write<true>((Activation *)told(w.layer).act + (size_t)choice * w.act_pitch + Codec<T>::place(r / 2),
                         (Activation)(swiglu(w.act, w.act_limit, gate * factor + bias[0], up * factor + bias[1], false) * w.act_lift));
        });
        if (producing || block) return;
        sync_consumers();
#pragma unroll 1
        for (int i = ring.thread; i < tokens * w.top_k; i += CONSUMERS) w.expert[i] = at<int>(k.experts)[i], w.weight[i] = at<float>(k.weights)[i];
    }

    /* x += the weighted sum of the chosen experts' W act + bias; of several tokens `next` receives x. */
    template <Type T> __device__ void down(const DecodeLayer &l, const Next &next) {
        renew();
        typedef typename Codec<T>::Activation Activation;
        const Shaped m = matrix<T>(l.down, w.dim, w.ffn_dim);
        const float *weights = at<float>(k.weights);
        ask_for_bias<T>(m, true);
        if (!producing) await();
        auto rows_of = [&](int first, int n) { return Activations<Activation>{(const Activation *)told(w.layer).act, m.stride, n, active().order + first, 1, true}; };
        multiply_chosen<T>(m, true, rows_of, [&](int r, int choice, const float *bias, float a, float b) {
            if (r < w.dim) add_to_x(alone ? 0 : choice / w.top_k, r, weights[choice] * (a + bias[0]), weights[choice] * (b + bias[1]), next);
        });
        if (!producing) gate(FREE).arrive();
    }
    /* Rows r and r + 1 of a token's x: += what an expert found. Experts' blocks come in any order, so what they bring is collected as integers, in steps of
     * EXPERT_STEP, and counted; the last one adds the sum to x, which nobody has changed meanwhile, and hands it to `next`. What is no number, or too large,
     * makes the sum one that no other can reach. */
    __device__ void add_to_x(int t, int r, float a, float b, const Next &next) {
        const Told now = told(w.layer);
        size_t at = (size_t)t * w.dim + r;
        float value[2] = {a, b}, old[2], times[2];
        unsigned long long *sum = w.expert_sum + (size_t)t * w.dim + r, found[2];
        const long long bad = (1ll << (COUNTED - 2)) / w.top_k;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            old[i] = ask(now.middle + at + i); /* is there: if it is Told, this block has seen all of it */
            if (!alone) times[i] = next.norm[r + i];
            float steps = value[i] * (1 / EXPERT_STEP);
            unsigned long long mine = (1ull << COUNTED) + (fabsf(steps) < bad / (2 * w.top_k) ? __float2ll_rn(steps) : bad);
            found[i] = atomicAdd(sum + i, mine) + mine;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (counted(found[i]) < w.top_k) continue;
            long long all = collected(found[i]);
            value[i] = llabs(all) < bad / 2 ? (float)all * EXPERT_STEP : NAN;
            sum[i] = 0;
            write(now.x + at + i, old[i] + value[i]);
            if (!alone) store_normed(next, t, r + i, (old[i] + value[i]) * times[i]);
        }
    }
    /* Logits of the rows that are wanted, (rows, vocab). */
    template <Type T> __device__ void head(const Matrix &head, const float *norm, int rows) {
        renew();
        const Shaped m = matrix<T>(head, w.vocab, w.dim);
        int units = units_of_block(groups_of<T>(m.rows));
        stream<T, true>(
            m, units, normed_rows<T>(m, w.normed_for[FOR_HEAD], norm, rows, s.row), [&](int i) { return group_at<T>(m, unit_of_block(i)); },
            [&](int unit, int p, int row, float a, float b) {
                int id = unit_of_block(unit) * Codec<T>::ROWS + 2 * p;
                float *logit = w.logits + (size_t)row * w.vocab + id, scale = at<float>(k.scale)[row];
                if (id < w.vocab) logit[0] = a * scale;
                if (id + 1 < w.vocab) logit[1] = b * scale;
            });
    }
};

/* The one table from types of weights, and sizes of heads, to instances. `most` tokens of gpt-oss's types and shapes, 1, 4, 8 or FEW: their instances have
 * nothing else, because what a phase does besides streaming is arithmetic with shapes, instructions have to be fetched too, and registers are few.
 * 0: any model. */
template <int most>
__global__ void __launch_bounds__(THREADS, 1)
    few(DecodeWork any, Step s, const DecodeLayer *layers, Matrix head, const float *norm, Layout k, int tokens, int rows, int first, int last) {
#if HOPPER
    extern __shared__ __align__(128) uint8_t memory[];
    const DecodeWork w = with_gpt_oss_shapes(any);
    auto run = [&](auto f) {
        f.begin();
        while (f.phase < last) {
            const DecodeLayer &l = layers[f.phase / PHASES];
            f.w.layer = f.phase / PHASES;
            int phase = f.w.layer == w.n_layers ? PHASES : f.phase % PHASES;
            if (phase == PHASE_UP || (phase == PHASE_DOWN && f.phase == first))
                f.route_tokens(l);
            switch (phase) {
            case PHASE_QKV: f.template qkv<BF16>(l); break;
            case PHASE_ATTENTION: f.template attention<64>(l); break;
            case PHASE_OUTPUT: f.template output<BF16>(l); break;
            case PHASE_UP: f.template up<MXFP4>(l); break;
            case PHASE_DOWN: {
                const DecodeLayer *after = layers + f.w.layer + 1;
                Next next = f.w.layer + 1 < w.n_layers ? next_of(w.normed_for[FOR_QKV], after->qkv, after->attn_norm, f.twins)
                                                       : next_of(w.normed_for[FOR_HEAD], head, norm);
                next.type = BF16, next.stride = w.dim;
                f.template down<MXFP4>(l, next);
                break;
            }
            default: f.template head<BF16>(head, norm, rows);
            }
            f.end_phase();
        }
    };
    if (most == 1) tokens = rows = 1;
    Few<false, most> consumer(w, s, k, memory, tokens, first, last);
    consumer.prepare(layers);
    if (threadIdx.x < CONSUMERS)
        run(consumer);
    else
        run(Few<true, most>(w, s, k, memory, tokens, first, last));
#endif
}
