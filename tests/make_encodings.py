"""Makes tests/fixtures/encodings: small random models in every encoding of safetensors that infer reads.

    python tests/make_encodings.py [NAME ...]        (default: all)
    needs: pip install torch transformers safetensors accelerate compressed-tensors==0.20.0
           pip install --no-deps auto-gptq==0.7.1 autoawq==0.2.6     (two files of each are used, by their paths)

encodings/NAME/config.json and model.safetensors look like a published model. golden.safetensors holds ids, I32 (n), and
logits, F32 (n, vocab): what transformers computes in float64 from the weights that other people's code decodes from
these files: compressed-tensors, AutoGPTQ, AutoAWQ, torch's float8 types.
"""
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from make_fixtures import FIXTURES, choose_ids, deepseek, family, randomize, stored_tensors, write_json

FOLDER = FIXTURES / "encodings"
E4M3 = torch.float8_e4m3fn
random = torch.Generator()


def load_file_of(package, path):
    """One file of a package whose whole does not go with these versions of torch and transformers."""
    found = importlib.util.find_spec(package)
    where = Path(found.submodule_search_locations[0], path)
    spec = importlib.util.spec_from_file_location(where.stem, where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jitter(*shape):
    """Factors that make scales differ from the best ones, so that none can stand for another."""
    return 1 + 0.3 * torch.rand(*shape, generator=random)


# ---- encoders: the module's tensors by their suffixes, and its weights as others decode them

def expand(scale, rows, cols, block):
    """scale [r / block rows, c / block columns] for each weight."""
    return scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]


