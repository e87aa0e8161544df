/* llama.c: Llama, Mistral and Qwen, dense models that differ in a few keys; and what other families share with them. */
#include "families.h"

#include <math.h>
#include <string.h>

/* ---- config.json ---- */

/* Llama 3.1's scaling: divides low frequencies by the factor, keeps high ones, and blends in between. */
static Rope read_llama3(Loader *load, const Model *m, const cJSON *rope, double theta, double factor, double original) {
    const double low = config_number(load, rope, "low_freq_factor", 1e-6, 1e6, REQUIRED);
    const double high = config_number(load, rope, "high_freq_factor", low + 1e-6, 1e7, REQUIRED);
    double *share = keep(load->c, (size_t)m->rope_dim / 2, sizeof *share);
    for (int i = 0; i < m->rope_dim / 2; i++) {
        const double turns = original * pow(theta, -2.0 * i / m->rope_dim) / (2 * M_PI);
        share[i] = fmin(fmax((turns - low) / (high - low), 0), 1);
    }
    return make_rope(load, m, theta, factor, share, 1);
}
const RopeScaling llama3 = {"llama3", read_llama3};

void read_one_rope(Loader *load, Model *m, double theta) {
    theta = config_number(load, load->config, "rope_theta", 1e-6, 1e12, theta);
    Rope rope = read_rope(load, m, find_rope(load), theta, &llama3);
    if (tensors_find(&load->c->tensors, "rope_freqs.weight")) {
        const float *divisor = bind_floats(load, "rope_freqs", ".weight", m->rope_dim / 2);
        float *divided = keep(load->c, (size_t)m->rope_dim / 2, sizeof *divided);
        for (int i = 0; divisor && i < m->rope_dim / 2; i++) {
            divided[i] = rope.inv_freq[i] / divisor[i];
            if (!isfinite(divided[i])) bad_file(load, load->path, "rope_freqs.weight[%d] divides an angle by 0", i);
        }
        rope.inv_freq = divided;
    }
    load->rope[0] = load->rope[1] = rope;
}

void read_one_window(Loader *load, Model *m, int window) {
    for (int i = 0; i < m->n_layers && !failed(load); i++)
        read_layer_type(load, m, i, window ? "sliding_attention" : "full_attention", window, window);
}

void read_plain(Loader *load, Model *m, Sizes absent, int kv_heads, int head_dim, double theta) {
    read_sizes(load, m, absent);
    read_heads(load, m, kv_heads, head_dim);
    read_one_rope(load, m, theta);
    config_only_text(load, load->config, "hidden_act", "silu");
    m->neighbours = load->container->neighbours && config_true(load, "rope_interleave", false);
}

void read_text_config(Loader *load, const char *model_type) {
    load->config = cJSON_GetObjectItemCaseSensitive(load->file, "text_config");
    if (!cJSON_IsObject(load->config)) config_bad(load, load->file, "text_config", "an object");
    if (json_get(load->config, "model_type") && !json_is(load->config, "model_type", model_type))
        config_bad(load, load->config, "model_type", model_type); /* Ministral 3 has other formulas */
}

bool is_no_text(const Loader *load, const char *name) {
    const bool picture = strstr(name, "vision_tower.") || strstr(name, "multi_modal_projector.");
    return strstr(name, ".rotary_emb.inv_freq") || (picture && load->config != load->file);
}

/* ---- binding ---- */

void bind_norms(Loader *load, const Model *m, Layer *l) {
    l->attn_norm = bind_floats(load, "input_layernorm", ".weight", m->dim);
    l->ffn_norm = bind_floats(load, "post_attention_layernorm", ".weight", m->dim);
}

void bind_attention(Loader *load, const Model *m, Layer *l, bool bias, bool o_bias) {
    const int q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    l->q = bind_linear(load, "self_attn.q_proj", q, m->dim, bias);
    l->k = bind_linear(load, "self_attn.k_proj", kv, m->dim, bias);
    l->v = bind_linear(load, "self_attn.v_proj", kv, m->dim, bias);
    l->o = bind_linear(load, "self_attn.o_proj", m->dim, q, o_bias);
}

