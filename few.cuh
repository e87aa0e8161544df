/* few.cuh: the kernels of a step with at most FEW tokens. Each reads its weights once, in order, and its time is the time to
 * read them: blocks ask for the first of them before the kernel before has ended, and every warp keeps a ring of shared
 * memory full with what comes next, so that no wait for activations leaves the memory idle. */
#ifndef FEW_CUH
#define FEW_CUH

#include "work.cuh"

constexpr int UNITS = 4; /* groups of 8 rows between two reductions of a block */

/* ---- copies that run on their own ---- */

/* A barrier in shared memory through which a warp learns that a copy has arrived. On Hopper the copy engine takes whole
 * rows; before it the lanes copy 16 bytes at a time. */
struct Barrier {
    uint64_t word;
    __device__ unsigned address() { return (unsigned)__cvta_generic_to_shared(&word); }
    __device__ void init() {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(address()));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
        asm volatile("mbarrier.init.shared.b64 [%0],32;" ::"r"(address()));
#endif
    }
    __device__ void wait(unsigned parity) {
        unsigned done = 0;
        while (!done)
#if __CUDA_ARCH__ >= 900
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(done) : "r"(address()), "r"(parity) : "memory");
#else
            asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(done) : "r"(address()), "r"(parity) : "memory");
#endif
    }
    /* Asks for rows of `bytes` (a multiple of 16), `from_pitch` apart, to lie `to_pitch` apart. All lanes of a warp call it. */
    __device__ void copy(uint8_t *to, int to_pitch, const uint8_t *from, size_t from_pitch, int rows, int bytes, int lane) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(address()), "r"(rows * bytes) : "memory");
        __syncwarp();
        if (lane < rows)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                             (unsigned)__cvta_generic_to_shared(to + lane * to_pitch)),
                         "l"(from + lane * from_pitch), "r"(bytes), "r"(address())
                         : "memory");
#else
        for (int i = lane; i < rows * (bytes / 16); i += 32) {
            int row = i / (bytes / 16), at = i % (bytes / 16) * 16;
            copy_16(to + row * to_pitch + at, from + row * from_pitch + at);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
#endif
    }
};

/* ---- how weights are encoded: each type is a row of this table ---- */

/* A chunk is GROUP rows by K columns; a stage of shared memory holds up to `per` chunks that lie side by side. Activations
 * lie in shared memory too, times LIFT, a row a token, `pitch` apart. A Sum collects W x for 8 rows and up to 16 tokens, those
 * whose bits are set. Lane 4g + t works on row g. */
template <Type T> struct Codec;

struct SumOfTiles { /* as mma leaves it: tokens g and g + 8, rows 2t and 2t + 1 */
    float c[4] = {};
    __device__ void add_weighted(const SumOfTiles &s, const float *weight, int lane) { /* weight (FEW) */
        for (int i = 0; i < 4; i++) c[i] += weight[lane / 4 + i / 2 * 8] * s.c[i];
    }
    __device__ void store(float *out, int tokens, int lane) const { /* out (GROUP, tokens) */
        int g = lane / 4, row = lane % 4 * 2;
        for (int i = 0; i < 4; i++)
            if (g + i / 2 * 8 < tokens) out[(row + i % 2) * tokens + g + i / 2 * 8] = c[i];
    }
};

/* Eight neighbouring activations of tokens g and g + 8, for mma_eight. */
__device__ inline void load_rows(const bf16 *x, int pitch, unsigned tokens, int column, int lane, uint4 &low, uint4 &high) {
    const uint4 zero = {};
    int g = lane / 4;
    const bf16 *at = x + g * pitch + column;
    low = tokens >> g & 1 ? *(const uint4 *)at : zero;
    high = tokens >> (g + 8) & 1 ? *(const uint4 *)(at + 8 * pitch) : zero;
}

/* Bytes between rows in a stage: odd and even rows begin half the banks apart. */
__host__ __device__ constexpr int bank_pitch(int bytes) { return bytes + (bytes % 128 ? 0 : 64); }

template <> struct Codec<BF16> { /* lane: columns 8t .. 8t + 7 */
    static constexpr int K = 32, MOST = 6, WIDTH = K * 2; /* WIDTH: bytes of a chunk's row */
    static constexpr float LIFT = 1;
    typedef bf16 Activation;
    typedef SumOfTiles Sum;
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride * 2; }
    __host__ __device__ static constexpr int stage_bytes(int per) { return GROUP * bank_pitch(per * WIDTH); }
    __device__ static void copy(Barrier *full, uint8_t *stage, int per, const uint8_t *group, int stride, int first, int n, int lane) {
        full->copy(stage, bank_pitch(per * WIDTH), group + first * WIDTH, row_bytes(stride), GROUP, n * WIDTH, lane);
    }
    __device__ static void add(Sum &sum, const uint8_t *stage, int per, int i, const bf16 *x, int pitch, unsigned tokens, int lane) {
        uint4 low, high;
        load_rows(x + i * K, pitch, tokens, lane % 4 * 8, lane, low, high);
        mma_eight(sum.c, low, high, *(const uint4 *)(stage + lane / 4 * bank_pitch(per * WIDTH) + i * WIDTH + lane % 4 * 16));
    }
};

/* MXFP4: 8 rows by 64 columns in 272 bytes. Lane 4g + t has row g, columns 8t .. 8t + 7 of either block of 32, in a word
 * each; behind these 256 bytes lie the scales of rows 2t and 2t + 1 in both blocks, four bytes for each t. A word becomes
 * bf16 times 2^-126 by shifts and masks (fp4_to_bf16); the activations are lifted by 2^100, exactly, and the block's scale,
 * stored as the exponent of a float with 26 added, does the rest. */
