/* gemma.c: Gemma 2 and 3: norms stored as w - 1, norms behind attention and MLP, GEGLU, caps of scores. */
#include "host.h"

/* clang-format off */
const Family gemma[] = {
    {"gemma2", JSON({"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2,
                     "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50,
                     "final_logit_softcapping": 30}),
     "sliding_window_pattern", GEGLU, .gemma = true},
    {"gemma3_text", JSON({"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
                          "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                          "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 6,
                          "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "query_pre_attn_scalar": 256,
                          "rope_theta": 1e6, "rope_local_base_freq": 10000, "attn_logit_softcapping": null}),
     "attn_logit_softcapping", GEGLU, .gemma = true, .head_norms = true},
    {.model_type = "gemma3", .nested = "gemma3_text"},
    {0}};
/* clang-format on */
