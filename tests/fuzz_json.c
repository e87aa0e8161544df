/* Any bytes as JSON. Promises: json_parse never reads out of bounds and takes only strict JSON, so that what it took
 * is taken again when written out; as a conversation it is refused or rendered, with one <|start|> a message whatever
 * its texts are; as config.json of a small llama it is refused with a message or fits the weights. */
#include "chat.h"
#include "model.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char dir[] = "/tmp/infer-fuzz-XXXXXX", config[64], weights[64];
static Tokenizer *tokenizer;
static Chat chat;

static void clean(void) {
    unlink(config);
    unlink(weights);
    rmdir(dir);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    Error e;
    (void)argc, (void)argv;
    char *model = realpath("tests/fixtures/llama3/model.safetensors", NULL);
    tokenizer = tokenizer_open("tests/fixtures/parrot/tokenizer.json", &e);
    assert(model && tokenizer && chat_open(&chat, tokenizer) && mkdtemp(dir) && !atexit(clean));
    snprintf(config, sizeof config, "%s/config.json", dir);
    snprintf(weights, sizeof weights, "%s/model.safetensors", dir);
    assert(!symlink(model, weights));
    free(model);
    return 0;
}

static void as_conversation(const cJSON *json) {
    Error e = {0};
    Ids ids = {0};
    Conversation c;
    conversation_init(&c);
    bool ok = conversation_parse(&c, &chat, json, &e) && chat_render(&chat, &c, true, &ids, &e);
    assert(ok || (e.code == USAGE && *e.text));
    size_t starts = 0;
    for (size_t i = 0; i < ids.n; i++) starts += ids.data[i] == chat.start;
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
    cJSON_Delete(json);
    Checkpoint c;
    FILE *f = fopen(config, "wb");
    assert(f && fwrite(data, 1, n, f) == n && !fclose(f));
    if (checkpoint_open(&c, dir, &e)) checkpoint_close(&c);
    assert(e.code == 0 || (e.code == BAD_MODEL && *e.text));
    return 0;
}
