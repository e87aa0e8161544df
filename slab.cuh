/* slab.cuh: few.cuh's attention: 16 keys at a time in a warp's registers, and how what warps found is put together. */
#ifndef SLAB_CUH
#define SLAB_CUH

#include "work.cuh"

/* 16 keys and values of a page, as mma wants them: column n of tile j is key 4 (n / 2) + 2 j + n % 2, so that a lane's shares
 * belong to four neighbouring keys and meet the values, which lie by dimension, without moving. */
constexpr int SLABS = PAGE / SLAB_KEYS;
template <int D> struct Slab {
    uint4 key[2][D / 32];
    uint2 value[D / 8];
    template <bool SHARED = false> __device__ void load(const bf16 *keys, const bf16 *values, int i, int lane) { /* the i-th of a page */
        int g = lane / 4, t = lane % 4;
        auto read = [](auto from) { return SHARED ? *from : __ldcg(from); };
        keys += key_place(D, i * SLAB_KEYS + g / 2 * 4 + g % 2, t * 8);
        values += value_place(D, i * SLAB_KEYS + t * 4, g);
        for (int j = 0; j < 2; j++)
            for (int c = 0; c < D / 32; c++) key[j][c] = read((const uint4 *)(keys + key_place(D, 2 * j, c * 32)));
        for (int d = 0; d < D / 8; d++) value[d] = read((const uint2 *)(values + value_place(D, 0, d * 8)));
    }
    /* Puts in a key and its value as key `at` of this slab, unless that is -1. Lane 4g + t brings of the key dimensions 8t to 8t + 7 of each 32, of the value g
     * and its neighbour of each eight: see told_place(). */
    __device__ void replace(int at, const uint4 (&its_key)[D / 32], const uint4 (&its_value)[D / 32], int lane) {
        int g = lane / 4, t = lane % 4;
        for (int j = 0; j < 2; j++)
            for (int c = 0; c < D / 32; c++)
                if (g / 2 * 4 + g % 2 + 2 * j == at) key[j][c] = its_key[c];
        /* which bytes of what was there and of a pair: one of its halves as the lower or upper half */
        const unsigned all = 0x3210, how = at % 2 ? g % 2 ? 0x7610 : 0x5410 : g % 2 ? 0x3276 : 0x3254;
        const bool mine = at >= 0 && at / 4 == t;
        for (int d = 0; d < D / 8; d++) {
            uint32_t pair = (&its_value[d / 4].x)[d % 4];
            value[d].x = __byte_perm(value[d].x, pair, mine && at % 4 < 2 ? how : all);
            value[d].y = __byte_perm(value[d].y, pair, mine && at % 4 > 1 ? how : all);
        }
    }
};

/* A warp's state of softmax(q k / sqrt(d)) v for the at most 8 query heads of one token that share a key/value head, after the keys seen so far
 * (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): lane 4g + t has head g. */
template <int D> struct SlabState {
    float most = LEAST, total = 0, sum[D / 8][2] = {}; /* dimensions 8i + 2t, + 1 */
    static constexpr float LEAST = -1e30f;             /* of nothing seen yet */

    __device__ void add(const Slab<D> &slab, const uint4 (&q)[D / 32], int base, int first, int last, float scale, int lane) {
        float score[2][4] = {}, now = most;
        int t = lane % 4;
        uint32_t share[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int c = 0; c < D / 32; c++) mma_eight(score[j], q[c], uint4{}, slab.key[j][c]);
            for (int i = 0; i < 2; i++) {
                int p = base + 4 * t + 2 * j + i;
                score[j][i] = p >= first && p <= last ? score[j][i] * scale : -INFINITY;
                now = fmaxf(now, score[j][i]);
            }
        }
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
        float factor = exp2f(most - now);
        most = now;
        total *= factor;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float a = exp2f(score[j][0] - now), b = exp2f(score[j][1] - now);
            total += a + b;
            share[j] = pack(a, b);
        }
        int behind = base + 4 * t - last; /* what lies behind the end may be a NaN, and 0 times that is one */
        uint32_t keep = behind < 0 ? ~0u : behind == 0 ? 0xFFFF : 0, keep2 = behind < -2 ? ~0u : behind == -2 ? 0xFFFF : 0;
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
            float c[4] = {sum[d][0] * factor, sum[d][1] * factor, 0, 0};
            mma(c, share[0], 0, share[1], 0, slab.value[d].x & keep, slab.value[d].y & keep2);
            sum[d][0] = c[0], sum[d][1] = c[1];
        }
    }
    __device__ void store(float *to, int lane) { /* to (2 + D) of this lane's head: most, total, sum */
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        to[0] = most;
        to[1] = total;
        for (int d = 0; d < D / 8; d++)
            for (int i = 0; i < 2; i++) to[2 + d * 8 + lane % 4 * 2 + i] = sum[d][i];
    }
};

