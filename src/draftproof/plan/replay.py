"""Texts written again without the target: the engine and its drafters run, and what the target
would choose is read from the text, its seconds from a `Machine`.

Under the matching rule a text does not depend on its drafts, so a text that is known says which
drafts would have been accepted, in any batch and under any budget.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES, Rule, accept_by_matching
from draftproof.core.messages import Accepted, Frontier, Reading
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.batch import Request
from draftproof.engine.budget import Budget
from draftproof.engine.decoder import Decoder
from draftproof.engine.deferred import Deferred
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.stats import Round, State
from draftproof.model.kv_cache import KVCache
from draftproof.model.kv_layer import LayerShape
from draftproof.model.target import Target
from draftproof.plan.machine import LIKELIEST, Machine
from draftproof.plan.playback import Playback
from draftproof.plan.recording import Text


class Recorded(Target):
    """Stands for the target in a replay: it reads nothing, and nothing depends on what it says."""

    def __init__(self, target: Target) -> None:
        self.__dict__.update(target.__dict__)
        self._nothing = torch.zeros(1, device=target.device)

    def refresh(self) -> None:
        """Nothing is read."""

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache.empty([LayerShape(1, 1, 1)], rows, capacity, torch.float32, self.device)

    def read(self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False,
             hidden_layers: tuple[int, ...] = ()) -> Reading:  # fmt: skip
        cache.write_at(first, tree.tokens.shape[1])
        nodes = 1 if last_only else tree.tokens.shape[1] - first
        return Reading(self._nothing.expand(len(tree.tokens), nodes, self.vocab_size))


@dataclass
class Virtual(Budget):
    """Passes on what `inner` chooses, and tells it the seconds a machine would have taken."""

    inner: Budget
    machine: Machine
    drafter: str
    sampled: bool
    seed: int
    wants_top: bool = False

    def __post_init__(self) -> None:
        self.most, self.floor = self.inner.most, self.inner.floor
        self.total, self.dice, self.usual = 0.0, random.Random(self.seed), 0.0
        self.own = self.nodes = self.context = self.unread = self.ahead = 0.0   # of this round
        self.joining = 0, 0                             # prompts read in it, and their tokens
        self.going: Sequence[int] = ()

    def choose(self, state: State) -> int:
        self.unread = state.unread
        return self.inner.choose(state)

    def record(self, done: Round) -> None:
        prompts, tokens = self.joining
        rows = done.rows + prompts
        nodes = (done.rows * (1 + self.nodes) + tokens) / rows - 1
        seconds = self.machine.round(self.sampled, rows, nodes, self.context)
        seconds += self._draft(done.rows, done.size)    # it learns from plain rounds, too
        if done.size:
            seconds += self.machine.unread(self.drafter, self.unread)
        if not self.machine.times(self.drafter):
            seconds += self._beside(done)
        self.total += seconds
        heard = seconds * self.dice.choice(self.machine.noise)
        self.inner.record(done._replace(seconds=0.0 if prompts else heard))
        self.rest = self.inner.rest

    def _beside(self, done: Round) -> float:
        """What a round takes longer with a drafter that was not timed here as a whole."""
        machine, rows, found = self.machine, done.rows, 0.0
        if self.wants_top and not self.rest:
            found += machine.draft(LIKELIEST, self.sampled, rows, self.nodes, 0.0)
        if done.size and self.sampled:
            found += machine.allowed(self.sampled, rows, self.ahead, self.nodes)
        return found

    def _draft(self, rows: int, size: int) -> float:
        """Of a draft model step by step: fewer rows may go on."""
        name, sampled, machine = self.drafter, self.sampled, self.machine
        if size == 0:
            return machine.draft(name, sampled, rows, 0, self.own)
        if not self.going:
            own = min(self.own, 4 * self.usual or self.own)     # others compute, too
            self.usual += (own - self.usual) / 8 if self.usual else own
            return machine.draft(name, sampled, rows, size, own)
        return machine.draft(name, sampled, rows, 1, 0.0) + sum(
            machine.draft(name, sampled, some, depth + 1, 0.0)
            - machine.draft(name, sampled, some, depth, 0.0)
            for depth, some in enumerate(self.going[1:], 1)
        )


def tokens_of(requests: Sequence[Request]) -> int:
    """Of their prompts together."""
    return sum(len(samples[0].prompt) for samples in requests)


class Replay(Decoder):
    """A decoder whose rows write what is recorded."""

    budget: Virtual
    texts: Sequence[Text]

    def step(self, joining: Sequence[Request] = ()) -> None:
        self.budget.joining = len(joining), tokens_of(joining)
        super().step(joining)

    def admit(self, *requests: Request) -> None:
        super().admit(*requests)
        own = 0.0 if self.budget.machine.times(self.budget.drafter) else self._own()
        self.budget.total += self.budget.machine.prompt(tokens_of(requests)) + own

    @property
    def _played(self) -> Playback:
        found = self.drafter.inner if isinstance(self.drafter, Deferred) else self.drafter
        assert isinstance(found, Playback)
        return found

    def _own(self) -> float:
        """Seconds that the drafter really took since this was asked last."""
        played = self._played
        own, played.spent = played.spent, 0.0
        return own

    def chosen(self, tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        """What the target would have chosen behind every node on the way of its text."""
        lines = []
        for row, place in zip(self.batch.running, frontier.prefix.position.tolist(), strict=False):
            text = self.texts[row.request].tokens
            following = text[place + 1 : place + 2 + tree.depth_limit]
            lines.append(following + [0] * (tree.depth_limit + 1 - len(following)))
        ahead = torch.tensor(lines, device=tree.tokens.device)
        return accept_by_matching(tree, ahead.gather(1, tree.depths))

    def _deliver(self, frontier: Frontier, tree: TokenTree, *rest: Any) -> Round:
        rows, budget = self.batch.running, self.budget
        sizes = tree.sizes if self.target.skips_absent else [tree.tokens.shape[1] - 1]
        budget.nodes = sum(sizes) / len(sizes)
        budget.context = sum(len(row.prompt) + len(row.tokens) for row in rows) / len(rows)
        budget.going, budget.own = self._played.going, self._own()
        budget.ahead = frontier.prefix.ahead
        return super()._deliver(frontier, tree, *rest)

    def _choose_first(self, first: int, logits: Tensor) -> None:
        for place, row in enumerate(self.batch.running[first:], first):
            token = self.texts[row.request].tokens[len(row.prompt)]
            self.batch.text[place, len(row.prompt)] = token
            row.extend([token], None, ())


class ReplayEngine(Engine):
    """An engine whose runs are replays of these texts."""

    texts: Sequence[Text] = ()

    def _decoder(self, budget: Budget, rows: int, capacity: int) -> Decoder:
        assert isinstance(budget, Virtual)
        match, shapes = RULES["match"], self.shapes
        made = Replay(self.target, self.drafter, match, budget, rows, capacity, shapes)
        made.rule, made.texts = Rule(made.chosen, False), self.texts
        return made


def replay(
    engine: Engine, drafter: Drafter, texts: Sequence[Text], budget: Budget, machine: Machine,
    rows: int, name: str, seed: int = 0,
) -> tuple[float, list[Completion]]:  # fmt: skip
    """Predicted seconds of all texts, at most `rows` at a time, and what came of each.

    seed: of the noise in the seconds that the budget hears."""
    sampled = texts[0].sampling.temperature > 0
    virtual = Virtual(budget, machine, name, sampled, seed, drafter.wants_top > 0)
    playing = ReplayEngine(Recorded(engine.target), drafter, budget=virtual, shapes=engine.shapes)
    playing.texts = texts
    samplings = [replace(text.sampling, max_new_tokens=len(text.tokens) - text.prompt, stop=(),
                         stop_tokens=()) for text in texts]  # fmt: skip
    prompts = [text.tokens[: text.prompt] for text in texts]
    start = time.perf_counter()
    done = playing.generate(prompts, sampling=samplings, batch_size=rows)
    beside = time.perf_counter() - start - playing.clock.total      # what is no round takes as long
    return virtual.total + beside, done
