"""The page of a trace holds the text and every draft tree, and needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftproof.core.params import Sampling
from draftproof.engine.load import load
from draftproof.plots.trace import Trace, write_trace


def data_of(page: str) -> dict[str, Any]:
    result = re.search(r"^const data = (.*)$", page, re.M)
    assert result is not None
    data: dict[str, Any] = json.loads(result[1])
    return data


def test_a_page_holds_the_text_of_stream_and_every_tree(tmp_path: Path) -> None:
    engine = load("demo", drafter="medusa", budget=5)
    [plain] = engine.generate("Once upon a time", max_new_tokens=24)
    pieces: list[str] = []
    done = write_trace(engine, "Once upon a time", tmp_path / "t.html", "a <title>",
                       lambda update: pieces.append(update.text), max_new_tokens=24)
    assert done.tokens == plain.tokens and "".join(pieces) == done.text
    page = (tmp_path / "t.html").read_text()
    data = data_of(page)
    assert "".join(piece for each in data["rounds"] for piece, _ in each["tokens"]) == done.text
    drafted = [who for each in data["rounds"] for _, who in each["tokens"] if who]
    assert len(drafted) == done.stats.accepted > 0 and set(drafted) == {"medusa"}
    trees = [each["tree"] for each in data["rounds"][1:]]
    assert sum(max(0, len(tree) - 1) for tree in trees) == done.stats.drafted
    for tree in trees:
        assert all(parent < place for place, (_, parent, *_) in enumerate(tree))
    assert "a &lt;title&gt;" in page and "<title>Trace: a <" not in page
    links = set(re.findall(r"""(?:src|href)=|url\(|@import|https?://[^"]*""", page))
    assert links == {"http://www.w3.org/2000/svg"}                  # a name, not an address


def test_seconds_of_a_round_are_of_its_parts() -> None:
    trace = Trace(load("demo"), "Lily")
    assert len(list(trace.run(max_new_tokens=6))) == len(trace.rounds)
    assert trace.rounds[0].seconds["prefill"] > 0 and not trace.rounds[0].tree
    for each in trace.rounds[1:]:
        assert each.seconds["prefill"] == 0 < each.seconds["verify"]
        assert min(each.seconds.values()) >= 0


def test_multi_token_characters_are_not_split_in_the_trace() -> None:
    engine = load("demo")
    trace = Trace(engine, "x")
    codec = engine.codec
    assert codec is not None
    for token in codec.encode("é😀", special=False):
        piece = trace._next_piece(token)
        assert "\ufffd" not in piece


def test_a_text_that_fails_midway_leaves_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(update: Any) -> None:
        if update.tree:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_trace(load("demo"), "Once", tmp_path / "t.html", "t", broken,
                    sampling=Sampling(max_new_tokens=8))
    data = data_of((tmp_path / "t.html").read_text())
    assert data["stats"] is None and data["rounds"]
