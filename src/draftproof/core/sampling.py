"""Sampling: the target's choice under the wishes of all rows. Knows logits and prefixes; nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.processors import LogitsProcessors
from draftproof.core.tree import NO_TOKEN

STOCK, STOCKED = 64, 1 << 20
"""Positions of all rows that noise is made for at once, and numbers, where a round does not ask for more."""


class Sampler:
    """The wishes of all running rows, as tensors. Pure: the same arguments give the same choice.

    ops: what the sampler computes with.
    """

    def __init__(self, rows: Sequence[SamplingParams], device: torch.device | str = "cpu", ops: Ops = TORCH) -> None:
        self.rows = tuple(rows)
        self.device = torch.device(device)
        self.ops = ops
        wants = [row.sampling for row in rows]
        self.keys = noise.row_keys([want.seed for want in wants], [row.sample for row in rows], device)
        self.greedy = all(want.temperature == 0 for want in wants)
        self._processors = LogitsProcessors(self.rows, self.device)
        self.only_temperature = self._processors.only_temperature            # nothing else is asked for
        self._round: dict[tuple[Role, int], tuple[Tensor, Tensor]] = {}
        self._stocks = STOCK
        self._stock: _Stock | None = None

    def select(self, rows: Sequence[int]) -> Sampler:
        """The sampler of these rows, in this order: to ask once, for it makes no noise for later rounds."""
        other = Sampler([self.rows[row] for row in rows], self.device, self.ops)
        other._stocks = 0
        return other

    def prepare(self, dtype: torch.dtype, vocab: int) -> None:
        """Copy to the device now, not in the round that comes, whatever scores of this dtype and width will need."""
        self._processors.prepare(dtype, vocab)
        _ = self._trust

    def filtered(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N, V] processed logits, -inf where a token may not be chosen."""
        return self._processors.filtered(logits, paths)

    @property
    def reads_text(self) -> bool:
        """Whether a choice depends on which tokens stand before it, beside what the logits say."""
        return self._processors.reads_text

    def sample(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N] the target's own choice at each node, from raw `logits` [B, N, V]; NO_TOKEN where there is none."""
        return self.ops.run(sample, self, logits, paths)

    def probs(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N, V] the law of the choice at each node (fp32, or fp64 for fp64 logits); one-hot where greedy."""
        scores = self.filtered(logits, paths)
        law = scores.softmax(-1)
        if all(row.sampling.temperature > 0 for row in self.rows):
            return law
        target_tokens = argmax_token(scores)[..., None]                                   # NO_TOKEN has no law: NaN, as by softmax
        best = torch.zeros_like(law).scatter_(-1, target_tokens.clamp(min=0), 1.0).masked_fill_(target_tokens == NO_TOKEN, torch.nan)
        return torch.where(self._processors.greedy_rows, best, law)

    def gumbel_logits(self, logits: Tensor, paths: Paths, role: Role) -> Tensor:
        """[B, N, V] processed logits plus keyed Gumbel noise: argmax is a draw, top-k draws without replacement.

        With Role.TARGET the noise depends on (seed, position, token) alone; the other roles draw afresh each round.
        """
        scores = self.filtered(logits, paths)
        if self.greedy:
            return scores
        noises = self._noise(paths.prefix, paths.tree.depth_limit, role, scores.shape[-1])      # [B, D, V]
        if paths.tree.is_chain:
            return scores + noises[:, paths.first : paths.first + scores.shape[1]]
        depths = paths.tree.depths[:, paths.first :, None]
        return scores + noises.gather(1, depths.expand_as(scores))

    def confidence(self, gumbel_logits: Tensor, sure: float = 1.0) -> Tensor:
        """[B, N, V] logarithms of what a drafter that races with the target's noise may think a token's chance to be chosen.

        Draft and target part only where their logits do, and a low temperature makes more of that: the softmax of the race
        itself is too sure. A high one would have it less sure than it is. sure: the nearer a drafter's logits are to the
        target's, the more may be made of a lead.
        """
        return (gumbel_logits * (sure * self._trust[..., None]).to(gumbel_logits.dtype)).log_softmax(-1)

    def best(self, logits: Tensor, paths: Paths, count: int, sure: float = 1.0) -> tuple[Tensor, Tensor]:
        """The `count` tokens likeliest to be chosen at each node, and the logarithm of the chance of each, [B, N, count] both.

        For drafters that choose: by the target's own noise, from logits [B, N, V]. -inf: nothing may be chosen.
        sure: see `confidence`.
        """
        return self.ops.run(best_tokens, self, logits, paths, count, sure)

    def draft_sampling(self, prefix: Prefix, steps: int, vocab: int, floor: float, sure: float = 1.0) -> DraftSampling | None:
        """What `best` goes by for `steps` tokens behind the root; None where it goes by more than our kernels know.

        floor: the chance to stand below which no row's draft goes on. sure: see `confidence`.
        """
        if not (self.ops.on_host and self.only_temperature):
            return None
        noises, places = None, None
        if not self.greedy:
            noises, places = self._stocked(prefix, steps - 1, vocab)
        return DraftSampling(noises, places, self.temperatures, sure * self._trust, log(floor) if floor else -inf)

    @cached_property
    def slope(self) -> Tensor:
        """[B] by how much `confidence` part where logits part by 1, at a temperature."""
        return (self._trust / self.temperatures)[:, 0]

    def noise_at(self, paths: Paths, nodes: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
        """Noise [., V] of the target's choices, and which of it each node's is [B, N]; None if all rows are greedy.

        For ops on the host."""
        if self.greedy:
            return None, None
        noises, roots = self._stocked(paths.prefix, paths.tree.depth_limit, vocab)
        return noises, roots[:, None] + paths.tree.depths[:, paths.first : paths.first + nodes]

    def _stocked(self, prefix: Prefix, depth: int, vocab: int) -> tuple[Tensor, Tensor]:
        """The noise of the target's choices [B, D, V], and which of it, flat, is that behind each root [B].

        Where numbers are at hand it is made for more positions than a round asks for, and kept as long as it reaches.
        """
        ahead, positions, stock = max(prefix.ahead, depth), prefix.position.tolist(), self._stock
        if stock is None or not stock.reaches(positions, ahead, vocab):
            reach = max(1 + ahead, min(self._stocks, STOCKED // vocab) // len(positions))
            noises = self._made(prefix.position, reach, Role.TARGET, vocab)
            starts = reach * torch.arange(len(positions), device=self.device) - prefix.position
            stock = self._stock = _Stock(positions, noises, starts)
        return stock.noises, stock.starts + prefix.position

    @cached_property
    def temperatures(self) -> Tensor:
        """[B, 1] what logits are divided by."""
        return torch.tensor([row.sampling.temperature or 1.0 for row in self.rows], device=self.device)[:, None]

    @cached_property
    def _trust(self) -> Tensor:
        """[B, 1] what scores are multiplied by to say a chance, by a drafter that is no surer than others."""
        return self.temperatures.clamp(max=1)

    def scales(self, sure: float) -> Tensor:
        """[B, 1] what scores are multiplied by to say a chance; see `confidence`."""
        return sure * self._trust

    def _noise(self, prefix: Prefix, depth: int, role: Role, vocab: int) -> Tensor:
        """[B, D, V] noise by depth. A round asks many times: what was made for its position is kept until the next."""
        position, depth = prefix.position, max(prefix.ahead, depth)
        made_for, noises = self._round.get((role, vocab), (None, None))
        if noises is None or made_for is not position or noises.shape[1] <= depth:
            noises = self._made(position, depth + 1, role, vocab)
            self._round[role, vocab] = (position, noises)
        return noises

    def _made(self, position: Tensor, reach: int, role: Role, vocab: int) -> Tensor:
        """[B, reach, V] noise of the choices behind roots at `position` [B]."""
        places = position[:, None] + 1 + torch.arange(reach, device=self.device)
        origin = None if role is Role.TARGET else position[:, None].expand_as(places)
        streams = self.ops.run(noise.stream, self.keys, role, places, origin)
        noises = self.ops.run(noise.gumbel, streams, vocab)
        if not self._some_greedy:
            return noises
        return noises.masked_fill_(self._processors.greedy_rows, 0.0)                       # temperature 0 is noise 0

    @cached_property
    def _some_greedy(self) -> bool:
        return any(row.sampling.temperature == 0 for row in self.rows)


class DraftSampling(NamedTuple):
    """By what the next tokens of a chain are chosen where only temperatures are asked for.

    noise: [., V] float32, of which `places` [rows] names that behind each root; None, and None, if all rows are greedy.
    temperatures: [rows, 1] what logits are divided by. confidence_scales: [rows, 1] what scores are multiplied by to say a
    chance. floor: the logarithm of the chance below which a chain does not go on.
    """

    noise: Tensor | None
    places: Tensor | None
    temperatures: Tensor
    confidence_scales: Tensor
    floor: float


def sample(sampler: Sampler, logits: Tensor, paths: Paths) -> Tensor:
    """[B, N] the target's own choice at each node: see `Sampler.sample`."""
    return argmax_token(sampler.gumbel_logits(logits, paths, Role.TARGET))


