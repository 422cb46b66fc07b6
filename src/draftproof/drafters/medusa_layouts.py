"""How Medusa heads lie in published checkpoints, and in ours. Knows names of tensors and of settings; opens no files.

Read are our own layout and those of FasterDecoding/Medusa (the heads alone, with or without projections, or inside the
merged model), Text Generation Inference, vLLM, TensorRT-LLM and NVIDIA ModelOpt. How many heads and layers there are is
told by the tensors: the settings of published heads are known to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.drafters.base import Vocabulary, must_fit
from draftproof.drafters.medusa import MedusaConfig, MedusaHead
from draftproof.errors import BadInput, DrafterMismatch

Config = dict[str, Any]
Tensors = Mapping[str, Tensor]


class _Layout(NamedTuple):
    """Patterns of names. block: head, layer, "weight" or "bias". projection: head. alone: a file of it has nothing else."""

    block: re.Pattern[str]
    projection: re.Pattern[str]
    alone: bool = False


def _layout(block: str, projection: str, alone: bool = False) -> _Layout:
    return _Layout(re.compile(block), re.compile(projection), alone)


_LAYOUTS = {
    "draftproof": _layout(r"heads\.(\d+)\.blocks\.(\d+)\.(weight|bias)", r"heads\.(\d+)\.proj\.weight"),
    "vllm": _layout(
        r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight"
    ),
    "tensorrt-llm": _layout(
        r"(?:.+\.)?medusa_heads\.(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)",
        r"(?:.+\.)?medusa_heads\.(\d+)\.lm_head\.weight",
    ),
    "merged": _layout(
        r"(?:.+\.)?medusa_head\.(\d+)\.(\d+)\.linear\.(weight|bias)", r"(?:.+\.)?medusa_head\.(\d+)\.\d+\.weight"
    ),
    "legacy": _layout(r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"(\d+)\.\d+\.weight", alone=True),
}


def recognises(config: Config, names: Collection[str]) -> bool:
    """Whether these are Medusa heads in a layout known here."""
    return _find(config, names) is not None


def from_tensors(config: Config, tensors: Tensors, vocabulary: Vocabulary) -> MedusaHead:
    """The heads, in the dtype of the file; only the tensors of the heads are read.

    Raises DrafterMismatch, in one sentence, for heads of another target, and for tensors that are no heads.
    """
    found = _find(config, tensors)
    assert found is not None, "recognises() comes before"
    parts = _Parts.of(_LAYOUTS[found], tensors)
    state = {f"heads.{head}.blocks.{layer}.{kind}": tensors[name] for (head, layer, kind), name in parts.blocks.items()}
    projections = _projections(config, tensors, parts)
    state |= {f"heads.{head}.proj.weight": weight for head, weight in projections.items()}
    token_map = _token_map(config, tensors, projections, vocabulary)
    told = int(config.get("vocab_size") or vocabulary.vocab_size)
    rows = len(projections[0]) if projections else told
    form = MedusaConfig(
        num_heads=parts.heads,
        num_layers=parts.layers,
        hidden_size=int(state["heads.0.blocks.0.weight"].shape[1]),
        vocab_size=rows if token_map is None else told,
        share_lm_head=not projections,
        bias=any(kind == "bias" for _, _, kind in parts.blocks),
        base_model=str(config.get("base_model") or config.get("base_model_name_or_path") or ""),
        draft_vocab_size=rows if token_map is not None else None,
        tree=_tree(config),
        pairs=len(tensors["pairs.tokens"]) if "pairs.tokens" in tensors else 0,
    )
    must_fit("the set of Medusa heads", form, vocabulary)
    if token_map is not None:
        state["token_map"] = token_map
    state |= {name: tensors[name] for name in tensors if name.startswith("pairs.")}
    return _filled(form, state)


def _filled(form: MedusaConfig, state: Tensors) -> MedusaHead:
    """Heads of this form that hold these very tensors."""
    with torch.device("meta"):
        head = MedusaHead(form)
    for name, empty in head.state_dict().items():
        if name not in state:
            raise DrafterMismatch(f"the Medusa heads lack {name}; the checkpoint is incomplete, fetch it again")
        if state[name].shape != empty.shape:
            given, wanted = tuple(state[name].shape), tuple(empty.shape)
            raise DrafterMismatch(f"{name} of the Medusa heads has shape {given}, {wanted} was expected; fetch the heads again")
    head.load_state_dict(dict(state), assign=True)
    return head


class _Parts(NamedTuple):
    """Which tensor is which part of which head."""

    heads: int
    layers: int
    blocks: dict[tuple[int, int, str], str]
    projections: dict[int, str]

    @classmethod
    def of(cls, layout: _Layout, names: Collection[str]) -> _Parts:
        blocks: dict[tuple[int, int, str], str] = {}
        projections: dict[int, str] = {}
        for name in names:
            if block := layout.block.fullmatch(name):
                blocks[int(block[1]), int(block[2]), block[3]] = name
            elif projection := layout.projection.fullmatch(name):
                projections[int(projection[1])] = name
        heads, layers = max(head for head, _, _ in blocks) + 1, max(layer for _, layer, _ in blocks) + 1
        return cls(heads, layers, blocks, projections)


def _find(config: Config, names: Collection[str]) -> str | None:
    """The layout these names are in."""
    if config.get("speculator_type", "medusa") != "medusa":
        return None
    for found, layout in _LAYOUTS.items():
        blocks = sum(layout.block.fullmatch(name) is not None for name in names)
        rest = sum(layout.projection.fullmatch(name) is not None for name in names)
        if blocks and (not layout.alone or blocks + rest == len(names)):
            return found
    return None


def _projections(config: Config, tensors: Tensors, parts: _Parts) -> dict[int, Tensor]:
    """Each head's own table between hidden states and logits; empty if the target's serves."""
    scale = float(config.get("logit_scale") or 1.0)
    if not parts.projections or (config.get("original_lm_head") and scale == 1.0 and "token_map" not in tensors):
        return {}
    tables = {head: tensors[name] for head, name in parts.projections.items()}
    if config.get("original_lm_head"):
        tables = {head: tables[0].clone() for head in range(parts.heads)}
    if len({len(table) for table in tables.values()}) > 1:
        raise DrafterMismatch("the Medusa heads have projections of different sizes; fetch the checkpoint again")
    return {head: table * scale if scale != 1.0 else table for head, table in tables.items()}


def _token_map(
    config: Config, tensors: Tensors, projections: dict[int, Tensor], vocabulary: Vocabulary
) -> Tensor | None:
    """The id of each row of projections that know only some tokens. Where rows of all tokens are given all are used."""
    if "token_map" not in tensors or not projections:
        return None
    ids, rows = tensors["token_map"].to(torch.int64), len(projections[0])
    if len(ids) < rows:
        return None
    if len(ids) > rows or int(ids.max()) >= vocabulary.vocab_size or int(ids.min()) < 0:
        raise DrafterMismatch(
            f"the Medusa heads map {rows} rows to {len(ids)} tokens up to {int(ids.max())}, {vocabulary.name} has "
            f"{vocabulary.vocab_size}; use heads trained for this target"
        )
    return ids


def _tree(config: Config) -> tuple[tuple[int, ...], ...] | None:
    """The tree the heads were calibrated for, if the settings name one."""
    paths = config.get("tree") or config.get("medusa_choices")
    return tuple(tuple(int(rank) for rank in path) for path in paths) if paths else None


# The other way -------------------------------------------------------------------------------------------------------------


def _native(head: MedusaHead) -> tuple[Config, dict[str, Tensor]]:
    return {"speculator_type": "medusa", **asdict(head.config)}, dict(head.state_dict())


def _legacy(head: MedusaHead) -> tuple[Config, dict[str, Tensor]]:
    """FasterDecoding/Medusa v0.1: a pickle with a projection for every head."""
    _needs_projections(head, "legacy")
    return _numbers(head), _numbered(head)


def _tgi(head: MedusaHead) -> tuple[Config, dict[str, Tensor]]:
    """Text Generation Inference: its first form has projections, its second shares the target's and has one layer."""
    if head.config.share_lm_head and head.config.num_layers == 1:
        return {**_numbers(head), "version": "2"}, _numbered(head)
    _needs_projections(head, "tgi")
    return _numbers(head), _numbered(head)


