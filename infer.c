/* infer.c: the host program: options, the terminal, opening a model, answers, the loop (which asks for one question
 * after another), the small commands, and `main` last. It uses model.c, tokenizer.c, chat.c and the backend (infer.h).
 *
 * Data goes to stdout, everything else to stderr. A conversation in the terminal goes to stdout as a whole. Commands
 * that need no GPU never touch one. What a command opens is static: it goes with the process. */
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/param.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef BACKEND
#define BACKEND reference
#endif
#define VERSION "0.1"

const Backend *const backend = &BACKEND;

/* ---- options: each command has tables of its own ---- */

Settings settings;
static struct { /* of play */
    const char *prompt, *file, *system, *effort, *date;
    Texts stop;
    int context;
    bool hide_thinking, raw, json;
} given;
static struct { /* of every command that loads a model */
    int gpu;
    bool plain;
} load;

const Option settings_options[] = {
    {0, "temperature", "T", REAL, &settings.sampling.temperature, 0, 100, "1",
     "0 to 100: randomness of the draw; below 0.01 it always takes the likeliest token"},
    {0, "top-k", "K", WHOLE, &settings.sampling.top_k, 0, 1e9, "0", "draw among the K likeliest; 0: all"},
    {0, "top-p", "P", REAL, &settings.sampling.top_p, 1e-30, 1, "1",
     "above 0, at most 1: draw among the likeliest whose probabilities add up to P"},
    {0, "min-p", "P", REAL, &settings.sampling.min_p, 0, 1, "0",
     "0 to 1: leave out tokens less likely than P times the likeliest"},
    {0, "repetition-penalty", "R", REAL, &settings.sampling.penalty, 1e-30, 100, "1",
     "above 0, at most 100: divide the scores of tokens already in the text by R; 1: off"},
    {0, "seed", "N", SEED, &settings.sampling.seed, 0, 9007199254740991,
     .help = "the same seed gives the same answer (random)"},
    {0, "max-tokens", "N", WHOLE, &settings.max_tokens, 0, 1e9, "0",
     "end an answer after N tokens; 0: only when the context is full"},
    {0}};

static const Option play_options[] = {
    {'p', "prompt", "TEXT", TEXT, &given.prompt, .help = "the prompt; a text on stdin is appended"},
    {'f', "file", "FILE", TEXT, &given.file, .help = "a file with the prompt; -: stdin"},
    {'s', "system", "TEXT", TEXT, &given.system, .help = "instructions for the model"},
    {'e', "effort", "LEVEL", TEXT, &given.effort,
     .help = "how long it thinks: low, medium or high; none, if the model can skip it"},
    {0, "stop", "TEXT", TEXTS, &given.stop, .most = 16, .help = "end an answer before TEXT; can be repeated"},
    {0, "hide-thinking", NULL, SWITCH, &given.hide_thinking, .help = "do not show the reasoning"},
    {0, "raw", NULL, SWITCH, &given.raw, .help = "continue the text without a chat format"},
    {0, "date", "D", TEXT, &given.date, .help = "the date in the prompt (today); none: no date"},
    {0, "json", NULL, SWITCH, &given.json, .help = "one answer as a JSON object"},
    {0, "ctx", "N", WHOLE, &given.context, 1, 1 << 24,
     .help = "tokens of context (as many as the model and the memory allow)"},
    {0}};

const Option load_options[] = {
    {0, "gpu", "N", WHOLE, &load.gpu, 0, MAX_GPUS - 1, "0", "which GPU"},
    {0, "plain", NULL, SWITCH, &load.plain, .help = "use the plain kernels only, even where fast ones exist"},
    {0}};

bool check_text(const char *what, const char *text, size_t n, Error *e) {
    size_t valid = utf8_check(text, n);
    return valid == n || fail(e, USAGE, "%s is not UTF-8: byte %zu is 0x%02X", what, valid, (unsigned char)text[valid]);
}

/* Reads the number at *text and moves *text behind it. `given` is the whole value, for the message. */
static bool read_number(const Option *option, const char **text, const char *given, double *x, Error *e) {
    bool real = option->kind == REAL, list = option->kind == WHOLES;
    char *end;
    *x = strtod(*text, &end);
    bool inside = *x >= option->least && *x <= option->most;
    if (end > *text && (!*end || (list && *end == ',')) && inside && (real || *x == floor(*x)))
        return *text = end, true;
    LocalText range = real ? copy_text(option->help, strcspn(option->help, ":"))
                           : text_print("%s from %.0f to %.0f", list ? "whole numbers like 1,4,16," : "a whole number",
                                        option->least, option->most);
    return fail(e, USAGE, "--%s must be %s, not '%.40s'", option->name, range, given);
}

bool option_set(const Option *option, const char *text, Error *e) {
    const char *at = text;
    Numbers *numbers = option->to;
    Texts *texts = option->to;
    double x = 0;
    if (option->kind == SWITCH) return *(bool *)option->to = true;
    if (!check_text("the value", text, strlen(text), e)) return fail(e, USAGE, "--%s: %s", option->name, e->text);
    if (option->kind == TEXT) return *(const char **)option->to = text, true;
    if (option->kind == TEXTS) {
        if (!*text || texts->n == (int)option->most)
            return fail(e, USAGE, "--%s needs a text, at most %.0f times", option->name, option->most);
        return texts->text[texts->n++] = text, true;
    }
    if (option->kind == WHOLES) numbers->n = 0;
    do {
        if (!read_number(option, &at, text, &x, e)) return false;
        if (option->kind == WHOLES && numbers->n == MOST_VALUES)
            return fail(e, USAGE, "--%s takes at most %d numbers", option->name, MOST_VALUES);
        if (option->kind == WHOLES) numbers->value[numbers->n++] = (int)x;
    } while (*at++);
    if (option->kind == WHOLE) *(int *)option->to = (int)x;
    if (option->kind == SEED) *(uint64_t *)option->to = (uint64_t)x;
    if (option->kind == REAL) *(float *)option->to = x < 1e-30 ? 0 : (float)x;
    return true;
}

