/* reading.h: what must hold for whatever a model writes, here as a text in which the bytes 1 to 8 are harmony's control
 * tokens in the order of Chat.control, or those of another format, 11 is an id without text and every other byte its
 * own token. Capital letters are words that only an answer has. */
#ifndef READING_H
#define READING_H

#include "../chat.h"
#ifdef ROOM_formats
#include "../formats/answers.h"
#endif
#include "parrot.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { START = 1, CHANNEL, CONSTRAIN, MESSAGE, END, CALLED, RETURN, ENDOFTEXT };

typedef struct {
    Tokenizer *tokenizer;
    Chat chat;
    int token_of[256];
} Talker;

static void find_tokens(Talker *m) {
    for (int id = tokenizer_size(m->tokenizer) - 1; id >= 0; id--) {
        Bytes out = {0};
        tokenizer_bytes(m->tokenizer, &(Decoder){0}, id, &out);
        if (out.n == 1) m->token_of[(unsigned char)*out.data] = id;
        bytes_free(&out);
    }
    m->token_of[11] = tokenizer_size(m->tokenizer) + 7;
}

static bool talker_open(Talker *m) {
    Error e;
    m->tokenizer = parrot_open(NULL, &e);
    if (!m->tokenizer || !chat_open(&m->chat, m->tokenizer, "", false, &e)) return false;
    find_tokens(m);
    memcpy(m->token_of + 1, m->chat.control, 8 * sizeof *m->chat.control); /* harmony's eight */
    return true;
}

/* Formats other than harmony: their template, and their control tokens. */
#define TURNS(begin, text, end)                                                                                        \
    "{{ tools }}{% for m in messages %}{{ " begin " }}" text end "{% endfor %}"                                        \
    "{% set m = {'role': 'assistant'} %}{% if add_generation_prompt %}{{ " begin " }}{% endif %}"
#define CONTENT  "{{ m.content | trim }}"
#define THOUGHTS "{% if m.thinking %}<think>\n{{ m.thinking }}\n</think>\n\n{% endif %}"
enum { OTHERS = 6, MOST_CONTROLS = 8 };
static const struct {
    const char *template, *control[MOST_CONTROLS];
} others[OTHERS] = {
    {TURNS("'<|im_start|>' + m.role + '\\n'",
           THOUGHTS CONTENT "{% for c in m.tool_calls %}{{ '\\n' if m.content or loop.index0 }}<tool_call>\n{\"name\": "
                            "{{ c.function.name | tojson }}, \"arguments\": {{ c.function.arguments | tojson "
                            "}}}\n</tool_call>{% endfor %}",
           "<|im_end|>\n"),
     {"<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"}},
    {TURNS("'<|im_start|>' + m.role + '\\n'", CONTENT, "<|im_end|>\n"), {"<|im_end|>", "<|im_start|>"}},
    {TURNS("'<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n'",
           "{% if m.tool_calls %}{\"name\": {{ m.tool_calls[0].function.name | tojson }}, \"parameters\": "
           "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}" CONTENT "{% endif %}",
           "<|eot_id|>"),
     {"<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"}},
    {TURNS("'<start_of_turn>' + m.role + '\\n'", CONTENT, "<end_of_turn>\n"),
     {"<end_of_turn>", "<bos>", "<start_of_turn>"}},
    {TURNS("'[' + m.role + ']\\n'", CONTENT, "</s>"), {"</s>", "<s>"}},
    {TURNS("'[' + m.role + ']\\n'",
           "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}{% else "
           "%}" CONTENT "{% endif %}",
           "</s>"),
     {"</s>", "<s>", "[TOOL_CALLS]"}},
};

