/* experts.c: models of the same kind with experts, Mixtral and Qwen3; and how files hold experts. */
#include "families.h"

#include <string.h>

/* ---- layouts ---- */

Linear bind_each(Loader *load, const char *module, const char *matrix, int n, int rows, int cols, int bias) {
    Stored *each = keep(load->c, (size_t)n, sizeof *each);
    Linear all = {0};
    for (int i = 0; i < n && !failed(load); i++) {
        LocalText name = text_print("%s.%d%s", module, i, matrix);
        Linear one = bind_linear(load, name, rows, cols, bias);
        if (!i) all = one;
        if (one.type != all.type || one.scale.type != all.scale.type || one.scale.rows != all.scale.rows ||
            one.scale.cols != all.scale.cols || one.zero.rows != all.zero.rows || !one.each->bias != !all.each->bias)
            bad_file(load, load->path, "%s%s is %s, that of number 0 %s, or its scales differ", load->prefix, name,
                     types[one.type].name, types[all.type].name);
        each[i] = *one.each;
    }
    all.n = n, all.each = each;
    return all;
}

static void bind_named(Loader *load, Layer *l, const char *module, const char *const names[3], int width, bool bias) {
    const Model *m = &load->c->model;
    l->gate = bind_each(load, module, names[0], m->n_experts, width, m->dim, bias);
    l->up = bind_each(load, module, names[1], m->n_experts, width, m->dim, bias);
    l->down = bind_each(load, module, names[2], m->n_experts, m->dim, width, bias);
}

static void bind_separate(Loader *load, Layer *l, const char *module, int width, bool bias) {
    bind_named(load, l, module, (const char *const[]){".gate_proj", ".up_proj", ".down_proj"}, width, bias);
}
const ExpertLayout separate_experts = {".0.gate_proj.weight", bind_separate};

static void bind_mixtrals(Loader *load, Layer *l, const char *module, int width, bool bias) {
    bind_named(load, l, module, (const char *const[]){".w1", ".w3", ".w2"}, width, bias);
}
const ExpertLayout mixtral_experts = {".0.w1.weight", bind_mixtrals};

/* Rows first ... of the `pitch` rows that a tensor of plain numbers has for each expert. */
static Linear bind_part(Loader *load, const char *module, const char *matrix, int pitch, int first, int rows,
                        int cols) {
    const int n = load->c->model.n_experts;
    Stored *each = keep(load->c, (size_t)n, sizeof *each);
    Linear w = {BF16, rows, cols, n, .each = each};
    Tensor *t = bind_tensor(load, module, matrix, NO_TYPE, &w, 3, (int64_t[]){n, pitch, cols});
    if (tensor_is(load, t, is_float(type_of(t)), "BF16, F16 or F32")) w.type = type_of(t);
    belongs(t, w.type, (int64_t)n * pitch * cols);
    for (int i = 0; i < n && !failed(load); i++)
        each[i] = (Stored){.data = lines_of(tensor_view(load, t, n * pitch), (size_t)(i * pitch + first), 1, rows),
                           .factor = 1};
    return w;
}

/* transformers 5: all experts in one tensor, gate above up. */
static void bind_stacked(Loader *load, Layer *l, const char *module, int width, bool bias) {
    const int dim = load->c->model.dim;
    l->gate = bind_part(load, module, ".gate_up_proj", 2 * width, 0, width, dim);
    l->up = bind_part(load, module, ".gate_up_proj", 2 * width, width, width, dim);
    l->down = bind_part(load, module, ".down_proj", dim, 0, dim, width);
}
const ExpertLayout stacked_experts = {".gate_up_proj", bind_stacked};

/* gpt-oss as transformers writes it without MXFP4: one tensor holds the columns of all experts' matrices. Of
 * gate_up_proj's `pitch` rows even ones are gate's, odd ones up's; the tensor NAME_bias has as many. */
