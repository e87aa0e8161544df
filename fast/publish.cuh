/* publish.cuh: what the annex's kernels share: its buffers, copies that run on their own, and words that say whether they are there. */
#pragma once

constexpr int FEW = MAX_DECODE;   /* tokens of a step up to which weights are streamed */
constexpr int SPLITS = 16; /* blocks that share one key/value head's context */
constexpr int MOST_WARPS = 32; /* of a block */
/* Of sums that are integers, so that order does not matter. What an expert adds must be below 2^29 / top_k^2 (2^25 of four). */
constexpr float ROUTER_STEP = 0x1p-28f, EXPERT_STEP = 0x1p-24f;
constexpr int COUNTED = 56; /* bit of such a sum from which on it says how many have added to it, ... */
constexpr int MOST_COUNTED = (1 << (64 - COUNTED)) - 1; /* ... at most so many */

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

/* ---- small device functions ---- */

/* Sixteen e2m1 values times their block's scale (a byte of a packed chunk), exactly, as bf16. */
__device__ inline Sixteen fp4_to_bf16_scaled(uint32_t a, uint32_t b, uint32_t scale) {
    Sixteen v = fp4_to_bf16(a, b);
    uint32_t lift = 0x78007800 /* 2^113 */, rest = (scale - 13) * 0x00800080 /* 2^(e - 114) */;
    for (uint4 *eight : {&v.low, &v.high})
        for (int i = 0; i < 4; i++) {
            uint32_t &pair = (&eight->x)[i];
            __nv_bfloat162 x = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&pair), *reinterpret_cast<__nv_bfloat162 *>(&lift));
            x = __hmul2(x, *reinterpret_cast<__nv_bfloat162 *>(&rest));
            pair = *reinterpret_cast<uint32_t *>(&x);
        }
    return v;
}

/* 16 bytes, or zeros, without a branch: behind one, lanes with zeros would wait for the others' loads. told: see ask(). */
__device__ inline uint4 load_16(const void *from, bool real, bool told) {
    uint4 x;
    asm volatile("{\n.reg .pred plain,told;\nsetp.ne.u32 plain,%5,0;\nsetp.ne.u32 told,%6,0;\n"
                 "mov.b32 %0,0;\nmov.b32 %1,0;\nmov.b32 %2,0;\nmov.b32 %3,0;\n"
                 "@plain ld.v4.u32 {%0,%1,%2,%3},[%4];\n@told ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];\n}"
                 : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
                 : "l"(from), "r"((unsigned)(real && !told)), "r"((unsigned)(real && told)));
    return x;
}

__device__ inline void copy_4(void *to, const void *from, bool real) { /* or zeros */
    asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(real ? 4 : 0) : "memory");
}
/* ---- copies that run on their own ---- */

/* Copy engine and tensor cores have ways of their own to shared memory (proxies). What was read or written in the usual way, and what they do behind it, is
 * ordered by this fence (PTX ISA, "Async proxy"). */
__device__ inline void fence_proxies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* A barrier in shared memory (mbarrier): `full` ones complete when a copy has arrived, `empty` ones when all readers have, few.cuh's
 * gates when all have for whom others wait; its `hold` is closed in every other phase. The copy engine takes whole rows. */
struct Barrier {
    uint64_t word;
    __device__ unsigned address() { return (unsigned)__cvta_generic_to_shared(&word); }
    __device__ void init(int arrivals) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(address()), "r"(arrivals)); }
    __device__ void arrive() { asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state,[%0];\n}" ::"r"(address()) : "memory"); }
    /* The same, or nothing: predicated, so that the warp stays together. */
    __device__ void arrive_if(bool really) {
        asm volatile("{\n.reg .pred really;\nsetp.ne.u32 really,%1,0;\n@really mbarrier.arrive.shared.b64 _,[%0];\n}" ::"r"(address()), "r"((unsigned)really)
                     : "memory");
    }
    __device__ void wait(unsigned parity) {
        asm volatile("{\n.reg .pred there;\nagain:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 there,[%0],%1;\n"
                     "@!there bra again;\n}" ::"r"(address()), "r"(parity)
                     : "memory");
    }
    /* A thread arrives when what it has asked for by cp.async is there. */
    __device__ void copies_arrive() { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory"); }
    /* Barriers are there for the whole block, and for the copy engine, behind the next __syncthreads(). */
    static __device__ void show_init() {
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    /* Arrives, and says how many bytes copy_row() will bring. */
    __device__ void expect_bytes(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(address()), "r"(bytes) : "memory");
    }
    /* Asks for a row, a multiple of 16 bytes. */
    __device__ void copy_row(uint8_t *to, const uint8_t *from, int bytes) {
        uint64_t once; /* what is read once need not push out of L2 what is read by all blocks */
        asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(once));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(to)),
                     "l"(from), "r"(bytes), "r"(address()), "l"(once)
                     : "memory");
    }
    /* Asks for rows of `bytes` (a multiple of 16), `from_pitch` apart, to lie `to_pitch` apart. All lanes of a warp call it. */
    __device__ void copy(uint8_t *to, int to_pitch, const uint8_t *from, size_t from_pitch, int rows, int bytes, int lane) {
        if (lane == 0) expect_bytes(rows * bytes);
        __syncwarp();
        if (lane < rows) copy_row(to + lane * to_pitch, from + lane * from_pitch, bytes);
    }
};

