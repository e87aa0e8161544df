/* card.cuh: what lies on the card: weights, the description of a step, and the buffers that kernels work in. card.cu
 * takes the memory and brings the weights there, infer.cu computes. */
#ifndef CARD_CUH
#define CARD_CUH

#include "infer.h"

#include <array>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <map>
#include <vector>

typedef __nv_bfloat16 bf16;
typedef __half f16;

constexpr int TILE = 16;  /* rows of a matrix that a warp multiplies at once: m of mma.m16n8k16 ... */
constexpr int CHUNK = 64; /* ... and columns of them that it reads at once */
/* Of Encoding<MXFP4> in infer.cu: bytes of a chunk, what is added to a scale, the max scale. */
constexpr int FP4_CHUNK = 544, FP4_SCALE = 26, MAX_FP4_SCALE = 154;
/* Sixteen e2m1 values are packed in two words so that few operations turn them into bf16 times 2^-126 (fp4_to_bf16 in
 * infer.cu; fp4_pack in card.cu is its inverse). A mask selects a pair of values, one in each half of the word:
 * the sign at bit 15, the magnitude at bits 8 to 6, the even column in the lower half. A word gives three pairs: masked
 * as it is, rotated right by 6, and shifted left by 4. That leaves 8 bits of each word free (FP4_REST). They are set so
 * that the first word plus four times the second, one multiply-add, gives the two pairs that are missing. */
constexpr uint32_t FP4_MASK = 0x81C081C0, FP4_REST = 0x06030603;

/* Types of rooms lie on the card as codes of a few bits: a chunk of a tile takes coded_chunk() bytes, and chunk_words()
 * words scale a row of it. */
__host__ __device__ constexpr bool is_coded(Type t);
__host__ __device__ constexpr int chunk_words(Type t);
__host__ __device__ constexpr int coded_chunk(Type t);

/* A Linear on the card: n matrices, with rows padded to whole tiles and columns to whole chunks with zero bytes, which
 * are weights of 0. What multiplies them may be any number, but no NaN. BF16, F16 and F32 lie row by row as in the
 * file, other types tile by tile and inside a tile chunk by chunk. */
struct Matrix {
    uint8_t *data;
    float *bias; /* (n, rows) or NULL */
    Type type;
    int rows, cols, n;
    int stride;   /* columns with padding */
    size_t bytes; /* of one matrix */
    __host__ __device__ int tiles() const { return (rows + TILE - 1) / TILE; }
    __host__ __device__ uint8_t *chunk(int matrix, int row, int column, int chunk_bytes) const {
        return data + matrix * bytes + ((size_t)(row / TILE) * (stride / CHUNK) + column / CHUNK) * chunk_bytes;
    }
};

struct DeviceLayer { /* a Layer on the card; the halves of each head of q, k and their norms are interleaved */
    float *attn_norm, *attn_post_norm, *ffn_norm, *ffn_post_norm, *q_norm, *k_norm, *sinks, *choice_bias;
    float *q_a_norm, *kv_a_norm;
    Matrix qkv;           /* query, key, value; with latent attention query (or q_a) and kv_a */
    Matrix q, k_up, v_up; /* with latent attention only; k_up is transposed */
    Matrix o, router, down, shared_down;
    Matrix up, shared_up; /* gate and up, alternating */
    int window;
    const float2 *cos_sin; /* (context, rope_dim / 2) cos and sin */
};

struct DeviceModel {
    std::vector<DeviceLayer> layer;
    Matrix embed, head;
    int first_id; /* of the head's rows */
    float *norm;
};

/* Hands out pieces of the card's memory; with base NULL it only counts. */
struct Plan {
    uint8_t *base;
    size_t used;
    template <typename T> T *take(size_t n) {
        size_t at = used;
        used += (n * sizeof(T) + 255) / 256 * 256;
        return base ? (T *)(base + at) : NULL;
    }
};

/* Where the rows of a Linear go in a Matrix. First the two halves of each head, of `half` rows each, are interleaved
 * (half 0: they are not). Then row r goes to first + step * r. */
struct Rows {
    int first, step, half;
    bool columns; /* a row becomes a column */
    __host__ __device__ int of(int r) const {
        int i = half ? r % (2 * half) : 0;
        if (half) r = r - i + (i < half ? 2 * i : 2 * (i - half) + 1);
        return first + step * r;
    }
};

/* ---- a step ---- */

