/* chat.c: conversations, harmony, and a table of simpler formats. Harmony follows github.com/openai/harmony: for
 * messages its docs/format.md, for tools its translation of JSON schemas to TypeScript. The other formats write what
 * the published chat templates write. The readers accept what models write, right or wrong. See chat.h. */
#include "chat.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/param.h>
#include <time.h>
#include <utf8proc.h>

enum { MOST_NAME = 128, MOST_INDENT = 100, MOST_REQUIRED = 1000, MOST_BACK = 1000 /* from a result to its call */ };
enum { START, CHANNEL, CONSTRAIN, MESSAGE, END, CALLED, RETURN, ENDOFTEXT }; /* in Chat.control: harmony's */
enum { OPEN_THINK = ENDOFTEXT + 1, CLOSE_THINK, OPEN_CALL, CLOSE_CALL, PYTHON_TAG, OPEN_CALLS }; /* other formats' */

static const char *const controls[CONTROLS] = {
    "<|start|>",     "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>",      "<|call|>",       "<|return|>",
    "<|endoftext|>", "<think>",     "</think>",      "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"};
static const char functions[] = "functions.", heading[] = "# Instructions\n\n";

enum { STREAM_END = -2 }; /* no token has it; -1 would match a control token that the tokenizer lacks */

/* The JSON keys of a message's texts; from HEADER on they are harmony's own. */
enum { WORDS = 6, HEADER = 3 };
static const char *const words[WORDS] = {"role", "tool_call_id", "name", "channel", "recipient", "content_type"};

static Bytes view(const char *text) { return (Bytes){.data = (char *)(uintptr_t)text, .n = text ? strlen(text) : 0}; }
static bool is_utf8(Bytes text) { return utf8_check(text.data, text.n) == text.n; }

/* ---- formats ---- */

enum {
    FIRST = 1, /* the system text stands before the user's first text, and user and assistant alternate; */
    LAST = 2,  /* the same, before the user's last text, and only if that ends the chat */
    ALONE = 4, /* a call is a turn without text, and tools stand before the user's first text */
    HOIST = 8, /* all system texts stand at the beginning, or only the latest: see Chat.latest */
    KEEP = 16, /* thoughts are part of the history */
    BOS = 32   /* the chat begins with bos_token where the template prints that */
};

/* Pieces of text. Names of control tokens become control tokens here and nowhere else. %s stands for a text from
 * outside, %t for the same without white space at both ends, %p for what precedes it, for a call's name or, in a
 * result, for the id of its call. */
struct Format {
    const char *name, *has[4]; /* strings that the template contains or, after a '!', lacks */
    const char *begin, *system, *user, *assistant;
    const char *about;                           /* precedes the system text; %p: the line about tools, %s: the date */
    const char *thoughts;                        /* in the history; NULL: none */
    const char *think, *quiet;                   /* at the end of a prompt; the same for effort none */
    const char *tools, *call, *results, *result; /* the list of tools, a call, the turn of all results, one of them */
    const char *calls; /* a turn of calls, if they are a list. Then tools stand before the user's last turn */
    int flags;
};

/* clang-format off */
#define CHATML .system = "<|im_start|>system\n%s<|im_end|>\n", .user = "<|im_start|>user\n%s<|im_end|>\n", \
    .assistant = "<|im_start|>assistant\n%s<|im_end|>\n"
#define QWEN3 CHATML, QWEN_TOOLS, .thoughts = "<think>\n%s\n</think>\n\n", .flags = KEEP
#define QWEN_TOOLS .results = "<|im_start|>user\n%s<|im_end|>\n", .result = "<tool_response>\n%s\n</tool_response>", \
    .call = "<tool_call>\n{\"name\": %p, \"arguments\": %s}\n</tool_call>", \
    .tools = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with " \
             "function signatures within <tools></tools> XML tags:\n<tools>%s\n</tools>\n\nFor each function call, " \
             "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n" \
             "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
#define HEADER_OF(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define LLAMA .begin = "<|begin_of_text|>", .system = HEADER_OF("system") "%p%t<|eot_id|>", \
    .user = HEADER_OF("user") "%p%t<|eot_id|>", .assistant = HEADER_OF("assistant") "%t<|eot_id|>"
#define LLAMA_TOOLS .about = "%pCutting Knowledge Date: December 2023\nToday Date: %s\n\n", \
    .results = HEADER_OF("ipython") "%s<|eot_id|>", .result = "%s", .flags = ALONE, \
    .call = "{\"name\": %p, \"parameters\": %s}", \
    .tools = "Given the following functions, please respond with a JSON for a function call with its proper " \
             "arguments that best answers the given prompt.\n\nRespond in the format {\"name\": function name, " \
             "\"parameters\": dictionary of argument name and its value}.Do not use variables.\n\n%s"
#define MISTRAL(open, close, answer, where) .begin = "<s>", .system = "%s\n\n", .user = open "%s" close, \
    .assistant = answer "</s>", .flags = where
/* Tools stand as the client sends them. The template would not escape the quotes in a description. */
#define MISTRAL_TOOLS(space) .tools = "[AVAILABLE_TOOLS]" space "%s[/AVAILABLE_TOOLS]", \
    .calls = "[TOOL_CALLS]" space "[%s]</s>", .call = "{\"name\": %p, \"arguments\": %s", .results = "%s", \
    .result = "[TOOL_RESULTS]" space "{\"content\": %s, \"call_id\": \"%p\"}[/TOOL_RESULTS]"
#define DEEPSEEK(past) .flags = HOIST, .begin = "<｜begin▁of▁sentence｜>", .system = "%s", \
    .user = "<｜User｜>%s", .assistant = "<｜Assistant｜>%s<｜end▁of▁sentence｜>", .thoughts = past

