/* codec.cuh: how few.cuh reads and multiplies weights: each type is a row of this table. */
#pragma once

constexpr int GROUP = 8;          /* rows of BF16 that a warp multiplies at once ... */
constexpr int DENSE_COLUMNS = 32; /* ... and the columns of a chunk of them */

/* n rows of activations, times LIFT, `pitch` apart in any memory; with `which`, row j is the which[j] / per-th of them. Rows that there are not lie where the
 * last one does, though MXFP4 takes zeros for them: nobody looks at what they give. (But see twin_at().) */
template <typename A> struct Activations {
    const A *x;
    int pitch, n;
    const int *which = NULL;
    int per = 1;
    bool told = false; /* by other blocks, perhaps not yet: see UNWRITTEN */
    __device__ const A *row(int j) const {
        j = min_of(j, n - 1);
        return x + (size_t)(which ? which[j] / per : j) * pitch;
    }
};

/* A chunk is ROWS rows by K columns; an item is `per` of them side by side, or fewer. A Sum<TILES> collects W x of these rows for 4 TILES
 * tokens, Sum<0> for one alone, Sum<TWINS> for sixteen, in the same order. Lane<TILES> says what a lane adds to it: load() brings what it needs of chunk i's
 * activations of the j-th of N tiles (TWINS: halves), Kept, which serve chunks of many rows, and add() multiplies them. highest(Kept): see highest_halves().
 * Lane 4g + t loads row g. reduce() makes final values of what was collected, and store() puts them, but for tokens that there are not, to sums
 * (tokens, ROWS), from first_of(lane) on, where the first of a lane belongs.
 * place(i) is where the i-th activation of a token lies. */
template <Type T> struct Codec;
constexpr int TWINS = -1; /* instead of a number of tiles: of 9 to FEW tokens, see twin_at() */
/* Whether a step of so many tokens of gpt-oss's shapes has twins. Of the instance for so many at most, too: few<8> serves all up to 8. */
__host__ __device__ constexpr bool are_twins(int tokens) { return tokens > 8; }
static_assert(FEW <= 16, "twins are tokens g and g + 8");

/* Bytes between rows in a stage: odd and even rows begin half the banks apart. */
__host__ __device__ constexpr int bank_pitch(int bytes) { return bytes + (bytes % 128 ? 0 : 64); }

/* BF16: weights are mma's rows, activations its columns. What a lane reads at once, eight neighbouring columns of row g, fills a whole
 * fragment: two of its four words are row g, the others are called row g + 8, which is the same row at other columns. So a token
 * needs two columns of activations, one for either half, whose words lie together: in the order 0, 2, 1, 3. */
template <> struct Codec<BF16> {
    static constexpr Type TYPE = BF16;
    static constexpr int ROWS = GROUP, K = DENSE_COLUMNS, WIDTH = K * sizeof(bf16); /* WIDTH: bytes of a chunk's row */
    typedef bf16 Activation;
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return stride * sizeof(bf16); }
    __host__ __device__ static constexpr int stage_bytes(int per) { return ROWS * bank_pitch(per * WIDTH); }
    __device__ static void copy(Barrier *full, uint8_t *stage, int per, const uint8_t *group, int stride, int first, int n, int lane) {
        full->copy(stage, bank_pitch(per * WIDTH), group + first * WIDTH, row_bytes(stride), ROWS, n * WIDTH, lane);
    }
    /* Where a lane's part of a stage begins: 16 bytes of row g in each chunk. */
    __device__ static const uint8_t *lane_at(const uint8_t *stage, int per, int lane) { return stage + lane / 4 * bank_pitch(per * WIDTH) + lane % 4 * 16; }
    __device__ static uint32_t highest(uint32_t so_far, uint2 x) { return highest_halves(so_far, x.x, x.y); }
    __device__ static uint32_t highest(uint32_t so_far, uint4) { return so_far; } /* twins are never told */
    template <int TILES> struct Sum { /* tokens 4j + t; [0] and [3] are the halves */
        static constexpr int N = max_of(TILES, 1);
        float c[N][4] = {};
        __device__ void reduce() {
            for (int j = 0; j < N; j++) c[j][0] += c[j][3];
        }
        static __device__ int first_of(int lane) { return lane % 4 * ROWS + lane / 4; }
        __device__ void store(float *to, int tokens, int lane) const {
            for (int j = 0; j < N; j++)
                if (j * 4 + lane % 4 < tokens) to[j * 4 * ROWS] = c[j][0];
        }
    };
    __host__ __device__ static constexpr int place(int i) { return (i & ~6) | (i & 2) << 1 | (i & 4) >> 1; }
    __device__ static void store_four(bf16 *x, float a, float b, float c, float d) { ((uint32_t *)x)[0] = pack(a, b), ((uint32_t *)x)[2] = pack(c, d); }
    template <int TILES> struct Lane {
        typedef uint2 Kept;
        static constexpr int N = Sum<TILES>::N;
        const uint8_t *weights;
        const bf16 *column[N];
        __device__ Lane(const uint8_t *stage, int per, const Activations<bf16> &x, int lane) : weights(lane_at(stage, per, lane)) {
            for (int j = 0; j < N; j++) column[j] = x.row(j * 4 + lane / 8) + lane % 4 * 8 + lane / 4 % 2 * 4;
        }
        __device__ void load(Kept &x, int i, int j, bool told = false) const {
            const uint2 *from = (const uint2 *)(column[j] + i * K);
            x = told ? ask(from) : *from;
        }
        __device__ void add(Sum<TILES> &sum, int i, const Kept (&x)[N]) const {
            uint4 w = *(const uint4 *)(weights + i * WIDTH);
#pragma unroll
            for (int j = 0; j < N; j++) mma<bf16>(sum.c[j], w.x, w.y, w.z, w.w, x[j].x, x[j].y);
        }
    };
};

