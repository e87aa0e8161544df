/* all_reduce.cuh: what several cards tell each other during a step: partial sums of what is added to the residual
 * stream, the keys that each has drawn, and all logits if somebody wants them.
 *
 * A card writes into its peers' inboxes. An empty word is all ones (sums; no instruction makes this NaN) or zero (keys,
 * counted sums); any other value has arrived, and the reader empties it again. Reads and writes are volatile: each goes
 * to memory, whole. Two inboxes alternate, so a card never overwrites what a peer still reads: to come to the next but
 * one, it needs what the peer sends to the next, in a later kernel. A step has an even number of sums and begins with
 * inbox 0; CUDA graphs rely on that. */
#pragma once
#include "gpus/gpus.h"

#ifdef __CUDACC__
#include <cuda.h>
#include <dlfcn.h>
#endif

/* Where a card has what lies at `mine` here. */
template <class T> __device__ inline T *on_card(const Work &w, int card, T *mine) {
    return (T *)((uint8_t *)w.link.logits[card] + ((uint8_t *)mine - (uint8_t *)w.logits));
}
/* Which of the peers' places is card `from`'s, on card `to`. */
__device__ inline int place_of_peer(int from, int to) { return from - (from > to); }
template <class T> __device__ inline void send(T *to, T x) { *(volatile T *)to = x; }
template <class T> __device__ inline T received(const T *from) { return *(const volatile T *)from; }

/* Waits until there() is true. If the host says that another card has failed, or after CARD_SECONDS, the step counts
 * for nothing: collect fails. */
template <class There> __device__ inline void await(const Work &w, There there) {
    uint64_t begun = 0, asked = 0;
    for (int i = 1; !there(); i++) {
        if (i % 64) continue;
        if (received(w.link.dead)) return;
        const uint64_t now = nanoseconds();
        if (!begun) begun = asked = now;
        if (now - asked < 1000000) continue;
        asked = now; /* the host's memory is far: only now and then */
        if (received(w.late) || now - begun > CARD_SECONDS * 1000000000ull)
            send(w.link.dead, 1), send(w.late, (int)LATE_CARD);
    }
}

struct Wide { /* a pair of floats on its way */
    typedef unsigned long long Word;
    __device__ static Word pack(float2 x) { return (Word)__float_as_uint(x.y) << 32 | __float_as_uint(x.x); }
    __device__ static float2 unpack(Word x) {
        return {__uint_as_float((unsigned)x), __uint_as_float((unsigned)(x >> 32))};
    }
    __device__ static bool there(Word x) { return (unsigned)x != ~0u && (unsigned)(x >> 32) != ~0u; }
};
struct Narrow { /* of bf16 */
    typedef uint32_t Word;
    __device__ static Word pack(float2 x) { return ::pack(x.x, x.y); }
    __device__ static float2 unpack(Word x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000)}; }
    __device__ static bool there(Word x) { return x != ~0u; }
};
/* Waits for the word that a peer writes to `from`, whose place is `empty` before and after. */
template <class Word> __device__ inline Word receive(const Work &w, Word *from, Word empty) {
    Word x;
    await(w, [&] { return (x = received(from)) != empty; });
    *from = empty;
    return x;
}