/* The parrot with another format's control tokens for its own. */
static inline bool talker_open_other(Talker *m, int which) {
    Error e;
    cJSON *json = json_read("tests/fixtures/parrot/tokenizer.json", 1 << 20, &e), *added;
    for (int i = 0; i < MOST_CONTROLS && others[which].control[i]; i++) {
        added = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "added_tokens"), i);
        cJSON_ReplaceItemInObject(added, "content", cJSON_CreateString(others[which].control[i]));
    }
    m->tokenizer = parrot_open(json, &e);
    bool ok = m->tokenizer && chat_open(&m->chat, m->tokenizer, others[which].template, false, &e);
    cJSON_Delete(json);
    find_tokens(m);
    for (int i = 0; i < MOST_CONTROLS; i++)
        m->token_of[1 + i] = others[which].control[i] ? tokenizer_added(m->tokenizer, others[which].control[i]) : 0;
    return ok;
}

#ifdef ROOM_formats
extern const Format templates;

/* The parrot with a way to write calls and, in that of Mistral, Gemma and Seed, their own thoughts. Marks are tokens,
 * those of the bytes from 0x80 on, or spelled out. */
enum { ROW_MARKS = 21 };
static inline bool talker_open_row(Talker *m, const char *row, bool tokens) {
    static const char *const marks[ROW_MARKS] = {"<|im_end|>",
                                                 "<|python_tag|>",
                                                 "[ARGS]",
                                                 "[TOOL_CALLS]",
                                                 "<tool_response>",
                                                 "<|tool_call>",
                                                 "<tool_call|>",
                                                 "<｜tool▁calls▁begin｜>",
                                                 "<｜tool▁calls▁end｜>",
                                                 "<｜tool▁call▁begin｜>",
                                                 "<｜tool▁sep｜>",
                                                 "<｜tool▁call▁end｜>",
                                                 "<|tool_calls_section_begin|>",
                                                 "<|tool_calls_section_end|>",
                                                 "<|tool_call_begin|>",
                                                 "<|tool_call_argument_begin|>",
                                                 "<|tool_call_end|>",
                                                 "<think>",
                                                 "</think>",
                                                 "<tool_call>",
                                                 "</tool_call>"};
    Error e;
    cJSON *json = json_read("tests/fixtures/parrot/tokenizer.json", 1 << 20, &e);
    for (int i = 0; i < (tokens ? ROW_MARKS : 1); i++)
        cJSON_ReplaceItemInObject(cJSON_GetArrayItem(cJSON_GetObjectItem(json, "added_tokens"), i), "content",
                                  cJSON_CreateString(marks[i]));
    m->tokenizer = parrot_open(json, &e);
    cJSON_Delete(json);
    if (!m->tokenizer) return false;
    find_tokens(m);
    m->chat = (Chat){.tokenizer = m->tokenizer, .template = "", .name = row, .tools = true};
    m->chat.format = m->chat.answer = &templates;
    for (int i = 0; i < CONTROLS; i++) m->chat.control[i] = -1;
    answers_use(&m->chat, row,
                begins(row, "Mistral") ? "[THINK]"
                : begins(row, "Seed")  ? "<seed:think>"
                : begins(row, "Gemma") ? "<|channel>thought"
                                       : "<think>");
    for (int i = 1; i < (tokens ? ROW_MARKS : 0); i++) m->token_of[0x80 + i] = tokenizer_added(m->tokenizer, marks[i]);
    m->chat.control[ANSWER_ENDS] = m->token_of[1] = tokenizer_added(m->tokenizer, "<|im_end|>");
    return m->chat.calls && m->chat.thoughts;
}

