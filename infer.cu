/* infer.cu: the plain engine: every kernel that gpt-oss needs, one for each step of a transformer block, for any number
 * of tokens on any card from sm_80 on. Begin at block(), which calls the kernels. Beside this file: tests/reference.c
 * computes the same by the same names in plain C; card.cuh says what lies on the card; card.cu brings it there and
 * submits steps; extensions.cuh includes the rooms, which have more encodings and attention of other models, and fast/,
 * the annex, which takes over in part on Hopper.
 *
 *   1  small device functions      mma, loads, copies; sums
 *   2  how a lane reads weights    Encoding: decoders of BF16, F16 and MXFP4
 *   3  the router's choice         choose (top-k), weigh
 *   4  products                    product (streams weights), product_tiled (many tokens)
 *   5  embedding, norm, experts    embed, norm, route, activate, combine
 *   6  attention                   RoPE, the cache, attention of few queries and of prompts
 *   7  from logits to a token      adjust, filter, draw
 *   8  launches                    launch, way_of, multiply
 *   9  taps                        the stages of a step for tests
 *  10  one step                    extensions.cuh; attend, experts, block, forward
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

/* Copies 16 bytes to shared memory; only the first `bytes` are read, the others become 0. copies_end() closes a batch
 * of copies; copies_done<n>() waits until at most the last n batches are still on the way. */
__device__ inline void copy_16(void *to, const void *from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
}
__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int BUT> __device__ inline void copies_done() {
    asm volatile("cp.async.wait_group %0;" ::"n"(BUT) : "memory");
}

__device__ inline float exp2_quick(float x) { /* for results that are rounded to bf16 */
    asm("ex2.approx.ftz.f32 %0,%0;" : "+f"(x));
    return x;
}

/* Four 8 by 8 matrices of 16 bits from shared memory. Lanes 8i to 8i + 7 say where the rows of the i-th are; lane 4g +
 * t gets columns 2t and 2t + 1 of row g of each or, transposed, rows 2t and 2t + 1 of column g. */
template <bool TRANSPOSED = false> __device__ inline uint4 load_matrices(const void *row) {
    uint4 x;
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(at)
                     : "memory");
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

/* mma() with a0 to a3 in one. */
template <typename A> __device__ inline void mma(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
    mma<A>(c, a.x, a.y, a.z, a.w, b0, b1);
}
/* The same for eight inner indices of a lane: rows g and g + 8 of a, column g of b. */
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
/* The sum of n values by a warp. load() requests the first HELD of each lane; they arrive meanwhile. */
template <int HELD> struct WarpSum {
    float x[HELD];
    __device__ void load(const float *value, int n) {
#pragma unroll
        for (int i = 0, at = threadIdx.x % 32; i < HELD; i++, at += 32) x[i] = at < n ? value[at] : 0;
    }
    __device__ float sum(const float *value, int n) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < HELD; i++) sum += x[i];
#pragma unroll 1
        for (int at = threadIdx.x % 32 + HELD * 32; at < n; at += 32) sum += value[at];
        return warp_sum(sum);
    }
};
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

/* How a lane of a warp reads weights of a type and makes bf16 of them: here of BF16, F16 and MXFP4, in a room of any
 * other type. card.cuh says how they lie on the card. card.cu brings them there: its card_type() says which type a
 * file's type becomes.
 *
 * Lane 4g + t has sixteen columns of rows g and g + 8 of a chunk of a tile, eight that begin at column(t, 0) and eight
 * that begin at column(t, 1), but where WORDS is 4 the second four of each lie 16 columns after the first. Raw is what
 * it loads; decode() turns eight columns of both rows into bf16 (or f16), divided by FACTOR; eight() reads the same
 * columns of x; multiply() adds the chunk's product with x, and x(n, half) says where a lane finds its columns of the
 * n-th eight tokens. product_tiled and the annex's experts copy chunks to shared memory, in pieces of 16 bytes; read()
 * fills Raw from there. column_for() in fast/prefill.cuh follows from column() and eight().
 *
 *   offset()  where a lane's weights of a tile's first chunk lie; those of chunk k lie k * STEP further on
 *   piece()   the same for a piece, in the order of shared memory
 *   PIECES    of a chunk of a tile
 *   AHEAD     chunks that a lane requests ahead
 *   MATRICES  product_tiled reads 16-bit weights and x with ldmatrix, which gives a lane other columns than column()
 *   BLOCKS    of `product`, with 8 warps, that share a multiprocessor */
template <Type T> struct Encoding;

/* Where an eighth of a chunk of a row, 16 bytes, lies in shared memory. Eight lanes read together and touch all banks:
 * ldmatrix reads the same eighth of eight rows, other loads four eighths of two. For those, eighth e of an odd row lies
 * at e ^ 5, in the other half and of the other parity. A half's eighths 0 and 2, 1 and 3 stay 32 bytes apart, which
 * eight() relies on. */
