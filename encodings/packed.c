/* packed.c: matrices that are not plain rows of numbers: FP8 and INT8 with scales, compressed-tensors, GPTQ, AWQ,
 * NVFP4, MXFP4. How a matrix is encoded, and which of its weights share a scale, is read from its tensors;
 * quantization_config tells GPTQ's two versions apart, and what is not implemented. */
#include "decode.h"
#include "host.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/param.h>

static bool is_fp4(Type type) { return type == MXFP4 || type == NVFP4; }
static bool in_words(Type type) { return type >= PACKED4 && type <= AWQ4; }
static bool in_gptq(Type type) { return type == GPTQ4 || type == GPTQ8; }

/* The shape of the tensor that holds a matrix. */
static void stored_shape(Type type, int rows, int cols, int64_t shape[2]) {
    const int values = types[type].values, entries = block_entries(type);
    shape[0] = rows, shape[1] = (int64_t)divided(cols, values) * entries;
    if (type == AWQ4) shape[0] = cols, shape[1] = divided(rows, values);
    if (in_gptq(type)) shape[0] = divided(cols, values), shape[1] = rows;
}

/* ---- quantization_config ---- */

/* Refuses any value in quantization_config, read from `path`, that stands for something not implemented. How a matrix
 * is encoded, and which of its weights share a scale, is read from its tensors, not from here. */
static void check_quantization(Loader *load, const char *path, const char *key, const cJSON *x) {
    static const char *const known[][2] = {
        {"quant_method", "fp8, fbgemm_fp8, modelopt, compressed-tensors, gptq, awq, auto-round, mxfp4"},
        {"format", "float-quantized, int-quantized, naive-quantized, pack-quantized, nvfp4-pack-quantized, "
                   "mxfp4-pack-quantized, mxfp8-quantized, mixed-precision, dense, gptq, gptq_v2, gemm"},
        {"quant_algo",
         "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, fp8_pb_wo, MXFP8, NVFP4, W4A16_NVFP4, MIXED_PRECISION"},
        {"checkpoint_format", "gptq, gptq_v2, gemm"},
        {"pack_dtype", "int32"},
        {"fmt", "e4m3"},
        {"is_marlin_format", "false"},
        {"quantization_status", "compressed, frozen"},
        {"location", "weight_input, weight_output"}, /* of a rotation in the weights. Others run at inference */
        {"bits", "4, 8, 16"},
        {"num_bits", "4, 8"},
        {"group_size", "-1, 16, 32, 64, 128, 256, 512, 1024"},
        {"weight_block_size", "16, 32, 64, 128, 256"},
        {"block_structure", "16, 32, 64, 128, 256"}};
    const cJSON *one;
    if (failed(load) || strstr(key, "activations") || !strcmp(key, "kv_cache_scheme") || cJSON_IsNull(x)) return;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(key, known[i][0]) || cJSON_IsArray(x)) continue;
        LocalText text = cJSON_IsString(x) ? text_print("%s", x->valuestring) : json_text(x);
        if (!text_listed(known[i][1], text))
            bad_file(load, path, "%s should be one of %s, and is %.80s", key, known[i][1], text);
    }
    cJSON_ArrayForEach(one, x) check_quantization(load, path, one->string ? one->string : key, one);
}

static void open_packed(Loader *load, const char *dir) {
    LocalText apart = path_join(dir, "quantize_config.json"); /* where older GPTQ models declare it */
    const char *path = load->path, *key = "quantization_config";
    if (!json_get(load->file, key)) key = "compression_config"; /* its older name */
    cJSON *older = json_get(load->file, key) || failed(load) ? NULL : model_json(load, dir, "quantize_config.json");
    if (older) cJSON_AddItemToObject(load->file, key = "quantize_config.json", older), path = apart;
    const cJSON *q = load->quantization = config_typed(load, load->file, key, cJSON_Object, "an object");
    const char *version = json_string(q, "version");
    const cJSON *groups = json_get(q, "config_groups"), *one;
    if (q) check_quantization(load, path, "", q);
    load->zeros = groups && groups->child;
    cJSON_ArrayForEach(one, groups) load->zeros &= cJSON_IsFalse(json_get(json_get(one, "weights"), "symmetric"));
    if (json_is(q, "quant_method", "awq") && version && strcasecmp(version, "gemm"))
        config_bad(load, q, "version", "\"gemm\"");
    if (json_is(q, "quant_method", "auto-round") && !json_is(q, "packing_format", "auto_round:auto_gptq") &&
        !json_is(q, "packing_format", "auto_round:auto_awq"))
        config_bad(load, q, "packing_format", "auto_round:auto_gptq or auto_round:auto_awq");
}

