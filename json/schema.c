/* schema.c: grammars of JSON Schema (json-schema.org, draft 2020-12). What is not held to is refused, with keyword and
 * place. The texts are a part of those that satisfy the schema: properties come in its order, there are no others
 * unless additionalProperties says so, and white space is at most one space behind `:` and `,`. Keywords that say
 * nothing about values (title, default, ...) and unknown ones change nothing.
 *
 * Arguments of calls may be written in another form than JSON. In that of XML a text is written as it is, without
 * quotes and escapes, and other values as JSON. Gemma has marks in place of quotes, and keys without them, in all
 * values.
 *
 * A value is always asked to satisfy several schemas at once: those of allOf, what $ref means, and the words beside
 * them. Each keyword is then read from all of them, so nothing has to be merged. */
#include "json.h"

#include <curl/curl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEPTH = 100, MOST_CASES = 500, MOST_SCHEMAS = 64, MOST_NAMES = 4096 };
enum { NIL = 1, BOOLEAN = 2, INTEGER = 4, FRACTION = 8, STRING = 16, ARRAY = 32, OBJECT = 64, ALL = 127 }; /* types */
static const char *const type_names[] = {"null", "boolean", "integer", "number", "string", "array", "object"};

/* The type that a schema without `type` has because of a keyword. */
static const struct {
    int type;
    const char *keywords;
} about[] = {{OBJECT, "properties required additionalProperties"},
             {ARRAY, "items prefixItems minItems maxItems"},
             {STRING, "minLength maxLength pattern format"},
             {INTEGER | FRACTION, "minimum maximum exclusiveMinimum exclusiveMaximum"}};
/* What the values of keywords must be, of cJSON's types. Others are looked at where they are read. */
static const struct {
    int type;
    const char *otherwise, *keywords;
} kinds[] = {{cJSON_Object, "is not an object", "properties"},
             {cJSON_Array, "is not an array", "required prefixItems allOf"},
             {cJSON_String, "is not a text", "pattern format $ref"},
             {cJSON_Number, "is not a number", "minimum maximum"},
             {cJSON_Number | cJSON_True | cJSON_False, "is not a number", "exclusiveMinimum exclusiveMaximum"},
             {cJSON_True | cJSON_False, "is not true or false", "nullable"}};
static const char refused[] =
    "not if then else patternProperties multipleOf uniqueItems minProperties maxProperties propertyNames contains "
    "minContains maxContains dependentRequired dependentSchemas dependencies unevaluatedProperties unevaluatedItems "
    "additionalItems $dynamicRef $recursiveRef";
static const char harmless[] = "uniqueItems minProperties unevaluatedProperties minContains"; /* if false or 0 */

#define DATE                                                                                                           \
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])" \
    "))"
#define TIME  "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
#define BYTE  "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])"
#define LABEL "[a-z0-9]+(-[a-z0-9]+)*"
static const char *const formats_of[][2] = {/* RFC 3339, 4122, 5321, 2673; 29 February is left out */
                                            {"date", DATE},
                                            {"time", TIME},
                                            {"date-time", DATE "T" TIME},
                                            {"uuid", "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"},
                                            {"email",
                                             "[a-zA-Z0-9_+-]+(\\.[a-zA-Z0-9_+-]+)*@(" LABEL "\\.)+[a-z]{2,20}"},
                                            {"ipv4", "(" BYTE "\\.){3}" BYTE}};

typedef struct {
    Grammar *g;
    const cJSON *root;
    const char *name;
    Error *e;
    Map overlaps; /* from the address of a schema to a node: what is in several cases of its oneOf */
    int depth;
    int serial; /* of this schema in the grammar: begins the keys of its REFs */
    Form json;
    const Form *form; /* of a call, or NULL */
    enum { JSON, PLAIN /* texts have no quotes but the form's, keys none */, ARGUMENTS /* the arguments of one */ } how;
} Compiler;

/* Schemas that a value must satisfy, all of them. done: bit k says that a case or value of words[k] was chosen;
 * OPENED, that its $ref and allOf were added. */
