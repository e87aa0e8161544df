"""GGUF: files of every type, architecture and vocabulary against the hub's files and other people's numbers."""
import hashlib
import json
import math
import struct
import tarfile
import zlib

from gguf_files import PRES, U16, convert, gguf, places, text, vocabulary
from helpers import (FIXTURES, GOLDENS, PARROT, PLAIN, copy_model, data, each, expect, has, ids_of, infer, read_json,
                     refused, render, same)
from test_chat import folder_of, models_here, template_of
from test_logits import golden, read_npy

NEEDS = ("encodings", "families", "formats", "commands")  # rooms

TYPE_FILES = sorted((FIXTURES / "gguf").glob("*.gguf"))
# fixture, tokens that count: GGUF has no key for qwen2's windows, which hide nothing of the first six
MODELS = [("llama3", 40), ("llama_bias", 20), ("mistral", 16), ("mixtral", 14), ("qwen2", 6), ("qwen3", 24), ("qwen3_moe", 16),
          ("gemma2", 10), ("gemma3", 14), ("true_heads", 24), ("deepseek_v3", 10), ("deepseek_v2_lite", 10)]


def logits(model, ids, folder):
    infer("logits", model, "--ids", ",".join(map(str, ids)), "--all", "-o", folder / "logits.npy")
    return read_npy(folder / "logits.npy")[1]


def error(found, expected):
    same(len(found), len(expected), "number of logits")
    return math.dist(found, expected) / math.hypot(*expected)


def save(path, metadata, tensors=(), **how):
    path.write_bytes(gguf(metadata, tensors, **how))
    return path


def made(folder, fixture, name="model.gguf", **how):
    return save(folder / name, *convert(FIXTURES / fixture, **how))


# ---- weights

def test_types(folder):
    """Every type against transformers with the weights that gguf-py decodes; a scale that is 1 % off shows."""
    golden_logits = read_json(FIXTURES / "gguf" / "logits.json")
    ids = golden_logits.pop("ids")
    same([path.stem for path in TYPE_FILES], sorted(golden_logits), "files")
    scale_at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "Q4_K_M": 208}  # of attn_v

    def check(path):
        kind, raw = path.stem, bytearray(path.read_bytes())
        found = error(logits(path, ids, folder), golden_logits[kind])
        expect(found < 1e-5, f"relative error {found:.1e}")
        if kind == "BF16":
            return
        at = places(raw, "token_embd.weight")["blk.0.attn_v.weight"][0] + scale_at.get(kind, 0)
        if kind == "MXFP4":
            raw[at] += 1  # the least that is possible
        else:
            half = struct.unpack_from("<e", raw, at)[0]
            struct.pack_into("<e", raw, at, half * 1.01)
        (folder / "changed.gguf").write_bytes(raw)
        found = error(logits(folder / "changed.gguf", ids, folder), golden_logits[kind])
        expect(found > 1e-5, f"a changed scale gives {found:.1e}")
    each([(path,) for path in TYPE_FILES], check)


def test_architectures(folder):
    """Each of them against transformers, from the hub's files; DeepSeek's keys and values cut by head and whole."""
    def check(fixture, tokens, **how):
        ids, shape, expected = golden(fixture)
        path = made(folder, fixture, f"{fixture}.gguf", **how)
        found = error(logits(path, ids[:tokens], folder), expected[:tokens * shape[1]])
        expect(found < 1e-5, f"relative error {found:.1e}")
    each(MODELS, check)
    each([m for m in MODELS if "deepseek" in m[0]], lambda fixture, tokens: check(fixture, tokens, whole_kv_b=True))


def test_same_files_as_gguf_py(folder):
    """gguf-py has the same names for the hub's tensors, and writes the same bytes."""
    sums = read_json(GOLDENS / "gguf.json")
    same(sorted(sums), sorted(fixture for fixture, _ in MODELS), "fixtures")
    each([(fixture,) for fixture in sums],
         lambda fixture: same(hashlib.sha256(made(folder, fixture).read_bytes()).hexdigest(), sums[fixture], "SHA-256"))