constexpr int MAX_DECODE = 16;                  /* up to this many tokens a step streams all weights but F32 */
constexpr int MAX_SPLITS = 32, SPLIT_PAGES = 4; /* max blocks that share a context, min pages of each */

/* What a step does, as the kernels read it. */
struct Step {
    Sampling *how;       /* (seqs) */
    int4 *token;         /* (tokens) id, or -1: the token that its slot drew last; the slot; its place in page_token */
    int *seq, *position; /* (tokens) */
    int *slot, *last;    /* (seqs) as in Batch; its last token in this step, or -1: draw nothing */
    int *row;            /* (rows) tokens whose logits are wanted */
    int *query;          /* (queries) tokens that attention handles one by one ... */
    int *tile;           /* (tiles, 2) ... and first token and count of each tile */
    int *header;         /* (4) [0] columns of `page`; [1] which of the three results receives this step's tokens */
    int *page;           /* (seqs, header[0]) */
};
/* Lays out a Step of `tokens` tokens from `base` on. The pages come last. */
Step step_at(uint8_t *base, int tokens);

/* The card's place among those that share a model (gpus/). Each has a shard of the matrices, and what they add to the
 * residual stream is summed over all; x, norms and choices are the same on each. */
struct Link {
    int cards, card;  /* how many; which one this is. Alone: 1, 0 */
    bool peers;       /* they reach each other's memory */
    int cards_on_gpu; /* tests run several on one GPU; each has its part of the blocks */
    void *comm;       /* NCCL's communicator, where it is needed: for sums of many rows or, without peers, for all */
    bool rounds;      /* sums of many rows are sent as bf16 */
    int *dead;        /* 1: another card has failed */
    int parity;       /* which of two inboxes is in use; -1: NCCL has made the sum */
    float *logits[MAX_GPUS]; /* each card's w.logits, in front of what follows: see on_card() */
    uint8_t *inbox;          /* (2, inbox_bytes) for partial sums: (cards - 1, rows, dim / 2) pairs */
    size_t inbox_bytes;
    unsigned long long *decode_o, *decode_down; /* fast/: (2, MAX_DECODE, dim / 2) pairs; (2, MAX_DECODE, dim) sums */
    int key_rows;
    unsigned long long *keys;               /* (2, cards, key_rows) what the cards have drawn */
    unsigned long long *arrived, *barriers; /* (cards) barriers that each card has come to; (1) this one */
    float *reduced;                         /* (tokens, dim) for NCCL */
};

struct Job { /* choices order[first .. first + n) belong to this expert */
    int expert, first, n;
};

