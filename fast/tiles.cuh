/* tiles.cuh: what makes steps fast on every card from sm_80 on, in place of infer.cu's plain kernels. infer.cu has the
 * formulas; here they are fused and tiled:
 *
 *   product_fused    streams weights for up to MAX_STREAMED tokens. It divides by x's root mean square, as a norm
 * would, and prepares the next norm, so no kernel stands between two products. The experts of a single token are chosen
 * inside it. product_tiled    many tokens, through tiles in shared memory; cuBLAS computes what is BF16, F16 or F32
 *   attention_alone  norm, RoPE, cache and attention of tokens that do not see each other, in one kernel
 *   attention_tiled  tiles of a prompt's tokens
 *   activate (after cuBLAS), combine_and_norm (combine() and the next norm)
 *
 * then the launches, and block(), as in infer.cu. */
#pragma once

#ifdef __CUDACC__ /* as in infer.cu */
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
#endif

/* mma() with a0 to a3 in one. */
template <typename A> __device__ inline void mma_rows(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
    mma<A>(c, a.x, a.y, a.z, a.w, b0, b1);
}
/* The sum of n values by a warp. load() requests the first HELD of each lane; they arrive meanwhile. */
template <int HELD> struct WarpSum {
    float x[HELD];
    __device__ void load(const float *value, int n) {
#pragma unroll
        for (int i = 0, at = threadIdx.x % 32; i < HELD; i++, at += 32) x[i] = at < n ? value[at] : 0;
    }
    __device__ float sum(const float *value, int n) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < HELD; i++) sum += x[i];
#pragma unroll 1
        for (int at = threadIdx.x % 32 + HELD * 32; at < n; at += 32) sum += value[at];
        return warp_sum(sum);
    }
};

/* ---- how tiles of weights pass through shared memory ---- */

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

/* What product_tiled and the experts of prefill.cuh need beside Encoding (rooms' encodings have it themselves). They
 * copy chunks to shared memory, in pieces of 16 bytes; read() fills Raw from there. column_for() in prefill.cuh follows
 * from column() and eight().
 *
 *   piece()   where a piece of a tile's first chunk lies, in the order of shared memory
 *   PIECES    of a chunk of a tile
 *   MATRICES  16-bit weights and x are read with ldmatrix, which gives a lane other columns than column() */
template <Type T> struct Tiled : Encoding<T> {};
template <Type T> struct Tiled16 : Encoding<T> {
    static constexpr int PIECES = 128;
    static constexpr bool MATRICES = true;
    __device__ static size_t piece(const Matrix &m, int tile, int i) {
        const int row = i / 8, eighth = i % 8 ^ row % 8; /* see eighth_of() */
        return ((size_t)(tile * TILE + row) * m.stride + eighth * 8) * 2;
    }
    /* A lane gets columns 2t and 2t + 1 of each eighth, the operands of mma. Rows read as load() reads them would have
     * to be moved between registers: 253 moves for 64 mma. */
    __device__ static void read(typename Encoding<T>::Raw &r, const uint8_t *chunk, int lane) {
        for (int half = 0; half < 2; half++) {
            const uint4 a = load_matrices(chunk + eighth_of<true>(lane % 16, half * 4 + lane / 16));
            const uint4 b = load_matrices(chunk + eighth_of<true>(lane % 16, half * 4 + 2 + lane / 16));
            r.low[half] = {a.x, a.z, b.x, b.z}, r.high[half] = {a.y, a.w, b.y, b.w};
        }
    }
};
template <> struct Tiled<BF16> : Tiled16<BF16> {};
template <> struct Tiled<F16> : Tiled16<F16> {};
template <> struct Tiled<MXFP4> : Encoding<MXFP4> {
    static constexpr int PIECES = FP4_CHUNK / 16;
    static constexpr bool MATRICES = false;
    __device__ static size_t piece(const Matrix &m, int tile, int i) { return offset(m, tile, i); }
    __device__ static void read(Raw &r, const uint8_t *chunk, int lane) {
        r = {((const uint4 *)chunk)[lane], ((const uint32_t *)(chunk + 512))[lane / 4]};
    }
};

/* ---- products ---- */

/* A Product that norms and routes. If x is the residual stream times a norm's weights, the result is divided by the
 * root mean square, from the sums in `square`. */
struct FusedProduct : Product {
    int group;           /* blockIdx.y of product_fused is a group of so many tokens */
    const float *square; /* (tokens, squares), which add up to the sum of squares of x before its norm */
    int squares;         /* 0: x is normed already */
    float *total;        /* (tokens) receives the sums, or NULL */
    float eps;
    Router router; /* top_k 0: none. Else there is one token, and its experts are the jobs */
    int *expert;   /* (top_k) receives the router's choice, with its weights */
    float *weight;
    unsigned long long *experts_read;
    const float *norm; /* for ADD: (rows) weights of the norm that follows, or NULL: the next four are unused */
    void *normed;      /* (tokens, normed_pitch) receives y times these weights */
    int normed_pitch;
    Type normed_type;
    float *next_square; /* (tokens, tiles of w) receives y's sum of squares, tile by tile */
};

/* RowsOfX for more than eight rows, which do not fit in L1: the warp copies its chunks to shared memory, SLOTS ahead.
 * Missing rows become zeros without being read: each tile of 16 rows of the matrix reads x from L2 again. */
template <Type T, int TILES> struct RingOfX {
    static constexpr int SLOT = TILES * 8 * CHUNK * 2, SLOTS = 2, RING = SLOTS * SLOT; /* bytes */
    const uint8_t *from[TILES * 2];
    uint8_t *ring, *slot;
    uint32_t to, at[2], rows; /* rows: real rows of this lane */
    __device__ void begin(const Product &p, const Job &job, uint8_t *shared) {
        const int lane = threadIdx.x % 32;
        rows = (job.n - lane / 8 + 3) / 4;
        for (int i = 0; i < TILES * 2; i++)
            from[i] = (const uint8_t *)p.x + ((job.first + i * 4 + lane / 8) * p.x_pitch + lane % 8 * 8) * 2;
        ring = shared + threadIdx.x / 32 * RING, to = eighth_of(lane / 8, lane % 8);
        for (int half = 0; half < 2; half++) at[half] = place_of<Encoding<T>>(lane, half);
    }
    /* Requests chunk `chunk`, the i-th of this warp; zeros unless `real`. */
    __device__ void request(int i, int chunk, bool real) {
#pragma unroll
        for (int k = 0; k < TILES * 2; k++)
            copy_16(ring + i % SLOTS * SLOT + to + k * 512, from[k] + chunk * CHUNK * 2, real && k < rows ? 16 : 0);
    }
    /* Requests a tile's first chunks. Zeros take the place of those that it lacks: weights past the end are zeros too,
     * but zero times what lay there before may be a NaN. Later, finite values lie in all slots. */
    __device__ void start(int first, int step, int chunks) {
        static_assert(Encoding<T>::template AHEAD<TILES> % SLOTS == 0, "each tile begins with the first slot");
        for (int i = 0; i < SLOTS; i++) request(i, first + i * step, first + i * step < chunks), copies_end();
    }
    /* Before and after the product with chunk `chunk`, the i-th of this warp. */
    __device__ void arrive(int i, int, int) { copies_done<SLOTS - 1>(), __syncwarp(), slot = ring + i % SLOTS * SLOT; }
    __device__ void leave(int i, int chunk, int step, int chunks) {
        __syncwarp();
        if (chunk + SLOTS * step < chunks) request(i, chunk + SLOTS * step, true);
        copies_end();
    }
    __device__ const void *operator()(int n, int half) const { return slot + n * 8 * CHUNK * 2 + at[half]; }
};
template <Type T> struct RingOfX<T, 1> : RowsOfX<T, 1> {
    __device__ void begin(const Product &p, const Job &job, uint8_t *) { RowsOfX<T, 1>::begin(p, job); }
    __device__ void start(int, int, int) {}
};

