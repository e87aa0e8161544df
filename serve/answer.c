/* answer.c: what the model says, as the API's JSON: errors, events of a stream, whole replies. */
#include "serve.h"

#include <string.h>

/* ---- replies ---- */

void append(cJSON *json, const char *key, cJSON *value) {
    cJSON *array = cJSON_GetObjectItemCaseSensitive(json, key);
    cJSON_AddItemToArray(array ? array : cJSON_AddArrayToObject(json, key), value);
}

void put_json(Request *q, cJSON *json) {
    if (q->stream) bytes_text(&q->out, "data: ");
    json_append(&q->out, json);
    if (q->stream) bytes_text(&q->out, "\n\n");
}

void put_error(Request *q) {
    const int status = q->error.code;
    const char *type = status == 429 ? "rate_limit_error" : status < 500 ? "invalid_request_error" : "server_error";
    /* the field at fault: a message about one begins with its path, such as messages[3].content */
    LocalText word = copy_text(q->error.text, strcspn(q->error.text, " :"));
    LocalText field = copy_text(word, strcspn(word, ".["));
    const char *code = status == 401 ? "invalid_api_key" : q->code, *param = q->param;
    if (!param && (json_get(q->json, field) || text_listed("messages prompt tokens", field))) param = word;
    cJSON *error = json_object("message", json_word(q->error.text), "type", json_word(type), "param", json_word(param),
                               "code", json_word(code), NULL);
    put_json(q, json_object("error", error, NULL));
}

/* ---- answers as JSON ---- */

/* all: log_sum_exp of the logits. Without logits the logprob is null. */
static cJSON *chance_json(int id, const float *logits, double all) {
    LocalBytes raw = {0}, text = {0};
    cJSON *bytes = cJSON_CreateArray();
    tokenizer_bytes(server.s.tokenizer, &(Decoder){.begun = true}, id, &raw);
    for (size_t i = 0; i < raw.n; i++) cJSON_AddItemToArray(bytes, json_number((unsigned char)raw.data[i]));
    utf8_stream(&raw, &text, true);
    cJSON *logprob = logits ? json_number(fmax((double)logits[id] - all, -9999)) : json_word(NULL); /* no infinity */
    return json_object("token", json_from_text(text.data, text.n), "logprob", logprob, "bytes", bytes, NULL);
}

/* Adds a token's logprobs to those to write, by the keys under which the API lists them. */
static void add_score(Choice *c, size_t begin, int token, const float *logits) {
    const int vocab = server.s.checkpoint.model.vocab;
    const double all = logits ? log_sum_exp(logits, vocab) : 0;
    int best[MOST_TOP], n = logits ? likeliest(logits, vocab, c->request->top, best) : 0;
    cJSON *own = chance_json(token, logits, all), *top = cJSON_AddArrayToObject(own, "top_logprobs"), *each;
    cJSON *score = json_object("begin", json_number(begin), NULL);
    cJSON_AddItemToArray(c->scores, score);
    for (int i = 0; i < n; i++) cJSON_AddItemToArray(top, chance_json(best[i], logits, all));
    if (logits && !c->request->chat) /* texts get the drawn token, too; below each counts once */
        cJSON_AddItemToArray(top, chance_json(token, logits, all));
    if (c->request->chat) {
        json_add(score, "content", own, NULL);
        return;
    }
    cJSON *chances = logits ? cJSON_CreateObject() : json_word(NULL); /* by text; parts of letters may look alike */
    cJSON_ArrayForEach(each, top) if (!json_get(chances, json_string(each, "token")))
        json_add(chances, json_string(each, "token"), cJSON_DetachItemFromObject(each, "logprob"), NULL);
    for (; c->counted < begin; c->counted++) c->letters += (c->text.data[c->counted] & 0xC0) != 0x80;
    json_add(score, "tokens", cJSON_DetachItemFromObject(own, "token"), "token_logprobs",
             cJSON_DetachItemFromObject(own, "logprob"), "top_logprobs", chances, "text_offset",
             json_number(c->letters), NULL);
    cJSON_Delete(own);
}

/* Takes the logprobs of tokens whose text begins before c->shown. At the end of an answer that no stop text cut, it
 * takes all: the last tokens may have no text. */
