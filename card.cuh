/* card.cuh: what lies on the card, shared by infer.cu (which computes) and upload.cu (which brings it there). */
#ifndef CARD_CUH
#define CARD_CUH

#include "model.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr int GROUP = 8;          /* rows that a warp multiplies at once ... */
constexpr int DENSE_COLUMNS = 32; /* ... and the columns of a chunk of them */
constexpr int FP4_ROWS = 16;      /* of MXFP4: m of mma.m16n8k16; ... */
constexpr int FP4_COLUMNS = 64;   /* ... the columns of a packed chunk ... */
constexpr int FP4_BYTES = 544;    /* ... and its size: 4.25 bits a weight */
/* Chunks that ring.cuh streams as one item, at most: about 24 KB. F32's, half of BF16's, was not measured. */
constexpr int FP4_ITEM = 48, BF16_ITEM = 48, F32_ITEM = 24;

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
    int chunks, per, parts; /* of a row; how many are multiplied at a time; how many times */
    __host__ __device__ int chunks_of(int part) const { return min_of(per, chunks - part * per); }
};

/* Sets what follows from a matrix's type and size. */
__host__ __device__ inline void shape(Matrix &m, Type type, int rows, int cols) {
    int columns = type == MXFP4 ? FP4_COLUMNS : DENSE_COLUMNS, most = type == MXFP4 ? FP4_ITEM : type == F32 ? F32_ITEM : BF16_ITEM;
    m.type = type, m.rows = rows, m.cols = cols;
    m.chunks = (cols + columns - 1) / columns;
    m.stride = m.chunks * columns;
    m.parts = (m.chunks + most - 1) / most;
    m.per = (m.chunks + m.parts - 1) / m.parts;
    m.bytes = type == MXFP4 ? (size_t)(rows + FP4_ROWS - 1) / FP4_ROWS * m.chunks * FP4_BYTES
                            : (size_t)(rows + GROUP - 1) / GROUP * GROUP * m.stride * (type == F32 ? 4 : 2);
}

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

/* Sixteen e2m1 values in the order of their columns, packed in two words so that few operations make bf16 of them (times 2^-126): a mask takes two
 * values, sign at bit 15 and magnitude at 8-6 of either half, even columns in the lower one. Three such masks fit into a word: as it is, turned by 6,
 * and shifted by 4. What they leave of both words, bits of FP4_REST, makes up a third word, of two masks: the first plus four times the second, which is one
 * operation of the multiplier. A search of all layouts that turn and shift words found none with fewer operations of the arithmetic unit than these 11; of the
 * 4 others, shifts to the left and the sum, the multiplier takes care. */
constexpr uint32_t FP4_MASK = 0x81C081C0, FP4_REST = 0x06030603; /* bits of two values; bits of a word that only the third word needs */
struct Sixteen { uint4 low, high; };
__device__ inline Sixteen fp4_to_bf16(uint32_t a, uint32_t b) {
    const uint32_t m = FP4_MASK;
    uint32_t rest;
    asm("mad.lo.u32 %0,%1,4,%2;" : "=r"(rest) : "r"(b), "r"(a));
    return {make_uint4(a & m, __funnelshift_r(a, a, 6) & m, a << 4 & m, __funnelshift_r(rest, rest, 4) & m),
            make_uint4(b & m, __funnelshift_r(b, b, 6) & m, b << 4 & m, rest << 6 & m)};
}

/* The inverse: sixteen values as they are published, the low nibble of a byte first. */
__device__ inline void fp4_pack(const uint8_t *nibbles, uint32_t (&word)[2]) {
    uint32_t rest = 0;
    word[0] = word[1] = 0;
    for (int i = 0; i < 16; i++) {
        uint32_t nibble = nibbles[i / 2] >> i % 2 * 4 & 15, value = (nibble >> 3 << 15 | (nibble & 7) << 6) << i % 2 * 16;
        switch (i / 2 % 4) {
        case 0: word[i / 8] |= value; break;
        case 1: word[i / 8] |= __funnelshift_l(value, value, 6); break;
        case 2: word[i / 8] |= value >> 4; break;
        default: rest |= i / 8 ? value >> 6 : __funnelshift_l(value, value, 4);
        }
    }
    for (uint32_t bit = 1; bit; bit <<= 1) { /* from the lowest on, since the sum carries */
        uint32_t wrong = (word[0] + 4 * word[1] ^ rest) & bit;
        if (bit & FP4_REST) word[0] |= wrong;
        if (bit & FP4_REST << 2) word[1] |= wrong >> 2;
    }
}

#endif
