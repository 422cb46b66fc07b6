"""From files to documents: what is read, what is held out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.errors import BadInput
from draftproof.training.texts import Document, Message, read, split


def rows(folder: Path, *given: Any, name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    return file


CHAT = (Message("user", "Hi"), Message("assistant", "Hello"))


@pytest.mark.parametrize(
    ("row", "document"),
    [
        ({"text": "a b"}, Document("a b")),
        ({"prompt": "q"}, Document(prompt="q")),
        ({"prompt": "q", "completion": "a"}, Document("a", "q")),
        ({"prompt": "q", "response": "a"}, Document("a", "q")),
        ({"turns": ["first", "second"]}, Document(prompt="first")),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, Document(messages=CHAT)),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, Document(messages=CHAT)),
        (
            {"conversations": [{"from": a, "value": b} for a, b in (("gpt", "cut"), ("human", "Hi"), ("gpt", "Hello"))]},
            Document(messages=CHAT),
        ),
    ],
)
def test_every_common_format_is_understood(tmp_path: Path, row: dict[str, Any], document: Document) -> None:
    assert read([rows(tmp_path, row)]) == [document]


def test_a_plain_text_falls_into_pieces_at_paragraphs_and_loses_nothing(tmp_path: Path) -> None:
    paragraphs = [f"{index} " + "word " * 300 for index in range(20)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    pieces = read([tmp_path / "book.txt"])
    assert len(pieces) > 3
    assert "\n\n".join(piece.text for piece in pieces) == "\n\n".join(paragraphs)


def test_a_text_that_comes_twice_is_read_once(tmp_path: Path) -> None:
    one, two = rows(tmp_path, {"text": "a"}, {"text": "b"}), rows(tmp_path, {"text": "b"}, {"text": "c"}, name="more.jsonl")
    assert [document.text for document in read([one, two])] == ["a", "b", "c"]


def test_chat_makes_texts_and_prompts_the_users(tmp_path: Path) -> None:
    file = rows(tmp_path, {"prompt": "q", "completion": "a"}, {"text": "t"})
    chats = [document.messages for document in read([file], chat=True)]
    assert chats == [(Message("user", "q"), Message("assistant", "a")), (Message("user", "t"),)]


def test_what_is_held_out_is_never_trained_on() -> None:
    documents = [Document(str(number)) for number in range(1000)]
    train, held_out = split(documents, seed=3)
    assert not set(train) & set(held_out) and set(train) | set(held_out) == set(documents)
    assert len(held_out) == 20 and split(documents, seed=3) == (train, held_out) != split(documents, seed=4)


def test_few_texts_are_halved() -> None:
    assert [len(part) for part in split([Document("a"), Document("b"), Document("c")], 0)] == [2, 1]
    with pytest.raises(BadInput, match="at least two"):
        split([Document("a")], 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no text"),
        ("[1, 2]\n", "row 1"),
        ('{"story": "a"}\n', "text, messages"),
        ('{"text": 1}\n', "must be text"),
        ('{"messages": [{"role": "robot", "content": "a"}]}\n', "role"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(BadInput, match=words):
        read([tmp_path / "bad.jsonl"])
