"""A target for GPUs whose reads give a token the same bits however many are read with it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Reading
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.inspection import CHECK_TREE, ReferenceForward
from draftproof.model.module_target import ModuleTarget
from draftproof.model.target import Target
from draftproof.weights.quantize import is_quantized


class ExactTarget(ModuleTarget):
    """A target read with the kernels of `forward/exact_bits.py` in place of torch's."""

    def __init__(self, target: ModuleTarget) -> None:
        vars(self).update(vars(target))                                         # checked already

    def _read(
        self, tree: TokenTree, cache: KVCache, first: int, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> Reading:
        from draftproof.forward.exact_bits import ExactBits

        with ExactBits():
            return super()._read(tree, cache, first, last_only, hidden_layers)


def exact(target: Target) -> Target:
    """A target that gives a token the same bits alone and among drafts.

    Args:
        target: Any target. On a CPU, targets that our kernels read do so anyway.

    Raises:
        BadInput: This is not possible here, for the reason that is given.
        UnsupportedModel: The model gives other logits with these kernels.
    """
    if target.ragged_batches:                               # our kernels on a CPU
        return target
    reason = _reason(target)
    if reason is not None:
        raise BadInput(f"{target.name} cannot be read with exact bits: {reason}; leave "
                       "--exact-bits out")
    assert isinstance(target, ModuleTarget)
    other = ExactTarget(target)
    with torch.inference_mode():
        text = torch.arange(10, device=target.device) % target.vocab_size
        reference = ReferenceForward.of(target, text, CHECK_TREE, together=True)
        try:
            error = reference.error(other)
        except UnsupportedModel as failure:
            raise BadInput(f"{target.name} cannot be read with exact bits: {failure}; leave "
                           "--exact-bits out") from None
    if not error <= 6 * target.tolerance:
        raise UnsupportedModel(f"{target.name} gives other logits with exact bits ({error:.1g} "
                               "off); leave --exact-bits out")
    return other


def _reason(target: Target) -> str | None:
    """Why reads cannot keep the same bits; None if they can."""
    if not isinstance(target, ModuleTarget) or target.is_encoder_decoder or target.has_states:
        return "there are kernels for decoders with attention alone"
    if target.device.type == "cpu" and not _interpreted():
        return "our kernels do not read it on this CPU"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not target.reads_trees or target._takes_place:
        return "its attention is not one over a mask"
    if target.dtype == torch.float64 or is_quantized(target.model):
        return "there are kernels for weights in 16 or 32 bits"
    if not target.group.is_single:
        return "sums of several devices have another order"
    return None


def _interpreted() -> bool:
    """Whether Triton runs on the CPU, in its interpreter."""
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"
