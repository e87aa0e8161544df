/* Any bytes as a safetensors file. Promises: it is refused with a message, or every tensor lies inside the file, is
 * found by its name and has the bytes that its shape needs; as weights of a small gpt-oss they are refused or bound,
 * and then every view lies inside its tensor. */
#include "host.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char dir[] = "/tmp/infer-fuzz-XXXXXX", config[64], weights[64];
static int fd;

static void clean(void) {
    unlink(config);
    unlink(weights);
    rmdir(dir);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    char path[64];
    (void)argc, (void)argv;
    fd = memfd_create("model", MFD_CLOEXEC);
    assert(fd >= 0 && mkdtemp(dir) && !atexit(clean));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    snprintf(weights, sizeof weights, "%s/model.safetensors", dir);
    snprintf(config, sizeof config, "%s/config.json", dir);
    assert(!symlink(path, weights));
    FILE *f = fopen(config, "wb");
    assert(f &&
           fputs("{\"model_type\":\"gpt_oss\",\"num_hidden_layers\":1,\"hidden_size\":32,\"intermediate_size\":32,"
                 "\"vocab_size\":4,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":2,"
                 "\"num_local_experts\":1,\"num_experts_per_tok\":1,\"max_position_embeddings\":64,"
                 "\"rms_norm_eps\":1e-5,\"sliding_window\":4,\"tie_word_embeddings\":true}",
                 f) >= 0 &&
           !fclose(f));
    return 0;
}

/* The sanitizer says where a byte cannot be read. */
static void touch(const unsigned char *data, size_t n) {
    static volatile unsigned char byte;
    if (n) byte = data[0], byte = data[n - 1];
    (void)byte;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    Error e = {0};
    Tensors t;
    Checkpoint c;
    assert(!ftruncate(fd, 0) && pwrite(fd, data, n, 0) == (ssize_t)n);
    bool ok = tensors_open(&t, weights, &e);
    assert(ok || (e.code == BAD_MODEL && *e.text));
    if (!ok) return 0;
    for (int i = 0; i < t.n; i++) {
        assert(t.tensor[i].offset <= n && t.tensor[i].size <= n - t.tensor[i].offset);
        assert(tensors_find(&t, t.tensor[i].name) == t.tensor + i);
        touch(t.tensor[i].data, t.tensor[i].size);
    }
    tensors_close(&t);
    ok = checkpoint_open(&c, dir, &e);
    assert(ok || (e.code == BAD_MODEL && *e.text));
    if (!ok) return 0;
    const Layer *l = c.model.layer;
    const Linear *all[] = {&c.model.embed, &c.model.head, &l->q,    &l->k,  &l->v,
                           &l->o,          &l->router,    &l->gate, &l->up, &l->down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const View *v = &all[i]->data;
        assert(v->offset <= n && v->size <= n - v->offset);
        assert((size_t)(all[i]->rows - 1) * v->stride < v->size);
        touch(v->data, v->size);
    }
    checkpoint_close(&c);
    return 0;
}
