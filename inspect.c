/* inspect.c: what is here (list, rm), what a model is made of and whether it fits (inspect), and what is wrong with
 * this machine (doctor). */
#include "download.h"
#include "host.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static int report(const Error *e) {
    fprintf(stderr, "infer: %s\n", e->text);
    return e->code;
}

static void print_json(cJSON *json) {
    char *text = json_text(json);
    puts(text);
    free(text);
    cJSON_Delete(json);
}

/* ---- list ---- */

int list(const Options *o) {
    bool json = o->json;
    ModelEntry *m;
    int n = models_list(&m), name = 0, family = 0;
    char size[24];
    cJSON *all = cJSON_CreateArray();
    for (int i = 0; i < n; i++) {
        if ((int)strlen(m[i].name) > name) name = (int)strlen(m[i].name);
        if ((int)strlen(m[i].family) > family) family = (int)strlen(m[i].family);
    }
    for (int i = 0; i < n; i++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "name", m[i].name);
        cJSON_AddStringToObject(one, "family", m[i].family);
        cJSON_AddNumberToObject(one, "bytes", (double)m[i].bytes);
        cJSON_AddStringToObject(one, "encoding", m[i].encoding);
        cJSON_AddBoolToObject(one, "complete", m[i].complete);
        cJSON_AddStringToObject(one, "path", m[i].path);
        cJSON_AddItemToArray(all, one);
        if (!json)
            printf("%-*s  %-*s  %8s  %-5s  %-10s  %s\n", name, m[i].name, family, m[i].family,
                   size_text(m[i].bytes, size), m[i].encoding, m[i].complete ? "complete" : "incomplete", m[i].path);
    }
    if (json)
        print_json(all);
    else
        cJSON_Delete(all);
    if (!n && !json) fputs("no model is here; infer download ORG/NAME fetches one\n", stderr);
    models_free(m, n);
    return DONE;
}

/* ---- rm ---- */

/* The folder in the cache that `argument` means, ORG/NAME or a part of it; its name replaces *name. */
static bool find_folder(const char *cache, const char *argument, char **name, Error *e) {
    char *wanted = repository_folder(argument), *found = NULL;
    int hits = 0;
    DIR *dir = opendir(cache);
    for (struct dirent *d; dir && (d = readdir(dir));) {
        bool exact = !strcmp(d->d_name, wanted);
        if (strncmp(d->d_name, "models--", 8) || !(exact || strcasestr(d->d_name, wanted + 8))) continue;
        if (exact) hits = 0;
        free(found);
        found = copy_text(d->d_name, strlen(d->d_name));
        hits++;
        if (exact) break;
    }
    if (dir) closedir(dir);
    free(wanted);
    *name = hits == 1 ? found : NULL;
    if (*name) return true;
    free(found);
    return fail(e, BAD_MODEL,
                hits ? "'%.100s' means more than one repository in %s: infer list shows them"
                     : "no repository '%.100s' is in %s: infer list shows what is there",
                argument, cache);
}

