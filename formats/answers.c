/* answers.c: reads what models of other formats than harmony write, right or wrong: thoughts, text, calls. A row says
 * which texts open and close calls, and by patterns how one is written; one scanner reads arguments as JSON, Python and
 * Gemma write them. A mark that the tokenizer has as a token counts only as that token; spelled out it is text. */
#include "answers.h"
#include "jinja.h"

#include <ctype.h>
#include <curl/curl.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEPTH = 200, MOST_BEGIN = 1000 /* bytes of a call without marks, up to its arguments */ };
enum { MOST_STEPS = 10000 /* in a schema */ };
enum { PATTERNS = 4, QUOTES = 4, ROWS = 19, MARKS = 4 };

/* ---- the table ---- */

/* In a pattern white space stands for any or none. %n: the function's name. %a: its arguments. %o: an object with both.
 * %p: any number of `pair`, in which %k is the argument's name and %v its value, a text of its type, without line
 * breaks around it where the pattern has them. %i: any text. Each text ends where the pattern goes on. */
typedef struct {
    const char *name;
    const char *open, *close;   /* around calls. No open: one begins an answer. No close: they end with the answer */
    const char *first;          /* stands in front of the first call; only for forcing one */
    const char *between;        /* characters that may stand between calls, besides white space */
    const char *call[PATTERNS]; /* a call; the first pattern forces one */
    const char *pair;
} Calls;

/* clang-format off */
#define NAMED "{\"name\": \"%n\", \"arguments\": %a}"
#define PARAMETERS "\"name\": \"%n\", \"parameters\": %a}"
static const Calls rows[ROWS] = {
    {"Hermes", "<tool_call>", "</tool_call>", "\n", "", {NAMED, "%o"}, NULL},
    {"Qwen3-Coder", "<tool_call>", "</tool_call>", "\n", "", {"<function=%n>\n%p</function>"},
     "<parameter=%k>\n%v\n</parameter>\n"},
    {"GLM", "<tool_call>", "</tool_call>", "", "", {"%n\n%p"}, "<arg_key>%k</arg_key>\n<arg_value>%v</arg_value>\n"},
    {"Seed", "<seed:tool_call>", "</seed:tool_call>", "\n", "", {"<function=%n>\n%p</function>"},
     "<parameter=%k>%v</parameter>\n"},
    {"MiniMax", "<minimax:tool_call>", "</minimax:tool_call>", "\n", "", {"<invoke name=\"%n\">\n%p</invoke>"},
     "<parameter name=\"%k\">%v</parameter>\n"},
    {"DeepSeek V3.2", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "\n", "",
     {"<｜DSML｜invoke name=\"%n\">\n%p</｜DSML｜invoke>"},
     "<｜DSML｜parameter name=\"%k\" string=\"%i\">%v</｜DSML｜parameter>\n"},
    {"DeepSeek V3.1", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "", "",
     {"<｜tool▁call▁begin｜>%n<｜tool▁sep｜>%a<｜tool▁call▁end｜>"}, NULL},
    {"DeepSeek", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "", "",
     {"<｜tool▁call▁begin｜>function<｜tool▁sep｜>%n\n```json\n%a\n```<｜tool▁call▁end｜>"}, NULL},
    {"Kimi", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "", "",
     {"<|tool_call_begin|>functions.%n:0<|tool_call_argument_begin|>%a<|tool_call_end|>",
      "<|tool_call_begin|>functions.%n:%i<|tool_call_argument_begin|>%a<|tool_call_end|>"}, NULL},
    {"Gemma 4", "<|tool_call>", "<tool_call|>", "", "", {"call:%n%a"}, NULL},
    {"FunctionGemma", "<start_function_call>", "<end_function_call>", "", "", {"call:%n%a"}, NULL},
    {"LFM2", "<|tool_call_start|>", "<|tool_call_end|>", "[", "[],", {"%n%a"}, NULL},
    {"Olmo 3", "<function_calls>", "</function_calls>", "\n", "", {"%n%a"}, NULL},
    {"Phi-4-mini", "<|tool_call|>", "<|/tool_call|>", "[", "[],", {NAMED, "%o"}, NULL},
    {"Granite", "<|tool_call|>", NULL, "[", "[],", {NAMED, "%o"}, NULL},
    {"Mistral", "[TOOL_CALLS]", NULL, "[", "[],", {NAMED, "%o"}, NULL},
    {"Mistral, named", "[TOOL_CALLS]", NULL, "", "", {"%n[ARGS]%a", "%n[CALL_ID]%i[ARGS]%a", "%n%a"}, NULL},
    {"Llama 3", NULL, NULL, "", ";,", {"{" PARAMETERS, "{\"type\": \"function\", " PARAMETERS, NAMED,
     "{\"type\": \"function\", \"function\": " NAMED "}"}, NULL},
    {"pythonic", NULL, NULL, "", ",]", {"[%n%a", "%n%a"}, NULL},
};
static const char *const marks[MARKS][2] = {{"<think>", "</think>"}, {"[THINK]", "[/THINK]"}, /* of thoughts */
    {"<seed:think>", "</seed:think>"}, {"<|channel>thought", "<channel|>"}};
