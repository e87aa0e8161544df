/* Any bytes as a safetensors file. Promises: it is refused with a message, or every tensor lies inside the file, is
 * found by its name and has the bytes that its shape needs; as weights of a small gpt-oss, or of a small llama whose
 * matrices are encoded, they are refused or bound, and then every row can be decoded. */
#include "host.h"
#include "reference.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *const configs[] = {
    "{\"model_type\":\"gpt_oss\",\"num_hidden_layers\":1,\"hidden_size\":32,\"intermediate_size\":32,"
    "\"vocab_size\":4,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":2,"
    "\"num_local_experts\":1,\"num_experts_per_tok\":1,\"max_position_embeddings\":64,"
    "\"rms_norm_eps\":1e-5,\"sliding_window\":4,\"tie_word_embeddings\":true}",
    "{\"model_type\":\"llama\",\"num_hidden_layers\":1,\"hidden_size\":32,\"intermediate_size\":48,\"vocab_size\":4,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,"
    "\"tie_word_embeddings\":true,\"quantization_config\":{\"quant_method\":\"gptq\",\"weight_block_size\":[16,16]}}"};
enum { CONFIGS = sizeof configs / sizeof *configs };
static char dir[CONFIGS][32], config[CONFIGS][64], weights[CONFIGS][64];
static int fd;

static void clean(void) {
    for (int i = 0; i < CONFIGS; i++) {
        unlink(config[i]);
        unlink(weights[i]);
        rmdir(dir[i]);
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    char path[64];
    (void)argc, (void)argv;
    fd = memfd_create("model", MFD_CLOEXEC);
    assert(fd >= 0 && !atexit(clean));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    for (int i = 0; i < CONFIGS; i++) {
        strcpy(dir[i], "/tmp/infer-fuzz-XXXXXX");
        assert(mkdtemp(dir[i]));
        snprintf(weights[i], sizeof *weights, "%s/model.safetensors", dir[i]);
        snprintf(config[i], sizeof *config, "%s/config.json", dir[i]);
        assert(!symlink(path, weights[i]));
        FILE *f = fopen(config[i], "wb");
        assert(f && fputs(configs[i], f) >= 0 && !fclose(f));
    }
    return 0;
}

/* The sanitizer says where a byte cannot be read. */
static void touch(const unsigned char *data, size_t n) {
    static volatile unsigned char byte;
    if (n) byte = data[0], byte = data[n - 1];
    (void)byte;
}

/* Every view lies inside the file, and the twin can decode every row. */
static void check_views(const Model *m, size_t n) {
    const Layer *l = m->layer;
    const Linear *all[] = {&m->embed, &m->head, &l->q, &l->k, &l->v, &l->o, &l->router, &l->gate, &l->up, &l->down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        for (int j = 0; j < 3 && all[i]->rows; j++) {
            const Stored *one = all[i]->each;
            const View v = j == 0 ? one->data : j == 1 ? one->scale : one->zero;
            const size_t size = v.lines ? (size_t)(v.lines - 1) * v.stride + v.bytes : 0;
            assert(v.offset <= n && size <= n - v.offset);
            touch(v.data, size);
        }
    }
    decode_all(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    Error e = {0};
    Tensors t;
    Checkpoint c;
    assert(!ftruncate(fd, 0) && pwrite(fd, data, n, 0) == (ssize_t)n);
    bool ok = tensors_open(&t, weights[0], &e);
    assert(ok || (e.code == BAD_MODEL && *e.text));
    if (!ok) return 0;
    for (int i = 0; i < t.n; i++) {
        assert(t.tensor[i].offset <= n && t.tensor[i].size <= n - t.tensor[i].offset);
        assert(tensors_find(&t, t.tensor[i].name) == t.tensor + i);
        touch(t.tensor[i].data, t.tensor[i].size);
    }
    tensors_close(&t);
    for (int which = 0; which < CONFIGS; which++) {
        ok = checkpoint_open(&c, dir[which], &e);
        assert(ok || (e.code == BAD_MODEL && *e.text));
        if (!ok) continue;
        check_views(&c.model, n);
        checkpoint_close(&c);
    }
    return 0;
}
