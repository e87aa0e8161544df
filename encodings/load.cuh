/* load.cuh: from a file's types to codes on the card: which type becomes which, and how card.cu's kernels store a
 * weight. */
#pragma once

/* The type on the card for a Linear. It is bf16 if the columns of a word do not share a scale, or if rows end inside a
 * word: the missing codes are zero bytes, which are weights of 0 in FP8 only. */
Type coded_type(const Linear &w) {
    auto fits = [&](Type t) {
        const int word = CHUNK / chunk_words(t);
        return std::all_of(w.each, w.each + w.n, [](const Stored &one) { return !one.group; }) &&
               (t == FP8 || w.cols % word == 0) && (w.scale.cols >= w.cols || w.scale.cols % word == 0);
    };
    Type to = types[w.type].card;
    if (w.type == INT8 && w.zero.rows) to = PACKED8;
    if (to == PACKED4 && !fits(to)) to = Q4_1;
    return is_coded(to) && !fits(to) ? BF16 : to;
}
/* One type for two of a Matrix: Q5_K can hold what is in_six(), PACKED8 what is in_eight(). */
Type common_code(Type a, Type b) {
    auto in_six = [](Type t) { return t == Q4_1 || t == Q5_K || t == Q6_K; };
    auto in_eight = [&](Type t) { return in_six(t) || t == Q8_0 || t == PACKED8; };
    if (!in_eight(a) || !in_eight(b)) return BF16;
    if (in_six(a) && in_six(b)) return Q5_K;
    return PACKED8;
}
bool reads_one(Type t) { return t != FP8 && t != PACKED4; }

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
    const int zero = card_types[s.linear.type].zero;
    const bool whole = s.linear.type != NVFP4; /* else multiples of 1/2, which are doubled */
    float a = whole ? w[0].a : w[0].a / 2, b = w[0].b + a * (zero - w[0].zero);
    const int bits = codes_of(m.type).bits, middle = 1 << (bits - 1);
    const bool constant = codes_of(m.type).offset && (float)(f16)a == 0; /* b takes the place of a */
    int code[4];
    for (int i = 0; i < 4; i++)
        code[i] = constant        ? middle
                  : m.type == FP8 ? s.from.data.data[row * s.from.data.stride + c + i]
                                  : (int)(whole ? w[i].q : 2 * w[i].q) - zero + middle;
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
    uint32_t word = codes_of(m.type).offset || m.type == Q6_K ? half_and_bf16(a, offset) : float_bits(a);
    if (m.type == PACKED4) word = word & ~15u | (uint32_t)w[0].zero;
    memcpy(scale, &word, codes_of(m.type).word_bytes); /* of Q6_K only the half */
}
