"""A rehearsal of decoding for another device: every part of a round under its rules. Knows decoder and rehearsal."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from draftproof.core.acceptance import RULES, Rule
from draftproof.core.params import Sampling
from draftproof.drafters.base import Drafter
from draftproof.engine.budget import Budget
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Engine
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import ForbiddenOnDevice
from draftproof.model.device_emulation import DeviceEmulation, EmulatedGaudi
from draftproof.model.target import Target

LENGTHS = tuple(range(1, 40, 2))
"""Twenty prompts of different lengths."""
PARTS = ("round", "draft", "read", "accept", "observe")
"""What a round is made of; "round" is the rest of it: the tree's frame, the cache's keeping, the text."""
GRAPHS = 3
"""At most so many graphs of a part for each number of drafted tokens: a draft model's first read has three widths."""


class Rehearsed(NamedTuple):
    """What a rehearsal counted. graphs: of each part of a round. prompts: graphs that reading prompts took, all parts."""

    rounds: int
    reads: int
    graphs: Mapping[str, int]
    prompts: int
    tokens: list[list[int]]


@torch.inference_mode()
def rehearse(
    engine: Engine,
    *,
    lengths: Sequence[int] = LENGTHS,
    new_tokens: int = 12,
    batch_size: int = 4,
    sampling: Sampling | None = None,
) -> Rehearsed:
    """Decode random prompts of these lengths under the rules of a device that compiles graphs, in closed shapes.

    The engine is warmed up first; then no shape, and no constant, may be new. Raises ForbiddenOnDevice for the first
    operator that breaks a rule, and where a part took more graphs than `GRAPHS` for each size of draft.
    """
    twin = _Rehearsing(engine)
    dice = torch.Generator().manual_seed(0)
    prompts = [torch.randint(engine.target.vocab_size, (length,), generator=dice).tolist() for length in lengths]
    with twin.rehearsal.running():
        for _ in range(2):                                  # constants are made in the first
            twin.rehearsal.forget()
            twin.warm_up(max(lengths) + new_tokens, batch_size=batch_size, sampling=sampling)
        twin.rehearsal.warm = True
        before = dict(twin.rehearsal.calls)
        done = twin.generate(prompts, max_new_tokens=new_tokens, sampling=sampling, batch_size=batch_size)
    seen = twin.rehearsal
    rounds = seen.calls["round"] - before.get("round", 0)
    graphs = {part: len(seen.graphs[part]) for part in PARTS}
    most = GRAPHS * len(getattr(twin.budget, "sizes", (0,)))
    for part, count in graphs.items():
        if count > most:
            raise ForbiddenOnDevice(f"{part} took {count} graphs, at most {most} were allowed: its shapes are not closed")
    prompt_graphs = sum(len(known) for part, known in seen.graphs.items() if part not in PARTS)
    return Rehearsed(rounds, seen.read, graphs, prompt_graphs, [one.tokens for one in done])


class _Rehearsing(Engine):
    """An engine like another, whose decoders rehearse."""

    def __init__(self, engine: Engine) -> None:
        self.__dict__.update(copy.copy(engine).__dict__)
        self.shapes = engine.shapes if engine.shapes.closed else ShapePolicy(closed=True)
        self.rehearsal = DeviceEmulation()

    def _decoder(self, target: Target, drafter: Drafter, budget: Budget, rows: int, capacity: int) -> Decoder:
        rule = self.lossy.rule if self.lossy else RULES[self.acceptance]
        return _Decoder(self.rehearsal, target, drafter, rule, budget, rows, capacity, self.shapes)


class _Decoder(Decoder):
    """Tells the rehearsal which part runs, and whether the rules hold."""

    def __init__(
        self, rehearsal: DeviceEmulation, target: Target, drafter: Drafter, rule: Rule, budget: Budget, rows: int, capacity: int,
        shapes: ShapePolicy,
    ) -> None:  # fmt: skip
        self.rehearsal, self.prefix = rehearsal, ""
        reader = cast(Target, _Parts(target, self, {"read": "read"}))
        guesser = cast(Drafter, _Parts(drafter, self, {"propose": "draft", "observe": "observe"}))
        watched = rule._replace(accept=self.part("accept", rule.accept))
        super().__init__(reader, guesser, watched, budget, rows, capacity, shapes)
        self.device = EmulatedGaudi(self.device.where)
        self.places = self._stored()

    def step(self, nodes: int | None = None, joining: Sequence[Sequence[SequenceState]] = ()) -> None:
        if self.twins is None:
            self._fill()
        with self.rehearsal.part("round", strict=True), self.rehearsal.reading(1):
            super().step(nodes, joining)
        if self._stored() != self.places:
            raise ForbiddenOnDevice("the KV cache moved in memory; a recorded graph would go on writing to the old place")

    def _stored(self) -> list[int]:
        return [store.data_ptr() for layer in self.cache.layers for store in layer.stores]

    def admit(self, *requests: Sequence[SequenceState]) -> None:
        self.prefix = "prompt: "
        super().admit(*requests)
        self.prefix = ""

    def _arrange(self, *args: Any) -> None:
        with self.rehearsal.free(), self.rehearsal.part("between rounds"):
            super()._arrange(*args)

    def part(self, name: str, call: Any) -> Any:
        """`call` as a part: of a round, or of a prompt's reading."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.rehearsal.part(self.prefix + name, strict=not self.prefix):
                return call(*args, **kwargs)

        return run


class _Parts:
    """Stands in for `inner`; its `verbs` are parts."""

    def __init__(self, inner: object, decoder: _Decoder, verbs: Mapping[str, str]) -> None:
        self._inner = inner
        for verb, name in verbs.items():
            setattr(self, verb, decoder.part(name, getattr(inner, verb)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
