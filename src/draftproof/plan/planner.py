"""From texts, drafters and a machine to predictions: which drafter pays, how much, at what cost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter, itemgetter
from statistics import pstdev
from typing import Any, cast

import numpy as np
import torch

from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.budget import Adaptive, Costs, Fixed, presets
from draftproof.engine.config import TRAINING_FREE
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.stats import RoundStats
from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.plan.machine import LIGHT, Machine, Size, read_machine
from draftproof.plan.playback import Playback, PlayedDraft, PlayedDrafter
from draftproof.plan.probe import Noise, probe
from draftproof.plan.recording import Text, drafts_of, recorded
from draftproof.plan.replay import replay
from draftproof.weights.packed_linear import PackedLinear
from draftproof.weights.quantize import weight_bytes
from draftproof.weights.quantized_linear import QuantizedLinear

REPLAYS = 5
"""Of a configuration whose budget depends on the noise of its clock; the median counts."""
AUTO, PLAIN = "auto", "none"
"""The budget that measures as it goes, as by default; the drafter that drafts nothing."""
LEARNED = ("accepted", "offered", "hits", "tries", "chain", "per_unread")
"""What an adaptive budget has learned, beside costs."""


@dataclass(frozen=True)
class PlanConfig:
    """What is asked: rows side by side, temperatures, new tokens per prompt; money per hour.

    machine: a preset or a file; None times this one.
    """

    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    tokens: int = 64
    price: float | None = None
    machine: str | None = None


@dataclass(frozen=True)
class Prediction:
    """One drafter, batch, temperature and budget. speed_up: over plain decoding, `low` to `high`
    with 95 %. memory: bytes of weights and cache. cost: per million tokens."""

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
    memory: float
    cost: float | None


@dataclass
class Plan:
    """Everything that was found. start: per drafter what its budget has learned, for `run --plan`.
    """

    model: str
    config: PlanConfig
    machine: Machine
    texts: int
    predictions: list[Prediction]
    start: dict[str, Any]

    def rows(self) -> list[Prediction]:
        """Per drafter and setting the best budget."""
        found: dict[Any, Prediction] = {}
        for one in self.predictions:
            key = one.temperature, one.batch, one.drafter
            found[key] = max(found.get(key, one), one, key=attrgetter("speed_up"))
        return list(found.values())

    def best(self, drafted: bool = False) -> Prediction:
        """The fastest of the first setting, plain decoding included or not."""
        first = self.config.batches[0], self.config.temperatures[0]
        return max((one for one in self.predictions if (one.batch, one.temperature) == first
                    and not (drafted and one.drafter == PLAIN)),
                   key=attrgetter("speed_up"))  # fmt: skip


class Planner:
    """Holds what predictions share: texts as the target knows them, drafts, the machine.

    plain: an engine of the target without a drafter. logs: texts it has written, beside those that
    it writes now behind `prompts`. learned: by drafter, what its adaptive budget has learned.
    """

    def __init__(
        self, plain: Engine, drafters: Mapping[str, Drafter], prompts: Sequence[Sequence[int]],
        logs: Sequence[Text], config: PlanConfig,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:  # fmt: skip
        self.plain, self.drafters, self.config, self.progress = plain, drafters, config, progress
        self.models = {name: one for name, one in drafters.items() if isinstance(one, DraftModel)}
        layers = {one.hidden_layers for one in drafters.values() if one.hidden_layers}
        if len(layers) > 1:
            raise BadInput("drafters that read different hidden layers cannot be planned at once")
        self.layers = next(iter(layers), ())
        self.size, self.learned = size_of(plain.target), dict[str, Any]()
        self._plain: dict[tuple[float, int], float] = {}    # seconds without drafts
        self.texts = {heat: self._texts(prompts, logs, heat) for heat in config.temperatures}
        self.machine = self._machine()
        progress("draft models read what was written")
        self.drafts = {
            (name, heat): [drafts_of(plain, text, cast(Target, one.model)) for text in texts]
            for name, one in self.models.items() for heat, texts in self.texts.items()
        }

    def plan(self) -> Plan:
        """All predictions."""
        found = list[Prediction]()
        for heat, batch in product(self.config.temperatures, self.config.batches):
            found.append(self.predict(PLAIN, batch, heat, 0))
            for name, drafter in self.drafters.items():
                self.progress(f"replaying: {name}, batch {batch}, T = {heat:g}")
                sizes: list[int | str] = [*presets(drafter.default_budget)[1:], AUTO]
                found += [self.predict(name, batch, heat, one) for one in sizes]
        count = sum(map(len, self.texts.values()))
        return Plan(self.plain.target.name, self.config, self.machine, count, found, self.learned)

    def predict(self, name: str, batch: int, heat: float, size: int | str) -> Prediction:
        """One configuration, replayed: `size` draft tokens in every round, or as many as an
        adaptive budget chooses."""
        texts, total, runs = self.repeated(heat, batch), RoundStats(), []
        for seed in range(REPLAYS if size == AUTO else 1):
            drafter = self._played(name, heat, texts)
            budget = Adaptive(drafter.default_budget) if size == AUTO else Fixed(int(size))
            runs.append(replay(self.plain, drafter, texts, budget, self.machine, batch, name, seed))
            if isinstance(budget, Adaptive):
                self.learned.setdefault(name, learned(budget))
        seconds, done = sorted(runs, key=itemgetter(0))[len(runs) // 2]
        if name == PLAIN:
            self._plain[heat, batch] = seconds
        elif (heat, batch) not in self._plain:
            self.predict(PLAIN, batch, heat, 0)
        for one in done:
            total.add(one.stats)
        chance = pstdev(one / seconds for one, _ in runs)
        error = 2 * math.hypot(self._error(done), chance) if name != PLAIN else 0.0
        up, price = self._plain[heat, batch] / seconds, self.config.price
        per_second = sum(len(one.tokens) for one in done) / seconds
        longest = max(len(text.tokens) for text in texts)
        return Prediction(
            name, batch, heat, size, total.tokens_per_round, per_second,
            up, up * max(0.0, 1 - error), up * (1 + error), total.acceptance_by_position,
            self.size.bytes + self._draft_bytes(name) + batch * longest * self.size.position_bytes,
            price / 3600 / per_second * 1e6 if price is not None else None,
        )  # fmt: skip

    def repeated(self, heat: float, batch: int) -> list[Text]:
        """The texts, as often as a batch needs them to be full."""
        return self.texts[heat] * math.ceil(batch / len(self.texts[heat]))

    def _texts(
        self, prompts: Sequence[Sequence[int]], logs: Sequence[Text], heat: float
    ) -> list[Text]:
        """What the target has written or writes now, with what it knew on the way."""
        wanted = replace(self.plain.sampling, temperature=heat)
        found = [text._replace(sampling=wanted) for text in logs]
        if prompts:
            self.progress(f"the target writes, T = {heat:g}")
            samplings = [replace(wanted, seed=seed) for seed in range(len(prompts))]
            done = self.plain.generate([list(prompt) for prompt in prompts], sampling=samplings,
                                       max_new_tokens=self.config.tokens, batch_size=8)
            found += [Text([*one, *new.tokens], len(one), sampling)
                      for one, new, sampling in zip(prompts, done, samplings, strict=True)]
        found = [text for text in found if len(text.tokens) > text.prompt + 1]
        if not found:
            raise BadInput("the target writes nothing behind these prompts; give others")
        self.progress(f"reading what was written, T = {heat:g}")
        return [recorded(self.plain, text, self.layers) for text in found]

    def _machine(self) -> Machine:
        config, target = self.config, self.plain.target
        if config.machine is not None:
            sizes = {name: size_of(one.model) for name, one in self.models.items()}
            return read_machine(config.machine, target.name, self.size, sizes)
        prompts = [text.tokens[: text.prompt] for text in self.texts[config.temperatures[0]]]
        most = max((one.default_budget for one in self.drafters.values()), default=0)
        timed = {name: one for name, one in self.drafters.items() if not is_light(name)}
        if light := [one for name, one in self.drafters.items() if name not in timed]:
            top = max(one.wants_top for one in light)
            timed[LIGHT] = Noise(target.vocab_size, silent=True, top=top)
            timed[LIGHT].default_budget = most
        return probe(self.plain, prompts, config.batches, config.temperatures, presets(most), timed,
                     self.progress)

    def _played(self, name: str, heat: float, texts: Sequence[Text]) -> Playback:
        """A drafter that knows nothing yet of these texts."""
        drafter = Plain() if name == PLAIN else self.drafters[name]
        if isinstance(drafter, DraftModel):
            known = self.drafts[name, heat]
            return PlayedDraft(texts, known * (len(texts) // len(known)), drafter)
        return PlayedDrafter(texts, copy.deepcopy(drafter) if is_light(name) else drafter)

    def _error(self, done: Sequence[Completion]) -> float:
        """Relative standard error: of tokens per round over texts, and of seconds."""
        rates = np.array([(one.stats.emitted, one.stats.rounds) for one in done], dtype=float)
        picks = np.random.default_rng(0).integers(len(rates), size=(200, len(rates)))
        emitted, rounds = np.moveaxis(rates[picks].sum(1), 1, 0)
        ratios = emitted / np.maximum(rounds, 1)
        return math.hypot(float(ratios.std() / ratios.mean()), self.machine.spread)

    def _draft_bytes(self, name: str) -> float:
        drafter = self.drafters.get(name)
        if isinstance(drafter, DraftModel):
            return 0.0 if drafter.model is self.plain.target else size_of(drafter.model).bytes
        heads = getattr(drafter, "head", None)
        return float(sum(one.nbytes for one in heads.parameters())) if heads is not None else 0.0


def learned(budget: Adaptive) -> dict[str, Any]:
    """What `begin_with` needs, as JSON."""
    costs = [[*shape, one.mean, one.seen] for shape, one in budget.costs.items()]
    found = {name: getattr(budget, name) for name in LEARNED}
    return {"most": budget.most, "sizes": budget.sizes, "costs": costs} | found


def begin_with(found: Mapping[str, Any]) -> Adaptive:
    """A budget that begins with what another had learned."""
    budget = Adaptive(found["most"], sizes=found["sizes"])
    for name in LEARNED:
        setattr(budget, name, found[name])
    for rows, context, mean, seen in found["costs"]:
        budget.now = budget.costs[rows, context] = one = Costs(budget.sizes)
        one.mean, one.seen = list(mean), list(seen)
    return budget


def is_light(name: str) -> bool:
    """Whether nothing in a drafter of this name has weights."""
    return set(name.split("+")) <= set(TRAINING_FREE)


def size_of(target: Any) -> Size:
    """What is read of a model in a step, packed and quantised layers included."""
    model = target.model
    own = sum(one.numel() for one in model.parameters() if isinstance(one, torch.nn.Parameter))
    packed = [one for one in model.modules() if isinstance(one, PackedLinear | QuantizedLinear)]
    count = own + sum(one.in_features * one.out_features for one in packed)
    return Size(float(weight_bytes(model)), float(count), float(target.position_bytes[0]))
