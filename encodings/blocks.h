/* blocks.h: GGUF's encodings, whose blocks hold their scales and minima: for each how a weight is read and a row of
 * infer.h's TypeInfo. In blocks of 32 the two nibbles of a byte are weights i and i + 16. Blocks of 256 (K) have a
 * scale for every 16 or 32 weights, mostly of 6 bits, and a float16 that multiplies these scales. */
#ifndef BLOCKS_H
#define BLOCKS_H

#include "encodings/packed.h"

BOTH float f16_at(const unsigned char *x) { return f16_value(half_at(x)); }
BOTH int low_or_high(const unsigned char *x, int i) { return x[i % 16] >> i / 16 % 2 * 4 & 15; }
/* The same with the fifth bits, which stand in the word before. */
BOTH int five_bits(const unsigned char *x, int i) { return low_or_high(x + 4, i) | (int)(word_at(x) >> i & 1) << 4; }
BOTH int iq4_value(int nibble) {
    static const signed char value[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return value[nibble];
}
/* Scale or minimum number n, from the twelve bytes that hold both in a block of Q4_K or Q5_K. */
BOTH int six_bits(const unsigned char *s, int n, bool minimum) {
    const int own = n + (minimum ? 4 : 0); /* has its six bits; from n = 4 on s[own - 4] has the upper two */
    return n < 4 ? s[own] & 63 : (minimum ? s[n + 4] >> 4 : s[n + 4] & 15) | s[own - 4] >> 6 << 4;
}
/* Code q of a block whose J-th 32 weights have such a scale and minimum. */
BOTH Weight six_bit_weight(const unsigned char *x, int J, int q) {
    return coded((float)q, f16_at(x) * (float)six_bits(x + 4, J, false),
                 -f16_at(x + 2) * (float)six_bits(x + 4, J, true));
}
/* Two bits of weight i of 256: a byte has those of i, i + 32, i + 64 and i + 96. */
BOTH int two_bits(const unsigned char *x, int i) { return x[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3; }

BOTH Weight q8_0_weight(const unsigned char *x, int i) { return coded((float)(int8_t)x[2 + i], f16_at(x), 0); }
BOTH Weight q4_0_weight(const unsigned char *x, int i) {
    return coded((float)(low_or_high(x + 2, i) - 8), f16_at(x), 0);
}
BOTH Weight q4_1_weight(const unsigned char *x, int i) {
    return coded((float)low_or_high(x + 4, i), f16_at(x), f16_at(x + 2));
}
BOTH Weight q5_0_weight(const unsigned char *x, int i) {
    return coded((float)(five_bits(x + 2, i) - 16), f16_at(x), 0);
}
BOTH Weight q5_1_weight(const unsigned char *x, int i) {
    return coded((float)five_bits(x + 4, i), f16_at(x), f16_at(x + 2));
}
BOTH Weight q2_k_weight(const unsigned char *x, int i) {
    const int both = x[i / 16]; /* scale and minimum of 16 weights */
    return coded((float)two_bits(x + 16, i), f16_at(x + 80) * (float)(both & 15), -f16_at(x + 82) * (float)(both >> 4));
}
BOTH Weight q3_k_weight(const unsigned char *x, int i) {
    const int n = i / 16, four = n < 8 ? x[96 + n] & 15 : x[88 + n] >> 4;
    const int scale = four | (x[104 + n % 4] >> n / 4 * 2 & 3) << 4, q = two_bits(x + 32, i);
    return coded((float)(x[i % 32] >> i / 32 & 1 ? q : q - 4), f16_at(x + 108) * (float)(scale - 32), 0);
}
BOTH Weight q4_k_weight(const unsigned char *x, int i) {
    return six_bit_weight(x, i / 32, x[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15);
}
BOTH Weight q5_k_weight(const unsigned char *x, int i) {
    const int low = x[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
    return six_bit_weight(x, i / 32, low | (x[16 + i % 32] >> i / 32 & 1) << 4);
}
BOTH Weight q6_k_weight(const unsigned char *x, int i) {
    const int low = x[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15;
    return coded((float)((low | two_bits(x + 128, i) << 4) - 32), f16_at(x + 208) * (float)(int8_t)x[192 + i / 16], 0);
}
BOTH Weight iq4_nl_weight(const unsigned char *x, int i) {
    return coded((float)iq4_value(low_or_high(x + 2, i)), f16_at(x), 0);
}
BOTH Weight iq4_xs_weight(const unsigned char *x, int i) {
    const int n = i / 32, scale = (x[4 + n / 2] >> n % 2 * 4 & 15) | (half_at(x + 2) >> 2 * n & 3) << 4;
    return coded((float)iq4_value(low_or_high(x + 8 + 16 * n, i)), f16_at(x) * (float)(scale - 32), 0);
}
BOTH Weight mxfp4_weight(const unsigned char *x, int i) {
    return coded(e2m1_value(low_or_high(x + 1, i)), e8m0_value(*x), 0);
}

BOTH void put_both(unsigned char *x, float a, float b) { put_f16(x, a), put_f16(x + 2, b); }
/* Made-up minima are half of the scale times the largest code. */
BOTH void put_q4_1(unsigned char *x, float a) { put_both(x, a, -7.5f * a); }
BOTH void put_q5_1(unsigned char *x, float a) { put_both(x, a, -15.5f * a); }
BOTH void put_q2_k(unsigned char *x, float a) { put_both(x + 80, a, 1.5f * a); }
BOTH void put_q3_k(unsigned char *x, float a) { put_f16(x + 108, a); }
BOTH void put_q4_k(unsigned char *x, float a) { put_both(x, a, 7.5f * a); }
BOTH void put_q5_k(unsigned char *x, float a) { put_both(x, a, 15.5f * a); }
BOTH void put_q6_k(unsigned char *x, float a) { put_f16(x + 208, a); }

/* clang-format off */
/*      type dtype values bytes bits zero columns card weight put */
#define BLOCK_TYPES(ROW)                                                                                               \
    ROW(Q8_0, "Q8_0", 32, 34, 8, 0, 0, Q8_0, q8_0_weight, put_f16)                                                     \
    ROW(Q4_0, "Q4_0", 32, 18, 4, 0, 0, Q4_1, q4_0_weight, put_f16)                                                     \
    ROW(Q4_1, "Q4_1", 32, 20, 4, 8, 0, Q4_1, q4_1_weight, put_q4_1)                                                    \
    ROW(Q5_0, "Q5_0", 32, 22, 5, 0, 0, Q6_K, q5_0_weight, put_f16)                                                     \
    ROW(Q5_1, "Q5_1", 32, 24, 5, 16, 0, Q5_K, q5_1_weight, put_q5_1)                                                   \
    ROW(Q2_K, "Q2_K", 256, 84, 2, 2, 0, Q5_K, q2_k_weight, put_q2_k)                                                   \
    ROW(Q3_K, "Q3_K", 256, 110, 3, 0, 0, Q6_K, q3_k_weight, put_q3_k)                                                  \
    ROW(Q4_K, "Q4_K", 256, 144, 4, 8, 0, Q4_1, q4_k_weight, put_q4_k)                                                  \
    ROW(Q5_K, "Q5_K", 256, 176, 5, 16, 0, Q5_K, q5_k_weight, put_q5_k)                                                 \
    ROW(Q6_K, "Q6_K", 256, 210, 6, 0, 0, Q6_K, q6_k_weight, put_q6_k)                                                  \
    ROW(IQ4_NL, "IQ4_NL", 32, 18, 4, 0, 0, Q8_0, iq4_nl_weight, put_f16)                                               \
    ROW(IQ4_XS, "IQ4_XS", 256, 136, 4, 0, 0, Q8_0, iq4_xs_weight, put_f16)                                             \
    ROW(GGUF_MXFP4, "GGUF_MXFP4", 32, 17, 4, 0, 0, MXFP4, mxfp4_weight, put_e8m0)
/* clang-format on */
enum { BEFORE_BLOCKS = PACKED_END - 1, BLOCK_TYPES(TYPE_NAME) };

#endif
