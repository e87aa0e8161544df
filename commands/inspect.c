/* inspect.c: what models there are: inspect says what one is made of and whether it fits, list which ones are here, rm
 * removes one. */
#include "host.h"

#include <ctype.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/param.h>
#include <unistd.h>

enum { MOST_HEAD = 100000000 /* bytes of a file that are fetched of a repository */ };
static struct {
    int context;
    bool json;
} given;

/* ---- inspect: what is a model made of, and does it fit on the GPU? ---- */

/* Kinds of tensors in the order of the rows, and what is in their names: the last that is found counts. */
enum { EXPERTS = 3, REST = 6 };
static const char *const kinds[][2] = {
    {"embedding", "embed_tokens"}, {"attention", "self_attn"}, {"mlp", "mlp."}, {"experts", "experts"},
    {"mlp", "shared_experts"},     {"head", "lm_head"},        {"rest", NULL}};

static int kind_of_tensor(const char *name) {
    int kind = REST;
    for (int k = 0; k < REST; k++)
        if (strstr(name, kinds[k][1])) kind = k;
    return kind;
}

/* Adds the bytes of each kind of tensor and encoding, and the number of weights. */
static void add_weights(cJSON *out, const Tensors *t, const Model *m) {
    double bytes = 0, values = 0, active = 0; /* active: used by one token */
    for (int k = 0; k <= REST; k++)
        for (const Tensor *x = t->tensor; x < t->tensor + t->n; x++) {
            const bool table = !k && m->embed.each != m->head.each;
            const double n = (double)x->values;
            if (!x->bound || kind_of_tensor(x->name) != k) continue;
            LocalText name = text_print("bytes_of_%s_in_%s", kinds[k][0], x->encoding);
            cJSON *sum = cJSON_GetObjectItemCaseSensitive(out, name);
            if (!sum) sum = cJSON_AddNumberToObject(out, name, 0);
            cJSON_SetNumberValue(sum, sum->valuedouble + (double)x->size);
            bytes += (double)x->size, values += n;
            active += k == EXPERTS ? n / m->n_experts * m->top_k : table ? 0 : n;
        }
    json_add(out, "weight_bytes", json_number(bytes), "parameters", json_number(values), "active_parameters",
             json_number(active), NULL);
}

/* The backend's working memory is not known before it opens the model: 1 to 3 GB for 1 to 70 billion parameters. */
static const double work_bytes = 2e9;

/* Bytes of the cache. */
static double bytes_of_token(const Model *m) {
    const int row = m->kv_rank ? m->kv_rank + m->rope_dim : 2 * m->n_kv_heads * m->head_dim;
    return 2.0 * m->n_layers * row + 4;
}

/* Bytes that the GPU with most must hold if several share the model; infinite: they cannot. */
static double most_bytes(const Model *m, int gpus, int context) {
    double most = 0;
    for (int i = 0; i < gpus; i++) {
        const Model *part = gpus == 1 ? m : share_of ? share_of(m, i, gpus) : NULL;
        if (!part) return INFINITY;
        most = fmax(most, (double)backend->weight_bytes(part) + work_bytes + bytes_of_token(part) * context);
    }
    return most;
}

/* Adds what the GPU must hold and how much of it fits. */
static void add_memory(cJSON *out, const Model *m, int context) {
    double token = bytes_of_token(m), weights = (double)backend->weight_bytes(m), fixed = weights + work_bytes;
    double needs[MAX_GPUS + 1]; /* by the number of GPUs */
    Devices d = {0};
    Bytes gpus = {0};
    for (int n = 1; n <= MAX_GPUS; n++)
        if (isfinite(needs[n] = most_bytes(m, n, context))) bytes_print(&gpus, "%s%d", gpus.n ? ", " : "", n);
    backend->describe(&d);
    json_add(out, "cache_bytes_per_token", json_number(token), "gpu_weight_bytes", json_number(weights), "cache_bytes",
             json_number(token * context), "work_bytes", json_number(work_bytes), "gpu_bytes", json_number(needs[1]),
             "gpus", json_word(gpus.data), "gpu", json_word(d.gpus ? d.gpu[0].name : d.problem), NULL);
    bytes_free(&gpus);
    if (!d.gpus) {
        json_add(out, "fits", json_word(NULL), NULL);
        return;
    }
    double room = (double)d.gpu[0].free, fits = fmin(fmax(floor((room - fixed) / token / PAGE) * PAGE, 0), m->context);
    if (!d.gpu[0].usable) fits = 0;
    int needed = 0; /* GPUs, if one has no room for the whole context */
    for (int n = 2; n <= d.gpus && !needed && fits < context; n++)
        if (needs[n] <= room) needed = n;
    LocalText cure = needed     ? text_print("--gpus %d", needed)
                     : fits > 0 ? text_print("--ctx %.0f fits here", fits)
                                : text_print("a GPU with %s free", SIZE((uint64_t)(fixed + token * PAGE)));
    json_add(out, "gpu_bytes_total", json_number((double)d.gpu[0].total), "gpu_bytes_free", json_number(room),
             "context_that_fits", json_number(fits), "fits", cJSON_CreateBool(fits >= context), "suggestion",
             fits < context ? json_word(cure) : NULL, NULL);
}

