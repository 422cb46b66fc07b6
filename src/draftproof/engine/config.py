"""The options of an engine, declared once, for `dp.load`, the command line and batch files.

Imports no torch, so that the command line starts at once.
"""

# ruff: noqa: RUF009 - `option` is dataclasses.field with a help text

from __future__ import annotations

import hashlib
import json
from dataclasses import Field, dataclass, field, fields
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypedDict

from draftproof.drafters.medusa_trees import CHOICES, DYNAMIC
from draftproof.errors import BadInput, NoSuchModel, did_you_mean
from draftproof.model.names import (
    check_model,
    embedded_names,
    is_file_name,
    is_import,
    near,
    resolve,
)

if TYPE_CHECKING:
    import torch

    from draftproof.core.tree import TreeShape
    from draftproof.core.typical import Typical
    from draftproof.drafters.base import Drafter
    from draftproof.engine.budget import Budget
    from draftproof.engine.shape_policy import ShapePolicy
    from draftproof.model.loading import PreTrainedModel, PreTrainedTokenizerBase

MAX_TREE_NODES = 1024
"""So many draft tokens per round, or nodes of a tree, are taken for a typing error."""
TRAINING_FREE = ("none", "portfolio", "prompt-lookup", "suffix", "recycling")
"""Drafters without a model or heads of their own."""
NAMED = (*TRAINING_FREE, "medusa", "redrafter", "mtp", "self-int8", "self-int4", "self-layers:N")
"""Drafters known by name. Any other drafter is a folder or `module:Class`."""
RULES = ("match", "rejection", "block")
"""The exact acceptance rules."""
WEIGHT_KINDS = ("int8", "int4", "fp8")
_MODEL = ((str, PurePath), "config", "a name, a folder or a loaded transformers model")
_KINDS: dict[str, tuple[type | tuple[type, ...], str, str]] = {
    "model": _MODEL, "assistant_model": _MODEL,
    "tokenizer": ((str, PurePath), "encode", "a name, a folder or a loaded tokenizer"),
    "budget": (int, "choose", "a whole number, or a Budget"),
    "draft_tree": (str, "paths", 'children per node as in "3,2,1", or a TreeShape'),
    "lossy": ((bool, str), "rule", 'True, "typical", "typical:EPSILON,DELTA" or a Typical'),
    "bucket_size": (int, "", "a whole number"), "shapes": ((), "closed", "a ShapePolicy"),
    "ignore_generation_config": (str, "", "names with commas between them"),
}
"""For each option, the types that it may have, an attribute that makes any other type acceptable,
and both in words."""


