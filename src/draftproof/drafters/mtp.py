"""Native multi-token prediction: layers that draft from the target's last state (DeepSeek-V3,
2412.19437; Qwen3-Next, 3.5 and 3.6; GLM-4.5; MiMo).

    x = proj([norm(embedding of t + 1), norm(h_t)]);  h'_t = norm(layer(x));  logits = head(h'_t)

h_t is the target's last state, after its final norm; after a drafted token it is h' of the token
before. A single layer is applied repeatedly. If there are several, layer k drafts token k only,
from the states of layer k - 1. Embeddings and head are the target's.

The layers are in the target's checkpoint or GGUF file, or in a separate folder or file, since
quantised and converted models have often lost them. They have the class of the target's layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache
from draftproof.drafters import checkpoint, weight_files
from draftproof.drafters.base import Vocabulary
from draftproof.drafters.checkpoint import LAYERS, METHOD, SPECULATORS, Checkpoint, Format
from draftproof.drafters.features import DEEPEST, Network, PairDrafter, fill, fuse_experts
from draftproof.drafters.heads import lm_head_rows
from draftproof.drafters.mtp_chain import SeveralLayers
from draftproof.errors import DrafterMismatch, ModelNotFound
from draftproof.forward.draft_layers import (
    DraftLayers,
    Mask,
    base_settings,
    checkpoint_folder,
    family_settings,
    layer_count,
    layers_like,
    refuse_unknown,
)
from draftproof.model.target import Target


class MTPLayout(NamedTuple):
    """How a family names the tensors, and what it pairs.

    Attributes:
        prefix: A pattern of what all names begin with; its group, if any, is the layer's number.
        names: Our names by those after the prefix; other names are those of the decoder layer.
        counts_on: Layer numbers continue those of the model's own layers.
        hidden_first: The state comes first in what is projected.
        first_zero: The embedding after the first token is zero.
    """

    prefix: str
    names: Mapping[str, str]
    counts_on: bool = False
    hidden_first: bool = False
    first_zero: bool = False


TABLES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
SHARED = {"embed_tokens.weight": TABLES, "head.weight": ("lm_head.weight", *TABLES)}
"""Copies of the model's own tables, which are used instead, and their names."""
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
BODY = r"(?:model\.)?(?:language_model\.)?"
LAYOUTS = (
    MTPLayout(BODY + r"mtp\.", QWEN),
    MTPLayout(r"model\.mtp_layers\.(\d+)\.", MIMO, hidden_first=True, first_zero=True),
    MTPLayout(r"model\.(?:language_model\.)?layers\.(\d+)\.", DEEPSEEK, counts_on=True),
)
"""Layouts in a model's own checkpoint."""
ALONE = (
    MTPLayout(BODY + r"(?:mtp\.)?(?=fc\.|pre_fc_norm_|layers\.\d+\.|norm\.)", QWEN),
    MTPLayout(r"mtp_layers\.(\d+)\.", MIMO),
    *LAYOUTS[1:],
)
"""Layouts in a folder or file of their own; `speculators` has MiMo's names in Qwen's order."""
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
"""Settings that say how many layers there are."""
HARMLESS = {
    "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
    "tie_word_embeddings", "use_cache", "max_position_embeddings", "num_hidden_layers",
    "layer_types", "max_window_layers", "full_attention_interval", "head_dtype",
}  # fmt: skip
"""Settings in which a head may differ from its target."""


class MTP(Network):
    """The weights, under names of our own.

    Attributes:
        ends: Of each layer, or of all: the norms and the projection around it.
    """

    hidden_layers = (-1,)

    def __init__(
        self, layers: DraftLayers, vocabulary: Vocabulary, layout: MTPLayout, ends: int
    ) -> None:
        super().__init__(layers, vocabulary)
        self.layout = layout
        self.ends = nn.ModuleList(_Ends(layers, self.width) for _ in range(ends))

    def fuse(self, hidden: Tensor) -> Tensor:
        return hidden[..., 0, :]

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Mask, cache: KVCache,
        number: int = 0
    ) -> tuple[Tensor, Tensor]:
        embedded = self.vocabulary.embed(tokens)
        ends = cast(Any, self.ends[min(number, len(self.ends) - 1)])
        if self.layout.first_zero:
            embedded = embedded * (positions > 0)[..., None]
        both = [ends.embed_norm(embedded), ends.hidden_norm(features)]
        inputs = ends.proj(torch.cat(both[::-1] if self.layout.hidden_first else both, -1))
        angles = self.parts.angles(inputs, positions)
        out = ends.norm(self.parts.run(number, inputs, angles, mask, cache))
        return out, out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.unembed(hidden)