/* clang-format on */

/* Texts that Gemma puts around texts, and tokens that no answer has: with one the model goes on in somebody's name. */
static const char *const quotes[QUOTES] = {"<|\"|>", "<escape>", "\"", "'"};
static const char others[] = "<tool_response> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> "
                             "<｜User｜> <|user|>";
static const char python_tag[] = "<|python_tag|>"; /* Llama writes that in front of a call, or nothing */

/* The text without white space at both ends; not a copy. */
static Bytes trim(Bytes text) {
    Bytes kept = {.data = text.data + text.n};
    for (size_t i = 0, length; i < text.n; i += length) {
        uint32_t c = 0;
        length = (size_t)abs(utf8_decode(text.data + i, text.n - i, &c));
        if (is_space((int32_t)c)) continue;
        if (!kept.n) kept.data = text.data + i;
        kept.n = (size_t)(text.data + i + length - kept.data);
    }
    return kept;
}

/* ---- calls ---- */

typedef struct {
    const Reader *r;
    const Calls *row;
    const char *s, *end;
    bool cut;                   /* the text ended before the pattern did: more may come */
    const cJSON *function;      /* the declaration of the function that was named, if it is known */
    Bytes name, key, arguments; /* arguments: JSON, not checked yet */
} Scan;

/* The next byte behind white space, or 0 at the end. */
static char peek(Scan *p) {
    while (p->s < p->end && strchr(" \t\r\n", *p->s)) p->s++;
    p->cut |= p->s == p->end;
    return p->s < p->end ? *p->s : 0;
}

static bool take(Scan *p, const char *text) {
    if (peek(p) != *text) return false;
    const size_t rest = (size_t)(p->end - p->s), n = strlen(text);
    const bool fits = !memcmp(p->s, text, rest < n ? rest : n);
    p->cut |= fits && rest < n;
    p->s += fits && rest >= n ? n : 0;
    return fits && rest >= n;
}

/* Writes a text in quotes as JSON. A backslash escapes in quotes of one character. */
static bool put_quoted(Scan *p, Bytes *out) {
    int i = 0;
    while (i < QUOTES && !take(p, quotes[i])) i++;
    if (i == QUOTES) return false;
    const bool escapes = !quotes[i][1];
    const char *s = p->s;
    for (; s < p->end && !begins(s, quotes[i]); s++) s += escapes && *s == '\\' && s + 1 < p->end;
    if (s >= p->end) return p->cut = true, false;
    bytes_text(out, "\"");
    for (; p->s < s; p->s++) {
        const bool escaped = escapes && *p->s == '\\' && ++p->s;
        if (escaped ? *p->s != '\'' : strchr("\"\\", *p->s) != NULL) bytes_text(out, "\\");
        if ((unsigned char)*p->s < ' ') bytes_print(out, "\\u%04x", *p->s);
        if ((unsigned char)*p->s >= ' ') bytes_add(out, p->s, 1);
    }
    bytes_text(out, "\"");
    return p->s += strlen(quotes[i]), true;
}

/* Writes a word as JSON: a number, true, false or null, also as Python spells them; if it is a key, as a text. */
static bool put_word(Scan *p, bool key, Bytes *out) {
    static const char *const words[][2] = {{"True", "true"}, {"False", "false"}, {"None", "null"}};
    const char *begin = p->s;
    while (p->s < p->end && (*p->s & 0x80 || isalnum((unsigned char)*p->s) || strchr("_-+.", *p->s))) p->s++;
    LocalText word = copy_text(begin, p->s - begin);
    p->cut |= p->s == p->end;
    if (key && *word) bytes_print(out, "\"%s\"", word);
    for (int i = 0; i < 3; i++)
        if (!key && same(word, words[i][0])) return bytes_text(out, words[i][1]), true;
    if (!key) bytes_text(out, word);
    return *word;
}

