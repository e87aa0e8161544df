/* schema.c: grammars of JSON Schema (json-schema.org, draft 2020-12). What is not held to is refused, with keyword and
 * place. The texts are a part of those that satisfy the schema: properties come in its order, there are no others
 * unless additionalProperties says so, and white space is at most one space behind `:` and `,`. Keywords that say
 * nothing about values (title, default, ...) and unknown ones change nothing. */
#include "json.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SCHEMAS = 50000, MOST_NODES = 200000, MOST_DEPTH = 100, MOST_CASES = 500, MOST_NAME = 1000 };
enum { NIL = 1, BOOLEAN = 2, INTEGER = 4, FRACTION = 8, STRING = 16, ARRAY = 32, OBJECT = 64, ALL = 127 }; /* types */
static const char *const type_names[] = {"null", "boolean", "integer", "number", "string", "array", "object"};

/* What is known of values, and the type that a schema without `type` has because of a keyword. */
static const struct {
    const char *key;
    int type;
} keywords[] = {{"type", 0},
                {"nullable", 0},
                {"enum", 0},
                {"const", 0},
                {"$ref", 0},
                {"allOf", 0},
                {"anyOf", 0},
                {"oneOf", 0},
                {"properties", OBJECT},
                {"required", OBJECT},
                {"additionalProperties", OBJECT},
                {"items", ARRAY},
                {"prefixItems", ARRAY},
                {"minItems", ARRAY},
                {"maxItems", ARRAY},
                {"minLength", STRING},
                {"maxLength", STRING},
                {"pattern", STRING},
                {"format", STRING},
                {"minimum", INTEGER | FRACTION},
                {"maximum", INTEGER | FRACTION},
                {"exclusiveMinimum", INTEGER | FRACTION},
                {"exclusiveMaximum", INTEGER | FRACTION}};
enum { KEYWORDS = sizeof keywords / sizeof *keywords };
static const char refused[] =
    "not if then else patternProperties multipleOf uniqueItems minProperties maxProperties propertyNames contains "
    "minContains maxContains dependentRequired dependentSchemas dependencies unevaluatedProperties unevaluatedItems "
    "additionalItems $dynamicRef $recursiveRef";

#define DATE                                                                                                           \
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])" \
    "))"
#define TIME  "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
#define BYTE  "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])"
#define LABEL "[a-z0-9]+(-[a-z0-9]+)*"
static const struct {
    const char *name, *pattern;
} formats_of[] = {/* RFC 3339, 4122, 5321, 2673; 29 February is left out */
                  {"date", DATE},
                  {"time", TIME},
                  {"date-time", DATE "T" TIME},
                  {"uuid", "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"},
                  {"email", "[a-zA-Z0-9_+-]+(\\.[a-zA-Z0-9_+-]+)*@(" LABEL "\\.)+[a-z]{2,20}"},
                  {"ipv4", "(" BYTE "\\.){3}" BYTE}};

typedef struct {
    Grammar *g;
    const cJSON *root;
    const char *name;
    Error *e;
    cJSON *made; /* an array of schemas that were combined */
    Map refs;    /* from a schema's address to its REF */
    Bytes place; /* JSON pointer of the schema being read */
    int values, depth;
    int comma, colon, string, any, any_object; /* nodes; any: of every value */
} Compiler;

static int value_of(Compiler *c, const cJSON *schema);

/* Notes what is wrong with a keyword in the schema being read. */
static int refuse(Compiler *c, const char *key, const char *why) {
    if (!c->e->code) fail(c->e, USAGE, "%s: %.60s at #%.200s %s", c->name, key, c->place.n ? c->place.data : "", why);
    return NEVER;
}

/* The value of a part of the schema being read, which is below it at KEY or KEY/PART. */
static int value_at(Compiler *c, const cJSON *schema, const char *key, const char *part) {
    const size_t before = c->place.n;
    bytes_print(&c->place, part ? "/%s/%s" : "/%s", key, part);
    const int node = value_of(c, schema);
    c->place.data[c->place.n = before] = 0;
    return node;
}

static int text_of(Compiler *c, const char *text) { return text_node(c->g, text, strlen(text)); }

/* ---- combining schemas ---- */

static bool constrains(const char *key) {
    for (int i = 0; i < KEYWORDS; i++)
        if (!strcmp(keywords[i].key, key)) return true;
    return false;
}

