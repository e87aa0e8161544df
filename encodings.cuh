/* encodings.cuh: how a lane of a warp reads weights of each type and makes bf16 of them; a part of infer.cu. card.cuh
 * says how codes lie on the card. card.cu brings them there: its card_type() says which type a file's type becomes.
 *
 * Lane 4g + t has sixteen columns of rows g and g + 8 of a chunk of a tile, eight that begin at column(t, 0) and eight
 * that begin at column(t, 1), but where WORDS is 4 the second four of each lie 16 columns after the first. Raw is what
 * it loads; decode() turns eight columns of both rows into bf16 (or f16), divided by FACTOR; eight() reads the same
 * columns of x; multiply() adds the chunk's product with x, and x(n, half) says where a lane finds its columns of the
 * n-th eight tokens. product_tiled and the annex's experts copy chunks to shared memory, in pieces of 16 bytes; read()
 * fills Raw from there. column_for() in fast/prefill.cuh follows from column() and eight().
 *
 *   offset()  where a lane's weights of a tile's first chunk lie; those of chunk k lie k * STEP further on
 *   piece()   the same for a piece, in the order of shared memory
 *   PIECES    of a chunk of a tile
 *   AHEAD     chunks that a lane requests ahead
 *   MATRICES  product_tiled reads 16-bit weights and x with ldmatrix, which gives a lane other columns than column()
 *   BLOCKS    of `product`, with 8 warps, that share a multiprocessor */
template <Type T> struct EncodingCoded;
template <Type T> struct Encoding : EncodingCoded<T> {}; /* but for BF16, F16 and MXFP4: see below */

/* Where an eighth of a chunk of a row, 16 bytes, lies in shared memory. Eight lanes read together and touch all banks:
 * ldmatrix reads the same eighth of eight rows, other loads four eighths of two. For those, eighth e of an odd row lies
 * at e ^ 5, in the other half and of the other parity. A half's eighths 0 and 2, 1 and 3 stay 32 bytes apart, which
 * eight() relies on. */
template <bool MATRICES = false> __device__ inline int eighth_of(int row, int eighth) {
    return row * CHUNK * 2 + (eighth ^ (MATRICES ? row % 8 : row % 2 * 5)) * 16;
}
/* Where columns (t, half) of row g begin in shared memory. */
template <class E> __device__ inline int place_of(int lane, int half) {
    const int column = E::column(lane % 4, half);
    return eighth_of(lane / 4, column / 8) + column % 8 * 2;
}
/* multiply() for encodings that decode weights completely before they multiply. */
template <class E, typename A> struct Decoded {
    typedef A Activation;
    template <int TILES, class Raw, class X>
    __device__ static void multiply(float (&c)[TILES][4], const Raw &raw, const X &x) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 low, high;
            E::decode(raw, half, low, high);
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_eight<A>(c[n], low, high, eight(x(n, half)));
        }
    }
    __device__ static uint4 eight(const void *x) { return *(const uint4 *)x; }
};

template <typename A> struct Encoding16 { /* rows as they stand in the file */
    static constexpr float FACTOR = 1;
    static constexpr int STEP = CHUNK * 2, PIECES = 128, BLOCKS = 2;
    static constexpr bool MATRICES = true;
    template <int TILES> static constexpr int AHEAD = TILES == 1 ? 4 : 2;
    struct Raw {
        uint4 low[2], high[2];
    };
    __device__ static int column(int t, int half) { return half * 32 + t * 8; }
    __device__ static size_t offset(const Matrix &m, int tile, int lane) {
        return ((size_t)(tile * TILE + lane / 4) * m.stride + column(lane % 4, 0)) * 2;
    }
    __device__ static size_t piece(const Matrix &m, int tile, int i) {
        const int row = i / 8, eighth = i % 8 ^ row % 8; /* see eighth_of() */
        return ((size_t)(tile * TILE + row) * m.stride + eighth * 8) * 2;
    }
    __device__ static void load(Raw &r, const Matrix &m, const uint8_t *from, bool real) {
        const uint8_t *high = from + (size_t)8 * m.stride * 2;
        for (int half = 0; half < 2; half++) {
            r.low[half] = load_weights(from + half * 64, real);
            r.high[half] = load_weights(high + half * 64, real);
        }
    }
    /* A lane gets columns 2t and 2t + 1 of each eighth, the operands of mma. Rows read as load() reads them would have
     * to be moved between registers: 253 moves for 64 mma. */
    __device__ static void read(Raw &r, const uint8_t *chunk, int lane) {
        for (int half = 0; half < 2; half++) {
            const uint4 a = load_matrices(chunk + eighth_of<true>(lane % 16, half * 4 + lane / 16));
            const uint4 b = load_matrices(chunk + eighth_of<true>(lane % 16, half * 4 + 2 + lane / 16));
            r.low[half] = {a.x, a.z, b.x, b.z}, r.high[half] = {a.y, a.w, b.y, b.w};
        }
    }
    __device__ static void decode(const Raw &r, int half, uint4 &low, uint4 &high) {
        low = r.low[half], high = r.high[half];
    }
};
template <> struct Encoding<BF16> : Encoding16<bf16>, Decoded<Encoding16<bf16>, bf16> {};
template <> struct Encoding<F16> : Encoding16<f16>, Decoded<Encoding16<f16>, f16> {};

struct Sixteen {
    uint4 low, high; /* bf16 */
};
/* The sixteen e2m1 values of two words (see FP4_MASK in card.cuh) as bf16 times 2^-126, in the order of their columns.
 * `rest` holds the fourth pair of each: the loader set their free bits to that end. */
