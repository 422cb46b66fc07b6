"""Enumerates every random outcome of the whole engine: the exact distribution of its texts.

Where the engine would draw a number, the enumeration chooses the outcome and multiplies the
probabilities in float64: the distribution of the text is known, not estimated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from draftproof.core.noise import Role
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Chance, Sampler, argmax_token
from draftproof.core.tree import NO_TOKEN
from draftproof.engine.engine import Completion
from draftproof.verify.cases import Case

WORLDS, DRAWS = 4096, 48
"""Outcomes that run side by side, and draws that one of them may ask for."""

End = tuple[tuple[int, ...], str, str]
"""How a run ends: its new tokens, its text, its finish reason."""
Distribution = dict[End, float]


class Outcomes:
    """The draws of many parallel branches: each follows its plan, then the most likely outcome.

    plans: [W, DRAWS] planned outcomes, -1 beyond. mass: [W] probabilities of the branches. others:
    branches, and the plans of outcomes that they did not take: everything else that can happen.
    """

    def __init__(self, plans: Tensor) -> None:
        self.plans, self.drawn = plans.clone(), torch.zeros(len(plans), dtype=torch.int64)
        self.mass = torch.ones(len(plans), dtype=torch.float64)
        self.others: list[tuple[Tensor, Tensor]] = []

    def choose(self, branches: Tensor, probs: Tensor) -> Tensor:
        """[B] one outcome per row of `probs` [B, K] for `branches` [B]; equal ones draw once."""
        once, copies = torch.unique(branches, return_inverse=True)
        first = torch.full_like(once, len(branches))
        first.scatter_reduce_(0, copies, torch.arange(len(branches)), "amin")
        return self._take(once, probs[first])[copies]

    def _take(self, branches: Tensor, probs: Tensor) -> Tensor:
        draw, rows = self.drawn[branches], torch.arange(len(probs))
        planned = self.plans[branches, draw]
        taken = torch.where(planned < 0, probs.argmax(-1), planned)
        left = (probs > 0) & (planned < 0)[:, None]
        left[rows, taken] = False
        row, other = left.nonzero(as_tuple=True)
        plans = self.plans[branches[row]]
        plans[torch.arange(len(row)), draw[row]] = other
        self.others.append((branches[row], plans))
        self.plans[branches, draw] = taken
        self.drawn[branches] += 1
        self.mass[branches] *= probs[rows, taken]
        return taken


def _ordered(
    outcomes: Outcomes, branches: Tensor, sampler: Sampler, logits: Tensor, paths: Paths,
    children: int,
) -> Tensor:  # fmt: skip
    """[B, N, V] scores by which the highest tokens are the outcomes, in the order of draws."""
    scores = sampler.filtered(logits, paths)
    greedy = sampler.greedy_rows[:, 0, 0]
    order = torch.full_like(scores, -torch.inf)
    for node in range(scores.shape[1]):                         # absent nodes do not draw
        rows = paths.tree.present[:, paths.first + node].nonzero()[:, 0]
        left = scores[rows, node]
        for rank in range(children):                            # without replacement
            best = argmax_token(left)
            none = best == NO_TOKEN
            sure = one_hot(best.clamp(min=0), left.shape[1]).double()
            probs = torch.where((greedy[rows] | none)[:, None], sure, left.double().softmax(-1))
            taken = outcomes.choose(branches[rows], probs)
            before = order[rows, node, taken]
            rank_left = before.new_tensor(children - rank)
            order[rows, node, taken] = torch.where(none, before, rank_left)
            left = left.scatter(1, taken[:, None], -torch.inf)
    return order


def decided(case: Case, outcomes: Outcomes, samples: int) -> type[Sampler]:
    """Make samplers that draw from `outcomes` instead of the random source.

    A row's branch is identified by its seed (the request) and sample. A drafted node has as many
    children, and draws, as the case's fan has for its depth.
    """

    class EnumeratedSampler(Sampler):
        @property
        def branches(self) -> Tensor:
            rows = [row.sampling.seed * samples + row.sample for row in self.rows]
            return torch.tensor(rows, dtype=torch.int64)

        def ordered(self, logits: Tensor, paths: Paths, children: int) -> Tensor:
            return _ordered(outcomes, self.branches, self, logits, paths, children)

        def sample(self, logits: Tensor, paths: Paths) -> Tensor:
            return argmax_token(self.ordered(logits, paths, 1))

        def gumbel_logits(self, logits: Tensor, paths: Paths, role: Role) -> Tensor:
            """Drafted tokens, best first; a draft without draws takes its most likely tokens."""
            if role is Role.TARGET or self.greedy:
                return self.filtered(logits, paths)
            depth = int(paths.tree.depths[0, paths.first])
            return self.ordered(logits, paths, case.setup.branching[depth])

        def chance(self, prefix: Prefix) -> Chance:
            return DecidedChance(outcomes, self.branches)

    return EnumeratedSampler


class DecidedChance:
    """The coins and draws of a rule from `outcomes`."""

    def __init__(self, outcomes: Outcomes, branches: Tensor) -> None:
        self.outcomes, self.branches = outcomes, branches

    def flip(self, probability: Tensor, node: int) -> Tensor:
        heads = probability.double().nan_to_num(0.0).clamp(0, 1)    # u < NaN is never true
        return self.outcomes.choose(self.branches, torch.stack([1 - heads, heads], -1)) == 1

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        weights = weights.double()
        broken = weights.isnan().any(-1) | (weights < 0).any(-1) | ~(weights.sum(-1) > 0)
        sure = one_hot(torch.zeros_like(depth), weights.shape[1]).double()
        probs = torch.where(broken[:, None], sure, weights / weights.sum(-1, keepdim=True))
        return torch.where(broken, NO_TOKEN, self.outcomes.choose(self.branches, probs))


class Enumerated(NamedTuple):
    """Each request's distribution, the number of outcomes, and statistics that do not add up."""

    distributions: list[Distribution]
    branches: int
    wrong: str = ""