def test_rope(folder):
    """YaRN and linear scaling as the hub's config.json means them."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.yarn_beta_fast": 16.0,
            "llama.rope.scaling.yarn_beta_slow": 2.0}
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    metadata, tensors = convert(FIXTURES / "llama_bias")
    ids = golden("llama_bias")[0]

    def check(name, rope, more):
        hub = copy_model(FIXTURES / "llama_bias", folder, config={"rope_scaling": rope})
        found = error(logits(save(folder / "model.gguf", metadata | more, tensors), ids, folder), logits(hub, ids, folder))
        expect(found < 1e-6, f"relative error {found:.1e}")
    each([("yarn", yarn, keys), ("defaults", yarn | {"beta_fast": 32.0, "beta_slow": 1.0}, dict(list(keys.items())[:3])),
          ("ignored", yarn, keys | {"llama.rope.scaling.finetuned": True}),
          ("linear", {"rope_type": "linear", "factor": 2.0}, linear),
          ("scale_linear", {"rope_type": "linear", "factor": 2.0}, {"llama.rope.scale_linear": 2.0}),
          ("none", None, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0})], check)
    for name in ("attn_factor", "yarn_attn_factor"):  # mean the same: they multiply YaRN's own
        check(name, yarn | {"attn_factor": 0.75}, keys | {f"llama.rope.scaling.{name}": 0.75})
    refused("logits", save(folder / "model.gguf", metadata | {"llama.rope.scaling.attn_factor": 0.75}, tensors), "--ids", 1,
            words=["attn_factor", "yarn"])
    each([("llama.rope.scaling.yarn_ext_factor",), ("llama.attention.temperature_scale",)],
         lambda name: refused("logits", save(folder / "model.gguf", metadata | keys | {name: 1.0}, tensors), "--ids", 1, words=[name]))


def test_missing_keys(folder):
    """What llama.cpp computes where a key is missing. Most files of Qwen3 with experts do not say that the weights of the
    chosen add up to 1: they do. Those of DeepSeek say it only where they do. Gemma 3 without a window sees all."""
    def check(fixture, config, *keys):
        hub = copy_model(FIXTURES / fixture, folder, config)
        metadata, tensors = convert(FIXTURES / fixture)
        for key in keys:
            del metadata[f"{metadata['general.architecture']}.{key}"]
        ids = golden(fixture)[0]
        found = error(logits(save(folder / "model.gguf", metadata, tensors), ids, folder), logits(hub, ids, folder))
        expect(found < 1e-6, f"relative error {found:.1e}")
    each([("qwen3_moe", {"norm_topk_prob": True}, "expert_weights_norm"),
          ("deepseek_v3", {"norm_topk_prob": False}, "expert_weights_norm"),
          ("deepseek_v3", {"routed_scaling_factor": 1}, "expert_weights_scale"),
          ("gemma3", {"layer_types": ["full_attention"] * 3}, "attention.sliding_window",
           "attention.sliding_window_pattern", "rope.freq_base_swa")], check)


def test_keys_that_change_nothing(folder):
    """As files of Qwen3-Coder, of some Llamas and of Gemma 3 with eyes have them."""
    for fixture, keys in (("qwen3_moe", {"expert_shared_feed_forward_length": 0}),
                          ("llama3", {"expert_count": 0, "attention.layer_norm_epsilon": 0.5}),
                          ("gemma3", {"mm.tokens_per_image": 256, "vision.block_count": 27})):
        metadata, tensors = convert(FIXTURES / fixture)
        arch = metadata["general.architecture"]
        ids, more = golden(fixture)[0], {f"{arch}.{k}": x for k, x in keys.items()}
        plain = logits(save(folder / "model.gguf", metadata, tensors), ids, folder)
        found = error(logits(save(folder / "model.gguf", metadata | more, tensors), ids, folder), plain)
        same(found, 0, f"relative error with {more}")


# ---- a whole model

def parrot(folder, name="parrot.gguf", parts=1, drop=()):
    """The parrot with its tokenizer, in one file or in parts."""
    metadata, tensors = convert(PARROT)
    metadata |= vocabulary(read_json(PARROT / "tokenizer.json"), "gpt-4o") | {"tokenizer.ggml.eos_token_id": 404}
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if parts == 1:
        return save(folder / name, metadata, tensors)
    for i in range(parts):
        split = {"split.no": U16(i), "split.count": U16(parts), "split.tensors.count": len(tensors)}
        if i not in drop:
            save(folder / f"{name}-{i + 1:05}-of-{parts:05}.gguf", (metadata if not i else {}) | split,
                 tensors[len(tensors) * i // parts:len(tensors) * (i + 1) // parts])
    return folder / f"{name}-00001-of-{parts:05}.gguf"


def test_same_answers_as_the_hub(folder):
    """The same weights, tokenizer and stops: the same text, and the same likeliest tokens."""
    whole, parts = parrot(folder), parrot(folder, "parts", parts=3)
    for command in (["play", "-p", "Hello!", "--temperature", "0", "--date", "2025-06-28"], ["logits", "-p", "Hello"],
                    ["bench", "-p", "16", "-n", "4", "-d", "0", "-b", "1", "-r", "1", "-o", "json"]):
        expected = infer(command[0], PARROT, *command[1:]).text
        for path in (whole, parts):
            found = infer(command[0], path, *command[1:]).text
            if command[0] == "bench":
                found, expected = found[:1], expected[:1]
            same(found, expected, f"{command[0]} {path.name}")


def test_inspect_list_and_names(folder):
    """A file in ./models, in a folder there, in the hub's cache; a part of its name; a folder that holds but one."""
    parrot(folder, "models/a.gguf")
    parrot(folder, "models/b/c.gguf", parts=2)
    parrot(folder, "models/d", parts=2)  # whose second part is no model
    parrot(folder, "models/e--f.gguf")  # a file, where a folder e--f would be e/f
    hub = folder / "hf" / "hub" / "models--org--x" / "snapshots" / ("1" * 40)
    parrot(hub, "x-Q4_K_M.gguf")
    env = {"HF_HOME": folder / "hf"}
    listed = json.loads(infer("list", "--json", cwd=folder, env=env).text)
    same([(m["name"], m["family"], m["encoding"], m["supported"], m["complete"]) for m in listed],
         [(name, "gpt_oss", "BF16", True, True)
          for name in ("models/a.gguf", "models/b/c.gguf-00001-of-00002.gguf", "models/d-00001-of-00002.gguf",
                       "models/e--f.gguf", "org/x/x-Q4_K_M.gguf")], "the list")
    facts = json.loads(infer("inspect", folder / "models" / "a.gguf", "--json").text)
    hub_facts = json.loads(infer("inspect", PARROT, "--json").text)
    for key in ("family", "layers", "width", "heads", "experts", "parameters", "active_parameters", "context", "vocabulary"):
        same(facts[key], hub_facts[key], key)
    (hub / "config.json").write_bytes((PARROT / "config.json").read_bytes())  # as some publishers add it
    save(hub / "mmproj-F16.gguf", {"general.architecture": "clip"})
    (hub.parent.parent / "refs").mkdir()
    (hub.parent.parent / "refs" / "main").write_text("1" * 40)
    for name in ("q4_k_m", "org/x", "org/x@main", "models/b", hub):
        same(ids_of(infer("tokenize", name, stdin="Hello", cwd=folder, env=env)), ids_of(infer("tokenize", PARROT, stdin="Hello")),
             f"tokens of {name}")
    refused("tokenize", "gguf", cwd=folder, env=env, words=["more than one", "models/a.gguf"])
    parrot(folder, "two/x-Q8_0.gguf"), parrot(folder, "two/x-Q4_K_M.gguf")
    refused("tokenize", folder / "two", words=["more than one", "x-Q8_0.gguf", "x-Q4_K_M.gguf"])
    same(len(json.loads(infer("list", "--json", cwd=folder, env=env).text)), len(listed), "models with a config.json more")
    refused("rm", "q4_k_m", cwd=folder, env=env, code=2, words=["part of org/x", "infer rm org/x"])
    parrot(folder, "models/org--x/x-Q4_K_M.gguf")  # under the name of the hub's
    same(len(json.loads(infer("list", "--json", cwd=folder, env=env).text)), len(listed), "a name twice")
    same(ids_of(infer("tokenize", "org/x", stdin="Hello", cwd=folder, env=env)), ids_of(infer("tokenize", PARROT, stdin="Hello")), "it")
    (folder / "models" / "b" / "c.gguf-00002-of-00002.gguf").unlink()
    same([m["complete"] for m in json.loads(infer("list", "--json", cwd=folder, env=env).text)], [True, False, True, True, True],
         "complete")


