"""Names of models and draft heads, and where they are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftproof.model.names import HEADS_PACKAGE, embedded_folder, embedded_names, resolve


def test_draft_heads_of_their_own_package_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / HEADS_PACKAGE / "somebodys-medusa"
    heads.mkdir(parents=True)
    (heads / "config.json").write_text("{}", encoding="utf-8")
    assert embedded_folder(heads.name) is None and resolve(heads.name) == heads.name
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, HEADS_PACKAGE, raising=False)
    assert resolve(heads.name) == str(heads)
    assert {"demo", heads.name} <= set(embedded_names())
    assert resolve("") == "" and resolve("org/model") == "org/model"
