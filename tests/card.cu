/* card.cu as the GPU tests have it: their small matrices, too, are read in several pieces. */
#define PIECE_BYTES 4096
#include "../card.cu"
