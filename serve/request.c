/* request.c: what a request asks for (github.com/openai/openai-openapi). A field is taken, or it is refused by name. */
#include "serve.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- parameters of a request ---- */

/* A number of the request, or `normal` if it has none. The first one that is out of range is the request's error. */
static double number(Request *q, const char *key, bool whole, double least, double most, double normal) {
    const cJSON *value = json_get(q->json, key);
    const double x = cJSON_GetNumberValue(value); /* or NaN */
    if (x >= least && x <= most && (!whole || x == floor(x))) return x;
    if (value && !q->error.code)
        fail(&q->error, 400, "%s must be a %snumber from %.16g to %.16g", key, whole ? "whole " : "", least, most);
    return normal;
}

/* The same for true or false. */
bool flag(Request *q, const cJSON *object, const char *key, bool normal) {
    const cJSON *value = json_get(object, key);
    if (value && !cJSON_IsBool(value) && !q->error.code) fail(&q->error, 400, "%s must be true or false", key);
    return value ? cJSON_IsTrue(value) : normal;
}

bool is_model(Request *q, const char *name) {
    if (!strcmp(name, server.name)) return true;
    q->code = "model_not_found";
    return fail(&q->error, 404, "model: there is no model %.100s here, only %s", name, server.name);
}
/* Checks the request's model, if it names one. */
bool check_model(Request *q) {
    const cJSON *model = json_get(q->json, "model");
    const char *name = cJSON_GetStringValue(model);
    if (model && !name) return fail(&q->error, 400, "model must be a text");
    return !name || !*name || is_model(q, name);
}

/* Fields that are refused, unless their value follows a = here: in any request, in chats, in texts. Accepted values
 * change nothing; -0 is 0. A space marks where a field begins. */
#define UNSUPPORTED                                                                                                    \
    " add_generation_prompt=true allowed_token_ids= audio= bad_words=[] chat_template= continue_final_message=false "  \
    "documents=[] function_call=\"auto\" function_call=\"none\" "                                                      \
    "functions=[] grammar= guided_choice= guided_grammar= guided_json= guided_regex= include_reasoning=true "          \
    "include_stop_str_in_output=false json_schema= logits_processors= min_tokens=0 modalities=[\"text\"] "             \
    "prompt_logprobs= repeat_penalty=1 return_token_ids=false return_tokens_as_token_ids=false "                       \
    "stop_token_ids=[] structured_outputs= suffix=\"\" truncate_prompt_tokens= typical_p=1 use_beam_search=false "     \
    "verbosity=\"medium\" web_search_options="
static const char of_chats[] =
    UNSUPPORTED " add_special_tokens=false echo=false enable_thinking=true skip_special_tokens=true";
static const char of_texts[] = UNSUPPORTED " add_special_tokens=true max_completion_tokens= "
                                           "top_logprobs=0 tools=[] response_format={\"type\":\"text\"}";

static bool refuse_others(Request *q) {
    const char *unsupported = q->chat ? of_chats : of_texts;
    const cJSON *each;
    cJSON_ArrayForEach(each, q->json) {
        LocalBytes field = {0};
        bytes_print(&field, " %s=", each->string);
        if (cJSON_IsNull(each) || !strstr(unsupported, field.data)) continue;
        LocalText value = cJSON_IsNumber(each) ? text_print("%.17g", each->valuedouble + 0) : json_text(each);
        bytes_text(&field, value);
        if (!text_listed(unsupported, field.data + 1))
            return fail(&q->error, 400, "%s is not supported with this value: leave it out", each->string);
    }
    return true;
}

static bool take_stops(Request *q) {
    const cJSON *stop = json_get(q->json, "stop"), *each = cJSON_IsArray(stop) ? stop->child : stop;
    for (; each; each = cJSON_IsArray(stop) ? each->next : NULL) {
        const char *text = cJSON_GetStringValue(each);
        if (!text || q->stops == MOST_STOPS)
            return fail(&q->error, 400, "stop must be a text or an array of at most %d texts", MOST_STOPS);
        if (*text) q->stop[q->stops++] = text;
    }
    return true;
}

