"""From names to an engine: target, draft model or drafter, tokenizer, checked against each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard, cast

import torch

from draftproof.core.tree import TreeShape
from draftproof.core.typical import Typical
from draftproof.drafters.base import Drafter
from draftproof.drafters.checkpoints import is_head, read_head
from draftproof.drafters.draft_model import SELF, DraftModel, SelfDraft, self_draft_options
from draftproof.drafters.medusa import Medusa, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.drafters.plain import Plain
from draftproof.drafters.portfolio import Portfolio
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.drafters.token_recycling import TokenRecycling
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput, DrafterMismatch, ModelNotFound, TokenizerMismatch, UnsupportedModel
from draftproof.model import loading
from draftproof.model.graph_replay import GraphReplay
from draftproof.model.loading import PreTrainedModel, PreTrainedTokenizerBase
from draftproof.model.packed_linear import pack_linears
from draftproof.model.process_group import ALONE, ProcessGroup, form_group
from draftproof.model.quantize import KINDS, PASSAGE
from draftproof.model.quantized_kv_cache import LAYERS
from draftproof.model.target import Target
from draftproof.model.tensor_parallel import check_engine, load_sharded
from draftproof.model.tokenizer import Codec


def training_free() -> Drafter:
    """The drafter for any model when nobody names one: lookup, counts and the target's own leavings."""
    return Portfolio([PromptLookup(), SuffixDrafter(), TokenRecycling()])


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": Plain,
    "prompt-lookup": PromptLookup,
    "suffix": SuffixDrafter,
    "recycling": TokenRecycling,
    "portfolio": training_free,
}
"""Drafters that need nothing but their name."""
DEFAULT = "portfolio"
"""The one that drafts when nobody says."""
HEADS = {"medusa": "demo-medusa", "redrafter": "demo-redrafter"}
"""Draft heads embedded in the package, trained for the demo model."""
AS_IT_IS = "none"
"""A draft model keeps its weights."""


def load(
    model: str | Path | PreTrainedModel,
    *,
    assistant_model: str | Path | PreTrainedModel | None = None,
    drafter: str | Path | Drafter | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    acceptance: str = "match",
    lossy: Typical | bool = False,
    budget: Budget | int | None = None,
    draft_tree: TreeShape | str | None = None,
    quantize: str | None = None,
    quantize_draft: str | None = None,
    kv_cache: str | None = None,
    parallel: str | None = None,
    graphs: bool = False,
    shapes: ShapePolicy | None = None,
    compile: bool = False,
) -> Engine:
    """An engine for `model`: "demo", a folder, a hub id or a loaded transformers model.

    assistant_model: a draft model, named or given likewise; it must share the target's tokenizer.
    drafter: "portfolio" (the default without an assistant model: the three that follow, merged), "prompt-lookup",
        "suffix", "recycling", "none", "medusa" or "redrafter" (heads for the demo model), the folder of draft heads, several
        of these merged ("medusa+suffix"), the folder of a draft model, "self-int8", "self-int4" or "self-layers:N" (the
        target drafts for itself), or a Drafter.
    draft_tree: the shape a draft model or Medusa heads draft, or the name of a published one; None is a chain as long as
        the budget for a draft model, and the heads' own tree for Medusa.
    quantize, quantize_draft: "int8", "int4" or "fp8" weights for the target and for the draft model. The text is that of
        the quantised target; what it lost is in `engine.target.quantization`. A draft model named here, of which nobody says
        it, has 8 bits where our kernels read those sooner and it then says nearly the same; "none" leaves it as it is.
    kv_cache: "int8" or "fp8" keys and values in the target's cache.
    parallel: "tensor" (transformers' own) or "deepspeed" shards the target over the processes that torchrun started, one
        per device; each calls this and asks the same of its engine. The drafter is on every one of them, whole.
    graphs: record the target's and the draft model's reads and replay them, on devices that can (CUDA, Gaudi).
    compile: have torch.compile make the forwards of target and draft model, for each shape that comes (inductor keeps them
        on disk). The first text waits for it: minutes, on a CPU.
    shapes: see `Engine`; graphs and compiled forwards want closed ones, and get them if nobody says.
    lossy: True, or a `Typical`, gives up the target's law for speed (see `Engine`).
    dtype, device: of models loaded here; a loaded model stays where and as it is.
    Raises a DraftproofError, in one sentence, for anything that does not fit.
    """
    if assistant_model is not None and drafter is not None:
        raise BadInput(f"both an assistant model and the drafter {drafter!r} were given; give one of them")
    _check_names(drafter, quantize, quantize_draft, kv_cache)
    group = _group(parallel, model, drafter, quantize)
    with group.intact():
        loaded = _model(model, dtype, device, parallel, group, packs=not compile and quantize is None)
        target, codec = Target(loaded, kv_cache=kv_cache, group=group), _codec(tokenizer, model, loaded)
    few = quantize_draft if quantize_draft != AS_IT_IS else None
    itself = _self_draft(drafter, target, few, draft_tree, quantised=True)
    if quantize is not None:                                            # the original is given up now, not before
        passage = torch.tensor(codec.encode(PASSAGE)[: target.context]) if codec else None
        target = target.quantized(quantize, passage, give_up=isinstance(model, (str, Path)))
    itself = itself or _self_draft(drafter, target, few, draft_tree, quantised=False)
    draft = assistant_model if assistant_model is not None else drafter if _is_model(drafter) else None
    if few is not None and itself is None and draft is None:
        raise BadInput(f"a draft model in {few} was asked for, and there is none; name one, or leave that out")
    if itself is not None:
        drafts: Drafter = itself
    elif draft is not None:
        drafts = _draft_model(draft, target, codec, dtype, device, draft_tree, quantize_draft)
    else:
        drafts = drafter if isinstance(drafter, Drafter) else _named(str(drafter or DEFAULT), target, draft_tree)
    if compile:
        target = _compiled(target, drafts)
    return Engine(
        _replayed(target, drafts) if graphs else target,
        drafts,
        codec=codec,
        acceptance=acceptance,
        lossy=lossy,
        budget=budget,
        sampling=loading.default_sampling(loaded),
        stop_tokens=loading.stop_tokens(loaded),
        shapes=shapes or (ShapePolicy(closed=True) if graphs or compile else None),
    )


