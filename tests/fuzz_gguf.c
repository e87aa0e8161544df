/* Any bytes as a GGUF file. Promises: it is refused with a message, or every tensor lies inside the file; as a model it
 * is refused or bound, and then every view lies inside the file; as a tokenizer it is refused, or encodes and decodes
 * some text. */
#include "host.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char dir[] = "/tmp/infer-fuzz-XXXXXX", path[64];
static int fd;

static void clean(void) {
    unlink(path);
    rmdir(dir);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    char link[64];
    (void)argc, (void)argv;
    fd = memfd_create("model", MFD_CLOEXEC);
    assert(fd >= 0 && mkdtemp(dir) && !atexit(clean));
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    snprintf(path, sizeof path, "%s/model.gguf", dir);
    assert(!symlink(link, path));
    return 0;
}

/* The sanitizer says where a byte cannot be read. */
static void touch(const unsigned char *data, size_t n) {
    static volatile unsigned char byte;
    if (n) byte = data[0], byte = data[n - 1];
    (void)byte;
}

static void check_view(const Linear *w, const View *v, size_t n) {
    const size_t size = (size_t)(v->lines - 1) * v->stride + v->bytes;
    assert(v->offset <= n && size <= n - v->offset && v->lines == w->rows);
    touch(v->data, size);
}

static void try_model(size_t n) {
    Checkpoint c;
    Error e = {0};
    bool ok = checkpoint_open(&c, path, &e);
    assert(ok || (e.code == BAD_MODEL && *e.text));
    if (!ok) return;
    for (int i = 0; i < c.model.n_layers; i++) {
        const Linear *all[] = LINEARS(c.model.layer + i);
        for (size_t j = 0; j < sizeof all / sizeof *all; j++)
            for (int k = 0; all[j]->rows && k < all[j]->n; k++) check_view(all[j], &all[j]->each[k].data, n);
    }
    check_view(&c.model.embed, &c.model.embed.each->data, n);
    checkpoint_close(&c);
}

static cJSON *file_json(const void *tensors, const char *name, Error *e) {
    *e = (Error){0};
    return ((const Tensors *)tensors)->container->json(tensors, path, name, e);
}

static void try_tokenizer(const Tensors *tensors) {
    static const char text[] = "Hello, w\xC3\xB6rld 123 <|end|>\n  a";
    Error e = {0};
    Ids ids = {0};
    Bytes out = {0};
    Decoder d = {0};
    Tokenizer *t = tokenizer_open(path, file_json, tensors, &e);
    assert(t || (e.code == BAD_MODEL && *e.text));
    if (t && tokenizer_encode(t, text, sizeof text - 1, CONTROL_TOKENS | WITH_TEMPLATE, &ids, &e))
        for (size_t i = 0; i < ids.n; i++) {
            assert(ids.data[i] >= 0 && ids.data[i] < tokenizer_size(t));
            tokenizer_decode(t, &d, ids.data[i], &out);
        }
    tokenizer_flush(&d, &out);
    assert(utf8_check(out.data ? out.data : "", out.n) == out.n);
    tokenizer_close(t);
    ids_free(&ids);
    bytes_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    Error e = {0};
    Tensors t;
    assert(!ftruncate(fd, 0) && pwrite(fd, data, n, 0) == (ssize_t)n);
    bool ok = tensors_open(&t, NULL, path, &e);
    assert(ok || (e.code == BAD_MODEL && *e.text));
    if (!ok) return 0;
    for (int i = 0; i < t.n; i++) {
        assert(t.tensor[i].offset <= n && t.tensor[i].size <= n - t.tensor[i].offset);
        touch(t.tensor[i].data, t.tensor[i].size);
    }
    try_tokenizer(&t);
    tensors_close(&t);
    try_model(n);
    return 0;
}
