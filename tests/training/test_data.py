"""From files as people have them to documents, and from documents to masked rows and batches."""

from __future__ import annotations

import copy
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompts

from draftproof import embedded
from draftproof.errors import BadInput
from draftproof.model.loading import load_tokenizer
from draftproof.tokenizer.codec import Codec
from draftproof.training.rows import Batches, Example, Rows, prompt_of, tokenized
from draftproof.training.texts import DataConfig, Document, read, split

HI, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT, ASKED = Document(messages=[HI, SAID]), Document(messages=[HI])
CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
FORMATS: list[tuple[Any, Document]] = [
    ({"text": "a b"}, Document("a b")),
    ({"text": "cut \ud83d"}, Document("cut \ufffd")),
    ({"prompt": "q"}, Document(prompt="q")),
    ({"prompt": "q", "completion": "a"}, Document("a", "q")),
    ({"question": "q", "answer": "a"}, Document("a", "q")),
    ({"instruction": "q", "input": "of", "output": "a"}, Document("a", "q\n\nof")),
    ({"instruction": "q", "input": "", "output": "a"}, Document("a", "q")),
    ({"turns": ["first", "second"]}, Document(prompt="first")),
    ({"messages": [HI, SAID]}, CHAT),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, SAID]}, CHAT),
    ({"messages": [HI, {**SAID, "role": "model"}]}, CHAT),
    ({"prompt": [HI], "completion": [SAID]}, CHAT),
    ({"custom_id": "1", "body": {"messages": [HI]}}, ASKED),
    ({"messages": [{"role": "developer", "content": "Be \ud83d"}, HI]},
     Document(messages=[{"role": "system", "content": "Be \ufffd"}, HI])),
    ({"conversations": [{"from": a, "value": b} for a,
                        b in (("gpt", "cut"), ("human", "Hi"), ("gpt", "Hello"))]}, CHAT),
    ({"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                   {"role": "tool", "content": "3"}, SAID]},
     Document(messages=[HI, {"role": "assistant", "content": "", "tool_calls": CALLED},
                        {"role": "tool", "content": "3"}, SAID])),
]  # fmt: skip
UNUSABLE: list[tuple[bytes, str]] = [
    (b'{"text": "two"', "not JSON"), (b"[" * 5000, "not JSON"), (b"7", "not an object"),
    (b'{"text": ""}', "empty"), (b'{"text": null}', "empty"), (b'{"text": 1}', "must be text"),
    (b'{"story": "a"}', "none of the fields text, messages"),
    (b'{"messages": [{"role": "robot", "content": "a"}]}', "role 'robot'"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "not text"),
    (b'{"messages": "Hi"}', "list of objects"), (b'{"messages": [1]}', "list of objects"),
    (b'{"messages": [{"role": "assistant", "content": "a"}]}', "without a user"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "document"), FORMATS)
def test_every_common_format_is_understood(tmp_path: Path, row: Any, document: Document) -> None:
    (tmp_path / "rows.JSONL").write_text(json.dumps(row) + "\n\n")
    (tmp_path / "array.json").write_text(json.dumps([row, row], indent=2), encoding="utf-8-sig")
    for name in ("rows.JSONL", "array.json"):
        assert read([tmp_path / name]) == [document]
        assert read([tmp_path / name], chat=True) == [document.as_chat()]
    assert Document("Hello", "Hi").as_chat() == CHAT and Document("Hi").as_chat() == ASKED


