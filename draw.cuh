/* draw.cuh: from logits to a token, on the card: repetition penalty, temperature, top-k, top-p, min-p and the draw,
 * with the operations of sampling.h, so that the same logits give the same token as in C. Included by infer.cu. A row
 * is a token whose logits are wanted: number s.row[row] of the step. */

/* Limits logits smoothly to between -cap and cap. */
__global__ void __launch_bounds__(1024) cap_logits(Work w) {
    launch_next();
    wait_previous();
    const int id = blockIdx.x * blockDim.x + threadIdx.x;
    float *logit = w.logits + (size_t)blockIdx.y * w.vocab + id;
    if (id < w.vocab) *logit = capped(*logit, w.logit_cap);
}

/* For each row with a repetition penalty, marks the tokens of its sequence. One block a row. */
__global__ void __launch_bounds__(256) mark_seen(Work w, Step s) {
    launch_next();
    wait_previous();
    int row = blockIdx.x, seq = s.seq[s.row[row]], words = (w.vocab + 31) / 32;
    if (s.how[seq].penalty == 1) return;
    for (int i = threadIdx.x; i < words; i += blockDim.x) w.seen[(size_t)row * words + i] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p <= s.position[s.row[row]]; p += blockDim.x) {
        int id = w.page_token[(size_t)page_of(s, seq, p) * PAGE + p % PAGE];
        atomicOr(&w.seen[(size_t)row * words + id / 32], 1u << id % 32);
    }
}

/* The logit x of a token after penalty and temperature. */
__device__ inline float scaled(const Work &w, const Sampling &how, int row, int id, float x) {
    if (how.penalty != 1 && w.seen[(size_t)row * ((w.vocab + 31) / 32) + id / 32] >> id % 32 & 1)
        x = penalize(x, how.penalty);
    return how.temperature > 0 ? x / how.temperature : x;
}
__device__ inline float scaled(const Work &w, const Sampling &how, int row, int id) {
    return scaled(w, how, row, id, w.logits[(size_t)row * w.vocab + id]);
}

/* The smallest scaled logit that top-k, top-p and min-p keep in the draw, to w.floor. Radix select finds it byte by
 * byte of its order_key, from the highest: a bin for each value of the byte. One block a row. */
__global__ void __launch_bounds__(1024) filter(Work w, Step s) {
    __shared__ unsigned low[256], high[256], prefix, largest; /* low, high: halves of the 64-bit bins */
    __shared__ unsigned long long above;                      /* what keys above the prefix add up to */
    launch_next();
    wait_previous();
    int row = blockIdx.x, seq = s.seq[s.row[row]];
    Sampling how = s.how[seq];
    if (threadIdx.x == 0) largest = 0, w.floor[row] = -INFINITY;
    __syncthreads();
    if (how.temperature == 0 || (how.top_k <= 0 && how.top_p >= 1 && how.min_p <= 0)) return;
    for (int i = threadIdx.x; i < w.vocab; i += blockDim.x) {
        float x = scaled(w, how, row, i);
        if (!isnan(x)) atomicMax(&largest, order_key(x));
    }
    __syncthreads();
    float max = key_value(largest), floor = -INFINITY;
    for (int pass = 0; pass < 2; pass++) { /* top-k counts, top-p adds masses */
        bool counts = pass == 0;
        if (counts ? how.top_k <= 0 || how.top_k >= w.vocab : how.top_p >= 1) continue;
        unsigned long long need = how.top_k;
        if (threadIdx.x == 0) prefix = 0, above = 0;
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (int i = threadIdx.x; i < 256; i += blockDim.x) low[i] = high[i] = 0;
            __syncthreads();
            unsigned fixed = shift == 24 ? 0 : ~0u << (shift + 8);
            for (int i = threadIdx.x; i < w.vocab; i += blockDim.x) {
                float x = scaled(w, how, row, i);
                unsigned key = order_key(x);
                if (isnan(x) || (key & fixed) != prefix || !(x >= floor)) continue;
                unsigned long long add = counts ? 1 : mass(x, max);
                unsigned bin = key >> shift & 255, before = atomicAdd(&low[bin], (unsigned)add),
                         more = (unsigned)(add >> 32) + (before + (unsigned)add < before);
                if (more) atomicAdd(&high[bin], more);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                auto bin = [&](int i) { return (unsigned long long)high[i] << 32 | low[i]; };
                if (!counts && shift == 24) {
                    unsigned long long all = 0;
                    for (int i = 0; i < 256; i++) all += bin(i);
                    need = top_p_mass(all, how.top_p);
                }
                int digit = 255;
                for (; digit > 0 && above + bin(digit) < need; digit--) above += bin(digit);
                prefix |= (unsigned)digit << shift;
            }
            __syncthreads();
        }
        floor = fmaxf(floor, key_value(prefix));
        __syncthreads();
    }
    if (how.min_p > 0) floor = fmaxf(floor, min_p_floor(max, how.min_p));
    if (threadIdx.x == 0) w.floor[row] = floor;
}

/* Draws a token for each row (blockIdx.y): the largest scaled logit plus noise, over all blocks. The block that
 * finishes last stores it. A NaN beats everything. */
__global__ void __launch_bounds__(1024) draw(Work w, Step s, bool filtered) {
    __shared__ unsigned long long best[32];
    launch_next();
    int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = s.row[row], seq = s.seq[t], position = s.position[t];
    Sampling how = s.how[seq];
    wait_previous();
    if (t != s.last[seq]) return;
    float floor = filtered ? w.floor[row] : -INFINITY;
    unsigned long long mine = 0;
    constexpr int AHEAD = 8; /* loads in flight */
    int threads = gridDim.x * blockDim.x;
    for (int first = blockIdx.x * blockDim.x + threadIdx.x; first < w.vocab; first += AHEAD * threads) {
        float logit[AHEAD];
        for (int i = 0; i < AHEAD; i++)
            logit[i] = w.logits[(size_t)row * w.vocab + min(first + i * threads, w.vocab - 1)];
        for (int i = 0; i < AHEAD; i++) {
            int id = first + i * threads;
            if (id >= w.vocab) break;
            float x = scaled(w, how, row, id, logit[i]);
            unsigned long long key = ~0ull;
            if (!isnan(x))
                key = x >= floor ? draw_key(how.temperature > 0 ? x + token_noise(how.seed, position + 1, id) : x, id)
                                 : 0;
            if (key > mine) mine = key;
        }
    }
    mine = warp_max(mine);
    if (lane == 0) best[warp] = mine;
    __syncthreads();
    if (warp == 0) mine = warp_max(lane < blockDim.x / 32 ? best[lane] : 0);
    if (threadIdx.x == 0) atomicMax(&w.best[row], mine);
    if (!last_block(w.drawing + row, gridDim.x) || threadIdx.x) return;
    mine = atomicExch(&w.best[row], 0);
    int token = mine == ~0ull ? DREW_NAN : draw_id(mine);
    w.drawn[s.slot[seq]] = token;                  /* for the next step */
    w.result[s.header[1] * w.slots + seq] = token; /* for the host */
}
