/* chat.c: harmony. Rendering follows docs/format.md of github.com/openai/harmony, tools follow its JSON-schema-to-
 * TypeScript rules; the reader accepts what models write rather than what they should. See chat.h. */
#include "chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_NAME = 128, MOST_INDENT = 100, MOST_REQUIRED = 1000, MOST_BACK = 1000 /* from a result to its call */ };
enum { START, CHANNEL, CONSTRAIN, MESSAGE, END, CALLED, RETURN, ENDOFTEXT }; /* in Chat.control */

static const char constrained[] = "<|constrain|>", functions[] = "functions.";

/* The keys in JSON of the texts of a message; from HEADER on they are harmony's own. */
enum { WORDS = 6, HEADER = 3 };
static const char *const words[WORDS] = {"role", "tool_call_id", "name", "channel", "recipient", "content_type"};

bool chat_open(Chat *chat, const Tokenizer *t) {
    static const char *const names[CONTROLS] = {"<|start|>", "<|channel|>", constrained,  "<|message|>",
                                                "<|end|>",   "<|call|>",    "<|return|>", "<|endoftext|>"};
    Error e;
    *chat = (Chat){.tokenizer = t};
    for (int i = 0; i < CONTROLS; i++)
        if ((chat->control[i] = tokenizer_added(t, names[i])) < 0) return false;
    ids_add(&chat->answer, chat->control[START]);
    return tokenizer_encode(t, "assistant", 9, 0, &chat->answer, &e);
}

void chat_close(Chat *chat) { ids_free(&chat->answer); }

/* ---- conversations ---- */

static bool same(const char *a, const char *b) { return a && b && !strcmp(a, b); }
static bool begins(const char *text, const char *with) { return text && !strncmp(text, with, strlen(with)); }

static char *join(const char *before, const char *text, size_t n) {
    Bytes all = {0};
    bytes_text(&all, before);
    bytes_add(&all, text, n);
    return all.data;
}

void conversation_set(char **text, const char *to) {
    char *copy = to ? copy_text(to, strlen(to)) : NULL;
    free(*text);
    *text = copy;
}

void conversation_init(Conversation *c) {
    char date[16];
    time_t now = time(NULL);
    struct tm today;
    strftime(date, sizeof date, "%Y-%m-%d", localtime_r(&now, &today));
    *c = (Conversation){0};
    conversation_set(&c->effort, "medium");
    conversation_set(&c->date, date);
}

static void message_free(Message *m) {
    for (int i = 0; i < WORDS; i++) free(m->word[i]);
    bytes_free(&m->content);
    ids_free(&m->sampled);
    *m = (Message){0};
}

void conversation_remove(Conversation *c, int from, int n) {
    for (int i = from; i < from + n; i++) message_free(c->message + i);
    memmove(c->message + from, c->message + from + n, (size_t)(c->messages - from - n) * sizeof *c->message);
    c->messages -= n;
}

void conversation_free(Conversation *c) {
    free(c->effort), free(c->date), free(c->instructions);
    cJSON_Delete(c->request);
    if (c->messages) conversation_remove(c, 0, c->messages);
    free(c->message);
    *c = (Conversation){0};
}

static Message *message_new(Message **list, int *n) {
    *list = reallocate(*list, (size_t)(*n + 1) * sizeof **list);
    (*list)[*n] = (Message){0};
    return *list + (*n)++;
}

Message *conversation_add(Conversation *c, const char *role, const char *channel, const char *content, size_t n) {
    Message *m = message_new(&c->message, &c->messages);
    conversation_set(&m->role, role);
    conversation_set(&m->channel, channel);
    bytes_add(&m->content, content, n);
    return m;
}

Part message_part(const Message *m) {
    if (m->recipient) return CALL;
    return same(m->channel, "analysis") ? REASONING : same(m->channel, "commentary") ? PREAMBLE : ANSWER;
}

bool effort_known(const char *effort) { return same(effort, "low") || same(effort, "medium") || same(effort, "high"); }

