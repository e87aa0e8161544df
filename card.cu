/* card.cu: opens and closes a card: chooses it, allocates its memory, loads the weights; lists the cards and measures
 * how fast they read; submits steps and collects results. infer.cu computes. */
#include "card.cuh"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>

bool cuda_failed(Error *e, cudaError_t error, const char *what) {
    cudaGetLastError();
    if (error == cudaErrorMemoryAllocation)
        return fail(e, NO_ROOM, "the GPU is out of memory; use a smaller --ctx, or free memory of other programs");
    return fail(e, GPU_FAULT, "the GPU failed: %s (error %d at %.60s)", cudaGetErrorString(error), (int)error, what);
}

/* cos and sin of every position and pair, in double precision: a float's product would be off by 0.01 at 131,072. */
static __global__ void fill_cos_sin(float2 *cos_sin, const float *inv_freq, int half, float scale) {
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        double s, c;
        sincos((double)blockIdx.x * (double)inv_freq[i], &s, &c);
        cos_sin[(size_t)blockIdx.x * half + i] = make_float2((float)(c * scale), (float)(s * scale));
    }
}

static bool choose_card(Gpu *g, Error *e) {
    const int gpu = g->limits.gpu;
    int cards;
    cudaError_t error = cudaGetDeviceCount(&cards);
    if (error || !cards)
        return fail(e, NO_GPU,
                    "no NVIDIA GPU can be used here (%s); infer runs on GPUs only, infer-reference is its plain C twin "
                    "for tests",
                    error ? cudaGetErrorString(error) : "none was found");
    if (gpu >= cards)
        return fail(e, NO_GPU, "there is no GPU %d here, only 0 to %d: choose with --gpu", gpu, cards - 1);
    if ((error = cudaSetDevice(gpu)))
        return fail(e, NO_GPU, "GPU %d cannot be used: %s", gpu, cudaGetErrorString(error));
    cudaDeviceProp card;
    cudaFuncAttributes code;
    CUDA(cudaGetDeviceProperties(&card, gpu));
    g->sms = card.multiProcessorCount / g->work.link.cards_on_gpu, g->shared = (int)card.sharedMemPerBlockOptin;
    if (!cudaFuncGetAttributes(&code, fill_cos_sin)) return g->launch_arch = code.ptxVersion, true;
    cudaGetLastError();
    return fail(
        e, NO_GPU,
        "this build has no code for GPU %d (%s, compute capability %d.%d): make clean && make CUDA_ARCH=sm_%d%d%s", gpu,
        card.name, card.major, card.minor, card.major, card.minor, card.major == 9 ? "a" : "");
}

static void cuda_describe(Devices *d) {
    *d = {};
    d->built = CUDA_ARCHES;
    cudaDriverGetVersion(&d->driver);
    cudaRuntimeGetVersion(&d->runtime);
    cudaError_t error = cudaGetDeviceCount(&d->gpus);
    d->gpus = error ? 0 : std::min<int>(d->gpus, MAX_GPUS);
    if (!d->gpus) snprintf(d->problem, sizeof d->problem, "%s", error ? cudaGetErrorString(error) : "none was found");
    for (int i = 0; i < d->gpus; i++) {
        cudaDeviceProp card;
        cudaFuncAttributes code;
        size_t free = 0, total = 0;
        auto &g = d->gpu[i];
        if (cudaSetDevice(i) || cudaGetDeviceProperties(&card, i)) continue;
        snprintf(g.name, sizeof g.name, "%.*s", (int)sizeof g.name - 1, card.name);
        g.major = card.major, g.minor = card.minor;
        g.usable = !cudaFuncGetAttributes(&code, fill_cos_sin) && !cudaMemGetInfo(&free, &total);
        g.free = free, g.total = total;
        cudaGetLastError();
    }
}

/* ---- how fast it reads ---- */

/* Reads n words of 16 bytes, with eight in flight in every thread. *never is never written, but the compiler cannot
 * know that. */
static __global__ void __launch_bounds__(512) read_words(const uint4 *words, size_t n, uint32_t *never) {
    size_t threads = (size_t)gridDim.x * blockDim.x, i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    uint32_t all = 0;
    for (; i < n; i += 8 * threads) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = i + k * threads < n ? __ldcs(words + i + k * threads) : make_uint4(0, 0, 0, 0);
        for (int k = 0; k < 8; k++) all |= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (all == 0x5EED5EED) *never = all;
}

static double cuda_flat_read(void *state, uint64_t bytes) {
    Gpu *gpu = (Gpu *)state;
    const int times = 9;
    uint64_t once = std::min<uint64_t>(bytes, gpu->weight_bytes) / 16 * 16;
    float ms[times];
    const Pending &p = gpu->pending[0]; /* no step needs its events now */
    if (!once) return 0;
    for (float &t : ms) {
        cudaEventRecord(p.begun, gpu->stream);
        read_words<<<gpu->sms * 4, 512, 0, gpu->stream>>>((const uint4 *)gpu->memory, once / 16,
                                                          (uint32_t *)gpu->work.drawn);
        cudaEventRecord(p.done, gpu->stream);
        t = cudaEventSynchronize(p.done) || cudaEventElapsedTime(&t, p.begun, p.done) ? 0 : t;
    }
    std::sort(ms, ms + times);
    return ms[times / 2] / 1e3 * ((double)bytes / once);
}

/* ---- loading the weights ---- */

/* The type on the card for a Linear. If rows become columns (as in Rows), there are no codes. */
static Type card_type(const Linear &w, bool columns) {
    if (columns) return w.type == F16 ? F16 : BF16;
    return w.type < FIRST_ROOM_TYPE ? types[w.type].card : coded_type(w);
}
/* One type for Linears that share a Matrix. */
static Type common_type(Type a, Type b) {
    if (a == b) return a;
    if (is_coded(a) && is_coded(b)) return common_code(a, b);
    return a == F32 || b == F32 ? F32 : BF16;
}

/* A part of one matrix of a Linear. `from` lies on the card and counts rows and columns of the whole matrix. */
struct Source {
    Linear linear;
    Stored from;
    int row, rows, column, columns; /* what is here */
    int matrix;                     /* which of the Matrix's */
};

