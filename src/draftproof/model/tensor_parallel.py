"""A target in parts, one on each rank of a group: by transformers' own plan, or by DeepSpeed. Knows both, and no drafter.

Whichever cuts it, the model is still called as a whole: it adds up its parts between the ranks, and gives every rank the
same logits and hidden states.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model import loading
from draftproof.model.device import Device
from draftproof.model.loading import PreTrainedModel
from draftproof.model.process_group import ProcessGroup

Loader = Callable[[str | Path, str | torch.dtype | None, ProcessGroup], PreTrainedModel]


def load_sharded(
    model: str | Path, dtype: str | torch.dtype | None, device: str | None, parallel: str, group: ProcessGroup
) -> PreTrainedModel:
    """This rank's part of a causal LM, cut by "tensor" (transformers) or "deepspeed"; called like a whole one."""
    check_engine(parallel)
    best = Device.found().kind
    if device is not None and Device.found(device).where != torch.device(best):
        raise BadInput(f"device was {device!r}, and the ranks of a parallel run each take a {best} of their own; leave it out")
    _check_heads(model, group.size)
    return ENGINES[parallel](model, dtype, group)


def check_engine(parallel: str) -> None:
    """Refuse a misspelt name, or one whose package is missing."""
    if parallel not in ENGINES:
        raise BadInput(f"parallel was {parallel!r}; choose one of {', '.join(ENGINES)}")
    if parallel == "deepspeed" and find_spec("deepspeed") is None:
        raise BadInput("parallel was 'deepspeed', which is not installed: pip install 'draftproof[deepspeed]', or use 'tensor'")


def _check_heads(model: str | Path, size: int) -> None:
    """Every rank takes as many heads as the others, of queries and of keys."""
    config = loading.load_config(model).get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    sharing = {"attention heads": heads, "key-value heads": getattr(config, "num_key_value_heads", None) or heads}
    for what, count in sharing.items():
        if count is not None and count % size:
            fitting = [str(ranks) for ranks in range(2, count + 1) if not any((n or 0) % ranks for n in sharing.values())]
            advice = f"start {' or '.join(fitting)}" if fitting else "run it in one process"
            raise BadInput(f"{loading.resolve(model)} has {count} {what}, which {size} ranks cannot share evenly; {advice}")


def _by_plan(model: str | Path, dtype: str | torch.dtype | None, group: ProcessGroup) -> PreTrainedModel:
    """Tensor parallel by the plan that comes with the model in transformers."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise BadInput("this transformers has no tensor parallelism of its own; upgrade it, or use 'deepspeed'") from error
    config = loading.load_config(model)
    if not getattr(config.get_text_config(), "base_model_tp_plan", None):
        raise UnsupportedModel(f"transformers has no tensor-parallel plan for {config.model_type} models; try 'deepspeed'")
    return loading.load_model(model, _lasting(dtype, config), None, DistributedConfig(tp_size=group.size, tp_plan="auto"))


def _lasting(dtype: str | torch.dtype | None, config: Any) -> str | torch.dtype | None:
    """The dtype `load_model` would come to; parts are not cast afterwards."""
    stored = config.dtype or torch.float32
    return Device.found().dtype_for(stored) if dtype is None else dtype


def _by_deepspeed(model: str | Path, dtype: str | torch.dtype | None, group: ProcessGroup) -> PreTrainedModel:
    """DeepSpeed's automatic tensor parallelism; every rank reads the whole checkpoint into main memory first.

    DeepSpeed guesses how to cut a family it was not told of, so the parts are compared with the whole.
    """
    whole = loading.load_model(model, dtype, "cpu")
    if getattr(whole, "hf_quantizer", None) is not None:
        raise BadInput(f"{loading.resolve(model)} is quantised already, and DeepSpeed cannot cut it; use 'tensor'")
    text = torch.arange(1, 9)[None] % whole.config.get_text_config().vocab_size
    with torch.inference_mode():
        wanted = whole(input_ids=text, use_cache=False).logits.double()
        with _on_stderr():
            parts = _cut(whole, group)
        found = parts(input_ids=text.to(parts.device), use_cache=False).logits.double().cpu()
    blur = float((found - wanted).abs().max() / wanted.abs().max())
    if not group.number(blur <= BLUR.get(parts.dtype, 0.0)):
        raise UnsupportedModel(
            f"DeepSpeed cuts {type(whole).__name__} wrongly: on {group.size} ranks its logits are off by {blur:.0%}; "
            "use 'tensor', or another model"
        )
    return parts


BLUR = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far logits may move, relative to the largest, when sums are taken in parts."""


def _cut(whole: PreTrainedModel, group: ProcessGroup) -> PreTrainedModel:
    """Cut by DeepSpeed. Its sums in shared memory crash where they are used and not all ranks are on this machine.

    It learns how many are from LOCAL_SIZE, which its own launcher sets and torchrun does not.
    """
    local = int(os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "0")))
    try:
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(verbose=False)
        if local != group.size:
            deepspeed.comm.comm.cdb.shm_vector_kernel_level = 0
        sizes = {"tp_size": group.size}
        engine = deepspeed.init_inference(whole, tensor_parallel=sizes, dtype=whole.dtype, replace_with_kernel_inject=False)
    except (ImportError, RuntimeError, ValueError, AssertionError, AttributeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedModel(f"DeepSpeed cannot run {type(whole).__name__} here: {reason}") from error
    parts: PreTrainedModel = engine.module
    return parts.eval()


@contextmanager
def _on_stderr() -> Iterator[None]:
    """What DeepSpeed and the compilers it starts say on stdout goes to stderr: stdout is the text's."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


ENGINES: dict[str, Loader] = {"tensor": _by_plan, "deepspeed": _by_deepspeed}
"""What can cut a model."""