__device__ inline int sum_to(int x, int lane) { /* of this lane and those before it */
    for (int o = 1; o < 32; o *= 2) {
        int add = __shfl_up_sync(~0u, x, o);
        if (lane >= o) x += add;
    }
    return x;
}

/* The first `threads` of a block wait for each other; who waits at the same time with others has another number. */
template <int NUMBER = 1> __device__ inline void sync_threads(int threads) { asm volatile("bar.sync %0,%1;" ::"n"(NUMBER), "r"(threads) : "memory"); }

/* A step of few tokens without its pages, on the way to the card: what lies from Step::how to Step::page. */
struct Posted {
    static constexpr int BYTES = FEW * (sizeof(Sampling) + sizeof(int4) + 8 * sizeof(int)) + 4 * sizeof(int); /* see step_at() */
    static_assert(sizeof(Sampling) % 16 == 0 && BYTES % 16 == 0, "copied by 16 bytes");
    uint4 word[BYTES / 16];
    bool there;
    __device__ int4 token(int t) const { return ((const int4 *)word)[FEW * sizeof(Sampling) / 16 + t]; }
};

enum { FOR_QKV, FOR_UP, FOR_HEAD, MATRICES }; /* that follow a norm */

struct DecodeLayer : DeviceLayer {
    float *router_columns; /* (dim, n_experts): router weight times ffn_norm */
};

struct DecodeWork : Work { /* Work, and what only the decode kernel needs */
    unsigned long long *expert_sum;   /* (FEW, dim) what chosen experts have found, in steps of EXPERT_STEP, and how many; 0 but in phase down */
    float act_lift;             /* factor of act_out */
    float *told;                /* of a token alone: see Told */
    void *normed_for[MATRICES]; /* (FEW, stride) x times the weights of the norm before a matrix, but not yet times 1 / its root mean square, as it wants it
                                   (FOR_QKV: see also twin_at()) */
    unsigned long long *router_sum;   /* (FEW, n_layers, n_experts) in steps of ROUTER_STEP: integers, so that order does not matter; and how many blocks have
                                         added theirs. Of one token with gaps: see router_sum_of() */
    unsigned long long *square;       /* (FEW, n_layers, blocks) sum of the squares of each block's rows of x, published */
    unsigned long long *input_square; /* (FEW, n_layers + 1, MOST_WARPS) the same of what a layer begins with, or the head (by row), by the warps of one block */
    float *split_partial;             /* (FEW, n_kv_heads, SPLITS, 8, head_dim + 2): UNWRITTEN until a split is done, and again when it is read; of a token alone
                                         in turns, by layer */
    unsigned long long *barrier;      /* how often blocks have arrived at a barrier, all together */
    unsigned long long *ended;        /* (n_layers * PHASES + 2) when a block began, and ended each phase, in ns */
};

/* RoPE of a pair of dimensions. */
__device__ inline float2 turned(float2 x, float2 turn) { return {x.x * turn.x - x.y * turn.y, x.y * turn.x + x.x * turn.y}; }
/* Stores a pair of a key, or a value, for a token at `position`, whose part of the cache is `page`: rows r and r + 1 of the matrix of query, key and value. */
__device__ inline void store_key_or_value(const DecodeWork &w, int position, int page, int r, float2 x) {
    int d = w.head_dim, row = r - w.n_heads * d, i = row % d;
    bool values = row >= w.n_kv_heads * d;
    bf16 *to = cache_of(w, page, values, row / d % w.n_kv_heads);
    to[values ? value_place(d, position, i) : key_place(d, position, i)] = (bf16)x.x;
    to[values ? value_place(d, position, i + 1) : key_place(d, position, i + 1)] = (bf16)x.y;
}

/* The top_k largest of n logits, n >= top_k, in shared memory, which a warp may change: the lower number among equals. expert (top_k) receives them in
 * descending order, chosen (top_k) their logits. Of at most ONE_EACH lane e has expert e, and found(place) tells it, before all else, the place of its expert
 * among the chosen, top_k if it is none. Of more each lane offers the best of its own, and found is not called. */