/* The container of a repository at the hub. Of its files it fetches what stands before the weights. */
static cJSON *hub_json(const Tensors *t, const char *path, const char *name, Error *e) {
    LocalText file = path_join(path, name);
    LocalBytes text = {0};
    return hub_head(name, MOST_HEAD, &text) ? json_parse(text.data, text.n, file, e) : NULL;
}

/* Each file lies in memory, with a hole for its data. Its first eight bytes say how long the header is. */
static bool hub_files(Tensors *t, const char *path, Error *e) {
    if (!safetensors.files(t, path, e)) return false;
    for (TensorFile *f = t->file; f < t->file + t->files; f++) {
        LocalBytes head = {0};
        uint64_t n = 0, size = hub_head(f->name + strlen(path) + 1, sizeof n, &head);
        if (head.n == sizeof n) memcpy(&n, head.data, sizeof n);
        n = le64toh(n); /* if it is wrong, tensors_open() says so */
        if (n <= MOST_HEAD && n + sizeof n <= size) hub_head(f->name + strlen(path) + 1, n + sizeof n, &head);
        if (size) f->fd = memfd_create("head", MFD_CLOEXEC);
        if (size &&
            (f->fd < 0 || ftruncate(f->fd, (off_t)size) || pwrite(f->fd, head.data, head.n, 0) < (ssize_t)head.n))
            return fail(e, NO_ROOM, "%s: there is no memory for its header: %m", f->name);
    }
    return true;
}

/* Adds what there is to say about a model that is here or, `far`, at the hub. False: infer does not run it. */
static bool add_model(cJSON *out, const char *dir, bool far, int context, Error *e) {
    static Container hub;
    static Session s;
    const Model *m = &s.checkpoint.model;
    hub = safetensors, hub.files = hub_files, hub.json = hub_json;
    bool ok = far ? checkpoint_open_as(&hub, &s.checkpoint, dir, e)
                  : session_open(&s, dir, NEED_CHECKPOINT | USE_TOKENIZER, e);
    if (ok && !model_has_context(m, context, e)) die(e);
    cJSON_AddBoolToObject(out, "supported", ok);
    if (ok) {
        json_add(out, "family", json_word(s.checkpoint.family), "layers", json_number(m->n_layers), "width",
                 json_number(m->dim), "heads", json_number(m->n_heads), "kv_heads", json_number(m->n_kv_heads),
                 "head_size", json_number(m->head_dim), "experts", json_number(m->n_experts), "experts_per_token",
                 json_number(m->top_k), "vocabulary", json_number(m->vocab), "context", json_number(m->context), NULL);
        const char *chat = s.has_chat ? s.chat.name : "none: its text is continued raw";
        if (s.tokenizer) cJSON_AddStringToObject(out, "chat_format", chat); /* none is fetched from the hub */
        if (s.has_chat && s.chat.answer != &harmony)
            json_add(out, "thoughts", json_word(s.chat.thoughts ? *s.chat.thoughts : "none: they are text"), "calls",
                     json_word(s.chat.calls ? *s.chat.calls : "none: they are text"), NULL);
        add_weights(out, &s.checkpoint.tensors, m);
        add_memory(out, m, context ? context : m->context);
    }
    return ok;
}

/* A row is one number, and says nothing of experts where there are none. A bar shows what the GPU must hold. */
static void print_facts(const cJSON *facts) {
    static const char *const shares[] = {"gpu_weight_bytes", "cache_bytes", "work_bytes"};
    const cJSON *x, *experts = json_get(facts, "experts"), *card = json_get(facts, "gpu_bytes_total");
    cJSON_ArrayForEach(x, facts) {
        char kind[16], encoding[32], name[64], *c = name;
        double part[3], whole = fmax(x->valuedouble, card ? card->valuedouble : 0);
        const bool tensors = sscanf(x->string, "bytes_of_%15[^_]_in_%31s", kind, encoding) == 2;
        const char *size = SIZE((uint64_t)x->valuedouble), *count = COUNT((uint64_t)x->valuedouble);
        const char *number = strstr(x->string, "bytes") ? size : count, *yes = cJSON_IsTrue(x) ? "yes" : "no";
        const char *text = cJSON_IsNumber(x) ? number : cJSON_IsBool(x) ? yes : x->valuestring;
        if (experts && experts->valueint < 2 && text_listed("experts experts_per_token active_parameters", x->string))
            continue;
        snprintf(name, sizeof name, tensors ? "%s, %s" : "%s", tensors ? kind : x->string, encoding);
        while (!tensors && (c = strchr(c, '_'))) *c = ' ';
        LocalText label = text_print("%-24s", name);
        put_text(stdout, NULL, label, text ? text : "unknown");
        if (strcmp(x->string, "gpu_bytes") || !terminal) continue;
        for (int i = 0; i < 3; i++) part[i] = json_get(facts, shares[i])->valuedouble / whole;
        terminal->bar(stdout, MIN(columns(stdout), 60), part, 3);
        puts("\n█ weights  ▓ cache  ▒ to work in  ░ free");
    }
}

