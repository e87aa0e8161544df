"""Makes tests/fixtures: small random models with what transformers computes from them, for tests of every stage.

    python tests/make_fixtures.py [NAME ...]        (default: all; the trained fixture parrot: make_parrot.py)
    needs: pip install torch transformers safetensors accelerate

fixtures/NAME/config.json and model.safetensors (or shards with their index) look like a published model. Weights are
rounded to the stored type first (experts of gpt-oss to MXFP4), so golden.safetensors is the truth for exactly these
files. It holds, float32 unless said, one row a token:
    ids                     I32 (n)
    layers.I.q, .k, .v      (n, heads * head_dim), q and k after rope
    layers.I.attn           (n, heads * head_dim) output of attention before o_proj
    layers.I.attn_residual  (n, dim) residual after attention
    layers.I.experts        I32 (n, top_k) chosen experts by descending router logit; absent in dense models
    layers.I.weights        (n, top_k) their weights; absent in dense models
    layers.I.act            (n, top_k, ffn_dim) input of each chosen expert's down_proj; dense models: top_k is 1
    layers.I.residual       (n, dim) after the layer
    logits                  (n, vocab)
Tokens are chosen so that no two neighbours in the router's order come close: rounding must not change who is chosen.
"""
import copy
import json
import math
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

FIXTURES = Path(__file__).parent / "fixtures"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MARGIN = 0.05  # between neighbours among the first top_k + 1 router logits


def mxfp4_pack(w):
    """(..., n) -> blocks (..., n / 32, 16) and scales (..., n / 32): the smallest power of two that clips nothing."""
    w = w.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(w.abs().amax(-1, keepdim=True) / 6)).clamp(-127, 127)
    w = (w * torch.exp2(-exponent)).contiguous()
    middle = (E2M1[1:8] + E2M1[:7]) / 2
    code = torch.bucketize(w.abs(), middle).to(torch.uint8) + 8 * (w < 0).to(torch.uint8)
    return code[..., 0::2] + 16 * code[..., 1::2], (exponent.squeeze(-1) + 127).to(torch.uint8)


def mxfp4_unpack(blocks, scales):
    values = torch.stack([E2M1[(blocks & 15).int()], E2M1[(blocks >> 4).int()]], -1).flatten(-2)
    return (values * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


def is_expert_matrix(name):
    return name.endswith(("gate_up_proj", "down_proj"))


def stored_tensors(model, dtype):
    """The tensors as published, for the parameters of a model; rounds these parameters to what is stored."""
    tensors = {}
    for name, p in model.named_parameters():
        if is_expert_matrix(name):  # (experts, in, out) here, (experts, out, in / 32, 16) in the file
            blocks, scales = mxfp4_pack(p.data.transpose(1, 2))
            p.data = mxfp4_unpack(blocks, scales).transpose(1, 2).contiguous()
            assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), p.data)
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        else:
            tensors[name] = p.data.to(dtype)
            p.data = tensors[name].float()
    return tensors


