/* slab.cuh: what the decode kernel adds to attention's Slab and SlabState. */
#pragma once

/* Puts a key and its value into a slab as number `at`, unless that is -1. Lane 4g + t brings of the key dimensions 8t to 8t + 7 of each 32, of the value g
 * and its neighbour of each eight: see told_place(). */
template <int D> __device__ void replace_key(Slab<D> &slab, int at, const uint4 (&its_key)[D / 32], const uint4 (&its_value)[D / 32], int lane) {
    int g = lane / 4, t = lane % 4;
    for (int j = 0; j < 2; j++)
        for (int c = 0; c < D / 32; c++)
            if (g / 2 * 4 + g % 2 + 2 * j == at) slab.key[j][c] = its_key[c];
    /* which bytes of what was there and of a pair: one of its halves as the lower or upper half */
    const unsigned all = 0x3210, how = at % 2 ? g % 2 ? 0x7610 : 0x5410 : g % 2 ? 0x3276 : 0x3254;
    const bool mine = at >= 0 && at / 4 == t;
    for (int d = 0; d < D / 8; d++) {
        uint32_t pair = (&its_value[d / 4].x)[d % 4];
        slab.value[d].x = __byte_perm(slab.value[d].x, pair, mine && at % 4 < 2 ? how : all);
        slab.value[d].y = __byte_perm(slab.value[d].y, pair, mine && at % 4 > 1 ? how : all);
    }
}

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