/* The first row that fits counts. `has` is compared with the template after each " became ' and each line break \n. */
static const Format formats[] = {
    {"Qwen3, always thinking", {"last_query_index", "assistant\\n<think>\\n'"}, QWEN3, .think = "<think>\n"},
    {"Qwen3", {"last_query_index", "enable_thinking", "<args-json-object>"}, QWEN3, .quiet = "<think>\n\n</think>\n\n"},
    {"Qwen3, not thinking", {"last_query_index", "<args-json-object>", "</think>"}, QWEN3},
    {"Qwen", {"<args-json-object>", "!</think>"}, CHATML, QWEN_TOOLS},
    {"ChatML", {"message['content'] + '<|im_end|>' + '\\n'", "!tools", "!think"}, CHATML, .flags = BOS},
    {"Qwen3-Coder", {"message.role + '\\n' + message.content + '<|im_end|>' + '\\n'", "<function=", "!think"}, CHATML},
    {"Llama 3.2", {"Cutting Knowledge Date: December 2023", "strftime_now"}, LLAMA, LLAMA_TOOLS},
    {"Llama 3.1", {"Cutting Knowledge Date: December 2023"}, LLAMA, LLAMA_TOOLS},
    {"Llama 3", {"message['content'] | trim + '<|eot_id|>'", "!tools"}, LLAMA},
    {"Llama 2", {"<<SYS>>", "bos_token + '[INST] ' + content.strip() + ' [/INST]'"},
     .system = "<<SYS>>\n%s\n<</SYS>>\n\n", .user = "<s>[INST] %t [/INST]", .assistant = " %t </s>", .flags = FIRST},
    {"Mistral v0.1", {"' [INST] ' + system_message"}, MISTRAL(" [INST] ", " [/INST]", " %s", FIRST)},
    {"Mistral v0.3", {"'[INST] ' + system_message", "|trim + eos_token", "!loop.first"},
     MISTRAL("[INST] ", "[/INST]", " %t", LAST), MISTRAL_TOOLS(" ")},
    {"Mistral Nemo", {"'[INST]' + system_message", "!loop.first"}, MISTRAL("[INST]", "[/INST]", "%s", LAST),
     MISTRAL_TOOLS("")},
    {"Mistral Small 3", {"'[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]'", "'[INST]' + message['content']"},
     .begin = "<s>", .system = "[SYSTEM_PROMPT]%s[/SYSTEM_PROMPT]", .user = "[INST]%s[/INST]", .assistant = "%s</s>"},
    {"Mistral, without system", {"'[INST] ' + message['content'] + ' [/INST]'", "!system_message"},
     MISTRAL("[INST] ", " [/INST]", "%s", FIRST)},
    {"Gemma", {"<start_of_turn>", "model"}, .begin = "<bos>", .system = "%s\n\n", .flags = FIRST,
     .user = "<start_of_turn>user\n%p%t<end_of_turn>\n", .assistant = "<start_of_turn>model\n%t<end_of_turn>\n"},
    {"DeepSeek V3.1", {"'<｜User｜>' + message['content']", "not thinking", "!'<think></think>'"},
     DEEPSEEK("</think>"), .think = "<think>", .quiet = "</think>"},
    {"DeepSeek R1", {"<｜Assistant｜><think>\\n"}, DEEPSEEK(""), .think = "<think>\n"},
    {"DeepSeek R1-0528", {"'<｜User｜>' + content + '<｜Assistant｜>'"}, DEEPSEEK("")},
    {"DeepSeek V3", {"'<｜User｜>' + message['content']", "!</think>"}, DEEPSEEK(NULL)},
    {"DeepSeek R1, early", {"'<｜User｜>' + message['content']", "!<think>"}, DEEPSEEK("")},
    {"DeepSeek V2", {"'User: ' + message['content'] + '\\n\\n'", "'Assistant: ' + message['content'] + eos_token"},
     .begin = "<｜begin▁of▁sentence｜>", .system = "%s\n\n", .user = "User: %s\n\n",
     .assistant = "Assistant: %s<｜end▁of▁sentence｜>"},
    {"Zephyr", {"'<|user|>\\n' + message['content'] + eos_token }}\\n"}, .system = "<|system|>\n%s</s>\n",
     .user = "<|user|>\n%s</s>\n", .assistant = "<|assistant|>\n%s</s>\n"},
};
static const Format harmony = {"harmony", .assistant = "<|start|>assistant%s",
    .call = "<|channel|>commentary to=functions.%p <|constrain|>json<|message|>%s"};
/* clang-format on */

/* The control token whose name, <...> or [...], begins the text, or -1; *n is the length of its name. */
static int control_at(const Tokenizer *t, const char *s, size_t *n) {
    char name[MOST_NAME + 1] = "";
    *n = *s == '<' || *s == '[' ? strcspn(s, *s == '<' ? ">" : "]") + 1 : 0;
    if (!*n || *n > MOST_NAME || *n > strlen(s)) return -1;
    return tokenizer_added(t, memcpy(name, s, *n));
}

static bool fits(const Format *f, const char *template, const Tokenizer *t, int *end) {
    size_t n;
    for (int i = 0; i < 4 && f->has[i]; i++) {
        bool lacks = *f->has[i] == '!';
        if (lacks == (strstr(template, f->has[i] + lacks) != NULL)) return false;
    }
    *end = control_at(t, strchr(strchr(f->assistant, '%'), '<'), &n);
    return *end >= 0 && (!f->begin || control_at(t, f->begin, &n) >= 0);
}

enum { DATE = 1 }; /* in a text of the template, for " + today + " */

/* The text that a string of the template has between `mark` and `end`, or NULL. */
static char *text_behind(const char *template, const char *mark, const char *end) {
    const char *quote = template, *seen = template; /* quote: the last one before `seen` */
    for (const char *s = template; (s = strstr(s, mark));) {
        LocalBytes text = {0};
        for (s += strlen(mark); seen < s; seen++)
            if (*seen == '"' || *seen == '\'') quote = seen; /* it opens the string */
        while (*s && !begins(s, end)) {
            const size_t today = begins(s, "\" + today + \"");
            if (*s == *quote && !today) break;
            const bool escaped = *s == '\\' && s[1];
            bytes_add(&text, today ? (char[]){DATE} : escaped && s[1] == 'n' ? "\n" : s + escaped, 1);
            s += today ? today : 1 + (size_t)escaped;
        }
        if (text.n && begins(s, end) && is_utf8(text)) return copy_text(text.data, text.n);
    }
    return NULL;
}

