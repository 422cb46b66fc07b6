"""First contact: its parts go on after a crash and are not done twice; files travel in pieces."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import target

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.requests.completion import Completion
from draftproof.requests.stats import RoundStats

GPU = Path(__file__).parents[2] / "recipes" / "gpu"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_files_are_sent_in_parts_and_damage_is_detected(tmp_path: Path) -> None:
    source = tmp_path / "models"
    (source / "deep").mkdir(parents=True)
    content = torch.randint(256, (2_500_000,), dtype=torch.uint8).numpy().tobytes()
    (source / "deep" / "weights.bin").write_bytes(content)
    (source / "note.txt").write_text("é")
    run = [sys.executable, GPU / "pieces.py"]
    subprocess.run([*run, "split", tmp_path / "pieces", source, "--megabytes", "1"], check=True,
                   capture_output=True)
    pieces = sorted((tmp_path / "pieces").glob("piece-*"))
    assert len(pieces) == 3 and all(piece.stat().st_size <= 1_000_000 for piece in pieces)
    subprocess.run([*run, "join", tmp_path / "pieces", tmp_path / "there"], check=True,
                   capture_output=True)
    assert (tmp_path / "there/models/deep/weights.bin").read_bytes() == content
    assert (tmp_path / "there/models/note.txt").read_text() == "é"
    damaged = bytearray(pieces[1].read_bytes())
    damaged[77] ^= 1
    pieces[1].write_bytes(damaged)
    done = subprocess.run([*run, "join", tmp_path / "pieces", tmp_path / "other"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is damaged; copy it again" in done.stderr
    pieces[2].unlink()
    pieces[1].unlink()
    done = subprocess.run([*run, "join", tmp_path / "pieces", tmp_path / "other"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is missing" in done.stderr


CHILD = """
import json, os, sys, time
name, spec = sys.argv[1], json.loads(sys.argv[2])
with open(spec["result"], "w") as file:
    json.dump({"rows": [{"value": 1.25}], "problems": ["a | b"] if name == "prove" else []}, file)
if name == "machine": os.abort()
if name == "tests": time.sleep(60)
"""


def test_a_crashing_or_hanging_part_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contact = module("first_contact")
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(contact, "CHECKS", tmp_path / "child.py")
    monkeypatch.setattr(contact, "parts_of", lambda args: [
        contact.Part(name, None, 0.5 if name == "tests" else 30.0)
        for name in ("machine", "doctor", "prove", "tests", "speed")])
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["first_contact.py", "--device", "cpu", "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        contact.main()
    assert end.value.code == 1
    report = json.loads((out / "report.json").read_text())
    states = {part["part"]: part["state"] for part in report["parts"]}
    assert states == {"machine": "failed", "doctor": "passed", "prove": "failed",
                      "tests": "out of time", "speed": "passed"}
    assert all(part["rows"] == [{"value": 1.25}] for part in report["parts"])
    page = (out / "report.md").read_text()
    assert "| prove | failed |" in page and "a / b" in page and "| 1.25 |" in page
    capsys.readouterr()
    with pytest.raises(SystemExit):
        contact.main()
    again = capsys.readouterr().out
    assert "tests ..." in again and "doctor" not in again and "speed" not in again


def test_a_difference_is_judged_by_the_gap_of_its_tokens() -> None:
    checks = module("checks")
    engine, prompt = Engine(target()), [3, 1, 4, 1, 5]
    asked = Sampling(max_new_tokens=4, logprobs=True, top_logprobs=2)
    [done] = engine.generate([prompt], sampling=asked)
    assert done.top_logprobs is not None
    likely = dict(done.top_logprobs[2])
    other = next(token for token in likely if token != done.tokens[2])

    def text(tokens: list[int]) -> Completion:
        return Completion("", tokens, "length", None, RoundStats())

    wrong = text([*done.tokens[:2], other, 0])
    gap = checks.gap_at(engine, prompt, wrong, done)
    assert gap == pytest.approx(max(likely.values()) - min(likely.values()))
    result: list[tuple[Any, Any]] = []
    part = Namespace(add=lambda row, problem: result.append((row, problem)))
    for dtype in ("float64", "bfloat16"):
        checks.add_texts(part, engine, [prompt], [wrong], [done],
                         {"dtype": dtype, "temperature": 0.0})
    assert "another one" in result[0][1]
    assert (result[1][1] is None) == (gap <= checks.NEAR_TIE) and result[1][0]["same"] == "0/1"
