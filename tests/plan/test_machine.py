"""What a round costs: between what was timed, and by a data sheet."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from tiny import fresh

from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.plan.machine import LIGHT, PRESETS, Machine, RoundTiming, Size, read_machine
from draftproof.plan.planner import size_of
from draftproof.weights.packed_linear import pack_linears

TIMED = tuple(RoundTiming("", False, rows, nodes, float(10 * rows + rows * (1 + nodes)))
              for rows in (1, 4) for nodes in (0, 2, 8))  # fmt: skip
DRAFTS = (RoundTiming("draft", False, 1, 0, 1.0), RoundTiming("draft", False, 1, 2, 5.0),
          RoundTiming(LIGHT, True, 1, 0, 0.0), RoundTiming(LIGHT, True, 1, 4, 8.0))  # fmt: skip
HERE = Machine("here", "model", TIMED + DRAFTS, ((0, 1.0), (10, 2.0)), 0.5, {"draft": 0.25})
BIG = Size(14e9, 7e9, 1e5)


def test_rounds_lie_on_lines_between_those_that_were_timed() -> None:
    assert HERE.round(False, 1, 5, 0) == 16                  # ten for a row, one for a token
    assert HERE.round(False, 2, 2, 0) == 26
    assert HERE.round(False, 4, 10, 0) == 84                 # beyond the last
    assert HERE.round(True, 1, 0, 0) == 11                   # not timed: as greedy
    assert HERE.round(False, 2, 0, 10) == 22 + 0.5 * 2 * 10
    assert HERE.prompt(5) == 1.5
    assert HERE.draft("draft", False, 2, 3) == HERE.draft("draft", True, 1, 3) == 7
    assert HERE.times("draft") and not HERE.times("other") and HERE.draft("other", True, 1, 1) == 0


def test_a_data_sheet_bounds_a_round_by_memory_or_by_compute() -> None:
    card = read_machine("H100", "model", BIG, {"draft": Size(1e9, 5e8)})
    plain = card.round(False, 1, 0, 1000)
    assert 14e9 / 3.35e12 < plain < 2.5 * 14e9 / 3.35e12 and not card.measured
    assert card.round(False, 1, 7, 1000) == plain               # memory-bound: eight for one
    assert card.round(False, 512, 7, 1000) > 5 * plain and card.prompt(4096) > 5 * plain
    assert 0 < card.draft("draft", False, 1, 1) < plain / 2
    assert card.draft("draft", False, 1, 4) == pytest.approx(4 * card.draft("draft", False, 1, 1))
    assert {"gaudi2", "gaudi3"} <= PRESETS.keys()


def test_packed_layers_count_as_the_layers_they_were() -> None:
    made = fresh("llama").bfloat16()
    before = size_of(Target(made))
    pack_linears(made)
    after = size_of(Target(made))
    assert after.parameters == before.parameters and before.bytes <= after.bytes < 2 * before.bytes


def test_machines_round_trip_through_json(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"machine": asdict(HERE)}))
    assert read_machine(str(file), "model", BIG, {}) == HERE
    file.write_text(json.dumps({"bandwidth": 1e11, "compute": 1e12, "name": "board"}))
    board = read_machine(str(file), "model", BIG, {})
    assert board.name == "board" and board.round(False, 1, 0, 0) > 14e9 / 1e11


@pytest.mark.parametrize(("text", "output"), [
    (None, "give a file, or one of"), ("{", "not a machine description"),
    ('{"bandwidth": 1}', "compute"),
    (json.dumps(asdict(HERE) | {"model": "other"}), "was timed with other"),
])  # fmt: skip
def test_invalid_machine_files_are_refused(text: str | None, output: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput, match=output):
        read_machine(str(file), "model", BIG, {})
