/* model.c: from a model directory to a Model. Chapters: config and families, safetensors, binding, sizes, models on
 * disk. host.h declares what others use.
 *
 * Everything special about a family stays in this file: fused and interleaved matrices become views, every RoPE scaling
 * becomes a table of angles, small tensors become float arrays. So no code behind infer.h asks which family a model is.
 * Any file may be hostile: this code compares lengths with the file's size before use, checks products for overflow and
 * binds every tensor once by name, dtype and shape. The code after that trusts them. */
#include "decode.h"
#include "host.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/param.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_CONFIG = 1 << 20, MOST_TEXT = 256 << 20, MOST_INDEX = 64 << 20, MOST_HEADER = 100000000 };

/* ---- config and families ---- */

/* clang-format off */
const Family gpt_oss[] = {
    {"gpt_oss", JSON({"attention_bias": true, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
                      "sliding_window_pattern": 2, "norm_topk_prob": true, "rope_theta": 150000,
                      "default_rope": {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096,
                                       "truncate": false}}),
     "norm_topk_prob, sliding_window_pattern", SWIGLU_CLAMPED, .sinks = true,
     .moe = EXPERTS("mlp.router", "num_local_experts", "intermediate_size", .biases = true)},
    {0}};
/* clang-format on */

void config_bad(Loader *load, const cJSON *object, const char *key, const char *expected) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    LocalText found = value ? json_text(value) : NULL;
    bad_file(load, load->path, "%s should be %s and is %.80s", key, expected, found ? found : "missing");
}

/* The value of a key; NULL: it is missing or null. A value of another cJSON type is an error. */
const cJSON *config_typed(Loader *load, const cJSON *object, const char *key, int type, const char *expected) {
    const cJSON *value = json_get(object, key);
    if (!value || value->type & type) return value;
    config_bad(load, object, key, expected);
    return NULL;
}

const char *config_text(Loader *load, const cJSON *object, const char *key) {
    return cJSON_GetStringValue(config_typed(load, object, key, cJSON_String, "a text"));
}

bool config_true(Loader *load, const char *key) {
    return cJSON_IsTrue(config_typed(load, load->config, key, cJSON_True | cJSON_False, "true or false"));
}

/* A number in [least, most]. A missing key has the value `absent`; if that is out of range, the key is required. */
double config_number(Loader *load, const cJSON *object, const char *key, double least, double most, double absent) {
    const cJSON *value = json_get(object, key);
    double x = !value ? absent : cJSON_IsNumber(value) ? value->valuedouble : NAN;
    if (x >= least && x <= most) return x;
    LocalText expected = text_print("a number from %.10g to %.10g", least, most);
    config_bad(load, object, key, expected);
    return least;
}

int config_whole(Loader *load, const char *key, int least, int most, int absent) {
    double x = config_number(load, load->config, key, least, most, absent);
    if (x != floor(x)) config_bad(load, load->config, key, "a whole number");
    return (int)x;
}

/* Refuses every value of a key but this one. The key may be missing. */
void config_only(Loader *load, const cJSON *object, const char *key, double value) {
    LocalText expected = text_print("%.10g", value);
    if ((float)config_number(load, object, key, -1e9, 1e9, value) != (float)value)
        config_bad(load, object, key, expected);
}

/* Zeroed memory that is freed with the checkpoint. */
void *keep(Checkpoint *c, size_t count, size_t bytes) {
    c->owned = reallocate(c->owned, (size_t)(c->owned_n + 1) * sizeof *c->owned);
    return c->owned[c->owned_n++] = allocate_zero(count, bytes);
}

static double yarn_scale(double factor, double mscale) { return factor > 1 ? 0.1 * mscale * log(factor) + 1 : 1; }

/* Do layers with a window have a RoPE of their own? */
static bool two_ropes(const Loader *load) { return json_get(load->defaults, "rope_local_base_freq"); }

/* config.json's RoPE parameters for layers with a window, or for those without; NULL: it has none. rope_scaling is
 * their older name, added to enlarge the context: a file with both must say the same in both. */
static const cJSON *find_rope(Loader *load, bool window) {
    const cJSON *rope = config_typed(load, load->config, "rope_parameters", cJSON_Object, "an object");
    const cJSON *older = config_typed(load, load->config, "rope_scaling", cJSON_Object, "an object");
    const cJSON *full = config_typed(load, rope, "full_attention", cJSON_Object, "an object");
    if (json_get(rope, "sliding_attention") && !full) config_bad(load, rope, "full_attention", "an object");
    if (rope && older && !cJSON_Compare(rope, older, true))
        config_bad(load, load->config, "rope_scaling", "as rope_parameters, or left out,");
    if (full && !two_ropes(load)) config_bad(load, load->config, "rope_parameters", "one for all layers");
    if (full) return window ? json_get(rope, "sliding_attention") : full;
    if (window) return NULL; /* their only parameter is rope_local_base_freq */
    return rope ? rope : older ? older : json_get(load->defaults, "default_rope");
}

/* RoPE's angles per position, theta^(-2i/d) (Su et al., "RoFormer", 2021), with the scaling that config.json names. A
 * GGUF file may have a tensor of divisors. */
