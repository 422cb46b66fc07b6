"""Whether a model changed since something was made of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.errors import BadInput

SAMPLE = 4096
"""Numbers of a matrix that are compared: changes made through ``.data`` leave no other trace."""


class Snapshot(NamedTuple):
    """modules, weights: what they are, where they lie, how often they were written to, and what is
    hooked into them. adapters: which of peft's are active, and merged. values: those of norms and
    biases; with `matrices`, of the beginning of every matrix as well."""

    modules: list[int]
    adapters: list[str]
    weights: list[tuple[int, int, int]]
    values: Tensor

    @classmethod
    def of(cls, model: nn.Module, *, matrices: bool = False) -> Snapshot:
        modules = list(model.modules())
        parameters = (one for module in modules for one in module._parameters.values())
        weights = [one for one in parameters if one is not None]
        compared = [one.detach() for one in weights if one.dim() == 1 or matrices]
        values = [one.flatten()[:SAMPLE].to(weights[0].device, torch.float32) for one in compared]
        return cls(
            [*map(id, modules), *(one for module in modules for one in _hooked(module))],
            [_adapters(one) for one in modules if "merged_adapters" in vars(one)],
            list(map(_place, weights)), torch.cat(values) if values else torch.empty(0),
        )  # fmt: skip

    def same(self, other: Snapshot) -> bool:
        return self[:3] == other[:3] and torch.equal(self.values, other.values)


def _place(weight: Tensor) -> tuple[int, int, int]:
    version = 0 if weight.is_inference() else weight._version
    return id(weight), weight.data_ptr() if type(weight.data) is Tensor else 0, version


def _hooked(module: nn.Module) -> list[int]:
    """What a module computes beside its own forward, or in its place."""
    own = vars(module).get("forward")
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return [id(one) for one in (*hooks, *([own] if own is not None else []))]


def _adapters(module: Any) -> str:
    states = (module.active_adapters, module.merged_adapters, module.disable_adapters)
    return repr((*states, getattr(module, "scaling", None)))


def check_state(model: PreTrainedModel, name: str, dtype: torch.dtype,
                device: torch.device) -> None:
    """Refuse a model that was cast, moved, or put in training mode after it was loaded."""
    if model.training:
        raise BadInput(
            f"{name} was put in training mode, in which dropout changes what it writes; call its "
            "eval() first"
        )
    if (model.dtype, model.device) != (dtype, device):
        raise BadInput(
            f"{name} was {dtype} on {device} when it was loaded here and is {model.dtype} on "
            f"{model.device} now; load it here again"
        )
