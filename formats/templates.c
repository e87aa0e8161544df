/* templates.c: chats by the model's own chat template, a Jinja program that jinja.c runs, with the variables that
 * transformers gives it. answers.c reads what models write. chat.h has the socket. */
#include "answers.h"
#include "jinja.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {          /* Chat.own */
    Jinja *plain, *tools; /* tools: for prompts with tools, or NULL: the same */
    int64_t steps;        /* that a prompt may take */
} Own;
enum { PROBE_STEPS = 100000 }; /* for conversations of a few words, of which opening a model renders some */

static void close_templates(Chat *chat) {
    Own *own = chat->own;
    if (!own) return;
    jinja_free(own->plain), jinja_free(own->tools);
    free(own);
}

/* Answers are harmony if the template writes that and the model has its tokens: a template that was given. */
static void open_harmony(Chat *chat) {
    int control[CONTROLS], n = 0;
    while (n < CONTROLS && (control[n] = tokenizer_added(chat->tokenizer, harmony.control[n])) >= 0) n++;
    if (n < CONTROLS || !strstr(chat->template, "<|message|>")) return;
    memcpy(chat->control, control, sizeof control);
    chat->answer = &harmony;
    chat->thinks = chat->quiet = false;
}

static bool fits(Chat *chat, Error *e) {
    const bool models = chat->template == tokenizer_template(chat->tokenizer, false);
    const char *tools = models ? tokenizer_template(chat->tokenizer, true) : "";
    if (!*chat->template) return false;
    Own *own = chat->own = allocate_zero(1, sizeof *own);
    own->plain = jinja_parse(chat->template, strlen(chat->template), e);
    if (own->plain && *tools) own->tools = jinja_parse(tools, strlen(tools), e);
    if (!own->plain || (*tools && !own->tools)) {
        close_templates(chat);
        return false;
    }
    chat->name = "its own chat template";
    chat->schemas = false;
    own->steps = PROBE_STEPS;
    answers_open(chat);
    open_harmony(chat);
    own->steps = JINJA_STEPS;
    return true;
}

/* ---- a conversation as templates get it ---- */

/* What templates differ in. They get arguments as a mapping, or as the client's text; the client's ids, no name of a
 * result's function and no content beside calls, or nine letters and digits, as Mistral's want, the name, and "". */
enum { AS_TEXT = 1, HELPED = 2, WAYS = 4 };

/* nine: the last nine letters and digits of the id, behind zeros. */
static cJSON *put_id(cJSON *json, const char *key, const char *id, bool nine) {
    char changed[] = "000000000";
    for (size_t i = id ? strlen(id) : 0, at = 9; i-- && at;)
        if (isalnum((unsigned char)id[i])) changed[--at] = id[i];
    return json_add(json, key, json_word(nine || !id ? changed : id), NULL);
}

static cJSON *call_json(const Message *m, bool nine, bool as_text) {
    Error e;
    const char *name = m->recipient + begins(m->recipient, "functions.");
    cJSON *arguments = as_text ? NULL : json_parse(m->content.data, m->content.n, "arguments", &e);
    if (!arguments) arguments = json_from_text(m->content.data, m->content.n);
    cJSON *function = json_object("name", json_word(name), "arguments", arguments, NULL);
    return put_id(json_object("type", json_word("function"), "function", function, NULL), "id", m->id, nine);
}

/* Joins message i and those that belong to it, an assistant's thoughts, text and calls, and moves *i behind them. */
static cJSON *turn_json(const Conversation *c, int *i, bool nine, int way) {
    static const char *const roles[] = {[USER] = "user", [RESULT] = "tool", [SYSTEM] = "system"};
    const Part kind = kind_of(c->message + *i);
    LocalBytes text = {0}, thoughts = {0};
    cJSON *calls = NULL;
    const Message *m = c->message + *i;
    if (kind > CALL) {
        ++*i;
        cJSON *json =
            json_object("role", json_word(roles[kind]), "content", json_from_text(m->content.data, m->content.n), NULL);
        if (kind == RESULT && way & HELPED)
            json_add(json, "name", json_word(m->name ? m->name + begins(m->name, "functions.") : ""), NULL);
        return kind == RESULT ? put_id(json, "tool_call_id", m->id, nine) : json;
    }
    for (Part part = kind;;) {
        m = c->message + *i;
        Bytes *to = part == REASONING ? &thoughts : &text;
        if (part != CALL) bytes_print(to, "%s%s", to->n ? "\n" : "", m->content.data);
        if (part == CALL && !calls) calls = cJSON_CreateArray();
        if (part == CALL) cJSON_AddItemToArray(calls, call_json(m, nine, way & AS_TEXT));
        if (++*i == c->messages || part == ANSWER) break;
        part = kind_of(c->message + *i);
        if (part > CALL) break;
    }
    const bool silent = calls && !text.n && !(way & HELPED); /* OpenAI's API has null then, and templates ask for it */
    cJSON *content = silent ? cJSON_CreateNull() : json_from_text(text.data, text.n);
    cJSON *json = json_object("role", json_word("assistant"), "content", content, NULL);
    if (thoughts.n) /* under the names that templates read */
        json_add(json, "reasoning_content", json_from_text(thoughts.data, thoughts.n), "thinking",
                 json_from_text(thoughts.data, thoughts.n), NULL);
    return calls ? json_add(json, "tool_calls", calls, NULL) : json;
}

