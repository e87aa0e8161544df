/* bench.h: the command `infer bench`. */
#ifndef BENCH_H
#define BENCH_H

#include "infer.h"

extern const char bench_help[];
int bench(int argc, char **argv, const Backend *backend); /* returns the exit code */

#endif
