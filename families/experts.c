/* experts.c: models of the same kind with experts: Mixtral and Qwen3. */
#include "host.h"

/* clang-format off */
const Family experts[] = {
    {"mixtral", JSON({"num_key_value_heads": 8, "sliding_window": null, "norm_topk_prob": true, "rope_theta": 1e6}),
     "norm_topk_prob",
     .moe = {"block_sparse_moe.gate", "block_sparse_moe.experts", ".w1", ".w3", ".w2", "num_local_experts",
             "intermediate_size"}},
    {"qwen3_moe", JSON({"num_key_value_heads": 4, "use_sliding_window": false, "sliding_window": 4096,
                        "moe_intermediate_size": 768}),
     .head_norms = true, .moe = EXPERTS("mlp.gate", "num_experts", "moe_intermediate_size")},
    {0}};
/* clang-format on */
