/* model.c: reads config.json, knows the families, binds weights, finds models on disk. See model.h.
 *
 * A family is one row of families[]: what its tensors are called and which formulas it uses. Everything odd about a
 * family is folded in here, so that nothing behind infer.h asks which one it is: fused and interleaved matrices become
 * views, every RoPE scaling becomes a table of angles, small tensors become float arrays. */
#include "model.h"

#include <ctype.h>
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_CONFIG = 1 << 20, MOST_INDEX = 64 << 20, REQUIRED = -1 };

typedef struct {
    const char *model_type; /* of config.json */
    Act act;
    bool attention_bias; /* where config.json does not say */
    int head_dim;        /* the same; 0: hidden_size / num_attention_heads */
    bool head_norms;     /* RMSNorm of each head of q and k before RoPE */
    const char *sinks;   /* tensor of a layer, or NULL */
    const char *router;  /* Linear of a layer, or NULL: dense */
    const char *gate_up; /* fused: even rows gate, odd rows up; or NULL: two Linears */
    const char *gate, *up, *down;
    const char *quant_method; /* the one that its weights may have, or NULL */
    bool windows;             /* layer_types and sliding_window count */
} Family;

static const Family families[] = {
    {.model_type = "gpt_oss",
     .act = SWIGLU_CLAMPED,
     .attention_bias = true,
     .head_dim = REQUIRED,
     .sinks = "self_attn.sinks",
     .router = "mlp.router",
     .gate_up = "mlp.experts.gate_up_proj",
     .down = "mlp.experts.down_proj",
     .quant_method = "mxfp4",
     .windows = true},
    {.model_type = "llama", .act = SWIGLU, .gate = "mlp.gate_proj", .up = "mlp.up_proj", .down = "mlp.down_proj"},
    {.model_type = "qwen3",
     .act = SWIGLU,
     .head_dim = 128,
     .head_norms = true,
     .gate = "mlp.gate_proj",
     .up = "mlp.up_proj",
     .down = "mlp.down_proj"},
};

static const struct {
    Type type;
    const char *name, *dtype; /* of the safetensors format; MXFP4 is blocks and scales of U8 */
    size_t size;
} types[] = {{BF16, "BF16", "BF16", 2}, {F16, "F16", "F16", 2}, {F32, "F32", "F32", 4}, {MXFP4, "MXFP4", NULL, 0}};

const char *type_name(Type type) { return types[type].name; }

typedef struct { /* one model being read */
    Checkpoint *c;
    const Family *family;
    const cJSON *config;
    char *path;  /* of config.json */
    int windows; /* sliding_window */
    bool tied;
    size_t made_up; /* bytes of tensors that were made up so far */
    Error *e;
} Reader;

/* ---- config.json ---- */

static bool config_bad(Reader *r, const char *key, const char *expected) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(r->config, key);
    char *found = value ? json_text(value) : NULL;
    fail(r->e, BAD_MODEL, "%s: %s should be %s and is %.80s", r->path, key, expected, found ? found : "missing");
    free(found);
    return false;
}

/* A whole number in [least, most]; `absent` stands for a missing one, REQUIRED for none. */
static bool config_whole(Reader *r, const char *key, int least, int most, int absent, int *out) {
    const cJSON *value = json_get(r->config, key);
    int64_t n = absent;
    char expected[80];
    snprintf(expected, sizeof expected, "a whole number from %d to %d", least, most);
    if ((value && !json_whole(value, least, most, &n)) || n < least) return config_bad(r, key, expected);
    *out = (int)n;
    return true;
}

/* A number in (above, below). */
static bool config_number(Reader *r, const cJSON *object, const char *key, double above, double below, double absent,
                          double *out) {
    const cJSON *value = json_get(object, key);
    double x = value ? value->valuedouble : absent;
    if ((value && !cJSON_IsNumber(value)) || !(x > above && x < below)) {
        char *found = value ? json_text(value) : NULL;
        fail(r->e, BAD_MODEL, "%s: %s should be a number between %g and %g and is %.80s", r->path, key, above, below,
             found ? found : "missing");
        free(found);
        return false;
    }
    *out = x;
    return true;
}

static void *keep(Checkpoint *c, size_t bytes) {
    c->owned = reallocate(c->owned, (size_t)(c->owned_n + 1) * sizeof *c->owned);
    return c->owned[c->owned_n++] = allocate(bytes);
}