static const char *const words[] = {"anyOf", "oneOf", "const", "enum"};
enum { WORDS = 4, OPENED = 1 << WORDS };
typedef struct {
    int n, without; /* types that it must not have */
    struct {
        const cJSON *schema;
        int done;
    } of[MOST_SCHEMAS];
} All;

static int value_of(Compiler *c, All *all);
static int any_value(Compiler *c);

/* Appends the JSON pointer of a value in another one. */
static bool find_place(const cJSON *in, const cJSON *value, Bytes *out) {
    const size_t before = out->n;
    const cJSON *each;
    int i = 0;
    if (in == value) return true;
    cJSON_ArrayForEach(each, in) {
        out->n = before;
        each->string ? bytes_print(out, "/%s", each->string) : bytes_print(out, "/%d", i++);
        if (find_place(each, value, out)) return true;
    }
    return false;
}

static int refuse(Compiler *c, const cJSON *schema, const char *key, const char *why) {
    LocalBytes place = {0};
    if (c->e->code) return NEVER;
    bytes_text(&place, "#");
    find_place(c->root, schema, &place);
    fail(c->e, USAGE, "%s: %.60s at %.200s %s", c->name, key, place.data, why);
    return NEVER;
}

/* Adds a schema, unless it is NULL. False: it is there already. */
static bool add_schema(Compiler *c, All *all, const cJSON *schema) {
    for (int i = 0; i < all->n; i++)
        if (all->of[i].schema == schema && !(all->of[i].done & ~OPENED)) return false;
    if (!schema || cJSON_IsTrue(schema)) return true;
    if (all->n == MOST_SCHEMAS) return refuse(c, schema, "the schema", "is together with too many others");
    all->of[all->n].schema = schema;
    all->of[all->n++].done = 0;
    return true;
}

