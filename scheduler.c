/* scheduler.c: an engine, which is a model on a backend, and the scheduler that continues many texts on it, step by
 * step: texts, pages of the cache, prefixes that texts share. host.h declares what others use. */
#include "host.h"

#include <math.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/param.h>
#include <sys/queue.h>

/* ---- engine ---- */

static int pages_for(size_t tokens) { return (int)howmany(tokens, PAGE); }

bool model_has_context(const Model *m, int context, Error *e) {
    return context <= m->context ||
           fail(e, USAGE, "a context of %d is more than the %d that the model was made for: use --ctx %d", context,
                m->context, m->context);
}

bool engine_open(Engine *g, const Backend *backend, const Model *m, Limits limits, int context, Error *e) {
    *g = (Engine){.backend = backend, .model = m, .max_seqs = limits.max_seqs};
    if (!model_has_context(m, context, e)) return false;
    limits.context = context ? context : m->context;
    limits.allowed = &g->allowed;
    int wanted = pages_for((size_t)limits.context), pages = wanted * limits.max_seqs;
    g->step_tokens = (int)MIN(limits.max_tokens, (int64_t)pages * PAGE); /* all texts together have no more */
    limits.max_tokens = MAX(g->step_tokens, TOKENS_PER_ANSWER * g->max_seqs);
    if (limits.cache) pages = MIN(pages, pages_for((size_t)limits.cache));
    g->state = backend->open(m, &limits, &pages, e);
    if (!g->state) return false;
    if (pages < wanted && context) {
        const bool cache = limits.cache && pages == pages_for((size_t)limits.cache);
        engine_close(g);
        return fail(e, NO_ROOM, "a context of %d tokens does not fit %s; %d would: use --ctx %d", context,
                    cache ? "into --cache" : "beside the weights", pages * PAGE, pages * PAGE);
    }
    g->context = pages < wanted ? pages * PAGE : limits.context;
    g->pages = pages;
    return true;
}

void engine_close(Engine *g) {
    if (g->state) g->backend->close(g->state);
    *g = (Engine){0};
}

/* ---- scheduler ---- */

enum { SCORED_TOKENS = 32 }; /* the most of a prompt in one step, if `take` gets their logits */
enum { LATE = -3 };          /* beside DREW_NAN: see Step.late */
static const double ALLOW_MOST = 0.05, ALLOW_SLOW = 0.005; /* seconds; see allow_tokens() */

typedef struct CachePage { /* a page of the cache */
    TAILQ_ENTRY(CachePage) idle;
    int owners;            /* streams that use it */
    uint64_t name, before; /* name: never used twice; 0: no stream finds it. before: name of the page before, or 0 */
    int token[PAGE];
} CachePage;

typedef struct { /* what a Batch has of its sequences (first[0] stays 0), and the streams that they are */
    int n;
    Stream *stream[MOST_STREAMS]; /* NULL: it was removed */
    int slot[MOST_STREAMS], first[MOST_STREAMS + 1], start[MOST_STREAMS];
    Sampling sampling[MOST_STREAMS];
    Want want[MOST_STREAMS];
    bool late[MOST_STREAMS]; /* it was not known in time what may be drawn: the draw does not count */
} Step;

struct Scheduler {
    Engine *engine;
    SchedulerState now;
    Stream **stream; /* (running + waiting) in order of arrival: the first ones have slots and pages, the others wait */
    CachePage *page;
    TAILQ_HEAD(, CachePage) idle; /* pages that no stream uses, the longest unused first */
    void *known;                  /* tsearch's tree of the pages that have names */
    uint64_t names, allowed;      /* allowed: the last Sampling.allowed */
    int behind[2]; /* of a step: the first stream that was late, among the quick and among the slow ones */
    Ids slots, token, table;
    Step step[2];                  /* the one in flight and the next */
    double cost[MOST_STREAMS + 1]; /* [n]: seconds a token in a step that continues n texts and does nothing else */
    size_t turn;                   /* pauses so far: says whose turn it is */
};

static int by_text(const void *a, const void *b) {
    const CachePage *x = a, *y = b;
    int order = (x->before > y->before) - (x->before < y->before);
    return order ? order : memcmp(x->token, y->token, sizeof x->token);
}

static void forget_page(Scheduler *s, CachePage *p) {
    if (p->name) tdelete(p, &s->known, by_text), s->now.kept--;
    p->name = 0;
}

