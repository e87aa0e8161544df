/* terminal.c: the comfort of a terminal: lines wrapped between words, an editor with a history (libedit), and commands
 * that begin with a slash. Without this room play reads lines with getline. */
#include "host.h"

#define Tokenizer EditTokenizer /* libedit has a type of this name, too */
#include <histedit.h>
#undef Tokenizer

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/param.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

#define BRACKETS_ON  "\033[?2004h" /* pasted text arrives between \033[200~ and \033[201~ */
#define BRACKETS_OFF "\033[?2004l"

enum { MOST_SAVED = 64 << 20 }; /* bytes of a saved conversation */

/* ---- wrapping: a word waits until it is complete ---- */

static void wrap_word(Wrap *w) {
    const int begin = w->column + w->spaces;
    const bool fits = begin + w->cells <= w->width || begin <= w->indent;
    fprintf(w->f, "%s%*s%s", fits ? "" : "\n", fits ? w->spaces : w->indent, "", w->word.data);
    w->column = (fits ? begin : w->indent) + w->cells;
    w->word.n = 0, w->cells = w->spaces = 0;
}

static void wrap(Wrap *w, const char *text, size_t n) {
    for (size_t i = 0; i < n;) {
        char c = text[i];
        uint32_t cp;
        int length = abs(utf8_decode(text + i, n - i, &cp)), cells = wcwidth((wchar_t)cp);
        if (strchr(" \n\t", c)) {
            if (w->word.n) wrap_word(w);
            if (c == '\t') fprintf(w->f, "%*s\t", w->spaces, ""), w->column = ((w->column + w->spaces) | 7) + 1;
            if (c == '\n') fputc(c, w->f), w->column = 0;
            w->spaces = c == ' ' ? w->spaces + 1 : 0;
        } else {
            bytes_add(&w->word, text + i, (size_t)length);
            w->cells += MAX(cells, 0);
            if (cells == 2 || w->cells >= w->width) wrap_word(w); /* scripts without spaces, long words */
        }
        i += (size_t)length;
    }
}

static void row(FILE *f, const char *name, int column, const char *text) {
    int width = isatty(fileno(f)) ? columns(f) : 100;
    if (width <= 2 * column) {
        fprintf(f, "%s\n", name);
        name = "", text += strspn(text, " "), column = 6;
    }
    Wrap w = {.f = f, .width = width, .indent = column, .column = column};
    fprintf(f, "%-*s", column, name);
    wrap_text(&w, text, strlen(text));
    wrap_end(&w);
}

static void fit(FILE *f, Bytes *line) {
    size_t end = 0; /* of the last part that fits */
    for (size_t i = 0, column = 1; i < line->n && isatty(fileno(f)); column += (line->data[i++] & 0xC0) != 0x80) {
        if (begins(line->data + i, " · ")) end = i;
        if (column == (size_t)columns(f)) line->n = end;
    }
}

static void bar(FILE *f, int cells, const double *part, int n) {
    static const char *const glyph[] = {"█", "▓", "▒"};
    for (int i = 0, k = 0; i < cells; i++) {
        double end = 0;
        for (k = 0; k < n && i >= (end += part[k]) * cells;) k++;
        fputs(k < n ? glyph[k] : "░", f);
    }
}

/* ---- questions ---- */

static int ask(const char *question) {
    char answer[16] = "";
    if (!isatty(STDIN_FILENO) || !isatty(STDERR_FILENO)) return 0;
    Wrap w = wrap_on(stderr, NULL);
    wrap_text(&w, question, strlen(question));
    wrap_text(&w, " [y/N] ", strlen(" [y/N] ")); /* the last space waits */
    fputc(' ', stderr);
    bytes_free(&w.word);
    return fgets(answer, sizeof answer, stdin) && (*answer == 'y' || *answer == 'Y') ? 'y' : 'n';
}

/* ---- progress ---- */

static void progress(FILE *f, double done, const char *what) {
    fputc('\r', f), put_escape(f, WRAP_OFF);
    bar(f, MIN(20, columns(f) - 6 - (int)strlen(what)), &done, 1);
    fprintf(f, "%3d%% %s", (int)(100 * done), what);
    put_escape(f, "\033[K"), put_escape(f, WRAP_ON);
}

