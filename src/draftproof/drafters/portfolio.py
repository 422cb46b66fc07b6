"""Several drafters as one: their proposals are merged, weighted by how often each was right.

Every member proposes in every round, and every proposal is compared with the committed text,
whether the target read it or not (full information, arXiv 2510.20064). By these comparisons, over
all rows and requests, the chances that members give are corrected (`merge_trees`); the likeliest
nodes of all are what the target reads. Knows no member by name.

Shape letters beyond the usual: M nodes of all members side by side, C kinds of node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree
from draftproof.drafters.base import Drafter, SharedMemory
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.native.cpu_ops import cpu_kernel
from draftproof.native.declarations import Structure, array_of
from draftproof.native.kernels import Kernels
from draftproof.native.trees import Member, TreeBuffer, texts_of

LEVELS = 16
"""Confidence levels of each member; acceptance is counted per level."""
FADE = 0.98
"""Decay of counts per round."""
TRUST = 2.0
"""Weight of a member's own confidence as a prior, in verified nodes."""
UNKNOWN = 0.4
"""Probability of a node after its parent, for a member without a confidence."""
CONSTANTS = LEVELS, TRUST, UNKNOWN, FADE


class Portfolio(Drafter):
    """Merges the proposals of cheap drafters, and of heads, into one tree of the likeliest nodes.

    The confidence of each member is corrected by what the target chose (full information, arXiv
    2510.20064).

    Args:
        members: At least one; each is asked in every round, so a member should cost little next to
            the target. They may want hidden states and successors.

    Raises:
        DrafterMismatch: A member keeps a KV cache of its own tree, as a draft model does, and has
            to be used alone.
        BadInput: There are no members.

    Example:
        >>> drafter = dp.Portfolio([dp.SuffixDrafter(), dp.TokenRecycling()])
        >>> engine = dp.load("demo", drafter=drafter)
    """

    name = "portfolio"
    max_draft_tokens = 10

    def __init__(self, members: Sequence[Drafter]) -> None:
        for member in members:
            if member.has_kv_cache:
                raise DrafterMismatch(
                    f"{member.name} keeps a KV cache of its own tree; use it alone"
                )
        if not members:
            raise BadInput("a portfolio needs at least one drafter")
        self.members = tuple(members)
        layers = {layer for member in members for layer in member.hidden_layers}
        self.hidden_layers = tuple(sorted(layers))
        self.needs_all_hidden = any(member.needs_all_hidden for member in members)
        self.top_k_needed = max(member.top_k_needed for member in members)
        deepest = [member.deepest for member in members if member.deepest is not None]
        self.deepest = max(deepest) if len(deepest) == len(members) else None
        kinds = len(members) * LEVELS
        self._counts = SharedMemory(
            lambda device: torch.zeros(kinds, 2, dtype=torch.float32, device=device)
        )
        self._proposed: Proposed | None = None

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.members = tuple(member.for_run(rows, capacity, ops) for member in self.members)
        self._proposed = None

    def assign_owners(self, rows: Sequence[int], owners: Sequence[int]) -> None:
        for member in self.members:
            member.assign_owners(rows, owners)

    def observe(self, commit: Commit) -> None:
        for member in self.members:
            member.observe(self._for(member, commit))
        last = self._proposed
        if last is not None and commit.rows[-1] == len(last.position):
            nothing = last.position.new_full((1,), 1 << 30)     # beyond all text: none is judged
            more = Proposed(*(torch.cat([part, part[:1]]) for part in last))
            self._proposed = more._replace(position=torch.cat([last.position, nothing]))

    def propose(self, frontier: Frontier) -> TokenTree:
        prefix = frontier.prefix
        counts = self._counts[prefix.tokens.device]
        pool, tree = self.ops.run(
            merge_proposals, self.members, frontier, counts, self._proposed, CONSTANTS)
        self._proposed = Proposed(*pool, prefix.position)
        return tree if frontier.trees else tree.best_chain()

    def select(self, rows: Sequence[int]) -> None:
        for member in self.members:
            member.select(rows)
        if (last := self._proposed) is not None:
            self._proposed = Proposed(*(part[list(rows)] for part in last)) if rows else None

    def drafted_by(self, tree: TokenTree) -> list[list[str]]:
        """Of each node, the first member that proposed it."""
        if (last := self._proposed) is None:
            return super().drafted_by(tree)
        texts, parents = last.texts, last.parents
        pool = texts if texts.dim() == 3 else TokenTree(texts, parents, texts.shape[1]).texts
        drafters = []
        for row, kinds in enumerate(last.kinds.tolist()):
            paths = zip(map(_path, pool[row].tolist()), kinds, strict=True)
            who = {path: self.members[kind // LEVELS].name for path, kind in reversed(list(paths))}
            drafters.append([who.get(_path(text), self.name) for text in tree.texts[row].tolist()])
        return drafters

    def _for(self, member: Drafter, commit: Commit) -> Commit:
        """The commit with the hidden layers this member wants, in its order."""
        layers, hidden = member.hidden_layers, commit.hidden
        if hidden is None:
            return commit
        wanted = [hidden[:, :, self.hidden_layers.index(layer)] for layer in layers]
        return replace(commit, hidden=torch.stack(wanted, 2) if wanted else None)


class Proposed(NamedTuple):
    """What all members proposed, side by side, and the kind of each node.

    texts: [B, M] tokens as the C library keeps them, or [B, M, D], see `TokenTree.texts`. position:
    [B] of the roots; beyond all text for rows without a proposal.
    """

    texts: Tensor
    parents: Tensor         # [B, M], -1 at each root
    kinds: Tensor           # [B, M]
    position: Tensor


def judge(counts: Tensor, proposed: Proposed, prefix: Prefix, fade: float) -> None:
    """Count, in place, which nodes of the last proposals the committed text confirms.

    counts: [C, 2] of the nodes of each kind whose parents were right: right, compared."""
    texts, parents, position = proposed.texts, proposed.parents, prefix.position
    place = proposed.position[:, None] + torch.arange(texts.shape[2], device=position.device)
    known = place <= position[:, None]                                                  # [B, D]
    committed = prefix.tokens.gather(1, place.clamp(max=prefix.tokens.shape[1] - 1))
    matches = ((texts == committed[:, None]) & known[:, None]) | (texts == NO_TOKEN)
    right, depth = matches.all(-1), (texts != NO_TOKEN).sum(-1) - 1                      # [B, M]
    there = (parents >= 0) & (texts != ABSENT).all(-1) & known.gather(1, depth)
    compared = there & right.gather(1, parents.clamp(min=0))
    seen = torch.stack([right & compared, compared], -1).float()                        # [B, M, 2]
    counts.mul_(fade).index_add_(0, proposed.kinds.flatten(), seen.flatten(0, 1))


Merged = tuple[tuple[Tensor, Tensor, Tensor], TokenTree]
"""Texts, parents and kinds of all members' nodes, and the tree of the likeliest of them."""


def merge_proposals(
    members: Sequence[Drafter], frontier: Frontier, counts: Tensor, last: Proposed | None,
    constants: tuple[int, float, float, float],
) -> Merged:  # fmt: skip
    """Judge the last proposals, let each member propose, and merge the proposals.

    counts: as of `judge`, and updated. constants: those of `merge_trees`, and the decay of counts.
    """
    *rest, fade = constants
    if last is not None:
        judge(counts, last, frontier.prefix, fade)
    wider = _wider(frontier)
    trees = [member.propose(wider) for member in members]
    return merge_trees(trees, counts, rest, frontier.max_draft_tokens + 1)


def _wider(frontier: Frontier) -> Frontier:
    """What a member is asked for. Some of its nodes are dropped, so it is more than the budget."""
    budget = frontier.max_draft_tokens
    return replace(frontier, max_draft_tokens=budget + budget // 2, needs_draft_probs=False)


def merge_trees(
    trees: Sequence[TokenTree], counts: Tensor, constants: Sequence[float], nodes: int
) -> Merged:
    """Merge the members' trees into one of at most `nodes` nodes.

    The chance of a node after its parent is the rate of its kind in `counts` [C, 2], with the
    member's confidence as prior. constants: `LEVELS`, `TRUST`, `UNKNOWN`."""
    (count, trust, unknown), pool = constants, TokenTree.concat(trees)
    count, chances, levels = int(count), [], []
    for number, tree in enumerate(trees):
        paths = tree.confidence
        if paths is None:
            paths = unknown**tree.depths.float() * tree.present
        chances.append(paths / paths.gather(1, tree.parents.clamp(min=0)).clamp(min=1e-9))
        levels.append(number * count + (chances[-1] * count).long().clamp(max=count - 1))
    kinds = torch.cat(levels, 1)                                                        # [B, M]
    right, compared = counts[kinds].unbind(-1)
    steps = (right + trust * torch.cat(chances, 1)) / (compared + trust)
    steps = torch.where(pool.parents < 0, 1, steps)
    confidence = torch.where(pool.ancestors, steps[:, None], 1).prod(-1)
    confidence = torch.where(pool.present, confidence, 0)
    return (pool.texts.contiguous(), pool.parents, kinds), pool.merged(confidence, nodes)


@cpu_kernel(merge_proposals)
def _merge_proposals(
    library: Kernels, members: Sequence[Drafter], frontier: Frontier, counts: Tensor,
    last: Proposed | None, constants: tuple[int, float, float, float],
) -> Merged:  # fmt: skip
    """Members with a form in C are asked in C."""
    prefix, nodes, depth = frontier.prefix, 0, 0
    rows, steps = len(prefix.position), frontier.max_draft_tokens * 3 // 2
    asked = list[Structure]()
    for member in members:
        native = frontier.trees and _drafts_in_c(type(member))
        search = member.native_member(prefix) if native else None
        if search is not None:
            width, limit = 1 + steps, steps
        else:
            tree = member.propose(_wider(frontier))
            confidence = None if tree.confidence is None else tree.confidence.float()
            width, limit = tree.tokens.shape[1], tree.depth_limit
            search = Member(tree.tokens, tree.parents, confidence, width, rows)
        nodes, depth = nodes + width, max(depth, limit)
        asked.append(search)
    texts, parents, kinds = torch.empty(3, rows, nodes, dtype=torch.int64)
    out = TreeBuffer(rows, min(frontier.max_draft_tokens + 1, nodes))
    judged = (None, None, None, None, 0) if last is None else (*last, last.texts.shape[1])
    library(
        "merge_trees", counts, *constants, *judged, array_of("Member", asked), len(asked),
        texts_of(prefix, steps), steps, nodes, texts, parents, kinds, out.output
    )
    return (texts, parents, kinds), out.tree(depth)


@cache
def _drafts_in_c(kind: type[Drafter]) -> bool:
    """Whether `native_member` drafts what `propose` does: not in a subclass with another one."""
    owners = [next(base for base in kind.__mro__ if name in vars(base))
              for name in ("propose", "native_member")]
    return owners[0] is owners[1]


def _path(text: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token in text if token != NO_TOKEN)
