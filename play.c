/* play.c: `infer play`: one answer to a prompt, or a conversation in the terminal. What is shown and typed is here;
 * what a conversation means is in chat.c, how it is computed in engine.c.
 *
 * In a conversation everything goes to stdout, which is a terminal. With a prompt given only the answer goes to stdout.
 */
#include "editor.h"
#include "host.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_PROMPT = 64 << 20 };

static const char loop_help[] = "/retry             answer the last question again\n"
                                "/undo              take it back, and its answer\n"
                                "/clear             forget the conversation\n"
                                "/system [TEXT]     show or change the instructions (none: take them away)\n"
                                "/effort [LEVEL]    show or change how long it thinks: low, medium or high\n"
                                "/set [NAME VALUE]  show or change a setting, temperature for one\n"
                                "/stats             figures of the last answer\n"
                                "/context           how full the context is\n"
                                "/prompt            what the model reads, exactly\n"
                                "/save [FILE]       keep the conversation\n"
                                "/load FILE         go on with a kept one\n"
                                "/help              this list\n"
                                "/exit              leave, as Ctrl+D does\n"
                                "\"\"\" begins and ends a text of several lines.\n"
                                "Ctrl+C stops an answer and keeps what is there; at the prompt it clears the line.\n";

typedef struct {
    size_t prompt, reused, tokens, thinking;
    double first, total; /* seconds until the first token, until the last */
    const char *reason;
} Stats;

typedef struct {
    Options o;
    Session m;
    bool harmony;
    Sequence sequence;
    Conversation talk; /* with a chat format */
    Ids text;          /* without: all there is so far */
    Ids turns;         /* without: where each question begins, where its answer begins */
    uint64_t answers;  /* each draws with the seed plus its ordinal */
    Stats stats;
    char *saved; /* the file that the conversation was saved to or loaded from */
    bool colour, loop;
    Editor *editor;   /* of the loop */
    double bandwidth; /* bytes a second of a flat read of the memory that holds the model; 0: unknown */
} Play;

static volatile sig_atomic_t interrupted; /* Ctrl+C since the answer was asked for */
static void on_interrupt(int number) { interrupted = number; }

/* From here on Ctrl+C only ends answers. */
static void catch_interrupts(void) {
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt, .sa_flags = SA_RESTART}, NULL);
}

static void show_settings(const Options *o) {
    printf("temperature %g, top-k %d, top-p %g, min-p %g, repetition-penalty %g, seed %llu, max-tokens %d\n",
           (double)o->sampling.temperature, o->sampling.top_k, (double)o->sampling.top_p, (double)o->sampling.min_p,
           (double)o->sampling.penalty, (unsigned long long)o->sampling.seed, o->max_tokens);
}

/* ---- the terminal ---- */

static bool is_terminal(FILE *f) { return isatty(fileno(f)); }

static int columns(void) {
    struct winsize size;
    return !ioctl(STDERR_FILENO, TIOCGWINSZ, &size) && size.ws_col ? size.ws_col : 80;
}

/* Text from a model or a file: as it is, but on a terminal without what could be an escape sequence. */
static void put_text(FILE *f, const char *text, size_t n) {
    Bytes shown = {0};
    bool terminal = is_terminal(f);
    if (terminal) bytes_shown(&shown, text, n, true);
    fwrite(terminal ? shown.data : text, 1, terminal ? shown.n : n, f);
    bytes_free(&shown);
}

/* The same as a line behind a label. */
static void put_line(const char *label, const char *text, size_t n) {
    fputs(label, stdout);
    put_text(stdout, text, n);
    putchar('\n');
}

/* ---- one answer ---- */

/* Holds text back while it may be the beginning of a stop text. */
typedef struct {
    const Options *o;
    Bytes held;
    bool hit;
} Stopper;