__device__ inline float fp4_scale(uint32_t scales, int i) { return __uint_as_float((scales >> 8 * i & 255) << 23); }

template <> struct Codec<MXFP4> {
    static constexpr int K = FP4_COLUMNS, MOST = 6;
    static constexpr float LIFT = 0x1p100f;
    typedef bf16 Activation;
    typedef SumOfTiles Sum;
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride / K * FP4_BYTES / GROUP; }
    __host__ __device__ static constexpr int stage_bytes(int per) { return per * FP4_BYTES; }
    __device__ static void copy(Barrier *full, uint8_t *stage, int, const uint8_t *group, int, int first, int n, int lane) {
        full->copy(stage, 0, group + (size_t)first * FP4_BYTES, 0, 1, n * FP4_BYTES, lane);
    }
    __device__ static void add(Sum &sum, const uint8_t *stage, int, int i, const bf16 *x, int pitch, unsigned tokens, int lane) {
        uint2 words = *(const uint2 *)(stage + i * FP4_BYTES + lane * 8);
        uint32_t scales = *(const uint32_t *)(stage + i * FP4_BYTES + 256 + lane % 4 * 4);
        for (int half = 0; half < 2; half++) {
            uint4 low, high;
            float c[4] = {};
            load_rows(x + i * K, pitch, tokens, half * 32 + lane % 4 * 8, lane, low, high);
            mma_eight(c, low, high, fp4_to_bf16(half ? words.y : words.x));
            for (int j = 0; j < 4; j++) sum.c[j] += fp4_scale(scales, half * 2 + j % 2) * c[j];
        }
    }
};

struct SumOfFloats { /* lane 4g + t: row g, its own columns only */
    float c[FEW] = {};
    __device__ void add_weighted(const SumOfFloats &s, const float *weight, int) {
        for (int j = 0; j < FEW; j++) c[j] += weight[j] * s.c[j];
    }
    __device__ void store(float *out, int tokens, int lane) const {
        for (int j = 0; j < FEW; j++) {
            float sum = c[j];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0 && j < tokens) out[lane / 4 * tokens + j] = sum;
        }
    }
};

template <> struct Codec<F32> { /* lane: columns 4t .. 4t + 3 of either half */
    static constexpr int K = 32, MOST = 4, WIDTH = K * 4;
    static constexpr float LIFT = 1;
    typedef float Activation;
    typedef SumOfFloats Sum;
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride * 4; }
    __host__ __device__ static constexpr int stage_bytes(int per) { return GROUP * bank_pitch(per * WIDTH); }
    __device__ static void copy(Barrier *full, uint8_t *stage, int per, const uint8_t *group, int stride, int first, int n, int lane) {
        full->copy(stage, bank_pitch(per * WIDTH), group + first * WIDTH, row_bytes(stride), GROUP, n * WIDTH, lane);
    }
    __device__ static void add(Sum &sum, const uint8_t *stage, int per, int i, const float *x, int pitch, unsigned tokens, int lane) {
        for (int half = 0; half < 2; half++) {
            int column = half * 16 + lane % 4 * 4;
            float4 b = *(const float4 *)(stage + lane / 4 * bank_pitch(per * WIDTH) + i * WIDTH + column * 4);
#pragma unroll
            for (int j = 0; j < FEW; j++) {
                if (!(tokens >> j & 1)) continue;
                float4 a = *(const float4 *)(x + j * pitch + i * K + column);
                sum.c[j] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
        }
    }
};

/* ---- streaming weights through a block ---- */

struct Slices { /* how a row's chunks are dealt to the warps of a block: `per` at a time, `parts` times; stages of a ring */
    int chunks, per, parts, stages;
};

/* One warp's way through the weights of its block, item by item: an item is its slice (and part) of the columns of 8 rows.
 * The ring holds the next ones. */
template <Type T> struct Ring {
    typedef Codec<T> C;
    Slices k;
    int stride, warp, warps, lane, ask_at = 0, take_at = 0;
    unsigned parity = 0;
    uint8_t *stage; /* (stages) of this warp */
    Barrier *full;  /* (stages) */

    static __host__ __device__ size_t bytes(const Slices &k, int warps) { /* in whole lines, for what lies behind */
        return ((size_t)warps * k.stages * (C::stage_bytes(k.per) + sizeof(Barrier)) + 127) / 128 * 128;
    }
    __device__ Ring(const Matrix &m, const Slices &k, uint8_t *memory)
        : k(k), stride(m.stride), warp(threadIdx.x / 32), warps(blockDim.x / 32), lane(threadIdx.x % 32),
          stage(memory + (size_t)warp * k.stages * C::stage_bytes(k.per)),
          full((Barrier *)(memory + (size_t)warps * k.stages * C::stage_bytes(k.per)) + warp * k.stages) {
        if (lane < k.stages) full[lane].init();
        __syncwarp();
    }
    __device__ int first_chunk(int part) const { return (part * warps + warp) * k.per; }
    __device__ int chunks(int part) const { return min(k.per, k.chunks - first_chunk(part)); } /* none: not above 0 */
    __device__ void ask(const uint8_t *group, int part) {
        int n = chunks(part);
        if (n <= 0) return;
        C::copy(full + ask_at, stage + ask_at * C::stage_bytes(k.per), k.per, group, stride, first_chunk(part), n, lane);
        if (++ask_at == k.stages) ask_at = 0;
    }
    /* Multiplies the oldest item by activations, of which x is the first column of the slice. */
    __device__ void take(typename C::Sum &sum, int part, const typename C::Activation *x, int pitch, unsigned tokens) {
        int n = chunks(part);
        if (n <= 0) return;
        const uint8_t *from = stage + take_at * C::stage_bytes(k.per);
        full[take_at].wait(parity);
#pragma unroll
        for (int i = 0; i < C::MOST; i++)
            if (i < n) C::add(sum, from, k.per, i, x, pitch, tokens, lane);
        __syncwarp();
        if (++take_at == k.stages) take_at = 0, parity ^= 1;
    }
};

