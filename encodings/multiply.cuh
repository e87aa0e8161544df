/* multiply.cuh: how a lane reads codes and makes bf16 of them (Encoding, see infer.cu), one weight of the embedding,
 * and a whole matrix as bf16, for cuBLAS. */
#pragma once

/* A few mma in a row compute a sum over 64, 32 or 16 columns, and the word of these columns scales it. Codes become
 * bf16 exactly and in few operations. e4m3 comes out 2^120 (LIFT) too small. The bits of any other code q, read as
 * bf16, are q 2^-133. One multiply-add makes (q - zero point) / 64 of them, and scale() multiplies by 64. An offset and
 * its sum with a code are rounded to bf16. */
template <Type T> struct Encoding {
    typedef bf16 Activation;
    static constexpr int BITS = codes_of(T).bits, WORDS = chunk_words(T), SIZE = codes_of(T).word_bytes;
    static constexpr bool OFFSET = codes_of(T).offset, MATRICES = false;
    static constexpr float FACTOR = 1, LIFT = T == FP8 ? 0x1p120f : 1;
    static constexpr int STEP = coded_chunk(T), PIECES = STEP / 16, BLOCKS = 2;
    template <int TILES> static constexpr int AHEAD = TILES == 1 || (TILES == 2 && T == PACKED4) ? 4 : 2;
    struct Raw {
        uint32_t code[2][BITS / 4 * 2], rest[2], word[2][WORDS * SIZE / 4]; /* of rows g and g + 8; rest: of 6 bits */
    };
    __device__ static int column(int t, int half) { return half * 32 + t * (WORDS == 4 ? 4 : 8); }
    __device__ static size_t offset(const Matrix &m, int tile, int lane) {
        return (size_t)tile * (m.stride / CHUNK) * STEP + lane * 16;
    }
    __device__ static size_t piece(const Matrix &m, int tile, int i) { return offset(m, tile, i); }
    __device__ static void load(Raw &r, const Matrix &, const uint8_t *from, bool real) {
        const int lane = threadIdx.x % 32;
        for (int k = 0; k < BITS / 4; k++) *(uint4 *)(&r.code[0][0] + k * 4) = load_weights(from + k * 512, real);
        if (BITS == 6) *(uint2 *)r.rest = load_pair(from + 512 - lane * 8, real);
        const uint8_t *words = from - lane * 16 + codes_bytes(T) + lane / 4 * WORDS * SIZE * 2;
        if (WORDS == 1) *(uint2 *)&r.word[0][0] = load_pair(words, real);
        for (int k = 0; k < WORDS * SIZE / 8; k++)
            *(uint4 *)(&r.word[0][0] + k * 4) = load_weights(words + k * 16, real);
    }
    __device__ static void read(Raw &r, const uint8_t *chunk, int lane) {
        for (int k = 0; k < BITS / 4; k++)
            *(uint4 *)(&r.code[0][0] + k * 4) = *(const uint4 *)(chunk + k * 512 + lane * 16);
        if (BITS == 6) *(uint2 *)r.rest = ((const uint2 *)(chunk + 512))[lane];
        const uint2 *words = (const uint2 *)(chunk + codes_bytes(T)) + lane / 4 * WORDS * SIZE / 4;
        for (int k = 0; k < WORDS * SIZE / 4; k++) *(uint2 *)(&r.word[0][0] + k * 2) = words[k];
    }
    __device__ static uint4 eight(const void *x) {
        if (WORDS < 4) return *(const uint4 *)x;
        const uint2 first = *(const uint2 *)x, second = *((const uint2 *)x + 4); /* 16 columns further on */
        return {first.x, first.y, second.x, second.y};
    }
    /* a b + c of two bf16 each */
    __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
        const __nv_bfloat162 x = __hfma2(*(__nv_bfloat162 *)&a, *(__nv_bfloat162 *)&b, *(__nv_bfloat162 *)&c);
        return *(const uint32_t *)&x;
    }
    /* Group k (0 to 3) of four codes, two in a register, of row g (high: g + 8): the columns of one mma. */
    __device__ static uint2 codes(const Raw &r, int high, int k) {
        constexpr uint32_t LIFTS = 0x7F007F00, LIFTS_4 = 0x7E007E00, LIFTS_16 = 0x7D007D00; /* 2^127, 2^125, 2^123 */
        constexpr uint32_t MIDDLE = (BITS == 4 ? 0xBE00u : BITS == 6 ? 0xBF00u : 0xC000u) * 0x10001; /* over 64 */
        const uint32_t w = BITS == 8 ? r.code[high][k] : r.code[high][k / 2] >> k % 2 * 8;
        if (T == FP8) return {w & 0x87F087F0, w << 4 & 0x80F080F0 | w >> 4 & 0x07000700}; /* see fp8_pair in load.cuh */
        if (BITS == 8) return {fma(w & 0x00FF00FF, LIFTS, MIDDLE), fma(__byte_perm(w, 0, 0x4341), LIFTS, MIDDLE)};
        uint32_t first = w & 0x000F000F, second = w & 0x00F000F0, zero = MIDDLE;
        if (T == PACKED4) zero = fma((r.word[high][0] & 15) * 0x00010001, LIFTS ^ 0x80008000, 0x80008000);
        if (BITS == 6) {
            const uint32_t rest = __funnelshift_r(r.rest[high], r.rest[high], k * 4);
            first |= rest & 0x00300030, second |= rest & 0x000C000C;
        }
        return {fma(first, LIFTS, zero), fma(second, BITS == 6 ? LIFTS_4 : LIFTS_16, zero)};
    }
    /* What multiplies the codes of the chunk's i-th word. */
    __device__ static float scale(const Raw &r, int high, int i) {
        const uint32_t word = r.word[high][i * SIZE / 4];
        const float2 both = __half22float2(*(const __half2 *)&word);
        if (OFFSET || T == Q6_K) return (T == Q6_K && i % 2 ? both.y : both.x) * 64;
        return __uint_as_float(T == PACKED4 ? word & ~15u : word) * (T == FP8 ? 1 : 64);
    }
    /* The bf16 that is added to them first. */
    __device__ static uint32_t offset_of(const Raw &r, int high, int i) { return OFFSET ? r.word[high][i] >> 16 : 0; }
    /* The weights of codes(), rounded to bf16, for product_tiled and cuBLAS. */
    __device__ static uint2 weights(const Raw &r, int high, int k) {
        const uint2 code = codes(r, high, k);
        const float by = scale(r, high, k * WORDS / 4) * LIFT;
        const float add = __uint_as_float(offset_of(r, high, k * WORDS / 4) << 16) * by;
        auto scaled = [&](uint32_t pair) {
            const float2 q = __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
            return pack(q.x * by + add, q.y * by + add);
        };
        return {scaled(code.x), scaled(code.y)};
    }
    __device__ static void decode(const Raw &r, int half, uint4 &low, uint4 &high) {
        auto eight_of = [&](int row8) {
            const uint2 first = weights(r, row8, 2 * half), second = weights(r, row8, 2 * half + 1);
            return make_uint4(first.x, first.y, second.x, second.y);
        };
        low = eight_of(0), high = eight_of(1);
    }
    /* codes() plus their offset */
    __device__ static uint2 shifted(const Raw &r, int high, int k) {
        const uint32_t one = 0x3F803F80, offset = offset_of(r, high, k * WORDS / 4) * 0x10001;
        const uint2 code = codes(r, high, k);
        return OFFSET ? make_uint2(fma(code.x, one, offset), fma(code.y, one, offset)) : code;
    }
    template <int TILES, class X> __device__ static void multiply(float (&c)[TILES][4], const Raw &r, const X &x) {
        float part[TILES][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 by[TILES];
#pragma unroll
            for (int n = 0; n < TILES; n++) by[n] = eight(x(n, half));
#pragma unroll
            for (int k = half * 2; k < half * 2 + 2; k++)
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const uint32_t b0 = k % 2 ? by[n].z : by[n].x, b1 = k % 2 ? by[n].w : by[n].y;
                    if (k * WORDS % 4 == 0)
                        for (int j = 0; j < 4; j++) part[n][j] = 0;
                    const uint2 code = shifted(r, 0, k), code8 = shifted(r, 1, k);
                    mma<bf16>(part[n], code.x, code8.x, code.y, code8.y, b0, b1);
                    if ((k + 1) * WORDS % 4) continue;
                    const float low = scale(r, 0, k * WORDS / 4), high = scale(r, 1, k * WORDS / 4);
                    for (int j = 0; j < 4; j++) c[n][j] += (j < 2 ? low : high) * (part[n][j] * LIFT);
                }
        }
    }
};

