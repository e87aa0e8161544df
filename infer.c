/* infer.c: the command line. Each command is a function below; what they are made of is in model.c (loading),
 * tokenizer.c, chat.c (harmony), engine.c (sequences and pages) and, behind infer.h, in infer.cu or tests/reference.c.
 * `main` is last.
 *
 * Data goes to stdout, everything else to stderr. Commands that need no GPU never touch one. */
#include "bench.h"
#include "chat.h"
#include "download.h"
#include "engine.h"
#include "inspect.h"
#include "model.h"
#include "perplexity.h"
#include "play.h"
#include "tokenizer.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef BACKEND
#define BACKEND reference
#endif
#define VERSION "0.1"

static const Backend *const backend = &BACKEND;

typedef struct {
    const char *name, *summary, *help;
    int (*run)(int argc, char **argv);
    int (*run_on)(int argc, char **argv, const Backend *backend); /* instead of run: computes, or asks what could */
} Command;

static int usage_error(const char *command, const char *problem) {
    fprintf(stderr, "infer: %s; see infer %s --help\n", problem, command);
    return USAGE;
}

static Tokenizer *open_tokenizer(const char *model) {
    Error e;
    Bytes path = {0};
    char *dir = model_get(model, &e);
    if (!dir) die(&e);
    bytes_print(&path, "%s/tokenizer.json", dir);
    Tokenizer *t = tokenizer_open(path.data, &e);
    if (!t) die(&e);
    bytes_free(&path);
    free(dir);
    return t;
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

static const char tokenize_help[] =
    "infer tokenize MODEL [--jsonl] [--special] < TEXT\n"
    "Writes the text's token ids as a JSON array.\n"
    "  --jsonl    each line of stdin is a JSON string and gives one line\n"
    "  --special  control tokens in the text count, and the tokenizer's template is put around it\n";

static void tokenize_one(const Tokenizer *t, const char *text, size_t n, bool special) {
    Error e;
    Ids ids = {0};
    if (!tokenizer_encode(t, text, n, special ? CONTROL_TOKENS | WITH_TEMPLATE : 0, &ids, &e)) die(&e);
    print_ids(&ids);
    ids_free(&ids);
}

static int tokenize(int argc, char **argv) {
    static const struct option options[] = {
        {"jsonl", no_argument, NULL, 'j'}, {"special", no_argument, NULL, 's'}, {0}};
    bool jsonl = false, special = false;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == '?') return usage_error("tokenize", "wrong option");
        *(c == 'j' ? &jsonl : &special) = true;
    }
    if (optind + 1 != argc) return usage_error("tokenize", "one MODEL is needed");
    Tokenizer *t = open_tokenizer(argv[optind]);
    Bytes text = {0};
    stdin_read(&text);
    if (!jsonl) tokenize_one(t, text.data, text.n, special);
    for (char *line = text.data; jsonl && line < text.data + text.n;) {
        Error e;
        char *end = memchr(line, '\n', (size_t)(text.data + text.n - line));
        size_t n = (size_t)((end ? end : text.data + text.n) - line);
        cJSON *json = json_parse(line, n, "stdin", &e);
        if (json && !cJSON_IsString(json)) fail(&e, USAGE, "stdin: a line is not a JSON string");
        if (!cJSON_IsString(json)) e.code = USAGE, die(&e);
        tokenize_one(t, json->valuestring, strlen(json->valuestring), special);
        cJSON_Delete(json);
        line += n + 1;
    }
    bytes_free(&text);
    tokenizer_close(t);
    return DONE;
}

static const char detokenize_help[] = "infer detokenize MODEL < IDS\n"
                                      "Writes the bytes of token ids, given as numbers or a JSON array.\n";