/* Adds what the warps of a block found for `units` groups of rows and hands it out in pairs of rows. `partial` is
 * (warps, UNITS, GROUP, tokens). */
template <class Pair> __device__ void reduce(const float *partial, int units, int tokens, Pair pair) {
    int warps = blockDim.x / 32;
    __syncthreads();
    for (int i = threadIdx.x; i < units * (GROUP / 2) * tokens; i += blockDim.x) {
        int token = i % tokens, p = i / tokens % (GROUP / 2), unit = i / tokens / (GROUP / 2);
        const float *at = partial + (unit * GROUP + 2 * p) * tokens + token;
        float a = 0, b = 0;
#pragma unroll 4
        for (int w = 0; w < warps; w++, at += UNITS * GROUP * tokens) {
            a += at[0];
            b += at[tokens];
        }
        pair(unit, p, token, a, b);
    }
    __syncthreads();
}

/* The units (groups of 8 rows) of a block, of `units` in all: every gridDim.x-th. */
__device__ inline int units_of_block(int units) { return (units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x; }
__device__ inline int unit_of_block(int i) { return blockIdx.x + i * gridDim.x; }
/* Rows of a block's units; row i of them is this row of the matrix. */
__device__ inline int row_of_block(int i) { return unit_of_block(i / GROUP) * GROUP + i % GROUP; }

/* Asks for the first items of a block's units; locate(unit) is where the weights of its unit lie. */
template <Type T, class Locate> __device__ void begin_rows(Ring<T> &ring, int units, Locate locate) {
    for (int i = 0; i < min(ring.k.stages, units * ring.k.parts); i++) ring.ask(locate(i / ring.k.parts), i % ring.k.parts);
}

/* All units of a block, in passes of UNITS: multiply, add up, pair(unit, pair, token, a, b). */
template <Type T, class Locate, class Pair>
__device__ void stream_rows(Ring<T> &ring, int units, const typename Codec<T>::Activation *x, int pitch, int tokens, float *partial, Locate locate, Pair pair) {
    int parts = ring.k.parts, ahead = ring.k.stages;
    for (int first = 0; first < units; first += UNITS) {
        int n = min(UNITS, units - first);
        for (int u = 0; u < n; u++) {
            typename Codec<T>::Sum sum;
            for (int part = 0; part < parts; part++) {
                ring.take(sum, part, x + ring.first_chunk(part) * Codec<T>::K, pitch, (1u << tokens) - 1);
                int next = (first + u) * parts + part + ahead;
                if (next < units * parts) ring.ask(locate(next / parts), next % parts);
            }
            sum.store(partial + (ring.warp * UNITS + u) * GROUP * tokens, tokens, ring.lane);
        }
        reduce(partial, n, tokens, [&](int unit, int p, int token, float a, float b) { pair(first + unit, p, token, a, b); });
    }
}

/* Elements between rows of activations in shared memory. */
template <Type T> __host__ __device__ constexpr int pitch_of(int stride) {
    int size = sizeof(typename Codec<T>::Activation);
    return bank_pitch(stride * size) / size;
}

/* Puts RMSNorm(x) * weight of some rows of x (rows, dim) into shared memory; scale_of, if given, receives
 * 1 / sqrt(mean + eps) of each. */
template <Type T>
__device__ void stage_normed(typename Codec<T>::Activation *out, int stride, const float *x, const int *row, int rows, const float *weight, int dim,
                             float eps, float *scale_of, float *scratch) {
    constexpr int HELD = 12; /* values a thread keeps; more are read again */
    int pitch = pitch_of<T>(stride);
    for (int r = 0; r < rows; r++) {
        const float *from = x + (size_t)(row ? row[r] : r) * dim;
        float held[HELD], sum = 0;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int at = threadIdx.x + i * blockDim.x;
            held[i] = at < dim ? __ldcg(from + at) : 0;
            sum += held[i] * held[i];
        }
        for (int at = threadIdx.x + HELD * blockDim.x; at < dim; at += blockDim.x) sum += __ldcg(from + at) * __ldcg(from + at);
        float scale = rsqrtf(block_sum(sum, scratch) / dim + eps);
        if (scale_of && threadIdx.x == 0) scale_of[r] = scale;
        scale *= Codec<T>::LIFT;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int at = threadIdx.x + i * blockDim.x;
            if (at < stride) out[r * pitch + at] = at < dim ? held[i] * scale * weight[at] : 0.f;
        }
        for (int at = threadIdx.x + HELD * blockDim.x; at < stride; at += blockDim.x)
            out[r * pitch + at] = at < dim ? __ldcg(from + at) * scale * weight[at] : 0.f;
    }
    __syncthreads();
}

