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
from random_models import save_model, save_translator

import draftproof
from draftproof.cli import show
from draftproof.cli.setup import config_of
from draftproof.cli.show import StreamWriter
from draftproof.errors import BadInput
from draftproof.verify.prove import prove

Call = Callable[..., Any]


def test_help_and_version_do_not_import_torch(call: Call) -> None:
    heavy = "{'torch', 'transformers'}"
    script = f"import sys, draftproof.cli.app; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert call("--version").out == f"draftproof {draftproof.__version__}\n"


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii", "iso8859-1"])
def test_json_holds_every_character_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    text, written = "é – 🙂 \ud83d", io.BytesIO()
    out = io.TextIOWrapper(written, encoding=encoding, errors="replace", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    show.print_json({"text": text})
    shown = json.loads(written.getvalue().decode(encoding))["text"]
    assert shown == (text.replace("\ud83d", "?") if encoding == "utf-8" else text)


def test_every_public_name_can_be_imported() -> None:
    homes = draftproof._HOME.values()
    assert {name for names in homes for name in names} == set(draftproof.__all__)
    assert all(getattr(draftproof, name) is not None for name in draftproof.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        draftproof.nonsense  # noqa: B018


def test_prompts_come_from_options_files_or_stdin(
    call: Call, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the summary is one line on stderr; what was loaded is no garbage to be looked through."""
    frozen, unfreeze = list[int](), gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: (frozen.append(gc.get_freeze_count()), unfreeze()))
    plain, marked = tmp_path / "prompt.txt", tmp_path / "notepad.txt"
    plain.write_text("Once upon\n", encoding="utf-8")
    marked.write_text("Once upon\n", encoding="utf-8-sig")     # with a byte order mark
    sources = (["Once upon"], ["-p", "Once upon"], ["--prompt-file", str(plain)],
               ["--prompt-file", str(marked)], ["-"])
    items = [call("run", target, *source, "--max-new-tokens", "6", stdin="Once upon\n")
            for source in sources]
    assert {item.code for item in items} == {0} and len({item.out for item in items}) == 1
    parts = r"6 tokens · [\d.]+ tokens/s · .*prefill .* draft .* verify .* decide"
    assert re.match(parts, items[0].err) and items[0].err.count("\n") == 1
    assert frozen[0] > 100_000
    assert "the prompt is empty" in call("run", target, "-", stdin=None).err, "a closed stdin"


def test_options_without_effect_are_reported(call: Call, target: str) -> None:
    run = ("run", target, "-p", "Once", "--max-new-tokens", "2", "--seed", "3", "--top-p", "0.9")
    idle = "note: without effect at temperature 0: --top-p, --seed; add --temperature\n"
    assert idle in call(*run).err and idle in call(*run, "--json").err
    assert "without effect" not in call(*run, "--temperature", "1").err


@pytest.mark.parametrize(("options", "word"), [
    (("--draft-tree", "2,1"), "the text is identical\n"),
    (("--temperature", "1", "--acceptance", "rejection"), "their distribution is the same"),
])
def test_compare_reports_speed_and_equal_texts(
    call: Call, target: str, draft: str, options: tuple[str, ...], word: str
) -> None:
    run = ("run", target, "-p", "Once", "--assistant-model", draft, "--max-new-tokens", "12")
    output = call(*run, "--compare", *options).err
    assert re.search(r"[\d.]+× as fast as plain decoding; the text ", output) and word in output


def test_stdout_is_a_single_json_object(call: Call, target: str, draft: str) -> None:
    answer = call(
        "run", target, "-p", "Once", "--assistant-model", draft, "--max-new-tokens", "9",
        "--top-k", "5", "--temperature", "1", "--seed", "3", "--json", "--logprobs", "--compare",
    )  # fmt: skip
    got = json.loads(answer.out)
    assert len(got["tokens"]) == len(got["logprobs"]) == 9
    assert got["finish_reason"] == "length"
    assert {"acceptance_by_position", "seconds", "tokens_per_round"} <= got["stats"].keys()
    assert got["compare"]["identical"] is True
    assert got["settings"]["sampling"]["top_k"] == 5
    assert (got["settings"]["drafter"], got["settings"]["draft_tokens"]) == ("draft-model", 10)


def test_trace_writes_a_page_and_keeps_the_text(call: Call, target: str, tmp_path: Path) -> None:
    run = ("run", target, "-p", "Once", "--max-new-tokens", "8")
    page = tmp_path / "trace.html"
    assert call(*run, "--trace", str(page)).out == call(*run).out != ""
    assert page.read_text("utf-8").startswith("<!doctype html>")
    for more, why in ((("--n", "2"), "--trace shows one text"), (("--json",), "shows one text"),
                      (("--trace", "/no/folder/t.html"), "there is no folder /no/folder")):
        answer = call(*run, "--trace", str(page), *more)
        assert answer.code == 2 and why in answer.err


def test_samples_are_numbered(call: Call, target: str) -> None:
    run = ("run", target, "-p", "Once", "--n", "2", "--temperature", "1", "--max-new-tokens", "5")
    first, second = json.loads(call(*run, "--json").out)["samples"]
    assert first["tokens"] != second["tokens"]
    assert call(*run).out == f"[1/2] {first['text']}\n[2/2] {second['text']}\n"


def test_drafted_text_is_coloured_and_control_codes_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces, screen = [("a\x1b[2J\rb\n\tc", ""), ("drafted", "suffix")], io.StringIO()
    StreamWriter(screen).write(pieces)
    assert screen.getvalue() == "a\x1b[2J\rb\n\tcdrafted", "a file gets what was written"
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    StreamWriter(terminal).write(pieces)
    assert terminal.getvalue() == "a\ufffd[2J\ufffdb\n\tc\x1b[32mdrafted\x1b[0m"
    show.note("\x9b2J\x1b[2J")
    assert capsys.readouterr().err == "\ufffd2J\ufffd[2J\n"


def test_the_command_line_of_gaudi_examples_is_understood(
    call: Call, target: str, draft: str
) -> None:
    words = ["run", target, "-p", "the cat", "--max_new_tokens", "5", "--json", "--assistant_model"]
    told = json.loads(call(*words, draft, "--bf16", "--bucket_size", "128").out)
    assert told["settings"]["dtype"] == "bfloat16" and len(told["tokens"]) == 5
    closed, usual = (json.loads(call(*words, draft, "--dtype", "float64", *more).out)["tokens"]
                     for more in (["--bucket_size", "1"], []))
    assert closed == usual, "closed shapes change no text"
    config = config_of("demo", {"graphs": True}, bf16=True)
    assert (config.device, config.dtype) == ("hpu", "bfloat16")
    assert config_of("demo", {"graphs": True, "device": "cuda"}, bf16=False).device == "cuda"


def test_lossy_output_is_marked_with_its_distance(
    call: Call, target: str, tmp_path: Path
) -> None:
    told = re.compile(r"distance from the target's distribution: (\d\.\d\d) per token \(mean total")
    exact = ("--temperature", "0.5", "--max-new-tokens", "40", "--assistant-model", target)
    run, warm = ("run", target, "-p", "Once"), (*exact, "--lossy", "typical:0.001,0.3")
    answer = call(*run, *warm, "--compare")
    assert answer.code == 0 and float(told.findall(answer.err)[0]) > 0
    assert "neither the target's text nor its distribution" in answer.err
    report = json.loads(call(*run, *warm, "--json").out)
    assert 0 < report["stats"]["distance_per_token"] < 1
    assert report["settings"]["lossy"] == "typical:0.001,0.3"
    assert "distance" not in call(*run, *exact).err
    greedy = (*run, "--assistant-model", target, "--max-new-tokens", "20")
    cold = call(*greedy, "--lossy", "typical")
    assert cold.out == call(*greedy).out != "" and told.findall(cold.err) == ["0.00"]
    (prompts := tmp_path / "in.jsonl").write_text('{"prompt": "Once"}\n')
    files = ("run", target, "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"))
    assert told.search(call(*files, *warm).err)
    assert "other options" in call(*files, *exact).err
    engine = draftproof.load(target, drafter="none", lossy="typical")
    with pytest.raises(BadInput, match="lossy"):
        list(prove(lambda: engine, ["bits"], quick=True, progress=lambda name: lambda *_: None))


def test_an_encoder_reads_a_prompt_and_a_file_of_prompts(call: Call, tmp_path: Path) -> None:
    folder = str(save_translator(tmp_path / "t5"))
    how = ("--max-new-tokens", "9", "--temperature", "0.8", "--seed", "1")
    both = call("run", folder, "-p", "Lily and Tom", "--assistant-model", folder, "--compare", *how)
    assert both.code == 0 and "the text is identical" in both.err
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "Lily and Tom"}\n{"prompt": "A dog"}\n')
    assert call("run", folder, "--prompts", str(file), "--out", str(out), *how).code == 0
    first, second = (json.loads(line)["text"] for line in out.read_text().splitlines())
    assert first == both.out.removesuffix("\n") and first != second


def test_an_interrupt_keeps_the_text_so_far(tmp_path: Path) -> None:
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
        rest, output = process.stdout.read(), process.stderr.read().decode()
    assert process.returncode == 130
    assert len(first) == 20 and (first + rest).endswith(b"\n")
    assert output.splitlines()[-1] == "draftproof: interrupted"
    assert "Traceback" not in output
