"""Completes rows of a batch on the workers of a Ray cluster, each with its own engine.

Ray restarts workers that die and repeats their tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from draftproof.cli import show
from draftproof.cli.setup import engine_of
from draftproof.errors import BadInput, DraftproofError, RankLost, first_line

if TYPE_CHECKING:
    from draftproof.cli.batch import Batch, Line, Outcome
    from draftproof.engine.engine import Engine

RETRIES = 2
"""How often Ray repeats rows whose worker died."""
PORTIONS_PER_WORKER = 4
"""The least number of portions per worker: a slow worker delays the others by one portion."""


class Writer:
    """A worker's engine, which is loaded with the first rows."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.engine: Engine | None = None

    def complete(self, lines: Sequence[Line]) -> list[Outcome]:
        self.engine = self.engine or engine_of(self.batch.config)
        return list(self.batch.outcomes(self.engine, lines))


def outcomes(batch: Batch, lines: Sequence[Line], workers: int) -> Iterator[Outcome]:
    """A completion or an error for each line, in any order, from `workers` workers.

    RAY_ADDRESS names the cluster; without it, Ray runs on this machine for the time of the run.
    """
    try:
        import ray
    except ImportError as error:
        raise BadInput("--ray needs Ray: pip install ray") from error
    begun = not ray.is_initialized()
    try:
        if begun:
            ray.init(log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise BadInput(
            f"the Ray cluster cannot be reached: {first_line(error)}; check RAY_ADDRESS, or leave "
            "it out"
        ) from error
    there = ray.cluster_resources()
    if (cores := there.get("CPU", 0)) < workers:
        show.note(f"the cluster has {cores:.0f} CPUs for {workers} workers; some will wait")
    writer = ray.remote(Writer).options(
        num_cpus=1, num_gpus=1 if there.get("GPU") else 0, max_restarts=-1, max_task_retries=RETRIES
    )
    workers_started = [writer.remote(batch) for _ in range(workers)]
    size = max(1, min(batch.window, -(-len(lines) // (PORTIONS_PER_WORKER * workers))))
    starts = range(0, len(lines), size)
    waiting = [workers_started[turn % workers].complete.remote(lines[start : start + size])
               for turn, start in enumerate(starts)]
    try:
        while waiting:
            (promise,), waiting = ray.wait(waiting, num_returns=1)
            yield from ray.get(promise)
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise RankLost(
            f"{1 + RETRIES} Ray workers ended on the same rows, perhaps out of memory; see "
            "Ray's logs; the same command resumes with the remaining rows"
        ) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DraftproofError):
            raise error.cause from error
        raise
    finally:
        if begun:
            ray.shutdown()
