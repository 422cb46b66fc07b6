"""The exact law of the installed decoder: whole runs, every random outcome in turn. Knows the decoder; uses no noise.

The decoder, its cache, its masks, the draft model, the sampler, the rules and the stop rules are the real ones. The
model is a table in float64 whose memory is the cache: a token read at a wrong place, or one that should have been
forgotten, gives other logits. Draws are decided beforehand; a run is a *world* with its probability, many to a batch.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from draftproof.core import acceptance
from draftproof.core.acceptance import Rule
from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Sampler, argmax_token
from draftproof.core.tree import NOTHING
from draftproof.drafters.base import Drafter
from draftproof.engine import decoder as decoding
from draftproof.engine.budget import Budget
from draftproof.engine.sequence import SequenceState
from draftproof.engine.stats import State
from draftproof.model.target import Target
from draftproof.verify.reference import Letters, Wanted, Written, distribution_of_run

WORLDS = 4096
"""Worlds that run side by side."""
DRAWS = 48
"""Draws a world may ask for."""
CAPACITY = 24


class TableModel(PreTrainedModel):  # type: ignore[misc]
    """A causal language model that is a table in float64, with a KV cache as transformers knows it.

    Keys hold tokens and values hold positions; logits are a function of the (position, token) pairs that the mask lets a
    query see. `salt` tells tables apart.
    """

    config_class = PreTrainedConfig
    _supports_sdpa = True

    def __init__(self, vocab: int, salt: int, sharpness: float = 1.3) -> None:
        super().__init__(PreTrainedConfig(vocab_size=vocab, hidden_size=1, num_hidden_layers=1, max_position_embeddings=512))
        self.nothing = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self.config.name_or_path = f"table {salt}"
        self._vocab, self._salt, self._sharpness, self._known = vocab, salt, sharpness, dict[int, list[float]]()

    def scores(self, code: int) -> list[float]:
        """The logits of a text, by its code: the sum of (token + 1) * `_BASE` ** position."""
        if code not in self._known:
            dice = random.Random(repr((self._salt, code)))
            self._known[code] = [dice.gauss(0, self._sharpness) for _ in range(self._vocab)]
        return self._known[code]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, **_: Any,
    ) -> CausalLMOutput:
        places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        tokens, places = ((column[:, None, :, None].double()) for column in (input_ids + 1, places.expand_as(input_ids)))
        if past_key_values is not None:
            tokens, places = past_key_values.update(tokens, places, 0)                 # [B, 1, S, 1]
        sees = torch.ones(input_ids.shape[1], tokens.shape[2], dtype=torch.bool).tril()
        sees = sees if attention_mask is None else attention_mask[:, 0] == 0           # [B, N, S]
        worth = tokens[:, 0, :, 0].long() * _BASE ** places[:, 0, :, 0].long().clamp(0, 20)
        found, which = torch.unique(torch.where(sees, worth[:, None], 0).sum(-1), return_inverse=True)
        rows = torch.tensor([self.scores(code) for code in found.tolist()], dtype=torch.float64)
        return CausalLMOutput(logits=rows[which])


class Table(Target):
    """A table, read as any other target: through cache, mask and positions."""

    def __init__(self, vocab: int, salt: int) -> None:
        super().__init__(TableModel(vocab, salt))

    def logits(self, text: Sequence[int]) -> list[float]:
        """Behind a text."""
        return cast(TableModel, self.model).scores(sum((token + 1) * _BASE**place for place, token in enumerate(text)))


_BASE = 7           # more than any vocabulary here holds; 7 ** 20 fits 64 bits


class Outcomes:
    """The draws of many worlds side by side: each follows its plan, then takes the likeliest outcome at every draw.

    plans: [W, DRAWS] outcomes decided, -1 beyond. odds: [W] what a world costs. others: plans of the outcomes not
    taken, one per possible outcome of every draw beyond the plan; together they are everything that can happen.
    """

    def __init__(self, plans: Tensor) -> None:
        self.plans, self.taken = plans, torch.full_like(plans, -1)
        self.drawn = torch.zeros(len(plans), dtype=torch.int64)
        self.odds = torch.ones(len(plans), dtype=torch.float64)
        self.others: list[tuple[Tensor, Tensor]] = []

    def take(self, worlds: Tensor, law: Tensor) -> Tensor:
        """[B] one outcome per row of `law` [B, K], for the `worlds` [B]."""
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
        self.odds[worlds] *= law[rows, taken]
        return taken


class DecidedSampler(Sampler):
    """A sampler whose draws are decided; what it filters, and how, is the sampler's own."""

    def __init__(
        self,
        outcomes: Outcomes,
        fan: Sequence[int],
        rows: Sequence[SamplingParams],
        device: torch.device | str = "cpu",
        ops: Ops = TORCH,
    ) -> None:
        super().__init__(rows, device, ops)
        self.outcomes, self.fan = outcomes, fan
        self.worlds = torch.tensor([row.sample for row in rows], dtype=torch.int64)
        self._picking = False

    def select(self, rows: Sequence[int]) -> Sampler:
        return DecidedSampler(self.outcomes, self.fan, [self.rows[row] for row in rows], self.device, self.ops)

    def pick(self, logits: Tensor, paths: Paths) -> Tensor:
        self._picking = True
        try:
            return super().pick(logits, paths)
        finally:
            self._picking = False

    def gumbel_logits(self, logits: Tensor, paths: Paths, role: Role) -> Tensor:
        """The tokens that were decided, best first; a draft that is chosen, not drawn, takes its likeliest tokens."""
        scores = self.filtered(logits, paths)
        if self.greedy or (role is Role.TARGET and not self._picking):
            return scores
        depth = int(paths.tree.depths[0, paths.first])
        children = 1 if self._picking else self.fan[depth]
        gumbel_logits = torch.full_like(scores, -torch.inf)
        for node in range(scores.shape[1]):                     # what is not there is not drawn: how wide a batch is may differ
            rows = paths.tree.present[:, paths.first + node].nonzero()[:, 0]
            gumbel_logits[rows, node] = self._decided(scores[rows, node], rows, children)
        return gumbel_logits

    def _decided(self, left: Tensor, which: Tensor, children: int) -> Tensor:
        """Draw `children` tokens without replacement from `left` [b, V] in the rows `which` [b]; their order, [b, V]."""
        gumbel_logits, rows = torch.full_like(left, -torch.inf), torch.arange(len(left))
        greedy = torch.tensor([row.sampling.temperature == 0 for row in self.rows])[which, None]
        for rank in range(children):
            best = argmax_token(left)
            sure = torch.nn.functional.one_hot(best.clamp(min=0), left.shape[1]).double()
            none = (best == NOTHING)[:, None]
            taken = self.outcomes.take(self.worlds[which], torch.where(greedy | none, sure, left.double().softmax(-1)))
            gumbel_logits[rows, taken] = torch.where(none[:, 0], gumbel_logits[rows, taken], float(children - rank))
            left[rows, taken] = -torch.inf
        return gumbel_logits