/* A schema without some keys, which combining made: freed at the end. */
static cJSON *copy_without(Compiler *c, const cJSON *schema, const char *keys) {
    cJSON *made = cJSON_CreateObject();
    const cJSON *each;
    cJSON_AddItemToArray(c->made, made);
    cJSON_ArrayForEach(each, schema) if (constrains(each->string) && !text_listed(keys, each->string))
        cJSON_AddItemReferenceToObject(made, each->string, (cJSON *)(uintptr_t)each);
    return made;
}

static int type_of_value(const cJSON *v) {
    if (cJSON_IsNumber(v)) return v->valuedouble == floor(v->valuedouble) ? INTEGER : FRACTION;
    return cJSON_IsNull(v)     ? NIL
           : cJSON_IsBool(v)   ? BOOLEAN
           : cJSON_IsString(v) ? STRING
           : cJSON_IsArray(v)  ? ARRAY
                               : OBJECT;
}

/* What the schema's `type` allows. */
static int declared_types(Compiler *c, const cJSON *schema) {
    const cJSON *type = json_get(schema, "type"), *each = cJSON_IsArray(type) ? type->child : type;
    int types = type ? 0 : ALL;
    for (; each; each = cJSON_IsArray(type) ? each->next : NULL) {
        int i = 0;
        while (i < 7 && !same(type_names[i], cJSON_GetStringValue(each))) i++;
        if (i == 7) return refuse(c, "type", "is no type of JSON");
        types |= i == 3 ? INTEGER | FRACTION : 1 << i;
    }
    return types | (json_true(schema, "nullable") ? NIL : 0);
}

static cJSON *type_list(int types) {
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < 7; i++)
        if (types & 1 << i && !(i == 2 && types & FRACTION)) cJSON_AddItemToArray(list, json_word(type_names[i]));
    return list;
}

static bool listed_value(const cJSON *list, const cJSON *value) {
    const cJSON *each;
    cJSON_ArrayForEach(each, list) if (cJSON_Compare(each, value, true)) return true;
    return false;
}

static cJSON *all_of(const cJSON *a, const cJSON *b) {
    cJSON *list = cJSON_CreateArray();
    cJSON_AddItemReferenceToArray(list, (cJSON *)(uintptr_t)a);
    cJSON_AddItemReferenceToArray(list, (cJSON *)(uintptr_t)b);
    return json_object("allOf", list, NULL);
}

/* Adds the properties of `from`, as far as another schema, `to`, allows them. */
static void join_properties(cJSON *all, const cJSON *from, const cJSON *to) {
    const cJSON *others = json_get(to, "additionalProperties"), *each;
    cJSON_ArrayForEach(each, json_get(from, "properties")) {
        const cJSON *known = cJSON_GetObjectItemCaseSensitive(json_get(to, "properties"), each->string);
        if (cJSON_GetObjectItemCaseSensitive(all, each->string)) continue;
        if (!known) known = others;
        if (known)
            cJSON_AddItemToObject(all, each->string, all_of(each, known));
        else
            cJSON_AddItemReferenceToObject(all, each->string, (cJSON *)(uintptr_t)each);
    }
}

/* What satisfies both of two values of a keyword; NULL: x does. */
static cJSON *join_values(Compiler *c, const cJSON *x, const cJSON *y) {
    const char *key = x->string;
    const bool least = text_listed("minimum exclusiveMinimum minLength minItems", key);
    const bool list = text_listed("required pattern", key);
    const cJSON *each;
    if (cJSON_Compare(x, y, true)) return NULL;
    if (least || text_listed("maximum exclusiveMaximum maxLength maxItems", key)) {
        const bool numbers = cJSON_IsNumber(x) && cJSON_IsNumber(y);
        if (!numbers) return refuse(c, key, "cannot be combined"), NULL;
        return (x->valuedouble < y->valuedouble) == least ? cJSON_Duplicate(y, true) : NULL;
    }
    if (text_listed("items additionalProperties", key)) return all_of(x, y);
    if (!list && strcmp(key, "enum")) return refuse(c, key, "differs in schemas that are combined"), NULL;
    cJSON *joined = cJSON_CreateArray();
    for (int i = 0; i < 2; i++) {
        const cJSON *from = i ? y : x;
        for (each = cJSON_IsArray(from) ? from->child : from; each; each = cJSON_IsArray(from) ? each->next : NULL)
            if (list || (!i && listed_value(y, each))) cJSON_AddItemToArray(joined, cJSON_Duplicate(each, true));
    }
    return joined;
}

