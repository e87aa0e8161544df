/* ring.cuh: a block of the decode kernel: its warps, its shared memory, and the ring of stages there through which
 * weights come. */
#pragma once

/* Warps of a block that multiply, the consumers: a row of 2,880 values of MXFP4 has three chunks for each. With the
 * producer they are four on each quarter of a multiprocessor. */
constexpr int CONSUMER_WARPS = 15, CONSUMERS = CONSUMER_WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int SLAB_WARPS = 12; /* consumers that attention uses: with more, merging their states takes longer */
constexpr int MAX_STAGES = 16; /* of the ring */
/* Stages in flight at once. With more the memory delivers less, and every other load waits longer. Stages with a page
 * of the cache are smaller. */
constexpr int MAX_COPIES = 2, MAX_PAGE_COPIES = 3;
constexpr int MAX_PART = 48;     /* chunks of a part, about 24 KB */
constexpr int MAX_FRAGMENTS = 9; /* chunks whose activations a warp keeps in registers: the output matrix has as many */
constexpr int MIN_SUMS = 11 * 16 * CONSUMER_WARPS; /* floats of a round's sums: 11 tiles, phase up of a single token */
constexpr int MIN_SMS = 78,
              FAST_EXPERTS = 256; /* so that each block's lists of tiles fit in shared memory; of all cards */
constexpr int MAX_CHOICES = 8;    /* of an expert, multiplied at once; for more its weights are read again */

/* The consumers of a block wait for each other. */
__device__ inline void sync_consumers() { bar_sync(CONSUMERS); }
/* Gates (barriers) of a block, which open once a layer. FREE: nobody reads the previous layer's choice of experts any
 * more, and the consumers' writes are done. SUMMED: a single token's router sums are complete, so all blocks have
 * published their x. ROUTED: each token has chosen its experts. CHOSEN: the lists of Active are there. */
enum { FREE, SUMMED, ROUTED, CHOSEN, GATES };

/* ---- shapes that the compiler knows ---- */

struct ShapedMatrix : Matrix {
    int chunks, per, parts; /* chunks of a tile; chunks of a part; parts of a tile */
    __host__ __device__ int chunks_of(int part) const { return min_of(per, chunks - part * per); }
};
__host__ __device__ inline ShapedMatrix with_shape(const Matrix &from, Type type, int rows, int cols) {
    ShapedMatrix m;
    const int columns = type == MXFP4 ? CHUNK : BF16_COLUMNS;
    m.data = from.data, m.bias = from.bias, m.n = from.n, m.type = type, m.rows = rows, m.cols = cols;
    m.chunks = (cols + columns - 1) / columns;
    m.stride = m.chunks * columns;
    m.parts = (m.chunks + MAX_PART - 1) / MAX_PART;
    m.per = (m.chunks + m.parts - 1) / m.parts;
    m.bytes = type == MXFP4 ? (size_t)(rows + TILE - 1) / TILE * m.chunks * FP4_CHUNK
                            : (size_t)(rows + BF16_ROWS - 1) / BF16_ROWS * BF16_ROWS * m.stride * 2;
    return m;
}

/* Whether a model, or a card's part of it, has gpt-oss's types and shapes (20b and 120b). */
inline bool has_gpt_oss_shapes(const Model &m, int cards) {
    for (int i = 0; i < m.n_layers; i++) {
        const Layer &at = m.layer[i];
        if (!at.router.rows || !at.sinks || at.q_norm) return false;
        for (const Linear *w : {&at.q, &at.k, &at.v, &at.o, &at.router})
            if (w->type != BF16) return false;
        for (const Linear *w : {&at.gate, &at.up, &at.down})
            if (w->type != MXFP4) return false;
    }
    return m.head.type == BF16 && m.embed.type == BF16 && m.dim == 2880 && m.ffn_dim == 2880 / cards &&
           m.vocab == 201088 && m.head.rows == m.vocab / cards && m.n_heads == 64 / cards &&
           m.n_kv_heads == 8 / cards && m.head_dim == 64 && m.top_k == 4 && m.n_experts <= FAST_EXPERTS;
}
/* A DecodeWork with these shapes as constants. */
template <int cards> __device__ inline DecodeWork with_gpt_oss_shapes(DecodeWork w) {
    w.dim = 2880, w.ffn_dim = 2880 / cards, w.act_pitch = (w.ffn_dim + CHUNK - 1) / CHUNK * CHUNK, w.vocab = 201088;
    w.n_heads = 64 / cards, w.n_kv_heads = 8 / cards, w.head_dim = w.rope_dim = 64, w.kv_rank = 0,
    w.attn_pitch = 4096 / cards, w.attn_scale = 0.125f, w.top_k = 4;
    return w;
}