/* What is wrong with how the text is read there, or NULL. */
static inline const char *row_problem(const Talker *m, const char *data, size_t n) {
    Bytes shown = {0}, contents = {0};
    Reader r;
    const char *problem = NULL;
    bool stop = false;
    reader_init(&r, &m->chat, NULL);
    for (size_t i = 0; i < n && !stop; i++) {
        const int before = r.messages;
        const Read read = reader_push(&r, m->token_of[(unsigned char)data[i]], &shown);
        stop = read.stop;
        if (!stop && read.closed != (r.messages > before)) problem = "closes a message that it does not report";
    }
    if (!stop) reader_end(&r, &shown);
    for (int i = 0; i < r.messages; i++) {
        const Message *message = r.message + i;
        Error e;
        cJSON *json = json_parse(message->content.data, message->content.n, "arguments", &e);
        if (kind_of(message) == CALL && !cJSON_IsObject(json)) problem = "calls without an object";
        cJSON_Delete(json);
        bytes_add(&contents, message->content.data, message->content.n);
    }
    if (utf8_check(shown.data, shown.n) < shown.n) problem = "shows what is not UTF-8";
    if (contents.n != shown.n || (shown.n && memcmp(contents.data, shown.data, shown.n)))
        problem = "shows something else than the contents";
    reader_free(&r);
    bytes_free(&shown), bytes_free(&contents);
    return problem;
}
#endif

static inline void talker_close(Talker *m) {
    chat_close(&m->chat);
    tokenizer_close(m->tokenizer);
}

/* Reads n tokens; `shown` is what was shown. False: a message was closed without a word. */
static bool read_tokens(const Talker *m, Reader *r, const int *tokens, size_t n, Bytes *shown) {
    bool ok = true;
    reader_init(r, &m->chat, NULL);
    for (size_t i = 0; i < n; i++) {
        int before = r->messages;
        Read read = reader_push(r, tokens[i], shown);
        ok = ok && r->messages - before == read.closed;
    }
    reader_end(r, shown);
    return ok;
}

static bool starts_with(const char *data, size_t n, const char *with) {
    return n >= strlen(with) && !memcmp(data, with, strlen(with));
}

/* May the header that begins here name somebody else? A name with a dot is a tool's. */
static bool may_be_anothers(const char *data, size_t n) {
    static const char *const words[] = {"user", "system", "developer", "python", "tool"};
    size_t author = 0, skip = 0;
    bool found = false;
    while (author < n && (unsigned char)data[author] > ENDOFTEXT) author++;
    while (skip < author && strchr(" \t\r\n", data[skip])) skip++;
    for (int i = 0; i < 5; i++) found = found || starts_with(data + skip, author - skip, words[i]);
    return found || memchr(data, '.', author);
}

/* Appends the capital letters of one message, data[0..n), that stand behind the channel final, and behind <|message|>
 * if that ends the header. Left out are calls, what others may say, and headers that name a type. */
static void letters_of_message(const char *data, size_t n, Bytes *out) {
    bool header = true, final = false;
    size_t before = out->n;
    if (may_be_anothers(data, n)) return;
    for (size_t i = 0; i < n; i++) {
        const char *rest = data + i;
        if (header && *rest == MESSAGE) header = false, out->n = before;
        if (header &&
            (*rest == CONSTRAIN || starts_with(rest, n - i, "to=") || starts_with(rest, n - i, "functions."))) {
            out->n = before;
            return;
        }
        if (*rest == CHANNEL) {
            while (i + 1 < n && data[i + 1] == ' ') i++;
            final = starts_with(data + i + 1, n - i - 1, "final");
        } else if (final && *rest >= 'A' && *rest <= 'Z') {
            bytes_add(out, rest, 1);
        }
    }
}

static void letters_of_answers(const char *data, size_t n, Bytes *out) {
    size_t begin = 0;
    bool content = false;
    for (size_t i = 0; i < n; i++) {
        bool ends = data[i] >= END && data[i] <= ENDOFTEXT;
        if (ends || data[i] == START || (data[i] == CHANNEL && content)) {
            letters_of_message(data + begin, i - begin, out);
            begin = i + (data[i] != CHANNEL);
            content = false;
        }
        content = content || data[i] == MESSAGE;
    }
    letters_of_message(data + begin, n - begin, out);
}

static bool same_messages(const Conversation *a, const Conversation *b) {
    Bytes first = {0}, second = {0};
    for (int i = 0; i < a->messages; i++) json_append(&first, message_json(a->message + i));
    for (int i = 0; i < b->messages; i++) json_append(&second, message_json(b->message + i));
    bool same = first.n == second.n && (!first.n || !memcmp(first.data, second.data, first.n));
    bytes_free(&first);
    bytes_free(&second);
    return same;
}