/* The schema that two schemas are together. */
static const cJSON *combine(Compiler *c, const cJSON *a, const cJSON *b) {
    if (cJSON_IsTrue(a) || cJSON_IsFalse(b)) return b;
    if (cJSON_IsTrue(b) || cJSON_IsFalse(a)) return a;
    cJSON *made = copy_without(c, a, "type nullable properties"), *list = cJSON_CreateArray();
    const cJSON *each;
    if (json_get(a, "type") || json_get(b, "type"))
        cJSON_AddItemToObject(made, "type", type_list(declared_types(c, a) & declared_types(c, b)));
    if (json_get(a, "properties") || json_get(b, "properties")) {
        cJSON *all = cJSON_AddObjectToObject(made, "properties");
        join_properties(all, a, b), join_properties(all, b, a);
    }
    cJSON_ArrayForEach(each, b) {
        const char *key = each->string;
        cJSON *own = cJSON_GetObjectItemCaseSensitive(made, key), *y = (cJSON *)(uintptr_t)each, *joined = NULL;
        if (text_listed(refused, key)) refuse(c, key, "is not supported");
        if (!constrains(key) || text_listed("type nullable properties", key)) continue;
        if (own && text_listed("$ref anyOf oneOf allOf const", key)) { /* a schema of its own */
            cJSON *alone = cJSON_CreateObject();
            if (cJSON_Compare(own, each, true)) continue;
            cJSON_AddItemReferenceToObject(alone, key, y);
            cJSON_AddItemToArray(list, alone);
            if (!strcmp(key, "const")) cJSON_AddFalseToObject(made, "nothing"), refuse(c, key, "has two values");
        } else if (!own) {
            cJSON_AddItemReferenceToObject(made, key, y);
        } else if ((joined = join_values(c, own, each))) {
            cJSON_ReplaceItemInObjectCaseSensitive(made, key, joined);
        }
    }
    const cJSON *before = json_get(made, "allOf");
    cJSON_ArrayForEach(each, before) cJSON_AddItemReferenceToArray(list, (cJSON *)(uintptr_t)each);
    cJSON_DeleteItemFromObjectCaseSensitive(made, "allOf");
    if (list->child)
        cJSON_AddItemToObject(made, "allOf", list);
    else
        cJSON_Delete(list);
    return made;
}

/* ---- references ---- */

/* The schema that a $ref means: a JSON pointer (RFC 6901) into this schema. */
static const cJSON *resolve(Compiler *c, const cJSON *schema) {
    const char *s = json_string(schema, "$ref");
    const cJSON *to = c->root;
    if (!s || *s != '#' || (s[1] && s[1] != '/'))
        return refuse(c, "$ref", "must begin with #/: other documents and anchors are not supported"), NULL;
    for (s++; *s == '/' && to;) {
        LocalBytes name = {0};
        bytes_text(&name, "");
        for (s++; *s && *s != '/'; s++) {
            const bool hex = *s == '%' && isxdigit((unsigned char)s[1]) && isxdigit((unsigned char)s[2]);
            const char byte = *s == '~' ? (s[1] == '1' ? '/' : '~')
                              : hex     ? (char)strtol((char[3]){s[1], s[2]}, NULL, 16)
                                        : *s;
            s += hex ? 2 : *s == '~' && s[1];
            bytes_add(&name, &byte, 1);
        }
        int index;
        if (cJSON_IsArray(to))
            to = text_whole(name.data, 0, INT32_MAX, &index) ? cJSON_GetArrayItem(to, index) : NULL;
        else
            to = cJSON_GetObjectItemCaseSensitive(to, name.data);
    }
    if (!to) refuse(c, "$ref", "leads nowhere");
    return to;
}

static int referred(Compiler *c, const cJSON *schema) {
    const cJSON *to = resolve(c, schema);
    if (!to) return NEVER;
    const int64_t known = map_get(&c->refs, (uintptr_t)to);
    if (known >= 0) return (int)known;
    const int ref = ref_node(c->g);
    map_put(&c->refs, (uintptr_t)to, ref);
    ref_set(c->g, ref, value_of(c, to));
    return ref;
}