static void read_rope(Loader *load, Model *m, bool window, Rope *out) {
    const cJSON *rope = find_rope(load, window);
    config_only(load, rope, "partial_rotary_factor", 1);
    const char *older = config_text(load, rope, "type"), *type = config_text(load, rope, "rope_type");
    if (!type) type = older ? older : "default";
    bool yarn = !strcmp(type, "yarn"), llama3 = !strcmp(type, "llama3"), scaled = strcmp(type, "default");
    if (scaled && !yarn && !llama3 && strcmp(type, "linear"))
        bad_file(load, load->path, "rope type '%.40s' is none of default, linear, llama3 and yarn", type);
    double original = 0, factor = 1, low = 0, high = 1, scale = 1, d = m->rope_dim;
    double theta = config_number(load, load->config, window ? "rope_local_base_freq" : "rope_theta", 1e-6, 1e12, 10000);
    theta = config_number(load, rope, "rope_theta", 1e-6, 1e12, theta);
    const char *old = "original_max_position_embeddings"; /* one beside the object wins over one in it */
    const cJSON *holds = json_get(load->config, old) && !two_ropes(load) ? load->config : rope;
    if (yarn || llama3) original = config_number(load, holds, old, 1, 1e9, m->context);
    bool implied = yarn && cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(rope, "factor"));
    if (scaled) factor = config_number(load, rope, "factor", 1e-6, 1e6, implied ? m->context / original : REQUIRED);
    /* rope_scaling is added to a file whose max_position_embeddings stays as it is */
    if (yarn && json_get(holds, old)) m->context = (int)fmin(fmax(m->context, original * factor), 1 << 24);
    if (llama3) { /* Llama 3.1: divides low frequencies by the factor, keeps high ones, and blends in between */
        low = config_number(load, rope, "low_freq_factor", 1e-6, 1e6, REQUIRED);
        high = config_number(load, rope, "high_freq_factor", low + 1e-6, 1e7, REQUIRED);
    }
    double all = config_number(load, rope, "mscale_all_dim", 0, 1e6, 0), both = yarn_scale(factor, all);
    if (load->family->latent) m->attn_scale = (float)((double)m->attn_scale * both * both); /* q . k, not q and k */
    if (yarn) { /* Peng et al., 2023, section 3.2: the same, with the blend over dimensions */
        double fast = config_number(load, rope, "beta_fast", 1e-6, 1e6, 32); /* rotations in the original context */
        double slow = config_number(load, rope, "beta_slow", 1e-6, 1e6, 1);
        double mscale = config_number(load, rope, "mscale", 0, 1e6, 0);
        scale = mscale > 0 && all > 0 ? yarn_scale(factor, mscale) / both : yarn_scale(factor, 1);
        scale = config_number(load, rope, "attention_factor", 1e-6, 1e6, scale);
        scale *= config_number(load, rope, "attn_factor", 1e-6, 1e6, 1); /* vLLM's; transformers ignores it */
        low = fmax(d * log(original / (fast * 2 * M_PI)) / (2 * log(theta)), 0);
        high = d * log(original / (slow * 2 * M_PI)) / (2 * log(theta));
        config_typed(load, rope, "truncate", cJSON_True | cJSON_False, "true or false");
        const cJSON *truncate = cJSON_GetObjectItemCaseSensitive(rope, "truncate"); /* null is false */
        if (!truncate || cJSON_IsTrue(truncate)) low = floor(low), high = ceil(high);
        high = fmin(high, d - 1);
        if (low == high) high += 0.001;
    }
    const float *divisor = NULL;
    if (tensors_find(&load->c->tensors, "rope_freqs.weight"))
        divisor = bind_floats(load, "rope_freqs", ".weight", m->rope_dim / 2);
    float *inv_freq = keep(load->c, (size_t)m->rope_dim / 2, sizeof *inv_freq);
    *out = (Rope){.inv_freq = inv_freq, .scale = (float)scale};
    for (int i = 0; i < m->rope_dim / 2; i++) {
        double f = pow(theta, -2.0 * i / d), share = scaled ? 0 : 1; /* the part of f that is not scaled */
        if (yarn) share = 1 - fmin(fmax((i - low) / (high - low), 0), 1);
        if (llama3) share = fmin(fmax((original * f / (2 * M_PI) - low) / (high - low), 0), 1);
        inv_freq[i] = (float)((f * share + f / factor * (1 - share)) / (divisor ? (double)divisor[i] : 1));
        if (!isfinite(inv_freq[i])) config_bad(load, rope, "rope_theta", "such that its angles are numbers");
    }
}

/* Which layers have a window: those that layer_types names. Without it: all from max_window_layers on, except every
 * sliding_window_pattern-th. If use_sliding_window is false, no layer has a window. A family's defaults decide
 * which of these keys count. Without the first two, layer_types must agree with sliding_window. */
static void read_windows(Loader *load, Model *m) {
    const cJSON *defaults = load->defaults;
    const cJSON *list = config_typed(load, load->config, "layer_types", cJSON_Array, "an array");
    bool any = cJSON_GetObjectItemCaseSensitive(defaults, "sliding_window"); /* its default may be null */
    bool first = json_get(defaults, "max_window_layers"), pattern = json_get(defaults, "sliding_window_pattern");
    bool used = config_true(load, "use_sliding_window") || !json_get(defaults, "use_sliding_window");
    int from = first ? config_whole(load, "max_window_layers", 0, INT32_MAX, REQUIRED) : 0, window = 0;
    int every = pattern ? config_whole(load, "sliding_window_pattern", 1, INT32_MAX, REQUIRED) : INT32_MAX;
    if (list && cJSON_GetArraySize(list) != m->n_layers)
        bad_file(load, load->path, "layer_types should be an array of %d, one a layer", m->n_layers);
    if (any && used && json_get(load->config, "sliding_window"))
        window = config_whole(load, "sliding_window", 1, INT32_MAX, REQUIRED);
    for (int i = 0; i < m->n_layers && !failed(load); i++) {
        const char *type = cJSON_GetStringValue(cJSON_GetArrayItem(list, i));
        bool sliding = any && i >= from && (i + 1) % every != 0, full = type && !strcmp(type, "full_attention");
        if (list) sliding = type && !strcmp(type, "sliding_attention");
        if (list && ((!sliding && !full) || (!first && !pattern && sliding != (window > 0))))
            bad_file(load, load->path, "layer_types[%d] is '%.40s', which is not implemented for %s", i,
                     type ? type : "(no text)", load->family->model_type);
        m->layer[i].window = sliding ? window : 0;
        m->layer[i].rope = m->rope + sliding;
    }
}

static void read_stop(Loader *load, const cJSON *config, const char *path) {
    const cJSON *eos = json_get(config, "eos_token_id");
    int64_t id = 0, last = load->c->model.vocab - 1;
    bool several = cJSON_IsArray(eos);
    for (const cJSON *one = several ? eos->child : eos; one; one = several ? one->next : NULL) {
        if (!json_whole(one, 0, last, &id))
            bad_file(load, path, "eos_token_id should lie in the vocabulary, 0 to %d", (int)last);
        ids_add(&load->c->stop, (int)id);
    }
}

/* The number of experts, and how the router chooses among them. */
static void read_experts(Loader *load, Model *m) {
    const Family *f = load->family;
    const cJSON *config = load->config;
    m->n_experts = m->top_k = 1;
    m->route = (Route){.scale = 1, .groups = 1, .top_groups = 1, .group_best = 1};
    if (!f->moe.router) return;
    const char *count = json_get(config, f->moe.count) ? f->moe.count : "num_local_experts"; /* its newer name */
    Route *r = &m->route;
    m->n_experts = config_whole(load, count, 1, 1024, REQUIRED);
    m->top_k = config_whole(load, "num_experts_per_tok", 1, m->n_experts, REQUIRED);
    r->normalise = config_true(load, "norm_topk_prob");
    if (!f->latent) return;
    bool bias = json_is(config, "topk_method", "noaux_tc"), greedy = json_is(config, "topk_method", "greedy");
    r->sigmoid = json_is(load->defaults, "scoring_func", "sigmoid");
    r->scale = (float)config_number(load, config, "routed_scaling_factor", 1e-6, 1e6, 1);
    if (!json_is(config, "scoring_func", r->sigmoid ? "sigmoid" : "softmax"))
        config_bad(load, config, "scoring_func", "\"softmax\" in deepseek_v2 and \"sigmoid\" in deepseek_v3,");
    if (!bias && !greedy && !json_is(config, "topk_method", "group_limited_greedy"))
        config_bad(load, config, "topk_method", "\"greedy\", \"group_limited_greedy\" or \"noaux_tc\"");
    if (r->normalise && !bias) config_bad(load, config, "norm_topk_prob", "false with such a topk_method");
    if (greedy) return;
    r->groups = config_whole(load, "n_group", 1, m->n_experts, REQUIRED);
    r->top_groups = config_whole(load, "topk_group", 1, r->groups, REQUIRED);
    r->group_best = bias ? 2 : 1;
    int each = m->n_experts / r->groups;
    if (each * r->groups != m->n_experts || each < r->group_best || m->top_k > r->top_groups * each)
        config_bad(load, config, "n_group", "such that topk_group equal groups hold num_experts_per_tok experts");
}

