/* schemas.c: for tests in Python. Reads a line of JSON at a time: {"schema": S} or {"regex": R}, "texts": [...],
 * "samples": n. Writes {"error": ...} or {"accepts": [...], "samples": [...]}: does the grammar accept each text, and n
 * random texts of it. */
#include "../json/json.h"

#include <stdlib.h>
#include <string.h>

static uint64_t seed = 1;
static uint32_t chance(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

/* A random text: bytes that end something are likelier, and the more so the longer it is. */
static void sample(Grammar *g, int node, Bytes *out) {
    bytes_text(out, "");
    for (int state = state_start(g, node);;) {
        int byte[256], n = 0, ends[256], closing = 0;
        for (int b = 0; b < 256; b++) {
            if (!state_step(g, state, (unsigned char)b)) continue;
            byte[n++] = b;
            if (strchr("\"]}", b) && b) ends[closing++] = b;
        }
        if (!n || (g->of[state].ends && !chance(2))) break;
        const bool closes = closing && chance(100) < 10 + out->n / 8;
        const char next = (char)(closes ? ends[chance((uint32_t)closing)] : byte[chance((uint32_t)n)]);
        bytes_add(out, &next, 1);
        state = state_step(g, state, (unsigned char)next);
        if (out->n < 100000) continue;
        bytes_free(out); /* none */
        break;
    }
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0) {
        Grammar g;
        Error e = {0};
        LocalJson json = json_parse(line, strlen(line) - 1, "line", &e);
        const char *regex = json_string(json, "regex"), *bad = NULL;
        const cJSON *each;
        size_t at;
        const double began = seconds();
        grammar_open(&g);
        const int node = regex ? pattern_node(&g, regex, false, &bad, &at)
                               : schema_node(&g, cJSON_GetObjectItemCaseSensitive(json, "schema"), "schema", &e);
        cJSON *out = json_object("seconds", json_number(seconds() - began), NULL);
        if (regex && !bad) grammar_settle(&g, node);
        if (bad || e.code) {
            json_add(out, "error", json_word(bad ? bad : e.text), NULL);
        } else {
            cJSON *accepts = cJSON_AddArrayToObject(out, "accepts"), *samples = cJSON_AddArrayToObject(out, "samples");
            cJSON_ArrayForEach(each, json_get(json, "texts")) {
                const int state = state_run(&g, state_start(&g, node), each->valuestring, strlen(each->valuestring));
                cJSON_AddItemToArray(accepts, cJSON_CreateBool(g.of[state].ends));
            }
            for (int i = 0; i < (int)cJSON_GetNumberValue(json_get(json, "samples")); i++) {
                LocalBytes text = {0};
                sample(&g, node, &text);
                if (text.n) cJSON_AddItemToArray(samples, json_from_text(text.data, text.n));
            }
        }
        json_add(out, "nodes", json_number((double)g.flags.n), "states", json_number((double)g.state.begin.n), NULL);
        json_print(out, true);
        fflush(stdout);
        grammar_close(&g);
    }
    free(line);
    return 0;
}
