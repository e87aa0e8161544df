/* emulate.h: runs the kernels of infer.cu on a processor, so that their results can be tested without a GPU. g++
 * includes it before infer.cu and card.cu. It defines what nvcc knows, and the card; emulate.cpp has CUDA's runtime and
 * cuBLAS.
 *
 * The blocks of a kernel run one after the other. The threads of a block are fibers, each with a stack of its own, that
 * take turns: one runs until it waits for others of its warp or block. Each thread of the program is a card of its own:
 * it runs what it has launched. Copies to shared memory are done at once, orders
 * of memory are not modelled, and shared variables with a size are static: they keep what the last block left. How much
 * shared memory a launch asks for does not matter. So this finds wrong results, but no races. */
#pragma once
#include "sampling.h"

#include <crt/host_defines.h>
#undef __builtin_align__
#define __builtin_align__(n) /* kernels write uint4 into arrays of words: registers on a card, here not aligned */
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __grid_constant__
#undef __align__
#define __align__(n) __attribute__((aligned(n)))

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

namespace emulated {

/* ---- fibers ---- */

enum { THREADS = 1024, STACK = 128 << 10, SHARED = 228 << 10 };
struct Fiber {
    void *stack_pointer;
    uint3 index;
    bool done, waits;
};
struct Group { /* a warp, or the block */
    int alive, arrived;
};
inline thread_local Fiber fiber[THREADS], *now;
inline thread_local Group warp[THREADS / 32], block;
inline thread_local void *scheduler;
inline thread_local const std::function<void()> *body;
alignas(1024) inline thread_local uint8_t shared[SHARED];

extern "C" void emulated_switch(void **from, void *to);
inline int number() { return (int)(now - fiber); }
inline void yield() { emulated_switch(&now->stack_pointer, scheduler); }

inline void release(int first, int n) {
    for (int i = first; i < first + n; i++) fiber[i].waits = false;
}
/* Waits until all of a group have come here. True for the last one, which the others wait for. */
inline bool arrive(Group &g) {
    if (++g.arrived == g.alive) return g.arrived = 0, true;
    now->waits = true;
    yield();
    return false;
}
inline void sync_block() {
    if (arrive(block)) release(0, THREADS);
}
/* What the lanes of a warp do together: each brings a T, the last one calls f with all of them. */
template <class T, class F> void together(T &mine, F f) {
    static thread_local T *all[THREADS];
    const int first = number() / 32 * 32;
    all[number()] = &mine;
    if (!arrive(warp[first / 32])) return;
    f(all + first);
    release(first, 32);
}

inline int lane() { return threadIdx.x % 32; }
/* x of all lanes of the warp. */
template <class T> std::array<T, 32> of_lanes(T x) {
    struct {
        T mine;
        std::array<T, 32> all;
    } here = {x, {}};
    together(here, [](auto **lane) {
        for (int i = 0; i < 32; i++)
            for (int j = 0; j < 32; j++) lane[i]->all[j] = lane[j]->mine;
    });
    return here.all;
}

inline void run_fiber() {
    (*body)();
    now->done = true;
    block.alive--; /* but lanes of its warp that still wait for it wait for ever */
    if (block.alive && block.arrived == block.alive) block.arrived = 0, release(0, THREADS);
    yield();
    abort();
}

inline void run_block(int threads) {
    static thread_local uint8_t *stacks = (uint8_t *)aligned_alloc(4096, (size_t)THREADS * STACK);
    memset(shared, 0xFF, sizeof shared); /* NaNs: a kernel must not use what others left */
    block = {threads, 0};
    for (Group &w : warp) w = {32, 0};
    for (int i = 0; i < threads; i++) {
        void **top = (void **)(stacks + (size_t)(i + 1) * STACK) - 2;
        *top = (void *)run_fiber;
        fiber[i] = {top - 6, {(unsigned)i, 0, 0}, false, false};
    }
    for (int left = 1; left;) {
        bool moved = false;
        left = 0;
        for (int i = 0; i < threads; i++) {
            if (fiber[i].done) continue;
            left++;
            if (fiber[i].waits) continue;
            moved = true;
            now = fiber + i;
            threadIdx = now->index;
            emulated_switch(&scheduler, now->stack_pointer);
        }
        if (left && !moved) fprintf(stderr, "emulated: %d threads of a block wait for ever\n", left), abort();
    }
}

inline void run(dim3 grid, dim3 threads, const std::function<void()> &kernel) {
    body = &kernel;
    gridDim = grid, blockDim = threads;
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block((int)threads.x);
}

/* ---- streams and graphs: work is done when the program waits for any of it, or it is recorded ---- */

typedef std::vector<std::function<void()>> Work;
inline thread_local Work *recorded, submitted;
inline void submit(std::function<void()> work) { (recorded ? *recorded : submitted).push_back(work); }
extern "C" bool emulated_lives();
inline void finish() {
    Work now;
    now.swap(submitted);
    for (auto &work : now)
        if (emulated_lives()) work();
}

struct Launch {
    dim3 grid, threads;
    size_t shared = 0;
    cudaStream_t stream = 0;
    template <class... Params, class... Args> void operator()(void (*kernel)(Params...), Args... args) const {
        const dim3 g = grid, t = threads;
        std::function<void()> call = [=] { kernel(Params(args)...); };
        submit([=] { run(g, t, call); });
    }
};
} // namespace emulated

template <class... Params, class... Args>
cudaError_t emulated_launch(const cudaLaunchConfig_t *c, void (*kernel)(Params...), Args... args) {
    emulated::Launch{c->gridDim, c->blockDim}(kernel, args...);
    return cudaSuccess;
}
#define cudaLaunchKernelEx        emulated_launch
#define cudaFuncSetAttribute(...) cudaSuccess
template <class F> cudaError_t emulated_attributes(cudaFuncAttributes *to, F) {
    return *to = {}, to->ptxVersion = to->binaryVersion = 80, cudaSuccess;
}
#define cudaFuncGetAttributes emulated_attributes

