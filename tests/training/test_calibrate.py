"""Calibration: ranks are the heads', trees are the best, rounds counted are those taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import prompts, target
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.drafters.base import Drafter, DraftHead, Vocabulary
from draftproof.drafters.medusa import Medusa, MedusaHead
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput
from draftproof.training import calibrate, draft_trees
from draftproof.training.calibrate import (
    CalibrateConfig,
    Calibration,
    Written,
    ranks_of,
    write,
)
from draftproof.training.draft_trees import RANKS, complete, expected, grow, rounds_of

HEADS, NEW = 3, 24


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is not believed."""
    monkeypatch.setattr(calibrate, "TIMES", 1)
    monkeypatch.setattr(calibrate, "TIMED_TOKENS", 4)


def heads(seed: int = 0) -> MedusaHead:
    """Heads that are right now and then: on a vocabulary of 40, twenty choices are half of it."""
    torch.manual_seed(seed)
    made = MedusaHead.fresh(target(), num_heads=HEADS)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def texts_of(temperature: float, stop_tokens: tuple[int, ...] = ()) -> list[Written]:
    config = CalibrateConfig(tokens=NEW, temperature=temperature, seed=5)
    return write(Engine(target(), stop_tokens=stop_tokens), prompts(6), config)


def test_ranks_are_those_of_the_tokens_that_came() -> None:
    """Place by place, from the head's own prediction of one text at a time."""
    texts, head = texts_of(0.0), heads()
    for text, ranks in ((text, ranks_of(head, target(), text)) for text in texts):
        tokens = torch.tensor([text.tokens])
        features = target().features(tokens, torch.ones_like(tokens))
        assert ranks.shape == (len(text.tokens) - text.prompt, HEADS)
        for step, logits in enumerate(head.predict(features, target())):
            for place in range(len(ranks)):
                foretold = text.prompt + place + 1 + step  # the root is the new token `place`
                if foretold >= len(text.tokens):
                    assert ranks[place, step] == RANKS
                    continue
                order = logits[0, foretold - 2 - step].argsort(descending=True).tolist()
                assert ranks[place, step] == min(order.index(text.tokens[foretold]), RANKS)


