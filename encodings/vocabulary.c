/* vocabulary.c: a GGUF file's vocabulary as the tokenizer.json and tokenizer_config.json that the hub would hold. It is
 * GPT-2's, of bytes with merges, or SentencePiece's, of texts with scores, from which the merges follow.
 *
 * Objects of this size are only walked, and texts stay where the metadata has them: Gemma has 262,144 tokens and
 * 580,000 merges. tokenizer.c checks what is made here, as it checks a file. */
#include "gguf.h"

#include <string.h>

#define KEY(name)   "tokenizer.ggml." name
#define parsed(...) cJSON_Parse(#__VA_ARGS__)

/* ---- words ---- */

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define LETTERS(digits)                                                                                                \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits                                                              \
                 "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define CASES(behind, digits)                                                                                          \
    UPPER "*" LOWER "+" behind "|" UPPER "+" LOWER "*" behind "|" digits                                               \
          "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* By the names that GGUF files use: the patterns that split text into words, and what else tokenizer.json says. GPT2:
 * its pattern is the last. OWN_WORDS: a word that is a token needs no merges. BEGINS: by default bos_token begins a
 * text. */
enum { GPT2 = 1, NFC = 2, OWN_WORDS = 4, BEGINS = 8 };
static const struct {
    const char *names, *split[6];
    int features;
} pres[] = {
    {"llama-bpe llama3 llama-v3", {LETTERS("\\p{N}{1,3}")}, OWN_WORDS | BEGINS},
    {"qwen2 deepseek-r1-qwen megrez", {LETTERS("\\p{N}")}, NFC},
    {"gpt-4o llama4", {CASES(CONTRACTIONS "?", "\\p{N}{1,3}")}, OWN_WORDS},
    {"tekken", {CASES("", "\\p{N}")}, OWN_WORDS | BEGINS},
    {"smollm", {"\\p{N}"}, GPT2},
    {"gpt-2", {NULL}, GPT2},
    {"deepseek-llm", /* letters with case of an older Unicode, but for some blocks */
     {"[\r\n]",
      "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-"
      "Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴ"
      "ᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-"
      "ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-"
      "ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
      "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "\\s+$", "[一-龥ࠀ-一가-퟿]+", "\\p{N}+"},
     0},
    {"deepseek-coder", {"[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[一-龥ࠀ-一가-퟿]+", "\\p{N}"}, 0},
    {"deepseek-v3",
     {"\\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
      "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
      " ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
     0},
};

/* The row of pres[] that the metadata names, or -1. */
static int find_pre(const cJSON *metadata) {
    const char *pre = json_string(metadata, KEY("pre"));
    int i = (int)(sizeof pres / sizeof *pres);
    while (--i >= 0 && !(pre && text_listed(pres[i].names, pre))) continue;
    return i;
}

static bool add_words(cJSON *file, cJSON *model, const cJSON *metadata, const char *path, Error *e) {
    const char *pre = json_string(metadata, KEY("pre"));
    const int row = find_pre(metadata);
    LocalBytes known = {0};
    for (size_t i = 0; i < sizeof pres / sizeof *pres; i++) bytes_print(&known, " %s", pres[i].names);
    if (row < 0)
        return fail(e, BAD_MODEL, "%s: " KEY("pre") " is '%.40s', known are%s", path, pre ? pre : "(missing)",
                    known.data);
    cJSON *steps = cJSON_CreateArray();
    for (int i = 0; i < 6 && pres[row].split[i]; i++)
        cJSON_AddItemToArray(steps, json_object("type", json_word("Split"), "pattern",
                                                json_object("Regex", json_word(pres[row].split[i]), NULL), "behavior",
                                                json_word("Isolated"), "invert", cJSON_CreateFalse(), NULL));
    cJSON_AddItemToArray(steps, json_object("type", json_word("ByteLevel"), "add_prefix_space", cJSON_CreateFalse(),
                                            "use_regex", cJSON_CreateBool(pres[row].features & GPT2), NULL));
    json_add(file, "pre_tokenizer", json_object("type", json_word("Sequence"), "pretokenizers", steps, NULL), "decoder",
             parsed({"type" : "ByteLevel"}), NULL);
    if (pres[row].features & NFC) cJSON_AddItemToObject(file, "normalizer", parsed({"type" : "NFC"}));
    cJSON_AddBoolToObject(model, "ignore_merges", pres[row].features & OWN_WORDS);
    return true;
}

/* ---- tokens ---- */

/* tokenizer.ggml.token_type. */
enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED };

typedef struct { /* a walk over all tokens */
    int id, type;
    const char *text;
    const cJSON *token, *kind; /* the next ones */
} Walk;

static Walk walk_begin(const cJSON *metadata) {
    const cJSON *tokens = json_get(metadata, KEY("tokens")), *types = json_get(metadata, KEY("token_type"));
    return (Walk){.id = -1, .token = tokens ? tokens->child : NULL, .kind = types ? types->child : NULL};
}

/* Goes to the next token that is in use. */
static bool walk_on(Walk *w) {
    for (w->text = NULL; w->token && !w->text;) {
        const char *text = cJSON_GetStringValue(w->token);
        int64_t type = NORMAL;
        json_whole(w->kind, NORMAL, UNUSED, &type);
        w->type = (int)type;
        w->text = text && *text && type != UNUSED ? text : NULL;
        w->id++;
        w->token = w->token->next;
        w->kind = w->kind ? w->kind->next : NULL;
    }
    return w->text;
}

/* Returns a token's text, or NULL. */
static const char *text_of(const cJSON *metadata, double id) {
    Walk w = walk_begin(metadata);
    while (walk_on(&w))
        if (w.id == id) return w.text;
    return NULL;
}

/* The vocabulary has all tokens; those with a type of their own are cut out of the text first. */
static void add_tokens(cJSON *file, cJSON *model, const cJSON *metadata) {
    cJSON *vocab = cJSON_AddObjectToObject(model, "vocab"), *added = cJSON_AddArrayToObject(file, "added_tokens");
    const char *unknown = NULL;
    Walk w = walk_begin(metadata);
    while (walk_on(&w)) {
        cJSON_AddItemToObjectCS(vocab, w.text, json_number(w.id));
        if (w.type == UNKNOWN) unknown = w.text;
        if (w.type == NORMAL) continue;
        cJSON_AddItemToArray(added, json_object("id", json_number(w.id), "content", cJSON_CreateStringReference(w.text),
                                                "special", cJSON_CreateBool(w.type != USER_DEFINED), NULL));
    }
    json_add(model, "unk_token", json_word(unknown), "fuse_unk", cJSON_CreateTrue(), NULL);
}

/* ---- SentencePiece ---- */

/* An array of the metadata, without a copy; an empty one if it is missing. */
static void add_list(cJSON *model, const char *name, const cJSON *metadata, const char *key) {
    cJSON *list = cJSON_GetObjectItemCaseSensitive(metadata, key);
    if (cJSON_IsArray(list))
        cJSON_AddItemReferenceToObject(model, name, list);
    else
        cJSON_AddArrayToObject(model, name);
}

/* Marks, U+2581, stand for spaces. A key says whether a mark begins a text; none says which texts, so with a token
 * [INST] only the first, else all between added tokens. */
static void add_marks(cJSON *file, const cJSON *metadata) {
    cJSON *normalizers = parsed([ {"type" : "Replace", "pattern" : {"String" : " "}, "content" : "▁"} ]);
    cJSON *decoders = parsed([ {"type" : "Replace", "pattern" : {"String" : "▁"}, "content" : " "} ]);
    const cJSON *prefix = json_get(metadata, KEY("add_space_prefix"));
    const char *arch = json_string(metadata, "general.architecture");
    bool marked = prefix ? !cJSON_IsFalse(prefix) : !arch || strncmp(arch, "gemma", 5), first = false;
    const cJSON *added;
    cJSON_ArrayForEach(added, json_get(file, "added_tokens")) first |= json_is(added, "content", "[INST]");
    if (marked) cJSON_AddItemToArray(decoders, parsed({"type" : "Strip", "content" : " ", "start" : 1, "stop" : 0}));
    if (marked && first)
        cJSON_AddItemToObject(
            file, "pre_tokenizer",
            parsed({"type" : "Metaspace", "replacement" : "▁", "prepend_scheme" : "first", "split" : false}));
    else if (marked)
        cJSON_InsertItemInArray(normalizers, 0, parsed({"type" : "Prepend", "prepend" : "▁"}));
    json_add(file, "normalizer", json_object("type", json_word("Sequence"), "normalizers", normalizers, NULL),
             "decoder", json_object("type", json_word("Sequence"), "decoders", decoders, NULL), NULL);
}

/* ---- the files ---- */

static bool add_all(cJSON *file, const cJSON *metadata, const char *path, Error *e) {
    const char *kind = json_string(metadata, KEY("model"));
    cJSON *model = cJSON_AddObjectToObject(file, "model");
    bool scored = kind && !strcmp(kind, "llama");
    if (!scored && !(kind && !strcmp(kind, "gpt2")))
        return fail(e, BAD_MODEL, "%s: " KEY("model") " is '%.40s', known are gpt2 and llama", path,
                    kind ? kind : "(missing)");
    json_add(model, "type", json_word("BPE"), "byte_fallback", cJSON_CreateBool(scored), NULL);
    add_tokens(file, model, metadata);
    add_list(model, "merges", scored ? NULL : metadata, KEY("merges"));
    if (scored) add_list(model, "scores", metadata, KEY("scores"));
    if (!scored && !add_words(file, model, metadata, path, e)) return false;
    if (scored) add_marks(file, metadata);
    if (!json_true(metadata, KEY("add_eos_token"))) return true;
    const char *last = text_of(metadata, cJSON_GetNumberValue(json_get(metadata, KEY("eos_token_id"))));
    if (!last) return fail(e, BAD_MODEL, "%s: " KEY("add_eos_token") " is true, but eos_token_id is no token", path);
    cJSON *single = parsed([ {"Sequence" : {"id" : "A", "type_id" : 0}} ]);
    cJSON_AddItemToArray(single, json_object("SpecialToken", json_object("id", json_word(last), NULL), NULL));
    return json_add(file, "post_processor",
                    json_object("type", json_word("TemplateProcessing"), "single", single, NULL), NULL);
}

cJSON *gguf_tokenizer(const cJSON *metadata, const char *path, Error *e) {
    cJSON *file = cJSON_CreateObject();
    if (add_all(file, metadata, path, e)) return file;
    cJSON_Delete(file);
    return NULL;
}

cJSON *gguf_tokenizer_config(const cJSON *metadata) {
    const cJSON *add = json_get(metadata, KEY("add_bos_token")), *id = json_get(metadata, KEY("bos_token_id"));
    const int row = find_pre(metadata);
    bool begins = json_is(metadata, KEY("model"), "llama") || (row >= 0 && pres[row].features & BEGINS);
    if (add) begins = cJSON_IsTrue(add);
    const char *bos = id || begins ? text_of(metadata, id ? cJSON_GetNumberValue(id) : 1) : NULL;
    const cJSON *end = json_get(metadata, KEY("eos_token_id"));
    const char *eos = end ? text_of(metadata, cJSON_GetNumberValue(end)) : NULL;
    return json_object("chat_template", json_word(json_string(metadata, "tokenizer.chat_template")), "bos_token",
                       json_word(bos), "eos_token", json_word(eos), "add_bos_token", cJSON_CreateBool(begins), NULL);
}
