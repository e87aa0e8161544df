/* upload.cu: brings the weights from the files to the card. Several threads read into pinned buffers (mapped files would
 * fault page by page) while earlier pieces are copied and placed by kernels: each encoding is re-laid once, here, into the
 * form that infer.cu streams. See card.cuh. */
#include "card.cuh"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <vector>

static constexpr size_t PIECE = 16 << 20; /* bytes read at once */
static constexpr int READERS = 6, BUFFERS = 2;

bool cuda_failed(Error *e, cudaError_t error, const char *what) {
    static const int sticky[] = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};
    cudaGetLastError();
    if (error == cudaErrorMemoryAllocation) return fail(e, NO_ROOM, "the GPU is out of memory; use a smaller --ctx, or free memory of other programs");
    for (int code : sticky)
        if (code == (int)error) return fail(e, GPU_FAULT, "the GPU failed: %s (error %d)", cudaGetErrorString(error), code);
    return fail(e, GPU_FAULT, "the GPU failed: %s (error %d in %.60s)", cudaGetErrorString(error), (int)error, what);
}

/* ---- placing ---- */

struct Rows { /* where the rows of a Linear go in a Matrix */
    int first, step; /* row r goes to first + step * r ... */
    int half;        /* ... after the halves of each head of 2 * half rows were dealt alternately; 0: they stay */
    __host__ __device__ int of(int r) const {
        if (half) {
            int i = r % (2 * half);
            r = r - i + (i < half ? 2 * i : 2 * (i - half) + 1);
        }
        return first + step * r;
    }
};

struct Source { /* rows begin, begin + 1, ... of matrix `matrix`, `stride` bytes apart */
    const uint8_t *data;
    size_t stride;
    int begin, matrix, cols;
};

/* A block a row. A NaN sets *nan. */
template <typename From, typename To> static __global__ void place_rows(Source s, Matrix m, Rows rows, int *nan) {
    const From *from = (const From *)(s.data + blockIdx.x * s.stride);
    To *to = (To *)(m.data + s.matrix * m.bytes) + (size_t)rows.of(s.begin + blockIdx.x) * m.stride;
    for (int c = threadIdx.x; c < s.cols; c += blockDim.x) {
        float x = (float)from[c];
        to[c] = (To)x;
        if (isnan(x)) *nan = 1;
    }
}

/* MXFP4's blocks, or their scales, to their place in the packed chunks: see Codec<MXFP4> in codec.cuh. */
static __global__ void place_fp4(Source s, Matrix m, Rows rows, bool scales, int *nan) {
    const uint8_t *from = s.data + blockIdx.x * s.stride;
    int r = rows.of(s.begin + blockIdx.x), g = r % 8, high = r / 8 % 2;
    uint8_t *group = m.data + s.matrix * m.bytes + (size_t)(r / FP4_ROWS) * (m.stride / FP4_COLUMNS) * FP4_BYTES;
    for (int b = threadIdx.x; b < s.cols / 32; b += blockDim.x) {
        uint8_t *chunk = group + (size_t)(b / 2) * FP4_BYTES;
        if (scales) {
            if (from[b] == 255) *nan = 1;
            chunk[512 + g * 4 + high * 2 + b % 2] = (uint8_t)(min((int)from[b], 228) + 26);
            continue;
        }
        for (int half = 0; half < 2; half++) { /* 16 values: 8 bytes, low nibble first */
            uint32_t word[2];
            fp4_pack(from + b * 16 + half * 8, word);
            *(uint2 *)(chunk + (g * 4 + b % 2 * 2 + half) * 16 + high * 8) = make_uint2(word[0], word[1]);
        }
    }
}

/* router_columns[i][e] = W[e][i] * norm[i]. A block a row i. */
static __global__ void place_columns(Matrix router, const float *norm, float *columns) {
    for (int e = threadIdx.x; e < router.rows; e += blockDim.x) {
        size_t at = (size_t)e * router.stride + blockIdx.x;
        float x = router.type == F32 ? ((const float *)router.data)[at] : (float)((const bf16 *)router.data)[at];
        columns[(size_t)blockIdx.x * router.rows + e] = x * norm[blockIdx.x];
    }
}