/* What stands around the system text that a template itself has, in ChatML or Mistral's way, and around its date. */
enum { PRESETS = 4, STRINGS = 6 };
static const char *const strings[STRINGS][2] = {{"<|im_start|>system\n", "<|im_end|>"},
                                                {"<|im_start|>system\\n", "<|im_end|>"},
                                                {"default_system_message = \"", "\" %}"},
                                                {"default_system_message = \"", "\" -%}"},
                                                {"date_string = \"", "\""},
                                                {"date_string = '", "'"}};

bool chat_open(Chat *chat, const Tokenizer *t, const char *template, Error *e) {
    LocalBytes text = {0};
    *chat = (Chat){.tokenizer = t, .format = &harmony};
    chat->bos = strstr(template, "bos_token") ? tokenizer_bos(t) : -1; /* jinja prints nothing for a missing one */
    for (int i = 0; i < CONTROLS; i++)
        if ((chat->control[i] = tokenizer_added(t, controls[i])) < 0 && i <= ENDOFTEXT) chat->format = NULL;
    if (chat->format) return true;
    bytes_text(&text, "");
    for (const char *s = template; *s; s++)
        *s == '\n' ? bytes_text(&text, "\\n") : bytes_add(&text, *s == '"' ? "'" : s, 1);
    for (size_t i = 0; i < sizeof formats / sizeof *formats && !chat->format; i++)
        if (fits(formats + i, text.data, t, &chat->end)) chat->format = formats + i;
    const bool dated = !strstr(template, "strftime_now"); /* else the date is today's */
    for (int i = 0; i < (dated ? STRINGS : PRESETS); i++) {
        char **text_of = i < PRESETS ? &chat->preset : &chat->date;
        if (!*text_of) *text_of = text_behind(template, strings[i][0], strings[i][1]);
    }
    chat->latest = !strstr(template, "is_first_sp"); /* in those of DeepSeek that join all system texts */
    return chat->format ||
           fail(e, BAD_MODEL,
                "%s; known are harmony and those of Qwen, SmolLM2, Llama, Mistral, Gemma, DeepSeek and TinyLlama",
                *template ? "the chat template is of no known format" : "there is no chat template");
}

const char *chat_name(const Chat *chat) { return chat->format->name; }

void chat_close(Chat *chat) { free(chat->preset), free(chat->date); }

bool chat_effort(const Chat *chat, const char *effort, Error *e) {
    const Format *f = chat->format;
    bool always = f == &harmony || (f->think && !f->quiet);
    return text_listed(always ? "low medium high" : "low medium high none", effort) ||
           fail(e, USAGE, "reasoning_effort (--effort, /effort) must be low, medium or high%s, not '%.40s'",
                always ? "" : ", or none", effort);
}

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

/* What a message is: a Part of the model's, or one of these. */
enum { USER = CALL + 1, RESULT, SYSTEM };
static int kind_of(const Message *m) {
    if (same(m->role, "assistant")) return (int)message_part(m);
    if (same(m->role, "tool")) return RESULT;
    return same(m->role, "user") ? USER : SYSTEM;
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

/* A text, or an array of {"type": "text", "text": ...}, which line breaks join. A missing one is empty. */
static bool parse_text(const cJSON *value, Bytes *out) {
    const cJSON *part;
    bytes_text(out, cJSON_IsString(value) ? value->valuestring : "");
    if (!cJSON_IsArray(value)) return !value || cJSON_IsString(value);
    cJSON_ArrayForEach(part, value) {
        const char *text = json_string(part, "text");
        if (!text || !json_is(part, "type", "text")) return false;
        bytes_print(out, part == value->child ? "%s" : "\n%s", text);
    }
    return true;
}

static Message call_of(const char *function) {
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
        if (!name || !*name || !arguments)
            return fail(e, USAGE, "messages[%d].tool_calls needs function.name and function.arguments, both texts", i);
        Message *m = message_new(&c->message, &c->messages);
        *m = call_of(name);
        bytes_text(&m->content, arguments);
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
    const cJSON *calls = json_get(json, "tool_calls"), *content = json_get(json, "content");
    const char *role = json_string(json, "role"), *channel = NULL, *reason = NULL;
    bool system = same(role, "system") || same(role, "developer"), assistant = same(role, "assistant"),
         tool = same(role, "tool"), header = false; /* it has harmony's keys */
    LocalBytes text = {0};
    if (!system && !assistant && !tool && !same(role, "user"))
        return fail(e, USAGE, "messages[%d] has the unknown role '%.40s'", i, role ? role : "");
    if (!parse_text(content, &text) || (!content && same(role, "user")))
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
    if (format && (schema || !json_is(format, "type", "text")) &&
        (!json_is(format, "type", "json_schema") || !json_string(schema, "name") || !json_get(schema, "schema")))
        return fail(e, USAGE, "response_format needs the type json_schema, json_schema.name and json_schema.schema");
    if (!cJSON_IsArray(messages)) return fail(e, USAGE, "messages is not an array");
    cJSON_ArrayForEach(each, messages) if (!parse_message(c, each, i++, e)) return false;
    c->request = cJSON_Duplicate(json, true);
    cJSON_DeleteItemFromObjectCaseSensitive(c->request, "messages");
    for (int t = 0; t < 2; t++) cJSON_DeleteItemFromObjectCaseSensitive(c->request, texts[t]);
    return true;
}

/* ---- to JSON ---- */

/* With harmony's keys if `number` is negative, else as message `number` of a chat-completions request, which keeps
 * harmony's keys where it has none of its own. */
static cJSON *message_object(const Message *m, int number) {
    cJSON *json = cJSON_CreateObject(), *content = json_from_text(m->content.data, m->content.n);
    bool own = same(m->role, "assistant") && number >= 0, thought = own && message_part(m) == REASONING;
    bool call = own && begins(m->recipient, functions) && m->recipient[strlen(functions)];
    bool plain = call || thought || (own && same(m->channel, "final") && !m->recipient);
    int n = plain ? 1 : number >= 0 && m->id ? HEADER - 1 : WORDS; /* a result with an id needs no more */
    for (int w = 0; w < n; w++) cJSON_AddStringToObject(json, words[w], m->word[w]); /* NULL adds nothing */
    if (!call) return json_add(json, thought ? "reasoning_content" : "content", content, NULL);
    LocalText id = text_print("call_%d", number);
    cJSON *function = json_object("name", json_word(m->recipient + strlen(functions)), "arguments", content, NULL);
    cJSON_AddItemToArray(
        cJSON_AddArrayToObject(json, "tool_calls"),
        json_object("id", json_word(m->id ? m->id : id), "type", json_word("function"), "function", function, NULL));
    return json;
}

cJSON *message_json(const Message *m) { return message_object(m, -1); }

cJSON *conversation_json(const Conversation *c) {
    const Message system = {.role = (char[]){"system"}, .content = view(c->instructions)};
    cJSON *json = c->request ? cJSON_Duplicate(c->request, true) : cJSON_CreateObject();
    cJSON_AddStringToObject(json, "reasoning_effort", c->effort);
    cJSON_AddStringToObject(json, "date", c->date ? c->date : "none");
    cJSON *messages = cJSON_AddArrayToObject(json, "messages");
    if (c->instructions) cJSON_AddItemToArray(messages, message_object(&system, 0));
    for (int i = 0; i < c->messages; i++) cJSON_AddItemToArray(messages, message_object(c->message + i, i));
    return json;
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
        bool word = same(type, "string");
        add_union(out, word ? json_get(schema, "enum") : NULL, "\"", same(type, "integer") ? "number" : type);
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

/* ---- prompts ---- */

/* A prompt is written as one text. In it the byte TOKEN, an id and ';' stand for a token. No text can contain that
 * byte: names come from valid JSON or from the reader, and chat_render() checks the rest. */
enum { TOKEN = 0xFF };

static bool encode(const Tokenizer *t, const Bytes *prompt, Ids *out, Error *e) {
    if (!prompt->n) return true;
    for (char *s = prompt->data, *end = s + prompt->n; s < end;) {
        char *token = memchr(s, TOKEN, (size_t)(end - s)), *begin = s;
        s = token ? token : end;
        if (s > begin && !tokenizer_encode(t, begin, (size_t)(s - begin), 0, out, e)) return false;
        if (token) ids_add(out, (int)strtol(token + 1, &s, 10)), s++;
    }
    return true;
}

/* White space as Python's str.strip() defines it. */
static bool is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 31) || c == 0x85 || *utf8proc_category_string((int32_t)c) == 'Z';
}

