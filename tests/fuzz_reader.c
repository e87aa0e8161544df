/* Any bytes as what a model writes: 1 to 8 are harmony's control tokens, 11 an id without text, others their own
 * tokens. Promises: the reader never aborts; what it shows is UTF-8 and the contents of its messages; a message that
 * begins with <|start|> reads the same whatever stood before; what was read can be saved, loaded and rendered again,
 * and no text of it becomes a control token. */
#include "chat.h"

#include <assert.h>
#include <string.h>

static Tokenizer *tokenizer;
static Chat chat;
static int token_of[256];

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    Error e;
    (void)argc, (void)argv;
    tokenizer = tokenizer_open("tests/fixtures/parrot/tokenizer.json", &e);
    assert(tokenizer && chat_open(&chat, tokenizer));
    for (int id = tokenizer_size(tokenizer) - 1; id >= 0; id--) {
        Bytes out = {0};
        tokenizer_bytes(tokenizer, &(Decoder){0}, id, &out);
        if (out.n == 1) token_of[(unsigned char)*out.data] = id;
        bytes_free(&out);
    }
    const int control[] = {chat.start,     chat.end,  chat.message, chat.channel,
                           chat.constrain, chat.call, chat.done,    chat.endoftext};
    memcpy(token_of + 1, control, sizeof control);
    token_of[11] = tokenizer_size(tokenizer) + 7;
    return 0;
}

/* Reads all of it; *fresh: where a message began behind the end of another. */
static void read_all(Reader *r, const uint8_t *data, size_t n, Bytes *shown, size_t *fresh) {
    reader_init(r, &chat);
    for (size_t i = 0; i < n; i++) {
        if (r->between && data[i] == 1 && fresh && !*fresh) *fresh = i;
        int before = r->messages;
        Read read = reader_push(r, token_of[data[i]], shown);
        assert(r->messages - before == read.closed);
    }
    reader_end(r, shown);
}

static void render(Conversation *c, int messages) {
    Error e;
    Ids ids = {0};
    int starts = 0;
    assert(chat_render(&chat, c, false, &ids, &e));
    for (size_t i = 0; i < ids.n; i++) starts += ids.data[i] == chat.start;
    assert(starts == messages);
    ids_free(&ids);
}

/* What was written as JSON is a conversation again. */
static void load(const Conversation *c) {
    Error e;
    Bytes text = {0};
    Conversation again;
    conversation_json(c, &text);
    cJSON *json = json_parse(text.data, text.n, "messages", &e);
    conversation_init(&again);
    assert(json && conversation_parse(&again, &chat, json, &e) && again.messages == c->messages);
    render(&again, again.messages);
    cJSON_Delete(json);
    conversation_free(&again);
    bytes_free(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    Bytes shown = {0}, contents = {0}, first = {0}, second = {0};
    Reader all, part;
    Conversation c;
    size_t fresh = 0;
    read_all(&all, data, n, &shown, &fresh);
    assert(utf8_check(shown.data, shown.n) == shown.n);
    for (int i = 0; i < all.messages; i++) bytes_add(&contents, all.message[i].content.data, all.message[i].content.n);
    assert(contents.n == shown.n && (!shown.n || !memcmp(contents.data, shown.data, shown.n)));
    shown.n = 0;
    read_all(&part, data + fresh, fresh ? n - fresh : 0, &shown, NULL);
    for (int i = 0; i < part.messages; i++) {
        message_json(part.message + i, &first);
        message_json(all.message + all.messages - part.messages + i, &second);
    }
    assert(first.n == second.n && (!first.n || !memcmp(first.data, second.data, first.n)));
    reader_free(&part);
    conversation_init(&c);
    c.bare = c.keep_analysis = true;
    conversation_add(&c, "user", NULL, "", 0);
    reader_take(&all, &c);
    render(&c, c.messages);
    load(&c);
    reader_free(&all);
    conversation_free(&c);
    bytes_free(&shown), bytes_free(&contents), bytes_free(&first), bytes_free(&second);
    return 0;
}
