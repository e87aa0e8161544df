/* keep.c: the rules that answers keep, from what a request asks for: a schema, a pattern or choices for the text,
 * strict tools, or a call that is forced. A rule is a grammar of the whole answer, thoughts and control tokens
 * included: inside of a thought anything may come, and the answer ends only where the grammar does. host.h has the
 * socket. */
#include "json.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PROBE "probe_function"
enum { MOST_RULES = 32, MOST_TEXT = 1000000, MOST_STATES = 500000, MOST_FORCED = 256 };

struct Rule {
    Grammar g;
    int start, users; /* users: streams, and makers */
    char *key;        /* what it was made of */
    Rule *next;
};

/* The rules that are kept, the last used one first. A lock guards the list and `users`. A grammar belongs to the thread
 * that compiles it, and then to the thread that runs the scheduler. */
static struct {
    pthread_mutex_t lock;
    Rule *rules;
    Vocabulary *words;
    const Session *session;
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

typedef struct { /* a rule being made */
    Grammar *g;
    const Session *m;
    const cJSON *request;
    const Conversation *talk; /* NULL: a text */
    bool force;
    const char *name; /* of the function to call, or NULL */
    Error *e;
} Maker;

/* ---- parts of answers ---- */

static int token_node(Grammar *g, int id) {
    const Bytes text = token_text(kept.words, id);
    return text_node(g, text.data, text.n);
}

/* A control token; its name if there is none. */
static int mark(const Maker *m, const char *name) {
    const int id = tokenizer_added(m->m->tokenizer, name);
    return id >= 0 ? token_node(m->g, id) : text_node(m->g, name, strlen(name));
}

/* What ends an answer: the model's tokens, and its chat format's. Marks of thoughts and calls do not. */
static int answer_end(const Maker *m) {
    const Ids *stop = &m->m->checkpoint.stop;
    const Chat *chat = &m->m->chat;
    const bool marked = m->talk && chat->answer != &harmony; /* see formats/answers.h */
    LocalIds cases = {0};
    for (size_t i = 0; i < stop->n; i++) {
        int k = 0;
        while (k < 4 && marked && chat->control[k] != stop->data[i]) k++;
        if (k == 4 || !marked) ids_add(&cases, token_node(m->g, stop->data[i]));
    }
    if (marked && chat->control[4] >= 0) ids_add(&cases, token_node(m->g, chat->control[4]));
    return alt_node(m->g, cases.data, cases.n);
}

/* ---- what the text must be ---- */

static int refuse(const Maker *m, const char *what, const char *why) {
    if (!m->e->code) fail(m->e, USAGE, "%s %s", what, why);
    return NEVER;
}

/* call: for arguments, of that form or, NULL, as JSON. */
static int schema(const Maker *m, const cJSON *value, const char *name, bool call, const Form *form) {
    if (!value) return refuse(m, name, "needs json_schema.schema");
    LocalJson parsed = cJSON_IsString(value) /* as some clients send guided_json */
                           ? json_parse(value->valuestring, strlen(value->valuestring), name, m->e)
                           : NULL;
    if (cJSON_IsString(value) && !parsed) return m->e->code = USAGE, NEVER;
    return schema_node(m->g, parsed ? parsed : value, name, call, form, m->e);
}

static int regex(const Maker *m, const cJSON *value, const char *name) {
    LocalBytes why = {0};
    const int node = cJSON_IsString(value) ? pattern_node(m->g, value->valuestring, NEVER, &why) : NEVER;
    if (!cJSON_IsString(value)) bytes_text(&why, "is not a text");
    return why.n ? refuse(m, name, why.data) : node;
}

static int choices(const Maker *m, const cJSON *value, const char *name) {
    LocalIds cases = {0};
    const cJSON *each;
    cJSON_ArrayForEach(each, value) {
        if (!cJSON_IsString(each)) return refuse(m, name, "is not an array of texts");
        ids_add(&cases, text_node(m->g, each->valuestring, strlen(each->valuestring)));
    }
    if (!cases.n || cases.n > 4096) return refuse(m, name, "is not an array of 1 to 4,096 texts");
    return alt_node(m->g, cases.data, cases.n);
}

/* What a field asks of the text. */
static int asked(const Maker *m, const char *kind, const cJSON *value, const char *field) {
    if (same(kind, "json")) return schema(m, value, field, false, NULL);
    if (same(kind, "regex")) return regex(m, value, field);
    if (same(kind, "choice")) return choices(m, value, field);
    if (same(kind, "json_object")) return any_object_node(m->g, field, NULL, m->e);
    return refuse(m, field, "is not supported: json, regex, choice and json_object are");
}

/* The text's grammar; Grammar.all: anything. */
static int content(const Maker *m) {
    const cJSON *format = json_get(m->request, "response_format"), *each;
    const cJSON *outputs = json_get(m->request, "structured_outputs");
    const char *type = json_string(format, "type");
    int node = m->g->all, n = 0;
    if (format && !(type && text_listed("text json_object json_schema", type)))
        return refuse(m, "response_format", "needs the type text, json_object or json_schema");
    if (outputs && !cJSON_IsObject(outputs)) return refuse(m, "structured_outputs", "is not an object");
    if (format && strcmp(type, "text")) {
        const cJSON *own = cJSON_GetObjectItemCaseSensitive(json_get(format, "json_schema"), "schema");
        node = asked(m, same(type, "json_schema") ? "json" : type, own, "response_format"), n++;
    }
    cJSON_ArrayForEach(each, m->request) {
        if (cJSON_IsNull(each) || !text_listed("guided_json guided_regex guided_choice", each->string)) continue;
        node = asked(m, each->string + strlen("guided_"), each, each->string), n++;
    }
    cJSON_ArrayForEach(each, outputs) {
        LocalText field = text_print("structured_outputs.%s", each->string);
        if (cJSON_IsNull(each) || cJSON_IsFalse(each)) continue;
        node = asked(m, each->string, each, field), n++;
    }
    return n > 1 ? refuse(m, "response_format", "and its other names can be given once only") : node;
}

/* ---- calls ---- */

static bool is_strict(const cJSON *tool) {
    return json_true(json_get(tool, "function"), "strict") || json_true(tool, "strict");
}

/* The arguments of a function: what its schema allows if it is strict; of another, any object if its schema is refused.
 * form: NULL: they are JSON. */
static int arguments(const Maker *m, const cJSON *tool, int i, const Form *form) {
    const cJSON *parameters = json_get(json_get(tool, "function"), "parameters");
    LocalText name = text_print("tools[%d].function.parameters", i);
    if (!is_strict(tool) && !m->force) return any_object_node(m->g, name, form, m->e);
    if (!parameters) return form ? form->none : text_node(m->g, "{}", 2);
    const int node = schema(m, parameters, name, true, form);
    if (!m->e->code || is_strict(tool) || gave_up(m->g)) return node;
    return any_object_node(m->g, name, form, m->e);
}

static void add_tokens(const Ids *ids, Bytes *out) {
    for (size_t i = 0; i < ids->n; i++) {
        const Bytes token = token_text(kept.words, ids->data[i]);
        bytes_add(out, token.data, token.n);
    }
}

/* Appends a conversation with a call, as the model's template writes it. */
static bool write_call(const Maker *m, const char *given, Bytes *out) {
    static const char tool[] = "[{\"type\":\"function\",\"function\":{\"name\":\"" PROBE "\",\"description\":\"x\","
                               "\"parameters\":{\"type\":\"object\",\"properties\":{}}}}]";
    const cJSON *kwargs = json_get(m->talk->request, "chat_template_kwargs");
    LOCAL(conversation_free) Conversation talk = {0};
    LocalIds ids = {0};
    Error e;
    conversation_init(&talk);
    talk.request = json_object("tools", json_parse(tool, strlen(tool), "tools", &e), "chat_template_kwargs",
                               cJSON_Duplicate(kwargs, true), NULL);
    conversation_add(&talk, "user", NULL, "x", 1);
    *message_new(&talk.message, &talk.messages) = call_of(PROBE);
    bytes_text(&talk.message[1].content, given);
    if (!chat_render(&m->m->chat, &talk, false, &ids, &e)) return *m->e = e, false;
    return add_tokens(&ids, out), true;
}

/* Cuts a text behind the first such word. before: what stands in front of it. */
static bool cut(Bytes *text, const char *word, Bytes *before) {
    const size_t n = strlen(word);
    char *at = text->n ? memmem(text->data, text->n, word, n) : NULL;
    if (!at) return false;
    *before = (Bytes){.data = text->data, .n = (size_t)(at - text->data)};
    *text = (Bytes){.data = at + n, .n = text->n - before->n - n};
    return true;
}

/* What follows the last name of the function that was called, without such characters as `begin` has there. */
static Bytes behind_name(Bytes text, Bytes begin) {
    Bytes before;
    while (cut(&text, PROBE, &before) || cut(&begin, PROBE, &before)) continue;
    while (text.n && (strchr(" \n", *text.data) || (begin.n && memchr(begin.data, *text.data, begin.n))))
        text.data++, text.n--;
    return text;
}

static bool quoted(Bytes text) { /* a control token may end with any bytes */
    return text.n && strchr("\"'", text.data[text.n - 1]) &&
           (text.n < 4 || (unsigned char)text.data[text.n - 4] != CONTROL);
}

/* The end of a call: the template's text up to an end token, then any end token. */
static int call_end(const Maker *m, Bytes text) {
    const int end = answer_end(m);
    size_t n = 0;
    while (n < text.n && !ends(m->g, state_run(m->g, end, text.data + n, 4))) n++; /* it ends with a NUL */
    return seq_node(m->g, text_node(m->g, text.data, n), end);
}

/* How calls are written in other formats than harmony: as the model's template writes one. JSON arguments: `*end` is
 * what follows them. Other forms: `*f` describes them and holds their end; its texts point into `call`. */
static bool read_form(const Maker *m, Bytes *call, Form *f, int *end) {
    static const char *const words[] = {"probe_a", "probe_b", "probe_c", "771001", "probe_d", "771002"};
    static const char unknown[] = "this model's template does not show how it writes calls, so none can be held to";
    Bytes part[6], rest;
    LocalBytes empty = {0}, begin = {0}, tag = {0};
    LocalIds ids = {0};
    Grammar *g = m->g;
    if (!write_call(m, "{\"probe_a\": \"probe_b\", \"probe_c\": 771001, \"probe_d\": 771002}", call)) return false;
    rest = *call;
    for (int i = 0; i < 6; i++)
        if (!cut(&rest, words[i], part + i)) return refuse(m, "tools:", unknown);
    if (quoted(part[0]) && rest.n && *rest.data == '}')
        return *end = call_end(m, (Bytes){.data = rest.data + 1, .n = rest.n - 1}), true;
    if (!write_call(m, "{}", &empty) || !chat_force(&m->m->chat, "none", PROBE, &ids, m->e)) return false;
    add_tokens(&ids, &begin);
    Bytes *to_text = part + 1, *behind_text = part + 2, *to_other = part + 3, *next = part + 4;
    const size_t quote = quoted(*to_text) && quoted(*to_other); /* then numbers have quotes, too */
    const bool marked = behind_text->n > next->n && to_text->n > to_other->n;
    if (next->n <= quote || rest.n <= quote) return refuse(m, "tools:", unknown);
    if (quoted(*to_text)) {
        to_other->n -= quote, next->data += quote, next->n -= quote, rest.data += quote, rest.n -= quote;
    } else {
        if (marked) f->open = (Bytes){.data = to_text->data + to_other->n, .n = to_text->n - to_other->n};
        if (marked) f->close = (Bytes){.data = behind_text->data, .n = behind_text->n - next->n};
        const char *stop = marked ? f->close.data : next->data + strspn(next->data, " \n"), *last = strchr(stop, '>');
        if ((unsigned char)*stop == CONTROL)
            tokenizer_bytes(m->m->tokenizer, &(Decoder){.begun = true}, stop[1] << 14 | stop[2] << 7 | stop[3], &tag);
        else if (last)
            bytes_add(&tag, stop, (size_t)(last + 1 - stop));
        if (!tag.n) return refuse(m, "tools:", unknown);
        int marks = text_node(g, tag.data, tag.n);
        for (int k = 1; k <= 2; k++) { /* the marks of calls, where they are no tokens; see formats/answers.h */
            const char *mark = m->m->chat.control[k + 1] < 0 ? m->m->chat.calls[k] : NULL;
            if (mark) marks = rule_node(g, "%|%", marks, text_node(g, mark, strlen(mark)));
        }
        f->stop = rule_node(g, "%%%", g->all, marks, g->all);
        f->equals[0] = text_node(g, to_text->data, to_text->n);
    }
    const Bytes first = behind_name(part[0], begin);
    f->first = text_node(g, first.data, first.n);
    f->equals[1] = text_node(g, to_other->data, to_other->n);
    f->next = text_node(g, next->data, next->n);
    f->end = call_end(m, rest);
    f->none = call_end(m, behind_name(empty, begin));
    return true;
}

/* A call of a function, as harmony writes it. */
static int harmony_call(const Maker *m, const char *name, int given) {
    const int function = text_node(m->g, name, strlen(name)), channel = mark(m, "<|channel|>");
    return rule_node(m->g, "(%commentary to=functions\\.%| to=functions\\.%%commentary)( %json| json)?%%%", channel,
                     function, function, channel, mark(m, "<|constrain|>"), mark(m, "<|message|>"), given,
                     mark(m, "<|call|>"));
}

static int other_call(const Maker *m, const char *name, int given, int end) {
    LocalIds ids = {0};
    LocalBytes begin = {0};
    if (!chat_force(&m->m->chat, "none", name, &ids, m->e)) return NEVER;
    add_tokens(&ids, &begin);
    return rule_node(m->g, "%%%", text_node(m->g, begin.data, begin.n), given, end);
}

/* Calls of one of the functions that may come. */
static int calls(const Maker *m) {
    const bool harmonies = m->m->chat.answer == &harmony;
    LocalIds cases = {0};
    LocalBytes written = {0};
    Form form = {.first = NEVER, .stop = NEVER};
    const cJSON *tool;
    int i = 0, end = NOTHING;
    if (!harmonies && !read_form(m, &written, &form, &end)) return NEVER;
    cJSON_ArrayForEach(tool, tools_of(m->talk)) {
        const char *name = json_string(json_get(tool, "function"), "name");
        const int given =
            name && (!m->name || same(name, m->name)) ? arguments(m, tool, i, form.first ? &form : NULL) : NEVER;
        i++;
        if (m->e->code) return NEVER;
        if (given == NEVER) continue;
        ids_add(&cases, harmonies ? harmony_call(m, name, given) : other_call(m, name, given, end));
    }
    return alt_node(m->g, cases.data, cases.n);
}

/* ---- whole answers ---- */

/* Any text that has no such part. */
static int without(Grammar *g, int part) { return but_node(g, g->all, rule_node(g, "%%%", g->all, part, g->all)); }

/* The prompt ends with <|start|>assistant. Thoughts come first; preambles only if nothing is asked of the text. */
static int harmony_answer(const Maker *m, int text, int called) {
    const int channel = mark(m, "<|channel|>"), message = mark(m, "<|message|>");
    const char *form = text == m->g->all ? "%(analysis|commentary)%%%%assistant" : "%analysis%%%%assistant";
    const int before = rule_node(m->g, form, channel, message, m->g->all, mark(m, "<|end|>"), mark(m, "<|start|>"));
    const int final =
        rule_node(m->g, "%final( %json)?%%%", channel, mark(m, "<|constrain|>"), message, text, mark(m, "<|return|>"));
    return rule_node(m->g, "%*(%|%)", before, m->force ? NEVER : final, called);
}

/* The prompt may end inside of a thought, or the answer may begin with one. */
static int other_answer(const Maker *m, int text, int called) {
    Grammar *g = m->g;
    const Chat *chat = &m->m->chat;
    const int open = chat->control[0], close = chat->control[1]; /* the marks of a thought, see formats/answers.h */
    const bool quiet = same(m->talk->effort, "none"), inside = chat_thinks(chat, m->talk->effort);
    int thought = NOTHING;
    if (inside || (open >= 0 && close >= 0 && !quiet)) { /* up to the mark, which may be a text */
        const int closed =
            close >= 0 ? token_node(g, close) : text_node(g, chat->thoughts[1], strlen(chat->thoughts[1]));
        thought = rule_node(g, "%%", without(g, closed), closed);
    }
    if (!inside && thought != NOTHING) thought = rule_node(g, "(%%)?", token_node(g, open), thought);
    const char *opens = chat->calls ? chat->calls[1] : NULL;
    const int end = m->force ? NEVER : answer_end(m);
    if (text == g->all && called != NEVER && !m->force && opens) /* no text has the mark if it is a token */
        return rule_node(g, "%%(%|%)", thought, without(g, text_node(g, opens, strlen(opens))), end, called);
    if (text == g->all && called != NEVER) text = rule_node(g, "([^ \n{\\[<]%)?", text);
    return rule_node(g, "%[ \n]{0,4}(%%|%)", thought, text, end, called);
}

static int answer(const Maker *m) {
    int text = content(m), called = NEVER;
    bool strict = m->force;
    const cJSON *tool;
    if (!m->talk) return text == m->g->all ? -1 : seq_node(m->g, text, answer_end(m));
    cJSON_ArrayForEach(tool, tools_of(m->talk)) strict |= is_strict(tool);
    if (m->e->code || (text == m->g->all && !strict)) return -1;
    if (tools_of(m->talk)) called = calls(m);
    return m->m->chat.answer == &harmony ? harmony_answer(m, text, called) : other_answer(m, text, called);
}

/* ---- rules ---- */

static const char ambiguous[] = "can be read in too many ways at once: use fewer counts, * and + inside of each other";

/* Finds the rule with this key, and moves it to the front. The caller holds the lock, here and below. */
static Rule *find_rule(const char *key) {
    for (Rule **at = &kept.rules, *r; (r = *at); at = &r->next) {
        if (strcmp(r->key, key)) continue;
        *at = r->next, r->next = kept.rules, kept.rules = r;
        return r->users++, r;
    }
    return NULL;
}

static void forget(Rule *r) {
    grammar_close(&r->g);
    free(r->key), free(r);
}

/* Of the rules that nobody uses the last ones of too many go, and any that has grown too large. */
static void trim_rules(void) {
    int n = 0;
    for (Rule **at = &kept.rules, *each; (each = *at);) {
        const bool fits = n++ < MOST_RULES;
        if (each->users || (fits && (size_t)each->g.nodes + each->g.data.n / 16 <= MOST_STATES)) {
            at = &each->next;
        } else {
            *at = each->next;
            forget(each);
        }
    }
}

static void drop(Rule *r) {
    pthread_mutex_lock(&kept.lock);
    r->users--;
    trim_rules();
    pthread_mutex_unlock(&kept.lock);
}

/* All of a request that a rule depends on, or NULL: nothing. */
static char *key_of(const Maker *m) {
    static const char fields[] = "response_format guided_json guided_regex guided_choice structured_outputs";
    const bool thinks = m->talk && !same(m->talk->effort, "none");
    const cJSON *tools = m->talk ? tools_of(m->talk) : NULL, *each;
    LocalBytes key = {0};
    cJSON_ArrayForEach(each, m->request) {
        if (!text_listed(fields, each->string)) continue;
        bytes_print(&key, "\n%s ", each->string);
        json_written(&key, each);
    }
    if (!tools && !key.n && !m->force) return NULL;
    if (tools) json_written(&key, tools);
    return text_print("%s\n%d%d%d%s", key.n ? key.data : "", m->talk != NULL, m->force, thinks, m->name ? m->name : "");
}

static void open_words(const Session *m) {
    LocalIds control = {0};
    if (kept.session == m) return;
    if (m->has_chat) ids_append(&control, m->chat.control, CONTROLS);
    ids_append(&control, m->checkpoint.stop.data, m->checkpoint.stop.n);
    kept.words = vocabulary_open(m->tokenizer, m->checkpoint.model.vocab, control.data, (int)control.n);
    kept.session = m;
}

static Rule *make(const Session *m, const cJSON *request, const Conversation *talk, bool force, const char *name,
                  Error *e) {
    Maker maker = {.m = m, .request = request, .talk = talk, .force = force, .name = name, .e = e};
    e->code = 0;
    LocalText key = key_of(&maker);
    if (!key) return NULL;
    if (strlen(key) > MOST_TEXT)
        return refuse(&maker, "response_format", "and tools have more than 1,000,000 bytes"), NULL;
    pthread_mutex_lock(&kept.lock);
    open_words(m);
    Rule *r = find_rule(key);
    pthread_mutex_unlock(&kept.lock);
    if (r) return r;
    r = allocate_zero(1, sizeof *r);
    r->key = copy_text(key, strlen(key)), r->users = 1, maker.g = &r->g;
    grammar_open(&r->g);
    const int node = answer(&maker);
    if (!e->code && gave_up(&r->g)) refuse(&maker, "response_format", "and tools take too long together");
    if (!e->code && node >= 0 && !grammar_settle(&r->g, node)) refuse(&maker, "response_format", "allows no answer");
    if (e->code || node < 0) return forget(r), NULL;
    r->start = node;
    if (!state_tokens(&r->g, kept.words, r->start))
        return refuse(&maker, "response_format", ambiguous), forget(r), NULL;
    pthread_mutex_lock(&kept.lock);
    r->next = kept.rules, kept.rules = r;
    trim_rules();
    pthread_mutex_unlock(&kept.lock);
    return r;
}

/* ---- streams ---- */

/* NEVER: the text is behind its end, or the grammar gave up. */
static int state_now(Stream *s) {
    Grammar *g = &s->rule->g;
    g->work = 0;
    for (; s->kept < s->tokens.n; s->kept++) {
        const int next = state_token(g, kept.words, s->state, s->tokens.data[s->kept]);
        if (gave_up(g)) return NEVER;
        s->state = next;
    }
    return s->state;
}

/* Behind its end, which only ignore_eos passes, a text is free. */
static void allow(Stream *s, uint32_t *bits) {
    const size_t words = ((size_t)kept.session->checkpoint.model.vocab + 31) / 32;
    Grammar *g = &s->rule->g;
    const int state = state_now(s);
    const uint32_t *row = gave_up(g) ? NULL : state_tokens(g, kept.words, state);
    uint32_t any = 0;
    for (size_t i = 0; i < words && row; i++) any |= row[i];
    if (!row) s->stuck = ambiguous;
    if (row && !any && state && !ends(g, state)) s->stuck = "needs a text that the model's tokens cannot write";
    any ? memcpy(bits, row, words * sizeof *row) : memset(bits, -1, words * sizeof *row);
}

/* The bytes that must come, as tokens. The last one is left out: it may be part of a longer one with what follows. */
static void forced(Stream *s, Ids *more) {
    LocalBytes text = {0};
    Grammar *g = &s->rule->g;
    Error e;
    for (int state = state_now(s), byte; text.n < MOST_FORCED; state = state_step(g, state, (unsigned char)byte)) {
        if ((byte = state_forced(g, state)) < 0 || byte == CONTROL) break;
        bytes_add(&text, (const char[]){(char)byte}, 1);
    }
    if (text.n < 2 || utf8_check(text.data, text.n) < text.n) return;
    if (tokenizer_encode(kept.session->tokenizer, text.data, text.n, 0, more, &e)) more->n -= more->n > 0;
    size_t fits = 0; /* a tokenizer may add a space, or compose letters */
    for (int state = state_now(s); fits < more->n; fits++)
        if (!(state = state_token(g, kept.words, state, more->data[fits]))) break;
    more->n = fits;
    if (more->n < 2) more->n = 0; /* the mask does as well */
}

static void begin_to_keep(Rule *r, Stream *s, size_t begin) {
    pthread_mutex_lock(&kept.lock);
    r->users++;
    pthread_mutex_unlock(&kept.lock);
    s->rule = r, s->state = r->start, s->kept = begin;
    s->allow = allow, s->forced = forced;
}

/* May the text end here, or has it ended? Control tokens come only behind what must be whole. */
static bool whole(Stream *s) {
    Grammar *g = &s->rule->g;
    const int state = state_now(s);
    const bool ended = !state || ends(g, state) || state_step(g, state, CONTROL);
    return ended && !gave_up(g);
}

static bool keep_file(const char *path, const Session *m, const Conversation *talk, Stream *s, Error *e) {
    cJSON *schema = json_read(path, 1 << 24, e);
    if (!schema) return false;
    LocalJson request = json_object("guided_json", schema, NULL);
    Rule *rule = make(m, request, talk, false, NULL, e);
    if (!rule) return fail(e, USAGE, "%s%s", path, e->text + begins(e->text, "guided_json"));
    return begin_to_keep(rule, s, s->prompt), drop(rule), true;
}

const Keeping json_keeping = {make, begin_to_keep, keep_file, whole, drop};