/* How many bytes of a word may stand in a header: none that could be read as another part of it. */
static size_t legal_length(const char *word, size_t n) {
    size_t i = 0;
    while (i < n && i < MOST_NAME && (unsigned char)word[i] > ' ' && !strchr("<>=\177", word[i])) i++;
    while (i < n && (word[i] & 0xC0) == 0x80) i--; /* whole characters */
    return i;
}

static bool check_word(const char *what, const char *word, Error *e) {
    if (word && *word && legal_length(word, strlen(word)) == strlen(word)) return true;
    return fail(e, USAGE, "a %s has 1 to %d bytes and no space, '<', '>' or '=', unlike '%.100s'", what, MOST_NAME,
                word ? word : "");
}

/* ---- from JSON ---- */

/* A text, or an array of {"type": "text", "text": ...}. Missing is empty. */
static bool parse_text(const cJSON *value, Bytes *out) {
    const cJSON *part;
    bytes_text(out, cJSON_IsString(value) ? value->valuestring : "");
    if (!cJSON_IsArray(value)) return !value || cJSON_IsString(value);
    cJSON_ArrayForEach(part, value) {
        const char *text = json_string(part, "text");
        if (!text || !same(json_string(part, "type"), "text")) return false;
        bytes_text(out, text);
    }
    return true;
}

static bool parse_calls(Conversation *c, const cJSON *calls, int i, Error *e) {
    const cJSON *call;
    if (calls && !cJSON_IsArray(calls)) return fail(e, USAGE, "messages[%d].tool_calls is not an array", i);
    cJSON_ArrayForEach(call, calls) {
        const cJSON *function = json_get(call, "function");
        const char *name = json_string(function, "name"), *arguments = json_string(function, "arguments");
        if (!name || !*name || !arguments)
            return fail(e, USAGE, "messages[%d].tool_calls needs function.name and function.arguments, both texts", i);
        Message *m = conversation_add(c, "assistant", "commentary", arguments, strlen(arguments));
        m->recipient = join(functions, name, strlen(name));
        m->content_type = join(constrained, "json", 4);
        conversation_set(&m->id, json_string(call, "id"));
    }
    return true;
}

/* The author of a tool's message, unless harmony's own name stands there: the function that was called with its id, or
 * the one called last. */
static bool find_author(const Conversation *c, Message *result) {
    const char *called = NULL;
    bool same_id = false;
    if (result->name && strchr(result->name, '.')) return true;
    for (int i = c->messages - 1; i >= 0 && i >= c->messages - MOST_BACK && !same_id; i--) {
        const Message *m = c->message + i;
        if (!same(m->role, "assistant") || !m->recipient) continue;
        same_id = same(result->id, m->id);
        if (same_id || !called) called = m->recipient;
    }
    conversation_set(&result->name, called);
    if (!result->channel) conversation_set(&result->channel, "commentary");
    if (!result->recipient) conversation_set(&result->recipient, "assistant");
    return called;
}