template <bool MATRICES = false> __device__ inline int eighth_of(int row, int eighth) {
    return row * CHUNK * 2 + (eighth ^ (MATRICES ? row % 8 : row % 2 * 5)) * 16;
}
/* Where columns (t, half) of row g begin in shared memory. */
template <class E> __device__ inline int place_of(int lane, int half) {
    const int column = E::column(lane % 4, half);
    return eighth_of(lane / 4, column / 8) + column % 8 * 2;
}
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
    static constexpr int STEP = CHUNK * 2, PIECES = 128, BLOCKS = 2;
    static constexpr bool MATRICES = true;
    template <int TILES> static constexpr int AHEAD = TILES == 1 ? 4 : 2;
    struct Raw {
        uint4 low[2], high[2];
    };
    __device__ static int column(int t, int half) { return half * 32 + t * 8; }
    __device__ static size_t offset(const Matrix &m, int tile, int lane) {
        return ((size_t)(tile * TILE + lane / 4) * m.stride + column(lane % 4, 0)) * 2;
    }
    __device__ static size_t piece(const Matrix &m, int tile, int i) {
        const int row = i / 8, eighth = i % 8 ^ row % 8; /* see eighth_of() */
        return ((size_t)(tile * TILE + row) * m.stride + eighth * 8) * 2;
    }
    __device__ static void load(Raw &r, const Matrix &m, const uint8_t *from, bool real) {
        const uint8_t *high = from + (size_t)8 * m.stride * 2;
        for (int half = 0; half < 2; half++) {
            r.low[half] = load_weights(from + half * 64, real);
            r.high[half] = load_weights(high + half * 64, real);
        }
    }
    /* A lane gets columns 2t and 2t + 1 of each eighth, the operands of mma. Rows read as load() reads them would have
     * to be moved between registers: 253 moves for 64 mma. */
    __device__ static void read(Raw &r, const uint8_t *chunk, int lane) {
        for (int half = 0; half < 2; half++) {
            const uint4 a = load_matrices(chunk + eighth_of<true>(lane % 16, half * 4 + lane / 16));
            const uint4 b = load_matrices(chunk + eighth_of<true>(lane % 16, half * 4 + 2 + lane / 16));
            r.low[half] = {a.x, a.z, b.x, b.z}, r.high[half] = {a.y, a.w, b.y, b.w};
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
    static constexpr int STEP = FP4_CHUNK, PIECES = FP4_CHUNK / 16, BLOCKS = 4;
    static constexpr bool MATRICES = false;
    template <int TILES> static constexpr int AHEAD = 2;
    struct Raw {
        uint4 words;
        uint32_t scales;
    };
    __device__ static int column(int t, int half) { return t * 16 + half * 8; }
    __device__ static size_t offset(const Matrix &m, int tile, int lane) {
        return (size_t)tile * (m.stride / CHUNK) * STEP + lane * 16;
    }
    __device__ static size_t piece(const Matrix &m, int tile, int i) { return offset(m, tile, i); }
    __device__ static void load(Raw &r, const Matrix &, const uint8_t *from, bool real) {
        int lane = threadIdx.x % 32;
        r = {load_weights(from, real), load_word(from + 512 - lane * 16 + lane / 4 * 4, real)};
    }
    __device__ static void read(Raw &r, const uint8_t *chunk, int lane) {
        r = {((const uint4 *)chunk)[lane], ((const uint32_t *)(chunk + 512))[lane / 4]};
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

/* A router's logits, how they choose, and where the choice goes. */
struct Router {
    const float *logit, *bias; /* (tokens, experts); (experts) or NULL */
    int experts, top_k;
    Route how;
    int *expert;   /* (tokens, top_k) receives the choice */
    float *weight; /* (tokens, top_k) */
    unsigned long long *experts_read;
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
    ADD,     /* y, the residual stream, += W x + bias; `normed` and `square` receive what the next norm needs */
    ACTIVATE /* y = the activation of rows 2i (gate) and 2i + 1 (up) */
};

/* RMSNorm's factor, from the sum of the squares (Zhang and Sennrich, 2019). */
__device__ inline float norm_factor(float squares, int dim, float eps) { return rsqrtf(squares / dim + eps); }

/* y = W x + bias for all tokens or, with jobs, for the choices of each expert. Choice token * top_k + k is a token and
 * its k-th expert. `divide` choices share a row of x: row r has those from r * divide on. */
struct Product {
    Matrix w;
    const void *x;
    int x_pitch, tokens, group; /* blockIdx.y of `product` is a group of so many tokens */
    const float *square;        /* (tokens, squares), which add up to the sum of squares of x before its norm */
    int squares;                /* 0: x is normed already */
    float *total;               /* (tokens) receives the sums, or NULL */
    float eps;
    const Job *job;
    const int *jobs, *order;
    int divide;
    Router router; /* top_k 0: none. Else there is one token, and its experts are the jobs */
    bool early;    /* jobs, or the router's logits, are ready: the previous kernel has waited for them */
    Finish finish;
    void *y; /* (tokens or choices, y_pitch) */
    int y_pitch;
    Type y_type; /* F32, except for ACTIVATE and where a matrix reads the result next */
    Act act;
    float act_limit;
    const float *norm; /* for ADD: (rows) weights of the norm that follows, or NULL: the next four are unused */
    void *normed;      /* (tokens, normed_pitch) receives y times these weights */
    int normed_pitch;
    Type normed_type;
    float *next_square; /* (tokens, tiles of w) receives y's sum of squares, tile by tile */
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
    float2 bias;
    float2 old, norm; /* for ADD: the old values, and weights of the norm that follows */
};
/* Zeros for what is absent; all zeros unless `real`. */
__device__ inline Target target_of(const Product &p, int expert, size_t out, int r, bool real = true) {
    auto pair = [&](const float *from, bool real) {
        const float first = __uint_as_float(load_word(from, real));
        return make_float2(first, __uint_as_float(load_word(from + 1, real && r + 1 < p.w.rows)));
    };
    return {pair(p.w.bias + (size_t)expert * p.w.rows + r, real && p.w.bias),
            pair((const float *)p.y + out * p.y_pitch + r, real && p.finish == ADD),
            pair(p.norm + r, real && p.finish == ADD && p.norm)};
}
/* Stores both rows; for ADD it returns the sum of squares of what it stored. */
__device__ inline float finish(const Product &p, const Target &target, size_t out, int r, float a, float b) {
    a += target.bias.x + target.old.x, b += target.bias.y + target.old.y;
    if (p.finish == ACTIVATE) {
        store_as(p.y_type, p.y, out * p.y_pitch + r / 2, activation(p.act, p.act_limit, a, b, p.y_type != F32));
        return 0;
    }
    if (r + 1 < p.w.rows && p.y_pitch % 2 == 0) { /* pairs are aligned */
        store_pair_as(p.y_type, p.y, out * p.y_pitch + r, a, b);
    } else {
        store_as(p.y_type, p.y, out * p.y_pitch + r, a);
        if (r + 1 < p.w.rows) store_as(p.y_type, p.y, out * p.y_pitch + r + 1, b);
    }
    if (p.finish == STORE || !p.norm) return 0;
    store_pair_as(p.normed_type, p.normed, out * p.normed_pitch + r, a * target.norm.x, b * target.norm.y);
    return a * a + b * b;
}

/* How a warp of `product` reads x, chunk by chunk of 8 TILES rows. Eight rows fit in L1 and are read where they lie
 * (the specialization for TILES = 1). More do not fit, so the warp copies its chunks to shared memory, SLOTS ahead.
 * Missing rows become zeros without being read: each tile of 16 rows of the matrix reads x from L2 again. */
template <Type T, int TILES> struct StreamedX {
    static constexpr int SLOT = TILES * 8 * CHUNK * 2, SLOTS = 2, RING = SLOTS * SLOT; /* bytes */
    const uint8_t *from[TILES * 2];
    uint8_t *ring, *slot;
    uint32_t to, at[2], rows; /* rows: real rows of this lane */
    __device__ void begin(const Product &p, const Job &job, uint8_t *shared) {
        const int lane = threadIdx.x % 32;
        rows = (job.n - lane / 8 + 3) / 4;
        for (int i = 0; i < TILES * 2; i++)
            from[i] = (const uint8_t *)p.x + ((job.first + i * 4 + lane / 8) * p.x_pitch + lane % 8 * 8) * 2;
        ring = shared + threadIdx.x / 32 * RING, to = eighth_of(lane / 8, lane % 8);
        for (int half = 0; half < 2; half++) at[half] = place_of<Encoding<T>>(lane, half);
    }
    /* Requests chunk `chunk`, the i-th of this warp; zeros unless `real`. */
    __device__ void request(int i, int chunk, bool real) {
#pragma unroll
        for (int k = 0; k < TILES * 2; k++)
            copy_16(ring + i % SLOTS * SLOT + to + k * 512, from[k] + chunk * CHUNK * 2, real && k < rows ? 16 : 0);
    }
    /* Requests a tile's first chunks. Zeros take the place of those that it lacks: weights past the end are zeros too,
     * but zero times what lay there before may be a NaN. Later, finite values lie in all slots. */
    __device__ void start(int first, int step, int chunks) {
        static_assert(Encoding<T>::template AHEAD<TILES> % SLOTS == 0, "each tile begins with the first slot");
        for (int i = 0; i < SLOTS; i++) request(i, first + i * step, first + i * step < chunks), copies_end();
    }
    /* Before and after the product with chunk `chunk`, the i-th of this warp. */
    __device__ void arrive(int i, int, int) { copies_done<SLOTS - 1>(), __syncwarp(), slot = ring + i % SLOTS * SLOT; }
    __device__ void leave(int i, int chunk, int step, int chunks) {
        __syncwarp();
        if (chunk + SLOTS * step < chunks) request(i, chunk + SLOTS * step, true);
        copies_end();
    }
    __device__ const void *operator()(int n, int half) const { return slot + n * 8 * CHUNK * 2 + at[half]; }
};
template <Type T> struct StreamedX<T, 1> {
    const uint8_t *row, *at;
    __device__ void begin(const Product &p, const Job &job, uint8_t *) {
        int i = job.first + min((int)threadIdx.x % 32 / 4, job.n - 1);
        if (p.order) i = __ldcg(p.order + i);
        if (p.divide > 1) i /= p.divide;
        row = (const uint8_t *)p.x + ((size_t)i * p.x_pitch + Encoding<T>::column(threadIdx.x % 4, 0)) * 2;
    }
    __device__ void start(int, int, int) {}
    __device__ void arrive(int, int chunk, int chunks) { at = row + (uint32_t)min(chunk, chunks - 1) * CHUNK * 2; }
    __device__ void leave(int, int, int, int) {}
    __device__ const void *operator()(int, int half) const { return at + Encoding<T>::column(0, half) * 2; }
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
    __device__ void multiply(float (&c)[TILES][4], const Matrix &m, const uint8_t *tile, StreamedX<T, TILES> &x,
                             int first, int step, int chunks) {
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

/* The product for few tokens, or choices of an expert; reading the weights takes most of its time. The blocks share the
 * tiles of all jobs evenly; the warps of a block share a tile's columns. Groups of up to 8 TILES tokens read the same
 * weights at about the same time, so all but the first find most of them in L2. If a product with ADD wrote x, x is the
 * residual stream times the norm's weights, and this kernel divides its result by the root mean square. So no norm
 * kernel is needed in between.
 *
 * Without jobs a block requests its first weights before it waits. With jobs it waits for them, and only then lets the
 * next kernel begin. So that kernel, a product with `early`, finds the jobs ready. For a single token, and up to
 * PRODUCT_EXPERTS experts, no kernel makes jobs: each block chooses the experts itself, which takes less time than
 * another kernel. */
constexpr int PRODUCT_EXPERTS = 128;
template <Type T, int TILES, int W>
__global__ void __launch_bounds__(W * 32, Encoding<T>::BLOCKS * 8 / W) product(const __grid_constant__ Product p) {
    typedef Encoding<T> E;
    /* Of a group or, with jobs, of the step: an expert may have any of its tokens. */
    constexpr int TOKENS = TILES * 8 > MAX_DECODE ? TILES * 8 : MAX_DECODE;
    __shared__ float sum[2][W][TILES * 128], factor[TOKENS]; /* two sums: so one barrier a tile is enough */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = p.w.stride / CHUNK;
    const int first_token = blockIdx.y * p.group, tokens = min(p.group, p.tokens - first_token);
    const unsigned tiles = p.w.tiles(), tile_bytes = E::offset(p.w, 1, 0);
    const bool chooses = TILES == 1 && W == 8 && p.router.top_k, wait_first = (p.job || chooses) && !p.early;
    if (wait_first) wait_previous();
    launch_next();
    __shared__ int chosen[32];
    if (chooses) {
        if constexpr (TILES == 1 && W == 8)
            if (warp == 0) chosen[lane] = choose<PRODUCT_EXPERTS / 32>(p.router, 0);
        __syncthreads();
    }
    const unsigned jobs = p.job     ? __ldcg(p.jobs)
                          : chooses ? p.router.top_k
                                    : 1,
                   total = jobs * tiles, end = (blockIdx.x + 1) * total / gridDim.x;
    unsigned item = blockIdx.x * total / gridDim.x; /* a tile of a job: `tile` of number `which` */
    unsigned which = item / tiles, tile = item - which * tiles;
    Job job = {0, first_token, tokens};
    const uint8_t *weights = NULL;
    /* Reads job number `which`, and sets where this lane's weights of its tile begin. */
    auto find_job = [&](Job &found) {
        const int *from = &p.job[which].expert;
        if (p.job) found = {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2)};
        if (chooses) found = {chosen[which], (int)which, 1};
        weights = p.w.data + found.expert * p.w.bytes + E::offset(p.w, tile, lane);
    };
    if (item < end) find_job(job);
    Stream<T, TILES> stream;
    stream.begin(p.w, weights, warp, W, item < end ? chunks : 0);
    if (!wait_first) wait_previous();
    if (chooses && !p.early && blockIdx.x == 0 && warp == W - 1) { /* for combine */
        const float weight = weigh(p.router, 0, chosen[lane]);
        if (lane < p.router.top_k) p.router.expert[lane] = chosen[lane], p.router.weight[lane] = weight;
        if (lane == 0) *p.router.experts_read += p.router.top_k;
    }
    constexpr int HELD = T == MXFP4 ? 1 : TILES >= 3 ? 4 : 8; /* as many as there are registers for */
    WarpSum<HELD> squares[TOKENS / W];                        /* of the group's tokens `warp`, W + warp, ... */
    auto parts = [&](int n) { return p.square + (first_token + n * W + warp) * p.squares; };
    for (int n = 0; n < TOKENS / W; n++)
        if (n * W + warp < tokens) squares[n].load(parts(n), p.squares);
    /* At the end thread i has two rows of a tile, 2 (i % 8) and the next, for token i / 8. */
    static_assert(TILES * 64 <= W * 32, "one pair a thread");
    const int token = threadIdx.x / 8, pair = threadIdx.x % 8 * 2;
    extern __shared__ __align__(128) uint8_t shared[];
    StreamedX<T, TILES> x;
    bool mine;
    int out;
    auto begin_job = [&] {
        x.begin(p, job, shared);
        mine = token < min(TILES * 8, job.n);
        out = job.first + token;
        if (mine && p.order) out = __ldcg(p.order + out);
    };
    if (item < end) begin_job(), x.start(warp, W, chunks);
    for (int turn = 0; item < end; turn++) {
        float c[TILES][4] = {};
        const int row = tile * TILE + pair, now = tile;
        const bool store = mine && row < p.w.rows;
        Target target = {};
        if (token < TILES * 8) target = target_of(p, job.expert, out, row, store); /* whole warps skip it */
        stream.multiply(c, p.w, weights, x, warp, W, chunks);
        Job next = job;
        item++, tile++, weights += tile_bytes;
        if (tile == tiles && item < end) tile = 0, which++, find_job(next);
        stream.begin(p.w, weights, warp, W, item < end ? chunks : 0);
        if (item < end && warp < chunks) x.start(warp, W, chunks); /* jobs have TILES 1, for which it does nothing */
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) sum[turn % 2][warp][i * 32 + lane] = c[i / 4][i % 4];
        for (int n = 0; n < TOKENS / W && p.squares && !turn; n++) {
            if (n * W + warp >= tokens) break;
            float square = squares[n].sum(parts(n), p.squares);
            if (lane == 0) factor[n * W + warp] = norm_factor(square, p.w.cols, p.eps);
            if (lane == 0 && p.total && blockIdx.x == 0) p.total[first_token + n * W + warp] = square;
        }
        __syncthreads();
        if (token < TILES * 8) { /* at: where mma left row `pair` for this token; the next row's lane is 4 further on */
            const int at = token / 8 * 128 + (pair / 8 * 2 + token % 2) * 32 + pair % 8 * 4 + token % 8 / 2;
            float a = 0, b = 0, square = 0, scale = E::FACTOR;
            if (mine && p.squares) scale *= factor[(p.divide > 1 ? out / p.divide : out) - first_token];
            for (int k = 0; k < W; k++) a += sum[turn % 2][k][at], b += sum[turn % 2][k][at + 4];
            if (store) square = finish(p, target, out, row, a * scale, b * scale);
            if (p.finish == ADD && p.norm) {
                for (int o = 4; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o); /* of the tile's 16 rows */
                if (store && pair == 0) p.next_square[out * tiles + now] = square;
            }
        }
        if (item < end && tile == 0) job = next, begin_job();
    }
}

/* The product for more tokens, in tiles of 16 TILES. A warp decodes 16 ROWS rows of the matrix once and multiplies them
 * by all tokens of the block, mma's columns. Chunks of weights and of x come through a ring of shared memory: a thread
 * copies an eighth of every 16th row of x, and pieces of weights. At the end mma leaves a lane two tokens of a row, but
 * finish() takes two rows of a token. So the sums, too, go through shared memory; then a thread finishes two rows of
 * every second token. With more ROWS the last blocks of a launch leave more multiprocessors idle. */
constexpr int TILED_WARPS = 4;
/* This lane's columns of eight rows of x in shared memory. */
template <class E> __device__ inline uint4 columns_of(const uint8_t *rows, int lane, int half) {
    if constexpr (E::MATRICES) return load_matrices(rows + eighth_of<true>(lane % 8, half * 4 + lane / 8));
    return E::eight(rows + place_of<E>(lane, half));
}
template <Type T, int TILES> struct TiledShape {
    static constexpr int STAGES = TILES <= 2 && T == MXFP4 ? 4 : 3, THREADS = TILED_WARPS * 32, TOKENS = TILES * 16;
    static constexpr int BLOCKS = T == MXFP4 ? 4 : is_coded(T) ? 2 : 3; /* for which there are registers */
    static constexpr int ROWS = 2, ROW_TILES = TILED_WARPS * ROWS, PIECES = ROW_TILES * Encoding<T>::PIECES;
    static constexpr int X = TOKENS * CHUNK * 2, STAGE = X + PIECES * 16;     /* bytes */
    static constexpr int PAIRS = ROW_TILES * TILE / 2, PITCH = PAIRS * 2 + 4; /* the pitch spares bank conflicts */
    static constexpr int SHARED = STAGES * STAGE;                             /* in the end the sums lie there */
    static_assert(TOKENS * PITCH * 4 <= SHARED && SHARED <= 99 << 10, "sm_86 and sm_89 have no more");
};
template <Type T, int TILES>
__global__ void __launch_bounds__(TILED_WARPS * 32, TiledShape<T, TILES>::BLOCKS)
    product_tiled(const __grid_constant__ Product p) {
    typedef Encoding<T> E;
    typedef typename E::Activation A;
    typedef TiledShape<T, TILES> Shape;
    constexpr int STAGES = Shape::STAGES, STAGE = Shape::STAGE, THREADS = Shape::THREADS, ROWS = Shape::ROWS;
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int chunks = p.w.stride / CHUNK, tiles = p.w.tiles(), first = blockIdx.x * Shape::ROW_TILES;
    launch_next();
    wait_previous();
    if (p.job && (int)blockIdx.y >= *p.jobs) return;
    const int begin = blockIdx.y * Shape::TOKENS;
    const Job job = p.job ? p.job[blockIdx.y] : Job{0, begin, min(Shape::TOKENS, p.tokens - begin)};
    constexpr int X_EACH = Shape::TOKENS * 8 / THREADS, W_EACH = (Shape::PIECES + THREADS - 1) / THREADS;
    const A *x[X_EACH];
    const int rows = (job.n - (int)threadIdx.x / 8 + THREADS / 8 - 1) / (THREADS / 8); /* real rows of this thread */
    uint32_t piece[W_EACH];
#pragma unroll
    for (int i = 0; i < X_EACH; i++) {
        int row = job.first + min((i * THREADS + (int)threadIdx.x) / 8, job.n - 1); /* p.order has no more */
        x[i] = (const A *)p.x + (size_t)(p.order ? p.order[row] / p.divide : row) * p.x_pitch + threadIdx.x % 8 * 8;
    }
#pragma unroll
    for (int i = 0; i < W_EACH; i++) {
        int k = i * THREADS + threadIdx.x, tile = min(k / E::PIECES, min(Shape::ROW_TILES, tiles - first) - 1);
        piece[i] = (uint32_t)E::piece(p.w, tile, k % E::PIECES);
    }
    uint8_t *to = shared + eighth_of<E::MATRICES>(threadIdx.x / 8, threadIdx.x % 8);
    const uint8_t *weights = p.w.data + job.expert * p.w.bytes + E::offset(p.w, first, 0);
    int coming = 0, slot = 0, at = 0; /* the next chunk to copy; where the stages to fill and to read begin */
    auto copy = [&] {
        if (coming++ < chunks) {
#pragma unroll
            for (int i = 0; i < X_EACH; i++) /* missing rows become zeros */
                copy_16(to + slot + i * THREADS * 16, x[i], i < rows ? 16 : 0), x[i] += CHUNK;
#pragma unroll
            for (int i = 0; i < W_EACH; i++)
                if (Shape::PIECES % THREADS == 0 || i * THREADS + (int)threadIdx.x < Shape::PIECES)
                    copy_16(shared + slot + Shape::X + (i * THREADS + threadIdx.x) * 16, weights + piece[i]);
            weights += E::STEP;
            slot = slot == (STAGES - 1) * STAGE ? 0 : slot + STAGE;
        }
        copies_end();
    };
    float c[ROWS][2 * TILES][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) copy();
    for (int chunk = 0; chunk < chunks; chunk++) {
        copies_done<STAGES - 2>();
        __syncthreads();
        copy();
        const uint8_t *stage = shared + at;
        auto x_of = [&](int n, int half) { return columns_of<E>(stage + n * 8 * CHUNK * 2, lane, half); };
        at = at == (STAGES - 1) * STAGE ? 0 : at + STAGE;
        typename E::Raw raw[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) E::read(raw[r], stage + Shape::X + (warp * ROWS + r) * E::PIECES * 16, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 a[ROWS][2];
            for (int r = 0; r < ROWS; r++) {
                uint4 low, high;
                E::decode(raw[r], half, low, high);
                a[r][0] = {low.x, high.x, low.y, high.y}, a[r][1] = {low.z, high.z, low.w, high.w};
            }
#pragma unroll
            for (int n = 0; n < 2 * TILES; n += 2) { /* two together: an mma waits for the one before on the same sum */
                const uint4 column[2] = {x_of(n, half), x_of(n + 1, half)};
#pragma unroll
                for (int second = 0; second < 2; second++)
#pragma unroll
                    for (int i = 0; i < 2 * ROWS; i++) {
                        const uint4 x = column[i / ROWS];
                        mma<A>(c[i % ROWS][n + i / ROWS], a[i % ROWS][second], second ? x.z : x.x, second ? x.w : x.y);
                    }
            }
        }
    }
    float *sum = (float *)shared; /* (Shape::TOKENS, Shape::PITCH) */
    __syncthreads();              /* no warp reads the last stage any more */
#pragma unroll
    for (int n = 0; n < 2 * TILES; n++)
#pragma unroll
        for (int i = 0; i < 4 * ROWS; i++)
            sum[(n * 8 + 2 * t + i % 2) * Shape::PITCH + (warp * ROWS + i / 4) * TILE + i / 2 % 2 * 8 + g] =
                c[i / 4][n][i % 4];
    __syncthreads();
    const int pair = threadIdx.x % Shape::PAIRS * 2, r = first * TILE + pair;
    if (r >= p.w.rows) return;
    Target target = target_of(p, job.expert, 0, r, p.finish != ADD); /* a bias is the same for all tokens */
#pragma unroll 4
    for (int token = threadIdx.x / Shape::PAIRS; token < job.n; token += THREADS / Shape::PAIRS) {
        const size_t out = p.order ? p.order[job.first + token] : job.first + token;
        const float2 both = *(const float2 *)(sum + token * Shape::PITCH + pair);
        if (p.finish == ADD) target = target_of(p, job.expert, out, r);
        finish(p, target, out, r, both.x * E::FACTOR, both.y * E::FACTOR);
    }
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

/* Begins a step, a block a token: x = the row of the embedding, and the first norm. Stores each token in its page. */
__global__ void __launch_bounds__(1024) embed(Work w, Step s, Matrix table, const float *weight, Type type) {
    Pairs x, by;
    launch_next();
    load_pairs(by, weight, w.dim);
    wait_previous();
    int4 given = s.token[blockIdx.x];
    int token = given.x < 0 ? max(w.drawn[given.y], 0) : given.x; /* after a NaN the step does not count */
    float2 *to = (float2 *)(w.x + (size_t)blockIdx.x * w.dim);
    if (threadIdx.x == 0) w.page_token[given.z] = token;
    for_pairs(w.dim, [&](int i, int k) {
        to[i] =
            x[k] = {weight_of(table, token, 2 * i) * w.embed_scale, weight_of(table, token, 2 * i + 1) * w.embed_scale};
    });
    rms_norm(w, x, by, type, blockIdx.x);
}

/* The activation of gate and up, which cuBLAS has computed as T, for a token (blockIdx.y). */
constexpr int ACTIVATE_EACH = 8, ACTIVATE_THREADS = 256; /* results of a thread, two of them neighbours */
template <class T>
__global__ void __launch_bounds__(ACTIVATE_THREADS) activate(const __grid_constant__ Work w, int width, Type type) {
    struct alignas(4 * sizeof(T)) Four {
        T gate, up, next_gate, next_up;
    };
    launch_next();
    wait_previous();
    const Four *from = (const Four *)w.projected + (size_t)blockIdx.y * (width / 2);
#pragma unroll
    for (int k = 0; k < ACTIVATE_EACH / 2; k++) {
        const int i = (blockIdx.x * ACTIVATE_EACH / 2 + k) * ACTIVATE_THREADS + threadIdx.x;
        if (2 * i >= width) break;
        const Four x = from[i];
        store_pair_as(type, w.act_out, (size_t)blockIdx.y * w.act_pitch + 2 * i,
                      activation(w.act, w.act_limit, x.gate, x.up, type != F32),
                      activation(w.act, w.act_limit, x.next_gate, x.next_up, type != F32));
    }
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

/* x[t] += the weighted results of `top_k` experts (w.down), in the order of choice, or, without weights, the result of
 * attention or a dense layer. With `post` the sum is normed before it is added. Then comes the next norm. One block a
 * token. */
__global__ void __launch_bounds__(1024)
    combine(Work w, int top_k, const float *weights, const float *post, const float *norm, Type type) {
    Pairs x, by, sum = {};
    launch_next();
    load_pairs(by, norm, w.dim);
    wait_previous();
    const int t = blockIdx.x;
    float *row = w.x + (size_t)t * w.dim;
    load_pairs(x, row, w.dim);
#pragma unroll 4
    for (int choice = t * top_k; choice < (t + 1) * top_k; choice++) {
        const float weight = weights ? weights[choice] : 1;
        const float2 *down = (const float2 *)(w.down + (size_t)choice * w.dim);
        for_pairs(w.dim, [&](int i, int k) {
            sum[k] = {sum[k].x + weight * down[i].x, sum[k].y + weight * down[i].y};
        });
    }
    if (post) {
        const float factor = rms_factor(w, sum);
        const float2 *weight = (const float2 *)post;
        for_pairs(w.dim, [&](int i, int k) {
            sum[k] = {sum[k].x * factor * weight[i].x, sum[k].y * factor * weight[i].y};
        });
    }
    for_pairs(w.dim, [&](int i, int k) { ((float2 *)row)[i] = x[k] = {x[k].x + sum[k].x, x[k].y + sum[k].y}; });
    rms_norm(w, x, by, type, t);
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
/* Norm and RoPE of one head, by a warp; `norm` is NULL unless the model norms queries and keys (q_norm, k_norm); such a
 * model turns whole heads. The two values that turn together are adjacent here: where a file has them half a head
 * apart, the loader reorders the rows. store(i, pair) receives the i-th pair. */
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
/* Norm and RoPE of query head h of a token, stored to w.q, and of a key, stored to the cache; one warp each. A bf16
 * copy goes to `copy` unless that is NULL. */
__device__ inline void store_query(const Work &w, const DeviceLayer &l, const float2 *cos_sin, const float *row,
                                   const float *norm, int t, int h, bf16 *copy) {
    const size_t to = ((size_t)t * w.n_heads + h) * w.head_dim;
    norm_and_rope(w, cos_sin, row, norm, [&](int i, float2 x) {
        store_pair_as(query_type(l), w.q, to + 2 * i, x.x, x.y);
        if (copy) ((uint32_t *)copy)[i] = pack(x.x, x.y);
    });
}
__device__ inline void store_key(const Work &w, const Step &s, const float2 *cos_sin, const float *row,
                                 const float *norm, int t, int head, bf16 *copy) {
    const int p = s.position[t];
    bf16 *keys = cache_of(w, page_of(s, s.seq[t], p), 0, head);
    norm_and_rope(w, cos_sin, row, norm, [&](int i, float2 x) {
        *(uint32_t *)(keys + key_place(w.head_dim, p, 2 * i)) = pack(x.x, x.y);
        if (copy) ((uint32_t *)copy)[i] = pack(x.x, x.y);
    });
}
/* Stores dimension i of a value to the cache, and returns it. */
__device__ inline bf16 store_value(const Work &w, const Step &s, const float *row, int t, int head, int i) {
    const int p = s.position[t];
    return cache_of(w, page_of(s, s.seq[t], p), 1, head)[value_place(w.head_dim, p, i)] = row[i];
}
/* One head (blockIdx.y: queries, keys, values) of ROPE_TOKENS tokens, whose values of a dimension lie together. */
constexpr int ROPE_TOKENS = 16, ROPE_WARPS = 4;
__global__ void __launch_bounds__(ROPE_WARPS * 32)
    rope_and_store(const __grid_constant__ Work w, const __grid_constant__ Step s,
                   const __grid_constant__ DeviceLayer l, int tokens) {
    launch_next();
    wait_previous();
    const int first = blockIdx.x * ROPE_TOKENS, n = min(ROPE_TOKENS, tokens - first), head = blockIdx.y;
    const int key = head - w.n_heads, value = key - w.n_kv_heads;
    for (int i = threadIdx.x / 32; i < n && value < 0; i += ROPE_WARPS) {
        const int token = first + i;
        const float *row = head_of(w, l, token, head);
        const float2 *cos_sin = cos_sin_of(w, l, s.position[token]);
        key < 0 ? store_query(w, l, cos_sin, row, l.q_norm, token, head, NULL)
                : store_key(w, s, cos_sin, row, l.k_norm, token, key, NULL);
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
    /* Puts in a key and its value, of D dimensions each, as number `at` of the 16. */
    __device__ void replace(int at, const bf16 *its_key, const bf16 *its_value, int lane) {
        const int g = lane / 4, t = lane % 4;
        for (int j = 0; j < 2; j++)
            for (int c = 0; c < D / 32; c++)
                if (g / 2 * 4 + j * 2 + g % 2 == at) key[j][c] = *(const uint4 *)(its_key + c * 32 + t * 8);
        const uint32_t keep = at % 2 ? 0xFFFF : 0xFFFF0000; /* of the word with its value */
        for (int d = 0; d < D / 8; d++) {
            uint32_t &word = at % 4 < 2 ? value[d].x : value[d].y, its = __bfloat16_as_ushort(its_value[d * 8 + g]);
            if (at / 4 == t) word = (word & keep) | its << at % 2 * 16;
        }
    }
};

/* The max of no scores. Finite, so that the difference of two is 0 and not a NaN. */
constexpr float NO_SCORE = -1e30f;
/* Limits a score smoothly to between -cap and cap; 0: no cap. */
__device__ inline float capped(float score, float cap) { return cap ? cap * tanhf(score / cap) : score; }

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
    __device__ float2 result(float sink) const { /* the sink has a share but no value */
        float top = fmaxf(max_score, sink * LOG2E), share = exp2f(max_score - top),
              all = total * share + exp2f(sink * LOG2E - top);
        return {sum.x * share / all, sum.y * share / all};
    }
};

/* Attention token by token: in steps of up to MAX_DECODE tokens, and for sequences with one token in the step. A block
 * has one token (blockIdx.y), up to 8 query heads that share a key/value head (blockIdx.x), and a split of the context
 * (blockIdx.z), some of its pages; its warps take 16 keys in turn. The last split of a token to finish merges the
 * states of all. If no token sees another of the same step (`alone`), this kernel also does the work of rope_and_store
 * for its token: the token's rows pass through shared memory, so that all of them arrive at once. All older keys are in
 * the cache already, so a block loads its first ones before wait_previous(). With heads of 256 no registers are left to
 * load the next keys ahead. */
template <int D> constexpr int ATTENTION_WARPS = D <= 64 ? 8 : 4; /* so that two blocks fit on a multiprocessor */
__host__ __device__ inline int splits_of(int pages, int limit) { return max(1, min(limit, pages / SPLIT_PAGES)); }
template <int D>
__global__ void __launch_bounds__(ATTENTION_WARPS<D> * 32, 2)
    attention(Work w, Step s, DeviceLayer l, bool alone, int max_splits) {
    constexpr int ROW = D + 2, W = ATTENTION_WARPS<D>;
    extern __shared__ __align__(16) float states[];                      /* (W, 8, ROW) */
    __shared__ __align__(16) bf16 query[8][D], own_key[D], own_value[D]; /* queries from `heads` on hold anything */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.z;
    const int group = w.n_heads / w.n_kv_heads, parts = head_parts(group), head = blockIdx.x / parts;
    const int part = blockIdx.x % parts * 8, first_head = head * group + part, heads = min(8, group - part);
    launch_next();
    const int t = alone ? blockIdx.y : s.query[blockIdx.y], seq = alone ? t : s.seq[t];
    const int p = s.position[t], first = first_seen(p, l.window);
    const int page0 = first / PAGE, pages = p / PAGE - page0 + 1, splits = splits_of(pages, max_splits);
    if (split >= splits) return;
    const int slab0 = max((page0 + pages * split / splits) * SLABS, first / SLAB_KEYS);
    const int slabs = min((page0 + pages * (split + 1) / splits) * SLABS, p / SLAB_KEYS + 1);
    int i = slab0 + warp, page = i < slabs ? page_of(s, seq, i * SLAB_KEYS) : 0;
    Slab<D> slab;
    auto load = [&](Slab<D> &to, int i) {
        to.load(cache_of(w, page, 0, head), cache_of(w, page, 1, head), i % SLABS, lane);
    };
    float *cos_sin = states, *q_norm = cos_sin + D, *k_norm = q_norm + D, *key = k_norm + D, *value = key + D,
          *queries = value + D;
    auto fetch = [&](float *to, const float *from, int n) {
        for (int k = threadIdx.x * 4; k < n; k += blockDim.x * 4) copy_16(to + k, from + k);
    };
    if (alone) {
        fetch(cos_sin, (const float *)cos_sin_of(w, l, p), D);
        if (l.q_norm) fetch(q_norm, l.q_norm, D), fetch(k_norm, l.k_norm, D);
        if (i < slabs) load(slab, i);
    }
    wait_previous();
    if (alone) {
        fetch(queries, head_of(w, l, t, first_head), heads * D);
        fetch(key, head_of(w, l, t, w.n_heads + head), D);
        fetch(value, head_of(w, l, t, w.n_heads + w.n_kv_heads + head), D);
        copies_end();
        copies_done<0>();
        __syncthreads();
    } else if (i < slabs)
        load(slab, i);
    const bool own = alone && split == splits - 1; /* this block stores the token's key and value */
    for (int h = warp; h < heads + 2 * own; h += W)
        if (!alone)
            for (int k = lane * 2; k < D; k += 64)
                *(uint32_t *)(query[h] + k) =
                    ((const uint32_t *)w.q)[(((size_t)t * w.n_heads + first_head + h) * D + k) / 2];
        else if (h < heads)
            store_query(w, l, (const float2 *)cos_sin, queries + h * D, l.q_norm ? q_norm : NULL, t, first_head + h,
                        query[h]);
        else if (h == heads)
            store_key(w, s, (const float2 *)cos_sin, key, l.k_norm ? k_norm : NULL, t, head, own_key);
        else
            for (int k = lane; k < D; k += 32) own_value[k] = store_value(w, s, value, t, head, k);
    __syncthreads();
    uint4 q[D / 32];
    for (int c = 0; c < D / 32; c++) q[c] = *(const uint4 *)(query[lane / 4] + c * 32 + lane % 4 * 8);
    SlabState<D> state;
    for (; i < slabs; i += W) {
        Slab<D> next;
        if (D < 256 && i + W < slabs) page = page_of(s, seq, (i + W) * SLAB_KEYS), load(next, i + W);
        if (alone && i == p / SLAB_KEYS) slab.replace(p % SLAB_KEYS, own_key, own_value, lane);
        state.add(slab, q, i * SLAB_KEYS, first, p, LOG2E * w.attn_scale, lane, LOG2E * w.attn_cap);
        if (D < 256)
            slab = next;
        else if (i + W < slabs)
            page = page_of(s, seq, (i + W) * SLAB_KEYS), load(slab, i + W);
    }
    state.store(states + (warp * 8 + lane / 4) * ROW, lane);
    __syncthreads();
    /* Partial states of this token and these heads begin here: (splits, 8, ROW). */
    const size_t which = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    float *partial = w.partial + which * MAX_SPLITS * 8 * ROW;
    auto result = [&](const float *from, int count, int h, int pair) {
        float2 x = Merged(from + h * ROW, count, 8 * ROW, pair).result(l.sinks ? l.sinks[first_head + h] : -INFINITY);
        store_pair_as(l.o.type, w.attn, (size_t)t * w.attn_pitch + (first_head + h) * D + pair, x.x, x.y);
    };
    for (int i = threadIdx.x; i < heads * (D / 2); i += blockDim.x) {
        int h = i / (D / 2), pair = i % (D / 2) * 2;
        if (splits == 1) {
            result(states, W, h, pair);
            continue;
        }
        Merged m(states + h * ROW, W, 8 * ROW, pair);
        float *to = partial + (split * 8 + h) * ROW;
        if (pair == 0) to[0] = m.max_score, to[1] = m.total;
        *(float2 *)(to + 2 + pair) = m.sum;
    }
    if (splits == 1 || !last_block(w.attended + which, splits)) return;
    for (int i = threadIdx.x; i < heads * (D / 2); i += blockDim.x)
        result(partial, splits, i / (D / 2), i % (D / 2) * 2);
}

/* A warp's state for 16 rows of a prompt, each a token and a query head: lane 4g + t has rows g and g + 8. */
template <int D, int KEYS, bool IN_ORDER = false> struct TileState {
    float max_score[2] = {NO_SCORE, NO_SCORE}, total[2] = {},
          sum[D / 8][4] = {}; /* dimensions 8i + 2t, + 1 of either row */

    /* Where key n of tile j of 8 lies among KEYS: as in Slab, or in order. */
    __device__ static int key_of(int j, int n) {
        return IN_ORDER ? j * 8 + n : j / 2 * SLAB_KEYS + n / 2 * 4 + j % 2 * 2 + n % 2;
    }
    __device__ static void limit(float (&score)[KEYS / 8][4], float scale, float cap) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) score[i / 4][i % 4] = capped(score[i / 4][i % 4] * scale, cap);
    }
    /* Masks the keys that row g, of a token at position[0], and row g + 8, at position[1], do not see. */
    __device__ static void mask(float (&score)[KEYS / 8][4], int base, const int (&position)[2], int window) {
        const int first[2] = {first_seen(position[0], window), first_seen(position[1], window)};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            for (int i = 0; i < 4; i++) {
                int p = base + key_of(j, threadIdx.x % 4 * 2 + i % 2);
                if (p < first[i / 2] || p > position[i / 2]) score[j][i] = -INFINITY;
            }
    }
    /* Turns scores into softmax shares. Earlier sums are scaled to the new maximum. */
    __device__ void softmax(float (&score)[KEYS / 8][4], float scale) {
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float now = max_score[r];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) now = fmaxf(now, fmaxf(score[j][2 * r], score[j][2 * r + 1]) * scale);
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
            factor[r] = exp2_quick(max_score[r] - now);
            max_score[r] = now;
            total[r] *= factor[r];
#pragma unroll
            for (int i = 0; i < KEYS / 4; i++) {
                float &x = score[i / 2][2 * r + i % 2];
                x = exp2_quick(x * scale - now), total[r] += x;
            }
        }
#pragma unroll
        for (int i = 0; i < D / 2; i++) sum[i / 4][i % 4] *= factor[i % 4 / 2];
    }
    /* Tiles 2 slab and 2 slab + 1 of shares, as rows of mma. */
    __device__ static uint4 shares_of(const float (&share)[KEYS / 8][4], int slab) {
        const float(&a)[4] = share[2 * slab], (&b)[4] = share[2 * slab + 1];
        return {pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3])};
    }
    /* Stores the result of the lane's row g (r = 0) or g + 8, which is number `row` of a tile of n tokens. */
    __device__ void store_row(const Work &w, const DeviceLayer &l, int r, int row, int token, int n, int head) const {
        const int group = w.n_heads / w.n_kv_heads, h = head * group + row % group;
        float all = total[r] + __shfl_xor_sync(~0u, total[r], 1);
        all += __shfl_xor_sync(~0u, all, 2);
        float sink = l.sinks ? l.sinks[h] * LOG2E : -INFINITY, top = fmaxf(max_score[r], sink),
              factor = exp2f(max_score[r] - top);
        factor /= all * factor + exp2f(sink - top); /* a sink joins the softmax, without a value */
        if (row / group >= n) return;
        const size_t out = (size_t)(token + row / group) * w.attn_pitch + h * D + threadIdx.x % 4 * 2;
#pragma unroll
        for (int d = 0; d < D / 8; d++)
            store_pair_as(l.o.type, w.attn, out + d * 8, sum[d][2 * r] * factor, sum[d][2 * r + 1] * factor);
    }
};