/* sum = the sum of all cards' `sum`, in their order. A block has row blockIdx.x of gridDim.x. */
template <class Pair> __device__ inline void all_reduce_as(const Work &w, Pairs &sum) {
    typedef typename Pair::Word Word;
    const Link &k = w.link;
    auto row_from = [&](int from, int to) {
        Word *inbox = (Word *)(k.inbox + k.parity * k.inbox_bytes);
        return on_card(w, to, inbox) + ((size_t)place_of_peer(from, to) * gridDim.x + blockIdx.x) * (w.dim / 2);
    };
    Pairs mine;
    for_pairs(w.dim, [&](int i, int j) {
        const Word word = Pair::pack(sum[j]);
        for (int c = 0; c < k.cards; c++)
            if (c != k.card) send(row_from(k.card, c) + i, word);
        mine[j] = Pair::unpack(word), sum[j] = {}; /* rounded alike on all cards */
    });
    for (int c = 0; c < k.cards; c++) {
        Word *from = row_from(c, k.card), word[MAX_PAIRS];
        if (c != k.card)
            await(w, [&] {
                bool all = true;
                for_pairs(w.dim, [&](int i, int j) { word[j] = received(from + i); });
                for_pairs(w.dim, [&](int, int j) { all &= Pair::there(word[j]); });
                return all;
            });
        for_pairs(w.dim, [&](int i, int j) {
            const float2 x = c == k.card ? mine[j] : Pair::unpack(word[j]);
            if (c != k.card) from[i] = (Word)~0ull;
            sum[j] = {sum[j].x + x.x, sum[j].y + x.y};
        });
    }
}
__device__ inline void all_reduce(const Work &w, Pairs &sum) {
    if (w.link.parity < 0) return; /* NCCL has done it */
    w.link.rounds &&gridDim.x > MAX_FLOAT_TOKENS ? all_reduce_as<Narrow>(w, sum) : all_reduce_as<Wide>(w, sum);
}
__device__ inline unsigned long long largest_key(const Work &w, int row, unsigned long long mine) {
    const Link &k = w.link;
    unsigned long long *inbox = k.keys + (size_t)k.parity * k.cards * k.key_rows + row;
    for (int c = 0; c < k.cards; c++) send(on_card(w, c, inbox + (size_t)k.card * k.key_rows), mine);
    for (int c = 0; c < k.cards; c++) mine = max(mine, receive(w, inbox + (size_t)c * k.key_rows, 0ull));
    return mine;
}

/* For the annex on two cards. A condition chooses the other: to index link.logits would need local memory. */
template <class Word> __device__ inline Word *on_other_card(const Work &w, Word *mine) {
    const float *logits = w.link.card ? w.link.logits[0] : w.link.logits[1];
    return (Word *)((uint8_t *)logits + ((uint8_t *)mine - (uint8_t *)w.logits));
}
__device__ inline float2 add_other_card(const Work &w, unsigned long long *inbox, float2 mine) {
    send(on_other_card(w, inbox), Wide::pack(mine));
    const float2 other = Wide::unpack(receive(w, inbox, ~0ull));
    return {mine.x + other.x, mine.y + other.y};
}
__device__ inline void send_count(const Work &w, unsigned long long *inbox, unsigned long long mine) {
    send(on_other_card(w, inbox), mine);
}
/* Two neighbouring sums of the other card, of those that are wanted. Both are read at once: a read takes long. */
__device__ inline void receive_counts(const Work &w, unsigned long long *inbox, const bool (&wanted)[2],
                                      unsigned long long (&count)[2]) {
    await(w, [&] {
        for (int i = 0; i < 2; i++) count[i] = wanted[i] ? received(inbox + i) : 1;
        return count[0] && count[1];
    });
    for (int i = 0; i < 2; i++)
        if (wanted[i]) inbox[i] = 0;
}

/* All cards wait for each other; what they wrote to each other's memory before is there. One warp. */
__global__ void barrier(Work w) {
    const Link &k = w.link;
    wait_previous();
    const unsigned long long number = *k.barriers + 1;
    __threadfence_system();
    const bool mine = (int)threadIdx.x < k.cards;
    if (mine) send(on_card(w, threadIdx.x, k.arrived + k.card), number);
    __syncwarp();
    if (mine) await(w, [&] { return received(k.arrived + threadIdx.x) >= number; });
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x == 0) *k.barriers = number;
    launch_next();
}
/* Sends the logits that this card has to all others. A block has a part of a row (blockIdx.y). */
__global__ void send_logits(Work w) {
    launch_next();
    wait_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float *logit = w.logits + (size_t)blockIdx.y * w.vocab + w.first_id + i;
    for (int c = 0; c < w.link.cards && i < w.ids; c++)
        if (c != w.link.card) *on_card(w, c, logit) = *logit;
}
/* Zeros where other cards have logits. A block has a part of a row (blockIdx.y). */
__global__ void clear_logits(Work w) {
    launch_next();
    wait_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < w.vocab && (i < w.first_id || i >= w.first_id + w.ids)) w.logits[(size_t)blockIdx.y * w.vocab + i] = 0;
}
/* What add_results() would add, to w.link.reduced, for NCCL. A block a token. */
__global__ void __launch_bounds__(1024) sum_for_nccl(Work w, int top_k, const float *weights) {
    Pairs sum = {};
    launch_next();
    wait_previous();
    sum_results(w, sum, top_k, weights);
    float2 *to = (float2 *)(w.link.reduced + (size_t)blockIdx.x * w.dim);
    for_pairs(w.dim, [&](int i, int k) { to[i] = sum[k]; });
}

