"""Published drafters as files: every setting is known and every tensor used, or it is refused by
name, since a drafter that is read without one of its norms still drafts, worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftproof.drafters import weight_files
from draftproof.drafters.base import PADDING, Vocabulary, must_hold
from draftproof.errors import DrafterMismatch
from draftproof.forward.draft_layers import BENIGN, DraftLayers, layers_of, refuse_unknown
from draftproof.weights.packed_linear import pack_linears

NUMBER = (int, float)
"""Settings may be either."""
LAYERS = "transformer_layer_config"
"""Where `speculators` describes the layers; elsewhere they are described with all else."""
SPECULATORS = {
    LAYERS, "speculators_config", "speculators_model_type", "speculators_version",
    "tie_word_embeddings", *BENIGN,
}  # fmt: skip


class Published(NamedTuple):
    """A drafter's name for messages, its settings, None where nothing is said, and its weights."""

    name: str
    settings: dict[str, Any]
    layers: DraftLayers
    tensors: dict[str, Tensor]

    @property
    def vocab_size(self) -> int:
        """Tokens that it drafts."""
        head = self.tensors.get("lm_head.weight")
        return int(self.layers.config.vocab_size) if head is None else len(head)


def read(folder: Path, method: str, known: Mapping[str, Any], nested: str) -> Published:
    """What a folder holds; raises DrafterMismatch for settings that are not understood.

    known: by its name what a setting may be: types, or the one value that is read here. nested: the
    setting that holds further ones.
    """
    settings, name = weight_files.read_settings(folder), f"the {method} drafter {folder.name}"
    described, inner = settings.get(LAYERS), settings.get(nested) or {}
    for part in (described or {}, inner):
        if not isinstance(part, dict):
            raise DrafterMismatch(f"{name} describes its layers by {part!r:.60}; fetch it again")
    weight_files.must_be_possible(settings, name)
    refuse_unknown(inner, known, f"the {nested} of {name}")
    if described is not None:
        refuse_unknown(settings, {*known, *SPECULATORS}, name)
    layers = layers_of(described or settings, known, name)
    merged = {**dict.fromkeys(known), **(described or {}), **settings, **inner}
    wrong = {key: merged[key] for key, kind in known.items() if not _fits(merged[key], kind)}
    refuse_unknown(wrong, (), name)
    kinds = getattr(layers.config, "layer_types", None) or ()
    slides = "sliding_attention" in kinds
    window = merged.get("swa_window_size") or merged.get("sliding_window")
    if not window and (slides or merged.get("use_swa")):
        raise DrafterMismatch(
            f"{name} has sliding layers and does not say their window; fetch it again"
        )
    if slides:
        layers.windows = [window if kind == "sliding_attention" else None for kind in kinds]
    tensors = weight_files.read_all(folder)
    ours = {key: key.removeprefix("model.").replace("midlayer.", "layers.0.") for key in tensors}
    kept = {ours[key]: tensor for key, tensor in tensors.items() if "rotary_emb." not in key}
    return Published(name, merged, layers, kept)


def _fits(value: Any, kind: Any) -> bool:
    if value is None or isinstance(kind, (type, tuple)):
        return value is None or isinstance(value, kind)
    return bool(value == kind)


def layers_read(numbers: Sequence[int], depth: int, name: str) -> tuple[int, ...]:
    """Layers of a target of `depth` layers, as transformers counts their outputs."""
    if not all(0 <= number <= depth for number in numbers):
        raise DrafterMismatch(
            f"{name} reads layers {list(numbers)}, the target has {depth}; it is for another model"
        )
    return tuple(numbers)


def must_share(drafter: Published, vocabulary: Vocabulary) -> None:
    """Refuse a drafter of another width than that of the target whose tables it reads."""
    size = drafter.layers.config.hidden_size
    if size != vocabulary.hidden_size:
        raise DrafterMismatch(
            f"{drafter.name} reads states of {size} numbers, {vocabulary.name} has "
            f"{vocabulary.hidden_size}; use one trained for this target"
        )


def token_map(drafter: Published, vocabulary: Vocabulary) -> Tensor | None:
    """The target's token of each of the draft's, by what a file says of it (`d2t`, how far on it
    is, which is taken out of the tensors with `t2d`, its reverse). None: they are the same."""
    offsets, size = drafter.tensors.pop("d2t", None), drafter.vocab_size
    vocab_size = vocabulary.vocab_size
    drafter.tensors.pop("t2d", None)
    if offsets is None and abs(size - vocab_size) <= max(PADDING, vocab_size // 100):
        return None
    fits = offsets is not None and offsets.shape == (size,) and not offsets.is_floating_point()
    ids = torch.arange(size if fits else 0)
    if offsets is not None and fits:
        ids = ids + offsets.long().cpu()
    several, known = len(torch.unique(ids)), (ids >= 0) & (ids < vocab_size)
    if not fits or not size or several != size or not known.all():
        raise DrafterMismatch(
            f"{drafter.name} has {size} tokens and no map (d2t) of each to one of the {vocab_size} "
            f"of {vocabulary.name}; fetch it again, or use one trained for this target"
        )
    return ids.to(vocabulary.device)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], like: Vocabulary, name: str) -> None:
    """Load all these tensors, and nothing else, as the target's; refuse what is over or lacking."""
    wanted = module.state_dict()
    strange = sorted(tensors.keys() - wanted.keys())
    if strange:
        raise DrafterMismatch(
            f"{name} holds {strange[0]}, which nothing here uses; it would draft worse without it, "
            "and is not loaded"
        )
    must_hold(tensors, wanted, name)
    with torch.inference_mode(False):
        state = {key: tensors[key].to(like.device, like.dtype, copy=True) for key in wanted}
        module.load_state_dict(state, assign=True)
    module.eval().requires_grad_(False)
    pack_linears(module)