/* Attention of neighbouring tokens of a prompt (blockIdx.y: a tile, the last first, since it sees most) and all query
 * heads that share a key/value head (blockIdx.x). A warp has 16 M rows, whose queries stay in shared memory while keys
 * and values pass through it (Dao, "FlashAttention-2", 2023). */
template <int D> struct AttentionShape {
    static constexpr int M = D <= 128 ? 2 : 1, WARPS = 4, ROWS = WARPS * M * 16, THREADS = WARPS * 32;
    static constexpr int KEYS = D <= 128 ? PAGE : PAGE / 2, STAGE = KEYS * D * 2; /* elements of keys and values */
    static constexpr int SHARED = (ROWS * D + 2 * STAGE) * sizeof(bf16);
    static_assert(SHARED <= 99 << 10, "sm_86 and sm_89 have no more");
    /* Requests the KEYS keys and values of a page from position `base` on. Values from the n-th on become
     * zeros, because the cache may hold NaN there. Keys need not: mask() discards their scores. */
    __device__ static void copy(const Work &w, bf16 *to, int page, int head, int base, int n) {
        constexpr int EACH = KEYS * D / 8 / THREADS;
        const bf16 *keys = cache_of(w, page, 0, head) + key_place(D, base, 0) + threadIdx.x * 8;
        const bf16 *values = cache_of(w, page, 1, head) + value_place(D, base, 0) + threadIdx.x * 8;
        to += threadIdx.x * 8;
#pragma unroll
        for (int i = 0; i < EACH; i++) copy_16(to + i * THREADS * 8, keys + i * THREADS * 8);
        to += KEYS * D;
        if (n >= KEYS) {
#pragma unroll
            for (int i = 0; i < EACH; i++) copy_16(to + i * THREADS * 8, values + i * THREADS * 8);
            return;
        }
        for (int i = 0; i < EACH; i++) {
            const int k = i * THREADS + threadIdx.x, position = k / (2 * D) * SLAB_KEYS + k % 2 * 8;
            copy_16(to + i * THREADS * 8, values + i * THREADS * 8, max(0, min(16, 2 * (n - position))));
        }
    }
};
template <int D>
__global__ void __launch_bounds__(AttentionShape<D>::THREADS) attention_tiled(Work w, Step s, DeviceLayer l) {
    typedef AttentionShape<D> Shape;
    constexpr int M = Shape::M, KEYS = Shape::KEYS;
    extern __shared__ __align__(128) bf16 arena[]; /* two stages of keys and values (2, KEYS * D); queries */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.x, tile = gridDim.y - 1 - blockIdx.y, group = w.n_heads / w.n_kv_heads;
    launch_next();
    wait_previous();
    const int token = s.tile[2 * tile], n = s.tile[2 * tile + 1], seq = s.seq[token], position = s.position[token];
    const int end = position + n - 1, begin = first_seen(position, l.window) / KEYS * KEYS;
    /* Missing rows alias the last token. */
    auto position_of = [&](int row) { return position + min(row / group, n - 1); };
    Shape::copy(w, arena, page_of(s, seq, begin), head, begin, end + 1 - begin);
    copies_end();
    int page = begin + KEYS <= end ? page_of(s, seq, begin + KEYS) : 0; /* of the next keys */
    /* Queries lie as mma wants them: for 16 rows and 32 dimensions first 16 bytes of each lane for one mma (dimensions
     * 8t to 8t + 3 of rows g and g + 8), then those for a second one (8t + 4 to 8t + 7). */
    uint4 *queries = (uint4 *)(arena + 2 * Shape::STAGE);
#pragma unroll 4
    for (int i = warp * 32; i < Shape::ROWS * D / 16; i += Shape::THREADS) {
        auto load = [&](int row) {
            const size_t of = (size_t)(token + position_of(row) - position) * w.n_heads + head * group + row % group;
            return *(const uint4 *)((const bf16 *)w.q + of * D + i % D + t * 8);
        };
        const uint4 row = load(i / D * 16 + g), row8 = load(i / D * 16 + g + 8);
        queries[2 * i + lane] = {row.x, row8.x, row.y, row8.y};
        queries[2 * i + 32 + lane] = {row.z, row8.z, row.w, row8.w};
    }
    TileState<D, KEYS> state[M];
    const int row0 = warp * M * 16, lowest = position_of(row0), highest = position_of(row0 + M * 16 - 1);
    const float scale = LOG2E * w.attn_scale, cap = LOG2E * w.attn_cap;
    for (int base = begin, stage = 0; base <= end; base += KEYS, stage ^= 1) {
        copies_done<0>();
        __syncthreads();
        const int next = base + KEYS;
        if (next <= end) Shape::copy(w, arena + (stage ^ 1) * Shape::STAGE, page, head, next, end + 1 - next);
        copies_end();
        if (next + KEYS <= end) page = page_of(s, seq, next + KEYS);
        const bf16 *keys = arena + stage * Shape::STAGE, *values = keys + KEYS * D;
        float score[M][KEYS / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D; c += 32) {
            uint4 key[KEYS / 8];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                key[j] = *(const uint4 *)(keys + key_place(D, state[0].key_of(j, g), c + t * 8));
#pragma unroll
            for (int second = 0; second < 2; second++) {
                uint4 query[M];
#pragma unroll
                for (int m = 0; m < M; m++) query[m] = queries[(row0 / 16 + m) * D * 2 + c * 2 + second * 32 + lane];
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int m = 0; m < M; m++)
                        mma<bf16>(score[m][j], query[m], second ? key[j].z : key[j].x, second ? key[j].w : key[j].y);
            }
        }
        const bool masked = base + KEYS - 1 > lowest || (l.window && base <= highest - l.window);
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (cap) state[m].limit(score[m], scale, cap);
            const int row = row0 + m * 16 + g;
            if (masked) state[m].mask(score[m], base, {position_of(row), position_of(row + 8)}, l.window);
            state[m].softmax(score[m], cap ? 1 : scale); /* limit() has scaled them */
        }