#ifndef GAP_BYTES
#define GAP_BYTES ((size_t)4 << 10) /* so many that are not needed are not read; tests skip fewer */
#endif
#ifndef PIECE_BYTES /* read at once of so many; tests take fewer, so that small matrices come in pieces too */
#define PIECE_BYTES(bytes) ((size_t)16 << 20)
#endif

/* A model being loaded: several threads read pieces into pinned buffers (a mapped file would fault page by page), while
 * kernels place earlier pieces. */
struct Upload {
    struct Job {
        Linear linear;
        Matrix to;
        Rows place;
        std::string name;
    };
    struct Piece { /* n lines of a matrix */
        int job, matrix, line, n;
    };
    static constexpr int READERS = 6, BUFFERS = 2;
    const Gpu *gpu;
    std::vector<Job> job;
    std::vector<Piece> piece;
    std::atomic<size_t> next{0};
    std::mutex lock; /* of done, progress() and run()'s error */
    uint64_t done = 0, total = 0;
    void (*const progress)(uint64_t, uint64_t) = gpu->limits.progress;
    int *bad = (int *)gpu->work.logits; /* (jobs) no step needs them yet */

    void add(const Linear &w, const Matrix &to, Rows place, int layer, const char *name);
    size_t stage(const Piece &p, uint8_t *host, uint8_t *card, Source *s, Error *e) const;
    bool read(Error *e);
    bool run(Error *e);
};

/* Gives every weight its place on the card. Without `upload` it only counts bytes; with it, it also copies arrays of
 * floats and lists the Linears to read. */
struct Walk {
    struct Part { /* a Linear in a Matrix; half and columns as in Rows */
        const Linear &from;
        const char *name;
        int half = 0;
        bool columns = false;
        Type type = card_type(from, columns);
    };
    Gpu *gpu;
    Upload *upload = NULL;
    Plan plan = {gpu->memory, 0};
    int layer = -1; /* its number, or -1 for embedding and head */
    cudaError_t error = cudaSuccess;

    float *put(const std::vector<float> &values) {
        float *to = plan.take<float>(values.size());
        const size_t bytes = values.size() * sizeof(float);
        if (upload && !error) error = cudaMemcpy(to, values.data(), bytes, cudaMemcpyHostToDevice);
        return to;
    }
    float *floats(const float *from, size_t n, int half = 0) { /* (n), or NULL */
        const Rows place = {0, 1, half};
        std::vector<float> dealt(from ? n : 0);
        for (size_t i = 0; i < dealt.size(); i++) dealt[place.of(i)] = from[i];
        return from ? put(dealt) : NULL;
    }
    Matrix matrix(std::initializer_list<Part> parts, int step = 1);
    cudaError_t all();
};

#define LOADS
#include "extensions.cuh"

/* ---- kernels that place them ---- */

/* One thread packs four columns of a row. A NaN sets *bad. */
static __global__ void place_weights(Source s, Matrix m, Rows rows, int *bad) {
    const int each = (s.columns + 3) / 4;
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    const int row = s.row + (int)(i / each), c = s.column + (int)(i % each) * 4, to = rows.of(row);
    if (row >= s.row + s.rows) return;
    uint8_t *matrix = m.data + s.matrix * m.bytes;
    Weight w[4] = {};
    for (int k = 0; k < 4 && c + k < s.column + s.columns; k++) {
        w[k] = weight_at(card_types, &s.linear, &s.from, row, c + k);
        const float value = w[k].a * (w[k].q - w[k].zero) + w[k].b;
        const size_t place = rows.columns ? (size_t)(c + k) * m.stride + to : (size_t)to * m.stride + c + k;
        if (isnan(value)) *bad = 1;
        if (m.type == BF16) ((bf16 *)matrix)[place] = (bf16)value;
        if (m.type == F16) ((f16 *)matrix)[place] = (f16)value;
        if (m.type == F32) ((float *)matrix)[place] = value;
    }
    if (is_coded(m.type)) place_codes(s, m, row, to, c, w);
}
/* Packs sixteen e2m1 values: see FP4_MASK. */
static __device__ void fp4_pack(const uint8_t (&nibble)[16], uint32_t (&word)[2]) {
    uint32_t rest = 0;
    word[0] = word[1] = 0;
    for (int i = 0; i < 16; i++) {
        uint32_t value = (nibble[i] >> 3 << 15 | (nibble[i] & 7) << 6) << i % 2 * 16;
        switch (i / 2 % 4) {
        case 0: word[i / 8] |= value; break;
        case 1: word[i / 8] |= __funnelshift_l(value, value, 6); break;
        case 2: word[i / 8] |= value >> 4; break;
        default: rest |= i / 8 ? value >> 6 : __funnelshift_l(value, value, 4);
        }
    }
    for (uint32_t bit = 1; bit; bit <<= 1) { /* from the lowest on, because the sum carries */
        uint32_t wrong = (word[0] + 4 * word[1] ^ rest) & bit;
        if (bit & FP4_REST) word[0] |= wrong;
        if (bit & FP4_REST << 2) word[1] |= wrong >> 2;
    }
}
/* The same for MXFP4. One thread packs a block of 32 columns. */
static __global__ void place_fp4(Source s, Matrix m, Rows rows, int *bad) {
    const int each = s.columns / 32, i = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = s.row + i / each, b = i % each, to = rows.of(row), g = to % 8, high = to / 8 % 2;
    if (row >= s.row + s.rows) return;
    const int bytes = card_types[s.linear.type].bytes;
    const bool whole = bytes == 17; /* a block begins with its scale, and weights i and i + 16 share a byte */
    const uint8_t *block = s.from.data.data + row * s.from.data.stride + b * bytes;
    const uint8_t scale = whole ? *block++ : s.from.scale.data[row * s.from.scale.stride + b];
    uint8_t *chunk = m.chunk(s.matrix, to, b * 32, FP4_CHUNK);
    if (scale > MAX_FP4_SCALE) *bad = 1; /* 255 is NaN */
    chunk[512 + g * 4 + high * 2 + b % 2] = scale + FP4_SCALE;
    for (int half = 0; half < 2; half++) {
        uint8_t nibble[16];
        uint32_t word[2];
        for (int k = 0; k < 16; k++) nibble[k] = whole ? block[k] >> half * 4 & 15 : nibble_at(block, half * 16 + k);
        fp4_pack(nibble, word);
        *(uint2 *)(chunk + (g * 4 + b % 2 * 2 + half) * 16 + high * 8) = make_uint2(word[0], word[1]);
    }
}

