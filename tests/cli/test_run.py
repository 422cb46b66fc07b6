"""``draftproof run`` on one prompt: options, output, and how it ends."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from random_models import save_model

import draftproof
from draftproof.cli import show
from draftproof.cli.options import Color
from draftproof.cli.setup import gaudi_words
from draftproof.cli.show import StreamWriter
from draftproof.engine.completion import first_difference
from draftproof.engine.engine import Chunk

Call = Callable[..., Any]


def test_help_and_version_do_not_wait_for_torch() -> None:
    heavy = "{'torch', 'transformers'}"
    script = f"import sys, draftproof.cli.app; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_public_name_can_be_imported() -> None:
    homes = draftproof._HOME.values()
    assert {name for names in homes for name in names} == set(draftproof.__all__)
    assert all(getattr(draftproof, name) is not None for name in draftproof.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        draftproof.nonsense  # noqa: B018


def test_version_is_said(call: Call) -> None:
    assert call("--version").out == f"draftproof {draftproof.__version__}\n"


def test_underscored_options_are_accepted(call: Call, target: str, draft: str) -> None:
    run = ("run", target, "-p", "a_b", "--stop", "--a_b")
    dashes = call(*run, "--assistant-model", draft, "--max-new-tokens", "8")
    underscores = call(*run, "--assistant_model", draft, "--max_new_tokens=8")
    assert dashes.code == underscores.code == 0
    assert dashes.out == underscores.out != ""


def test_the_prompt_may_come_from_anywhere(call: Call, target: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Once upon\n")
    rest = ("--max-new-tokens", "6")
    said = [
        call("run", target, "Once upon", *rest),
        call("run", target, "-p", "Once upon", *rest),
        call("run", target, "--prompt-file", str(tmp_path / "prompt.txt"), *rest),
        call("run", target, "-", *rest, stdin="Once upon\n"),
    ]
    assert {one.code for one in said} == {0}
    assert len({one.out for one in said}) == 1


def test_the_summary_is_one_line_on_stderr(call: Call, target: str) -> None:
    said = call("run", target, "-p", "Once", "--max-new-tokens", "12")
    assert said.err.count("\n") == 1
    parts = r"12 tokens · [\d.]+ tokens/s · .*prefill .* draft .* verify .* decide"
    assert re.match(parts, said.err)


def test_what_was_loaded_is_not_looked_through_for_garbage(
    call: Call, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of thousands of objects: a quarter of a second, in the middle of a text."""
    frozen, unfreeze = list[int](), gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: (frozen.append(gc.get_freeze_count()), unfreeze()))
    assert call("run", target, "-p", "Once upon", "--max-new-tokens", "2").code == 0
    assert frozen[0] > 100_000


@pytest.mark.parametrize(("options", "word"), [
    (("--draft-tree", "2,1"), "the text is identical\n"),
    (("--temperature", "1", "--acceptance", "rejection"), "the law is the same"),
])
def test_compare_says_how_fast_and_what_is_the_same(
    call: Call, target: str, draft: str, options: tuple[str, ...], word: str
) -> None:
    run = ("run", target, "-p", "Once", "--assistant-model", draft, "--max-new-tokens", "12")
    said = call(*run, "--compare", *options).err
    assert re.search(r"[\d.]+× as fast as plain decoding; the text ", said) and word in said


def test_json_is_one_object_and_nothing_else(call: Call, target: str, draft: str) -> None:
    said = call(
        "run", target, "-p", "Once", "--assistant-model", draft, "--max-new-tokens", "9",
        "--top-k", "5", "--temperature", "1", "--seed", "3", "--json", "--logprobs", "--compare",
    )  # fmt: skip
    found = json.loads(said.out)
    assert len(found["tokens"]) == len(found["logprobs"]) == 9
    assert found["finish_reason"] == "length"
    assert {"acceptance_by_position", "seconds", "tokens_per_round"} <= found["stats"].keys()
    assert found["compare"]["identical"] is True
    assert found["settings"]["sampling"]["top_k"] == 5
    assert (found["settings"]["drafter"], found["settings"]["draft_tokens"]) == ("draft-model", 10)