static bool parse_message(Conversation *c, const cJSON *json, int i, Error *e) {
    static const char *const reasons[] = {"reasoning_content", "reasoning", "thinking"},
                             heading[] = "# Instructions\n\n";
    const cJSON *calls = json_get(json, "tool_calls");
    const char *role = json_string(json, "role"), *channel = NULL, *reason = NULL;
    bool system = same(role, "system") || same(role, "developer"), assistant = same(role, "assistant"), ok = true,
         tool = same(role, "tool"), header = false; /* in harmony's words */
    Bytes text = {0};
    if (!system && !assistant && !tool && !same(role, "user"))
        return fail(e, USAGE, "messages[%d] has the unknown role '%.40s'", i, role ? role : "");
    if (!parse_text(json_get(json, "content"), &text))
        ok = fail(e, USAGE, "messages[%d].content is neither a text nor an array of text parts", i);
    for (int w = HEADER; w < WORDS; w++) header = header || json_get(json, words[w]);
    for (int k = 0; k < 3 && assistant && !reason; k++) reason = json_string(json, reasons[k]);
    if (reason && *reason) conversation_add(c, role, "analysis", reason, strlen(reason));
    if (assistant && !header) channel = cJSON_GetArraySize(calls) ? "commentary" : "final";
    if (system && !c->messages) { /* a system prompt of the user's is an instruction of the developer's */
        Bytes all = {0};
        bytes_print(&all, "%s%s%s", c->instructions ? c->instructions : "", c->instructions ? "\n\n" : "", text.data);
        conversation_set(&c->instructions, all.data);
        bytes_free(&all);
    } else if (text.n || !channel || !(reason || cJSON_GetArraySize(calls))) {
        bool headed = !system || begins(text.data, heading);
        Message *m = conversation_add(c, system ? "developer" : role, channel, heading, headed ? 0 : strlen(heading));
        bytes_add(&m->content, text.data, text.n);
        for (int w = tool ? 1 : HEADER; w < WORDS; w++)
            if (json_string(json, words[w])) conversation_set(m->word + w, json_string(json, words[w]));
        if (tool && !find_author(c, m))
            ok = fail(e, USAGE, "messages[%d] answers a tool call, and none came before", i);
    }
    bytes_free(&text);
    return ok && (!assistant || parse_calls(c, calls, i, e));
}

bool conversation_parse(Conversation *c, const cJSON *json, Error *e) {
    static const char *const texts[] = {"reasoning_effort", "date", "model_identity", "knowledge_cutoff", "channels"};
    const cJSON *messages = json_get(json, "messages"), *tools = json_get(json, "tools"), *each,
                *format = json_get(json, "response_format"), *schema = json_get(format, "json_schema");
    const char *type = json_string(format, "type");
    int i = 0;
    for (int t = 0; t < 5; t++)
        if (json_get(json, texts[t]) && !json_string(json, texts[t]))
            return fail(e, USAGE, "%s is not a text", texts[t]);
    if (json_string(json, "date")) conversation_set(&c->date, json_string(json, "date"));
    if (json_string(json, "reasoning_effort")) conversation_set(&c->effort, json_string(json, "reasoning_effort"));
    if (!effort_known(c->effort))
        return fail(e, USAGE, "reasoning_effort must be low, medium or high, not '%.40s'", c->effort);
    if (tools && !cJSON_IsArray(tools)) return fail(e, USAGE, "tools is not an array");
    cJSON_ArrayForEach(each, tools) {
        const char *name = json_string(json_get(each, "function"), "name");
        if (!check_word("tool's function.name", name, e)) return false;
    }
    if (format && (schema || !same(type, "text")) &&
        (!same(type, "json_schema") || !json_string(schema, "name") || !json_get(schema, "schema")))
        return fail(e, USAGE, "response_format needs the type json_schema, json_schema.name and json_schema.schema");
    if (!cJSON_IsArray(messages)) return fail(e, USAGE, "messages is not an array");
    cJSON_ArrayForEach(each, messages) if (!parse_message(c, each, i++, e)) return false;
    c->request = cJSON_Duplicate(json, true);
    cJSON_DeleteItemFromObjectCaseSensitive(c->request, "messages");
    for (int t = 0; t < 2; t++) cJSON_DeleteItemFromObjectCaseSensitive(c->request, texts[t]);
    return true;
}

/* ---- to JSON ---- */

static void append_json(Bytes *out, cJSON *json) {
    char *text = json_text(json);
    bytes_text(out, text);
    free(text);
    cJSON_Delete(json);
}

