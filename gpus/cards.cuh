/* cards.cuh: several cards as one Backend. Each has a thread of its own, a part of the model and the whole cache of its
 * heads; all get the same steps. */
#pragma once
#include "gpus/gpus.h"

#include <condition_variable>
#include <dlfcn.h>
#include <functional>

namespace gpus {

/* ---- NCCL, only where cards need it: its library is opened then, so that nobody else needs it ---- */

enum { NCCL_FLOAT = 7, NCCL_SUM = 0 }; /* nccl.h */
struct Nccl {
    int (*init)(void **comm, int n, const int *devices) = NULL;
    int (*sum)(const void *from, void *to, size_t n, int type, int how, void *comm, cudaStream_t stream) = NULL;
    int (*destroy)(void *comm) = NULL;
    int (*version)(int *v) = NULL;
    const char *(*error)(int code) = NULL;
    Nccl() {
        setenv("NCCL_NVLS_ENABLE", "0", 0);     /* multicast over NVLink hangs on some hosts */
        void *library = dlopen(NULL, RTLD_NOW); /* it may be linked into this program */
        if (!dlsym(library, "ncclAllReduce")) library = dlopen("libnccl.so.2", RTLD_NOW);
        auto find = [&](auto *to, const char *name) { *(void **)to = library ? dlsym(library, name) : NULL; };
        find(&init, "ncclCommInitAll"), find(&sum, "ncclAllReduce"), find(&destroy, "ncclCommDestroy");
        find(&version, "ncclGetVersion"), find(&error, "ncclGetErrorString");
    }
    bool there() const { return init && sum && destroy && version && error; }
};
static const Nccl &nccl() {
    static const Nccl opened;
    return opened;
}
bool nccl_sum(const Gpu *gpu, const float *from, float *to, size_t n, Error *e) {
    const int code = nccl().sum(from, to, n, NCCL_FLOAT, NCCL_SUM, gpu->nccl, gpu->stream);
    return !code || fail(e, GPU_FAULT, "NCCL failed: %s", nccl().error(code));
}

/* ---- memory that the cards share ---- */

/* Whether what the cards add to x may be rounded to bf16: the activations that the matrices read are. */
static bool may_round(const Gpu *gpu) {
    for (const DeviceLayer &l : gpu->device.layer)
        for (const Matrix *m : {&l.o, &l.down})
            if (m->type == F32 || m->type == F16) return false;
    return true;
}

void plan(Gpu *gpu, Plan *p) {
    Link &k = gpu->work.link;
    const size_t peers = k.cards - 1, pairs = gpu->model.dim / 2, T = gpu->limits.max_tokens;
    if (!peers) return;
    const bool narrow = may_round(gpu);
    const size_t sent = k.nccl ? std::min(T, std::max<size_t>(MOST_WIDE, MOST_SENT / peers)) : T;
    k.rows = (int)sent, k.wide_rows = (int)(narrow ? std::min<size_t>(T, MOST_WIDE) : sent);
    k.wide = p->take<unsigned long long>(2 * peers * k.wide_rows * pairs);
    k.narrow = narrow ? p->take<uint32_t>(2 * peers * k.rows * pairs) : NULL;
    k.best_rows = gpu->logit_rows;
    k.middle = p->take<unsigned long long>(2 * MAX_DECODE * pairs);
    k.experts = p->take<unsigned long long>(2 * MAX_DECODE * 2 * pairs);
    k.best = p->take<unsigned long long>(2 * k.cards * k.best_rows);
    k.met = p->take<unsigned long long>(k.cards);
    k.meetings = p->take<unsigned long long>(1);
    k.sum = p->take<float>(k.nccl ? T * 2 * pairs : 0);
}

/* What is sent between cards begins as ones: see sum.cuh. */
static bool clear_inbox(Gpu *gpu, Error *e) {
    const Link &k = gpu->work.link;
    CUDA(cudaMemset(k.wide, 0xFF, (uint8_t *)k.experts - (uint8_t *)k.wide));
    return true;
}

/* ---- one Backend of many cards ---- */

struct Crew;
struct Seat { /* a card */
    Crew *crew;
    int number;
    ModelPart part = {};
    Gpu *gpu = NULL;
    Result result = {};
    std::thread thread;
    struct { /* what its tap was given */
        const float *values;
        int rows, cols;
    } tapped;
};
struct Crew {
    std::vector<Seat> seat;
    std::vector<int> devices;
    const Model *model;
    Limits limits;
    bool peers = true, nccl;
    std::mutex lock;
    std::condition_variable begin, end;
    std::function<bool(Seat &, Error *)> task; /* what all do now */
    unsigned turn = 0;                         /* how many tasks there have been */
    int busy = 0;
    bool ok = true, over = false;
    Error error;
    std::mutex tapping;
    std::condition_variable all_tapped;
    int taps = 0; /* values that have come, of all stages */

