/* extensions.c: the tables of rooms. A room is a folder that adds something to the core; its rows stand here. The build
 * defines ROOM_NAME for each room that is there (Makefile, ROOMS). */
#include "host.h"
#ifdef ROOM_encodings
#include "encodings/blocks.h"
#endif

const TypeInfo types[] = {CORE_TYPES(TYPE_ROW)
#ifdef ROOM_encodings
                              PACKED_TYPES(TYPE_ROW) BLOCK_TYPES(TYPE_ROW)
#endif
};
_Static_assert(sizeof types / sizeof *types <= MAX_TYPES, "MAX_TYPES");
const int types_n = sizeof types / sizeof *types;

extern const Container gguf;
const Container *const containers[] = {
#ifdef ROOM_encodings
    &gguf,
#endif
    &safetensors, NULL};

extern const Packing packed;
const Packing *const packings[] = {
#ifdef ROOM_encodings
    &packed,
#endif
    NULL};

extern const Family gpt_oss[], llama[], experts[], gemma[], deepseek[];
const Family *const families[] = {gpt_oss,
#ifdef ROOM_families
                                  llama,   experts, gemma, deepseek,
#endif
                                  NULL};

extern const ExpertLayout separate_experts, stacked_experts, turned_experts, mixtral_experts;
const ExpertLayout *const layouts[] = {
#ifdef ROOM_families
    &separate_experts, &stacked_experts,
    &turned_experts,   &mixtral_experts,
#endif
    &experts_in_turn,  NULL};

extern const Format templates;
const Format *const formats[] = {&harmony,
#ifdef ROOM_formats
                                 &templates,
#endif
                                 NULL};

extern const Command play, download, logits, tokenize, detokenize, render, parse;
extern const Command serve, list, rm, inspect, doctor, bench, explain, perplexity;
const Command *const commands[] = {&play,
#ifdef ROOM_serve
                                   &serve,
#endif
                                   &download,
#ifdef ROOM_commands
                                   &list,     &rm,         &inspect, &doctor, &bench,
#endif
                                   &logits,
#ifdef ROOM_commands
                                   &explain,  &perplexity,
#endif
                                   &tokenize, &detokenize, &render,  &parse,  NULL};

/* One of a kind; NULL where its room is not there. */
#define IF_THERE __attribute__((weak))
extern int list_choose(const Models *here) IF_THERE;
extern const Model *shard_of(const Model *m, int card, int cards) IF_THERE;
extern const Keeping json_keeping IF_THERE;
extern const Terminal libedit_terminal IF_THERE;
extern const Hints user_hints IF_THERE;
int (*const choose)(const Models *here) = list_choose;
const Model *(*const share_of)(const Model *m, int gpu, int gpus) = shard_of;
const Keeping *const keeping = &json_keeping;
const Terminal *const terminal = &libedit_terminal;
const Hints *const hints = &user_hints;
