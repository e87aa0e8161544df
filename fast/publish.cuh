/* publish.cuh: what the decode kernel's blocks share: buffers, asynchronous copies and their barriers, and how
 * one block publishes values to others. prefill.cuh uses the barriers too. */
#pragma once

constexpr int DECODE_SPLITS = 16; /* blocks that share the context of a key/value head, at most */
constexpr int MAX_WARPS = 32;     /* of a block */

/* Sums that many blocks add to are integers, in these quanta, so that the order does not matter. From bit COUNT_BIT on
 * a sum counts who has added to it, up to MAX_COUNT. What one expert adds must stay below 2^29 / top_k^2. */
constexpr float ROUTER_QUANTUM = 0x1p-28f, EXPERT_QUANTUM = 0x1p-24f;
constexpr int COUNT_BIT = 56, MAX_COUNT = (1 << (64 - COUNT_BIT)) - 1;
__device__ inline int count_of(unsigned long long sum) { return (int)((sum + (1ull << (COUNT_BIT - 1))) >> COUNT_BIT); }
__device__ inline long long value_of(unsigned long long sum) {
    return (long long)(sum - ((unsigned long long)count_of(sum) << COUNT_BIT));
}

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

/* ---- loads and copies ---- */

/* 16 bytes, or zeros. Predicated, because with a branch lanes with zeros would wait for the others' loads. polled: as
 * poll(). */
__device__ inline uint4 load_16(const void *from, bool real, bool polled) {
    uint4 x;
    asm volatile("{\n.reg .pred plain,polled;\nsetp.ne.u32 plain,%5,0;\nsetp.ne.u32 polled,%6,0;\n"
                 "mov.b32 %0,0;\nmov.b32 %1,0;\nmov.b32 %2,0;\nmov.b32 %3,0;\n"
                 "@plain ld.v4.u32 {%0,%1,%2,%3},[%4];\n@polled ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];\n}"
                 : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
                 : "l"(from), "r"((unsigned)(real && !polled)), "r"((unsigned)(real && polled)));
    return x;
}
__device__ inline void copy_4(void *to, const void *from, bool real) { /* cp.async of 4 bytes, or of zeros */
    asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(real ? 4 : 0)
                 : "memory");
}

/* The copy engine and wgmma reach shared memory through the async proxy (PTX ISA, "Async proxy"). This fence orders
 * them after ordinary reads and writes. */
__device__ inline void fence_proxies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A barrier in shared memory (mbarrier). A phase ends when all arrivals, and all bytes they expect, are there. */
struct Barrier {
    uint64_t word;
    __device__ unsigned address() { return (unsigned)__cvta_generic_to_shared(&word); }
    __device__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(address()), "r"(arrivals));
    }
    /* After init() and before the next __syncthreads(): makes the barriers visible to the block and the copy engine. */
    static __device__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
    __device__ void arrive() {
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state,[%0];\n}" ::"r"(address()) : "memory");
    }
    __device__ void arrive_if(bool really) { /* predicated, so that the warp stays together */
        asm volatile("{\n.reg .pred really;\nsetp.ne.u32 really,%1,0;\n"
                     "@really mbarrier.arrive.shared.b64 _,[%0];\n}" ::"r"(address()),
                     "r"((unsigned)really)
                     : "memory");
    }
    __device__ void arrive_on_copies() { /* once this thread's cp.async copies have landed */
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
    }
    /* Waits until the phase of this parity has completed. */
    __device__ void wait(unsigned parity) {
        asm volatile("{\n.reg .pred there;\nagain:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 there,[%0],%1;\n"
                     "@!there bra again;\n}" ::"r"(address()),
                     "r"(parity)
                     : "memory");
    }
    /* Arrives, and announces the bytes that copy_row() will bring. */
    __device__ void expect_bytes(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(address()), "r"(bytes) : "memory");
    }
    /* Starts the copy of a row, a multiple of 16 bytes. Weights are read once: evict_first keeps them from pushing out
     * of L2 what all blocks read. */
    __device__ void copy_row(uint8_t *to, const uint8_t *from, int bytes) {
        uint64_t once;
        asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(once));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0],[%1],%2,[%3],%4;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                     "l"(from), "r"(bytes), "r"(address()), "l"(once)
                     : "memory");
    }
    /* The same for rows `from_pitch` apart, which go `to_pitch` apart. All lanes of a warp call it. */
    __device__ void copy_rows(uint8_t *to, int to_pitch, const uint8_t *from, size_t from_pitch, int rows, int bytes,
                              int lane) {
        if (lane == 0) expect_bytes(rows * bytes);
        __syncwarp();
        if (lane < rows) copy_row(to + lane * to_pitch, from + lane * from_pitch, bytes);
    }
};

/* The first `threads` threads of a block wait for each other at this named barrier. */
template <int NUMBER = 1> __device__ inline void bar_sync(int threads) {
    asm volatile("bar.sync %0,%1;" ::"n"(NUMBER), "r"(threads) : "memory");
}

/* ---- published values ---- */

/* A reader needs no barrier if a value itself shows that it is new. Three kinds of words do; each is written and read
 * whole, from L2:
 *   activations      before they are published, all their bits are ones (UNPUBLISHED), a NaN that no instruction makes
 *   single floats    64 bits, the float and FLAG
 *   counted sums     count_of() says how many blocks have added to them */
