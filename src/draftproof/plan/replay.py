"""Texts written again without the target: the engine and its drafters run, and what the target
would choose is read from the text, its seconds from a `Machine`.

Under the matching rule a text does not depend on its drafts, so a text that is known says which
drafts would have been accepted, in any batch and under any budget. A draft model is not run again
either: one pass over each text says what it drafts wherever a draft can begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.acceptance import Rule, accept_by_matching
from draftproof.core.messages import Accepted, Commit, Frontier, Reading, Successors
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter, over_vocabulary
from draftproof.drafters.draft_model import CONFIDENCE_SCALE, DraftModel
from draftproof.engine.batch import Request
from draftproof.engine.budget import Budget
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.stats import Round, State
from draftproof.model.kv_cache import KVCache
from draftproof.model.kv_layer import LayerShape
from draftproof.model.target import Target
from draftproof.plan.machine import Machine

CHUNK, TOP, RANKS = 64, 8, 20
"""Tokens of a text read at once; likely tokens kept per position; ranks that are told apart."""


class Text(NamedTuple):
    """A text of the target: tokens, how many are the prompt, how it was sampled; and, by position,
    what the target knew there: hidden [S, T, H] or None, `top` tokens and logits [S, k], entropy
    [S] of its choice, and the chances [S, k] of the likeliest."""

    tokens: list[int]
    prompt: int
    sampling: Sampling
    hidden: Tensor | None = None
    top: tuple[Tensor, Tensor] | None = None
    entropy: Tensor | None = None
    chances: Tensor | None = None


class Drafts(NamedTuple):
    """What a draft model says of a text: its choice behind each position [S], the log-probability
    it gives that [S], and which of its choices the text's next token is [S]."""

    tokens: Tensor
    confidence: Tensor
    ranks: Tensor


@torch.inference_mode()
def read_text(
    engine: Engine, text: Text, model: Target, hidden_layers: tuple[int, ...] = ()
) -> Any:
    """Yields (first position, logits [1, n, V], hidden, sampler, paths) of a text, by chunk."""
    limit = len(text.tokens) - text.prompt
    params = engine.requests.params(text.sampling, text.tokens[: text.prompt], max(1, limit))
    cache, tokens = model.new_cache(1, len(text.tokens) + CHUNK), torch.tensor([text.tokens])
    tokens = tokens.to(model.device)
    sampler = Sampler([params], model.device)
    for start in range(0, tokens.shape[1], CHUNK):
        cache.bound(start)
        chain = TokenTree.chain(tokens[:, start : start + CHUNK])
        reading = model.read(chain, cache, hidden_layers=hidden_layers)
        logits = over_vocabulary(reading.logits, engine.target.vocab_size)
        place = torch.tensor([start], device=model.device)
        yield start, logits, reading.hidden, sampler, Paths(Prefix(tokens, place), chain)
        cache.keep(None, torch.tensor([chain.tokens.shape[1]], device=model.device))


def known_text(engine: Engine, text: Text, hidden_layers: tuple[int, ...]) -> Text:
    """With what the target knows at each position, for drafters that want it."""
    hidden, tops, entropies, chances = list[Tensor](), list[Any](), list[Tensor](), list[Tensor]()
    for _, logits, states, sampler, paths in read_text(engine, text, engine.target, hidden_layers):
        hidden += [states[0]] if states is not None else []
        tops.append(logits[0].topk(TOP, -1))
        scores = sampler.filtered(logits, paths)[0].float()
        heat = text.sampling.temperature or 1.0
        probs = (scores if text.sampling.temperature else scores / heat).softmax(-1)
        entropies.append(-(probs * probs.clamp_min(1e-30).log()).sum(-1))
        chances.append(probs.topk(TOP, -1).values)
    top = torch.cat([one.indices for one in tops]), torch.cat([one.values for one in tops])
    return text._replace(
        hidden=torch.cat(hidden) if hidden else None, top=top, entropy=torch.cat(entropies),
        chances=torch.cat(chances))  # fmt: skip


