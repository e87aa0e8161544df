/* chat.h: conversations to prompts, sampled tokens to messages. The core has harmony, the format of gpt-oss
 * (github.com/openai/harmony, docs/format.md). Rooms add others through the socket at the end of this file. A model
 * without a known format is continued raw. */
#ifndef CHAT_H
#define CHAT_H

#include "tokenizer.h"

enum { CONTROLS = 8, STREAM_END = -2 /* no token has it; -1 would match a control token that the tokenizer lacks */ };
typedef struct Format Format;
typedef struct {
    const Tokenizer *tokenizer;
    const char *template;          /* the text of the chat template */
    const Format *format, *answer; /* of prompts, of answers: two if a given template writes harmony */
    int control[CONTROLS];         /* ids of answer->control, or -1 */
    const char *name;              /* of the format; Format.fits() sets this and the rest, or they are harmony's */
    bool tools, schemas;           /* a prompt can have tools; a response_format */
    bool thinks, quiet;            /* a prompt ends inside a thought; the effort may be none, and then it does not */
    void *own;                     /* what else the format needs; chat_close() frees it */
    /* How answers have thoughts and calls; NULL: none. The marks of a thought; a name, then those of calls, or NULL. */
    const char *const *thoughts, *const *calls;
} Chat;

/* The first of formats[] that fits and, if the user `gave` the template, reads templates. Tokenizer and template have
 * to stay. BAD_MODEL: none fits, or the template is broken. */
bool chat_open(Chat *chat, const Tokenizer *t, const char *template, bool gave, Error *e);
void chat_close(Chat *chat);
/* Checks an effort: low, medium, high and, where the model can skip thinking, none. USAGE. */
bool chat_effort(const Chat *chat, const char *effort, Error *e);
bool chat_word(const char *word); /* may it stand in a header, as the name of a function? */

typedef struct {
    union {
        struct {
            char *role;         /* system, developer, user, assistant or tool */
            char *id;           /* of a call and its result, if a client gave one; else NULL */
            char *name;         /* author of a tool's message, "functions.f"; else NULL */
            char *channel;      /* analysis (reasoning), commentary, final; or NULL */
            char *recipient;    /* "functions.f" in a call, "assistant" in its result; else NULL */
            char *content_type; /* json, <|constrain|>json; or NULL */
        };
        char *word[6]; /* the same */
    };
    Bytes content;
} Message;

typedef struct {
    char *effort, *date; /* date: NULL if there is none */
    char *instructions;  /* the first system text, or NULL; later ones are messages of the role developer */
    cJSON *request;      /* other keys of the JSON it came from, such as tools and response_format; or NULL */
    Message *message;
    int messages;
} Conversation;

void conversation_init(Conversation *c); /* empty, with effort medium and today's date */
void conversation_free(Conversation *c);
/* Replaces a text of a conversation or message by a copy of `to`, or by NULL. */
void conversation_set(char **text, const char *to);
/* Appends a message and returns it; valid until the next is added. channel may be NULL. */
Message *conversation_add(Conversation *c, const char *role, const char *channel, const char *content, size_t n);
void conversation_cut(Conversation *c, int keep); /* removes all messages but the first `keep` */
/* Reads a chat-completions request: messages, tools, response_format, any reasoning_effort, date. A message may have
 * harmony's channel, recipient and content_type; the request may have model_identity, knowledge_cutoff, channels, bare
 * (no system message) and keep_analysis (of turns that have ended). USAGE with the field that is wrong. */
bool conversation_parse(Conversation *c, const cJSON *json, Error *e);

cJSON *message_json(const Message *m); /* with harmony's keys */
/* Appends the conversation as tokens. With `prompt` it ends with the beginning of an answer, which in harmony is
 * <|start|>assistant. Harmony leaves out the reasoning of turns that ended in an answer; other formats do as their
 * templates do. Only the renderer writes control tokens. USAGE, and an unfinished prompt: a name could be read as part
 * of a header, or the format has no tools or does not take such turns. */
bool chat_render(const Chat *chat, const Conversation *c, bool prompt, Ids *out, Error *e);

/* Appends the beginning of a call to a prompt with tools: of function `name`, or of one that the model chooses if NULL.
 * It belongs to the answer, so push it to the reader first. */
