/* ring.cuh: a block of few.cuh's kernel: its warps, its shared memory, and the ring there through which weights come. */
#pragma once

constexpr int WARPS = 15; /* of a block that multiply: a row of 2,880 values of MXFP4 has three chunks for each; a quarter of a multiprocessor has four */
constexpr int CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int ATTENTION_WARPS = 12;   /* of them: the more, the longer it takes to put together what they found */
constexpr int MOST_STAGES = 16;       /* of the ring */
constexpr int MOST_COPIES = 2;        /* stages on the way at once: more, and the memory delivers less, and all else that is asked for waits longer */
constexpr int MOST_PAGES = 3;         /* the same of stages with a page of the cache, which are smaller */
constexpr int MOST_KEPT = 9;          /* chunks whose activations a warp keeps in registers: gpt-oss's output matrix has so many for each */
constexpr int SUMS = 11 * 16 * WARPS; /* floats for sums, at least, of which there is room for twice as many: a token's, of the units of phase up */
constexpr int MOST_CHOICES = 8;       /* of an expert that are multiplied at once where warps keep activations: more, and its weights are read again */
constexpr int SPLIT_PAGES = 4;        /* of a split, at least */

/* The consumers of a block wait for each other. */
__device__ inline void sync_consumers() { sync_threads(CONSUMERS); }
/* Gates, at which some warps wait, once a layer, until others have arrived. FREE: nobody reads the choice of experts any more, and all that consumers had to
 * write is written; ROUTED: what each token chose is known; CHOSEN: and which experts that makes. */
enum { FREE, ROUTED, CHOSEN, GATES };

/* ---- the shapes that the compiler may know ---- */

constexpr int FP4_ITEM = 48, BF16_ITEM = 48; /* chunks that are streamed as one item, at most: about 24 KB */

/* A Matrix of gpt-oss, its shape known to the compiler: chunks of a row; how many are multiplied at a time; how many times. */
struct Shaped : Matrix {
    int chunks, per, parts;
    __host__ __device__ int chunks_of(int part) const { return min_of(per, chunks - part * per); }
};
__host__ __device__ inline Shaped shaped(const Matrix &from, Type type, int rows, int cols) {
    Shaped m;
    const int columns = type == MXFP4 ? CHUNK : DENSE_COLUMNS, most = type == MXFP4 ? FP4_ITEM : BF16_ITEM, tall = type == MXFP4 ? TILE : GROUP;
    m.data = from.data, m.bias = from.bias, m.n = from.n, m.type = type, m.rows = rows, m.cols = cols;
    m.chunks = (cols + columns - 1) / columns;
    m.stride = m.chunks * columns;
    m.parts = (m.chunks + most - 1) / most;
    m.per = (m.chunks + m.parts - 1) / m.parts;
    m.bytes = type == MXFP4 ? (size_t)(rows + TILE - 1) / TILE * m.chunks * FP4_CHUNK : (size_t)(rows + GROUP - 1) / GROUP * GROUP * m.stride * 2;
    return m;
}
inline Shaped shaped(const Matrix &m) { return shaped(m, m.type, m.rows, m.cols); }

/* Whether a model has gpt-oss's types and shapes (20b and 120b), and a Work that the compiler knows has them. */
inline bool has_gpt_oss_shapes(const Model &m) {
    const Layer &l = m.layer[0];
    return l.q.type == BF16 && l.gate.type == MXFP4 && m.head.type == BF16 && m.dim == 2880 && m.ffn_dim == 2880 && m.vocab == 201088 && m.n_heads == 64 &&
           m.n_kv_heads == 8 && m.head_dim == 64 && m.top_k == 4 && l.router.rows && l.sinks && !l.q_norm && m.embed.type == BF16;
}
__device__ inline DecodeWork with_gpt_oss_shapes(DecodeWork w) {
    static_assert(2880 % CHUNK == 0, "act_pitch has no padding: who waits for values would wait for it");
    w.dim = w.ffn_dim = w.act_pitch = 2880, w.vocab = 201088;
    w.n_heads = 64, w.n_kv_heads = 8, w.head_dim = 64, w.attn_pitch = 4096;
    w.top_k = 4;
    return w;
}

/* ---- a block's shared memory ---- */

struct Layout { /* where each array begins, in bytes; the ring is what the others leave */
    int stages, stage_bytes;
    int ring, barriers, hold, gates, x, sums, square, scale, factor, bias, own, norm, columns, logit, weights, experts, turn, position, page, table;
    int active_expert, active_begin, active_order, active_cost, active_piece; /* see Active */
    unsigned room; /* of sums, in floats */
    int begun; /* what the barrier would have begun with before phase 0, perhaps less than 0 */
    int bytes; /* of all */
};

