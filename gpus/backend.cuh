/* backend.cuh: several cards as one Backend. Each has a thread of its own, a shard of the model, and the cache of its
 * heads; all get the same steps. A card's number among them is its rank. */
#pragma once
#include "gpus/gpus.h"

#include <dlfcn.h>
#include <functional>
#include <pthread.h>
#include <set>

namespace gpus {

/* ---- NCCL, only where cards need it: its library is opened then, so that nobody else needs it ---- */

enum { NCCL_FLOAT = 7, NCCL_SUM = 0 }; /* nccl.h */
struct Nccl {
    int (*init)(void **comm, int n, const int *devices) = NULL;
    int (*all_reduce)(const void *from, void *to, size_t n, int type, int how, void *comm, cudaStream_t stream) = NULL;
    int (*destroy)(void *comm) = NULL;
    int (*version)(int *v) = NULL;
    const char *(*error)(int code) = NULL;
    Nccl() {
        setenv("NCCL_NVLS_ENABLE", "0", 0);             /* multicast over NVLink hangs on some hosts */
        dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL); /* unless it is linked into this program */
        auto find = [&](auto *to, const char *name) { *(void **)to = dlsym(RTLD_DEFAULT, name); };
        find(&init, "ncclCommInitAll"), find(&all_reduce, "ncclAllReduce"), find(&destroy, "ncclCommDestroy");
        find(&version, "ncclGetVersion"), find(&error, "ncclGetErrorString");
    }
    bool usable() const { return init && all_reduce && destroy && version && error; }
};
static const Nccl &nccl() {
    static const Nccl opened;
    return opened;
}
bool nccl_all_reduce(const Gpu *gpu, const float *from, float *to, size_t n, Error *e) {
    const int code = nccl().all_reduce(from, to, n, NCCL_FLOAT, NCCL_SUM, gpu->work.link.comm, gpu->stream);
    return !code || fail(e, GPU_FAULT, "NCCL failed: %s", nccl().error(code));
}

/* ---- memory that the cards write to ---- */

void plan(Gpu *gpu, Plan *p) {
    Link &k = gpu->work.link;
    const size_t peers = k.cards - 1, pairs = gpu->model.dim / 2, T = gpu->limits.max_tokens;
    if (!peers) return;
    k.rounds = true; /* if the activations that o and down read are rounded to bf16, their sums may be, too */
    for (const DeviceLayer &l : gpu->device.layer)
        for (const Matrix *m : {&l.o, &l.down}) k.rounds &= m->type != F32 && m->type != F16;
    const size_t most = k.comm ? std::max<size_t>(MAX_FLOAT_TOKENS, MAX_PEER_ROWS / peers) : T;
    const size_t rows = k.peers ? std::min(T, most) : 0; /* else NCCL adds all */
    const size_t floats = (k.rounds ? std::min<size_t>(rows, MAX_FLOAT_TOKENS) : rows) * pairs * sizeof(float2);
    k.inbox_bytes = peers * std::max(floats, rows * pairs * sizeof(uint32_t));
    k.inbox = p->take<uint8_t>(2 * k.inbox_bytes);
    k.decode_o = p->take<unsigned long long>(2 * MAX_DECODE * pairs);
    k.decode_down = p->take<unsigned long long>(2 * MAX_DECODE * 2 * pairs);
    k.key_rows = gpu->logit_rows;
    k.keys = p->take<unsigned long long>(2 * k.cards * k.key_rows);
    k.arrived = p->take<unsigned long long>(k.cards);
    k.barriers = p->take<unsigned long long>(1);
    k.dead = p->take<int>(1);
    k.reduced = p->take<float>(k.comm ? T * 2 * pairs : 0);
}

/* ---- the cards, and what they do together ---- */

struct Cards;
struct Rank {
    Cards *cards;
    int number;
    Shard shard = {};
    Gpu *gpu = NULL;
    int pages;
    Result result = {};
    std::thread thread;
    const float *tapped; /* what its tap was given: (rows, tapped_cols) */
    int tapped_cols, meetings = 0;
};
struct Cards {
    const Model *model;
    Limits limits;
    std::vector<int> devices;
    std::vector<void *> comm; /* NCCL's, or empty */
    bool peers = true;
    std::vector<Rank> rank;
    pthread_barrier_t everybody;               /* the ranks, and the caller's thread */
    std::function<bool(Rank &, Error *)> task; /* what all do now; none: they end */
    std::set<std::pair<int, int>> known;       /* tokens and rows of logits of steps that were rehearsed */
    std::atomic<bool> failed{false};
    Error error;
    std::atomic<int> came{0}; /* how often a rank has come to meet() */

