"""Tensors of Medusa heads by the names of published layouts, and folders that hold them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import VOCAB
from torch import Tensor

from draftproof.drafters.medusa import MedusaConfig, MedusaHead

SIZE = 32
SAFE, TGI, LEGACY = "model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt"
Config = dict[str, Any]
Tensors = dict[str, Tensor]
Heads = list[tuple[list[Tensor], list[Tensor], Tensor]]
"""Of each head the matrices and biases of its layers, and its projection."""


def weights(heads: int = 3, layers: int = 1, vocab: int = VOCAB, size: int = SIZE) -> Heads:
    dice = torch.Generator().manual_seed(heads + 10 * layers)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64) / 4

    return [([some(size, size) for _ in range(layers)], [some(size) for _ in range(layers)],
             some(vocab, size))
            for _ in range(heads)]  # fmt: skip


def named(given: Heads, block: str, projection: str | None = None) -> Tensors:
    """These heads by names made of head H, layer L, kind K, and the number of layers N."""
    found: Tensors = {}
    for head, (matrices, biases, last) in enumerate(given):
        for layer, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            for kind, tensor in (("weight", matrix), ("bias", bias)):
                found[block.format(H=head, L=layer, K=kind)] = tensor.clone()
        if projection is not None:
            found[projection.format(H=head, N=len(matrices))] = last
    return found


numbered = partial(named, block="{H}.{L}.linear.{K}", projection="{H}.{N}.weight")
blocks_alone = partial(named, block="{H}.{L}.linear.{K}")
merged = partial(named, block="medusa_head.{H}.{L}.linear.{K}",
                 projection="medusa_head.{H}.{N}.weight")
vllm = partial(named, block="blocks.{H}.layers.{L}.{K}", projection="lm_heads.{H}.weight")
vllm_inside = partial(named, block="medusa_heads.blocks.{H}.layers.{L}.{K}",
                      projection="medusa_heads.lm_heads.{H}.weight")
ranked = partial(named, block="medusa_heads.{H}.medusa_layers.{L}.linear.{K}",
                 projection="medusa_heads.{H}.lm_head.weight")
BASE = {f"model.layers.{one}.self_attn.q_proj.weight": torch.ones(SIZE, SIZE) for one in range(3)}
TABLE = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
VLLM = {"model_type": "medusa", "hidden_size": SIZE, "vocab_size": VOCAB, "num_heads": 3,
        "num_hidden_layers": 1}


def without(tensors: Tensors, part: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def no_bias(given: Heads) -> Heads:
    return [(one, [torch.zeros_like(bias) for bias in two], last) for one, two, last in given]


def folder_of(
    path: Path, config: Config, tensors: Tensors, file: str = "model.safetensors"
) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    else:
        torch.save(tensors, path / file)
    return path


def made(
    layers: int = 1, share: bool = False, bias: bool = True, rows: int | None = None,
    pairs: bool = False,
) -> MedusaHead:  # fmt: skip
    form = MedusaConfig(3, layers, SIZE, VOCAB, share, bias, "org/base", rows)
    head = MedusaHead(form).double()
    torch.manual_seed(layers)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    if rows is not None:
        head.token_map = torch.randperm(VOCAB)[:rows]
    if pairs:
        head.count(torch.tensor([1, 1, 3, 3, 3]), torch.tensor([2, 2, 0, 0, 0]))
    return head
