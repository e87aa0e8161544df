/* chat.c: harmony. Rendering follows docs/format.md of github.com/openai/harmony, tools follow its JSON-schema-to-
 * TypeScript rules; the reader accepts what models write rather than what they should. See chat.h. */
#include "chat.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_NAME = 128, MOST_INDENT = 100, MOST_BACK = 1000 }; /* how far back a tool's message looks for its call */

/* In Reader.header they stand for the control tokens. */
enum { CHANNEL_MARK = 1, CONSTRAIN_MARK = 2 };

static const char constrain_mark[] = "<|constrain|>"; /* begins a Message.content_type */

bool chat_open(Chat *chat, const Tokenizer *t) {
    struct {
        const char *name;
        int *id;
    } tokens[] = {{"<|start|>", &chat->start},        {"<|end|>", &chat->end},
                  {"<|message|>", &chat->message},    {"<|channel|>", &chat->channel},
                  {constrain_mark, &chat->constrain}, {"<|call|>", &chat->call},
                  {"<|return|>", &chat->done},        {"<|endoftext|>", &chat->endoftext}};
    *chat = (Chat){.tokenizer = t};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        if ((*tokens[i].id = tokenizer_added(t, tokens[i].name)) < 0) return false;
    Error e;
    ids_add(&chat->answer, chat->start);
    return tokenizer_encode(t, "assistant", 9, 0, &chat->answer, &e);
}

void chat_close(Chat *chat) { ids_free(&chat->answer); }

/* ---- conversations ---- */

static char *copy_or_null(const char *text) { return text ? copy_text(text, strlen(text)) : NULL; }

void conversation_set(char **text, const char *to) {
    char *copy = copy_or_null(to);
    free(*text);
    *text = copy;
}

void conversation_init(Conversation *c) {
    char date[16];
    time_t now = time(NULL);
    struct tm today;
    strftime(date, sizeof date, "%Y-%m-%d", localtime_r(&now, &today));
    *c = (Conversation){0};
    conversation_set(&c->identity, "You are ChatGPT, a large language model trained by OpenAI.");
    conversation_set(&c->cutoff, "2024-06");
    conversation_set(&c->effort, "medium");
    conversation_set(&c->channels, "analysis, commentary, final");
    conversation_set(&c->date, date);
}

static void message_free(Message *m) {
    char *owned[] = {m->role, m->name, m->channel, m->recipient, m->content_type};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
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
    char *owned[] = {c->identity, c->cutoff, c->date, c->effort, c->channels, c->instructions};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    cJSON_Delete(c->tools);
    cJSON_Delete(c->response_format);
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
    m->role = copy_or_null(role);
    m->channel = copy_or_null(channel);
    bytes_add(&m->content, content, n);
    return m;
}

Part message_part(const Message *m) {
    if (m->recipient) return CALL;
    if (m->channel && !strcmp(m->channel, "analysis")) return REASONING;
    if (m->channel && !strcmp(m->channel, "commentary")) return PREAMBLE;
    return ANSWER;
}

/* ---- from JSON ---- */

/* A text, or an array of {"type": "text", "text": ...}. Missing is empty. */
static bool parse_text(const cJSON *value, int i, Bytes *out, Error *e) {
    const cJSON *part;
    bytes_text(out, "");
    if (!value || cJSON_IsNull(value)) return true;
    if (cJSON_IsString(value)) return bytes_text(out, value->valuestring), true;
    if (!cJSON_IsArray(value)) return fail(e, USAGE, "messages[%d].content is neither a text nor an array of parts", i);
    cJSON_ArrayForEach(part, value) {
        const char *type = json_string(part, "type"), *text = json_string(part, "text");
        if (!type || strcmp(type, "text") || !text)
            return fail(e, USAGE, "messages[%d].content has a part that is not text", i);
        bytes_text(out, text);
    }
    return true;
}

static bool parse_calls(Conversation *c, const cJSON *calls, int i, Error *e) {
    const cJSON *call;
    cJSON_ArrayForEach(call, calls) {
        const cJSON *function = json_get(call, "function");
        const char *name = json_string(function, "name"), *arguments = json_string(function, "arguments");
        if (!name || !*name || !arguments)
            return fail(e, USAGE, "messages[%d].tool_calls needs function.name and function.arguments, both texts", i);
        Message *m = conversation_add(c, "assistant", "commentary", arguments, strlen(arguments));
        Bytes recipient = {0};
        bytes_print(&recipient, "functions.%s", name);
        m->recipient = recipient.data;
        m->content_type = copy_text("<|constrain|>json", 17);
    }
    return true;
}

