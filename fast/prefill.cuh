/* prefill.cuh: what takes most of a prompt's time, attention and the products of the experts, on Hopper's instructions
 * for warpgroups of four warps (wgmma, only in code for sm_90a). Other cards use tiles.cuh's.
 *
 * A warpgroup multiplies 64 rows, in registers or in shared memory, by columns in shared memory: a ring that cp.async
 * fills ahead. Sums are fp32 and in one order, so every run gives the same bits. */
#pragma once

constexpr int PANEL = 64 * 128; /* bytes of 64 columns by 64 inner indices, as wgmma reads them */

/* Where column c of an activation row lies, for experts of this type. wgmma wants columns 2t, 2t + 1, 2t + 8 and 2t + 9
 * of every 16 in lane t; an encoding's decode() gives it others, so within 64 columns the pairs change places. */
__host__ __device__ inline int column_for(Type type, int c) {
    if (type == BF16) return c;
    const bool split = chunk_words(type) == 4; /* see Encoding::eight() */
    const int half = type == MXFP4 ? c >> 3 & 1 : c >> 5 & 1, second = split ? c >> 4 & 1 : c >> 2 & 1;
    const int t = type == MXFP4 ? c >> 4 & 3 : split ? c >> 2 & 3 : c >> 3 & 3;
    return (c & ~63) | half << 5 | second << 4 | (c & 2) << 2 | t << 1 | (c & 1);
}

#if HOPPER
/* ---- instructions ---- */