/* Passes on what is safe of `text`, up to a stop text; all of it at the end of the answer. */
static void stopper_push(Stopper *s, const char *text, size_t n, bool last, Bytes *out) {
    bytes_add(&s->held, text, n);
    size_t keep = s->held.n, pass = s->held.n;
    for (int i = 0; i < s->o->stop.n; i++) {
        const char *stop = s->o->stop.text[i], *hit = memmem(s->held.data, s->held.n, stop, strlen(stop));
        if (hit && (size_t)(hit - s->held.data) <= pass) pass = (size_t)(hit - s->held.data), s->hit = true;
        for (size_t k = strlen(stop) - 1; k && !last; k--) /* the longest end of `held` that a stop text begins with */
            if (k <= s->held.n && !memcmp(s->held.data + s->held.n - k, stop, k)) {
                if (s->held.n - k < keep) keep = s->held.n - k;
                break;
            }
    }
    if (!s->hit && keep < pass) pass = keep;
    bytes_add(out, s->held.data, pass);
    memmove(s->held.data, s->held.data + pass, s->held.n - pass + 1);
    s->held.n -= pass;
}

typedef struct { /* how an answer is shown while it is written */
    Play *s;
    const Reader *reader;   /* with a chat format */
    bool any;               /* something was shown */
    Part part;              /* what was shown last */
    char last;              /* the last byte */
    Bytes answer, thinking; /* for --json */
} Screen;

static void end_line(Screen *screen) {
    if (screen->any && screen->last != '\n') fputs("\n", screen->s->loop || screen->part == ANSWER ? stdout : stderr);
    screen->last = '\n';
    fflush(stdout);
}

static void put_label(FILE *f, const Screen *screen, Part part) {
    static const char *const label[] = {"thinking: ", "Assistant: ", "Assistant: ", "tool call: "};
    const char *to = screen->reader ? screen->reader->now.recipient : NULL;
    fputs(label[part], f);
    if (part != CALL || !to) return;
    put_text(f, to, strlen(to));
    fputs(" ", f);
}

static void show(Screen *screen, Part part, const char *text, size_t n) {
    const Play *s = screen->s;
    bool aside = part == REASONING || part == CALL;
    if (s->o.json) {
        if (part == REASONING || part == ANSWER)
            bytes_add(part == ANSWER ? &screen->answer : &screen->thinking, text, n);
        return;
    }
    FILE *f = s->loop || part == ANSWER ? stdout : stderr;
    if (!n || (part == REASONING && (s->o.hide_thinking || !is_terminal(f)))) return;
    bool begins = !screen->any || part != screen->part;
    if (begins) end_line(screen);
    if (aside && s->colour) fputs("\033[2m", f);
    if (begins && (s->loop || part != ANSWER)) put_label(f, screen, part);
    put_text(f, text, n);
    if (aside && s->colour) fputs("\033[0m", f);
    fflush(f);
    screen->any = true;
    screen->part = part;
    screen->last = text[n - 1];
}

static bool is_stop(const Play *s, int token) {
    for (size_t i = 0; i < s->m.checkpoint.stop.n; i++)
        if (s->m.checkpoint.stop.data[i] == token) return true;
    return false;
}

/* Handles one sampled token: shows what it completes, and says why the answer ends here, or NULL. */
static const char *take_token(Play *s, int token, Reader *reader, Decoder *decoder, Stopper *stopper, Screen *screen) {
    Bytes text = {0}, out = {0};
    Read read = {.part = ANSWER};
    const char *reason = NULL;
    if (token == DREW_NOTHING) {
        reason = "context full";
    } else if (s->harmony) {
        read = reader_push(reader, token, &text);
        s->stats.thinking += read.part == REASONING;
        if (read.stop) reason = read.closed && read.part == CALL ? "tool call" : "end";
    } else if (is_stop(s, token)) {
        reason = "end";
    } else {
        tokenizer_decode(s->m.tokenizer, decoder, token, &text);
        ids_add(&s->text, token);
    }
    s->stats.tokens += token != DREW_NOTHING;
    if (read.part == ANSWER) {
        stopper_push(stopper, text.data, text.n, read.closed, &out);
        show(screen, ANSWER, out.data, out.n);
        if (stopper->hit) reason = "stop text";
    } else {
        show(screen, read.part, text.data, text.n);
    }
    if (!reason && interrupted) reason = "interrupted";
    if (!reason && s->o.max_tokens && s->stats.tokens >= (size_t)s->o.max_tokens) reason = "token limit";
    bytes_free(&text);
    bytes_free(&out);
    return reason;
}

