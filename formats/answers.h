/* answers.h: how models write thoughts and calls. answers.c reads them. */
#ifndef ANSWERS_H
#define ANSWERS_H

#include "../chat.h"

enum { OPEN_THINK, CLOSE_THINK, OPEN_CALLS, CLOSE_CALLS, ANSWER_ENDS }; /* in Chat.control */

/* Chooses by the name of a row of calls, and by what opens a thought. NULL: none. */
void answers_use(Chat *chat, const char *calls, const char *open);
Read answers_read(Reader *r, int token, int which);                                               /* see Format.read */
bool answers_force(const Chat *chat, const char *effort, const char *name, Bytes *out, Error *e); /* see Format.force */

Bytes text_trim(Bytes text); /* without white space at both ends; not a copy */
/* Writes JSON as Python does: a space after each comma and colon, or with an indent one item a line. */
void put_spaced(Bytes *out, const cJSON *value, int indent, int depth);
/* Cuts the text at the first `mark`: what precedes that is returned, what follows stays. False: there is none. */
bool cut_at(Bytes *text, const char *mark, Bytes *before);

#endif