class DecidedChance:
    """The coins and draws of a rule, decided."""

    def __init__(self, frontier: Frontier) -> None:
        sampler = frontier.sampler
        assert isinstance(sampler, DecidedSampler)
        self.outcomes, self.worlds = sampler.outcomes, sampler.worlds

    def flip(self, probability: Tensor, node: int) -> Tensor:
        odds = probability.double().nan_to_num(0.0).clamp(0, 1)              # u < NaN is never true
        return self.outcomes.take(self.worlds, torch.stack([1 - odds, odds], -1)) == 1

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        weights = weights.double()
        broken = weights.isnan().any(-1) | (weights < 0).any(-1) | ~(weights.sum(-1) > 0)
        sure = torch.nn.functional.one_hot(torch.zeros_like(depth), weights.shape[1]).double()
        law = torch.where(broken[:, None], sure, weights / weights.sum(-1, keepdim=True))
        return torch.where(broken, NOTHING, self.outcomes.take(self.worlds, law))


@contextmanager
def decided(outcomes: Outcomes, fan: Sequence[int]) -> Iterator[None]:
    """While this lasts, the decoder draws from `outcomes`."""
    with (
        patch.object(decoding, "Sampler", partial(DecidedSampler, outcomes, fan)),
        patch.object(acceptance, "KeyedChance", DecidedChance),
        torch.inference_mode(),
    ):
        yield


class Alternating(Budget):
    """A budget that comes and goes: K, 0, 1, K, ..."""

    def __init__(self, most: int) -> None:
        self.most, self._round = most, 0

    def choose(self, state: State) -> int:
        self._round += 1
        return (self.most, 0, min(1, self.most))[self._round % 3]


