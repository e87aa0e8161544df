/* decode.h: the value of one weight in any type, this room's or the core's: see the decode.h beside infer.h.
 * tests/reference.c multiplies by these weights; card.cu repacks their codes. GGUF's types have minima. */
#ifndef ENCODINGS_DECODE_H
#define ENCODINGS_DECODE_H

#include "../decode.h"
#include "encodings/types.h"

BOTH float e4m3_value(int b) {
    int e = b >> 3 & 15, m = b & 7;
    float magnitude = (b & 127) == 127 ? NAN : e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    return b & 128 ? -magnitude : magnitude;
}

/* Code [r, c] of a matrix of this type, or an entry of a grid; lines are `stride` bytes apart. Not for GGUF's own
 * types. */
BOTH float any_code_at(Type type, const unsigned char *data, size_t stride, size_t r, size_t c) {
    const unsigned char *line = data + r * stride;
    switch (type) {
    case FP8: return e4m3_value(line[c]);
    case INT8: return (float)(int8_t)line[c];
    case NVFP4: return code_at(MXFP4, data, stride, r, c);
    case PACKED4: return (float)nibble_at(line, c);
    case PACKED8: return (float)line[c];
    case GPTQ4: return (float)nibble_at(data + c / 8 * stride + r * 4, c % 8);
    case GPTQ8: return (float)data[c / 4 * stride + r * 4 + c % 4];
    case AWQ4: return (float)nibble_at(data + c * stride + r / 8 * 4, r % 8 / 2 + r % 2 * 4);
    default: return code_at(type, data, stride, r, c);
    }
}

BOTH float entry_at(const Grid *g, const View *v, size_t row, size_t group) {
    row /= (size_t)g->rows;
    return any_code_at(g->type, v->data, v->stride, g->transposed ? group : row, g->transposed ? row : group);
}

BOTH int iq4_value(int nibble) {
    const signed char value[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return value[nibble];
}
/* Scale or minimum number n, from the twelve bytes that hold both in a block of Q4_K or Q5_K. */
BOTH int six_bits(const unsigned char *s, int n, bool minimum) {
    const int own = n + (minimum ? 4 : 0); /* has its six bits; from n = 4 on s[own - 4] has the upper two */
    return n < 4 ? s[own] & 63 : (minimum ? s[n + 4] >> 4 : s[n + 4] & 15) | s[own - 4] >> 6 << 4;
}

/* Weight c of a line in one of GGUF's types. In blocks of 32 the two nibbles of a byte are weights i and i + 16. Blocks
 * of 256 (K) have a scale for every 16 or 32 weights, mostly of 6 bits, and a float16 that multiplies these scales. */
BOTH Weight gguf_at(Type type, TypeInfo info, const unsigned char *line, size_t c) {
    const unsigned char *x = line + c / (size_t)info.values * (size_t)info.bytes;
    /* weight i: number l of the J-th 32, which is the k-th 32 of the n-th 128; in the K-th 16 */
    const int i = (int)(c % (size_t)info.values), n = i / 128, k = i / 32 % 4, l = i % 32, J = i / 32, K = i / 16;
    const int nibble = i / 16 % 2 * 4; /* where a nibble begins, in blocks of 32 */
    Weight w = {0, 0, f16_value(half_at(x)), 0};
    int q = 0, scale;
    switch (type) {
    case Q8_0: q = (int8_t)x[2 + i]; break;
    case Q4_0: q = (x[2 + i % 16] >> nibble & 15) - 8; break;
    case Q4_1: q = x[4 + i % 16] >> nibble & 15, w.b = f16_value(half_at(x + 2)); break;
    case Q5_0: q = (int)((x[6 + i % 16] >> nibble & 15) | (word_at(x + 2) >> i & 1) << 4) - 16; break;
    case Q5_1:
        q = (int)((x[8 + i % 16] >> nibble & 15) | (word_at(x + 4) >> i & 1) << 4);
        w.b = f16_value(half_at(x + 2));
        break;
    case IQ4_NL: q = iq4_value(x[2 + i % 16] >> nibble & 15); break;
    case IQ4_XS:
        scale = (x[4 + J / 2] >> 4 * (J % 2) & 15) | (half_at(x + 2) >> 2 * J & 3) << 4;
        q = iq4_value(x[8 + 16 * J + l % 16] >> nibble & 15), w.a *= (float)(scale - 32);
        break;
    case Q2_K:
        q = x[16 + 32 * n + l] >> 2 * k & 3;
        w.a = f16_value(half_at(x + 80)) * (float)(x[K] & 15), w.b = -f16_value(half_at(x + 82)) * (float)(x[K] >> 4);
        break;
    case Q3_K:
        scale = (K < 8 ? x[96 + K] & 15 : x[88 + K] >> 4) | (x[104 + K % 4] >> 2 * (K / 4) & 3) << 4;
        q = (x[32 + 32 * n + l] >> 2 * k & 3) - (x[l] >> J & 1 ? 0 : 4);
        w.a = f16_value(half_at(x + 108)) * (float)(scale - 32);
        break;
    case Q4_K:
    case Q5_K:
        q = x[(type == Q4_K ? 16 : 48) + 32 * (J / 2) + l] >> 4 * (J % 2) & 15;
        if (type == Q5_K) q |= (x[16 + l] >> J & 1) << 4;
        w.a *= (float)six_bits(x + 4, J, false), w.b = -f16_value(half_at(x + 2)) * (float)six_bits(x + 4, J, true);
        break;
    case Q6_K:
        q = ((x[64 * n + 32 * (k % 2) + l] >> 4 * (k / 2) & 15) | (x[128 + 32 * n + l] >> 2 * k & 3) << 4) - 32;
        w.a = f16_value(half_at(x + 208)) * (float)(int8_t)x[192 + K];
        break;
    default: break;
    }
    w.q = (float)q;
    if (type == GGUF_MXFP4) w.q = e2m1_value(x[1 + i % 16] >> nibble & 15), w.a = e8m0_value(x[0]);
    return w;
}

/* Do blocks of this type hold their scales? */
BOTH bool in_blocks(Type type) { return type >= Q8_0; }

/* Weight [row, column] of one matrix of w; info: types[w->type], which a GPU cannot look up. */
BOTH Weight any_weight_at(const Linear *w, TypeInfo info, const Stored *one, size_t row, size_t column) {
    if (in_blocks(w->type)) return gguf_at(w->type, info, one->data.data + row * one->data.stride, column);
    Weight x = {any_code_at(w->type, one->data.data, one->data.stride, row, column), 0, 1, 0};
    if (!w->scale.rows) return x;
    const size_t group = one->group ? (size_t)one->group[column] : column / (size_t)w->scale.cols;
    x.a = entry_at(&w->scale, &one->scale, row, group) * one->factor;
    x.zero = w->zero.rows ? entry_at(&w->zero, &one->zero, row, group) : (float)info.zero;
    if (w->zero_plus_one) x.zero = fmodf(x.zero + 1, (float)(1 << info.bits));
    return x;
}

#endif
