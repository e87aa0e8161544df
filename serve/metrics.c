/* metrics.c: what is counted, in the text format of Prometheus, and the log of requests. */
#include "serve.h"

#include <string.h>

static const double bounds[BOUNDS] = {.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60};
static const char *const reasons[] = {"stop", "length", "tool_calls", "error"};
enum { REASONS = sizeof reasons / sizeof *reasons };

/* ---- counting ---- */

void observe(Histogram *h, double value) {
    for (int i = 0; i < BOUNDS; i++) h->count[i] += value <= bounds[i];
    h->n++;
    h->sum += value;
}

void count_answer(const Choice *c) {
    const double took = seconds() - c->request->since;
    server.repairs += (size_t)c->reader.repairs;
    for (int i = 0; i < REASONS; i++) server.finished[i] += !strcmp(reasons[i], c->finish);
    if (strcmp(c->finish, "error")) server.usual += (took - server.usual) / 8;
}

char *log_line(const Request *q) {
    const bool failed = q->status >= 400, answered = q->choices && !failed;
    const int endpoint = q->endpoint ? (int)(q->endpoint - endpoints) : ENDPOINTS;
    const double took = seconds() - q->began;
    server.count[endpoint][q->status]++;
    if (answered) observe(&server.to_end, took);
    if (!strcmp(given.log, "off") || (!failed && strcmp(given.log, "all"))) return NULL;
    size_t prompt = 0, tokens = 0;
    for (const Choice *c = q->choice; c < q->choice + q->choices; c++)
        prompt += c->stream.prompt, tokens += c->stream.tokens.n - c->stream.prompt;
    Bytes line = {0};
    LocalText path = text_print("%.20s %.200s", q->method, q->url);
    bytes_print(&line, "infer: request %s from %s: ", q->trace, q->from);
    bytes_shown(&line, path, strlen(path), false);
    bytes_print(&line, " %u, %.3f s", q->status, took);
    if (q->choices) bytes_print(&line, ", %zu + %zu tokens", prompt, tokens);
    if (failed && q->error.code)
        bytes_text(&line, ": "), bytes_shown(&line, q->error.text, strlen(q->error.text), false);
    return line.data;
}

/* ---- /metrics ---- */

static void put_head(Bytes *out, const char *name, const char *kind, const char *help) {
    bytes_print(out, "# HELP infer_%s %s\n# TYPE infer_%s %s\n", name, help, name, kind);
}

static void put_histogram(Bytes *out, const char *name, const Histogram *h, const char *help) {
    put_head(out, name, "histogram", help);
    for (int i = 0; i < BOUNDS; i++) bytes_print(out, "infer_%s_bucket{le=\"%g\"} %zu\n", name, bounds[i], h->count[i]);
    bytes_print(out, "infer_%s_bucket{le=\"+Inf\"} %zu\n", name, h->n);
    bytes_print(out, "infer_%s_sum %.6f\ninfer_%s_count %zu\n", name, h->sum, name, h->n);
}

static void put_number(Bytes *out, const char *name, size_t value, const char *help) {
    put_head(out, name, strstr(name, "_total") ? "counter" : "gauge", help);
    bytes_print(out, "infer_%s %zu\n", name, value);
}

void metrics(Request *q) {
    Bytes *out = &q->out;
    LocalJson word = json_word(server.name);
    LocalText name = json_text(word); /* JSON escapes as labels are escaped */
    lock();
    const SchedulerState *now = &server.state;
    const size_t live = (size_t)server.live;
    put_head(out, "build_info", "gauge", "This program and the model it runs.");
    bytes_print(out, "infer_build_info{version=\"%s\",backend=\"%s\",fingerprint=\"%s\",model=%s} 1\n", VERSION,
                backend->name, server.fingerprint, name);
    put_head(out, "requests_total", "counter", "Requests that have ended, by endpoint and HTTP status.");
    for (int k = 0; k <= ENDPOINTS; k++)
        for (int i = 0; i < STATUSES; i++)
            if (server.count[k][i])
                bytes_print(out, "infer_requests_total{endpoint=\"%s\",status=\"%d\"} %zu\n",
                            k < ENDPOINTS ? endpoints[k].path : "other", i, server.count[k][i]);
    put_head(out, "answers_total", "counter", "Answers that have ended, by finish_reason.");
    for (int i = 0; i < REASONS; i++)
        bytes_print(out, "infer_answers_total{finish_reason=\"%s\"} %zu\n", reasons[i], server.finished[i]);
    put_number(out, "prompt_tokens_total", server.prompt, "Tokens of prompts.");
    put_number(out, "cached_tokens_total", server.reused, "Tokens of prompts that were in the cache.");
    put_number(out, "generated_tokens_total", server.generated, "Tokens of answers.");
    put_number(out, "repairs_total", server.repairs, "Malformed headers of messages that models wrote.");
    put_number(out, "nan_total", server.nans, "Answers that ended because the logits held a NaN.");
    put_number(out, "preemptions_total", now->preempted, "Answers that lost their pages for a while.");
    put_number(out, "steps_total", now->steps, "Steps of the model.");
    put_number(out, "connections", (size_t)server.connections, "Open connections.");
    put_number(out, "answers_running", now->running, "Answers that are being written.");
    put_number(out, "answers_waiting", live > now->running ? live - now->running : 0, "Answers that wait.");
    put_number(out, "cache_pages_used", now->pages - now->idle, "Pages of the cache that answers use.");
    put_number(out, "cache_pages_kept", now->kept, "Pages of the cache that are kept for prompts that begin alike.");
    put_number(out, "cache_pages", now->pages, "Pages of the cache.");
    put_head(out, "gpu_seconds_total", "counter",
             "Seconds of steps by GPU, in the order of --gpus; waiting for the others counts.");
    for (int i = 0; i < now->gpus; i++) bytes_print(out, "infer_gpu_seconds_total{gpu=\"%d\"} %.6f\n", i, now->busy[i]);
    put_histogram(out, "queue_seconds", &server.queued, "From a request to the first step with its prompt.");
    put_histogram(out, "time_to_first_token_seconds", &server.to_first_token, "From a request to the first token.");
    put_histogram(out, "time_per_token_seconds", &server.per_token, "From a token to the next.");
    put_histogram(out, "request_seconds", &server.to_end, "From a request to the end of its answers.");
    unlock();
}