/* RoPE's angles per position, theta^(-2i/d) (Su et al., "RoFormer", 2021), with the scaling that config.json names. */
static bool read_rope(Reader *r) {
    Model *m = &r->c->model;
    const cJSON *rope = json_get(r->config, "rope_parameters"); /* transformers 5; before: rope_scaling */
    if (!rope) rope = json_get(r->config, "rope_scaling");
    const char *type = json_string(rope, "rope_type");
    if (!type) type = json_string(rope, "type"); /* older still */
    if (!type) type = "default";
    double theta, factor = 1, original = 0, d = m->head_dim;
    if (!config_number(r, r->config, "rope_theta", 0, 1e12, 10000, &theta) ||
        !config_number(r, rope, "rope_theta", 0, 1e12, theta, &theta))
        return false;
    if (strcmp(type, "default") && !config_number(r, rope, "factor", 0, 1e6, 0, &factor)) return false;
    bool yarn = !strcmp(type, "yarn"), llama3 = !strcmp(type, "llama3");
    if ((yarn || llama3) && !config_number(r, rope, "original_max_position_embeddings", 0, 1e9, 0, &original))
        return false;
    if (!yarn && !llama3 && strcmp(type, "default") && strcmp(type, "linear"))
        return fail(r->e, BAD_MODEL, "%s: rope type '%.40s' is not implemented (default, linear, llama3 and yarn are)",
                    r->path, type);
    float *inv_freq = keep(r->c, (size_t)m->head_dim / 2 * sizeof *inv_freq);
    m->inv_freq = inv_freq;
    m->rope_scale = 1;
    /* YaRN (Peng et al., 2023, section 3.2): dimensions that turn more than beta_fast times over the original context
     * keep their angle, those that turn less than beta_slow times are slowed by the factor, a ramp lies between. */
    double low = 0, high = 1, fast = 32, slow = 1, scale;
    if (yarn) {
        if (!config_number(r, rope, "beta_fast", 0, 1e6, 32, &fast) ||
            !config_number(r, rope, "beta_slow", 0, 1e6, 1, &slow))
            return false;
        if (!config_number(r, rope, "attention_factor", 0, 1e6, factor > 1 ? 0.1 * log(factor) + 1 : 1, &scale))
            return false;
        const cJSON *truncate = json_get(rope, "truncate");
        low = d * log(original / (fast * 2 * M_PI)) / (2 * log(theta));
        high = d * log(original / (slow * 2 * M_PI)) / (2 * log(theta));
        if (!truncate || cJSON_IsTrue(truncate)) low = floor(low), high = ceil(high);
        low = fmax(low, 0);
        high = fmin(high, d - 1);
        if (low == high) high += 0.001;
        m->rope_scale = (float)scale;
    }
    /* llama3 (Llama 3.1's release, also transformers): the same idea by wavelengths. */
    double low_factor = 1, high_factor = 4;
    if (llama3 && (!config_number(r, rope, "low_freq_factor", 0, 1e6, 0, &low_factor) ||
                   !config_number(r, rope, "high_freq_factor", low_factor, 1e6, 0, &high_factor)))
        return false;
    for (int i = 0; i < m->head_dim / 2; i++) {
        double f = pow(theta, -2.0 * i / d), keep_share = 0;
        if (yarn) keep_share = 1 - fmin(fmax((i - low) / (high - low), 0), 1);
        if (llama3)
            keep_share = fmin(fmax((original * f / (2 * M_PI) - low_factor) / (high_factor - low_factor), 0), 1);
        inv_freq[i] = (float)(f * keep_share + f / factor * (1 - keep_share));
    }
    return true;
}

static bool read_windows(Reader *r) {
    Model *m = &r->c->model;
    const cJSON *list = json_get(r->config, "layer_types"), *entry;
    bool windows = r->family->windows;
    int i = 0, window = 0;
    if (!windows && json_true(r->config, "use_sliding_window"))
        return fail(r->e, BAD_MODEL, "%s: use_sliding_window is not implemented for %s", r->path,
                    r->family->model_type);
    if (list && (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != m->n_layers))
        return fail(r->e, BAD_MODEL, "%s: layer_types should be an array of %d, one a layer", r->path, m->n_layers);
    if (windows && !config_whole(r, "sliding_window", 1, INT32_MAX, REQUIRED, &window)) return false;
    for (; i < m->n_layers && !list; i++) m->layer[i].window = i % 2 ? 0 : window; /* gpt-oss without a list */
    cJSON_ArrayForEach(entry, list) {
        const char *type = cJSON_IsString(entry) ? entry->valuestring : "";
        bool sliding = windows && !strcmp(type, "sliding_attention");
        if (!sliding && strcmp(type, "full_attention"))
            return fail(r->e, BAD_MODEL, "%s: layer_types[%d] is '%.40s', which is not implemented for %s", r->path, i,
                        type, r->family->model_type);
        m->layer[i++].window = sliding ? window : 0;
    }
    return true;
}