    /* All cards do it, each in its own thread. The first error counts. */
    bool all(std::function<bool(Seat &, Error *)> what, Error *e) {
        if (seat.size() == 1) return what(seat[0], e);
        std::unique_lock<std::mutex> hold(lock);
        task = what, ok = true, busy = (int)seat.size(), turn++;
        begin.notify_all();
        end.wait(hold, [&] { return !busy; });
        if (!ok) *e = error;
        return ok;
    }
    void work(Seat &s) {
        std::unique_lock<std::mutex> hold(lock);
        for (unsigned seen = 0;;) {
            begin.wait(hold, [&] { return over || turn != seen; });
            if (over) return;
            seen = turn;
            hold.unlock();
            Error mine;
            const bool good = task(s, &mine);
            hold.lock();
            if (!good && ok) ok = false, error = mine;
            if (!--busy) end.notify_one();
        }
    }
};

/* A card's values of a stage. The last one to come puts the columns of all side by side, where each has some of them,
 * and gives them to the caller's tap. */
static void tap_part(void *data, const char *stage, int layer, const float *values, int rows, int cols) {
    Seat *mine = (Seat *)data;
    Crew *crew = mine->crew;
    const int cards = (int)crew->seat.size();
    const Model &m = *crew->model;
    std::unique_lock<std::mutex> hold(crew->tapping);
    mine->tapped = {values, rows, cols};
    const int until = crew->taps / cards * cards + cards;
    if (++crew->taps < until) return crew->all_tapped.wait(hold, [&] { return crew->taps >= until; });
    const std::string name = stage;
    const bool keys = (name == "k" && !m.kv_rank) || name == "v";
    std::vector<float> out;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cards; c++) {
            const auto &t = crew->seat[c].tapped;
            const bool again =
                keys && c && (int64_t)c * m.n_kv_heads / cards == (int64_t)(c - 1) * m.n_kv_heads / cards;
            if (c && !keys && name != "q" && name != "attn" && name != "act") continue; /* the same on each */
            if (!again) out.insert(out.end(), t.values + (size_t)r * t.cols, t.values + (size_t)(r + 1) * t.cols);
        }
    crew->limits.tap(crew->limits.tap_data, stage, layer, out.data(), rows, (int)out.size() / rows);
    crew->all_tapped.notify_all();
}

