/* infer.c: the command line. Options are one table for all commands, the model that a command works with is opened in
 * one place; each command is a function. What they are made of is in model.c (loading), tokenizer.c, chat.c (harmony),
 * engine.c (sequences and pages) and, behind infer.h, in infer.cu or tests/reference.c. `main` is last.
 *
 * Data goes to stdout, everything else to stderr. Commands that need no GPU never touch one. */
#include "host.h"
#include "download.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef BACKEND
#define BACKEND reference
#endif
#define VERSION "0.1"

const Backend *const backend = &BACKEND;

/* ---- options: one table for all commands ---- */

enum { /* who takes an option */
       PLAY = 1,
       DOWNLOAD = 2,
       LIST = 4,
       RM = 8,
       INSPECT = 16,
       DOCTOR = 32,
       BENCH = 64,
       LOGITS = 128,
       PERPLEXITY = 256,
       TOKENIZE = 512,
       DETOKENIZE = 1024,
       RENDER = 2048,
       PARSE = 4096,
       SETTING = 8192 /* and /set in the loop */
};
typedef enum { SWITCH, TEXT, PATH, TEXTS, WHOLE, WHOLES, SEED, REAL } Kind;

typedef struct {
    char letter;       /* -p, or 0 */
    const char *name;  /* --prompt */
    const char *value; /* what the help calls its value */
    Kind kind;
    size_t field; /* of Options */
    unsigned takers;
    double least, most;  /* of WHOLE, WHOLES and REAL */
    const char *initial; /* the value where none is given, or NULL: 0, none */
    const char *help;    /* what it does; of REAL first its range, up to a colon */
} Option;