@pytest.mark.parametrize(("row", "words"), UNUSABLE)
def test_unusable_rows_are_skipped_and_counted(tmp_path: Path, row: bytes, words: str) -> None:
    file, notes = tmp_path / "rows.jsonl", list[str]()
    file.write_bytes(b'{"text": "one"}\r\n' + 5 * (row + b"\n") + b'{"text": "three"}\n')
    assert read([file], note=notes.append) == [Document("one"), Document("three")]
    (note,) = notes
    assert note.startswith("skipped 5 rows") and note.count(words) == 3
    assert "row 2 of rows.jsonl" in note
    file.write_bytes(row)
    with pytest.raises(BadInput, match=words if row[:1] != b"[" else "broken"):
        read([file])


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [("a.CSV", b"text\nhello\n", "CSV"), ("a.txt", b"caf\xe9", "UTF-8"),
     ("a.txt", b"a\0b", "not a text file"), ("a.jsonl", b"", "no text"),
     ("a.json", b'[{"text": "a"},', "JSON array"), ("a.json", b'["a", "b"]', "not an object")],
)  # fmt: skip
def test_files_that_cannot_be_read_rightly_are_refused(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=words):
        read([tmp_path / name])


@pytest.mark.parametrize(("encoding", "end"), [("utf-8", "\n"), ("utf-8-sig", "\r\n")])
def test_a_plain_text_falls_into_pieces_at_paragraphs_and_loses_nothing(
    tmp_path: Path, encoding: str, end: str
) -> None:
    paragraphs = [f"{index} " + "word " * 300 for index in range(20)]
    (tmp_path / "book.txt").write_bytes((end * 2).join(paragraphs).encode(encoding))
    pieces = read([tmp_path / "book.txt", tmp_path / "book.txt"])              # each once
    whole = "\n\n".join(piece.text for piece in pieces)
    assert len(pieces) > 3 and whole == "\n\n".join(paragraphs)


def test_each_file_is_a_part_of_what_a_run_is_known_by(tmp_path: Path) -> None:
    """Also where several have the same name: a run must not go on with other texts."""
    files = [tmp_path / name for name in ("a/rows.txt", "b/rows.txt", "more.txt")]
    known = []
    for changed in (None, *files):
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.write_text("changed" if file == changed else "text")
        known.append(DataConfig(tuple(files)).hashes())
    assert all(first != second for first, second in combinations(known, 2))
    assert [*DataConfig((files[0], files[2])).hashes()] == ["rows.txt", "more.txt"]


def test_held_out_documents_are_never_trained_on() -> None:
    documents = [Document(str(number)) for number in range(1000)]
    train, held_out = split(documents, seed=3)
    assert sorted(train + held_out) == sorted(documents)
    assert len(held_out) == 20 and split(documents, seed=3) == (train, held_out)
    assert split(documents, seed=4) != (train, held_out)
    assert [len(part) for part in split(documents[:3], 0)] == [2, 1]
    with pytest.raises(BadInput, match="at least two"):
        split([Document("a")], 0)


PLAIN = """{% for m in messages %}<{{ m.role }}>
{{ m.content }}<end>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
FORGETFUL = """{% for m in messages %}<{{ m.role }}>
{% set cut = m.role == 'assistant' and not loop.last %}
{{- m.content.split('|')[-1 if cut else 0:] | join('|') }}<end>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
TURNS = [{"role": role, "content": content} for role, content in (
    ("system", "Be kind."), ("user", "Who are you?"), ("assistant", "hm|A dog."),
    ("user", "Really?"), ("assistant", "so|Yes!"))]  # fmt: skip


def codec_of(template: str | None) -> Codec:
    tokenizer = copy.deepcopy(load_tokenizer(embedded("demo")))
    assert tokenizer is not None
    tokenizer.chat_template = template
    return Codec(tokenizer)