/* The states that warps, or splits, have stored of one head: two dimensions, 2 pair and 2 pair + 1, of what they come to together. */
template <int D> struct Merged {
    static constexpr int STATE = 8 * (D + 2);
    int pair;
    float most = SlabState<D>::LEAST, total = 0;
    float2 sum = {};
    __device__ Merged(int pair) : pair(pair) {}
    /* state (count, 8, 2 + D) from this head on, of warps */
    template <int MOST> __device__ void add(const float *state, int count) {
        float found[MOST];
#pragma unroll
        for (int j = 0; j < MOST; j++) {
            found[j] = j < count ? state[j * STATE] : SlabState<D>::LEAST;
            most = fmaxf(most, found[j]);
        }
#pragma unroll
        for (int j = 0; j < MOST; j++) {
            if (j >= count) break;
            add_share(exp2f(found[j] - most), state[j * STATE + 1], *(const float2 *)(state + j * STATE + 2 + 2 * pair));
        }
    }
    __device__ void add_share(float share, float its_total, float2 x) {
        total += share * its_total;
        sum.x += share * x.x, sum.y += share * x.y;
    }
    /* The same, of splits, as soon as they are told. All lanes of a warp call it. First what share each has is asked for and then what it found: both at once
     * would fill registers. */
    template <int MOST> __device__ void add_told(const float *state, int count) {
        uint2 word[MOST];
        auto ask_all = [&](int offset) {
            uint32_t highest;
            do {
                highest = 0;
                asm volatile("" : "+l"(state)); /* so that no addresses are kept for another round */
#pragma unroll
                for (int j = 0; j < MOST; j++) {
                    word[j] = {__float_as_uint(SlabState<D>::LEAST), 0};
                    if (j < count) word[j] = ask((const uint2 *)(state + j * STATE + offset));
                    highest = max(highest, j < count ? max(word[j].x, word[j].y) : 0);
                }
            } while (__any_sync(~0u, highest == UNWRITTEN) && rest());
        };
        float share[MOST];
        ask_all(0);
#pragma unroll
        for (int j = 0; j < MOST; j++) most = fmaxf(most, __uint_as_float(word[j].x));
#pragma unroll
        for (int j = 0; j < MOST; j++) share[j] = exp2f(__uint_as_float(word[j].x) - most), total += share[j] * __uint_as_float(word[j].y);
        ask_all(2 + 2 * pair);
#pragma unroll
        for (int j = 0; j < MOST; j++)
            if (j < count) sum.x += share[j] * __uint_as_float(word[j].x), sum.y += share[j] * __uint_as_float(word[j].y);
    }
    __device__ float2 result(float sink) const { /* -INFINITY: none */
        float top = fmaxf(most, sink * LOG2E), share = exp2f(most - top), all = total * share + exp2f(sink * LOG2E - top);
        return {sum.x * share / all, sum.y * share / all};
    }
    __device__ void tell_all(float *to) const {
        if (pair == 0) tell(to, most), tell(to + 1, total);
        tell(to + 2 + 2 * pair, sum.x), tell(to + 3 + 2 * pair, sum.y);
    }
};

#endif