#define FIELD(name) offsetof(Options, name)
static const Option options[] = {
    {'p', "prompt", "TEXT", TEXT, FIELD(prompt), PLAY, .help = "the prompt; one answer, alone on stdout"},
    {'f', "file", "FILE", PATH, FIELD(file), PLAY, .help = "a file with the prompt"},
    {'s', "system", "TEXT", TEXT, FIELD(system), PLAY, .help = "instructions for the model"},
    {'e', "effort", "LEVEL", TEXT, FIELD(effort), PLAY, .help = "how long it thinks: low, medium or high"},
    {0, "temperature", "T", REAL, FIELD(sampling.temperature), PLAY | SETTING, 0.01, 100, "1",
     "0 or 0.01 to 100: how freely it draws; 0 is always the likeliest token"},
    {0, "top-k", "K", WHOLE, FIELD(sampling.top_k), PLAY | SETTING, 0, 1e9, "0", "draw among the K likeliest; 0: all"},
    {0, "top-p", "P", REAL, FIELD(sampling.top_p), PLAY | SETTING, 1e-30, 1, "1",
     "above 0, at most 1: draw among the likeliest that make up P"},
    {0, "min-p", "P", REAL, FIELD(sampling.min_p), PLAY | SETTING, 0, 1, "0",
     "0 to 1: leave out what is less likely than P times the likeliest"},
    {0, "repetition-penalty", "R", REAL, FIELD(sampling.penalty), PLAY | SETTING, 1e-30, 100, "1",
     "above 0, at most 100: divide what was already said by R; 1: off"},
    {0, "seed", "N", SEED, FIELD(sampling.seed), PLAY | SETTING, .help = "the same seed gives the same answer"},
    {0, "max-tokens", "N", WHOLE, FIELD(max_tokens), PLAY | SETTING, 0, 1e9, "0",
     "end an answer after N tokens; 0: when the context is full"},
    {0, "stop", "TEXT", TEXTS, FIELD(stop), PLAY, .most = 16, .help = "end an answer before TEXT; can be repeated"},
    {0, "hide-thinking", NULL, SWITCH, FIELD(hide_thinking), PLAY, .help = "do not show the reasoning"},
    {0, "raw", NULL, SWITCH, FIELD(raw), PLAY, .help = "continue the text without a chat format"},
    {0, "date", "D", TEXT, FIELD(date), PLAY, .help = "the date that the model is told (today); none: not told"},
    {0, "json", NULL, SWITCH, FIELD(json), PLAY, .help = "one answer as a JSON object"},

    {'p', "prompts", "N,...", WHOLES, FIELD(prompts), BENCH, 1, 1 << 24, "512,2048",
     "tokens of a prompt; the time is that to the first token"},
    {'n', "tokens", "N", WHOLE, FIELD(tokens), BENCH, 1, 1 << 20, "128", "tokens to generate"},
    {'d', "depths", "N,...", WHOLES, FIELD(depths), BENCH, 0, 1 << 24, "0,8192,32768",
     "depth of the context; what it holds does not matter and is not computed"},
    {'b', "streams", "N,...", WHOLES, FIELD(streams), BENCH, 1, 256, "1,4,16", "streams at once"},
    {'r', "repeats", "N", WHOLE, FIELD(repeats), BENCH, 1, 100, "5", "repeats"},
    {'o', "output", "md|json", TEXT, FIELD(output), BENCH, .initial = "md", .help = "a table, or all figures as JSON"},
    {0, "temperature", "T", REAL, FIELD(sampling.temperature), BENCH, 0.01, 100, "0", "0 or 0.01 to 100: of the draw"},

    {'p', "prompt", "TEXT", TEXT, FIELD(prompt), LOGITS,
     .help = "the prompt; a beginning-of-text token is added if the tokenizer says so"},
    {0, "ids", "1,2,3", TEXT, FIELD(ids), LOGITS, .help = "the prompt as token ids, exactly"},
    {0, "all", NULL, SWITCH, FIELD(all), LOGITS, .help = "after every token of the prompt instead of the last"},
    {0, "top", "N", WHOLE, FIELD(top), LOGITS, 1, 1e9, "10", "how many"},
    {'o', "output", "FILE.npy", PATH, FIELD(output), LOGITS,
     .help = "all logits as a float32 array (positions, vocabulary) instead"},

    {'f', "file", "FILE", PATH, FIELD(file), PERPLEXITY,
     .help = "the text; a beginning-of-text token is added if the tokenizer says so"},
    {0, "ctx", "N", WHOLE, FIELD(context), PERPLEXITY, 2, 1 << 24,
     .help = "tokens of a window (1024, or what the model was made for if that is less)"},
    {0, "stride", "N", WHOLE, FIELD(stride), PERPLEXITY, 1, 1 << 24,
     .help = "tokens from one window to the next (half a window); each token is scored in the first window that has "
             "it, so that all but those of the first see at least ctx - stride tokens before them"},

    {0, "revision", "R", TEXT, FIELD(revision), DOWNLOAD, .help = "a branch, a tag or a commit (main)"},
    {0, "include", "G", TEXTS, FIELD(include), DOWNLOAD, .most = MOST_VALUES,
     .help = "files that match the pattern, in place of the usual; can be repeated"},
    {0, "exclude", "G", TEXTS, FIELD(exclude), DOWNLOAD, .most = MOST_VALUES,
     .help = "no files that match the pattern; can be repeated"},
    {0, "all", NULL, SWITCH, FIELD(all), DOWNLOAD, .help = "all files"},
    {0, "token-file", "F", PATH, FIELD(token_file), DOWNLOAD,
     .help = "a file with the token of an account, for private and gated repositories; else HF_TOKEN, HF_TOKEN_PATH, "
             "$HF_HOME/token. It is sent to the hub only"},
    {0, "jobs", "N", WHOLE, FIELD(jobs), DOWNLOAD, 1, 64, "8", "connections at once"},
    {0, "dry-run", NULL, SWITCH, FIELD(dry_run), DOWNLOAD, .help = "say what would be fetched"},

    {0, "jsonl", NULL, SWITCH, FIELD(jsonl), TOKENIZE,
     .help = "each line of stdin is a JSON string and gives one line"},
    {0, "special", NULL, SWITCH, FIELD(special), TOKENIZE,
     .help = "control tokens in the text count, and the tokenizer's template is put around it"},
    {0, "ids", NULL, SWITCH, FIELD(as_ids), RENDER, .help = "as a JSON array of token ids instead of text"},
    {0, "json", NULL, SWITCH, FIELD(json), LIST | INSPECT | DOCTOR, .help = "as JSON"},
    {0, "ctx", "N", WHOLE, FIELD(context), PLAY | INSPECT, 1, 1 << 24,
     .help = "tokens of context (what the model was made for and the memory allows)"},
    {0, "gpu", "N", WHOLE, FIELD(gpu), PLAY | BENCH | LOGITS | PERPLEXITY, 0, MOST_GPUS - 1, "0", "which GPU"},
    {0, "plain", NULL, SWITCH, FIELD(plain), PLAY | BENCH | LOGITS | PERPLEXITY,
     .help = "the plain kernels, also where faster ones know the model"},
};
enum { OPTIONS = sizeof options / sizeof *options };