/* One weight of the embedding; card.cu makes bf16 of types that are not reads_one(). */
__device__ inline float coded_weight(const Matrix &m, size_t row, int column) {
    const uint8_t *chunk = m.chunk(0, row, column, coded_chunk(m.type));
    const int bits = codes_of(m.type).bits, place = code_place(m.type, row % TILE, column % CHUNK);
    int code = bits == 8 ? chunk[place / 8] : chunk[place / 8] >> place % 8 & 15;
    if (bits == 6) {
        const int other = rest_place(row % TILE, column % CHUNK), rest = chunk[other / 8] >> other % 8 & 3;
        code = column % 4 < 2 ? code | rest << 4 : code << 2 | rest;
    }
    code -= 1 << (bits - 1);
    const void *word = chunk + word_place(m.type, row % TILE, column % CHUNK);
    if (m.type == Q8_0) return *(const float *)word * code;
    return (float)*(const f16 *)word * (code + (codes_of(m.type).offset ? 64 * (float)((const bf16 *)word)[1] : 0));
}

/* A Matrix as bf16, of the same stride, for cuBLAS. A warp takes a chunk of a tile. */
template <Type T> __global__ void __launch_bounds__(256) decode_to_bf16(Matrix m, bf16 *to) {
    typedef Encoding<T> E;
    const int lane = threadIdx.x % 32, chunks = m.stride / CHUNK, i = blockIdx.x * 8 + threadIdx.x / 32;
    const int tile = i / chunks, chunk = i % chunks;
    launch_next();
    typename E::Raw raw;
    E::load(raw, m, m.data + E::offset(m, tile, lane) + (size_t)chunk * E::STEP, tile < m.tiles());
    wait_previous();
    for (int high = 0; high < 2; high++) {
        const int row = tile * TILE + lane / 4 + high * 8;
        if (row >= m.rows) break;
        for (int k = 0; k < 4; k++) {
            const int column = chunk * CHUNK + E::column(lane % 4, k / 2) + k % 2 * (E::WORDS == 4 ? 16 : 4);
            *(uint2 *)(to + (size_t)row * m.stride + column) = E::weights(raw, high, k);
        }
    }
}

cudaError_t decode_matrix(const Gpu *gpu, const Matrix &m, bf16 *to) {
    return with_type(m.type, [&](auto type) {
        if constexpr (is_coded(type))
            return launch(gpu, decode_to_bf16<type>, (m.tiles() * (m.stride / CHUNK) + 7) / 8, 256, 0, m, to);
        return cudaErrorNotSupported;
    });
}