static void loading(uint64_t done, uint64_t total) {
    static uint64_t first;
    static double since, drawn;
    const double now = seconds();
    if (since <= 0) since = now, first = done;
    if (done < total && now - drawn < 0.05) return;
    drawn = now;
    LocalText what = text_print("Loading at %.1f GB/s", now > since ? (double)(done - first) / 1e9 / (now - since) : 0);
    progress(stderr, total ? (double)done / (double)total : 1, what);
    if (done >= total && !put_escape(stderr, ERASE_LINE)) fputc('\n', stderr);
}

static FILE *answers_to;              /* a loop's answers go to stdout as a whole */
static volatile sig_atomic_t waiting; /* the prompt is being read */

static void reading(Stream *t) {
    static size_t read;
    if (t && put_escape(answers_to, FAINT)) {
        LocalText what = text_print("reading %s tokens", COUNT(t->prompt));
        progress(answers_to, waiting ? (double)read / (double)t->prompt : 0, what);
        read = t->sent; /* by the next step but one */
        put_escape(answers_to, NORMAL);
        waiting = true;
    } else if (waiting) {
        put_escape(answers_to, ERASE_LINE);
        waiting = false;
    }
    fflush(answers_to); /* an error may follow on stderr */
}

/* In a loop the terminal shows no keys while an answer is written. This one shows at once, because a step may take
 * long. */
static void on_interrupt(int number) {
    if (waiting && !interrupted && write(STDOUT_FILENO, "^C", 2) < 0) {}
    interrupted = number;
}

/* ---- lines, by libedit ---- */

enum { HISTORY = 1000 }; /* texts */

static const struct {
    const char *name, *argument, *help;
} slashes[] = {{"/retry", "", "answer the last question again"},
               {"/undo", "", "take the last question back, and its answer"},
               {"/clear", "", "forget the conversation"},
               {"/system", " [TEXT]", "show or change the instructions; none removes them"},
               {"/effort", " [LEVEL]", "show or change how long it thinks: low, medium or high"},
               {"/set", " [NAME VALUE]", "show the settings, or change one"},
               {"/context", "", "how full the context is"},
               {"/prompt", "", "what the model reads, exactly"},
               {"/save", " [FILE]", "save the conversation as JSON of chat completions"},
               {"/load", " [FILE]", "go on with a saved conversation"},
               {"/help", "", "this list"},
               {"/exit", "", "leave, as Ctrl+D does"}};
enum { SLASHES = sizeof slashes / sizeof *slashes };

static struct {
    EditLine *line;
    History *history;
    char *path; /* of the history; NULL: no place for it */
    const char *prompt;
    bool brackets; /* the terminal puts them around pasted text */
    bool pasted;   /* the line begins with pasted text, whose quotes are text */
    bool quoted;   /* the question stood between triple quotes */
} editor;

static void suspend(int number);

/* While an answer is written, Ctrl+C must not discard what a slow terminal has yet to show. In a loop the terminal also
 * hides typed text and keeps it for the next line. A Ctrl+D in it arrives as a NUL, which is bound to nothing. */
static void set_answering(bool on, bool loop) {
    const struct sigaction stop = {.sa_handler = on ? suspend : SIG_DFL, .sa_flags = SA_RESTART | SA_NODEFER};
    const struct sigaction interrupt = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    struct termios mode;
    const tcflag_t echo = loop ? ECHO : 0;
    const pid_t front = tcgetpgrp(STDOUT_FILENO);
    if (loop) sigaction(SIGTSTP, &stop, NULL), sigaction(SIGINT, &interrupt, NULL);
    answers_to = loop ? stdout : stderr;
    if ((front >= 0 && front != getpgrp()) || tcgetattr(STDOUT_FILENO, &mode))
        return; /* it would stop a background job */
    mode.c_lflag = on ? (mode.c_lflag & ~echo) | NOFLSH : (mode.c_lflag | echo) & ~(tcflag_t)NOFLSH;
    tcsetattr(STDOUT_FILENO, TCSANOW, &mode);
}

/* Ctrl+Z while a loop writes an answer: the shell gets the terminal as it was. A handler cannot use stdio. */
static void suspend(int number) {
    const int error = errno;
    set_answering(false, true);
    if (waiting && write(STDOUT_FILENO, ERASE_LINE, strlen(ERASE_LINE)) < 0) {}
    if (editor.brackets && write(STDOUT_FILENO, BRACKETS_OFF, strlen(BRACKETS_OFF)) < 0) {}
    raise(number);
    if (editor.brackets && write(STDOUT_FILENO, BRACKETS_ON, strlen(BRACKETS_ON)) < 0) {}
    set_answering(true, true);
    errno = error;
}

