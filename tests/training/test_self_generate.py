"""Text the target writes for its heads: it is the target's own, and written once."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from training_helpers import saved_model

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.training.config import SelfGenerateConfig
from draftproof.training.self_generate import SelfGeneratedText, by_engine, by_transformers
from draftproof.training.texts import Document

WORDS = ("cat", "dog", "fox", "hen", "owl")
DOCUMENTS = [Document(f"Once upon a time there was a {word} who liked to play.") for word in WORDS]
OTHERS = [Document(f"One day a {word} went out.") for word in ("boy", "girl")]
WANTED = SelfGenerateConfig(tokens=600, rows_at_a_time=4, temperatures=(0.0, 0.9))
LENGTH = 48


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(str(saved_model(tmp_path_factory.mktemp("own") / "model",
                                max_position_embeddings=64)), drafter="none")


def write_with(
    generated: SelfGeneratedText, engine: Engine, documents: list[Document], held_out: bool = False,
    progress: Callable[[int, int], None] = lambda tokens, of: None,
) -> None:  # fmt: skip
    assert engine.codec is not None
    writer = partial(by_engine, engine)
    generated.write(writer, engine.codec, engine.target.context, documents, held_out, progress)


def write(file: Path, engine: Engine, wanted: SelfGenerateConfig = WANTED) -> SelfGeneratedText:
    generated = SelfGeneratedText(file, {"model": "m"}, wanted, LENGTH)
    for documents, held_out in ((OTHERS, True), (DOCUMENTS, False)):
        write_with(generated, engine, documents, held_out)
    return generated


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, SelfGeneratedText]:
    file = tmp_path_factory.mktemp("own") / "own_text.jsonl"
    return file, write(file, engine)


def test_each_text_is_what_the_target_writes_after_the_beginning_of_a_document(
    whole: tuple[Path, SelfGeneratedText], engine: Engine
) -> None:
    """Held-out prompts come from other documents; prompts are not in the loss."""
    assert engine.codec is not None
    _, *rows = lines(whole[0])
    assert {row["temperature"] for row in rows} == {0.0, 0.9}
    assert len({row["prompt"] for row in rows}) > 3                       # of random length
    for row in rows:
        prompt, documents = row["tokens"][: row["prompt"]], OTHERS if row["held_out"] else DOCUMENTS
        assert any(engine.codec.encode(document.text)[: len(prompt)] == prompt
                   for document in documents)
    for row in [row for row in rows if row["temperature"] == 0][:6]:
        prompt, new = row["tokens"][: row["prompt"]], row["tokens"][row["prompt"] :]
        (done,) = engine.generate([prompt], max_new_tokens=48 - len(prompt), sampling=Sampling())
        assert done.tokens == new
    for held_out in (False, True):
        texts = list(whole[1].examples(held_out))
        assert sum(sum(text.mask) for text in texts) >= 600
        assert all(len(text.tokens) <= LENGTH for text in texts)
        in_order = sorted((row["number"], row["prompt"], row["tokens"]) for row in rows
                          if row["held_out"] is held_out)
        for (tokens, mask), (_, prompt, written) in zip(texts, in_order, strict=False):
            assert tokens == written and mask == [at >= prompt for at in range(len(tokens))]


def test_resuming_an_interrupted_file_gives_the_complete_file_without_duplicates(
    whole: tuple[Path, SelfGeneratedText], engine: Engine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_text.jsonl"
    text = whole[0].read_bytes().split(b"\n")
    middle = len(text) // 2
    file.write_bytes(b"\n".join(text[:middle]) + b"\n" + text[middle][:20])  # killed while writing
    asked, ask = list[Any](), engine.as_completed
    listen = lambda prompts, **how: asked.extend(prompts) or ask(prompts, **how)  # noqa: E731
    monkeypatch.setattr(engine, "as_completed", listen)
    write(file, engine)
    key = lambda row: (row["held_out"], row["number"])  # noqa: E731
    assert sorted(lines(file)[1:], key=key) == sorted(lines(whole[0])[1:], key=key)
    assert 0 < len(asked) == len(lines(whole[0])) - middle
    asked.clear()
    write(file, engine)
    assert asked == []


def test_a_file_that_lacks_a_text_of_its_last_group_is_not_complete(
    whole: tuple[Path, SelfGeneratedText], tmp_path: Path
) -> None:
    """Though it has tokens enough: the texts of an uninterrupted run are others."""
    few, file = SelfGenerateConfig(60, (0.0, 0.9)), tmp_path / "own_text.jsonl"
    text = whole[0].read_text().splitlines(True)
    file.write_text("".join(line for line in text if '"number":0,' not in line))
    assert SelfGeneratedText(whole[0], {"model": "m"}, few, LENGTH).is_complete(False)
    assert not SelfGeneratedText(file, {"model": "m"}, few, LENGTH).is_complete(False)


def test_self_generated_files_with_other_settings_are_refused_and_extended_otherwise(
    whole: tuple[Path, SelfGeneratedText], engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="length 48, now it is 32"):
        SelfGeneratedText(whole[0], {"model": "m"}, WANTED, 32)
    with pytest.raises(BadInput, match="model"):
        SelfGeneratedText(whole[0], {"model": "n"}, WANTED, LENGTH)
    (mine := tmp_path / "mine.jsonl").write_text("[1]\nhalf a line")
    with pytest.raises(BadInput, match="something else"):
        SelfGeneratedText(mine, {}, WANTED, LENGTH)
    assert mine.read_text() == "[1]\nhalf a line"
    (file := tmp_path / "own_text.jsonl").write_bytes(whole[0].read_bytes())
    more = write(file, engine, SelfGenerateConfig(900, (0.0, 0.9), 16))
    assert file.read_bytes().startswith(whole[0].read_bytes())
    assert sum(sum(text.mask) for text in more.examples(False)) >= 900
    as_before = SelfGeneratedText(file, {"model": "m"}, WANTED, LENGTH)     # of a longer file, too
    assert list(as_before.examples(False)) == list(whole[1].examples(False))


def test_held_out_texts_are_drawn_apart(engine: Engine, tmp_path: Path) -> None:
    """Even after the same documents, they are no copies of texts that are learnt."""
    config = SelfGenerateConfig(tokens=200, rows_at_a_time=4, temperatures=(0.9,))
    generated = SelfGeneratedText(tmp_path / "own.jsonl", {}, config, LENGTH)
    for held_out in (True, False):
        write_with(generated, engine, DOCUMENTS, held_out)
    _, *rows = lines(tmp_path / "own.jsonl")
    held, learnt = ({tuple(row["tokens"]) for row in rows if row["held_out"] is held_out}
                    for held_out in (True, False))
    assert held and learnt and not held & learnt


def test_ctrl_c_keeps_what_is_written_and_says_how_much(engine: Engine, tmp_path: Path) -> None:
    file, told = tmp_path / "own_text.jsonl", list[int]()

    def stop(tokens: int, of: int) -> None:
        told.append(tokens)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"\d+ tokens written; the same command goes on"):
        write_with(SelfGeneratedText(file, {}, WANTED, LENGTH), engine, DOCUMENTS, progress=stop)
    assert len(lines(file)) == 4 and told == sorted(told)
    assert len(list(SelfGeneratedText(file, {}, WANTED, LENGTH).examples(False))) == 3


def test_chats_are_asked_question_by_question(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    assert engine.codec is not None
    tokenizer = engine.codec.tokenizer
    turns = (("user", "A?"), ("assistant", "a"), ("user", "B?"), ("assistant", "b"))
    chat = Document(messages=[{"role": role, "content": content} for role, content in turns])
    monkeypatch.setattr(tokenizer, "chat_template", template)
    file = tmp_path / "chats.jsonl"
    generated = SelfGeneratedText(file, {}, SelfGenerateConfig(60, (0.0,)), LENGTH)
    write_with(generated, engine, [chat])
    asked = {tokenizer.decode(row["tokens"][: row["prompt"]]) for row in lines(file)[1:]}
    assert asked == {"<user>A?<assistant>", "<user>A?<assistant>a<user>B?<assistant>"}


def test_a_long_prompt_keeps_its_end(engine: Engine, tmp_path: Path) -> None:
    """Where its question is; a quarter of the row is left for the answer."""
    assert engine.codec is not None
    question = "Then he asked: what is it?"
    long = Document("It is a toy.", prompt="Once upon a time. " * 40 + question)
    file = tmp_path / "own.jsonl"
    write_with(SelfGeneratedText(file, {}, SelfGenerateConfig(40, (0.0,)), LENGTH), engine, [long])
    for row in lines(file)[1:]:
        prompt = row["tokens"][: row["prompt"]]
        assert len(prompt) == 3 * LENGTH // 4
        assert engine.codec.tokenizer.decode(prompt).endswith(question)


def test_transformers_writes_what_the_engine_writes(engine: Engine) -> None:
    """Greedily; rows of all lengths and limits, in groups, each up to its end token."""
    prompts = [[1 + at % 7] * (1 + at % 3) for at in range(7)]
    wanted = [Sampling(max_new_tokens=5 + at) for at in range(7)]
    stops = [engine.generate([prompts[0]], sampling=wanted[0])[0].tokens[2]]
    model = engine.target.model
    theirs = {index: (tokens, finish)
              for index, tokens, finish in by_transformers(model, stops, prompts, wanted, 3)}
    assert sorted(theirs) == list(range(7))
    for index, (tokens, finish) in theirs.items():
        ours = engine.generate([prompts[index]], sampling=wanted[index])[0].tokens
        end = ours.index(stops[0]) + 1 if stops[0] in ours else len(ours)
        assert tokens == ours[:end] and finish == ("stop" if stops[0] in ours else "length")
    temperatures = [Sampling(temperature=1.0, seed=at, max_new_tokens=9) for at in range(7)]
    sampled = [list(by_transformers(model, [], prompts, temperatures, 4)) for _ in range(2)]
    assert sampled[0] == sampled[1] and {len(tokens) for _, tokens, _ in sampled[0]} == {9}