@pytest.mark.parametrize("pairs", [False, True], ids=["heads alone", "pairs"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ends", [(), (3, 7, 11)], ids=["full length", "end tokens"])
def test_the_rounds_counted_are_those_the_engine_takes(
    temperature: float, ends: tuple[int, ...], pairs: bool
) -> None:
    """For every size of a grown tree, to the round."""
    texts, head = texts_of(temperature, ends), heads()
    if pairs:
        ordered = torch.tensor([pair for text in texts for pair in itertools.pairwise(text.tokens)])
        assert head.count(*ordered.unbind(1)) > 10
    ranks = [ranks_of(head, target(), text) for text in texts]
    tree = grow(complete(ranks), 24)
    counted = rounds_of(ranks, tree, 24)
    assert counted[0] == sum(max(0, len(one) - 1) for one in ranks) > counted[4] > counted[24]
    for nodes in (1, 4, 11, 24):
        engine = Engine(target(), Medusa(head, target(), tree), budget=nodes, stop_tokens=ends)
        asked = [text.tokens[: text.prompt] for text in texts]
        done = engine.generate(asked, sampling=[text.sampling for text in texts],
                               max_new_tokens=NEW)
        assert [text.tokens[text.prompt :] for text in texts] == [one.tokens for one in done]
        assert counted[nodes] == sum(one.stats.rounds for one in done)


def worth(places: Tensor, tree: tuple[tuple[int, ...], ...]) -> float:
    """Accepted tokens per place, counted."""
    rows = [tuple(row) for row in places.tolist()]
    return sum(row[: len(path)] == path for path in tree for row in rows) / len(rows)


def test_grown_trees_are_the_best_of_all_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_trees, "PRIOR", 1e-9)
    places = torch.randint(3, (60, 2), generator=torch.Generator().manual_seed(1)) ** 2 // 2
    paths = [path for depth in (1, 2) for path in itertools.product(range(3), repeat=depth)]
    grown = grow(places, 6, widest=3)
    for nodes in range(1, 7):
        closed = (some for some in itertools.combinations(paths, nodes)
                  if all(p[:-1] in {(), *some} for p in some))
        best = max(worth(places, some) for some in closed)
        assert worth(places, grown[:nodes]) == pytest.approx(best)


def test_paths_too_rare_to_be_counted_are_valued_step_by_step() -> None:
    """Behind (3,), seen once, the choice that is usual there comes before the one that was seen."""
    places = torch.tensor([(0, 0)] * 60 + [(0, 1)] * 40 + [(3, 9)])
    tree = grow(places, 60)
    assert tree.index((3, 0)) < tree.index((3, 9))


def test_trees_grow_parents_first_and_no_wider_than_allowed() -> None:
    places = torch.randint(RANKS + 1, (200, 3), generator=torch.Generator().manual_seed(2))
    tree = grow(places, 40, widest=4)
    assert len(tree) == len(set(tree)) == 40
    assert all(path[:-1] in ((), *tree[:i]) and max(path) < 4 for i, path in enumerate(tree))
    assert grow(places, 99, widest=1) == ((0,), (0, 0), (0, 0, 0))  # all there is of a chain


def test_what_is_expected_is_counted_on_other_texts_than_those_grown_on() -> None:
    """Grown and counted on the same texts the trees would look perfect."""
    one, other = torch.tensor([(0, 0)] * 40), torch.tensor([(5, 5)] * 40)
    assert expected([one, other], 2, widest=6) == (1.0, 1.0, 1.0)
    assert expected([one, one], 2, widest=6)[2] > 2.5


def calibration(seconds: tuple[float, ...]) -> Calibration:
    """Four nodes."""
    return Calibration(
        tree=tuple((rank,) for rank in range(4)), tokens=(1.0, 1.6, 1.9, 2.0, 2.05),
        seconds=seconds, written=9,
    )


@pytest.mark.parametrize(
    ("seconds", "nodes"),
    [((1.0,) * 5, 4), ((1.0, 2.0, 3.0, 4.0, 5.0), 1), ((1.0, 1.0, 1.0, 1.5, 2.0), 2),
     ((1.0, 5.0, 5.1, 5.2, 5.3), 4)],
    ids=["free", "every node costs a round", "a step behind two", "expensive anyway"],
)
def test_the_size_that_is_fastest_is_chosen(seconds: tuple[float, ...], nodes: int) -> None:
    found = calibration(seconds)
    assert found.nodes == nodes and found.chosen == found.tree[:nodes]
    assert found.speed_up[0] == 1 and found.speed_up[nodes] == max(found.speed_up[1:])
    assert found.speed_up[2] == pytest.approx(found.tokens[2] * seconds[0] / seconds[2])


class Echo(DraftHead):
    """A head of another kind: it foretells the token it stands at, and drafts by lookup."""

    kind = "echo"

    @property
    def steps(self) -> int:
        return 2

    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        for step in range(self.steps):
            here = features.tokens[:, : -2 - step]
            yield torch.nn.functional.one_hot(here, vocabulary.vocab_size).double()

    def drafter(self, vocabulary: Vocabulary) -> Drafter:
        return PromptLookup()


@pytest.mark.parametrize("make", [heads, Echo])
def test_a_calibration_is_whole(make: Any) -> None:
    head, heard = make(), set[str]()
    engine = Engine(target(), head.drafter(target()))

    def told(doing: str, done: int, of: int) -> None:
        assert 0 <= done <= of, doing
        heard.add(doing)

    found = calibrate.calibrate(engine, head, prompts(7), CalibrateConfig(tokens=16, nodes=6), told)
    assert len(found.tree) == 6 and len(found.tokens) == len(found.speed_up) == 7
    assert found.tokens[0] == 1 and max(found.tokens) > 1
    assert 1 <= found.nodes <= 6 and found.written == 7 * 16
    assert len(found.seconds) == 7 and list(found.seconds) == sorted(found.seconds)
    assert found.seconds[0] > 0
    assert heard == {"writing", "reading", "timing rounds"}


def test_a_target_that_reads_no_trees_is_calibrated_for_chains(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target(), "reads_trees", False)
    head, config = heads(), CalibrateConfig(tokens=12, nodes=9)
    engine = Engine(target(), head.drafter(target()))
    found = calibrate.calibrate(engine, head, prompts(3), config)
    assert found.tree == ((0,), (0, 0), (0, 0, 0))


def test_what_cannot_be_calibrated_is_refused() -> None:
    head = heads()
    with pytest.raises(BadInput, match="too short"):
        complete([torch.zeros(3, 3, dtype=torch.int64)])
    with pytest.raises(BadInput, match="at least two"):
        engine = Engine(target(), head.drafter(target()))
        calibrate.calibrate(engine, head, prompts(1), CalibrateConfig())
    with pytest.raises(BadInput, match="at least 8"):
        CalibrateConfig(tokens=4)
    with pytest.raises(BadInput, match="nodes"):
        CalibrateConfig(nodes=0)