static void open_conversation(Conversation *c) {
    conversation_init(c);
    c->request = cJSON_CreateObject();
    cJSON_AddTrueToObject(c->request, "bare"); /* no system message */
    cJSON_AddTrueToObject(c->request, "keep_analysis");
}

/* What is wrong with the conversation, rendered and read again: it must be the same, and no more than its own control
 * tokens may stand there. What the model wrote as a developer gets a heading. */
static const char *render_problem(const Talker *m, const Conversation *c) {
    Error e;
    bool headed = false;
    for (int i = 0; i < c->messages; i++) headed = headed || kind_of(c->message + i) == SYSTEM;
    Ids ids = {0};
    Bytes shown = {0};
    Reader r;
    Conversation again;
    const char *problem = NULL;
    int starts = 0;
    open_conversation(&again);
    if (!chat_render(&m->chat, c, false, &ids, &e)) problem = "is not rendered";
    for (size_t i = 0; i < ids.n; i++) starts += ids.data[i] == m->chat.control[0];
    if (!problem && starts != c->messages) problem = "has other control tokens than its own when rendered";
    read_tokens(m, &r, ids.data, ids.n, &shown);
    if (!problem && r.repairs) problem = "has to be repaired again";
    reader_take(&r, &again);
    if (!problem && !headed && !same_messages(c, &again)) problem = "reads otherwise when rendered";
    reader_free(&r);
    conversation_free(&again);
    ids_free(&ids);
    bytes_free(&shown);
    return problem;
}

#ifdef ROOM_terminal
cJSON *conversation_json(const Conversation *c); /* of terminal/ */

/* What is wrong with the conversation, saved and loaded. */
static const char *save_problem(const Talker *m, const Conversation *c) {
    Error e;
    Bytes text = {0};
    Conversation again;
    const char *problem = NULL;
    int empty = 0; /* reasoning that says nothing is not saved */
    for (int i = 0; i < c->messages; i++)
        if (kind_of(c->message + i) > CALL) return NULL; /* what ends an answer is not in it */
    json_append(&text, conversation_json(c));
    cJSON *json = json_parse(text.data, text.n, "messages", &e);
    conversation_init(&again);
    for (int i = 0; i < c->messages; i++)
        empty += message_part(c->message + i) == REASONING && !c->message[i].content.n;
    if (!json || !conversation_parse(&again, json, &e)) problem = "is not loaded";
    if (!problem && again.messages != c->messages - empty) problem = "has other messages when loaded";
    for (int i = 0; i < again.messages; i++) conversation_set(&again.message[i].id, NULL); /* no header has it */
    if (!problem) problem = render_problem(m, &again);
    cJSON_Delete(json);
    conversation_free(&again);
    bytes_free(&text);
    return problem;
}
#endif

/* What is wrong with how the text is read in another format, or NULL. Read, rendered and read again it must be the
 * same, unless the model spelled out the end of a thought, from which templates cut what stands before it, or wrote
 * text beside calls, where Mistral's templates leave it out. */
