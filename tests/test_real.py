"""Published models (real_models.py) against transformers: ids, logits, perplexity, an answer. With a GPU `infer` runs them
too, and must come near: tests/gpu_encodings.c compares its stages with what rounding costs."""
import json
import math
import sys

from helpers import GOLDENS, PLAIN, Skip, expect, ids_of, infer, render, same
from real_models import MODELS, TEXT, path_of
from test_logits import read_npy

NEEDS = ("commands", "encodings", "families", "formats")  # rooms
ON_GPU = "--gpu" in sys.argv
BUILDS = ["cuda"] * ON_GPU

GOLDEN = {row["name"]: row for row in json.loads((GOLDENS / "real.json").read_text())}


def logits_agree(golden, model, folder):
    """The largest of each position and the norm of all, within 1e-4 of the norm."""
    ids = golden["ids"][:len(golden["norms"])]
    infer("logits", model, "--ids", ",".join(map(str, ids)), "--all", "-o", folder / "logits.npy", program=PLAIN, seconds=600)
    (rows, vocab), logits = read_npy(folder / "logits.npy")
    same(rows, len(ids), "positions")
    for i, (largest, norm) in enumerate(zip(golden["largest"], golden["norms"])):
        row = logits[i * vocab:(i + 1) * vocab]
        error = math.dist([row[id] for id, _ in largest], [x for _, x in largest]) / norm
        expect(error < 1e-4, f"position {i}: relative error {error:.1e}")
        expect(abs(math.hypot(*row) / norm - 1) < 1e-4, f"position {i}: a norm of {math.hypot(*row)}, not {norm}")


def perplexity_agrees(golden, model, folder, program, within):
    (folder / "text").write_text(TEXT)
    out = infer("perplexity", model, "-f", folder / "text", "--ctx", golden["ctx"], "--stride", golden["stride"],
                program=program, seconds=600).text.split()
    same(int(out[5]), len(golden["ids"]) - 1, "tokens")
    expect(abs(float(out[1]) / golden["perplexity"] - 1) < within, f"{program.name}: {out[1]}, not {golden['perplexity']}")


def model_agrees(name, folder):
    golden, model = GOLDEN[name], path_of(name)
    if not model:
        raise Skip(f"needs {name}: python3 tests/real_models.py {name}")
    same(ids_of(infer("tokenize", model, "--special", stdin=TEXT, program=PLAIN)), golden["ids"], "ids")
    logits_agree(golden, model, folder)
    perplexity_agrees(golden, model, folder, PLAIN, 1e-4)
    question, raw = golden["question"], name.startswith("gemma")  # which continues texts
    prompt = (ids_of(infer("tokenize", model, "--special", stdin=question, program=PLAIN)) if raw
              else render({"messages": [{"role": "user", "content": question}]}, model, PLAIN))
    same(prompt, golden["prompt_ids"], "ids of the prompt")
    answer = infer("play", model, "-p", question, *["--raw"] * raw, "--temperature", 0, "--max-tokens", len(golden["answer_ids"]),
                   program=PLAIN, seconds=600).text
    same(answer.strip(), golden["answer"].strip(), "answer")
    if ON_GPU:
        perplexity_agrees(golden, model, folder, PLAIN.with_name("infer"), 0.01)


def test_smollm2_135m(folder):
    model_agrees("SmolLM2-135M-Instruct", folder)


def test_gemma_3_270m(folder):
    model_agrees("gemma-3-270m", folder)


def test_qwen2_5_coder_0_5b(folder):
    model_agrees("Qwen2.5-Coder-0.5B-Instruct", folder)


def test_qwen2_5_coder_1_5b(folder):
    model_agrees("Qwen2.5-Coder-1.5B-Instruct", folder)


def test_all_have_goldens():
    same(sorted(GOLDEN), sorted(MODELS), "models")
