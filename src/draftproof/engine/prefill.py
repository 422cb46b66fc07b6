"""Prompts: read in chunks, short ones side by side, or beside what a round drafted.

Knows caches and drafters' memories; knows nothing of what is written behind a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftproof.core.messages import Accepted, Commit, Reading
from draftproof.core.ops import Ops
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target

SHORT, TOGETHER = 64, 256
"""Tokens of a prompt that is read beside others, in one pass, and of all of these, each as long as
the longest. Longer ones gain little, and fused layers, which skip padding, read no wider."""


class Prompts:
    """Reads prompts into rows of a cache that nobody has yet, and lets the drafter observe them."""

    def __init__(
        self, target: Target, drafter: Drafter, cache: KVCache, shapes: ShapePolicy, ops: Ops
    ) -> None:
        self.target, self.drafter, self.cache = target, drafter, cache
        self.shapes, self.ops = shapes, ops
        self.prompt_cache = target.new_cache(1, cache.capacity) if shapes.closed else None
        self._hidden_layers = drafter.hidden_layers

    @property
    def several(self) -> bool:
        """Whether short ones may be read beside something else: where padding costs nothing."""
        return self.ops.on_host and self.target.skips_absent

    def admissible(self, free: int, waiting: Iterable[Sequence[SequenceState]]) -> int:
        """How many of the first requests that wait may have these free rows: several if short."""
        found, longest, several = 0, 0, self.several
        for samples in waiting:
            free, longest = free - len(samples), max(longest, len(samples[0].prompt))
            beside = several and longest <= min(SHORT, TOGETHER // (found + 1))
            if free < 0 or (found and not beside):
                break
            found += 1
        return found

    def may_join(self, requests: Sequence[Sequence[SequenceState]]) -> bool:
        """Whether these, as few as `admissible` says, may be read beside a round's draft."""
        return self.several and all(len(samples[0].prompt) <= SHORT for samples in requests)

    def beside(
        self, tree: TokenTree, view: KVCache, joining: Sequence[Sequence[SequenceState]]
    ) -> tuple[Reading, Reading | None]:
        """What the target says of a tree and, where possible, of the prompts of requests."""
        if not joining:
            return self.target.read(tree, view, hidden_layers=self._hidden_layers), None
        prompts = [samples[0].prompt for samples in joining]
        rows, width, longest = *tree.tokens.shape, max(map(len, prompts))
        wide = max(width, longest)
        if wide > SHORT or not self.cache.holds(wide):          # what is read otherwise differs
            return self.target.read(tree, view, hidden_layers=self._hidden_layers), None
        all_rows = self.cache.rows(0, rows + len(prompts))
        all_rows.lengths[rows:] = 0
        rows_of_both = tree.stack(self._padded(prompts, longest))
        both = self.target.read(rows_of_both, all_rows, hidden_layers=self._hidden_layers)
        return both.part(slice(rows), width), both.part(slice(rows, None), longest)

    def read(self, first: int, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts in chunks into the rows from `first` on; return the logits at their ends,
        [b, 1, V]."""
        view = self._nest(first, len(prompts))
        view.lengths.zero_()
        start, longest = 0, max(len(prompt) for prompt in prompts)
        while start < longest:
            view.bound(self.cache.capacity if self.shapes.closed else start)
            width = self.shapes.chunk(longest - start)
            texts = [prompt[start : start + width] for prompt in prompts]
            tree, start = TokenTree.chain(self._padded(texts, width)), start + width
            alone = len(prompts) == 1 and (not self.shapes.closed or start < longest)   # no padding
            reading = self.target.read(
                tree, view, last_only=alone, hidden_layers=self._hidden_layers
            )
            logits = self.commit(first, texts, reading)
        if self.prompt_cache is not None:
            self.cache.take(torch.tensor([first], device=logits.device), self.prompt_cache)
        return logits

    def commit(self, first: int, texts: Sequence[Sequence[int]], reading: Reading) -> Tensor:
        """Commit parts of prompts that were read into the rows from `first` on; return the logits
        at their ends, [b, 1, V]."""
        logits, device = reading.logits, self.cache.lengths.device
        count = torch.tensor([len(text) for text in texts], device=device)
        self._nest(first, len(texts)).keep(None, count)
        for place, text in enumerate(texts):
            own, deep = slice(place, place + 1), self.shapes.chunk(len(text))
            chain = TokenTree.chain(self._padded([text], deep))
            nodes = torch.arange(deep, device=device)[None]
            everything = Accepted(nodes, count[own], chain.tokens[:, 0])
            commit = Commit.of([first + place], chain, reading.part(own, deep), everything)
            self.drafter.observe(commit)
        if logits.shape[1] == 1:
            return logits
        return logits.gather(1, (count - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))

    def _nest(self, first: int, count: int) -> KVCache:
        """Where the prompts of so many rows from `first` on are read."""
        return self.prompt_cache or self.cache.rows(first, first + count)

    def _padded(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        """[b, width] tokens, ABSENT behind the shorter texts."""
        device = self.cache.lengths.device
        lines = [[*text, *[ABSENT] * (width - len(text))] for text in texts]
        return torch.tensor(lines, device=device)