/* ---- reading them ---- */

/* Columns of a line that crosses all rows; 0: a line is a row. */
static int line_columns(const Linear &w) { return w.each->data.step ? 1 : types[w.type].columns; }

void Upload::add(const Linear &w, const Matrix &to, Rows place, int layer, const char *name) {
    const View &data = w.each->data;
    const int columns = line_columns(w);
    int n = std::max<size_t>(1, PIECE_BYTES(data.stride * data.lines) / std::max<size_t>(1, data.stride));
    if (columns) n = std::max(1, n * columns / CHUNK) * CHUNK / columns; /* whole chunks */
    for (int i = 0; i < w.n; i++)
        for (int line = 0; line < data.lines; line += n)
            piece.push_back({(int)job.size(), i, line, std::min(n, data.lines - line)});
    job.push_back({w, to, place, layer < 0 ? name : "layer " + std::to_string(layer) + ", " + name});
    total += (uint64_t)w.n * data.lines * data.bytes;
}

/* Reads a piece of a matrix, and what it needs of the grids, to `host`. Sets *s to where they lie after the copy to
 * `card`. Returns the number of bytes, or 0 after an error. With host NULL it reads nothing and only counts. */
size_t Upload::stage(const Piece &p, uint8_t *host, uint8_t *card, Source *s, Error *e) const {
    const Job &j = job[p.job];
    const Linear &w = j.linear;
    const char *name = j.name.c_str();
    const int columns = line_columns(w);
    Plan plan = {host, 0};
    bool ok = true;
    auto read = [&](const View *view, size_t from, uint8_t *to, size_t bytes) {
        for (size_t have = 0; to && ok && have < bytes;) {
            ssize_t got = pread(view->fd, to + have, bytes - have, (off_t)(view->offset + from + have));
            if (got > 0)
                have += (size_t)got;
            else
                ok = fail(e, BAD_MODEL, "a model file ended while it was read (%s); download it again", name);
        }
    };
    /* Takes lines of a view, with what lies between them unless that is much, as between the columns of one of several
     * cards. From now on the view lies on the card. */
    auto take = [&](View *view, size_t first, size_t lines) {
        const size_t last = view->step ? (w.rows - 1) * view->step + types[w.type].bytes : view->bytes;
        const size_t from = first * view->stride, pitch = view->stride;
        if (pitch >= last + GAP_BYTES) view->stride = last;
        const size_t bytes = (lines - 1) * view->stride + last;
        view->data = card + plan.used - first * view->stride;
        uint8_t *to = plan.take<uint8_t>(bytes);
        if (view->stride == pitch) return read(view, from, to, bytes);
        for (size_t i = 0; i < lines; i++) read(view, from + i * pitch, to ? to + i * last : NULL, last);
    };
    auto take_grid = [&](const Grid &g, View *view) {
        size_t first = 0, lines = view->lines; /* all are needed, unless they run along the lines of the matrix */
        const int from = columns ? s->column : s->row, n = columns ? s->columns : s->rows;
        const int each = columns ? g.cols : g.rows;
        if (each && (columns ? !s->from.group : !types[g.type].columns && !g.transposed))
            first = from / each, lines = (from + n - 1) / each - first + 1;
        if (each) take(view, first, lines);
    };
    *s = {w, j.linear.each[p.matrix], p.line, p.n, 0, w.cols, p.matrix};
    if (columns) s->row = 0, s->rows = w.rows, s->column = columns * p.line;
    if (columns) s->columns = std::min(columns * p.n, w.cols - s->column);
    take(&s->from.data, p.line, p.n);
    take_grid(w.scale, &s->from.scale);
    take_grid(w.zero, &s->from.zero);
    if (const int *group = s->from.group) {
        s->from.group = (const int *)(card + plan.used);
        int *to = plan.take<int>(w.cols);
        if (host) memcpy(to, group, w.cols * sizeof(int));
    }
    return ok ? plan.used : 0;
}