def _vllm(head: MedusaHead) -> tuple[Config, dict[str, Tensor]]:
    """vLLM, which drops biases unless told of them."""
    _needs_projections(head, "vllm", cut=True)
    form = head.config
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": form.hidden_size,
        "vocab_size": form.vocab_size,
        "truncated_vocab_size": form.draft_vocab_size,
        "num_heads": form.num_heads,
        "num_hidden_layers": form.num_layers,
        "medusa_fc_bias": form.bias,
        "original_lm_head": False,
        "max_paths": 64,
        "topk": 10,
        "base_model_name_or_path": form.base_model,
    }
    tensors = {f"blocks.{one}.layers.{layer}.{kind}": tensor for (one, layer, kind), tensor in _blocks(head).items()}
    tensors |= {f"lm_heads.{one}.weight": tensor for one, tensor in _tables(head).items()}
    return config, tensors | ({"token_map": head.token_map} if head.token_map is not None else {})


EXPORTS: dict[str, Callable[[MedusaHead], tuple[Config, dict[str, Tensor]]]] = {
    "draftproof": _native,
    "vllm": _vllm,
    "tgi": _tgi,
    "legacy": _legacy,
}
"""What a checkpoint holds, settings and tensors, by the layout it is for."""


def _numbers(head: MedusaHead) -> Config:
    return {
        "base_model_name_or_path": head.config.base_model,
        "medusa_num_heads": head.config.num_heads,
        "medusa_num_layers": head.config.num_layers,
    }