const Option *option_find(const Option *table, const char *name, size_t n) {
    for (const Option *o = table; o->name; o++)
        if (n == 1 ? o->letter == *name : strlen(o->name) == n && !strncmp(o->name, name, n)) return o;
    return NULL;
}

/* Reads the option at argv[*i]: -x VALUE, -xVALUE, --name VALUE, --name=VALUE or a switch. Messages never show the
 * value of an unknown option, which may be a secret. */
static bool parse_option(const Command *c, int argc, char **argv, int *i, Error *e) {
    bool is_long = argv[*i][1] == '-';
    const char *name = argv[*i] + 1 + is_long, *value = name + (is_long ? strcspn(name, "=") : 1);
    size_t n = (size_t)(value - name);
    const Option *option = NULL;
    for (int t = 0; (n > 1) == is_long && !option && c->options[t]; t++) option = option_find(c->options[t], name, n);
    if (!option)
        return fail(e, USAGE, "there is no option %.*s; see infer %s --help", (int)n + 1 + is_long, argv[*i], c->name);
    if (option->kind == SWITCH && *value) return fail(e, USAGE, "--%s takes no value", option->name);
    if (option->kind == SWITCH) return option_set(option, NULL, e);
    if (*value) return option_set(option, value + is_long, e); /* behind the '=' */
    if (++*i == argc) return fail(e, USAGE, "--%s needs a value; see infer %s --help", option->name, c->name);
    return option_set(option, argv[*i], e);
}

/* Reads all arguments behind the command's name. *model: NULL if none is given. */
static bool parse_arguments(const Command *c, int argc, char **argv, const char **model, Error *e) {
    bool options_end = false, optional = *c->argument == '[';
    const char *word = c->argument + optional; /* without brackets */
    for (int t = 0; c->options[t]; t++)
        for (const Option *option = c->options[t]; option->name; option++)
            if (option->initial) option_set(option, option->initial, e);
    for (int i = 0; i < argc; i++) {
        if (!options_end && argv[i][0] == '-' && argv[i][1]) {
            options_end = !strcmp(argv[i], "--");
            if (!options_end && !parse_option(c, argc, argv, &i, e)) return false;
        } else if (*model || !*word) {
            const char *shown = strncmp(argv[i], "hf_", 3) ? argv[i] : "hf_..."; /* a token is never shown */
            return fail(e, USAGE, "'%.60s' is one argument too many; see infer %s --help", shown, c->name);
        } else {
            *model = argv[i];
        }
    }
    return !*word || optional || *model || fail(e, USAGE, "%s is missing; see infer %s --help", word, c->name);
}

/* ---- the terminal ---- */

int columns(FILE *f) {
    struct winsize size;
    return !ioctl(fileno(f), TIOCGWINSZ, &size) && size.ws_col ? size.ws_col : 80;
}

static const char *output_file; /* what stdout goes to; NULL: it is as it was */

bool output_open(const char *path, Error *e) {
    output_file = path;
    return freopen(path, "wb", stdout) || fail(e, FAILED, "%s: %m", path);
}

bool put_escape(FILE *f, const char *escape) {
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    bool colour = escape[strlen(escape) - 1] == 'm';
    bool wanted = isatty(fileno(f)) && term && strcmp(term, "dumb") && !(colour && no_color && *no_color);
    if (wanted) fputs(escape, f);
    return wanted;
}

Wrap wrap_on(FILE *f, const char *style) {
    return (Wrap){.f = f, .style = style, .width = isatty(fileno(f)) ? columns(f) : 0};
}

void wrap_text(Wrap *w, const char *text, size_t n) {
    LocalBytes shown = {0};
    if (n) w->last = text[n - 1];
    if (w->style) put_escape(w->f, w->style);
    isatty(fileno(w->f)) ? bytes_shown(&shown, text, n, true) : bytes_add(&shown, text, n);
    if (terminal && w->width)
        terminal->wrap(w, shown.data ? shown.data : "", shown.n);
    else
        fwrite(shown.data ? shown.data : "", 1, shown.n, w->f);
    if (w->style) put_escape(w->f, NORMAL);
}

void wrap_end(Wrap *w) {
    if (!w->f) return;
    if (w->last && w->last != '\n') wrap_text(w, "\n", 1);
    fflush(w->f);
    bytes_free(&w->word);
    *w = (Wrap){0};
}

void put_text(FILE *f, const char *style, const char *label, const char *text) {
    Wrap w = wrap_on(f, style);
    wrap_text(&w, label, strlen(label));
    wrap_text(&w, text, strlen(text));
    wrap_end(&w);
}

void print_row(FILE *f, const char *name, int column, const char *text) {
    int width = isatty(fileno(f)) ? columns(f) : 100;
    if (width < 60 && column) fprintf(f, "%s\n", name), name = "", column = 6;
    Wrap w = {.f = f, .width = width, .indent = column, .column = column};
    fprintf(f, "%-*s", column, name);
    wrap_text(&w, text, strlen(text));
    wrap_end(&w);
}

static void print_help(const Command *c) {
    printf("infer %s%s%s [options]\n", c->name, *c->argument ? " " : "", c->argument);
    print_row(stdout, "", 0, c->summary);
    for (int t = 0; c->options[t]; t++)
        for (const Option *o = c->options[t]; o->name; o++) {
            const char letter[] = {'-', o->letter, ',', 0}, *value = o->value ? o->value : "";
            LocalText name = text_print("  %3s --%s %s", o->letter ? letter : "", o->name, value);
            LocalText text = text_print(o->initial ? "%s (%s)" : "%s", o->help, o->initial);
            print_row(stdout, name, 29, text);
        }
    print_row(stdout, "", 0, "The manual says more: man infer, or man commands/infer.1.");
}

static double loading_since;

static void show_progress(uint64_t done, uint64_t total) {
    static double drawn;
    double now = seconds(), spent = now - loading_since;
    if (done < total && now - drawn < 0.05) return;
    drawn = now;
    fputc('\r', stderr), put_escape(stderr, WRAP_OFF);
    fprintf(stderr, "Loading %.0f%% at %.1f GB/s", total ? 100 * (double)done / (double)total : 100,
            spent > 0 ? (double)done / 1e9 / spent : 0);
    put_escape(stderr, WRAP_ON);
    if (done >= total) fputc('\n', stderr);
}

