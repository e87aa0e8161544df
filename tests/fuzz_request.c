/* Any bytes as the body of a request, the first of which chooses chat or text. Promises: it is refused with 400 or 404
 * and a message, or its answers, whatever tokens come, are JSON, streamed or not, and each ends for a reason. */
#include "../serve/serve.h"
#include "parrot.h"

#include <assert.h>
#include <stdlib.h>

static float *logits;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    Error e;
    (void)argc, (void)argv;
    server.s.tokenizer = parrot_open(NULL, &e);
    assert(server.s.tokenizer && checkpoint_open(&server.s.checkpoint, "tests/fixtures/parrot", &e));
    server.s.has_chat = chat_open(&server.s.chat, server.s.tokenizer, "", false, &e);
    server.s.engine.context = 512;
    server.s.scheduler = scheduler_open(&server.s.engine);
    server.name = "parrot";
    server.most_bytes = SIZE_MAX;
    server.ready = true;
    TAILQ_INIT(&server.requests);
    logits = allocate_zero((size_t)server.s.checkpoint.model.vocab, sizeof *logits);
    return 0;
}

static void check_json(const char *text, size_t n) {
    Error e;
    cJSON *json = json_parse(text, n, "the answer", &e);
    if (!json) fprintf(stderr, "%s: %.*s\n", e.text, (int)n, text);
    assert(json);
    cJSON_Delete(json);
}

/* Answers with tokens that the bytes choose, and reads the answer. */
static void answer_with(Request *q, const uint8_t *data, size_t n) {
    const int vocab = server.s.checkpoint.model.vocab;
    q->left = server.live = q->choices;
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        c->stream.owner = c;
        for (size_t i = 0; !c->finish; i++) {
            const int token = (data[i % n] * 7 + (int)i) % vocab;
            const size_t position = c->stream.prompt + i;
            for (size_t k = 0; c->stream.stop && k < c->stream.stop->n; k++)
                c->stream.stopped |= token == c->stream.stop->data[k];
            const bool last = c->stream.stopped || i == 20 || position + 1 == c->stream.most;
            take_token(&c->stream, position, token, q->top >= 0 ? logits : NULL, last);
        }
    }
    for (const Choice *c = q->choice; c < q->choice + q->choices; c++)
        assert(strcmp(c->finish, "error") && c->shown == c->text.n && utf8_check(c->text.data, c->text.n) == c->text.n);
    assert(!q->left && !server.live);
    if (!q->stream) put_reply(q, q->choice, q->choice + q->choices, true);
    if (!q->stream) check_json(q->out.data, q->out.n);
    for (char *event = q->out.data, *end; q->stream && *event; event = end + 2) {
        end = strstr(event, "\n\n");
        assert(end && !strncmp(event, "data: ", 6));
        if (strncmp(event, "data: [DONE]", 12)) check_json(event + 6, (size_t)(end - event) - 6);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    Error e;
    if (!n) return 0;
    Request *q = allocate_zero(1, sizeof *q);
    static Client client;
    q->endpoint = *data & 1 ? endpoints : endpoints + 1;
    q->client = &client;
    client = (Client){.users = 2}; /* the request is not the last */
    pthread_cond_init(&q->wake, NULL);
    q->json = json_parse((const char *)data + 1, n - 1, "the body", &e);
    if (cJSON_IsObject(q->json)) {
        bool ok = check_fields(q) && take_request(q) && make_choices(q);
        assert(ok ? !q->error.code : q->error.code && q->error.code <= 404 && *q->error.text);
        if (ok) answer_with(q, data, n);
    }
    end_request(q);
    pthread_cond_destroy(&q->wake);
    free(q);
    return 0;
}
