/* few.cuh: the kernels of a step with at most FEW tokens. Each reads its weights once, in order, and its time is the time to
 * read them: the last warp of a block, its producer, asks for the first of them before the kernel before has ended and keeps
 * a ring of shared memory full with what comes next, so that no wait for activations leaves the memory idle. The others
 * multiply. */
#ifndef FEW_CUH
#define FEW_CUH

#include "work.cuh"

constexpr int MOST_WARPS = 15, MOST_THREADS = (MOST_WARPS + 1) * 32; /* of a block, without and with its producer */
constexpr int UNITS = 2; /* groups of rows whose sums a warp of down_few keeps */

/* ---- copies that run on their own ---- */

/* A barrier in shared memory: `full` ones complete when a copy has arrived, `empty` ones when all readers have. On Hopper the
 * copy engine takes whole rows; before it the lanes of the producer copy 16 bytes at a time. */
struct Barrier {
    uint64_t word;
    __device__ unsigned address() { return (unsigned)__cvta_generic_to_shared(&word); }
    __device__ void init(int arrivals) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(address()), "r"(arrivals)); }
    __device__ void arrive() { asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state,[%0];\n}" ::"r"(address()) : "memory"); }
    __device__ void wait(unsigned parity) {
        unsigned done = 0;
        while (!done)
#if __CUDA_ARCH__ >= 900
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(done) : "r"(address()), "r"(parity) : "memory");
#else
            asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(done) : "r"(address()), "r"(parity) : "memory");
#endif
    }
#if __CUDA_ARCH__ >= 900
    static constexpr int COPIERS = 1; /* arrivals of copy() */
#else
    static constexpr int COPIERS = 32;
#endif
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
        for (int row = 0; row < rows; row++)
            for (int at = lane * 16; at < bytes; at += 512) copy_16(to + row * to_pitch + at, from + row * from_pitch + at);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
#endif
    }
};

/* The multiplying threads of a block wait for each other; the producer does not. */
__device__ inline int consumers() { return blockDim.x - 32; }
__device__ inline void sync_consumers() { asm volatile("bar.sync 1,%0;" ::"r"(consumers()) : "memory"); }

/* ---- how weights are encoded: each type is a row of this table ---- */

/* Activations of up to FEW tokens in shared memory, times LIFT: a row a token; the tokens whose bit is not set have zeros. */
template <typename A> struct Rows {
    const A *x, *zero; /* of the first column of a slice; zero: a slice of zeros */
    int pitch;
    unsigned tokens;
    __device__ const A *row(int t) const { return tokens >> t & 1 ? x + t * pitch : zero; }
};

/* A chunk is ROWS rows by K columns; a stage of shared memory holds `wide` of them that lie side by side, of which a warp multiplies
 * at most MOST. A Sum collects W x for these rows. Lane 4g + t works on row g and on eight neighbouring columns. */
template <Type T> struct Codec;

/* Bytes between rows in a stage: odd and even rows begin half the banks apart. */
__host__ __device__ constexpr int bank_pitch(int bytes) { return bytes + (bytes % 128 ? 0 : 64); }

template <> struct Codec<BF16> { /* activations are mma's rows, weights its columns */
    static constexpr int ROWS = GROUP, K = 32, MOST = 3, WIDTH = K * 2; /* WIDTH: bytes of a chunk's row */
    static constexpr float LIFT = 1;
    typedef bf16 Activation;
    struct Sum { /* tokens g and g + 8, rows 2t and 2t + 1 */
        float c[4] = {};
        __device__ void store(float *out, int tokens, int lane) const { /* out (ROWS, tokens) */
            int g = lane / 4, row = lane % 4 * 2;
            for (int i = 0; i < 4; i++)
                if (g + i / 2 * 8 < tokens) out[(row + i % 2) * tokens + g + i / 2 * 8] = c[i];
        }
        __device__ void add_weighted(const Sum &s, const float *weight, int lane) { /* weight (FEW) */
            for (int i = 0; i < 4; i++) c[i] += weight[lane / 4 + i / 2 * 8] * s.c[i];
        }
    };
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride * 2; }
    __host__ __device__ static constexpr int stage_bytes(int wide) { return ROWS * bank_pitch(wide * WIDTH); }
    __device__ static void copy(Barrier *full, uint8_t *stage, int wide, const uint8_t *group, int stride, int first, int n, int lane) {
        full->copy(stage, bank_pitch(wide * WIDTH), group + first * WIDTH, row_bytes(stride), ROWS, n * WIDTH, lane);
    }
    /* Chunk i of a slice whose first chunk in the stage is `first`. MANY: more than 8 tokens. */
    template <bool MANY> __device__ static void add(Sum &sum, const uint8_t *stage, int wide, int first, int i, const Rows<bf16> &x, int lane) {
        int g = lane / 4, at = i * K + lane % 4 * 8;
        uint4 low = *(const uint4 *)(x.row(g) + at), high = {};
        if (MANY) high = *(const uint4 *)(x.row(g + 8) + at);
        mma_eight(sum.c, low, high, *(const uint4 *)(stage + g * bank_pitch(wide * WIDTH) + first * WIDTH + at * 2));
    }
};

