/* extensions.c: the tables of rooms. A room is a folder that adds something to the core; its rows stand here. The build
 * defines ROOM_NAME for each room that is there (Makefile, ROOMS). */
#include "chat.h"
#include "infer.h"
#ifdef ROOM_encodings
#include "encodings/types.h"
#endif

const TypeInfo types[] = {
    {"BF16", "BF16", 1, 2, 16, 0},
    {"F16", "F16", 1, 2, 16, 0},
    {"F32", "F32", 1, 4, 32, 0},
    {"MXFP4", "U8", 32, 16, 4, 0},
    {"E8M0", "F8_E8M0", 1, 1, 8, 0},
#ifdef ROOM_encodings
    ENCODING_TYPES,
#endif
};
_Static_assert(sizeof types / sizeof *types <= MAX_TYPES, "MAX_TYPES");
const int types_n = sizeof types / sizeof *types;

extern const Format templates;
const Format *const formats[] = {&harmony,
#ifdef ROOM_formats
                                 &templates,
#endif
                                 NULL};