/* ---- grids: scales and zeros ---- */

/* Binds a grid of w, or its codes, which are a grid of one entry a weight and hold `values` weights. */
static View bind_grid(Loader *load, const char *name, const char *suffix, const Linear *w, Grid g, int64_t values) {
    const int rows = divided(w->rows, g.rows), cols = divided(w->cols, g.cols);
    int64_t shape[2];
    stored_shape(g.type, g.transposed ? cols : rows, g.transposed ? rows : cols, shape);
    Tensor *t = bind_tensor(load, name, suffix, g.type, 2, shape);
    belongs(t, w->type, values);
    return tensor_view(load, t, shape[0]);
}

/* The suffixes of the tensors of an encoded matrix. The first row wins whose mark exists and whose codes have the right
 * dtype and shape. */
typedef struct {
    Type type;
    const char *codes, *mark, *scale, *zero, *group; /* mark: a tensor that must exist. NULL: none */
    Type scales, zeros;                              /* their types; the tensor of scales may have another */
    int cols;                                        /* columns that share a scale, unless the scales' shape tells */
} Encoding;

/* clang-format off */
static const Encoding encodings[] = {
    {AWQ4, ".qweight", NULL, ".scales", ".qzeros", NULL, F16, AWQ4, 128},
    {GPTQ4, ".qweight", NULL, ".scales", ".qzeros", ".g_idx", F16, PACKED4, 128},
    {GPTQ8, ".qweight", NULL, ".scales", ".qzeros", ".g_idx", F16, PACKED8, 128},
    {PACKED4, ".weight_packed", NULL, ".weight_scale", ".weight_zero_point", ".weight_g_idx", BF16, GPTQ4, 128},
    {PACKED8, ".weight_packed", NULL, ".weight_scale", ".weight_zero_point", ".weight_g_idx", BF16, GPTQ8, 128},
    {NVFP4, ".weight_packed", ".weight_global_scale", ".weight_scale", NULL, NULL, FP8, 0, 16},
    {NVFP4, ".weight", ".weight_scale_2", ".weight_scale", NULL, NULL, FP8, 0, 16},
    {MXFP4, ".weight_packed", NULL, ".weight_scale", NULL, NULL, E8M0, 0, 32},
    {FP8, ".weight", ".weight_scale", ".weight_scale", NULL, NULL, BF16, 0, INT32_MAX},
    {FP8, ".weight", ".scale", ".scale", NULL, NULL, BF16, 0, INT32_MAX},
    {FP8, ".weight", NULL, ".weight_scale_inv", NULL, NULL, BF16, 0, INT32_MAX},
    {INT8, ".weight", NULL, ".weight_scale", ".weight_zero_point", NULL, BF16, INT8, INT32_MAX}};
/* clang-format on */

/* How many of n rows or columns share each of `count` entries: one, all, or a power of two from 16 on; else 0. */
static int shared_by(int n, int64_t count) {
    int by = 16;
    while (divided(n, by) > count && by < n) by *= 2;
    return count == 1 ? n : count == n ? 1 : divided(n, by) == count ? by : 0;
}

/* Binds the scales of w, whose usual grid is in w->scale. FP4 has no other; for other types the shape tells which
 * weights share a scale. */
static View bind_scale(Loader *load, const char *name, const char *suffix, Linear *w) {
    const Grid usual = w->scale;
    Tensor *t = find_tensor(load, name, suffix);
    if (!t || is_fp4(w->type)) return bind_grid(load, name, suffix, w, usual, 0);
    const int64_t *s = t->shape, lines = t->dims ? s[0] : 1, each = t->dims == 4 ? s[2] : t->dims == 2 ? s[1] : 1;
    const bool flat = t->dims < 3 || (t->dims == 4 && s[1] == 1 && s[3] == 1);
    Grid g = usual;
    g.type = type_of(t);
    g.rows = shared_by(w->rows, g.transposed ? each : lines), g.cols = shared_by(w->cols, g.transposed ? lines : each);
    bool type = is_float(g.type) || (w->type == FP8 && g.type == E8M0), whole = g.cols == w->cols;
    bool rows = g.rows && (usual.rows == 1 || g.rows == 1 || g.rows == w->rows || g.rows == usual.rows);
    bool cols = whole || (usual.rows == 1 ? g.cols >= 16 : g.cols == usual.cols);
    belongs(t, w->type, 0);
    if (!tensor_is(load, t, flat && type && rows && cols, "scales of its matrix")) return (View){0};
    w->scale = g;
    return tensor_view(load, t, lines);
}