/* As harmony has it, or message `number` of a conversation as chat completions do, as far as they have words for it. */
static cJSON *message_object(const Message *m, int number) {
    cJSON *json = cJSON_CreateObject(), *to = json;
    bool own = same(m->role, "assistant") && number >= 0, thought = own && message_part(m) == REASONING;
    bool call = own && begins(m->recipient, functions) && m->recipient[strlen(functions)];
    int n = number >= 0 && m->id ? HEADER - 1 : WORDS; /* a result's id says it all */
    if (call || thought) n = 1;
    if (own && same(m->channel, "final") && !m->recipient) n = HEADER;
    for (int w = 0; w < n; w++) cJSON_AddStringToObject(json, words[w], m->word[w]); /* NULL adds nothing */
    if (call) {
        char id[32];
        snprintf(id, sizeof id, "call_%d", number);
        cJSON_AddItemToArray(cJSON_AddArrayToObject(json, "tool_calls"), to = cJSON_CreateObject());
        cJSON_AddStringToObject(to, "id", m->id ? m->id : id);
        cJSON_AddStringToObject(to, "type", "function");
        to = cJSON_AddObjectToObject(to, "function");
        cJSON_AddStringToObject(to, "name", m->recipient + strlen(functions));
    }
    const char *key = call ? "arguments" : thought ? "reasoning_content" : "content";
    cJSON_AddItemToObject(to, key, json_from_text(m->content.data, m->content.n));
    return json;
}

void message_json(const Message *m, Bytes *out) { append_json(out, message_object(m, -1)); }

void conversation_json(const Conversation *c, Bytes *out) {
    cJSON *json = c->request ? cJSON_Duplicate(c->request, true) : cJSON_CreateObject(), *system = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "reasoning_effort", c->effort);
    cJSON_AddStringToObject(json, "date", c->date ? c->date : "none");
    cJSON *messages = cJSON_AddArrayToObject(json, "messages");
    cJSON_AddStringToObject(system, "role", "system");
    if (cJSON_AddStringToObject(system, "content", c->instructions)) /* unless it is NULL */
        cJSON_AddItemToArray(messages, system);
    else
        cJSON_Delete(system);
    for (int i = 0; i < c->messages; i++) cJSON_AddItemToArray(messages, message_object(c->message + i, i));
    append_json(out, json);
}

/* ---- tools as TypeScript ---- */

/* Each line of the text as a comment; nothing for NULL. A line break at its end counts for nothing. */
static void comment(Bytes *out, int indent, const char *text) {
    while (text && *text) {
        size_t n = strcspn(text, "\n");
        bytes_print(out, "%*s// %.*s\n", indent, "", (int)(n - (n && text[n - 1] == '\r')), text);
        text += n + (text[n] != 0);
    }
}

/* `before` and "default: x" if there is one, null too; a text has quotes unless it is one of an enum. */
static void add_default(Bytes *out, const char *before, const cJSON *schema) {
    cJSON *value = cJSON_Duplicate(cJSON_GetObjectItemCaseSensitive(schema, "default"), true);
    if (value) bytes_print(out, "%sdefault: ", before);
    if (json_get(schema, "enum") && cJSON_IsString(value)) value->type = cJSON_Raw;
    if (value) append_json(out, value);
}

static void add_type(Bytes *out, const cJSON *schema, int indent);

/* The alternatives of a oneOf, each a line with its comment, unless that is the comment of them all. */
static void add_variants(Bytes *out, const cJSON *schema, int indent) {
    const cJSON *variant;
    cJSON_ArrayForEach(variant, json_get(schema, "oneOf")) {
        const char *description = json_string(variant, "description");
        if (same(description, json_string(schema, "description"))) description = NULL;
        bytes_print(out, "\n%*s | ", indent, "");
        add_type(out, variant, indent + 3);
        size_t behind = out->n;
        if (description) bytes_print(out, " // %s", description);
        add_default(out, description ? " " : " // ", variant);
        for (size_t i = behind; i < out->n; i++)
            if (out->data[i] == '\n') out->data[i] = ' ';
    }
}

