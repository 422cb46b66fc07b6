"""Texts written again without the target: the engine and its drafters run, and what the target
would choose is read from the text, its seconds from a `Machine`.

Under the matching rule a text does not depend on its drafts, so a text that is known says which
drafts would have been accepted, in any batch and under any budget.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES, Rule, accept_by_matching
from draftproof.core.messages import Accepted, Commit, Frontier, Reading, Successors
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.batch import Request
from draftproof.engine.budget import Budget
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.stats import Round, State
from draftproof.model.kv_cache import KVCache
from draftproof.model.kv_layer import LayerShape
from draftproof.model.target import Target
from draftproof.plan.machine import Machine
from draftproof.plan.recording import Drafts, Text


class Playback(Drafter):
    """Knows which text each row writes, and how many tokens of it are committed."""

    def __init__(self, texts: Sequence[Text], like: Drafter) -> None:
        self.texts, self.name, self.default_budget = texts, like.name, like.default_budget
        self.deepest = like.deepest
        self.going: list[int] = []                      # rows that a draft model drafts, by depth

    def start(self, rows: int, capacity: int, ops: Any) -> None:
        super().start(rows, capacity, ops)
        self.rows: list[tuple[int, int]] = []           # text and its committed tokens
        self.begun = 0

    def observe(self, commit: Commit) -> None:
        for row, count in zip(commit.rows, commit.count.tolist(), strict=True):
            if row == len(self.rows):
                self.rows.append((self.begun, 0))       # requests join in order
                self.begun += 1
            number, length = self.rows[row]
            self.rows[row] = number, length + count

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class PlayedDrafter(Playback):
    """A drafter that runs as ever; what the target would have told it comes from the recording.

    Of rejected nodes nothing is recorded, so nothing is learned from them.
    """

    def __init__(self, texts: Sequence[Text], inner: Drafter) -> None:
        super().__init__(texts, inner)
        self.inner = inner

    def start(self, rows: int, capacity: int, ops: Any) -> None:
        super().start(rows, capacity, ops)
        self.inner = self.inner.for_run(rows, capacity, ops)

    def unread(self, pending: int = 0) -> int:
        return self.inner.unread(pending)

    def observe(self, commit: Commit) -> None:
        before = [self.rows[row][1] if row < len(self.rows) else 0 for row in commit.rows]
        super().observe(commit)
        texts = [self.texts[self.rows[row][0]] for row in commit.rows]
        width = commit.tokens.shape[1]
        places = [torch.arange(start, start + width).clamp(max=len(text.tokens) - 1)
                  for start, text in zip(before, texts, strict=True)]  # fmt: skip
        both = list(zip(texts, places, strict=True))
        if self.inner.hidden_layers:
            known = [text.hidden[at] for text, at in both if text.hidden is not None]
            commit = replace(commit, hidden=torch.stack(known))
        if self.inner.wants_top and all(start >= text.prompt for start, text
                                        in zip(before, texts, strict=True)):  # fmt: skip
            there = torch.arange(width) < commit.count[:, None].cpu()
            tokens = torch.where(there.to(commit.tokens.device), commit.tokens, ABSENT)
            found = [(text.likeliest[0][at], text.likeliest[1][at]) for text, at in both
                     if text.likeliest]
            best, logits = (torch.stack(some) for some in zip(*found, strict=True))
            commit = replace(commit, successors=Successors(TokenTree.chain(tokens), best, logits))
        self.inner.observe(commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        return self.inner.propose(frontier)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.inner.select(rows)


class PlayedDraft(Playback):
    """The chains of a draft model, as one pass over each text found them."""

    def __init__(self, texts: Sequence[Text], drafts: Sequence[Drafts], like: DraftModel) -> None:
        super().__init__(texts, like)
        self.drafts = drafts
        self.lag: list[int] = []
        self.proposed = False

    def start(self, rows: int, capacity: int, ops: Any) -> None:
        super().start(rows, capacity, ops)
        self.lag, self.proposed = [], False

    def unread(self, pending: int = 0) -> int:
        return sum(max(0, lag + pending - 1) for lag in self.lag)

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        self.lag += [0] * (len(self.rows) - len(self.lag))
        for row in commit.rows:
            self.lag[row] = 1 if self.proposed else self.lag[row] + commit.tokens.shape[1]
        self.proposed = False

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.lag = [self.lag[row] for row in rows]

    def propose(self, frontier: Frontier) -> TokenTree:
        """As `DraftModel` does: until the floor, and while a row is among the likeliest."""
        most, nodes = frontier.max_nodes, frontier.budget * len(self.rows)
        self.lag, self.proposed, self.going = [0] * len(self.rows), True, []
        tokens = torch.full((len(self.rows), 1 + most), ABSENT)
        chances, scores = torch.zeros(tokens.shape), [0.0] * len(self.rows)
        live, ranked = list(range(len(self.rows))), list[float]()
        tokens[:, 0] = frontier.prefix.root
        for depth in range(most):
            self.going.append(len(live))
            for row in live:
                number, place = self.rows[row]
                found = self.drafts[number]
                at = min(place + depth, len(found.tokens) - 1)
                tokens[row, 1 + depth] = found.tokens[at]
                scores[row] += found.confidence[at]
                chances[row, 1 + depth] = scores[row]
                ranked.append(scores[row])
            least = sorted(ranked)[-nodes] if len(ranked) >= nodes else -math.inf
            floor = math.log(frontier.floor) if frontier.floor else -math.inf
            live = [row for row in live if scores[row] >= max(floor, least)]
            if not live:
                break
        tree = TokenTree.chain(tokens[:, : 1 + len(self.going)])
        if not frontier.most:
            return tree
        there = tree.tokens != ABSENT
        chance = torch.where(there, chances[:, : there.shape[1]].exp(), 0)
        return replace(tree, confidence=chance).within_budget(frontier.budget)


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

    def __post_init__(self) -> None:
        self.most, self.floor = self.inner.most, self.inner.floor
        self.total, self.dice, self.usual = 0.0, random.Random(0), 0.0
        self.own = self.nodes = self.context = self.unread = self.joined = 0.0  # of this round
        self.going: Sequence[int] = ()

    def choose(self, state: State) -> int:
        self.unread = state.unread
        return self.inner.choose(state)

    def record(self, done: Round) -> None:
        seconds = self.machine.round(self.sampled, done.rows, self.nodes, self.context)
        if done.size:
            seconds += self._draft(done.rows, self.nodes)
            seconds += self.machine.unread(self.drafter, self.unread)
        elif not self.machine.times(self.drafter):
            seconds += self.own                         # it learns from plain rounds, too
        self.total += seconds + self.joined
        heard = seconds * self.dice.choice(self.machine.noise)
        self.inner.record(done._replace(seconds=0.0 if self.joined else heard))
        self.joined = 0.0

    def _draft(self, rows: int, nodes: float) -> float:
        """Of a draft model step by step: fewer rows may go on."""
        name, sampled, machine = self.drafter, self.sampled, self.machine
        if not self.going:
            own = min(self.own, 4 * self.usual or self.own)     # others compute, too
            self.usual += (own - self.usual) / 8 if self.usual else own
            return machine.draft(name, sampled, rows, nodes, own)
        return machine.draft(name, sampled, rows, 1, 0.0) + sum(
            machine.draft(name, sampled, some, depth + 1, 0.0)
            - machine.draft(name, sampled, some, depth, 0.0)
            for depth, some in enumerate(self.going[1:], 1)
        )


class Replay(Decoder):
    """A decoder whose rows write what is recorded."""

    budget: Virtual
    texts: Sequence[Text]

    def step(self, joining: Sequence[Request] = ()) -> None:
        self._before = self.clock.draft.seconds
        self.budget.joined = self._prompts(joining)
        super().step(joining)

    def admit(self, *requests: Request) -> None:
        start = time.perf_counter()
        super().admit(*requests)
        own = 0.0 if self.budget.machine.times(self.budget.drafter) else time.perf_counter() - start
        self.budget.total += self._prompts(requests) + own

    def _prompts(self, requests: Sequence[Request]) -> float:
        tokens = sum(len(samples[0].prompt) for samples in requests)
        return self.budget.machine.prompt(tokens) if tokens else 0.0

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
        budget.going = getattr(getattr(self.drafter, "inner", None), "going", ())
        budget.own = self.clock.draft.seconds - self._before
        return super()._deliver(frontier, tree, *rest)

    def _choose_first(self, first: int, logits: Tensor) -> None:
        for place, row in enumerate(self.batch.running[first:], first):
            token = self.texts[row.request].tokens[len(row.prompt)]
            self.batch.text[place, len(row.prompt)] = token
            row.extend([token], None, drafted=0)


class ReplayEngine(Engine):
    """An engine whose runs are replays of these texts."""

    texts: Sequence[Text] = ()

    def _decoder(self, budget: Budget, rows: int, capacity: int) -> Decoder:
        assert isinstance(budget, Virtual)
        start = time.perf_counter()
        match, shapes = RULES["match"], self.shapes
        made = Replay(self.target, self.drafter, match, budget, rows, capacity, shapes)
        made.rule, made.texts = Rule(made.chosen, False), self.texts
        assert isinstance(budget, Virtual)
        budget.total += time.perf_counter() - start
        return made


def replay(
    engine: Engine, drafter: Drafter, texts: Sequence[Text], budget: Budget, machine: Machine,
    rows: int, name: str,
) -> tuple[float, list[Completion]]:  # fmt: skip
    """Predicted seconds of all texts, at most `rows` at a time, and what came of each."""
    virtual = Virtual(budget, machine, name, texts[0].sampling.temperature > 0)
    playing = ReplayEngine(Recorded(engine.target), drafter, budget=virtual, shapes=engine.shapes)
    playing.texts = texts
    samplings = [replace(text.sampling, max_new_tokens=len(text.tokens) - text.prompt, stop=(),
                         stop_tokens=()) for text in texts]  # fmt: skip
    prompts = [text.tokens[: text.prompt] for text in texts]
    done = playing.generate(prompts, sampling=samplings, batch_size=rows)
    return virtual.total, done
