"""Writes tests/goldens/sampling.json: what transformers' logits processors leave of random logits.

Usage: python tests/make_sampling.py        (pip install torch transformers)

Each case has logits, the token ids already in the text, the settings, and the probabilities after repetition penalty,
temperature, top-k, top-p and min-p in that order, 0 for tokens that are filtered out. Logits are kept away from each
other, so that no case depends on how equals are ordered.
"""

import json
import pathlib

import torch
from transformers import (LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
                          TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

VOCAB = 48
SETTINGS = [  # temperature, top_k, top_p, min_p, penalty
    (1.0, 0, 1.0, 0.0, 1.0), (0.7, 0, 1.0, 0.0, 1.0), (1.5, 0, 1.0, 0.0, 1.3), (1.0, 5, 1.0, 0.0, 1.0),
    (1.0, 1, 1.0, 0.0, 1.0), (1.0, 0, 0.9, 0.0, 1.0), (1.0, 0, 0.3, 0.0, 1.0), (1.0, 0, 0.01, 0.0, 1.0),
    (1.0, 0, 1.0, 0.1, 1.0), (2.0, 0, 1.0, 0.02, 1.0), (1.0, 20, 0.8, 0.0, 1.0), (0.8, 20, 0.95, 0.05, 1.1),
    (1.2, 7, 0.99, 0.001, 0.8), (0.5, 40, 0.5, 0.3, 1.5), (1.0, 100, 0.999, 0.0, 1.0), (3.0, 10, 1.0, 0.4, 2.0),
]


def processors(temperature, top_k, top_p, min_p, penalty):
    chain = LogitsProcessorList()
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
    path = pathlib.Path(__file__).parent / "goldens" / "sampling.json"
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
