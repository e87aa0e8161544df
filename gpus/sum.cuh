/* sum.cuh: what several cards tell each other during a step: the sums of what each adds to the residual stream, the
 * keys that each has drawn, and all logits if somebody wants them.
 *
 * A card writes to its peers' memory, where a word shows by itself that it has come: before and after, all its bits are
 * ones (sums; a NaN that no instruction makes) or zeros (keys). Reads and writes are volatile, so each goes to memory,
 * whole. Sums take two slots in turn: nobody sends to a slot again before its receiver has sent to the other one, in a
 * later kernel. */
#pragma once

#include "gpus/gpus.h"

/* Where a card has what lies at `mine` here. */
template <class T> __device__ inline T *on_card(const Work &w, int card, T *mine) {
    return (T *)((uint8_t *)w.link.logits[card] + ((uint8_t *)mine - (uint8_t *)w.logits));
}
/* Which of the peers' places is card `from`'s, on card `to`. */
__device__ inline int place_of_peer(int from, int to) { return from - (from > to); }
template <class T> __device__ inline void send(T *to, T x) { *(volatile T *)to = x; }
template <class T> __device__ inline T received(const T *from) { return *(const volatile T *)from; }

/* Waits until there() is true. After five seconds the step counts for nothing: collect fails. */
template <class There> __device__ inline void await(const Work &w, There there) {
    const uint64_t second = 1000000000, begun = there() ? 0 : nanoseconds();
    for (uint64_t waited = 0; begun && !there(); waited = nanoseconds() - begun)
        if (waited > 5 * second || (waited > second / 100 && received(w.late))) {
            send(w.late, (int)LATE_CARD);
            return;
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
/* sum = the sum of all cards' `sum`, in their order. A block has row blockIdx.x of `rows`. */
template <class Pair>
__device__ inline void add_cards_as(const Work &w, Pairs &sum, typename Pair::Word *box, int rows) {
    typedef typename Pair::Word Word;
    const Link &k = w.link;
    auto row_from = [&](int from, int to) {
        const size_t row = ((size_t)k.slot * (k.cards - 1) + place_of_peer(from, to)) * rows + blockIdx.x;
        return on_card(w, to, box) + row * (w.dim / 2);
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
/* The annex of two cards: a word for the other card's `box`, and the one that comes into this card's, which holds
 * `empty` before and after. */
template <class Word> __device__ inline void give(const Work &w, Word *box, Word x) {
    const float *there = w.link.card ? w.link.logits[0] : w.link.logits[1];
    send((Word *)((uint8_t *)there + ((uint8_t *)box - (uint8_t *)w.logits)), x);
}
template <class Word> __device__ inline Word take(const Work &w, Word *box, Word empty) {
    Word x;
    await(w, [&] { return (x = received(box)) != empty; });
    *box = empty;
    return x;
}

__device__ inline void add_cards(const Work &w, Pairs &sum) {
    if (w.link.slot < 0) return; /* NCCL has done it */
    if (w.link.narrow && gridDim.x > MOST_WIDE)
        add_cards_as<Narrow>(w, sum, w.link.narrow, w.link.rows);
    else
        add_cards_as<Wide>(w, sum, w.link.wide, w.link.wide_rows);
}
__device__ inline unsigned long long best_of_cards(const Work &w, int row, unsigned long long mine) {
    const Link &k = w.link;
    unsigned long long *box = k.best + (size_t)k.slot * k.cards * k.best_rows + row;
    for (int c = 0; c < k.cards; c++) send(on_card(w, c, box + (size_t)k.card * k.best_rows), mine);
    for (int c = 0; c < k.cards; c++) {
        unsigned long long *from = box + (size_t)c * k.best_rows, key = 0;
        await(w, [&] { return (key = received(from)) != 0; });
        *from = 0;
        mine = max(mine, key);
    }
    return mine;
}

/* All cards wait for each other; what they wrote to each other's memory before is there. One warp. */
__global__ void meet(Work w) {
    const Link &k = w.link;
    wait_previous();
    const unsigned long long number = *k.meetings + 1;
    __threadfence_system();
    const bool mine = (int)threadIdx.x < k.cards;
    if (mine) send(on_card(w, threadIdx.x, k.met + k.card), number);
    __syncwarp();
    if (mine) await(w, [&] { return received(k.met + threadIdx.x) >= number; });
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x == 0) *k.meetings = number;
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
/* What add_results() would add, to w.link.sum, for NCCL. A block a token. */
__global__ void __launch_bounds__(1024) sum_for_nccl(Work w, int top_k, const float *weights) {
    Pairs sum = {};
    launch_next();
    wait_previous();
    sum_results(w, sum, top_k, weights);
    float2 *to = (float2 *)(w.link.sum + (size_t)blockIdx.x * w.dim);
    for_pairs(w.dim, [&](int i, int k) { to[i] = sum[k]; });
}

namespace gpus {
bool begin_sum(const Pass *a, Work *w, int *top_k, const float **weights, Error *e) {
    Link *k = &w->link;
    if (k->cards == 1) return true;
    k->slot = (int)(a->gpu->sums++ % 2);
    if (!k->nccl || (k->peers && a->tokens * (k->cards - 1) <= MOST_SENT)) return true;
    CUDA(launch(a->gpu, sum_for_nccl, a->tokens, row_threads(w->dim), 0, *w, *top_k, *weights));
    k->slot = -1, *top_k = 1, *weights = NULL;
    return nccl_sum(a->gpu, k->sum, w->down, (size_t)a->tokens * w->dim, e);
}
bool share_logits(Pass *a, int first, int n, Error *e) {
    const Gpu *gpu = a->gpu;
    Work &w = a->w;
    if (w.link.cards == 1) return true;
    w.link.slot = first / gpu->logit_rows % 2;
    w.first_id = gpu->device.first_id, w.ids = gpu->device.head.rows;
    if (w.link.peers && !a->adjusted && !a->filtered && !a->keep && !gpu->limits.tap) return true;
    const Work own = w;
    w.first_id = 0, w.ids = w.vocab;
    if (!w.link.peers) {
        CUDA(launch(gpu, clear_logits, dim3((w.vocab + 255) / 256, n), 256, 0, own));
        return nccl_sum(gpu, w.logits, w.logits, (size_t)n * w.vocab, e);
    }
    CUDA(launch(gpu, meet, 1, 32, 0, own)); /* nobody reads the last logits any more */
    CUDA(launch(gpu, send_logits, dim3((own.ids + 255) / 256, n), 256, 0, own));
    CUDA(launch(gpu, meet, 1, 32, 0, own));
    return true;
}
} // namespace gpus
