"""Mixed precision: a model of float32 weights whose forward runs under torch.autocast, as trainers
and accelerate have it. Drafts are not read exactly there, so such models are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from draftproof.errors import UnsupportedModel


@contextmanager
def watch_autocast(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Collect the dtypes in which autocast makes the model's forward compute.

    accelerate puts autocast into the forward itself, where nothing outside of it can see it.
    """
    dtypes = set[torch.dtype]()

    def look(module: nn.Module, args: object) -> None:
        dtype = _autocast_dtype(device)
        if dtype is not None:
            dtypes.add(dtype)

    device = next((weight.device.type for weight in model.parameters()), "cpu")
    leaves = [module for module in model.modules() if not any(module.children())]
    hooks = [module.register_forward_pre_hook(look) for module in leaves]
    try:
        yield dtypes
    finally:
        for hook in hooks:
            hook.remove()


def reject_autocast(
    name: str, dtype: torch.dtype, device: torch.device, autocast: torch.dtype | None = None
) -> None:
    """Raise UnsupportedModel where autocast computes in another dtype than the weights have.

    Args:
        name: Of the model.
        dtype: Of its weights. Autocast leaves float64 as it is.
        device: Of its weights.
        autocast: The dtype of autocast in the model's forward; None, that of the caller.
    """
    autocast = autocast or _autocast_dtype(device.type)
    if autocast in (None, dtype) or dtype == torch.float64:
        return
    low, high = (str(kind).removeprefix("torch.") for kind in (autocast, dtype))
    raise UnsupportedModel(
        f"{name} has weights in {high} and runs in torch.autocast in {low}, where drafts are not "
        "read exactly; take accelerator.unwrap_model(model, keep_fp32_wrapper=False), leave the "
        f"autocast block, or load it in {low}"
    )


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A block that computes in the dtypes of its tensors."""
    inside = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if inside else nullcontext()


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast here, or None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
