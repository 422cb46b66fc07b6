"""Rows of a batch on the workers of a Ray cluster, an engine each. Knows Ray; how a row is completed is the batch's.

A worker that dies takes nothing along but the rows it was at: they go to another, in halves, so that a row on which
workers die is found and told apart from a machine that was lost. Rows come back in any order, each once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftproof.cli import show
from draftproof.cli.setup import engine_of
from draftproof.errors import BadInput, DraftproofError, RankLost

if TYPE_CHECKING:
    from draftproof.cli.batch import Batch, Line
    from draftproof.engine.engine import Completion, Engine

LOSSES = 3
"""Workers one row may cost before it is given up."""
IN_VAIN = 6
"""Workers lost one after the other, with nothing completed between, before the run is given up."""
PORTIONS = 4
"""Portions per worker, at least: who is slow holds the others up by one."""


@dataclass(frozen=True)
class Portion:
    """Rows that one worker completes at a time, and how many workers were lost on them."""

    lines: Sequence[Line]
    losses: int = 0

    def halves(self) -> list[Portion]:
        """What to try again when the worker was lost."""
        middle, losses = -(-len(self.lines) // 2), self.losses + (len(self.lines) == 1)
        return [Portion(lines, losses) for lines in (self.lines[:middle], self.lines[middle:]) if lines]


class Writer:
    """Lives on a worker: an engine, loaded with the first rows."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.engine: Engine | None = None

    def complete(self, lines: Sequence[Line]) -> list[tuple[Line, Completion | str]]:
        self.engine = self.engine or engine_of(self.batch.config)
        return list(self.batch.outcomes(self.engine, lines))


def outcomes(batch: Batch, lines: Sequence[Line], workers: int) -> Iterator[tuple[Line, Completion | str]]:
    """A completion or an error for each line, in any order, by `workers` workers of the cluster RAY_ADDRESS names.

    Without RAY_ADDRESS, Ray starts on this machine for as long as the run takes.
    """
    ray = _ray()
    begun = not ray.is_initialized()
    if begun:
        _begin(ray)
    try:
        yield from _Crew(ray, batch, workers).completed(_portions(lines, workers, batch.window))
    finally:
        if begun:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise BadInput("--ray was given, and Ray is not installed: pip install 'draftproof[ray]'") from error
    return ray


def _begin(ray: Any) -> None:
    try:
        ray.init(log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the Ray cluster cannot be reached: {reason}; check RAY_ADDRESS, or leave it out") from error


def _portions(lines: Sequence[Line], workers: int, most: int) -> list[Portion]:
    size = max(1, min(most, -(-len(lines) // (PORTIONS * workers))))
    return [Portion(lines[start : start + size]) for start in range(0, len(lines), size)]


class _Crew:
    """The workers, and what each is at."""

    def __init__(self, ray: Any, batch: Batch, workers: int) -> None:
        self.ray, self.batch, self.workers = ray, batch, workers
        there = ray.cluster_resources()
        self._writer = ray.remote(Writer).options(num_cpus=1, num_gpus=1 if there.get("GPU") else 0)
        if there.get("CPU", 0) < workers:
            show.note(f"{workers} workers were asked for and the cluster has {there.get('CPU', 0):.0f} CPUs; some will wait")

    def completed(self, portions: Sequence[Portion]) -> Iterator[tuple[Line, Completion | str]]:
        waiting, in_vain = deque(portions), 0
        at: dict[Any, tuple[Any, Portion]] = {}                         # a promise → its worker and portion
        for _ in range(min(self.workers, len(waiting))):
            self._give(self._hired(), waiting, at)
        while at:
            (promise,), _ = self.ray.wait(list(at), num_returns=1)
            worker, portion = at.pop(promise)
            found = self._kept(promise)
            if found is not None:
                in_vain = 0
                yield from found
            else:
                in_vain, worker = in_vain + 1, self._hired()
                if in_vain == IN_VAIN:
                    raise RankLost(
                        f"{IN_VAIN} Ray workers ended one after the other and completed nothing, for want of memory perhaps; "
                        "see Ray's logs; the same command goes on from here"
                    )
                for half in portion.halves():
                    if half.losses == LOSSES:
                        yield half.lines[0], f"{LOSSES} workers ended, one after the other, while they completed this row alone"
                    else:
                        waiting.append(half)
            self._give(worker, waiting, at)

    def _hired(self) -> Any:
        """A new worker."""
        return self._writer.remote(self.batch)

    def _give(self, worker: Any, waiting: deque[Portion], at: dict[Any, tuple[Any, Portion]]) -> None:
        """A worker's next portion; without one it goes."""
        if waiting:
            portion = waiting.popleft()
            at[worker.complete.remote(portion.lines)] = worker, portion
        else:
            self.ray.kill(worker)

    def _kept(self, promise: Any) -> list[tuple[Line, Completion | str]] | None:
        """What a worker promised; None if it is gone."""
        lost = (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError)
        try:
            return list(self.ray.get(promise))
        except lost:
            return None
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DraftproofError):
                raise error.cause from error
            raise
