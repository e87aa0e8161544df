/* tokenizer.h: text to token ids and back, as tokenizer.json says (the file format of the `tokenizers` library): byte
 * pair encoding (Sennrich et al., 2016) on bytes (GPT-2's way) or on characters with byte fallback (SentencePiece's).
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "base.h"

typedef struct Tokenizer Tokenizer;

/* Reads tokenizer.json. BAD_MODEL, with what is wrong or which component nobody implemented. */
Tokenizer *tokenizer_open(const char *path, Error *e);
void tokenizer_close(Tokenizer *t);

/* Leaves out added tokens that a model with so many embeddings has no row for (Gemma 3 1B has one). false: other tokens
 * are among them, the model is another one's. */
bool tokenizer_fit(Tokenizer *t, int vocab);
int tokenizer_size(const Tokenizer *t); /* one above the highest id */
/* The id of the added token written so, or -1. */
int tokenizer_added(const Tokenizer *t, const char *text);
bool tokenizer_is_control(const Tokenizer *t, int id);

/* By default a control token's name in the text is ordinary text, so that nothing from outside can become one. */
enum {
    CONTROL_TOKENS = 1, /* recognise them */
    WITH_TEMPLATE = 2   /* put the file's template around the text: a beginning-of-text token and the like */
};
/* Appends the ids of n bytes of text. USAGE with the offset if they are not UTF-8; BAD_MODEL if the file's pattern
 * exceeds its match limit or a byte has no token; then `out` is as before. */
bool tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int flags, Ids *out, Error *e);

/* Decodes one stream of tokens. Zero it to begin; set `begun` if the stream continues other text, whose first space it
 * must not lose to the file's Strip decoder. */
typedef struct {
    bool begun;
    Bytes held; /* an incomplete UTF-8 sequence */
} Decoder;
/* Appends the bytes of a token as they are, in pieces of UTF-8 or not. An id without text adds nothing. */
void tokenizer_bytes(const Tokenizer *t, Decoder *d, int id, Bytes *out);
/* Appends the text of a token: UTF-8 only, incomplete sequences held back for the next token, invalid ones as U+FFFD.
 */
void tokenizer_decode(const Tokenizer *t, Decoder *d, int id, Bytes *out);
/* Ends the stream: what was held back becomes U+FFFD. The decoder is as new and owns nothing. */
void tokenizer_flush(Decoder *d, Bytes *out);

#endif