static int run_inspect(const char *model) {
    Error e;
    LocalText dir = model_find(model, &e);
    /* the hub is contacted only for an ORG/NAME that is not completely here */
    bool far = strchr(model, '/') && !strchr("/.~", *model);
    if (dir) far &= strcmp(dir, model) && !model_entry(dir).complete;
    if (!far && !dir) die(&e);
    cJSON *out = json_object("name", json_word(model), NULL);
    const uint64_t to_fetch = far ? hub_list(model) : 0;
    bool ok = add_model(out, far ? model : dir, far, given.context, &e);
    if (far) cJSON_AddNumberToObject(out, "bytes_to_download", (double)to_fetch);
    if (!far) cJSON_AddBoolToObject(out, "complete", model_entry(dir).complete);
    if (!ok) cJSON_AddStringToObject(out, "problem", e.text);
    if (!given.json) print_facts(out);
    json_print(out, given.json);
    if (!ok) die(&e);
    return DONE;
}

/* ---- list: which models are here? ---- */

static uint64_t counted; /* bytes of files */
static int count_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    counted += type == FTW_F ? (uint64_t)st->st_size : 0;
    return 0;
}

/* Bytes of all files in a folder; links do not count. */
static uint64_t folder_bytes(const char *path) {
    counted = 0;
    nftw(path, count_one, 16, FTW_PHYS);
    return counted;
}

/* Bytes of a model that are here: of its weights or, before it is complete, of all that has arrived. */
static uint64_t bytes_of_entry(const ModelEntry *m) {
    LocalText folder = NULL;
    LocalText locks = NULL;
    bool part;
    LocalText name = m->complete ? NULL : hub_owner(m->path, &folder, &locks, &part);
    return m->complete ? m->bytes : folder_bytes(name ? folder : m->path);
}

/* What a model is. Its weights are not read, and need not be here. */
static cJSON *describe(const ModelEntry *m) {
    LOCAL(checkpoint_close) Checkpoint c = {0};
    LocalJson config = NULL;
    Error e;
    size_t bytes[MAX_TYPES + 1] = {0}, most = 0; /* by type; the first: none */
    const bool known = checkpoint_config(&c, &config, m->path, &e);
    const char *family = json_string(config, "model_type");
    const char *encoding = json_string(json_get(config, "quantization_config"), "quant_method");
    if (!encoding) encoding = json_string(config, "dtype");
    if (!encoding) encoding = json_string(config, "torch_dtype"); /* its older name */
    for (const Tensor *one = c.tensors.tensor; one < c.tensors.tensor + c.tensors.n; one++) {
        size_t *sum = bytes + 1 + type_of(one);
        if ((*sum += one->size) > most) most = *sum, encoding = one->dtype;
    }
    LocalText capitals = text_print("%s", encoding ? encoding : "");
    for (char *c = capitals; *c; c++) *c = (char)toupper((unsigned char)*c);
    return json_object("name", json_word(m->name), "family", json_word(family ? family : ""), "bytes",
                       json_number((double)bytes_of_entry(m)), "encoding", json_word(capitals), "supported",
                       cJSON_CreateBool(known), "complete", cJSON_CreateBool(m->complete), "path", json_word(m->path),
                       NULL);
}

/* Prints a model as a row or, if its path is wanted, a line, whatever the names of folders hold. */
static void print_model(FILE *f, const char *name, const cJSON *model, bool path) {
    const char *state = json_true(model, "complete") ? "complete" : "incomplete";
    if (!json_true(model, "supported")) state = "not supported";
    LocalText row = text_print("%8s %-11s %-6s %s", SIZE((uint64_t)json_get(model, "bytes")->valuedouble),
                               json_string(model, "family"), json_string(model, "encoding"), state);
    LocalText line = path ? text_print("%-36s %s  %s", name, row, json_string(model, "path")) : text_print("%s", name);
    LocalBytes shown = {0};
    bytes_shown(&shown, line, strlen(line), false);
    path ? (void)puts(shown.data) : print_row(f, shown.data, 36, row);
}

