/* perplexity.c: how surprised is a model by a text? exp of the mean of -log p(token | what stands before it). */
#include "host.h"

#include <math.h>
#include <stdio.h>

static struct {
    const char *file;
    int context, stride;
} given;

static Session s;
static double cost; /* sum of -log p */

static void add_cost(Stream *t, size_t position, int token, const float *logits, bool last) {
    const int vocab = s.checkpoint.model.vocab;
    if (!last) cost += log_sum_exp(logits, vocab) - (double)logits[token]; /* the last is not the text's */
}

static int run_perplexity(const char *model) {
    Error e;
    LocalIds ids = {0};
    LocalBytes text = {0};
    if (!given.file) fail(&e, USAGE, "-f FILE is missing: the text; see infer perplexity --help"), die(&e);
    text_read(given.file, &text);
    if (!session_open(&s, model, NEED_TOKENIZER | NEED_CHECKPOINT, &e) ||
        !tokenizer_encode(s.tokenizer, text.data, text.n, WITH_TEMPLATE, &ids, &e))
        die(&e);
    int context = s.checkpoint.model.context, window = given.context ? given.context : context < 1024 ? context : 1024;
    int stride = given.stride ? given.stride : window / 2;
    if (ids.n < 2) fail(&e, USAGE, "a text of at least two tokens is needed"), die(&e);
    if (stride >= window)
        fail(&e, USAGE, "a stride of %d leaves tokens between windows of %d out", stride, window), die(&e);
    if (!session_load(&s, (Limits){0}, window, &e)) die(&e);
    size_t scored = 1; /* nothing stands before the first token; each other counts in the first window that has it */
    for (size_t begin = 0; scored < ids.n; begin += (size_t)stride) {
        size_t n = ids.n - begin < (size_t)window ? ids.n - begin : (size_t)window;
        if (!scheduler_score(s.scheduler, ids.data + begin, n, scored - begin, add_cost, NULL, &e)) die(&e);
        scored = begin + n;
    }
    double mean = cost / (double)(ids.n - 1);
    LocalText line = text_print("perplexity %.6g  nll %.8g  tokens %zu", exp(mean), mean, ids.n - 1);
    put_text(stdout, NULL, "", line);
    return DONE;
}

static const Option perplexity_options[] = {
    {'f', "file", "FILE", TEXT, &given.file,
     .help = "the text; -: stdin; a beginning-of-text token is added if the tokenizer wants one"},
    {0, "ctx", "N", WHOLE, &given.context, 2, 1 << 24,
     .help = "tokens of a window (1024, or the model's context if that is less)"},
    {0, "stride", "N", WHOLE, &given.stride, 1, 1 << 24,
     .help = "tokens from one window to the next (half a window); each token is scored in the first window that has "
             "it, so those after the first window see at least ctx - stride tokens before them"},
    {0}};
const Command perplexity = {
    "perplexity", "MODEL", "how surprised a model is by a text", {perplexity_options, load_options}, run_perplexity};
