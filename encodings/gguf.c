/* gguf.c: reads GGUF files (github.com/ggml-org/ggml, docs/gguf.md) as the JSON that the hub's files would hold, so
 * that the rest of the program knows one kind of model. Chapters: values, tensors, config.json. vocabulary.c makes
 * tokenizer.json.
 *
 * Any file is hostile: counts and lengths are compared with the bytes that are left, and MOST_ITEMS bounds the memory
 * for JSON. Unknown versions, types, architectures and keys are refused by name. */
#include "gguf.h"
#include "host.h"

#include <endian.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MOST_HEADER = 1 << 28, MOST_ITEMS = 4000000, MOST_KEYS = 1000, MOST_ALIGNMENT = 1 << 20 };

/* By its name, or, since the hub's blobs and many a copy have others, by its first bytes. */
static bool fits(const char *path) {
    const char *dot = strrchr(path, '.');
    char magic[4] = "";
    if (!file_exists(path)) return false;
    FILE *f = dot && !strcasecmp(dot, ".gguf") ? NULL : fopen(path, "re");
    if (!f) return dot && !strcasecmp(dot, ".gguf");
    const bool is_gguf = fread(magic, 1, 4, f) == 4 && !memcmp(magic, "GGUF", 4);
    fclose(f);
    return is_gguf;
}

/* ---- values ---- */

typedef struct {
    const char *path;
    const unsigned char *begin, *at, *end;
    int budget; /* JSON values that may still be made */
    bool bad;   /* after the first error, everything reads as 0 */
    Error *e;
} Cursor;

#define refuse(r, format, ...)                                                                                         \
    ((r)->bad = (r)->bad || !fail((r)->e, BAD_MODEL, "%s: " format " (before byte %td)", (r)->path, ##__VA_ARGS__,     \
                                  (r)->at - (r)->begin))

static uint64_t read_number(Cursor *r, size_t bytes) { /* little-endian */
    uint64_t x = 0;
    if ((size_t)(r->end - r->at) < bytes) refuse(r, "the file is incomplete or damaged: download it again");
    if (r->bad) return 0;
    memcpy(&x, r->at, bytes);
    r->at += bytes;
    return le64toh(x);
}

static cJSON *text(Cursor *r) {
    uint64_t n = read_number(r, 8);
    if (n > (size_t)(r->end - r->at)) refuse(r, "a text is longer than the file: download it again");
    if (!r->bad && utf8_check((const char *)r->at, n) < n) refuse(r, "a text is not UTF-8");
    if (r->bad) n = 0;
    r->at += n;
    return json_from_text((const char *)r->at - n, n);
}