def _compiled(target: Target, drafter: Drafter) -> Target:
    """The target with its forward compiled, and so that of a draft model, if it can be."""
    if isinstance(drafter, DraftModel):
        with suppress(UnsupportedModel):                                # its text is the same either way
            drafter.model = cast(Target, drafter.model).compiled()
    return target.compiled()


def _replayed(target: Target, drafter: Drafter) -> Target:
    """The target with its reads recorded, and so those of a draft model."""
    if isinstance(drafter, DraftModel):
        drafter.model = GraphReplay(cast(Target, drafter.model))
    return cast(Target, GraphReplay(target))


def _check_names(drafter: object, quantize: str | None, quantize_draft: str | None, kv_cache: str | None) -> None:
    """Refuse a misspelt name before anything is loaded."""
    if isinstance(drafter, str) and drafter.startswith(SELF):
        self_draft_options(drafter)
    drafts = (*KINDS, AS_IT_IS)
    asked = (("quantize", quantize, KINDS), ("quantize_draft", quantize_draft, drafts), ("kv_cache", kv_cache, tuple(LAYERS)))
    for name, kind, known in asked:
        if kind is not None and kind not in known:
            raise BadInput(f"{name} was {kind!r}; choose one of {', '.join(known)}")


def _group(parallel: str | None, model: object, drafter: object, quantize: str | None) -> ProcessGroup:
    """The ranks to run on; refuses, before anything is loaded, what a sharded model cannot do."""
    if parallel is None:
        return ALONE
    check_engine(parallel)
    if not isinstance(model, (str, Path)):
        raise BadInput("a loaded model was given, and a parallel run loads a part on each rank; give the model's name")
    if quantize is not None:
        raise BadInput(f"{quantize} weights were asked for in a parallel run, which has none; leave quantisation out")
    if isinstance(drafter, str) and drafter.startswith(SELF):
        raise BadInput(f"a sharded model cannot draft for itself as {drafter}; name another drafter, or leave it out")
    return form_group()


def _self_draft(
    drafter: object, target: Target, quantize: str | None, tree: TreeShape | str | None, *, quantised: bool
) -> SelfDraft | None:
    """The target's draft of itself, if `drafter` names one, and one with quantised weights or without, as asked."""
    if not (isinstance(drafter, str) and drafter.startswith(SELF)):
        return None
    layers, kind = self_draft_options(drafter)
    if kind and quantize and kind != quantize:
        raise BadInput(f"both {drafter} and a draft in {quantize} were asked for; leave one of them out")
    kind = kind or quantize
    return SelfDraft(target, layers=layers, quantize=kind, shape=_shape(tree)) if quantised == bool(kind) else None


