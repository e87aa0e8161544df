"""`infer logits`: the NumPy file and, with --tap, every stage against transformers' numbers, the list of likely tokens
against the file."""
import ast
import json
import math
import struct

from helpers import (FIXTURES, PARROT, copy_model, each, expect, has, ids_of, infer, read_json, read_safetensors, refused,
                     safetensors, same)

WITH_GOLDENS = sorted(path.parent.name for path in FIXTURES.glob("*/golden.safetensors") if has("families") or
                      read_json(path.with_name("config.json"))["model_type"] == "gpt_oss")


def floats(raw):
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def golden(fixture):
    header, content = read_safetensors(FIXTURES / fixture / "golden.safetensors")
    logits, ids = (content[slice(*header[name]["data_offsets"])] for name in ("logits", "ids"))
    size = {"I32": ("i", 4), "I64": ("q", 8)}[header["ids"]["dtype"]]
    return struct.unpack(f"<{len(ids) // size[1]}{size[0]}", ids), header["logits"]["shape"], floats(logits)


def goldens(fixture):
    """Shape and numbers of every tensor but ids."""
    header, content = read_safetensors(FIXTURES / fixture / "golden.safetensors")
    found = {}
    for name, entry in header.items():
        if name not in ("ids", "__metadata__"):
            raw = content[slice(*entry["data_offsets"])]
            form, size = {"I32": ("i", 4), "I64": ("q", 8), "F32": ("f", 4)}[entry["dtype"]]
            found[name] = entry["shape"], struct.unpack(f"<{len(raw) // size}{form}", raw)
    return found


def as_option(ids):
    return "--ids", ",".join(map(str, ids))


def read_npy(path):
    """The shape and the numbers of a file of NumPy's format 1.0."""
    raw = path.read_bytes()
    same(raw[:8], b"\x93NUMPY\x01\0", "magic and version")
    end = 10 + int.from_bytes(raw[8:10], "little")
    expect(end % 64 == 0 and raw[end - 1:end] == b"\n", "the header is not padded to 64 bytes")
    header = ast.literal_eval(raw[10:end].decode())
    same((header["descr"], header["fortran_order"]), ("<f4", False), "header")
    return list(header["shape"]), floats(raw[end:])


def save(model, folder, *options):
    infer("logits", model, *options, "-o", folder / "logits.npy")
    return read_npy(folder / "logits.npy")


def test_file_has_transformers_logits(folder):
    def check(fixture):
        ids, shape, expected = golden(fixture)
        chosen = as_option(ids)
        found_shape, found = save(FIXTURES / fixture, folder, *chosen, "--all")
        (folder / "logits.npy").rename(folder / "all.npy")
        same(found_shape, shape, "shape")
        error = math.dist(found, expected) / math.hypot(*expected)
        expect(error < 1e-4, f"relative error {error:.1e}")
        same(save(FIXTURES / fixture, folder, *chosen), ([1, shape[1]], found[-shape[1]:]), "without --all")
        piped = infer("logits", FIXTURES / fixture, *chosen, "--all", "-o", "/dev/stdout").out
        same(piped, (folder / "all.npy").read_bytes(), "through a pipe")
    each([(fixture,) for fixture in WITH_GOLDENS], check)


def test_tap_has_transformers_stages(folder):
    def check(fixture):
        stages = folder / fixture
        infer("logits", FIXTURES / fixture, *as_option(golden(fixture)[0]), "--all", "--tap", stages)
        for name, (shape, expected) in goldens(fixture).items():
            layers, stage = name.split(".")[1:] if "." in name else (len(list(stages.glob("q.*.npy"))), name)
            found_shape, found = read_npy(stages / f"{stage}.{layers}.npy")
            same(found_shape, [math.prod(shape[:-1]), shape[-1]], f"shape of {name}")
            error = math.dist(found, expected) / math.hypot(*expected)
            expect(error < 1e-4, f"{name}: relative error {error:.1e}")
    each([(fixture,) for fixture in WITH_GOLDENS], check)


