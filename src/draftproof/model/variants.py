"""Targets made of a target: quantised, or of its first layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.native_target import NativeTarget
from draftproof.model.target import Target
from draftproof.weights.quantized_linear import slow_because

if TYPE_CHECKING:
    from draftproof.weights.quantize import Quantization

DRAFT_KL_LIMIT = 0.02
"""Nats per token up to which a draft model is quantised without being asked."""


def quantized(
    target: Target, kind: str, text: Tensor | None = None, *, give_up: bool = False
) -> Target:
    """A target with quantised layers, compared with the original.

    What was found out about the original holds; what becomes of it later is not taken up.

    Args:
        target: The original.
        kind: "int8", "int4", or "fp8" on accelerators.
        text: [S] token ids to compare on; None compares nothing.
        give_up: Let go of the original's weights, which is of no use afterwards.

    Returns:
        The quantised target; its `quantization` says what it cost and saved.
    """
    if target.is_encoder_decoder:
        raise UnsupportedModel(
            f"{target.name} is an encoder-decoder, which is not quantised here; leave that out"
        )
    if isinstance(target, NativeTarget):
        from draftproof.model.native_quantize import quantized_and_compared as native

        model, cost = native(
            target.model.config.settings, target.model.source, kind, text,
            dtype=target.dtype, name=target.model.config.name_or_path,
        )  # fmt: skip
        return _with(target.with_model(model), cost)
    from draftproof.weights.quantize import quantized_and_compared

    module, cost = quantized_and_compared(target.model, kind, text, give_up=give_up)
    return _with(target.with_model(module), cost)


def int8_copy(target: Target, text: Sequence[int]) -> Target | None:
    """A target with 8-bit weights, for drafting: where our kernels read those and what it says of
    a text stays near."""
    from draftproof.weights.quantize import is_quantized

    known = [token for token in text[: target.context] if token < target.vocab_size]
    slow = target.device.type != "cpu" or slow_because("int8", target.dtype) is not None
    if slow or not known or is_quantized(target.model):
        return None
    with suppress(BadInput, UnsupportedModel):                      # nothing to quantise
        other = quantized(target, "int8", torch.tensor(known))
        if other.quantization is not None and other.quantization.kl <= DRAFT_KL_LIMIT:
            return other
    return None


def first_layers(target: Target, count: int) -> Target:
    """The first `count` layers of a target as a target of its own, before the same final norm and
    head."""
    if target.is_encoder_decoder:
        raise UnsupportedModel(
            f"{target.name} is an encoder-decoder, which does not draft with its first layers; "
            "name another drafter"
        )
    layout = target.layout
    if not 1 <= count < len(layout.shapes):
        raise BadInput(
            f"{count} layers were asked for, to draft with; the model has {len(layout.shapes)}: "
            "take fewer, at least 1"
        )
    if isinstance(target, NativeTarget):
        return target.with_model(target.model.first_layers(count))
    from draftproof.weights.snapshot import first_layers as of_module

    short = layout._replace(shapes=layout.shapes[:count], states=layout.states[:count])
    other = target.with_model(of_module(target.model, count))
    other._adopt(replace(target.facts, layout=short), other.fast)
    return other


def _with(target: Target, cost: Quantization) -> Target:
    target.quantization = cost
    return target
