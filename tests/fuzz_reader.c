/* Any bytes as what a model writes, see reading.h; the first chooses the format. Promises beside those there: the
 * reader never aborts, and a message of harmony's that begins with <|start|> reads the same whatever stood before. */
#include "reading.h"

#include <assert.h>
#include <stdio.h>

#ifdef ROOM_formats
static const char *const ways[] = {"Hermes",         "Qwen3-Coder", "GLM",     "DeepSeek V3.1", "DeepSeek",
                                   "Kimi",           "Gemma 4",     "LFM2",    "Olmo 3",        "Mistral",
                                   "Mistral, named", "Llama 3",     "pythonic"};
enum { WAYS = sizeof ways / sizeof *ways };
static Talker way[2 * WAYS];
#endif
static Talker model, other[OTHERS];

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    assert(talker_open(&model));
    for (int i = 0; i < OTHERS; i++) assert(talker_open_other(&other[i], i));
#ifdef ROOM_formats
    for (int i = 0; i < 2 * WAYS; i++) assert(talker_open_row(&way[i], ways[i / 2], i % 2));
#endif
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (!n) return 0;
    int format = *data++;
    n--;
#ifdef ROOM_formats
    if (format >= 128) { /* and a way to write calls */
        const char *problem = row_problem(&way[format % (2 * WAYS)], (const char *)data, n);
        if (problem) fprintf(stderr, "the reader %s\n", problem);
        assert(!problem);
        return 0;
    }
#endif
    format %= OTHERS + 1;
    if (format) {
        const char *problem = other_problem(&other[format - 1], (const char *)data, n);
        if (problem) fprintf(stderr, "the reader %s\n", problem);
        assert(!problem);
        return 0;
    }
    Bytes shown = {0}, first = {0}, second = {0};
    Reader all, part;
    size_t fresh = 1;
    int *tokens = allocate(n * sizeof *tokens + 1);
    const char *problem = reading_problem(&model, (const char *)data, n);
    if (problem) fprintf(stderr, "the reader %s\n", problem);
    assert(!problem);
    for (size_t i = 0; i < n; i++) tokens[i] = model.token_of[data[i]];
    while (fresh < n && !(data[fresh] == START && data[fresh - 1] >= END && data[fresh - 1] <= ENDOFTEXT)) fresh++;
    if (fresh > n) fresh = n;
    read_tokens(&model, &all, tokens, n, &shown);
    read_tokens(&model, &part, tokens + fresh, n - fresh, &shown);
    for (int i = 0; i < part.messages; i++) {
        json_append(&first, message_json(part.message + i));
        json_append(&second, message_json(all.message + all.messages - part.messages + i));
    }
    assert(first.n == second.n && (!first.n || !memcmp(first.data, second.data, first.n)));
    reader_free(&all);
    reader_free(&part);
    free(tokens);
    bytes_free(&shown), bytes_free(&first), bytes_free(&second);
    return 0;
}
