/* json.h: what the files of json/ share. A grammar says which bytes an answer may have: automaton.c runs it, regex.c
 * and schema.c make it of patterns and of JSON Schema, mask.c turns it into the tokens that may come next. */
#ifndef JSON_H
#define JSON_H

#include "../host.h"

/* ---- automaton.c ----
 * A grammar is made of nodes, as regular expressions are, and a node is also the state of a text: it stands for what
 * may still be read. Behind a byte that is another node, its derivative (Brzozowski, 1964): of `ab|ac` behind `a` it is
 * `b|c`, of `x{3,9}` behind `x` it is `x{2,8}`. A node is a tuple of ints that exists once, so it is its number: states
 * are copied, hashed and compared as ints. They are made when a text first needs them. So counts and recursion are
 * never expanded. Every node but NEVER can be completed. */
enum { EMPTY = 1, BARREN = 2, LOOKED = 4 }; /* the text may end; nothing completes it; of an AND: BARREN is known */
typedef struct {
    int begin;     /* of its tuple */
    int target;    /* of a REF, or -1: not set yet */
    int flags;     /* of those above */
    int round;     /* the last of Grammar.rounds that saw it */
    int walk;      /* and of Grammar.walks */
    int *next;     /* (256) the nodes behind it, -1: not known; or NULL */
    uint32_t *row; /* of mask.c: the tokens that may come next; or NULL */
} Node;

typedef struct Strings Strings;

typedef struct {
    Ids data; /* all tuples */
    Node *node;
    int nodes, settled; /* the first ones are settled */
    Map known;          /* from a tuple's hash, or one behind it, to its node */
    Bytes text;         /* of all BYTES */
    uint8_t like[256];  /* of each byte the first one that no SET and no BYTES tells from it */
    int plain, letter;  /* any letter of a JSON string, without \uXXXX and with them; make_letters() */
    int quote;          /* what ends the string */
    int all;            /* any text without control tokens */
    int rounds, walks;  /* of derivatives; of mask.c */
    int64_t work;       /* since the last mask, in about 10 ns each; at `most` derivatives give up */
    int64_t most;
    bool early;       /* a text was read where the target of a REF was not set yet */
    int tight;        /* the most letters_left() of a BARREN node's part */
    int rows;         /* that mask.c keeps */
    Strings *strings; /* of sets of letters, and how many: of mask.c */
    int kinds;
} Grammar;

/* Kinds, the first int of a tuple. Behind it: of SET byte ranges, first and last of each; of BYTES where they begin,
 * and how many; of SEQ, AND and BUT two nodes; of ALT nodes; of REPEAT a node, least, most; of REF its key. */
enum { SET, BYTES, SEQ, ALT, REPEAT, AND, BUT, REF };
enum { NEVER = 0, NOTHING = 1 }; /* nodes: no text at all; the empty text */
enum { ENDLESS = -1, MOST_KEPT = 3000000, MOST_DATA = 1 << 28 };

void grammar_open(Grammar *g);
void grammar_close(Grammar *g);
/* set: one byte of these ranges. both: what matches both. but: what matches a, but not b. The nodes of these two have
 * no REF. Behind any part of a text that `a but b` has, another text of a goes on that is not in b; or else what is
 * left of b has all of what is left of a as one of its cases, or `all`. */