/* Writes an answer to the prompt `ids`, shows it and fills s->stats. What a reader has read stays in it. */
static bool generate(Play *s, const Ids *ids, Reader *reader, Screen *screen, Error *e) {
    Sampling how = s->o.sampling;
    Stopper stopper = {.o = &s->o};
    Decoder decoder = {.begun = s->text.n > 1}; /* not only a beginning-of-text token */
    Generation w;
    int token;
    how.seed += s->answers++;
    s->stats = (Stats){.prompt = ids->n};
    double since = seconds();
    bool ok = generation_begin(&w, &s->m.engine, &s->sequence, ids->data, ids->n, &how, &interrupted, e);
    s->stats.reused = w.reused;
    while (ok && !s->stats.reason) {
        if (!(ok = generation_next(&w, &token, e))) break;
        s->stats.total = seconds() - since;
        if (!s->stats.tokens) s->stats.first = s->stats.total;
        s->stats.reason = take_token(s, token, reader, &decoder, &stopper, screen);
    }
    generation_end(&w);
    Bytes text = {0}, out = {0};
    Part part = ANSWER;
    if (ok && s->harmony) part = reader_end(reader, &text).part;
    tokenizer_flush(&decoder, &text);
    if (part == ANSWER && !stopper.hit) stopper_push(&stopper, text.data, text.n, true, &out);
    if (ok) show(screen, part, part == ANSWER ? out.data : text.data, part == ANSWER ? out.n : text.n);
    bytes_free(&text);
    bytes_free(&out);
    bytes_free(&stopper.held);
    return ok;
}

static double speed(const Stats *t) {
    double time = t->tokens > 1 ? t->total - t->first : t->total;
    return time > 0 ? (double)(t->tokens > 1 ? t->tokens - 1 : t->tokens) / time : 0;
}

/* How much of the memory's speed that was: all other time is lost. 0: unknown. */
static double percent_of_bandwidth(const Play *s) {
    const Stats *t = &s->stats;
    uint64_t bytes = step_bytes(s->m.engine.model, s->m.engine.model->top_k, 1, (int)(t->prompt + t->tokens / 2));
    return s->bandwidth > 0 ? 100 * speed(t) * (double)bytes / s->bandwidth : 0;
}

static void print_stats(FILE *f, const Play *s) {
    const Stats *t = &s->stats;
    double percent = percent_of_bandwidth(s);
    fprintf(f, "[Generated at %.1f tokens/sec · %zu token%s", speed(t), t->tokens, t->tokens == 1 ? "" : "s");
    if (t->thinking) fprintf(f, " (%zu thinking)", t->thinking);
    fprintf(f, " · first token %.0f ms", t->first * 1000);
    if (percent > 0) fprintf(f, " · %.0f%% of memory bandwidth", percent);
    fprintf(f, " · context %zu%% · %s]\n", s->sequence.tokens.n * 100 / (size_t)s->m.engine.context, t->reason);
}

/* Keeps what was said, also where it ended early. Nothing was if it ended in the reasoning or inside a call: then it
 * says so. A preamble that nothing followed was meant as the answer. */
static void keep_answer(Play *s, Reader *reader, Screen *screen) {
    Message *last = reader->messages ? reader->message + reader->messages - 1 : NULL;
    Part part = last ? message_part(last) : REASONING;
    if (part == ANSWER || part == PREAMBLE || (part == CALL && !strcmp(s->stats.reason, "tool call"))) {
        if (!strcmp(s->stats.reason, "stop text")) { /* the history holds what was shown */
            for (int i = 0; i < s->o.stop.n; i++) {
                char *hit = memmem(last->content.data, last->content.n, s->o.stop.text[i], strlen(s->o.stop.text[i]));
                if (hit) last->content.n = (size_t)(hit - last->content.data), *hit = 0;
            }
            ids_free(&last->sampled);
        }
        if (part == PREAMBLE && !s->loop) show(screen, ANSWER, last->content.data, last->content.n);
        reader_take(reader, &s->talk);
        return;
    }
    const char *cure = s->loop ? "; /retry tries again" : "", *at = part == CALL ? "calling a tool" : "thinking";
    end_line(screen);
    if (!strcmp(s->stats.reason, "token limit"))
        fprintf(stderr,
                "infer: no answer: the limit of %d tokens was reached while %s; raise it with %s or lower the effort\n",
                s->o.max_tokens, at, s->loop ? "/set max-tokens" : "--max-tokens");
    else
        fprintf(stderr, "infer: no answer: ended while %s (%s)%s\n", at, s->stats.reason, cure);
}