/* Elements between rows of activations in shared memory. */
template <Type T> __host__ __device__ constexpr int pitch_of(int stride) {
    int size = sizeof(typename Codec<T>::Activation);
    return bank_pitch(stride * size) / size;
}
template <Type T> __host__ __device__ int groups_of(int rows) { return (rows + Codec<T>::ROWS - 1) / Codec<T>::ROWS; }
__device__ inline int groups_of(const Matrix &m) { return m.type == MXFP4 ? groups_of<MXFP4>(m.rows) : groups_of<BF16>(m.rows); }

/* The experts that any token chose and the choices of each of them. A choice is token * top_k + k. */
struct Active {
    int *expert;     /* (n), of several tokens in ascending order */
    int *begin;      /* (n + 1) in order */
    int *order;      /* (tokens * top_k) choices, by expert and then by token */
    int *cost;       /* (n + 1) what a unit of each expert before this one costs, together: see cost_of() */
    int *piece;      /* (4) this block's units of phase up, and of phase down: from which to which */
    static int most(int n_experts, int top_k, int tokens) { return min_of(n_experts, top_k * tokens); }
};

/* What a unit of an expert with so many choices costs, and what it costs a block to begin with one: as much as two of the cheapest units. The prices follow
 * from how many instructions a unit takes where warps keep activations; others were no better (notebooks/speed.md). */
constexpr int VISIT = 4;
__host__ __device__ constexpr int cost_of(int choices) {
    int rest = choices % MOST_CHOICES;
    return choices / MOST_CHOICES * 3 + (rest > 4 ? 3 : rest ? 2 : 0);
}
static_assert(cost_of(9) * 3 <= 2 * 3 + 9 && cost_of(13) * 3 <= 2 * 3 + 13 && cost_of(5) * 3 <= 2 * 3 + 5, "layout_for() relies on 2 + choices / 3");

/* The layout for so many tokens in blocks that have `room` bytes; does not fit if it has more. blocks: of the grid. */
inline Layout layout_for(const DecodeWork &w, const DeviceModel &device, int tokens, int blocks, int room) {
    Layout k = {};
    const DeviceLayer &b = device.layer[0];
    int most = Active::most(w.n_experts, w.top_k, tokens), x = 0, sums = SUMS;
    /* of the units of one block, of n matrices and `more` units */
    auto rows_of = [&](const Matrix &m, int n, int more = 0) {
        int rows = m.type == MXFP4 ? TILE : GROUP, units = (m.rows + rows - 1) / rows * n + more;
        return (units + blocks - 1) / blocks * rows;
    };
    auto consider = [&](auto codec, const Matrix &m, bool normed) {
        typedef decltype(codec) C;
        int rows = tokens == 1 && normed; /* in shared memory */
        x = max_of(x, rows * pitch_of<C::TYPE>(m.stride) * (int)sizeof(typename C::Activation));
        sums = max_of(sums, WARPS * C::ROWS * (C::TYPE == MXFP4 ? min_of(tokens, MOST_CHOICES) : tokens));
        k.stage_bytes = max_of(k.stage_bytes, C::stage_bytes(shaped(m).per));
    };
    for (const Matrix *m : {&b.qkv, &b.o, &b.up, &b.down, &device.head}) {
        bool normed = m != &b.o && m != &b.down;
        m->type == MXFP4 ? consider(Codec<MXFP4>(), *m, normed) : consider(Codec<BF16>(), *m, normed);
    }
/* experts of the cheapest units that cost as much as all chosen ones, but for the visits, which cost as much as some more units */
    int costs = tokens == 1 ? most : most + (tokens * w.top_k + 5) / 6, visits = tokens == 1 ? 0 : most * VISIT / 2;
    int units_rows = max_of(max_of(rows_of(b.qkv, 1), rows_of(b.o, 1)), max_of(rows_of(b.up, costs, visits), rows_of(b.down, costs, visits)));
    auto take = [&](int &at, int bytes) { at = k.bytes, k.bytes += (bytes + 15) / 16 * 16; };
    take(k.square, WARPS * 4);
    take(k.scale, FEW * 4);
    take(k.factor, tokens * 4); /* as k.scale, of phase up */
    take(k.bias, units_rows * 4);
    take(k.own, rows_of(b.o, 1) * tokens * 4);
    take(k.norm, rows_of(b.o, 1) * 4);
    take(k.columns, rows_of(b.o, 1) * w.n_experts * 4);
    take(k.logit, tokens * w.n_experts * 2 * 4); /* and the biases to be added */
    take(k.weights, tokens * w.top_k * 4);
    take(k.experts, tokens * w.top_k * 4);
    take(k.active_expert, most * 4);
    take(k.active_begin, (most + 1) * 4);
    take(k.active_order, tokens * w.top_k * 4);
    take(k.active_cost, (most + 1) * 4);
    take(k.active_piece, 4 * 4);
    take(k.turn, tokens * w.head_dim / 2 * 8);
    take(k.position, tokens * 4);
    take(k.page, tokens * 4);
    take(k.table, tokens * 4);
    take(k.begun, 8);
    take(k.gates, GATES * sizeof(Barrier));
    take(k.hold, sizeof(Barrier));
    int attention = ATTENTION_WARPS * 8 * (w.head_dim + 2) * 4; /* states, from k.x on */
    int least = max_of(2 * 4 * sums, attention - x), barriers = MOST_STAGES * 2 * sizeof(Barrier);
    k.stages = max_of(1, min_of(MOST_STAGES, (room - k.bytes - barriers - x - least - 256) / k.stage_bytes));
    if (tokens > 8 && k.stages > 2) k.stages--; /* with so many sums, room for longer passes gives more */
    take(k.barriers, barriers);
    take(k.x, x);
    take(k.sums, max_of(least, (room - k.bytes - k.stages * k.stage_bytes - 128) / 16 * 16)); /* all that is left */
    k.room = (k.bytes - k.sums) / 4;
    k.bytes = (k.bytes + 127) / 128 * 128;
    take(k.ring, k.stages * k.stage_bytes);
    return k;
}

