"""All commands know the same drafters and quantisation, and what no encoder-decoder can do; what
`chat`, `demo` and `doctor` say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from random_models import save_translator

import draftproof as dp
from draftproof.cli import demo
from draftproof.engine.engine import Engine
from draftproof.model import exactness
from draftproof.model.target import Target
from draftproof.verify import prove as proving
from draftproof.verify.report import Section

Call = Callable[..., Any]
COMMANDS = ("run", "batch", "bench", "prove", "doctor")
INT8 = ("--quantize", "int8", "--kv-cache", "int8")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timing, and a proof that only looks at the engine it would check."""
    def looked(engine: Engine, *_: object, **__: object) -> Section:
        kinds = f"{engine.target.quantization}, {engine.target.kv_cache}"
        return Section("bits", f"{engine.drafter.name}, {kinds}")

    monkeypatch.setattr(proving, "prove_bits", looked)
    monkeypatch.setattr(exactness, "probe", partial(exactness.probe, widths=(2,), forced=8))


def command(name: str, model: str, folder: Path, *options: str) -> list[str]:
    """A small run of a command."""
    rows, out = folder / "rows.jsonl", folder / "out.jsonl"
    rows.write_text('{"prompt": "One day"}\n{"prompt": "The sun was"}\n')
    few = ("--max-new-tokens", "4")
    inputs: dict[str, Sequence[str]] = {
        "run": ("run", model, "-p", "One day", *few),
        "batch": ("run", model, "--prompts", str(rows), "--out", str(out), *few),
        "bench": ("bench", model, "--prompts", str(rows), "--limit", "1", "--new-tokens", "4",
                  "--rounds", "1"),
        "prove": ("prove", model, "--section", "bits", "--quick"),
        "doctor": ("doctor", model),
    }
    return [*inputs[name], *options]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_drafts_and_quantises(
    call: Call, target: str, tmp_path: Path, name: str
) -> None:
    answer = call(*command(name, target, tmp_path, "--drafter", "self-int8", *INT8))
    assert answer.code == 0, answer.err
    if name in ("bench", "doctor"):
        assert "KV cache: " in answer.out and "mean KL" in " ".join(answer.out.split())


@pytest.mark.parametrize("drafter", [
    "prompt-lookup", "suffix", "recycling", "portfolio", "self-layers:1", "medusa",
    "redrafter+suffix", "self-int4", "demo-draft",
])  # fmt: skip
def test_every_drafter_can_be_named(call: Call, tmp_path: Path, drafter: str) -> None:
    answer = call(*command("run", "demo", tmp_path, "--drafter", drafter))
    assert answer.code == 0, answer.err


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("options", "words"), [
    ("--drafter oracle", ["oracle", "prompt-lookup", "self-layers:N"]),
    ("--drafter suffix --quantize int7", ["int7", "int8"]),
    ("--drafter suffix --quantize-draft int8", ["--quantize-draft"]),
])
def test_every_command_reports_errors_in_one_sentence(
    refused: Call, target: str, tmp_path: Path, name: str, options: str, words: list[str]
) -> None:
    refused(*command(name, target, tmp_path, *options.split()), words=words)


def test_json_output_includes_the_quantisation_loss(
    call: Call, target: str, tmp_path: Path
) -> None:
    report = json.loads(call("doctor", target, "--json", *INT8).out)
    run = json.loads(call(*command("run", target, tmp_path, "--json", *INT8)).out)
    file = tmp_path / "found.json"
    told = [report["quantised"], run["settings"]["quantised"]]
    for name in ("bench", "prove"):
        call(*command(name, target, tmp_path, "--drafter", "suffix", "--json", str(file), *INT8))
        told.append(json.loads(file.read_text())["about"]["quantised"])
    assert all("int8" in str(commit) and "KV cache" in str(commit) for commit in told)