static const cJSON *member(const cJSON *object, const char *key) { /* null is a value, too */
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

static const cJSON *word_of(const cJSON *schema, int word) {
    return same(words[word], "const") ? member(schema, "const") : json_get(schema, words[word]);
}

/* ---- references ---- */

/* The schema that a $ref means: a JSON pointer (RFC 6901) into this schema. */
static const cJSON *resolve(Compiler *c, const cJSON *schema) {
    const char *ref = json_string(schema, "$ref");
    const cJSON *to = c->root;
    int index;
    if (!ref || *ref != '#' || (ref[1] && ref[1] != '/'))
        return refuse(c, schema, "$ref", "must begin with #/: other documents and anchors are not supported"), NULL;
    char *path = curl_easy_unescape(NULL, ref + 1, 0, NULL), *rest = path, *name = strsep(&rest, "/");
    while (to && (name = strsep(&rest, "/"))) {
        char *end = name;
        for (const char *s = name; *s; s++) {
            const bool escaped = *s == '~' && s[1];
            s += escaped;
            *end++ = !escaped ? *s : *s == '1' ? '/' : '~';
        }
        *end = 0;
        c->g->work += cJSON_GetArraySize(to) / 4; /* it is searched from the front */
        if (cJSON_IsArray(to))
            to = text_whole(name, 0, INT32_MAX, &index) ? cJSON_GetArrayItem(to, index) : NULL;
        else
            to = member(to, name);
    }
    curl_free(path);
    if (!to) refuse(c, schema, "$ref", "leads nowhere");
    return to;
}

/* ---- literals, numbers, strings ---- */

static void write_literal(const Compiler *c, const cJSON *value, Bytes *out) {
    if (c->how == JSON || !cJSON_IsString(value)) {
        json_written(out, value);
    } else {
        bytes_add(out, c->form->open.data, c->form->open.n);
        bytes_text(out, value->valuestring);
        bytes_add(out, c->form->close.data, c->form->close.n);
    }
}

static int key_node(Compiler *c, const char *name, bool quotes) {
    LocalJson word = json_word(name);
    LocalText text = json_text(word);
    if (c->how != JSON) return text_node(c->g, name, strlen(name));
    return quotes ? text_node(c->g, text, strlen(text)) : text_node(c->g, text + 1, strlen(text) - 2);
}

static int literal(Compiler *c, const cJSON *value) {
    const bool object = cJSON_IsObject(value);
    const cJSON *each;
    if (!object && !cJSON_IsArray(value)) {
        LocalBytes text = {0};
        write_literal(c, value, &text);
        return text_node(c->g, text.data, text.n);
    }
    int node = rule_node(c->g, object ? "\\{" : "\\[");
    cJSON_ArrayForEach(each, value) {
        const int given = literal(c, each);
        const int item = object ? rule_node(c->g, "%: ?%", key_node(c, each->string, true), given) : given;
        node = rule_node(c->g, each == value->child ? "%%" : "%, ?%", node, item);
    }
    return rule_node(c->g, object ? "%\\}" : "%\\]", node);
}

/* Has some text in a value what none may have? */
static bool has_mark(Compiler *c, const cJSON *value) {
    const char *text = cJSON_GetStringValue(value);
    bool has = text && ends(c->g, state_run(c->g, c->form->stop, text, strlen(text)));
    const cJSON *each;
    cJSON_ArrayForEach(each, value) has |= has_mark(c, each);
    return has;
}

/* The values of enum or const of schema i that satisfy everything else. */
static int literals(Compiler *c, const All *all, int i, int word) {
    const cJSON *given = word_of(all->of[i].schema, word), *each;
    const bool list = same(words[word], "enum");
    All rest = *all;
    LocalIds cases = {0};
    rest.of[i].done |= 1 << word;
    const int node = value_of(c, &rest);
    if (list && (!cJSON_IsArray(given) || cJSON_GetArraySize(given) > MOST_NAMES))
        return refuse(c, all->of[i].schema, "enum", "is not an array of at most 4,096 values");
    for (each = list ? given->child : given; each; each = list ? each->next : NULL) {
        LocalText text = json_text(each);
        LocalBytes written = {0}; /* 1.0 is an integer, too, and a double does not hold all of them */
        write_literal(c, each, &written);
        if (c->how == PLAIN && !c->form->close.n && !cJSON_IsString(each)) continue; /* it would be read as a text */
        if (c->how == PLAIN && has_mark(c, each)) continue;
        const bool fits = node == any_value(c) || ends(c->g, state_run(c->g, node, written.data, written.n)) ||
                          (c->how == JSON && ends(c->g, state_run(c->g, node, text, strlen(text))));
        if (fits) ids_add(&cases, literal(c, each));
    }
    if (c->g->early)
        return refuse(c, all->of[i].schema, words[word], "of a schema that it is part of is not supported");
    return alt_node(c->g, cases.data, cases.n);
}

/* Numbers without sign that are above or below one that is written so, or, unless `strict`, equal. What is no number
 * may match, too. */
static int size_node(Grammar *g, const char *bound, bool above, bool strict, bool whole) {
    const int n = (int)strcspn(bound, "."), all = (int)strlen(bound), digit = rule_node(g, "[0-9]");
    const int any = repeat_node(g, digit, 0, ENDLESS), rest = rule_node(g, whole ? "" : "(\\.%%)?", digit, any);
    const int point = rule_node(g, bound[n] ? "" : "\\."),
              other = repeat_node(g, digit, above ? n + 1 : 0, above ? ENDLESS : n - 1);
    int node = rule_node(g, strict ? "%" : whole ? "%|" : "%|(%0+)?", NEVER, point);
    if (above && !whole) node = rule_node(g, "%|%%[1-9]%", node, point, any, any);
    for (int i = all; i-- > 0;) { /* what may follow i characters that are the same */
        const int from = above ? bound[i] + 1 : '0', to = above ? '9' : bound[i] - 1;
        const int then = i < n ? seq_node(g, repeat_node(g, digit, n - 1 - i, n - 1 - i), rest) : any;
        LocalText differs = text_print("%%%%|[%c-%c]%%", from, to);
        node = rule_node(g, i != n && from <= to ? differs : "%%", text_node(g, bound + i, 1), node, then);
        if (i >= n && i != n + 1 && !above) node = rule_node(g, "%?", node); /* it may end here */
    }
    return rule_node(g, "%|%%", node, other, rest);
}

/* The same for a bound that may have a sign, and all of the other sign that are on its side. -0 is 0. */
static int bound_node(Grammar *g, double x, bool above, bool strict, bool whole) {
    const bool negative = x < 0, both = x == 0 || above == negative;
    LocalText bound = text_print("0");
    for (int places = 0; strtod(bound, NULL) != fabs(x); places++) {
        free(bound);
        bound = text_print("%.*f", places, fabs(x));
    }
    const int own = size_node(g, bound, above != negative, strict, whole);
    const int other = x == 0 ? size_node(g, bound, !above, strict, whole) : rule_node(g, "[0-9.]*");
    return rule_node(g, negative ? (both ? "-%|%" : "-%") : both ? "%|-%" : "%", own, other);
}

/* With at most 40 digits in front of the point and behind it: a small model may find no end of them. */
static int number(Compiler *c, const All *all, bool whole) {
    static const char *const keys[] = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"};
    int node = c->g->all;
    for (int i = 0; i < 4 * all->n; i++) {
        const cJSON *schema = all->of[i / 4].schema, *value = json_get(schema, keys[i % 4]);
        const bool above = i % 4 < 2;
        bool strict = i % 2 || json_true(schema, keys[i % 4 | 1]); /* true: as draft 4 had it */
        double x = cJSON_GetNumberValue(value);
        if (i % 2 && cJSON_IsTrue(value) && !json_get(schema, keys[i % 4 - 1]))
            return refuse(c, schema, keys[i % 4], "is true without a limit beside it");
        if (!cJSON_IsNumber(value)) continue;
        if (!isfinite(x)) return refuse(c, schema, keys[i % 4], "is too large");
        if (whole) {
            const double to = above ? ceil(x) : floor(x);
            strict = strict && to == x;
            x = to;
        }
        node = both_node(c->g, node, bound_node(c->g, x, above, strict, whole));
    }
    const int digits = rule_node(c->g, "-?(0|[1-9][0-9]{0,39})"),
              fraction = rule_node(c->g, "%(\\.[0-9]{1,40})?", digits);
    if (node != c->g->all || whole) return both_node(c->g, node, whole ? digits : fraction);
    return rule_node(c->g, "%([eE][+-]?([0-9]{1,2}|[12][0-9][0-9]))?", fraction);
}

/* The largest of the least, and the smallest of the most. */
static void counts(Compiler *c, const All *all, const char *low, const char *high, int *least, int *most) {
    *least = 0, *most = INT32_MAX;
    for (int i = 0; i < 2 * all->n; i++) {
        const cJSON *schema = all->of[i / 2].schema, *value = json_get(schema, i % 2 ? high : low);
        int64_t n = 0;
        if (!value) continue;
        if (!json_whole(value, 0, INT32_MAX, &n)) refuse(c, schema, i % 2 ? high : low, "is not a whole number");
        if (i % 2 && n < *most) *most = (int)n;
        if (i % 2 == 0 && n > *least) *least = (int)n;
    }
}

static int format_node(Grammar *g, const char *name) {
    for (size_t i = 0; i < sizeof formats_of / sizeof *formats_of; i++)
        if (!strcmp(formats_of[i][0], name)) return rule_node(g, formats_of[i][1]);
    return NEVER;
}

static int string(Compiler *c, const All *all) {
    Grammar *g = c->g;
    const bool plain = c->how != JSON;
    const int letter = plain ? rule_node(g, "[^\\x00]") : g->letter;
    int least, most, node = g->all;
    counts(c, all, "minLength", "maxLength", &least, &most);
    if (plain || least || most < INT32_MAX) node = repeat_node(g, letter, least, most < INT32_MAX ? most : ENDLESS);
    if (plain) node = but_node(g, node, c->form->stop);
    for (int i = 0; i < all->n; i++) {
        const cJSON *schema = all->of[i].schema, *pattern = json_get(schema, "pattern");
        const char *format = json_string(schema, "format");
        LocalBytes why = {0};
        if (pattern) node = both_node(g, node, pattern_node(g, pattern->valuestring, letter, &why));
        if (why.n) return refuse(c, schema, "pattern", why.data);
        if (format && format_node(g, format) == NEVER) return refuse(c, schema, "format", "is of an unknown kind");
        if (format) node = both_node(g, node, format_node(g, format));
    }
    if (node == g->all) node = repeat_node(g, g->letter, 0, ENDLESS);
    if (!plain) return rule_node(g, "\"%\"", node);
    const Bytes open = c->form->open, close = c->form->close;
    return rule_node(g, "%%%", text_node(g, open.data, open.n), node, text_node(g, close.data, close.n));
}

/* ---- objects and arrays ---- */

/* What stands behind the key of an argument. In XML `5` may be a text or a number. So beside texts only null is
 * allowed, or whole types without limits. */
static int argument(Compiler *c, All *values) {
    static const int without[] = {ALL & ~STRING, ALL & ~NIL, STRING | NIL};
    const Form *f = c->form;
    const bool texts = f->stop != NEVER, apart = texts && !f->close.n;
    int part[3] = {NEVER, NEVER, NEVER}; /* texts, null, others */
    for (int i = 0; i < 3 && apart; i++) {
        All some = *values;
        some.without = without[i];
        c->how = i ? JSON : PLAIN;
        part[i] = value_of(c, &some);
    }
    bool told = part[0] == NEVER || part[2] == NEVER;
    for (int types = 0; types < ALL && !told; types++)
        told = part[2] == value_of(c, &(All){.without = (ALL & ~types) | without[2]});
    if (!told) refuse(c, values->of[0].schema, "type", "has texts and others with limits, which cannot be told apart");
    c->how = texts ? PLAIN : JSON;
    const int value = apart ? NEVER : value_of(c, values);
    c->how = ARGUMENTS;
    return apart ? rule_node(c->g, "%%|%(%|%)", f->equals[0], part[0], f->equals[1], part[1], part[2])
                 : rule_node(c->g, "%%", f->equals[1], value);
}

/* What the schemas make of what stands behind the key of a member; name: NULL: of one that they do not name. next: of
 * each schema the property that is likely to have that name. */
static int member_value(Compiler *c, const All *all, const char *name, const cJSON **next) {
    All values = {0};
    for (int i = 0; i < all->n; i++) {
        const cJSON *schema = all->of[i].schema, *own = NULL;
        if (name)
            own = same(name, next[i] ? next[i]->string : NULL) ? next[i] : member(json_get(schema, "properties"), name);
        if (own) next[i] = own->next;
        add_schema(c, &values, own ? own : json_get(schema, "additionalProperties"));
    }
    return c->how == ARGUMENTS ? argument(c, &values) : rule_node(c->g, "%%", c->json.equals[1], value_of(c, &values));
}

/* A key, without quotes. In JSON it has no \uXXXX, so that each name has one form only. */
static int any_key(Compiler *c) {
    return c->how == JSON ? rule_node(c->g, "%*", c->g->plain) : rule_node(c->g, "[a-zA-Z0-9_\\x80-\\uffff.-]+");
}

/* Any member that has none of these names. */
static int other_member(Compiler *c, const All *all, const cJSON *names) {
    const cJSON *each;
    LocalIds known = {0};
    cJSON_ArrayForEach(each, names) ids_add(&known, key_node(c, each->string, false));
    const int name = but_node(c->g, any_key(c), alt_node(c->g, known.data, known.n));
    return rule_node(c->g, c->how == JSON ? "\"%\"%" : "%%", name, member_value(c, all, NULL, NULL));
}

/* The names of members in the order in which the schemas have them; true: it is required. */
static cJSON *names_of(Compiler *c, const All *all) {
    cJSON *names = cJSON_CreateObject();
    const cJSON *each;
    LOCAL(map_free) Map known = {0}; /* from a name's hash, or one behind it, to its address */
    int n = 0;
    for (int i = 0; i < 2 * all->n; i++) {
        const bool must = i >= all->n;
        const cJSON *schema = all->of[i % all->n].schema;
        cJSON_ArrayForEach(each, json_get(schema, must ? "required" : "properties")) {
            const char *name = must ? cJSON_GetStringValue(each) : each->string;
            if (!name) return refuse(c, schema, "required", "has more than names"), names;
            if (n > MOST_NAMES) return refuse(c, schema, "properties", "are more than 4,096"), names;
            uint64_t key = text_hash(HASH_OF_NONE, name, strlen(name));
            int64_t at;
            while ((at = map_get(&known, key)) >= 0 && strcmp(((cJSON *)at)->string, name)) key++;
            if (at < 0) at = (int64_t)cJSON_AddFalseToObject(names, name), map_put(&known, key, at), n++;
            ((cJSON *)at)->type = must ? cJSON_True : cJSON_False;
        }
    }
    return names;
}

/* Members in the order of the names. Built from the end: what may follow when the first i are done, written as the
 * first one and behind others. */
static int object(Compiler *c, const All *all) {
    Grammar *g = c->g;
    LocalJson names = names_of(c, all);
    LocalIds value = {0};
    const Form *f = c->how == ARGUMENTS ? c->form : &c->json;
    const cJSON *each, *next[MOST_SCHEMAS];
    bool open = true, given = false;
    for (int i = 0; i < all->n; i++) {
        const cJSON *schema = all->of[i].schema;
        open &= !json_get(schema, "properties") && !json_get(schema, "required") &&
                !json_get(schema, "unevaluatedProperties");
        given |= json_get(schema, "additionalProperties") != NULL;
        next[i] = json_get(schema, "properties") ? json_get(schema, "properties")->child : NULL;
    }
    cJSON_ArrayForEach(each, names) {
        ids_add(&value, member_value(c, all, each->string, next));
        if (cJSON_IsTrue(each) && value.data[value.n - 1] == NEVER) return NEVER;
    }
    const int other = open || given ? other_member(c, all, names) : NEVER;
    int behind = rule_node(g, "(%%)*%", f->next, other, f->end);
    int first = rule_node(g, "%|%%%", f->none, f->first, other, behind);
    each = names->child ? names->child->prev : NULL; /* the last one */
    for (size_t i = value.n; i-- > 0; each = each->prev) {
        const bool must = cJSON_IsTrue(each);
        const int key = key_node(c, each->string, true), own = rule_node(g, "%%%", key, value.data[i], behind);
        if (c->how != JSON && !ends(g, state_run(g, any_key(c), each->string, strlen(each->string))))
            return refuse(c, all->of[0].schema, each->string, "is a name that this model's calls cannot have");
        first = rule_node(g, must ? "%%" : "%%|%", f->first, own, first);
        behind = rule_node(g, must ? "%%" : "%%|%", f->next, own, behind);
    }
    return first;
}

/* Built from the end, too: what may follow i items. */
static int array(Compiler *c, const All *all) {
    Grammar *g = c->g;
    const cJSON *at[MOST_SCHEMAS];
    const int close = rule_node(g, "\\]");
    int least, most;
    bool more = true;
    LocalIds value = {0}; /* of each item that has a place of its own; of the others */
    counts(c, all, "minItems", "maxItems", &least, &most);
    for (int i = 0; i < all->n; i++) {
        const cJSON *schema = all->of[i].schema, *prefix = json_get(schema, "prefixItems");
        at[i] = prefix ? prefix->child : NULL;
        if (cJSON_IsArray(json_get(schema, "items")))
            return refuse(c, schema, "items", "is an array, which is not supported: use prefixItems");
    }
    while (more && !c->e->code) {
        All item = {0};
        more = false;
        for (int i = 0; i < all->n; i++) {
            add_schema(c, &item, at[i] ? at[i] : json_get(all->of[i].schema, "items"));
            more |= at[i] != NULL;
            at[i] = at[i] ? at[i]->next : NULL;
        }
        ids_add(&value, value_of(c, &item));
    }
    if (value.n == 1 && most) ids_add(&value, value.data[0]); /* the first has no comma */
    const int n = (int)value.n - 1, other = rule_node(g, ", ?%", n < 0 ? NEVER : value.data[n]);
    const int others = most == INT32_MAX ? ENDLESS : most > n ? most - n : 0;
    int node = seq_node(g, repeat_node(g, other, least > n ? least - n : 0, others), close);
    for (int i = n; i-- > 0;) {
        const int item = i < most ? rule_node(g, i ? ", ?%%" : "%%", value.data[i], node) : NEVER;
        node = rule_node(g, "%|%", i >= least ? close : NEVER, item);
    }
    return rule_node(g, "\\[%", node);
}

/* ---- values ---- */

/* What the schema's `type` allows. */
static int declared_types(Compiler *c, const cJSON *schema) {
    const cJSON *type = json_get(schema, "type"), *each = cJSON_IsArray(type) ? type->child : type;
    int types = type ? 0 : ALL;
    for (; each; each = cJSON_IsArray(type) ? each->next : NULL) {
        LocalText shown = json_text(each);
        LocalText why = text_print("is %.50s, which is no type of JSON", shown);
        int i = 0;
        while (i < 7 && !same(type_names[i], cJSON_GetStringValue(each))) i++;
        if (i == 7) return refuse(c, schema, "type", why);
        types |= i == 3 ? INTEGER | FRACTION : 1 << i;
    }
    return types | (json_true(schema, "nullable") ? NIL : 0);
}

/* Values of the types that the schemas allow, or of those that their keywords are about. */
static int typed(Compiler *c, const All *all) {
    int types = ALL, told = 0, declared = 0;
    const cJSON *each;
    for (int i = 0; i < all->n; i++) {
        types &= declared_types(c, all->of[i].schema);
        declared += json_get(all->of[i].schema, "type") != NULL;
        cJSON_ArrayForEach(each, all->of[i].schema) {
            for (int k = 0; k < 4; k++) told |= text_listed(about[k].keywords, each->string) ? about[k].type : 0;
        }
    }
    if (types == ALL && !told && !all->without) return any_value(c);
    if (!declared && told) types = told;
    types &= ~all->without;
    const int cases[] = {types & NIL ? rule_node(c->g, c->form ? "null|None" : "null") : NEVER,
                         types & BOOLEAN ? rule_node(c->g, c->form ? "true|false|True|False" : "true|false") : NEVER,
                         types & (INTEGER | FRACTION) ? number(c, all, !(types & FRACTION)) : NEVER,
                         types & STRING ? string(c, all) : NEVER,
                         types & ARRAY ? array(c, all) : NEVER,
                         types & OBJECT ? object(c, all) : NEVER};
    return alt_node(c->g, cases, 6);
}

/* anyOf or oneOf of schema i. Cases of oneOf must be apart, else a text of one could satisfy another, too. */
static int cases_of(Compiler *c, const All *all, int i, int word) {
    const cJSON *schema = all->of[i].schema, *list = word_of(schema, word), *each, *other;
    LocalIds cases = {0}, overlaps = {0};
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > MOST_CASES)
        return refuse(c, schema, words[word], "is not an array of at most 500 schemas");
    cJSON_ArrayForEach(each, list) {
        All rest = *all;
        rest.of[i].done |= 1 << word;
        const bool fresh = add_schema(c, &rest, each); /* else it leads back to itself */
        ids_add(&cases, fresh ? value_of(c, &rest) : NEVER);
        for (other = list->child; other != each && *words[word] == 'o' && !c->e->code; other = other->next) {
            All two = rest;
            add_schema(c, &two, other);
            ids_add(&overlaps, value_of(c, &two));
        }
    }
    const int64_t before = map_get(&c->overlaps, (uintptr_t)schema);
    if (before >= 0) ids_add(&overlaps, (int)before);
    if (overlaps.n) map_put(&c->overlaps, (uintptr_t)schema, alt_node(c->g, overlaps.data, overlaps.n));
    return alt_node(c->g, cases.data, cases.n);
}

