"""Makes tests/fixtures: small random models with what transformers computes from them, for tests of every stage.

    python tests/make_fixtures.py [NAME ...]        (default: all; the trained fixture parrot: make_parrot.py)
    needs: pip install torch transformers safetensors accelerate

fixtures/NAME/config.json and model.safetensors (or shards with their index) look like a published model. Weights are
rounded to the stored type first (experts of gpt-oss to MXFP4), so golden.safetensors is the truth for exactly these
files. It holds, float32 unless said, one row a token:
    ids                     I32 (n)
    layers.I.q, .k, .v      (n, heads * head_dim), q and k after rope; latent attention: k is the normed latent and the
                            turned rope key, there is no v, and neighbours that turned stay neighbours
    layers.I.attn           (n, heads * head_dim) output of attention before o_proj
    layers.I.attn_residual  (n, dim) residual after attention
    layers.I.experts        I32 (n, top_k) chosen experts, the first choice first; absent in dense layers
    layers.I.weights        (n, top_k) their weights; absent in dense layers
    layers.I.act            (n, top_k, ffn_dim) input of each chosen expert's down_proj; dense layers: top_k is 1
    layers.I.residual       (n, dim) after the layer
    logits                  (n, vocab)
Tokens are chosen so that no two neighbours in the router's order come close, nor the last group of experts that stays
and the next: rounding must not change who is chosen.
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


def stored_tensors(model, dtype):
    """The tensors as published, for the parameters of a model; rounds these parameters to what is stored."""
    tensors = {}
    for name, p in model.named_parameters():
        if p.ndim == 3 and model.config.model_type == "gpt_oss":
            # (experts, in, out) here, (experts, out, in / 32, 16) in the file
            blocks, scales = mxfp4_pack(p.data.transpose(1, 2))
            p.data = mxfp4_unpack(blocks, scales).transpose(1, 2).contiguous()
            assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), p.data)
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
            continue
        stored = p.data.to(dtype)
        p.data = stored.float()
        if model.config.model_type == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if p.ndim == 3:  # (experts, out, in) here, gate above up; a tensor for each matrix in the file
            where, matrix = name.rsplit(".", 1)
            for i, one in enumerate(stored):
                halves = one.chunk(2) if matrix == "gate_up_proj" else [one]
                parts = ["gate_proj", "up_proj"] if matrix == "gate_up_proj" else ["down_proj"]
                for part, half in zip(parts, halves):
                    if model.config.model_type == "mixtral":
                        part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
                    tensors[f"{where}.{i}.{part}.weight"] = half.contiguous()
        else:
            tensors[name] = stored
    tensors |= {name: b for name, b in model.named_buffers() if name.endswith(".e_score_correction_bias")}
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


def router_of(layer):
    return getattr(layer.mlp, "router", getattr(layer.mlp, "gate", None)) if hasattr(layer.mlp, "experts") else None


def compared(config, router, logits):
    """What decides who is chosen, and by how much the last group that stays is better than the next; both as if they
    were logits (a sigmoid's slope is 1/4 or less)."""
    bias = getattr(router, "e_score_correction_bias", None)
    c = logits if bias is None else (logits.sigmoid() + bias) * 4
    if getattr(config, "n_group", None) is None or getattr(config, "topk_method", None) == "greedy":
        return c, torch.full(c.shape[:-1], math.inf)
    in_groups = c.unflatten(-1, (config.n_group, -1))
    group = in_groups.topk(1 if bias is None else 2).values.sum(-1)
    order = group.sort(descending=True).values
    last, following = order[..., config.topk_group - 1], order[..., config.topk_group]
    return in_groups.masked_fill((group < last[..., None])[..., None], -math.inf).flatten(-2), last - following


@torch.no_grad()
def golden(model, ids):
    """Everything the taps show, from hooks and from inside the eager attention of transformers."""
    g, tokens = {"ids": ids.int()}, len(ids)
    config, source = model.config, sys.modules[type(model).__module__]
    eager, latents, choices = source.eager_attention_forward, {}, {}

    def as_stored(x):
        """The turned part of each head with neighbours beside each other, as in the weights."""
        if config.model_type != "deepseek_v3":
            return x
        turned = x[..., -config.qk_rope_head_dim:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat([x[..., :-config.qk_rope_head_dim], turned], -1)

    def attention(module, q, k, v, *args, **kwargs):
        out = eager(module, q, k, v, *args, **kwargs)
        i, q, k, v = module.layer_idx, as_stored(q[0].transpose(0, 1)), as_stored(k[0].transpose(0, 1)), v[0]
        if i in latents:
            k = torch.cat([latents[i], k[:, 0, -config.qk_rope_head_dim:]], -1)
        else:
            keep(i, "v", v.transpose(0, 1).reshape(tokens, -1))
        for stage, x in ("q", q), ("k", k), ("attn", out[0][0]):
            keep(i, stage, x.reshape(tokens, -1))
        return out

    def keep(layer, stage, x):
        g[f"layers.{layer}.{stage}"] = x.detach().clone().contiguous()

    def watch(i, layer):
        behind = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        yield behind.register_forward_pre_hook(lambda m, a: keep(i, "attn_residual", a[0][0]))
        yield layer.register_forward_hook(
            lambda m, a, out: keep(i, "residual", (out[0] if isinstance(out, tuple) else out).reshape(tokens, -1)))
        if hasattr(config, "kv_lora_rank"):
            yield layer.self_attn.kv_a_layernorm.register_forward_hook(
                lambda m, a, out: latents.update({i: out.reshape(tokens, -1)}))
        if not hasattr(layer.mlp, "experts"):
            yield layer.mlp.down_proj.register_forward_pre_hook(lambda m, a: keep(i, "act", a[0].transpose(0, 1)))
            return

        def routed(experts, args):
            x, chosen, weights = args
            order = choices[i].gather(1, chosen).argsort(1, descending=True)
            chosen, weights = chosen.gather(1, order), weights.gather(1, order)
            if config.model_type == "gpt_oss":
                pre = torch.einsum("nd,nkdf->nkf", x, experts.gate_up_proj[chosen]) + experts.gate_up_proj_bias[chosen]
                keep(i, "pre", pre)
                keep(i, "act", experts._apply_gate(pre))
            else:
                gate, up = torch.einsum("nd,nkfd->nkf", x, experts.gate_up_proj[chosen]).chunk(2, -1)
                keep(i, "act", experts.act_fn(gate) * up)
            keep(i, "experts", chosen.int())
            keep(i, "weights", weights)
        router = router_of(layer)
        yield router.register_forward_hook(lambda m, a, out: choices.update({i: compared(config, m, out[0])[0]}))
        yield layer.mlp.experts.register_forward_pre_hook(routed)

    hooks = [hook for i, layer in enumerate(model.model.layers) for hook in watch(i, layer)]
    with patch.object(source, "eager_attention_forward", attention):
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
    routers = [r for r in map(router_of, model.model.layers) if r is not None]
    if not routers:
        return torch.randint(config.vocab_size, (n,), generator=generator)
    ids, margins, worst, tries = torch.empty(0, dtype=torch.long), [], math.inf, 32

    def measure(router, args, out):
        c, groups = compared(config, router, out[0].unflatten(0, (tries, -1))[:, -1])
        top = c.topk(config.num_experts_per_tok + 1).values
        margins.append(torch.minimum((top[..., :-1] - top[..., 1:]).amin(1), groups))
    hooks = [router.register_forward_hook(measure) for router in routers]
    for t in range(n):
        candidates = torch.randint(config.vocab_size, (tries, 1), generator=generator)
        margins.clear()
        model(torch.cat([ids.expand(tries, t), candidates], 1), use_cache=False)
        margin, best = torch.stack(margins, 1).amin(1).max(0)
        worst = min(worst, margin.item())
        ids = torch.cat([ids, candidates[best]])
    for hook in hooks:
        hook.remove()
    assert worst > MARGIN, worst
    return ids


GAIN = {"q_proj": 1.3, "k_proj": 1.3, "v_proj": 1, "o_proj": 2, "router": 2, "gate_up_proj": 3, "down_proj": 0.3,
        "gate_proj": 2, "up_proj": 2, "lm_head": 2, "gate": 2, "q_a_proj": 1, "q_b_proj": 1.3, "kv_b_proj": 1.3,
        "kv_a_proj_with_mqa": 1}


@torch.no_grad()
def randomize(model, generator):
    """Weights with which every step matters: biases, sinks and norms too, attention far from uniform."""
    gemma = model.config.model_type.startswith("gemma")
    for name, p in model.named_parameters():
        p.normal_(generator=generator)
        layer_name = name.removesuffix(".weight").split(".")[-1]
        if layer_name.endswith("norm"):
            p.mul_(0.2).add_(0 if gemma else 1)  # Gemma adds the 1 itself
        elif layer_name == "sinks":
            p.mul_(1.5)
        elif layer_name.endswith("bias"):
            p.mul_(0.3)
        elif layer_name == "embed_tokens":
            p.mul_(1 / math.sqrt(p.shape[1]) if gemma else 1)  # and multiplies with that root
        else:
            fan_in = p.shape[1 if model.config.model_type == "gpt_oss" else -1]  # (out, in), gpt_oss (experts, in, out)
            p.mul_(GAIN[layer_name] / math.sqrt(fan_in))
    for name, b in model.named_buffers():  # large, as trained ones are: 1 % of one changes who is chosen
        if name.endswith(".e_score_correction_bias"):
            b.normal_(generator=generator).mul_(0.1).add_(20)


def load(folder):
    """As anyone would load it: transformers in float32 on the CPU, MXFP4 dequantised (to bf16, which is exact)."""
    config = AutoConfig.from_pretrained(folder)
    how = {"quantization_config": Mxfp4Config(dequantize=True)} if hasattr(config, "quantization_config") else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                experts_implementation="eager", **how).float()


def make(name, config, n, seed, dtype=torch.bfloat16, shards=1, more=()):
    """config: the text of config.json, or a LlamaConfig that transformers shall write its own way. more: names of
    tensors that such files hold too and that do not count."""
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
    tensors = stored_tensors(model, dtype) | {name: torch.ones(2, dtype=dtype) for name in more}
    if (folder / "config.json").exists():
        save_model(folder, tensors, shards)
    else:
        copy.deepcopy(model).to(dtype).save_pretrained(folder)
    g = golden(model, choose_ids(model, n, generator))
    about = "latent attention"
    if not hasattr(config, "kv_lora_rank"):
        about = f"attention logits vary by {', '.join(f'{s:.1f}' for s in attention_spread(model, g))}"
    if config.model_type == "gpt_oss":
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


def family(model_type, layers, dim, heads, ffn, vocab, **more):
    """Keys that all published files have."""
    return {"bos_token_id": 1, "eos_token_id": 2, "hidden_size": dim, "intermediate_size": ffn,
            "max_position_embeddings": 512, "model_type": model_type, "num_attention_heads": heads,
            "num_hidden_layers": layers, "rms_norm_eps": 1e-05, "rope_theta": 1000.0, "vocab_size": vocab,
            "torch_dtype": "bfloat16", "hidden_act": "silu", **more}


def make_mistral():
    """A window in every layer, heads * head_dim != dim as in Nemo."""
    make("mistral", family("mistral", 2, 56, 4, 96, 139, head_dim=16, num_key_value_heads=2, sliding_window=6,
                           tie_word_embeddings=False), n=16, seed=6)


def make_mixtral():
    """Experts as separate tensors, some of one layer in another file; weights of the chosen add up to 1."""
    make("mixtral", family("mixtral", 2, 48, 4, 40, 131, num_key_value_heads=2, sliding_window=None,
                           num_local_experts=6, num_experts_per_tok=2, tie_word_embeddings=False),
         n=14, seed=7, dtype=torch.float16, shards=3)


def make_qwen2():
    """Biases of q, k and v, and a window from a layer on."""
    make("qwen2", family("qwen2", 3, 56, 7, 88, 137, num_key_value_heads=1, max_window_layers=1, sliding_window=6,
                         use_sliding_window=True, tie_word_embeddings=True), n=14, seed=8)


def make_qwen3_moe():
    """A dense layer among those with experts; the weights of the chosen do not add up to 1."""
    make("qwen3_moe", family("qwen3_moe", 3, 48, 4, 72, 127, num_key_value_heads=2, head_dim=16, num_experts=8,
                             num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=False,
                             decoder_sparse_step=1, mlp_only_layers=[1], sliding_window=None, max_window_layers=48,
                             use_sliding_window=False, tie_word_embeddings=False), n=16, seed=9)


def make_gemma2():
    """Its real head size; caps small enough to matter; query_pre_attn_scalar is not the head size."""
    make("gemma2", family("gemma2", 2, 32, 2, 80, 129, num_key_value_heads=1, head_dim=256, sliding_window=6,
                          hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
                          query_pre_attn_scalar=144, attn_logit_softcapping=4.0, final_logit_softcapping=3.0,
                          cache_implementation="hybrid"), n=10, seed=10)


def make_gemma3():
    """Two ropes, the one of layers that see all scaled; two of three layers have a window."""
    config = family("gemma3_text", 3, 48, 4, 80, 133, num_key_value_heads=2, head_dim=32, sliding_window=6,
                    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=40, attn_logit_softcapping=None,
                    final_logit_softcapping=None, rope_local_base_freq=100.0, sliding_window_pattern=3,
                    rope_scaling={"factor": 8.0, "rope_type": "linear"})
    del config["hidden_act"]
    make("gemma3", config, n=14, seed=11)


def deepseek(model_type, layers, heads, nope, v, yarn, **more):
    config = family(model_type, layers, 48, heads, 80, 125, kv_lora_rank=512, qk_nope_head_dim=nope,
                    qk_rope_head_dim=64, v_head_dim=v, moe_intermediate_size=16, n_routed_experts=16,
                    num_experts_per_tok=4, num_key_value_heads=heads, attention_bias=False, rope_scaling=yarn | {
                        "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 64,
                        "type": "yarn"}, moe_layer_freq=1, tie_word_embeddings=False, **more)
    return config | {"rms_norm_eps": 1e-6}


def make_deepseek_v3():
    """The real latent and rope sizes; sigmoid router with bias and groups, a dense and a left out layer."""
    make("deepseek_v3", deepseek("deepseek_v3", 2, 2, 16, 16, {"mscale": 1.0, "mscale_all_dim": 1.0},
                                 q_lora_rank=40, n_shared_experts=1, n_group=4, topk_group=2, norm_topk_prob=True,
                                 routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
                                 first_k_dense_replace=1, num_nextn_predict_layers=1),
         n=10, seed=12, more=["model.layers.2.enorm.weight", "model.layers.2.shared_head.norm.weight"])


def make_deepseek_v2():
    """Groups of experts by their best, weights as they are times a factor; the ratio of mscales is not 1."""
    make("deepseek_v2", deepseek("deepseek_v2", 1, 2, 32, 16, {"mscale": 1.0, "mscale_all_dim": 0.5},
                                 q_lora_rank=40, n_shared_experts=2, n_group=4, topk_group=2, norm_topk_prob=False,
                                 routed_scaling_factor=4.0, scoring_func="softmax", topk_method="group_limited_greedy",
                                 first_k_dense_replace=0), n=10, seed=13)


def make_deepseek_v2_lite():
    """The real sizes of a head; no q_a, no groups."""
    make("deepseek_v2_lite", deepseek("deepseek_v2", 1, 1, 128, 128, {"mscale": 0.707, "mscale_all_dim": 0.707},
                                      q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1,
                                      norm_topk_prob=False, routed_scaling_factor=1.0, scoring_func="softmax",
                                      topk_method="greedy", first_k_dense_replace=0), n=10, seed=14)


MAKERS = {name.removeprefix("make_"): maker for name, maker in list(globals().items()) if name.startswith("make_")}

if __name__ == "__main__":
    for fixture in sys.argv[1:] or MAKERS:
        MAKERS[fixture]()