/* A warp stores the experts of a single token, and their weights, for combine. */
__device__ inline void store_choice(const FusedProduct &p, const int *chosen) {
    const int lane = threadIdx.x % 32;
    const float weight = weigh(p.router, 0, chosen[lane]);
    if (lane < p.router.top_k) p.expert[lane] = chosen[lane], p.weight[lane] = weight;
    if (lane == 0) *p.experts_read += p.router.top_k;
}

/* The product for few tokens, or choices of an expert. The blocks share the tiles of all jobs evenly; the warps of a
 * block share a tile's columns. Groups of up to 8 TILES tokens read the same weights at about the same time, so all but
 * the first find most of them in L2. With `squares` x is not divided by its root mean square yet: this kernel divides
 * the result.
 *
 * Blocks wait as those of `product`. For a single token, and up to PRODUCT_EXPERTS experts, no kernel makes jobs: each
 * block chooses the experts itself, which takes less time than another kernel. */
constexpr int PRODUCT_EXPERTS = 128;
template <Type T, int TILES, int W>
__global__ void __launch_bounds__(W * 32, Encoding<T>::BLOCKS * 8 / W)
    product_fused(const __grid_constant__ FusedProduct p) {
    typedef Encoding<T> E;
    /* Of a group or, with jobs, of the step: an expert may have any of its tokens. */
    constexpr int TOKENS = TILES * 8 > MAX_DECODE ? TILES * 8 : MAX_DECODE;
    __shared__ float sum[2][W][TILES * 128], factor[TOKENS]; /* two sums: so one barrier a tile is enough */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = p.w.stride / CHUNK;
    const int first_token = blockIdx.y * p.group, tokens = min(p.group, p.tokens - first_token);
    const unsigned tiles = p.w.tiles(), tile_bytes = E::offset(p.w, 1, 0);
    const bool chooses = TILES == 1 && W == 8 && p.router.top_k, wait_first = (p.job || chooses) && !p.early;
    if (wait_first) wait_previous();
    launch_next();
    __shared__ int chosen[32];
    if (chooses) {
        if constexpr (TILES == 1 && W == 8)
            if (warp == 0) chosen[lane] = choose<PRODUCT_EXPERTS / 32>(p.router, 0);
        __syncthreads();
    }
    const unsigned jobs = p.job     ? __ldcg(p.jobs)
                          : chooses ? p.router.top_k
                                    : 1,
                   total = jobs * tiles, end = (blockIdx.x + 1) * total / gridDim.x;
    unsigned item = blockIdx.x * total / gridDim.x; /* a tile of a job: `tile` of number `which` */
    unsigned which = item / tiles, tile = item - which * tiles;
    Job job = {0, first_token, tokens};
    const uint8_t *weights = NULL;
    /* Reads job number `which`, and sets where this lane's weights of its tile begin. */
    auto find_job = [&](Job &found) {
        const int *from = &p.job[which].expert;
        if (p.job) found = {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2)};
        if (chooses) found = {chosen[which], (int)which, 1};
        weights = p.w.data + found.expert * p.w.bytes + E::offset(p.w, tile, lane);
    };
    if (item < end) find_job(job);
    Stream<T, TILES> stream;
    stream.begin(p.w, weights, warp, W, item < end ? chunks : 0);
    if (!wait_first) wait_previous();
    if (chooses && !p.early && blockIdx.x == 0 && warp == W - 1) store_choice(p, chosen);
    constexpr int HELD = T == MXFP4 ? 1 : TILES >= 3 ? 4 : 8; /* as many as there are registers for */
    WarpSum<HELD> squares[TOKENS / W];                        /* of the group's tokens `warp`, W + warp, ... */
    auto parts = [&](int n) { return p.square + (first_token + n * W + warp) * p.squares; };
    for (int n = 0; n < TOKENS / W; n++)
        if (n * W + warp < tokens) squares[n].load(parts(n), p.squares);
    static_assert(TILES * 64 <= W * 32, "thread i finishes rows 2 (i % 8) and the next, for token i / 8");
    const int token = threadIdx.x / 8, pair = threadIdx.x % 8 * 2;
    extern __shared__ __align__(128) uint8_t shared[];
    RingOfX<T, TILES> x;
    bool mine;
    int out;
    auto begin_job = [&] {
        x.begin(p, job, shared);
        mine = token < min(TILES * 8, job.n);
        out = job.first + token;
        if (mine && p.order) out = __ldcg(p.order + out);
    };
    if (item < end) begin_job(), x.start(warp, W, chunks);
    for (int turn = 0; item < end; turn++) {
        float c[TILES][4] = {};
        const int row = tile * TILE + pair, now = tile;
        const bool store = mine && row < p.w.rows;
        Target target = {};
        float2 norm = {};
        if (token < TILES * 8) { /* whole warps skip it */
            target = target_of(p, job.expert, out, row, store);
            norm = pair_at(p.norm + row, p.w, row, store && p.finish == ADD && p.norm);
        }
        stream.multiply(c, p.w, weights, x, warp, W, chunks);
        Job next = job;
        item++, tile++, weights += tile_bytes;
        if (tile == tiles && item < end) tile = 0, which++, find_job(next);
        stream.begin(p.w, weights, warp, W, item < end ? chunks : 0);
        if (item < end && warp < chunks) x.start(warp, W, chunks); /* jobs have TILES 1, for which it does nothing */
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) sum[turn % 2][warp][i * 32 + lane] = c[i / 4][i % 4];
        for (int n = 0; n < TOKENS / W && p.squares && !turn; n++) {
            if (n * W + warp >= tokens) break;
            float square = squares[n].sum(parts(n), p.squares);
            if (lane == 0) factor[n * W + warp] = norm_factor(square, p.w.cols, p.eps);
            if (lane == 0 && p.total && blockIdx.x == 0) p.total[first_token + n * W + warp] = square;
        }
        __syncthreads();
        if (token < TILES * 8) {
            const int at = sum_place(token, pair);
            float a = 0, b = 0, square = 0, scale = E::FACTOR;
            if (mine && p.squares) scale *= factor[(p.divide > 1 ? out / p.divide : out) - first_token];
            for (int k = 0; k < W; k++) a += sum[turn % 2][k][at], b += sum[turn % 2][k][at + 4];
            if (store) {
                const float2 y = finish(p, target, out, row, a * scale, b * scale);
                if (p.finish == ADD && p.norm) {
                    store_pair_as(p.normed_type, p.normed, out * p.normed_pitch + row, y.x * norm.x, y.y * norm.y);
                    square = y.x * y.x + y.y * y.y;
                }
            }
            if (p.finish == ADD && p.norm) {
                for (int o = 4; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o); /* of the tile's 16 rows */
                if (store && pair == 0) p.next_square[out * tiles + now] = square;
            }
        }
        if (item < end && tile == 0) job = next, begin_job();
    }
}

/* The product for more tokens, in tiles of 16 SIXTEENS. A warp decodes 16 ROWS rows of the matrix once and multiplies
 * them by all tokens of the block, mma's columns. Chunks of weights and of x come through a ring of shared memory: a
 * thread copies an eighth of every 16th row of x, and pieces of weights. At the end mma leaves a lane two tokens of a
 * row, but finish() takes two rows of a token. So the sums, too, go through shared memory; then a thread finishes two
 * rows of every second token. With more ROWS the last blocks of a launch leave more multiprocessors idle. */
