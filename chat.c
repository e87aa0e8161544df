/* chat.c: conversations, harmony, and what every format of chats needs. Harmony follows github.com/openai/harmony: for
 * messages its docs/format.md, for tools its translation of JSON schemas to TypeScript. Its reader accepts what models
 * write, right or wrong. See chat.h. */
#include "chat.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_NAME = 128, MOST_INDENT = 100, MOST_REQUIRED = 1000, MOST_BACK = 1000 /* from a result to its call */ };
enum { START, CHANNEL, CONSTRAIN, MESSAGE, END, CALLED, RETURN, ENDOFTEXT }; /* in Chat.control */
static const char *const controls[CONTROLS] = {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>",
                                               "<|end|>",   "<|call|>",    "<|return|>",    "<|endoftext|>"};
static const char functions[] = "functions.", heading[] = "# Instructions\n\n";

/* The JSON keys of a message's texts; from HEADER on they are harmony's own. */
enum { WORDS = 6, HEADER = 3 };
static const char *const words[WORDS] = {"role", "tool_call_id", "name", "channel", "recipient", "content_type"};

Bytes bytes_of(const char *text) { return (Bytes){.data = (char *)(uintptr_t)text, .n = text ? strlen(text) : 0}; }

/* ---- conversations ---- */

void conversation_set(char **text, const char *to) {
    char *copy = to ? text_print("%s", to) : NULL;
    free(*text);
    *text = copy;
}

void conversation_init(Conversation *c) {
    char date[16];
    time_t now = time(NULL);
    struct tm today;
    strftime(date, sizeof date, "%Y-%m-%d", localtime_r(&now, &today));
    *c = (Conversation){.effort = text_print("medium"), .date = text_print("%s", date)};
}

static void message_free(Message *m) {
    for (int i = 0; i < WORDS; i++) free(m->word[i]);
    bytes_free(&m->content);
    *m = (Message){0};
}

void conversation_cut(Conversation *c, int keep) {
    while (c->messages > keep) message_free(c->message + --c->messages);
}

void conversation_free(Conversation *c) {
    free(c->effort), free(c->date), free(c->instructions);
    cJSON_Delete(c->request);
    conversation_cut(c, 0);
    free(c->message);
    *c = (Conversation){0};
}

