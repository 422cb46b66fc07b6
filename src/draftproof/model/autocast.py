"""Mixed precision: models with float32 weights whose forward runs under torch.autocast, as in
trainers and accelerate. They do not read drafts exactly, so they are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from draftproof.errors import UnsupportedModel


@contextmanager
def watch_autocast(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Collect the dtypes that autocast sets for the model's forward.

    accelerate puts autocast into the forward itself, where nothing outside can see it.
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
    """Raise UnsupportedModel if autocast computes in another dtype than that of the weights.

    Args:
        name: The name of the model.
        dtype: The dtype of its weights. Autocast does not change float64.
        device: The device of its weights.
        autocast: The dtype of autocast in the model's forward; None: the caller's.
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
    """A block without autocast, which computes in the dtypes of its tensors."""
    inside = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if inside else nullcontext()


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast here, or None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
