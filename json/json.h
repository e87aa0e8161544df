/* json.h: what the files of json/ share. A grammar says which bytes an answer may have: automaton.c runs it, regex.c
 * and schema.c make it of patterns and of JSON Schema, mask.c turns it into the tokens that may come next. */
#ifndef JSON_H
#define JSON_H

#include "../host.h"

/* ---- automaton.c ----
 * A pushdown automaton over bytes, made of nodes as regular expressions are. What is left to read is a list of nodes:
 * a cell has the node to read next, how far it is, and the cell behind it. A state is a set of cells, for the cases
 * that are still possible. Nodes, cells and states are tuples of ints that exist once, so each is its number: a state
 * is copied, hashed and compared as an int. States and their steps are made when a text first needs them. So counted
 * repetition is a counter in a cell, and recursion is a longer list; neither is ever expanded. Every state but 0 can be
 * completed, because what matches no text at all is never entered. */
typedef struct {
    Ids data, begin; /* tuple i: data[begin[i]] .. data[begin[i + 1] - 1] */
    int *slot;       /* (room) a hash table */
    size_t room;
} Pool;

typedef struct Local Local;
typedef struct {
    int *next;     /* (256) the states behind this one, -1: not known; or NULL */
    int loop;      /* the cell of a REPEAT of any letters that a cell of this state stands in, or 0 */
    int room;      /* so many letters may follow, whichever they are */
    bool ends;     /* the text may end here */
    Local *local;  /* of mask.c, for states inside of a lexeme; or NULL */
    uint32_t *row; /* of mask.c: the tokens that may come next; or NULL */
} State;

typedef struct {
    Pool node, cell, state;
    State *of;   /* one for each state */
    Bytes flags; /* of each node */
    Ids target;  /* of each REF */
    Ids seen;    /* of each cell: the round that saw it last */
    int round;
    Map dead;          /* pairs of states that an AND cannot complete */
    bool edge[257];    /* bytes where some SET begins or ends */
    int letter, quote; /* nodes: any letter of a JSON string, and what ends it; regex.c makes them */
    int pairs;         /* that an AND had to look at */
    int64_t work;      /* cells read for steps that were not known */
    int rows;          /* that mask.c keeps */
} Grammar;

enum { BYTES, SET, SEQ, ALT, REPEAT, LEX, AND, REF }; /* kinds of nodes */
enum { NEVER = 0, NOTHING = 1, DEAD = 0 };            /* a node that no text matches; the empty text; a state */
enum { ENDLESS = -1 };                                /* for repeat() */

void grammar_open(Grammar *g);
void grammar_close(Grammar *g);
/* Nodes. text: these bytes. set: one byte of these 256 bits. lexeme: the same texts as the node; how far it is counts
 * as one number, so that mask.c computes what happens inside of it once. both: what two nodes both match; *ok becomes
 * false if that takes too long to find out. Inside of these two there are no references, and no text() inside of
 * both(). */
int text_node(Grammar *g, const char *text, size_t n);
int set_node(Grammar *g, const uint32_t set[8]);
int list_node(Grammar *g, int kind, const int *node, int n); /* SEQ, ALT */
#define seq_node(g, ...) list_node(g, SEQ, (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))
#define alt_node(g, ...) list_node(g, ALT, (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))
int repeat_node(Grammar *g, int node, int least, int most); /* most may be ENDLESS */
int lexeme_node(Grammar *g, int node);
int both_node(Grammar *g, int a, int b, bool *ok);
int ref_node(Grammar *g); /* means another node, once ref_set() says which */
void ref_set(Grammar *g, int ref, int node);
/* To be called when all references are set. Does any text match the node? */
bool grammar_settle(Grammar *g, int node);

int state_start(Grammar *g, int node);
int state_step(Grammar *g, int state, unsigned char byte); /* DEAD: the byte cannot come here */
int state_run(Grammar *g, int state, const char *text, size_t n);
int state_of(Grammar *g, Ids *cells); /* sorts them */
/* Is the cell inside of a lexeme, in which state, and in which is the text when that ends? */
/* Is the text in a JSON string of any letters, which needs `least` more and may have `room` more? */
bool state_loops(Grammar *g, int state, int *least, int *room);
/* Is the cell inside of a lexeme, in which state, and in which is the text when that ends? */
bool cell_inside(Grammar *g, int cell, int *inside, int *rest);
/* The only byte that may come next, or -1: there are several, or the text may end. */
int state_forced(const Grammar *g, int state);
static inline const int *tuple(const Pool *p, int i) { return p->data.data + p->begin.data[i]; }
static inline int tuple_size(const Pool *p, int i) { return p->begin.data[i + 1] - p->begin.data[i]; }

/* ---- regex.c ---- */

/* The texts that a pattern matches whole or, in a JSON string (json; g->letter must be set), anywhere. *bad: what is
 * wrong or not supported at its byte *at, or NULL. */
int pattern_node(Grammar *g, const char *pattern, bool json, const char **bad, size_t *at);
int known_pattern(Grammar *g, const char *pattern); /* whole; it is right */
void make_letters(Grammar *g);                      /* g->letter and g->quote */
/* Numbers without exponent that are at least (above) or at most `bound`, "-12.5"; strict: and not equal to it. */
int bound_node(Grammar *g, const char *bound, bool above, bool strict, bool whole);

/* ---- schema.c ---- */

/* The texts that satisfy a schema. Compact JSON with an optional space behind `:` and `,`. -1: USAGE, which names
 * keyword and place. `name`: of the whole in that place. */
int schema_node(Grammar *g, const cJSON *schema, const char *name, Error *e);
int any_object_node(Grammar *g);

/* ---- mask.c ---- */

/* All tokens of a model, for every grammar. Control tokens, and those listed, read as the byte CONTROL and three more,
 * which no text has. ids: of the model. */
enum { CONTROL = 0xFF };
typedef struct Vocabulary Vocabulary;
Vocabulary *vocabulary_open(const Tokenizer *t, int ids, const int *control, int controls);
void vocabulary_close(Vocabulary *v);                                /* or NULL */
Bytes token_text(const Vocabulary *v, int id);                       /* as grammars read it; not a copy */
int state_token(Grammar *g, const Vocabulary *v, int state, int id); /* DEAD: it cannot come here */
/* The tokens that may come next: token i is bit i % 32 of word i / 32. Kept until a later call. */
const uint32_t *state_tokens(Grammar *g, const Vocabulary *v, int state);
void prepare_masks(Grammar *g, const Vocabulary *v); /* computes ahead what texts will need first: some milliseconds */
void forget_masks(Grammar *g);

#endif
