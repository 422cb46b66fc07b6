"""Tiny checkpoints in the published layouts of quantised weights, written as their tools write
them, with the weights that the codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import build, fresh
from torch import Tensor

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]
"""From a weight to the tensors of its module, and the weight that they stand for."""


def random_codes(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, ...]:
    """Codes [O, I] from zero up, zero points and scales in half precision [O, G]."""
    parts = weight.float().view(len(weight), -1, group)
    most = (1 << bits) - 1
    if symmetric:
        zeros = torch.full(parts.shape[:2], float(1 << (bits - 1)))
        scales = parts.abs().amax(-1) / (most / 2)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(1, most)
    scales = scales.half().float()
    codes = (parts / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, most)
    return codes.view_as(weight).long(), zeros.long(), scales


def exact(codes: Tensor, zeros: Tensor, scales: Tensor, order: Tensor) -> Tensor:
    return (codes - zeros[:, order]).double() * scales.double()[:, order]


def words_of(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows * bits / 32, columns] of codes [rows, columns], one long number per column."""
    rows, columns = codes.shape
    words = [[0] * columns for _ in range(rows * bits // 32)]
    for column in range(columns):
        number = 0
        for row in range(rows):
            number |= int(codes[row, column]) << (row * bits)
        for place in range(len(words)):
            word = number >> (32 * place) & 0xFFFFFFFF
            words[place][column] = word - (1 << 32) if word >> 31 else word
    return torch.tensor(words, dtype=torch.int32)


def gptq(bits: int = 4, symmetric: bool = True, version: int = 1, act_order: bool = False,
         group: int = 32) -> Writer:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, zeros, scales = random_codes(weight, bits, group, symmetric)
        order = torch.arange(weight.shape[1]) // group
        if act_order:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(3))]
        tensors = {
            "qweight": words_of(codes.T, bits), "g_idx": order.int(), "scales": scales.T.half(),
            "qzeros": words_of(zeros - int(version == 1), bits).T,     # along the outputs
        }
        return tensors, exact(codes, zeros, scales, order)
    return write


def awq(symmetric: bool = False) -> Writer:
    def packed(codes: Tensor) -> Tensor:
        out = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
        for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            out |= codes[:, output::8] << 4 * place
        return torch.where(out >> 31 > 0, out - (1 << 32), out).int()

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, zeros, scales = random_codes(weight, 4, 32, symmetric)
        order = torch.arange(weight.shape[1]) // 32
        tensors = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.half()}
        return tensors, exact(codes, zeros, scales, order)
    return write