/* ---- the plan ---- */

struct Plan {
    uint8_t *base;
    size_t used;
    void *take(size_t bytes) {
        size_t at = used;
        used += (bytes + 255) / 256 * 256;
        return base ? base + at : NULL;
    }
    float *floats(size_t n) { return (float *)take(n * sizeof(float)); }
};

/* A Matrix of `rows` rows encoded as `w` is. */
static Matrix plan_matrix(Plan *p, const Linear *w, int rows, bool bias) {
    Matrix m = {};
    shape(m, w->type == F16 ? F32 : w->type, rows, w->cols);
    m.n = w->n;
    m.data = (uint8_t *)p->take(m.bytes * w->n);
    if (bias) m.bias = p->floats((size_t)w->n * rows);
    return m;
}

bool card_plan(Card *card, const Model *m, uint8_t *base, size_t *bytes, Error *e) {
    Plan p = {base, 0};
    for (int i = 0; i < m->n_layers; i++) {
        const Layer *l = m->layer + i;
        Block *b = card->layer + i;
        auto same = [](Type x, Type y) { return (x == F16 ? F32 : x) == (y == F16 ? F32 : y); };
        if (!same(l->q.type, l->k.type) || !same(l->q.type, l->v.type) || !same(l->q.type, l->o.type) || !same(l->gate.type, l->up.type))
            return fail(e, BAD_MODEL, "layer %d: the matrices of attention, and gate and up, must have one encoding each", i);
        if (!same(l->q.type, m->layer[0].q.type) || !same(l->gate.type, m->layer[0].gate.type))
            return fail(e, BAD_MODEL, "layer %d is encoded unlike layer 0", i);
        if (l->q.type == MXFP4 || l->o.type == MXFP4 || l->router.type == MXFP4 || (l->router.rows && l->gate.type != MXFP4) || l->gate.type != l->down.type)
            return fail(e, BAD_MODEL, "layer %d: experts must be MXFP4 and the other matrices must not (%s experts, %s attention)", i, type_name(l->gate.type),
                        type_name(l->q.type));
        b->window = l->window;
        b->attn_norm = p.floats(m->dim);
        b->ffn_norm = p.floats(m->dim);
        b->sinks = l->sinks ? p.floats(m->n_heads) : NULL;
        b->qkv = plan_matrix(&p, &l->q, l->q.rows + l->k.rows + l->v.rows, l->q.bias || l->k.bias || l->v.bias);
        b->o = plan_matrix(&p, &l->o, m->dim, l->o.bias);
        b->router = l->router.rows ? plan_matrix(&p, &l->router, m->n_experts, l->router.bias) : Matrix{};
        b->router_columns = l->router.rows ? p.floats((size_t)m->dim * m->n_experts) : NULL;
        b->up = plan_matrix(&p, &l->gate, 2 * m->ffn_dim, l->gate.bias || l->up.bias);
        b->down = plan_matrix(&p, &l->down, m->dim, l->down.bias);
    }
    bool tied = m->head.data.fd == m->embed.data.fd && m->head.data.offset == m->embed.data.offset;
    card->norm = p.floats(m->dim);
    card->embed = plan_matrix(&p, &m->embed, m->vocab, false);
    card->head = tied ? card->embed : plan_matrix(&p, &m->head, m->vocab, false);
    *bytes = p.used;
    return true;
}

/* ---- the load ---- */

struct Job { /* one tensor */
    View view;
    Type type;
    int rows, cols, n;
    bool scales;
    size_t row_bytes;
    Matrix to;
    Rows place;
    char name[32];
};

struct Load {
    std::vector<Job> job;
    std::vector<std::pair<int, int>> piece; /* job, and which row of all its matrices it begins with */
    std::atomic<size_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    std::mutex lock;
    Error error;
    int *nan; /* (jobs) on the card */