/* Writes a value as JSON: what JSON, Python or Gemma write, or keyword arguments in brackets. */
static bool put_value(Scan *p, int depth, Bytes *out) {
    const char open = peek(p), close = open == '{' ? '}' : open == '[' ? ']' : ')', *colon = open == '(' ? "=" : ":";
    if (strchr("\"'<", open)) return open && put_quoted(p, out);
    if (!strchr("{[(", open) || depth > MOST_DEPTH || (open == '(' && depth)) return put_word(p, false, out);
    bytes_text(out, open == '[' ? "[" : "{");
    p->s++;
    for (bool first = true; peek(p) != close; first = false) {
        if (!first && !take(p, ",")) return false;
        if (!first && peek(p) == close) break; /* a comma behind the last one */
        bytes_text(out, first ? "" : ", ");
        if (open != '[') {
            if (strchr("\"'<", peek(p)) ? !put_quoted(p, out) : !put_word(p, true, out)) return false;
            if (!take(p, colon)) return false;
            bytes_text(out, ": ");
        }
        if (!put_value(p, depth + 1, out)) return false;
    }
    p->s++;
    bytes_text(out, open == '[' ? "]" : "}");
    return true;
}

static bool has_type(const cJSON *value, const char *type) {
    static const char *const names[] = {"boolean", "boolean", "null", "number", "string", "array", "object", ""};
    int64_t n;
    return same(type, names[ffs(value->type) - 1]) ||
           (same(type, "integer") && json_whole(value, INT64_MIN, INT64_MAX, &n));
}

/* What a $ref means: a JSON pointer (RFC 6901) as part of a URI. */
static const cJSON *referred(const cJSON *to, const char *ref) {
    char *path = curl_easy_unescape(NULL, ref, 0, NULL), *rest = path, *name = strsep(&rest, "/"); /* # */
    while ((name = strsep(&rest, "/"))) {
        LocalBytes key = {0};
        bytes_text(&key, "");
        for (; *name; name++) {
            const bool escaped = *name == '~' && name[1];
            name += escaped;
            bytes_add(&key, !escaped ? name : *name == '1' ? "/" : "~", 1);
        }
        to = cJSON_IsArray(to) ? cJSON_GetArrayItem(to, atoi(key.data)) : json_get(to, key.data);
    }
    curl_free(path);
    return to;
}

/* May a value satisfy a schema, as far as types, constants, cases, members and references tell in so many steps? */
static bool allows(const cJSON *root, const cJSON *schema, const cJSON *value, int *steps) {
    static const char *const keys[] = {"type", "const", "enum", "anyOf", "oneOf", "allOf"};
    const char *ref = json_string(schema, "$ref");
    const cJSON *members = cJSON_IsObject(value) ? value->child : NULL;
    if (--*steps < 0 || (cJSON_IsNull(value) && json_true(schema, "nullable"))) return true;
    for (int i = 0; i < 6; i++) {
        const cJSON *list = cJSON_GetObjectItemCaseSensitive(schema, keys[i]);
        const cJSON *each = i != 1 && cJSON_IsArray(list) ? list->child : list;
        int n = 0, good = 0;
        for (; each; each = each == list ? NULL : each->next, n++)
            good += i == 0  ? has_type(value, cJSON_GetStringValue(each))
                    : i < 3 ? cJSON_Compare(value, each, true)
                            : allows(root, each, value, steps);
        if (good < (i == 5 ? n : n > 0)) return false;
    }
    for (; members; members = members->next) {
        const cJSON *own = json_get(json_get(schema, "properties"), members->string);
        if (!allows(root, own ? own : json_get(schema, "additionalProperties"), members, steps)) return false;
    }
    return !ref || allows(root, referred(root, ref), value, steps);
}

/* A value that stands for itself, as XML has them: a text if the function declares that, or if it is nothing else. */
static void put_plain(const Scan *p, const char *key, Bytes text, Bytes *out) {
    Error e;
    Scan value = {.s = text.data, .end = text.data + text.n};
    LocalBytes json = {0};
    const cJSON *schema = json_get(p->function, "parameters");
    const bool read = put_value(&value, 1, &json) && !peek(&value);
    LocalJson plain = json_object(key, json_from_text(text.data, text.n), NULL); /* the arguments are one of these */
    LocalJson valid = json_object(key, read ? json_parse(json.data, json.n, "argument", &e) : NULL, NULL);
    int steps = MOST_STEPS;
    if (cJSON_IsString(valid->child))
        valid->child->type = cJSON_Raw; /* a text has its quotes, if it is not any value */
    const bool is_text =
        !valid->child || (allows(schema, schema, plain, &steps) && !allows(schema, schema, valid, &steps));
    is_text ? json_written(out, plain->child) : bytes_add(out, json.data, json.n);
}

