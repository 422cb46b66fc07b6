"""From texts, drafters and a machine to predictions: which drafter pays, how much, and at what cost.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.plain import Plain
from draftproof.engine.budget import Adaptive, Budget, Fixed, presets
from draftproof.engine.config import TRAINING_FREE
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.stats import RoundStats
from draftproof.errors import BadInput
from draftproof.plan.machine import Machine, Size, read_machine
from draftproof.plan.probe import probe
from draftproof.plan.published import Bracket, brackets
from draftproof.plan.replay import (
    RANKS,
    Drafts,
    PlayedDraft,
    PlayedDrafter,
    Text,
    drafts_of,
    known_text,
    replay,
)  # fmt: skip
from draftproof.training.calibrate import CalibrateConfig, write
from draftproof.training.draft_trees import complete, expected, optimal, rounds_of

AUTO = "auto"
"""The budget that measures as it goes, as by default."""
STEPS, NODES = 8, (4, 8, 16, 32)
"""How deep draft trees are looked at, and of how many nodes."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class PlanConfig:
    """What is asked: rows side by side, temperatures, new tokens per prompt; money per hour, watts.

    machine: a preset or a file; None times this one.
    """

    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    tokens: int = 64
    price: float | None = None
    watts: float | None = None
    machine: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Prediction:
    """One drafter, batch, temperature and budget. speed_up: over plain decoding, `low` to `high`
    with 95 %. break_even: acceptance per position from which so many draft tokens pay. memory:
    bytes of weights and cache. cost, energy: per million tokens, kWh."""

    drafter: str
    batch: int
    temperature: float
    budget: int | str
    tokens_per_round: float
    tokens_per_second: float
    speed_up: float
    low: float
    high: float
    acceptance: list[float]
    break_even: float | None
    memory: float
    cost: float | None
    energy: float | None


@dataclass(frozen=True)
class Plan:
    """Everything that was found. start: per drafter what its budget has learned, for `run --plan`.

    curves: seconds of a round over a plain one, by batch and drafted nodes. trees: per draft model
    or heads (nodes, tokens per round of the chain, the greedy tree, the optimal one). entropy:
    nats per token by temperature, and tokens per round that a tree of the best width could give to
    a drafter that knows the target's distribution but not its draw.
    """

    model: str
    config: PlanConfig
    machine: Machine
    texts: int
    predictions: list[Prediction]
    brackets: list[Bracket] = field(default_factory=list)
    trees: dict[str, list[tuple[int, float, float, float]]] = field(default_factory=dict)
    entropy: dict[float, tuple[float, float]] = field(default_factory=dict)
    curves: dict[int, dict[int, float]] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)

    def best(self, batch: int, temperature: float) -> Prediction:
        """The fastest of one setting, plain decoding included."""
        some = [one for one in self.predictions
                if (one.batch, one.temperature) == (batch, temperature)]  # fmt: skip
        return max(some, key=lambda one: one.speed_up)

    def rows(self) -> list[Prediction]:
        """Per drafter and setting the best budget; plain decoding as it is."""
        found: dict[Any, Prediction] = {}
        for one in self.predictions:
            key = one.temperature, one.batch, one.drafter
            if key not in found or found[key].speed_up < one.speed_up:
                found[key] = one
        return list(found.values())


def make_plan(
    plain: Engine, drafters: Mapping[str, Drafter], prompts: Sequence[Sequence[int]],
    logs: Sequence[Text], config: PlanConfig, progress: Progress = lambda what: None,
) -> Plan:  # fmt: skip
    """Predict; plain: an engine of the target without a drafter. logs: texts it has written."""
    if not prompts and not logs:
        raise BadInput("there is no prompt to plan for; give --prompts or --logs with a row")
    planner = Planner(plain, drafters, prompts, logs, config, progress)
    return planner.plan()


