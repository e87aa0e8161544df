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
        const bool ok = t && jinja_render(t, JINJA_STEPS, own, json_get(golden, "values"), &day, &out, &e);
        check(ok == (text != NULL), "%s is %s: %s", source, ok ? "not refused" : "refused", ok ? "" : e.text);
        check(ok || strstr(e.text, "line "), "an error without a line: %s", e.text);
        check(!ok || !text || same(out.text.data, text), "%s gives %s", source, out.text.data);
        if (t && jinja_render(t, JINJA_STEPS, own, json_get(golden, "greek"), &day, &greek, &e))
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
        "{{ '{:sd}'.format(7) }}",
        "{{ '{:nd}'.format(7) }}",
        "{% for x in [1] %}{{ loop.changed(loop=4096) }}{% endfor %}",
        "{{ 'a'.find(v=7) }}",
        "{% set ns = namespace(x=()) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} "
        "}}",
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
        check(t && !jinja_render(t, JINJA_STEPS, NULL, NULL, NULL, &out, &e) && e.code == USAGE, "%s is not refused",
              sources[i]);
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

/* Every way to write calls, with its own open mark as a token or spelled out: what forces a call is the beginning of
 * one, of a function or of any, and an answer that goes on so is one, split wherever tokens end. */
static const struct {
    const char *row, *rest[2]; /* what follows behind the name and behind what forces any call */
} forced[] = {
    {"Hermes", {"{\"a\": 1}}\n</tool_call>", "f\", \"arguments\": {\"a\": 1}}\n</tool_call>"}},
    {"Qwen3-Coder",
     {"<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
      "f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"}},
    {"GLM",
     {"<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
      "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"}},
    {"Seed",
     {"<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
      "f>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>"}},
    {"MiniMax",
     {"<parameter name=\"a\">1</parameter>\n</invoke>\n</minimax:tool_call>",
      "f\">\n<parameter name=\"a\">1</parameter>\n</invoke>\n</minimax:tool_call>"}},
    {"DeepSeek V3.2",
     {"<｜DSML｜parameter name=\"a\" string=\"false\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
      "</｜DSML｜function_calls>",
      "f\">\n<｜DSML｜parameter name=\"a\" string=\"false\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
      "</｜DSML｜function_calls>"}},
    {"DeepSeek V3.1",
     {"{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
      "f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"}},
    {"DeepSeek",
     {"{\"a\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
      "f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"}},
    {"Kimi",
     {"{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>",
      "f:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>"}},
    {"Gemma 4", {"{a:1}<tool_call|>", "f{a:1}<tool_call|>"}},
    {"FunctionGemma", {"{a:1}<end_function_call>", "f{a:1}<end_function_call>"}},
    {"LFM2", {"(a=1)]<|tool_call_end|>", "f(a=1)]<|tool_call_end|>"}},
    {"Olmo 3", {"(a=1)\n</function_calls>", "f(a=1)\n</function_calls>"}},
    {"Phi-4-mini", {"{\"a\": 1}}]<|/tool_call|>", "f\", \"arguments\": {\"a\": 1}}]<|/tool_call|>"}},
    {"Granite", {"{\"a\": 1}}]", "f\", \"arguments\": {\"a\": 1}}]"}},
    {"Mistral", {"{\"a\": 1}}]", "f\", \"arguments\": {\"a\": 1}, \"id\": \"abcdefghi\"}]"}},
    {"Mistral, named", {"{\"a\": 1}", "f[ARGS]{\"a\": 1}"}},
    {"Llama 3", {"{\"a\": 1}}", "f\", \"parameters\": {\"a\": 1}}"}},
    {"pythonic", {"(a=1)]", "f(a=1)]"}},
};

