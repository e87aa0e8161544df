/* infer.cu: the plain engine: every kernel that gpt-oss needs, one for each part of a transformer block, for any number
 * of tokens on any card from sm_80 on. Begin at block(), which calls the kernels. Beside this file: tests/reference.c
 * computes the same by the same names in plain C; card.cuh says what lies on the card; card.cu brings it there and
 * submits steps; extensions.cuh includes the rooms, which have more encodings and attention of other models, and fast/,
 * the annex, to which forward() and multiply() hand over if it is open (Gpu::fast). README.md, "How a token is made",
 * says where to look for what.
 *
 *   1  small device functions      mma, loads; sums
 *   2  how a lane reads weights    Encoding of BF16, F16 and MXFP4, fp4_to_bf16
 *   3  the router's choice         choose (top-k), weigh
 *   4  products                    product, product_f32
 *   5  embedding, norm, experts    embed, norm, route, combine
 *   6  attention                   page_of, norm_and_rope, sink_factor, attention
 *   7  from logits to a token      adjust, filter, draw
 *   8  launches                    launch, multiply
 *   9  taps                        the stages of a step for tests
 *  10  one step                    extensions.cuh; attend, experts, block, forward, head, draw_tokens
 *
 * The residual stream is fp32. Products take bf16 and accumulate fp32 (f16 for F16 weights, fp32 throughout for F32).
 * The cache is bf16. A decode step is a chain of dependent kernels, so each kernel lets the next begin early
 * (launch_next), requests its first weights, which depend on nothing, and only then waits (wait_previous). */
#include "card.cuh"

#include <algorithm>
#include <type_traits>

constexpr float LOG2E = 1.4426950408889634f;

/* ---- 1 small device functions ---- */

/* Instructions for which CUDA C++ has no words, or that the compiler would make slower. Without nvcc tests/emulated/
 * has the same functions in C++, so that tests can run this file without a card. */
#ifdef __CUDACC__

/* Programmatic dependent launch: a kernel may begin before the previous one has ended. It may read that kernel's
 * results only after wait_previous(). Before Hopper a kernel begins when the previous one has ended. */
__device__ inline void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* c (16, 8) += a (16, 16) b (16, 8). Lane 4g + t holds rows g and g + 8 of a and column g of b, both at t's four of the
 * 16 inner indices, and rows g and g + 8, columns 2t and 2t + 1, of c. Which inner index is which does not matter as
 * long as a and b agree. a0 and b0 are two of the four, a2 and b1 the others; a1 and a3 are a0 and a2 in row g + 8. */
template <typename A>
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    if constexpr (std::is_same_v<A, f16>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* 16, 8 or 4 bytes of the card's memory, or zeros unless `real`. The condition is part of the asm: with an `if` around
 * it the compiler copies the result to other registers, and so waits for it at once. load_weights() keeps nothing in
 * L1, because weights are read once. Not ld.global.nc: the compiler may move such loads behind wait_previous(). */
__device__ inline uint4 load_weights(const void *from, bool real) {
    uint4 x;
    asm volatile("{.reg .pred p; setp.ne.u32 p,%5,0; mov.b32 %0,0; mov.b32 %1,0; mov.b32 %2,0; mov.b32 %3,0;"
                 "@p ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];}"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from), "r"((int)real));
    return x;
}
__device__ inline uint2 load_pair(const void *from, bool real) {
    uint2 x;
    asm volatile("{.reg .pred p; setp.ne.u32 p,%3,0; mov.b32 %0,0; mov.b32 %1,0;"
                 "@p ld.global.L2::256B.v2.u32 {%0,%1},[%2];}"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(from), "r"((int)real));
    return x;
}
__device__ inline uint32_t load_word(const void *from, bool real) {
    uint32_t x;
    asm volatile("{.reg .pred p; setp.ne.u32 p,%2,0; mov.b32 %0,0; @p ld.global.L2::256B.u32 %0,[%1];}"
                 : "=r"(x)
                 : "l"(from), "r"((int)real));
    return x;
}
/* A word of the host's memory that it may write meanwhile. What it wrote before can be read afterwards. */
__device__ inline uint64_t load_from_host(const uint64_t *from) {
    uint64_t x;
    asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}
__device__ inline uint64_t nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(t));
    return t;
}

/* 4 b + a in one instruction. */
__device__ inline uint32_t times_4_plus(uint32_t b, uint32_t a) {
    uint32_t x;
    asm("mad.lo.u32 %0,%1,4,%2;" : "=r"(x) : "r"(b), "r"(a));
    return x;
}
#endif

/* mma() for eight inner indices of a lane: rows g and g + 8 of a, column g of b. */
template <typename A = bf16> __device__ inline void mma_eight(float (&c)[4], uint4 row, uint4 row8, uint4 column) {
    mma<A>(c, row.x, row8.x, row.y, row8.y, column.x, column.y);
    mma<A>(c, row.z, row8.z, row.w, row8.w, column.z, column.w);
}

__device__ inline uint32_t pack(float low, float high) {
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&v);
}
/* The type of the activations that a matrix multiplies. */
__host__ __device__ inline Type type_for(const Matrix &m) { return m.type == F32 || m.type == F16 ? m.type : BF16; }
/* Clamped to the largest f16; a NaN stays one. */
__device__ inline f16 to_f16(float x) { return (f16)(fabsf(x) > 65504 ? copysignf(65504, x) : x); }
/* Stores element i of a row for a matrix of this type, or elements i and i + 1, i even. */
__device__ inline void store_as(Type type, void *row, size_t i, float x) {
    if (type == F32)
        ((float *)row)[i] = x;
    else if (type == F16)
        ((f16 *)row)[i] = to_f16(x);
    else
        ((bf16 *)row)[i] = (bf16)x;
}
__device__ inline void store_pair_as(Type type, void *row, size_t i, float a, float b) {
    if (type == F32)
        *(float2 *)((float *)row + i) = {a, b};
    else if (type == F16)
        *(__half2 *)((f16 *)row + i) = __halves2half2(to_f16(a), to_f16(b));
    else
        *(uint32_t *)((bf16 *)row + i) = pack(a, b);
}

__device__ inline float warp_sum(float x) {
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}
__device__ inline unsigned long long warp_max(unsigned long long x) {
    for (int o = 16; o; o >>= 1) x = max(x, __shfl_xor_sync(~0u, x, o));
    return x;
}
__device__ inline int prefix_sum(int x, int lane) { /* of this lane and those before it */
    for (int o = 1; o < 32; o *= 2) {
        int before = __shfl_up_sync(~0u, x, o);
        if (lane >= o) x += before;
    }
    return x;
}
/* The sum over a block, always in the same order. The first barrier: `part` may still be read from the last call. */
__device__ inline float block_sum(float x) {
    __shared__ float part[32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) x += part[i];
    return x;
}
/* Whether this block is the last of `blocks` to arrive here. The last one sees what the others wrote before. */
__device__ inline bool last_block(int *arrived, int blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == blocks - 1;
    __syncthreads();
    if (last) __threadfence();
    if (last && threadIdx.x == 0) *arrived = 0;
    return last;
}

/* ---- 2 how a lane reads weights ---- */

/* How a lane of a warp reads weights of a type and makes bf16 of them. BF16, F16 and MXFP4 are here, other types in
 * rooms; F32 has product_f32. card.cuh says how they lie on the card. card.cu brings them there: its card_type() says
 * which type a file's type becomes.
 *
 * Lane 4g + t has sixteen columns of rows g and g + 8 of a chunk of a tile, eight that begin at column(t, 0) and eight
 * that begin at column(t, 1); of some types of rooms the second four of each lie 16 columns after the first. Raw is
 * what it loads; decode() turns eight columns of both rows into bf16 (or f16), divided by FACTOR; eight() reads the
 * same columns of x; multiply() adds the chunk's product with x, and x(n, half) says where a lane finds its columns of
 * the n-th eight tokens.
 *
 *   offset()  where a lane's weights of a tile's first chunk lie; those of chunk k lie k * STEP further on
 *   AHEAD     chunks that a lane requests ahead
 *   BLOCKS    of `product` that share a multiprocessor */
template <Type T> struct Encoding;

/* multiply() for encodings that decode weights completely before they multiply. */
template <class E, typename A> struct Decoded {
    typedef A Activation;
    template <int TILES, class Raw, class X>
    __device__ static void multiply(float (&c)[TILES][4], const Raw &raw, const X &x) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 low, high;
            E::decode(raw, half, low, high);
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_eight<A>(c[n], low, high, eight(x(n, half)));
        }
    }
    __device__ static uint4 eight(const void *x) { return *(const uint4 *)x; }
};

template <typename A> struct Encoding16 { /* rows as they stand in the file */
    static constexpr float FACTOR = 1;
    static constexpr int STEP = CHUNK * 2, BLOCKS = 2;
    template <int TILES> static constexpr int AHEAD = TILES == 1 ? 4 : 2;
    struct Raw {
        uint4 low[2], high[2];
    };
    __device__ static int column(int t, int half) { return half * 32 + t * 8; }
    __device__ static size_t offset(const Matrix &m, int tile, int lane) {
        return ((size_t)(tile * TILE + lane / 4) * m.stride + column(lane % 4, 0)) * 2;
    }
    __device__ static void load(Raw &r, const Matrix &m, const uint8_t *from, bool real) {
        const uint8_t *high = from + (size_t)8 * m.stride * 2;
        for (int half = 0; half < 2; half++) {
            r.low[half] = load_weights(from + half * 64, real);
            r.high[half] = load_weights(high + half * 64, real);
        }
    }
    __device__ static void decode(const Raw &r, int half, uint4 &low, uint4 &high) {
        low = r.low[half], high = r.high[half];
    }
};
template <> struct Encoding<BF16> : Encoding16<bf16>, Decoded<Encoding16<bf16>, bf16> {};
template <> struct Encoding<F16> : Encoding16<f16>, Decoded<Encoding16<f16>, f16> {};

