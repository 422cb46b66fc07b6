"""Additions of later versions of DFlash: convolutions within the block and a selector (DFlash 2), a
Markov head and a confidence head (DSpark, 2607.05147).

All of them give a position of the block information about the token before it, which positions that
are drafted in parallel do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MARKOV_HEADS = ("vanilla", "gated", "rnn")


class Convolution(nn.Module):
    """Two causal convolutions over the block, before and after a part of a layer. All positions
    share their kernels, apart from a term per group that is projected from the inputs."""

    def __init__(self, size: int, kernel: int, group: int) -> None:
        super().__init__()
        self.kernel, self.group = kernel, group
        self.base_kernel = nn.Parameter(torch.empty(2, kernel, size, dtype=torch.float32))
        self.kernel_projection = nn.Linear(size, 2 * kernel * (size // group), bias=False)

    def forward(self, hidden: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, N, H] the convolved output of a part for convolved inputs [B, N, H]."""
        shape = (*hidden.shape[:2], 2, self.kernel, -1)
        added = self.kernel_projection(hidden).view(shape)              # [B, N, 2, kernel, groups]
        kernels = self.base_kernel + added.repeat_interleave(self.group, -1)
        return _convolved(part(_convolved(hidden, kernels[:, :, 0])), kernels[:, :, 1])


def _convolved(hidden: Tensor, kernels: Tensor) -> Tensor:
    """[B, N, H] the sum over earlier positions, weighted by this position's kernel."""
    size = hidden.shape[1]
    back = range(min(kernels.shape[2], size))
    moved = [F.pad(hidden, (0, 0, step, 0))[:, :size] * kernels[:, :, step] for step in back]
    return torch.stack(moved).sum(0)


class Selector(nn.Module):
    """A token's contribution to the logit of the next: <A(a) * W h, B(b)>."""

    def __init__(self, vocab_size: int, size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank, dtype=torch.float32))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank, dtype=torch.float32))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        """[B, n, K] for `tokens` [B, K] of a place with state [B, H], after `before` [B, n]."""
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)[:, None]
        return cast(Tensor, context @ self.successor_codebook[tokens].transpose(1, 2))


class MarkovHead(nn.Module):
    """The contribution of the previous token to the logits of a position: W2 of its embedding in
    W1.

    gated: the embedding is weighted by a gate from the position's state. rnn: a recurrent state
    over the tokens of the path replaces the embedding.

    Args:
        kind: One of `MARKOV_HEADS`.
        shapes: Shapes of the head's tensors, by name; they show which projections have a bias.
    """

    def __init__(
        self, kind: str, vocab_size: int, draft_size: int, rank: int, size: int,
        shapes: Mapping[str, object]
    ) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_size, bias=False)
        name, inputs, outputs = {
            "gated": ("gate_proj", size + rank, rank),
            "rnn": ("joint_proj", size + 2 * rank, 3 * rank),
        }.get(kind, ("", 0, 0))
        if name:
            setattr(self, name, nn.Linear(inputs, outputs, bias=f"{name}.bias" in shapes))

    def forward(
        self, hidden: Tensor, before: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The contribution to the logits, [B, n, D], and the state after these tokens, [B, n, r].

        Args:
            hidden: [B, H] of the place.
            before: [B, n] the tokens before it.
            state: [B, n, r] of the paths before these tokens.
        """
        embedded = self.markov_w1(before)
        wide = hidden[:, None].expand(-1, before.shape[1], -1)
        if self.kind == "gated":
            gate = cast(nn.Linear, self.gate_proj)(torch.cat([wide, embedded], -1))
            embedded = gate.sigmoid() * embedded
        elif self.kind == "rnn":
            joint = cast(nn.Linear, self.joint_proj)(torch.cat([state, embedded, wide], -1))
            gate, candidate, out = joint.chunk(3, -1)
            gate, embedded = gate.sigmoid(), out.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        return self.markov_w2(embedded), state


class ConfidenceHead(nn.Module):
    """The probability that the target accepts the token of a position, from its state and, for some
    heads, the Markov embedding of the token before."""

    def __init__(self, inputs: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1, bias=bias)

    def forward(self, hidden: Tensor, embedded: Tensor | None, count: int) -> Tensor:
        """[B, n] log-probabilities, of a place with state [B, H] after `count` tokens, of Markov
        embeddings [B, n, r]."""
        wide = hidden[:, None].expand(-1, count, -1)
        inputs = wide if embedded is None else torch.cat([wide, embedded], -1)
        return F.logsigmoid(self.proj(inputs)[..., 0].float())
