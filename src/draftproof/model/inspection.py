"""The check at load: a target's reads are compared with the model's own forward without a cache,
and refused if they do not agree. The verdict on files is kept for the next start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from draftproof.cache.layout import FAILURES
from draftproof.cache.state_cache import StateCache
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.errors import UnsupportedModel
from draftproof.model.facts import Facts
from draftproof.weights.disk_cache import Kept, kept
from draftproof.weights.quantize import is_quantized
from draftproof.weights.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftproof.model.module_target import ModuleTarget

CHECK_TREE = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])
"""The tree read at load."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""By dtype. Models in float64 compute some parts in float32."""
ROUNDS = ((3, (3, 3)), (1, (1, 1)), (4, (2, 4)), (4, (4, 1)), (1, (1, 1)), (5, (2, 3)), (2, (2, 2)))
"""Nodes read of each of two rows, and how many of them are committed; the others are rejected."""


def inspect(target: ModuleTarget) -> Facts:
    """Find out whether a target reads trees exactly, and by which forward.

    Args:
        target: A target that uses its model's own forward; only its layout is known.

    Returns:
        The result, or the earlier result for the same files.

    Raises:
        UnsupportedModel: The target does not even read chains exactly.
    """
    alone, facts = target.group.is_single, target.facts
    is_own_check = alone and not target.is_encoder_decoder
    place = kept(target.model, "check", changed=True) if is_own_check else Kept()
    known = place.read()
    if known is not None:
        facts = replace(facts, **known)
    else:
        with place.save_if_slow() as verdict:
            facts = verify_forward(target)
            verdict |= {name: getattr(facts, name)
                        for name in ("reads_trees", "single_steps", "fast", "fused")}
    facts = for_its_cache(target, facts)
    if (facts.has_states or target.is_encoder_decoder) and not alone:
        what = "an encoder's output" if target.is_encoder_decoder else "states"
        raise UnsupportedModel(
            f"{target.name} keeps {what}, and nothing shards that here; run it on one device"
        )
    return facts


def for_its_cache(target: ModuleTarget, facts: Facts) -> Facts:
    """The facts of a target with the cache that it was asked to have: over states, our attention
    reads keys and values only as the model computes them, and without it trees lose their bits."""
    chains = facts.has_states and target.kv_cache is not None
    return replace(facts, reads_trees=False) if chains else facts


def tolerance_of(model: PreTrainedModel) -> float:
    """The tolerance for logits, relative to the largest of the model's own."""
    rough = is_quantized(model) and model.dtype != torch.float16
    return TOLERANCES[torch.bfloat16 if rough else model.dtype]


def verify_forward(target: ModuleTarget) -> Facts:
    """Compare a target's reads with the model's own forward without a cache.

    Our forward is used, with and without kernels, where it agrees on a tree as closely as a read
    through the cache does, and otherwise the model's own; a target that does not even read chains
    exactly is refused.
    """
    model, tolerance = target.model, target.tolerance
    stock = target.with_facts(replace(target.facts, reads_trees=True, fast=False, fused=False))
    # 8-bit activations amplify differences of last bits; the original was checked when loaded
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        tolerance *= 4
    quantized: Any = getattr(model.config, "quantization_config", None)
    if getattr(quantized, "load_in_8bit", False) and quantized.llm_int8_threshold > 0:
        raise UnsupportedModel(
            f"{target.name} is in bitsandbytes' 8 bits with outliers, where a token depends on "
            "those read with it; load it with llm_int8_threshold=0, or in 4 bits"
        )
    text = target.check_text(10)
    chain = ReferenceForward.of(stock, text, TreeShape.chain(4), together=False)
    on_chain = chain.error(stock)
    if not on_chain <= 6 * tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__} places tokens, or masks them, by what its own cache holds, "
            "looks at later ones, or quantises what is read together: drafts cannot be read "
            "exactly; run it with transformers' generate"
        )
    if target.has_states:
        single = _reads_single_steps(stock)
        facts = replace(stock.facts, reads_trees=True, single_steps=single)
        trees = _branches(target.with_facts(facts), text, max(tolerance, 3 * on_chain))
        return replace(facts, reads_trees=trees)
    tree = ReferenceForward.of(stock, text, CHECK_TREE, together=True)
    on_tree = tree.error(stock)
    # ALiBi by slots is right for chains, and wrong for trees by hardly more than half precision's
    # rounding
    trees = bool(target.group.broadcast_int(on_tree <= max(tolerance, 3 * on_chain)))
    facts, enough = replace(stock.facts, reads_trees=trees), max(tolerance, 3 * on_tree)
    for fused in (True, False):
        short = target.with_facts(replace(facts, fast=True, fused=fused))
        if short.fast is None:
            break
        if (short.ragged_batches or not fused) and tree.error(short) <= enough:
            return short.facts
    return facts