struct Sixteen {
    uint4 low, high; /* bf16 */
};
/* The sixteen e2m1 values of two words (see FP4_MASK in card.cuh) as bf16 times 2^-126, in the order of their columns.
 * `rest` holds the fourth pair of each: the loader set their free bits to that end. */
__device__ inline Sixteen fp4_to_bf16(uint32_t a, uint32_t b) {
    const uint32_t m = FP4_MASK, rest = times_4_plus(b, a);
    return {make_uint4(a & m, __funnelshift_r(a, a, 6) & m, a << 4 & m, __funnelshift_r(rest, rest, 4) & m),
            make_uint4(b & m, __funnelshift_r(b, b, 6) & m, b << 4 & m, rest << 6 & m)};
}

/* A chunk of a tile is 544 bytes in one piece. First come 16 bytes of each lane: columns 16t to 16t + 15 of row g, then
 * of row g + 8. Behind these 512 bytes lie, for each g, the scales of two blocks of 32 of row g and of two of row g +
 * 8, each with FP4_SCALE added. bf16 cannot hold every value times its e8m0 scale, so decode() returns values 2^26 too
 * small, and the finished sum is multiplied by FACTOR. */
template <> struct Encoding<MXFP4> : Decoded<Encoding<MXFP4>, bf16> {
    static constexpr float FACTOR = 0x1p26f;
    static constexpr int STEP = FP4_CHUNK, BLOCKS = 4;
    template <int TILES> static constexpr int AHEAD = 2;
    struct Raw {
        uint4 words;
        uint32_t scales;
    };
    __device__ static int column(int t, int half) { return t * 16 + half * 8; }
    __device__ static size_t offset(const Matrix &m, int tile, int lane) {
        return (size_t)tile * (m.stride / CHUNK) * STEP + lane * 16;
    }
    __device__ static void load(Raw &r, const Matrix &, const uint8_t *from, bool real) {
        int lane = threadIdx.x % 32;
        r = {load_weights(from, real), load_word(from + 512 - lane * 16 + lane / 4 * 4, real)};
    }
    __device__ static uint4 times(uint4 eight, uint32_t scale) {
        /* the e8m0 scale as the exponents of a pair of bf16; plus 126 of fp4_to_bf16, minus 26 of FACTOR */
        uint32_t factor = (scale + 126 - 26 - FP4_SCALE) * 0x00800080;
        for (uint32_t *pair : {&eight.x, &eight.y, &eight.z, &eight.w}) {
            __nv_bfloat162 x = __hmul2(*(__nv_bfloat162 *)pair, *(__nv_bfloat162 *)&factor);
            *pair = *(uint32_t *)&x;
        }
        return eight;
    }
    __device__ static void decode(const Raw &r, int half, uint4 &low, uint4 &high) {
        Sixteen row = fp4_to_bf16(r.words.x, r.words.y), row8 = fp4_to_bf16(r.words.z, r.words.w);
        const uint32_t scales = r.scales >> threadIdx.x % 4 / 2 * 8; /* of this lane's block in row g, and in g + 8 */
        low = times(half ? row.high : row.low, scales & 255);
        high = times(half ? row8.high : row8.low, scales >> 16 & 255);
    }
};

/* One weight of the embedding, for which card.cu makes bf16 of MXFP4. */
__device__ inline float weight_of(const Matrix &m, size_t row, int column) {
    const size_t at = row * m.stride + column;
    if (m.type == F32) return ((const float *)m.data)[at];
    if (m.type == F16) return (float)((const f16 *)m.data)[at];
    if (m.type == BF16) return (float)((const bf16 *)m.data)[at];
    return coded_weight(m, row, column);
}

/* ---- 3 the router's choice ---- */

/* A router's logits, and how they choose. */
struct Router {
    const float *logit, *bias; /* (tokens, experts); (experts) or NULL */
    int experts, top_k;
    Route how;
};
/* A router's logit for expert e, or its sigmoid. */
__device__ inline float router_score(const Router &r, int t, int e) {
    const float x = __ldcg(r.logit + (size_t)t * r.experts + e);
    return r.how.sigmoid ? 1 / (1 + expf(-x)) : x;
}
/* The key by which a score is compared: above 0. */
__device__ inline unsigned score_key(float x) { return order_key(isnan(x) ? -INFINITY : x); }
/* The number of the largest key of all lanes, the lowest among equals. */
__device__ inline unsigned largest(unsigned key, unsigned number) {
    return __reduce_min_sync(~0u, key == __reduce_max_sync(~0u, key) ? number : ~0u);
}
/* The top_k largest of a warp's keys, whose numbers are lane, lane + 32, ...: lane k gets the k-th one's number. A lane
 * has `each` keys, at most EACH. A key of 0 is never chosen, and chosen ones become 0. */
template <int EACH> __device__ inline int choose_keys(unsigned (&key)[EACH], int each, int top_k) {
    const int lane = threadIdx.x % 32;
    int mine = 0;
#pragma unroll 1
    for (int k = 0; k < top_k; k++) {
        unsigned best = 0, which = ~0u;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (i >= each) break;
            if (key[i] > best) best = key[i], which = lane + i * 32;
        }
        const int e = largest(best, which);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (i >= each) break;
            if (lane + i * 32 == e) key[i] = 0;
        }
        if (k == lane) mine = e;
    }
    return mine;
}
/* The experts of token t, chosen by a warp: lane k gets the k-th. The top_k largest scores win, ties go to the lower
 * number; a bias, if there is one, is added first. In some models only the best groups of experts take part. */
template <int EACH> __device__ inline int choose(const Router &r, int t) {
    const int lane = threadIdx.x % 32, group_size = r.experts / r.how.groups;
    unsigned key[EACH];
    auto key_of = [&](int e) { return score_key(router_score(r, t, e) + (r.bias ? r.bias[e] : 0)); };
#pragma unroll
    for (int i = 0, e = lane; i < EACH; i++, e += 32) key[i] = e < r.experts ? key_of(e) : 0;
    if (r.how.groups > 1) { /* a group scores its best, or two best */
        float best = -INFINITY, second = -INFINITY;
        for (int e = lane * group_size; e < (lane + 1) * group_size && lane < r.how.groups; e++) {
            const float x = key_value(key_of(e));
            second = fmaxf(second, fminf(best, x)), best = fmaxf(best, x);
        }
        const unsigned mine = order_key(r.how.group_best > 1 ? best + second : best);
        unsigned groups = 0; /* a bit each: experts may be chosen from it */
        for (int k = 0; k < r.how.top_groups; k++)
            groups |= 1u << largest(lane < r.how.groups && !(groups >> lane & 1) ? mine : 0, lane);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (!(groups >> (lane + i * 32) / group_size & 1)) key[i] = 0;
    }
    return choose_keys(key, (r.experts + 31) / 32, r.top_k);
}
/* The weight of lane k's expert, from scores without the bias: softmax over all or the chosen, or a share of a sum. */
__device__ inline float weigh(const Router &r, int t, int expert) {
    const int lane = threadIdx.x % 32;
    const float mine = router_score(r, t, expert), top = __shfl_sync(~0u, mine, 0);
    const float share = lane >= r.top_k ? 0 : r.how.sigmoid ? mine : expf(mine - top);
    float total = r.how.normalise ? share : 0;
    for (int e = lane; e < r.experts && !r.how.sigmoid && !r.how.normalise; e += 32)
        total += expf(router_score(r, t, e) - top);
    total = r.how.sigmoid && !r.how.normalise ? 1 : warp_sum(total);
    return share / total * r.how.scale;
}

/* ---- 4 products ---- */

enum Finish {
    STORE,   /* y = W x + bias */
    ADD,     /* y, the residual stream, += W x + bias */
    ACTIVATE /* y = the activation of rows 2i (gate) and 2i + 1 (up) */
};

/* RMSNorm's factor, from the sum of the squares (Zhang and Sennrich, 2019). */
__device__ inline float norm_factor(float squares, int dim, float eps) { return rsqrtf(squares / dim + eps); }

/* y = W x + bias for all tokens or, with jobs, for the choices of each expert. Choice token * top_k + k is a token and
 * its k-th expert. `divide` choices share a row of x: row r has those from r * divide on. */
struct Product {
    Matrix w;
    const void *x; /* (tokens, x_pitch) */
    int x_pitch, tokens;
    const Job *job; /* or NULL: all tokens, matrix 0 */
    const int *jobs, *order;
    int job_size, max_jobs; /* at most so many choices in a job, and so many jobs */
    bool early;             /* the previous kernel has waited for the jobs: they can be read at once */
    int divide;
    Finish finish;
    void *y; /* (tokens or choices, y_pitch) */
    int y_pitch;
    Type y_type; /* F32, or what the next reader wants */
    Act act;
    float act_limit;
};

/* The activation; quick functions suffice where it is rounded to 16 bits. x is minus sigmoid's argument. GELU's tanh
 * form (Hendrycks and Gimpel, 2016), gate / 2 (1 + tanh(z)), is gate sigmoid(2z); 1.595... = 2 sqrt(2 / pi). */
