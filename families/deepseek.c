/* deepseek.c: DeepSeek V2 and V3: latent attention, groups of experts, shared experts. latent.cuh has the kernels. */
#include "families.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- config.json ---- */

static void read_latent_heads(Loader *load, Model *m) {
    m->n_kv_heads = 1;
    m->kv_rank = config_whole(load, "kv_lora_rank", 1, 8192, 512);
    m->v_dim = config_whole(load, "v_head_dim", 1, 1024, 128);
    m->rope_dim = config_whole(load, "qk_rope_head_dim", 2, 1024, 64);
    m->head_dim = m->rope_dim + config_whole(load, "qk_nope_head_dim", 1, 1024, 128);
    if (m->rope_dim % 2) config_bad(load, load->config, "qk_rope_head_dim", "even (RoPE turns pairs)");
    config_only(load, load->config, "rms_norm_eps", 1e-6); /* latent norms always have it, and eps is one for all */
    m->attn_scale = (float)(1 / sqrt(m->head_dim));
}

/* What both versions have. YaRN scales q . k, not q and k. */
static void read_deepseek(Loader *load, Model *m, bool sigmoid) {
    const cJSON *rope = find_rope(load), *config = load->config;
    const char *count =
        json_get(config, "n_routed_experts") ? "n_routed_experts" : "num_local_experts"; /* GGUF's name */
    read_sizes(load, m, (Sizes){0});
    read_latent_heads(load, m);
    read_one_rope(load, m, 10000);
    const char *type = json_string(rope, json_get(rope, "rope_type") ? "rope_type" : "type");
    if (type && strcmp(type, "default")) {
        const double factor = config_number(load, rope, "factor", 1e-6, 1e6, 1);
        const double scale = yarn_scale(factor, config_number(load, rope, "mscale_all_dim", 0, 1e6, 0));
        m->attn_scale = (float)((double)m->attn_scale * scale * scale);
    }
    read_one_window(load, m, 0);
    config_only_text(load, config, "hidden_act", "silu");
    config_only(load, config, "moe_layer_freq", 1);
    m->n_experts = config_whole(load, count, 1, 1024, REQUIRED);
    m->top_k = config_whole(load, "num_experts_per_tok", 1, m->n_experts, REQUIRED);
    m->route.sigmoid = sigmoid;
    if (json_get(config, "scoring_func") && !json_is(config, "scoring_func", sigmoid ? "sigmoid" : "softmax"))
        config_bad(load, config, "scoring_func", "\"softmax\" in deepseek_v2 and \"sigmoid\" in deepseek_v3,");
}

/* How experts are chosen: by topk_method. Missing sizes of groups are those of the largest V3. */
static void read_route(Loader *load, Model *m, const char *method, double factor, int n_groups, int top_groups) {
    const cJSON *config = load->config;
    const char *given = config_text(load, config, "topk_method");
    Route *r = &m->route;
    if (given) method = given;
    const bool bias = !strcmp(method, "noaux_tc"), greedy = !strcmp(method, "greedy");
    r->scale = (float)config_number(load, config, "routed_scaling_factor", 1e-6, 1e6, factor);
    if (!text_listed("greedy group_limited_greedy noaux_tc", method))
        config_bad(load, config, "topk_method", "\"greedy\", \"group_limited_greedy\" or \"noaux_tc\"");
    if (r->normalise && !bias) config_bad(load, config, "norm_topk_prob", "false with such a topk_method");
    if (greedy) return;
    r->groups = config_whole(load, "n_group", 1, m->n_experts, n_groups);
    r->top_groups = config_whole(load, "topk_group", 1, r->groups, top_groups);
    r->group_best = bias ? 2 : 1;
    const int each = m->n_experts / r->groups;
    if (each * r->groups != m->n_experts || each < r->group_best || m->top_k > r->top_groups * each)
        config_bad(load, config, "n_group", "such that topk_group equal groups hold num_experts_per_tok experts");
}

static void read_deepseek_v2(Loader *load, Model *m) {
    read_deepseek(load, m, false);
    m->neighbours = true;
    m->route.normalise = config_true(load, "norm_topk_prob", false);
    read_route(load, m, "greedy", 1, REQUIRED, REQUIRED);
}

static void read_deepseek_v3(Loader *load, Model *m) {
    read_deepseek(load, m, true);
    m->neighbours = config_true(load, "rope_interleave", true);
    m->route.normalise = config_true(load, "norm_topk_prob", true);
    read_route(load, m, "noaux_tc", 2.5, 8, 4);
}

/* ---- binding ---- */

/* Rows first, first + 1, ... of w's codes or of one of its grids, whose view is v. */
static View rows_of(Loader *load, View v, const Linear *w, Grid g, int first, int rows) {
    if (!g.rows || g.rows == w->rows) return v; /* the same for all rows */
    for (int i = 0; packings[i]; i++)
        if (packings[i]->cut(load, &v, w, g, first, rows)) return v;
    return lines_of(v, (size_t)(first / g.rows), 1, rows / g.rows);
}