/* The text without white space at both ends; not a copy. */
static Bytes trim(Bytes text) {
    Bytes kept = {.data = text.data + text.n};
    for (size_t i = 0, length; i < text.n; i += length) {
        uint32_t c = 0;
        length = (size_t)abs(utf8_decode(text.data + i, text.n - i, &c));
        if (is_space(c)) continue;
        if (!kept.n) kept.data = text.data + i;
        kept.n = (size_t)(text.data + i + length - kept.data);
    }
    return kept;
}

/* Writes JSON as Python does: a space after each comma and colon, or with an indent one item a line. */
static void put_json(Bytes *out, const cJSON *value, int indent, int depth) {
    bool object = cJSON_IsObject(value);
    int width = indent * depth < MOST_INDENT ? indent * depth : MOST_INDENT;
    if (!value->child) {
        json_written(out, value);
        return;
    }
    bytes_text(out, object ? "{" : "[");
    for (const cJSON *each = value->child; each; each = each->next) {
        if (each != value->child) bytes_text(out, indent ? "," : ", ");
        if (indent) bytes_print(out, "\n%*s", width + indent, "");
        if (object) json_append(out, cJSON_CreateString(each->string)), bytes_text(out, ": ");
        put_json(out, each, indent, depth + 1);
    }
    if (indent) bytes_print(out, "\n%*s", width, "");
    bytes_text(out, object ? "}" : "]");
}

/* Appends a piece of a format: names of control tokens become tokens, and texts replace %s, %t and %p. Ends at a text
 * that is NULL. */
static void fill(const Chat *chat, Bytes *out, const char *piece, const Bytes *before, const Bytes *text) {
    size_t n;
    for (const char *s = piece ? piece : ""; *s; s += n) {
        int id = control_at(chat->tokenizer, s, &n);
        if (id >= 0) {
            bytes_print(out, "%c%d;", TOKEN, id);
        } else if (*s == '%') {
            const Bytes *given = s[1] == 'p' ? before : text;
            if (!given) return;
            Bytes put = s[1] == 't' ? trim(*given) : *given;
            bytes_add(out, put.data, put.n);
            n = 2;
        } else {
            bytes_add(out, s, n = 1);
        }
    }
}

/* ---- prompts of harmony ---- */

/* The tools of a request, or NULL. */
static const cJSON *tools_of(const Conversation *c) {
    const cJSON *tools = json_get(c->request, "tools");
    return cJSON_GetArraySize(tools) ? tools : NULL;
}

/* A text of the system message, which a request may replace. */
static const char *setting(const Conversation *c, const char *key, const char *initial) {
    return json_string(c->request, key) ? json_string(c->request, key) : initial;
}

static void put_system(const Chat *chat, const Conversation *c, Bytes *out) {
    LocalBytes text = {0};
    bytes_print(&text, "%s\nKnowledge cutoff: %s\n",
                setting(c, "model_identity", "You are ChatGPT, a large language model trained by OpenAI."),
                setting(c, "knowledge_cutoff", "2024-06"));
    if (c->date) bytes_print(&text, "Current date: %s\n", c->date);
    bytes_print(&text, "\nReasoning: %s\n\n# Valid channels: %s. Channel must be included for every message.%s",
                c->effort, setting(c, "channels", "analysis, commentary, final"),
                tools_of(c) ? "\nCalls to these tools must go to the commentary channel: 'functions'." : "");
    fill(chat, out, "<|start|>system<|message|>%s<|end|>", NULL, &text);
}

/* Harmony writes all system texts at the beginning into one message. Returns the number of the first other message. */
static int put_developer(const Chat *chat, const Conversation *c, Bytes *out) {
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
    if (text.n) fill(chat, out, "<|start|>developer<|message|>%s<|end|>", NULL, &text);
    return i;
}