    /* All ranks do it, each in its own thread. The first error counts. */
    bool all(std::function<bool(Rank &, Error *)> what, Error *e) {
        if (rank.size() == 1) return what(rank[0], e);
        task = what, failed = false;
        pthread_barrier_wait(&everybody), pthread_barrier_wait(&everybody);
        if (failed) *e = error;
        return !failed;
    }
    /* In a task: waits for all ranks. False: one has failed, and does not come. */
    bool meet(Rank &r) {
        const int all = ++r.meetings * (int)rank.size();
        for (came++; came < all && !failed;) usleep(20);
        return came >= all;
    }
    /* No card waits any longer for one that has failed. */
    void tell() {
        for (Rank &r : rank)
            if (r.gpu) __atomic_store_n(r.gpu->work.late, (int)LATE_CARD, __ATOMIC_RELEASE);
    }
    void work(Rank &r) {
        for (Error mine; pthread_barrier_wait(&everybody), task; pthread_barrier_wait(&everybody))
            if (!task(r, &mine) && !failed.exchange(true)) error = mine, tell();
    }
};

/* A rank's values of a stage. The first puts the columns of all side by side, where each has some of them, and gives
 * them to the caller's tap. */
static void tap_shard(void *data, const char *stage, int layer, const float *values, int rows, int cols) {
    Rank *mine = (Rank *)data;
    Cards *cards = mine->cards;
    const Model &m = *cards->model;
    const int n = (int)cards->rank.size();
    const std::string name = stage;
    const bool keys = (name == "k" && !m.kv_rank) || name == "v";
    const bool whole = !keys && name != "q" && name != "attn" && name != "act"; /* the same on each */
    std::vector<float> out;
    mine->tapped = values, mine->tapped_cols = cols;
    if (!cards->meet(*mine)) return;
    for (int row = 0; row < rows && !mine->number; row++)
        for (const Rank &r : cards->rank) {
            const int c = r.number;
            const float *from = r.tapped + (size_t)row * r.tapped_cols;
            const bool again = keys && c && c * m.n_kv_heads / n == (c - 1) * m.n_kv_heads / n; /* shared heads */
            if (!c || (!whole && !again)) out.insert(out.end(), from, from + r.tapped_cols);
        }
    if (!mine->number)
        cards->limits.tap(cards->limits.tap_data, stage, layer, out.data(), rows, (int)out.size() / rows);
    cards->meet(*mine);
}

/* ---- opening and closing ---- */

#ifndef SAME_GPU_AGAIN
#define SAME_GPU_AGAIN 0 /* tests take one GPU for two */
#endif
/* The cards that --gpus names: a number of them from the first on, or a list. */
static bool read_list(const Limits *limits, std::vector<int> *devices, Error *e) {
    const char *at = limits->gpus;
    int n;
    if (text_whole(at, 1, MAX_GPUS, &n)) {
        for (int i = 0; i < n; i++) devices->push_back(limits->gpu + i);
        return true;
    }
    for (char *end; devices->size() < MAX_GPUS; at++) {
        const long id = strtol(at, &end, 10);
        const bool again = !SAME_GPU_AGAIN && std::count(devices->begin(), devices->end(), (int)id);
        if (end == at || id < 0 || id > INT_MAX || again || (*end && *end != ',')) break;
        devices->push_back((int)id), at = end;
        if (!*at) return true;
    }
    return fail(e, USAGE, "--gpus must be a number of GPUs, at most %d, or a list like 0,3, not '%.40s'", MAX_GPUS,
                limits->gpus);
}

/* Do the cards reach each other's memory, and do they need NCCL? */
static bool find_peers(Cards *cards, Error *e) {
    const int n = (int)cards->devices.size(), first = cards->devices[0];
    int there = 0, can;
    cudaDeviceProp one, other;
    cudaGetDeviceCount(&there);
    if (n == 1 || !there) return true; /* that there is none, each card says */
    for (int a : cards->devices) {
        if (a >= there)
            return fail(e, NO_GPU, "there is no GPU %d here, only 0 to %d: choose with --gpus", a, there - 1);
        if (cudaGetDeviceProperties(&one, first) || cudaGetDeviceProperties(&other, a) || one.major != other.major ||
            one.minor != other.minor || one.multiProcessorCount != other.multiProcessorCount)
            return fail(e, NO_GPU, "GPUs %d and %d differ: only GPUs of one kind can share a model", first, a);
        for (int b : cards->devices)
            if (a != b && (cudaDeviceCanAccessPeer(&can, a, b) || !can)) cards->peers = false;
    }
    if (cards->peers && (n == 2 || !nccl().usable())) return true;
    if (!nccl().usable())
        return fail(e, NO_GPU, "these GPUs need NCCL, and libnccl.so.2 is missing: sudo apt install libnccl2");
    cards->comm.resize(n);
    const int code = nccl().init(cards->comm.data(), n, cards->devices.data());
    return !code || fail(e, GPU_FAULT, "NCCL failed: %s", nccl().error(code));
}

