/* few.cuh: a step of at most FEW tokens, as one kernel. Its time is the time to read the weights, each of them once and in
 * order. A block lives on each multiprocessor from the first layer to the logits. Its last warp, the producer, keeps a ring of
 * shared memory full with the weights that come next, over the borders of phases, so that no wait for activations leaves the
 * memory idle; the others, the consumers, multiply. A layer has five phases, between which all blocks wait for each other:
 *
 *     qkv        norm, query, key and value, rope, to the cache
 *     attention  over the cache, split when it is long
 *     output     onto the residual stream; each block's share of the router's logits
 *     up         norm, router, top-k, gate and up, activation
 *     down       onto the residual stream, weighted
 */
#ifndef FEW_CUH
#define FEW_CUH

#include "work.cuh"

constexpr int CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32; /* of a block */
constexpr int UNITS = 2;           /* groups of rows whose sums a warp keeps in phase down */
constexpr int ATTENTION_WARPS = 8; /* that share a split of the context */

/* Asks for bytes to come to the L2 cache, where copy() finds them later. */
__device__ inline void bring_near(const uint8_t *from, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

/* The consumers of a block wait for each other. */
__device__ inline void sync_consumers() { sync_threads(CONSUMERS); }

/* ---- how weights are encoded: each type is a row of this table ---- */

/* Activations of up to FEW tokens in shared memory, times LIFT: a row a token; the tokens whose bit is not set have zeros. */
template <typename A> struct Rows {
    const A *x, *zero; /* of the first column of a slice; zero: a slice of zeros */
    int pitch;
    unsigned tokens;
    __device__ const A *row(int t) const { return tokens >> t & 1 ? x + t * pitch : zero; }
};

/* A chunk is ROWS rows by K columns; a stage of shared memory holds `wide` of them that lie side by side. A Sum collects W x for these rows. Lane 4g + t works
 * on row g and on eight neighbouring columns. place(i) is where the i-th activation of a token lies. */
template <Type T> struct Codec;

/* Bytes between rows in a stage: odd and even rows begin half the banks apart. */
__host__ __device__ constexpr int bank_pitch(int bytes) { return bytes + (bytes % 128 ? 0 : 64); }

/* BF16: weights are mma's rows, activations its columns. What a lane reads at once, eight neighbouring columns of row g, fills a whole
 * fragment: two of its four words are row g, the others are called row g + 8, which is the same row at other columns. So a token
 * needs two columns of activations, one for either half, whose words lie together: in the order 0, 2, 1, 3. */
template <> struct Codec<BF16> {
    static constexpr Type TYPE = BF16;
    static constexpr int ROWS = GROUP, K = 32, WIDTH = K * 2; /* WIDTH: bytes of a chunk's row */
    static constexpr float LIFT = 1;
    typedef bf16 Activation;
    struct Sum { /* tokens 4j + t; [0] and [3] are the halves */
        float c[FEW / 4][4] = {};
        __device__ void store(float *out, int tokens, int lane) const { /* out (ROWS, tokens) */
#pragma unroll
            for (int j = 0; j < FEW / 4; j++)
                if (j * 4 + lane % 4 < tokens) out[lane / 4 * tokens + j * 4 + lane % 4] = c[j][0] + c[j][3];
        }
        __device__ void add_weighted(const Sum &s, const float *weight, int lane) { /* weight (FEW) */
#pragma unroll
            for (int j = 0; j < FEW / 4; j++)
                for (int i = 0; i < 4; i += 3) c[j][i] += weight[j * 4 + lane % 4] * s.c[j][i];
        }
    };
    __host__ __device__ static constexpr int place(int i) { return (i & ~6) | (i & 2) << 1 | (i & 4) >> 1; }
    __device__ static void store_four(bf16 *x, int at, float a, float b, float c, float d) {
        uint32_t *word = (uint32_t *)(x + place(at));
        word[0] = pack(a, b);
        word[2] = pack(c, d);
    }
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride * 2; }
    __host__ __device__ static constexpr int stage_bytes(int wide) { return ROWS * bank_pitch(wide * WIDTH); }
    __device__ static void copy(Barrier *full, uint8_t *stage, int wide, const uint8_t *group, int stride, int first, int n, int lane) {
        full->copy(stage, bank_pitch(wide * WIDTH), group + first * WIDTH, row_bytes(stride), ROWS, n * WIDTH, lane);
    }
    /* Where a lane reads, of chunk `first` of a stage and of activations of up to 4 TILES tokens. */
    template <int TILES> struct Lane {
        const uint8_t *weights;
        const bf16 *column[TILES];
        __device__ Lane(const uint8_t *stage, int wide, int first, const Rows<bf16> &x, int lane)
            : weights(stage + lane / 4 * bank_pitch(wide * WIDTH) + first * WIDTH + lane % 4 * 16) {
#pragma unroll
            for (int j = 0; j < TILES; j++) column[j] = x.row(j * 4 + lane / 8) + lane % 4 * 8 + lane / 4 % 2 * 4;
        }
        __device__ void add(Sum &sum, int i) const { /* chunk first + i */
            uint4 w = *(const uint4 *)(weights + i * WIDTH);
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                uint2 x = *(const uint2 *)(column[j] + i * K);
                mma(sum.c[j], w.x, w.y, w.z, w.w, x.x, x.y);
            }
        }
    };
};

/* MXFP4: a chunk of 16 rows by 64 columns in 544 bytes. Lane 4g + t has 16 of them: columns 8t .. 8t + 7 of either block of 32, of
 * row g and then of row g + 8, a word each; behind these 512 bytes lie the scales in the same order, four bytes for each g. A
 * word becomes bf16 times 2^-126 by shifts and masks (fp4_to_bf16); the activations are lifted by 2^100, exactly, and the
 * block's scale, stored as the exponent of a float with 26 added, does the rest. */
__device__ inline float fp4_scale(uint32_t scales, int i) { return __uint_as_float((i < 3 ? scales << (23 - 8 * i) : scales >> 1) & 0x7F800000); }

