/* formats.c: what unit.c checks of formats/: answers in other formats than harmony. unit.c includes it. */

#include "../formats/jinja.h"

/* Each construct of the language gives what jinja2 gives, or is refused, as jinja2 does. Texts from outside in letters
 * that no template has keep their origin, whatever is done to them. */
static void templates_equal_jinja2(void) {
    Error e;
    struct tm day = {0};
    cJSON *golden = json_read("tests/goldens/jinja.json", 1 << 20, &e);
    must(golden, &e);
    const cJSON *row, *own = json_get(golden, "own");
    strptime(json_string(golden, "date"), "%Y-%m-%d", &day);
    cJSON_ArrayForEach(row, json_get(golden, "rows")) {
        const char *source = cJSON_GetStringValue(row->child), *text = cJSON_GetStringValue(row->child->next);
        Jinja *t = jinja_parse(source, strlen(source), &e);
        Marked out = {0}, greek = {0};
        const bool ok = t && jinja_render(t, own, json_get(golden, "values"), &day, &out, &e);
        check(ok == (text != NULL), "%s is %s: %s", source, ok ? "not refused" : "refused", ok ? "" : e.text);
        check(ok || strstr(e.text, "line "), "an error without a line: %s", e.text);
        check(!ok || !text || same(out.text.data, text), "%s gives %s", source, out.text.data);
        if (t && jinja_render(t, own, json_get(golden, "greek"), &day, &greek, &e))
            for (size_t i = 0; i < greek.text.n; i++)
                check(((unsigned char)greek.text.data[i] & 0xFE) != 0xCE || !greek.own.data[i], "%s loses an origin",
                      source);
        marked_free(&out), marked_free(&greek);
        jinja_free(t);
    }
    cJSON_Delete(golden);
}

/* What a template does without end, or with too much memory, is refused. */
static void hostile_templates_are_bounded(void) {
    static const char *const sources[] = {
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor "
        "%}",
        "{{ 'a' * 9999999999 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ 7 ** 99999999 }}",
        "{{ [1] * 9999999999 }}",
        "{{ range(100001) | list }}",
        "{{ 'a' | indent(999999999) }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x == ns.x "
        "}}"};
    Error e;
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        Marked out = {0};
        Jinja *t = jinja_parse(sources[i], strlen(sources[i]), &e);
        check(t && !jinja_render(t, NULL, NULL, NULL, &out, &e) && e.code == USAGE, "%s is not refused", sources[i]);
        marked_free(&out), jinja_free(t);
    }
    Bytes deep = {0};
    bytes_text(&deep, "{{ ");
    for (int i = 0; i < 100000; i++) bytes_text(&deep, i % 2 ? "(" : "[");
    check(!jinja_parse(deep.data, deep.n, &e) && e.code == BAD_MODEL, "100,000 brackets are not refused");
    bytes_free(&deep);
}

/* The same in other formats. */
static void other_formats_are_rendered_and_read_again(void) {
    static const char *const pieces[] = {"\1",
                                         "\2",
                                         "\3",
                                         "\4",
                                         "\5",
                                         "\6",
                                         "<think>",
                                         "</think>",
                                         "</thi",
                                         "nk>",
                                         "<tool_call>",
                                         "</tool_call>",
                                         "HELLO",
                                         "<",
                                         " WORLD\n",
                                         " ",
                                         "\n\n",
                                         "{\"name\": \"f\"",
                                         ", \"arguments\": {\"a\":[1, {}]}",
                                         "}",
                                         "\13",
                                         "\360\237",
                                         "\343\200\200",
                                         "{\"name\":\"g\",\"parameters\":{}}",
                                         "<tool_call>{\"name\":\"f\"}</tool_call>"};
    enum { PIECES = sizeof pieces / sizeof *pieces };
    uint64_t state = 12;
    for (int i = 0; i < OTHERS * 2000; i++) {
        static Talker talker;
        Bytes text = {0};
        if (i % 2000 == 0) check(talker_open_other(&talker, i / 2000), "format %d is not known", i / 2000);
        bytes_text(&text, "");
        for (int k = 0; k < 1 + i % 20; k++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const char *piece = pieces[(state >> 33) % PIECES];
            if (*piece > 2 || state >> 60 == 0) bytes_text(&text, piece); /* the end is rare */
        }
        check_answer(i, &text, other_problem(&talker, text.data, text.n));
        if (i % 2000 == 1999) talker_close(&talker);
    }
}

/* Every format that has tools: what forces a call is the beginning of one, of a function or of any. */
static void calls_of_formats_are_forced(void) {
    static const char *const bodies[] = {"{\"a\":1}}\n</tool_call>", "", "{\"a\":1}}", "{\"a\":1}}]"};
    static const char *const whole[] = {"f\", \"arguments\": {\"a\":1}}\n</tool_call>", "",
                                        "f\", \"parameters\": {\"a\":1}}", "f\", \"arguments\": {\"a\":1}}]"};
    static const int formats_of[] = {0, 1, 2, OTHERS - 1}; /* Mistral is the last */
    for (int i = 0; i < 8; i++) {
        Talker m;
        Error e;
        Ids ids = {0};
        check(talker_open_other(&m, formats_of[i / 2]), "format %d is not known", i / 2);
        if (*bodies[i / 2]) {
            call_is_forced(&m, i % 2 ? NULL : "f", (i % 2 ? whole : bodies)[i / 2], 1);
        } else { /* its tokenizer lacks the marks */
            check(!chat_force(&m.chat, "medium", "f", &ids, &e) && e.code == USAGE, "a call without marks");
        }
        talker_close(&m);
    }
}

static void formats_tests(void) {
    run("unit: templates equal jinja2's", templates_equal_jinja2);
    run("unit: hostile templates are bounded", hostile_templates_are_bounded);
    run("unit: answers in other formats are rendered and read again", other_formats_are_rendered_and_read_again);
    run("unit: calls can be forced in every other format that has tools", calls_of_formats_are_forced);
}