def test_files_with_other_endings(folder):
    """A file is known by its first bytes too: without an ending, as the hub's blobs are, or in capitals; in parts too. What
    else lies there is no model."""
    expected = ids_of(infer("tokenize", PARROT, stdin="Hello"))
    parrot(folder, "models/PARROT.GGUF"), parrot(folder, "models/" + "1" * 64), parrot(folder, "models/c.bin")
    (folder / "models/notes.txt").write_text("GGU")
    for name in ("PARROT.GGUF", "1" * 64, "c.bin"):
        for model in (folder / "models" / name, name[:8]):
            same(ids_of(infer("tokenize", model, stdin="Hello", cwd=folder)), expected, f"tokens of {model}")
    same([m["name"] for m in json.loads(infer("list", "--json", cwd=folder, env={"HF_HOME": folder}).text)],
         ["models/" + name for name in ("1" * 64, "PARROT.GGUF", "c.bin")], "the list") if has("commands") else None
    for ending in (".GGUF", ".Gguf", ""):
        parrot(folder, "parts", parts=3)
        for part in folder.glob("parts-0*.gguf"):
            part.rename(part.with_suffix(ending))
        same(infer("logits", folder / f"parts-00001-of-00003{ending}", "--ids", 1).text,
             infer("logits", PARROT, "--ids", 1).text, f"parts with {ending or 'no ending'}")
        refused("tokenize", folder / f"parts-00002-of-00003{ending}", words=["not the first", "00001"])


