"""A drafter on disk. Unknown settings and unused tensors are refused by name.

A drafter without one of its norms would still draft, only worse, and nobody would notice.
A method declares its `FORMATS`; `checkpoints` finds the one that a folder or file is in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.drafters import weight_files
from draftproof.drafters.base import PADDING, Drafter, Vocabulary
from draftproof.errors import DrafterMismatch
from draftproof.forward.draft_layers import (
    BENIGN,
    DraftLayers,
    base_settings,
    layers_of,
    refuse_setting,
    refuse_unknown,
)

NUMBER = (int, float)
"""Type of a setting that may be either."""
ANY = object
"""Type of a setting that changes nothing here."""
LAYERS = "transformer_layer_config"
"""The setting in which `speculators` describes the layers; others have no such level."""
METHOD = "speculators_model_type"
TARGETS = ("base_model", "base_model_name_or_path", "target_model", "target_model_name")
"""Settings that may name the model that a drafter was trained for."""
SPECULATORS = {
    LAYERS, METHOD, "speculators_config", "speculators_version", "tie_word_embeddings", *BENIGN,
    *TARGETS,
}  # fmt: skip
STRIPPED = {r".*rotary_emb\..*": "", r"(?:model\.)?midlayer\.(.+)": r"layers.0.\1",
            r"model\.(.+)": r"\1"}  # fmt: skip
"""Patterns of tensor names in files, and our name; empty if the tensor is not needed."""
SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z])")
"""The number of parameters in a model's name, as in Qwen3-4B."""


class Checkpoint:
    """A folder, or a file of weights with its config.json next to it, if there is one.

    Attributes:
        path: What was given.
        folder: Where the settings are.
        settings: The contents of config.json; empty if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path if path.is_dir() else path.parent
        there = (self.folder / weight_files.CONFIG).is_file()
        self.settings = weight_files.read_settings(self.folder) if there else {}

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each tensor, by name. Only names are read; with an index, no file is
        opened."""
        if self.path.is_dir():
            return weight_files.all_files(self.folder)
        return weight_files.tensor_files(self.folder, [self.path])

    @property
    def architectures(self) -> list[str]:
        return [str(name) for name in self.settings.get("architectures") or ()]

    def names(self, keys: Mapping[str, str]) -> dict[str, str]:
        """The file's name of each tensor, by our name; refuses two tensors of one name."""
        names = renamed(self.files, keys)
        twice = [name for name in self.files if our_name(name, keys) in names
                 and names[our_name(name, keys)] != name]  # fmt: skip
        if twice:
            raise DrafterMismatch(
                f"{self.path.name} holds both {twice[0]} and {names[our_name(twice[0], keys)]}, "
                "which are the same weights; fetch it again"
            )
        return names

    def tensors(self, keys: Mapping[str, str]) -> dict[str, Tensor]:
        """Each tensor, by our name."""
        return weight_files.read_tensors(self.names(keys), self.files)


def our_name(name: str, keys: Mapping[str, str]) -> str:
    """Our name of a tensor, by the first pattern that matches; unchanged if none does."""
    for pattern, new in keys.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(new)
    return name


def renamed(names: Iterable[str], keys: Mapping[str, str]) -> dict[str, str]:
    """The file's name of each tensor, by our name, without tensors whose new name is empty."""
    ours = {our_name(name, keys): name for name in names}
    ours.pop("", None)
    return ours


