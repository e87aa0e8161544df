"""Makes tests/fixtures/gguf and tests/goldens/gguf.json with gguf-py, llama.cpp's own reader and writer of GGUF.

    python tests/make_gguf.py
    needs: pip install gguf torch transformers safetensors

fixtures/gguf/TYPE.gguf: a small random Llama whose matrices are of that type (Q4_K_M: of two), and logits.json: what
transformers computes in float32 from the same weights, which gguf-py dequantised. Where gguf-py quantises, weights are
rounded that way; blocks of other types are random bits with scales that give sane weights.
goldens/gguf.json: SHA-256 of the files that gguf-py writes from the other fixtures, under the names that gguf-py has
for the hub's tensors, with rows permuted as llama.cpp's converter does. Tests make the same files without gguf-py.
"""
import hashlib
import json
import math
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
import gguf_files
from test_gguf import MODELS

FIXTURES, GOLDENS = Path(__file__).parent / "fixtures", Path(__file__).parent / "goldens"
IDS = [1, 5, 9, 2, 17, 11, 3, 20]
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,)}
SIZES = {"Q2_K": 0.004, "Q3_K": 0.001, "Q4_K": 0.0004, "Q5_K": 0.0002, "Q6_K": 0.0001, "IQ4_XS": 0.0001, "IQ4_NL": 0.002}


