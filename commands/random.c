/* random.c: a container that has a config.json and no tensors. When binding requires one, it becomes a range of a file
 * in memory, which any backend reads like another file. Weights are finite, with a root mean square of about
 * 1 / sqrt(columns); norms are 1, other vectors 0.
 *
 * The file consists of pools. A pool has what the tensors of one type and size of numbers need: random codes, or one
 * value again and again. Many matrices share its bytes, but each of random codes begins at another block. */
#include "random.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/param.h>
#include <unistd.h>

enum {
    POOLS = 64,
    FIRST_BLOCKS = 1 << 16 /* a matrix begins at one of them */,
    PART = 1 << 20 /* bytes filled at once */
};
#define POOL_SIZE ((size_t)1 << 36) /* most bytes of a pool: where it begins in the file is known before its size */

typedef struct {
    Type type;
    bool random;
    float x; /* what TypeInfo.put() stores; random blocks of one value: the largest */
    int tensors;
    size_t used, filled; /* bytes */
} Pool;

static struct {
    bool mixed; /* Q4_K_M */
    Type type;
    unsigned char *map;
    int n;
    Pool pool[POOLS];
    float rms[MAX_TYPES]; /* see rms_of(); 0: not known yet */
} made;

/* ---- what is in a pool ---- */

static uint64_t next_random(uint64_t *x) { /* xorshift64 (Marsaglia, 2003) */
    *x ^= *x << 13, *x ^= *x >> 7;
    return *x ^= *x << 17;
}

/* Codes are random, or the zero of their type. Of those from -8 to 7 the lowest becomes 0: their mean would be below 0,
 * and grow from layer to layer. */
static void make_block(const Pool *p, unsigned char *block, uint64_t *random) {
    const TypeInfo *t = types + p->type;
    const bool number = t->put && t->values == 1; /* put() writes all of it */
    float x = p->x;
    if (!p->random) memset(block, t->bits == 4 ? t->zero * 0x11 : t->zero, (size_t)t->bytes);
    for (int i = 0; p->random && !number && i < t->bytes; i += 8) {
        const uint64_t bits = next_random(random);
        memcpy(block + i, &bits, (size_t)MIN(8, t->bytes - i));
    }
    for (int i = 0; p->random && !t->put && t->zero == 8 && i < t->bytes; i++)
        block[i] |= (block[i] & 0x0F ? 0 : 0x08) | (block[i] & 0xF0 ? 0 : 0x80);
    if (p->random && number) x *= (float)(int32_t)(next_random(random) >> 32) * 0x1p-31f;
    if (t->put) t->put(block, x);
}

/* Root mean square of random weights of a type, if x is 1. */
static float rms_of(Type type) {
    enum { WEIGHTS = 1 << 16 };
    const Pool p = {.type = type, .random = true, .x = 1};
    unsigned char block[256];
    uint64_t random = 1;
    double sum = 0;
    for (int i = 0; made.rms[type] <= 0 && i < WEIGHTS; i++) {
        if (i % types[type].values == 0) make_block(&p, block, &random);
        const Weight w = types[type].weight(block, i % types[type].values);
        const double value = (double)(w.a * (w.q - (float)(types[type].put ? 0 : types[type].zero)) + w.b);
        sum += value * value;
    }
    if (made.rms[type] <= 0) made.rms[type] = (float)sqrt(sum / WEIGHTS);
    return made.rms[type];
}

typedef struct { /* a pool being filled by several threads, each part with its number as seed */
    const Pool *pool;
    size_t parts;
    atomic_size_t next;
} Filling;

/* A thread: fills parts until none is left. */
static void *fill_parts(void *data) {
    Filling *f = data;
    const size_t block = (size_t)types[f->pool->type].bytes, size = PART / block * block;
    for (size_t part; (part = f->next++) < f->parts;) {
        unsigned char *bytes = made.map + (size_t)(f->pool - made.pool) * POOL_SIZE + part * size;
        uint64_t random = (part + 1) * 0x9E3779B97F4A7C15u;
        for (size_t at = 0; at < size; at += block) make_block(f->pool, bytes + at, &random);
    }
    return NULL;
}

/* Fills a pool up to the end of its tensors. */
static void fill(Pool *p) {
    enum { THREADS = 16 };
    const size_t block = (size_t)types[p->type].bytes, size = PART / block * block;
    Filling f = {.pool = p, .parts = (p->used + size - 1) / size, .next = p->filled / size};
    pthread_t thread[THREADS];
    int n = 0;
    while (n < THREADS && f.parts > 1 && !pthread_create(thread + n, NULL, fill_parts, &f)) n++;
    fill_parts(&f);
    while (n > 0) pthread_join(thread[--n], NULL);
    p->filled = f.parts * size;
}