/* ---- opening a model ---- */

const char *model_state(const ModelEntry *m, const ModelInfo *info) {
    return !info->known ? "not supported" : m->complete ? "complete" : "incomplete";
}

/* Takes the only model that is here. If there are several it lists them and asks. */
static bool choose_model(Session *s, Error *e) {
    LOCAL(models_free) Models here = models_list();
    const ModelEntry *list = here.entry;
    char line[64];
    int n = here.n, choice = n == 1;
    bool can_ask = isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    if (!n) return fail(e, BAD_MODEL, "no model in ./models or the hub's cache: infer download ORG/NAME fetches one");
    if (n > 1) fputs("Available models:\n", stderr);
    for (const ModelEntry *m = list; m < list + n && n > 1; m++) {
        const ModelInfo info = model_describe(m->path);
        const char *state = model_state(m, &info);
        LocalText row = text_print("%3d. %-36s %8s  %s  %s", (int)(m - list) + 1, m->name, SIZE(m->bytes),
                                   info.encoding, strcmp(state, "complete") ? state : "");
        put_text(stderr, NULL, "", row);
    }
    while (!choice && can_ask) {
        fprintf(stderr, "Select model (1-%d): ", n);
        if (!fgets(line, sizeof line, stdin) && fputc('\n', stderr)) break;
        line[strcspn(line, "\n")] = 0;
        if (!text_whole(line, 1, n, &choice)) fprintf(stderr, "A number from 1 to %d is needed; Ctrl+C leaves.\n", n);
    }
    if (!choice) return fail(e, USAGE, "which of the %d models? infer COMMAND MODEL", n);
    s->dir = text_print("%s", list[choice - 1].path);
    s->name = text_print("%s", list[choice - 1].name);
    return true;
}

/* The path of a model. On a terminal a missing ORG/NAME is offered for download. */
static char *get_model(const char *argument, Error *e) {
    char *path = model_find(argument, e), answer[16] = "";
    bool here = path && (!strcmp(path, argument) || model_entry(path).complete);
    if (here || !strchr(argument, '/') || !hub_repository(argument) || !isatty(STDIN_FILENO) || !isatty(STDERR_FILENO))
        return path;
    fprintf(stderr, "%s is not here%s. Download it? [y/N] ", argument, path ? " whole" : "");
    if (!fgets(answer, sizeof answer, stdin) || (*answer != 'y' && *answer != 'Y')) return path;
    free(path);
    return text_print("%s", hub_fetch(argument, model_runs));
}

/* Opens config and weights if they are needed, and always a container's files that hold the tokenizer. */
static bool open_checkpoint(Session *s, int need, Error *e) {
    Checkpoint *c = &s->checkpoint;
    if (!(need & (NEED_CHECKPOINT | NEED_SHAPES)))
        return !container_at(s->dir)->in_files || tensors_open(&c->tensors, s->dir, e);
    const bool weights = model_entry(s->dir).bytes;
    if (weights && s->encoding)
        return fail(e, USAGE, "%s has weights; --encoding is for a directory that has only config.json", s->dir);
    if (weights || need & NEED_CHECKPOINT) return checkpoint_open(c, s->dir, e);
    return checkpoint_make_up(c, s->dir, s->encoding, e);
}

/* A JsonFile: what the model's container has. */
static cJSON *session_json(const void *session, const char *name, Error *e) {
    const Session *s = session;
    *e = (Error){0};
    return container_at(s->dir)->json(&s->checkpoint.tensors, s->dir, name, e);
}

static bool open_tokenizer(Session *s, bool may_lack, Error *e) {
    LocalText path = text_print(container_at(s->dir)->in_files ? "%s" : "%s/tokenizer.json", s->dir);
    const int vocab = s->checkpoint.model.vocab;
    if (may_lack && !file_exists(path)) return true;
    if (access(path, F_OK))
        return fail(e, BAD_MODEL, "%s: missing: is the model's download incomplete? infer download goes on", path);
    s->tokenizer = tokenizer_open(path, session_json, s, e);
    if (!s->tokenizer || !vocab || tokenizer_fit(s->tokenizer, vocab)) return s->tokenizer;
    return fail(e, BAD_MODEL, "%s: it has ids up to %d, the config a vocabulary of %d: they belong to different models",
                path, tokenizer_size(s->tokenizer) - 1, vocab);
}

/* Adds the tokens that end a text in every family that has them: a GGUF file names at most three such tokens. */
static void add_stops(Session *s) {
    static const char *const ends[] = {"<|eot_id|>",      "<|eom_id|>",    "<|im_end|>",
                                       "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>",
                                       "<|return|>",      "<|call|>",      "</s>"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        int id = tokenizer_added(s->tokenizer, ends[i]);
        if (tokenizer_is_control(s->tokenizer, id)) ids_add(&s->checkpoint.stop, id);
    }
}

bool session_open(Session *s, const char *model, int need, Error *e) {
    bool tokenizer = need & (NEED_TOKENIZER | NEED_CHAT);
    if (model && !(s->dir = get_model(model, e))) return false;
    if (model) s->name = text_print("%s", model);
    if (!model && !choose_model(s, e)) return false;
    if (!open_checkpoint(s, need, e)) return false;
    if ((tokenizer || need & USE_TOKENIZER) && !open_tokenizer(s, !tokenizer, e)) return false;
    if (s->tokenizer) s->has_chat = chat_open(&s->chat, s->tokenizer, tokenizer_template(s->tokenizer), &s->no_chat);
    if (!s->has_chat) fail(&s->no_chat, BAD_MODEL, "%s has no chat format: %s", s->name, s->no_chat.text);
    if (s->tokenizer && container_at(s->dir)->in_files) add_stops(s);
    if (need & NEED_CHAT && !s->has_chat) return *e = s->no_chat, false;
    return true;
}

