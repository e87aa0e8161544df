"""Runs every fuzzer below build/fuzz for SECONDS (60), all at once, with seeds made from the fixtures; `make fuzz`
builds and runs them. What they find on the way is kept in build/fuzz/NAME.corpus for the next run."""
import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES, BUILD = ROOT / "tests" / "fixtures", ROOT / "build" / "fuzz"
SECONDS = int(os.environ.get("SECONDS") or (sys.argv[1] if len(sys.argv) > 1 else 60))
SOURCES = {"json": ["chat.c", "model.c"], "safetensors": ["model.c"], "tokenizer": ["tokenizer.c"],
           "reader": ["chat.c"]}  # whose words help to guess


def small_model():
    """Weights for the config.json in fuzz_safetensors.c."""
    layer = {"input_layernorm.weight": [32], "post_attention_layernorm.weight": [32], "self_attn.sinks": [2],
             "mlp.router.weight": [1, 32], "mlp.router.bias": [1],
             "mlp.experts.gate_up_proj_blocks": [1, 64, 1, 16], "mlp.experts.gate_up_proj_scales": [1, 64, 1],
             "mlp.experts.gate_up_proj_bias": [1, 64], "mlp.experts.down_proj_blocks": [1, 32, 1, 16],
             "mlp.experts.down_proj_scales": [1, 32, 1], "mlp.experts.down_proj_bias": [1, 32]}
    for name, rows, cols in (("q", 4, 32), ("k", 2, 32), ("v", 2, 32), ("o", 32, 4)):
        layer |= {f"self_attn.{name}_proj.weight": [rows, cols], f"self_attn.{name}_proj.bias": [rows]}
    shapes = {"model.embed_tokens.weight": [4, 32], "model.norm.weight": [32]}
    shapes |= {"model.layers.0." + name: shape for name, shape in layer.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        dtype, begin = ("U8", end) if re.search("blocks|scales", name) else ("BF16", end)
        end += (1 if dtype == "U8" else 2) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def seeds(name):
    if name == "safetensors":
        header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
        return [small_model(), struct.pack("<Q", len(header)) + header + bytes(9)]
    if name == "reader":
        harmony = [b"\2analysis\4We think.\5\1assistant\2final\4Hi \xf0\x9f\x99\x82\7", b"I must refuse\5\1assistant\2final\4No\7",
                   b"\2commentary to=functions.f \3json\4{}\6\1functions.f to=assistant\2commentary\4ok\5",
                   b" to=functions.f\2commentary\3json\4{\"a\":1}\6", b"\2analysis I think\5assistant\2finalHI\10"]
        call = b'{"name": "f", "arguments": {"a": [1, {}]}}'
        return [b"\0" + text for text in harmony] + [
            b"\1\3\nA\n\4\n\nHi\n\5\n" + call + b"\n\6\n\5" + call + b"\6\1", b"\1<think>A</think>H</think>i \1", b"\3" + call + b"\1",
            b"\2Hi\n<tool_call>" + call + b"</tool_call>\1", b"\4 Hi \n\1", b"\5 Hi\1"]
    if name == "tokenizer":
        parrot = json.loads((FIXTURES / "parrot" / "tokenizer.json").read_text())
        vocab = {"<unk>": 0, "<s>": 1, "\u2581": 2, "a": 3, "b": 4, "ab": 5, "<0x0A>": 6, "\u2581a": 7}
        llama = {"added_tokens": [{"id": 1, "content": "<s>", "special": True}, {"id": 8, "content": "bb", "lstrip": True,
                                                                           "normalized": True, "single_word": True}],
                 "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {
                     "type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
                 "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {}}],
                                    "special_tokens": {"<s>": {"ids": [1]}}},
                 "decoder": {"type": "Sequence", "decoders": [
                     {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
                     {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
                 "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
                           "merges": ["a b", ["\u2581", "a"]]}}
        small = {**parrot, "added_tokens": parrot["added_tokens"][:2],
                 "model": {**parrot["model"], "merges": parrot["model"]["merges"][:2],
                           "vocab": {k: i for k, i in parrot["model"]["vocab"].items() if i < 258}}}
        return [json.dumps(t).encode() + b"\xffab a<s>bb\n" for t in (parrot, llama, small)]
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    schema = {"type": "object", "required": ["a"], "properties": {
        "a": {"type": "string", "enum": ["x"], "default": "x", "description": "A\nB"}, "b": {"type": "array", "items": {}},
        "c": {"oneOf": [{"type": ["integer", "null"]}, {"type": "object", "nullable": True}], "examples": ["e"], "title": "T"}}}
    talk = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
                         {"role": "assistant", "reasoning": "r", "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "1", "content": "t"}, {"role": "assistant", "content": "<|end|>"},
                         {"role": "assistant", "channel": "analysis", "recipient": "r", "content_type": "json", "content": "",
                          "tool_calls": [call] * 3}, {"role": "tool", "name": "functions.f", "content": "o"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            "reasoning_effort": "low", "date": "none", "channels": ["final"]}
    shards = json.loads((FIXTURES / "odd" / "model.safetensors.index.json").read_text())["weight_map"]
    index = {"weight_map": {name: "a" if "00001" in shard else "b" for name, shard in shards.items()}}
    return [json.dumps(c).encode() for c in (talk, index)] + [
        path.read_bytes() for path in sorted(FIXTURES.glob("*/config.json"))]


def start(name):
    corpus, dictionary = BUILD / f"{name}.corpus", BUILD / f"{name}.dict"
    corpus.mkdir(exist_ok=True)
    for i, seed in enumerate(seeds(name)):
        (corpus / f"seed{i}").write_bytes(seed)
    words = {word for source in SOURCES.get(name, []) for word in
             re.findall(r'"([\w<|>. ]+)"', (ROOT / source).read_text())}
    dictionary.write_text("".join(f'"{word}"\n' for word in sorted(words)))
    command = [BUILD / name, corpus, f"-dict={dictionary}", f"-max_total_time={SECONDS}", "-timeout=10",
               "-rss_limit_mb=2048", "-print_final_stats=1", f"-artifact_prefix={BUILD}/{name}-"]
    with open(BUILD / f"{name}.log", "w") as log:
        return subprocess.Popen(command, cwd=ROOT, stderr=log)


def main():
    failed = False
    names = sorted(path.stem.removeprefix("fuzz_") for path in (ROOT / "tests").glob("fuzz_*.c"))
    running = [(name, start(name)) for name in names]
    for name, process in running:
        process.wait()
        log = (BUILD / f"{name}.log").read_text(errors="replace")
        runs = re.search(r"stat::number_of_executed_units: (\d+)", log)
        where = re.search(r"Test unit written to (\S+)", log)
        if process.returncode:
            failed = True
            print(f"FAIL {name}: {where.group(1) if where else 'no input was kept'}, see {BUILD / name}.log")
        else:
            print(f"ok {name}: {runs.group(1)} runs")
    return failed


sys.exit(main())
