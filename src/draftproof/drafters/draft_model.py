"""Speculative sampling with a draft model (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

The draft model reads through the same interface as the target and owns a cache of its own. It proposes a chain, or
a tree of any static shape: level by level, each node's children are the best of its race. When the rule wants drawn
tokens, children are drawn without replacement (Gumbel top-k) and carry their law.

`SelfDraft` needs no second model: the target drafts with quantised weights, which agree with its own nearly always, or
with its first layers (Draft & Verify 2309.08168; LayerSkip 2404.16710), and shares whatever is not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import log
from typing import Any, Protocol

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier, Reading
from draftproof.core.noise import Role
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.tree import ABSENT, CHUNKS, TokenTree, TreeShape, padded
from draftproof.drafters.base import Drafter, over_vocabulary
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.model.quantize import KINDS
from draftproof.model.target import Target

WIDTHS = (2, 4, 8)
"""How many tokens the first read of a round takes: the root, and what was committed without the draft."""
CONFIDENCE_SCALE = 1.4
"""How much is made of a lead in the race (`Sampler.confidence`): then tokens taken for so likely to be chosen are chosen as often."""


class Cache(Protocol):
    """What the drafter needs of a KV cache."""

    lengths: Tensor

    def keep(self, nodes: Tensor | None, count: Tensor) -> None: ...
    def select(self, rows: Sequence[int]) -> None: ...
    def rows(self, start: int, stop: int) -> Cache: ...
    def bound(self, longest: int) -> None: ...


class Model(Protocol):
    """What the drafter needs of a language model; `target.Target` is one."""

    name: str
    vocab_size: int
    context: int
    reads_trees: bool

    def new_cache(self, rows: int, capacity: int) -> Any: ...
    def read(self, tree: TokenTree, cache: Any, *, first: int = 0, last_only: bool = False) -> Reading: ...


class DraftModel(Drafter):
    """Drafts with a smaller language model that shares the target's token ids.

    model: the draft, wrapped as a `Target`. vocab_size: of the target; draft logits are padded or cut to it.
    shape: the tree to draft; None drafts a chain as long as the budget.
    """

    name = "draft-model"
    default_budget = 10
    has_kv_cache = True

    def __init__(self, model: Model, vocab_size: int, shape: TreeShape | None = None) -> None:
        if shape is not None and not shape.is_chain and not model.reads_trees:
            raise DrafterMismatch(f"draft model {model.name} cannot read trees exactly; draft chains with it")
        children = max(shape.ranks, default=0) + 1 if shape is not None else 1
        if children > vocab_size:
            raise DrafterMismatch(f"a tree with {children} children of one node was asked of {vocab_size} tokens; draft fewer")
        self.model, self.vocab_size, self.shape = model, vocab_size, shape
        if shape is not None:
            self.default_budget = len(shape) - 1
        self.cache: Cache | None = None
        self.behind: list[int] = []         # per row, at most so many committed tokens are not in the cache
        self.scratch: int | Tensor | None = None     # nodes of the last proposal, of each row, in the cache's scratch

    def unread(self, pending: int = 0) -> int:
        return sum(max(0, behind + pending - 1) for behind in self.behind)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.cache = self.model.new_cache(rows, capacity)
        self.behind, self.scratch = [], None

    def observe(self, commit: Commit) -> None:
        width = commit.tokens.shape[1]
        for row in commit.rows:
            if row == len(self.behind):
                self.behind.append(0)
        if self.scratch is not None:          # the commit answers the proposal: keep what was read of it
            cache = self._cache(len(commit.rows))
            if self.shape is None or self.shape.is_chain:
                cache.keep(None, commit.count.clamp(max=self.scratch))
            else:
                stands = torch.arange(width, device=commit.nodes.device) < commit.count[:, None]
                cache.keep(commit.nodes, ((commit.nodes < self.scratch) & stands).sum(1))
            self.behind = [1] * len(self.behind)
            self.scratch = None
            return
        for row in commit.rows:
            self.behind[row] += width

    def propose(self, frontier: Frontier) -> TokenTree:
        chains = self.shape is None or self.shape.is_chain
        room = frontier.room if chains else frontier.budget
        shape = (self.shape or TreeShape.chain(room)).within(room)
        if chains and not frontier.drawn and (tree := self._at_once(frontier, len(shape) - 1)) is not None:
            return tree
        root = frontier.prefix.root[:, None]
        if len(shape) == 1:
            return TokenTree.chain(root)
        tokens, laws, confidence = root, [], torch.zeros(root.shape, device=root.device)
        live = torch.ones_like(root, dtype=torch.bool)
        logits = self._read_root(frontier.prefix, room)
        for depth, level in enumerate(shape.levels[1:], start=1):
            above = shape.levels[depth - 1]
            tree = self._tree(tokens, shape)
            if depth > 1:
                read = self.model.read(tree, self._cache(len(root)), first=above.start)
                logits = over_vocabulary(read.logits, self.vocab_size)
                self.scratch = above.stop
            paths = Paths(frontier.prefix, tree, first=above.start)
            count = max(shape.ranks[node] for node in level) + 1
            scores, children = self._children(frontier, logits, paths, count)
            parents, ranks = shape.births(depth, root.device)
            last = tree.tokens[:, above.start :]
            if count > 1 or len(above) > 1:
                scores, children, last = scores[:, parents, ranks], children[:, parents, ranks], last[:, parents]
            else:
                scores, children = scores[..., 0], children[..., 0]
            there = (scores > -torch.inf) & (last != ABSENT) & live
            tokens = torch.cat([tokens, torch.where(there, children, ABSENT)], 1)
            if frontier.drawn:
                laws.append(frontier.sampler.probs(logits, paths)[:, parents])
            elif frontier.floor and chains:
                confidence = torch.cat([confidence, torch.where(there, confidence[:, -1:] + scores, -torch.inf)], 1)
                live = confidence[:, -1:] >= max(log(frontier.floor), _least(confidence[:, 1:], frontier.budget * len(root)))
                if not bool(live.any()):
                    break
        drawn = torch.cat([torch.zeros_like(laws[0][:, :1]), *laws], 1) if frontier.drawn else None
        known = confidence.exp() if confidence.shape == tokens.shape else None
        tree = TokenTree.shaped(tokens, shape.within(tokens.shape[1] - 1), drawn, known)
        return tree.shared(frontier.budget) if frontier.most and chains else tree

    def select(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.select(rows)
        self.behind = [self.behind[row] for row in rows]

    def _at_once(self, frontier: Frontier, steps: int) -> TokenTree | None:
        """The roots and the chains behind them, if the model can draft them in one call."""
        prefix, draft, rows = frontier.prefix, getattr(self.model, "chain", None), len(self.behind)
        if not steps or draft is None or prefix.longest is None or self.model.vocab_size != self.vocab_size:
            return None
        draft_sampling = frontier.sampler.draft_sampling(prefix, steps, self.vocab_size, frontier.floor, CONFIDENCE_SCALE)
        if draft_sampling is None:
            return None
        width, cache = 1 + self._lacking(prefix, frontier.room), self._cache(rows)
        cache.bound(prefix.longest)
        found = draft(prefix, width, cache, steps, frontier.budget * rows, draft_sampling)
        if found is None:
            return None
        self.behind, self.scratch = [0] * rows, found.read
        tree = TokenTree.chain(found.tokens)
        return replace(tree, turns=found.turns) if frontier.most else tree

    def _children(self, frontier: Frontier, logits: Tensor, paths: Paths, count: int) -> tuple[Tensor, Tensor]:
        """Scores and tokens [B, n, count]: the best of each node's race, or so many drawn without replacement."""
        if not frontier.drawn:
            return frontier.sampler.best(logits, paths, count, CONFIDENCE_SCALE)
        best = frontier.sampler.gumbel_logits(logits, paths, Role.DRAFT).topk(count, -1)
        return best.values, best.indices

    def _tree(self, tokens: Tensor, shape: TreeShape) -> TokenTree:
        """The levels drafted so far."""
        return TokenTree.shaped(tokens, shape.within(tokens.shape[1] - 1))

    def _read_root(self, prefix: Prefix, budget: int) -> Tensor:
        """[B, 1, V] logits behind the root, after reading whatever is missing before it."""
        lacking, rows = self._lacking(prefix, budget), len(self.behind)
        width = next(width for width in WIDTHS if lacking < width)
        cache = self._cache(rows)
        cache.bound(prefix.longest if prefix.longest is not None else prefix.tokens.shape[1])
        gap = prefix.position - cache.lengths                                # [B] committed tokens still missing
        place = cache.lengths[:, None] + torch.arange(width, device=gap.device)
        tokens = torch.where(place <= prefix.position[:, None], prefix.tokens.gather(1, place), ABSENT)
        logits = self.model.read(TokenTree.chain(tokens), cache).logits
        cache.keep(None, gap)
        self.behind, self.scratch = [0] * rows, 1
        return over_vocabulary(logits.gather(1, gap[:, None, None].expand(-1, 1, logits.shape[-1])), self.vocab_size)

    def _lacking(self, prefix: Prefix, budget: int) -> int:
        """How many tokens rows lack at most before the root; where that is too many at once, all but one are read here."""
        lacking = max(self.behind)
        if lacking > 1 and lacking >= max(width for width in WIDTHS if width <= budget + 3):  # as the scratch has room
            self._catch_up(prefix)
            lacking, self.behind = 1, [min(behind, 1) for behind in self.behind]
        return lacking

    def _catch_up(self, prefix: Prefix) -> None:
        """Read what rows lack, leaving at most one committed token unread: in chunks, neighbours that lack as much together.

        In closed shapes all rows together, in chunks of closed sizes.
        """
        closed, rows = prefix.longest is None, len(self.behind)
        lacking = [max(self.behind)] * rows if closed else self.behind
        for behind, group in groupby(range(rows), key=lacking.__getitem__):
            members = list(group)
            lot = slice(members[0], members[-1] + 1)
            cache, position = self._cache(lot.stop, lot.start), prefix.position[lot, None]
            if closed:
                cache.bound(prefix.tokens.shape[1])
            for start in range(0, behind - 1, CHUNKS[-1]):
                left = behind - 1 - start
                width = padded(left) if closed else min(left, CHUNKS[-1])
                place = cache.lengths[:, None] + torch.arange(width, device=position.device)
                there = place < position
                text = prefix.tokens[lot].gather(1, place.clamp(max=prefix.tokens.shape[1] - 1))
                self.model.read(TokenTree.chain(torch.where(there, text, ABSENT)), cache, last_only=True)
                cache.keep(None, there.sum(1))

    def _cache(self, stop: int, start: int = 0) -> Cache:
        assert self.cache is not None, "start() comes before the first commit"
        return self.cache.rows(start, stop)


