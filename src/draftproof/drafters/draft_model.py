"""Speculative sampling with a draft model (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

The draft model has the interface of a target, and its own cache. It
proposes a chain, or a tree of any static shape, level by level: each node's children are the tokens
that the target is likeliest to choose there, given its noise. When the rule wants drawn tokens
(Leviathan et al., algorithm 1), children are drawn without replacement and carry their
probabilities.

`SelfDraft` needs no second model: the target drafts with quantised weights, which nearly always
agree with its own, or with its first layers (Draft & Verify 2309.08168; LayerSkip 2404.16710).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import inf, log
from typing import Any, Protocol

import torch
from torch import Tensor

from draftproof.cache.kv_cache import CHUNKS, KVCache, chunk_of
from draftproof.core.messages import Commit, Frontier, Reading
from draftproof.core.noise import Role
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.base import Drafter, over_vocabulary
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.model import variants
from draftproof.model.target import Target
from draftproof.weights.quantize import KINDS

WIDTHS = (2, 4, 8)
"""Widths of the first read of a round: the root, and the tokens committed since the last read."""
CONFIDENCE_SCALE = 1.4
"""The scale for `Sampler.confidence` at which probabilities are calibrated."""
SELF = "self-"
"""Names of self-drafts begin with this."""


class Model(Protocol):
    """What the drafter needs of a language model; `model.target.Target` is one."""

    name: str
    context: int

    @property
    def vocab_size(self) -> int: ...
    @property
    def reads_trees(self) -> bool: ...
    def new_cache(self, rows: int, capacity: int) -> KVCache: ...
    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False
    ) -> Reading: ...


class DraftModel(Drafter):
    """Drafts with a smaller language model that shares the target's token ids.

    Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv
    2302.01318, algorithm 2). `draftproof.load` makes one of `assistant_model`.

    Args:
        model: The draft model, as a `Target`.
        vocab_size: Tokens of the target; draft logits are padded or cut to it.
        shape: The tree to draft; None drafts a chain as long as the budget.

    Raises:
        DrafterMismatch: A tree is to be drafted, and the draft model reads only chains exactly.

    Example:
        >>> engine = dp.load("demo", assistant_model="demo-draft")
    """

    name = "draft-model"
    max_draft_tokens = 10
    has_kv_cache = True

    def __init__(self, model: Model, vocab_size: int, shape: TreeShape | None = None) -> None:
        self.chains = shape is None or shape.is_chain
        if not self.chains and not model.reads_trees:
            raise DrafterMismatch(
                f"draft model {model.name} cannot read trees exactly; draft chains with it"
            )
        self.model, self.vocab_size, self.shape = model, vocab_size, shape
        if shape is not None:
            self.max_draft_tokens = len(shape) - 1
        self.cache: KVCache | None = None
        self.lag: list[int] = []            # per row, tokens that may be missing in the cache
        self.scratch: int | Tensor | None = None    # nodes of the last proposal that were read

    def unread(self, pending: int = 0) -> int:
        return sum(max(0, lag + pending - 1) for lag in self.lag)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.cache = self.model.new_cache(rows, capacity)
        self.lag, self.scratch = [], None

    def begin(self, rows: Sequence[int], sources: Sequence[object]) -> None:
        reader: Any = self.model
        if getattr(reader, "is_encoder_decoder", False):
            reader.begin(self._cache(rows[-1] + 1, rows[0]), sources)

    def observe(self, commit: Commit) -> None:
        width = commit.tokens.shape[1]
        self.lag += [0] * (commit.rows[-1] + 1 - len(self.lag))
        if self.scratch is None:
            for row in commit.rows:
                self.lag[row] += width
            return
        lag = self._keep(self._cache(len(commit.rows)), commit)
        self.lag, self.scratch = [lag] * len(self.lag), None

    def _keep(self, cache: KVCache, commit: Commit) -> int:
        """Commit the nodes that were read of the last proposal; return how many tokens of a row may
        be missing."""
        assert self.scratch is not None
        if self.chains:
            cache.keep(None, commit.count.clamp(max=self.scratch))
        else:
            index = torch.arange(commit.tokens.shape[1], device=commit.nodes.device)
            accepted = index < commit.count[:, None]
            cache.keep(commit.nodes, ((commit.nodes < self.scratch) & accepted).sum(1))
        return 1

    def propose(self, frontier: Frontier) -> TokenTree:
        most = frontier.max_nodes if self.chains else frontier.max_draft_tokens
        shape = (self.shape or TreeShape.chain(most)).within(most)
        if len(shape) == 1:
            return TokenTree.root(frontier.prefix.root)
        if self.chains and not frontier.needs_draft_probs:
            tree = self._in_one_call(frontier, len(shape) - 1)
            if tree is not None:
                return tree
        return self._level_by_level(frontier, shape, most)

    def select(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.select(rows)
        self.lag = [self.lag[row] for row in rows]

    def _in_one_call(self, frontier: Frontier, steps: int) -> TokenTree | None:
        """The roots and the chains after them, if the model can draft them in one call."""
        prefix, chain, rows = frontier.prefix, getattr(self.model, "chain", None), len(self.lag)
        if chain is None or prefix.longest is None or self.model.vocab_size != self.vocab_size:
            return None
        arguments = (prefix, steps, self.vocab_size, frontier.min_confidence, CONFIDENCE_SCALE)
        sampling = frontier.sampler.draft_sampling(*arguments)
        if sampling is None:
            return None
        width, cache = 1 + self._lacking(prefix, frontier.max_nodes), self._cache(rows)
        cache.set_max_length(prefix.longest)
        drafted = chain(prefix, width, cache, steps, frontier.max_draft_tokens * rows, sampling)
        if drafted is None:
            return None
        self.lag, self.scratch = [0] * rows, drafted.read
        tree = TokenTree.chain(drafted.tokens)
        return replace(tree, budget_rank=drafted.budget_rank) if frontier.row_limit else tree

    def _level_by_level(self, frontier: Frontier, shape: TreeShape, most: int) -> TokenTree:
        root, sampler = frontier.prefix.root[:, None], frontier.sampler
        tokens, probs = root, []
        # log-probabilities of paths
        scores = torch.zeros(root.shape, dtype=torch.float32, device=root.device)
        live = torch.ones_like(root, dtype=torch.bool)
        logits = self._read_root(frontier.prefix, most)
        for depth, level in enumerate(shape.levels[1:], start=1):
            above = shape.levels[depth - 1]
            tree = TokenTree.shaped(tokens, shape.within(tokens.shape[1] - 1))
            if depth > 1:
                read = self.model.read(tree, self._cache(len(root)), first=above.start)
                logits = over_vocabulary(read.logits, self.vocab_size)
                self.scratch = above.stop
            paths = Paths(frontier.prefix, tree, first=above.start)
            count = max(shape.ranks[node] for node in level) + 1
            if frontier.needs_draft_probs:                         # Gumbel top-k: no replacement
                steps, children = sampler.gumbel_logits(logits, paths, Role.DRAFT).topk(count, -1)
            else:
                steps, children = sampler.best(logits, paths, count, CONFIDENCE_SCALE)
            place, rank = shape.children(depth, root.device)
            steps, children = steps[:, place, rank], children[:, place, rank]
            parents = tree.tokens[:, above.start :][:, place]
            there = (steps > -torch.inf) & (parents != ABSENT) & live
            tokens = torch.cat([tokens, torch.where(there, children, ABSENT)], 1)
            if frontier.needs_draft_probs:
                probs.append(sampler.probs(logits, paths)[:, place].nan_to_num(0))   # none possible
            elif frontier.min_confidence and self.chains:
                steps = torch.where(there, scores[:, -1:] + steps, -torch.inf)
                scores = torch.cat([scores, steps], 1)
                nodes, drafted = frontier.max_draft_tokens * len(root), scores[:, 1:].flatten()
                least = float(drafted.topk(nodes).values[-1]) if len(drafted) >= nodes else -inf
                live = scores[:, -1:] >= max(log(frontier.min_confidence), least)
                if not bool(live.any()):
                    break
        drawn = torch.cat([torch.zeros_like(probs[0][:, :1]), *probs], 1) if probs else None
        confidence = scores.exp() if scores.shape == tokens.shape else None
        tree = TokenTree.shaped(tokens, shape.within(tokens.shape[1] - 1), drawn, confidence)
        if frontier.row_limit and self.chains:
            return tree.within_budget(frontier.max_draft_tokens)
        return tree

    def _read_root(self, prefix: Prefix, budget: int) -> Tensor:
        """[B, 1, V] logits at the root, after reading whatever is missing before it."""
        lacking, rows = self._lacking(prefix, budget), len(self.lag)
        width = next(width for width in WIDTHS if lacking < width)
        cache = self._cache(rows)
        longest = prefix.longest if prefix.longest is not None else prefix.tokens.shape[1]
        cache.set_max_length(longest)
        gap = prefix.position - cache.lengths                   # [B] committed tokens still missing
        place = cache.lengths[:, None] + torch.arange(width, device=gap.device)
        there = place <= prefix.position[:, None]
        tokens = torch.where(there, prefix.tokens.gather(1, place), ABSENT)
        logits = self.model.read(TokenTree.chain(tokens), cache).logits
        cache.keep(None, gap)
        self.lag, self.scratch = [0] * rows, 1
        last = gap[:, None, None].expand(-1, 1, logits.shape[-1])
        return over_vocabulary(logits.gather(1, last), self.vocab_size)

    def _lacking(self, prefix: Prefix, budget: int) -> int:
        """The most tokens that a row lacks before the root. If there are too many, all but one are
        read here."""
        lacking = max(self.lag)
        fits = max(width for width in WIDTHS if width <= budget + 3)    # fits the scratch
        if lacking > 1 and lacking >= fits:
            self._catch_up(prefix)
            lacking, self.lag = 1, [min(lag, 1) for lag in self.lag]
        return lacking

    def _catch_up(self, prefix: Prefix) -> None:
        """Read the missing tokens of rows, except the last committed one, in chunks. Neighbours
        that
        lack equally many are read together. With static shapes: all rows, in chunks of static size.
        """
        static, rows, end = prefix.longest is None, len(self.lag), prefix.tokens.shape[1]
        lacking = [max(self.lag)] * rows if static else self.lag
        for lag, group in groupby(range(rows), key=lacking.__getitem__):
            members = list(group)
            lot = slice(members[0], members[-1] + 1)
            cache, position = self._cache(lot.stop, lot.start), prefix.position[lot, None]
            if static:
                cache.set_max_length(end)
            for start in range(0, lag - 1, CHUNKS[-1]):
                width = chunk_of(lag - 1 - start, static)
                place = cache.lengths[:, None] + torch.arange(width, device=position.device)
                there = place < position
                text = prefix.tokens[lot].gather(1, place.clamp(max=end - 1))
                chunk = TokenTree.chain(torch.where(there, text, ABSENT))
                self.model.read(chunk, cache, last_only=True)
                cache.keep(None, there.sum(1))

    def _cache(self, stop: int, start: int = 0) -> KVCache:
        assert self.cache is not None, "start() comes before the first commit"
        return self.cache.rows(start, stop)


class SelfDraft(DraftModel):
    """Drafts with the target's own weights and a cache of its own. Unquantised weights are shared.

    Draft & Verify (arXiv 2309.08168) leaves out layers, LayerSkip (arXiv 2404.16710) takes the
    first ones.

    Args:
        target: The target; unquantised, packed or not, if `quantize` is given.
        layers: Draft with this many first layers; None: with all.
        quantize: "int8" or "int4"; with neither this nor `layers`, the target itself drafts.
        shape: As for `DraftModel`.

    Example:
        >>> engine = dp.load(folder, drafter="self-int4")
    """

    name = "self-draft"

    def __init__(
        self, target: Target, *, layers: int | None = None, quantize: str | None = None,
        shape: TreeShape | None = None,
    ) -> None:  # fmt: skip
        draft = target if layers is None else variants.first_layers(target, layers)
        draft = draft if quantize is None else variants.quantized(draft, quantize)
        super().__init__(draft, target.vocab_size, shape)


def self_draft_options(name: str) -> tuple[int | None, str | None]:
    """Layers and quantisation of "self-layers:4", "self-int8" or "self-int4"; else BadInput."""
    kind, _, count = name.removeprefix(SELF).partition(":")
    if kind == "layers" and count.isdecimal():
        return int(count), None
    if kind in KINDS and not count:
        return None, kind
    raise BadInput(
        f"the drafter was {name!r}; self-drafting is called self-int8, self-int4, or "
        "self-layers:N"
    )