static void add_properties(Bytes *out, const cJSON *schema, int indent) {
    const cJSON *property, *item;
    cJSON_ArrayForEach(property, json_get(schema, "properties")) {
        const char *title = json_string(property, "title"), *name = property->string;
        bool required = false, lines = json_get(property, "oneOf");
        int most = MOST_REQUIRED;
        cJSON_ArrayForEach(item,
                           json_get(schema, "required")) if ((required = same(cJSON_GetStringValue(item), name)) ||
                                                             !--most) break;
        comment(out, indent, title);
        if (title) bytes_print(out, "%*s//\n", indent, "");
        comment(out, indent, json_string(property, "description"));
        if (cJSON_GetArraySize(json_get(property, "examples"))) comment(out, indent, "Examples:");
        cJSON_ArrayForEach(item, json_get(property, "examples")) if (cJSON_IsString(item))
            bytes_print(out, "%*s// - \"%s\"\n", indent, "", item->valuestring);
        Bytes above = {0};
        if (lines) add_default(&above, "", property);
        comment(out, indent, above.data);
        bytes_free(&above);
        bytes_print(out, "%*s%s%s:%s", indent, "", name, required ? "" : "?", lines ? "" : " ");
        add_type(out, property, indent + (lines ? 0 : 4));
        if (lines) bytes_print(out, "\n%*s", indent, "");
        bytes_text(out, ",");
        if (!lines) add_default(out, " // ", property);
        bytes_text(out, "\n");
    }
}

/* The texts of a list as alternatives between quotes, or else `otherwise`. */
static void add_union(Bytes *out, const cJSON *list, const char *quote, const char *otherwise) {
    const cJSON *item;
    size_t before = out->n;
    cJSON_ArrayForEach(item, list) {
        const char *text = cJSON_GetStringValue(item), * or = out->n > before ? " | " : "";
        if (text) bytes_print(out, "%s%s%s%s", or, quote, *quote || !same(text, "integer") ? text : "number", quote);
    }
    if (out->n == before) bytes_text(out, otherwise);
}

/* A JSON schema as a TypeScript type; what is nested absurdly deep is any, or indentation would grow without limit. */
static void add_type(Bytes *out, const cJSON *schema, int indent) {
    const cJSON *types = json_get(schema, "type"), *items = json_get(schema, "items");
    const char *type = cJSON_GetStringValue(types);
    size_t before = out->n;
    if (indent > MOST_INDENT) {
        bytes_text(out, "any");
    } else if (json_get(schema, "oneOf")) {
        add_variants(out, schema, indent);
    } else if (same(type, "object")) {
        comment(out, indent, json_string(schema, "description"));
        bytes_text(out, "{\n");
        add_properties(out, schema, indent);
        bytes_print(out, "%*s}", indent, "");
    } else if (same(type, "array")) {
        if (items) add_type(out, items, indent);
        bytes_text(out, items ? "[]" : "Array<any>");
    } else if (same(type, "string")) {
        add_union(out, json_get(schema, "enum"), "\"", "string");
    } else if (same(type, "number") || same(type, "integer") || same(type, "boolean")) {
        bytes_text(out, *type == 'b' ? "boolean" : "number");
    } else {
        add_union(out, types, "", "any");
    }
    if (json_true(schema, "nullable") && !strstr(out->data + before, "null")) bytes_text(out, " | null");
}

static void add_tools(Bytes *out, const cJSON *tools) {
    const cJSON *tool;
    bytes_text(out, "# Tools\n\n## functions\n\nnamespace functions {\n\n");
    cJSON_ArrayForEach(tool, tools) {
        const cJSON *function = json_get(tool, "function"), *parameters = json_get(function, "parameters");
        bool takes = cJSON_GetArraySize(json_get(parameters, "properties")) || json_get(parameters, "oneOf");
        comment(out, 0, json_string(function, "description"));
        bytes_print(out, "type %s = (%s", json_string(function, "name"), takes ? "_: " : "");
        if (takes) add_type(out, parameters, 0);
        bytes_text(out, ") => any;\n\n");
    }
    bytes_text(out, "} // namespace functions");
}

/* ---- rendering ---- */

typedef struct {
    const Chat *chat;
    Bytes text; /* ordinary text since the last control token: encoded in one piece */
    Ids *out;
    Error *e;
    bool ok;
} Renderer;

static void control(Renderer *r, int which) {
    if (r->ok && r->text.n) r->ok = tokenizer_encode(r->chat->tokenizer, r->text.data, r->text.n, 0, r->out, r->e);
    r->text.n = 0;
    ids_add(r->out, r->chat->control[which]);
}