/* libedit calls it when it draws the line, also when the program goes on after Ctrl+Z. */
static char *edit_prompt(EditLine *line) {
    editor.brackets = put_escape(stdout, BRACKETS_ON);
    return (char *)(uintptr_t)editor.prompt;
}

static unsigned char edit_cancel(EditLine *line, int key) {
    interrupted = SIGINT;
    el_cursor(line, 1 << 20); /* to the end, however long the line is */
    el_insertstr(line, "^C");
    el_push(line, "\n");
    return CC_REFRESH;
}

/* libedit's own handler gives the shell the terminal's modes. */
static unsigned char edit_suspend(EditLine *line, int key) {
    put_escape(stdout, BRACKETS_OFF);
    fflush(stdout);
    kill(0, SIGTSTP);
    return CC_REDISPLAY;
}

/* The terminal puts pasted text in brackets: it is one text, line breaks included. */
static unsigned char edit_paste(EditLine *line, int key) {
    const char *const end = "\033[201~";
    LocalBytes pasted = {0}, shown = {0};
    size_t passed = 0;
    bool ended = false;
    const LineInfo *now = el_line(line);
    editor.pasted |= now->cursor == now->buffer;
    for (wchar_t c; !ended && el_wgetc(line, &c) == 1; ended = text_stops(&pasted, &passed, &end, 1, false))
        bytes_print(&pasted, "%lc", (wint_t)(c == '\r' ? '\n' : c));
    while (pasted.n && pasted.data[pasted.n - 1] == '\n') pasted.n--;
    bytes_shown(&shown, pasted.data, pasted.n, true);
    if (shown.n) el_insertstr(line, shown.data);
    return CC_REFRESH;
}

/* Completes the only command that begins like the line. */
static unsigned char edit_complete(EditLine *line, int key) {
    const LineInfo *now = el_line(line);
    const size_t n = (size_t)(now->cursor - now->buffer);
    const char *rest = NULL;
    for (int i = 0; i < SLASHES && n && now->cursor == now->lastchar; i++) {
        if (strncmp(slashes[i].name, now->buffer, n)) continue;
        if (rest) return CC_ERROR;
        rest = slashes[i].name + n;
    }
    return rest && !el_insertstr(line, rest) ? CC_REFRESH : CC_ERROR;
}

static void editor_open(void) {
    static const struct {
        const char *key, *name;
        unsigned char (*function)(EditLine *line, int key); /* NULL: libedit's own */
    } keys[] = {{"^C", "cancel", edit_cancel},       {"^Z", "suspend", edit_suspend},
                {"^I", "complete", edit_complete},   {"\033[200~", "paste", edit_paste},
                {"^R", "em-inc-search-prev", NULL},  {"\033[1;5C", "em-next-word", NULL},
                {"\033[1;5D", "ed-prev-word", NULL}, {"\033[5~", "ed-ignore", NULL},
                {"\033[6~", "ed-ignore", NULL},      {"^@", "ed-ignore", NULL}};
    HistEvent event;
    struct stat file;
    const char *home = environment("HOME");
    EditLine *line = editor.line = el_init("infer", stdin, stdout, stderr);
    editor.history = history_init();
    history(editor.history, &event, H_SETSIZE, HISTORY);
    history(editor.history, &event, H_SETUNIQUE, 1);
    el_set(line, EL_PROMPT, edit_prompt);
    el_set(line, EL_EDITOR, "emacs");
    el_set(line, EL_HIST, history, editor.history);
    el_set(line, EL_SIGNAL, 1);                  /* it redraws after a change of the window */
    el_set(line, EL_SETTY, "-d", "-isig", NULL); /* Ctrl+C and Ctrl+Z are keys while a line is edited */
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (keys[i].function) el_set(line, EL_ADDFN, keys[i].name, keys[i].name, keys[i].function);
        el_set(line, EL_BIND, keys[i].key, keys[i].name, NULL);
    }
    const char *chosen = environment("INFER_HISTORY");
    if (!home && !chosen) return;
    char *path = editor.path = chosen ? text_print("%s", chosen) : text_print("%s/.cache/infer/history", home);
    for (char *c = path + (chosen ? 0 : strlen(home)); !chosen && (c = strchr(c + 1, '/')); *c = '/')
        *c = 0, mkdir(path, 0700);
    const int file_written = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file_written < 0) fprintf(stderr, "infer: %s: %m; no history is kept (INFER_HISTORY chooses a file)\n", path);
    if (file_written < 0) return free(path), (void)(editor.path = NULL);
    close(file_written);
    const int texts = history(editor.history, &event, H_LOAD, path); /* it keeps the last HISTORY */
    if (texts < 0 && !stat(path, &file) && file.st_size) {
        fprintf(stderr, "infer: %s is no history that can be read: it stays as it is, and gets no new lines\n", path);
        free(path), editor.path = NULL;
    } else if ((texts < 0 || texts > 10 * HISTORY) && file_exists(path)) { /* no device: libedit changes its mode */
        history(editor.history, &event, H_SAVE, path);
    }
}