void random_weights_fill(void) {
    for (int i = 0; i < made.n; i++) fill(made.pool + i);
}

/* ---- the container ---- */

static cJSON *json(const Tensors *t, const char *path, const char *name, Error *e) {
    return safetensors.json(t, path, name, e);
}

static Type type_named(const char *name) {
    Type type = BF16;
    while (type < types_n && strcasecmp(types[type].name, name)) type++;
    return type < types_n ? type : NO_TYPE;
}

/* The mixture is llama.cpp's Q4_K_M: Q6_K for the head, and for v and down in the first and last eighth of the layers
 * and in every third between. It has other rules for models of eight experts and for Llama's 70B. */
static Type type_of_matrix(const Loader *load, const char *name) {
    const char *layer = strstr(load->prefix, "layers."), *dot = strrchr(name, '.'), *last = dot ? dot + 1 : name;
    const bool in_blocks = made.mixed || (types[made.type].put && types[made.type].values > 1);
    if (text_listed("router gate", last) || (!layer && !in_blocks)) return BF16;
    if (!made.mixed) return made.type;
    int i = layer ? (int)strtol(layer + 7, NULL, 10) : 0, n = load->c->model.n_layers;
    bool some = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
    bool more =
        layer ? some && text_listed("v_proj kv_b_proj down_proj w2", last) : load->tied || !strcmp(name, "lm_head");
    return type_named(more ? "Q6_K" : "Q4_K");
}

/* The file is sparse, and so is what is mapped. */
static bool open_file(Tensors *t, Error *e) {
    const size_t size = POOLS * POOL_SIZE;
    int fd = memfd_create("weights", MFD_CLOEXEC);
    void *map = fd < 0 || ftruncate(fd, (off_t)size)
                    ? MAP_FAILED
                    : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED) return fail(e, NO_ROOM, "there is no memory for random weights: %m"), close(fd), false;
    tensors_add_file(t, text_print("random weights"));
    t->file->fd = fd, t->file->map = made.map = map, t->file->size = size;
    return true;
}

static void make(Loader *load, Tensor *t, const char *suffix, Type type, const Linear *w) {
    const bool scale = w && strstr(suffix, "scale"), zero = w && strstr(suffix, "zero");
    const bool whole = types[type].put && (types[type].values > 1 || is_float(type)); /* without a scale elsewhere */
    Tensors *all = &load->c->tensors;
    Pool wanted = {.type = type, .random = w && !scale && !zero, .x = strstr(t->name, "norm") ? 1 : 0}, *p = made.pool;
    if (w) wanted.x = scale || whole ? 1 / sqrtf((float)w->cols) / rms_of(scale ? w->type : type) : 1;
    if (!all->files && !open_file(all, load->e)) return;
    while (p < made.pool + made.n && (p->type != type || p->random != wanted.random || p->x != wanted.x)) p++;
    if (p == made.pool + POOLS) {
        fail(load->e, BAD_MODEL, "more than %d kinds of random weights", POOLS);
        return;
    }
    if (p == made.pool + made.n) made.n++, *p = wanted;
    const size_t begin = p->random ? (size_t)p->tensors++ * 7919 % FIRST_BLOCKS * (size_t)types[type].bytes : 0;
    p->used = MAX(p->used, begin + t->size);
    t->offset = (size_t)(p - made.pool) * POOL_SIZE + begin, t->data = all->file->map + t->offset;
    if (p->used > POOL_SIZE) fail(load->e, NO_ROOM, "a matrix of %zu bytes is too large", t->size);
    if (!failed(load) && !p->random) fill(p); /* binding reads vectors */
}

static const Container random_weights = {.json = json, .type = type_of_matrix, .make = make, .whole_norms = true};

bool random_weights_open(Checkpoint *c, const char *dir, const char *encoding, Error *e) {
    made.n = 0, made.type = encoding ? type_named(encoding) : BF16;
    made.mixed = encoding && !strcasecmp(encoding, "Q4_K_M");
    if (encoding && !packings[0]) return fail(e, USAGE, "this build has no encodings: --encoding is not known");
    if (made.mixed || (made.type != NO_TYPE && made.type != E8M0))
        return checkpoint_open_as(&random_weights, c, dir, e);
    LocalBytes names = {0};
    for (Type type = BF16; type < types_n; type++)
        if (type != E8M0) bytes_print(&names, ", %s", types[type].name);
    return fail(e, USAGE, "--encoding must be one of Q4_K_M%s, not '%.40s'", names.data, encoding);
}
