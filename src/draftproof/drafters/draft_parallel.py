"""PARD (2504.18583): a draft model that drafts several tokens in one pass.

It is an ordinary language model, trained to read mask tokens (`pard_token`) after a text and to
predict the token at each of them. One such model serves all targets that share its tokenizer. A
position sees the text and the masks before it, but not their tokens, so drawn tokens have the
distribution of their position. Keys and values of masks are never kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters import beams
from draftproof.drafters.base import over_vocabulary
from draftproof.drafters.draft_model import DraftModel, Model
from draftproof.drafters.features import NODES, WIDTH, Reader, drawn_chain
from draftproof.errors import DrafterMismatch

TOKENS = 8
"""Tokens per round by default."""
READ = 16
"""The most tokens that a row may lack before the root; more are read separately, in chunks."""


class ParallelDraft(DraftModel):
    """Drafts with one pass of a model over the root and mask tokens.

    Args:
        model: The draft, wrapped as a `Target`.
        vocab_size: The target's vocabulary size.
        mask_token: The id of the mask token.
        trees: Draft the most likely nodes of a search, not a chain.
    """

    name = "pard"

    def __init__(self, model: Model, vocab_size: int, mask_token: int, trees: bool = False) -> None:
        super().__init__(model, vocab_size)
        if not 0 <= mask_token < model.vocab_size:
            raise DrafterMismatch(
                f"the draft model {model.name} masks with token {mask_token} (pard_token), and has "
                f"{model.vocab_size} tokens; fetch its config.json again"
            )
        self.mask_token, self.deepest = mask_token, TOKENS
        self.max_draft_tokens = NODES if trees else TOKENS

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity + READ + TOKENS, ops)

    def observe(self, commit: Commit) -> None:
        self.lag += [0] * (commit.rows[-1] + 1 - len(self.lag))
        for row in commit.rows:
            self.lag[row] += commit.tokens.shape[1]

    def propose(self, frontier: Frontier) -> TokenTree:
        levels = min(self.deepest or TOKENS, frontier.max_draft_tokens)
        logits = self._block(frontier, levels)

        def read(tree: TokenTree, first: int) -> Tensor:
            nodes = tree.tokens.shape[1] - first
            return logits[:, tree.depth_limit, None].expand(-1, nodes, -1)

        if frontier.needs_draft_probs:
            return drawn_chain(frontier, Reader(read, levels))
        width = min(WIDTH, frontier.max_draft_tokens, self.vocab_size) if frontier.trees else 1
        tree = beams.likeliest(frontier, read, width, levels)
        return tree if frontier.trees else tree.best_chain()

    def _block(self, frontier: Frontier, levels: int) -> Tensor:
        """[B, levels, V] logits at the root and the masks after it. Missing tokens of rows are read
        first, and kept."""
        prefix, rows = frontier.prefix, len(self.lag)
        if max(self.lag) > READ:
            self._catch_up(prefix)
            self.lag = [min(lag, 1) for lag in self.lag]
        width = (max(self.lag) if prefix.longest is not None else READ) + levels
        cache = self._cache(rows)
        longest = prefix.longest if prefix.longest is not None else prefix.tokens.shape[1]
        cache.set_max_length(longest)
        gap = prefix.position - cache.lengths                   # [B] committed tokens still missing
        place = cache.lengths[:, None] + torch.arange(width, device=gap.device)
        known = prefix.tokens.gather(1, place.clamp(max=prefix.tokens.shape[1] - 1))
        ahead = place - prefix.position[:, None]
        tokens = torch.where(ahead <= 0, known, self.mask_token)
        tokens = torch.where(ahead == 0, prefix.root[:, None], tokens)
        tokens = torch.where(ahead < levels, tokens, ABSENT)
        logits = self.model.read(TokenTree.chain(tokens), cache).logits
        cache.keep(None, gap)
        self.lag = [0] * rows
        index = gap[:, None] + torch.arange(levels, device=gap.device)
        index = index[..., None].expand(-1, -1, logits.shape[-1])
        return over_vocabulary(logits.gather(1, index), self.vocab_size)