/* The header may be written as a piece, because check_word() accepts no '<', '[' and '%'. */
static bool put_message(const Chat *chat, const Message *m, Bytes *out, Error *e) {
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
    fill(chat, out, piece.data, NULL, &m->content);
    return true;
}

static bool put_harmony(const Chat *chat, const Conversation *c, bool prompt, Bytes *out, Error *e) {
    int ended = -1; /* the last answer of a turn that has ended; reasoning before it is dropped */
    for (int i = 0; i < c->messages - !prompt; i++)
        if (kind_of(c->message + i) == ANSWER) ended = i;
    if (json_true(c->request, "keep_analysis")) ended = -1;
    if (!json_true(c->request, "bare")) put_system(chat, c, out);
    for (int i = put_developer(chat, c, out); i < c->messages; i++) {
        bool dropped = i < ended && kind_of(c->message + i) == REASONING;
        if (!dropped && !put_message(chat, c->message + i, out, e)) return false;
    }
    return true;
}

/* ---- prompts of other formats ---- */

/* Does message i belong to the same turn as message i - 1? */
static bool continues(const Format *f, const Conversation *c, int i) {
    if (i == 0 || i >= c->messages) return false;
    int kind = kind_of(c->message + i), before = kind_of(c->message + i - 1);
    bool alone = f->flags & ALONE;
    if (kind == USER) return before == USER && f->flags & (FIRST | LAST); /* as after an answer that was interrupted */
    if (kind == RESULT) return before == RESULT && !alone && !f->calls;
    if (before == CALL && (alone || (f->calls && kind != CALL))) return false;
    return kind <= CALL && before <= CALL && before != ANSWER;
}

/* Cuts the text at the first `mark`: what precedes that is returned, what follows stays. False: there is none. */
static bool cut_at(Bytes *text, const char *mark, Bytes *before) {
    char *at = text->n ? memmem(text->data, text->n, mark, strlen(mark)) : NULL;
    if (!at) return false;
    *before = (Bytes){.data = text->data, .n = (size_t)(at - text->data)};
    *text = (Bytes){.data = at + strlen(mark), .n = text->n - before->n - strlen(mark)};
    return true;
}

/* The text without line breaks at its beginning, and without those at its end, too, if it is a thought. */
static Bytes trim_lines(Bytes text, bool thought) {
    for (; text.n && *text.data == '\n'; text.n--) text.data++;
    while (thought && text.n && text.data[text.n - 1] == '\n') text.n--;
    return text;
}

/* Appends a text, a result or a call, with its arguments as Python writes JSON. */
static void put_part(const Chat *chat, const Message *m, Bytes text, Bytes *out) {
    const Format *f = chat->format;
    bool result = kind_of(m) == RESULT, call = kind_of(m) == CALL;
    char id[] = "000000000"; /* for Mistral: the last nine letters and digits of the client's, behind zeros */
    Error e;
    LocalBytes name = {0}, json = {0};
    if (call && !text.n) text = view("{}"); /* as some clients send it */
    LocalJson arguments = call ? json_parse(text.data, text.n, "arguments", &e) : NULL;
    for (size_t i = m->id ? strlen(m->id) : 0, at = 9; i-- && at;)
        if (isalnum((unsigned char)m->id[i])) id[--at] = m->id[i];
    if (call) json_append(&name, cJSON_CreateString(m->recipient + begins(m->recipient, functions)));
    if (result) bytes_text(&name, id);
    if (arguments) put_json(&json, arguments, 0, 0);
    if (result && f->flags & ALONE) json_append(&json, json_from_text(text.data, text.n));
    if (out->n) bytes_text(out, call && f->calls ? ", " : "\n");
    fill(chat, out, result ? f->result : call ? f->call : "%s", &name, json.n ? &json : &text);
    if (call && f->calls) bytes_print(out, ", \"id\": \"%s\"}", id);
}

/* Writes the turn that begins with message i, `front` in front of its text. Returns the next turn's first message.
 * Thoughts may be messages of their own, or a client may have left them in an answer. */
static int put_turn(const Chat *chat, const Conversation *c, int i, bool recent, Bytes front, Bytes *out) {
    const Format *f = chat->format;
    int kind = kind_of(c->message + i);
    bool model = kind <= CALL, keeps = f->flags & KEEP, bare = f->calls || f->flags & ALONE, called = false;
    const char *system = f->flags & HOIST ? "" : f->system; /* put_begin() wrote it */
    const char *piece = model ? f->assistant : kind == RESULT ? f->results : kind == USER ? f->user : system;
    LocalBytes thoughts = {0}, parts = {0}, turn = {0};
    do {
        const Message *m = c->message + i;
        Bytes text = m->content, thought, opening;
        bool cuts = f->thoughts && !(keeps && thoughts.n);
        kind = kind_of(m);
        if (kind == REASONING) bytes_add(&thoughts, text.data, text.n);
        while (cuts && (kind == PREAMBLE || kind == ANSWER) && cut_at(&text, controls[CLOSE_THINK], &thought)) {
            while (cut_at(&thought, controls[OPEN_THINK], &opening)) continue;
            thought = trim_lines(thought, true);
            bytes_add(&thoughts, thought.data, thought.n);
            if (keeps) text = trim_lines(text, false);
        }
        if (bare && kind == CALL && !called) parts.n = 0; /* text beside calls is left out */
        called = kind == CALL;
        if (kind >= CALL || (kind != REASONING && text.n)) put_part(chat, m, text, &parts);
    } while (continues(f, c, ++i));
    if (kind == CALL && f->calls) piece = f->calls;
    bool kept = keeps && model && recent && (thoughts.n || i == c->messages);
    Bytes said = kept ? trim_lines(parts, false) : parts, thought = trim_lines(thoughts, true);
    if (kept || (model && !keeps)) fill(chat, &turn, f->thoughts, NULL, &thought);
    if (!strstr(piece, "%p")) bytes_add(&turn, front.data, front.n); /* %p keeps %t from trimming it, too */
    bytes_add(&turn, said.data, said.n);
    fill(chat, out, piece, &front, &turn);
    return i;
}