/* The function whose call has this id in the nearest message before `json`, else the function called last. */
static const char *called_function(const cJSON *messages, const cJSON *json, const char *id) {
    const char *last = NULL;
    const cJSON *call;
    for (int steps = MOST_BACK; json != messages->child && steps > 0; steps--) {
        const char *name = NULL;
        json = json->prev;
        cJSON_ArrayForEach(call, json_get(json, "tool_calls")) {
            const char *this = json_string(call, "id");
            name = json_string(json_get(call, "function"), "name");
            if (id && this && !strcmp(id, this)) return name;
            if (!--steps) break;
        }
        if (!last) last = name;
    }
    return last;
}

/* The tokens that a message was sampled as. Those that do not read as this message alone are of another model, or would
 * bring control tokens in: then the message is rendered anew. */
static void parse_sampled(const Chat *chat, const cJSON *sampled, Message *m) {
    Reader r;
    Bytes text = {0}, said = {0}, read = {0};
    const cJSON *id;
    reader_init(&r, chat);
    cJSON_ArrayForEach(id, sampled) {
        int64_t token;
        if (json_whole(id, 0, INT32_MAX, &token)) reader_push(&r, (int)token, &text);
    }
    if (r.messages == 1 && r.message->sampled.n == (size_t)cJSON_GetArraySize(sampled)) {
        message_json(m, &said);
        message_json(r.message, &read);
        if (!strcmp(said.data, read.data)) ids_append(&m->sampled, r.message->sampled.data, r.message->sampled.n);
    }
    reader_free(&r);
    bytes_free(&text);
    bytes_free(&said);
    bytes_free(&read);
}

static bool parse_message(Conversation *c, const Chat *chat, const cJSON *messages, const cJSON *json, int i,
                          Bytes *instructions, Error *e) {
    static const char heading[] = "# Instructions\n\n";
    const char *role = json_string(json, "role"), *channel = json_string(json, "channel"),
               *name = json_string(json, "name");
    const char *reasoning = json_string(json, "reasoning_content");
    const char *recipient = json_string(json, "recipient"), *content_type = json_string(json, "content_type");
    const cJSON *calls = json_get(json, "tool_calls"), *sampled = json_get(json, "sampled"),
                *first = json_get(json, "recipient_first");
    Bytes text = {0};
    if (!reasoning) reasoning = json_string(json, "reasoning");
    if (!role) return fail(e, USAGE, "messages[%d] has no role", i);
    if (calls && !cJSON_IsArray(calls)) return fail(e, USAGE, "messages[%d].tool_calls is not an array", i);
    if (calls && !calls->child) calls = NULL;
    bool ok = parse_text(json_get(json, "content"), i, &text, e),
         system = !strcmp(role, "system") || !strcmp(role, "developer");
    Message *m = NULL;
    if (ok && system && !c->messages) { /* a system prompt of the user's is an instruction of the developer's */
        bytes_print(instructions, "%s%s", instructions->data ? "\n\n" : "", text.data);
    } else if (ok && system) {
        bool headed = !strncmp(text.data, heading, strlen(heading));
        m = conversation_add(c, "developer", channel, heading, headed ? 0 : strlen(heading));
        bytes_add(&m->content, text.data, text.n);
    } else if (ok && !strcmp(role, "user")) {
        m = conversation_add(c, role, channel, text.data, text.n);
    } else if (ok && !strcmp(role, "tool") && name && strchr(name, '.')) { /* as harmony names authors */
        m = conversation_add(c, role, channel, text.data, text.n);
        m->name = copy_or_null(name);
    } else if (ok && !strcmp(role, "tool")) {
        const char *function = called_function(messages, json, json_string(json, "tool_call_id"));
        Bytes author = {0};
        if (!function) function = name;
        ok = function || fail(e, USAGE, "messages[%d] answers a tool call, and none came before", i);
        bytes_print(&author, "functions.%s", function ? function : "");
        m = conversation_add(c, role, "commentary", text.data, text.n);
        m->name = author.data;
        m->recipient = copy_text("assistant", 9);
        m->recipient_first = true;
    } else if (ok && !strcmp(role, "assistant")) {
        if (reasoning && *reasoning) conversation_add(c, role, "analysis", reasoning, strlen(reasoning));
        bool header = cJSON_GetObjectItemCaseSensitive(json, "channel"); /* null: one without a channel */
        if (header || recipient || content_type)
            m = conversation_add(c, role, channel, text.data, text.n);
        else if (text.n || !calls)
            m = conversation_add(c, role, calls ? "commentary" : "final", text.data, text.n);
    } else if (ok) {
        ok = fail(e, USAGE, "messages[%d] has the unknown role '%.40s'", i, role);
    }
    if (ok && (recipient || content_type)) { /* harmony's own fields, as `parse` writes them */
        if (!m) ok = fail(e, USAGE, "messages[%d] is a system prompt, yet has a recipient or content_type", i);
        if (ok && recipient) conversation_set(&m->recipient, recipient);
        if (ok && content_type) conversation_set(&m->content_type, content_type);
        if (ok) m->recipient_first = !first || cJSON_IsTrue(first);
    }
    if (ok && m && sampled) parse_sampled(chat, sampled, m);
    if (ok && !strcmp(role, "assistant")) ok = parse_calls(c, calls, i, e); /* moves what m points to */
    bytes_free(&text);
    return ok;
}

