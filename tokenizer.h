/* tokenizer.h: text to token ids and back, as tokenizer.json says (the file format of the `tokenizers` library): byte
 * pair encoding (Sennrich et al., 2016) on bytes, as GPT-2, or on characters with byte fallback, as SentencePiece. */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "base.h"

typedef struct Tokenizer Tokenizer;

/* Reads a model's file by its name on the hub: of NAME.json the JSON, of NAME.jinja the text as a JSON string. NULL:
 * BAD_MODEL, or e->code is 0 and there is no such file. */
typedef cJSON *JsonFile(const void *model, const char *name, Error *e);
/* Reads tokenizer.json, tokenizer_config.json and the chat template, each by `json`, which gets `model`. NULL:
 * BAD_MODEL, with what is wrong or which component is not implemented. Errors of tokenizer.json name `path`. */
Tokenizer *tokenizer_open(const char *path, JsonFile *json, const void *model, Error *e);
void tokenizer_close(Tokenizer *t);

/* Removes added tokens that the model has no embedding for. False: other tokens lack one too, so
 * the tokenizer belongs to another model. */
bool tokenizer_fit(Tokenizer *t, int vocab);
/* The model's chat template, or that for prompts with tools, or "". */
const char *tokenizer_template(const Tokenizer *t, bool tools);
int tokenizer_size(const Tokenizer *t); /* one above the highest id */
/* The id of the added token with this text, or -1. */
int tokenizer_added(const Tokenizer *t, const char *text);
bool tokenizer_is_control(const Tokenizer *t, int id);
const cJSON *tokenizer_special(const Tokenizer *t); /* bos_token, eos_token and the like, as a template gets them */

/* Without flags the name of a control token is ordinary text, so that no text from outside becomes a control token. */
enum {
    CONTROL_TOKENS = 1, /* their names become control tokens */
    WITH_TEMPLATE = 2   /* the file's post_processor adds its tokens before and behind, such as beginning-of-text */
};
/* Appends the ids of n bytes of text. USAGE: they are not UTF-8, with the offset. BAD_MODEL: the file's pattern exceeds
 * its match limit, or a byte has no token. After an error `out` is as before. */
bool tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int flags, Ids *out, Error *e);

/* The same, in which only what the template wrote becomes a control token. */
bool tokenizer_encode_marked(const Tokenizer *t, const Marked *text, Ids *out, Error *e);

/* The most bytes of a text that becomes so many tokens. SIZE_MAX: there is no limit. */
size_t tokenizer_room(const Tokenizer *t, size_t tokens);

/* Decodes one stream of tokens. Set it to zero to begin. Set `begun` if the stream continues a text, because a Strip
 * decoder drops the first space only at the beginning. */
typedef struct {
    bool begun;
    Bytes held; /* an incomplete UTF-8 sequence */
} Decoder;
/* Appends the bytes of a token, which need not be whole characters. An id without text adds nothing. */
void tokenizer_bytes(const Tokenizer *t, Decoder *d, int id, Bytes *out);
/* Appends the text of a token in valid UTF-8. An incomplete character waits for the next token; an invalid one becomes
 * U+FFFD. */
void tokenizer_decode(const Tokenizer *t, Decoder *d, int id, Bytes *out);
/* Ends the stream: an incomplete character becomes U+FFFD. The decoder is empty again. */
void tokenizer_flush(Decoder *d, Bytes *out);

#endif
