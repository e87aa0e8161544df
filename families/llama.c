/* llama.c: Llama, Mistral, Qwen: dense models that differ in a few keys. */
#include "host.h"

/* clang-format off */
const Family llama[] = {
    {.model_type = "llama", .defaults = JSON({"max_position_embeddings": 2048})},
    {.model_type = "mistral", .defaults = JSON({"num_key_value_heads": 8, "sliding_window": 4096})},
    {.model_type = "mistral3", .nested = "mistral"},
    {"qwen2", JSON({"use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28}),
     .qkv_bias = true},
    {"qwen3", JSON({"head_dim": 128, "use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28}),
     .head_norms = true},
    {0}};
/* clang-format on */