static Linear bind_turned(Loader *load, const char *name, int pitch, int first, int step, int rows, int cols) {
    const int n = load->c->model.n_experts;
    Stored *each = keep(load->c, (size_t)n, sizeof *each);
    Linear w = {BF16, rows, cols, n, .each = each};
    Tensor *t = bind_tensor(load, name, "", NO_TYPE, &w, 3, (int64_t[]){n, cols, pitch});
    if (tensor_is(load, t, is_float(type_of(t)), "BF16, F16 or F32")) w.type = type_of(t);
    belongs(t, w.type, (int64_t)n * pitch * cols);
    const size_t bytes = (size_t)types[w.type].bytes;
    const float *bias = bind_biases(load, name, pitch, first, step, rows);
    for (int i = 0; bias && i < n; i++) {
        View v = lines_of(tensor_view(load, t, n * cols), (size_t)(i * cols), 1, cols);
        v.data += (size_t)first * bytes, v.offset += (size_t)first * bytes;
        v.step = (size_t)step * bytes, v.bytes = (size_t)rows * bytes;
        each[i] = (Stored){.data = v, .factor = 1, .bias = bias + i * rows};
    }
    return w;
}

static void bind_turned_experts(Loader *load, Layer *l, const char *module, int width, bool bias) {
    const int dim = load->c->model.dim;
    LocalText both = text_print("%s.gate_up_proj", module);
    LocalText down = text_print("%s.down_proj", module);
    l->gate = bind_turned(load, both, 2 * width, 0, 2, width, dim);
    l->up = bind_turned(load, both, 2 * width, 1, 2, width, dim);
    l->down = bind_turned(load, down, dim, 0, 1, dim, width);
}
const ExpertLayout turned_experts = {".gate_up_proj_bias", bind_turned_experts};

/* ---- the families ---- */

static void read_mixtral(Loader *load, Model *m) {
    read_plain(load, m, (Sizes){0}, 8, 0, 1e6);
    read_one_window(load, m, config_optional(load, "sliding_window", 1, INT32_MAX, 0));
    m->n_experts = config_whole(load, "num_local_experts", 1, 1024, REQUIRED);
    m->top_k = config_whole(load, "num_experts_per_tok", 1, m->n_experts, REQUIRED);
    m->route.normalise = true;
}

static void bind_mixtral(Loader *load, Model *m) {
    const int width = config_whole(load, "intermediate_size", 1, 1 << 17, REQUIRED);
    const bool bias = config_true(load, "attention_bias", false);
    bind_ends(load, m, false);
    for (Layer *l = m->layer; begin_layer(load, l); l++) {
        const bool newer = find_tensor(load, "mlp.gate", ".weight"); /* transformers 5 calls the module so */
        bind_norms(load, m, l);
        bind_attention(load, m, l, bias, bias);
        l->router = bind_linear(load, newer ? "mlp.gate" : "block_sparse_moe.gate", m->n_experts, m->dim, false);
        bind_experts(load, l, newer ? "mlp.experts" : "block_sparse_moe.experts", &mixtral_experts, width, false);
    }
}

static void read_qwen3_moe(Loader *load, Model *m) {
    const bool used = config_true(load, "use_sliding_window", false);
    read_plain(load, m, (Sizes){0}, 4, 0, 10000);
    read_one_window(load, m, used ? config_optional(load, "sliding_window", 1, INT32_MAX, 4096) : 0);
    const char *count =
        json_get(load->config, "num_experts") ? "num_experts" : "num_local_experts"; /* its newer name */
    m->n_experts = config_whole(load, count, 1, 1024, REQUIRED);
    m->top_k = config_whole(load, "num_experts_per_tok", 1, m->n_experts, REQUIRED);
    m->route.normalise = config_true(load, "norm_topk_prob", false);
}

static void bind_qwen3_moe(Loader *load, Model *m) {
    const int width = config_whole(load, "moe_intermediate_size", 1, 1 << 17, 768);
    const bool bias = config_true(load, "attention_bias", false);
    bind_ends(load, m, false);
    for (Layer *l = m->layer; begin_layer(load, l); l++) {
        bind_norms(load, m, l);
        bind_attention(load, m, l, bias, bias);
        bind_head_norms(load, m, l);
        if (has_experts(load, m, l, 0)) {
            l->router = bind_linear(load, "mlp.gate", m->n_experts, m->dim, false);
            bind_experts(load, l, "mlp.experts", &separate_experts, width, false);
        } else {
            bind_dense(load, m, l, REQUIRED, false);
        }
    }
}

const Family experts[] = {{"mixtral", read_mixtral, bind_mixtral, is_no_text},
                          {"qwen3_moe", read_qwen3_moe, bind_qwen3_moe, is_no_text},
                          {0}};
