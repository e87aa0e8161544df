/* explain.c: `infer explain` shows how a model reads a text: the probability that it gave each token, what else it
 * expected there and which experts the token used. It writes to the terminal or one HTML page without other files. */
#include "host.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

enum { CHOICES = 4, MOST_TOKENS = 512, MOST_CELLS = 64 };

static const char *output;

typedef struct {
    Session s;
    size_t read;       /* tokens of all steps so far */
    float *expert;     /* (tokens, n_layers, top_k), of layers with a router */
    int cells, shared; /* characters in a line of the grid, 0: no grid; experts that share a dot */
    bool html;
} Reading;

static const char page[] = /* colours that shine through suit light and dark pages */
    "<style>:root{color-scheme:light dark}\n"
    "body{display:flex;flex-wrap:wrap;gap:1em 4px;margin:1.5em}h1,p{width:100%;margin:0;font:1.3em sans-serif}"
    "p{font-size:1em}\n"
    "pre{margin:0;padding:0 .6em .5em 0;font:15px/1.35 monospace;unicode-bidi:isolate}\n"
    "b{display:block;padding:.2em .4em;margin-bottom:.3em;font-size:1.5em;border-radius:4px;background:#8883}\n"
    ".s1 b{background:#2c75}.s2 b{background:#fc07}.s3 b{background:#f807}.s4 b{background:#f337}</style>\n";

static const char legend[] =
    "Of each token: the probability that the model gave it, its surprise in bits (from 1, 3, 6 and 10 on in another "
    "colour), the token, its id and its bytes. Below it what the model expected there, with probabilities";

/* A Tap. */
static void keep_experts(void *data, const char *stage, int layer, const float *values, int rows, int cols) {
    Reading *x = data;
    const size_t n = (size_t)cols, layers = (size_t)x->s.checkpoint.model.n_layers;
    for (size_t r = 0; r < (size_t)rows && !strcmp(stage, "experts"); r++)
        memcpy(x->expert + ((x->read + r) * layers + (size_t)layer) * n, values + r * n, n * sizeof *values);
    if (!strcmp(stage, "logits")) x->read += (size_t)rows; /* the last stage of a step */
}

/* Writes a text for a page. */
static void put_html(const char *text) {
    for (; *text; text++) printf(strchr("&<>", *text) ? "&#%d;" : "%c", *text);
}

/* Writes how to read what follows; on a page first whose text it is. */
static void put_legend(const Reading *x, const Ids *ids) {
    LocalBytes text = {0};
    LocalBytes shown = {0};
    LocalText whole = text_print(
        "%s%s.", legend,
        x->cells ? "; in front of that the experts that the token took: a dot is an expert, a row a layer" : "");
    if (!x->html) return put_text(stderr, FAINT, "", whole);
    bytes_print(&text, "%s reads: ", x->s.name);
    for (size_t i = 0; i < ids->n && x->s.tokenizer; i++)
        tokenizer_bytes(x->s.tokenizer, &(Decoder){.begun = i > 0}, ids->data[i], &text);
    bytes_shown(&shown, text.data, text.n, true);
    fputs("<!doctype html><meta charset=utf-8><title>", stdout), put_html(shown.data);
    printf("</title>%s<h1>", page), put_html(shown.data);
    printf("</h1><p>%s</p>\n", whole);
}

/* Appends a token in visible characters. */
static void add_token(const Reading *x, int id, Bytes *out) {
    LocalBytes raw = {0};
    if (x->s.tokenizer) tokenizer_bytes(x->s.tokenizer, &(Decoder){.begun = true}, id, &raw);
    for (size_t i = 0, n; i < raw.n; i += n) {
        uint32_t code = 0;
        int length = utf8_decode(raw.data + i, raw.n - i, &code);
        bool seen = length > 0 && ((code > 32 && code < 127) || code > 159);
        n = seen ? (size_t)length : 1;
        if (seen) bytes_add(out, raw.data + i, n);
        if (!seen) bytes_print(out, raw.data[i] == ' ' ? "␣" : "\\x%02X", raw.data[i] & 255);
    }
    if (!raw.n) bytes_print(out, "(%d)", id);
}