Message *message_new(Message **list, int *n) {
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

Part kind_of(const Message *m) {
    if (same(m->role, "assistant")) return message_part(m);
    return same(m->role, "tool") ? RESULT : same(m->role, "user") ? USER : SYSTEM;
}

/* How many bytes of a word may stand in a header, where no byte may look like another part of it. */
static size_t legal_length(const char *word, size_t n) {
    size_t i = 0;
    while (i < n && i < MOST_NAME && (unsigned char)word[i] > ' ' && !strchr("<>[=%\177", word[i])) i++;
    while (i < n && (word[i] & 0xC0) == 0x80) i--; /* does not cut a character */
    return i;
}

bool chat_word(const char *word) { return word && *word && legal_length(word, strlen(word)) == strlen(word); }

static bool check_word(const char *what, const char *word, Error *e) {
    if (chat_word(word)) return true;
    return fail(e, USAGE, "a %s has 1 to %d bytes and no space, '<', '>', '[', '=' or '%%', unlike '%.100s'", what,
                MOST_NAME, word ? word : "");
}

/* ---- from JSON ---- */

/* A text, or an array of {"type": "text", "text": ...}, which line breaks join; a part of an assistant's may be of the
 * type refusal. A missing one is empty. */
static bool parse_text(const cJSON *value, bool assistant, Bytes *out) {
    const cJSON *part;
    bytes_text(out, cJSON_IsString(value) ? value->valuestring : "");
    if (!cJSON_IsArray(value)) return !value || cJSON_IsString(value);
    cJSON_ArrayForEach(part, value) {
        const char *type = assistant && json_is(part, "type", "refusal") ? "refusal" : "text";
        const char *text = json_string(part, type);
        if (!text || !json_is(part, "type", type)) return false;
        bytes_print(out, part == value->child ? "%s" : "\n%s", text);
    }
    return true;
}

Message call_of(const char *function) {
    return (Message){.role = text_print("assistant"),
                     .channel = text_print("commentary"),
                     .recipient = text_print("%s%s", functions, function),
                     .content_type = text_print("%sjson", controls[CONSTRAIN])};
}

static bool parse_calls(Conversation *c, const cJSON *calls, int i, Error *e) {
    const cJSON *call;
    if (calls && !cJSON_IsArray(calls)) return fail(e, USAGE, "messages[%d].tool_calls is not an array", i);
    cJSON_ArrayForEach(call, calls) {
        const cJSON *function = json_get(call, "function");
        const char *name = json_string(function, "name"), *arguments = json_string(function, "arguments");
        if (!name || !*name || (!arguments && json_get(function, "arguments")))
            return fail(e, USAGE, "messages[%d].tool_calls needs function.name and function.arguments, both texts", i);
        Message *m = message_new(&c->message, &c->messages);
        *m = call_of(name);
        bytes_text(&m->content, arguments && *arguments ? arguments : "{}"); /* null or empty: it has none */
        conversation_set(&m->id, json_string(call, "id"));
    }
    return true;
}

/* Finds the author of a result that does not name it as harmony does (a dot, and no id): the function that was called
 * with the result's id, or the last one called if it has none. */
static bool find_author(const Conversation *c, Message *result) {
    const char *called = NULL, *id = result->id && *result->id ? result->id : NULL;
    if (result->name && !result->id && strchr(result->name, '.')) return true;
    for (int i = c->messages - 1; i >= 0 && i >= c->messages - MOST_BACK && !called; i--) {
        const Message *m = c->message + i;
        if (kind_of(m) == CALL && (!id || same(id, m->id))) called = m->recipient;
    }
    conversation_set(&result->name, called);
    if (!result->channel) conversation_set(&result->channel, "commentary");
    if (!result->recipient) conversation_set(&result->recipient, "assistant");
    return called;
}

static bool parse_message(Conversation *c, const cJSON *json, int i, Error *e) {
    static const char *const reasons[] = {"reasoning_content", "reasoning", "thinking"};
    const char *role = json_string(json, "role"), *channel = NULL, *reason = NULL;
    bool system = same(role, "system") || same(role, "developer"), assistant = same(role, "assistant"),
         tool = same(role, "tool"), header = false; /* it has harmony's keys */
    const cJSON *calls = json_get(json, "tool_calls"), *content = json_get(json, "content");
    if (assistant && !content) content = json_get(json, "refusal");
    LocalBytes text = {0};
    if (!system && !assistant && !tool && !same(role, "user"))
        return fail(e, USAGE, "messages[%d] has the unknown role '%.40s'", i, role ? role : "");
    if (!parse_text(content, assistant, &text) || (!content && same(role, "user")))
        return fail(
            e, USAGE,
            "messages[%d].content is neither a text nor an array of text parts: images and audio are not supported", i);
    for (int w = HEADER; w < WORDS; w++) header = header || json_get(json, words[w]);
    for (int k = 0; k < 3 && assistant && !reason; k++) reason = json_string(json, reasons[k]);
    bool more = cJSON_GetArraySize(calls) || (reason && !content); /* than the text */
    if (reason && *reason) conversation_add(c, role, "analysis", reason, strlen(reason));
    if (assistant && !header) channel = cJSON_GetArraySize(calls) ? "commentary" : "final";
    if (system && !c->messages && !c->instructions) {
        conversation_set(&c->instructions, text.data);
    } else if (text.n || !channel || !more) {
        Message *m = conversation_add(c, system ? "developer" : role, channel, text.data, text.n);
        for (int w = tool ? 1 : HEADER; w < WORDS; w++)
            if (json_string(json, words[w])) conversation_set(m->word + w, json_string(json, words[w]));
        if (tool && !find_author(c, m))
            return fail(e, USAGE, "messages[%d] answers a tool call, and none came before%s%.40s", i,
                        m->id && *m->id ? " with the tool_call_id " : "", m->id ? m->id : "");
    }
    return !assistant || parse_calls(c, calls, i, e);
}

bool conversation_parse(Conversation *c, const cJSON *json, Error *e) {
    static const char *const texts[] = {"reasoning_effort", "date", "model_identity", "knowledge_cutoff", "channels"};
    const cJSON *messages = json_get(json, "messages"), *tools = json_get(json, "tools"), *each,
                *format = json_get(json, "response_format"), *schema = json_get(format, "json_schema");
    int i = 0;
    for (int t = 0; t < 5; t++)
        if (json_get(json, texts[t]) && !json_string(json, texts[t]))
            return fail(e, USAGE, "%s is not a text", texts[t]);
    if (json_string(json, "date"))
        conversation_set(&c->date, json_is(json, "date", "none") ? NULL : json_string(json, "date"));
    if (json_string(json, "reasoning_effort")) conversation_set(&c->effort, json_string(json, "reasoning_effort"));
    if (tools && !cJSON_IsArray(tools)) return fail(e, USAGE, "tools is not an array");
    cJSON_ArrayForEach(each, tools) {
        const char *name = json_string(json_get(each, "function"), "name");
        if (!check_word("tool's function.name", name, e)) return fail(e, USAGE, "tools: %s", e->text);
    }
    if (format && (schema || !(json_is(format, "type", "text") || json_is(format, "type", "json_object"))) &&
        (!json_is(format, "type", "json_schema") || !json_string(schema, "name") || !json_get(schema, "schema")))
        return fail(e, USAGE, "response_format needs the type text, json_object, or json_schema with name and schema");
    if (!cJSON_IsArray(messages)) return fail(e, USAGE, "messages is not an array");
    cJSON_ArrayForEach(each, messages) if (!parse_message(c, each, i++, e)) return false;
    c->request = cJSON_CreateObject();
    cJSON_ArrayForEach(each, json) if (!text_listed("messages reasoning_effort date", each->string))
        json_add(c->request, each->string, cJSON_Duplicate(each, true), NULL);
    return true;
}

/* ---- to JSON ---- */

cJSON *message_json(const Message *m) {
    cJSON *json = cJSON_CreateObject();
    for (int w = 0; w < WORDS; w++) cJSON_AddStringToObject(json, words[w], m->word[w]); /* NULL adds nothing */
    return json_add(json, "content", json_from_text(m->content.data, m->content.n), NULL);
}

/* ---- prompts ---- */

void chat_fill(Marked *out, const char *piece, const Bytes *before, const Bytes *text) {
    for (const char *s = piece ? piece : ""; *s;) {
        const size_t n = strcspn(s, "%");
        const Bytes *given = s[n] && s[n + 1] == 'p' ? before : text;
        marked_add(out, s, n, true);
        if (s[n] && !given) return;
        if (s[n]) marked_add(out, given->data, given->n, false);
        s += n + (s[n] ? 2 : 0);
    }
}

/* ---- tools as TypeScript ---- */

/* Writes each line of the text as a comment; nothing for NULL. */
static void comment(Bytes *out, const char *text) {
    while (text && *text) {
        size_t n = strcspn(text, "\n");
        bytes_print(out, "// %.*s\n", (int)(n - (n && text[n - 1] == '\r')), text);
        text += n + (text[n] != 0);
    }
}

/* Writes a comment on a property or a type: only its first line gets slashes, as in harmony's library. */
static void remark(Bytes *out, int indent, const char *text) {
    if (text && *text) bytes_print(out, "%*s// %s\n", indent, "", text);
}

/* "default: x" if there is a default, even null; else NULL. Only texts of enums lack quotes. */
static char *default_text(const cJSON *schema) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(schema, "default");
    bool word = json_get(schema, "enum") && cJSON_IsString(value);
    LocalBytes text = {0};
    if (value) json_written(&text, value);
    return value ? text_print("default: %s", word ? value->valuestring : text.data) : NULL;
}

