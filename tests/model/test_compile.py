"""A compiled forward: one graph for each shape, none broken, none compiled again; refused where it
does not agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drafting import texts
from tiny import fresh, prompts

from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Fixed
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import UnsupportedModel
from draftproof.model.graph_replay import compiled
from draftproof.model.target import Target

CLOSED = ShapePolicy(closed=True)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def single(layers: int = 1) -> Target:
    return Target(fresh("llama", num_hidden_layers=layers).float())


def test_nothing_is_compiled_after_warm_up() -> None:
    """Traced for every shape, compiled by a backend that only counts: prompts of many lengths, rows
    that come and go."""
    plain = single()
    engine = Engine(compiled(plain, "aot_eager"), PromptLookup(), shapes=CLOSED, budget=Fixed(3))
    engine.warm_up(40, batch_size=4)
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    written = texts(engine, prompts(9), max_new_tokens=12, batch_size=4)
    assert written == texts(Engine(plain), prompts(9), max_new_tokens=12)
    assert counters["stats"]["unique_graphs"] == graphs, "no shape was new"
    assert not counters["graph_break"] and not counters["unimplemented"]
    assert 3 <= graphs <= 8, "the self-test's reads, a round, and prompts of each width"


@pytest.mark.needs_isa("avx512")       # on AVX2 inductor gives NaN for masked trees, and is refused
def test_a_model_loaded_by_name_is_compiled(tmp_path: Path) -> None:
    fresh("llama", num_hidden_layers=1).float().save_pretrained(tmp_path)
    engine = load(tmp_path, drafter="none", compile=True)
    assert engine.shapes.closed and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert len(engine.generate([[1, 2]], max_new_tokens=1)[0].tokens) == 1


def test_a_compiled_forward_that_does_not_agree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = single()
    real = torch.compile

    def wrong(call: object, **how: object) -> object:
        made = real(call, **how)  # type: ignore[call-overload]

        def off(*given: object) -> object:
            logits, hidden = made(*given)
            return logits * 1.1, hidden

        return off

    monkeypatch.setattr(torch, "compile", wrong)
    with pytest.raises(UnsupportedModel, match="when compiled"):
        compiled(plain, "eager")


def test_a_model_without_a_lean_forward_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="--compile"):
        compiled(Target(fresh("gpt2").float()), "eager")