/* GPTQ's g_idx: for each column of w the column of the grids. NULL: the usual c / cols. */
static const int *bind_group(Loader *load, const char *name, const char *suffix, const Linear *w) {
    bool wanted = in_gptq(w->type) && json_true(load->quantization, "desc_act"), in_order = true;
    if (!wanted && !find_tensor(load, name, suffix)) return NULL;
    Tensor *t =
        bind_tensor(load, name, suffix, w->type, 1, (int64_t[]){w->cols}); /* stored in words, as the codes are */
    if (!t->data) return NULL;
    belongs(t, w->type, 0);
    int *group = keep(load->c, (size_t)w->cols, sizeof *group), groups = divided(w->cols, w->scale.cols);
    memcpy(group, t->data, t->size);
    for (int c = 0; c < w->cols; c++) {
        in_order &= group[c] == c / w->scale.cols;
        if (group[c] < 0 || group[c] >= groups)
            bad_file(load, file_of(load, t), "tensor '%s' gives column %d the group %d, expected 0 to %d", t->name, c,
                     group[c], groups - 1);
    }
    return in_order ? NULL : group;
}

/* NVFP4's factor of all scales. compressed-tensors stores its inverse. */
static float bind_factor(Loader *load, const char *name, const char *suffix) {
    const bool divides = !strcmp(suffix, ".weight_global_scale");
    Tensor *t = bind_tensor(load, name, suffix, F32, 1, (int64_t[]){1});
    const float factor = t->data ? code_at(F32, t->data, 0, 0, 0) : 1;
    tensor_is(load, t, factor > 0 && isfinite(factor), "a positive number");
    belongs(t, NVFP4, 0);
    return divides ? 1 / factor : factor;
}

/* Binds the scales and zeros of w and whatever else its encoding has. */
static void bind_grids(Loader *load, const char *name, const Encoding *how, Linear *w, Stored *one) {
    const bool transposed = in_gptq(w->type) || w->type == AWQ4;
    const cJSON *block = w->type == FP8 ? json_get(load->quantization, "weight_block_size") : NULL;
    int64_t rows = 1, cols = how->cols;
    if (block && !(cJSON_GetArraySize(block) == 2 && json_whole(block->child, 1, INT32_MAX, &rows) &&
                   json_whole(block->child->next, 1, INT32_MAX, &cols)))
        config_bad(load, load->quantization, "weight_block_size", "two whole numbers");
    w->scale = (Grid){how->scales, (int)rows, (int)MIN(cols, w->cols), transposed};
    one->scale = bind_scale(load, name, how->scale, w);
    if (how->zero && (transposed || load->zeros || find_tensor(load, name, how->zero))) {
        w->zero = (Grid){how->zeros, w->scale.rows, w->scale.cols, in_words(w->type) && w->type != AWQ4};
        one->zero = bind_grid(load, name, how->zero, w, w->zero, 0);
        w->zero_plus_one = in_gptq(w->type) && !json_is(load->quantization, "checkpoint_format", "gptq_v2") &&
                           !json_is(load->quantization, "format", "gptq_v2"); /* its newer name */
    }
    if (how->group) one->group = bind_group(load, name, how->group, w);
    if (w->type == NVFP4) one->factor = bind_factor(load, name, how->mark);
}

/* ---- made up matrices ---- */

/* The type with this name; NO_TYPE: the mixture. */
static Type named_type(const char *name, Error *e) {
    LocalBytes names = {0};
    if (!strcasecmp(name, "Q4_K_M")) return NO_TYPE;
    for (Type type = BF16; type < types_n; type++) {
        if (type == E8M0) continue;
        if (!strcasecmp(name, types[type].name)) return type;
        bytes_print(&names, ", %s", types[type].name);
    }
    fail(e, USAGE, "--encoding must be one of Q4_K_M%s, not '%.40s'", names.data, name);
    return BF16;
}

