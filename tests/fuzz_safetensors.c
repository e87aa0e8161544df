/* Any bytes as a safetensors file. Promises: it is refused with a message, or every tensor lies inside the file, is
 * found by its name and has the bytes that its shape needs; as weights of a small gpt-oss, of a small llama whose
 * matrices are encoded, or of a small DeepSeek, whose kv_b_proj is cut into heads, they are refused or bound, and then
 * every row can be decoded. */
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
    "\"tie_word_embeddings\":true,\"quantization_config\":{\"quant_method\":\"gptq\",\"weight_block_size\":[16,16]}}",
    "{\"model_type\":\"deepseek_v2\",\"num_hidden_layers\":1,\"hidden_size\":32,\"intermediate_size\":32,"
    "\"vocab_size\":4,\"num_attention_heads\":2,\"num_key_value_heads\":2,\"q_lora_rank\":null,"
    "\"kv_lora_rank\":32,\"qk_nope_head_dim\":16,"
    "\"qk_rope_head_dim\":2,\"v_head_dim\":16,\"n_routed_experts\":2,\"num_experts_per_tok\":1,"
    "\"moe_intermediate_size\":32,\"first_k_dense_replace\":1,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,"
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

static void check_view(const Linear *w, size_t n) {
    for (int i = 0; w->rows && i < w->n; i++)
        for (const View *v = &w->each[i].data; v <= &w->each[i].zero; v++) {
            const size_t size = v->lines ? (size_t)(v->lines - 1) * v->stride + v->bytes : 0;
            assert(v->offset <= n && size <= n - v->offset);
            touch(v->data, size);
        }
}

/* Every view lies inside the file, and the twin can decode every row. */
static void check_views(const Model *m, size_t n) {
    const Linear *all[] = LINEARS(m->layer);
    check_view(&m->embed, n), check_view(&m->head, n);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) check_view(all[i], n);
    decode_all(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    Error e = {0};
    Tensors t;
    Checkpoint c;
    assert(!ftruncate(fd, 0) && pwrite(fd, data, n, 0) == (ssize_t)n);
    bool ok = tensors_open(&t, NULL, weights[0], &e);
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