/* Is a blob of it being fetched? Looks at the locks and takes them for a moment. */
static bool in_use(const char *locks) {
    DIR *dir = opendir(locks);
    bool held = false;
    for (struct dirent *d; dir && (d = readdir(dir)) && !held;) {
        int fd = openat(dirfd(dir), d->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        held = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK;
        if (fd >= 0) close(fd);
    }
    if (dir) closedir(dir);
    return held;
}

int rm(const Options *o) {
    Error e;
    const char *argument = o->model, *home = getenv("HOME");
    if (!repository_valid(argument)) {
        fail(&e, USAGE, "'%.100s' is no repository of the hub's cache, ORG/NAME", argument);
        return report(&e);
    }
    Bytes cache = {0}, folder = {0}, locks = {0}, link = {0};
    char *name = NULL, target[4096];
    hub_cache(&cache);
    bool ok = find_folder(cache.data, argument, &name, &e);
    if (ok) {
        bytes_print(&folder, "%s/%s", cache.data, name);
        bytes_print(&locks, "%s/.locks/%s", cache.data, name);
        bytes_print(&link, "%s/.cache/infer/models/%s", home ? home : "", name + 8);
        if (in_use(locks.data))
            ok = fail(&e, FAILED, "%s is being downloaded by another process: end that first", argument);
        else if (!folder_remove(folder.data))
            ok = fail(&e, FAILED, "%s: %s", folder.data, strerror(errno));
    }
    if (ok) {
        folder_remove(locks.data);
        if (readlink(link.data, target, sizeof target) > 0) unlink(link.data);
        fprintf(stderr, "removed %s\n", folder.data);
    }
    bytes_free(&cache);
    bytes_free(&folder);
    bytes_free(&locks);
    bytes_free(&link);
    free(name);
    return ok ? DONE : report(&e);
}

/* ---- inspect ---- */

enum { GROUPS = 6, MOST_GROUPS = 32 /* more than there are dtypes */ };
static const uint64_t reserve = 256 << 20; /* of GPU memory, for CUDA itself */

typedef struct {
    const char *name, *encoding;
    uint64_t values, active, bytes; /* values: parameters; active: read for one token */
} Group;

typedef struct {
    Group group[MOST_GROUPS];
    int groups;
    uint64_t parameters, active, bytes;
    uint64_t cache;  /* bytes of one token */
    uint64_t needed; /* GPU memory without the cache, about */
    int fits;        /* tokens of context on the first GPU, or 0 */
    Devices devices;
} Facts;

static void add_linear(Group *g, const Linear *w, int chosen) {
    uint64_t n = (uint64_t)w->n * (uint64_t)w->rows * (uint64_t)w->cols;
    if (!n) return;
    const char *type = type_name(w->type);
    g->encoding = !g->encoding || g->encoding == type ? type : "mixed";
    g->values += n;
    g->active += n / (uint64_t)w->n * (uint64_t)chosen;
    g->bytes += linear_bytes(w);
}

static uint64_t tensor_values(const Tensor *t) {
    uint64_t n = 1;
    for (int i = 0; i < t->dims; i++) n *= (uint64_t)t->shape[i];
    return n;
}

/* What each group has. The embedding's bytes are what the others leave: a file may hold one matrix as head too. */
static void count_groups(const Checkpoint *c, Facts *f) {
    const Model *m = &c->model;
    bool experts = m->n_experts > 1, tied = m->embed.data.data == m->head.data.data;
    const char *names[GROUPS] = {"embedding", "attention",           "router", experts ? "experts" : "feed-forward",
                                 "head",      "norms, biases, sinks"};
    for (f->groups = 0; f->groups < GROUPS; f->groups++) f->group[f->groups].name = names[f->groups];
    add_linear(&f->group[0], &m->embed, 0);
    if (!tied) add_linear(&f->group[4], &m->head, 1);
    for (int i = 0; i < m->n_layers; i++) {
        const Layer *l = m->layer + i;
        const Linear *attention[] = {&l->q, &l->k, &l->v, &l->o}, *ffn[] = {&l->gate, &l->up, &l->down};
        for (int j = 0; j < 4; j++) add_linear(&f->group[1], attention[j], 1);
        add_linear(&f->group[2], &l->router, 1);
        for (int j = 0; j < 3; j++) add_linear(&f->group[3], ffn[j], m->top_k);
    }
    if (tied) f->group[0].active = f->group[0].values, f->group[0].name = "embedding and head";
    for (int i = 0; i < c->tensors.n; i++) {
        const Tensor *t = c->tensors.tensor + i;
        const char *name = strrchr(t->name, '_');
        bool packed = name && (!strcmp(name, "_blocks") || !strcmp(name, "_scales")), matrix = t->dims == 2;
        uint64_t n = tensor_values(t);
        f->bytes += t->size;
        /* (rows, cols) is a matrix, but (experts, rows) of a name that ends in _bias is not */
        if (packed || (matrix && !(name && !strcmp(name, "_bias")))) continue;
        Group *rest = &f->group[GROUPS - 1];
        rest->values += n;
        rest->active += matrix ? n / (uint64_t)m->n_experts * (uint64_t)m->top_k : n;
        rest->encoding = t->dtype;
        rest->bytes += t->size;
    }
    f->group[0].bytes = f->bytes;
    for (int i = 1; i < GROUPS; i++) f->group[0].bytes -= f->group[i].bytes;
    for (int i = 0; i < GROUPS; i++) f->parameters += f->group[i].values, f->active += f->group[i].active;
}

/* Memory of the GPU: weights, what a step of so many tokens works in, and the cache, of which as much as fits. */
static void count_memory(const Model *m, int context, int tokens, Facts *f) {
    uint64_t heads = (uint64_t)m->n_heads * (uint64_t)m->head_dim, kv = (uint64_t)m->n_kv_heads * (uint64_t)m->head_dim;
    uint64_t dim = (uint64_t)m->dim, k = (uint64_t)m->top_k;
    uint64_t token = 6 * dim + 4 * heads + 4 * (heads + 2 * kv) + k * (2 * (uint64_t)m->ffn_dim + 4 * dim);
    uint64_t work = (uint64_t)tokens * token + (uint64_t)context * (uint64_t)m->head_dim * 4 + 32 * (uint64_t)m->vocab;
    f->cache = (uint64_t)m->n_layers * 4 * kv + 4;
    f->needed = model_bytes(m) + work + reserve;
    if (f->devices.gpus && f->devices.gpu[0].usable && f->devices.gpu[0].free > f->needed) {
        uint64_t fits = (f->devices.gpu[0].free - f->needed) / f->cache / PAGE * PAGE;
        f->fits = fits < (uint64_t)m->context ? (int)fits : m->context;
    }
}

/* What the weights are made of, into `out` and, if `text`, to stdout; unit: what their values are. */
static void show_weights(const Facts *f, const char *unit, bool text, cJSON *out) {
    char a[32], b[32];
    cJSON_AddNumberToObject(out, "bytes", (double)f->bytes);
    cJSON *groups = cJSON_AddArrayToObject(out, "groups");
    if (text) printf("weights     %s bytes (%s)\n", count_text(f->bytes, a), size_text(f->bytes, b));
    for (int i = 0; i < f->groups; i++) {
        const Group *g = f->group + i;
        if (!g->values) continue;
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "name", g->name);
        cJSON_AddStringToObject(one, "encoding", g->encoding);
        cJSON_AddNumberToObject(one, unit, (double)g->values);
        cJSON_AddNumberToObject(one, "bytes", (double)g->bytes);
        cJSON_AddItemToArray(groups, one);
        if (text)
            printf("            %-20s  %-7s  %8s  %s %s\n", g->name, g->encoding, size_text(g->bytes, a),
                   count_text(g->values, b), unit);
    }
}