static int detokenize(int argc, char **argv) {
    static const struct option none[] = {{0}};
    if (getopt_long(argc, argv, "", none, NULL) != -1) return usage_error("detokenize", "wrong option");
    if (optind + 1 != argc) return usage_error("detokenize", "one MODEL is needed");
    Tokenizer *t = open_tokenizer(argv[optind]);
    Error e;
    Bytes text = {0}, out = {0};
    Ids ids = {0};
    Decoder d = {0};
    stdin_read(&text);
    if (!parse_ids(text.data, &ids, &e)) die(&e);
    for (size_t i = 0; i < ids.n; i++) tokenizer_bytes(t, &d, ids.data[i], &out);
    fwrite(out.data ? out.data : "", 1, out.n, stdout);
    bytes_free(&text);
    bytes_free(&out);
    ids_free(&ids);
    tokenizer_close(t);
    return DONE;
}

/* ---- render, parse ---- */

static Chat open_chat(const Tokenizer *t, const char *model) {
    Chat chat;
    Error e;
    if (chat_open(&chat, t)) return chat;
    fail(&e, BAD_MODEL, "%s: its tokenizer lacks harmony's control tokens, so there is no chat format", model);
    die(&e);
}

static const char render_help[] =
    "infer render MODEL [--ids] < CONVERSATION\n"
    "Writes the prompt of a conversation, JSON in the shape of chat completions:\n"
    "  messages, tools, response_format, reasoning_effort, date (\"none\": no such line), and of harmony\n"
    "  model_identity, knowledge_cutoff, channels, bare (no system message), keep_analysis, add_generation_prompt\n"
    "  --ids  as a JSON array of token ids instead of text\n";

static int render(int argc, char **argv) {
    static const struct option options[] = {{"ids", no_argument, NULL, 'i'}, {0}};
    bool as_ids = false;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1; as_ids = true)
        if (c == '?') return usage_error("render", "wrong option");
    if (optind + 1 != argc) return usage_error("render", "one MODEL is needed");
    Tokenizer *t = open_tokenizer(argv[optind]);
    Chat chat = open_chat(t, argv[optind]);
    Conversation conversation;
    Error e;
    Bytes text = {0}, out = {0};
    Ids ids = {0};
    Decoder d = {0};
    stdin_read(&text);
    cJSON *json = json_parse(text.data, text.n, "stdin", &e);
    conversation_init(&conversation);
    if (!json) e.code = USAGE, die(&e);
    const cJSON *prompt = json_get(json, "add_generation_prompt");
    if (!conversation_parse(&conversation, &chat, json, &e) ||
        !chat_render(&chat, &conversation, !prompt || cJSON_IsTrue(prompt), &ids, &e))
        die(&e);
    for (size_t i = 0; i < ids.n; i++) tokenizer_bytes(t, &d, ids.data[i], &out);
    if (as_ids)
        print_ids(&ids);
    else
        fwrite(out.data ? out.data : "", 1, out.n, stdout);
    cJSON_Delete(json);
    conversation_free(&conversation);
    bytes_free(&text);
    bytes_free(&out);
    ids_free(&ids);
    chat_close(&chat);
    tokenizer_close(t);
    return DONE;
}

static const char parse_help[] =
    "infer parse MODEL < IDS\n"
    "Reads sampled token ids (they follow <|start|>assistant) and writes each message as a line of JSON.\n";

static int parse(int argc, char **argv) {
    static const struct option none[] = {{0}};
    if (getopt_long(argc, argv, "", none, NULL) != -1) return usage_error("parse", "wrong option");
    if (optind + 1 != argc) return usage_error("parse", "one MODEL is needed");
    Tokenizer *t = open_tokenizer(argv[optind]);
    Chat chat = open_chat(t, argv[optind]);
    Reader reader;
    Error e;
    Bytes text = {0}, shown = {0};
    Ids ids = {0};
    stdin_read(&text);
    if (!parse_ids(text.data, &ids, &e)) die(&e);
    reader_init(&reader, &chat);
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
    chat_close(&chat);
    tokenizer_close(t);
    return DONE;
}

/* ---- logits ---- */

