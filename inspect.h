/* inspect.h: commands about models and this machine: list, rm, inspect, doctor. None of them runs a model. */
#ifndef INSPECT_H
#define INSPECT_H

#include "infer.h"

extern const char list_help[], rm_help[], inspect_help[], doctor_help[];
int list(int argc, char **argv);
int rm(int argc, char **argv);
int inspect(int argc, char **argv, const Backend *backend);
int doctor(int argc, char **argv, const Backend *backend);

#endif