bool chat_force(const Chat *chat, const char *effort, const char *name, Ids *out, Error *e);

typedef enum { REASONING, PREAMBLE, ANSWER, CALL, /* not the model's: */ USER, RESULT, SYSTEM } Part;
Part message_part(const Message *m); /* of a message that is the model's */

/* Reads what the model writes, token by token, and never fails. A malformed header is read as the nearest legal one and
 * counted as a repair; without its end, text in it is content. Only functions that the conversation declares are
 * called; what looks like a call of another is text. A message that the model writes in the name of somebody else ends
 * the answer. Call reader_init, then reader_push for every sampled token, then reader_end. */
typedef struct {
    const Chat *chat;
    Message now;              /* being read */
    bool started, in_content; /* its header began with <|start|>; behind <|message|>, or in a call */
    cJSON *tools;             /* whose functions may be called; NULL: any */
    Bytes pending;            /* text before <|message|>; in other formats white space or calls */
    size_t scanned;           /* bytes of `pending` that were looked at */
    size_t begun;             /* where a section of calls begins in it */
    Decoder decoder;
    Message *message; /* complete messages; take them with reader_take */
    int messages, repairs;
} Reader;

typedef struct {
    bool stop;   /* sampling should end */
    bool closed; /* this token completed the last of reader.message; at a stop an earlier token may have */
    bool header; /* what follows stands in a header */
    Part part;   /* of the message that `text` belongs to */
} Read;

/* c: the conversation to answer. Its effort tells whether the prompt ends inside a thought. NULL: an effort other than
 * none, and tools with any name. */
void reader_init(Reader *r, const Chat *chat, const Conversation *c);
/* Appends what the messages gain to `text`, unless that is NULL. A token adds text to one message at most. */
Read reader_push(Reader *r, int token, Bytes *text);
Read reader_end(Reader *r, Bytes *text);      /* ends the stream and completes a message that was cut off */
void reader_take(Reader *r, Conversation *c); /* moves the messages read so far to the conversation */
void reader_free(Reader *r);

/* ---- for formats ---- */

/* The socket. A prompt is a text that knows what is the template's; it becomes tokens when it is complete. Errors:
 * USAGE. */
struct Format {
    const char *name;           /* in the list of known ones */
    const char *const *control; /* (CONTROLS) names of the tokens that it reads, or NULL */
    const char *begun;          /* Reader.pending at first: what the prompt has of an answer's header */
    /* Does a model chat so? NULL: if it has all these tokens, whatever its template. BAD_MODEL: that is broken. */
    bool (*fits)(Chat *chat, Error *e);
    bool (*render)(const Chat *chat, const Conversation *c, bool prompt, Marked *out, Error *e);
    bool (*force)(const Chat *chat, const char *effort, const char *name, Marked *out, Error *e);
    Read (*read)(Reader *r, int token, int which); /* which: in `control`, or CONTROLS. Leaves out Read.part */
    void (*close)(Chat *chat);                     /* frees Chat.own; or NULL */
};
extern const Format harmony, *const formats[];          /* formats: in extensions.c; NULL ends them */
bool chat_thinks(const Chat *chat, const char *effort); /* does a prompt end inside a thought? effort: valid, or NULL */
/* Appends a piece of a prompt, or nothing for NULL. It counts as the template's, so that names of control tokens become
 * tokens. %p becomes `before`, % and another letter `text`, both from outside. The piece ends at one that is NULL. */
void chat_fill(Marked *out, const char *piece, const Bytes *before, const Bytes *text);
Part kind_of(const Message *m);               /* of any message */
Message call_of(const char *function);        /* its arguments are empty */
const cJSON *tools_of(const Conversation *c); /* an array of at least one, or NULL */
Message *message_new(Message **list, int *n); /* appends an empty one */
void reader_next(Reader *r, bool counts);     /* ends Reader.now, and drops it if it is empty and does not count */
/* May a function of this name be called? Sets *function, unless `function` is NULL, if its declaration is known. */
bool reader_declares(const Reader *r, const char *name, const cJSON **function);
Bytes bytes_of(const char *text); /* not a copy */

#endif