bool session_load(Session *s, Limits limits, int context, Error *e) {
    bool verbose = isatty(STDERR_FILENO) && !s->quiet;
    limits.gpu = load.gpu, limits.plain = load.plain, limits.tap = s->tap, limits.tap_data = s->tap_data;
    limits.where = s->where;
    limits.progress = verbose ? show_progress : NULL;
    if (!limits.max_tokens) limits.max_tokens = backend->prompt_step;
    if (!limits.max_seqs) limits.max_seqs = 1;
    loading_since = seconds();
    if (!engine_open(&s->engine, backend, &s->checkpoint.model, limits, context, e)) return false;
    s->scheduler = scheduler_open(&s->engine);
    s->seconds = seconds() - loading_since;
    if (verbose)
        fprintf(stderr, "✓ Model loaded%s%s, context %s\n", *s->where ? " to " : "", s->where,
                COUNT((uint64_t)s->engine.context));
    return true;
}

/* ---- an answer ---- */

typedef struct {
    Play *p;
    Stream stream; /* of the prompt and the tokens behind it */
    Reader reader; /* without a chat format only its decoder is used */
    Bytes text, thinking;
    size_t passed; /* bytes of the text that were shown; they contain no stop text */
    Wrap out;      /* the message that is shown now, if any */
    Part part;     /* which part of the model's message that is */
    size_t tokens, thought;
    double since, first, total; /* when it began; seconds until the first token, until the last */
    const char *reason;         /* why it ended */
} Answer;

volatile sig_atomic_t interrupted;
static volatile sig_atomic_t waiting; /* the terminal shows that the prompt is being read */

static void on_interrupt(int number) {
    if (waiting && !interrupted && write(STDOUT_FILENO, "^C", 2) < 0) {} /* at once: a step may take long */
    interrupted = number;
}

/* Shows until the first token that the model reads the prompt; tokens 0: ends that. */
static void show_waiting(const Play *p, size_t tokens) {
    if (!p->loop || (!tokens && !waiting) || !put_escape(stdout, ERASE_LINE)) return;
    if (tokens) {
        put_escape(stdout, FAINT);
        printf(WRAP_OFF "reading %s tokens..." WRAP_ON, COUNT(tokens));
        put_escape(stdout, NORMAL);
    }
    fflush(stdout); /* an error may follow on stderr */
    waiting = tokens;
}

static void show(Answer *a, Part part, const char *text, size_t n) {
    static const char *const label[] = {"thinking: ", "Assistant: ", "Assistant: ", "tool call: "};
    const Play *p = a->p;
    const Reader *r = &a->reader;
    const char *to = part == CALL ? r->now.recipient : NULL;
    if (part == CALL && !to) to = r->message[r->messages - 1].recipient; /* it came as a whole */
    FILE *f = p->loop || part == ANSWER ? stdout : stderr;
    if (!n || given.json || (part == REASONING && (given.hide_thinking || !isatty(fileno(f))))) return;
    show_waiting(p, 0);
    if (!a->out.f || part != a->part) {
        wrap_end(&a->out);
        a->part = part, a->out = wrap_on(f, part == REASONING || part == CALL ? FAINT : NULL);
        if (p->loop || f == stderr) wrap_text(&a->out, label[part], strlen(label[part]));
        if (to) wrap_text(&a->out, to, strlen(to)), wrap_text(&a->out, " ", 1);
    }
    wrap_text(&a->out, text, n);
    fflush(f);
}

/* Adds text to the answer and shows what surely contains no stop text. An end that may begin one has to wait. */
static void add_text(Answer *a, Part part, const Bytes *text, bool last) {
    const Texts *stop = &given.stop;
    const size_t from = a->passed;
    if (part == REASONING) bytes_add(&a->thinking, text->data, text->n);
    if (part != ANSWER) show(a, part, text->data, text->n);
    if (part != ANSWER) return;
    bytes_add(&a->text, text->data, text->n);
    if (text_stops(&a->text, &a->passed, stop->text, stop->n, last)) a->reason = "stop text";
    show(a, ANSWER, a->text.data + from, a->passed - from);
}

/* Why an answer ends with this token, or NULL. `full`: the context has no room for another. */
static const char *end_reason(const Answer *a, Read read, bool full) {
    if (read.stop) return read.closed && read.part == CALL ? "tool call" : "end";
    if (interrupted) return "interrupted";
    if (settings.max_tokens && a->tokens >= (size_t)settings.max_tokens) return "token limit";
    if (ferror(stdout)) return "stdout failed";
    return full ? "context full" : NULL;
}

/* Shows what a token completes, and if the answer ends here, what was held back. */
static void take_token(Stream *t, size_t position, int token, const float *logits, bool last) {
    Answer *a = t->owner;
    const Play *p = a->p;
    LocalBytes text = {0};
    Read read = {.part = ANSWER};
    if (token == DREW_NAN) return; /* scheduler_run reports it */
    a->total = seconds() - a->since;
    if (!a->tokens++) a->first = a->total;
    if (p->chat)
        read = reader_push(&a->reader, token, &text);
    else if (!(read.stop = t->stopped))
        tokenizer_decode(p->m.tokenizer, &a->reader.decoder, token, &text);
    a->thought += read.part == REASONING;
    add_text(a, read.part, &text, read.closed);
    bool stopped = a->reason; /* by a stop text: what follows is not shown */
    if (!stopped) a->reason = end_reason(a, read, last);
    if (a->reason) {
        scheduler_remove(p->m.scheduler, t);
        text.n = 0;
        if (p->chat) read = reader_end(&a->reader, &text);
        if (!p->chat) tokenizer_flush(&a->reader.decoder, &text);
        if (!stopped) add_text(a, read.part, &text, true);
    }
}

void print_text(const Tokenizer *t, const Ids *ids) {
    LocalBytes text = {0};
    Decoder d = {0};
    Wrap exact = {.f = stdout};
    for (size_t i = 0; i < ids->n; i++) tokenizer_bytes(t, &d, ids->data[i], &text);
    wrap_text(&exact, text.data, text.n);
}