void bind_head_norms(Loader *load, const Model *m, Layer *l) {
    l->q_norm = bind_floats(load, "self_attn.q_norm", ".weight", m->head_dim);
    l->k_norm = bind_floats(load, "self_attn.k_norm", ".weight", m->head_dim);
}

void bind_dense(Loader *load, const Model *m, Layer *l, int width, bool bias) {
    width = config_whole(load, "intermediate_size", 1, 1 << 20, width);
    l->gate = bind_linear(load, "mlp.gate_proj", width, m->dim, bias);
    l->up = bind_linear(load, "mlp.up_proj", width, m->dim, bias);
    l->down = bind_linear(load, "mlp.down_proj", m->dim, width, bias);
}

bool has_experts(Loader *load, const Model *m, const Layer *l, int first) {
    const cJSON *dense = config_typed(load, load->config, "mlp_only_layers", cJSON_Array, "an array"), *one;
    const int i = (int)(l - m->layer), step = config_whole(load, "decoder_sparse_step", 1, INT32_MAX, 1);
    bool experts = i >= first && (i + 1) % step == 0;
    cJSON_ArrayForEach(one, dense) if (cJSON_IsNumber(one) && one->valuedouble == i) experts = false;
    return experts;
}

/* ---- the families ---- */

void read_llama(Loader *load, Model *m) {
    read_plain(load, m, (Sizes){.context = 2048}, 0, 0, 10000);
    read_one_window(load, m, 0);
}

void bind_llama(Loader *load, Model *m) {
    const bool bias = config_true(load, "attention_bias", false);
    bind_ends(load, m, false);
    for (Layer *l = m->layer; begin_layer(load, l); l++) {
        bind_norms(load, m, l);
        bind_attention(load, m, l, bias, bias);
        bind_dense(load, m, l, REQUIRED, config_true(load, "mlp_bias", false));
    }
}

static void read_mistral(Loader *load, Model *m) {
    read_plain(load, m, (Sizes){0}, 8, 0, 10000);
    read_one_window(load, m, config_optional(load, "sliding_window", 1, INT32_MAX, 4096));
}

static void read_mistral3(Loader *load, Model *m) {
    read_text_config(load, "mistral");
    read_mistral(load, m);
}

/* The window is for layers from max_window_layers on. */
static void read_qwen(Loader *load, Model *m, int head_dim) {
    read_plain(load, m, (Sizes){0}, 0, head_dim, 10000);
    const int from = config_whole(load, "max_window_layers", 0, INT32_MAX, 28);
    const bool used = config_true(load, "use_sliding_window", false);
    const int window = used ? config_optional(load, "sliding_window", 1, INT32_MAX, 4096) : 0;
    for (int i = 0; i < m->n_layers && !failed(load); i++)
        read_layer_type(load, m, i, "full_attention sliding_attention", i >= from, window);
}

static void read_qwen2(Loader *load, Model *m) { read_qwen(load, m, 0); }
static void read_qwen3(Loader *load, Model *m) { read_qwen(load, m, 128); }

static void bind_qwen2(Loader *load, Model *m) {
    bind_ends(load, m, false);
    for (Layer *l = m->layer; begin_layer(load, l); l++) {
        bind_norms(load, m, l);
        bind_attention(load, m, l, true, false);
        bind_dense(load, m, l, REQUIRED, false);
    }
}

static void bind_qwen3(Loader *load, Model *m) {
    const bool bias = config_true(load, "attention_bias", false);
    bind_ends(load, m, false);
    for (Layer *l = m->layer; begin_layer(load, l); l++) {
        bind_norms(load, m, l);
        bind_attention(load, m, l, bias, bias);
        bind_head_norms(load, m, l);
        bind_dense(load, m, l, REQUIRED, false);
    }
}

const Family llama[] = {
    {"llama", read_llama, bind_llama, is_no_text},       {"mistral", read_mistral, bind_llama, is_no_text},
    {"mistral3", read_mistral3, bind_llama, is_no_text}, {"qwen2", read_qwen2, bind_qwen2, is_no_text},
    {"qwen3", read_qwen3, bind_qwen3, is_no_text},       {0}};
