"""Predicts from texts, drafters and a machine which drafter pays, how much, and at what cost."""

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
from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.plan.machine import LIGHT, Machine, Size, read_machine
from draftproof.plan.playback import Playback, PlayedDraft, PlayedDrafter
from draftproof.plan.probe import RandomDrafter, probe
from draftproof.plan.recording import Text, drafts_of, recorded
from draftproof.plan.replay import replay
from draftproof.requests.stats import RoundStats
from draftproof.weights.packed_linear import PackedLinear
from draftproof.weights.quantize import weight_bytes
from draftproof.weights.quantized_linear import QuantizedLinear

REPLAYS = 5
"""Replays of a configuration whose budget depends on the noise of its clock; the median counts."""
AUTO, PLAIN = "auto", "none"
"""The adaptive budget, which is the default, and the drafter of plain decoding."""
LEARNED = ("accepted", "offered", "hits", "tries", "chain", "per_unread")
"""What an adaptive budget has learned besides costs."""


@dataclass(frozen=True)
class PlanConfig:
    """The question: rows per batch, temperatures, new tokens per prompt; price per hour.

    machine: a preset or a file; None times this machine.
    """

    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    tokens: int = 64
    price: float | None = None
    machine: str | None = None


@dataclass(frozen=True)
class Prediction:
    """A drafter's prediction for a batch, temperature and budget. speed_up: over plain decoding, in
    the 95 % interval `low` to `high`. memory: of weights and cache. cost: per million tokens."""

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
    """All results. start: the learned state of each drafter's budget, for `run --plan`.
    """

    model: str
    config: PlanConfig
    machine: Machine
    texts: int
    predictions: list[Prediction]
    start: dict[str, object]

    def rows(self) -> list[Prediction]:
        """The best budget of each drafter and setting."""
        best: dict[object, Prediction] = {}
        for prediction in self.predictions:
            key = prediction.temperature, prediction.batch, prediction.drafter
            best[key] = max(best.get(key, prediction), prediction, key=attrgetter("speed_up"))
        return list(best.values())

    def best(self, drafted: bool = False) -> Prediction:
        """The fastest prediction of the first setting, with or without plain decoding."""
        first = self.config.batches[0], self.config.temperatures[0]
        return max((prediction for prediction in self.predictions
                    if (prediction.batch, prediction.temperature) == first
                    and not (drafted and prediction.drafter == PLAIN)),
                   key=attrgetter("speed_up"))  # fmt: skip