static bool read_stop(Reader *r, const cJSON *config, const char *path) {
    const cJSON *eos = json_get(config, "eos_token_id"), *one;
    if (!eos) return true;
    for (one = cJSON_IsArray(eos) ? eos->child : eos; one; one = cJSON_IsArray(eos) ? one->next : NULL) {
        int64_t id;
        if (!json_whole(one, 0, r->c->model.vocab - 1, &id))
            return fail(r->e, BAD_MODEL, "%s: eos_token_id should lie in the vocabulary, 0 to %d", path,
                        r->c->model.vocab - 1);
        ids_add(&r->c->stop, (int)id);
    }
    return true;
}

static bool read_sizes(Reader *r) {
    Model *m = &r->c->model;
    bool experts = r->family->router;
    int head_dim = r->family->head_dim;
    double eps, limit = 7;
    if (!config_whole(r, "num_hidden_layers", 1, 4096, REQUIRED, &m->n_layers) ||
        !config_whole(r, "hidden_size", 1, 1 << 17, REQUIRED, &m->dim) ||
        !config_whole(r, "intermediate_size", 1, 1 << 20, REQUIRED, &m->ffn_dim) ||
        !config_whole(r, "vocab_size", 1, 1 << 22, REQUIRED, &m->vocab) ||
        !config_whole(r, "num_attention_heads", 1, 4096, REQUIRED, &m->n_heads) ||
        !config_whole(r, "num_key_value_heads", 1, 4096, experts ? REQUIRED : m->n_heads, &m->n_kv_heads) ||
        !config_whole(r, "head_dim", 2, 1024, head_dim ? head_dim : m->dim / m->n_heads, &m->head_dim) ||
        !config_whole(r, "max_position_embeddings", 1, 1 << 24, REQUIRED, &m->context) ||
        !config_number(r, r->config, "rms_norm_eps", 0, 1, 0, &eps))
        return false;
    m->eps = (float)eps;
    m->act = r->family->act;
    m->n_experts = m->top_k = 1;
    if (experts && (!config_whole(r, "num_local_experts", 1, 4096, REQUIRED, &m->n_experts) ||
                    !config_whole(r, "num_experts_per_tok", 1, m->n_experts, REQUIRED, &m->top_k)))
        return false;
    if (m->n_heads % m->n_kv_heads) return config_bad(r, "num_key_value_heads", "a divisor of num_attention_heads");
    if (m->head_dim % 2) return config_bad(r, "head_dim", "even (RoPE turns pairs)");
    if (m->act == SWIGLU_CLAMPED && !config_number(r, r->config, "swiglu_limit", 0, 1e6, 7, &limit)) return false;
    m->act_limit = (float)limit;
    const char *act = json_string(r->config, "hidden_act");
    if (act && strcmp(act, "silu")) return config_bad(r, "hidden_act", "\"silu\"");
    const cJSON *quantization = json_get(r->config, "quantization_config");
    const char *quant = json_string(quantization, "quant_method"), *known = r->family->quant_method;
    if (quantization && !(quant && known && !strcmp(quant, known)))
        return fail(r->e, BAD_MODEL, "%s: weights quantized by '%.40s' are not supported for %s", r->path,
                    quant ? quant : "(no quant_method)", r->family->model_type);
    m->layer = keep(r->c, (size_t)m->n_layers * sizeof *m->layer);
    memset(m->layer, 0, (size_t)m->n_layers * sizeof *m->layer);
    return true;
}

static bool read_config(Reader *r, const char *dir) {
    const char *type = json_string(r->config, "model_type");
    Bytes supported = {0};
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        bytes_print(&supported, "%s%s", i ? ", " : "", families[i].model_type);
        if (type && !strcmp(type, families[i].model_type)) r->family = families + i;
    }
    if (!r->family)
        fail(r->e, BAD_MODEL, "%s: model_type '%.60s' is not supported (supported: %s)", r->path,
             type ? type : "(missing)", supported.data);
    bytes_free(&supported);
    if (!r->family) return false;
    r->c->family = r->family->model_type;
    r->tied = json_true(r->config, "tie_word_embeddings");
    if (!read_sizes(r) || !read_rope(r) || !read_windows(r) || !read_stop(r, r->config, r->path)) return false;
    Bytes path = {0};
    bytes_print(&path, "%s/generation_config.json", dir);
    bool ok = true;
    if (!access(path.data, F_OK)) {
        cJSON *generation = json_read(path.data, MOST_CONFIG, r->e);
        ok = generation && read_stop(r, generation, path.data);
        cJSON_Delete(generation);
    }
    bytes_free(&path);
    return ok;
}

/* ---- binding ---- */

static void shape_text(int dims, const int64_t *shape, char out[160]) {
    int n = snprintf(out, 160, "(");
    for (int i = 0; i < dims; i++)
        n += snprintf(out + n, (size_t)(160 - n), "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(out + n, (size_t)(160 - n), ")");
}

