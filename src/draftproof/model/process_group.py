"""The processes that run one sharded target together. Knows torch.distributed; knows no models and no tokens.

Every rank runs the same program on the same prompts. Rank 0 decides; what it decides is broadcast, so that no rounding
and no clock can make two ranks go different ways.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draftproof.errors import BadInput, DraftproofError, RankLost

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another that lives: reading its part of a large model from a slow disk takes long."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ProcessGroup:
    """`size` ranks, of which this process is `rank`. One rank agrees with itself, at no cost."""

    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank decides, and is the one that speaks."""
        return self.rank == 0

    def same(self, *mine: Tensor) -> tuple[Tensor, ...]:
        """Rank 0's integers in place of `mine`, which have the same shapes on every rank; one broadcast for all."""
        if self.alone:
            return mine
        packed = torch.cat([one.reshape(-1).long() for one in mine])
        with self.intact():
            dist.broadcast(packed, src=0)
        parts = torch.split(packed, [one.numel() for one in mine])
        return tuple(part.view(one.shape).to(one.dtype) for part, one in zip(parts, mine, strict=True))

    def number(self, mine: int) -> int:
        """Rank 0's number."""
        return int(self.same(torch.tensor([mine]))[0])

    def told(self, make: Callable[[], T]) -> T:
        """What `make` gives rank 0, on every rank; a foreseen error as well."""
        if self.alone:
            return make()
        told: list[T | Exception | None] = [None]
        if self.leads:
            try:
                told = [make()]
            except (DraftproofError, OSError) as error:
                told = [error]
        with self.intact():
            dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], OSError) and not self.leads:
            raise BadInput(f"rank 0 met this: {told[0]}") from told[0]             # no file of this rank's
        if isinstance(told[0], Exception):
            raise told[0]
        return told[0]  # type: ignore[return-value]

    def intact(self) -> AbstractContextManager[None]:
        """Raise RankLost, in one sentence, when another rank goes away inside the block."""
        return nullcontext() if self.alone else self._watched()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, DraftproofError) as error:
            reason = error.__cause__ if isinstance(error, DraftproofError) else error       # what loading made a sentence of
            if isinstance(error, RankLost) or not _is_about_ranks(reason):
                raise
            raise RankLost(
                f"rank {self.rank} of {self.size} cannot reach the others any more, one of them has ended: see what it said, "
                "and start all ranks again"
            ) from error


ALONE = ProcessGroup()
"""One process."""


def form_group() -> ProcessGroup:
    """The group that a launcher such as torchrun started this process for; formed once.

    When a rank ends, collectives of the others fail, and torchrun ends those that wait otherwise.
    """
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if missing and not dist.is_initialized():
        raise BadInput(
            "running a model in parallel takes one process per device, and this one was started alone; start it as "
            "torchrun --nproc-per-node 2 -m draftproof ..."
        )
    if not dist.is_initialized():
        if int(os.environ["WORLD_SIZE"]) == 1:
            return ALONE
        _connect()
    return ProcessGroup(dist.get_rank(), dist.get_world_size())


def _connect() -> None:
    """Meet the other ranks: over gloo for what lies in main memory, over the accelerator's own ways besides."""
    device, backend = None, "gloo"
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    if device is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankLost(f"the ranks did not meet at {where}: {str(error).strip().splitlines()[0]}; start all again") from error
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_about_ranks(error: BaseException | None) -> bool:
    """Whether a collective failed, rather than the computation around it."""
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "process group")
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs))
