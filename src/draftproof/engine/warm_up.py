"""Run all shapes before the first text, for devices that compile each new shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftproof.cache.kv_cache import CHUNKS
from draftproof.core.params import Sampling
from draftproof.engine.budget import Adaptive, Budget
from draftproof.requests.sequence import SequenceState
from draftproof.requests.stats import State

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine


def warm_up(engine: Engine, tokens: int, batch_size: int, sampling: Sampling) -> None:
    """Run once every shape that a batch can need; see `Engine.warm_up`."""
    most, rows = engine.budget.max_draft_tokens, engine.shapes.rows(batch_size)
    capacity = engine.shapes.capacity(tokens + most + 2)
    longest = min(capacity, engine.target.context) - most - 3
    sizes = engine.budget.sizes if isinstance(engine.budget, Adaptive) else (most,)
    pauses = (0, 2, 5) if len(sizes) > 1 else (0,)      # after a pause, a drafter catches up
    scripts = [(1, [size, *[0] * pause, size]) for size in sizes for pause in pauses]
    lengths = {min(width, longest) for width in (*CHUNKS, CHUNKS[-1] + 1)}
    scripts += [(length, [size]) for length in sorted(lengths) for size in sizes]
    sampling = replace(sampling, stop=(), stop_when=())                 # nothing ends early
    if sampling.min_new_tokens:
        sampling = replace(sampling, min_new_tokens=capacity, max_new_tokens=None)
    else:
        sampling = replace(sampling, stop_tokens=(), stop_token_ids=())
    for length, script in scripts:
        decoder, text = engine.new_decoder(_Script(script), rows, capacity), [0] * length
        params = engine.requests.params(sampling, text, capacity)
        with engine.lock:
            prefill = decoder.prefill([[SequenceState(text, params, capacity)]])
            while not decoder.read(prefill):
                pass
            for _ in list(script):
                decoder.step()


class _Script(Budget):
    """A fixed list of draft sizes, one per round."""

    def __init__(self, sizes: list[int]) -> None:
        self.max_draft_tokens, self.sizes = max(sizes), sizes

    def choose(self, state: State) -> int:
        return self.sizes.pop(0)
