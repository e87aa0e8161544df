/* fast.cuh: the annex: kernels that only make things faster, beside the plain engine in infer.cu. tiles.cuh is for
 * every card: kernels that are fused, and tiles of many tokens. The other files are for Hopper, and replace three parts
 * more: decode(), a step of at most MAX_DECODE tokens, for gpt-oss's shapes; attention of prompts with heads of 64 or
 * 128, and the products of experts that have many tokens, for every model. infer.cu computes everything else. `make
 * FAST=no` builds without the annex; --plain switches it off.
 *
 * What is different from infer.cu, and why
 *
 * Decode. infer.cu and tiles.cuh launch a kernel for each step of a layer. Between two kernels the memory is partly
 * idle: the last blocks end, results travel, the next blocks begin. Here one persistent kernel computes the whole step.
 * Which weights come next does not depend on data, except for the experts. So in each block a producer warp copies the
 * weights through a ring in shared memory, without a stop between phases, and consumer warps multiply. What then limits
 * a single token is the chain of dependent steps: how fast values get from block to block. So blocks publish values and
 * poll them instead of waiting for fences, and a sum counts how many have added to it. A fence waits for all copies in
 * flight, so the fences that remain come where few copies are. What limits many tokens is the number of instructions,
 * since the card reaches its power limit. So warps keep activations in registers for all tiles of a matrix, hardly
 * anything is spilled, and each instance knows all its shapes.
 *
 * Prefill. Attention of a prompt and the experts' products use wgmma on a ring in shared memory. infer.cu's decoders
 * unpack weights in registers, as wgmma's rows. A decode step of very many streams takes the same products.
 *
 * Most of what gave more than 1.5 %: tokens/s of gpt-oss-20b on one H200 before and after it. The column in the middle
 * is the number of streams, or of tokens in the prompt. Rows come from different versions, cards and runs.
 * notebooks/speed.md has them all, with the commands, and what did not help.
 *
 *   decode                                                                           streams   before   after
 *   one persistent kernel (at first 382); shapes known to the compiler; fewer instructions 1      488     623
 *   two stages of 24 KB in flight instead of three                                         1      696     753
 *   the router's sums count who has added: top-k without a barrier                         1      753     775
 *   producers hold while a fence is pending                                                1      790     804
 *   weights leave L2 first (evict_first)                                                   1      861     879
 *   a block has one range of the experts' tiles and adds integers to x                    16    2,008   2,959
 *   activations of up to 4 tokens stay in registers                                        4    1,688   1,851
 *   and of up to 16; x is stored times the norm's weight, one block sums its squares      16    3,112   4,219
 *   a single token's values are published, with one fence a layer                          1      937     959
 *   phase down polls its activations, without a barrier                                    1      959     975
 *   instances for at most 4, 8 and 16 tokens                                               4    2,044   2,102
 *   attention of a single token waits for no fence                                         1      994   1,015
 *   fewer instructions to unpack MXFP4, two scales instead of four                         8    3,095   3,193
 *
 *   prefill                                                                           tokens   before   after
 *   experts and attention with wgmma, a persistent grid                                2,048   29,200  55,700
 *   weights by cp.async, not bulk copies of 544 bytes; biases inside cublasLt          2,048   55,800  64,900
 *   one wgmma of 192 columns; two attention blocks on a multiprocessor                 2,048   64,900  71,900
 *   the experts of a decode step, 256 streams at depth 1,024                             256   20,212  23,551
 *
 * Files, in the order in which to read them
 *   tiles.cuh     every card: products that norm and route, tiles, cuBLAS, attention; block()
 *   latent.cuh    every card: attention over latents
 *   publish.cuh   copies and barriers, published values, buffers
 *   codec.cuh     how decode reads and multiplies BF16 and MXFP4; defines tile, chunk, part and quad
 *   ring.cuh      a block of the decode kernel: its shared memory, the ring, the product of a tile
 *   slab.cuh      what decode adds to infer.cu's attention in registers
 *   decode.cuh    the decode kernel, phase by phase
 *   prefill.cuh   attention of a prompt, experts of many tokens
 *   hopper.cuh    the host's side of Hopper's kernels: buffers, launches, taps
 *   fast.cuh      what infer.cu and card.cu call */
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#else
#define HOPPER 0
#endif

#include <array>
#include <cublasLt.h>
#include <map>

namespace fast {

/* Whether this code has Hopper's own instructions. The host runs it on the card: only the driver knows which of a
 * build's architectures it chose. */
__device__ int has_hopper = HOPPER;

#include "fast/tiles.cuh"
#ifdef ROOM_families
#include "fast/latent.cuh"
#endif
#ifdef __CUDACC__
#include "fast/publish.cuh"
#include "fast/codec.cuh"
#include "fast/ring.cuh"
#include "fast/slab.cuh"
#include "fast/decode.cuh"
#include "fast/prefill.cuh"
#include "fast/hopper.cuh"
#else /* tests run the other kernels as C++ */
struct Decode {};
void open_hopper(Gpu *) {}
void close_hopper(Gpu *) {}
void plan_decode(Gpu *, Plan *) {}
bool prepare_decode(Gpu *, Error *) { return true; }
bool decode(Pass *, uint8_t *, Error *) { return false; }
int wgmma_rows(const Pass *) { return 0; }
template <int D> cudaError_t launch_attention_wgmma(const Pass *, const DeviceLayer &) { return cudaErrorNotSupported; }
int wgmma_job_size(const Pass *, const DeviceLayer &) { return 0; }
bool experts_wgmma(const Pass *, const DeviceLayer &, Error *) { return false; }
#endif

bool open(Gpu *gpu, Error *e) {
    if (gpu->limits.plain) return true;
    if (!open_tiles(gpu, e)) return false;
    open_hopper(gpu);
    return true;
}
void plan(Gpu *gpu, Plan *p) {
    plan_tiles(gpu, p);
    if (gpu->has_decode) plan_decode(gpu, p);
}
bool prepare(Gpu *gpu, Error *e) { return !gpu->has_decode || prepare_decode(gpu, e); }
void close(Gpu *gpu) {
    if (gpu->fast->blas) cublasLtDestroy(gpu->fast->blas);
    close_hopper(gpu);
    delete gpu->fast;
}
} // namespace fast
