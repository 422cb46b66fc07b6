"""The demo model writes what it wrote in earlier versions, in float64, with any drafter and batch.

`recorded_texts.jsonl` holds the token ids of 50 requests (10 prompts, 5 samplings), written by
plain decoding. With 4 drafters
they make 200 cases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import draftproof as dp

ROWS = [json.loads(line)
        for line in Path(__file__).with_name("recorded_texts.jsonl").read_text().splitlines()]
DRAFTERS: list[dict[str, Any]] = [{"drafter": "portfolio"}, {"assistant_model": "demo-draft"},
                                  {"drafter": "medusa"}, {"drafter": "redrafter"}]  # fmt: skip


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: str(next(iter(drafter.values()))))
def test_texts_are_those_of_earlier_versions(drafter: dict[str, Any]) -> None:
    engine = dp.load("demo", dtype="float64", budget=4, **drafter)
    for batch_size, rows in ((1, ROWS[::5]),
                             (4, [row for number, row in enumerate(ROWS) if number % 5])):
        done = engine.generate([row["prompt"] for row in rows], max_new_tokens=20,
                               batch_size=batch_size,
                               sampling=[dp.Sampling(**row["sampling"]) for row in rows])
        for row, completion in zip(rows, done, strict=True):
            assert completion.tokens == row["tokens"], (row["prompt"], row["sampling"])