static void add_type(Bytes *out, const cJSON *schema, int indent, bool may_be_null);

static void add_properties(Bytes *out, const cJSON *schema, int indent) {
    const cJSON *property, *item;
    cJSON_ArrayForEach(property, json_get(schema, "properties")) {
        const cJSON *required = json_get(schema, "required"), *name = required ? required->child : NULL;
        const char *title = json_string(property, "title");
        bool lines = json_get(property, "oneOf");
        LocalText value = default_text(property);
        for (int i = 1; name && !same(cJSON_GetStringValue(name), property->string); i++)
            name = i < MOST_REQUIRED ? name->next : NULL;
        remark(out, indent, title);
        if (title) bytes_print(out, "%*s//\n", indent, "");
        remark(out, indent, json_string(property, "description"));
        if (cJSON_GetArraySize(json_get(property, "examples"))) remark(out, indent, "Examples:");
        cJSON_ArrayForEach(item, json_get(property, "examples")) if (cJSON_IsString(item))
            bytes_print(out, "%*s// - \"%s\"\n", indent, "", item->valuestring);
        if (lines) remark(out, indent, value);
        bytes_print(out, "%*s%s%s:%s", indent, "", property->string, name ? "" : "?", lines ? "" : " ");
        add_type(out, property, indent + (lines ? 0 : 4), !lines);
        bytes_print(out, lines ? "\n%*s," : "%*s,", lines ? indent : 0, "");
        if (value && !lines) bytes_print(out, " // %s", value);
        bytes_text(out, "\n");
    }
}