/* Answers what stands at the end of the conversation. True if an answer, perhaps a part of one, is there. */
static bool answer(Play *s, Screen *screen, Error *e) {
    Ids ids = {0};
    Reader reader;
    int before = s->talk.messages;
    size_t length = s->text.n;
    if (!s->harmony) {
        bool ok = generate(s, &s->text, NULL, screen, e);
        return ok || (s->text.n = length, false);
    }
    reader_init(&reader, &s->m.chat, s->talk.effort);
    screen->reader = &reader;
    bool ok = chat_render(&s->m.chat, &s->talk, true, &ids, e) && generate(s, &ids, &reader, screen, e);
    if (ok) keep_answer(s, &reader, screen);
    screen->reader = NULL;
    reader_free(&reader);
    ids_free(&ids);
    if (ok && s->talk.messages == before)
        return e->code = !strcmp(s->stats.reason, "interrupted") ? INTERRUPTED : FAILED, e->text[0] = 0, false;
    return ok;
}

/* Appends a question. */
static bool ask(Play *s, const char *text, size_t n, Error *e) {
    if (!check_text("the text", text, n, e)) return false;
    if (s->harmony) {
        conversation_add(&s->talk, "user", NULL, text, n);
        return true;
    }
    int begin = (int)s->text.n;
    if (!tokenizer_encode(s->m.tokenizer, text, n, s->text.n ? 0 : WITH_TEMPLATE, &s->text, e)) return false;
    ids_add(&s->turns, begin);
    ids_add(&s->turns, (int)s->text.n);
    return true;
}

/* ---- one prompt ---- */

static void print_json(const Play *s, const Screen *screen, const char *model) {
    const Stats *t = &s->stats;
    const struct {
        const char *key, *value;
        size_t n;
    } texts[] = {{"model", model, strlen(model)},
                 {"text", screen->answer.data, screen->answer.n},
                 {"thinking", screen->thinking.data, screen->thinking.n},
                 {"reason", t->reason, strlen(t->reason)}};
    Bytes out = {0};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        bytes_print(&out, "%s\"%s\":", i ? "," : "{", texts[i].key);
        json_quote(&out, texts[i].value, texts[i].n);
    }
    bytes_text(&out, ",\"tool_calls\":[");
    for (int i = 0; i < s->talk.messages; i++) {
        if (strcmp(s->talk.message[i].role, "assistant") || message_part(s->talk.message + i) != CALL) continue;
        if (out.data[out.n - 1] != '[') bytes_text(&out, ",");
        message_json(s->talk.message + i, &out);
    }
    bytes_print(&out,
                "],\"prompt_tokens\":%zu,\"tokens\":%zu,\"thinking_tokens\":%zu,\"first_token_ms\":%.3f,\"tokens_per_"
                "second\":%.3f,\"seed\":%llu}",
                t->prompt, t->tokens, t->thinking, t->first * 1000, speed(t), (unsigned long long)s->o.sampling.seed);
    puts(out.data);
    bytes_free(&out);
}

static int play_once(Play *s, const char *text, size_t n, const char *model) {
    Error e = {0};
    Screen screen = {.s = s};
    catch_interrupts();
    bool blank = s->harmony && strspn(text, " \t\r\n") == n;
    bool ok = (!blank || fail(&e, USAGE, "the prompt is empty")) && ask(s, text, n, &e) && answer(s, &screen, &e);
    if (s->stats.reason && s->o.json) {
        print_json(s, &screen, model);
    } else if (s->stats.reason) {
        end_line(&screen);
        print_stats(stderr, s);
    }
    if (!ok && e.text[0]) fprintf(stderr, "infer: %s\n", e.text);
    bytes_free(&screen.answer);
    bytes_free(&screen.thinking);
    return !ok ? e.code : !strcmp(s->stats.reason, "interrupted") ? INTERRUPTED : DONE;
}

/* ---- the conversation ---- */

static void error_line(const Play *s, const Error *e) {
    if (e->text[0]) fprintf(stderr, s->colour ? "\033[31m%s\033[0m\n" : "%s\n", e->text);
}