class _Ends(nn.Module):
    """What is around a layer: norms of what it pairs, their projection, and the norm after it."""

    def __init__(self, layers: DraftLayers, width: int) -> None:
        super().__init__()
        self.embed_norm, self.hidden_norm, self.norm = (layers.norm(width) for _ in range(3))
        self.proj = nn.Linear(2 * width, width, bias=False)


def load(target: Target) -> PairDrafter | SeveralLayers:
    """The drafter in a target's own checkpoint.

    Raises:
        ModelNotFound: There is none.
        DrafterMismatch: Part of it is unknown.
    """
    name, depth = f"the multi-token prediction of {target.name}", layer_count(target.model)
    files, settings = _own_files(target)
    pairs = ((layout, _named(layout, files, depth)) for layout in LAYOUTS)
    layout, names = next((pair for pair in pairs if pair[1]), (LAYOUTS[0], {}))
    if not names:
        raise ModelNotFound(
            f"{target.name} has no layers for multi-token prediction that are known here; name "
            "another drafter, or the folder that holds them"
        )
    stated = {key: value for key, value in settings.items() if "mtp" in key}
    refuse_unknown(stated, COUNTS, name)
    return _made(layout, names, files, settings, target, name)


def _own_files(target: Target) -> tuple[dict[str, Path], dict[str, Any]]:
    """The file of each tensor in a target's own checkpoint, and the checkpoint's settings."""
    path = Path(str(target.model.config.name_or_path))
    if path.suffix.lower() == weight_files.GGUF and path.is_file():
        return dict.fromkeys(weight_files.names_in(path), path), {}
    folder = checkpoint_folder(target.model)
    settings = weight_files.read_settings(folder)
    return weight_files.all_files(folder), {**settings, **(settings.get("text_config") or {})}


def load_alone(source: Checkpoint, target: Vocabulary) -> PairDrafter | SeveralLayers:
    """The drafter in a folder or file of its own.

    Raises:
        DrafterMismatch: It is for another target, or part of it is unknown.
    """
    name, depth = f"the {ALONE_FORMAT.title} {source.path.name}", layer_count(target.model)
    settings = source.settings if _is_head(source.settings) else {}
    checkpoint.must_be_for(settings, target, name)
    weight_files.must_be_possible(settings, name)
    _must_describe(settings, target, name)
    pairs = ((layout, _named(layout, source.files, depth)) for layout in ALONE)
    layout, names = next((pair for pair in pairs if pair[1]), (ALONE[0], {}))
    strange = sorted({*source.files} - {*names.values()})
    if not names or strange:
        raise DrafterMismatch(
            f"{name} holds {strange[0] if strange else 'nothing'}, which is not "
            "supported; it would draft worse without it, so it is not loaded"
        )
    flat = {**settings, **(settings.get(LAYERS) or {}), **(settings.get("text_config") or {})}
    return _made(layout, names, source.files, flat, target, name)


def _made(
    layout: MTPLayout, names: dict[str, str], files: Mapping[str, Path], settings: dict[str, Any],
    target: Vocabulary, name: str
) -> PairDrafter | SeveralLayers:
    """The drafter of these tensors; `names`: the files' name of each, by ours."""
    count = weight_files.numbered(_numbers(names, "layers."), "layers")
    stated = next((settings[key] for key in COUNTS if settings.get(key) is not None), count)
    if stated != count:
        raise DrafterMismatch(
            f"{name} states {stated} layers, and there are {count}; the file is incomplete, fetch "
            "it again"
        )
    ends = weight_files.numbered(_numbers(names, "ends."), "ends")
    if ends not in (1, count):
        raise DrafterMismatch(f"{name} has {count} layers and {ends} projections; fetch it again")
    names = _without_copies(names, files, target, name)
    with torch.device("meta"):
        network = MTP(layers_like(target.model, count), target, layout, ends)
    tensors = weight_files.read_tensors(names, files)
    fill(network, fuse_experts(tensors, network), target, name)
    steps = settings.get("block_size") or checkpoint.proposed_tokens(settings, name)
    if count > 1:
        return SeveralLayers(network, "mtp", min(count, steps or count))
    return PairDrafter(network, "mtp", steps or DEEPEST)


