/* terminal.h: what tests of this room use. */
#ifndef TERMINAL_H
#define TERMINAL_H

#include "host.h"

/* The conversation as a chat-completions request, as conversation_parse() reads it. */
cJSON *conversation_json(const Conversation *c);

#endif
