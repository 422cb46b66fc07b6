"""``draftproof bench``: from options to tables, JSON, a page and pictures; mistakes in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import machine, measure

Call = Callable[..., Any]
SHORT = ("--new-tokens", "6", "--rounds", "1", "--limit", "1")


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "peak_of", lambda run, device: (run(), 1)[1])
    monkeypatch.setattr(machine, "PACKAGES", ("torch",))


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "some.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "Lily and Tom", "category": "a"}, {"text": "The sun", "category": "b"}]
    rows.append({"turns": ["One day", "Two days"], "category": "writing"})
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


def test_everything_at_once(call: Call, target: str, draft: str, some: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {"--json": tmp_path / "b.json", "--html": tmp_path / "b.html", "--plots": tmp_path / "plots"}
    given = [str(part) for option in files.items() for part in option]
    said = call(
        "bench", target, "--drafter", "prompt-lookup", "--assistant-model", draft, "--prompts", str(some), "--batch", "1,2",
        "--temperature", "0,0.7", "--against", "transformers", "--price-per-hour", "3", "--num-assistant-tokens", "3", *SHORT,
        *given,
    )  # fmt: skip
    assert said.code == 0, said.err
    for name in ("plain", "prompt-lookup", "draft-model", "transformers", "ceiling", "temperature 0.7, batch 2"):
        assert name in said.out
    found = json.loads(files["--json"].read_text())
    assert found["about"]["workload"] == "3 prompts: some.jsonl" and found["about"]["categories"] == ["a", "b", "writing"]
    figures = {(one["way"], one["setting"]["batch"], one["setting"]["temperature"]): one for one in found["figures"]}
    assert len(figures) == 4 * 4 + 2                                    # assisted generation writes one row at a time
    for way in ("prompt-lookup", "draft-model"):
        for batch in (1, 2):
            for temperature in (0.0, 0.7):
                texts = figures[way, batch, temperature]["texts"]
                assert texts["same"] == texts["compared"] > 0
                assert figures[way, batch, temperature]["ceiling"]["tokens_per_second"] > 0
    assert found["costs"].keys() == {"1", "2"}
    assert "<html" in files["--html"].read_text() and "data:image/png" in files["--html"].read_text()
    assert {file.name for file in files["--plots"].iterdir()} >= {"speed-up.png", "costs.png", "parts.png"}


def test_an_inflated_model_says_so_everywhere(call: Call, target: str, tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    said = call("bench", target, "--drafter", "prompt-lookup", "--inflate", "2M", *SHORT, "--json", str(out))
    assert said.code == 0, said.err
    assert all("inflated to 2M" in line for line in said.out.splitlines() if ": greedy" in line)
    found = json.loads(out.read_text())
    assert abs(found["about"]["parameters"] - 2_000_000) < 100_000
    plain = json.loads(out.read_text())["trials"][0]["texts"][0]["tokens"]
    call("bench", target, "--drafter", "prompt-lookup", *SHORT, "--json", str(out))
    assert json.loads(out.read_text())["trials"][0]["texts"][0]["tokens"] == plain


def test_the_demo_brings_its_own_prompts_and_drafters(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    said = call("bench", *SHORT, "--json", str(out))
    assert said.code == 0, said.err
    found = json.loads(out.read_text())["about"]
    assert found["ways"] == ["plain", "portfolio", "medusa", "redrafter", "draft-model"]
    assert "openings of stories, built in" in found["workload"]


def test_spec_bench_takes_first_turns_by_task(call: Call, target: str, some: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    said = call("bench", target, "--spec-bench", str(some), "--category", "mt_bench", *SHORT, "--json", str(out))
    assert said.code == 0, said.err
    assert json.loads(out.read_text())["about"]["categories"] == ["mt_bench"]


def test_an_interrupt_shows_and_saves_what_was_measured(
    call: Call, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, count = measure.Bench._trial, [0]

    def counted(self: measure.Bench, *args: Any) -> measure.Trial:
        count[0] += 1
        if count[0] > 5:
            raise KeyboardInterrupt
        return trial(self, *args)

    monkeypatch.setattr(measure.Bench, "_trial", counted)
    out = tmp_path / "b.json"
    said = call("bench", target, "--drafter", "prompt-lookup", "--new-tokens", "4", "--json", str(out))
    assert said.code == 130 and "prompt-lookup" in said.out and "Interrupted: 5 runs" in said.out
    assert said.err.strip().endswith("interrupted after 5 of 48 runs; the figures are of these")
    found = json.loads(out.read_text())
    assert found["interrupted"] is True and len(found["trials"]) == 5 and len(found["figures"]) == 2


def test_prompts_that_do_not_fit_are_left_out_and_counted(call: Call, target: str, tmp_path: Path) -> None:
    file, out = tmp_path / "long.jsonl", tmp_path / "b.json"
    file.write_text(json.dumps({"prompt": "word " * 300}) + '\n{"prompt": "short"}\n')
    said = call("bench", target, "--prompts", str(file), "--new-tokens", "5", "--rounds", "1", "--json", str(out))
    assert said.code == 0, said.err
    assert json.loads(out.read_text())["about"]["prompts_left_out_as_too_long"] == 1
    file.write_text(json.dumps({"prompt": "word " * 300}) + "\n")
    said = call("bench", target, "--prompts", str(file))
    assert said.code == 1 and "no prompt leaves room" in said.err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--batch", "0"), "batch was 0; it must be at least 1"),
        (("--batch", "1,x"), "batch was '1,x'"),
        (("--temperature", "-1"), "temperature was '-1'"),
        (("--rounds", "0"), "rounds was 0"),
        (("--new-tokens", "0"), "new_tokens was 0"),
        (("--price-per-hour", "0"), "price_per_hour was 0"),
        (("--inflate", "huge"), "inflate was 'huge'"),
        (("--inflate", "10K"), "ask for more"),
        (("--drafter", "medusa-9"), "drafter was 'medusa-9'"),
        (("--drafter", "prompt-lookup", "--drafter", "prompt-lookup"), "given twice"),
        (("--category", "x"), "there is no category 'x'"),
        (("--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
        (("--prompts", "a.jsonl", "--spec-bench", "b.jsonl"), "give one of them"),
        (("--prompts", "/no/such/file"), "there is no file"),
    ],
)
def test_a_mistake_is_one_sentence(call: Call, target: str, given: tuple[str, ...], why: str) -> None:
    said = call("bench", target, *given)
    assert said.code == 1 and why in said.err
    assert said.err.count("\n") == 1 and "Traceback" not in said.err


def test_without_matplotlib_pictures_are_refused_before_anything_runs(
    call: Call, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = call("bench", target, "--plots", str(tmp_path / "p"))
    assert said.code == 1 and "draftproof[plots]" in said.err and not (tmp_path / "p").exists()
