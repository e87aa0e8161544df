/* perplexity.c: how surprised is a model by a text? exp of the mean of -log p(token | what stands before it in its
 * window). */
#include "host.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SCORED_AT_ONCE = 128, MOST_TEXT = 1 << 28 };

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

static bool score(Engine *g, const Ids *ids, int window, int step, Error *e) {
    double sum = 0;
    size_t scored = 1, stride = (size_t)step; /* the first token has nothing before it */
    Sequence s = {0};
    bool ok = true;
    for (size_t begin = 0; ok && scored < ids->n; begin += stride) {
        size_t n = ids->n - begin < (size_t)window ? ids->n - begin : (size_t)window;
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

static bool run(Session *s, const Options *o, Error *e) {
    Ids ids = {0};
    Bytes text = {0};
    const Model *m = &s->checkpoint.model;
    if (!session_open(s, o, NEED_TOKENIZER | NEED_CHECKPOINT, e)) return false;
    bool ok = file_read(o->file, MOST_TEXT, &text, e);
    if (!ok) e->code = USAGE;
    ok = ok && tokenizer_encode(s->tokenizer, text.data, text.n, WITH_TEMPLATE, &ids, e);
    if (ok && ids.n < 2) ok = fail(e, USAGE, "%s: a text of at least two tokens is needed", o->file);
    int window = o->context ? o->context : m->context < 1024 ? m->context : 1024;
    int stride = o->stride ? o->stride : window / 2;
    if (ok && stride >= window)
        ok = fail(e, USAGE, "a stride of %d leaves tokens between windows of %d out", stride, window);
    ok = ok && session_load(s, o, window, e) && score(&s->engine, &ids, window, stride, e);
    ids_free(&ids);
    bytes_free(&text);
    return ok;
}

int perplexity(const Options *o) {
    Session s;
    Error e;
    if (!o->file) {
        fail(&e, USAGE, "-f FILE is missing; see infer perplexity --help");
        die(&e);
    }
    bool ok = run(&s, o, &e);
    session_close(&s);
    if (!ok) die(&e);
    return DONE;
}
