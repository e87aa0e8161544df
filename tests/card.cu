/* card.cu as the GPU tests have it: their small matrices, too, are read in several pieces. */
#define PIECE_BYTES(bytes) ((size_t)((bytes) < 1 << 20 ? 4096 : 16 << 20))
#define SAME_GPU_AGAIN     1
#define GAP_BYTES          ((size_t)16)
#include "../card.cu"
