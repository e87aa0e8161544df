/* deepseek.c: DeepSeek V2 and V3: latent attention, groups of experts, shared experts. */
#include "host.h"

/* clang-format off */
const Family deepseek[] = {
    {"deepseek_v2", JSON({"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                          "v_head_dim": 128, "n_shared_experts": 2, "scoring_func": "softmax",
                          "topk_method": "greedy", "rope_interleave": true}),
     "rope_interleave", .latent = true, .moe = EXPERTS("mlp.gate", "n_routed_experts", "moe_intermediate_size")},
    {"deepseek_v3", JSON({"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                          "v_head_dim": 128, "n_shared_experts": 1, "scoring_func": "sigmoid",
                          "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 2.5,
                          "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "rope_interleave": true}),
     .latent = true, .moe = EXPERTS("mlp.gate", "n_routed_experts", "moe_intermediate_size")},
    {0}};
/* clang-format on */
