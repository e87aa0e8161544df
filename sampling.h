/* sampling.h: how the next token is drawn from logits, as static inline functions that gcc and nvcc compile to the same
 * IEEE operations, so that infer.cu and tests/reference.c draw the same token from the same logits.
 *
 * One draw is argmax over all tokens i of  logit[i] / temperature + gumbel[i]  (the Gumbel-max trick: the result is
 * distributed like softmax(logits / temperature)). The noise comes from Philox4x32-10 (Salmon et al., "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011). It depends on seed, position and token alone, so neither the rest of the
 * batch nor the order of evaluation changes a draw. Before it logits are adjusted: biases, frequency and presence
 * penalty, repetition penalty; tokens that are not allowed become -infinity. Then comes, in the order of transformers,
 * temperature, top-k, top-p, min-p. The last three are thresholds: tokens below them cannot be drawn.
 *
 * Three rules keep the compilers' results equal. A product that is added to something is an explicit fmaf, which no
 * compiler contracts. Sums over tokens are sums of integers, so their order does not matter. Of the library only fmaf
 * and floorf are called, whose results IEEE 754 fixes. */
#ifndef SAMPLING_H
#define SAMPLING_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define BOTH static __host__ __device__ inline
#else
#define BOTH static inline
#endif

enum { MOST_BIASES = 1024 }; /* of a sequence */
typedef struct {
    int id;
    float add; /* to its logit */
} Bias;

typedef struct {
    float temperature;         /* 0: the most likely token; the lowest id among equals */
    int top_k;                 /* 0 or less: off */
    float top_p;               /* 1: off */
    float min_p;               /* 0: off */
    float penalty;             /* repetition penalty, 1: off */
    float frequency, presence; /* penalties for tokens at the positions from `answer` on, 0: off */
    int answer;                /* set by the scheduler */
    uint64_t seed;
    const Bias *bias; /* (biases), each id once. A backend copies them */
    int biases;       /* 0 to MOST_BIASES */
    uint64_t allowed; /* 0: all tokens may be drawn; else see Allowed in infer.h. Set by the scheduler */
} Sampling;

BOTH uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

BOTH float bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Natural logarithm of a normal positive float, relative error below 2.5e-7. x = m 2^k with m in
 * [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1), by the series of atanh. */
BOTH float ln(float x) {
    uint32_t u = float_bits(x) - 0x3F3504F3u; /* sqrt(1/2) */
    int k = (int)u >> 23;
    float m = bits_float((u & 0x7FFFFFu) + 0x3F3504F3u), s = (m - 1) / (m + 1), z = s * s;
    float series = fmaf(z, fmaf(z, fmaf(z, fmaf(z, 1.0f / 9, 1.0f / 7), 1.0f / 5), 1.0f / 3), 1);
    return fmaf((float)k, 0x1.62e43p-1f, fmaf(2 * s, series, (float)k * -0x1.05c61p-29f));
}

/* e^x for x <= 0, relative error below 2.5e-7; 0 below -87. x = k ln 2 + r. */
BOTH float exp_negative(float x) {
    if (!(x > -87)) return 0;
    float k = floorf(fmaf(x, 0x1.715476p+0f, 0.5f));
    float r = fmaf(k, 0x1.05c61p-29f, fmaf(k, -0x1.62e43p-1f, x));
    float series =
        fmaf(r, fmaf(r, fmaf(r, fmaf(r, fmaf(r, fmaf(r, 1.0f / 720, 1.0f / 120), 1.0f / 24), 1.0f / 6), 0.5f), 1), 1);
    return series * bits_float((uint32_t)((int)k + 127) << 23);
}

/* Four random words: Philox4x32-10 of the counter (c0, c1, 0, 0). */
BOTH void philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t out[4]) {
    uint32_t c[4] = {c0, c1, 0, 0}, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t c2 = (uint32_t)(a >> 32) ^ c[3] ^ k1, c3 = (uint32_t)a;
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)b;
        c[2] = c2;
        c[3] = c3;
    }
    for (int i = 0; i < 4; i++) out[i] = c[i];
}

/* Gumbel noise -ln(-ln u) of a random word r, with u = 1 - v and v = (r + 1/2) / 2^32 in the open interval (0, 1).
 * Noise is large where u is near 1; there -ln(1 - v) is computed from v by Kahan's correction of log1p. */
BOTH float gumbel(uint32_t r) {
    float v = r < 1u << 23 ? ((float)r + 0.5f) * 0x1p-32f : ((float)(r >> 9) + 0.5f) * 0x1p-23f; /* both exact */
    float w = 1 - v, e = w == 1 ? v : ln(w) * (v / (w - 1));
    return -ln(e);
}

/* The noise of token `id` at `position`: one of the four words of its group of four tokens. */
BOTH float token_noise(uint64_t seed, int position, int id) {
    uint32_t word[4];
    philox(seed, (uint32_t)id >> 2, (uint32_t)position, word);
    return gumbel(word[id & 3]);
}

/* transformers' RepetitionPenaltyLogitsProcessor (Keskar et al., "CTRL", 2019, section 4.1). It applies to tokens that
 * occur in the sequence, which includes the prompt. */
BOTH float penalize(float logit, float penalty) { return logit > 0 ? logit / penalty : logit * penalty; }

/* The logit of a token of the text that the answer so far has `count` times: OpenAI's frequency and presence penalties
 * (API reference, "Frequency and presence penalties"), then the repetition penalty. */
BOTH float penalized(float logit, const Sampling *how, uint32_t count) {
    if (count) logit = fmaf(-(float)count, how->frequency, logit) - how->presence;
    return penalize(logit, how->penalty);
}

BOTH float scaled(float logit, float temperature) { return temperature > 0 ? logit / temperature : logit; }

/* Maps floats to unsigned integers in the same order, with -0 below +0, for sorting, thresholds and maxima. */
BOTH uint32_t order_key(float x) {
    uint32_t u = float_bits(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

BOTH float key_value(uint32_t key) { return bits_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

/* A value and its token as one integer. The largest has the largest value and, among equals, the lowest id. */
BOTH uint64_t draw_key(float value, int id) { return (uint64_t)order_key(value) << 32 | (uint32_t)~id; }
BOTH int draw_id(uint64_t key) { return (int)~(uint32_t)key; }

/* A token's mass, e^(x - max), as a whole number of steps of 2^-40. The sum of 200,000 masses fits in 64 bits. */
BOTH uint64_t mass(float x, float max) { return (uint64_t)(exp_negative(x - max) * 0x1p40f); }

/* The part of the mass `total` that top-p keeps, at least one step: it keeps the most likely tokens up to this sum. */
BOTH uint64_t top_p_mass(uint64_t total, float top_p) {
    double keep = (double)total * (double)top_p;
    return keep < 1 ? 1 : (uint64_t)keep;
}

/* The least x = logit / temperature that min-p keeps, from p >= min_p * p_max. */
BOTH float min_p_floor(float max, float min_p) { return max + ln(min_p); }

#endif