static int last_question(const Play *s) {
    int i = s->talk.messages - 1;
    while (i >= 0 && strcmp(s->talk.message[i].role, "user")) i--;
    return i;
}

/* Forgets the oldest question and its answer; of a text without turns its first half. False if little would be left. */
static bool drop_oldest(Play *s) {
    int second = 0;
    if (!s->harmony) {
        size_t half = s->text.n / 2;
        memmove(s->text.data, s->text.data + half, (s->text.n - half) * sizeof *s->text.data);
        s->text.n -= half;
        s->turns.n = 0;
        return half > 0;
    }
    for (int i = 1; i < s->talk.messages && !second; i++)
        if (!strcmp(s->talk.message[i].role, "user")) second = i;
    if (second) conversation_remove(&s->talk, 0, second);
    return second;
}

static void forget(Play *s) {
    conversation_remove(&s->talk, 0, s->talk.messages);
    s->text.n = s->turns.n = 0;
}

/* The context is full: nothing is thrown away unless the user says so. True if there is room now. */
static bool make_room(Play *s) {
    Bytes line = {0};
    char count[32];
    bool room = false, again = true;
    printf("%s*** The context of %s tokens is full. ***%s\n", s->colour ? "\033[1;31m" : "",
           count_text((uint64_t)s->m.engine.context, count), s->colour ? "\033[0m" : "");
    while (again) {
        line.n = 0;
        puts("d: drop the oldest part\nc: clear all but the last question\nk: keep everything as it is");
        if (!editor_line(s->editor, "d, c or k: ", &line)) break;
        again = false;
        if (!strcmp(line.data, "d")) {
            room = drop_oldest(s);
        } else if (!strcmp(line.data, "c")) {
            int last = s->harmony ? last_question(s) : 0;
            room = s->harmony ? last > 0 : true;
            if (s->harmony && room) conversation_remove(&s->talk, 0, last);
            if (!s->harmony) forget(s);
        } else if (strcmp(line.data, "k")) {
            again = true;
            continue;
        }
        if (!room && *line.data != 'k') puts("There is only one question; /undo takes it back.");
    }
    bytes_free(&line);
    return room;
}

/* Answers, and asks what to do when there is no room. */
static void converse(Play *s) {
    for (bool again = true; again;) {
        Error e = {0};
        Screen screen = {.s = s};
        again = false;
        interrupted = 0;
        editor_echo(false);
        bool ok = answer(s, &screen, &e);
        editor_echo(true);
        end_line(&screen);
        if (s->stats.reason) print_stats(stdout, s);
        if (!ok) error_line(s, &e);
        if (!ok && e.code == GPU_FAULT) die(&e);
        if (!ok && e.code == NO_ROOM) again = make_room(s) && (s->harmony || s->text.n);
        if (s->stats.reason && !strcmp(s->stats.reason, "context full") && make_room(s) && s->harmony)
            puts("There is room now: /retry answers the last question again.");
    }
}

static void slash_help(Play *s, char *argument) {
    (void)s, (void)argument;
    fputs(loop_help, stdout);
}

static void slash_clear(Play *s, char *argument) {
    (void)argument;
    forget(s);
    puts("The conversation is forgotten; the instructions and settings stay.");
}

static void slash_system(Play *s, char *argument) {
    if (*argument) conversation_set(&s->talk.instructions, strcmp(argument, "none") ? argument : NULL);
    const char *text = s->talk.instructions ? s->talk.instructions : "(none)";
    put_line("Instructions: ", text, strlen(text));
}

static void slash_effort(Play *s, char *argument) {
    Error e;
    if (*argument && !chat_effort(&s->m.chat, argument, &e)) {
        error_line(s, &e);
        return;
    }
    if (*argument) conversation_set(&s->talk.effort, argument);
    printf("Effort: %s\n", s->talk.effort);
}

static void slash_set(Play *s, char *argument) {
    Error e;
    char *value = argument + strcspn(argument, " \t");
    if (*value) *value++ = 0;
    value += strspn(value, " \t");
    if (*argument && !setting_set(&s->o, argument, value, &e)) error_line(s, &e);
    show_settings(&s->o);
}