/* ---- literals, numbers, strings ---- */

static int separated(Compiler *c, int node) { return seq_node(c->g, c->comma, node); }

static int literal(Compiler *c, const cJSON *value) {
    const bool object = cJSON_IsObject(value);
    const cJSON *each;
    LocalIds parts = {0};
    if (!object && !cJSON_IsArray(value)) {
        LocalBytes text = {0};
        json_written(&text, value);
        return text_node(c->g, text.data, text.n);
    }
    ids_add(&parts, text_of(c, object ? "{" : "["));
    cJSON_ArrayForEach(each, value) {
        LocalJson name = object ? json_word(each->string) : NULL;
        const int node = object ? seq_node(c->g, literal(c, name), c->colon, literal(c, each)) : literal(c, each);
        ids_add(&parts, each == value->child ? node : separated(c, node));
    }
    ids_add(&parts, text_of(c, object ? "}" : "]"));
    return list_node(c->g, SEQ, parts.data, (int)parts.n);
}

/* enum and const: those of their values that satisfy the rest of the schema. */
static int literals(Compiler *c, const cJSON *schema) {
    const cJSON *only = cJSON_GetObjectItemCaseSensitive(schema, "const"), *list = json_get(schema, "enum"), *each;
    const cJSON *rest = copy_without(c, schema, "enum const type nullable");
    const int types = declared_types(c, schema), node = rest->child ? value_of(c, rest) : NEVER;
    LocalIds cases = {0};
    if (list && !cJSON_IsArray(list)) return refuse(c, "enum", "is not an array");
    if (rest->child) grammar_settle(c->g, node);
    for (each = only ? only : list->child; each; each = only ? NULL : each->next) {
        LocalText text = json_text(each);
        if (!(type_of_value(each) & types) || (only && list && !listed_value(list, only))) continue;
        const int state = rest->child ? state_run(c->g, state_start(c->g, node), text, strlen(text)) : DEAD;
        if (!rest->child || (state && c->g->of[state].ends)) ids_add(&cases, literal(c, each));
    }
    return list_node(c->g, ALT, cases.data, (int)cases.n);
}

/* A number as few digits say it, without exponent: 0.1, -120. */
static char *decimal(double x) {
    char digits[40], *end;
    int places = 0;
    do snprintf(digits, sizeof digits, "%.*e", places, x);
    while (strtod(digits, NULL) != x && ++places < 17);
    const int exponent = (int)strtol(strchr(digits, 'e') + 1, &end, 10);
    LocalBytes text = {0};
    bytes_print(&text, "%.*f", places > exponent ? places - exponent : 0, x);
    return copy_text(text.data, text.n);
}

static int number(Compiler *c, const cJSON *schema, bool whole) {
    static const char *const keys[] = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"};
    Grammar *g = c->g;
    int node = -1;
    bool ok = true;
    for (int i = 0; i < 4; i++) {
        const cJSON *value = json_get(schema, keys[i]), *flag = json_get(schema, keys[i | 1]);
        const bool above = i < 2;
        bool strict = i % 2 || cJSON_IsTrue(flag); /* true: as draft 4 had it */
        if (!value || (i % 2 && cJSON_IsBool(value))) continue;
        double x = cJSON_GetNumberValue(value);
        if (!isfinite(x)) return refuse(c, keys[i], "is not a number");
        if (whole) {
            const double to = above ? ceil(x) : floor(x);
            x = to == x && strict ? x + (above ? 1 : -1) : to;
            strict = false;
        }
        LocalText bound = decimal(x + 0);
        const int next = bound_node(g, bound, above, strict, whole);
        node = node < 0 ? next : both_node(g, node, next, &ok);
    }
    static const char any[] = "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?([0-9]{1,2}|[12][0-9][0-9]))?";
    if (!ok) return refuse(c, "minimum", "and maximum have too many digits");
    if (node < 0) node = known_pattern(g, whole ? "-?(0|[1-9][0-9]*)" : any);
    return lexeme_node(g, node);
}