static void header_word(Renderer *r, const char *before, const char *what, const char *word) {
    r->ok = r->ok && check_word(what, word, r->e);
    bytes_print(&r->text, "%s%s", before, word);
}

static void render_message(Renderer *r, const Message *m) {
    int end = same(m->role, "assistant") && m->recipient ? CALLED : END;
    bool mark = begins(m->content_type, constrained);
    if (m->sampled.n) { /* replayed, but <|return|> is never an input */
        ids_append(r->out, m->sampled.data, m->sampled.n - 1);
        control(r, end);
        return;
    }
    control(r, START);
    header_word(r, "", "role", m->name ? m->name : m->role);
    bool first = !same(m->role, "assistant"); /* the recipient stands before the channel */
    if (m->recipient && first) header_word(r, " to=", "recipient", m->recipient);
    if (m->channel) control(r, CHANNEL), header_word(r, "", "channel", m->channel);
    if (m->recipient && !first) header_word(r, " to=", "recipient", m->recipient);
    if (m->content_type) bytes_text(&r->text, " ");
    if (mark) control(r, CONSTRAIN);
    if (m->content_type) header_word(r, "", "content_type", m->content_type + (mark ? strlen(constrained) : 0));
    control(r, MESSAGE);
    bytes_add(&r->text, m->content.data, m->content.n);
    control(r, end);
}

static void render_text(Renderer *r, const char *role, Bytes *content) {
    Message m = {.role = (char *)(uintptr_t)role, .content = *content};
    if (content->n) render_message(r, &m);
    bytes_free(content);
}

/* A text of the system message that is seldom another than `initial`. */
static const char *setting(const Conversation *c, const char *key, const char *initial) {
    return json_string(c->request, key) ? json_string(c->request, key) : initial;
}

static void render_system(Renderer *r, const Conversation *c) {
    Bytes text = {0};
    bytes_print(&text, "%s\nKnowledge cutoff: %s\n",
                setting(c, "model_identity", "You are ChatGPT, a large language model trained by OpenAI."),
                setting(c, "knowledge_cutoff", "2024-06"));
    if (c->date && !same(c->date, "none")) bytes_print(&text, "Current date: %s\n", c->date);
    bytes_print(&text, "\nReasoning: %s\n\n# Valid channels: %s. Channel must be included for every message.",
                c->effort, setting(c, "channels", "analysis, commentary, final"));
    if (cJSON_GetArraySize(json_get(c->request, "tools")))
        bytes_text(&text, "\nCalls to these tools must go to the commentary channel: 'functions'.");
    render_text(r, "system", &text);
}

static void render_developer(Renderer *r, const Conversation *c) {
    const cJSON *tools = json_get(c->request, "tools"),
                *format = json_get(json_get(c->request, "response_format"), "json_schema");
    Bytes text = {0};
    if (c->instructions && *c->instructions) bytes_print(&text, "# Instructions\n\n%s", c->instructions);
    if (cJSON_GetArraySize(tools)) {
        if (text.n) bytes_text(&text, "\n\n");
        add_tools(&text, tools);
    }
    if (format) {
        bytes_print(&text, "%s# Response Formats\n\n## %s\n\n", text.n ? "\n\n" : "", json_string(format, "name"));
        comment(&text, 0, json_string(format, "description"));
        append_json(&text, cJSON_Duplicate(json_get(format, "schema"), true));
    }
    render_text(r, "developer", &text);
}

bool chat_render(const Chat *chat, const Conversation *c, bool prompt, Ids *out, Error *e) {
    Renderer r = {.chat = chat, .out = out, .e = e, .ok = true};
    size_t before = out->n;
    int ended = -1; /* the last final answer that something follows: reasoning before it is dropped */
    for (int i = 0; i < c->messages - !prompt; i++)
        if (same(c->message[i].role, "assistant") && message_part(c->message + i) == ANSWER) ended = i;
    if (!json_true(c->request, "bare")) render_system(&r, c);
    render_developer(&r, c);
    for (int i = 0; i < c->messages; i++) {
        bool reasoning = same(c->message[i].role, "assistant") && message_part(c->message + i) == REASONING;
        if (!reasoning || i > ended || json_true(c->request, "keep_analysis")) render_message(&r, c->message + i);
    }
    if (prompt) ids_append(out, chat->answer.data, chat->answer.n);
    if (!r.ok) out->n = before;
    bytes_free(&r.text);
    return r.ok;
}

