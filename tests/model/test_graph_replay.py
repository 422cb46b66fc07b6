"""Recorded and compiled reads: fresh contents through fixed places give the same text, and few
graphs serve many prompts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from drafting import DRAFTERS, texts
from tiny import VOCAB, fresh, model, prompts, target

from draftproof.core.ops import Ops
from draftproof.core.params import Sampling
from draftproof.core.tree import TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Fixed
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.device import Device
from draftproof.model.graph_replay import GraphReplay, compiled
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
            REPLAYED.append(1)
            for place, new in zip(cast(Any, results), cast(Any, call()), strict=True):
                if place is not None:
                    place.copy_(new)

        for place in cast(Any, results):
            if place is not None:
                place.fill_(torch.nan)                      # recording computes nothing
        RECORDED.append(1)
        return replay, results


RECORDED: list[int] = []
REPLAYED: list[int] = []


def with_fake_recorder(inner: Target) -> GraphReplay:
    return GraphReplay(inner, Paper(torch.device("cpu")))


@pytest.mark.parametrize("name", ["draft tree", "medusa", "redrafter", "portfolio"])
def test_replayed_reads_give_the_same_text(name: str) -> None:
    params = Sampling(temperature=0.8, seed=4)
    plain = texts(Engine(target()), prompts(6), max_new_tokens=8, sampling=params)
    small = with_fake_recorder(target(num_hidden_layers=1, seed=1))
    tree = name == "draft tree"
    drafter = DraftModel(small, VOCAB, TreeShape.branching((2, 2))) if tree else DRAFTERS[name](
        target()
    )
    engine = Engine(with_fake_recorder(target()), drafter, shapes=CLOSED)
    assert texts(engine, prompts(6), max_new_tokens=8, sampling=params, batch_size=2) == plain


def test_recorded_graphs_are_reused_across_prompts_and_freed_with_their_cache() -> None:
    inner = with_fake_recorder(target())
    engine = Engine(inner, DRAFTERS["prompt-lookup"](target()), shapes=CLOSED)
    RECORDED.clear()
    engine.generate(prompts(12), max_new_tokens=8, batch_size=4)
    assert len(RECORDED) == 2, "one for rounds, one for prompts"
    gc.collect()
    assert len(inner._graphs) == 0


@pytest.mark.parametrize(("name", "drafted", "launches"), [
    ("plain", 0, 1), ("portfolio", 5, 1), ("medusa", 2, 1), ("redrafter", 2, 1),
    ("draft chain", 2, 3),              # a draft model takes one for each token that it drafts
])
def test_a_round_launches_few_graphs_and_reads_the_host_once(
    name: str, drafted: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, to_host = list[int](), Ops.to_host

    def counted(self: Ops, *columns: Any) -> Any:
        reads.append(1)
        return to_host(self, *columns)

    monkeypatch.setattr(Ops, "to_host", counted)
    if name == "draft chain":
        drafter: Any = DraftModel(with_fake_recorder(target(num_hidden_layers=1, seed=1)), VOCAB)
    else:
        drafter = DRAFTERS[name](target())
    engine = Engine(with_fake_recorder(target()), drafter, shapes=CLOSED, budget=Fixed(drafted))
    engine.generate(prompts(2), max_new_tokens=6)               # records what there is to record
    counts = []
    for new_tokens in (6, 16):
        REPLAYED.clear(), reads.clear()
        done = engine.generate(prompts(1)[0], max_new_tokens=new_tokens)[0]
        counts.append((done.stats.rounds, len(REPLAYED), len(reads)))
    (few, *before), (many, *after) = counts
    assert many > few and done.stats.drafted >= many * min(1, drafted)
    assert after[0] - before[0] == launches * (many - few), "of a round; prompts are equal"
    assert after[1] - before[1] == many - few


def test_a_device_that_records_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="cpu devices record none"):
        GraphReplay(Target(model()))


@pytest.fixture
def counters() -> Iterator[Any]:
    """What torch.compile counts, from nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def single() -> Target:
    return Target(fresh("llama", num_hidden_layers=1).float())


def test_nothing_is_compiled_after_warm_up(counters: Any) -> None:
    """Traced for every shape, compiled by a backend that only counts: prompts of many lengths, rows
    that come and go."""
    plain = single()
    engine = Engine(compiled(plain, "aot_eager"), PromptLookup(), shapes=CLOSED, budget=Fixed(3))
    engine.warm_up(40, batch_size=4)
    graphs = counters["stats"]["unique_graphs"]
    written = texts(engine, prompts(9), max_new_tokens=12, batch_size=4)
    assert written == texts(Engine(plain), prompts(9), max_new_tokens=12)
    assert counters["stats"]["unique_graphs"] == graphs, "no shape was new"
    assert not counters["graph_break"] and not counters["unimplemented"]
    assert 3 <= graphs <= 8, "the self-test's reads, a round, and prompts of each width"


@pytest.mark.needs_isa("avx512")       # on AVX2 inductor gives NaN for masked trees, and is refused
def test_a_model_loaded_by_name_is_compiled(tmp_path: Path, counters: Any) -> None:
    fresh("llama", num_hidden_layers=1).float().save_pretrained(tmp_path)
    engine = load(tmp_path, drafter="none", compile=True)
    assert engine.shapes.closed and counters["stats"]["unique_graphs"] == 2
    assert len(engine.generate([[1, 2]], max_new_tokens=1)[0].tokens) == 1


def test_a_compiled_forward_must_exist_and_agree(
    monkeypatch: pytest.MonkeyPatch, counters: Any
) -> None:
    with pytest.raises(UnsupportedModel, match="--compile"):
        compiled(Target(fresh("gpt2").float()), "eager")
    plain, real = single(), torch.compile

    def wrong(call: Any, **how: Any) -> Any:
        made = real(call, **how)

        def off(*inputs: Any) -> Any:
            logits, hidden = made(*inputs)
            return logits * 1.1, hidden

        return off

    monkeypatch.setattr(torch, "compile", wrong)
    with pytest.raises(UnsupportedModel, match="when compiled"):
        compiled(plain, "eager")
