/* extensions.cuh: the rooms on the card; extensions.c has their rows on the host. A room is a folder that adds
 * something to the core, and the build defines ROOM_NAME for each that is there (Makefile, ROOMS). card.cuh says what a
 * room does for the core; if it is missing, the answers stand here. card.cu includes this file to load a model (it
 * defines LOADS), infer.cu, in front of block(), to compute. */

#ifdef ROOM_encodings
#include "encodings/codes.cuh"
#else
__host__ __device__ constexpr bool is_coded(Type) { return false; }
__host__ __device__ constexpr int chunk_words(Type) { return 1; }
__host__ __device__ constexpr int coded_chunk(Type) { return 0; }
#endif

#ifdef LOADS

/* types[], for kernels. */
static __constant__ const TypeInfo card_types[] = {CORE_TYPES(TYPE_ROW)
#ifdef ROOM_encodings
                                                       PACKED_TYPES(TYPE_ROW) BLOCK_TYPES(TYPE_ROW)
#endif
};

#ifdef ROOM_encodings
#include "encodings/load.cuh"
#else
Type coded_type(const Linear &) { return BF16; }
Type common_code(Type, Type) { return BF16; }
bool reads_one(Type) { return false; }
__device__ inline void place_codes(const Source &, const Matrix &, int, int, int, const Weight (&)[4]) {}
#endif

#ifdef ROOM_families
#include "families/latent.cuh"
#else
bool check_latent(const Model &, Error *e) { return fail(e, BAD_MODEL, "this build has no latent attention"); }
void load_latent(Walk *, const Layer &, DeviceLayer *) {}
void plan_latent(Gpu *, Plan *, size_t *, size_t *) {}
#endif

#ifdef ROOM_gpus
#include "gpus/backend.cuh"
#else
namespace gpus {
void plan(Gpu *, Plan *) {}
bool nccl_all_reduce(const Gpu *, const float *, float *, size_t, Error *) { return false; }
} /* namespace gpus */
const Backend cuda = one_card;
#endif

#else

#ifdef ROOM_encodings
#include "encodings/multiply.cuh"
#else
__device__ inline float coded_weight(const Matrix &, size_t, int) { return 0; }
cudaError_t decode_matrix(const Gpu *, const Matrix &, bf16 *) { return cudaErrorNotSupported; }
#endif

#ifdef ROOM_gpus
#include "gpus/all_reduce.cuh"
constexpr int DECODE_CARDS = 2; /* on so many cards the annex computes decode steps */
#else
__device__ inline void all_reduce(const Work &, Pairs &) {}
__device__ inline unsigned long long largest_key(const Work &, int, unsigned long long mine) { return mine; }
__device__ inline float2 add_other_card(const Work &, unsigned long long *, float2 mine) { return mine; }
__device__ inline void send_count(const Work &, unsigned long long *, unsigned long long) {}
template <class... Args> __device__ inline void receive_counts(Args &&...) {}
constexpr int DECODE_CARDS = 1;
namespace gpus {
bool begin_sum(const Pass *, Work *, int *, const float **, Error *) { return true; }
bool gather_logits(Pass *, int, int, Error *) { return true; }
} /* namespace gpus */
#endif

/* The annex. Without it Gpu::fast stays NULL, and only open() and launch_attention_latent() are called. */
#ifdef ROOM_fast
#include "fast/fast.cuh"
#else
namespace fast {
bool open(Gpu *, Error *) { return true; }
void plan(Gpu *, Plan *) {}
bool prepare(Gpu *, Error *) { return true; }
void close(Gpu *) {}
bool decode(Pass *, uint8_t *, Error *) { return false; }
bool blocks(Pass *, Error *) { return false; }
bool multiply(const Pass *, const Product &, Error *) { return false; }
int tile_tokens(const Pass *) { return 0; }
cudaError_t launch_attention_latent(const Pass *, const DeviceLayer &) { return cudaErrorNotSupported; }
} /* namespace fast */
#endif

#ifdef ROOM_families
#include "families/latent.cuh"
#endif

/* ---- the lists ---- */

/* Types of weights that have kernels: f receives the type as a constant. */
template <class F> cudaError_t with_type(Type type, F f) {
    switch (type) {
    case BF16: return f(std::integral_constant<Type, BF16>());
    case F16: return f(std::integral_constant<Type, F16>());
    case MXFP4: return f(std::integral_constant<Type, MXFP4>());
#ifdef ROOM_encodings
    case FP8: return f(std::integral_constant<Type, FP8>());
    case PACKED4: return f(std::integral_constant<Type, PACKED4>());
    case PACKED8: return f(std::integral_constant<Type, PACKED8>());
    case Q4_1: return f(std::integral_constant<Type, Q4_1>());
    case Q8_0: return f(std::integral_constant<Type, Q8_0>());
    case Q5_K: return f(std::integral_constant<Type, Q5_K>());
    case Q6_K: return f(std::integral_constant<Type, Q6_K>());
#endif
    default: return cudaErrorNotSupported;
    }
}

/* Sizes of heads that have kernels: f receives the size as a constant. Others take attention_any(). */
template <class F> cudaError_t with_head_dim(int head_dim, F f) {
    switch (head_dim) {
    case 64: return f(std::integral_constant<int, 64>());
#ifdef ROOM_families
    case 96: return f(std::integral_constant<int, 96>());
    case 128: return f(std::integral_constant<int, 128>());
    case 256: return f(std::integral_constant<int, 256>());
#endif
    default: return cudaErrorNotSupported;
    }
}

/* Variants of attention: which one a model has. */
Attend *attend_for(const Work &w) {
#ifdef ROOM_families
    if (w.kv_rank) return attend_latent;
#endif
    return attend;
}

#endif
