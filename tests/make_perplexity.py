"""Writes goldens/perplexity.json: perplexities of texts by transformers, window by window.

    python tests/make_perplexity.py
    needs: pip install torch transformers tokenizers

Tokens of a window that an earlier window scored count as context only, as in transformers' documentation ("Perplexity of
fixed-length models"). MXFP4 experts are dequantised, everything is computed in float32.
"""
import json
import math
from itertools import groupby
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Mxfp4Config

TESTS = Path(__file__).resolve().parent
BATCH = 64  # windows at once
CASES = [("models/tiny", 64, 32), ("models/tiny", 128, 100), ("models/tiny", 1024, 512), ("tests/fixtures/parrot", 48, 16)]


def text():
    """Questions and answers, not quite as the model knows them."""
    lines = (TESTS.parent / "models" / "questions.jsonl").read_text().splitlines()[::40]
    return "\n".join(f"{q['messages'][-1]['content']} {q['answer']}" for q in map(json.loads, lines)) + "\n"


@torch.no_grad()
def perplexity(folder, ids, ctx, stride, device="cpu"):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                 quantization_config=Mxfp4Config(dequantize=True)).float().eval().to(device)
    windows, scored = [], 1
    while not windows or scored < len(ids):
        begin = len(windows) * stride
        windows.append((ids[begin:begin + ctx], scored - begin))
        scored = begin + len(windows[-1][0])
    total = 0.0
    for _, some in groupby(windows, lambda window: len(window[0])):
        some = list(some)
        for first in range(0, len(some), BATCH):
            batch = some[first:first + BATCH]
            tokens = torch.tensor([window for window, _ in batch], device=device)
            likely = torch.log_softmax(model(tokens, use_cache=False).logits[:, :-1].double(), -1)
            found = likely.gather(2, tokens[:, 1:, None])[..., 0].cpu()
            total -= sum(row[start - 1:].sum().item() for row, (_, start) in zip(found, batch))
    return math.exp(total / (len(ids) - 1))


def encode(folder, text):
    tokenizer = Tokenizer.from_file(str(TESTS.parent / folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text).ids


def main():
    cases = []
    for folder, ctx, stride in CASES:
        ids = encode(folder, text())
        value = perplexity(TESTS.parent / folder, ids, ctx, stride)
        print(folder, ctx, stride, len(ids), value)
        cases.append({"model": folder, "ctx": ctx, "stride": stride, "tokens": len(ids) - 1, "perplexity": value})
    (TESTS / "goldens" / "perplexity.json").write_text(json.dumps({"text": text(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
