/* Any bytes as a chat template. Promises: it is refused with a message that names a line, or renders within bounds,
 * twice the same; letters that only the values from outside have never count as the template's. */
#include "../formats/jinja.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

enum { STEPS = 20000 };
static cJSON *golden;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    Error e;
    golden = json_read("tests/goldens/jinja.json", 1 << 20, &e);
    assert(golden);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    Error e = {0};
    const struct tm day = {.tm_year = 125, .tm_mon = 5, .tm_mday = 28};
    const cJSON *own = json_get(golden, "own"), *greek = json_get(golden, "greek");
    LocalMarked first = {0};
    LocalMarked second = {0};
    Jinja *t = jinja_parse((const char *)data, n, &e);
    assert(t || (e.code == BAD_MODEL && strstr(e.text, "chat template")));
    const bool ok = t && jinja_render(t, STEPS, own, greek, &day, &first, &e);
    if (t && !ok) assert(e.code == USAGE && strstr(e.text, "chat template, line ") && !first.text.n);
    if (ok) {
        assert(jinja_render(t, STEPS, own, greek, &day, &second, &e) && first.text.n == second.text.n);
        assert(!memcmp(first.text.data, second.text.data, first.text.n));
        assert(!memcmp(first.own.data, second.own.data, first.own.n) && first.own.n == first.text.n);
        assert(utf8_check(first.text.data, first.text.n) == first.text.n);
    }
    /* Greek letters are written as bytes CE and CF, which a template may have itself, also as an escape. */
    const bool foreign = !memchr(data, 0xCE, n) && !memchr(data, 0xCF, n) && !memchr(data, '\\', n);
    for (size_t i = 0; ok && foreign && i < first.text.n; i++)
        assert(((unsigned char)first.text.data[i] & 0xFE) != 0xCE || !first.own.data[i]);
    jinja_free(t);
    return 0;
}
