/* templates.c: what unit.c checks of chat templates: the prompts of tests/goldens/chat.json, which jinja2 rendered as
 * transformers sets it up, and their ids by the `tokenizers` library. unit.c includes it. */

/* A model's files, as tokenizer_open() asks for them. */
typedef struct {
    cJSON *tokenizer; /* or NULL: from `path` */
    const char *path;
    cJSON *config;
} Companions;

static cJSON *companion(const void *data, const char *name, Error *e) {
    const Companions *files = data;
    e->code = 0;
    if (same(name, "tokenizer_config.json")) return cJSON_Duplicate(files->config, true);
    if (!same(name, "tokenizer.json")) return NULL;
    return files->tokenizer ? cJSON_Duplicate(files->tokenizer, true) : json_read(files->path, 64 << 20, e);
}

/* The chat template of a row of chat.json, or NULL: it is a stored one that is not here. */
static char *template_of(const cJSON *model) {
    const char *data = getenv("TEST_DATA"), *stored = json_string(model, "file");
    LocalText path = text_print("%s/chat_templates/%s", data ? data : "", stored ? stored : "");
    LocalBytes text = {0};
    if (!stored)
        bytes_text(&text, json_string(model, "template"));
    else if (!file_read(path, 1 << 20, &text, &(Error){0}))
        return NULL;
    char *now = text_print("%s", text.data);
    const cJSON *change;
    cJSON_ArrayForEach(change, json_get(model, "changes")) {
        const char *before = cJSON_GetArrayItem(change, 0)->valuestring, *from = now;
        LocalBytes changed = {0};
        for (const char *at; (at = strstr(from, before)); from = at + strlen(before)) {
            bytes_add(&changed, from, (size_t)(at - from));
            bytes_text(&changed, cJSON_GetArrayItem(change, 1)->valuestring);
        }
        bytes_text(&changed, from);
        free(now);
        now = text_print("%s", changed.data);
    }
    return now;
}

typedef struct {
    Tokenizer *tokenizer;
    Chat chat;
} Templated;

/* With the model's template and special texts, and the tokenizer of `files`. */
static Templated templated_open(const cJSON *model, const char *template, Companions files) {
    Error e;
    Templated t = {0};
    LocalJson config = cJSON_Duplicate(json_get(model, "special"), true);
    json_add(config, "chat_template", json_word(template), NULL);
    files.config = config;
    t.tokenizer = tokenizer_open(files.path, companion, &files, &e);
    must(t.tokenizer, &e);
    must(chat_open(&t.chat, t.tokenizer, tokenizer_template(t.tokenizer, false), false, &e), &e);
    return t;
}

static void templated_close(Templated *t) {
    chat_close(&t->chat);
    tokenizer_close(t->tokenizer);
}

/* The parrot's vocabulary with the model's control tokens. */
static cJSON *parrot_with(const cJSON *controls) {
    Error e;
    cJSON *tokenizer = json_read("tests/fixtures/parrot/tokenizer.json", 1 << 20, &e);
    must(tokenizer, &e);
    LocalJson added = cJSON_DetachItemFromObjectCaseSensitive(tokenizer, "added_tokens");
    cJSON *tokens = cJSON_AddArrayToObject(tokenizer, "added_tokens");
    const cJSON *control;
    int id = (int)json_get(added->child, "id")->valuedouble;
    cJSON_ArrayForEach(control, controls) {
        cJSON *token = cJSON_Duplicate(added->child, true);
        cJSON_ReplaceItemInObjectCaseSensitive(token, "id", cJSON_CreateNumber(id++));
        cJSON_ReplaceItemInObjectCaseSensitive(token, "content", json_word(control->valuestring));
        cJSON_AddItemToArray(tokens, token);
    }
    return tokenizer;
}

/* The ids of a prompt. False: it is refused. */
static bool prompt_ids(const Templated *t, const cJSON *json, Ids *ids, Error *e) {
    LOCAL(conversation_free) Conversation c = {0};
    const cJSON *prompt = json_get(json, "add_generation_prompt");
    conversation_init(&c);
    ids->n = 0;
    return conversation_parse(&c, json, e) && chat_render(&t->chat, &c, !prompt || cJSON_IsTrue(prompt), ids, e);
}

/* The names of control tokens, one after another, and whether the messages have one of them. */
static bool names_in(const cJSON *model, const cJSON *messages, Bytes *all) {
    LOCAL(text_free) char *said = cJSON_PrintUnformatted(messages);
    const cJSON *control;
    bool found = false;
    cJSON_ArrayForEach(control, json_get(model, "controls")) {
        bytes_text(all, control->valuestring);
        found |= strstr(said, control->valuestring) != NULL;
    }
    return found;
}

static bool same_ids(const Ids *a, const Ids *b) {
    return a->n == b->n && !memcmp(a->data, b->data, a->n * sizeof *a->data);
}

/* The text, and the ids of the whole text: control tokens where the template has them, nothing cut elsewhere. What
 * jinja2 refuses is refused in the template's words. */
