"""A file of prompts in, a file of completions out: in order, resumable; bad rows stop no others.

One output row per input row. Rows that finish early wait for those before them, so an interrupted
file is a beginning of the whole one. They wait in a file of their own, ``OUT.waiting``: only rows
that were running are lost.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftproof.cli import show
from draftproof.cli.setup import engine_of, group_of
from draftproof.engine.config import EngineConfig
from draftproof.engine.rows import Request, identity, understood
from draftproof.errors import BadInput, first_line

if TYPE_CHECKING:
    from draftproof.engine.engine import Completion, Engine

WINDOW = 8
"""Batches of rows the engine gets at a time: enough that few rows run alone at the end of one."""
ROWS = 8
"""Rows at a time when nobody says."""


@dataclass(frozen=True)
class Line:
    """One row of the input, not yet understood."""

    index: int
    text: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()


@dataclass
class Tally:
    """What was written, for the progress bar and the last line."""

    rows: int = 0
    bad: int = 0
    tokens: int = 0

    def count(self, row: Mapping[str, Any]) -> None:
        self.rows += 1
        self.bad += "error" in row
        self.tokens += row.get("tokens", 0)


Outcome = tuple[Line, "Completion | str"]


@dataclass(frozen=True)
class Batch:
    """A run over a file: `prompts` to `out`; `given` is for rows that say nothing else."""

    config: EngineConfig
    given: Mapping[str, Any]
    prompts: Path
    out: Path
    batch_size: int | None
    chat: bool
    ray: int | None = None

    def run(self) -> None:
        """Complete all rows that are not in `out` yet. Raises BadInput at the end for bad rows."""
        group = group_of(self.config)
        lines, ready, tally = group.from_rank_0(self._begun)
        if tally.rows == len(lines):
            show.note(f"{self.out} is complete: {len(lines)} rows")
        elif not group.leads:                               # what rank 0 writes, all ranks compute
            for _ in self.outcomes(engine_of(self.config), _left(lines, ready, tally)):
                pass
        else:
            if tally.rows:
                show.note(f"{self.out} has {tally.rows} of {len(lines)} rows; going on behind them")
            with self.out.open("ab") as out:
                self._complete(out, lines, ready, tally)
        if tally.bad:
            bad = f"{tally.bad} of {len(lines)} rows could not be completed"
            raise BadInput(f'{bad}; see their "error" in {self.out}')

    def _begun(self) -> tuple[list[Line], dict[int, dict[str, Any]], Tally]:
        """The rows to answer, those that wait beside `out`, and what it holds; before the model is
        loaded, for much can be wrong."""
        for name, value in (("batch_size", self.batch_size), ("ray", self.ray)):
            if value is not None and value < 1:
                raise BadInput(f"{name} was {value}; it must be at least 1")
        if self.ray is not None and self.config.parallel is not None:
            raise BadInput(
                "both --ray and --parallel were given; a Ray worker runs a whole model, leave one "
                "of them out"
            )
        lines, tally = self._lines(), Tally()
        if self.out.exists() and self.out.samefile(self.prompts):
            raise BadInput(f"--out is the file of prompts itself, {self.out}; give another")
        if not self.out.exists():
            self._beside.unlink(missing_ok=True)            # of results that somebody removed
        with self.out.open("ab+") as out:
            for row in self._written(out, lines):
                tally.count(row)
        waiting = self._waiting(lines).items()
        return lines, {index: row for index, row in waiting if index >= tally.rows}, tally

    def _lines(self) -> list[Line]:
        texts = [text.strip() for text in self.prompts.read_bytes().split(b"\n")]
        lines = [Line(index, text) for index, text in enumerate(filter(None, texts))]
        if not lines:
            wanted = 'one JSON object per line, such as {"prompt": "..."}'
            raise BadInput(f"{self.prompts} has no rows; give {wanted}")
        return lines

    @property
    def _settings(self) -> str:
        """A digest of all options that decide what the texts are."""
        said = [self.config.digest, self.chat, dict(self.given)]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def _written(self, out: BinaryIO, lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
        """The rows `out` already holds, checked to be ours; half a last line is cut off."""
        out.seek(0)
        *whole, half = out.read().split(b"\n")
        if len(whole) > len(lines):
            raise self._foreign(f"{self.out} has more rows than {self.prompts}")
        for line, text in zip(lines, whole, strict=False):
            yield self._ours(line, text)
        begins = f'{{"index": {len(whole)}, '.encode()
        if not (half.startswith(begins) or begins.startswith(half)):
            raise self._foreign(f"{self.out} ends in something else than results")
        out.truncate(out.tell() - len(half))

    def _ours(self, line: Line, text: bytes) -> dict[str, Any]:
        """A row written earlier, if it answers `line` under these settings."""
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        known = {"index": line.index, "input_sha256": line.digest}
        if not isinstance(row, dict) or not known.items() <= row.items():
            raise self._foreign(f"line {line.index + 1} of {self.out} answers another input")
        if row.get("settings") != self._settings:
            raise self._foreign(f"{self.out} was begun with other options")
        return row

    def _foreign(self, why: str) -> BadInput:
        return BadInput(f"{why}; give another --out, or remove it")

    def _complete(
        self, out: BinaryIO, lines: Sequence[Line], ready: dict[int, dict[str, Any]], tally: Tally
    ) -> None:
        """Complete what `out` lacks. Rows that overtake others wait beside it."""
        found = self._found(_left(lines, ready, tally))
        start = time.perf_counter()
        done: list[Completion] = []
        try:
            with _progress() as progress, self._beside.open("ab") as beside:
                task = progress.add_task("", total=len(lines), speed=0.0)
                for line, outcome in found:
                    ready[line.index] = self._row(line, outcome)
                    done += [outcome] if not isinstance(outcome, str) else []
                    if line.index != tally.rows:
                        _append(beside, ready[line.index])
                    self._drain(out, ready, tally)
                    tokens = sum(len(completion.tokens) for completion in done)
                    speed = tokens / (time.perf_counter() - start)
                    progress.update(task, completed=tally.rows + len(ready), speed=speed)
                self._drain(out, ready, tally)
        except KeyboardInterrupt:
            finished = f"{tally.rows + len(ready)} of {len(lines)} rows done"
            raise KeyboardInterrupt(
                f"interrupted with {finished}; the same command goes on from there"
            ) from None
        self._beside.unlink()
        show.note(_last_line(done, time.perf_counter() - start))
        show.lossy_distance(show.added(done))

    def _drain(self, out: BinaryIO, ready: dict[int, dict[str, Any]], tally: Tally) -> None:
        """Write the rows whose turn it is."""
        while tally.rows in ready:
            row = ready.pop(tally.rows)
            _append(out, row)
            tally.count(row)

    @property
    def _beside(self) -> Path:
        return self.out.with_name(self.out.name + ".waiting")

    def _waiting(self, lines: Sequence[Line]) -> dict[int, dict[str, Any]]:
        """Rows that were finished but not yet written when an earlier run was interrupted."""
        found = {}
        for text in self._beside.read_bytes().split(b"\n") if self._beside.exists() else ():
            with suppress(ValueError, BadInput, TypeError, KeyError, IndexError):
                row = self._ours(lines[json.loads(text)["index"]], text)
                found[row["index"]] = row
        return found

    @property
    def window(self) -> int:
        """Rows the engine gets at a time."""
        return WINDOW * (self.batch_size or ROWS)

    def _found(self, left: Sequence[Line]) -> Iterator[Outcome]:
        """What this process, or the workers of a cluster, make of the rows that are left."""
        if self.ray is not None:
            from draftproof.cli import over_ray

            return over_ray.outcomes(self, left, self.ray)
        return self.outcomes(engine_of(self.config), left)

    def outcomes(self, engine: Engine, lines: Sequence[Line]) -> Iterator[Outcome]:
        """A completion or an error for each line; within a window of lines, in any order."""
        base, rows = replace(engine.sampling, **self.given), self.batch_size or ROWS
        for start in range(0, len(lines), self.window):
            ready: list[tuple[Line, Request]] = []
            for line in lines[start : start + self.window]:
                try:
                    request = understood(line.text, base, self.chat)
                    engine.check(request.prompt, sampling=request.sampling)
                    ready.append((line, request))
                except BadInput as error:
                    yield line, str(error)
                except (TypeError, ValueError, OverflowError, RecursionError) as error:
                    yield line, f"the row cannot be used: {first_line(error)}"
            prompts = [request.prompt for _, request in ready]
            wanted = [request.sampling for _, request in ready]
            for completion in engine.as_completed(prompts, sampling=wanted, batch_size=rows):
                yield ready[completion.prompt][0], completion

    def _row(self, line: Line, outcome: Completion | str) -> dict[str, Any]:
        known = {"input_sha256": line.digest, "settings": self._settings}
        head = {"index": line.index, **identity(line.text), **known}
        if isinstance(outcome, str):
            return {**head, "error": outcome}
        return {**head, **show.completion(outcome), "tokens": len(outcome.tokens)}


def _left(lines: Sequence[Line], ready: Mapping[int, object], tally: Tally) -> list[Line]:
    """The rows that are neither written nor waiting to be."""
    return [line for line in lines[tally.rows :] if line.index not in ready]


def _progress() -> Progress:
    speed = TextColumn("rows · {task.fields[speed]:.0f} tokens/s ·")
    left = TimeRemainingColumn(), TextColumn("left")
    return show.bars(BarColumn(), MofNCompleteColumn(), speed, *left)


def _append(file: BinaryIO, row: Mapping[str, Any]) -> None:
    """One row, there for whoever looks as soon as this returns."""
    file.write(show.as_json(row).encode(errors="replace") + b"\n")
    file.flush()


def _last_line(done: Sequence[Completion], seconds: float) -> str:
    stats, tokens = show.added(done), sum(len(completion.tokens) for completion in done)
    figures = [f"{len(done)} rows", f"{tokens} tokens", f"{tokens / seconds:.1f} tokens/s"]
    if stats.drafted:
        figures += [f"{stats.tokens_per_round:.2f} tokens/round"]
        figures += [f"{stats.acceptance:.0%} accepted"]
    return " · ".join(figures)