def _numbers(names: Iterable[str], prefix: str) -> list[int]:
    return [int(name.split(".")[1]) for name in names if name.startswith(prefix)]


def _named(layout: MTPLayout, files: Iterable[str], depth: int) -> dict[str, str]:
    """The file's name of each tensor, by ours; empty if the layout is another."""
    prefix, pairs = re.compile(layout.prefix), dict[str, str]()
    for name in files:
        if not (match := prefix.match(name)):
            continue
        rest = name[match.end() :]
        number = int(match[1]) - depth * layout.counts_on if prefix.groups else 0
        if number < 0:
            continue
        if rest in layout.names:
            ours = f"ends.{number}.{layout.names[rest]}"
        else:
            ours = f"layers.{number}.{rest}" if prefix.groups else rest
        pairs[ours] = name
    return pairs if any(re.fullmatch(r"ends\.\d+\.proj\.weight", name) for name in pairs) else {}


def _without_copies(
    names: Mapping[str, str], files: Mapping[str, Path], target: Vocabulary, name: str
) -> dict[str, str]:
    """Names without tables that are copies of the model's own; refuses other tables."""
    shared = {ours: key for ours in names for key in SHARED
              if ours.startswith("ends.") and ours.endswith(key)}  # fmt: skip
    for ours, key in shared.items():
        table = next((name for name in SHARED[key] if name in files), None)
        read = {"own": names[ours]} | ({"model": table} if table else {})
        tensors = weight_files.read_tensors(read, files)
        stated = tensors["own"]
        if table is not None and files[table].suffix.lower() == weight_files.GGUF:
            same = _alike(tensors["model"], stated)
        elif table is not None:
            same = torch.equal(tensors["model"], stated)
        else:
            rows = torch.linspace(0, min(len(stated), target.vocab_size) - 1, 64,
                                  dtype=torch.float64).long()  # fmt: skip
            here = rows.to(target.device)
            model = (target.embed(here, raw=True) if key.startswith("embed")
                     else lm_head_rows(target, here, stated).weight)
            same = torch.allclose(model.cpu().float(), stated[rows].float(), rtol=0.02, atol=1e-3)
        if not same:
            raise DrafterMismatch(
                f"{name} has {key} of its own, which differs from the model's; it is not loaded"
            )
    return {ours: theirs for ours, theirs in names.items() if ours not in shared}


def _alike(table: Tensor, copy: Tensor) -> bool:
    """Whether two tables are one, quantised to different block types."""
    if table.shape != copy.shape:
        return False
    return bool(torch.cosine_similarity(table, copy, dim=-1).median() > 0.9)


def _must_describe(settings: Mapping[str, Any], target: Vocabulary, name: str) -> None:
    """Refuse settings that are not known, or that are not the target's."""
    known = {"block_size", *COUNTS, LAYERS, "text_config", METHOD, *SPECULATORS, *base_settings()}
    model = family_settings(target.model)
    for part in (settings, settings.get(LAYERS) or {}, settings.get("text_config") or {}):
        stated = {key: value for key, value in part.items() if key not in {*known, *HARMLESS}}
        refuse_unknown({key: value for key, value in stated.items() if key not in model}, (), name)
        here = family_settings(target.model, {key: stated[key] for key in stated if key in model})
        for key in stated.keys() & model.keys():
            if here[key] != model[key]:
                raise DrafterMismatch(
                    f"{name} has {key} = {stated[key]!r:.60}, {target.name} has "
                    f"{model[key]!r:.60}; use one trained for this target"
                )


def _is_head(settings: Mapping[str, object]) -> bool:
    """Whether a config.json is of a head alone."""
    if METHOD in settings:
        return bool(settings[METHOD] == "mtp")
    return str(settings.get("model_type", "")).endswith("_mtp")


def _is_alone(source: Checkpoint) -> bool:
    if _is_head(source.settings):
        return True
    if METHOD in source.settings or (source.settings and not source.path.is_file()):
        return False
    names = [*source.files]
    return bool(names) and all(re.match(BODY + r"mtp(_layers)?\.", name) for name in names)


ALONE_FORMAT = Format("MTP head", _is_alone, load_alone)
FORMATS = (ALONE_FORMAT,)
