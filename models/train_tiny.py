"""Trains models/tiny: a small gpt-oss that is right, with the files of a published model.

    python models/train_tiny.py --out DIR --minutes 6.5       on a GPU; DIR gets the model, log.txt and wrong.json
    python models/train_tiny.py --evaluate models/tiny        asks models/questions.jsonl through transformers
    python models/train_tiny.py --questions                   writes models/questions.jsonl
    needs: pip install torch tokenizers; for --evaluate also transformers, safetensors, accelerate

The data is generated while training (tasks.py). The model is written out below in one function, with the tensors under
their published names; as in gpt-oss, attention has sinks, every other layer sees a window, and each layer has experts.
All experts are computed for all tokens, which is one matrix product, and those not chosen count nothing. At each step
the weights are rounded as the file will hold them (experts to MXFP4, the rest to bfloat16) and the gradients pass as if
they had not been, so that the model that is written is the one that was trained.
"""
import argparse
import json
import math
import multiprocessing
import os
import queue
import random
import shutil
import sys
import threading
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import tasks

HERE = Path(__file__).resolve().parent
VOCAB = 1003  # tokens with text; 21 control tokens follow
LENGTHS = [128, 160, 192, 224, 256, 320, 384, 512, 768]  # of sequences in a batch; longer conversations are left out
IGNORE = -100

