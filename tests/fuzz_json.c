/* Any bytes as JSON. Promises: json_parse never reads out of bounds and takes only strict JSON, so that what it took
 * is taken again when written out; as a conversation it is refused or rendered, with one <|start|> a message whatever
 * its texts are; as config.json of a small model, plain or encoded, or as the index of two shards, it is refused with a
 * message or fits the weights, every row of which can then be decoded. */
#include "chat.h"
#include "host.h"
#include "parrot.h"
#include "reference.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const models[] = {"llama3",
                                     "encodings/fp8_block",
                                     "encodings/packed4_zero",
                                     "encodings/gptq4_order",
                                     "encodings/experts_awq4",
                                     "encodings/experts_nvfp4"};
enum { MODELS = sizeof models / sizeof *models };
static char dir[MODELS][32], config[MODELS][64], weights[MODELS][64];
static char shards[] = "/tmp/infer-fuzz-XXXXXX", file[3][64]; /* the index and what it may name */
static Tokenizer *tokenizer;
static Chat chat;

static void clean(void) {
    for (int i = 0; i < MODELS; i++) {
        unlink(config[i]);
        unlink(weights[i]);
        rmdir(dir[i]);
    }
    for (int i = 0; i < 3; i++) unlink(file[i]);
    rmdir(shards);
}

/* Puts a link to a file of the fixtures at `path`. */
static void link_to(const char *fixture, const char *path) {
    char *target = realpath(fixture, NULL);
    assert(target && !symlink(target, path));
    free(target);
}

static void write_file(const char *path, const uint8_t *data, size_t n) {
    FILE *f = fopen(path, "wb");
    assert(f && fwrite(data, 1, n, f) == n && !fclose(f));
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    Error e;
    (void)argc, (void)argv;
    tokenizer = parrot_open(NULL, &e);
    assert(tokenizer && chat_open(&chat, tokenizer, "", false, &e) && mkdtemp(shards) && !atexit(clean));
    for (int i = 0; i < MODELS; i++) {
        char from[128];
        strcpy(dir[i], "/tmp/infer-fuzz-XXXXXX");
        assert(mkdtemp(dir[i]));
        snprintf(config[i], sizeof *config, "%s/config.json", dir[i]);
        snprintf(weights[i], sizeof *weights, "%s/model.safetensors", dir[i]);
        snprintf(from, sizeof from, "tests/fixtures/%s/model.safetensors", models[i]);
        link_to(from, weights[i]);
    }
    snprintf(file[0], sizeof *file, "%s/model.safetensors.index.json", shards);
    snprintf(file[1], sizeof *file, "%s/a", shards);
    snprintf(file[2], sizeof *file, "%s/b", shards);
    link_to("tests/fixtures/odd/model-00001-of-00002.safetensors", file[1]);
    link_to("tests/fixtures/odd/model-00002-of-00002.safetensors", file[2]);
    return 0;
}

static void as_conversation(const cJSON *json) {
    Error e = {0};
    Ids ids = {0};
    Conversation c;
    conversation_init(&c);
    bool ok = conversation_parse(&c, json, &e) && chat_render(&chat, &c, true, &ids, &e);
    assert(ok || (e.code == USAGE && *e.text));
    size_t starts = 0;
    for (size_t i = 0; i < ids.n; i++) starts += ids.data[i] == chat.control[0];
    assert(starts <= (size_t)c.messages + 3); /* system, developer and the prompt's end */
    conversation_free(&c);
    ids_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    Error e = {0};
    cJSON *json = json_parse((const char *)data, n, "input", &e);
    assert(json || (e.code == BAD_MODEL && *e.text));
    if (!json) return 0;
    char *text = json_text(json);
    cJSON *again = json_parse(text, strlen(text), "output", &e);
    assert(again);
    cJSON_Delete(again);
    free(text);
    as_conversation(json);
    bool index = json_get(json, "weight_map");
    cJSON_Delete(json);
    Checkpoint c;
    Tensors t;
    size_t which = n % MODELS;
    write_file(config[which], data, n);
    bool ok = checkpoint_open(&c, dir[which], &e);
    assert(ok || (e.code == BAD_MODEL && *e.text));
    if (ok) decode_all(&c.model), checkpoint_close(&c);
    if (!index) return 0;
    write_file(file[0], data, n);
    ok = tensors_open(&t, NULL, shards, &e);
    assert(ok || (e.code == BAD_MODEL && *e.text));
    for (int i = 0; ok && i < t.n; i++) assert(tensors_find(&t, t.tensor[i].name) == t.tensor + i);
    if (ok) tensors_close(&t);
    return 0;
}