/* A tensor that is in no file, at an offset of its own. */
static const Tensor *make_up(Reader *r, const char *name, const char *suffix, int dims, const int64_t *shape) {
    Tensor *t = keep(r->c, sizeof *t);
    bool packed = !strcmp(suffix, "_blocks") || !strcmp(suffix, "_scales");
    *t = (Tensor){.name = (char *)name, .dtype = packed ? "U8" : "BF16", .dims = dims, .offset = r->made_up};
    t->size = packed ? 1 : 2;
    for (int i = 0; i < dims; i++) t->size *= (size_t)shape[i];
    r->made_up += t->size;
    return t;
}

/* The tensor "PREFIX.NAME.SUFFIX" or NULL with a message; it must have this shape. Parts may be empty. */
static const Tensor *bind(Reader *r, int layer, const char *name, const char *suffix, int dims, const int64_t *shape) {
    char full[200], expected[160], found[160];
    if (layer >= 0)
        snprintf(full, sizeof full, "model.layers.%d.%s%s", layer, name, suffix);
    else
        snprintf(full, sizeof full, "%s%s", name, suffix);
    const Tensors *all = &r->c->tensors;
    if (r->c->model.made_up) return make_up(r, name, suffix, dims, shape);
    const Tensor *t = tensors_find(all, full);
    shape_text(dims, shape, expected);
    if (!t) {
        fail(r->e, BAD_MODEL, "%s: tensor '%s' %s is missing", all->file[0].name, full, expected);
        return NULL;
    }
    if (t->dims != dims || memcmp(t->shape, shape, (size_t)dims * sizeof *shape)) {
        shape_text(t->dims, t->shape, found);
        fail(r->e, BAD_MODEL, "%s: tensor '%s' has the shape %s, config.json needs %s", all->file[t->file].name, full,
             found, expected);
        return NULL;
    }
    r->c->bound[t - all->tensor] = true;
    return t;
}

static bool has(const Reader *r, int layer, const char *name, const char *suffix) {
    char full[200];
    snprintf(full, sizeof full, "model.layers.%d.%s%s", layer, name, suffix);
    return tensors_find(&r->c->tensors, full);
}

static bool tensor_type(Reader *r, const Tensor *t, Type *type) {
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].dtype && !strcmp(t->dtype, types[i].dtype)) {
            *type = types[i].type;
            return true;
        }
    return fail(r->e, BAD_MODEL, "%s: tensor '%s' has the dtype %s, expected BF16, F16 or F32",
                r->c->tensors.file[t->file].name, t->name, t->dtype);
}

/* A tensor of n elements as floats: every `stride`th from `first` on. */
static const float *floats(Reader *r, const Tensor *t, size_t n, size_t first, size_t stride) {
    Type type = BF16;
    if (!tensor_type(r, t, &type)) return NULL;
    float *out = keep(r->c, n * sizeof *out);
    bool made_up = r->c->model.made_up; /* norms do nothing, biases are not there */
    for (size_t i = 0; i < n && made_up; i++) out[i] = strstr(t->name, "norm") ? 1 : 0;
    for (size_t i = 0; i < n && !made_up; i++) {
        const unsigned char *at = t->data + (first + i * stride) * types[type].size;
        uint16_t half;
        memcpy(&half, at, 2);
        if (type == BF16) out[i] = bits_float((uint32_t)half << 16);
        if (type == F16) out[i] = f16_value(half);
        if (type == F32) memcpy(out + i, at, 4);
    }
    return out;
}

static bool bind_floats(Reader *r, int layer, const char *name, int n, const float **out) {
    const Tensor *t = bind(r, layer, name, "", 1, (int64_t[]){n});
    return t && (*out = floats(r, t, (size_t)n, 0, 1));
}

/* A view of rows first, first + step, ... of the matrices in t, each row `stride` bytes. */
static View rows_view(const Reader *r, const Tensor *t, size_t stride, int rows, int first, int step) {
    size_t skip = (size_t)first * stride;
    bool made_up = r->c->model.made_up;
    return (View){.data = made_up ? NULL : t->data + skip,
                  .fd = made_up ? -1 : r->c->tensors.file[t->file].fd,
                  .offset = t->offset + skip,
                  .size = t->size - (size_t)(step - 1) * stride,
                  .stride = stride * (size_t)step,
                  .step = stride * (size_t)step * (size_t)rows};
}

/* NAME.weight (rows, cols) and, where the file has it or config.json wants it, NAME.bias. */
static bool bind_linear(Reader *r, int layer, const char *name, int rows, int cols, bool bias, Linear *out) {
    const Tensor *t = bind(r, layer, name, ".weight", 2, (int64_t[]){rows, cols});
    *out = (Linear){.rows = rows, .cols = cols, .n = 1};
    if (!t || !tensor_type(r, t, &out->type)) return false;
    out->data = rows_view(r, t, (size_t)cols * types[out->type].size, rows, 0, 1);
    if (!bias && !has(r, layer, name, ".bias")) return true;
    const Tensor *b = bind(r, layer, name, ".bias", 1, (int64_t[]){rows});
    return b && (out->bias = floats(r, b, (size_t)rows, 0, 1));
}