__device__ inline float activation(Act act, float limit, float gate, float up, bool quick) {
    if (act == SWIGLU_CLAMPED) gate = fminf(gate, limit), up = fmaxf(fminf(up, limit), -limit) + 1;
    float x = act == SWIGLU_CLAMPED ? -1.702f * gate
              : act == GEGLU        ? -1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)
                                    : -gate;
    return (quick ? __fdividef(gate, 1 + __expf(x)) : gate / (1 + expf(x))) * up;
}
/* What else finish() needs for rows r and r + 1. `product` requests it before it multiplies: the loads take long. */
struct Target {
    float2 bias, old; /* old: for ADD */
};
/* Two floats, zeros unless `real`; the second exists only if r + 1 is a row of w. */
__device__ inline float2 pair_at(const float *from, const Matrix &w, int r, bool real) {
    const float first = __uint_as_float(load_word(from, real));
    return make_float2(first, __uint_as_float(load_word(from + 1, real && r + 1 < w.rows)));
}
__device__ inline Target target_of(const Product &p, int expert, size_t out, int r, bool real = true) {
    return {pair_at(p.w.bias + (size_t)expert * p.w.rows + r, p.w, r, real && p.w.bias),
            pair_at((const float *)p.y + out * p.y_pitch + r, p.w, r, real && p.finish == ADD)};
}
/* Stores rows r and r + 1, of which ACTIVATE makes one value. Returns both, not rounded, before the activation. */
__device__ inline float2 finish(const Product &p, const Target &target, size_t out, int r, float a, float b) {
    a += target.bias.x + target.old.x, b += target.bias.y + target.old.y;
    if (p.finish == ACTIVATE) {
        store_as(p.y_type, p.y, out * p.y_pitch + r / 2, activation(p.act, p.act_limit, a, b, p.y_type != F32));
    } else if (r + 1 < p.w.rows && p.y_pitch % 2 == 0) { /* pairs are aligned */
        store_pair_as(p.y_type, p.y, out * p.y_pitch + r, a, b);
    } else {
        store_as(p.y_type, p.y, out * p.y_pitch + r, a);
        if (r + 1 < p.w.rows) store_as(p.y_type, p.y, out * p.y_pitch + r + 1, b);
    }
    return {a, b};
}

/* How a warp reads up to 8 TILES rows of x where they lie, chunk by chunk. A lane has the rows lane / 4, + 8, ...;
 * missing ones alias the last. */
template <Type T, int TILES> struct RowsOfX {
    const uint8_t *row[TILES];
    uint32_t at;
    __device__ void begin(const Product &p, const Job &job) {
        for (int n = 0; n < TILES; n++) {
            int i = job.first + min(n * 8 + (int)threadIdx.x % 32 / 4, job.n - 1);
            if (p.order) i = __ldcg(p.order + i);
            if (p.divide > 1) i /= p.divide;
            row[n] = (const uint8_t *)p.x + ((size_t)i * p.x_pitch + Encoding<T>::column(threadIdx.x % 4, 0)) * 2;
        }
    }
    /* Before and after the product with chunk `chunk`, the i-th of this warp. */
    __device__ void arrive(int, int chunk, int chunks) { at = (uint32_t)min(chunk, chunks - 1) * CHUNK * 2; }
    __device__ void leave(int, int, int, int) {}
    __device__ const void *operator()(int n, int half) const { return row[n] + at + Encoding<T>::column(0, half) * 2; }
};

/* A warp's share of a tile of 16 rows: chunks `first`, first + step, ... of its columns, with AHEAD of them in flight.
 * Up to 8 TILES rows of x are the columns of mma. Past the end weights are zeros. */
template <Type T, int TILES> struct Stream {
    typedef Encoding<T> E;
    static constexpr int AHEAD = E::template AHEAD<TILES>;
    typename E::Raw raw[AHEAD];
    __device__ void load(const Matrix &m, const uint8_t *tile, int i, int chunk, int chunks) {
        E::load(raw[i], m, tile + (uint32_t)chunk * E::STEP, chunk < chunks);
    }
    /* Requests a tile's first chunks; `tile` is where this lane's weights of the tile begin. */
    __device__ void begin(const Matrix &m, const uint8_t *tile, int first, int step, int chunks) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) load(m, tile, i, first + i * step, chunks);
    }
    /* c += the tile times x. */
    template <class X>
    __device__ void multiply(float (&c)[TILES][4], const Matrix &m, const uint8_t *tile, X &x, int first, int step,
                             int chunks) {
        for (; first < chunks; first += step * AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int chunk = first + i * step;
                x.arrive(i, chunk, chunks);
                E::multiply(c, raw[i], x);
                load(m, tile, i, chunk + AHEAD * step, chunks);
                x.leave(i, chunk, step, chunks);
            }
        }
    }
};

/* Where mma leaves row `pair` (0 to 15) of a tile for a token, among the sums of a warp's lanes; that of the next row
 * is 4 further on. */
__device__ inline int sum_place(int token, int pair) {
    return token / 8 * 128 + (pair / 8 * 2 + token % 2) * 32 + pair % 8 * 4 + token % 8 / 2;
}

/* The blocks share all items evenly: an item is a tile of 16 rows for a job or, without jobs, for 8 TILES tokens. The
 * warps of a block share a tile's columns. Reading the weights takes most of the time, so a block requests those of its
 * next item before it stores the last results. Without jobs, or with `early`, it requests its first ones before
 * it waits. Else it waits for the jobs, and only then lets the next kernel begin: that one, with `early`, finds them
 * ready. */
constexpr int PRODUCT_WARPS = 8;
template <Type T, int TILES>
__global__ void __launch_bounds__(PRODUCT_WARPS * 32, TILES == 1 ? Encoding<T>::BLOCKS : 2)
    product(const __grid_constant__ Product p) {
    typedef Encoding<T> E;
    constexpr int W = PRODUCT_WARPS, TOKENS = TILES * 8;
    static_assert(TOKENS * 8 <= W * 32, "a thread finishes two rows, 2 (i % 8) and the next, for token i / 8");
    __shared__ float sum[2][W][TILES * 128]; /* two: so one barrier an item is enough */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = p.w.stride / CHUNK;
    const int token = threadIdx.x / 8, pair = threadIdx.x % 8 * 2, at = sum_place(token, pair);
    const bool wait_first = p.job && !p.early;
    if (wait_first) wait_previous();
    launch_next();
    const unsigned tiles = p.w.tiles(), items = tiles * (p.job ? *p.jobs : (p.tokens + TOKENS - 1) / TOKENS);
    unsigned item = (size_t)blockIdx.x * items / gridDim.x, which = item / tiles, tile = item % tiles;
    const unsigned end = (size_t)(blockIdx.x + 1) * items / gridDim.x;
    Job job;
    const uint8_t *weights;
    Stream<T, TILES> stream;
    auto begin_item = [&](bool new_job) {
        const int first = which * TOKENS;
        if (new_job) job = p.job ? p.job[which] : Job{0, first, min(TOKENS, p.tokens - first)};
        weights = p.w.data + job.expert * p.w.bytes + E::offset(p.w, tile, lane);
        stream.begin(p.w, weights, warp, W, chunks);
    };
    if (item < end) begin_item(true);
    if (!wait_first) wait_previous();
    RowsOfX<T, TILES> x;
    int out = 0;
    for (int turn = 0; item < end; turn++) {
        if (!turn || !tile) { /* a new job */
            x.begin(p, job);
            out = job.first + min(token, job.n - 1);
            if (p.order) out = p.order[out];
        }
        const int row = tile * TILE + pair;
        const bool mine = token < job.n && row < p.w.rows;
        const Target target = target_of(p, job.expert, out, row, mine);
        float c[TILES][4] = {}, a = 0, b = 0;
        stream.multiply(c, p.w, weights, x, warp, W, chunks);
        if (++tile == tiles) tile = 0, which++;
        if (++item < end) begin_item(!tile);
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) sum[turn % 2][warp][i * 32 + lane] = c[i / 4][i % 4];
        __syncthreads();
        for (int k = 0; k < W && mine; k++) a += sum[turn % 2][k][at], b += sum[turn % 2][k][at + 4];
        if (mine) finish(p, target, out, row, a * E::FACTOR, b * E::FACTOR);
    }
}
/* The same for F32, in fp32 throughout. A warp has two rows (blockIdx.y) and a token (blockIdx.x). */
__global__ void __launch_bounds__(PRODUCT_WARPS * 32) product_f32(const __grid_constant__ Product p) {
    const int r = (blockIdx.y * PRODUCT_WARPS + threadIdx.x / 32) * 2, lane = threadIdx.x % 32, token = blockIdx.x;
    launch_next();
    wait_previous();
    if (r >= p.w.rows) return;
    const float *x = (const float *)p.x + (size_t)token * p.x_pitch;
    const float *low = (const float *)p.w.data + (size_t)r * p.w.stride;
    const float *high = r + 1 < p.w.rows ? low + p.w.stride : low;
    float a = 0, b = 0;
    for (int c = lane; c < p.w.cols; c += 32) a += low[c] * x[c], b += high[c] * x[c];
    a = warp_sum(a), b = warp_sum(b);
    if (lane == 0) finish(p, target_of(p, 0, token, r), token, r, a, b);
}

/* ---- 5 embedding, norm, experts ---- */

/* A block of row_threads(dim) threads holds a token's row of x, as pairs of neighbours, up to MAX_PAIRS in each thread.
 * for_pairs() calls f(i, k) for each pair of a thread: it is pair i of the row, and the thread's k-th. */
