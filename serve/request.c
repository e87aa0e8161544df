/* request.c: what a request asks for (github.com/openai/openai-openapi). A field is taken, or it is refused by name. */
#include "serve.h"

#include <ctype.h>
#include <openssl/sha.h>
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
static bool flag(Request *q, const char *key, bool normal) {
    const cJSON *value = json_get(q->json, key);
    if (value && !cJSON_IsBool(value) && !q->error.code) fail(&q->error, 400, "%s must be true or false", key);
    return value ? cJSON_IsTrue(value) : normal;
}

bool is_model(Request *q, const char *name) {
    if (!strcmp(name, server.name)) return true;
    q->code = "model_not_found";
    return fail(&q->error, 404, "model: there is no model %.100s here, only %s", name, server.name);
}

/* Fields that requests for answers take, and those of conversations. */
static const char of_answers[] =
    "stream stream_options n best_of max_tokens max_completion_tokens logprobs top_logprobs seed top_k temperature "
    "top_p min_p repetition_penalty frequency_penalty presence_penalty stop logit_bias ignore_eos cache_salt user "
    "safety_identifier metadata prompt_cache_key prediction response_format guided_json guided_regex guided_choice "
    "structured_outputs";
static const char of_chats[] =
    "messages tools tool_choice parallel_tool_calls reasoning_effort chat_template_kwargs date "
    "model_identity knowledge_cutoff channels bare keep_analysis continue_final_message";

/* Fields of other servers that are refused with advice, unless their value follows a = here: it changes nothing. A
 * space marks where a field begins. -0 is 0. */
static const struct {
    const char *fields, *advice;
} others[] = {
    {" max_new_tokens= n_predict= num_predict= max_output_tokens= max_length=", "use max_tokens"},
    {" repeat_penalty=1", "use repetition_penalty"},
    {" stop_sequences= stop_token_ids=[] stop_regex=", "use stop"},
    {" do_sample=", "use temperature, 0 for the likeliest token"},
    {" typical_p=1 top_a=0 tfs_z=1 mirostat=0 mirostat_tau= mirostat_eta= xtc_probability=0 xtc_threshold= "
     "dry_multiplier=0 dry_base= dry_allowed_length= dynatemp_range=0 smoothing_factor=0 samplers= top_n_sigma= "
     "length_penalty=1 early_stopping=false use_beam_search=false",
     "use temperature, top_p, top_k or min_p"},
    {" allowed_token_ids= bad_words=[] logits_processors= logit_processors= custom_logit_processor=", "use logit_bias"},
    {" min_tokens=0 min_new_tokens=0", "use ignore_eos with max_tokens"},
    {" guided_grammar= grammar= json_schema= regex= ebnf= format=", "use response_format"},
    {" functions=[]", "use tools"},
    {" function_call=\"auto\" function_call=\"none\"", "use tool_choice"},
    {" system= instructions= input= documents=[] context=", "use messages"},
    {" enable_thinking=true thinking= think= include_reasoning=true separate_reasoning=true stream_reasoning=true",
     "use reasoning_effort, or chat_template_kwargs with enable_thinking"},
    {" reasoning= verbosity=\"medium\" thinking_budget= budget_tokens= thinking_token_budget=", "use reasoning_effort"},
    {" echo=false prompt_logprobs= n_probs=0 chat_template= template= raw=false",
     "send the text to /v1/completions, which has echo and logprobs"},
    {" prompt=", "use messages, or send the text to /v1/completions"},
    {" messages=", "send them to /v1/chat/completions"},
    {" truncate_prompt_tokens= truncation=\"disabled\" n_keep=0", "shorten the prompt"},
    {" suffix=\"\"", "texts are continued at their end only"},
    {" cache_prompt=true", "use cache_salt to keep prefixes apart"},
    {" request_id=", "send the header X-Request-Id"},
    {" options= extra_body= parameters=", "put its fields into the request itself"},
    {" num_ctx= max_model_len= keep_alive= priority=0 id_slot=-1 lora_path= lora_request= mm_processor_kwargs= "
     "service_tier=\"auto\" service_tier=\"default\" store=false prompt_cache_retention=\"in_memory\" "
     "prompt_cache_retention=\"in-memory\"",
     "the server decides that for all requests, see infer serve --help"},
    {" audio= modalities=[\"text\"] web_search_options= plugins= models= provider=",
     "this server writes text, with one model and without tools of its own"},
    {" include_stop_str_in_output=false return_token_ids=false return_tokens_as_token_ids=false detokenize=true "
     "spaces_between_special_tokens=true",
     "answers are plain text"},
};
/* By endpoint, in the order of endpoints[]: the fields that it takes, and the same as above without advice. */
static const struct {
    const char *taken, *more, *neutral;
} of[ENDPOINTS] = {
    {of_answers, of_chats, " add_special_tokens=false add_generation_prompt=true skip_special_tokens=true"},
    {of_answers, "prompt echo skip_special_tokens",
     " add_special_tokens=true add_generation_prompt=true max_completion_tokens= top_logprobs=0 tools=[] "
     "tool_choice=\"none\" tool_choice=\"auto\""},
    [4] = {of_chats, "prompt add_special_tokens add_generation_prompt", ""},
    [5] = {"tokens", "", ""}};