static bool take_biases(Request *q) {
    const cJSON *all = json_get(q->json, "logit_bias"), *each;
    const int vocab = server.s.checkpoint.model.vocab;
    const bool empty = cJSON_IsArray(all) && !all->child; /* as PHP writes an object without members */
    if (all && !cJSON_IsObject(all) && !empty) return fail(&q->error, 400, "logit_bias must be an object");
    if (cJSON_GetArraySize(all) > MOST_BIASES)
        return fail(&q->error, 400, "logit_bias has more than %d tokens", MOST_BIASES);
    q->sampling.bias = q->bias = cJSON_GetArraySize(all) ? allocate(MOST_BIASES * sizeof *q->bias) : NULL;
    cJSON_ArrayForEach(each, all) {
        Bias *bias = q->bias + q->sampling.biases++, *same = q->bias;
        bias->add = (float)cJSON_GetNumberValue(each); /* or NaN */
        if (!text_whole(each->string, 0, vocab - 1, &bias->id) || !(bias->add >= -100 && bias->add <= 100))
            return fail(&q->error, 400, "logit_bias maps token ids below %d to numbers from -100 to 100", vocab);
        while (same->id != bias->id) same++;
        if (same < bias) return fail(&q->error, 400, "logit_bias has the token %d twice", bias->id);
    }
    return true;
}

/* Takes everything but the prompt. */
bool take_request(Request *q) {
    const double most = INT32_MAX, seed = number(q, "seed", true, -0x1p63, 0x1p63, -1); /* -1: random */
    Sampling *s = &q->sampling;
    if (getentropy(&s->seed, sizeof s->seed)) s->seed = (uint64_t)(seconds() * 1e9);
    snprintf(q->id, sizeof q->id, "%s-%016llx", q->chat ? "chatcmpl" : "cmpl", (unsigned long long)s->seed);
    q->created = time(NULL);
    const cJSON *best = json_get(q->json, "best_of"), *options = json_get(q->json, "stream_options");
    if (!refuse_others(q)) return false;
    if (options && !cJSON_IsObject(options)) return fail(&q->error, 400, "stream_options must be an object");
    q->stream = flag(q, q->json, "stream", false);
    q->usage = flag(q, options, "include_usage", false);
    q->ignore_eos = flag(q, q->json, "ignore_eos", false);
    q->echo = !q->chat && flag(q, q->json, "echo", false);
    q->skip_special = !q->chat && flag(q, q->json, "skip_special_tokens", false);
    q->parallel = !q->chat || flag(q, q->json, "parallel_tool_calls", true);
    q->n = (int)number(q, "n", true, 1, 16, 1);
    q->tokens = (int)number(q, "max_tokens", true, q->chat ? 1 : 0, most, q->chat ? most : 16);
    if (q->chat) q->tokens = (int)number(q, "max_completion_tokens", true, 1, most, q->tokens);
    const bool scored = q->chat && flag(q, q->json, "logprobs", false);
    q->top = (int)number(q, q->chat ? "top_logprobs" : "logprobs", true, 0, MOST_TOP, scored ? 0 : -1);
    if (seed != -1) s->seed = seed < 0 ? (uint64_t)(int64_t)seed : (uint64_t)seed;
    s->top_k = (int)number(q, "top_k", true, -1, most, 0);
    s->temperature = (float)number(q, "temperature", false, 0, 100, 1);
    s->top_p = fmaxf((float)number(q, "top_p", false, 0, 1, 1), 1e-30f);
    s->min_p = (float)number(q, "min_p", false, 0, 1, 0);
    s->penalty = (float)number(q, "repetition_penalty", false, 1e-3, 100, 1);
    s->frequency = (float)number(q, "frequency_penalty", false, -2, 2, 0);
    s->presence = (float)number(q, "presence_penalty", false, -2, 2, 0);
    if (s->min_p < 1e-30f) s->min_p = 0;
    if (q->error.code) return false;
    if (q->chat && q->top > 0 && !scored) return fail(&q->error, 400, "top_logprobs needs logprobs");
    if (q->chat && !scored) q->top = -1;
    if (best && cJSON_GetNumberValue(best) != q->n) return fail(&q->error, 400, "best_of must equal n: leave it out");
    return take_stops(q) && take_biases(q);
}
/* ---- functions ---- */