template <> struct Codec<MXFP4> { /* weights are mma's rows, activations its columns */
    static constexpr Type TYPE = MXFP4;
    static constexpr int ROWS = FP4_ROWS, K = FP4_COLUMNS;
    static constexpr float LIFT = 0x1p100f;
    typedef bf16 Activation;
    struct Sum { /* rows g and g + 8, tokens 2t and 2t + 1 [0] and those plus 8 [1] */
        float c[2][4] = {};
        __device__ void store(float *out, int tokens, int lane) const {
            for (int i = 0; i < 8; i++) {
                int row = lane / 4 + i % 4 / 2 * 8, token = lane % 4 * 2 + i % 2 + i / 4 * 8;
                if (token < tokens) out[row * tokens + token] = c[i / 4][i % 4];
            }
        }
        __device__ void add_weighted(const Sum &s, const float *weight, int lane) {
            for (int i = 0; i < 8; i++) c[i / 4][i % 4] += weight[lane % 4 * 2 + i % 2 + i / 4 * 8] * s.c[i / 4][i % 4];
        }
    };
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride / K * FP4_BYTES / ROWS; }
    __host__ __device__ static constexpr int stage_bytes(int wide) { return wide * FP4_BYTES; }
    __device__ static void copy(Barrier *full, uint8_t *stage, int, const uint8_t *group, int, int first, int n, int lane) {
        full->copy(stage, 0, group + (size_t)first * FP4_BYTES, 0, 1, n * FP4_BYTES, lane);
    }
    __host__ __device__ static constexpr int place(int i) { return i; }
    __device__ static void store_four(bf16 *x, int at, float a, float b, float c, float d) { *(uint2 *)(x + at) = make_uint2(pack(a, b), pack(c, d)); }
    template <int TILES> struct Lane {
        static constexpr bool MANY = TILES > 2; /* more than 8 tokens */
        const uint8_t *weights, *scale;
        const bf16 *low, *high;
        __device__ Lane(const uint8_t *stage, int, int first, const Rows<bf16> &x, int lane)
            : weights(stage + first * FP4_BYTES + lane * 16), scale(stage + first * FP4_BYTES + 512 + lane / 4 * 4), low(x.row(lane / 4) + lane % 4 * 8),
              high(MANY ? x.row(lane / 4 + 8) + lane % 4 * 8 : NULL) {}
        __device__ void add(Sum &sum, int i) const {
            uint4 words = *(const uint4 *)(weights + i * FP4_BYTES);
            uint32_t scales = *(const uint32_t *)(scale + i * FP4_BYTES);
#pragma unroll
            for (int block = 0; block < 2; block++) {
                uint4 row = fp4_to_bf16(block ? words.y : words.x), row8 = fp4_to_bf16(block ? words.w : words.z);
                float scale = fp4_scale(scales, block), scale8 = fp4_scale(scales, 2 + block);
                auto multiply = [&](float (&to)[4], const bf16 *column) {
                    float c[4];
                    mma_eight_alone(c, row, row8, *(const uint4 *)(column + i * K + block * 32));
                    to[0] += scale * c[0], to[1] += scale * c[1], to[2] += scale8 * c[2], to[3] += scale8 * c[3];
                };
                multiply(sum.c[0], low);
                if (MANY) multiply(sum.c[1], high);
            }
        }
    };
};

template <> struct Codec<F32> { /* lane: columns 4t .. 4t + 3 of either half, without tensor cores */
    static constexpr Type TYPE = F32;
    static constexpr int ROWS = GROUP, K = 32, WIDTH = K * 4;
    static constexpr float LIFT = 1;
    typedef float Activation;
    struct Sum { /* row g, its own columns only */
        float c[FEW] = {};
        __device__ void store(float *out, int tokens, int lane) const {
            for (int j = 0; j < FEW; j++) {
                float sum = c[j];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (lane % 4 == 0 && j < tokens) out[lane / 4 * tokens + j] = sum;
            }
        }
        __device__ void add_weighted(const Sum &s, const float *weight, int) {
            for (int j = 0; j < FEW; j++) c[j] += weight[j] * s.c[j];
        }
    };
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride * 4; }
    __host__ __device__ static constexpr int stage_bytes(int wide) { return ROWS * bank_pitch(wide * WIDTH); }
    __device__ static void copy(Barrier *full, uint8_t *stage, int wide, const uint8_t *group, int stride, int first, int n, int lane) {
        full->copy(stage, bank_pitch(wide * WIDTH), group + first * WIDTH, row_bytes(stride), ROWS, n * WIDTH, lane);
    }
    __host__ __device__ static constexpr int place(int i) { return i; }
    __device__ static void store_four(float *x, int at, float a, float b, float c, float d) { *(float4 *)(x + at) = make_float4(a, b, c, d); }
    template <int> struct Lane {
        const uint8_t *weights;
        const Rows<float> &x;
        int column;
        __device__ Lane(const uint8_t *stage, int wide, int first, const Rows<float> &x, int lane)
            : weights(stage + lane / 4 * bank_pitch(wide * WIDTH) + first * WIDTH + lane % 4 * 16), x(x), column(lane % 4 * 4) {}
        __device__ void add(Sum &sum, int i) const {
#pragma unroll 1
            for (int half = 0; half < 2; half++) {
                float4 b = *(const float4 *)(weights + i * WIDTH + half * 64);
#pragma unroll
                for (int j = 0; j < FEW; j++) {
                    if (!(x.tokens >> j & 1)) continue;
                    float4 a = *(const float4 *)(x.x + j * x.pitch + i * K + half * 16 + column);
                    sum.c[j] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
                }
            }
        }
    };
};

/* ---- a block's shared memory ---- */

struct Layout { /* where each array begins, in bytes; the ring is what the others leave */
    int stages, stage_bytes;
    int ring, barriers, x, partial, zero, square, scale, bias, own, columns, logit, weights, experts, turn, position, page;
    int begun; /* what the barrier began with, and behind it whether this split is a head's last */
    int bytes; /* of all */
    int active, active_expert, active_tokens, active_weight, active_choice, active_chosen, active_end; /* see Active */
};

/* Elements between rows of activations. */
template <Type T> __host__ __device__ constexpr int pitch_of(int stride) {
    int size = sizeof(typename Codec<T>::Activation);
    return bank_pitch(stride * size) / size;
}
/* Groups of rows between two reductions. */
template <Type T> __host__ __device__ constexpr int pass_of(int tokens) { return tokens <= 2 ? 96 / Codec<T>::ROWS : max_of(192 / tokens / Codec<T>::ROWS, 1); }
template <Type T> __host__ __device__ constexpr int down_pass_of(int tokens) { return min_of(pass_of<T>(tokens), UNITS); }
/* Slices of activations that a warp holds in phase down: the one in use and the next, if there is room. */
__host__ __device__ constexpr int down_buffers(int tokens) { return tokens > 8 ? 1 : 2; }

template <Type T> __host__ __device__ int groups_of(int rows) { return (rows + Codec<T>::ROWS - 1) / Codec<T>::ROWS; }

/* The experts that any token chose, in ascending order, with each token's weight for them (0: not chosen), which of its
 * choices it was, and the set of these tokens. */
struct Active {
    int *n, *expert;  /* [0]; (n) */
    unsigned *tokens; /* (n) */
    float *weight;    /* (n, FEW) */
    int *choice;      /* (n, FEW) */
    unsigned *chosen; /* (n_experts / 32) a bit an expert */