/* The text up to where the pattern goes on, which is at `rest`. */
static bool take_until(Scan *p, const char *rest, Bytes *text) {
    rest += strspn(rest, " \n");
    LocalText end = copy_text(rest, strcspn(rest, "% \n"));
    const size_t left = (size_t)(p->end - p->s);
    const char *at = *end ? memmem(p->s, left, end, strlen(end)) : p->end;
    if (!at) return p->cut = true, false;
    *text = (Bytes){.data = (char *)(uintptr_t)p->s, .n = (size_t)(at - p->s)};
    return p->s = at, true;
}

static bool take_name(Scan *p, char next) {
    const char *begin = p->s;
    while (p->s < p->end && !strchr(" \t\r\n\"'<([{", *p->s) && *p->s != next) p->s++;
    if (p->s == p->end) return p->cut = true, false;
    p->name.n = 0;
    bytes_add(&p->name, begin, (size_t)(p->s - begin));
    return p->name.n && chat_word(p->name.data) && reader_declares(p->r, p->name.data, &p->function);
}

/* An object that has a name and arguments, or a text that is JSON with them. */
static bool take_object(Scan *p) {
    static const char *const names[] = {"name", "tool_name"}, *const keys[] = {"arguments", "parameters"};
    Error e;
    LocalBytes text = {0};
    if (peek(p) != '{' || !put_value(p, 1, &text)) return false;
    LocalJson json = json_parse(text.data, text.n, "call", &e);
    const char *name = json_string(json, names[!json_get(json, "name")]);
    const cJSON *arguments = json_get(json, keys[!json_get(json, "arguments")]);
    if (!name || !chat_word(name) || !reader_declares(p->r, name, NULL)) return false;
    p->name.n = 0;
    bytes_text(&p->name, name);
    if (cJSON_IsString(arguments)) bytes_text(&p->arguments, arguments->valuestring);
    if (!cJSON_IsString(arguments) && arguments) json_written(&p->arguments, arguments);
    if (!p->arguments.n) bytes_text(&p->arguments, "{}");
    return true;
}

/* {...} or (...). A function without arguments has {}: the model writes null, or nothing between two marks. */
static bool take_arguments(Scan *p, const char *rest) {
    Bytes text;
    if (p->s < p->end && strchr("{(", *p->s)) return put_value(p, 0, &p->arguments);
    const bool marked = strchr(">]\n", rest[-3]); /* what stands in front of %a */
    if (!take(p, "null") && !(marked && take_until(p, rest, &text) && !text.n)) return false;
    return bytes_text(&p->arguments, "{}"), true;
}

static bool match(Scan *p, const char *pattern);

static bool take_pairs(Scan *p) {
    const char *begin;
    bytes_text(&p->arguments, "{");
    do begin = p->s;
    while (match(p, p->row->pair));
    p->s = begin;
    return bytes_text(&p->arguments, "}"), true;
}

/* Takes what stands in a pattern as % and `kind`. lines: line breaks may stand before and behind a value. */
static bool take_part(Scan *p, char kind, const char *rest, bool lines) {
    Bytes text;
    if (kind != 'v') peek(p);
    if (kind == 'n') return take_name(p, rest[strspn(rest, " \n")]);
    if (kind == 'a') return take_arguments(p, rest);
    if (kind == 'o') return take_object(p);
    if (kind == 'p') return take_pairs(p);
    if (!take_until(p, rest, &text)) return false;
    for (; lines && text.n && *text.data == '\n'; lines = false) text.data++, text.n--;
    if (*rest == '\n' && text.n && text.data[text.n - 1] == '\n') text.n--;
    if (kind == 'k') p->key.n = 0, bytes_add(&p->key, text.data, text.n);
    if (kind != 'v') return true;
    if (p->arguments.n > 1) bytes_text(&p->arguments, ", ");
    json_append(&p->arguments, json_from_text(p->key.data, p->key.n));
    bytes_text(&p->arguments, ": ");
    put_plain(p, p->key.data, text, &p->arguments);
    return true;
}

static bool match(Scan *p, const char *pattern) {
    for (const char *c = pattern; *c; c++) {
        if (*c == ' ' || *c == '\n') continue;
        const bool part = *c == '%';
        if (part ? !take_part(p, c[1], c + 2, c > pattern && c[-1] == '\n') : !take(p, (char[]){*c, 0})) return false;
        c += part;
    }
    return true;
}