/* Writes what precedes the first message. What precedes a text of the user's goes to `front`. */
static void put_begin(const Chat *chat, const Conversation *c, Bytes *front, Bytes *out) {
    const Format *f = chat->format;
    const char *system = c->instructions ? c->instructions : chat->preset;
    const cJSON *tools = f->calls ? NULL : tools_of(c), *tool; /* NULL: put_row() writes them */
    bool alone = f->flags & ALONE;
    struct tm day = {0};
    char date[32];
    LocalBytes text = {0}, about = {0}, list = {0};
    for (const char *s = system ? system : ""; *s; s++)
        *s == DATE && !c->instructions ? bytes_text(&text, c->date ? c->date : "") : bytes_add(&text, s, 1);
    bytes_text(&text, system && tools && !alone ? "\n\n" : "");
    for (int i = 0; f->flags & HOIST && i < c->messages; i++) {
        if (kind_of(c->message + i) != SYSTEM) continue;
        if (chat->latest) text.n = 0;
        bytes_print(&text, "%s%s", text.n ? "\n\n" : "", c->message[i].content.data);
    }
    cJSON_ArrayForEach(tool, tools) {
        bytes_text(&list, alone ? "" : "\n");
        put_json(&list, tool, alone ? 4 : 0, 0);
        bytes_text(&list, alone ? "\n\n" : "");
    }
    if (tools) fill(chat, alone ? front : &text, f->tools, NULL, &list);
    if (!c->date || !strptime(c->date, "%Y-%m-%d", &day)) strptime("2024-07-26", "%F", &day); /* the template's */
    strftime(date, sizeof date, "%d %b %Y", &day);
    Bytes environment = view(tools ? "Environment: ipython\n" : ""), today = view(chat->date ? chat->date : date);
    fill(chat, &about, f->about, &environment, &today);
    fill(chat, out, f->begin, NULL, NULL);
    if (f->flags & BOS && chat->bos >= 0) bytes_print(out, "%c%d;", TOKEN, chat->bos);
    if (system || f->about || text.n) fill(chat, f->flags & (FIRST | LAST) ? front : out, f->system, &about, &text);
}

/* Is a user's text the result of a tool, as clients without tool messages send it? To Qwen3 that is no question. */
static bool is_result(const Format *f, Bytes text) {
    size_t n = strlen("</tool_response>");
    return f->flags & KEEP && text.n >= n && begins(text.data, "<tool_response>") &&
           same(text.data + text.n - n, "</tool_response>");
}

static bool put_row(const Chat *chat, const Conversation *c, Bytes *out, Error *e) {
    const Format *f = chat->format;
    LocalBytes front = {0}, tools = {0};
    int first = c->messages, last = first; /* the user's first text; where the last question begins, if there is one */
    for (int i = c->messages - 1; i >= 0; i--) {
        if (kind_of(c->message + i) != USER) continue;
        first = i;
        if (last == c->messages && !is_result(f, c->message[i].content) && !continues(f, c, i)) last = i;
    }
    put_begin(chat, c, &front, out);
    if (tools_of(c) && (f->calls || f->flags & ALONE) && first == c->messages)
        return fail(e, USAGE, "messages: in %s chats tools stand in front of a user's text: add one", f->name);
    const bool asks = c->messages && kind_of(c->message + c->messages - 1) == USER;
    const int fronted = !(f->flags & LAST) ? first : asks ? last : -1; /* the turn that `front` belongs to */
    if (f->calls && tools_of(c)) put_json(&tools, tools_of(c), 0, 0);
    for (int i = 0, turn = 1, next; i < c->messages; i = next) {
        int kind = kind_of(c->message + i);
        if (i == last && tools.n) fill(chat, out, f->tools, NULL, &tools);
        next = put_turn(chat, c, i, i > last, i == fronted ? front : (Bytes){0}, out);
        if (kind == RESULT || kind_of(c->message + next - 1) == CALL) continue; /* calls and results are no turns */
        int before = i ? kind_of(c->message + i - 1) : USER;
        turn += kind == USER && turn % 2 == 0 && (before == CALL || before == RESULT); /* no answer came */
        if (f->flags & (FIRST | LAST) && (turn % 2 ? kind != USER : kind > CALL))
            return fail(e, USAGE, "%s chats alternate user and assistant, the user first: turn %d does not", f->name,
                        turn);
        turn++;
    }
    return true;
}

/* Does a prompt end inside a thought? */
static bool thinks(const Format *f, const char *effort) { return f->think && !(f->quiet && same(effort, "none")); }

bool chat_render(const Chat *chat, const Conversation *c, bool prompt, Ids *out, Error *e) {
    const Format *f = chat->format;
    LocalBytes text = {0};
    bool calls = tools_of(c), schema = json_get(json_get(c->request, "response_format"), "json_schema");
    bool valid = is_utf8(view(c->instructions)) && is_utf8(view(c->date));
    for (int i = 0; i < c->messages; i++) {
        calls = calls || c->message[i].recipient || kind_of(c->message + i) == RESULT;
        valid = valid && is_utf8(c->message[i].content);
    }
    if (!chat_effort(chat, c->effort, e)) return false;
    if (!valid) return fail(e, USAGE, "a text of the conversation is not UTF-8");
    const char *lacks = calls && (!f->call || (f->calls && chat->control[OPEN_CALLS] < 0)) ? "tools"
                        : schema && f != &harmony                                          ? "response_format"
                                                                                           : NULL;
    if (lacks) return fail(e, USAGE, "%s: %s, the chat format of this model, has none", lacks, f->name);
    if (f == &harmony ? !put_harmony(chat, c, prompt, &text, e) : !put_row(chat, c, &text, e)) return false;
    if (prompt) { /* what precedes an answer, without the space that the model writes itself */
        fill(chat, &text, f->assistant, NULL, NULL);
        if (text.n && text.data[text.n - 1] == ' ') text.n--;
        fill(chat, &text, f->quiet && same(c->effort, "none") ? f->quiet : f->think, NULL, NULL);
    }
    return encode(chat->tokenizer, &text, out, e);
}

