"""Draft tokens that a grammar forces, such as a key of a JSON schema or a closing bracket.

They cost nothing to draft. They are accepted if the target would cut the text into the same tokens,
and rejected otherwise like any draft. The text never depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree
from draftproof.requests.sequence import SequenceState

NAME = "grammar"
"""The drafter's name shown for these tokens."""
UNKNOWN = 0.4
"""The assumed probability of a node given its parent, if the drafter gives none."""


class ForcingProcessor(Protocol):
    """The processor of a `LogitsRule` that can force tokens."""

    def forced(self, text: Sequence[int]) -> list[int]:
        """The only tokens that may follow a text, prompt included."""


def forced_tokens(rows: Sequence[SequenceState], most: int) -> list[list[int]]:
    """For each row, the tokens that its rules force after its root.

    Args:
        rows: The running rows.
        most: The most tokens that a row may draft.

    Returns:
        One list per row; an empty list if no row is forced to anything.
    """
    forced = list[list[int]]()
    for row in rows:
        tokens = list[int]()
        for rule, processor in row.params.logits_rules:
            if rule.forces and not tokens:
                tokens = cast("ForcingProcessor", processor).forced([*row.prompt, *row.tokens])
        forced.append(tokens[:most])
    return forced if any(forced) else []


def with_forced(
    tree: TokenTree, forced: Sequence[Sequence[int]], frontier: Frontier, most: int
) -> TokenTree:
    """Put the forced tokens of each row first, followed by the drafter's proposals that agree with
    them.

    Args:
        tree: The drafter's proposal; only the root if it was not called.
        forced: The forced tokens of each row.
        frontier: The state of the rows.
        most: The most nodes below a root.
    """
    device, width = tree.tokens.device, max(map(len, forced))
    lines = [[*tokens, *[ABSENT] * (width - len(tokens))] for tokens in forced]
    drafts = torch.tensor(lines, dtype=torch.int64, device=device)
    drafts = torch.cat([tree.tokens[:, :1], drafts], 1)                             # [B, 1 + L]
    count = torch.tensor([len(tokens) for tokens in forced], device=device)[:, None]
    if tree.tokens.shape[1] == 1 and not frontier.needs_draft_probs:
        return TokenTree.chain(drafts)
    if not frontier.trees or frontier.needs_draft_probs:
        return _chain(tree, drafts, count)
    chain = replace(TokenTree.chain(drafts), is_chain=False)
    pool = TokenTree.concat([chain, replace(tree, draft_probs=None)])
    paths = tree.confidence
    if paths is None:
        paths = UNKNOWN ** tree.depths.float() * tree.present
    chances = torch.cat([(drafts != ABSENT).to(paths.dtype), paths * 0.99], 1)
    there = pool.present & _follows(pool.texts, drafts, count)
    return pool.merged(torch.where(there, chances, 0), min(most, tree.tokens.shape[1] + width) + 1)


def _follows(texts: Tensor, drafts: Tensor, count: Tensor) -> Tensor:
    """[B, M] whether the path to each node, [B, M, D] tokens, is part of the forced text or
    continues it."""
    wide = min(texts.shape[2], drafts.shape[1])
    positions = torch.arange(wide, device=texts.device)
    same = (texts[:, :, :wide] == drafts[:, None, :wide]) | (texts[:, :, :wide] == NO_TOKEN)
    return (same | (positions > count)[:, None]).all(-1)


def _chain(tree: TokenTree, drafts: Tensor, count: Tensor) -> TokenTree:
    """The drafter's chain where it agrees with the forced tokens; elsewhere the forced tokens, each
    with probability 1."""
    nodes = max(tree.tokens.shape[1], drafts.shape[1])
    proposed, wanted = (
        torch.nn.functional.pad(tokens, (0, nodes - tokens.shape[1]), value=ABSENT)
        for tokens in (tree.tokens, drafts)
    )
    positions = torch.arange(nodes, device=drafts.device)
    keeps = ((proposed == wanted) | (positions > count)).all(1, keepdim=True)
    tokens = torch.where(keeps, proposed, wanted)
    probs = tree.draft_probs
    if probs is not None:
        probs = torch.nn.functional.pad(probs, (0, 0, 0, nodes - probs.shape[1]))
        certain = torch.zeros_like(probs).scatter_(2, tokens.clamp(min=0)[..., None], 1.0)
        is_forced = (positions > 0) & (positions <= count)
        probs = torch.where(is_forced[..., None], certain, probs)
    return TokenTree.chain(tokens, probs)
