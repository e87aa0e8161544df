/* answers.h: how models write thoughts and calls. answers.c reads them. */
#ifndef ANSWERS_H
#define ANSWERS_H

#include "../chat.h"

enum { OPEN_THINK, CLOSE_THINK, OPEN_CALLS, CLOSE_CALLS, ANSWER_ENDS }; /* in Chat.control */

/* Chooses how a model's answers are read, by what its template writes: sets thoughts, calls, control, tools, thinks,
 * quiet. */
void answers_open(Chat *chat);
/* The same by the name of a row of calls, and by what opens a thought; NULL: none. */
void answers_use(Chat *chat, const char *calls, const char *open);
Read answers_read(Reader *r, int token, int which); /* see Format.read */
bool answers_force(const Chat *chat, const char *effort, const char *name, Marked *out,
                   Error *e); /* see Format.force */

#endif