    static int most(int n_experts, int top_k, int tokens) { return min_of(n_experts, top_k * tokens); }
    __device__ int place(int e) const { /* how many were chosen before it */
        int before = __popc(chosen[e / 32] & ((1u << e % 32) - 1));
#pragma unroll 1
        for (int i = 0; i < e / 32; i++) before += __popc(chosen[i]);
        return before;
    }
};

/* The layout for so many tokens in blocks that have `room` bytes; does not fit if it has more. blocks: of the grid. */
inline Layout layout_for(const Work &w, const Card &card, int tokens, int blocks, int room) {
    Layout k = {};
    const Block &b = card.layer[0];
    int most = Active::most(w.n_experts, w.top_k, tokens), x = 0, partial = 0;
    auto rows_of = [&](const Matrix &m, int n) { /* of the units of one block, of n matrices */
        int rows = m.type == MXFP4 ? FP4_ROWS : GROUP, units = (m.rows + rows - 1) / rows * n;
        return (units + blocks - 1) / blocks * rows;
    };
    auto consider = [&](auto codec, const Matrix &m, bool down) {
        typedef decltype(codec) C;
        constexpr Type T = C::TYPE;
        int size = sizeof(typename C::Activation), slice = m.per * C::K;
        int rows = down ? WARPS * down_buffers(tokens) * tokens * pitch_of<T>(slice) : tokens * pitch_of<T>(m.stride);
        x = max_of(x, rows * size);
        for (int n = 1; n <= tokens; n++) partial = max_of(partial, 2 * WARPS * pass_of<T>(n) * C::ROWS * n * 4); /* the head may have fewer rows */
        k.stage_bytes = max_of(k.stage_bytes, C::stage_bytes(m.per * WARPS));
        k.zero = max_of(k.zero, slice * size);
    };
    auto with_type = [&](const Matrix &m, bool down) {
        m.type == BF16 ? consider(Codec<BF16>(), m, down) : m.type == F32 ? consider(Codec<F32>(), m, down) : consider(Codec<MXFP4>(), m, down);
    };
    with_type(b.qkv, false), with_type(b.o, false), with_type(b.up, false), with_type(b.down, true), with_type(card.head, false);
    int units_rows = max_of(rows_of(b.qkv, 1), rows_of(b.up, most));
    int own = max_of(rows_of(b.o, 1), rows_of(b.down, 1));
    x = max_of(x, (w.head_dim + CONSUMERS + 33) * 4);                    /* attend_plain */
    x = max_of(x, ATTENTION_WARPS * 8 * (w.head_dim + 2) * 4 - partial); /* attention's states reach into partial */
    auto take = [&](int &at, int bytes) { at = k.bytes, k.bytes += (bytes + 15) / 16 * 16; };
    take(k.x, x);
    take(k.partial, partial);
    take(k.zero, k.zero);
    take(k.square, tokens * WARPS * 4);
    take(k.scale, FEW * 4);
    take(k.bias, units_rows * 4);
    take(k.own, own * tokens * 4);
    take(k.columns, rows_of(b.o, 1) * w.n_experts * 4);
    take(k.logit, tokens * w.n_experts * 4);
    take(k.weights, tokens * w.top_k * 4);
    take(k.experts, tokens * w.top_k * 4);
    take(k.active, 4);
    take(k.active_expert, most * 4);
    take(k.active_tokens, most * 4);
    take(k.active_weight, most * FEW * 4);
    take(k.active_choice, most * FEW * 4);
    take(k.active_chosen, (w.n_experts + 31) / 32 * 4);
    k.active_end = k.bytes;
    take(k.turn, tokens * w.head_dim / 2 * 8);
    take(k.position, tokens * 4);
    take(k.page, tokens * 4);
    take(k.begun, 16);
    k.stages = max_of(1, min_of(16, (room - k.bytes - 128) / (k.stage_bytes + 2 * (int)sizeof(Barrier))));
    take(k.barriers, k.stages * 2 * sizeof(Barrier));
    k.bytes = (k.bytes + 127) / 128 * 128;
    take(k.ring, k.stages * k.stage_bytes);
    return k;
}

/* ---- streaming weights through a block ---- */

/* Where group `group` of a matrix begins. */
template <Type T> __device__ const uint8_t *group_at(const Matrix &m, int group) {
    return m.data + (size_t)group * Codec<T>::ROWS * Codec<T>::row_bytes(m.stride);
}
/* The first chunk of a warp's slice in part `part` of the columns. */
__device__ inline int first_chunk(const Matrix &m, int part, int warp) { return (part * WARPS + warp) * m.per; }

/* A block's way through the weights, item by item: an item is a group of rows, or a part of its columns, in which every
 * consumer has a slice. */
struct Ring {
    uint8_t *stage;        /* (stages) */
    Barrier *full, *empty; /* (stages) */
    int stages, stage_bytes, thread, at = 0;
    unsigned parity = 0;

    __device__ Ring(const Layout &k, uint8_t *memory)
        : stage(memory + k.ring), full((Barrier *)(memory + k.barriers)), empty(full + k.stages), stages(k.stages), stage_bytes(k.stage_bytes),
          thread(threadIdx.x) {
        if (thread < stages) full[thread].init(Barrier::COPIERS), empty[thread].init(WARPS);
        Barrier::show_init();
    }
    __device__ void advance() {
        if (++at == stages) at = 0, parity ^= 1;
    }
    /* The producer's part of a phase: locate(item, part) is where the group's weights lie and which part of the columns is meant. */
    template <Type T, class Locate> __device__ void produce(const Matrix &m, int items, Locate locate) {
        int wide = m.per * WARPS;
        for (int i = 0; i < items; i++) {
            int part;
            const uint8_t *group = locate(i, part);
            empty[at].wait(parity ^ 1); /* at once the first time round */
            Codec<T>::copy(full + at, stage + at * stage_bytes, wide, group, m.stride, part * wide, min(wide, m.chunks - part * wide), thread % 32);
            advance();
        }
    }
    /* Multiplies chunks first to first + n - 1 of the next item, which has `wide`, by activations, of which x has these columns. */
    template <Type T> __device__ void take(typename Codec<T>::Sum &sum, int wide, int first, int n, const Rows<typename Codec<T>::Activation> &x) {
        full[at].wait(parity);
        if (x.tokens >> 8)
            multiply<T, 4>(sum, wide, first, n, x);
        else if (x.tokens >> 4)
            multiply<T, 2>(sum, wide, first, n, x);
        else
            multiply<T, 1>(sum, wide, first, n, x);
        __syncwarp();
        if (thread % 32 == 0) empty[at].arrive();
        advance();
    }
    template <Type T, int TILES>
    __device__ void multiply(typename Codec<T>::Sum &sum, int wide, int first, int n, const Rows<typename Codec<T>::Activation> &x) {
        typename Codec<T>::template Lane<TILES> lane(stage + at * stage_bytes, wide, first, x, thread % 32);
#pragma unroll 1
        for (int i = 0; i < n; i++) lane.add(sum, i);
    }
};

