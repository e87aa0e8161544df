/* load.cuh: from a file's types to codes on the card: which type becomes which, and how card.cu's kernels store a
 * weight. any_weight_at() (decode.h) reads it. */
#pragma once

/* For each of this room's types, in their order, the type on the card that holds the same codes. */
/* clang-format off */
constexpr Type coded_types[] = {
    Q6_K, FP8, Q8_0,              /* NVFP4, FP8, INT8 */
    PACKED4, PACKED8,             /* PACKED4, PACKED8 */
    PACKED4, PACKED8, PACKED4,    /* GPTQ4, GPTQ8, AWQ4 */
    Q8_0, Q4_1, Q4_1, Q6_K, Q5_K, /* Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 */
    Q5_K, Q6_K, Q4_1, Q5_K, Q6_K, /* Q2_K to Q6_K */
    Q8_0, Q8_0, MXFP4};           /* IQ4_NL, IQ4_XS, GGUF_MXFP4 */
/* clang-format on */
static_assert(sizeof coded_types / sizeof *coded_types == GGUF_MXFP4 + 1 - FIRST_ROOM_TYPE, "a type is missing");

/* The type on the card for a Linear. It is bf16 if the columns of a word do not share a scale, or if rows end inside a
 * word: the missing codes are zero bytes, which are weights of 0 in FP8 only. */
Type coded_type(const Linear &w) {
    auto fits = [&](Type t) {
        const int word = CHUNK / chunk_words(t);
        return std::all_of(w.each, w.each + w.n, [](const Stored &one) { return !one.group; }) &&
               (t == FP8 || w.cols % word == 0) && (w.scale.cols >= w.cols || w.scale.cols % word == 0);
    };
    Type to = coded_types[w.type - FIRST_ROOM_TYPE];
    if (w.type == INT8 && w.zero.rows) to = PACKED8;
    if (to == PACKED4 && !fits(to)) to = Q4_1;
    return is_coded(to) && !fits(to) ? BF16 : to;
}
/* One type for two of a Matrix: Q5_K can hold what is in_six(), PACKED8 what is in_eight(). */
Type common_code(Type a, Type b) {
    auto in_six = [](Type t) { return t == Q4_1 || t == Q5_K || t == Q6_K; };
    auto in_eight = [&](Type t) { return in_six(t) || t == Q8_0 || t == PACKED8; };
    if (!in_eight(a) || !in_eight(b)) return BF16;
    return in_six(a) && in_six(b) ? Q5_K : PACKED8;
}
bool reads_one(Type t) { return t != FP8 && t != PACKED4; }
int line_columns(Type type) { return type == AWQ4 ? 1 : type == GPTQ4 || type == GPTQ8 ? types[type].values : 0; }

/* Packs two e4m3 values so that few operations turn them into bf16. The first has its bits where bf16 has them. The
 * second has its sign four bits below that place, its next three bits four above, and its last four bits four below. */
static __device__ uint16_t fp8_pair(uint32_t first, uint32_t second) {
    return (first & 0x80) << 8 | (first & 0x7F) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 | second & 15;
}
static __device__ uint32_t half_and_bf16(float a, float b) {
    return __half_as_ushort((f16)a) | (uint32_t)__bfloat16_as_ushort((bf16)b) << 16;
}
/* Stores four neighbouring weights of a row, and the word of their columns, where code_place() and word_place() say. */
__device__ inline void place_codes(const Source &s, const Matrix &m, int row, int to, int c, const Weight (&w)[4]) {
    uint8_t *chunk = m.chunk(s.matrix, to, c, coded_chunk(m.type)),
            *at = chunk + code_place(m.type, to % TILE, c % CHUNK) / 8;
    const bool whole = s.linear.type != NVFP4; /* else multiples of 1/2, which are doubled */
    float a = whole ? w[0].a : w[0].a / 2, b = w[0].b + a * (s.info.zero - w[0].zero);
    const int bits = code_bits(m.type), middle = 1 << (bits - 1);
    const bool constant = has_offset(m.type) && (float)(f16)a == 0; /* b takes the place of a */
    int code[4];
    for (int i = 0; i < 4; i++)
        code[i] = constant        ? middle
                  : m.type == FP8 ? s.from.data.data[row * s.from.data.stride + c + i]
                                  : (int)(whole ? w[i].q : 2 * w[i].q) - s.info.zero + middle;
    if (m.type == FP8)
        ((uint16_t *)at)[0] = fp8_pair(code[0], code[2]), ((uint16_t *)at)[1] = fp8_pair(code[1], code[3]);
    else if (bits == 8)
        for (int i = 0; i < 4; i++) at[i % 2 * 2 + i / 2] = code[i];
    else
        for (int i = 0; i < 2; i++) at[i * 2] = code[i] & 15 | code[i + 2] >> (bits - 4) << 4;
    if (bits == 6)
        for (int i = 0; i < 4; i++) { /* other threads store other bits of the word */
            const int place = rest_place(to % TILE, c % CHUNK + i), rest = i < 2 ? code[i] >> 4 : code[i] & 3;
            atomicOr((uint32_t *)chunk + place / 32, (uint32_t)rest << place % 32);
        }
    if (c % (CHUNK / chunk_words(m.type))) return;
    void *scale = chunk + word_place(m.type, to % TILE, c % CHUNK);
    if (constant) a = b;
    const float unit = (float)(f16)a, offset = unit ? b / unit / 64 : 0;
    uint32_t word = has_offset(m.type) || m.type == Q6_K ? half_and_bf16(a, offset) : float_bits(a);
    if (m.type == PACKED4) word = word & ~15u | (uint32_t)w[0].zero;
    memcpy(scale, &word, word_bytes(m.type)); /* of Q6_K only the half */
}
/* All codes are equally likely, but e4m3 has no NaN, and 0 of PACKED4 becomes 8, for a mean of 0. */
__device__ inline uint32_t made_up_word(const Matrix &m, size_t i, uint32_t bits) {
    const int b = code_bits(m.type);
    const float a = 1 / sqrtf(m.cols) / (m.type == FP8 ? 68.5f : b == 8 ? 73.9f : b == 6 ? 18.5f : 4.6f);
    uint32_t word = has_offset(m.type) ? half_and_bf16(a, 1.f / 128) : float_bits(a);
    if (m.type == Q6_K) word = half_and_bf16(a, 0) * 0x00010001;
    if (m.type == FP8) bits &= ~0x00880088u;
    if (m.type == PACKED4) bits |= (~(bits | bits >> 1 | bits >> 2 | bits >> 3) & 0x11111111) * 8;
    if (m.type == PACKED4) word = word & ~15u | 8;
    return i * 4 % coded_chunk(m.type) < codes_bytes(m.type) ? bits : word;
}