/* The experts' MXFP4 matrices NAME_blocks, _scales and _bias, (n, fused rows, cols); rows first, first + step, ... */
static bool bind_experts(Reader *r, int layer, const char *name, int rows, int cols, int first, int step, Linear *out) {
    int n = r->c->model.n_experts;
    if (cols % 32) return fail(r->e, BAD_MODEL, "%s: MXFP4 rows of %d are not whole blocks of 32", r->path, cols);
    const Tensor *blocks = bind(r, layer, name, "_blocks", 4, (int64_t[]){n, rows * step, cols / 32, 16});
    const Tensor *scales = blocks ? bind(r, layer, name, "_scales", 3, (int64_t[]){n, rows * step, cols / 32}) : NULL;
    const Tensor *bias = scales ? bind(r, layer, name, "_bias", 2, (int64_t[]){n, rows * step}) : NULL;
    if (!bias) return false;
    const Tensor *wrong = strcmp(blocks->dtype, "U8") ? blocks : strcmp(scales->dtype, "U8") ? scales : NULL;
    if (wrong)
        return fail(r->e, BAD_MODEL, "%s: tensor '%s' has the dtype %s, expected U8",
                    r->c->tensors.file[wrong->file].name, wrong->name, wrong->dtype);
    *out = (Linear){.type = MXFP4, .rows = rows, .cols = cols, .n = n};
    out->data = rows_view(r, blocks, (size_t)cols / 2, rows, first, step);
    out->scale = rows_view(r, scales, (size_t)cols / 32, rows, first, step);
    return (out->bias = floats(r, bias, (size_t)n * (size_t)rows, (size_t)first, (size_t)step));
}

static bool bind_layer(Reader *r, int i) {
    const Family *f = r->family;
    const Model *m = &r->c->model;
    Layer *l = m->layer + i;
    const cJSON *says = json_get(r->config, "attention_bias");
    bool bias = says ? cJSON_IsTrue(says) : f->attention_bias;
    int q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    if (!bind_floats(r, i, "input_layernorm.weight", m->dim, &l->attn_norm) ||
        !bind_floats(r, i, "post_attention_layernorm.weight", m->dim, &l->ffn_norm) ||
        !bind_linear(r, i, "self_attn.q_proj", q, m->dim, bias, &l->q) ||
        !bind_linear(r, i, "self_attn.k_proj", kv, m->dim, bias, &l->k) ||
        !bind_linear(r, i, "self_attn.v_proj", kv, m->dim, bias, &l->v) ||
        !bind_linear(r, i, "self_attn.o_proj", m->dim, q, bias, &l->o))
        return false;
    if (f->head_norms && (!bind_floats(r, i, "self_attn.q_norm.weight", m->head_dim, &l->q_norm) ||
                          !bind_floats(r, i, "self_attn.k_norm.weight", m->head_dim, &l->k_norm)))
        return false;
    if (f->sinks && !bind_floats(r, i, f->sinks, m->n_heads, &l->sinks)) return false;
    if (f->router && !bind_linear(r, i, f->router, m->n_experts, m->dim, true, &l->router)) return false;
    if (f->gate_up)
        return bind_experts(r, i, f->gate_up, m->ffn_dim, m->dim, 0, 2, &l->gate) &&
               bind_experts(r, i, f->gate_up, m->ffn_dim, m->dim, 1, 2, &l->up) &&
               bind_experts(r, i, f->down, m->dim, m->ffn_dim, 0, 1, &l->down);
    bias = json_true(r->config, "mlp_bias");
    return bind_linear(r, i, f->gate, m->ffn_dim, m->dim, bias, &l->gate) &&
           bind_linear(r, i, f->up, m->ffn_dim, m->dim, bias, &l->up) &&
           bind_linear(r, i, f->down, m->dim, m->ffn_dim, bias, &l->down);
}

static bool bind_all(Reader *r) {
    Model *m = &r->c->model;
    const Tensors *all = &r->c->tensors;
    const char *embed = "model.embed_tokens", *head = "lm_head";
    if (r->tied) { /* one matrix, stored under either name */
        if (!tensors_find(all, "model.embed_tokens.weight")) embed = head;
        head = embed;
        const Tensor *copy = tensors_find(all, "lm_head.weight");
        if (copy) r->c->bound[copy - all->tensor] = true;
    }
    if (!bind_linear(r, -1, embed, m->vocab, m->dim, false, &m->embed) ||
        !bind_linear(r, -1, head, m->vocab, m->dim, false, &m->head) ||
        !bind_floats(r, -1, "model.norm.weight", m->dim, &m->norm))
        return false;
    for (int i = 0; i < m->n_layers; i++)
        if (!bind_layer(r, i)) return false;
    for (int i = 0; i < all->n; i++) /* a tensor without a place is a formula that would be left out */
        if (!r->c->bound[i] && !strstr(all->tensor[i].name, ".rotary_emb.inv_freq"))
            return fail(r->e, BAD_MODEL, "%s: tensor '%s' has no place in a model of %d layers of the family %s",
                        all->file[all->tensor[i].file].name, all->tensor[i].name, m->n_layers, r->family->model_type);
    return true;
}