bool chat_force(const Chat *chat, const char *effort, const char *name, Ids *out, Error *e) {
    const Format *f = chat->format;
    bool other = f != &harmony;
    if (other && !f->calls && !(f->flags & ALONE) && chat->control[OPEN_CALL] < 0)
        return fail(e, USAGE, "this model's tokenizer has no tokens for calls of functions: none can be forced");
    LocalBytes text = {0}, function = {0};
    if (name && other) json_append(&function, cJSON_CreateString(name));
    if (name && !other) bytes_text(&function, name);
    if (thinks(f, effort)) fill(chat, &text, "\n</think>\n\n", NULL, NULL);
    fill(chat, &text, f->calls, NULL, NULL);
    fill(chat, &text, f->call, name ? &function : NULL, NULL);
    if (other && !name) bytes_text(&text, "\"");
    return encode(chat->tokenizer, &text, out, e);
}

/* ---- reading ---- */

void reader_init(Reader *r, const Chat *chat, const Conversation *c) {
    bool thinking = thinks(chat->format, c ? c->effort : NULL);
    *r = (Reader){.chat = chat, .started = !thinking, .calls = chat->format->call && (!c || tools_of(c))};
    r->now = (Message){.role = text_print("assistant"), .channel = thinking ? text_print("analysis") : NULL};
    bytes_text(&r->pending, chat->format == &harmony ? "assistant" : "");
}

void reader_free(Reader *r) {
    for (int i = 0; i < r->messages; i++) message_free(r->message + i);
    free(r->message);
    message_free(&r->now);
    bytes_free(&r->pending);
    bytes_free(&r->decoder.held);
    *r = (Reader){0};
}

void reader_take(Reader *r, Conversation *c) {
    for (int i = 0; i < r->messages; i++) *message_new(&c->message, &c->messages) = r->message[i];
    r->messages = 0;
}

/* In Reader.pending the bytes CHANNEL and CONSTRAIN, 1 and 2, stand for those tokens. */
static const char space[] = " \t\r\n", space_or_mark[] = " \t\r\n\1\2", marks[] = "\1\2";
static const char channels[] = "analysis commentary final";

/* The length of the word of a list, "a b c", that begins the text, or 0. */
static size_t known_word(const char *text, const char *list) {
    size_t n = strcspn(list, " ");
    while (n && strncmp(text, list, n)) list += n + (list[n] == ' '), n = strcspn(list, " ");
    return n;
}

/* Splits the header into author, <|channel|> CHANNEL, to=RECIPIENT anywhere, and <|constrain|> TYPE or a bare json or
 * code. Unless <|message|> made the header `complete`, only known words belong to it, and text may follow a
 * word without a space. Other text is content if it stands behind the channel or if <|message|> is missing. */
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
        } else if (mark) {
            size_t known = mark == CHANNEL ? channel : type;
            field = mark == CHANNEL ? &m->channel : &m->content_type;
            if (!complete || (mark == CHANNEL && channel)) n = known;
        } else if (author && !role && memchr(s, '.', legal_length(s, n))) {
            conversation_set(&m->role, "tool");
            field = &m->name;
        } else if (author ? role || complete : role == n && (complete || strspn(s + n, marks))) {
            r->repairs += !author || role < n || *s != 'a'; /* whoever is named, the model writes */
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
        } else if (!strspn(s, marks)) {
            bytes_add(&text, s, n = m->channel || !complete ? strlen(s) : strcspn(s, marks));
        }
        s += n;
    }
    r->repairs += author || text.n || (complete ? !r->started : m->channel || m->recipient || m->content_type);
    for (size_t i = 0; i < text.n; i++)
        if (strspn(text.data + i, marks)) text.data[i] = ' ';
    if (!complete || !m->recipient) bytes_add(&m->content, text.data, text.n); /* no text in a call's arguments */
}

/* Begins the next message. The one being read is dropped if it has no content and does not count. It counts in harmony
 * if a token ended it and its header is whole or has a recipient. */
static void next_message(Reader *r, bool counts) {
    counts = counts || r->now.content.n;
    if (counts) *message_new(&r->message, &r->messages) = r->now;
    if (!counts) message_free(&r->now);
    r->now = (Message){.role = text_print("assistant")};
    r->in_content = r->started = false;
    r->pending.n = *r->pending.data = 0;
}

