/* engine.c: pages, sequences, generation. See engine.h. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

static int pages_for(size_t tokens) { return (int)((tokens + PAGE - 1) / PAGE); }

bool engine_open(Engine *g, const Backend *backend, const Model *m, Limits limits, int context, Error *e) {
    *g = (Engine){.backend = backend, .model = m};
    if (context > m->context)
        return fail(e, USAGE, "a context of %d is more than the %d that the model was made for", context, m->context);
    limits.context = context ? context : m->context;
    int wanted = pages_for((size_t)limits.context), pages = wanted * limits.max_seqs;
    if (limits.max_tokens > wanted * PAGE * limits.max_seqs) limits.max_tokens = wanted * PAGE * limits.max_seqs;
    g->max_tokens = limits.max_tokens; /* no step is longer than all contexts */
    g->state = backend->open(m, &limits, &pages, e);
    if (!g->state) return false;
    if (pages < wanted && context) {
        backend->close(g->state);
        return fail(e, NO_ROOM, "a context of %d tokens does not fit beside the weights; %d would: use --ctx %d",
                    context, pages * PAGE, pages * PAGE);
    }
    g->context = pages < wanted ? pages * PAGE : limits.context;
    for (int i = pages; i--;) ids_add(&g->free_pages, i);
    return true;
}

void engine_close(Engine *g) {
    if (g->state) g->backend->close(g->state);
    ids_free(&g->free_pages);
    *g = (Engine){0};
}

void sequence_rewind(Engine *g, Sequence *s, size_t n) {
    if (n < s->tokens.n) s->tokens.n = n;
    while ((int)s->pages.n > pages_for(s->tokens.n)) ids_add(&g->free_pages, s->pages.data[--s->pages.n]);
}

void sequence_free(Engine *g, Sequence *s) {
    sequence_rewind(g, s, 0);
    ids_free(&s->tokens);
    ids_free(&s->pages);
}

bool sequence_submit(Engine *g, Sequence *s, const int *ids, size_t n, Want want, const Sampling *how, Error *e) {
    if (s->tokens.n + n > (size_t)g->context) return fail(e, NO_ROOM, "the context of %d tokens is full", g->context);
    while ((int)s->pages.n < pages_for(s->tokens.n + n)) {
        if (!g->free_pages.n) return fail(e, NO_ROOM, "all pages of the cache are in use");
        ids_add(&s->pages, g->free_pages.data[--g->free_pages.n]);
    }
    int first[2] = {0, (int)n}, start = (int)s->tokens.n;
    Batch b = {.seqs = 1,
               .max_pages = (int)s->pages.n,
               .slot = &s->slot,
               .first = first,
               .token = ids,
               .start = &start,
               .page = s->pages.data,
               .sampling = how,
               .want = &want};
    if (!g->backend->submit(g->state, &b, e)) return false;
    ids_append(&s->tokens, ids, n);
    return true;
}

static bool no_nan(int token, Error *e) {
    return token != DREW_NAN ||
           fail(e, FAILED, "the logits hold a NaN: the weights are damaged; download the model again");
}

bool sequence_run(Engine *g, Sequence *s, const int *ids, size_t n, Want want, const Sampling *how, Result *r,
                  Error *e) {
    return sequence_submit(g, s, ids, n, want, how, e) && g->backend->collect(g->state, r, e) && no_nan(r->token[0], e);
}

bool generation_begin(Generation *w, Engine *g, Sequence *s, const int *ids, size_t n, const Sampling *how,
                      const volatile sig_atomic_t *stop, Error *e) {
    size_t same = 0;
    while (same < n && same < s->tokens.n && s->tokens.data[same] == ids[same]) same++;
    if (same == n && n) same--; /* the last token's logits are needed */
    *w = (Generation){.engine = g, .sequence = s, .sampling = *how, .prompt = n, .reused = same};
    if (!n) return fail(e, USAGE, "the prompt is empty");
    if (n >= (size_t)g->context)
        return fail(e, NO_ROOM,
                    "the prompt has %zu tokens, the context %d: shorten it, or enlarge the context with --ctx", n,
                    g->context);
    sequence_rewind(g, s, same);
    while (s->tokens.n < n) {
        if (stop && *stop) return fail(e, INTERRUPTED, "interrupted");
        size_t chunk = n - s->tokens.n;
        if (chunk > (size_t)g->max_tokens) chunk = (size_t)g->max_tokens;
        bool last = s->tokens.n + chunk == n;
        const int *from = ids + s->tokens.n;
        Result none;
        if (!(last ? sequence_submit(g, s, from, chunk, WANT_TOKEN, how, e)
                   : sequence_run(g, s, from, chunk, WANT_NOTHING, how, &none, e)))
            return false;
    }
    return w->waiting = true;
}

bool generation_next(Generation *w, int *token, Error *e) {
    const int drawn = -1;
    Engine *g = w->engine;
    Sequence *s = w->sequence;
    Result result;
    *token = DREW_NOTHING;
    if (!w->waiting) return true;
    bool more = s->tokens.n < (size_t)g->context;
    if (more && !sequence_submit(g, s, &drawn, 1, WANT_TOKEN, &w->sampling, e)) return false;
    w->waiting = more;
    if (!g->backend->collect(g->state, &result, e)) return false;
    *token = result.token[0];
    if (!no_nan(*token, e)) return false;
    if (more) s->tokens.data[s->tokens.n - 1] = *token; /* the one that was submitted before it was known */
    return true;
}

void generation_end(Generation *w) {
    Result ignored;
    Error e;
    if (w->waiting) w->engine->backend->collect(w->engine->state, &ignored, &e);
    w->waiting = false;
}
