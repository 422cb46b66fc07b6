"""Corrects, during our reads, what transformers' families compute from the slots of their cache:
here rows and the nodes of a tree have positions that differ from their slots.

Functions are wrapped where the families' classes use them; outside of a read nothing changes.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftproof.cache.delta_rule import (
    SILU,
    Kept,
    Recorded,
    causal_conv,
    delta_gates,
    delta_rule,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "wrapped_by_draftproof"
QUERIES = 4
"""As in `fast_forward`."""
RECORDED = 17
"""Tokens of a block whose recurrent states are recorded one by one: of a longer block, the last
ones."""


_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""Classes of gated delta nets whose forward is replaced here."""


class Place(NamedTuple):
    """Positions of the nodes [B, N] of the current read, and of the keys in all slots [B, S]."""

    nodes: Tensor
    keys: Tensor
    context: int


_PLACE: ContextVar[Place | None] = ContextVar("place", default=None)
_scan = threading.local()


@contextmanager
def placed(place: Place | None) -> Iterator[None]:
    """A block that reads nodes and keys at these positions."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


R = TypeVar("R")
_Recurrent = Callable[..., tuple[Tensor, Tensor]]
"""A gated delta rule: outputs, and the last state."""


def patch_decoder(model: PreTrainedModel) -> bool:
    """Correct ALiBi (Bloom, Falcon) and Mamba's scan, and let gated delta nets record their states.
    Returns whether the model needs the place of a read."""
    files = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    _wrap(files, "mamba_selective_scan", _going_on)
    for file in files:
        if hasattr(file, "torch_recurrent_gated_delta_rule"):
            step = file.torch_recurrent_gated_delta_rule
            _wrap([file], "torch_chunk_gated_delta_rule", partial(_in_a_read, step=step))
            _wrap([file], "torch_recurrent_gated_delta_rule", _in_a_read)
            _wrap([file], "causal_conv1d_fn", _last_tokens)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(attend, _MARK):
        several = _several_queries(attend)
        setattr(several, _MARK, True)
        ALL_ATTENTION_FUNCTIONS.register("sdpa", several)
    nets = {type(module) for module in model.modules()}
    _wrap([net for net in nets if net.__name__ in _NETS], "forward", _net)
    alibi = _wrap(files, "build_alibi_tensor", _by_place(_alibi))
    return alibi and bool(getattr(model.config, "alibi", True))


def patch_encoder_decoder(decoder: nn.Module) -> None:
    """Correct position embeddings and relative bias of a decoder that takes no positions."""
    if (embed := getattr(decoder, "embed_positions", None)) is not None:
        _wrap([type(embed)], "forward", _by_place(_embedded))
    _wrap({type(module) for module in decoder.modules()}, "compute_bias", _by_place(_biased))


def _wrap(
    owners: Collection[object], name: str, around: Callable[[Callable[..., R]], Callable[..., R]]
) -> bool:
    """Wrap the attribute `name` of these, unless it is wrapped; return whether any has it."""
    patched = [owner for owner in owners if hasattr(owner, name)]
    for owner in patched:
        inner = getattr(owner, name)
        if not hasattr(inner, _MARK):
            outer = around(inner)
            setattr(outer, _MARK, True)
            setattr(owner, name, outer)
    return bool(patched)


def _by_place(
    instead: Callable[..., Tensor]
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A wrapper that during a read calls `instead` with the place and the original function."""

    def around(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(original)
        def placed_or_original(*args: object, **kwargs: object) -> Tensor:
            place = _PLACE.get()
            if place is None:
                return original(*args, **kwargs)
            return instead(place, original, *args, **kwargs)

        return placed_or_original

    return around


def _alibi(
    place: Place, build: Callable[..., Tensor], mask: Tensor, heads: int, dtype: torch.dtype
) -> Tensor:
    """The bias [B * heads, 1, S]: a head's slope times the key's position, since softmax ignores
    what is equal for all keys of a query."""
    rows, span = place.keys.shape
    table = build(place.keys.new_ones(1, span), heads, dtype)[:, 0]                     # [H, S]
    by_key: Tensor = table[:, place.keys].transpose(0, 1).reshape(rows * heads, 1, span)
    return by_key


def _embedded(
    place: Place, embed: Callable[..., Tensor], module: Any, first: object,
    *args: object, **kwargs: object,
) -> Tensor:
    """Select each node's embedding from those of all positions; decoders pass tokens, their
    embeddings, or their shape."""
    length, nodes = min(place.keys.shape[1], place.context), place.nodes
    if not isinstance(first, Tensor):
        return embed(module, torch.Size((1, length))).reshape(length, -1)[nodes]
    if first.is_floating_point():
        rows: Tensor = embed(module, first[:1, :1].expand(1, length, -1))[0][nodes]
        return rows
    if "position_ids" in inspect.signature(embed).parameters:
        every = torch.arange(length, device=nodes.device)
        return embed(module, first, position_ids=every).reshape(length, -1)[nodes]
    filled = first.new_full((1, length), module.padding_idx + 1)           # padding has no position
    table = embed(module, filled).reshape(length, -1)[nodes]
    pad = embed(module, first.new_full((1, 1), module.padding_idx)).reshape(-1)
    return torch.where((first == module.padding_idx)[..., None], pad, table)


def _biased(
    place: Place, bias: Callable[..., Tensor], module: nn.Module, query_length: int,
    key_length: int, *args: object, **kwargs: object,
) -> Tensor:  # fmt: skip
    """Select the bias between each node and each key from the bias by distance."""
    last = key_length - 1
    by_distance = bias(module, 1, key_length, past_seen_tokens=last)[0, :, 0]              # [H, S]
    back = last - place.nodes[..., None] + place.keys[:, None]                          # [B, N, S]
    rows: Tensor = by_distance[:, back.clamp(0, last)].transpose(0, 1)
    return rows


class HandedStates(dict[int, Tensor | None]):
    """Recurrent states by number; this thread's scan continues from the one that was looked up
    last."""

    def __getitem__(self, index: int) -> Tensor | None:
        _scan.state = super().__getitem__(index)
        return _scan.state


def forget_handed() -> None:
    """Let scans of this thread have no state until one is looked up."""
    _scan.state = None


@contextmanager
def recording(tokens: int) -> Iterator[None]:
    """A read of `tokens` tokens; if there are at most `RECORDED`, the states after each of them are
    recorded."""
    _scan.tokens, _scan.trail = tokens, None
    try:
        yield
    finally:
        _scan.tokens, _scan.trail = 0, None


def recorded() -> Recorded | None:
    """The states after each token of this thread's last computation, if they were recorded; they
    are returned only once."""
    trail: Recorded | None = getattr(_scan, "trail", None)
    _scan.trail = None
    return trail


def _in_a_read(rule: _Recurrent, step: _Recurrent | None = None) -> _Recurrent:
    """A gated delta rule that goes token by token during our reads, with our kernel where there is
    one, so each token is computed as in a single step.

    step: the rule of a single token, for a rule of blocks; without a kernel, it computes the blocks
    that are recorded."""

    @wraps(rule)
    def stepwise(
        query: Tensor, key: Tensor, value: Tensor, *args: object, g: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, **options: object,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        count = query.shape[1]
        if args or initial_state is None or count != _tokens():
            return rule(query, key, value, *args, g=g, beta=beta, initial_state=initial_state,
                        **options)  # fmt: skip
        if options.get("use_qk_l2norm_in_kernel"):
            done = delta_rule(query, key, value, g, beta, initial_state)
            if done is not None:
                _scan.trail = done[1] if count <= RECORDED else None
                return done[0], done[1].last
        if step is None or count > RECORDED:
            return rule(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)
        options.pop("chunk_size", None)
        outputs, state, trail = list[Tensor](), initial_state, Kept()
        for token in range(count):
            part = slice(token, token + 1)
            output, state = step(
                query[:, part], key[:, part], value[:, part], g=g[:, part], beta=beta[:, part],
                initial_state=state.clone(), **options
            )  # fmt: skip
            outputs.append(output)
            trail.append(state)
        _scan.trail = trail
        return torch.cat(outputs, 1), state

    return stepwise


def _net(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a gated delta net of Qwen3.5, with our gates during our reads."""

    @wraps(forward)
    def net(
        self: Any, hidden_states: Tensor, cache_params: Any = None,
        attention_mask: Tensor | None = None, **options: object,
    ) -> Tensor:  # fmt: skip
        rows, count, _ = hidden_states.shape
        known = cache_params is not None and attention_mask is None and count == _tokens()
        state = cache_params.get_recurrent_state(self.layer_idx, state_idx=0) if known else None
        known = state is not None and state.dtype == torch.float32 and self.activation in SILU
        gates, layer, width = None, self.layer_idx, self.head_v_dim
        if known and self.conv1d.weight.dtype == hidden_states.dtype:
            time, much = self.in_proj_a(hidden_states), self.in_proj_b(hidden_states)
            gates = delta_gates(time, much, self.A_log, self.dt_bias)
        if gates is None:
            return forward(self, hidden_states, cache_params, attention_mask, **options)
        mixed = self.in_proj_qkv(hidden_states).transpose(1, 2)
        mixed = cache_params.update_conv_state(mixed, layer,
                                               conv_kernel_size=self.conv_kernel_size)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        done = causal_conv(mixed, weight, bias, self.activation, count)
        assert done is not None
        mixed = done[:, :, -count:].transpose(1, 2)
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        inner = self.head_k_dim
        query, key, value = (part.reshape(rows, count, -1, size) for part, size in zip(
            torch.split(mixed, sizes, -1), (inner, inner, width), strict=True))
        ruled = delta_rule(query, key, value, *gates, cast("Tensor", state))
        assert ruled is not None
        _scan.trail = ruled[1] if count <= RECORDED else None
        cache_params.update_recurrent_state(ruled[1].last, layer)
        open_by = self.in_proj_z(hidden_states).reshape(-1, width)
        normed: Tensor = self.norm(ruled[0].reshape(-1, width), open_by)
        out: Tensor = self.out_proj(normed.reshape(rows, count, -1))
        return out

    return net


def _several_queries(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of torch that is never asked for fewer queries than `QUERIES` in a read of ours:
    with AVX-512 fewer are rounded in another way."""

    @wraps(attend)
    def several(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, **options: object,
    ) -> Any:  # fmt: skip
        count = query.shape[2]
        copies = -(-QUERIES // max(count, 1))
        if not _tokens() or count >= QUERIES or attention_mask is None:
            return attend(module, query, key, value, attention_mask, **options)
        output, weights = attend(module, query.repeat(1, 1, copies, 1), key, value,
                                 attention_mask.repeat(1, 1, copies, 1), **options)
        return output[:, :count], weights

    return several


def _tokens() -> int:
    """The number of tokens of this thread's current read; 0 outside of one."""
    tokens: int = getattr(_scan, "tokens", 0)
    return tokens


def _last_tokens(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A causal convolution that computes only the tokens of the read, by our kernel, where its
    input also has the previous ones."""

    @wraps(convolve)
    def last_tokens(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, **options: object,
    ) -> Tensor:  # fmt: skip
        tokens = _tokens()
        if tokens and options.get("seq_idx") is None:
            done = causal_conv(hidden_states, weight, bias, activation, tokens)
            if done is not None:
                return done
        return convolve(hidden_states, weight, bias, activation=activation, **options)

    return last_tokens


def _going_on(scan: Callable[..., Any]) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Mamba 1's scan of inputs [B, I, L], which continues from a state [B, I, S].

    transformers 5 starts it from zero except for single tokens. It is linear in its state, so the
    state's contribution is added afterwards.
    """

    @wraps(scan)
    def going_on(
        inputs: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
        return_last_state: bool = False, **options: object,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        state = getattr(_scan, "state", None)
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
