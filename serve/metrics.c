/* metrics.c: what is counted, in the text format of Prometheus. */
#include "serve.h"

#include <string.h>

static const double bounds[BOUNDS] = {.0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10};

void observe(Histogram *h, double value) {
    for (int i = 0; i < BOUNDS; i++) h->count[i] += value <= bounds[i];
    h->n++;
    h->sum += value;
}

static void put_histogram(Bytes *out, const char *name, const Histogram *h) {
    bytes_print(out, "# TYPE infer_%s histogram\n", name);
    for (int i = 0; i < BOUNDS; i++) bytes_print(out, "infer_%s_bucket{le=\"%g\"} %zu\n", name, bounds[i], h->count[i]);
    bytes_print(out, "infer_%s_bucket{le=\"+Inf\"} %zu\n", name, h->n);
    bytes_print(out, "infer_%s_sum %.6f\ninfer_%s_count %zu\n", name, h->sum, name, h->n);
}

static void put_number(Bytes *out, const char *name, size_t value) {
    const char *kind = strstr(name, "_total") ? "counter" : "gauge";
    bytes_print(out, "# TYPE infer_%s %s\ninfer_%s %zu\n", name, kind, name, value);
}

void metrics(Request *q) {
    Bytes *out = &q->out;
    lock();
    const SchedulerState *now = &server.state;
    const size_t live = (size_t)server.live;
    bytes_text(out, "# TYPE infer_requests_total counter\n");
    for (int i = 0; i < STATUSES; i++)
        if (server.status[i]) bytes_print(out, "infer_requests_total{status=\"%d\"} %zu\n", i, server.status[i]);
    put_number(out, "prompt_tokens_total", server.prompt);
    put_number(out, "cached_tokens_total", server.reused);
    put_number(out, "generated_tokens_total", server.generated);
    put_number(out, "repairs_total", server.repairs); /* malformed headers of harmony */
    put_number(out, "nan_total", server.nans);
    put_number(out, "preemptions_total", now->preempted);
    put_number(out, "steps_total", now->steps);
    put_number(out, "answers_running", now->running);
    put_number(out, "answers_waiting", live > now->running ? live - now->running : 0);
    put_number(out, "cache_pages_used", now->pages - now->idle);
    put_number(out, "cache_pages_kept", now->kept); /* for prompts that begin alike */
    put_number(out, "cache_pages", now->pages);
    put_histogram(out, "time_to_first_token_seconds", &server.to_first_token);
    put_histogram(out, "time_per_token_seconds", &server.per_token);
    unlock();
}