def test_mistral3(folder):
    """Newer files of Mistral Small have an architecture of that name, with the formulas of llama. Ministral 3 scales q by
    its position, which a key says."""
    metadata, tensors = convert(FIXTURES / "llama_bias")
    metadata = {key.replace("llama.", "mistral3."): x for key, x in metadata.items()} | {"general.architecture": "mistral3"}
    ids = golden("llama_bias")[0]
    found = error(logits(save(folder / "model.gguf", metadata, tensors), ids, folder), golden("llama_bias")[2])
    expect(found < 1e-5, f"relative error {found:.1e}")
    refused("logits", save(folder / "model.gguf", metadata | {"mistral3.attention.temperature_scale": 0.1}, tensors), "--ids", 1,
            words=["mistral3.attention.temperature_scale", "not known here"])


def test_stops(folder):
    """A token with a known name ends an answer, also where no key says so."""
    metadata, tensors = convert(PARROT)
    metadata |= vocabulary(read_json(PARROT / "tokenizer.json"), "gpt-4o")
    ask = ["-p", "Hello!", "--temperature", "0", "--date", "2025-06-28"]
    expected = infer("play", PARROT, *ask).text
    same(infer("play", save(folder / "names.gguf", metadata, tensors), *ask).text, expected, "answer")


def test_chat_templates(folder):
    """The template is read from the file: prompts of every format."""
    def check(name, m):
        made = folder_of(name, folder)
        tokenizer, config = read_json(made / "tokenizer.json"), read_json(made / "tokenizer_config.json")
        metadata = vocabulary(tokenizer, "gpt-4o") | {"tokenizer.chat_template": template_of(name)}
        ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        for end in ("bos", "eos"):
            if config.get(f"{end}_token") in ids:
                metadata[f"tokenizer.ggml.{end}_token_id"] = ids[config[f"{end}_token"]]
        path = save(folder / "model.gguf", {"general.architecture": "llama"} | metadata)
        for case in [c for c in m["cases"][:4] if c["text"] is not None]:
            same(render(case["conversation"], path), render(case["conversation"], made), case["name"])
    each(list(models_here().items()), check)
    none = {"general.architecture": "llama"} | vocabulary(read_json(PARROT / "tokenizer.json") | {"added_tokens": []}, "gpt-4o")
    refused("render", save(folder / "none.gguf", none), stdin="{}", words=["no chat format", "no chat template"])


