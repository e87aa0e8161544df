/* encodings.c: what unit.c checks of encodings/: the bits of made up weights. unit.c includes it. */
#include "encodings/types.h"

/* Made up weights have the bits that the encodings are known for, scales and zeros included. */
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
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        Checkpoint c;
        open_shapes(&c, config, known[i].name);
        const Linear *all[] = {&c.model.layer->q, &c.model.layer->o, &c.model.layer->up, &c.model.layer->down,
                               &c.model.head};
        for (int j = 0; j < 5; j++) {
            double weights = (double)all[j]->n * all[j]->rows * all[j]->cols,
                   bits = 8 * (double)linear_bytes(all[j]) / weights;
            double expected = j == 4 && !known[i].whole ? 16 : known[i].bits;
            check(fabs(bits / expected - 1) < 0.004, "%s: %g bits a weight, not %g", known[i].name, bits, expected);
        }
        check(c.model.layer->router.type == BF16, "%s: the router's type is %s", known[i].name,
              types[c.model.layer->router.type].name);
        checkpoint_close(&c);
    }
    check(!strcmp(types[AWQ4].name, "AWQ4") && !strcmp(types[IQ4_XS].name, "IQ4_XS") &&
              !strcmp(types[E8M0].name, "E8M0"),
          "types[] is not in the order of Type");
}

static void encodings_tests(void) { run("unit: sizes of encodings", sizes_of_encodings); }
