"""What a text used is freed when it ends, not at the next collection of cycles, which may take
minutes in a server."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import draftproof as dp

EVERYTHING = dp.Sampling(temperature=0.8, seed=1, top_k=40, top_p=0.9, min_p=0.01,
                         repetition_penalty=1.1, presence_penalty=0.1, no_repeat_ngram=3,
                         logit_bias={5: 1.0}, banned_words=[[7]], min_new_tokens=3, logprobs=True)


@contextmanager
def no_tensors_in_cycles() -> Iterator[None]:
    """Fails if only the garbage collector could free a tensor that was made meanwhile."""
    gc.collect()
    gc.freeze()                                             # what exists takes no time below
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        shapes = [tuple(item.shape) for item in gc.garbage if isinstance(item, torch.Tensor)]
        kinds = {type(item).__name__ for item in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    assert not shapes, f"tensors {shapes} are in cycles of {sorted(kinds)}"


@pytest.mark.parametrize("drafter", ["none", None, "demo-medusa", "demo-redrafter", "demo-draft"])
def test_texts_leave_no_tensors_to_the_garbage_collector(drafter: str | None) -> None:
    engine = dp.load("demo", drafter=drafter if drafter != "demo-draft" else None,
                     assistant_model="demo-draft" if drafter == "demo-draft" else None)
    engine.generate(["Once"], max_new_tokens=2)             # what is made once may stay
    with no_tensors_in_cycles():
        for sampling in (dp.Sampling(), dp.Sampling(temperature=0.8, seed=1), EVERYTHING):
            engine.generate(["Once", "The dog and"], max_new_tokens=8, sampling=sampling, n=2)
            stream = engine.stream("The dog", max_new_tokens=8, sampling=sampling)
            next(stream)
            stream.close()                                  # as a client that leaves
        del stream