/* MXFP4: a chunk of 16 rows by 64 columns in 544 bytes. Lane 4g + t has 16 of them: columns 8t .. 8t + 7 of either block of 32, of
 * row g and then of row g + 8, a word each; behind these 512 bytes lie the scales in the same order, four bytes for each g. A
 * word becomes bf16 times 2^-126 by shifts and masks (fp4_to_bf16); the activations are lifted by 2^100, exactly, and the
 * block's scale, stored as the exponent of a float with 26 added, does the rest. */
__device__ inline float fp4_scale(uint32_t scales, int i) { return __uint_as_float((i < 3 ? scales << (23 - 8 * i) : scales >> 1) & 0x7F800000); }

template <> struct Codec<MXFP4> { /* weights are mma's rows, activations its columns */
    static constexpr int ROWS = FP4_ROWS, K = FP4_COLUMNS, MOST = 3;
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
    template <bool MANY> __device__ static void add(Sum &sum, const uint8_t *stage, int, int first, int i, const Rows<bf16> &x, int lane) {
        const uint8_t *chunk = stage + (first + i) * FP4_BYTES;
        uint4 words = *(const uint4 *)(chunk + lane * 16);
        uint32_t scales = *(const uint32_t *)(chunk + 512 + lane / 4 * 4);
        int g = lane / 4, at = i * K + lane % 4 * 8;
#pragma unroll
        for (int block = 0; block < 2; block++) {
            uint4 row = fp4_to_bf16(block ? words.y : words.x), row8 = fp4_to_bf16(block ? words.w : words.z);
            float scale = fp4_scale(scales, block), scale8 = fp4_scale(scales, 2 + block);
            auto multiply = [&](float (&to)[4], const bf16 *column) {
                float c[4];
                mma_eight_alone(c, row, row8, *(const uint4 *)(column + at + block * 32));
                to[0] += scale * c[0], to[1] += scale * c[1], to[2] += scale8 * c[2], to[3] += scale8 * c[3];
            };
            multiply(sum.c[0], x.row(g));
            if (MANY) multiply(sum.c[1], x.row(g + 8));
        }
    }
};