/* The cards that --gpus names: a number of them from the first on, or a list. */
static bool read_list(Crew *crew, Error *e) {
    const char *text = crew->limits.gpus, *at = text;
    int n;
    if (text_whole(text, 1, MAX_GPUS, &n)) {
        for (int i = 0; i < n; i++) crew->devices.push_back(crew->limits.gpu + i);
        return true;
    }
    for (;; at++) {
        char *end;
        const long id = strtol(at, &end, 10);
        if (end == at || id < 0 || (*end && *end != ',') || crew->devices.size() == MAX_GPUS) break;
        crew->devices.push_back((int)id), at = end;
        if (!*at) return true;
    }
    return fail(e, USAGE, "--gpus must be a number of GPUs, at most %d, or a list like 0,3, not '%.40s'", MAX_GPUS,
                text);
}
/* How many cards a model needs; 1 if it is too large for all: opening it then says what is missing. */
static int cards_needed(const Model *m, int first, int there) {
    const uint64_t bytes = one_card.weight_bytes(m), rest = 2ull << 30; /* to work, and for a cache */
    size_t free, total;
    if (there == 1 || cudaSetDevice(first) || cudaMemGetInfo(&free, &total)) return 1;
    for (int n = 1; n <= there - first; n++)
        if (bytes / n + rest <= free && can_be_cut(m, n)) return n;
    return 1;
}
static bool choose_cards(Crew *crew, Error *e) {
    const int first = crew->limits.gpu;
    int there = 0;
    if (crew->limits.gpus && !read_list(crew, e)) return false;
    if (cudaGetDeviceCount(&there)) there = 0;
    const int n = crew->devices.empty() ? cards_needed(crew->model, first, there) : 0;
    for (int i = 0; i < n; i++) crew->devices.push_back(first + i);
    for (int a : crew->devices)
        for (int b : crew->devices) {
            int can = 1;
            if (there && a >= there && crew->devices.size() > 1)
                return fail(e, NO_GPU, "there is no GPU %d here, only 0 to %d: choose with --gpus", a, there - 1);
            if (a != b && (cudaDeviceCanAccessPeer(&can, a, b) || !can)) crew->peers = false;
        }
    const size_t cards = crew->devices.size();
    crew->nccl = cards > 1 && (!crew->peers || (cards > 2 && nccl().there()));
    return true;
}

/* Opens a card with its part. */
static bool open_seat(Crew *crew, Seat &s, int *pages, Error *e) {
    const int n = (int)crew->seat.size();
    Limits limits = crew->limits;
    const int device = crew->devices[s.number];
    const Link link = {n, s.number, crew->peers, crew->nccl,
                       (int)std::count(crew->devices.begin(), crew->devices.end(), device)};
    limits.gpu = device;
    if (limits.tap && n > 1) limits.tap = tap_part, limits.tap_data = &s;
    if (s.number) limits.progress = NULL, limits.allowed = NULL, limits.where = NULL;
    if (n > 1 && !model_part(crew->model, s.number, n, &s.part, e)) return false;
    s.gpu = open_card(n > 1 ? &s.part.model : crew->model, &limits, &link, s.part.first_id, pages, e);
    if (!s.gpu || n == 1) return s.gpu;
    for (int d : crew->devices)
        if (crew->peers && d != device) {
            const cudaError_t error = cudaDeviceEnablePeerAccess(d, 0);
            if (error && error != cudaErrorPeerAccessAlreadyEnabled) CUDA(error);
            cudaGetLastError();
        }
    return clear_inbox(s.gpu, e);
}

/* The cards learn of each other. */
static bool link_cards(Crew *crew, Error *e) {
    const int n = (int)crew->seat.size();
    for (Seat &s : crew->seat) {
        for (Seat &peer : crew->seat) s.gpu->work.link.logits[peer.number] = peer.gpu->work.logits;
        s.gpu->work.allowed = crew->seat[0].gpu->work.allowed;
    }
    if (!crew->nccl) return true;
    if (!nccl().there())
        return fail(e, NO_GPU, "these GPUs need NCCL, and libnccl.so.2 is missing: sudo apt install libnccl2");
    std::vector<void *> comm(n);
    const int code = nccl().init(comm.data(), n, crew->devices.data());
    if (code) return fail(e, GPU_FAULT, "NCCL failed: %s", nccl().error(code));
    for (Seat &s : crew->seat) s.gpu->nccl = comm[s.number];
    return true;
}

