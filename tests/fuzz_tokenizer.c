/* Any bytes, up to the first 0xFF, as tokenizer.json; what follows is a text. Promises: the file is refused with a
 * message, or texts are encoded to ids inside the vocabulary and never to a control token, or refused with a message;
 * ids decode to UTF-8. The parrot's tokenizer gives back every text that is UTF-8 and refuses every other. */
#include "parrot.h"

#include <assert.h>
#include <string.h>

static Tokenizer *parrot;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    Error e;
    (void)argc, (void)argv;
    parrot = parrot_open(NULL, &e);
    assert(parrot);
    return 0;
}

static void there_and_back(const Tokenizer *t, const char *text, size_t n, bool exact) {
    Error e = {0};
    Ids ids = {0};
    Bytes out = {0};
    Decoder d = {0};
    bytes_text(&out, "");
    bool ok = tokenizer_encode(t, text, n, 0, &ids, &e);
    assert(ok || (e.code && *e.text && !ids.n));
    assert(!exact || ok == (utf8_check(text, n) == n));
    for (size_t i = 0; i < ids.n; i++) {
        assert(ids.data[i] >= 0 && ids.data[i] < tokenizer_size(t));
        assert(!tokenizer_is_control(t, ids.data[i]));
        tokenizer_decode(t, &d, ids.data[i], &out);
    }
    tokenizer_flush(&d, &out);
    assert(utf8_check(out.data, out.n) == out.n);
    assert(!(exact && ok) || (out.n == n && !memcmp(out.data, text, n)));
    if (tokenizer_encode(t, text, n, CONTROL_TOKENS | WITH_TEMPLATE, &ids, &e))
        for (size_t i = 0; i < ids.n; i++) assert(ids.data[i] >= 0 && ids.data[i] < tokenizer_size(t));
    ids_free(&ids);
    bytes_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const char sample[] = "Hello,  w\xC3\xB6rld's <|end|> 12345\n\n\xF0\x9F\x99\x82 <s>\tx";
    const uint8_t *cut = n ? memchr(data, 0xFF, n) : NULL;
    size_t json = cut ? (size_t)(cut - data) : n;
    const char *text = cut ? (const char *)cut + 1 : "";
    Error e = {0};
    there_and_back(parrot, text, cut ? n - json - 1 : 0, true);
    cJSON *file = json_parse((const char *)data, json, "tokenizer.json", &e);
    Tokenizer *t = file ? parrot_open(file, &e) : NULL;
    cJSON_Delete(file);
    assert(t || (e.code == BAD_MODEL && *e.text));
    if (!t) return 0;
    there_and_back(t, sample, sizeof sample - 1, false);
    if (cut) there_and_back(t, text, n - json - 1, false);
    tokenizer_close(t);
    return 0;
}