def _named(name: str, target: Target, tree: TreeShape | str | None) -> Drafter:
    """A drafter without a model of its own: by its name, by the folder of its heads, or several, merged."""
    if name in DRAFTERS:
        return DRAFTERS[name]()
    if name in HEADS or is_head(loading.resolve(name)):
        return _head(name, target, tree)
    if "+" in name:
        parts = name.split("+")
        alone = next((part for part in parts if _is_model(part)), None)
        if alone is not None:
            raise BadInput(f"{alone} is a draft model, which reads its own drafts; name it alone, as an assistant model")
        found = [_named(part, target, tree) for part in parts]
        return Portfolio([member for one in found for member in (one.members if isinstance(one, Portfolio) else (one,))])
    names = ", ".join([*DRAFTERS, *HEADS, "self-int8", "self-int4", "self-layers:N"])
    raise BadInput(f"drafter was {name!r}; give {names}, or the folder of draft heads or of a draft model")


def _head(name: str, target: Target, tree: TreeShape | str | None) -> Drafter:
    folder = loading.resolve(HEADS.get(name, name))
    if not is_head(folder):
        raise ModelNotFound(f"this installation has no {name} heads for the demo model; give a folder of trained heads")
    head = read_head(folder, target)
    if isinstance(head, MedusaHead):
        return Medusa(head, target, tree.paths if isinstance(tree, TreeShape) else tree)
    if tree is not None:
        raise BadInput(f"a draft tree was given, and {head.kind} heads shape their own; leave it out")
    return head.drafter(target)


def _draft_model(
    name: str | Path | PreTrainedModel,
    target: Target,
    codec: Codec | None,
    dtype: str | torch.dtype | None,
    device: str | None,
    tree: TreeShape | str | None,
    quantize: str | None,
) -> DraftModel:
    draft = _model(name, dtype, device or str(target.device), packs=False)
    if draft.device != target.device:
        raise DrafterMismatch(f"the draft model is on {draft.device}, the target on {target.device}; put both on one device")
    own = _codec(None, name, draft)
    if codec and own and not codec.same_ids(own):
        raise TokenizerMismatch(
            f"the draft model {own.name} and the target {codec.name} have different tokenizers "
            f"({len(own.tokenizer)} and {len(codec.tokenizer)} tokens); choose a draft that shares the target's"
        )
    reader = _reader(draft, own or codec, quantize, isinstance(name, (str, Path)))
    return DraftModel(reader, target.vocab_size, _shape(tree))


def _reader(draft: PreTrainedModel, codec: Codec | None, quantize: str | None, named: bool) -> Target:
    """What reads a draft model: in few bits as asked; in 8 if nobody says, and kernels and its law allow; else as it is."""
    if quantize is not None and quantize != AS_IT_IS:
        return Target(draft).quantized(quantize, give_up=named)
    lighter = Target(draft).lighter(codec.encode(PASSAGE)) if named and codec and quantize is None else None
    if lighter is not None:
        return lighter
    if named:
        pack_linears(draft, free=True)
    return Target(draft)


def _shape(tree: TreeShape | str | None) -> TreeShape | None:
    """The tree a draft model drafts."""
    if isinstance(tree, str) and tree not in CHOICES:
        raise BadInput(f"the draft tree was {tree!r}; give a TreeShape, or one of {', '.join(CHOICES)}")
    return TreeShape(CHOICES[tree]) if isinstance(tree, str) else tree


def _is_model(drafter: object) -> TypeGuard[str | Path]:
    """Whether a drafter is the name of a draft model."""
    if not isinstance(drafter, (str, Path)) or str(drafter) in HEADS:
        return False
    folder = loading.resolve(drafter)
    return Path(folder, "config.json").is_file() and not is_head(folder)


def _model(
    model: str | Path | PreTrainedModel,
    dtype: str | torch.dtype | None,
    device: str | None,
    parallel: str | None = None,
    group: ProcessGroup = ALONE,
    *,
    packs: bool,
) -> PreTrainedModel:
    """A model loaded here may be packed for speed, if it will not be quantised; one that was handed in is never changed."""
    if not isinstance(model, (str, Path)):
        return model
    if parallel is not None and not group.alone:
        return load_sharded(model, dtype, device, parallel, group)
    loaded = loading.load_model(model, dtype, device)
    if packs:
        pack_linears(loaded)
    return loaded


def _codec(
    tokenizer: PreTrainedTokenizerBase | str | Path | None, model: str | Path | PreTrainedModel, loaded: PreTrainedModel
) -> Codec | None:
    """The tokenizer given, or the one beside the model; None if there is neither."""
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return Codec(tokenizer)
    where = tokenizer or (model if isinstance(model, (str, Path)) else loaded.config.name_or_path)
    found = loading.load_tokenizer(where) if str(where) else None
    if found is None and tokenizer is not None:
        raise BadInput(f"there is no tokenizer in {tokenizer}")
    return Codec(found) if found is not None else None