constexpr uint32_t UNPUBLISHED = ~0u;
__device__ inline void publish(uint32_t *to, uint32_t x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(to), "r"(x) : "memory");
}
__device__ inline void publish(float *to, float x) { publish((uint32_t *)to, __float_as_uint(x)); }
__device__ inline void publish(bf16 *to, bf16 x) {
    asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" ::"l"(to), "h"(__bfloat16_as_ushort(x)) : "memory");
}
/* Makes n floats, a multiple of four, UNPUBLISHED: each of `threads` threads its share. */
__device__ inline void unpublish(void *floats, int n, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < n / 4; i += threads)
        ((uint4 *)floats)[i] = make_uint4(UNPUBLISHED, UNPUBLISHED, UNPUBLISHED, UNPUBLISHED);
}
/* Reads words from L2, published or not: L1 may hold what was there before. */
__device__ inline uint4 poll(const uint4 *from) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}
__device__ inline uint2 poll(const uint2 *from) {
    uint2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1},[%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
    return x;
}
__device__ inline float poll(const float *from) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0,[%1];" : "=f"(x) : "l"(from));
    return x;
}
/* Between two polls of a waiting thread: polling slows the blocks that still have to publish. Always true. */
__device__ inline bool pause() { return __nanosleep(40), true; }
/* The maximum of three words, each half by itself, unsigned: UNPUBLISHED is above all others. One test of the maximum
 * then stands for all words. */
__device__ inline uint32_t max_halves(uint32_t a, uint32_t b, uint32_t c) { return __vimax3_u16x2(a, b, c); }
__device__ inline uint32_t max_halves(uint32_t so_far, uint4 x) {
    return max_halves(max_halves(so_far, x.x, x.y), x.z, x.w);
}
__device__ inline bool half_unpublished(uint32_t x) { return x >> 16 == 0xFFFF || (x & 0xFFFF) == 0xFFFF; }

constexpr unsigned long long FLAG = 1ull << 32;
__device__ inline void publish_flagged(unsigned long long *to, float x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(to), "l"(FLAG | __float_as_uint(x)) : "memory");
}
__device__ inline unsigned long long poll(const unsigned long long *from) {
    unsigned long long word;
    asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(word) : "l"(from));
    return word;
}
/* With acquire: whoever finds a word here may read what was written before it. */
__device__ inline unsigned long long poll_acquire(const unsigned long long *from) {
    unsigned long long word;
    asm volatile("ld.acquire.gpu.global.u64 %0,[%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

/* ---- buffers ---- */

/* A decode step without its pages, passed as a kernel argument: what lies from Step::how to Step::page. */
struct StepArgument {
    static constexpr int BYTES =
        MAX_DECODE * (sizeof(Sampling) + sizeof(int4) + 8 * sizeof(int)) + 4 * sizeof(int); /* see step_at() */
    static_assert(sizeof(Sampling) % 16 == 0 && BYTES % 16 == 0, "copied by 16 bytes");
    uint4 word[BYTES / 16];
    __device__ int4 token(int t) const { return ((const int4 *)word)[MAX_DECODE * sizeof(Sampling) / 16 + t]; }
};

struct DecodeLayer : DeviceLayer {
    float *router_columns; /* (dim, n_experts) router weight times ffn_norm */
};

enum { FOR_QKV, FOR_UP, FOR_HEAD, NORMED_MATRICES }; /* the matrices that follow a norm */

struct DecodeWork : Work {          /* Work, and what only the decode kernel needs */
    unsigned long long *expert_sum; /* (MAX_DECODE, dim) counted sums of what experts add to x; 0 outside phase down */
    float *layer_buffers;           /* of a single token: see LayerBuffers */
    void *normed_for[NORMED_MATRICES]; /* (MAX_DECODE, stride) x times the norm's weights, but not yet divided by its
                                         root mean square, in the matrix's order */
    unsigned long long *router_sum;    /* (MAX_DECODE, n_layers, n_experts) counted sums: see router_sum_of() */
    unsigned long long *output_square; /* (MAX_DECODE, n_layers, blocks) sum of squares of each block's rows of x after
                                         attention, flagged */
    unsigned long long *input_square;  /* (MAX_DECODE, n_layers + 1, MAX_WARPS) the same of what a layer, or the head,
                                          begins with, by the warps of one block */
    float *split_states;               /* (MAX_DECODE, n_kv_heads, DECODE_SPLITS, 8, head_dim + 2) UNPUBLISHED until a
                                          split is done and again once merged; of a single token by layer, in turn */
    unsigned long long *barrier;       /* arrivals of all blocks at all barriers so far */
};

/* Stores a pair of a key or a value in the cache: rows r and r + 1 of the qkv matrix, for a token at `position`, whose
 * part of the cache is `page`. */
__device__ inline void store_key_or_value(const DecodeWork &w, int position, int page, int r, float2 x) {
    int d = w.head_dim, row = r - w.n_heads * d, i = row % d;
    bool values = row >= w.n_kv_heads * d;
    bf16 *to = cache_of(w, page, values, row / d % w.n_kv_heads);
    to[values ? value_place(d, position, i) : key_place(d, position, i)] = (bf16)x.x;
    to[values ? value_place(d, position, i + 1) : key_place(d, position, i + 1)] = (bf16)x.y;
}
/* norm_factor() without its division, which would spill. */
__device__ inline float rms_factor(const DecodeWork &w, float square) {
    return rsqrtf(fmaf(square, 1.f / w.dim, w.eps));
}

/* Softmax over the logits of a token's choices, which come in descending order, in place. */
__device__ inline void softmax_choices(float *chosen, int top_k, int lane) {
    float share = lane < top_k ? expf(chosen[lane] - chosen[0]) : 0, total = warp_sum(share);
    __syncwarp();
    if (lane < top_k) chosen[lane] = share / total;
}