/* Writes a list of texts as quoted alternatives, or `otherwise` if it has none. */
static void add_union(Bytes *out, const cJSON *list, const char *quote, const char *otherwise) {
    const cJSON *item;
    size_t before = out->n;
    cJSON_ArrayForEach(item, list) {
        const char *text = cJSON_GetStringValue(item), * or = out->n > before ? " | " : "";
        if (text) bytes_print(out, "%s%s%s%s", or, quote, *quote || !same(text, "integer") ? text : "number", quote);
    }
    if (out->n == before) bytes_text(out, otherwise);
}

/* Writes a JSON schema as a TypeScript type. Deep nesting becomes `any`, which limits the indentation. Harmony
 * reads `nullable` in properties and alternatives only, which `may_be_null`. */
static void add_type(Bytes *out, const cJSON *schema, int indent, bool may_be_null) {
    const cJSON *types = json_get(schema, "type"), *items = json_get(schema, "items"), *each;
    const char *type = cJSON_GetStringValue(types);
    size_t before = out->n;
    if (indent > MOST_INDENT) {
        bytes_text(out, "any");
    } else if (json_get(schema, "oneOf")) { /* one alternative a line, with its own comment */
        cJSON_ArrayForEach(each, json_get(schema, "oneOf")) {
            const char *note = json_string(each, "description");
            LocalText value = default_text(each);
            if (same(note, json_string(schema, "description"))) note = NULL;
            bytes_print(out, "\n%*s | ", indent, "");
            add_type(out, each, indent + 3, true);
            if (note) bytes_print(out, " // %s", note);
            if (value) bytes_print(out, "%s%s", note ? " " : " // ", value);
        }
    } else if (same(type, "object")) {
        remark(out, indent, json_string(schema, "description"));
        bytes_text(out, "{\n");
        add_properties(out, schema, indent);
        bytes_print(out, "%*s}", indent, "");
    } else if (same(type, "array")) {
        if (items) add_type(out, items, indent, false);
        bytes_text(out, items ? "[]" : "Array<any>");
    } else if (type && text_listed("string number integer boolean", type)) {
        const cJSON *words = same(type, "string") ? json_get(schema, "enum") : NULL;
        add_union(out, words, "\"", same(type, "integer") ? "number" : type);
    } else {
        add_union(out, types, "", "any");
    }
    if (may_be_null && json_true(schema, "nullable") && !strstr(out->data + before, "null")) bytes_text(out, " | null");
}

static void add_tools(Bytes *out, const cJSON *tools) {
    const cJSON *tool;
    bytes_print(out, "%s# Tools\n\n## functions\n\nnamespace functions {\n\n", out->n ? "\n\n" : "");
    cJSON_ArrayForEach(tool, tools) {
        const cJSON *function = json_get(tool, "function"), *parameters = json_get(function, "parameters");
        bool takes = cJSON_GetArraySize(json_get(parameters, "properties")) || json_get(parameters, "oneOf");
        comment(out, json_string(function, "description"));
        bytes_print(out, "type %s = (%s", json_string(function, "name"), takes ? "_: " : "");
        if (takes) add_type(out, parameters, 0, false);
        bytes_text(out, ") => any;\n\n");
    }
    bytes_text(out, "} // namespace functions");
}