static bool parse_tools(Conversation *c, const cJSON *tools, Error *e) {
    const cJSON *tool;
    if (tools && !cJSON_IsArray(tools)) return fail(e, USAGE, "tools is not an array");
    if (!tools || !tools->child) return true;
    c->tools = cJSON_CreateArray();
    cJSON_ArrayForEach(tool, tools) {
        const cJSON *function = json_get(tool, "function");
        if (!json_string(function, "name"))
            return fail(e, USAGE, "a tool is not {\"type\": \"function\", \"function\": {\"name\": ...}}");
        cJSON_AddItemToArray(c->tools, cJSON_Duplicate(function, true));
    }
    return true;
}

static bool parse_response_format(Conversation *c, const cJSON *format, Error *e) {
    const char *type = json_string(format, "type");
    const cJSON *schema = json_get(format, "json_schema");
    if (!format || (type && !strcmp(type, "text"))) return true;
    if (!type || strcmp(type, "json_schema") || !json_string(schema, "name") || !json_get(schema, "schema"))
        return fail(
            e, USAGE,
            "response_format should be {\"type\": \"json_schema\", \"json_schema\": {\"name\": ..., \"schema\": ...}}");
    c->response_format = cJSON_Duplicate(schema, true);
    return true;
}

bool effort_known(const char *effort) {
    return !strcmp(effort, "low") || !strcmp(effort, "medium") || !strcmp(effort, "high");
}

bool conversation_parse(Conversation *c, const Chat *chat, const cJSON *json, Error *e) {
    const struct {
        const char *key;
        char **text;
    } texts[] = {{"reasoning_effort", &c->effort},
                 {"date", &c->date},
                 {"model_identity", &c->identity},
                 {"knowledge_cutoff", &c->cutoff}};
    const cJSON *messages = json_get(json, "messages"), *m, *channels = json_get(json, "channels");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const cJSON *value = json_get(json, texts[i].key);
        if (value && !cJSON_IsString(value)) return fail(e, USAGE, "%s is not a text", texts[i].key);
        if (value) conversation_set(texts[i].text, value->valuestring);
    }
    if (c->date && !strcmp(c->date, "none")) conversation_set(&c->date, NULL);
    if (!effort_known(c->effort))
        return fail(e, USAGE, "reasoning_effort should be low, medium or high and is '%.40s'", c->effort);
    if (channels && !cJSON_IsArray(channels)) return fail(e, USAGE, "channels is not an array");
    if (channels) {
        Bytes all = {0};
        bytes_text(&all, "");
        cJSON_ArrayForEach(m, channels)
            bytes_print(&all, "%s%s", all.n ? ", " : "", cJSON_IsString(m) ? m->valuestring : "");
        free(c->channels);
        c->channels = all.data;
    }
    c->bare = json_true(json, "bare");
    c->keep_analysis = json_true(json, "keep_analysis");
    if (!parse_tools(c, json_get(json, "tools"), e) || !parse_response_format(c, json_get(json, "response_format"), e))
        return false;
    if (!cJSON_IsArray(messages)) return fail(e, USAGE, "messages is not an array");
    Bytes instructions = {0};
    bool ok = true;
    int i = 0;
    for (m = messages->child; m && ok; m = m->next) ok = parse_message(c, chat, messages, m, i++, &instructions, e);
    if (instructions.data) conversation_set(&c->instructions, instructions.data);
    bytes_free(&instructions);
    return ok;
}

/* ---- to JSON ---- */

static void add_text(Bytes *out, const char *key, const char *text) {
    bytes_print(out, ",\"%s\":", key);
    json_quote(out, text, strlen(text));
}

void message_json(const Message *m, Bytes *out) {
    bytes_print(out, "{\"role\":\"%s\"", m->role);
    if (m->name) add_text(out, "name", m->name);
    if (m->channel) add_text(out, "channel", m->channel);
    if (m->recipient) add_text(out, "recipient", m->recipient);
    if (m->content_type) add_text(out, "content_type", m->content_type);
    bytes_text(out, ",\"content\":");
    json_quote(out, m->content.data, m->content.n);
    bytes_text(out, "}");
}