/* ---- reading ---- */

void reader_init(Reader *r, const Chat *chat) {
    *r = (Reader){.chat = chat, .started = true};
    conversation_set(&r->now.role, "assistant");
    bytes_text(&r->header, "assistant");
    ids_append(&r->now.sampled, chat->answer.data, chat->answer.n);
}

void reader_free(Reader *r) {
    for (int i = 0; i < r->messages; i++) message_free(r->message + i);
    free(r->message);
    message_free(&r->now);
    bytes_free(&r->header);
    bytes_free(&r->decoder.held);
    *r = (Reader){0};
}

void reader_take(Reader *r, Conversation *c) {
    for (int i = 0; i < r->messages; i++) *message_new(&c->message, &c->messages) = r->message[i];
    r->messages = 0;
}

/* In Reader.header the bytes 1 and 2 stand for <|channel|> and <|constrain|>. */
static const char space[] = " \t\r\n", space_or_mark[] = " \t\r\n\1\2", marks[] = "\1\2";

/* The length of the known word that begins the text, or 0. */
static size_t known_word(const char *text, const char *const *known) {
    while (*known && !begins(text, *known)) known++;
    return *known ? strlen(*known) : 0;
}

/* Takes a word of a header; *field is what it names, by its place or by a mark or "to=" before it. Returns how much of
 * it was taken; 0: it is text. Where <|message|> is missing, only known words are a header. */
static size_t read_word(Reader *r, const char *word, size_t n, bool complete, char ***field) {
    static const char *const roles[] = {"assistant", "system", "developer", "user", NULL},
                             *const channels[] = {"analysis", "commentary", "final", NULL},
                             *const types[] = {"json", "code", NULL};
    Message *m = &r->now;
    size_t role = known_word(word, roles), channel = known_word(word, channels), type = known_word(word, types);
    const char *before = *field == &m->content_type ? constrained : "";
    if (begins(word, "to=")) return r->repairs += *field || m->recipient, *field = &m->recipient, 3;
    if (*field == &m->role) { /* the author */
        bool tool = role < n && memchr(word, '.', legal_length(word, n));
        *field = NULL;
        if (begins(word, *roles)) return r->repairs += role < n, role; /* what touches it is a word of its own */
        if (!tool && (complete || role == n)) return r->repairs++, n;  /* it cannot be but the model */
        if (tool) conversation_set(&m->role, "tool"), *field = &m->name;
    }
    if (!*field && role == n && (complete || strspn(word + n, marks))) return r->repairs++, n; /* no <|start|> */
    bool unmarked = complete && channel == n && !m->channel && !strchr(word, CHANNEL);         /* no <|channel|> */
    if (!*field && unmarked) *field = &m->channel, r->repairs++;
    if (!*field && (complete || m->recipient) && type == n) *field = &m->content_type;
    if (*field == &m->channel && (channel || !complete)) n = channel; /* text may touch it */
    if (*field == &m->content_type && !complete) n = type;
    n = *field ? legal_length(word, n) : 0;
    if (!n) return 0;
    r->repairs += **field != NULL; /* a second one, which counts */
    free(**field);
    **field = join(before, word, n);
    *field = NULL;
    return n;
}

/* Takes the header apart: author, to=RECIPIENT anywhere, <|channel|> CHANNEL, <|constrain|> TYPE or a bare json or
 * code. What is left behind the channel, or where <|message|> is missing, was meant as content. */
