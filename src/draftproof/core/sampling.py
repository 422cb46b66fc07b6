"""Sampling: the target's choice under the options of each row. This knows logits and prefixes, no
models."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from operator import sub
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.processors import LogitsProcessors
from draftproof.core.tree import NO_TOKEN

AHEAD, LARGEST = 64, 1 << 20
"""Noise is made in advance for at most so many positions of all rows, and so many numbers."""


class Chance(Protocol):
    """The random outcomes of an acceptance rule."""

    def flip(self, probability: Tensor, node: int) -> Tensor:
        """[B] bool, true with `probability` [B]; `node` names the coin."""
        ...

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        """[B] a token drawn in proportion to `weights` [B, V], after a node of `depth` [B]."""
        ...


class Sampler(LogitsProcessors):
    """The sampling options of all running rows, as tensors. Pure: the same arguments give the same
    choice.

    All its random numbers come from `streams`, and the outcomes of acceptance rules from `chance`.
    A class derived from it may replace these; `Engine` takes it as `sampler`.
    """

    def __init__(
        self, rows: Sequence[SamplingParams], device: torch.device | str = "cpu", ops: Ops = TORCH
    ) -> None:
        super().__init__(rows, device, ops.exact)
        self.ops = ops
        seeds = [row.sampling.seed for row in rows]
        self.keys = noise.row_keys(seeds, [row.sample for row in rows], device)
        temperatures = [row.sampling.temperature for row in rows]
        self.greedy = not any(temperatures)
        # [B, 1] divisors of logits; 1 in greedy rows
        divisors = [temperature or 1.0 for temperature in temperatures]
        self.temperatures = torch.tensor(divisors, dtype=torch.float32, device=device)[:, None]
        self._round: dict[tuple[Role, int], tuple[Tensor, Tensor]] = {}
        self._ahead = 1 if len(rows) > 1 else AHEAD     # batches change, so begin with little
        self._kept: _KeptNoise | None = None

    def select(self, rows: Sequence[int]) -> Sampler:
        """A sampler of these rows for a single call: it makes no noise in advance."""
        other = type(self)([self.rows[row] for row in rows], self.device, self.ops)
        other._ahead = 0
        return other

    def sample(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N] the target's choice at each node from raw `logits` [B, N, V], or NO_TOKEN."""
        return self.ops.run(sample, self, logits, paths)

    def streams(self, role: Role, position: Tensor, origin: Tensor | None = None) -> Tensor:
        """[B, N, 2] a random stream per draw at `position` [B, N]; see `noise.stream`."""
        return self.ops.run(noise.stream, self.keys, role, position, origin)

    def chance(self, prefix: Prefix) -> Chance:
        """The random outcomes of an acceptance rule in a round with these roots."""
        return KeyedChance(self, prefix)

    def probs(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N, V] the target's distribution at each node in fp32, or fp64; one-hot if greedy."""
        scores = self.filtered(logits, paths)
        probs = scores.softmax(-1)
        if not self.some_greedy:
            return probs
        best = argmax_token(scores)[..., None]
        best_only = torch.zeros_like(probs).scatter_(-1, best.clamp(min=0), 1.0)
        best_only.masked_fill_(best == NO_TOKEN, torch.nan)           # as of softmax
        return torch.where(self.greedy_rows, best_only, probs)

    def gumbel_logits(self, logits: Tensor, paths: Paths, role: Role) -> Tensor:
        """[B, N, V] processed logits plus keyed Gumbel noise: argmax is a draw, top-k draws without
        replacement. With Role.TARGET noise depends only on (seed, position, token); the
        other roles draw fresh noise in each round.
        """
        scores = self.filtered(logits, paths)
        if self.greedy:
            return scores
        limit, vocab = paths.tree.depth_limit, scores.shape[-1]
        noises = self._noise(paths.prefix, limit, role, vocab)                      # [B, D, V]
        if paths.tree.is_chain:
            return scores + noises[:, paths.first : paths.first + scores.shape[1]]
        depths = paths.tree.depths[:, paths.first :, None]
        return scores + noises.gather(1, depths.expand_as(scores))

    def confidence(self, gumbel_logits: Tensor, scale: float = 1.0) -> Tensor:
        """[B, N, V] log-probability that the target chooses each token, as estimated by a drafter
        that has the target's own noise.

        With the same noise, the two choices differ only as their logits do, and a temperature below
        1 enlarges that difference. So the softmax is taken of scores times min(temperature, 1).
        scale: a further factor, above 1 for drafters whose logits are close to the target's.
        """
        scales = self.confidence_scales(scale)[..., None].to(gumbel_logits.dtype)
        return (gumbel_logits * scales).log_softmax(-1)

    def best(
        self, logits: Tensor, paths: Paths, count: int, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The `count` tokens that are likeliest to be chosen at each node, and their
        log-probabilities,
        both [B, N, count], from logits [B, N, V] and the target's own noise. For drafters that
        choose their tokens. -inf: nothing may be chosen. scale: see `confidence`.
        """
        return self.ops.run(best_tokens, self, logits, paths, count, scale)

    def draft_sampling(
        self, prefix: Prefix, steps: int, vocab: int, floor: float, scale: float = 1.0
    ) -> DraftSampling | None:
        """The inputs of `best` for `steps` tokens after the root; None if kernels cannot do the
        same.

        floor: the probability below which a draft ends. scale: see `confidence`.
        """
        if not (self.ops.on_host and self.only_temperature):
            return None
        noises, places = None, None
        if not self.greedy:
            noises, places = self._kept_noise(prefix, steps - 1, vocab)
        least, scales = log(floor) if floor else -inf, self.confidence_scales(scale)
        return DraftSampling(noises, places, self.temperatures, scales, least)

    @property
    def slope(self) -> Tensor:
        """[B] by how much `confidence` changes if logits change by 1, at a temperature."""
        return (self.confidence_scales() / self.temperatures)[:, 0]

    def noise_at(self, paths: Paths, nodes: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
        """Noise [., V] of the target's choices, and the row of it for each node [B, N]; None if all
        rows are greedy. For ops on the host."""
        if self.greedy:
            return None, None
        noises, roots = self._kept_noise(paths.prefix, paths.tree.depth_limit, vocab)
        return noises, roots[:, None] + paths.tree.depths[:, paths.first : paths.first + nodes]

    def _kept_noise(self, prefix: Prefix, depth: int, vocab: int) -> tuple[Tensor, Tensor]:
        """The noise of the target's choices [B, D, V], and the index, flat, of the noise after each
        root [B]. It is made for more positions than a round needs, and kept while it suffices."""
        ahead, positions, kept = max(prefix.ahead, depth), prefix.position.tolist(), self._kept
        moved = list(map(sub, positions, kept.positions)) if kept is not None else []
        if kept is None or kept.noises.shape[2] != vocab or not (
            min(moved) >= 0 and max(moved) + ahead < kept.noises.shape[1]
        ):
            reach = max(1 + ahead, min(self._ahead, LARGEST // vocab) // len(positions))
            noises = self._made(prefix.position, reach, Role.TARGET, vocab)
            starts = reach * torch.arange(len(positions), device=self.device) - prefix.position
            kept = self._kept = _KeptNoise(positions, noises, starts)
            self._ahead = min(2 * self._ahead, AHEAD)
        return kept.noises, kept.starts + prefix.position

    def confidence_scales(self, scale: float = 1.0) -> Tensor:
        """[B, 1] factors of scores before the softmax; see `confidence`."""
        return scale * self.temperatures.clamp(max=1)

    def _noise(self, prefix: Prefix, depth: int, role: Role, vocab: int) -> Tensor:
        """[B, D, V] noise by depth, kept for one round."""
        position, depth = prefix.position, max(prefix.ahead, depth)
        made_for, noises = self._round.get((role, vocab), (None, None))
        if noises is None or made_for is not position or noises.shape[1] <= depth:
            noises = self._made(position, depth + 1, role, vocab)
            self._round[role, vocab] = (position, noises)
        return noises

    def _made(self, position: Tensor, reach: int, role: Role, vocab: int) -> Tensor:
        """[B, reach, V] noise of the choices after roots at `position` [B]."""
        positions = position[:, None] + 1 + torch.arange(reach, device=self.device)
        origin = None if role is Role.TARGET else position[:, None].expand_as(positions)
        noises = self.ops.run(noise.gumbel, self.streams(role, positions, origin), vocab)
        if not self.some_greedy:
            return noises
        return noises.masked_fill_(self.greedy_rows, 0.0)   # temperature 0: no noise


class KeyedChance:
    """Outcomes from keyed noise, fresh in each round. The position of the root identifies the
    round."""

    def __init__(self, sampler: Sampler, prefix: Prefix) -> None:
        self.sampler, self.position = sampler, prefix.position[:, None]

    def flip(self, probability: Tensor, node: int) -> Tensor:
        where = torch.full_like(self.position, node)
        coin = self.sampler.streams(Role.ACCEPT, where, self.position)
        return noise.uniform(coin)[:, 0] < probability          # strict: 0 never happens

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        where = self.position + depth[:, None] + 1
        place = self.sampler.streams(Role.RECOVER, where, self.position)
        gumbel = self.sampler.ops.run(noise.gumbel, place, weights.shape[-1])[:, 0]
        return argmax_token(weights.log() + gumbel)


class DraftSampling(NamedTuple):
    """How the tokens of a chain are chosen, if rows use temperatures only.

    noise: [., V] float32; `places` [rows] are the indices of the noise after each root. Both are
        None if all rows are greedy.
    temperatures, confidence_scales: [rows, 1] divisors of logits, and factors of scores before the
        softmax.
    floor: the log-probability below which a chain ends.
    """

    noise: Tensor | None
    places: Tensor | None
    temperatures: Tensor
    confidence_scales: Tensor
    floor: float


def sample(sampler: Sampler, logits: Tensor, paths: Paths) -> Tensor:
    """[B, N] the target's choice at each node; see `Sampler.sample`."""
    return argmax_token(sampler.gumbel_logits(logits, paths, Role.TARGET))


def best_tokens(
    sampler: Sampler, logits: Tensor, paths: Paths, count: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens at each node; see `Sampler.best`."""
    scores = sampler.gumbel_logits(logits, paths, Role.TARGET)
    best = sampler.confidence(scores, scale).topk(count, -1)
    return torch.where(best.values > -torch.inf, best.values, -torch.inf), best.indices


class _KeptNoise(NamedTuple):
    """Noise [B, D, V] from roots at `positions` on. starts: [B] the index, flat, of the noise after
    a root at position 0."""

    positions: list[int]
    noises: Tensor
    starts: Tensor


def argmax_token(gumbel_logits: Tensor) -> Tensor:
    """[...] the token of the highest score of [..., V]; NO_TOKEN if all are -inf or one is NaN."""
    best = gumbel_logits.max(-1)
    return torch.where(best.values > -torch.inf, best.indices, NO_TOKEN)