class Planner:
    """Holds what predictions share: recorded texts of the target, drafts, and the machine.

    plain: an engine of the target without a drafter. logs: texts that it wrote earlier, in addition
    to those it writes now after `prompts`. learned: the adaptive budget's state, by drafter.
    """

    def __init__(
        self, plain: Engine, drafters: Mapping[str, Drafter], prompts: Sequence[Sequence[int]],
        logs: Sequence[Text], config: PlanConfig,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:  # fmt: skip
        self.plain, self.drafters, self.config, self.progress = plain, drafters, config, progress
        self.models = {name: drafter for name, drafter in drafters.items()
                       if isinstance(drafter, DraftModel)}
        layers = {drafter.hidden_layers for drafter in drafters.values() if drafter.hidden_layers}
        if len(layers) > 1:
            raise BadInput("drafters that read different hidden layers cannot be planned at once")
        self.layers = next(iter(layers), ())
        self.size, self.learned = size_of(plain.target), dict[str, object]()
        self._plain: dict[tuple[float, int], float] = {}    # seconds without drafts
        self.texts = {temperature: self._texts(prompts, logs, temperature)
                      for temperature in config.temperatures}
        self.machine = self._machine()
        progress("draft models read what was written")
        self.drafts = {
            (name, temperature): [drafts_of(plain, text, cast(Target, drafter.model))
                                  for text in texts]
            for name, drafter in self.models.items() for temperature, texts in self.texts.items()
        }

    def plan(self) -> Plan:
        """Make all predictions."""
        predictions = list[Prediction]()
        for temperature, batch in product(self.config.temperatures, self.config.batches):
            predictions.append(self.predict(PLAIN, batch, temperature, 0))
            for name, drafter in self.drafters.items():
                self.progress(f"replaying: {name}, batch {batch}, T = {temperature:g}")
                sizes: list[int | str] = [*presets(drafter.max_draft_tokens)[1:], AUTO]
                predictions += [self.predict(name, batch, temperature, size) for size in sizes]
        count = sum(map(len, self.texts.values()))
        name = self.plain.target.name
        return Plan(name, self.config, self.machine, count, predictions, self.learned)

    def predict(self, name: str, batch: int, temperature: float, size: int | str) -> Prediction:
        """Replay one configuration, with `size` draft tokens in every round, or with an adaptive
        budget."""
        texts, total, runs = self.repeated(temperature, batch), RoundStats(), []
        for seed in range(REPLAYS if size == AUTO else 1):
            drafter = self._played(name, temperature, texts)
            budget = Adaptive(drafter.max_draft_tokens) if size == AUTO else Fixed(int(size))
            runs.append(replay(self.plain, drafter, texts, budget, self.machine, batch, name, seed))
            if isinstance(budget, Adaptive):
                self.learned.setdefault(name, learned(budget))
        seconds, done = sorted(runs, key=itemgetter(0))[len(runs) // 2]
        if name == PLAIN:
            self._plain[temperature, batch] = seconds
        elif (temperature, batch) not in self._plain:
            self.predict(PLAIN, batch, temperature, 0)
        for completion in done:
            total.add(completion.stats)
        chance = pstdev(time / seconds for time, _ in runs)
        error = 2 * math.hypot(self._error(done), chance) if name != PLAIN else 0.0
        up, price = self._plain[temperature, batch] / seconds, self.config.price
        per_second = sum(len(completion.tokens) for completion in done) / seconds
        longest = max(len(text.tokens) for text in texts)
        return Prediction(
            name, batch, temperature, size, total.tokens_per_round, per_second,
            up, up * max(0.0, 1 - error), up * (1 + error), total.acceptance_by_position,
            self.size.bytes + self._draft_bytes(name) + batch * longest * self.size.position_bytes,
            price / 3600 / per_second * 1e6 if price is not None else None,
        )  # fmt: skip

    def repeated(self, temperature: float, batch: int) -> list[Text]:
        """The texts, repeated until they fill the batch."""
        return self.texts[temperature] * math.ceil(batch / len(self.texts[temperature]))

    def _texts(
        self, prompts: Sequence[Sequence[int]], logs: Sequence[Text], temperature: float
    ) -> list[Text]:
        """The target's texts, earlier ones and new ones, with its records for each position."""
        wanted = replace(self.plain.sampling, temperature=temperature)
        texts = [text._replace(sampling=wanted) for text in logs]
        if prompts:
            self.progress(f"the target writes, T = {temperature:g}")
            samplings = [replace(wanted, seed=seed) for seed in range(len(prompts))]
            done = self.plain.generate([list(prompt) for prompt in prompts], sampling=samplings,
                                       max_new_tokens=self.config.tokens, batch_size=8)
            texts += [Text([*prompt, *new.tokens], len(prompt), sampling)
                      for prompt, new, sampling in zip(prompts, done, samplings, strict=True)]
        texts = [text for text in texts if len(text.tokens) > text.prompt + 1]
        if not texts:
            raise BadInput("the target writes nothing after these prompts; give others")
        self.progress(f"reading what was written, T = {temperature:g}")
        return [recorded(self.plain, text, self.layers) for text in texts]

    def _machine(self) -> Machine:
        config, target = self.config, self.plain.target
        if config.machine is not None:
            sizes = {name: size_of(drafter.model) for name, drafter in self.models.items()}
            return read_machine(config.machine, target.name, self.size, sizes)
        prompts = [text.tokens[: text.prompt] for text in self.texts[config.temperatures[0]]]
        most = max((drafter.max_draft_tokens for drafter in self.drafters.values()), default=0)
        timed = {name: drafter for name, drafter in self.drafters.items() if not is_light(name)}
        if light := [drafter for name, drafter in self.drafters.items() if name not in timed]:
            top = max(drafter.top_k_needed for drafter in light)
            timed[LIGHT] = RandomDrafter(target.vocab_size, silent=True, top=top)
            timed[LIGHT].max_draft_tokens = most
        return probe(self.plain, prompts, config.batches, config.temperatures, presets(most), timed,
                     self.progress)

    def _played(self, name: str, temperature: float, texts: Sequence[Text]) -> Playback:
        """A drafter that does not know these texts yet."""
        drafter = Plain() if name == PLAIN else self.drafters[name]
        if isinstance(drafter, DraftModel):
            known = self.drafts[name, temperature]
            return PlayedDraft(texts, known * (len(texts) // len(known)), drafter)
        return PlayedDrafter(texts, copy.deepcopy(drafter) if is_light(name) else drafter)

    def _error(self, done: Sequence[Completion]) -> float:
        """The relative standard error from tokens per round over texts and from seconds."""
        stats = [completion.stats for completion in done]
        rates = np.array([(row.emitted, row.rounds) for row in stats], dtype=float)
        picks = np.random.default_rng(0).integers(len(rates), size=(200, len(rates)))
        emitted, rounds = np.moveaxis(rates[picks].sum(1), 1, 0)
        ratios = emitted / np.maximum(rounds, 1)
        return math.hypot(float(ratios.std() / ratios.mean()), self.machine.spread)

    def _draft_bytes(self, name: str) -> float:
        drafter = self.drafters.get(name)
        if isinstance(drafter, DraftModel):
            return 0.0 if drafter.model is self.plain.target else size_of(drafter.model).bytes
        heads = getattr(drafter, "head", None)
        if heads is None:
            return 0.0
        return float(sum(parameter.nbytes for parameter in heads.parameters()))


def learned(budget: Adaptive) -> dict[str, object]:
    """The state of a budget for `begin_with`, as JSON."""
    costs = [[*shape, cost.mean, cost.seen] for shape, cost in budget.costs.items()]
    values = {name: getattr(budget, name) for name in LEARNED}
    return {"most": budget.max_draft_tokens, "sizes": budget.sizes, "costs": costs} | values


def begin_with(learned: Mapping[str, Any]) -> Adaptive:
    """A budget that starts from another one's learned state."""
    budget = Adaptive(learned["most"], sizes=learned["sizes"])
    for name in LEARNED:
        setattr(budget, name, learned[name])
    for rows, context, mean, seen in learned["costs"]:
        budget.now = budget.costs[rows, context] = table = Costs(budget.sizes)
        table.mean, table.seen = list(mean), list(seen)
    return budget


def is_light(name: str) -> bool:
    """Whether a drafter of this name has no weights."""
    return set(name.split("+")) <= set(TRAINING_FREE)


def size_of(target: Any) -> Size:
    """The size that a step reads of a model, including packed and quantised layers."""
    model = target.model
    parameters = sum(parameter.numel() for parameter in model.parameters()
                     if isinstance(parameter, torch.nn.Parameter))
    packed = [module for module in model.modules()
              if isinstance(module, PackedLinear | QuantizedLinear)]
    count = parameters + sum(module.in_features * module.out_features for module in packed)
    return Size(float(weight_bytes(model)), float(count), float(target.position_bytes[0]))