static void hold_page(Scheduler *s, Stream *t, CachePage *p) {
    if (!p->owners) TAILQ_REMOVE(&s->idle, p, idle);
    s->now.idle -= !p->owners++;
    ids_add(&t->pages, (int)(p - s->page));
}

/* Gives a stream pages for this many tokens, the longest unused first. False: too few are left. */
static bool take_pages(Scheduler *s, Stream *t, size_t tokens) {
    const size_t need = (size_t)pages_for(tokens);
    if (need > t->pages.n + s->now.idle) return false;
    while (t->pages.n < need) {
        forget_page(s, TAILQ_FIRST(&s->idle));
        hold_page(s, t, TAILQ_FIRST(&s->idle));
    }
    return true;
}

/* Takes all pages from a stream, last page first: the beginning of a text stays in the cache the longest. */
static void drop_pages(Scheduler *s, Stream *t) {
    while (t->pages.n) {
        CachePage *p = s->page + t->pages.data[--t->pages.n];
        if (--p->owners) continue;
        if (p->name) TAILQ_INSERT_TAIL(&s->idle, p, idle);
        if (!p->name) TAILQ_INSERT_HEAD(&s->idle, p, idle);
        s->now.idle++;
    }
    t->sent = t->filed = 0;
    t->chain = t->salt;
}

/* Gives the first waiting stream a slot and pages for all its tokens. Pages of its text in the cache are shared. */
static bool admit(Scheduler *s) {
    Stream *t = s->stream[s->now.running];
    CachePage key, **known;
    const bool more = t->tokens.n + 1 < t->most; /* the last token of a text is never stored */
    while (s->slots.n && t->want != WANT_ALL_LOGITS && t->sent + PAGE < t->tokens.n) {
        key.before = t->chain;
        memcpy(key.token, t->tokens.data + t->sent, sizeof key.token);
        if (!(known = tfind(&key, &s->known, by_text))) break;
        hold_page(s, t, *known);
        t->chain = (*known)->name;
        t->filed++, t->sent += PAGE;
    }
    if (!s->slots.n || !take_pages(s, t, t->tokens.n + more)) return drop_pages(s, t), false;
    if (!t->published) t->reused = t->sent;
    t->slot = s->slots.data[--s->slots.n];
    return s->now.waiting--, ++s->now.running;
}

/* Lets the youngest running stream wait again. */
static void preempt(Scheduler *s) {
    Stream *t = s->stream[--s->now.running];
    drop_pages(s, t);
    ids_add(&s->slots, t->slot);
    s->now.waiting++, s->now.preempted++;
}

/* Names the full pages of a stream, so that others find them. A draw may have to be repeated if only some tokens are
 * allowed, and writes the last token once more. */
static void file_pages(Scheduler *s, Stream *t) {
    for (; (t->filed + 1) * PAGE + (t->allow != NULL) <= t->sent && (t->filed + 1) * PAGE <= t->tokens.n; t->filed++) {
        CachePage *p = s->page + t->pages.data[t->filed], *known;
        p->before = t->chain;
        memcpy(p->token, t->tokens.data + t->filed * PAGE, sizeof p->token);
        known = *(CachePage **)tsearch(p, &s->known, by_text);
        if (known == p) p->name = ++s->names, s->now.kept++;
        t->chain = known->name;
    }
}

Scheduler *scheduler_open(Engine *g) {
    Scheduler *s = allocate_zero(1, sizeof *s);
    s->engine = g;
    s->now.pages = s->now.idle = (size_t)g->pages;
    s->page = allocate_zero(s->now.pages, sizeof *s->page);
    TAILQ_INIT(&s->idle);
    for (size_t i = 0; i < s->now.pages; i++) TAILQ_INSERT_TAIL(&s->idle, s->page + i, idle);
    for (int i = 0; i < g->max_seqs; i++) ids_add(&s->slots, i);
    return s;
}

void scheduler_close(Scheduler *s) {
    if (!s) return;
    for (size_t i = 0; i < s->now.pages; i++) forget_page(s, s->page + i);
    ids_free(&s->slots), ids_free(&s->token), ids_free(&s->table);
    free(s->stream), free(s->page), free(s);
}

