/* card.cuh: what lies on the card, shared by infer.cu (which computes) and upload.cu (which brings it there). */
#ifndef CARD_CUH
#define CARD_CUH

#include "model.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr int GROUP = 8;        /* rows that a warp multiplies at once */
constexpr int FP4_ROWS = 16;    /* of MXFP4: m of mma.m16n8k16; ... */
constexpr int FP4_COLUMNS = 64; /* ... the columns of a packed chunk ... */
constexpr int FP4_BYTES = 544;  /* ... and its size: 4.25 bits a weight */
constexpr int WARPS = 15;       /* of a block of few.cuh that multiply; each gets so many chunks of a row at a time, at most: */
constexpr int MOST_CHUNKS = 3, MOST_F32_CHUNKS = 2;

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

typedef __nv_bfloat16 bf16;

struct Matrix { /* a Linear on the card: n matrices of rows padded to whole groups, columns padded to whole chunks with 0 */
    uint8_t *data;
    float *bias; /* (n, rows) or NULL */
    Type type;   /* BF16, F32 or MXFP4; F16 became F32 */
    int rows, cols, n;
    int stride;   /* columns with padding */
    size_t bytes; /* of one matrix */
    int chunks, per, parts; /* of a row; chunks for each of WARPS at a time; how many times */
};

struct Block { /* a Layer on the card */
    float *attn_norm, *ffn_norm, *sinks;
    Matrix qkv;            /* query, key, value; rows of query and key alternate between the halves of a head */
    Matrix o, router, down;
    Matrix up;             /* gate and up, alternating */
    float *router_columns; /* (dim, n_experts): router weight times ffn_norm */
    int window;
};

struct Card { /* the weights */
    Block *layer; /* (n_layers) on the host */
    Matrix embed, head;
    float *norm;
};

/* Says where everything will lie, from `base` on, and returns its size; with base NULL only the size. The layers' array
 * must be there. NO_ROOM's message is the caller's; BAD_MODEL if an encoding is not implemented for its place. */
bool card_plan(Card *card, const Model *m, uint8_t *base, size_t *bytes, Error *e);
/* Reads all weights from the files into the planned places. BAD_MODEL if a file shrank or a weight is NaN, named. */
bool card_load(Card *card, const Model *m, void (*progress)(uint64_t, uint64_t), Error *e);

/* Names a CUDA error, with the exit code that it deserves; always false. */
bool cuda_failed(Error *e, cudaError_t error, const char *what);
#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess) return cuda_failed(e, error_, #call);                                               \
    } while (0)

/* A word of 8 e2m1 values in the order of their columns: sign and magnitude of even columns in the lower half, of odd ones
 * in the upper, in bits that make bf16 of them (times 2^-126) with a shift and a mask: sign to bit 15, magnitude to 8-6. */
__device__ inline uint4 fp4_to_bf16(uint32_t w) {
    const uint32_t all = 0x81C081C0;
    return make_uint4(w & all, w << 3 & all, w << 6 & all, (w << 1 & 0x80008000) | (w >> 5 & 0x01000100) | (w >> 4 & 0x00C000C0));
}

/* The bits of the i-th of 4 values in a half: the inverse. */
__device__ inline uint32_t fp4_place(uint32_t nibble, int i) {
    uint32_t sign = nibble >> 3, m = nibble & 7;
    if (i < 3) return (sign << 15 | m << 6) >> 3 * i;
    return sign << 14 | (m >> 2) << 13 | (m & 3) << 10;
}

#endif
