"""What this thread's current read is of, for layers of transformers that are called within it: the
number of its tokens, the tree they are nodes of, and what attends; and the states that its layers
hand over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from draftproof.cache.delta_rule import Recorded
from draftproof.cache.text_order import TextOrder

_scan = threading.local()


class HandedStates(dict[int, Tensor | None]):
    """Recurrent states by number; this thread's scan continues from the one that was looked up
    last."""

    def __getitem__(self, index: int) -> Tensor | None:
        _scan.state = super().__getitem__(index)
        return _scan.state


def forget_handed() -> None:
    """Let scans of this thread have no state until one is looked up."""
    _scan.state = None


@contextmanager
def recording(
    tokens: int, parents: Tensor | None = None, attention: TextOrder | None = None
) -> Iterator[None]:
    """A read of `tokens` tokens.

    The states after each of them are recorded if there are at most `RECORDED`, or if they are the
    nodes of a tree.

    Args:
        tokens: The tokens of each row.
        parents: [B, tokens] the node that each goes on from; None for a chain.
        attention: What attends in place of torch, where it can.
    """
    _scan.tokens, _scan.trail, _scan.parents, _scan.attention = tokens, None, parents, attention
    try:
        yield
    finally:
        _scan.tokens, _scan.trail, _scan.parents, _scan.attention = 0, None, None, None


def recorded() -> Recorded | None:
    """The states after each token of this thread's last computation, if they were recorded; they
    are returned only once."""
    trail: Recorded | None = getattr(_scan, "trail", None)
    _scan.trail = None
    return trail


def record(trail: Recorded | None) -> None:
    """Note the states after each token of this thread's last computation; None: not known."""
    _scan.trail = trail


def handed_state() -> Tensor | None:
    """The state that was looked up last, from which this thread's scan continues."""
    state: Tensor | None = getattr(_scan, "state", None)
    return state


def token_count() -> int:
    """The number of tokens of this thread's current read; 0 outside of one."""
    tokens: int = getattr(_scan, "tokens", 0)
    return tokens


def tree_parents() -> Tensor | None:
    """The parents of the nodes of this thread's current read; None outside of one, and in chains.
    """
    parents: Tensor | None = getattr(_scan, "parents", None)
    return parents


def text_order() -> TextOrder | None:
    """What attends in this thread's current read in place of torch, if anything does."""
    attention: TextOrder | None = getattr(_scan, "attention", None)
    return attention
