"""Exactness classes: which reads give the same bits. Kernels are chosen by shape, so the machine
has to be asked.

Inside a class, the logits of a position are the same bits whatever stands beside it: one token or
many, chain or tree, one row or several. Where plain decoding and verification share a class, the
text is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Chains tried, in nodes."""
_LEAD, _FORCED, _CAPACITY = 24, 96, 256            # 96: a whole number of chains of every width


class Exactness(NamedTuple):
    """What was found. A case is named by its shape; the reference is plain decoding, one node at a
    time.

    same: cases whose logits are bit for bit those of plain decoding. differ: the others, with the
    largest difference.
    """

    device: str
    dtype: str
    same: list[str]
    differ: dict[str, float]

    @property
    def exact_nodes(self) -> int:
        """Rows x nodes of chains up to which everything tried gives the same bits; 0 where even two
        nodes do not."""
        return self._largest(lambda case: not case.startswith("tree"))

    @property
    def exact_tree_nodes(self) -> int:
        """Nodes of trees up to which everything tried gives the same bits. A branch lies in other
        slots of the cache than the chain it becomes, so sums may round in another order, unless
        attention sums by the text as `fused` does."""
        return self._largest(lambda case: case.startswith("tree"))

    @property
    def promise(self) -> str:
        """What may be said of this model on this machine, in one sentence."""
        if self.exact_nodes < 2:
            return "exact up to rounding: a near-tie may fall either way when shapes change"
        nodes = self.exact_tree_nodes
        trees = f"trees up to {nodes} nodes" if nodes else "trees up to rounding"
        return (
            f"bit-identical to plain decoding for chains up to {self.exact_nodes} rows x nodes per "
            f"forward; {trees}"
        )

    def _largest(self, counts: Callable[[str], bool]) -> int:
        bad = min((_work(case) for case in self.differ if counts(case)), default=1 << 30)
        same = (_work(case) for case in self.same if counts(case))
        return max((work for work in same if work < bad), default=0)


def probe(target: Target, widths: Sequence[int] = WIDTHS, forced: int = _FORCED) -> Exactness:
    """Read the same text of `forced` tokens one at a time, in chains of `widths`, as a tree and in
    a batch; compare bits."""
    dice = torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, (_LEAD + forced,), generator=dice).to(target.device)
    with torch.inference_mode():
        plain = _in_chains(target, text, 1, 1)
        cases = {
            f"chain of {width}": _in_chains(target, text, width, 1) for width in widths if width > 1
        }
        for rows, width in ((2, 1), (4, 1), (8, 1), (4, 4), (8, 4)):
            cases[f"{rows} rows of {width}"] = _in_chains(target, text, width, rows)
        if target.reads_trees:
            for extra in (1, 3, 6):
                cases[f"tree of {4 * (extra + 1) + 1}"] = _in_trees(target, text, extra)
    gaps = {case: float((logits - plain[: len(logits)]).abs().max())
            for case, logits in cases.items()}
    same = [case for case, gap in gaps.items() if gap == 0]
    differ = {case: gap for case, gap in gaps.items() if gap > 0}
    return Exactness(str(target.device), str(target.dtype).removeprefix("torch."), same, differ)


def _in_chains(target: Target, text: Tensor, width: int, rows: int) -> Tensor:
    """[L, V] logits of `text` behind its lead, read `width` nodes at a time in the last of `rows`
    equal rows."""
    cache = _led(target, text, rows)
    out = []
    for start in range(_LEAD, len(text), width):
        tree = TokenTree.chain(text[None, start : start + width].expand(rows, -1))
        out.append(target.read(tree, cache).logits[-1])
        cache.keep(None, torch.full_like(cache.lengths, width))
    return torch.cat(out).double()


def _in_trees(target: Target, text: Tensor, extra: int) -> Tensor:
    """[L, V] the same, read as paths of five in trees with `extra` wrong siblings a level,
    committed by moving."""
    cache = _led(target, text, 1)
    shape = TreeShape(
        tuple((extra,) * depth + (rank,) for depth in range(4) for rank in range(extra + 1))
    )
    path = torch.tensor([0, *(level.stop - 1 for level in shape.levels[1:])], device=text.device)
    out = []
    for start in range(_LEAD, len(text) - 4, 5):
        tokens = (text[: len(shape)] + 1) % target.vocab_size
        tokens = tokens.scatter(0, path, text[start : start + 5])
        tree = TokenTree.shaped(tokens[None], shape)
        out.append(target.read(tree, cache).logits[0, path])
        cache.keep(path[None], torch.full_like(cache.lengths, 5))
    return torch.cat(out).double()


def _led(target: Target, text: Tensor, rows: int) -> KVCache:
    """A cache with the lead of `text` committed, read in one row and copied, as prefill does."""
    cache = target.new_cache(rows, _CAPACITY)
    view = cache.rows(0, 1)
    target.read(TokenTree.chain(text[None, :_LEAD]), view)
    view.keep(None, torch.full_like(view.lengths, _LEAD))
    cache.select([0] * rows)
    return cache


def _work(case: str) -> int:
    """Rows times nodes of a case, from its name."""
    numbers = [int(word) for word in case.split() if word.isdigit()]
    return numbers[0] * numbers[1] if len(numbers) == 2 else numbers[0]