/* Adds a text to the history and at once to its file, which other loops share: a line in libedit's format, where \ooo
 * stands for bytes that could break it. */
static void editor_remember(const char *text) {
    HistEvent event;
    history(editor.history, &event, H_ENTER, text);
    FILE *f = editor.path ? fopen(editor.path, "a") : NULL;
    if (!f) return;
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        fprintf(f, *c <= ' ' || *c == '\\' || *c == 127 ? "\\%03o" : "%c", *c);
    fputs("\n", f);
    fclose(f);
}

/* Appends one line, or nothing if Ctrl+C cleared it. False at the end of input. */
static bool editor_line(const char *prompt, Bytes *out) {
    int n;
    editor.prompt = prompt;
    el_set(editor.line, EL_PREP_TERM, 1); /* from here on Ctrl+C is a key, not a signal */
    interrupted = 0;
    editor.pasted = false;
    const char *line = el_gets(editor.line, &n);
    clearerr(stdout); /* a signal may have interrupted libedit's output; other faults come again */
    if (n <= 0) puts(interrupted ? "^C" : ""); /* a signal, or the end of input */
    bytes_add(out, line, n > 0 && !interrupted ? (size_t)n - (line[n - 1] == '\n') : 0);
    return n > 0 || interrupted;
}

/* Reads a question: a line, or several between triple quotes, which are one text of the history. */
static bool editor_text(Bytes *out) {
    static const char quotes[] = "\"\"\"";
    if (!editor_line("You: ", out)) return false;
    editor.quoted = !editor.pasted && !strncmp(out->data, quotes, 3);
    while (editor.quoted && (out->n < 6 || strcmp(out->data + out->n - 3, quotes))) {
        bytes_text(out, "\n");
        if (editor_line("...  ", out) && !interrupted) continue;
        out->n = *out->data = 0;
        return true;
    }
    if (strspn(out->data, " \t\n") < out->n) editor_remember(out->data);
    if (!editor.quoted) return true;
    size_t begin = 3 + (out->data[3] == '\n'), end = out->n - 3; /* the quotes may stand on lines of their own */
    if (end > begin && out->data[end - 1] == '\n') end--;
    LocalText text = copy_text(out->data + begin, end > begin ? end - begin : 0);
    out->n = 0;
    bytes_text(out, text);
    return true;
}

/* ---- settings ---- */

/* Appends the prompt of a question with this effort. */
static bool try_effort(const Chat *chat, const char *effort, Ids *ids) {
    LOCAL(conversation_free) Conversation c = {0};
    Error ignored;
    conversation_init(&c);
    conversation_set(&c.effort, effort);
    conversation_add(&c, "user", NULL, "x", 1);
    return chat_render(chat, &c, true, ids, &ignored);
}

/* Does the prompt change with the effort, from `one` to `two`? */
static bool efforts_differ(const Chat *chat, const char *one, const char *two) {
    LocalIds first = {0};
    LocalIds second = {0};
    return try_effort(chat, one, &first) && try_effort(chat, two, &second) &&
           (first.n != second.n || memcmp(first.data, second.data, first.n * sizeof *first.data));
}

/* A date like 2026-11-30, or none. */
static bool is_date(const char *text) {
    struct tm day = {0};
    const char *end = strlen(text) == strlen("2026-11-30") ? strptime(text, "%Y-%m-%d", &day) : NULL;
    const int number = day.tm_mday;
    timegm(&day); /* makes the 31st of June the 1st of July */
    return !strcmp(text, "none") || (end && !*end && day.tm_mday == number);
}

