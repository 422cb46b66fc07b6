"""Report what is being done at the moment. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []


def doing(what: str) -> None:
    """Tell the innermost listener what begins, such as "reading the weights of demo"."""
    if _listeners:
        _listeners[-1](what)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, `doing` calls `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
