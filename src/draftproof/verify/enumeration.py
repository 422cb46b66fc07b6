"""Every random outcome of the whole engine enumerated: the exact distribution of its texts.

Where the engine would draw a number, the enumeration decides what comes, and multiplies the
probabilities, in float64: the distribution of the text is known, not estimated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from draftproof.core import acceptance
from draftproof.core.acceptance import Chance
from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Sampler, argmax_token
from draftproof.core.tree import NO_TOKEN
from draftproof.engine.engine import Completion
from draftproof.verify.cases import Case

WORLDS, DRAWS = 4096, 48
"""Outcomes that run side by side, and draws that one of them may ask for."""

End = tuple[tuple[int, ...], str, str]
"""How a run ends: its new tokens, its text, its finish reason."""
Distribution = dict[End, float]


class Outcomes:
    """The draws of many worlds side by side: each follows its plan, then the likeliest outcome.

    plans: [W, DRAWS] outcomes decided, -1 beyond. probs: [W] what a world's outcomes cost. others:
    worlds, and plans of outcomes they did not take beyond their own: all else that can happen.
    """

    def __init__(self, plans: Tensor) -> None:
        self.plans, self.drawn = plans.clone(), torch.zeros(len(plans), dtype=torch.int64)
        self.probs = torch.ones(len(plans), dtype=torch.float64)
        self.others: list[tuple[Tensor, Tensor]] = []

    def take(self, worlds: Tensor, law: Tensor) -> Tensor:
        """[B] one outcome per row of `law` [B, K] for the `worlds` [B]; equal worlds draw once."""
        once, copies = torch.unique(worlds, return_inverse=True)
        first = torch.full_like(once, len(worlds))
        first.scatter_reduce_(0, copies, torch.arange(len(worlds)), "amin")
        return self._take(once, law[first])[copies]

    def _take(self, worlds: Tensor, law: Tensor) -> Tensor:
        draw, rows = self.drawn[worlds], torch.arange(len(law))
        planned = self.plans[worlds, draw]
        taken = torch.where(planned < 0, law.argmax(-1), planned)
        left = (law > 0) & (planned < 0)[:, None]
        left[rows, taken] = False
        row, other = left.nonzero(as_tuple=True)
        plans = self.plans[worlds[row]]
        plans[torch.arange(len(row)), draw[row]] = other
        self.others.append((worlds[row], plans))
        self.plans[worlds, draw] = taken
        self.drawn[worlds] += 1
        self.probs[worlds] *= law[rows, taken]
        return taken


class Decided:
    """What replaces the random source. A row's world is named by its seed (the request) and sample.

    A drafted node has as many children, and so many draws, as the case's fan says for its depth.
    """

    def __init__(self, outcomes: Outcomes, samples: int, case: Case) -> None:
        self.outcomes, self.samples, self.case = outcomes, samples, case

    def worlds(self, sampler: Sampler) -> Tensor:
        rows = [row.sampling.seed * self.samples + row.sample for row in sampler.rows]
        return torch.tensor(rows, dtype=torch.int64)

    def pick(self, sampler: Sampler, logits: Tensor, paths: Paths) -> Tensor:
        """`Sampler.sample`: the target's token at each node."""
        return argmax_token(self._decided(sampler, logits, paths, 1))

    def gumbel_logits(self, sampler: Sampler, logits: Tensor, paths: Paths, role: Role) -> Tensor:
        """`Sampler.gumbel_logits`: drafted tokens, best first; a draft that is chosen, not drawn,
        takes its likeliest tokens."""
        if role is Role.TARGET or sampler.greedy:
            return sampler.filtered(logits, paths)
        depth = int(paths.tree.depths[0, paths.first])
        return self._decided(sampler, logits, paths, self.case.fan[depth])

    def _decided(self, sampler: Sampler, logits: Tensor, paths: Paths, children: int) -> Tensor:
        scores, worlds = sampler.filtered(logits, paths), self.worlds(sampler)
        greedy = torch.tensor([row.sampling.temperature == 0 for row in sampler.rows])
        order = torch.full_like(scores, -torch.inf)
        for node in range(scores.shape[1]):                     # absent nodes draw nothing
            rows = paths.tree.present[:, paths.first + node].nonzero()[:, 0]
            left = scores[rows, node]
            for rank in range(children):                        # without replacement
                best = argmax_token(left)
                none = best == NO_TOKEN
                sure = one_hot(best.clamp(min=0), left.shape[1]).double()
                law = torch.where((greedy[rows] | none)[:, None], sure, left.double().softmax(-1))
                taken = self.outcomes.take(worlds[rows], law)
                before = order[rows, node, taken]
                rank_left = before.new_tensor(children - rank)
                order[rows, node, taken] = torch.where(none, before, rank_left)
                left = left.scatter(1, taken[:, None], -torch.inf)
        return order

    def chance(self, frontier: Frontier) -> Chance:
        """`KeyedChance`: the coins and draws of a rule."""
        outcomes, worlds = self.outcomes, self.worlds(frontier.sampler)

        class DecidedChance:
            def flip(self, probability: Tensor, node: int) -> Tensor:
                heads = probability.double().nan_to_num(0.0).clamp(0, 1)    # u < NaN is never true
                return outcomes.take(worlds, torch.stack([1 - heads, heads], -1)) == 1

            def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
                weights = weights.double()
                broken = weights.isnan().any(-1) | (weights < 0).any(-1) | ~(weights.sum(-1) > 0)
                sure = one_hot(torch.zeros_like(depth), weights.shape[1])
                law = weights / weights.sum(-1, keepdim=True)
                law = torch.where(broken[:, None], sure.double(), law)
                return torch.where(broken, NO_TOKEN, outcomes.take(worlds, law))

        return DecidedChance()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this lasts, engines draw from `outcomes`."""
        with (
            patch.object(Sampler, "sample", lambda *args: self.pick(*args)),
            patch.object(Sampler, "gumbel_logits", lambda *args: self.gumbel_logits(*args)),
            patch.object(acceptance, "KeyedChance", self.chance),
        ):
            yield


def decide(case: Case, outcomes: Outcomes, samples: int) -> list[Completion]:
    """Run each request of a case `samples` times, with the draws decided."""
    with Decided(outcomes, samples, case).installed():
        return case.run(range(len(case.asks)), samples, samples * len(case.asks))


class Enumerated(NamedTuple):
    """Each request's distribution, outcomes enumerated, and a statistic that does not add up."""

    laws: list[Distribution]
    worlds: int
    wrong: str = ""


