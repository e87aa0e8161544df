/* codec.cuh: how the decode kernel copies, reads and multiplies weights: a Codec for each of the two types. */
#pragma once

constexpr int BF16_ROWS = 8;     /* of a tile of BF16 ... */
constexpr int BF16_COLUMNS = 32; /* ... and of a chunk; MXFP4 has infer.cu's TILE and CHUNK */

/* n rows of activations, times LIFT, `pitch` elements apart, in any memory; with `index`, row j is row index[j] /
 * divide. Missing rows alias the last one; nobody reads their results. */
struct Activations {
    const bf16 *x;
    int pitch, n;
    const int *index = NULL;
    int divide = 1;
    bool polled = false; /* other blocks publish them, perhaps later */
    __device__ const bf16 *row(int j) const {
        j = min_of(j, n - 1);
        return x + (size_t)(index ? index[j] / divide : j) * pitch;
    }
};

/* The words of the decode kernel:
 *   tile   ROWS rows of a matrix; a block multiplies whole tiles
 *   chunk  ROWS by K values, what a warp multiplies at once
 *   part   `per` chunks of a tile side by side, or fewer, what one stage of the ring holds
 *   quad   four tokens; QUADS is how many, 0 stands for a single token
 *
 * A Codec has
 *   place(i)       where the i-th activation of a token lies
 *   copy_part()    starts the copy of n chunks from `first` on to a stage
 *   Sum<QUADS>     a lane's sums of a tile. reduce() makes final values of them; store() puts those of real tokens to
 *                  sums (tokens, ROWS), where first_sum(lane) is the place of the lane's first one
 *   Lane<QUADS>    a lane's share of a stage. load() brings its activations of chunk i for quad j of N, a Fragment for
 *                  many tiles; add() multiplies chunk i by them. Lane 4g + t reads row g (g + 8)
 *   max_word()     the maximum of a Fragment's halves: see max_halves() */
template <Type T> struct Codec;

/* Bytes between rows in a stage: odd and even rows begin half the banks apart. */
__host__ __device__ constexpr int bank_pitch(int bytes) { return bytes + (bytes % 128 ? 0 : 64); }

/* BF16: weights are mma's rows, activations its columns. One load of 16 bytes, eight neighbouring columns of row g,
 * fills a whole fragment: two of its words are row g; the other two take the place of row g + 8 but are row g at other
 * columns. So a token takes two of mma's columns, one for each half, and its words lie in the order 0, 2, 1, 3. */
template <> struct Codec<BF16> {
    static constexpr Type TYPE = BF16;
    static constexpr int ROWS = BF16_ROWS, K = BF16_COLUMNS,
                         WIDTH = K * sizeof(bf16); /* WIDTH: bytes of a chunk's row */
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return stride * sizeof(bf16); }
    __host__ __device__ static constexpr int stage_bytes(int per) { return ROWS * bank_pitch(per * WIDTH); }
    __device__ static void copy_part(Barrier *full, uint8_t *stage, int per, const uint8_t *tile, int stride, int first,
                                     int n, int lane) {
        full->copy_rows(stage, bank_pitch(per * WIDTH), tile + first * WIDTH, row_bytes(stride), ROWS, n * WIDTH, lane);
    }
    __device__ static uint32_t max_word(uint32_t so_far, uint2 x) { return max_halves(so_far, x.x, x.y); }
    template <int QUADS> struct Sum { /* tokens 4j + t; [0] and [3] are the halves */
        static constexpr int N = max_of(QUADS, 1);
        float c[N][4] = {};
        __device__ void reduce() {
            for (int j = 0; j < N; j++) c[j][0] += c[j][3];
        }
        static __device__ int first_sum(int lane) { return lane % 4 * ROWS + lane / 4; }
        __device__ void store(float *to, int tokens, int lane) const {
            for (int j = 0; j < N; j++)
                if (j * 4 + lane % 4 < tokens) to[j * 4 * ROWS] = c[j][0];
        }
    };
    __host__ __device__ static constexpr int place(int i) { return (i & ~6) | (i & 2) << 1 | (i & 4) >> 1; }
    __device__ static void store_four(bf16 *x, float a, float b, float c, float d) {
        ((uint32_t *)x)[0] = pack(a, b), ((uint32_t *)x)[2] = pack(c, d);
    }
    template <int QUADS> struct Lane {
        typedef uint2 Fragment;
        static constexpr int N = Sum<QUADS>::N;
        const uint8_t *weights;
        const bf16 *column[N];
        __device__ Lane(const uint8_t *stage, int per, const Activations &x, int lane)
            : weights(stage + lane / 4 * bank_pitch(per * WIDTH) + lane % 4 * 16) { /* 16 bytes of a row's chunk */
            for (int j = 0; j < N; j++) column[j] = x.row(j * 4 + lane / 8) + lane % 4 * 8 + lane / 4 % 2 * 4;
        }
        __device__ void load(Fragment &x, int i, int j, bool polled = false) const {
            const uint2 *from = (const uint2 *)(column[j] + i * K);
            x = polled ? poll(from) : *from;
        }
        __device__ void add(Sum<QUADS> &sum, int i, const Fragment (&x)[N]) const {
            uint4 w = *(const uint4 *)(weights + i * WIDTH);
#pragma unroll
            for (int j = 0; j < N; j++) mma<bf16>(sum.c[j], w.x, w.y, w.z, w.w, x[j].x, x[j].y);
        }
    };
};