constexpr int ONE_EACH = 32;
template <class Found> __device__ inline void route(float *logit, int n, int top_k, int lane, int *expert, float *chosen, Found found) {
    constexpr unsigned GONE = 0, NO_NUMBER = 1; /* below all keys of numbers */
    auto key_of = [](float x) { return isnan(x) ? NO_NUMBER : order_key(x); };
    unsigned *key = (unsigned *)logit, mine;
    if (n <= ONE_EACH) { /* without branches: with them a round took 300 clocks */
        int place = top_k;
        float x = lane < n ? logit[lane] : 0;
        mine = lane < n ? key_of(x) : GONE;
#pragma unroll 4
        for (int k = 0; k < top_k; k++) {
            unsigned equal = __ballot_sync(~0u, mine == __reduce_max_sync(~0u, mine));
            bool first = (equal & -equal) == 1u << lane;
            place = first ? k : place, mine = first ? GONE : mine;
        }
        found(place);
        if (place < top_k) expert[place] = lane, chosen[place] = x;
        __syncwarp();
        return;
    }
    int best;
    auto offer = [&] {
        mine = GONE, best = n;
#pragma unroll 1
        for (int e = lane; e < n; e += 32)
            if (key[e] > mine) mine = key[e], best = e;
    };
#pragma unroll 1
    for (int e = lane; e < n; e += 32) key[e] = key_of(logit[e]);
    offer();
#pragma unroll 1
    for (int k = 0; k < top_k; k++) {
        unsigned top = __reduce_max_sync(~0u, mine);
        int e = __reduce_min_sync(~0u, mine == top ? best : n);
        if (best == e) {
            expert[k] = e, chosen[k] = key_value(top), key[e] = mine = GONE;
            offer();
        }
        __syncwarp();
    }
}
/* Softmax over the logits of a token's choices, in descending order, in place. */
__device__ inline void weigh(float *chosen, int top_k, int lane) {
    float share = lane < top_k ? expf(chosen[lane] - chosen[0]) : 0, total = warp_sum(share);
    __syncwarp();
    if (lane < top_k) chosen[lane] = share / total;
}

/* RMSNorm's factor, from the sum of the squares. */
__device__ inline float norm_factor(const DecodeWork &w, float square) { return rsqrtf(fmaf(square, 1.f / w.dim, w.eps)); }

/* ---- words that say whether they are there ---- */

/* A word is written and read whole, so who finds in it that it is new needs no barrier. publish() says so by THERE, of a float; the router's sums, and the
 * experts', by how many have added to them. */
__device__ inline int counted(unsigned long long sum) { return (int)((sum + (1ull << (COUNTED - 1))) >> COUNTED); }
__device__ inline long long collected(unsigned long long sum) { return (long long)(sum - ((unsigned long long)counted(sum) << COUNTED)); }
constexpr unsigned long long THERE = 1ull << 32;
__device__ inline void publish(unsigned long long *to, float x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(to), "l"(THERE | __float_as_uint(x)) : "memory");
}
__device__ inline unsigned long long look(const unsigned long long *from) {
    unsigned long long word;
    asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(word) : "l"(from));
    return word;
}
/* Who finds something there may read what was written before it. */
__device__ inline unsigned long long look_behind(const unsigned long long *from) {
    unsigned long long word;
    asm volatile("ld.acquire.gpu.global.u64 %0,[%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

/* Activations have no room for such a sign. So before they are written, and again when all have read them, all their bits are ones, a NaN that no instruction
 * makes: see few.cuh's Told. */
constexpr uint32_t UNWRITTEN = ~0u;
/* Asks L2 for them, written or not: L1 may have what was there before. */
__device__ inline uint4 ask(const uint4 *from) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}
__device__ inline uint2 ask(const uint2 *from) {
    uint2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1},[%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
    return x;
}
__device__ inline float ask(const float *from) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0,[%1];" : "=f"(x) : "l"(from));
    return x;
}
/* Between one question of who waits and the next: questions hinder those who add what is waited for (notebooks/speed.md). Always true. */
__device__ inline bool rest() { return __nanosleep(40), true; }
/* Writes one. */
__device__ inline void tell(uint32_t *to, uint32_t x) { asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(to), "r"(x) : "memory"); }
__device__ inline void tell(float *to, float x) { tell((uint32_t *)to, __float_as_uint(x)); }
__device__ inline void tell(bf16 *to, bf16 x) { asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" ::"l"(to), "h"(__bfloat16_as_ushort(x)) : "memory"); }
/* The highest of three words for either half, as unsigned numbers: UNWRITTEN is above all others. */
__device__ inline uint32_t highest_halves(uint32_t a, uint32_t b, uint32_t c) { return __vimax3_u16x2(a, b, c); }
__device__ inline uint32_t highest_halves(uint32_t so_far, uint4 x) { return highest_halves(highest_halves(so_far, x.x, x.y), x.z, x.w); }
__device__ inline bool unwritten_half(uint32_t x) { return x >> 16 == 0xFFFF || (x & 0xFFFF) == 0xFFFF; }


