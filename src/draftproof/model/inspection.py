"""The check at load: what a target reads is compared with the model's own forward without a cache;
what does not agree is refused. The verdict on files is kept for the next start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.errors import UnsupportedModel
from draftproof.model.fast_forward import FastForward
from draftproof.model.kept import Kept, kept
from draftproof.model.layout import FAILURES
from draftproof.model.quantize import is_quantized
from draftproof.model.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from draftproof.model.target import Target

CHECK_TREE = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])
"""The tree read at load."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""float64 has float32 inside."""
ROUNDS = ((3, (3, 3)), (1, (1, 1)), (4, (2, 4)), (4, (4, 1)), (1, (1, 1)), (5, (2, 3)), (2, (2, 2)))
"""Nodes read of each of two rows, and how many of them are committed; the others are astray."""


def check(target: Target) -> None:
    """Find out what a target stores, whether it reads trees exactly, and by which forward."""
    alone = target.group.alone
    target.layout = target.find_layout()
    target.vocab_size = target.layout.vocab
    fits = alone and FastForward.fits(target.model)
    fast = FastForward(target.model, target.layout.windows, target.context) if fits else None
    own = alone and not target.encodes
    known = kept(target.model, "check", changed=True) if own else Kept()
    found = known.read()
    if found is not None:
        target.reads_trees, target.steps = found["reads_trees"], found["steps"]
        target.fast = fast if found["fast"] else None
        if target.fast is not None and not found["fused"]:
            target.fast.fused = None
    else:
        with known.if_slow() as facts:
            examine(target, fast)
            facts |= {"reads_trees": target.reads_trees, "steps": target.steps,
                      "fast": target.fast is not None, "fused": target.skips_absent}
    if (target.has_states or target.encodes) and not alone:
        what = "an encoder's output" if target.encodes else "states"
        raise UnsupportedModel(
            f"{target.name} keeps {what}, and nothing shards that here; run it on one device"
        )


def tolerance_of(model: PreTrainedModel) -> float:
    """How far logits may be from the model's own, relative to the largest."""
    rough = is_quantized(model) and model.dtype != torch.float16
    return TOLERANCES[torch.bfloat16 if rough else model.dtype]


def examine(target: Target, fast: FastForward | None) -> None:
    """Let a target read by `fast` if that agrees with the model's own forward on a tree as closely
    as a read through the cache does, and by the model's own if not; refuse one that reads not even
    chains exactly.
    """
    model, tolerance = target.model, target.tolerance
    target.fast = None
    # activations rounded to 8 bits make steps of last bits; the original was examined when loaded
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        tolerance *= 4
    quantized: Any = getattr(model.config, "quantization_config", None)
    if getattr(quantized, "load_in_8bit", False) and quantized.llm_int8_threshold > 0:
        raise UnsupportedModel(
            f"{target.name} is in bitsandbytes' 8 bits with outliers, where a token depends on "
            "those read beside it; load it with llm_int8_threshold=0, or in 4 bits"
        )
    text = target.check_text(10)
    on_chain = CheckedRead.of(target, text, TreeShape.chain(4), together=False).error(target)
    if not on_chain <= 6 * tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__} places tokens, or masks them, by what its own cache holds, "
            "looks at later ones, or quantises what is read together: drafts cannot be read "
            "exactly; run it with transformers' generate"
        )
    if target.has_states:
        target.reads_trees = False
        _check_states(target)
        return
    tree = CheckedRead.of(target, text, CHECK_TREE, together=True)
    on_tree = tree.error(target)
    # an ALiBi that counts slots is right for chains, and wrong for trees by hardly more than half
    # precision blurs
    target.reads_trees = bool(target.group.number(on_tree <= max(tolerance, 3 * on_chain)))
    enough, target.fast = max(tolerance, 3 * on_tree), fast
    if fast is not None and fast.fused is not None and not tree.error(target) <= enough:
        fast.fused = None
    if fast is not None and fast.fused is None and not tree.error(target) <= enough:
        target.fast = None


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
        except FAILURES:
            return float("inf")
        return float(((logits - self.logits).abs().max() / self.logits.abs().max()).detach())


def _check_states(target: Target) -> None:
    """Refuse a target whose rows cannot go on from states; find out whether it may read single
    tokens from them: no family rounds those much worse, but by rounding their time step
    otherwise."""
    target.steps = False
    try:
        worst, target.steps = _error_behind_states(target), True
        enough = max(4 * worst, 0.3 * target.tolerance)
        target.steps = _error_behind_states(target) <= enough
    except FAILURES:
        worst = float("inf")
    if not worst <= 6 * target.tolerance:
        raise UnsupportedModel(
            f"{type(target.model).__name__} gives other logits when it goes on from the states it "
            "kept than on its own; run it with transformers' generate"
        )


def _error_behind_states(target: Target) -> float:
    """The largest difference of logits in rounds of two rows, read at once and node by node,
    relative to the largest."""
    length = sum(max(counts) for _, counts in ROUNDS)
    text = target.check_text(2 * length).view(2, length)
    own = target.model(input_ids=text, use_cache=False).logits.double()
    cache, error = target.plain_cache(2, length + 8), 0.0
    for step in (5, 1):
        cache.select([])
        start = torch.zeros(2, 1, dtype=torch.int64, device=text.device)
        for width, counts in ROUNDS:
            count = torch.tensor(counts, device=text.device)
            node = torch.arange(width, device=text.device)
            place, right = (start + node).clamp(max=length - 1), node < count[:, None]
            tokens = (text.gather(1, place) + (~right).long()) % target.vocab_size
            logits = torch.cat([
                target.read(TokenTree.chain(tokens[:, : first + step]), cache, first=first).logits
                for first in range(0, width, step)
            ], 1)
            cache.keep(None, count)
            wanted = own[torch.arange(2, device=text.device)[:, None], place]
            error = max(error, float((logits.double() - wanted)[right].abs().max()))
            start = start + count[:, None]
    return error / float(own.abs().max())