class ReferenceForward(NamedTuple):
    """A tree after committed tokens `lead` [1, L], and the model's own logits [N, V] after each
    of its nodes."""

    lead: Tensor
    tree: TokenTree
    logits: Tensor

    @classmethod
    def of(
        cls, target: ModuleTarget, text: Tensor, shape: TreeShape, *, together: bool
    ) -> ReferenceForward:
        """together: read all paths as one batch, which is faster and shows less of the rounding
        errors."""
        nodes, lead = len(shape), text[:3]
        tree = TokenTree.shaped(text[None, 3 : 3 + nodes], shape)
        paths = [
            torch.cat([lead, tree.tokens[0][tree.ancestors[0, node]]]) for node in range(nodes)
        ]
        # later tokens are not seen
        padded = nn.utils.rnn.pad_sequence(paths, batch_first=True)
        parts = [padded] if together else [path[None] for path in paths]
        read = [row for part in parts for row in target.own_logits(part)]
        last = [row[len(path) - 1] for row, path in zip(read, paths, strict=True)]
        return cls(lead[None], tree, torch.stack(last).double())

    def error(self, target: ModuleTarget) -> float:
        """The error of the target's read relative to the logits of the model's own forward."""
        cache = target.check_cache(32)
        try:
            target.read(TokenTree.chain(self.lead), cache)
            cache.keep(None, torch.full_like(cache.lengths, self.lead.shape[1]))
            with target.group.raise_on_rank_failure():
                logits = target.read(self.tree, cache).logits[0].double()
        except FAILURES:
            return float("inf")
        return float(((logits - self.logits).abs().max() / self.logits.abs().max()).detach())


def _branches(target: ModuleTarget, text: Tensor, tolerance: float) -> bool:
    """Whether a target with states reads trees: it knows the states after each node, its logits are
    the model's own, and in half precision on a CPU they have the same bits as in chains."""
    try:
        reference = ReferenceForward.of(target, text, CHECK_TREE, together=True)
        if not reference.error(target) <= tolerance:
            return False
        cache, tree = target.check_cache(64), reference.tree
        assert isinstance(cache, StateCache)
        target.read(TokenTree.chain(reference.lead), cache)
        cache.keep(None, torch.full_like(cache.lengths, reference.lead.shape[1]))
        logits = target.read(tree, cache).logits
        if not cache.knows_every_state:
            return False
        if target.dtype in (torch.float32, torch.float64) or target.device.type != "cpu":
            return True
        above = set(tree.parents[0].tolist())
        for leaf in (node for node in range(tree.tokens.shape[1]) if node not in above):
            path = tree.ancestors[0, leaf].nonzero()[:, 0]
            chain = target.read(TokenTree.chain(tree.tokens[:, path]), cache).logits
            if not torch.equal(chain, logits[:, path]):
                return False
        return True
    except FAILURES:
        return False


def _reads_single_steps(target: ModuleTarget) -> bool:
    """Whether a target may read single tokens from its states; some families round the time step of
    single tokens differently. Refuses a target whose rows cannot continue from states."""
    single = False
    try:
        worst = _error_after_states(
            target.with_facts(replace(target.facts, single_steps=False))
        )
        enough = max(4 * worst, 0.3 * target.tolerance)
        single = _error_after_states(
            target.with_facts(replace(target.facts, single_steps=True))
        ) <= enough
    except FAILURES:
        worst = float("inf")
    if not worst <= 6 * target.tolerance:
        raise UnsupportedModel(
            f"{type(target.model).__name__} gives other logits when it goes on from the states it "
            "kept than on its own; run it with transformers' generate"
        )
    return single


def _error_after_states(target: ModuleTarget) -> float:
    """The largest difference between logits of two rows read at once and node by node, relative to
    the largest logit."""
    length = sum(max(counts) for _, counts in ROUNDS)
    text = target.check_text(2 * length).view(2, length)
    expected = target.model(input_ids=text, use_cache=False).logits.double()
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
            wanted = expected[torch.arange(2, device=text.device)[:, None], place]
            error = max(error, float((logits.double() - wanted)[right].abs().max()))
            start = start + count[:, None]
    return error / float(expected.abs().max())
