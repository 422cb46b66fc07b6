"""Native multi-token prediction: the layer that a model's own checkpoint brings (DeepSeek-V3,
2412.19437; Qwen3-Next, 3.5 and 3.6; GLM-4.5; MiMo).

    x = proj([norm(embedding of t + 1), norm(h_t)]);  h'_t = norm(layer(x));  logits = head(h'_t)

h_t is the target's last state, after its final norm; after a drafted token it is h' of the token
before: the one layer drafts again and again. Embeddings and head are the target's. The layer is of
the class of the target's own last one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache
from draftproof.drafters import published, weight_files
from draftproof.drafters.base import Vocabulary
from draftproof.drafters.features import DEEPEST, Network, PairDrafter
from draftproof.errors import DrafterMismatch, ModelNotFound
from draftproof.forward.draft_layers import (
    DraftLayers,
    Mask,
    checkpoint_folder,
    layer_count,
    layers_like,
    refuse_unknown,
)
from draftproof.model.target import Target


class MTPLayout(NamedTuple):
    """How a family names the tensors, and what it pairs.

    prefix: a pattern of what all names begin with, {L} the number of the model's layers, {N} that
    of the layer for prediction. names: our names by those after the prefix. layer: what our names
    begin with that are not among these. hidden_first: the state comes first in what is projected.
    first_zero: the embedding after the first token is zero.
    """

    prefix: str
    names: Mapping[str, str]
    layer: str = "layers.0."
    hidden_first: bool = False
    first_zero: bool = False


TABLES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
SHARED = {"embed_tokens.weight": TABLES, "head.weight": ("lm_head.weight", *TABLES)}
"""Copies of the model's own, which are read in their place, and what those are called."""
QWEN = {
    "fc.weight": "proj.weight", "pre_fc_norm_embedding.weight": "embed_norm.weight",
    "pre_fc_norm_hidden.weight": "hidden_norm.weight", "norm.weight": "norm.weight",
}  # fmt: skip
DEEPSEEK = {
    "eh_proj.weight": "proj.weight", "enorm.weight": "embed_norm.weight",
    "hnorm.weight": "hidden_norm.weight", "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "head.weight", "embed_tokens.weight": "embed_tokens.weight",
}  # fmt: skip
MIMO = {
    "input_proj.weight": "proj.weight", "token_layernorm.weight": "embed_norm.weight",
    "hidden_layernorm.weight": "hidden_norm.weight", "final_layernorm.weight": "norm.weight",
}  # fmt: skip
LAYOUTS = (
    MTPLayout(r"(?:model\.)?(?:language_model\.)?mtp\.", QWEN, layer=""),
    MTPLayout(r"model\.mtp_layers\.{N}\.", MIMO, hidden_first=True, first_zero=True),
    MTPLayout(r"model\.(?:language_model\.)?layers\.{L}\.", DEEPSEEK),
)
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
"""Settings that say how many layers there are."""


class MTP(Network):
    """The weights, under names of our own."""

    hidden_layers = (-1,)

    def __init__(self, layers: DraftLayers, vocabulary: Vocabulary, layout: MTPLayout) -> None:
        super().__init__(layers, vocabulary)
        self.layout = layout
        self.embed_norm, self.hidden_norm, self.norm = (layers.norm(self.width) for _ in range(3))
        self.proj = nn.Linear(2 * self.width, self.width, bias=False)

    def fuse(self, hidden: Tensor) -> Tensor:
        return hidden[..., 0, :]

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Mask, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        embedded = self.vocabulary.embed(tokens)
        if self.layout.first_zero:
            embedded = embedded * (positions > 0)[..., None]
        both = [self.embed_norm(embedded), self.hidden_norm(features)]
        inputs = self.proj(torch.cat(both[::-1] if self.layout.hidden_first else both, -1))
        angles = self.parts.angles(inputs, positions)
        out = self.norm(self.parts.run(0, inputs, angles, mask, cache))
        return out, out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.unembed(hidden)