inline int row_threads(int dim) { return std::max(128, std::min(1024, (dim / 8 + 31) / 32 * 32)); }
template <class F> __device__ inline void for_pairs(int dim, F f) {
#pragma unroll
    for (int k = 0; k < MAX_PAIRS; k++) {
        int i = k * blockDim.x + threadIdx.x;
        if (i < dim / 2) f(i, k);
    }
}
typedef float2 Pairs[MAX_PAIRS];
__device__ inline void load_pairs(Pairs &x, const float *from, int dim) {
    for_pairs(dim, [&](int i, int k) { x[k] = ((const float2 *)from)[i]; });
}
/* A row's norm_factor(). */
__device__ inline float rms_factor(const Work &w, const Pairs &x) {
    float square = 0;
    for_pairs(w.dim, [&](int, int k) { square += x[k].x * x[k].x + x[k].y * x[k].y; });
    return norm_factor(block_sum(square), w.dim, w.eps);
}
/* normed[t] = x / sqrt(mean(x^2) + eps) * weight, as a matrix of this type wants it. */
__device__ inline void rms_norm(const Work &w, const Pairs &x, const Pairs &weight, Type type, int t) {
    const float factor = rms_factor(w, x);
    void *to = type == F32 ? w.normed_f32 : w.normed;
    for_pairs(w.dim, [&](int i, int k) {
        store_pair_as(type, to, (size_t)t * w.normed_pitch + 2 * i, x[k].x * factor * weight[k].x,
                      x[k].y * factor * weight[k].y);
    });
}
/* RMSNorm of all tokens, or of those that `row` names. One block a token. */
__global__ void __launch_bounds__(1024) norm(Work w, const int *row, const float *weight, Type type) {
    Pairs x, by;
    launch_next();
    load_pairs(by, weight, w.dim);
    wait_previous();
    load_pairs(x, w.x + (size_t)(row ? row[blockIdx.x] : blockIdx.x) * w.dim, w.dim);
    rms_norm(w, x, by, type, blockIdx.x);
}

/* Begins a step, a block a token: x = the row of the embedding. Stores each token in its page. */
__global__ void __launch_bounds__(1024) embed(Work w, Step s, Matrix table) {
    launch_next();
    wait_previous();
    int4 given = s.token[blockIdx.x];
    int token = given.x < 0 ? max(w.drawn[given.y], 0) : given.x; /* after a NaN the step does not count */
    float *to = w.x + (size_t)blockIdx.x * w.dim;
    if (threadIdx.x == 0) w.page_token[given.z] = token;
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) to[i] = weight_of(table, token, i) * w.embed_scale;
}

/* Sorts the choices by expert, by counting, and cuts them into jobs of at most `job_size`. The last block of route()
 * calls it; count and next (n_experts) are in shared memory. */
__device__ inline void sort_choices(const Work &w, int choices, int job_size, int *count, int *next) {
    const int lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e < w.n_experts; e += blockDim.x) count[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < choices; i += blockDim.x) atomicAdd(count + w.expert[i], 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        int first = 0, jobs = 0, read = 0;
        for (int base = 0; base < w.n_experts; base += 32) {
            int e = base + lane, n = e < w.n_experts ? count[e] : 0, mine = (n + job_size - 1) / job_size;
            int upto = prefix_sum(n, lane), jobs_to = prefix_sum(mine, lane);
            if (e < w.n_experts) next[e] = first + upto - n;
            for (int k = 0; k < mine; k++)
                w.job[jobs + jobs_to - mine + k] = {e, first + upto - n + k * job_size,
                                                    min(job_size, n - k * job_size)};
            first += __shfl_sync(~0u, upto, 31), jobs += __shfl_sync(~0u, jobs_to, 31),
                read += __popc(__ballot_sync(~0u, n));
        }
        if (lane == 0) *w.jobs = jobs, *w.experts_read += read;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < choices; i += blockDim.x) w.order[atomicAdd(next + w.expert[i], 1)] = i;
}

/* Chooses each token's experts, one warp a token. The last block makes jobs of at most `job_size` choices. */
constexpr int ROUTE_WARPS = 8;
__global__ void __launch_bounds__(ROUTE_WARPS * 32) route(Work w, Router r, int tokens, int job_size) {
    extern __shared__ int counts[]; /* (2, n_experts) */
    launch_next();
    wait_previous();
    const int t = blockIdx.x * ROUTE_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t < tokens) {
        const int expert = choose<MAX_EXPERTS / 32>(r, t);
        const float weight = weigh(r, t, expert);
        if (lane < w.top_k) w.expert[t * w.top_k + lane] = expert, w.weight[t * w.top_k + lane] = weight;
    }
    if (gridDim.x == 1) __syncthreads();
    if (gridDim.x == 1 || last_block(w.routed, gridDim.x))
        sort_choices(w, tokens * w.top_k, job_size, counts, counts + w.n_experts);
}

/* sum = the sum over all cards, a block a row (gpus/). */
__device__ inline void all_reduce(const Work &w, Pairs &sum);

/* sum += the results in w.down: those of top_k experts, by weight in the order of choice. With weights NULL and top_k 1
 * there is one, of attention or a dense layer. */
__device__ inline void sum_results(const Work &w, Pairs &sum, int top_k, const float *weights) {
    const int t = blockIdx.x;
    if (weights && w.shared) load_pairs(sum, w.shared + (size_t)t * w.dim, w.dim);
#pragma unroll 4
    for (int choice = t * top_k; choice < (t + 1) * top_k; choice++) {
        const float weight = weights ? weights[choice] : 1;
        const float2 *down = (const float2 *)(w.down + (size_t)choice * w.dim);
        for_pairs(w.dim, [&](int i, int k) {
            sum[k] = {sum[k].x + weight * down[i].x, sum[k].y + weight * down[i].y};
        });
    }
}
/* x += the results' sum, and the new row in x. With `post` the sum is normed before it is added. */
__device__ inline void add_results(const Work &w, Pairs &x, int top_k, const float *weights, const float *post) {
    Pairs sum = {};
    load_pairs(x, w.x + (size_t)blockIdx.x * w.dim, w.dim);
    sum_results(w, sum, top_k, weights);
    if (w.link.cards > 1) all_reduce(w, sum);
    if (post) {
        const float factor = rms_factor(w, sum);
        const float2 *weight = (const float2 *)post;
        for_pairs(w.dim, [&](int i, int k) {
            sum[k] = {sum[k].x * factor * weight[i].x, sum[k].y * factor * weight[i].y};
        });
    }
    float2 *to = (float2 *)(w.x + (size_t)blockIdx.x * w.dim);
    for_pairs(w.dim, [&](int i, int k) { to[i] = x[k] = {x[k].x + sum[k].x, x[k].y + sum[k].y}; });
}
/* x += results, as in add_results(). One block a token. */
__global__ void __launch_bounds__(1024) combine(Work w, int top_k, const float *weights, const float *post) {
    Pairs x;
    launch_next();
    wait_previous();
    add_results(w, x, top_k, weights, post);
}

/* ---- 6 attention ---- */

/* Where keys or values of a head begin in a page. */
__host__ __device__ inline bf16 *cache_of(const Work &w, int page, int values, int head) {
    const int row = w.kv_rank ? w.layer * cache_row(w) : ((w.layer * 2 + values) * w.n_kv_heads + head) * w.head_dim;
    return w.cache + page * page_size(w) + (size_t)row * PAGE;
}
/* Where, counted from cache_of(), dimension i of a position's key or value lies. The 16 positions of a slab lie
 * together: keys position by position in groups of 32 dimensions (the last group may be smaller), values dimension by
 * dimension. So a warp loads whole cache lines for mma. */
constexpr int SLAB_KEYS = 16, SLABS = PAGE / SLAB_KEYS;
__host__ __device__ inline int key_place(int d, int position, int i) {
    int at = position % PAGE;
    return at / SLAB_KEYS * SLAB_KEYS * d + i / 32 * 32 * SLAB_KEYS + at % SLAB_KEYS * min(32, d - i / 32 * 32) +
           i % 32;
}
__host__ __device__ inline int value_place(int d, int position, int i) {
    int at = position % PAGE;
    return at / SLAB_KEYS * SLAB_KEYS * d + i * SLAB_KEYS + at % SLAB_KEYS;
}
/* The page that holds a position of a sequence. The table of pages has header[0] columns. */
__device__ inline int page_of(const Step &s, int seq, int position) {
    return s.page[(size_t)seq * s.header[0] + position / PAGE];
}
/* The first position that a query sees. */
__device__ inline int first_seen(int position, int window) {
    return window && position >= window ? position - window + 1 : 0;
}

/* Where qkv's result for head h of a token begins: first come the heads of queries, then keys, then values. */
__device__ inline const float *head_of(const Work &w, const DeviceLayer &l, int t, int h) {
    return w.projected + (size_t)t * l.qkv.rows + h * w.head_dim;
}
/* The cosines and sines of a position. */
__device__ inline const float2 *cos_sin_of(const Work &w, const DeviceLayer &l, int position) {
    return l.cos_sin + (size_t)position * (w.rope_dim / 2);
}
/* RoPE of a pair of dimensions (Su et al., "RoFormer", 2021). */
__device__ inline float2 rotated(const float2 &x, const float2 &cos_sin) {
    return {x.x * cos_sin.x - x.y * cos_sin.y, x.y * cos_sin.x + x.x * cos_sin.y};
}
/* Norm and RoPE of one head, by a warp; `norm` is NULL unless the model norms queries and keys (q_norm, k_norm). It
 * covers rope_dim dimensions: a model with these norms turns whole heads. The two values that turn together are
 * adjacent here: where a file has them half a head apart, the loader reorders the rows. store(i, pair) receives the
 * i-th pair. */