static int chosen(Compiler *c, const All *all) {
    for (int word = 0; word < WORDS; word++)
        for (int i = 0; i < all->n; i++) {
            if (all->of[i].done & 1 << word || !word_of(all->of[i].schema, word)) continue;
            if (c->how == ARGUMENTS)
                return refuse(c, all->of[i].schema, words[word], "of whole arguments is not supported");
            return word < 2 ? cases_of(c, all, i, word) : literals(c, all, i, word);
        }
    return typed(c, all);
}

/* Adds what schema i refers to, and its parts. */
static void open_schema(Compiler *c, All *all, int i) {
    const cJSON *schema = all->of[i].schema, *each;
    cJSON_ArrayForEach(each, schema) {
        const bool off = cJSON_IsFalse(each) || (cJSON_IsNumber(each) && each->valuedouble == 0);
        if (text_listed(refused, each->string) && !(off && text_listed(harmless, each->string)))
            refuse(c, schema, each->string, "is not supported");
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds && !cJSON_IsNull(each); k++)
            if (text_listed(kinds[k].keywords, each->string) && !(each->type & kinds[k].type))
                refuse(c, schema, each->string, kinds[k].otherwise);
    }
    if (json_get(schema, "$ref")) add_schema(c, all, resolve(c, schema));
    cJSON_ArrayForEach(each, json_get(schema, "allOf")) add_schema(c, all, each);
    all->of[i].done |= OPENED;
}