static void close(void *state) {
    Crew *crew = (Crew *)state;
    Error e;
    if (crew->seat.size() && (crew->seat.size() == 1 || crew->seat[0].thread.joinable()))
        crew->all(
            [](Seat &s, Error *) {
                if (!s.gpu) return true;
                if (s.number) s.gpu->work.allowed = {};
                if (s.gpu->nccl) nccl().destroy(s.gpu->nccl);
                one_card.close(s.gpu);
                return true;
            },
            &e);
    crew->lock.lock(), crew->over = true, crew->lock.unlock();
    crew->begin.notify_all();
    for (Seat &s : crew->seat) {
        if (s.thread.joinable()) s.thread.join();
        model_part_free(&s.part);
    }
    delete crew;
}

static void *open(const Model *m, const Limits *limits, int *pages, Error *e) {
    Crew *crew = new Crew;
    crew->model = m, crew->limits = *limits;
    bool ok = choose_cards(crew, e);
    const int n = ok ? (int)crew->devices.size() : 0;
    std::vector<int> fit(n, *pages);
    crew->seat.resize(n);
    for (int i = 0; i < n; i++) {
        crew->seat[i].crew = crew, crew->seat[i].number = i;
        if (n > 1) crew->seat[i].thread = std::thread([crew, i] { crew->work(crew->seat[i]); });
    }
    ok = ok && crew->all([&](Seat &s, Error *e) { return open_seat(crew, s, &fit[s.number], e); }, e) &&
         link_cards(crew, e) && crew->all([](Seat &s, Error *e) { return prepare_card(s.gpu, e); }, e);
    if (!ok) return close(crew), nullptr;
    *pages = *std::min_element(fit.begin(), fit.end());
    if (n > 1 && limits->where) {
        const std::string first = limits->where;
        snprintf(limits->where, 64, "%d GPUs%s, each as %s", n, crew->peers ? "" : " without peer access",
                 first.c_str());
    }
    return crew;
}

static bool submit(void *state, const Batch *b, Error *e) {
    Crew *crew = (Crew *)state;
    /* To free memory CUDA waits for cards, which may wait for others: so it is done before any begins. */
    const bool fit = logits_fit(crew->seat[0].gpu, b);
    return (fit || crew->all([=](Seat &s, Error *e) { return reserve_logits(s.gpu, b, e); }, e)) &&
           crew->all([=](Seat &s, Error *e) { return one_card.submit(s.gpu, b, e); }, e);
}
static bool collect(void *state, Result *result, Error *e) {
    Crew *crew = (Crew *)state;
    if (!crew->all([](Seat &s, Error *e) { return one_card.collect(s.gpu, &s.result, e); }, e)) return false;
    *result = crew->seat[0].result;
    result->gpus = (int)crew->seat.size();
    for (const Seat &s : crew->seat) {
        result->busy[s.number] = s.result.seconds;
        result->seconds = std::max(result->seconds, s.result.seconds);
    }
    return true;
}
static double flat_read(void *state, uint64_t bytes) {
    Crew *crew = (Crew *)state;
    double seconds = 0;
    Error e;
    auto read = [&](Seat &s, Error *) {
        const double mine = one_card.flat_read(s.gpu, bytes / crew->seat.size());
        if (!s.number) seconds = mine;
        return true;
    };
    return crew->all(read, &e), seconds;
}
static uint64_t experts_read(void *state) { return one_card.experts_read(((Crew *)state)->seat[0].gpu); }
static uint64_t weight_bytes(const Model *m) { return one_card.weight_bytes(m); }
static void describe(Devices *d) {
    one_card.describe(d);
    for (int i = 0; i < d->gpus; i++)
        for (int k = 0; k < d->gpus; k++) {
            int can = 0;
            if (i != k && !cudaDeviceCanAccessPeer(&can, i, k) && can) d->gpu[i].peers++;
        }
    if (d->gpus > 1 && nccl().there()) nccl().version(&d->nccl);
}
} // namespace gpus

const Backend cuda = {"cuda",
                      8192,
                      gpus::open,
                      gpus::submit,
                      gpus::collect,
                      gpus::close,
                      gpus::flat_read,
                      gpus::experts_read,
                      gpus::weight_bytes,
                      gpus::describe};