/* ---- what nvcc knows ---- */

inline void __syncthreads() { emulated::sync_block(); }
inline void __syncwarp() { emulated::of_lanes(0); }
inline void __threadfence() {}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <class T> T __shfl_sync(unsigned, T x, int from) { return emulated::of_lanes(x)[from & 31]; }
template <class T> T __shfl_xor_sync(unsigned, T x, int by) { return emulated::of_lanes(x)[emulated::lane() ^ by]; }
template <class T> T __shfl_up_sync(unsigned, T x, int by) {
    const int lane = emulated::lane();
    return emulated::of_lanes(x)[lane < by ? lane : lane - by];
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
    const auto all = emulated::of_lanes(x);
    return *std::min_element(all.begin(), all.end());
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) { return ~__reduce_min_sync(0, ~x); }
inline unsigned __ballot_sync(unsigned, bool x) {
    const auto all = emulated::of_lanes((unsigned)x);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= all[i] << i;
    return bits;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T, class U> T atomicExch(T *p, U x) {
    const T old = *p;
    *p = (T)x;
    return old;
}
template <class T, class U> T atomicAdd(T *p, U x) { return atomicExch(p, *p + (T)x); }
template <class T, class U> T atomicMax(T *p, U x) { return atomicExch(p, std::max(*p, (T)x)); }
/* Several threads load weights. */
template <class T, class U> T atomicOr(T *p, U x) { return __atomic_fetch_or(p, (T)x, __ATOMIC_RELAXED); }

inline float __uint_as_float(unsigned x) { return bits_float(x); }
inline unsigned __float_as_uint(float x) { return float_bits(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) << (by & 31) >> 32);
}
inline __nv_bfloat16 fma_of(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) { /* the product is exact in double */
    return __double2bfloat16((double)__bfloat162float(a) * (double)__bfloat162float(b) + (double)__bfloat162float(c));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {fma_of(a.x, b.x, c.x), fma_of(a.y, b.y, c.y)};
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned how) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> (how >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
template <class A, class B> auto min(A a, B b) -> std::common_type_t<A, B> { return b < a ? b : a; }
template <class A, class B> auto max(A a, B b) -> std::common_type_t<A, B> { return a < b ? b : a; }

/* ---- infer.cu's functions for single instructions ---- */

inline void launch_next() {}
inline void wait_previous() {}

template <typename A> inline float emulated_half(uint32_t two, int i) {
    A x;
    memcpy(&x, (const char *)&two + 2 * i, 2);
    return (float)x;
}
template <typename A>
inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    struct {
        uint32_t a[4], b[2];
        float *c;
    } mine = {{a0, a1, a2, a3}, {b0, b1}, c};
    emulated::together(mine, [](auto **lane) {
        static thread_local float a[16][16], b[16][8];
        for (int i = 0; i < 32; i++)
            for (int k = 0; k < 2; k++) {
                const int g = i / 4, t = i % 4 * 2 + k;
                a[g][t] = emulated_half<A>(lane[i]->a[0], k), a[g + 8][t] = emulated_half<A>(lane[i]->a[1], k);
                a[g][t + 8] = emulated_half<A>(lane[i]->a[2], k), a[g + 8][t + 8] = emulated_half<A>(lane[i]->a[3], k);
                b[t][g] = emulated_half<A>(lane[i]->b[0], k), b[t + 8][g] = emulated_half<A>(lane[i]->b[1], k);
            }
        for (int i = 0; i < 32; i++)
            for (int k = 0; k < 4; k++) {
                float sum = 0;
                for (int j = 0; j < 16; j++) sum += a[i / 4 + k / 2 * 8][j] * b[j][i % 4 * 2 + k % 2];
                lane[i]->c[k] += sum;
            }
    });
}
template <bool TRANSPOSED = false> inline uint4 load_matrices(const void *row) {
    struct {
        const uint16_t *row;
        uint32_t out[4];
    } mine = {(const uint16_t *)row, {}};
    emulated::together(mine, [](auto **lane) {
        for (int i = 0; i < 32; i++)
            for (int m = 0; m < 4; m++)
                for (int k = 0; k < 2; k++) {
                    const int r = TRANSPOSED ? i % 4 * 2 + k : i / 4, c = TRANSPOSED ? i / 4 : i % 4 * 2 + k;
                    lane[i]->out[m] |= (uint32_t)lane[m * 8 + r]->row[c] << 16 * k;
                }
    });
    return {mine.out[0], mine.out[1], mine.out[2], mine.out[3]};
}

inline uint4 load_weights(const void *from, bool real) { return real ? *(const uint4 *)from : uint4{}; }
inline uint2 load_pair(const void *from, bool real) { return real ? *(const uint2 *)from : uint2{}; }
inline uint32_t load_word(const void *from, bool real) { return real ? *(const uint32_t *)from : 0; }
inline void copy_16(void *to, const void *from, int bytes = 16) {
    memset(to, 0, 16);
    if (bytes > 0) memcpy(to, from, bytes);
}
inline void copies_end() {}
template <int BUT> inline void copies_done() {}

inline uint64_t load_from_host(const uint64_t *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline uint64_t nanoseconds() { /* who asks waits, perhaps for another card's thread */
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    return (uint64_t)std::chrono::steady_clock::now().time_since_epoch().count();
}
inline float exp2_quick(float x) { return exp2f(x); }
inline uint32_t times_4_plus(uint32_t b, uint32_t a) { return b * 4 + a; }