#pragma unroll
        for (int slab = 0; slab < KEYS / SLAB_KEYS; slab++) {
            uint4 share[M];
#pragma unroll
            for (int m = 0; m < M; m++) share[m] = state[m].shares_of(score[m], slab);
#pragma unroll
            for (int d = 0; d < D / 8; d++) {
                uint2 value = *(const uint2 *)(values + value_place(D, slab * SLAB_KEYS + t * 4, d * 8 + g));
#pragma unroll
                for (int m = 0; m < M; m++) mma<bf16>(state[m].sum[d], share[m], value.x, value.y);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * M; i++) state[i / 2].store_row(w, l, i % 2, row0 + i * 8 + g, token, n, head);
}

/* Attention for any head size, for F32 and for any latents, without tensor cores: a block has a token (blockIdx.x) and
 * a query head. Each thread scores one key at a time; then the threads divide the dimensions of the result. With
 * latents a row of the cache is the key and, without its RoPE part, the value; the result goes to w.latents. */
__global__ void __launch_bounds__(128) attention_any(Work w, Step s, DeviceLayer l) {
    extern __shared__ __align__(16) float memory[]; /* the query, its result (d), a share for each thread */
    const int t = blockIdx.x, h = blockIdx.y, head = h / (w.n_heads / w.n_kv_heads), me = threadIdx.x;
    const int d = w.kv_rank ? cache_row(w) : w.head_dim, values = w.kv_rank ? w.kv_rank : d;
    float *q = memory, *sum = memory + d, *share = memory + 2 * d, max_score = l.sinks ? l.sinks[h] : -INFINITY;
    launch_next();
    wait_previous();
    const int p = s.position[t], seq = s.seq[t];
    for (int i = me; i < d; i += blockDim.x) {
        size_t at = ((size_t)t * w.n_heads + h) * d + i;
        q[i] = query_type(l) == F32 ? ((const float *)w.q)[at] : (float)((const bf16 *)w.q)[at];
        sum[i] = 0;
    }
    float total = l.sinks ? 1 : 0; /* the sink, at first the max, has the share 1 and no value */
    for (int base = first_seen(p, l.window); base <= p; base += blockDim.x) {
        const int keys = min((int)blockDim.x, p + 1 - base);
        __syncthreads();
        if (me < keys) {
            const bf16 *key = cache_of(w, page_of(s, seq, base + me), 0, head);
            float score = 0;
            for (int i = 0; i < d; i++) score += q[i] * (float)key[key_place(d, base + me, i)];
            share[me] = capped(score * w.attn_scale, w.attn_cap);
        }
        __syncthreads();
        float now = max_score;
        for (int i = 0; i < keys; i++) now = fmaxf(now, share[i]);
        float factor = expf(max_score - now), mine = me < keys ? expf(share[me] - now) : 0;
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
    for (int i = me; i < values; i += blockDim.x)
        if (w.kv_rank)
            store_as(type_for(l.v_up), w.latents, ((size_t)t * w.n_heads + h) * w.latent_pitch + i, sum[i] / total);
        else
            store_as(l.o.type, w.attn, (size_t)t * w.attn_pitch + h * d + i, sum[i] / total);
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
    if (id < w.vocab) *logit = capped(*logit, w.logit_cap);
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
            *w.late = 1;
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
    for (int first = blockIdx.x * blockDim.x + threadIdx.x; first < w.vocab; first += AHEAD * threads) {
        float logit[AHEAD];
        for (int i = 0; i < AHEAD; i++)
            logit[i] = w.logits[(size_t)row * w.vocab + min(first + i * threads, w.vocab - 1)];
        for (int i = 0; i < AHEAD; i++) {
            int id = first + i * threads;
            if (id >= w.vocab) break;
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
    int token = mine == ~0ull ? DREW_NAN : draw_id(mine);
    w.drawn[s.slot[seq]] = token;                  /* for the next step */
    w.result[s.header[1] * w.slots + seq] = token; /* for the host */
}

/* ---- 8 launches ---- */

constexpr size_t SMALL = 16 << 20, LARGE = 256 << 20; /* bytes of a matrix */

/* Launches a kernel that may begin before the previous one has ended (from Hopper on). */
template <typename... Params, typename... Args>
cudaError_t launch(const Gpu *gpu, void (*kernel)(Params...), dim3 grid, int threads, size_t shared, Args... args) {
    cudaError_t error = cudaSuccess;
    /* In decode steps of the annex all kernels split a multiprocessor's memory between L1 and shared memory in the same
     * way, because a multiprocessor must be idle to change the split. */
    if (gpu->fast)
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

/* `product`, with the instance for a group's tokens. `jobs`: the max number of jobs, 1 without jobs. */
template <Type T> cudaError_t launch_product(const Gpu *gpu, Product p, int jobs) {
    /* With many tiles a block, as for the experts of many tokens, fewer warps have fewer sums to add up. */
    const int warps = p.tokens <= MAX_DECODE || !p.job ? 8 : 4;
    constexpr int MAX_GROUP = T == MXFP4 ? 8 : 32; /* tokens; groups are of equal size */
    /* Small matrices have few tiles: 25 to 32 tokens in two groups give twice the blocks. */
    const int limit = !is_coded(T) && p.tokens <= 48 && gpu->largest <= SMALL ? std::min(MAX_GROUP, 24) : MAX_GROUP;
    const int groups = p.job ? 1 : (p.tokens + limit - 1) / limit;
    p.group = (p.tokens + groups - 1) / groups;
    const int blocks = std::min(jobs * p.w.tiles(), std::max(1, Encoding<T>::BLOCKS * gpu->sms * 8 / warps / groups));
    auto with = [&](auto kernel, size_t ring) {
        return launch(gpu, kernel, dim3(blocks, groups), warps * 32, warps * ring, p);
    };
    if (warps == 4) return with(product<T, 1, 4>, 0);
    if constexpr (MAX_GROUP > 8) {
        if (!p.job && p.group > 24) return with(product<T, MAX_GROUP / 8, 8>, StreamedX<T, MAX_GROUP / 8>::RING);
        if (!p.job && p.group > 16) return with(product<T, 3, 8>, StreamedX<T, 3>::RING);
        if (!p.job && p.group > 8) return with(product<T, 2, 8>, StreamedX<T, 2>::RING);
    }
    return with(product<T, 1, 8>, 0);
}
template <Type T, int TILES> cudaError_t launch_tiled(const Gpu *gpu, const Product &p, int jobs) {
    typedef TiledShape<T, TILES> Shape;
    if (!p.job) jobs = (p.tokens + Shape::TOKENS - 1) / Shape::TOKENS;
    dim3 grid((p.w.tiles() + Shape::ROW_TILES - 1) / Shape::ROW_TILES, jobs);
    return launch(gpu, product_tiled<T, TILES>, grid, Shape::THREADS, Shape::SHARED, p);
}
template <Type T> cudaError_t launch_any(const Gpu *gpu, const Product &p, int job_size, int jobs) {
    if (job_size <= 8) return launch_product<T>(gpu, p, jobs);
    if (job_size <= 16) return launch_tiled<T, 1>(gpu, p, jobs);
    return job_size <= 32 ? launch_tiled<T, 2>(gpu, p, jobs) : launch_tiled<T, 4>(gpu, p, jobs);
}
/* extensions.cuh has the list of types: f receives the type as a constant. */
template <class F> cudaError_t with_type(Type type, F f);
/* job_size: the max number of choices of a job. Without jobs 8 selects `product`, and 64 product_tiled. */
cudaError_t launch_for_type(const Gpu *gpu, const Product &p, int job_size, int jobs) {
    return with_type(p.w.type, [&](auto type) { return launch_any<type>(gpu, p, job_size, jobs); });
}

/* Computes w.normed for matrix `next`, unless a->normed says that it is ready. */
bool norm_for(Pass *a, const float *weight, const Matrix &next, Error *e) {
    if (a->normed) return true;
    CUDA(launch(a->gpu, norm, a->tokens, row_threads(a->w.dim), 0, a->w, nullptr, weight, type_for(next)));
    a->squares = 0;
    return a->normed = true;
}

/* W times w.normed (x NULL) or times x, for all tokens. */
Product product_of(const Pass *a, const Matrix &m, const void *x, int pitch) {
    Product p = {};
    p.w = m, p.x = x ? x : m.type == F32 ? a->w.normed_f32 : a->w.normed, p.x_pitch = x ? pitch : a->w.normed_pitch;
    p.tokens = a->tokens;
    p.divide = 1, p.eps = a->w.eps, p.act = a->w.act, p.act_limit = a->w.act_limit, p.y_type = F32;
    if (!x && a->squares) p.square = a->square, p.squares = a->squares;
    return p;
}
/* How a product without jobs is computed. */
enum Way {
    STREAMED, /* by `product` */
    TILED,    /* by `product_tiled` */
    BLAS      /* by cuBLAS, codes after decode_matrix() */
};
/* Few tokens are streamed, because cuBLAS takes long to start. All limits were measured (notebooks/speed.md). */
Way way_of(const Pass *a, const Matrix &m) {
    const int tokens = a->tokens;
    if (m.type == F32) return BLAS;
    if (m.type == MXFP4) return tokens <= MAX_DECODE ? STREAMED : TILED;
    if (!is_coded(m.type)) { /* if all matrices are small, streaming also saves the kernels for norms and activations */
        const size_t size = std::max(m.bytes, a->gpu->largest);
        const int limit = m.bytes > LARGE ? MAX_DECODE : size > 2 * SMALL ? 32 : size > SMALL ? 24 : 64;
        return tokens <= limit ? STREAMED : BLAS;
    }
    /* tiles of 128 rows and 64 tokens fill the card, and the last has more than 16 tokens */
    const bool full = m.tiles() / 8 * ((tokens + 63) / 64) >= a->gpu->sms && (tokens - 1) % 64 >= 16;
    if (tokens > 48 && tokens <= 256 && full) return TILED;
    if (tokens <= MAX_STREAMED) return STREAMED;
    return (size_t)m.rows * m.stride <= a->gpu->decoded_size ? BLAS : TILED; /* the head may not fit in `decoded` */
}
/* A product without jobs. If it is streamed, it also prepares the norm that follows. */
bool multiply(Pass *a, Product p, Error *e) {
    const Way way = way_of(a, p.w);
    if (way != STREAMED) p.norm = NULL;
    if (way != BLAS) {
        CUDA(launch_for_type(a->gpu, p, way == STREAMED ? 8 : 64, 1));
    } else {
        if (is_coded(p.w.type)) {
            CUDA(decode_matrix(a->gpu, p.w));
            p.w.type = BF16, p.w.data = (uint8_t *)a->gpu->decoded;
        }
        if (!multiply_blas(a->gpu, p.w, p.x, p.x_pitch, p.tokens, p.finish == ADD, p.y, p.y_pitch, p.y_type, e))
            return false;
    }
    if (p.finish != ADD) return true;
    a->normed = p.norm;
    a->squares = a->normed ? square_parts(p.w.rows) : 0, a->square = a->w.square;
    return true;
}
/* y (tokens, rows) = W x. */
bool multiply_to(Pass *a, const Matrix &m, const void *x, int pitch, float *y, Error *e) {
    Product p = product_of(a, m, x, pitch);
    p.y = y, p.y_pitch = m.rows;
    return multiply(a, p, e);
}
/* The residual stream += W x. Then comes a norm: `weight` is the norm's, and the matrix `next` reads its result. */
bool multiply_add(Pass *a, const Matrix &m, const void *x, int pitch, const float *weight, const Matrix &next,
                  Error *e) {
    Product p = product_of(a, m, x, pitch);
    p.finish = ADD, p.y = a->w.x, p.y_pitch = a->w.dim;
    if (way_of(a, next) == STREAMED) p.norm = weight;
    p.normed = a->w.normed, p.normed_pitch = a->w.normed_pitch, p.normed_type = type_for(next);
    p.next_square = a->w.square;
    return multiply(a, p, e);
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

/* Plain attention, and its kernels for heads of D dimensions: extensions.cuh lists both beside those of rooms. */
typedef bool Attend(Pass *a, const DeviceLayer &l, Error *e);
typedef cudaError_t LaunchAttention(const Pass *a, const DeviceLayer &l);
Attend attend;
template <int D> cudaError_t launch_attention(const Pass *a, const DeviceLayer &l);

#include "extensions.cuh"

template <int D> cudaError_t launch_attention(const Pass *a, const DeviceLayer &l) {
    typedef AttentionShape<D> Shape;
    const Work &w = a->w;
    cudaError_t error = cudaSuccess;
    if (a->queries) {
        const int pages = l.window ? std::min(a->pages, l.window / PAGE + 2) : a->pages;
        dim3 grid(w.n_kv_heads * head_parts(w.n_heads / w.n_kv_heads), a->queries, splits_of(pages, a->splits));
        error = launch(a->gpu, attention<D>, grid, ATTENTION_WARPS<D> * 32,
                       ATTENTION_WARPS<D> * 8 * (D + 2) * sizeof(float), w, a->s, l, a->alone, a->splits);
    }
    if (error || !a->tiles) return error;
    if constexpr (D == 64 || D == 128)
        if (fast::tile_rows(a)) return fast::attend<D>(a, l);
    return launch(a->gpu, attention_tiled<D>, dim3(w.n_kv_heads, a->tiles), Shape::THREADS, Shape::SHARED, w, a->s, l);
}

/* Attention, from queries, keys and values in w.projected to w.attn. rope_and_store, or attention<D> itself, does norms
 * and RoPE of queries and keys, and fills the cache. */
bool attend(Pass *a, const DeviceLayer &l, Error *e) {
    const Work &w = a->w;
    LaunchAttention *by_tensor_cores = query_type(l) == F32 ? NULL : attention_for(w.head_dim);
    dim3 rope_grid((a->tokens + ROPE_TOKENS - 1) / ROPE_TOKENS, w.n_heads + 2 * w.n_kv_heads);
    if (!by_tensor_cores || !a->alone)
        CUDA(launch(a->gpu, rope_and_store, rope_grid, ROPE_WARPS * 32, 0, w, a->s, l, a->tokens));
    if (by_tensor_cores)
        CUDA(by_tensor_cores(a, l));
    else
        CUDA(launch(a->gpu, attention_any, dim3(a->tokens, w.n_heads), 128, (2 * w.head_dim + 128) * sizeof(float), w,
                    a->s, l));
    return tap_attention(a, l, e);
}

Router router_of(const Pass *a, const DeviceLayer &l) {
    const Work &w = a->w;
    return {w.router, l.choice_bias, w.n_experts, w.top_k, w.route, w.expert, w.weight, w.experts_read};
}
/* Computes the router's logits, and norms x for the experts. Then it chooses each token's experts and makes jobs of at
 * most `job_size` choices of an expert; if `job_size` is 0, the experts' products choose themselves. */
bool route_tokens(Pass *a, const DeviceLayer &l, int job_size, Error *e) {
    Product logits = product_of(a, l.router, NULL, 0);
    logits.y = a->w.router, logits.y_pitch = a->w.n_experts, logits.total = a->w.square_sum;
    if (!multiply(a, logits, e)) return false;
    if (job_size)
        CUDA(launch(a->gpu, route, (a->tokens + ROUTE_WARPS - 1) / ROUTE_WARPS, ROUTE_WARPS * 32,
                    2 * a->w.n_experts * sizeof(int), a->w, router_of(a, l), a->tokens, job_size));
    if (a->squares) a->squares = 1, a->square = a->w.square_sum; /* the router's product added them up */
    /* Experts' products apply norm_factor() only up to MAX_DECODE tokens. */
    if (type_for(l.router) != type_for(l.up) || (a->squares && a->tokens > MAX_DECODE)) a->normed = false;
    return norm_for(a, l.ffn_norm, l.up, e);
}
/* x += w.down, and the norm that follows. */
bool combine_down(Pass *a, int top_k, const float *weights, const float *post, const float *next_norm,
                  const Matrix &next, Error *e) {
    CUDA(launch(a->gpu, combine, a->tokens, row_threads(a->w.dim), 0, a->w, top_k, weights, post, next_norm,
                type_for(next)));
    a->normed = true, a->squares = 0;
    return true;
}
/* x += W y; with `post` W y is normed before it is added. Then the norm that comes next. */
bool add_to_x(Pass *a, const Matrix &m, const void *y, int pitch, const float *post, const float *next_norm,
              const Matrix &next, Error *e) {
    if (!post) return multiply_add(a, m, y, pitch, next_norm, next, e);
    return multiply_to(a, m, y, pitch, a->w.down, e) && combine_down(a, 1, NULL, post, next_norm, next, e);
}

/* A gated layer's activations, to w.act_out: as part of the product, or by a kernel after cuBLAS. */
bool gated(Pass *a, const Matrix &up, const Matrix &down, Error *e) {
    const Work &w = a->w;
    Product p = product_of(a, up, NULL, 0);
    if (way_of(a, up) != BLAS) {
        p.finish = ACTIVATE, p.y = w.act_out, p.y_pitch = w.act_pitch, p.y_type = type_for(down);
        return multiply(a, p, e);
    }
    const bool narrow = type_for(up) == BF16 && !up.bias; /* half the bytes of F32; f16 could overflow */
    const int each = ACTIVATE_EACH * ACTIVATE_THREADS;
    p.y = w.projected, p.y_pitch = up.rows, p.y_type = narrow ? BF16 : F32;
    if (!multiply(a, p, e)) return false;
    CUDA(launch(a->gpu, narrow ? activate<bf16> : activate<float>, dim3((down.cols + each - 1) / each, a->tokens),
                ACTIVATE_THREADS, 0, w, down.cols, type_for(down)));
    return true;
}
/* x += the shared expert, if there is one; w.normed stays. */
bool shared_expert(const Pass *a, const DeviceLayer &l, Error *e) {
    Pass pass = *a;
    return !l.shared_up.rows || (gated(&pass, l.shared_up, l.shared_down, e) &&
                                 multiply_add(&pass, l.shared_down, a->w.act_out, a->w.act_pitch, NULL, l.up, e));
}

/* Gate and up, activation and down of the chosen experts, to w.down. If `job_size` is 0, the products choose them. */
bool multiply_experts(const Pass *a, const DeviceLayer &l, int job_size, Error *e) {
    const Work &w = a->w;
    const bool single = !job_size;
    const int choices = a->tokens * w.top_k,
              jobs = single ? choices : std::min(w.n_experts, choices) + choices / job_size;
    Product up = product_of(a, l.up, NULL, 0), down = product_of(a, l.down, w.act_out, w.act_pitch);
    if (single)
        up.router = down.router = router_of(a, l);
    else
        up.job = down.job = w.job, up.jobs = down.jobs = w.jobs, up.order = down.order = w.order;
    up.divide = w.top_k;
    up.finish = ACTIVATE, up.y = w.act_out, up.y_pitch = w.act_pitch, up.y_type = type_for(l.down);
    down.early = true, down.y = w.down, down.y_pitch = w.dim;
    CUDA(launch_for_type(a->gpu, up, job_size, jobs));
    if (!tap_experts(a, l, e)) return false;
    CUDA(launch_for_type(a->gpu, down, job_size, jobs));
    return true;
}
/* A mixture of experts: choices sorted by expert (with job_size 0 they stay in order), the experts' products, and the
 * weighted sum. */
bool experts(Pass *a, const DeviceLayer &l, const float *next_norm, const Matrix &next, Error *e) {
    const Work &w = a->w;
    const int choices = a->tokens * w.top_k;
    int job_size = fast::job_size(a, l);
    const bool annex = job_size;
    if (!annex && (a->tokens > 1 || w.n_experts > PRODUCT_EXPERTS)) {
        job_size = 8; /* choices of a job at most; with up to about five an expert `product` is faster */
        if (a->tokens > MAX_DECODE && choices > 5 * w.n_experts)
            job_size = choices < 16 * w.n_experts ? 16 : choices <= 32 * w.n_experts ? 32 : 64;
    }
    if (!route_tokens(a, l, job_size, e) || !shared_expert(a, l, e)) return false;
    if (!(annex ? fast::experts(a, l, e) : multiply_experts(a, l, job_size, e))) return false;
    return combine_down(a, w.top_k, w.weight, l.ffn_post_norm, next_norm, next, e);
}

bool feed_forward(Pass *a, const DeviceLayer &l, const float *next_norm, const Matrix &next, Error *e) {
    return gated(a, l.up, l.down, e) && tap_experts(a, l, e) &&
           add_to_x(a, l.down, a->w.act_out, a->w.act_pitch, l.ffn_post_norm, next_norm, next, e);
}

/* A transformer block: x += attention(norm(x)), x += experts(norm(x)). A kernel that adds to x also writes w.normed for
 * the matrix that reads it next, where it can; else norm_for() launches `norm`. With the annex gpt-oss-20b and 120b
 * come here only with more than MAX_DECODE tokens: see fast::decode(). */
bool block(Pass *a, int layer, Error *e) {
    const DeviceModel &device = a->gpu->device;
    const DeviceLayer &l = device.layer[layer];
    const bool end = layer + 1 == a->w.n_layers;
    const float *next_norm = end ? device.norm : device.layer[layer + 1].attn_norm;
    const Matrix &next = end ? device.head : device.layer[layer + 1].qkv, &inner = l.router.rows ? l.router : l.up;
    a->w.layer = layer;
    if (!norm_for(a, l.attn_norm, l.qkv, e) || !multiply_to(a, l.qkv, NULL, 0, a->w.projected, e)) return false;
    if (!attend_for(a->w)(a, l, e)) return false; /* and RoPE */
    if (!add_to_x(a, l.o, a->w.attn, a->w.attn_pitch, l.attn_post_norm, l.ffn_norm, inner, e)) return false;
    if (!tap_x(a, "attn_residual", e) || !norm_for(a, l.ffn_norm, inner, e)) return false;
    return (l.router.rows ? experts : feed_forward)(a, l, next_norm, next, e) && tap_x(a, "residual", e);
}

bool forward(Pass *a, Error *e) {
    const DeviceModel &device = a->gpu->device;
    const DeviceLayer &l = device.layer[0];
    CUDA(launch(a->gpu, embed, a->tokens, row_threads(a->w.dim), 0, a->w, a->s, device.embed, l.attn_norm,
                type_for(l.qkv)));
    a->normed = true, a->squares = 0;
    for (int i = 0; i < a->w.n_layers; i++)
        if (!block(a, i, e)) return false;
    return true;
}

bool head(Pass *a, int first, int n, Error *e) {
    const DeviceModel &device = a->gpu->device;
    Pass rows = *a;
    if (!a->normed || n != a->tokens) { /* the requested rows, side by side */
        CUDA(launch(a->gpu, norm, n, row_threads(a->w.dim), 0, a->w, a->s.row + first, device.norm,
                    type_for(device.head)));
        rows.squares = 0;
    }
    rows.tokens = n, rows.w.layer = a->w.n_layers;
    if (!multiply_to(&rows, device.head, NULL, 0, a->w.logits, e)) return false;
    if (a->w.logit_cap) CUDA(launch(a->gpu, cap_logits, dim3((a->w.vocab + 1023) / 1024, n), 1024, 0, a->w));
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

int tile_tokens(const Pass *a) {
    int rows = fast::tile_rows(a);
    if (!rows) rows = a->w.head_dim == 256 ? AttentionShape<256>::ROWS : AttentionShape<128>::ROWS;
    return std::max(1, rows * a->w.n_kv_heads / a->w.n_heads);
}
