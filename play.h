/* play.h: talking to a model, once or in a loop. */
#ifndef PLAY_H
#define PLAY_H

#include "model.h"

/* infer play [MODEL] [options]; returns the exit code. */
int play(int argc, char **argv, const Backend *backend);
extern const char play_help[];

#endif