template <> struct Codec<F32> { /* lane: columns 4t .. 4t + 3 of either half, without tensor cores */
    static constexpr int ROWS = GROUP, K = 32, MOST = 2, WIDTH = K * 4;
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
    template <bool> __device__ static void add(Sum &sum, const uint8_t *stage, int wide, int first, int i, const Rows<float> &x, int lane) {
        for (int half = 0; half < 2; half++) {
            int column = half * 16 + lane % 4 * 4;
            float4 b = *(const float4 *)(stage + lane / 4 * bank_pitch(wide * WIDTH) + (first + i) * WIDTH + column * 4);
#pragma unroll
            for (int j = 0; j < FEW; j++) {
                if (!(x.tokens >> j & 1)) continue;
                float4 a = *(const float4 *)(x.x + j * x.pitch + i * K + column);
                sum.c[j] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
        }
    }
};

/* ---- streaming weights through a block ---- */

struct Slices { /* how a row's chunks are dealt to the warps of a block: `per` at a time, `parts` times */
    int chunks, per, parts;
    int stages; /* of the ring */
    int pass;   /* groups of rows between two reductions */
};

/* A block's way through its weights, item by item: an item is a group of rows, or a part of its columns, in which every warp
 * has a slice. The producer keeps the ring full. */
template <Type T> struct Ring {
    typedef Codec<T> C;
    Slices k;
    int stride, warps, warp, lane, at = 0;
    unsigned parity = 0;
    uint8_t *stage;        /* (stages) */
    Barrier *full, *empty; /* (stages) */

    static __host__ __device__ size_t bytes(const Slices &k, int warps) { /* in whole lines, for what lies behind */
        return (k.stages * (C::stage_bytes(k.per * warps) + 2 * sizeof(Barrier)) + 127) / 128 * 128;
    }
    __device__ Ring(const Matrix &m, const Slices &k, uint8_t *memory)
        : k(k), stride(m.stride), warps(blockDim.x / 32 - 1), warp(threadIdx.x / 32), lane(threadIdx.x % 32), stage(memory),
          full((Barrier *)(memory + (size_t)k.stages * C::stage_bytes(k.per * warps))), empty(full + k.stages) {
        if ((int)threadIdx.x < k.stages) full[threadIdx.x].init(Barrier::COPIERS), empty[threadIdx.x].init(warps);
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
        __syncthreads();
    }
    __device__ bool producing() const { return warp == warps; }
    __device__ int first_chunk(int part) const { return (part * warps + warp) * k.per; } /* of this warp's slice */
    __device__ void advance() {
        if (++at == k.stages) at = 0, parity ^= 1;
    }
    /* The producer's whole work: locate(item, part) is where the group's weights lie and which part of the columns is meant. */
    template <class Locate> __device__ void produce(int items, Locate locate) {
        int wide = k.per * warps;
        for (int i = 0; i < items; i++) {
            int part;
            const uint8_t *group = locate(i, part);
            if (i >= k.stages) empty[at].wait(parity ^ 1);
            C::copy(full + at, stage + at * C::stage_bytes(wide), wide, group, stride, part * wide, min(wide, k.chunks - part * wide), lane);
            advance();
        }
#if __CUDA_ARCH__ < 900
        asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    }
    template <bool MANY> __device__ void multiply(typename C::Sum &sum, int n, const Rows<typename C::Activation> &x) {
        int wide = k.per * warps;
        const uint8_t *from = stage + at * C::stage_bytes(wide);
        if (n == C::MOST) {
#pragma unroll
            for (int i = 0; i < C::MOST; i++) C::template add<MANY>(sum, from, wide, warp * k.per, i, x, lane);
        } else {
            for (int i = 0; i < n; i++) C::template add<MANY>(sum, from, wide, warp * k.per, i, x, lane);
        }
    }
    /* Multiplies this warp's slice of the next item by activations, of which x has the columns of the slice. */
    __device__ void take(typename C::Sum &sum, int part, const Rows<typename C::Activation> &x) {
        int n = min(k.per, k.chunks - first_chunk(part));
        full[at].wait(parity);
        if (x.tokens >> 8)
            multiply<true>(sum, n, x);
        else
            multiply<false>(sum, n, x);
        __syncwarp();
        if (lane == 0) empty[at].arrive();
        advance();
    }
};

/* Floats of the partial sums of two passes. */
__host__ __device__ inline int partial_floats(const Slices &k, int warps, int rows, int tokens) { return 2 * warps * k.pass * rows * tokens; }

/* At the end of a pass, what each warp found for `units` groups of rows lies in `partial` (warps, pass, ROWS, tokens). One warp
 * adds it up and hands it out in pairs of rows, pair(unit, pair, token, a, b), while the others go on: passes take turns with
 * two buffers, and a warp that is still adding has not come to the end of the next pass. */
template <int ROWS, class Pair> __device__ void end_pass(const float *partial, int turn, int pass, int units, int tokens, Pair pair) {
    int warps = consumers() / 32;
    sync_consumers();
    if ((int)threadIdx.x / 32 != turn % warps) return;
    for (int i = threadIdx.x % 32; i < units * (ROWS / 2) * tokens; i += 32) {
        int token = i % tokens, p = i / tokens % (ROWS / 2), unit = i / tokens / (ROWS / 2);
        const float *at = partial + (unit * ROWS + 2 * p) * tokens + token;
        float a = 0, b = 0;
#pragma unroll 5
        for (int w = 0; w < warps; w++, at += pass * ROWS * tokens) {
            a += at[0];
            b += at[tokens];
        }
        pair(unit, p, token, a, b);
    }
}

/* The units (groups of rows) of a block, of `units` in all: every gridDim.x-th. */
__device__ inline int units_of_block(int units) { return (units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x; }
__device__ inline int unit_of_block(int i) { return blockIdx.x + i * gridDim.x; }
/* Row i of a block's units is this row of the matrix. */
template <Type T> __device__ int row_of_block(int i) { return unit_of_block(i / Codec<T>::ROWS) * Codec<T>::ROWS + i % Codec<T>::ROWS; }
template <Type T> __device__ int groups_of(int rows) { return (rows + Codec<T>::ROWS - 1) / Codec<T>::ROWS; }
/* Where group `group` of a matrix begins. */
template <Type T> __device__ const uint8_t *group_at(const Matrix &m, int group) { return m.data + (size_t)group * Codec<T>::ROWS * Codec<T>::row_bytes(m.stride); }

/* The producer's part of stream_rows; group_of(unit) is where the weights of a block's unit lie. */
template <Type T, class Group> __device__ void produce_rows(Ring<T> &ring, int units, Group group_of) {
    ring.produce(units * ring.k.parts, [&](int item, int &part) {
        part = item % ring.k.parts;
        return group_of(item / ring.k.parts);
    });
}

/* All units of a block. */
template <Type T, class Pair>
__device__ void stream_rows(Ring<T> &ring, int units, Rows<typename Codec<T>::Activation> x, int tokens, float *partial, Pair pair) {
    constexpr int ROWS = Codec<T>::ROWS;
    int pass = ring.k.pass;
    const auto *columns = x.x;
    for (int first = 0, turn = 0; first < units; first += pass, turn++) {
        float *of_pass = partial + turn % 2 * (ring.warps * pass * ROWS * tokens);
        int n = min(pass, units - first);
        for (int u = 0; u < n; u++) {
            typename Codec<T>::Sum sum;
            for (int part = 0; part < ring.k.parts; part++) {
                x.x = columns + ring.first_chunk(part) * Codec<T>::K;
                ring.take(sum, part, x);
            }
            sum.store(of_pass + (ring.warp * pass + u) * ROWS * tokens, tokens, ring.lane);
        }
        end_pass<ROWS>(of_pass, turn, pass, n, tokens, [&](int unit, int p, int token, float a, float b) { pair(first + unit, p, token, a, b); });
    }
}

/* Elements between rows of activations in shared memory. */
template <Type T> __host__ __device__ constexpr int pitch_of(int stride) {
    int size = sizeof(typename Codec<T>::Activation);
    return bank_pitch(stride * size) / size;
}

/* Shared memory of the ..._few kernels, dealt out from the front. */
struct Memory {
    uint8_t *at;
    template <typename U> __device__ U *take(int n) {
        U *p = (U *)at;
        at += (n * sizeof(U) + 15) / 16 * 16;
        return p;
    }
    template <typename U> __device__ U *take_zeros(int n) {
        U *p = take<U>(n);
        for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] = (U)0;
        return p;
    }
};

__device__ inline void prefetch(const float *p, int n) {
    for (int i = threadIdx.x * 32; i < n; i += blockDim.x * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(p + i));
}

/* RMSNorm of rows of x (..., dim) for the activations of a block, in two parts so that nobody waits for the sum of squares: x *
 * weight goes to out (rows, pitch); what is multiplied by it has to be multiplied by scale[row] = 1 / sqrt(mean + eps), which
 * is there after the next barrier. square (rows, warps) is scratch: a row is cut into as many parts as there are warps, whoever
 * adds them up, so that its sum does not depend on how many rows there are. */
template <Type T>
__device__ void stage_normed(typename Codec<T>::Activation *out, int stride, const float *x, const int *row, int rows, const float *weight, int dim, float eps,
                             float *square, float *scale) {
    constexpr int STEP = 6; /* values on the way at once */
    int pitch = pitch_of<T>(stride), warps = consumers() / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < rows * warps; i += warps) {
        int r = i / warps, part = i % warps;
        const float *from = x + (size_t)(row ? row[r] : r) * dim;
        float sum = 0;
        for (int base = part * 32 + lane; base < stride; base += STEP * warps * 32) {
            float value[STEP], times[STEP];
#pragma unroll
            for (int k = 0; k < STEP; k++) {
                int at = base + k * warps * 32;
                value[k] = at < dim ? __ldcg(from + at) : 0;
                times[k] = at < dim ? weight[at] : 0;
            }
#pragma unroll
            for (int k = 0; k < STEP; k++) {
                int at = base + k * warps * 32;
                sum += value[k] * value[k];
                if (at < stride) out[r * pitch + at] = value[k] * times[k] * Codec<T>::LIFT;
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) square[i] = sum;
    }
    sync_consumers();
    if ((int)threadIdx.x < rows) {
        float sum = 0;
        for (int i = 0; i < warps; i++) sum += square[threadIdx.x * warps + i];
        scale[threadIdx.x] = rsqrtf(sum / dim + eps);
    }
}

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
template <Type T> __global__ void __launch_bounds__(MOST_THREADS, 2) qkv_few(Work w, Step s, Block l, Slices slices, int tokens) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef typename Codec<T>::Activation Activation;
    const Matrix &m = l.qkv;
    int units = units_of_block(groups_of<T>(m.rows)), half = w.head_dim / 2, pitch = pitch_of<T>(m.stride);
    launch_next();
    Ring<T> ring(m, slices, memory);
    if (ring.producing()) {
        produce_rows(ring, units, [&](int i) { return group_at<T>(m, unit_of_block(i)); });
        return;
    }
    prefetch(l.attn_norm, w.dim);
    Memory from = {memory + Ring<T>::bytes(slices, ring.warps)};
    Activation *x = from.take<Activation>(tokens * pitch), *zero = from.take_zeros<Activation>(slices.per * Codec<T>::K);
    float *partial = from.take<float>(partial_floats(slices, ring.warps, Codec<T>::ROWS, tokens)), *square = from.take<float>(tokens * ring.warps);
    float *scale = from.take<float>(FEW), *bias = from.take<float>(units * Codec<T>::ROWS);
    float2 *turn = from.take<float2>(tokens * half);
    int *position = from.take<int>(tokens), *page = from.take<int>(tokens);
    for (int i = threadIdx.x; i < units * Codec<T>::ROWS; i += consumers()) bias[i] = m.bias ? m.bias[row_of_block<T>(i)] : 0;
    for (int t = ring.warp; t < tokens; t += ring.warps) {
        int p = s.position[t];
        for (int i = ring.lane; i < half; i += 32) turn[t * half + i] = w.turn[(size_t)p * half + i];
        if (ring.lane == 0) position[t] = p, page[t] = page_of(s, s.seq[t], p);
    }
    wait_previous();
    stage_normed<T>(x, m.stride, w.x, NULL, tokens, l.attn_norm, w.dim, w.eps, square, scale);
    stream_rows(ring, units, {x, zero, pitch, (1u << tokens) - 1}, tokens, partial, [&](int unit, int p, int t, float a, float b) {
        int i = unit * Codec<T>::ROWS + 2 * p, r = row_of_block<T>(i);
        store_qkv<Activation>(w, t, position[t], page[t], r, a * scale[t] + bias[i], b * scale[t] + bias[i + 1], turn[t * half + r / 2 % half]);
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
 * its rows of x contribute to them, and writes down the sum of their squares. */
template <Type T> __global__ void __launch_bounds__(MOST_THREADS, 2) o_few(Work w, Block l, Slices slices, int tokens) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef typename Codec<T>::Activation Activation;
    const Matrix &m = l.o;
    int units = units_of_block(groups_of<T>(w.dim)), rows = units * Codec<T>::ROWS, pitch = pitch_of<T>(m.stride);
    int experts = l.router.rows ? w.n_experts : 0, each = 16 / sizeof(Activation), pieces = m.stride / each;
    launch_next();
    Ring<T> ring(m, slices, memory);
    if (ring.producing()) {
        produce_rows(ring, units, [&](int i) { return group_at<T>(m, unit_of_block(i)); });
        return;
    }
    Memory from = {memory + Ring<T>::bytes(slices, ring.warps)};
    Activation *x = from.take<Activation>(tokens * pitch), *zero = from.take_zeros<Activation>(slices.per * Codec<T>::K);
    float *partial = from.take<float>(partial_floats(slices, ring.warps, Codec<T>::ROWS, tokens)), *own = from.take<float>(rows * tokens);
    float *columns = from.take<float>(rows * experts);
    for (int i = ring.warp; i < rows; i += ring.warps) {
        int r = row_of_block<T>(i);
        for (int e = ring.lane; e < experts; e += 32) columns[i * experts + e] = r < w.dim ? l.router_columns[(size_t)r * experts + e] : 0;
    }
    wait_previous();
    for (int t = 0; t < tokens; t++)
        for (int i = threadIdx.x; i < pieces; i += consumers()) copy_16(x + t * pitch + i * each, (const Activation *)w.attn + (size_t)t * w.attn_pitch + i * each);
    copies_end();
    for (int i = threadIdx.x; i < rows * tokens; i += consumers()) {
        int r = row_of_block<T>(i / tokens);
        own[i] = r < w.dim ? __ldcg(w.x + (size_t)(i % tokens) * w.dim + r) + (m.bias ? m.bias[r] : 0) : 0;
    }
    copies_done<0>();
    sync_consumers();
    stream_rows(ring, units, {x, zero, pitch, (1u << tokens) - 1}, tokens, partial, [&](int unit, int p, int t, float a, float b) {
        for (int i = 0; i < 2; i++) {
            int at = unit * Codec<T>::ROWS + 2 * p + i, r = row_of_block<T>(at);
            if (r < w.dim) w.x[(size_t)t * w.dim + r] = own[at * tokens + t] += i ? b : a;
        }
    });
    sync_consumers();
    for (int i = threadIdx.x / 8; i < tokens * experts; i += consumers() / 8) { /* eight lanes for a token and an expert */
        int t = i / experts, e = i % experts;
        float sum = 0;
        for (int r = threadIdx.x % 8; r < rows; r += 8) sum += own[r * tokens + t] * columns[r * experts + e];
        for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(255u << (ring.lane & 24), sum, o);
        long long steps = __float2ll_rn(sum * (1 / ROUTER_STEP));
        if (threadIdx.x % 8 == 0) atomicAdd((unsigned long long *)&w.router_sum[((size_t)w.layer * FEW + t) * experts + e], (unsigned long long)steps);
    }
    for (int t = ring.warp; t < tokens; t += ring.warps) {
        float sum = 0;
        for (int r = ring.lane; r < rows; r += 32) sum += own[r * tokens + t] * own[r * tokens + t];
        sum = warp_sum(sum);
        if (ring.lane == 0) w.square[t * w.blocks + blockIdx.x] = sum;
    }
}

/* The experts that any token chose, in ascending order, with each token's weight for them (0: not chosen), which of its
 * choices it was, and the set of these tokens. In shared memory. */
struct Active {
    int *n, *expert;  /* [0]; (n) */
    unsigned *tokens; /* (n) */
    float *weight;    /* (n, FEW) */
    int *choice;      /* (n, FEW) */
    unsigned *chosen; /* (n_experts / 32) a bit an expert */

    static __host__ __device__ int most(int n_experts, int top_k, int tokens) { return min(n_experts, top_k * tokens); }
    static __host__ __device__ int floats(int n_experts, int most) { return 4 + most * (2 + 2 * FEW) + (n_experts + 31) / 32; }
    /* All zero; memory has floats(). */
    __device__ Active(float *memory, int n_experts, int most)
        : n((int *)memory), expert(n + 4), tokens((unsigned *)(expert + most)), weight((float *)(tokens + most)), choice((int *)(weight + most * FEW)),
          chosen((unsigned *)(choice + most * FEW)) {
        for (int i = threadIdx.x; i < floats(n_experts, most); i += blockDim.x) memory[i] = 0;
    }
    __device__ int place(int e) const { /* how many were chosen before it */
        int before = __popc(chosen[e / 32] & ((1u << e % 32) - 1));
        for (int i = 0; i < e / 32; i++) before += __popc(chosen[i]);
        return before;
    }
};

/* What each token chose, (tokens, top_k), and `active` from it: every block finds it for itself from what the blocks of o_few
 * have added up. All threads call it; everything is there when it returns. The last warps begin: others have more to do. */
__device__ inline void choose(const Work &w, const Block &l, int tokens, float *logit, int *experts, float *weights, Active &active) {
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (int t = warps - 1 - threadIdx.x / 32; t < tokens; t += warps) {
        float squares = 0, weight = 1, *mine = logit + t * w.n_experts;
        int expert = 0;
        for (int e = lane; e < w.n_experts && l.router.rows; e += 32) mine[e] = (float)__ldcg(w.router_sum + ((size_t)w.layer * FEW + t) * w.n_experts + e);
#pragma unroll 5
        for (int i = lane; i < w.blocks; i += 32) squares += __ldcg(w.square + t * w.blocks + i);
        float factor = rsqrtf(warp_sum(squares) / w.dim + w.eps) * ROUTER_STEP;
        for (int e = lane; e < w.n_experts; e += 32) mine[e] = mine[e] * factor + (l.router.bias ? l.router.bias[e] : 0);
        __syncwarp();
        if (l.router.rows) route(mine, w.n_experts, w.top_k, lane, expert, weight);
        if (lane >= w.top_k) continue;
        experts[t * w.top_k + lane] = expert, weights[t * w.top_k + lane] = weight;
        atomicOr(&active.chosen[expert / 32], 1u << expert % 32);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * w.top_k; i += blockDim.x) {
        int t = i / w.top_k, place = active.place(experts[i]);
        active.expert[place] = experts[i];
        active.weight[place * FEW + t] = weights[i];
        active.choice[place * FEW + t] = i % w.top_k;
        atomicOr(&active.tokens[place], 1u << t);
        atomicMax(active.n, place + 1);
    }
    __syncthreads();
}

/* Router, top-k and the activations of the chosen experts (dense: of the one there is). */
template <Type T> __global__ void __launch_bounds__(MOST_THREADS, 2) up_few(Work w, Block l, Slices slices, int tokens) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef typename Codec<T>::Activation Activation;
    constexpr int ROWS = Codec<T>::ROWS;
    const Matrix &m = l.up;
    int most = Active::most(w.n_experts, w.top_k, tokens), groups = groups_of<T>(m.rows), pitch = pitch_of<T>(m.stride);
    Ring<T> ring(m, slices, memory);
    Memory from = {memory + Ring<T>::bytes(slices, ring.warps)};
    Activation *x = from.take<Activation>(tokens * pitch), *zero = from.take_zeros<Activation>(slices.per * Codec<T>::K);
    float *partial = from.take<float>(partial_floats(slices, ring.warps, ROWS, tokens)), *square = from.take<float>(tokens * ring.warps), *scale = from.take<float>(FEW);
    float *logit = from.take<float>(tokens * w.n_experts), *weights = from.take<float>(tokens * w.top_k);
    int *experts = from.take<int>(tokens * w.top_k);
    Active active(from.take<float>(Active::floats(w.n_experts, most)), w.n_experts, most);
    float *bias = from.take<float>(units_of_block(most * groups) * ROWS);
    __syncthreads(); /* active is all zero */
    prefetch(l.ffn_norm, w.dim);
    if (l.router.bias) prefetch(l.router.bias, w.n_experts);
    wait_previous();
    launch_next(); /* not before: down_few begins with what o_few left */
    if (!ring.producing()) stage_normed<T>(x, m.stride, w.x, NULL, tokens, l.ffn_norm, w.dim, w.eps, square, scale);
    choose(w, l, tokens, logit, experts, weights, active);
    int units = units_of_block(*active.n * groups);
    auto expert_of = [&](int i) { return active.expert[unit_of_block(i) / groups]; };
    if (ring.producing()) {
        produce_rows(ring, units, [&](int i) { return group_at<T>(m, unit_of_block(i) % groups) + expert_of(i) * m.bytes; });
        return;
    }
    for (int i = threadIdx.x; i < units * ROWS; i += consumers()) {
        int row = unit_of_block(i / ROWS) % groups * ROWS + i % ROWS;
        bias[i] = m.bias && row < m.rows ? m.bias[(size_t)expert_of(i / ROWS) * m.rows + row] : 0;
    }
    for (int i = threadIdx.x; i < tokens * w.top_k && blockIdx.x == 0; i += consumers()) w.expert[i] = experts[i], w.weight[i] = weights[i];
    sync_consumers();
    stream_rows(ring, units, {x, zero, pitch, (1u << tokens) - 1}, tokens, partial, [&](int unit, int p, int t, float gate, float up) {
        int place = unit_of_block(unit) / groups, i = unit * ROWS + 2 * p, at = unit_of_block(unit) % groups * (ROWS / 2) + p;
        if (!(active.tokens[place] >> t & 1) || at >= w.ffn_dim) return;
        size_t choice = (size_t)t * w.top_k + active.choice[place * FEW + t];
        ((Activation *)w.act_out)[choice * w.act_pitch + at] = (Activation)(swiglu(w, gate * scale[t] + bias[i], up * scale[t] + bias[i + 1]) * w.act_lift);
    });
}

/* x += the weighted sum of the chosen experts' W act + bias. A block owns its rows of x, so it reads these rows of every
 * active expert; each warp copies its own columns of the activations, the next expert's while it multiplies. o_few has ended
 * when this begins (see up_few), so the experts are known and their weights on the way before up_few ends. */
template <Type T> __global__ void __launch_bounds__(MOST_THREADS, 2) down_few(Work w, Block l, Slices slices, int tokens) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef Codec<T> C;
    typedef typename C::Activation Activation;
    const Matrix &m = l.down;
    int most = Active::most(w.n_experts, w.top_k, tokens), units = units_of_block(groups_of<T>(w.dim)), rows = units * C::ROWS, pass = slices.pass;
    int buffers = tokens > 8 ? 1 : 2, width = slices.per * C::K, pitch = pitch_of<T>(width), each = 16 / sizeof(Activation);
    launch_next();
    Ring<T> ring(m, slices, memory);
    int warps = ring.warps, warp = ring.warp, lane = ring.lane;
    Memory from = {memory + Ring<T>::bytes(slices, warps)};
    Activation *zero = from.take_zeros<Activation>(width), *x = from.take<Activation>(warps * buffers * tokens * pitch) + warp * buffers * tokens * pitch; /* of this warp */
    float *partial = from.take<float>(partial_floats(slices, warps, C::ROWS, tokens)), *own = from.take<float>(rows * tokens), *weights = from.take<float>(tokens * w.top_k);
    float *logit = from.take<float>(tokens * w.n_experts);
    int *experts = from.take<int>(tokens * w.top_k);
    Active active(from.take<float>(Active::floats(w.n_experts, most)), w.n_experts, most);
    __syncthreads(); /* active is all zero */
    choose(w, l, tokens, logit, experts, weights, active);
    int slices_all = *active.n * slices.parts; /* a slice: an expert's part of the columns */
    if (ring.producing()) { /* pass by pass: expert by expert, part by part, unit by unit */
        ring.produce(units * slices_all, [&](int item, int &part) {
            int first = item / (pass * slices_all) * pass, n = min(pass, units - first);
            item -= first * slices_all;
            part = item / n % slices.parts;
            return group_at<T>(m, unit_of_block(first + item % n)) + active.expert[item / n / slices.parts] * m.bytes;
        });
        return;
    }
    for (int i = threadIdx.x; i < rows * tokens; i += consumers()) {
        int r = row_of_block<T>(i / tokens), t = i % tokens;
        float sum = r < w.dim ? __ldcg(w.x + (size_t)t * w.dim + r) : 0;
#pragma unroll 4
        for (int place = 0; place < *active.n; place++) sum += active.weight[place * FEW + t] * (m.bias && r < w.dim ? m.bias[(size_t)active.expert[place] * w.dim + r] : 0);
        own[i] = sum;
    }
    wait_previous();
    auto copy = [&](int slice) {
        int place = slice / slices.parts, at = ring.first_chunk(slice % slices.parts) * C::K, have = min(width, w.act_pitch - at);
        for (int t = 0; t < tokens && slice < slices_all; t++) {
            if (!(active.tokens[place] >> t & 1)) continue;
            const Activation *act = (const Activation *)w.act_out + ((size_t)t * w.top_k + active.choice[place * FEW + t]) * w.act_pitch + at;
            for (int i = lane * each; i < have; i += 32 * each) copy_16(x + (slice % buffers * tokens + t) * pitch + i, act + i);
        }
        copies_end();
    };
    for (int first = 0, turn = 0; first < units; first += pass, turn++) {
        int n = min(pass, units - first);
        if (buffers > 1) copy(0);
        typename C::Sum sum[UNITS];
        for (int slice = 0; slice < slices_all; slice++) {
            int place = slice / slices.parts;
            copy(buffers > 1 ? slice + 1 : slice);
            if (buffers > 1)
                copies_done<1>();
            else
                copies_done<0>();
            __syncwarp();
            Rows<Activation> columns = {x + slice % buffers * tokens * pitch, zero, pitch, active.tokens[place]};
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (u >= n) break;
                typename C::Sum one;
                ring.take(one, slice % slices.parts, columns);
                sum[u].add_weighted(one, active.weight + place * FEW, lane);
            }
            __syncwarp();
        }
        float *of_pass = partial + turn % 2 * (warps * pass * C::ROWS * tokens);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (u < n) sum[u].store(of_pass + (warp * pass + u) * C::ROWS * tokens, tokens, lane);
        end_pass<C::ROWS>(of_pass, turn, pass, n, tokens, [&](int unit, int p, int t, float a, float b) {
            for (int i = 0; i < 2; i++) {
                int at = (first + unit) * C::ROWS + 2 * p + i, r = row_of_block<T>(at);
                if (r < w.dim) w.x[(size_t)t * w.dim + r] = own[at * tokens + t] + (i ? b : a);
            }
        });
    }
}