def save_model(folder, tensors, shards=1):
    """One file, or shards cut in the middle of a layer with model.safetensors.index.json."""
    if shards == 1:
        return save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    total = sum(t.nbytes for t in tensors.values())
    weight_map, done = {}, 0
    for name, t in tensors.items():
        weight_map[name] = f"model-{done * shards // total + 1:05}-of-{shards:05}.safetensors"
        done += t.nbytes
    for file in sorted(set(weight_map.values())):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file, {"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@torch.no_grad()
def golden(model, ids):
    """Everything the taps show, from hooks and from inside the eager attention of transformers."""
    g, tokens = {"ids": ids.int()}, len(ids)
    eager = {m: m.eager_attention_forward for m in (modeling_gpt_oss, modeling_llama, modeling_qwen3)}

    def attention_of(source):
        def attention(module, q, k, v, *args, **kwargs):
            out = eager[source](module, q, k, v, *args, **kwargs)
            for stage, x in (("q", q[0].transpose(0, 1)), ("k", k[0].transpose(0, 1)), ("v", v[0].transpose(0, 1)),
                             ("attn", out[0][0])):
                keep(module.layer_idx, stage, x.reshape(tokens, -1))
            return out
        return attention

    def keep(layer, stage, x):
        g[f"layers.{layer}.{stage}"] = x.detach().clone().contiguous()

    def watch(i, layer):
        yield layer.post_attention_layernorm.register_forward_pre_hook(lambda m, a: keep(i, "attn_residual", a[0][0]))
        yield layer.register_forward_hook(lambda m, a, out: keep(i, "residual", out[0]))
        if not hasattr(layer.mlp, "experts"):
            yield layer.mlp.down_proj.register_forward_pre_hook(lambda m, a: keep(i, "act", a[0].transpose(0, 1)))
            return

        def routed(experts, args):
            x, chosen, weights = args
            pre = torch.einsum("nd,nkdf->nkf", x, experts.gate_up_proj[chosen]) + experts.gate_up_proj_bias[chosen]
            keep(i, "pre", pre)
            keep(i, "act", experts._apply_gate(pre))
            keep(i, "experts", chosen.int())
            keep(i, "weights", weights)
        yield layer.mlp.experts.register_forward_pre_hook(routed)

    hooks = [hook for i, layer in enumerate(model.model.layers) for hook in watch(i, layer)]
    with patch.object(modeling_gpt_oss, "eager_attention_forward", attention_of(modeling_gpt_oss)), \
            patch.object(modeling_llama, "eager_attention_forward", attention_of(modeling_llama)), \
            patch.object(modeling_qwen3, "eager_attention_forward", attention_of(modeling_qwen3)):
        g["logits"] = model(ids[None], use_cache=False).logits[0].clone()
    for hook in hooks:
        hook.remove()
    return g


def check_experts(model, g):
    """The recorded activations, weights and choices give the recorded residual; both clamps were hit."""
    for i, layer in enumerate(model.model.layers):
        experts, chosen = layer.mlp.experts, g[f"layers.{i}.experts"].long()
        out = torch.einsum("nkf,nkfd->nkd", g[f"layers.{i}.act"], experts.down_proj[chosen])
        out = ((out + experts.down_proj_bias[chosen]) * g[f"layers.{i}.weights"].unsqueeze(-1)).sum(1)
        out += g[f"layers.{i}.attn_residual"]
        torch.testing.assert_close(out, g[f"layers.{i}.residual"], rtol=1e-4, atol=1e-4)
    pre = torch.cat([g.pop(f"layers.{i}.pre").flatten() for i in range(len(model.model.layers))])
    gate, up = pre[0::2], pre[1::2]
    assert (gate > 7).any() and (gate < -7).any() and (up > 7).any() and (up < -7).any()
    return (gate > 7).float().mean().item()


def attention_spread(model, g):
    """Standard deviation of the attention logits of the last token, without its mask."""
    config, spread = model.config, []
    for i in range(config.num_hidden_layers):
        k = g[f"layers.{i}.k"].unflatten(-1, (config.num_key_value_heads, -1))
        q = g[f"layers.{i}.q"][-1].unflatten(-1, (config.num_key_value_heads, -1, k.shape[-1]))
        spread.append((torch.einsum("hgd,nhd->hgn", q, k) / math.sqrt(k.shape[-1])).std(-1).mean().item())
    return spread


@torch.no_grad()
def choose_ids(model, n, generator):
    """Token after token the one of 32 random candidates that keeps the router furthest from a tie."""
    config = model.config
    if not hasattr(config, "num_local_experts"):
        return torch.randint(config.vocab_size, (n,), generator=generator)
    ids, logits, worst = torch.empty(0, dtype=torch.long), [], math.inf
    hooks = [layer.mlp.router.register_forward_hook(lambda m, a, out: logits.append(out[0]))
             for layer in model.model.layers]
    for t in range(n):
        candidates = torch.randint(config.vocab_size, (32, 1), generator=generator)
        logits.clear()
        model(torch.cat([ids.expand(32, t), candidates], 1), use_cache=False)
        last = torch.stack([x.unflatten(0, (32, t + 1))[:, -1] for x in logits], 1)
        top = last.topk(config.num_experts_per_tok + 1).values
        margin, best = (top[..., :-1] - top[..., 1:]).amin((1, 2)).max(0)
        worst = min(worst, margin.item())
        ids = torch.cat([ids, candidates[best]])
    for hook in hooks:
        hook.remove()
    assert worst > MARGIN
    return ids


GAIN = {"q_proj": 1.3, "k_proj": 1.3, "v_proj": 1, "o_proj": 2, "router": 2, "gate_up_proj": 3, "down_proj": 0.3,
        "gate_proj": 2, "up_proj": 2, "lm_head": 2}


@torch.no_grad()
def randomize(model, generator):
    """Weights with which every step matters: biases, sinks and norms too, attention far from uniform."""
    for name, p in model.named_parameters():
        p.normal_(generator=generator)
        layer_name = name.removesuffix(".weight").split(".")[-1]
        if layer_name.endswith("norm"):
            p.mul_(0.2).add_(1)
        elif layer_name == "sinks":
            p.mul_(1.5)
        elif layer_name.endswith("bias"):
            p.mul_(0.3)
        elif layer_name != "embed_tokens":
            fan_in = p.shape[1]  # (out, in), and (experts, in, out)
            p.mul_(GAIN[layer_name] / math.sqrt(fan_in))


def load(folder):
    """As anyone would load it: transformers in float32 on the CPU, MXFP4 dequantised (to bf16, which is exact)."""
    config = AutoConfig.from_pretrained(folder)
    how = {"quantization_config": Mxfp4Config(dequantize=True)} if hasattr(config, "quantization_config") else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                experts_implementation="eager", **how).float()


