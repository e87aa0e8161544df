/* json.c: what unit.c checks of json/ without a model: which texts grammars have, what is refused and how soon, and
 * that a mask has exactly the tokens that can be read. unit.c includes it. test_json.py compares with jsonschema. */
#include "../json/json.h"
#include "parrot.h"

/* The grammar of a schema or, behind an x or g, of arguments as XML has them, where a text is written as it is, or as
 * Gemma has them, with marks in place of quotes. */
static int schema_of(Grammar *g, const char *text, Error *e) {
    const bool xml = *text == 'x', call = xml || *text == 'g';
    grammar_open(g);
    Form form = {.first = rule_node(g, xml ? "<k " : "\\{"),
                 .next = rule_node(g, xml ? "</k><k " : ","),
                 .end = rule_node(g, xml ? "</k>;" : "\\};"),
                 .none = rule_node(g, xml ? ";" : "\\{\\};"),
                 .equals = {rule_node(g, xml ? ">" : ":"), rule_node(g, xml ? ">" : ":")},
                 .stop = rule_node(g, xml ? "%</k>%" : "%\\|%", g->all, g->all)};
    if (!xml) form.open = form.close = bytes_of("|");
    LocalJson json = json_parse(text + call, strlen(text + call), "schema", e);
    return json ? schema_node(g, json, "schema", call, call ? &form : NULL, e) : NEVER;
}

static bool reads(Grammar *g, int start, const char *text) {
    const int state = state_run(g, start, text, strlen(text));
    return ends(g, state);
}

