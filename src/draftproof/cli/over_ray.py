"""Rows of a batch on the workers of a Ray cluster, an engine each. Ray restarts workers that die and repeats what they were at.

Rows on which workers died again and again are tried one by one, so that a row that kills them is told apart from a lost machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from draftproof.cli import show
from draftproof.cli.setup import engine_of
from draftproof.errors import BadInput, DraftproofError, RankLost, first_line

if TYPE_CHECKING:
    from draftproof.cli.batch import Batch, Line
    from draftproof.engine.engine import Completion, Engine

RETRIES = 2
"""How often Ray repeats rows whose worker died."""
IN_VAIN = 3
"""Portions lost one after the other, with nothing completed between, before the run is given up."""
PORTIONS = 4
"""Portions per worker, at least: who is slow holds the others up by one."""


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
        try:
            ray.init(log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise BadInput(f"the Ray cluster cannot be reached: {first_line(error)}; check RAY_ADDRESS, or leave it out") from error
    try:
        yield from _completed(ray, batch, lines, workers)
    finally:
        if begun:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise BadInput("--ray was given, and Ray is not installed: pip install 'draftproof[ray]'") from error
    return ray


def _completed(ray: Any, batch: Batch, lines: Sequence[Line], workers: int) -> Iterator[tuple[Line, Completion | str]]:
    there = ray.cluster_resources()
    if there.get("CPU", 0) < workers:
        show.note(f"{workers} workers were asked for and the cluster has {there.get('CPU', 0):.0f} CPUs; some will wait")
    writer = ray.remote(Writer).options(
        num_cpus=1, num_gpus=1 if there.get("GPU") else 0, max_restarts=-1, max_task_retries=RETRIES
    )
    hired = [writer.remote(batch) for _ in range(workers)]
    size, in_vain = max(1, min(batch.window, -(-len(lines) // (PORTIONS * workers)))), 0
    portions = [lines[start : start + size] for start in range(0, len(lines), size)]
    waiting = {hired[turn % workers].complete.remote(part): part for turn, part in enumerate(portions)}
    while waiting:
        (promise,), _ = ray.wait(list(waiting), num_returns=1)
        portion = waiting.pop(promise)
        try:
            found = list(ray.get(promise))
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            in_vain += 1
            if in_vain == IN_VAIN:
                raise RankLost(
                    f"Ray workers ended on {IN_VAIN} portions one after the other and completed nothing, for want of memory "
                    "perhaps; see Ray's logs; the same command goes on from here"
                ) from error
            if len(portion) > 1:
                waiting |= {hired[turn % workers].complete.remote([line]): [line] for turn, line in enumerate(portion)}
                continue
            found = [(portion[0], f"{1 + RETRIES} workers ended, one after the other, while they completed this row alone")]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DraftproofError):
                raise error.cause from error
            raise
        else:
            in_vain = 0
        yield from found
