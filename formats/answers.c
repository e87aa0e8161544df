/* answers.c: reads what models of other formats than harmony write, right or wrong: thoughts, text, calls. See
 * answers.h. */
#include "answers.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { MOST_INDENT = 100 };
static const char between_calls[] = "[], \t\r\n"; /* in a list of them */

const char *const answer_marks[CONTROLS] = {"<think>",      "</think>",       "<tool_call>",
                                            "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"};

/* White space as Python's str.strip() defines it. */
static bool is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 31) || c == 0x85 || *utf8proc_category_string((int32_t)c) == 'Z';
}

Bytes text_trim(Bytes text) {
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

void put_spaced(Bytes *out, const cJSON *value, int indent, int depth) {
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
        put_spaced(out, each, indent, depth + 1);
    }
    if (indent) bytes_print(out, "\n%*s", width, "");
    bytes_text(out, object ? "}" : "]");
}

bool cut_at(Bytes *text, const char *mark, Bytes *before) {
    char *at = text->n ? memmem(text->data, text->n, mark, strlen(mark)) : NULL;
    if (!at) return false;
    *before = (Bytes){.data = text->data, .n = (size_t)(at - text->data)};
    *text = (Bytes){.data = at + strlen(mark), .n = text->n - before->n - strlen(mark)};
    return true;
}

/* Moves pending text to the message being read. White space at the beginning of a message is dropped; at the end of the
 * text it stays pending until more follows. The first `white` bytes are known to be white space. */
static void say(Reader *r, size_t white) {
    Bytes *content = &r->now.content;
    Bytes text = text_trim((Bytes){.data = r->pending.data + white, .n = r->pending.n - white});
    char *begin = content->n ? r->pending.data : text.data, *end = text.data + text.n;
    if (content->n && !text.n) return;
    bytes_add(content, begin, (size_t)(end - begin));
    r->pending.n -= (size_t)(end - r->pending.data);
    memmove(r->pending.data, end, r->pending.n + 1);
}

static void end_text(Reader *r, const char *channel) {
    say(r, 0);
    conversation_set(&r->now.channel, channel);
    reader_next(r, false);
}

static bool may_call(const Reader *r) { return r->chat->tools && (!r->tools || r->tools->child); }

/* Is a marked call being read, or may the pending text become one without marks? */
static bool may_be_call(const Reader *r) {
    static const char named[] = "{\"name\":", typed[] = "{\"type\":\"function\","; /* white space aside */
    const Answers *row = r->chat->answers;
    char begin[20] = "";
    size_t n = 0;
    if (r->in_content) return true;
    if (!may_call(r) || !row->alone || r->now.content.n) return false;
    for (const char *s = r->pending.data; *s && n + 1 < sizeof begin; s++)
        if (!strchr(" \t\r\n", *s)) begin[n++] = *s;
    return begins(begin, named) || begins(named, begin) || begins(begin, typed) || begins(typed, begin);
}

/* Turns the first n bytes of pending text into a call if they are one, with arguments as Python writes them. `closed`:
 * they end with the closing mark, or with an object of a list. A call without marks must have arguments, or any JSON
 * with a name would be one. */
static void end_call(Reader *r, size_t n, bool closed) {
    Error e;
    const Answers *row = r->chat->answers;
    bool alone = row->alone;
    Bytes text = text_trim((Bytes){.data = r->pending.data, .n = n}), before;
    LocalBytes rest = {0};
    for (; row->list && text.n && strchr(between_calls, *text.data); text.n--) text.data++;
    if (!alone && !row->list) cut_at(&text, "<tool_call>", &before);
    if (closed && !row->list) text.n -= strlen("</tool_call>");
    LocalJson json = json_parse(text.data, text.n, "call", &e);
    const char *name = json_string(json, "name"), *key = json_get(json, "arguments") ? "arguments" : "parameters";
    const cJSON *arguments = json_get(json, key);
    bool ok =
        name && chat_word(name) && reader_declares(r, name, NULL) && (arguments ? cJSON_IsObject(arguments) : !alone);
    r->repairs += !ok || !(alone || closed);
    r->in_content = false;
    if (!ok) return;
    Message call = call_of(name);
    arguments ? put_spaced(&call.content, arguments, 0, 0) : bytes_text(&call.content, "{}");
    bytes_add(&rest, r->pending.data + n, r->pending.n - n);
    r->pending.n = *r->pending.data = 0;
    end_text(r, "commentary");
    *message_new(&r->message, &r->messages) = call;
    bytes_add(&r->pending, rest.data, rest.n);
    r->in_content = row->list;
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

/* A mark counts only as one token and at its place; otherwise it is text. */
Read answers_read(Reader *r, int token, int which) {
    const Tokenizer *t = r->chat->tokenizer;
    const Answers *row = r->chat->answers;
    int messages = r->messages;
    bool thinking = same(r->now.channel, "analysis"), mark = which < END && (which != OPEN_CALLS || row->list),
         stop = token == STREAM_END || which == END || (!mark && tokenizer_is_control(t, token));
    if (stop) {
        tokenizer_flush(&r->decoder, &r->pending);
        if (row->list && r->in_content && strspn(r->pending.data, between_calls) == r->pending.n)
            r->pending.n = *r->pending.data = 0; /* the end of the list */
        else if (may_be_call(r))
            end_call(r, r->pending.n, false);
        end_text(r, thinking ? "analysis" : "final");
    } else if (row->thoughts && which == OPEN_THINK && r->started && !r->now.content.n && !r->in_content) {
        conversation_set(&r->now.channel, "analysis");
        r->started = false;
    } else if (row->thoughts && which == CLOSE_THINK && !r->in_content) {
        r->repairs += !thinking;
        tokenizer_flush(&r->decoder, &r->pending);
        if (thinking || !r->messages) end_text(r, "analysis"); /* a thought comes first */
    } else if (!(row->alone) || which != PYTHON_TAG) {
        size_t white = may_be_call(r) ? 0 : r->pending.n;
        if (may_call(r) && which == (row->list ? OPEN_CALLS : OPEN_CALL) && !thinking && !r->in_content) {
            tokenizer_flush(&r->decoder, &r->pending);
            say(r, white);
            r->in_content = true, r->quoted = false, r->scanned = 0, r->depth = 0;
        }
        if (which != OPEN_CALLS || !row->list) tokenizer_decode(t, &r->decoder, token, &r->pending);
        if (row->list && r->in_content)
            read_list(r);
        else if (which == CLOSE_CALL && r->in_content)
            end_call(r, r->pending.n, true), white = 0;
        if (!may_be_call(r)) say(r, white);
    }
    return (Read){.stop = stop, .closed = r->messages > (stop ? 0 : messages)};
}