static inline const char *other_problem(const Talker *m, const char *data, size_t n) {
    Error e;
    Bytes shown = {0}, contents = {0};
    Ids asked = {0}, all = {0};
    Reader r;
    Conversation c, again;
    const char *problem = NULL;
    bool stop = false;
    conversation_init(&c);
    conversation_init(&again);
    conversation_add(&c, "user", NULL, "Hi", 2);
    reader_init(&r, &m->chat, NULL);
    for (size_t i = 0; i < n && !stop; i++) {
        int before = r.messages;
        Read read = reader_push(&r, m->token_of[(unsigned char)data[i]], &shown);
        stop = read.stop;
        if (!stop && read.closed != (r.messages > before)) problem = "closes a message that it does not report";
    }
    if (!stop) reader_end(&r, &shown);
    for (int i = 0; i < r.messages; i++) bytes_add(&contents, r.message[i].content.data, r.message[i].content.n);
    if (utf8_check(shown.data, shown.n) < shown.n) problem = "shows what is not UTF-8";
    if (contents.n != shown.n || (shown.n && memcmp(contents.data, shown.data, shown.n)))
        problem = "shows something else than the contents";
    int messages = r.messages, calls = 0;
    bool behind = false; /* a text stands behind a call: templates put it in front */
    for (int i = 0; i < messages; i++) {
        behind = behind || (calls && message_part(r.message + i) != CALL);
        calls += message_part(r.message + i) == CALL;
    }
    bool beside = calls && calls < messages && tokenizer_added(m->tokenizer, "[TOOL_CALLS]") >= 0;
    bool cut = tokenizer_added(m->tokenizer, "</think>") >= 0 && contents.n &&
               memmem(contents.data, contents.n, "</think>", 8);
    bool replaced = contents.n && memchr(contents.data, 0, contents.n); /* templates get U+FFFD for it */
    reader_take(&r, &c);
    reader_free(&r);
    if (!problem && !chat_render(&m->chat, &c, false, &all, &e)) problem = "is not rendered";
    c.messages = 1; /* the question alone */
    if (!problem && !chat_render(&m->chat, &c, true, &asked, &e)) problem = "is not asked";
    c.messages += messages;
    for (size_t i = 0; !problem && messages && i < asked.n; i++)
        if (i >= all.n || all.data[i] != asked.data[i]) problem = "has another prompt when rendered";
    reader_init(&r, &m->chat, NULL);
    stop = false;
    for (size_t i = asked.n; i < all.n && !stop; i++) stop = reader_push(&r, all.data[i], &shown).stop;
    if (!stop) reader_end(&r, &shown);
    conversation_add(&again, "user", NULL, "Hi", 2);
    reader_take(&r, &again);
    if (!problem && messages && !cut && !replaced && !beside && !behind && !same_messages(&c, &again))
        problem = "reads otherwise when rendered";
    reader_free(&r);
    conversation_free(&c), conversation_free(&again);
    ids_free(&asked), ids_free(&all);
    bytes_free(&shown), bytes_free(&contents);
    return problem;
}

/* What is wrong with how the text is read, or NULL. */
static const char *reading_problem(const Talker *m, const char *data, size_t n) {
    Bytes shown = {0}, contents = {0}, expected = {0};
    Reader r;
    Conversation c;
    const char *problem = NULL;
    int *tokens = allocate(n * sizeof *tokens + 1);
    for (size_t i = 0; i < n; i++) tokens[i] = m->token_of[(unsigned char)data[i]];
    if (!read_tokens(m, &r, tokens, n, &shown)) problem = "closes a message that it does not report";
    letters_of_answers(data, n, &expected);
    size_t letters = 0;
    for (int i = 0; i < r.messages; i++) {
        const Bytes *content = &r.message[i].content;
        bytes_add(&contents, content->data, content->n);
        for (size_t k = 0; k < content->n && message_part(r.message + i) == ANSWER; k++)
            letters += letters < expected.n && content->data[k] == expected.data[letters];
    }
    if (letters < expected.n) problem = "loses text of an answer";
    if (utf8_check(shown.data, shown.n) < shown.n) problem = "shows what is not UTF-8";
    if (contents.n != shown.n || (shown.n && memcmp(contents.data, shown.data, shown.n)))
        problem = "shows something else than the contents";
    open_conversation(&c);
    reader_take(&r, &c);
    if (!problem) problem = render_problem(m, &c);
#ifdef ROOM_terminal
    if (!problem) problem = save_problem(m, &c);
#endif
    reader_free(&r);
    conversation_free(&c);
    free(tokens);
    bytes_free(&shown), bytes_free(&contents), bytes_free(&expected);
    return problem;
}

#endif
