"""Copies of a model, or of its first layers, that share its weights; and a check whether a model
changed since something was made from it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from draftproof.errors import BadInput, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M", bound=nn.Module)

LIBRARIES = ("torch", "transformers")
"""Libraries whose modules hold numbers from which our forward, or a layout, is made. A module of
the user's own is always called, and may count its calls in a number."""


def shallow_copy(model: M) -> M:
    """A copy of the model that shares its parameters and buffers, but not its tree of modules."""
    for name, module in model.named_modules():
        if "forward" in module.__dict__:            # bound to the original, which it would run
            raise UnsupportedModel(
                f"the forward of {name or 'the model'} is wrapped, by offloading for one; load it "
                "unwrapped"
            )
    return _shell(model, {})


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A shallow copy with only the first `count` layers, and the model's own final norm and head.
    """
    whole = int(model.config.get_text_config().num_hidden_layers)
    if not 1 <= count < whole:
        raise BadInput(
            f"{count} layers were asked for, to draft with; the model has {whole}: take fewer, at "
            "least 1"
        )
    short = shallow_copy(model)
    lists = (module for module in short.modules() if isinstance(module, nn.ModuleList))
    stacks = [modules for modules in lists if len(modules) == whole]
    if len(stacks) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} does not keep its layers in one list; draft with another model"
        )
    stacks[0]._modules = dict(list(stacks[0]._modules.items())[:count])
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = count
    if len(getattr(text, "layer_types", None) or ()) > count:       # some count them themselves
        text.layer_types = text.layer_types[:count]
    for module in short.modules():
        if getattr(module, "config", None) is model.config:
            module.config = config
    return short


def _shell(module: M, made: dict[int, nn.Module]) -> M:
    """A copy of a module's own attributes, with copies of its children; shared modules stay shared.
    """
    if id(module) not in made:
        made[id(module)] = shell = copy.copy(module)
        dicts = {name: value for name, value in module.__dict__.items() if isinstance(value, dict)}
        shell.__dict__.update({name: copy.copy(value) for name, value in dicts.items()})
        shell._modules = {
            name: None if child is None else _shell(child, made)
            for name, child in module._modules.items()
        }
    copied: Any = made[id(module)]
    return copied


class Snapshot(NamedTuple):
    """The state of a model when something was made from it.

    Attributes:
        modules: The modules, and forwards that were put into them.
        hooks: The modules' hooks.
        numbers: Plain numbers in modules and configurations, such as the epsilon of a norm, the
            scale of attention and the size of the vocabulary.
        weights: Addresses of the weights, how often they were written to, and peft's active
            adapters.
        values: Values of norms and biases, whose changes through ``.data`` leave no other trace.
    """

    modules: list[int]
    hooks: list[int]
    numbers: list[object]
    weights: list[object]
    values: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        parts, hooks, weights = list[int](), list[int](), list[object]()
        numbers, compared = _config_numbers(model), list[Tensor]()
        for module in model.modules():
            parts += map(id, (module, vars(module).get("forward")))
            hooks += map(id, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
            if type(module).__module__.partition(".")[0] in LIBRARIES:
                numbers += [value for value in vars(module).values() if type(value) in (int, float)]
            if "merged_adapters" in vars(module):
                names = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
                weights.append(repr([getattr(module, name, None) for name in names]))
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                place = parameter.data_ptr() if type(parameter.data) is Tensor else 0
                weights.append(
                    (id(parameter), place, 0 if parameter.is_inference() else parameter._version)
                )
                if parameter.dim() == 1:
                    compared.append(parameter.detach().float())
        values = [value.to(compared[0].device) for value in compared]
        nothing = torch.empty(0, dtype=torch.float32)
        return cls(parts, hooks, numbers, weights, torch.cat(values) if values else nothing)

    def same(self, other: Snapshot) -> bool:
        """Whether nothing changed between the two."""
        return self[:4] == other[:4] and torch.equal(self.values, other.values)

    def same_structure(self, other: Snapshot) -> bool:
        """Whether nothing but weights and hooks changed between the two."""
        return self.modules == other.modules and self.numbers == other.numbers


def _config_numbers(model: nn.Module) -> list[object]:
    """Fractions in a model's configuration, some of which are read by forwards."""
    config: object = getattr(model, "config", None)
    return [value for value in vars(config).values() if type(value) is float] if config else []
