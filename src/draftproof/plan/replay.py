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
from statistics import fmean
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
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.stats import Round, State
from draftproof.model.kv_cache import KVCache
from draftproof.model.kv_layer import LayerShape
from draftproof.model.target import Target
from draftproof.plan.machine import LIGHT, Machine
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
    """Passes on what `inner` chooses, and tells it the seconds a machine would have taken.

    took: of this round. total: of all. seed: of the noise in what `inner` hears.
    """

    inner: Budget
    machine: Machine
    drafter: str
    sampled: bool
    seed: int = 0
    took: float = 0.0
    total: float = 0.0
    unread: int = 0

    def __post_init__(self) -> None:
        self.most, self.floor = self.inner.most, self.inner.floor
        self.dice = random.Random(self.seed)

    def choose(self, state: State) -> int:
        self.unread, size = state.unread, self.inner.choose(state)
        self.rest = self.inner.rest
        return size

    def record(self, done: Round) -> None:
        self.total += self.took
        heard = self.took * self.dice.choice(self.machine.noise)
        self.inner.record(done._replace(seconds=heard))
        self.rest = self.inner.rest


class Replay(Decoder):
    """A decoder whose rows write what is recorded."""

    budget: Virtual
    texts: Sequence[Text]
    usual = 0.0                             # seconds of a draft that is really made

    def admit(self, *requests: Request) -> None:
        super().admit(*requests)
        tokens = sum(len(samples[0].prompt) for samples in requests)
        own = 0.0 if self.budget.machine.times(self.budget.drafter) else self._own()
        self.budget.total += self.budget.machine.prompt(tokens) + own

    @property
    def _played(self) -> Playback:
        assert isinstance(self.drafter, Playback)
        return self.drafter

    def _own(self) -> float:
        """Seconds that the drafter really took since this was asked last."""
        own, self._played.spent = self._played.spent, 0.0
        return own

    def chosen(self, tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        """What the target would have chosen behind every node on the way of its text."""
        lines = []
        for row, place in zip(self.batch.running, frontier.prefix.position.tolist(), strict=False):
            following = self.texts[row.request].tokens[place + 1 : place + 2 + tree.depth_limit]
            lines.append(following + [0] * (tree.depth_limit + 1 - len(following)))
        ahead = torch.tensor(lines, device=tree.tokens.device)
        return accept_by_matching(tree, ahead.gather(1, tree.depths))

    def _deliver(self, frontier: Frontier, tree: TokenTree, *rest: Any) -> Round:
        rows, budget = len(self.batch.running), self.budget
        sizes = tree.sizes if self.target.skips_absent else [tree.tokens.shape[1] - 1]
        context = fmean(len(row.prompt) + len(row.tokens) for row in self.batch.running)
        budget.took = budget.machine.round(budget.sampled, rows, fmean(sizes), context)
        budget.took += self._draft_seconds(frontier, rows, fmean(sizes))
        return super()._deliver(frontier, tree, *rest)

    def _draft_seconds(self, frontier: Frontier, rows: int, nodes: float) -> float:
        """What a round takes beside reading; it learns in plain rounds, too."""
        budget, machine, own = self.budget, self.budget.machine, self._own()
        name, sampled, size, going = budget.drafter, budget.sampled, frontier.budget, []
        if machine.times(name):
            going = self._played.going if size else []          # of a draft model ever fewer rows
            drafts = (fmean(going), len(going)) if going else (rows, size)
            unread = machine.per_unread.get(name, 0.0) * budget.unread * (size > 0)
            return machine.draft(name, sampled, *drafts) + unread
        if size:
            own = min(own, 4 * self.usual or own)               # others compute, too
            self.usual += (own - self.usual) / 8 if self.usual else own
        spare = frontier.prefix.ahead - nodes if size else 0.0
        asked = self._played.wants_top and not budget.rest
        return own + (machine.draft(LIGHT, sampled, rows, max(0.0, spare)) if asked else 0.0)

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
    virtual = Virtual(budget, machine, name, sampled, seed)
    playing = ReplayEngine(Recorded(engine.target), drafter, budget=virtual, shapes=engine.shapes)
    playing.texts = texts
    samplings = [replace(text.sampling, max_new_tokens=len(text.tokens) - text.prompt, stop=(),
                         stop_tokens=()) for text in texts]  # fmt: skip
    prompts = [text.tokens[: text.prompt] for text in texts]
    start = time.perf_counter()
    done = playing.generate(prompts, sampling=samplings, batch_size=rows)
    beside = time.perf_counter() - start - playing.clock.total      # what is no round takes as long
    return virtual.total + beside, done