/* At the end of a pass, what each warp found for `units` groups of rows lies in `partial` (WARPS, pass, ROWS, tokens). One warp
 * adds it up and hands it out in pairs of rows, pair(unit, pair, token, a, b), while the others go on: passes take turns with
 * two buffers, and a warp that is still adding has not come to the end of the next pass. */
template <int ROWS, class Pair> __device__ void end_pass(int thread, const float *partial, int turn, int pass, int units, int tokens, Pair pair) {
    copies_done<0>(); /* of biases */
    sync_consumers();
    if (thread / 32 != turn % WARPS) return;
#pragma unroll 1
    for (int i = thread % 32; i < units * (ROWS / 2) * tokens; i += 32) {
        int token = i % tokens, p = i / tokens % (ROWS / 2), unit = i / tokens / (ROWS / 2);
        const float *at = partial + (unit * ROWS + 2 * p) * tokens + token;
        float a = 0, b = 0;
#pragma unroll 5
        for (int w = 0; w < WARPS; w++, at += pass * ROWS * tokens) {
            a += at[0];
            b += at[tokens];
        }
        pair(unit, p, token, a, b);
    }
}

/* ---- the kernel ---- */

/* Fetches the step, `bytes` from `post` in the host's memory (a step of many tokens is there already: 0), and begins it: x = the token's row of the
 * embedding; a token of -1 is what its slot drew last. The page remembers it. A block a token. */
__global__ void embed(Work w, Step s, Step post, int bytes, Matrix table) {
    launch_next();
    wait_previous();
    int t = blockIdx.x, seq = __ldcv(post.seq + t), id = __ldcv(post.token + t), p = __ldcv(post.position + t);
    for (int i = threadIdx.x; i < bytes / 16 && t == 0; i += blockDim.x) ((uint4 *)s.how)[i] = __ldcv((const uint4 *)post.how + i);
    if (id < 0) id = max(w.drawn[__ldcv(post.slot + seq)], 0); /* after a NaN the step is void */
    if (threadIdx.x == 0) w.page_token[(size_t)s.page[(size_t)seq * __ldcv(post.header) + p / PAGE] * PAGE + p % PAGE] = id;
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) {
        size_t at = (size_t)id * table.stride + i;
        w.x[(size_t)t * w.dim + i] = table.type == F32 ? ((const float *)table.data)[at] : (float)((const bf16 *)table.data)[at];
    }
    for (int i = threadIdx.x; i < w.n_layers * w.n_experts && t < FEW; i += blockDim.x)
        w.router_sum[((size_t)(i / w.n_experts) * FEW + t) * w.n_experts + i % w.n_experts] = 0;
}

enum { PHASE_QKV, PHASE_ATTENTION, PHASE_OUTPUT, PHASE_UP, PHASE_DOWN, PHASES };

/* A block at work on phases first to last - 1 of a step; phase n_layers * PHASES is the head. Each phase is a function that
 * all warps call. What a phase reads of the phases before it, it reads behind await(). */
struct Few {
    Work w;
    const Step &s;
    const Layout &k;
    uint8_t *memory;
    int tokens, first, last, phase, block = blockIdx.x, blocks = gridDim.x;
    int origin = 0; /* adds nothing, but the compiler does not know: see renew() */
    bool producing;
    Ring ring;

