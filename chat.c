/* chat.c: conversations, harmony, and a table of simpler formats. Harmony follows docs/format.md of
 * github.com/openai/harmony, tools its JSON-schema-to-TypeScript rules; the others write what the chat templates
 * published with the models do. The readers accept what models write rather than what they should. See chat.h. */
#include "gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_TEMPLATE = 32 << 20 };
enum { MOST_NAME = 128, MOST_INDENT = 100, MOST_REQUIRED = 1000, MOST_BACK = 1000 /* from a result to its call */ };
enum { START, CHANNEL, CONSTRAIN, MESSAGE, END, CALLED, RETURN, ENDOFTEXT }; /* in Chat.control */

static const char constrained[] = "<|constrain|>", functions[] = "functions.", heading[] = "# Instructions\n\n",
                  open_think[] = "<think>", close_think[] = "</think>", open_call[] = "<tool_call>",
                  close_call[] = "</tool_call>";

/* The keys in JSON of the texts of a message; from HEADER on they are harmony's own. */
enum { WORDS = 6, HEADER = 3 };
static const char *const words[WORDS] = {"role", "tool_call_id", "name", "channel", "recipient", "content_type"};

static bool same(const char *a, const char *b) { return a && b && !strcmp(a, b); }
static bool begins(const char *text, const char *with) { return text && !strncmp(text, with, strlen(with)); }

/* ---- formats ---- */

enum {
    FIRST = 1,  /* the system text stands before the user's first text, */
    LAST = 2,   /* or before the last one */
    THINKS = 4, /* between <think> and </think> */
    KEEPS = 8,  /* thoughts since the last question stay in the history */
    ALONE = 16  /* a call is a turn of its own, and tools stand before the user's first text */
};

/* Pieces of text, the only ones in which names of control tokens are those. %s is the place of a text from outside, %t
 * that of one without white space around it, %j the same after the system text was put before it; %d is the date, %e a
 * line if there are tools. */
struct Format {
    const char *name, *has[3]; /* what its template says or, behind a '!', does not say */
    const char *begin, *system, *user, *assistant, *prompt, *quiet; /* quiet: the prompt for effort none */
    const char *tools, *call, *results, *result; /* the list of tools, a call, the turn of all results, one of them */
    int flags;
};

/* clang-format off */
#define CHATML NULL, "<|im_start|>system\n%s<|im_end|>\n", "<|im_start|>user\n%s<|im_end|>\n", \
    "<|im_start|>assistant\n%s<|im_end|>\n"
#define QWEN_TOOLS .results = "<|im_start|>user\n%s<|im_end|>\n", .result = "<tool_response>\n%s\n</tool_response>", \
    .call = "<tool_call>\n{\"name\": %s, \"arguments\": %s}\n</tool_call>", \
    .tools = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with " \
             "function signatures within <tools></tools> XML tags:\n<tools>%s\n</tools>\n\nFor each function call, " \
             "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n" \
             "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
#define LLAMA_HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define LLAMA(system) "<|begin_of_text|>", LLAMA_HEADER("system") system "%t<|eot_id|>", \
    LLAMA_HEADER("user") "%t<|eot_id|>", LLAMA_HEADER("assistant") "%t<|eot_id|>", LLAMA_HEADER("assistant")
#define LLAMA_TOOLS .results = LLAMA_HEADER("ipython") "%s<|eot_id|>", .result = "%s", .flags = ALONE, \
    .call = "{\"name\": %s, \"parameters\": %s}", \
    .tools = "Given the following functions, please respond with a JSON for a function call with its proper " \
             "arguments that best answers the given prompt.\n\nRespond in the format {\"name\": function name, " \
             "\"parameters\": dictionary of argument name and its value}.Do not use variables.\n\n%s"
#define DEEPSEEK(past) "<｜begin▁of▁sentence｜>", "%s", "<｜User｜>%s", "<｜Assistant｜>" past "%s<｜end▁of▁sentence｜>"

