"""From names to an engine: target, draft model or drafter, tokenizer, checked against each other."""

from __future__ import annotations

from pathlib import Path

import torch

from draftproof.core.tree import TreeShape
from draftproof.decoding.budget import Budget
from draftproof.decoding.engine import Engine
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.plain import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.errors import BadInput, DrafterMismatch, TokenizerMismatch
from draftproof.target import loading
from draftproof.target.loading import PreTrainedModel, PreTrainedTokenizerBase
from draftproof.target.pack import pack_linears
from draftproof.target.target import Target
from draftproof.target.text import Codec

DRAFTERS = {"none": Plain, "prompt-lookup": PromptLookup}
"""Drafters that need nothing but their name."""


def load(
    model: str | Path | PreTrainedModel,
    *,
    assistant_model: str | Path | PreTrainedModel | None = None,
    drafter: str | Path | Drafter | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    acceptance: str = "match",
    budget: Budget | int | None = None,
    draft_tree: TreeShape | None = None,
) -> Engine:
    """An engine for `model`: "demo", a folder, a hub id or a loaded transformers model.

    assistant_model: a draft model, named or given likewise; it must share the target's tokenizer.
    drafter: "none", "prompt-lookup" (the default without an assistant model), the folder of a draft model, or a Drafter.
    draft_tree: the shape an assistant model drafts; None drafts a chain as long as the budget.
    dtype, device: of models loaded here; a loaded model stays where and as it is.
    Raises a DraftproofError, in one sentence, for anything that does not fit.
    """
    if assistant_model is not None and drafter is not None:
        raise BadInput(f"both an assistant model and the drafter {drafter!r} were given; give one of them")
    loaded = _model(model, dtype, device)
    target, codec = Target(loaded), _codec(tokenizer, model, loaded)
    if assistant_model is not None:
        drafts: Drafter = _draft_model(assistant_model, target, codec, dtype, device, draft_tree)
    elif isinstance(drafter, Drafter):
        drafts = drafter
    elif drafter is None or str(drafter) in DRAFTERS:
        drafts = DRAFTERS[str(drafter or "prompt-lookup")]()
    elif Path(loading.resolve(str(drafter)), "config.json").is_file():
        drafts = _draft_model(drafter, target, codec, dtype, device, draft_tree)
    else:
        raise BadInput(f"drafter was {str(drafter)!r}; give {', '.join(DRAFTERS)}, or the folder of a draft model")
    return Engine(
        target,
        drafts,
        codec=codec,
        acceptance=acceptance,
        budget=budget,
        sampling=loading.default_sampling(loaded),
        stop_tokens=loading.stop_tokens(loaded),
    )


def _draft_model(
    name: str | Path | PreTrainedModel,
    target: Target,
    codec: Codec | None,
    dtype: str | torch.dtype | None,
    device: str | None,
    shape: TreeShape | None,
) -> DraftModel:
    draft = _model(name, dtype, device or str(target.device))
    if draft.device != target.device:
        raise DrafterMismatch(f"the draft model is on {draft.device}, the target on {target.device}; put both on one device")
    own = _codec(None, name, draft)
    if codec and own and not codec.same_ids(own):
        raise TokenizerMismatch(
            f"the draft model {own.name} and the target {codec.name} have different tokenizers "
            f"({len(own.tokenizer)} and {len(codec.tokenizer)} tokens); choose a draft that shares the target's"
        )
    return DraftModel(Target(draft), target.vocab_size, shape)


def _model(model: str | Path | PreTrainedModel, dtype: str | torch.dtype | None, device: str | None) -> PreTrainedModel:
    """A model loaded here is packed for speed; one that was handed in is never changed."""
    if not isinstance(model, (str, Path)):
        return model
    loaded = loading.load_model(model, dtype, device)
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
