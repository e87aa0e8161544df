/* safetensors.h: safetensors, declared in host.h. */
#include "host.h"
