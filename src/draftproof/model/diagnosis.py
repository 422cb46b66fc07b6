"""For `draftproof doctor`: which code serves a model on this machine, why, and how to change
it."""

from __future__ import annotations

from typing import Any

import torch

from draftproof.forward.fused_forward import NODES
from draftproof.forward.native_config import ARCHITECTURES
from draftproof.model.native_model import NativeModel
from draftproof.model.quantized_model import described
from draftproof.model.target import Target
from draftproof.native.kernels import kernels, library
from draftproof.weights.quantized_checkpoint import QuantizedSource
from draftproof.weights.quantized_linear import slow_because


def paths(target: Target) -> dict[str, str]:
    """One sentence on each part of the computation, by name."""
    build, host = library().build, target.device.type == "cpu"
    sdpa = "torch's scaled_dot_product_attention"
    sentences = {
        "layers": _layers(target),
        "attention": f"our {build} kernel up to {NODES} nodes, {sdpa} beyond"
        if target.ragged_batches else sdpa,
        **({"weights": weights} if (weights := _weights(target)) else {}),
        "checked": target.facts.checked,
        "sampling": f"our {build} kernels" if host and kernels() else "torch's operators",
    }
    for kind in ("int8", "int4") if host else ():
        slow = slow_because(kind, target.dtype)
        why = f"right, and not quicker than the original: {slow}"
        sentences[kind] = why if slow else f"our {build} kernel"
    return sentences


def _weights(target: Target) -> str | None:
    """How the weights of a quantised checkpoint are used; None for other checkpoints."""
    source: Any = getattr(target.model, "source", None)
    source = getattr(source, "source", source)          # the original, if a result was kept
    if isinstance(source, QuantizedSource):
        return source.described
    return described(target.model)


def _layers(target: Target) -> str:
    """The code that multiplies, and the reason if it is not our kernels."""
    compiled, build = kernels(), library().build
    name = getattr(target.model, "architecture", type(target.model).__name__)
    forward = "the model's own forward in transformers"
    forward = forward if target.fast is None else "torch's operators in a short forward"
    if target.ragged_batches:
        read = f"our {build} kernels, a read in one call"
        return f"{read}; transformers' {name} is not built" if isinstance(
            target.model, NativeModel) else read
    if any(getattr(module, "native", None) is not None for module in target.model.modules()):
        return f"{forward}, with linear layers by our {build} kernels"
    if target.device.type != "cpu":
        return forward
    if compiled is None:
        return f"{forward}: {library().reason}"
    if target.dtype != torch.bfloat16:
        dtype = str(target.dtype).removeprefix("torch.")
        return f"{forward}: our kernels read bfloat16, not {dtype}; give --dtype bfloat16"
    if name not in ARCHITECTURES:
        return f"{forward}: {name} is none of the families that our kernels read whole"
    return f"{forward}: its layers are not packed, or of odd sizes; give the model by name"
