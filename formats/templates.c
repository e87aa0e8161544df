/* templates.c: chats of models that have a published chat template, a Jinja program, other than harmony's. It does not
 * run here: a table has what the published ones write, and pieces of its text tell which row counts. answers.c reads
 * what models write. chat.h has the socket. */
#include "answers.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the table ---- */

enum {
    FIRST = 1, /* the system text stands before the user's first text, and user and assistant alternate; */
    LAST = 2,  /* the same, before the user's last text, and only if that ends the chat */
    ALONE = 4, /* a call is a turn without text, and tools stand before the user's first text */
    HOIST = 8, /* all system texts stand at the beginning, or only the latest: see put_begin() */
    KEEP = 16, /* thoughts are part of the history */
    BOS = 32   /* the chat begins with bos_token where the template prints that */
};

/* Pieces of text. Names of control tokens become control tokens here and nowhere else. %s stands for a text from
 * outside, %t for the same without white space at both ends, %p for what precedes it, for a call's name or, in a
 * result, for the id of its call. */
typedef struct {
    const char *name, *has[4]; /* strings that the template contains or, after a '!', lacks */
    const char *begin, *system, *user, *assistant;
    const char *about;                           /* precedes the system text; %p: the line about tools, %s: the date */
    const char *thoughts;                        /* in the history; NULL: none */
    const char *think, *quiet;                   /* at the end of a prompt; the same for effort none */
    const char *tools, *call, *results, *result; /* the list of tools, a call, the turn of all results, one of them */
    const char *calls; /* a turn of calls, if they are a list. Then tools stand before the user's last turn */
    int flags;
} Row;

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
static const Row rows[] = {
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

/* What stands around the system text that a template itself has, in ChatML or Mistral's way, and around its date. */
enum { PRESETS = 4, STRINGS = 6 };
static const char *const strings[STRINGS][2] = {
    {"<|im_start|>system\n", "<|im_end|>"}, {"<|im_start|>system\\n", "<|im_end|>"},
    {"default_system_message = \"", "\" %}"}, {"default_system_message = \"", "\" -%}"},
    {"date_string = \"", "\""}, {"date_string = '", "'"}};
/* clang-format on */

static bool row_fits(const Row *row, const char *template, Chat *chat) {
    const char *end = strchr(strchr(row->assistant, '%'), '<');
    LocalText name = copy_text(end, strcspn(end, ">") + 1);
    for (int i = 0; i < 4 && row->has[i]; i++) {
        bool lacks = *row->has[i] == '!';
        if (lacks == (strstr(template, row->has[i] + lacks) != NULL)) return false;
    }
    chat->control[ANSWER_ENDS] = tokenizer_added(chat->tokenizer, name);
    return chat->control[ANSWER_ENDS] >= 0 && (!row->begin || tokenizer_added(chat->tokenizer, row->begin) >= 0);
}

/* The first text in the template that stands between strings[i], first <= i < last; `date` is today. NULL: none. */
static char *text_within(const Chat *chat, int first, int last, const char *date) {
    const char *quote = chat->template, *seen = quote; /* quote: the last one before `seen` */
    for (const char *s = quote; (s = strstr(s, strings[first][0]));) {
        const char *end = strings[first][1];
        LocalBytes text = {0};
        for (s += strlen(strings[first][0]); seen < s; seen++)
            if (*seen == '"' || *seen == '\'') quote = seen; /* it opens the string */
        while (*s && !begins(s, end)) {
            const size_t today = begins(s, "\" + today + \"");
            if (*s == *quote && !today) break;
            const bool escaped = *s == '\\' && s[1];
            today ? bytes_text(&text, date) : bytes_add(&text, escaped && s[1] == 'n' ? "\n" : s + escaped, 1);
            s += today ? today : 1 + (size_t)escaped;
        }
        if (text.n && begins(s, end) && utf8_check(text.data, text.n) == text.n) return copy_text(text.data, text.n);
    }
    return first + 1 < last ? text_within(chat, first + 1, last, date) : NULL;
}

static bool fits(Chat *chat) {
    LocalBytes text = {0};
    const Row *row = rows, *end = rows + sizeof rows / sizeof *rows;
    bytes_text(&text, "");
    for (const char *s = chat->template; *s; s++)
        *s == '\n' ? bytes_text(&text, "\\n") : bytes_add(&text, *s == '"' ? "'" : s, 1);
    while (row < end && !row_fits(row, text.data, chat)) row++;
    if (row == end) return false;
    chat->own = row, chat->name = row->name;
    answers_use(chat,
                !row->call           ? NULL
                : row->flags & ALONE ? "Llama 3"
                : row->calls         ? "Mistral"
                                     : "Hermes",
                row->thoughts ? "<think>" : NULL);
    chat->tools = row->call && (!row->calls || chat->control[OPEN_CALLS] >= 0);
    chat->schemas = false;
    chat->thinks = row->think, chat->quiet = row->quiet || !row->think;
    return true;
}

/* ---- prompts ---- */

/* Does message i belong to the same turn as message i - 1? */
static bool continues(const Row *row, const Conversation *c, int i) {
    if (i == 0 || i >= c->messages) return false;
    int kind = kind_of(c->message + i), before = kind_of(c->message + i - 1);
    bool alone = row->flags & ALONE;
    if (kind == USER) return before == USER && row->flags & (FIRST | LAST); /* after an interrupted answer */
    if (kind == RESULT) return before == RESULT && !alone && !row->calls;
    if (before == CALL && (alone || (row->calls && kind != CALL))) return false;
    return kind <= CALL && before <= CALL && before != ANSWER;
}

/* The text without line breaks at its beginning, and without those at its end, too, if it is a thought. */
static Bytes trim_lines(Bytes text, bool thought) {
    for (; text.n && *text.data == '\n'; text.n--) text.data++;
    while (thought && text.n && text.data[text.n - 1] == '\n') text.n--;
    return text;
}

/* Appends a text, a result or a call, with its arguments as Python writes JSON. */
static void put_part(const Chat *chat, const Message *m, Bytes text, Bytes *out) {
    const Row *row = chat->own;
    bool result = kind_of(m) == RESULT, call = kind_of(m) == CALL;
    char id[] = "000000000"; /* for Mistral: the last nine letters and digits of the client's, behind zeros */
    Error e;
    LocalBytes name = {0}, json = {0};
    if (call && !text.n) text = bytes_of("{}"); /* as some clients send it */
    LocalJson arguments = call ? json_parse(text.data, text.n, "arguments", &e) : NULL;
    for (size_t i = m->id ? strlen(m->id) : 0, at = 9; i-- && at;)
        if (isalnum((unsigned char)m->id[i])) id[--at] = m->id[i];
    if (call) json_append(&name, cJSON_CreateString(m->recipient + begins(m->recipient, "functions.")));
    if (result) bytes_text(&name, id);
    if (arguments) put_spaced(&json, arguments, 0, 0);
    if (result && row->flags & ALONE) json_append(&json, json_from_text(text.data, text.n));
    if (out->n) bytes_text(out, call && row->calls ? ", " : "\n");
    chat_fill(chat, out, result ? row->result : call ? row->call : "%s", &name, json.n ? &json : &text);
    if (call && row->calls) bytes_print(out, ", \"id\": \"%s\"}", id);
}

/* Writes the turn that begins with message i, `front` in front of its text. Returns the next turn's first message.
 * Thoughts may be messages of their own, or a client may have left them in an answer. */
static int put_turn(const Chat *chat, const Conversation *c, int i, bool recent, Bytes front, Bytes *out) {
    const Row *row = chat->own;
    int kind = kind_of(c->message + i);
    bool model = kind <= CALL, keeps = row->flags & KEEP, bare = row->calls || row->flags & ALONE, called = false;
    const char *system = row->flags & HOIST ? "" : row->system; /* put_begin() wrote it */
    const char *piece = model ? row->assistant : kind == RESULT ? row->results : kind == USER ? row->user : system;
    LocalBytes thoughts = {0}, parts = {0}, turn = {0};
    do {
        const Message *m = c->message + i;
        Bytes text = m->content, thought, opening;
        bool cuts = row->thoughts && !(keeps && thoughts.n);
        kind = kind_of(m);
        if (kind == REASONING) bytes_add(&thoughts, text.data, text.n);
        while (cuts && (kind == PREAMBLE || kind == ANSWER) && cut_at(&text, "</think>", &thought)) {
            while (cut_at(&thought, "<think>", &opening)) continue;
            thought = trim_lines(thought, true);
            bytes_add(&thoughts, thought.data, thought.n);
            if (keeps) text = trim_lines(text, false);
        }
        if (bare && kind == CALL && !called) parts.n = 0; /* text beside calls is left out */
        called = kind == CALL;
        if (kind >= CALL || (kind != REASONING && text.n)) put_part(chat, m, text, &parts);
    } while (continues(row, c, ++i));
    if (kind == CALL && row->calls) piece = row->calls;
    bool kept = keeps && model && recent && (thoughts.n || i == c->messages);
    Bytes said = kept ? trim_lines(parts, false) : parts, thought = trim_lines(thoughts, true);
    if (kept || (model && !keeps)) chat_fill(chat, &turn, row->thoughts, NULL, &thought);
    if (!strstr(piece, "%p")) bytes_add(&turn, front.data, front.n); /* %p keeps %t from trimming it, too */
    bytes_add(&turn, said.data, said.n);
    said = strstr(piece, "%t") ? text_trim(turn) : turn;
    chat_fill(chat, out, piece, &front, &said);
    return i;
}

/* Writes what precedes the first message. What precedes a text of the user's goes to `front`. */
static void put_begin(const Chat *chat, const Conversation *c, Bytes *front, Bytes *out) {
    const Row *row = chat->own;
    LocalText preset = text_within(chat, 0, PRESETS, c->date ? c->date : "");
    LocalText fixed = strstr(chat->template, "strftime_now") ? NULL : text_within(chat, PRESETS, STRINGS, "");
    const char *system = c->instructions ? c->instructions : preset;
    const cJSON *tools = row->calls ? NULL : tools_of(c), *tool; /* NULL: render() writes them */
    bool alone = row->flags & ALONE;
    struct tm day = {0};
    char date[32];
    LocalBytes text = {0}, about = {0}, list = {0};
    bytes_print(&text, "%s%s", system ? system : "", system && tools && !alone ? "\n\n" : "");
    for (int i = 0; row->flags & HOIST && i < c->messages; i++) {
        if (kind_of(c->message + i) != SYSTEM) continue;
        if (!strstr(chat->template, "is_first_sp")) text.n = 0; /* only DeepSeek's later templates join all */
        bytes_print(&text, "%s%s", text.n ? "\n\n" : "", c->message[i].content.data);
    }
    cJSON_ArrayForEach(tool, tools) {
        bytes_text(&list, alone ? "" : "\n");
        put_spaced(&list, tool, alone ? 4 : 0, 0);
        bytes_text(&list, alone ? "\n\n" : "");
    }
    if (tools) chat_fill(chat, alone ? front : &text, row->tools, NULL, &list);
    if (!c->date || !strptime(c->date, "%Y-%m-%d", &day)) strptime("2024-07-26", "%F", &day); /* the template's */
    strftime(date, sizeof date, "%d %b %Y", &day);
    Bytes environment = bytes_of(tools ? "Environment: ipython\n" : ""), today = bytes_of(fixed ? fixed : date);
    chat_fill(chat, &about, row->about, &environment, &today);
    chat_fill(chat, out, row->begin, NULL, NULL);
    const int bos = strstr(chat->template, "bos_token") ? tokenizer_bos(chat->tokenizer) : -1;
    if (row->flags & BOS && bos >= 0) chat_token(out, bos);
    Bytes said = strstr(row->system, "%t") ? text_trim(text) : text;
    if (system || row->about || text.n)
        chat_fill(chat, row->flags & (FIRST | LAST) ? front : out, row->system, &about, &said);
}

/* Is a user's text the result of a tool, as clients without tool messages send it? To Qwen3 that is no question. */
static bool is_result(const Row *row, Bytes text) {
    size_t n = strlen("</tool_response>");
    return row->flags & KEEP && text.n >= n && begins(text.data, "<tool_response>") &&
           same(text.data + text.n - n, "</tool_response>");
}

static bool render(const Chat *chat, const Conversation *c, bool prompt, Bytes *out, Error *e) {
    const Row *row = chat->own;
    LocalBytes front = {0}, tools = {0};
    int first = c->messages, last = first; /* the user's first text; where the last question begins, if there is one */
    for (int i = c->messages - 1; i >= 0; i--) {
        if (kind_of(c->message + i) != USER) continue;
        first = i;
        if (last == c->messages && !is_result(row, c->message[i].content) && !continues(row, c, i)) last = i;
    }
    put_begin(chat, c, &front, out);
    if (tools_of(c) && (row->calls || row->flags & ALONE) && first == c->messages)
        return fail(e, USAGE, "messages: in %s chats tools stand in front of a user's text: add one", row->name);
    const bool asks = c->messages && kind_of(c->message + c->messages - 1) == USER;
    const int fronted = !(row->flags & LAST) ? first : asks ? last : -1; /* the turn that `front` belongs to */
    if (row->calls && tools_of(c)) put_spaced(&tools, tools_of(c), 0, 0);
    for (int i = 0, turn = 1, next; i < c->messages; i = next) {
        int kind = kind_of(c->message + i);
        if (i == last && tools.n) chat_fill(chat, out, row->tools, NULL, &tools);
        next = put_turn(chat, c, i, i > last, i == fronted ? front : (Bytes){0}, out);
        if (kind == RESULT || kind_of(c->message + next - 1) == CALL) continue; /* calls and results are no turns */
        int before = i ? kind_of(c->message + i - 1) : USER;
        turn += kind == USER && turn % 2 == 0 && (before == CALL || before == RESULT); /* no answer came */
        if (row->flags & (FIRST | LAST) && (turn % 2 ? kind != USER : kind > CALL))
            return fail(e, USAGE, "%s chats alternate user and assistant, the user first: turn %d does not", row->name,
                        turn);
        turn++;
    }
    if (prompt) { /* what precedes an answer, without the space that the model writes itself */
        chat_fill(chat, out, row->assistant, NULL, NULL);
        if (out->n && out->data[out->n - 1] == ' ') out->n--;
        chat_fill(chat, out, same(c->effort, "none") ? row->quiet : row->think, NULL, NULL);
    }
    return true;
}

static const char *const none[CONTROLS]; /* answers.c knows the tokens */
static const char known[] = "those of Qwen, SmolLM2, Llama, Mistral, Gemma, DeepSeek and TinyLlama";
const Format templates = {known, none, "", fits, render, answers_force, answers_read};
