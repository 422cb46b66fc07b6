"""Layers whose memory is a state of fixed size: recurrent (gated delta net, SSM) and convolutional.

A state sums up everything that was read and cannot be truncated, so a read does not change it: it
works on copies, which `StateCache` adopts where everything that was read is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from draftproof.cache.current_read import HandedStates, recorded
from draftproof.cache.delta_rule import Recorded
from draftproof.cache.kv_layer import KVLayer
from draftproof.cache.state_shape import StateShape


class Trail(NamedTuple):
    """The states of a layer after each token of a block, or after each node of a tree.

    Attributes:
        shapes: The shapes of the states.
        parts: For each state, the inputs [B, channels, W + L] of a convolution with the previous
            ones in front, or the record of a recurrent state.
    """

    shapes: tuple[StateShape, ...]
    parts: list[Any]

    def after(self, row: int, path: Sequence[int], to: Sequence[Tensor]) -> None:
        """Copy a row's states after a path, at least the first token or node, to these."""
        for shape, part, state in zip(self.shapes, self.parts, to, strict=True):
            if shape.kind == "conv":
                width = shape.size[-1]
                places = [*range(width), *(width + node for node in path)][-width:]
                state.copy_(part[row][:, places])
            else:
                part.after(row, path, state)


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of a layer, [B, ...] each, and those that the current read computes."""

    record_past = True      # a convolution receives the previous inputs at every width

    def __init__(self, shapes: tuple[StateShape, ...], states: tuple[Tensor, ...]) -> None:
        self.shapes, self.states = shapes, states
        self.number_of_states = 1 + max(shape.number for shape in shapes)
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)
        self.conv_states: dict[int, Tensor | None] = {}
        self.recurrent_states: dict[int, Tensor | None] = HandedStates()
        self.joined: dict[int, Tensor] = {}             # convolution inputs with previous ones
        self.trails: dict[int, Recorded | None] = {}     # recurrent states after each token

    @property
    def stores(self) -> tuple[Tensor, ...]:
        return self.states

    def rows(self, start: int, stop: int) -> Self:
        """A view of some rows."""
        return type(self)(self.shapes, tuple(state[start:stop] for state in self.states))

    def set_slots(self, slots: Tensor, span: int) -> None:
        """Do nothing, since states have no slots."""

    def begin(self, states: tuple[Tensor, ...]) -> None:
        """Let the next forward continue from these states, which it does not change."""
        for shape, state in zip(self.shapes, states, strict=True):
            # single steps of some families write into the recurrent state
            store = self.conv_states if shape.kind == "conv" else self.recurrent_states
            store[shape.number] = state if shape.kind == "conv" else state.clone()

    def take_states(self) -> tuple[Tensor, ...]:
        """Hand over the states after the last forward, which belong to the caller from now on."""
        kinds = {"conv": self.conv_states, "recurrent": self.recurrent_states}
        states = [kinds[shape.kind].pop(shape.number) for shape in self.shapes]
        return tuple(state for state in states if state is not None)

    def take_trail(self) -> Trail | None:
        """The states after each token of the last forward; None if some are not known."""
        trail = Trail(self.shapes, [
            self.joined.pop(shape.number, None) if shape.kind == "conv"
            else self.trails.pop(shape.number, None) for shape in self.shapes
        ])  # fmt: skip
        return None if any(part is None for part in trail.parts) else trail

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Return inputs [B, channels, W] with the previous ones in front."""
        before = self.conv_states[state_idx]
        assert before is not None
        joined = torch.cat([before, conv_states.to(before.dtype)], -1)
        self.conv_states[state_idx] = joined[..., -before.shape[-1] :]
        self.joined[state_idx] = joined
        return joined

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        before = self.recurrent_states.get(state_idx)
        assert before is not None
        self.recurrent_states[state_idx] = recurrent_states.to(before.dtype)
        self.trails[state_idx] = recorded()
        return recurrent_states

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: storage exists from the start."""


class HybridLayer(StateLayer, CacheLayerMixin):
    """A layer with states as well as keys and values."""

    is_compileable = True
    is_sliding = False

    def __init__(
        self, shapes: tuple[StateShape, ...], states: tuple[Tensor, ...], keys: KVLayer
    ) -> None:
        StateLayer.__init__(self, shapes, states)
        self.inner, self.is_initialized = keys, True

    @property
    def stores(self) -> tuple[Tensor, ...]:
        return *self.states, *self.inner.stores

    def rows(self, start: int, stop: int) -> Self:
        states = tuple(state[start:stop] for state in self.states)
        return type(self)(self.shapes, states, self.inner.rows(start, stop))

    def set_slots(self, slots: Tensor, span: int) -> None:
        self.inner.set_slots(slots, span)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.inner.update(*args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.inner.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.inner.get_seq_length()

    def get_max_length(self) -> int:
        return self.inner.get_max_length()