/* Is the field in a list with values, and is its value one of them? */
static bool is_in(const char *list, const cJSON *field, bool *accepted) {
    LocalBytes text = {0};
    bytes_print(&text, " %s=", field->string);
    if (!strstr(list, text.data)) return false;
    LocalText value = cJSON_IsNumber(field) ? text_print("%.17g", field->valuedouble + 0) : json_text(field);
    bytes_text(&text, value);
    *accepted = text_listed(list, text.data + 1);
    return true;
}

static bool check_field(Request *q, const cJSON *field) {
    const char *name = field->string;
    const size_t at = (size_t)(q->endpoint - endpoints);
    bool accepted = false;
    if (cJSON_IsNull(field) || !strcmp(name, "model")) return true;
    if (is_in(of[at].neutral, field, &accepted))
        return accepted || fail(&q->error, 400, "%s is not supported with this value: leave it out", name);
    if (text_listed(of[at].taken, name) || text_listed(of[at].more, name)) return true;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (is_in(others[i].fields, field, &accepted))
            return accepted || fail(&q->error, 400, "%s is not supported: %s", name, others[i].advice);
    q->code = "unknown_parameter", q->param = name;
    return fail(&q->error, 400, "%.100s is no field of %s: leave it out", name, q->endpoint->path);
}

bool check_fields(Request *q) {
    const cJSON *model = json_get(q->json, "model"), *each;
    const char *name = cJSON_GetStringValue(model);
    q->chat = q->endpoint == endpoints;
    if (model && !name) return fail(&q->error, 400, "model must be a text");
    if (name && *name && !is_model(q, name)) return false;
    cJSON_ArrayForEach(each, q->json) if (!check_field(q, each)) return false;
    return true;
}