/* A count, or `absent`. */
static int count_of(Compiler *c, const cJSON *schema, const char *key, int absent) {
    const cJSON *value = json_get(schema, key);
    int64_t n = absent;
    if (value && !json_whole(value, 0, INT32_MAX, &n)) return refuse(c, key, "is not a whole number"), absent;
    return (int)n;
}

static int string(Compiler *c, const cJSON *schema) {
    Grammar *g = c->g;
    const cJSON *pattern = json_get(schema, "pattern");
    const char *format = json_string(schema, "format"), *bad = NULL;
    const int least = count_of(c, schema, "minLength", 0), most = count_of(c, schema, "maxLength", ENDLESS);
    size_t at = 0;
    int body = least || most != ENDLESS ? repeat_node(g, g->letter, least, most) : -1;
    bool ok = true;
    for (const cJSON *each = cJSON_IsArray(pattern) ? pattern->child : pattern; each && !bad;
         each = cJSON_IsArray(pattern) ? each->next : NULL) {
        if (!cJSON_IsString(each)) return refuse(c, "pattern", "is not a text");
        const int next = pattern_node(g, each->valuestring, true, &bad, &at);
        if (!bad) body = body < 0 ? next : both_node(g, body, next, &ok);
    }
    LocalText why = text_print("has %s at byte %zu, which is not supported", bad ? bad : "", at);
    if (bad) return refuse(c, "pattern", why);
    for (int i = 0; format; i++) {
        if (i == sizeof formats_of / sizeof *formats_of) return refuse(c, "format", "is of an unknown kind");
        if (strcmp(format, formats_of[i].name)) continue;
        const int next = known_pattern(g, formats_of[i].pattern);
        body = body < 0 ? next : both_node(g, body, next, &ok);
        break;
    }
    if (!ok) return refuse(c, "pattern", "together with other limits takes too long");
    if (body < 0) body = repeat_node(g, g->letter, 0, ENDLESS);
    return lexeme_node(g, seq_node(g, g->quote, body, g->quote));
}

/* ---- objects and arrays ---- */

typedef struct {
    const char *name;
    size_t n;
} Name;

/* What a key that is none of these names has behind the first `at` bytes, which all of them share; names are sorted. */
static int other_name(Compiler *c, const Name *name, int names, size_t at) {
    Grammar *g = c->g;
    LocalIds cases = {0};
    bool ends = false;
    LocalBytes others = {0};
    bytes_text(&others, "[^");
    for (int i = 0, k; i < names; i = k) {
        uint32_t letter;
        k = i + 1;
        ends |= name[i].n == at;
        if (name[i].n == at) continue;
        const size_t n = (size_t)utf8_decode(name[i].name + at, name[i].n - at, &letter);
        while (k < names && name[k].n >= at + n && !memcmp(name[k].name + at, name[i].name + at, n)) k++;
        LocalText one = text_print("\\u%04x", (unsigned)letter);
        const char *bad;
        size_t place;
        if (letter > 0xFFFF) one[0] = 0;
        LocalText shown = letter > 0xFFFF ? copy_text(name[i].name + at, n) : text_print("%s", one);
        LocalText whole = text_print("^[%s]$", shown);
        bytes_text(&others, shown);
        ids_add(&cases,
                seq_node(g, pattern_node(g, whole, true, &bad, &place), other_name(c, name + i, k - i, at + n)));
    }
    const char *bad;
    size_t place;
    LocalText other = text_print("^%s]$", others.data);
    const int any = repeat_node(g, g->letter, 0, ENDLESS);
    ids_add(&cases, seq_node(g, pattern_node(g, other, true, &bad, &place), any));
    if (!ends) ids_add(&cases, NOTHING);
    return list_node(g, ALT, cases.data, (int)cases.n);
}

static int by_text(const void *a, const void *b) { return strcmp(((const Name *)a)->name, ((const Name *)b)->name); }

/* Any member of an object that its properties do not name. */
static int other_member(Compiler *c, const cJSON *properties, int value) {
    const int names = cJSON_GetArraySize(properties), quote = c->g->quote;
    Name *name = allocate((size_t)names * sizeof *name + 1), *next = name;
    const cJSON *each;
    bool fits = true;
    cJSON_ArrayForEach(each, properties) {
        *next++ = (Name){each->string, strlen(each->string)};
        fits = fits && next[-1].n <= MOST_NAME;
    }
    qsort(name, (size_t)names, sizeof *name, by_text);
    const int body = !fits ? refuse(c, "properties", "have a name that is too long") : other_name(c, name, names, 0);
    free(name);
    const int key = names ? lexeme_node(c->g, seq_node(c->g, quote, body, quote)) : c->string;
    return seq_node(c->g, key, c->colon, value);
}

