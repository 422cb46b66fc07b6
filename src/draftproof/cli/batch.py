"""Completes a file of prompts into another file; can be resumed, and continues after bad rows.

Each input row gives an output row, written as soon as it is finished, and ordered at the end.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from draftproof.cli import show
from draftproof.cli.setup import engine_of
from draftproof.engine.config import EngineConfig
from draftproof.errors import BadInput, DraftproofError, first_line
from draftproof.requests.openai_format import parse_row, row_ids
from draftproof.training.files import file_lock

if TYPE_CHECKING:
    from draftproof.engine.engine import Completion, Engine, Request
    from draftproof.model.parallel import ProcessGroup

WINDOW = 8
"""Batches that the engine gets at a time: enough that few rows run alone at the end."""


@dataclass(frozen=True)
class Line:
    """One row of the input, not yet parsed."""

    index: int
    text: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()


Outcome = tuple[Line, "Completion | str"]


@dataclass(frozen=True)
class Batch:
    """A run from the file `prompts` to `out`; `sampling` has the defaults of rows."""

    config: EngineConfig
    sampling: Mapping[str, Any]
    prompts: Path
    out: Path
    batch_size: int | None = None
    chat: bool = False
    ray: int | None = None

    def run(self, group: ProcessGroup) -> None:
        """Complete all rows that are not in `out` yet. Raises DraftproofError for bad rows at the
        end."""
        with ExitStack() as until_done:
            lines, rows = group.from_rank_0(partial(self._begin, until_done))
            self._run(group, lines, rows)
        bad = sum("error" in json.loads(row) for row in rows.values())
        if bad:
            bad_rows = f"{bad} of {len(lines)} rows could not be completed"
            raise DraftproofError(f'{bad_rows}; see their "error" in {self.out}')

    def _run(self, group: ProcessGroup, lines: list[Line], rows: dict[int, bytes]) -> None:
        """Complete the lines that `rows` lacks, and add them to it."""
        left = [line for line in lines if line.index not in rows]
        if not left:
            if group.is_main_process:
                self._order(rows)
            show.note(f"{self.out} is complete: {len(lines)} rows")
        elif not group.is_main_process:         # all ranks compute what rank 0 writes
            list(self.outcomes(engine_of(self.config), left))
        else:
            if rows:
                show.note(f"{self.out} has {len(rows)} of {len(lines)} rows; going on")
            self._complete(left, rows)

    def _begin(self, until_done: ExitStack) -> tuple[list[Line], dict[int, bytes]]:
        """Read the rows to answer and those in `out`, before the model is loaded, to find errors
        early. No other process writes to `out` until `until_done` is closed."""
        for name, value in (("batch_size", self.batch_size), ("ray", self.ray)):
            if value is not None and value < 1:
                raise BadInput(f"{name} was {value}; it must be at least 1")
        texts = [text.strip() for text in self.prompts.read_bytes().split(b"\n")]
        lines = [Line(index, text) for index, text in enumerate(filter(None, texts))]
        if not lines:
            wanted = 'one JSON object per line, such as {"prompt": "..."}'
            raise BadInput(f"{self.prompts} has no rows; give {wanted}")
        if self.out.exists() and self.out.samefile(self.prompts):
            raise BadInput(f"--out is the file of prompts itself, {self.out}; give another")
        self.out.open("ab").close()                         # check that it can be written
        until_done.enter_context(file_lock(self.out))
        return lines, self._written(lines)

    @property
    def _settings(self) -> str:
        """A digest of all options on which the texts depend."""
        settings = [self.config.digest, self.chat, dict(self.sampling)]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def _written(self, lines: Sequence[Line]) -> dict[int, bytes]:
        """The rows in `out`, which must be ours; an incomplete last line is removed."""
        *complete, half = self.out.read_bytes().split(b"\n")
        begins, why = b'{"index": ', ""
        try:
            rows = [json.loads(text) for text in complete]
            if not all(row["input_sha256"] == lines[row["index"]].digest for row in rows):
                why = "has the results of another input"
            elif not all(row["settings"] == self._settings for row in rows):
                why = "was written with other options"
        except (ValueError, TypeError, KeyError, IndexError):
            why = "contains something other than results"
        if not (half.startswith(begins) or begins.startswith(half)):
            why = "ends with something other than results"
        if why:
            raise BadInput(f"{self.out} {why}; give another --out, or remove it")
        with self.out.open("r+b") as out:
            out.truncate(out.seek(0, 2) - len(half))
        return {row["index"]: text for row, text in zip(rows, complete, strict=True)}

    def _complete(self, left: Sequence[Line], rows: dict[int, bytes]) -> None:
        """Complete the rows that `out` lacks, add them to `rows`, and order all."""
        start, count = time.perf_counter(), len(left) + len(rows)
        done: list[Completion] = []
        columns = (BarColumn(), MofNCompleteColumn(),
                   TextColumn("rows · {task.fields[speed]:.0f} tokens/s ·"),
                   TimeRemainingColumn(), TextColumn("left"))
        try:
            with show.bars(*columns) as progress, self.out.open("ab") as out:
                task = progress.add_task("", total=count, speed=0.0)
                for line, outcome in self._outcomes(left):
                    row = self._row(line, outcome)
                    out.write(row + b"\n")
                    out.flush()
                    rows[line.index] = row
                    done += [outcome] if not isinstance(outcome, str) else []
                    tokens = sum(len(completion.tokens) for completion in done)
                    speed = tokens / (time.perf_counter() - start)
                    progress.update(task, completed=len(rows), speed=speed)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted with {len(rows)} of {count} rows done; the same command goes on "
                "from there"
            ) from None
        except OSError as error:
            raise self._cannot_write(error, len(rows), count) from error
        try:
            self._order(rows)
        except OSError as error:
            raise self._cannot_write(error, len(rows), count) from error
        show.note(f"{len(done)} rows · {show.summary(done, time.perf_counter() - start)}")
        show.lossy_distance(show.sum_stats(done))

    def _cannot_write(self, error: OSError, done: int, count: int) -> DraftproofError:
        return DraftproofError(
            f"{error.filename or self.out} cannot be written ({error.strerror}); {done} of {count} "
            "rows were done. Make room, and the same command goes on from what was written"
        )

    def _order(self, rows: Mapping[int, bytes]) -> None:
        """Rewrite all rows in the order of the input."""
        ordered = self.out.with_name(self.out.name + ".ordered")
        ordered.write_bytes(b"".join(rows[index] + b"\n" for index in range(len(rows))))
        ordered.replace(self.out)

    @property
    def window(self) -> int:
        """The number of rows that the engine gets at a time."""
        return WINDOW * (self.batch_size or 8)

    def _outcomes(self, left: Sequence[Line]) -> Iterator[Outcome]:
        """The outcomes of the remaining rows, from this process or the workers of a cluster."""
        if self.ray is not None:
            from draftproof.cli import over_ray

            return over_ray.outcomes(self, left, self.ray)
        return self.outcomes(engine_of(self.config), left)

    def outcomes(self, engine: Engine, lines: Sequence[Line]) -> Iterator[Outcome]:
        """A completion or an error for each line, in any order within a window of lines."""
        from draftproof.requests.reader import note_copies

        base = replace(engine.sampling, **self.sampling)
        for start in range(0, len(lines), self.window):
            ready: list[Line] = []
            requests: list[Request] = []
            for line in lines[start : start + self.window]:
                try:
                    prompt, sampling = parse_row(line.text, base, self.chat)
                    (request,) = engine.read([prompt], sampling=sampling)
                except BadInput as error:
                    yield line, str(error)
                except (TypeError, ValueError, OverflowError, RecursionError) as error:
                    yield line, f"the row cannot be used: {first_line(error)}"
                else:
                    request.index = len(requests)
                    ready.append(line)
                    requests.append(request)
            note_copies(requests)
            for update in engine.run(requests, self.batch_size):
                if update.completion is not None:
                    yield ready[update.completion.prompt], update.completion

    def _row(self, line: Line, outcome: Completion | str) -> bytes:
        row = {"index": line.index, **row_ids(line.text), "input_sha256": line.digest,
               "settings": self._settings}
        if isinstance(outcome, str):
            row["error"] = outcome
        else:
            row |= {**show.completion(outcome), "tokens": len(outcome.tokens)}
        return json.dumps(row, ensure_ascii=False).encode(errors="replace")