constexpr int TILED_WARPS = 4;
/* This lane's columns of eight rows of x in shared memory. */
template <class E> __device__ inline uint4 columns_of(const uint8_t *rows, int lane, int half) {
    if constexpr (E::MATRICES) return load_matrices(rows + eighth_of<true>(lane % 8, half * 4 + lane / 8));
    return E::eight(rows + place_of<E>(lane, half));
}
template <Type T, int SIXTEENS> struct TiledShape {
    static constexpr int STAGES = SIXTEENS <= 2 && T == MXFP4 ? 4 : 3, THREADS = TILED_WARPS * 32,
                         TOKENS = SIXTEENS * 16;
    static constexpr int BLOCKS = T == MXFP4 ? 4 : is_coded(T) ? 2 : 3; /* for which there are registers */
    static constexpr int ROWS = 2, ROW_TILES = TILED_WARPS * ROWS, PIECES = ROW_TILES * Tiled<T>::PIECES;
    static constexpr int X = TOKENS * CHUNK * 2, STAGE = X + PIECES * 16;     /* bytes */
    static constexpr int PAIRS = ROW_TILES * TILE / 2, PITCH = PAIRS * 2 + 4; /* the pitch spares bank conflicts */
    static constexpr int SHARED = STAGES * STAGE;                             /* in the end the sums lie there */
    static_assert(TOKENS * PITCH * 4 <= SHARED && SHARED <= 99 << 10, "sm_86 and sm_89 have no more");
};
template <Type T, int SIXTEENS>
__global__ void __launch_bounds__(TILED_WARPS * 32, TiledShape<T, SIXTEENS>::BLOCKS)
    product_tiled(const __grid_constant__ Product p) {
    typedef Tiled<T> E;
    typedef typename E::Activation A;
    typedef TiledShape<T, SIXTEENS> Shape;
    constexpr int STAGES = Shape::STAGES, STAGE = Shape::STAGE, THREADS = Shape::THREADS, ROWS = Shape::ROWS;
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int chunks = p.w.stride / CHUNK, tiles = p.w.tiles(), first = blockIdx.x * Shape::ROW_TILES;
    launch_next();
    wait_previous();
    if (p.job && (int)blockIdx.y >= *p.jobs) return;
    const int begin = blockIdx.y * Shape::TOKENS;
    const Job job = p.job ? p.job[blockIdx.y] : Job{0, begin, min(Shape::TOKENS, p.tokens - begin)};
    constexpr int X_EACH = Shape::TOKENS * 8 / THREADS, W_EACH = (Shape::PIECES + THREADS - 1) / THREADS;
    const A *x[X_EACH];
    const int rows = (job.n - (int)threadIdx.x / 8 + THREADS / 8 - 1) / (THREADS / 8); /* real rows of this thread */
    uint32_t piece[W_EACH];
#pragma unroll
    for (int i = 0; i < X_EACH; i++) {
        int row = job.first + min((i * THREADS + (int)threadIdx.x) / 8, job.n - 1); /* p.order has no more */
        x[i] = (const A *)p.x + (size_t)(p.order ? p.order[row] / p.divide : row) * p.x_pitch + threadIdx.x % 8 * 8;
    }
#pragma unroll
    for (int i = 0; i < W_EACH; i++) {
        int k = i * THREADS + threadIdx.x, tile = min(k / E::PIECES, min(Shape::ROW_TILES, tiles - first) - 1);
        piece[i] = (uint32_t)E::piece(p.w, tile, k % E::PIECES);
    }
    uint8_t *to = shared + eighth_of<E::MATRICES>(threadIdx.x / 8, threadIdx.x % 8);
    const uint8_t *weights = p.w.data + job.expert * p.w.bytes + E::offset(p.w, first, 0);
    int coming = 0, slot = 0, at = 0; /* the next chunk to copy; where the stages to fill and to read begin */
    auto copy = [&] {
        if (coming++ < chunks) {
#pragma unroll
            for (int i = 0; i < X_EACH; i++) /* missing rows become zeros */
                copy_16(to + slot + i * THREADS * 16, x[i], i < rows ? 16 : 0), x[i] += CHUNK;
#pragma unroll
            for (int i = 0; i < W_EACH; i++)
                if (Shape::PIECES % THREADS == 0 || i * THREADS + (int)threadIdx.x < Shape::PIECES)
                    copy_16(shared + slot + Shape::X + (i * THREADS + threadIdx.x) * 16, weights + piece[i]);
            weights += E::STEP;
            slot = slot == (STAGES - 1) * STAGE ? 0 : slot + STAGE;
        }
        copies_end();
    };
    float c[ROWS][2 * SIXTEENS][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) copy();
    for (int chunk = 0; chunk < chunks; chunk++) {
        copies_done<STAGES - 2>();
        __syncthreads();
        copy();
        const uint8_t *stage = shared + at;
        auto x_of = [&](int n, int half) { return columns_of<E>(stage + n * 8 * CHUNK * 2, lane, half); };
        at = at == (STAGES - 1) * STAGE ? 0 : at + STAGE;
        typename E::Raw raw[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) E::read(raw[r], stage + Shape::X + (warp * ROWS + r) * E::PIECES * 16, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 a[ROWS][2];
            for (int r = 0; r < ROWS; r++) {
                uint4 low, high;
                E::decode(raw[r], half, low, high);
                a[r][0] = {low.x, high.x, low.y, high.y}, a[r][1] = {low.z, high.z, low.w, high.w};
            }
#pragma unroll
            for (int n = 0; n < 2 * SIXTEENS;
                 n += 2) { /* two together: an mma waits for the one before on the same sum */
                const uint4 column[2] = {x_of(n, half), x_of(n + 1, half)};
#pragma unroll
                for (int second = 0; second < 2; second++)
#pragma unroll
                    for (int i = 0; i < 2 * ROWS; i++) {
                        const uint4 x = column[i / ROWS];
                        mma_rows<A>(c[i % ROWS][n + i / ROWS], a[i % ROWS][second], second ? x.z : x.x,
                                    second ? x.w : x.y);
                    }
            }
        }
    }
    float *sum = (float *)shared; /* (Shape::TOKENS, Shape::PITCH) */
    __syncthreads();              /* no warp reads the last stage any more */
#pragma unroll
    for (int n = 0; n < 2 * SIXTEENS; n++)
#pragma unroll
        for (int i = 0; i < 4 * ROWS; i++)
            sum[(n * 8 + 2 * t + i % 2) * Shape::PITCH + (warp * ROWS + i / 4) * TILE + i / 2 % 2 * 8 + g] =
                c[i / 4][n][i % 4];
    __syncthreads();
    const int pair = threadIdx.x % Shape::PAIRS * 2, r = first * TILE + pair;
    if (r >= p.w.rows) return;
    Target target = target_of(p, job.expert, 0, r, p.finish != ADD); /* a bias is the same for all tokens */
#pragma unroll 4
    for (int token = threadIdx.x / Shape::PAIRS; token < job.n; token += THREADS / Shape::PAIRS) {
        const size_t out = p.order ? p.order[job.first + token] : job.first + token;
        const float2 both = *(const float2 *)(sum + token * Shape::PITCH + pair);
        if (p.finish == ADD) target = target_of(p, job.expert, out, r);
        finish(p, target, out, r, both.x * E::FACTOR, both.y * E::FACTOR);
    }
}