static bool check_settings(const Session *s, const char *effort, const char *date, Error *e) {
    if (effort && !efforts_differ(&s->chat, "low", "high") && !efforts_differ(&s->chat, "low", "none"))
        return fail(e, USAGE, "%s has no effort to choose: its prompt names none", s->name);
    return !date || is_date(date) || fail(e, USAGE, "--date must be a day like 2026-11-30, or none, not '%.40s'", date);
}

/* ---- slash commands ---- */

static char *last_file; /* the conversation was saved to it or loaded from it */

static bool slash_set(Play *p, const char *name, Error *e) {
    const Sampling *s = &settings.sampling;
    const char *stats = begins(name, "stats") ? name + 5 + strspn(name + 5, " \t") : NULL;
    if (stats && !text_listed("on off", stats)) return fail(e, USAGE, "stats must be on or off, not '%.40s'", stats);
    if (stats) settings.quiet = p->m.quiet = !strcmp(stats, "off"), name = "";
    size_t n = strcspn(name, " \t");
    const Option *option = n ? option_find(settings_options, name, n) : NULL;
    if (n && !option) return fail(e, USAGE, "there is no setting '%.*s'; /set shows all", n < 40 ? (int)n : 40, name);
    if (n && !option_set(option, name + n + strspn(name + n, " \t"), e))
        return fail(e, USAGE, "%s", e->text + strspn(e->text, "-")); /* here it is no option */
    if (n && option->kind == SEED) p->answers = 0;
    LocalText text = text_print(
        "temperature %g, top-k %d, top-p %g, min-p %g, repetition-penalty %g, frequency-penalty %g, "
        "presence-penalty %g, seed %llu, max-tokens %d, stats %s",
        (double)s->temperature, s->top_k, (double)s->top_p, (double)s->min_p, (double)s->penalty, (double)s->frequency,
        (double)s->presence, (unsigned long long)s->seed, settings.max_tokens, settings.quiet ? "off" : "on");
    const int width = columns(stdout); /* lines end behind a comma */
    for (char *line = text, *comma = text + strcspn(text, ","), *next; *comma; comma = next) {
        next = comma + 1 + strcspn(comma + 1, ",");
        if (next - line >= width) comma[1] = '\n', line = comma + 2;
    }
    put_text(stdout, NULL, "", text);
    return true;
}

/* /context and, with `whole`, /prompt. */
static bool slash_prompt(Play *p, bool whole, Error *e) {
    LocalIds ids = {0};
    if (!make_prompt(p, &ids, e)) return false;
    if (whole) print_text(p->m.tokenizer, &ids);
    if (!whole)
        printf("%s of %s tokens (%.1f%%)\n", COUNT(ids.n), COUNT((uint64_t)p->m.engine.context),
               100 * (double)ids.n / p->m.engine.context);
    return true;
}

/* Message i of a request. It keeps harmony's keys where chat completions have none of their own. */
static cJSON *saved_message(const Message *m, int i) {
    const bool own = same(m->role, "assistant"), thought = own && message_part(m) == REASONING;
    const size_t begun = own ? begins(m->recipient, "functions.") : 0;
    const char *function = begun && m->recipient[begun] ? m->recipient + begun : NULL; /* it is called */
    const bool plain = function || thought || (own && same(m->channel, "final") && !m->recipient);
    if (!plain && !m->id) return message_json(m);
    cJSON *json = json_object("role", json_word(m->role), NULL), *text = json_from_text(m->content.data, m->content.n);
    if (!plain) cJSON_AddStringToObject(json, "tool_call_id", m->id); /* a result with an id needs no more */
    if (!function) return json_add(json, thought ? "reasoning_content" : "content", text, NULL);
    LocalText id = text_print("call_%d", i);
    cJSON *called = json_object("name", json_word(function), "arguments", text, NULL);
    cJSON_AddItemToArray(
        cJSON_AddArrayToObject(json, "tool_calls"),
        json_object("id", json_word(m->id ? m->id : id), "type", json_word("function"), "function", called, NULL));
    return json;
}