static void read_heads(Loader *load, Model *m) {
    const cJSON *config = load->config;
    const Family *f = load->family;
    m->n_heads = config_whole(load, "num_attention_heads", 1, 4096, REQUIRED);
    if (f->latent) {
        m->n_kv_heads = 1;
        m->kv_rank = config_whole(load, "kv_lora_rank", 1, 8192, REQUIRED);
        m->v_dim = config_whole(load, "v_head_dim", 1, 1024, REQUIRED);
        m->rope_dim = config_whole(load, "qk_rope_head_dim", 2, 1024, REQUIRED);
        m->head_dim = m->rope_dim + config_whole(load, "qk_nope_head_dim", 1, 1024, REQUIRED);
        config_only(load, config, "rms_norm_eps", 1e-6); /* latent norms always have it, and eps is one for all */
    } else {
        m->n_kv_heads = config_whole(load, "num_key_value_heads", 1, 4096, m->n_heads);
        m->head_dim = config_whole(load, "head_dim", 2, 1024, m->dim / m->n_heads);
        m->v_dim = m->rope_dim = m->head_dim;
    }
    m->neighbours = config_true(load, "rope_interleave") && (f->latent || load->container->neighbours);
    if (m->n_heads % m->n_kv_heads) config_bad(load, config, "num_key_value_heads", "a divisor of num_attention_heads");
    if (m->rope_dim % 2)
        config_bad(load, config, f->latent ? "qk_rope_head_dim" : "head_dim", "even (RoPE turns pairs)");
    double scale = f->gemma ? config_number(load, config, "query_pre_attn_scalar", 1, 1e6, REQUIRED) : m->head_dim;
    m->attn_scale = (float)(1 / sqrt(scale));
}

static void read_sizes(Loader *load, Model *m) {
    const cJSON *config = load->config;
    const Family *f = load->family;
    m->n_layers = config_whole(load, "num_hidden_layers", 1, 1024, REQUIRED);
    m->dim = config_whole(load, "hidden_size", 1, 1 << 17, REQUIRED);
    m->vocab = config_whole(load, "vocab_size", 1, 1 << 22, REQUIRED);
    m->context = config_whole(load, "max_position_embeddings", 1, 1 << 24, REQUIRED);
    m->eps = (float)config_number(load, config, "rms_norm_eps", 1e-30, 0.5, REQUIRED);
    read_heads(load, m);
    read_experts(load, m);
    m->act = f->act;
    if (m->act == SWIGLU_CLAMPED) m->act_limit = (float)config_number(load, config, "swiglu_limit", 1e-6, 1e6, 7);
    m->embed_scale = f->gemma ? sqrtf((float)m->dim) : 1;
    m->attn_cap = f->gemma ? (float)config_number(load, config, "attn_logit_softcapping", 0, 1e6, 0) : 0;
    m->logit_cap = f->gemma ? (float)config_number(load, config, "final_logit_softcapping", 0, 1e6, 0) : 0;
    const char *key = m->act == GEGLU ? "hidden_activation" : "hidden_act";
    if (config_text(load, config, key) && !json_is(config, key, m->act == GEGLU ? "gelu_pytorch_tanh" : "silu"))
        config_bad(load, config, key, m->act == GEGLU ? "\"gelu_pytorch_tanh\"" : "\"silu\"");
    m->layer = keep(load->c, (size_t)m->n_layers, sizeof *m->layer);
    /* formulas that no family here has would silently give wrong logits */
    config_only(load, config, "partial_rotary_factor", 1);
    config_only(load, config, "swiglu_alpha", 1.702);
    config_only(load, config, "moe_layer_freq", 1);
    if (config_true(load, "use_bidirectional_attention") || cJSON_IsFalse(json_get(config, "is_causal")))
        bad_file(load, load->path, "%s", "use_bidirectional_attention should be false, and is_causal true");
}

cJSON *model_json(Loader *load, const char *dir, const char *name) {
    return load->container->json(&load->c->tensors, dir, name, load->e);
}

/* The row of a model_type. The error for an unknown one lists all rows. */
static const Family *find_family(Loader *load, const char *model_type) {
    LocalBytes names = {0};
    for (int i = 0; families[i]; i++)
        for (const Family *f = families[i]; f->model_type; f++) {
            if (model_type && !strcmp(model_type, f->model_type)) return f;
            bytes_print(&names, "%s%s", names.n ? ", " : "", f->model_type);
        }
    bad_file(load, load->path, "model_type '%.60s' is not supported (supported: %s)",
             model_type ? model_type : "(none)", names.data);
    return NULL;
}

static void read_config(Loader *load, Model *m, const char *dir) {
    Rope *rope = keep(load->c, 2, sizeof *rope);
    const Family *f = load->family = find_family(load, config_text(load, load->file, "model_type"));
    const cJSON *one;
    m->rope = rope;
    load->config = load->file;
    if (f && f->nested) {
        load->config = cJSON_GetObjectItemCaseSensitive(load->file, "text_config");
        if (!cJSON_IsObject(load->config)) config_bad(load, load->file, "text_config", "an object");
        if (json_get(load->config, "model_type") && !json_is(load->config, "model_type", f->nested))
            config_bad(load, load->config, "model_type", f->nested); /* Ministral 3 has other formulas */
        load->family = find_family(load, f->nested);
    }
    if (failed(load)) return;
    load->c->family = f->model_type;
    load->defaults = cJSON_Parse(load->family->defaults ? load->family->defaults : "{}");
    cJSON_ArrayForEach(one, load->defaults) {
        bool fixed = load->family->fixed && text_listed(load->family->fixed, one->string);
        if (fixed) cJSON_DeleteItemFromObjectCaseSensitive(load->config, one->string);
        if (!cJSON_GetObjectItemCaseSensitive(load->config, one->string))
            cJSON_AddItemToObject(load->config, one->string, cJSON_Duplicate(one, true));
    }
    read_sizes(load, m);
    for (int i = 0; packings[i]; i++) packings[i]->open(load, dir);
    read_rope(load, m, false, rope);
    rope[1] = rope[0];
    if (two_ropes(load)) read_rope(load, m, true, rope + 1);
    read_windows(load, m);
    read_stop(load, load->file, load->path);
    LocalText path = path_join(dir, "generation_config.json");
    LocalJson generation = failed(load) ? NULL : model_json(load, dir, "generation_config.json");
    read_stop(load, generation, path);
}

/* ---- safetensors ---- */

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
              {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
              {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8}};

/* A whole number of at least `least` in plain digits. json_parse() keeps the text of others, 1e2 and 120.0. */
static bool plain_whole(const cJSON *x, int64_t least, int64_t *out) {
    return json_whole(x, least, INT64_MAX, out) && !x->valuestring;
}

