"""Every encoding of safetensors: the logits are those of the same weights as other people's code decodes them, no scale
is without effect, and what is not implemented or does not fit is refused."""
import json
import math
import struct

from helpers import (FIXTURES, copy_model, each, expect, infer, read_json, read_safetensors, refused, safetensors, same,
                     write_json)
from test_logits import golden, read_npy

NEEDS = ("encodings", "families")  # rooms

FOLDER = FIXTURES / "encodings"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/golden.safetensors"))
FIRST = "model.layers.0.self_attn.o_proj"
SCALES = ("weight_scale_inv", "weight_scale", "scale", "scales")  # their last part; factors are tried too
FACTORS = ("weight_global_scale", "weight_scale_2")


def tensors(name):
    """{name: [dtype, shape, bytes]} of a fixture."""
    header, content = read_safetensors(FOLDER / name / "model.safetensors")
    return {k: [v["dtype"], v["shape"], content[slice(*v["data_offsets"])]]
            for k, v in header.items() if k != "__metadata__"}


def write(folder, name, changed, config=None):
    """A copy of a fixture with these tensors."""
    header, content = {}, b""
    for key, (dtype, shape, raw) in changed.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(raw)]}
        content += raw
    model = copy_model(FOLDER / name, folder, config, keep_weights=False)
    (model / "model.safetensors").write_bytes(safetensors(header, content))
    return model


def error(model, folder, name):
    ids, shape, expected = golden(f"encodings/{name}")
    infer("logits", model, "--ids", ",".join(map(str, ids)), "--all", "-o", folder / f"{name}.npy")
    found_shape, found = read_npy(folder / f"{name}.npy")
    same(found_shape, shape, "shape")
    return math.dist(found, expected) / math.hypot(*expected)


def test_logits_of_the_decoded_weights(folder):
    def check(name):
        e = error(FOLDER / name, folder, name)
        expect(e < 1e-5, f"relative error {e:.1e}")
    each([(name,) for name in NAMES], check)


def larger(dtype, raw):
    """The first number, larger by 1 %, or by the least step where that is more."""
    if dtype == "F32":
        return struct.pack("<f", struct.unpack("<f", raw[:4])[0] * 1.01) + raw[4:]
    if dtype in ("BF16", "F16"):
        step = {"BF16": 2, "F16": 11}[dtype]  # of 128, of 1,024
        return struct.pack("<H", struct.unpack("<H", raw[:2])[0] + step) + raw[2:]
    return bytes([raw[0] + 1]) + raw[1:]  # E4M3, E8M0


def test_one_scale_larger_by_a_hundredth(folder):
    """A scale of each kind of matrix, and a tensor's whole factor."""
    def check(name):
        all_of = tensors(name)
        changes = {}  # by matrix, of all experts at once; norms behind q and k may take a factor out again
        for key in all_of:
            module, last = key.split(".")[-2:]
            if last in SCALES + FACTORS and module not in ("q_proj", "k_proj"):
                changes.setdefault((module, last), []).append(key)
        expect(len(changes) >= 3, f"the test is wrong: only {changes}")
        for keys in changes.values():
            new = {key: all_of[key][:2] + [larger(all_of[key][0], all_of[key][2])] for key in keys}
            e = error(write(folder, name, {**all_of, **new}), folder, name)
            expect(e > 2e-5, f"{keys[0]}: relative error {e:.1e}")
    each([(name,) for name in NAMES], check)


