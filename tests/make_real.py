"""Writes goldens/real.json: what transformers computes with the models of real_models.py, dequantised to float32.

    TEST_DATA=DIR python tests/make_real.py
    needs: pip install torch transformers tokenizers gguf accelerate; the models; the tokenizers of families.tar.xz

Of each model: the ids of TEXT, the largest logits of its first positions and the norm of all, the perplexity of TEXT, and
a greedy answer to QUESTION (gemma-3-270m has no chat format and continues TEXT's first sentence).
"""
import json
import math
import os
import tarfile

import torch
from real_models import MODELS, QUESTION, ROOT, TEXT, path_of
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

POSITIONS, LARGEST, ANSWER = 64, 5, 24
CTX, STRIDE = 128, 64
PUBLISHED = {"SmolLM2": "smollm2", "gemma-3": "gemma3", "Qwen2.5": "qwen2.5"}  # their tokenizer.json


def tokenizer_of(name):
    member = next(place for begin, place in PUBLISHED.items() if name.startswith(begin))
    with tarfile.open(os.path.join(os.environ["TEST_DATA"], "families.tar.xz")) as tar:
        return Tokenizer.from_str(tar.extractfile(f"tokenizers/{member}/tokenizer.json").read().decode())


@torch.no_grad()
def perplexity(model, ids):
    """As make_perplexity.py, one window at a time."""
    total, scored, begin = 0.0, 1, 0
    while scored < len(ids):
        window = torch.tensor([ids[begin:begin + CTX]])
        likely = torch.log_softmax(model(window, use_cache=False).logits[0, :-1].double(), -1)
        found = likely.gather(1, window[0, 1:, None])[:, 0]
        total -= found[scored - begin - 1:].sum().item()
        scored = begin + window.shape[1]
        begin += STRIDE
    return math.exp(total / (len(ids) - 1))


@torch.no_grad()
def golden(name):
    path, tokenizer = path_of(name), tokenizer_of(name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    chat = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer.encode(TEXT).ids
    logits = model(torch.tensor([ids[:POSITIONS]]), use_cache=False).logits[0].double()
    best = logits.topk(LARGEST, -1)
    question = TEXT.split(",")[0] if name.startswith("gemma") else QUESTION
    prompt = question if name.startswith("gemma") else chat.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    asked = tokenizer.encode(prompt).ids
    ends = {chat.eos_token_id, tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")} - {None}
    answer = []
    next_ids, cache = asked, None
    while len(answer) < ANSWER and not ends & set(answer[-1:]):
        out = model(torch.tensor([next_ids]), past_key_values=cache, use_cache=True)
        next_ids, cache = [out.logits[0, -1].argmax().item()], out.past_key_values
        answer += next_ids
    if answer[-1] in ends:
        answer.pop()
    return {"name": name, "ids": ids, "norms": [float(f"{x:.7g}") for x in logits.norm(dim=-1).tolist()],
            "largest": [[[i, float(f"{x:.7g}")] for i, x in zip(*row)] for row in zip(best.indices.tolist(), best.values.tolist())],
            "ctx": CTX, "stride": STRIDE, "perplexity": float(f"{perplexity(model, ids):.8g}"),
            "question": question, "prompt_ids": asked, "answer_ids": answer, "answer": tokenizer.decode(answer)}


def main():
    goldens = [golden(name) for name in MODELS]
    rows = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in goldens]
    (ROOT / "tests" / "goldens" / "real.json").write_text("[" + ",\n".join(rows) + "]\n")
    for row in goldens:
        print(row["name"], len(row["ids"]), row["perplexity"], repr(row["answer"]))


if __name__ == "__main__":
    main()
