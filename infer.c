/* infer.c: the host program: options, the terminal, opening a model, answers, the loop (which asks for one question
 * after another), the small commands, and `main` last. It uses model.c, tokenizer.c, chat.c and the backend (infer.h).
 *
 * Data goes to stdout, everything else to stderr. A conversation in the terminal goes to stdout as a whole. Commands
 * that need no GPU never touch one. What a command opens is static: it goes with the process. */
#include "host.h"

#define Tokenizer EditTokenizer /* libedit has a type of this name, too */
#include <histedit.h>
#undef Tokenizer

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
#include <termios.h>
#include <unistd.h>
#include <wchar.h>

#ifndef BACKEND
#define BACKEND reference
#endif
#define VERSION "0.1"

const Backend *const backend = &BACKEND;

/* ---- options: one table for all commands ---- */

typedef enum { SWITCH, TEXT, TEXTS, WHOLE, WHOLES, SEED, REAL } Kind;

typedef struct {
    const char *takers; /* the commands that take it; "set" is /set in the loop */
    char letter;        /* -p, or 0 */
    const char *name;   /* --prompt */
    const char *value;  /* its value as the help names it; NULL: a switch */
    Kind kind;
    size_t field;        /* of Options */
    double least, most;  /* range of a number; TEXTS: at most so many texts */
    const char *initial; /* default value; NULL: 0 or none */
    const char *help;    /* what it does; a REAL's begins with its range and a colon */
} Option;