void scheduler_add(Scheduler *s, Stream *t) {
    const size_t n = s->now.running + s->now.waiting++;
    s->stream = reallocate(s->stream, (n + 1) * sizeof *s->stream);
    s->stream[n] = t;
    t->chain = t->salt;
    if (t->sampling.temperature < 0.01f) t->sampling.temperature = 0; /* logits are divided by it */
}

void scheduler_remove(Scheduler *s, Stream *t) {
    size_t i = 0, n = s->now.running + s->now.waiting;
    while (i < n && s->stream[i] != t) i++;
    if (i == n) return;
    drop_pages(s, t);
    ids_free(&t->pages);
    if (i >= s->now.running) s->now.waiting--;
    if (i < s->now.running) ids_add(&s->slots, t->slot), s->now.running--;
    memmove(s->stream + i, s->stream + i + 1, (n - i - 1) * sizeof *s->stream);
    for (i = 0; i < 2 * MOST_STREAMS; i++)
        if (s->step[i % 2].stream[i / 2] == t) s->step[i % 2].stream[i / 2] = NULL;
}

/* Adds the next n tokens of a stream to the step. A token that is not known yet is the one that its slot drew last. */
static void add_tokens(Scheduler *s, Stream *t, size_t n) {
    Step *step = s->step + s->now.steps % 2;
    const size_t end = t->sent + n;
    Want want = t->want;
    if (end < t->tokens.n && (want != WANT_ALL_LOGITS || end < t->published)) want = WANT_NOTHING;
    const int i = step->n++;
    step->stream[i] = t, step->slot[i] = t->slot, step->sampling[i] = t->sampling, step->want[i] = want;
    step->late[i] = false;
    step->start[i] = (int)t->sent, step->first[i + 1] = step->first[i] + (int)n;
    step->sampling[i].answer = (int)t->prompt;
    step->sampling[i].allowed = t->allow && end >= t->tokens.n ? ++s->allowed : 0;
    t->drawing += end >= t->tokens.n;
    for (; t->sent < end; t->sent++) ids_add(&s->token, t->sent < t->tokens.n ? t->tokens.data[t->sent] : -1);
}

/* Has it more than one known token that is not computed? */
static bool is_reading(const Stream *t) { return t->sent + 1 < t->tokens.n; }

/* Can more of a stream be computed now? Draws for a preempted stream must be collected first. */
static bool is_ready(const Stream *t) {
    return t->tokens.n + (size_t)t->drawing < t->most && (!t->drawing || t->sent == t->tokens.n);
}

/* How many of n texts a step should continue. Kernels compute texts in tiles of 8 to 64, so 17 can take so much longer
 * than 16 that all are written faster if they pause in turn. Measured costs decide. They are forgotten every 512
 * steps, and an unknown cost is 0, so that each is tried. */
static size_t texts_worth_a_step(const Scheduler *s, size_t n) {
    size_t best = n;
    for (size_t tile = 8; tile <= MIN(n, 64); tile *= 2) { /* whole tiles are more than n / 2, so pauses are short */
        const size_t whole = n / tile * tile;
        if (s->cost[whole] < s->cost[best]) best = whole;
    }
    return best;
}

static void plan_step(Scheduler *s) {
    size_t answers = 0, readers = 0, ready = 0, k = 0;
    s->token.n = 0;
    for (size_t i = 0; i < s->now.running; i++) {
        readers += is_reading(s->stream[i]);
        ready += !is_reading(s->stream[i]) && is_ready(s->stream[i]);
    }
    const size_t pauses = readers ? 0 : ready - texts_worth_a_step(s, ready);
    s->turn += pauses;
    for (size_t i = 0; i < s->now.running; i++) {
        Stream *t = s->stream[i];
        if (is_reading(t) || !is_ready(t) || (k++ + s->turn) % ready < pauses) continue;
        while (i < s->now.running && !take_pages(s, t, t->sent + 1)) preempt(s);
        if (i < s->now.running) add_tokens(s, t, 1), answers++;
    }
    const size_t most = MAX((size_t)s->engine->step_tokens, TOKENS_PER_ANSWER * ready);
    size_t room = most - answers; /* several prompts share it, so that none waits for a long one */
    readers += s->now.waiting;
    for (size_t i = 0; i < s->now.running + s->now.waiting && room; i++) {
        Stream *t = s->stream[i];
        const bool waits = i == s->now.running;
        if (waits && (!is_ready(t) || !admit(s))) break;
        if (!waits && (!is_reading(t) || !is_ready(t))) continue;
        size_t n = t->tokens.n - t->sent, fair = MAX(room / readers, most / 4 + 1);
        if (t->want == WANT_ALL_LOGITS)
            n = t->sent + 1 < t->published ? t->published - 1 - t->sent : MIN(n, SCORED_TOKENS);
        n = MIN(n, MIN(fair, room));
        add_tokens(s, t, n);
        room -= n;
    }
}