def test_samples_are_numbered(call: Call, target: str) -> None:
    run = ("run", target, "-p", "Once", "--n", "2", "--temperature", "1", "--max-new-tokens", "5")
    said = call(*run, "--json")
    first, second = json.loads(said.out)["samples"]
    assert first["tokens"] != second["tokens"]
    assert call(*run).out == f"[1/2] {first['text']}\n[2/2] {second['text']}\n"


def test_colour_only_marks_drafted_text(call: Call, target: str) -> None:
    rest = ("run", target, "-p", "One", "--assistant-model", target, "--max-new-tokens", "12")
    plain, coloured = call(*rest).out, call(*rest, "--color", "always").out
    assert "\x1b[" not in plain
    assert "\x1b[32m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_a_model_cannot_steer_the_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, harmless = Terminal(), "a\ufffd[2J\ufffdb\n\tc"
    StreamWriter(screen, Color.never).write(Chunk([("a\x1b[2J\rb\n\tc", True)]))
    assert screen.getvalue() == harmless
    table = show.page(file=Terminal(), force_terminal=True, color_system=None, width=40)
    table.print("\x9b2J\x1b[2J", markup=False)
    assert table.file.getvalue() == "\ufffd2J\ufffd[2J\n"
    line = show.as_json({"text": "\x1b\x7f\x9b\u00e9"})
    assert line.isprintable() and json.loads(line) == {"text": "\x1b\x7f\x9b\u00e9"}


def test_the_first_difference_is_counted_from_one() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 2
    assert first_difference([1, 2], [1, 2, 3]) == 3


def test_the_command_line_of_gaudi_examples_is_understood(
    call: Call, target: str, draft: str
) -> None:
    words = ["run", target, "-p", "the cat", "--max_new_tokens", "5", "--json", "--assistant_model"]
    told = json.loads(call(*words, draft, "--bf16", "--bucket_size", "128").out)
    assert told["settings"]["dtype"] == "bfloat16" and len(told["tokens"]) == 5
    exact = [
        json.loads(call(*words, draft, "--dtype", "float64", *more).out)["tokens"]
        for more in (["--bucket_size", "1"], [])
    ]
    assert exact[0] == exact[1], "closed shapes change no text"
    graphs = {"graphs": True, "device": "hpu", "dtype": "bfloat16"}
    assert gaudi_words({"graphs": True}, bf16=True) == graphs
    both = {"dtype": "bfloat16", "device": "cuda", "graphs": True}
    assert gaudi_words(both, bf16=True) == both
    assert gaudi_words({"dtype": "float32"}, bf16=False) == {"dtype": "float32"}


def test_interrupt_keeps_what_was_written(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "long", context=30_000)
    command = [sys.executable, "-m", "draftproof", "run", str(folder), "-p", "Once"]
    command += ["--max-new-tokens", "29000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # whoever runs the tests may ignore it
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, preexec_fn=heard
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, said = process.stdout.read(), process.stderr.read().decode()
    assert process.returncode == 130
    assert len(first) == 20 and (first + rest).endswith(b"\n")
    assert said.splitlines()[-1] == "draftproof: interrupted"
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [(">&-", 1, "output is closed"), ("2>&-", 0, ""), ("<&-", 1, "stdin")],
)
def test_closed_streams_are_no_traceback(target: str, closed: str, code: int, said: str) -> None:
    source = "-" if closed == "<&-" else "-p Once"
    command = f"{sys.executable} -m draftproof run {target} {source}"
    script = f"{command} --max-new-tokens 4 --json {closed}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        script, shell=True, capture_output=True, env=environment, check=False, text=True
    )
    assert done.returncode == code and said in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1


def test_a_reader_that_leaves_early_is_no_error(target: str) -> None:
    run = f"{sys.executable} -m draftproof run {target} -p Once --max-new-tokens 60 --n 3"
    script = f"{run} | head -c 3"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, shell=True, capture_output=True, env=environment, check=False)
    assert b"Traceback" not in done.stderr and b"Errno" not in done.stderr