/* Shared memory of the ..._few kernels, dealt out from the front. */
struct Memory {
    uint8_t *at;
    template <typename U> __device__ U *take(int n) {
        U *p = (U *)at;
        at += (n * sizeof(U) + 15) / 16 * 16;
        return p;
    }
};

/* ---- the kernels, in the order of a layer ---- */

/* x = the token's row of the embedding; a token of -1 is what its slot drew last. The page remembers it. A block a token. */
__global__ void embed(Work w, Step s, Matrix table) {
    wait_previous();
    int t = blockIdx.x, seq = s.seq[t], id = s.token[t], p = s.position[t];
    if (id < 0) id = max(w.drawn[s.slot[seq]], 0); /* after a NaN the step is void */
    if (threadIdx.x == 0) w.page_token[(size_t)page_of(s, seq, p) * PAGE + p % PAGE] = id;
    for (int i = threadIdx.x; i < w.dim; i += blockDim.x) {
        size_t at = (size_t)id * table.stride + i;
        w.x[(size_t)t * w.dim + i] = table.type == F32 ? ((const float *)table.data)[at] : (float)((const bf16 *)table.data)[at];
    }
    for (int i = threadIdx.x; i < w.n_layers * w.n_experts && t < FEW; i += blockDim.x)
        w.router_sum[((size_t)(i / w.n_experts) * FEW + t) * w.n_experts + i % w.n_experts] = 0;
}

/* q, k, v = W RMSNorm(x) + bias; RoPE; k and v to the cache. */
template <Type T> __global__ void __launch_bounds__(320, 2) qkv_few(Work w, Step s, Block l, Slices slices, int tokens) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef typename Codec<T>::Activation Activation;
    const Matrix &m = l.qkv;
    int warps = blockDim.x / 32, units = units_of_block(m.rows / GROUP), half = w.head_dim / 2, pitch = pitch_of<T>(m.stride);
    Ring<T> ring(m, slices, memory);
    auto locate = [&](int i) { return m.data + (size_t)unit_of_block(i) * GROUP * Codec<T>::row_bytes(m.stride); };
    launch_next();
    begin_rows<T>(ring, units, locate);
    Memory from = {memory + Ring<T>::bytes(slices, warps)};
    Activation *x = from.take<Activation>(tokens * pitch);
    float *partial = from.take<float>(warps * UNITS * GROUP * tokens), *scratch = from.take<float>(33), *bias = from.take<float>(units * GROUP);
    float2 *turn = from.take<float2>(tokens * half);
    int *position = from.take<int>(tokens), *page = from.take<int>(tokens);
    for (int i = threadIdx.x; i < units * GROUP; i += blockDim.x) bias[i] = m.bias ? m.bias[row_of_block(i)] : 0;
    for (int i = threadIdx.x; i < tokens * half; i += blockDim.x) turn[i] = w.turn[(size_t)s.position[i / half] * half + i % half];
    for (int i = threadIdx.x; i < tokens; i += blockDim.x) position[i] = s.position[i], page[i] = page_of(s, s.seq[i], s.position[i]);
    wait_previous();
    stage_normed<T>(x, m.stride, w.x, NULL, tokens, l.attn_norm, w.dim, w.eps, NULL, scratch);
    stream_rows<T>(ring, units, x, pitch, tokens, partial, locate, [&](int unit, int p, int t, float a, float b) {
        int i = unit * GROUP + 2 * p, r = row_of_block(i);
        store_qkv<Activation>(w, t, position[t], page[t], r, a + bias[i], b + bias[i + 1], turn[t * half + r / 2 % half]);
    });
}

/* Attention of one token and one key/value head (blockIdx.z, y): the pages that it sees are dealt to at most SPLITS blocks
 * and there to the warps; the block that arrives last adds what the others found, in their order, and the sinks. How
 * the pages are dealt depends on the token's position alone. */
