"""Recorded reads: fresh contents through fixed places give the same text, and few recordings serve
many prompts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import pytest
import torch
from drafting import DRAFTERS, texts
from tiny import VOCAB, model, prompts, target

from draftproof.core.params import Sampling
from draftproof.core.tree import TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput
from draftproof.model.device import Device
from draftproof.model.graph_replay import GraphReplay
from draftproof.model.target import Target

R = TypeVar("R")
CLOSED = ShapePolicy(closed=True)


class Paper(Device):
    """Records as a GPU does: a replay reads its inputs, and leaves its results, where they lay when
    it was recorded."""

    @property
    def captures(self) -> bool:
        return True

    def record(self, call: Callable[[], R]) -> tuple[Callable[[], None], R]:
        call()
        results = call()

        def replay() -> None:
            for place, new in zip(cast(Any, results), cast(Any, call()), strict=True):
                if place is not None:
                    place.copy_(new)

        for place in cast(Any, results):
            if place is not None:
                place.fill_(torch.nan)                      # recording computes nothing
        RECORDED.append(1)
        return replay, results


RECORDED: list[int] = []


def on_paper(inner: Target) -> GraphReplay:
    return GraphReplay(inner, Paper(torch.device("cpu")))


MAKERS: dict[str, Callable[[], Drafter]] = {
    "draft tree": lambda: DraftModel(
        on_paper(target(num_hidden_layers=1, seed=1)), VOCAB, TreeShape.branching((2, 2))
    ),
    **{name: partial(DRAFTERS[name], target())
       for name in ("prompt-lookup", "medusa", "redrafter", "portfolio")},
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_replayed_reads_give_the_same_text(name: str) -> None:
    params = Sampling(temperature=0.8, seed=4)
    plain = texts(Engine(target()), prompts(6), max_new_tokens=8, sampling=params)
    engine = Engine(on_paper(target()), MAKERS[name](), shapes=CLOSED)
    assert texts(engine, prompts(6), max_new_tokens=8, sampling=params, batch_size=2) == plain


def test_few_recordings_serve_many_prompts() -> None:
    engine = Engine(on_paper(target()), DRAFTERS["prompt-lookup"](target()), shapes=CLOSED)
    RECORDED.clear()
    engine.generate(prompts(12), max_new_tokens=8, batch_size=4)
    assert len(RECORDED) == 2, "one for rounds, one for prompts"


def test_recordings_go_with_their_cache() -> None:
    inner = on_paper(target())
    engine = Engine(inner, shapes=CLOSED)
    for _ in range(3):
        engine.generate(prompts(2), max_new_tokens=3)
        gc.collect()
        assert len(inner._graphs) == 0


def test_a_device_that_records_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="cpu devices record none"):
        GraphReplay(Target(model()))