class Planner:
    """Holds what predictions share: texts as the target knows them, drafts, the machine."""

    def __init__(
        self, plain: Engine, drafters: Mapping[str, Drafter], prompts: Sequence[Sequence[int]],
        logs: Sequence[Text], config: PlanConfig, progress: Progress,
    ) -> None:  # fmt: skip
        self.plain, self.drafters, self.config, self.progress = plain, drafters, config, progress
        self.models = {name: one for name, one in drafters.items() if isinstance(one, DraftModel)}
        self.size = size_of(plain.target)
        self.texts = {heat: self._texts(prompts, logs, heat) for heat in config.temperatures}
        some = [text.tokens[: text.prompt] for text in next(iter(self.texts.values()))]
        self.machine = self._machine(some)
        self.drafts = {(name, heat): self._drafts(name, heat)
                       for name in self.models for heat in config.temperatures}  # fmt: skip

    def plan(self) -> Plan:
        """All predictions."""
        found, start = list[Prediction](), dict[str, Any]()
        for heat in self.config.temperatures:
            for batch in self.config.batches:
                base = self.predict("none", batch, heat, 0)
                found.append(base)
                for name, drafter in self.drafters.items():
                    self.progress(f"replaying: {name}, batch {batch}, T = {heat:g}")
                    sizes = [size for size in presets(drafter.default_budget) if size]
                    sizes = sizes if drafter.default_budget else []
                    found += [self.predict(name, batch, heat, size) for size in sizes]
                    if sizes:
                        learning = Adaptive(drafter.default_budget)
                        found.append(self.predict(name, batch, heat, AUTO, learning))
                        start.setdefault(name, learning.as_json())
        plan = Plan(self.plain.target.name, self.config, self.machine,
                    sum(map(len, self.texts.values())), found, start=start)  # fmt: skip
        plan.trees.update(self._trees())
        plan.curves.update(self._curves())
        for heat, texts in self.texts.items():
            best = plan.best(self.config.batches[0], heat).budget
            plan.entropy[heat] = ceiling(texts, best if isinstance(best, int) and best else 8)
        plan.brackets.extend(brackets(self, found))
        return plan

    def predict(
        self, name: str, batch: int, heat: float, size: int | str, budget: Budget | None = None
    ) -> Prediction:
        """One configuration, replayed; `size` draft tokens in every round, or `budget`."""
        texts = self.repeated(heat, batch)
        chosen = budget or Fixed(int(size))
        drafter = self._played(name, heat, texts)
        seconds, done = replay(self.plain, drafter, texts, chosen, self.machine, batch, name)
        plain, _ = replay(self.plain, Plain(), texts, Fixed(0), self.machine, batch, "none")
        tokens = sum(len(one.tokens) for one in done)
        speed_up, error = plain / seconds, 2 * self._error(done) if name != "none" else 0.0
        per_second, watts = tokens / seconds, self.config.watts or self.machine.watts
        longest = max(len(text.tokens) for text in texts)
        total = RoundStats()
        for one in done:
            total.add(one.stats)
        price = self.config.price
        return Prediction(
            name, batch, heat, size, total.tokens_per_round, per_second, speed_up,
            speed_up * (1 - error), speed_up * (1 + error), total.acceptance_by_position,
            self._break_even(size, batch, heat, name) if isinstance(size, int) and size else None,
            self.size.bytes + self._draft_bytes(name) + batch * longest * self.size.position_bytes,
            price / 3600 / per_second * 1e6 if price is not None else None,
            watts / 3.6e6 / per_second * 1e6 if watts is not None else None,
        )  # fmt: skip

    def repeated(self, heat: float, batch: int) -> list[Text]:
        """The texts, as often as a batch needs them to be full."""
        texts = self.texts[heat]
        return list(texts) * (1 if len(texts) >= batch else math.ceil(batch / len(texts)))

    def _texts(
        self, prompts: Sequence[Sequence[int]], logs: Sequence[Text], heat: float
    ) -> list[Text]:
        """What the target writes, or has written, with what it knew on the way."""
        wanted = replace(self.plain.sampling, temperature=heat)
        found = [text._replace(sampling=wanted) for text in logs]
        if prompts:
            self.progress(f"the target writes, T = {heat:g}")
            asked = CalibrateConfig(self.config.tokens, heat, seed=self.config.seed)
            found += [Text(*one) for one in write(self.plain, prompts, asked)]
        found = [text for text in found if len(text.tokens) > text.prompt + 1]
        if not found:
            raise BadInput("the target writes nothing behind these prompts; give others")
        self.progress(f"reading what was written, T = {heat:g}")
        layers = {layer for one in self.drafters.values() for layer in one.hidden_layers}
        if len(layers) > 1:
            raise BadInput("drafters that read different hidden layers cannot be planned at once")
        return [known_text(self.plain, text, tuple(layers)) for text in found]

    def _drafts(self, name: str, heat: float) -> list[Drafts]:
        self.progress(f"{name} reads what was written, T = {heat:g}")
        reader = self.models[name].model
        return [drafts_of(self.plain, text, reader) for text in self.texts[heat]]  # type: ignore[arg-type]

    def _machine(self, prompts: Sequence[Sequence[int]]) -> Machine:
        config, target = self.config, self.plain.target
        if config.machine is not None:
            sizes = {name: size_of(one.model) for name, one in self.models.items()}
            return read_machine(config.machine, target.name, self.size, sizes)
        most = max((one.default_budget for one in self.drafters.values()), default=0)
        every = sorted({0, *presets(most)})
        return probe(self.plain, prompts, config.batches, config.temperatures, every,
                     self.models, self.progress)  # fmt: skip

    def _played(self, name: str, heat: float, texts: Sequence[Text]) -> Drafter:
        """A drafter that knows nothing yet of these texts."""
        if name == "none":
            return Plain()
        drafter = self.drafters[name]
        if isinstance(drafter, DraftModel):
            known = self.drafts[name, heat]
            return PlayedDraft(texts, [known[i % len(known)] for i in range(len(texts))], drafter)
        light = set(name.split("+")) <= set(TRAINING_FREE)
        return PlayedDrafter(texts, copy.deepcopy(drafter) if light else drafter)

    def _error(self, done: Sequence[Completion]) -> float:
        """Relative standard error of tokens per round over texts, and of the times."""
        rates = np.array([[one.stats.emitted, one.stats.rounds] for one in done
                          if one.stats.rounds], dtype=float)  # fmt: skip
        picks = np.random.default_rng(0).integers(len(rates), size=(200, len(rates)))
        ratios = rates[picks].sum(1)
        spread = float(np.std(ratios[:, 0] / ratios[:, 1]) / (rates[:, 0].sum() / rates[:, 1].sum()))
        timed = getattr(self.machine, "spread", 0.1)    # figures are far less sure than times
        return math.hypot(spread, 1.4 * timed)

    def _break_even(self, size: int, batch: int, heat: float, name: str) -> float | None:
        """The acceptance per position, the same at all, from which a chain of `size` pays."""
        context = self._context()
        plain = self.machine.round(heat > 0, batch, 0, context)
        cost = self.machine.round(heat > 0, batch, size, context)
        cost += self.machine.draft(name, heat > 0, batch, size, 0.0)
        low, high = 0.0, 1.0
        if 1 + size < cost / plain:
            return None
        for _ in range(40):
            middle = (low + high) / 2
            tokens = sum(middle**position for position in range(size + 1))
            low, high = (middle, high) if tokens < cost / plain else (low, middle)
        return high

    def _context(self) -> float:
        texts = next(iter(self.texts.values()))
        return sum(len(text.tokens) for text in texts) / len(texts)

    def _curves(self) -> dict[int, dict[int, float]]:
        heat, context = self.config.temperatures[0] > 0, self._context()
        return {batch: {nodes: self.machine.round(heat, batch, nodes, context)
                        / self.machine.round(heat, batch, 0, context)
                        for nodes in (*range(17), 20, 24, 28, 32)}
                for batch in self.config.batches}  # fmt: skip

    def _draft_bytes(self, name: str) -> float:
        drafter = self.drafters.get(name)
        if isinstance(drafter, DraftModel):
            shared = drafter.model is self.plain.target
            return 0.0 if shared else size_of(drafter.model).bytes
        heads = getattr(drafter, "head", None)
        return float(sum(p.nbytes for p in heads.parameters())) if heads is not None else 0.0

    def _trees(self) -> dict[str, list[tuple[int, float, float, float]]]:
        """By draft model: tokens per round of chains, of trees grown from joint ranks, and of the
        dynamic programme's, counted on texts that they were not made from."""
        heat, found = self.config.temperatures[0], {}
        for name in self.models:
            texts, drafts = self.texts[heat], self.drafts[name, heat]
            ranks = [_windows(one.ranks, text) for one, text in zip(drafts, texts, strict=True)]
            if len(ranks) < 2 or not self.plain.target.reads_trees:
                continue
            halves, emitted = [ranks[0::2], ranks[1::2]], sum(len(one) - 1 for one in ranks)
            rows = list[tuple[int, float, float, float]]()
            chains, grown = (expected(ranks, max(NODES), wide) for wide in (1, RANKS))
            for nodes in NODES:
                best = [optimal(complete(half), nodes) for half in halves]
                rounds = [rounds_of(half, tree, len(tree))[-1]
                          for half, tree in zip(halves, best[::-1], strict=True)]  # fmt: skip
                chain = chains[min(nodes, len(chains) - 1)]
                rows.append((nodes, chain, grown[nodes], emitted / max(1, sum(rounds))))
            found[name] = rows
        return found