static cJSON *value(Cursor *r, uint64_t type, bool element) {
    enum { U8, I8, U16, I16, U32, I32, FLOAT, BOOL, TEXT, ARRAY, U64, I64, DOUBLE };
    static const size_t size[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (r->budget-- <= 0) refuse(r, "more values than any model has");
    if (type > DOUBLE || (type == ARRAY && element)) refuse(r, "an unknown type of value, or an array of arrays");
    if (r->bad) return cJSON_CreateNull();
    if (type == TEXT) return text(r);
    if (type == ARRAY) {
        uint64_t of = read_number(r, 4), n = read_number(r, 8);
        cJSON *list = cJSON_CreateArray();
        for (; n && !r->bad; n--) cJSON_AddItemToArray(list, value(r, of, true));
        return list;
    }
    uint64_t x = read_number(r, size[type]);
    int unused = 64 - 8 * (int)size[type];
    double d = (double)x;
    if (type == BOOL) return cJSON_CreateBool(x != 0);
    if (type == I8 || type == I16 || type == I32 || type == I64) d = (double)((int64_t)(x << unused) >> unused);
    if (type == FLOAT) d = (double)bits_float((uint32_t)x);
    if (type == DOUBLE) memcpy(&d, &x, sizeof d);
    return cJSON_CreateNumber(d);
}

static double get_number(const cJSON *object, const char *key, double absent) {
    const cJSON *x = json_get(object, key);
    return cJSON_IsNumber(x) ? x->valuedouble : absent;
}

typedef struct { /* GGUF's name and the hub's; "arch:name" is only for architectures that begin with arch */
    const char *gguf, *hub;
} Pair;

/* The first row that has all of `name`, or all but an end like .weight, which goes to *rest. NULL: none has. */
static const Pair *find_row(const Pair *row, const char *arch, const char *name, const char **rest) {
    for (; row->gguf; row++) {
        const char *colon = strchr(row->gguf, ':'), *own = colon ? colon + 1 : row->gguf;
        size_t n = strlen(own);
        *rest = name + n;
        if (colon && strncmp(arch, row->gguf, (size_t)(colon - row->gguf))) continue;
        if (!strncmp(name, own, n) && (!**rest || (**rest == '.' && !strchr(*rest + 1, '.')))) return row;
    }
    return NULL;
}

/* ---- tensors ---- */

/* clang-format off */
static const char *const ggml_types[] = { /* by their numbers; infer reads those that are in types[] */
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32",
    "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8",
    "IQ4_NL_8_8", "GGUF_MXFP4", "GGUF_NVFP4"};

static const Pair names[] = { /* '*' is replaced by the number of each expert or head */
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"},
    {"attn_norm", "input_layernorm"}, {"attn_q", "self_attn.q_proj"}, {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"}, {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"}, {"attn_sinks.weight", "self_attn.sinks"}, {"attn_q_a", "self_attn.q_a_proj"},
    {"attn_q_a_norm", "self_attn.q_a_layernorm"}, {"attn_q_b", "self_attn.q_b_proj"},
    {"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"}, {"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
    {"attn_kv_b", "self_attn.kv_b_proj"}, {"attn_k_b", "self_attn.k_b_proj.*"}, {"attn_v_b", "self_attn.v_b_proj.*"},
    {"gemma:ffn_norm", "pre_feedforward_layernorm"}, {"ffn_norm", "post_attention_layernorm"},
    {"post_attention_norm", "post_attention_layernorm"}, {"post_ffw_norm", "post_feedforward_layernorm"},
    {"ffn_gate", "mlp.gate_proj"}, {"ffn_up", "mlp.up_proj"}, {"ffn_down", "mlp.down_proj"},
    {"llama:ffn_gate_inp", "block_sparse_moe.gate"}, {"llama:ffn_gate_exps", "block_sparse_moe.experts.*.w1"},
    {"llama:ffn_up_exps", "block_sparse_moe.experts.*.w3"}, {"llama:ffn_down_exps", "block_sparse_moe.experts.*.w2"},
    {"gpt-oss:ffn_gate_inp", "mlp.router"}, {"ffn_gate_inp", "mlp.gate"}, {"ffn_gate_exps", "mlp.experts.*.gate_proj"},
    {"ffn_up_exps", "mlp.experts.*.up_proj"}, {"ffn_down_exps", "mlp.experts.*.down_proj"},
    {"ffn_gate_shexp", "mlp.shared_experts.gate_proj"}, {"ffn_up_shexp", "mlp.shared_experts.up_proj"},
    {"ffn_down_shexp", "mlp.shared_experts.down_proj"}, {"exp_probs_b.bias", "mlp.gate.e_score_correction_bias"}, {0}};
/* clang-format on */

/* Reads a tensor's entry of the header and adds it to `out`: one for each expert or head, if it holds all. */
static void read_tensor(Cursor *r, const char *arch, double alignment, cJSON *out) {
    LocalJson label = text(r);
    const char *name = label->valuestring, *rest = "", *local = name;
    double shape[4], values = 1;
    uint64_t dims = read_number(r, 4);
    if (dims < 1 || dims > 4) refuse(r, "a tensor must have one to four dimensions");
    /* GGUF begins with the dimension that varies fastest, the hub ends with it. */
    for (uint64_t i = dims; i-- && !r->bad;) values *= shape[i] = (double)read_number(r, 8);
    uint64_t type = read_number(r, 4);
    double begin = (double)read_number(r, 8);
    const char *called = type < sizeof ggml_types / sizeof *ggml_types ? ggml_types[type] : "unknown";
    const TypeInfo *info = types;
    while (info < types + types_n && strcmp(info->name, called)) info++;
    if (info == types + types_n)
        refuse(r, "tensor '%.64s' is %s (%llu); read are F32, F16, BF16, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL/XS, MXFP4",
               name, called, (unsigned long long)type);
    if (!(values >= 1 && values < 0x1p50 && begin < 0x1p50)) refuse(r, "a tensor is empty or too large");
    if (fmod(begin, alignment) != 0) refuse(r, "a tensor does not begin at a multiple of the alignment");
    if (r->bad) return;
    if (fmod(shape[dims - 1], info->values) != 0) refuse(r, "rows of a tensor are not whole blocks");
    int layer = -1, skip = 0;
    if (sscanf(name, "blk.%9d.%n", &layer, &skip) == 1) local += skip;
    const Pair *row = find_row(names, arch, local, &rest);
    const char *hub = row ? row->hub : local, *each = row ? strchr(hub, '*') : NULL;
    int sliced = each && dims > 1;
    double n = sliced ? shape[0] : 1, bytes = values / n / info->values * info->bytes;
    if (n * 10 > r->budget) refuse(r, "more tensors than any model has"), n = 0;
    r->budget -= 10 * (int)n;
    for (int i = 0; i < n; i++, begin += bytes) {
        LocalBytes full = {0};
        if (local != name) bytes_print(&full, "model.layers.%d.", layer);
        bytes_add(&full, hub, each ? (size_t)(each - hub) : strlen(hub));
        if (each) bytes_print(&full, "%d%s", i, each + 1);
        bytes_text(&full, row ? rest : "");
        cJSON *one = cJSON_AddObjectToObject(out, full.data);
        cJSON_AddStringToObject(one, "dtype", info->name);
        cJSON_AddItemToObject(one, "shape", cJSON_CreateDoubleArray(shape + sliced, (int)dims - sliced));
        cJSON_AddItemToObject(one, "data_offsets", cJSON_CreateDoubleArray((double[]){begin, begin + bytes}, 2));
    }
}

static cJSON *header(const Tensors *t, int i, size_t *data, size_t *alignment, Error *e) {
    const TensorFile *f = t->file + i;
    Cursor r = {f->name,    f->map, f->map + 4, f->map + (f->size < MOST_HEADER ? f->size : MOST_HEADER),
                MOST_ITEMS, false,  e};
    cJSON *out = cJSON_CreateObject(), *own = cJSON_AddObjectToObject(out, "__metadata__");
    uint64_t version = read_number(&r, 4), tensors = read_number(&r, 8), keys = read_number(&r, 8);
    if (memcmp(f->map, "GGUF", 4) || version < 2 || version > 3)
        refuse(&r, "no GGUF of version 2 or 3 (%llu): download it again", (unsigned long long)version);
    if (keys > MOST_KEYS) refuse(&r, "more keys than any model has");
    for (; keys && !r.bad; keys--) {
        LocalJson key = text(&r);
        if (cJSON_GetObjectItemCaseSensitive(own, key->valuestring)) refuse(&r, "a key appears twice");
        cJSON_AddItemToObject(own, key->valuestring, value(&r, read_number(&r, 4), false));
    }
    double align = get_number(own, "general.alignment", 32), no = get_number(own, "split.no", 0);
    double count = fmax(get_number(own, "split.count", 1), 1); /* 0 in a file that was merged from parts */
    if (!(align >= 1 && align <= MOST_ALIGNMENT) || exp2(floor(log2(align))) != align)
        refuse(&r, "general.alignment is no power of two");
    const char *arch = json_string(t->metadata ? t->metadata : own, "general.architecture");
    if (!arch) refuse(&r, "general.architecture is missing");
    if (no != i || count != t->files)
        refuse(&r, "it is part %.0f of %.0f, by its name %d of %d: parts are named NAME-00001-of-00003.gguf", no + 1,
               count, i + 1, t->files);
    *alignment = r.bad ? 1 : (size_t)align;
    for (; tensors && !r.bad; tensors--) read_tensor(&r, arch, align, out);
    *data = ((size_t)(r.at - r.begin) + *alignment - 1) / *alignment * *alignment;
    if (*data > f->size) *data = f->size; /* it has keys only */
    if (r.bad) return cJSON_Delete(out), NULL;
    return out;
}

/* ---- config.json ---- */

/* clang-format off */
static const char archs[] = "llama, qwen2, qwen3, qwen3moe, gemma2, gemma3, gpt-oss, deepseek2, mistral3";
static const Pair renamed[] = { /* those whose model_type is another word */
    {"qwen3moe", "qwen3_moe"}, {"gemma3", "gemma3_text"}, {"gpt-oss", "gpt_oss"}, {"deepseek2", "deepseek_v2"},
    {"mistral3", "llama"}, {0}};

static const Pair keys[] = { /* all known keys; "": known and ignored */
    {"embedding_length", "hidden_size"}, {"context_length", "max_position_embeddings"},
    {"feed_forward_length", "intermediate_size"}, {"block_count", "num_hidden_layers"},
    {"attention.head_count", "num_attention_heads"}, {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.key_length", "head_dim"}, {"attention.value_length", "v_head_dim"},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps"}, {"rope.freq_base", "rope_theta"},
    {"rope.dimension_count", "qk_rope_head_dim"}, {"vocab_size", ""}, {"tensor_data_layout", ""},
    {"attention.layer_norm_epsilon", ""},
    {"rope.scale_linear", "factor"}, {"rope.scaling.type", "rope_type"}, {"rope.scaling.factor", "factor"},
    {"rope.scaling.original_context_length", "original_max_position_embeddings"}, {"rope.scaling.finetuned", ""},
    {"rope.scaling.yarn_beta_fast", "beta_fast"}, {"rope.scaling.yarn_beta_slow", "beta_slow"},
    {"rope.scaling.yarn_attn_factor", "attn_factor"}, {"rope.scaling.attn_factor", "attn_factor"},
    {"deepseek2:rope.scaling.yarn_log_multiplier", "mscale"},
    {"gemma3:rope.freq_base_swa", "rope_local_base_freq"}, {"llama:attention.sliding_window", "sliding_window"},
    {"gemma:attention.sliding_window", "sliding_window"}, {"gpt-oss:attention.sliding_window", "sliding_window"},
    {"gemma3:attention.sliding_window_pattern", "sliding_window_pattern"},
    {"attn_logit_softcapping", "attn_logit_softcapping"}, {"final_logit_softcapping", "final_logit_softcapping"},
    {"expert_count", "num_local_experts"}, {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"}, {"qwen3moe:expert_weights_norm", "norm_topk_prob"},
    {"qwen3moe:expert_shared_feed_forward_length", ""}, {"gemma3:mm.tokens_per_image", ""}, /* they come with tensors */
    {"deepseek2:expert_weights_norm", "norm_topk_prob"}, {"deepseek2:expert_weights_scale", "routed_scaling_factor"},
    {"deepseek2:expert_shared_count", "n_shared_experts"}, {"deepseek2:expert_gating_func", "expert_gating_func"},
    {"deepseek2:expert_group_count", "n_group"}, {"deepseek2:expert_group_used_count", "topk_group"},
    {"deepseek2:leading_dense_block_count", "first_k_dense_replace"},
    {"deepseek2:nextn_predict_layers", "nextn_predict_layers"}, {"deepseek2:attention.q_lora_rank", "q_lora_rank"},
    {"deepseek2:attention.kv_lora_rank", "kv_lora_rank"}, {"deepseek2:attention.key_length_mla", "key_length_mla"},
    {"deepseek2:attention.value_length_mla", "value_length_mla"}, {0}};
/* clang-format on */

static void put(cJSON *config, const char *key, double x) {
    cJSON_DeleteItemFromObjectCaseSensitive(config, key);
    cJSON_AddNumberToObject(config, key, x);
}

/* Copies the keys that config.json has, too. */
static bool copy_keys(cJSON *config, const cJSON *metadata, const char *arch, const char *path, Error *e) {
    const cJSON *one;
    size_t n = strlen(arch);
    cJSON_ArrayForEach(one, metadata) {
        const char *rest = "", *name = one->string;
        if (strncmp(name, arch, n) || name[n] != '.' || !strncmp(name + n, ".vision.", 8)) continue;
        const Pair *key = find_row(keys, arch, name + n + 1, &rest);
        if (!key || *rest)
            return fail(e, BAD_MODEL, "%s: the key '%.80s' is not known here: it may change what the model computes",
                        path, name);
        if (*key->hub) cJSON_AddItemToObject(config, key->hub, cJSON_Duplicate(one, true));
    }
    return true;
}

/* Fills rope_scaling from the keys of config that belong there. */
static bool add_rope(cJSON *config, const char *arch, const char *path, Error *e) {
    cJSON *type = cJSON_GetObjectItemCaseSensitive(config, "rope_type");
    double mscale = get_number(config, "mscale", 0) * 10;
    if (json_is(config, "rope_type", "none")) cJSON_SetValuestring(type, "default");
    if (!type && get_number(config, "factor", 1) > 1)
        cJSON_AddStringToObject(config, "rope_type", "linear"); /* old files have only scale_linear */
    if (mscale > 0) put(config, "mscale", mscale), put(config, "mscale_all_dim", mscale);
    cJSON_AddBoolToObject(config, "truncate", strcmp(arch, "gpt-oss"));
    cJSON_AddItemToObject(config, "rope_scaling", cJSON_Duplicate(config, true));
    return json_is(config, "rope_type", "yarn") || get_number(config, "attn_factor", 1) == 1 ||
           fail(e, BAD_MODEL, "%s: rope.scaling.attn_factor is only implemented with yarn", path);
}

/* Adds the tokens that end a text in every family that has them: the keys name at most three. */
static void add_stops(cJSON *stop, const cJSON *metadata, double vocab) {
    static const char ends[] = "<|eot_id|> <|eom_id|> <|im_end|> <|end_of_text|> <|endoftext|> <end_of_turn> "
                               "<|return|> <|call|> </s>";
    enum { CONTROL = 3, USER_DEFINED = 4 }; /* tokenizer.ggml.token_type */
    const cJSON *tokens = json_get(metadata, "tokenizer.ggml.tokens"), *token = tokens ? tokens->child : NULL;
    const cJSON *types = json_get(metadata, "tokenizer.ggml.token_type"), *type = types ? types->child : NULL;
    for (int id = 0; token && type && id < vocab; id++, token = token->next, type = type->next) {
        const char *text = cJSON_GetStringValue(token);
        const bool cut = type->valuedouble == CONTROL || type->valuedouble == USER_DEFINED;
        if (cut && text && *text && text_listed(ends, text)) cJSON_AddItemToArray(stop, cJSON_CreateNumber(id));
    }
}

static cJSON *config_json(const Tensors *t, const char *path, Error *e) {
    static const char *const stops[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                        "tokenizer.ggml.eom_token_id"},
                             *const routers[] = {"mlp.gate", "mlp.router", "block_sparse_moe.gate"};
    const char *arch = json_string(t->metadata, "general.architecture"), *rest = "";
    const Pair *row = find_row(renamed, arch, arch, &rest);
    cJSON *c = cJSON_CreateObject();
    bool known = text_listed(archs, arch) ||
                 fail(e, BAD_MODEL, "%s: the architecture '%.60s' is not supported (supported: %s)", path, arch, archs);
    if (!known || !copy_keys(c, t->metadata, arch, path, e)) return cJSON_Delete(c), NULL;
    const Tensor *embed = tensors_find(t, "model.embed_tokens.weight");
    bool llama = text_listed("llama mistral3", arch), latent = !strcmp(arch, "deepseek2");
    double gating = get_number(c, "expert_gating_func", 1); /* 1: softmax, 2: sigmoid */
    bool sigmoid = gating == 2;
    double layers = get_number(c, "num_hidden_layers", 0), heads = get_number(c, "num_attention_heads", 1);
    double dim = get_number(c, "hidden_size", 0), vocab = embed ? (double)embed->shape[0] : 0;
    double size = get_number(c, "key_length_mla", get_number(c, "head_dim", floor(dim / heads)));
    double v = get_number(c, "value_length_mla", get_number(c, "v_head_dim", size));
    double rope = get_number(c, "qk_rope_head_dim", size), groups = get_number(c, "n_group", 1);
    bool big = !strcmp(arch, layers == 46 ? "gemma2" : layers == 62 ? "gemma3" : ""); /* 27B */
    const char *type = latent && sigmoid ? "deepseek_v3" : row ? row->hub : arch;
    if (llama && json_get(c, "sliding_window")) type = "mistral";
    if (llama && get_number(c, "num_local_experts", 0) > 0) type = "mixtral";
    cJSON_AddStringToObject(c, "model_type", type);
    put(c, "num_hidden_layers", layers - get_number(c, "nextn_predict_layers", 0));
    put(c, "vocab_size", vocab);
    put(c, "v_head_dim", v);
    put(c, "head_dim", latent || v == size ? size : 0);
    put(c, latent ? "qk_nope_head_dim" : "partial_rotary_factor", latent ? size - rope : rope / size);
    if (!json_get(c, "num_key_value_heads")) put(c, "num_key_value_heads", heads);
    if (!json_get(c, "rope_theta")) put(c, "rope_theta", 10000);
    put(c, "query_pre_attn_scalar", big ? dim / heads : size);
    if (!json_get(c, "q_lora_rank")) cJSON_AddNullToObject(c, "q_lora_rank");
    if (!json_get(c, "norm_topk_prob")) cJSON_AddBoolToObject(c, "norm_topk_prob", !latent); /* as llama.cpp does */
    if (!json_get(c, "routed_scaling_factor")) put(c, "routed_scaling_factor", 1);
    if (!strcmp(arch, "gemma3") && !json_get(c, "sliding_window")) put(c, "sliding_window_pattern", 1); /* no windows */
    cJSON_AddStringToObject(c, "scoring_func", sigmoid ? "sigmoid" : gating == 1 ? "softmax" : "unknown");
    cJSON_AddStringToObject(c, "topk_method", sigmoid ? "noaux_tc" : groups > 1 ? "group_limited_greedy" : "greedy");
    if (!json_get(c, "n_group") && get_number(c, "num_local_experts", 0) != 256) /* old files of V3 leave it out */
        put(c, "n_group", 1), put(c, "topk_group", 1);
    cJSON_AddBoolToObject(c, "rope_interleave", llama || latent); /* the order of q's and k's rows */
    cJSON_AddBoolToObject(c, "tie_word_embeddings", !tensors_find(t, "lm_head.weight"));
    cJSON *dense = cJSON_AddArrayToObject(c, "mlp_only_layers"); /* those without a router */
    for (int i = 0; i < layers && i < 1024; i++) {
        bool router = false;
        for (int k = 0; k < 3; k++) {
            LocalText name = text_print("model.layers.%d.%s.weight", i, routers[k]);
            router = router || tensors_find(t, name);
        }
        if (!router) cJSON_AddItemToArray(dense, cJSON_CreateNumber(i));
    }
    if (!add_rope(c, arch, path, e)) return cJSON_Delete(c), NULL;
    cJSON *stop = cJSON_AddArrayToObject(c, "eos_token_id");
    for (int i = 0; i < 3; i++) cJSON_AddItemToArray(stop, cJSON_Duplicate(json_get(t->metadata, stops[i]), true));
    add_stops(stop, t->metadata, vocab);
    return c;
}

/* ---- the container ---- */

/* The number of files, from the name of the first: 3 for NAME-00001-of-00003.gguf, whose ending may be missing. 0: not
 * the first. *stem: the length of what stands before 00001. */
static int parts_of(const char *path, int *stem) {
    const size_t all = strlen(path), n = all > 5 && !strcasecmp(path + all - 5, ".gguf") ? all - 5 : all;
    int no = 1, count = 1, end = 0;
    if (n > 15 && (sscanf(path + n - 15, "-%5d-of-%5d%n", &no, &count, &end) != 2 || end != 15)) no = count = 1;
    *stem = (int)n - 14;
    return no == 1 && count >= 1 && count <= MOST_FILES ? count : 0;
}

/* Is it the vision part of a model? Its architecture, clip, is among the first keys. */
static bool is_vision_part(const char *path) {
    static const char clip[] = "general.architecture\x08\0\0\0\x04\0\0\0\0\0\0\0clip";
    char head[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd < 0 ? 0 : read(fd, head, sizeof head);
    if (fd >= 0) close(fd);
    return n > 0 && memmem(head, (size_t)n, clip, sizeof clip - 1);
}

static bool files(Tensors *t, const char *path, Error *e) {
    int stem;
    const int n = parts_of(path, &stem);
    if (is_vision_part(path))
        return fail(e, BAD_MODEL, "%s: this is the vision part of a model, not its text part", path);
    if (!n) return fail(e, BAD_MODEL, "%s: not the first of its parts: the model is NAME-00001-of-...gguf", path);
    for (int i = 0; i < n; i++) /* the stem is followed by 00001-of-00003 and perhaps an ending */
        tensors_add_file(t, i ? text_print("%.*s%05d-of-%05d%s", stem, path, i + 1, n, path + stem + 14)
                              : text_print("%s", path));
    return true;
}

static cJSON *json(const Tensors *t, const char *path, const char *name, Error *e) {
    if (!strcmp(name, "config.json")) return config_json(t, path, e);
    if (!strcmp(name, "tokenizer.json")) return gguf_tokenizer(t->metadata, path, e);
    if (!strcmp(name, "tokenizer_config.json")) return gguf_tokenizer_config(t->metadata);
    return NULL;
}

const Container gguf = {fits,
                        files,
                        header,
                        json,
                        .in_files = true,
                        .whole_norms = true,
                        .neighbours = true,
                        .extra_biases = true,
                        .ending = "[.][gG][gG][uU][fF]$",
                        .advice = "--include '*Q4_K_M*' fetches GGUF files with that in their names, "};