static const char logits_help[] =
    "infer logits MODEL [-p TEXT | --ids 1,2,3] [--all] [--top N] [-o FILE.npy] [--gpu N] [--plain]\n"
    "Writes the most likely next tokens: id, logit, probability, text.\n"
    "  -p TEXT      the prompt; a beginning-of-text token is added if the tokenizer says so\n"
    "  --ids IDS    the prompt as token ids, exactly\n"
    "  --all        after every token of the prompt instead of the last\n"
    "  --top N      how many (10)\n"
    "  -o FILE.npy  all logits as a float32 array (positions, vocabulary) instead\n"
    "  --plain      the plain kernels, also where faster ones know the model\n";

typedef struct {
    const char *prompt, *ids, *file;
    bool all, plain;
    int top, gpu;
} LogitsOptions;

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
static bool write_logits(Engine *g, const Ids *ids, const LogitsOptions *o, const Tokenizer *t, Error *e) {
    FILE *f = o->file ? fopen(o->file, "wb") : NULL;
    if (o->file && !f) return fail(e, FAILED, "%s: %s", o->file, strerror(errno));
    if (f) write_npy_header(f, o->all ? ids->n : 1, g->model->vocab);
    Sequence s = {0};
    Sampling greedy = {.top_p = 1, .penalty = 1};
    bool ok = true;
    while (ok && s.tokens.n < ids->n) {
        size_t from = s.tokens.n, n = ids->n - from < (size_t)g->max_tokens ? ids->n - from : (size_t)g->max_tokens;
        Want want = o->all ? WANT_ALL_LOGITS : from + n == ids->n ? WANT_LOGITS : WANT_NOTHING;
        Result r;
        ok = sequence_run(g, &s, ids->data + from, n, want, &greedy, &r, e);
        if (!ok || want == WANT_NOTHING) continue;
        if (f && fwrite(r.logits, sizeof *r.logits * (size_t)g->model->vocab, (size_t)r.rows, f) != (size_t)r.rows)
            ok = fail(e, FAILED, "%s: %s", o->file, strerror(errno));
        for (int i = 0; ok && !f && i < r.rows; i++) {
            if (o->all) printf("after token %zu (%d):\n", from + (size_t)i, ids->data[from + (size_t)i]);
            print_top(r.logits + (size_t)i * (size_t)g->model->vocab, g->model->vocab, o->top, t);
        }
    }
    if (f && fclose(f) && ok) ok = fail(e, FAILED, "%s: %s", o->file, strerror(errno));
    sequence_free(g, &s);
    return ok;
}

static bool logits_of(const char *model, const LogitsOptions *o, Error *e) {
    Checkpoint c = {0};
    Engine g = {0};
    Ids ids = {0};
    Bytes path = {0};
    Tokenizer *t = NULL;
    char *dir = model_get(model, e);
    bool ok = dir;
    if (ok) bytes_print(&path, "%s/tokenizer.json", dir);
    if (ok && (o->prompt || file_exists(path.data))) ok = (t = tokenizer_open(path.data, e));
    if (ok)
        ok = o->ids ? parse_ids(o->ids, &ids, e)
                    : tokenizer_encode(t, o->prompt, strlen(o->prompt), WITH_TEMPLATE, &ids, e);
    if (ok && !ids.n) ok = fail(e, USAGE, "the prompt is empty");
    ok = ok && checkpoint_open(&c, dir, e);
    for (size_t i = 0; ok && i < ids.n; i++)
        if (ids.data[i] >= c.model.vocab)
            ok = fail(e, USAGE, "token %d is outside the vocabulary of %d", ids.data[i], c.model.vocab);
    if (ok && ids.n > (size_t)c.model.context)
        ok = fail(e, USAGE, "the prompt has %zu tokens, the model's context is %d", ids.n, c.model.context);
    Limits limits = {.gpu = o->gpu, .max_seqs = 1, .max_tokens = 512, .plain = o->plain};
    ok = ok && engine_open(&g, backend, &c.model, limits, 0, e) && write_logits(&g, &ids, o, t, e);
    engine_close(&g);
    checkpoint_close(&c);
    tokenizer_close(t);
    ids_free(&ids);
    bytes_free(&path);
    free(dir);
    return ok;
}

