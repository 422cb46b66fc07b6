"""The recipes that measure still run with the engine as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def test_never_slower_writes_the_texts_of_plain_decoding(tmp_path: Path) -> None:
    command = [sys.executable, RECIPES / "figures" / "run.py", "never_slower", "--prompts", "1",
               "--rounds", "1", "--new-tokens", "6", "--cases", "always wrong, cold",
               "--json", tmp_path / "rows"]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    found = json.loads((tmp_path / "rows").read_text())
    assert [row["budget"] for row in found] == ["fixed 5", "adaptive"]
    assert all(row["same"] == "1/1" for row in found)