/* mma_eight, but c = and not +=. */
__device__ inline void mma_eight_first(float (&c)[4], uint4 row, uint4 row8, uint4 column) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(row.x), "r"(row8.x), "r"(row.y), "r"(row8.y), "r"(column.x), "r"(column.y), "f"(0.f));
    mma<bf16>(c, row.z, row8.z, row.w, row8.w, column.z, column.w);
}

/* MXFP4: weights are mma's rows, activations its columns. A chunk is that of Encoding<MXFP4>: lane 4g + t
 * reads columns 16t .. 16t + 15 of rows g and g + 8, and the scales lie behind them. Shifts and masks make bf16
 * times 2^-126 of two words (fp4_to_bf16). The activations are lifted by 2^100, exactly; the block's scale, stored as
 * the exponent of a float with 26 added, does the rest.
 *
 * The scale multiplies the product, so the two blocks of 32 columns need sums of their own. Lanes t = 0 and 1 hold
 * weights of the first block, 2 and 3 of the second. So a token takes two of mma's columns, each with zeros for the
 * other block. The columns are ordered so that lane t gets sums of one block only, t % 2, of two tokens. So it needs
 * two scales, of rows g and g + 8, and its neighbour has the other block of the same tokens. A single token has all
 * eight columns for its four sums (two rows, two blocks): lane t gets one of them, whose scale is byte t. */