namespace gpus {
bool begin_sum(const Pass *a, Work *w, int *top_k, const float **weights, Error *e) {
    Link *k = &w->link;
    if (k->cards == 1) return true;
    k->parity = -1;
    if (a->gpu->rehearses) return true;
    k->parity = (int)(a->gpu->reductions++ % 2);
    if (!k->comm || (k->peers && a->tokens * (k->cards - 1) <= MAX_PEER_ROWS)) return true;
    CUDA(launch(a->gpu, sum_for_nccl, a->tokens, row_threads(w->dim), 0, *w, *top_k, *weights));
    k->parity = -1, *top_k = 1, *weights = NULL;
    return nccl_all_reduce(a->gpu, k->reduced, w->down, (size_t)a->tokens * w->dim, e);
}
bool load_kernels(Error *e) {
#ifdef __CUDACC__ /* else tests run them as C++ */
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto find = [&](auto *to, const char *name) {
        return (*(void **)to = driver ? dlsym(driver, name) : NULL) != NULL;
    };
    decltype(&cuFuncGetModule) module_of;
    decltype(&cuModuleGetFunctionCount) count;
    decltype(&cuModuleEnumerateFunctions) enumerate;
    decltype(&cuFuncLoad) load;
    cudaFunction_t any;
    CUmodule module;
    unsigned n = 0;
    if (!find(&module_of, "cuFuncGetModule") || !find(&count, "cuModuleGetFunctionCount") ||
        !find(&enumerate, "cuModuleEnumerateFunctions") || !find(&load, "cuFuncLoad"))
        return fail(e, NO_GPU, "the driver is too old to share a model among GPUs: update it");
    CUDA(cudaGetFuncBySymbol(&any, (const void *)draw));
    int error = module_of(&module, any);
    if (!error) error = count(&n, module);
    std::vector<CUfunction> kernels(n);
    if (!error) error = enumerate(kernels.data(), n, module);
    for (unsigned i = 0; i < n && !error; i++) error = load(kernels[i]);
    return !error || fail(e, GPU_FAULT, "CUDA could not load the kernels: error %d", error);
#endif
    return true;
}
bool gather_logits(Pass *a, int first, int n, Error *e) {
    const Gpu *gpu = a->gpu;
    Work &w = a->w;
    if (w.link.cards == 1) return true;
    w.link.parity = first / gpu->logit_rows % 2;
    w.first_id = gpu->device.first_id, w.ids = gpu->device.head.rows;
    if (w.link.peers && !a->adjusted && !a->filtered && !a->keep && !gpu->limits.tap) return true;
    const Work own = w;
    w.first_id = 0, w.ids = w.vocab;
    if (!w.link.peers) {
        CUDA(launch(gpu, clear_logits, dim3((w.vocab + 255) / 256, n), 256, 0, own));
        return nccl_all_reduce(gpu, w.logits, w.logits, (size_t)n * w.vocab, e);
    }
    CUDA(launch(gpu, barrier, 1, 32, 0, own)); /* nobody reads the last logits any more */
    CUDA(launch(gpu, send_logits, dim3((own.ids + 255) / 256, n), 256, 0, own));
    CUDA(launch(gpu, barrier, 1, 32, 0, own));
    return true;
}
} // namespace gpus