bool make_prompt(const Play *p, Ids *ids, Error *e) {
    LocalBytes text = {0};
    if (p->chat) return chat_render(&p->m.chat, &p->talk, true, ids, e);
    for (int i = 0; i < p->talk.messages; i++)
        bytes_add(&text, p->talk.message[i].content.data, p->talk.message[i].content.n);
    return tokenizer_encode(p->m.tokenizer, text.data ? text.data : "", text.n, WITH_TEMPLATE, ids, e);
}

/* Adds the answer to the conversation, even if it ended early. False: there is none, because it ended inside the
 * reasoning or a call. If nothing follows a preamble, that is the answer. */
static bool keep_answer(Answer *a, Error *e) {
    Play *p = a->p;
    Message *last = a->reader.messages ? a->reader.message + a->reader.messages - 1 : NULL;
    Part part = last ? message_part(last) : REASONING;
    const char *at = part == CALL ? "calling a tool" : "thinking", *cure = p->loop ? "; /retry tries again" : "";
    if (!p->chat) return conversation_add(&p->talk, "assistant", NULL, a->text.data, a->text.n);
    if (!strcmp(a->reason, "token limit")) cure = p->loop ? ": /set max-tokens raises it" : ": --max-tokens raises it";
    if (part == REASONING || (part == CALL && (!p->loop || strcmp(a->reason, "tool call"))))
        return fail(e, interrupted ? INTERRUPTED : FAILED, "no answer: ended while %s (%s)%s", at, a->reason, cure);
    if (part == ANSWER && !strcmp(a->reason, "stop text")) /* the conversation keeps what was shown */
        text_stops(&last->content, &(size_t){0}, given.stop.text, given.stop.n, true);
    if (part == PREAMBLE && !p->loop) add_text(a, ANSWER, &last->content, true);
    reader_take(&a->reader, &p->talk);
    return true;
}

/* Generates and shows the next message of the conversation. True if there is one, even if it is only a beginning. */
static bool answer(Answer *a, Error *e) {
    Play *p = a->p;
    Stream *t = &a->stream;
    *t = (Stream){.most = (size_t)p->m.engine.context, .sampling = settings.sampling, .want = WANT_TOKEN};
    t->take = take_token, t->owner = a;
    t->sampling.seed += p->answers++;
    if (!p->chat) t->stop = &p->m.checkpoint.stop; /* in a chat the reader knows the end */
    if (!make_prompt(p, &t->tokens, e)) return false;
    t->prompt = t->tokens.n;
    a->reader.decoder.begun = t->prompt > 1; /* more than a beginning-of-text token */
    if (p->chat) reader_init(&a->reader, &p->m.chat, &p->talk);
    show_waiting(p, t->prompt);
    a->since = seconds();
    bool ok = scheduler_run(p->m.scheduler, t, &interrupted, e) && keep_answer(a, e);
    show_waiting(p, 0);
    wrap_end(&a->out);
    return ok;
}

static double speed(const Answer *a) {
    double time = a->tokens > 1 ? a->total - a->first : a->total;
    return time > 0 ? (double)(a->tokens > 1 ? a->tokens - 1 : a->tokens) / time : 0;
}

static void print_statistics(const Answer *a, FILE *f) {
    const Play *p = a->p;
    const Engine *g = &p->m.engine;
    LocalBytes line = {0};
    const size_t prompt = a->stream.prompt;
    double read = (double)step_bytes(g->model, g->model->top_k, 1, (int)(prompt + a->tokens / 2)) * speed(a);
    bytes_print(&line, "[Generated at %.1f tokens/sec · %zu token%s", speed(a), a->tokens, a->tokens == 1 ? "" : "s");
    if (a->thought) bytes_print(&line, " (%zu thinking)", a->thought);
    bytes_print(&line, " · prompt %zu (%zu from the cache), first token %.0f ms", prompt, a->stream.reused,
                a->first * 1e3);
    if (p->bandwidth > 0) bytes_print(&line, " · %.0f%% of memory bandwidth", 100 * read / p->bandwidth);
    bytes_print(&line, " · context %zu%% · seed %llu · %s]", (prompt + a->tokens) * 100 / (size_t)g->context,
                (unsigned long long)a->stream.sampling.seed, a->reason);
    put_text(f, FAINT, "", line.data);
}

static void print_answer_json(const Answer *a) {
    const Play *p = a->p;
    json_print(json_object("model", json_word(p->m.name), "text", json_from_text(a->text.data, a->text.n), "thinking",
                           json_from_text(a->thinking.data, a->thinking.n), "reason", json_word(a->reason),
                           "prompt_tokens", json_number(a->stream.prompt), "tokens", json_number(a->tokens),
                           "thinking_tokens", json_number(a->thought), "first_token_ms", json_number(a->first * 1000),
                           "tokens_per_second", json_number(speed(a)), "seed", json_number(settings.sampling.seed),
                           NULL),
               true);
}

int converse(Play *p) {
    Error e = {0};
    Answer a = {.p = p};
    if (terminal) terminal->answering(true, p->loop);
    bool ok = answer(&a, &e);
    if (terminal) terminal->answering(false, p->loop);
    if (a.reason && given.json) print_answer_json(&a);
    if (a.reason && !given.json) print_statistics(&a, p->loop ? stdout : stderr);
    if (p->loop && (e.code == NO_ROOM || (a.reason && !strcmp(a.reason, "context full"))))
        ok = fail(&e, NO_ROOM,
                  "the context of %s tokens is full: /undo takes the last question back, /clear begins anew, "
                  "infer play --ctx chooses a larger one",
                  COUNT((uint64_t)p->m.engine.context));
    if (!ok && (!p->loop || e.code == GPU_FAULT)) {
        if (p->loop && terminal) terminal->leave();
        die(&e);
    }
    if (!ok) put_text(stderr, RED, "", e.text);
    if (p->loop) puts("");
    ids_free(&a.stream.tokens);
    reader_free(&a.reader);
    bytes_free(&a.text);
    bytes_free(&a.thinking);
    return ok && !strcmp(a.reason, "interrupted") ? INTERRUPTED : DONE;
}

/* ---- play ---- */