static void slash_stats(Play *s, char *argument) {
    (void)argument;
    const Stats *t = &s->stats;
    if (!t->reason) {
        puts("No answer yet.");
        return;
    }
    printf("prompt      %zu tokens, %zu of them from the cache\n", t->prompt, t->reused);
    printf("first token %.1f ms\n", t->first * 1000);
    printf("answer      %zu tokens (%zu thinking) in %.2f s, %.1f tokens/sec\n", t->tokens, t->thinking, t->total,
           speed(t));
    printf("ended       %s\n", t->reason);
    printf("seed        %llu\n", (unsigned long long)(s->o.sampling.seed + s->answers - 1));
}

/* All that the next prompt would hold. */
static bool whole_prompt(const Play *s, Ids *ids) {
    Error e;
    if (!s->harmony) return ids_append(ids, s->text.data, s->text.n), true;
    if (chat_render(&s->m.chat, &s->talk, true, ids, &e)) return true;
    error_line(s, &e);
    return false;
}

static void slash_context(Play *s, char *argument) {
    (void)argument;
    Ids ids = {0};
    char used[32], all[32];
    size_t context = (size_t)s->m.engine.context;
    if (!whole_prompt(s, &ids)) return;
    int width = columns() - 44 < 40 ? columns() - 44 : 40;
    for (int i = 0; i < width; i++) fputs((size_t)i * context < ids.n * (size_t)width ? "█" : "░", stdout);
    printf("%s%s of %s tokens (%.1f%%)\n", width > 0 ? " " : "", count_text(ids.n, used), count_text(context, all),
           100.0 * (double)ids.n / (double)context);
    ids_free(&ids);
}

static void slash_retry(Play *s, char *argument) {
    (void)argument;
    int last = last_question(s);
    if (s->harmony ? last < 0 : s->turns.n < 2) {
        puts("There is nothing to answer again.");
        return;
    }
    if (s->harmony)
        conversation_remove(&s->talk, last + 1, s->talk.messages - last - 1);
    else
        s->text.n = (size_t)s->turns.data[s->turns.n - 1];
    converse(s);
}

static void slash_undo(Play *s, char *argument) {
    (void)argument;
    int last = last_question(s);
    if (s->harmony ? last < 0 : s->turns.n < 2) {
        puts("There is nothing to take back.");
        return;
    }
    if (s->harmony) {
        const Bytes *text = &s->talk.message[last].content;
        size_t n = text->n < 60 ? text->n : 60;
        while (n < text->n && (text->data[n] & 0xC0) == 0x80) n--; /* whole characters */
        put_line("Taken back: ", text->data, n);
        conversation_remove(&s->talk, last, s->talk.messages - last);
    } else {
        s->text.n = (size_t)s->turns.data[s->turns.n -= 2];
        puts("Taken back.");
    }
}

static void plain_text(const Play *s, Bytes *out) {
    Decoder d = {0};
    bytes_text(out, "");
    for (size_t i = 0; i < s->text.n; i++)
        if (!tokenizer_is_control(s->m.tokenizer, s->text.data[i]))
            tokenizer_decode(s->m.tokenizer, &d, s->text.data[i], out);
    tokenizer_flush(&d, out);
}

/* "~/x" as a shell would read it. */
static char *expand_home(const char *path) {
    const char *home = getenv("HOME");
    Bytes out = {0};
    if (*path == '~' && path[1] == '/' && home)
        bytes_print(&out, "%s%s", home, path + 1);
    else
        bytes_text(&out, path);
    return out.data;
}

/* Writes a new file beside, of nobody else's, and renames it, so that a full disk costs nothing. */
static bool write_file(const char *path, const Bytes *content, Error *e) {
    Bytes beside = {0};
    bytes_print(&beside, "%s.new", path);
    FILE *f = fopen(beside.data, "wx");
    bool ok = f && fwrite(content->data, 1, content->n, f) == content->n;
    if (f && fclose(f)) ok = false;
    ok = ok && !rename(beside.data, path);
    if (!ok) fail(e, FAILED, "%s: %s", beside.data, strerror(errno));
    if (!ok && f) unlink(beside.data);
    bytes_free(&beside);
    return ok;
}