/* TWINS: the activations of 9 to 16 tokens are mma's rows and the weights, as they lie, its columns, which takes half as many products. A fragment has tokens
 * g and g + 8, so these share a row of 2 pitch elements, word by word of two. Places of tokens that there are not hold anything: as rows of their own they
 * reach no other token, and what they give is not stored. */
__host__ __device__ inline size_t twin_at(int t, int place, int pitch) { /* where element `place` of token t is */
    return ((size_t)(t % 8) * pitch + place / 2 * 2) * 2 + t / 8 * 2 + place % 2;
}
template <> struct Codec<BF16>::Sum<TWINS> { /* of either half: rows 2t and 2t + 1 of token g, and of token g + 8 */
    float c[2][4] = {};
    __device__ void reduce() {
        for (int i = 0; i < 4; i++) c[0][i] += c[1][i];
    }
    static __device__ int first_of(int lane) { return lane / 4 * ROWS + lane % 4 * 2; }
    __device__ void store(float *to, int tokens, int lane) const {
        for (int i = 0; i < 2; i++)
            if (lane / 4 + i * 8 < tokens) *(float2 *)(to + i * 8 * ROWS) = make_float2(c[0][i * 2], c[0][i * 2 + 1]);
    }
};
template <> struct Codec<BF16>::Lane<TWINS> {
    typedef uint4 Kept; /* of a half */
    static constexpr int N = 2;
    const uint8_t *weights;
    const bf16 *column;
    __device__ Lane(const uint8_t *stage, int per, const Activations<bf16> &x, int lane)
        : weights(lane_at(stage, per, lane)), column(x.x + twin_at(lane / 4, lane % 4 * 8, x.pitch)) {}
    __device__ void load(Kept &x, int i, int j, bool = false) const { x = *(const uint4 *)(column + i * K * 2 + j * 8); }
    __device__ void add(Sum<TWINS> &sum, int i, const Kept (&x)[N]) const {
        uint4 w = *(const uint4 *)(weights + i * WIDTH);
        mma<bf16>(sum.c[0], x[0].x, x[0].y, x[0].z, x[0].w, w.x, w.z);
        mma<bf16>(sum.c[1], x[1].x, x[1].y, x[1].z, x[1].w, w.y, w.w);
    }
};

__device__ inline void mma_eight_alone(float (&c)[4], uint4 row, uint4 row8, uint4 column) { /* mma_eight, but c = and not += */
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(row.x), "r"(row8.x), "r"(row.y), "r"(row8.y), "r"(column.x), "r"(column.y), "f"(0.f));
    mma<bf16>(c, row.z, row8.z, row.w, row8.w, column.z, column.w);
}

/* MXFP4: weights are mma's rows, activations its columns. A chunk is 16 rows by 64 columns in 544 bytes. Lane 4g + t has 16 of them:
 * columns 16t .. 16t + 15 of row g and then of row g + 8; behind these 512 bytes lie the scales of both blocks of 32 of row g and of
 * both of row g + 8, for each g. Two words become bf16 times 2^-126 by shifts and masks (fp4_to_bf16); the activations are lifted by 2^100,
 * exactly, and the block's scale, stored as the exponent of a float with 26 added, does the rest. Since it multiplies the product, the
 * blocks must not be added before: lanes 0 and 1 hold weights of the first block, 2 and 3 of the second, so a token needs two of mma's
 * columns, each with zeros for the other block. They are dealt so that lane t finds sums of one block only, t % 2, of two tokens, and needs two scales;
 * its neighbour has the other block of both. A token alone has all eight columns: these are chosen so that lane t finds one of the four sums,
 * and its scale in byte t. */
