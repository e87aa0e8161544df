/* codes.cuh: how codes lie on the card: of 8, 6 or 4 bits, and for every 64, 32 or 16 columns of a row a word that
 * scales them. The loader converts a file's encodings to one of these, without loss, but scales may become halves, and
 * offsets of codes bf16. Signed codes lie there plus 8, 32 or 128, so none is negative. Kernels make bf16 of q / 64, to
 * which they add o. */
#pragma once

#include "encodings/blocks.h"

struct Codes {
    int bits, words, word_bytes; /* of a code; of a chunk, whose words divide its columns; of a word */
    bool offset;                 /* a word is a half a and a bf16 o */
};
__host__ __device__ constexpr Codes codes_of(Type t) {
    switch (t) {
    case FP8: return {8, 1, 4, false};     /* the word: a float a. The weight: a q */
    case Q8_0: return {8, 2, 4, false};    /* the same, q signed */
    case PACKED4: return {4, 1, 4, false}; /* a float a whose lowest four bits are a zero z. a (q - z), q unsigned */
    case Q4_1: return {4, 2, 4, true};     /* a (q + 64 o), q signed */
    case Q5_K: return {6, 4, 4, true};     /* the same */
    case PACKED8: return {8, 4, 4, true};  /* the same */
    case Q6_K: return {6, 4, 2, false};    /* a half a. a q, q signed */
    default: return {0, 1, 0, false};      /* it lies there row by row, or as MXFP4 */
    }
}
__host__ __device__ constexpr bool is_coded(Type t) { return codes_of(t).bits > 0; }
__host__ __device__ constexpr int chunk_words(Type t) { return codes_of(t).words; }
__host__ __device__ constexpr int codes_bytes(Type t) { return TILE * CHUNK * codes_of(t).bits / 8; }
__host__ __device__ constexpr int coded_chunk(Type t) {
    return codes_bytes(t) + TILE * codes_of(t).words * codes_of(t).word_bytes;
}
/* Where the code of a row and column lies in a chunk of a tile (in bits), and where its word lies (in bytes). Lane 4g +
 * t of a warp has rows g and g + 8; of every 32 columns it has 8t to 8t + 7 or, if a word is for 16 columns, 4t to 4t +
 * 3 and 16 + 4t to 16 + 4t + 3. One mma takes four of them, number k. Two values for one register lie 16 bits apart.
 * Of a code of 6 bits the lower four lie there or, in the second pair, the upper four; rest_place() says where the
 * other two bits lie. */
__host__ __device__ constexpr int code_place(Type t, int row, int column) {
    const bool words_of_16 = chunk_words(t) == 4;
    const int lane = row % 8 * 4 + (words_of_16 ? column % 16 / 4 : column % 32 / 8), pair = column % 4 / 2;
    const int k = words_of_16 ? column / 16 : column / 32 * 2 + column % 8 / 4, second = column % 2;
    return codes_of(t).bits == 8 ? row / 8 * 4096 + lane * 128 + k * 32 + pair * 8 + second * 16
                                 : lane * 128 + row / 8 * 64 + k / 2 * 32 + (k % 2 * 2 + pair) * 4 + second * 16;
}
__host__ __device__ constexpr int rest_place(int row, int column) {
    const int lane = row % 8 * 4 + column % 16 / 4, pair = column % 4 / 2, k = column / 16, second = column % 2;
    return TILE * CHUNK * 4 + lane * 64 + row / 8 * 32 + (k * 4 + 4 - pair * 2 + second * 16) % 32;
}
__host__ __device__ constexpr int word_place(Type t, int row, int column) {
    const int words = chunk_words(t), word = (row % 8 * 2 + row / 8) * words + column * words / CHUNK;
    return codes_bytes(t) + word * codes_of(t).word_bytes;
}