# ---- tokenizers

def test_published_vocabularies(folder):
    """llama.cpp's own vocabularies with the ids that it expects."""
    with tarfile.open(data("families.tar.xz")) as tar:
        files = {m.name.split("/")[1]: tar.extractfile(m).read() for m in tar if "ggml-vocab-" in m.name}

    def check(name):
        (folder / f"{name}.gguf").write_bytes(files[f"ggml-vocab-{name}.gguf"])
        texts = files[f"ggml-vocab-{name}.gguf.inp"].decode().split("\n__ggml_vocab_test__\n")[:-1]
        expected = [[int(i) for i in line.split()] for line in files[f"ggml-vocab-{name}.gguf.out"].decode().splitlines()]
        lines = infer("tokenize", folder / f"{name}.gguf", "--jsonl", stdin="\n".join(map(json.dumps, texts))).text.splitlines()
        same(len(expected), len(texts), "number of texts")
        each([(repr(t), line, ids) for t, line, ids in zip(texts, lines, expected)],
             lambda t, line, ids: same(json.loads(line), ids, "ids"))
        for ids, t in zip(expected, texts):
            back = infer("detokenize", folder / f"{name}.gguf", stdin=json.dumps(ids), program=PLAIN).text if len(ids) > 30 else t
            same(back, t, "text of the ids")
    each([("llama-spm",), ("gpt-2",), ("phi-3",), ("deepseek-llm",), ("deepseek-coder",)], check)
    (folder / "falcon.gguf").write_bytes(files["ggml-vocab-falcon.gguf"])
    refused("tokenize", folder / "falcon.gguf", words=["tokenizer.ggml.pre", "'falcon'", "llama-bpe", "deepseek-v3"])


def test_vocabularies_of_families(folder):
    """Vocabularies of ten families as llama.cpp's converter writes them: the ids of tokenizer.json. Literal U+2581 is left
    out for Gemma: its files have runs of spaces as tokens, and tokenizer.json runs of that."""
    lines = [json.loads(r) for r in (GOLDENS / "tokenizer_strings_families.jsonl").read_text().split("\n") if r]
    with tarfile.open(data("families.tar.xz")) as tar:
        files = {m.name.split("/")[1]: json.loads(tar.extractfile(m).read()) for m in tar if m.name.endswith("/tokenizer.json")}

    def check(family):
        rows = [r for r in lines if "gemma" not in family or "\u2581" not in r["text"]]
        path = save(folder / f"{family}.gguf", {"general.architecture": "llama"} | vocabulary(files[family], PRES[family]))
        for key, options in (("text_ids", []), ("ids", ["--special"])):
            found = infer("tokenize", path, "--jsonl", *options, stdin="\n".join(json.dumps(r["text"]) for r in rows),
                          program=PLAIN).text.splitlines()
            sums = [zlib.crc32(json.dumps(json.loads(line)).encode()) for line in found]
            same(len(sums), len(rows), "number of lines")
            wrong = [r["text"] for r, s in zip(rows, sums) if r[key][family] != s]
            expect(not wrong, f"{key}: {len(wrong)} of {len(rows)} strings, first {wrong[:3]}")
    each([(family,) for family in files], check)


def test_a_long_token_in_time(folder):
    """A token with a score is cut at every byte, which takes time that grows with the square of its length."""
    def made_of(n):
        tokens, scores = ["\u2581", "a", "aa", "a" * n], [0.0, -1.0, -2.0, -3.0]
        return save(folder / "model.gguf", {"general.architecture": "llama", "tokenizer.ggml.model": "llama",
                                            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores})
    same(ids_of(infer("tokenize", made_of(256), stdin="aaa")), [0, 2, 1], "ids")
    refused("tokenize", made_of(200000), words=["token 3", "256 bytes"])


