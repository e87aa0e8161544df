/* gpus.h: a model's part for each of several GPUs (tensor parallelism: Shoeybi et al., "Megatron-LM", 2019). Matrices
 * that read the residual stream are cut by rows: a GPU has some heads, some rows of gate and up, of the head. Matrices
 * that add to it are cut by columns, so that each GPU adds a part of the sum. The rest is whole on each. */
#ifndef GPUS_H
#define GPUS_H

#include "infer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOST_WIDE = 64,  /* tokens whose sums travel as floats; those of more as bf16, if the weights are read as bf16 */
    MOST_SENT = 8192 /* rows times peers that a kernel sends itself; of more NCCL's rings carry less, if it is there */
};

typedef struct {
    Model model;    /* with this GPU's heads and rows; its vocabulary is whole */
    int first_id;   /* of the rows of the head that are here; how many: model.head.rows */
    Layer *layer;   /* model's */
    Stored *stored; /* the matrices of all its Linears */
} ModelPart;

/* The part of number `gpu` of `gpus`. USAGE if the model cannot be cut so; the error says into how many it can.
 * model_part_free() ends the part, not what it shares with the model. */
bool model_part(const Model *m, int gpu, int gpus, ModelPart *part, Error *e);
void model_part_free(ModelPart *part);
bool can_be_cut(const Model *m, int gpus);

#ifdef __cplusplus
}
#endif
#endif
