"""``draftproof chat``: commands, paths, lines broken between words, base models."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from typing import Any

import pytest

import draftproof as dp
from draftproof.cli import show
from draftproof.cli.chat import _is_command, _to_the_end
from draftproof.core.params import Sampling

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def chat_model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tmp_path_factory.mktemp("chat") / "talker"
    shutil.copytree(dp.embedded("demo"), model)
    template = "{% for one in messages %}{{ one.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    return str(model)


def test_commands_answer_and_leave(call: Call, chat_model_folder: str) -> None:
    lines = "/reset\n/hepl\nexit\nTom was"
    answer = call("chat", chat_model_folder, "--max-new-tokens", "3", stdin=lines)
    assert answer.code == 0 and answer.out == ""
    assert "the conversation is forgotten" in answer.err and "no command /hepl" in answer.err
    assert "--system" in answer.err and "talker" in answer.err


def test_reset_keeps_the_system_message(call: Call, chat_model_folder: str) -> None:
    chat = ("chat", chat_model_folder, "--system", "Once upon a time there was a big red ball.",
            "--max-new-tokens", "9")
    after_reset, first = (call(*chat, stdin=lines).out
                          for lines in ("Lily and Sam went\n/reset\nTom was", "Tom was"))
    assert first.strip() and after_reset.endswith("\n" + first)


def test_an_answer_ends_where_the_context_asked_for_is_full(
    call: Call, chat_model_folder: str
) -> None:
    answer = call("chat", chat_model_folder, "--max-model-len", "24", stdin="Tom was")
    chat = [{"role": "user", "content": "Tom was"}]
    (done,) = dp.load(chat_model_folder).generate([chat], sampling=Sampling(max_length=24))
    assert done.finish_reason == "length"
    assert answer.out.split() == done.text.split()


def test_a_line_starting_with_a_path_is_not_a_command() -> None:
    assert _is_command("/rest") and _is_command("/stat")
    assert not any(map(_is_command, ("/etc/hosts is what?", "/tmp", "/usr/bin", "a /reset")))


def test_answers_have_no_default_length_limit() -> None:
    assert _to_the_end(Sampling(), 2048).max_length == 2048
    assert _to_the_end(Sampling(max_new_tokens=5), 2048).max_length is None


def test_base_models_are_refused_with_advice(refused: Call, target: str) -> None:
    refused("chat", target, words=["base model", "instruction-tuned", "draftproof run"])


def test_lines_wrap_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setenv("NO_COLOR", "1")
    writer = show.StreamWriter(out := Terminal(), wrap=True)
    for piece in ("She wa", "lked to the", " ri", "ver.\n", "Oh"):
        writer.write([(piece, "")])
    writer.end()
    assert out.getvalue().split("\n") == ["She walked ", "to the ", "river.", "Oh", ""]