/* ---- a block's shared memory ---- */

struct Layout { /* where each array begins, in bytes; the ring has what the others leave */
    int stages, stage_bytes;
    int ring, barriers, hold, gates, x, sums, square, scale, factor, bias, own, norm, columns, logit, weights, experts;
    int cos_sin, position, page, table;
    int active_expert, active_begin, active_order, active_cost, active_range; /* see Active */
    unsigned sum_room;                                                        /* floats of `sums` */
    int barrier_base; /* the value of DecodeWork::barrier before phase 0; can be below 0 */
    int bytes;        /* of all */
};

/* Elements between rows of activations in shared memory. */
__host__ __device__ constexpr int pitch_of(int stride) { return bank_pitch(stride * sizeof(bf16)) / sizeof(bf16); }
/* Floats between rows of the router's columns there: eight lanes read eight rows of four experts from 32 banks. */
__host__ __device__ constexpr int columns_pitch(int experts) { return (experts + 31) / 32 * 32 + 4; }
template <Type T> __host__ __device__ int tiles_of(int rows) { return (rows + Codec<T>::ROWS - 1) / Codec<T>::ROWS; }

/* The experts that any token chose, and who chose them. A choice is token * top_k + k. */
struct Active {
    int *expert; /* (n) of several tokens in ascending order */
    int *begin;  /* (n + 1) in `order` */
    int *order;  /* (tokens * top_k) choices, by expert and then by token */
    int *cost;   /* (n + 1) tile_cost() of all experts before this one */
    int *range;  /* (4) this block's tiles of all experts, begin and end: of phase up, of phase down */
    static int max_experts(int n_experts, int top_k, int tokens) { return min_of(n_experts, top_k * tokens); }
};

/* What a tile of an expert with so many choices costs: each quad of them, and each read of its weights. */
__device__ constexpr int tile_cost(int choices) {
    return (choices + 3) / 4 + (choices + MAX_CHOICES - 1) / MAX_CHOICES;
}