def best_tokens(sampler: Sampler, logits: Tensor, paths: Paths, count: int, sure: float) -> tuple[Tensor, Tensor]:
    """The tokens likeliest to be chosen at each node: see `Sampler.best`."""
    best = sampler.confidence(sampler.gumbel_logits(logits, paths, Role.TARGET), sure).topk(count, -1)
    return torch.where(best.values > -torch.inf, best.values, -torch.inf), best.indices


class _Stock(NamedTuple):
    """Noise [B, D, V] made for roots at `positions` and as far as it reaches. starts: [B] which of it, flat, is that behind a
    root at position 0."""

    positions: list[int]
    noises: Tensor
    starts: Tensor

    def reaches(self, positions: list[int], ahead: int, vocab: int) -> bool:
        """Whether it holds what stands behind roots at these positions, and so far ahead of them."""
        reach = self.noises.shape[1] - ahead
        for now, then in zip(positions, self.positions, strict=True):
            if not 0 <= now - then < reach:
                return False
        return self.noises.shape[2] == vocab


def argmax_token(gumbel_logits: Tensor) -> Tensor:
    """[...] the token with the highest score of `gumbel_logits` [..., V]; NO_TOKEN if all are -inf or one is NaN."""
    best = gumbel_logits.max(-1)
    return torch.where(best.values > -torch.inf, best.indices, NO_TOKEN)
