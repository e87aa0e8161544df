/* slab.cuh: what the decode kernel adds to attention's Slab and SlabState in infer.cu. */
#pragma once

/* Puts a key and its value into a slab as number `at`, unless that is -1. Lane 4g + t brings dimensions 8t to 8t + 7 of
 * every 32 of the key, and of the value dimension g and its neighbour of every eight: see published_place(). */
template <int D>
__device__ void replace_key(Slab<D> &slab, int at, const uint4 (&its_key)[D / 32], const uint4 (&its_value)[D / 32],
                            int lane) {
    int g = lane / 4, t = lane % 4;
    for (int j = 0; j < 2; j++)
        for (int c = 0; c < D / 32; c++)
            if (g / 2 * 4 + g % 2 + 2 * j == at) slab.key[j][c] = its_key[c];
    /* Bytes to take from the old word (0 to 3) and from the pair (4 to 7). */
    const unsigned all = 0x3210, how = at % 2 ? g % 2 ? 0x7610 : 0x5410 : g % 2 ? 0x3276 : 0x3254;
    const bool mine = at >= 0 && at / 4 == t;
    for (int d = 0; d < D / 8; d++) {
        uint32_t pair = (&its_value[d / 4].x)[d % 4];
        slab.value[d].x = __byte_perm(slab.value[d].x, pair, mine && at % 4 < 2 ? how : all);
        slab.value[d].y = __byte_perm(slab.value[d].y, pair, mine && at % 4 > 1 ? how : all);
    }
}

/* Merged of `count` states as soon as they are published, at most MAX. All lanes of a warp call it. It polls maxima and
 * totals first and then the sums: both at once would fill the registers. */
template <int MAX> __device__ Merged merge_published(const float *state, int count, int pitch, int pair) {
    Merged m;
    uint2 word[MAX];
    auto poll_all = [&](int offset) {
        uint32_t max_word;
        do {
            max_word = 0;
            asm volatile("" : "+l"(state)); /* keeps no addresses for another round */
#pragma unroll
            for (int j = 0; j < MAX; j++) {
                word[j] = {__float_as_uint(NO_SCORE), 0};
                if (j < count) word[j] = poll((const uint2 *)(state + j * pitch + offset));
                max_word = max(max_word, j < count ? max(word[j].x, word[j].y) : 0);
            }
        } while (__any_sync(~0u, max_word == UNPUBLISHED) && pause());
    };
    float share[MAX];
    poll_all(0);
#pragma unroll
    for (int j = 0; j < MAX; j++) m.max_score = fmaxf(m.max_score, __uint_as_float(word[j].x));
#pragma unroll
    for (int j = 0; j < MAX; j++) {
        share[j] = exp2f(__uint_as_float(word[j].x) - m.max_score);
        m.total += share[j] * __uint_as_float(word[j].y);
    }
    poll_all(2 + pair);
#pragma unroll
    for (int j = 0; j < MAX; j++)
        if (j < count)
            m.sum.x += share[j] * __uint_as_float(word[j].x), m.sum.y += share[j] * __uint_as_float(word[j].y);
    return m;
}
