/* packed.h: the encodings whose scales lie in tensors of their own: for each what its code is and a row, which adds the
 * suffixes of its tensors' names (Names in packed.c) to infer.h's TypeInfo. Every q - zero is exact in bf16. */
#ifndef PACKED_H
#define PACKED_H

#include "infer.h"

BOTH float e4m3_value(int b) {
    const uint32_t bits = (uint32_t)(b & 128) << 24 | (uint32_t)(b & 127) << 20; /* its exponent is 120 too low */
    return (b & 127) == 127 ? NAN : bits_float(bits) * 0x1p120f;
}
BOTH Weight e4m3_weight(const unsigned char *x, int i) { return coded(e4m3_value(*x), 1, 0); }
BOTH void put_e4m3(unsigned char *x, float value) {
    *x = (unsigned char)(small_float(value, 3, -5) | (value < 0 ? 128 : 0));
}
BOTH Weight int8_weight(const unsigned char *x, int i) { return coded((float)(int8_t)*x, 1, 0); }
/* Unsigned codes, lowest bits first; of AWQ in the order 0 2 4 6 1 3 5 7. */
BOTH Weight nibble_weight(const unsigned char *x, int i) { return coded((float)nibble_at(x, i), 1, 0); }
BOTH Weight byte_weight(const unsigned char *x, int i) { return coded((float)x[i], 1, 0); }
BOTH Weight awq_weight(const unsigned char *x, int i) { return nibble_weight(x, i / 2 + i % 2 * 4); }

/* clang-format off */
/*      type dtype values bytes bits zero columns card weight put
 *      {codes, mark, scale, zero, group, scales' type, zeros' type, columns of a scale} ... */
#define PACKED_TYPES(ROW)                                                                                              \
    ROW(NVFP4, "U8", 16, 8, 4, 0, 0, Q6_K, e2m1_weight, NULL,                                                          \
        {".weight_packed", ".weight_global_scale", ".weight_scale", NULL, NULL, FP8, 0, 16},                           \
        {".weight", ".weight_scale_2", ".weight_scale", NULL, NULL, FP8, 0, 16})                                       \
    ROW(FP8, "F8_E4M3", 1, 1, 8, 0, 0, FP8, e4m3_weight, put_e4m3,                                                     \
        {".weight", ".weight_scale", ".weight_scale", NULL, NULL, BF16, 0, INT32_MAX},                                 \
        {".weight", ".scale", ".scale", NULL, NULL, BF16, 0, INT32_MAX},                                               \
        {".weight", NULL, ".weight_scale_inv", NULL, NULL, BF16, 0, INT32_MAX})                                        \
    ROW(INT8, "I8", 1, 1, 8, 0, 0, Q8_0, int8_weight, NULL,                                                            \
        {".weight", NULL, ".weight_scale", ".weight_zero_point", NULL, BF16, INT8, INT32_MAX})                         \
    ROW(PACKED4, "I32", 8, 4, 4, 8, 0, PACKED4, nibble_weight, NULL,                                                   \
        {".weight_packed", NULL, ".weight_scale", ".weight_zero_point", ".weight_g_idx", BF16, GPTQ4, 128})            \
    ROW(PACKED8, "I32", 4, 4, 8, 128, 0, PACKED8, byte_weight, NULL,                                                   \
        {".weight_packed", NULL, ".weight_scale", ".weight_zero_point", ".weight_g_idx", BF16, GPTQ8, 128})            \
    ROW(GPTQ4, "I32", 8, 4, 4, 8, 8, PACKED4, nibble_weight, NULL,                                                     \
        {".qweight", NULL, ".scales", ".qzeros", ".g_idx", F16, PACKED4, 128})                                         \
    ROW(GPTQ8, "I32", 4, 4, 8, 128, 4, PACKED8, byte_weight, NULL,                                                     \
        {".qweight", NULL, ".scales", ".qzeros", ".g_idx", F16, PACKED8, 128})                                         \
    ROW(AWQ4, "I32", 8, 4, 4, 8, 1, PACKED4, awq_weight, NULL,                                                         \
        {".qweight", NULL, ".scales", ".qzeros", NULL, F16, AWQ4, 128})
/* clang-format on */
enum { BEFORE_PACKED = FIRST_ROOM_TYPE - 1, PACKED_TYPES(TYPE_NAME) PACKED_END };

#endif