/* The type of a made up matrix. A router is never encoded, embedding and head only in GGUF's types. The mixture is
 * llama.cpp's Q4_K_M: Q6_K for the head, and for v and down in the first and last eighth of the layers and in every
 * third between. It has other rules for models of eight experts and for Llama's 70B. */
static Type made_up_type(const Loader *load, const char *name) {
    Error ignored;
    if (!load->encoding) return BF16;
    const Type as = named_type(load->encoding, &ignored);
    const char *layer = strstr(load->prefix, "layers."), *dot = strrchr(name, '.');
    if (text_listed("mlp.router mlp.gate block_sparse_moe.gate", name) || (!layer && as != NO_TYPE && as < Q8_0))
        return BF16;
    if (as != NO_TYPE) return as;
    if (!layer) return load->tied || !strcmp(name, "lm_head") ? Q6_K : Q4_K;
    int i = (int)strtol(layer + 7, NULL, 10), n = load->c->model.n_layers;
    bool more = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
    return more && text_listed("v_proj kv_b_proj down_proj w2", dot + 1) ? Q6_K : Q4_K;
}

/* ---- matrices ---- */

/* Finds how a module's matrix is encoded or made up. NULL: as plain rows. If no shape fits, the first row whose codes
 * exist; binding them reports the shape. */
static const Encoding *find_encoding(const Loader *load, const char *name, int rows, int cols) {
    const bool made_up = load->c->model.made_up, awq = json_is(load->quantization, "quant_method", "awq");
    const Encoding *near = NULL, *end = encodings + sizeof encodings / sizeof *encodings;
    const Type as = made_up ? made_up_type(load, name) : NO_TYPE;
    for (const Encoding *one = encodings; one < end; one++) {
        const Tensor *t = find_tensor(load, name, one->codes);
        int64_t shape[2];
        stored_shape(one->type, rows, cols, shape);
        if (one->type == as) return one;
        if (!t || (one->mark && !find_tensor(load, name, one->mark)) || (awq && in_gptq(one->type))) continue;
        bool dtype = has_dtype(t, one->type);
        if (dtype && t->dims == 2 && !memcmp(t->shape, shape, sizeof shape)) return one;
        if (!near && (one->type != AWQ4 || awq) && (dtype || !strcmp(one->codes, ".qweight"))) near = one;
    }
    return near;
}

static bool bind_packed(Loader *load, const char *name, Linear *w, Stored *one) {
    const Encoding *how = find_encoding(load, name, w->rows, w->cols);
    if (!how && load->c->model.made_up) w->type = made_up_type(load, name);
    if (!how) return false;
    w->type = how->type;
    if (!in_words(w->type) && w->cols % types[w->type].values)
        bad_file(load, load->path, "%s has rows of %d, not whole blocks of %d as %s wants", name, w->cols,
                 types[w->type].values, types[w->type].name);
    if (in_gptq(w->type) && !load->quantization && !load->c->model.made_up)
        bad_file(load, load->path, "%s is GPTQ and has no quantization_config: download quantize_config.json too",
                 name);
    one->data = bind_grid(load, name, how->codes, w, (Grid){w->type, 1, 1, false}, (int64_t)w->rows * w->cols);
    bind_grids(load, name, how, w, one);
    return true;
}

/* In GPTQ and AWQ a line crosses all rows. A word or an entry that several rows share must not be
 * split. */
static bool cut_packed(Loader *load, View *v, const Linear *w, Grid g, int first, int rows) {
    const bool across = in_gptq(w->type) || w->type == AWQ4, words = g.transposed || g.type == AWQ4;
    const int shared = g.rows * (words ? types[g.type].values : 1);
    if (first % shared || rows % shared)
        bad_file(load, load->path, "kv_b_proj in %s is only implemented for heads of whole blocks of %d rows",
                 types[w->type].name, shared);
    if (!across) return *v = lines_of(*v, (size_t)(first / shared), 1, rows / shared), true;
    const size_t begin = v->bytes * (size_t)first / (size_t)w->rows;
    v->offset += begin, v->data = v->data ? v->data + begin : NULL;
    v->bytes = v->bytes * (size_t)rows / (size_t)w->rows;
    return true;
}

static bool knows(const char *encoding, Error *e) {
    *e = (Error){0};
    named_type(encoding, e);
    return !e->code;
}

const Packing packed = {open_packed, bind_packed, cut_packed, knows};
