"""Compares the logits of infer with those of transformers, for any model directory that transformers can load.

    python tests/compare_logits.py MODEL [--infer ./infer-reference] [--ids 1,2,3 | --tokens N] [--device cpu|cuda]
                                         [--dtype float32] [--max-error E]
    needs: pip install torch transformers numpy accelerate

Runs `INFER logits MODEL --ids ... --all -o FILE.npy`, and transformers on the same ids (MXFP4 experts dequantised to
--dtype, eager attention). Prints the relative error ||infer - transformers|| / ||transformers|| over all positions, the
largest difference, how often both prefer the same token, and the worst position. Exit 1 if --max-error is exceeded.
"""
import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config


def infer_logits(infer, model, ids):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits.npy"
        subprocess.run([infer, "logits", model, "--ids", ",".join(map(str, ids)), "--all", "-o", file], check=True,
                       stdout=subprocess.DEVNULL)
        return np.load(file)


def load(folder, device, dtype):
    quantization = getattr(AutoConfig.from_pretrained(folder), "quantization_config", None) or {}
    how = {"quantization_config": Mxfp4Config(dequantize=True)} if quantization.get("quant_method") == "mxfp4" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device, attn_implementation="eager",
                                                 **how)
    for p in model.parameters():
        p.data = p.data.to(dtype)  # dequantised experts come as bf16 whatever dtype says
    return model


@torch.no_grad()
def transformers_logits(folder, ids, device, dtype):
    model = load(folder, device, dtype)
    return model(torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu().numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--infer", default="./infer-reference")
    parser.add_argument("--ids", type=lambda text: [int(i) for i in text.split(",")])
    parser.add_argument("--tokens", type=int, default=32, help="that many random ids, the same each time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-error", type=float)
    args = parser.parse_args()

    vocab = AutoConfig.from_pretrained(args.model).vocab_size
    ids = args.ids or np.random.default_rng(1).integers(0, vocab, args.tokens).tolist()
    ours = infer_logits(args.infer, args.model, ids).astype(np.float64)
    theirs = transformers_logits(args.model, ids, args.device, getattr(torch, args.dtype)).astype(np.float64)
    if ours.shape != theirs.shape:
        sys.exit(f"infer gives {ours.shape}, transformers {theirs.shape}")

    each = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    print(f"relative error   {error:.3e}")
    print(f"largest absolute {np.abs(ours - theirs).max():.3e}")
    print(f"same top token   {100 * (ours.argmax(1) == theirs.argmax(1)).mean():.1f} % of {len(ids)}")
    print(f"worst position   {each.argmax()} ({each.max():.3e})")
    if args.max_error is not None and not error <= args.max_error:
        sys.exit(f"relative error above {args.max_error:g}")


if __name__ == "__main__":
    main()