/* Appends the call that was matched, with arguments as Python writes JSON. False: they are no object. */
static bool add_call(const Scan *p, Conversation *calls) {
    Error e;
    LocalJson arguments = json_parse(p->arguments.data, p->arguments.n, "arguments", &e);
    if (!cJSON_IsObject(arguments)) return false;
    Message *call = message_new(&calls->message, &calls->messages);
    *call = call_of(p->name.data);
    LocalBytes text = {0};
    json_written(&text, arguments);
    return put_value(&(Scan){.s = text.data, .end = text.data + text.n}, 0, &call->content);
}

/* Appends the calls that a text begins with. Returns how much of it they are, with what may stand around them. */
static size_t read_calls(const Reader *r, const Calls *row, Bytes text, Conversation *calls) {
    Scan p = {.r = r, .row = row, .s = text.data, .end = text.data + text.n};
    size_t good = 0;
    for (bool found = true; found;) {
        while (peek(&p) && strchr(row->between, *p.s)) p.s++;
        const char *begin = p.s;
        if (begin == p.end) good = text.n;
        found = false;
        for (int i = 0; i < PATTERNS && row->call[i] && !found && begin < p.end; i++) {
            p.s = begin, p.arguments.n = 0, p.function = NULL;
            found = match(&p, row->call[i]) && add_call(&p, calls);
        }
        if (found) good = (size_t)(p.s - text.data);
    }
    bytes_free(&p.name), bytes_free(&p.key), bytes_free(&p.arguments);
    return good;
}

/* ---- reading ---- */

static const Calls *row_of(const Chat *chat) { return (const Calls *)chat->calls; }

/* The text of a mark, or NULL. */
static const char *mark_of(const Chat *chat, int which) {
    const Calls *row = row_of(chat);
    return which <= CLOSE_THINK ? (chat->thoughts ? chat->thoughts[which] : NULL)
           : row                ? (which == OPEN_CALLS ? row->open : row->close)
                                : NULL;
}

static bool thinking(const Reader *r) { return same(r->now.channel, "analysis"); }

static bool may_call(const Reader *r) {
    return r->chat->calls && r->chat->tools && (!r->tools || r->tools->child) && !thinking(r);
}

/* Does a mark mean something here? If not it is text. `token`: it is a token of its own. */
static bool counts(const Reader *r, int which, bool token) {
    if (r->in_content) return which >= OPEN_CALLS;
    if (which == OPEN_THINK) return !r->now.content.n && (r->started || thinking(r));
    if (which == CLOSE_THINK) return token || thinking(r) || !r->messages;
    return which == OPEN_CALLS && may_call(r);
}

/* Does the answer end with this token? Control tokens that belong to a call or a thought do not end it. */
static bool ends(const Reader *r, int token, int which) {
    const Tokenizer *t = r->chat->tokenizer;
    const Calls *row = row_of(r->chat);
    LocalBytes text = {0};
    if (token == STREAM_END || which == ANSWER_ENDS) return true;
    if (which <= CLOSE_CALLS) return false;
    tokenizer_bytes(t, &(Decoder){.begun = true}, token, &text);
    if (!text.n || tokenizer_added(t, text.data) != token) return tokenizer_is_control(t, token);
    if (text_listed(others, text.data)) return true;
    bool written = row && (same(text.data, python_tag) ? !row->open : row->pair && strstr(row->pair, text.data));
    for (int i = 0; row && i < PATTERNS && row->call[i]; i++) written |= strstr(row->call[i], text.data) != NULL;
    for (int i = 0; i < QUOTES; i++) written |= same(quotes[i], text.data);
    for (int i = 0; i <= CLOSE_CALLS; i++) written |= mark_of(r->chat, i) && strstr(mark_of(r->chat, i), text.data);
    return tokenizer_is_control(t, token) && !written;
}

/* Moves the first n bytes of pending text to the message being read. White space at the beginning of a message is
 * dropped; at the end of the text it stays pending until more follows. The first `scanned` bytes are white space. */
static void say(Reader *r, size_t n) {
    Bytes *content = &r->now.content, *pending = &r->pending;
    const size_t white = r->scanned < n ? r->scanned : n;
    Bytes text = trim((Bytes){.data = pending->data + white, .n = n - white});
    char *begin = content->n ? pending->data : text.data, *end = text.data + text.n;
    if (!content->n || text.n) {
        bytes_add(content, begin, (size_t)(end - begin));
        pending->n -= (size_t)(end - pending->data), n -= (size_t)(end - pending->data);
        memmove(pending->data, end, pending->n + 1);
    }
    r->scanned = n == pending->n ? n : 0;
}

static void end_text(Reader *r, const char *channel) {
    say(r, r->pending.n);
    conversation_set(&r->now.channel, channel);
    reader_next(r, false);
    r->scanned = 0;
}