def option(
    default: object, help: str, metavar: str | None = None, *, panel: str | None = None,
    type: object = str | None, flags: tuple[str, ...] = (), choices: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """A dataclass field that is a command-line option; panel, type and flags are those there."""
    shown = {"help": help, "metavar": metavar, "panel": panel, "type": type}
    return field(default=default, metadata={**shown, "flags": flags, "choices": choices})


def cli_fields(config: type) -> list[Field[Any]]:
    """The fields of a dataclass that the command line offers."""
    return [field for field in fields(config) if "help" in field.metadata]


_drafting, _model = partial(option, panel="Drafting"), partial(option, panel="Model")
_hardware = partial(option, panel="Hardware")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made of.

    Attributes:
        model: "demo", a folder, a GGUF file, a hub id or a loaded transformers model.
        assistant_model: A draft model, in any of these forms. With another tokenizer, the tokens
            that both vocabularies share are drafted.
        drafter: A name, a folder of draft heads or of a draft model, `module:Class` of your own, or
            a `Drafter`; "a+b" merges two.
        budget: Draft tokens per round (`--max-draft-tokens`), or a `Budget`. None adapts the number
            to what pays, down to zero.
        draft_tree: For a draft model or Medusa heads: children per node and level ("3,2,1"), the
            name of a published tree, or a `TreeShape`. None: a chain as long as the budget, or the
            most likely paths of each round.
        acceptance: "match" gives the same text, "rejection" and "block" the same distribution.
        lossy: True, "typical", "typical:EPSILON,DELTA" or a `Typical` gives up the target's
            distribution for speed.
        dtype: Of models that are loaded here: "bfloat16", "float16", "float32" or "float64".
        device: Where models are placed: "cpu", "cuda", "cuda:1", "hpu", ...
        quantize: "int8", "int4" or "fp8" weights of the target. The text is that of the quantised
            target.
        quantize_draft: The same for the draft model. None: a draft model given by name gets 8 bits
            if it then predicts nearly the same; "none" leaves it as it is.
        kv_cache: "int8" or "fp8" keys and values: half the memory, and another text.
        parallel: Shard the model over the ranks of torchrun: "tensor" or "deepspeed".
        graphs: Record forward passes and replay them.
        bucket_size: Static shapes, with room for texts in multiples of so many tokens.
        compile: Let torch.compile build the forward passes.
        exact_bits: Give each token the same bits alone and among drafts; refused where that cannot
            be kept.
        trust_remote_code: Run the code that comes with a model.
        ignore_generation_config: Names of settings of the model's generation_config to leave out.
        tokenizer: Another tokenizer than the model's own.
        shapes: Static shapes by a `ShapePolicy`.

    Raises:
        BadInput: An option is wrong, as far as this shows before anything is loaded.
    """

    model: str | Path | PreTrainedModel
    assistant_model: str | Path | PreTrainedModel | None = _drafting(
        None, "Draft with this smaller model: demo-draft, a folder, a .gguf file or a hub id.",
        "MODEL")
    drafter: str | Path | Drafter | None = _drafting(
        None, "The drafter. Without training: portfolio, prompt-lookup, suffix, recycling; none "
        "decodes without drafts. With the checkpoint's MTP layers: mtp. With the model itself: "
        "self-int8, self-int4, self-layers:N. With bundled heads: medusa, redrafter, "
        "smollm2-135m-medusa, smollm2-135m-redrafter, qwen2.5-coder-1.5b-redrafter. Or a folder of "
        "Medusa or ReDrafter heads, EAGLE-3 or DFlash, or your own MODULE:CLASS. A+B merges two. "
        "Default: portfolio; for Qwen2.5-Coder-1.5B, with the bundled heads.", "NAME")
    budget: int | Budget | None = _drafting(
        None, "Draft K tokens per round. Default: tuned while it runs, down to none.", "K",
        flags=("--max-draft-tokens", "--num-assistant-tokens"), type=int | None)
    draft_tree: str | TreeShape | None = _drafting(
        None, "Shape of the draft tree: children per node, level by level, such as 3,2,1; or the "
        "name of a published tree. Default: a chain, or the most likely paths.", "TREE")
    acceptance: str | None = _drafting(
        None, "Acceptance rule: match gives the same text, rejection and block the same "
        "distribution. Default: match.", "RULE", choices=RULES)
    lossy: str | bool | Typical | None = _drafting(
        None, "Also accept other tokens that are likely enough, which changes the distribution. "
        "Default: off.", "typical[:E,D]")
    dtype: str | torch.dtype | None = _model(
        None, "bfloat16, float16, float32 or float64. Default: the checkpoint's, or float32 where "
        "bfloat16 is not native.", "DTYPE")
    device: str | None = _model(
        None, "cpu, cuda, cuda:1, hpu, ... Default: an accelerator if PyTorch finds one.", "DEVICE")
    quantize: str | None = _model(
        None, "Quantise the weights to int8, int4 or fp8: faster, but the text changes. Default: "
        "off.",
        "KIND", choices=WEIGHT_KINDS)
    quantize_draft: str | None = _model(
        None, "Quantise the draft model to int8, int4 or fp8, or not at all with none: faster, and "
        "the text stays the same. Default: int8 if its predictions hardly change.", "KIND",
        choices=(*WEIGHT_KINDS, "none"))
    kv_cache: str | None = _model(
        None, "Store keys and values in int8 or fp8: half the memory, but the text changes. "
        "Default: off.", "KIND", choices=("int8", "fp8"))
    parallel: str | None = _hardware(
        None, "Shard the model over the ranks of torchrun, by tensor (transformers) or deepspeed. "
        "Default: off.", "ENGINE", choices=("tensor", "deepspeed"))
    graphs: bool = _hardware(
        False, "Record forward passes and replay them, on Gaudi or on the given --device.",
        flags=("--use-hpu-graphs",), type=bool)
    bucket_size: int | None = _hardware(
        None, "Use static shapes, padded to multiples of N tokens. Default: dynamic shapes, except "
        "on Gaudi.", "N", type=int | None)
    compile: bool = _hardware(
        False, "Compile the forward passes with torch.compile; the first text takes longer.",
        type=bool)
    exact_bits: bool = _hardware(
        False, "Compute each token with the same bits as without drafts, on a GPU too.", type=bool)
    trust_remote_code: bool = _model(
        False, "Run the code that comes with a model. It has all your permissions: read it first.",
        type=bool)
    ignore_generation_config: str | None = _model(
        None, "Ignore these settings of the model's generation_config, such as num_beams,top_k. "
        "Default: none.", "NAMES")
    tokenizer: PreTrainedTokenizerBase | str | Path | None = _model(
        None, "Use another tokenizer: a folder or a hub id. Default: the model's.", "FOLDER",
        type=str | None)
    shapes: ShapePolicy | None = None

    def __post_init__(self) -> None:
        self._check_names()
        for name, (types, attribute, words) in _KINDS.items():
            value = getattr(self, name)
            if not (isinstance(value, types) or hasattr(value, attribute)
                    or (value is None and name != "model")):
                raise BadInput(f"{name} was {value!r:.60}; it must be {words}")
        free, two = self.training_free, "were given; give one of them"
        least = 0 if self.drafter == "none" else 1
        checks = [
            (self.assistant_model is not None and self.drafter is not None,
             f"both an assistant model and the drafter {self.drafter!r} {two}"),
            (bool(self.lossy) and self.acceptance is not None,
             f"both lossy and the exact acceptance {self.acceptance!r} {two}"),
            (isinstance(self.budget, int) and self.budget < least,
             f"the budget was {self.budget} draft tokens; give at least 1, or use the drafter none "
             "for plain decoding"),
            *map(self._choice, cli_fields(type(self))),
            (free and (self.draft_tree is not None or bool(self.quantize_draft)),
             "--draft-tree and --quantize-draft are for draft models, and the first for Medusa "
             "heads; name one with --assistant-model or --drafter"),
            (self.bucket_size is not None and self.bucket_size < 1,
             f"bucket_size was {self.bucket_size}; give at least 1, or leave it out"),
        ]
        for wrong, sentence in checks:
            if wrong:
                raise BadInput(sentence)
        if isinstance(self.draft_tree, str) and not self._tree_is_named:
            branching(self.draft_tree)
        if isinstance(self.lossy, str):
            thresholds(self.lossy)

    def _check_names(self) -> None:
        """Refuse files and folders that do not exist, and drafters of unknown names."""
        for model in (self.model, self.assistant_model, self.tokenizer):
            if isinstance(model, (str, PurePath)) and str(model):
                check_model(Path(model) if isinstance(model, PurePath) else model)
        drafter = str(self.drafter) if isinstance(self.drafter, (str, PurePath)) else None
        if drafter is not None and not Path(resolve(drafter)).exists():
            for part in drafter.split("+"):
                self._check_drafter(part)

    def _check_drafter(self, name: str) -> None:
        known = name in NAMED or name.startswith("self-") or is_import(name)
        if known or (name and Path(resolve(name)).exists()):
            return
        if is_file_name(name) or "/" in name:
            raise NoSuchModel(f"there is no folder {name}{near(name)}; give the folder of draft "
                              "heads or of a draft model")
        raise BadInput(
            f"drafter was {name!r}{did_you_mean(name, (*NAMED, *embedded_names())) or '.'} Choose "
            f"{', '.join(NAMED)}, a folder of draft heads or of a draft model, or your own "
            "module:Class"
        )

    def _choice(self, field: Field[Any]) -> tuple[bool, str]:
        value, choices = getattr(self, field.name), field.metadata["choices"]
        wrong = bool(choices) and value is not None and value not in choices
        return wrong, f"{field.name} was {value!r}; choose one of {', '.join(choices)}"

    @property
    def training_free(self) -> bool:
        """Whether nothing that drafts has a model or heads of its own, as by default."""
        names = "portfolio" if self.drafter is None else self.drafter
        named = isinstance(names, str) and all(name in TRAINING_FREE for name in names.split("+"))
        return named and self.assistant_model is None

    @property
    def _tree_is_named(self) -> bool:
        """Whether `draft_tree` names a published tree, or the one drawn again in every round."""
        return isinstance(self.draft_tree, str) and self.draft_tree in (DYNAMIC, *CHOICES)

    @property
    def tree(self) -> TreeShape | str | None:
        """The draft tree: a shape, or a published name."""
        from draftproof.core.tree import TreeShape

        if isinstance(self.draft_tree, str) and not self._tree_is_named:
            return TreeShape.branching(branching(self.draft_tree))
        return self.draft_tree

    @property
    def typical(self) -> Typical | bool:
        """The lossy rule; False if decoding is exact."""
        from draftproof.core.typical import Typical

        if isinstance(self.lossy, str):
            return Typical(*thresholds(self.lossy))
        return self.lossy or False

    @property
    def digest(self) -> str:
        """16 hex digits of what decides the texts; under `match` drafting does not."""
        exact = self.acceptance in (None, "match") and not self.lossy
        kept = ("model", "dtype", "quantize", "kv_cache", "parallel", "ignore_generation_config")
        names = [field.name for field in fields(self) if field.name in kept or not exact]
        values = {name: str(getattr(self, name)) for name in names}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def explicit_options(self) -> dict[str, object]:
        """The options that were given, by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None and value is not False}


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `draftproof.load`: the fields of `EngineConfig` but the model."""

    assistant_model: str | Path | PreTrainedModel | None
    drafter: str | Path | Drafter | None
    budget: int | Budget | None
    draft_tree: str | TreeShape | None
    acceptance: str | None
    lossy: str | bool | Typical | None
    dtype: str | torch.dtype | None
    device: str | None
    quantize: str | None
    quantize_draft: str | None
    kv_cache: str | None
    parallel: str | None
    graphs: bool
    bucket_size: int | None
    compile: bool
    exact_bits: bool
    trust_remote_code: bool
    ignore_generation_config: str | None
    tokenizer: PreTrainedTokenizerBase | str | Path | None
    shapes: ShapePolicy | None


def branching(text: str) -> tuple[int, ...]:
    """Children per node, level by level, from "3,2,1"."""
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    nodes = sum(accumulate(widths[:MAX_TREE_NODES], mul))
    if not widths or min(widths) < 1 or nodes >= MAX_TREE_NODES:
        raise BadInput(
            f"draft_tree was {text!r}; give children per node, level by level, such as 3,2,1 "
            f"(fewer than {MAX_TREE_NODES} nodes), or a published tree, such as "
            f"{next(iter(CHOICES))}"
        )
    return widths


def thresholds(text: str) -> tuple[float, ...]:
    """Epsilon and delta from "typical:0.09,0.3"; none from "typical", which takes the defaults."""
    name, colon, numbers = text.partition(":")
    try:
        values = tuple(float(part) for part in numbers.split(",")) if colon else ()
    except ValueError:
        values = (0.0,)
    if name != "typical" or len(values) not in (0, 2):
        known = "typical, or typical:EPSILON,DELTA such as typical:0.09,0.3"
        raise BadInput(f"lossy was {text!r}; give {known}")
    return values
