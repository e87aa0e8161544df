/* perplexity.c: how surprised is a model by a text? exp of the mean of -log p(token | what stands before it in its
 * window). */
#include "perplexity.h"
#include "download.h"
#include "engine.h"
#include "model.h"
#include "tokenizer.h"

#include <getopt.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SCORED_AT_ONCE = 128, MOST_TEXT = 1 << 28 };

const char perplexity_help[] =
    "infer perplexity MODEL -f FILE [--ctx N] [--stride N] [--gpu N] [--plain]\n"
    "Writes the perplexity of a text, the mean negative log-likelihood of its tokens and their number.\n"
    "  -f FILE     the text; a beginning-of-text token is added if the tokenizer says so\n"
    "  --ctx N     tokens of a window (1024, or what the model was made for if that is less)\n"
    "  --stride N  tokens from one window to the next (half a window); each token is scored in the first window that\n"
    "              has it, so that all but those of the first see at least ctx - stride tokens before them\n"
    "  --plain     the plain kernels, also where faster ones know the model\n";

typedef struct {
    const char *file;
    int ctx, stride, gpu;
    bool plain;
} Options;

/* Adds what tokens from .. n - 1 of a window cost, given those before them; `from` is above 0. */
static bool score_window(Engine *g, Sequence *s, const int *ids, size_t n, size_t from, double *sum, Error *e) {
    const Sampling greedy = {.top_p = 1, .penalty = 1};
    sequence_rewind(g, s, 0);
    while (s->tokens.n < n - 1) { /* the last token is only predicted */
        size_t at = s->tokens.n, end = at < from - 1 ? from - 1 : n - 1,
               most = at < from - 1 ? (size_t)g->max_tokens : SCORED_AT_ONCE;
        size_t now = end - at < most ? end - at : most;
        Want want = at < from - 1 ? WANT_NOTHING : WANT_ALL_LOGITS;
        Result r;
        if (!sequence_run(g, s, ids + at, now, want, &greedy, &r, e)) return false;
        for (int i = 0; i < r.rows; i++) {
            const float *logits = r.logits + (size_t)i * (size_t)g->model->vocab;
            *sum += log_sum_exp(logits, g->model->vocab) - (double)logits[ids[at + (size_t)i + 1]];
        }
    }
    return true;
}

static bool score(Engine *g, const Ids *ids, const Options *o, Error *e) {
    double sum = 0;
    size_t scored = 1, stride = (size_t)o->stride; /* the first token has nothing before it */
    Sequence s = {0};
    bool ok = true;
    for (size_t begin = 0; ok && scored < ids->n; begin += stride) {
        size_t n = ids->n - begin < (size_t)o->ctx ? ids->n - begin : (size_t)o->ctx;
        ok = score_window(g, &s, ids->data + begin, n, scored - begin, &sum, e);
        scored = begin + n;
    }
    sequence_free(g, &s);
    if (ok) {
        double mean = sum / (double)(ids->n - 1);
        printf("perplexity %.6g  nll %.8g  tokens %zu\n", exp(mean), mean, ids->n - 1);
    }
    return ok;
}

static bool run(const char *model, Options *o, const Backend *backend, Error *e) {
    Checkpoint c = {0};
    Engine g = {0};
    Ids ids = {0};
    Bytes path = {0}, text = {0};
    Tokenizer *t = NULL;
    char *dir = model_get(model, e);
    if (dir) bytes_print(&path, "%s/tokenizer.json", dir);
    bool readable = dir && file_read(o->file, MOST_TEXT, &text, e);
    if (dir && !readable) e->code = USAGE;
    bool ok = readable && (t = tokenizer_open(path.data, e)) &&
              tokenizer_encode(t, text.data, text.n, WITH_TEMPLATE, &ids, e) && checkpoint_open(&c, dir, e);
    if (ok && ids.n < 2) ok = fail(e, USAGE, "%s: a text of at least two tokens is needed", o->file);
    for (size_t i = 0; ok && i < ids.n; i++)
        if (ids.data[i] >= c.model.vocab)
            ok = fail(e, BAD_MODEL, "%s: tokenizer.json and config.json belong to different models", dir);
    if (ok && !o->ctx) o->ctx = c.model.context < 1024 ? c.model.context : 1024;
    if (ok && !o->stride) o->stride = o->ctx / 2;
    if (ok && o->stride >= o->ctx)
        ok = fail(e, USAGE, "a stride of %d leaves tokens between windows of %d out", o->stride, o->ctx);
    Limits limits = {.gpu = o->gpu, .max_seqs = 1, .max_tokens = backend->prompt_step, .plain = o->plain};
    ok = ok && engine_open(&g, backend, &c.model, limits, o->ctx, e) && score(&g, &ids, o, e);
    engine_close(&g);
    checkpoint_close(&c);
    tokenizer_close(t);
    ids_free(&ids);
    bytes_free(&path);
    bytes_free(&text);
    free(dir);
    return ok;
}

int perplexity(int argc, char **argv, const Backend *backend) {
    static const struct option options[] = {{"ctx", required_argument, NULL, 'c'},
                                            {"stride", required_argument, NULL, 's'},
                                            {"gpu", required_argument, NULL, 'g'},
                                            {"plain", no_argument, NULL, 'P'},
                                            {0}};
    Options o = {0};
    Error e;
    bool ok = true;
    for (int c; (c = getopt_long(argc, argv, "f:", options, NULL)) != -1;) {
        if (c == 'f') o.file = optarg;
        if (c == 'P') o.plain = true;
        if ((c == 'c' && !text_whole(optarg, 2, INT_MAX, &o.ctx)) ||
            (c == 's' && !text_whole(optarg, 1, INT_MAX, &o.stride)) ||
            (c == 'g' && !text_whole(optarg, 0, MOST_GPUS - 1, &o.gpu))) {
            fail(&e, USAGE, "'%s' is no whole number from %d on", optarg, c == 'c' ? 2 : c == 's');
            die(&e);
        }
        ok &= c != '?';
    }
    if (!ok || optind + 1 != argc || !o.file) {
        fail(&e, USAGE, "one MODEL and -f FILE are needed; see infer perplexity --help");
        die(&e);
    }
    if (!run(argv[optind], &o, backend, &e)) die(&e);
    return DONE;
}
