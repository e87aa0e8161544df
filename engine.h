/* engine.h: the engine, declared in host.h. */
#include "host.h"