/* ---- norms, activations ---- */

/* x += results, as in combine(), and the norm that comes next. One block a token. */
__global__ void __launch_bounds__(1024)
    combine_and_norm(Work w, int top_k, const float *weights, const float *post, const float *norm, Type type) {
    Pairs x, by;
    launch_next();
    load_pairs(by, norm, w.dim);
    wait_previous();
    add_results(w, x, top_k, weights, post);
    rms_norm(w, x, by, type, blockIdx.x);
}

/* The activation of gate and up, which cuBLAS has computed as T, for a token (blockIdx.y). */
constexpr int ACTIVATE_EACH = 8, ACTIVATE_THREADS = 256; /* results of a thread, in pairs of neighbours */
template <class T>
__global__ void __launch_bounds__(ACTIVATE_THREADS) activate(const __grid_constant__ Work w, int width, Type type) {
    struct alignas(4 * sizeof(T)) Four {
        T gate, up, next_gate, next_up;
    };
    launch_next();
    wait_previous();
    const Four *from = (const Four *)w.projected + (size_t)blockIdx.y * (width / 2);
#pragma unroll
    for (int k = 0; k < ACTIVATE_EACH / 2; k++) {
        const int i = (blockIdx.x * ACTIVATE_EACH / 2 + k) * ACTIVATE_THREADS + threadIdx.x;
        if (2 * i >= width) break;
        const Four x = from[i];
        store_pair_as(type, w.act_out, (size_t)blockIdx.y * w.act_pitch + 2 * i,
                      activation(w.act, w.act_limit, x.gate, x.up, type != F32),
                      activation(w.act, w.act_limit, x.next_gate, x.next_up, type != F32));
    }
}

/* ---- attention ---- */

/* Puts a key and its value, of D dimensions each, into a slab as number `at` of its 16. */
template <int D>
__device__ inline void replace(Slab<D> &slab, int at, const bf16 *its_key, const bf16 *its_value, int lane) {
    const int g = lane / 4, t = lane % 4;
    for (int j = 0; j < 2; j++)
        for (int c = 0; c < D / 32; c++)
            if (g / 2 * 4 + j * 2 + g % 2 == at) slab.key[j][c] = *(const uint4 *)(its_key + c * 32 + t * 8);
    const uint32_t keep = at % 2 ? 0xFFFF : 0xFFFF0000; /* of the word with its value */
    for (int d = 0; d < D / 8; d++) {
        uint32_t &word = at % 4 < 2 ? slab.value[d].x : slab.value[d].y,
                 its = __bfloat16_as_ushort(its_value[d * 8 + g]);
        if (at / 4 == t) word = (word & keep) | its << at % 2 * 16;
    }
}

/* attention() for steps in which no token sees another, so token t is all of sequence t. Blocks share the work as
 * there; this kernel also does what rope() does. The token's rows pass through shared memory, so that all of them
 * arrive at once. All older keys are in the cache already, so a block loads its first ones before wait_previous(). With
 * heads of 256 no registers are left to load the next keys ahead. */
template <int D>
__global__ void __launch_bounds__(ATTENTION_WARPS<D> * 32, 2)
    attention_alone(Work w, Step s, DeviceLayer l, int max_splits) {
    constexpr int W = ATTENTION_WARPS<D>;
    extern __shared__ __align__(16) float states[];                      /* (W, 8, D + 2) */
    __shared__ __align__(16) bf16 query[8][D], own_key[D], own_value[D]; /* queries from `heads` on hold anything */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = blockIdx.y;
    launch_next();
    const BlockPart b(w, s, l, t, t, max_splits);
    if (b.split >= b.splits) return;
    int i = b.slab + warp, page = i < b.slabs ? page_of(s, t, i * SLAB_KEYS) : 0;
    Slab<D> slab;
    auto load = [&](Slab<D> &to, int i) {
        to.load(cache_of(w, page, 0, b.head), cache_of(w, page, 1, b.head), i % SLABS, lane);
    };
    float *cos_sin = states, *q_norm = cos_sin + D, *k_norm = q_norm + D, *key = k_norm + D, *value = key + D,
          *queries = value + D;
    auto fetch = [&](float *to, const float *from, int n) {
        for (int k = threadIdx.x * 4; k < n; k += blockDim.x * 4) copy_16(to + k, from + k);
    };
    fetch(cos_sin, (const float *)cos_sin_of(w, l, b.position), D);
    if (l.q_norm) fetch(q_norm, l.q_norm, D), fetch(k_norm, l.k_norm, D);
    if (i < b.slabs) load(slab, i);
    wait_previous();
    fetch(queries, head_of(w, l, t, b.first_head), b.heads * D);
    fetch(key, head_of(w, l, t, w.n_heads + b.head), D);
    fetch(value, head_of(w, l, t, w.n_heads + w.n_kv_heads + b.head), D);
    copies_end();
    copies_done<0>();
    __syncthreads();
    /* The last split stores the token's key and value. */
    for (int h = warp; h < b.heads + 2 * (b.split == b.splits - 1); h += W) {
        auto rope_to = [&](const float *row, const float *norm, bf16 *to, auto store) {
            norm_and_rope(w, (const float2 *)cos_sin, row, l.q_norm ? norm : NULL, [&](int i, float2 x) {
                ((uint32_t *)to)[i] = pack(x.x, x.y);
                store(i, pack(x.x, x.y));
            });
        };
        bf16 *keys = cache_of(w, page_of(s, t, b.position), 0, b.head);
        uint32_t *to = (uint32_t *)w.q + ((size_t)t * w.n_heads + b.first_head + h) * (D / 2);
        if (h < b.heads)
            rope_to(queries + h * D, q_norm, query[h], [&](int i, uint32_t x) { to[i] = x; });
        else if (h == b.heads)
            rope_to(key, k_norm, own_key,
                    [&](int i, uint32_t x) { *(uint32_t *)(keys + key_place(D, b.position, 2 * i)) = x; });
        else
            for (int k = lane; k < D; k += 32) own_value[k] = store_value(w, s, value, t, b.head, k);
    }
    __syncthreads();
    uint4 q[D / 32];
    for (int c = 0; c < D / 32; c++) q[c] = *(const uint4 *)(query[lane / 4] + c * 32 + lane % 4 * 8);
    SlabState<D> state;
    for (; i < b.slabs; i += W) {
        Slab<D> next;
        if (D < 256 && i + W < b.slabs) page = page_of(s, t, (i + W) * SLAB_KEYS), load(next, i + W);
        if (i == b.position / SLAB_KEYS) replace(slab, b.position % SLAB_KEYS, own_key, own_value, lane);
        state.add(slab, q, i * SLAB_KEYS, b.first, b.position, LOG2E * w.attn_scale, lane, LOG2E * w.attn_cap);
        if (D < 256)
            slab = next;
        else if (i + W < b.slabs)
            page = page_of(s, t, (i + W) * SLAB_KEYS), load(slab, i + W);
    }
    state.store(states + (warp * 8 + lane / 4) * (D + 2), lane);
    __syncthreads();
    store_attention<D>(w, l, t, b, states);
}

