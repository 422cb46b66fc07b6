"""What the audits of engines share: prompts, and the comparison of greedy texts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAIN = "plain"


def human_eval(file: Path, count: int) -> list[str]:
    """The first prompts of HumanEval.jsonl.gz."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line, _ in zip(lines, range(count), strict=False)]


def first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first token that differs, from 1."""
    pairs = enumerate(zip(text, other, strict=False), 1)
    return next((place for place, (token, wanted) in pairs if token != wanted),
                None if len(text) == len(other) else min(len(text), len(other)) + 1)


def compared(texts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many texts are those of plain decoding, and where the others part; it is printed."""
    places = [first_difference(*pair) for pair in zip(texts, plain, strict=True)]
    same = sum(place is None for place in places)
    print(f"    {same}/{len(texts)} texts as plain decoding writes them, first differences at "
          f"{places}", flush=True)
    return {"same": same, "texts": len(texts), "first_difference": places,
            "tokens": sum(map(len, texts))}