/* The first that fits counts. In `has` all quotes are single, and a line break is \n as in a literal. */
static const Format formats[] = {
    {"Qwen3, always thinking", {"last_query_index", "assistant\\n<think>\\n'"}, CHATML,
     "<|im_start|>assistant\n<think>\n", QWEN_TOOLS, .flags = THINKS | KEEPS},
    {"Qwen3", {"last_query_index", "enable_thinking", "<args-json-object>"}, CHATML, "<|im_start|>assistant\n",
     "<|im_start|>assistant\n<think>\n\n</think>\n\n", QWEN_TOOLS, .flags = THINKS | KEEPS},
    {"Qwen", {"<args-json-object>", "!</think>"}, CHATML, "<|im_start|>assistant\n", QWEN_TOOLS},
    {"ChatML", {"message['content'] + '<|im_end|>' + '\\n'", "!tools", "!think"}, CHATML, "<|im_start|>assistant\n",
     .flags = 0},
    {"Llama 3.2", {"Cutting Knowledge Date: December 2023", "strftime_now"},
     LLAMA("%eCutting Knowledge Date: December 2023\nToday Date: %d\n\n"), LLAMA_TOOLS},
    {"Llama 3.1", {"Cutting Knowledge Date: December 2023"},
     LLAMA("%eCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"), LLAMA_TOOLS},
    {"Llama 3", {"message['content'] | trim + '<|eot_id|>'", "!tools"}, LLAMA(""), .flags = 0},
    {"Llama 2", {"<<SYS>>", "bos_token + '[INST] ' + content.strip() + ' [/INST]'"}, NULL,
     "<<SYS>>\n%s\n<</SYS>>\n\n", "<s>[INST] %j [/INST]", " %t </s>", "", .flags = FIRST},
    {"Mistral v0.1", {"' [INST] ' + system_message"}, "<s>", "%s\n\n", " [INST] %s [/INST]", " %s</s>", "",
     .flags = FIRST},
    {"Mistral v0.3", {"'[INST] ' + system_message", "|trim + eos_token", "!loop.first"}, "<s>", "%s\n\n",
     "[INST] %s[/INST]", " %t</s>", "", .flags = LAST},
    {"Mistral Nemo", {"'[INST]' + system_message", "!loop.first"}, "<s>", "%s\n\n", "[INST]%s[/INST]", "%s</s>", "",
     .flags = LAST},
    {"Mistral, without system", {"'[INST] ' + message['content'] + ' [/INST]'", "!system_message"}, "<s>", "%s\n\n",
     "[INST] %s [/INST]", "%s</s>", "", .flags = FIRST},
    {"Gemma", {"<start_of_turn>", "model"}, "<bos>", "%s\n\n", "<start_of_turn>user\n%t<end_of_turn>\n",
     "<start_of_turn>model\n%t<end_of_turn>\n", "<start_of_turn>model\n", .flags = FIRST},
    {"DeepSeek V3.1, copied", {"'<｜User｜>' + message['content']", "not thinking", "'<think></think>'"},
     DEEPSEEK("<think></think>"), "<｜Assistant｜><think>", "<｜Assistant｜><think></think>", .flags = THINKS},
    {"DeepSeek V3.1", {"'<｜User｜>' + message['content']", "not thinking"}, DEEPSEEK("</think>"),
     "<｜Assistant｜><think>", "<｜Assistant｜></think>", .flags = THINKS},
    {"DeepSeek R1", {"<｜Assistant｜><think>\\n"}, DEEPSEEK(""), "<｜Assistant｜><think>\n", .flags = THINKS},
    {"DeepSeek V3", {"'<｜User｜>' + message['content']", "!<think>"}, DEEPSEEK(""), "<｜Assistant｜>", .flags = THINKS},
    {"DeepSeek V2", {"'User: ' + message['content'] + '\\n\\n'", "'Assistant: ' + message['content'] + eos_token"},
     "<｜begin▁of▁sentence｜>", "%s\n\n", "User: %s\n\n", "Assistant: %s<｜end▁of▁sentence｜>", "Assistant:", .flags = 0},
    {"Zephyr", {"'<|user|>\\n' + message['content'] + eos_token }}\\n"}, NULL, "<|system|>\n%s</s>\n",
     "<|user|>\n%s</s>\n", "<|assistant|>\n%s</s>\n", "<|assistant|>\n", .flags = 0},
};
/* clang-format on */
enum { FORMATS = sizeof formats / sizeof *formats };
static const Format harmony = {"harmony", .flags = THINKS};

