/* model.h: models on disk, declared in host.h. */
#include "host.h"