    static int rows_of_piece(const Job &j) { return (int)std::max<size_t>(1, std::min<size_t>(j.rows, PIECE / j.view.stride)); }
    static size_t bytes_of(const Job &j, int rows) { return (rows - 1) * j.view.stride + j.row_bytes; }
    void add(const Linear *w, const Matrix &to, Rows place, int layer, const char *name);
    bool read(int device, Error *e);
    bool piece_read(const Job &j, int row, int rows, uint8_t *buffer, Error *e);
    cudaError_t piece_place(size_t number, const Job &j, int row, int rows, const uint8_t *staged, cudaStream_t stream);
};

void Load::add(const Linear *w, const Matrix &to, Rows place, int layer, const char *name) {
    for (int scales = 0; scales < (w->type == MXFP4 ? 2 : 1); scales++) {
        Job j = {};
        j.view = scales ? w->scale : w->data;
        j.type = w->type, j.rows = w->rows, j.cols = w->cols, j.n = w->n, j.scales = scales, j.to = to, j.place = place;
        j.row_bytes = w->type == MXFP4 ? w->cols / (scales ? 32 : 2) : (size_t)w->cols * (w->type == F32 ? 4 : 2);
        if (layer < 0)
            snprintf(j.name, sizeof j.name, "%s", name);
        else
            snprintf(j.name, sizeof j.name, "layer %d, %s", layer, name);
        for (int i = 0; i < j.n; i++)
            for (int r = 0; r < j.rows; r += rows_of_piece(j)) piece.push_back({(int)job.size(), i * j.rows + r});
        job.push_back(j);
    }
}

bool Load::piece_read(const Job &j, int row, int rows, uint8_t *buffer, Error *e) {
    size_t offset = j.view.offset + row / j.rows * j.view.step + row % j.rows * j.view.stride, bytes = bytes_of(j, rows);
    for (size_t have = 0; have < bytes;) {
        ssize_t got = pread(j.view.fd, buffer + have, bytes - have, (off_t)(offset + have));
        if (got <= 0) return fail(e, BAD_MODEL, "a model file ended while it was read (%s); download it again", j.name);
        have += (size_t)got;
    }
    return true;
}

cudaError_t Load::piece_place(size_t number, const Job &j, int row, int rows, const uint8_t *staged, cudaStream_t stream) {
    Source s = {staged, j.view.stride, row % j.rows, row / j.rows, j.cols};
    int *flag = nan + number;
    if (j.type == MXFP4) place_fp4<<<rows, 96, 0, stream>>>(s, j.to, j.place, j.scales, flag);
    if (j.type == BF16) place_rows<bf16, bf16><<<rows, 256, 0, stream>>>(s, j.to, j.place, flag);
    if (j.type == F16) place_rows<__half, float><<<rows, 256, 0, stream>>>(s, j.to, j.place, flag);
    if (j.type == F32) place_rows<float, float><<<rows, 256, 0, stream>>>(s, j.to, j.place, flag);
    return cudaGetLastError();
}

