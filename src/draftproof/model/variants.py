"""Targets made from a target: quantised, or with its first layers alone."""

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

    The original's facts still hold; later changes of the original are not adopted.

    Args:
        target: The original.
        kind: "int8", "int4", or "fp8" on accelerators.
        text: [S] token ids for the comparison; None: no comparison.
        give_up: Release the original's weights, which makes it unusable.

    Returns:
        The quantised target; its `quantization` says what quantising cost and saved.
    """
    if target.is_encoder_decoder:
        raise UnsupportedModel(
            f"{target.name} is an encoder-decoder, which is not quantised here; leave that out"
        )
    if isinstance(target, NativeTarget):
        from draftproof.model.native_quantize import quantized_and_compared as native

        model, cost = native(
            target.model.config.settings, target.model.source, kind, lambda: text,
            dtype=target.dtype, name=target.model.config.name_or_path,
            text_key=None if text is None else text.tolist(),
        )  # fmt: skip
        return _with(target.with_model(model), cost)
    from draftproof.weights.quantize import quantized_and_compared

    module, cost = quantized_and_compared(target.model, kind, text, give_up=give_up)
    return _with(target.with_model(module), cost)


def int8_copy(target: Target, text: Sequence[int]) -> Target | None:
    """A target with 8-bit weights, for drafting; None if our kernels cannot read them, or if its
    predictions on a text differ too much."""
    from draftproof.weights.quantize import is_quantized

    known = [token for token in text[: target.context] if token < target.vocab_size]
    slow = target.device.type != "cpu" or slow_because("int8", target.dtype) is not None
    if slow or not known or is_quantized(target.model):
        return None
    with suppress(BadInput, UnsupportedModel):                      # no layer to quantise
        other = quantized(target, "int8", torch.tensor(known))
        if other.quantization is not None and other.quantization.kl <= DRAFT_KL_LIMIT:
            return other
    return None


def first_layers(target: Target, count: int) -> Target:
    """A target with the first `count` layers of another, and the same final norm and head."""
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