int set_node(Grammar *g, const Ids *ranges);
int text_node(Grammar *g, const char *text, size_t n);
int seq_node(Grammar *g, int a, int b);
int alt_node(Grammar *g, const int *node, size_t n);
int repeat_node(Grammar *g, int node, int least, int most); /* most may be ENDLESS */
int both_node(Grammar *g, int a, int b);
int by_number(const void *a, const void *b); /* for qsort() of ints, or of what begins with one */
int but_node(Grammar *g, int a, int b);
/* The one with that key; Node.target says what it means. */
int ref_node(Grammar *g, const int *key, size_t n);
/* What a sequence begins with, which is none itself, and what follows that. Appends the alternatives of a node. */
int first_node(Grammar *g, int node, int *rest);
void add_cases(const Grammar *g, int node, Ids *out);
bool grammar_settle(Grammar *g, int node);    /* to be called when all targets are set. Does any text match the node? */
int letters_left(const Grammar *g, int node); /* of a string that has a most, and may end; -1: it is none */
int state_derive(Grammar *g, int state, unsigned char byte); /* of state_step(): a byte behind it that is new */
int state_run(Grammar *g, int state, const char *text, size_t n);
int state_forced(Grammar *g, int state); /* the only byte that may come next, or -1: there are several, or it may end */
static inline const int *tuple(const Grammar *g, int node) { return g->data.data + g->node[node].begin; }
static inline int node_kind(const Grammar *g, int node) { return *tuple(g, node); }
static inline int tuple_size(const Grammar *g, int node) { return g->node[node + 1].begin - g->node[node].begin; }
static inline bool ends(const Grammar *g, int state) { return g->node[state].flags & EMPTY; }
/* It took too long or too much memory. What was made since is not right. */
static inline bool gave_up(const Grammar *g) {
    return g->work >= g->most || g->nodes > MOST_KEPT || g->data.n > MOST_DATA;
}
static inline int state_step(Grammar *g, int state, unsigned char byte) { /* NEVER: the byte cannot come here */
    const int *next = g->node[state].next;
    byte = g->like[byte];
    return next && next[byte] >= 0 ? next[byte] : state_derive(g, state, byte);
}

/* ---- regex.c ---- */

/* The texts that a pattern matches whole or, if letters may stand around it, anywhere: g->letter in JSON strings, or
 * another node. NEVER: none may. Appends what is wrong or not supported to `why`. */
int pattern_node(Grammar *g, const char *pattern, int around, Bytes *why);
int rule_node(Grammar *g, const char *pattern, ...); /* one that is right. Each % in it is the next argument, a node */
void make_letters(Grammar *g);                       /* g->letter, g->plain, g->quote */

/* ---- schema.c ---- */

/* How a call has its arguments if they are no JSON: nodes. */
typedef struct {
    int first, next, end, none; /* before the first key; before others; behind the last value; instead of all that */
    int equals[2];              /* between key and value: of a text that is not in quotes, of others */
    int stop;                   /* what no unquoted text may contain; NEVER: texts are quoted JSON */
    Bytes open, close;          /* around texts, everywhere; empty: only a text that is an argument itself is no JSON */
} Form;

/* The texts that satisfy a schema. Compact JSON with an optional space behind `:` and `,` or, unless `form` is NULL,
 * arguments of that form. call: of arguments, which are an object. NEVER: USAGE, which names keyword and place. `name`:
 * of the whole in that place. */
int schema_node(Grammar *g, const cJSON *schema, const char *name, bool call, const Form *form, Error *e);
int any_object_node(Grammar *g, const char *name, const Form *form, Error *e);

/* ---- mask.c ---- */

/* All tokens of a model, for every grammar. Control tokens, and those listed, read as the byte CONTROL and three more,
 * which no text has. ids: of the model. */
enum { CONTROL = 0xFF };
typedef struct Vocabulary Vocabulary;
Vocabulary *vocabulary_open(const Tokenizer *t, int ids, const int *control, int controls);
void vocabulary_close(Vocabulary *v);                                /* or NULL */
Bytes token_text(const Vocabulary *v, int id);                       /* as grammars read it; not a copy */
int state_token(Grammar *g, const Vocabulary *v, int state, int id); /* NEVER: it cannot come here */
/* The tokens that may come next: token i is bit i % 32 of word i / 32. Kept until a later call. NULL: it gave up. */
const uint32_t *state_tokens(Grammar *g, const Vocabulary *v, int state);
void forget_masks(Grammar *g);

#endif