/* One reader's work: piece after piece, through its own buffers. */
bool Load::read(int device, Error *e) {
    struct Buffer {
        uint8_t *host = NULL, *card = NULL;
        cudaStream_t stream = NULL;
        ~Buffer() {
            if (stream) cudaStreamSynchronize(stream), cudaStreamDestroy(stream);
            cudaFreeHost(host);
            cudaFree(card);
        }
    } buffer[BUFFERS];
    size_t room = PIECE;
    CUDA(cudaSetDevice(device));
    for (const Job &j : job) room = std::max(room, bytes_of(j, rows_of_piece(j)));
    for (Buffer &b : buffer) {
        CUDA(cudaMallocHost(&b.host, room));
        CUDA(cudaMalloc(&b.card, room));
        CUDA(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    }
    for (int turn = 0; !failed; turn++) {
        size_t i = next++;
        if (i >= piece.size()) break;
        const Job &j = job[piece[i].first];
        Buffer &b = buffer[turn % BUFFERS];
        int row = piece[i].second, rows = std::min(rows_of_piece(j), j.rows - row % j.rows);
        CUDA(cudaStreamSynchronize(b.stream));
        if (!piece_read(j, row, rows, b.host, e)) return false;
        CUDA(cudaMemcpyAsync(b.card, b.host, bytes_of(j, rows), cudaMemcpyHostToDevice, b.stream));
        CUDA(piece_place(piece[i].first, j, row, rows, b.card, b.stream));
        done += rows * j.row_bytes;
    }
    for (Buffer &b : buffer) CUDA(cudaStreamSynchronize(b.stream));
    return true;
}

/* Gate and up that lie row by row in one tensor, already as the card wants them. */
static bool fused(const Linear *gate, const Linear *up) {
    size_t row = gate->data.stride / 2;
    return gate->data.fd == up->data.fd && gate->data.stride == up->data.stride && up->data.offset == gate->data.offset + row &&
           row == (gate->type == MXFP4 ? gate->cols / 2 : (size_t)gate->cols * (gate->type == F32 ? 4 : 2));
}

static Linear both(const Linear *gate) { /* the tensor that gate and up are views of */
    Linear w = *gate;
    w.rows *= 2;
    for (View *v : {&w.data, &w.scale}) {
        v->stride /= 2;
        v->size += v->stride;
    }
    return w;
}

static bool upload_floats(float *to, const float *from, size_t n, Error *e) {
    if (to) CUDA(cudaMemcpy(to, from, n * sizeof *from, cudaMemcpyHostToDevice));
    return true;
}

/* Biases in the order of a Matrix; what one of the Linears lacks is 0. */
struct Part {
    const Linear *w;
    Rows place;
};
static bool upload_bias(const Matrix &m, std::initializer_list<Part> parts, Error *e) {
    std::vector<float> bias((size_t)m.n * m.rows);
    for (const Part &p : parts)
        for (int i = 0; i < m.n * p.w->rows && p.w->bias; i++) bias[(size_t)(i / p.w->rows) * m.rows + p.place.of(i % p.w->rows)] = p.w->bias[i];
    return upload_floats(m.bias, bias.data(), bias.size(), e);
}

static bool upload_small(Card *card, const Model *m, Error *e) {
    int half = m->head_dim / 2;
    for (int i = 0; i < m->n_layers; i++) {
        const Layer *l = m->layer + i;
        const Block *b = card->layer + i;
        Rows q = {0, 1, half}, k = {l->q.rows, 1, half}, v = {l->q.rows + l->k.rows, 1, 0}, all = {0, 1, 0}, even = {0, 2, 0}, odd = {1, 2, 0};
        if (!upload_floats(b->attn_norm, l->attn_norm, m->dim, e) || !upload_floats(b->ffn_norm, l->ffn_norm, m->dim, e) ||
            !upload_floats(b->sinks, l->sinks, m->n_heads, e) || !upload_bias(b->qkv, {{&l->q, q}, {&l->k, k}, {&l->v, v}}, e) ||
            !upload_bias(b->o, {{&l->o, all}}, e) || !upload_bias(b->router, {{&l->router, all}}, e) ||
            !upload_bias(b->up, {{&l->gate, even}, {&l->up, odd}}, e) || !upload_bias(b->down, {{&l->down, all}}, e))
            return false;
    }
    return upload_floats(card->norm, m->norm, m->dim, e);
}

static void list_jobs(Load *load, const Card *card, const Model *m) {
    int half = m->head_dim / 2;
    Rows all = {0, 1, 0};
    load->add(&m->embed, card->embed, all, -1, "embedding");
    for (int i = 0; i < m->n_layers; i++) {
        const Layer *l = m->layer + i;
        const Block *b = card->layer + i;
        load->add(&l->q, b->qkv, {0, 1, half}, i, "query");
        load->add(&l->k, b->qkv, {l->q.rows, 1, half}, i, "key");
        load->add(&l->v, b->qkv, {l->q.rows + l->k.rows, 1, 0}, i, "value");
        load->add(&l->o, b->o, all, i, "attention output");
        if (l->router.rows) load->add(&l->router, b->router, all, i, "router");
        if (fused(&l->gate, &l->up)) {
            Linear w = both(&l->gate);
            load->add(&w, b->up, all, i, "gate and up");
        } else {
            load->add(&l->gate, b->up, {0, 2, 0}, i, "gate");
            load->add(&l->up, b->up, {1, 2, 0}, i, "up");
        }
        load->add(&l->down, b->down, all, i, "down");
    }
    if (card->head.data != card->embed.data) load->add(&m->head, card->head, all, -1, "head");
}

/* Random weights of a matrix in their place, of about 1 / sqrt(cols), a thread a word. */
static __global__ void make_up(Matrix m, uint32_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < m.bytes * m.n / 4; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t bits = ((uint32_t)i ^ seed) * 2654435761u;
        bits = (bits ^ bits >> 15) * 2246822519u;
        bits ^= bits >> 13;
        if (m.type == BF16) { /* uniform */
            float most = sqrtf(3.f / m.cols) / 32768;
            ((__nv_bfloat162 *)m.data)[i] = __floats2bfloat162_rn((int16_t)bits * most, (int16_t)(bits >> 16) * most);
        } else { /* all e2m1 values alike, whose root mean square is 2.93, and one scale */
            uint32_t scale = 127 + 26 - (uint32_t)rintf(log2f(2.93f * sqrtf(m.cols)));
            ((uint32_t *)m.data)[i] = i * 4 % FP4_BYTES < 512 ? bits : scale * 0x01010101;
        }
    }
}