static int value_of(Compiler *c, All *all) {
    LocalIds key = {0};
    ids_append(&key, (const int[]){c->serial, (int)c->how, all->without}, 3);
    for (int i = 0; i < all->n && !c->e->code; i++) {
        const uintptr_t address = (uintptr_t)all->of[i].schema;
        if (cJSON_IsFalse(all->of[i].schema)) return NEVER;
        if (!cJSON_IsObject(all->of[i].schema)) return refuse(c, all->of[i].schema, "the value", "is no schema");
        if (!(all->of[i].done & OPENED)) open_schema(c, all, i);
        ids_append(&key, (const int[]){(int)(address >> 32), (int)address, all->of[i].done}, 3);
    }
    if (c->e->code) return NEVER;
    const int before = c->g->nodes, ref = ref_node(c->g, key.data, key.n);
    if (ref < before) return c->g->node[ref].target < 0 ? ref : c->g->node[ref].target;
    if (c->depth >= MOST_DEPTH) return refuse(c, all->of[0].schema, "the schema", "is nested too deep");
    c->g->work += 50 * all->n; /* they are read, and copied */
    if (gave_up(c->g)) return refuse(c, all->of[0].schema, "the schema", "is too large");
    c->depth++;
    const int node = chosen(c, all);
    c->depth--;
    return c->g->node[ref].target = node;
}