static cJSON *messages_json(const Chat *chat, const Conversation *c, int way) {
    const bool nine = way & HELPED || strstr(chat->template, "[TOOL_CALLS]");
    cJSON *list = cJSON_CreateArray();
    if (c->instructions)
        cJSON_AddItemToArray(list,
                             json_object("role", json_word("system"), "content", json_word(c->instructions), NULL));
    for (int i = 0; i < c->messages;) cJSON_AddItemToArray(list, turn_json(c, &i, nine, way));
    return list;
}

/* The variables besides messages. chat_template_kwargs count before others, but the effort none before all. */
static cJSON *variables(const Conversation *c, bool prompt) {
    const bool thinks = !same(c->effort, "none");
    const cJSON *kwargs = json_get(c->request, "chat_template_kwargs"), *documents = json_get(c->request, "documents"),
                *each;
    cJSON *given = json_object("tools", tools_of(c) ? cJSON_Duplicate(tools_of(c), true) : cJSON_CreateNull(),
                               "documents", documents ? cJSON_Duplicate(documents, true) : cJSON_CreateNull(),
                               "enable_thinking", cJSON_CreateBool(thinks), "thinking", cJSON_CreateBool(thinks), NULL);
    if (thinks && !same(c->effort, "medium")) json_add(given, "reasoning_effort", json_word(c->effort), NULL);
    if (!cJSON_IsObject(kwargs)) kwargs = NULL;
    cJSON_ArrayForEach(each, kwargs) {
        if (cJSON_IsNull(each)) continue;                                               /* as if left out */
        if (!thinks && text_listed("enable_thinking thinking", each->string)) continue; /* the effort is none */
        cJSON_DeleteItemFromObjectCaseSensitive(given, each->string);
        json_add(given, each->string, cJSON_Duplicate(each, true), NULL);
    }
    return json_add(given, "add_generation_prompt", cJSON_CreateBool(prompt), NULL);
}

/* ---- prompts ---- */

/* As transformers does it: the last message gets this behind its text, and the prompt ends where it stands. */
static const char mark[] = "CONTINUE_FINAL_MESSAGE_TAG ";

static bool mark_last(cJSON *messages, Error *e) {
    cJSON *last = cJSON_GetArrayItem(messages, cJSON_GetArraySize(messages) - 1);
    const char *text = json_string(last, "content");
    if (!json_is(last, "role", "assistant") || !text)
        return fail(e, USAGE, "continue_final_message: the last message is not a text of the assistant's");
    LocalText marked = text_print("%s%s", text, mark);
    cJSON_ReplaceItemInObjectCaseSensitive(last, "content", json_word(marked));
    return true;
}

static bool cut_at_mark(Marked *out, size_t begin, Error *e) {
    const size_t n = strlen(mark) - 1;
    size_t at = out->text.n;
    while (at > begin && (at + n > out->text.n || memcmp(out->text.data + at, mark, n))) at--;
    if (at == begin) return fail(e, USAGE, "continue_final_message: the template leaves out the last message");
    const bool kept = out->text.data[at + n] == ' ';
    while (!kept && at > begin && isspace((unsigned char)out->text.data[at - 1])) at--; /* the template trims */
    out->text.n = out->own.n = at;
    return true;
}

static bool render(const Chat *chat, const Conversation *c, bool prompt, Marked *out, Error *e) {
    const Own *own = chat->own;
    const bool continues = json_true(c->request, "continue_final_message");
    const size_t begin = out->text.n;
    struct tm day = {0};
    const bool dated = c->date && strptime(c->date, "%Y-%m-%d", &day);
    LocalJson given = variables(c, prompt && !continues);
    if (dated) mktime(&day); /* the day of the week */
    for (int way = 0; way < WAYS; way++) {
        Error problem; /* the first way's counts */
        cJSON *messages = messages_json(chat, c, way);
        cJSON_DeleteItemFromObjectCaseSensitive(given, "messages");
        json_add(given, "messages", messages, NULL);
        if (continues && !mark_last(messages, e)) return false;
        const Jinja *t = tools_of(c) && own->tools ? own->tools : own->plain;
        if (jinja_render(t, own->steps, tokenizer_special(chat->tokenizer), given, dated ? &day : NULL, out,
                         way ? &problem : e))
            return !continues || cut_at_mark(out, begin, e);
    }
    return false;
}

static const char *const no_marks[CONTROLS]; /* answers_open() chooses them */
const Format templates = {"chat templates", no_marks, "", fits, render, answers_force, answers_read, close_templates};