def make(name, config, n, seed, dtype=torch.bfloat16, shards=1):
    """config: the text of config.json, or a LlamaConfig that transformers shall write its own way."""
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    if isinstance(config, dict):
        write_json(folder / "config.json", config)
        config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager",
                                             experts_implementation="eager").eval()
    randomize(model, generator)
    tensors = stored_tensors(model, dtype)
    if (folder / "config.json").exists():
        save_model(folder, tensors, shards)
    else:
        copy.deepcopy(model).to(dtype).save_pretrained(folder)
    g = golden(model, choose_ids(model, n, generator))
    about = f"attention logits vary by {', '.join(f'{s:.1f}' for s in attention_spread(model, g))}"
    if hasattr(config, "num_local_experts"):
        about += f", {100 * check_experts(model, g):.1f} % of gates clamped"
    assert all(x.isfinite().all() for x in g.values())
    save_file(g, folder / "golden.safetensors")
    with torch.no_grad():
        again = load(folder)(g["ids"].long()[None], use_cache=False).logits[0]
    assert torch.equal(again, g["logits"]), (again - g["logits"]).abs().max()
    assert load_file(folder / "golden.safetensors").keys() == g.keys()
    for file in folder.iterdir():
        file.chmod(0o644)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {size:,} bytes, {about}, logits {g['logits'].std():.2f}")


def gpt_oss(layer_types, dim, heads, kv_heads, head_dim, experts, top_k, ffn, vocab, window, theta, yarn):
    """config.json with the keys and the order of the published one."""
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": vocab - 1, "experts_per_token": top_k, "head_dim": head_dim, "hidden_act": "silu",
        "hidden_size": dim, "initial_context_length": yarn["original_max_position_embeddings"],
        "initializer_range": 0.02, "intermediate_size": ffn, "layer_types": [t + "_attention" for t in layer_types],
        "max_position_embeddings": int(yarn["original_max_position_embeddings"] * yarn["factor"]),
        "model_type": "gpt_oss", "num_attention_heads": heads, "num_experts_per_tok": top_k,
        "num_hidden_layers": len(layer_types), "num_key_value_heads": kv_heads, "num_local_experts": experts,
        "output_router_logits": False, "pad_token_id": vocab - 2,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"],
            "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_scaling": yarn | {"rope_type": "yarn"}, "rope_theta": theta,
        "router_aux_loss_coef": 0.9, "sliding_window": window, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": vocab}


def make_true_heads():
    """The heads and experts of gpt-oss-20b, a narrow residual stream; every band of YaRN turns within 24 tokens."""
    make("true_heads", gpt_oss(["sliding", "full"], dim=64, heads=64, kv_heads=8, head_dim=64, experts=32, top_k=4,
                               ffn=64, vocab=256, window=8, theta=100,
                               yarn={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                                     "original_max_position_embeddings": 256, "truncate": False}), n=24, seed=1)


def make_odd():
    """No dimension a power of two, other layers slide, YaRN with its range truncated to whole bands (the default)."""
    make("odd", gpt_oss(["full", "sliding", "full"], dim=96, heads=6, kv_heads=2, head_dim=32, experts=8, top_k=2,
                        ffn=160, vocab=301, window=5, theta=10000,
                        yarn={"beta_fast": 8.0, "beta_slow": 1.0, "factor": 4.0,
                              "original_max_position_embeddings": 256}), n=70, seed=2, shards=2)


def make_llama3():
    """Dense, grouped queries, rope type llama3, one matrix for embedding and head, heads * head_dim != dim."""
    make("llama3", LlamaConfig(
        vocab_size=199, hidden_size=72, intermediate_size=136, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 256}),
         n=40, seed=3, dtype=torch.float16)


def make_llama_bias():
    """Biases in attention, F32, and a config that leaves head_dim and num_key_value_heads to their defaults."""
    make("llama_bias", {
        "architectures": ["LlamaForCausalLM"], "attention_bias": True, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 120, "max_position_embeddings": 256,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.41.2", "vocab_size": 131},
         n=20, seed=4, dtype=torch.float32)


def make_qwen3():
    """Norms of each head's q and k, and head_dim left to its default, which is not hidden_size / heads; keys and order
    of the published config.json. sliding_window does not count, since use_sliding_window is false."""
    make("qwen3", {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02,
        "intermediate_size": 104, "max_position_embeddings": 512, "max_window_layers": 1, "model_type": "qwen3",
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000, "sliding_window": 8, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 163},
         n=24, seed=5)


MAKERS = {"true_heads": make_true_heads, "odd": make_odd, "llama3": make_llama3, "llama_bias": make_llama_bias,
          "qwen3": make_qwen3}

if __name__ == "__main__":
    for fixture in sys.argv[1:] or MAKERS:
        MAKERS[fixture]()
