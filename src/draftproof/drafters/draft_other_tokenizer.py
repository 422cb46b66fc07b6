"""A draft model with another tokenizer than the target's (Timor et al., 2502.05202).

The draft reads the text in its own tokens, and that trip need not be faithful: what it drafts is
judged as any other. Where drafts are drawn, or follow the target's noise, it drafts the tokens both
share (token-level intersection): its logits are restricted to them, over the target's ids, so that
what is attached is what was drawn from. Greedy chains are written freely and written anew in the
target's tokens. Neither model is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier, Reading
from draftproof.core.ops import Ops
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.draft_model import DraftModel, Model
from draftproof.drafters.draft_vocabulary import SharedVocabulary
from draftproof.model.kv_cache import KVCache

SPARE = 1.5
"""Places for the draft's tokens, for each of the target's."""


class SharedTokens:
    """A draft model as one of the target's vocabulary: it reads a text in its own tokens, and what
    it drafts, and says, in the target's."""

    def __init__(self, model: Model, shared: SharedVocabulary) -> None:
        self.model, self.shared, self.vocab_size = model, shared, shared.size
        self.name, self.context, self.reads_trees = model.name, model.context, model.reads_trees

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return self.model.new_cache(rows, capacity)

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False
    ) -> Reading:
        if first:                                               # nodes that were drafted
            own = self.shared.to_draft[tree.tokens.clamp(min=0)]
            tree = replace(tree, tokens=torch.where(tree.present, own, ABSENT))
        logits = self.model.read(tree, cache, first=first, last_only=last_only).logits
        return Reading(logits if last_only else self.shared.over_target(logits))


class OtherTokenizer(DraftModel):
    """Drafts with a smaller model whose tokenizer is another. model: the draft as a `Target`."""

    name = "draft-model"
    has_kv_cache = False

    def __init__(
        self, model: Model, shared: SharedVocabulary, shape: TreeShape | None = None
    ) -> None:
        super().__init__(SharedTokens(model, shared), shared.size, shape)
        self.shared, self.free = shared, DraftModel(model, model.vocab_size)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        self.places = int(SPARE * capacity) + 64
        super().start(rows, self.places, ops)
        self.free = copy.copy(self.free)
        self.free.ops, self.free.cache, self.free.scratch = ops, self.cache, None
        device = self.shared.to_draft.device
        self.own = torch.zeros(rows, self.places, dtype=torch.int64, device=device)
        self.rows: list[OwnText] = []

    def observe(self, commit: Commit) -> None:
        lacking = range(len(self.rows), commit.rows[-1] + 1)
        self.rows += [OwnText() for _ in lacking]
        self.lag += [0 for _ in lacking]
        for row in commit.rows:
            self.lag[row] += commit.tokens.shape[1]

    def propose(self, frontier: Frontier) -> TokenTree:
        self.prefix = self._own_prefix(frontier)
        if self.chains and frontier.sampler.greedy and not frontier.drawn:
            return self._freely(frontier)
        tree = super().propose(frontier)
        own = self.shared.to_draft[tree.tokens[:, 1:].clamp(min=0)]
        self._remember(torch.where(tree.present[:, 1:], own, ABSENT), self.scratch)
        return tree

    def select(self, rows: Sequence[int]) -> None:
        read = [len(row.tokens) + len(row.guess) for row in self.rows]
        self._cache(len(read)).lengths.copy_(torch.tensor(read))    # no more of a row is moved
        super().select(rows)
        self.own[: len(rows)] = self.own[list(rows)]
        self.rows = [replace(self.rows[row], tokens=[*self.rows[row].tokens]) for row in rows]

    def _own_prefix(self, frontier: Frontier) -> Prefix:
        """The text of each row in the draft's tokens; of it, the cache is told what it holds."""
        position, tokens = frontier.prefix.position.tolist(), frontier.prefix.tokens
        most = min(self.places, self.model.context) - frontier.max_nodes - 3
        for place, (row, end) in enumerate(zip(self.rows, position, strict=True)):
            new = tokens[place, row.known : end + 1].tolist()
            changed = row.extend(new, self.shared, most)
            self.own[place, changed : len(row.tokens)] = torch.tensor(row.tokens[changed:])
        held = [row.held for row in self.rows]
        cache = self._cache(len(held))
        cache.lengths.copy_(torch.tensor(held))
        last = [len(row.tokens) - 1 for row in self.rows]
        self.lag = [end - there for end, there in zip(last, held, strict=True)]
        ends = torch.tensor(last).to(self.own)
        return Prefix(self.own[: len(last)], ends, frontier.max_nodes, max(last))

    def _read_root(self, prefix: Prefix, budget: int) -> Tensor:
        return super()._read_root(self.prefix, budget)

    def _freely(self, frontier: Frontier) -> TokenTree:
        """The likeliest chain of the draft's own tokens, written anew in the target's."""
        params = [SamplingParams(Sampling(), 0, (), ())] * len(self.rows)
        greedy, free = Sampler(params, self.own.device, self.ops), self.free
        free.lag = self.lag
        tree = free.propose(replace(frontier, prefix=self.prefix, sampler=greedy, most=0))
        self.lag = free.lag
        self._remember(tree.tokens[:, 1:], free.scratch)
        drafted = [_present(row) for row in tree.tokens[:, 1:].tolist()]
        chains = [self.shared.back(row)[: frontier.budget] for row in drafted]
        longest = max(map(len, chains))
        lines = [[*row, *[ABSENT] * (longest - len(row))] for row in chains]
        root = frontier.prefix.root[:, None]
        return TokenTree.chain(torch.cat([root, torch.tensor(lines).to(root)], 1))

    def _remember(self, drafted: Tensor, read: int | Tensor | None) -> None:
        """What lies in the cache behind each row's text: `read` nodes of a chain, the root one."""
        ends = [read] * len(self.rows) if isinstance(read, int) or read is None else read.tolist()
        for row, tokens, end in zip(self.rows, drafted.tolist(), ends, strict=True):
            row.guess = _present(tokens)[: (end or 1) - 1] if self.chains else []


@dataclass
class OwnText:
    """A row's text in the draft's tokens, the root included.

    known: how many of the target's tokens it is made of. held: how many of its own the cache holds;
    guess: those behind the whole text that the cache holds as well.
    """

    tokens: list[int] = field(default_factory=list)
    known: int = 0
    held: int = 0
    guess: list[int] = field(default_factory=list)

    def extend(self, new: list[int], shared: SharedVocabulary, most: int) -> int:
        """Add `new` tokens of the target; of more than `most` the beginning is forgotten.

        Returns the place of the first token that is another than before.
        """
        before = len(self.tokens)
        if before:
            own = shared.follow(new, self.guess)
            pairs = zip(own, self.guess, strict=False)
            self.held = before + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        else:
            own = shared.begin(new)
        self.tokens += own
        self.known, self.guess = self.known + len(new), []
        if len(self.tokens) > most:
            del self.tokens[: len(self.tokens) - most // 2]
            before = self.held = 0
        self.held = min(self.held, len(self.tokens) - 1)
        return before


def _present(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(ABSENT)] if ABSENT in tokens else tokens