template <int D> __global__ void __launch_bounds__(256) attention_few(Work w, Step s, Block l) {
    constexpr int WARPS = 8, ROW = D + 2;
    __shared__ float merged[WARPS][8][ROW]; /* most, total, sum of each head */
    __shared__ bool is_last;
    int t = blockIdx.z, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, group = w.n_heads / w.n_kv_heads;
    launch_next();
    wait_previous();
    int p = s.position[t], seq = s.seq[t], first = l.window && p >= l.window ? p - l.window + 1 : 0;
    int page0 = first / PAGE, pages = p / PAGE - page0 + 1, used = min((int)gridDim.x, (pages + WARPS - 1) / WARPS);
    if ((int)blockIdx.x >= used) return;
    Attend<D> a;
    uint4 q[D / 32][2];
    for (int c = 0; c < D / 32; c++) {
        q[c][1] = make_uint4(0, 0, 0, 0);
        const bf16 *from = (const bf16 *)w.q + ((size_t)t * w.n_heads + head * group + g) * D + c * 32 + lane % 4 * 8;
        q[c][0] = g < group ? __ldcg((const uint4 *)from) : q[c][1];
    }
    int firsts[2] = {first, first}, lasts[2] = {p, p};
    float scale = LOG2E * rsqrtf(D);
    for (int i = page0 + pages * (int)blockIdx.x / used + warp; i < page0 + pages * ((int)blockIdx.x + 1) / used; i += WARPS) {
        int page = s.page[(size_t)seq * s.header[0] + i];
        a.page(cache_of(w, page, 0, head), cache_of(w, page, 1, head), q, i * PAGE, firsts, lasts, p, scale, lane);
    }
    a.total[0] += __shfl_xor_sync(~0u, a.total[0], 1);
    a.total[0] += __shfl_xor_sync(~0u, a.total[0], 2);
    merged[warp][g][0] = a.most[0];
    merged[warp][g][1] = a.total[0];
    for (int i = 0; i < D / 8; i++)
        for (int j = 0; j < 2; j++) merged[warp][g][2 + i * 8 + lane % 4 * 2 + j] = a.sum[i][j];
    __syncthreads();
    float *partial = w.partial + ((size_t)t * w.n_kv_heads + head) * SPLITS * 8 * ROW;
    bool alone = used == 1;
    auto merge = [&](const float *from, int step, int n, int h, int i, float sink, float &most, float &total) { /* of n states */
        float sum = 0;
        most = sink;
        total = 0;
        for (int k = 0; k < n; k++)
            if (from[k * step + h * ROW + 1] > 0) most = fmaxf(most, from[k * step + h * ROW]);
        for (int k = 0; k < n; k++) {
            float share = from[k * step + h * ROW + 1] > 0 ? exp2f(from[k * step + h * ROW] - most) : 0;
            total += share * from[k * step + h * ROW + 1];
            sum += share * from[k * step + h * ROW + 2 + i];
        }
        return sum;
    };
    auto finish = [&](const float *from, int step, int n) {
        for (int i = threadIdx.x; i < group * D; i += blockDim.x) {
            int h = i / D;
            float most, total, sink = l.sinks ? l.sinks[head * group + h] * LOG2E : -INFINITY;
            float sum = merge(from, step, n, h, i % D, sink, most, total);
            if (l.sinks) total += exp2f(sink - most);
            ((bf16 *)w.attn)[(size_t)t * w.attn_pitch + (head * group + h) * D + i % D] = (bf16)(sum / total);
        }
    };
    if (alone) {
        finish(&merged[0][0][0], 8 * ROW, WARPS);
        return;
    }
    for (int i = threadIdx.x; i < group * D; i += blockDim.x) {
        int h = i / D;
        float most, total, sum = merge(&merged[0][0][0], 8 * ROW, WARPS, h, i % D, -INFINITY, most, total);
        float *to = partial + ((size_t)blockIdx.x * 8 + h) * ROW;
        to[2 + i % D] = sum;
        if (i % D == 0) to[0] = most, to[1] = total;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&w.arrived[t * w.n_kv_heads + head], 1) == used - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) w.arrived[t * w.n_kv_heads + head] = 0;
    finish(partial, 8 * ROW, used);
}

/* x += W attn + bias; and, since the router's logits are linear in x but for the norm's common factor, each block adds what
 * its rows of x contribute to them. */
template <Type T> __global__ void __launch_bounds__(320, 2) o_few(Work w, Block l, Slices slices, int tokens) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef typename Codec<T>::Activation Activation;
    const Matrix &m = l.o;
    int warps = blockDim.x / 32, units = units_of_block((w.dim + GROUP - 1) / GROUP), rows = units * GROUP, pitch = pitch_of<T>(m.stride);
    int experts = l.router.rows ? w.n_experts : 0, each = 16 / sizeof(Activation), chunks = m.stride / each;
    Ring<T> ring(m, slices, memory);
    auto locate = [&](int i) { return m.data + (size_t)unit_of_block(i) * GROUP * Codec<T>::row_bytes(m.stride); };
    launch_next();
    begin_rows<T>(ring, units, locate);
    Memory from = {memory + Ring<T>::bytes(slices, warps)};
    Activation *x = from.take<Activation>(tokens * pitch);
    float *partial = from.take<float>(warps * UNITS * GROUP * tokens), *own = from.take<float>(rows * tokens), *columns = from.take<float>(rows * experts);
    for (int i = threadIdx.x; i < rows * experts; i += blockDim.x) {
        int r = row_of_block(i / experts);
        columns[i] = r < w.dim ? l.router_columns[(size_t)r * experts + i % experts] : 0;
    }
    wait_previous();
    for (int i = threadIdx.x; i < tokens * chunks; i += blockDim.x)
        copy_16(x + i / chunks * pitch + i % chunks * each, (const Activation *)w.attn + (size_t)(i / chunks) * w.attn_pitch + i % chunks * each);
    copies_end();
    for (int i = threadIdx.x; i < rows * tokens; i += blockDim.x) {
        int r = row_of_block(i / tokens);
        own[i] = r < w.dim ? __ldcg(w.x + (size_t)(i % tokens) * w.dim + r) + (m.bias ? m.bias[r] : 0) : 0;
    }
    copies_done<0>();
    __syncthreads();
    stream_rows<T>(ring, units, x, pitch, tokens, partial, locate, [&](int unit, int p, int t, float a, float b) {
        for (int i = 0; i < 2; i++) {
            int at = unit * GROUP + 2 * p + i, r = row_of_block(at);
            own[at * tokens + t] += i ? b : a;
            if (r < w.dim) w.x[(size_t)t * w.dim + r] = own[at * tokens + t];
        }
    });
    for (int i = threadIdx.x / 8; i < tokens * experts; i += blockDim.x / 8) { /* eight lanes for a token and an expert */
        int t = i / experts, e = i % experts;
        float sum = 0;
        for (int r = threadIdx.x % 8; r < rows; r += 8) sum += r < rows && row_of_block(r) < w.dim ? own[r * tokens + t] * columns[r * experts + e] : 0;
        for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
        long long steps = __float2ll_rn(sum * (1 / ROUTER_STEP));
        if (threadIdx.x % 8 == 0) atomicAdd((unsigned long long *)&w.router_sum[((size_t)w.layer * FEW + t) * experts + e], (unsigned long long)steps);
    }
}

