"""Rows of a batch on the workers of a Ray cluster, an engine each.

Ray restarts workers that die and repeats what they were at. Rows on which workers died again and
again are tried one by one: so a row that kills them is told apart from a lost machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from draftproof.cli import show
from draftproof.cli.setup import engine_of
from draftproof.errors import BadInput, DraftproofError, RankLost, first_line

if TYPE_CHECKING:
    from draftproof.cli.batch import Batch, Line, Outcome
    from draftproof.engine.engine import Engine

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

    def complete(self, lines: Sequence[Line]) -> list[Outcome]:
        self.engine = self.engine or engine_of(self.batch.config)
        return list(self.batch.outcomes(self.engine, lines))


def outcomes(batch: Batch, lines: Sequence[Line], workers: int) -> Iterator[Outcome]:
    """A completion or an error for each line, in any order, by so many workers.

    RAY_ADDRESS names the cluster; without it, Ray runs on this machine, as long as the run takes.
    """
    ray = _ray()
    begun = not ray.is_initialized()
    if begun:
        try:
            ray.init(log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise BadInput(
                f"the Ray cluster cannot be reached: {first_line(error)}; check RAY_ADDRESS, or "
                "leave it out"
            ) from error
    try:
        yield from _completed(ray, batch, lines, workers)
    finally:
        if begun:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise BadInput("--ray needs Ray: pip install 'draftproof[ray]'") from error
    return ray


def _completed(
    ray: Any, batch: Batch, lines: Sequence[Line], workers: int
) -> Iterator[Outcome]:
    there = ray.cluster_resources()
    if (cores := there.get("CPU", 0)) < workers:
        show.note(f"the cluster has {cores:.0f} CPUs for {workers} workers; some will wait")
    writer = ray.remote(Writer).options(
        num_cpus=1, num_gpus=1 if there.get("GPU") else 0, max_restarts=-1, max_task_retries=RETRIES
    )
    hired = [writer.remote(batch) for _ in range(workers)]
    size, in_vain = max(1, min(batch.window, -(-len(lines) // (PORTIONS * workers)))), 0
    portions = [lines[start : start + size] for start in range(0, len(lines), size)]

    def handed_out(parts: Sequence[Sequence[Line]]) -> dict[Any, Sequence[Line]]:
        """Each part to a worker in turn, by the promise of its rows."""
        return {
            hired[turn % workers].complete.remote(part): part for turn, part in enumerate(parts)
        }

    waiting = handed_out(portions)
    while waiting:
        (promise,), _ = ray.wait(list(waiting), num_returns=1)
        portion = waiting.pop(promise)
        try:
            found = list(ray.get(promise))
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            in_vain += 1
            if in_vain == IN_VAIN:
                raise RankLost(
                    f"Ray workers ended on {IN_VAIN} portions one after the other and completed "
                    "nothing, for want of memory perhaps; see Ray's logs; the same command goes on"
                ) from error
            if len(portion) > 1:
                waiting |= handed_out([[line] for line in portion])
                continue
            ended = f"{1 + RETRIES} workers ended, one after the other, on this row alone"
            found = [(portion[0], ended)]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DraftproofError):
                raise error.cause from error
            raise
        else:
            in_vain = 0
        yield from found