/* Reads one entry of a header. The file's data begins at byte `data`. */
static bool read_entry(const TensorFile *f, size_t data, const cJSON *entry, Tensor *t, Error *e) {
    const cJSON *shape = json_get(entry, "shape"), *offsets = json_get(entry, "data_offsets"), *dim = NULL;
    const char *dtype = json_string(entry, "dtype"), *name = entry->string;
    size_t bytes = 0, width = 1, values = 1, room = f->size - data; /* values: in a block */
    int64_t begin = 0, end = 0;
    for (size_t i = 0; dtype && i < sizeof dtypes / sizeof *dtypes; i++)
        if (!strcmp(dtype, dtypes[i].name)) bytes = width = dtypes[i].size, t->dtype = dtypes[i].name;
    for (const TypeInfo *q = types; dtype && !bytes && q < types + types_n; q++)
        if (!strcmp(dtype, q->dtype)) bytes = width = (size_t)q->bytes, values = (size_t)q->values, t->dtype = q->dtype;
    bool ok = bytes && cJSON_IsArray(shape) && cJSON_GetArraySize(shape) <= MOST_DIMS && cJSON_IsArray(offsets) &&
              cJSON_GetArraySize(offsets) == 2 && plain_whole(offsets->child, 0, &begin) &&
              plain_whole(offsets->child->next, begin, &end);
    for (dim = ok ? shape->child : NULL; dim && ok; dim = dim->next)
        ok = plain_whole(dim, 0, &t->shape[t->dims]) &&
             !__builtin_mul_overflow(bytes, (size_t)t->shape[t->dims++], &bytes);
    if (values > 1) ok = ok && t->dims && t->shape[t->dims - 1] % (int64_t)values == 0;
    bytes /= values;
    if (!ok) {
        LocalBytes found = {0};
        json_written(&found, entry);
        return fail(e, BAD_MODEL,
                    "%s: tensor '%.200s' should have a known dtype, a shape of up to %d dimensions and two "
                    "data_offsets, and has %.120s",
                    f->name, name, MOST_DIMS, found.data);
    }
    if ((uint64_t)end > room || (uint64_t)(end - begin) != bytes)
        return fail(e, BAD_MODEL,
                    "%s: tensor '%.200s' has %lld bytes up to %lld of %zu, its dtype and shape need %zu: the file is "
                    "incomplete or damaged; download it again",
                    f->name, name, (long long)(end - begin), (long long)end, room, bytes);
    t->name = text_print("%s", name);
    t->offset = data + (size_t)begin;
    t->size = bytes;
    t->encoding = t->dtype;
    t->values = (int64_t)(bytes / width * values);
    t->data = f->map + t->offset;
    return true;
}

static int by_offset(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->size > y->size) - (x->size < y->size); /* an empty tensor first */
}