/* Members in the order of the properties. Built from the end: what may follow when the first i properties are done,
 * written as the first member and behind others. */
static int object(Compiler *c, const cJSON *schema) {
    Grammar *g = c->g;
    const cJSON *properties = json_get(schema, "properties"), *required = json_get(schema, "required"), *each, *name;
    const cJSON *more = json_get(schema, "additionalProperties");
    cJSON *known = cJSON_CreateObject(); /* the names that are required */
    const int close = text_of(c, "}");
    int first = close, behind = close;
    LocalIds key = {0}, value = {0}, must = {0};
    const bool open = more ? !cJSON_IsFalse(more) : !properties && !required;
    const int other = cJSON_IsObject(more) ? value_at(c, more, "additionalProperties", NULL) : open ? c->any : NEVER;
    if (open) {
        const int member = other_member(c, properties, other), rest = repeat_node(g, separated(c, member), 0, ENDLESS);
        behind = seq_node(g, rest, close);
        first = alt_node(g, close, seq_node(g, member, rest, close));
    }
    cJSON_ArrayForEach(name, required) {
        if (!cJSON_IsString(name)) continue;
        if (!cJSON_GetObjectItemCaseSensitive(known, name->valuestring))
            cJSON_AddTrueToObject(known, name->valuestring);
    }
    cJSON_ArrayForEach(each, properties) {
        LocalJson word = json_word(each->string);
        ids_add(&key, seq_node(g, literal(c, word), c->colon));
        ids_add(&value, value_at(c, each, "properties", each->string));
        ids_add(&must, cJSON_GetObjectItemCaseSensitive(known, each->string) != NULL);
        cJSON_DeleteItemFromObjectCaseSensitive(known, each->string);
    }
    cJSON_ArrayForEach(each, known) { /* required, but no property: any value, if others are allowed */
        LocalJson word = json_word(each->string);
        ids_add(&key, seq_node(g, literal(c, word), c->colon));
        ids_add(&value, more ? other : c->any);
        ids_add(&must, true);
    }
    cJSON_Delete(known);
    for (size_t i = key.n; i-- > 0;) {
        const int member = seq_node(g, key.data[i], value.data[i], behind);
        first = alt_node(g, member, must.data[i] ? NEVER : first);
        behind = alt_node(g, separated(c, member), must.data[i] ? NEVER : behind);
    }
    return seq_node(g, text_of(c, "{"), first);
}

/* Built from the end, too: what may follow i items. */
static int array(Compiler *c, const cJSON *schema) {
    Grammar *g = c->g;
    const cJSON *items = json_get(schema, "items"), *prefix = json_get(schema, "prefixItems"), *each;
    const int least = count_of(c, schema, "minItems", 0), close = text_of(c, "]");
    int most = count_of(c, schema, "maxItems", ENDLESS), i = 0;
    LocalIds value = {0};
    if (cJSON_IsArray(items)) return refuse(c, "items", "is an array, which is not supported: use prefixItems");
    cJSON_ArrayForEach(each, prefix) {
        char number[12];
        snprintf(number, sizeof number, "%d", i++);
        ids_add(&value, value_at(c, each, "prefixItems", number));
    }
    const int n = (int)value.n, item = items ? value_at(c, items, "items", NULL) : c->any;
    const int rest_least = least > n ? least - n : 0, rest_most = most == ENDLESS ? ENDLESS : most - n;
    int behind =
        seq_node(g, repeat_node(g, separated(c, item), rest_least, rest_most < 0 && most >= 0 ? 0 : rest_most), close);
    int first = seq_node(
        g, item,
        repeat_node(g, separated(c, item), rest_least ? rest_least - 1 : 0, most == ENDLESS ? ENDLESS : rest_most - 1),
        close);
    if (most != ENDLESS && rest_most < 1) first = NEVER;
    first = alt_node(g, n >= least ? close : NEVER, first);
    for (i = n; i-- > 0;) {
        const int end = i >= least ? close : NEVER,
                  more = most == ENDLESS || i < most ? seq_node(g, value.data[i], behind) : NEVER;
        first = alt_node(g, end, more);
        behind = alt_node(g, end, more == NEVER ? NEVER : separated(c, more));
    }
    return seq_node(g, text_of(c, "["), first);
}

