"""Compares perplexities by `infer` and by transformers in float32, of the models and windows of make_perplexity.py.

    python tests/compare_perplexity.py -f TEXT [--infer ./infer] [--device cuda]
    needs: pip install torch transformers tokenizers

What rounding to bfloat16 adds to a token's probability has either sign, so the longer the text, the less is left of it: 100,000 tokens are
enough for 0.1 %.
"""
import argparse
import subprocess
from pathlib import Path

from make_perplexity import CASES, TESTS, encode, perplexity


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-f", "--file", required=True)
    parser.add_argument("--infer", default="./infer")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    text = Path(options.file).read_bytes().decode()  # as it is, ends of lines too
    for folder, ctx, stride in CASES:
        ids = encode(folder, text)
        theirs = perplexity(TESTS.parent / folder, ids, ctx, stride, options.device)
        command = [options.infer, "perplexity", TESTS.parent / folder, "-f", options.file, "--ctx", str(ctx), "--stride", str(stride)]
        ours = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1])
        print(f"{folder}, {len(ids)} tokens, windows of {ctx}, {stride} apart: {ours:g}, transformers {theirs:g}, {100 * (ours / theirs - 1):+.3f} %")


if __name__ == "__main__":
    main()