def enumerate_texts(case: Case) -> Enumerated:
    """Run a case through every outcome there is."""
    laws: list[Distribution] = [defaultdict(float) for _ in case.asks]
    waiting = [torch.full((1, DRAWS), -1) for _ in case.asks]
    worlds = 0
    while any(map(len, waiting)):
        now = [plans[: WORLDS // len(waiting)] for plans in waiting]
        samples = max(map(len, now))
        filled = [torch.cat([own, own.new_full((samples - len(own), DRAWS), -1)]) for own in now]
        outcomes = Outcomes(torch.cat(filled))
        for done in decide(case, outcomes, samples):
            if done.sample >= len(now[done.prompt]):
                continue                                        # only there to fill the batch
            probability = float(outcomes.probs[done.prompt * samples + done.sample])
            laws[done.prompt][tuple(done.tokens), done.text, done.finish_reason] += probability
            if probability > 0 and (wrong := _wrong_counts(case, done)):
                return Enumerated(laws, worlds, wrong)
        which, others = (torch.cat(part) for part in zip(*outcomes.others, strict=True))
        for owner, own in enumerate(now):
            theirs = (which // samples == owner) & (which % samples < len(own))
            waiting[owner] = torch.cat([waiting[owner][len(own) :], others[theirs]])
        worlds += sum(map(len, now))
    return Enumerated(laws, worlds)


def _wrong_counts(case: Case, done: Completion) -> str:
    """What the statistics of a finished row get wrong, in one sentence; empty if nothing."""
    stats, written = done.stats, len(done.tokens)
    if written > case.asks[done.prompt].limit:
        return f"{written} tokens were written, more than allowed"
    if stats.emitted != written - 1:
        return f"{stats.emitted} tokens were counted after the first, {written - 1} were written"
    accepted, drafted = stats.accepted, stats.drafted
    if not accepted <= stats.emitted <= accepted + stats.rounds or accepted > drafted:
        return f"{accepted} accepted of {drafted} drafted do not fit {stats.emitted} tokens"
    if case.itself and stats.drafted and stats.acceptance < 1:
        return f"the target drafted for itself and only {stats.acceptance:.2f} were accepted"
    return ""


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Total variation."""
    ends = one.keys() | other.keys()
    return sum(abs(one.get(end, 0.0) - other.get(end, 0.0)) for end in ends) / 2
