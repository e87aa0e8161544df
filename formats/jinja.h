/* jinja.h: the Jinja of chat templates, as transformers sets jinja2 up (trim_blocks, lstrip_blocks, loop controls,
 * generation blocks, an immutable sandbox, tojson, raise_exception, strftime_now). A template is parsed once and
 * rendered for each prompt; each byte of the result knows whether the template wrote it. */
#ifndef JINJA_H
#define JINJA_H

#include "../base.h"

#include <time.h>

typedef struct Jinja Jinja;
enum { JINJA_STEPS = 50000000 }; /* that any rendering may take */
/* NULL: BAD_MODEL with the line and what is wrong there. */
Jinja *jinja_parse(const char *source, size_t n, Error *e);
void jinja_free(Jinja *t); /* or NULL */
/* Appends what the template writes. own: variables that count as the template's, such as bos_token; given: variables
 * from outside (both objects, or NULL); under the key "role" the words system, developer, user, assistant and tool
 * count as the template's, too. now: for strftime_now, which is undefined without it. USAGE, and `out` as before: the
 * template raised an exception, had an error, or took more than `steps` or too many bytes; the text names the line. */
bool jinja_render(const Jinja *t, int64_t steps, const cJSON *own, const cJSON *given, const struct tm *now,
                  Marked *out, Error *e);
bool is_space(int32_t c); /* white space as Python's str.strip() defines it */

#endif
