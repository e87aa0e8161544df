/* play.c: `infer play`: one answer to a prompt, or a conversation in the terminal. What is shown and typed is here;
 * what a conversation means is in chat.c, how it is computed in engine.c.
 *
 * In a conversation everything goes to stdout, which is a terminal. With a prompt given only the answer goes to stdout.
 */
#include "play.h"
#include "chat.h"
#include "download.h"
#include "editor.h"
#include "engine.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_STOPS = 16, MOST_PROMPT = 64 << 20 };

const char play_help[] =
    "infer play [MODEL] [options]      a conversation in the terminal\n"
    "infer play MODEL -p TEXT          one answer, alone on stdout; also -f FILE, or the text on stdin\n\n"
    "  -s, --system TEXT         instructions for the model\n"
    "  -e, --effort LEVEL        how long it thinks: low, medium (default) or high\n"
    "      --temperature T       0: always the likeliest token (default 1)\n"
    "      --top-k K             draw among the K likeliest (default 0: all)\n"
    "      --top-p P             draw among the likeliest that make up P (default 1: all)\n"
    "      --min-p P             leave out what is less likely than P times the likeliest (default 0)\n"
    "      --repetition-penalty R  divide what was already said by R (default 1: off)\n"
    "      --seed N              the same seed gives the same answer (default: random)\n"
    "      --max-tokens N        end an answer after N tokens (default 0: when the context is full)\n"
    "      --stop TEXT           end an answer before TEXT; may be repeated\n"
    "      --ctx N               tokens of context (default: what the model and the memory allow)\n"
    "      --gpu N               which GPU (default 0)\n"
    "      --plain               the plain kernels, also where faster ones know the model\n"
    "      --hide-thinking       do not show the reasoning\n"
    "      --raw                 continue the text without a chat format\n"
    "      --date D              the date that the model is told (default today; none: not told)\n"
    "      --json                one answer as a JSON object\n";

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

typedef struct { /* options, and what /set changes */
    const char *prompt, *file, *stop[MOST_STOPS];
    int stops, context, gpu;
    bool raw, json, hide, plain;
    int max_tokens; /* 0: none */
    Sampling sampling;
} Options;

typedef struct {
    Options o;
    Checkpoint checkpoint;
    Tokenizer *tokenizer;
    Chat chat;
    bool harmony;
    Engine engine;
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
} Session;

static volatile sig_atomic_t interrupted; /* Ctrl+C since the answer was asked for */
static void on_interrupt(int number) { interrupted = number; }

/* From here on Ctrl+C only ends answers. */
static void catch_interrupts(void) {
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt, .sa_flags = SA_RESTART}, NULL);
}

static bool check_text(const char *what, const char *text, size_t n, Error *e) {
    size_t valid = utf8_check(text, n);
    return valid == n || fail(e, USAGE, "%s is not UTF-8: byte %zu is 0x%02X", what, valid, (unsigned char)text[valid]);
}

/* ---- settings: options of the command line, and of /set ---- */

static const struct {
    const char *name;
    double least, most;
    const char *range;
} settings[] = {{"temperature", 0, 100, "0, or from 0.01 to 100"},
                {"top-k", 0, 1e9, "a whole number, 0 for all"},
                {"top-p", 0, 1, "above 0, at most 1"},
                {"min-p", 0, 1, "from 0 to 1"},
                {"repetition-penalty", 0, 100, "above 0, at most 100"},
                {"seed", 0, 18446744073709551615.0, "a whole number"},
                {"max-tokens", 0, 1e9, "a whole number, 0 for no limit"}};
enum { TEMPERATURE, TOP_K, TOP_P, MIN_P, PENALTY, SEED, MAX_TOKENS, SETTINGS };