@dataclass(frozen=True)
class Request:
    """What one row is asked. grammar: the only tokens allowed behind a text, as a user's logits processor."""

    want: Wanted
    prompt: tuple[int, ...] = (1,)
    limit: int = 3
    grammar: Callable[[Sequence[int]], set[int]] | None = None

    def params(self, world: int) -> SamplingParams:
        own = {name: value for name, value in vars(self.want).items() if name not in ("banned_words", "stop_tokens")}
        banned = tuple(tuple(word) for word in self.want.banned_words)
        sampling = Sampling(**own, processors=[self._processor] if self.grammar else [])
        return SamplingParams(sampling, len(self.prompt), tuple(self.want.stop_tokens), banned, world)

    def law(self, target: Table) -> dict[Written, float]:
        """What plain decoding does."""
        def logits(text: tuple[int, ...]) -> Sequence[float]:
            allowed = self.grammar(text) if self.grammar else range(target.vocab_size)
            return [score if token in allowed else -math.inf for token, score in enumerate(target.logits(text))]

        return distribution_of_run(logits, self.prompt, self.want, self.limit)

    def _processor(self, text: Tensor, scores: Tensor) -> Tensor:
        assert self.grammar is not None
        forbidden = [token for token in range(scores.shape[1]) if token not in self.grammar(text[0].tolist())]
        scores[:, forbidden] = -torch.inf
        return scores


@dataclass(frozen=True)
class Case:
    """A decoder and what it is asked; requests share the batch.

    draft: makes the drafter. fan: how many children its nodes have, by depth. self_draft: the draft is the target, so
    every token it drafts must stand. on_host: rounds look at numbers as on a CPU, or never, as on any device.
    """

    name: str
    rule: Rule
    target: Table
    draft: Callable[[], Drafter]
    budget: Callable[[], Budget]
    requests: Sequence[Request]
    fan: Sequence[int] = (1,) * 8
    self_draft: bool = False
    on_host: bool = True


class Found(NamedTuple):
    """What enumeration found: distance to the plain law, worlds, and what does not add up in the counts."""

    distance: float
    worlds: int
    wrong: str = ""


def examine(case: Case) -> Found:
    """Run a case through every outcome and hold it against plain decoding."""
    laws: list[defaultdict[Written, float]] = [defaultdict(float) for _ in case.requests]
    owner = torch.arange(len(case.requests))
    plans = torch.full((len(case.requests), DRAWS), -1)
    worlds = 0
    while len(plans):
        now, outcomes = owner[:WORLDS], Outcomes(plans[:WORLDS])
        rows = _run(case, outcomes, now.tolist())
        for which, row, odds in zip(now.tolist(), rows, outcomes.odds.tolist(), strict=True):
            laws[which][Written(tuple(row.tokens), row.text, row.finish_reason or "")] += odds
            if odds > 0 and (wrong := _wrong_counts(case, row)):
                return Found(1.0, worlds, wrong)
        worlds += len(now)
        owner = torch.cat([owner[WORLDS:], *(now[world] for world, _ in outcomes.others)])
        plans = torch.cat([plans[WORLDS:], *(plan for _, plan in outcomes.others)])
    distances = []
    for request, law in zip(case.requests, laws, strict=True):
        plain = request.law(case.target)
        distances.append(sum(abs(law.get(end, 0.0) - plain.get(end, 0.0)) for end in law.keys() | plain.keys()) / 2)
    return Found(max(distances), worlds)


def _run(case: Case, outcomes: Outcomes, owners: Sequence[int]) -> list[SequenceState]:
    """Run one batch of worlds to their ends."""
    rows = []
    for world, owner in enumerate(owners):
        request = case.requests[owner]
        rows.append(SequenceState(request.prompt, request.params(world), request.limit, Letters(), request=owner))
    with decided(outcomes, case.fan):
        ops = None if case.on_host else TORCH
        runs = decoding.Decoder(case.target, case.draft(), case.rule, case.budget(), len(rows), CAPACITY, ops=ops)
        for owner in range(len(case.requests)):
            if own := [row for row in rows if row.request == owner]:
                runs.admit(own)
        while runs.running:
            runs.step()
    return rows


def _wrong_counts(case: Case, row: SequenceState) -> str:
    """What the statistics of a finished row get wrong, in one sentence; empty if nothing."""
    stats, written = row.stats, len(row.tokens)
    if written > row.limit:
        return f"{written} tokens were written where {row.limit} were allowed"
    if stats.emitted != written - 1:
        return f"{stats.emitted} tokens were counted behind the first, {written - 1} were written"
    if not stats.accepted <= stats.emitted <= stats.accepted + stats.rounds or stats.accepted > stats.drafted:
        counts = f"{stats.accepted} accepted of {stats.drafted} drafted"
        return f"{counts} do not fit {stats.emitted} tokens in {stats.rounds} rounds"
    if case.self_draft and stats.tried_at and stats.acceptance < 1:
        return f"the target drafted for itself and only {stats.acceptance:.2f} of its tokens stood"
    return ""