#define FIELD(name) offsetof(Options, name)
static const Option options[] = {
    {"play", 'p', "prompt", "TEXT", TEXT, FIELD(prompt), .help = "the prompt; a text on stdin is appended"},
    {"play", 'f', "file", "FILE", TEXT, FIELD(file), .help = "a file with the prompt; -: stdin"},
    {"play", 's', "system", "TEXT", TEXT, FIELD(system), .help = "instructions for the model"},
    {"play", 'e', "effort", "LEVEL", TEXT, FIELD(effort),
     .help = "how long it thinks: low, medium or high; none, if the model can skip it"},
    {"play set", 0, "temperature", "T", REAL, FIELD(sampling.temperature), 0, 100, "1",
     "0 to 100: randomness of the draw; below 0.01 it always takes the likeliest token"},
    {"play set", 0, "top-k", "K", WHOLE, FIELD(sampling.top_k), 0, 1e9, "0", "draw among the K likeliest; 0: all"},
    {"play set", 0, "top-p", "P", REAL, FIELD(sampling.top_p), 1e-30, 1, "1",
     "above 0, at most 1: draw among the likeliest whose probabilities add up to P"},
    {"play set", 0, "min-p", "P", REAL, FIELD(sampling.min_p), 0, 1, "0",
     "0 to 1: leave out tokens less likely than P times the likeliest"},
    {"play set", 0, "repetition-penalty", "R", REAL, FIELD(sampling.penalty), 1e-30, 100, "1",
     "above 0, at most 100: divide the scores of tokens already in the text by R; 1: off"},
    {"play set", 0, "seed", "N", SEED, FIELD(sampling.seed), 0, 9007199254740991,
     .help = "the same seed gives the same answer (random)"},
    {"play set", 0, "max-tokens", "N", WHOLE, FIELD(max_tokens), 0, 1e9, "0",
     "end an answer after N tokens; 0: only when the context is full"},
    {"play", 0, "stop", "TEXT", TEXTS, FIELD(stop), .most = 16, .help = "end an answer before TEXT; can be repeated"},
    {"play", 0, "hide-thinking", NULL, SWITCH, FIELD(hide_thinking), .help = "do not show the reasoning"},
    {"play", 0, "raw", NULL, SWITCH, FIELD(raw), .help = "continue the text without a chat format"},
    {"play", 0, "date", "D", TEXT, FIELD(date), .help = "the date in the prompt (today); none: no date"},
    {"play", 0, "json", NULL, SWITCH, FIELD(json), .help = "one answer as a JSON object"},

    {"bench", 'p', "prompts", "N,...", WHOLES, FIELD(prompts), 1, 1 << 24, "512,2048",
     "tokens of a prompt; measured until the first token"},
    {"bench", 'n', "tokens", "N", WHOLE, FIELD(tokens), 1, 1 << 20, "128", "tokens to generate"},
    {"bench", 'd', "depths", "N,...", WHOLES, FIELD(depths), 0, 1 << 24, "0,8192,32768",
     "tokens of context in front; they are not computed, as their values do not matter"},
    {"bench", 'b', "streams", "N,...", WHOLES, FIELD(streams), 1, MOST_STREAMS, "1,4,16", "streams at once"},
    {"bench", 'r', "repeats", "N", WHOLE, FIELD(repeats), 1, MOST_REPEATS, "5", "repeats"},
    {"bench", 0, "encoding", "NAME", TEXT, FIELD(encoding),
     .help = "of random weights: fp8, int8, packed4, gptq4, awq4, nvfp4, q8_0, q4_k_m, ... (bf16; gpt-oss's experts "
             "are mxfp4)"},
    {"bench", 0, "serve", "URL", TEXT, FIELD(server),
     .help = "measure a server with OpenAI's API instead of this GPU: http://HOST:PORT, without /v1"},
    {"bench", 'c', "clients", "N,...", WHOLES, FIELD(clients), 1, MOST_CLIENTS, "1,8,64,256",
     "with --serve: clients at once; each sends r requests, one after another"},
    {"bench", 'o', "output", "FORMAT", TEXT, FIELD(format), .initial = "md", .help = "md, a table, or json"},

    {"logits explain", 'p', "prompt", "TEXT", TEXT, FIELD(prompt),
     .help = "the text; a beginning-of-text token is added if the tokenizer wants one"},
    {"logits explain", 0, "ids", "1,2,3", TEXT, FIELD(ids), .help = "the text as token ids, exactly"},
    {"logits", 0, "all", NULL, SWITCH, FIELD(all), .help = "after every token of the text instead of the last"},
    {"logits", 0, "top", "N", WHOLE, FIELD(top), 1, 1e9, "10", "how many"},
    {"logits", 'o', "output", "FILE.npy", TEXT, FIELD(output),
     .help = "all logits as a float32 array (positions, vocabulary) instead"},
    {"logits", 0, "tap", "DIR", TEXT, FIELD(tap),
     .help = "makes a folder of the stages of each layer, STAGE.LAYER.npy: float32 arrays, a row a token"},
    {"explain", 'o', "output", "FILE.html", TEXT, FIELD(output), .help = "write a page that needs no other file"},

    {"perplexity", 'f', "file", "FILE", TEXT, FIELD(file),
     .help = "the text; -: stdin; a beginning-of-text token is added if the tokenizer wants one"},
    {"perplexity", 0, "ctx", "N", WHOLE, FIELD(context), 2, 1 << 24,
     .help = "tokens of a window (1024, or the model's context if that is less)"},
    {"perplexity", 0, "stride", "N", WHOLE, FIELD(stride), 1, 1 << 24,
     .help = "tokens from one window to the next (half a window); each token is scored in the first window that has "
             "it, so those after the first window see at least ctx - stride tokens before them"},

    {"serve", 0, "host", "ADDRESS", TEXT, FIELD(host), .initial = "127.0.0.1",
     .help = "where to listen; any but localhost, 127.0.0.1 and ::1 needs a key (INFER_API_KEY)"},
    {"serve", 0, "port", "N", WHOLE, FIELD(port), 0, 65535, "8080", "the port; 0: any free one"},
    {"serve", 0, "insecure", NULL, SWITCH, FIELD(insecure), .help = "listen on any address without a key"},
    {"serve", 0, "cors", "ORIGIN", TEXT, FIELD(cors),
     .help = "web pages of this origin, such as http://localhost:3000, may send requests; *: all pages"},
    {"serve", 0, "name", "NAME", TEXT, FIELD(alias),
     .help = "what clients call the model (MODEL as given; of a path the last part)"},
    {"serve", 0, "streams", "N", WHOLE, FIELD(slots), 1, MOST_STREAMS, "256", "answers at once"},
    {"serve", 0, "queue", "N", WHOLE, FIELD(queue), 0, 1 << 16, "64", "answers that may wait beyond those"},
    {"serve", 0, "cache", "N", WHOLE, FIELD(cache), 0, 1e9, "0",
     "tokens in the cache, for all answers and kept prefixes together; 0: what fits"},
    {"serve", 0, "chunk", "N", WHOLE, FIELD(chunk), 1, 65535, "640",
     "tokens of a step, or 6 for each answer if that is more: longer steps read prompts sooner, but other answers wait "
     "longer for each token"},

    {"download", 0, "include", "G", TEXTS, FIELD(include), .most = MOST_VALUES,
     .help = "fetch files that match the pattern, instead of the usual ones; can be repeated"},
    {"download", 0, "exclude", "G", TEXTS, FIELD(exclude), .most = MOST_VALUES,
     .help = "skip files that match the pattern; can be repeated"},
    {"download", 0, "all", NULL, SWITCH, FIELD(all), .help = "fetch all files"},
    {"download", 0, "token-file", "F", TEXT, FIELD(token_file),
     .help = "a file with your account's token, for private and gated repositories; else HF_TOKEN, HF_TOKEN_PATH or "
             "$HF_HOME/token. It is sent to the hub only"},
    {"download", 0, "jobs", "N", WHOLE, FIELD(jobs), 1, 64, "8", "files at once"},

    {"tokenize", 0, "jsonl", NULL, SWITCH, FIELD(jsonl),
     .help = "each line of stdin is a JSON string and gives one line of output; null if it is refused"},
    {"tokenize", 0, "special", NULL, SWITCH, FIELD(special),
     .help = "names of control tokens become control tokens, and the tokenizer's template is added"},
    {"render", 0, "ids", NULL, SWITCH, FIELD(as_ids), .help = "as a JSON array of token ids instead of text"},
    {"list inspect", 0, "json", NULL, SWITCH, FIELD(json), .help = "as JSON"},
    {"play inspect serve", 0, "ctx", "N", WHOLE, FIELD(context), 1, 1 << 24,
     .help = "tokens of context (as many as the model and the memory allow)"},
    {"play bench logits explain perplexity serve", 0, "gpu", "N", WHOLE, FIELD(gpu), 0, MAX_GPUS - 1, "0", "which GPU"},
    {"play bench logits explain perplexity serve", 0, "plain", NULL, SWITCH, FIELD(plain),
     .help = "use the plain kernels only, even where fast ones exist"},
};
enum { OPTIONS = sizeof options / sizeof *options };

typedef struct {
    const char *name, *argument; /* argument: "MODEL", "[MODEL]" if it may be left out, or "" */
    int (*run)(const Options *o);
    const char *summary;
} Command;