static cJSON *take_scores(Choice *c) {
    cJSON *taken = NULL, *score, *value;
    while ((score = c->scores->child)) {
        if (json_get(score, "begin")->valuedouble >= (double)c->shown && (c->cut || !c->finish)) break;
        cJSON_DeleteItemFromObject(score, "begin");
        if (!taken) taken = cJSON_CreateObject();
        while ((value = score->child)) append(taken, value->string, cJSON_DetachItemViaPointer(score, value));
        cJSON_Delete(cJSON_DetachItemViaPointer(c->scores, score));
    }
    return taken ? taken : json_word(NULL);
}

/* A choice as JSON: in a stream only what is new, else all of it. */
static cJSON *choice_json(Choice *c) {
    const Request *q = c->request;
    const char *key = !q->chat ? "text" : q->stream ? "delta" : "message";
    const bool some = c->shown > c->sent || !q->chat || (!q->stream && !c->calls);
    cJSON *thoughts = c->thoughts.n ? json_from_text(c->thoughts.data, c->thoughts.n) : NULL;
    cJSON *said = some || q->stream ? NULL : json_word(NULL);
    if (some) said = json_from_text(c->text.data + c->sent, c->shown - c->sent);
    if (q->chat)
        said = json_object("role", c->spoke ? NULL : json_word("assistant"), "content", said, "reasoning_content",
                           thoughts, "tool_calls", c->calls, NULL);
    cJSON *choice = json_object("index", json_number((int)(c - q->choice)), key, said, "logprobs", take_scores(c),
                                "finish_reason", json_word(c->finish), NULL);
    c->calls = NULL, c->sent = c->shown, c->thoughts.n = 0, c->spoke = true;
    return choice;
}

static cJSON *usage_json(const Request *q) {
    size_t prompt = 0, reused = 0, tokens = 0, thought = 0;
    for (const Choice *c = q->choice; c < q->choice + q->choices; c++) {
        if ((c - q->choice) % q->n == 0) prompt += c->stream.prompt, reused += c->stream.reused;
        tokens += q->tokens ? c->stream.tokens.n - c->stream.prompt : 0;
        thought += c->thought;
    }
    return json_object("prompt_tokens", json_number(prompt), "completion_tokens", json_number(tokens), "total_tokens",
                       json_number(prompt + tokens), "prompt_tokens_details",
                       json_object("cached_tokens", json_number(reused), NULL), "completion_tokens_details",
                       json_object("reasoning_tokens", json_number(thought), NULL), NULL);
}

void put_reply(Request *q, Choice *from, const Choice *to, bool usage) {
    const char *what = !q->chat ? "text_completion" : q->stream ? "chat.completion.chunk" : "chat.completion";
    cJSON *choices = cJSON_CreateArray(), *used = usage ? usage_json(q) : NULL;
    if (!usage && q->stream && q->usage) used = json_word(NULL); /* it comes later */
    for (Choice *c = from; c < to; c++) cJSON_AddItemToArray(choices, choice_json(c));
    put_json(q, json_object("id", json_word(q->id), "object", json_word(what), "created", json_number(q->created),
                            "model", json_word(server.name), "system_fingerprint", json_word(server.fingerprint),
                            "choices", choices, "usage", used, NULL));
}

/* ---- from tokens to answers ---- */

/* Adds arguments of a call to what is to be written. The name comes once, at the beginning. */
static void add_call(Choice *c, const Message *m, Bytes arguments) {
    const Request *q = c->request;
    const bool begins = arguments.n == m->content.n;
    const char *name = m->recipient + (strncmp(m->recipient, "functions.", 10) ? 0 : 10);
    cJSON *text = json_from_text(arguments.data, arguments.n);
    if (json_string(q->names, name)) name = json_string(q->names, name);
    c->calls_n += begins;
    LocalText id = text_print("call_%s_%d_%d", q->id + strcspn(q->id, "-") + 1, (int)(c - q->choice), c->calls_n - 1);
    if (!c->calls) c->calls = cJSON_CreateArray();
    cJSON *function = json_object("name", begins ? json_from_text(name, strlen(name)) : NULL, "arguments", text, NULL);
    cJSON_AddItemToArray(c->calls, json_object("index", q->stream ? json_number(c->calls_n - 1) : NULL, "id",
                                               begins ? json_word(id) : NULL, "type",
                                               begins ? json_word("function") : NULL, "function", function, NULL));
}