def enumerate_texts(case: Case) -> Enumerated:
    """Run a case through every possible outcome."""
    distributions: list[Distribution] = [defaultdict(float) for _ in case.requests]
    waiting = [torch.full((1, DRAWS), -1, dtype=torch.int64) for _ in case.requests]
    branches = 0
    while any(map(len, waiting)):
        now = [plans[: WORLDS // len(waiting)] for plans in waiting]
        samples = max(map(len, now))
        filled = [
            torch.cat([draws, draws.new_full((samples - len(draws), DRAWS), -1)]) for draws in now
        ]
        outcomes = Outcomes(torch.cat(filled))
        sampler = decided(case, outcomes, samples)
        all_done = case.run(range(len(now)), samples, samples * len(now), sampler)
        for done in all_done:
            if done.sample >= len(now[done.prompt]):
                continue                                        # only fills the batch
            probability = float(outcomes.mass[done.prompt * samples + done.sample])
            end = tuple(done.tokens), done.text, done.finish_reason
            distributions[done.prompt][end] += probability
            if probability > 0 and not _counts_right(case, done):
                wrong = f"{len(done.tokens)} tokens were written, and the statistics: {done.stats}"
                return Enumerated(distributions, branches, wrong)
        which, others = (torch.cat(part) for part in zip(*outcomes.others, strict=True))
        for owner, draws in enumerate(now):
            theirs = (which // samples == owner) & (which % samples < len(draws))
            waiting[owner] = torch.cat([waiting[owner][len(draws) :], others[theirs]])
        branches += sum(map(len, now))
    return Enumerated(distributions, branches)


def _counts_right(case: Case, done: Completion) -> bool:
    """Whether the statistics of a finished row fit its text."""
    stats = done.stats
    return (
        stats.emitted == len(done.tokens) - 1 < case.requests[done.prompt].limit
        and stats.accepted <= stats.emitted <= stats.accepted + stats.rounds
        and stats.accepted <= stats.drafted
        and not (case.self_draft and stats.drafted and stats.acceptance < 1)
    )


T = TypeVar("T")


def distance(left: Mapping[T, float], other: Mapping[T, float]) -> float:
    """The total variation of two distributions."""
    ends = left.keys() | other.keys()
    return sum(abs(left.get(end, 0.0) - other.get(end, 0.0)) for end in ends) / 2
