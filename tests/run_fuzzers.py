"""Runs every fuzzer below build/fuzz for SECONDS (60), all at once, with seeds made from the fixtures; `make fuzz`
builds and runs them. What they find on the way is kept in build/fuzz/NAME.corpus for the next run."""
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import gguf_files
import schemas

ROOT = Path(__file__).resolve().parent.parent
FIXTURES, BUILD = ROOT / "tests" / "fixtures", ROOT / "build" / "fuzz"
SECONDS = int(os.environ.get("SECONDS") or (sys.argv[1] if len(sys.argv) > 1 else 60))
SOURCES = {"json": ["chat.c", "infer.c"], "safetensors": ["infer.c"], "tokenizer": ["tokenizer.c"],
           "reader": ["chat.c", "formats/answers.c"], "gguf": ["encodings/gguf.c", "encodings/vocabulary.c"],
           "request": ["serve/serve.c", "chat.c"], "template": ["formats/jinja.c"], "schema": ["json/schema.c"]}  # whose words help to guess


def file_of(tensors):
    """A file of zeros with tensors {name: (dtype, shape)}."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + {"U8": 1, "I8": 1, "F8_E4M3": 1, "F32": 4, "I32": 4}.get(dtype, 2) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def small_model():
    """Weights for the first config.json in fuzz_safetensors.c."""
    layer = {"input_layernorm.weight": [32], "post_attention_layernorm.weight": [32], "self_attn.sinks": [2],
             "mlp.router.weight": [1, 32], "mlp.router.bias": [1],
             "mlp.experts.gate_up_proj_blocks": [1, 64, 1, 16], "mlp.experts.gate_up_proj_scales": [1, 64, 1],
             "mlp.experts.gate_up_proj_bias": [1, 64], "mlp.experts.down_proj_blocks": [1, 32, 1, 16],
             "mlp.experts.down_proj_scales": [1, 32, 1], "mlp.experts.down_proj_bias": [1, 32]}
    for name, rows, cols in (("q", 4, 32), ("k", 2, 32), ("v", 2, 32), ("o", 32, 4)):
        layer |= {f"self_attn.{name}_proj.weight": [rows, cols], f"self_attn.{name}_proj.bias": [rows]}
    shapes = {"model.embed_tokens.weight": [4, 32], "model.norm.weight": [32]}
    shapes |= {"model.layers.0." + name: shape for name, shape in layer.items()}
    return file_of({name: ("U8" if re.search("blocks|scales", name) else "BF16", shape)
                    for name, shape in shapes.items()})


def encoded_model(encodings, latent=False):
    """Weights for the second one or, if latent, the third, whose matrices take turns in the encodings."""
    def parts(kind, rows, cols):
        order, zeros = {"g_idx": ("I32", [cols])}, ("I32", [2, rows // 8])
        return {
            "block": {"weight": ("F8_E4M3", [rows, cols]), "weight_scale_inv": ("F32", [rows // 16, cols // 16])},
            "int8": {"weight": ("I8", [rows, cols]), "weight_scale": ("F16", [rows, 1]),
                     "weight_zero_point": ("I8", [rows, 1])},
            "packed": {"weight_packed": ("I32", [rows, cols // 8]), "weight_scale": ("BF16", [rows, 2]),
                       "weight_zero_point": ("I32", [rows // 8, 2]), "weight_g_idx": ("I32", [cols])},
            "gptq": {"qweight": ("I32", [cols // 8, rows]), "scales": ("F16", [2, rows]), "qzeros": zeros, **order},
            "one": {"qweight": ("I32", [cols // 8, rows]), "scales": ("F16", [2, 1]), "qzeros": ("I32", [2, 1])},
            "gptq8": {"qweight": ("I32", [cols // 4, rows]), "scales": ("F16", [2, rows]),
                      "qzeros": ("I32", [2, rows // 4]), **order},
            "nvfp4": {"weight_packed": ("U8", [rows, cols // 2]), "weight_scale": ("F8_E4M3", [rows, cols // 16]),
                      "weight_global_scale": ("F32", [1])},
            "plain": {"weight": ("BF16", [rows, cols])}}[kind]
    tensors = {"model.embed_tokens.weight": ("BF16", [4, 32]), "model.norm.weight": ("BF16", [32])}
    tensors |= {f"model.layers.0.{name}_layernorm.weight": ("BF16", [32]) for name in ("input", "post_attention")}
    matrices = [("self_attn.q", 32, 32), ("self_attn.k", 16, 32), ("self_attn.v", 16, 32), ("self_attn.o", 32, 32),
                ("mlp.gate", 48, 32), ("mlp.up", 48, 32), ("mlp.down", 32, 48)]
    if latent:
        tensors |= {"model.layers.0.self_attn.kv_a_layernorm.weight": ("BF16", [32]),
                    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("BF16", [34, 32]),
                    "model.layers.0.self_attn.q_proj.weight": ("BF16", [36, 32])}
        matrices = [("self_attn.kv_b", 64, 32)] + [(f"mlp.{name}", 32, 32) for name in ("gate", "up", "down")] + matrices[3:4]
    for i, (name, rows, cols) in enumerate(matrices):
        made = parts(encodings[i % len(encodings)], rows, cols)
        tensors |= {f"model.layers.0.{name}_proj.{suffix}": part for suffix, part in made.items()}
    return file_of(tensors)


def small_gguf():
    """A Llama with experts, and DeepSeek's attention, whose vocabularies are of bytes and of pieces."""
    f32 = [("token_embd.weight", [4, 32], "Q8_0", bytes(136)), ("output_norm.weight", [32], "F32", bytes(128)),
           ("blk.0.attn_norm.weight", [32], "F32", bytes(128)), ("blk.0.ffn_norm.weight", [32], "F32", bytes(128))]
    moe = [(f"blk.0.{name}.weight", shape, kind, bytes(math.prod(shape) // gguf_files.TYPES[kind][1] * gguf_files.TYPES[kind][2]))
           for name, shape, kind in (("ffn_gate_inp", [2, 32], "F32"), ("ffn_gate_exps", [2, 32, 32], "Q4_0"),
                                     ("ffn_up_exps", [2, 32, 32], "Q5_1"), ("ffn_down_exps", [2, 32, 32], "MXFP4"))]
    gqa = [(f"blk.0.attn_{name}.weight", shape, "F16", bytes(math.prod(shape) * 2))
           for name, shape in (("q", [4, 32]), ("k", [2, 32]), ("v", [2, 32]), ("output", [32, 4]))]
    mla = [(f"blk.0.attn_{name}.weight", shape, "F32", bytes(math.prod(shape) * 4))
           for name, shape in (("q", [8, 32]), ("kv_a_mqa", [10, 32]), ("kv_a_norm", [8]), ("k_b", [2, 8, 2]), ("v_b", [2, 2, 8]),
                               ("output", [32, 4]))]
    mlp = [(f"blk.0.ffn_{name}.weight", [32, 32], "Q4_0", bytes(32 * 18)) for name in ("gate", "up", "down")]
    pieces = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "a", "b", "ab", "<0x0A>"],
              "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -1.0, -2.0, 0.0], "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 6]}
    parrot = json.loads((FIXTURES / "parrot" / "tokenizer.json").read_text())
    size = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32, "attention.head_count": 2,
            "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6}

    def whole(arch, keys, vocabulary, tensors):
        keys = {f"{arch}.{key}": x for key, x in (size | keys).items()}
        return gguf_files.gguf({"general.architecture": arch} | keys | vocabulary, f32 + tensors)
    return [whole("llama", {"attention.key_length": 2, "attention.value_length": 2, "expert_count": 2, "expert_used_count": 1},
                  gguf_files.vocabulary(parrot, "gpt-4o"), gqa + moe),
            whole("deepseek2", {"attention.kv_lora_rank": 8, "rope.dimension_count": 2, "attention.key_length_mla": 4,
                                "attention.value_length_mla": 2, "expert_count": 2, "expert_used_count": 1,
                                "expert_shared_count": 1, "expert_feed_forward_length": 32}, pieces, mla + mlp)]


