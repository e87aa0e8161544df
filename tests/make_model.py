"""Writes a random model of gpt-oss's size: names, types, shapes and shards as published, with sane values, for tests of
loading, memory and speed that need no download.

    TEST_DATA=DIR python tests/make_model.py --like gpt-oss-20b|gpt-oss-120b DIR [--layers N] [--tokenizer DIR]
    needs: pip install numpy; TEST_DATA with the small published files (config.json, model.safetensors.index.json, ...)

A pool of random values is tiled over the tensors from a different offset each, so that the time goes into writing:
about 14 GB (20b) in seconds on /dev/shm. --layers writes a shallower model. --tokenizer: where tokenizer.json and its
companions lie, a model's directory or one laid out like TEST_DATA (the default).
"""
import argparse
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np

SEED = 7
POOL = 1 << 24  # values
CHUNK = 1 << 24  # bytes copied at once
SHARD = 5 << 30  # bytes, where no published index says what lies where
COMPANIONS = ["generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
              "chat_template.jinja"]


def tensors(config):
    """{name: (dtype, shape)} of a published gpt-oss checkpoint."""
    dim, ffn, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads, head_dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, kv = heads * head_dim, kv_heads * head_dim
    layer = {
        "input_layernorm.weight": ("BF16", (dim,)),
        "mlp.experts.down_proj_bias": ("BF16", (experts, dim)),
        "mlp.experts.down_proj_blocks": ("U8", (experts, dim, ffn // 32, 16)),
        "mlp.experts.down_proj_scales": ("U8", (experts, dim, ffn // 32)),
        "mlp.experts.gate_up_proj_bias": ("BF16", (experts, 2 * ffn)),
        "mlp.experts.gate_up_proj_blocks": ("U8", (experts, 2 * ffn, dim // 32, 16)),
        "mlp.experts.gate_up_proj_scales": ("U8", (experts, 2 * ffn, dim // 32)),
        "mlp.router.bias": ("BF16", (experts,)),
        "mlp.router.weight": ("BF16", (experts, dim)),
        "post_attention_layernorm.weight": ("BF16", (dim,)),
        "self_attn.k_proj.bias": ("BF16", (kv,)),
        "self_attn.k_proj.weight": ("BF16", (kv, dim)),
        "self_attn.o_proj.bias": ("BF16", (dim,)),
        "self_attn.o_proj.weight": ("BF16", (dim, q)),
        "self_attn.q_proj.bias": ("BF16", (q,)),
        "self_attn.q_proj.weight": ("BF16", (q, dim)),
        "self_attn.sinks": ("BF16", (heads,)),
        "self_attn.v_proj.bias": ("BF16", (kv,)),
        "self_attn.v_proj.weight": ("BF16", (kv, dim)),
    }
    out = {f"model.layers.{i}.{name}": t for i in range(config["num_hidden_layers"]) for name, t in layer.items()}
    out["model.norm.weight"] = ("BF16", (dim,))
    out["model.embed_tokens.weight"] = out["lm_head.weight"] = ("BF16", (config["vocab_size"], dim))
    return out


def nbytes(dtype, shape):
    return prod(shape) * (2 if dtype == "BF16" else 1)


def bf16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make_pools(rng):
    """Bytes to tile, by kind of tensor. A matrix keeps the size of what it multiplies (0.019 is 2880 ** -0.5, and so is about
    what dequantised blocks spread), but what a layer adds to the residual stream is small against it: else 24 random layers
    are chaos, where rounding to bf16 alone changes every logit."""
    normal = rng.standard_normal(POOL, dtype=np.float32)
    pools = {"norm": bf16(1 + 0.1 * normal), "weight": bf16(0.019 * normal), "bias": bf16(0.02 * normal),
             "embed": bf16(normal), "o": bf16(0.003 * normal), "blocks": rng.integers(0, 256, POOL, np.uint8),
             "scales": rng.integers(119, 121, POOL, np.uint8), "down.scales": rng.integers(116, 118, POOL, np.uint8)}
    return {name: np.concatenate([pool.view(np.uint8), pool.view(np.uint8)[:CHUNK]]) for name, pool in pools.items()}


def kind(name):
    if name.endswith("norm.weight"):
        return "norm"
    for some, pool in ("embed_tokens", "embed"), ("o_proj.weight", "o"), ("down_proj_scales", "down.scales"):
        if some in name:
            return pool
    last = name.replace("_", ".").split(".")[-1]
    return "bias" if last == "sinks" else last


def write_shard(path, shard, pools, threads, rng):
    """Writes the header and lets threads fill the tensors; returns what they have to do. The file is mapped, because
    writes to one file of /dev/shm wait for each other."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in sorted(shard.items()):
        size = nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + at)
    data, jobs = np.memmap(path, np.uint8, "r+", 8 + len(text)), []
    for name in shard:
        pool = pools[kind(name)]
        begin, end = header[name]["data_offsets"]
        for to in range(begin, end, CHUNK):
            size, start = min(CHUNK, end - to), 2 * int(rng.integers(0, (len(pool) - CHUNK) // 2))
            jobs.append(threads.submit(np.copyto, data[to:to + size], pool[start:start + size]))
    return jobs


def shards_of(table, index):
    """{file: its tensors}, as a published index says, or filled one after the other."""
    files, done, total = {}, 0, sum(nbytes(*t) for t in table.values())
    count = -(-total // SHARD)
    for name, t in table.items():
        file = index[name] if index else f"model-{done // SHARD:05}-of-{count - 1:05}.safetensors"
        files.setdefault(file, {})[name] = t
        done += nbytes(*t)
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--like", choices=["gpt-oss-20b", "gpt-oss-120b"], required=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokenizer", type=Path)
    args = parser.parse_args()
    data = Path(os.environ["TEST_DATA"])
    published = data / "gpt-oss-20b" if args.like == "gpt-oss-20b" else data / "configs" / args.like
    tokenizer = args.tokenizer or data
    if (tokenizer / "gpt-oss-20b").is_dir():
        tokenizer /= "gpt-oss-20b"

    config = json.load(open(published / "config.json"))
    if args.layers:
        config["num_hidden_layers"] = args.layers
        config["layer_types"] = config["layer_types"][:args.layers]
    table = tensors(config)
    total = sum(nbytes(*t) for t in table.values())
    index = None
    if (published / "model.safetensors.index.json").exists():
        index = json.load(open(published / "model.safetensors.index.json"))
        assert args.layers or (index["metadata"]["total_size"] == total and index["weight_map"].keys() == table.keys())
        index = index["weight_map"]
    files = shards_of(table, index)

    args.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.folder).free
    if free < total:
        sys.exit(f"{args.folder}: {total:,} bytes wanted, {free:,} free")
    for name, value in ("config.json", config), ("model.safetensors.index.json", {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, shard in files.items() for name in shard}}):
        (args.folder / name).write_text(json.dumps(value, indent=2) + "\n")
    for name in COMPANIONS:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, args.folder / name)
    rng = np.random.default_rng(SEED)
    pools = make_pools(rng)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        jobs = [job for file, shard in sorted(files.items())
                for job in write_shard(args.folder / file, shard, pools, threads, rng)]
        for job in jobs:
            job.result()
    print(f"{args.folder}: {config['num_hidden_layers']} layers, {len(files)} files, {total:,} bytes of tensors")


if __name__ == "__main__":
    main()
