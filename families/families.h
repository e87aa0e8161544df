/* families.h: what several families share. llama.c has it, experts.c the layouts of experts. */
#ifndef FAMILIES_H
#define FAMILIES_H

#include "host.h"

extern const RopeScaling llama3; /* of Llama 3.1 */
/* One RoPE for all layers, with the divisors that a GGUF file may have. theta: what a missing rope_theta means. */
void read_one_rope(Loader *load, Model *m, double theta);
/* All layers have this window; 0: none has one. layer_types must agree. */
void read_one_window(Loader *load, Model *m, int window);
/* Sizes, heads, RoPE and activation of models like Llama. What missing keys mean: as in read_sizes(), read_heads(). */
void read_plain(Loader *load, Model *m, Sizes absent, int kv_heads, int head_dim, double theta);
/* Moves on to text_config, which describes the text model, of the family `model_type`, in a model of texts and
 * pictures. */
void read_text_config(Loader *load, const char *model_type);
/* Is this tensor one of its other parts, or a table of angles, as old files have them? */
bool is_no_text(const Loader *load, const char *name);

/* The norms before attention and before the MLP. */
void bind_norms(Loader *load, const Model *m, Layer *l);
/* q, k, v and o. */
void bind_attention(Loader *load, const Model *m, Layer *l, bool bias, bool o_bias);
/* RMSNorm of each head of q and k. */
void bind_head_norms(Loader *load, const Model *m, Layer *l);
/* gate, up and down of a dense layer. width: what a missing intermediate_size means, or REQUIRED. */
void bind_dense(Loader *load, const Model *m, Layer *l, int width, bool bias);
/* n matrices, one per expert or head. Each is a module of its own, MODULE.0 MATRIX and so on. */
Linear bind_each(Loader *load, const char *module, const char *matrix, int n, int rows, int cols, int bias);
extern const ExpertLayout separate_experts; /* MODULE.0.gate_proj, .up_proj, .down_proj */
/* Has layer l experts? first: dense layers in front. */
bool has_experts(Loader *load, const Model *m, const Layer *l, int first);

/* Llama itself, of which many families are copies. */
void read_llama(Loader *load, Model *m);
void bind_llama(Loader *load, Model *m);

#endif