template <class Store>
__device__ inline void norm_and_rope(const Work &w, const float2 *cos_sin, const float *head, const float *norm,
                                     Store store) {
    const float2 *pair = (const float2 *)head, *weight = (const float2 *)norm;
    int lane = threadIdx.x % 32;
    float square = 0, factor = 1;
    for (int i = lane; i < w.rope_dim / 2 && norm; i += 32) square += pair[i].x * pair[i].x + pair[i].y * pair[i].y;
    if (norm) factor = norm_factor(warp_sum(square), w.rope_dim, w.eps);
    for (int first = lane; first < w.rope_dim / 2; first += 64) {
        float2 x[2], by[2]; /* requested together */
        for (int k = 0, i = first; k < 2 && i < w.rope_dim / 2; k++, i += 32) x[k] = pair[i], by[k] = cos_sin[i];
        for (int k = 0, i = first; k < 2 && i < w.rope_dim / 2; k++, i += 32) {
            if (norm) x[k] = {x[k].x * factor * weight[i].x, x[k].y * factor * weight[i].y};
            store(i, rotated(x[k], by[k]));
        }
    }
}
/* Queries are bf16 unless weights are F32. */
__host__ __device__ inline Type query_type(const DeviceLayer &l) { return l.qkv.type == F32 ? F32 : BF16; }
/* Norm and RoPE of query head h of a token, stored to w.q, and of a key, stored to the cache; one warp each. */
__device__ inline void store_query(const Work &w, const DeviceLayer &l, const float2 *cos_sin, const float *row,
                                   const float *norm, int t, int h) {
    const size_t to = ((size_t)t * w.n_heads + h) * w.head_dim;
    norm_and_rope(w, cos_sin, row, norm,
                  [&](int i, float2 x) { store_pair_as(query_type(l), w.q, to + 2 * i, x.x, x.y); });
}
__device__ inline void store_key(const Work &w, const Step &s, const float2 *cos_sin, const float *row,
                                 const float *norm, int t, int head) {
    const int p = s.position[t];
    bf16 *keys = cache_of(w, page_of(s, s.seq[t], p), 0, head);
    norm_and_rope(w, cos_sin, row, norm,
                  [&](int i, float2 x) { *(uint32_t *)(keys + key_place(w.head_dim, p, 2 * i)) = pack(x.x, x.y); });
}
/* Stores dimension i of a value to the cache, and returns it. */
__device__ inline bf16 store_value(const Work &w, const Step &s, const float *row, int t, int head, int i) {
    const int p = s.position[t];
    return cache_of(w, page_of(s, s.seq[t], p), 1, head)[value_place(w.head_dim, p, i)] = row[i];
}
/* Norm and RoPE of queries and keys, and the cache. A block has a head (blockIdx.y: queries, keys, values) of
 * ROPE_TOKENS tokens. Neighbouring threads store a dimension of neighbouring tokens: so values lie in the cache. */
constexpr int ROPE_TOKENS = 16, ROPE_WARPS = 4;
__global__ void __launch_bounds__(ROPE_WARPS * 32) rope(const __grid_constant__ Work w, const __grid_constant__ Step s,
                                                        const __grid_constant__ DeviceLayer l, int tokens) {
    launch_next();
    wait_previous();
    const int first = blockIdx.x * ROPE_TOKENS, n = min(ROPE_TOKENS, tokens - first), head = blockIdx.y;
    const int key = head - w.n_heads, value = key - w.n_kv_heads;
    for (int i = threadIdx.x / 32; i < n && value < 0; i += ROPE_WARPS) {
        const int token = first + i;
        const float *row = head_of(w, l, token, head);
        const float2 *cos_sin = cos_sin_of(w, l, s.position[token]);
        key < 0 ? store_query(w, l, cos_sin, row, l.q_norm, token, head)
                : store_key(w, s, cos_sin, row, l.k_norm, token, key);
    }
    const int t = threadIdx.x % ROPE_TOKENS;
    for (int i = threadIdx.x / ROPE_TOKENS; i < w.head_dim && value >= 0 && t < n; i += ROPE_WARPS * 32 / ROPE_TOKENS)
        store_value(w, s, head_of(w, l, first + t, head), first + t, value, i);
}

/* 16 keys and values of a page, as mma wants them: column n of tile j is key 4 (n / 2) + 2 j + n % 2. So a lane's
 * softmax shares belong to four neighbouring keys, whose values of one dimension lie together. */
template <int D> struct Slab {
    uint4 key[2][D / 32];
    uint2 value[D / 8];
    template <bool SHARED = false>
    __device__ void load(const bf16 *keys, const bf16 *values, int i, int lane) { /* the i-th of a page */
        int g = lane / 4, t = lane % 4;
        auto read = [](auto from) { return SHARED ? *from : __ldcg(from); };
        keys += key_place(D, i * SLAB_KEYS + g / 2 * 4 + g % 2, t * 8);
        values += value_place(D, i * SLAB_KEYS + t * 4, g);
        for (int j = 0; j < 2; j++)
            for (int c = 0; c < D / 32; c++) key[j][c] = read((const uint4 *)(keys + key_place(D, 2 * j, c * 32)));
        for (int d = 0; d < D / 8; d++) value[d] = read((const uint2 *)(values + value_place(D, 0, d * 8)));
    }
};

/* The max of no scores. Finite, so that the difference of two is 0 and not a NaN. */
constexpr float NO_SCORE = -1e30f;
/* Limits a score smoothly to between -cap and cap; 0: no cap. */
__device__ inline float capped(float score, float cap) { return cap ? cap * tanhf(score / cap) : score; }

/* What multiplies the sum of values, whose shares are 2^(score - max_score) and add up to `total`, when a sink joins
 * the softmax: a logit that has a share but no value. -INFINITY: no sink. */
__device__ inline float sink_factor(float max_score, float total, float sink) {
    const float top = fmaxf(max_score, sink * LOG2E), share = exp2f(max_score - top);
    return share / (total * share + exp2f(sink * LOG2E - top));
}

/* A warp's state of softmax(scale q k) v for up to 8 query heads of one token, which share a key/value head, after the
 * keys seen so far (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Lane 4g + t: head g. */
template <int D> struct SlabState {
    float max_score = NO_SCORE, total = 0, sum[D / 8][2] = {}; /* dimensions 8i + 2t, + 1 */

    __device__ void add(const Slab<D> &slab, const uint4 (&q)[D / 32], int base, int first, int last, float scale,
                        int lane, float cap = 0) {
        float score[2][4] = {}, now = max_score;
        int t = lane % 4;
        uint32_t share[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int c = 0; c < D / 32; c++) mma_eight(score[j], q[c], uint4{}, slab.key[j][c]);
            for (int i = 0; i < 2; i++) {
                int p = base + 4 * t + 2 * j + i;
                score[j][i] = p >= first && p <= last ? capped(score[j][i] * scale, cap) : -INFINITY;
                now = fmaxf(now, score[j][i]);
            }
        }
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
        float factor = exp2f(max_score - now);
        max_score = now;
        total *= factor;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float a = exp2f(score[j][0] - now), b = exp2f(score[j][1] - now);
            total += a + b;
            share[j] = pack(a, b);
        }
        int behind = base + 4 * t - last; /* values past the end may be NaN, and 0 times NaN is NaN */
        auto mask = [](int behind) { return behind < 0 ? ~0u : behind ? 0 : 0xFFFF; };
        const uint32_t keep = mask(behind), keep2 = mask(behind + 2);
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
            float c[4] = {sum[d][0] * factor, sum[d][1] * factor, 0, 0};
            mma<bf16>(c, share[0], 0, share[1], 0, slab.value[d].x & keep, slab.value[d].y & keep2);
            sum[d][0] = c[0], sum[d][1] = c[1];
        }
    }
    __device__ void store(float *to, int lane) { /* to (2 + D) of this lane's head: max_score, total, sum */
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        to[0] = max_score;
        to[1] = total;
        for (int d = 0; d < D / 8; d++)
            for (int i = 0; i < 2; i++) to[2 + d * 8 + lane % 4 * 2 + i] = sum[d][i];
    }
};

/* Merges `count` states of one head, `pitch` floats apart, for two dimensions from `pair` on. */
struct Merged {
    float max_score = NO_SCORE, total = 0;
    float2 sum = {};
    __device__ Merged() {}
    __device__ Merged(const float *state, int count, int pitch, int pair) {
        for (int i = 0; i < count; i++) max_score = fmaxf(max_score, state[i * pitch]);
        for (int i = 0; i < count; i++, state += pitch) {
            float share = exp2f(state[0] - max_score);
            total += share * state[1], sum.x += share * state[2 + pair], sum.y += share * state[3 + pair];
        }
    }
    __device__ float2 result(float sink) const {
        const float factor = sink_factor(max_score, total, sink);
        return {sum.x * factor, sum.y * factor};
    }
};
template <int D> constexpr int ATTENTION_WARPS = D <= 64 ? 8 : 4; /* so that two blocks fit on a multiprocessor */
__host__ __device__ inline int splits_of(int pages, int limit) { return max(1, min(limit, pages / SPLIT_PAGES)); }
/* The query heads of a block, at most 8 that share a key/value head (blockIdx.x), and the split of the context
 * (blockIdx.z) that it has: some of its pages, in slabs. */
struct BlockPart {
    int head, first_head, heads, seq, position, first, split, splits, slab, slabs;
    __device__ BlockPart(const Work &w, const Step &s, const DeviceLayer &l, int t, int seq, int max_splits)
        : seq(seq) {
        const int group = w.n_heads / w.n_kv_heads, parts = head_parts(group), part = blockIdx.x % parts * 8;
        head = blockIdx.x / parts, first_head = head * group + part, heads = min(8, group - part);
        position = s.position[t], first = first_seen(position, l.window);
        const int page = first / PAGE, pages = position / PAGE - page + 1;
        split = blockIdx.z, splits = splits_of(pages, max_splits);
        slab = max((page + pages * split / splits) * SLABS, first / SLAB_KEYS);
        slabs = min((page + pages * (split + 1) / splits) * SLABS, position / SLAB_KEYS + 1);
    }
};
/* The states of a block's warps (W, 8, D + 2) become the result of its heads, to w.attn. If several blocks split the
 * context, the last one to finish merges the states of all. */
