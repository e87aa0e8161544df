"""Files that are wrong, one thing each: safetensors, index, config.json, tokenizer.json. Refusing one takes one line
that names the file and what is wrong in it, exit code 3, and no time; FINE are odd files that must be read."""
import errno
import json
import math
import os
import re
import struct

from gguf_files import read_model
from helpers import (FIXTURES, PARROT, PLAIN, Skip, changed, copy_model, data, each, expect, has, ids_of, infer, needs,
                     patience, read_json, read_safetensors, refused, safetensors, same, start, write_json)

SECONDS = 10  # ten times what is promised for a refusal
FINE = None
DEEP = "[" * 10 ** 5 + "]" * 10 ** 5
LLAMA, ODD, QWEN = FIXTURES / "llama_bias", FIXTURES / "odd", FIXTURES / "qwen3"
NAME = "model.layers.1.self_attn.q_proj.weight"  # the tensor that is broken: (128, 96) of BF16, in the middle of the file
HEADER, DATA = read_safetensors(PARROT / "model.safetensors")
LAST = max((k for k in HEADER if k != "__metadata__"), key=lambda k: HEADER[k]["data_offsets"])
FIRST = min((k for k in HEADER if k != "__metadata__"), key=lambda k: HEADER[k]["data_offsets"])
BEGIN, END = HEADER[NAME]["data_offsets"]
FILE = safetensors(HEADER, DATA)


def top_logits(model, **how):
    return infer("logits", model, "--ids", "1,2,3", "--top", 3, **how).out


def replace_text(text, *pairs):
    for old, new in pairs:
        expect(old in text, f"the test is wrong: no {old!r}")
        text = text.replace(old, new, 1)
    return text


# ---- safetensors

def with_entry(**changes):
    """The file with other fields of one tensor; None takes one away."""
    return safetensors({**HEADER, NAME: changed(HEADER[NAME], changes)}, DATA)


def with_text(*pairs):
    """The file with texts of its header replaced."""
    return safetensors(replace_text(json.dumps(HEADER), *pairs), DATA)


def with_length(n, content=FILE[8:]):
    return struct.pack("<Q", n) + content


def with_offsets(name, offsets):
    return safetensors({**HEADER, name: {**HEADER[name], "data_offsets": offsets}}, DATA)


def text_offsets(text):
    return with_text((f"[{BEGIN}, {END}]", text))


def with_hole():
    """Four bytes that belong to nobody before the broken tensor."""
    header = {k: v if k == "__metadata__" or v["data_offsets"][0] < BEGIN else
              {**v, "data_offsets": [x + 4 for x in v["data_offsets"]]} for k, v in HEADER.items()}
    return safetensors(header, DATA[:BEGIN] + bytes(4) + DATA[BEGIN:])


def on_one_range(n):
    return safetensors({**HEADER, **{f"t{i}": HEADER[NAME] for i in range(n)}}, DATA)


def with_tensor(name):
    """One tensor more, behind the others."""
    end = len(DATA)
    return safetensors({**HEADER, name: {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}}, DATA + bytes(4))


def odd_offset():
    text = json.dumps(HEADER).encode()
    return safetensors(text + b" " * (1 - len(text) % 2), DATA)