static bool open_directory(Checkpoint *c, const char *dir, bool made_up, Error *e) {
    *c = (Checkpoint){.model.made_up = made_up};
    Bytes path = {0};
    bytes_print(&path, "%s/config.json", dir);
    if (access(path.data, F_OK)) {
        bytes_free(&path);
        return fail(e, BAD_MODEL, "%s: no config.json is here: is it a model directory, downloaded whole?", dir);
    }
    cJSON *config = json_read(path.data, MOST_CONFIG, e);
    Reader r = {.c = c, .config = config, .path = path.data, .e = e};
    bool ok = config && read_config(&r, dir) && (made_up || tensors_open(&c->tensors, dir, e));
    if (ok) {
        c->bound = allocate_zero((size_t)c->tensors.n, sizeof *c->bound);
        for (int i = 0; i < c->tensors.files; i++) c->bytes += c->tensors.file[i].size;
        ok = bind_all(&r);
    }
    cJSON_Delete(config);
    bytes_free(&path);
    if (!ok) checkpoint_close(c);
    return ok;
}

bool checkpoint_open(Checkpoint *c, const char *dir, Error *e) { return open_directory(c, dir, false, e); }
bool checkpoint_make_up(Checkpoint *c, const char *dir, Error *e) { return open_directory(c, dir, true, e); }

void checkpoint_close(Checkpoint *c) {
    for (int i = 0; i < c->owned_n; i++) free(c->owned[i]);
    free(c->owned);
    free(c->bound);
    ids_free(&c->stop);
    tensors_close(&c->tensors);
    *c = (Checkpoint){0};
}

uint64_t linear_bytes(const Linear *w) {
    uint64_t weights = (uint64_t)w->n * (uint64_t)w->rows * (uint64_t)w->cols;
    return w->type == MXFP4 ? weights / 2 + weights / 32 : weights * types[w->type].size;
}

uint64_t model_bytes(const Model *m) {
    uint64_t sum = linear_bytes(&m->embed) + linear_bytes(&m->head);
    for (int i = 0; i < m->n_layers; i++) {
        const Layer *l = m->layer + i;
        const Linear *all[] = {&l->q, &l->k, &l->v, &l->o, &l->router, &l->gate, &l->up, &l->down};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) sum += linear_bytes(all[j]);
    }
    return sum;
}

uint64_t step_bytes(const Model *m, double experts, int streams, int depth) {
    double sum = (double)linear_bytes(&m->head);
    for (int i = 0; i < m->n_layers; i++) {
        const Layer *l = m->layer + i;
        const Linear *all[] = {&l->q, &l->k, &l->v, &l->o, &l->router, &l->gate, &l->up, &l->down};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) {
            double bytes = (double)linear_bytes(all[j]);
            if (all[j]->bias) bytes += (double)all[j]->n * all[j]->rows * sizeof(float);
            sum += all[j]->n > 1 ? bytes / all[j]->n * experts : bytes;
        }
        double seen = depth + 1, row = 2.0 * m->n_kv_heads * m->head_dim * 2; /* keys and values in bf16 */
        if (l->window && l->window < seen) seen = l->window;
        sum += streams * seen * row + 2.0 * m->dim * sizeof(float); /* two norms */
    }
    return (uint64_t)sum;
}

/* ---- finding models on disk ---- */

typedef struct {
    ModelEntry *entry;
    int n;
} List;

bool model_complete(const char *dir) {
    Error e;
    Bytes path = {0};
    bytes_print(&path, "%s/config.json", dir);
    bool ok = file_exists(path.data);
    path.n = 0;
    bytes_print(&path, "%s/tokenizer.json", dir);
    ok = ok && file_exists(path.data);
    path.n = 0;
    bytes_print(&path, "%s/model.safetensors.index.json", dir);
    if (ok && file_exists(path.data)) {
        cJSON *index = json_read(path.data, MOST_INDEX, &e);
        const cJSON *map = json_get(index, "weight_map");
        const char *last = "";
        ok = map && map->child;
        for (const cJSON *entry = ok ? map->child : NULL; entry && ok; entry = entry->next) {
            const char *name = cJSON_GetStringValue(entry);
            if (!name || !strcmp(name, last)) continue; /* neighbours mostly lie in one file */
            path.n = 0;
            bytes_print(&path, "%s/%s", dir, last = name);
            ok = file_exists(path.data);
        }
        cJSON_Delete(index);
    } else if (ok) {
        path.n = 0;
        bytes_print(&path, "%s/model.safetensors", dir);
        ok = file_exists(path.data);
    }
    bytes_free(&path);
    return ok;
}

