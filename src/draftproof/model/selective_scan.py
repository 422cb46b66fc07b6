"""Mamba 1 (Mamba, FalconMamba, Jamba) goes on from its state when it reads several tokens.

transformers 5 starts their scan from zero unless a single token is read. The scan is linear in its
state, so what the state adds is added behind it. Without a state at hand nothing is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.model.wrapping import sources, wrap

_handed = threading.local()


class HandedStates(dict[int, Any]):
    """Recurrent states by number; the one asked for last is what this thread's scan goes on
    from."""

    def __getitem__(self, index: int) -> Any:
        _handed.state = super().__getitem__(index)
        return _handed.state


def forget_handed() -> None:
    """No scan of this thread has a state until one is asked for."""
    _handed.state = None


def hands_states(model: PreTrainedModel) -> bool:
    """Whether the scan of a model has to be handed its state; it is then able to take it."""
    return wrap(sources(model), "mamba_selective_scan", _going_on)


def _going_on(scan: Callable[..., Any]) -> Callable[..., Any]:
    """The scan of inputs [B, I, L] from the state handed, [B, I, S]."""

    @wraps(scan)
    def going_on(
        inputs: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
        return_last_state: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        state = getattr(_handed, "state", None)
        same = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, **options}
        if state is None:
            return scan(inputs, dt, A, B, C, z=z, return_last_state=return_last_state, **same)
        forget_handed()
        output, last = scan(inputs, dt, A, B, C, return_last_state=True, **same)
        steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        steps = (F.softplus(steps) if delta_softplus else steps).float().cumsum(-1)
        kept = (A[:, None] * steps[..., None]).exp() * state.float()[:, :, None]    # [B, I, L, S]
        output = output + torch.einsum("bils,bsl->bil", kept, C.float()).to(output.dtype)
        output = output if z is None else output * F.silu(z)
        return (output, last + kept[:, :, -1]) if return_last_state else output

    return going_on