static void facts_json(const Checkpoint *c, const Facts *f, int context, cJSON *out) {
    const Model *m = &c->model;
    const struct {
        const char *name;
        double value;
    } numbers[] = {{"layers", m->n_layers},
                   {"width", m->dim},
                   {"heads", m->n_heads},
                   {"kv_heads", m->n_kv_heads},
                   {"head_size", m->head_dim},
                   {"experts", m->n_experts},
                   {"experts_per_token", m->top_k},
                   {"vocabulary", m->vocab},
                   {"context", m->context},
                   {"parameters", (double)f->parameters},
                   {"active_parameters", (double)f->active},
                   {"cache_bytes_per_token", (double)f->cache},
                   {"gpu_bytes_needed", (double)(f->needed + f->cache * (uint64_t)context)}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        cJSON_AddNumberToObject(out, numbers[i].name, numbers[i].value);
    if (!f->devices.gpus) return;
    cJSON_AddStringToObject(out, "gpu", f->devices.gpu[0].name);
    cJSON_AddNumberToObject(out, "gpu_bytes_free", (double)f->devices.gpu[0].free);
    cJSON_AddNumberToObject(out, "context_that_fits", f->fits);
    cJSON_AddBoolToObject(out, "fits", f->fits >= context);
}

static void print_shape(const Checkpoint *c, const Facts *f) {
    const Model *m = &c->model;
    char a[32], b[32];
    int windows = 0, window = 0;
    for (int i = 0; i < m->n_layers; i++)
        if (m->layer[i].window) windows++, window = m->layer[i].window;
    printf("layers      %d, %s wide; %d query and %d key/value heads of %d", m->n_layers,
           count_text((uint64_t)m->dim, a), m->n_heads, m->n_kv_heads, m->head_dim);
    if (windows) printf("; %d of the layers see %d positions", windows, window);
    if (m->n_experts > 1) printf("\nexperts     %d a layer, %d a token", m->n_experts, m->top_k);
    printf("\nvocabulary  %s\ncontext     %s\n", count_text((uint64_t)m->vocab, a),
           count_text((uint64_t)m->context, b));
    printf("parameters  %s, %s of them for each token\n", count_text(f->parameters, a), count_text(f->active, b));
}

static void print_memory(const Facts *f, int context) {
    char a[32], b[32], d[32];
    printf("cache       %s bytes a token, %s for a context of %s\n", count_text(f->cache, a),
           size_text(f->cache * (uint64_t)context, b), count_text((uint64_t)context, d));
    printf("GPU memory  about %s with that context\n", size_text(f->needed + f->cache * (uint64_t)context, a));
    if (!f->devices.gpus)
        printf("fits        unknown: no GPU to ask (%s)\n", f->devices.problem);
    else if (f->fits >= context)
        printf("fits        yes, on GPU 0 (%s, %s free)\n", f->devices.gpu[0].name,
               size_text(f->devices.gpu[0].free, a));
    else if (f->fits)
        printf("fits        up to a context of %s on GPU 0 (%s, %s free): play --ctx %d\n",
               count_text((uint64_t)f->fits, b), f->devices.gpu[0].name, size_text(f->devices.gpu[0].free, a), f->fits);
    else
        printf("fits        no: GPU 0 (%s) has %s free%s\n", f->devices.gpu[0].name,
               size_text(f->devices.gpu[0].free, a), f->devices.gpu[0].usable ? "" : " and no code in this build");
}

/* Of a model that infer does not run: what its files say all the same. */
static void foreign_facts(const char *dir, Facts *f, bool text, cJSON *out) {
    Error e;
    Bytes path = {0}, shown = {0};
    Tensors t;
    bytes_print(&path, "%s/config.json", dir);
    cJSON *config = json_read(path.data, 1 << 20, &e);
    const char *family = json_string(config, "model_type");
    if (family) {
        bytes_shown(&shown, family, strlen(family), false);
        cJSON_AddStringToObject(out, "family", shown.data);
        if (text) printf("family      %s\n", shown.data);
    }
    if (tensors_open(&t, dir, &e)) {
        for (int i = 0; i < t.n; i++) {
            const Tensor *one = t.tensor + i;
            Group *g = f->group;
            while (g->encoding && g->encoding != one->dtype) g++;
            if (!g->encoding) *g = (Group){.name = "tensors", .encoding = one->dtype}, f->groups++;
            g->values += tensor_values(one);
            g->bytes += one->size;
            f->bytes += one->size;
        }
        show_weights(f, "values", text, out);
        tensors_close(&t);
    }
    cJSON_Delete(config);
    bytes_free(&path);
    bytes_free(&shown);
}

/* The directory of a model that is here, or NULL: then it is for the hub. */
static char *find_here(const char *argument) {
    struct stat st;
    if (!stat(argument, &st)) return copy_text(argument, strlen(argument));
    ModelEntry *m;
    char *path = NULL;
    int n = models_list(&m);
    for (int i = 0; i < n && !path; i++)
        if (!strcmp(m[i].name, argument) && m[i].complete) path = copy_text(m[i].path, strlen(m[i].path));
    models_free(m, n);
    return path;
}

static bool inspect_at(const char *dir, int context, bool json, cJSON *out, Error *e) {
    Checkpoint c;
    Facts *f = allocate_zero(1, sizeof *f);
    bool ok = checkpoint_open(&c, dir, e);
    if (ok) {
        if (!context || context > c.model.context) context = c.model.context;
        backend->describe(&f->devices);
        count_groups(&c, f);
        count_memory(&c.model, context, context < backend->prompt_step ? context : backend->prompt_step, f);
        cJSON_AddStringToObject(out, "family", c.family);
        facts_json(&c, f, context, out);
        if (!json) printf("family      %s\n", c.family), print_shape(&c, f);
        show_weights(f, "parameters", !json, out);
        if (!json) print_memory(f, context);
        checkpoint_close(&c);
    } else {
        foreign_facts(dir, f, !json, out);
        cJSON_AddStringToObject(out, "problem", e->text);
    }
    cJSON_AddBoolToObject(out, "supported", ok);
    free(f);
    return ok;
}

int inspect(const Options *o) {
    Error e = {0};
    Outline outline = {0};
    bool json = o->json, ok = true;
    const char *argument = o->model;
    char *dir = find_here(argument), a[24], b[24];
    uint64_t room = 0;
    cJSON *out = cJSON_CreateObject();
    cJSON_AddStringToObject(out, "name", argument);
    if (!dir) ok = outline_open(&outline, argument, &e);
    if (ok) {
        if (!json) printf("name        %s\n", argument);
        bool here = inspect_at(dir ? dir : outline.folder, o->context, json, out, &e);
        Bytes cache = {0};
        hub_cache(&cache);
        disk_free(cache.data, &room);
        cJSON_AddNumberToObject(out, "bytes_to_download", (double)outline.to_fetch);
        cJSON_AddNumberToObject(out, "disk_bytes_free", (double)room);
        if (!json && !dir)
            printf("disk        %s to download; %s has %s free%s\n", size_text(outline.to_fetch, a), cache.data,
                   size_text(room, b), room < outline.to_fetch ? ": too little" : "");
        if (json) print_json(out), out = NULL;
        bytes_free(&cache);
        ok = here;
    }
    cJSON_Delete(out);
    outline_close(&outline);
    free(dir);
    return ok ? DONE : report(&e);
}

/* ---- doctor ---- */

typedef struct {
    bool json;
    int code; /* of the first fault */
    cJSON *all;
} Doctor;

/* A line for each finding; cure NULL: nothing is wrong. */
static void finding(Doctor *d, const char *what, int code, const char *cure, const char *format, ...) {
    char text[500];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cJSON *one = cJSON_CreateObject();
    cJSON_AddStringToObject(one, "what", what);
    cJSON_AddBoolToObject(one, "ok", !cure);
    cJSON_AddStringToObject(one, "found", text);
    if (cure) cJSON_AddStringToObject(one, "cure", cure);
    cJSON_AddItemToArray(d->all, one);
    if (!d->json) printf("%s %-8s  %s%s%s\n", cure ? "✗" : "✓", what, text, cure ? ": " : "", cure ? cure : "");
    if (cure && !d->code) d->code = code;
}

static void examine_gpus(Doctor *d) {
    Devices *v = allocate_zero(1, sizeof *v);
    char cure[200], driver[60] = "no driver", a[24], b[24];
    backend->describe(v);
    if (!v->gpus) /* a backend that is built without CUDA needs none */
        finding(d, "GPU", NO_GPU, v->runtime ? "install NVIDIA's driver, or see whether nvidia-smi shows one" : NULL,
                "none (%s)", v->problem);
    for (int i = 0; i < v->gpus; i++) {
        snprintf(cure, sizeof cure, "this build has no code for it, make clean && make CUDA_ARCH=sm_%d%d%s",
                 v->gpu[i].major, v->gpu[i].minor, v->gpu[i].major == 9 ? "a" : "");
        finding(d, "GPU", NO_GPU, v->gpu[i].usable ? NULL : cure, "%d: %s, compute capability %d.%d, %s of %s free", i,
                v->gpu[i].name, v->gpu[i].major, v->gpu[i].minor, size_text(v->gpu[i].free, a),
                size_text(v->gpu[i].total, b));
    }
    if (v->driver) snprintf(driver, sizeof driver, "driver for %d.%d", v->driver / 1000, v->driver % 1000 / 10);
    if (v->runtime)
        finding(d, "CUDA", NO_GPU,
                v->driver && v->driver / 1000 < v->runtime / 1000 ? "the driver is older than the toolkit: update it"
                                                                  : NULL,
                "%s, built with toolkit %d.%d for %s", driver, v->runtime / 1000, v->runtime % 1000 / 10, v->built);
    free(v);
}

static void examine_cache(Doctor *d) {
    Bytes cache = {0};
    uint64_t room = 0;
    char a[24];
    hub_cache(&cache);
    char *there = copy_text(cache.data, cache.n), *slash;
    while (access(there, F_OK) && (slash = strrchr(there, '/')) && slash > there) *slash = 0;
    bool writable = !access(there, W_OK);
    disk_free(cache.data, &room);
    finding(d, "cache", NO_NETWORK, writable ? NULL : "it cannot be written; choose another place with HF_HOME", "%s",
            cache.data);
    finding(d, "disk", NO_ROOM,
            room > 14000000000u ? NULL : "gpt-oss-20b needs 13.8 GB; free some, or choose another disk with HF_HOME",
            "%s free", size_text(room, a));
    free(there);
    bytes_free(&cache);
}

static void examine_hub(Doctor *d) {
    Error e;
    HubState h;
    bool ok = hub_state(&h, &e);
    if (!ok && e.code == USAGE) {
        finding(d, "hub", e.code, "see HF_ENDPOINT and HF_TOKEN", "%s", e.text);
        return;
    }
    if (h.token)
        finding(d, "token", 0, NULL, "found in %s", h.token);
    else
        finding(d, "token", 0, NULL, "none (only private and gated repositories need one)");
    if (h.offline)
        finding(d, "network", 0, NULL, "not tried: HF_HUB_OFFLINE is set");
    else if (ok)
        finding(d, "network", 0, NULL, "%s answers in %.0f ms", h.endpoint, h.seconds * 1e3);
    else
        finding(d, "network", e.code, e.text, "%s", h.endpoint);
}

int doctor(const Options *o) {
    Doctor d = {.json = o->json};
    d.all = cJSON_CreateArray();
    examine_gpus(&d);
    examine_cache(&d);
    examine_hub(&d);
    if (d.json)
        print_json(d.all);
    else
        cJSON_Delete(d.all);
    return d.code;
}