template <int D>
__device__ inline void store_attention(const Work &w, const DeviceLayer &l, int t, const BlockPart &b,
                                       const float *states) {
    constexpr int ROW = D + 2, W = ATTENTION_WARPS<D>;
    /* Partial states of this token and these heads begin here: (splits, 8, ROW). */
    const size_t which = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    float *partial = w.partial + which * gridDim.z * 8 * ROW;
    auto result = [&](const float *from, int count, int h, int pair) {
        float2 x = Merged(from + h * ROW, count, 8 * ROW, pair).result(l.sinks ? l.sinks[b.first_head + h] : -INFINITY);
        store_pair_as(l.o.type, w.attn, (size_t)t * w.attn_pitch + (b.first_head + h) * D + pair, x.x, x.y);
    };
    for (int i = threadIdx.x; i < b.heads * (D / 2); i += blockDim.x) {
        int h = i / (D / 2), pair = i % (D / 2) * 2;
        if (b.splits == 1) {
            result(states, W, h, pair);
            continue;
        }
        Merged m(states + h * ROW, W, 8 * ROW, pair);
        float *to = partial + (b.split * 8 + h) * ROW;
        if (pair == 0) to[0] = m.max_score, to[1] = m.total;
        *(float2 *)(to + 2 + pair) = m.sum;
    }
    if (b.splits == 1 || !last_block(w.attended + which, b.splits)) return;
    for (int i = threadIdx.x; i < b.heads * (D / 2); i += blockDim.x)
        result(partial, b.splits, i / (D / 2), i % (D / 2) * 2);
}

/* Attention token by token (blockIdx.y: s.query): a block's warps take 16 keys in turn. The sink joins at the end, in
 * Merged::result(). */
template <int D>
__global__ void __launch_bounds__(ATTENTION_WARPS<D> * 32, 2) attention(Work w, Step s, DeviceLayer l, int max_splits) {
    extern __shared__ __align__(16) float states[]; /* (warps, 8, D + 2) */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_next();
    wait_previous();
    const int t = s.query[blockIdx.y];
    const BlockPart b(w, s, l, t, s.seq[t], max_splits);
    if (b.split >= b.splits) return;
    const int h = b.first_head + min(lane / 4, b.heads - 1); /* missing heads alias the last */
    const uint4 *query = (const uint4 *)((const bf16 *)w.q + ((size_t)t * w.n_heads + h) * D) + lane % 4;
    uint4 q[D / 32];
    for (int c = 0; c < D / 32; c++) q[c] = query[c * 4];
    SlabState<D> state;
    for (int i = b.slab + warp; i < b.slabs; i += ATTENTION_WARPS<D>) {
        const int page = page_of(s, b.seq, i * SLAB_KEYS);
        Slab<D> slab;
        slab.load(cache_of(w, page, 0, b.head), cache_of(w, page, 1, b.head), i % SLABS, lane);
        state.add(slab, q, i * SLAB_KEYS, b.first, b.position, LOG2E * w.attn_scale, lane, LOG2E * w.attn_cap);
    }
    state.store(states + (warp * 8 + lane / 4) * (D + 2), lane);
    __syncthreads();
    store_attention<D>(w, l, t, b, states);
}

/* Attention for any head size, for F32 and for any latents, without tensor cores: a block has a token (blockIdx.x) and
 * a query head. Each thread scores one key at a time; then the threads divide the dimensions of the result. With
 * latents a row of the cache is the key and, without its RoPE part, the value; the result goes to w.latents. */
__global__ void __launch_bounds__(128) attention_any(Work w, Step s, DeviceLayer l) {
    extern __shared__ __align__(16) float memory[]; /* the query, its result (d), a share for each thread */
    const int t = blockIdx.x, h = blockIdx.y, head = h / (w.n_heads / w.n_kv_heads), me = threadIdx.x;
    const int d = w.kv_rank ? cache_row(w) : w.head_dim, values = w.kv_rank ? w.kv_rank : d;
    float *q = memory, *sum = memory + d, *share = memory + 2 * d, max_score = NO_SCORE, total = 0;
    launch_next();
    wait_previous();
    const int p = s.position[t], seq = s.seq[t];
    for (int i = me; i < d; i += blockDim.x) {
        size_t at = ((size_t)t * w.n_heads + h) * d + i;
        q[i] = query_type(l) == F32 ? ((const float *)w.q)[at] : (float)((const bf16 *)w.q)[at];
        sum[i] = 0;
    }
    for (int base = first_seen(p, l.window); base <= p; base += blockDim.x) {
        const int keys = min((int)blockDim.x, p + 1 - base);
        __syncthreads();
        if (me < keys) {
            const bf16 *key = cache_of(w, page_of(s, seq, base + me), 0, head);
            float score = 0;
            for (int i = 0; i < d; i++) score += q[i] * (float)key[key_place(d, base + me, i)];
            share[me] = capped(score * w.attn_scale * LOG2E, w.attn_cap * LOG2E);
        }
        __syncthreads();
        float now = max_score;
        for (int i = 0; i < keys; i++) now = fmaxf(now, share[i]);
        float factor = exp2f(max_score - now), mine = me < keys ? exp2f(share[me] - now) : 0;
        total = total * factor + block_sum(mine); /* all have read the scores when it returns */
        max_score = now;
        share[me] = mine;
        __syncthreads();
        for (int i = me; i < values; i += blockDim.x) {
            sum[i] *= factor;
            for (int k = 0; k < keys; k++) {
                const bf16 *row = cache_of(w, page_of(s, seq, base + k), !w.kv_rank, head);
                sum[i] += share[k] * (float)row[w.kv_rank ? key_place(d, base + k, i) : value_place(d, base + k, i)];
            }
        }
    }
    const float factor = sink_factor(max_score, total, l.sinks ? l.sinks[h] : -INFINITY);
    for (int i = me; i < values; i += blockDim.x)
        if (w.kv_rank)
            store_as(type_for(l.v_up), w.latents, ((size_t)t * w.n_heads + h) * w.latent_pitch + i, sum[i] * factor);
        else
            store_as(l.o.type, w.attn, (size_t)t * w.attn_pitch + h * d + i, sum[i] * factor);
}

/* ---- 7 from logits to a token ---- */

/* Biases, penalties, temperature, top-k, top-p, min-p and the draw, with the operations of sampling.h, so that the same
 * logits give the same token as in C. A row is a token whose logits are wanted: number s.row[row] of the step. */

/* Limits logits smoothly to between -cap and cap. */
__global__ void __launch_bounds__(1024) cap_logits(Work w) {
    launch_next();
    wait_previous();
    const int id = blockIdx.x * blockDim.x + threadIdx.x;
    float *logit = w.logits + (size_t)blockIdx.y * w.vocab + id;
    if (id < w.ids) *logit = capped(*logit, w.logit_cap);
}

/* Adds biases and penalties to the logits of rows that draw, in place: it visits only the tokens that have a bias, or
 * are in the text. Then it hides tokens that are not allowed. One block a row. */
__global__ void __launch_bounds__(1024) adjust(Work w, Step s) {
    launch_next();
    wait_previous();
    const int row = blockIdx.x, t = s.row[row], seq = s.seq[t], slot = s.slot[seq], end = s.position[t] + 1;
    const Sampling how = s.how[seq];
    if (t != s.last[seq]) return;
    float *logit = w.logits + (size_t)row * w.vocab;
    const Bias *bias = w.bias + (size_t)slot * MOST_BIASES;
    for (int i = threadIdx.x; i < how.biases; i += blockDim.x) logit[bias[i].id] += bias[i].add;
    /* w.count: 2 for each time that the answer has a token, and 1 if the prompt has it. Who finds the sum adjusts the
     * logit, and leaves 0 for the next step. */
    uint32_t *count = w.count + (size_t)slot * w.vocab;
    const int begin = how.penalty != 1 ? 0 : how.frequency != 0 || how.presence != 0 ? how.answer : end;
    auto count_of = [&](int p) { return count + w.page_token[(size_t)page_of(s, seq, p) * PAGE + p % PAGE]; };
    for (int p = begin + threadIdx.x; p < end; p += blockDim.x)
        if (p < how.answer)
            atomicOr(count_of(p), 1u);
        else
            atomicAdd(count_of(p), 2u);
    __syncthreads();
    for (int p = begin + threadIdx.x; p < end; p += blockDim.x) {
        uint32_t *of_token = count_of(p), found = atomicExch(of_token, 0u);
        if (found) logit[of_token - count] = penalized(logit[of_token - count], &how, found / 2);
    }
    if (!how.allowed) return;
    const uint64_t begun = nanoseconds();
    while (threadIdx.x == 0 && load_from_host(w.allowed.ready + slot) < how.allowed)
        if (nanoseconds() - begun > 1000000000) {
            *w.late = LATE_MASK;
            break;
        }
    __syncthreads();
    const int words = (w.vocab + 31) / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < (words + 31) / 32 * 32; i += blockDim.x) {
        const unsigned mine = i < words ? w.allowed.bits[(size_t)slot * words + i] : 0;
        for (int j = 0; j < 32; j++) {
            const unsigned bits = __shfl_sync(~0u, mine, j);
            const int id = (i - lane + j) * 32 + lane;
            if (id < w.vocab && !(bits >> lane & 1)) logit[id] = -INFINITY;
        }
    }
}