/* The prompt from -p, -f and stdin; without any there is a loop. */
static bool read_prompt(Play *p, Bytes *text, Error *e) {
    const bool reads = given.file || !isatty(STDIN_FILENO);
    LocalBytes piped = {0};
    p->loop = !given.prompt && !reads;
    if (given.prompt && given.file) return fail(e, USAGE, "give the prompt with -p or with -f, not with both");
    if (given.prompt) bytes_text(text, given.prompt);
    if (reads) text_read(given.file, &piped);
    if (text->n && piped.n) bytes_text(text, "\n\n");
    bytes_add(text, piped.data, piped.n);
    if (p->loop && (given.json || !isatty(STDOUT_FILENO)))
        return fail(e, USAGE, "a conversation needs a terminal; give the prompt with -p, -f or on stdin");
    if (!p->loop && !text->n && !given.prompt) return fail(e, USAGE, "the prompt is empty");
    return check_text("the prompt", text->data, text->n, e);
}

/* The loop without terminal/: a line is a question. */
static int plain_loop(Play *p) {
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    while (printf("You: "), fflush(stdout), interrupted = 0, (n = getline(&line, &room, stdin)) >= 0) {
        Error e;
        n -= n && line[n - 1] == '\n';
        if (!check_text("the text", line, (size_t)n, &e)) {
            put_text(stderr, RED, "", e.text);
        } else if (strspn(line, " \t\n") < (size_t)n) {
            conversation_add(&p->talk, "user", NULL, line, (size_t)n);
            converse(p);
        }
    }
    puts("");
    free(line);
    return DONE;
}

static bool open_play(Play *p, const char *model, Error *e) {
    if (!session_open(&p->m, model, NEED_TOKENIZER | NEED_CHECKPOINT, e)) return false;
    p->chat = p->m.has_chat && !given.raw;
    if (!p->chat && (given.system || given.effort))
        return fail(e, USAGE, "--system and --effort need a chat format, but %s is continued raw", p->m.name);
    if (given.effort && !chat_effort(&p->m.chat, given.effort, e)) return false;
    conversation_init(&p->talk);
    if (given.system) conversation_set(&p->talk.instructions, given.system);
    if (given.effort) conversation_set(&p->talk.effort, given.effort);
    if (given.date) conversation_set(&p->talk.date, strcmp(given.date, "none") ? given.date : NULL);
    if (!session_load(&p->m, (Limits){0}, given.context, e)) return false;
    uint64_t bytes = step_bytes(p->m.engine.model, p->m.engine.model->top_k, 1, 0);
    double flat = backend->flat_read(p->m.engine.state, bytes);
    p->bandwidth = flat > 0 ? (double)bytes / flat : 0;
    if (!p->chat && !given.raw) fprintf(stderr, "  %s: your text is continued as it stands.\n", p->m.no_chat.text);
    return true;
}

static int run_play(const char *model) {
    Error e;
    LocalBytes prompt = {0};
    static Play p;
    p.m.quiet = given.json;
    if (!read_prompt(&p, &prompt, &e) || !open_play(&p, model, &e)) die(&e);
    bool blank = !p.loop && p.chat && strspn(prompt.data, " \t\r\n") == prompt.n;
    if (blank) fail(&e, USAGE, "the prompt is empty"), die(&e);
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt, .sa_flags = SA_RESTART}, NULL);
    if (!p.loop) conversation_add(&p.talk, "user", NULL, prompt.data, prompt.n);
    if (!p.loop) return converse(&p);
    return terminal ? terminal->loop(&p) : plain_loop(&p);
}

const Command play = {"play",
                      "[MODEL]",
                      "talk to a model in the terminal; with -p, -f or a text on stdin: one answer, alone on stdout",
                      {play_options, settings_options, load_options},
                      run_play};

/* ---- tokenize, detokenize, render, parse: stdin to stdout ---- */

typedef struct {
    Session s;
    Bytes in;
    Ids ids;
    Error e;
} Filter;

static void filter_open(Filter *f, const char *model, int need) {
    if (!session_open(&f->s, model, need, &f->e)) die(&f->e);
    text_read(NULL, &f->in);
}

/* Token ids below `vocab` from text like "1, 2 3" or "[1,2,3]". */
static bool parse_ids(const char *text, int vocab, Ids *out, Error *e) {
    static const char separators[] = " ,[]\t\r\n";
    for (const char *s = text + strspn(text, separators); *s; s += strspn(s, separators)) {
        char *end;
        long id = strtol(s, &end, 10);
        if (end == s || (*end && !strchr(separators, *end)) || id < 0)
            return fail(e, USAGE, "a token id must be a whole number, not '%.*s'", (int)strcspn(s, separators), s);
        if (id >= vocab) return fail(e, USAGE, "token %ld is outside the vocabulary of %d", id, vocab);
        ids_add(out, (int)id);
        s = end;
    }
    return true;
}

/* The ids on stdin. */
static void read_ids(Filter *f, int vocab) {
    if (strlen(f->in.data) < f->in.n) fail(&f->e, USAGE, "stdin: a NUL stands among the ids"), die(&f->e);
    if (!parse_ids(f->in.data, vocab, &f->ids, &f->e)) die(&f->e);
}

static void print_ids(const Ids *ids) {
    for (size_t i = 0; i < ids->n; i++) printf("%c%d", i ? ',' : '[', ids->data[i]);
    puts(ids->n ? "]" : "[]");
}

static struct { bool jsonl, special, as_ids; } filter;

static bool tokenize_text(Filter *f, const char *text, size_t n) {
    f->ids.n = 0;
    if (!tokenizer_encode(f->s.tokenizer, text, n, filter.special ? CONTROL_TOKENS | WITH_TEMPLATE : 0, &f->ids, &f->e))
        return false;
    return print_ids(&f->ids), true;
}

