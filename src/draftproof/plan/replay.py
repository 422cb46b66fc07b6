"""Replays texts without the target: the engine and its drafters run, the target's choices come from
the text, and its seconds from a `Machine`.

Under the matching rule a text does not depend on its drafts, so a known text determines which
drafts would have been accepted, in any batch and with any budget.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import LayerShape
from draftproof.core.messages import Reading
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Completion, Engine
from draftproof.model.target import Target
from draftproof.plan.machine import LIGHT, Machine
from draftproof.plan.playback import Playback
from draftproof.plan.recording import Text
from draftproof.requests.stats import Round, State


class Recorded(Target):
    """Replaces the target in a replay: it reads nothing, and its outputs are not used.

    tree, lengths: the last tree, and the committed tokens of each row before it.
    """

    tree: TokenTree
    lengths: list[int]

    def __init__(self, target: Target) -> None:
        self.__dict__.update(target.__dict__)
        self._nothing = torch.zeros(1, dtype=torch.float32, device=target.device)

    def refresh(self) -> None:
        """Do nothing, since nothing is read."""

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache.empty([LayerShape(1, 1, 1)], rows, capacity, torch.float32, self.device)

    def read(self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False,
             hidden_layers: tuple[int, ...] = ()) -> Reading:  # fmt: skip
        self.tree, self.lengths = tree, cache.lengths.tolist()
        cache.write_at(first, tree.tokens.shape[1])
        nodes = 1 if last_only else tree.tokens.shape[1] - first
        return Reading(self._nothing.expand(len(tree.tokens), nodes, self.vocab_size))


class RecordedChoices(Sampler):
    """Chooses the recorded tokens. texts: by the identity of a row's sampling parameters."""

    texts: Mapping[int, Text]

    def sample(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N] the token after each node on the path of its row's text."""
        limit, lines = paths.tree.depth_limit, []
        for row, position in zip(self.rows, paths.prefix.position.tolist(), strict=True):
            text = self.texts[id(row.sampling)]
            following = text.tokens[position + 1 : position + 2 + limit]
            lines.append(following + [0] * (limit + 1 - len(following)))
        ahead = torch.tensor(lines, device=logits.device)
        return ahead.gather(1, paths.tree.depths[:, paths.first :])


@dataclass
class SimulatedClock(Budget):
    """Uses the choices of `inner`, and reports to it the seconds that a machine would have taken.

    total: seconds of all prompts and rounds. seed: for the noise in the times that `inner` records.
    usual: seconds of an actual draft.
    """

    inner: Budget
    machine: Machine
    target: Recorded
    played: Playback
    drafter: str
    sampled: bool
    seed: int = 0
    total: float = 0.0
    unread: int = 0
    usual: float = 0.0

    def __post_init__(self) -> None:
        self.max_draft_tokens = self.inner.max_draft_tokens
        self.min_confidence = self.inner.min_confidence
        self.dice = random.Random(self.seed)

    def choose(self, state: State) -> int:
        self.unread, size = state.unread, self.inner.choose(state)
        self.cooldown = self.inner.cooldown
        return size

    def peek(self, state: State) -> int:
        self.unread = state.unread
        return self.inner.peek(state)

    def worth_reading(self, confidence: Sequence[float]) -> int:
        size = self.inner.worth_reading(confidence)
        self.cooldown = self.inner.cooldown
        return size

    def record(self, done: Round) -> None:
        tree, context = self.target.tree, 1 + fmean(self.target.lengths[: done.rows])
        sizes = tree.sizes if self.target.ragged_batches else [tree.tokens.shape[1] - 1]
        took = self.machine.round(self.sampled, done.rows, fmean(sizes), context)
        drafting = self._draft_seconds(done, fmean(sizes))
        took, noise = took + drafting, self.dice.choice(self.machine.noise)
        self.total += took
        self.inner.record(done._replace(seconds=took * noise, draft_seconds=drafting * noise))
        self.cooldown = self.inner.cooldown

    def read_prompts(self, tokens: int) -> None:
        """Add the seconds of prompts with this number of tokens."""
        spent = self.played.timing.take()
        seconds = 0.0 if self.machine.times(self.drafter) else spent
        self.total += self.machine.prompt(tokens) + seconds

    def _draft_seconds(self, done: Round, nodes: float) -> float:
        """Seconds of a round besides reading; drafters also learn in plain rounds."""
        machine, timing, size = self.machine, self.played.timing, done.size
        name, sampled, measured = self.drafter, self.sampled, timing.take()
        if machine.times(name):
            going = timing.going if size else []                # a draft model's rows get fewer
            drafts = (fmean(going), len(going)) if going else (done.rows, size)
            unread = machine.per_unread.get(name, 0.0) * self.unread * (size > 0)
            return machine.draft(name, sampled, *drafts) + unread
        if size:
            measured = min(measured, 4 * self.usual or measured)               # others compute, too
            self.usual += (measured - self.usual) / 8 if self.usual else measured
        spare = timing.ahead - nodes if size else 0.0
        shares_top = self.played.top_k_needed and not self.cooldown
        light = machine.draft(LIGHT, sampled, done.rows, max(0.0, spare)) if shares_top else 0.0
        return measured + light


def replay(
    engine: Engine, drafter: Playback, texts: Sequence[Text], budget: Budget, machine: Machine,
    rows: int, name: str, seed: int = 0,
) -> tuple[float, list[Completion]]:  # fmt: skip
    """Predict the seconds of all texts, with at most `rows` at a time, and return all results.

    seed: for the noise in the seconds that the budget records."""
    sampled, target = texts[0].sampling.temperature > 0, Recorded(engine.target)
    virtual = SimulatedClock(budget, machine, target, drafter, name, sampled, seed)
    samplings = [replace(text.sampling, max_new_tokens=len(text.tokens) - text.prompt, stop=(),
                         stop_tokens=()) for text in texts]  # fmt: skip

    by_sampling = dict(zip(map(id, samplings), texts, strict=True))

    class Choices(RecordedChoices):
        texts = by_sampling

    playing = Engine(target, drafter, budget=virtual, shapes=engine.shapes, sampler=Choices)
    start, done = time.perf_counter(), list[Completion]()
    requests = playing.read([text.tokens[: text.prompt] for text in texts], sampling=samplings)
    with playing.scheduled(requests, rows) as scheduler:
        while scheduler.has_unfinished_requests():
            updates = scheduler.step()
            began = [update.request.prompt for update in updates
                     if update.request.sequences[0].reported == len(update.tokens)]  # fmt: skip
            if began:
                virtual.read_prompts(sum(map(len, began)))
            done += [update.completion for update in updates if update.completion is not None]
        outside = time.perf_counter() - start - scheduler.clock.total    # time outside of rounds
    return virtual.total + outside, sorted(done, key=lambda completion: completion.prompt)