/* A warp's state for 16 rows of a prompt, each a token and a query head: lane 4g + t has rows g and g + 8. */
template <int D, int KEYS, bool IN_ORDER = false> struct TileState {
    float max_score[2] = {NO_SCORE, NO_SCORE}, total[2] = {},
          sum[D / 8][4] = {}; /* dimensions 8i + 2t, + 1 of either row */

    /* Where key n of tile j of 8 lies among KEYS: as in Slab, or in order. */
    __device__ static int key_of(int j, int n) {
        return IN_ORDER ? j * 8 + n : j / 2 * SLAB_KEYS + n / 2 * 4 + j % 2 * 2 + n % 2;
    }
    __device__ static void limit(float (&score)[KEYS / 8][4], float scale, float cap) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) score[i / 4][i % 4] = capped(score[i / 4][i % 4] * scale, cap);
    }
    /* Masks the keys that row g, of a token at position[0], and row g + 8, at position[1], do not see. */
    __device__ static void mask(float (&score)[KEYS / 8][4], int base, const int (&position)[2], int window) {
        const int first[2] = {first_seen(position[0], window), first_seen(position[1], window)};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            for (int i = 0; i < 4; i++) {
                int p = base + key_of(j, threadIdx.x % 4 * 2 + i % 2);
                if (p < first[i / 2] || p > position[i / 2]) score[j][i] = -INFINITY;
            }
    }
    /* Turns scores into softmax shares. Earlier sums are scaled to the new maximum. */
    __device__ void softmax(float (&score)[KEYS / 8][4], float scale) {
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float now = max_score[r];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) now = fmaxf(now, fmaxf(score[j][2 * r], score[j][2 * r + 1]) * scale);
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
            factor[r] = exp2_quick(max_score[r] - now);
            max_score[r] = now;
            total[r] *= factor[r];
#pragma unroll
            for (int i = 0; i < KEYS / 4; i++) {
                float &x = score[i / 2][2 * r + i % 2];
                x = exp2_quick(x * scale - now), total[r] += x;
            }
        }
#pragma unroll
        for (int i = 0; i < D / 2; i++) sum[i / 4][i % 4] *= factor[i % 4 / 2];
    }
    /* Tiles 2 slab and 2 slab + 1 of shares, as rows of mma. */
    __device__ static uint4 shares_of(const float (&share)[KEYS / 8][4], int slab) {
        const float(&a)[4] = share[2 * slab], (&b)[4] = share[2 * slab + 1];
        return {pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3])};
    }
    /* Stores the result of the lane's row g (r = 0) or g + 8, which is number `row` of a tile of n tokens. */
    __device__ void store_row(const Work &w, const DeviceLayer &l, int r, int row, int token, int n, int head) const {
        const int group = w.n_heads / w.n_kv_heads, h = head * group + row % group;
        float all = total[r] + __shfl_xor_sync(~0u, total[r], 1);
        all += __shfl_xor_sync(~0u, all, 2);
        const float factor = sink_factor(max_score[r], all, l.sinks ? l.sinks[h] : -INFINITY);
        if (row / group >= n) return;
        const size_t out = (size_t)(token + row / group) * w.attn_pitch + h * D + threadIdx.x % 4 * 2;
#pragma unroll
        for (int d = 0; d < D / 8; d++)
            store_pair_as(l.o.type, w.attn, out + d * 8, sum[d][2 * r] * factor, sum[d][2 * r + 1] * factor);
    }
};

/* Attention of neighbouring tokens of a prompt (blockIdx.y: a tile, the last first, since it sees most) and all query
 * heads that share a key/value head (blockIdx.x). A warp has 16 M rows, whose queries stay in shared memory while keys
 * and values pass through it (Dao, "FlashAttention-2", 2023). */
template <int D> struct AttentionShape {
    static constexpr int M = D <= 128 ? 2 : 1, WARPS = 4, ROWS = WARPS * M * 16, THREADS = WARPS * 32;
    static constexpr int KEYS = D <= 128 ? PAGE : PAGE / 2, STAGE = KEYS * D * 2; /* elements of keys and values */
    static constexpr int SHARED = (ROWS * D + 2 * STAGE) * sizeof(bf16);
    static_assert(SHARED <= 99 << 10, "sm_86 and sm_89 have no more");
    /* Requests the KEYS keys and values of a page from position `base` on. Values from the n-th on become
     * zeros, because the cache may hold NaN there. Keys need not: mask() discards their scores. */
    __device__ static void copy(const Work &w, bf16 *to, int page, int head, int base, int n) {
        constexpr int EACH = KEYS * D / 8 / THREADS;
        const bf16 *keys = cache_of(w, page, 0, head) + key_place(D, base, 0) + threadIdx.x * 8;
        const bf16 *values = cache_of(w, page, 1, head) + value_place(D, base, 0) + threadIdx.x * 8;
        to += threadIdx.x * 8;
#pragma unroll
        for (int i = 0; i < EACH; i++) copy_16(to + i * THREADS * 8, keys + i * THREADS * 8);
        to += KEYS * D;
        if (n >= KEYS) {
#pragma unroll
            for (int i = 0; i < EACH; i++) copy_16(to + i * THREADS * 8, values + i * THREADS * 8);
            return;
        }
        for (int i = 0; i < EACH; i++) {
            const int k = i * THREADS + threadIdx.x, position = k / (2 * D) * SLAB_KEYS + k % 2 * 8;
            copy_16(to + i * THREADS * 8, values + i * THREADS * 8, max(0, min(16, 2 * (n - position))));
        }
    }
};
template <int D>
__global__ void __launch_bounds__(AttentionShape<D>::THREADS) attention_tiled(Work w, Step s, DeviceLayer l) {
    typedef AttentionShape<D> Shape;
    constexpr int M = Shape::M, KEYS = Shape::KEYS;
    extern __shared__ __align__(128) bf16 staged[]; /* two stages of keys and values (2, KEYS * D); queries */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.x, tile = gridDim.y - 1 - blockIdx.y, group = w.n_heads / w.n_kv_heads;
    launch_next();
    wait_previous();
    const int token = s.tile[2 * tile], n = s.tile[2 * tile + 1], seq = s.seq[token], position = s.position[token];
    const int end = position + n - 1, begin = first_seen(position, l.window) / KEYS * KEYS;
    /* Missing rows alias the last token. */
    auto position_of = [&](int row) { return position + min(row / group, n - 1); };
    Shape::copy(w, staged, page_of(s, seq, begin), head, begin, end + 1 - begin);
    copies_end();
    int page = begin + KEYS <= end ? page_of(s, seq, begin + KEYS) : 0; /* of the next keys */
    /* Queries lie as mma wants them: for 16 rows and 32 dimensions first 16 bytes of each lane for one mma (dimensions
     * 8t to 8t + 3 of rows g and g + 8), then those for a second one (8t + 4 to 8t + 7). */
    uint4 *queries = (uint4 *)(staged + 2 * Shape::STAGE);
#pragma unroll 4
    for (int i = warp * 32; i < Shape::ROWS * D / 16; i += Shape::THREADS) {
        auto load = [&](int row) {
            const size_t of = (size_t)(token + position_of(row) - position) * w.n_heads + head * group + row % group;
            return *(const uint4 *)((const bf16 *)w.q + of * D + i % D + t * 8);
        };
        const uint4 row = load(i / D * 16 + g), row8 = load(i / D * 16 + g + 8);
        queries[2 * i + lane] = {row.x, row8.x, row.y, row8.y};
        queries[2 * i + 32 + lane] = {row.z, row8.z, row.w, row8.w};
    }
    TileState<D, KEYS> state[M];
    const int row0 = warp * M * 16, lowest = position_of(row0), highest = position_of(row0 + M * 16 - 1);
    const float scale = LOG2E * w.attn_scale, cap = LOG2E * w.attn_cap;
    for (int base = begin, stage = 0; base <= end; base += KEYS, stage ^= 1) {
        copies_done<0>();
        __syncthreads();
        const int next = base + KEYS;
        if (next <= end) Shape::copy(w, staged + (stage ^ 1) * Shape::STAGE, page, head, next, end + 1 - next);
        copies_end();
        if (next + KEYS <= end) page = page_of(s, seq, next + KEYS);
        const bf16 *keys = staged + stage * Shape::STAGE, *values = keys + KEYS * D;
        float score[M][KEYS / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D; c += 32) {
            uint4 key[KEYS / 8];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                key[j] = *(const uint4 *)(keys + key_place(D, state[0].key_of(j, g), c + t * 8));
#pragma unroll
            for (int second = 0; second < 2; second++) {
                uint4 query[M];
#pragma unroll
                for (int m = 0; m < M; m++) query[m] = queries[(row0 / 16 + m) * D * 2 + c * 2 + second * 32 + lane];
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int m = 0; m < M; m++)
                        mma_rows<bf16>(score[m][j], query[m], second ? key[j].z : key[j].x,
                                       second ? key[j].w : key[j].y);
            }
        }
        const bool masked = base + KEYS - 1 > lowest || (l.window && base <= highest - l.window);
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (cap) state[m].limit(score[m], scale, cap);
            const int row = row0 + m * 16 + g;
            if (masked) state[m].mask(score[m], base, {position_of(row), position_of(row + 8)}, l.window);
            state[m].softmax(score[m], cap ? 1 : scale); /* limit() has scaled them */
        }
