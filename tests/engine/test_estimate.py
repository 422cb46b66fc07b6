"""How deep drafts stand: counts of chains, of ranked trees and of others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from draftproof.engine.budget import Round
from draftproof.engine.estimate import Acceptance


def _round(rows: int, tried: Sequence[int], stood: Sequence[int], chain: bool = True) -> Round:
    return Round(rows, list(tried), list(stood), chain, emitted=rows + sum(stood), seconds=0.01)


def test_a_long_chain_informs_the_short_ones() -> None:
    acceptance = Acceptance(random.Random(0), (0, 1, 2, 3, 8))
    for _ in range(200):
        acceptance.learn(8, _round(10, [10, 8, 4] + [0] * 5, [8, 4, 0] + [0] * 5))
    none, one, two, three, eight = acceptance.draw(1e9)
    assert one == pytest.approx(1.8, abs=0.03) and two == pytest.approx(2.2, abs=0.06)
    assert three == pytest.approx(eight, abs=0.05), "nothing ever stood at the third"
    assert acceptance.draw(2.0) == pytest.approx([none, 1.8, 1.8, 1.8, 1.8], abs=0.03) and none == 1, "only two are wanted"


def test_rows_without_a_draft_count_as_failures() -> None:
    """Three of four rows found nothing to draft; what one row drafted stood."""
    acceptance = Acceptance(random.Random(0), (0, 4))
    for _ in range(200):
        acceptance.learn(4, _round(4, [1, 1, 1, 1], [1, 1, 1, 1]))
    assert acceptance.draw(1e9)[1] == pytest.approx(2.0, abs=0.1)


def test_trees_are_learned_by_size() -> None:
    """Sizes that were tried stand on their own counts; a larger one is expected to stand no less often."""
    acceptance = Acceptance(random.Random(0), (0, 4, 16, 32))
    for size, hits in itertools.chain.from_iterable([[(4, 5), (16, 8)]] * 200):
        acceptance.learn(size, _round(10, [10, hits], [hits, hits // 2], chain=False))
    _, four, sixteen, more = acceptance.draw(1e9)
    assert four == pytest.approx(1 + 0.5 + 0.2, abs=0.1) and sixteen == pytest.approx(1 + 0.8 + 0.4, abs=0.1)
    assert more > four and not acceptance.chain


def test_a_large_ranked_tree_informs_of_its_beginnings() -> None:
    """Nodes 1 and 5 always stand, node 14 in half of the rows: what each size would have given is known from one size."""
    acceptance = Acceptance(random.Random(0), (0, 1, 4, 8, 16, 32))
    for turn in range(400):
        stood = [1, 5, 14] if turn % 2 else [1, 5]
        acceptance.learn(16, Round(1, [1, 1, 1], [1, 1, len(stood) > 2], False, 1 + len(stood), seconds=0.01, nodes=stood))
    none, one, four, eight, sixteen, more = acceptance.draw(1e9)
    assert none == 1 and one == pytest.approx(2, abs=0.1) and four == pytest.approx(one, abs=0.2)
    assert eight == pytest.approx(3, abs=0.25) and sixteen == pytest.approx(3.5, abs=0.3)
    assert sixteen < more < sixteen + 0.8, "what was never tried adds less and less"
    assert acceptance.draw(2.0)[-1] == 2 and acceptance.ranked and not acceptance.chain


def test_nodes_beyond_all_sizes_count_for_none() -> None:
    acceptance = Acceptance(random.Random(0), (0, 4, 8))
    acceptance.learn(12, Round(1, [1, 1], [1, 1], False, 3, 0.01, nodes=[3, 11]))
    assert acceptance.added.total() == (8, 1)


def test_a_tree_of_another_order_ends_what_ranked_ones_told() -> None:
    acceptance = Acceptance(random.Random(0), (0, 4, 8))
    for ranked in (True, False, True):
        acceptance.learn(8, Round(1, [1, 1], [1, 0], False, 2, 0.01, nodes=[1] if ranked else None))
    assert not acceptance.ranked and len(acceptance.draw(1e9)) == 3 and 8 in acceptance.alone
