"""Rounds of draft heads, counted: both rules on the same texts, heads with and without what was counted."""

from __future__ import annotations

from drafting import paired_head, redrafter_head
from tiny import prompts, target

from draftproof.bench.heads import lines, with_and_without
from draftproof.drafters.base import DraftHead
from draftproof.engine.engine import Engine


def test_every_rule_and_head_in_turn() -> None:
    heads: dict[str, DraftHead] = with_and_without("medusa", paired_head()) | with_and_without("redrafter", redrafter_head())
    assert list(heads) == ["medusa", "medusa, without pairs", "redrafter"]
    found = list(lines(Engine(target()), heads, prompts(4), nodes=(3, 9), temperatures=(0.0, 1.0), new_tokens=24, samples=2))
    assert [(line.heads, line.nodes, line.temperature) for line in found] == [
        (name, nodes, heat) for heat in (0.0, 1.0) for name in heads for nodes in (3, 9)
    ]
    assert all(line.same == line.texts == (8 if line.temperature else 4) and line.exact > 1 for line in found)
    for line in found:
        assert (line.typical is None) == (line.distance is None) == (line.temperature == 0)
    by = {(line.heads, line.nodes): line.exact for line in found if line.temperature == 0}
    assert by["medusa", 9] > by["medusa", 3]
    assert [line.exact for line in found if line.heads == "medusa"] != [line.exact for line in found if "without" in line.heads]


def test_heads_without_their_pairs_are_otherwise_the_same() -> None:
    head = paired_head()
    bare = head.unpaired()
    assert bare.pairs is None and bare.config.pairs == 0 and head.pairs is not None and head.config.pairs > 0
    own = dict(head.state_dict())
    assert {name: value.data_ptr() for name, value in bare.state_dict().items()} == {
        name: own[name].data_ptr() for name in own if not name.startswith("pairs.")
    }


def test_heads_that_counted_nothing_are_named_once() -> None:
    head = redrafter_head()
    assert with_and_without("redrafter", head) == {"redrafter": head}
    assert list(with_and_without("medusa", paired_head().unpaired())) == ["medusa"]