/* The message with all that its prompt depends on. */
static void exact_json(const Message *m, Bytes *out) {
    message_json(m, out);
    out->n--; /* the brace */
    if (!m->channel) bytes_text(out, ",\"channel\":null");
    if (m->recipient && !m->recipient_first) bytes_text(out, ",\"recipient_first\":false");
    for (size_t i = 0; i < m->sampled.n; i++) bytes_print(out, "%s%d", i ? "," : ",\"sampled\":[", m->sampled.data[i]);
    bytes_text(out, m->sampled.n ? "]}" : "}");
}

void conversation_json(const Conversation *c, Bytes *out) {
    const cJSON *tool;
    const char *before = "";
    bytes_print(out, "{\"bare\":%s,\"keep_analysis\":%s", c->bare ? "true" : "false",
                c->keep_analysis ? "true" : "false");
    add_text(out, "reasoning_effort", c->effort);
    add_text(out, "date", c->date ? c->date : "none");
    add_text(out, "model_identity", c->identity);
    add_text(out, "knowledge_cutoff", c->cutoff);
    bytes_text(out, ",\"channels\":["); /* joined as they are, which is how they are read */
    json_quote(out, c->channels, strlen(c->channels));
    bytes_text(out, "],\n\"tools\":[");
    cJSON_ArrayForEach(tool, c->tools) {
        char *text = json_text(tool);
        bytes_print(out, "%s{\"type\":\"function\",\"function\":%s}", before, text);
        before = ",\n";
        free(text);
    }
    bytes_text(out, "],\n");
    if (c->response_format) {
        char *text = json_text(c->response_format);
        bytes_print(out, "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":%s},\n", text);
        free(text);
    }
    bytes_text(out, "\"messages\":[");
    before = "";
    if (c->instructions) {
        bytes_text(out, "{\"role\":\"system\"");
        add_text(out, "content", c->instructions);
        bytes_text(out, "}");
        before = ",\n";
    }
    for (int i = 0; i < c->messages; i++, before = ",\n") {
        bytes_text(out, before);
        exact_json(c->message + i, out);
    }
    bytes_text(out, "]}\n");
}

/* ---- tools as TypeScript ---- */

/* Each line of the text as a comment. A line break at its end counts for nothing. */
static void comment(Bytes *out, const char *indent, const char *text) {
    do {
        size_t n = strcspn(text, "\n");
        bytes_print(out, "%s// %.*s\n", indent, (int)(n - (n && text[n - 1] == '\r')), text);
        text += n + (text[n] != 0);
    } while (*text);
}

static bool is_enum(const cJSON *schema) { return cJSON_GetArraySize(json_get(schema, "enum")) > 0; }

/* `before` and "default: x" if there is one, null too; a text has quotes unless it is one of an enum. */
static void add_default(Bytes *out, const char *before, const cJSON *schema) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(schema, "default");
    char *text = value ? json_text(value) : NULL;
    if (text)
        bytes_print(out, "%sdefault: %s", before, cJSON_IsString(value) && is_enum(schema) ? value->valuestring : text);
    free(text);
}

static void add_type(Bytes *out, const cJSON *schema, const char *indent);

static void add_nullable_type(Bytes *out, const cJSON *schema, const char *indent) {
    size_t before = out->n;
    add_type(out, schema, indent);
    if (json_true(schema, "nullable") && !strstr(out->data + before, "null")) bytes_text(out, " | null");
}

/* One alternative of a oneOf with its comment behind it: what is not `known` already. */
static void add_variant(Bytes *out, const cJSON *variant, const char *known, const char *indent) {
    Bytes deeper = {0}, behind = {0};
    const char *description = json_string(variant, "description");
    bytes_print(&deeper, "%s   ", indent);
    bytes_print(out, "%s | ", indent);
    add_nullable_type(out, variant, deeper.data);
    if (description && !(known && !strcmp(known, description))) bytes_print(&behind, " %s", description);
    add_default(&behind, " ", variant);
    if (behind.n) bytes_print(out, " //%s", behind.data);
    for (size_t i = out->n - behind.n; i < out->n; i++)
        if (out->data[i] == '\n') out->data[i] = ' ';
    bytes_free(&deeper);
    bytes_free(&behind);
}