#pragma unroll
        for (int slab = 0; slab < KEYS / SLAB_KEYS; slab++) {
            uint4 share[M];
#pragma unroll
            for (int m = 0; m < M; m++) share[m] = state[m].shares_of(score[m], slab);
#pragma unroll
            for (int d = 0; d < D / 8; d++) {
                uint2 value = *(const uint2 *)(values + value_place(D, slab * SLAB_KEYS + t * 4, d * 8 + g));
#pragma unroll
                for (int m = 0; m < M; m++) mma_rows<bf16>(state[m].sum[d], share[m], value.x, value.y);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * M; i++) state[i / 2].store_row(w, l, i % 2, row0 + i * 8 + g, token, n, head);
}

/* ---- launches ---- */

struct Decode;
struct State { /* of an open card */
    cublasLtHandle_t blas = NULL;
    std::map<std::array<int, 4>, cublasLtMatmulHeuristicResult_t> algorithm; /* by rows, columns, tokens and kind */
    uint8_t *workspace;                                                      /* (BLAS_WORKSPACE) for cuBLAS */
    bf16 *decoded;                                                           /* (decoded_size) a matrix made bf16 */
    size_t decoded_size = 0, largest = 0; /* largest: bytes of the largest matrix of all layers, without experts */
    float *square;                        /* (MAX_STREAMED, dim / TILE) sums of squares of x, tile by tile */
    float *square_sum;                    /* (MAX_STREAMED) of all tiles */
    bool wgmma = false;                   /* Hopper's instructions compute steps of many tokens ... */
    Decode *decode = NULL;                /* ... and this model's decode steps, or NULL */
};

/* What Hopper's own kernels compute: see hopper.cuh. */
int wgmma_rows(const Pass *a);
template <int D> cudaError_t launch_attention_wgmma(const Pass *a, const DeviceLayer &l);
int wgmma_job_size(const Pass *a, const DeviceLayer &l);
bool experts_wgmma(const Pass *a, const DeviceLayer &l, Error *e);

constexpr size_t BLAS_WORKSPACE = 32 << 20, SMALL = 16 << 20, LARGE = 256 << 20; /* bytes; of a matrix */
constexpr int MAX_STREAMED = 96; /* up to this many tokens a step may stream a matrix: see way_of() */
inline int square_parts(int dim) { return (dim + TILE - 1) / TILE; }

bool open_tiles(Gpu *gpu, Error *e) {
    gpu->fast = new State;
    if (!cublasLtCreate(&gpu->fast->blas)) return true;
    return fail(e, GPU_FAULT, "cuBLAS cannot be used; is its library installed whole?");
}
/* Lays out the buffers. */
void plan_tiles(Gpu *gpu, Plan *p) {
    State *f = gpu->fast;
    const int dim = gpu->model.dim;
    f->decoded_size = f->largest = 0;
    for (const DeviceLayer &l : gpu->device.layer)
        for (const Matrix *m :
             {&l.qkv, &l.q, &l.k_up, &l.v_up, &l.o, &l.router, &l.up, &l.down, &l.shared_up, &l.shared_down}) {
            if (m->n != 1) continue; /* experts, and heads of latents */
            f->largest = std::max(f->largest, m->bytes);
            if (is_coded(m->type)) f->decoded_size = std::max(f->decoded_size, (size_t)m->rows * m->stride);
        }
    f->workspace = p->take<uint8_t>(BLAS_WORKSPACE);
    f->decoded = p->take<bf16>(f->decoded_size);
    f->square = p->take<float>(MAX_STREAMED * square_parts(dim));
    f->square_sum = p->take<float>(MAX_STREAMED);
}

/* y (tokens, rows; F32, or BF16 if there is no bias) = W x + bias, or added to y, by cuBLAS. W lies row by row. */
bool multiply_blas(Gpu *gpu, const Product &p, Error *e) {
    State *f = gpu->fast;
    const Matrix &m = p.w;
    const bool add = p.finish == ADD;
    cudaDataType type = m.type == F32 ? CUDA_R_32F : m.type == F16 ? CUDA_R_16F : CUDA_R_16BF;
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t bias = CUBLASLT_EPILOGUE_BIAS;
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w_layout, x_layout, y_layout;
    float one = 1, beta = add;
    cublasLtMatmulDescInit(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (m.bias) cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_EPILOGUE, &bias, sizeof bias);
    if (m.bias) cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &m.bias, sizeof m.bias);
    auto shape_for = [&](int n) {
        cublasLtMatrixLayoutInit(&x_layout, type, m.cols, n, p.x_pitch);
        cublasLtMatrixLayoutInit(&y_layout, p.y_type == F32 ? CUDA_R_32F : CUDA_R_16BF, m.rows, n, p.y_pitch);
    };
    cublasLtMatrixLayoutInit(&w_layout, type, m.cols, m.rows, m.stride);
    /* Similar numbers of many tokens share a query, because one stops all answers for a while. */
    const int like = p.tokens <= MAX_DECODE ? p.tokens : (p.tokens + 31) / 32 * 32;
    const int kind = add + 2 * (m.bias != NULL) + 4 * (p.y_type == F32) + 8 * m.type;
    auto [known, is_new] = f->algorithm.insert({{m.rows, m.cols, like, kind}, {}});
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (is_new) {
        cublasLtMatmulPreferenceOpaque_t preference;
        int n = 0;
        shape_for(like);
        cublasLtMatmulPreferenceInit(&preference);
        cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &BLAS_WORKSPACE,
                                             sizeof BLAS_WORKSPACE);
        status = cublasLtMatmulAlgoGetHeuristic(f->blas, &product, &w_layout, &x_layout, &y_layout, &y_layout,
                                                &preference, 1, &known->second, &n);
        if (!status && !n) status = CUBLAS_STATUS_NOT_SUPPORTED;
    }
    shape_for(p.tokens);
    if (!status)
        status = cublasLtMatmul(f->blas, &product, &one, m.data, &w_layout, p.x, &x_layout, &beta, p.y, &y_layout, p.y,
                                &y_layout, &known->second.algo, f->workspace, BLAS_WORKSPACE, gpu->stream);
    return status == CUBLAS_STATUS_SUCCESS || fail(e, GPU_FAULT, "cuBLAS failed: %s", cublasLtGetStatusString(status));
}