def fp8(block=None, suffix="weight_scale", dtype=torch.float32, shape=None, more=()):
    """block: rows and columns that share a scale; None: all. shape: another than (rows, columns) for the scales."""
    def encode(w):
        rows, cols = w.shape
        b = [min(x or n, n) for x, n in zip(block or w.shape, w.shape)]
        grid = [-(-n // x) for n, x in zip(w.shape, b)]
        scale = (w.abs().max() / 448 * jitter(*grid)).to(dtype)
        if dtype == torch.float8_e8m0fnu:
            scale = torch.exp2(torch.randint(-10, -6, grid, generator=random).float()).to(dtype)
        q = (w / expand(scale, rows, cols, b)).clamp(-448, 448).to(E4M3)
        tensors = {"weight": q, suffix: scale.reshape(shape if shape is not None else grid)}
        return tensors | {name: torch.tensor(0.02) for name in more}, q.float() * expand(scale, rows, cols, b)
    return encode


def compressed(form, group=None, zero=False, order=False, dtype=torch.bfloat16, **args):
    """What compressed-tensors writes and reads."""
    strategy = "group" if group else "channel"
    if form.startswith("nvfp4"):
        strategy = "tensor_group"
    args = QuantizationArgs(strategy=strategy, group_size=group, symmetric=not zero, **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)

    def encode(w):
        rows, cols = w.shape
        groups = cols // (group or cols)
        most = {"float": 6 if args.num_bits == 4 else 448, "int": 2 ** (args.num_bits - 1)}[args.type]
        scale = (w.unflatten(1, (groups, -1)).abs().amax(-1) / most * jitter(rows, groups)).to(dtype)
        state = {"weight": w, "weight_scale": scale}
        if form.startswith("mx"):
            state["weight_scale"] = torch.exp2(scale.float().log2().ceil()).to(dtype)
        if form.startswith("nvfp4"):
            state["weight_global_scale"] = 448 / scale.float().max().reshape(1)
            state["weight_scale"] = (scale.float() * state["weight_global_scale"]).to(E4M3).float()
        if zero:
            state["weight_zero_point"] = torch.randint(-5, 6, (rows, groups), generator=random).to(torch.int8)
        tensors = compressor.compress(state, scheme)
        state = dict(tensors)
        if not form.startswith(("mx", "nv")):
            state["weight_scale"] = state["weight_scale"].float()
        if form.startswith("nv"):  # its decompress would round to bf16
            codes = unpack_fp4_from_uint8(tensors["weight_packed"], rows, cols, dtype=torch.float32)
            scale = tensors["weight_scale"].float()
            return tensors, dequantize(codes, scale, args=args, global_scale=tensors["weight_global_scale"])
        if order:  # older files: columns choose their groups
            tensors["weight_g_idx"] = (torch.randperm(cols, generator=random) // group).int()
            place = tensors["weight_g_idx"].argsort(stable=True)
            codes = unpack_from_int32(tensors["weight_packed"], args.num_bits, w.shape)
            state["weight_packed"] = pack_to_int32(codes[:, place].contiguous(), args.num_bits)
            decoded = compressor.decompress(state, scheme)["weight"].float()
            return tensors, torch.empty_like(decoded).index_copy_(1, place, decoded)
        return tensors, compressor.decompress(state, scheme)["weight"].float()
    return encode


def nvfp4_of_modelopt(w):
    """The same bytes under other names; the reciprocal of the tensor's scale."""
    tensors, decoded = compressed("nvfp4-pack-quantized", 16, num_bits=4, type="float")(w)
    tensors["weight"] = tensors.pop("weight_packed")
    whole = tensors.pop("weight_global_scale")
    tensors["weight_scale_2"] = (1 / whole).reshape(())
    ratio = tensors["weight_scale_2"] * whole
    return tensors | {"input_scale": torch.tensor(0.02)}, decoded * ratio  # 1 / whole is rounded


def pack(codes, bits, dim):
    """Neighbours along `dim` in 32-bit words, from the lowest bits on."""
    codes = codes.long().unflatten(dim, (-1, 32 // bits))
    shifts = torch.arange(0, 32, bits).reshape([-1] + [1] * (codes.ndim - dim - 2))
    return (codes << shifts).sum(dim + 1).to(torch.uint32).view(torch.int32)


def codes_of(w, bits, groups, of_column):
    """Codes, zeros and scales such that (q - z) s is about w; scales and zeros are (groups, rows)."""
    scale = (w.abs().max() / 2 ** (bits - 1) * jitter(groups, len(w))).half()
    middle = 2 ** (bits - 1)
    zero = torch.randint(middle - 3, middle + 4, (groups, len(w)), generator=random)
    q = (w.T / scale.float()[of_column] + zero[of_column]).round().clamp(0, 2 ** bits - 1).long()
    return q, zero, scale


def gptq(bits, group, order=False, v2=False, bias=False):
    source = load_file_of("auto_gptq", f"nn_modules/qlinear/qlinear_cuda{'' if order else '_old'}.py")

    def encode(w):
        rows, cols = w.shape
        size = cols if group < 0 else group
        g_idx = torch.arange(cols, dtype=torch.int32) // size
        if order:
            g_idx = g_idx[torch.randperm(cols, generator=random)]
        q, zero, scale = codes_of(w, bits, -(-cols // size), g_idx.long())
        if not order and not v2:
            zero[0, 0] = 0  # its first convention stores 15 for it
        v1 = pack((zero - 1) % 2 ** bits, bits, 1)
        tensors = {"qweight": pack(q, bits, 0), "qzeros": pack(zero, bits, 1) if v2 else v1, "scales": scale,
                   "g_idx": g_idx}
        module = source.QuantLinear(bits, group, cols // 32 * 32, rows, False)
        module.infeatures, module.group_size, module.outfeatures = cols, size, rows
        module.qweight, module.qzeros, module.scales, module.g_idx = tensors["qweight"], v1, scale.float(), g_idx
        if bias:
            tensors["bias"] = torch.zeros(rows, dtype=torch.float16)
        return tensors, module(torch.eye(cols)).T.contiguous()
    return encode


def awq(group):
    source = load_file_of("awq", "utils/packing_utils.py")

    def encode(w):
        q, zero, scale = codes_of(w, 4, w.shape[1] // group, torch.arange(w.shape[1]) // group)
        place = torch.arange(len(w)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
        tensors = {"qweight": pack(q[:, place], 4, 1), "qzeros": pack(zero[:, place], 4, 1), "scales": scale}
        decoded = source.dequantize_gemm(tensors["qweight"], tensors["qzeros"], scale.float(), 4, group)
        return tensors, decoded.T.contiguous()
    return encode


# ---- models

def llama(ffn=96):
    return family("llama", 1, 64, 2, ffn, 32, head_dim=32, num_key_value_heads=1, tie_word_embeddings=False)


def experts():
    return family("qwen3_moe", 1, 64, 2, 96, 32, head_dim=32, num_key_value_heads=1, num_experts=4,
                  num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1,
                  mlp_only_layers=[],
                  sliding_window=None, use_sliding_window=False, tie_word_embeddings=False)


def deepseek_v3():
    return deepseek("deepseek_v3", 1, 2, 16, 16, {"mscale": 1.0, "mscale_all_dim": 1.0}, q_lora_rank=40,
                    n_shared_experts=1, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
                    scoring_func="sigmoid",
                    topk_method="noaux_tc", first_k_dense_replace=0)


def of_groups(form, **weights):
    """quantization_config of compressed-tensors."""
    weights = {"dynamic": False, "symmetric": True, "type": "int", "strategy": "group", "observer": "minmax"} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "quantization_status": "compressed", "kv_cache_scheme": None, "config_groups": {"group_0": group}}


def of_fp8(**more):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": None, **more}


def of_gptq(**more):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": None}
NVFP4 = of_groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
MXFP4 = of_groups("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32, scale_dtype="torch.uint8")
INT4 = of_groups("pack-quantized", num_bits=4, group_size=32)

ENCODINGS = {  # config.json, its quantization_config, the encoder, modules that stay plain
    "fp8_block": (llama(ffn=160), of_fp8(weight_block_size=[128, 128]), fp8((128, 128), "weight_scale_inv"), []),
    "fp8_row": (llama(), of_groups("float-quantized", num_bits=8, type="float", strategy="channel"),
                fp8((1, None), dtype=torch.bfloat16), ["o_proj"]),
    "fp8_tensor": (llama(), of_fp8(activation_scheme="static", ignored_layers=["lm_head"]),
                   fp8(shape=(), more=["input_scale"]), []),
    "fp8_e8m0": (llama(), of_fp8(weight_block_size=[32, 64], scale_fmt="ue8m0"),
                 fp8((32, 64), "scale", torch.float8_e8m0fnu), []),
    "fp8_modelopt": (llama(), {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "weight_block_size": [32, 32]},
                     lambda w: fp8((32, 32), shape=(len(w) // 32, 1, w.shape[1] // 32, 1))(w), []),
    "mxfp8": (llama(), of_groups("mxfp8-quantized", num_bits=8, type="float", group_size=32, scale_dtype="torch.uint8"),
              compressed("mxfp8-quantized", 32, num_bits=8, type="float"), []),
    "int8": (llama(), of_groups("int-quantized", num_bits=8, strategy="channel"),
             compressed("int-quantized", num_bits=8, type="int"), []),
    "int8_zero": (llama(), of_groups("int-quantized", num_bits=8, strategy="channel", symmetric=False),
                  compressed("int-quantized", num_bits=8, type="int", zero=True, dtype=torch.float32), ["v_proj"]),
    "packed4_zero": (llama(), of_groups("pack-quantized", num_bits=4, group_size=32, symmetric=False, actorder="group"),
                     compressed("pack-quantized", 32, num_bits=4, type="int", zero=True, order=True,
                                dtype=torch.float16), []),
    "packed8": (llama(), of_groups("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
                compressed("pack-quantized", num_bits=8, type="int", zero=True), []),
    "gptq4": (llama(), of_gptq(), gptq(4, 32, bias=True), []),
    "gptq4_order": (llama(ffn=112), of_gptq(desc_act=True), gptq(4, 32, order=True), ["k_proj"]),
    "gptq8_v2": (llama(), of_gptq(bits=8, group_size=-1, checkpoint_format="gptq_v2"), gptq(8, -1, v2=True), []),
    "awq4": (llama(), AWQ, awq(32), ["q_proj"]),
    "nvfp4_modelopt": (llama(), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_of_modelopt, []),
    "mxfp4": (llama(), MXFP4, compressed("mxfp4-pack-quantized", 32, num_bits=4, type="float"), []),
    "experts_fp8": (experts(), of_fp8(), fp8(shape=(1,)), []),
    "experts_gptq4": (experts(), of_gptq(desc_act=True, group_size=16), gptq(4, 16, order=True), ["o_proj"]),
    "experts_awq4": (experts(), AWQ, awq(32), []),
    "experts_nvfp4": (experts(), NVFP4, compressed("nvfp4-pack-quantized", 16, num_bits=4, type="float"), ["q_proj"]),
    "experts_mxfp4": (experts(), MXFP4, compressed("mxfp4-pack-quantized", 32, num_bits=4, type="float"), []),
    "experts_packed4": (experts(), INT4, compressed("pack-quantized", 32, num_bits=4, type="int"), ["v_proj"]),
    "deepseek_fp8": (deepseek_v3(), of_fp8(weight_block_size=[16, 128]), fp8((16, 128), "weight_scale_inv"), []),
    # groups of 64: scales of whole chunks have codecs of their own on the card
    "gptq4_64": (llama(ffn=128), of_gptq(group_size=64), gptq(4, 64), []),
    "awq4_64": (llama(ffn=128), AWQ | {"group_size": 64}, awq(64), []),
    # heads are parts of lines
    "deepseek_awq4": (deepseek_v3(), AWQ | {"group_size": 16}, awq(16), ["q_b_proj"]),
    "deepseek_gptq4": (deepseek_v3(), of_gptq(group_size=-1), gptq(4, -1), ["down_proj"]),
}


@torch.no_grad()
def make(name):
    config, quantization, encode, plain = ENCODINGS[name]
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seed = list(ENCODINGS).index(name)
    random.manual_seed(seed)
    with tempfile.TemporaryDirectory() as twin:
        twin = Path(twin)
        write_json(twin / "config.json", config)
        read = AutoConfig.from_pretrained(twin)
        how = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_config(read, dtype=torch.float32, **how)
        randomize(model, torch.Generator().manual_seed(100 + seed))
        tensors, decoded = {}, {}
        for key, t in stored_tensors(model, torch.bfloat16).items():
            module = key.removesuffix(".weight")
            decoded[key] = t.float()
            if t.ndim == 2 and key.startswith("model.layers") and module.split(".")[-1] not in ["gate", *plain]:
                parts, decoded[key] = encode(t.float())
                tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
            else:
                tensors[key] = t
        save_file(decoded, twin / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, **how)
        ids = choose_ids(model, 8, torch.Generator().manual_seed(200 + seed))
        model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float64, **how)
        logits = model(ids[None], use_cache=False).logits[0]
    write_json(folder / "config.json", config | {"quantization_config": quantization})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file({"ids": ids.int(), "logits": logits.float()}, folder / "golden.safetensors")
    for file in folder.iterdir():
        file.chmod(0o644)
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir()):,} bytes, logits {logits.std():.2f}")


if __name__ == "__main__":
    for fixture in sys.argv[1:] or ENCODINGS:
        make(fixture)