static bool set(Options *o, const char *name, const char *text, Error *e) {
    int i = 0;
    while (i < SETTINGS && strcmp(name, settings[i].name)) i++;
    if (i == SETTINGS) return fail(e, USAGE, "there is no setting '%.40s'", name);
    char *end;
    errno = 0;
    bool whole = i == TOP_K || i == SEED || i == MAX_TOKENS;
    uint64_t n = whole ? strtoull(text, &end, 10) : 0;
    double x = whole ? (double)n : strtod(text, &end);
    bool ok = *text && !*end && !errno && *text != '-' && x >= settings[i].least && x <= settings[i].most;
    if (i == TEMPERATURE) ok &= x == 0 || x >= 0.01;
    if (i == TOP_P || i == PENALTY) ok &= (float)x > 0;
    if (!ok) return fail(e, USAGE, "%s should be %s and is '%.40s'", name, settings[i].range, text);
    if (i == TEMPERATURE) o->sampling.temperature = (float)x;
    if (i == TOP_K) o->sampling.top_k = (int)n;
    if (i == TOP_P) o->sampling.top_p = (float)x;
    if (i == MIN_P) o->sampling.min_p = x < 1e-30 ? 0 : (float)x;
    if (i == PENALTY) o->sampling.penalty = (float)x;
    if (i == SEED) o->sampling.seed = n;
    if (i == MAX_TOKENS) o->max_tokens = (int)n;
    return true;
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

static const char *loading_name;
static double loading_since;

/* Loading NAME  ████████        5.2 GB  9.6 GB/s, redrawn in place: in a narrow window without name or bar. */
static void show_progress(uint64_t done, uint64_t total) {
    static double drawn;
    double now = seconds(), spent = now - loading_since;
    char size[24], figures[64];
    if (done < total && now - drawn < 0.05) return;
    drawn = now;
    snprintf(figures, sizeof figures, "%s  %.1f GB/s", size_text(done, size),
             (double)done / 1e9 / (spent > 0 ? spent : 1e-9));
    int room = columns() - (int)strlen("Loading  ") - (int)strlen(figures), name = (int)strlen(loading_name) + 2;
    if (name > room) name = 0;
    int bar = room - name > 24 ? 24 : room - name;
    fprintf(stderr, "\rLoading %s%s", name ? loading_name : "", name ? "  " : "");
    for (int i = 0; i < bar; i++) fputs((uint64_t)i * total < done * (uint64_t)bar ? "█" : " ", stderr);
    fprintf(stderr, " %s\033[K", figures);
    if (done >= total) fputs("\n", stderr);
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
    for (int i = 0; i < s->o->stops; i++) {
        const char *stop = s->o->stop[i], *hit = memmem(s->held.data, s->held.n, stop, strlen(stop));
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
    Session *s;
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
    const Session *s = screen->s;
    bool aside = part == REASONING || part == CALL;
    if (s->o.json) {
        if (part == REASONING || part == ANSWER)
            bytes_add(part == ANSWER ? &screen->answer : &screen->thinking, text, n);
        return;
    }
    FILE *f = s->loop || part == ANSWER ? stdout : stderr;
    if (!n || (part == REASONING && (s->o.hide || !is_terminal(f)))) return;
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

static bool is_stop(const Session *s, int token) {
    for (size_t i = 0; i < s->checkpoint.stop.n; i++)
        if (s->checkpoint.stop.data[i] == token) return true;
    return false;
}

/* Handles one sampled token: shows what it completes, and says why the answer ends here, or NULL. */
static const char *take_token(Session *s, int token, Reader *reader, Decoder *decoder, Stopper *stopper,
                              Screen *screen) {
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
        tokenizer_decode(s->tokenizer, decoder, token, &text);
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
static bool generate(Session *s, const Ids *ids, Reader *reader, Screen *screen, Error *e) {
    Sampling how = s->o.sampling;
    Stopper stopper = {.o = &s->o};
    Decoder decoder = {.begun = s->text.n > 1}; /* not only a beginning-of-text token */
    Generation w;
    int token;
    how.seed += s->answers++;
    s->stats = (Stats){.prompt = ids->n};
    double since = seconds();
    bool ok = generation_begin(&w, &s->engine, &s->sequence, ids->data, ids->n, &how, &interrupted, e);
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
static double percent_of_bandwidth(const Session *s) {
    const Stats *t = &s->stats;
    uint64_t bytes = step_bytes(s->engine.model, s->engine.model->top_k, 1, (int)(t->prompt + t->tokens / 2));
    return s->bandwidth > 0 ? 100 * speed(t) * (double)bytes / s->bandwidth : 0;
}

static void print_stats(FILE *f, const Session *s) {
    const Stats *t = &s->stats;
    double percent = percent_of_bandwidth(s);
    fprintf(f, "[Generated at %.1f tokens/sec · %zu token%s", speed(t), t->tokens, t->tokens == 1 ? "" : "s");
    if (t->thinking) fprintf(f, " (%zu thinking)", t->thinking);
    fprintf(f, " · first token %.0f ms", t->first * 1000);
    if (percent > 0) fprintf(f, " · %.0f%% of memory bandwidth", percent);
    fprintf(f, " · context %zu%% · %s]\n", s->sequence.tokens.n * 100 / (size_t)s->engine.context, t->reason);
}

/* Keeps what was said, also where it ended early. Nothing was if it ended in the reasoning or inside a call: then it
 * says so. A preamble that nothing followed was meant as the answer. */
static void keep_answer(Session *s, Reader *reader, Screen *screen) {
    Message *last = reader->messages ? reader->message + reader->messages - 1 : NULL;
    Part part = last ? message_part(last) : REASONING;
    if (part == ANSWER || part == PREAMBLE || (part == CALL && !strcmp(s->stats.reason, "tool call"))) {
        if (!strcmp(s->stats.reason, "stop text")) { /* the history holds what was shown */
            for (int i = 0; i < s->o.stops; i++) {
                char *hit = memmem(last->content.data, last->content.n, s->o.stop[i], strlen(s->o.stop[i]));
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
static bool answer(Session *s, Screen *screen, Error *e) {
    Ids ids = {0};
    Reader reader;
    int before = s->talk.messages;
    size_t length = s->text.n;
    if (!s->harmony) {
        bool ok = generate(s, &s->text, NULL, screen, e);
        return ok || (s->text.n = length, false);
    }
    reader_init(&reader, &s->chat);
    screen->reader = &reader;
    bool ok = chat_render(&s->chat, &s->talk, true, &ids, e) && generate(s, &ids, &reader, screen, e);
    if (ok) keep_answer(s, &reader, screen);
    screen->reader = NULL;
    reader_free(&reader);
    ids_free(&ids);
    if (ok && s->talk.messages == before)
        return e->code = !strcmp(s->stats.reason, "interrupted") ? INTERRUPTED : FAILED, e->text[0] = 0, false;
    return ok;
}

/* Appends a question. */
static bool ask(Session *s, const char *text, size_t n, Error *e) {
    if (!check_text("the text", text, n, e)) return false;
    if (s->harmony) {
        conversation_add(&s->talk, "user", NULL, text, n);
        return true;
    }
    int begin = (int)s->text.n;
    if (!tokenizer_encode(s->tokenizer, text, n, s->text.n ? 0 : WITH_TEMPLATE, &s->text, e)) return false;
    ids_add(&s->turns, begin);
    ids_add(&s->turns, (int)s->text.n);
    return true;
}

/* ---- one prompt ---- */

static void print_json(const Session *s, const Screen *screen, const char *model) {
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

static int play_once(Session *s, const char *text, size_t n, const char *model) {
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

static void error_line(const Session *s, const Error *e) {
    if (e->text[0]) fprintf(stderr, s->colour ? "\033[31m%s\033[0m\n" : "%s\n", e->text);
}

static int last_question(const Session *s) {
    int i = s->talk.messages - 1;
    while (i >= 0 && strcmp(s->talk.message[i].role, "user")) i--;
    return i;
}

/* Forgets the oldest question and its answer; of a text without turns its first half. False if little would be left. */
static bool drop_oldest(Session *s) {
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

static void forget(Session *s) {
    conversation_remove(&s->talk, 0, s->talk.messages);
    s->text.n = s->turns.n = 0;
}

/* The context is full: nothing is thrown away unless the user says so. True if there is room now. */
static bool make_room(Session *s) {
    Bytes line = {0};
    char count[32];
    bool room = false, again = true;
    printf("%s*** The context of %s tokens is full. ***%s\n", s->colour ? "\033[1;31m" : "",
           count_text((uint64_t)s->engine.context, count), s->colour ? "\033[0m" : "");
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
static void converse(Session *s) {
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

static void slash_help(Session *s, char *argument) {
    (void)s, (void)argument;
    fputs(loop_help, stdout);
}

static void slash_clear(Session *s, char *argument) {
    (void)argument;
    forget(s);
    puts("The conversation is forgotten; the instructions and settings stay.");
}

static void slash_system(Session *s, char *argument) {
    if (*argument) conversation_set(&s->talk.instructions, strcmp(argument, "none") ? argument : NULL);
    const char *text = s->talk.instructions ? s->talk.instructions : "(none)";
    put_line("Instructions: ", text, strlen(text));
}

static void slash_effort(Session *s, char *argument) {
    Error e;
    if (*argument && !effort_known(argument)) {
        fail(&e, USAGE, "the effort is low, medium or high, not '%.40s'", argument);
        error_line(s, &e);
        return;
    }
    if (*argument) conversation_set(&s->talk.effort, argument);
    printf("Effort: %s\n", s->talk.effort);
}

static void slash_set(Session *s, char *argument) {
    Error e;
    char *value = argument + strcspn(argument, " \t");
    if (*value) *value++ = 0;
    value += strspn(value, " \t");
    if (*argument && !set(&s->o, argument, value, &e)) error_line(s, &e);
    show_settings(&s->o);
}

static void slash_stats(Session *s, char *argument) {
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
static bool whole_prompt(const Session *s, Ids *ids) {
    Error e;
    if (!s->harmony) return ids_append(ids, s->text.data, s->text.n), true;
    if (chat_render(&s->chat, &s->talk, true, ids, &e)) return true;
    error_line(s, &e);
    return false;
}

static void slash_context(Session *s, char *argument) {
    (void)argument;
    Ids ids = {0};
    char used[32], all[32];
    size_t context = (size_t)s->engine.context;
    if (!whole_prompt(s, &ids)) return;
    int width = columns() - 44 < 40 ? columns() - 44 : 40;
    for (int i = 0; i < width; i++) fputs((size_t)i * context < ids.n * (size_t)width ? "█" : "░", stdout);
    printf("%s%s of %s tokens (%.1f%%)\n", width > 0 ? " " : "", count_text(ids.n, used), count_text(context, all),
           100.0 * (double)ids.n / (double)context);
    ids_free(&ids);
}

static void slash_retry(Session *s, char *argument) {
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

static void slash_undo(Session *s, char *argument) {
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

static void plain_text(const Session *s, Bytes *out) {
    Decoder d = {0};
    bytes_text(out, "");
    for (size_t i = 0; i < s->text.n; i++)
        if (!tokenizer_is_control(s->tokenizer, s->text.data[i]))
            tokenizer_decode(s->tokenizer, &d, s->text.data[i], out);
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

static void slash_save(Session *s, char *argument) {
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

static bool load_conversation(Session *s, const char *path, const Bytes *text, Error *e) {
    Conversation loaded;
    cJSON *json = json_parse(text->data, text->n, path, e);
    if (!json) return false;
    conversation_init(&loaded);
    conversation_set(&loaded.date, s->talk.date); /* unless the file has another */
    bool ok = conversation_parse(&loaded, &s->chat, json, e);
    cJSON_Delete(json);
    if (ok) {
        Conversation old = s->talk;
        s->talk = loaded;
        loaded = old;
    }
    conversation_free(&loaded);
    return ok;
}

static void slash_load(Session *s, char *argument) {
    Error e = {0};
    Bytes text = {0};
    char *path = expand_home(argument);
    bool ok = *path || fail(&e, USAGE, "/load needs a file name");
    ok = ok && file_read(path, MOST_PROMPT, &text, &e);
    if (ok && s->harmony) {
        ok = load_conversation(s, path, &text, &e);
    } else if (ok) {
        Ids ids = {0};
        ok = tokenizer_encode(s->tokenizer, text.data, text.n, WITH_TEMPLATE, &ids, &e);
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

static void slash_prompt(Session *s, char *argument) {
    (void)argument;
    Ids ids = {0};
    Bytes text = {0};
    Decoder d = {0};
    if (!whole_prompt(s, &ids)) return;
    bytes_text(&text, "");
    for (size_t i = 0; i < ids.n; i++) tokenizer_bytes(s->tokenizer, &d, ids.data[i], &text);
    put_line("", text.data, text.n);
    ids_free(&ids);
    bytes_free(&text);
}

static const struct {
    const char *name;
    void (*run)(Session *, char *argument);
    bool chat_only;
} slashes[] = {{"/help", slash_help, false},       {"/clear", slash_clear, false}, {"/system", slash_system, true},
               {"/effort", slash_effort, true},    {"/set", slash_set, false},     {"/stats", slash_stats, false},
               {"/context", slash_context, false}, {"/retry", slash_retry, false}, {"/undo", slash_undo, false},
               {"/save", slash_save, false},       {"/load", slash_load, false},   {"/prompt", slash_prompt, false}};

/* Runs a line that begins with '/'. */
static void run_slash(Session *s, char *line) {
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

static void play_loop(Session *s) {
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

/* ---- choosing, opening ---- */

/* Takes the only model that can be played; of several it shows which there are, and asks. */
static bool choose_model(bool ask_for_it, char **path, char **name, Error *e) {
    ModelEntry *list;
    int n = models_list(&list), width = 0, choice = n == 1;
    char line[64], size[24];
    if (!n) {
        fail(e, BAD_MODEL,
             "no model in ./models, ~/.cache/infer/models or the hub's cache: name a model directory, infer play DIR");
    } else if (!choice) {
        FILE *f = ask_for_it ? stdout : stderr;
        fputs("Available models:\n", f);
        for (int i = 0; i < n; i++)
            if ((int)strlen(list[i].name) > width) width = (int)strlen(list[i].name);
        for (int i = 0; i < n; i++)
            fprintf(f, "%3d. %-*s  %8s  %s%s\n", i + 1, width, list[i].name, size_text(list[i].bytes, size),
                    list[i].encoding, list[i].complete ? "" : "  incomplete");
        if (!ask_for_it) fail(e, USAGE, "which of the %d models? infer play MODEL ...", n);
    }
    while (n && ask_for_it && !choice) {
        printf("Select model (1-%d): ", n);
        fflush(stdout);
        if (!fgets(line, sizeof line, stdin)) {
            fail(e, USAGE, "no model was chosen");
            break;
        }
        line[strcspn(line, "\n")] = 0;
        if (!text_whole(line, 1, n, &choice)) printf("A number from 1 to %d is needed; Ctrl+C leaves.\n", n);
    }
    if (choice) {
        *path = copy_text(list[choice - 1].path, strlen(list[choice - 1].path));
        *name = copy_text(list[choice - 1].name, strlen(list[choice - 1].name));
    }
    models_free(list, n);
    return choice;
}

static bool open_session(Session *s, const Backend *backend, const char *dir, const char *name, Error *e) {
    Bytes path = {0};
    bool verbose = is_terminal(stderr) && !s->o.json;
    char context[32], where[64] = "";
    Limits limits = {.gpu = s->o.gpu,
                     .max_seqs = 1,
                     .max_tokens = backend->prompt_step,
                     .plain = s->o.plain,
                     .progress = verbose ? show_progress : NULL,
                     .where = where};
    bytes_print(&path, "%s/tokenizer.json", dir);
    bool ok = checkpoint_open(&s->checkpoint, dir, e) && (s->tokenizer = tokenizer_open(path.data, e));
    bytes_free(&path);
    if (!ok) return false;
    const Model *m = &s->checkpoint.model;
    if (tokenizer_size(s->tokenizer) > m->vocab)
        return fail(
            e, BAD_MODEL,
            "%s: tokenizer.json has ids up to %d, config.json a vocabulary of %d: they belong to different models", dir,
            tokenizer_size(s->tokenizer) - 1, m->vocab);
    s->harmony = chat_open(&s->chat, s->tokenizer) && !s->o.raw;
    if (!s->harmony && (s->talk.instructions || strcmp(s->talk.effort, "medium")))
        return fail(e, USAGE, "%s is continued raw: it takes no system prompt and no effort", name);
    loading_name = name;
    loading_since = seconds();
    if (!engine_open(&s->engine, backend, m, limits, s->o.context, e)) return false;
    uint64_t bytes = step_bytes(m, m->top_k, 1, 0);
    double flat = backend->flat_read(s->engine.state, bytes);
    s->bandwidth = flat > 0 ? (double)bytes / flat : 0;
    if (verbose)
        fprintf(stderr, "✓ Model loaded%s%s, context %s\n", *where ? " to " : "", where,
                count_text((uint64_t)s->engine.context, context));
    if (verbose && !s->harmony && !s->o.raw)
        fputs("  It has no chat format: your text is continued as it stands.\n", stderr);
    return true;
}

static void close_session(Session *s) {
    if (s->engine.state) sequence_free(&s->engine, &s->sequence);
    engine_close(&s->engine);
    chat_close(&s->chat);
    tokenizer_close(s->tokenizer);
    checkpoint_close(&s->checkpoint);
    conversation_free(&s->talk);
    ids_free(&s->text);
    ids_free(&s->turns);
    free(s->saved);
}

static bool parse_options(int argc, char **argv, Session *s, Error *e) {
    enum { CTX = 256, GPU, PLAIN, HIDE, RAW, DATE, JSON, STOP, SETTING };
    static const struct option options[] = {{"system", required_argument, NULL, 's'},
                                            {"effort", required_argument, NULL, 'e'},
                                            {"ctx", required_argument, NULL, CTX},
                                            {"gpu", required_argument, NULL, GPU},
                                            {"plain", no_argument, NULL, PLAIN},
                                            {"hide-thinking", no_argument, NULL, HIDE},
                                            {"raw", no_argument, NULL, RAW},
                                            {"date", required_argument, NULL, DATE},
                                            {"json", no_argument, NULL, JSON},
                                            {"stop", required_argument, NULL, STOP},
                                            {"temperature", required_argument, NULL, SETTING},
                                            {"top-k", required_argument, NULL, SETTING},
                                            {"top-p", required_argument, NULL, SETTING},
                                            {"min-p", required_argument, NULL, SETTING},
                                            {"repetition-penalty", required_argument, NULL, SETTING},
                                            {"seed", required_argument, NULL, SETTING},
                                            {"max-tokens", required_argument, NULL, SETTING},
                                            {0}};
    Options *o = &s->o;
    int which = 0;
    for (int c; (c = getopt_long(argc, argv, "p:f:s:e:", options, &which)) != -1;) {
        if (c == '?') return fail(e, USAGE, "wrong option; see infer play --help");
        if (optarg && !check_text("an option", optarg, strlen(optarg), e)) return false;
        if (c == 'p') o->prompt = optarg;
        if (c == 'f') o->file = optarg;
        if (c == 's') conversation_set(&s->talk.instructions, optarg);
        if (c == 'e') {
            if (!effort_known(optarg)) return fail(e, USAGE, "--effort is low, medium or high, not '%.40s'", optarg);
            conversation_set(&s->talk.effort, optarg);
        }
        if (c == DATE) conversation_set(&s->talk.date, strcmp(optarg, "none") ? optarg : NULL);
        if (c == HIDE) o->hide = true;
        if (c == PLAIN) o->plain = true;
        if (c == RAW) o->raw = true;
        if (c == JSON) o->json = true;
        if (c == SETTING && !set(o, options[which].name, optarg, e)) return false;
        if ((c == CTX && !text_whole(optarg, 1, 1 << 24, &o->context)) ||
            (c == GPU && !text_whole(optarg, 0, MOST_GPUS - 1, &o->gpu)))
            return fail(e, USAGE, "--%s needs a whole number, not '%.40s'", options[which].name, optarg);
        if (c == STOP) {
            if (!*optarg || o->stops == MOST_STOPS)
                return fail(e, USAGE, "--stop needs a text, at most %d times", MOST_STOPS);
            o->stop[o->stops++] = optarg;
        }
    }
    if (argc - optind > 1)
        return fail(e, USAGE, "one MODEL at most, not '%.60s' as well; a prompt is given with -p", argv[optind + 1]);
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

int play(int argc, char **argv, const Backend *backend) {
    Error e = {0};
    Bytes prompt = {0};
    Session s = {.o = {.sampling = {.temperature = 1, .top_p = 1, .penalty = 1}}};
    char *path = NULL, *name = NULL;
    if (getentropy(&s.o.sampling.seed, 4))
        s.o.sampling.seed = (uint64_t)(seconds() * 1e6); /* short enough to type again */
    conversation_init(&s.talk);
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    bool ok = parse_options(argc, argv, &s, &e);
    bool once = ok && read_prompt(&s.o, &prompt, &e);
    if (once) ok = check_text("the prompt", prompt.data, prompt.n, &e);
    s.loop = !once;
    s.colour = is_terminal(once ? stderr : stdout) && !(no_color && *no_color) && term && strcmp(term, "dumb");
    if (ok && s.loop && (s.o.json || !is_terminal(stdout)))
        ok = fail(&e, USAGE, "a conversation needs a terminal; give the prompt with -p, -f or on stdin");
    if (ok && once && !prompt.n && !s.o.prompt) ok = fail(&e, USAGE, "the prompt is empty");
    if (ok && optind < argc) {
        path = model_get(argv[optind], &e);
        name = copy_text(argv[optind], strlen(argv[optind]));
        ok = path;
    } else if (ok) {
        ok = choose_model(s.loop, &path, &name, &e);
    }
    ok = ok && open_session(&s, backend, path, name, &e);
    int code = ok ? DONE : e.code;
    if (ok && once) code = play_once(&s, prompt.data, prompt.n, name);
    if (ok && !once) play_loop(&s);
    if (!ok) fprintf(stderr, "infer: %s\n", e.text);
    close_session(&s);
    bytes_free(&prompt);
    free(path);
    free(name);
    return code;
}