@pytest.mark.parametrize("command", [
    "prove {model} --section bits", "plan {model}", "audit --hf {model} --assistant-model {model}",
    "train medusa {model} --data {texts} --out {out}",
], ids=lambda command: command.split()[0])
def test_commands_without_encoder_support_raise_a_clear_error(
    call: Call, command: str, tmp_path: Path
) -> None:
    (texts := tmp_path / "texts.jsonl").write_text(json.dumps({"text": "Lily and Tom"}))
    places = {"model": save_translator(tmp_path / "t5"), "texts": texts, "out": tmp_path / "out"}
    out = call(*command.format(**places).split())
    known = "is an encoder-decoder", "does not run as a causal language model"
    assert out.code and any(word in out.err for word in known) and "Traceback" not in out.err


def test_a_conversation(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is that of the whole conversation; what was said before is not read again."""
    model = tmp_path / "talker"
    shutil.copytree(dp.embedded("demo"), model)
    template = "{% for one in messages %}{{ one.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    read, nodes = Target.read, list[int]()

    def counting(self: Target, tree: Any, *args: Any, **more: Any) -> Any:
        nodes.append(tree.tokens.numel())
        return read(self, tree, *args, **more)

    monkeypatch.setattr(Target, "read", counting)
    first, second = "Lily had a red ball. " * 20, "Tom wants it."
    options = ["--drafter", "none", "--max-new-tokens", "12"]
    out = call("chat", str(model), *options, stdin=f"{first}\n{second}\n/stats\n/reset\n{second}")
    assert out.code == 0 and "tokens" in out.err
    used = sum(nodes)
    engine = dp.load(str(model), drafter="none")
    turns, wanted = [{"role": "user", "content": first.strip()}], ""
    for last in (second, None):
        answer = engine.generate(turns, max_new_tokens=12)[0].text
        wanted += answer
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": last}]
    wanted += engine.generate([{"role": "user", "content": second}], max_new_tokens=12)[0].text
    assert "".join(out.out.split()) == "".join(wanted.split())
    once = len(engine.codec.encode(first))
    assert once > 100 and (used < 2 * once or not engine.target.ragged_batches)


def test_chat_answers_may_fill_the_context(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut after 128 tokens, without a word."""
    model, seen = tmp_path / "talker", list[tuple[int | None, int | None]]()
    shutil.copytree(dp.embedded("demo"), model)
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}")

    def stream(self: dp.Engine, turns: Any, sampling: dp.Sampling) -> Any:
        seen.append((sampling.max_new_tokens, sampling.max_length))
        return iter(())

    monkeypatch.setattr(dp.Engine, "stream", stream)
    for options in ([], ["--max-model-len", "200"], ["--max-new-tokens", "9"]):
        assert call("chat", str(model), "--drafter", "none", *options, stdin="Lily\n").code == 0
    assert seen == [(None, 1024), (None, 200), (9, None)]


def test_demo_tells_a_story_and_measures_every_drafter(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TOKENS", 6)
    answer = call("demo")
    assert answer.code == 0, answer.err
    assert demo.OPENINGS[0] in answer.out and "4 stories" in answer.out
    for drafter in ("plain", "portfolio", "medusa", "redrafter", "demo-draft"):
        assert answer.out.count(f"  {drafter} ") == 2
    tables = answer.out[answer.out.index("stories of") :]
    assert max(len(line) for line in tables.splitlines()) <= 80
    assert "draftproof run MODEL" in answer.out.splitlines()[-1]


def test_doctor_reports_guarantees_as_text_and_json(call: Call, target: str) -> None:
    answer = call("doctor", target)
    assert answer.code == 0 and "Guarantee for this model on this machine" in answer.out
    report = json.loads(call("doctor", target, "--json").out)
    assert {"versions", "device", "memory", "guarantee", "same bits", "layers"} <= report.keys()
    assert report["dtype"] == "float32" and report["guarantee"] in answer.out
    differ = report["other bits"].values()           # none on some processors
    gap = f"logits differ by up to {max(differ):.1g}" if differ else "none"
    assert gap in " ".join(answer.out.split())