    __device__ Few(const Work &w, const Step &s, const Layout &k, uint8_t *memory, int tokens, int first, int last)
        : w(w), s(s), k(k), memory(memory), tokens(tokens), first(first), last(last), phase(first), producing(threadIdx.x >= CONSUMERS), ring(k, memory) {
        if (threadIdx.x == 0) at<unsigned long long>(k.begun)[0] = *(volatile unsigned long long *)w.barrier / gridDim.x * gridDim.x;
#pragma unroll 1
        for (int i = threadIdx.x * 4; i < k.square - k.zero; i += THREADS * 4) *at<int>(k.zero + i) = 0;
        __syncthreads();
    }
    __device__ void note_time(int at) {
        if (blockIdx.x == 0 && ring.thread == 0) asm volatile("mov.u64 %0,%globaltimer;" : "=l"(w.ended[at])::"memory");
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
            at<int>(k.position)[t] = p, at<int>(k.page)[t] = page_of(s, s.seq[t], p);
        }
        sync_consumers();
    }
    /* The units (groups of rows) of this block, of `units` in all: every so many-th; which ones; which row of the matrix row i of them is. */
    __device__ int units_of_block(int units) const { return (units - block + blocks - 1) / blocks; }
    __device__ int unit_of_block(int i) const { return block + i * blocks; }
    template <Type T> __device__ int row_of_block(int i) const { return unit_of_block(i / Codec<T>::ROWS) * Codec<T>::ROWS + i % Codec<T>::ROWS; }
    template <typename U> __device__ U *at(int offset) const { return (U *)(memory + origin + offset); }

    /* A phase begins. What looks as if it might have changed is not computed ahead, for all phases at once, to be kept in local memory. */
    __device__ void renew() { asm volatile("" : "+r"(origin), "+r"(ring.thread), "+r"(block), "+r"(blocks)); }
    /* Until all blocks have ended the phase before this one, and what they wrote can be read. */
    __device__ void await() {
        if (phase == first) return wait_previous();
        if (ring.thread % CONSUMERS == 0) {
            unsigned long long target = at<unsigned long long>(k.begun)[0] + (unsigned long long)(phase - first) * blocks, now;
            do asm volatile("ld.acquire.gpu.global.u64 %0,[%1];" : "=l"(now) : "l"(w.barrier) : "memory");
            while (now < target);
        }
        if (producing)
            __syncwarp();
        else
            sync_consumers();
    }
    __device__ void end_phase() {
        note_time(++phase);
        if (producing || phase == last) return;
        sync_consumers();
        if (ring.thread == 0) asm volatile("red.release.gpu.global.add.u64 [%0],1;" ::"l"(w.barrier) : "memory");
    }

    /* RMSNorm of rows of x (..., dim) for the activations of a block, in two parts so that nobody waits for the sum of squares: x *
     * weight goes to k.x; what is multiplied by it has to be multiplied by scale[row] = 1 / sqrt(mean + eps), which is there after the
     * next barrier. The weights come in before await(). A row is cut into as many parts as there are warps, so that its sum does not depend on
     * how many rows there are. */
    template <Type T> __device__ void stage_normed(int stride, const float *weight, const int *row, int rows) {
        constexpr int STEP = 2; /* loads on the way at once */
        int pitch = pitch_of<T>(stride), warp = ring.thread / 32, lane = ring.thread % 32;
        float *square = at<float>(k.square), *scale = at<float>(k.scale); /* square (rows, WARPS) */
        auto *out = at<typename Codec<T>::Activation>(k.x);
#pragma unroll 1
        for (int base = ring.thread * 4, turn = 0; turn * STEP * CONSUMERS * 4 < stride; base += STEP * CONSUMERS * 4, turn++) {
            float4 times[STEP] = {};
#pragma unroll
            for (int i = 0; i < STEP; i++)
                if (base + i * CONSUMERS * 4 < w.dim) times[i] = *(const float4 *)(weight + base + i * CONSUMERS * 4);
            if (turn == 0) await();
#pragma unroll 4
            for (int r = 0; r < rows; r++) {
                const float *from = w.x + (size_t)(row ? row[r] : r) * w.dim;
                float4 value[STEP] = {};
                float sum = 0;
#pragma unroll
                for (int i = 0; i < STEP; i++)
                    if (base + i * CONSUMERS * 4 < w.dim) value[i] = __ldcg((const float4 *)(from + base + i * CONSUMERS * 4));
#pragma unroll
                for (int i = 0; i < STEP; i++) {
                    constexpr float L = Codec<T>::LIFT;
                    float4 v = value[i], t = times[i];
                    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                    if (base + i * CONSUMERS * 4 < stride)
                        Codec<T>::store_four(out + r * pitch, base + i * CONSUMERS * 4, v.x * t.x * L, v.y * t.y * L, v.z * t.z * L, v.w * t.w * L);
                }
                sum = warp_sum(sum);
                if (lane == 0) square[r * WARPS + warp] = (turn ? square[r * WARPS + warp] : 0) + sum;
            }
        }
        sync_consumers();
        if (ring.thread < rows) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += square[ring.thread * WARPS + i];
            scale[ring.thread] = rsqrtf(sum / w.dim + w.eps);
        }
    }

    /* All units of a block, for a matrix whose rows all meet the same activations x (tokens, pitch). group_of(unit) is where the weights of a block's unit
     * lie; pair(unit, pair of rows, token, a, b) receives the results. */
    template <Type T, class Group, class Pair>
    __device__ void stream(const Matrix &m, int units, int tokens, Group group_of, Pair pair) {
        constexpr int ROWS = Codec<T>::ROWS;
        typedef typename Codec<T>::Activation Activation;
        if (producing) {
            ring.produce<T>(m, units * m.parts, [&](int item, int &part) {
                part = item % m.parts;
                return group_of(item / m.parts);
            });
            return;
        }
        int pass = pass_of<T>(tokens), warp = ring.thread / 32 % WARPS /* the producer has left */, wide = m.per * WARPS, per = m.per;
        Rows<Activation> x = {NULL, at<Activation>(k.zero), pitch_of<T>(m.stride), (1u << tokens) - 1};
        for (int first = 0, turn = 0; first < units; first += pass, turn++) {
            float *of_pass = at<float>(k.partial) + turn % 2 * (WARPS * pass * ROWS * tokens);
            int n = min(pass, units - first);
            for (int u = 0; u < n; u++) {
                typename Codec<T>::Sum sum;
                int left = m.chunks - warp * per;
                x.x = at<Activation>(k.x) + warp * per * Codec<T>::K;
                for (int part = 0; part < m.parts; part++, left -= wide, x.x += wide * Codec<T>::K) ring.take<T>(sum, wide, warp * per, min(per, left), x);
                sum.store(of_pass + (warp * pass + u) * ROWS * tokens, tokens, ring.thread % 32);
            }
            end_pass<ROWS>(ring.thread, of_pass, turn, pass, n, tokens,
                           [&](int unit, int p, int token, float a, float b) { pair(first + unit, p, token, a, b); });
        }
    }

    /* q, k, v = W RMSNorm(x) + bias; RoPE; k and v to the cache. */
    template <Type T> __device__ void qkv(const Block &l) {
        renew();
        typedef typename Codec<T>::Activation Activation;
        const Matrix m = l.qkv;
        int units = units_of_block(groups_of<T>(m.rows)), half = w.head_dim / 2;
        float *scale = at<float>(k.scale), *bias = at<float>(k.bias);
        if (!producing) {
#pragma unroll 1
            for (int i = ring.thread; i < units * Codec<T>::ROWS; i += CONSUMERS) bias[i] = m.bias ? m.bias[row_of_block<T>(i)] : 0;
            stage_normed<T>(m.stride, l.attn_norm, NULL, tokens);
        }
        stream<T>(m, units, tokens, [&](int i) { return group_at<T>(m, unit_of_block(i)); }, [&](int unit, int p, int t, float a, float b) {
            int i = unit * Codec<T>::ROWS + 2 * p, r = row_of_block<T>(i);
            store_qkv<Activation>(w, t, at<int>(k.position)[t], at<int>(k.page)[t], r, a * scale[t] + bias[i], b * scale[t] + bias[i + 1],
                                  at<float2>(k.turn)[t * half + r / 2 % half]);
        });
    }

    /* softmax(q k / sqrt(d)) v for each token and key/value head: the pages that the token sees are dealt to at most SPLITS blocks
     * and there to the warps; the block that arrives last adds what the others found, in their order, and the sinks. How the
     * pages are dealt depends on the token's position alone. */
    template <int D> __device__ void attention(const Block &l) {
        renew();
        constexpr int ROW = D + 2, STATE = 8 * ROW; /* most, total, sum; of each head of a group */
        int warp = ring.thread / 32, lane = ring.thread % 32, g = lane / 4, group = w.n_heads / w.n_kv_heads, heads = w.n_kv_heads;
        int jobs = SPLITS * tokens * heads;
        auto share_of = [&](int job, int p, int &first, int &n, int &used) { /* pages of a job: of a head, a token at position p, a split */
            int split = job / heads / tokens, from = l.window && p >= l.window ? p - l.window + 1 : 0;
            int page0 = from / PAGE, pages = p / PAGE - page0 + 1;
            used = min(SPLITS, (pages + ATTENTION_WARPS - 1) / ATTENTION_WARPS);
            first = page0 + pages * split / used;
            n = split < used ? page0 + pages * (split + 1) / used - first : 0;
        };
        if (producing) { /* the first pages of each job come near */
            wait_previous();
            for (int job = block; job < jobs; job += blocks) {
                int first, n, used, t = job / heads % tokens;
                share_of(job, s.position[t], first, n, used);
                const int *table = s.page + (size_t)s.seq[t] * s.header[0] + first;
#pragma unroll 1
                for (int i = 0; i < min(n, ATTENTION_WARPS); i++)
                    if (lane < 2) bring_near((const uint8_t *)cache_of(w, table[i], lane, job % heads), D * PAGE * sizeof(bf16));
            }
            return;
        }
        float *merged = at<float>(k.x); /* (ATTENTION_WARPS, 8, ROW) */
        int *is_last = at<int>(k.begun + 8);
        const float *sinks = l.sinks;
        await();
        for (int job = block; job < jobs; job += blocks) {
            int head = job % heads, t = job / heads % tokens, split = job / heads / tokens, p = at<int>(k.position)[t],
                from = l.window && p >= l.window ? p - l.window + 1 : 0;
            int first, n, used;
            share_of(job, p, first, n, used);
            if (!n) continue;
            if (warp < ATTENTION_WARPS) {
                const int *table = s.page + (size_t)s.seq[t] * s.header[0];
                Attend<D, 1> a;
                uint4 q[D / 32][1];
                for (int c = 0; c < D / 32; c++)
                    q[c][0] = g < group ? __ldcg((const uint4 *)((const bf16 *)w.q + ((size_t)t * w.n_heads + head * group + g) * D + c * 32 + lane % 4 * 8))
                                        : uint4{};
                int firsts[1] = {from}, lasts[1] = {p};
                for (int i = first + warp; i < first + n; i += ATTENTION_WARPS)
                    a.page(cache_of(w, table[i], 0, head), cache_of(w, table[i], 1, head), q, i * PAGE, firsts, lasts, p, LOG2E * rsqrtf(D), lane);
                a.total[0] += __shfl_xor_sync(~0u, a.total[0], 1);
                a.total[0] += __shfl_xor_sync(~0u, a.total[0], 2);
                float *state = merged + warp * STATE + g * ROW;
                state[0] = a.most[0];
                state[1] = a.total[0];
                for (int i = 0; i < D / 8; i++)
                    for (int j = 0; j < 2; j++) state[2 + i * 8 + lane % 4 * 2 + j] = a.sum[i][j];
            }
            sync_consumers();
            float *partial = w.partial + ((size_t)t * heads + head) * SPLITS * STATE; /* (used, 8, ROW) */
            for (bool whole = used == 1;; whole = true) { /* first of the warps, then of the splits */
                const float *states = whole && used > 1 ? partial : merged;
                int count = whole && used > 1 ? used : min(n, ATTENTION_WARPS);
#pragma unroll 1
                for (int i = ring.thread; i < group * D; i += CONSUMERS) {
                    int h = i / D;
                    float sink = whole && sinks ? sinks[head * group + h] * LOG2E : -INFINITY, most = sink, total = 0, sum = 0;
                    const float *state = states + h * ROW;
#pragma unroll 2
                    for (int j = 0; j < count; j++) most = fmaxf(most, state[j * STATE + 1] > 0 ? state[j * STATE] : -INFINITY);
#pragma unroll 2
                    for (int j = 0; j < count; j++) {
                        float share = state[j * STATE + 1] > 0 ? exp2f(state[j * STATE] - most) : 0;
                        total += share * state[j * STATE + 1];
                        sum += share * state[j * STATE + 2 + i % D];
                    }
                    if (whole) {
                        if (sinks) total += exp2f(sink - most);
                        ((bf16 *)w.attn)[(size_t)t * w.attn_pitch + Codec<BF16>::place((head * group + h) * D + i % D)] = (bf16)(sum / total);
                    } else {
                        float *to = partial + (split * 8 + h) * ROW;
                        to[2 + i % D] = sum;
                        if (i % D == 0) to[0] = most, to[1] = total;
                    }
                }
                if (whole) break;
                __threadfence();
                sync_consumers();
                if (ring.thread == 0) *is_last = atomicAdd(&w.arrived[t * heads + head], 1) == used - 1;
                sync_consumers();
                if (!*is_last) break;
                __threadfence();
                if (ring.thread == 0) w.arrived[t * heads + head] = 0;
            }
            sync_consumers();
        }
    }
    template <typename Out> __device__ void attention_of_any_size(const Block &l) {
        if (producing) return;
        await();
        for (int i = block; i < tokens * w.n_heads; i += blocks) {
            int t = i / w.n_heads, h = i % w.n_heads;
            float x = attend_plain<Out>(w, s, l, t, h, at<float>(k.x), CONSUMERS);
            if (ring.thread < w.head_dim)
                ((Out *)w.attn)[(size_t)t * w.attn_pitch + Codec<sizeof(Out) == 2 ? BF16 : F32>::place(h * w.head_dim + ring.thread)] = (Out)x;
        }
    }

    /* x += W attn + bias; and, since the router's logits are linear in x but for the norm's common factor, each block adds what
     * its rows of x contribute to them, and writes down the sum of their squares. */
    template <Type T> __device__ void output(const Block &l) {
        renew();
        typedef typename Codec<T>::Activation Activation;
        const Matrix m = l.o;
        int units = units_of_block(groups_of<T>(m.rows)), rows = units * Codec<T>::ROWS, pitch = pitch_of<T>(m.stride), lane = ring.thread % 32,
            warp = ring.thread / 32;
        int experts = l.router.rows ? w.n_experts : 0, each = 16 / sizeof(Activation), pieces = m.stride / each;
        float *own = at<float>(k.own), *columns = at<float>(k.columns);
        if (!producing) {
#pragma unroll 1
            for (int i = warp; i < rows; i += WARPS) {
                int r = row_of_block<T>(i);
#pragma unroll 1
                for (int e = lane; e < experts; e += 32) columns[i * experts + e] = r < w.dim ? l.router_columns[(size_t)r * experts + e] : 0;
            }
#pragma unroll 1
            for (int i = ring.thread; i < rows * tokens; i += CONSUMERS) { /* x is as the last layer left it */
                int r = row_of_block<T>(i / tokens);
                own[i] = r < w.dim ? __ldcg(w.x + (size_t)(i % tokens) * w.dim + r) + (m.bias ? m.bias[r] : 0) : 0;
            }
            await();
            for (int t = 0; t < tokens; t++)
#pragma unroll 1
                for (int i = ring.thread; i < pieces; i += CONSUMERS)
                    copy_16(at<Activation>(k.x) + t * pitch + i * each, (const Activation *)w.attn + (size_t)t * w.attn_pitch + i * each);
            copies_end();
            copies_done<0>();
            sync_consumers();
        }
        stream<T>(m, units, tokens, [&](int i) { return group_at<T>(m, unit_of_block(i)); }, [&](int unit, int p, int t, float a, float b) {
            for (int i = 0; i < 2; i++) {
                int at = unit * Codec<T>::ROWS + 2 * p + i, r = row_of_block<T>(at);
                if (r < w.dim) w.x[(size_t)t * w.dim + r] = own[at * tokens + t] += i ? b : a;
            }
        });
        if (producing) return;
        sync_consumers();
#pragma unroll 1
        for (int i = ring.thread / 8; i < tokens * experts; i += CONSUMERS / 8) { /* eight lanes for a token and an expert */
            int t = i / experts, e = i % experts;
            float sum = 0;
#pragma unroll 1
            for (int r = ring.thread % 8; r < rows; r += 8) sum += own[r * tokens + t] * columns[r * experts + e];
            for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(255u << (lane & 24), sum, o);
            long long steps = __float2ll_rn(sum * (1 / ROUTER_STEP));
            if (ring.thread % 8 == 0) atomicAdd((unsigned long long *)&w.router_sum[((size_t)w.layer * FEW + t) * experts + e], (unsigned long long)steps);
        }
#pragma unroll 1
        for (int t = warp; t < tokens; t += WARPS) {
            float sum = 0;
#pragma unroll 1
            for (int r = lane; r < rows; r += 32) sum += own[r * tokens + t] * own[r * tokens + t];
            sum = warp_sum(sum);
            if (lane == 0) w.square[t * blocks + block] = sum;
        }
    }

    /* What each token chose, and `active` from it: every block finds it for itself from what the blocks added up in phase output.
     * All threads call it; the producer has `active` when it returns, the consumers behind chosen(). The last warps route: others
     * have more to do, and of one token the producer knows all without waiting for anybody. */
    __device__ void choose(bool routed, const float *bias, Active &active) {
        float *logit = at<float>(k.logit), *weights = at<float>(k.weights);
        int *experts = at<int>(k.experts), lane = ring.thread % 32;
#pragma unroll 1
        for (int t = WARPS - ring.thread / 32; t < tokens; t += WARPS + 1) {
            const long long *sums = w.router_sum + ((size_t)w.layer * FEW + t) * w.n_experts;
            float squares = 0, weight = 1, *mine = logit + t * w.n_experts, value[5];
            int expert = 0;
            long long sum = routed && lane < w.n_experts ? __ldcg(sums + lane) : 0;
            for (int base = lane; base < blocks; base += 5 * 32) {
#pragma unroll
                for (int i = 0; i < 5; i++) value[i] = base + 32 * i < blocks ? __ldcg(w.square + t * blocks + base + 32 * i) : 0;
#pragma unroll
                for (int i = 0; i < 5; i++) squares += value[i];
            }
            float factor = rsqrtf(warp_sum(squares) / w.dim + w.eps) * ROUTER_STEP;
#pragma unroll 1
            for (int e = lane; e < w.n_experts && routed; e += 32) {
                mine[e] = (float)sum * factor + (bias ? bias[e] : 0);
                if (e + 32 < w.n_experts) sum = __ldcg(sums + e + 32);
            }
            __syncwarp();
            if (routed) route(mine, w.n_experts, w.top_k, lane, expert, weight);
            if (lane < w.top_k) {
                experts[t * w.top_k + lane] = expert, weights[t * w.top_k + lane] = weight;
                atomicOr(&active.chosen[expert / 32], 1u << expert % 32);
            }
        }
        if (tokens > 1)
            __syncthreads();
        else
            __syncwarp();
        if (!producing) return;
#pragma unroll 1
        for (int i = lane; i < tokens * w.top_k; i += 32) {
            int t = i / w.top_k, place = active.place(experts[i]);
            active.expert[place] = experts[i];
            active.weight[place * FEW + t] = weights[i];
            active.choice[place * FEW + t] = i % w.top_k;
            atomicOr(&active.tokens[place], 1u << t);
            atomicMax(active.n, place + 1);
        }
        __syncwarp();
    }
    __device__ void chosen() const {
        if (producing)
            asm volatile("bar.arrive 2,%0;" ::"n"(THREADS) : "memory");
        else
            asm volatile("bar.sync 2,%0;" ::"n"(THREADS) : "memory");
    }
    __device__ Active active() const {
        return {at<int>(k.active),          at<int>(k.active_expert), at<unsigned>(k.active_tokens),
                at<float>(k.active_weight), at<int>(k.active_choice), at<unsigned>(k.active_chosen)};
    }
    __device__ void clear_active(int threads) {
#pragma unroll 1
        for (int i = k.active + ring.thread * 4; i < k.active_end; i += threads * 4) *at<int>(i) = 0;
    }

    /* Router, top-k and the activations of the chosen experts (dense: of the one there is). */
    template <Type T> __device__ void up(const Block &l) {
        renew();
        typedef typename Codec<T>::Activation Activation;
        constexpr int ROWS = Codec<T>::ROWS;
        const Matrix m = l.up;
        Active active = this->active();
        bool routed = l.router.rows;
        int groups = groups_of<T>(m.rows);
        const float *router_bias = l.router.bias, *norm = l.ffn_norm;
        float *scale = at<float>(k.scale), *bias = at<float>(k.bias), *weights = at<float>(k.weights);
        int *experts = at<int>(k.experts);
        if (!producing) clear_active(CONSUMERS);
        __syncthreads();
        if (producing)
            await();
        else
            stage_normed<T>(m.stride, norm, NULL, tokens);
        choose(routed, router_bias, active);
        chosen();
        int units = units_of_block(*active.n * groups);
        auto expert_of = [&](int i) { return active.expert[unit_of_block(i) / groups]; };
        if (!producing) {
#pragma unroll 1
            for (int i = ring.thread; i < units * ROWS; i += CONSUMERS) {
                int row = unit_of_block(i / ROWS) % groups * ROWS + i % ROWS;
                bool has = m.bias && row < m.rows;
                copy_4(bias + i, has ? m.bias + (size_t)expert_of(i / ROWS) * m.rows + row : norm, has);
            }
            copies_end();
#pragma unroll 1
            for (int i = ring.thread; i < tokens * w.top_k && block == 0; i += CONSUMERS) w.expert[i] = experts[i], w.weight[i] = weights[i];
        }
        auto group_of = [&](int i) { return group_at<T>(m, unit_of_block(i) % groups) + expert_of(i) * m.bytes; };
        stream<T>(m, units, tokens, group_of, [&](int unit, int p, int t, float gate, float up) { /* behind a barrier, so bias is there */
            int place = unit_of_block(unit) / groups, i = unit * ROWS + 2 * p, at = unit_of_block(unit) % groups * (ROWS / 2) + p;
            if (!(active.tokens[place] >> t & 1) || at >= w.ffn_dim) return;
            size_t choice = (size_t)t * w.top_k + active.choice[place * FEW + t];
            ((Activation *)w.act_out)[choice * w.act_pitch + Codec<T>::place(at)] =
                (Activation)(swiglu(w, gate * scale[t] + bias[i], up * scale[t] + bias[i + 1]) * w.act_lift);
        });
    }

    /* x += the weighted sum of the chosen experts' W act + bias. A block owns its rows of x, so it reads these rows of every
     * active expert; each warp copies its own columns of the activations, the next expert's while it multiplies. */
    template <Type T> __device__ void down(const Block &l) {
        renew();
        typedef Codec<T> C;
        typedef typename C::Activation Activation;
        const Matrix m = l.down;
        Active active = this->active();
        if (phase == first) { /* alone: phase up was another launch */
            clear_active(THREADS);
            __syncthreads();
            await();
            choose(l.router.rows, l.router.bias, active);
            chosen();
        }
        int units = units_of_block(groups_of<T>(m.rows)), rows = units * C::ROWS, pass = down_pass_of<T>(tokens), warp = ring.thread / 32,
            lane = ring.thread % 32;
        int slices = *active.n * m.parts; /* a slice: an expert's part of the columns */
        if (producing) {                  /* pass by pass: expert by expert, part by part, unit by unit */
            ring.produce<T>(m, units * slices, [&](int item, int &part) {
                int first = item / (pass * slices) * pass, n = min(pass, units - first);
                item -= first * slices;
                part = item / n % m.parts;
                return group_at<T>(m, unit_of_block(first + item % n)) + active.expert[item / n / m.parts] * m.bytes;
            });
            return;
        }
        float *own = at<float>(k.own), *partial = at<float>(k.partial);
#pragma unroll 1
        for (int i = ring.thread; i < rows * tokens; i += CONSUMERS) {
            int r = row_of_block<T>(i / tokens), t = i % tokens;
            float sum = r < w.dim ? __ldcg(w.x + (size_t)t * w.dim + r) : 0;
#pragma unroll 4
            for (int place = 0; place < *active.n; place++)
                sum += active.weight[place * FEW + t] * (m.bias && r < w.dim ? m.bias[(size_t)active.expert[place] * w.dim + r] : 0);
            own[i] = sum;
        }
        int buffers = down_buffers(tokens), width = m.per * C::K, pitch = pitch_of<T>(width), each = 16 / sizeof(Activation);
        Activation *x = at<Activation>(k.x) + warp * buffers * tokens * pitch; /* of this warp */
        await();
        auto copy = [&](int slice) {
            int place = slice / m.parts, from = first_chunk(m, slice % m.parts, warp) * C::K, have = min(width, w.act_pitch - from);
            for (int t = 0; t < tokens && slice < slices; t++) {
                if (!(active.tokens[place] >> t & 1)) continue;
                const Activation *act = (const Activation *)w.act_out + ((size_t)t * w.top_k + active.choice[place * FEW + t]) * w.act_pitch + from;
#pragma unroll 1
                for (int i = lane * each; i < have; i += 32 * each) copy_16(x + (slice % buffers * tokens + t) * pitch + i, act + i);
            }
            copies_end();
        };
#pragma unroll 1
        for (int first = 0, turn = 0; first < units; first += pass, turn++) {
            int n = min(pass, units - first);
            if (buffers > 1) copy(0);
            typename C::Sum sum[UNITS];
            for (int slice = 0; slice < slices; slice++) {
                int place = slice / m.parts, chunks = min(m.per, m.chunks - first_chunk(m, slice % m.parts, warp));
                copy(buffers > 1 ? slice + 1 : slice);
                if (buffers > 1)
                    copies_done<1>();
                else
                    copies_done<0>();
                __syncwarp();
                Rows<Activation> columns = {x + slice % buffers * tokens * pitch, at<Activation>(k.zero), pitch, active.tokens[place]};
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    if (u >= n) break;
                    typename C::Sum one;
                    ring.take<T>(one, m.per * WARPS, warp * m.per, chunks, columns);
                    sum[u].add_weighted(one, active.weight + place * FEW, lane);
                }
                __syncwarp();
            }
            float *of_pass = partial + turn % 2 * (WARPS * pass * C::ROWS * tokens);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (u < n) sum[u].store(of_pass + (warp * pass + u) * C::ROWS * tokens, tokens, lane);
            end_pass<C::ROWS>(ring.thread, of_pass, turn, pass, n, tokens, [&](int unit, int p, int t, float a, float b) {
                for (int i = 0; i < 2; i++) {
                    int at = (first + unit) * C::ROWS + 2 * p + i, r = row_of_block<T>(at);
                    if (r < w.dim) w.x[(size_t)t * w.dim + r] = own[at * tokens + t] + (i ? b : a);
                }
            });
        }
    }

    /* Logits of the rows that are wanted, (rows, vocab). */
    template <Type T> __device__ void head(const Matrix &m, const float *norm, int rows) {
        renew();
        typedef typename Codec<T>::Activation Activation;
        int units = units_of_block(groups_of<T>(m.rows));
        float *scale = at<float>(k.scale);
        if (!producing) {
            stage_normed<T>(m.stride, norm, s.row, rows);
        }
        stream<T>(m, units, rows, [&](int i) { return group_at<T>(m, unit_of_block(i)); }, [&](int unit, int p, int row, float a, float b) {
            int id = unit_of_block(unit) * Codec<T>::ROWS + 2 * p;
            float *logit = w.logits + (size_t)row * w.vocab + id;
            if (id < w.vocab) logit[0] = a * scale[row];
            if (id + 1 < w.vocab) logit[1] = b * scale[row];
        });
    }
};