@dataclass(frozen=True)
class Format:
    """A layout in which drafters are published.

    Attributes:
        title: Its name in messages, such as "DFlash drafter".
        recognises: Whether a checkpoint is in this format.
        load: Makes the drafter, for a target. Raises DrafterMismatch if it is not for this target.
        settings: Allowed values of each setting: types, or the one value that is implemented.
        keys: Patterns of tensor names, and our name of each; see `Checkpoint.names`.
        nested: Settings that hold further ones.
        shaped: Whether it takes a draft tree.
    """

    title: str
    recognises: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, Vocabulary], Drafter]
    settings: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=lambda: STRIPPED)
    nested: tuple[str, ...] = ()
    shaped: bool = False

    def read(self, checkpoint: Checkpoint, target: Vocabulary) -> Described:
        """The settings, layers and tensors of a checkpoint.

        Raises:
            DrafterMismatch: A setting is not known here, or it is for another target.
        """
        name = f"the {self.title} {checkpoint.path.name}"
        settings, known = checkpoint.settings, self.settings
        weight_files.must_be_possible(settings, name)
        layers = settings.get(LAYERS)
        inner = dict[str, object]()
        for key in (LAYERS, *self.nested):
            part = settings.get(key) or {}
            if not isinstance(part, dict):
                raise DrafterMismatch(f"{name} has {key} = {part!r:.60}; fetch it again")
            if key != LAYERS:
                refuse_unknown(part, known, f"the {key} of {name}")
                _must_agree(part, inner, name, key)
                inner |= part
        _must_agree(inner, {key: settings.get(key) for key in known}, name, "config.json")
        if layers is not None:
            benign = {*known, *self.nested, *SPECULATORS, *base_settings()}
            refuse_unknown(settings, benign, name)
        whole = {**dict.fromkeys(known), **(layers or {}), **settings, **inner}
        for key, kind in known.items():
            if not _fits(whole[key], kind):
                refuse_setting(key, whole[key], name)
        described = layers or settings
        made = layers_of(described, {*known, *self.nested, *SPECULATORS}, name)
        _set_windows(made, whole, name)
        proposal = proposed_tokens(settings, name)
        must_be_for(settings, target, name)
        return Described(name, whole, made, checkpoint.tensors(self.keys), proposal)


