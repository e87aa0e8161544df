/* infer.c: the host program. From files to a Model: config.json, safetensors, binding, gpt-oss's row; then the command
 * line, the terminal, opening a model, answers, play, the filters, logits, `main` last. It uses scheduler.c,
 * tokenizer.c, chat.c, download.c and the backend (infer.h).
 *
 * What is special about a family ends here: fused and interleaved matrices become views, every RoPE scaling becomes a
 * table of angles, small tensors become float arrays, so no code behind infer.h asks which family a model is. Any file
 * may be hostile: lengths are compared with the file's size before use, products checked for overflow, and every tensor
 * is bound once by name, dtype and shape. What comes after trusts them.
 *
 * Data goes to stdout, everything else to stderr. A conversation in the terminal goes to stdout as a whole. Commands
 * that need no GPU never touch one. What a command opens is static: it goes with the process. */
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/param.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef BACKEND
#define BACKEND reference
#endif

const Backend *const backend = &BACKEND;

enum { MOST_CONFIG = 1 << 20, MOST_TEXT = 256 << 20, MOST_INDEX = 64 << 20, MOST_HEADER = 100000000 };

/* ---- config.json ---- */

void config_bad(Loader *load, const cJSON *object, const char *key, const char *expected) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    LocalText found = value ? json_text(value) : NULL;
    bad_file(load, load->path, "%s should be %s and is %.80s", key, expected, found ? found : "missing");
}

const cJSON *config_typed(Loader *load, const cJSON *object, const char *key, int type, const char *expected) {
    const cJSON *value = json_get(object, key);
    if (!value || value->type & type) return value;
    config_bad(load, object, key, expected);
    return NULL;
}

const char *config_text(Loader *load, const cJSON *object, const char *key) {
    return cJSON_GetStringValue(config_typed(load, object, key, cJSON_String, "a text"));
}

bool config_true(Loader *load, const char *key, bool absent) {
    const cJSON *value = config_typed(load, load->config, key, cJSON_True | cJSON_False, "true or false");
    return cJSON_GetObjectItemCaseSensitive(load->config, key) ? cJSON_IsTrue(value) : absent;
}

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

int config_optional(Loader *load, const char *key, int least, int most, int absent) {
    if (json_get(load->config, key)) return config_whole(load, key, least, most, REQUIRED);
    return cJSON_GetObjectItemCaseSensitive(load->config, key) ? 0 : absent;
}

void config_only_text(Loader *load, const cJSON *object, const char *key, const char *text) {
    LocalText expected = text_print("\"%s\"", text);
    if (config_text(load, object, key) && !json_is(object, key, text)) config_bad(load, object, key, expected);
}

void config_only(Loader *load, const cJSON *object, const char *key, double value) {
    LocalText expected = text_print("%.10g", value);
    if ((float)config_number(load, object, key, -1e9, 1e9, value) != (float)value)
        config_bad(load, object, key, expected);
}

void *keep(Checkpoint *c, size_t count, size_t bytes) {
    c->owned = reallocate(c->owned, (size_t)(c->owned_n + 1) * sizeof *c->owned);
    return c->owned[c->owned_n++] = allocate_zero(count, bytes);
}

void read_sizes(Loader *load, Model *m, Sizes absent) {
    m->n_layers = config_whole(load, "num_hidden_layers", 1, 1024, absent.layers);
    m->dim = config_whole(load, "hidden_size", 1, 1 << 17, absent.dim);
    m->vocab = config_whole(load, "vocab_size", 1, 1 << 22, absent.vocab);
    m->context = config_whole(load, "max_position_embeddings", 1, 1 << 24, absent.context);
    m->n_heads = config_whole(load, "num_attention_heads", 1, 4096, absent.heads);
    m->eps = (float)config_number(load, load->config, "rms_norm_eps", 1e-30, 0.5, absent.eps);
    m->layer = keep(load->c, (size_t)m->n_layers, sizeof *m->layer);
    /* formulas that no family here has would silently give wrong logits */
    config_only(load, load->config, "partial_rotary_factor", 1);
    if (config_true(load, "use_bidirectional_attention", false) || cJSON_IsFalse(json_get(load->config, "is_causal")))
        bad_file(load, load->path, "%s", "use_bidirectional_attention should be false, and is_causal true");
}

void read_heads(Loader *load, Model *m, int kv_heads, int size) {
    kv_heads = config_optional(load, "num_key_value_heads", 1, 4096, kv_heads);
    size = config_optional(load, "head_dim", 2, 1024, size);
    if (!size) size = config_whole(load, "head_dim", 2, 1024, m->dim / m->n_heads);
    m->n_kv_heads = kv_heads ? kv_heads : m->n_heads;
    m->head_dim = m->v_dim = m->rope_dim = size;
    m->attn_scale = (float)(1 / sqrt(size));
    if (m->n_heads % m->n_kv_heads)
        config_bad(load, load->config, "num_key_value_heads", "a divisor of num_attention_heads");
    if (size % 2) config_bad(load, load->config, "head_dim", "even (RoPE turns pairs)");
}

const cJSON *find_rope(Loader *load) {
    const cJSON *rope = config_typed(load, load->config, "rope_parameters", cJSON_Object, "an object");
    const cJSON *older = config_typed(load, load->config, "rope_scaling", cJSON_Object, "an object");
    if (rope && older && !cJSON_Compare(rope, older, true))
        config_bad(load, load->config, "rope_scaling", "as rope_parameters, or left out,");
    return rope ? rope : older;
}

Rope make_rope(Loader *load, const Model *m, double theta, double factor, const double *share, double scale) {
    float *inv_freq = keep(load->c, (size_t)m->rope_dim / 2, sizeof *inv_freq);
    for (int i = 0; i < m->rope_dim / 2; i++) {
        const double f = pow(theta, -2.0 * i / m->rope_dim), kept = share ? share[i] : 0;
        inv_freq[i] = (float)(f * kept + f / factor * (1 - kept));
        if (!isfinite(inv_freq[i])) config_bad(load, load->config, "rope_theta", "such that its angles are numbers");
    }
    return (Rope){.inv_freq = inv_freq, .scale = (float)scale};
}

double yarn_scale(double factor, double mscale) { return factor > 1 ? 0.1 * mscale * log(factor) + 1 : 1; }

/* YaRN (Peng et al., 2023, section 3.2): low frequencies are divided by the factor, high ones stay, with a blend over
 * the dimensions in between. */
static Rope yarn(Loader *load, const Model *m, const cJSON *rope, double theta, double factor, double original,
                 bool truncate) {
    const double d = m->rope_dim, all = config_number(load, rope, "mscale_all_dim", 0, 1e6, 0);
    const double mscale = config_number(load, rope, "mscale", 0, 1e6, 0);
    const double fast = config_number(load, rope, "beta_fast", 1e-6, 1e6, 32); /* rotations in the original context */
    const double slow = config_number(load, rope, "beta_slow", 1e-6, 1e6, 1);
    double low = fmax(d * log(original / (fast * 2 * M_PI)) / (2 * log(theta)), 0);
    double high = d * log(original / (slow * 2 * M_PI)) / (2 * log(theta));
    double scale = yarn_scale(factor, 1), *share = keep(load->c, (size_t)m->rope_dim / 2, sizeof *share);
    if (mscale > 0 && all > 0) scale = yarn_scale(factor, mscale) / yarn_scale(factor, all);
    scale = config_number(load, rope, "attention_factor", 1e-6, 1e6, scale);
    scale *= config_number(load, rope, "attn_factor", 1e-6, 1e6, 1); /* vLLM's; transformers ignores it */
    config_typed(load, rope, "truncate", cJSON_True | cJSON_False, "true or false");
    const cJSON *given = cJSON_GetObjectItemCaseSensitive(rope, "truncate"); /* null is false */
    if (given ? cJSON_IsTrue(given) : truncate) low = floor(low), high = ceil(high);
    high = fmin(high, d - 1);
    if (low == high) high += 0.001;
    for (int i = 0; i < m->rope_dim / 2; i++) share[i] = 1 - fmin(fmax((i - low) / (high - low), 0), 1);
    return make_rope(load, m, theta, factor, share, scale);
}

Rope read_rope(Loader *load, Model *m, const cJSON *rope, double theta, const RopeScaling *own) {
    const char *older = config_text(load, rope, "type"), *type = config_text(load, rope, "rope_type");
    const char *before = "original_max_position_embeddings"; /* one beside the object wins over one in it */
    const cJSON *holds = json_get(load->config, before) ? load->config : rope;
    if (!type) type = older ? older : "default";
    const bool is_own = own && !strcmp(type, own->type), is_yarn = !strcmp(type, "yarn");
    config_only(load, rope, "partial_rotary_factor", 1);
    if (json_get(rope, "full_attention") || json_get(rope, "sliding_attention"))
        config_bad(load, load->config, "rope_parameters", "one for all layers");
    theta = config_number(load, rope, "rope_theta", 1e-6, 1e12, theta);
    if (!strcmp(type, "default")) return make_rope(load, m, theta, 1, NULL, 1);
    if (!is_own && !is_yarn && strcmp(type, "linear"))
        bad_file(load, load->path, "rope type '%.40s' is none of default, linear, yarn%s%s", type, own ? ", " : "",
                 own ? own->type : "");
    const double original = is_own || is_yarn ? config_number(load, holds, before, 1, 1e9, m->context) : 0;
    const bool implied = is_yarn && cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(rope, "factor"));
    const double factor = config_number(load, rope, "factor", 1e-6, 1e6, implied ? m->context / original : REQUIRED);
    /* rope_scaling is added to a file whose max_position_embeddings stays as it is */
    if (is_yarn && json_get(holds, before)) m->context = (int)fmin(fmax(m->context, original * factor), 1 << 24);
    return is_own    ? own->read(load, m, rope, theta, factor, original)
           : is_yarn ? yarn(load, m, rope, theta, factor, original, true)
                     : make_rope(load, m, theta, factor, NULL, 1);
}

