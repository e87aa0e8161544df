/* types.h: the types of weights that this room adds to infer.h's, and their rows in types[]. A weight is scale (q -
 * zero). q is its code; the type says where its bits lie. GGUF's types hold scale and zero inside their blocks, row by
 * row. Every q - zero is exact in bf16. */
#ifndef TYPES_H
#define TYPES_H

#include "infer.h"

enum {
    NVFP4 = FIRST_ROOM_TYPE, /* e2m1, low nibble first; a scale for 16 columns */
    FP8,                     /* e4m3 without infinities */
    INT8,                    /* two's complement */
    PACKED4,                 /* compressed-tensors: unsigned, low nibble first, rows are whole words of 32 bits */
    PACKED8,
    GPTQ4, /* word [c / 8, r] or [c / 4, r] holds the codes of 8 or 4 columns, lowest bits first */
    GPTQ8,
    AWQ4, /* word [c, r / 8] holds the codes of rows 0 2 4 6 1 3 5 7 of eight, lowest bits first */
    Q8_0, /* from here on GGUF's */
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    GGUF_MXFP4,
};

/* In the order of the enum. */
#define ENCODING_TYPES                                                                                                 \
    {"NVFP4", "U8", 16, 8, 4, 0}, {"FP8", "F8_E4M3", 1, 1, 8, 0}, {"INT8", "I8", 1, 1, 8, 0},                          \
        {"PACKED4", "I32", 8, 4, 4, 8}, {"PACKED8", "I32", 4, 4, 8, 128}, {"GPTQ4", "I32", 8, 4, 4, 8},                \
        {"GPTQ8", "I32", 4, 4, 8, 128}, {"AWQ4", "I32", 8, 4, 4, 8}, {"Q8_0", "Q8_0", 32, 34, 8, 0},                   \
        {"Q4_0", "Q4_0", 32, 18, 4, 0}, {"Q4_1", "Q4_1", 32, 20, 4, 8}, {"Q5_0", "Q5_0", 32, 22, 5, 0},                \
        {"Q5_1", "Q5_1", 32, 24, 5, 16}, {"Q2_K", "Q2_K", 256, 84, 2, 2}, {"Q3_K", "Q3_K", 256, 110, 3, 0},            \
        {"Q4_K", "Q4_K", 256, 144, 4, 8}, {"Q5_K", "Q5_K", 256, 176, 5, 16}, {"Q6_K", "Q6_K", 256, 210, 6, 0},         \
        {"IQ4_NL", "IQ4_NL", 32, 18, 4, 0}, {"IQ4_XS", "IQ4_XS", 256, 136, 4, 0}, {                                    \
        "GGUF_MXFP4", "GGUF_MXFP4", 32, 17, 4, 0                                                                       \
    }

#endif
