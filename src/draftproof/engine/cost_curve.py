"""What a verification costs: seconds of a target read by how many tokens it reads, measured here and now."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftproof.core.tree import TokenTree
from draftproof.model.target import Target

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Nodes per row at which a curve is measured when nobody says."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds of one read at each of `widths`, ascending; in between on the straight line, beyond along the last one."""

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, width: float) -> float:
        """Seconds of a read of `width` nodes per row."""
        if len(self.widths) == 1:
            return self.seconds[0]
        right = next((i for i, known in enumerate(self.widths) if known >= width), len(self.widths) - 1)
        right = max(right, 1)
        (low, high), (least, most) = self.widths[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return least + (most - least) * (width - low) / (high - low)


@torch.inference_mode()
def measure_costs(
    target: Target,
    widths: Sequence[int] = WIDTHS,
    *,
    rows: int = 1,
    context: int = 128,
    repeats: int = 7,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> CostCurve:
    """Median seconds of `repeats` reads of each width, the widths taken in turn, behind `context` committed tokens."""
    widths = sorted({width for width in widths if context + width <= target.context})
    cache = target.new_cache(rows, -(-(context + max(widths)) // 128) * 128)
    tokens = torch.randint(target.vocab_size, (rows, context), generator=torch.Generator().manual_seed(0)).to(target.device)
    target.read(TokenTree.chain(tokens), cache, last_only=True)
    cache.keep(None, torch.full_like(cache.lengths, context))
    trees = [TokenTree.chain(tokens[:, :1].expand(-1, width)) for width in widths]
    taken: list[list[float]] = [[] for _ in widths]
    for turn in range(repeats + 1):                                             # the first turn warms up
        for index, tree in enumerate(trees):
            start = time.perf_counter()
            target.read(tree, cache).logits[0, -1, 0].item()
            if turn:
                taken[index].append(time.perf_counter() - start)
        progress(turn + 1, repeats + 1)
    return CostCurve(tuple(widths), tuple(statistics.median(seconds) for seconds in taken))