/* Ends a section of calls. It is text if it has none; also if it has more, and a mark closed it or none opened it. */
static void end_calls(Reader *r, bool closed) {
    const Calls *row = row_of(r->chat);
    Bytes *pending = &r->pending, text = {.data = pending->data + r->begun, .n = pending->n - r->begun};
    LOCAL(conversation_free) Conversation calls = {0};
    const size_t read = read_calls(r, row, text, &calls);
    const int n = calls.messages;
    const bool whole = read == text.n, ok = n && (whole || (!closed && row->open));
    LocalBytes rest = {0};
    bytes_add(&rest, text.data + read, text.n - read);
    r->in_content = false, r->scanned = 0;
    r->repairs += !whole || (n && row->close && !closed);
    if (ok) pending->n = *pending->data = 0, end_text(r, "commentary");
    for (int i = 0; i < n && ok; i++) *message_new(&r->message, &r->messages) = calls.message[i];
    if (ok) calls.messages = 0; /* they are the reader's now */
    if (ok || (whole && !row->close)) pending->n = 0, bytes_add(pending, rest.data, rest.n);
    if (!ok && closed) bytes_text(pending, row->close);
    if (!ok) say(r, pending->n);
}

/* A mark behind the pending text. One that opens calls until the end of the answer has no text. */
static void read_mark(Reader *r, int which, bool token) {
    const bool began = thinking(r), open = which == OPEN_CALLS;
    const Calls *row = row_of(r->chat);
    if (!counts(r, which, token)) {
        bytes_text(&r->pending, open && !row->close ? "" : mark_of(r->chat, which));
        return;
    }
    if (r->in_content) end_calls(r, which == CLOSE_CALLS);
    if (which == OPEN_THINK) {
        conversation_set(&r->now.channel, "analysis");
        r->started = false, r->pending.n = *r->pending.data = 0, r->scanned = 0;
    } else if (which == CLOSE_THINK) {
        r->repairs += !began;
        if (began || !r->messages) end_text(r, "analysis"); /* a thought comes first */
    } else if (open) {
        say(r, r->pending.n);
        bytes_text(&r->pending, row->close ? row->open : "");
        r->in_content = true, r->begun = r->scanned = r->pending.n;
    }
}

/* The first mark that pending text spells and that counts here, of those that are no tokens, or -1. *at: where it
 * begins or, as far as the text goes, may begin. */
static int find_mark(Reader *r, size_t *at) {
    const Bytes *text = &r->pending;
    int found = -1;
    *at = text->n;
    for (int which = 0; which <= CLOSE_CALLS; which++) {
        const char *mark = r->chat->control[which] < 0 && counts(r, which, false) ? mark_of(r->chat, which) : NULL;
        for (size_t i = r->scanned, n; mark && i < *at; i++) {
            n = strlen(mark) < text->n - i ? strlen(mark) : text->n - i;
            if (!memcmp(text->data + i, mark, n)) *at = i, found = mark[n] ? -1 : which;
            if (which == OPEN_THINK && !strchr(" \t\r\n", text->data[i])) break; /* only at the beginning */
        }
    }
    if (r->in_content) r->scanned = *at;
    return found;
}

static void read_spelled(Reader *r, int which, size_t at) {
    LocalBytes rest = {0};
    const size_t end = at + strlen(mark_of(r->chat, which));
    bytes_add(&rest, r->pending.data + end, r->pending.n - end);
    r->pending.n = at, r->pending.data[at] = 0;
    read_mark(r, which, false);
    bytes_add(&r->pending, rest.data, rest.n);
}

/* Without marks: does an answer begin with a call, up to its arguments, or may it? */
static bool begins_call(const Reader *r, bool *may) {
    const Calls *row = row_of(r->chat);
    bool begins = false;
    *may = false;
    if (!row || row->open || !may_call(r) || r->now.content.n || r->pending.n > MOST_BEGIN) return false;
    for (int i = 0; i < PATTERNS && row->call[i] && *row->call[i] != '%'; i++) {
        LocalText pattern = copy_text(row->call[i], strstr(row->call[i], "%a") - row->call[i]);
        Scan p = {.r = r, .row = row, .s = r->pending.data, .end = r->pending.data + r->pending.n};
        if (!peek(&p)) return false;
        begins |= match(&p, pattern);
        *may |= p.cut;
        bytes_free(&p.name);
    }
    return begins;
}