static bool make_up_all(const Card *card, const Model *m, Error *e) {
    uint32_t seed = 1;
    auto fill = [&](const Matrix &w) {
        if (w.rows) make_up<<<1024, 256>>>(w, seed++ * 0x9E3779B9u);
    };
    fill(card->embed);
    fill(card->head);
    for (int i = 0; i < m->n_layers; i++)
        for (const Matrix *w : {&card->layer[i].qkv, &card->layer[i].o, &card->layer[i].router, &card->layer[i].up, &card->layer[i].down}) fill(*w);
    CUDA(cudaGetLastError());
    return true;
}

static bool read_all(Card *card, const Model *m, void (*progress)(uint64_t, uint64_t), Error *e) {
    Load load;
    int device;
    uint64_t total = 0;
    CUDA(cudaGetDevice(&device));
    list_jobs(&load, card, m);
    for (const Job &j : load.job) total += (uint64_t)j.n * j.rows * j.row_bytes;
    CUDA(cudaMalloc(&load.nan, load.job.size() * sizeof(int)));
    CUDA(cudaMemset(load.nan, 0, load.job.size() * sizeof(int)));
    CUDA(cudaDeviceSynchronize());
    std::vector<std::thread> readers;
    std::atomic<int> running{READERS};
    for (int i = 0; i < READERS; i++)
        readers.emplace_back([&] {
            Error mine;
            if (!load.read(device, &mine)) {
                std::lock_guard<std::mutex> hold(load.lock);
                if (!load.failed) load.error = mine;
                load.failed = true;
            }
            running--;
        });
    while (running) {
        usleep(20000);
        if (progress && load.done < total) progress(load.done, total);
    }
    for (std::thread &t : readers) t.join();
    std::vector<int> nan(load.job.size());
    cudaError_t copied = load.failed ? cudaSuccess : cudaMemcpy(nan.data(), load.nan, nan.size() * sizeof(int), cudaMemcpyDeviceToHost);
    cudaFree(load.nan);
    if (load.failed) return *e = load.error, false;
    CUDA(copied);
    for (size_t i = 0; i < nan.size(); i++)
        if (nan[i]) return fail(e, BAD_MODEL, "a weight is not a number (%s): the file is damaged; download it again", load.job[i].name);
    if (progress) progress(total, total);
    return true;
}

bool card_load(Card *card, const Model *m, void (*progress)(uint64_t, uint64_t), Error *e) {
    if (!upload_small(card, m, e)) return false;
    if (!(m->made_up ? make_up_all(card, m, e) : read_all(card, m, progress, e))) return false;
    for (int i = 0; i < m->n_layers; i++) {
        Block *b = card->layer + i;
        if (b->router.rows) place_columns<<<m->dim, 32>>>(b->router, b->ffn_norm, b->router_columns);
    }
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
    return true;
}