/* The experts that any token chose, in ascending order, with each token's weight for them (0: not chosen), which of its
 * choices it was, and the set of these tokens. In shared memory; filled by one warp. */
struct Active {
    int *n, *expert;  /* [0]; (n) */
    unsigned *tokens; /* (n) */
    float *weight;    /* (n, FEW) */
    int *choice;      /* (n, FEW) */

    __device__ Active(float *memory, int most)
        : n((int *)memory), expert(n + 4), tokens((unsigned *)(expert + most)), weight((float *)(tokens + most)), choice((int *)(weight + most * FEW)) {}
    static __host__ __device__ int most(int n_experts, int top_k, int tokens) { return min(n_experts, top_k * tokens); }
    static __host__ __device__ int floats(int most) { return 4 + most * (2 + 2 * FEW); }
    __device__ void fill(int n_experts, int top_k, const int *experts, const float *weights, int all, int lane) { /* (all, top_k) */
        int places = 0, pairs = all * top_k;
        for (int base = 0; base < n_experts; base += 32) {
            bool chosen = false;
            for (int i = 0; i < pairs; i++) chosen |= experts[i] == base + lane;
            unsigned some = __ballot_sync(~0u, chosen);
            if (chosen) expert[places + __popc(some & ((1u << lane) - 1))] = base + lane;
            places += __popc(some);
        }
        for (int i = lane; i < places * FEW; i += 32) weight[i] = 0;
        for (int i = lane; i < places; i += 32) tokens[i] = 0;
        __syncwarp();
        for (int i = lane; i < pairs; i += 32) {
            int place = 0;
            while (expert[place] != experts[i]) place++;
            weight[place * FEW + i / top_k] = weights[i];
            choice[place * FEW + i / top_k] = i % top_k;
            atomicOr(&tokens[place], 1u << i / top_k);
        }
        if (lane == 0) *n = places;
    }
};

/* Router, top-k and the activations of the chosen experts (dense: of the one there is). Every block finds the choices for
 * itself from what o_few has added up; the first writes them down for down_few. */
template <Type T> __global__ void __launch_bounds__(320, 2) up_few(Work w, Block l, Slices slices, int tokens) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef typename Codec<T>::Activation Activation;
    const Matrix &m = l.up;
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, most = Active::most(w.n_experts, w.top_k, tokens);
    int groups = m.rows / GROUP, pitch = pitch_of<T>(m.stride);
    Ring<T> ring(m, slices, memory);
    Memory from = {memory + Ring<T>::bytes(slices, warps)};
    Activation *x = from.take<Activation>(tokens * pitch);
    float *partial = from.take<float>(warps * UNITS * GROUP * tokens), *scratch = from.take<float>(33), *scale = from.take<float>(FEW);
    float *logit = from.take<float>(tokens * w.n_experts), *weights = from.take<float>(tokens * w.top_k);
    int *experts = from.take<int>(tokens * w.top_k);
    Active active(from.take<float>(Active::floats(most)), most);
    float *bias = from.take<float>(units_of_block(most * groups) * GROUP);
    launch_next();
    wait_previous();
    stage_normed<T>(x, m.stride, w.x, NULL, tokens, l.ffn_norm, w.dim, w.eps, scale, scratch);
    for (int i = threadIdx.x; i < tokens * w.n_experts && l.router.rows; i += blockDim.x) {
        int t = i / w.n_experts, e = i % w.n_experts;
        long long sum = __ldcg(&w.router_sum[((size_t)w.layer * FEW + t) * w.n_experts + e]);
        logit[i] = (float)sum * (scale[t] * ROUTER_STEP) + (l.router.bias ? l.router.bias[e] : 0);
    }
    __syncthreads();
    for (int t = warp; t < tokens; t += warps) {
        int expert = 0;
        float weight = 1;
        if (l.router.rows) route(logit + t * w.n_experts, w.n_experts, w.top_k, lane, expert, weight);
        if (lane >= w.top_k) continue;
        experts[t * w.top_k + lane] = expert;
        weights[t * w.top_k + lane] = weight;
        if (blockIdx.x == 0) w.expert[t * w.top_k + lane] = expert, w.weight[t * w.top_k + lane] = weight;
    }
    __syncthreads();
    if (warp == 0) active.fill(w.n_experts, w.top_k, experts, weights, tokens, lane);
    __syncthreads();
    auto expert_of = [&](int unit) { return active.expert[unit_of_block(unit) / groups]; };
    auto row_in_expert = [&](int unit) { return unit_of_block(unit) % groups * GROUP; };
    auto locate = [&](int i) { return m.data + (size_t)expert_of(i) * m.bytes + (size_t)row_in_expert(i) * Codec<T>::row_bytes(m.stride); };
    int units = units_of_block(*active.n * groups);
    begin_rows<T>(ring, units, locate);
    for (int i = threadIdx.x; i < units * GROUP; i += blockDim.x)
        bias[i] = m.bias ? m.bias[(size_t)expert_of(i / GROUP) * m.rows + row_in_expert(i / GROUP) + i % GROUP] : 0;
    stream_rows<T>(ring, units, x, pitch, tokens, partial, locate, [&](int unit, int p, int t, float gate, float up) {
        int place = unit_of_block(unit) / groups, i = unit * GROUP + 2 * p, at = (row_in_expert(unit) + 2 * p) / 2;
        if (!(active.tokens[place] >> t & 1) || at >= w.ffn_dim) return;
        size_t choice = (size_t)t * w.top_k + active.choice[place * FEW + t];
        ((Activation *)w.act_out)[choice * w.act_pitch + at] = (Activation)(swiglu(w, gate + bias[i], up + bias[i + 1]) * w.act_lift);
    });
}

