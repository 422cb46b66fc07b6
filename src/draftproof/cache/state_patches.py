"""Layers of transformers with states, and their attention, as our reads need them: gated delta nets
go token by token and record their states, convolutions compute the tokens of the read alone, a scan
continues from a state, and attention does not depend on how many queries are asked for.

Functions are wrapped where the families' classes use them; outside of a read nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.cache.current_read import (
    forget_handed,
    handed_state,
    record,
    text_order,
    token_count,
    tree_parents,
)
from draftproof.cache.delta_rule import SILU, Kept, causal_conv, delta_gates, delta_rule

QUERIES = 4
"""As in `fast_forward`."""
RECORDED = 17
"""Tokens of a block whose recurrent states are recorded one by one: of a longer block, the last
ones."""

_Recurrent = Callable[..., tuple[Tensor, Tensor]]
"""A gated delta rule: outputs, and the last state."""
_Attended = tuple[Tensor, Tensor | None]
"""What attention returns: its output, and the weights where these are known."""


def in_a_read(rule: _Recurrent, step: _Recurrent | None = None) -> _Recurrent:
    """A gated delta rule that goes token by token during our reads, with our kernel where there is
    one, so each token is computed as in a single step.

    step: the rule of a single token, for a rule of blocks; without a kernel, it computes the blocks
    that are recorded."""

    @wraps(rule)
    def stepwise(
        query: Tensor, key: Tensor, value: Tensor, *args: object, g: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, **options: object,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        count, parents = query.shape[1], tree_parents()
        short = count <= RECORDED or parents is not None
        if args or initial_state is None or count != token_count():
            return rule(query, key, value, *args, g=g, beta=beta, initial_state=initial_state,
                        **options)  # fmt: skip
        if options.get("use_qk_l2norm_in_kernel"):
            done = delta_rule(query, key, value, g, beta, initial_state, parents)
            if done is not None:
                record(done[1] if short else None)
                return done[0], done[1].last
        if step is None or not short:
            return rule(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)
        options.pop("chunk_size", None)
        outputs, state, trail = list[Tensor](), initial_state, Kept()
        for token in range(count):
            part = slice(token, token + 1)
            if parents is not None and token:
                above = parents[:, token].tolist()
                state = torch.stack([trail[node][row] for row, node in enumerate(above)])
            output, state = step(
                query[:, part], key[:, part], value[:, part], g=g[:, part], beta=beta[:, part],
                initial_state=state.clone(), **options
            )  # fmt: skip
            outputs.append(output)
            trail.append(state)
        record(trail)
        return torch.cat(outputs, 1), state

    return stepwise


def delta_net(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a gated delta net of Qwen3.5, with our gates during our reads."""

    @wraps(forward)
    def net(
        self: Any, hidden_states: Tensor, cache_params: Any = None,
        attention_mask: Tensor | None = None, **options: object,
    ) -> Tensor:  # fmt: skip
        rows, count, _ = hidden_states.shape
        known = cache_params is not None and attention_mask is None and count == token_count()
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
        done = causal_conv(mixed, weight, bias, self.activation, count, tree_parents())
        assert done is not None
        mixed = done[:, :, -count:].transpose(1, 2)
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        inner = self.head_k_dim
        query, key, value = (part.reshape(rows, count, -1, size) for part, size in zip(
            torch.split(mixed, sizes, -1), (inner, inner, width), strict=True))
        parents = tree_parents()
        ruled = delta_rule(query, key, value, *gates, cast("Tensor", state), parents)
        assert ruled is not None
        record(ruled[1] if count <= RECORDED or parents is not None else None)
        cache_params.update_recurrent_state(ruled[1].last, layer)
        open_by = self.in_proj_z(hidden_states).reshape(-1, width)
        normed: Tensor = self.norm(ruled[0].reshape(-1, width), open_by)
        out: Tensor = self.out_proj(normed.reshape(rows, count, -1))
        return out

    return net


def several_queries(attend: Callable[..., _Attended]) -> Callable[..., _Attended]:
    """Attention of a read of ours by our kernel, where there is one, and otherwise by torch, which
    is never asked for fewer queries than `QUERIES`: with AVX-512 fewer are rounded in another way.
    """

    @wraps(attend)
    def several(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, **options: object,
    ) -> _Attended:  # fmt: skip
        count, ours = query.shape[2], text_order()
        if ours is not None:
            output = ours(query, key, cast("float | None", options.get("scaling")))
            if output is not None:
                return output, None
        copies = -(-QUERIES // max(count, 1))
        if not token_count() or count >= QUERIES or attention_mask is None:
            return attend(module, query, key, value, attention_mask, **options)
        output, weights = attend(module, query.repeat(1, 1, copies, 1), key, value,
                                 attention_mask.repeat(1, 1, copies, 1), **options)
        return output[:, :count], weights

    return several


def last_tokens(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A causal convolution that computes only the tokens of the read, by our kernel, where its
    input also has the previous ones."""

    @wraps(convolve)
    def last_tokens(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, **options: object,
    ) -> Tensor:  # fmt: skip
        tokens, parents = token_count(), tree_parents()
        if tokens and options.get("seq_idx") is None:
            done = causal_conv(hidden_states, weight, bias, activation, tokens, parents)
            if done is not None:
                return done
        if tokens and parents is not None:
            windows = windows_of(hidden_states, parents, weight.shape[-1])
            rows, count, channels, taps = windows.shape
            out = convolve(windows.view(-1, channels, taps), weight, bias, activation=activation,
                           **options)[..., -1].view(rows, count, channels).transpose(1, 2)
            return F.pad(out, (hidden_states.shape[2] - count, 0))
        return convolve(hidden_states, weight, bias, activation=activation, **options)

    return last_tokens


def windows_of(inputs: Tensor, parents: Tensor, taps: int) -> Tensor:
    """[B, N, channels, taps] the inputs that a convolution reads at each node of a tree.

    Args:
        inputs: [B, channels, S]; the last N of them are the nodes'.
        parents: [B, N].
        taps: The width of the convolution.
    """
    first = inputs.shape[2] - parents.shape[1]
    before = torch.arange(-1, first - 1, device=parents.device).expand(len(parents), -1)
    above = torch.cat([before, torch.where(parents < 0, first - 1, parents + first)], 1)
    place = torch.arange(first, inputs.shape[2], device=parents.device).expand_as(parents)
    places = [place]
    for _ in range(taps - 1):
        place = above.gather(1, place.clamp(min=0)).where(place >= 0, place)
        places.insert(0, place)
    at = torch.stack(places, 2)                                                  # [B, N, taps]
    channels = inputs.shape[1]
    index = at.clamp(min=0).flatten(1)[:, None].expand(-1, channels, -1)
    seen = inputs.gather(2, index).view(len(inputs), channels, *at.shape[1:])
    return torch.where(at[:, None] >= 0, seen, 0).transpose(1, 2).contiguous()


def going_on(scan: Callable[..., Any]) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
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
        state = handed_state()
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