/* The smallest scaled logit that top-k, top-p and min-p keep in the draw, to w.floor. Radix select finds it byte by
 * byte of its order_key, from the highest: a bin for each value of the byte. One block a row. */
__global__ void __launch_bounds__(1024) filter(Work w, Step s) {
    __shared__ unsigned low[256], high[256], prefix, largest; /* low, high: halves of the 64-bit bins */
    __shared__ unsigned long long above;                      /* what keys above the prefix add up to */
    launch_next();
    wait_previous();
    int row = blockIdx.x, seq = s.seq[s.row[row]];
    const Sampling how = s.how[seq];
    const float *logit = w.logits + (size_t)row * w.vocab;
    if (threadIdx.x == 0) largest = 0, w.floor[row] = -INFINITY;
    __syncthreads();
    if (how.temperature == 0 || (how.top_k <= 0 && how.top_p >= 1 && how.min_p <= 0)) return;
    for (int i = threadIdx.x; i < w.vocab; i += blockDim.x) {
        float x = scaled(logit[i], how.temperature);
        if (!isnan(x)) atomicMax(&largest, order_key(x));
    }
    __syncthreads();
    float max = key_value(largest), floor = -INFINITY;
    for (int pass = 0; pass < 2; pass++) { /* top-k counts, top-p adds masses */
        bool counts = pass == 0;
        if (counts ? how.top_k <= 0 || how.top_k >= w.vocab : how.top_p >= 1) continue;
        unsigned long long need = how.top_k;
        if (threadIdx.x == 0) prefix = 0, above = 0;
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (int i = threadIdx.x; i < 256; i += blockDim.x) low[i] = high[i] = 0;
            __syncthreads();
            unsigned fixed = shift == 24 ? 0 : ~0u << (shift + 8);
            for (int i = threadIdx.x; i < w.vocab; i += blockDim.x) {
                float x = scaled(logit[i], how.temperature);
                unsigned key = order_key(x);
                if (isnan(x) || (key & fixed) != prefix || !(x >= floor)) continue;
                unsigned long long add = counts ? 1 : mass(x, max);
                unsigned bin = key >> shift & 255, before = atomicAdd(&low[bin], (unsigned)add),
                         more = (unsigned)(add >> 32) + (before + (unsigned)add < before);
                if (more) atomicAdd(&high[bin], more);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                auto bin = [&](int i) { return (unsigned long long)high[i] << 32 | low[i]; };
                if (!counts && shift == 24) {
                    unsigned long long all = 0;
                    for (int i = 0; i < 256; i++) all += bin(i);
                    need = top_p_mass(all, how.top_p);
                }
                int digit = 255;
                for (; digit > 0 && above + bin(digit) < need; digit--) above += bin(digit);
                prefix |= (unsigned)digit << shift;
            }
            __syncthreads();
        }
        floor = fmaxf(floor, key_value(prefix));
        __syncthreads();
    }
    if (how.min_p > 0) floor = fmaxf(floor, min_p_floor(max, how.min_p));
    if (threadIdx.x == 0) w.floor[row] = floor;
}

/* The largest key that any card has drawn for a row (gpus/); one thread calls it. */
__device__ inline unsigned long long largest_key(const Work &w, int row, unsigned long long mine);

/* Draws a token for each row (blockIdx.y): the largest scaled logit plus noise, over all blocks. The block that
 * finishes last stores it. A NaN beats everything. */
__global__ void __launch_bounds__(1024) draw(Work w, Step s, bool filtered) {
    __shared__ unsigned long long best[32];
    launch_next();
    int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = s.row[row], seq = s.seq[t], position = s.position[t];
    Sampling how = s.how[seq];
    wait_previous();
    if (t != s.last[seq]) return;
    float floor = filtered ? w.floor[row] : -INFINITY;
    unsigned long long mine = 0;
    constexpr int AHEAD = 8; /* loads in flight */
    int threads = gridDim.x * blockDim.x;
    for (int first = blockIdx.x * blockDim.x + threadIdx.x; first < w.ids; first += AHEAD * threads) {
        float logit[AHEAD];
        for (int i = 0; i < AHEAD; i++)
            logit[i] = w.logits[(size_t)row * w.vocab + w.first_id + min(first + i * threads, w.ids - 1)];
        for (int i = 0; i < AHEAD; i++) {
            int id = w.first_id + first + i * threads;
            if (id >= w.first_id + w.ids) break;
            float x = scaled(logit[i], how.temperature);
            unsigned long long key = ~0ull;
            if (!isnan(x))
                key = x >= floor ? draw_key(how.temperature > 0 ? x + token_noise(how.seed, position + 1, id) : x, id)
                                 : 0;
            if (key > mine) mine = key;
        }
    }
    mine = warp_max(mine);
    if (lane == 0) best[warp] = mine;
    __syncthreads();
    if (warp == 0) mine = warp_max(lane < blockDim.x / 32 ? best[lane] : 0);
    if (threadIdx.x == 0) atomicMax(&w.best[row], mine);
    if (!last_block(w.drawing + row, gridDim.x) || threadIdx.x) return;
    mine = atomicExch(&w.best[row], 0);
    if (w.ids < w.vocab) mine = largest_key(w, row, mine);
    int token = mine == ~0ull ? DREW_NAN : draw_id(mine);
    w.drawn[s.slot[seq]] = token;                  /* for the next step */
    w.result[s.header[1] * w.slots + seq] = token; /* for the host: cuda_collect() in card.cu */
}

/* ---- 8 launches ---- */

/* Launches a kernel that may begin before the previous one has ended (from Hopper on). */
template <typename... Params, typename... Args>
cudaError_t launch(const Gpu *gpu, void (*kernel)(Params...), dim3 grid, int threads, size_t shared, Args... args) {
    cudaError_t error = cudaSuccess;
    /* In decode steps of the annex all kernels split a multiprocessor's memory between L1 and shared memory in the same
     * way, because a multiprocessor must be idle to change the split. */
    if (gpu->has_decode)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     gpu->decodes ? cudaSharedmemCarveoutMaxShared : cudaSharedmemCarveoutDefault);
    if (shared && !error)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error) return error;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = gpu->stream;
    config.attrs = &early, config.numAttrs = gpu->launch_arch >= 90;
    return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}
/* extensions.cuh has the list of types: f receives the type as a constant. */
template <class F> cudaError_t with_type(Type type, F f);
cudaError_t launch_product(const Gpu *gpu, const Product &p) {
    if (p.w.type == F32) {
        const int each = 2 * PRODUCT_WARPS; /* rows of a block */
        return launch(gpu, product_f32, dim3(p.tokens, (p.w.rows + each - 1) / each), PRODUCT_WARPS * 32, 0, p);
    }
    return with_type(p.w.type, [&](auto type) {
        const bool many = (p.job ? p.job_size : p.tokens) > 8;
        const int items = p.w.tiles() * (p.job ? p.max_jobs : many ? (p.tokens + 31) / 32 : 1);
        const int blocks = std::min(items, gpu->sms * (many ? 2 : Encoding<type>::BLOCKS));
        return launch(gpu, many ? product<type, 4> : product<type, 1>, blocks, PRODUCT_WARPS * 32, 0, p);
    });
}
/* Choices of a job, at most: what a block of `product` takes or, for heads of latents with fast/, product_tiled. */
int job_size_of(const Pass *a) { return a->tokens <= MAX_DECODE ? 8 : a->gpu->fast ? 64 : 32; }

/* W times w.normed (x NULL) or times x, for all tokens. */
Product product_of(const Pass *a, const Matrix &m, const void *x, int pitch) {
    Product p = {};
    p.w = m, p.x = x ? x : m.type == F32 ? a->w.normed_f32 : a->w.normed, p.x_pitch = x ? pitch : a->w.normed_pitch;
    p.tokens = a->tokens;
    p.divide = 1, p.act = a->w.act, p.act_limit = a->w.act_limit, p.y_type = F32;
    return p;
}
namespace fast { /* what the annex computes in place of `block` and launch_product() */
bool blocks(Pass *a, Error *e);
bool multiply(const Pass *a, const Product &p, Error *e);
int tile_tokens(const Pass *a);
} // namespace fast
bool multiply(const Pass *a, const Product &p, Error *e) {
    if (a->gpu->fast) return fast::multiply(a, p, e);
    CUDA(launch_product(a->gpu, p));
    return true;
}
/* y (tokens, rows) = W x. */
bool multiply_to(const Pass *a, const Matrix &m, const void *x, int pitch, float *y, Error *e) {
    Product p = product_of(a, m, x, pitch);
    p.y = y, p.y_pitch = m.rows;
    return multiply(a, p, e);
}
/* The residual stream += W x. */
bool multiply_add(const Pass *a, const Matrix &m, const void *x, int pitch, Error *e) {
    Product p = product_of(a, m, x, pitch);
    p.finish = ADD, p.y = a->w.x, p.y_pitch = a->w.dim;
    return multiply(a, p, e);
}
/* w.normed = the norm of x, for the matrix `next`. */
bool norm_for(const Pass *a, const float *weight, const Matrix &next, Error *e) {
    CUDA(launch(a->gpu, norm, a->tokens, row_threads(a->w.dim), 0, a->w, nullptr, weight, type_for(next)));
    return true;
}

/* ---- 9 taps: the stages of a step (Limits::tap), for tests and `infer logits --tap` ---- */

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
    if (!a->gpu->limits.tap) return true;
    const int d = w.kv_rank ? cache_row(w) : w.head_dim, kv = w.n_kv_heads * d;
    const Rows dealt = {0, 1, a->gpu->model.neighbours ? 0 : d / 2};
    std::vector<bf16> page((size_t)kv * PAGE);
    std::vector<float> out;
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

