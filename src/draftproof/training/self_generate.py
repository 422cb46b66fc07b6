"""Training text written by the target itself, since heads have to predict what the target writes.

Such text is its own label: predicting it is distillation at the temperature it was sampled at.
Completed texts are appended to the file, which is continued after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput
from draftproof.model.batch_generate import batch_generate
from draftproof.tokenizer.codec import Codec
from draftproof.training.config import SelfGenerateConfig
from draftproof.training.files import file_lock, same_settings
from draftproof.training.rows import Example, prompt_of
from draftproof.training.texts import Document, shuffled

if TYPE_CHECKING:
    from draftproof.model.loading import PreTrainedModel

Text = tuple[int, list[int], str]
"""The index of a prompt, the new tokens, and the finish reason."""
Writer = Callable[[Sequence[list[int]], Sequence[Sampling], int], Iterator[Text]]
"""Completes prompts, in any order, so many rows at a time."""


def by_engine(
    engine: Engine, prompts: Sequence[list[int]], samplings: Sequence[Sampling], rows: int
) -> Iterator[Text]:
    """Write with our own decoding, on CPUs, where a packed target is several times as fast."""
    for done in engine.as_completed(prompts, sampling=samplings, batch_size=rows):
        yield done.prompt, done.checked().tokens, done.finish_reason


def by_transformers(
    model: PreTrainedModel, stops: Sequence[int], prompts: Sequence[list[int]],
    samplings: Sequence[Sampling], rows: int,
) -> Iterator[Text]:  # fmt: skip
    """Write hundreds of rows at a time with `generate`, which suits accelerators.

    Rows of equal temperature and similar length are grouped; a group's seed is its first row's.
    """

    def alike(index: int) -> tuple[float, int]:
        return samplings[index].temperature, len(prompts[index])

    for temperature, group in groupby(
        sorted(range(len(prompts)), key=alike), lambda i: alike(i)[0]
    ):
        order = list(group)
        for start in range(0, len(order), rows):
            indices = order[start : start + rows]
            limits = [samplings[index].max_new_tokens or 1 for index in indices]
            batch, seed = [prompts[index] for index in indices], samplings[indices[0]].seed
            texts = batch_generate(model, batch, limits, temperature, stops, seed)
            for index, new in zip(indices, texts, strict=True):
                yield index, new, "stop" if new[-1] in stops else "length"


class SelfGeneratedText:
    """The texts of one file, in rows of at most `length` tokens.

    identity: their origin; a file of another origin is refused.
    """

    def __init__(
        self, file: Path, identity: dict[str, object], config: SelfGenerateConfig, length: int,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.file, self.config, self.length, self.seed = file, config, length, seed
        self._more = {"tokens": config.tokens, "rows_at_a_time": config.rows_at_a_time}
        self._header = {**identity, **self._more, "length": length, "seed": seed,
                        "temperatures": list(config.temperatures)}  # fmt: skip
        self._texts: dict[bool, dict[int, Example]] = {False: {}, True: {}}
        if file.exists():
            self._read()

    def is_complete(self, held_out: bool) -> bool:
        return not self._next_numbers(held_out)

    def examples(self, held_out: bool) -> Iterator[Example]:
        """The first texts that suffice, in the order of their prompts, which are not in the loss;
        the result does not change if the file has more texts."""
        missing = self._wanted(held_out)
        for _, text in sorted(self._texts[held_out].items()):
            if missing > 0:
                yield text
            missing -= sum(text.mask)

    def write(
        self, writer: Writer, codec: Codec, context: int, documents: Sequence[Document],
        held_out: bool, progress: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """Write until there are enough tokens; `progress` receives their number and the total after
        every completed text.

        context: the largest number of tokens that the target reads.
        """
        if not documents:
            raise BadInput("no document of the data can be asked for; give others, or plain texts")
        written, wanted = self._written(held_out), self._wanted(held_out)
        try:
            with file_lock(self.file), self.file.open("ab+") as out:
                _drop_partial_line(out)
                if self.file.stat().st_size == 0:
                    _append(out, self._header)
                while numbers := self._next_numbers(held_out):
                    pairs = [self._prompt(n, documents, held_out, codec, context) for n in numbers]
                    prompts, samplings = (
                        [prompt for prompt, _ in pairs],
                        [want for _, want in pairs],
                    )
                    texts = writer(prompts, samplings, self.config.rows_at_a_time)
                    for index, new, finish in texts:
                        prompt, temperature = prompts[index], samplings[index].temperature
                        row = {"number": numbers[index], "prompt": len(prompt), "finish": finish,
                               "temperature": temperature, "tokens": [*prompt, *new],
                               "held_out": held_out}  # fmt: skip
                        self._add(row)
                        _append(out, row)
                        written += len(new)
                        progress(min(written, wanted), wanted)
        except KeyboardInterrupt:
            state = f"interrupted with {written:,} tokens written; the same command goes on from"
            raise KeyboardInterrupt(f"{state} there") from None

    def _next_numbers(self, held_out: bool) -> list[int]:
        """The next group of prompts without a text, which never gives too much; empty at the end.

        Each group depends on the texts of whole groups before it: interruptions change nothing.
        """
        texts, start, missing = self._texts[held_out], 0, self._wanted(held_out)
        while missing > 0:
            group = range(start, start + max(8, missing // self.length))
            if left := [number for number in group if number not in texts]:
                return left
            missing -= sum(sum(texts[number].mask) for number in group)
            start = group.stop
        return []

    def _prompt(
        self, number: int, documents: Sequence[Document], held_out: bool, codec: Codec, context: int
    ) -> tuple[list[int], Sampling]:
        """The prompt to continue and its sampling: a text's opening of at most half a row, or
        another prompt cut to leave a quarter of the row."""
        rng = np.random.default_rng((self.seed, held_out, number))
        half = min(self.length, context) // 2
        turn, index = divmod(number, len(documents))
        document = documents[shuffled(len(documents), self.seed, turn)[index]]
        prompt = prompt_of(document, codec, turn)
        if document.messages or document.prompt is not None:
            prompt = prompt[-max(1, 3 * half // 2) :]
        else:
            prompt = prompt[: int(rng.integers(1, max(2, min(half, len(prompt)) + 1)))]
        temperature = self.config.temperatures[number % len(self.config.temperatures)]
        new, seed = max(1, self.length - len(prompt)), int(rng.integers(1 << 31))
        return prompt, Sampling(temperature=temperature, seed=seed, max_new_tokens=new)

    def _wanted(self, held_out: bool) -> int:
        """The number of new tokens to write; for evaluation about a fiftieth, within limits."""
        tokens = self.config.tokens
        return min(max(tokens // 50, 2000), 30000, tokens) if held_out else tokens

    def _written(self, held_out: bool) -> int:
        return sum(sum(text.mask) for text in self._texts[held_out].values())

    def _add(self, row: dict[str, Any]) -> None:
        mask = [place >= row["prompt"] for place in range(len(row["tokens"]))]
        self._texts[row["held_out"]][row["number"]] = Example(row["tokens"], mask)

    def _read(self) -> None:
        """Read the texts of an earlier run; refuse those of another origin."""
        lines = [line for line in self.file.read_bytes().splitlines(True) if line.endswith(b"\n")]
        try:
            header, *rows = [json.loads(line) for line in lines] or [self._header]
            header |= self._more                                         # more is accepted
        except (ValueError, TypeError) as error:
            why = f"{self.file} holds something else than texts a target wrote"
            raise BadInput(f"{why}; name another place") from error
        same_settings(self.file, header, self._header)
        for row in rows:
            self._add(row)


def _drop_partial_line(file: IO[bytes]) -> None:
    """Remove an incomplete last line of a killed run."""
    file.seek(0)
    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def _append(file: IO[bytes], row: dict[str, object]) -> None:
    """Append a row, which others can read as soon as this returns."""
    file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    file.flush()