static bool open_rank(Rank &r, Error *e) {
    const Cards *cards = r.cards;
    const std::vector<int> &devices = cards->devices;
    const int n = (int)cards->rank.size(), device = devices[r.number];
    const Link link = {n, r.number, cards->peers, (int)std::count(devices.begin(), devices.end(), device),
                       cards->comm.empty() ? NULL : cards->comm[r.number]};
    Limits limits = cards->limits;
    limits.gpu = device;
    if (limits.tap && n > 1) limits.tap = tap_shard, limits.tap_data = &r;
    if (r.number) limits.progress = NULL, limits.allowed = NULL, limits.where = NULL;
    if (n > 1 && !shard_model(cards->model, r.number, n, &r.shard, e)) return false;
    r.gpu = open_card(n > 1 ? &r.shard.model : cards->model, &limits, &link, r.shard.first_id, &r.pages, e);
    if (!r.gpu || n == 1) return r.gpu;
    for (int d : devices)
        if (cards->peers && d != device) {
            const cudaError_t error = cudaDeviceEnablePeerAccess(d, 0);
            if (error && error != cudaErrorPeerAccessAlreadyEnabled) CUDA(error);
            cudaGetLastError();
        }
    const Link &k = r.gpu->work.link;
    CUDA(cudaMemset(k.inbox, 0xFF, (uint8_t *)k.decode_down - k.inbox)); /* empty: see all_reduce.cuh */
    CUDA(cudaDeviceSynchronize());
    return true;
}

/* After a fault with NCCL nothing is closed: a card may wait for ever, and all ends with the process. */
static void close_cards(void *state) {
    Cards *cards = (Cards *)state;
    Error e;
    if (cards->failed && cards->error.code == GPU_FAULT && cards->comm.size()) return;
    cards->all([](Rank &r, Error *) { return !r.gpu || !cudaStreamSynchronize(r.gpu->stream); }, &e);
    cards->all(
        [](Rank &r, Error *) {
            if (r.gpu && r.number) r.gpu->work.allowed = {}; /* rank 0 frees it */
            if (r.gpu) one_card.close(r.gpu);
            shard_free(&r.shard);
            return true;
        },
        &e);
    for (void *comm : cards->comm) nccl().destroy(comm);
    cards->task = nullptr;
    if (cards->rank.size() > 1) pthread_barrier_wait(&cards->everybody);
    for (Rank &r : cards->rank)
        if (r.thread.joinable()) r.thread.join();
    delete cards;
}

static Cards *open_on(const Model *m, const Limits *limits, const std::vector<int> &devices, int *pages, Error *e) {
    Cards *cards = new Cards{m, *limits, devices};
    const int n = (int)devices.size();
    if (!find_peers(cards, e)) return delete cards, nullptr;
    cards->rank.resize(n);
    pthread_barrier_init(&cards->everybody, NULL, n + 1);
    for (Rank &r : cards->rank) {
        r.cards = cards, r.number = (int)(&r - cards->rank.data()), r.pages = *pages;
        if (n > 1) r.thread = std::thread([&r] { r.cards->work(r); });
    }
    if (!cards->all([](Rank &r, Error *e) { return open_rank(r, e); }, e)) return close_cards(cards), nullptr;
    for (Rank &r : cards->rank) { /* the cards learn of each other */
        for (const Rank &peer : cards->rank) r.gpu->work.link.logits[peer.number] = peer.gpu->work.logits;
        r.gpu->work.allowed = cards->rank[0].gpu->work.allowed;
        *pages = std::min(*pages, r.pages);
    }
    auto prepare = [n](Rank &r, Error *e) { return prepare_card(r.gpu, e) && (n == 1 || load_kernels(e)); };
    if (!cards->all(prepare, e)) return close_cards(cards), nullptr;
    if (n > 1 && limits->where) {
        const std::string first = limits->where;
        snprintf(limits->where, 64, "%d GPUs%s, each as %s", n, cards->peers ? "" : " by NCCL", first.c_str());
    }
    return cards;
}

