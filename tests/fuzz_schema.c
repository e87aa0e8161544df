/* Any bytes as a schema, a line break, and a text; a first byte of 'r' makes the schema a pattern, 'x' or 'g' that of a
 * call's arguments. Promises: it is refused with a message or compiled within bounds; the text is read without a fault,
 * and behind each byte that could come, unless the text may end there, another one can. */
#include "../json/json.h"

#include <assert.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    const uint8_t *end = memchr(data, '\n', n);
    Error e = {0};
    Grammar g;
    if (!end) return 0;
    const char *schema = (const char *)data;
    const size_t size = (size_t)(end - data);
    LocalBytes why = {0};
    int node = NEVER;
    grammar_open(&g);
    if (size && *schema == 'r') {
        LocalText pattern = copy_text(schema + 1, size - 1);
        make_letters(&g);
        node = pattern_node(&g, pattern, n % 2 ? g.letter : NEVER, &why);
        if (why.n || !grammar_settle(&g, node)) node = NEVER;
    } else {
        const bool call = size && strchr("xg", *schema); /* arguments as XML or as Gemma has them */
        const Form form = {.first = rule_node(&g, "<"),
                           .next = rule_node(&g, "/;<"),
                           .end = rule_node(&g, "/;"),
                           .none = rule_node(&g, ";"),
                           .equals = {rule_node(&g, ">"), rule_node(&g, "=")},
                           .stop = rule_node(&g, "%/;%", g.all, g.all),
                           .open = bytes_of(*schema == 'g' ? "'" : ""),
                           .close = bytes_of(*schema == 'g' ? "/;" : "")};
        LocalJson json = json_parse(schema + call, size - call, "schema", &e);
        if (json) node = schema_node(&g, json, "schema", call, call ? &form : NULL, &e);
        assert(node || *e.text);
    }
    int state = node;
    for (const uint8_t *s = end + 1; s < data + n && state && g.nodes < 100000 && !gave_up(&g); s++) {
        bool more = false;
        for (int byte = 0; byte < 256 && !more; byte++) more = state_step(&g, state, (unsigned char)byte);
        assert(more || ends(&g, state) || gave_up(&g));
        const int forced = state_forced(&g, state);
        assert(forced < 0 || state_step(&g, state, (unsigned char)forced));
        state = state_step(&g, state, *s);
    }
    grammar_close(&g);
    return 0;
}
