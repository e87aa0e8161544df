/* packed.c: matrices that are not plain rows of numbers: FP8 and INT8 with scales, compressed-tensors, GPTQ, AWQ,
 * NVFP4, MXFP4. How a matrix is encoded, and which of its weights share a scale, is read from its tensors;
 * quantization_config tells GPTQ's two versions apart, and what is not implemented. */
#include "packed.h"
#include "host.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/param.h>

static bool is_fp4(Type type) { return type == MXFP4 || type == NVFP4; }
static bool in_words(Type type) { return !strcmp(types[type].dtype, "I32"); }
static bool in_gptq(Type type) { return types[type].columns > 1; }
static bool is_across(Type type) { return types[type].columns > 0; } /* a line crosses all rows: GPTQ, AWQ */

/* The shape of the tensor that holds a matrix. */
static void stored_shape(Type type, int rows, int cols, int64_t shape[2]) {
    const int values = types[type].values, columns = types[type].columns;
    shape[0] = rows, shape[1] = (int64_t)divided(cols, values) * block_entries(type);
    if (columns) shape[0] = divided(cols, columns), shape[1] = divided(rows, values / columns);
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
    Tensor *t = bind_tensor(load, name, suffix, g.type, w, 2, shape);
    belongs(t, w->type, values);
    return tensor_view(load, t, shape[0]);
}

typedef struct {                                     /* suffixes of the tensors of an encoded matrix */
    const char *codes, *mark, *scale, *zero, *group; /* mark: a tensor that must exist. NULL: none */
    Type scales, zeros;                              /* their types; the tensor of scales may have another */
    int cols;                                        /* columns that share a scale, unless the scales' shape tells */
} Names;
#define NAMES_ROW(type, dtype, values, bytes, bits, zero, columns, card, weight, put, ...) {type, {__VA_ARGS__}},
/* The first Names win whose mark exists and whose codes have the right dtype and shape. */
static const struct {
    Type type;
    Names names[4]; /* without codes: the end */
} encodings[] = {PACKED_TYPES(NAMES_ROW){MXFP4, {{".weight_packed", NULL, ".weight_scale", NULL, NULL, E8M0, 0, 32}}}};

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
    Tensor *t = bind_tensor(load, name, suffix, w->type, w, 1, (int64_t[]){w->cols}); /* in words, as the codes are */
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
static float bind_factor(Loader *load, const char *name, const char *suffix, const Linear *w) {
    const bool divides = !strcmp(suffix, ".weight_global_scale");
    Tensor *t = bind_tensor(load, name, suffix, F32, w, 1, (int64_t[]){1});
    const float factor = t->data ? f32_weight(t->data, 0).q : 1;
    tensor_is(load, t, factor > 0 && isfinite(factor), "a positive number");
    belongs(t, NVFP4, 0);
    return divides ? 1 / factor : factor;
}

/* Binds the scales and zeros of w and whatever else its encoding has. Made-up ones have no group, no factor, and
 * zeros in the middle of their codes. */
static void bind_grids(Loader *load, const char *name, const Names *how, bool made, Linear *w, Stored *one) {
    const bool transposed = is_across(w->type);
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
        w->zero_plus_one = in_gptq(w->type) && !made && !json_is(load->quantization, "checkpoint_format", "gptq_v2") &&
                           !json_is(load->quantization, "format", "gptq_v2"); /* its newer name */
    }
    if (how->group && !made) one->group = bind_group(load, name, how->group, w);
    if (w->type == NVFP4 && !made) one->factor = bind_factor(load, name, how->mark, w);
}

/* ---- matrices ---- */

/* Finds how a module's matrix is encoded: by its tensors or, if the container makes them, by w's type. NULL: as plain
 * rows. If no shape fits, the first Names whose codes exist; binding them reports the shape. */
static const Names *find_encoding(const Loader *load, const char *name, Linear *w) {
    const bool awq = json_is(load->quantization, "quant_method", "awq");
    const Names *near = NULL;
    Type type = w->type;
    for (size_t i = 0; i < sizeof encodings / sizeof *encodings; i++)
        for (const Names *one = encodings[i].names; one->codes; one++) {
            const Type as = encodings[i].type;
            const Tensor *t = find_tensor(load, name, one->codes);
            int64_t shape[2];
            stored_shape(as, w->rows, w->cols, shape);
            if (as == w->type) return one;
            if (!t || (one->mark && !find_tensor(load, name, one->mark)) || (awq && in_gptq(as))) continue;
            bool dtype = has_dtype(t, as);
            if (dtype && t->dims == 2 && !memcmp(t->shape, shape, sizeof shape)) return w->type = as, one;
            if (!near && (as != AWQ4 || awq) && (dtype || !strcmp(one->codes, ".qweight"))) near = one, type = as;
        }
    return w->type = type, near;
}

static bool bind_packed(Loader *load, const char *name, Linear *w, Stored *one) {
    const Names *how = find_encoding(load, name, w);
    if (!how) return false;
    const bool made = !find_tensor(load, name, how->codes);
    if (!in_words(w->type) && w->cols % types[w->type].values)
        bad_file(load, load->path, "%s has rows of %d, not whole blocks of %d as %s wants", name, w->cols,
                 types[w->type].values, types[w->type].name);
    if (in_gptq(w->type) && !load->quantization && !made)
        bad_file(load, load->path, "%s is GPTQ and has no quantization_config: download quantize_config.json too",
                 name);
    one->data = bind_grid(load, name, how->codes, w, (Grid){w->type, 1, 1, false}, (int64_t)w->rows * w->cols);
    bind_grids(load, name, how, made, w, one);
    return true;
}

/* A word or an entry that several rows share must not be split. */
static bool cut_packed(Loader *load, View *v, const Linear *w, Grid g, int first, int rows) {
    const bool words = g.transposed || g.type == AWQ4;
    const int shared = g.rows * (words ? types[g.type].values : 1);
    if (first % shared || rows % shared)
        bad_file(load, load->path, "kv_b_proj in %s is only implemented for heads of whole blocks of %d rows",
                 types[w->type].name, shared);
    if (!is_across(w->type)) return *v = lines_of(*v, (size_t)(first / shared), 1, rows / shared), true;
    const size_t begin = v->bytes * (size_t)first / (size_t)w->rows;
    v->offset += begin, v->data = v->data ? v->data + begin : NULL;
    v->bytes = v->bytes * (size_t)rows / (size_t)w->rows;
    return true;
}

/* ---- what exporters add ---- */

/* Scales of activations and of the cache, which both stay bf16, the shapes of packed codes, which config.json gives
 * too, and more; and biases of zeros, of matrices that have none. */
static bool left_out(const Tensor *t) {
    static const char ignored[] = "input_scale weight_shape input_global_scale input_zero_point input_scale_ub k_scale "
                                  "v_scale q_scale kv_scale prob_scale output_scale";
    const char *dot = strrchr(t->name, '.');
    const Type type = type_of(t);
    bool zeros = dot && !strcmp(dot, ".bias") && is_float(type);
    for (size_t i = 0; zeros && i < t->size; i += (size_t)types[type].bytes)
        zeros = types[type].weight(t->data + i, 0).q == 0;
    return zeros || strstr(t->name, "activation_scale") || (dot && text_listed(ignored, dot + 1));
}

const Packing packed = {open_packed, bind_packed, cut_packed, left_out};
