"""Writes GGUF files from the hub's: the tests' own side of the format, which gguf-py checks (make_gguf.py)."""
import json
import math
import re
import struct

from helpers import read_json, read_safetensors

TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
         "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
         "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136),
         "BF16": (30, 1, 2), "MXFP4": (39, 32, 17)}  # number, values and bytes of a block


class U16(int):
    """A whole number that is written as such; others become 32 bits, i32 in lists."""


def text(s):
    raw = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(x, element=False):
    """Type and bytes of a value of the metadata."""
    if isinstance(x, bool):
        return 7, struct.pack("<?", x)
    if isinstance(x, U16):
        return 2, struct.pack("<H", x)
    if isinstance(x, int):
        return (5, struct.pack("<i", x)) if element else (4, struct.pack("<I", x))
    if isinstance(x, float):
        return 6, struct.pack("<f", x)
    if isinstance(x, (str, bytes)):
        return 8, text(x)
    parts = [value(one, True) for one in x]
    return 9, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(raw for _, raw in parts)


def gguf(metadata, tensors=(), alignment=32):
    """A file. Tensors are (name, shape as the hub writes it, type, bytes)."""
    head, data = [], b""
    for key, x in metadata.items():
        kind, raw = value(x)
        head.append(text(key) + struct.pack("<I", kind) + raw)
    for name, shape, kind, raw in tensors:
        head.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), TYPES[kind][0], len(data)))
        data += raw + bytes(-len(raw) % alignment)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(head)
    return start + (bytes(-len(start) % alignment) + data if tensors else b"")


def places(raw, first):
    """Where each tensor of a file lies, of which the first has this name: {name: (begin, bytes)}."""
    out, at = {}, raw.index(text(first))
    for _ in range(struct.unpack_from("<Q", raw, 8)[0]):
        n = struct.unpack_from("<Q", raw, at)[0]
        name = raw[at + 8:at + 8 + n].decode()
        dims = struct.unpack_from("<I", raw, at + 8 + n)[0]
        shape = struct.unpack_from(f"<{dims}Q", raw, at + 12 + n)
        kind, offset = struct.unpack_from("<IQ", raw, at + 12 + n + 8 * dims)
        values, size = next(t[1:] for t in TYPES.values() if t[0] == kind)
        out[name] = (offset, math.prod(shape) // values * size)
        at += 24 + n + 8 * dims
    at += -at % 32
    return {name: (at + begin, size) for name, (begin, size) in out.items()}


# ---- models

FAMILIES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
            "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss",
            "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2"}