/* What a number may be: "0 or 0.01 to 100". Of a REAL it stands before the colon of its help. */
static bool wrong_number(const Option *option, const char *given, Error *e) {
    char range[80];
    if (option->kind == REAL)
        snprintf(range, sizeof range, "%.*s", (int)strcspn(option->help, ":"), option->help);
    else if (option->kind == SEED)
        snprintf(range, sizeof range, "a whole number below 2^64");
    else
        snprintf(range, sizeof range, "%s from %.0f to %.0f",
                 option->kind == WHOLES ? "whole numbers like 1,4,16" : "a whole number", option->least, option->most);
    return fail(e, USAGE, "--%s must be %s, not '%.40s'", option->name, range, given);
}

static bool set_whole(const Option *option, const char *text, int *out, Error *e) {
    return text_whole(text, (int)option->least, (int)option->most, out) || wrong_number(option, text, e);
}

static bool set_real(const Option *option, const char *text, float *out, Error *e) {
    char *end;
    double x = strtod(text, &end);
    bool zero = x == 0 && (option->least == 0 || strncmp(option->help, "0 or", 4) == 0);
    if (end == text || *end || !(zero || (x >= option->least && x <= option->most)))
        return wrong_number(option, text, e);
    *out = x < 1e-30 ? 0 : (float)x; /* what a float cannot hold */
    return true;
}

static bool set_seed(const Option *option, const char *text, uint64_t *out, Error *e) {
    char *end;
    errno = 0;
    uint64_t n = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno) return wrong_number(option, text, e);
    *out = n;
    return true;
}

static bool set_wholes(const Option *option, const char *text, Numbers *out, Error *e) {
    out->n = 0;
    for (const char *s = text;; s++) {
        char *end;
        long value = strtol(s, &end, 10);
        if (end == s || (*end && *end != ',') || (double)value < option->least || (double)value > option->most ||
            out->n == MOST_VALUES)
            return wrong_number(option, text, e);
        out->value[out->n++] = (int)value;
        s = end;
        if (!*s) return true;
    }
}

static bool set_texts(const Option *option, const char *text, Texts *out, Error *e) {
    if (!*text || out->n == (int)option->most)
        return fail(e, USAGE, "--%s needs a text, at most %.0f times", option->name, option->most);
    out->text[out->n++] = text;
    return true;
}

bool check_text(const char *what, const char *text, size_t n, Error *e) {
    size_t valid = utf8_check(text, n);
    return valid == n || fail(e, USAGE, "%s is not UTF-8: byte %zu is 0x%02X", what, valid, (unsigned char)text[valid]);
}

/* text: NULL for a switch; it is kept. */
static bool option_set(Options *o, const Option *option, const char *text, Error *e) {
    void *field = (char *)o + option->field;
    if ((option->kind == TEXT || option->kind == TEXTS) && !check_text("an option", text, strlen(text), e))
        return false;
    switch (option->kind) {
    case SWITCH: return *(bool *)field = true;
    case TEXT:
    case PATH: return *(const char **)field = text, true;
    case TEXTS: return set_texts(option, text, field, e);
    case WHOLE: return set_whole(option, text, field, e);
    case WHOLES: return set_wholes(option, text, field, e);
    case SEED: return set_seed(option, text, field, e);
    case REAL: return set_real(option, text, field, e);
    }
    return false;
}

/* The option that one of the commands takes by this name or, if n is 1, letter; or NULL. */
static const Option *option_find(const char *name, size_t n, unsigned takers) {
    for (const Option *o = options; o < options + OPTIONS; o++)
        if (o->takers & takers && (n == 1 ? o->letter == *name : strlen(o->name) == n && !strncmp(o->name, name, n)))
            return o;
    return NULL;
}

bool setting_set(Options *o, const char *name, const char *value, Error *e) {
    const Option *option = option_find(name, strlen(name), SETTING);
    return option ? option_set(o, option, value, e) : fail(e, USAGE, "there is no setting '%.40s'", name);
}

typedef struct {
    const char *name, *argument; /* argument: "MODEL", "[MODEL]" if it may be left out, or "" */
    int (*run)(const Options *o);
    unsigned taker;
    const char *summary, *help;
} Command;