static void slash_save(Play *s, char *argument) {
    Error e = {0};
    Bytes text = {0};
    char *path = *argument ? expand_home(argument) : s->saved ? copy_text(s->saved, strlen(s->saved)) : NULL;
    bool ok = path || fail(&e, USAGE, "/save needs a file name");
    if (ok && !access(path, F_OK) && !(s->saved && !strcmp(s->saved, path)))
        ok = fail(&e, USAGE, "%s exists and is not this conversation; choose another name", path);
    if (ok && s->harmony) conversation_json(&s->talk, &text);
    if (ok && !s->harmony) plain_text(s, &text);
    if (ok && (ok = write_file(path, &text, &e))) {
        conversation_set(&s->saved, path);
        printf("Saved to %s\n", path);
    }
    if (!ok) error_line(s, &e);
    bytes_free(&text);
    free(path);
}

static bool load_conversation(Play *s, const char *path, const Bytes *text, Error *e) {
    Conversation loaded;
    cJSON *json = json_parse(text->data, text->n, path, e);
    if (!json) return false;
    conversation_init(&loaded);
    conversation_set(&loaded.date, s->talk.date); /* unless the file has another */
    bool ok = conversation_parse(&loaded, json, e);
    cJSON_Delete(json);
    if (ok) {
        Conversation old = s->talk;
        s->talk = loaded;
        loaded = old;
    }
    conversation_free(&loaded);
    return ok;
}

static void slash_load(Play *s, char *argument) {
    Error e = {0};
    Bytes text = {0};
    char *path = expand_home(argument);
    bool ok = *path || fail(&e, USAGE, "/load needs a file name");
    ok = ok && file_read(path, MOST_PROMPT, &text, &e);
    if (ok && s->harmony) {
        ok = load_conversation(s, path, &text, &e);
    } else if (ok) {
        Ids ids = {0};
        ok = tokenizer_encode(s->m.tokenizer, text.data, text.n, WITH_TEMPLATE, &ids, &e);
        if (ok) forget(s), ids_append(&s->text, ids.data, ids.n);
        ids_free(&ids);
    }
    if (ok) {
        conversation_set(&s->saved, path);
        if (s->harmony)
            printf("Loaded %s: %d messages\n", path, s->talk.messages);
        else
            printf("Loaded %s: %zu tokens\n", path, s->text.n);
    } else {
        error_line(s, &e);
    }
    bytes_free(&text);
    free(path);
}

static void slash_prompt(Play *s, char *argument) {
    (void)argument;
    Ids ids = {0};
    Bytes text = {0};
    Decoder d = {0};
    if (!whole_prompt(s, &ids)) return;
    bytes_text(&text, "");
    for (size_t i = 0; i < ids.n; i++) tokenizer_bytes(s->m.tokenizer, &d, ids.data[i], &text);
    put_line("", text.data, text.n);
    ids_free(&ids);
    bytes_free(&text);
}

static const struct {
    const char *name;
    void (*run)(Play *, char *argument);
    bool chat_only;
} slashes[] = {{"/help", slash_help, false},       {"/clear", slash_clear, false}, {"/system", slash_system, true},
               {"/effort", slash_effort, true},    {"/set", slash_set, false},     {"/stats", slash_stats, false},
               {"/context", slash_context, false}, {"/retry", slash_retry, false}, {"/undo", slash_undo, false},
               {"/save", slash_save, false},       {"/load", slash_load, false},   {"/prompt", slash_prompt, false}};

/* Runs a line that begins with '/'. */
static void run_slash(Play *s, char *line) {
    Error e;
    size_t n = strcspn(line, " \t");
    char *argument = line + n + strspn(line + n, " \t");
    for (size_t end = strlen(argument); end && strchr(" \t", argument[end - 1]);) argument[--end] = 0;
    for (size_t i = 0; i < sizeof slashes / sizeof *slashes; i++) {
        if (strlen(slashes[i].name) != n || strncmp(slashes[i].name, line, n)) continue;
        if (slashes[i].chat_only && !s->harmony) {
            fail(&e, USAGE, "%s needs a chat format, and this text is continued raw", slashes[i].name);
            error_line(s, &e);
        } else {
            slashes[i].run(s, argument);
        }
        return;
    }
    if (n == 5 && !strncmp(line, "/exit", 5))
        fail(&e, USAGE, "/exit stands alone");
    else
        fail(&e, USAGE, "there is no command %.*s; /help lists them, and a space before it sends it as text", (int)n,
             line);
    error_line(s, &e);
}

