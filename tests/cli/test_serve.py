"""What `draftproof serve` refuses before it loads a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli.serve import KEY_VARIABLE, _keys
from draftproof.errors import BadInput

Call = Callable[..., Any]


@pytest.mark.parametrize("options", [["--api-key", ""], ["--api-key", " "], []])
def test_an_empty_api_key_is_refused(
    refused: Call, target: str, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """A shell variable that is not set would leave the server open."""
    monkeypatch.setenv(KEY_VARIABLE, "")
    where = "--api-key" if options else KEY_VARIABLE
    refused("serve", target, "--port", "0", *options, words=[where, "empty"])


def test_an_unknown_log_level_is_refused(refused: Call, target: str) -> None:
    refused("serve", target, "--port", "0", "--log-level", "loud", words=["--log-level", "info"])


def test_keys_come_from_a_file_and_from_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    lines = ["\ufeff# of the team", " \t# two", "one", "", "zwei-ü "]
    (file := tmp_path / "keys").write_bytes("\r\n".join(lines).encode())
    assert _keys(None, None) == []
    assert _keys("three", file) == ["one", "zwei-ü", "three"]
    monkeypatch.setenv(KEY_VARIABLE, "four")
    assert _keys(None, None) == ["four"]
    file.write_text("# none\n")
    for wrong, word in ((file, "no key"), (tmp_path / "nowhere", "cannot be read")):
        with pytest.raises(BadInput, match=word):
            _keys(None, wrong)