static int logits(int argc, char **argv) {
    static const struct option options[] = {
        {"ids", required_argument, NULL, 'i'}, {"all", no_argument, NULL, 'a'},   {"top", required_argument, NULL, 't'},
        {"gpu", required_argument, NULL, 'g'}, {"plain", no_argument, NULL, 'P'}, {0}};
    LogitsOptions o = {.top = 10};
    Error e;
    for (int c; (c = getopt_long(argc, argv, "p:o:", options, NULL)) != -1;) {
        if (c == '?') return usage_error("logits", "wrong option");
        if (c == 'p') o.prompt = optarg;
        if (c == 'o') o.file = optarg;
        if (c == 'i') o.ids = optarg;
        if (c == 'a') o.all = true;
        if (c == 'P') o.plain = true;
        if (c == 't' && !text_whole(optarg, 1, INT32_MAX, &o.top))
            return usage_error("logits", "--top needs a whole number above 0");
        if (c == 'g' && !text_whole(optarg, 0, MOST_GPUS - 1, &o.gpu))
            return usage_error("logits", "--gpu needs a whole number");
    }
    if (optind + 1 != argc) return usage_error("logits", "one MODEL is needed");
    if (!o.prompt == !o.ids) return usage_error("logits", "either -p TEXT or --ids is needed");
    if (!logits_of(argv[optind], &o, &e)) die(&e);
    return DONE;
}

/* ---- main ---- */

static const Command commands[] = {
    {"play", "talk to a model, once or in a loop", play_help, .run_on = play},
    {"download", "fetch a model from the hub", download_help, .run = download},
    {"list", "the models that are here", list_help, .run = list},
    {"rm", "remove a downloaded model", rm_help, .run = rm},
    {"inspect", "what a model is made of, and whether it fits here", inspect_help, .run_on = inspect},
    {"doctor", "GPU, driver, cache, token, network: what is wrong, and its cure", doctor_help, .run_on = doctor},
    {"bench", "how fast prompts and generation are here", bench_help, .run_on = bench},
    {"logits", "what a model expects next, or all logits as a NumPy file", logits_help, .run = logits},
    {"perplexity", "how surprised a model is by a text", perplexity_help, .run_on = perplexity},
    {"tokenize", "text to token ids", tokenize_help, .run = tokenize},
    {"detokenize", "token ids to text", detokenize_help, .run = detokenize},
    {"render", "a conversation as the prompt that the model reads", render_help, .run = render},
    {"parse", "sampled token ids as messages", parse_help, .run = parse},
};

static void print_help(FILE *to) {
    fprintf(to, "infer runs open language models on NVIDIA GPUs.\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(to, "  infer %-11s %s\n", commands[i].name, commands[i].summary);
    fprintf(to, "\ninfer COMMAND --help tells more. MODEL is a directory, or part of the name of a model that `infer "
                "play` lists.\n");
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    if (!strcmp(name, "--version")) {
        printf("infer %s (%s)\n", VERSION, backend->name);
        return DONE;
    }
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) {
        print_help(stdout);
        return DONE;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(name, commands[i].name)) continue;
        for (int j = 2; j < argc && strcmp(argv[j], "--"); j++)
            if (!strcmp(argv[j], "--help")) {
                fputs(commands[i].help, stdout);
                return DONE;
            }
        opterr = 1;
        const Command *c = commands + i;
        int code = c->run ? c->run(argc - 1, argv + 1) : c->run_on(argc - 1, argv + 1, backend);
        if (fflush(stdout) && code == DONE) {
            fprintf(stderr, "infer: stdout: %s\n", strerror(errno));
            return FAILED;
        }
        return code;
    }
    if (*name) fprintf(stderr, "infer: no such command: %s\n\n", name);
    print_help(stderr);
    return USAGE;
}
