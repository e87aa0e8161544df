"""`infer bench` on a small model: what it counts, not how fast it is."""
import json

from helpers import PLAIN, TESTS, infer, refused, same

TINY = TESTS.parent / "models" / "tiny"


def test_rows():
    """A row for each prompt and each depth and number of streams, with the bytes that a step reads."""
    options = "-p 16 -n 4 -d 0,100 -b 1,2 -r 3 -o json".split()
    found = json.loads(infer("bench", TINY, *options).text)
    same([(r["kind"], r["tokens"], r["depth"], r["streams"]) for r in found["rows"]],
         [("prompt", 16, 0, 1)] + [("generate", 4, d, b) for b in (1, 2) for d in (0, 100)], "rows")
    for r in found["rows"]:
        same(r["least"] <= r["tokens_per_second"] <= r["most"], True, f"the median of {r}")
    config = json.loads((TINY / "config.json").read_text())
    dim, ffn, layers = (config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, kv, size, n, k = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim",
                                                       "num_local_experts", "num_experts_per_tok"))
    q, window = heads * size, config["sliding_window"]
    for r in found["rows"][1:]:
        chosen = r["experts"]  # tests/check.h knows whether they are counted rightly
        same(k <= chosen <= min(n, k * r["streams"]), True, f"{chosen} experts of {r['streams']} streams")
        expert = 3 * ffn * dim * 17 // 32 + 4 * (2 * ffn + dim)  # 4.25 bits a weight, biases in fp32
        layer = 2 * (2 * q * dim + 2 * kv * size * dim + n * dim) + 4 * (q + 2 * kv * size + dim + n) + 8 * dim
        seen = r["depth"] + r["tokens"] // 2 + 1
        cache = sum(min(seen, window if kind == "sliding_attention" else seen) for kind in config["layer_types"])
        head, cached = 2 * dim * config["vocab_size"], r["streams"] * cache * 4 * kv * size
        expected = layers * (layer + chosen * expert) + head + cached
        near = abs(r["step_bytes"] - expected) < 0.006 * layers * expert + 1  # "experts" has two decimals
        same(near, True, f"bytes of a step, {r['streams']} streams at {r['depth']}")


def test_refuses(folder):
    for options, word in ((("-p", "0"), "from 1"), (("-b", "1,x"), "'1,x'"), (("-r", "3x"), "'3x'"),
                          (("-o", "xml"), "xml"), (("--temperature", "-1"), "temperature"), (("a", "b"), "one MODEL")):
        refused("bench", TINY, *options, code=2, words=[word])
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    refused("bench", folder, code=2, words=["random weights", "GPU"], program=PLAIN)
    refused("bench", folder, "--encoding", "fp9", code=2, words=["fp9", "FP8, INT8", "Q4_K"])
    refused("bench", folder, "--encoding", "q4_k", words=["blocks of 256", "Q4_K"])
    refused("bench", TINY, "--encoding", "fp8", code=2, words=["has weights", "--encoding"])