def test_equal_scores(folder):
    """The leftmost of two merges comes first, whatever their ids. Gemma's texts begin without a space."""
    tokens = ["\u2581", "a", "b", "c", "bc", "ab"]
    for arch, begin in (("llama", [0]), ("gemma3", [])):
        path = save(folder / f"{arch}.gguf", {"general.architecture": arch, "tokenizer.ggml.model": "llama",
                                              "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [-1000.0] * 6})
        same(ids_of(infer("tokenize", path, stdin="abc")), begin + [5, 3], arch)


def test_tokens_around_a_text(folder):
    """A token before the text, behind it, and both, as the keys say: the ids of a tokenizer.json with such a template."""
    tokenizer = read_json(PARROT / "tokenizer.json")

    def check(name, post_processor, ids):
        keys = vocabulary(tokenizer | {"post_processor": post_processor}, "gpt-4o")
        path = save(folder / "model.gguf", {"general.architecture": "gpt-oss"} | keys)
        for text, expected in ids.items():
            same(ids_of(infer("tokenize", path, "--special", stdin=text)), expected, repr(text))
    each([tuple(row.values()) for row in read_json(GOLDENS / "templates.json")[:4]], check)  # keys name no more than two


def test_vocabulary_of_gpt_oss(folder):
    """The real tokenizer of gpt-oss: the strings of its tests."""
    path = save(folder / "model.gguf", {"general.architecture": "gpt-oss"}
                | vocabulary(read_json(data("gpt-oss-20b") / "tokenizer.json"), "gpt-4o"))
    rows = [json.loads(r) for r in (GOLDENS / "tokenizer_strings.jsonl").read_text().split("\n") if r]
    texts = "\n".join(json.dumps(r["text"]) for r in rows)
    same(infer("tokenize", path, "--jsonl", stdin=texts, program=PLAIN).text,
         infer("tokenize", data("gpt-oss-20b"), "--jsonl", stdin=texts, program=PLAIN).text, "ids")


# ---- what is refused

def with_key(key, value):
    return lambda metadata, tensors: (metadata | {key: value}, tensors)


def without_key(key):
    return lambda metadata, tensors: ({k: v for k, v in metadata.items() if k != key}, tensors)


def with_tensor(name, change):
    return lambda metadata, tensors: (metadata, [change(*t) if t[0] == name else t for t in tensors])


def test_wrong_models(folder):
    """One line that names what is unknown, and what is supported."""
    base = convert(FIXTURES / "llama_bias")
    cases = [
        ("architecture", with_key("general.architecture", "rwkv7"), ["architecture 'rwkv7'", "llama, qwen2", "deepseek2"]),
        ("no architecture", without_key("general.architecture"), ["general.architecture"]),
        ("key", with_key("llama.attention.alibi", True), ["'llama.attention.alibi'"]),
        ("key of another", with_key("llama.attention.q_lora_rank", 8), ["'llama.attention.q_lora_rank'"]),
        ("layers differ", with_key("llama.feed_forward_length", [1, 2]), ["intermediate_size", "[1,2]"]),
        ("rope type", with_key("llama.rope.scaling.type", "longrope"), ["'longrope'", "linear", "yarn"]),
        ("part of a head turns", with_key("llama.rope.dimension_count", 8), ["partial_rotary_factor"]),
        ("values of another size", with_key("llama.attention.value_length", 8), ["head_dim"]),
        ("eos", with_key("tokenizer.ggml.eos_token_id", 131), ["eos_token_id", "130"]),
        ("text for a number", with_key("llama.block_count", "1"), ["num_hidden_layers"]),
        ("alignment", with_key("general.alignment", 24), ["general.alignment"]),
        ("missing", without_key("llama.embedding_length"), ["hidden_size", "missing"]),
        ("pre", with_key("tokenizer.ggml.pre", "zebra"), ["tokenizer.ggml.pre", "'zebra'", "llama-bpe", "gpt-4o"]),
        ("no pre", without_key("tokenizer.ggml.pre"), ["tokenizer.ggml.pre", "(missing)"]),
        ("tokenizer", with_key("tokenizer.ggml.model", "t5"), ["tokenizer.ggml.model", "'t5'", "gpt2 and llama"]),
        ("no token at the end", with_key("tokenizer.ggml.add_eos_token", True), ["add_eos_token", "eos_token_id"]),
        ("shape", with_tensor("output_norm.weight", lambda n, s, k, raw: (n, [32], k, raw[:128])), ["norm.weight", "(64)", "(32)"]),
        ("no such tensor", with_tensor("output_norm.weight", lambda n, s, k, raw: ("extra.weight", s, k, raw)), ["norm.weight", "missing"]),
        ("no place", lambda m, t: (m, t + [("blk.0.ffn_gate_inp_shexp.weight", [64], "F32", bytes(256))]),
         ["model.layers.0.ffn_gate_inp_shexp.weight", "has no place"]),
        ("a vector of blocks", with_tensor("output_norm.weight", lambda n, s, k, raw: (n, s, "Q8_0", bytes(68))), ["Q8_0", "BF16, F16 or F32"]),
        ("twice", lambda m, t: (m, t + t[:1]), ["also in"]),
        ("divisors", lambda m, t: (m, t + [("rope_freqs.weight", [4], "F32", bytes(16))]), ["rope_freqs.weight", "(8)", "(4)"]),
        ("divisors of 0", lambda m, t: (m, t + [("rope_freqs.weight", [8], "F32", bytes(32))]), ["rope_freqs.weight[0]", "0"]),
        ("part", with_key("split.count", 3), ["part 1 of 3", "00001-of-00003"]),
    ]

    def check(name, change, words):
        refused("logits", save(folder / "model.gguf", *change(*base)), "--ids", 1, words=words)
    each(cases, check)
    for name, whole, shape in (("blk.1.attn_kv_b", True, [64]), ("blk.1.attn_k_b", False, [2, 512]),
                               ("blk.1.attn_v_b", False, [2, 32]), ("token_embd", False, [131])):
        metadata, tensors = convert(FIXTURES / "deepseek_v3", whole_kv_b=whole)  # no formula adds such a bias
        path = save(folder / "model.gguf", metadata, tensors + [(name + ".bias", shape, "F32", b"\0\0\x80?" * math.prod(shape))])
        refused("logits", path, "--ids", 1, words=[".bias' has no place"])
    for kind, name in ((16, "IQ2_XXS"), (29, "IQ1_M"), (40, "NVFP4"), (77, "unknown (77)")):
        raw = bytearray(gguf(*base))
        at = raw.index(text("blk.0.attn_q.weight")) + 8 + len("blk.0.attn_q.weight") + 20
        same(struct.unpack_from("<I", raw, at)[0], 0, "F32")
        struct.pack_into("<I", raw, at, kind)
        (folder / "model.gguf").write_bytes(raw)
        refused("logits", folder / "model.gguf", "--ids", 1, words=["blk.0.attn_q.weight", name, "Q2_K to Q6_K"])


def test_parts(folder):
    merged, tensors = convert(FIXTURES / "llama_bias")  # llama.cpp leaves the count at 0
    path = save(folder / "merged.gguf", merged | {"split.no": U16(0), "split.count": U16(0)}, tensors)
    found = error(logits(path, [1], folder), logits(FIXTURES / "llama_bias", [1], folder))
    expect(found < 1e-6, f"relative error {found:.1e}")
    path = parrot(folder, "a", parts=3, drop=[1])
    refused("tokenize", path, words=["a-00002-of-00003.gguf", "missing"])
    path = parrot(folder, "a", parts=3)
    refused("tokenize", folder / "a-00002-of-00003.gguf", words=["not the first", "00001"])
    (folder / "a-00002-of-00003.gguf").rename(folder / "b")
    (folder / "a-00003-of-00003.gguf").rename(folder / "a-00002-of-00003.gguf")
    (folder / "b").rename(folder / "a-00003-of-00003.gguf")
    refused("tokenize", path, words=["part 3 of 3", "2 of 3"])
    refused("tokenize", save(folder / "x-00001-of-99999.gguf", {"general.architecture": "llama"}), words=["not the first"])


def header(*parts, version=3, tensors=0, keys=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def key(name, kind, raw):
    return text(name) + struct.pack("<I", kind) + raw


def tensor(name, sizes, kind, offset):
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def test_hostile_headers(folder):
    arch, many = key("general.architecture", 8, text("llama")), 1 << 62
    def one(*args, more=b""):
        return header(arch, tensor(*args), more, tensors=1, keys=1)
    cases = [
        ("empty", b"", ["0 bytes"]), ("other", b"GGML" + bytes(40), ["no GGUF"]), ("cut", b"GGUF\3\0\0\0\1", ["incomplete"]),
        ("version 1", header(version=1), ["(1)"]), ("big-endian", header(version=0x03000000), ["(50331648)"]),
        ("no keys", header(), ["general.architecture"]), ("keys", header(keys=many), ["more keys"]),
        ("tensors", header(arch, keys=1, tensors=many), ["incomplete"]),
        ("long text", header(struct.pack("<Q", many), keys=1), ["longer than the file"]),
        ("longest text", header(struct.pack("<Q", (1 << 64) - 1), b"x", keys=1), ["longer than the file"]),
        ("not UTF-8", header(text(b"\xff"), keys=1), ["not UTF-8"]), ("type", header(key("a", 13, b""), keys=1), ["unknown type"]),
        ("array", header(key("a", 9, struct.pack("<IQ", 0, many)), keys=1), ["incomplete"]),
        ("many", header(key("a", 9, struct.pack("<IQ", 0, 5000000) + bytes(5000000)), keys=1), ["more values"]),
        ("nested", header(key("a", 9, struct.pack("<IQIQ", 9, 1, 0, 1) + b"x"), keys=1), ["array of arrays"]),
        ("deep", header(key("a", 9, struct.pack("<IQ", 9, 1) * 100000), keys=1), ["array of arrays"]),
        ("twice", header(arch, arch, keys=2), ["twice"]),
        ("alignment 0", header(arch, key("general.alignment", 4, struct.pack("<I", 0)), keys=2), ["alignment"]),
        ("no dimension", one("a", [], 0, 0), ["dimensions"]), ("five", one("a", [1] * 5, 0, 0), ["dimensions"]),
        ("size 0", one("a", [32, 0], 0, 0), ["empty"]), ("overflow", one("a", [1 << 33, 1 << 33], 0, 0), ["too large"]),
        ("rows of half blocks", one("a", [48, 2], 8, 0), ["whole blocks"]),
        ("offset", one("a", [8], 0, 8, more=bytes(96)), ["alignment"]), ("far", one("a", [8], 0, 1 << 40, more=bytes(96)), ["incomplete"]),
        ("farthest", one("a", [8], 0, (1 << 64) - 32, more=bytes(96)), ["too large"]),
        ("hole", one("a", [8], 0, 32, more=bytes(196)), ["hole"]),
        ("behind the end", one("a", [8], 0, 0), ["incomplete"]), ("experts", one("blk.0.ffn_up_exps.weight", [32, 1, 1 << 40], 0, 0),
                                                                ["more tensors"]),
        ("layer", gguf({"general.architecture": "llama"}, [("blk.99999999999.x", [8], "F32", bytes(32))]), ["num_hidden_layers"]),
    ]

    def check(name, raw, words):
        (folder / "model.gguf").write_bytes(raw)
        refused("logits", folder / "model.gguf", "--ids", 1, words=words)
        refused("tokenize", folder / "model.gguf")
    each(cases, check)
    whole = gguf(*convert(FIXTURES / "llama_bias"))
    for n in range(0, len(whole), 997):
        (folder / "model.gguf").write_bytes(whole[:n])
        refused("logits", folder / "model.gguf", "--ids", 1, program=PLAIN)
