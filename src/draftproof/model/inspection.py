"""The check at load: what a target reads is compared with the model's own forward without a cache;
what does not agree is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.errors import UnsupportedModel
from draftproof.model.quantized_linear import QuantizedLinear
from draftproof.model.state_check import check_states

if TYPE_CHECKING:
    from draftproof.model.fast_forward import FastForward
    from draftproof.model.target import Target


class LogitScaling(NamedTuple):
    """What families do to the logits of their head: Cohere multiplies, Granite divides, Gemma 2
    caps them."""

    factor: float | None
    divisor: float | None
    cap: float | None

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
        factor, divisor, cap = (
            getattr(config, name, None) for name in (
                "logit_scale", "logits_scaling", "final_logit_softcapping"
            )
        )
        multiplies = isinstance(factor, float) and factor != 1
        divides = isinstance(divisor, (int, float)) and divisor != 1
        return cls(factor if multiplies else None, divisor if divides else None, cap or None)

    def apply(self, logits: Tensor) -> Tensor:
        """[..., V] the logits that are sampled from."""
        logits = logits if self.factor is None else logits * self.factor
        logits = logits if self.divisor is None else logits / self.divisor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


class CheckedRead(NamedTuple):
    """A tree behind committed tokens `lead` [1, L], and the model's own logits [N, V] behind each
    of its nodes."""

    lead: Tensor
    tree: TokenTree
    logits: Tensor

    @classmethod
    def of(
        cls, target: Target, text: Tensor, shape: TreeShape, *, together: bool
    ) -> CheckedRead:
        """together: read all paths side by side, which is quicker and shows less of what rounding
        does."""
        nodes, lead = len(shape), text[:3]
        tree = TokenTree.shaped(text[None, 3 : 3 + nodes], shape)
        paths = [
            torch.cat([lead, tree.tokens[0][tree.ancestors[0, node]]]) for node in range(nodes)
        ]
        # what follows is not seen
        padded = nn.utils.rnn.pad_sequence(paths, batch_first=True)
        parts = [padded] if together else [path[None] for path in paths]
        read = [row for part in parts for row in target.own_logits(part)]
        last = [row[len(path) - 1] for row, path in zip(read, paths, strict=True)]
        return cls(lead[None], tree, torch.stack(last).double())

    def error(self, target: Target) -> float:
        """How far the target's read is from the model's own forward, relative to its logits."""
        cache = target.check_cache(32)
        try:
            target.read(TokenTree.chain(self.lead), cache)
            cache.keep(None, torch.full_like(cache.lengths, self.lead.shape[1]))
            with target.group.intact():
                logits = target.read(self.tree, cache).logits[0].double()
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
            return float("inf")
        return float(((logits - self.logits).abs().max() / self.logits.abs().max()).detach())


CHECK_TREE = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])
"""The tree read at load."""

# float64 has float32 inside
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


STEPS = 4
"""By how much more a model may differ whose activations we round to 8 bits, which makes steps of
last bits. Its original was examined when it was loaded."""


def examined(target: Target, fast: FastForward | None) -> tuple[bool, FastForward | None]:
    """Whether a target, which has no fast forward yet, reads trees exactly, and `fast` if it agrees
    as closely as the stock forward does; raise if not even chains are read exactly.

    A chain and a tree behind three committed tokens are compared with the model's own forward on
    every path.
    """
    model, tolerance = target.model, target.tolerance
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        tolerance *= STEPS
    quantized: Any = getattr(model.config, "quantization_config", None)
    if getattr(quantized, "load_in_8bit", False) and quantized.llm_int8_threshold > 0:
        raise UnsupportedModel(
            f"{target.name} is in bitsandbytes' 8 bits with outliers, where a token depends on "
            "those read beside it; load it with llm_int8_threshold=0, or in 4 bits"
        )
    text = target.check_text(10)
    chain = CheckedRead.of(target, text, TreeShape.chain(4), together=False)
    tree = CheckedRead.of(target, text, CHECK_TREE, together=True)
    on_chain = chain.error(target)
    on_tree = tree.error(target) if not target.has_states else float("inf")
    if not on_chain <= 6 * tolerance:
        name = type(model).__name__
        encoder = getattr(model.config, "is_decoder", True) is False and not target.encodes
        if encoder and not model._is_stateful:
            raise UnsupportedModel(
                f"{name} may look at later tokens (is_decoder is false in its config), so it "
                "cannot write; set that to true if it was trained to write, or choose another model"
            )
        raise UnsupportedModel(
            f"{name} places tokens, or masks them, by what its own cache holds, or quantises what "
            "is read together: drafts cannot be read exactly; run it with transformers' generate"
        )
    if target.has_states:
        check_states(target)
        return False, None
    # an ALiBi that counts slots is right for chains, and wrong for trees by hardly more than half
    # precision blurs
    reads_trees = bool(target.group.number(on_tree <= max(tolerance, 3 * on_chain)))
    enough = max(tolerance, 3 * on_tree)
    target._fast = fast
    if fast is not None and fast.fused is not None and not tree.error(target) <= enough:
        fast.fused = None
    if fast is not None and fast.fused is None and not tree.error(target) <= enough:
        fast = None
    return reads_trees, fast