/* x += the weighted sum of the chosen experts' W act + bias. A block owns its rows of x, so it reads these rows of every
 * active expert; each warp copies its own columns of the activations, the next expert's while it multiplies. */
template <Type T> __global__ void __launch_bounds__(320, 2) down_few(Work w, Block l, Slices slices, int tokens) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef Codec<T> C;
    typedef typename C::Activation Activation;
    const Matrix &m = l.down;
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, most = Active::most(w.n_experts, w.top_k, tokens);
    int units = units_of_block((w.dim + GROUP - 1) / GROUP), rows = units * GROUP, buffers = tokens > 8 ? 1 : 2, width = slices.per * C::K;
    int pitch = pitch_of<T>(width), each = 16 / sizeof(Activation);
    Ring<T> ring(m, slices, memory);
    Memory from = {memory + Ring<T>::bytes(slices, warps)};
    Activation *x = from.take<Activation>(warps * buffers * tokens * pitch) + warp * buffers * tokens * pitch; /* of this warp */
    float *partial = from.take<float>(warps * UNITS * GROUP * tokens), *own = from.take<float>(rows * tokens), *weights = from.take<float>(tokens * w.top_k);
    int *experts = from.take<int>(tokens * w.top_k);
    Active active(from.take<float>(Active::floats(most)), most);
    launch_next();
    wait_previous();
    for (int i = threadIdx.x; i < tokens * w.top_k; i += blockDim.x) experts[i] = __ldcg(w.expert + i), weights[i] = __ldcg(w.weight + i);
    __syncthreads();
    if (warp == 0) active.fill(w.n_experts, w.top_k, experts, weights, tokens, lane);
    __syncthreads();
    int slices_all = *active.n * slices.parts; /* a slice: an expert's part of the columns */
    auto locate = [&](int place, int unit) { return m.data + (size_t)active.expert[place] * m.bytes + (size_t)unit_of_block(unit) * GROUP * C::row_bytes(m.stride); };
    auto copy = [&](int slice) {
        int place = slice / slices.parts, at = ring.first_chunk(slice % slices.parts) * C::K, have = min(width, w.act_pitch - at);
        for (int t = 0; t < tokens && slice < slices_all; t++) {
            if (!(active.tokens[place] >> t & 1)) continue;
            const Activation *act = (const Activation *)w.act_out + ((size_t)t * w.top_k + active.choice[place * FEW + t]) * w.act_pitch + at;
            for (int i = lane * each; i < have; i += 32 * each) copy_16(x + (slice % buffers * tokens + t) * pitch + i, act + i);
        }
        copies_end();
    };
    for (int first = 0; first < units; first += UNITS) {
        int n = min(UNITS, units - first);
        auto ask = [&](int item) { /* items of a pass: expert by expert, part by part, unit by unit */
            if (item < slices_all * n) ring.ask(locate(item / n / slices.parts, first + item % n), item / n % slices.parts);
        };
        for (int i = 0; i < slices.stages; i++) ask(i);
        if (buffers > 1) copy(0);
        if (!first)
            for (int i = threadIdx.x; i < rows * tokens; i += blockDim.x) {
                int r = row_of_block(i / tokens), t = i % tokens;
                float sum = r < w.dim ? __ldcg(w.x + (size_t)t * w.dim + r) : 0;
                for (int place = 0; place < *active.n && m.bias && r < w.dim; place++)
                    sum += active.weight[place * FEW + t] * m.bias[(size_t)active.expert[place] * w.dim + r];
                own[i] = sum;
            }
        typename C::Sum sum[UNITS];
        for (int slice = 0; slice < slices_all; slice++) {
            int place = slice / slices.parts, part = slice % slices.parts;
            copy(buffers > 1 ? slice + 1 : slice);
            if (buffers > 1)
                copies_done<1>();
            else
                copies_done<0>();
            __syncwarp();
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (u >= n) break;
                typename C::Sum one;
                ring.take(one, part, x + slice % buffers * tokens * pitch, pitch, active.tokens[place]);
                ask(slice * n + u + slices.stages);
                sum[u].add_weighted(one, active.weight + place * FEW, lane);
            }
            __syncwarp();
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (u < n) sum[u].store(partial + (warp * UNITS + u) * GROUP * tokens, tokens, lane);
        reduce(partial, n, tokens, [&](int unit, int p, int t, float a, float b) {
            for (int i = 0; i < 2; i++) {
                int at = (first + unit) * GROUP + 2 * p + i, r = row_of_block(at);
                if (r < w.dim) w.x[(size_t)t * w.dim + r] = own[at * tokens + t] + (i ? b : a);
            }
        });
    }
}

/* ---- from x to a token ---- */