def _numbered(head: MedusaHead) -> dict[str, Tensor]:
    """Layers and then the projection, by number; these layouts want a bias, so there is one."""
    layers, size = head.config.num_layers, head.config.hidden_size
    tensors = {f"{one}.{layer}.linear.{kind}": tensor for (one, layer, kind), tensor in _blocks(head).items()}
    for name in [name for name in tensors if name.endswith("weight")]:
        tensors.setdefault(name.replace("weight", "bias"), tensors[name].new_zeros(size))
    return tensors | {f"{one}.{layers}.weight": tensor for one, tensor in _tables(head).items()}


def _blocks(head: MedusaHead) -> dict[tuple[int, int, str], Tensor]:
    pattern = _LAYOUTS["draftproof"].block
    found = {pattern.fullmatch(name): tensor for name, tensor in head.state_dict().items()}
    return {(int(name[1]), int(name[2]), name[3]): tensor for name, tensor in found.items() if name}


def _tables(head: MedusaHead) -> dict[int, Tensor]:
    pattern = _LAYOUTS["draftproof"].projection
    found = {pattern.fullmatch(name): tensor for name, tensor in head.state_dict().items()}
    return {int(name[1]): tensor for name, tensor in found.items() if name}


def _needs_projections(head: MedusaHead, layout: str, cut: bool = False) -> None:
    if head.config.share_lm_head:
        raise BadInput(
            f"the layout {layout} holds a projection for every head of {head.config.num_layers} layers, and these share the "
            "target's; copy it to them with unshared(target), or write the layout draftproof"
        )
    if head.config.draft_vocab_size is not None and not cut:
        raise BadInput(f"the layout {layout} has no place for a smaller vocabulary; write the layout draftproof or vllm")
