/* encodings.c: what unit.c checks of encodings/: random weights in each. unit.c includes it. */
#include "encodings/blocks.h"

/* The root mean square of a matrix's weights times the root of its columns; a NaN or an infinity if a weight is. */
static double size_of_weights(const Linear *w) {
    double sum = 0;
    for (int i = 0; i < w->n; i++)
        for (int r = 0; r < w->rows; r += 7)
            for (int c = 0; c < w->cols; c++) {
                const Weight x = weight_at(types, w, w->each + i, r, c);
                const double value = (double)(x.a * (x.q - x.zero) + x.b);
                sum += value * value;
            }
    return sqrt(sum / w->n / ((w->rows - 1) / 7 + 1));
}

/* Random weights have the bits that the encodings are known for, scales and zeros included. They are finite, and about
 * 1 / sqrt(columns): a scale of E8M0 or E4M3 is off by up to 41 %. */
static void sizes_of_encodings(void) {
    static const struct {
        const char *name;
        double bits;
        bool whole; /* embedding and head too */
    } known[] = {
        {"fp8", 8, false},       {"int8", 8, false},         {"packed4", 4.125, false}, {"packed8", 8.125, false},
        {"gptq4", 4.156, false}, {"GPTQ8", 8.1875, false},   {"awq4", 4.156, false},    {"nvfp4", 4.5, false},
        {"mxfp4", 4.25, false},  {"q8_0", 8.5, true},        {"Q4_0", 4.5, true},       {"q4_1", 5, true},
        {"q5_0", 5.5, true},     {"q5_1", 6, true},          {"q2_k", 2.625, true},     {"q3_k", 3.4375, true},
        {"q4_k", 4.5, true},     {"q5_k", 5.5, true},        {"q6_k", 6.5625, true},    {"iq4_nl", 4.5, true},
        {"iq4_xs", 4.25, true},  {"gguf_mxfp4", 4.25, true}, {"f32", 32, false},        {"bf16", 16, false}};
    static const char config[] =
        "{\"model_type\":\"mixtral\",\"vocab_size\":256,\"hidden_size\":1024,\"num_hidden_layers\":1,"
        "\"intermediate_size\":1280,\"num_attention_heads\":8,\"num_local_experts\":4,"
        "\"num_experts_per_tok\":2,\"rms_norm_eps\":1e-6,\"max_position_embeddings\":64}";
    if (skips_random_weights()) return;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        Checkpoint c;
        open_shapes(&c, config, known[i].name);
        random_weights_fill();
        const Linear *all[] = {&c.model.layer->q, &c.model.layer->o, &c.model.layer->up, &c.model.layer->down,
                               &c.model.head};
        for (int j = 0; j < 5; j++) {
            double weights = (double)all[j]->n * all[j]->rows * all[j]->cols,
                   bits = 8 * (double)linear_bytes(all[j]) / weights;
            double expected = j == 4 && !known[i].whole ? 16 : known[i].bits;
            check(fabs(bits / expected - 1) < 0.004, "%s: %g bits a weight, not %g", known[i].name, bits, expected);
            double size = size_of_weights(all[j]);
            check(size > 0.7 && size < 1.42, "%s: weights of %g / sqrt(columns)", known[i].name, size);
        }
        check(c.model.layer->router.type == BF16, "%s: the router's type is %s", known[i].name,
              types[c.model.layer->router.type].name);
        checkpoint_close(&c);
    }
}

static void encodings_tests(void) { run("unit: sizes of encodings", sizes_of_encodings); }