static void calls_of_formats_are_forced(void) {
    for (size_t i = 0; i < 2 * sizeof forced / sizeof *forced; i++) {
        for (int any = 0; any < 2; any++) {
            Talker m;
            Error e;
            Reader r;
            Ids ids = {0};
            Bytes shown = {0};
            const char *row = forced[i / 2].row, *rest = forced[i / 2].rest[any];
            check(talker_open_row(&m, row, i % 2), "there is no row %s", row);
            must(chat_force(&m.chat, "medium", any ? NULL : "f", &ids, &e), &e);
            must(tokenizer_encode(m.tokenizer, rest, strlen(rest), i % 2 ? CONTROL_TOKENS : 0, &ids, &e), &e);
            reader_init(&r, &m.chat, NULL);
            for (size_t k = 0; k < ids.n; k++) reader_push(&r, ids.data[k], &shown);
            reader_push(&r, m.token_of[1], &shown);
            check(r.messages == 1 && kind_of(r.message) == CALL && !strcmp(r.message->recipient, "functions.f") &&
                      !strcmp(r.message->content.data, "{\"a\": 1}") && !r.repairs,
                  "%s: %s", row, r.messages ? r.message->content.data : "no message");
            reader_free(&r), ids_free(&ids), bytes_free(&shown);
            talker_close(&m);
        }
    }
}

/* What models write, by their documentation and the tests of other engines. Expected: the messages, one a line, with R,
 * P, A or C in front: reasoning, preamble, answer, call. */