/* ---- streaming weights through a block ---- */

/* Where group `group` of a matrix begins. */
template <Type T> __device__ const uint8_t *group_at(const Matrix &m, int group) {
    return m.data + (size_t)group * Codec<T>::ROWS * Codec<T>::row_bytes(m.stride);
}

/* How many chunks a warp has of a row of so many, of which `most` make an item. */
constexpr int kept_of(int chunks, int most) {
    int parts = (chunks + most - 1) / most, per = (chunks + parts - 1) / parts;
    return parts * ((per + WARPS - 1) / WARPS);
}
static_assert(kept_of(4096 / DENSE_COLUMNS, BF16_ITEM) <= MOST_KEPT && kept_of(2880 / CHUNK, FP4_ITEM) <= MOST_KEPT, "gpt-oss's shapes");

/* What a warp keeps of the activations: by chunk and tile (TWINS: half). */
template <Type T, int TILES> using Kept = typename Codec<T>::template Lane<TILES>::Kept[MOST_KEPT][Codec<T>::template Lane<TILES>::N];

/* A block's way through the weights, item by item: an item is a unit, a group of rows, or a part of its columns. The producer fills stages one after
 * the other; the consumers empty them together, each warp its share of the columns. */
struct Ring {
    uint8_t *stage;        /* (stages) */
    Barrier *full, *empty; /* (stages) */
    Barrier *hold;         /* in an odd phase the producer asks for nothing: see expect() */
    int stages, stage_bytes, thread;
    int at = 0;          /* the stage of the next item */
    unsigned parity = 0; /* of that stage */
    int asked = 0;       /* items of the phase to come that the producer has asked for already */
    bool watched = false; /* thread 0 tells when its warp has done with the last item of this phase: see expect() */