def _windows(ranks: torch.Tensor, text: Text) -> torch.Tensor:
    """[P, STEPS] ranks of the tokens behind each new token; RANKS where there is none."""
    own = torch.cat([ranks[text.prompt : -1], torch.full((STEPS,), RANKS)])
    return own.unfold(0, STEPS, 1)[: len(text.tokens) - text.prompt]


def ceiling(texts: Sequence[Text], nodes: int) -> tuple[float, float]:
    """Nats per token of the target's choices, and the tokens per round of the likeliest `nodes`
    under its own distribution, as far as it is known along the texts."""
    entropies = torch.cat([text.entropy[text.prompt - 1 : -1] for text in texts
                           if text.entropy is not None])  # fmt: skip
    total, count = 0.0, 0
    for text in texts:
        assert text.chances is not None
        greedy = text.sampling.temperature == 0
        chances = text.chances[text.prompt - 1 : -1].tolist()
        for start in range(0, len(chances), 4):
            count += 1
            total += 1 + (nodes if greedy else _likeliest(chances[start + 1 :], nodes))
    return float(entropies.mean()), total / max(1, count)


def _likeliest(chances: Sequence[Sequence[float]], nodes: int) -> float:
    """The sum of the largest products of a choice at each depth, prefixes first."""
    if not chances:
        return 0.0
    total, heap = 0.0, [(-chances[0][0], 0, 0, 1.0)]    # worth, depth, rank, worth of the parent
    for _ in range(nodes):
        if not heap:
            break
        worth, depth, rank, above = heapq.heappop(heap)
        total -= worth
        if rank + 1 < len(chances[depth]):
            heapq.heappush(heap, (-above * chances[depth][rank + 1], depth, rank + 1, above))
        if depth + 1 < len(chances):
            heapq.heappush(heap, (worth * chances[depth + 1][0], depth + 1, 0, -worth))
    return total


def size_of(target: Any) -> Size:
    """What is read of a model in a step: all weights but the table of embeddings, if it has its
    own head."""
    model, seen = target.model, dict[int, torch.Tensor]()
    for one in (*model.parameters(), *model.buffers()):
        seen[one.data_ptr()] = one
    count = float(sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()))
    total = float(sum(one.nbytes for one in seen.values()))
    return Size(total or 2 * count, count, float(target.position_bytes[0]))