static int run_tokenize(const char *model) {
    static Filter f;
    int code = DONE, number = 1;
    filter_open(&f, model, NEED_TOKENIZER);
    if (!filter.jsonl && !tokenize_text(&f, f.in.data, f.in.n)) die(&f.e);
    for (char *line = f.in.data, *end = line + f.in.n; filter.jsonl && line < end; number++) {
        char *stop = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)((stop ? stop : end) - line);
        LocalText name = text_print("stdin, line %d", number);
        LocalJson json = json_parse(line, n, name, &f.e);
        const char *text = cJSON_GetStringValue(json);
        if (json && !text) fail(&f.e, USAGE, "%s: a JSON string is needed", name);
        if (!text || !tokenize_text(&f, text, strlen(text))) {
            fprintf(stderr, "infer: %s\n", f.e.text);
            puts("null"); /* so that lines keep their numbers */
            code = USAGE;
        }
        line += n + 1;
    }
    return code;
}

static int run_detokenize(const char *model) {
    static Filter f;
    filter_open(&f, model, NEED_TOKENIZER);
    read_ids(&f, tokenizer_size(f.s.tokenizer));
    print_text(f.s.tokenizer, &f.ids);
    return DONE;
}

static int run_render(const char *model) {
    static Filter f;
    LOCAL(conversation_free) Conversation conversation = {0};
    filter_open(&f, model, NEED_CHAT);
    LocalJson json = json_parse(f.in.data, f.in.n, "stdin", &f.e);
    if (!json) f.e.code = USAGE, die(&f.e);
    const cJSON *prompt = json_get(json, "add_generation_prompt");
    conversation_init(&conversation);
    if (!conversation_parse(&conversation, json, &f.e) ||
        !chat_render(&f.s.chat, &conversation, !prompt || cJSON_IsTrue(prompt), &f.ids, &f.e))
        die(&f.e);
    filter.as_ids ? print_ids(&f.ids) : print_text(f.s.tokenizer, &f.ids);
    return DONE;
}

static int run_parse(const char *model) {
    static Filter f;
    LOCAL(reader_free) Reader reader = {0};
    filter_open(&f, model, NEED_CHAT);
    read_ids(&f, INT32_MAX);
    reader_init(&reader, &f.s.chat, NULL);
    for (size_t i = 0; i < f.ids.n; i++) reader_push(&reader, f.ids.data[i], NULL);
    reader_end(&reader, NULL);
    for (int i = 0; i < reader.messages; i++) json_print(message_json(reader.message + i), true);
    if (reader.repairs) fprintf(stderr, "infer: %d repair%s\n", reader.repairs, reader.repairs == 1 ? "" : "s");
    return DONE;
}

static const Option tokenize_options[] = {
    {0, "jsonl", NULL, SWITCH, &filter.jsonl,
     .help = "each line of stdin is a JSON string and gives one line of output; null if it is refused"},
    {0, "special", NULL, SWITCH, &filter.special,
     .help = "names of control tokens become control tokens, and the tokenizer's template is added"},
    {0}};
static const Option render_options[] = {
    {0, "ids", NULL, SWITCH, &filter.as_ids, .help = "as a JSON array of token ids instead of text"}, {0}};
const Command tokenize = {
    "tokenize", "MODEL", "the text on stdin to token ids, a JSON array", {tokenize_options}, run_tokenize};
const Command detokenize = {
    "detokenize", "MODEL", "token ids on stdin, numbers or a JSON array, to text", {NULL}, run_detokenize};
const Command render = {"render",
                        "MODEL",
                        "the conversation on stdin, JSON of chat completions, as the prompt that the model reads",
                        {render_options},
                        run_render};
const Command parse = {
    "parse", "MODEL", "sampled token ids on stdin as messages, a line of JSON each", {NULL}, run_parse};

/* ---- logits ---- */

enum { NPY_HEADER = 128 }; /* bytes */

static struct { /* the text of logits and explain */
    const char *prompt, *ids;
} text_given;
const Option text_options[] = {{'p', "prompt", "TEXT", TEXT, &text_given.prompt,
                                .help = "the text; a beginning-of-text token is added if the tokenizer wants one"},
                               {0, "ids", "1,2,3", TEXT, &text_given.ids, .help = "the text as token ids, exactly"},
                               {0}};

bool session_text(Session *s, const char *model, Ids *ids, Error *e) {
    const Model *m = &s->checkpoint.model;
    const char *text = text_given.prompt;
    if (!text == !text_given.ids) return fail(e, USAGE, "either -p TEXT or --ids is needed; see --help");
    if (!session_open(s, model, NEED_CHECKPOINT | (text ? NEED_TOKENIZER : USE_TOKENIZER), e)) return false;
    if (!(text ? tokenizer_encode(s->tokenizer, text, strlen(text), WITH_TEMPLATE, ids, e)
               : parse_ids(text_given.ids, m->vocab, ids, e)))
        return false;
    if (!ids->n) return fail(e, USAGE, "the prompt is empty");
    return ids->n <= (size_t)m->context ||
           fail(e, USAGE, "the prompt has %zu tokens, the model's context is %d", ids->n, m->context);
}

/* Writes the header of NumPy's format 1.0. Rows of floats follow. */
static void put_npy_header(FILE *f, size_t rows, int cols) {
    fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, f); /* 118 bytes of header follow */
    const int n = fprintf(f, "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %d), }", rows, cols);
    fprintf(f, "%*s\n", 117 - n, "");
}

