"""The check at load: what a target reads is compared with the model's own forward without a cache;
what does not agree is refused. The verdict on files is kept for the next start."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.errors import UnsupportedModel
from draftproof.model.fast_forward import FastForward
from draftproof.model.kept import kept
from draftproof.model.layout import Layout
from draftproof.model.quantize import is_quantized
from draftproof.model.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from draftproof.model.target import Target

CHECK_TREE = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])
"""The tree read at load."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""float64 has float32 inside."""
STEPS = 4
"""By how much more a model may differ whose activations we round to 8 bits, which makes steps of
last bits. Its original was examined when it was loaded."""
FAILURES = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError)
"""What a read may raise that a model does not understand."""
ROUNDS = ((3, (3, 3)), (1, (1, 1)), (4, (2, 4)), (4, (4, 1)), (1, (1, 1)), (5, (2, 3)), (2, (2, 2)))
"""Tokens read of each of two rows, and how many of them are committed; what is not is astray."""
CLOSE = 4.0
"""Reads with single steps may be so many times as far from the model's own forward."""
FLOOR = 0.3
"""A share of the tolerance that is rounding, whatever blocks do."""


def check(target: Target) -> None:
    """Find out what a target stores, whether it reads trees exactly, and by which forward."""
    alone = target.group.alone
    known = kept(target.model, "check", changed=True) if alone and not target.encodes else None
    verdict = known.read() if known is not None else None
    if verdict is None:
        with known.if_slow() if known else nullcontext(dict[str, Any]()) as facts:
            target.layout = target.find_layout()
            target.vocab_size = target.layout.vocab
            target.examine(_fast_forward(target))
            facts |= {"layout": target.layout.as_json(), "reads_trees": target.reads_trees,
                      "fast": target.fast is not None, "fused": target.skips_absent,
                      "steps": target.steps}
    else:
        facts = verdict[0]
        target.layout, target.steps = Layout.from_json(facts["layout"]), facts["steps"]
        target.vocab_size, target.reads_trees = target.layout.vocab, facts["reads_trees"]
        target.fast = _fast_forward(target) if facts["fast"] else None
        if target.fast is not None and not facts["fused"]:
            target.fast.fused = None
    if (target.has_states or target.encodes) and not alone:
        what = "an encoder's output" if target.encodes else "states"
        raise UnsupportedModel(
            f"{target.name} keeps {what}, and nothing shards that here; run it on one device"
        )


def tolerance_of(model: PreTrainedModel) -> float:
    """How far logits may be from the model's own, relative to the largest."""
    rough = is_quantized(model) and model.dtype != torch.float16
    return TOLERANCES[torch.bfloat16 if rough else model.dtype]


def _fast_forward(target: Target) -> FastForward | None:
    """The fast forward of a target, unexamined, if it is of a family that has one."""
    if not (target.group.alone and FastForward.fits(target.model)):
        return None
    return FastForward(target.model, target.layout.windows, target.context)


def examine(target: Target, fast: FastForward | None) -> None:
    """Let a target read by `fast` if that agrees with the model's own forward on a tree as closely
    as a read through the cache does, and by the model's own if not; refuse one that reads not even
    chains exactly.
    """
    model, tolerance = target.model, target.tolerance
    target.fast = None
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
    on_chain = chain.error(target)
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
        target.reads_trees = False
        check_states(target)
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


def check_states(target: Target) -> None:
    """Refuse a target whose rows cannot go on from states; find out whether it may read single
    tokens from them."""
    target.steps = False
    try:
        worst, target.steps = _error(target), True
        target.steps = _error(target) <= max(CLOSE * worst, FLOOR * target.tolerance)
    except FAILURES:
        worst = float("inf")
    if not worst <= 6 * target.tolerance:
        raise UnsupportedModel(
            f"{type(target.model).__name__} gives other logits when it goes on from the states it "
            "kept than on its own; run it with transformers' generate"
        )


def _error(target: Target) -> float:
    """The largest difference of logits in rounds of two rows, read at once and node by node."""
    dice = torch.Generator().manual_seed(1)
    length = max(sum(counts[row] for _, counts in ROUNDS) for row in range(2))
    text = torch.randint(target.vocab_size, (2, length), generator=dice).to(target.device)
    own = target.model(input_ids=text, use_cache=False).logits.double()
    cache, error = target.plain_cache(2, length + 8), 0.0
    for one_by_one in (False, True):
        cache.select([])
        at = [0, 0]
        for width, counts in ROUNDS:
            tree = _drafted(text, at, width, counts, target.vocab_size)
            parts = range(1, width + 1) if one_by_one and width < 5 else [width]
            logits, first = [], 0
            for nodes in parts:
                part = TokenTree.chain(tree.tokens[:, :nodes])
                logits.append(target.read(part, cache, first=first).logits.double())
                first = nodes
            cache.keep(None, torch.tensor(counts, device=target.device))
            error = max(error, _distance(torch.cat(logits, 1), own, at, counts))
            at = [place + count for place, count in zip(at, counts, strict=True)]
    return error


def _drafted(
    text: Tensor, at: list[int], width: int, counts: tuple[int, ...], vocab: int
) -> TokenTree:
    """Chains of which the first `counts` nodes are of the text, behind `at` tokens of each row."""
    place = torch.tensor(at, device=text.device)[:, None] + torch.arange(width, device=text.device)
    tokens = text.gather(1, place.clamp(max=text.shape[1] - 1))
    astray = torch.arange(width) >= torch.tensor(counts)[:, None]
    return TokenTree.chain(torch.where(astray.to(text.device), (tokens + 1) % vocab, tokens))


def _distance(logits: Tensor, own: Tensor, at: list[int], counts: tuple[int, ...]) -> float:
    """How far the logits of committed nodes are from those of the whole text, relative to these."""
    return max(
        float((logits[row, :count] - own[row, at[row] : at[row] + count]).abs().max())
        for row, count in enumerate(counts)
    ) / float(own.abs().max())