def rotated(*locations):
    """SpinQuant, whose rotations of weights are in the weights."""
    apply = [{"targets": ["Linear"], "location": location, "inverse": False, "ignore": []} for location in locations]
    return {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": apply, "head_dim": None}}}}


CONFIGS = [  # a fixture, its quantization_config with one thing changed, words of the message
    ("fp8_block", {"quant_method": "bitsandbytes"}, ["quant_method", "bitsandbytes", "gptq", "awq"]),
    ("fp8_block", {"weight_block_size": [128, 100]}, ["weight_block_size", "100"]),
    ("fp8_block", {"weight_block_size": ["128", "128"]}, ["weight_block_size", "two whole numbers", '["128","128"]']),
    ("fp8_block", {"weight_block_size": [[128], [128]]}, ["weight_block_size", "two whole numbers"]),
    ("fp8_block", {"weight_block_size": [128]}, ["weight_block_size", "two whole numbers"]),
    ("fp8_block", {"fmt": "e5m2"}, ["fmt", "e5m2", "e4m3"]),
    ("fp8_modelopt", {"quant_algo": "fp8_pb_wo"}, None),
    ("fp8_modelopt", {"quant_algo": "INT9"}, ["quant_algo", "INT9", "NVFP4"]),
    ("gptq4", {"bits": 3}, ["bits", "3", "4, 8"]),
    ("gptq4", {"group_size": 48}, ["group_size", "48", "128"]),
    ("gptq4", {"group_size": "128"}, None),
    ("gptq4", {"checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "gptq_v2"]),
    ("gptq4", {"is_marlin_format": True}, ["is_marlin_format", "true"]),
    ("gptq4", {"pack_dtype": "int64"}, ["pack_dtype", "int64"]),
    ("gptq4", {"dynamic": {"+:.*": {"bits": 2}, "-:.*lm_head": {}}}, ["bits", "2"]),
    ("gptq4", {"dynamic": {"+:.*": {"bits": 8, "group_size": 64}}}, None),
    ("awq4", {"version": "gemv"}, ["version", "gemv", "gemm"]),
    ("awq4", {"version": "GEMM"}, None),
    ("awq4", {"checkpoint_format": "gemm", "format": "gemm", "pack_dtype": "int32"}, None),
    ("awq4", {"checkpoint_format": "gemv", "format": "gemv"}, ["gemv", "gptq_v2, gemm"]),
    ("packed4_zero", {"format": "marlin-24"}, ["format", "marlin-24", "pack-quantized"]),
    ("packed4_zero", {"quantization_status": "frozen"}, None),
    ("packed4_zero", {"quantization_status": "calibration"}, ["quantization_status", "calibration", "frozen"]),
    ("packed4_zero", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["format", "sparse-24-bitmask"]),
    ("packed4_zero", {"sparsity_config": {"format": "dense"}, "version": "0.12.2", "transform_config": {}}, None),
    ("packed4_zero", rotated("weight_input", "weight_output"), None),
    ("packed4_zero", rotated("weight_input", "input"), ["location", "weight_input, weight_output", "and is input"]),
    ("packed4_zero", {"config_groups": {"group_0": {"weights": {"num_bits": 5}}}}, ["num_bits", "5"]),
    ("mxfp4", {"config_groups": {"group_0": {"weights": {"group_size": 24}}}}, ["group_size", "24"]),
    ("nvfp4_modelopt", {"producer": {"name": "modelopt", "version": "0.29.0"}}, None),
    ("nvfp4_modelopt", {"kv_cache_scheme": {"num_bits": 2}}, None),
]


def test_config(folder):
    """What quantization_config says is read where it is known, and refused with its name where it is not."""
    def check(_, name, changes, words):
        quantization = read_json(FOLDER / name / "config.json")["quantization_config"] | changes
        model = copy_model(FOLDER / name, folder, {"quantization_config": quantization})
        if words:
            refused("logits", model, "--ids", 1, words=["config.json", *words])
        else:
            infer("logits", model, "--ids", 1)
    each([(f"{case[0]} {json.dumps(case[1])}", *case) for case in CONFIGS], check)


def test_auto_round(folder):
    """Its own format holds the tensors of GPTQ or AWQ. packing_format tells which of GPTQ's zeros they are."""
    said = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "sym": False,
            "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}}}
    for name, packing in (("gptq4", "auto_round:auto_gptq"), ("awq4", "auto_round:auto_awq")):
        quantization = {"quantization_config": said | {"packing_format": packing}}
        e = error(copy_model(FOLDER / name, folder, quantization), folder, name)
        expect(e < 1e-5, f"{packing}: relative error {e:.1e}")
    for packing in ({}, {"packing_format": "auto_round"}, {"packing_format": "auto_round:gptqmodel"}):
        model = copy_model(FOLDER / "gptq4", folder, {"quantization_config": said | packing})
        refused("logits", model, "--ids", 1, words=["packing_format", "auto_round:auto_gptq", *packing.values()])


def test_deep_config_in_time(folder):
    """A large text as deep as JSON may be is not copied at each level. The limit is for a build with sanitizers."""
    deep = "x" * 10 ** 6
    for _ in range(900):
        deep = [deep]
    model = copy_model(FOLDER / "fp8_block", folder, {"quantization_config": {"a": deep, "quant_method": "awq9"}})
    refused("logits", model, "--ids", 1, words=["config.json", "awq9"], cpu=2)


def test_awq_without_its_config(folder):
    """The shapes of AWQ's tensors tell all, so models that declare it only in quant_config.json are read too. What has
    the shapes of GPTQ is refused if it is declared as AWQ: its zeros have two meanings."""
    e = error(copy_model(FOLDER / "awq4", folder, {"quantization_config": None}), folder, "awq4")
    expect(e < 1e-5, f"relative error {e:.1e}")
    model = copy_model(FOLDER / "gptq4_64", folder, {"quantization_config": {"quant_method": "awq"}})
    refused("logits", model, "--ids", 1, words=["q_proj.qweight", "(64, 8)", "(8, 64)"])


def test_older_place_of_the_config(folder):
    """GPTQ's quantize_config.json does what quantization_config does. Without both, its zeros have two meanings."""
    name = "gptq8_v2"
    said = read_json(FOLDER / name / "config.json")["quantization_config"]
    del said["quant_method"]
    model = copy_model(FOLDER / name, folder, {"quantization_config": None})
    words = ["config.json", "quantization_config", "quantize_config.json", "download"]
    refused("logits", model, "--ids", 1, words=words)
    for text, words in ((json.dumps(said | {"bits": 3}), ["bits", "3", "4, 8"]), ("[]", ["an object"]), ("{", ["JSON"])):
        (model / "quantize_config.json").write_text(text)
        refused("logits", model, "--ids", 1, words=["quantize_config.json", *words])
    del said["checkpoint_format"]
    for key, kind, right in (("checkpoint_format", "gptq_v2", True), ("format", "gptq_v2", True), ("format", "gptq", False)):
        write_json(model / "quantize_config.json", said | {key: kind})
        e = error(model, folder, name)
        expect((e < 1e-5) == right, f"{key} {kind}: relative error {e:.1e}")


def entry(key, **new):
    """Other fields of one tensor: dtype, shape, raw, a function of its bytes."""
    def change(all_of):
        dtype, shape, raw = all_of[key]
        raw = new["raw"](raw) if "raw" in new else raw
        return {**all_of, key: [new.get("dtype", dtype), new.get("shape", shape), raw]}
    return change


def without(key):
    return lambda all_of: {k: v for k, v in all_of.items() if k != key}


def added(key, like):
    return lambda all_of: {**all_of, key: all_of[like]}


def as_plain(module, rows, cols):
    """A module in BF16 among those that are encoded."""
    def change(all_of):
        kept = {k: v for k, v in all_of.items() if not k.startswith(module + ".")}
        return {**kept, f"{module}.weight": ["BF16", [rows, cols], bytes(rows * cols * 2)]}
    return change


def as_gptq(module):
    """A module in GPTQ's 4 bits, all of whose rows share a scale and a zero in each of four groups of columns."""
    def change(all_of):
        (rows, cols), kept = all_of[module + ".weight"][1], {k: v for k, v in all_of.items() if module + "." not in k}
        return {**kept, module + ".scales": ["F16", [4, 1], bytes(8)], module + ".qzeros": ["I32", [4, 1], bytes(16)],
                module + ".qweight": ["I32", [cols // 8, rows], bytes(cols // 2 * rows)]}
    return change


EXPERT = "model.layers.0.mlp.experts.3.up_proj"
TENSORS = [  # a fixture, what is changed, words of the message; None: it is read
    ("fp8_row", without(f"model.layers.0.mlp.up_proj.weight_scale"), ["up_proj.weight_scale_inv", "missing"]),
    ("fp8_block", entry(FIRST + ".weight", dtype="F8_E5M2"), [FIRST + ".weight", "F8_E5M2", "F8_E4M3"]),
    ("fp8_block", entry("model.layers.0.mlp.down_proj.weight_scale_inv", shape=[2, 1]),
     ["down_proj.weight_scale_inv", "(2, 1)", "scales"]),
    ("fp8_block", entry("model.layers.0.mlp.down_proj.weight_scale_inv", shape=[1, 1, 2, 1]), None),
    ("fp8_block", entry("model.layers.0.mlp.down_proj.weight_scale_inv", shape=[1, 2, 1]), ["(1, 2, 1)"]),
    ("fp8_block", entry("model.layers.0.mlp.down_proj.weight_scale_inv", dtype="I32"), ["weight_scale_inv", "I32"]),
    ("fp8_tensor", entry(FIRST + ".weight_scale", shape=[1, 1]), None),
    ("fp8_tensor", added(FIRST + ".output_scale", FIRST + ".input_scale"), None),
    ("fp8_tensor", added("model.layers.0.self_attn.k_proj.k_scale", FIRST + ".input_scale"), None),
    ("fp8_tensor", added(FIRST + ".weight_offset", FIRST + ".input_scale"), ["weight_offset", "no place"]),
    ("fp8_tensor", as_plain(FIRST, 64, 64), None),
    ("int8", entry(FIRST + ".weight", dtype="BF16", raw=lambda raw: raw * 2), [FIRST + ".weight_scale", "no place"]),
    ("int8", entry(FIRST + ".weight_scale", dtype="F8_E4M3", raw=lambda raw: raw[::2]), ["weight_scale", "F8_E4M3"]),
    ("int8_zero", entry(FIRST + ".weight_zero_point", shape=[32, 2]), ["weight_zero_point", "(64, 1)", "(32, 2)"]),
    ("int8_zero", entry(FIRST + ".weight_zero_point", shape=[64]), None),
    ("int8_zero", without(FIRST + ".weight_zero_point"), ["weight_zero_point", "missing"]),
    ("packed4_zero", without(FIRST + ".weight_zero_point"), ["weight_zero_point", "missing"]),
    ("int8_zero", entry(FIRST + ".weight_zero_point", dtype="U8"), ["weight_zero_point", "U8", "I8"]),
    ("packed4_zero", entry(FIRST + ".weight_shape", raw=lambda raw: raw[:8] + bytes(8)), None),
    ("packed4_zero", entry(FIRST + ".weight_scale", shape=[2, 64]), ["o_proj.weight_scale", "(2, 64)"]),
    ("packed4_zero", entry(FIRST + ".weight_packed", shape=[32, 16]), ["weight_packed", "(32, 16)"]),
    ("packed4_zero", entry(FIRST + ".weight_zero_point", shape=[2, 8]), ["weight_zero_point", "(8, 2)", "(2, 8)"]),
    ("packed4_zero", entry(FIRST + ".weight_g_idx", raw=lambda raw: b"\2" + raw[1:]), ["g_idx", "column 0", "0 to 1"]),
    ("packed4_zero", entry(FIRST + ".weight_g_idx", raw=lambda raw: raw[:-4] + b"\xff" * 4), ["column 63", "group -1"]),
    ("gptq4_order", without(FIRST + ".g_idx"), [FIRST + ".g_idx", "missing"]),
    ("gptq4", without(FIRST + ".g_idx"), None),
    ("gptq4", without(FIRST + ".qzeros"), [FIRST + ".qzeros", "missing"]),
    ("gptq4", without(FIRST + ".scales"), [FIRST + ".scales", "missing"]),
    ("gptq4", entry(FIRST + ".qweight", shape=[16, 32]), ["qweight", "(16, 32)"]),
    ("gptq4", entry(FIRST + ".qweight", dtype="F32"), ["qweight", "F32", "I32"]),
    ("awq4", entry(FIRST + ".qweight", shape=[8, 64]), ["qweight", "(64, 8)", "(8, 64)"]),
    ("nvfp4_modelopt", entry(FIRST + ".weight_scale_2", raw=lambda raw: bytes(4)), ["weight_scale_2", "positive"]),
    ("nvfp4_modelopt", entry(FIRST + ".weight_scale_2", raw=lambda raw: b"\0\0\x80\x7f"),
     ["weight_scale_2", "positive"]),
    ("nvfp4_modelopt", entry(FIRST + ".weight_scale", dtype="U8"), ["o_proj.weight_scale", "U8"]),
    ("nvfp4_modelopt", without(FIRST + ".weight_scale_2"), [FIRST + ".weight", "U8"]),
    ("mxfp4", entry(FIRST + ".weight_scale", shape=[32, 4]), ["o_proj.weight_scale", "(32, 4)"]),
    ("experts_awq4", as_plain(EXPERT, 32, 64), ["experts.3.up_proj", "BF16", "AWQ4"]),
    ("experts_nvfp4", without(EXPERT + ".weight_global_scale"), ["experts.3.up_proj"]),
    ("experts_gptq4", without(EXPERT + ".qweight"), [EXPERT, "missing"]),
    ("deepseek_fp8", entry("model.layers.0.self_attn.kv_b_proj.weight_scale_inv", shape=[1, 16]), ["kv_b_proj"]),
    ("deepseek_fp8", as_gptq("model.layers.0.self_attn.kv_b_proj"), None),
]


def test_tensors(folder):
    """Tensors that lack, that do not fit their matrix, that nobody knows."""
    def check(_, name, change, words):
        model = write(folder, name, change(tensors(name)))
        if words:
            refused("logits", model, "--ids", 1, words=words)
        else:
            infer("logits", model, "--ids", 1)
    each([(f"{i} {case[0]}", *case) for i, case in enumerate(TENSORS)], check)


def test_heads_of_one_matrix(folder):
    """kv_b_proj is cut into heads. One scale, zero or factor of all of it counts for each head."""
    def int8(rows, cols, n):
        codes = bytes((7 * r + 3 * c) % 17 for r in range(rows) for c in range(cols))
        return {"weight": ["I8", [rows, cols], codes], "weight_scale": ["F32", [n, 1], struct.pack("<f", 0.01) * n],
                "weight_zero_point": ["I8", [n, 1] if n > 1 else [1], bytes([5]) * n]}

    def nvfp4(rows, cols, factor, scale):
        codes = bytes((5 * i) % 251 for i in range(rows * cols // 2))
        return {"weight_packed": ["U8", [rows, cols // 2], codes],
                "weight_scale": ["F8_E4M3", [rows, cols // 16], bytes([scale]) * (rows * cols // 16)],
                "weight_global_scale": ["F32", [1], struct.pack("<f", factor)]}

    def logits(make, how):
        changed = tensors("deepseek_fp8")
        for key in [key for key in changed if key.endswith("kv_b_proj.weight")]:
            rows, cols = changed[key][1]
            changed = {k: v for k, v in changed.items() if not k.startswith(key)}
            changed.update({key[:-6] + name: value for name, value in make(rows, cols, *how(rows)).items()})
        return infer("logits", write(folder, "deepseek_fp8", changed), "--ids", "1,2,3", "--all").text

    same(logits(int8, lambda rows: [1]), logits(int8, lambda rows: [rows]), "one scale and zero, or one a row")
    same(logits(nvfp4, lambda rows: [2, 0x38]), logits(nvfp4, lambda rows: [1, 0x30]), "1 / 2, or 0.5 / 1")


def nibbles(codes):
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))


def test_heads_inside_lines(folder):
    """GPTQ and AWQ hold all rows of some columns in a line, packed zeros several rows in a word. kv_b_proj is cut there
    too: the logits are those of the same weights in F32."""
    def parts(encoding, rows, cols):
        groups, orders = cols // 16, (0, 2, 4, 6, 1, 3, 5, 7)
        q = [[(7 * r + 3 * c + r * c // 5) % 16 for c in range(cols)] for r in range(rows)]
        z = [[(5 * r + 11 * g) % 13 + 1 for g in range(groups)] for r in range(rows)]
        s = [[(8 + (3 * r + 5 * g) % 8) / 1024 for g in range(groups)] for r in range(rows)]
        words = range(rows // 8)
        f16 = ["F16", [groups, rows], struct.pack(f"<{groups * rows}e", *(row[g] for g in range(groups) for row in s))]
        if encoding == "F32":
            w = [s[r][c // 16] * (q[r][c] - z[r][c // 16]) for r in range(rows) for c in range(cols)]
            return {"weight": ["F32", [rows, cols], struct.pack(f"<{rows * cols}f", *w)]}
        if encoding == "AWQ4":
            codes = [q[8 * k + i][c] for c in range(cols) for k in words for i in orders]
            zeros = [z[8 * k + i][g] for g in range(groups) for k in words for i in orders]
            return {"qweight": ["I32", [cols, rows // 8], nibbles(codes)], "scales": f16,
                    "qzeros": ["I32", [groups, rows // 8], nibbles(zeros)]}
        if encoding == "PACKED4":
            zeros = [z[8 * k + i][g] for k in words for g in range(groups) for i in range(8)]
            f32 = [s[r][g] for r in range(rows) for g in range(groups)]
            return {"weight_packed": ["I32", [rows, cols // 8], nibbles([code for row in q for code in row])],
                    "weight_scale": ["F32", [rows, groups], struct.pack(f"<{len(f32)}f", *f32)],
                    "weight_zero_point": ["I32", [rows // 8, groups], nibbles(zeros)]}
        n, raw = (8, nibbles) if encoding == "GPTQ4" else (4, bytes)  # codes in a word
        codes = [row[k + i] for k in range(0, cols, n) for row in q for i in range(n)]
        zeros = [row[g] - 1 for g in range(groups) for row in z]
        return {"qweight": ["I32", [cols // n, rows], raw(codes)], "scales": f16,
                "qzeros": ["I32", [groups, rows // n], raw(zeros)]}

    def model(encoding, v_head_dim):
        module = "model.layers.0.self_attn.kv_b_proj."
        kept = {k: v for k, v in tensors("deepseek_fp8").items() if not k.startswith(module)}
        changed = {module + k: v for k, v in parts(encoding, 2 * (16 + v_head_dim), 512).items()}
        quantization = read_json(FOLDER / "deepseek_fp8" / "config.json")["quantization_config"]
        quantization["quant_method"] = "awq" if encoding == "AWQ4" else "gptq"
        return write(folder, "deepseek_fp8", kept | changed,
                     {"quantization_config": quantization, "v_head_dim": v_head_dim})

    def logits(encoding):
        return infer("logits", model(encoding, 16), "--ids", "1,2,3", "--all").text

    expected = logits("F32")
    for encoding in ("GPTQ4", "GPTQ8", "AWQ4", "PACKED4"):
        same(logits(encoding), expected, encoding)
    for encoding in ("GPTQ4", "AWQ4", "PACKED4"):
        refused("logits", model(encoding, 12), "--ids", 1, words=["kv_b_proj", encoding, "blocks of 8 rows"])


def test_one_expert_in_order(folder):
    """Calibration that never reaches an expert leaves its columns in order. Groups in another order, and columns that
    name them, are the same weights."""
    def logits(in_order):
        changed = tensors("experts_gptq4")
        group = [c // 16 if in_order else 3 - c // 16 for c in range(64)]
        changed[EXPERT + ".g_idx"][2] = struct.pack("<64i", *group)
        for key in (EXPERT + ".scales", EXPERT + ".qzeros"):
            raw = changed[key][2]
            lines = [raw[i:i + len(raw) // 4] for i in range(0, len(raw), len(raw) // 4)]
            changed[key][2] = b"".join(lines if in_order else lines[::-1])
        return infer("logits", write(folder, "experts_gptq4", changed), "--ids", "1,2,3,4,5", "--all").text

    same(logits(True), logits(False), "one expert in order")
