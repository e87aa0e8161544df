/* answers.h: how models write thoughts and calls. answers.c reads them. */
#ifndef ANSWERS_H
#define ANSWERS_H

#include "../chat.h"

enum { OPEN_THINK, CLOSE_THINK, OPEN_CALL, CLOSE_CALL, PYTHON_TAG, OPEN_CALLS, END }; /* in Chat.control */
extern const char *const answer_marks[CONTROLS];

typedef struct { /* Chat.answers */
    bool thoughts;
    bool alone, list; /* calls without marks; in one list. Neither: each in <tool_call> */
} Answers;

Read answers_read(Reader *r, int token, int which); /* see Format.read */

Bytes text_trim(Bytes text); /* without white space at both ends; not a copy */
/* Writes JSON as Python does: a space after each comma and colon, or with an indent one item a line. */
void put_spaced(Bytes *out, const cJSON *value, int indent, int depth);
/* Cuts the text at the first `mark`: what precedes that is returned, what follows stays. False: there is none. */
bool cut_at(Bytes *text, const char *mark, Bytes *before);

#endif