/* The layout for so many tokens and blocks. It fits if its bytes are at most `room`, a block's shared memory. */
inline Layout layout_for(const DecodeWork &w, const DeviceModel &device, int tokens, int blocks, int room) {
    Layout k = {};
    const DeviceLayer &b = device.layer[0];
    int experts = Active::max_experts(w.n_experts, w.top_k, tokens), x = 0, sums = MIN_SUMS;
    /* rows of the tiles of one block, of n matrices */
    auto rows_of = [&](const Matrix &m, int n) {
        int rows = m.type == MXFP4 ? TILE : BF16_ROWS, tiles = (m.rows + rows - 1) / rows * n;
        return (tiles + blocks - 1) / blocks * rows;
    };
    auto consider = [&](auto codec, const Matrix &m, bool normed) {
        typedef decltype(codec) C;
        int rows = tokens == 1 && normed; /* in shared memory */
        x = max_of(x, rows * pitch_of(m.stride) * (int)sizeof(bf16));
        sums = max_of(sums, CONSUMER_WARPS * C::ROWS * (C::TYPE == MXFP4 ? min_of(tokens, MAX_CHOICES) : tokens));
        k.stage_bytes = max_of(k.stage_bytes, C::stage_bytes(with_shape(m, C::TYPE, m.rows, m.cols).per));
    };
    for (const Matrix *m : {&b.qkv, &b.o, &device.head}) consider(Codec<BF16>(), *m, m != &b.o);
    for (const Matrix *m : {&b.up, &b.down}) consider(Codec<MXFP4>(), *m, m == &b.up);
    int rows = max_of(rows_of(b.qkv, 1), rows_of(b.o, 1));
    /* A tile costs at least 2, and with n choices at most 2 + 3 (n - 1) / 8: see tile_cost(). So all tiles cost at most
     * as much as those of this many experts that cost 2, and no block has more tiles than its share of these. */
    int matrices = experts + (3 * (tokens * w.top_k - experts) + 15) / 16;
    rows = max_of(rows, max_of(rows_of(b.up, matrices), rows_of(b.down, matrices)));
    auto take = [&](int &at, int bytes) { at = k.bytes, k.bytes += (bytes + 15) / 16 * 16; };
    take(k.square, CONSUMER_WARPS * 4);
    take(k.scale, MAX_DECODE * 4);
    take(k.factor, tokens * 4); /* as k.scale, of phase up */
    take(k.bias, rows * 4);
    take(k.own, rows_of(b.o, 1) * tokens * 4);
    take(k.norm, rows_of(b.o, 1) * 4);
    take(k.columns, rows_of(b.o, 1) * columns_pitch(w.n_experts) * 4);
    take(k.logit, tokens * w.n_experts * 2 * 4); /* and biases behind them */
    take(k.weights, tokens * w.top_k * 4);
    take(k.experts, tokens * w.top_k * 4);
    take(k.active_expert, experts * 4);
    take(k.active_begin, (experts + 1) * 4);
    take(k.active_order, tokens * w.top_k * 4);
    take(k.active_cost, (experts + 1) * 4);
    take(k.active_range, 4 * 4);
    take(k.cos_sin, tokens * w.head_dim / 2 * 8);
    take(k.position, tokens * 4);
    take(k.page, tokens * 4);
    take(k.table, tokens * 4);
    take(k.barrier_base, 8);
    take(k.gates, GATES * sizeof(Barrier));
    take(k.hold, sizeof(Barrier));
    int attention = SLAB_WARPS * 8 * (w.head_dim + 2) * 4; /* states, from k.x on */
    int least = max_of(2 * 4 * sums, attention - x), barriers = MAX_STAGES * 2 * sizeof(Barrier);
    k.stages = max_of(1, min_of(MAX_STAGES, (room - k.bytes - barriers - x - least - 256) / k.stage_bytes));
    if (tokens > 8 && k.stages > 2) k.stages--; /* longer rounds give more than a stage */
    take(k.barriers, barriers);
    take(k.x, x);
    take(k.sums, max_of(least, (room - k.bytes - k.stages * k.stage_bytes - 128) / 16 * 16)); /* all that is left */
    k.sum_room = (k.bytes - k.sums) / 4;
    k.bytes = (k.bytes + 127) / 128 * 128;
    take(k.ring, k.stages * k.stage_bytes);
    return k;
}

/* ---- streaming weights through a block ---- */

/* Where a tile of a matrix begins. */
template <Type T> __device__ const uint8_t *tile_at(const Matrix &m, int tile) {
    return m.data + (size_t)tile * Codec<T>::ROWS * Codec<T>::row_bytes(m.stride);
}

/* Chunks of a tile that a warp has. */
constexpr int fragments_of(int chunks) {
    int parts = (chunks + MAX_PART - 1) / MAX_PART, per = (chunks + parts - 1) / parts;
    return parts * ((per + CONSUMER_WARPS - 1) / CONSUMER_WARPS);
}
static_assert(fragments_of(4096 / BF16_COLUMNS) <= MAX_FRAGMENTS && fragments_of(2880 / CHUNK) <= MAX_FRAGMENTS,
              "gpt-oss's shapes");