_Static_assert(!offsetof(Tensor, name), "by_name() sorts tensors");
static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static bool map_file(TensorFile *f, Error *e) {
    struct stat st;
    f->fd = open(f->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (f->fd < 0 || fstat(f->fd, &st))
        return fail(e, BAD_MODEL, "%s: %s", f->name,
                    errno == ENOENT ? "missing: this is no model, or its download is incomplete; infer download goes on"
                                    : strerror(errno));
    if (!S_ISREG(st.st_mode)) return fail(e, BAD_MODEL, "%s: not a regular file", f->name);
    f->size = (size_t)st.st_size;
    if (f->size < 8) return fail(e, BAD_MODEL, "%s: %zu bytes are too few: download it again", f->name, f->size);
    void *map = mmap(NULL, f->size, PROT_READ, MAP_SHARED, f->fd, 0);
    if (map == MAP_FAILED) return fail(e, BAD_MODEL, "%s: cannot be mapped: %s", f->name, strerror(errno));
    f->map = map;
    return true;
}

const char *file_kind(const char *data, size_t n) {
    static const char *const kinds[][2] = {{"version https://git-lfs", "a Git-LFS pointer"},
                                           {"GGUF", "a GGUF file"},
                                           {"PK\3\4", "a file of PyTorch's own format"},
                                           {"<!doctype", "a web page (HTML)"},
                                           {"<html", "a web page (HTML)"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (n >= strlen(kinds[i][0]) && !strncasecmp(data, kinds[i][0], strlen(kinds[i][0]))) return kinds[i][1];
    return NULL;
}

/* Reads a header: eight bytes with its length, then JSON. */
static cJSON *safetensors_header(const Tensors *t, int i, size_t *data, size_t *alignment, Error *e) {
    const TensorFile *f = t->file + i;
    const char *path = f->name, *text = (const char *)f->map + 8, *kind = file_kind(text - 8, f->size);
    uint64_t header = 0;
    for (int byte = 7; byte >= 0; byte--) header = header << 8 | f->map[byte];
    if (!header || header > MOST_HEADER || header > f->size - 8 || *text != '{')
        return fail(e, BAD_MODEL, "%s: no safetensors file%s%s (a header of %llu bytes in %zu): download it again",
                    path, kind ? " but " : ", or damaged", kind ? kind : "", (unsigned long long)header, f->size),
               NULL;
    *data = 8 + header, *alignment = 1;
    return json_parse(text, header, path, e);
}

/* In models of texts and pictures this stands in the names of the text's tensors, first or behind "model.". read_file()
 * leaves it out, so that all models name these tensors alike. */
#define NESTED "language_model."

/* Reads file i of a model. */
static bool read_file(Tensors *t, int i, Error *e) {
    TensorFile *f = t->file + i;
    size_t data = 0, align = 1;
    if (!map_file(f, e)) return false;
    LocalJson json = t->container->header(t, i, &data, &align, e);
    if (!json) return false;
    size_t end = data;
    int first = t->n;
    t->tensor = reallocate(t->tensor, (size_t)(t->n + cJSON_GetArraySize(json) + 1) * sizeof *t->tensor);
    for (const cJSON *entry = json->child; entry; entry = entry->next) {
        if (!strcmp(entry->string, "__metadata__") && cJSON_IsObject(entry)) continue;
        t->tensor[t->n] = (Tensor){.file = i};
        if (!read_entry(f, data, entry, t->tensor + t->n, e)) return false;
        char *name = t->tensor[t->n++].name, *inner = strncmp(name, "model.", 6) ? name : name + 6;
        if (!strncmp(inner, NESTED, strlen(NESTED)))
            memmove(inner, inner + strlen(NESTED), strlen(inner + strlen(NESTED)) + 1);
    }
    if (!i) t->metadata = cJSON_DetachItemFromObjectCaseSensitive(json, "__metadata__");
    if (t->n > first) qsort(t->tensor + first, (size_t)(t->n - first), sizeof *t->tensor, by_offset);
    for (Tensor *one = t->tensor + first; one < t->tensor + t->n; end = one->offset + one->size, one++)
        if (one->offset != end && one->offset != roundup(end, align)) /* holes only to align */
            return fail(e, BAD_MODEL, "%s: tensor '%.200s' %s", f->name, one->name,
                        one->offset < end ? "overlaps another" : "leaves a hole before it");
    return end == f->size || roundup(end, align) == f->size ||
           fail(e, BAD_MODEL, "%s: %zu bytes, its header describes %zu: the file is damaged; download it again",
                f->name, f->size, end);
}

void tensors_add_file(Tensors *t, char *name) {
    for (int i = t->files; i--;)
        if (!strcmp(t->file[i].name, name)) return free(name);
    t->file = reallocate(t->file, (size_t)(t->files + 1) * sizeof *t->file);
    t->file[t->files++] = (TensorFile){.name = name, .fd = -1};
}

/* A single file; of a folder all that model.safetensors.index.json names, or else model.safetensors. If both are there,
 * the index is left over from shards that became one file. */
static bool safetensors_files(Tensors *t, const char *path, Error *e) {
    LocalText index = path_join(path, "model.safetensors.index.json");
    LocalText whole = path_join(path, "model.safetensors");
    if (file_exists(path)) return tensors_add_file(t, text_print("%s", path)), true;
    if (access(index, F_OK) || !access(whole, F_OK)) return tensors_add_file(t, text_print("%s", whole)), true;
    LocalJson json = json_read(index, MOST_INDEX, e);
    const cJSON *map = json_get(json, "weight_map"), *entry = cJSON_IsObject(map) ? map->child : NULL;
    if (!entry) return json && fail(e, BAD_MODEL, "%s: has no weight_map with tensors", index);
    for (; entry; entry = entry->next) {
        const char *name = cJSON_GetStringValue(entry);
        const bool is_name = name && *name && *name != '.' && !strchr(name, '/') && !strchr(name, '\\');
        if (is_name) tensors_add_file(t, path_join(path, name));
        if (!is_name || t->files > MOST_FILES)
            return fail(e, BAD_MODEL, "%s: tensor '%.100s' is in '%.100s': no file name, or more files than %d", index,
                        entry->string, name ? name : "(no text)", MOST_FILES);
    }
    return true;
}

/* A folder with a config.json. */
static bool safetensors_fits(const char *path) {
    LocalText config = path_join(path, "config.json");
    return !access(config, F_OK);
}

static cJSON *safetensors_json(const Tensors *t, const char *path, const char *name, Error *e) {
    LocalText file = path_join(path, name);
    const size_t dot = strlen(name) - strlen(".jinja");
    const size_t most = !strncmp(name, "tokenizer", 9) || !strncmp(name, "chat", 4) ? MOST_TEXT : MOST_CONFIG;
    LocalBytes text = {0};
    if (access(file, F_OK) && (errno == ENOENT || errno == ENOTDIR)) return NULL;
    if (strcmp(name + dot, ".jinja")) return json_read(file, most, e);
    return file_read(file, most, &text, e) ? json_from_text(text.data, text.n) : NULL;
}

const Container safetensors = {
    .fits = safetensors_fits, .files = safetensors_files, .header = safetensors_header, .json = safetensors_json};

const Container *container_at(const char *path) {
    for (int i = 0; containers[i]; i++)
        if (containers[i]->fits(path)) return containers[i];
    return &safetensors;
}

static char shrunk[600]; /* on_bus_error's message about the files opened last */

/* A SIGBUS means that a mapped file has shrunk. */
static void on_bus_error(int number) {
    if (number && write(STDERR_FILENO, shrunk, strlen(shrunk))) {}
    _exit(BAD_MODEL);
}

bool tensors_open(Tensors *t, const char *path, Error *e) {
    *t = (Tensors){0};
    snprintf(shrunk, sizeof shrunk, "infer: %.500s: a model file was truncated while it was in use\n", path);
    signal(SIGBUS, on_bus_error);
    t->container = container_at(path);
    bool ok = t->container->files(t, path, e);
    for (int i = 0; i < t->files && ok; i++) ok = read_file(t, i, e);
    if (t->n) qsort(t->tensor, (size_t)t->n, sizeof *t->tensor, by_name);
    for (int i = 1; i < t->n && ok; i++)
        if (!strcmp(t->tensor[i - 1].name, t->tensor[i].name))
            ok = fail(e, BAD_MODEL, "%s: tensor '%.200s' is also in %s", t->file[t->tensor[i].file].name,
                      t->tensor[i].name, t->file[t->tensor[i - 1].file].name);
    if (!ok) tensors_close(t);
    return ok;
}

void tensors_close(Tensors *t) {
    for (int i = 0; i < t->n; i++) free(t->tensor[i].name);
    for (int i = 0; i < t->files; i++) {
        if (t->file[i].map) munmap((void *)(uintptr_t)t->file[i].map, t->file[i].size);
        if (t->file[i].fd >= 0) close(t->file[i].fd);
        free(t->file[i].name);
    }
    free(t->tensor);
    free(t->file);
    cJSON_Delete(t->metadata);
    *t = (Tensors){0};
}

Tensor *tensors_find(const Tensors *t, const char *name) {
    Tensor key = {.name = (char *)(uintptr_t)name};
    return t->n ? bsearch(&key, t->tensor, (size_t)t->n, sizeof key, by_name) : NULL;
}

/* ---- binding ---- */

static char *shape_text(int dims, const int64_t *shape) {
    Bytes out = {0};
    bytes_text(&out, "(");
    for (int i = 0; i < dims; i++) bytes_print(&out, "%s%lld", i ? ", " : "", (long long)shape[i]);
    return bytes_print(&out, ")");
}

bool is_float(Type type) { return type >= BF16 && type <= F32; }
int block_entries(Type type) {
    const TypeInfo *info = types + type;
    return !strcmp(info->dtype, "U8") ? info->bytes : !strcmp(info->dtype, "I32") ? info->bytes / 4 : info->values;
}

bool has_dtype(const Tensor *t, Type type) {
    return !strcmp(t->dtype, types[type].dtype) || (type == E8M0 && !strcmp(t->dtype, "U8"));
}

Type type_of(const Tensor *t) {
    Type type = BF16;
    while (type < types_n && (text_listed("U8 I32", types[type].dtype) || !has_dtype(t, type))) type++;
    return type < types_n ? type : NO_TYPE;
}

const char *file_of(const Loader *load, const Tensor *t) { return load->c->tensors.file[t ? t->file : 0].name; }

bool tensor_is(Loader *load, const Tensor *t, bool ok, const char *expected) {
    if (ok) return true;
    LocalText shape = shape_text(t->dims, t->shape);
    bad_file(load, file_of(load, t), "tensor '%s' is %s %s, expected %s", t->name, t->dtype, shape, expected);
    return false;
}

Tensor *find_tensor(const Loader *load, const char *name, const char *suffix) {
    char full[200]; /* no allocation: the experts of a large model are a million names */
    snprintf(full, sizeof full, "%s%s%s", load->prefix, name, suffix);
    return tensors_find(&load->c->tensors, full);
}

Tensor *bind_tensor(Loader *load, const char *name, const char *suffix, Type type, int dims, const int64_t *shape) {
    Tensor *t = find_tensor(load, name, suffix);
    bool fits = t && (t->dims == dims || (t->dims == dims - 1 && shape[t->dims] == 1)) &&
                !memcmp(t->shape, shape, (size_t)t->dims * sizeof *shape);
    LocalText expected = fits ? NULL : shape_text(dims, shape);
    if (t) t->bound = true;
    if (!t && !load->c->model.made_up)
        bad_file(load, file_of(load, t), "tensor '%s%s%s' is missing, expected %s", load->prefix, name, suffix,
                 expected);
    if (t && tensor_is(load, t, fits, expected) &&
        (type == NO_TYPE || tensor_is(load, t, has_dtype(t, type), types[type].dtype)))
        return t;
    if (type == NO_TYPE) type = BF16;
    t = keep(load->c, 1, sizeof *t);
    *t = (Tensor){.name = (char *)(uintptr_t)name, .dtype = types[type].dtype, .size = (size_t)types[type].bytes};
    for (int i = 0; i < dims; i++) t->size *= (size_t)shape[i];
    t->size /= (size_t)block_entries(type);
    return t;
}

/* The n elements of a tensor as floats. Adds the 1 that Gemma's files subtract from norms. Made up norms are 1 and made
 * up biases 0. */
static const float *floats(Loader *load, const Tensor *t, size_t n) {
    const Type type = type_of(t);
    const bool norm = strstr(t->name, "norm");
    if (!tensor_is(load, t, is_float(type), "BF16, F16 or F32")) return NULL;
    float *out = keep(load->c, n, sizeof *out);
    for (size_t i = 0; i < n; i++) {
        if (t->data) out[i] = code_at(type, t->data, 0, 0, i);
        if (norm && (!t->data || (load->family->gemma && !load->container->whole_norms))) out[i] += 1;
    }
    return out;
}

const float *bind_floats(Loader *load, const char *name, const char *suffix, int n) {
    return n ? floats(load, bind_tensor(load, name, suffix, NO_TYPE, 1, (int64_t[]){n}), (size_t)n) : NULL;
}

void belongs(Tensor *t, Type type, int64_t values) {
    t->bound = true;
    t->encoding = types[type].name;
    t->values = values;
}

View tensor_view(const Loader *load, const Tensor *t, int64_t lines) {
    const size_t bytes = t->size / (size_t)lines;
    const int fd = t->data ? load->c->tensors.file[t->file].fd : -1;
    return (View){t->data, fd, (int)lines, t->offset, bytes, bytes};
}

View lines_of(View v, size_t first, size_t step, int n) {
    v.offset += first * v.stride;
    if (v.data) v.data += first * v.stride;
    v.stride *= step, v.lines = n;
    return v;
}

/* The codes of a matrix whose rows follow each other; w->type says how its weights lie in blocks. */
static void bind_plain(Loader *load, const char *name, Linear *w, Stored *one) {
    const Tensor *t = find_tensor(load, name, ".weight");
    if (t && tensor_is(load, t, type_of(t) != NO_TYPE && type_of(t) != E8M0, "BF16, F16, F32, F8_E4M3 or I8"))
        w->type = type_of(t);
    const int values = types[w->type].values, blocks = divided(w->cols, values);
    if (w->cols % values)
        bad_file(load, load->path, "%s has rows of %d, not whole blocks of %d as %s wants", name, w->cols, values,
                 types[w->type].name);
    Tensor *found =
        bind_tensor(load, name, ".weight", w->type, 2, (int64_t[]){w->rows, (int64_t)blocks * block_entries(w->type)});
    belongs(found, w->type, (int64_t)w->rows * w->cols);
    one->data = tensor_view(load, found, w->rows);
}

Linear bind_linear(Loader *load, const char *name, int rows, int cols, int bias) {
    if (!rows) return (Linear){0};
    Stored *one = keep(load->c, 1, sizeof *one);
    Linear w = {.type = BF16, .rows = rows, .cols = cols, .n = 1, .each = one};
    bool packed = false;
    one->factor = 1;
    for (int i = 0; packings[i] && !packed; i++) packed = packings[i]->bind(load, name, &w, one);
    if (!packed) bind_plain(load, name, &w, one);
    if (!bias) bias = (packed || load->container->extra_biases) && find_tensor(load, name, ".bias");
    if (bias > 0) one->bias = bind_floats(load, name, ".bias", rows);
    return w;
}

/* Binds n matrices, one per expert or head. Each is a module of its own, MODULE.0 MATRIX and so on. */
static Linear bind_each(Loader *load, const char *module, const char *matrix, int n, int rows, int cols, int bias) {
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

/* Binds all experts' MXFP4 matrices (rows, cols), which are the tensors NAME_blocks, _scales and _bias, as one matrix
 * of all their rows. */
static Linear bind_fused(Loader *load, const char *name, int rows, int cols) {
    const int n = load->c->model.n_experts, blocks = divided(cols, 32), all = n * rows;
    Stored *one = keep(load->c, 1, sizeof *one);
    const Linear w = {MXFP4, all, cols, 1, .scale = {E8M0, 1, 32, false}, .each = one};
    if (cols % 32) bad_file(load, load->path, "%s has rows of %d, not whole blocks of 32 as MXFP4 wants", name, cols);
    Tensor *codes = bind_tensor(load, name, "_blocks", MXFP4, 4, (int64_t[]){n, rows, blocks, 16});
    Tensor *scales = bind_tensor(load, name, "_scales", E8M0, 3, (int64_t[]){n, rows, blocks});
    const Tensor *biases = bind_tensor(load, name, "_bias", NO_TYPE, 2, (int64_t[]){n, rows});
    belongs(codes, MXFP4, (int64_t)all * cols);
    belongs(scales, MXFP4, 0);
    one->data = tensor_view(load, codes, all), one->scale = tensor_view(load, scales, all), one->factor = 1;
    if (!failed(load)) one->bias = floats(load, biases, (size_t)all);
    return w;
}

/* Rows first, first + step, ... of w's codes or of one of its grids, whose view is v. */
static View rows_of(Loader *load, View v, const Linear *w, Grid g, int first, int step, int rows) {
    if (!g.rows || g.rows == w->rows) return v; /* the same for all rows */
    for (int i = 0; packings[i]; i++)
        if (packings[i]->cut(load, &v, w, g, first, step, rows)) return v;
    return lines_of(v, (size_t)(first / g.rows), (size_t)step, rows / g.rows);
}

/* A part of w for each head or expert. They have `pitch` rows each; the part has `rows` of them: first, first + step,
 * ... */
static Linear cut(Loader *load, const Linear *w, int first, int step, int rows, int pitch) {
    Linear part = *w;
    part.n = w->rows / pitch, part.rows = rows;
    Stored *each = keep(load->c, (size_t)part.n, sizeof *each);
    float *bias = w->each->bias ? keep(load->c, (size_t)part.n * (size_t)rows, sizeof *bias) : NULL;
    part.each = each;
    for (int i = 0; i < part.n; i++, first += pitch) {
        each[i] = *w->each;
        each[i].data = rows_of(load, each[i].data, w, (Grid){w->type, 1, 1, false}, first, step, rows);
        each[i].scale = rows_of(load, each[i].scale, w, w->scale, first, step, rows);
        each[i].zero = rows_of(load, each[i].zero, w, w->zero, first, step, rows);
        if (bias) each[i].bias = bias + (size_t)i * (size_t)rows;
        for (int r = 0; bias && r < rows; r++) bias[i * rows + r] = w->each->bias[first + r * step];
    }
    return part;
}

/* What is absent in a family has no rows here. Latent attention: for each head kv_b_proj holds the rows of k_up, then
 * those of v_up. */
static void bind_attention(Loader *load, const Model *m, Layer *l) {
    const Family *f = load->family;
    const bool o_bias = config_true(load, "attention_bias") && !f->qkv_bias, bias = o_bias || f->qkv_bias;
    const int q = m->n_heads * m->head_dim, kv = f->latent ? 0 : m->n_kv_heads * m->head_dim;
    const int rank = m->kv_rank, keys = m->head_dim - m->rope_dim, both = keys + m->v_dim;
    const int q_rank = f->latent ? config_whole(load, "q_lora_rank", 0, 1 << 16, 0) : 0;
    const int normed = f->head_norms ? m->head_dim : 0;
    l->q_a = bind_linear(load, "self_attn.q_a_proj", q_rank, m->dim, bias);
    l->q_a_norm = bind_floats(load, "self_attn.q_a_layernorm", ".weight", q_rank);
    l->q = q_rank ? bind_linear(load, "self_attn.q_b_proj", q, q_rank, false)
                  : bind_linear(load, "self_attn.q_proj", q, m->dim, bias && !f->latent);
    l->k = bind_linear(load, "self_attn.k_proj", kv, m->dim, bias);
    l->v = bind_linear(load, "self_attn.v_proj", kv, m->dim, bias);
    l->kv_a = bind_linear(load, "self_attn.kv_a_proj_with_mqa", rank ? rank + m->rope_dim : 0, m->dim, bias);
    l->kv_a_norm = bind_floats(load, "self_attn.kv_a_layernorm", ".weight", rank);
    if (m->k_up_transposed) {
        l->k_up = bind_each(load, "self_attn.k_b_proj", "", m->n_heads, rank, keys, NO_BIAS);
        l->v_up = bind_each(load, "self_attn.v_b_proj", "", m->n_heads, m->v_dim, rank, NO_BIAS);
    } else if (f->latent) {
        const Linear kv_b = bind_linear(load, "self_attn.kv_b_proj", m->n_heads * both, rank, NO_BIAS);
        l->k_up = cut(load, &kv_b, 0, 1, keys, both);
        l->v_up = cut(load, &kv_b, keys, 1, m->v_dim, both);
    }
    l->o = bind_linear(load, "self_attn.o_proj", m->dim, m->n_heads * m->v_dim, o_bias);
    l->q_norm = bind_floats(load, "self_attn.q_norm", ".weight", normed);
    l->k_norm = bind_floats(load, "self_attn.k_norm", ".weight", normed);
    l->sinks = bind_floats(load, "self_attn.sinks", "", f->sinks ? m->n_heads : 0);
}

static void bind_experts(Loader *load, const Model *m, Layer *l) {
    const Family *f = load->family;
    const int width = config_whole(load, f->moe.width, 1, 1 << 17, REQUIRED);
    const int shared = f->latent ? width * config_whole(load, "n_shared_experts", 1, 64, REQUIRED) : 0;
    const bool bias = f->moe.biases, corrected = m->route.group_best == 2; /* topk_method noaux_tc */
    l->router = bind_linear(load, f->moe.router, m->n_experts, m->dim, bias);
    l->choice_bias = bind_floats(load, f->moe.router, ".e_score_correction_bias", corrected ? m->n_experts : 0);
    if (bias && !find_tensor(load, "mlp.experts.0.gate_proj", ".weight")) { /* even rows gate, odd rows up */
        const Linear both = bind_fused(load, "mlp.experts.gate_up_proj", 2 * width, m->dim);
        const Linear down = bind_fused(load, "mlp.experts.down_proj", m->dim, width);
        l->gate = cut(load, &both, 0, 2, width, 2 * width);
        l->up = cut(load, &both, 1, 2, width, 2 * width);
        l->down = cut(load, &down, 0, 1, m->dim, m->dim);
    } else {
        l->gate = bind_each(load, f->moe.experts, f->moe.gate, m->n_experts, width, m->dim, bias);
        l->up = bind_each(load, f->moe.experts, f->moe.up, m->n_experts, width, m->dim, bias);
        l->down = bind_each(load, f->moe.experts, f->moe.down, m->n_experts, m->dim, width, bias);
    }
    l->shared_gate = bind_linear(load, "mlp.shared_experts.gate_proj", shared, m->dim, false);
    l->shared_up = bind_linear(load, "mlp.shared_experts.up_proj", shared, m->dim, false);
    l->shared_down = bind_linear(load, "mlp.shared_experts.down_proj", shared ? m->dim : 0, shared, false);
}

static bool has_experts(Loader *load, int layer) {
    const cJSON *dense = config_typed(load, load->config, "mlp_only_layers", cJSON_Array, "an array"), *one;
    const char *router = load->family->moe.router;
    bool experts = router && layer >= config_whole(load, "first_k_dense_replace", 0, INT32_MAX, 0) &&
                   (layer + 1) % config_whole(load, "decoder_sparse_step", 1, INT32_MAX, 1) == 0;
    cJSON_ArrayForEach(one, dense) if (cJSON_IsNumber(one) && one->valuedouble == layer) experts = false;
    return experts;
}

static void bind_layer(Loader *load, Model *m, int i) {
    Layer *l = m->layer + i;
    const bool bias = config_true(load, "mlp_bias"), gemma = load->family->gemma;
    const char *after = "post_attention_layernorm"; /* of attention's result in Gemma, else of the MLP's input */
    l->attn_norm = bind_floats(load, "input_layernorm", ".weight", m->dim);
    l->ffn_norm = bind_floats(load, gemma ? "pre_feedforward_layernorm" : after, ".weight", m->dim);
    l->attn_post_norm = bind_floats(load, after, ".weight", gemma ? m->dim : 0);
    l->ffn_post_norm = bind_floats(load, "post_feedforward_layernorm", ".weight", gemma ? m->dim : 0);
    bind_attention(load, m, l);
    if (has_experts(load, i)) {
        bind_experts(load, m, l);
    } else {
        int width = config_whole(load, "intermediate_size", 1, 1 << 20, REQUIRED);
        l->gate = bind_linear(load, "mlp.gate_proj", width, m->dim, bias);
        l->up = bind_linear(load, "mlp.up_proj", width, m->dim, bias);
        l->down = bind_linear(load, "mlp.down_proj", m->dim, width, bias);
    }
    m->ffn_dim = MAX(m->ffn_dim, MAX(l->gate.rows, l->shared_gate.rows));
}

/* True for tensors that generating text does not need: scales of activations and of the cache, which both stay bf16,
 * the shapes of packed codes, which config.json gives too, pictures and more. */
static bool left_out(const Loader *load, const char *name) {
    static const char ignored[] = "input_scale weight_shape input_global_scale input_zero_point input_scale_ub k_scale "
                                  "v_scale q_scale kv_scale prob_scale output_scale";
    const char *dot = strrchr(name, '.'), *layer = strstr(name, "layers.");
    bool picture = strstr(name, "vision_tower.") || strstr(name, "multi_modal_projector.");
    bool extra = load->family->latent && layer && strtol(layer + 7, NULL, 10) >= load->c->model.n_layers;
    return strstr(name, ".rotary_emb.inv_freq") || strstr(name, "activation_scale") ||
           (dot && text_listed(ignored, dot + 1)) || (load->tied && strstr(name, "lm_head.weight")) ||
           (load->config != load->file && picture) || extra; /* DeepSeek's extra layer predicts a second token */
}

static bool same_tensor(const Tensor *a, const Tensor *b) {
    return !strcmp(a->dtype, b->dtype) && a->dims == b->dims && !memcmp(a->shape, b->shape, sizeof a->shape) &&
           !memcmp(a->data, b->data, a->size); /* the same dtype and shape, so the same size */
}

static void bind_all(Loader *load, Model *m) {
    const Tensors *all = &load->c->tensors;
    const Tensor *table = find_tensor(load, "model.embed_tokens", ".weight"),
                 *head = find_tensor(load, "lm_head", ".weight");
    /* One matrix, under either name or both. Two that differ are not tied, whatever config.json says. */
    load->tied = config_true(load, "tie_word_embeddings") && (!head || !table || same_tensor(head, table));
    bool embed = !load->tied || table || m->made_up;
    if (embed) m->embed = m->head = bind_linear(load, "model.embed_tokens", m->vocab, m->dim, NO_BIAS);
    if (!embed || !load->tied) m->head = bind_linear(load, "lm_head", m->vocab, m->dim, false);
    if (!embed) m->embed = m->head;
    m->norm = bind_floats(load, "model.norm", ".weight", m->dim);
    m->k_up_transposed = load->family->latent && find_tensor(load, "model.layers.0.self_attn.k_b_proj.0", ".weight");
    for (int i = 0; i < m->n_layers && !failed(load); i++) {
        snprintf(load->prefix, sizeof load->prefix, "model.layers.%d.", i);
        bind_layer(load, m, i);
    }
    for (const Tensor *t = all->tensor; t < all->tensor + all->n; t++) /* an unbound one is of an unknown formula */
        if (!t->bound && !left_out(load, t->name))
            bad_file(load, file_of(load, t), "tensor '%s' has no place in a model of %d layers of the family %s",
                     t->name, m->n_layers, load->family->model_type);
}

/* Reads the model's config.json. */
static bool open_config(Loader *load, const char *path) {
    Tensors *t = &load->c->tensors;
    load->container = container_at(path);
    load->path = load->container->in_files ? text_print("%s", path) : path_join(path, "config.json");
    if (load->container->in_files && !tensors_open(t, path, load->e)) return false;
    load->file = model_json(load, path, "config.json");
    if (load->file)
        read_config(load, &load->c->model, path);
    else if (!failed(load))
        fail(load->e, BAD_MODEL, "%s: no config.json is here: is it a model directory, downloaded whole?", path);
    return !failed(load);
}

static void close_config(Loader *load) {
    cJSON_Delete(load->file);
    cJSON_Delete(load->defaults);
    free(load->path);
}

static bool read_checkpoint(Checkpoint *c, const char *dir, bool made_up, const char *encoding, Error *e) {
    LOCAL(close_config) Loader load = {.c = c, .e = e, .encoding = encoding};
    *c = (Checkpoint){.model.made_up = made_up};
    *e = (Error){0};
    bool ok = open_config(&load, dir);
    for (int i = 0; ok && encoding && packings[i]; i++) ok = packings[i]->knows(encoding, e);
    if (ok && !made_up && !load.container->in_files) tensors_open(&c->tensors, dir, e);
    if (!failed(&load)) bind_all(&load, &c->model);
    if (e->code) checkpoint_close(c);
    return !e->code;
}

bool checkpoint_open(Checkpoint *c, const char *dir, Error *e) { return read_checkpoint(c, dir, false, NULL, e); }
bool checkpoint_make_up(Checkpoint *c, const char *dir, const char *encoding, Error *e) {
    return read_checkpoint(c, dir, true, encoding, e);
}

void checkpoint_close(Checkpoint *c) {
    for (int i = 0; i < c->owned_n; i++) free(c->owned[i]);
    free(c->owned);
    ids_free(&c->stop);
    tensors_close(&c->tensors);
    *c = (Checkpoint){0};
}

/* ---- sizes ---- */

uint64_t linear_bytes(const Linear *w) {
    uint64_t sum = 0;
    for (int i = 0; w->rows && i < w->n; i++) {
        const View *views[] = {&w->each[i].data, &w->each[i].scale, &w->each[i].zero};
        for (int k = 0; k < 3; k++) sum += (uint64_t)views[k]->lines * views[k]->bytes;
    }
    return sum;
}

uint64_t step_bytes(const Model *m, double experts, int streams, int depth) {
    double sum = (double)linear_bytes(&m->head);
    double row = m->kv_rank ? m->kv_rank + m->rope_dim : 2.0 * m->n_kv_heads * m->head_dim; /* values in the cache */
    for (int i = 0; i < m->n_layers; i++) {
        const Layer *l = m->layer + i;
        const Linear *all[] = LINEARS(l);
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) {
            double bytes = (double)linear_bytes(all[j]);
            bool of_experts = l->router.rows && (all[j] == &l->gate || all[j] == &l->up || all[j] == &l->down);
            if (all[j]->rows && all[j]->each->bias) bytes += (double)all[j]->n * all[j]->rows * sizeof(float);
            sum += of_experts ? bytes / all[j]->n * experts : bytes;
        }
        double seen = l->window ? MIN(l->window, depth + 1) : depth + 1;
        sum += streams * seen * row * 2 + 2.0 * m->dim * sizeof(float); /* bf16; two norms */
    }
    return (uint64_t)sum;
}

/* ---- what a model is, without its weights ---- */

ModelInfo model_describe(const char *path) {
    ModelInfo m = {0};
    LOCAL(checkpoint_close) Checkpoint c = {0};
    LOCAL(close_config) Loader load = {.c = &c, .e = &m.problem};
    size_t bytes[MAX_TYPES + 1] = {0}, most = 0; /* by type; the first: none */
    m.known = open_config(&load, path) || (load.container->in_files && !model_entry(path).complete);
    const char *family = json_string(load.file, "model_type");
    const char *encoding = json_string(json_get(load.file, "quantization_config"), "quant_method");
    if (!encoding) encoding = json_string(load.file, "dtype");
    if (!encoding) encoding = json_string(load.file, "torch_dtype"); /* its older name */
    for (const Tensor *one = c.tensors.tensor; one < c.tensors.tensor + c.tensors.n; one++) {
        size_t *sum = bytes + 1 + type_of(one);
        if ((*sum += one->size) > most) most = *sum, encoding = one->dtype;
    }
    snprintf(m.family, sizeof m.family, "%s", family ? family : "");
    snprintf(m.encoding, sizeof m.encoding, "%s", encoding ? encoding : "");
    for (char *text = m.encoding; *text; text++) *text = (char)toupper((unsigned char)*text);
    return m;
}

bool model_runs(const char *path, Error *e) {
    const ModelInfo m = model_describe(path);
    *e = m.problem;
    return m.known;
}