int likeliest(const float *logits, int vocab, int n, int *ids) {
    int have = 0;
    for (int i = 0; i < vocab; i++) {
        if (have == n && !(n && logits[i] > logits[ids[n - 1]])) continue;
        int at = have < n ? have++ : n - 1;
        for (; at && logits[i] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = i;
    }
    return have;
}

static void print_top(const float *logits, int vocab, int top, const Tokenizer *t) {
    double all = log_sum_exp(logits, vocab);
    int *best = allocate((size_t)vocab * sizeof *best), n = likeliest(logits, vocab, top, best);
    for (int k = 0; k < n; k++) {
        Decoder d = {.begun = true};
        LocalBytes text = {0};
        if (t) tokenizer_decode(t, &d, best[k], &text);
        tokenizer_flush(&d, &text);
        double logit = (double)logits[best[k]];
        printf("%7d %10.4f %8.5f  ", best[k], logit, exp(logit - all));
        json_print(json_from_text(text.data, text.n), true);
    }
    free(best);
}

static struct {
    Session s;
    bool all;
    int top;
    const char *output, *tap;
} logit;

/* Writes the logits from which the token at `position` was drawn or would be. */
static void write_row(Stream *t, size_t position, int token, const float *logits, bool last) {
    const int vocab = logit.s.engine.model->vocab;
    if (logit.output) fwrite(logits, sizeof *logits, (size_t)vocab, stdout);
    if (logit.output || ferror(stdout)) return;
    if (logit.all) printf("after token %zu (%d):\n", position - 1, t->tokens.data[position - 1]);
    print_top(logits, vocab, logit.top, logit.s.tokenizer);
}

/* A Tap: appends rows to the file of the stage. A prompt of several steps calls it several times. */
static void tap_to_file(void *data, const char *stage, int layer, const float *values, int rows, int cols) {
    const size_t row = sizeof *values * (size_t)cols;
    LocalText path = text_print("%s/%s.%d.npy", logit.tap, stage, layer);
    struct stat old = {0};
    Error e;
    FILE *f = fopen(path, stat(path, &old) ? "wb" : "r+b");
    const size_t before = old.st_size ? ((size_t)old.st_size - NPY_HEADER) / row : 0;
    if (f) put_npy_header(f, before + (size_t)rows, cols);
    bool ok = f && !fseek(f, 0, SEEK_END) && fwrite(values, row, (size_t)rows, f) == (size_t)rows;
    if (f && fclose(f)) ok = false;
    if (!ok) fail(&e, FAILED, "%s: %m", path), die(&e);
}

static int run_logits(const char *model) {
    Error e;
    LocalIds ids = {0};
    Session *s = &logit.s;
    if (!session_text(s, model, &ids, &e)) die(&e);
    if (logit.tap && mkdir(logit.tap, 0777)) fail(&e, FAILED, "%s: %m; choose another name", logit.tap), die(&e);
    if (logit.tap) s->tap = tap_to_file;
    if (!session_load(s, (Limits){0}, 0, &e)) die(&e);
    if (logit.output && !output_open(logit.output, &e)) die(&e);
    const size_t from = logit.all ? 1 : ids.n;
    if (logit.output) put_npy_header(stdout, ids.n + 1 - from, s->engine.model->vocab);
    if (!scheduler_score(s->scheduler, ids.data, ids.n, from, write_row, NULL, &e)) die(&e);
    return DONE;
}

static const Option logits_options[] = {
    {0, "all", NULL, SWITCH, &logit.all, .help = "after every token of the text instead of the last"},
    {0, "top", "N", WHOLE, &logit.top, 1, 1e9, "10", "how many"},
    {'o', "output", "FILE.npy", TEXT, &logit.output,
     .help = "all logits as a float32 array (positions, vocabulary) instead"},
    {0, "tap", "DIR", TEXT, &logit.tap,
     .help = "makes a folder of the stages of each layer, STAGE.LAYER.npy: float32 arrays, a row a token"},
    {0}};
const Command logits = {"logits",
                        "MODEL",
                        "the likeliest next tokens, or all logits as a NumPy file",
                        {text_options, logits_options, load_options},
                        run_logits};

/* ---- download ---- */

static int run_download(const char *repository) {
    const char *folder = hub_fetch(repository, model_runs);
    Error e;
    puts(folder);
    if (model_entry(folder).complete && model_runs(folder, &e))
        fprintf(stderr, "infer play %.*s  talks to it\n", (int)strcspn(repository, "@"), repository);
    return DONE;
}
const Command download = {"download",
                          "REPO",
                          "fetch a model, REPO[@REVISION], or the rest of it, into the hub's cache",
                          {download_options},
                          run_download};

/* ---- main ---- */

static void print_summary(FILE *to) {
    print_row(to, "", 0, "infer runs open language models on NVIDIA GPUs.\n\n");
    for (int i = 0; commands[i]; i++) {
        LocalText name = text_print("  infer %s", commands[i]->name);
        print_row(to, name, 20, commands[i]->summary);
    }
    print_row(to, "", 0,
              "\ninfer COMMAND --help shows its options. "
              "MODEL is a folder, a GGUF file, or part of a name that infer list shows.");
}

__attribute__((weak)) int main(int argc, char **argv) { /* a test program has its own */
    bool help = argc > 1 && text_listed("help -h --help", argv[1]);
    int fd; /* no file may get the number of a closed stdout or stderr: what is printed would go into it */
    while ((fd = open("/dev/null", O_RDONLY)) >= 0 && fd <= STDERR_FILENO) {}
    close(fd);
    const char *name = argc > 1 + help ? argv[1 + help] : "";
    const char *model = NULL;
    const Command *c = NULL;
    Error e;
    uint64_t *seed = &settings.sampling.seed; /* short enough to be typed */
    if (getentropy(seed, 4)) *seed = (uint32_t)(seconds() * 1e6);
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error like a full disk */
    setlocale(LC_CTYPE, "");
    setlocale(LC_CTYPE, "C.UTF-8"); /* if there is none, the user's own stays; without UTF-8 libedit drops letters */
    for (int i = 0; commands[i]; i++)
        if (!strcmp(name, commands[i]->name)) c = commands[i];
    for (int i = 2; i < argc && strcmp(argv[i], "--"); i++) help |= text_listed("-h --help", argv[i]);
    int code = c || (help && !*name) ? DONE : USAGE;
    if (!strcmp(name, "--version"))
        code = DONE, printf("infer %s (%s)\n", VERSION, backend->name);
    else if (!c && *name)
        fprintf(stderr, "infer: there is no command %s; see infer --help\n", name);
    else if (!c)
        print_summary(help ? stdout : stderr);
    else if (help)
        print_help(c);
    else if (!parse_arguments(c, argc - 2, argv + 2, &model, &e))
        die(&e);
    else
        code = c->run(model);
    if ((fflush(stdout) || ferror(stdout)) && code == DONE) {
        fprintf(stderr, "infer: %s could not be written: its disk is full, or its reader has ended\n",
                output_file ? output_file : "the output");
        return FAILED;
    }
    return code;
}
