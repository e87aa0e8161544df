"""Writes tests/goldens/sampling.json: what transformers' logits processors leave of random logits.

Usage: python tests/make_sampling.py        (pip install torch transformers)

Each case has logits, the token ids of the prompt and of the answer so far, the settings, and the probabilities after
biases, frequency and presence penalty, repetition penalty, temperature, top-k, top-p and min-p in that order, 0 for
tokens that are filtered out. Logits are kept away from each other, so that no case depends on how equals are ordered.
transformers has no frequency and presence penalty: they are OpenAI's formula, written as vLLM's apply_penalties() does.
"""

import json
import pathlib

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

VOCAB = 48
SETTINGS = [  # temperature, top_k, top_p, min_p, penalty
    (1.0, 0, 1.0, 0.0, 1.0), (0.7, 0, 1.0, 0.0, 1.0), (1.5, 0, 1.0, 0.0, 1.3), (1.0, 5, 1.0, 0.0, 1.0),
    (1.0, 1, 1.0, 0.0, 1.0), (1.0, 0, 0.9, 0.0, 1.0), (1.0, 0, 0.3, 0.0, 1.0), (1.0, 0, 0.01, 0.0, 1.0),
    (1.0, 0, 1.0, 0.1, 1.0), (2.0, 0, 1.0, 0.02, 1.0), (1.0, 20, 0.8, 0.0, 1.0), (0.8, 20, 0.95, 0.05, 1.1),
    (1.2, 7, 0.99, 0.001, 0.8), (0.5, 40, 0.5, 0.3, 1.5), (1.0, 100, 0.999, 0.0, 1.0), (3.0, 10, 1.0, 0.4, 2.0),
]
PENALTIES = [  # the same, and frequency, presence
    (1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0), (1.0, 0, 1.0, 0.0, 1.0, 0.7, 0.0), (1.0, 0, 1.0, 0.0, 1.0, 0.0, 1.5),
    (1.3, 0, 0.95, 0.0, 1.0, 0.5, 0.25), (1.0, 12, 1.0, 0.0, 1.2, -0.4, -1.0), (0.8, 0, 1.0, 0.05, 1.4, 2.0, 2.0),
]


def openai_penalties(frequency, presence, answer):
    count = torch.bincount(answer, minlength=VOCAB)
    return lambda ids, scores: scores - frequency * count - presence * (count > 0)


def processors(temperature, top_k, top_p, min_p, penalty, frequency=0, presence=0, answer=None, bias=None):
    chain = LogitsProcessorList()
    if bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): add for token, add in bias}))
    if answer is not None:
        chain.append(openai_penalties(frequency, presence, answer))
    if penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(penalty))
    if temperature != 1:
        chain.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chain.append(TopKLogitsWarper(min(top_k, VOCAB)))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    return chain


def main():
    torch.manual_seed(0)
    cases = []
    for settings in SETTINGS:
        logits = (torch.randperm(VOCAB).double() / VOCAB * 12 - 6 + torch.rand(VOCAB).double() * 0.1).float()
        seen = torch.randperm(VOCAB)[:10]
        scores = processors(*settings)(seen[None], logits[None].clone())[0]
        cases.append(dict(zip(("temperature", "top_k", "top_p", "min_p", "penalty"), settings)) | {
            "logits": [float(f"{x:.9g}") for x in logits.tolist()],
            "seen": seen.tolist(),
            "probabilities": [float(f"{p:.6g}") for p in torch.softmax(scores.double(), -1).tolist()],
        })
    for settings in PENALTIES:
        logits = (torch.randperm(VOCAB).double() / VOCAB * 12 - 6 + torch.rand(VOCAB).double() * 0.1).float()
        likely = torch.argsort(logits, descending=True)[:24]  # the penalties shall matter
        prompt, answer = likely[torch.randint(24, (6,))], likely[torch.randint(10, (14,))]
        bias = [[int(token), round(float(add), 3)] for token, add in zip(likely[3::4], torch.randn(6) * 3)]
        scores = processors(*settings, answer, bias)(torch.cat([prompt, answer])[None], logits[None].clone())[0]
        names = ("temperature", "top_k", "top_p", "min_p", "penalty", "frequency", "presence")
        cases.append(dict(zip(names, settings)) | {
            "logits": [float(f"{x:.9g}") for x in logits.tolist()],
            "seen": prompt.tolist(), "answer": answer.tolist(), "bias": bias,
            "probabilities": [float(f"{p:.6g}") for p in torch.softmax(scores.double(), -1).tolist()],
        })
    path = pathlib.Path(__file__).parent / "goldens" / "sampling.json"
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