static void add_property(Bytes *out, const cJSON *property, bool required, const char *indent) {
    const cJSON *examples = json_get(property, "examples"), *one_of = json_get(property, "oneOf"), *item;
    const char *title = json_string(property, "title"), *description = json_string(property, "description");
    Bytes deeper = {0}, above = {0};
    if (title) comment(out, indent, title), bytes_print(out, "%s//\n", indent);
    if (description) comment(out, indent, description);
    if (cJSON_GetArraySize(examples)) comment(out, indent, "Examples:");
    cJSON_ArrayForEach(item, examples) if (cJSON_IsString(item))
        bytes_print(out, "%s// - \"%s\"\n", indent, item->valuestring);
    if (cJSON_IsArray(one_of)) add_default(&above, "", property);
    if (above.n) comment(out, indent, above.data);
    bytes_print(out, "%s%s%s:", indent, property->string, required ? "" : "?");
    if (cJSON_IsArray(one_of)) {
        bytes_text(out, "\n");
        cJSON_ArrayForEach(item, one_of) add_variant(out, item, description, indent), bytes_text(out, "\n");
        bytes_print(out, "%s,", indent);
    } else {
        bytes_print(&deeper, "%s    ", indent);
        bytes_text(out, " ");
        add_nullable_type(out, property, deeper.data);
        bytes_text(out, ",");
        add_default(out, " // ", property);
    }
    bytes_text(out, "\n");
    bytes_free(&deeper);
    bytes_free(&above);
}

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void add_properties(Bytes *out, const cJSON *schema, const char *indent) {
    const cJSON *list = json_get(schema, "required"), *item;
    const char **required = allocate((size_t)cJSON_GetArraySize(list) * sizeof *required);
    size_t n = 0;
    cJSON_ArrayForEach(item, list) if (cJSON_IsString(item)) required[n++] = item->valuestring;
    qsort(required, n, sizeof *required, by_text);
    cJSON_ArrayForEach(item, json_get(schema, "properties"))
        add_property(out, item, bsearch(&item->string, required, n, sizeof *required, by_text), indent);
    free(required);
}

/* A JSON schema as a TypeScript type; what is nested absurdly deep is any, or indentation would grow without limit. */
static void add_type(Bytes *out, const cJSON *schema, const char *indent) {
    const cJSON *one_of = json_get(schema, "oneOf"), *types = json_get(schema, "type"), *items, *item;
    const char *type = cJSON_GetStringValue(types), *description = json_string(schema, "description");
    size_t before = out->n;
    if (strlen(indent) > MOST_INDENT) {
        bytes_text(out, "any");
    } else if (cJSON_IsArray(one_of)) {
        cJSON_ArrayForEach(item, one_of) bytes_text(out, "\n"), add_variant(out, item, NULL, indent);
    } else if (cJSON_IsArray(types)) {
        cJSON_ArrayForEach(item, types) if (cJSON_IsString(item))
            bytes_print(out, "%s%s", out->n > before ? " | " : "",
                        strcmp(item->valuestring, "integer") ? item->valuestring : "number");
        if (out->n == before) bytes_text(out, "any");
    } else if (type && !strcmp(type, "object")) {
        if (description) comment(out, indent, description);
        bytes_text(out, "{\n");
        add_properties(out, schema, indent);
        bytes_print(out, "%s}", indent);
    } else if (type && !strcmp(type, "array")) {
        if ((items = json_get(schema, "items"))) add_type(out, items, indent);
        bytes_text(out, items ? "[]" : "Array<any>");
    } else if (type && !strcmp(type, "string")) {
        cJSON_ArrayForEach(item, json_get(schema, "enum")) if (cJSON_IsString(item))
            bytes_print(out, "%s\"%s\"", out->n > before ? " | " : "", item->valuestring);
        if (out->n == before) bytes_text(out, "string");
    } else if (type && (!strcmp(type, "number") || !strcmp(type, "integer"))) {
        bytes_text(out, "number");
    } else {
        bytes_text(out, type && !strcmp(type, "boolean") ? "boolean" : "any");
    }
}

