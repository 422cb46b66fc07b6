"""Every random outcome of the whole engine enumerated: the exact distribution of its texts.

The target is a table in float64. Where the engine would draw a number, the enumeration decides what
comes, and multiplies the probabilities: the distribution of the text is known, not estimated.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES, Chance, Rule
from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Sampler, argmax_token
from draftproof.core.tree import NO_TOKEN
from draftproof.drafters.base import Drafter
from draftproof.drafters.plain import Plain
from draftproof.engine.budget import Budget, Fixed
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec

WORLDS, DRAWS = 4096, 48
"""Outcomes that run side by side, and draws that one of them may ask for."""

End = tuple[tuple[int, ...], str, str]
"""How a run ends: its new tokens, its text, its finish reason."""
Distribution = dict[End, float]


class TableModel(PreTrainedModel):  # type: ignore[misc]
    """A causal language model that is a table in float64, with a KV cache as transformers knows it.

    Keys hold tokens and values hold positions; logits are a function of the (position, token) pairs
    that the mask lets a query see. `salt` tells tables apart.
    """

    config_class = PreTrainedConfig
    _supports_sdpa = True
    BASE = 7                    # more than any vocabulary here holds; 7 ** 20 fits 64 bits

    def __init__(self, vocab: int, salt: int, sharpness: float) -> None:
        sizes = {"hidden_size": 1, "num_hidden_layers": 1, "max_position_embeddings": 512}
        super().__init__(PreTrainedConfig(vocab_size=vocab, **sizes))
        self.nothing = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self.config.name_or_path = f"table {salt}"
        self._vocab, self._salt, self._sharpness = vocab, salt, sharpness
        self._known: dict[int, list[float]] = {}

    def scores(self, text: Sequence[int]) -> list[float]:
        """The logits behind a text."""
        return self._scores(sum((token + 1) * self.BASE**at for at, token in enumerate(text)))

    def _scores(self, code: int) -> list[float]:
        if code not in self._known:
            dice = random.Random(repr((self._salt, code)))
            self._known[code] = [dice.gauss(0, self._sharpness) for _ in range(self._vocab)]
        return self._known[code]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None, **_: Any,
    ) -> CausalLMOutput:
        places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        columns = (input_ids + 1, places.expand_as(input_ids))
        tokens, places = (column[:, None, :, None].double() for column in columns)
        if past_key_values is not None:
            tokens, places = past_key_values.update(tokens, places, 0)          # [B, 1, S, 1]
        sees = torch.ones(input_ids.shape[1], tokens.shape[2], dtype=torch.bool).tril()
        sees = sees if attention_mask is None else attention_mask[:, 0] == 0           # [B, N, S]
        worth = tokens[..., 0].long() * self.BASE ** places[..., 0].long().clamp(0, 20)
        codes, which = torch.unique(torch.where(sees, worth, 0).sum(-1), return_inverse=True)
        rows = torch.tensor([self._scores(code) for code in codes.tolist()], dtype=torch.float64)
        return CausalLMOutput(logits=rows[which])


def table(vocab: int, salt: int, sharpness: float = 1.3) -> Target:
    """A table, read as any other target: through cache, mask and positions."""
    return Target(TableModel(vocab, salt, sharpness))


class Letters(Codec):
    """A tokenizer for the table's vocabulary. "é" shows only with the token after it, as half a
    character would."""

    PIECES = ("a", "b", "é", "ba", "c")

    def __init__(self) -> None:
        self.late = ""

    def stream(self, prompt: Sequence[int]) -> Any:
        return Letters()

    def push(self, token: int) -> str:
        own, held = self.PIECES[token], self.late
        self.late = own if own == "é" else ""
        return held if own == "é" else held + own

    def finish(self) -> str:
        piece, self.late = self.late, ""
        return piece


class Outcomes:
    """The draws of many worlds side by side: each follows its plan, then the likeliest outcome.

    plans: [W, DRAWS] outcomes decided, -1 beyond. probs: [W] what a world's outcomes cost. others:
    plans of the outcomes not taken, one per possible outcome of every draw beyond the plan: with
    the taken ones everything that can happen.
    """

    def __init__(self, plans: Tensor) -> None:
        self.plans, self.taken = plans, torch.full_like(plans, -1)
        self.drawn = torch.zeros(len(plans), dtype=torch.int64)
        self.probs = torch.ones(len(plans), dtype=torch.float64)
        self.others: list[tuple[Tensor, Tensor]] = []

    def take(self, worlds: Tensor, law: Tensor) -> Tensor:
        """[B] one outcome per row of `law` [B, K] for the `worlds` [B]; equal worlds draw once."""
        once, copies = torch.unique(worlds, return_inverse=True)
        if len(once) == len(worlds):
            return self._take(worlds, law)
        first = torch.full_like(once, len(worlds))
        first = first.scatter_reduce(0, copies, torch.arange(len(worlds)), "amin")
        return self._take(once, law[first])[copies]

    def _take(self, worlds: Tensor, law: Tensor) -> Tensor:
        draw, rows = self.drawn[worlds], torch.arange(len(law))
        planned = self.plans[worlds, draw]
        taken = torch.where(planned < 0, law.argmax(-1), planned)
        left = (law > 0) & (planned < 0)[:, None]
        left[rows, taken] = False
        row, other = left.nonzero(as_tuple=True)
        plans = self.taken[worlds[row]]
        plans[torch.arange(len(row)), draw[row]] = other
        self.others.append((worlds[row], plans))
        self.taken[worlds, draw] = taken
        self.drawn[worlds] += 1
        self.probs[worlds] *= law[rows, taken]
        return taken


@dataclass
class Decided:
    """What replaces the random source. A row's world is named by its seed (the request) and sample.

    fan: how many children a drafted node has, by depth: so many draws are decided there.
    """

    outcomes: Outcomes
    samples: int
    fan: Sequence[int]

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
        return self._decided(sampler, logits, paths, self.fan[depth])

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


class Ask(NamedTuple):
    """What one row is asked: a prompt, how to sample, and how many new tokens at most."""

    sampling: Sampling
    prompt: Sequence[int] = (1,)
    limit: int = 3


@dataclass(frozen=True)
class Case:
    """An engine and what it is asked; the requests share a batch. `draft` makes the drafter."""

    name: str
    asks: Sequence[Ask]
    target: Target
    draft: Callable[[], Drafter] = Plain
    budget: Callable[[], Budget] = lambda: Fixed(0)
    rule: Rule = RULES["match"]
    fan: Sequence[int] = (1,) * 8
    drafts_itself: bool = False             # the draft is the target: every token must be accepted
    shapes: ShapePolicy | None = None       # closed: computed by torch's operators, as on a device

    def plain(self) -> Case:
        """The same requests without drafts."""
        return Case(f"{self.name}, plain", self.asks, self.target)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors are fastest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    while any(len(plans) for plans in waiting):
        now = [plans[: WORLDS // len(waiting)] for plans in waiting]
        samples = max(map(len, now))
        plans = torch.full((len(now), samples, DRAWS), -1)
        for owner, own in enumerate(now):
            plans[owner, : len(own)] = own
        outcomes = Outcomes(plans.flatten(0, 1))
        for done in _run(case, outcomes, samples):
            if done.sample >= len(now[done.prompt]):
                continue                                        # only there to fill the batch
            probability = float(outcomes.probs[done.prompt * samples + done.sample])
            laws[done.prompt][tuple(done.tokens), done.text, done.finish_reason] += probability
            if probability > 0 and (wrong := _wrong_counts(case, done)):
                return Enumerated(laws, worlds, wrong)
        left = [plans[len(own) :] for plans, own in zip(waiting, now, strict=True)]
        which = torch.cat([world for world, _ in outcomes.others])
        others = torch.cat([plan for _, plan in outcomes.others])
        for owner, own in enumerate(now):
            theirs = (which // samples == owner) & (which % samples < len(own))
            left[owner] = torch.cat([left[owner], others[theirs]])
        waiting, worlds = left, worlds + sum(map(len, now))
    return Enumerated(laws, worlds)


def _run(case: Case, outcomes: Outcomes, samples: int) -> list[Completion]:
    """Each request `samples` times, with the draws decided."""
    asked = [
        replace(ask.sampling, seed=owner, max_new_tokens=ask.limit)
        for owner, ask in enumerate(case.asks)
    ]
    prompts, rows = [list(ask.prompt) for ask in case.asks], samples * len(case.asks)
    decided = Decided(outcomes, samples, case.fan)
    with patch.dict(RULES, examined=case.rule), decided.installed():
        engine = Engine(
            case.target, case.draft(), codec=Letters(), acceptance="examined",
            budget=case.budget(), shapes=case.shapes,
        )
        return engine.generate(prompts, sampling=asked, n=samples, batch_size=rows)


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
    if case.drafts_itself and stats.drafted and stats.acceptance < 1:
        return f"the target drafted for itself and only {stats.acceptance:.2f} were accepted"
    return ""


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Total variation."""
    ends = one.keys() | other.keys()
    return sum(abs(one.get(end, 0.0) - other.get(end, 0.0)) for end in ends) / 2