static bool submit_step(Scheduler *s, Error *e) {
    const Step *p = s->step + s->now.steps % 2;
    size_t pages = 0;
    s->table.n = 0;
    for (int i = 0; i < p->n; i++) pages = MAX(pages, p->stream[i]->pages.n);
    for (int i = 0; i < p->n; i++) {
        ids_append(&s->table, p->stream[i]->pages.data, p->stream[i]->pages.n);
        while (s->table.n < (size_t)(i + 1) * pages) ids_add(&s->table, 0);
        file_pages(s, p->stream[i]);
    }
    Batch b = {p->n, (int)pages, p->slot, p->first, s->token.data, p->start, s->table.data, p->sampling, p->want};
    return s->now.outstanding++, s->now.steps++, s->engine->backend->submit(s->engine->state, &b, e);
}

/* Passes a token to `take`. The last one removes the stream first. */
static void publish(Scheduler *s, Stream *t, size_t position, int token, const float *logits) {
    if (position < t->published) return;
    t->published = position + 1;
    for (size_t i = 0; t->stop && position >= t->prompt && i < t->stop->n; i++) t->stopped |= token == t->stop->data[i];
    const bool last = t->stopped || token < 0 || t->published == t->most;
    if (last) scheduler_remove(s, t);
    if (t->take) t->take(t, position, token, logits, last);
}

/* Handles what a step computed for the n tokens of one stream from position `from` on: a drawn token, and the logits of
 * the last `rows` tokens. */
static void take_results(Scheduler *s, Stream *t, size_t from, size_t n, int token, const float *logits, size_t rows) {
    const size_t vocab = (size_t)s->engine->model->vocab;
    for (size_t i = 1; t->want == WANT_ALL_LOGITS && i <= rows && from + i < t->prompt; i++) {
        t->nan |= isnan(logits[(i - 1) * vocab]); /* a NaN before the head makes all logits NaN */
        publish(s, t, from + i, t->tokens.data[from + i], logits + (i - 1) * vocab);
    }
    if (from + n < t->tokens.n || token == LATE) return;
    if (rows) logits += (rows - 1) * vocab;
    t->drawing--;
    t->nan |= token == DREW_NAN;
    if (token >= 0) ids_add(&t->tokens, token);
    for (size_t i = 0; token < 0 && i < t->pages.n; i++) forget_page(s, s->page + t->pages.data[i]);
    publish(s, t, t->tokens.n - (token >= 0), token, t->want == WANT_TOKEN ? NULL : logits);
}

static bool collect_step(Scheduler *s, Error *e) {
    Step *step = s->step + (s->now.steps - s->now.outstanding) % 2;
    Result r;
    if (!s->engine->backend->collect(s->engine->state, &r, e)) return false;
    s->now.outstanding--;
    s->now.gpus = r.gpus;
    for (int i = 0; i < r.gpus; i++) s->now.busy[i] += r.busy[i];
    double *cost = s->cost + step->n, found = r.seconds / step->n;
    if (!r.rows && step->first[step->n] == step->n)           /* it only continued texts */
        *cost = *cost > 0 ? MIN(found, 1.02 * *cost) : found; /* one slow step says little */
    if (s->now.steps % 512 == 0) memset(s->cost, 0, sizeof s->cost);
    for (int i = 0; i < step->n; i++) {
        size_t n = (size_t)(step->first[i + 1] - step->first[i]), from = (size_t)step->start[i];
        size_t rows = step->want[i] == WANT_ALL_LOGITS ? n : step->want[i] == WANT_LOGITS;
        const int token = step->late[i] ? LATE : r.token[i];
        if (step->stream[i]) take_results(s, step->stream[i], from, n, token, r.logits, rows);
        if (rows) r.logits += rows * (size_t)s->engine->model->vocab;
    }
    step->n = 0;
    return true;
}

/* Publishes the tokens that must come next to stream i of a step. The draw that is computed for them does not count. A
 * stream that ended is no longer in the step. */