/* Appends four layers of the grid in Braille: a dot for each expert that token t used. */
static void add_grid(const Reading *x, size_t t, int layer, Bytes *out) {
    static const unsigned char dot[4][2] = {{1, 8}, {2, 16}, {4, 32}, {64, 128}};
    const Model *m = &x->s.checkpoint.model;
    const float *expert = x->expert + (t * (size_t)m->n_layers + (size_t)layer) * (size_t)m->top_k;
    unsigned char cell[MOST_CELLS] = {0};
    for (int i = 0; i < 4 * m->top_k && layer + i / m->top_k < m->n_layers; i++) {
        int column = (int)expert[i] / x->shared;
        if (m->layer[layer + i / m->top_k].router.rows) cell[column / 2] |= dot[i / m->top_k][column % 2];
    }
    for (int i = 0; i < x->cells; i++) bytes_print(out, "\xE2%c%c", 0xA0 | cell[i] >> 6, 0x80 | (cell[i] & 63));
}

/* Shows token t of the text and, but for the first token, what the model expected in its place. */
static void put_place(const Reading *x, size_t t, int id, const float *logits) {
    static const char *const colour[] = {"\033[39m", "\033[32m", "\033[33m", "\033[35m", "\033[31m"};
    const Model *m = &x->s.checkpoint.model;
    int best[CHOICES], n = t ? likeliest(logits, m->vocab, CHOICES, best) : 0;
    double all = log_sum_exp(logits, m->vocab), bits = t ? (all - (double)logits[id]) / M_LN2 : 0;
    int level = (bits >= 1) + (bits >= 3) + (bits >= 6) + (bits >= 10);
    LocalBytes raw = {0}, token = {0}, facts = {0}, rows = {0};
    LocalText chance =
        t ? text_print("%6.2f %% %5.1f bits  ", 100 * exp2(-bits), bits) : text_print("%-21s", "the first token:");
    add_token(x, id, &token);
    if (x->s.tokenizer) tokenizer_bytes(x->s.tokenizer, &(Decoder){.begun = true}, id, &raw);
    bytes_print(&facts, "%d:", id);
    for (size_t i = 0; i < raw.n; i++) bytes_print(&facts, " %02X", raw.data[i] & 255);
    for (int i = 0; i < n || (x->cells && 4 * i < m->n_layers); i++) {
        bytes_text(&rows, "\n");
        if (x->cells) add_grid(x, t, 4 * i, &rows);
        if (i < n) bytes_print(&rows, " %6.2f %% ", 100 * exp((double)logits[best[i]] - all));
        if (i < n) add_token(x, best[i], &rows);
    }
    LocalText line = text_print("%s  %s", token.data, facts.data);
    if (!x->html) put_text(stdout, colour[level], chance, line);
    if (!x->html && rows.n) puts(rows.data + 1);
    if (!x->html) return;
    printf("<pre class=s%d>%s<b>", level, chance), put_html(token.data);
    printf("</b>%s", facts.data), put_html(rows.n ? rows.data : ""), puts("</pre>");
}

static void take_token(Stream *s, size_t position, int token, const float *logits, bool last) {
    const Reading *x = s->owner;
    if (position == 1) put_place(x, 0, s->tokens.data[0], logits);
    if (!last) put_place(x, position, token, logits);
}

static int run_explain(const char *model) {
    Error e;
    static Reading x;
    LocalIds ids = {0};
    const Model *m = &x.s.checkpoint.model;
    x.html = output;
    if (!session_text(&x.s, model, &ids, &e)) die(&e);
    if (ids.n > MOST_TOKENS) fail(&e, USAGE, "the text has %zu tokens; %d at most", ids.n, MOST_TOKENS), die(&e);
    x.expert = allocate_zero(ids.n * (size_t)(m->n_layers * m->top_k), sizeof *x.expert);
    if (m->n_experts > 1) {
        int dots = output || columns(stdout) > 2 * MOST_CELLS ? 2 * MOST_CELLS : columns(stdout);
        x.shared = (m->n_experts + dots - 1) / dots;
        x.cells = (m->n_experts - 1) / (2 * x.shared) + 1;
        x.s.tap = keep_experts, x.s.tap_data = &x;
    }
    if (x.html && !output_open(output, &e)) die(&e);
    if (!session_load(&x.s, (Limits){0}, 0, &e)) die(&e);
    if (x.html || isatty(STDOUT_FILENO)) put_legend(&x, &ids);
    if (!scheduler_score(x.s.scheduler, ids.data, ids.n, 1, take_token, &x, &e)) die(&e);
    return DONE;
}

static const Option explain_options[] = {
    {'o', "output", "FILE.html", TEXT, &output, .help = "write a page that needs no other file"}, {0}};
const Command explain = {"explain",
                         "MODEL [TEXT]",
                         "how a model reads a text, token by token",
                         {text_options, explain_options, load_options},
                         run_explain};