/* `product_fused`, with the instance for a group's tokens. */
template <Type T> cudaError_t launch_fused(const Gpu *gpu, FusedProduct p) {
    /* With many tiles a block, as for the experts of many tokens, fewer warps have fewer sums to add up. */
    const int warps = p.tokens <= MAX_DECODE || !p.job ? 8 : 4;
    constexpr int MAX_GROUP = T == MXFP4 ? 8 : 32; /* tokens; groups are of equal size */
    /* Small matrices have few tiles: 25 to 32 tokens in two groups give twice the blocks. */
    const int limit =
        !is_coded(T) && p.tokens <= 48 && gpu->fast->largest <= SMALL ? std::min(MAX_GROUP, 24) : MAX_GROUP;
    const int groups = p.job ? 1 : (p.tokens + limit - 1) / limit;
    p.group = (p.tokens + groups - 1) / groups;
    const int blocks = std::min(std::max(1, p.max_jobs) * p.w.tiles(),
                                std::max(1, Encoding<T>::BLOCKS * gpu->sms * 8 / warps / groups));
    auto with = [&](auto kernel, size_t ring) {
        return launch(gpu, kernel, dim3(blocks, groups), warps * 32, warps * ring, p);
    };
    if (warps == 4) return with(product_fused<T, 1, 4>, 0);
    if constexpr (MAX_GROUP > 8) {
        if (!p.job && p.group > 24) return with(product_fused<T, MAX_GROUP / 8, 8>, RingOfX<T, MAX_GROUP / 8>::RING);
        if (!p.job && p.group > 16) return with(product_fused<T, 3, 8>, RingOfX<T, 3>::RING);
        if (!p.job && p.group > 8) return with(product_fused<T, 2, 8>, RingOfX<T, 2>::RING);
    }
    return with(product_fused<T, 1, 8>, 0);
}
template <Type T, int SIXTEENS> cudaError_t launch_tiled(const Gpu *gpu, const Product &p) {
    typedef TiledShape<T, SIXTEENS> Shape;
    const int jobs = p.job ? p.max_jobs : (p.tokens + Shape::TOKENS - 1) / Shape::TOKENS;
    dim3 grid((p.w.tiles() + Shape::ROW_TILES - 1) / Shape::ROW_TILES, jobs);
    return launch(gpu, product_tiled<T, SIXTEENS>, grid, Shape::THREADS, Shape::SHARED, p);
}
template <Type T> cudaError_t launch_any(const Gpu *gpu, const FusedProduct &p, bool tiled) {
    if (!tiled) return launch_fused<T>(gpu, p);
    if (p.job && p.job_size <= 16) return launch_tiled<T, 1>(gpu, p);
    return p.job && p.job_size <= 32 ? launch_tiled<T, 2>(gpu, p) : launch_tiled<T, 4>(gpu, p);
}

/* How a product without jobs is computed. */
enum Way {
    STREAMED, /* by `product_fused` */
    TILED,    /* by `product_tiled` */
    BLAS      /* by cuBLAS, codes after decode_matrix() */
};
/* Few tokens are streamed, because cuBLAS takes long to start. All limits were measured (notebooks/speed.md). */
Way way_of(const Pass *a, const Matrix &m) {
    const int tokens = a->tokens;
    if (m.type == F32) return BLAS;
    if (m.type == MXFP4) return tokens <= MAX_DECODE ? STREAMED : TILED;
    if (!is_coded(m.type)) { /* if all matrices are small, streaming also saves the kernels for norms and activations */
        /* several cards, whose largest may differ, choose alike for the router */
        const size_t size = a->w.link.cards > 1 ? m.bytes : std::max(m.bytes, a->gpu->fast->largest);
        const int limit = m.bytes > LARGE ? MAX_DECODE : size > 2 * SMALL ? 32 : size > SMALL ? 24 : 64;
        return tokens <= limit ? STREAMED : BLAS;
    }
    /* tiles of 128 rows and 64 tokens fill the card, and the last has more than 16 tokens */
    const bool full = m.tiles() / 8 * ((tokens + 63) / 64) >= a->gpu->sms && (tokens - 1) % 64 >= 16;
    if (tokens > 48 && tokens <= 256 && full) return TILED;
    if (tokens <= MAX_STREAMED) return STREAMED;
    return (size_t)m.rows * m.stride <= a->gpu->fast->decoded_size ? BLAS
                                                                   : TILED; /* the head may not fit in `decoded` */
}
/* The activation of what cuBLAS has computed, which goes to w.projected. */
bool multiply_and_activate(const Pass *a, Product p, Error *e) {
    const int width = p.w.rows / 2, each = ACTIVATE_EACH * ACTIVATE_THREADS;
    const bool narrow = type_for(p.w) == BF16 && !p.w.bias; /* half the bytes of F32; f16 could overflow */
    const Type type = p.y_type;
    p.finish = STORE, p.y = a->w.projected, p.y_pitch = p.w.rows, p.y_type = narrow ? BF16 : F32;
    if (!multiply_blas(a->gpu, p, e)) return false;
    CUDA(launch(a->gpu, narrow ? activate<bf16> : activate<float>, dim3((width + each - 1) / each, a->tokens),
                ACTIVATE_THREADS, 0, a->w, width, type));
    return true;
}
bool multiply(const Pass *a, FusedProduct p, Error *e) {
    const Way way = way_of(a, p.w);
    if (p.job || way != BLAS) {
        const bool tiled = p.job ? p.job_size > 8 : way == TILED;
        CUDA(with_type(p.w.type, [&](auto type) { return launch_any<type>(a->gpu, p, tiled); }));
        return true;
    }
    if (is_coded(p.w.type)) {
        CUDA(decode_matrix(a->gpu, p.w, a->gpu->fast->decoded));
        p.w.type = BF16, p.w.data = (uint8_t *)a->gpu->fast->decoded;
    }
    return p.finish == ACTIVATE ? multiply_and_activate(a, p, e) : multiply_blas(a->gpu, p, e);
}
bool multiply(const Pass *a, const Product &p, Error *e) { return multiply(a, FusedProduct{p}, e); }

/* ---- a block, as in infer.cu ---- */

/* A Pass that knows what lies in w.normed. */
struct FusedPass : Pass {
    bool normed;         /* x after the norm that comes next ... */
    int squares;         /* ... but, if not 0, without norm_factor(): `square` has this many sums a token */
    const float *square; /* (tokens, squares) */
};
struct NextNorm {
    const float *weight;  /* of the norm that follows; NULL: the step ends */
    const Matrix &matrix; /* reads its result; at the end any */
};

