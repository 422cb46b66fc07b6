"""Native multi-token prediction: the layer that a model's own checkpoint brings (DeepSeek-V3,
2412.19437; Qwen3-Next, 3.5 and 3.6; GLM-4.5; MiMo).

    x = proj([norm(embedding of t + 1), norm(h_t)]);  h'_t = norm(layer(x));  logits = head(h'_t)

h_t is the target's last state, behind its final norm; behind a drafted token it is h' of the token
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

from draftproof.core.tree import TreeShape
from draftproof.drafters import weight_files
from draftproof.drafters.base import Vocabulary
from draftproof.drafters.features import FeatureDrafter, Network, fill
from draftproof.errors import DrafterMismatch, ModelNotFound
from draftproof.model.draft_layers import (
    DraftLayers,
    Mask,
    checkpoint_folder,
    layer_count,
    layers_like,
    refuse_unknown,
    switch,
)
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target


class MTPLayout(NamedTuple):
    """How a family names the tensors, and what it pairs.

    prefix: a pattern of what all names begin with, {L} the number of the model's layers; its group
    is the number of the layer. names: our names by those behind the prefix; what is not named is of
    the decoder layer. layer: what the names of that begin with. hidden_first: the state comes first
    in what is projected. first_zero: the embedding behind the first token is zero.
    """

    prefix: str
    names: Mapping[str, str]
    layer: str = ""
    hidden_first: bool = False
    first_zero: bool = False


QWEN = {
    "fc.weight": "proj.weight", "pre_fc_norm_embedding.weight": "embed_norm.weight",
    "pre_fc_norm_hidden.weight": "hidden_norm.weight", "norm.weight": "norm.weight",
}  # fmt: skip
DEEPSEEK = {
    "eh_proj.weight": "proj.weight", "enorm.weight": "embed_norm.weight",
    "hnorm.weight": "hidden_norm.weight", "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "head.weight",
}  # fmt: skip
MIMO = {
    "input_proj.weight": "proj.weight", "token_layernorm.weight": "embed_norm.weight",
    "hidden_layernorm.weight": "hidden_norm.weight", "final_layernorm.weight": "norm.weight",
}  # fmt: skip
LAYOUTS = (
    MTPLayout(r"(?:model\.)?(?:language_model\.)?mtp\.()", QWEN, r"layers\.(\d+)\."),
    MTPLayout(r"model\.mtp_layers\.(\d+)\.", MIMO, hidden_first=True, first_zero=True),
    MTPLayout(r"model\.(?:language_model\.)?layers\.({L})\.", DEEPSEEK),
)
TABLES = (
    "model.embed_tokens.weight", "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)  # fmt: skip
"""Names of a model's own embeddings."""
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
"""Settings that say how many layers there are."""
KNOWN = (*COUNTS, "mtp_use_dedicated_embeddings")


class MTP(Network):
    """The weights, under names of our own."""

    hidden_layers = (-1,)

    def __init__(self, layers: DraftLayers, vocabulary: Vocabulary, layout: MTPLayout) -> None:
        super().__init__(layers, vocabulary)
        self.layout, self.width = layout, vocabulary.hidden_size
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


def load(target: Target, shape: TreeShape | None = None) -> FeatureDrafter:
    """The drafter in a target's own checkpoint; raises ModelNotFound if there is none,
    DrafterMismatch for one that is not fully known here."""
    folder, depth = checkpoint_folder(target.model), layer_count(target.model)
    files = weight_files.all_files(folder)
    found = next((both for layout in LAYOUTS if (both := _named(layout, files, depth))[1]), None)
    name = f"the multi-token prediction of {target.name}"
    if found is None:
        raise ModelNotFound(
            f"{target.name} has no layers for multi-token prediction that are known here; name "
            "another drafter"
        )
    layout, names = found
    _check(folder, names, name)
    wanted = {ours: theirs for ours, (theirs, _) in names.items()}
    tensors = weight_files.read_tensors(wanted, files)
    _shared(tensors, files, name)
    with torch.device("meta"):
        network = MTP(layers_like(target.model, 1), target, layout)
    fill(network, _experts(tensors, network), target, name)
    return FeatureDrafter(network, "mtp", shape)


Names = dict[str, tuple[str, int]]
"""By our name of a tensor, its name in the file, and the number of its layer."""


def _named(layout: MTPLayout, files: Mapping[str, Any], depth: int) -> tuple[MTPLayout, Names]:
    """Which tensors of a checkpoint are which of ours; none if it has another layout."""
    beyond = "|".join(str(number) for number in range(depth, depth + 8))
    prefix, found = re.compile(layout.prefix.replace("{L}", beyond)), Names()
    for name in files:
        if not (match := prefix.match(name)):
            continue
        rest, number = name[match.end() :], match[1]
        if rest in layout.names:
            found[layout.names[rest]] = name, 0
        elif layout.layer and (inner := re.match(layout.layer, rest)):
            found[f"layers.{inner[1]}.{rest[inner.end():]}"] = name, int(inner[1])
        elif rest == "embed_tokens.weight" or layout.layer:
            found[rest] = name, 0
        else:
            first = int(number) - (depth if "{L}" in layout.prefix else 0)
            found[f"layers.{first}.{rest}"] = name, first
    return layout, found


def _check(folder: Path, names: Names, name: str) -> None:
    """Refuse several layers, and settings that say something else than the tensors do."""
    settings = weight_files.read_settings(folder)
    inner = settings.get("text_config") or settings
    several = 1 + max(number for _, number in names.values())
    said = next((int(inner[key]) for key in COUNTS if inner.get(key) is not None), several)
    if several != 1 or said != 1:
        raise DrafterMismatch(
            f"{name} has {max(several, said)} layers, of which each drafts one token further; one "
            "layer is run here, name another drafter"
        )
    own = {key: value for key, value in {**settings, **inner}.items() if "mtp" in key and value}
    refuse_unknown(own, KNOWN, name)
    if switch(inner, "mtp_use_dedicated_embeddings") and "embed_tokens.weight" not in names:
        raise DrafterMismatch(f"{name} lacks its own embeddings; fetch the model again")


def _shared(tensors: dict[str, Tensor], files: Mapping[str, Path], name: str) -> None:
    """Drop tables that are copies of the model's own; refuse others."""
    for key, own in (("embed_tokens.weight", TABLES), ("head.weight", ("lm_head.weight", *TABLES))):
        if (given := tensors.pop(key, None)) is None:
            continue
        table = next((one for one in own if one in files), "")
        same = table and torch.equal(weight_files.read_tensors({"": table}, files)[""], given)
        if not same:
            raise DrafterMismatch(
                f"{name} has {key} of its own, which differs from the model's; it is not loaded"
            )


def _experts(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Experts that a checkpoint has one by one as the layer has them, in one tensor."""
    fused = [key for key in network.state_dict() if key.endswith("experts.gate_up_proj")]
    for key in fused:
        prefix = key.removesuffix("gate_up_proj")
        parts = {
            kind: [
                tensors.pop(one) for one in sorted(
                    (one for one in tensors if re.fullmatch(
                        rf"{re.escape(prefix)}\d+\.{kind}_proj\.weight", one)),
                    key=lambda one: int(one.removeprefix(prefix).partition(".")[0]),
                )
            ]
            for kind in ("gate", "up", "down")
        }  # fmt: skip
        if not all(parts.values()):
            continue
        both = zip(parts["gate"], parts["up"], strict=True)
        tensors[key] = torch.stack([torch.cat(pair) for pair in both])
        tensors[f"{prefix}down_proj"] = torch.stack(parts["down"])
    return tensors
