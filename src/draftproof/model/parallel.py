"""A target split over the ranks of a group, by transformers' own plan or by DeepSpeed.

Every rank runs the same program on the same prompts. Rank 0 makes decisions and broadcasts them, so
ranks cannot diverge by rounding or timing. The model is still called as a whole: it sums its parts
over the ranks, and gives every rank the same logits and hidden states.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draftproof.errors import BadInput, DraftproofError, RankLost, UnsupportedModel, first_line
from draftproof.model import loading
from draftproof.model.device import Device

if TYPE_CHECKING:
    from draftproof.model.loading import PreTrainedModel

T = TypeVar("T")

BLUR = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far logits may move, relative to the largest, when sums are computed in parts."""


@dataclass(frozen=True)
class ProcessGroup:
    """`size` ranks, of which this process is `rank`. A single rank communicates nothing."""

    rank: int = 0
    size: int = 1

    @property
    def is_single(self) -> bool:
        return self.size == 1

    @property
    def is_main_process(self) -> bool:
        """Whether this rank makes decisions and prints."""
        return self.rank == 0

    def broadcast(self, *mine: Tensor) -> tuple[Tensor, ...]:
        """Return rank 0's integers for `mine`, which have the same shapes on every rank, in one
        broadcast."""
        if self.is_single:
            return mine
        packed = torch.cat([tensor.reshape(-1).long() for tensor in mine])
        with self.raise_on_rank_failure():
            dist.broadcast(packed, src=0)
        parts = torch.split(packed, [tensor.numel() for tensor in mine])
        return tuple(
            part.view(tensor.shape).to(tensor.dtype)
            for part, tensor in zip(parts, mine, strict=True)
        )

    def broadcast_int(self, mine: int) -> int:
        """Return rank 0's number."""
        return int(self.broadcast(torch.tensor([mine]))[0])

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Return rank 0's result of `make`, or raise its expected error, on every rank."""
        if self.is_single:
            return make()
        shared: list[T | Exception | None] = [None]
        if self.is_main_process:
            try:
                shared = [make()]
            except (DraftproofError, OSError) as error:
                shared = [error if isinstance(error, DraftproofError) else BadInput(str(error))]
        with self.raise_on_rank_failure():
            dist.broadcast_object_list(shared, src=0)
        if isinstance(shared[0], Exception):
            raise shared[0]
        return shared[0]  # type: ignore[return-value]

    def raise_on_rank_failure(self) -> AbstractContextManager[None]:
        """Raise RankLost, in one sentence, when another rank goes away inside the block."""
        return nullcontext() if self.is_single else self._watched()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, DraftproofError) as error:
            # errors that loading turned into a sentence
            reason = error.__cause__ if isinstance(error, DraftproofError) else error
            if isinstance(error, RankLost) or not _is_about_ranks(reason):
                raise
            raise RankLost(
                f"rank {self.rank} of {self.size} cannot reach the others any more, one of them "
                "has ended: see what it said, and start all ranks again"
            ) from error


ALONE = ProcessGroup()
"""The group of a single process."""


def form_group(parallel: str | None) -> ProcessGroup:
    """The group that a launcher such as torchrun started this process for; formed once.

    parallel: what splits the model; None: this process runs it alone. When a rank ends, collectives
    of the others fail, and torchrun ends ranks that wait for something else.
    """
    if parallel is None:
        return ALONE
    if parallel == "deepspeed" and find_spec("deepspeed") is None:
        raise BadInput(
            "parallel was 'deepspeed', which is not installed: pip install "
            "deepspeed, or use 'tensor'"
        )
    if not dist.is_initialized():
        if not {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise BadInput(
                "running a model in parallel takes one process per device, and this one was "
                "started alone; start it as torchrun --nproc-per-node 2 -m draftproof ..."
            )
        if int(os.environ["WORLD_SIZE"]) == 1:
            return ALONE
        _connect()
    return ProcessGroup(dist.get_rank(), dist.get_world_size())


def _connect() -> None:
    """Connect to the other ranks: over gloo for main memory, and also over the accelerator's own
    backend."""
    backend = "gloo"
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    try:
        # reading a part of a large model from a slow disk takes a long time
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    except (RuntimeError, ValueError, OSError) as error:
        raise RankLost(
            f"the process group could not be initialised: {first_line(error)}; start all ranks "
            "again"
        ) from error
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _is_about_ranks(error: BaseException | None) -> bool:
    """Whether a collective failed, not the computation around it."""
    signs = "gloo|NCCL|Connection closed|Connection reset|Broken pipe|Timed out|process group"
    matches = re.search(signs, str(error)) is not None
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or matches)