static void grammars_have_these_texts(void) {
    static const char *const cases[][4] = {
        /* a schema, texts that it has and has not, one a line */
        {"{\"type\":\"integer\",\"minimum\":-12,\"exclusiveMaximum\":105}", "-12\n-1\n0\n9\n99\n104",
         "-13\n105\n00\n1.0\n+1\n1e1\n-100"},
        {"{\"type\":\"number\",\"minimum\":0.25,\"maximum\":10}", "0.25\n0.251\n10\n10.00\n9.999",
         "0.249\n10.01\n0.2\n.5\n1e0\n-1\n11"},
        {"{\"type\":\"number\",\"exclusiveMinimum\":-0.5,\"exclusiveMaximum\":0}", "-0.49\n-0.0001",
         "-0.5\n0\n-0\n-0.50\n-0.0"},
        {"{\"type\":\"number\"}", "-0.5e10\n9876543210987654321098765432109876543210",
         "01\n98765432109876543210987654321098765432101"},
        {"{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
         "\"ab\"\n\"\\u00e9\xC3\xA9\"\n\"\\ud83d\\ude00a\"\n\"\\n\\\"\\\\\"",
         "\"a\"\n\"abcd\"\n\"\\ud83d1\"\n\"\\u0000a\"\n\"\\/a\"\n\"a\tb\""},
        {"{\"properties\":{\"a\":{\"type\":\"null\"},\"b\":{\"const\":[1,{\"x\":\"y\"}]}},\"required\":[\"b\"]}",
         "{\"b\":[1,{\"x\":\"y\"}]}\n{\"a\": null, \"b\": [1, {\"x\": \"y\"}]}",
         "{}\n{\"b\":[1]}\n{\"b\":  null}\n{\"a\":null}\n[]\n{\"b\":[1,{\"x\":\"y\"}],\"a\":null}"},
        {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"}],\"items\":{\"type\":\"boolean\"},\"minItems\":2,"
         "\"maxItems\":3}",
         "[1,true]\n[1, true, false]", "[1]\n[]\n[true]\n[1,true,true,true]"},
        {"{\"properties\":{\"ab\":false,\"ac\":{\"type\":\"null\"}},\"additionalProperties\":{\"type\":\"integer\"}}",
         "{}\n{\"ac\":null}\n{\"a\":1,\"abc\":2,\"\xC3\xA9\":3}",
         "{\"ab\":1}\n{\"ab\":null}\n{\"a\":null}\n{\"ac\":null,\"ac\":1}"},
        {"{\"$defs\":{\"n\":{\"type\":[\"null\",\"object\"],\"properties\":{\"n\":{\"$ref\":\"#/$defs/"
         "n\"}}}},\"$ref\":\"#/$defs/n\"}",
         "null\n{}\n{\"n\":null}\n{\"n\":{\"n\":{\"n\":{}}}}", "{\"n\":1}\n{\"n\":{\"n\":}}"},
        {"{\"anyOf\":[{\"type\":\"string\",\"pattern\":\"^(\\\\d{2}:){1,2}x|\\\"$\"},{\"enum\":[1.50,null]}]}",
         "\"12:xyz\"\n\"12:34:x\"\n\"a\\\"\"\n1.50\nnull", "\"x\"\n\"12:34:56:x\"\n\"\\\"a\"\n1.5\n1"},
        {"{\"allOf\":[{\"type\":\"string\",\"pattern\":\"^(ab)*$\"},{\"minLength\":3,\"maxLength\":5}]}", "\"abab\"",
         "\"ab\"\n\"ababab\"\n\"aba\""},
        {"{\"type\":\"string\",\"pattern\":\"^\\\\ud83d\\\\ude00a[\\\\ud83d\\\\ude00-\\\\ud83d\\\\ude02]a[^\\\\ud800-"
         "\\\\udfff]$\"}",
         "\"\xF0\x9F\x98\x80"
         "a\xF0\x9F\x98\x81"
         "a.\"",
         "\"\xF0\x9F\x98\x80"
         "a.\"\n\"\xF0\x9F\x98\x80"
         "a\xF0\x9F\x98\x84"
         "a.\""},
        {"{\"type\":\"string\",\"format\":\"date\"}", "\"2026-02-28\"\n\"2026-12-31\"",
         "\"2026-02-30\"\n\"2026-13-01\"\n\"26-01-01\""},
        {"{\"type\":\"string\",\"nullable\":true}", "null\n\"\"", "1\ntrue"},
        {"x{\"properties\":{\"a\":{\"type\":\"string\",\"minLength\":2,\"maxLength\":100000}},\"required\":[\"a\"]}",
         "<k a>\"b\"</k>;\n<k a></k</k>;\n<k a>\xC3\xA9\xC3\xA9</k>;",
         "<k a>a</k>;\n<k a>ab</k>c</k>;\n<k a>\xC3\xA9</k>;\n;\n<k b>ab</k>;\n<k a>ab</k><k b>ab</k>;"},
        {"x{\"$defs\":{\"e\":{\"enum\":[\"x\",\"</k>\",\"1\"]}},\"properties\":{\"a\":{\"$ref\":\"#/$defs/"
         "e\"},\"b\":{\"type\":"
         "[\"null\",\"string\"],\"pattern\":\"^[</k>]*$\"},\"c\":{\"items\":{\"type\":\"string\"}}}}",
         ";\n<k a>1</k>;\n<k a>x</k><k b></></k>;\n<k b>null</k><k c>[\"b\",\"</k>\"]</k>;\n<k b>None</k>;",
         "<k a>\"x\"</k>;\n<k a></k></k>;\n<k b></k></k>;\n<k b>nul</k>;\n<k c>[b]</k>;\n<k b>k</k><k a>1</k>;"},
        {"x{\"properties\":{\"c\":{\"$ref\":\"#\"},\"v\":{\"type\":\"integer\"}}}",
         "<k c>{}</k>;\n<k c>{\"c\": {\"v\": 1}}</k><k v>2</k>;",
         "<k c>;</k>;\n<k c><k v>2</k>;</k>;\n<k c>{c: {}}</k>;"},
        {"x{\"properties\":{\"a\":{\"anyOf\":[{\"type\":\"string\",\"maxLength\":2},{\"type\":\"array\"}]},\"b\":{}}}",
         "<k a>ab</k>;\n<k a>[1, 2]</k>;\n<k b>abc</k>;\n<k b>{}</k>;", "<k a>abc</k>;\n<k a>123</k>;"},
        {"x{\"type\":\"object\"}", ";\n<k a>1</k>;\n<k a>{\"b\": 1}</k><k b>x</k>;", "<k <>1</k>;\n<k a>a</k>"},
        {"g{\"properties\":{\"a\":{\"enum\":[\"x\",1]},\"b\":{\"type\":\"object\",\"properties\":{\"c\":{\"type\":"
         "\"string\"}},"
         "\"additionalProperties\":{\"type\":\"array\"}}}}",
         "{};\n{a:|x|};\n{a:1,b:{c:|\"|}};\n{b:{d:[|x|,1.5,{e:True}],f:[]}};",
         "{a:x};\n{a:\"x\"};\n{a:|y|};\n{b:{\"c\":|x|}};\n{b:{c:1}};\n{b:{d:{}}};"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        Error e = {0};
        const int start = schema_of(&g, cases[i][0], &e);
        check(start, "%s: %s", cases[i][0], e.text);
        for (int has = 1; has <= 2; has++) {
            LocalText texts = text_print("%s", cases[i][has]);
            char *rest = texts;
            for (char *text; (text = strsep(&rest, "\n"));)
                check(reads(&g, start, text) == (has == 1), "%s %s %s", cases[i][0], has == 1 ? "lacks" : "has", text);
        }
        grammar_close(&g);
    }
}

/* A thought goes on to the first mark of its end, where the answer begins. */
static void what_a_text_may_not_have(void) {
    Grammar g;
    grammar_open(&g);
    const int any = rule_node(&g, "[a-c]*"), mark = rule_node(&g, "aab");
    const int thought = but_node(&g, any, rule_node(&g, "%%%", any, mark, any)),
              all = rule_node(&g, "%%x", thought, mark);
    grammar_settle(&g, all);
    static const char *const has[] = {"aabx", "aaabx", "abcaacaabx"}, *const lacks[] = {"x", "abx", "aabaabx",
                                                                                        "aabcaabx"};
    for (int i = 0; i < 3; i++) check(reads(&g, all, has[i]), "%s", has[i]);
    for (int i = 0; i < 4; i++) check(!reads(&g, all, lacks[i]), "%s", lacks[i]);
    check(state_forced(&g, state_run(&g, all, "caab", 4)) == 'x', "behind the mark");
    grammar_close(&g);
}

/* What is not held to is refused, with keyword and place. */
static void schemas_are_refused(void) {
    static const char *const cases[][2] = {
        {"{\"not\":{}}", "not at # "},
        {"{\"properties\":{\"a\":{\"items\":{\"patternProperties\":{}}}}}",
         "patternProperties at #/properties/a/items "},
        {"{\"anyOf\":[true,{\"multipleOf\":2}]}", "multipleOf at #/anyOf/1 "},
        {"{\"type\":\"array\",\"uniqueItems\":true}", "uniqueItems at # "},
        {"{\"if\":{},\"then\":{}}", "if at # "},
        {"{\"type\":\"object\",\"minProperties\":1}", "minProperties at # "},
        {"{\"$defs\":{\"a\":{\"pattern\":\"(?=a)\"}},\"$ref\":\"#/$defs/a\"}",
         "pattern at #/$defs/a has a look-around"},
        {"{\"pattern\":\"(a)\\\\1\"}", "back-reference at byte"},
        {"{\"format\":\"uri\"}", "format at # "},
        {"{\"$ref\":\"http://x.example/y\"}", "$ref at # "},
        {"{\"$ref\":\"#/$defs/none\"}", "$ref at # leads nowhere"},
        {"{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"number\"}]}", "oneOf at # has cases that may overlap"},
        {"{\"allOf\":[{\"not\":{}},{}]}", "not at #/allOf/0 "},
        {"{\"type\":\"integer\",\"minimum\":2,\"maximum\":1}", "allows no value"},
        {"{\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}", "allows no value"},
        {"{\"type\":\"text\"}", "type at # is \"text\", which is no type"},
        {"{\"properties\":{\"a\":{\"type\":\"null\",\"required\":true}}}",
         "required at #/properties/a is not an array"},
        {"{\"required\":\"a\"}", "required at # is not an array"},
        {"{\"required\":[\"a\",5]}", "required at # has more than names"},
        {"{\"properties\":[\"a\"]}", "properties at # is not an object"},
        {"{\"properties\":\"a\"}", "properties at # is not an object"},
        {"{\"prefixItems\":3}", "prefixItems at # is not an array"},
        {"{\"type\":\"integer\",\"format\":5}", "format at # is not a text"},
        {"{\"exclusiveMinimum\":true}", "exclusiveMinimum at # is true without"},
        {"{\"maximum\":\"3\"}", "maximum at # is not a number"},
        {"{\"nullable\":\"yes\"}", "nullable at # is not true or false"},
        {"[]", "is no schema"},
        {"x{\"properties\":{\"a\":{\"type\":[\"string\",\"array\"],\"minItems\":1}}}",
         "type at #/properties/a has texts"},
        {"x{\"properties\":{\"a b\":{}}}", "a b at # is a name"},
        {"g{\"properties\":{\"a\":{\"enum\":[\"q|z\",[\"|\"]]}},\"required\":[\"a\"]}", "allows no value"},
        {"{\"properties\":{\"a\":{\"enum\":[{\"a\":null},{}],\"allOf\":[{\"$ref\":\"#\"}]}}}",
         "enum at #/properties/a of a schema that"},
        {"g{\"enum\":[{}]}", "enum at # of whole arguments"},
        {"x{\"anyOf\":[{\"properties\":{\"a\":{\"type\":\"string\"}}}]}", "anyOf at # of whole arguments"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        Error e = {0};
        const int start = schema_of(&g, cases[i][0], &e);
        check(!start && e.code == USAGE && strstr(e.text, cases[i][1]), "%s: %s", cases[i][0], e.text);
        grammar_close(&g);
    }
}

/* Schemas that explode are refused, or need not much. */
static void schemas_do_not_explode(void) {
    static const char *const cases[] = {"{\"type\":\"string\",\"pattern\":\"(a|b)*a(a|b){20}\",\"maxLength\":1000}",
                                        "{\"type\":\"string\",\"pattern\":\"^(a{1,1000}){1,1000}$\"}",
                                        "{\"type\":\"string\",\"pattern\":\"^((a?){0,100000}){0,100000}$\"}",
                                        "{\"type\":\"string\",\"pattern\":\"^[a-z]{1,100000}$\",\"maxLength\":100000}",
                                        "{\"type\":\"number\",\"minimum\":-1e308,\"maximum\":1e308}",
                                        "{\"type\":\"array\",\"minItems\":2000000000,\"maxItems\":2000000000}",
                                        "{\"$ref\":\"#\",\"type\":\"object\"}"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        Error e = {0};
        schema_of(&g, cases[i], &e);
        check(g.nodes < 400000, "%s: %d nodes", cases[i], g.nodes);
        grammar_close(&g);
    }
    LocalBytes deep = {0}; /* each case is in each of the next */
    bytes_text(&deep, "{\"type\":\"integer\"}");
    for (int i = 0; i < 8; i++) {
        LocalText inner = text_print("%s", deep.data);
        deep.n = 0;
        bytes_print(&deep, "{\"anyOf\":[%s,{\"allOf\":[%s,{\"minimum\":%d}]},%s]}", inner, inner, i, inner);
    }
    Grammar g;
    Error e = {0};
    schema_of(&g, deep.data, &e);
    check(g.nodes < 300000, "%d nodes", g.nodes);
    grammar_close(&g);
}

/* The processor's time for a schema of so many objects with so many properties each, and for so many strict tools,
 * which are in one grammar. */
static double time_of_properties(int objects, int each) {
    LocalBytes text = {0};
    Grammar g;
    Error e = {0};
    bytes_text(&text, "{\"prefixItems\":[");
    for (int i = 0; i < objects * each; i++)
        if (i % each)
            bytes_print(&text, ",\"a long name %d\":{}", i);
        else
            bytes_print(&text, "%s{\"properties\":{\"%d\":{}", i ? "}}," : "", i);
    bytes_text(&text, "}}]}");
    const clock_t begun = clock();
    check(schema_of(&g, text.data, &e), "%s", e.text);
    const double took = (double)(clock() - begun);
    grammar_close(&g);
    return took;
}
static double time_of_tools(int tools) {
    Grammar g;
    Error e = {0};
    grammar_open(&g);
    const clock_t begun = clock();
    for (int i = 0; i < tools; i++) {
        LocalText one = text_print("{\"properties\":{\"a%d\":{\"type\":\"string\"},\"b\":{\"type\":\"integer\"}}}", i);
        LocalJson json = json_parse(one, strlen(one), "schema", &e);
        check(schema_node(&g, json, "schema", false, NULL, &e), "%s", e.text);
    }
    const double took = (double)(clock() - begun);
    grammar_close(&g);
    return took;
}
/* Four times as many take about four times as long, not sixteen times. */
static void large_schemas_take_little_time(void) {
    const int objects = thorough ? 30 : 6, tools = thorough ? 10000 : 2000;
    const double few = time_of_properties(objects, 1024), many = time_of_properties(objects, 4096);
    check(many < 9 * few, "four times as many properties took %g times as long", many / few);
    const double some = time_of_tools(tools / 4), all = time_of_tools(tools);
    check(all < 9 * some, "four times as many tools took %g times as long", all / some);
}

/* Walks random texts of a grammar by tokens. At each place every token is tried by itself. */
static void masks_have_the_tokens_that_can_be_read(void) {
    static const char *const schemas[] = {
        "{}",
        "{\"type\":\"string\",\"minLength\":3,\"maxLength\":12}",
        "{\"properties\":{\"name\":{\"type\":\"string\"},\"n\":{\"type\":\"integer\",\"minimum\":-5,\"maximum\":300},"
        "\"tags\":{\"type\":\"array\",\"items\":{\"enum\":[\"red\",\"green\",1,null]}},\"d\":{\"format\":\"date-time\"}"
        "},"
        "\"additionalProperties\":{\"type\":\"number\"}}",
        "{\"type\":\"string\",\"pattern\":\"^(\\\\w+ ){2,4}[^a]*$\",\"maxLength\":40}",
        "{\"type\":\"string\",\"pattern\":\"^.{3,20}$|^[^\\u00e9]{5,40}$\"}",
        "{\"type\":\"string\",\"pattern\":\"^([a-z] *)?$\"}",
        "{\"type\":\"string\",\"pattern\":\"^[A-Za-z ,.]{4,50}$\"}",
        "{\"type\":\"string\",\"pattern\":\"^[a-z0-9]{2,20}(-[0-9]{9,12}:)?[a-f]*$\"}",
        "{\"type\":\"string\",\"pattern\":\"^(ab|[c-z ]{2})*END.{20}$\",\"maxLength\":100}",
        "x{\"properties\":{\"a\":{\"type\":\"string\",\"minLength\":3,\"maxLength\":50},\"b\":{\"type\":\"string\"},"
        "\"c\":{}}}",
        "g{\"properties\":{\"a\":{\"type\":\"string\",\"pattern\":\"^[a-z]+ "
        ".\",\"maxLength\":60}},\"required\":[\"a\"]}"};
    enum { SCHEMAS = sizeof schemas / sizeof *schemas };
    Error e;
    uint64_t random = 7;
    Tokenizer *t = parrot_open(NULL, &e);
    must(t, &e);
    const int size = tokenizer_size(t), end = tokenizer_added(t, "<|return|>");
    Vocabulary *v = vocabulary_open(t, size, &end, 1);
    for (int i = 0; i < SCHEMAS * (thorough ? 6 : 1); i++) {
        Grammar g;
        int state = schema_of(&g, schemas[i % SCHEMAS], &e);
        for (int step = 0; step < 40 && state; step++) {
            if (step % 5 == 4) forget_masks(&g);
            const uint32_t *row = state_tokens(&g, v, state);
            LocalIds may = {0};
            for (int id = 0; id < size; id++) {
                const bool can = state_token(&g, v, state, id);
                check(can == (row[id / 32] >> id % 32 & 1), "schema %d, step %d: token %d", i % SCHEMAS, step, id);
                if (can) ids_add(&may, id);
            }
            check(may.n || ends(&g, state), "schema %d, step %d: no token", i % SCHEMAS, step);
            if (!may.n) break;
            int pick;
            fill_random(&pick, 1, may.n, &random);
            const int forced = state_forced(&g, state), next = state_token(&g, v, state, may.data[pick]);
            check(forced < 0 || state_step(&g, state, (unsigned char)forced), "what is forced cannot come");
            state = next;
        }
        grammar_close(&g);
    }
    vocabulary_close(v);
    tokenizer_close(t);
}

/* A pattern that can be read in so many ways that tokens are left out: always the same ones, whatever the grammar has
 * made before. */
static void masks_depend_on_the_state_alone(void) {
    static const char pattern[] = "([^x]*.{0,200}[^y]*.{0,300}){10}x?", text[] = "many ways of reading";
    Error e;
    LocalBytes why = {0};
    Tokenizer *t = parrot_open(NULL, &e);
    must(t, &e);
    const int size = tokenizer_size(t);
    const size_t words = howmany((size_t)size, 32);
    Vocabulary *v = vocabulary_open(t, size, NULL, 0);
    uint32_t *before = allocate_zero(words, sizeof *before);
    for (int i = 0; i < 4; i++) { /* the first two times the grammar is new */
        Grammar g;
        grammar_open(&g);
        int state = pattern_node(&g, pattern, NEVER, &why);
        check(!why.n && grammar_settle(&g, state), "%s", why.data);
        for (size_t k = 0; k < sizeof text - 1; k++) {
            if (i > 1) check(state_tokens(&g, v, state), "it gave up");
            g.work = 0;
            state = state_step(&g, state, (unsigned char)text[k]);
            if (k % 2) forget_masks(&g);
        }
        for (int again = 0; again < i; again++) state_tokens(&g, v, state), forget_masks(&g);
        const uint32_t *row = state_tokens(&g, v, state);
        int tokens = 0;
        for (size_t w = 0; w < words; w++) tokens += __builtin_popcount(row[w]);
        check(tokens > 255 && tokens < size, "%d of %d tokens", tokens, size);
        check(!i || !memcmp(row, before, words * sizeof *row), "time %d: other tokens", i);
        memcpy(before, row, words * sizeof *row);
        grammar_close(&g);
    }
    free(before);
    vocabulary_close(v);
    tokenizer_close(t);
}

static void json_tests(void) {
    run("unit: grammars of schemas have the texts that they should", grammars_have_these_texts);
    run("unit: a text but what it may not have", what_a_text_may_not_have);
    run("unit: schemas that are not supported are refused with keyword and place", schemas_are_refused);
    run("unit: schemas do not explode", schemas_do_not_explode);
    run("unit: thousands of properties and tools take little time", large_schemas_take_little_time);
    run("unit: masks have the tokens that can be read", masks_have_the_tokens_that_can_be_read);
    run("unit: masks depend on the state alone", masks_depend_on_the_state_alone);
}