@pytest.mark.parametrize(
    ("template", "lines"),
    [(PLAIN, ["hm|A dog.<end>\nso|Yes!<end>\n"]),
     (FORGETFUL, ["hm|A dog.<end>\n", "so|Yes!<end>\n"])],
    ids=["plain", "forgets thoughts"],
)  # fmt: skip
def test_the_assistants_words_are_in_the_loss_and_follow_on_the_prompt(
    template: str, lines: list[str]
) -> None:
    """Training sees the tokens decoding sees; an example per answer where the template forgets."""
    codec = codec_of(template)
    examples = tokenized(Document(messages=TURNS), codec, None)
    learnt = [[token for token, kept in zip(*example, strict=True) if kept] for example in examples]
    assert [codec.tokenizer.decode(tokens) for tokens in learnt] == lines
    if len(lines) == 2:
        assert "hm" not in codec.tokenizer.decode(examples[1].tokens)
    asked = prompt_of(Document(messages=TURNS[:2]), codec)
    tokens, mask = tokenized(Document(messages=TURNS[:3]), codec, None)[0]
    assert tokens[: len(asked)] == asked and not any(mask[: len(asked)]) and all(mask[len(asked) :])
    assert prompt_of(Document(messages=TURNS), codec, 2) == asked   # turns of the user, in a circle


def test_only_answers_are_in_the_loss_and_an_end_is_added() -> None:
    codec = codec_of(None)
    ((tokens, mask),) = tokenized(Document("a dog", "Who is it?"), codec, 0)
    asked = prompt_of(Document("a dog", "Who is it?"), codec)
    assert tokens == asked + codec.encode("a dog", special=False) + [0]
    assert mask == [False] * len(asked) + [True] * (len(tokens) - len(asked))
    assert tokenized(Document(prompt="Who is it?"), codec, 0) == []
    with pytest.raises(BadInput, match="chat template"):
        tokenized(CHAT, codec, 0)


def ragged() -> Rows:
    texts = prompts(40, seed=1, longest=50)
    return Rows((Example(text, [place > 1 for place in range(len(text))]) for text in texts), 32)


def test_every_row_comes_once_per_epoch_and_a_batch_follows_from_seed_and_step() -> None:
    """Padding is not in the loss, and the rest is the text."""
    item, two, other = (Batches(ragged(), 4, seed) for seed in (7, 7, 8))
    size, rows = len(item), item.rows
    epochs = [[number for step in range(size) for number in item[epoch * size + step].rows]
              for epoch in (0, 1)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(range(len(item.rows)))
    assert epochs[0] != epochs[1] and size > 3
    for step in (13, 2, 40):
        assert torch.equal(item[step].tokens, two[step].tokens)
        assert item[step].rows == two[step].rows
    assert any(item[step].rows != other[step].rows for step in range(5))
    for batch in (item[step] for step in range(size)):
        for place, number in enumerate(batch.rows):
            (row, mask), size = rows.rows[number], batch.sizes[place]
            assert torch.equal(batch.tokens[place, :size].int(), row)
            assert torch.equal(batch.weights[place, :size].bool(), mask)
            assert not batch.weights[place, size:].any() and size == len(row)
        assert batch.tokens.numel() <= 4 * rows.length


def test_rows_are_cut_grouped_by_width_and_dropped_where_nothing_can_be_learnt() -> None:
    """A head reads a token to predict the one after the next: what is learnt has two before it."""
    rows = Rows([Example(list(range(100)), [True] * 100)], 32)
    assert rows.sizes.tolist() == [32, 32, 32, 4] and rows.rows[1][0].tolist() == [*range(32, 64)]
    texts = [Example([1, 2], [True] * 2), Example([1, 2, 3], [True, True, False]),
             Example([1, 2, 3], [False, False, True])]
    assert [row.tolist() for row, _ in Rows(texts, 16).rows] == [[1, 2, 3]]
    rows = Rows((Example([1] * size, [True] * size) for size in [16] * 64 + [128] * 8), 128)
    shapes = Counter(tuple(Batches(rows, 2, 0)[step].tokens.shape)
                     for step in range(len(Batches(rows, 2, 0))))
    assert shapes == {(16, 16): 4, (2, 128): 4}
    pairs = [Example([1, 2, 3, 4], [False, False, True, True]),
             Example([5, 6, 7, 8], [True, False, False, True])]
    first, second = Rows(pairs, 32).bigrams()                       # never over the end of a row
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [(2, 3), (3, 4), (7, 8)]