Read answers_read(Reader *r, int token, int which) {
    const int messages = r->messages;
    const bool stop = ends(r, token, which), mark = which <= CLOSE_CALLS;
    size_t at;
    bool may;
    if (stop || mark)
        tokenizer_flush(&r->decoder, &r->pending);
    else if (token != tokenizer_added(r->chat->tokenizer, python_tag) || !r->chat->calls || row_of(r->chat)->open)
        tokenizer_decode(r->chat->tokenizer, &r->decoder, token, &r->pending);
    int spelled = find_mark(r, &at);
    for (; spelled >= 0 && (stop || mark); spelled = find_mark(r, &at)) read_spelled(r, spelled, at);
    if (mark) read_mark(r, which, true);
    if (spelled >= 0) {
        read_spelled(r, spelled, at); /* what follows waits: a token may add text to one message only */
    } else if (!r->in_content && !stop) {
        if (mark) at = r->pending.n;
        r->in_content = begins_call(r, &may);
        if (r->in_content) r->begun = 0, r->scanned = r->pending.n;
        if (!r->in_content && !may) say(r, at);
    }
    if (stop && r->in_content) end_calls(r, false);
    if (stop) end_text(r, thinking(r) ? "analysis" : "final");
    return (Read){.stop = stop, .closed = r->messages > (stop ? 0 : messages)};
}

/* ---- the choice ---- */

/* A conversation of known values, which no template changes, and its rendering: a question alone, or with an answer
 * behind a thought, or with a call and its result. */
