"""Makes goldens/rope.json: for many spellings of config.json the angle per position and the factor of cos and sin that
transformers computes. null for a factor or a length, absent keys and old names are where readers go wrong.

    python tests/make_rope.py        needs: pip install torch transformers
"""
import json
from pathlib import Path

from transformers import GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SIZES = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 32, "vocab_size": 8, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
LLAMA = {"model_type": "llama", **SIZES}
GPT_OSS = {"model_type": "gpt_oss", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled(base=LLAMA, **rope):
    return {**base, "rope_theta": 10000.0, "rope_scaling": rope}


CASES = {
    "linear": scaled(rope_type="linear", factor=4.0),
    "llama3": scaled(**LLAMA3, original_max_position_embeddings=256),
    "llama3 without a length": scaled(**LLAMA3),
    "llama3, a length outside": {**scaled(**LLAMA3), "original_max_position_embeddings": 256},
    "yarn": scaled(**YARN),
    "yarn, old name of the type": scaled(type="yarn", factor=8.0, original_max_position_embeddings=512),
    "yarn, new name of the object": {**LLAMA, "rope_theta": 7.0, "rope_parameters": {**YARN, "rope_theta": 500.0}},
    "yarn, theta outside": {**LLAMA, "rope_theta": 500.0, "rope_parameters": YARN},
    "yarn, mscale and mscale_all_dim": scaled(**YARN, mscale=1.0, mscale_all_dim=0.4),
    "yarn, both equal": scaled(**YARN, mscale=0.707, mscale_all_dim=0.707),
    "yarn, only mscale": scaled(**YARN, mscale=0.5),
    "yarn, only mscale_all_dim": scaled(**YARN, mscale_all_dim=0.5),
    "yarn, mscale 0": scaled(**YARN, mscale=0, mscale_all_dim=0.5),
    "yarn, mscale beside attention_factor": scaled(**YARN, mscale=1.0, mscale_all_dim=0.4, attention_factor=1.25),
    "yarn, attention_factor null": scaled(**YARN, attention_factor=None),
    "yarn, factor null": scaled(**{**YARN, "factor": None}),
    "yarn, factor null with mscale": scaled(**{**YARN, "factor": None}, mscale=1.0, mscale_all_dim=0.4),
    "yarn, factor 1": scaled(**{**YARN, "factor": 1.0}),
    "yarn without a length": scaled(rope_type="yarn", factor=8.0),
    "yarn, two lengths": {**scaled(**YARN), "original_max_position_embeddings": 256},
    "yarn, betas": scaled(**YARN, beta_fast=16.0, beta_slow=2.0),
    "yarn, betas null": scaled(**YARN, beta_fast=None, beta_slow=None),
    "yarn, not truncated": scaled(**YARN, truncate=False),
    "yarn, truncated": scaled(**YARN, truncate=True),
    "yarn, truncate null": scaled(**YARN, truncate=None),
    "gpt_oss without scaling": GPT_OSS,
    "gpt_oss, scaling null": {**GPT_OSS, "rope_scaling": None},
    "gpt_oss, only theta": {**GPT_OSS, "rope_theta": 10000.0},
    "gpt_oss with scaling": {**GPT_OSS, "rope_scaling": YARN},
    "gpt_oss, new name of the object": {**GPT_OSS, "rope_parameters": {**YARN, "rope_theta": 500.0}},
}


def golden(name, config):
    kind = {"llama": LlamaConfig, "gpt_oss": GptOssConfig}[config["model_type"]]
    made = kind.from_dict(json.loads(json.dumps(config)))
    angles, scale = ROPE_INIT_FUNCTIONS[made.rope_parameters["rope_type"]](made, "cpu")
    angles = [float(f"{x:.8g}") for x in angles.tolist()]
    return {"name": name, "config": config, "inv_freq": angles, "scale": float(scale)}


if __name__ == "__main__":
    goldens = [golden(name, config) for name, config in CASES.items()]
    text = ",\n".join(json.dumps(g) for g in goldens)
    (Path(__file__).parent / "goldens" / "rope.json").write_text(f"[\n{text}\n]\n")
