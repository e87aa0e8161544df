/* schemas.c: for tests in Python. Reads a line of JSON at a time: {"schema": S} or {"regex": R}, "texts": [...],
 * "samples": n. Writes {"error": ...} or {"accepts": [...], "samples": [...]}: does the grammar accept each text, and n
 * random texts of it. With the path of a tokenizer.json as argument both go token by token, as masks allow them. */
#include "../json/json.h"
#include "parrot.h"

#include <stdlib.h>
#include <string.h>

static uint64_t seed = 1;
static Tokenizer *tokenizer;
static Vocabulary *words;

static uint32_t chance(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

/* Adds a random byte that may come; those that end something are likelier, and the more so the longer the text is. Not
 * they alone: in a string they are letters. */
static int add_byte(Grammar *g, int state, Bytes *out) {
    int byte[256], n = 0, ends[256], closing = 0;
    for (int b = 0; b < 256; b++) {
        if (!state_step(g, state, (unsigned char)b)) continue;
        byte[n++] = b;
        if (strchr("\"]}", b) && b) ends[closing++] = b;
    }
    if (!n) return NEVER;
    const bool closes = closing && chance(100) < (out->n < 400 ? 10 + out->n / 8 : 60);
    const char next = (char)(closes ? ends[chance((uint32_t)closing)] : byte[chance((uint32_t)n)]);
    bytes_add(out, &next, 1);
    return state_step(g, state, (unsigned char)next);
}

/* Adds a random token that the mask has; in a text that is long already one byte now and then. */
static int add_token(Grammar *g, int state, Bytes *out) {
    LocalIds may = {0};
    if (!chance(5)) forget_masks(g);
    const uint32_t *row = state_tokens(g, words, state);
    for (int id = 0; id < tokenizer_size(tokenizer); id++)
        if (row[id / 32] >> id % 32 & 1) ids_add(&may, id);
    if (!may.n || chance(100) < out->n / 4) return add_byte(g, state, out);
    const int id = may.data[chance((uint32_t)may.n)];
    const Bytes text = token_text(words, id);
    bytes_add(out, text.data, text.n);
    return state_token(g, words, state, id);
}

static void sample(Grammar *g, int state, Bytes *out) {
    bytes_text(out, "");
    while (state && !(ends(g, state) && !chance(2)) && out->n < 100000)
        state = words ? add_token(g, state, out) : add_byte(g, state, out);
    if (!ends(g, state) && out->n >= 100000) out->n = 0; /* none */
}

/* By tokens: each must be in the mask. SentencePiece's first one has a space that the text has not. */
static bool accepts(Grammar *g, int state, const char *text) {
    Error e;
    LocalIds ids = {0};
    if (!words) state = state_run(g, state, text, strlen(text));
    if (words && !tokenizer_encode(tokenizer, text, strlen(text), 0, &ids, &e)) die(&e);
    for (size_t i = 0; i < ids.n && state; i++) {
        const Bytes token = token_text(words, ids.data[i]);
        const uint32_t *row = state_tokens(g, words, state);
        const bool space = !i && token.n && *token.data == ' ' && *text != ' ';
        if (!space && !(row[ids.data[i] / 32] >> ids.data[i] % 32 & 1)) return false;
        state = state_run(g, state, token.data + space, token.n - space);
    }
    return ends(g, state);
}

static cJSON *answer(const cJSON *request) {
    Grammar g;
    Error e = {0};
    const char *regex = json_string(request, "regex");
    const cJSON *each;
    LocalBytes why = {0};
    grammar_open(&g);
    const int node =
        regex ? pattern_node(&g, regex, NEVER, &why)
              : schema_node(&g, cJSON_GetObjectItemCaseSensitive(request, "schema"), "schema", false, NULL, &e);
    cJSON *out = cJSON_CreateObject();
    if (regex && !why.n) grammar_settle(&g, node);
    if (why.n || e.code) {
        json_add(out, "error", json_word(why.n ? why.data : e.text), NULL);
    } else {
        cJSON *accepted = cJSON_AddArrayToObject(out, "accepts"), *samples = cJSON_AddArrayToObject(out, "samples");
        cJSON_ArrayForEach(each, json_get(request, "texts"))
            cJSON_AddItemToArray(accepted, cJSON_CreateBool(accepts(&g, node, each->valuestring)));
        for (int i = 0; i < (int)cJSON_GetNumberValue(json_get(request, "samples")); i++) {
            LocalBytes text = {0};
            sample(&g, node, &text);
            if (text.n) cJSON_AddItemToArray(samples, json_from_text(text.data, text.n));
        }
    }
    grammar_close(&g);
    return out;
}

int main(int argc, char **argv) {
    char *line = NULL;
    size_t room = 0;
    Error e = {0};
    if (argc > 1) {
        LocalJson file = json_read(argv[1], 1 << 28, &e);
        tokenizer = file ? parrot_open(file, &e) : NULL;
        if (!tokenizer) die(&e);
        words = vocabulary_open(tokenizer, tokenizer_size(tokenizer), NULL, 0);
    }
    while (getline(&line, &room, stdin) > 0) {
        LocalJson request = json_parse(line, strlen(line) - 1, "line", &e);
        json_print(answer(request), true);
        fflush(stdout);
    }
    vocabulary_close(words);
    free(line);
    return 0;
}