/* The one table from types of weights, and sizes of heads, to instances. GPT_OSS: the instance for its types alone, because
 * instructions have to be fetched too; ONE: and for one token alone. */
template <bool GPT_OSS, bool ONE>
__global__ void __launch_bounds__(THREADS, 1)
    few(Work w, Step s, const Block *layers, Matrix head, const float *norm, Layout k, int tokens, int rows, int first, int last) {
    extern __shared__ __align__(128) uint8_t memory[];
    Few f(w, s, k, memory, ONE ? 1 : tokens, first, last);
    f.begin();
    bool half = GPT_OSS || layers->qkv.type == BF16, tiled = half && w.n_heads / w.n_kv_heads <= 8;
    while (f.phase < last) {
        const Block &l = layers[f.phase / PHASES];
        f.w.layer = f.phase / PHASES;
        switch (f.w.layer == w.n_layers ? PHASES : f.phase % PHASES) {
        case PHASE_QKV: half ? f.qkv<BF16>(l) : f.qkv<F32>(l); break;
        case PHASE_ATTENTION:
            if (GPT_OSS || (tiled && w.head_dim == 64))
                f.attention<64>(l);
            else if (tiled && w.head_dim == 128)
                f.attention<128>(l);
            else
                half ? f.attention_of_any_size<bf16>(l) : f.attention_of_any_size<float>(l);
            break;
        case PHASE_OUTPUT: half ? f.output<BF16>(l) : f.output<F32>(l); break;
        case PHASE_UP: GPT_OSS || l.up.type == MXFP4 ? f.up<MXFP4>(l) : l.up.type == BF16 ? f.up<BF16>(l) : f.up<F32>(l); break;
        case PHASE_DOWN: GPT_OSS || l.down.type == MXFP4 ? f.down<MXFP4>(l) : l.down.type == BF16 ? f.down<BF16>(l) : f.down<F32>(l); break;
        default: GPT_OSS || head.type == BF16 ? f.head<BF16>(head, norm, ONE ? 1 : rows) : f.head<F32>(head, norm, rows);
        }
        f.end_phase();
    }
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#endif