/* A part of w for each head: heads have `pitch` rows each, the part `rows` of them, from `first` on. */
static Linear cut(Loader *load, const Linear *w, int first, int rows, int pitch) {
    Linear part = *w;
    part.n = w->rows / pitch, part.rows = rows;
    Stored *each = keep(load->c, (size_t)part.n, sizeof *each);
    part.each = each;
    for (int i = 0; i < part.n; i++, first += pitch) {
        each[i] = *w->each;
        each[i].data = rows_of(load, each[i].data, w, (Grid){w->type, 1, 1, false}, first, rows);
        each[i].scale = rows_of(load, each[i].scale, w, w->scale, first, rows);
        each[i].zero = rows_of(load, each[i].zero, w, w->zero, first, rows);
    }
    return part;
}

/* kv_b_proj holds the rows of k_up, then those of v_up, for each head. Files of llama.cpp have two tensors a head. */
static void bind_latent(Loader *load, Model *m, Layer *l) {
    const int q = m->n_heads * m->head_dim, rank = m->kv_rank, keys = m->head_dim - m->rope_dim;
    const int q_rank = config_optional(load, "q_lora_rank", 0, 1 << 16, 1536);
    const bool bias = config_true(load, "attention_bias", false);
    if (q_rank) {
        l->q_a = bind_linear(load, "self_attn.q_a_proj", q_rank, m->dim, bias);
        l->q_a_norm = bind_floats(load, "self_attn.q_a_layernorm", ".weight", q_rank);
        l->q = bind_linear(load, "self_attn.q_b_proj", q, q_rank, false);
    } else {
        l->q = bind_linear(load, "self_attn.q_proj", q, m->dim, false);
    }
    l->kv_a = bind_linear(load, "self_attn.kv_a_proj_with_mqa", rank + m->rope_dim, m->dim, bias);
    l->kv_a_norm = bind_floats(load, "self_attn.kv_a_layernorm", ".weight", rank);
    m->k_up_transposed = tensors_find(&load->c->tensors, "model.layers.0.self_attn.k_b_proj.0.weight");
    if (m->k_up_transposed) {
        l->k_up = bind_each(load, "self_attn.k_b_proj", "", m->n_heads, rank, keys, NO_BIAS);
        l->v_up = bind_each(load, "self_attn.v_b_proj", "", m->n_heads, m->v_dim, rank, NO_BIAS);
    } else {
        const int pitch = keys + m->v_dim;
        const Linear kv_b = bind_linear(load, "self_attn.kv_b_proj", m->n_heads * pitch, rank, NO_BIAS);
        l->k_up = cut(load, &kv_b, 0, keys, pitch);
        l->v_up = cut(load, &kv_b, keys, m->v_dim, pitch);
    }
    l->o = bind_linear(load, "self_attn.o_proj", m->dim, m->n_heads * m->v_dim, bias);
}

static void bind_routed(Loader *load, const Model *m, Layer *l, int n_shared) {
    const int width = config_whole(load, "moe_intermediate_size", 1, 1 << 17, REQUIRED);
    const int shared = width * config_whole(load, "n_shared_experts", 1, 64, n_shared);
    l->router = bind_linear(load, "mlp.gate", m->n_experts, m->dim, false);
    if (m->route.group_best == 2) /* topk_method noaux_tc */
        l->choice_bias = bind_floats(load, "mlp.gate", ".e_score_correction_bias", m->n_experts);
    bind_experts(load, l, "mlp.experts", &separate_experts, width, false);
    l->shared_gate = bind_linear(load, "mlp.shared_experts.gate_proj", shared, m->dim, false);
    l->shared_up = bind_linear(load, "mlp.shared_experts.up_proj", shared, m->dim, false);
    l->shared_down = bind_linear(load, "mlp.shared_experts.down_proj", m->dim, shared, false);
}

static void bind_deepseek(Loader *load, Model *m, int n_shared, int n_dense) {
    const int first = config_whole(load, "first_k_dense_replace", 0, INT32_MAX, n_dense);
    bind_ends(load, m, false);
    for (Layer *l = m->layer; begin_layer(load, l); l++) {
        bind_norms(load, m, l);
        bind_latent(load, m, l);
        if (has_experts(load, m, l, first))
            bind_routed(load, m, l, n_shared);
        else
            bind_dense(load, m, l, REQUIRED, false);
    }
}

static void bind_deepseek_v2(Loader *load, Model *m) { bind_deepseek(load, m, 2, 0); }
static void bind_deepseek_v3(Loader *load, Model *m) { bind_deepseek(load, m, 1, 3); }

/* Layers behind the last predict a second token. */
static bool left_out(const Loader *load, const char *name) {
    const char *layer = strstr(name, "layers.");
    return is_no_text(load, name) || (layer && strtol(layer + 7, NULL, 10) >= load->c->model.n_layers);
}

const Family deepseek[] = {{"deepseek_v2", read_deepseek_v2, bind_deepseek_v2, left_out},
                           {"deepseek_v3", read_deepseek_v3, bind_deepseek_v3, left_out},
                           {0}};