def drafts_of(engine: Engine, text: Text, model: Target) -> Drafts:
    """One pass of a draft model over a text."""
    tokens, confidence, ranks = list[Tensor](), list[Tensor](), list[Tensor]()
    following = torch.tensor([*text.tokens[1:], 0], device=model.device)
    for start, logits, _, sampler, paths in read_text(engine, text, model):
        steps, children = sampler.best(logits, paths, RANKS, CONFIDENCE_SCALE)
        tokens.append(children[0, :, 0])
        confidence.append(steps[0, :, 0])
        came = following[start : start + len(children[0]), None]
        hit = children[0] == came
        ranks.append(torch.where(hit.any(-1), hit.int().argmax(-1), RANKS))
    return Drafts(*(torch.cat(some) for some in (tokens, confidence, ranks)))


class Playback(Drafter):
    """Knows which text each row writes, and how many tokens of it are committed."""

    def __init__(self, texts: Sequence[Text], like: Drafter) -> None:
        self.texts, self.name, self.default_budget = texts, like.name, like.default_budget
        self.deepest = like.deepest

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
            found = [(text.top[0][at], text.top[1][at]) for text, at in both if text.top]
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
        root, most = frontier.prefix.root, frontier.max_nodes
        self.lag, self.proposed = [0] * len(self.lag), True
        lines, chances = [], []
        for number, place in self.rows:
            found = self.drafts[number]
            at = torch.arange(place, place + most).clamp(max=len(found.tokens) - 1)
            lines.append(found.tokens[at])
            chances.append(found.confidence[at].cumsum(0))
        scores = torch.stack(chances)
        tokens = torch.stack(lines)
        if frontier.floor:
            tokens = torch.where(scores >= log(frontier.floor), tokens, ABSENT)
            deep = max(1, int((tokens != ABSENT).sum(1).max()))
            tokens, scores = tokens[:, :deep], scores[:, :deep]
        tree = TokenTree.chain(torch.cat([root[:, None], tokens], 1))
        if not frontier.most:
            return tree
        first = torch.ones_like(scores[:, :1])
        chance = torch.where(tokens != ABSENT, scores.exp(), 0)
        tree = replace(tree, confidence=torch.cat([first, chance], 1))
        return tree.within_budget(frontier.budget)


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
        self.total, self.rounds = 0.0, 0
        self.state = State(1, 0, 0)
        self.own = self.read = self.joined = 0.0        # of the round that runs

    def choose(self, state: State) -> int:
        self.state = state
        return self.inner.choose(state)

    def record(self, done: Round) -> None:
        rows, seconds = done.rows, self.machine.round(
            self.sampled, done.rows, self.read / done.rows, self.state.context)
        if done.size:
            nodes, unread = self.read / rows, self.state.unread
            seconds += self.machine.draft(self.drafter, self.sampled, rows, nodes, self.own)
            seconds += self.machine.unread(self.drafter, unread)
        self.total += seconds + self.joined
        self.rounds += 1
        self.inner.record(done._replace(seconds=0.0 if self.joined else seconds))
        self.joined = 0.0


class Replay(Decoder):
    """A decoder whose rows write what is recorded."""

    texts: Sequence[Text]

    def step(self, joining: Sequence[Request] = ()) -> None:
        budget, before = self.budget, self.clock.draft.seconds
        assert isinstance(budget, Virtual)
        self._before = before
        budget.joined = self._prompts(joining)
        super().step(joining)

    def admit(self, *requests: Request) -> None:
        assert isinstance(self.budget, Virtual)
        self.budget.total += self._prompts(requests)
        super().admit(*requests)

    def _prompts(self, requests: Sequence[Request]) -> float:
        assert isinstance(self.budget, Virtual)
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
        assert isinstance(self.budget, Virtual)
        rows = len(self.batch.running)
        sizes = tree.sizes if self.target.skips_absent else [tree.tokens.shape[1] - 1] * rows
        self.budget.read = float(sum(sizes))
        self.budget.own = self.clock.draft.seconds - self._before
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
        made = Replay(self.target, self.drafter, Rule(accept_by_matching, False), budget,  # type: ignore[arg-type]
                      rows, capacity, self.shapes)  # fmt: skip
        made.rule, made.texts = Rule(made.chosen, False), self.texts
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