/* The activations that a warp keeps in registers for all tiles of a matrix: by chunk and quad. */
template <Type T, int QUADS>
using Fragments = typename Codec<T>::template Lane<QUADS>::Fragment[MAX_FRAGMENTS][Codec<T>::template Lane<QUADS>::N];

/* A block's way through its tiles, part by part. The producer fills one stage after the other; the consumers empty each
 * together, every warp its share of the columns. */
struct Ring {
    uint8_t *memory;       /* (stages, stage_bytes) */
    Barrier *full, *empty; /* (stages) full when a copy has landed, empty when all consumers have read it */
    Barrier *hold;         /* while it is in an odd phase the producer starts no copy: see hold_after_last() */
    int stages, stage_bytes, thread;
    int stage = 0;         /* of the next part */
    unsigned parity = 0;   /* of that stage */
    int requested = 0;     /* parts of the coming phase whose copies the producer has started already */
    bool may_hold = false; /* thread 0 closes `hold` after this phase's last part */

    __device__ Ring(const Layout &k, uint8_t *shared)
        : memory(shared + k.ring), full((Barrier *)(shared + k.barriers)), empty(full + MAX_STAGES),
          hold((Barrier *)(shared + k.hold)), stages(k.stages), stage_bytes(k.stage_bytes), thread(threadIdx.x) {}
    __device__ uint8_t *stage_at() const { return memory + stage * stage_bytes; }
    __device__ void advance() {
        if (++stage < stages) return;
        stage = 0, parity ^= 1;
        asm volatile(""); /* makes this a branch, which costs the loop over tiles fewest instructions */
    }

    /* The producer's side of a phase: locate(i, part) returns where the tile of the i-th part begins, and which part of
     * the tile it is. */
    template <Type T, class Locate> __device__ void produce(const ShapedMatrix &m, int parts, Locate locate) {
#pragma unroll 1
        for (int i = requested; i < parts; i++) {
            int part;
            const uint8_t *tile = locate(i, part);
            acquire_stage(MAX_COPIES);
            Codec<T>::copy_part(full + stage, stage_at(), m.per, tile, m.stride, part * m.per, m.chunks_of(part),
                                thread % 32);
            advance();
        }
        requested = 0;
    }
    /* Waits until a copy to the next stage may start: the stage is empty, nothing holds, and fewer than max_copies are
     * in flight. */
    __device__ void acquire_stage(int max_copies) {
        empty[stage].wait(parity ^ 1); /* at once in the first round */
        fence_proxies();               /* the copy engine writes where others have read */
        hold->wait(1);
        int before = stage - min(max_copies, stages); /* its copy has to be there */
        full[before < 0 ? before + stages : before].wait(before < 0 ? parity ^ 1 : parity);
    }
    /* The same for pages of the cache, numbers last - 1 down to `first` of `table`: keys of a head, then values. */
    __device__ void produce_pages(const DecodeWork &w, const int *table, int first, int last, int head) {
        int bytes = w.head_dim * PAGE * sizeof(bf16), number = 0;
        size_t values = (const uint8_t *)cache_of(w, 0, 1, 0) - (const uint8_t *)cache_of(w, 0, 0, 0);
#pragma unroll 1
        for (int i = 0; i < last - first; i++) {
            if (i % 32 == 0) number = table[max(last - 1 - i - thread % 32, first)];
            acquire_stage(MAX_PAGE_COPIES);
            int page = __shfl_sync(~0u, number, i % 32);
            full[stage].copy_rows(stage_at(), bytes, (const uint8_t *)cache_of(w, page, 0, head), values, 2, bytes,
                                  thread % 32);
            advance();
        }
    }

