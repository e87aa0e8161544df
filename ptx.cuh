/* ptx.cuh: instructions that CUDA C++ has no words for, or that the compiler would make slower; a part of infer.cu.
 * tests/emulated/ptx.cuh does the same in C++, so that tests can run infer.cu without a card. */

/* Programmatic dependent launch: a kernel may begin before the previous one has ended. It may read that kernel's
 * results only after wait_previous(). Before Hopper a kernel begins when the previous one has ended. */
__device__ inline void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* c (16, 8) += a (16, 16) b (16, 8). Lane 4g + t holds rows g and g + 8 of a and column g of b, both at t's four of the
 * 16 inner indices, and rows g and g + 8, columns 2t and 2t + 1, of c. Which inner index is which does not matter as
 * long as a and b agree. a0 and b0 are two of the four, a2 and b1 the others; a1 and a3 are a0 and a2 in row g + 8. */
template <typename A>
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    if constexpr (std::is_same_v<A, f16>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* 16, 8 or 4 bytes of the card's memory, or zeros unless `real`. The condition is part of the asm: with an `if` around
 * it the compiler copies the result to other registers, and so waits for it at once. load_weights() keeps nothing in
 * L1, because weights are read once. Not ld.global.nc: the compiler may move such loads behind wait_previous(). */
__device__ inline uint4 load_weights(const void *from, bool real) {
    uint4 x;
    asm volatile("{.reg .pred p; setp.ne.u32 p,%5,0; mov.b32 %0,0; mov.b32 %1,0; mov.b32 %2,0; mov.b32 %3,0;"
                 "@p ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];}"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from), "r"((int)real));
    return x;
}
__device__ inline uint2 load_pair(const void *from, bool real) {
    uint2 x;
    asm volatile("{.reg .pred p; setp.ne.u32 p,%3,0; mov.b32 %0,0; mov.b32 %1,0;"
                 "@p ld.global.L2::256B.v2.u32 {%0,%1},[%2];}"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(from), "r"((int)real));
    return x;
}
__device__ inline uint32_t load_word(const void *from, bool real) {
    uint32_t x;
    asm volatile("{.reg .pred p; setp.ne.u32 p,%2,0; mov.b32 %0,0; @p ld.global.L2::256B.u32 %0,[%1];}"
                 : "=r"(x)
                 : "l"(from), "r"((int)real));
    return x;
}

/* Copies 16 bytes to shared memory; only the first `bytes` are read, the others become 0. copies_end() closes a batch
 * of copies; copies_done<n>() waits until at most the last n batches are still on the way. */
__device__ inline void copy_16(void *to, const void *from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
}
__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int BUT> __device__ inline void copies_done() {
    asm volatile("cp.async.wait_group %0;" ::"n"(BUT) : "memory");
}

__device__ inline float exp2_quick(float x) { /* for results that are rounded to bf16 */
    asm("ex2.approx.ftz.f32 %0,%0;" : "+f"(x));
    return x;
}

/* Four 8 by 8 matrices of 16 bits from shared memory. Lanes 8i to 8i + 7 say where the rows of the i-th are; lane 4g +
 * t gets columns 2t and 2t + 1 of row g of each or, transposed, rows 2t and 2t + 1 of column g. */
template <bool TRANSPOSED = false> __device__ inline uint4 load_matrices(const void *row) {
    uint4 x;
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(at)
                     : "memory");
    return x;
}

/* 4 b + a in one instruction. */
__device__ inline uint32_t times_4_plus(uint32_t b, uint32_t a) {
    uint32_t x;
    asm("mad.lo.u32 %0,%1,4,%2;" : "=r"(x) : "r"(b), "r"(a));
    return x;
}