/* Without --gpus: on one card or, if it has no room, on as many as it takes. */
static void *open_cards(const Model *m, const Limits *limits, int *pages, Error *e) {
    std::vector<int> devices;
    if (limits->gpus) {
        Cards *cards = read_list(limits, &devices, e) ? open_on(m, limits, devices, pages, e) : nullptr;
        if (!cards && e->code == NO_ROOM)
            fail(e, NO_ROOM, "%s, or take more with --gpus", std::string(e->text).c_str());
        return cards;
    }
    int there = 0;
    cudaGetDeviceCount(&there);
    for (Error first;;) {
        const int n = (int)devices.size() + 1;
        const bool can = n == 1 || can_shard(m, n);
        int fit = *pages;
        devices.push_back(limits->gpu + n - 1);
        Cards *cards = can ? open_on(m, limits, devices, &fit, e) : nullptr;
        if (n == 1) first = *e;
        if (cards) return *pages = fit, cards;
        if (can && e->code == NO_GPU && n > 1)
            return fail(e, NO_ROOM, "%s; on several, %s", first.text, std::string(e->text).c_str()), nullptr;
        if (can && e->code != NO_ROOM) return nullptr;
        if (n >= there - limits->gpu) return *e = first, nullptr;
    }
}

/* ---- steps ---- */

/* After an error on one of several cards the others are at another step: none goes on. */
static bool step(Cards *cards, std::function<bool(Rank &, Error *)> what, Error *e) {
    if (cards->all(what, e)) return true;
    if (cards->rank.size() > 1) e->code = GPU_FAULT;
    return false;
}
/* cuBLAS takes similar numbers of tokens for the same. */
static int like(int n) { return n <= MAX_DECODE ? n : (n + 31) / 32 * 32; }
static bool submit(void *state, const Batch *b, Error *e) {
    Cards *cards = (Cards *)state;
    const int tokens = b->first[b->seqs];
    int rows = 0;
    for (int i = 0; i < b->seqs; i++)
        rows += b->want[i] == WANT_ALL_LOGITS ? b->first[i + 1] - b->first[i] : b->want[i] != WANT_NOTHING;
    const bool rehearsed = cards->rank.size() == 1 || !cards->known.insert({like(tokens), like(rows)}).second;
    auto rehearsal = [=](Rank &r, Error *e) { return rehearse(r.gpu, b, e); };
    auto begin = [=](Rank &r, Error *e) { return one_card.submit(r.gpu, b, e); };
    /* Freeing memory, CUDA waits for cards, and a card that has begun waits for others: so it comes first. */
    return reserve_logits(cards->rank[0].gpu, b, e) && (rehearsed || step(cards, rehearsal, e)) &&
           step(cards, begin, e);
}
/* NCCL would wait for ever for a card that has failed. */
static bool step_ends(const Rank &r, Error *e) {
    const Gpu *gpu = r.gpu;
    const cudaEvent_t done = gpu->pending[(gpu->turn - gpu->outstanding) % 3].done;
    for (const double begun = seconds(); cudaEventQuery(done) == cudaErrorNotReady; usleep(100))
        if (r.cards->failed || seconds() - begun > CARD_SECONDS)
            return fail(e, GPU_FAULT, "GPU %d got no answer from another GPU", gpu->limits.gpu);
    return true;
}
static bool collect(void *state, Result *result, Error *e) {
    Cards *cards = (Cards *)state;
    auto each = [](Rank &r, Error *e) {
        return (r.cards->comm.empty() || step_ends(r, e)) && one_card.collect(r.gpu, &r.result, e);
    };
    if (!step(cards, each, e)) return false;
    *result = cards->rank[0].result;
    result->gpus = (int)cards->rank.size();
    for (const Rank &r : cards->rank) {
        result->busy[r.number] = r.result.seconds;
        result->seconds = std::max(result->seconds, r.result.seconds);
    }
    return true;
}
/* On the first card. */
static double flat_read(void *state, uint64_t bytes) {
    const Cards *cards = (Cards *)state;
    cudaSetDevice(cards->devices[0]);
    return one_card.flat_read(cards->rank[0].gpu, bytes / cards->rank.size());
}
static uint64_t weight_bytes(const Model *m) { return one_card.weight_bytes(m); }
static uint64_t experts_read(void *state) {
    const Cards *cards = (Cards *)state;
    cudaSetDevice(cards->devices[0]);
    return one_card.experts_read(cards->rank[0].gpu);
}
static void describe(Devices *d) {
    one_card.describe(d);
    for (int i = 0; i < d->gpus; i++)
        for (int k = 0; k < d->gpus; k++) {
            int can = 0;
            if (i != k && !cudaDeviceCanAccessPeer(&can, i, k) && can) d->gpu[i].peers++;
        }
    if (d->gpus > 1 && nccl().usable()) nccl().version(&d->nccl);
}
} // namespace gpus

const Backend cuda = {"cuda",
                      8192,
                      gpus::open_cards,
                      gpus::submit,
                      gpus::collect,
                      gpus::close_cards,
                      gpus::flat_read,
                      gpus::experts_read,
                      gpus::weight_bytes,
                      gpus::describe};
