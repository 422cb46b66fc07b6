"""Our engine as a way to write: watched from outside, so that what is timed is what a user runs.

What a round reads is seen at the target and at the draft models; when a token comes is seen where its text is made.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftproof.bench.measure import Bare, Chunk, Clock, Reads, Shape, Task, Written
from draftproof.core.messages import Commit, Frontier, Reading
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import DraftSampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.cost_curve import measure_costs
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.stats import RoundStats
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec, TextStream
from draftproof.native.kernels import Chains

TARGET = "target"
COVERED = 0.95
"""Share of the reads whose shapes are measured alone, the commonest first."""
SHARE = 4
"""Alone, one read is made for so many of a trial: as many of each width, so that its noise is like the trial's."""
BUCKET = 128
"""Capacities that `measure_costs` makes are multiples of this, as the engine's are."""


class Ours:
    """An engine; it, its target and its drafter belong to this way from now on."""

    most: int | None = None

    def __init__(self, name: str, engine: Engine) -> None:
        assert engine.codec is not None, "texts are timed where they are made"
        self.name, self.engine = name, engine
        self.held = drafter_bytes(engine)
        self.weights = sum(_sizes([engine.target.model], set()).values()) + self.held
        self.watched = {TARGET: Watched(engine.target), **_watch_models(engine.drafter)}
        self.arrivals = Arrivals(engine.codec, self.watched[TARGET])
        engine.target = cast(Target, self.watched[TARGET])
        engine.codec = cast(Codec, self.arrivals)

    def write(self, task: Task, clock: Clock) -> list[Written]:
        for model in self.watched.values():
            model.shapes = Counter()
        self.arrivals.rows, self.arrivals.clock = [], clock
        done = self._generate(task)
        rows = zip(done, self.arrivals.rows, strict=True)
        return [Written(one.checked().tokens, _chunks(row), stats=one.stats) for one, row in rows]

    def reads(self) -> Reads:
        return {name: dict(model.shapes) for name, model in self.watched.items()}

    def spent(self) -> dict[str, float]:
        parts = self.engine.clock.seconds
        return {part: parts.get(part, 0.0) for part in RoundStats().seconds}

    def bare(self, reads: Reads, task: Task) -> Bare | None:
        """Reads of the target and of draft models, alone; draft heads, alone with their messages. The rest drafts for free."""
        rounds = sum(reads.get(TARGET, {}).values())
        if rounds == 0:
            return None
        seconds = {name: bare_seconds(model.inner, reads.get(name, {})) for name, model in self.watched.items()}
        verify = seconds.pop(TARGET) / rounds
        draft = sum(seconds.values()) / rounds
        return Bare(verify, draft if draft or not self.held else self._drafter_alone(task))

    def _generate(self, task: Task) -> list[Completion]:
        asked, rows = task.prompts, task.rows
        return self.engine.generate(asked, sampling=task.wanted, max_new_tokens=task.new_tokens, batch_size=rows)

    def _drafter_alone(self, task: Task) -> float:
        """Seconds per round of the drafter when it gets the messages of a real run, a short one, and nothing else happens."""
        drafter, budget, heard = self.engine.drafter, self.engine.budget, Heard(self.engine.drafter)
        self.engine.drafter, self.engine.budget = cast(Drafter, heard), copy.deepcopy(budget)       # it learns nothing of this
        try:
            self._generate(task._replace(new_tokens=-(-task.new_tokens // SHARE)))
        finally:
            self.engine.drafter, self.engine.budget = drafter, budget
        return statistics.median(heard.again() for _ in range(3))


class Watched:
    """Stands in for a target: counts the shapes of its reads, all but those of prompts, which want their last logits only."""

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.shapes: Counter[Shape] = Counter()
        self.calls = 0

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> Reading:
        self.calls += 1
        if not last_only:
            rows, nodes = tree.tokens.shape
            width = round(sum(tree.sizes) / rows) + 1 if self.inner.skips_absent and not first else nodes - first
            self.shapes[Shape(rows, width, cache.capacity)] += 1
        return self.inner.read(tree, cache, first=first, last_only=last_only, hidden_layers=hidden_layers)

    def chain(self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int, draft_sampling: DraftSampling) -> Chains | None:
        """Chains in one call count as the reads they take the place of: what was missing with the root, then one by one."""
        lacking = int((prefix.position - cache.lengths).amax())
        chains = self.inner.chain(prefix, width, cache, steps, nodes, draft_sampling)
        if chains is not None:
            self.shapes[Shape(len(chains.read), 1 + lacking, cache.capacity)] += 1
            for depth in range(1, int(chains.read.amax())):
                self.shapes[Shape(int((chains.read > depth).sum()), 1, cache.capacity)] += 1
        return chains

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Arrivals:
    """Stands in for the codec: notes when each token's text is made, and after which read of the target."""

    def __init__(self, inner: Codec, target: Watched) -> None:
        self.inner, self.target = inner, target
        self.clock: Clock = time.perf_counter
        self.rows: list[list[tuple[float, int]]] = []           # per text, in the order asked for

    def stream(self, prompt: Sequence[int]) -> Noted:
        self.rows.append([])
        return Noted(self.inner.stream(prompt), self, self.rows[-1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Noted:
    """A stream of text whose tokens are noted."""

    def __init__(self, inner: TextStream, arrivals: Arrivals, row: list[tuple[float, int]]) -> None:
        self.inner, self.arrivals, self.row = inner, arrivals, row

    def push(self, token: int) -> str:
        piece = self.inner.push(token)
        self.row.append((self.arrivals.clock(), self.arrivals.target.calls))
        return piece

    def finish(self) -> str:
        return self.inner.finish()


def _chunks(row: Sequence[tuple[float, int]]) -> list[Chunk]:
    """Tokens of one read of the target come together, with the last of them."""
    together = [list(group) for _, group in groupby(row, key=lambda noted: noted[1])]
    return [Chunk(group[-1][0], len(group)) for group in together]


@dataclass
class Heard:
    """Stands in for a drafter and keeps the messages it gets, to say them again."""

    inner: Drafter
    messages: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def start(self, rows: int, capacity: int) -> None:
        self._say("start", rows, capacity)

    def observe(self, commit: Commit) -> None:
        self._say("observe", commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        kept = replace(frontier.prefix, tokens=frontier.prefix.tokens.clone())          # the decoder writes on in it
        tree: TokenTree = self._say("propose", replace(frontier, prefix=kept))
        return tree

    def select(self, rows: Sequence[int]) -> None:
        self._say("select", list(rows))

    @torch.inference_mode()
    def again(self) -> float:
        """Seconds per proposal of everything from the first one on."""
        rounds = sum(verb == "propose" for verb, _ in self.messages)
        started, seconds = False, 0.0
        for verb, said in self.messages:
            started = started or verb == "propose"
            start = time.perf_counter()
            answer = getattr(self.inner, verb)(*said)
            if answer is not None and answer.tokens.device.type != "cpu":
                answer.tokens[0, 0].item()                                              # waits for the device
            seconds += (time.perf_counter() - start) * started
        return seconds / max(1, rounds)

    def _say(self, verb: str, *said: Any) -> Any:
        self.messages.append((verb, said))
        return getattr(self.inner, verb)(*said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def bare_seconds(target: Target, shapes: Any) -> float:
    """Seconds of all these reads if each took what it takes alone; rare shapes count as the mean of the others."""
    total, covered, wanted = sum(shapes.values()), 0, dict[tuple[int, int], dict[int, int]]()
    for shape, count in sorted(shapes.items(), key=lambda item: -item[1]):
        if covered < COVERED * total:
            wanted.setdefault((shape.rows, shape.capacity), {})[shape.width] = count
            covered += count
    seconds = 0.0
    for (rows, capacity), widths in wanted.items():
        room, repeats = min(capacity // BUCKET * BUCKET, target.context), sum(widths.values()) // (SHARE * len(widths))
        curve = measure_costs(target, list(widths), rows=rows, context=max(1, room - max(widths)), repeats=max(1, repeats))
        seconds += sum(count * curve.at(width) for width, count in widths.items())
    return seconds * total / covered if covered else 0.0


def drafter_bytes(engine: Engine) -> int:
    """Bytes of what the drafter holds besides the target's own tensors."""
    seen: set[int] = {id(engine.target)}
    _sizes([engine.target.model], seen)
    return sum(_sizes([engine.drafter], seen).values())


def _sizes(things: Sequence[Any], seen: set[int]) -> dict[int, int]:
    """Bytes of every tensor reachable through drafters, targets, modules and containers, each once."""
    found: dict[int, int] = {}
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[id(thing)] = thing.nelement() * thing.element_size()
        elif isinstance(thing, Target):
            waiting.append(thing.model)
        elif isinstance(thing, nn.Module):
            for part in thing.modules():
                waiting += [one for one in _inside(part) if isinstance(one, Tensor)]
        else:
            waiting += _inside(thing)
    return found


def _inside(thing: Any) -> Iterator[Any]:
    if isinstance(thing, nn.Module):
        yield from (*thing._parameters.values(), *thing._buffers.values(), *vars(thing).values())
    elif isinstance(thing, Drafter):
        yield from vars(thing).values()
    elif isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple)):
        yield from thing


def _watch_models(drafter: Drafter) -> dict[str, Watched]:
    """Put a watch on every language model that a drafter, or a drafter inside it, holds; the target may be one of them."""
    found: dict[str, Watched] = {}
    waiting: list[Any] = [drafter]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Drafter):
            for name, value in list(vars(thing).items()):
                if isinstance(value, Target):
                    watch = Watched(value)
                    found[f"draft {len(found) + 1}: {Path(value.name).name}"] = watch
                    setattr(thing, name, watch)
        waiting += [one for one in _inside(thing) if isinstance(one, (Drafter, list, tuple, dict))]
    return found
