/* decode.h: the value of one weight of an encoded matrix, as static inline functions that gcc and nvcc compile alike,
 * for the core's types. A weight is a (q - zero) + b. The type says where the bits of its code q lie; bf16 holds q
 * exactly. a comes from the scales, b from minima. A room with types of its own has any_weight_at(), which knows these
 * too. */
#ifndef DECODE_H
#define DECODE_H

#include "infer.h"

BOTH float bf16_value(uint16_t h) { return bits_float((uint32_t)h << 16); }

BOTH float f16_value(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    float magnitude = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf((float)(1024 + m), e - 25) : ldexpf((float)m, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

BOTH float e2m1_value(int nibble) {
    const float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
}

BOTH float e8m0_value(int e) { return e == 255 ? NAN : ldexpf(1, e - 127); }

BOTH uint16_t half_at(const unsigned char *p) { return (uint16_t)(p[0] | p[1] << 8); }
BOTH uint32_t word_at(const unsigned char *p) { return half_at(p) | (uint32_t)half_at(p + 2) << 16; }
BOTH int nibble_at(const unsigned char *data, size_t i) { return data[i / 2] >> i % 2 * 4 & 15; }

/* Code [r, c] of a matrix of this type, or an entry of a grid; lines are `stride` bytes apart. */
BOTH float code_at(Type type, const unsigned char *data, size_t stride, size_t r, size_t c) {
    const unsigned char *line = data + r * stride;
    switch (type) {
    case F32: return bits_float(word_at(line + 4 * c));
    case F16: return f16_value(half_at(line + 2 * c));
    case BF16: return bf16_value(half_at(line + 2 * c));
    case E8M0: return e8m0_value(line[c]);
    case MXFP4: return e2m1_value(nibble_at(line, c));
    default: return NAN;
    }
}

typedef struct {
    float q, zero, a, b; /* the weight is a (q - zero) + b */
} Weight;

/* Weight [row, column] of one matrix of w. */
BOTH Weight weight_at(const Linear *w, const Stored *one, size_t row, size_t column) {
    Weight x = {code_at(w->type, one->data.data, one->data.stride, row, column), 0, 1, 0};
    if (w->type == MXFP4) x.a = code_at(E8M0, one->scale.data, one->scale.stride, row, column / 32);
    return x;
}

#endif