/* ---- prompts of harmony ---- */

const cJSON *tools_of(const Conversation *c) {
    const cJSON *tools = json_get(c->request, "tools");
    return cJSON_GetArraySize(tools) ? tools : NULL;
}

/* A text of the system message, which a request may replace. */
static const char *setting(const Conversation *c, const char *key, const char *initial) {
    return json_string(c->request, key) ? json_string(c->request, key) : initial;
}

static void put_system(const Conversation *c, Marked *out) {
    LocalBytes text = {0};
    bytes_print(&text, "%s\nKnowledge cutoff: %s\n",
                setting(c, "model_identity", "You are ChatGPT, a large language model trained by OpenAI."),
                setting(c, "knowledge_cutoff", "2024-06"));
    if (c->date) bytes_print(&text, "Current date: %s\n", c->date);
    bytes_print(&text, "\nReasoning: %s\n\n# Valid channels: %s. Channel must be included for every message.%s",
                c->effort, setting(c, "channels", "analysis, commentary, final"),
                tools_of(c) ? "\nCalls to these tools must go to the commentary channel: 'functions'." : "");
    chat_fill(out, "<|start|>system<|message|>%s<|end|>", NULL, &text);
}

/* Harmony writes all system texts at the beginning into one message. Returns the number of the first other message. */
static int put_developer(const Conversation *c, Marked *out) {
    const cJSON *format = json_get(json_get(c->request, "response_format"), "json_schema");
    LocalBytes text = {0};
    int i = -1;
    for (const char *system = c->instructions;; system = c->message[i].content.data) {
        if (system && *system) bytes_print(&text, "%s%s", text.n ? "\n\n" : heading, system);
        if (++i == c->messages || kind_of(c->message + i) != SYSTEM) break;
    }
    if (tools_of(c)) add_tools(&text, tools_of(c));
    if (format) {
        bytes_print(&text, "%s# Response Formats\n\n## %s\n\n", text.n ? "\n\n" : "", json_string(format, "name"));
        comment(&text, json_string(format, "description"));
        json_written(&text, json_get(format, "schema"));
    }
    if (text.n) chat_fill(out, "<|start|>developer<|message|>%s<|end|>", NULL, &text);
    return i;
}

/* The header may be written as a piece, because check_word() accepts no '<', '[' and '%'. */
static bool put_message(const Message *m, Marked *out, Error *e) {
    bool call = kind_of(m) == CALL;
    const char *author = m->name ? m->name : m->role, *type = m->content_type, *end = call ? "<|call|>" : "<|end|>";
    const char *above = kind_of(m) == SYSTEM && !begins(m->content.data, heading) ? heading : "";
    LocalBytes piece = {0};
    if (!check_word("role", author, e) || (m->recipient && !check_word("recipient", m->recipient, e)) ||
        (m->channel && !check_word("channel", m->channel, e)) ||
        (type && !check_word("content_type", type + begins(type, controls[CONSTRAIN]), e)))
        return false;
    bytes_print(&piece, "<|start|>%s", author);
    if (m->recipient && !call) bytes_print(&piece, " to=%s", m->recipient);
    if (m->channel) bytes_print(&piece, "<|channel|>%s", m->channel);
    if (call) bytes_print(&piece, " to=%s", m->recipient);
    if (type) bytes_print(&piece, " %s", type);
    bytes_print(&piece, "<|message|>%s%%s%s", above, end);
    chat_fill(out, piece.data, NULL, &m->content);
    return true;
}

static bool render_harmony(const Chat *chat, const Conversation *c, bool prompt, Marked *out, Error *e) {
    if (json_true(c->request, "continue_final_message"))
        return fail(e, USAGE,
                    "continue_final_message: harmony, the chat format of this model, cannot continue a message");
    int ended = -1; /* the last answer of a turn that has ended; reasoning before it is dropped */
    for (int i = 0; i < c->messages - !prompt; i++)
        if (kind_of(c->message + i) == ANSWER) ended = i;
    if (json_true(c->request, "keep_analysis")) ended = -1;
    if (!json_true(c->request, "bare")) put_system(c, out);
    for (int i = put_developer(c, out); i < c->messages; i++) {
        bool dropped = i < ended && kind_of(c->message + i) == REASONING;
        if (!dropped && !put_message(c->message + i, out, e)) return false;
    }
    if (prompt) chat_fill(out, "<|start|>assistant", NULL, NULL);
    return true;
}