/* The conversation as a chat-completions request, as conversation_parse() reads it. */
cJSON *conversation_json(const Conversation *c) {
    cJSON *json = c->request ? cJSON_Duplicate(c->request, true) : cJSON_CreateObject();
    json_add(json, "reasoning_effort", json_word(c->effort), "date", json_word(c->date ? c->date : "none"), NULL);
    cJSON *messages = cJSON_AddArrayToObject(json, "messages");
    if (c->instructions)
        cJSON_AddItemToArray(messages,
                             json_object("role", json_word("system"), "content", json_word(c->instructions), NULL));
    for (int i = 0; i < c->messages; i++) cJSON_AddItemToArray(messages, saved_message(c->message + i, i));
    return json;
}

/* Replaces an existing file only if it is this conversation's, and only when the new one is complete. Links stay. */
static bool slash_save(Play *p, const char *path, Error *e) {
    LocalBytes text = {0};
    LocalText there = realpath(path, NULL); /* NULL: nothing is */
    const char *file = there ? there : path;
    LocalText fresh = text_print("%s.%d", file, (int)getpid());
    LocalJson talk = conversation_json(&p->talk);
    json_written(&text, talk);
    const bool taken = there && (!last_file || strcmp(last_file, path));
    FILE *f = taken ? NULL : fopen(fresh, "wxe"); /* x: never over a file that is there */
    bool ok = f && fwrite(text.data, 1, text.n, f) == text.n;
    if (taken) errno = EEXIST;
    if ((f && fclose(f)) || !ok || rename(fresh, file))
        ok = fail(e, FAILED, "%s: %s; choose another name", path, strerror(errno));
    if (f && !ok) remove(fresh);
    if (ok) put_text(stdout, NULL, "Saved to ", path);
    return ok;
}

static bool slash_load(Play *p, const char *path, Error *e) {
    Conversation loaded;
    LocalJson json = json_read(path, MOST_SAVED, e);
    conversation_init(&loaded);
    conversation_set(&loaded.date, p->talk.date); /* unless the file has another */
    bool ok = json && conversation_parse(&loaded, json, e) && (!p->chat || chat_effort(&p->m.chat, loaded.effort, e));
    if (json && !ok) fail(e, USAGE, "%s: %s", path, e->text);
    conversation_free(ok ? &p->talk : &loaded);
    if (ok) p->talk = loaded, put_text(stdout, NULL, "Loaded ", path);
    return ok;
}

/* /save and /load. Without a name they use the last file; ~ is the home folder, as in a shell. */
static bool slash_file(Play *p, const char *name, bool save, Error *e) {
    const char *home = environment("HOME");
    if (!*name && !last_file) return fail(e, USAGE, "a file name is needed");
    if (!*name) name = last_file;
    const bool tilde = *name == '~' && strchr("/", name[1]) && home;
    LocalText path = text_print("%s%s", tilde ? home : "", name + tilde);
    bool ok = (save ? slash_save : slash_load)(p, path, e);
    if (ok) conversation_set(&last_file, path);
    return ok;
}

/* /retry, /undo. */
static bool slash_last(Play *p, bool again, Error *e) {
    int last = p->talk.messages - 1;
    while (last >= 0 && strcmp(p->talk.message[last].role, "user")) last--;
    if (last < 0) return fail(e, USAGE, "there is no question yet");
    Bytes *text = &p->talk.message[last].content;
    if (!again) text->data[utf8_check(text->data, text->n < 60 ? text->n : 60)] = 0; /* whole characters */
    if (!again) put_text(stdout, NULL, "Taken back: ", text->data);
    conversation_cut(&p->talk, last + again);
    if (again) converse(p);
    return true;
}

static void slash_help(void) {
    for (int i = 0; i < SLASHES; i++) {
        LocalText name = text_print("%s%s", slashes[i].name, slashes[i].argument);
        print_row(stdout, name, 20, slashes[i].help);
    }
    print_row(stdout, "\"\"\"", 20, "begins and ends a text of several lines; pasted lines are one text anyway");
    print_row(stdout, "Ctrl+C", 20, "stops an answer and keeps its beginning; at the prompt it clears the line");
}

static bool slash_effort(Play *p, const char *level, Error *e) {
    if (!check_settings(&p->m, level, NULL, e)) return false;
    if (*level && !chat_effort(&p->m.chat, level, e)) return false;
    if (*level) conversation_set(&p->talk.effort, level);
    return printf("Effort: %s\n", p->talk.effort);
}

static void slash_system(Play *p, const char *text) {
    if (*text) conversation_set(&p->talk.instructions, strcmp(text, "none") ? text : NULL);
    put_text(stdout, NULL, "Instructions: ", p->talk.instructions ? p->talk.instructions : "(none)");
}