static int run_list(const char *model) {
    LOCAL(models_free) Models here = models_list();
    Error e;
    cJSON *all = cJSON_CreateArray();
    for (int i = 0; i < here.n; i++) cJSON_AddItemToArray(all, describe(here.entry + i));
    for (const cJSON *each = given.json ? NULL : all->child; each; each = each->next)
        print_model(stdout, json_string(each, "name"), each, !isatty(STDOUT_FILENO));
    if (!here.n && !here.unread) fputs("no model is here; infer download ORG/NAME fetches one\n", stderr);
    json_print(all, given.json);
    if (here.unread) fail(&e, NO_NETWORK, "%s; HF_HUB_CACHE chooses another cache", here.unread), die(&e);
    return DONE;
}

int list_choose(const Models *here) {
    char line[64];
    int choice = 0;
    fputs("Available models:\n", stderr);
    for (int i = 0; i < here->n; i++) {
        LocalJson model = describe(here->entry + i);
        LocalText name = text_print("%3d. %s", i + 1, here->entry[i].name);
        print_model(stderr, name, model, false);
    }
    while (!choice && isatty(STDIN_FILENO) && isatty(STDERR_FILENO)) {
        fprintf(stderr, "Select model (1-%d): ", here->n);
        if (!fgets(line, sizeof line, stdin) && fputc('\n', stderr)) break;
        line[strcspn(line, "\n")] = 0;
        if (!text_whole(line, 1, here->n, &choice))
            fprintf(stderr, "A number from 1 to %d is needed; Ctrl+C leaves.\n", here->n);
    }
    return choice;
}

/* ---- rm: removes one ---- */

static Error removing;

/* Removes a file or an empty folder. Stops at a lock that a process holds. */
static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    const int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = type == FTW_F && same(strrchr(path, '.'), ".lock") ? open(path, flags) : -1;
    bool held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB);
    if (fd >= 0) close(fd);
    if (held) return !fail(&removing, FAILED, "another process is downloading this model: end that first");
    return remove(path) && !fail(&removing, NO_NETWORK, "%.*s: %m; make this folder writable", ftw->base - 1, path);
}

/* Removes a folder, if it is there, with all its content. It does not follow links. */
static void remove_folder(const char *path) {
    const int failed = nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); /* above 0: remove_one() said why */
    if (failed < 0 && errno != ENOENT) fail(&removing, NO_NETWORK, "%s: %m", path);
    if (removing.code) die(&removing);
}

static int run_rm(const char *model) {
    const bool repository = hub_repository(model);
    bool part = false;
    LocalText cache = hub_cache();
    LocalText named = hub_folder(model);
    LocalText folder = NULL;
    LocalText locks = NULL;
    LocalText path = repository && !access(named, F_OK) ? text_print("%s", named) : model_find(model, &removing);
    LocalText name = path ? hub_owner(path, &folder, &locks, &part) : NULL;
    if (path && strcmp(path, model) && strchr(model, '@'))
        fail(&removing, USAGE, "infer rm removes all revisions of a model: name it without @");
    else if (!name && (path || !repository))
        fail(&removing, USAGE, "'%.99s' is not in the hub's cache, %s; infer rm removes nothing else",
             path ? path : model, cache);
    else if (name && part && !strcasestr(name, model)) /* not the repository is meant */
        fail(&removing, USAGE, "%s is a part of %s: infer rm %s removes all of it", path, name, name);
    if (removing.code) die(&removing);
    const uint64_t bytes = folder_bytes(folder);
    LocalText question = text_print("Remove %s, %s?", name, SIZE(bytes)); /* MODEL may be a part of its name */
    if (terminal && terminal->ask(question) == 'n') return FAILED;
    remove_folder(locks);
    remove_folder(folder);
    fprintf(stderr, "removed %s: %s freed\n", name, SIZE(bytes));
    return DONE;
}

static const Option json_options[] = {{0, "json", NULL, SWITCH, &given.json, .help = "as JSON"}, {0}};
static const Option inspect_options[] = {{0, "ctx", "N", WHOLE, &given.context, 1, 1 << 24,
                                          .help = "tokens of context (as many as the model and the memory allow)"},
                                         {0}};
const Command inspect = {
    "inspect", "MODEL", "what a model is made of, and whether it fits", {json_options, inspect_options}, run_inspect};
const Command list = {"list", "", "the models in ./models and the hub's cache", {json_options}, run_list};
const Command rm = {"rm", "MODEL", "remove a model from the hub's cache", {NULL}, run_rm};