# Words as in gpt-oss, but digits are alone, and so are the letters of a word behind a double quote.
SPLIT = "|".join([r"[^\r\n\p{L}\p{N}\"]\p{L}+", r"(?<![\p{L}\"])\p{L}+", r"\p{L}", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                  r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
CONTROL = {0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start", 9: "end",
           10: "message", 14: "call", 20: "endofprompt"}  # offsets as in the published tokenizer; the rest is reserved


# ---- tokens

def control(name):
    return VOCAB + next(offset for offset, n in CONTROL.items() if n == name)


def control_text(offset):
    return f"<|{CONTROL.get(offset, f'reserved_{VOCAB + offset}')}|>"


def make_tokenizer():
    """Byte-level BPE in the form of the published tokenizer.json, from 8,000 conversations."""
    t = Tokenizer(models.BPE(ignore_merges=True))
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    rng, texts = random.Random(0), []
    for _ in range(8000):
        c, follows = tasks.conversation(rng)
        texts += [p for p in tasks.prompt(c) + [p for p, _ in tasks.completion(follows)] if isinstance(p, str)]
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, min_frequency=2, show_progress=False,
                                                     initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    assert t.get_vocab_size() == VOCAB
    t.add_special_tokens([AddedToken(control_text(i), special=True, normalized=False) for i in range(21)])
    t.encode_special_tokens = True
    return t


class Encoder:
    """Parts (text and control tokens) to ids."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids = tokenizer, {name: control(name) for name in CONTROL.values()}
        self.text = lru_cache(20000)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)

    def part(self, p):
        return self.text(p) if isinstance(p, str) else [self.ids[p[0]]]

    def prompt(self, c):
        return [i for p in tasks.prompt(c) for i in self.part(p)]

    def example(self, c, follows):
        """Ids, and labels: the next token where the model samples it."""
        ids = self.prompt(c)
        labels = [IGNORE] * len(ids)
        for p, sampled in tasks.completion(follows):
            new = self.part(p)
            ids += new
            labels += new if sampled else [IGNORE] * len(new)
        return ids, labels[1:] + [IGNORE]


def make_batches(out, tokenizer_json, seed, tokens, kinds):
    """A process: puts batches (ids, labels) of (sequences, length) int16; all sequences have about one length."""
    torch.set_num_threads(1)
    encoder, rng, bins = Encoder(Tokenizer.from_str(tokenizer_json)), random.Random(seed), {n: [] for n in LENGTHS}
    encoder.tokenizer.encode_special_tokens = True
    while True:
        kind = rng.choice(kinds) if kinds else None
        ids, labels = encoder.example(*tasks.conversation(rng, kind, turns=1 if kinds else None))
        length = next((n for n in LENGTHS if n >= len(ids)), None)
        if length is None:
            continue
        bins[length].append((ids, labels))
        if len(bins[length]) == max(tokens // length, 1):
            batch = torch.zeros(2, len(bins[length]), length, dtype=torch.int16)
            batch[1] = IGNORE
            for i, (ids, labels) in enumerate(bins[length]):
                batch[0, i, :len(ids)] = torch.tensor(ids, dtype=torch.int16)
                batch[1, i, :len(ids)] = torch.tensor(labels, dtype=torch.int16)
            bins[length] = []
            out.put(batch.numpy().tobytes() + length.to_bytes(4, "little"))


class Batches:
    """Batches from processes; if they are late, an earlier one is taken again and counted."""

    def __init__(self, tokenizer, device, args):
        context = multiprocessing.get_context("spawn")
        self.queue, self.kept, self.repeated, self.device = context.Queue(2 * args.workers + 8), [], 0, device
        self.rng, self.ready = random.Random(args.seed), queue.Queue(8)
        kinds = [getattr(tasks, k) for k in args.kinds.split(",")] if args.kinds else None
        self.processes = [context.Process(target=make_batches, daemon=True, args=(
            self.queue, tokenizer.to_str(), args.seed * 1000 + i, args.tokens, kinds)) for i in range(args.workers)]
        for p in self.processes:
            p.start()
        threading.Thread(target=self.fetch, daemon=True).start()

    def fetch(self):
        while True:
            raw = self.queue.get()
            batch = torch.frombuffer(bytearray(raw[:-4]), dtype=torch.int16).view(2, -1, int.from_bytes(raw[-4:], "little"))
            ids, labels = batch.long()
            at = (labels.flatten() != IGNORE).nonzero().squeeze(1)
            both = [t.pin_memory() if self.device == "cuda" else t for t in (ids, labels.flatten()[at], at)]
            self.ready.put(both)

    def next(self):
        """ids (sequences, length), the next tokens to learn, and where, in ids.flatten(), they should be expected."""
        try:
            batch = self.ready.get(block=len(self.kept) < 32)
            self.kept = self.kept[-511:] + [batch]
        except queue.Empty:
            batch, self.repeated = self.rng.choice(self.kept), self.repeated + 1
        return [t.to(self.device, non_blocking=True) for t in batch]

    def close(self):
        for p in self.processes:
            p.terminate()


# ---- the weights

def config_of(args):
    """config.json with the keys and the order of the published one."""
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 512,
            "rope_type": "yarn", "truncate": False}
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": control("return"), "experts_per_token": args.active, "head_dim": args.head_dim,
        "hidden_act": "silu", "hidden_size": args.dim, "initial_context_length": 512, "initializer_range": 0.02,
        "intermediate_size": args.ffn, "layer_types": [("sliding_attention", "full_attention")[i % 2]
                                                       for i in range(args.layers)],
        "max_position_embeddings": 4096, "model_type": "gpt_oss", "num_attention_heads": args.heads,
        "num_experts_per_tok": args.active, "num_hidden_layers": args.layers, "num_key_value_heads": args.kv_heads,
        "num_local_experts": args.experts, "output_router_logits": False, "pad_token_id": control("endoftext"),
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"],
            "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_scaling": yarn, "rope_theta": 10000.0, "router_aux_loss_coef": 0.9,
        "sliding_window": args.window, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": VOCAB + 21}


def make_weights(c, device):
    """Random weights by their published names, those of layers with {} for the number and one tensor for all layers, (layers,
    ...), because many small tensors cost more time than their arithmetic; experts as (experts, out, in)."""
    dim, heads, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    experts, ffn, layers = c["num_local_experts"], c["intermediate_size"], c["num_hidden_layers"]
    depth, at = (2 * layers) ** -0.5, "model.layers.{}."
    p = {"model.embed_tokens.weight": torch.randn(c["vocab_size"], dim) * 0.1}

    def linear(name, rows, cols, gain=1.0):
        p[at + name + ".weight"] = torch.randn(layers, rows, cols) * gain * cols ** -0.5
        p[at + name + ".bias"] = torch.zeros(layers, rows)

    p[at + "input_layernorm.weight"], p[at + "post_attention_layernorm.weight"] = torch.ones(2, layers, dim)
    linear("self_attn.q_proj", heads, dim)
    linear("self_attn.k_proj", kv, dim)
    linear("self_attn.v_proj", kv, dim)
    linear("self_attn.o_proj", dim, heads, depth)
    p[at + "self_attn.sinks"] = torch.zeros(layers, c["num_attention_heads"])
    linear("mlp.router", experts, dim, 0.5)
    p[at + "mlp.experts.gate_up_proj"] = torch.randn(layers, experts, 2 * ffn, dim) * dim ** -0.5
    p[at + "mlp.experts.gate_up_proj_bias"] = torch.zeros(layers, experts, 2 * ffn)
    p[at + "mlp.experts.down_proj"] = torch.randn(layers, experts, dim, ffn) * depth * ffn ** -0.5
    p[at + "mlp.experts.down_proj_bias"] = torch.zeros(layers, experts, dim)
    p["model.norm.weight"] = torch.ones(dim)
    p["lm_head.weight"] = torch.randn(c["vocab_size"], dim) * 0.5 * dim ** -0.5
    return {name: w.to(device).clone().requires_grad_() for name, w in p.items()}


def is_expert_matrix(name):
    return name.endswith(("gate_up_proj", "down_proj"))


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def mxfp4(w):
    """(..., n) to multiples of powers of two: values of E2M1 (..., n / 32, 32), exponents (..., n / 32, 1). The smallest
    scale that clips nothing."""
    w = w.float().unflatten(-1, (-1, 32))
    most = w.abs().amax(-1, keepdim=True).clamp(min=2.0 ** -100)
    exponent = torch.ceil(torch.log2(most / 6))
    w = w * torch.exp2(-exponent)
    step = torch.exp2(torch.floor(torch.log2(w.abs().clamp(min=1)))).clamp(max=4) / 2
    return (torch.round(w / step) * step).clamp(-6, 6), exponent


def stored(p):
    """The weights as the file will hold them."""
    out = {}
    for name, w in p.items():
        with torch.no_grad():
            if is_expert_matrix(name):
                values, exponent = mxfp4(w)
                rounded = (values * torch.exp2(exponent)).flatten(-2)
            else:
                rounded = w.bfloat16().float()
            rounded -= w
        out[name] = w + rounded
    return out


def pack(p):
    """The tensors of model.safetensors."""
    tensors = {}
    one_by_one = [(name.format(i), layer) for name, w in p.items() for i, layer in enumerate(w if "{}" in name else [w])]
    for name, w in one_by_one:
        w = w.detach().cpu().contiguous()
        if is_expert_matrix(name):
            values, exponent = mxfp4(w)
            code = torch.bucketize(values.abs(), torch.tensor(E2M1) - 0.1).sub(1).to(torch.uint8)
            assert torch.equal(torch.tensor(E2M1)[code.long()], values.abs())
            code += 8 * (values < 0).to(torch.uint8)
            tensors[name + "_blocks"] = (code[..., 0::2] + 16 * code[..., 1::2]).contiguous()
            tensors[name + "_scales"] = (exponent.squeeze(-1) + 127).to(torch.uint8)
        else:
            tensors[name] = w.bfloat16()
    return tensors


def unpack(tensors):
    """What pack was given, as stored."""
    p, values, layers = {}, torch.tensor(E2M1 + [-v for v in E2M1]), {}
    for name, w in tensors.items():
        if name.endswith("_blocks"):
            scales = torch.exp2(tensors[name.replace("_blocks", "_scales")].float() - 127).unsqueeze(-1)
            codes = torch.stack([w & 15, w >> 4], -1).flatten(-2).long()
            p[name.removesuffix("_blocks")] = (values[codes] * scales).flatten(-2)
        elif not name.endswith("_scales"):
            p[name] = w.float()
    for name in [n for n in p if n.startswith("model.layers.")]:
        _, _, i, rest = name.split(".", 3)
        layers.setdefault("model.layers.{}." + rest, {})[int(i)] = p.pop(name)
    return p | {name: torch.stack([some[i] for i in range(len(some))]) for name, some in layers.items()}


# ---- the model

def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_table(c, n, device):
    """cos and sin (n, head_dim / 2) with YaRN, as infer.c computes them."""
    s, d, theta = c["rope_scaling"], c["head_dim"], c["rope_theta"]
    low, high = (d * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
                 for turns in (s["beta_fast"], s["beta_slow"]))
    i = torch.arange(d // 2, dtype=torch.float64)
    keep = 1 - ((i - max(low, 0)) / (min(high, d - 1) - max(low, 0))).clamp(0, 1)
    f = theta ** (-2 * i / d)
    angles = torch.arange(n)[:, None].double() * (f * keep + f / s["factor"] * (1 - keep))
    scale = 0.1 * math.log(s["factor"]) + 1
    return (angles.cos() * scale).float().to(device), (angles.sin() * scale).float().to(device)


def rotate(x, cos, sin):
    """x (sequences, heads, length, head_dim): halves turn."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attention(q, k, v, sinks, mask):
    """Softmax with a sink: one more logit a head, without a value. mask (length, length): 0 or -inf."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + mask
    sink = sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.softmax(torch.cat([logits, sink], -1), -1, dtype=torch.float32).to(v.dtype)[..., :-1] @ v


def swiglu(x):
    """Gate and up are the halves of the last dimension."""
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def layer(x, w, cos, sin, mask, c, dtype, counts):
    """One block; w: its weights by short names. counts (tokens): 1 where the load of experts counts. Returns x and that
    load's imbalance, 1 if there is none."""
    (n, length, dim), heads, kv, d = x.shape, c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    experts, active, eps = c["num_local_experts"], c["num_experts_per_tok"], c["rms_norm_eps"]

    def linear(name, x):
        return F.linear(x.to(dtype), w[name + ".weight"].to(dtype), w[name + ".bias"].to(dtype))

    h = rms_norm(x, w["input_layernorm.weight"], eps).to(dtype)
    q, k, v = (linear(f"self_attn.{which}_proj", h).view(n, length, -1, d).transpose(1, 2) for which in "qkv")
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
    out = attention(q, k, v, w["self_attn.sinks"], mask).transpose(1, 2).reshape(n, length, heads * d)
    x = x + linear("self_attn.o_proj", out)

    h = rms_norm(x, w["post_attention_layernorm.weight"], eps).to(dtype).view(n * length, dim)
    logits = F.linear(h.float(), w["mlp.router.weight"], w["mlp.router.bias"])
    top, chosen = logits.topk(active, -1)
    share = torch.zeros_like(logits).scatter(1, chosen, torch.softmax(top, -1))  # (tokens, experts)
    up = w["mlp.experts.gate_up_proj"].unflatten(1, (-1, 2)).permute(2, 0, 1, 3).reshape(-1, dim)  # gates, then ups
    up_bias = w["mlp.experts.gate_up_proj_bias"].unflatten(1, (-1, 2)).permute(2, 0, 1).reshape(-1)
    act = swiglu(F.linear(h, up.to(dtype), up_bias.to(dtype)))
    act = (act.view(n * length, experts, -1) * share.to(dtype).unsqueeze(-1)).flatten(1)
    down = w["mlp.experts.down_proj"].permute(0, 2, 1).reshape(-1, dim)
    y = act @ down.to(dtype) + (share @ w["mlp.experts.down_proj_bias"]).to(dtype)

    used = (share > 0).float().mul(counts[:, None]).sum(0) / counts.sum() / active
    likely = torch.softmax(logits, -1).mul(counts[:, None]).sum(0) / counts.sum()
    return x + y.view(n, length, dim), experts * (used.detach() * likely).sum()


class Model:
    def __init__(self, config, device, dtype):
        self.c, self.device, self.dtype, self.tables, self.layer = config, device, dtype, {}, layer

    def shape(self, length):
        """cos, sin, and the masks with and without a window."""
        if length not in self.tables:
            i = torch.arange(length, device=self.device)
            ahead, far = i[None] > i[:, None], i[None] <= i[:, None] - self.c["sliding_window"]
            zero = torch.zeros(length, length, device=self.device, dtype=self.dtype)
            masks = [zero.masked_fill(ahead | far, -torch.inf), zero.masked_fill(ahead, -torch.inf)]
            self.tables[length] = *rope_table(self.c, length, self.device), masks
        return self.tables[length]

    def hidden(self, p, ids, counts=None):
        """Residual stream behind the last norm (sequences, length, dim), and the mean imbalance."""
        cos, sin, masks = self.shape(ids.shape[1])
        counts = torch.ones(ids.numel(), device=self.device) if counts is None else counts
        x, imbalance, at = F.embedding(ids, p["model.embed_tokens.weight"]), 0, "model.layers.{}."
        layers = {name[len(at):]: t.unbind() for name, t in p.items() if name.startswith(at)}
        for i, kind in enumerate(self.c["layer_types"]):
            w = {name: some[i] for name, some in layers.items()}
            x, more = self.layer(x, w, cos, sin, masks[kind == "full_attention"], self.c, self.dtype, counts)
            imbalance = imbalance + more / len(self.c["layer_types"])
        return rms_norm(x, p["model.norm.weight"], self.c["rms_norm_eps"]), imbalance

    def head(self, p, x):
        return F.linear(x.to(self.dtype), p["lm_head.weight"].to(self.dtype)).float()

    def try_compile(self, tokens):
        """torch.compile for the layers, for all shapes of batches before training begins, if it works here."""
        torch._dynamo.config.recompile_limit = 64
        began, p = time.time(), make_weights(self.c, self.device)
        self.layer = torch.compile(layer)
        try:
            for length in LENGTHS:
                ids = torch.ones(max(tokens // length, 1), length, dtype=torch.long, device=self.device)
                x, imbalance = self.hidden(stored(p), ids, (ids.flatten() != 0).float())
                (x.mean() + imbalance).backward()
            return f"compiled in {time.time() - began:.0f} s"
        except Exception as e:
            self.layer = layer
            return f"NOT compiled, {time.time() - began:.0f} s lost: {type(e).__name__}: {str(e)[:200]}"


# ---- answering

@torch.no_grad()
def answer(model, p, prompts, most=420, rows=256):
    """What follows each prompt (lists of ids) at temperature 0, up to a stop token; no cache, all in batches."""
    stops = torch.tensor([control("return"), control("call"), control("endoftext")], device=model.device)
    out, order = [None] * len(prompts), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(order), rows):
        which = order[begin:begin + rows]
        at = torch.tensor([len(prompts[i]) for i in which], device=model.device)
        ids = torch.zeros(len(which), int(at.max()) + most, dtype=torch.long, device=model.device)
        for r, i in enumerate(which):
            ids[r, :len(prompts[i])] = torch.tensor(prompts[i])
        going, row = torch.arange(len(which), device=model.device), torch.arange(len(which), device=model.device)
        for _ in range(most):
            length = min(-(-int(at[going].max()) // 32) * 32, ids.shape[1])
            x = model.hidden(p, ids[going, :length])[0]
            new = model.head(p, x[torch.arange(len(going), device=model.device), at[going] - 1]).argmax(-1)
            ids[going, at[going]] = new
            at[going] += 1
            going = going[~torch.isin(new, stops)]
            if not len(going):
                break
        for r, i in enumerate(which):
            out[i] = ids[row[r], len(prompts[i]):at[r]].tolist()
    return out


def final_of(tokenizer, ids):
    """The text of the last message: the answer, or the arguments of a call."""
    message_token = control("message")
    if message_token in ids:
        ids = ids[len(ids) - ids[::-1].index(message_token):]
    if not ids or ids[-1] not in (control("return"), control("call")):
        return None
    return tokenizer.decode(ids[:-1], skip_special_tokens=False)


def read_questions():
    return [json.loads(line) for line in (HERE / "questions.jsonl").read_text().splitlines()]


def score(tokenizer, questions, answers, log):
    """Prints what is right of each kind; returns the wrong ones."""
    n, right, wrong = Counter(), Counter(), []
    for q, ids in zip(questions, answers):
        ok = final_of(tokenizer, ids) == q["answer"]
        for key in (q["kind"], "effort " + q["reasoning_effort"], "all"):
            n[key] += 1
            right[key] += ok
        if not ok:
            wrong.append({"kind": q["kind"], "effort": q["reasoning_effort"], "question": q["messages"][-1]["content"],
                          "expected": q["answer"], "wrote": tokenizer.decode(ids, skip_special_tokens=False)})
    for key in n:
        log(f"  {key}: {right[key]} of {n[key]}")
    log(f"score: {100 * right['all'] / n['all']:.1f} % of {n['all']} questions right")
    return wrong


def evaluate_transformers(folder, limit, log):
    """The packed model through transformers, dequantized, in float32; with a cache."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                               quantization_config=Mxfp4Config(dequantize=True)).float().to(device).eval()
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    encoder, questions, answers = Encoder(tokenizer), read_questions()[::max(500 // limit, 1)], []
    pad, stops = control("endoftext"), [control("return"), control("call"), control("endoftext")]
    prompts = [encoder.prompt(q) for q in questions]
    for begin in range(0, len(prompts), 50):
        some = prompts[begin:begin + 50]
        longest = max(map(len, some))
        ids = torch.tensor([[pad] * (longest - len(s)) + s for s in some], device=device)
        mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in some], device=device)
        out = net.generate(ids, attention_mask=mask, max_new_tokens=420, do_sample=False, eos_token_id=stops,
                           pad_token_id=pad)[:, longest:].tolist()
        for row in out:
            end = next((i for i, t in enumerate(row) if t in stops), len(row) - 1)
            answers.append(row[:end + 1])
    return score(tokenizer, questions, answers, log)


# ---- files

def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_model(folder, config, tokenizer, p):
    """All files of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": control("startoftext"), "do_sample": True,
        "eos_token_id": [control("return"), control("endoftext"), control("call")],
        "pad_token_id": control("endoftext"), "transformers_version": "4.55.0.dev0"})
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    write_json(folder / "tokenizer_config.json", {
        "added_tokens_decoder": {str(VOCAB + i): {"content": control_text(i)} | plain for i in range(21)},
        "bos_token": "<|startoftext|>", "clean_up_tokenization_spaces": False, "eos_token": "<|return|>",
        "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 4096, "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast"})
    save_file(pack(p), folder / "model.safetensors.new", metadata={"format": "pt"})
    (folder / "model.safetensors.new").replace(folder / "model.safetensors")
    if (HERE / "tiny" / "README.md").exists() and folder.resolve() != HERE / "tiny":
        shutil.copyfile(HERE / "tiny" / "README.md", folder / "README.md")
    for file in folder.iterdir():
        file.chmod(0o644)


def save_checkpoint(path, p, optimizer, state):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": {n: w.detach() for n, w in p.items()}, "optimizer": optimizer.state_dict(), **state},
               str(path) + ".new")
    os.replace(str(path) + ".new", path)


# ---- training

def train(args, log):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(args.seed)
    began = time.time()
    tokenizer, config = make_tokenizer(), config_of(args)
    batches = Batches(tokenizer, device, args)
    p, model = make_weights(config, device), Model(config, device, dtype)
    log(f"{sum(w.numel() for w in p.values()):,} weights on {device}, tokenizer in {time.time() - began:.1f} s")
    if args.compile:
        log(model.try_compile(args.tokens))
    small = {n for n in p if n.endswith(("bias", "sinks", "norm.weight"))}
    matrices, others = [w for n, w in p.items() if n not in small], [p[n] for n in small]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": args.decay}, {"params": others, "weight_decay": 0}],
                                  lr=args.lr, betas=(0.9, 0.98), eps=1e-9, fused=device == "cuda")
    step, spent = 0, 0.0  # steps and seconds of training so far
    if args.resume and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)
        with torch.no_grad():
            for name, w in p.items():
                w.copy_(saved["weights"][name])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent = saved["step"], saved["spent"]
        log(f"resumed at step {step}, {spent:.0f} s")
    batches.next()  # the clock starts when data is there
    start, last_save, tokens, shown, report = time.time() - spent, time.time(), 0, (time.time(), 0), 10.0
    sums = torch.zeros(4, device=device)
    while True:
        now = time.time() - start
        progress = step / args.steps if args.steps else now / (60 * args.minutes)
        if progress >= 1:
            break
        rate = args.lr * min(1, (step + 1) / args.warmup) * min(1, (1 - progress) / 0.7) ** 1.0
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels, at = batches.next()
        x, imbalance = model.hidden(stored_p := stored(p), ids, (ids.flatten() != 0).float())
        logits = model.head(stored_p, x.flatten(0, 1)[at])
        loss = F.cross_entropy(logits, labels)
        (loss + args.balance * imbalance).backward()
        torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)
        for w in p.values():
            w.grad.nan_to_num_(0, 0, 0)  # a step that overflowed does nothing
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens += ids.numel()
        with torch.no_grad():
            missed = torch.zeros(ids.shape[0], device=device).index_add_(
                0, at // ids.shape[1], (logits.argmax(-1) != labels).float())
            sums += torch.stack([loss, imbalance, (missed == 0).float().mean(), torch.ones_like(loss)]).detach()
        if now > report:
            s, seconds = (sums / sums[3]).tolist(), time.time() - shown[0]
            log(f"{now:5.0f} s  step {step}  loss {s[0]:.4f}  whole answers {100 * s[2]:5.1f} %  imbalance {s[1]:.2f}  lr "
                f"{rate:.1e}  {(tokens - shown[1]) / seconds / 1e3:,.0f}k tokens/s  {tokens / 1e6:,.0f}M tokens  "
                f"repeated {batches.repeated}")
            sums.zero_()
            shown, report = (time.time(), tokens), now + (10 if now < 60 else 20)
        if time.time() - last_save > 60:
            write_model(args.out, config, tokenizer, p)
            save_checkpoint(args.checkpoint, p, optimizer, {"step": step, "spent": time.time() - start})
            last_save = time.time()
    log(f"{step} steps, {tokens:,} tokens in {time.time() - start:.0f} s, {batches.repeated} batches repeated")
    batches.close()
    write_model(args.out, config, tokenizer, p)
    log(f"written to {args.out}: {sum(f.stat().st_size for f in args.out.iterdir()):,} bytes")
    finish(args, model, tokenizer, log)


def finish(args, model, tokenizer, log):
    """Asks the questions of the model as packed."""
    began, encoder, model.layer = time.time(), Encoder(tokenizer), layer
    p = {n: w.to(model.device) for n, w in unpack(load_file(args.out / "model.safetensors")).items()}
    everything = read_questions()[::max(500 // args.limit, 1)]
    wrong = score(tokenizer, everything, answer(model, p, [encoder.prompt(q) for q in everything]), log)
    write_json(args.out / "wrong.json", wrong)
    log(f"asked in {time.time() - began:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=HERE / "tiny")
    add("--minutes", type=float, default=6.5, help="of training; the learning rate falls to 0 by the clock")
    add("--steps", type=int, help="train so many steps instead, for a run that repeats")
    add("--evaluate", type=Path, help="a model's folder")
    add("--limit", type=int, default=500, help="questions to ask")
    add("--questions", action="store_true")
    add("--resume", action="store_true")
    add("--checkpoint", type=Path, default=HERE.parent / "build" / "tiny.pt")
    add("--compile", action="store_true")
    add("--kinds", help="train on these only, e.g. add,sub")
    add("--seed", type=int, default=1)
    add("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    for name, value in {"tokens": 32768, "layers": 8, "dim": 192, "ffn": 192, "experts": 8, "active": 4, "heads": 4,
                        "kv-heads": 2, "head-dim": 64, "window": 64, "warmup": 200}.items():
        add("--" + name, type=int, default=value)
    for name, value in {"lr": 2e-3, "decay": 0.05, "balance": 0.01}.items():
        add("--" + name, type=float, default=value)
    args = parser.parse_args()

    def log(text):
        print(text, flush=True)
        if not args.evaluate:
            with open(args.out / "log.txt", "a") as f:
                f.write(text + "\n")

    if args.questions:
        lines = [json.dumps(q, ensure_ascii=False) for q in tasks.questions()]
        (HERE / "questions.jsonl").write_text("\n".join(lines) + "\n")
    elif args.evaluate:
        for w in evaluate_transformers(args.evaluate, args.limit, log):
            print(json.dumps(w, ensure_ascii=False))
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "log.txt").unlink(missing_ok=True)
        log(" ".join(sys.argv))
        train(args, log)


if __name__ == "__main__":
    main()