/* ---- alternatives ---- */

/* The types that values of a schema can have; a part of them at most is in `cases`. */
static int types_of(Compiler *c, const cJSON *schema) {
    const cJSON *only = cJSON_GetObjectItemCaseSensitive(schema, "const"), *list = json_get(schema, "enum"), *each;
    int types = only || list ? 0 : ALL;
    if (only) types = type_of_value(only);
    if (!only) cJSON_ArrayForEach(each, list) types |= type_of_value(each);
    return types & declared_types(c, schema);
}

/* Can no value satisfy both? By type, by const or enum, or by one property that both have. */
static bool disjoint(Compiler *c, const cJSON *a, const cJSON *b, int depth) {
    const cJSON *lists[2], *schemas[2] = {a, b}, *each;
    for (int i = 0; i < 2; i++) {
        for (int k = 0; json_get(schemas[i], "$ref") && k < 10 && !c->e->code; k++) schemas[i] = resolve(c, schemas[i]);
        const cJSON *only = cJSON_GetObjectItemCaseSensitive(schemas[i], "const");
        lists[i] = only ? only : json_get(schemas[i], "enum");
        if (!cJSON_IsObject(schemas[i])) return cJSON_IsFalse(schemas[i]);
    }
    a = schemas[0], b = schemas[1];
    const int common = types_of(c, a) & types_of(c, b);
    if (!common) return true;
    if (lists[0] && lists[1]) {
        const bool one[2] = {same(lists[0]->string, "const"), same(lists[1]->string, "const")};
        for (each = one[0] ? lists[0] : lists[0]->child; each; each = one[0] ? NULL : each->next)
            if (one[1] ? cJSON_Compare(each, lists[1], true) : listed_value(lists[1], each)) return false;
        return true;
    }
    for (int i = 0; i < 2 && common == OBJECT && depth; i++) {
        const cJSON *mine = schemas[i], *other = schemas[!i], *known = json_get(other, "properties");
        cJSON_ArrayForEach(each, json_get(mine, "required")) {
            const char *name = cJSON_GetStringValue(each);
            const cJSON *x = json_get(json_get(mine, "properties"), name ? name : ""),
                        *y = json_get(known, name ? name : "");
            if (name && !y && cJSON_IsFalse(json_get(other, "additionalProperties"))) return true;
            if (x && y && listed_value(json_get(other, "required"), each) && disjoint(c, x, y, depth - 1)) return true;
        }
    }
    return false;
}

static int cases_of(Compiler *c, const cJSON *schema, const char *key) {
    const cJSON *list = json_get(schema, key), *each, *other;
    const cJSON *rest = copy_without(c, schema, key);
    LocalIds cases = {0};
    int i = 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > MOST_CASES)
        return refuse(c, key, "is not an array of at most 500 schemas");
    cJSON_ArrayForEach(each, list) {
        char number[12];
        snprintf(number, sizeof number, "%d", i++);
        for (other = list->child; other != each && *key == 'o'; other = other->next)
            if (!disjoint(c, each, other, 3)) return refuse(c, key, "has cases that may overlap: use anyOf");
        ids_add(&cases, value_at(c, rest->child ? combine(c, rest, each) : each, key, number));
    }
    return list_node(c->g, ALT, cases.data, (int)cases.n);
}

/* Values of the types that a schema allows, or of those that its keywords are about. */
static int typed(Compiler *c, const cJSON *schema) {
    int types = declared_types(c, schema), about = 0;
    const cJSON *each;
    cJSON_ArrayForEach(each, schema) for (int i = 0; i < KEYWORDS; i++) if (!strcmp(keywords[i].key, each->string))
        about |= keywords[i].type;
    if (types == ALL && !about) return c->any;
    if (types == ALL && !json_get(schema, "type")) types = about;
    const int cases[] = {types & NIL ? text_of(c, "null") : NEVER,
                         types & BOOLEAN ? alt_node(c->g, text_of(c, "true"), text_of(c, "false")) : NEVER,
                         types & (INTEGER | FRACTION) ? number(c, schema, !(types & FRACTION)) : NEVER,
                         types & STRING ? string(c, schema) : NEVER,
                         types & ARRAY ? array(c, schema) : NEVER,
                         types & OBJECT ? object(c, schema) : NEVER};
    return list_node(c->g, ALT, cases, 6);
}