static bool take_stops(Request *q) {
    const cJSON *stop = json_get(q->json, "stop"), *each = cJSON_IsArray(stop) ? stop->child : stop;
    for (; each; each = cJSON_IsArray(stop) ? each->next : NULL) {
        const char *text = cJSON_GetStringValue(each);
        if (!text || q->stops == MOST_STOPS || strlen(text) > MOST_STOP)
            return fail(&q->error, 400, "stop must be a text or an array of at most %d texts, each of %d bytes at most",
                        MOST_STOPS, MOST_STOP);
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
    cJSON_ArrayForEach(each, all) { /* an id is written in one way, so none is there twice */
        Bias *bias = q->bias + q->sampling.biases++;
        const bool plain = isdigit((unsigned char)*each->string) && (*each->string != '0' || !each->string[1]);
        bias->add = (float)cJSON_GetNumberValue(each); /* or NaN */
        if (!plain || !text_whole(each->string, 0, vocab - 1, &bias->id) || !(fabsf(bias->add) <= 100))
            return fail(&q->error, 400, "logit_bias maps token ids below %d to numbers from -100 to 100", vocab);
    }
    return true;
}

/* stream_options: usage at a stream's end; padding against listeners and usage all along are not supported. */
static bool take_stream_options(Request *q) {
    const cJSON *options = json_get(q->json, "stream_options"), *each;
    if (options && !cJSON_IsObject(options)) return fail(&q->error, 400, "stream_options must be an object");
    cJSON_ArrayForEach(each, options) {
        if (!strcmp(each->string, "include_usage") && (cJSON_IsBool(each) || cJSON_IsNull(each)))
            q->usage = cJSON_IsTrue(each);
        else if (!text_listed("include_obfuscation continuous_usage_stats", each->string) || cJSON_IsTrue(each))
            return fail(&q->error, 400, "stream_options.%.100s is not supported with this value", each->string);
    }
    return true;
}

/* Kept prefixes are shared by requests of one key and cache_salt: what one has read does not show in another's times
 * and cached_tokens. Without both everybody shares. */
static bool take_salt(Request *q) {
    const cJSON *salt = json_get(q->json, "cache_salt");
    if (salt && (!cJSON_IsString(salt) || !*salt->valuestring))
        return fail(&q->error, 400, "cache_salt must be a text that is not empty");
    unsigned char digest[SHA256_DIGEST_LENGTH];
    LocalText text = text_print("%s,%s", q->key ? q->key : "", salt ? salt->valuestring : "");
    SHA256((const unsigned char *)text, strlen(text), digest);
    memcpy(&q->salt, digest, sizeof q->salt);
    q->salt = q->key || salt ? q->salt | UINT64_C(1) << 63 : 0;
    return true;
}

/* The first prompt of a request for texts that has a list of them; else NULL. */
static const cJSON *first_of_many(const Request *q) {
    const cJSON *prompt = json_get(q->json, "prompt"), *first = cJSON_IsArray(prompt) ? prompt->child : NULL;
    return cJSON_IsString(first) || cJSON_IsArray(first) ? first : NULL;
}

bool take_request(Request *q) {
    const double most = INT32_MAX, seed = number(q, "seed", true, -0x1p63, 0x1p63, -1); /* -1: random */
    Sampling *s = &q->sampling;
    if (getentropy(&s->seed, sizeof s->seed)) s->seed = (uint64_t)(seconds() * 1e9);
    snprintf(q->id, sizeof q->id, "%s-%016llx", q->chat ? "chatcmpl" : "cmpl", (unsigned long long)s->seed);
    q->created = time(NULL);
    const cJSON *best = json_get(q->json, "best_of");
    if (!take_stream_options(q) || !take_salt(q)) return false;
    q->stream = flag(q, "stream", false);
    q->ignore_eos = flag(q, "ignore_eos", false);
    q->echo = !q->chat && flag(q, "echo", false);
    q->skip_special = !q->chat && flag(q, "skip_special_tokens", false);
    q->parallel = !q->chat || flag(q, "parallel_tool_calls", true);
    q->n = (int)number(q, "n", true, 1, 16, 1);
    q->tokens = (int)number(q, "max_tokens", true, q->chat ? 1 : 0, most, q->chat ? most : 16);
    if (q->chat) q->tokens = (int)number(q, "max_completion_tokens", true, 1, most, q->tokens);
    const bool scored = q->chat && flag(q, "logprobs", false);
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
    if (q->chat && q->top > 0 && !scored) return fail(&q->error, 400, "top_logprobs needs logprobs: true");
    if (q->chat && !scored) q->top = -1;
    if (best && cJSON_GetNumberValue(best) != q->n) return fail(&q->error, 400, "best_of must equal n: leave it out");
    q->answers = q->n * (first_of_many(q) && !q->chat ? cJSON_GetArraySize(json_get(q->json, "prompt")) : 1);
    if (q->answers > MOST_CHOICES)
        return fail(&q->error, 400, "%s asks for %d answers, a request has at most %d", q->chat ? "n" : "prompt",
                    q->answers, MOST_CHOICES);
    return take_stops(q) && take_biases(q);
}

/* ---- functions ---- */

/* Gives the function of {"function": {"name": ...}} a name that every chat format allows. The hash keeps different
 * names apart, and does not change from one request to the next. */
static void rename_function(Request *q, const cJSON *holder) {
    cJSON *item = cJSON_GetObjectItemCaseSensitive(json_get(holder, "function"), "name");
    const char *given = cJSON_GetStringValue(item);
    if (!given || !*given || (chat_word(given) && strlen(given) <= 64)) return;
    LocalText used = text_print("%.50s_%08x", given, (unsigned)text_hash(HASH_OF_NONE, given, strlen(given)));
    for (char *s = used; *s; s++)
        if (!isalnum((unsigned char)*s)) *s = '_';
    cJSON_AddStringToObject(q->names, used, given); /* of equal ones the first counts */
    cJSON_SetValuestring(item, used);
}

static const char *function_name(const cJSON *tool) { return json_string(json_get(tool, "function"), "name"); }

static uint64_t name_hash(const cJSON *tool) {
    const char *name = function_name(tool);
    return name ? text_hash(HASH_OF_NONE, name, strlen(name)) : 0;
}

/* tool_choice {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}: the prompt has no other tools.
 * Returns its mode; NULL: it is malformed. */
static const char *allow_tools(Request *q, const cJSON *allowed) {
    cJSON *tools = cJSON_DetachItemFromObjectCaseSensitive(q->json, "tools"), *tool;
    cJSON *kept = cJSON_AddArrayToObject(q->json, "tools");
    const cJSON *names = json_get(allowed, "tools"), *each;
    LOCAL(map_free) Map found = {0}; /* by a name's hash: 0 allowed, 1 and a function has it */
    bool known = cJSON_IsArray(names);
    cJSON_ArrayForEach(each, names) map_put(&found, name_hash(each), 0);
    while ((tool = cJSON_DetachItemFromArray(tools, 0))) {
        const bool wanted = map_get(&found, name_hash(tool)) >= 0;
        if (wanted) map_put(&found, name_hash(tool), 1);
        if (!wanted || !cJSON_AddItemToArray(kept, tool)) cJSON_Delete(tool);
    }
    cJSON_ArrayForEach(each, names) known &= map_get(&found, name_hash(each)) == 1;
    cJSON_Delete(tools);
    return known ? json_string(allowed, "mode") : NULL;
}

/* Takes tools and tool_choice. *force: the answer must be a call of the function *name, or of any if that is NULL. */
static bool take_tools(Request *q, bool *force, const char **name) {
    const cJSON *choice = json_get(q->json, "tool_choice"), *each, *call;
    const char *word = cJSON_IsString(choice) ? choice->valuestring : choice ? "" : "auto";
    const bool some = json_is(choice, "type", "allowed_tools");
    if (some) word = allow_tools(q, json_get(choice, "allowed_tools"));
    if (some && (!word || (strcmp(word, "auto") && strcmp(word, "required"))))
        return fail(&q->error, 400,
                    "tool_choice.allowed_tools needs the mode auto or required, and functions that tools has");
    if (!strcmp(word, "none")) cJSON_DeleteItemFromObjectCaseSensitive(q->json, "tools"), word = "auto";
    const cJSON *tools = json_get(q->json, "tools");
    const int n = cJSON_GetArraySize(tools);
    bool found = false;
    q->names = n ? cJSON_CreateObject() : NULL;
    cJSON_ArrayForEach(each, json_get(q->json, "messages")) cJSON_ArrayForEach(call, json_get(each, "tool_calls"))
        rename_function(q, call);
    rename_function(q, choice);
    *name = function_name(choice);
    *force = *name || !strcmp(word, "required");
    if (!*force && strcmp(word, "auto"))
        return fail(&q->error, 400, "tool_choice must be auto, none, required, a function or allowed_tools");
    cJSON_ArrayForEach(each, tools) {
        rename_function(q, each);
        const char *has = function_name(each);
        if (*force && !*name && n == 1) *name = has;
        found |= has && (!*name || !strcmp(has, *name));
    }
    if (!*force || found) return true;
    const char *sent = json_string(q->names, *name ? *name : ""); /* the name before it was changed */
    return *name ? fail(&q->error, 400, "tool_choice asks for %.64s, which tools does not have", sent ? sent : *name)
                 : fail(&q->error, 400, "tool_choice asks for a call, and tools has no function");
}

/* ---- making choices ---- */

static bool too_long(Request *q, size_t n, const char *of) {
    q->code = "context_length_exceeded", q->param = q->chat ? "messages" : "prompt";
    return fail(&q->error, 400, /* clients look for these words */
                "this model's maximum context length is %d tokens, the prompt has %zu %s: shorten it",
                server.s.engine.context, n, of);
}

/* Adds the request's n answers to a prompt. With echo the prompt is part of each: it is read here, or, if the client
 * wants logprobs, by the scheduler from the second token on. */
static bool add_choices(Request *q, const Ids *prompt) {
    const size_t context = (size_t)server.s.engine.context;
    if (!prompt->n) return fail(&q->error, 400, "prompt is empty");
    if (prompt->n >= context) return too_long(q, prompt->n, "tokens");
    q->choice = reallocate(q->choice, (size_t)(q->choices + q->n) * sizeof *q->choice);
    for (int i = 0; i < q->n; i++) {
        Choice *c = q->choice + q->choices++;
        Stream *t = &c->stream;
        *c = (Choice){.request = q, .last = q->since, .scores = cJSON_CreateArray(), .reader.decoder.begun = !q->echo};
        *t = (Stream){.prompt = prompt->n, .sampling = q->sampling, .salt = q->salt};
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

/* Refuses a conversation that no context can hold, before it is rendered. What models wrote may be left out. */
static bool check_length(Request *q) {
    const cJSON *message, *part;
    size_t n = 0;
    cJSON_ArrayForEach(message, json_get(q->json, "messages")) {
        const cJSON *content = json_get(message, "content");
        if (json_is(message, "role", "assistant")) continue;
        n += cJSON_IsString(content) ? strlen(content->valuestring) : 0;
        cJSON_ArrayForEach(part, content) n += json_string(part, "text") ? strlen(json_string(part, "text")) : 0;
    }
    return !q->answers || n <= server.most_bytes || too_long(q, n, "bytes"); /* /tokenize counts any text */
}

/* Takes chat_template_kwargs: one of two names that templates have for thinking, or both; an effort; and whatever else
 * the template may read. OpenAI's efforts minimal and xhigh are low and high to models of three. */
static bool take_template_values(Request *q, Conversation *talk) {
    const cJSON *kwargs = json_get(q->json, "chat_template_kwargs"), *each, *thinks = NULL;
    bool ok = !kwargs || cJSON_IsObject(kwargs);
    cJSON_ArrayForEach(each, kwargs) {
        const bool effort = same(each->string, "reasoning_effort") && cJSON_IsString(each);
        if (cJSON_IsNull(each)) continue;
        if (effort) {
            conversation_set(&talk->effort, each->valuestring);
        } else {
            const bool thought = each->string && text_listed("thinking enable_thinking", each->string);
            const bool agrees = cJSON_IsBool(each) && (!thinks || cJSON_IsTrue(thinks) == cJSON_IsTrue(each));
            ok = ok && (thought ? agrees : server.s.chat.own != NULL);
            if (thought) thinks = each;
        }
    }
    if (cJSON_IsFalse(thinks)) conversation_set(&talk->effort, "none");
    if (same(talk->effort, "minimal")) conversation_set(&talk->effort, "low");
    if (same(talk->effort, "xhigh")) conversation_set(&talk->effort, "high");
    return ok || fail(&q->error, 400, "chat_template_kwargs has a value that this model's chat format does not take");
}

typedef struct {
    bool force;       /* the answer is a call, */
    const char *name; /* of this function, or of any */
    size_t begin;     /* the token where it begins */
} Answering;

/* Reads a conversation and renders it. The beginning of a forced call belongs to the answer. */
static bool render(Request *q, Conversation *talk, Ids *ids, Answering *to) {
    const Chat *chat = &server.s.chat;
    const bool prompt = flag(q, "add_generation_prompt", true); /* /tokenize alone takes it */
    Error *e = &q->error;
    if (!server.s.has_chat) return fail(e, 400, "%s has no chat format: send a text to /v1/completions", server.name);
    if (e->code || !take_tools(q, &to->force, &to->name) || !check_length(q)) return false;
    conversation_init(talk);
    if (!conversation_parse(talk, q->json, e) || !take_template_values(q, talk)) return false;
    if (!talk->messages && !talk->instructions) return fail(e, 400, "messages is empty");
    if (keeping && !chat->schemas) /* the prompt cannot show it; the answer keeps it */
        cJSON_DeleteItemFromObjectCaseSensitive(talk->request, "response_format");
    if (tools_of(talk) && !chat->tools) return fail(e, 400, "tools: %s has no words for them", chat->name);
    if (!chat_render(chat, talk, prompt, ids, e)) return false;
    if (json_true(q->json, "continue_final_message")) conversation_set(&talk->effort, "none"); /* it is in no thought */
    to->begin = ids->n;
    return !to->force || !prompt || chat_force(chat, talk->effort, to->name, ids, e);
}

/* Lets the choices from `first` on keep what the request asks of the answer. talk: NULL for texts. */
static bool keep_rule(Request *q, int first, const Conversation *talk, const Answering *to) {
    static const char asks[] = "response_format guided_json guided_regex guided_choice structured_outputs";
    const cJSON *each;
    cJSON_ArrayForEach(each, q->json) {
        const bool asked = !cJSON_IsNull(each) && !json_is(each, "type", "text");
        if (keeping || !asked || !text_listed(asks, each->string)) continue;
        return fail(&q->error, 400, "%s is not supported: this server was built without json/", each->string);
    }
    Rule *rule = keeping ? keeping->make(&server.s, q->json, talk, to->force, to->name, &q->error) : NULL;
    for (Choice *c = q->choice + first; rule && c < q->choice + q->choices; c++)
        keeping->keep(rule, &c->stream, to->begin);
    if (rule) keeping->drop(rule);
    return !q->error.code;
}

static bool make_chat(Request *q) {
    LOCAL(conversation_free) Conversation talk = {0};
    LocalIds ids = {0};
    Answering to = {0};
    if (!render(q, &talk, &ids, &to) || !add_choices(q, &ids)) return false;
    for (Choice *c = q->choice; c < q->choice + q->choices; c++) {
        reader_init(&c->reader, &server.s.chat, &talk);
        for (size_t i = to.begin; i < ids.n; i++) reader_push(&c->reader, ids.data[i], NULL);
    }
    return keep_rule(q, 0, &talk, &to);
}

/* Takes a prompt, a value of the request's `key`: a text, or an array of token ids. */
static bool take_prompt(Request *q, const char *key, const cJSON *prompt, int flags, Ids *ids) {
    const cJSON *each;
    const char *text = cJSON_GetStringValue(prompt);
    const int vocab = server.s.checkpoint.model.vocab;
    int64_t id;
    if (text && q->answers && strlen(text) > server.most_bytes) return too_long(q, strlen(text), "bytes");
    if (text)
        return tokenizer_encode(server.s.tokenizer, text, strlen(text), flags, ids, &q->error) ||
               (q->param = key, false);
    if (!cJSON_IsArray(prompt)) return fail(&q->error, 400, "%s must be a text or an array of token ids", key);
    cJSON_ArrayForEach(each, prompt) {
        if (!json_whole(each, 0, vocab - 1, &id))
            return fail(&q->error, 400, "%s[%zu]: token ids are whole numbers from 0 to %d", key, ids->n, vocab - 1);
        ids_add(ids, (int)id);
    }
    return true;
}

static bool make_completion(Request *q) {
    const cJSON *many = first_of_many(q), *each = many ? many : json_get(q->json, "prompt");
    do {
        LocalIds ids = {0};
        const int first = q->choices;
        if (!take_prompt(q, "prompt", each, WITH_TEMPLATE, &ids) || !add_choices(q, &ids) ||
            !keep_rule(q, first, NULL, &(Answering){.begin = ids.n}))
            return false;
    } while (many && (each = each->next));
    return true;
}

/* Of the request only the stop texts are needed from now on. */
bool make_choices(Request *q) {
    if (!(q->chat ? make_chat(q) : make_completion(q))) return false;
    cJSON *stop = cJSON_DetachItemFromObjectCaseSensitive(q->json, "stop");
    cJSON_Delete(q->json);
    q->json = cJSON_CreateObject();
    cJSON_AddItemToObject(q->json, "stop", stop); /* NULL adds nothing */
    return true;
}

/* ---- /tokenize and /detokenize ---- */

void to_tokens(Request *q) {
    LOCAL(conversation_free) Conversation talk = {0};
    LocalIds ids = {0};
    Answering to = {0};
    const int flags = flag(q, "add_special_tokens", false) ? WITH_TEMPLATE : 0;
    if (q->error.code) return;
    if (json_get(q->json, "messages") ? !render(q, &talk, &ids, &to)
                                      : !take_prompt(q, "prompt", json_get(q->json, "prompt"), flags, &ids))
        return;
    bytes_print(&q->out, "{\"count\":%zu,\"max_model_len\":%d,\"tokens\":[", ids.n, server.s.engine.context);
    for (size_t i = 0; i < ids.n; i++) bytes_print(&q->out, i ? ",%d" : "%d", ids.data[i]);
    bytes_text(&q->out, "]}");
}

void from_tokens(Request *q) {
    LocalIds ids = {0};
    LocalBytes text = {0};
    Decoder d = {0};
    const cJSON *tokens = json_get(q->json, "tokens");
    if (!cJSON_IsArray(tokens)) fail(&q->error, 400, "tokens must be an array of token ids");
    if (q->error.code || !take_prompt(q, "tokens", tokens, 0, &ids)) return;
    for (size_t i = 0; i < ids.n; i++) tokenizer_decode(server.s.tokenizer, &d, ids.data[i], &text);
    tokenizer_flush(&d, &text);
    put_json(q, json_object("prompt", json_from_text(text.data, text.n), NULL));
}