def _least(confidence: Tensor, nodes: int) -> float:
    """The odds of the last of the likeliest `nodes` among [B, N]; -inf where there are fewer."""
    return float(confidence.flatten().topk(nodes).values[-1]) if confidence.numel() >= nodes else -torch.inf


SELF = "self-"
"""Names of self-drafts begin with this."""


class SelfDraft(DraftModel):
    """Drafts with the target's own weights; its cache is its own.

    target: an unquantised target, packed or not, if `quantize` is given. layers: draft with so many of the first layers;
    None, with all. quantize: "int8" or "int4"; with neither, the target itself drafts. shape: as for `DraftModel`.
    """

    name = "self-draft"

    def __init__(
        self, target: Target, *, layers: int | None = None, quantize: str | None = None, shape: TreeShape | None = None
    ) -> None:
        draft = target if layers is None else target.first_layers(layers)
        super().__init__(draft if quantize is None else draft.quantized(quantize), target.vocab_size, shape)


def self_draft_options(name: str) -> tuple[int | None, str | None]:
    """Layers and quantisation of "self-layers:4", "self-int8" or "self-int4"; raises BadInput for another name."""
    kind, _, count = name.removeprefix(SELF).partition(":")
    if kind == "layers" and count.isdecimal():
        return int(count), None
    if kind in KINDS and not count:
        return None, kind
    raise BadInput(f"the drafter was {name!r}; a target drafts for itself as self-int8, self-int4, or self-layers:N")