def load_sharded(
    model: str | Path, dtype: str | torch.dtype | None, device: str | None, parallel: str,
    group: ProcessGroup
) -> PreTrainedModel:
    """Load this rank's part of a causal LM, split by "tensor" (transformers) or "deepspeed"; it is
    called like the whole model."""
    if device not in (None, Device.from_name().kind):
        raise BadInput(
            f"device was {device!r}, and the ranks of a parallel run each take one; leave it out"
        )
    config = loading.load_config(model).get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 0
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % group.size or key_heads % group.size:
        raise BadInput(
            f"{model} has {heads} attention heads and {key_heads} of keys, which {group.size} "
            "ranks cannot share evenly; start a number that divides both"
        )
    return ENGINES[parallel](model, dtype, group)


def _by_plan(
    model: str | Path, dtype: str | torch.dtype | None, group: ProcessGroup
) -> PreTrainedModel:
    """Load with tensor parallelism by the model's plan in transformers."""
    config = loading.load_config(model)
    if not getattr(config.get_text_config(), "base_model_tp_plan", None):
        raise UnsupportedModel(
            f"transformers has no tensor-parallel plan for {config.model_type} models; try "
            "'deepspeed'"
        )
    if dtype is None:                               # parts are not cast by loading
        dtype = Device.from_name().dtype_for(config.dtype or torch.float32)
    from transformers.distributed import DistributedConfig

    sharding = DistributedConfig(tp_size=group.size, tp_plan="auto")
    return loading.load_model(model, dtype, None, sharding)


def _by_deepspeed(
    model: str | Path, dtype: str | torch.dtype | None, group: ProcessGroup
) -> PreTrainedModel:
    """Load with DeepSpeed's automatic tensor parallelism; every rank first reads the whole
    checkpoint into main memory.

    DeepSpeed guesses how to split unknown families, so the parts are compared with the whole.
    """
    whole = loading.load_model(model, dtype, "cpu")
    text = torch.arange(1, 9)[None] % whole.config.get_text_config().vocab_size
    with torch.inference_mode():
        wanted = whole(input_ids=text, use_cache=False).logits.double()
        with _on_stderr():
            parts = _cut(whole, group)
        logits = parts(input_ids=text.to(parts.device), use_cache=False).logits.double().cpu()
    blur = float((logits - wanted).abs().max() / wanted.abs().max())
    if not group.broadcast_int(blur <= BLUR.get(parts.dtype, 0.0)):
        raise UnsupportedModel(
            f"DeepSpeed cuts {type(whole).__name__} wrongly: on {group.size} ranks its logits are "
            f"off by {blur:.0%}; use 'tensor', or another model"
        )
    return parts


def _cut(whole: PreTrainedModel, group: ProcessGroup) -> PreTrainedModel:
    """Split by DeepSpeed. Its sums in shared memory crash if not all ranks are on this machine.

    It takes their number from LOCAL_SIZE, which its own launcher sets and torchrun does not.
    """
    local = int(os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "0")))
    try:
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(verbose=False)
        if local != group.size:
            deepspeed.comm.comm.cdb.shm_vector_kernel_level = 0
        sizes = {"tp_size": group.size}
        engine = deepspeed.init_inference(
            whole, tensor_parallel=sizes, dtype=whole.dtype, replace_with_kernel_inject=False
        )
    except Exception as error:                      # a compiler's, or a model that it cannot split
        raise UnsupportedModel(
            f"DeepSpeed cannot run {type(whole).__name__} here ({first_line(error)}); use 'tensor'"
        ) from error
    parts: PreTrainedModel = engine.module
    return parts.eval()


@contextmanager
def _on_stderr() -> Iterator[None]:
    """Redirect the output of DeepSpeed and its compilers from stdout to stderr, since stdout is for
    text."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


ENGINES = {"tensor": _by_plan, "deepspeed": _by_deepspeed}
"""Engines that can shard a model."""