typedef enum { QUESTION, THOUGHT, CALLED, DECLARED /* a question with tools */ } Probe;
#define ASKED    "known question"
#define THOUGHTS "known thought"
#define ANSWERED "known answer"
#define RESULTED "known result"
#define FUNCTION "known_function"
static const char arguments[] = "{\"place\": \"Quito\"}";
static const char declared[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"" FUNCTION "\",\"description\":\"known description\","
    "\"parameters\":{\"type\":\"object\",\"properties\":{\"place\":{\"type\":\"string\",\"description\":\"a place\"}},"
    "\"required\":[\"place\"]}}}]";

/* "" if the template refuses it. */
static void probe(const Chat *chat, Probe what, const char *effort, Marked *out) {
    LOCAL(conversation_free) Conversation c = {0};
    Error e;
    conversation_init(&c);
    conversation_set(&c.effort, effort);
    conversation_add(&c, "user", NULL, ASKED, strlen(ASKED));
    if (what >= CALLED) c.request = json_object("tools", json_parse(declared, strlen(declared), "tools", &e), NULL);
    if (what == CALLED) {
        Message *call = message_new(&c.message, &c.messages), *result;
        *call = call_of(FUNCTION);
        bytes_text(&call->content, arguments);
        conversation_set(&call->id, "abcdefghi");
        result = conversation_add(&c, "tool", "commentary", RESULTED, strlen(RESULTED));
        conversation_set(&result->id, "abcdefghi");
        conversation_set(&result->name, "functions." FUNCTION);
    }
    if (what == THOUGHT) conversation_add(&c, "assistant", "analysis", THOUGHTS, strlen(THOUGHTS));
    if (what == THOUGHT) conversation_add(&c, "assistant", "final", ANSWERED, strlen(ANSWERED));
    chat->format->render(chat, &c, what == QUESTION || what == DECLARED, out, &e);
    marked_add(out, "", 0, true);
}

/* Does a row read the known call, and nothing else, in what was rendered between question and result? DeepSeek's
 * templates leave a single one unclosed. */
static bool reads_known(const Chat *chat, const Calls *row, const char *from, const char *to, bool unclosed) {
    const Reader any = {.chat = chat};
    const char *open = row->open ? row->open : (char[]){*row->call[0], 0};
    bool found = false;
    for (const char *s = from; !found && (s = strstr(s, open)) && s < to; s++) {
        LOCAL(conversation_free) Conversation calls = {0};
        const char *begin = s + (row->open ? strlen(open) : 0), *close = row->close ? strstr(begin, row->close) : to;
        if ((!close || close > to) && !unclosed) continue;
        if (!close || close > to) close = to;
        const Bytes text = {.data = (char *)(uintptr_t)begin, .n = (size_t)(close - begin)};
        const size_t read = read_calls(&any, row, text, &calls);
        found = calls.messages == 1 && same(calls.message->recipient, "functions." FUNCTION) &&
                same(calls.message->content.data, arguments) && (read == text.n || close == to);
    }
    return found;
}

/* The row that reads the known call. Else the first whose opening mark is a token that the template names, with what a
 * call begins with. */
static const Calls *find_calls(const Chat *chat) {
    LOCAL(marked_free) Marked text = {0};
    const char *from, *to = NULL, *next;
    probe(chat, CALLED, "medium", &text);
    for (from = next = text.text.data; (next = strstr(next, ASKED)); next++) from = next;
    if (from) to = strstr(from, RESULTED);
    for (size_t i = 0; i < 2 * ROWS && to; i++)
        if (reads_known(chat, rows + i % ROWS, from, to, i >= ROWS)) return rows + i % ROWS;
    for (size_t i = 0; i < ROWS; i++) {
        const size_t n = strcspn(rows[i].call[0], "%\n>");
        LocalText front = copy_text(rows[i].call[0], n && rows[i].call[0][n - 1] == '"' ? n - 2 : n);
        const char *open = rows[i].open;
        if (open && tokenizer_added(chat->tokenizer, open) >= 0 && strstr(chat->template, open) &&
            strstr(chat->template, front))
            return rows + i;
    }
    return NULL;
}

/* Where a text of n bytes ends, white space aside. */
static bool ends_with(const char *text, size_t n, const char *mark) {
    while (n && strchr(" \t\r\n", text[n - 1])) n--;
    return n >= strlen(mark) && !memcmp(text + n - strlen(mark), mark, strlen(mark));
}

/* The marks around the known thought, or at the end of a prompt. Else the first whose closing mark is a token that the
 * template names. */
static const char *const *find_thoughts(const Chat *chat, const char *answer, const Marked *prompt) {
    const char *at = strstr(answer, THOUGHTS);
    for (int i = 0; i < MARKS; i++) {
        const char *rest = at ? at + strlen(THOUGHTS) : "";
        rest += strspn(rest, " \t\r\n");
        if (at && ends_with(answer, (size_t)(at - answer), marks[i][0]) && begins(rest, marks[i][1])) return marks[i];
        if (ends_with(prompt->text.data, prompt->text.n, marks[i][0])) return marks[i];
    }
    for (int i = 0; i < MARKS; i++)
        if (tokenizer_added(chat->tokenizer, marks[i][1]) >= 0 && strstr(chat->template, marks[i][1])) return marks[i];
    return NULL;
}

void answers_use(Chat *chat, const char *calls, const char *open) {
    for (size_t i = 0; i < ROWS; i++)
        if (same(rows[i].name, calls)) chat->calls = &rows[i].name;
    for (int i = 0; i < MARKS; i++)
        if (same(marks[i][0], open)) chat->thoughts = marks[i];
    for (int i = 0; i <= CLOSE_CALLS; i++)
        chat->control[i] = mark_of(chat, i) ? tokenizer_added(chat->tokenizer, mark_of(chat, i)) : -1;
}

void answers_open(Chat *chat) {
    LOCAL(marked_free) Marked answer = {0}, prompt = {0}, quiet = {0}, tools = {0};
    probe(chat, THOUGHT, "medium", &answer);
    probe(chat, QUESTION, "medium", &prompt);
    probe(chat, QUESTION, "none", &quiet);
    probe(chat, DECLARED, "medium", &tools);
    const Calls *calls = find_calls(chat);
    const char *const *thought = find_thoughts(chat, answer.text.data, &prompt);
    answers_use(chat, calls ? calls->name : NULL, thought ? *thought : NULL);
    chat->tools = strstr(tools.text.data, "known description");
    chat->thinks = thought && ends_with(prompt.text.data, prompt.text.n, *thought);
    chat->quiet = !chat->thinks || !ends_with(quiet.text.data, quiet.text.n, *thought);
    const char *end = strstr(answer.text.data, ANSWERED);
    if (end) end += strlen(ANSWERED), end += strspn(end, " \t\r\n");
    LocalText name = copy_text(end ? end : "", end ? strcspn(end, ">]") + 1 : 0);
    chat->control[ANSWER_ENDS] = tokenizer_added(chat->tokenizer, name);
}

bool answers_force(const Chat *chat, const char *effort, const char *name, Marked *out, Error *e) {
    const Calls *row = row_of(chat);
    if (!row) return fail(e, USAGE, "tool_choice: how this model writes calls is not known, so none can be forced");
    const char *at = strstr(row->call[0], "%n"), *rest = name ? at + 2 : "";
    LocalText before = copy_text(row->call[0], at - row->call[0]);
    LocalText after = copy_text(rest, strcspn(rest, "%"));
    LocalBytes piece = {0};
    if (chat_thinks(chat, effort)) bytes_print(&piece, "\n%s\n\n", mark_of(chat, CLOSE_THINK));
    bytes_print(&piece, "%s%s%s%s%s", row->open ? row->open : "", row->first, before, name ? name : "", after);
    marked_add(out, piece.data, piece.n, true);
    return true;
}