    /* A fence waits for every copy in flight to its multiprocessor, needed or not (1.9 us with two stages), and loads
     * are slow meanwhile. So the producer starts no copy from the moment that warp 0 is done with the block's last part
     * of a phase until resume(), after the fence. The consumers announce this before the loop over tiles, if they have
     * `any`, and say after the loop whether it ended with that part. */
    __device__ void hold_after_last(bool any) {
        may_hold = any;
        if (thread < 32) check_hold(1);
    }
    __device__ void hold_if(bool last) { hold->arrive_if(last && may_hold && thread == 0); }
    __device__ void resume() {
        if (may_hold && thread < 32) check_hold(0);
        hold->arrive_if(may_hold && thread == 0);
        may_hold = false;
    }
    __device__ void check_hold(int parity) { /* never waits; synccheck requires a wait for each phase */
        hold->wait(parity);
        __syncwarp();
    }

    /* The consumers' side, part by part: work(stage). Warps without work wait too: arriving at `empty` a round early
     * would count for this one. Each lane arrives: one for all is no faster, and confuses racecheck. */
    template <class Work> __device__ void consume(Work work) {
        full[stage].wait(parity);
        work(stage_at());
        full[stage + MAX_STAGES].arrive(); /* empty[stage], without an address of its own */
        advance();
    }
    /* A warp's activations, in the order in which multiply_tile() meets the chunks; if they are polled, as soon as they
     * are all published. */
    template <Type T, int QUADS>
    __device__ void load_fragments(const ShapedMatrix &m, const Activations &x, Fragments<T, QUADS> &fragments) const {
        typedef typename Codec<T>::template Lane<QUADS> Lane;
        int turns = (m.per + CONSUMER_WARPS - 1) / CONSUMER_WARPS, me = thread % 32;
        uint32_t max_word;
        do {
            max_word = 0;
            if (x.polled) asm volatile("" : "+r"(me)); /* keeps no addresses for another round */
            Lane lane(NULL, m.per, x, me);
#pragma unroll
            for (int k = 0; k < MAX_FRAGMENTS; k++) {
                int part = k / turns, i = thread / 32 + k % turns * CONSUMER_WARPS;
                bool all = (k % turns + 1) * CONSUMER_WARPS <= m.chunks_of(part); /* then there is no branch */
                if (part == m.parts) break;
#pragma unroll
                for (int j = 0; j < Lane::N; j++) {
                    fragments[k][j] = {};
                    if (all || i < m.chunks_of(part)) lane.load(fragments[k][j], part * m.per + i, j, x.polled);
                }
            }
#pragma unroll
            for (int k = 0; k < MAX_FRAGMENTS && k < m.parts * turns && x.polled; k++)
#pragma unroll
                for (int j = 0; j < Lane::N; j++) max_word = Codec<T>::max_word(max_word, fragments[k][j]);
        } while (x.polled && __any_sync(~0u, half_unpublished(max_word)) && pause());
    }
    /* A tile times these activations; this lane's sums go to `to` and after it. */
    template <Type T, int QUADS>
    __device__ void multiply_tile(const ShapedMatrix &m, const Fragments<T, QUADS> &fragments, int tokens, float *to) {
        typename Codec<T>::template Sum<QUADS> sum;
        int turns = (m.per + CONSUMER_WARPS - 1) / CONSUMER_WARPS;
#pragma unroll
        for (int part = 0; part < MAX_FRAGMENTS; part++) {
            if (part == m.parts) break;
            consume([&](const uint8_t *stage) {
                typename Codec<T>::template Lane<QUADS> lane(stage, m.per, {NULL, 0, 1}, thread % 32);
#pragma unroll
                for (int k = 0; k < MAX_FRAGMENTS; k++) {
                    int i = thread / 32 + k * CONSUMER_WARPS;
                    bool all = (k + 1) * CONSUMER_WARPS <= m.chunks_of(part); /* no branch between chunks then */
                    if (k < turns && (all || i < m.chunks_of(part))) lane.add(sum, i, fragments[part * turns + k]);
                }
            });
        }
        sum.reduce();
        sum.store(to, tokens, thread % 32);
    }
};