NAMES = [(r"model\.embed_tokens", "token_embd"), (r"model\.norm", "output_norm"), ("lm_head", "output"),
         (r"input_layernorm", "attn_norm"), (r"self_attn\.([qkv])_proj", r"attn_\1"), (r"self_attn\.o_proj", "attn_output"),
         (r"self_attn\.([qk])_norm", r"attn_\1_norm"), (r"self_attn\.q_a_proj", "attn_q_a"),
         (r"self_attn\.q_a_layernorm", "attn_q_a_norm"), (r"self_attn\.q_b_proj", "attn_q_b"),
         (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"), (r"self_attn\.kv_a_layernorm", "attn_kv_a_norm"),
         (r"self_attn\.kv_b_proj", "attn_kv_b"), (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
         (r"mlp\.shared_experts\.(gate|up|down)_proj", r"ffn_\1_shexp"),
         (r"(mlp|block_sparse_moe)\.(gate|router)", "ffn_gate_inp"), (r"self_attn\.sinks", "attn_sinks.weight"),
         (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
         (r"pre_feedforward_layernorm", "ffn_norm"), (r"post_feedforward_layernorm", "post_ffw_norm")]
EXPERT = re.compile(r"(.*layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
MATRICES = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def translate(name, arch):
    behind = {"gemma2": "post_attention_norm", "gemma3": "post_attention_norm", "gpt-oss": "post_attention_norm"}
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    rest, suffix = name[layer.end():] if layer else name, ""
    if rest.endswith((".weight", ".bias")):
        rest, suffix = rest.rsplit(".", 1)
        suffix = "." + suffix
    for pattern, to in NAMES + [("post_attention_layernorm", behind.get(arch, "ffn_norm"))]:
        if re.fullmatch(pattern, rest):
            return (f"blk.{layer[1]}." if layer else "") + re.sub(pattern, to, rest) + suffix
    raise KeyError(name)


def floats(kind, raw):
    if kind == "F32":
        return struct.unpack(f"<{len(raw) // 4}f", raw)
    if kind == "F16":
        return struct.unpack(f"<{len(raw) // 2}e", raw)
    return struct.unpack(f"<{len(raw) // 2}f", b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2)))


def f32(values):
    return struct.pack(f"<{len(values)}f", *values)


def rows_of(raw, n):
    size = len(raw) // n
    return [raw[i * size:(i + 1) * size] for i in range(n)]


def neighbours(rows, heads):
    """Rows of halves (i, i + d/2) as pairs (2i, 2i + 1), head by head."""
    d = len(rows) // heads
    return [rows[h * d + j * d // 2 + i] for h in range(heads) for i in range(d // 2) for j in range(2)]


def mxfp4(blocks, scales):
    """The hub's blocks, neighbours in a byte, as GGUF's: the scale, then halves of the block in a byte."""
    out = bytearray()
    for i, scale in enumerate(scales):
        codes = [c for byte in blocks[16 * i:16 * i + 16] for c in (byte & 15, byte >> 4)]
        out += bytes([scale]) + bytes(codes[j] | codes[j + 16] << 4 for j in range(16))
    return bytes(out)


def read_model(folder):
    """Name -> (shape, dtype, bytes)."""
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        header, content = read_safetensors(path)
        tensors |= {name: (t["shape"], t["dtype"], content[slice(*t["data_offsets"])])
                    for name, t in header.items() if name != "__metadata__"}
    return tensors


def gpt_oss_experts(tensors, where, layer):
    out = []
    for part, name, first, step in (("gate", "gate_up_proj", 0, 2), ("up", "gate_up_proj", 1, 2), ("down", "down_proj", 0, 1)):
        (n, rows, groups, _), _, blocks = tensors[f"{where}.{name}_blocks"]
        scales = rows_of(tensors[f"{where}.{name}_scales"][2], n * rows)
        lines = [mxfp4(b, s) for b, s in zip(rows_of(blocks, n * rows), scales)][first::step]
        bias = floats(*tensors[f"{where}.{name}_bias"][1:])[first::step]
        out += [(f"blk.{layer}.ffn_{part}_exps.weight", [n, rows // step, groups * 32], "MXFP4", b"".join(lines)),
                (f"blk.{layer}.ffn_{part}_exps.bias", [n, rows // step], "F32", f32(bias))]
    return out


def latent(config, name, shape, kind, raw):
    """kv_b_proj cut by head, the keys' part transposed."""
    heads, nope, v = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    size, rank, keys, values = len(raw) // shape[0] // shape[1], shape[1], b"", b""
    for head in rows_of(raw, heads):
        rows = rows_of(head, nope + v)
        keys += b"".join(row[c * size:(c + 1) * size] for c in range(rank) for row in rows[:nope])
        values += b"".join(rows[nope:])
    return [(name.replace("attn_kv_b", "attn_k_b"), [heads, rank, nope], kind, keys),
            (name.replace("attn_kv_b", "attn_v_b"), [heads, v, rank], kind, values)]


def convert_tensors(folder, config, arch, whole_kv_b):
    tensors, out, stacks = read_model(folder), [], {}
    for name, (shape, kind, raw) in tensors.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        expert = EXPERT.match(name)
        if layer and int(layer[1]) >= config["num_hidden_layers"]:
            continue  # DeepSeek's prediction layer
        if expert:
            stacks.setdefault((int(layer[1]), MATRICES[expert[3]]), {})[int(expert[2])] = (shape, kind, raw)
            continue
        if ".experts." in name:
            if name.endswith("gate_up_proj_blocks"):
                out += gpt_oss_experts(tensors, name.rsplit(".", 1)[0], layer[1])
            continue
        to = translate(name, arch)
        if arch == "llama" and re.search(r"attn_[qk]\.", to):
            heads = config["num_attention_heads"] if "attn_q" in to else config.get("num_key_value_heads", config["num_attention_heads"])
            raw = b"".join(neighbours(rows_of(raw, shape[0]), heads))
        scaled = arch.startswith("gemma") and "attn_q" in to and ("q_norm" in to or arch == "gemma2")
        if len(shape) == 1 or "ffn_gate_inp" in to or scaled:
            numbers = floats(kind, raw)
            if arch.startswith("gemma") and "norm" in to:
                numbers = [1 + x for x in numbers]
            if scaled:  # GGUF has no key for query_pre_attn_scalar
                numbers = [x * math.sqrt(config["head_dim"] / config["query_pre_attn_scalar"]) for x in numbers]
            kind, raw = "F32", f32(numbers)
        out += latent(config, to, shape, kind, raw) if "attn_kv_b" in to and not whole_kv_b else [(to, shape, kind, raw)]
    for (layer, part), stack in stacks.items():
        shape, kind, _ = stack[0]
        out.append((f"blk.{layer}.ffn_{part}_exps.weight", [len(stack), *shape], kind,
                    b"".join(stack[i][2] for i in range(len(stack)))))
    return out


def llama3_divisors(rope, d):
    """What rope_freqs.weight holds for Llama 3.1's scaling."""
    out = []
    for i in range(d // 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-2 * i / d) / (2 * math.pi)
        kept = min(max((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0), 1)
        out.append(1 / (kept + (1 - kept) / rope["factor"]))
    return [("rope_freqs.weight", [d // 2], "F32", f32(out))]


def convert_config(c, arch):
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    heads = c["num_attention_heads"]
    d = c.get("head_dim", 128 if arch == "qwen3" else c["hidden_size"] // heads)
    k = {"block_count": c["num_hidden_layers"], "context_length": c["max_position_embeddings"],
         "embedding_length": c["hidden_size"], "feed_forward_length": c["intermediate_size"], "attention.head_count": heads,
         "attention.head_count_kv": c.get("num_key_value_heads", heads), "attention.layer_norm_rms_epsilon": c["rms_norm_eps"]}
    k["rope.freq_base"] = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    if arch == "deepseek2":
        d, rope_dim = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["qk_rope_head_dim"]
        k |= {"attention.head_count_kv": 1, "attention.key_length": c["kv_lora_rank"] + rope_dim,
              "attention.value_length": c["kv_lora_rank"], "attention.key_length_mla": d,
              "attention.value_length_mla": c["v_head_dim"], "rope.dimension_count": rope_dim,
              "attention.kv_lora_rank": c["kv_lora_rank"], "leading_dense_block_count": c["first_k_dense_replace"],
              "expert_count": c["n_routed_experts"], "expert_used_count": c["num_experts_per_tok"],
              "expert_shared_count": c["n_shared_experts"], "expert_feed_forward_length": c["moe_intermediate_size"],
              "expert_weights_scale": c["routed_scaling_factor"], "expert_weights_norm": c["norm_topk_prob"],
              "expert_gating_func": 2 if c["scoring_func"] == "sigmoid" else 1, "expert_group_count": c["n_group"],
              "expert_group_used_count": c["topk_group"]}
        k |= {"attention.q_lora_rank": c["q_lora_rank"]} if c["q_lora_rank"] else {}
    else:
        k |= {"attention.key_length": d, "attention.value_length": d, "rope.dimension_count": d}
    if kind in ("yarn", "linear"):
        k |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        k |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"],
              "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]), "rope.scaling.yarn_beta_slow": float(rope["beta_slow"])}
    if "mscale_all_dim" in rope:
        k["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if c.get("sliding_window") and arch in ("llama", "gemma2", "gemma3", "gpt-oss"):
        k["attention.sliding_window"] = c["sliding_window"]
    if arch == "gemma2":
        k |= {"attn_logit_softcapping": c["attn_logit_softcapping"], "final_logit_softcapping": c["final_logit_softcapping"]}
    if arch == "gemma3":
        k |= {"attention.sliding_window_pattern": c["sliding_window_pattern"], "rope.freq_base_swa": c["rope_local_base_freq"]}
    if arch in ("qwen3moe", "gpt-oss") or "num_local_experts" in c:
        k |= {"expert_count": c.get("num_experts", c.get("num_local_experts")), "expert_used_count": c["num_experts_per_tok"]}
    if arch in ("qwen3moe", "gpt-oss"):
        k["expert_feed_forward_length"] = c.get("moe_intermediate_size", c["intermediate_size"])
    if arch == "qwen3moe":
        k["expert_weights_norm"] = c["norm_topk_prob"]
    return {"general.architecture": arch} | {f"{arch}.{key}": x for key, x in k.items()}


def letters(n):
    """A vocabulary where none matters."""
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(n)]}


def convert(folder, whole_kv_b=False):
    """Metadata and tensors of the hub's directory, with the letters for a tokenizer."""
    config = read_json(folder / "config.json")
    arch = FAMILIES[config["model_type"]]
    rope = config.get("rope_parameters") or {}
    tensors = convert_tensors(folder, config, arch, whole_kv_b)
    if rope.get("rope_type") == "llama3":
        tensors += llama3_divisors(rope, config["head_dim"])
    return convert_config(config, arch) | letters(config["vocab_size"]), tensors


# ---- tokenizers

# what the hub's tokenizer.json and llama.cpp's converter call the ways of splitting text
PRES = {"llama3.1": "llama-bpe", "qwen2.5": "qwen2", "qwen3": "qwen2", "smollm2": "smollm", "gpt2": "gpt-2",
        "deepseek-r1": "deepseek-v3", "gpt-oss-20b": "gpt-4o", "llama2": None, "mistral-7b-v0.3": None, "gemma2": None,
        "gemma3": None}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def vocabulary(tokenizer, pre, add_bos=None):
    """The keys of a vocabulary: of bytes if `pre` is given, else of SentencePiece's pieces, scored by their first merge."""
    model, tokens = tokenizer["model"], {}
    for token, i in model["vocab"].items():
        byte = pre is None and re.fullmatch("<0x[0-9A-F]{2}>", token)
        tokens[i] = (token, BYTE if byte else NORMAL)
    for added in tokenizer["added_tokens"]:
        content, kind = added["content"], CONTROL if added["special"] else USER_DEFINED
        if content == model.get("unk_token"):
            kind = UNKNOWN
        tokens[added["id"]] = (content if kind != USER_DEFINED or pre else content.replace("\u2581", " "), kind)
    tokens = [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(max(tokens) + 1)]
    out = {"tokenizer.ggml.model": "gpt2" if pre else "llama", "tokenizer.ggml.pre": pre or "default",
           "tokenizer.ggml.tokens": [token for token, _ in tokens], "tokenizer.ggml.token_type": [kind for _, kind in tokens]}
    merges = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    if pre:
        out["tokenizer.ggml.merges"] = [" ".join(m) for m in merges]
    else:
        score = {}
        for rank, (left, right) in enumerate(merges):
            score.setdefault(left + right, float(-rank))
        out["tokenizer.ggml.scores"] = [score.get(token, 0.0 if kind != NORMAL else -1e6) for token, kind in tokens]
        out["tokenizer.ggml.add_space_prefix"] = "Prepend" in json.dumps(tokenizer) or "Metaspace" in json.dumps(tokenizer)
    single = [p for p in (tokenizer["post_processor"] or {}).get("processors", [tokenizer["post_processor"]])
              if p and p["type"] == "TemplateProcessing"]
    first, last = (single[0]["single"][i].get("SpecialToken") if single else None for i in (0, -1))
    out["tokenizer.ggml.add_bos_token"] = first is not None if add_bos is None else add_bos
    if last:
        out["tokenizer.ggml.add_eos_token"] = True
    for key, token in (("bos", first), ("eos", last)):
        if token:
            out[f"tokenizer.ggml.{key}_token_id"] = single[0]["special_tokens"][token["id"]]["ids"][0]
    return out