static bool check_text(const char *what, const char *text, size_t n, Error *e) {
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

/* Stores an option's value. TEXT and TEXTS keep the pointer `text`, not a copy. text: NULL for a switch. */
static bool option_set(Options *o, const Option *option, const char *text, Error *e) {
    void *field = (char *)o + option->field;
    const char *at = text;
    Numbers *numbers = field;
    Texts *texts = field;
    double x = 0;
    if (option->kind == SWITCH) return *(bool *)field = true;
    if (!check_text("the value", text, strlen(text), e)) return fail(e, USAGE, "--%s: %s", option->name, e->text);
    if (option->kind == TEXT) return *(const char **)field = text, true;
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
    if (option->kind == WHOLE) *(int *)field = (int)x;
    if (option->kind == SEED) *(uint64_t *)field = (uint64_t)x;
    if (option->kind == REAL) *(float *)field = x < 1e-30 ? 0 : (float)x;
    return true;
}

/* The option of a command that has this name or, if n is 1, this letter; or NULL. */
static const Option *option_find(const char *command, const char *name, size_t n) {
    for (const Option *o = options; o < options + OPTIONS; o++)
        if (strstr(o->takers, command) &&
            (n == 1 ? o->letter == *name : strlen(o->name) == n && !strncmp(o->name, name, n)))
            return o;
    return NULL;
}

/* Reads the option at argv[*i]: -x VALUE, -xVALUE, --name VALUE, --name=VALUE or a switch. Messages never show the
 * value of an unknown option, which may be a secret. */
static bool parse_option(const Command *c, int argc, char **argv, int *i, Options *o, Error *e) {
    bool is_long = argv[*i][1] == '-';
    const char *name = argv[*i] + 1 + is_long, *value = name + (is_long ? strcspn(name, "=") : 1);
    size_t n = (size_t)(value - name);
    const Option *option = (n > 1) == is_long ? option_find(c->name, name, n) : NULL;
    if (!option)
        return fail(e, USAGE, "there is no option %.*s; see infer %s --help", (int)n + 1 + is_long, argv[*i], c->name);
    if (option->kind == SWITCH && *value) return fail(e, USAGE, "--%s takes no value", option->name);
    if (option->kind == SWITCH) return option_set(o, option, NULL, e);
    if (*value) return option_set(o, option, value + is_long, e); /* behind the '=' */
    if (++*i == argc) return fail(e, USAGE, "--%s needs a value; see infer %s --help", option->name, c->name);
    return option_set(o, option, argv[*i], e);
}

/* Reads all arguments behind the command's name. */
static bool parse_arguments(const Command *c, int argc, char **argv, Options *o, Error *e) {
    bool options_end = false, optional = *c->argument == '[';
    const char *word = c->argument + optional; /* without brackets */
    for (const Option *option = options; option < options + OPTIONS; option++)
        if (strstr(option->takers, c->name) && option->initial) option_set(o, option, option->initial, e);
    for (int i = 0; i < argc; i++) {
        if (!options_end && argv[i][0] == '-' && argv[i][1]) {
            options_end = !strcmp(argv[i], "--");
            if (!options_end && !parse_option(c, argc, argv, &i, o, e)) return false;
        } else if (o->model || !*word) {
            const char *shown = strncmp(argv[i], "hf_", 3) ? argv[i] : "hf_..."; /* a token is never shown */
            return fail(e, USAGE, "'%.60s' is one argument too many; see infer %s --help", shown, c->name);
        } else {
            o->model = argv[i];
        }
    }
    return !*word || optional || o->model || fail(e, USAGE, "%s is missing; see infer %s --help", word, c->name);
}

/* ---- the terminal ---- */

int columns(FILE *f) {
    struct winsize size;
    return !ioctl(fileno(f), TIOCGWINSZ, &size) && size.ws_col ? size.ws_col : 80;
}

#define DIM          "\033[2m"
#define RED          "\033[31m"
#define NORMAL       "\033[0m"
#define ERASE_LINE   "\r\033[K"
#define BRACKETS_ON  "\033[?2004h" /* pasted text arrives between \033[200~ and \033[201~ */
#define BRACKETS_OFF "\033[?2004l"

bool put_escape(FILE *f, const char *escape) {
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    bool colour = escape[strlen(escape) - 1] == 'm';
    bool wanted = isatty(fileno(f)) && term && strcmp(term, "dumb") && !(colour && no_color && *no_color);
    if (wanted) fputs(escape, f);
    return wanted;
}

/* Writes text that arrives in pieces and breaks its lines between words: a word waits until it is complete. */
typedef struct {
    FILE *f;           /* NULL: nothing was written */
    const char *style; /* DIM, RED or NULL */
    int width, indent; /* columns of a line, 0: no breaks; spaces that begin a line behind a break */
    int column, cells; /* columns of the line so far, and of the waiting word */
    int spaces;        /* they wait in front of the word; a break takes their place */
    Bytes word;
    char last; /* byte of the text so far */
} Wrap;

static Wrap wrap_on(FILE *f, const char *style) {
    return (Wrap){.f = f, .style = style, .width = isatty(fileno(f)) ? columns(f) : 0};
}

static void wrap_word(Wrap *w) {
    const int begin = w->column + w->spaces;
    const bool fits = begin + w->cells <= w->width || begin <= w->indent;
    fprintf(w->f, "%s%*s%s", fits ? "" : "\n", fits ? w->spaces : w->indent, "", w->word.data);
    w->column = (fits ? begin : w->indent) + w->cells;
    w->word.n = 0, w->cells = w->spaces = 0;
}

/* On a terminal no escape sequence of the text takes effect: it may come from a model or a file. */
static void wrap_text(Wrap *w, const char *text, size_t n) {
    LocalBytes shown = {0};
    if (n) w->last = text[n - 1];
    if (w->style) put_escape(w->f, w->style);
    isatty(fileno(w->f)) ? bytes_shown(&shown, text, n, true) : bytes_add(&shown, text, n);
    if (!w->width) fwrite(shown.data ? shown.data : "", 1, shown.n, w->f);
    for (size_t i = 0; w->width && i < shown.n;) {
        char c = shown.data[i];
        uint32_t cp;
        int length = abs(utf8_decode(shown.data + i, shown.n - i, &cp)), cells = wcwidth((wchar_t)cp);
        if (strchr(" \n\t", c)) {
            if (w->word.n) wrap_word(w);
            if (c == '\t') fprintf(w->f, "%*s\t", w->spaces, ""), w->column = ((w->column + w->spaces) | 7) + 1;
            if (c == '\n') fputc(c, w->f), w->column = 0;
            w->spaces = c == ' ' ? w->spaces + 1 : 0;
        } else {
            bytes_add(&w->word, shown.data + i, (size_t)length);
            w->cells += MAX(cells, 0);
            if (cells == 2 || w->cells >= w->width) wrap_word(w); /* scripts without spaces, long words */
        }
        i += (size_t)length;
    }
    if (w->style) put_escape(w->f, NORMAL);
}

/* Ends the text with a line break, unless it ends in one. A break writes the waiting word. */
static void wrap_end(Wrap *w) {
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

/* Prints a name and a paragraph. If the window is wide enough, the paragraph begins at `column`. */
static void print_row(FILE *f, const char *name, int column, const char *text) {
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
    for (const Option *o = options; o < options + OPTIONS; o++) {
        const char letter[] = {'-', o->letter, ',', 0}, *value = o->value ? o->value : "";
        if (!strstr(o->takers, c->name)) continue;
        LocalText name = text_print("  %3s --%s %s", o->letter ? letter : "", o->name, value);
        LocalText text = text_print(o->initial ? "%s (%s)" : "%s", o->help, o->initial);
        print_row(stdout, name, 29, text);
    }
    print_row(stdout, "", 0, "The manual says more: man infer, or man ./infer.1.");
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
        const char *state = !m->known ? "  not supported" : m->complete ? "" : "  incomplete";
        LocalText row =
            text_print("%3d. %-36s %8s  %s%s", (int)(m - list) + 1, m->name, SIZE(m->bytes), m->encoding, state);
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

/* Opens config and weights if they are needed, and always a GGUF file's metadata, which has the tokenizer. */
static bool open_checkpoint(Session *s, const Options *o, int need, Error *e) {
    if (!(need & (NEED_CHECKPOINT | NEED_SHAPES)))
        return !gguf_named(s->dir) || tensors_open(&s->checkpoint.tensors, s->dir, e);
    LocalText whole = text_print("%s/model.safetensors", s->dir);
    LocalText index = text_print("%s.index.json", whole);
    const bool weights = file_exists(whole) || file_exists(index) || gguf_named(s->dir);
    if (weights && o->encoding)
        return fail(e, USAGE, "%s has weights; --encoding is for a directory that has only config.json", s->dir);
    if (weights || need & NEED_CHECKPOINT) return checkpoint_open(&s->checkpoint, s->dir, e);
    return checkpoint_make_up(&s->checkpoint, s->dir, o->encoding, e);
}

static bool open_tokenizer(Session *s, bool may_lack, Error *e) {
    const cJSON *gguf = s->checkpoint.tensors.metadata;
    LocalText path = text_print(gguf ? "%s" : "%s/tokenizer.json", s->dir);
    const int vocab = s->checkpoint.model.vocab;
    if (may_lack && !file_exists(path)) return true;
    if (access(path, F_OK))
        return fail(e, BAD_MODEL, "%s: missing: is the model's download incomplete? infer download goes on", path);
    s->tokenizer = tokenizer_open(path, gguf, e);
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

bool session_open(Session *s, const Options *o, int need, Error *e) {
    bool tokenizer = need & (NEED_TOKENIZER | NEED_CHAT);
    *s = (Session){0};
    if (o->model && !(s->dir = model_get(o->model, e))) return false;
    if (o->model) s->name = text_print("%s", o->model);
    if (!o->model && !choose_model(s, e)) return false;
    if (!open_checkpoint(s, o, need, e)) return false;
    if ((tokenizer || need & USE_TOKENIZER) && !open_tokenizer(s, !tokenizer, e)) return false;
    if (s->tokenizer) s->has_chat = chat_open(&s->chat, s->tokenizer, tokenizer_template(s->tokenizer), &s->no_chat);
    if (!s->has_chat) fail(&s->no_chat, BAD_MODEL, "%s has no chat format: %s", s->name, s->no_chat.text);
    if (s->tokenizer && s->checkpoint.tensors.metadata) add_stops(s);
    if (need & NEED_CHAT && !s->has_chat) return *e = s->no_chat, false;
    return true;
}

bool session_load(Session *s, const Options *o, int context, Error *e) {
    bool verbose = isatty(STDERR_FILENO) && !o->json;
    Limits limits = {.gpu = o->gpu, .plain = o->plain, .cache = o->cache, .tap = s->tap, .tap_data = s->tap_data};
    limits.where = s->where;
    limits.progress = verbose ? show_progress : NULL;
    limits.max_tokens = o->chunk ? o->chunk : backend->prompt_step;
    limits.max_seqs = MAX(o->slots, 1);
    for (int i = 0; i < o->streams.n; i++) limits.max_seqs = MAX(limits.max_seqs, o->streams.value[i]);
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

enum { MOST_PROMPT = 64 << 20 };

typedef struct {
    Options o; /* a copy, which /set changes */
    Session m;
    bool chat, loop;   /* chat: in a chat format; loop: in a terminal, for more than one prompt */
    Conversation talk; /* without a chat format: texts that follow each other */
    uint64_t answers;  /* since the seed was set; answer i, counted from 0, draws with the seed plus i */
    double bandwidth;  /* bytes a second that the model's memory can be read at; 0: unknown */
    char *file;        /* the conversation was last saved to it or loaded from it */
} Play;

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

static volatile sig_atomic_t interrupted; /* Ctrl+C was pressed since the last line was begun */
static volatile sig_atomic_t waiting;     /* the terminal shows that the prompt is being read */

static void on_interrupt(int number) {
    if (waiting && !interrupted && write(STDOUT_FILENO, "^C", 2) < 0) {} /* at once: a step may take long */
    interrupted = number;
}

/* Shows until the first token that the model reads the prompt; tokens 0: ends that. */
static void show_waiting(const Play *p, size_t tokens) {
    if (!p->loop || (!tokens && !waiting) || !put_escape(stdout, ERASE_LINE)) return;
    if (tokens) {
        put_escape(stdout, DIM);
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
    if (!n || p->o.json || (part == REASONING && (p->o.hide_thinking || !isatty(fileno(f))))) return;
    show_waiting(p, 0);
    if (!a->out.f || part != a->part) {
        wrap_end(&a->out);
        a->part = part, a->out = wrap_on(f, part == REASONING || part == CALL ? DIM : NULL);
        if (p->loop || f == stderr) wrap_text(&a->out, label[part], strlen(label[part]));
        if (to) wrap_text(&a->out, to, strlen(to)), wrap_text(&a->out, " ", 1);
    }
    wrap_text(&a->out, text, n);
    fflush(f);
}

/* Adds text to the answer and shows what surely contains no stop text. An end that may begin one has to wait. */
static void add_text(Answer *a, Part part, const Bytes *text, bool last) {
    const Texts *stop = &a->p->o.stop;
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
    const Options *o = &a->p->o;
    if (read.stop) return read.closed && read.part == CALL ? "tool call" : "end";
    if (interrupted) return "interrupted";
    if (o->max_tokens && a->tokens >= (size_t)o->max_tokens) return "token limit";
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

/* Prints the text of tokens exactly, but on a terminal without escape sequences. */
static void print_text(const Tokenizer *t, const Ids *ids) {
    LocalBytes text = {0};
    Decoder d = {0};
    Wrap exact = {.f = stdout};
    for (size_t i = 0; i < ids->n; i++) tokenizer_bytes(t, &d, ids->data[i], &text);
    wrap_text(&exact, text.data, text.n);
}

/* Makes the tokens that the model reads before its next answer. */
static bool make_prompt(const Play *p, Ids *ids, Error *e) {
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
        text_stops(&last->content, &(size_t){0}, p->o.stop.text, p->o.stop.n, true);
    if (part == PREAMBLE && !p->loop) add_text(a, ANSWER, &last->content, true);
    reader_take(&a->reader, &p->talk);
    return true;
}

/* Generates and shows the next message of the conversation. True if there is one, even if it is only a beginning. */
static bool answer(Answer *a, Error *e) {
    Play *p = a->p;
    Stream *t = &a->stream;
    *t = (Stream){.most = (size_t)p->m.engine.context, .sampling = p->o.sampling, .want = WANT_TOKEN};
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
    put_text(f, DIM, "", line.data);
}

static void print_answer_json(const Answer *a) {
    const Play *p = a->p;
    json_print(json_object("model", json_word(p->m.name), "text", json_from_text(a->text.data, a->text.n), "thinking",
                           json_from_text(a->thinking.data, a->thinking.n), "reason", json_word(a->reason),
                           "prompt_tokens", json_number(a->stream.prompt), "tokens", json_number(a->tokens),
                           "thinking_tokens", json_number(a->thought), "first_token_ms", json_number(a->first * 1000),
                           "tokens_per_second", json_number(speed(a)), "seed", json_number(p->o.sampling.seed), NULL),
               true);
}

/* ---- the loop: lines from the terminal, by libedit ---- */

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
    struct termios mode;
    const tcflag_t echo = loop ? ECHO : 0;
    const pid_t front = tcgetpgrp(STDOUT_FILENO);
    if (loop) sigaction(SIGTSTP, &stop, NULL);
    if ((front >= 0 && front != getpgrp()) || tcgetattr(STDOUT_FILENO, &mode))
        return; /* it would stop a background job */
    mode.c_lflag = on ? (mode.c_lflag & ~echo) | NOFLSH : (mode.c_lflag | echo) & ~(tcflag_t)NOFLSH;
    tcsetattr(STDOUT_FILENO, TCSANOW, &mode);
}

/* Ctrl+Z while a loop writes an answer: the shell gets the terminal as it was. A handler cannot use stdio. */
static void suspend(int number) {
    const int error = errno;
    set_answering(false, true);
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
    if (!home) return;
    char *path = editor.path = text_print("%s/.cache/infer/history", home);
    for (char *c = path + strlen(home); (c = strchr(c + 1, '/')); *c = '/') *c = 0, mkdir(path, 0700);
    const int texts = history(editor.history, &event, H_LOAD, path); /* it keeps the last HISTORY */
    if (texts < 0 && !stat(path, &file) && file.st_size) {
        fprintf(stderr, "infer: %s is no history that can be read: it stays as it is, and gets no new lines\n", path);
        free(path), editor.path = NULL;
    } else if (texts < 0 || texts > 10 * HISTORY) {
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

/* ---- the loop: commands ---- */

/* Answers the conversation. Returns the exit code. */
static int converse(Play *p) {
    Error e = {0};
    Answer a = {.p = p};
    set_answering(true, p->loop);
    bool ok = answer(&a, &e);
    set_answering(false, p->loop);
    if (a.reason && p->o.json) print_answer_json(&a);
    if (a.reason && !p->o.json) print_statistics(&a, p->loop ? stdout : stderr);
    if (p->loop && (e.code == NO_ROOM || (a.reason && !strcmp(a.reason, "context full"))))
        ok = fail(&e, NO_ROOM,
                  "the context of %s tokens is full: /undo takes the last question back, /clear begins anew, "
                  "infer play --ctx chooses a larger one",
                  COUNT((uint64_t)p->m.engine.context));
    if (!ok && (!p->loop || e.code == GPU_FAULT)) put_escape(stdout, BRACKETS_OFF), die(&e);
    if (!ok) put_text(stderr, RED, "", e.text);
    if (p->loop) puts("");
    ids_free(&a.stream.tokens);
    reader_free(&a.reader);
    bytes_free(&a.text);
    bytes_free(&a.thinking);
    return ok && !strcmp(a.reason, "interrupted") ? INTERRUPTED : DONE;
}

static bool slash_set(Play *p, const char *name, Error *e) {
    const Sampling *s = &p->o.sampling;
    size_t n = strcspn(name, " \t");
    const Option *option = n ? option_find("set", name, n) : NULL;
    if (n && !option) return fail(e, USAGE, "there is no setting '%.*s'; /set shows all", n < 40 ? (int)n : 40, name);
    if (n && !option_set(&p->o, option, name + n + strspn(name + n, " \t"), e))
        return fail(e, USAGE, "%s", e->text + strspn(e->text, "-")); /* here it is no option */
    if (n && option->kind == SEED) p->answers = 0;
    LocalText text =
        text_print("temperature %g, top-k %d, top-p %g, min-p %g, repetition-penalty %g, seed %llu, max-tokens %d",
                   (double)s->temperature, s->top_k, (double)s->top_p, (double)s->min_p, (double)s->penalty,
                   (unsigned long long)s->seed, p->o.max_tokens);
    put_text(stdout, NULL, "", text);
    return true;
}

/* /context and, with `whole`, /prompt. */
static bool slash_prompt(Play *p, bool whole, Error *e) {
    LocalIds ids = {0};
    if (!make_prompt(p, &ids, e)) return false;
    if (whole) print_text(p->m.tokenizer, &ids), puts("");
    if (!whole)
        printf("%s of %s tokens (%.1f%%)\n", COUNT(ids.n), COUNT((uint64_t)p->m.engine.context),
               100 * (double)ids.n / p->m.engine.context);
    return true;
}

/* Replaces an existing file only if it is this conversation's, and only when the new one is complete. Links stay. */
static bool slash_save(Play *p, const char *path, Error *e) {
    LocalBytes text = {0};
    LocalText there = realpath(path, NULL); /* NULL: nothing is */
    const char *file = there ? there : path;
    LocalText fresh = text_print("%s.%d", file, (int)getpid());
    LocalJson talk = conversation_json(&p->talk);
    json_written(&text, talk);
    const bool taken = there && (!p->file || strcmp(p->file, path));
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
    LocalJson json = json_read(path, MOST_PROMPT, e);
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
    if (!*name && !p->file) return fail(e, USAGE, "a file name is needed");
    if (!*name) name = p->file;
    const bool tilde = *name == '~' && strchr("/", name[1]) && home;
    LocalText path = text_print("%s%s", tilde ? home : "", name + tilde);
    bool ok = (save ? slash_save : slash_load)(p, path, e);
    if (ok) conversation_set(&p->file, path);
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

static int play_loop(Play *p) {
    LocalBytes line = {0};
    editor_open();
    print_row(stdout, "", 0, "✓ Ready for inference. /help lists the commands.");
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
    put_escape(stdout, BRACKETS_OFF); /* not before: a paste may come while an answer is written */
    el_end(editor.line);
    return DONE;
}

/* ---- play ---- */

/* The prompt from -p, -f and stdin; without any there is a loop. */
static bool read_prompt(Play *p, Bytes *text, Error *e) {
    const Options *o = &p->o;
    const bool reads = o->file || !isatty(STDIN_FILENO);
    LocalBytes given = {0};
    p->loop = !o->prompt && !reads;
    if (o->prompt && o->file) return fail(e, USAGE, "give the prompt with -p or with -f, not with both");
    if (o->prompt) bytes_text(text, o->prompt);
    if (reads) text_read(o->file, &given);
    if (text->n && given.n) bytes_text(text, "\n\n");
    bytes_add(text, given.data, given.n);
    if (p->loop && (o->json || !isatty(STDOUT_FILENO)))
        return fail(e, USAGE, "a conversation needs a terminal; give the prompt with -p, -f or on stdin");
    if (!p->loop && !text->n && !o->prompt) return fail(e, USAGE, "the prompt is empty");
    return check_text("the prompt", text->data, text->n, e);
}

static bool open_play(Play *p, Error *e) {
    const Options *o = &p->o;
    if (!session_open(&p->m, o, NEED_TOKENIZER | NEED_CHECKPOINT, e)) return false;
    p->chat = p->m.has_chat && !o->raw;
    if (!p->chat && (o->system || o->effort))
        return fail(e, USAGE, "--system and --effort need a chat format, but %s is continued raw", p->m.name);
    if (o->effort && !chat_effort(&p->m.chat, o->effort, e)) return false;
    conversation_init(&p->talk);
    if (o->system) conversation_set(&p->talk.instructions, o->system);
    if (o->effort) conversation_set(&p->talk.effort, o->effort);
    if (o->date) conversation_set(&p->talk.date, strcmp(o->date, "none") ? o->date : NULL);
    if (!session_load(&p->m, o, o->context, e)) return false;
    uint64_t bytes = step_bytes(p->m.engine.model, p->m.engine.model->top_k, 1, 0);
    double flat = backend->flat_read(p->m.engine.state, bytes);
    p->bandwidth = flat > 0 ? (double)bytes / flat : 0;
    if (!p->chat && !o->raw) fprintf(stderr, "  %s: your text is continued as it stands.\n", p->m.no_chat.text);
    return true;
}

int play(const Options *o) {
    Error e;
    LocalBytes prompt = {0};
    static Play p;
    p.o = *o;
    if (!read_prompt(&p, &prompt, &e) || !open_play(&p, &e)) die(&e);
    bool blank = !p.loop && p.chat && strspn(prompt.data, " \t\r\n") == prompt.n;
    if (blank) fail(&e, USAGE, "the prompt is empty"), die(&e);
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt, .sa_flags = SA_RESTART}, NULL);
    if (!p.loop) conversation_add(&p.talk, "user", NULL, prompt.data, prompt.n);
    return p.loop ? play_loop(&p) : converse(&p);
}

/* ---- tokenize, detokenize, render, parse: stdin to stdout ---- */

typedef struct {
    Session s;
    Bytes in;
    Ids ids;
    Error e;
} Filter;

static void filter_open(Filter *f, const Options *o, int need) {
    if (!session_open(&f->s, o, need, &f->e)) die(&f->e);
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

static bool tokenize_text(Filter *f, const Options *o, const char *text, size_t n) {
    f->ids.n = 0;
    if (!tokenizer_encode(f->s.tokenizer, text, n, o->special ? CONTROL_TOKENS | WITH_TEMPLATE : 0, &f->ids, &f->e))
        return false;
    return print_ids(&f->ids), true;
}

static int tokenize(const Options *o) {
    static Filter f;
    int code = DONE, number = 1;
    filter_open(&f, o, NEED_TOKENIZER);
    if (!o->jsonl && !tokenize_text(&f, o, f.in.data, f.in.n)) die(&f.e);
    for (char *line = f.in.data, *end = line + f.in.n; o->jsonl && line < end; number++) {
        char *stop = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)((stop ? stop : end) - line);
        LocalText name = text_print("stdin, line %d", number);
        LocalJson json = json_parse(line, n, name, &f.e);
        const char *text = cJSON_GetStringValue(json);
        if (json && !text) fail(&f.e, USAGE, "%s: a JSON string is needed", name);
        if (!text || !tokenize_text(&f, o, text, strlen(text))) {
            fprintf(stderr, "infer: %s\n", f.e.text);
            puts("null"); /* so that lines keep their numbers */
            code = USAGE;
        }
        line += n + 1;
    }
    return code;
}

static int detokenize(const Options *o) {
    static Filter f;
    filter_open(&f, o, NEED_TOKENIZER);
    read_ids(&f, tokenizer_size(f.s.tokenizer));
    print_text(f.s.tokenizer, &f.ids);
    return DONE;
}

static int render(const Options *o) {
    static Filter f;
    LOCAL(conversation_free) Conversation conversation = {0};
    filter_open(&f, o, NEED_CHAT);
    LocalJson json = json_parse(f.in.data, f.in.n, "stdin", &f.e);
    if (!json) f.e.code = USAGE, die(&f.e);
    const cJSON *prompt = json_get(json, "add_generation_prompt");
    conversation_init(&conversation);
    if (!conversation_parse(&conversation, json, &f.e) ||
        !chat_render(&f.s.chat, &conversation, !prompt || cJSON_IsTrue(prompt), &f.ids, &f.e))
        die(&f.e);
    o->as_ids ? print_ids(&f.ids) : print_text(f.s.tokenizer, &f.ids);
    return DONE;
}

static int parse(const Options *o) {
    static Filter f;
    LOCAL(reader_free) Reader reader = {0};
    filter_open(&f, o, NEED_CHAT);
    read_ids(&f, INT32_MAX);
    reader_init(&reader, &f.s.chat, NULL);
    for (size_t i = 0; i < f.ids.n; i++) reader_push(&reader, f.ids.data[i], NULL);
    reader_end(&reader, NULL);
    for (int i = 0; i < reader.messages; i++) json_print(message_json(reader.message + i), true);
    if (reader.repairs) fprintf(stderr, "infer: %d repair%s\n", reader.repairs, reader.repairs == 1 ? "" : "s");
    return DONE;
}

/* ---- logits ---- */

enum { NPY_HEADER = 128 }; /* bytes */

bool session_prompt(Session *s, const Options *o, Ids *ids, Error *e) {
    const Model *m = &s->checkpoint.model;
    if (!o->prompt == !o->ids) return fail(e, USAGE, "either -p TEXT or --ids is needed; see --help");
    if (!session_open(s, o, NEED_CHECKPOINT | (o->prompt ? NEED_TOKENIZER : USE_TOKENIZER), e)) return false;
    if (!(o->ids ? parse_ids(o->ids, m->vocab, ids, e)
                 : tokenizer_encode(s->tokenizer, o->prompt, strlen(o->prompt), WITH_TEMPLATE, ids, e)))
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

typedef struct {
    const Options *o;
    Session s;
} Logits;

/* Writes the logits from which the token at `position` was drawn or would be. */
static void write_row(Stream *t, size_t position, int token, const float *logits, bool last) {
    Logits *l = t->owner;
    const Options *o = l->o;
    const int vocab = l->s.engine.model->vocab;
    if (o->output) fwrite(logits, sizeof *logits, (size_t)vocab, stdout);
    if (o->output || ferror(stdout)) return;
    if (o->all) printf("after token %zu (%d):\n", position - 1, t->tokens.data[position - 1]);
    print_top(logits, vocab, o->top, l->s.tokenizer);
}

/* A Tap: appends rows to the file of the stage. A prompt of several steps calls it several times. */
static void tap_to_file(void *data, const char *stage, int layer, const float *values, int rows, int cols) {
    const Logits *l = data;
    const size_t row = sizeof *values * (size_t)cols;
    LocalText path = text_print("%s/%s.%d.npy", l->o->tap, stage, layer);
    struct stat old = {0};
    Error e;
    FILE *f = fopen(path, stat(path, &old) ? "wb" : "r+b");
    const size_t before = old.st_size ? ((size_t)old.st_size - NPY_HEADER) / row : 0;
    if (f) put_npy_header(f, before + (size_t)rows, cols);
    bool ok = f && !fseek(f, 0, SEEK_END) && fwrite(values, row, (size_t)rows, f) == (size_t)rows;
    if (f && fclose(f)) ok = false;
    if (!ok) fail(&e, FAILED, "%s: %m", path), die(&e);
}

static int logits(const Options *o) {
    Error e;
    static Logits l;
    LocalIds ids = {0};
    l.o = o;
    if (!session_prompt(&l.s, o, &ids, &e)) die(&e);
    if (o->tap && mkdir(o->tap, 0777)) fail(&e, FAILED, "%s: %m; choose another name", o->tap), die(&e);
    if (o->tap) l.s.tap = tap_to_file, l.s.tap_data = &l;
    if (!session_load(&l.s, o, 0, &e)) die(&e);
    if (o->output && !freopen(o->output, "wb", stdout)) fail(&e, FAILED, "%s: %m", o->output), die(&e);
    const size_t from = o->all ? 1 : ids.n;
    if (o->output) put_npy_header(stdout, ids.n + 1 - from, l.s.engine.model->vocab);
    if (!scheduler_score(l.s.scheduler, ids.data, ids.n, from, write_row, &l, &e)) die(&e);
    return DONE;
}

/* ---- main ---- */

static const Command commands[] = {
    {"play", "[MODEL]", play,
     "talk to a model in the terminal; with -p, -f or a text on stdin: one answer, alone on stdout"},
    {"serve", "[MODEL]", serve, "an API like OpenAI's, for many clients at once, and a page to chat with"},
    {"download", "REPO", download, "fetch a model, REPO[@REVISION], or the rest of it, into the hub's cache"},
    {"list", "", list, "the models in ./models and the hub's cache"},
    {"rm", "MODEL", rm, "remove a model from the hub's cache"},
    {"inspect", "MODEL", inspect, "what a model is made of, and whether it fits here"},
    {"doctor", "", doctor, "GPU, driver, cache, token, network: what is wrong, and its cure"},
    {"bench", "[MODEL]", bench, "how fast prompts and generation are here or, with --serve, at a server"},
    {"logits", "MODEL", logits, "the likeliest next tokens, or all logits as a NumPy file"},
    {"explain", "MODEL", explain, "how a model reads a text, token by token"},
    {"perplexity", "MODEL", perplexity, "how surprised a model is by a text"},
    {"tokenize", "MODEL", tokenize, "the text on stdin to token ids, a JSON array"},
    {"detokenize", "MODEL", detokenize, "token ids on stdin, numbers or a JSON array, to text"},
    {"render", "MODEL", render,
     "the conversation on stdin, JSON of chat completions, as the prompt that the model reads"},
    {"parse", "MODEL", parse, "sampled token ids on stdin as messages, a line of JSON each"},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static void print_summary(FILE *to) {
    print_row(to, "", 0, "infer runs open language models on NVIDIA GPUs.\n\n");
    for (int i = 0; i < COMMANDS; i++) {
        LocalText name = text_print("  infer %s", commands[i].name);
        print_row(to, name, 20, commands[i].summary);
    }
    print_row(to, "", 0,
              "\ninfer COMMAND --help shows its options. "
              "MODEL is a folder, a GGUF file, or part of a name that infer list shows.");
}

int main(int argc, char **argv) {
    bool help = argc > 1 && text_listed("help -h --help", argv[1]);
    int fd; /* no file may get the number of a closed stdout or stderr: what is printed would go into it */
    while ((fd = open("/dev/null", O_RDONLY)) >= 0 && fd <= STDERR_FILENO) {}
    close(fd);
    const char *name = argc > 1 + help ? argv[1 + help] : "";
    const Command *c = NULL;
    Error e;
    Options o = {.sampling = {.temperature = 1, .top_p = 1, .penalty = 1}};
    if (getentropy(&o.sampling.seed, 4)) o.sampling.seed = (uint32_t)(seconds() * 1e6); /* short enough to be typed */
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error like a full disk */
    setlocale(LC_CTYPE, "");
    setlocale(LC_CTYPE, "C.UTF-8"); /* if there is none, the user's own stays; without UTF-8 libedit drops letters */
    for (int i = 0; i < COMMANDS; i++)
        if (!strcmp(name, commands[i].name)) c = commands + i;
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
    else if (!parse_arguments(c, argc - 2, argv + 2, &o, &e))
        die(&e);
    else
        code = c->run(&o);
    if ((fflush(stdout) || ferror(stdout)) && code == DONE) {
        fprintf(stderr, "infer: %s could not be written: its disk is full, or its reader has ended\n",
                o.output ? o.output : "the output");
        return FAILED;
    }
    return code;
}