bool chat_template(const char *dir, Bytes *out, Error *e) {
    static const char *const files[] = {"chat_template.jinja", "chat_template.json", "tokenizer_config.json"};
    bool gguf = gguf_named(dir);
    cJSON *metadata = gguf ? gguf_metadata(dir, e) : NULL;
    bool ok = metadata || !gguf;
    const char *text = json_string(metadata, "tokenizer.chat_template");
    bytes_text(out, text ? text : "");
    cJSON_Delete(metadata);
    for (int i = 0; i < 3 && ok && !out->n && !gguf; i++) {
        Bytes path = {0};
        bytes_print(&path, "%s/%s", dir, files[i]);
        if (file_exists(path.data)) {
            cJSON *config = i ? json_read(path.data, MOST_TEMPLATE, e) : NULL;
            const cJSON *template = json_get(config, "chat_template"), *named;
            ok = i ? config != NULL : file_read(path.data, MOST_TEMPLATE, out, e);
            if (cJSON_IsString(template)) bytes_text(out, template->valuestring);
            cJSON_ArrayForEach(named, template) { /* [{"name": "default", "template": ...}, ...] */
                const char *text = json_string(named, "template");
                if (text && same(json_string(named, "name"), "default")) bytes_text(out, text);
            }
            cJSON_Delete(config);
        }
        bytes_free(&path);
    }
    bytes_text(out, "");
    return ok;
}

/* The control token whose name, <...> or [...], begins the text; -1: it is text. */
static int control_at(const Tokenizer *t, const char *s, size_t *n) {
    char name[MOST_NAME + 1] = "";
    *n = *s == '<' || *s == '[' ? strcspn(s, *s == '<' ? ">" : "]") + 1 : 0;
    if (!*n || *n > MOST_NAME || *n > strlen(s)) return -1;
    return tokenizer_added(t, memcpy(name, s, *n));
}

static bool fits(const Format *f, const char *template, const Tokenizer *t, int *end) {
    size_t n;
    for (int i = 0; i < 3 && f->has[i]; i++) {
        bool lacks = *f->has[i] == '!';
        if (lacks == (strstr(template, f->has[i] + lacks) != NULL)) return false;
    }
    *end = control_at(t, strchr(strchr(f->assistant, '%'), '<'), &n);
    return *end >= 0 && (!f->begin || control_at(t, f->begin, &n) >= 0);
}

bool chat_open(Chat *chat, const Tokenizer *t, const char *template, Error *e) {
    static const char *const names[CONTROLS] = {"<|start|>", "<|channel|>", constrained,  "<|message|>",
                                                "<|end|>",   "<|call|>",    "<|return|>", "<|endoftext|>"};
    static const char preset[] = "<|im_start|>system\\n"; /* what ChatML says where nobody gave a system text */
    Bytes text = {0};
    *chat = (Chat){.tokenizer = t, .format = &harmony};
    for (int i = 0; i < CONTROLS; i++)
        if ((chat->control[i] = tokenizer_added(t, names[i])) < 0) chat->format = NULL;
    if (chat->format)
        return ids_add(&chat->answer, chat->control[START]), tokenizer_encode(t, "assistant", 9, 0, &chat->answer, e);
    bytes_text(&text, "");
    for (const char *s = template; *s; s++)
        *s == '\n' ? bytes_text(&text, "\\n") : bytes_add(&text, *s == '"' ? "'" : s, 1);
    for (int i = 0; i < FORMATS && !chat->format; i++)
        if (fits(formats + i, text.data, t, &chat->end)) chat->format = formats + i;
    for (const char *s = text.data; (s = strstr(s, preset)) && !chat->preset;) {
        size_t n = strcspn(s += strlen(preset), "'\\<");
        if (n && begins(s + n, "<|im_end|>")) chat->preset = copy_text(s, n);
    }
    bytes_free(&text);
    return chat->format ||
           fail(e, BAD_MODEL,
                "%s; known are harmony and those of Qwen, SmolLM2, Llama, Mistral, Gemma, DeepSeek and TinyLlama",
                *template ? "the chat template is of no known format" : "there is no chat template");
}

void chat_close(Chat *chat) {
    ids_free(&chat->answer);
    free(chat->preset);
}

static bool effort_known(const char *effort) {
    return same(effort, "none") || same(effort, "low") || same(effort, "medium") || same(effort, "high");
}

