"""Training text written by the target itself: what a head must foretell is what the target will write.

Text the target wrote is also its own label: foretelling it is distillation at the temperature it was written with.
Knows an engine and documents. The file is appended to as rows are completed, and gone on with after an interruption.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput
from draftproof.model.tokenizer import Codec
from draftproof.training.chats import Marked, question
from draftproof.training.lock import claim
from draftproof.training.texts import Document, shuffled

LONGEST_OPENING = 64
"""Tokens of a text given to the target as a beginning, at most; and never more than half of a row."""


@dataclass(frozen=True)
class Wanted:
    """What is to be written: `tokens` new tokens in rows of at most `length`, at these temperatures in turn."""

    tokens: int
    length: int
    temperatures: tuple[float, ...] = (0.0, 0.7)
    rows_at_a_time: int = 32
    seed: int = 0


class Progress(NamedTuple):
    """How far the writing is."""

    tokens: int
    of: int
    speed: float


class Text(NamedTuple):
    """What was written: the tokens, and how many of them were given."""

    tokens: array[int]
    prompt: int


Told = Callable[[Progress], None]
"""Hears of every completed text."""


class Job(NamedTuple):
    """One text to write."""

    number: int
    prompt: list[int]
    sampling: Sampling


class SelfGeneratedText:
    """The texts of one file. `identity` says what they come from; a file of another origin is refused."""

    def __init__(self, file: Path, identity: dict[str, Any], wanted: Wanted) -> None:
        self.file, self.wanted = file, wanted
        self._head = json.loads(json.dumps({**identity, **asdict(wanted)}))
        self._rows: dict[bool, dict[int, Text]] = {False: {}, True: {}}
        self._written = {False: 0, True: 0}
        self._read()

    def is_complete(self, held_out: bool) -> bool:
        return self._written[held_out] >= self._share(held_out)

    def marked(self, held_out: bool) -> Iterator[Marked]:
        """The texts, in the order of their prompts; prompts do not count."""
        for _, (tokens, prompt) in sorted(self._rows[held_out].items()):
            yield Marked(tokens.tolist(), [place >= prompt for place in range(len(tokens))])

    def write(self, engine: Engine, documents: Sequence[Document], held_out: bool, told: Told) -> None:
        """Write until there is enough; `told` hears of every completed text."""
        if engine.codec is None:
            raise BadInput(f"{engine.target.name} has no tokenizer; it is needed to read the data")
        try:
            self._write(engine, documents, held_out, told)
        except KeyboardInterrupt:
            done = sum(self._written.values())
            raise KeyboardInterrupt(f"interrupted with {done:,} tokens written; the same command goes on from there") from None

    def _write(self, engine: Engine, documents: Sequence[Document], held_out: bool, told: Told) -> None:
        begun, before = time.perf_counter(), self._written[held_out]
        with self.file.open("ab+") as out:
            claim(out, self.file)
            _cut_half_a_line(out)
            if self.file.stat().st_size == 0:
                _append(out, self._head)
            while not self.is_complete(held_out):
                jobs = self._window(documents, held_out, engine)
                for job, new, reason in _completed(engine, jobs, self.wanted.rows_at_a_time):
                    self._add(held_out, job.number, job.prompt, new)
                    _append(out, _row(job, new, held_out, reason))
                    done = self._written[held_out]
                    speed = (done - before) / (time.perf_counter() - begun)
                    told(Progress(min(done, self._share(held_out)), self._share(held_out), speed))

    def _window(self, documents: Sequence[Document], held_out: bool, engine: Engine) -> list[Job]:
        """Prompts that have no text yet: as many as by the texts so far will do, so that few rows run alone at the end.

        The windows follow from the texts of those before, whole ones only: an interruption changes nothing.
        """
        rows, start, size = self._rows[held_out], 0, 2 * self.wanted.rows_at_a_time
        while all(number in rows for number in range(start, start + size)):
            start += size
            new = sum(len(rows[number].tokens) - rows[number].prompt for number in range(start))
            missing = (self._share(held_out) - new) * start / max(1, new)
            size = max(1, min(64 * self.wanted.rows_at_a_time, round(missing)))
        return [self._job(number, documents, held_out, engine) for number in range(start, start + size) if number not in rows]

    def _job(self, number: int, documents: Sequence[Document], held_out: bool, engine: Engine) -> Job:
        assert engine.codec is not None
        dice = np.random.default_rng((self.wanted.seed, held_out, number))
        turn, index = divmod(number, len(documents))
        document = documents[shuffled(len(documents), self.wanted.seed, turn)[index]]
        prompt = _opening(document, turn, engine.codec, min(self.wanted.length, engine.target.context) // 2, dice)
        temperatures = self.wanted.temperatures
        sampling = Sampling(
            temperature=temperatures[number % len(temperatures)],
            seed=int(dice.integers(1 << 31)),
            max_new_tokens=max(1, self.wanted.length - len(prompt)),
        )
        return Job(number, prompt, sampling)

    def _share(self, held_out: bool) -> int:
        """New tokens wanted: for examining a fiftieth, within reason."""
        return min(max(self.wanted.tokens // 50, 2000), 30000, self.wanted.tokens) if held_out else self.wanted.tokens

    def _add(self, held_out: bool, number: int, prompt: Sequence[int], new: Sequence[int]) -> None:
        self._rows[held_out][number] = Text(array("i", [*prompt, *new]), len(prompt))
        self._written[held_out] += len(new)

    def _read(self) -> None:
        """The texts of an earlier run."""
        if not self.file.exists():
            return
        with self.file.open("rb") as file:
            for number, line in enumerate(file):
                if line.endswith(b"\n"):
                    row = _parsed(line, self.file)
                    if number == 0:
                        self._must_be_ours(row)
                    else:
                        given, tokens = row["prompt"], row["tokens"]
                        self._add(row["held_out"], row["number"], tokens[:given], tokens[given:])

    def _must_be_ours(self, head: dict[str, Any]) -> None:
        """Refuse texts of another origin; more or less of the same is not another."""
        for key in sorted(self._head.keys() | head.keys()):
            if head.get(key) != self._head.get(key) and key not in ("tokens", "rows_at_a_time"):
                raise BadInput(
                    f"{self.file} was written with {key} {head.get(key)!r}, now it is {self._head.get(key)!r}; "
                    "give the same, or another place, or remove the file"
                )


def _parsed(line: bytes, file: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise BadInput(f"{file} holds something else than texts a target wrote; name another place")
    return row


def _cut_half_a_line(file: IO[bytes]) -> None:
    """What a killed run began to write and did not end."""
    file.seek(0)
    size = sum(len(line) for line in file if line.endswith(b"\n"))
    file.truncate(size)


def _completed(engine: Engine, jobs: Sequence[Job], size: int) -> Iterator[tuple[Job, list[int], str]]:
    samplings = [job.sampling for job in jobs]
    for done in engine.as_completed([job.prompt for job in jobs], sampling=samplings, batch_size=size):
        yield jobs[done.prompt], done.checked().tokens, done.finish_reason


def _opening(document: Document, turn: int, codec: Codec, most: int, dice: np.random.Generator) -> list[int]:
    """What the target is asked to go on with: a chat up to one of its questions, a prompt, or the start of a text."""
    if document.messages:
        asked = [index for index, (role, _) in enumerate(document.messages) if role == "user"]
        until = asked[turn % len(asked)] + 1 if asked else len(document.messages)
        return _last(question(codec, document.messages[:until]), 2 * most)
    if document.prompt is not None:
        return _last(codec.encode(document.prompt), 2 * most)
    text = codec.encode(document.text[: 20 * LONGEST_OPENING])
    return text[: int(dice.integers(1, max(2, min(LONGEST_OPENING, most, len(text)) + 1)))]


def _last(prompt: list[int], most: int) -> list[int]:
    """A prompt that leaves room to answer: at least a quarter of a row."""
    return prompt[-max(1, 3 * most // 4) :]


def _row(job: Job, new: list[int], held_out: bool, reason: str) -> dict[str, Any]:
    head = {"number": job.number, "held_out": held_out, "prompt": len(job.prompt)}
    return {**head, "temperature": job.sampling.temperature, "finish": reason, "tokens": [*job.prompt, *new]}


def _append(file: IO[bytes], row: dict[str, Any]) -> None:
    """One row, there for whoever looks as soon as this returns."""
    file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    file.flush()
