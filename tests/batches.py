"""Batches to run by hand: rows, a decoder of them, and targets that write down what they read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tiny import target

from draftproof.cache.kv_cache import KVCache
from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.tree import TokenTree
from draftproof.engine.budget import Budget, Fixed
from draftproof.engine.decoder import Decoder
from draftproof.model.target import Target
from draftproof.requests.sequence import SequenceState


def running(
    prompt: Sequence[int], limit: int = 30, sample: int = 0, **params: Any
) -> SequenceState:
    asked = SamplingParams(Sampling(**params), len(prompt), sample=sample)
    return SequenceState(prompt, asked, limit)


def decoder(
    drafter: Any, rule: str = "match", rows: int = 4, budget: Budget | int = 5, ours: Any = None,
    capacity: int = 128, **more: Any,
) -> Decoder:
    asked = Fixed(budget) if isinstance(budget, int) else budget
    return Decoder(ours or target(), drafter, RULES[rule], asked, rows, capacity, **more)


class Counted:
    """A target that writes down which committed place of which row it reads."""

    def __init__(self, inner: Target) -> None:
        self.inner, self.reads = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, tree: TokenTree, cache: KVCache, **options: Any) -> Any:
        self.reads.append((tree.tokens.clone(), cache.lengths.clone()))
        return self.inner.read(tree, cache, **options)


def admit(item: Decoder, *groups: Sequence[SequenceState]) -> None:
    """Read prompts, and start their samples."""
    prefill = item.prefill(groups)
    while not item.read(prefill):
        pass


def read_elsewhere(item: Decoder, samples: Sequence[SequenceState]) -> Iterator[None]:
    """Read a long prompt into a cache of its own: a chunk at each step, but the last, which comes
    at the end."""
    prefill = item.prefill([samples], elsewhere=True)
    while not item.read(prefill):
        yield