template <> struct Codec<MXFP4> {
    static constexpr Type TYPE = MXFP4;
    static constexpr int ROWS = TILE, K = CHUNK;
    static constexpr float LIFT = 0x1p100f;
    struct Fragment {
        uint4 low, high;
    };
    __device__ static uint32_t max_word(uint32_t so_far, const Fragment &x) {
        uint4 a = x.low, b = x.high;
        return max_halves(max_halves(so_far, a.x, a.y), max_halves(a.z, a.w, b.x), max_halves(b.y, b.z, b.w));
    }
    /* Block t % 2 of tokens 4j + t and 4j + (t ^ 1), in row g and in row g + 8; reduce() completes [0] and [2]. */
    template <int QUADS> struct Sum {
        float c[QUADS][4] = {};
        __device__ void reduce() {
            for (int j = 0; j < QUADS; j++)
                for (int i = 0; i < 4; i += 2) c[j][i] += __shfl_xor_sync(~0u, c[j][i + 1], 1);
        }
        static __device__ int first_sum(int lane) { return lane % 4 * ROWS + lane / 4; }
        __device__ void store(float *to, int tokens, int lane) const {
            for (int j = 0; j < QUADS; j++)
                for (int i = 0; i < 2; i++)
                    if (j * 4 + lane % 4 < tokens) to[j * 4 * ROWS + i * 8] = c[j][i * 2];
        }
    };
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride / K * FP4_CHUNK / ROWS; }
    __host__ __device__ static constexpr int stage_bytes(int per) { return per * FP4_CHUNK; }
    __device__ static void copy_part(Barrier *full, uint8_t *stage, int, const uint8_t *tile, int, int first, int n,
                                     int lane) {
        full->copy_rows(stage, 0, tile + (size_t)first * FP4_CHUNK, 0, 1, n * FP4_CHUNK, lane);
    }
    __host__ __device__ static constexpr int place(int i) { return i; }
    __device__ static void store_four(bf16 *x, float a, float b, float c, float d) {
        *(uint2 *)x = make_uint2(pack(a * LIFT, b * LIFT), pack(c * LIFT, d * LIFT));
    }
    /* c = a lane's words of rows g and g + 8, 16 columns each, times their activations */
    __device__ static void multiply(float (&c)[4], uint4 words, uint4 low, uint4 high) {
        Sixteen row = fp4_to_bf16(words.x, words.y), row8 = fp4_to_bf16(words.z, words.w);
        mma_eight_first(c, row.low, row8.low, low);
        mma_eight(c, row.high, row8.high, high);
    }
    template <int QUADS> struct Lane {
        typedef Codec::Fragment Fragment;
        static constexpr int N = QUADS;
        const uint8_t *weights, *scale;
        const bf16 *column[N];
        bool real[N]; /* of a token, if they belong to the block of this lane's weights; else zeros, which also take
                         least power */
        __device__ Lane(const uint8_t *stage, int, const Activations &x, int lane)
            : weights(stage + lane * 16), scale(stage + 512 + lane / 4 * 4 + lane % 2) {
            for (int j = 0; j < N; j++) {
                int token = j * 4 + lane / 16 * 2 + (lane / 4 ^ lane / 8) % 2;
                column[j] = x.row(token) + lane % 4 * 16, real[j] = lane / 8 % 2 == lane % 4 / 2 && token < x.n;
            }
        }
        __device__ void load(Fragment &x, int i, int j, bool polled = false) const {
            x = {load_16(column[j] + i * K, real[j], polled), load_16(column[j] + i * K + 8, real[j], polled)};
        }
        __device__ void add(Sum<QUADS> &sum, int i, const Fragment (&x)[N]) const {
            uint4 words = *(const uint4 *)(weights + i * FP4_CHUNK);
            float scales[2]; /* of rows g and g + 8; loaded as bytes, which saves shifts and masks */
            for (int k = 0; k < 2; k++) scales[k] = __uint_as_float((uint32_t)scale[i * FP4_CHUNK + k * 2] << 23);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float c[4];
                multiply(c, words, x[j].low, x[j].high);
                for (int k = 0; k < 4; k++) sum.c[j][k] = fmaf(scales[k / 2], c[k], sum.c[j][k]);
            }
        }
    };
};
template <> struct Codec<MXFP4>::Sum<0> { /* lane t: block t % 2 of row g + 8 (t / 2) */
    float c = 0;
    __device__ void reduce() { c += __shfl_xor_sync(~0u, c, 1); }
    static __device__ int first_sum(int lane) { return lane / 4 + lane % 4 * 4; }
    __device__ void store(float *to, int, int lane) const {
        if (lane % 2 == 0) *to = c;
    }
};
template <> struct Codec<MXFP4>::Lane<0> {
    typedef Codec::Fragment Fragment;
    static constexpr int N = 1;
    const uint8_t *weights, *scale;
    const bf16 *column;
    bool real; /* mma's columns 0 and 5 are of the first block, 2 and 7 of the second; the others stay zeros */
    __device__ Lane(const uint8_t *stage, int, const Activations &x, int lane)
        : weights(stage + lane * 16), scale(stage + 512 + lane), column(x.row(0) + lane % 4 * 16),
          real(lane % 4 < 2 ? lane / 4 == 0 || lane / 4 == 5 : lane / 4 == 2 || lane / 4 == 7) {}
    __device__ void load(Fragment &x, int i, int, bool polled = false) const {
        x = {load_16(column + i * K, real, polled), load_16(column + i * K + 8, real, polled)};
    }
    __device__ void add(Sum<0> &sum, int i, const Fragment (&x)[N]) const {
        float c[4];
        multiply(c, *(const uint4 *)(weights + i * FP4_CHUNK), x[0].low, x[0].high);
        sum.c = fmaf(__uint_as_float((uint32_t)scale[i * FP4_CHUNK] << 23), c[0] + c[3], sum.c); /* one of them is 0 */
    }
};

/* Stores activation i of a row for a matrix of this type. */
__device__ inline void store_activation(Type type, void *row, int i, float x) {
    if (type == MXFP4)
        ((bf16 *)row)[Codec<MXFP4>::place(i)] = (bf16)(x * Codec<MXFP4>::LIFT);
    else
        ((bf16 *)row)[Codec<BF16>::place(i)] = (bf16)x;
}