/* Reads a token, number `which` of Chat.control, or STREAM_END. True: sampling should end. */
static bool push_harmony(Reader *r, int token, int which) {
    Bytes *pending = &r->pending;
    size_t before = pending->n;
    bool channel = which == CHANNEL && (r->in_content || memchr(pending->data, *marks, before)),
         opens = which == START || channel, /* a new message, even without <|start|> */
        ends = which >= END && which <= ENDOFTEXT;
    if (opens || ends || token == STREAM_END) {
        r->repairs += ends ? !r->in_content : opens && (r->in_content || (r->started && !before));
        char *mark = r->in_content || token != STREAM_END ? NULL : memrchr(pending->data, *marks, before);
        if (mark && !known_word(mark + 1, channels) && !mark[1 + strcspn(mark + 1, space)]) /* a name cut off */
            pending->n = (size_t)(mark + 1 - pending->data), mark[1] = 0;
        if (!r->in_content) read_header(r, false);
        tokenizer_flush(&r->decoder, &r->now.content);
        next_message(r, ends && (r->in_content || r->now.recipient));
        r->started = which == START;
        if (channel) bytes_add(pending, marks, 1);
    } else if (which == MESSAGE && !r->in_content) {
        read_header(r, true);
        r->in_content = true;
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
    return token == STREAM_END || (ends && which != END);
}

/* ---- reading in other formats ---- */

/* Moves pending text to the message being read. White space at the beginning of a message is dropped; at the end of the
 * text it stays pending until more follows. The first `white` bytes are known to be white space. */
static void say(Reader *r, size_t white) {
    Bytes *content = &r->now.content;
    Bytes text = trim((Bytes){.data = r->pending.data + white, .n = r->pending.n - white});
    char *begin = content->n ? r->pending.data : text.data, *end = text.data + text.n;
    if (content->n && !text.n) return;
    bytes_add(content, begin, (size_t)(end - begin));
    r->pending.n -= (size_t)(end - r->pending.data);
    memmove(r->pending.data, end, r->pending.n + 1);
}

static void end_text(Reader *r, const char *channel) {
    say(r, 0);
    conversation_set(&r->now.channel, channel);
    next_message(r, false);
}

/* Is a marked call being read, or may the pending text become one without marks? */
static bool may_be_call(const Reader *r) {
    static const char *const call[] = {"{\"name\":", "{\"type\":\"function\","}; /* white space aside */
    char begin[20];
    size_t n = 0;
    if (r->in_content) return true;
    if (!r->calls || !(r->chat->format->flags & ALONE) || r->now.content.n) return false;
    for (const char *s = r->pending.data; *s && n < sizeof begin; s++)
        if (!strchr(space, *s)) begin[n++] = *s;
    for (int i = 0; i < 2 && n; i++)
        if (!strncmp(begin, call[i], MIN(n, strlen(call[i])))) return true;
    return false;
}

static const char between_calls[] = "[], \t\r\n"; /* in a list */

/* Turns the first n bytes of pending text into a call if they are one, with arguments as Python writes them. `closed`:
 * they end with the closing mark, or with an object of a list. A call without marks must have arguments, or any JSON
 * with a name would be one. */
static void end_call(Reader *r, size_t n, bool closed) {
    Error e;
    const Format *f = r->chat->format;
    bool alone = f->flags & ALONE;
    Bytes text = trim((Bytes){.data = r->pending.data, .n = n}), before;
    LocalBytes rest = {0};
    for (; f->calls && text.n && strchr(between_calls, *text.data); text.n--) text.data++;
    if (!alone && !f->calls) cut_at(&text, controls[OPEN_CALL], &before);
    if (closed && !f->calls) text.n -= strlen(controls[CLOSE_CALL]);
    LocalJson json = json_parse(text.data, text.n, "call", &e);
    const char *name = json_string(json, "name"), *key = json_get(json, "arguments") ? "arguments" : "parameters";
    const cJSON *arguments = json_get(json, key);
    bool ok = chat_word(name) && (arguments ? cJSON_IsObject(arguments) : !alone);
    r->repairs += !ok || !(alone || closed);
    r->in_content = false;
    if (!ok) return;
    Message call = call_of(name);
    if (arguments) put_json(&call.content, arguments, 0, 0);
    if (!arguments) bytes_text(&call.content, "{}");
    bytes_add(&rest, r->pending.data + n, r->pending.n - n);
    r->pending.n = *r->pending.data = 0;
    end_text(r, "commentary");
    *message_new(&r->message, &r->messages) = call;
    bytes_add(&r->pending, rest.data, rest.n);
    r->in_content = f->calls;
}

/* Ends the first call of a list at the last brace of its object: a token completes one message at most. */
static void read_list(Reader *r) {
    while (r->scanned < r->pending.n) {
        char c = r->pending.data[r->scanned++];
        if (r->quoted && c == '\\') r->scanned++;
        if (c == '"') r->quoted = !r->quoted;
        if (!r->quoted) r->depth += (c == '{') - (c == '}');
        if (r->quoted || c != '}' || r->depth) continue;
        end_call(r, r->scanned, true);
        r->scanned = 0;
        return;
    }
}

/* Reads a token like push_harmony(). A mark counts only as one token and at its place; otherwise it is text. */
static bool push_other(Reader *r, int token, int which) {
    const Tokenizer *t = r->chat->tokenizer;
    const Format *f = r->chat->format;
    bool thinking = same(r->now.channel, "analysis"),
         mark = which >= OPEN_THINK && which < CONTROLS && (which != OPEN_CALLS || f->calls),
         stop = token == STREAM_END || token == r->chat->end || (!mark && tokenizer_is_control(t, token));
    if (stop) {
        tokenizer_flush(&r->decoder, &r->pending);
        if (f->calls && r->in_content && strspn(r->pending.data, between_calls) == r->pending.n)
            r->pending.n = *r->pending.data = 0; /* the end of the list */
        else if (may_be_call(r))
            end_call(r, r->pending.n, false);
        end_text(r, thinking ? "analysis" : "final");
    } else if (f->thoughts && which == OPEN_THINK && r->started && !r->now.content.n && !r->in_content) {
        conversation_set(&r->now.channel, "analysis");
        r->started = false;
    } else if (f->thoughts && which == CLOSE_THINK && !r->in_content) {
        r->repairs += !thinking;
        tokenizer_flush(&r->decoder, &r->pending);
        if (thinking || !r->messages) end_text(r, "analysis"); /* a thought comes first */
    } else if (!(f->flags & ALONE) || which != PYTHON_TAG) {
        size_t white = may_be_call(r) ? 0 : r->pending.n;
        if (r->calls && which == (f->calls ? OPEN_CALLS : OPEN_CALL) && !thinking && !r->in_content) {
            tokenizer_flush(&r->decoder, &r->pending);
            say(r, white);
            r->in_content = true, r->quoted = false, r->scanned = 0, r->depth = 0;
        }
        if (which != OPEN_CALLS || !f->calls) tokenizer_decode(t, &r->decoder, token, &r->pending);
        if (f->calls && r->in_content)
            read_list(r);
        else if (which == CLOSE_CALL && r->in_content)
            end_call(r, r->pending.n, true), white = 0;
        if (!may_be_call(r)) say(r, white);
    }
    return stop;
}

Read reader_push(Reader *r, int token, Bytes *text) {
    bool other = r->chat->format != &harmony;
    int before = r->messages, which = 0;
    size_t known = r->now.content.n;
    while (which < CONTROLS && r->chat->control[which] != token) which++;
    Read read = {.stop = (other ? push_other : push_harmony)(r, token, which)};
    for (int i = before; text && i <= r->messages; i++, known = 0) {
        const Bytes *content = i < r->messages ? &r->message[i].content : &r->now.content;
        if (content->n > known) bytes_add(text, content->data + known, content->n - known);
    }
    read.header = !other && !r->in_content;
    if (other && read.stop) before = 0;
    read.closed = r->messages > before;
    read.part = message_part(read.closed ? r->message + r->messages - 1 : &r->now);
    return read;
}

Read reader_end(Reader *r, Bytes *text) { return reader_push(r, STREAM_END, text); }