/* A reading thread: takes piece after piece, through buffers of its own. */
bool Upload::read(Error *e) {
    struct Buffer {
        uint8_t *host = NULL, *card = NULL;
        cudaStream_t stream = NULL;
        ~Buffer() {
            if (stream) cudaStreamSynchronize(stream), cudaStreamDestroy(stream);
            cudaFreeHost(host);
            cudaFree(card);
        }
    } buffer[BUFFERS];
    size_t room = 0;
    Source s;
    for (const Piece &p : piece) room = std::max(room, stage(p, NULL, NULL, &s, e));
    CUDA(cudaSetDevice(gpu->limits.gpu));
    for (Buffer &b : buffer) {
        CUDA(cudaMallocHost(&b.host, room));
        CUDA(cudaMalloc(&b.card, room));
        CUDA(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    }
    for (int turn = 0;; turn++) {
        const size_t i = next++;
        if (i >= piece.size()) break;
        const Piece &p = piece[i];
        const Job &j = job[p.job];
        const bool fp4 = j.to.type == MXFP4;
        Buffer &b = buffer[turn % BUFFERS];
        CUDA(cudaStreamSynchronize(b.stream));
        const size_t bytes = stage(p, b.host, b.card, &s, e);
        if (!bytes) return false;
        const size_t blocks = ((size_t)s.rows * (fp4 ? s.columns / 32 : (s.columns + 3) / 4) + 255) / 256;
        CUDA(cudaMemcpyAsync(b.card, b.host, bytes, cudaMemcpyHostToDevice, b.stream));
        (fp4 ? place_fp4 : place_weights)<<<(unsigned)blocks, 256, 0, b.stream>>>(s, j.to, j.place, bad + p.job);
        CUDA(cudaGetLastError());
        std::lock_guard<std::mutex> hold(lock);
        done += p.n * j.linear.each[p.matrix].data.bytes;
        if (progress && done < total) progress(done, total);
    }
    for (Buffer &b : buffer) CUDA(cudaStreamSynchronize(b.stream));
    return true;
}

bool Upload::run(Error *e) {
    std::vector<std::thread> readers;
    std::vector<int> found(job.size());
    const size_t bytes = found.size() * sizeof(int);
    bool ok = true;
    CUDA(cudaMemset(bad, 0, bytes));
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < READERS; i++)
        readers.emplace_back([&] {
            Error mine;
            if (read(&mine)) return;
            std::lock_guard<std::mutex> hold(lock);
            if (ok) *e = mine;
            ok = false, next = piece.size(); /* the others stop */
        });
    for (std::thread &t : readers) t.join();
    if (!ok) return false;
    CUDA(cudaMemcpy(found.data(), bad, bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < found.size(); i++)
        if (found[i])
            return fail(e, BAD_MODEL, "a weight is not a number (%s): the file is damaged; download it again",
                        job[i].name.c_str());
    if (progress) progress(total, total);
    return true;
}

/* ---- the walk over all weights ---- */

/* A Matrix of the parts that the model has: one below the other or, with step 2, the rows of two in turn. */
Matrix Walk::matrix(std::initializer_list<Part> parts, int step) {
    Matrix to = {};
    bool biased = false;
    for (const Part &p : parts) {
        if (!p.from.rows) continue;
        to.type = to.rows ? common_type(to.type, p.type) : p.type;
        to.rows += p.columns ? p.from.cols : p.from.rows;
        to.cols = p.columns ? p.from.rows : p.from.cols;
        to.n = p.from.n;
        biased |= p.from.each->bias != NULL;
    }
    if (!to.rows) return to;
    const size_t chunk = to.type == MXFP4    ? FP4_CHUNK
                         : is_coded(to.type) ? coded_chunk(to.type)
                                             : TILE * CHUNK * (to.type == F32 ? 4 : 2);
    to.stride = (to.cols + CHUNK - 1) / CHUNK * CHUNK;
    to.bytes = chunk * to.tiles() * (to.stride / CHUNK);
    to.data = plan.take<uint8_t>(to.bytes * to.n);
    if (layer >= 0) gpu->lean &= to.type != F32;
    std::vector<float> bias(biased ? (size_t)to.n * to.rows : 0); /* zeros for a part without one */
    int first = 0;
    for (const Part &p : parts) {
        const Linear &w = p.from;
        const Rows place = {first, step, p.half, p.columns};
        if (upload && w.rows) upload->add(w, to, place, layer, p.name);
        for (int i = 0; w.rows && w.each->bias && i < w.n; i++)
            for (int r = 0; r < w.rows; r++) bias[(size_t)i * to.rows + place.of(r)] = w.each[i].bias[r];
        first += step == 2 ? 1 : w.rows;
    }
    if (biased) to.bias = put(bias);
    return to;
}

cudaError_t Walk::all() {
    const Model &m = gpu->model;
    DeviceModel *device = &gpu->device;
    const int half = m.neighbours ? 0 : m.head_dim / 2;
    gpu->lean = true;
    device->layer.resize(m.n_layers);
    for (layer = 0; layer < m.n_layers; layer++) {
        const Layer &l = m.layer[layer];
        DeviceLayer *d = &device->layer[layer];
        d->window = l.window, d->cos_sin = gpu->work.cos_sin[l.rope - m.rope];
        d->attn_norm = floats(l.attn_norm, m.dim);
        d->attn_post_norm = floats(l.attn_post_norm, m.dim);
        d->ffn_norm = floats(l.ffn_norm, m.dim);
        d->ffn_post_norm = floats(l.ffn_post_norm, m.dim);
        d->q_norm = floats(l.q_norm, m.head_dim, half);
        d->k_norm = floats(l.k_norm, m.head_dim, half);
        d->sinks = floats(l.sinks, m.n_heads);
        if (m.kv_rank)
            load_latent(this, l, d);
        else
            d->qkv = matrix({{l.q, "query", half}, {l.k, "key", half}, {l.v, "value"}});
        d->o = matrix({{l.o, "attention output"}});
        d->router = matrix({{l.router, "router"}});
        d->choice_bias = floats(l.choice_bias, m.n_experts);
        d->up = matrix({{l.gate, "gate"}, {l.up, "up"}}, 2);
        d->down = matrix({{l.down, "down"}});
        Part gate = {l.shared_gate, "shared gate"}, up = {l.shared_up, "shared up"};
        const Type plain = d->up.type == F16 ? F16 : BF16; /* the type of x, which all experts read */
        for (Part *p : {&gate, &up})
            if (p->type == F32 || (p->type == F16) != (plain == F16)) p->type = plain;
        d->shared_up = matrix({gate, up}, 2);
        d->shared_down = matrix({{l.shared_down, "shared down"}});
    }
    layer = -1;
    device->norm = floats(m.norm, m.dim);
    Part embed = {m.embed, "embedding"};
    if (embed.type == MXFP4 || (is_coded(embed.type) && !reads_one(embed.type)))
        embed.type = BF16; /* see weight_of() */
    device->embed = matrix({embed});
    device->head = m.head.each == m.embed.each ? device->embed : matrix({{m.head, "head"}});
    gpu->lean &= device->head.type != F32;
    gpu->weight_bytes = plan.used;
    return error;
}

/* Loads all weights. BAD_MODEL, with the name, if a file shrank or a weight is NaN. */
static bool load_model(Gpu *gpu, Error *e) {
    Upload upload = {gpu};
    CUDA((Walk{gpu, &upload}.all()));
    return upload.run(e);
}

/* ---- opening ---- */

Step step_at(uint8_t *base, int tokens) {
    Step s;
    s.how = (Sampling *)base;
    s.token = (int4 *)(s.how + tokens);
    int *at = (int *)(s.token + tokens);
    for (int **array : {&s.seq, &s.position, &s.slot, &s.last, &s.row, &s.query}) *array = at, at += tokens;
    s.tile = at, at += 2 * tokens;
    s.header = at, at += 4;
    s.page = at;
    return s;
}

/* Lays out the buffers of a step from `base` on and returns their size; base NULL only counts. */
static size_t plan_work(Gpu *gpu, uint8_t *base) {
    const Model &m = gpu->model;
    Work &w = gpu->work;
    Plan p = {base, 0};
    const size_t T = gpu->limits.max_tokens, choices = T * m.top_k, rows = gpu->logit_rows;
    /* Contexts that several blocks may share, and those blocks: see fill_step(). */
    const size_t few = MAX_DECODE * m.n_kv_heads * head_parts(m.n_heads / m.n_kv_heads), many = 4 * gpu->sms;
    size_t contexts = std::max(few, many), partial = std::max(few * MAX_SPLITS, many) * 8 * (m.head_dim + 2);
    size_t widest = 0;
    bool router = false, post = m.layer[0].attn_post_norm != NULL;
    auto round = [](int n) { return (n + CHUNK - 1) / CHUNK * CHUNK; };
    w.normed_pitch = round(m.dim), w.act_pitch = round(m.ffn_dim);
    /* Latent attention writes w.attn head by head: rows have no padding. What a product reads past a row is finite. */
    w.attn_pitch = m.kv_rank ? m.n_heads * m.v_dim : round(m.n_heads * m.v_dim);
    for (const DeviceLayer &l : gpu->device.layer) {
        router |= l.router.rows > 0;
        for (int rows : {l.qkv.rows, l.q.rows, l.router.rows ? 0 : l.up.rows, l.shared_up.rows})
            widest = std::max<size_t>(widest, rows);
        w.act_pitch = std::max(w.act_pitch, l.shared_down.stride);
    }
    const size_t element = gpu->lean ? 2 : 4;
    for (int i = 0; i < 2; i++)
        w.cos_sin[i] = p.take<float2>(m.rope[i].inv_freq ? (size_t)gpu->limits.context * (m.rope_dim / 2) : 0);
    w.x = p.take<float>(T * m.dim);
    w.normed = p.take<uint8_t>(T * w.normed_pitch * 2);
    w.normed_f32 = p.take<float>(gpu->lean ? 0 : T * w.normed_pitch);
    w.projected = p.take<float>(T * widest);
    const size_t heads_of = T * m.n_heads; /* pairs of token and head */
    w.q = p.take<uint8_t>(heads_of * (m.kv_rank ? cache_row(w) : m.head_dim) * element);
    if (m.kv_rank) plan_latent(gpu, &p, &contexts, &partial);
    w.attn = p.take<uint8_t>((T * w.attn_pitch + CHUNK) * element);
    w.act_out = p.take<uint8_t>(choices * w.act_pitch * element);
    w.down = p.take<float>(router ? choices * m.dim : post || w.link.cards > 1 ? T * m.dim : 0);
    w.shared = router && m.layer[m.n_layers - 1].shared_down.rows && w.link.cards > 1 ? p.take<float>(T * m.dim) : NULL;
    w.router = p.take<float>(router ? T * m.n_experts : 0);
    w.expert = p.take<int>(choices);
    w.weight = p.take<float>(choices);
    w.order = p.take<int>(choices);
    w.job = p.take<Job>(m.n_experts + choices / 8 + 1);
    w.jobs = p.take<int>(1);
    w.routed = p.take<int>(1);
    w.experts_read = p.take<unsigned long long>(1);
    w.partial = p.take<float>(partial);
    w.attended = p.take<int>(contexts);
    w.logits = p.take<float>(rows * m.vocab);
    gpus::plan(gpu, &p);
    w.floor = p.take<float>(rows);
    w.best = p.take<unsigned long long>(rows);
    w.drawing = p.take<int>(rows);
    w.bias = p.take<Bias>(w.slots * MOST_BIASES);
    w.count = p.take<uint32_t>((size_t)w.slots * m.vocab);
    w.drawn = p.take<int>(w.slots);
    gpu->step_bytes = (size_t)step_at(NULL, (int)T).page + (size_t)gpu->limits.max_seqs * gpu->max_pages * sizeof(int);
    gpu->step = p.take<uint8_t>(gpu->step_bytes);
    if (gpu->fast) fast::plan(gpu, &p);
    return p.used;
}

/* Allocates all memory: weights, work space, and as many of *pages as fit. */
static bool take_memory(Gpu *gpu, int *pages, Error *e) {
    const size_t page = page_size(gpu->work) * sizeof(bf16) + PAGE * sizeof(int);
    const size_t reserve = 448 << 20; /* for CUDA, cuBLAS and an Upload's buffers: 192 MB and the grids in them */
    size_t free, total;
    gpu->max_pages = (gpu->limits.context + PAGE - 1) / PAGE;
    gpu->logit_rows = std::max(64, std::min(256, gpu->limits.max_seqs));
    Walk{gpu}.all(); /* counts */
    const size_t weights = gpu->weight_bytes, work = plan_work(gpu, NULL);
    CUDA(cudaMemGetInfo(&free, &total));
    if (free < weights + work + reserve + page) {
        char a[24], b[24], d[24];
        return fail(e, NO_ROOM,
                    "the model needs %s for its weights and %s to work, GPU %d has %s free: free memory of other "
                    "programs, or choose another GPU with --gpu",
                    size_text(weights, a), size_text(work + reserve, b), gpu->limits.gpu, size_text(free, d));
    }
    *pages = (int)std::min<size_t>(*pages, (free - weights - work - reserve) / page);
    CUDA(cudaMalloc(&gpu->memory, weights + work + *pages * page));
    CUDA(cudaMemset(gpu->memory, 0, weights + work + *pages * page));
    plan_work(gpu, gpu->memory + weights);
    gpu->work.cache = (bf16 *)(gpu->memory + weights + work);
    gpu->work.page_token = (int *)(gpu->work.cache + *pages * page_size(gpu->work));
    if (gpu->limits.where) {
        char used[24], all[24];
        CUDA(cudaMemGetInfo(&free, &total));
        snprintf(gpu->limits.where, 64, "GPU %d (%s of %s)", gpu->limits.gpu, size_text(total - free, used),
                 size_text(total, all));
    }
    return true;
}

/* Checks what the kernels rely on. */
static bool check_model(const Model &m, Error *e) {
    if (m.top_k > 32)
        return fail(e, BAD_MODEL, "%d experts a token are more than the 32 that a warp can choose", m.top_k);
    if (m.route.groups > 32)
        return fail(e, BAD_MODEL, "%d groups of experts are more than the 32 that a warp can choose", m.route.groups);
    if (!m.kv_rank && m.n_heads / m.n_kv_heads > 64) /* rows of attention_tiled with heads of 256 */
        return fail(e, BAD_MODEL, "%d query heads for each key/value head are more than 64", m.n_heads / m.n_kv_heads);
    if (m.dim > MAX_DIM) return fail(e, BAD_MODEL, "a hidden size of %d is more than %d", m.dim, MAX_DIM);
    if (m.kv_rank && !check_latent(m, e)) return false;
    if (!m.kv_rank && m.v_dim != m.head_dim)
        return fail(e, BAD_MODEL, "heads of %d and %d are not implemented", m.head_dim, m.v_dim);
    if (m.dim % 4) return fail(e, BAD_MODEL, "a hidden size of %d is not a multiple of 4", m.dim);
    for (int i = 0; i < m.n_layers; i++) {
        const Layer &l = m.layer[i];
        if (l.gate.rows % 2 || l.shared_gate.rows % 2)
            return fail(e, BAD_MODEL, "layer %d: an odd intermediate size is not implemented", i);
        if (l.router.rows && (l.gate.type == F32 || l.up.type == F32 || l.down.type == F32))
            return fail(e, BAD_MODEL, "layer %d: experts in F32 are not implemented", i);
        for (const Linear *w : {&l.o, &l.down, &l.shared_down}) { /* padding of x holds what other layers left there */
            const Linear &first = w == &l.o ? m.layer[0].o : m.layer[0].down;
            if (w->cols % CHUNK && (w->type == F32) != (first.type == F32))
                return fail(e, BAD_MODEL, "layer %d: rows of %d in F32 in some layers only are not implemented", i,
                            w->cols);
        }
    }
    return true;
}

static bool open_gpu(Gpu *gpu, int *pages, Error *e) {
    const Model &m = gpu->model;
    Work &w = gpu->work;
    if (!choose_card(gpu, e) || !check_model(m, e)) return false;
    w.dim = m.dim, w.ffn_dim = m.ffn_dim, w.vocab = m.vocab, w.n_layers = m.n_layers;
    w.n_heads = m.n_heads, w.n_kv_heads = m.n_kv_heads, w.head_dim = m.head_dim;
    w.v_dim = m.v_dim, w.rope_dim = m.rope_dim, w.kv_rank = m.kv_rank;
    w.n_experts = m.n_experts, w.top_k = m.top_k, w.eps = m.eps, w.act = m.act, w.act_limit = m.act_limit;
    w.embed_scale = m.embed_scale, w.attn_scale = m.attn_scale, w.attn_cap = m.attn_cap, w.logit_cap = m.logit_cap;
    w.route = m.route, w.first_id = 0, w.ids = m.vocab;
    w.slots = gpu->limits.max_seqs;
    if (!fast::open(gpu, e) || !take_memory(gpu, pages, e)) return false;
    CUDA(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    CUDA(cudaMallocHost(&w.result, (3 * w.slots + 1) * sizeof(int)));
    w.late = w.result + 3 * w.slots, *w.late = 0;
    gpu->bias.resize(w.slots * MOST_BIASES);
    if (gpu->limits.allowed) {
        const size_t words = (m.vocab + 31) / 32;
        CUDA(cudaMallocHost(&w.allowed.ready, w.slots * sizeof(uint64_t)));
        CUDA(cudaMallocHost(&w.allowed.bits, w.slots * words * sizeof(uint32_t)));
        std::fill_n(w.allowed.ready, w.slots, 0);
        *gpu->limits.allowed = w.allowed;
    }
    for (Pending &p : gpu->pending) {
        p.token = w.result + (&p - gpu->pending) * w.slots;
        CUDA(cudaMallocHost(&p.staged, gpu->step_bytes + gpu->bias.size() * sizeof(Bias)));
        CUDA(cudaEventCreate(&p.begun));
        CUDA(cudaEventCreate(&p.done));
    }
    float *inv_freq = gpu->work.logits; /* no step needs them yet */
    for (int i = 0; i < 2 && m.rope[i].inv_freq; i++) {
        CUDA(cudaMemcpy(inv_freq, m.rope[i].inv_freq, m.rope_dim / 2 * sizeof(float), cudaMemcpyHostToDevice));
        fill_cos_sin<<<gpu->limits.context, 32>>>((float2 *)w.cos_sin[i], inv_freq, m.rope_dim / 2, m.rope[i].scale);
        CUDA(cudaDeviceSynchronize());
    }
    return true;
}

static void cuda_close(void *state) {
    Gpu *gpu = (Gpu *)state;
    if (gpu->stream) cudaStreamSynchronize(gpu->stream);
    for (auto &made : gpu->graph) cudaGraphExecDestroy(made.second);
    for (Pending &p : gpu->pending) {
        cudaFreeHost(p.staged);
        cudaFreeHost(p.logits);
        if (p.begun) cudaEventDestroy(p.begun);
        if (p.done) cudaEventDestroy(p.done);
    }
    cudaFreeHost(gpu->work.result);
    cudaFreeHost(gpu->work.allowed.ready);
    cudaFreeHost(gpu->work.allowed.bits);
    if (gpu->stream) cudaStreamDestroy(gpu->stream);
    cudaFree(gpu->memory);
    if (gpu->fast) fast::close(gpu);
    delete gpu;
}

Gpu *open_card(const Model *m, const Limits *limits, const Link *link, int first_id, int *pages, Error *e) {
    Gpu *gpu = new Gpu{*m, *limits};
    gpu->limits.max_tokens = std::max(MAX_DECODE, limits->max_tokens);
    gpu->work.link = *link, gpu->device.first_id = first_id;
    if (open_gpu(gpu, pages, e)) return gpu;
    cuda_close(gpu);
    return NULL;
}
bool prepare_card(Gpu *gpu, Error *e) { return load_model(gpu, e) && (!gpu->fast || fast::prepare(gpu, e)); }

static void *cuda_open(const Model *m, const Limits *limits, int *pages, Error *e) {
    const Link alone = {1, 0, false, 1};
    if (limits->gpus) return fail(e, USAGE, "--gpus: this build runs on one GPU"), nullptr;
    Gpu *gpu = open_card(m, limits, &alone, 0, pages, e);
    if (!gpu || prepare_card(gpu, e)) return gpu;
    cuda_close(gpu);
    return NULL;
}

/* ---- the border ---- */

/* Fills a Step from a Batch, and in the Pass what the host has to know. */
void fill_step(const Step &s, Pass *a) {
    const Batch *b = a->batch;
    const int tile = tile_tokens(a);
    s.header[0] = b->max_pages;
    s.header[1] = a->gpu->turn % 3;
    memcpy(s.slot, b->slot, b->seqs * sizeof(int));
    memcpy(s.how, b->sampling, b->seqs * sizeof(Sampling));
    memcpy(s.page, b->page, (size_t)b->seqs * b->max_pages * sizeof(int));
    a->alone = b->seqs == a->tokens;
    for (int i = 0; i < b->seqs; i++) {
        const int n = b->first[i + 1] - b->first[i];
        const Sampling &how = b->sampling[i];
        a->adjusted |= how.penalty != 1 || how.frequency != 0 || how.presence != 0 || how.biases || how.allowed;
        a->filtered |= how.temperature > 0 && (how.top_k > 0 || how.top_p < 1 || how.min_p > 0);
        s.last[i] = b->want[i] == WANT_NOTHING ? -1 : b->first[i + 1] - 1;
        for (int t = b->first[i]; t < b->first[i + 1]; t++) {
            const int p = b->start[i] + t - b->first[i], page = b->page[(size_t)i * b->max_pages + p / PAGE];
            s.token[t] = make_int4(b->token[t], b->slot[i], page * PAGE + p % PAGE, 0);
            s.seq[t] = i;
            s.position[t] = p;
            if (b->want[i] == WANT_ALL_LOGITS || t == s.last[i]) s.row[a->rows++] = t;
            a->pages = std::max(a->pages, p / PAGE + 1);
            if (n == 1 || a->tokens <= MAX_DECODE || !tile)
                s.query[a->queries++] = t;
            else if ((t - b->first[i]) % tile == 0)
                s.tile[2 * a->tiles] = t, s.tile[2 * a->tiles++ + 1] = std::min(tile, b->first[i + 1] - t);
        }
    }
    while (a->pages & (a->pages - 1)) a->pages++; /* to powers of two, so that there are few graphs */
    /* Up to MAX_DECODE the number of tokens does not change the splits, so a token's bits are the same alone or not. */
    const Work &w = a->w;
    const int blocks = w.kv_rank ? a->tokens * latent_parts(w.n_heads)
                                 : std::max(1, a->queries) * w.n_kv_heads * head_parts(w.n_heads / w.n_kv_heads);
    a->splits = a->tokens <= MAX_DECODE ? MAX_SPLITS : std::max(1, std::min(MAX_SPLITS, 4 * a->gpu->sms / blocks));
}

/* Draws for all rows of a step, logit_rows at a time. Copies the logits that the caller requested before the draw
 * changes them. */
bool draw_rows(Pass *a, Pending *p, Error *e) {
    const size_t vocab = a->w.vocab;
    for (int i = 0; i < a->rows; i += a->gpu->logit_rows) {
        const int n = std::min(a->gpu->logit_rows, a->rows - i);
        if (!a->has_logits && !head(a, i, n, e)) return false;
        if (!gpus::gather_logits(a, i, n, e)) return false;
        for (int r = 0; r < n && a->keep && !a->w.link.card; r++)
            if (a->batch->want[p->step.seq[p->step.row[i + r]]] >= WANT_LOGITS)
                CUDA(cudaMemcpyAsync(p->logits + vocab * p->rows++, a->w.logits + vocab * r, vocab * sizeof(float),
                                     cudaMemcpyDeviceToHost, a->gpu->stream));
        if (!draw_tokens(a, i, n, e)) return false;
    }
    return true;
}

/* Copies the biases of a batch to the card, where they have changed. */
static bool send_biases(Gpu *gpu, const Batch *b, Bias *staged, Error *e) {
    for (int i = 0; i < b->seqs; i++) {
        const Sampling &how = b->sampling[i];
        const size_t at = (size_t)b->slot[i] * MOST_BIASES, bytes = how.biases * sizeof(Bias);
        if (!bytes || !memcmp(&gpu->bias[at], how.bias, bytes)) continue;
        memcpy(&gpu->bias[at], how.bias, bytes);
        memcpy(staged, how.bias, bytes);
        CUDA(cudaMemcpyAsync(gpu->work.bias + at, staged, bytes, cudaMemcpyHostToDevice, gpu->stream));
        staged += how.biases;
    }
    return true;
}

/* A decode step as a CUDA graph: one for each number of tokens and pages and kind of sampling, made on demand. */
bool run_graph(Pass *a, Pending *p, Error *e) {
    Gpu *gpu = a->gpu;
    cudaGraphExec_t &made = gpu->graph[{a->tokens, a->pages, a->filtered + 2 * a->adjusted}];
    if (!made) {
        cudaGraph_t graph;
        CUDA(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
        bool ok = forward(a, e) && draw_rows(a, p, e);
        cudaError_t error = cudaStreamEndCapture(gpu->stream, &graph);
        if (!ok) return false;
        CUDA(error);
        error = cudaGraphInstantiate(&made, graph, 0);
        cudaGraphDestroy(graph);
        CUDA(error);
        CUDA(cudaEventRecord(p->begun, gpu->stream)); /* again: making the graph took the host long */
    }
    CUDA(cudaGraphLaunch(made, gpu->stream));
    return true;
}

/* How many rows of logits the caller requests. */
static int rows_to_keep(const Batch *b) {
    int rows = 0;
    for (int i = 0; i < b->seqs; i++)
        rows += b->want[i] == WANT_ALL_LOGITS ? b->first[i + 1] - b->first[i] : b->want[i] == WANT_LOGITS;
    return rows;
}
bool reserve_logits(Gpu *gpu, const Batch *b, Error *e) {
    Pending &p = gpu->pending[gpu->turn % 3];
    const int rows = rows_to_keep(b);
    if (rows <= p.room || gpu->work.link.card) return true;
    CUDA(cudaSetDevice(gpu->limits.gpu));
    p.room = std::max(rows, 2 * p.room);
    cudaFreeHost(p.logits);
    CUDA(cudaMallocHost(&p.logits, (size_t)p.room * gpu->model.vocab * sizeof(float)));
    return true;
}

static bool cuda_submit(void *state, const Batch *b, Error *e) {
    Gpu *gpu = (Gpu *)state;
    if (gpu->outstanding == 2) return fail(e, FAILED, "submit: two steps are outstanding; collect one");
    Pass a = {gpu, gpu->work, {}, b, b->first[b->seqs]};
    Pending &p = gpu->pending[gpu->turn % 3];
    const int room = std::max(a.tokens, MAX_DECODE);
    bool ok;
    p.step = step_at(p.staged, room);
    fill_step(p.step, &a);
    std::fill_n(p.token, b->seqs, DREW_NOTHING); /* the kernel draw() writes those that it draws */
    p.rows = 0;
    a.keep = rows_to_keep(b);
    if (!reserve_logits(gpu, b, e)) return false;
    CUDA(cudaEventRecord(p.begun, gpu->stream));
    if (!send_biases(gpu, b, (Bias *)(p.staged + gpu->step_bytes), e)) return false;
    gpu->decodes = gpu->has_decode && a.tokens <= MAX_DECODE;
    if (gpu->decodes && gpu->rehearses) return true; /* prepare() has loaded it */
    if (gpu->decodes) {
        ok = fast::decode(&a, p.staged, e) && draw_rows(&a, &p, e);
    } else {
        const size_t bytes = (uint8_t *)(p.step.page + (size_t)b->seqs * b->max_pages) - p.staged;
        a.s = step_at(gpu->step, room);
        CUDA(cudaMemcpyAsync(gpu->step, p.staged, bytes, cudaMemcpyHostToDevice, gpu->stream));
        /* A large model's steps of many tokens last longer than their launches and need no graph: making one stops all
         * answers, and every number of streams has its own. */
        const int max_tokens = gpu->weight_bytes < (size_t)8 << 30 ? gpu->logit_rows : 2 * MAX_DECODE;
        bool whole = a.alone && a.rows == a.tokens && a.tokens <= max_tokens && !a.keep && !gpu->limits.tap;
        if (gpu->rehearses) {
            ok = forward(&a, e);
            for (int i = 0; i < a.rows; i += gpu->logit_rows)
                ok = ok && head(&a, i, std::min(gpu->logit_rows, a.rows - i), e);
            return ok;
        }
        ok = whole ? run_graph(&a, &p, e) : forward(&a, e) && draw_rows(&a, &p, e);
    }
    if (!ok) return false;
    CUDA(cudaEventRecord(p.done, gpu->stream));
    gpu->turn++;
    gpu->outstanding++;
    return true;
}

static bool cuda_collect(void *state, Result *result, Error *e) {
    Gpu *gpu = (Gpu *)state;
    if (!gpu->outstanding) return fail(e, FAILED, "collect: no step is outstanding");
    const Pending &p = gpu->pending[(gpu->turn - gpu->outstanding) % 3];
    float ms;
    CUDA(cudaEventSynchronize(p.done));
    CUDA(cudaEventElapsedTime(&ms, p.begun, p.done));
    gpu->outstanding--;
    if (*gpu->work.late == LATE_MASK)
        return fail(e, GPU_FAULT, "a draw waited a second for the tokens that it may draw");
    if (*gpu->work.late)
        return fail(e, GPU_FAULT, "GPU %d got no answer from another GPU: see nvidia-smi and dmesg", gpu->limits.gpu);
    *result = {p.token, p.logits, p.rows, ms / 1e3, 1, {ms / 1e3}};
    return true;
}

static uint64_t cuda_experts_read(void *state) {
    Gpu *gpu = (Gpu *)state;
    unsigned long long read = 0;
    bool failed = cudaMemcpy(&read, gpu->work.experts_read, sizeof read, cudaMemcpyDeviceToHost);
    return failed ? 0 : read;
}

bool rehearse(Gpu *gpu, const Batch *b, Error *e) {
    uint64_t read; /* behind the steps before this one */
    CUDA(cudaMemcpyAsync(&read, gpu->work.experts_read, sizeof read, cudaMemcpyDeviceToHost, gpu->stream));
    Tap *const tap = gpu->limits.tap;
    gpu->limits.tap = NULL, gpu->rehearses = true;
    const bool ok = cuda_submit(gpu, b, e);
    gpu->limits.tap = tap, gpu->rehearses = false;
    if (!ok) return false;
    CUDA(cudaStreamSynchronize(gpu->stream));
    CUDA(cudaMemcpy(gpu->work.experts_read, &read, sizeof read, cudaMemcpyHostToDevice));
    return true;
}

static uint64_t cuda_weight_bytes(const Model *m) {
    Gpu gpu = {*m};
    Walk{&gpu}.all();
    return gpu.weight_bytes;
}

const Backend one_card = {"cuda",     8192,           cuda_open,         cuda_submit,       cuda_collect,
                          cuda_close, cuda_flat_read, cuda_experts_read, cuda_weight_bytes, cuda_describe};