void read_layer_type(Loader *load, Model *m, int i, const char *known, bool sliding, int window) {
    const cJSON *list = config_typed(load, load->config, "layer_types", cJSON_Array, "an array");
    const char *type = cJSON_GetStringValue(cJSON_GetArrayItem(list, i));
    if (list && cJSON_GetArraySize(list) != m->n_layers)
        bad_file(load, load->path, "layer_types should be an array of %d, one a layer", m->n_layers);
    else if (list && !(type && text_listed(known, type)))
        bad_file(load, load->path, "layer_types[%d] is '%.40s', which is not implemented for %s", i,
                 type ? type : "(no text)", load->family->model_type);
    if (type) sliding = !strcmp(type, "sliding_attention");
    m->layer[i].window = sliding ? window : 0;
    m->layer[i].rope = m->rope + sliding;
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
    const Family *f = load->family = find_family(load, config_text(load, load->file, "model_type"));
    if (failed(load)) return;
    load->c->family = f->model_type;
    load->config = load->file;
    m->rope = load->rope = keep(load->c, 2, sizeof *load->rope);
    m->embed_scale = 1;
    m->n_experts = m->top_k = 1;
    m->route = (Route){.scale = 1, .groups = 1, .top_groups = 1, .group_best = 1};
    f->read(load, m);
    for (int i = 0; packings[i]; i++) packings[i]->open(load, dir);
    const cJSON *quantization = config_typed(load, load->file, "quantization_config", cJSON_Object, "an object");
    if (!packings[0] && quantization && !json_is(quantization, "quant_method", "mxfp4"))
        config_bad(load, quantization, "quant_method", "\"mxfp4\" in this build");
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

static bool map_file(TensorFile *f, Error *e) {
    struct stat st;
    if (f->fd < 0) f->fd = open(f->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (f->fd < 0 || fstat(f->fd, &st)) {
        LocalText foreign = text_print("%.*s/pytorch_model.bin", (int)(strrchr(f->name, '/') - f->name), f->name);
        return fail(e, BAD_MODEL,
                    errno != ENOENT        ? "%s: %m"
                    : file_exists(foreign) ? "%s: missing, and infer does not read pytorch_model.bin: get safetensors"
                                           : "%s: missing: this is no model, or its download is incomplete; infer "
                                             "download goes on",
                    f->name);
    }
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

/* Reads file i of a model. In models of texts and pictures the names of the text's tensors have "language_model.",
 * first or behind "model.": that is left out, so that all models name these tensors alike. */
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
        char *name = t->tensor[t->n++].name, *inner = name + begins(name, "model.");
        const char *rest = inner + begins(inner, "language_model.");
        memmove(inner, rest, strlen(rest) + 1);
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
    static const char index[] = "model.safetensors.index.json";
    LocalText whole = path_join(path, "model.safetensors");
    *e = (Error){0};
    if (file_exists(path)) return tensors_add_file(t, text_print("%s", path)), true;
    LocalJson json = access(whole, F_OK) ? t->container->json(t, path, index, e) : NULL;
    if (!json && !e->code) return tensors_add_file(t, text_print("%s", whole)), true;
    const cJSON *map = json_get(json, "weight_map"), *entry = cJSON_IsObject(map) ? map->child : NULL;
    if (!entry) return json && fail(e, BAD_MODEL, "%s/%s: has no weight_map with tensors", path, index);
    for (; entry; entry = entry->next) {
        const char *name = cJSON_GetStringValue(entry);
        const bool is_name = name && *name && *name != '.' && !strchr(name, '/') && !strchr(name, '\\');
        if (is_name) tensors_add_file(t, path_join(path, name));
        if (!is_name || t->files > MOST_FILES)
            return fail(e, BAD_MODEL, "%s/%s: tensor '%.100s' is in '%.100s': no file name, or more files than %d",
                        path, index, entry->string, name ? name : "(no text)", MOST_FILES);
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
    const bool text_file = begins(name, "tokenizer") || begins(name, "chat");
    const size_t most = text_file ? MOST_TEXT : strstr(name, ".index.") ? MOST_INDEX : MOST_CONFIG;
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

bool tensors_open(Tensors *t, const Container *container, const char *path, Error *e) {
    *t = (Tensors){.container = container ? container : container_at(path)};
    snprintf(shrunk, sizeof shrunk, "infer: %.500s: a model file was truncated while it was in use\n", path);
    signal(SIGBUS, on_bus_error);
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

Tensor *bind_tensor(Loader *load, const char *name, const char *suffix, Type type, const Linear *w, int dims,
                    const int64_t *shape) {
    Tensor *t = find_tensor(load, name, suffix);
    bool fits = t && (t->dims == dims || (t->dims == dims - 1 && shape[t->dims] == 1)) &&
                !memcmp(t->shape, shape, (size_t)t->dims * sizeof *shape);
    LocalText expected = fits ? NULL : shape_text(dims, shape);
    if (t) t->bound = true;
    bool made = !t && load->container->make;
    if (!t && !made)
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
    if (made && !failed(load)) load->container->make(load, t, suffix, type, w);
    return t;
}

/* The n elements of a tensor as floats. */
static const float *floats(Loader *load, const Tensor *t, size_t n) {
    const Type type = type_of(t);
    if (!tensor_is(load, t, is_float(type), "BF16, F16 or F32")) return NULL;
    float *out = keep(load->c, n, sizeof *out);
    for (size_t i = 0; i < n && t->data; i++) out[i] = types[type].weight(t->data + i * (size_t)types[type].bytes, 0).q;
    return out;
}

const float *bind_floats(Loader *load, const char *name, const char *suffix, int n) {
    return floats(load, bind_tensor(load, name, suffix, NO_TYPE, NULL, 1, (int64_t[]){n}), (size_t)n);
}

void belongs(Tensor *t, Type type, int64_t values) {
    t->bound = true;
    t->encoding = types[type].name;
    t->values = values;
}

View tensor_view(const Loader *load, const Tensor *t, int64_t lines) {
    const size_t bytes = t->size / (size_t)lines;
    const int fd = t->data ? load->c->tensors.file[t->file].fd : -1;
    return (View){t->data, fd, (int)lines, t->offset, bytes, bytes, 0};
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
    Tensor *found = bind_tensor(load, name, ".weight", w->type, w, 2,
                                (int64_t[]){w->rows, (int64_t)blocks * block_entries(w->type)});
    belongs(found, w->type, (int64_t)w->rows * w->cols);
    one->data = tensor_view(load, found, w->rows);
}

Linear bind_linear(Loader *load, const char *name, int rows, int cols, int bias) {
    Stored *one = keep(load->c, 1, sizeof *one);
    Linear w = {.type = BF16, .rows = rows, .cols = cols, .n = 1, .each = one};
    bool packed = false;
    if (load->container->type) w.type = load->container->type(load, name);
    one->factor = 1;
    for (int i = 0; packings[i] && !packed; i++) packed = packings[i]->bind(load, name, &w, one);
    if (!packed) bind_plain(load, name, &w, one);
    if (!bias) bias = (packed || load->container->extra_biases) && find_tensor(load, name, ".bias");
    if (bias > 0) one->bias = bind_floats(load, name, ".bias", rows);
    return w;
}

const float *bind_biases(Loader *load, const char *name, int pitch, int first, int step, int rows) {
    const int n = load->c->model.n_experts;
    const Tensor *t = bind_tensor(load, name, "_bias", NO_TYPE, NULL, 2, (int64_t[]){n, pitch});
    const float *all = failed(load) ? NULL : floats(load, t, (size_t)n * (size_t)pitch);
    float *bias = all ? keep(load->c, (size_t)n * (size_t)rows, sizeof *bias) : NULL;
    for (int i = 0; bias && i < n * rows; i++) bias[i] = all[i / rows * pitch + first + i % rows * step];
    return bias;
}

/* A matrix (rows, cols) of each expert, in the tensors NAME_blocks, _scales and _bias: rows first, first + step, ... of
 * the `pitch` rows that they have for each. */
static Linear bind_mxfp4(Loader *load, const char *name, int pitch, int first, int step, int rows, int cols) {
    const int n = load->c->model.n_experts, blocks = divided(cols, 32), all = n * pitch;
    Stored *each = keep(load->c, (size_t)n, sizeof *each);
    if (cols % 32) bad_file(load, load->path, "%s has rows of %d, not whole blocks of 32 as MXFP4 wants", name, cols);
    const Linear w = {MXFP4, rows, cols, n, .scale = {E8M0, 1, 32, false}, .each = each};
    Tensor *codes = bind_tensor(load, name, "_blocks", MXFP4, &w, 4, (int64_t[]){n, pitch, blocks, 16});
    Tensor *scales = bind_tensor(load, name, "_scales", E8M0, &w, 3, (int64_t[]){n, pitch, blocks});
    const View code_rows = tensor_view(load, codes, all), scale_rows = tensor_view(load, scales, all);
    const float *bias = bind_biases(load, name, pitch, first, step, rows);
    belongs(codes, MXFP4, (int64_t)all * cols);
    belongs(scales, MXFP4, 0);
    for (int i = 0; bias && i < n; i++) {
        const size_t begin = (size_t)(i * pitch + first);
        each[i] = (Stored){lines_of(code_rows, begin, (size_t)step, rows),
                           lines_of(scale_rows, begin, (size_t)step, rows), .factor = 1, .bias = bias + i * rows};
    }
    return w;
}

/* Even rows of gate_up_proj are gate's, odd ones up's. There always is a bias. */
static void bind_in_turn(Loader *load, Layer *l, const char *module, int width, bool bias) {
    const int dim = load->c->model.dim;
    LocalText both = text_print("%s.gate_up_proj", module);
    LocalText down = text_print("%s.down_proj", module);
    l->gate = bind_mxfp4(load, both, 2 * width, 0, 2, width, dim);
    l->up = bind_mxfp4(load, both, 2 * width, 1, 2, width, dim);
    l->down = bind_mxfp4(load, down, dim, 0, 1, dim, width);
}
const ExpertLayout experts_in_turn = {".gate_up_proj_blocks", bind_in_turn};

void bind_experts(Loader *load, Layer *l, const char *module, const ExpertLayout *usual, int width, bool bias) {
    for (int i = 0; layouts[i]; i++)
        if (find_tensor(load, module, layouts[i]->mark)) usual = layouts[i];
    usual->bind(load, l, module, width, bias);
}

/* Does generating text not need this tensor? */
static bool left_out(const Loader *load, const Tensor *t) {
    bool out = load->tied && strstr(t->name, "lm_head.weight");
    for (int i = 0; packings[i]; i++) out = out || packings[i]->left_out(t);
    return out || (load->family->left_out && load->family->left_out(load, t->name));
}

static bool same_tensor(const Tensor *a, const Tensor *b) {
    return !strcmp(a->dtype, b->dtype) && a->dims == b->dims && !memcmp(a->shape, b->shape, sizeof a->shape) &&
           !memcmp(a->data, b->data, a->size); /* the same dtype and shape, so the same size */
}

void bind_ends(Loader *load, Model *m, bool tied) {
    const Tensor *table = find_tensor(load, "model.embed_tokens", ".weight"),
                 *head = find_tensor(load, "lm_head", ".weight");
    /* One matrix, under either name or both. Two that differ are not tied, whatever config.json says. */
    load->tied = config_true(load, "tie_word_embeddings", tied) && (!head || !table || same_tensor(head, table));
    bool embed = !load->tied || table;
    if (embed) m->embed = m->head = bind_linear(load, "model.embed_tokens", m->vocab, m->dim, NO_BIAS);
    if (!embed || !load->tied) m->head = bind_linear(load, "lm_head", m->vocab, m->dim, false);
    if (!embed) m->embed = m->head;
    m->norm = bind_floats(load, "model.norm", ".weight", m->dim);
}

bool begin_layer(Loader *load, const Layer *l) {
    const Model *m = &load->c->model;
    const int i = (int)(l - m->layer);
    snprintf(load->prefix, sizeof load->prefix, "model.layers.%d.", i);
    return i < m->n_layers && !failed(load);
}

static void bind_all(Loader *load, Model *m) {
    const Tensors *all = &load->c->tensors;
    load->family->bind(load, m);
    for (const Layer *l = m->layer; l < m->layer + m->n_layers; l++)
        m->ffn_dim = MAX(m->ffn_dim, MAX(l->gate.rows, l->shared_gate.rows));
    for (const Tensor *t = all->tensor; t < all->tensor + all->n; t++) /* an unbound one is of an unknown formula */
        if (!t->bound && !left_out(load, t))
            bad_file(load, file_of(load, t), "tensor '%s' has no place in a model of %d layers of the family %s",
                     t->name, m->n_layers, load->family->model_type);
}

/* ---- gpt-oss ---- */

static void read_gpt_oss(Loader *load, Model *m) {
    const cJSON *config = load->config, *rope = find_rope(load);
    read_sizes(load, m, (Sizes){0});
    read_heads(load, m, 8, 64);
    double theta = config_number(load, config, "rope_theta", 1e-6, 1e12, 150000);
    /* without an object: YaRN from 4,096 positions to 131,072 */
    if (!rope) m->context = MAX(m->context, 32 * 4096);
    load->rope[0] = rope ? read_rope(load, m, rope, theta, NULL) : yarn(load, m, NULL, theta, 32, 4096, false);
    load->rope[1] = load->rope[0];
    int window = config_optional(load, "sliding_window", 1, INT32_MAX, 128);
    for (int i = 0; i < m->n_layers && !failed(load); i++) /* even layers see the window, odd ones all */
        read_layer_type(load, m, i, "full_attention sliding_attention", i % 2 == 0, window);
    m->n_experts = config_whole(load, "num_local_experts", 1, 1024, REQUIRED);
    m->top_k = config_whole(load, "num_experts_per_tok", 1, m->n_experts, REQUIRED);
    m->route.normalise = true; /* the softmax over the chosen logits */
    m->act = SWIGLU_CLAMPED;
    m->act_limit = (float)config_number(load, config, "swiglu_limit", 1e-6, 1e6, 7);
    config_only(load, config, "swiglu_alpha", 1.702);
    config_only_text(load, config, "hidden_act", "silu");
    config_true(load, "mlp_bias", true); /* whatever it says, experts have biases */
}

static void bind_gpt_oss(Loader *load, Model *m) {
    const int q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    const int width = config_whole(load, "intermediate_size", 1, 1 << 17, REQUIRED);
    const bool bias = config_true(load, "attention_bias", true);
    bind_ends(load, m, false);
    for (Layer *l = m->layer; begin_layer(load, l); l++) {
        l->attn_norm = bind_floats(load, "input_layernorm", ".weight", m->dim);
        l->q = bind_linear(load, "self_attn.q_proj", q, m->dim, bias);
        l->k = bind_linear(load, "self_attn.k_proj", kv, m->dim, bias);
        l->v = bind_linear(load, "self_attn.v_proj", kv, m->dim, bias);
        l->sinks = bind_floats(load, "self_attn.sinks", "", m->n_heads);
        l->o = bind_linear(load, "self_attn.o_proj", m->dim, q, bias);
        l->ffn_norm = bind_floats(load, "post_attention_layernorm", ".weight", m->dim);
        l->router = bind_linear(load, "mlp.router", m->n_experts, m->dim, true);
        bind_experts(load, l, "mlp.experts", &experts_in_turn, width, true);
    }
}

const Family gpt_oss[] = {{"gpt_oss", read_gpt_oss, bind_gpt_oss, NULL}, {0}};

/* ---- checkpoints ---- */

/* Reads the model's config.json. */
static bool open_config(Loader *load, const char *path) {
    Tensors *t = &load->c->tensors;
    if (!load->container) load->container = container_at(path);
    load->path = load->container->in_files ? text_print("%s", path) : path_join(path, "config.json");
    if (load->container->in_files && !tensors_open(t, NULL, path, load->e)) return false;
    load->file = model_json(load, path, "config.json");
    if (load->file)
        read_config(load, &load->c->model, path);
    else if (!failed(load))
        fail(load->e, BAD_MODEL, "%s: no config.json is here: is it a model directory, downloaded whole?", path);
    return !failed(load);
}

static void close_config(Loader *load) {
    cJSON_Delete(load->file);
    free(load->path);
}

bool checkpoint_open_as(const Container *container, Checkpoint *c, const char *dir, Error *e) {
    LOCAL(close_config) Loader load = {.c = c, .container = container, .e = e};
    *c = (Checkpoint){0};
    *e = (Error){0};
    if (open_config(&load, dir) && !load.container->in_files && !load.container->make)
        tensors_open(&c->tensors, load.container, dir, e);
    if (!failed(&load)) bind_all(&load, &c->model);
    if (e->code) checkpoint_close(c);
    return !e->code;
}

bool checkpoint_open(Checkpoint *c, const char *dir, Error *e) { return checkpoint_open_as(NULL, c, dir, e); }

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

bool checkpoint_config(Checkpoint *c, cJSON **config, const char *path, Error *e) {
    Loader load = {.c = c, .e = e};
    *c = (Checkpoint){0};
    *e = (Error){0};
    const bool known = open_config(&load, path) || (load.container->in_files && !model_entry(path).complete);
    free(load.path);
    *config = load.file;
    return known;
}

bool model_runs(const char *path, Error *e) {
    LOCAL(checkpoint_close) Checkpoint c = {0};
    LocalJson config = NULL;
    return checkpoint_config(&c, &config, path, e);
}

/* ---- options: each command has tables of its own ---- */

Settings settings;
static struct { /* of play */
    const char *schema, *prompt, *file, *system, *effort, *date;
    Texts stop;
    int context;
    bool hide_thinking, raw, json;
} given;
static struct { /* of every command that loads a model */
    int gpu;
    const char *gpus;
    bool plain;
} load;

const Option settings_options[] = {
    {0, "temperature", "T", REAL, &settings.sampling.temperature, 0, 100, "1",
     "0 to 100: randomness of the draw; below 0.01 it always takes the likeliest token"},
    {0, "top-k", "K", WHOLE, &settings.sampling.top_k, 0, 1e9, "0", "draw among the K likeliest; 0: all"},
    {0, "top-p", "P", REAL, &settings.sampling.top_p, 1e-30, 1, "1",
     "above 0, at most 1: draw among the likeliest whose probabilities add up to P"},
    {0, "min-p", "P", REAL, &settings.sampling.min_p, 0, 1, "0",
     "0 to 1: leave out tokens less likely than P times the likeliest"},
    {0, "repetition-penalty", "R", REAL, &settings.sampling.penalty, 1e-30, 100, "1",
     "above 0, at most 100: divide the scores of tokens already in the text by R; 1: off"},
    {0, "frequency-penalty", "F", REAL, &settings.sampling.frequency, -2, 2, "0",
     "-2 to 2: subtract F from a token's score for each time that the answer has it"},
    {0, "presence-penalty", "F", REAL, &settings.sampling.presence, -2, 2, "0",
     "-2 to 2: subtract F once from the scores of tokens that the answer has"},
    {0, "seed", "N", SEED, &settings.sampling.seed, 0, 9007199254740991,
     .help = "the same seed gives the same answer (random)"},
    {0, "max-tokens", "N", WHOLE, &settings.max_tokens, 0, 1e9, "0",
     "end an answer after N tokens; 0: only when the context is full"},
    {0}};

static const Option play_options[] = {
    {'p', "prompt", "TEXT", TEXT, &given.prompt, .help = "the prompt; a text on stdin is appended"},
    {'f', "file", "FILE", TEXT, &given.file, .help = "a file with the prompt; -: stdin"},
    {'s', "system", "TEXT", TEXT, &given.system, .help = "instructions for the model"},
    {'e', "effort", "LEVEL", TEXT, &given.effort,
     .help = "how long it thinks: low, medium or high; none, if the model can skip it"},
    {0, "stop", "TEXT", TEXTS, &given.stop, .most = 16, .help = "end an answer before TEXT; can be repeated"},
    {0, "schema", "FILE", TEXT, &given.schema, .help = "a JSON schema that the answer satisfies"},
    {0, "hide-thinking", NULL, SWITCH, &given.hide_thinking, .help = "do not show the reasoning"},
    {0, "raw", NULL, SWITCH, &given.raw, .help = "continue the text without a chat format"},
    {0, "date", "D", TEXT, &given.date, .help = "the date in the prompt, like 2026-11-30 (today); none: no date"},
    {0, "quiet", NULL, SWITCH, &settings.quiet, .help = "no statistics, and nothing about loading"},
    {0, "json", NULL, SWITCH, &given.json, .help = "one answer as a JSON object"},
    {0, "ctx", "N", WHOLE, &given.context, 1, 1 << 24,
     .help = "tokens of context (as many as the model and the memory allow)"},
    {0}};

const Option load_options[] = {
    {0, "gpu", "N", WHOLE, &load.gpu, 0, MAX_GPUS - 1, "0", "which GPU, or the first of several"},
    {0, "gpus", "N|LIST", TEXT, &load.gpus, .help = "number of GPUs, or a list like 0,3 (as many as the model needs)"},
    {0, "plain", NULL, SWITCH, &load.plain, .help = "use the plain kernels only, even where fast ones exist"},
    {0}};

static bool read_number(const Option *option, const char *text, double *x, Error *e) {
    const bool real = option->kind == REAL;
    char *end;
    *x = strtod(text, &end);
    const bool inside = *x >= option->least && *x <= option->most;
    if (end > text && !*end && inside && (real || *x == floor(*x))) return true;
    LocalText range = real ? copy_text(option->help, strcspn(option->help, ":"))
                           : text_print("a whole number from %.0f to %.0f", option->least, option->most);
    return fail(e, USAGE, "--%s must be %s, not '%.40s'", option->name, range, text);
}

bool option_set(const Option *option, const char *text, Error *e) {
    Texts *texts = option->to;
    double x = 0;
    if (option->kind == SWITCH) return *(bool *)option->to = true;
    if (!check_text("the value", text, strlen(text), e)) return fail(e, USAGE, "--%s: %s", option->name, e->text);
    if (option->kind == TEXT) return *(const char **)option->to = text, true;
    if (option->kind == TEXTS) {
        if (!*text || texts->n == (int)option->most)
            return fail(e, USAGE, "--%s needs a text, at most %.0f times", option->name, option->most);
        return texts->text[texts->n++] = text, true;
    }
    if (!read_number(option, text, &x, e)) return false;
    if (option->kind == WHOLE) *(int *)option->to = (int)x;
    if (option->kind == SEED) *(uint64_t *)option->to = (uint64_t)x;
    if (option->kind == REAL) *(float *)option->to = x < 1e-30 ? 0 : (float)x;
    return true;
}

const Option *option_find(const Option *table, const char *name, size_t n) {
    for (const Option *o = table; o->name; o++)
        if (n == 1 ? o->letter == *name : strlen(o->name) == n && !strncmp(o->name, name, n)) return o;
    return NULL;
}

/* Reads the option at argv[*i]: -x VALUE, -xVALUE, --name VALUE, --name=VALUE or a switch. Messages never show the
 * value of an unknown option, which may be a secret. */
static bool parse_option(const Command *c, int argc, char **argv, int *i, Error *e) {
    bool is_long = argv[*i][1] == '-';
    const char *name = argv[*i] + 1 + is_long, *value = name + (is_long ? strcspn(name, "=") : 1);
    size_t n = (size_t)(value - name);
    const Option *option = NULL;
    for (int t = 0; (n > 1) == is_long && !option && c->options[t]; t++) option = option_find(c->options[t], name, n);
    if (!option) {
        LocalText word = copy_text(name, n);
        return fail(e, USAGE, "there is no option %.*s; %ssee infer %s --help", (int)n + 1 + is_long, argv[*i],
                    hints ? hints->meant(c, NULL, word) : "", c->name);
    }
    if (option->kind == SWITCH && *value) return fail(e, USAGE, "--%s takes no value", option->name);
    if (option->kind == SWITCH) return option_set(option, NULL, e);
    if (*value) return option_set(option, value + is_long, e); /* behind the '=' */
    if (++*i == argc) return fail(e, USAGE, "--%s needs a value; see infer %s --help", option->name, c->name);
    return option_set(option, argv[*i], e);
}

/* Reads all arguments behind the command's name. *model: NULL if none is given. */
static bool parse_arguments(const Command *c, int argc, char **argv, const char **model, Error *e) {
    bool options_end = false, optional = *c->argument == '[';
    const char *word = c->argument + optional; /* without brackets */
    const Option *prompt = *c->options ? option_find(*c->options, "prompt", strlen("prompt")) : NULL;
    for (int t = 0; c->options[t]; t++)
        for (const Option *option = c->options[t]; option->name; option++)
            if (option->initial) option_set(option, option->initial, e);
    for (int i = 0; i < argc; i++) {
        if (!options_end && argv[i][0] == '-' && argv[i][1]) {
            options_end = !strcmp(argv[i], "--");
            if (!options_end && !parse_option(c, argc, argv, &i, e)) return false;
        } else if (*model && prompt && !*(const char **)prompt->to) {
            if (!option_set(prompt, argv[i], e)) return false;
        } else if (*model || !*word) {
            const char *shown = strncmp(argv[i], "hf_", 3) ? argv[i] : "hf_..."; /* a token is never shown */
            const char *why = prompt                        ? ", or a text without quotes"
                              : strstr(c->summary, "stdin") ? ": it reads stdin"
                                                            : "";
            return fail(e, USAGE, "'%.60s' is one argument too many%s; see infer %s --help", shown, why, c->name);
        } else {
            *model = hints ? hints->repository(argv[i]) : argv[i];
        }
    }
    return !*word || optional || *model ||
           fail(e, USAGE, "%.*s is missing; see infer %s --help", (int)strcspn(word, " "), word, c->name);
}

/* ---- the terminal ---- */

int columns(FILE *f) {
    struct winsize size;
    return !ioctl(fileno(f), TIOCGWINSZ, &size) && size.ws_col ? size.ws_col : 80;
}

static const char *output_file; /* what stdout goes to; NULL: it is as it was */

bool output_open(const char *path, Error *e) {
    output_file = path;
    return freopen(path, "wb", stdout) || fail(e, FAILED, "%s: %m; choose another name", path);
}

bool put_escape(FILE *f, const char *escape) {
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    bool colour = escape[strlen(escape) - 1] == 'm';
    bool wanted = isatty(fileno(f)) && term && strcmp(term, "dumb") && !(colour && no_color && *no_color);
    if (wanted) fputs(escape, f);
    return wanted;
}

Wrap wrap_on(FILE *f, const char *style) {
    return (Wrap){.f = f, .style = style, .width = isatty(fileno(f)) ? columns(f) : 0};
}

void wrap_text(Wrap *w, const char *text, size_t n) {
    LocalBytes shown = {0};
    if (n) w->last = text[n - 1];
    if (w->style) put_escape(w->f, w->style);
    isatty(fileno(w->f)) ? bytes_shown(&shown, text, n, true) : bytes_add(&shown, text, n);
    if (terminal && w->width)
        terminal->wrap(w, shown.data ? shown.data : "", shown.n);
    else
        fwrite(shown.data ? shown.data : "", 1, shown.n, w->f);
    if (w->style) put_escape(w->f, NORMAL);
}

void wrap_end(Wrap *w) {
    if (!w->f) return;
    if (w->last && w->last != '\n') wrap_text(w, "\n", 1);
    fflush(w->f);
    bytes_free(&w->word);
    *w = (Wrap){0};
}

void put_text(FILE *f, const char *style, const char *label, const char *text) {
    Wrap w = wrap_on(f, style);
    wrap_text(&w, label, strlen(label));
    w.indent = w.column + w.spaces;
    wrap_text(&w, text, strlen(text));
    wrap_end(&w);
}

void die(const Error *e) {
    fflush(stdout);
    put_text(stderr, NULL, "infer: ", e->text);
    exit(e->code);
}

void print_row(FILE *f, const char *name, int column, const char *text) {
    if (terminal) return terminal->row(f, name, column, text);
    fprintf(f, "%-*s", column, name);
    put_text(f, NULL, "", text);
}

static void print_help(const Command *c) {
    printf("infer %s%s%s [options]\n", c->name, *c->argument ? " " : "", c->argument);
    print_row(stdout, "", 0, c->summary);
    for (int t = 0; c->options[t]; t++)
        for (const Option *o = c->options[t]; o->name; o++) {
            const char letter[] = {'-', o->letter, ',', 0}, *value = o->value ? o->value : "";
            LocalText name = text_print("  %3s --%s %s", o->letter ? letter : "", o->name, value);
            LocalText text = text_print(o->initial ? "%s (%s)" : "%s", o->help, o->initial);
            print_row(stdout, name, 29, text);
        }
    print_row(stdout, "", 0, "The manual says more: man infer.");
}

/* ---- opening a model ---- */

/* Takes the only model that is here. If there are several, a room may ask. */
static bool choose_model(Session *s, Error *e) {
    LOCAL(models_free) Models here = models_list();
    LocalBytes names = {0};
    int choice = here.n == 1;
    if (!here.n)
        return fail(e, BAD_MODEL, "%s: infer download ORG/NAME fetches one",
                    here.unread ? here.unread : "no model in ./models or the hub's cache");
    if (here.n > 1 && choose) choice = choose(&here);
    for (int i = 0; i < here.n && !choose; i++)
        bytes_print(&names, names.n ? ", %s" : "; here are %s", here.entry[i].name);
    if (!choice)
        return fail(e, USAGE, "which of the %d models? infer COMMAND MODEL%s", here.n, names.n ? names.data : "");
    s->dir = text_print("%s", here.entry[choice - 1].path);
    s->name = text_print("%s", here.entry[choice - 1].name);
    return true;
}

/* The path of a model. On a terminal a missing ORG/NAME is offered for download. */
static char *get_model(const char *argument, Error *e) {
    char *path = model_find(argument, e);
    bool here = path && (!strcmp(path, argument) || model_entry(path).complete);
    LocalText question = text_print("%s is not here%s. Download it?", argument, path ? " whole" : "");
    if (here || !terminal || !strchr(argument, '/') || !hub_repository(argument)) return path;
    if (terminal->ask(question) != 'y') return path;
    free(path);
    return text_print("%s", hub_fetch(argument));
}

/* Opens config and weights if they are needed, and always a container's files that hold the tokenizer. */
static bool open_checkpoint(Session *s, int need, Error *e) {
    Checkpoint *c = &s->checkpoint;
    if (need & NEED_CHECKPOINT) return checkpoint_open(c, s->dir, e);
    return !need || !container_at(s->dir)->in_files || tensors_open(&c->tensors, NULL, s->dir, e);
}

static const char *given_template;
const Option chat_options[] = {{0, "chat-template", "FILE", TEXT, &given_template,
                                .help = "a chat template, in Jinja, in place of the model's own"},
                               {0}};

/* A JsonFile: what the model's container has, or the template that was given. */
static cJSON *session_json(const void *session, const char *name, Error *e) {
    const Session *s = session;
    LocalBytes text = {0};
    *e = (Error){0};
    if (given_template && !strcmp(name, "chat_template.jinja")) {
        const bool ok = file_read(given_template, MOST_TEXT, &text, e);
        return ok ? json_from_text(text.data, text.n) : (e->code = USAGE, NULL);
    }
    if (given_template && begins(name, "additional_chat_templates/")) return NULL;
    return container_at(s->dir)->json(&s->checkpoint.tensors, s->dir, name, e);
}

static bool open_tokenizer(Session *s, bool may_lack, Error *e) {
    LocalText path = text_print(container_at(s->dir)->in_files ? "%s" : "%s/tokenizer.json", s->dir);
    const int vocab = s->checkpoint.model.vocab;
    if (may_lack && !file_exists(path)) return true;
    s->tokenizer = tokenizer_open(path, session_json, s, e);
    if (!s->tokenizer || !vocab || tokenizer_fit(s->tokenizer, vocab)) return s->tokenizer;
    return fail(e, BAD_MODEL, "%s: it has ids up to %d, the config a vocabulary of %d: they belong to different models",
                path, tokenizer_size(s->tokenizer) - 1, vocab);
}

bool session_open(Session *s, const char *model, int need, Error *e) {
    bool tokenizer = need & (NEED_TOKENIZER | NEED_CHAT);
    if (model && !(s->dir = get_model(model, e))) return false;
    if (model) s->name = text_print("%s", model);
    if (!model && !choose_model(s, e)) return false;
    if (!open_checkpoint(s, need, e)) return false;
    if ((tokenizer || need & USE_TOKENIZER) && !open_tokenizer(s, !tokenizer, e)) return false;
    const char *template = s->tokenizer ? tokenizer_template(s->tokenizer, false) : NULL;
    s->has_chat = template && chat_open(&s->chat, s->tokenizer, template, given_template, &s->no_chat);
    if (!s->has_chat) fail(&s->no_chat, BAD_MODEL, "%s has no chat format: %s", s->name, s->no_chat.text);
    if ((need & NEED_CHAT || given_template) && !s->has_chat) return *e = s->no_chat, false;
    return true;
}

bool session_load(Session *s, Limits limits, int context, Error *e) {
    bool verbose = isatty(STDERR_FILENO) && !s->quiet;
    limits.gpu = load.gpu, limits.gpus = load.gpus, limits.plain = load.plain, limits.tap = s->tap,
    limits.tap_data = s->tap_data;
    limits.where = s->where;
    limits.progress = verbose && terminal ? terminal->loading : NULL;
    if (!limits.max_tokens) limits.max_tokens = backend->prompt_step;
    if (!limits.max_seqs) limits.max_seqs = 1;
    const double since = seconds();
    if (!engine_open(&s->engine, backend, &s->checkpoint.model, limits, context, e)) return false;
    s->scheduler = scheduler_open(&s->engine);
    s->seconds = seconds() - since;
    LocalText line = text_print("%s · %s · context %s%s%s", s->name, s->checkpoint.family,
                                COUNT((uint64_t)s->engine.context), *s->where ? " · " : "", s->where);
    if (verbose) put_text(stderr, NULL, "✓ ", line);
    return true;
}

/* ---- an answer ---- */

typedef struct {
    Play *p;
    Stream stream; /* of the prompt and the tokens behind it */
    Reader reader; /* without a chat format only its decoder is used */
    Bytes text, thinking;
    size_t passed; /* bytes of the text that were shown; they contain no stop text */
    Wrap out;      /* the message that is shown now, if any */
    Part part;     /* which part of the model's message that is */
    size_t tokens, thought;
    double since, first, total; /* when it began; seconds until the first token, until the last */
    const char *reason;         /* why it ended */
} Answer;

volatile sig_atomic_t interrupted;

static void on_interrupt(int number) { interrupted = number; }

static void catch_interrupt(int flags) {
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt, .sa_flags = flags}, NULL);
}

static void show(Answer *a, Part part, const char *text, size_t n) {
    static const char *const label[] = {"thinking: ", "Assistant: ", "Assistant: ", "tool call: "};
    const Play *p = a->p;
    const Reader *r = &a->reader;
    const char *to = part == CALL ? r->now.recipient : NULL;
    if (part == CALL && !to) to = r->message[r->messages - 1].recipient; /* it came as a whole */
    FILE *f = p->loop || part == ANSWER ? stdout : stderr;
    if (!n || given.json || (part == REASONING && (given.hide_thinking || !isatty(fileno(f))))) return;
    if (!a->out.f || part != a->part) {
        if (!a->out.f && terminal) terminal->reading(NULL);
        wrap_end(&a->out);
        a->part = part, a->out = wrap_on(f, part == REASONING || part == CALL ? FAINT : NULL);
        if (p->loop || f == stderr) wrap_text(&a->out, label[part], strlen(label[part]));
        if (to) wrap_text(&a->out, to, strlen(to)), wrap_text(&a->out, " ", 1);
    }
    wrap_text(&a->out, text, n);
    fflush(f);
}

/* Adds text to the answer and shows what surely contains no stop text. An end that may begin one has to wait. */
static void add_text(Answer *a, Part part, const Bytes *text, bool last) {
    const Texts *stop = &given.stop;
    const size_t from = a->passed;
    if (part == REASONING) bytes_add(&a->thinking, text->data, text->n);
    if (part != ANSWER) show(a, part, text->data, text->n);
    if (part != ANSWER) return;
    bytes_add(&a->text, text->data, text->n);
    if (text_stops(&a->text, &a->passed, stop->text, stop->n, last)) a->reason = "stop text";
    show(a, ANSWER, a->text.data + from, a->passed - from);
}

/* Why an answer ends with this token, or NULL. `full`: the context has no room for another. */
static const char *end_reason(const Answer *a, Read read, bool full) {
    if (read.stop) return read.closed && read.part == CALL ? "tool call" : "end";
    if (interrupted) return "interrupted";
    if (settings.max_tokens && a->tokens >= (size_t)settings.max_tokens) return "token limit";
    if (ferror(stdout)) return "stdout failed";
    return full ? "context full" : NULL;
}

/* Shows what a token completes, and if the answer ends here, what was held back. */
static void take_token(Stream *t, size_t position, int token, const float *logits, bool last) {
    Answer *a = t->owner;
    const Play *p = a->p;
    LocalBytes text = {0};
    Read read = {.part = ANSWER};
    if (token < 0) return; /* scheduler_run says why */
    a->total = seconds() - a->since;
    if (!a->tokens++) a->first = a->total;
    if (p->chat)
        read = reader_push(&a->reader, token, &text);
    else if (!(read.stop = t->stopped))
        tokenizer_decode(p->m.tokenizer, &a->reader.decoder, token, &text);
    a->thought += read.part == REASONING;
    add_text(a, read.part, &text, read.closed);
    bool stopped = a->reason; /* by a stop text: what follows is not shown */
    if (!stopped) a->reason = end_reason(a, read, last);
    if (a->reason) {
        scheduler_remove(p->m.scheduler, t);
        text.n = 0;
        if (p->chat) read = reader_end(&a->reader, &text);
        if (!p->chat) tokenizer_flush(&a->reader.decoder, &text);
        if (!stopped) add_text(a, read.part, &text, true);
    }
}

void print_text(const Tokenizer *t, const Ids *ids) {
    LocalBytes text = {0};
    Decoder d = {0};
    Wrap exact = {.f = stdout};
    bytes_text(&text, "");
    for (size_t i = 0; i <= ids->n; i++) {
        const bool control = i < ids->n && tokenizer_is_control(t, ids->data[i]);
        if (control || i == ids->n) wrap_text(&exact, text.data, text.n), text.n = 0;
        if (control) put_escape(stdout, REVERSE);
        if (i < ids->n) tokenizer_bytes(t, &d, ids->data[i], &text);
        if (control) wrap_text(&exact, text.data, text.n), text.n = 0, put_escape(stdout, NORMAL);
    }
    if (isatty(STDOUT_FILENO)) wrap_end(&exact);
}

bool make_prompt(const Play *p, Ids *ids, Error *e) {
    LocalBytes text = {0};
    if (p->chat) return chat_render(&p->m.chat, &p->talk, true, ids, e);
    for (int i = 0; i < p->talk.messages; i++)
        bytes_add(&text, p->talk.message[i].content.data, p->talk.message[i].content.n);
    return tokenizer_encode(p->m.tokenizer, text.data ? text.data : "", text.n, WITH_TEMPLATE, ids, e);
}

/* Adds the answer to the conversation, even if it ended early. False: there is none, because it ended inside the
 * reasoning or a call. If nothing follows a preamble, that is the answer. */
static bool keep_answer(Answer *a, Error *e) {
    Play *p = a->p;
    Message *last = a->reader.messages ? a->reader.message + a->reader.messages - 1 : NULL;
    Part part = last ? message_part(last) : REASONING;
    const bool limit = !strcmp(a->reason, "token limit");
    const char *at = part == CALL ? "calling a tool" : "thinking", *cure = limit ? ": --max-tokens raises it" : "";
    if (p->loop && terminal) cure = terminal->cure(limit);
    if (!p->chat) return conversation_add(&p->talk, "assistant", NULL, a->text.data, a->text.n);
    if (part == REASONING || (part == CALL && (!p->loop || strcmp(a->reason, "tool call"))))
        return fail(e, interrupted ? INTERRUPTED : FAILED, "no answer: ended while %s (%s)%s", at, a->reason, cure);
    if (part == ANSWER && !strcmp(a->reason, "stop text")) /* the conversation keeps what was shown */
        text_stops(&last->content, &(size_t){0}, given.stop.text, given.stop.n, true);
    if (part == PREAMBLE && !p->loop) add_text(a, ANSWER, &last->content, true);
    reader_take(&a->reader, &p->talk);
    return true;
}

/* Generates and shows the next message of the conversation. True if there is one, even if it is only a beginning. */
static bool answer(Answer *a, Error *e) {
    Play *p = a->p;
    Stream *t = &a->stream;
    *t = (Stream){.most = (size_t)p->m.engine.context, .sampling = settings.sampling, .want = WANT_TOKEN};
    t->take = take_token, t->owner = a, t->reading = terminal && !p->m.quiet ? terminal->reading : NULL;
    t->sampling.seed += p->answers++;
    if (!p->chat) t->stop = &p->m.checkpoint.stop; /* in a chat the reader knows the end */
    if (!make_prompt(p, &t->tokens, e)) return false;
    t->prompt = t->tokens.n;
    a->reader.decoder.begun = t->prompt > 1; /* more than a beginning-of-text token */
    if (p->chat) reader_init(&a->reader, &p->m.chat, &p->talk);
    if (given.schema && !keeping->keep_file(given.schema, &p->m, p->chat ? &p->talk : NULL, t, e)) return false;
    a->since = seconds();
    bool ok = scheduler_run(p->m.scheduler, t, &interrupted, e) && keep_answer(a, e);
    wrap_end(&a->out);
    return ok;
}

static double speed(const Answer *a) {
    double time = a->tokens > 1 ? a->total - a->first : a->total;
    return time > 0 ? (double)(a->tokens > 1 ? a->tokens - 1 : a->tokens) / time : 0;
}

/* A line, the most important first. */
static void print_statistics(const Answer *a, FILE *f) {
    const Play *p = a->p;
    const Engine *g = &p->m.engine;
    LocalBytes line = {0};
    const size_t prompt = a->stream.prompt;
    double read = (double)step_bytes(g->model, g->model->top_k, 1, (int)(prompt + a->tokens / 2)) * speed(a);
    bytes_print(&line, "[%.1f tokens/s · %zu token%s", speed(a), a->tokens, a->tokens == 1 ? "" : "s");
    if (strcmp(a->reason, "end")) bytes_print(&line, " · %s", a->reason);
    bytes_print(&line, " · context %zu%%", (prompt + a->tokens) * 100 / (size_t)g->context);
    if (p->bandwidth > 0) bytes_print(&line, " · %.0f%% of bandwidth", 100 * read / p->bandwidth);
    bytes_print(&line, " · first in %.0f ms · prompt %zu, %zu from the cache", a->first * 1e3, prompt,
                a->stream.reused);
    bytes_print(&line, " · seed %llu", (unsigned long long)a->stream.sampling.seed);
    if (terminal) terminal->fit(f, &line);
    bytes_text(&line, "]");
    put_text(f, FAINT, "", line.data);
}

static void print_answer_json(const Answer *a) {
    const Play *p = a->p;
    json_print(json_object("model", json_word(p->m.name), "text", json_from_text(a->text.data, a->text.n), "thinking",
                           json_from_text(a->thinking.data, a->thinking.n), "reason", json_word(a->reason),
                           "prompt_tokens", json_number(a->stream.prompt), "tokens", json_number(a->tokens),
                           "thinking_tokens", json_number(a->thought), "first_token_ms", json_number(a->first * 1000),
                           "tokens_per_second", json_number(speed(a)), "seed", json_number(settings.sampling.seed),
                           NULL),
               true);
}

int converse(Play *p) {
    Error e = {0};
    Answer a = {.p = p};
    if (terminal) terminal->answering(true, p->loop);
    bool ok = answer(&a, &e);
    if (terminal) terminal->reading(NULL), terminal->answering(false, p->loop);
    if (a.reason && given.json) print_answer_json(&a);
    if (a.reason && !p->m.quiet) print_statistics(&a, p->loop ? stdout : stderr);
    const bool full = p->loop && (e.code == NO_ROOM || same(a.reason, "context full"));
    if (full)
        ok = fail(&e, NO_ROOM, "the context of %s tokens is full: infer play --ctx chooses a larger one",
                  COUNT((uint64_t)p->m.engine.context));
    if (full && terminal) terminal->full(p, a.reason, &e);
    if (!ok && (!p->loop || e.code == GPU_FAULT)) {
        if (p->loop && terminal) terminal->leave();
        die(&e);
    }
    if (!ok) put_text(stderr, RED, "", e.text);
    if (p->loop) puts("");
    if (a.stream.rule) keeping->drop(a.stream.rule);
    ids_free(&a.stream.tokens);
    reader_free(&a.reader);
    bytes_free(&a.text);
    bytes_free(&a.thinking);
    return ok && !strcmp(a.reason, "interrupted") ? INTERRUPTED : DONE;
}

/* ---- play ---- */

/* The prompt from -p, -f and stdin; without any there is a loop. */
static bool read_prompt(Play *p, Bytes *text, Error *e) {
    const bool reads = given.file || !isatty(STDIN_FILENO);
    LocalBytes piped = {0};
    p->loop = !given.prompt && !reads;
    if (given.schema && !keeping)
        return fail(e, USAGE, "--schema is not in this build: make without EXTENSIONS=no has it");
    if (given.prompt && given.file) return fail(e, USAGE, "give the prompt with -p or with -f, not with both");
    if (given.prompt) bytes_text(text, given.prompt);
    if (reads) text_read(given.file, &piped);
    if (text->n && piped.n) bytes_text(text, "\n\n");
    bytes_add(text, piped.data, piped.n);
    if (p->loop && (given.json || !isatty(STDOUT_FILENO)))
        return fail(e, USAGE, "a conversation needs a terminal; give the prompt with -p, -f or on stdin");
    return check_text("the prompt", text->data, text->n, e);
}

/* The plain loop: a line is a question. Ctrl+C at the prompt clears it. */
static int plain_loop(Play *p) {
    LOCAL(text_free) char *line = NULL;
    size_t room = 0;
    for (Error e;;) {
        interrupted = 0;
        printf("You: ");
        fflush(stdout);
        catch_interrupt(0); /* it ends the wait for a line */
        ssize_t n = getline(&line, &room, stdin);
        catch_interrupt(SA_RESTART);
        if (n < 0) puts("");
        if (n < 0 && !interrupted) return DONE;
        clearerr(stdin);
        if (n < 0) continue;
        n -= line[n - 1] == '\n';
        if (!check_text("the text", line, (size_t)n, &e)) {
            put_text(stderr, RED, "", e.text);
        } else if (strspn(line, " \t") < (size_t)n) {
            conversation_add(&p->talk, "user", NULL, line, (size_t)n);
            converse(p);
        }
    }
}

static bool open_play(Play *p, const char *model, const Bytes *prompt, Error *e) {
    if (!session_open(&p->m, model, NEED_TOKENIZER | NEED_CHECKPOINT, e)) return false;
    p->chat = p->m.has_chat && !given.raw;
    const bool empty = p->chat ? strspn(prompt->data, " \t\r\n") == prompt->n : !prompt->n && !given.prompt;
    if (!p->loop && empty) return fail(e, USAGE, "the prompt is empty");
    if (!p->chat && (given.system || given.effort))
        return fail(e, USAGE, "--system and --effort need a chat format, but %s is continued raw", p->m.name);
    if (terminal && !terminal->settings(&p->m, given.effort, given.date, e)) return false;
    if (given.effort && !chat_effort(&p->m.chat, given.effort, e)) return false;
    conversation_init(&p->talk);
    if (given.system) conversation_set(&p->talk.instructions, given.system);
    if (given.effort) conversation_set(&p->talk.effort, given.effort);
    if (given.date) conversation_set(&p->talk.date, strcmp(given.date, "none") ? given.date : NULL);
    Stream any = {0}; /* what is wrong with a schema is said before loading takes its time */
    if (given.schema && !keeping->keep_file(given.schema, &p->m, p->chat ? &p->talk : NULL, &any, e)) return false;
    if (!session_load(&p->m, (Limits){0}, given.context, e)) return false;
    uint64_t bytes = step_bytes(p->m.engine.model, p->m.engine.model->top_k, 1, 0);
    double flat = backend->flat_read(p->m.engine.state, bytes);
    p->bandwidth = flat > 0 ? (double)bytes / flat : 0;
    LocalText raw = text_print("%s: your text is continued as it stands.", p->m.no_chat.text);
    if (!p->chat && !given.raw) put_text(stderr, NULL, "  ", raw);
    return true;
}

static int run_play(const char *model) {
    Error e;
    LocalBytes prompt = {0};
    static Play p;
    p.m.quiet = settings.quiet || given.json;
    if (!read_prompt(&p, &prompt, &e) || !open_play(&p, model, &prompt, &e)) die(&e);
    catch_interrupt(SA_RESTART);
    if (!p.loop) conversation_add(&p.talk, "user", NULL, prompt.data, prompt.n);
    if (!p.loop) return converse(&p);
    return terminal ? terminal->loop(&p) : plain_loop(&p);
}

const Command play = {
    "play",
    "[MODEL [TEXT]]",
    "talk to a model in the terminal; with TEXT, -p, -f or text on stdin: one answer, alone on stdout",
    {play_options, settings_options, load_options, chat_options},
    run_play};

/* ---- tokenize, detokenize, render, parse: stdin to stdout ---- */

static struct {
    bool jsonl, special, as_ids; /* options */
    Session s;
    Bytes in; /* all of stdin */
    Ids ids;
    Error e;
} filter;

static void filter_open(const char *model, int need) {
    if (!session_open(&filter.s, model, need, &filter.e)) die(&filter.e);
    text_read(NULL, &filter.in);
}

/* Token ids below `vocab` from text like "1, 2 3" or "[1,2,3]". */
static bool parse_ids(const char *text, int vocab, Ids *out, Error *e) {
    static const char separators[] = " ,[]\t\r\n";
    for (const char *s = text + strspn(text, separators); *s; s += strspn(s, separators)) {
        char *end;
        long id = strtol(s, &end, 10);
        if (end == s || (*end && !strchr(separators, *end)) || id < 0)
            return fail(e, USAGE, "a token id must be a whole number, not '%.*s'", (int)strcspn(s, separators), s);
        if (id >= vocab) return fail(e, USAGE, "token %ld is outside the vocabulary of %d", id, vocab);
        ids_add(out, (int)id);
        s = end;
    }
    return true;
}

/* The ids on stdin. */
static void read_ids(int vocab) {
    if (strlen(filter.in.data) < filter.in.n) die(&(Error){USAGE, "stdin: a NUL stands among the ids"});
    if (!parse_ids(filter.in.data, vocab, &filter.ids, &filter.e)) die(&filter.e);
}

static void print_ids(const Ids *ids) {
    for (size_t i = 0; i < ids->n; i++) printf("%c%d", i ? ',' : '[', ids->data[i]);
    puts(ids->n ? "]" : "[]");
}

static bool tokenize_text(const char *text, size_t n) {
    const int flags = filter.special ? CONTROL_TOKENS | WITH_TEMPLATE : 0;
    filter.ids.n = 0;
    if (!tokenizer_encode(filter.s.tokenizer, text, n, flags, &filter.ids, &filter.e)) return false;
    return print_ids(&filter.ids), true;
}

static int run_tokenize(const char *model) {
    int code = DONE, number = 1;
    filter_open(model, NEED_TOKENIZER);
    if (!filter.jsonl && !tokenize_text(filter.in.data, filter.in.n)) die(&filter.e);
    for (char *line = filter.in.data, *end = line + filter.in.n; filter.jsonl && line < end; number++) {
        char *stop = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)((stop ? stop : end) - line);
        LocalText name = text_print("stdin, line %d", number);
        LocalJson json = json_parse(line, n, name, &filter.e);
        const char *text = cJSON_GetStringValue(json);
        if (json && !text) fail(&filter.e, USAGE, "%s: a JSON string is needed", name);
        if (!text || !tokenize_text(text, strlen(text))) {
            put_text(stderr, NULL, "infer: ", filter.e.text);
            puts("null"); /* so that lines keep their numbers */
            code = USAGE;
        }
        line += n + 1;
    }
    return code;
}

static int run_detokenize(const char *model) {
    filter_open(model, NEED_TOKENIZER);
    read_ids(tokenizer_size(filter.s.tokenizer));
    print_text(filter.s.tokenizer, &filter.ids);
    return DONE;
}

static int run_render(const char *model) {
    static const char example[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}";
    LOCAL(conversation_free) Conversation conversation = {0};
    filter_open(model, NEED_CHAT);
    LocalJson json = json_parse(filter.in.data, filter.in.n, "stdin", &filter.e);
    if (!json) fail(&filter.e, USAGE, "%s; needed is %s or the like", filter.e.text, example), die(&filter.e);
    const cJSON *prompt = json_get(json, "add_generation_prompt");
    conversation_init(&conversation);
    if (!conversation_parse(&conversation, json, &filter.e) ||
        !chat_render(&filter.s.chat, &conversation, !prompt || cJSON_IsTrue(prompt), &filter.ids, &filter.e))
        die(&filter.e);
    filter.as_ids ? print_ids(&filter.ids) : print_text(filter.s.tokenizer, &filter.ids);
    return DONE;
}

static int run_parse(const char *model) {
    LOCAL(reader_free) Reader reader = {0};
    filter_open(model, NEED_CHAT);
    read_ids(INT32_MAX);
    reader_init(&reader, &filter.s.chat, NULL);
    for (size_t i = 0; i < filter.ids.n; i++) reader_push(&reader, filter.ids.data[i], NULL);
    reader_end(&reader, NULL);
    for (int i = 0; i < reader.messages; i++) json_print(message_json(reader.message + i), true);
    if (reader.repairs) fprintf(stderr, "infer: %d repair%s\n", reader.repairs, reader.repairs == 1 ? "" : "s");
    return DONE;
}

static const Option tokenize_options[] = {
    {0, "jsonl", NULL, SWITCH, &filter.jsonl,
     .help = "each line of stdin is a JSON string and gives one line of output; null if it is refused"},
    {0, "special", NULL, SWITCH, &filter.special,
     .help = "names of control tokens become control tokens, and the tokenizer's template is added"},
    {0}};
static const Option render_options[] = {
    {0, "ids", NULL, SWITCH, &filter.as_ids, .help = "as a JSON array of token ids instead of text"}, {0}};
const Command tokenize = {
    "tokenize", "MODEL", "the text on stdin to token ids, a JSON array", {tokenize_options}, run_tokenize};
const Command detokenize = {
    "detokenize", "MODEL", "token ids on stdin, numbers or a JSON array, to text", {NULL}, run_detokenize};
const Command render = {"render",
                        "MODEL",
                        "the conversation on stdin, JSON of chat completions, as the prompt that the model reads",
                        {render_options, chat_options},
                        run_render};
const Command parse = {
    "parse", "MODEL", "sampled token ids on stdin as messages, a line of JSON each", {chat_options}, run_parse};

/* ---- logits ---- */

enum { NPY_HEADER = 128 }; /* bytes */

static struct { /* of commands that call session_text() */
    const char *prompt, *ids;
} text_given;
const Option text_options[] = {{'p', "prompt", "TEXT", TEXT, &text_given.prompt,
                                .help = "the text; a beginning-of-text token is added if the tokenizer wants one"},
                               {0, "ids", "1,2,3", TEXT, &text_given.ids, .help = "the text as token ids, exactly"},
                               {0}};

bool session_text(Session *s, const char *model, Ids *ids, Error *e) {
    const Model *m = &s->checkpoint.model;
    const char *text = text_given.prompt;
    if (!text == !text_given.ids) return fail(e, USAGE, "one text is needed: behind MODEL, or as -p or --ids");
    if (!session_open(s, model, NEED_CHECKPOINT | (text ? NEED_TOKENIZER : USE_TOKENIZER), e)) return false;
    if (!(text ? tokenizer_encode(s->tokenizer, text, strlen(text), WITH_TEMPLATE, ids, e)
               : parse_ids(text_given.ids, m->vocab, ids, e)))
        return false;
    if (!ids->n) return fail(e, USAGE, "the prompt is empty");
    return ids->n <= (size_t)m->context ||
           fail(e, USAGE, "the prompt has %zu tokens, the model's context is %d", ids->n, m->context);
}

/* Writes the header of NumPy's format 1.0. Rows of floats follow. */
static void put_npy_header(FILE *f, size_t rows, int cols) {
    fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, f); /* 118 bytes of header follow */
    const int n = fprintf(f, "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %d), }", rows, cols);
    fprintf(f, "%*s\n", 117 - n, "");
}

int likeliest(const float *logits, int vocab, int n, int *ids) {
    int have = 0;
    for (int i = 0; i < vocab; i++) {
        if (have == n && !(n && logits[i] > logits[ids[n - 1]])) continue;
        int at = have < n ? have++ : n - 1;
        for (; at && logits[i] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = i;
    }
    return have;
}

static void print_top(const float *logits, int vocab, int top, const Tokenizer *t) {
    double all = log_sum_exp(logits, vocab);
    int *best = allocate((size_t)vocab * sizeof *best), n = likeliest(logits, vocab, top, best);
    for (int k = 0; k < n; k++) {
        Decoder d = {.begun = true};
        LocalBytes text = {0};
        if (t) tokenizer_decode(t, &d, best[k], &text);
        tokenizer_flush(&d, &text);
        double logit = (double)logits[best[k]];
        printf("%7d %10.4f %8.5f  ", best[k], logit, exp(logit - all));
        json_print(json_from_text(text.data, text.n), true);
    }
    free(best);
}

static struct {
    Session s;
    bool all;
    int top;
    const char *output, *tap;
} logit;

/* Writes the logits from which the token at `position` was drawn or would be. */
static void write_row(Stream *t, size_t position, int token, const float *logits, bool last) {
    const int vocab = logit.s.engine.model->vocab;
    if (logit.output) fwrite(logits, sizeof *logits, (size_t)vocab, stdout);
    if (logit.output || ferror(stdout)) return;
    if (logit.all) printf("after token %zu (%d):\n", position - 1, t->tokens.data[position - 1]);
    print_top(logits, vocab, logit.top, logit.s.tokenizer);
}

/* A Tap: appends rows to the file of the stage. A prompt of several steps calls it several times. */
static void tap_to_file(void *data, const char *stage, int layer, const float *values, int rows, int cols) {
    const size_t row = sizeof *values * (size_t)cols;
    LocalText path = text_print("%s/%s.%d.npy", logit.tap, stage, layer);
    struct stat old = {0};
    Error e;
    FILE *f = fopen(path, stat(path, &old) ? "wb" : "r+b");
    const size_t before = old.st_size ? ((size_t)old.st_size - NPY_HEADER) / row : 0;
    if (f) put_npy_header(f, before + (size_t)rows, cols);
    bool ok = f && !fseek(f, 0, SEEK_END) && fwrite(values, row, (size_t)rows, f) == (size_t)rows;
    if (f && fclose(f)) ok = false;
    if (!ok) fail(&e, FAILED, "%s: %m", path), die(&e);
}

static int run_logits(const char *model) {
    Error e;
    LocalIds ids = {0};
    Session *s = &logit.s;
    if (!session_text(s, model, &ids, &e)) die(&e);
    if (logit.tap && mkdir(logit.tap, 0777)) fail(&e, FAILED, "%s: %m; choose another name", logit.tap), die(&e);
    if (logit.tap) s->tap = tap_to_file;
    if (logit.output && !output_open(logit.output, &e)) die(&e);
    if (!session_load(s, (Limits){0}, 0, &e)) die(&e);
    const size_t from = logit.all ? 1 : ids.n;
    if (!logit.output && isatty(STDOUT_FILENO)) puts("     id      logit        p  text");
    if (logit.output) put_npy_header(stdout, ids.n + 1 - from, s->engine.model->vocab);
    if (!scheduler_score(s->scheduler, ids.data, ids.n, from, write_row, NULL, &e)) die(&e);
    return DONE;
}

static const Option logits_options[] = {
    {0, "all", NULL, SWITCH, &logit.all, .help = "after every token of the text instead of the last"},
    {0, "top", "N", WHOLE, &logit.top, 1, 1e9, "10", "how many"},
    {'o', "output", "FILE.npy", TEXT, &logit.output,
     .help = "all logits as a float32 array (positions, vocabulary) instead"},
    {0, "tap", "DIR", TEXT, &logit.tap,
     .help = "makes a folder of the stages of each layer, STAGE.LAYER.npy: float32 arrays, a row a token"},
    {0}};
const Command logits = {"logits",
                        "MODEL [TEXT]",
                        "the likeliest next tokens, or all logits as a NumPy file",
                        {text_options, logits_options, load_options},
                        run_logits};

/* ---- download ---- */

static int run_download(const char *repository) {
    const char *folder = hub_fetch(repository);
    Error e;
    puts(folder);
    if (model_entry(folder).complete && model_runs(folder, &e))
        fprintf(stderr, "infer play %.*s  talks to it\n", (int)strcspn(repository, "@"), repository);
    return DONE;
}
const Command download = {"download",
                          "REPO",
                          "fetch a model, REPO[@REVISION], or the rest of it, into the hub's cache",
                          {download_options},
                          run_download};

/* ---- main ---- */

static void print_summary(FILE *to) {
    print_row(to, "", 0, "infer runs open language models on NVIDIA GPUs.\n\n");
    for (int i = 0; commands[i]; i++) {
        LocalText name = text_print("  infer %s", commands[i]->name);
        print_row(to, name, 20, commands[i]->summary);
    }
    print_row(to, "", 0,
              "\ninfer COMMAND --help shows its options. "
              "MODEL is a path, ORG/NAME, or a unique part of the name of a model that is here.");
}

/* A closed pipe ends the program in silence, as it ends other tools. A closed socket is an error where it is used. */
static void on_closed_pipe(int number) {
    struct pollfd out = {STDOUT_FILENO, POLLOUT, 0};
    if (poll(&out, 1, 0) > 0 && out.revents & POLLERR) _exit(128 + number);
}

__attribute__((weak)) int main(int argc, char **argv) { /* a test program has its own */
    bool help = argc > 1 && text_listed("help -h --help", argv[1]);
    int fd; /* no file may get the number of a closed stdout or stderr: what is printed would go into it */
    while ((fd = open("/dev/null", O_RDONLY)) >= 0 && fd <= STDERR_FILENO) {}
    close(fd);
    const char *name = argc > 1 + help ? argv[1 + help] : "";
    const char *model = NULL;
    const Command *c = NULL;
    Error e;
    uint64_t *seed = &settings.sampling.seed; /* short enough to be typed */
    if (getentropy(seed, 4)) *seed = (uint32_t)(seconds() * 1e6);
    signal(SIGPIPE, on_closed_pipe);
    setlocale(LC_CTYPE, "");
    setlocale(LC_CTYPE, "C.UTF-8"); /* if there is none, the user's own stays; without UTF-8 libedit drops letters */
    for (int i = 0; commands[i]; i++)
        if (!strcmp(name, commands[i]->name)) c = commands[i];
    for (int i = 2; i < argc && strcmp(argv[i], "--"); i++) help |= text_listed("-h --help", argv[i]);
    int code = c || (help && !*name) ? DONE : USAGE;
    if (!strcmp(name, "--version"))
        code = DONE, printf("infer %s (%s)\n", VERSION, backend->name);
    else if (!c && *name)
        fail(&e, USAGE, "there is no command %.60s; %ssee infer --help", name,
             hints ? hints->meant(NULL, NULL, name) : ""),
            die(&e);
    else if (!c)
        print_summary(help ? stdout : stderr);
    else if (help)
        print_help(c);
    else if (!parse_arguments(c, argc - 2, argv + 2, &model, &e))
        die(&e);
    else
        code = c->run(model);
    if ((fflush(stdout) || ferror(stdout)) && code == DONE) {
        fail(&e, FAILED, "%s could not be written: is its disk full?", output_file ? output_file : "the output");
        die(&e);
    }
    return code;
}
