/* infer.h: the border between C and CUDA, nothing else. The C side (infer.c) turns files into a Model and conversations
 * into Batches. A Backend (infer.cu, and tests/reference.c in plain C) uploads the Model and computes the Batches.
 * Fusing two kernels, or splitting one, never touches this file.
 *
 * Arrays are row-major; their shape follows in a comment. What a model does not have is NULL or 0, and its step is
 * skipped: no code behind this border asks which family a model is. */
#ifndef INFER_H
#define INFER_H

#include "base.h"
#include "sampling.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PAGE = 64 }; /* tokens in one page of the key/value cache, all layers */
enum { MAX_GPUS = 16 };

/* ---- types: how the bytes of a matrix encode weights ---- */

typedef int Type;
typedef struct { /* the weight is a (q - zero) + b: q is its code, a comes from the scales, b from minima */
    float q, zero, a, b;
} Weight;

/* A type is a row of CORE_TYPES or of a room's list: its name and these columns. */
typedef struct {
    const char *name, *dtype; /* dtype: of its tensors, as safetensors spells it */
    int values, bytes;        /* in a block, whose bytes lie together */
    int bits, zero;           /* of a code; the middle of unsigned codes, their zero unless the file has others */
    int columns;              /* of a line of its tensor, which crosses all rows; 0: a line is a row */
    Type card;                /* how its codes lie on the card */
    Weight (*weight)(const unsigned char *block, int i); /* number i of a block, without the matrix's own scales */
    /* For made-up weights: stores x as a block of one value, or as the scale of a block of random bytes. NULL: it has
     * none, and any bytes are codes. */
    void (*put)(unsigned char *block, float x);
} TypeInfo;
extern const TypeInfo types[]; /* by Type; extensions.c */
extern const int types_n;

BOTH uint16_t half_at(const unsigned char *p) { return (uint16_t)(p[0] | p[1] << 8); }
BOTH uint32_t word_at(const unsigned char *p) { return half_at(p) | (uint32_t)half_at(p + 2) << 16; }
BOTH int nibble_at(const unsigned char *data, int i) { return data[i / 2] >> i % 2 * 4 & 15; }

BOTH Weight coded(float q, float a, float b) {
    const Weight w = {q, 0, a, b};
    return w;
}
BOTH float f16_value(uint16_t h) {
    const uint32_t bits = (uint32_t)(h & 0x8000) << 16 | (uint32_t)(h & 0x7FFF) << 13; /* its exponent is 112 too low */
    return (h & 0x7C00) == 0x7C00 ? bits_float(bits | 0x7F800000) : bits_float(bits) * 0x1p112f;
}
BOTH float e2m1_value(int nibble) {
    static const float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
}
BOTH float e8m0_value(int e) { return e == 255 ? NAN : bits_float(e ? (uint32_t)e << 23 : 1u << 22); }

BOTH Weight bf16_weight(const unsigned char *x, int i) { return coded(bits_float((uint32_t)half_at(x) << 16), 1, 0); }
BOTH Weight f16_weight(const unsigned char *x, int i) { return coded(f16_value(half_at(x)), 1, 0); }
BOTH Weight f32_weight(const unsigned char *x, int i) { return coded(bits_float(word_at(x)), 1, 0); }
BOTH Weight e2m1_weight(const unsigned char *x, int i) { return coded(e2m1_value(nibble_at(x, i)), 1, 0); }
BOTH Weight e8m0_weight(const unsigned char *x, int i) { return coded(e8m0_value(*x), 1, 0); }

/* The bits of |x| as a small float: its mantissa has `bits`, and 2^(least - 1) is its least normal number. */
BOTH int small_float(float x, int bits, int least) {
    int e;
    if (frexpf(x, &e) == 0 || e < least) e = least;
    return ((e - least) << bits) + (int)rintf(ldexpf(fabsf(x), bits + 1 - e));
}
BOTH void put_half(unsigned char *x, int h) { x[0] = (unsigned char)h, x[1] = (unsigned char)(h >> 8); }
BOTH void put_bf16(unsigned char *x, float value) { put_half(x, (int)(float_bits(value) >> 16)); }
BOTH void put_f16(unsigned char *x, float value) {
    put_half(x, small_float(value, 10, -13) | (value < 0 ? 0x8000 : 0));
}
BOTH void put_f32(unsigned char *x, float value) { memcpy(x, &value, sizeof value); }
BOTH void put_e8m0(unsigned char *x, float value) { *x = (unsigned char)(127 + (int)rintf(log2f(value))); }

