"""The options of an engine, declared once: `dp.load`, the command line and the digest of a batch file read them here.

Imports no torch, so that the command line starts at once.
"""

# ruff: noqa: RUF009 - `option` is dataclasses.field with a help text

from __future__ import annotations

import hashlib
import json
from dataclasses import Field, dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any

from draftproof.drafters.medusa_trees import CHOICES, DYNAMIC
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from draftproof.core.tree import TreeShape
    from draftproof.core.typical import Typical
    from draftproof.drafters.base import Drafter
    from draftproof.engine.budget import Budget
    from draftproof.engine.shape_policy import ShapePolicy
    from draftproof.model.loading import PreTrainedModel, PreTrainedTokenizerBase

MAX_TREE_NODES = 1024
"""Draft tokens per round beyond which a tree is a typing error."""
TRAINING_FREE = ("none", "portfolio", "prompt-lookup", "suffix", "recycling")
"""Drafters without a model or heads of their own."""
RULES = ("match", "rejection", "block")
"""The exact acceptance rules."""
WEIGHT_KINDS = ("int8", "int4", "fp8")
KV_KINDS = ("int8", "fp8")
ENGINES = ("tensor", "deepspeed")


def option(
    default: Any, help: str, *, flags: tuple[str, ...] = (), metavar: str | None = None, panel: str | None = None,
    type: Any = str | None, choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is a command-line option, too: its flags, placeholder, help panel, type there, and choices."""
    told = {"help": help, "flags": flags, "metavar": metavar, "panel": panel, "type": type, "choices": choices}
    return field(default=default, metadata=told)


def cli_fields(config: type) -> list[Field[Any]]:
    """The fields of a dataclass that the command line offers."""
    return [one for one in fields(config) if "help" in one.metadata]


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made of. Raises BadInput for what can be refused before anything is loaded.

    model, assistant_model: "demo", a folder, a GGUF file, a hub id or a loaded transformers model; both share one tokenizer.
    drafter: a name, a folder of draft heads or of a draft model, or a `Drafter`; "a+b" merges several.
    budget: draft tokens per round (`--num-assistant-tokens`), or a `Budget`; None measures what pays, zero included.
    draft_tree: what a draft model or Medusa heads draft: children per node and level ("3,2,1"), the name of a published tree,
        or a `TreeShape`. None: a chain as long as the budget for a draft model, the heads' own tree for Medusa.
    acceptance: "match" gives the same text, "rejection" and "block" the same distribution.
    lossy: True, "typical", "typical:EPSILON,DELTA" or a `Typical` gives up the target's distribution for speed.
    quantize, quantize_draft: weights of the target and of the draft model. The text is that of the quantised target. A draft
        model given by name has 8 bits if nobody says and it then predicts nearly the same; "none" leaves it as it is.
    kv_cache: quantised keys and values in the target's cache.
    parallel: "tensor" (transformers' own) or "deepspeed" shards the target over the processes that torchrun started.
    graphs: record forwards and replay them, on devices that can (CUDA, Gaudi). compile: by torch.compile.
    bucket_size, shapes: static shapes, with room for texts in multiples of so many tokens, or as a `ShapePolicy` says.
    trust_remote_code: run the code that a model's folder or hub page comes with; off, such a model is refused.
    tokenizer: another than the one beside the model. dtype, device: of models loaded here; a loaded model stays as it is.
    """

    model: str | Path | PreTrainedModel
    assistant_model: str | Path | PreTrainedModel | None = option(
        None, "Draft with this smaller model: demo-draft, folder, hub id.", metavar="MODEL", panel="Drafting"
    )
    drafter: str | Path | Drafter | None = option(
        None,
        "portfolio (default), prompt-lookup, suffix, recycling, none, medusa, redrafter, self-int8, self-layers:N, a folder; "
        "several as one: medusa+suffix.",
        metavar="NAME", panel="Drafting",
    )  # fmt: skip
    budget: int | Budget | None = option(
        None, "Draft K tokens in every round; without it, as many as pay.", flags=("--num-assistant-tokens",),
        metavar="K", panel="Drafting", type=int | None,
    )  # fmt: skip
    draft_tree: str | TreeShape | None = option(
        None, "Children per node, level by level (3,2,1), or a published tree.", metavar="TREE", panel="Drafting"
    )
    acceptance: str | None = option(
        None, "match (default): the same text; rejection, block: the same distribution.",
        metavar="RULE", panel="Drafting", choices=RULES,
    )  # fmt: skip
    lossy: str | bool | Typical | None = option(
        None, "Give up the target's distribution: likely enough tokens are accepted.", metavar="typical[:E,D]", panel="Drafting"
    )
    dtype: str | torch.dtype | None = option(
        None, "bfloat16, float16, float32 or float64.", metavar="DTYPE", panel="Model"
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, hpu, ...", metavar="DEVICE", panel="Model")
    quantize: str | None = option(
        None, "int8, int4 or fp8 weights: faster, and another text.", metavar="KIND", panel="Model", choices=WEIGHT_KINDS
    )
    quantize_draft: str | None = option(
        None, "The same for the draft model: faster, the same text; none: as it is.",
        metavar="KIND", panel="Model", choices=(*WEIGHT_KINDS, "none"),
    )  # fmt: skip
    kv_cache: str | None = option(
        None, "int8 or fp8 keys and values: half the memory, and another text.", metavar="KIND", panel="Model", choices=KV_KINDS
    )
    parallel: str | None = option(
        None, "Shard the model over the ranks of torchrun: tensor (transformers' own) or deepspeed.",
        metavar="ENGINE", panel="Model", choices=ENGINES,
    )  # fmt: skip
    graphs: bool = option(
        False, "Record forwards and replay them: on a Gaudi, or on the --device given.", flags=("--use-hpu-graphs",),
        panel="Model", type=bool,
    )  # fmt: skip
    bucket_size: int | None = option(
        None, "Static shapes, with room for texts in multiples of N tokens.", metavar="N", panel="Model", type=int | None
    )
    compile: bool = option(
        False, "Have torch.compile make the forwards; the first text waits for it.", panel="Model", type=bool
    )
    trust_remote_code: bool = option(
        False, "Run the code that comes with a model. It can do what you can: read it first.", panel="Model", type=bool
    )
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None
    shapes: ShapePolicy | None = None

    def __post_init__(self) -> None:
        if self.assistant_model is not None and self.drafter is not None:
            raise BadInput(f"both an assistant model and the drafter {self.drafter!r} were given; give one of them")
        if isinstance(self.budget, int) and self.budget < (0 if self.drafter == "none" else 1):
            raise BadInput(
                f"num_assistant_tokens was {self.budget}; draft at least 1 token, or use the drafter none for plain decoding"
            )
        for one in cli_fields(type(self)):
            value, choices = getattr(self, one.name), one.metadata["choices"]
            if choices and value is not None and value not in choices:
                raise BadInput(f"{one.name} was {value!r}; choose one of {', '.join(choices)}")
        if self.training_free and self.draft_tree is not None:
            raise BadInput("a draft tree (--draft-tree) is for draft models and Medusa heads; name one with --assistant-model or "
                           "--drafter")  # fmt: skip
        if self.training_free and self.quantize_draft:
            raise BadInput("--quantize-draft is for draft models; name one with --assistant-model or --drafter")
        if isinstance(self.draft_tree, str) and not self.tree_is_named:
            branching(self.draft_tree)
        if self.lossy and self.acceptance is not None:
            raise BadInput(f"both lossy and the exact acceptance {self.acceptance!r} were given; leave one of them out")
        if isinstance(self.lossy, str):
            thresholds(self.lossy)
        if self.bucket_size is not None and self.bucket_size < 1:
            raise BadInput(f"bucket_size was {self.bucket_size}; give at least 1, or leave it out")

    @property
    def training_free(self) -> bool:
        """Whether nothing that drafts has a model or heads of its own; the default drafter has not."""
        if self.assistant_model is not None:
            return False
        names = "portfolio" if self.drafter is None else self.drafter
        return isinstance(names, str) and all(part in TRAINING_FREE for part in names.split("+"))

    @property
    def tree_is_named(self) -> bool:
        """Whether `draft_tree` is the name of a published tree, or of the one drawn anew in every round."""
        return isinstance(self.draft_tree, str) and (self.draft_tree == DYNAMIC or self.draft_tree in CHOICES)

    @property
    def tree(self) -> TreeShape | str | None:
        """The draft tree: a shape, or a published name."""
        from draftproof.core.tree import TreeShape

        if isinstance(self.draft_tree, str) and not self.tree_is_named:
            return TreeShape.branching(branching(self.draft_tree))
        return self.draft_tree

    @property
    def typical(self) -> Typical | bool:
        """The lossy rule; False if decoding is exact."""
        from draftproof.core.typical import Typical

        return Typical(*thresholds(self.lossy)) if isinstance(self.lossy, str) else self.lossy or False

    @property
    def digest(self) -> str:
        """16 hex digits of everything that decides what the texts are: how they are drafted only matters to other rules."""
        exact = self.acceptance in (None, "match") and not self.lossy
        kept = ("model", "dtype", "quantize", "kv_cache", "parallel")
        said = {one.name: str(getattr(self, one.name)) for one in fields(self) if one.name in kept or not exact}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in given.items() if value is not None and value is not False}


def branching(text: str) -> tuple[int, ...]:
    """Children per node, level by level, from "3,2,1"."""
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise BadInput(
            f"draft_tree was {text!r}; give children per node, level by level, such as 3,2,1, or a published tree, "
            f"such as {next(iter(CHOICES))}"
        )
    levels = range(1, len(widths) + 1) if len(widths) < MAX_TREE_NODES else ()
    nodes = sum(prod(widths[:depth]) for depth in levels) or MAX_TREE_NODES
    if nodes >= MAX_TREE_NODES:
        raise BadInput(f"draft_tree {text!r} drafts {nodes} tokens or more per round; stay below {MAX_TREE_NODES}")
    return widths


def thresholds(text: str) -> tuple[float, ...]:
    """Epsilon and delta from "typical:0.09,0.3"; none from "typical" alone, which takes the defaults."""
    name, given, numbers = text.partition(":")
    try:
        values = tuple(float(part) for part in numbers.split(",")) if given else ()
    except ValueError:
        values = (0.0,)
    if name != "typical" or len(values) not in (0, 2):
        raise BadInput(f"lossy was {text!r}; give typical, or typical:EPSILON,DELTA such as typical:0.09,0.3")
    return values
