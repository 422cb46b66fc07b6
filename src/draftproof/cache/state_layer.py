"""Layers whose memory is a state of fixed size: recurrent (gated delta net, SSM) and convolutional.

A state holds what was read as a whole and cannot be cut back, so a read leaves it alone: it works
on copies, which `StateCache` takes over where all that was read is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from draftproof.cache.delta_rule import Recorded
from draftproof.cache.kv_layer import KVLayer
from draftproof.cache.state_shape import StateShape
from draftproof.cache.transformers_patches import HandedStates, recorded


class Trail(NamedTuple):
    """The states of a layer after each token of a block.

    Attributes:
        shapes: Of the states.
        parts: Of each state: inputs [B, channels, W + L] of a convolution after those before them,
            or what was recorded of recurrent states.
    """

    shapes: tuple[StateShape, ...]
    parts: list[Any]

    def after(self, row: int, tokens: int, to: Sequence[Tensor]) -> None:
        """Put the states of a row after so many tokens of the block, at least one, into these."""
        for shape, part, state in zip(self.shapes, self.parts, to, strict=True):
            if shape.kind == "conv":
                state.copy_(part[row, :, tokens : tokens + shape.size[-1]])
            else:
                part.after(row, tokens, state)


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of a layer, [B, ...] each, and what the running read makes of them."""

    record_past = True      # a convolution is given what came before it, whatever the read's width

    def __init__(self, shapes: tuple[StateShape, ...], states: tuple[Tensor, ...]) -> None:
        self.shapes, self.states = shapes, states
        self.number_of_states = 1 + max(shape.number for shape in shapes)
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)
        self.conv_states: dict[int, Tensor | None] = {}
        self.recurrent_states: dict[int, Tensor | None] = HandedStates()
        self.joined: dict[int, Tensor] = {}             # inputs of convolutions, those before too
        self.trails: dict[int, Recorded | None] = {}     # recurrent states after each token

    @property
    def stores(self) -> tuple[Tensor, ...]:
        return self.states

    def rows(self, start: int, stop: int) -> Self:
        """A view of some rows."""
        return type(self)(self.shapes, tuple(state[start:stop] for state in self.states))

    def set_slots(self, slots: Tensor, span: int) -> None:
        """States have no slots."""

    def begin(self, states: tuple[Tensor, ...]) -> None:
        """Let the next forward go on from these, which it does not change."""
        for shape, state in zip(self.shapes, states, strict=True):
            # single steps of some families write into the recurrent state
            store = self.conv_states if shape.kind == "conv" else self.recurrent_states
            store[shape.number] = state if shape.kind == "conv" else state.clone()

    def take_states(self) -> tuple[Tensor, ...]:
        """The states after what the last forward read, which are the caller's from now on."""
        kinds = {"conv": self.conv_states, "recurrent": self.recurrent_states}
        states = [kinds[shape.kind].pop(shape.number) for shape in self.shapes]
        return tuple(state for state in states if state is not None)

    def take_trail(self) -> Trail | None:
        """The states after each token that the last forward read; None if some are not known."""
        trail = Trail(self.shapes, [
            self.joined.pop(shape.number, None) if shape.kind == "conv"
            else self.trails.pop(shape.number, None) for shape in self.shapes
        ])  # fmt: skip
        return None if any(part is None for part in trail.parts) else trail

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Inputs [B, channels, W] with those before them."""
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
    """States, and keys and values with them."""

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