bool chat_effort(const Chat *chat, const char *effort, Error *e) {
    const Format *f = chat->format;
    bool always = f->flags & THINKS && !f->quiet;
    if (effort_known(effort) && !(always && same(effort, "none"))) return true;
    return fail(e, USAGE, "the effort must be low, medium or high%s, not '%.40s'", always ? "" : ", or none", effort);
}

/* ---- conversations ---- */

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
    static const char *const reasons[] = {"reasoning_content", "reasoning", "thinking"};
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
        return fail(e, USAGE, "reasoning_effort must be none, low, medium or high, not '%.40s'", c->effort);
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
    const char *date; /* and tools: of the conversation */
    const cJSON *tools;
    Bytes text; /* ordinary text since the last control token: encoded in one piece */
    Ids *out;
    Error *e;
    bool ok;
} Renderer;

static void flush(Renderer *r) {
    if (r->ok && r->text.n) r->ok = tokenizer_encode(r->chat->tokenizer, r->text.data, r->text.n, 0, r->out, r->e);
    r->text.n = 0;
}

static void control(Renderer *r, int which) {
    flush(r);
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

static void render_harmony(Renderer *r, const Conversation *c, bool prompt) {
    int ended = -1; /* the last final answer that something follows: reasoning before it is dropped */
    for (int i = 0; i < c->messages - !prompt; i++)
        if (same(c->message[i].role, "assistant") && message_part(c->message + i) == ANSWER) ended = i;
    if (!json_true(c->request, "bare")) render_system(r, c);
    render_developer(r, c);
    for (int i = 0; i < c->messages; i++) {
        bool reasoning = same(c->message[i].role, "assistant") && message_part(c->message + i) == REASONING;
        if (!reasoning || i > ended || json_true(c->request, "keep_analysis")) render_message(r, c->message + i);
    }
    if (prompt) ids_append(r->out, r->chat->answer.data, r->chat->answer.n);
}

/* ---- rendering in other formats ---- */

/* White space as Python's strip sees it. */
static bool is_space(uint32_t c) {
    static const uint32_t others[] = {' ', 0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0};
    bool space = (c >= 9 && c <= 13) || (c >= 28 && c <= 31) || (c >= 0x2000 && c <= 0x200A);
    for (int i = 0; others[i]; i++) space = space || c == others[i];
    return space;
}

/* Moves *s and *n to what is left without white space around it. */
static void trim(const char **s, size_t *n) {
    size_t begin = *n, end = 0, length;
    for (size_t i = 0; i < *n; i += length) {
        uint32_t c = 0;
        length = (size_t)abs(utf8_decode(*s + i, *n - i, &c));
        if (is_space(c)) continue;
        end = i + length;
        if (begin > i) begin = i;
    }
    *s += end ? begin : *n;
    *n = end ? end - begin : 0;
}

static void add_quoted(Bytes *out, const char *text, size_t n) {
    cJSON *json = json_from_text(text, n);
    char *quoted = json_text(json);
    bytes_text(out, quoted);
    free(quoted);
    cJSON_Delete(json);
}

/* JSON as Python writes it: a space behind each comma and colon or, with an indent, lines. */
static void add_json(Bytes *out, const char *json, int indent) {
    int depth = 0;
    bool quoted = false;
    for (const char *s = json; *s; s++) {
        bool open = !quoted && strchr("{[", *s), close = !quoted && strchr("}]", *s), comma = !quoted && *s == ',';
        depth += open - close;
        int width = indent * depth < MOST_INDENT ? indent * depth : MOST_INDENT;
        if (close && indent && !strchr("{[", s[-1])) bytes_print(out, "\n%*s", width, "");
        bytes_add(out, s, 1);
        if (quoted && *s == '\\')
            bytes_add(out, ++s, 1);
        else if (*s == '"')
            quoted = !quoted;
        if (indent && (comma || (open && !strchr("}]", s[1]))))
            bytes_print(out, "\n%*s", width, "");
        else if (comma || (!quoted && *s == ':'))
            bytes_text(out, " ");
    }
}

/* Writes a piece of the format up to its text, and returns what stands behind that. */
static const char *piece(Renderer *r, const char *s) {
    static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    for (; s && *s; s++) {
        int year = 2024, month = 7, day = 26, id;
        size_t n;
        if (*s == '%' && strchr("stj", s[1])) return s + 2;
        if (*s == '%' && s[1] == 'e') {
            if (r->tools) bytes_text(&r->text, "Environment: ipython\n");
            s++;
        } else if (*s == '%') {
            if (r->date) sscanf(r->date, "%4d-%2d-%2d", &year, &month, &day);
            bytes_print(&r->text, "%02d %.3s %d", day, months + 3 * ((unsigned)(month - 1) % 12), year);
            s++;
        } else if ((id = control_at(r->chat->tokenizer, s, &n)) >= 0) {
            flush(r);
            ids_add(r->out, id);
            s += n - 1;
        } else {
            bytes_add(&r->text, s, 1);
        }
    }
    return s;
}

/* Writes a text in its place before `behind`. */
static void add_text(Renderer *r, const char *s, size_t n, const char *behind, bool joined) {
    const char *begin = s;
    if (behind[-1] != 's') trim(&s, &n);
    if (behind[-1] == 'j' && joined) n += (size_t)(s - begin), s = begin;
    bytes_add(&r->text, s, n);
}

static void add_tool_list(Renderer *r) {
    const Format *f = r->chat->format;
    const char *behind = piece(r, f->tools);
    const cJSON *tool;
    cJSON_ArrayForEach(tool, r->tools) {
        char *json = json_text(tool);
        bytes_text(&r->text, f->flags & ALONE ? "" : "\n");
        add_json(&r->text, json, f->flags & ALONE ? 4 : 0);
        bytes_text(&r->text, f->flags & ALONE ? "\n\n" : "");
        free(json);
    }
    piece(r, behind);
}

/* Does message i belong to the turn of the one before it? */
static bool continues(const Format *f, const Conversation *c, int i) {
    const Message *m = c->message + i;
    if (i >= c->messages || !same(m->role, m[-1].role)) return false;
    return message_part(m - 1) == REASONING || (message_part(m - 1) != ANSWER && !(f->flags & ALONE));
}

/* The answer behind its thoughts, if a client left both in one text. */
static Bytes without_thoughts(const Format *f, const Message *m, Bytes *thoughts) {
    Bytes text = m->content;
    for (char *end;
         f->flags & THINKS && text.n && (end = memmem(text.data, text.n, close_think, strlen(close_think)));) {
        size_t n = (size_t)(end - text.data), skip = 0;
        char *begin = memmem(text.data, n, open_think, strlen(open_think));
        if (begin) skip = (size_t)(begin - text.data) + strlen(open_think);
        if (thoughts) bytes_add(thoughts, text.data + skip, n - skip);
        text.data += n + strlen(close_think), text.n -= n + strlen(close_think);
    }
    return text;
}

static void add_call(Renderer *r, const Message *m) {
    Error e;
    const char *name = m->recipient + (begins(m->recipient, functions) ? strlen(functions) : 0);
    const char *behind = piece(r, r->chat->format->call);
    add_quoted(&r->text, name, strlen(name));
    behind = piece(r, behind);
    cJSON *arguments = json_parse(m->content.data, m->content.n, "arguments", &e);
    char *json = arguments ? json_text(arguments) : NULL;
    if (json)
        add_json(&r->text, json, 0);
    else
        bytes_add(&r->text, m->content.data, m->content.n);
    free(json);
    cJSON_Delete(arguments);
    piece(r, behind);
}

/* A turn of the model's from message i on: thoughts, texts and calls. Returns the message behind it. */
static int render_turn(Renderer *r, const Conversation *c, int i, bool recent) {
    const Format *f = r->chat->format;
    Bytes thoughts = {0};
    int end = i;
    do {
        const Message *m = c->message + end;
        if (message_part(m) == REASONING)
            bytes_add(&thoughts, m->content.data, m->content.n);
        else
            without_thoughts(f, m, &thoughts);
    } while (continues(f, c, ++end));
    const char *behind = piece(r, f->assistant);
    bool kept = f->flags & KEEPS && recent && (thoughts.n || end == c->messages), wrote = false;
    if (kept) {
        const char *s = thoughts.n ? thoughts.data : "";
        size_t n = thoughts.n;
        for (; n && *s == '\n'; n--) s++;
        while (n && s[n - 1] == '\n') n--;
        piece(r, "<think>\n");
        bytes_add(&r->text, s, n);
        piece(r, "\n</think>\n\n");
    }
    for (; i < end; i++) {
        const Message *m = c->message + i;
        Bytes text = without_thoughts(f, m, NULL);
        if (message_part(m) == REASONING) continue;
        for (; f->flags & KEEPS && (kept || text.n < m->content.n) && text.n && *text.data == '\n'; text.n--)
            text.data++;
        bool says = m->recipient || text.n;
        if (wrote && says) bytes_text(&r->text, "\n");
        if (m->recipient)
            add_call(r, m);
        else
            add_text(r, text.data, text.n, behind, false);
        wrote = wrote || says;
    }
    piece(r, behind);
    bytes_free(&thoughts);
    return end;
}

static int render_results(Renderer *r, const Conversation *c, int i) {
    const Format *f = r->chat->format;
    const char *behind = piece(r, f->results);
    bool more;
    do {
        const Bytes *text = &c->message[i].content;
        const char *rest = piece(r, f->result);
        f->flags &ALONE ? add_quoted(&r->text, text->data, text->n) : bytes_add(&r->text, text->data, text->n);
        piece(r, rest);
        more = ++i < c->messages && same(c->message[i].role, "tool") && !(f->flags & ALONE);
        if (more) bytes_text(&r->text, "\n");
    } while (more);
    piece(r, behind);
    return i;
}

static void render_instructions(Renderer *r, const char *text, bool tools) {
    const char *behind = piece(r, r->chat->format->system);
    if (text) add_text(r, text, strlen(text), behind, false);
    if (tools) bytes_text(&r->text, text ? "\n\n" : ""), add_tool_list(r);
    piece(r, behind);
}

/* A text of the user's, or a later one of the system's, for which some formats have no words of their own. */
static void render_text_of(Renderer *r, const Message *m, const char *system, bool tools) {
    const Format *f = r->chat->format;
    bool instruction = same(m->role, "developer");
    size_t skip = instruction && begins(m->content.data, heading) ? strlen(heading) : 0;
    const char *behind = piece(r, instruction && !(f->flags & (FIRST | LAST)) ? f->system : f->user);
    if (system) render_instructions(r, system, false);
    if (tools) add_tool_list(r);
    add_text(r, m->content.data + skip, m->content.n - skip, behind, system);
    piece(r, behind);
}

static void render_row(Renderer *r, const Conversation *c, bool prompt) {
    const Format *f = r->chat->format;
    const char *system = c->instructions ? c->instructions : r->chat->preset;
    bool within = f->flags & (FIRST | LAST), alone = f->flags & ALONE;
    int first = c->messages, last = -1;
    for (int i = c->messages - 1; i >= 0; i--)
        if (same(c->message[i].role, "user")) first = i, last = last < 0 ? i : last;
    piece(r, f->begin);
    if (!within && (system || strstr(f->system, "%e") || (r->tools && !alone)))
        render_instructions(r, system, r->tools && !alone);
    for (int i = 0; i < c->messages;) {
        const Message *m = c->message + i;
        bool holds = within && i == (f->flags & FIRST ? first : last);
        if (same(m->role, "assistant"))
            i = render_turn(r, c, i, i > last);
        else if (same(m->role, "tool"))
            i = render_results(r, c, i);
        else
            render_text_of(r, m, holds ? system : NULL, r->tools && alone && i == first), i++;
    }
    if (prompt) piece(r, f->quiet && same(c->effort, "none") ? f->quiet : f->prompt);
}

bool chat_render(const Chat *chat, const Conversation *c, bool prompt, Ids *out, Error *e) {
    const Format *f = chat->format;
    const cJSON *tools = json_get(c->request, "tools");
    Renderer r = {.chat = chat, .date = c->date, .tools = cJSON_GetArraySize(tools) ? tools : NULL, .out = out, .e = e};
    size_t before = out->n;
    bool calls = r.tools;
    for (int i = 0; i < c->messages; i++) calls = calls || c->message[i].recipient || same(c->message[i].role, "tool");
    bool schema = json_get(json_get(c->request, "response_format"), "json_schema"), no_tools = calls && !f->call;
    r.ok = chat_effort(chat, c->effort, e);
    if (r.ok && f != &harmony && (no_tools || schema))
        r.ok = fail(e, USAGE, "%s, the chat format of this model, has no %s", f->name,
                    no_tools ? "tools" : "response_format");
    if (r.ok) f == &harmony ? render_harmony(&r, c, prompt) : render_row(&r, c, prompt);
    flush(&r);
    if (!r.ok) out->n = before;
    bytes_free(&r.text);
    return r.ok;
}

bool chat_force(const Chat *chat, const char *effort, const char *name, Ids *out, Error *e) {
    const Format *f = chat->format;
    Renderer r = {.chat = chat, .out = out, .e = e, .ok = true};
    if (f == &harmony) {
        control(&r, CHANNEL);
        bytes_print(&r.text, "commentary to=%s%s", functions, name ? name : "");
        if (name) bytes_text(&r.text, " "), control(&r, CONSTRAIN), bytes_text(&r.text, "json"), control(&r, MESSAGE);
    } else {
        bool thinks = strstr(f->prompt, open_think) && !(f->quiet && same(effort, "none"));
        if (thinks) piece(&r, "\n</think>\n\n");
        const char *behind = piece(&r, f->call);
        if (name) add_quoted(&r.text, name, strlen(name)), piece(&r, behind);
        if (!name) bytes_text(&r.text, "\"");
    }
    flush(&r);
    bytes_free(&r.text);
    return r.ok;
}

/* ---- reading ---- */

void reader_init(Reader *r, const Chat *chat, const char *effort) {
    const Format *f = chat->format;
    *r = (Reader){.chat = chat, .started = true};
    conversation_set(&r->now.role, "assistant");
    if (f != &harmony) { /* the prompt may end inside a thought */
        r->started = !strstr(f->prompt, open_think) || (f->quiet && same(effort, "none"));
        if (!r->started) conversation_set(&r->now.channel, "analysis");
        bytes_text(&r->header, "");
        return;
    }
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

/* ---- reading in other formats ---- */

/* Where the mark, or what may become it, stands in the text that waits, or its end. */
static size_t find_mark(const Bytes *b, const char *mark, bool end) {
    size_t length = strlen(mark);
    for (size_t i = 0; i < b->n; i++) {
        size_t n = b->n - i < length ? b->n - i : length;
        if ((n == length || !end) && !memcmp(b->data + i, mark, n)) return i;
    }
    return b->n;
}

static void drop(Bytes *b, size_t n) {
    b->n -= n;
    memmove(b->data, b->data + n, b->n + 1);
}

/* Takes n bytes that wait to the message being read, less white space at its beginning and, until more follows, its
 * end. With a channel the message ends there. */
static void take(Reader *r, size_t n, const char *channel, Bytes *shown) {
    Message *m = &r->now;
    const char *begin = r->header.data, *s = begin;
    size_t length = n;
    trim(&s, &length);
    size_t behind = length ? (size_t)(s - begin) + length : 0;
    if (m->content.n) length = behind, s = begin;
    bytes_add(&m->content, s, length);
    bytes_add(shown, s, length);
    r->started = r->started && !m->content.n;
    drop(&r->header, channel ? n : behind);
    if (!channel) return;
    if (m->content.n)
        conversation_set(&m->channel, channel), *message_new(&r->message, &r->messages) = *m;
    else
        message_free(m);
    *m = (Message){.role = join("assistant", "", 0)};
}

/* The JSON of a call, as a message with the arguments as Python writes them; or false. One that is alone looks like any
 * other JSON but for its arguments. */
static bool read_call(const char *s, size_t n, bool alone, Message *m) {
    Error e;
    cJSON *json = json_parse(s, n, "call", &e);
    const char *name = json_string(json, "name");
    const cJSON *arguments = json_get(json, "arguments") ? json_get(json, "arguments") : json_get(json, "parameters");
    bool ok = name && *name && legal_length(name, strlen(name)) == strlen(name) &&
              (arguments ? cJSON_IsObject(arguments) : !alone);
    if (ok) {
        char *text = arguments ? json_text(arguments) : copy_text("{}", 2);
        *m = (Message){.role = join("assistant", "", 0),
                       .channel = join("commentary", "", 0),
                       .recipient = join(functions, name, strlen(name)),
                       .content_type = join(constrained, "json", 4)};
        add_json(&m->content, text, 0);
        free(text);
    }
    cJSON_Delete(json);
    return ok;
}

/* Divides the text that waits at its marks, as far as it is certain. */
static void divide(Reader *r, bool end, Bytes *shown) {
    const Format *f = r->chat->format;
    const char *opens = !f->call ? NULL : f->flags & ALONE ? "{\"name\":" : open_call, *closes = close_call;
    bool alone = f->flags & ALONE, thinks = f->flags & THINKS;
    Bytes *b = &r->header;
    while (b->n) {
        bool thinking = same(r->now.channel, "analysis"), begun = r->now.content.n;
        const char *s = b->data;
        size_t n = b->n;
        trim(&s, &n);
        if (!begun) drop(b, n ? (size_t)(s - b->data) : b->n);
        if (thinks && r->started && b->n && !find_mark(b, open_think, end)) {
            if (b->n < strlen(open_think)) return;
            drop(b, strlen(open_think));
            conversation_set(&r->now.channel, "analysis");
            r->started = false;
            continue;
        }
        size_t thought = thinks ? find_mark(b, close_think, end) : b->n;
        size_t call = opens && !thinking && !(alone && begun) ? find_mark(b, opens, end) : b->n;
        if (alone && call) call = b->n;
        if (thought < call && b->n - thought >= strlen(close_think)) {
            r->repairs += !thinking;
            r->started = false;
            if (r->messages) { /* only what comes first is a thought, and templates cut answers at this mark */
                memcpy(b->data + thought, "(/think)", strlen(close_think));
                continue;
            }
            take(r, thought, "analysis", shown);
            drop(b, strlen(close_think));
        } else if (call < thought && b->n - call >= strlen(opens)) {
            size_t begin = alone ? call : call + strlen(opens);
            Bytes rest = {.data = b->data + begin, .n = b->n - begin};
            size_t length = alone ? rest.n : find_mark(&rest, closes, end);
            size_t behind = alone ? 0 : rest.n - length >= strlen(closes) ? strlen(closes) : 0;
            Message m;
            if (!end && !behind) {
                take(r, call, NULL, shown);
                return;
            }
            bool read = read_call(rest.data, length, alone, &m);
            r->repairs += !read || !(alone || behind);
            take(r, read ? call : alone ? b->n : begin, read ? "commentary" : NULL, shown);
            if (!read) continue;
            drop(b, begin - call + length + behind);
            bytes_add(shown, m.content.data, m.content.n);
            *message_new(&r->message, &r->messages) = m;
            r->started = false;
        } else {
            take(r, thought < call ? thought : call, NULL, shown);
            break;
        }
    }
    if (end) take(r, b->n, same(r->now.channel, "analysis") ? "analysis" : "final", shown);
}

static Read read_text(Reader *r, bool stop, Bytes *shown) {
    int before = r->messages;
    if (stop) tokenizer_flush(&r->decoder, &r->header);
    divide(r, stop, shown);
    Read read = {.stop = stop, .closed = r->messages > (stop ? 0 : before), .part = message_part(&r->now)};
    if (read.closed) read.part = message_part(r->message + r->messages - 1);
    return read;
}

/* A control token ends the answer, unless it is a mark, which other models spell out. */
static Read read_token(Reader *r, int token, Bytes *shown) {
    static const char *const marks[] = {open_think, close_think, open_call, close_call, "<|python_tag|>"};
    const Tokenizer *t = r->chat->tokenizer;
    bool stop = tokenizer_is_control(t, token) || token == r->chat->end;
    for (int i = 0; i < 5; i++) stop = stop && token != tokenizer_added(t, marks[i]);
    if (!stop && token != tokenizer_added(t, "<|python_tag|>")) tokenizer_decode(t, &r->decoder, token, &r->header);
    return read_text(r, stop, shown);
}

Read reader_push(Reader *r, int token, Bytes *text) {
    const Tokenizer *t = r->chat->tokenizer;
    Read read = {0};
    int which = 0;
    while (which < CONTROLS && r->chat->control[which] != token) which++;
    bytes_text(text, "");
    if (r->chat->format != &harmony) return read_token(r, token, text);
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
    if (r->chat->format != &harmony) return read_text(r, true, text);
    close_message(r, false, text, &read);
    return read;
}