/* Family, how the weights are encoded, by config.json alone, and how many bytes they have. */
static void describe(ModelEntry *m) {
    Error e;
    Bytes path = {0};
    bytes_print(&path, "%s/config.json", m->path);
    cJSON *config = json_read(path.data, MOST_CONFIG, &e);
    const char *quant = json_string(json_get(config, "quantization_config"), "quant_method");
    const char *type = json_string(config, "dtype") ? json_string(config, "dtype") : json_string(config, "torch_dtype");
    const char *encoding = quant                       ? quant
                           : !type                     ? ""
                           : !strcmp(type, "bfloat16") ? "BF16"
                           : !strcmp(type, "float16")  ? "F16"
                                                       : "F32";
    const char *family = json_string(config, "model_type");
    Bytes shown = {0}; /* what a file says is not for the terminal to obey */
    bytes_shown(&shown, family ? family : "", family ? strlen(family) : 0, false);
    snprintf(m->family, sizeof m->family, "%s", shown.n ? shown.data : "");
    shown.n = 0;
    bytes_shown(&shown, encoding, strlen(encoding), false);
    snprintf(m->encoding, sizeof m->encoding, "%s", shown.n ? shown.data : "");
    bytes_free(&shown);
    m->complete = model_complete(m->path);
    for (char *c = m->encoding; *c; c++)
        if (*c >= 'a' && *c <= 'z') *c = (char)(*c - 32);
    cJSON_Delete(config);
    DIR *dir = opendir(m->path);
    for (struct dirent *d; dir && (d = readdir(dir));) {
        const char *end = strrchr(d->d_name, '.');
        struct stat st;
        if (!end || strcmp(end, ".safetensors")) continue;
        path.n = 0;
        bytes_print(&path, "%s/%s", m->path, d->d_name);
        if (!stat(path.data, &st)) m->bytes += (uint64_t)st.st_size;
    }
    if (dir) closedir(dir);
    bytes_free(&path);
}

/* Adds a directory that holds a model, unless its name is listed. */
static void list_add(List *list, const char *path, const char *name) {
    Bytes config = {0};
    bytes_print(&config, "%s/config.json", path);
    bool take = file_exists(config.data);
    bytes_free(&config);
    for (int i = 0; i < list->n && take; i++) take = strcmp(list->entry[i].name, name);
    if (!take) return;
    list->entry = reallocate(list->entry, (size_t)(list->n + 1) * sizeof *list->entry);
    ModelEntry *m = list->entry + list->n;
    *m = (ModelEntry){.path = copy_text(path, strlen(path)), .name = copy_text(name, strlen(name))};
    describe(m);
    if (m->bytes || strstr(path, "/snapshots/")) { /* of a download that goes on, or did not */
        list->n++;
    } else {
        free(m->path);
        free(m->name);
    }
}

/* The snapshot of a repository in the hub's cache: the one that refs/main names, else any. */
static void add_snapshot(List *list, const char *repository, const char *name) {
    Bytes path = {0}, commit = {0};
    Error e;
    bytes_print(&path, "%s/refs/main", repository);
    bool named =
        file_read(path.data, 64, &commit, &e) && commit.n == 40 && strspn(commit.data, "0123456789abcdef") == 40;
    path.n = 0;
    bytes_print(&path, "%s/snapshots", repository);
    DIR *dir = named ? NULL : opendir(path.data);
    if (named) bytes_print(&path, "/%s", commit.data);
    for (struct dirent *d; dir && (d = readdir(dir));)
        if (*d->d_name != '.') {
            bytes_print(&path, "/%s", d->d_name);
            break;
        }
    if (dir) closedir(dir);
    list_add(list, path.data, name);
    bytes_free(&path);
    bytes_free(&commit);
}

/* Each directory below `parent`: the hub's cache (prefix "models--"), links named ORG--NAME (prefix ""), or, without a
 * prefix, plain model directories. */
static void add_all(List *list, const char *parent, const char *prefix) {
    DIR *dir = opendir(parent);
    for (struct dirent *d; dir && (d = readdir(dir));) {
        Bytes path = {0}, name = {0};
        size_t skip = prefix ? strlen(prefix) : 0;
        bytes_print(&path, "%s/%s", parent, d->d_name);
        if (*d->d_name == '.' || (prefix && strncmp(d->d_name, prefix, skip))) {
            bytes_free(&path);
            continue;
        }
        const char *dashes = prefix ? strstr(d->d_name + skip, "--") : NULL;
        if (dashes)
            bytes_print(&name, "%.*s/%s", (int)(dashes - d->d_name - (long)skip), d->d_name + skip, dashes + 2);
        else
            bytes_print(&name, "%s/%s", parent, d->d_name);
        if (skip)
            add_snapshot(list, path.data, name.data);
        else
            list_add(list, path.data, name.data);
        bytes_free(&path);
        bytes_free(&name);
    }
    if (dir) closedir(dir);
}

