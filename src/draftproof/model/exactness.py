"""Exactness classes: which reads give the same bits. Kernels are chosen by shape, so this has to be
measured on the machine.

Within a class, the logits of a position have the same bits whatever is read with it: one token or
many, chain or tree, one row or several. Where plain decoding and verification are in one class,
texts are identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.model.target import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Lengths of the chains that are tried, in nodes."""
LEAD = 24
"""Tokens before those that are compared."""


class Exactness(NamedTuple):
    """The results. A case is named by its shape; the reference is plain decoding, one node at a
    time.

    same: cases whose logits have the same bits as plain decoding. differ: the others, with the
    largest difference. exact_nodes: the largest number of rows x nodes of chains up to which all
    cases have the same bits; 0 if even two nodes do not. exact_tree_nodes: the same for trees. A
    branch lies in other slots of the cache than the chain it becomes, so sums may round in another
    order, unless attention sums in text order as `fused_forward` does.
    """

    device: str
    dtype: str
    same: list[str]
    differ: dict[str, float]
    exact_nodes: int
    exact_tree_nodes: int

    @property
    def guarantee(self) -> str:
        """One sentence on what this model guarantees on this machine."""
        if self.exact_nodes < 2:
            return "exact up to rounding: a near-tie may fall either way when shapes change"
        nodes = self.exact_tree_nodes
        trees = f"trees up to {nodes} nodes" if nodes else "trees up to rounding"
        return (
            f"bit-identical to plain decoding for chains up to {self.exact_nodes} rows x nodes per "
            f"forward; {trees}"
        )


def probe(target: Target, widths: Sequence[int] = WIDTHS, forced: int = 96) -> Exactness:
    """Read the same text of `forced` tokens one at a time, in chains of `widths`, as a tree and in
    a batch, and compare the bits."""
    dice = torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, (LEAD + forced,), generator=dice).to(target.device)
    chains = {f"chain of {width}": (1, width) for width in widths if width > 1}
    chains |= {f"{rows} rows of {width}": (rows, width)
               for rows, width in ((2, 1), (4, 1), (8, 1), (4, 4), (8, 4))}
    trees = {4 * (extra + 1) + 1: extra for extra in (1, 3, 6) if target.reads_trees}
    with torch.inference_mode():
        plain = _logits(target, text, 1, 1)

        def gap(rows: int, width: int, extra: int = 0) -> float:
            logits = _logits(target, text, rows, width, extra)
            return float((logits - plain[: len(logits)]).abs().max())

        of_chains = {case: gap(*shape) for case, shape in chains.items()}
        of_trees = {nodes: gap(1, 5, extra) for nodes, extra in trees.items()}
    gaps = {**of_chains, **{f"tree of {nodes}": off for nodes, off in of_trees.items()}}
    return Exactness(
        str(target.device), str(target.dtype).removeprefix("torch."),
        [case for case, off in gaps.items() if off == 0],
        {case: off for case, off in gaps.items() if off > 0},
        _largest({case: rows * width for case, (rows, width) in chains.items()}, of_chains),
        _largest({nodes: nodes for nodes in of_trees}, of_trees),
    )


T = TypeVar("T")


def _largest(sizes: dict[T, int], gaps: dict[T, float]) -> int:
    """The largest size up to which nothing differs."""
    bad = min((sizes[case] for case, off in gaps.items() if off > 0), default=1 << 30)
    return max((size for size in sizes.values() if size < bad), default=0)


def _logits(target: Target, text: Tensor, rows: int, width: int, extra: int = 0) -> Tensor:
    """[L, V] logits of `text` after its lead, in the last of `rows` equal rows; `width` tokens are
    read and committed at a time, each with `extra` wrong siblings."""
    cache = target.new_cache(rows, 256)
    view = cache.rows(0, 1)
    target.read(TokenTree.chain(text[None, :LEAD]), view)
    view.keep(None, torch.full_like(view.lengths, LEAD))
    cache.select([0] * rows)
    shape = TreeShape(tuple(
        (extra,) * depth + (rank,) for depth in range(width - 1) for rank in range(extra + 1)
    ))
    path = torch.tensor([0, *(level.stop - 1 for level in shape.levels[1:])], device=text.device)
    out = []
    for start in range(LEAD, len(text) - width + 1, width):
        tokens = (text[: len(shape)] + 1) % target.vocab_size
        tokens = tokens.scatter(0, path, text[start : start + width])[None].expand(rows, -1)
        out.append(target.read(TokenTree.shaped(tokens, shape), cache).logits[-1, path])
        cache.keep(path[None] if extra else None, torch.full_like(cache.lengths, width))
    return torch.cat(out).double()