__device__ inline Sixteen fp4_to_bf16(uint32_t a, uint32_t b) {
    const uint32_t m = FP4_MASK, rest = times_4_plus(b, a);
    return {make_uint4(a & m, __funnelshift_r(a, a, 6) & m, a << 4 & m, __funnelshift_r(rest, rest, 4) & m),
            make_uint4(b & m, __funnelshift_r(b, b, 6) & m, b << 4 & m, rest << 6 & m)};
}

/* A chunk of a tile is 544 bytes in one piece. First come 16 bytes of each lane: columns 16t to 16t + 15 of row g, then
 * of row g + 8. Behind these 512 bytes lie, for each g, the scales of two blocks of 32 of row g and of two of row g +
 * 8, each with FP4_SCALE added. bf16 cannot hold every value times its e8m0 scale, so decode() returns values 2^26 too
 * small, and the finished sum is multiplied by FACTOR. */
template <> struct Encoding<MXFP4> : Decoded<Encoding<MXFP4>, bf16> {
    static constexpr float FACTOR = 0x1p26f;
    static constexpr int STEP = FP4_CHUNK, PIECES = FP4_CHUNK / 16, BLOCKS = 4;
    static constexpr bool MATRICES = false;
    template <int TILES> static constexpr int AHEAD = 2;
    struct Raw {
        uint4 words;
        uint32_t scales;
    };
    __device__ static int column(int t, int half) { return t * 16 + half * 8; }
    __device__ static size_t offset(const Matrix &m, int tile, int lane) {
        return (size_t)tile * (m.stride / CHUNK) * STEP + lane * 16;
    }
    __device__ static size_t piece(const Matrix &m, int tile, int i) { return offset(m, tile, i); }
    __device__ static void load(Raw &r, const Matrix &, const uint8_t *from, bool real) {
        int lane = threadIdx.x % 32;
        r = {load_weights(from, real), load_word(from + 512 - lane * 16 + lane / 4 * 4, real)};
    }
    __device__ static void read(Raw &r, const uint8_t *chunk, int lane) {
        r = {((const uint4 *)chunk)[lane], ((const uint32_t *)(chunk + 512))[lane / 4]};
    }
    __device__ static uint4 times(uint4 eight, uint32_t scale) {
        /* the e8m0 scale as the exponents of a pair of bf16; plus 126 of fp4_to_bf16, minus 26 of FACTOR */
        uint32_t factor = (scale + 126 - 26 - FP4_SCALE) * 0x00800080;
        for (uint32_t *pair : {&eight.x, &eight.y, &eight.z, &eight.w}) {
            __nv_bfloat162 x = __hmul2(*(__nv_bfloat162 *)pair, *(__nv_bfloat162 *)&factor);
            *pair = *(uint32_t *)&x;
        }
        return eight;
    }
    __device__ static void decode(const Raw &r, int half, uint4 &low, uint4 &high) {
        Sixteen row = fp4_to_bf16(r.words.x, r.words.y), row8 = fp4_to_bf16(r.words.z, r.words.w);
        const uint32_t scales = r.scales >> threadIdx.x % 4 / 2 * 8; /* of this lane's block in row g, and in g + 8 */
        low = times(half ? row.high : row.low, scales & 255);
        high = times(half ? row8.high : row8.low, scales >> 16 & 255);
    }
};

/* Codes of 4, 6 or 8 bits: see is_coded() in card.cuh. A few mma in a row compute a sum over 64, 32 or 16 columns, and
 * the word of these columns scales it. Codes become bf16 exactly and in few operations. e4m3 comes out 2^120 (LIFT) too
 * small. The bits of any other code q, read as bf16, are q 2^-133. One multiply-add makes (q - zero point) / 64 of
 * them, and scale() multiplies by 64. An offset and its sum with a code are rounded to bf16. */
template <Type T> struct EncodingCoded {
    typedef bf16 Activation;
    static constexpr int BITS = code_bits(T), WORDS = chunk_words(T), SIZE = word_bytes(T);
    static constexpr bool OFFSET = has_offset(T), MATRICES = false;
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
        if (T == FP8) return {w & 0x87F087F0, w << 4 & 0x80F080F0 | w >> 4 & 0x07000700}; /* see fp8_pair in card.cu */
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

/* One weight of the embedding, for which card.cu makes FP8, PACKED4 and MXFP4 bf16. */
__device__ inline float weight_of(const Matrix &m, size_t row, int column) {
    const size_t at = row * m.stride + column;
    if (m.type == F32) return ((const float *)m.data)[at];
    if (m.type == F16) return (float)((const f16 *)m.data)[at];
    if (m.type == BF16) return (float)((const bf16 *)m.data)[at];
    const uint8_t *chunk = m.chunk(0, row, column, coded_chunk(m.type));
    const int bits = code_bits(m.type), place = code_place(m.type, row % TILE, column % CHUNK);
    int code = bits == 8 ? chunk[place / 8] : chunk[place / 8] >> place % 8 & 15;
    if (bits == 6) {
        const int other = rest_place(row % TILE, column % CHUNK), rest = chunk[other / 8] >> other % 8 & 3;
        code = column % 4 < 2 ? code | rest << 4 : code << 2 | rest;
    }
    code -= 1 << (bits - 1);
    const void *word = chunk + word_place(m.type, row % TILE, column % CHUNK);
    if (m.type == Q8_0) return *(const float *)word * code;
    return (float)*(const f16 *)word * (code + (has_offset(m.type) ? 64 * (float)((const bf16 *)word)[1] : 0));
}
