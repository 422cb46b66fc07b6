"""The sweep over beams: its presets, and that every one of them writes the plain text."""

from __future__ import annotations

import pytest
from tiny import prompts, target

from draftproof.bench.sweep import Preset, picture, presets, sweep, table
from draftproof.core.params import Sampling
from draftproof.drafters.plain import Plain
from draftproof.drafters.redrafter import ReDrafterHead
from draftproof.engine.engine import Engine


def test_presets_weigh_as_many_nodes_as_they_verify() -> None:
    grid = presets([1, 2], [2, 4], [1, 4, 99])
    assert grid == [Preset(1, 2, 2), Preset(1, 4, 4), Preset(2, 2, 4), Preset(2, 2, 6), Preset(2, 4, 4), Preset(2, 4, 14)]


def test_every_preset_writes_the_plain_text() -> None:
    subject = target("llama")
    plain = Engine(subject, Plain())
    grid = presets([1, 2], [2, 3], [3, 6])
    told: list[int] = []
    texts = prompts(2, 3)
    base, lanes = sweep(
        plain, ReDrafterHead.fresh(subject), grid, texts, new_tokens=9, sampling=Sampling(temperature=0.7, seed=2), rounds=2,
        told=lambda: told.append(1),
    )  # fmt: skip
    assert set(lanes) == set(grid) and len(told) == 2 * 2 * (len(grid) + 1)
    assert len(base.texts) == 4 and all(lane.texts and sorted(lane.texts) == sorted(base.texts) for lane in lanes.values())
    assert all(lane.stats.tokens_per_round >= 1 for lane in lanes.values())
    assert table(base, lanes, "x").row_count == len(grid)
    pytest.importorskip("matplotlib")
    assert picture(base, lanes, "x").startswith(b"\x89PNG")