/* ---- 10 one step ---- */

/* A model's attention, from the results of a layer's first product in w.projected to w.attn: attend() below, or a
 * room's; extensions.cuh chooses. */
typedef bool Attend(const Pass *a, const DeviceLayer &l, Error *e);
Attend attend;
Attend *attend_for(const Work &w);
/* The sizes of heads that `attention` has instances for (extensions.cuh): f receives one as a constant. */
template <class F> cudaError_t with_head_dim(int head_dim, F f);

cudaError_t launch_rope(const Pass *a, const DeviceLayer &l) {
    const dim3 grid((a->tokens + ROPE_TOKENS - 1) / ROPE_TOKENS, a->w.n_heads + 2 * a->w.n_kv_heads);
    return launch(a->gpu, rope, grid, ROPE_WARPS * 32, 0, a->w, a->s, l, a->tokens);
}
/* `attention` of the tokens in s.query, or a kernel of the same shape. */
template <int D>
cudaError_t launch_attention(const Pass *a, const DeviceLayer &l, void (*kernel)(Work, Step, DeviceLayer, int)) {
    const Work &w = a->w;
    const int pages = l.window ? std::min(a->pages, l.window / PAGE + 2) : a->pages;
    dim3 grid(w.n_kv_heads * head_parts(w.n_heads / w.n_kv_heads), a->queries, splits_of(pages, a->splits));
    return launch(a->gpu, kernel, grid, ATTENTION_WARPS<D> * 32, ATTENTION_WARPS<D> * 8 * (D + 2) * sizeof(float), w,
                  a->s, l, a->splits);
}
cudaError_t launch_attention_any(const Pass *a, const DeviceLayer &l) {
    const Work &w = a->w;
    const int d = w.kv_rank ? cache_row(w) : w.head_dim;
    return launch(a->gpu, attention_any, dim3(a->tokens, w.n_heads), 128, (2 * d + 128) * sizeof(float), w, a->s, l);
}
bool attend(const Pass *a, const DeviceLayer &l, Error *e) {
    cudaError_t error = cudaErrorNotSupported;
    CUDA(launch_rope(a, l));
    if (query_type(l) != F32)
        error = with_head_dim(a->w.head_dim, [&](auto d) { return launch_attention<d>(a, l, attention<d>); });
    if (error == cudaErrorNotSupported) error = launch_attention_any(a, l);
    CUDA(error);
    return tap_attention(a, l, e);
}

/* x += results, summed over all cards: see add_results(). */
bool combine_results(const Pass *a, int top_k, const float *weights, const float *post, Error *e) {
    Work w = a->w;
    if (!gpus::begin_sum(a, &w, &top_k, &weights, e)) return false;
    CUDA(launch(a->gpu, combine, a->tokens, row_threads(w.dim), 0, w, top_k, weights, post));
    return true;
}
/* x += W y; with `post` W y is normed before it is added. */
bool add_to_x(const Pass *a, const Matrix &m, const void *y, int pitch, const float *post, Error *e) {
    if (!post && a->w.link.cards == 1) return multiply_add(a, m, y, pitch, e);
    return multiply_to(a, m, y, pitch, a->w.down, e) && combine_results(a, 1, NULL, post, e);
}
/* The activation of gate and up of w.normed, to w.act_out, as the matrix `down` wants it. */
Product gated(const Pass *a, const Matrix &up, const Matrix &down) {
    Product p = product_of(a, up, NULL, 0);
    p.finish = ACTIVATE, p.y = a->w.act_out, p.y_pitch = a->w.act_pitch, p.y_type = type_for(down);
    return p;
}
/* Gives a product the jobs that route() has made. */
void with_jobs(const Pass *a, Product *p, int job_size) {
    const int choices = a->tokens * a->w.top_k;
    p->job = a->w.job, p->jobs = a->w.jobs, p->order = a->w.order;
    p->job_size = job_size, p->max_jobs = std::min(a->w.n_experts, choices) + choices / job_size;
}
/* The products of the chosen experts, to w.down. */
bool multiply_experts(const Pass *a, const DeviceLayer &l, int job_size, Error *e) {
    const Work &w = a->w;
    Product up = gated(a, l.up, l.down), down = product_of(a, l.down, w.act_out, w.act_pitch);
    with_jobs(a, &up, job_size), with_jobs(a, &down, job_size);
    up.divide = w.top_k, down.early = true, down.y = w.down, down.y_pitch = w.dim;
    return multiply(a, up, e) && tap_experts(a, l, e) && multiply(a, down, e);
}
Router router_of(const Pass *a, const DeviceLayer &l) {
    return {a->w.router, l.choice_bias, a->w.n_experts, a->w.top_k, a->w.route};
}
/* Chooses each token's experts, by choose(), and makes jobs of at most `job_size` choices of an expert. */
bool route_tokens(const Pass *a, const DeviceLayer &l, int job_size, Error *e) {
    CUDA(launch(a->gpu, route, (a->tokens + ROUTE_WARPS - 1) / ROUTE_WARPS, ROUTE_WARPS * 32,
                2 * a->w.n_experts * sizeof(int), a->w, router_of(a, l), a->tokens, job_size));
    return true;
}
/* x += the shared expert's down; with several cards combine() adds it. */
bool add_shared(const Pass *a, const DeviceLayer &l, Error *e) {
    if (a->w.shared) return multiply_to(a, l.shared_down, a->w.act_out, a->w.act_pitch, a->w.shared, e);
    return multiply_add(a, l.shared_down, a->w.act_out, a->w.act_pitch, e);
}
/* x += the shared expert, if there is one. */
bool shared_expert(const Pass *a, const DeviceLayer &l, Error *e) {
    return !l.shared_up.rows || (multiply(a, gated(a, l.shared_up, l.shared_down), e) && add_shared(a, l, e));
}
/* A mixture of experts: the router's logits, its choice, the products, and their weighted sum. */
bool experts(const Pass *a, const DeviceLayer &l, Error *e) {
    const Work &w = a->w;
    const int job_size = job_size_of(a);
    if (!multiply_to(a, l.router, NULL, 0, w.router, e) || !route_tokens(a, l, job_size, e)) return false;
    if (type_for(l.router) != type_for(l.up) && !norm_for(a, l.ffn_norm, l.up, e)) return false;
    return shared_expert(a, l, e) && multiply_experts(a, l, job_size, e) &&
           combine_results(a, w.top_k, w.weight, l.ffn_post_norm, e);
}
bool feed_forward(const Pass *a, const DeviceLayer &l, Error *e) {
    return multiply(a, gated(a, l.up, l.down), e) && tap_experts(a, l, e) &&
           add_to_x(a, l.down, a->w.act_out, a->w.act_pitch, l.ffn_post_norm, e);
}

#include "extensions.cuh"

/* A transformer block: x += attention(norm(x)), x += experts(norm(x)). */
bool block(Pass *a, int layer, Error *e) {
    const DeviceLayer &l = a->gpu->device.layer[layer];
    a->w.layer = layer;
    return norm_for(a, l.attn_norm, l.qkv, e) && multiply_to(a, l.qkv, NULL, 0, a->w.projected, e) &&
           attend_for(a->w)(a, l, e) && add_to_x(a, l.o, a->w.attn, a->w.attn_pitch, l.attn_post_norm, e) &&
           tap_x(a, "attn_residual", e) && norm_for(a, l.ffn_norm, l.router.rows ? l.router : l.up, e) &&
           (l.router.rows ? experts : feed_forward)(a, l, e) && tap_x(a, "residual", e);
}

bool forward(Pass *a, Error *e) {
    CUDA(launch(a->gpu, embed, a->tokens, row_threads(a->w.dim), 0, a->w, a->s, a->gpu->device.embed));
    if (a->gpu->fast) return fast::blocks(a, e);
    for (int i = 0; i < a->w.n_layers; i++)
        if (!block(a, i, e)) return false;
    return true;
}

bool head(Pass *a, int first, int n, Error *e) {
    const DeviceModel &device = a->gpu->device;
    Pass rows = *a; /* the requested ones, side by side */
    rows.tokens = n, rows.w.layer = a->w.n_layers;
    rows.w.logits += device.first_id, rows.w.ids = device.head.rows;
    CUDA(launch(a->gpu, norm, n, row_threads(a->w.dim), 0, a->w, a->s.row + first, device.norm, type_for(device.head)));
    Product p = product_of(&rows, device.head, NULL, 0);
    p.y = rows.w.logits, p.y_pitch = a->w.vocab;
    if (!multiply(&rows, p, e)) return false;
    if (a->w.logit_cap) CUDA(launch(a->gpu, cap_logits, dim3((rows.w.ids + 1023) / 1024, n), 1024, 0, rows.w));
    return true;
}

bool draw_tokens(const Pass *a, int first, int n, Error *e) {
    Pass rows = *a;
    rows.s.row += first, rows.w.layer = a->w.n_layers;
    if (!tap(&rows, "logits", F32, a->w.logits, a->w.vocab, n, a->w.vocab, e)) return false;
    if (a->adjusted) CUDA(launch(a->gpu, adjust, n, 1024, 0, a->w, rows.s));
    if (a->filtered) CUDA(launch(a->gpu, filter, n, 1024, 0, a->w, rows.s));
    CUDA(launch(a->gpu, draw, dim3((a->gpu->sms + n - 1) / n, n), 1024, 0, a->w, rows.s, a->filtered));
    return true;
}

int tile_tokens(const Pass *a) { return a->gpu->fast ? fast::tile_tokens(a) : 0; }