/* Reads a token of a chat; a negative one ends it. Takes what the messages gain by this, of the assistant's only.
 * Without a stream, a call waits until it is complete, and text that turns out to be a thought, because one ends that
 * nobody began, is no longer text. */
static Read read_message(Choice *c, int token) {
    const Request *q = c->request;
    Reader *r = &c->reader;
    const size_t had = r->now.content.n;
    const int before = r->messages;
    const Part was = message_part(&r->now);
    const Read read = token < 0 ? reader_end(r, NULL) : reader_push(r, token, NULL);
    for (int i = before; i <= r->messages; i++) {
        const Message *m = i < r->messages ? r->message + i : &r->now;
        const Part part = kind_of(m);
        size_t known = i == before ? had : 0;
        if (part == REASONING && was == ANSWER && known && !q->stream) {
            c->text.n -= known, c->text.data[c->text.n] = 0, known = 0;
            if (c->shown > c->text.n) c->shown = c->text.n;
        }
        const Bytes gained = {.data = m->content.data + known, .n = m->content.n - known};
        if (part == CALL && q->names) {
            const bool wanted = q->parallel || known || !c->calls_n;
            if (wanted && (q->stream ? gained.n : i < r->messages)) add_call(c, m, q->stream ? gained : m->content);
        } else if (part == REASONING) {
            bytes_add(&c->thoughts, gained.data, gained.n);
        } else if (part <= CALL && gained.n) {
            if (c->text.n && !known) bytes_text(&c->text, "\n\n"); /* after a preamble */
            bytes_add(&c->text, gained.data, gained.n);
        }
    }
    return read;
}

/* When nothing is pending, the last of the tokens since the text grew are its own, as many as cover it. Of those before
 * the text was dropped, or is a call's. */
static void settle_scores(Choice *c) {
    cJSON *score = c->scores->child ? c->scores->child->prev : NULL, *before; /* the last one */
    const double begin = score ? fmin(json_get(score, "begin")->valuedouble, (double)c->text.n) : 0;
    double missing = (double)c->text.n - begin;
    for (; score && json_get(score, "begin")->valuedouble >= begin; score = before) {
        before = score == c->scores->child ? NULL : score->prev;
        if (missing <= 0)
            cJSON_Delete(cJSON_DetachItemViaPointer(c->scores, score));
        else
            missing -= cJSON_GetArraySize(json_get(json_get(score, "content"), "bytes"));
    }
}

/* Reads a token of an answer, or, with echo, of its prompt. logits: NULL, or those it was drawn from. */
void read_token(Choice *c, size_t position, int token, const float *logits, bool last) {
    const Request *q = c->request;
    const bool prompt = position < c->stream.prompt, silent = !prompt && !q->tokens;
    const size_t begin = c->text.n;
    bool stop = c->stream.stopped && !silent, called = false, scored = !silent && (logits || (prompt && q->top >= 0));
    if (q->chat) {
        const Read read = read_message(c, token);
        const bool content = !read.header && read.part != REASONING && read.part != CALL;
        c->thought += read.part == REASONING;
        const bool said =
            c->text.n > begin || !tokenizer_is_control(server.s.tokenizer, token); /* a mark may be text */
        scored = scored && content && said;
        called = read.closed && read.part == CALL;
        stop = stop || (read.stop && !q->ignore_eos) || (called && !q->parallel);
    } else if (!stop && !silent && !(q->skip_special && tokenizer_is_control(server.s.tokenizer, token))) {
        tokenizer_decode(server.s.tokenizer, &c->reader.decoder, token, &c->text);
    }
    if (scored) add_score(c, begin, token, logits); /* in a text a stop token has one, too */
    last = last || stop;
    if (last && q->chat && (!called || q->parallel)) read_message(c, -1); /* else the next call may have begun */
    if (last && !q->chat) tokenizer_flush(&c->reader.decoder, &c->text);
    if (q->chat && (called || last || (!c->reader.pending.n && !c->reader.decoder.held.n))) settle_scores(c);
    if (prompt) c->shown = c->text.n; /* it may contain stop texts */
    c->cut = text_stops(&c->text, &c->shown, q->stop, q->stops, last);
    const char *end = !stop && !c->cut ? "length" : c->calls_n && !c->cut ? "tool_calls" : "stop";
    const bool whole = !c->cut || !c->stream.rule || keeping->whole(&c->stream);
    if (c->cut || last) c->finish = whole ? end : "length";
}