def encoded(w, name, rng):
    """Rows of w in a type, as gguf-py quantises them, or random ones; and the weights that they stand for."""
    kind = Kind[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    if name in SCALES:
        blocks = rng.integers(0, 256, (w.size // values, size), dtype=np.uint8)
        for at in SCALES[name]:
            d = (SIZES[name] * rng.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
            blocks[:, at:at + 2] = d.view(np.uint8).reshape(-1, 2)
        data = blocks.reshape(len(w), -1)
    else:
        data = gguf.quants.quantize(w, kind)
    return data, gguf.quants.dequantize(data, kind).astype(np.float32).reshape(w.shape)


def write(path, metadata, tensors):
    """tensors: (name, array of its values or of its bytes, type)."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    writer.kv_data[0].clear()  # general.architecture is among the others
    for key, x in metadata.items():
        kind = (gguf.GGUFValueType.BOOL if isinstance(x, bool) else gguf.GGUFValueType.UINT32 if isinstance(x, int)
                else gguf.GGUFValueType.get_type(x))
        writer.add_key_value(key, x, kind)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_type(name, seed):
    """A Llama of one layer; o_proj and down_proj, whose rows are shorter than a block of 256, are F16. In Q4_K_M v_proj and
    the embedding, which is the head too, are Q6_K, so that q, k and v differ as in most layers of such files."""
    most, some = name.removesuffix("_M"), "Q6_K" if name.endswith("_M") else name
    rng, values = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[Kind[most]][0]
    dim, heads, d, ffn, vocab = max(values, 64), 2, 8, 16, 24
    config = LlamaConfig(vocab_size=vocab, hidden_size=dim, intermediate_size=ffn, num_hidden_layers=1, head_dim=d,
                         num_attention_heads=heads, num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-5,
                         tie_word_embeddings=True, rope_theta=100.0)
    model = LlamaForCausalLM(config).float().eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    metadata = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
                "llama.embedding_length": dim, "llama.feed_forward_length": ffn, "llama.attention.head_count": heads,
                "llama.attention.head_count_kv": 1, "llama.attention.key_length": d, "llama.attention.value_length": d,
                "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 100.0,
                "llama.rope.dimension_count": d} | gguf_files.letters(vocab)
    tensors = []
    with torch.no_grad():
        for hub, p in model.named_parameters():
            w = (rng.standard_normal(tuple(p.shape)) * (1.5 / np.sqrt(p.shape[-1]))).astype(np.float32)
            to = names.get_name(hub, try_suffixes=(".weight",))
            if p.ndim == 1:
                data, kind = 1 + w, Kind.F32
                w = data
            elif p.shape[1] % values:
                data, kind = w.astype(np.float16), Kind.F16
                w = data.astype(np.float32)
            else:
                own = some if "v_proj" in hub or "embed" in hub else most
                kind = Kind[own]
                data, w = encoded(w, own, rng)
            tensors.append((to, data, kind))
            if hub.endswith(("q_proj.weight", "k_proj.weight")):  # the file's rows are neighbours that turn
                w = w.reshape(-1, d // 2, 2, dim).swapaxes(1, 2).reshape(w.shape)
            p.copy_(torch.from_numpy(np.ascontiguousarray(w)))
        write(FIXTURES / "gguf" / f"{name}.gguf", metadata, tensors)
        logits = model(torch.tensor([IDS])).logits[0]
    print(f"{name}: {(FIXTURES / 'gguf' / f'{name}.gguf').stat().st_size:,} bytes, logits {logits.std():.2f}")
    return [float(f"{x:.9g}") for x in logits.flatten()]


def make_types():
    names = [name for name in gguf_files.TYPES if name not in ("F32", "F16")] + ["Q4_K_M"]
    out = {"ids": IDS} | {name: make_type(name, seed) for seed, name in enumerate(names)}
    (FIXTURES / "gguf" / "logits.json").write_text(json.dumps(out) + "\n")


def hub_tensors(folder):
    """Name -> (values or bytes, type), by torch's reader of safetensors."""
    out = {}
    for path in sorted(folder.glob("model*.safetensors")):
        out |= load_file(path)
    return out


def converted(fixture):
    """SHA-256 of what gguf-py writes for a fixture: the metadata is the tests', tensors, names and types are not."""
    folder = FIXTURES / fixture
    config = json.loads((folder / "config.json").read_text())
    metadata, ours = gguf_files.convert(folder)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == metadata["general.architecture"])
    names, theirs = gguf.get_tensor_name_map(arch, config["num_hidden_layers"]), {}
    gemma = config["model_type"].startswith("gemma")

    def put(hub, w):
        to = names.get_name(hub, try_suffixes=(".weight", ".bias"))
        if not to and ".mlp." in hub:  # a dense layer among experts, which no file of qwen3moe has
            to = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"]).get_name(hub, (".weight",))
        assert to, hub
        if w.ndim == 1 or to.endswith("ffn_gate_inp.weight"):
            w = w.float()
        theirs[to] = w
    experts = {}
    for hub, w in hub_tensors(folder).items():
        layer = int(hub.split("layers.")[1].split(".")[0]) if "layers." in hub else -1
        if layer >= config["num_hidden_layers"]:
            continue
        if "_blocks" in hub or "_scales" in hub or (config["model_type"] == "gpt_oss" and ".experts." in hub):
            experts[hub] = w
            continue
        if ".experts." in hub:
            where, i, part = hub.removesuffix(".weight").rsplit(".", 2)
            experts.setdefault(f"{where}.{part}.weight", {})[int(i)] = w
            continue
        if hub.endswith("e_score_correction_bias"):
            hub = hub.replace("e_score_correction_bias", "e_score_correction.bias")  # so do the converters,
        if hub.endswith("sinks"):
            hub += ".weight"  # and so
        if arch == gguf.MODEL_ARCH.LLAMA and hub.rsplit(".", 2)[1] in ("q_proj", "k_proj"):  # as LlamaModel.permute
            heads = config["num_attention_heads" if "q_proj" in hub else "num_key_value_heads"] \
                if "num_key_value_heads" in config else config["num_attention_heads"]
            w = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        if gemma and hub.endswith("norm.weight"):
            w = (w.double() + 1)
        if gemma and hub.endswith(("q_norm.weight" if "gemma3" in config["model_type"] else "q_proj.weight",)):
            w = (w.double() * math.sqrt(config["head_dim"] / config["query_pre_attn_scalar"])).float()
        if hub.endswith("kv_b_proj.weight"):  # as DeepseekV2Model
            nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
            k, v = torch.split(w.view(config["num_attention_heads"], nope + v, w.shape[-1]), [nope, v], dim=1)
            put(hub.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2).contiguous())
            put(hub.replace("kv_b_proj", "v_b_proj"), v.contiguous())
            continue
        put(hub, w)
    for hub, w in experts.items():
        if isinstance(w, dict):
            put(hub, torch.stack([w[i] for i in range(len(w))]))
        elif hub.endswith("_bias"):
            bias = {"gate_proj": w[:, ::2], "up_proj": w[:, 1::2]} if "gate_up" in hub else {"down_proj": w}
            for part, one in bias.items():
                theirs[names.get_name(hub.rsplit(".", 1)[0] + "." + part) + ".bias"] = one.float().contiguous()
        elif hub.endswith("_blocks"):
            scales = experts[hub.replace("_blocks", "_scales")]
            packed = mxfp4(w, scales)
            matrices = {"gate_proj": packed[:, ::2], "up_proj": packed[:, 1::2]} if "gate_up" in hub else {"down_proj": packed}
            for part, one in matrices.items():
                theirs[names.get_name(hub.rsplit(".", 1)[0] + "." + part) + ".weight"] = one.contiguous()
    theirs |= {name: torch.tensor(np.frombuffer(raw, np.float32)) for name, _, _, raw in ours if name == "rope_freqs.weight"}
    assert theirs.keys() == {name for name, *_ in ours}, theirs.keys() ^ {name for name, *_ in ours}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        write(path, metadata, [(name, *as_array(theirs[name])) for name, *_ in ours])
        return hashlib.sha256(path.read_bytes()).hexdigest()


def mxfp4(blocks, scales):
    """The hub's to GGUF's, as GptOssModel of the converter: codes of a block apart, then first and second half paired."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([scales[..., None], packed], -1).flatten(-2)


def as_array(w):
    if w.dtype == torch.uint8:
        return w.numpy(), Kind.MXFP4
    if w.dtype == torch.bfloat16:
        return w.view(torch.uint8).numpy(), Kind.BF16
    return (w.numpy(), Kind.F16) if w.dtype == torch.float16 else (w.float().numpy(), Kind.F32)


if __name__ == "__main__":
    make_types()
    sums = {fixture: converted(fixture) for fixture, _ in MODELS}
    (GOLDENS / "gguf.json").write_text(json.dumps(sums, indent=1) + "\n")