/* clang-format off */
/*      type   dtype values bytes bits zero columns card weight put */
#define CORE_TYPES(ROW)                                                                                                \
    ROW(BF16, "BF16", 1, 2, 16, 0, 0, BF16, bf16_weight, put_bf16)                                                     \
    ROW(F16, "F16", 1, 2, 16, 0, 0, F16, f16_weight, put_f16)                                                          \
    ROW(F32, "F32", 1, 4, 32, 0, 0, F32, f32_weight, put_f32)                                                          \
    ROW(MXFP4, "U8", 32, 16, 4, 0, 0, MXFP4, e2m1_weight, NULL) /* OCP Microscaling Formats 1.0; scales of E8M0 */     \
    ROW(E8M0, "F8_E8M0", 1, 1, 8, 0, 0, BF16, e8m0_weight, put_e8m0) /* in grids only: 2^(e - 127); 255 is NaN */
/* clang-format on */
#define TYPE_NAME(type, ...) type,
#define TYPE_ROW(type, dtype, values, bytes, bits, zero, columns, card, weight, put, ...)                              \
    {#type, dtype, values, bytes, bits, zero, columns, card, weight, put},
enum {
    CORE_TYPES(TYPE_NAME) FIRST_ROOM_TYPE, /* rooms add types of their own from here on */
    MAX_TYPES = 64,
    NO_TYPE = -1 /* in place of a type: any, or unknown */
};

/* Lines inside a checked range of a file: line i is at data + i * stride. A line is a row; in GPTQ it is a row of
 * words, in AWQ a column, in a transposed grid a group of columns. A slice of a fused tensor is a view with a larger
 * stride; in GPTQ and AWQ a head's rows are a part of each line. Data may lie at any alignment. */
typedef struct {
    const unsigned char *data; /* as mapped */
    int fd;                    /* the same bytes for pread, from `offset` on */
    int lines;
    size_t offset, bytes, stride; /* bytes: of a line's own values */
    size_t step; /* 0, or a line is a column of the matrix, and so far apart are its values, blocks of one */
} View;

/* Scales or zeros of a matrix, encoded and addressed like a matrix of this type: weight [r, c] uses entry [r / rows, c
 * / cols], or [c / cols, r / rows] if transposed. */
typedef struct {
    Type type;
    int rows, cols; /* rows and columns of the matrix that share an entry; 0: no grid */
    bool transposed;
} Grid;

typedef struct { /* one matrix of a Linear, exactly as its file encodes it */
    View data, scale, zero;
    float factor;      /* multiplies the entries of scale */
    const int *group;  /* (cols) or NULL: the grids' column for each column, instead of c / cols */
    const float *bias; /* (rows) or NULL */
} Stored;

typedef struct { /* y = W x + bias */
    Type type;
    int rows, cols, n;  /* n matrices (rows, cols); n > 1: one per expert or head. rows 0: this step does not exist */
    Grid scale;         /* MXFP4: e8m0, 1 by 32; NVFP4: e4m3, 1 by 16; other types: as in the file */
    Grid zero;          /* PACKED, GPTQ, AWQ and some INT8; an entry has as many columns as one of scale */
    bool zero_plus_one; /* a zero is (entry + 1) mod 2^bits: GPTQ's first convention */
    const Stored *each; /* (n) all have a bias or none has */
} Linear;

/* Code [row, column] of a matrix of this type, or an entry of a grid. */
BOTH Weight code_at(const TypeInfo *type, const View *v, int row, int column) {
    const int values = type->values, columns = type->columns, rows = columns ? values / columns : 1; /* of a block */
    if (v->step) return type->weight(v->data + (size_t)column * v->stride + (size_t)row * v->step, 0);
    if (!columns)
        return type->weight(v->data + (size_t)row * v->stride + (size_t)(column / values) * (size_t)type->bytes,
                            column % values);
    return type->weight(v->data + (size_t)(column / columns) * v->stride + (size_t)(row / rows) * (size_t)type->bytes,
                        row % rows * columns + column % columns);
}
BOTH float entry_at(const TypeInfo *types, const Grid *g, const View *v, int row, int group) {
    row /= g->rows;
    return code_at(types + g->type, v, g->transposed ? group : row, g->transposed ? row : group).q;
}
/* Weight [row, column] of one matrix of w. A GPU has a copy of types[]. */
BOTH Weight weight_at(const TypeInfo *types, const Linear *w, const Stored *one, int row, int column) {
    const TypeInfo *type = types + w->type;
    Weight x = code_at(type, &one->data, row, column);
    if (!w->scale.rows) return x;
    const int group = one->group ? one->group[column] : column / w->scale.cols;
    x.a = entry_at(types, &w->scale, &one->scale, row, group) * one->factor;
    x.zero = w->zero.rows ? entry_at(types, &w->zero, &one->zero, row, group) : (float)type->zero;
    if (w->zero_plus_one) x.zero = fmodf(x.zero + 1, (float)(1 << type->bits));
    return x;
}

typedef struct {           /* angles of one kind of layer */
    const float *inv_freq; /* (rope_dim / 2) per position, all scaling (YaRN, llama3) folded in */
    float scale;           /* multiplies cos and sin (YaRN's attention factor), else 1 */
} Rope;

/* One transformer block. Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) caches one row of kv_rank + rope_dim a
 * token: the latent and a rope key that all heads share. Key head h is [k_up[h] latent, rope key], value head h is
 * v_up[h] latent. So q . k = (k_up[h]^T q) . latent + the product of the rope parts, and sum p v = v_up[h] (sum p
 * latent). */
typedef struct {
    const float *attn_norm, *ffn_norm;           /* (dim) */
    const float *attn_post_norm, *ffn_post_norm; /* (dim) norm results before they are added to x, or NULL */
    const float *q_norm, *k_norm;                /* (head_dim) RMSNorm of each head before RoPE, or NULL */
    const float *sinks; /* (n_heads) or NULL: one logit a head that joins the softmax but has no value */
    Linear q, k, v, o;  /* (n_heads * head_dim, dim), (n_kv_heads * head_dim, dim) twice, (dim, n_heads * v_dim) */
    Linear q_a, kv_a;   /* latent: (q_rank, dim), whose result q reads, or absent; (kv_rank + rope_dim, dim) */
    Linear k_up, v_up;  /* latent, instead of k and v: n_heads times (head_dim - rope_dim, kv_rank), (v_dim, kv_rank) */
    const float *q_a_norm, *kv_a_norm; /* (q_rank) norms q_a's result; (kv_rank) norms the latent, kv_a's first rows */
    Linear router;                     /* (n_experts, dim), or absent: a dense layer, which has one expert */
    const float *choice_bias;          /* (n_experts) added to the scores for the choice only, or NULL */
    Linear gate, up, down;             /* one per expert, or one if dense: (width, dim) twice, (dim, width) */
    Linear shared_gate, shared_up, shared_down; /* an expert of weight 1 for every token, or absent */
    int window;       /* positions that a query sees, its own included; 0: all up to its own */
    const Rope *rope; /* one of the Model's */
} Layer;

/* The initializer of an array of all Linears of a layer. */
#define LINEARS(l)                                                                                                     \
    {                                                                                                                  \
        &(l)->q_a, &(l)->q, &(l)->kv_a, &(l)->k, &(l)->v, &(l)->k_up, &(l)->v_up, &(l)->o, &(l)->router, &(l)->gate,   \
            &(l)->up, &(l)->down, &(l)->shared_gate, &(l)->shared_up, &(l)->shared_down                                \
    }

typedef enum {
    SWIGLU,         /* gate sigmoid(gate) up (Shazeer, "GLU variants improve transformer", 2020) */
    SWIGLU_CLAMPED, /* gpt-oss: gate sigmoid(1.702 gate) (up + 1), gate <= limit, |up| <= limit */
    GEGLU           /* gate / 2 (1 + tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))) up */
} Act;

/* From the router's logits to the chosen experts: logits become scores, the largest score + choice_bias win, and the
 * scores of the chosen are their weights. The experts form `groups` runs of equal length; only experts in the best
 * top_groups runs can win. */
typedef struct {
    bool sigmoid;           /* scores are sigmoids of the logits; else the softmax over all experts */
    bool normalise;         /* divide the chosen scores by their sum */
    float scale;            /* then multiply by this */
    int groups, top_groups; /* 1, 1: all may be chosen */
    int group_best;         /* a group's score is the sum of this many of its best experts */
} Route;

typedef struct {
    int n_layers, dim, vocab;
    int ffn_dim;                   /* rows of gate or shared_gate, the max over all layers */
    int context;                   /* positions the model was made for */
    int n_heads, n_kv_heads;       /* query heads share a key/value head in groups of n_heads / n_kv_heads */
    int head_dim, v_dim, rope_dim; /* of a head of q and k; of a head of v; RoPE turns the last rope_dim of head_dim */
    int kv_rank;                   /* latent attention, which has n_kv_heads 1; 0: no latent attention */
    bool k_up_transposed;          /* k_up is n_heads times (kv_rank, head_dim - rope_dim), as some files have it */
    bool neighbours;               /* RoPE turns the pairs (2i, 2i + 1), else (i, i + rope_dim / 2) */
    const Rope *rope;              /* (2) for layers that see all, for layers with a window */
    float attn_scale;              /* of q . k */
    float attn_cap, logit_cap;     /* x becomes cap tanh(x / cap), for scaled q . k and for logits; 0: no cap */
    int n_experts, top_k;          /* of layers with a router; 1, 1: no layer has one */
    Route route;
    float eps; /* of every RMSNorm */
    Act act;
    float act_limit;    /* of SWIGLU_CLAMPED */
    float embed_scale;  /* multiplies embed's rows when they become x, but not the head; else 1 */
    Linear embed, head; /* (vocab, dim) both */
    const float *norm;  /* (dim) before the head */
    Layer *layer;       /* (n_layers) */
} Model;

typedef enum {
    WANT_NOTHING,   /* not the last chunk of its prompt: no logits are computed */
    WANT_TOKEN,     /* a token drawn from the logits of the last given token */
    WANT_LOGITS,    /* the same, and those logits */
    WANT_ALL_LOGITS /* the same, and the logits of every given token */
} Want;

/* One step: prefill, decode and any mixture of them, as one ragged batch. Sequence s has the tokens token[first[s]] ..
 * token[first[s + 1] - 1], for the positions from start[s] on; its earlier positions are in the cache (pages that were
 * never written hold zeros). The pages that a sequence writes belong to it alone. submit copies the arrays. */
typedef struct {
    int seqs, max_pages; /* 1 to max_seqs; columns of `page` */
    const int *slot;  /* (seqs) names a sequence across steps, in [0, max_seqs); its last drawn token is kept there */
    const int *first; /* (seqs + 1) */
    const int *token; /* (first[seqs]); -1: the token that the slot drew last, even if it is not collected yet */
    const int *start; /* (seqs) */
    const int *page;  /* (seqs, max_pages) page of positions 0-63, 64-127, ... */
    const Sampling *sampling; /* (seqs) */
    const Want *want;         /* (seqs) */
} Batch;

/* The tokens that a sequence may draw, in memory that the host writes and draws read when they run: so a step can be
 * submitted first and its tokens chosen while it is computed. A draw whose Sampling.allowed is not 0 waits until
 * `ready` of its slot is at least that, and reads the slot's bits. If that takes more than a second, collect fails with
 * GPU_FAULT. So each such draw of a slot has a larger number than the one before; the host writes its bits, at least
 * one of them 1, once the slot's previous draw is collected, and then stores the number (__ATOMIC_RELEASE), before it
 * submits or collects another step. */
typedef struct {
    uint64_t *ready; /* (max_seqs) */
    uint32_t *bits;  /* (max_seqs, (vocab + 31) / 32) token i: bit i % 32 of word i / 32 */
} Allowed;

enum { DREW_NOTHING = -1, DREW_NAN = -2 }; /* in place of a token: none was requested; the logits hold a NaN */

typedef struct {         /* of the oldest step not yet collected; valid until the next collect */
    const int *token;    /* (seqs) */
    const float *logits; /* (rows, vocab) of the sequences that requested them, in the order of the batch */
    int rows;
    double seconds; /* the GPU's time for the step, of several the longest; 0: unknown */
    int gpus;
    double busy[MAX_GPUS]; /* (gpus) each GPU's time */
} Result;

/* Tests look inside a step through a tap: q, k, v (after rope), attn, attn_residual, experts, weights, act, residual of
 * each layer, and logits. Values are (rows, cols), a row a token of the batch; act is (tokens, top_k or 1, rows of
 * gate). Latent attention: q is not yet multiplied by k_up, k is the cache's row, no v. There are no other stages, so
 * kernels may fuse everything in between. */
typedef void Tap(void *data, const char *stage, int layer, const float *values, int rows, int cols);

typedef struct {
    int gpu;          /* index of the GPU, or of the first of several */
    const char *gpus; /* how many share the model, or their indices, like 0,3; NULL: as many as it needs */
    bool plain;       /* infer.cu's own kernels only, without fast/ */
    int context;      /* positions of one sequence */
    int max_seqs;     /* sequences of a batch, and slots */
    int max_tokens;   /* tokens of a batch */
    int cache;        /* tokens of all sequences together in the cache; 0: max_seqs times context */
    Allowed *allowed; /* open fills it in, close frees its arrays; NULL: no Sampling has `allowed` */
    Tap *tap;         /* or NULL */
    void *tap_data;
    void (*progress)(uint64_t done, uint64_t total); /* bytes of weights loaded so far, or NULL */
    char *where; /* (64) open writes here where the model is, "GPU 0 (14.1 GB of 139.8 GB)"; or NULL */
} Limits;

typedef struct { /* the GPUs that a backend could use */
    int gpus;
    struct {
        char name[128];
        int major, minor;     /* compute capability */
        bool usable;          /* this build has code for it */
        int peers;            /* how many other GPUs' memory it reaches */
        uint64_t free, total; /* bytes of memory */
    } gpu[MAX_GPUS];
    int driver, runtime; /* CUDA versions, 1000 * major + 10 * minor: the driver's newest, this build's; or 0 */
    int nccl;            /* NCCL's version, 10000 * major + 100 * minor + patch; 0: one GPU, or it is not installed */
    const char *built;   /* the architectures that this build has code for, or NULL */
    char problem[200];   /* why there is no GPU, or empty */
} Devices;

/* Errors carry the exit code: NO_ROOM, NO_GPU, BAD_MODEL (a file shrank), GPU_FAULT. After GPU_FAULT only close may be
 * called. At most two steps may be outstanding: submit, submit, collect, submit, collect, ... */
typedef struct {
    const char *name;
    int prompt_step; /* how many tokens of a prompt a step should have, if nothing else limits it */
    /* Loads the weights, allocates the cache. *pages: the number requested, then the number that fits. NULL: failed. */
    void *(*open)(const Model *, const Limits *, int *pages, Error *);
    bool (*submit)(void *, const Batch *, Error *); /* returns at once */
    bool (*collect)(void *, Result *, Error *);     /* waits for the oldest step */
    void (*close)(void *);
    /* Seconds that the card takes to simply read `bytes` bytes of its memory, the limit of every step that reads as
     * many; 0: unknown. Call it only while no step is outstanding. */
    double (*flat_read)(void *, uint64_t bytes);
    /* How many experts all steps have read so far, in all layers. An expert counts once a step and layer, however many
     * tokens chose it. Call it only while no step is outstanding. */
    uint64_t (*experts_read)(void *);
    /* Bytes that the weights take in the backend's memory. Where it repacks an encoding the file has others. */
    uint64_t (*weight_bytes)(const Model *);
    void (*describe)(Devices *);
} Backend;

extern const Backend cuda;      /* card.cu, which calls infer.cu */
extern const Backend reference; /* tests/reference.c */

#ifdef __cplusplus
}
#endif
#endif