def load(target: Target) -> PairDrafter:
    """The drafter in a target's own checkpoint; raises ModelNotFound if there is none,
    DrafterMismatch for one that is not fully known here."""
    folder, depth = checkpoint_folder(target.model), layer_count(target.model)
    files, name = weight_files.all_files(folder), f"the multi-token prediction of {target.name}"
    layouts = ((layout, _named(layout, files, depth)) for layout in LAYOUTS)
    layout, names = next((candidate for candidate in layouts if candidate[1]), (LAYOUTS[0], {}))
    if not names:
        raise ModelNotFound(
            f"{target.name} has no layers for multi-token prediction that are known here; name "
            "another drafter"
        )
    beyond = "{" in layout.prefix and any(
        _named(layout, files, depth, number) for number in range(1, 8)
    )
    _check(weight_files.read_settings(folder), beyond, name)
    names = _without_copies(names, files, name)
    with torch.device("meta"):
        network = MTP(layers_like(target.model, 1), target, layout)
    tensors = weight_files.read_tensors(names, files)
    published.fill(network, _experts(tensors, network), target, name)
    return PairDrafter(network, "mtp", DEEPEST)


def _named(
    layout: MTPLayout, files: Mapping[str, Path], depth: int, number: int = 0
) -> dict[str, str]:
    """By our name of a tensor, its name in the files; none if they have another layout. number: of
    the layer, where prefixes say one."""
    pattern = layout.prefix.replace("{L}", str(depth + number)).replace("{N}", str(number))
    prefix, names = re.compile(pattern), dict[str, str]()
    for name in files:
        if match := prefix.match(name):
            rest = name[match.end() :]
            names[layout.names.get(rest, layout.layer + rest)] = name
    return names


def _without_copies(
    names: Mapping[str, str], files: Mapping[str, Path], name: str
) -> dict[str, str]:
    """Names but of tables that are copies of the model's own; refuses others."""
    for key in names.keys() & SHARED.keys():
        table = next((name for name in SHARED[key] if name in files), None)
        tensors = weight_files.read_tensors({"": table, key: names[key]}, files) if table else {}
        if not table or not torch.equal(tensors[""], tensors[key]):
            raise DrafterMismatch(
                f"{name} has {key} of its own, which differs from the model's; it is not loaded"
            )
    return {ours: theirs for ours, theirs in names.items() if ours not in SHARED}


def _check(settings: dict[str, Any], several: bool, name: str) -> None:
    """Refuse several layers, and settings that are not known."""
    settings = {**settings, **(settings.get("text_config") or {})}
    count = next((settings[key] for key in COUNTS if settings.get(key) is not None), 1)
    if several or count != 1:
        raise DrafterMismatch(
            f"{name} has {count if count != 1 else 'several'} layers, of which each drafts one "
            "token further; one layer is run here, name another drafter"
        )
    counts = {key: value for key, value in settings.items() if "mtp" in key and value}
    refuse_unknown(counts, COUNTS, name)


def _experts(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Experts that a checkpoint has one by one as the layer has them, in one tensor."""
    for key in network.state_dict():
        at = key.removesuffix("gate_up_proj")
        if at != key and f"{at}0.gate_proj.weight" in tensors:
            count = sum(name.startswith(at) and name.endswith("up_proj.weight") for name in tensors)
            names = [f"{at}{number}.{kind}_proj.weight" for number in range(count)
                     for kind in ("gate", "up", "down")]
            missing = [name for name in names if name not in tensors]
            if missing:
                raise DrafterMismatch(f"the experts lack {missing[0]}; fetch the model again")
            gate, up, down = (
                torch.stack([tensors.pop(f"{at}{n}.{kind}_proj.weight") for n in range(count)])
                for kind in ("gate", "up", "down")
            )
            tensors |= {key: torch.cat([gate, up], 1), f"{at}down_proj": down}
    return tensors
