/* editor.h: reading lines from the terminal, with editing and a history that outlives the program. */
#ifndef EDITOR_H
#define EDITOR_H

#include "base.h"

typedef struct Editor Editor;
Editor *editor_open(void);
void editor_close(Editor *ed);

/* Appends one line without its newline, nothing if Ctrl+C cleared it. False at the end of input. SIGINT waits until it
 * returns. */
bool editor_line(Editor *ed, const char *prompt, Bytes *out);
/* Appends what the user says: a line, which joins the history, or several between triple quotes. */
bool editor_text(Editor *ed, Bytes *out);

/* While an answer is written: what is typed waits for the next line and is not shown in between. */
void editor_echo(bool on);

#endif