static void play_loop(Play *s) {
    s->editor = editor_open();
    catch_interrupts();
    puts("✓ Ready for inference. /help lists the commands.");
    for (bool go_on = true; go_on;) {
        Bytes line = {0};
        Error e;
        go_on = editor_text(s->editor, &line);
        size_t space = go_on ? strspn(line.data, " \t\n") : 0;
        if (!go_on || (!strncmp(line.data, "/exit", 5) && !line.data[5 + strspn(line.data + 5, " \t")])) {
            puts("Goodbye!");
            go_on = false;
        } else if (*line.data == '/') {
            run_slash(s, line.data);
        } else if (space < line.n) {
            if (ask(s, line.data + (s->harmony ? space : 0), line.n - (s->harmony ? space : 0), &e))
                converse(s);
            else
                error_line(s, &e);
        }
        bytes_free(&line);
    }
    editor_close(s->editor);
}

/* ---- the command ---- */

static bool take_options(Play *s, const Options *o, Error *e) {
    s->o = *o;
    if (o->system) conversation_set(&s->talk.instructions, o->system);
    if (o->effort) conversation_set(&s->talk.effort, o->effort);
    if (o->date) conversation_set(&s->talk.date, strcmp(o->date, "none") ? o->date : NULL);
    if (o->prompt && o->file) return fail(e, USAGE, "-p and -f exclude each other");
    return true;
}

/* The prompt that was given: true if there is one. */
static bool read_prompt(const Options *o, Bytes *text, Error *e) {
    if (o->prompt) return bytes_text(text, o->prompt), true;
    if (o->file) {
        if (file_read(o->file, MOST_PROMPT, text, e)) return true;
        e->code = USAGE;
        die(e);
    }
    if (isatty(STDIN_FILENO)) return false;
    return stdin_read(text), true;
}

static bool open_model(Play *s, Error *e) {
    if (!session_open(&s->m, &s->o, NEED_TOKENIZER | NEED_CHECKPOINT, e)) return false;
    s->harmony = s->m.has_chat && !s->o.raw;
    if (!s->harmony && (s->talk.instructions || strcmp(s->talk.effort, "medium")))
        return fail(e, USAGE, "%s is continued raw: it takes no system prompt and no effort", s->m.name);
    if (s->harmony && !chat_effort(&s->m.chat, s->talk.effort, e)) return false;
    if (!session_load(&s->m, &s->o, s->o.context, e)) return false;
    const Model *m = &s->m.checkpoint.model;
    uint64_t bytes = step_bytes(m, m->top_k, 1, 0);
    double flat = backend->flat_read(s->m.engine.state, bytes);
    s->bandwidth = flat > 0 ? (double)bytes / flat : 0;
    if (is_terminal(stderr) && !s->o.json && !s->harmony && !s->o.raw)
        fprintf(stderr, "  %s: your text is continued as it stands.\n", s->m.no_chat.text);
    return true;
}

int play(const Options *o) {
    Error e = {0};
    Bytes prompt = {0};
    Play s = {0};
    conversation_init(&s.talk);
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    bool ok = take_options(&s, o, &e);
    bool once = ok && read_prompt(&s.o, &prompt, &e);
    if (once) ok = check_text("the prompt", prompt.data, prompt.n, &e);
    s.loop = !once;
    s.colour = is_terminal(once ? stderr : stdout) && !(no_color && *no_color) && term && strcmp(term, "dumb");
    if (ok && s.loop && (s.o.json || !is_terminal(stdout)))
        ok = fail(&e, USAGE, "a conversation needs a terminal; give the prompt with -p, -f or on stdin");
    if (ok && once && !prompt.n && !s.o.prompt) ok = fail(&e, USAGE, "the prompt is empty");
    ok = ok && open_model(&s, &e);
    int code = ok ? DONE : e.code;
    if (ok && once) code = play_once(&s, prompt.data, prompt.n, s.m.name);
    if (ok && !once) play_loop(&s);
    if (!ok) fprintf(stderr, "infer: %s\n", e.text);
    if (s.m.engine.state) sequence_free(&s.m.engine, &s.sequence);
    session_close(&s.m);
    conversation_free(&s.talk);
    ids_free(&s.text);
    ids_free(&s.turns);
    free(s.saved);
    bytes_free(&prompt);
    return code;
}