/* Logits of the rows that are wanted, (rows, vocab). */
template <Type T> __global__ void __launch_bounds__(320, 2) head_few(Work w, Step s, Matrix m, const float *norm, Slices slices, int rows) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef typename Codec<T>::Activation Activation;
    int warps = blockDim.x / 32, units = units_of_block((w.vocab + GROUP - 1) / GROUP), pitch = pitch_of<T>(m.stride);
    Ring<T> ring(m, slices, memory);
    auto locate = [&](int i) { return m.data + (size_t)unit_of_block(i) * GROUP * Codec<T>::row_bytes(m.stride); };
    launch_next();
    begin_rows<T>(ring, units, locate);
    Memory from = {memory + Ring<T>::bytes(slices, warps)};
    Activation *x = from.take<Activation>(rows * pitch);
    float *partial = from.take<float>(warps * UNITS * GROUP * rows), *scratch = from.take<float>(33);
    wait_previous();
    stage_normed<T>(x, m.stride, w.x, s.row, rows, norm, w.dim, w.eps, NULL, scratch);
    stream_rows<T>(ring, units, x, pitch, rows, partial, locate, [&](int unit, int p, int row, float a, float b) {
        int id = unit_of_block(unit) * GROUP + 2 * p;
        float *logit = w.logits + (size_t)row * w.vocab + id;
        if (id < w.vocab) logit[0] = a;
        if (id + 1 < w.vocab) logit[1] = b;
    });
}

/* Marks the tokens of each row's sequence that has a repetition penalty. A block a row. */
__global__ void mark_seen(Work w, Step s) {
    wait_previous();
    int row = blockIdx.x, seq = s.seq[s.row[row]], words = (w.vocab + 31) / 32;
    if (s.how[seq].penalty == 1) return;
    for (int i = threadIdx.x; i < words; i += blockDim.x) w.seen[(size_t)row * words + i] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p <= s.position[s.row[row]]; p += blockDim.x) {
        int id = w.page_token[(size_t)page_of(s, seq, p) * PAGE + p % PAGE];
        atomicOr(&w.seen[(size_t)row * words + id / 32], 1u << id % 32);
    }
}

/* The logit of a token after penalty and temperature. */
__device__ inline float scaled(const Work &w, const Sampling &how, int row, int id) {
    float x = w.logits[(size_t)row * w.vocab + id];
    if (how.penalty != 1 && w.seen[(size_t)row * ((w.vocab + 31) / 32) + id / 32] >> id % 32 & 1) x = penalize(x, how.penalty);
    return how.temperature > 0 ? x / how.temperature : x;
}

/* The least scaled logit that top-k, top-p and min-p leave in the draw, found digit by digit of its order_key. A block a row. */
__global__ void __launch_bounds__(1024) filter(Work w, Step s) {
    __shared__ unsigned long long bin[256], above;
    __shared__ unsigned prefix, largest;
    wait_previous();
    int row = blockIdx.x, seq = s.seq[s.row[row]];
    Sampling how = s.how[seq];
    if (threadIdx.x == 0) largest = 0, w.floor[row] = -INFINITY;
    __syncthreads();
    if (how.temperature == 0 || (how.top_k <= 0 && how.top_p >= 1 && how.min_p <= 0)) return;
    for (int i = threadIdx.x; i < w.vocab; i += blockDim.x) {
        float x = scaled(w, how, row, i);
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
            for (int i = threadIdx.x; i < 256; i += blockDim.x) bin[i] = 0;
            __syncthreads();
            unsigned fixed = shift == 24 ? 0 : ~0u << (shift + 8);
            for (int i = threadIdx.x; i < w.vocab; i += blockDim.x) {
                float x = scaled(w, how, row, i);
                unsigned key = order_key(x);
                if (isnan(x) || (key & fixed) != prefix || !(x >= floor)) continue;
                atomicAdd(&bin[key >> shift & 255], counts ? 1ull : (unsigned long long)mass(x, max));
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                if (!counts && shift == 24) {
                    unsigned long long all = 0;
                    for (int i = 0; i < 256; i++) all += bin[i];
                    need = top_p_mass(all, how.top_p);
                }
                int digit = 255;
                for (; digit > 0 && above + bin[digit] < need; digit--) above += bin[digit];
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

/* Draws a token for each row (blockIdx.y): the largest of scaled logit plus noise, over all blocks; the block that comes
 * last writes it down. A NaN wins over everything. */
__global__ void draw(Work w, Step s, bool filtered) {
    __shared__ unsigned long long best;
    int row = blockIdx.y;
    launch_next();
    wait_previous();
    int t = s.row[row], seq = s.seq[t];
    if (t != s.last[seq]) return;
    Sampling how = s.how[seq];
    float floor = filtered ? w.floor[row] : -INFINITY;
    unsigned long long mine = 0;
    if (threadIdx.x == 0) best = 0;
    __syncthreads();
    for (int id = blockIdx.x * blockDim.x + threadIdx.x; id < w.vocab; id += gridDim.x * blockDim.x) {
        float x = scaled(w, how, row, id);
        unsigned long long key = ~0ull;
        if (!isnan(x)) key = x >= floor ? draw_key(how.temperature > 0 ? x + token_noise(how.seed, s.position[t] + 1, id) : x, id) : 0;
        if (key > mine) mine = key;
    }
    atomicMax(&best, mine);
    __syncthreads();
    if (threadIdx.x) return;
    atomicMax(&w.best[row], best);
    __threadfence();
    if (atomicAdd(&w.drawing[row], 1) != (int)gridDim.x - 1) return;
    __threadfence();
    mine = atomicExch(&w.best[row], 0);
    w.drawing[row] = 0;
    int token = mine == ~0ull ? DREW_NAN : draw_id(mine);
    w.drawn[s.slot[seq]] = token;
    w.result[seq] = token;
}

#endif