def test_tap_appends_what_comes_in_several_steps(folder):
    """600 tokens are two steps of at most 512: the same rows as in one step, which the first 512 are alone."""
    ids = [i * 7 % 440 for i in range(600)]
    for n in (512, 600):
        infer("logits", PARROT, *as_option(ids[:n]), "--all", "--tap", folder / str(n))
    for file in (folder / "512").iterdir():
        (rows, cols), found = read_npy(file)
        same(read_npy(folder / "600" / file.name)[0], [rows * 600 // 512, cols], file.name)
        same(read_npy(folder / "600" / file.name)[1][:len(found)] == found, True, f"the same numbers in {file.name}")
    refused("logits", PARROT, "--ids", 1, "--tap", folder, code=1, words=[str(folder), "another name"])


def test_nan_of_an_expert(folder):
    """No NaN goes unnoticed, even if only tokens in the middle of a text use the damaged expert."""
    header, content = read_safetensors(PARROT / "model.safetensors")
    name = max(name for name in header if name.endswith("experts.down_proj_bias"))  # the last layer's
    begin, (experts, cols) = header[name]["data_offsets"][0], header[name]["shape"]
    model = copy_model(PARROT, folder, keep_weights=False)
    ids, codes = ",".join(map(str, range(5, 105))), []
    for at in range(begin, begin + 2 * experts * cols, 2 * cols):
        damaged = content[:at] + b"\xc0\x7f" + content[at + 2:]
        (model / "model.safetensors").write_bytes(safetensors(header, damaged))
        out = folder / "logits.npy"
        r = infer("logits", model, "--ids", ids, "--all", "-o", out, code=None)
        _, values = read_npy(out)
        same(r.code, int(any(map(math.isnan, values))), "exit code")
        codes.append((r.code, math.isnan(values[-1])))
    expect((1, False) in codes, f"no expert of the middle alone: {codes}")


def rows(text):
    """Id, logit, probability and text of each line."""
    return [(int(i), float(logit), float(p), json.loads(token)) for i, logit, p, token in
            (line.split(None, 3) for line in text.splitlines())]


def test_likeliest_tokens(folder):
    """In the order of the file, with softmax and text; after a prompt as text as after its ids."""
    ids = ids_of(infer("tokenize", PARROT, stdin="Hello"))
    chosen = as_option(ids)
    _, all_logits = save(PARROT, folder, *chosen)
    found = rows(infer("logits", PARROT, *chosen, "--top", 5).text)
    best = sorted(range(len(all_logits)), key=lambda i: -all_logits[i])[:5]
    total = sum(math.exp(x) for x in all_logits)
    same([r[0] for r in found], best, "ids")
    for i, logit, probability, text in found:
        same((f"{logit:.4f}", f"{probability:.5f}"), (f"{all_logits[i]:.4f}", f"{math.exp(all_logits[i]) / total:.5f}"),
             f"logit and probability of {i}")
        same(text, infer("detokenize", PARROT, stdin=str(i)).text, f"text of {i}")
    same(rows(infer("logits", PARROT, "-p", "Hello", "--top", 5).text), found, "with -p")
    same(len(rows(infer("logits", PARROT, *chosen).text)), 10, "number of lines without --top")
    every = infer("logits", PARROT, *chosen, "--all", "--top", 1).text.splitlines()
    same(every[::2], [f"after token {i} ({token}):" for i, token in enumerate(ids)], "headings of --all")
    same(rows(every[-1]), found[:1], "the last of --all")


def test_wrong_options(folder):
    each([(" ".join(map(str, options)), options, words) for options, words in (
        ([], ["-p", "--ids"]), (["-p", "x", "--ids", "1"], ["-p", "--ids"]), (["-p", ""], ["empty"]),
        (["--ids", ""], ["empty"]), (["--ids", "1,x"], ["'x'"]), (["--ids", "-1"], ["'-1'"]),
        (["--ids", "448"], ["448"]), (["--ids", "1," * 5000], ["5000", "4096"]), (["--ids", 1, "--top", "0"], ["--top"]),
        (["--ids", 1, "--top", "3x"], ["--top"]), (["--ids", 1, "--gpu", "x"], ["--gpu"]),
        (["--ids", 1, "--gpu", "-1"], ["--gpu"]))],
        lambda name, options, words: refused("logits", PARROT, *options, words=words, code=2))
    refused("logits", PARROT, "--ids", 1, "-o", folder / "none" / "x", words=["none/x"], code=1)
    refused("logits", PARROT, "--ids", 1, "-o", "/dev/full", words=["/dev/full", "disk full"], code=1)