/* The node of every value. */
static int any_value(Compiler *c) {
    Grammar *g = c->g;
    const All all = {0};
    const int key[] = {(int)c->how, c->form != NULL}, before = g->nodes, ref = ref_node(g, key, 2);
    if (ref < before) return ref;
    const int value = rule_node(g, c->form ? "null|None|true|True|false|False|%|%|%|%" : "null|true|false|%|%|%|%",
                                number(c, &all, false), string(c, &all), array(c, &all), object(c, &all));
    g->node[ref].target = value;
    return ref;
}

int schema_node(Grammar *g, const cJSON *schema, const char *name, bool call, const Form *form, Error *e) {
    Compiler c = {.g = g, .root = schema, .name = name, .e = e, .serial = g->nodes, .form = form};
    All all = {.without = call ? ALL & ~OBJECT : 0};
    e->code = 0, g->early = false;
    make_letters(g);
    c.how = form ? ARGUMENTS : JSON;
    c.json = (Form){.first = rule_node(g, "\\{"),
                    .next = rule_node(g, ", ?"),
                    .end = rule_node(g, "\\}"),
                    .none = rule_node(g, "\\{\\}"),
                    .equals[1] = rule_node(g, ": ?")};
    add_schema(&c, &all, schema);
    const int node = value_of(&c, &all);
    if (gave_up(g)) refuse(&c, schema, "the schema", "has patterns or limits that take too long together");
    if (!e->code && !grammar_settle(g, node)) refuse(&c, schema, "the schema", "allows no value");
    for (size_t i = 0; i < c.overlaps.room; i++) {
        const MapSlot s = c.overlaps.slot[i];
        if (s.value < 0 || g->node[s.value].flags & BARREN) continue;
        refuse(&c, (const cJSON *)(uintptr_t)s.key, "oneOf", "has cases that may overlap: use anyOf");
    }
    map_free(&c.overlaps);
    return e->code ? NEVER : node;
}

int any_object_node(Grammar *g, const char *name, const Form *form, Error *e) {
    LocalJson object = json_object("type", json_word("object"), NULL);
    return schema_node(g, object, name, true, form, e);
}