/* Computes w.normed for matrix `next`, unless it is ready. */
bool norm_for(FusedPass *a, const float *weight, const Matrix &next, Error *e) {
    if (a->normed) return true;
    a->normed = true, a->squares = 0;
    return ::norm_for(a, weight, next, e);
}
/* A product with w.normed. */
FusedProduct fused(const FusedPass *a, const Product &product) {
    FusedProduct p = {product};
    p.square = a->square, p.squares = a->squares, p.eps = a->w.eps;
    return p;
}
/* x += results (see add_results), and the norm that comes next. */
bool combine_results(FusedPass *a, int top_k, const float *weights, const float *post, NextNorm next, Error *e) {
    a->normed = next.weight, a->squares = 0;
    if (!next.weight) return ::combine_results(a, top_k, weights, post, e);
    Work w = a->w;
    if (!gpus::begin_sum(a, &w, &top_k, &weights, e)) return false;
    CUDA(launch(a->gpu, combine_and_norm, a->tokens, row_threads(w.dim), 0, w, top_k, weights, post, next.weight,
                type_for(next.matrix)));
    return true;
}
/* x += W y; with `post` W y is normed before it is added. If products stream, this one prepares the next norm. */
bool add_to_x(FusedPass *a, const Matrix &m, const void *y, int pitch, const float *post, NextNorm next, Error *e) {
    FusedProduct p = {product_of(a, m, y, pitch)};
    if (post || a->w.link.cards > 1) {
        p.y = a->w.down, p.y_pitch = m.rows;
        return multiply(a, p, e) && combine_results(a, 1, NULL, post, next, e);
    }
    p.finish = ADD, p.y = a->w.x, p.y_pitch = a->w.dim;
    if (way_of(a, m) == STREAMED && way_of(a, next.matrix) == STREAMED) p.norm = next.weight;
    p.normed = a->w.normed, p.normed_pitch = a->w.normed_pitch, p.normed_type = type_for(next.matrix);
    p.next_square = a->gpu->fast->square;
    a->normed = p.norm;
    a->squares = a->normed ? square_parts(m.rows) : 0, a->square = a->gpu->fast->square;
    return multiply(a, p, e);
}

template <int D> cudaError_t launch_attention_fused(const Pass *a, const DeviceLayer &l) {
    typedef AttentionShape<D> Shape;
    const Work &w = a->w;
    if (a->alone) return launch_attention<D>(a, l, attention_alone<D>);
    cudaError_t error = launch_rope(a, l);
    if (!error && a->queries) error = launch_attention<D>(a, l, attention<D>);
    if (error || !a->tiles) return error;
    if constexpr (D == 64 || D == 128)
        if (wgmma_rows(a)) return launch_attention_wgmma<D>(a, l);
    return launch(a->gpu, attention_tiled<D>, dim3(w.n_kv_heads, a->tiles), Shape::THREADS, Shape::SHARED, w, a->s, l);
}
bool attend(const Pass *a, const DeviceLayer &l, Error *e) {
    cudaError_t error = cudaErrorNotSupported;
    if (query_type(l) != F32)
        error = with_head_dim(a->w.head_dim, [&](auto d) { return launch_attention_fused<d>(a, l); });
    if (error == cudaErrorNotSupported) return ::attend(a, l, e);
    CUDA(error);
    return tap_attention(a, l, e);
}
/* Tokens of a prompt that attention takes at once. */
int tile_tokens(const Pass *a) {
    int rows = wgmma_rows(a);
    if (!rows) rows = a->w.head_dim == 256 ? AttentionShape<256>::ROWS : AttentionShape<128>::ROWS;
    return std::max(1, rows * a->w.n_kv_heads / a->w.n_heads);
}

/* Gate and up, activation and down of the chosen experts, to w.down. If `job_size` is 0, the products choose them. */
bool multiply_experts(const FusedPass *a, const DeviceLayer &l, int job_size, Error *e) {
    const Work &w = a->w;
    const int choices = a->tokens * w.top_k;
    FusedProduct up = fused(a, gated(a, l.up, l.down)), down = {product_of(a, l.down, w.act_out, w.act_pitch)};
    for (FusedProduct *p : {&up, &down})
        if (job_size) {
            with_jobs(a, p, job_size);
        } else {
            p->router = router_of(a, l), p->max_jobs = choices;
            p->expert = w.expert, p->weight = w.weight, p->experts_read = w.experts_read;
        }
    up.divide = w.top_k;
    down.early = true, down.y = w.down, down.y_pitch = w.dim;
    return multiply(a, up, e) && tap_experts(a, l, e) && multiply(a, down, e);
}
/* A mixture of experts: choices sorted by expert (with job_size 0 they stay in order), the experts' products, and the
 * weighted sum. */
bool experts(FusedPass *a, const DeviceLayer &l, NextNorm next, Error *e) {
    const Work &w = a->w;
    const int choices = a->tokens * w.top_k, wgmma = wgmma_job_size(a, l);
    int job_size = wgmma;
    if (!wgmma && (a->tokens > 1 || w.n_experts > PRODUCT_EXPERTS)) {
        job_size = 8; /* choices of a job at most; with up to about five an expert product_fused is faster */
        if (a->tokens > MAX_DECODE && choices > 5 * w.n_experts)
            job_size = choices < 16 * w.n_experts ? 16 : choices <= 32 * w.n_experts ? 32 : 64;
    }
    FusedProduct logits = fused(a, product_of(a, l.router, NULL, 0));
    logits.y = w.router, logits.y_pitch = w.n_experts, logits.total = a->gpu->fast->square_sum;
    if (!multiply(a, logits, e) || (job_size && !route_tokens(a, l, job_size, e))) return false;
    if (a->squares) a->squares = 1, a->square = a->gpu->fast->square_sum; /* the router's product added them up */
    /* Experts' products apply norm_factor() only up to MAX_DECODE tokens. */
    if (type_for(l.router) != type_for(l.up) || (a->squares && a->tokens > MAX_DECODE)) a->normed = false;
    if (!norm_for(a, l.ffn_norm, l.up, e)) return false;
    if (l.shared_up.rows && !(multiply(a, fused(a, gated(a, l.shared_up, l.shared_down)), e) && add_shared(a, l, e)))
        return false;
    if (!(wgmma ? experts_wgmma(a, l, e) : multiply_experts(a, l, job_size, e))) return false;
    return combine_results(a, w.top_k, w.weight, l.ffn_post_norm, next, e);
}
bool feed_forward(FusedPass *a, const DeviceLayer &l, NextNorm next, Error *e) {
    return multiply(a, fused(a, gated(a, l.up, l.down)), e) && tap_experts(a, l, e) &&
           add_to_x(a, l.down, a->w.act_out, a->w.act_pitch, l.ffn_post_norm, next, e);
}

bool block(FusedPass *a, int layer, Error *e) {
    const std::vector<DeviceLayer> &layers = a->gpu->device.layer;
    const DeviceLayer &l = layers[layer], *after = layer + 1 < a->w.n_layers ? &l + 1 : NULL;
    const NextNorm inner = {l.ffn_norm, l.router.rows ? l.router : l.up};
    const NextNorm next = {after ? after->attn_norm : NULL, after ? after->qkv : l.qkv};
    Attend *const own = attend_for(a->w);
    a->w.layer = layer;
    if (!norm_for(a, l.attn_norm, l.qkv, e)) return false;
    FusedProduct qkv = fused(a, product_of(a, l.qkv, NULL, 0));
    qkv.y = a->w.projected, qkv.y_pitch = l.qkv.rows;
    return multiply(a, qkv, e) && (own == ::attend ? attend : own)(a, l, e) &&
           add_to_x(a, l.o, a->w.attn, a->w.attn_pitch, l.attn_post_norm, inner, e) && tap_x(a, "attn_residual", e) &&
           norm_for(a, inner.weight, inner.matrix, e) && (l.router.rows ? experts : feed_forward)(a, l, next, e) &&
           tap_x(a, "residual", e);
}
/* All blocks, behind the embedding. */
bool blocks(Pass *pass, Error *e) {
    FusedPass a = {*pass};
    for (int i = 0; i < a.w.n_layers; i++)
        if (!block(&a, i, e)) return false;
    return true;
}