/* ---- from x to a token ---- */

/* Logits of the rows that are wanted, (rows, vocab). */
template <Type T> __global__ void __launch_bounds__(MOST_THREADS, 2) head_few(Work w, Step s, Matrix m, const float *norm, Slices slices, int rows) {
    extern __shared__ __align__(128) uint8_t memory[];
    typedef typename Codec<T>::Activation Activation;
    int units = units_of_block(groups_of<T>(w.vocab)), pitch = pitch_of<T>(m.stride);
    launch_next();
    Ring<T> ring(m, slices, memory);
    if (ring.producing()) {
        produce_rows(ring, units, [&](int i) { return group_at<T>(m, unit_of_block(i)); });
        return;
    }
    prefetch(norm, w.dim);
    Memory from = {memory + Ring<T>::bytes(slices, ring.warps)};
    Activation *x = from.take<Activation>(rows * pitch), *zero = from.take_zeros<Activation>(slices.per * Codec<T>::K);
    float *partial = from.take<float>(partial_floats(slices, ring.warps, Codec<T>::ROWS, rows)), *square = from.take<float>(rows * ring.warps), *scale = from.take<float>(FEW);
    wait_previous();
    stage_normed<T>(x, m.stride, w.x, s.row, rows, norm, w.dim, w.eps, square, scale);
    stream_rows(ring, units, {x, zero, pitch, (1u << rows) - 1}, rows, partial, [&](int unit, int p, int row, float a, float b) {
        int id = unit_of_block(unit) * Codec<T>::ROWS + 2 * p;
        float *logit = w.logits + (size_t)row * w.vocab + id;
        if (id < w.vocab) logit[0] = a * scale[row];
        if (id + 1 < w.vocab) logit[1] = b * scale[row];
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
    __shared__ unsigned low[256], high[256], prefix, largest; /* low and high words of the bins */
    __shared__ unsigned long long above;
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
            for (int i = threadIdx.x; i < 256; i += blockDim.x) low[i] = high[i] = 0;
            __syncthreads();
            unsigned fixed = shift == 24 ? 0 : ~0u << (shift + 8);
            for (int i = threadIdx.x; i < w.vocab; i += blockDim.x) {
                float x = scaled(w, how, row, i);
                unsigned key = order_key(x);
                if (isnan(x) || (key & fixed) != prefix || !(x >= floor)) continue;
                unsigned long long add = counts ? 1 : mass(x, max);
                unsigned bin = key >> shift & 255, before = atomicAdd(&low[bin], (unsigned)add), more = (unsigned)(add >> 32) + (before + (unsigned)add < before);
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

/* Draws a token for each row (blockIdx.y): the largest of scaled logit plus noise, over all blocks; the block that comes
 * last writes it down. A NaN wins over everything. */
__global__ void draw(Work w, Step s, bool filtered) {
    __shared__ unsigned long long best[32];
    int row = blockIdx.y;
    launch_next();
    wait_previous();
    int t = s.row[row], seq = s.seq[t];
    if (t != s.last[seq]) return;
    Sampling how = s.how[seq];
    float floor = filtered ? w.floor[row] : -INFINITY;
    unsigned long long mine = 0;
    for (int id = blockIdx.x * blockDim.x + threadIdx.x; id < w.vocab; id += gridDim.x * blockDim.x) {
        float x = scaled(w, how, row, id);
        unsigned long long key = ~0ull;
        if (!isnan(x)) key = x >= floor ? draw_key(how.temperature > 0 ? x + token_noise(how.seed, s.position[t] + 1, id) : x, id) : 0;
        if (key > mine) mine = key;
    }
    for (int o = 16; o; o >>= 1) mine = max(mine, __shfl_xor_sync(~0u, mine, o));
    if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < (int)blockDim.x / 32; i++) mine = max(mine, best[i]);
    atomicMax(&w.best[row], mine);
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