def seeds(name):
    if name == "gguf":
        return small_gguf() + [path.read_bytes() for path in sorted((FIXTURES / "gguf").glob("Q[48]_0.gguf"))]
    if name == "safetensors":
        header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
        encodings = ["block", "int8", "packed", "gptq", "gptq8", "plain"]
        return [small_model(), encoded_model(encodings), encoded_model(encodings[::-1]), encoded_model(["gptq"]),
                *(encoded_model([kind, "plain"], latent=True) for kind in [*encodings, "one"]),
                struct.pack("<Q", len(header)) + header + bytes(9)]
    if name == "reader":
        harmony = [b"\2analysis\4We think.\5\1assistant\2final\4Hi \xf0\x9f\x99\x82\7", b"I must refuse\5\1assistant\2final\4No\7",
                   b"\2commentary to=functions.f \3json\4{}\6\1functions.f to=assistant\2commentary\4ok\5",
                   b" to=functions.f\2commentary\3json\4{\"a\":1}\6", b"\2analysis I think\5assistant\2finalHI\10"]
        call = b'{"name": "f", "arguments": {"a": [1, {}]}}'
        return [b"\0" + text for text in harmony] + [
            b"\1\3\nA\n\4\n\nHi\n\5\n" + call + b"\n\6\n\5" + call + b"\6\1", b"\1<think>A</think>H</think>i \1", b"\3" + call + b"\1",
            b"\2Hi\n<tool_call>" + call + b"</tool_call>\1", b"\4 Hi \n\1", b"\5 Hi\1"]
    if name == "template":
        return [template.encode() for template, _ in json.loads((ROOT / "tests" / "goldens" / "jinja.json").read_text())["rows"]]
    if name == "schema":
        made = [schemas.make_root(random.Random(i)) for i in range(40)]
        return [json.dumps(schema).encode() + b"\n" + json.dumps(make(random.Random(1))).encode() for schema, make in made] + [
            b"r" + pattern.encode() + b"\nabc-12" for pattern in schemas.PATTERNS]
    if name == "request":
        tool = {"type": "function", "function": {"name": "a b", "parameters": {"type": "object", "properties": {}}}}
        call = {"id": "1", "function": {"name": "a b", "arguments": "{}"}}
        chat = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]},
                             {"role": "tool", "tool_call_id": "1", "content": "t"}], "tools": [tool], "n": 2, "seed": -1,
                "tool_choice": {"type": "function", "function": {"name": "a b"}}, "logprobs": True, "top_logprobs": 2,
                "stream": True, "stream_options": {"include_usage": True}, "stop": ["x", "yz"], "max_completion_tokens": 9}
        text = {"prompt": [[1, 2], "a"], "echo": True, "logprobs": 2, "max_tokens": 5, "logit_bias": {"7": -1.5}, "stop": "ab",
                "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True,
                "frequency_penalty": 0.5, "presence_penalty": -1}
        return [b"\1" + json.dumps({**chat, **more}).encode() for more in (
            {}, {"tool_choice": "required", "stream": False}, {"tool_choice": "none"})] + [
            b"\0" + json.dumps({**text, **more}).encode() for more in ({}, {"prompt": "a", "stream": True, "logprobs": None})]
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
        ends = {"type": "TemplateProcessing", "single": [{"Sequence": {}}, {"SpecialToken": {"id": "<s>"}}]}
        scored = {**llama, "added_tokens": llama["added_tokens"][:1], "post_processor": ends,
                  "model": {**llama["model"], "merges": [], "scores": [0, 0, -1, -2, -2, -3.5, 0, -1e9]}}
        return [json.dumps(t).encode() + b"\xffab a<s>bb\n" for t in (parrot, llama, small, scored)]
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
        path.read_bytes() for path in sorted(FIXTURES.glob("**/config.json"))]


def start(name):
    corpus, dictionary = BUILD / f"{name}.corpus", BUILD / f"{name}.dict"
    corpus.mkdir(exist_ok=True)
    for i, seed in enumerate(seeds(name)):
        (corpus / f"seed{i}").write_bytes(seed)
    words = {word for source in SOURCES.get(name, []) for word in
             re.findall(r'"([\w<|>. ]+)"', (ROOT / source).read_text(), re.ASCII)}
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