template <> struct Codec<MXFP4> {
    static constexpr Type TYPE = MXFP4;
    static constexpr int ROWS = TILE, K = CHUNK;
    static constexpr float LIFT = 0x1p100f;
    typedef bf16 Activation;
    struct Kept { uint4 low, high; };
    __device__ static uint32_t highest(uint32_t so_far, const Kept &x) {
        uint4 a = x.low, b = x.high;
        return highest_halves(highest_halves(so_far, a.x, a.y), highest_halves(a.z, a.w, b.x), highest_halves(b.y, b.z, b.w));
    }
    template <int TILES> struct Sum { /* block t % 2 of tokens 4j + t and 4j + (t ^ 1) in row g, and in row g + 8; [0] and [2] become whole */
        float c[TILES][4] = {};
        __device__ void reduce() {
            for (int j = 0; j < TILES; j++)
                for (int i = 0; i < 4; i += 2) c[j][i] += __shfl_xor_sync(~0u, c[j][i + 1], 1);
        }
        static __device__ int first_of(int lane) { return lane % 4 * ROWS + lane / 4; }
        __device__ void store(float *to, int tokens, int lane) const {
            for (int j = 0; j < TILES; j++)
                for (int i = 0; i < 2; i++)
                    if (j * 4 + lane % 4 < tokens) to[j * 4 * ROWS + i * 8] = c[j][i * 2];
        }
    };
    __host__ __device__ static constexpr size_t row_bytes(int stride) { return (size_t)stride / K * FP4_CHUNK / ROWS; }
    __host__ __device__ static constexpr int stage_bytes(int per) { return per * FP4_CHUNK; }
    __device__ static void copy(Barrier *full, uint8_t *stage, int, const uint8_t *group, int, int first, int n, int lane) {
        full->copy(stage, 0, group + (size_t)first * FP4_CHUNK, 0, 1, n * FP4_CHUNK, lane);
    }
    __host__ __device__ static constexpr int place(int i) { return i; }
    __device__ static void store_four(bf16 *x, float a, float b, float c, float d) {
        *(uint2 *)x = make_uint2(pack(a * LIFT, b * LIFT), pack(c * LIFT, d * LIFT));
    }
    /* c = words of rows g and g + 8 times 16 columns */
    __device__ static void multiply(float (&c)[4], uint4 words, uint4 low, uint4 high) {
        Sixteen row = fp4_to_bf16(words.x, words.y), row8 = fp4_to_bf16(words.z, words.w);
        mma_eight_alone(c, row.low, row8.low, low);
        mma_eight(c, row.high, row8.high, high);
    }
    template <int TILES> struct Lane {
        typedef Codec::Kept Kept;
        static constexpr int N = TILES;
        const uint8_t *weights, *scale;
        const bf16 *column[N];
        bool real[N]; /* the column of mma's that this lane loads is for the block that its weights are of, and for a token: zeros take least power */
        __device__ Lane(const uint8_t *stage, int, const Activations<bf16> &x, int lane)
            : weights(stage + lane * 16), scale(stage + 512 + lane / 4 * 4 + lane % 2) {
            for (int j = 0; j < N; j++) {
                int token = j * 4 + lane / 16 * 2 + (lane / 4 ^ lane / 8) % 2;
                column[j] = x.row(token) + lane % 4 * 16, real[j] = lane / 8 % 2 == lane % 4 / 2 && token < x.n;
            }
        }
        __device__ void load(Kept &x, int i, int j, bool told = false) const {
            x = {load_16(column[j] + i * K, real[j], told), load_16(column[j] + i * K + 8, real[j], told)};
        }
        __device__ void add(Sum<TILES> &sum, int i, const Kept (&x)[N]) const {
            uint4 words = *(const uint4 *)(weights + i * FP4_CHUNK);
            float scales[2]; /* of rows g and g + 8; byte by byte: shifts and masks are what this loop has too many of */
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
    static __device__ int first_of(int lane) { return lane / 4 + lane % 4 * 4; }
    __device__ void store(float *to, int, int lane) const {
        if (lane % 2 == 0) *to = c;
    }
};
template <> struct Codec<MXFP4>::Lane<0> {
    typedef Codec::Kept Kept;
    static constexpr int N = 1;
    const uint8_t *weights, *scale;
    const bf16 *column;
    bool real; /* mma's columns 0 and 5 are of the first block, 2 and 7 of the second; zeros stay in the other lanes */
    __device__ Lane(const uint8_t *stage, int, const Activations<bf16> &x, int lane)
        : weights(stage + lane * 16), scale(stage + 512 + lane), column(x.row(0) + lane % 4 * 16),
          real(lane % 4 < 2 ? lane / 4 == 0 || lane / 4 == 5 : lane / 4 == 2 || lane / 4 == 7) {}
    __device__ void load(Kept &x, int i, int, bool told = false) const {
        x = {load_16(column + i * K, real, told), load_16(column + i * K + 8, real, told)};
    }
    __device__ void add(Sum<0> &sum, int i, const Kept (&x)[N]) const {
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