static bool force_harmony(const Chat *chat, const char *effort, const char *name, Marked *out, Error *e) {
    const Bytes function = bytes_of(name);
    const char piece[] = "<|channel|>commentary to=functions.%p <|constrain|>json<|message|>";
    chat_fill(out, piece, name ? &function : NULL, NULL);
    return true;
}

/* ---- reading harmony ---- */

/* In Reader.pending the bytes CHANNEL and CONSTRAIN, 1 and 2, stand for those tokens. */
static const char space[] = " \t\r\n", space_or_mark[] = " \t\r\n\1\2", marks[] = "\1\2";
static const char channels[] = "analysis commentary final";
static const char name_bytes[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.";

/* The length of the word of a list, "a b c", that begins the text, or 0. */
static size_t known_word(const char *text, const char *list) {
    size_t n = strcspn(list, " ");
    while (n && strncmp(text, list, n)) list += n + (list[n] == ' '), n = strcspn(list, " ");
    return n;
}

/* Is this a recipient that an assistant's message calls? */
static bool may_call(const Reader *r, const char *recipient) {
    return !text_listed("assistant user system developer tool all", recipient) &&
           reader_declares(r, recipient + begins(recipient, functions), NULL);
}

/* Splits the header into author, <|channel|> CHANNEL, to=RECIPIENT anywhere, and <|constrain|> TYPE or a bare json or
 * code. Unless <|message|> made the header `complete`, only known words belong to it, text may follow a word
 * without a space, and other text behind the channel is content. In a complete header other text is dropped. */
static void read_header(Reader *r, bool complete) {
    Message *m = &r->now;
    LocalBytes text = {0};
    bool author = r->started; /* the next word is */
    tokenizer_flush(&r->decoder, &r->pending);
    for (const char *s = r->pending.data + strspn(r->pending.data, space); *s; s += strspn(s, space), author = false) {
        char mark = strspn(s, marks) ? *s++ : 0, **field = NULL;
        s += strspn(s, space);
        bool to = begins(s, "to=");
        while (begins(s, "to=")) s += 3, s += strspn(s, space);
        if (to && begins(s, functions) && strchr(space_or_mark, s[strlen(functions)])) { /* of no name */
            s += strlen(functions), r->repairs++;
            continue;
        }
        size_t n = strcspn(s, space_or_mark), role = known_word(s, "assistant system developer user"),
               type = known_word(s, "json code"), channel = known_word(s, channels);
        r->repairs += (mark == CHANNEL && text.n) || (author && (mark || to)) || !n;
        if (mark == CHANNEL) text.n = 0; /* what precedes the channel is no content */
        if (to) {
            field = &m->recipient;
            if (!complete) n = strspn(s, name_bytes);
        } else if (mark) {
            size_t known = mark == CHANNEL ? channel : type;
            field = mark == CHANNEL ? &m->channel : &m->content_type;
            if (!complete || (mark == CHANNEL && channel)) n = known;
        } else if (author && !role && (memchr(s, '.', legal_length(s, n)) || known_word(s, "python tool") == n)) {
            conversation_set(&m->role, "tool");
            field = &m->name;
        } else if (author ? role || complete : role == n && (complete || strspn(s + n, marks))) {
            r->repairs += !author || role < n;
            if (role && (author || (!r->started && !m->channel))) free(m->role), m->role = copy_text(s, role);
            s += role ? role : n;
            continue;
        } else if (complete && channel == n && !m->channel && !strchr(s, CHANNEL)) {
            field = &m->channel, r->repairs++; /* no <|channel|> */
        } else if ((complete || m->recipient) && type == n) {
            field = &m->content_type;
        }
        n = field ? legal_length(s, n) : 0;
        if (n) {
            r->repairs += *field != NULL; /* the later one counts */
            free(*field);
            *field = text_print("%s%.*s", mark == CONSTRAIN && !to ? controls[CONSTRAIN] : "", (int)n, s);
        } else if (complete && !strspn(s, marks)) {
            const char *next = strstr(s, "to=");
            n = strcspn(s, space_or_mark), r->repairs++;
            if (next && next < s + n) n = (size_t)(next - s);
        } else if (!strspn(s, marks)) {
            bytes_add(&text, s, n = strlen(s));
        }
        s += n;
    }
    if (m->recipient && same(m->role, "assistant") && !may_call(r, m->recipient)) {
        m->recipient[strspn(m->recipient, name_bytes)] = 0; /* without what touches the name */
        if (!may_call(r, m->recipient)) conversation_set(&m->recipient, NULL);
        r->repairs++;
    }
    r->repairs += author || text.n || (complete ? !r->started : m->channel || m->recipient || m->content_type);
    for (size_t i = 0; i < text.n; i++)
        if (strspn(text.data + i, marks)) text.data[i] = ' ';
    if (same(m->role, "assistant")) bytes_add(&m->content, text.data, text.n); /* others' headers hold no answer */
}

static Read read_harmony(Reader *r, int token, int which) {
    Bytes *pending = &r->pending;
    size_t before = pending->n;
    int messages = r->messages;
    bool channel =
             which == CHANNEL && (r->in_content || (memchr(pending->data, *marks, before) &&
                                                    !strstr(pending->data, "to="))), /* behind a recipient: twice */
        opens = which == START || channel,                        /* a new message, even without <|start|> */
        ends = which >= END && which <= ENDOFTEXT, other = false; /* somebody else's turn ends the answer */
    if (opens || ends || token == STREAM_END) {
        r->repairs += ends ? !r->in_content : opens && (r->in_content || (r->started && !before));
        char *mark = r->in_content || token != STREAM_END ? NULL : memrchr(pending->data, *marks, before);
        if (mark && !known_word(mark + 1, channels) && !mark[1 + strcspn(mark + 1, space)]) /* a name cut off */
            pending->n = (size_t)(mark + 1 - pending->data), mark[1] = 0;
        if (!r->in_content) read_header(r, false);
        tokenizer_flush(&r->decoder, &r->now.content);
        other = !same(r->now.role, "assistant");
        const bool call = !other && r->now.recipient && (ends || (opens && r->in_content));
        if (call && (!r->now.content.n || strspn(r->now.content.data, space) == r->now.content.n))
            bytes_text(&r->now.content, "{}");           /* the function has no arguments */
        reader_next(r, call || (ends && r->in_content)); /* it counts if its header is whole or a call's */
        r->started = which == START;
        if (channel) bytes_add(pending, marks, 1);
    } else if (which == MESSAGE && !r->in_content) {
        read_header(r, true);
        r->in_content = true, other = !same(r->now.role, "assistant");
    } else if ((which == CHANNEL || which == CONSTRAIN) && !r->in_content) {
        tokenizer_flush(&r->decoder, pending);
        bytes_add(pending, marks + (which == CONSTRAIN), 1);
    } else if (tokenizer_is_control(r->chat->tokenizer, token)) {
        r->repairs++; /* it does not belong here */
    } else {
        tokenizer_decode(r->chat->tokenizer, &r->decoder, token, r->in_content ? &r->now.content : pending);
        for (size_t i = before; i < pending->n; i++) /* the model's own bytes 1 and 2 are no marks */
            if ((unsigned char)pending->data[i] <= 2) pending->data[i] = ' ';
    }
    const bool stop = token == STREAM_END || (ends && which != END) || other;
    return (Read){.stop = stop, .closed = r->messages > messages, .header = !r->in_content};
}

const Format harmony = {"harmony", controls, "assistant", NULL, render_harmony, force_harmony, read_harmony, NULL};

/* ---- chats ---- */

bool chat_open(Chat *chat, const Tokenizer *t, const char *template, bool gave, Error *e) {
    LocalBytes known = {0};
    for (const Format *const *f = formats; *f; f++) {
        bool all = !gave;
        *chat = (Chat){t, template, *f, *f, .name = (*f)->name, .tools = true, .schemas = true};
        for (int i = 0; i < CONTROLS; i++) {
            chat->control[i] = (*f)->control[i] ? tokenizer_added(t, (*f)->control[i]) : -1;
            all = all && chat->control[i] >= 0;
        }
        *e = (Error){0};
        if ((*f)->fits ? (*f)->fits(chat, e) : all) return true;
        if (e->code) return false;
        bytes_print(&known, known.n ? " and %s" : "%s", (*f)->name);
    }
    return fail(e, BAD_MODEL, "%s; known are %s",
                *template ? "this build does not read chat templates" : "there is no chat template", known.data);
}

void chat_close(Chat *chat) {
    if (chat->format->close) chat->format->close(chat);
}

bool chat_effort(const Chat *chat, const char *effort, Error *e) {
    return text_listed(chat->quiet ? "low medium high none" : "low medium high", effort) ||
           fail(e, USAGE, "reasoning_effort (--effort, /effort) must be low, medium or high%s, not '%.40s'",
                chat->quiet ? ", or none" : "", effort);
}

bool chat_thinks(const Chat *chat, const char *effort) { return chat->thinks && !same(effort, "none"); }

bool chat_render(const Chat *chat, const Conversation *c, bool prompt, Ids *out, Error *e) {
    LocalMarked text = {0};
    bool schema = json_get(json_get(c->request, "response_format"), "json_schema");
    if (!chat_effort(chat, c->effort, e)) return false;
    if (schema && !chat->schemas)
        return fail(e, USAGE, "response_format: %s, the chat format of this model, has none", chat->name);
    return chat->format->render(chat, c, prompt, &text, e) && tokenizer_encode_marked(chat->tokenizer, &text, out, e);
}

bool chat_force(const Chat *chat, const char *effort, const char *name, Ids *out, Error *e) {
    LocalMarked text = {0};
    return chat->answer->force(chat, effort, name, &text, e) && tokenizer_encode_marked(chat->tokenizer, &text, out, e);
}

void reader_init(Reader *r, const Chat *chat, const Conversation *c) {
    bool thinking = chat_thinks(chat, c ? c->effort : NULL);
    *r = (Reader){.chat = chat, .started = !thinking};
    if (c) r->tools = tools_of(c) ? cJSON_Duplicate(tools_of(c), true) : cJSON_CreateArray();
    r->now = (Message){.role = text_print("assistant"), .channel = thinking ? text_print("analysis") : NULL};
    bytes_text(&r->pending, chat->answer->begun);
}

void reader_free(Reader *r) {
    for (int i = 0; i < r->messages; i++) message_free(r->message + i);
    free(r->message);
    message_free(&r->now);
    cJSON_Delete(r->tools);
    bytes_free(&r->pending), bytes_free(&r->decoder.held);
    *r = (Reader){0};
}

bool reader_declares(const Reader *r, const char *name, const cJSON **function) {
    const cJSON *tool;
    cJSON_ArrayForEach(tool, r->tools) {
        const cJSON *declared = json_get(tool, "function");
        if (!same(json_string(declared, "name"), name)) continue;
        if (function) *function = declared;
        return true;
    }
    return !r->tools && chat_word(name);
}

void reader_take(Reader *r, Conversation *c) {
    for (int i = 0; i < r->messages; i++) *message_new(&c->message, &c->messages) = r->message[i];
    r->messages = 0;
}

void reader_next(Reader *r, bool counts) {
    counts = counts || r->now.content.n;
    if (counts) *message_new(&r->message, &r->messages) = r->now;
    if (!counts) message_free(&r->now);
    r->now = (Message){.role = text_print("assistant")};
    r->in_content = r->started = false;
    r->pending.n = *r->pending.data = 0;
}

Read reader_push(Reader *r, int token, Bytes *text) {
    int before = r->messages, which = 0;
    size_t known = r->now.content.n;
    while (which < CONTROLS && r->chat->control[which] != token) which++;
    Read read = r->chat->answer->read(r, token, which);
    for (int i = before; text && i <= r->messages; i++, known = 0) {
        const Bytes *content = i < r->messages ? &r->message[i].content : &r->now.content;
        if (content->n > known) bytes_add(text, content->data + known, content->n - known);
    }
    read.part = message_part(read.closed ? r->message + r->messages - 1 : &r->now);
    return read;
}

Read reader_end(Reader *r, Bytes *text) { return reader_push(r, STREAM_END, text); }