#define SUMS_8(i)                                                                                                      \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]),        \
        "+f"(c[i + 7])
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define TO_31                                                                                                          \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                           \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TO_63                                                                                                          \
    TO_31 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                          \
          "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TO_95                                                                                                          \
    TO_63 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                                          \
          "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_TO(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 "

/* c (64, N) += a (64, 16) times the 16 inner indices of N columns that `b` names, bf16. Warp w of four holds rows
 * 16w .. 16w + 15 of a and c, dealt to its lanes as mma deals them. It runs asynchronously: see wgmma_done(). */
template <int N> __device__ inline void wgmma(float (&c)[N / 2], uint4 a, uint64_t b) {
    if constexpr (N == 64)
        asm volatile(WGMMA_TO(64) "{" TO_31 "},{%32,%33,%34,%35},%36,1,1,1,0;"
                     : SUMS_32(0)
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
    else if constexpr (N == 128)
        asm volatile(WGMMA_TO(128) "{" TO_63 "},{%64,%65,%66,%67},%68,1,1,1,0;"
                     : SUMS_32(0), SUMS_32(32)
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
    else
        asm volatile(WGMMA_TO(192) "{" TO_95 "},{%96,%97,%98,%99},%100,1,1,1,0;"
                     : SUMS_32(0), SUMS_32(32), SUMS_32(64)
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
/* The same with the rows of a in shared memory, like columns; without `add` it overwrites c. */
__device__ inline void wgmma(float (&c)[32], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p,%34,0;\n" WGMMA_TO(64) "{" TO_31 "},%32,%33,p,1,1,0,0;\n}"
                 : SUMS_32(0)
                 : "l"(a), "l"(b), "r"(add));
}
/* wgmma_begin: before the first wgmma after other writes to its registers. wgmma_end: after the last one of a batch.
 * wgmma_done: waits for all but the last BUT batches. */
__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int BUT> __device__ inline void wgmma_done() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(BUT) : "memory");
}
/* Keeps uses of c after the wait. */
template <int N> __device__ inline void wgmma_settle(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

/* The warps of a warpgroup wait for each other. */
__device__ inline void sync_warpgroup() {
    asm volatile("bar.sync %0,128;" ::"r"(1 + (int)threadIdx.x / 128) : "memory");
}

/* wgmma's descriptor (PTX ISA, "Matrix descriptor") of a panel, which lies at a multiple of 1024: its address / 16, 64
 * times 16 bytes to the next eight columns, and the swizzle of 128 bytes. Column n has its 64 inner indices at byte
 * 128 n, in eighths whose order differs by column, so that one eighth of eight columns fills all banks. 16 inner
 * indices further on is 2 more, the next panel PANEL / 16 more. */
__device__ inline uint64_t descriptor_of(const uint8_t *shared) {
    return (uint64_t)1 << 62 | (uint64_t)64 << 32 | (uint64_t)1 << 16 |
           (__cvta_generic_to_shared(shared) & 0x3FFFF) >> 4;
}
__device__ inline int panel_byte(int column, int eighth) { return column * 128 + (eighth ^ column % 8) * 16; }

/* A ring of stages that threads fill by cp.async. All warps leave a stage before it is filled again. */
struct CopyRing {
    Barrier *full, *empty; /* (n) */
    int n, stage = 0;
    unsigned parity = 0;

    /* `arrivals` make a stage full, `warps` make it empty. All threads of the block call it. */
    __device__ CopyRing(Barrier *barriers, int n, int arrivals, int warps) : full(barriers), empty(barriers + n), n(n) {
        if ((int)threadIdx.x < n) full[threadIdx.x].init(arrivals), empty[threadIdx.x].init(warps);
        Barrier::fence_init();
        __syncthreads();
    }
    __device__ void advance() {
        if (++stage == n) stage = 0, parity ^= 1;
    }
    __device__ void wait_empty() const { empty[stage].wait(parity ^ 1); }
    __device__ void wait_full() const {
        full[stage].wait(parity);
        fence_proxies(); /* so that wgmma sees what cp.async wrote */
    }
    __device__ void leave() const { /* a warp has read the stage */
        if (threadIdx.x % 32 == 0) empty[stage].arrive();
    }
    __device__ void arrive_on_copies() const { full[stage].arrive_on_copies(); }
};
#endif

/* ---- attention ---- */

template <int D> struct WgmmaAttention {
    static constexpr int WARPGROUPS = D == 64 ? 2 : 3, ROWS = WARPGROUPS * 64, THREADS = WARPGROUPS * 128;
    static constexpr int BLOCKS = D == 64 ? 2 : 1;             /* on a multiprocessor at once */
    static constexpr int STAGES = 5, STAGE = 2 * D * PAGE * 2; /* bytes of a page's keys and values */
    static constexpr int COPIERS = 256;                        /* threads that fetch pages; all, with heads of 64 */
    static constexpr int AHEAD = 3;         /* pages in flight; the other stages let the warps drift apart */
    static constexpr int QUERIES = D * 128; /* bytes of a warpgroup's 64 rows */
    static constexpr int SHARED = STAGES * (STAGE + 16) + WARPGROUPS * QUERIES;
};

/* Attention of neighbouring tokens (blockIdx.y: a tile of them, the last first, since it sees most) and all query heads
 * that share a key/value head (blockIdx.x). A row is a token and query head; a warpgroup's 64 rows of queries stay in
 * shared memory while pages of keys and values pass through it. A copier fetches its share of a page AHEAD pages
 * before it is used. Pages that all rows of a warpgroup see whole are not masked. */
template <int D>
__global__ void __launch_bounds__(WgmmaAttention<D>::THREADS, WgmmaAttention<D>::BLOCKS)
    attention_wgmma(Work w, Step s, DeviceLayer l) {
#if HOPPER
    typedef WgmmaAttention<D> Shape;
    extern __shared__ __align__(1024) uint8_t arena[];
    int head = blockIdx.x, tile = gridDim.y - 1 - blockIdx.y;
    CopyRing ring((Barrier *)(arena + Shape::STAGES * Shape::STAGE + Shape::WARPGROUPS * Shape::QUERIES), Shape::STAGES,
                  Shape::COPIERS, Shape::WARPGROUPS * 4),
        next = ring;
    wait_previous();
    launch_next();
    int token = s.tile[2 * tile], n = s.tile[2 * tile + 1], position = s.position[token],
        group = w.n_heads / w.n_kv_heads, end = position + n - 1;
    int begin = first_seen(position, l.window) / PAGE, coming = begin;
    const int *pages = s.page + (size_t)s.seq[token] * s.header[0];
    int page = pages[begin], column = threadIdx.x % 8;
    const bf16 *from_key = cache_of(w, 0, 0, head) + key_place(D, threadIdx.x / (D / 8), threadIdx.x % (D / 8) * 8),
               *from_value = cache_of(w, 0, 1, head) + value_place(D, column * 8, threadIdx.x / 8);
    uint8_t *key = arena + threadIdx.x % (D / 8) / 8 * PANEL + panel_byte(threadIdx.x / (D / 8), column),
            *value = arena + D * 128 + panel_byte(threadIdx.x / 8, column);
    /* Fetches this thread's share of page `coming`. Values after the last token become 0: 0 times a NaN is a NaN. */
    auto fetch = [&] {
        if (coming > end / PAGE || (Shape::THREADS > Shape::COPIERS && threadIdx.x >= Shape::COPIERS)) return;
        size_t skip = page * page_size(w);
        int at = next.stage * Shape::STAGE, seen = 2 * (end + 1 - coming * PAGE) - column * 16;
        if (coming < end / PAGE) page = pages[coming + 1];
        next.wait_empty();
#pragma unroll
        for (int k = 0; k < PAGE * D / 8 / Shape::COPIERS; k++) {
            copy_16(key + at + k * (Shape::COPIERS / (D / 8)) * 128, from_key + skip + k * Shape::COPIERS * 8);
            copy_16(value + at + k * (Shape::COPIERS / 8) * 128,
                    from_value + skip + k * (Shape::COPIERS / 8) * SLAB_KEYS, max(0, min(16, seen)));
        }
        next.arrive_on_copies();
        next.advance();
        coming++;
    };
    auto position_of = [&](int row) { return position + min(row / group, n - 1); };
    int mine = threadIdx.x / 128, lowest = position_of(mine * 64), highest = position_of(mine * 64 + 63);
    uint8_t *queries = arena + Shape::STAGES * Shape::STAGE + mine * Shape::QUERIES;
#pragma unroll
    for (int k = 0; k < Shape::QUERIES / 16 / 128; k++) { /* missing rows alias the last token's */
        int i = k * 128 + threadIdx.x % 128, r = i / (D / 8), c = i % (D / 8), of = mine * 64 + r;
        size_t from = (size_t)(token + min(of / group, n - 1)) * w.n_heads + head * group + of % group;
        copy_16(queries + c / 8 * PANEL + panel_byte(r, c % 8), (const bf16 *)w.q + from * D + c * 8);
    }
    copies_end();
    for (int i = 0; i < Shape::AHEAD; i++) fetch();
    copies_done<0>();
    fence_proxies(); /* as in wait_full() */
    sync_warpgroup();
    uint64_t q = descriptor_of(queries);
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    TileState<D, PAGE, true> state;
    auto sums = [&](int u) -> float(&)[32] { return *reinterpret_cast<float(*)[32]>(state.sum[8 * u]); };
    for (int i = begin; i <= end / PAGE; i++, ring.advance()) {
        float tiles[PAGE / 8][4], (&score)[32] = *reinterpret_cast<float(*)[32]>(tiles);
        fetch();
        ring.wait_full();
        uint64_t keys = descriptor_of(arena + ring.stage * Shape::STAGE), values = keys + D * 128 / 16;
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            wgmma(score, q + k / 4 * (PANEL / 16) + k % 4 * 2, keys + k / 4 * (PANEL / 16) + k % 4 * 2, k > 0);
        wgmma_end();
        wgmma_done<0>();
        wgmma_settle(score);
        if (i * PAGE + PAGE - 1 > lowest || (l.window && i * PAGE <= highest - l.window))
            state.mask(tiles, i * PAGE, {position_of(row), position_of(row + 8)}, l.window);
        state.softmax(tiles, LOG2E * w.attn_scale);
        uint4 share[SLABS];
        for (int k = 0; k < SLABS; k++) share[k] = state.shares_of(tiles, k);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < SLABS; k++)
            for (int u = 0; u < D / 64; u++) wgmma<64>(sums(u), share[k], values + u * (PANEL / 16) + k * 2);
        wgmma_end();
        wgmma_done<0>();
        for (int u = 0; u < D / 64; u++) wgmma_settle(sums(u));
        ring.leave();
    }
    for (int r = 0; r < 2; r++) state.store_row(w, l, r, row + 8 * r, token, n, head);
#endif
}

/* ---- experts ---- */

/* A slice is ROWS rows of an expert's matrix times a job's choices, at most CHOICES; a block multiplies slice after
 * slice, a chunk of 64 columns in each stage. */
constexpr int CHOICES = 192, MAX_JOBS = 8192 * 32 / CHOICES + MAX_EXPERTS; /* in the list in shared memory */
template <Type T> struct ExpertShape {
    static constexpr int WARPGROUPS = 3, ROWS = WARPGROUPS * 64, PANELS = CHOICES / 64;
    static constexpr int THREADS = WARPGROUPS * 128 + 128;                 /* with the producer's */
    static constexpr int PIECES = ROWS / TILE * Tiled<T>::PIECES;          /* of 16 bytes, of a chunk's weights */
    static constexpr int X = PANELS * PANEL, STAGE = X + PIECES * 16 + 16; /* bytes of a stage and its barriers */
    static constexpr int PITCH = 40, OUT = 64 * PITCH * 2; /* results on their way out, of each warpgroup */
    static constexpr int STAGES = min_of(6, ((227 << 10) - WARPGROUPS * OUT - MAX_JOBS * 4) / STAGE);
    static constexpr int SHARED = STAGES * STAGE + WARPGROUPS * OUT; /* without the list of jobs */
};

#if HOPPER
/* Sorts the jobs of route() by size, largest first, so that no block ends long after the others; returns their number.
 * All threads of the block call it. */
__device__ inline int sort_jobs(const Work &w, int *sorted) {
    const int jobs = *w.jobs;
    auto panels = [&](int i) { return (w.job[i].n + 63) / 64; };
    for (int i = threadIdx.x; i < jobs; i += blockDim.x) {
        int place = 0;
        for (int k = 0; k < jobs; k++) place += panels(k) > panels(i) || (panels(k) == panels(i) && k < i);
        sorted[place] = i;
    }
    __syncthreads();
    return jobs;
}

/* A slice: this warpgroup's 64 rows, as bf16 in registers, times n choices, at most 64 PANELS. While one warpgroup
 * unpacks, the others multiply. */
template <Type T, int PANELS, class Store>
__device__ void multiply_slice(CopyRing &ring, const uint8_t *arena, int chunks, int expert, int row, const int *list,
                               int n, uint8_t *room, Store store) {
    typedef ExpertShape<T> Shape;
    typedef Tiled<T> E;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float c[PANELS * 32] = {};
    for (int i = 0; i < chunks; i++, ring.advance()) {
        typename E::Raw raw;
        uint4 a[4];
        ring.wait_full();
        E::read(raw, arena + Shape::STAGES * Shape::X + (ring.stage * Shape::PIECES + warp * E::PIECES) * 16, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 low, high;
            E::decode(raw, half, low, high);
            a[2 * half] = {low.x, high.x, low.y, high.y}, a[2 * half + 1] = {low.z, high.z, low.w, high.w};
        }
        uint64_t columns = descriptor_of(arena + ring.stage * Shape::X);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma<PANELS * 64>(c, a[k], columns + k * 2);
        wgmma_end();
        wgmma_done<0>();
        ring.leave();
    }
    wgmma_settle(c);
#pragma unroll
    for (int i = 0; i < PANELS * 32; i++) c[i] *= E::FACTOR;
#pragma unroll
    for (int u = 0; u < PANELS; u++) store(c + u * 32, expert, row, list + u * 64, n - u * 64, room);
}

/* The product of all experts. The producer's warps run ahead, across the borders of slices too. x has a row for every
 * `divide` choices, its columns in the order of column_for. store(c, expert, this warp's first row of the matrix,
 * choices, how many, room) receives the sums of 64 choices; `room` is OUT bytes of shared memory. */
template <Type T, class Store>
__device__ void multiply_experts_wgmma(const Work &w, const Matrix &m, const bf16 *x, int x_pitch, int divide,
                                       Store store) {
    typedef ExpertShape<T> Shape;
    typedef Tiled<T> E;
    extern __shared__ __align__(1024) uint8_t arena[];
    uint8_t *room = arena + Shape::STAGES * (Shape::X + Shape::PIECES * 16);
    Barrier *barriers = (Barrier *)(room + Shape::WARPGROUPS * Shape::OUT);
    int *sorted = (int *)(barriers + 2 * Shape::STAGES), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    CopyRing ring(barriers, Shape::STAGES, 128, Shape::WARPGROUPS * 4);
    wait_previous();
    launch_next();
    int chunks = m.stride / CHUNK, high = (m.rows + Shape::ROWS - 1) / Shape::ROWS, jobs = sort_jobs(w, sorted);
    /* A slice's expert, number of choices and first tile; returns the choices. */
    auto slice_at = [&](int i, int &e, int &n, int &tile) {
        Job job = w.job[sorted[i / high]];
        e = job.expert, n = job.n, tile = i % high * (Shape::ROWS / TILE);
        return w.order + job.first;
    };
    int e, n, tile;
    if (warp < Shape::WARPGROUPS * 4) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 152;"); /* the producer's: 128 * (3 * 152 + 56) = 65,536 */
        uint8_t *mine = room + warp / 4 * Shape::OUT;
        int i = blockIdx.x;
        /* Takes the slices of this width, a constant so that sums are registers. */
        auto take = [&](auto panels) {
            constexpr int PANELS = decltype(panels)::value;
            for (; i < jobs * high; i += gridDim.x) {
                const int *list = slice_at(i, e, n, tile);
                n = __shfl_sync(~0u, n, 0);
                if (n <= (PANELS - 1) * 64) break;
                multiply_slice<T, PANELS>(ring, arena, chunks, e, (tile + warp) * TILE, list, n, mine, store);
            }
        };
        take(std::integral_constant<int, 3>());
        take(std::integral_constant<int, 2>());
        take(std::integral_constant<int, 1>());
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        constexpr int PIECES = Shape::PIECES;
        int thread = threadIdx.x % 128;
        for (int i = blockIdx.x; i < jobs * high; i += gridDim.x) {
            const int *list = slice_at(i, e, n, tile);
            /* Where this thread's pieces of weights lie, and its eighths of every 16th row of x. Missing tiles and rows
             * of x alias the last one. */
            uint32_t piece[(PIECES + 127) / 128], from[CHOICES / 16];
#pragma unroll
            for (int k = 0; k < (PIECES + 127) / 128; k++) {
                int at = k * 128 + thread;
                piece[k] = (uint32_t)E::piece(m, min(at / E::PIECES, m.tiles() - tile - 1), at % E::PIECES);
            }
#pragma unroll
            for (int k = 0; k < CHOICES / 16; k++)
                from[k] = (uint32_t)(list[min(thread / 8 + 16 * k, n - 1)] / divide) * (x_pitch / 8) + thread % 8;
            const uint8_t *weights = m.data + e * m.bytes + E::offset(m, tile, 0);
            const uint4 *rows = (const uint4 *)x;
            for (int chunk = 0; chunk < chunks; chunk++, weights += E::STEP, rows += CHUNK / 8, ring.advance()) {
                ring.wait_empty();
                uint8_t *to = arena + ring.stage * Shape::X + panel_byte(thread / 8, thread % 8),
                        *to_weights = arena + Shape::STAGES * Shape::X + (ring.stage * PIECES + thread) * 16;
#pragma unroll
                for (int k = 0; k < PIECES / 128; k++) copy_16(to_weights + k * 2048, weights + piece[k]);
                if constexpr (PIECES % 128 != 0)
                    if (thread < PIECES % 128) copy_16(to_weights + PIECES / 128 * 2048, weights + piece[PIECES / 128]);
#pragma unroll
                for (int u = 0; u < Shape::PANELS; u++) {
                    if (u * 64 >= n) break;
#pragma unroll
                    for (int k = u * 4; k < u * 4 + 4; k++) copy_16(to + k * 2048, rows + from[k]);
                }
                ring.arrive_on_copies();
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
}
#endif

/* Gate and up, alternating rows, and the activation: act_out in the order of column_for. */
template <Type T>
__global__ void __launch_bounds__(ExpertShape<T>::THREADS, 1) up_wgmma(Work w, DeviceLayer l, const bf16 *x) {
#if HOPPER
    typedef ExpertShape<T> Shape;
    auto store = [&](const float *c, int e, int row, const int *list, int n, uint8_t *room) {
        int thread = threadIdx.x % 128, warp = thread / 32, g = threadIdx.x / 4 % 8, t = threadIdx.x % 4;
        bool odd = g % 2; /* this lane has rows of up, and takes the odd one of two tokens */
        bf16 *out = (bf16 *)room;
        const bool spread = l.down.type == MXFP4; /* 32 columns are then four of every eight */
        if (row - warp * 16 >= l.up.rows) return;
        int choice[2];
        int column[2]; /* where this lane's results of a token lie, among 32 */
        float2 bias[2] = {};
        for (int i = 0; i < 2; i++) {
            choice[i] = thread / 4 + 32 * i < n ? list[thread / 4 + 32 * i] : -1;
            column[i] = column_for(l.down.type, warp * 8 + i * 4 + g / 2);
            if (spread) column[i] = column[i] / 8 * 4 + column[i] % 4;
            if (l.up.bias) bias[i] = *(const float2 *)(l.up.bias + (size_t)e * l.up.rows + row + 8 * i + g - odd);
        }
        auto activate = [&](Act act) {
#pragma unroll
            for (int j = 0; j < 16; j++) { /* rows g and g + 8 of 8 tokens each */
                int i = j % 2;
                float own = odd ? c[2 * j + 1] : c[2 * j],
                      other = __shfl_xor_sync(~0u, odd ? c[2 * j] : c[2 * j + 1], 4);
                float gate = (odd ? other : own) + bias[i].x, up = (odd ? own : other) + bias[i].y;
                out[(j / 2 * 8 + 2 * t + odd) * Shape::PITCH + column[i]] =
                    (bf16)activation(act, w.act_limit, gate, up, true);
            }
        };
        w.act == SWIGLU_CLAMPED ? activate(SWIGLU_CLAMPED) : activate(w.act); /* no branches for gpt-oss's */
        sync_warpgroup();
        for (int i = 0; i < 4; i++)
            if (choice[i / 2] >= 0)
                *(uint2 *)((bf16 *)w.act_out + (size_t)choice[i / 2] * w.act_pitch +
                           column_for(l.down.type, (row - warp * 16) / 2) + (t * 2 + i % 2) * (spread ? 8 : 4)) =
                    *(const uint2 *)(out + (thread / 4 + i / 2 * 32) * Shape::PITCH + (t * 2 + i % 2) * 4);
        sync_warpgroup();
    };
    multiply_experts_wgmma<T>(w, l.up, x, w.normed_pitch, w.top_k, store);
#endif
}

template <Type T> __global__ void __launch_bounds__(ExpertShape<T>::THREADS, 1) down_wgmma(Work w, DeviceLayer l) {
#if HOPPER
    auto store = [&](const float *c, int e, int row, const int *list, int n, uint8_t *) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if (row >= w.dim) return;
        const float *bias = l.down.bias ? l.down.bias + (size_t)e * w.dim + row + g : NULL;
        float low = bias ? bias[0] : 0, high = bias ? bias[8] : 0;
        int choice[2] = {lane < n ? list[lane] : -1, lane + 32 < n ? list[lane + 32] : -1};
#pragma unroll
        for (int j = 0; j < 16; j++) { /* two tokens of 8 each */
            int mine = __shfl_sync(~0u, choice[j / 8], (j / 2 * 8 + 2 * t + j % 2) % 32);
            float *out = w.down + (size_t)mine * w.dim + row + g;
            if (mine >= 0) out[0] = c[j / 2 * 4 + j % 2] + low, out[8] = c[j / 2 * 4 + 2 + j % 2] + high;
        }
    };
    multiply_experts_wgmma<T>(w, l.down, (const bf16 *)w.act_out, w.act_pitch, 1, store);
#endif
}