/* Sizes and buffers that kernels need; passed by value. */
struct Work {
    int dim, ffn_dim, vocab, n_layers, n_heads, n_kv_heads, head_dim, n_experts, top_k, layer;
    int v_dim, rope_dim, kv_rank;
    float eps, act_limit, embed_scale, attn_scale, attn_cap, logit_cap;
    Act act;
    Route route;
    bf16 *cache;     /* (pages, n_layers, 2, n_kv_heads, head_dim * PAGE), of latents (pages, n_layers, cache_row *
                        PAGE): see key_place(), value_place() */
    int *page_token; /* (pages, PAGE) */
    const float2 *cos_sin[2]; /* (context, rope_dim / 2), of Model's ropes */
    float *x;                 /* (tokens, dim) residual stream */
    void *normed;         /* (tokens, normed_pitch) after a norm; normed, attn and act_out: in the next matrix's type */
    float *normed_f32;    /* the same for matrices in F32: their halves, read as bf16, could be NaNs */
    float *projected;     /* (tokens, rows) results of qkv, or of gate and up */
    void *q;              /* (tokens, n_heads * head_dim), with latents (tokens, n_heads, cache_row()); bf16, or
                             float for F32 weights */
    void *attn, *act_out; /* (tokens, attn_pitch), (tokens * top_k, act_pitch) */
    void *q_low, *q_nope, *latents; /* latent attention: (tokens, q_low_pitch), (tokens * n_heads, ...) twice */
    int q_low_pitch, nope_pitch, latent_pitch;
    int *head_order, *head_jobs; /* like order, job and jobs, for products with a matrix a head */
    Job *head_job;
    float *down;   /* (tokens * top_k, dim) */
    float *shared; /* (tokens, dim) what the shared expert adds, or NULL: it is in x */
    int normed_pitch, attn_pitch, act_pitch;
    float *router;                    /* (tokens, n_experts) */
    int *expert;                      /* (tokens, top_k) */
    float *weight;                    /* (tokens, top_k) */
    int *order;                       /* (tokens * top_k) choices by expert: token * top_k + k */
    Job *job;                         /* (jobs[0]) */
    int *jobs, *routed;               /* how many; blocks of route() that have ended */
    unsigned long long *experts_read; /* see Backend::experts_read */
    float *partial;    /* (queries, n_kv_heads * head_parts(), splits, 8, head_dim + 2); with latents (tokens,
                          latent_parts(), splits, LATENT_HEADS, kv_rank + 2) */
    int *attended;     /* (queries, n_kv_heads * head_parts()) or (tokens, latent_parts()) splits that have ended */
    float *logits;     /* (logit_rows, vocab) */
    int first_id, ids; /* the logits that a draw looks at */
    float *floor;      /* (logit_rows) the smallest scaled logit that top-k, top-p and min-p keep */
    unsigned long long *best;   /* (logit_rows) */
    int *drawing;               /* (logit_rows) blocks that have drawn */
    Bias *bias;                 /* (slots, MOST_BIASES) */
    uint32_t *count;            /* (slots, vocab) 0 outside of adjust() */
    Allowed allowed;            /* Limits' */
    int slots, *drawn, *result; /* (slots); (3, slots) in the host's memory ... */
    int *late;                  /* ... and there, too: what a kernel waited for in vain (Late), or 0 */
    Link link;
};
enum Late { LATE_MASK = 1, LATE_CARD }; /* the tokens that a draw may draw; another card */
/* How many blocks of attention share a key/value head that `group` query heads use. */
__host__ __device__ inline int head_parts(int group) { return (group + 7) / 8; }
/* Latent attention: query heads of a block, and how many blocks share a token. */
constexpr int LATENT_HEADS = 16;
inline int latent_parts(int n_heads) { return (n_heads + LATENT_HEADS - 1) / LATENT_HEADS; }
/* Elements of a position and layer in the cache. */
__host__ __device__ inline int cache_row(const Work &w) {
    return w.kv_rank ? w.kv_rank + w.rope_dim : 2 * w.n_kv_heads * w.head_dim;
}
/* Elements of a page. */
__host__ __device__ inline size_t page_size(const Work &w) { return (size_t)w.n_layers * cache_row(w) * PAGE; }

struct Pending {                           /* a step that was submitted; buffers are pinned */
    cudaEvent_t begun = NULL, done = NULL; /* on the card */
    uint8_t *staged = NULL;                /* what goes to the card: a Step, and from Gpu::step_bytes on biases */
    Step step;                             /* the same, part by part */
    int *token;                            /* (slots) in Work's result */
    float *logits = NULL;                  /* (rows, vocab) that the caller requested */
    int rows = 0, room = 0;                /* room: rows that have memory */
};

namespace fast {
struct State;
}

struct Gpu {
    Model model;
    Limits limits;
    DeviceModel device = {};
    Work work = {};
    int sms, max_pages;
    int launch_arch;        /* 90 or more: the code that runs has dependent launch */
    int shared;             /* bytes of shared memory that a block can have */
    int logit_rows;         /* rows of logits that there is room for */
    bool lean;              /* no F32 weights: activations take two bytes */
    uint8_t *memory = NULL; /* weights, then room to work, then the cache */
    size_t weight_bytes, step_bytes;
    uint8_t *step;          /* (step_bytes) room for a Step */
    std::vector<Bias> bias; /* Work's as it lies on the card */
    cudaStream_t stream = NULL;
    std::map<std::array<int, 3>, cudaGraphExec_t> graph; /* by tokens, pages and sampling */
    Pending pending[3]; /* [turn % 3] is next; the one before the oldest outstanding holds the last result */
    unsigned turn = 0;
    int outstanding = 0;
    unsigned reductions = 0;  /* sums over all cards, so far */
    bool rehearses = false;   /* see rehearse() */
    fast::State *fast = NULL; /* the annex, or NULL */
    bool has_decode = false;  /* it computes this model's decode steps ... */
    bool decodes = false;     /* ... and this step, except embedding and draw */
};

/* Limits of the kernels: experts that route() can sort, and values of a row that a block can hold. */
constexpr int MAX_EXPERTS = 1024, MAX_PAIRS = 4, MAX_DIM = 2 * MAX_PAIRS * 1024;