    __device__ Ring(const Layout &k, uint8_t *memory)
        : stage(memory + k.ring), full((Barrier *)(memory + k.barriers)), empty(full + MOST_STAGES), hold((Barrier *)(memory + k.hold)), stages(k.stages),
          stage_bytes(k.stage_bytes), thread(threadIdx.x) {}
    /* As if the thread's number might be another one from here on: what follows from it is computed anew rather than kept in registers. READ: not even the
     * number itself, which is read again; that takes a while. */
    template <bool READ> __device__ void renew() {
        if (READ)
            asm volatile("mov.u32 %0,%%tid.x;" : "=r"(thread));
        else
            asm volatile("" : "+r"(thread));
        __builtin_assume(thread >= 0);
    }
    __device__ void advance() {
        if (++at < stages) return;
        at = 0, parity ^= 1;
        asm volatile(""); /* so that this is a branch: instructions of the units' loop are what counts */
    }
    /* The producer's part of a phase: locate(item, part) is where the unit's weights lie and which part of the columns is meant. */
    template <Type T, class Locate> __device__ void produce(const Shaped &m, int items, Locate locate) {
#pragma unroll 1
        for (int i = asked; i < items; i++) {
            int part;
            const uint8_t *group = locate(i, part);
            begin_stage(MOST_COPIES);
            Codec<T>::copy(full + at, stage + at * stage_bytes, m.per, group, m.stride, part * m.per, m.chunks_of(part), thread % 32);
            advance();
        }
        asked = 0;
    }
    __device__ void begin_stage(int most) {
        empty[at].wait(parity ^ 1); /* at once the first time round */
        fence_proxies();            /* the copy engine writes where others have read */
        hold->wait(1);
        int before = at - min(most, stages); /* has to be there */
        full[before < 0 ? before + stages : before].wait(before < 0 ? parity ^ 1 : parity);
    }
    /* The same for numbered pages last - 1 down to `first` of the cache of one head: its keys, and behind them its values. */
    __device__ void produce_pages(const DecodeWork &w, const int *table, int first, int last, int head) {
        int bytes = w.head_dim * PAGE * sizeof(bf16), number = 0;
        size_t values = (const uint8_t *)cache_of(w, 0, 1, 0) - (const uint8_t *)cache_of(w, 0, 0, 0); /* behind its keys */
#pragma unroll 1
        for (int i = 0; i < last - first; i++) {
            if (i % 32 == 0) number = table[max(last - 1 - i - thread % 32, first)];
            begin_stage(MOST_PAGES);
            int page = __shfl_sync(~0u, number, i % 32);
            full[at].copy(stage + at * stage_bytes, bytes, (const uint8_t *)cache_of(w, page, 0, head), values, 2, bytes, thread % 32);
            advance();
        }
    }
    /* A fence waits for every copy that is on the way to its multiprocessor, needed or not (1.9 us with two stages), and what is read meanwhile comes late.
     * So from when warp 0 has done with the last item that a phase has for the block, if any, until the consumers resume(), behind the fence, the producer asks
     * for no more. Behind a loop over items the consumers say whether it ended with that one. */
    __device__ void expect(bool any) {
        watched = any;
        if (thread < 32) passed(1);
    }
    __device__ void items_ended(bool last) { hold->arrive_if(last && watched && thread == 0); }
    __device__ void resume() {
        if (watched && thread < 32) passed(0);
        hold->arrive_if(watched && thread == 0);
        watched = false;
    }
    __device__ void passed(int parity) { /* waits for nothing, but synccheck wants that somebody waits for each phase */
        hold->wait(parity);
        __syncwarp();
    }
    /* The consumers' part, item by item: work(stage). Who has nothing to do waits too: to arrive at `empty` a round early would count for this one. */
    template <class Work> __device__ void consume(Work work) {
        full[at].wait(parity);
        work(stage + at * stage_bytes);
        full[at + MOST_STAGES].arrive(); /* empty[at], without an address of its own; each lane: one for all is no faster, and confuses racecheck */
        advance();
    }
    /* The same in the same order, of a matrix whose shape the compiler knows, for activations that this warp keeps. */
    template <Type T, int TILES> __device__ void keep(const Shaped &m, const Activations<typename Codec<T>::Activation> &x, Kept<T, TILES> &kept) const {
        typedef typename Codec<T>::template Lane<TILES> Lane;
        int turns = (m.per + WARPS - 1) / WARPS, me = thread % 32;
        uint32_t highest;
        do {
            highest = 0;
            if (x.told) asm volatile("" : "+r"(me)); /* so that no addresses are kept for another round */
            Lane lane(NULL, m.per, x, me);
#pragma unroll
            for (int k = 0; k < MOST_KEPT; k++) {
                int part = k / turns, i = thread / 32 + k % turns * WARPS;
                bool all = (k % turns + 1) * WARPS <= m.chunks_of(part); /* no branch then */
                if (part == m.parts) break;
#pragma unroll
                for (int j = 0; j < Lane::N; j++) {
                    kept[k][j] = {};
                    if (all || i < m.chunks_of(part)) lane.load(kept[k][j], part * m.per + i, j, x.told);
                }
            }
#pragma unroll
            for (int k = 0; k < MOST_KEPT && k < m.parts * turns && x.told; k++)
#pragma unroll
                for (int j = 0; j < Lane::N; j++) highest = Codec<T>::highest(highest, kept[k][j]);
        } while (x.told && __any_sync(~0u, unwritten_half(highest)) && rest());
    }
    /* `to` is where this lane's first sum belongs. */
    template <Type T, int TILES> __device__ void multiply_kept(const Shaped &m, const Kept<T, TILES> &kept, int tokens, float *to) {
        typename Codec<T>::template Sum<TILES> sum;
        int turns = (m.per + WARPS - 1) / WARPS;
#pragma unroll
        for (int part = 0; part < MOST_KEPT; part++) {
            if (part == m.parts) break;
            consume([&](const uint8_t *stage) {
                typename Codec<T>::template Lane<TILES> lane(stage, m.per, {NULL, 0, 1}, thread % 32);
#pragma unroll
                for (int k = 0; k < MOST_KEPT; k++) {
                    int i = thread / 32 + k * WARPS;
                    bool all = (k + 1) * WARPS <= m.chunks_of(part); /* no branch between chunks then */
                    if (k < turns && (all || i < m.chunks_of(part))) lane.add(sum, i, kept[part * turns + k]);
                }
            });
        }
        sum.reduce();
        sum.store(to, tokens, thread % 32);
    }
};

