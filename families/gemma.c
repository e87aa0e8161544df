/* gemma.c: Gemma 2 and 3: norms stored as w - 1, norms behind attention and MLP, GEGLU, caps of scores. */
#include "families.h"

#include <math.h>

/* Embeddings are scaled, scores by their own key. */
static void read_gemma(Loader *load, Model *m, Sizes absent) {
    read_sizes(load, m, absent);
    read_heads(load, m, 4, 256);
    m->attn_scale = (float)(1 / sqrt(config_number(load, load->config, "query_pre_attn_scalar", 1, 1e6, 256)));
    m->embed_scale = sqrtf((float)m->dim);
    m->act = GEGLU;
    config_only_text(load, load->config, "hidden_activation", "gelu_pytorch_tanh");
}

/* A cap of scores; 0, which null means, too: there is none. */
static float read_cap(Loader *load, const char *key, double absent) {
    const bool null = cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(load->config, key));
    return (float)config_number(load, load->config, key, 0, 1e6, null ? 0 : absent);
}

/* All layers have a window, but every `every`-th. */
static void read_windows(Loader *load, Model *m, int every) {
    const int window = config_optional(load, "sliding_window", 1, INT32_MAX, 4096);
    for (int i = 0; i < m->n_layers && !failed(load); i++)
        read_layer_type(load, m, i, "full_attention sliding_attention", (i + 1) % every, window);
}

static void read_gemma2(Loader *load, Model *m) {
    read_gemma(load, m, (Sizes){0});
    read_one_rope(load, m, 10000);
    read_windows(load, m, 2);
    m->attn_cap = read_cap(load, "attn_logit_softcapping", 50);
    m->logit_cap = read_cap(load, "final_logit_softcapping", 30);
}

/* Layers with a window have a RoPE of their own, in newer files as one of two objects. */
static void read_gemma3(Loader *load, Model *m) {
    read_gemma(load, m, (Sizes){26, 2304, 262208, 131072, 8, 1e-6});
    const cJSON *both = config_typed(load, load->config, "rope_parameters", cJSON_Object, "an object");
    const cJSON *full = config_typed(load, both, "full_attention", cJSON_Object, "an object");
    const cJSON *sliding = json_get(both, "sliding_attention"), *one = find_rope(load);
    const double theta = config_number(load, load->config, "rope_theta", 1e-6, 1e12, 1e6);
    const double local = config_number(load, load->config, "rope_local_base_freq", 1e-6, 1e12, 10000);
    if (sliding && !full) config_bad(load, both, "full_attention", "an object");
    load->rope[0] = read_rope(load, m, full ? full : one, theta, &llama3);
    load->rope[1] = read_rope(load, m, sliding, local, &llama3);
    read_windows(load, m, config_whole(load, "sliding_window_pattern", 1, INT32_MAX, 6));
    m->logit_cap = read_cap(load, "final_logit_softcapping", 0);
}

static void read_gemma3_nested(Loader *load, Model *m) {
    read_text_config(load, "gemma3_text");
    read_gemma3(load, m);
}

/* Files hold w - 1; those of llama.cpp w. */
static const float *bind_norm(Loader *load, const char *name, int n) {
    const float *w = bind_floats(load, name, ".weight", n);
    float *out = keep(load->c, (size_t)n, sizeof *out);
    const bool whole = load->container->whole_norms;
    for (int i = 0; w && i < n; i++) out[i] = whole ? w[i] : w[i] + 1;
    return out;
}

static void bind_layer(Loader *load, const Model *m, Layer *l, int width) {
    const bool bias = config_true(load, "attention_bias", false);
    l->attn_norm = bind_norm(load, "input_layernorm", m->dim);
    bind_attention(load, m, l, bias, bias);
    l->attn_post_norm = bind_norm(load, "post_attention_layernorm", m->dim);
    l->ffn_norm = bind_norm(load, "pre_feedforward_layernorm", m->dim);
    bind_dense(load, m, l, width, false);
    l->ffn_post_norm = bind_norm(load, "post_feedforward_layernorm", m->dim);
}

static void bind_gemma2(Loader *load, Model *m) {
    bind_ends(load, m, true);
    m->norm = bind_norm(load, "model.norm", m->dim);
    for (Layer *l = m->layer; begin_layer(load, l); l++) bind_layer(load, m, l, REQUIRED);
}

static void bind_gemma3(Loader *load, Model *m) {
    bind_ends(load, m, true);
    m->norm = bind_norm(load, "model.norm", m->dim);
    for (Layer *l = m->layer; begin_layer(load, l); l++) {
        bind_layer(load, m, l, 9216);
        l->q_norm = bind_norm(load, "self_attn.q_norm", m->head_dim);
        l->k_norm = bind_norm(load, "self_attn.k_norm", m->head_dim);
    }
}

const Family gemma[] = {{"gemma2", read_gemma2, bind_gemma2, is_no_text},
                        {"gemma3_text", read_gemma3, bind_gemma3, is_no_text},
                        {"gemma3", read_gemma3_nested, bind_gemma3, is_no_text},
                        {0}};