static void check_prompt(const cJSON *model, const cJSON *row, const Templated *t) {
    Error e;
    LocalIds ids = {0}, whole = {0};
    LocalBytes text = {0}, names = {0};
    Decoder d = {0};
    const char *name = json_string(model, "model"), *kind = json_string(row, "name"),
               *expected = json_string(row, "text");
    const cJSON *conversation = json_get(row, "conversation");
    const bool ok = prompt_ids(t, conversation, &ids, &e);
    check(ok == (expected != NULL), "%s: %s is %s", name, kind, ok ? "not refused" : e.text);
    check(ok || (e.code == USAGE && strstr(e.text, "chat template, line ")), "%s: %s: %s", name, kind, e.text);
    if (!ok || !expected) return;
    bytes_text(&text, "");
    for (size_t i = 0; i < ids.n; i++) tokenizer_bytes(t->tokenizer, &d, ids.data[i], &text);
    check(same(text.data, expected), "%s: %s gives %s", name, kind, text.data);
    if (names_in(model, json_get(conversation, "messages"), &names)) return;
    must(tokenizer_encode(t->tokenizer, expected, strlen(expected), CONTROL_TOKENS | WITH_TEMPLATE, &whole, &e), &e);
    check(same_ids(&ids, &whole), "%s: %s has other ids than its text", name, kind);
}

/* Texts from outside become `text`. */
static void fill(cJSON *json, const char *text) {
    static const char keys[] = "content description arguments tools messages function tool_calls reasoning_content";
    for (cJSON *value = json->child; value; value = value->next) {
        if (value->string && !text_listed(keys, value->string)) continue;
        cJSON_IsString(value) ? (void)cJSON_SetValuestring(value, text) : fill(value, text);
    }
}

/* All names of control tokens in every field: as many control tokens as without them. */
static void check_control_tokens(const cJSON *model, const cJSON *row, const Templated *t) {
    Error e;
    LocalBytes names = {0};
    const char *kind = json_string(row, "name");
    size_t controls[2] = {0};
    if (!json_string(row, "text") || (strstr(kind, "thoughts") && !strstr(kind, "call"))) return;
    names_in(model, json_get(row, "conversation"), &names);
    for (int i = 0; i < 2; i++) {
        LocalIds ids = {0};
        LocalJson filled = cJSON_Duplicate(json_get(row, "conversation"), true);
        fill(filled, i ? names.data : "x");
        must(prompt_ids(t, filled, &ids, &e), &e);
        for (size_t k = 0; k < ids.n; k++) controls[i] += tokenizer_is_control(t->tokenizer, ids.data[k]);
    }
    check(controls[0] == controls[1], "%s: %s: %zu control tokens, with their names in texts %zu",
          json_string(model, "model"), kind, controls[0], controls[1]);
}

/* The ids that the library gives the template's text, with the tokenizer as published. */
static void check_ids(const cJSON *model, const cJSON *row, const Templated *t) {
    Error e;
    const cJSON *golden = json_get(row, "ids"), *id;
    LocalIds ids = {0}, expected = {0};
    if (!golden) return;
    cJSON_ArrayForEach(id, golden) ids_add(&expected, id->valueint);
    must(prompt_ids(t, json_get(row, "conversation"), &ids, &e), &e);
    check(same_ids(&ids, &expected), "%s: %s has other ids", json_string(model, "model"), json_string(row, "name"));
}

/* Each conversation of each template. `tokenizers`: a folder of published ones, or NULL: the parrot's. */
static void each_prompt(void (*check_row)(const cJSON *model, const cJSON *row, const Templated *t),
                        const char *tokenizers) {
    Error e;
    LocalJson all = json_read("tests/goldens/chat.json", 8 << 20, &e);
    const cJSON *model, *row;
    bool missing = false;
    must(all, &e);
    cJSON_ArrayForEach(model, all) {
        const char *name = json_string(model, "tokenizer");
        LocalText template = template_of(model);
        LocalText path = text_print("%s/%s/tokenizer.json", tokenizers, name);
        LocalJson parrot = tokenizers ? NULL : parrot_with(json_get(model, "controls"));
        missing |= !template;
        if (!template || (tokenizers && !name)) continue;
        Templated t = templated_open(model, template, (Companions){parrot, path, NULL});
        cJSON_ArrayForEach(row, json_get(model, "cases")) check_row(model, row, &t);
        templated_close(&t);
    }
    check(!missing, "skip needs chat_templates in TEST_DATA");
}

static void prompts_are_the_templates(void) { each_prompt(check_prompt, NULL); }

static void text_never_becomes_control_tokens(void) { each_prompt(check_control_tokens, NULL); }

static void ids_of_published_tokenizers(void) {
    const char *data = getenv("TEST_DATA");
    char folder[] = "/tmp/infer-test-XXXXXX";
    LocalText archive = text_print("%s/families.tar.xz", data ? data : "");
    if (!file_exists(archive)) {
        check(false, "skip needs families.tar.xz in TEST_DATA");
        return;
    }
    check(mkdtemp(folder), "%s cannot be made", folder);
    LocalText extract = text_print("tar -C %s -xf '%s' tokenizers", folder, archive);
    LocalText tokenizers = text_print("%s/tokenizers", folder);
    LocalText remove = text_print("rm -r %s", folder);
    check(!system(extract), "%s failed", extract);
    if (!*why) each_prompt(check_ids, tokenizers);
    check(!system(remove), "%s failed", remove);
}

static void templates_tests(void) {
    run("unit: prompts are the templates'", prompts_are_the_templates);
    run("unit: text never becomes control tokens", text_never_becomes_control_tokens);
    run("unit: ids of published tokenizers", ids_of_published_tokenizers);
}