static const char answers_tools[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{"
    "\"city\":{\"type\":\"string\"},\"days\":{\"type\":\"integer\"},\"size\":{\"type\":\"object\"},"
    "\"nick\":{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"null\"}]},\"code\":{\"allOf\":[{\"$ref\":\"#/$defs/"
    "code\"}]},"
    "\"either\":{\"type\":[\"integer\",\"string\"]},\"any\":{\"$ref\":\"#/properties/any\"}},"
    "\"$defs\":{\"code\":{\"enum\":[\"007\",7,\"true\",\"[1]\"]}}}}},"
    "{\"type\":\"function\",\"function\":{\"name\":\"get_time\"}}]";
static const struct {
    const char *row, *text, *expected;
} written[] = {
    {"Hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Bern\", \"days\": 2}}\n</tool_call>",
     "C f {\"city\": \"Bern\", \"days\": 2}"},
    {"Hermes",
     "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"arguments\": "
     "{\"zone\":\"\\u00e9\\\"\"}, \"name\": \"get_time\"}\n</tool_call>",
     "P I look.\nC f {}\nC get_time {\"zone\": \"é\\\"\"}"},
    {"Hermes",
     "<tool_call>\n{'name': 'f', 'arguments': {'city': \"Martha's\", 'size': None, 'a': [True, 1.50]}}\n"
     "</tool_call>",
     "C f {\"city\": \"Martha's\", \"size\": null, \"a\": [true, 1.50]}"},
    {"Hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": \"{\\\"city\\\": \\\"Bern\\\"}\"}\n</tool_call>",
     "C f {\"city\": \"Bern\"}"},
    {"Hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": null}\n</tool_call>", "C f {}"},
    {"Hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\nDone.", "C f {}\nA Done."},
    {"Hermes",
     "<think>\nHm.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"a\nb\"}}\n</tool_call>",
     "R Hm.\nC f {\"city\": \"a\\nb\"}"},
    {"Hermes", "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
     "A <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>"},
    {"Hermes", "<think>a <tool_call>{}</tool_call> b</think>c", "R a <tool_call>{}</tool_call> b\nA c"},
    {"Qwen3-Coder",
     "Let me check.\n<tool_call>\n<function=f>\n<parameter=city>\n42\n</parameter>\n<parameter=days>\n2\n"
     "</parameter>\n<parameter=size>\n{\"width\": 10,\n \"height\": 20}\n</parameter>\n<parameter=other>\n"
     "a\n  <b>\n\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n"
     "</tool_call>",
     "P Let me check.\nC f {\"city\": \"42\", \"days\": 2, \"size\": {\"width\": 10, \"height\": 20}, "
     "\"other\": \"a\\n  <b>\\n\"}\nC get_time {}"},
    {"GLM",
     "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2"
     "</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
     "C f {\"city\": \"Bern\", \"days\": 2}\nC get_time {}"},
    {"GLM",
     "<tool_call>f<arg_key>city</arg_key><arg_value>1</arg_value><arg_key>x</arg_key><arg_value>True</arg_value>"
     "</tool_call>",
     "C f {\"city\": \"1\", \"x\": true}"},
    {"GLM", "<tool_call>f and more</tool_call>", "A <tool_call>f and more</tool_call>"},
    {"GLM",
     "<tool_call>f<arg_key>nick</arg_key><arg_value>12</arg_value><arg_key>code</arg_key><arg_value>true</arg_value>"
     "<arg_key>either</arg_key><arg_value>1.5</arg_value><arg_key>any</arg_key><arg_value>[1]</arg_value></tool_call>"
     "<tool_call>f<arg_key>nick</arg_key><arg_value>None</arg_value><arg_key>code</arg_key><arg_value>7</arg_value>"
     "<arg_key>either</arg_key><arg_value>1</arg_value><arg_key>any</arg_key><arg_value>\"a\"</arg_value></tool_call>",
     "C f {\"nick\": \"12\", \"code\": \"true\", \"either\": \"1.5\", \"any\": [1]}\n"
     "C f {\"nick\": null, \"code\": 7, \"either\": 1, \"any\": \"a\"}"},
    {"Seed",
     "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=f>\n<parameter=city>Bern</parameter>\n"
     "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
     "R Hm.\nC f {\"city\": \"Bern\", \"days\": 2}"},
    {"MiniMax",
     "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"city\">Bern</parameter>\n</invoke>\n"
     "<invoke name=\"get_time\">\n</invoke>\n</minimax:tool_call>",
     "C f {\"city\": \"Bern\"}\nC get_time {}"},
    {"DeepSeek V3.2",
     "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"city\" string=\"true\">"
     "Bern</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
     "C f {\"city\": \"Bern\"}"},
    {"DeepSeek V3.1",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"city\":\"Bern\"}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     "C f {\"city\": \"Bern\"}\nC get_time {}"},
    {"DeepSeek",
     "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"city\": \"Tokyo\"}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>",
     "P Yes.\nC f {\"city\": \"Tokyo\"}\nC get_time {}"},
    {"Kimi",
     "I look. <|tool_calls_section_begin|> <|tool_call_begin|>\nfunctions.f:0 <|tool_call_argument_begin|> "
     "{\"city\": \"Beijing\"} <|tool_call_end|> <|tool_call_begin|>functions.get_time:1"
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
     "P I look.\nC f {\"city\": \"Beijing\"}\nC get_time {}"},
    {"Gemma 4",
     "<|channel>thought\nHm.\n<channel|><|tool_call>call:f{city:<|\"|>Bern's \"x\"\\<|\"|>,days:2,size:{w:1.5,"
     "l:[true,null]}}<tool_call|><|tool_call>call:get_time{}<tool_call|>",
     "R Hm.\nC f {\"city\": \"Bern's \\\"x\\\"\\\\\", \"days\": 2, \"size\": {\"w\": 1.5, \"l\": [true, null]}}\n"
     "C get_time {}"},
    {"FunctionGemma", "<start_function_call>call:f{city:<escape>London<escape>}<end_function_call>",
     "C f {\"city\": \"London\"}"},
    {"LFM2", "<|tool_call_start|>[f(city=\"12345\"), get_time()]<|tool_call_end|>Checking.",
     "C f {\"city\": \"12345\"}\nC get_time {}\nA Checking."},
    {"Olmo 3", "<function_calls>\nf(city=\"Bern\", days=2)\nget_time()\n</function_calls>",
     "C f {\"city\": \"Bern\", \"days\": 2}\nC get_time {}"},
    {"Phi-4-mini", "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"city\": \"Bern\"}}]<|/tool_call|>",
     "C f {\"city\": \"Bern\"}"},
    {"Granite", "<|tool_call|> [{\"arguments\": {\"city\": \"Bern\"}, \"name\": \"f\"}, {\"name\": \"get_time\"}]",
     "C f {\"city\": \"Bern\"}\nC get_time {}"},
    {"Mistral", "[THINK]Hm.[/THINK]Yes.[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"days\": 3.5, \"b\": 4}}]",
     "R Hm.\nP Yes.\nC f {\"days\": 3.5, \"b\": 4}"},
    {"Mistral, named", "[TOOL_CALLS]f[ARGS]{\"days\": 3}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{}",
     "C f {\"days\": 3}\nC get_time {}"},
    {"Mistral, named", "[TOOL_CALLS]f{\"days\": 3}", "C f {\"days\": 3}"},
    {"Llama 3", "{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"get_time\", \"parameters\": {}}",
     "C f {\"a\": 1}\nC get_time {}"},
    {"Llama 3", "{\"name\": \"f\", \"arguments\": {\"city\": \"Bern\"}}", "C f {\"city\": \"Bern\"}"},
    {"Llama 3", "{\"name\": \"Bern\", \"parameters\": {}}", "A {\"name\": \"Bern\", \"parameters\": {}}"},
    {"pythonic",
     "[f(city='Martha\\'s Vineyard', size={'a': '\\\"cool\\\"'}, days=None, ok=True, l=['x', ], ), get_time()]",
     "C f {\"city\": \"Martha's Vineyard\", \"size\": {\"a\": \"\\\"cool\\\"\"}, \"days\": null, \"ok\": true, "
     "\"l\": [\"x\"]}\nC get_time {}"},
    {"pythonic", "[1, 2] and [f(x)]", "A [1, 2] and [f(x)]"},
    {"pythonic", "[f(1)]", "A [f(1)]"},
    /* without arguments */
    {"Hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": \"\"}\n</tool_call>", "C f {}"},
    {"DeepSeek V3.1",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>", "C f {}"},
    {"DeepSeek",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n\n```<｜tool▁call▁end｜><"
     "｜tool▁calls▁end｜>",
     "C f {}"},
    {"Kimi",
     "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|><|tool_"
     "calls_section_end|>",
     "C f {}"},
    {"Mistral, named", "[TOOL_CALLS]get_time[ARGS][TOOL_CALLS]f[ARGS]", "C get_time {}\nC f {}"},
    {"Mistral, named", "[TOOL_CALLS]f[ARGS]{\"days\": ", "A f[ARGS]{\"days\":"},
    {"Mistral, named", "[TOOL_CALLS]f", "A f"},
    {"Llama 3", "{\"name\": \"f\", \"parameters\": null}", "C f {}"},
    {"Llama 3", "{\"name\": \"f\", \"parameters\": }", "A {\"name\": \"f\", \"parameters\": }"},
    {"pythonic", "[f]", "A [f]"},
};

/* Appends the messages as `written` has them. */
static void put_messages(const Reader *r, Bytes *out) {
    for (int i = 0; i < r->messages; i++) {
        const Message *m = r->message + i;
        const char *to = m->recipient ? m->recipient + begins(m->recipient, "functions.") : "";
        bytes_print(out, "%s%c %s%s%s", i ? "\n" : "", "RPAC"[kind_of(m)], to, *to ? " " : "", m->content.data);
    }
}

/* Each as the tokens of a tokenizer that has the marks, as those of one that has not, and byte by byte. */
static void calls_are_read_in_every_way_to_write_them(void) {
    Error e;
    for (size_t i = 0; i < 3 * sizeof written / sizeof *written; i++) {
        Talker m;
        Reader r;
        Ids ids = {0};
        Bytes shown = {0}, contents = {0}, found = {0};
        Conversation c = {0};
        const char *text = written[i / 3].text;
        check(talker_open_row(&m, written[i / 3].row, i % 3 == 0), "there is no row %s", written[i / 3].row);
        if (i % 3 < 2) must(tokenizer_encode(m.tokenizer, text, strlen(text), CONTROL_TOKENS, &ids, &e), &e);
        for (const char *s = text; i % 3 == 2 && *s; s++) ids_add(&ids, m.token_of[(unsigned char)*s]);
        ids_add(&ids, m.token_of[1]);
        c.request = cJSON_CreateObject();
        cJSON_AddItemToObject(c.request, "tools", json_parse(answers_tools, strlen(answers_tools), "tools", &e));
        reader_init(&r, &m.chat, &c);
        for (size_t k = 0; k < ids.n; k++) {
            const int before = r.messages;
            const Read read = reader_push(&r, ids.data[k], &shown);
            check(read.stop == (k + 1 == ids.n), "%s %s: stops", m.chat.name, text);
            check(read.stop || read.closed == (r.messages > before), "%s: a message that is not reported", text);
        }
        put_messages(&r, &found);
        for (int k = 0; k < r.messages; k++) bytes_add(&contents, r.message[k].content.data, r.message[k].content.n);
        check(found.n && !strcmp(found.data, written[i / 3].expected), "%s, %d: %s\ngives\n%s", m.chat.name,
              (int)(i % 3), text, found.n ? found.data : "nothing");
        check(shown.n == contents.n && !memcmp(shown.data, contents.data, shown.n), "%s: shown %s", text, shown.data);
        reader_free(&r), ids_free(&ids), conversation_free(&c);
        bytes_free(&shown), bytes_free(&contents), bytes_free(&found);
        talker_close(&m);
    }
}

/* A result or a turn that the model makes up for somebody else ends its answer, also where that mark is no control
 * token; behind text and behind a call. Spelled out it is text. */
static void others_turns_end_answers(void) {
    static const char *const said[] = {"Hi", "<tool_call>{\"name\": \"f\"}</tool_call>\n"};
    for (int i = 0; i < 4; i++) {
        Talker m;
        Error e;
        Reader r;
        Ids ids = {0};
        Bytes found = {0};
        const bool tokens = i < 2;
        check(talker_open_row(&m, "Hermes", tokens), "no row");
        must(tokenizer_encode(m.tokenizer, said[i % 2], strlen(said[i % 2]), CONTROL_TOKENS, &ids, &e), &e);
        const size_t before = ids.n;
        must(tokenizer_encode(m.tokenizer, "<tool_response>7", 16, CONTROL_TOKENS, &ids, &e), &e);
        reader_init(&r, &m.chat, NULL);
        size_t n = 0;
        for (bool stop = false; n < ids.n && !stop; n++) stop = reader_push(&r, ids.data[n], NULL).stop;
        if (!tokens) reader_end(&r, NULL);
        put_messages(&r, &found);
        check(n == (tokens ? before + 1 : ids.n), "%s: it ends after %zu of %zu tokens", said[i % 2], n, ids.n);
        check(!strncmp(found.data, i % 2 ? "C f {}" : "A Hi", i % 2 ? 6 : 4) && tokens == !strchr(found.data, '7'),
              "%s", found.data);
        reader_free(&r), ids_free(&ids), bytes_free(&found);
        talker_close(&m);
    }
}

/* The same from pieces at random: what is shown are the contents, in UTF-8, and each message is reported. */
static void calls_at_random_are_read(void) {
    uint64_t state = 12;
    for (size_t row = 0; row < 2 * sizeof forced / sizeof *forced; row++) {
        Talker m;
        check(talker_open_row(&m, forced[row / 2].row, row % 2), "there is no row %s", forced[row / 2].row);
        for (int i = 0; i < 300; i++) {
            Bytes text = {0};
            bytes_text(&text, "");
            for (int k = 0; k < 1 + i % 12; k++) {
                state = state * 6364136223846793005u + 1442695040888963407u;
                const char *all = state >> 63 ? forced[row / 2].rest[state >> 62 & 1] : written[state >> 32 & 31].text;
                const size_t n = strlen(all), from = (state >> 40) % n, most = n - from;
                bytes_add(&text, state >> 61 & 1 ? all : all + from, state >> 61 & 1 ? n : 1 + (state >> 50) % most);
                if ((state >> 33 & 15) < 3) bytes_print(&text, "%c", 0x80 + (int)((state >> 37) % ROW_MARKS));
            }
            check_answer(i, &text, row_problem(&m, text.data, text.n));
        }
        talker_close(&m);
    }
}

static void formats_tests(void) {
    run("unit: templates equal jinja2's", templates_equal_jinja2);
    run("unit: hostile templates are bounded", hostile_templates_are_bounded);
    run("unit: answers in other formats are rendered and read again", other_formats_are_rendered_and_read_again);
    run("unit: calls are read in every way to write them", calls_are_read_in_every_way_to_write_them);
    run("unit: somebody else's turn ends an answer in other formats", others_turns_end_answers);
    run("unit: calls at random are read in every way to write them", calls_at_random_are_read);
    run("unit: calls can be forced in every way to write them", calls_of_formats_are_forced);
}