/* Gives the function of {"function": {"name": ...}} a name that every chat format allows. The hash keeps different
 * names apart, and does not change from one request to the next. */
static void rename_function(Request *q, const cJSON *holder) {
    cJSON *item = cJSON_GetObjectItemCaseSensitive(json_get(holder, "function"), "name");
    const char *given = cJSON_GetStringValue(item);
    uint32_t hash = 0;
    if (!given || !*given || (chat_word(given) && strlen(given) <= 64)) return;
    for (const char *s = given; *s; s++) hash = (hash ^ (unsigned char)*s) * 16777619u;
    LocalText used = text_print("%.50s_%08x", given, hash);
    for (char *s = used; *s; s++)
        if (!isalnum((unsigned char)*s)) *s = '_';
    cJSON_AddStringToObject(q->names, used, given); /* of equal ones the first counts */
    cJSON_SetValuestring(item, used);
}

/* Takes tools and tool_choice. *force: the answer must be a call of the function *name, or of any if that is NULL. */
static bool take_tools(Request *q, bool *force, const char **name) {
    const cJSON *choice = json_get(q->json, "tool_choice"), *each, *call;
    const char *word = cJSON_IsString(choice) ? choice->valuestring : choice ? "" : "auto";
    if (!strcmp(word, "none")) cJSON_DeleteItemFromObjectCaseSensitive(q->json, "tools"), word = "auto";
    const cJSON *tools = json_get(q->json, "tools");
    const int n = cJSON_GetArraySize(tools);
    bool found = false;
    q->names = n ? cJSON_CreateObject() : NULL;
    cJSON_ArrayForEach(each, json_get(q->json, "messages")) cJSON_ArrayForEach(call, json_get(each, "tool_calls"))
        rename_function(q, call);
    rename_function(q, choice);
    *name = json_string(json_get(choice, "function"), "name");
    *force = *name || !strcmp(word, "required");
    if (!*force && strcmp(word, "auto"))
        return fail(&q->error, 400, "tool_choice must be auto, none, required or a function");
    cJSON_ArrayForEach(each, tools) {
        rename_function(q, each);
        const char *has = json_string(json_get(each, "function"), "name");
        if (*force && !*name && n == 1) *name = has;
        found |= has && (!*name || !strcmp(has, *name));
    }
    return !*force || found || fail(&q->error, 400, "tool_choice asks for a function that tools do not have");
}
/* ---- making choices ---- */

/* Adds the request's n answers to a prompt. With echo the prompt is part of each: it is read here, or, if the client
 * wants logprobs, by the scheduler from the second token on. */
static bool add_choices(Request *q, const Ids *prompt) {
    const size_t context = (size_t)server.s.engine.context;
    if (!prompt->n) return fail(&q->error, 400, "the prompt is empty");
    if (prompt->n >= context)
        return q->code = "context_length_exceeded",
               fail(&q->error, 400, "this model's maximum context length is %zu tokens, the prompt has %zu: shorten it",
                    context, prompt->n); /* clients look for these words */
    if (q->choices + q->n > MOST_CHOICES) return fail(&q->error, 400, "a request has at most %d answers", MOST_CHOICES);
    q->choice = reallocate(q->choice, (size_t)(q->choices + q->n) * sizeof *q->choice);
    for (int i = 0; i < q->n; i++) {
        Choice *c = q->choice + q->choices++;
        Stream *t = &c->stream;
        *c = (Choice){.request = q, .last = q->since, .scores = cJSON_CreateArray(), .reader.decoder.begun = !q->echo};
        *t = (Stream){.prompt = prompt->n, .sampling = q->sampling};
        bytes_text(&c->text, "");
        ids_append(&t->tokens, prompt->data, prompt->n);
        t->most = prompt->n + (q->tokens ? (size_t)q->tokens : 1);
        if (t->most > context) t->most = context;
        t->sampling.seed += (uint64_t)(c - q->choice);
        t->want = q->top < 0 ? WANT_TOKEN : q->echo ? WANT_ALL_LOGITS : WANT_LOGITS;
        t->stop = q->ignore_eos ? NULL : &server.s.checkpoint.stop;
        t->take = take_token;
        for (size_t k = 0; q->echo && k < (q->top < 0 ? prompt->n : 1); k++)
            read_token(c, 0, prompt->data[k], NULL, false);
    }
    return true;
}