static void read_header(Reader *r, bool complete, Bytes *shown) {
    Message *m = &r->now;
    Bytes header = {0}, text = {0};
    char **field = r->started ? &m->role : NULL;
    bytes_text(&header, "");
    utf8_stream(&r->header, &header, true);
    for (const char *s = header.data + strspn(header.data, space); *s; s += strspn(s, space)) {
        size_t n = strcspn(s, space_or_mark), taken = n ? read_word(r, s, n, complete, &field) : 1;
        if (!n) { /* a mark; what stood before the channel is no content */
            r->repairs += field || text.n;
            field = *s == CHANNEL ? &m->channel : &m->content_type;
            if (*s == CHANNEL) text.n = 0;
        } else if (!taken) {
            bytes_add(&text, s, taken = m->channel || !complete ? strlen(s) : strcspn(s, marks));
        }
        s += taken;
    }
    bool any = m->channel || m->recipient || m->content_type;
    r->repairs += field || text.n || (complete ? !r->started : any);
    for (size_t i = 0; i < text.n; i++)
        if (strspn(text.data + i, marks)) text.data[i] = ' ';
    if (!complete || !m->recipient) bytes_add(&m->content, text.data, text.n); /* it would spoil a call's arguments */
    bytes_add(shown, m->content.data, m->content.n);
    bytes_free(&header);
    bytes_free(&text);
}

/* Completes the message being read and begins the next. One that says nothing is forgotten, unless it was `ended` by a
 * token of its own and has a whole header or a recipient. One that had to be repaired is not replayed as it was. */
static void close_message(Reader *r, bool ended, Bytes *text, Read *read) {
    Message *m = &r->now;
    if (!r->in_content) read_header(r, false, text);
    size_t before = text->n;
    tokenizer_flush(&r->decoder, text);
    bytes_add(&m->content, text->data + before, text->n - before);
    if (!ended || r->repairs > r->sound) ids_free(&m->sampled);
    read->part = message_part(m);
    read->closed = m->content.n || (ended && (r->in_content || m->recipient));
    if (read->closed) *message_new(&r->message, &r->messages) = *m;
    if (!read->closed) message_free(m);
    *m = (Message){.role = join("assistant", "", 0)};
    r->in_content = r->started = false;
    r->sound = r->repairs;
}

Read reader_push(Reader *r, int token, Bytes *text) {
    const Tokenizer *t = r->chat->tokenizer;
    Read read = {0};
    int which = 0;
    while (which < CONTROLS && r->chat->control[which] != token) which++;
    bytes_text(text, "");
    ids_add(&r->now.sampled, token);
    size_t shown = text->n, header = r->header.n;
    bool channel = which == CHANNEL && (r->in_content || (header && memchr(r->header.data, *marks, header)));
    if (which == START || channel) { /* a new header; only <|start|> may begin one */
        r->repairs += r->in_content || (r->started && !header);
        close_message(r, false, text, &read);
        ids_add(&r->now.sampled, token);
        r->started = which == START;
        if (channel) bytes_add(&r->header, marks, 1);
    } else if (which >= END && which < CONTROLS) {
        r->repairs += !r->in_content;
        close_message(r, true, text, &read);
        read.stop = which != END;
    } else if (which == MESSAGE && !r->in_content) {
        read_header(r, true, text);
        r->in_content = true;
    } else if ((which == CHANNEL || which == CONSTRAIN) && !r->in_content) {
        bytes_add(&r->header, marks + (which == CONSTRAIN), 1);
    } else if (tokenizer_is_control(t, token)) {
        r->repairs++; /* it has no place here */
    } else if (r->in_content) {
        tokenizer_decode(t, &r->decoder, token, text);
        bytes_add(&r->now.content, text->data + shown, text->n - shown);
    } else { /* marks are ours alone */
        tokenizer_bytes(t, &r->decoder, token, &r->header);
        for (size_t i = header; i < r->header.n; i++)
            if ((unsigned char)r->header.data[i] <= 2) r->header.data[i] = ' ';
    }
    if (!read.closed) read.part = message_part(&r->now);
    return read;
}

Read reader_end(Reader *r, Bytes *text) {
    Read read = {.stop = true};
    bytes_text(text, "");
    close_message(r, false, text, &read);
    return read;
}