/* A step as the host sees it while it is being computed. */
struct Pass {
    Gpu *gpu;
    Work w;
    Step s;
    const Batch *batch;
    int tokens, rows, queries, tiles; /* rows of logits; queries and tiles as in Step */
    int pages, splits;                /* of the longest context; max splits of a context */
    bool alone;                       /* no token sees another of the same step */
    int keep;                         /* rows whose logits somebody wants */
    bool adjusted, filtered;          /* before the draw */
    bool has_logits;                  /* w.logits are there before head() */
};

/* ---- infer.cu: what a step computes ---- */

/* forward: w.x after all layers. head: w.logits of the rows `first` to `first` + n - 1 that are wanted. draw_tokens: a
 * token from each, to w.drawn and w.result. They only launch kernels, and return false after an error. */
bool forward(Pass *a, Error *e);
bool head(Pass *a, int first, int n, Error *e);
bool draw_tokens(const Pass *a, int first, int n, Error *e);
/* Tokens of a prompt that attention takes at once; 0: it takes them one by one. */
int tile_tokens(const Pass *a);

/* ---- sockets: what rooms do; extensions.cuh includes them, and answers for those that are missing ---- */

struct Source;
struct Walk;

/* Types of rooms. For card.cu: the type on the card for a Linear, or for two that share a Matrix (BF16 if there is no
 * other); can coded_weight() read this type. */
Type coded_type(const Linear &w);
Type common_code(Type a, Type b);
bool reads_one(Type t);
/* Stores four neighbouring weights of a row, and the word of their columns if they are its first. */
__device__ inline void place_codes(const Source &s, const Matrix &m, int row, int to, int c, const Weight (&w)[4]);
/* For infer.cu: a weight, and a matrix as bf16. */
__device__ inline float coded_weight(const Matrix &m, size_t row, int column);
cudaError_t decode_matrix(const Gpu *gpu, const Matrix &m, bf16 *to);

/* Latent attention. check: what its kernels rely on. load: the matrices of a layer that plain attention has not. plan:
 * lays out buffers; *contexts and *partial become those of Work's attended and partial. */
bool check_latent(const Model &m, Error *e);
void load_latent(Walk *walk, const Layer &l, DeviceLayer *d);
void plan_latent(Gpu *gpu, Plan *p, size_t *contexts, size_t *partial);

/* The annex, fast/. open: makes Gpu::fast, unless --plain is given, and sets Gpu::has_decode. plan: lays out its
 * buffers. prepare: fills them once the weights are loaded. infer.cu declares what a step asks of it. */
namespace fast {
bool open(Gpu *gpu, Error *e);
void plan(Gpu *gpu, Plan *p);
bool prepare(Gpu *gpu, Error *e);
void close(Gpu *gpu);
/* Up to MAX_DECODE tokens, from the Step as it lies in the host's memory to the logits of its rows. */
bool decode(Pass *a, uint8_t *staged, Error *e);
} // namespace fast

/* Several cards, gpus/. plan: lays out Link, behind w.logits. begin_sum: in front of a kernel that calls all_reduce(),
 * whose arguments it may change. gather_logits: before a draw; then all logits of n rows are on each card, or draw()
 * compares what each has drawn from its own. */
namespace gpus {
void plan(Gpu *gpu, Plan *p);
bool begin_sum(const Pass *a, Work *w, int *top_k, const float **weights, Error *e);
bool gather_logits(Pass *a, int first, int n, Error *e);
bool load_kernels(Error *e); /* CUDA loads a kernel when it is first launched, and may wait then for all that runs */
/* to (n) = the sum of all cards' `from`. */
bool nccl_all_reduce(const Gpu *gpu, const float *from, float *to, size_t n, Error *e);
} // namespace gpus

/* For gpus/: one card, and how it opens a model, or a part of it: takes memory and, once all have it, loads weights. */
extern const Backend one_card;
Gpu *open_card(const Model *m, const Limits *limits, const Link *link, int first_id, int *pages, Error *e);
bool prepare_card(Gpu *gpu, Error *e);
/* Computes a step without sums over all cards, draws and taps, so that what CUDA and cuBLAS load for it is there: to
 * load, they may wait for all cards, and so must not while one waits for another. */
bool rehearse(Gpu *gpu, const Batch *b, Error *e);
/* Takes pinned memory for the logits that a batch requests; submit calls it, too. */
bool reserve_logits(Gpu *gpu, const Batch *b, Error *e);

/* Describes a CUDA error in *e, with its exit code; always false. */
bool cuda_failed(Error *e, cudaError_t error, const char *what);
#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess) return cuda_failed(e, error_, #call);                                               \
    } while (0)

#endif