/* Takes chat_template_kwargs, where clients set one of two names that templates have for thinking, or both. */
static bool take_template_values(Request *q, Conversation *talk) {
    const cJSON *kwargs = json_get(q->json, "chat_template_kwargs"), *each, *thinks = NULL;
    bool ok = !kwargs || cJSON_IsObject(kwargs);
    cJSON_ArrayForEach(each, kwargs) {
        const bool effort = same(each->string, "reasoning_effort") && cJSON_IsString(each);
        if (cJSON_IsNull(each)) continue;
        if (effort) {
            conversation_set(&talk->effort, each->valuestring);
        } else {
            ok = ok && each->string && text_listed("thinking enable_thinking", each->string) && cJSON_IsBool(each) &&
                 (!thinks || cJSON_IsTrue(thinks) == cJSON_IsTrue(each));
            thinks = each;
        }
    }
    if (cJSON_IsFalse(thinks)) conversation_set(&talk->effort, "none");
    return ok ||
           fail(&q->error, 400, "chat_template_kwargs may have only enable_thinking or thinking, and reasoning_effort");
}

/* Renders a conversation. The beginning of a forced call belongs to the answer, so that the reader gets it too. */
bool make_chat(Request *q) {
    bool force;
    const char *name;
    LOCAL(conversation_free) Conversation talk = {0};
    LocalIds ids = {0};
    const Chat *chat = &server.s.chat;
    Error *e = &q->error;
    if (!server.s.has_chat) return fail(e, 400, "%s has no chat format: send a text to /v1/completions", server.name);
    if (!take_tools(q, &force, &name)) return false;
    conversation_init(&talk);
    if (!conversation_parse(&talk, q->json, e)) return false;
    if (!talk.messages && !talk.instructions) return fail(e, 400, "messages is empty");
    if (!take_template_values(q, &talk)) return false;
    if (!chat_render(chat, &talk, true, &ids, e)) return false;
    const size_t prompt = ids.n;
    if (force && !chat_force(chat, talk.effort, name, &ids, e)) return false;
    if (!add_choices(q, &ids)) return false;
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        reader_init(&c->reader, chat, &talk);
        for (size_t i = prompt; i < ids.n; i++) reader_push(&c->reader, ids.data[i], NULL);
    }
    return true;
}

/* Takes a prompt, a value of the request's `key`: a text, or an array of token ids. */
bool take_prompt(Request *q, const char *key, const cJSON *prompt, int flags, Ids *ids) {
    const cJSON *each;
    const char *text = cJSON_GetStringValue(prompt);
    const int vocab = server.s.checkpoint.model.vocab;
    int64_t id;
    if (text) return tokenizer_encode(server.s.tokenizer, text, strlen(text), flags, ids, &q->error);
    if (!cJSON_IsArray(prompt)) return fail(&q->error, 400, "%s must be a text or an array of token ids", key);
    cJSON_ArrayForEach(each, prompt) {
        if (!json_whole(each, 0, vocab - 1, &id))
            return fail(&q->error, 400, "%s: token ids are whole numbers from 0 to %d", key, vocab - 1);
        ids_add(ids, (int)id);
    }
    return true;
}

bool make_completion(Request *q) {
    const cJSON *prompt = json_get(q->json, "prompt"), *first = cJSON_IsArray(prompt) ? prompt->child : NULL;
    const bool many = cJSON_IsString(first) || cJSON_IsArray(first);
    const cJSON *each = many ? first : prompt;
    do {
        LocalIds ids = {0};
        if (!take_prompt(q, "prompt", each, WITH_TEMPLATE, &ids) || !add_choices(q, &ids)) return false;
    } while (many && (each = each->next));
    return true;
}