static void take_forced(Scheduler *s, const Step *p, int i) {
    LocalIds more = {0};
    Stream *t = p->stream[i];
    t->forced(t, &more);
    if (!more.n || !take_pages(s, t, t->tokens.n + more.n)) return;
    t->drawing--;
    for (size_t k = 0; k < more.n && (t = p->stream[i]); k++) {
        ids_add(&t->tokens, more.data[k]);
        publish(s, t, t->tokens.n - 1, more.data[k], NULL);
    }
}

/* Says which tokens the step just submitted may draw; all before them are known now. A draw for a stream that was
 * removed must not wait either. The GPU waits for a second at most, so that when ALLOW_MOST is over, the streams that
 * are left draw in the next step, where they come first. Those that took long the last time come behind all others. */
static void allow_tokens(Scheduler *s, bool slow) {
    Step *p = s->step + (s->now.steps - 1) % 2;
    const Allowed *to = &s->engine->allowed;
    const size_t words = howmany((size_t)s->engine->model->vocab, 32);
    const double begun = seconds();
    int behind = -1;
    for (int k = 0; k < p->n; k++) {
        const int i = (s->behind[slow] + k) % p->n, slot = p->slot[i];
        const uint64_t number = p->sampling[i].allowed;
        Stream *t = p->stream[i];
        if (!number || (t && t->slow != slow)) continue;
        const double now = seconds();
        p->sampling[i].allowed = 0; /* done */
        p->late[i] = t && now - begun > ALLOW_MOST;
        if (p->late[i] && behind < 0) behind = i;
        if (p->late[i]) t->drawing--, t->sent--;
        if (t && !p->late[i]) t->allow(t, to->bits + (size_t)slot * words), t->slow = seconds() - now > ALLOW_SLOW;
        __atomic_store_n(to->ready + slot, number, __ATOMIC_RELEASE);
        if (!t || p->late[i]) continue;
        if (t->stuck)
            publish(s, t, t->tokens.n, DREW_NOTHING, NULL);
        else if (t->forced && p->want[i] == WANT_TOKEN)
            take_forced(s, p, i);
    }
    s->behind[slow] = MAX(behind, 0);
}

bool scheduler_step(Scheduler *s, Error *e) {
    plan_step(s);
    const size_t planned = s->step[s->now.steps % 2].n > 0;
    if (planned && !submit_step(s, e)) return false;
    const bool ok = s->now.outstanding <= planned || collect_step(s, e);
    for (int slow = 0; ok && planned && slow < 2; slow++) allow_tokens(s, slow);
    return ok;
}

bool scheduler_run(Scheduler *s, Stream *t, const volatile sig_atomic_t *stop, Error *e) {
    const size_t context = (size_t)s->engine->context;
    bool ok = true, interrupted = false;
    if (!t->prompt) return fail(e, USAGE, "the prompt is empty");
    if (t->prompt >= t->most || t->most > context + 1)
        return fail(e, NO_ROOM,
                    "the prompt has %zu tokens, the context %zu: shorten it, or enlarge the context with --ctx",
                    t->prompt, context);
    scheduler_add(s, t);
    while (ok && (s->now.running || s->now.waiting || s->now.outstanding)) {
        if (t->reading && t->published <= t->prompt) t->reading(t);
        ok = scheduler_step(s, e);
        interrupted = stop && *stop && t->published <= t->prompt;
        if (interrupted) scheduler_remove(s, t);
    }
    scheduler_remove(s, t);
    if (ok && interrupted) return fail(e, INTERRUPTED, "interrupted");
    if (ok && t->nan)
        return fail(e, FAILED, "the logits hold a NaN: weights or config.json are damaged; download them again");
    if (ok && t->stuck) return fail(e, FAILED, "the schema or pattern %s", t->stuck);
    return ok;
}

bool scheduler_score(Scheduler *s, const int *ids, size_t n, size_t from, Take *take, void *owner, Error *e) {
    Stream t = {.prompt = n, .most = n + 1, .sampling = {.top_p = 1, .penalty = 1}, .want = WANT_ALL_LOGITS};
    t.published = from, t.take = take, t.owner = owner;
    ids_append(&t.tokens, ids, n);
    bool ok = scheduler_run(s, &t, NULL, e);
    ids_free(&t.tokens);
    return ok;
}

SchedulerState scheduler_state(const Scheduler *s) { return s->now; }
