/* work.cuh: what the kernels of few.cuh and many.cuh share: the description of a step, the buffers, and the small device
 * functions. */
#ifndef WORK_CUH
#define WORK_CUH

#include "card.cuh"

constexpr int FEW = 16;    /* tokens of a step up to which weights are streamed */
constexpr int SPLITS = 16; /* blocks that share one key/value head's context */
constexpr int MOST_WARPS = 32; /* of a block */
/* Of sums that are integers, so that order does not matter. What an expert adds must be below 2^29 / top_k^2 (2^25 of four). */
constexpr float ROUTER_STEP = 0x1p-28f, EXPERT_STEP = 0x1p-24f;
constexpr int COUNTED = 56; /* bit of such a sum from which on it says how many have added to it, ... */
constexpr int MOST_COUNTED = (1 << (64 - COUNTED)) - 1; /* ... at most so many */
constexpr float LOG2E = 1.4426950408889634f;

/* ---- small device functions ---- */

/* Programmatic dependent launch: a kernel may begin while the one before it ends; what it reads of that one's results it
 * reads behind wait_previous(). Before Hopper a kernel begins when the one before has ended. */
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

/* c += a b for a (16, 16) by row, b (16, 8) by column, both bf16: lane 4g + t holds of a rows g and g + 8, of b column g, of
 * both the four inner indices that belong to t; of c it holds rows g, g + 8 and columns 2t, 2t + 1. Which inner index is
 * which does not matter as long as a and b agree: here t has eight neighbours, taken four at a time. */
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma_eight(float (&c)[4], uint4 row, uint4 row8, uint4 column) { /* eight inner indices a lane */
    mma(c, row.x, row8.x, row.y, row8.y, column.x, column.y);
    mma(c, row.z, row8.z, row.w, row8.w, column.z, column.w);
}

__device__ inline uint32_t pack(float low, float high) {
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&v);
}

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

/* 16 bytes to shared memory. What was asked for before copies_end() is there after copies_done<n>() if at most n further
 * copies_end() followed. */
__device__ inline void copy_16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ inline void copy_4(void *to, const void *from, bool real) { /* or zeros */
    asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(real ? 4 : 0) : "memory");
}
__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int BUT> __device__ inline void copies_done() { asm volatile("cp.async.wait_group %0;" ::"n"(BUT) : "memory"); }

/* ---- copies that run on their own ---- */

/* Copy engine and tensor cores have ways of their own to shared memory (proxies). What was read or written in the usual way, and what they do behind it, is
 * ordered by this fence (PTX ISA, "Async proxy"). */
__device__ inline void fence_proxies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* A barrier in shared memory (mbarrier): `full` ones complete when a copy has arrived, `empty` ones when all readers have, few.cuh's
 * gates when all have for whom others wait; its `hold` is closed in every other phase. On Hopper the copy engine takes whole rows; before it the lanes of a
 * producer copy 16 bytes at a time. */
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
#if __CUDA_ARCH__ >= 900
                     "mbarrier.try_wait.parity.shared::cta.b64 there,[%0],%1;\n"
#else
                     "mbarrier.test_wait.parity.shared.b64 there,[%0],%1;\n"
#endif
                     "@!there bra again;\n}" ::"r"(address()), "r"(parity)
                     : "memory");
    }
    /* A thread arrives when what it has asked for by cp.async is there. */
    __device__ void copies_arrive() { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory"); }
    /* Barriers are there for the whole block, and for the copy engine, behind the next __syncthreads(). */
    static __device__ void show_init() {
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
#if __CUDA_ARCH__ >= 900
    static constexpr int ARRIVALS = 1; /* of a copy() */
#else
    static constexpr int ARRIVALS = 32;
#endif
    /* Hopper only: arrives, and says how many bytes copy_row() will bring. */
    __device__ void expect_bytes(int bytes) {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
    }
    /* Hopper only: asks for a row, a multiple of 16 bytes. */
    __device__ void copy_row(uint8_t *to, const uint8_t *from, int bytes) {
#if __CUDA_ARCH__ >= 900
        uint64_t once; /* what is read once need not push out of L2 what is read by all blocks */
        asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(once));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(to)),
                     "l"(from), "r"(bytes), "r"(address()), "l"(once)
                     : "memory");