def packed_quantized(bits: int = 4, group: int = 32, symmetric: bool = True,
                     dtype: torch.dtype = torch.bfloat16, act_order: bool = False) -> Writer:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        size = group or weight.shape[1]
        codes, zeros, scales = random_codes(weight, bits, size, symmetric)
        scales = scales.to(dtype).float()
        order = torch.arange(weight.shape[1]) // size
        tensors = {
            "weight_packed": words_of(codes.T, bits).T, "weight_scale": scales.to(dtype),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_of(zeros, bits)
        if act_order:
            order = order.flip(0)
            tensors["weight_g_idx"] = order.int()
        return tensors, exact(codes, zeros, scales, order)
    return write


def int_quantized(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight.float() / scale.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes.double() * scale.double()


def float8(tile: tuple[int, int] | None, name: str = "weight_scale_inv") -> Writer:
    """With a scale per tile; (1, 0): per output; None: one for all."""
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        values = weight.float()
        (outputs, inputs), (high, wide) = weight.shape, tile or weight.shape
        high, wide = min(high, outputs), wide or inputs
        rows, columns = -(-outputs // high), -(-inputs // wide)
        scales = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                part = values[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
                scales[row, column] = part.abs().max() / 448
        each = scales.repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
        codes = (values / each).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if tile is None else scales
        return {"weight": codes, name: stored}, codes.double() * each.double()
    return write


SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def floats_of_4(global_scale: str = "") -> Writer:
    """MXFP4, or NVFP4 with a global scale of this name."""
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        size = 16 if global_scale else 32
        parts = weight.double().view(len(weight), -1, size)
        largest = parts.abs().amax(-1)
        tensors = dict[str, Tensor]()
        if global_scale:
            factor = largest.max() / (6 * 448)
            stored = (largest / 6 / factor).to(torch.float8_e4m3fn)
            each = stored.double() * factor.float().double()
            by = 1 / factor if global_scale == "weight_global_scale" else factor
            tensors[global_scale] = by.float().reshape(1)
        else:
            exponent = (largest / 6).log2().ceil()
            stored, each = (exponent + 127).to(torch.uint8), 2.0**exponent
        near = (parts.abs() / each[..., None]).unsqueeze(-1).sub(SIZES).abs().argmin(-1)
        codes = near + 8 * (parts < 0)
        values = SIZES[near] * torch.where(parts < 0, -1.0, 1.0) * each[..., None]
        flat = codes.view_as(weight)
        packed = (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)
        name = "weight" if global_scale == "weight_scale_2" else "weight_packed"
        return {name: packed, "weight_scale": stored, **tensors}, values.view_as(weight)
    return write


def group_config(format: str, bits: int, kind: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, **more}
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Writer, str]] = {
    "gptq": (GPTQ, gptq(), "Q4_0"),
    "gptq-asymmetric": (GPTQ, gptq(symmetric=False), "Q5_0"),
    "gptq-v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(version=2), "Q4_0"),
    "gptq-2": ({**GPTQ, "bits": 2}, gptq(2), "Q4_0"),
    "gptq-3": ({**GPTQ, "bits": 3}, gptq(3), "Q4_0"),
    "gptq-8": ({**GPTQ, "bits": 8}, gptq(8), "Q8_0"),
    "gptq-act-order": ({**GPTQ, "desc_act": True}, gptq(act_order=True), "BF16"),
    "gptq-groups-of-16": (GPTQ, gptq(group=16), "BF16"),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq(), "Q5_0"),
    "awq-symmetric": ({"quant_method": "awq", "bits": 4}, awq(symmetric=True), "Q4_0"),
    "w4a16": (group_config("pack-quantized", 4, "int"), packed_quantized(), "Q4_0"),
    "w4a16-asymmetric": (group_config("pack-quantized", 4, "int", symmetric=False),
                         packed_quantized(symmetric=False), "Q5_0"),
    "w4a16-act-order": (group_config("pack-quantized", 4, "int", actorder="group"),
                        packed_quantized(act_order=True), "BF16"),
    "w4a16-odd-scales": (group_config("pack-quantized", 4, "int"),
                         packed_quantized(dtype=torch.float32), "Q4_0"),
    "w8a16": (group_config("pack-quantized", 8, "int", strategy="channel"),
              packed_quantized(8, 0), "Q8_0"),
    "w8a8": (group_config("int-quantized", 8, "int"), int_quantized, "Q8_0"),
    "fp8-blocks": ({**FP8, "weight_block_size": [16, 32]}, float8((16, 32)), "BF16"),
    "fp8-tensor": (FP8, float8(None, "weight_scale"), "BF16"),
    "fp8-dynamic": (group_config("float-quantized", 8, "float"),
                    float8((1, 0), "weight_scale"), "BF16"),
    "mxfp4": (group_config("mxfp4-pack-quantized", 4, "float"), floats_of_4(), "MXFP4"),
    "nvfp4": (group_config("nvfp4-pack-quantized", 4, "float"),
              floats_of_4("weight_global_scale"), "BF16"),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"},
                       floats_of_4("weight_scale_2"), "BF16"),
}  # fmt: skip
"""Names, configurations, writers, and the format that our kernels take the matrices in."""


def save(folder: Path, name: str, family: str = "qwen2", **options: Any) -> Any:
    """A tiny checkpoint; returns transformers' model with the weights that it stands for."""
    stated, write, _ = CHECKPOINTS[name]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2} | options
    model = fresh(family, **sizes).to(torch.bfloat16)
    model.save_pretrained(folder)
    model = model.float()
    file = folder / "model.safetensors"
    tensors, values = load_file(file), dict(model.named_parameters())
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        stored, weight = write(tensors.pop(key))
        module = key.removesuffix(".weight")
        tensors |= {f"{module}.{kind}": part.contiguous() for kind, part in stored.items()}
        values[key].data = weight.float()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return model


def save_gpt_oss(folder: Path) -> Any:
    """A tiny gpt-oss whose experts are MXFP4 in blocks and scales; returns the model that it is."""
    model = build(
        "GptOssConfig", vocab_size=40, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=128, initializer_range=0.4,
        layer_types=["sliding_attention", "full_attention"], eos_token_id=None, pad_token_id=0,
    ).to(torch.bfloat16)  # fmt: skip
    write, values = floats_of_4(), dict(model.named_parameters())
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    kinds = ("experts.gate_up_proj", "experts.down_proj")
    for key in [key for key in tensors if key.endswith(kinds)]:
        experts = tensors.pop(key).transpose(1, 2)                  # [experts, outputs, inputs]
        parts = [write(expert) for expert in experts]
        blocks = torch.stack([stored["weight_packed"] for stored, _ in parts])
        tensors[f"{key}_blocks"] = blocks.unflatten(-1, (-1, 16))
        tensors[f"{key}_scales"] = torch.stack([stored["weight_scale"] for stored, _ in parts])
        exact_values = torch.stack([weight for _, weight in parts]).transpose(1, 2)
        values[key].data = exact_values.to(torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return model