static bool check_keys(Compiler *c, const cJSON *schema) {
    const cJSON *each;
    cJSON_ArrayForEach(each, schema) {
        const bool off =
            cJSON_IsFalse(each) || (cJSON_IsNumber(each) && each->valuedouble == 0 && *each->string == 'm');
        const bool harmless =
            off && text_listed("uniqueItems minProperties unevaluatedProperties minContains", each->string);
        if (text_listed(refused, each->string) && !harmless) return refuse(c, each->string, "is not supported"), false;
    }
    return true;
}

static int value_of(Compiler *c, const cJSON *schema) {
    int node = NEVER;
    if (c->e->code || cJSON_IsFalse(schema)) return NEVER;
    if (cJSON_IsTrue(schema)) return c->any;
    if (!cJSON_IsObject(schema)) return refuse(c, "the value", "is no schema");
    if (c->depth >= MOST_DEPTH) return refuse(c, "the schema", "is nested too deep");
    if (++c->values > MOST_SCHEMAS || c->g->flags.n > MOST_NODES) return refuse(c, "the schema", "is too large");
    if (!check_keys(c, schema)) return NEVER;
    c->depth++;
    const cJSON *all = json_get(schema, "allOf");
    if (json_get(schema, "$ref")) {
        const cJSON *rest = copy_without(c, schema, "$ref"), *to = rest->child ? resolve(c, schema) : NULL;
        node = !rest->child ? referred(c, schema) : to ? value_of(c, combine(c, rest, to)) : NEVER;
    } else if (json_get(schema, "anyOf")) {
        node = cases_of(c, schema, "anyOf");
    } else if (json_get(schema, "oneOf")) {
        node = cases_of(c, schema, "oneOf");
    } else if (all) {
        const cJSON *whole = copy_without(c, schema, "allOf"), *each;
        cJSON_ArrayForEach(each, all) whole = combine(c, whole, each);
        node = value_of(c, whole);
    } else if (json_get(schema, "enum") || cJSON_GetObjectItemCaseSensitive(schema, "const")) {
        node = literals(c, schema);
    } else {
        node = typed(c, schema);
    }
    c->depth--;
    return node;
}

static Compiler compiler(Grammar *g, const cJSON *schema, const char *name, Error *e) {
    Compiler c = {.g = g, .root = schema, .name = name, .e = e, .made = cJSON_CreateArray()};
    LocalJson anything = cJSON_CreateObject();
    e->code = 0;
    make_letters(g);
    c.comma = seq_node(g, text_of(&c, ","), repeat_node(g, text_of(&c, " "), 0, 1));
    c.colon = seq_node(g, text_of(&c, ":"), repeat_node(g, text_of(&c, " "), 0, 1));
    c.string = string(&c, anything);
    c.any = ref_node(g);
    c.any_object = object(&c, anything);
    ref_set(g, c.any,
            alt_node(g, text_of(&c, "null"), text_of(&c, "true"), text_of(&c, "false"), number(&c, anything, false),
                     c.string, array(&c, anything), c.any_object));
    return c;
}

static void compiler_free(Compiler *c) {
    cJSON_Delete(c->made);
    map_free(&c->refs), bytes_free(&c->place);
}

int schema_node(Grammar *g, const cJSON *schema, const char *name, Error *e) {
    Compiler c = compiler(g, schema, name, e);
    const int root = ref_node(g); /* a $ref may mean the whole */
    map_put(&c.refs, (uintptr_t)schema, root);
    ref_set(g, root, value_of(&c, schema));
    if (!e->code && !grammar_settle(g, root)) refuse(&c, "the schema", "allows no value");
    compiler_free(&c);
    return e->code ? -1 : root;
}

int any_object_node(Grammar *g) {
    Error e;
    Compiler c = compiler(g, NULL, "", &e);
    const int node = c.any_object;
    compiler_free(&c);
    return node;
}