@dataclass
class Described:
    """The contents of a checkpoint.

    Attributes:
        name: For messages.
        settings: All settings, from all levels; None for those not given.
        layers: The decoder layers, without weights.
        tensors: By our name.
        tokens: Tokens per round as published, if stated.
    """

    name: str
    settings: dict[str, Any]
    layers: DraftLayers
    tensors: dict[str, Tensor]
    tokens: int | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens that it drafts."""
        head = self.tensors.get("lm_head.weight")
        return int(self.layers.config.vocab_size) if head is None else len(head)

    def require(self, *keys: str) -> None:
        """Refuse a drafter without one of these settings."""
        for key in keys:
            if not self.settings[key] and self.settings[key] != 0:
                raise DrafterMismatch(
                    f"{self.name} does not say its {key}; fetch its config.json again"
                )

    def must_read(self, target: Vocabulary, width: int | None = None) -> None:
        """Refuse a drafter that reads hidden states of another width than the target's.

        Args:
            target: The target.
            width: The width that it reads; None: that of its own layers.
        """
        stated = self.settings.get("target_hidden_size")
        read = width if width is not None else self.layers.config.hidden_size
        for size in (stated, read):
            if size is not None and size != target.hidden_size:
                raise DrafterMismatch(
                    f"{self.name} reads hidden states of {size} numbers, {target.name} has "
                    f"{target.hidden_size}; use one trained for this target"
                )

    def must_fuse(self, target: Vocabulary, count: int) -> None:
        """Refuse a drafter whose `fc` does not fuse the states of `count` layers of the target."""
        weight = self.tensors.get("fc.weight")
        if weight is not None and weight.dim() == 2 and count:
            wide, rest = divmod(weight.shape[1], count)
            if rest:
                raise DrafterMismatch(
                    f"{self.name} fuses {weight.shape[1]} numbers of {count} layers; its settings "
                    "and weights do not go together, fetch it again"
                )
            self.must_read(target, wide)

    def token_map(self, target: Vocabulary) -> Tensor | None:
        """The target's id of each of its tokens; None if they are the same.

        Removes `d2t` (differences to the target's ids) and `t2d` (which of the target's tokens it
        has) from the tensors."""
        offsets, size = self.tensors.pop("d2t", None), self.vocab_size
        known, vocab_size = self.tensors.pop("t2d", None), target.vocab_size
        stated = self.settings.get("draft_vocab_size")
        if stated is not None and stated != size:
            raise DrafterMismatch(
                f"{self.name} states draft_vocab_size = {stated} and drafts {size} tokens; fetch "
                "it again"
            )
        if known is not None and abs(len(known) - vocab_size) > max(PADDING, vocab_size // 100):
            raise DrafterMismatch(
                f"{self.name} is for a vocabulary of {len(known)} tokens, {target.name} has "
                f"{vocab_size}; use one trained for this target"
            )
        if offsets is None and abs(size - vocab_size) <= max(PADDING, vocab_size // 100):
            return None
        fits = offsets is not None and offsets.shape == (size,) and not offsets.is_floating_point()
        ids = torch.arange(size if fits else 0)
        if offsets is not None and fits:
            ids = ids + offsets.long().cpu()
        several, inside = len(torch.unique(ids)), (ids >= 0) & (ids < vocab_size)
        if not fits or not size or several != size or not inside.all():
            raise DrafterMismatch(
                f"{self.name} has {size} tokens and no map (d2t) of each to one of the "
                f"{vocab_size} of {target.name}; fetch it again, or use one trained for this target"
            )
        return ids.to(target.device)


def _set_windows(layers: DraftLayers, settings: Mapping[str, Any], name: str) -> None:
    """Give sliding layers the stated window, under either of its names."""
    kinds = getattr(layers.config, "layer_types", None) or ()
    slides = "sliding_attention" in kinds
    window = settings.get("swa_window_size") or settings.get("sliding_window")
    if not window and (slides or settings.get("use_swa")):
        raise DrafterMismatch(
            f"{name} has sliding layers and does not state their window; fetch it again"
        )
    if slides:
        layers.windows = [window if kind == "sliding_attention" else None for kind in kinds]


def _fits(value: object, kind: Any) -> bool:
    if value is None or isinstance(kind, (type, tuple)):
        return value is None or isinstance(value, kind)
    return bool(value == kind)


def _must_agree(
    settings: Mapping[str, object], others: Mapping[str, object], name: str, where: str
) -> None:
    """Refuse a setting that two places state differently."""
    for key, value in settings.items():
        other = others.get(key)
        if value is not None and other is not None and value != other:
            raise DrafterMismatch(
                f"{name} states {key} = {value!r:.60} and, in {where}, {other!r:.60}; fetch its "
                "config.json again"
            )


def proposed_tokens(settings: Mapping[str, object], name: str) -> int | None:
    """The number of draft tokens that `speculators` states; refuses inexact acceptance."""
    config = settings.get("speculators_config")
    methods = config.get("proposal_methods") if isinstance(config, dict) else None
    count = None
    for method in methods or ():
        loose = method.get("accept_tolerance") or (method.get("verifier_accept_k") or 1) != 1
        if loose:
            raise DrafterMismatch(
                f"{name} asks for tokens to be accepted that the target did not choose "
                f"({method!r:.120}), which would change the text; remove accept_tolerance and "
                "verifier_accept_k from its config.json"
            )
        count = method.get("speculative_tokens") or count
    if count is not None and (type(count) is not int or not 1 <= count <= 1024):
        raise DrafterMismatch(f"{name} drafts {count!r:.20} tokens per round; fetch it again")
    return count


def target_name(settings: Mapping[str, object]) -> str:
    """The model that a drafter was trained for, without the publisher; empty if not stated."""
    config = settings.get("speculators_config")
    verifier = config.get("verifier") if isinstance(config, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    for key in TARGETS:
        name = name or settings.get(key)
    return str(name or "").rstrip("/").rpartition("/")[2]


def must_be_for(settings: Mapping[str, object], target: Vocabulary, name: str) -> None:
    """Refuse a drafter trained for a model whose name has another number of parameters."""
    trained, here = target_name(settings), str(target.name).rstrip("/").rpartition("/")[2]
    sizes = [SIZE.search(name.lower().replace("_", "-")) for name in (trained, here)]
    if sizes[0] and sizes[1] and sizes[0][1] != sizes[1][1]:
        raise DrafterMismatch(
            f"{name} was trained for {trained}, and the target is {here}; use one trained for this "
            "target"
        )


def layers_read(numbers: Sequence[int], target: Vocabulary, name: str) -> tuple[int, ...]:
    """Layers of the target, as transformers counts their outputs."""
    depth = int(target.model.config.get_text_config().num_hidden_layers)
    if not all(0 <= number <= depth for number in numbers):
        raise DrafterMismatch(
            f"{name} reads layers {list(numbers)}, {target.name} has {depth}; it is for another "
            "model"
        )
    return tuple(numbers)
