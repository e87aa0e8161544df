/* gpus.h: tensor parallelism (Shoeybi et al., "Megatron-LM", 2019). Each card holds whole heads, some rows of gate and
 * up, and some rows of the vocabulary's head. o and down are cut by columns: each card computes a partial sum. The rest
 * is copied to every card. */
#ifndef GPUS_H
#define GPUS_H

#include "infer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A card waits so long for another. A stopped process (Ctrl+Z) may have launched only one's step. */
enum { CARD_SECONDS = 60 };
#ifndef MAX_FLOAT_TOKENS /* tests take fewer, so that few tokens go both ways */
enum {
    MAX_FLOAT_TOKENS = 64, /* steps of up to so many tokens send sums as floats, larger ones as bf16 if weights allow */
    MAX_PEER_ROWS = 8192   /* rows times peers that our kernel sends; above it NCCL's ring moves fewer bytes */
};
#endif

typedef struct {
    Model model;    /* with this card's heads and rows; its vocabulary is whole */
    int first_id;   /* of the head's rows that are here: model.head.rows of them */
    Stored *stored; /* the matrices of all Linears that were cut */
} Shard;

/* Shard number `card` of `cards`. USAGE if the model cannot be cut so; the error says which numbers can. shard_free()
 * leaves what the shard shares with the model. */
bool shard_model(const Model *m, int card, int cards, Shard *shard, Error *e);
void shard_free(Shard *shard);
bool can_shard(const Model *m, int cards);
const Model *shard_of(const Model *m, int card, int cards); /* host.h: share_of */

#ifdef __cplusplus
}
#endif
#endif
