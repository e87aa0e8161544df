/* chat.h: conversations to prompts, sampled tokens to messages. Formats are harmony, that of gpt-oss
 * (github.com/openai/harmony, docs/format.md), and those of a table in chat.c; control tokens and the text of the chat
 * template choose one. A model without a known format is continued raw. */
#ifndef CHAT_H
#define CHAT_H

#include "tokenizer.h"

enum { CONTROLS = 8 }; /* <|start|> <|channel|> <|constrain|> <|message|> <|end|> <|call|> <|return|> <|endoftext|> */
typedef struct Format Format; /* a row of the table */
typedef struct {
    const Tokenizer *tokenizer;
    const Format *format;
    int control[CONTROLS]; /* ids of harmony's tokens, or of another format's marks */
    Ids answer;            /* harmony's <|start|>assistant, which ends a prompt */
    int end;               /* another format's token behind an answer */
    char *preset;          /* the template's own system text, where nobody gives one; or NULL */
} Chat;

/* The chat template of the model in a folder, or "". BAD_MODEL: the file is broken. */
bool chat_template(const char *dir, Bytes *out, Error *e);
/* False: it has no format that is known; the error's text says why. */
bool chat_open(Chat *chat, const Tokenizer *t, const char *template, Error *e);
const char *chat_name(const Chat *chat); /* of its format: harmony, Qwen3, Llama 3.1, ... */
/* Can the model think so long: none, low, medium or high? USAGE. */
bool chat_effort(const Chat *chat, const char *effort, Error *e);
void chat_close(Chat *chat);

typedef struct {
    union {
        struct {
            char *role;         /* system, developer, user, assistant or tool */
            char *id;           /* of a call and its result, where somebody gave one; else NULL */
            char *name;         /* author of a tool's message, "functions.f"; else NULL */
            char *channel;      /* analysis (reasoning), commentary, final; or NULL */
            char *recipient;    /* of a call "functions.f", of its result "assistant"; else NULL */
            char *content_type; /* json, <|constrain|>json; or NULL */
        };
        char *word[6]; /* the same */
    };
    Bytes content;
    Ids sampled; /* the tokens of a message that the model wrote without a fault, to be replayed exactly; else none */
} Message;

typedef struct {
    char *effort, *date; /* NULL or "none": no date */
    char *instructions;  /* the user's system prompt, or NULL */
    cJSON *request;      /* what else its JSON had, such as tools and response_format; or NULL */
    Message *message;
    int messages;
} Conversation;

/* Effort medium, today's date. */
void conversation_init(Conversation *c);
void conversation_free(Conversation *c);
/* Replaces one of its texts; NULL takes it away. */
void conversation_set(char **text, const char *to);
/* Appends a message and returns it; valid until the next is added. channel may be NULL. */
Message *conversation_add(Conversation *c, const char *role, const char *channel, const char *content, size_t n);
void conversation_remove(Conversation *c, int from, int n); /* forgets n messages */
/* Takes messages, tools, response_format, reasoning_effort and date from JSON in the shape of chat completions. A
 * message may also have harmony's channel, recipient and content_type, and the object model_identity, knowledge_cutoff,
 * channels, bare (no system message) and keep_analysis (of turns that have ended). USAGE with the field that is wrong.
 */
bool conversation_parse(Conversation *c, const cJSON *json, Error *e);

/* Append as JSON: a message in harmony's words, a whole conversation in those of chat completions. */
void message_json(const Message *m, Bytes *out);
void conversation_json(const Conversation *c, Bytes *out);
/* Appends the conversation as tokens; with `prompt` it ends where the model goes on, in harmony <|start|>assistant.
 * Reasoning of turns that ended in a final answer is left out, elsewhere as the template does. Only the renderer writes
 * control tokens: names that could pass for a header are refused (USAGE), and tools where the format has none. */
bool chat_render(const Chat *chat, const Conversation *c, bool prompt, Ids *out, Error *e);

/* Appends to a prompt with tools the beginning of a call: of this function, or, if NULL, of one that the model chooses.
 * It belongs to the answer: push it to the reader first. */
bool chat_force(const Chat *chat, const char *effort, const char *name, Ids *out, Error *e);

typedef enum { REASONING, PREAMBLE, ANSWER, CALL } Part;
Part message_part(const Message *m);

/* Reads what the model writes, token by token, and never gives up: a malformed header is read as the nearest legal one
 * and counted, text in it is content, and what the model writes in the name of others is its own. Begin with
 * reader_init, push every sampled token, end with reader_end. */
typedef struct {
    const Chat *chat;
    Message now;              /* being read */
    bool started, in_content; /* its header began with <|start|>; behind <|message|> */
    Bytes header;             /* text before that; in other formats white space or a call that waits */
    Decoder decoder;
    Message *message; /* those that are complete; take them with reader_take */
    int messages;
    int repairs, sound; /* all; and those before `now` */
} Reader;

typedef struct {
    bool stop;   /* sampling should end */
    bool closed; /* the last of reader.message was completed by this token or, if it is a stop, before it */
    Part part;   /* of the message that `text` belongs to */
} Read;

/* `effort` is that of the prompt: does it end inside a thought? NULL: the usual one. */
void reader_init(Reader *r, const Chat *chat, const char *effort);
/* Appends to `text` what can be shown of the message's content. */
Read reader_push(Reader *r, int token, Bytes *text);
/* The stream has ended, perhaps inside a message, which is then completed without its end. Returns as reader_push. */
Read reader_end(Reader *r, Bytes *text);
/* Moves the messages read so far to the conversation. */
void reader_take(Reader *r, Conversation *c);
void reader_free(Reader *r);

#endif
