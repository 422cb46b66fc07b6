"""A draft model with another tokenizer than the target's (Timor et al., 2502.05202).

The draft model reads the text in its own tokens. This conversion need not be exact, since drafts
are verified as usual. If drafts are drawn, or follow the target's noise, only tokens that both
share
are drafted (token-level intersection): logits are restricted to them, over the target's ids, so the
attached probabilities are those that tokens were drawn from. Greedy chains are written in the draft
model's tokens and tokenised again for the target. Neither model is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Commit, Frontier, Reading
from draftproof.core.ops import Ops
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.draft_model import DraftModel, Model
from draftproof.drafters.draft_vocabulary import SharedVocabulary


class SharedTokens:
    """A draft model with the target's vocabulary: it reads texts in its own tokens, but drafts, and
    logits, are in the target's."""

    def __init__(self, model: Model, shared: SharedVocabulary) -> None:
        self.model, self.shared, self.vocab_size = model, shared, shared.size
        self.name, self.context, self.reads_trees = model.name, model.context, model.reads_trees

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return self.model.new_cache(rows, capacity)

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False
    ) -> Reading:
        if first:                                               # nodes that were drafted
            drafted = self.shared.to_draft[tree.tokens.clamp(min=0)]
            tree = replace(tree, tokens=torch.where(tree.present, drafted, ABSENT))
        logits = self.model.read(tree, cache, first=first, last_only=last_only).logits
        return Reading(logits if last_only else self.shared.over_target(logits))


@dataclass
class OwnText:
    """A row's text in the draft's tokens, root included, converted from `known` target tokens. The
    cache holds the first `held` draft tokens."""

    tokens: list[int] = field(default_factory=list)
    known: int = 0
    held: int = 0


class OtherTokenizer(DraftModel):
    """Drafts with a smaller model whose tokenizer is another (Timor et al., arXiv 2502.05202).

    Args:
        model: The draft model, as a `Target`.
        shared: The tokens that both vocabularies have.
        shape: As for `DraftModel`.
    """

    name = "draft-model"
    has_kv_cache = False

    def __init__(
        self, model: Model, shared: SharedVocabulary, shape: TreeShape | None = None
    ) -> None:
        super().__init__(SharedTokens(model, shared), shared.size, shape)
        self.shared, self.free = shared, DraftModel(model, model.vocab_size)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        room = 3 * capacity // 2 + 64                           # it may need more tokens
        super().start(rows, room, ops)
        self.free = copy.copy(self.free)
        self.free.ops, self.free.cache = ops, self.cache
        device = self.shared.to_draft.device
        self.draft_texts = torch.zeros(rows, room, dtype=torch.int64, device=device)
        self.rows: list[OwnText] = []

    def observe(self, commit: Commit) -> None:
        new = commit.rows[-1] + 1 - len(self.rows)
        self.rows, self.lag = self.rows + [OwnText() for _ in range(new)], self.lag + [0] * new
        for row in commit.rows:
            self.lag[row] += commit.tokens.shape[1]

    def propose(self, frontier: Frontier) -> TokenTree:
        self.prefix = self._own_prefix(frontier)
        if self.chains and frontier.sampler.greedy and not frontier.needs_draft_probs:
            return self._freely(frontier)
        return super().propose(frontier)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.draft_texts[: len(rows)] = self.draft_texts[list(rows)]
        self.rows = [replace(self.rows[row], tokens=[*self.rows[row].tokens]) for row in rows]

    def _own_prefix(self, frontier: Frontier) -> Prefix:
        """The text of each row in the draft's tokens, without its beginning if it is too long.
        Lengths of the cache are updated."""
        most = min(self.draft_texts.shape[1], self.model.context) - frontier.max_nodes - 3
        for place, end in enumerate(frontier.prefix.position.tolist()):
            row = self.rows[place]
            new = frontier.prefix.tokens[place, row.known : end + 1].tolist()
            new_tokens = self.shared.follow(new) if row.tokens else self.shared.begin(new)
            row.tokens, row.known = row.tokens + new_tokens, end + 1
            if len(row.tokens) > most:
                row.tokens = new_tokens = row.tokens[-(most // 2) :]
                row.held = 0
            size = len(row.tokens)
            self.draft_texts[place, size - len(new_tokens) : size] = torch.tensor(new_tokens)
            self.lag[place] = size - 1 - row.held
        self._cache(len(self.rows)).lengths.copy_(torch.tensor([row.held for row in self.rows]))
        ends = [len(row.tokens) - 1 for row in self.rows]
        for row, end in zip(self.rows, ends, strict=True):
            row.held = end                                      # once this round has read it
        position = torch.tensor(ends).to(self.draft_texts)
        return Prefix(self.draft_texts[: len(ends)], position, frontier.max_nodes, max(ends))

    def _read_root(self, prefix: Prefix, budget: int) -> Tensor:
        return super()._read_root(self.prefix, budget)

    def _freely(self, frontier: Frontier) -> TokenTree:
        """The likeliest chain of the draft's own tokens, written again in the target's."""
        params = [SamplingParams(Sampling(), 0, (), ())] * len(self.rows)
        greedy, self.free.lag = Sampler(params, self.draft_texts.device, self.ops), self.lag
        tree = self.free.propose(replace(frontier, prefix=self.prefix, sampler=greedy, row_limit=0))
        self.lag = self.free.lag
        chains = list[list[int]]()
        for row in tree.tokens[:, 1:].tolist():
            drafted = row[: row.index(ABSENT)] if ABSENT in row else row
            chains.append(self.shared.back(drafted)[: frontier.max_draft_tokens])
        longest = max(map(len, chains))
        lines = [[*row, *[ABSENT] * (longest - len(row))] for row in chains]
        root = frontier.prefix.root[:, None]
        return TokenTree.chain(torch.cat([root, torch.tensor(lines).to(root)], 1))
