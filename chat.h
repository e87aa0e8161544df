/* chat.h: conversations to prompts, sampled tokens to messages, in harmony, the format of gpt-oss
 * (github.com/openai/harmony, docs/format.md). A model whose tokenizer lacks harmony's control tokens has no chat
 * format here and is continued raw. */
#ifndef CHAT_H
#define CHAT_H

#include "tokenizer.h"

typedef struct { /* the control tokens, and what ends a prompt */
    const Tokenizer *tokenizer;
    int start, end, message, channel, constrain, call, done, endoftext; /* done: <|return|> */
    Ids answer;                                                         /* <|start|>assistant */
} Chat;
/* False if the tokenizer has no harmony. */
bool chat_open(Chat *chat, const Tokenizer *t);
void chat_close(Chat *chat);

typedef struct {
    char *role;           /* system, developer, user, assistant or tool */
    char *name;           /* author of a tool's message as its header says it, "functions.f"; else NULL */
    char *channel;        /* analysis, commentary, final; or NULL */
    char *recipient;      /* functions.f, assistant, ...; or NULL */
    char *content_type;   /* json, <|constrain|>json; or NULL */
    bool recipient_first; /* it stands before the channel */
    Bytes content;
    Ids sampled; /* a message of the model: its tokens from <|start|> on, to be replayed exactly; may be empty */
} Message;

typedef struct {
    bool bare; /* no system message: the conversation is only what stands in `message` */
    char *identity, *cutoff, *date, *effort, *channels; /* of the system message; date NULL: no such line */
    char *instructions;                                 /* of the developer message, or NULL */
    cJSON *tools;                                       /* array of {name, description, parameters}, or NULL */
    cJSON *response_format;                             /* {name, description, schema}, or NULL */
    bool keep_analysis;                                 /* also of turns that have ended */
    Message *message;
    int messages;
} Conversation;

/* The defaults: identity ChatGPT, cutoff 2024-06, effort medium, all channels, today's date. */
void conversation_init(Conversation *c);
void conversation_free(Conversation *c);
/* Replaces one of its texts; NULL takes it away. */
void conversation_set(char **text, const char *to);
/* Appends a message and returns it; valid until the next is added. channel may be NULL. */
Message *conversation_add(Conversation *c, const char *role, const char *channel, const char *content, size_t n);
void conversation_remove(Conversation *c, int from, int n); /* forgets n messages */
bool effort_known(const char *effort);                      /* low, medium or high */
/* Takes messages, tools, response_format, reasoning_effort and date from JSON in the shape of chat completions; a
 * message may also have harmony's channel, recipient and content_type, and the object model_identity, knowledge_cutoff,
 * channels, bare and keep_analysis. USAGE with the field that is wrong. */
bool conversation_parse(Conversation *c, const Chat *chat, const cJSON *json, Error *e);

/* Append a message, a whole conversation, as JSON in the shape that conversation_parse takes. The conversation comes
 * back as it was: also how each header was written, and the tokens that a message was sampled as. */
void message_json(const Message *m, Bytes *out);
void conversation_json(const Conversation *c, Bytes *out);
/* Appends the conversation as tokens; with `prompt` it ends in <|start|>assistant, where the model goes on. Reasoning
 * of turns that ended in a final answer is left out. Only the renderer writes control tokens: names that could pass for
 * a header are refused (USAGE). */
bool chat_render(const Chat *chat, const Conversation *c, bool prompt, Ids *out, Error *e);

typedef enum { REASONING, PREAMBLE, ANSWER, CALL } Part;
Part message_part(const Message *m);

/* Reads what the model writes, token by token, and never gives up: a malformed header is read as the nearest legal one
 * and counted. Begin with reader_init, push every sampled token, end with reader_end. */
typedef struct {
    const Chat *chat;
    Message now;              /* being read */
    bool in_content, started; /* behind <|message|>; its header began with <|start|> */
    Bytes header;             /* text before <|message|>; the bytes 1 and 2 stand for <|channel|> and <|constrain|> */
    Decoder decoder;
    Message *message; /* those that are complete; take them with reader_take */
    int messages;
    bool between; /* behind the end of a message: <|start|> should follow */
    int repairs;
} Reader;

typedef struct {
    bool stop;   /* sampling should end */
    bool closed; /* the last of reader.message was completed by this token */
    Part part;   /* of the message that `text` belongs to */
} Read;

void reader_init(Reader *r, const Chat *chat);
/* Appends to `text` what can be shown of the message's content. */
Read reader_push(Reader *r, int token, Bytes *text);
/* The stream has ended, perhaps inside a message, which is then completed without its end. Returns as reader_push. */
Read reader_end(Reader *r, Bytes *text);
/* Moves the messages read so far to the conversation. What the model wrote in the name of the user, the system or the
 * developer is its own there. */
void reader_take(Reader *r, Conversation *c);
void reader_free(Reader *r);

#endif