/* Runs a line that begins with '/'. */
static bool run_slash(Play *p, char *line, Error *e) {
    int i = 0;
    for (size_t end = strlen(line); strchr(" \t\n", line[end - 1]); end--) line[end - 1] = 0;
    const char *name = strsep(&line, " \t\n"), *argument = line ? line + strspn(line, " \t\n") : "";
    if (!strcmp(name, "/?")) name = "/help";
    if (text_listed("/bye /quit", name)) name = "/exit";
    while (i < SLASHES && strcmp(slashes[i].name, name)) i++;
    if (i == SLASHES)
        return fail(e, USAGE, "there is no command %s; /help lists them; a line that begins with a space is text",
                    name);
    if (*argument && !*slashes[i].argument) return fail(e, USAGE, "%s takes no argument", name);
    if (text_listed("/system /effort", name) && !p->chat)
        return fail(e, USAGE, "%s needs a chat format, but this text is continued raw", name);
    if (!strcmp(name, "/retry")) return slash_last(p, true, e);
    if (!strcmp(name, "/undo")) return slash_last(p, false, e);
    if (!strcmp(name, "/effort")) return slash_effort(p, argument, e);
    if (!strcmp(name, "/set")) return slash_set(p, argument, e);
    if (!strcmp(name, "/context")) return slash_prompt(p, false, e);
    if (!strcmp(name, "/prompt")) return slash_prompt(p, true, e);
    if (!strcmp(name, "/save") || !strcmp(name, "/load")) return slash_file(p, argument, name[1] == 's', e);
    if (!strcmp(name, "/system")) slash_system(p, argument);
    if (!strcmp(name, "/clear")) conversation_cut(&p->talk, 0);
    if (!strcmp(name, "/help")) slash_help();
    if (!strcmp(name, "/exit")) p->loop = false;
    return true;
}

static const char *cure(bool limit) { return limit ? ": /set max-tokens raises it" : "; /retry tries again"; }

static void full(Play *p, bool answered, Error *e) {
    const size_t context = (size_t)p->m.engine.context;
    LocalIds with = {0};
    LocalIds rest = {0};
    if (answered) {
        fail(e, NO_ROOM,
             "the context of %s tokens is full: /undo takes the last question back, /clear begins anew, infer play "
             "--ctx chooses a larger one",
             COUNT(context));
        return;
    }
    make_prompt(p, &with, e);
    Bytes *question = &p->talk.message[p->talk.messages - 1].content;
    question->n = *question->data = 0; /* empty, not gone: templates show the thoughts behind the last question */
    make_prompt(p, &rest, e);
    conversation_cut(&p->talk, p->talk.messages - 1);
    fail(e, NO_ROOM,
         "not asked: the question has %s tokens, and %s fit behind the conversation's %s: shorten it, /clear begins "
         "anew, infer play --ctx chooses a larger context",
         COUNT(with.n - rest.n), COUNT(context > rest.n ? context - 1 - rest.n : 0), COUNT(rest.n));
}

static void leave(void) { put_escape(stdout, BRACKETS_OFF); }

static int play_loop(Play *p) {
    LocalBytes line = {0};
    editor_open();
    print_row(stdout, "", 0, "/help lists the commands.");
    for (; p->loop && editor_text(&line); line.n = 0) {
        Error e;
        bool ok = true;
        size_t space = strspn(line.data, " \t\n"), skip = p->chat ? space : 0;
        if (*line.data == '/' && !editor.quoted) {
            ok = run_slash(p, line.data, &e);
        } else if (!editor.quoted && text_listed("exit quit bye help", line.data)) {
            ok = fail(&e, USAGE, "the command is /%s; a line that begins with a space is text", line.data);
        } else if (space < line.n && (ok = check_text("the text", line.data, line.n, &e))) {
            conversation_add(&p->talk, "user", NULL, line.data + skip, line.n - skip);
            converse(p);
        }
        if (!ok) put_text(stderr, RED, "", e.text);
    }
    puts("Goodbye!");
    leave(); /* not before: a paste may come while an answer is written */
    el_end(editor.line);
    return DONE;
}

const Terminal libedit_terminal = {play_loop, set_answering, leave, wrap, full,     cure,    check_settings,
                                   row,       ask,           fit,   bar,  progress, loading, reading};