static int by_entry_name(const void *a, const void *b) {
    return strcmp(((const ModelEntry *)a)->name, ((const ModelEntry *)b)->name);
}

void hub_home(Bytes *path) {
    const char *home = getenv("HOME"), *hub = getenv("HF_HOME"), *all = getenv("XDG_CACHE_HOME");
    if (hub && *hub)
        bytes_text(path, hub);
    else if (all && *all)
        bytes_print(path, "%s/huggingface", all);
    else
        bytes_print(path, "%s/.cache/huggingface", home ? home : "");
}

void hub_cache(Bytes *path) {
    const char *cache = getenv("HF_HUB_CACHE");
    if (cache && *cache)
        bytes_text(path, cache);
    else
        hub_home(path), bytes_text(path, "/hub");
}

int models_list(ModelEntry **out) {
    List list = {0};
    Bytes path = {0};
    const char *home = getenv("HOME");
    add_all(&list, "models", NULL);
    bytes_print(&path, "%s/.cache/infer/models", home ? home : "");
    add_all(&list, path.data, "");
    path.n = 0;
    hub_cache(&path);
    add_all(&list, path.data, "models--");
    bytes_free(&path);
    if (list.n) qsort(list.entry, (size_t)list.n, sizeof *list.entry, by_entry_name);
    *out = list.entry;
    return list.n;
}

void models_free(ModelEntry *list, int n) {
    for (int i = 0; i < n; i++) {
        free(list[i].path);
        free(list[i].name);
    }
    free(list);
}

/* Letters to change, add or drop until one name is the other (Levenshtein), small and capital ones alike. */
static int edit_distance(const char *a, const char *b) {
    enum { MOST = 100 };
    int row[MOST + 1], n = (int)strlen(b);
    if (n > MOST || strlen(a) > MOST) return MOST;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int change = corner + (tolower((unsigned char)a[i - 1]) != tolower((unsigned char)b[j - 1]));
            int step = 1 + (row[j] < row[j - 1] ? row[j] : row[j - 1]);
            corner = row[j];
            row[j] = change < step ? change : step;
        }
    }
    return row[n];
}

/* The name that was perhaps meant, or NULL. */
static const char *nearest_name(const ModelEntry *list, int n, const char *argument) {
    int best = (int)strlen(argument) / 3 + 1;
    const char *name = NULL;
    for (int i = 0; i < n; i++) {
        const char *slash = strrchr(list[i].name, '/');
        int whole = edit_distance(argument, list[i].name), last = slash ? edit_distance(argument, slash + 1) : whole;
        if (last < whole) whole = last;
        if (whole <= best) best = whole - 1, name = list[i].name;
    }
    return name;
}

char *model_find(const char *argument, Error *e) {
    struct stat st;
    if (!stat(argument, &st)) {
        if (S_ISDIR(st.st_mode)) return copy_text(argument, strlen(argument));
        fail(e, BAD_MODEL, "%s: a model is a directory with config.json, tokenizer.json and safetensors files",
             argument);
        return NULL;
    }
    ModelEntry *list;
    int n = models_list(&list), hits = 0, hit = 0;
    for (int i = 0; i < n; i++) {
        if (!strcmp(list[i].name, argument)) {
            hits = 1, hit = i;
            break;
        }
        if (strcasestr(list[i].name, argument)) hits++, hit = i;
    }
    char *found = hits == 1 ? copy_text(list[hit].path, strlen(list[hit].path)) : NULL;
    const char *near = nearest_name(list, n, argument);
    Bytes names = {0};
    bytes_text(&names, "");
    for (int i = 0; i < n; i++)
        if (!hits || strcasestr(list[i].name, argument)) bytes_print(&names, "%s%s", names.n ? ", " : "", list[i].name);
    if (hits > 1)
        fail(e, BAD_MODEL, "'%.100s' means more than one model: %s", argument, names.data);
    else if (!hits && near)
        fail(e, BAD_MODEL, "no model '%.100s' here; did you mean %s?", argument, near);
    else if (!hits && n)
        fail(e, BAD_MODEL, "no model '%.100s' here; there are: %s; infer download ORG/NAME fetches another", argument,
             names.data);
    else if (!hits)
        fail(e, BAD_MODEL,
             "no model '%.100s' here, and none in ./models, ~/.cache/infer/models or the hub's cache: give a model "
             "directory, or fetch one with infer download ORG/NAME",
             argument);
    bytes_free(&names);
    models_free(list, n);
    return found;
}