static bool usage_error(const Command *c, Error *e, const char *format, ...) __attribute__((format(printf, 3, 4)));
static bool usage_error(const Command *c, Error *e, const char *format, ...) {
    char text[200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return fail(e, USAGE, "%s; see infer %s --help", text, c->name);
}

/* One option at argv[*i]: -x VALUE, -xVALUE, --name VALUE, --name=VALUE or a switch. Messages never show the value of
 * an unknown one: it may be a secret. */
static bool parse_option(const Command *c, int argc, char **argv, int *i, Options *o, Error *e) {
    bool is_long = argv[*i][1] == '-';
    const char *name = argv[*i] + 1 + is_long, *value = name + (is_long ? strcspn(name, "=") : 1);
    size_t n = (size_t)(value - name);
    const Option *option = (n > 1) == is_long ? option_find(name, n, c->taker) : NULL;
    if (!option) return usage_error(c, e, "there is no option %.*s", (int)n + 1 + is_long, argv[*i]);
    if (option->kind == SWITCH)
        return *value ? usage_error(c, e, "--%s takes no value", option->name) : option_set(o, option, NULL, e);
    if (*value)
        value += is_long; /* behind the '=' */
    else if (++*i < argc)
        value = argv[*i];
    else
        return usage_error(c, e, "--%s needs a value", option->name);
    return option_set(o, option, value, e);
}

/* All arguments behind the command's name. *help: they ask for help instead. */
static bool parse_arguments(const Command *c, int argc, char **argv, Options *o, bool *help, Error *e) {
    bool ok = true, only_arguments = false;
    const char *word = c->argument + (*c->argument == '['); /* without brackets */
    for (int i = 0; i < OPTIONS; i++)
        if (options[i].takers & c->taker && options[i].initial) option_set(o, options + i, options[i].initial, e);
    for (int i = 0; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return *help = true;
    for (int i = 0; i < argc && ok; i++) {
        if (!only_arguments && !strcmp(argv[i], "--"))
            only_arguments = true;
        else if (!only_arguments && argv[i][0] == '-' && argv[i][1])
            ok = parse_option(c, argc, argv, &i, o, e);
        else if (!*c->argument)
            ok = usage_error(c, e, "it takes no argument");
        else if (o->model)
            ok = usage_error(c, e, "one %.*s at most, not '%.60s' as well", (int)strcspn(word, "]"), word,
                             strncmp(argv[i], "hf_", 3) ? argv[i] : "hf_...");
        else
            o->model = argv[i];
    }
    if (ok && *c->argument && *c->argument != '[' && !o->model) ok = usage_error(c, e, "%s is missing", c->argument);
    return ok;
}

static void print_help(const Command *c) {
    printf("infer %s%s%s [options]\n%s\n", c->name, *c->argument ? " " : "", c->argument, c->help);
    for (int i = 0; i < OPTIONS; i++) {
        const Option *option = options + i;
        if (!(option->takers & c->taker)) continue;
        char letter[] = {'-', option->letter, ',', 0}, name[60];
        snprintf(name, sizeof name, "--%s %s", option->name, option->value ? option->value : "");
        printf("  %3s %-22s %s", option->letter ? letter : "", name, option->help);
        printf(option->initial ? " (%s)\n" : "\n", option->initial);
    }
}

/* ---- opening ---- */

static int columns(void) {
    struct winsize size;
    return !ioctl(STDERR_FILENO, TIOCGWINSZ, &size) && size.ws_col ? size.ws_col : 80;
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

/* Takes the only model that can be played; of several it shows which there are, and asks. */
static bool choose_model(char **path, char **name, Error *e) {
    bool ask_for_it = isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    ModelEntry *list;
    int n = models_list(&list), width = 0, choice = n == 1;
    char line[64], size[24];
    if (!n) {
        fail(e, BAD_MODEL,
             "no model in ./models, ~/.cache/infer/models or the hub's cache: name a model directory, infer play DIR");
    } else if (!choice) {
        fputs("Available models:\n", stderr);
        for (int i = 0; i < n; i++)
            if ((int)strlen(list[i].name) > width) width = (int)strlen(list[i].name);
        for (int i = 0; i < n; i++)
            fprintf(stderr, "%3d. %-*s  %8s  %s%s\n", i + 1, width, list[i].name, size_text(list[i].bytes, size),
                    list[i].encoding, list[i].complete ? "" : "  incomplete");
        if (!ask_for_it) fail(e, USAGE, "which of the %d models? name one, infer COMMAND MODEL", n);
    }
    while (n && ask_for_it && !choice) {
        fprintf(stderr, "Select model (1-%d): ", n);
        if (!fgets(line, sizeof line, stdin)) {
            fail(e, USAGE, "no model was chosen");
            break;
        }
        line[strcspn(line, "\n")] = 0;
        if (!text_whole(line, 1, n, &choice)) fprintf(stderr, "A number from 1 to %d is needed; Ctrl+C leaves.\n", n);
    }
    if (choice) {
        *path = copy_text(list[choice - 1].path, strlen(list[choice - 1].path));
        *name = copy_text(list[choice - 1].name, strlen(list[choice - 1].name));
    }
    models_free(list, n);
    return choice;
}

/* Are there weights in the folder? */
static bool has_weights(const char *dir) {
    Bytes path = {0};
    bytes_print(&path, "%s/model.safetensors", dir);
    bool there = file_exists(path.data);
    bytes_text(&path, ".index.json");
    there |= file_exists(path.data);
    bytes_free(&path);
    return there;
}

static bool open_tokenizer(Session *s, bool may_lack, Error *e) {
    Bytes path = {0};
    bytes_print(&path, "%s/tokenizer.json", s->dir);
    bool ok = (may_lack && !file_exists(path.data)) || (s->tokenizer = tokenizer_open(path.data, e));
    bytes_free(&path);
    return ok;
}

static void open_chat(Session *s) {
    Bytes template = {0};
    Error e;
    s->has_chat = chat_template(s->dir, &template, &e) && chat_open(&s->chat, s->tokenizer, template.data, &e);
    if (!s->has_chat) fail(&s->no_chat, BAD_MODEL, "%s has no chat format: %s", s->name, e.text);
    bytes_free(&template);
}

bool session_open(Session *s, const Options *o, int need, Error *e) {
    *s = (Session){0};
    bool shapes = need & NEED_SHAPES;
    if (o->model && (s->dir = model_get(o->model, e))) s->name = copy_text(o->model, strlen(o->model));
    if (o->model ? !s->dir : !choose_model(&s->dir, &s->name, e)) return false;
    if (shapes && !has_weights(s->dir)) {
        if (!checkpoint_make_up(&s->checkpoint, s->dir, e)) return false;
    } else if ((shapes || need & NEED_CHECKPOINT) && !checkpoint_open(&s->checkpoint, s->dir, e)) {
        return false;
    }
    if (need & (NEED_TOKENIZER | NEED_CHAT | USE_TOKENIZER) &&
        !open_tokenizer(s, !(need & (NEED_TOKENIZER | NEED_CHAT)), e))
        return false;
    const Model *m = &s->checkpoint.model;
    if (s->tokenizer && m->vocab && tokenizer_size(s->tokenizer) > m->vocab)
        return fail(
            e, BAD_MODEL,
            "%s: tokenizer.json has ids up to %d, config.json a vocabulary of %d: they belong to different models",
            s->dir, tokenizer_size(s->tokenizer) - 1, m->vocab);
    if (s->tokenizer) open_chat(s);
    if (need & NEED_CHAT && !s->has_chat) return *e = s->no_chat, false;
    return !(need & NEED_ENGINE) || session_load(s, o, o->context, e);
}

bool session_load(Session *s, const Options *o, int context, Error *e) {
    bool verbose = isatty(STDERR_FILENO) && !o->json;
    char count[32];
    Limits limits = {.gpu = o->gpu,
                     .max_seqs = 1,
                     .max_tokens = backend->prompt_step,
                     .plain = o->plain,
                     .progress = verbose ? show_progress : NULL,
                     .where = s->where};
    for (int i = 0; i < o->streams.n; i++)
        if (o->streams.value[i] > limits.max_seqs) limits.max_seqs = o->streams.value[i];
    loading_name = s->name;
    loading_since = seconds();
    if (!engine_open(&s->engine, backend, &s->checkpoint.model, limits, context, e)) return false;
    s->seconds = seconds() - loading_since;
    if (verbose)
        fprintf(stderr, "✓ Model loaded%s%s, context %s\n", *s->where ? " to " : "", s->where,
                count_text((uint64_t)s->engine.context, count));
    return true;
}

void session_close(Session *s) {
    engine_close(&s->engine);
    chat_close(&s->chat);
    tokenizer_close(s->tokenizer);
    checkpoint_close(&s->checkpoint);
    free(s->dir);
    free(s->name);
    *s = (Session){0};
}

/* Token ids from text like "1, 2 3" or "[1,2,3]". */
static bool parse_ids(const char *text, Ids *out, Error *e) {
    static const char separators[] = " ,[]\t\r\n";
    for (const char *s = text + strspn(text, separators); *s; s += strspn(s, separators)) {
        char *end;
        long id = strtol(s, &end, 10);
        if (end == s || (*end && !strchr(separators, *end)) || id < 0 || id > INT32_MAX)
            return fail(e, USAGE, "'%.*s' is no token id", (int)strcspn(s, separators), s);
        ids_add(out, (int)id);
        s = end;
    }
    return true;
}

static void print_ids(const Ids *ids) {
    putchar('[');
    for (size_t i = 0; i < ids->n; i++) printf("%s%d", i ? "," : "", ids->data[i]);
    puts("]");
}

/* ---- tokenize, detokenize ---- */

static void tokenize_one(const Tokenizer *t, const char *text, size_t n, bool special) {
    Error e;
    Ids ids = {0};
    if (!tokenizer_encode(t, text, n, special ? CONTROL_TOKENS | WITH_TEMPLATE : 0, &ids, &e)) die(&e);
    print_ids(&ids);
    ids_free(&ids);
}

static int tokenize(const Options *o) {
    Session s;
    Error e;
    Bytes text = {0};
    if (!session_open(&s, o, NEED_TOKENIZER, &e)) die(&e);
    stdin_read(&text);
    if (!o->jsonl) tokenize_one(s.tokenizer, text.data, text.n, o->special);
    for (char *line = text.data; o->jsonl && line < text.data + text.n;) {
        char *end = memchr(line, '\n', (size_t)(text.data + text.n - line));
        size_t n = (size_t)((end ? end : text.data + text.n) - line);
        cJSON *json = json_parse(line, n, "stdin", &e);
        if (json && !cJSON_IsString(json)) fail(&e, USAGE, "stdin: a line is not a JSON string");
        if (!cJSON_IsString(json)) e.code = USAGE, die(&e);
        tokenize_one(s.tokenizer, json->valuestring, strlen(json->valuestring), o->special);
        cJSON_Delete(json);
        line += n + 1;
    }
    bytes_free(&text);
    session_close(&s);
    return DONE;
}

static int detokenize(const Options *o) {
    Session s;
    Error e;
    Bytes text = {0}, out = {0};
    Ids ids = {0};
    Decoder d = {0};
    if (!session_open(&s, o, NEED_TOKENIZER, &e)) die(&e);
    stdin_read(&text);
    if (!parse_ids(text.data, &ids, &e)) die(&e);
    for (size_t i = 0; i < ids.n; i++) tokenizer_bytes(s.tokenizer, &d, ids.data[i], &out);
    fwrite(out.data ? out.data : "", 1, out.n, stdout);
    bytes_free(&text);
    bytes_free(&out);
    ids_free(&ids);
    session_close(&s);
    return DONE;
}

/* ---- render, parse ---- */

static int render(const Options *o) {
    Session s;
    Conversation conversation;
    Error e;
    Bytes text = {0}, out = {0};
    Ids ids = {0};
    Decoder d = {0};
    if (!session_open(&s, o, NEED_CHAT, &e)) die(&e);
    stdin_read(&text);
    cJSON *json = json_parse(text.data, text.n, "stdin", &e);
    conversation_init(&conversation);
    if (!json) e.code = USAGE, die(&e);
    const cJSON *prompt = json_get(json, "add_generation_prompt");
    if (!conversation_parse(&conversation, json, &e) ||
        !chat_render(&s.chat, &conversation, !prompt || cJSON_IsTrue(prompt), &ids, &e))
        die(&e);
    for (size_t i = 0; i < ids.n; i++) tokenizer_bytes(s.tokenizer, &d, ids.data[i], &out);
    if (o->as_ids)
        print_ids(&ids);
    else
        fwrite(out.data ? out.data : "", 1, out.n, stdout);
    cJSON_Delete(json);
    conversation_free(&conversation);
    bytes_free(&text);
    bytes_free(&out);
    ids_free(&ids);
    session_close(&s);
    return DONE;
}

static int parse(const Options *o) {
    Session s;
    Reader reader;
    Error e;
    Bytes text = {0}, shown = {0};
    Ids ids = {0};
    if (!session_open(&s, o, NEED_CHAT, &e)) die(&e);
    stdin_read(&text);
    if (!parse_ids(text.data, &ids, &e)) die(&e);
    reader_init(&reader, &s.chat, NULL);
    for (size_t i = 0; i < ids.n; i++) reader_push(&reader, ids.data[i], &shown);
    reader_end(&reader, &shown);
    for (int i = 0; i < reader.messages; i++) {
        shown.n = 0;
        message_json(reader.message + i, &shown);
        puts(shown.data);
    }
    if (reader.repairs) fprintf(stderr, "infer: %d repair%s\n", reader.repairs, reader.repairs == 1 ? "" : "s");
    reader_free(&reader);
    bytes_free(&text);
    bytes_free(&shown);
    ids_free(&ids);
    session_close(&s);
    return DONE;
}

/* ---- logits ---- */

enum { LOGITS_AT_ONCE = 512 }; /* tokens whose logits are in memory together */

/* The header of NumPy's format 1.0, padded to 64 bytes; the array follows. */
static void write_npy_header(FILE *f, size_t rows, int cols) {
    char text[128];
    int n = snprintf(text, sizeof text, "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %d), }", rows, cols);
    fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, f); /* 118 bytes of header follow */
    fprintf(f, "%s%*s\n", text, 117 - n, "");
}

static void print_top(const float *logits, int vocab, int top, const Tokenizer *t) {
    double all = log_sum_exp(logits, vocab);
    char *shown = allocate_zero((size_t)vocab, 1);
    for (int k = 0; k < top && k < vocab; k++) {
        int best = -1;
        for (int i = 0; i < vocab; i++)
            if (!shown[i] && (best < 0 || logits[i] > logits[best])) best = i;
        shown[best] = 1;
        Decoder d = {.begun = true};
        Bytes text = {0}, quoted = {0};
        if (t) tokenizer_decode(t, &d, best, &text);
        tokenizer_flush(&d, &text);
        json_quote(&quoted, text.data, text.n);
        printf("%7d %10.4f %8.5f  %s\n", best, (double)logits[best], exp((double)logits[best] - all), quoted.data);
        bytes_free(&text);
        bytes_free(&quoted);
    }
    free(shown);
}

/* Runs the prompt in chunks and writes what was asked for. */
static bool write_logits(Engine *g, const Ids *ids, const Options *o, const Tokenizer *t, Error *e) {
    FILE *f = o->output ? fopen(o->output, "wb") : NULL;
    if (o->output && !f) return fail(e, FAILED, "%s: %s", o->output, strerror(errno));
    if (f) write_npy_header(f, o->all ? ids->n : 1, g->model->vocab);
    Sequence s = {0};
    Sampling greedy = {.top_p = 1, .penalty = 1};
    bool ok = true;
    while (ok && s.tokens.n < ids->n) {
        size_t from = s.tokens.n, n = ids->n - from, most = (size_t)g->max_tokens;
        if (o->all && most > LOGITS_AT_ONCE) most = LOGITS_AT_ONCE;
        if (n > most) n = most;
        Want want = o->all ? WANT_ALL_LOGITS : from + n == ids->n ? WANT_LOGITS : WANT_NOTHING;
        Result r;
        ok = sequence_run(g, &s, ids->data + from, n, want, &greedy, &r, e);
        if (!ok || want == WANT_NOTHING) continue;
        if (f && fwrite(r.logits, sizeof *r.logits * (size_t)g->model->vocab, (size_t)r.rows, f) != (size_t)r.rows)
            ok = fail(e, FAILED, "%s: %s", o->output, strerror(errno));
        for (int i = 0; ok && !f && i < r.rows; i++) {
            if (o->all) printf("after token %zu (%d):\n", from + (size_t)i, ids->data[from + (size_t)i]);
            print_top(r.logits + (size_t)i * (size_t)g->model->vocab, g->model->vocab, o->top, t);
        }
    }
    if (f && fclose(f) && ok) ok = fail(e, FAILED, "%s: %s", o->output, strerror(errno));
    sequence_free(g, &s);
    return ok;
}

static int logits(const Options *o) {
    Session s = {0};
    Error e;
    Ids ids = {0};
    bool ok = !o->prompt != !o->ids || fail(&e, USAGE, "either -p TEXT or --ids is needed; see infer logits --help");
    ok = ok && session_open(&s, o, NEED_CHECKPOINT | (o->prompt ? NEED_TOKENIZER : USE_TOKENIZER), &e);
    const Model *m = &s.checkpoint.model;
    if (ok)
        ok = o->ids ? parse_ids(o->ids, &ids, &e)
                    : tokenizer_encode(s.tokenizer, o->prompt, strlen(o->prompt), WITH_TEMPLATE, &ids, &e);
    if (ok && !ids.n) ok = fail(&e, USAGE, "the prompt is empty");
    for (size_t i = 0; ok && i < ids.n; i++)
        if (ids.data[i] >= m->vocab)
            ok = fail(&e, USAGE, "token %d is outside the vocabulary of %d", ids.data[i], m->vocab);
    if (ok && ids.n > (size_t)m->context)
        ok = fail(&e, USAGE, "the prompt has %zu tokens, the model's context is %d", ids.n, m->context);
    if (!ok || !session_load(&s, o, 0, &e) || !write_logits(&s.engine, &ids, o, s.tokenizer, &e)) die(&e);
    ids_free(&ids);
    session_close(&s);
    return DONE;
}

/* ---- main ---- */

static const Command commands[] = {
    {"play", "[MODEL]", play, PLAY, "talk to a model, once or in a loop",
     "A conversation in the terminal; with -p, -f or a text on stdin one answer, alone on stdout."},
    {"download", "REPO", download, DOWNLOAD, "fetch a model from the hub",
     "Fetches a model from the hub, REPO[@REVISION] or the URL of its page, into the hub's own cache ($HF_HUB_CACHE, "
     "$HF_HOME/hub, ~/.cache/huggingface/hub), which other tools share, and writes where it is. What is there is not "
     "fetched again; what was interrupted goes on. By default that is what infer reads: safetensors files with their "
     "index, config, tokenizer and chat template.\n"
     "HF_ENDPOINT names another hub, HF_HUB_OFFLINE=1 forbids the network, HTTPS_PROXY names a proxy, CURL_CA_BUNDLE "
     "the certificates to trust, HF_HUB_DOWNLOAD_TIMEOUT the seconds until a stalled connection is given up (10)."},
    {"list", "", list, LIST, "the models that are here",
     "Lists the models in ./models, ~/.cache/infer/models and the hub's cache."},
    {"rm", "REPO", rm, RM, "remove a downloaded model",
     "Removes a repository from the hub's cache: ORG/NAME, or a unique part of it."},
    {"inspect", "MODEL", inspect, INSPECT, "what a model is made of, and whether it fits here",
     "Says what a model is made of, whether infer runs it and whether it fits on this GPU. Of a repository that is not "
     "here only config.json and the headers of its files are fetched."},
    {"doctor", "", doctor, DOCTOR, "GPU, driver, cache, token, network: what is wrong, and its cure",
     "Looks at the GPU, its driver, the cache, the token and the network, with a cure for each fault. The exit code is "
     "that of the first fault."},
    {"bench", "[MODEL]", bench, BENCH, "how fast prompts and generation are here",
     "Measures prompts of so many tokens, then the generation of n tokens in each of b streams behind d tokens of "
     "context: the median of r repeats. A directory that has only config.json gets random weights.\n"
     "% of flat: speed relative to simply reading the same bytes. The experts of several streams are counted."},
    {"logits", "MODEL", logits, LOGITS, "what a model expects next, or all logits as a NumPy file",
     "Writes the most likely next tokens: id, logit, probability, text."},
    {"perplexity", "MODEL", perplexity, PERPLEXITY, "how surprised a model is by a text",
     "Writes the perplexity of a text, the mean negative log-likelihood of its tokens and their number."},
    {"tokenize", "MODEL", tokenize, TOKENIZE, "text to token ids",
     "Writes the ids of the text on stdin as a JSON array."},
    {"detokenize", "MODEL", detokenize, DETOKENIZE, "token ids to text",
     "Writes the bytes of the token ids on stdin, given as numbers or a JSON array."},
    {"render", "MODEL", render, RENDER, "a conversation as the prompt that the model reads",
     "Writes the prompt of the conversation on stdin, JSON in the shape of chat completions: messages, tools, "
     "response_format, reasoning_effort, date (\"none\": no such line), and of harmony model_identity, "
     "knowledge_cutoff, channels, bare (no system message), keep_analysis, add_generation_prompt."},
    {"parse", "MODEL", parse, PARSE, "sampled token ids as messages",
     "Reads sampled token ids on stdin (they follow <|start|>assistant) and writes each message as a line of JSON."},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static void print_summary(FILE *to) {
    fprintf(to, "infer runs open language models on NVIDIA GPUs.\n\n");
    for (int i = 0; i < COMMANDS; i++) fprintf(to, "  infer %-11s %s\n", commands[i].name, commands[i].summary);
    fprintf(to, "\ninfer COMMAND --help tells more. MODEL is a directory, or part of the name of a model that `infer "
                "list` shows.\n");
}

static const Command *find_command(const char *name) {
    for (int i = 0; i < COMMANDS; i++)
        if (!strcmp(name, commands[i].name)) return commands + i;
    return NULL;
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    bool help = !strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help");
    if (!strcmp(name, "--version")) {
        printf("infer %s (%s)\n", VERSION, backend->name);
        return DONE;
    }
    if (help && argc == 2) {
        print_summary(stdout);
        return DONE;
    }
    const Command *c = find_command(help ? argv[2] : name);
    if (!c) {
        if (*name) fprintf(stderr, "infer: no such command: %s\n\n", help ? argv[2] : name);
        print_summary(stderr);
        return USAGE;
    }
    Error e;
    Options o = {.sampling = {.temperature = 1, .top_p = 1, .penalty = 1}};
    if (getentropy(&o.sampling.seed, 4)) o.sampling.seed = (uint64_t)(seconds() * 1e6); /* short enough to type again */
    if (!help && !parse_arguments(c, argc - 2, argv + 2, &o, &help, &e)) die(&e);
    if (help) print_help(c);
    int code = help ? DONE : c->run(&o);
    if (fflush(stdout) && code == DONE) {
        fprintf(stderr, "infer: stdout: %s\n", strerror(errno));
        return FAILED;
    }
    return code;
}