#endif
    }
    /* Asks for rows of `bytes` (a multiple of 16), `from_pitch` apart, to lie `to_pitch` apart. All lanes of a warp call it. */
    __device__ void copy(uint8_t *to, int to_pitch, const uint8_t *from, size_t from_pitch, int rows, int bytes, int lane) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) expect_bytes(rows * bytes);
        __syncwarp();
        if (lane < rows) copy_row(to + lane * to_pitch, from + lane * from_pitch, bytes);
#else
#pragma unroll 4
        for (int at = lane * 16; at < bytes; at += 512)
#pragma unroll
            for (int row = 0; row < rows; row++) copy_16(to + row * to_pitch + at, from + row * from_pitch + at);
        copies_arrive();
#endif
    }
};

__device__ inline float warp_sum(float x) {
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

__device__ inline int sum_to(int x, int lane) { /* of this lane and those before it */
    for (int o = 1; o < 32; o *= 2) {
        int add = __shfl_up_sync(~0u, x, o);
        if (lane >= o) x += add;
    }
    return x;
}

/* The first `threads` of a block wait for each other; who waits at the same time with others has another number. */
template <int NUMBER = 1> __device__ inline void sync_threads(int threads) { asm volatile("bar.sync %0,%1;" ::"n"(NUMBER), "r"(threads) : "memory"); }

/* Sum over the first `threads` of a block, the same in every thread and every run. `scratch` holds 33 floats. */
__device__ inline float block_sum(float x, float *scratch, int threads) {
    int lane = threadIdx.x % 32;
    x = warp_sum(x);
    sync_threads(threads);
    if (lane == 0) scratch[threadIdx.x / 32] = x;
    sync_threads(threads);
    return warp_sum(lane < threads / 32 ? scratch[lane] : 0);
}

/* ---- one step, as the card sees it ---- */

struct Step { /* device arrays, filled for each step; of few tokens they have an address of their own, where pages stay from step to step */
    int4 *token; /* (tokens) the token, or -1: the one that its slot drew last; the slot; its place among all pages' positions */
    int *seq, *position;         /* (tokens) */
    int *slot, *last;            /* (seqs) its last token, if one is to be drawn from it */
    Sampling *how;               /* (seqs) */
    int *row;                    /* (rows) tokens whose logits are wanted */
    int *tile;                   /* (tiles, 2) first token and number of tokens of one sequence: attention takes them at once */
    int *header;                 /* [0]: pages of a row of `page` */
    int *page;                   /* (seqs, header[0]) */
};

/* A step of few tokens without its pages, on the way to the card: what lies from Step::how to Step::page. */
struct Posted {
    static constexpr int BYTES = FEW * (sizeof(Sampling) + sizeof(int4) + 7 * sizeof(int)) + 4 * sizeof(int); /* see step_at() */
    static_assert(sizeof(Sampling) % 16 == 0 && BYTES % 16 == 0, "copied by 16 bytes");
    uint4 word[BYTES / 16];
    bool there;
    __device__ int4 token(int t) const { return ((const int4 *)word)[FEW * sizeof(Sampling) / 16 + t]; }
};

enum { FOR_QKV, FOR_UP, FOR_HEAD, MATRICES }; /* that follow a norm */

struct Work { /* everything a kernel may need; passed by value */
    int dim, ffn_dim, vocab, n_layers, n_heads, n_kv_heads, head_dim, n_experts, top_k, layer;
    float eps, act_limit, rope_scale;
    Act act;
    bf16 *cache;               /* (pages, n_layers, 2, n_kv_heads, head_dim * PAGE): see key_place, value_place */
    int *page_token;           /* (pages, PAGE) */
    const float2 *turn;        /* (context, head_dim / 2) cos and sin */
    float *x;                  /* (tokens, dim) residual stream; this, q, attn and act_out: but see Told, attn also twin_at() */
    unsigned long long *expert_sum; /* few: (FEW, dim) what chosen experts have found, in steps of EXPERT_STEP, and how many; 0 but in phase down */
    void *q, *attn, *act_out;  /* (tokens, n_heads * head_dim), (tokens, attn_pitch), (tokens * top_k, act_pitch): bf16, or float for
                                  F32 weights; what lies between the width and the pitch is 0. What experts read by wgmma, act_out
                                  and then normed, has its columns in the order of fp4_column (hopper.cuh) */
    int attn_pitch, act_pitch;
    float act_lift;            /* few: factor of act_out */
    float *told;               /* few, a token alone: see Told */
    void *normed_for[MATRICES]; /* few: (FEW, stride) x times the weights of the norm before a matrix, but not yet times 1 / its root mean square, as it wants
                                   it (FOR_QKV: see also twin_at()); 0 behind dim */
    float *qkv, *down;         /* many: (tokens, all rows), (tokens * top_k, dim) */
    void *normed;              /* many: (tokens, normed_pitch), 0 behind dim */
    int normed_pitch;
    unsigned long long *router_sum; /* few: (FEW, n_layers, n_experts) in steps of ROUTER_STEP: integers, so that order does not matter; and how many
                                       blocks have added theirs. Of one token with gaps: see router_sum_of() */
    unsigned long long *square; /* few: (FEW, n_layers, blocks) sum of the squares of each block's rows of x, published */
    unsigned long long *input_square; /* few: (FEW, n_layers + 1, MOST_WARPS) the same of what a layer begins with, or the head (by row), by the warps of
                                         one block */
    int *expert;               /* (tokens, top_k) */
    float *weight;             /* (tokens, top_k) */
    float *partial;            /* few: (FEW, n_kv_heads, SPLITS, 8, head_dim + 2): UNWRITTEN until a split is done, and again when it is read; of a token
                                  alone in turns, by layer */
    unsigned long long *barrier; /* few: how often blocks have arrived at a barrier, all together */
    unsigned long long *experts_read; /* by steps of several tokens: see Backend::experts_read */
    unsigned long long *ended;   /* few: (n_layers * PHASES + 2) when a block began, and ended each phase, in ns */
    int *list, *listed;        /* many: (n_experts, tokens * top_k) choices by expert, and how many */
    float *logits;             /* (FEW, vocab) */
    float *floor;              /* (FEW) what top-k, top-p and min-p leave of the scaled logits */
    unsigned long long *best;  /* (FEW) */
    int *drawing;              /* (FEW) blocks that have drawn */
    int *drawn, *result;       /* (slots); (seqs) in the host's memory */
    uint32_t *seen;            /* (FEW, vocab / 32) for the repetition penalty */
};

/* Elements of a page; where a head's keys or values of one begin. */
__host__ __device__ inline size_t page_size(const Work &w) { return (size_t)w.n_layers * 2 * w.n_kv_heads * w.head_dim * PAGE; }
__host__ __device__ inline bf16 *cache_of(const Work &w, int page, int values, int head) {
    return w.cache + page * page_size(w) + (size_t)((w.layer * 2 + values) * w.n_kv_heads + head) * w.head_dim * PAGE;
}
/* Where, from there, dimension i of a position's key or value lies. SLAB_KEYS positions lie together: keys 32 dimensions at a time (the last
 * time what is left), position by position; values dimension by dimension. So what a warp loads for mma is whole lines. */
constexpr int SLAB_KEYS = 16;
__host__ __device__ inline int key_place(int head_dim, int position, int i) {
    int at = position % PAGE;
    return at / SLAB_KEYS * SLAB_KEYS * head_dim + i / 32 * 32 * SLAB_KEYS + at % SLAB_KEYS * min_of(32, head_dim - i / 32 * 32) + i % 32;
}
__host__ __device__ inline int value_place(int head_dim, int position, int i) {
    int at = position % PAGE;
    return at / SLAB_KEYS * SLAB_KEYS * head_dim + i * SLAB_KEYS + at % SLAB_KEYS;
}
__device__ inline int page_of(const Step &s, int seq, int position) { return s.page[(size_t)seq * s.header[0] + position / PAGE]; }

/* The activation; quick functions are exact enough for what is rounded to bf16. */
template <typename Out = float> __device__ inline float swiglu(const Work &w, float gate, float up) {
    bool clamped = w.act != SWIGLU;
    if (clamped) gate = fminf(gate, w.act_limit), up = fmaxf(fminf(up, w.act_limit), -w.act_limit) + 1;
    float x = clamped ? -1.702f * gate : -gate;
    return (sizeof(Out) == 2 ? __fdividef(gate, 1 + __expf(x)) : gate / (1 + expf(x))) * up;
}

/* RoPE of a pair of dimensions. */
__device__ inline float2 turned(float2 x, float2 turn) { return {x.x * turn.x - x.y * turn.y, x.y * turn.x + x.x * turn.y}; }
/* Stores a pair of a key, or a value, for a token at `position`, whose part of the cache is `page`: rows r and r + 1 of the matrix of query, key and value. */
__device__ inline void store_key_or_value(const Work &w, int position, int page, int r, float2 x) {
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
__device__ inline float norm_factor(const Work &w, float square) { return rsqrtf(fmaf(square, 1.f / w.dim, w.eps)); }

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

/* ---- attention ---- */

/* Attention of token t and query head h for any head size, by the first `threads` of a block (at least head_dim of them), without tensor
 * cores: dimension threadIdx.x of the result. memory holds head_dim + threads + 33 floats. */
template <typename Out> __device__ float attend_plain(const Work &w, const Step &s, const Block &l, int t, int h, float *memory, int threads) {
    int d = w.head_dim, kv = h / (w.n_heads / w.n_kv_heads), p = s.position[t], seq = s.seq[t];
    int first = l.window && p >= l.window ? p - l.window + 1 : 0;
    float *q = memory, *share = memory + d, *scratch = share + threads;
    sync_threads(threads);
    for (int i = threadIdx.x; i < d; i += threads) q[i] = (float)((const Out *)w.q)[((size_t)t * w.n_heads + h) * d + i];
    float most = l.sinks ? l.sinks[h] : -INFINITY, total = l.sinks ? 1 : 0, sum = 0; /* sum: of dimension threadIdx.x */
    sync_threads(threads);
    for (int base = first; base <= p; base += threads) {
        int j = base + threadIdx.x;
        float score = -INFINITY;
        if (j <= p) {
            const bf16 *keys = cache_of(w, page_of(s, seq, j), 0, kv);
            score = 0;
            for (int i = 0; i < d; i++) score += q[i] * (float)keys[key_place(d, j, i)];
            score *= rsqrtf(d);
        }
        float now = score;
        for (int o = 16; o; o >>= 1) now = fmaxf(now, __shfl_xor_sync(~0u, now, o));
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = now;
        sync_threads(threads);
        for (int i = 0; i < threads / 32; i++) now = fmaxf(now, scratch[i]);
        now = fmaxf(now, most);
        float mine = exp2f((score - now) * LOG2E), factor = exp2f((most - now) * LOG2E);
        share[threadIdx.x] = mine;
        total = total * factor + block_sum(mine, scratch, threads);
        sum *= factor;
        most = now;
        for (int k = 0; threadIdx.x < d && k < threads && base + k <= p; k++)
            sum += share[k] * (float)cache_of(w, page_of(s, seq, base + k), 1, kv)[value_place(d, base + k, threadIdx.x)];
        sync_threads(threads);
    }
    return sum / total;
}

#endif