SAFETENSORS = [  # what is wrong, the file, words of the message
    ("empty", lambda: b"", ["0 bytes"]),
    ("7 bytes", lambda: FILE[:7], ["7 bytes"]),
    ("8 bytes", lambda: FILE[:8], ["header"]),
    ("header of 0 bytes", lambda: with_length(0), ["header"]),
    ("header to the end less 7", lambda: with_length(len(FILE) - 7), ["header", str(len(FILE) - 7)]),
    ("header of 100,000,001 bytes", lambda: with_length(100000001, b"{" + bytes(10 ** 8)), ["header", "100000001"]),
    ("header of 2^63 bytes", lambda: with_length(2 ** 63), ["header", str(2 ** 63)]),
    ("header of 2^64-8 bytes", lambda: with_length(2 ** 64 - 8), ["header", str(2 ** 64 - 8)]),
    ("header {", lambda: safetensors("{", DATA), ["JSON"]),
    ("header []", lambda: safetensors("[]", DATA), ["header"]),
    ("header 0xff", lambda: safetensors(b"\xff", DATA), ["header"]),
    ("header {0xff", lambda: safetensors(b"{\xff", DATA), ["UTF-8", "byte 1"]),
    ("byte-order mark", lambda: safetensors(b"\xef\xbb\xbf" + json.dumps(HEADER).encode(), DATA), ["header"]),
    ("padded with NUL", lambda: safetensors(json.dumps(HEADER) + "\0\0", DATA), ["byte"]),
    ("nested 100,000 deep", lambda: safetensors('{"a":' + DEEP + "}", DATA), ["JSON"]),
    ("text behind the header", lambda: safetensors(json.dumps(HEADER) + "{}", DATA), ["JSON", "byte"]),
    ("one byte too many", lambda: FILE + b"\0", [str(len(FILE) + 1)]),
    ("two missing", lambda: FILE[:-2], [LAST]),
    ("a hole", with_hole, [NAME, "hole"]),
    ("an overlap", lambda: with_offsets(NAME, [BEGIN - 4, END - 4]), ["overlap"]),
    ("all the data twice", lambda: safetensors(HEADER, DATA + DATA), [str(len(FILE) + len(DATA))]),
    ("first offset not 0", lambda: safetensors({k: v for k, v in HEADER.items() if k != FIRST}, DATA), ["hole"]),
    ("end before begin", lambda: with_offsets(NAME, [END, BEGIN]), [NAME]),
    ("100,000 entries on one range", lambda: on_one_range(10 ** 5), ["overlap"]),
    ("shape [2, 2^64-2]", lambda: with_entry(shape=[2, 2 ** 64 - 2]), [NAME, "shape"]),
    ("shape [2^32, 2^32]", lambda: with_entry(shape=[2 ** 32, 2 ** 32]), [NAME, "shape"]),
    ("shape [2^62, 1]: bytes wrap", lambda: with_entry(shape=[2 ** 62, 1]), [NAME, "shape"]),
    ("shape -1", lambda: with_entry(shape=[-1, 96]), [NAME, "shape"]),
    ("shape 128.0", lambda: with_entry(shape=[128.0, 96]), [NAME, "shape"]),
    ("shape 128.5", lambda: with_entry(shape=[128.5, 96]), [NAME, "shape"]),
    ("shape 1.28e2", lambda: with_text((str([128, 96]), "[1.28e2, 96]")), ["shape"]),
    ("shape 1e999", lambda: with_text((str([128, 96]), "[1e999, 96]")), ["shape"]),
    ("shape 0128", lambda: with_text((str([128, 96]), "[0128, 96]")), ["number"]),
    ("shape 128.", lambda: with_text((str([128, 96]), "[128., 96]")), ["number"]),
    ("shape of texts", lambda: with_entry(shape=["128", 96]), [NAME, "shape"]),
    ("shape is a number", lambda: with_entry(shape=12288), [NAME, "shape"]),
    ("shape of nine dimensions", lambda: with_entry(shape=[1] * 7 + [128, 96]), [NAME, "dimensions"]),
    ("another shape of as many", lambda: with_entry(shape=[96, 128]), [NAME, "(96, 128)", "(128, 96)"]),
    ("one dimension more", lambda: with_entry(shape=[1, 128, 96]), [NAME, "(1, 128, 96)", "(128, 96)"]),
    ("bytes off by one", lambda: with_offsets(NAME, [BEGIN, END - 1]), [NAME, str(END - BEGIN - 1), str(END - BEGIN)]),
    ("offset 2^53+1", lambda: with_offsets(NAME, [BEGIN, 2 ** 53 + 1]), [NAME]),
    ("offset 2^64", lambda: with_offsets(NAME, [BEGIN, 2 ** 64]), [NAME]),
    ("offset -1", lambda: with_offsets(NAME, [-1, END]), [NAME, "offsets"]),
    ("offset in powers of ten", lambda: text_offsets(f"[{BEGIN / 1e3}e3, {END}]"), [NAME, "offsets"]),
    ("offset with a fraction of 0", lambda: text_offsets(f"[{BEGIN}.0, {END}]"), [NAME, "offsets"]),
    ("three offsets", lambda: with_offsets(NAME, [BEGIN, END, END]), [NAME, "offsets"]),
    ("one offset", lambda: with_offsets(NAME, [BEGIN]), [NAME, "offsets"]),
    ("offsets are a text", lambda: with_offsets(NAME, f"{BEGIN},{END}"), [NAME, "offsets"]),
    ("a tensor twice, other dtype", lambda: with_text(
        (f'"{NAME}"', f'"{NAME}": {json.dumps({**HEADER[NAME], "dtype": "I32"})}, "{NAME}"')), [NAME, "twice"]),
    ("shape twice", lambda: with_text(('"shape"', '"shape": [1], "shape"')), ["shape", "twice"]),
    ("unknown dtype", lambda: with_entry(dtype="F33"), [NAME, "F33"]),
    ("dtype in small letters", lambda: with_entry(dtype="bf16"), [NAME, "bf16"]),
    ("a dtype that weights do not have", lambda: with_entry(dtype="I16"), [NAME, "I16"]),
    ("dtype of half the size", lambda: with_entry(dtype="U8"), [NAME, str(END - BEGIN), str((END - BEGIN) // 2)]),
    ("dtype is a number", lambda: with_entry(dtype=32), [NAME, "dtype"]),
    ("no dtype", lambda: with_entry(dtype=None), [NAME, "dtype"]),
    ("no shape", lambda: with_entry(shape=None), [NAME, "shape"]),
    ("no data_offsets", lambda: with_entry(data_offsets=None), [NAME, "data_offsets"]),
    ("keys in other letters", lambda: with_text(('"dtype"', '"Dtype"')), ["dtype"]),
    ("entry is a number", lambda: safetensors({**HEADER, NAME: 1}, DATA), [NAME]),
    ("entry is null", lambda: safetensors({**HEADER, NAME: None}, DATA), [NAME]),
    ("__metadata__ is a text", lambda: safetensors({**HEADER, "__metadata__": "pt"}, DATA), ["__metadata__"]),
    ("\\u0000 in a name", lambda: with_text((NAME, NAME + "\\u0000x")), ["u0000"]),
    ("a raw control byte in a name", lambda: with_text((NAME, NAME + "\n")), ["control byte"]),
    ("invalid UTF-8 in a name", lambda: FILE.replace(b"lm_head", b"lm_\xc0\x80ad"), ["UTF-8"]),
    ("a tensor is missing", lambda: with_text((NAME, "model.layers.0.mlp.another.weight")), [NAME, "missing"]),
    ("a tensor too many", lambda: with_tensor("z"), ["'z'"]),
    ("an escape sequence in a name", lambda: with_tensor("z\x1b[31mred\n"), ["red"]),
    ("a name of 100,000 bytes", lambda: with_tensor("z" * 10 ** 5), ["zzzz"]),
    ("__metadata__ of nothing", lambda: safetensors({**HEADER, "__metadata__": {}}, DATA), FINE),
    ("no __metadata__", lambda: safetensors(changed(HEADER, {"__metadata__": None}), DATA), FINE),
    ("padded with spaces", lambda: safetensors(json.dumps(HEADER) + " " * 1000, DATA), FINE),
    ("tensors at odd offsets", odd_offset, FINE),
    ("100,000 keys of metadata",
     lambda: safetensors({**HEADER, "__metadata__": {f"key {i}": "" for i in range(10 ** 5)}}, DATA), FINE),
]


def test_safetensors(folder):
    expected = top_logits(PARROT)

    def check(name, make, words):
        model = copy_model(PARROT, folder, keep_weights=False)
        (model / "model.safetensors").write_bytes(make())
        if words is FINE:
            same(top_logits(model), expected, "logits")
        else:
            refused("logits", model, "--ids", 1, words=["model.safetensors", *words], seconds=SECONDS)
        (model / "model.safetensors").unlink()
    each(SAFETENSORS, check)


def test_safetensors_that_are_no_files(folder):
    def link(path):
        path.symlink_to(path)

    def check(name, make, words):
        model = copy_model(PARROT, folder, keep_weights=False)
        make(model / "model.safetensors")
        refused("logits", model, "--ids", 1, words=["model.safetensors", *words], seconds=SECONDS)
    each([("fifo", os.mkfifo, ["not a regular file"]), ("directory", os.mkdir, ["not a regular file"]),
          ("missing", lambda path: None, []), ("loop of links", link, []),
          ("device", lambda path: path.symlink_to("/dev/zero"), ["not a regular file"])], check)


def test_large_headers_are_read_in_time(folder):
    """1.5 MB of keys in 0.1 s; ten times that is the limit here."""
    model = copy_model(PARROT, folder, keep_weights=False)
    entries = {f"{i:05}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(25000)}
    (model / "model.safetensors").write_bytes(safetensors({**entries, **HEADER}, DATA))
    refused("logits", model, "--ids", 1, words=["no place"], program=PLAIN, cpu=1)


def test_file_truncated_while_open(folder):
    """A file that shrinks while it is mapped: one line and exit code 3, no signal."""
    model = copy_model(PARROT, folder, keep_weights=False)
    path = model / "model.safetensors"
    path.write_bytes(FILE)
    with start("logits", model, "--ids", ",".join(["1"] * 2000), "--all", stdout=-1, stderr=-1) as p:
        p.stdout.read(1)  # it computes; its output fills the pipe long before the end
        os.truncate(path, 4096)
        err = p.communicate(timeout=patience(60))[1].decode(errors="replace")
    expect(p.returncode == 3 and err.startswith(f"infer: {model}: a model file was truncated") and err.count("\n") == 1,
           f"exit code {p.returncode}; stderr: {err[:200]!r}")


# ---- several files and their index

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = read_json(ODD / "model.safetensors.index.json")
MAP = INDEX["weight_map"]
EMBED = "model.embed_tokens.weight"  # in the first shard


def write_map(model, changes):
    write_json(model / "model.safetensors.index.json", {"weight_map": changed(MAP, changes)})


def write_index(text):
    return lambda model: (model / "model.safetensors.index.json").write_text(text)


def in_two_shards(model):
    header, content = read_safetensors(ODD / SHARDS[1])
    size = len(content)
    header["model.norm.weight" if MAP["model.norm.weight"] == SHARDS[0] else EMBED] = {
        "dtype": "U8", "shape": [2], "data_offsets": [size, size + 2]}
    (model / SHARDS[1]).unlink()
    (model / SHARDS[1]).write_bytes(safetensors(header, content + bytes(2)))


def one_shard(model):
    """All tensors in the second file, and an index that says so."""
    header, content = {}, b""
    for shard in SHARDS:
        part, more = read_safetensors(ODD / shard)
        header.update({k: {**v, "data_offsets": [x + len(content) for x in v["data_offsets"]]}
                       for k, v in part.items() if k != "__metadata__"})
        content += more
    for shard in SHARDS:
        (model / shard).unlink()
    (model / SHARDS[1]).write_bytes(safetensors(header, content))
    write_map(model, {k: SHARDS[1] for k in MAP})


def one_file(model):
    """One file with all tensors, and the index of the shards that it replaced."""
    one_shard(model)
    (model / SHARDS[1]).rename(model / "model.safetensors")
    write_map(model, {})


def numbered(n):
    return {f"t{i}": f"s{i}.safetensors" for i in range(n)}


INDEXES = [  # what is wrong, how it is made, words of the message
    ("../../x", lambda m: write_map(m, {EMBED: "../../x"}), ["index.json", EMBED, "../../x"]),
    ("/x", lambda m: write_map(m, {EMBED: "/x"}), ["index.json", EMBED, "/x"]),
    ("a/b", lambda m: write_map(m, {EMBED: "a/" + SHARDS[0]}), ["index.json", EMBED]),
    ("..", lambda m: write_map(m, {EMBED: ".."}), ["index.json", EMBED, ".."]),
    ("empty file name", lambda m: write_map(m, {EMBED: ""}), ["index.json", EMBED]),
    ("a number as file name", lambda m: write_map(m, {EMBED: 1}), ["index.json", EMBED]),
    ("null as file name", lambda m: write_index(json.dumps({"weight_map": {**MAP, EMBED: None}}))(m),
     ["index.json", EMBED]),
    ("missing shard", lambda m: (m / SHARDS[1]).unlink(), [SHARDS[1], "missing"]),
    ("a shard that nobody has", lambda m: write_map(m, {EMBED: "m3.safetensors"}), ["m3.safetensors"]),
    ("a file that is no safetensors", lambda m: write_map(m, {EMBED: "config.json"}), ["config.json"]),
    ("a tensor in two shards", in_two_shards, [SHARDS[1], "also in", SHARDS[0]]),
    ("a shard is cut", lambda m: ((m / SHARDS[1]).unlink(), (m / SHARDS[1]).write_bytes(
        (ODD / SHARDS[1]).read_bytes()[:-1])), [SHARDS[1]]),
    ("no weight_map", write_index("{}"), ["index.json", "weight_map"]),
    ("an empty weight_map", write_index('{"weight_map": {}}'), ["index.json", "weight_map"]),
    ("weight_map is an array", write_index('{"weight_map": ["x"]}'), ["index.json", "weight_map"]),
    ("Weight_Map", write_index(json.dumps({"Weight_Map": MAP})), ["index.json", "weight_map"]),
    ("index is empty", write_index(""), ["index.json", "JSON"]),
    ("index is an array", write_index("[]"), ["index.json"]),
    ("text behind the index", write_index(json.dumps(INDEX) + "x"), ["index.json", "JSON"]),
    ("a tensor twice in the index", write_index(json.dumps(INDEX).replace('{"model', f'{{"{EMBED}": "x", "model', 1)),
     ["index.json", EMBED, "twice"]),
    ("nested 100,000 deep", write_index('{"weight_map": ' + DEEP + "}"), ["index.json", "JSON"]),
    ("1,000 files, one named twice", lambda m: write_map(m, {**numbered(998), "z": "s0.safetensors"}), ["s0", "missing"]),
    ("1,001 files", lambda m: write_map(m, numbered(999)), ["more files than 1000"]),
    ("one shard", one_shard, FINE),
    ("one file beside an old index", one_file, FINE),
    ("the other shard", lambda m: write_map(m, {EMBED: SHARDS[1]}), FINE),
]


def test_index(folder):
    expected = top_logits(ODD)

    def check(name, make, words):
        model = copy_model(ODD, folder)
        make(model)
        if words is FINE:
            same(top_logits(model), expected, "logits")
        else:
            refused("logits", model, "--ids", 1, words=words, seconds=SECONDS)
    each(INDEXES, check)


# ---- config.json

SIZES = ["num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers", "num_local_experts",
         "num_experts_per_tok", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings",
         "sliding_window"]
MEANT = ["head_dim", "num_key_value_heads", "sliding_window"]  # their absence means 64, 8 and 128 in gpt_oss
VALUES = [("0", 0), ("-1", -1), ("2^31", 2 ** 31), ("2^63", 2 ** 63), ("1.5", 1.5), ("a text", "4"), ("true", True),
          ("an array", [4])]
WEIGHTS = "model.safetensors"  # a message about config.json that has to name a tensor instead
CONFIGS = [  # what is wrong, changed fields, words of the message
    *((f"{key} = {name}", {key: value}, [key]) for key in SIZES for name, value in VALUES),
    *((f"no {key}", {key: None}, [key]) for key in SIZES if key not in MEANT),
    ("no head_dim", {"head_dim": None}, [WEIGHTS, "q_proj", "(128, 96)", "(256, 96)"]),
    ("experts per token above experts", {"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "8"]),
    ("heads that kv heads do not divide", {"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
    ("odd head size", {"head_dim": 31}, ["head_dim", "31"]),
    ("one layer more", {"num_hidden_layers": 4, "layer_types": None}, [WEIGHTS, "model.layers.3."]),
    ("one layer fewer", {"num_hidden_layers": 2, "layer_types": None}, [WEIGHTS, "model.layers.2."]),
    ("another width", {"hidden_size": 64}, [WEIGHTS, "model.embed_tokens.weight", "(448, 96)", "(448, 64)"]),
    ("another number of experts", {"num_local_experts": 16}, [WEIGHTS, "(8, 96)", "(16, 96)"]),
    ("layer_types too short", {"layer_types": ["full_attention"] * 2}, ["layer_types", "3"]),
    ("layer_types too long", {"layer_types": ["full_attention"] * 4}, ["layer_types", "3"]),
    ("layer_types a text", {"layer_types": "full_attention"}, ["layer_types"]),
    ("unknown layer type", {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
     ["layer_types[1]", "linear_attention"]),
    ("layer type a number", {"layer_types": [1, 2, 3]}, ["layer_types[0]"]),
    ("eos at the vocabulary's end", {"eos_token_id": 448}, ["eos_token_id", "447"]),
    ("eos -1", {"eos_token_id": -1}, ["eos_token_id"]),
    ("eos 1.5", {"eos_token_id": 1.5}, ["eos_token_id"]),
    ("one eos of two outside", {"eos_token_id": [404, 2 ** 31]}, ["eos_token_id"]),
    ("eos a text", {"eos_token_id": "404"}, ["eos_token_id"]),
    ("rope_theta 0", {"rope_theta": 0}, ["rope_theta"]),
    ("rope_theta -1", {"rope_theta": -1}, ["rope_theta"]),
    ("rope_theta a text", {"rope_theta": "10000"}, ["rope_theta"]),
    ("rope factor 0", {"rope_scaling": {"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 256}},
     ["factor"]),
    ("rope without its factor", {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 256}},
     ["factor", "missing"]),
    ("rope of 10^300 turns", {"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, ["factor", "1e-300"]),
    ("a part of each head turns", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ("all of each head turns", {"partial_rotary_factor": 1.0}, FINE),
    ("another alpha", {"swiglu_alpha": 1.5}, ["swiglu_alpha", "1.5"]),
    ("a rope for each kind of layer", {"rope_scaling": None, "rope_parameters": {
        "full_attention": {"rope_type": "default"}}}, ["rope_parameters", "full_attention"]),
    ("unknown rope", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, ["spiral"]),
    ("rms_norm_eps too small for a float", {"rms_norm_eps": 1e-60}, ["rms_norm_eps", "1e-60"]),
    ("rms_norm_eps a text", {"rms_norm_eps": "1e-5"}, ["rms_norm_eps"]),
    ("rms_norm_eps -1", {"rms_norm_eps": -1}, ["rms_norm_eps"]),
    ("swiglu_limit 0", {"swiglu_limit": 0}, ["swiglu_limit"]),
    ("another activation", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ("unknown architecture", {"model_type": "mamba9"}, ["mamba9"]),
    ("no architecture", {"model_type": None}, ["model_type"]),
    ("architecture a number", {"model_type": 1}, ["model_type"]),
    ("another family's weights", {"model_type": "llama"}, ["layer_types[0]", "llama"]),
    ("unknown quant_method", {"quantization_config": {"quant_method": "awq9"}}, ["awq9"]),
    ("quant_method a number", {"quantization_config": {"quant_method": 4}}, ["quant_method"]),
    ("keys in other letters", {"num_hidden_layers": None, "Num_Hidden_Layers": 3}, ["num_hidden_layers"]),
    ("unknown keys", {"something": {"else": [1]}}, FINE),
]


def test_config(folder):
    expected = top_logits(PARROT)

    def check(name, changes, words):
        model = copy_model(PARROT, folder, changes)
        if words is FINE:
            same(top_logits(model), expected, "logits")
        else:
            if words[0] != WEIGHTS:
                words = ["config.json", *words]
            refused("logits", model, "--ids", 1, words=words, seconds=SECONDS)
    each([case for case in CONFIGS if case[0] != "another family's weights" or has("families")], check)


def check_configs(source, folder, cases):
    expected = top_logits(source)

    def check(name, changes, words):
        model = copy_model(source, folder, changes)
        if words is FINE:
            same(top_logits(model), expected, "logits")
        else:
            refused("logits", model, "--ids", 1, words=words, seconds=SECONDS)
    each(cases, check)


def test_config_of_a_dense_model(folder):
    """What a Llama may leave out, and what it may not."""
    needs("families")
    check_configs(LLAMA, folder, [
        ("kv heads and head size given", {"num_key_value_heads": 4, "head_dim": 16}, FINE),
        ("head size that does not fit", {"head_dim": 32}, ["q_proj", "(64, 64)", "(128, 64)"]),
        ("kv heads that do not fit", {"num_key_value_heads": 2}, ["k_proj", "(64, 64)", "(32, 64)"]),
        ("more heads than width", {"num_attention_heads": 128}, ["config.json", "head_dim"]),
        ("another vocabulary", {"vocab_size": 130}, ["(131, 64)", "(130, 64)"]),
        ("a head of its own", {"tie_word_embeddings": True}, FINE),
        ("no context, as in the oldest files", {"max_position_embeddings": None}, FINE),
        ("a window in its layer", {"layer_types": ["sliding_attention"]},
         ["config.json", "layer_types[0]", "sliding_attention", "llama"]),
        ("bias wanted, and absent", {"mlp_bias": True}, ["gate_proj.bias"]),
        ("sees what follows", {"is_causal": False}, ["config.json", "is_causal"]),
        ("a scaling beside the newer object", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000.0}}, ["rope_scaling", "rope_parameters", "yarn"]),
        ("what both objects say", {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default"}}, FINE),
        ("an empty scaling", {"rope_scaling": {}}, FINE)])


def test_yarn_enlarges_the_context(folder):
    """As Qwen2.5's page says: rope_scaling alone, with max_position_embeddings as it is."""
    size = 64
    ids = ",".join(["1"] * (size + 1))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": size}

    def model(scaling):
        return copy_model(ODD, folder, {"max_position_embeddings": size, "rope_scaling": scaling})
    infer("logits", model(yarn), "--ids", ids)
    del yarn["original_max_position_embeddings"]  # it is large already
    refused("logits", model(yarn), "--ids", ids, code=2, words=["context"])
    refused("logits", model({"rope_type": "default"}), "--ids", ids, code=2, words=["context"])


def test_attn_factor(folder):
    """DeepSeek-R1-0528-Qwen3-8B has it, so that with YaRN's own factor cos and sin are scaled by 1."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    scaled = [top_logits(copy_model(ODD, folder, {"rope_scaling": {**yarn, key: value}}))
              for key, value in (("attn_factor", 0.8782488562869419), ("attention_factor", 1.0), ("attention_factor", 1.5))]
    same(scaled[0], scaled[1], "logits")
    expect(scaled[1] != scaled[2], "the factor changes nothing")


def test_config_of_a_model_that_norms_heads(folder):
    """Qwen3: the norms of q and k must be there and fit; what is not implemented is refused."""
    needs("families")
    check_configs(QWEN, folder, [
        ("head size given", {"head_dim": 128}, FINE),
        ("all layers see all", {"layer_types": ["full_attention"] * 2}, FINE),
        ("as many values in smaller heads", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
         ["model.layers.0.self_attn.q_norm.weight", "(128)", "(64)"]),
        ("a window", {"use_sliding_window": True}, FINE),
        ("a window in one layer", {"layer_types": ["full_attention", "sliding_attention"]}, FINE),
        ("another family's formulas", {"model_type": "llama", "head_dim": 128}, ["_norm.weight", "no place", "llama"])])
    model = copy_model(LLAMA, folder, {"model_type": "qwen3", "head_dim": 16})
    refused("logits", model, "--ids", 1, words=["model.layers.0.self_attn.q_norm.weight", "(16)", "missing"])


def test_config_of_every_family(folder):
    """A formula that is not implemented is named, with what is; the defaults of a family may be left out."""
    needs("families")
    def family(name, *cases):
        check_configs(FIXTURES / name, folder, cases)
    family("mistral", ("a layer that sees all", {"layer_types": ["sliding_attention", "full_attention"]},
                       ["config.json", "layer_types[1]", "mistral"]))
    family("mixtral", ("other experts", {"num_local_experts": 7}, ["block_sparse_moe.gate.weight", "(7, 48)"]),
           ("another width", {"intermediate_size": 48}, ["experts.0.w1.weight", "(48, 48)", "(40, 48)"]))
    family("qwen2", ("no window", {"use_sliding_window": None, "layer_types": None}, FINE),
           ("max_window_layers a text", {"max_window_layers": "1"}, ["max_window_layers"]))
    family("qwen3_moe", ("experts counted by their newer name", {"num_experts": None, "num_local_experts": 8}, FINE),
           ("all layers dense", {"mlp_only_layers": [0, 1, 2]}, ["model.layers.0.mlp.gate_proj.weight", "missing"]),
           ("no layer dense", {"mlp_only_layers": []}, ["model.layers.1.mlp.gate.weight", "missing"]),
           ("every second layer", {"decoder_sparse_step": 2}, ["model.layers.0.mlp.gate_proj.weight", "missing"]),
           ("step 0", {"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
           ("mlp_only_layers a number", {"mlp_only_layers": 1}, ["mlp_only_layers"]))
    family("gemma2", ("another activation", {"hidden_activation": "gelu"}, ["hidden_activation", "tanh", '"gelu"']),
           ("the older key of the activation", {"hidden_act": "gelu"}, FINE),
           ("sees what follows", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
           ("a cap below 0", {"attn_logit_softcapping": -1}, ["attn_logit_softcapping"]),
           ("one that cannot divide", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]))
    family("gemma3", ("ropes in one object", {
        "rope_scaling": None, "rope_local_base_freq": None, "rope_theta": None, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}, FINE),
           ("unknown rope of windows", {"rope_scaling": None, "rope_parameters": {
               "full_attention": {}, "sliding_attention": {"rope_type": "spiral"}}}, ["spiral", "yarn"]),
           ("ropes of windows alone", {"rope_scaling": None, "rope_parameters": {"sliding_attention": {}}}, ["full_attention"]),
           ("a rope that is an array", {"rope_scaling": {"x": 1}, "rope_parameters": {"full_attention": [1]}}, ["full_attention"]),
           ("a part of each head turns", {"rope_scaling": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
           ("pattern 0", {"sliding_window_pattern": 0}, ["sliding_window_pattern"]))
    family("deepseek_v3", ("head_dim", {"head_dim": 64}, FINE),
           ("unknown scores", {"scoring_func": "tanh"}, ["scoring_func", "softmax", "sigmoid", "tanh"]),
           ("scores of the other version", {"scoring_func": "softmax"}, ["scoring_func", "deepseek_v3", '"softmax"']),
           ("unknown router", {"topk_method": "best"}, ["topk_method", "noaux_tc", "best"]),
           ("groups that do not fit", {"n_group": 5}, ["n_group"]),
           ("more groups than there are", {"topk_group": 5}, ["topk_group"]),
           ("too few in a group", {"n_group": 16}, ["n_group"]),
           ("no first dense layer", {"first_k_dense_replace": 0}, ["model.layers.0.mlp.gate.weight", "missing"]),
           ("another latent", {"kv_lora_rank": 256}, ["kv_a_proj_with_mqa.weight", "(576, 48)", "(320, 48)"]),
           ("other values", {"v_head_dim": 32}, ["kv_b_proj.weight", "(64, 512)", "(96, 512)"]),
           ("another layer with experts", {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
           ("another eps", {"rms_norm_eps": 1e-5}, ["rms_norm_eps"]),
           *[("tensors say how they are encoded", {"quantization_config": {"quant_method": "fp8"}}, FINE)] * has("encodings"))
    family("deepseek_v2", ("scores of the other version", {"scoring_func": "sigmoid"}, ["scoring_func", '"sigmoid"']),
           ("weights that add up to 1", {"norm_topk_prob": True}, ["norm_topk_prob"]),
           ("another router", {"topk_method": "noaux_tc"}, ["e_score_correction_bias", "missing"]))


def long_logits(model):
    return infer("logits", model, "--ids", ",".join(map(str, range(1, 13))), "--top", 3).out


def test_keys_of_other_families(folder):
    """What transformers does not read in a family changes nothing."""
    def check(fixture, changes):
        same(long_logits(copy_model(FIXTURES / fixture, folder, changes)), long_logits(FIXTURES / fixture), "logits")
    capped = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0, "rope_interleave": True}
    families = [("mistral", {"use_sliding_window": False}),
                ("llama_bias", {**capped, "use_sliding_window": True, "sliding_window": 2}),
                ("mixtral", {"norm_topk_prob": False}),
                ("gemma2", {"sliding_window_pattern": 1, "layer_types": None}), ("gemma3", {"attn_logit_softcapping": 1.0}),
                ("deepseek_v2", {"rope_interleave": False})]
    each([("parrot", {"norm_topk_prob": False, "scoring_func": "sigmoid", **capped}), *families * has("families")], check)


def test_null_switches_no_window_on(folder):
    """Null stands for what a missing use_sliding_window means, which hides nothing. The window of this model is 6."""
    needs("families")
    source = FIXTURES / "qwen2"
    missing = copy_model(source, folder, {"use_sliding_window": None})
    null = copy_model(source, folder)
    write_json(null / "config.json", read_json(source / "config.json") | {"use_sliding_window": None})
    same(long_logits(null), long_logits(missing), "logits")
    expect(long_logits(null) != long_logits(source), "the test is wrong: the window hides nothing")


def file_of(tensors):
    """A safetensors file's header and data, from name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def tensors_of(model):
    """Name -> (dtype, shape, bytes)."""
    return {name: (dtype, shape, raw) for name, (shape, dtype, raw) in read_model(model).items()}


def fused(source):
    """A model's tensors as transformers 5 writes them: all experts of a layer in gate_up_proj, gate's rows above up's, and
    in down_proj; Mixtral's in a module of another name."""
    given, tensors = tensors_of(source), {}
    for name, (dtype, shape, raw) in given.items():
        layer, expert, rest = name.partition(".experts.")
        new = layer.replace("block_sparse_moe", "mlp")
        if rest in ("0.gate_proj.weight", "0.w1.weight"):
            parts = ("w1", "w3", "w2") if "w1" in rest else ("gate_proj", "up_proj", "down_proj")
            n = 0
            while f"{layer}.experts.{n}.{parts[0]}.weight" in given:
                n += 1
            gate, up, down = ([given[f"{layer}.experts.{e}.{part}.weight"][2] for e in range(n)] for part in parts)
            tensors[new + ".experts.gate_up_proj"] = dtype, [n, 2 * shape[0], shape[1]], b"".join(map(bytes.__add__, gate, up))
            tensors[new + ".experts.down_proj"] = dtype, [n, *shape[::-1]], b"".join(down)
        elif not expert:
            tensors[name.replace("block_sparse_moe", "mlp")] = dtype, shape, raw
    return file_of(tensors)


def test_experts_in_one_tensor(folder):
    """As transformers 5 writes them, of every family with experts: the same logits as from a tensor each."""
    needs("families")
    def check(fixture):
        source = FIXTURES / fixture
        model = copy_model(source, folder, keep_weights=False)
        (model / "model.safetensors").write_bytes(safetensors(*fused(source)))
        same(long_logits(model), long_logits(source), "logits")
        sizes = [json.loads(infer("inspect", m, "--json").text) for m in (source, model)] if has("commands") else []
        keys = "parameters", "active_parameters", "weight_bytes", "bytes_of_experts_in_F16", "bytes_of_experts_in_BF16"
        same(*[[size.get(key) for key in keys] for size in sizes] or [0, 0], "sizes")
    each([("qwen3_moe",), ("mixtral",), ("deepseek_v2_lite",), ("deepseek_v3",)], check)
    source = FIXTURES / "qwen3_moe"
    model, (tensors, data) = copy_model(source, folder, keep_weights=False), fused(source)
    n, rows, dim = tensors[MANY]["shape"]

    def check_refusal(name, change, words):
        (model / "model.safetensors").write_bytes(safetensors({**tensors, MANY: {**tensors[MANY], **change}}, data))
        refused("logits", model, "--ids", 1, words=[MANY, *words])
    each([("transposed, as gpt-oss in BF16", {"shape": [n, dim, rows]}, [f"({n}, {rows}, {dim})"]),
          ("no numbers", {"dtype": "I16"}, ["I16", "BF16, F16"])], check_refusal)


def dequantised(model, dtype):
    """gpt-oss's tensors without MXFP4, as transformers writes them: experts' matrices transposed, in one tensor a layer."""
    tensors = tensors_of(model)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        (_, shape, blocks), (_, _, scales) = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        (n, rows, groups, _), values = shape, (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
        cols = 32 * groups
        matrix = [values[code] * 2.0 ** (scales[i // 16] - 127) for i, byte in enumerate(blocks) for code in (byte & 15, byte >> 4)]
        turned = [matrix[(e * rows + r) * cols + c] for e in range(n) for c in range(cols) for r in range(rows)]
        raw = struct.pack(f"<{len(turned)}{'e' if dtype == 'F16' else 'f'}", *turned)
        if dtype == "BF16":  # the upper halves
            raw = b"".join(raw[i + 2:i + 4] for i in range(0, len(raw), 4))
        tensors[name.replace("_blocks", "")] = dtype, [n, cols, rows], raw
    return file_of(tensors)


def test_gpt_oss_without_mxfp4(folder):
    """Experts as numbers that equal the codes: the same logits, without the room that reads the layout its refusal."""
    header, data = {}, b""

    def check(fixture, dtype):
        nonlocal header, data
        source = FIXTURES / fixture
        model = copy_model(source, folder, {"quantization_config": None}, keep_weights=False)
        header, data = dequantised(source, dtype)
        (model / "model.safetensors").write_bytes(safetensors(header, data))
        if not has("families"):
            return refused("logits", model, "--ids", 1, words=["gate_up_proj_blocks", "missing"])
        same(long_logits(model), long_logits(source), "logits")
    each([("odd", "BF16"), ("odd", "F16"), ("odd", "F32"), ("true_heads", "BF16")], check)
    if not has("families"):
        return
    model = copy_model(FIXTURES / "true_heads", folder, {"quantization_config": None}, keep_weights=False)

    def check_refusal(name, change, words):
        (model / "model.safetensors").write_bytes(safetensors({**header, MANY: {**header[MANY], **change}}, data))
        refused("logits", model, "--ids", 1, words=[MANY, *words])
    n, cols, rows = header[MANY]["shape"]
    each([("not transposed", {"shape": [n, rows, cols]}, [f"({n}, {cols}, {rows})"]),
          ("no numbers", {"dtype": "I16"}, ["I16", "BF16, F16"])], check_refusal)


def test_biases_of_zeros(folder):
    """Exporters add them to every matrix. They change nothing; others are refused, because no formula adds them."""
    needs("encodings")
    for fixture in ["odd", *["llama3", "qwen3_moe"] * has("families")]:
        tensors = tensors_of(FIXTURES / fixture)
        model = copy_model(FIXTURES / fixture, folder, keep_weights=False)
        for place in ("lm_head", "model.norm", "model.layers.0.input_layernorm", "model.layers.1.self_attn.rotary"):
            for dtype, raw, last in (("BF16", bytes(64), b"\1\0"), ("F16", bytes(64), b"\0\x80"), ("F32", bytes(64), b"\0\0\0\x80")):
                file = file_of({**tensors, place + ".bias": (dtype, [len(raw) // (2 + 2 * (dtype == "F32"))], raw[len(last):] + last)})
                (model / "model.safetensors").write_bytes(safetensors(*file))
                if dtype == "BF16":
                    refused("logits", model, "--ids", 1, words=[place + ".bias", "has no place"])
                else:  # the last is -0
                    same(long_logits(model), long_logits(FIXTURES / fixture), f"{fixture} with {place}.bias of zeros")


def test_words_that_python_writes(folder):
    """Python's json writes Infinity and NaN. Who reads such a key refuses it; the others change nothing."""
    for value in ("Infinity", "-Infinity", "NaN"):
        model = copy_model(PARROT, folder)
        config = (model / "config.json").read_text()
        (model / "config.json").write_text(config.replace("{", f'{{"x": [0.0, {value}],"y":{value}, "z": "NaN, \\"Infinity\\"",', 1))
        same(top_logits(model), top_logits(PARROT), value)
        for key in ("rope_theta", "sliding_window", "eos_token_id"):
            (model / "config.json").write_text(re.sub(rf'"{key}": ?[^,}}\]]*\]?', f'"{key}": {value}', config))
            refused("logits", model, "--ids", 1, words=[key] + [f'"{value}"'] * (key != "eos_token_id"))
    (model / "config.json").write_text(config[:-2] + ", NaN}")
    refused("logits", model, "--ids", 1, words=["config.json", "JSON"])
    model = copy_model(PARROT, folder)
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        write_json(model / name, {**read_json(model / name), "x": [float("inf"), float("-inf"), float("nan")]})
    same(top_logits(model), top_logits(PARROT), "logits")
    same(infer("tokenize", model, stdin="Hello").text, infer("tokenize", PARROT, stdin="Hello").text, "ids")


MANY = "model.layers.0.mlp.experts.gate_up_proj"


def test_text_of_a_model_of_pictures(folder):
    """Gemma 3 and Mistral Small 3.1 with eyes: the text's config.json in text_config, its tensors under either prefix, eyes left out."""
    needs("families")
    source = FIXTURES / "gemma3"
    expected = top_logits(source)
    text = {k: v for k, v in read_json(source / "config.json").items() if k != "eos_token_id"}
    header, content = read_safetensors(source / "model.safetensors")

    def check(name, rename, config, words=FINE):
        model = folder / name
        model.mkdir()
        write_json(model / "config.json", {"model_type": "gemma3", "eos_token_id": [1, 2], **config})
        tensors = {rename(k): v for k, v in header.items() if k != "__metadata__"}
        end = max(v["data_offsets"][1] for v in tensors.values())
        tensors["vision_tower.x"] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
        (model / "model.safetensors").write_bytes(safetensors(tensors, content + b"\0\0\0\0"))
        if words is FINE:
            same(top_logits(model), expected, "logits")
        else:
            refused("logits", model, "--ids", 1, words=words)
    each([("published", lambda k: "language_model." + k, {"text_config": text}),
          ("newer", lambda k: k.replace("model.", "model.language_model."), {"text_config": text}),
          ("none", lambda k: k, {}, ["text_config", "missing"]),
          ("a text", lambda k: k, {"text_config": "gemma3_text"}, ["text_config"]),
          ("other", lambda k: "x." + k, {"text_config": text}, ["lm_head.weight", "missing"])], check)
    table = header["model.embed_tokens.weight"]
    begin, end = table["data_offsets"]
    head = {**table, "data_offsets": [len(content), len(content) + end - begin]}
    row = (end - begin) // table["shape"][0]
    content += content[begin + row:end] + content[begin:begin + row]  # the rows of other tokens
    plain = copy_model(source, folder, {"tie_word_embeddings": False}, keep_weights=False)
    (plain / "model.safetensors").write_bytes(safetensors({**header, "lm_head.weight": head}, content))
    expected = top_logits(plain)
    header["lm_head.weight"] = head
    for tied in (True, False):
        model = folder / f"head {tied}"
        model.mkdir()
        write_json(model / "config.json", {"model_type": "gemma3", "text_config": {**text, "tie_word_embeddings": tied}})
        tensors = {"language_model." + k: v for k, v in header.items() if k != "__metadata__"}
        (model / "model.safetensors").write_bytes(safetensors(tensors, content))
        same(top_logits(model), expected, f"logits with a head of its own, tied {tied}")
    source, model = FIXTURES / "mistral", folder / "Mistral Small 3.1"
    header, content = read_safetensors(source / "model.safetensors")
    model.mkdir()
    write_json(model / "config.json", {"model_type": "mistral3", "text_config": read_json(source / "config.json")})
    tensors = {"language_model." + k: v for k, v in header.items() if k != "__metadata__"}
    (model / "model.safetensors").write_bytes(safetensors(tensors, content))
    same(top_logits(model), top_logits(source), "logits of mistral3")
    write_json(model / "config.json", {"model_type": "mistral3", "text_config": {
        **read_json(source / "config.json"), "model_type": "ministral3"}})
    refused("logits", model, "--ids", 1, words=["model_type", "mistral", "ministral3"])


def text_of(path, *pairs):
    return replace_text(json.dumps(read_json(path)), *pairs)


NUMBERS = ["rope_theta", "rms_norm_eps", "swiglu_limit"]
TEXTS = ["model_type", "hidden_act"]
FLAGS = ["attention_bias", "mlp_bias", "tie_word_embeddings"]
SCALING = {**dict.fromkeys(["rope_type", "type"], "a text"), "truncate": "true or false", **dict.fromkeys(
    ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
     "attention_factor", "attn_factor", "rope_theta"], "a number")}


def test_config_values_of_the_wrong_type(folder):
    """Whatever is read must have its type: a text where an object belongs would mean that nothing was said."""
    wrong = {"a number": ["7", True, [7], {"x": 7}], "a text": [7, True, ["silu"], {"x": 1}],
             "true or false": [0, 1, "true", []], "an object": ["yarn", 7, True, [{}]],
             "an array": ["full_attention", 7, {}]}
    kinds = {**dict.fromkeys(SIZES + NUMBERS, "a number"), **dict.fromkeys(TEXTS, "a text"),
             **dict.fromkeys(FLAGS, "true or false"), "layer_types": "an array",
             **dict.fromkeys(["rope_scaling", "rope_parameters", "quantization_config"], "an object")}
    cases = [(f"{key} = {value!r}", {key: value}, [f"{key} should be ", kind, json.dumps(value, separators=(",", ":"))])
             for key, kind in kinds.items() for value in wrong[kind]]
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}
    cases += [(f"{key} = {value!r} in rope_scaling", {"rope_scaling": {**yarn, key: value}}, [f"{key} should be ", kind])
              for key, kind in SCALING.items() for value in wrong[kind]]
    cases += [(f"quant_method = {value!r}", {"quantization_config": {"quant_method": value}}, ["quant_method should be"])
              for value in wrong["a text"]]

    def check(name, changes, words):
        model = copy_model(PARROT, folder, changes)
        refused("logits", model, "--ids", 1, words=["config.json", *words], seconds=SECONDS)
    each(cases, check)


LAX = [  # what cJSON would let pass, for any file: from `{"a": ...}` to text; words of the message
    ("nothing", lambda text: "", ["JSON"]),
    ("only a space", lambda text: " ", ["JSON"]),
    ("cut", lambda text: text.rstrip()[:-1], ["JSON"]),
    ("text behind", lambda text: text + "x", ["JSON", "byte"]),
    ("an object behind", lambda text: text + "{}", ["JSON", "byte"]),
    ("a NUL behind", lambda text: text + "\0", ["byte"]),
    ("a comment", lambda text: text.replace("{", "{/* */", 1), ["JSON"]),
    ("a comma too many", lambda text: text.rstrip()[:-1] + ",}", ["JSON"]),
    ("single quotes", lambda text: text.replace('"', "'"), ["JSON"]),
    ("an array", lambda text: f"[{text}]", []),
    ("\\u0000 in a key", lambda text: text.replace("{", '{"a\\u0000b": 1, ', 1), ["u0000"]),
    ("\\u0000 in a text", lambda text: text.replace("{", '{"a": "\\u0000", ', 1), ["u0000"]),
    ("a raw control byte", lambda text: text.replace("{", '{"a\tb": 1, ', 1), ["control byte"]),
    ("a form feed between", lambda text: text.replace("{", "{\f", 1), ["byte"]),
    ("invalid UTF-8", lambda text: text.replace("{", '{"\udcc0\udc80": 1, ', 1), ["UTF-8", "byte 2"]),
    ("a surrogate in UTF-8", lambda text: text.replace("{", '{"\udced\udca0\udc80": 1, ', 1), ["UTF-8"]),
    ("a lone surrogate", lambda text: text.replace("{", '{"\\ud800": 1, ', 1), ["JSON"]),
    ("a byte-order mark", lambda text: "\ufeff" + text, ["byte-order mark"]),
    ("UTF-16", lambda text: "\udcff\udcfe" + "\0".join(text) + "\0", ["UTF-8", "byte 0"]),
    ("01", lambda text: text.replace("{", '{"a": 01, ', 1), ["number"]),
    ("1.", lambda text: text.replace("{", '{"a": 1., ', 1), ["number"]),
    (".5", lambda text: text.replace("{", '{"a": .5, ', 1), ["JSON"]),
    ("+1", lambda text: text.replace("{", '{"a": +1, ', 1), ["JSON"]),
    ("1e", lambda text: text.replace("{", '{"a": 1e, ', 1), ["JSON"]),
    ("-.5", lambda text: text.replace("{", '{"a": -.5, ', 1), ["number"]),
    ("-01", lambda text: text.replace("{", '{"a": -01, ', 1), ["number"]),
    ("0x10", lambda text: text.replace("{", '{"a": 0x10, ', 1), ["JSON"]),
    ("NaN", lambda text: text.replace("{", '{"a": NaN, ', 1), FINE),
    ("nan", lambda text: text.replace("{", '{"a": nan, ', 1), ["JSON"]),
    ("+Infinity", lambda text: text.replace("{", '{"a": +Infinity, ', 1), ["JSON"]),
    ("a bad escape", lambda text: text.replace("{", '{"a": "\\x", ', 1), ["JSON"]),
    ("a key twice", lambda text: text.replace("{", '{"a": 1, "a": 1, ', 1), ["'a'", "twice"]),
    ("a key twice, deep", lambda text: text.replace("{", '{"a": [{"b": {"c": 1, "d": 2, "c": 1}}], ', 1),
     ["'c'", "twice"]),
    ("a key twice, once escaped", lambda text: text.replace("{", '{"ab": 1, "\\u0061b": 1, ', 1), ["'ab'", "twice"]),
    ("nested 100,000 deep", lambda text: text.replace("{", '{"a": ' + DEEP + ", ", 1), ["JSON"]),
    ("white space around", lambda text: f" \r\n\t{text}\n\n ", FINE),
]


def lax_cases(folder, file, check_fine, *command):
    source = (PARROT / file).read_text()

    def check(name, make, words):
        model = copy_model(PARROT, folder)
        (model / file).write_bytes(make(source).encode(errors="surrogateescape"))
        if words is FINE:
            check_fine(model)
        else:
            refused(command[0], model, *command[1:], words=[file, *words], seconds=SECONDS)
    each(LAX, check)


def test_config_is_strict_json(folder):
    lax_cases(folder, "config.json", top_logits, "logits", "--ids", "1")


def test_tokenizer_is_strict_json(folder):
    lax_cases(folder, "tokenizer.json", lambda model: infer("tokenize", model, stdin="x"), "tokenize")


def published(config):
    """{name: (dtype, shape)} of a published gpt-oss checkpoint, as its model card says."""
    dim, ffn, n = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    q, kv = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    layer = {"input_layernorm.weight": [dim], "post_attention_layernorm.weight": [dim], "mlp.router.weight": [n, dim],
             "mlp.router.bias": [n], "self_attn.sinks": [config["num_attention_heads"]]}
    for name, rows, cols in (("q", q, dim), ("k", kv, dim), ("v", kv, dim), ("o", dim, q)):
        layer |= {f"self_attn.{name}_proj.weight": [rows, cols], f"self_attn.{name}_proj.bias": [rows]}
    for name, rows, cols in (("gate_up", 2 * ffn, dim), ("down", dim, ffn)):
        layer |= {f"mlp.experts.{name}_proj_{what}": [n, rows, *rest] for what, rest in (
            ("blocks", [cols // 32, 16]), ("scales", [cols // 32]), ("bias", []))}
    shapes = {f"model.layers.{i}.{k}": v for i in range(config["num_hidden_layers"]) for k, v in layer.items()}
    shapes |= {"model.norm.weight": [dim], **dict.fromkeys(["model.embed_tokens.weight", "lm_head.weight"],
                                                           [config["vocab_size"], dim])}
    return {k: ("U8" if k.endswith(("_blocks", "_scales")) else "BF16", v) for k, v in shapes.items()}


def write_outline(path, tensors):
    """A safetensors file whose data is a hole; returns its size."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + (1 if dtype == "U8" else 2) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    path.write_bytes(safetensors(header, b""))
    os.truncate(path, path.stat().st_size + end)
    return end


def test_published_models_fit_their_config(folder):
    """The published config.json with every tensor in its place, 20b by its published index too. The data is a hole."""
    needs("commands")
    def check(name, source, parameters, layers):
        model, index = folder / name, source / "model.safetensors.index.json"
        model.mkdir()
        (model / "config.json").write_text((source / "config.json").read_text())
        tensors = published(read_json(source / "config.json"))
        if index.exists():
            shards = read_json(index)
            same(sorted(tensors), sorted(shards["weight_map"]), "names")
            same(sum(write_outline(model / shard, {k: v for k, v in tensors.items() if shards["weight_map"][k] == shard})
                     for shard in set(shards["weight_map"].values())), shards["metadata"]["total_size"], "bytes")
            (model / index.name).write_text(index.read_text())
        else:
            write_outline(model / "model.safetensors", tensors)
        shown = infer("inspect", model, program=PLAIN).text
        for line in (f"layers +{layers}", "width +2,880", "heads +64", "kv heads +8", "head size +64",
                     "vocabulary +201,088", "context +131,072", f"parameters +{parameters}"):
            expect(re.search(f"^{line}$", shown, re.M), f"no {line!r} in {shown}")
    small, large = data("gpt-oss-20b"), folder / "published"
    config = read_json(small / "config.json")  # the larger one differs in three fields
    large.mkdir()
    write_json(large / "config.json", {**config, "num_hidden_layers": 36, "num_local_experts": 128,
                                       "layer_types": (config["layer_types"] * 2)[:36]})
    each([("20b", small, "20,914,757,184", 24), ("120b", large, "116,829,156,672", 36)], check)


def test_one_matrix_under_two_names(folder):
    """Files of tied models may hold the embedding as lm_head too: the copy is not read."""
    head = HEADER["lm_head.weight"]["data_offsets"][1]  # the head stands first
    header = {k: {**v, "data_offsets": [x - head for x in v["data_offsets"]]} for k, v in HEADER.items()
              if k not in ("lm_head.weight", "__metadata__")}
    content = DATA[head:]
    tied, model = (copy_model(PARROT, folder, {"tie_word_embeddings": True}, keep_weights=False) for _ in range(2))
    (tied / "model.safetensors").write_bytes(safetensors(header, content))
    begin, end = header[EMBED]["data_offsets"]
    header["lm_head.weight"] = {**header[EMBED], "data_offsets": [len(content), len(content) + end - begin]}
    (model / "model.safetensors").write_bytes(safetensors(header, content + content[begin:end]))
    same(top_logits(model), top_logits(tied), "logits")
    if has("commands"):
        once, twice = (json.loads(infer("inspect", m, "--json").text) for m in (tied, model))
        for key in ("weight_bytes", "parameters", "active_parameters"):
            same(twice[key], once[key], key)

    def check(name, change, size, words):
        header["lm_head.weight"] = {**header[EMBED], "data_offsets": [len(content), len(content) + size]} | change
        (model / "model.safetensors").write_bytes(safetensors(header, content + content[begin:begin + size]))
        refused("logits", model, "--ids", 1, words=["lm_head.weight", *words])
    vocab, dim = header[EMBED]["shape"]
    each([("another shape", {"shape": [dim, vocab]}, end - begin, [f"({vocab}, {dim})", f"({dim}, {vocab})"]),
          ("other dimensions", {"shape": [vocab * dim]}, end - begin, [f"({vocab * dim})"]),
          ("another type", {"dtype": "I16"}, end - begin, ["I16", "BF16, F16"]),
          ("fewer rows", {"shape": [vocab - 1, dim]}, end - begin - 2 * dim, [f"({vocab - 1}, {dim})"]),
          ("nothing", {"shape": [0, dim]}, 0, [f"(0, {dim})"])], check)


def test_small_files_of_a_model(folder):
    """config.json, generation_config.json and tokenizer.json that are missing or no files; numbers past doubles."""
    def write(file, *pairs):
        return lambda m: (m / file).write_text(text_of(PARROT / file, *pairs))

    def no_file(file, make):
        return lambda m: ((m / file).unlink(), make(m / file))

    def large(m):
        with open(m / "config.json", "r+b") as f:
            f.truncate(1 << 40)

    config, generation, tokenizer = "config.json", "generation_config.json", "tokenizer.json"
    nothing = lambda path: None
    cases = [
        ("rope_theta 1e999", write(config, ('"rope_theta": 150000', '"rope_theta": 1e999')), ["rope_theta"]),
        ("hidden_size 1e999", write(config, ('"hidden_size": 96', '"hidden_size": 1e999')), ["hidden_size"]),
        ("layers twice", write(config, ("{", '{"num_hidden_layers": 3, ')), ["num_hidden_layers", "twice"]),
        ("no config", no_file(config, nothing), [config]),
        ("config is a directory", no_file(config, os.mkdir), [config, "not a regular file"]),
        ("config is a FIFO", no_file(config, os.mkfifo), [config, "not a regular file"]),
        ("config of a terabyte", large, [config]),
        ("generation_config is a FIFO", no_file(generation, os.mkfifo), [generation, "not a regular file"]),
        ("generation_config is no JSON", lambda m: (m / generation).write_text("{"), [generation, "JSON"]),
        ("eos outside in generation_config", lambda m: write_json(m / generation, {"eos_token_id": [404, 448]}),
         [generation, "eos_token_id"]),
        ("tokenizer is a FIFO", no_file(tokenizer, os.mkfifo), [tokenizer, "not a regular file"]),
        ("tokenizer is a directory", no_file(tokenizer, os.mkdir), [tokenizer]),
        ("no tokenizer", no_file(tokenizer, nothing), [tokenizer]),
    ]

    def check(name, make, words):
        model = copy_model(PARROT, folder)
        make(model)
        command = ["play", model, "-p", "x"] if "tokenizer" in name else ["logits", model, "--ids", 1]
        refused(*command, words=words, seconds=SECONDS)
    each(cases, check)


def test_folders_that_cannot_be_read(folder):
    """Only a folder without config.json is said to be without one."""
    model = copy_model(PARROT, folder)
    (model / "config.json").unlink()
    refused("logits", model, "--ids", 1, words=["no config.json is here", model.name])
    (model / "config.json").symlink_to("config.json")
    r = refused("logits", model, "--ids", 1, words=[f"{model}/config.json", os.strerror(errno.ELOOP)])
    expect("no config.json" not in r.err, r.err)
    model.chmod(0)
    try:
        if not os.access(model, os.R_OK | os.X_OK):  # root may read everything
            r = refused("logits", model, "--ids", 1, words=[f"{model}", os.strerror(errno.EACCES)])
            expect("no config.json" not in r.err, r.err)
    finally:
        model.chmod(0o700)
    refused("logits", model / "config.json", "--ids", 1, words=["config.json", os.strerror(errno.ELOOP)])


def test_weights_that_are_something_else(folder):
    """What is found in the place of weights is named."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 13\n"
    model = copy_model(PARROT, folder, keep_weights=False)
    for content, words in ((pointer, ["Git-LFS pointer"]), (b"<!DOCTYPE html><html></html>", ["web page"]),
                           (b"GGUF" + bytes(100), ["GGUF file"]), (b"PK\3\4" + bytes(100), ["PyTorch"]),
                           (bytes(100), ["or damaged"])):
        (model / "model.safetensors").write_bytes(content)
        refused("logits", model, "--ids", 1,
                words=["model.safetensors: no safetensors file", "download it again", *words])
    (model / "model.safetensors").unlink()
    refused("logits", model, "--ids", 1, words=["model.safetensors", "missing", "infer download"])


def test_files_that_are_no_models(folder):
    """MODEL names a file: what it is, and what would be one."""
    needs("encodings", "terminal")
    files = {"README.md": b"# Model", "pytorch_model.bin": b"PK\3\4" + bytes(100), "old.pt": b"\x80\2" + bytes(100), "empty": b"",
             "page.html": b"<!doctype html>", "model": b"GGUF" + bytes(100), "pointer": b"version https://git-lfs", "a.gguf": b"# Model" * 9}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    each([("text", "README.md", ["an unknown file, no model", "config.json and safetensors", ".gguf"]),
          ("PyTorch", "pytorch_model.bin", ["PyTorch's own format, no model"]), ("older", "old.pt", ["PyTorch's own format"]),
          ("empty", "empty", ["no model"]), ("a page", "page.html", ["a web page"]), ("no ending", "model", ["GGUF"]),
          ("LFS", "pointer", ["Git-LFS pointer"]), ("no GGUF", "a.gguf", ["a.gguf", "GGUF"]),
          ("safetensors", PARROT / "model.safetensors", ["a part of a model: name its folder", f"{PARROT}\n"]),
          ("not there", "/does/not/exist", ["/does/not/exist: No such file"]), ("nor here", "./x.gguf", ["./x.gguf: No such file"]),
          ("above", "../x/y", ["../x/y: No such file"]), ("a device", "/dev/null", ["/dev/null"])],
         lambda name, path, words: refused("logits", path, "--ids", 1, cwd=folder, words=words))
    model = copy_model(PARROT, folder, keep_weights=False)
    (model / "pytorch_model.bin").write_bytes(files["pytorch_model.bin"])
    refused("logits", model, "--ids", 1, words=["model.safetensors: missing", "pytorch_model.bin", "safetensors"])
    for options in (["--tap", folder / "x" / "y"], ["-o", folder / "x" / "y"], ["-o", folder]):
        refused("logits", PARROT, "--ids", 1, *options, code=1, words=[str(options[1])])


def test_folder_without_weights(folder):
    """A folder that holds config.json alone hides no model of its name in the hub's cache."""
    copy_model(PARROT, folder, name="models/a--b", keep_weights=False)
    copy_model(PARROT, folder, name="hub/models--a--b/snapshots/1")
    if has("commands"):
        listed = json.loads(infer("list", "--json", cwd=folder, env={"HF_HOME": folder}).text)
        same([(m["name"], m["bytes"] > 0) for m in listed], [("a/b", True)], "the list")
    infer("logits", "a/b", "--ids", 1, cwd=folder, env={"HF_HOME": folder})


def test_without_the_room_that_reads_it(folder):
    """A line says what this build does not have."""
    if has("families", "encodings", "formats", "commands", "serve"):
        raise Skip("is for a build without a room")
    if not has("families"):
        refused("logits", LLAMA, "--ids", 1, words=["config.json", "'llama'", "supported: gpt_oss"])
    if not has("encodings"):
        for method in ("fp8", "gptq"):
            model = copy_model(PARROT, folder, {"quantization_config": {"quant_method": method}})
            refused("logits", model, "--ids", 1, words=["config.json", "quant_method", "mxfp4", method])
        model = copy_model(PARROT, folder, keep_weights=False)
        fp8 = {**HEADER[NAME], "dtype": "F8_E4M3", "data_offsets": [BEGIN, BEGIN + (END - BEGIN) // 2]}
        rest = {"dtype": "U8", "shape": [(END - BEGIN) // 2], "data_offsets": [BEGIN + (END - BEGIN) // 2, END]}
        (model / "model.safetensors").write_bytes(safetensors({**HEADER, NAME: fp8, "z": rest}, DATA))
        refused("logits", model, "--ids", 1, words=["model.safetensors", "F8_E4M3"])
        (folder / "a.gguf").write_bytes(b"GGUF" + bytes(100))
        refused("logits", folder / "a.gguf", "--ids", 1, words=["a.gguf", "folder"])
    if not has("formats"):
        model = copy_model(ODD, folder)
        write_json(model / "tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
        write_json(model / "tokenizer_config.json", {"chat_template": "<|im_start|>"})
        refused("render", model, stdin='{"messages": []}', words=["chat format"])
    for room, command in (("commands", "inspect"), ("serve", "serve")):
        if not has(room):
            expect(f"no command {command}" in infer(command, PARROT, code=2).err, command)


def test_tokenizer_of_another_model(folder):
    model = copy_model(ODD, folder)
    (model / "tokenizer.json").symlink_to(PARROT / "tokenizer.json")
    refused("play", model, "-p", "x", words=["tokenizer.json", "420", "301"])


def test_ids_without_an_embedding(folder):
    """Added tokens may lie beyond the model's vocabulary; neither a merge nor the template nor a byte gives their ids."""
    model, vocab = copy_model(ODD, folder), {chr(97 + i): i for i in range(26)}
    (model / "tokenizer.json").write_text(json.dumps({
        "added_tokens": [{"id": 500, "content": "ab", "special": False, "normalized": False},
                         {"id": 501, "content": "<unk>", "special": True, "normalized": False}],
        "model": {"type": "BPE", "vocab": {**vocab, "ab": 500, "<unk>": 501}, "merges": ["a b"], "unk_token": "<unk>",
                  "fuse_unk": True},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<unk>", "type_id": 0}},
                                                                    {"Sequence": {"id": "A", "type_id": 0}}]}}))
    infer("logits", model, "-p", "xaby")
    refused("logits", model, "-p", "A", words=["0x41"])


# ---- tokenizer.json

TOKENIZER = read_json(PARROT / "tokenizer.json")
VOCAB, MERGES, ADDED = TOKENIZER["model"]["vocab"], TOKENIZER["model"]["merges"], TOKENIZER["added_tokens"]
SAMPLE = "Hello! What is my name?\n 1234 don't <|end|> é 漢字\t👩‍🚀 ~"


def of_model(**changes):
    """tokenizer.json with other fields of its model."""
    return json.dumps({**TOKENIZER, "model": {**TOKENIZER["model"], **changes}})


def of_file(**changes):
    return json.dumps({**TOKENIZER, **changes})


def with_added(**changes):
    """One added token more."""
    token = {"id": 421, "content": "<|new|>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
    return of_file(added_tokens=ADDED + [changed(token, changes)])


def with_merge(merge):
    """One merge more."""
    return of_model(merges=MERGES + [merge])


def without_byte(letter):
    return of_model(vocab={k: v for k, v in VOCAB.items() if k != letter})


def split_on(pattern):
    return of_file(pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]})


def with_split(**changes):
    step = {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False}
    return of_file(pre_tokenizer=changed(step, changes))


def component(key, kind):
    return of_file(**{key: {"type": kind}})


def in_sequence(key, parts, kind):
    return of_file(**{key: {"type": "Sequence", parts: [{"type": kind}]}})


LONGEST = max(VOCAB, key=len)
GAPS = {token: i if i < 300 else i + 100000 for token, i in VOCAB.items()}
TOKENIZERS = [  # what is wrong, the file, the text, words of the message; FINE: the ids are those of the parrot
    ("two tokens with one id", lambda: of_model(vocab={**VOCAB, "an": VOCAB["in"]}), "x", [str(VOCAB["in"])]),
    ("a negative id", lambda: of_model(vocab={**VOCAB, "an": -1}), "x", ["'an'"]),
    ("an id of 2^31", lambda: of_model(vocab={**VOCAB, "an": 2 ** 31}), "x", ["'an'"]),
    ("an id of 2^32", lambda: of_model(vocab={**VOCAB, "an": 2 ** 32 + VOCAB["an"]}), "x", ["'an'"]),
    ("an id of 1.5", lambda: of_model(vocab={**VOCAB, "an": 1.5}), "x", ["'an'"]),
    ("an id that is a text", lambda: of_model(vocab={**VOCAB, "an": str(VOCAB["an"])}), "x", ["'an'"]),
    ("one name twice", lambda: of_model(vocab={**VOCAB, "@": 450}).replace("@", "\\u0061n"), "x", ["'an'", "twice"]),
    ("an empty token", lambda: of_model(vocab={**VOCAB, "": 450}), "x", ["450", "empty"]),
    ("no vocabulary", lambda: of_model(vocab={}), "x", ["vocab"]),
    ("a vocabulary that is an array", lambda: of_model(vocab=list(VOCAB)), "x", ["vocab"]),
    ("a byte token missing, its byte in the text", lambda: without_byte("~"), "a~", ["0x7E"]),
    ("a merge of an unknown left half", lambda: with_merge(["zq", "a"]), "x", ["merge", "zq", "left"]),
    ("a merge of an unknown right half", lambda: with_merge(["a", "zq"]), "x", ["merge", "zq", "right"]),
    ("a merge longer than any token", lambda: with_merge([LONGEST, LONGEST]), "x", ["merge", "result"]),
    ("a merge of an empty half", lambda: with_merge(["", "a"]), "x", ["merge"]),
    ("a merge of three", lambda: with_merge(["a", "n", "d"]), "x", ["merge", str(len(MERGES))]),
    ("a merge of one", lambda: with_merge("an"), "x", ["merge", str(len(MERGES))]),
    ("a merge of numbers", lambda: with_merge([1, 2]), "x", ["merge", str(len(MERGES))]),
    ("a merge text with two spaces", lambda: with_merge("a n d"), "x", ["merge", str(len(MERGES))]),
    ("merges are an object", lambda: of_model(merges={}), "x", ["merges"]),
    ("no merges", lambda: of_model(merges=None), "x", ["merges"]),
    ("an empty added token", lambda: with_added(content=""), "x", ["added token"]),
    ("an added token without content", lambda: with_added(content=None), "x", ["added token"]),
    ("an added token without id", lambda: with_added(id=None), "x", ["<|new|>"]),
    ("an added token with a negative id", lambda: with_added(id=-1), "x", ["<|new|>"]),
    ("an added token with id 2^31", lambda: with_added(id=2 ** 31), "x", ["<|new|>"]),
    ("an added token with the id of another", lambda: with_added(id=420), "x", ["420"]),
    ("an added token with the id of a word", lambda: with_added(id=VOCAB["an"]), "x", [str(VOCAB["an"])]),
    ("an added token twice", lambda: with_added(content="<|end|>"), "x", ["<|end|>", "421"]),
    ("added tokens are an object", lambda: of_file(added_tokens={}), "x", ["added_tokens"]),
    ("an added token is a text", lambda: of_file(added_tokens=["<|end|>"]), "x", ["added token"]),
    ("a lone surrogate in the vocabulary", lambda: of_model(vocab={**VOCAB, "\ud800": 450}), "x", ["JSON"]),
    ("a lone surrogate in an added token", lambda: with_added(content="\udfff"), "x", ["JSON"]),
    ("two models", lambda: json.dumps(TOKENIZER)[:-1] + ', "model": {"type": "BPE"}}', "x", ["'model'", "twice"]),
    ("no model", lambda: json.dumps(changed(TOKENIZER, {"model": None})), "x", ["model"]),
    ("another kind of model", lambda: of_model(type="WordPiece"), "x", ["WordPiece"]),
    ("dropped suffixes", lambda: of_model(end_of_word_suffix="</w>"), "x", ["end_of_word_suffix"]),
    ("an unknown pre-tokenizer", lambda: component("pre_tokenizer", "Zebra"), "x", ["pre_tokenizer", "Zebra"]),
    ("an unknown pre-tokenizer in a sequence", lambda: in_sequence("pre_tokenizer", "pretokenizers", "Zebra"), "x",
     ["pre_tokenizer", "Zebra"]),
    ("a sequence in a sequence", lambda: in_sequence("pre_tokenizer", "pretokenizers", "Sequence"), "x", ["Sequence"]),
    ("an unknown normalizer", lambda: component("normalizer", "Zebra"), "x", ["normalizer", "Zebra"]),
    ("an unknown normalizer in a sequence", lambda: in_sequence("normalizer", "normalizers", "Zebra"), "x", ["Zebra"]),
    ("an unknown decoder", lambda: component("decoder", "Zebra"), "x", ["decoder", "Zebra"]),
    ("an unknown decoder in a sequence", lambda: in_sequence("decoder", "decoders", "Zebra"), "x", ["Zebra"]),
    ("an unknown post-processor", lambda: component("post_processor", "Zebra"), "x", ["post_processor", "Zebra"]),
    ("a normalizer that removes", lambda: of_file(
        normalizer={"type": "Replace", "pattern": {"String": "<|new|>"}, "content": ""},
        added_tokens=ADDED + [{"id": 421, "content": "<|new|>", "normalized": True}]), "x", ["normalizer"]),
    ("an added token as a word", lambda: with_added(single_word=True), "x", ["single_word", "<|new|>"]),
    ("an added token that takes spaces", lambda: with_added(lstrip=True), "x", ["lstrip", "<|new|>"]),
    ("a long added token", lambda: with_added(content="x" * 257), "x", ["added token"]),
    ("a space before every text", lambda: of_file(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}), "x",
     ["pre_tokenizer", "add_prefix_space"]),
    ("a template of two texts", lambda: of_file(post_processor={
        "type": "TemplateProcessing", "single": [{"Sequence": {}}, {"Sequence": {}}]}), "x", ["post_processor"]),
    ("a template without the text", lambda: of_file(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "e"}}],
        "special_tokens": {"e": {"ids": [0]}}}), "x", ["post_processor"]),
    ("a template with an unknown name", lambda: of_file(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "zebra"}}, {"Sequence": {}}]}), "x", ["post_processor"]),
    ("a template with an id outside", lambda: of_file(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "e"}}, {"Sequence": {}}],
        "special_tokens": {"e": {"ids": [421]}}}), "x", ["post_processor"]),
    ("a pre-tokenizer without type", lambda: of_file(pre_tokenizer={}), "x", ["pre_tokenizer"]),
    ("a split that removes", lambda: with_split(behavior="Removed"), "x", ["Removed"]),
    ("a split inverted", lambda: with_split(invert=True), "x", ["invert"]),
    ("a split without pattern", lambda: with_split(pattern=None), "x", ["pattern"]),
    ("a pattern that does not compile", lambda: split_on("(a"), "x", ["(a"]),
    ("a pattern that explodes", lambda: split_on("(a+)+$"), "a" * 100 + "!", ["match limit"]),
    ("a pattern that explodes late", lambda: split_on("(a+)+$"), "b" * 1000 + "a" * 100 + "!", ["match limit"]),
    ("a pattern that scans for each match", lambda: split_on("(?:a+a+b)|a"), "a" * 10000, ["match limit"]),
    ("a pattern that looks ahead for each match", lambda: split_on("a(?=.*b)|a"), "a" * 100000, ["match limit"]),
    ("a pattern that refers back", lambda: split_on("(a*)b\\1c|a"), "a", ["pattern"]),
    ("a pattern that looks back", lambda: split_on("\\X"), "Hello", ["pattern"]),
    ("a pattern that moves a match's beginning", lambda: split_on("(?<=l(?1))o|(\\Kl)"), "Hello", ["pattern"]),
    ("a pattern nested deep", lambda: split_on("(" * 10000 + ")" * 10000), "x", ["pattern"]),
    ("ids with gaps", lambda: of_model(vocab=GAPS), SAMPLE, lambda i: i if i < 300 or i >= 400 else i + 100000),
    ("a byte token missing, its byte not in the text", lambda: without_byte("ÿ"), SAMPLE, FINE),
    ("merges as texts", lambda: of_model(merges=[" ".join(m) for m in MERGES]), SAMPLE, FINE),
    ("merges in both notations", lambda: of_model(merges=[m if i % 2 else " ".join(m) for i, m in enumerate(MERGES)]),
     SAMPLE, FINE),
    ("a pattern of lines", lambda: split_on("^an$|a|n|\n"), "an\nan", FINE),
    ("a pattern that matches nothing", lambda: split_on("(?:)"), "a", FINE),
    ("unknown keys", lambda: of_file(something=[1]), SAMPLE, FINE),
]


def test_tokenizer(folder):
    def ids(model, text):
        return ids_of(infer("tokenize", model, stdin=text))

    def check(name, make, text, words):
        model = folder / name
        model.mkdir()
        (model / "tokenizer.json").write_text(make())
        if words is FINE:
            same(ids(model, text), ids(PARROT, text), "ids")
        elif callable(words):
            same(ids(model, text), [words(i) for i in ids(PARROT, text)], "ids")
        else:
            refused("tokenize", model, stdin=text, words=["tokenizer.json", *words], seconds=SECONDS)
    each(TOKENIZERS, check)


def test_scores(folder):
    """Scores in place of merges: the highest merges first, of equal ones the leftmost. A byte's token never merges."""
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4, "abc": 5, "<0x64>": 6, "da": 7}

    def check(name, scores, text, ids):
        model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True, "scores": scores}
        write_json(folder / "tokenizer.json", {"model": model})
        same(ids_of(infer("tokenize", folder, stdin=text)), ids, text)
    equal = [0] * 8
    each([("equal", equal, "abab", [4, 4]), ("the result has a score, too", equal, "abc", [5]),
          ("bc is higher", [0, 0, 0, -1, -2, -3], "bcabcb", [3, 5, 1]), ("less than 0", [-9, -9, -9, -3, -1.5, -2], "abcbc", [5, 3]),
          ("bytes", equal, "da", [6, 0])], check)


def test_added_letter(folder):
    """A letter that stands for a byte in the vocabulary. If that lists it, the id there counts, as in `tokenizers`."""
    for name, vocab, wanted in (("listed", VOCAB, VOCAB["õ"]), ("not listed", changed(VOCAB, {"õ": None}), 421)):
        model = folder / name
        model.mkdir()
        added = [*ADDED, {"id": 421, "content": "õ", "special": False, "normalized": True}]
        (model / "tokenizer.json").write_text(json.dumps(
            {**TOKENIZER, "added_tokens": added, "model": {**TOKENIZER["model"], "vocab": vocab}}))
        same(ids_of(infer("tokenize", model, stdin="aõb")), [VOCAB["a"], wanted, VOCAB["b"]], name)
        same(infer("detokenize", model, stdin=str(wanted)).out, b"\xf5", name)
    twin = next(k for k in VOCAB if k.startswith("Ġ") and len(k) > 1)  # the same bytes as another token
    (folder / "tokenizer.json").write_text(with_added(content=" " + twin[1:]))
    refused("tokenize", folder, stdin="x", words=["421", "twice"])


def test_text_never_becomes_a_control_token(folder):
    """Control tokens that the vocabulary lists too: as a character, as the result of a merge, as a whole word."""
    tokens = [{"id": VOCAB[name], "content": name, "special": True} for name in ("a", "an", "in")]
    for whole in (False, True):
        (folder / "tokenizer.json").write_text(json.dumps(
            {**TOKENIZER, "added_tokens": ADDED + tokens, "model": {**TOKENIZER["model"], "ignore_merges": whole}}))
        for text in ("a", "an", "in", "an in", "main"):
            r = infer("tokenize", folder, stdin=text, code=3 if "a" in text else 0)
            expect("0x61" in r.err if "a" in text else ids_of(r) == [VOCAB["i"], VOCAB["n"]], f"{text}: {r.out} {r.err}")
        same(ids_of(infer("tokenize", folder, "--special", stdin="an")), [VOCAB["an"]], "control tokens, asked for")


def test_an_added_token_that_is_a_byte_too(folder):
    """Byte 0xE9 is written é: as an added token that is the character, with the id of the byte."""
    (folder / "tokenizer.json").write_text(with_added(id=VOCAB["é"], content="é", special=False))
    same(ids_of(infer("tokenize", folder, stdin="é\u9999")), [VOCAB["é"], VOCAB["é"], 99, 247], "ids as of tokenizers")


def test_tokenizer_config(folder):
    """What stands beside tokenizer.json: a token before the text; names in the chat template are control tokens."""
    start, end = ({t["content"]: t["id"] for t in ADDED}[name] for name in ("<|start|>", "<|end|>"))
    plain = [{**t, "special": False} for t in ADDED]
    (folder / "tokenizer.json").write_text(of_file(added_tokens=plain))

    def check(name, config, special, text):
        write_json(folder / "tokenizer_config.json", config)
        same(ids_of(infer("tokenize", folder, "--special", stdin="<|end|>")), special, "ids with control tokens")
        same(end in ids_of(infer("tokenize", folder, stdin="<|end|>")), text, "taken from text")
    each([
        ("nothing", {}, [end], True),
        ("a text", {"add_bos_token": True, "bos_token": "<|start|>"}, [start, end], True),
        ("an object", {"add_bos_token": True, "bos_token": {"content": "<|start|>"}}, [start, end], True),
        ("not asked for", {"add_bos_token": False, "bos_token": "<|start|>"}, [end], True),
        ("not known", {"add_bos_token": True, "bos_token": "<s>"}, [end], True),
        ("a template", {"chat_template": "{{ '<|end|>\\n' }}"}, [end], False),
        ("templates", {"chat_template": [{"name": "default", "template": "<|end|>"}]}, [end], False),
        ("another template", {"chat_template": [{"name": "default", "template": "x"},
                                                {"name": "tool_use", "template": "<|end|>"}]}, [end], False),
        ("a template in an array", {"chat_template": ["<|end|>"]}, [end], False)], check)
    combined = "<e\u0301>"  # NFC makes another text of it: the template is searched for the name, not for that
    (folder / "tokenizer.json").write_text(of_file(
        added_tokens=[*plain, {"id": 500, "content": combined, "special": False, "normalized": True}],
        normalizer={"type": "NFC"}))
    for template, taken in (("x", True), (combined, False)):
        write_json(folder / "tokenizer_config.json", {"chat_template": template})
        same(500 in ids_of(infer("tokenize", folder, stdin=combined)), taken, f"taken from text, template {template}")
    (folder / "tokenizer_config.json").write_text("{")
    refused("tokenize", folder, stdin="x", words=["tokenizer_config.json", "JSON"])


def test_many_added_tokens_in_time(folder):
    """100,000 added tokens against 1 MB of text that keeps beginning with them: limit as for 1 MiB of one character."""
    tokens = [{"id": 1000 + i, "content": "a" * (i % 50) + f"<{i}>", "single_word": False, "lstrip": False,
               "rstrip": False, "normalized": False, "special": False} for i in range(10 ** 5)]
    (folder / "tokenizer.json").write_text(of_file(added_tokens=ADDED + tokens))
    r = infer("tokenize", folder, stdin="a" * (1 << 20) + "<7>", program=PLAIN, cpu=5)
    same(ids_of(r)[-1], 1000 + 7, "the last id")


def test_marks_in_time(folder):
    """1 MiB of combining marks in the wrong order, which NFC has to sort: limit as for 1 MiB of one character."""
    (folder / "tokenizer.json").write_text(of_file(normalizer={"type": "NFC"}))
    for marks in "\u0301\u0323" * (1 << 18), "\u0F73" * ((1 << 20) // 3):  # U+0F73 stands for two marks
        infer("tokenize", folder, stdin=marks, program=PLAIN, cpu=5)


def test_large_tokenizer_in_time():
    """The published tokenizer.json, 28 MB, in under 0.5 s; ten times that is the limit here."""
    r = infer("tokenize", data("gpt-oss-20b"), stdin="hello world", program=PLAIN, cpu=5)
    same(ids_of(r), [24912, 2375], "ids")