static void add_tools(Bytes *out, const cJSON *tools) {
    const cJSON *tool;
    bytes_text(out, "# Tools\n\n## functions\n\nnamespace functions {\n\n");
    cJSON_ArrayForEach(tool, tools) {
        const cJSON *parameters = json_get(tool, "parameters"), *properties = json_get(parameters, "properties");
        bool takes = (properties && properties->child) || json_get(parameters, "oneOf");
        const char *description = json_string(tool, "description");
        if (description && *description) comment(out, "", description);
        bytes_print(out, "type %s = (", json_string(tool, "name"));
        if (takes) bytes_text(out, "_: "), add_type(out, parameters, "");
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
} Renderer;

static bool flush_text(Renderer *r) {
    bool ok = !r->text.n || tokenizer_encode(r->chat->tokenizer, r->text.data, r->text.n, 0, r->out, r->e);
    r->text.n = 0;
    return ok;
}

static bool control(Renderer *r, int id) {
    if (!flush_text(r)) return false;
    ids_add(r->out, id);
    return true;
}

/* How many bytes of a word may stand in a header: none that could be read as another part of it. */
static size_t legal_length(const char *word, size_t n) {
    size_t i = 0;
    while (i < n && i < MOST_NAME && (unsigned char)word[i] > ' ' && !strchr("<>=\177", word[i])) i++;
    while (i < n && (word[i] & 0xC0) == 0x80) i--; /* whole characters */
    return i;
}

static bool header_word(Renderer *r, const char *what, const char *word) {
    size_t n = strlen(word);
    if (!n || n > MOST_NAME) return fail(r->e, USAGE, "a %s has from 1 to %d bytes, not %zu", what, MOST_NAME, n);
    if (legal_length(word, n) < n)
        return fail(r->e, USAGE, "a %s may not contain spaces, '<', '>' or '=': '%.100s'", what, word);
    bytes_text(&r->text, word);
    return true;
}

static bool render_recipient(Renderer *r, const Message *m) {
    if (!m->recipient) return true;
    bytes_text(&r->text, " to=");
    return header_word(r, "recipient", m->recipient);
}

static bool render_message(Renderer *r, const Message *m) {
    const Chat *chat = r->chat;
    bool calls = !strcmp(m->role, "assistant") && m->recipient;
    if (m->sampled.n) { /* replayed, but <|return|> is never an input */
        ids_append(r->out, m->sampled.data, m->sampled.n - 1);
        return control(r, calls ? chat->call : chat->end);
    }
    if (!control(r, chat->start) || !header_word(r, "role", m->name ? m->name : m->role)) return false;
    if (m->recipient_first && !render_recipient(r, m)) return false;
    if (m->channel && (!control(r, chat->channel) || !header_word(r, "channel", m->channel))) return false;
    if (!m->recipient_first && !render_recipient(r, m)) return false;
    if (m->content_type) {
        size_t mark = sizeof constrain_mark - 1;
        bool constrained = !strncmp(m->content_type, constrain_mark, mark);
        bytes_text(&r->text, " ");
        if (constrained && !control(r, chat->constrain)) return false;
        if (!header_word(r, "content_type", m->content_type + (constrained ? mark : 0))) return false;
    }
    if (!control(r, chat->message)) return false;
    bytes_add(&r->text, m->content.data, m->content.n);
    return control(r, calls ? chat->call : chat->end);
}

static bool render_plain(Renderer *r, const char *role, Bytes *content) {
    Message m = {.role = (char *)(uintptr_t)role, .content = *content};
    bool ok = render_message(r, &m);
    bytes_free(content);
    return ok;
}

static bool render_system(Renderer *r, const Conversation *c) {
    Bytes text = {0};
    bytes_print(&text, "%s\nKnowledge cutoff: %s\n", c->identity, c->cutoff);
    if (c->date) bytes_print(&text, "Current date: %s\n", c->date);
    bytes_print(&text, "\nReasoning: %s\n\n# Valid channels: %s. Channel must be included for every message.",
                c->effort, c->channels);
    if (c->tools) bytes_text(&text, "\nCalls to these tools must go to the commentary channel: 'functions'.");
    return render_plain(r, "system", &text);
}

static bool render_developer(Renderer *r, const Conversation *c) {
    Bytes text = {0};
    if (c->instructions && *c->instructions) bytes_print(&text, "# Instructions\n\n%s", c->instructions);
    if (c->tools) {
        if (text.n) bytes_text(&text, "\n\n");
        add_tools(&text, c->tools);
    }
    if (c->response_format) {
        const char *description = json_string(c->response_format, "description");
        char *schema = json_text(json_get(c->response_format, "schema"));
        bytes_print(&text, "%s# Response Formats\n\n## %s\n\n", text.n ? "\n\n" : "",
                    json_string(c->response_format, "name"));
        if (description) comment(&text, "", description);
        bytes_text(&text, schema);
        free(schema);
    }
    return !text.n || render_plain(r, "developer", &text);
}

static bool check_tools(const Conversation *c, Renderer *r) {
    const cJSON *tool;
    cJSON_ArrayForEach(tool, c->tools) if (!header_word(r, "function name", json_string(tool, "name"))) return false;
    r->text.n = 0;
    return true;
}

bool chat_render(const Chat *chat, const Conversation *c, bool prompt, Ids *out, Error *e) {
    Renderer r = {.chat = chat, .out = out, .e = e};
    size_t before = out->n;
    bool ok = check_tools(c, &r) && (c->bare || render_system(&r, c)) && render_developer(&r, c);
    /* The last final answer that its turn has ended with: one that something follows. Reasoning before it is dropped.
     */
    int ended = c->messages - (prompt ? 0 : 1);
    while (ended > 0 &&
           !(message_part(c->message + ended - 1) == ANSWER && !strcmp(c->message[ended - 1].role, "assistant")))
        ended--;
    for (int i = 0; i < c->messages && ok; i++) {
        const Message *m = c->message + i;
        bool reasoning = !strcmp(m->role, "assistant") && message_part(m) == REASONING;
        if (!(reasoning && i < ended && !c->keep_analysis)) ok = render_message(&r, m);
    }
    if (ok && prompt) ids_append(out, chat->answer.data, chat->answer.n);
    if (!ok) out->n = before;
    bytes_free(&r.text);
    return ok;
}

/* ---- reading ---- */

void reader_init(Reader *r, const Chat *chat) {
    *r = (Reader){.chat = chat};
    r->now.role = copy_text("assistant", 9);
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
    for (int i = 0; i < r->messages; i++) {
        Message *m = message_new(&c->message, &c->messages);
        *m = r->message[i];
        if (!strcmp(m->role, "assistant") || !strcmp(m->role, "tool")) continue;
        conversation_set(&m->role, "assistant");
        ids_free(&m->sampled);
    }
    r->messages = 0;
}

static bool is_mark(const char *s) { return *s == CHANNEL_MARK || *s == CONSTRAIN_MARK; }

/* The next word of a header and where it ends; NULL at the end. A mark is a word of its own. */
static const char *next_word(const char *s, const char **end) {
    s += strspn(s, " \t\r\n");
    if (!*s) return NULL;
    *end = is_mark(s) ? s + 1 : s + strcspn(s, " \t\r\n\1\2");
    return s;
}

static bool word_is(const char *word, const char *end, const char *text) {
    return strlen(text) == (size_t)(end - word) && !memcmp(word, text, (size_t)(end - word));
}

/* The word that a mark, or "to=", is about: right behind it; moves `end`. NULL: there is none. */
static const char *named_word(const char **end) {
    const char *after, *word = next_word(*end, &after);
    if (!word || is_mark(word)) return NULL;
    *end = after;
    return word;
}

/* Keeps of a word what chat_render will take; `end` moves there. */
static void set_word(Reader *r, char **to, const char *before, const char *word, const char **end) {
    size_t n = word ? legal_length(word, (size_t)(*end - word)) : 0;
    Bytes text = {0};
    if (!word || word + n < *end) r->repairs++;
    if (word) *end = word + n;
    if (!n) return;
    bytes_text(&text, before);
    bytes_add(&text, word, n);
    free(*to);
    *to = text.data;
}

/* Who wrote the message: the first word of a header that began with <|start|>, a role or a tool's "functions.f". */
static bool read_author(Reader *r, const char *word, const char **end) {
    static const char *const roles[] = {"system", "developer", "user", "assistant"};
    for (int i = 0; i < 4; i++)
        if (word_is(word, *end, roles[i])) return conversation_set(&r->now.role, roles[i]), true;
    if (!memchr(word, '.', legal_length(word, (size_t)(*end - word)))) return false;
    conversation_set(&r->now.role, "tool");
    set_word(r, &r->now.name, "", word, end);
    return true;
}

/* Takes a header apart: author, to=RECIPIENT anywhere, <|channel|> CHANNEL, <|constrain|> TYPE or one bare word as
 * type. What is left, where a header has none of that, was meant as content. `complete`: <|message|> ended it. */
static void read_header(Reader *r, bool complete) {
    Message *m = &r->now;
    Bytes text = {0};
    bytes_text(&text, "");
    utf8_stream(&r->header, &text, true);
    const char *end, *word = next_word(text.data, &end), *rest = NULL, *bare = NULL, *bare_end = NULL;
    if (r->started && word && !is_mark(word) && read_author(r, word, &end))
        word = next_word(end, &end);
    else if (r->started)
        r->repairs++; /* nobody wrote it: the model did */
    for (; word && !rest; word = next_word(end, &end)) {
        bool to = !strncmp(word, "to=", 3), function = !strncmp(word, "functions.", 10); /* a forgotten "to=" */
        if ((to || function) && !m->recipient) {
            if (to) word = end > word + 3 ? word + 3 : named_word(&end);
            set_word(r, &m->recipient, "", word, &end);
            m->recipient_first = !m->channel;
            r->repairs += function;
        } else if (*word == CHANNEL_MARK && !m->channel) {
            word = named_word(&end);
            set_word(r, &m->channel, "", word, &end);
        } else if (*word == CONSTRAIN_MARK && !m->content_type) {
            word = named_word(&end);
            set_word(r, &m->content_type, constrain_mark, word, &end);
        } else if (is_mark(word)) {
            r->repairs++; /* a control token too many */
        } else if (complete && !m->channel && (word_is(word, end, "analysis") || word_is(word, end, "final"))) {
            set_word(r, &m->channel, "", word, &end);
            r->repairs++; /* its mark is missing */
        } else if (complete && !bare && !m->content_type) {
            bare = word, bare_end = end;
        } else {
            rest = bare ? bare : word;
        }
    }
    if (rest) {
        r->repairs += complete;
        bytes_text(&m->content, rest);
        for (size_t i = 0; i < m->content.n; i++)
            if (is_mark(m->content.data + i)) m->content.data[i] = ' ';
    } else if (bare && !m->content_type) {
        set_word(r, &m->content_type, "", bare, &bare_end);
    }
    bytes_free(&text);
}

/* Completes the message being read and begins the next. One that says nothing is forgotten, unless it was `ended` by a
 * token of its own and has a whole header or a recipient. */
static void close_message(Reader *r, bool ended, Bytes *text, Read *read) {
    Message *m = &r->now;
    size_t before = text->n;
    if (r->in_content) {
        tokenizer_flush(&r->decoder, text);
        bytes_add(&m->content, text->data + before, text->n - before);
    } else {
        read_header(r, false);
        bytes_add(text, m->content.data, m->content.n);
    }
    read->part = message_part(m);
    read->closed = m->content.n || (ended && (r->in_content || m->recipient));
    if (read->closed)
        *message_new(&r->message, &r->messages) = *m;
    else
        message_free(m);
    *m = (Message){.role = copy_text("assistant", 9)};
    r->in_content = r->started = false;
    r->between = true;
}

static void drop_sampled(Reader *r) { /* a repaired message is not worth repeating as it was */
    ids_free(&r->now.sampled);
    r->repairs++;
}

static void push_control(Reader *r, int token, Bytes *text, Read *read) {
    const Chat *chat = r->chat;
    bool ends = token == chat->end || token == chat->call || token == chat->done || token == chat->endoftext;
    if (ends) {
        bool empty = !r->in_content && !r->header.n && !r->started; /* two ends in a row, or nothing but an end */
        if (!r->in_content) drop_sampled(r);
        if (!empty) close_message(r, true, text, read);
        read->stop = token != chat->end;
    } else if (token == chat->message && !r->in_content) {
        read_header(r, true);
        bytes_add(text, r->now.content.data, r->now.content.n);
        r->in_content = true;
    } else if (token == chat->start || (r->in_content && token == chat->channel)) { /* a new header */
        bool begun = r->in_content || r->header.n || r->started;
        if (begun) {
            drop_sampled(r);
            close_message(r, false, text, read);
        }
        ids_free(&r->now.sampled);
        if (token == chat->start) {
            ids_add(&r->now.sampled, token);
            r->started = true;
        } else {
            ids_append(&r->now.sampled, chat->answer.data, chat->answer.n);
            ids_add(&r->now.sampled, token);
            bytes_text(&r->header, "\1");
        }
    } else if (!r->in_content && (token == chat->channel || token == chat->constrain)) {
        bytes_text(&r->header, token == chat->channel ? "\1" : "\2");
    } else {
        drop_sampled(r); /* no place for it here */
    }
}

Read reader_push(Reader *r, int token, Bytes *text) {
    Read read = {0};
    bytes_text(text, "");
    if (r->between && token != r->chat->start) r->repairs++; /* a header without its beginning */
    r->between = false;
    if (tokenizer_is_control(r->chat->tokenizer, token)) {
        bool replay = r->now.sampled.n && token != r->chat->start;
        if (replay) ids_add(&r->now.sampled, token);
        push_control(r, token, text, &read);
        if (!read.closed) read.part = message_part(&r->now);
        return read;
    }
    if (r->now.sampled.n) ids_add(&r->now.sampled, token);
    if (r->in_content) {
        size_t before = text->n;
        tokenizer_decode(r->chat->tokenizer, &r->decoder, token, text);
        bytes_add(&r->now.content, text->data + before, text->n - before);
    } else { /* marks are ours alone */
        size_t before = r->header.n;
        tokenizer_bytes(r->chat->tokenizer, &r->decoder, token, &r->header);
        for (size_t i = before; i < r->header.n; i++)
            if ((unsigned char)r->header.data[i] <= 2) r->header.data[i] = ' ';
    }
    read.part = message_part(&r->now);
    return read;
}

Read reader_end(Reader *r, Bytes *text) {
    Read read = {.stop = true};
    bytes_text(text, "");
    ids_free(&r->now.sampled);
    if (r->in_content || r->header.n) close_message(r, false, text, &read);
    return read;
}
