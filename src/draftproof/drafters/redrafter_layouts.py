"""What recurrent drafters look like in checkpoints: names and settings of other engines, and our own.

Read are our own layout, Apple's ml-recurrent-drafter in its three families of names, and the drafter's part of a
TensorRT-LLM checkpoint. The tensors tell the form, wherever they and the settings differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor

from draftproof.drafters.base import Vocabulary, lm_head_of, must_fit
from draftproof.drafters.redrafter import STEPS, ReDrafterConfig, ReDrafterHead
from draftproof.errors import BadInput, DrafterMismatch

Config = dict[str, Any]
Tensors = Mapping[str, Tensor]

_SETTINGS = ("num_draft_layers", "redrafter_num_layers")
"""Settings that only a recurrent drafter has."""
_NAMES = (
    (re.compile(r"(?:drafter\.)?input_projs?\.(weight|bias)"), r"input_proj.\1"),
    (re.compile(r"(?:drafter\.)?rnn_(u\.weight|u\.bias|w\.weight)"), r"rnn_\1"),
    (re.compile(r"(?:lm_heads?|0|drafter\.layers)\.(\d+)\.linear\.(weight|bias)"), r"lm_head.\1.linear.\2"),
    (re.compile(r"(?:lm_heads?|0)\.\d+\.weight|drafter\.lm_head\.weight"), "projection.weight"),
)
"""What Apple's three families and TensorRT-LLM call a tensor, and what we do."""


def recognises(config: Config, names: Collection[str]) -> bool:
    """Whether this is a recurrent drafter in a layout known here."""
    if "speculator_type" in config:
        return bool(config["speculator_type"] == "redrafter")
    says_so = config.get("model_type") == "recurrent_drafting_drafter" or any(key in config for key in _SETTINGS)
    found = _ours(names)
    return bool(found) and (says_so or "rnn_w.weight" in found)


def from_tensors(config: Config, tensors: Tensors, vocabulary: Vocabulary) -> ReDrafterHead:
    """The head, in the dtype of the file; only the drafter's own tensors are read.

    Raises DrafterMismatch, in one sentence, for a head of another target, and for tensors that are none.
    """
    state = {ours: tensors[theirs] for ours, theirs in _ours(tensors).items()}
    form = _form(config, state, tensorrt=any(name.startswith("drafter.") for name in tensors))
    must_fit("the recurrent drafter", form, vocabulary, padded=not form.share_lm_head)
    if form.share_lm_head:
        like = state["input_proj.weight"]
        state["projection.weight"], state["projection.bias"] = (part.to(like).contiguous() for part in lm_head_of(vocabulary))
    last = f"lm_head.{form.num_layers}"
    return _filled(form, {name.replace("projection", last): tensor for name, tensor in state.items()})


def _ours(names: Collection[str]) -> dict[str, str]:
    """Which tensor is which of ours, {our name: theirs}; empty if they are no recurrent drafter's."""
    found = {}
    for name in names:
        for pattern, ours in _NAMES:
            if match := pattern.fullmatch(name):
                found[match.expand(ours)] = name
    return found if "projection.weight" in found or "input_proj.weight" in found else {}


def _form(config: Config, state: Tensors, tensorrt: bool) -> ReDrafterConfig:
    """The form that the tensors have, and for what they do not tell, the settings."""
    layers = sum(name.endswith(".linear.weight") for name in state)
    projection, narrow = state.get("projection.weight"), state.get("input_proj.weight")
    shared = projection is None and bool(config.get("share_lm_head"))
    if projection is None and not shared:
        raise DrafterMismatch("the recurrent drafter has no projection to the vocabulary; its checkpoint is incomplete")
    width = len(narrow) if narrow is not None else int(cast(Tensor, projection).shape[1])
    hidden = (narrow.shape[1] if narrow is not None else width) // 2
    return ReDrafterConfig(
        hidden_size=hidden,
        vocab_size=len(projection) if projection is not None else int(config["vocab_size"]),
        exit_dim=width,
        num_layers=layers,
        steps=int(config.get("steps") or config.get("redrafter_draft_len_per_beam") or STEPS),
        rnn="rnn_w.weight" in state,
        rnn_activation=str(config.get("rnn_activation", "none" if tensorrt else "silu")),
        skip_u_at_first_step=bool(config.get("skip_u_at_first_step", tensorrt)),
        share_lm_head=shared,
        base_model=str(config.get("base_model") or config.get("base_model_name_or_path") or ""),
    )


def _filled(form: ReDrafterConfig, state: Tensors) -> ReDrafterHead:
    """A head of this form that holds these very tensors."""
    with torch.device("meta"):
        head = ReDrafterHead(form)
    for name, empty in head.state_dict().items():
        if name not in state:
            raise DrafterMismatch(f"the recurrent drafter lacks {name}; the checkpoint is incomplete, fetch it again")
        if state[name].shape != empty.shape:
            given, wanted = tuple(state[name].shape), tuple(empty.shape)
            raise DrafterMismatch(f"{name} of the recurrent drafter has shape {given}, {wanted} was expected; fetch it again")
    head.load_state_dict({name: state[name] for name in head.state_dict()}, assign=True)
    return head


# The other way -------------------------------------------------------------------------------------------------------------


def _native(head: ReDrafterHead) -> tuple[Config, dict[str, Tensor]]:
    """All that is the head's own: a projection shared with the target is not."""
    theirs = f"lm_head.{head.config.num_layers}." if head.config.share_lm_head else None
    own = {name: tensor for name, tensor in head.state_dict().items() if theirs is None or not name.startswith(theirs)}
    return {"speculator_type": "redrafter", **asdict(head.config)}, own


def _apple(head: ReDrafterHead) -> tuple[Config, dict[str, Tensor]]:
    """Apple's ml-recurrent-drafter; TensorRT-LLM's converter reads the same folder.

    Apple's engine applies SiLU in the recurrence and TensorRT-LLM's does not, whatever a head was trained for: train
    with the `rnn_activation` and `skip_u_at_first_step` of the engine that will run it.
    """
    form = head.config
    if form.share_lm_head:
        raise BadInput(
            "the layout apple holds a projection to the vocabulary, and this head shares the target's; give it a copy with "
            "unshared(), or write the layout draftproof"
        )
    config = {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": form.vocab_size,
        "hidden_size": form.hidden_size,
        "exit_dim": form.exit_dim,
        "num_draft_layers": form.num_layers,
        "num_lookback_tokens": 1,
        "rnn": form.rnn,
        "redrafter_num_layers": form.num_layers,
        "redrafter_hidden_size": form.hidden_size,
        "redrafter_exit_dim": form.exit_dim,
        "redrafter_is_rnn": form.rnn,
        "redrafter_draft_len_per_beam": form.steps,
        "rnn_activation": form.rnn_activation,
        "skip_u_at_first_step": form.skip_u_at_first_step,
        "base_model_name_or_path": form.base_model,
    }
    return config, dict(head.state_dict())


EXPORTS: dict[str, Callable[[ReDrafterHead], tuple[Config, dict[str, Tensor]]]] = {"draftproof": _native, "apple": _apple}
"""What a checkpoint holds, settings and tensors, by the layout it is for."""
