"""The cost of a round on a machine, from timings there or from its data sheet.

Knows seconds, bytes and floating-point operations, but neither texts nor drafters.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from draftproof.errors import BadInput

LIGHT = "light"
"""Stands for what a drafter without weights costs besides its own drafting."""
OVERHEAD = 1e-3
"""Seconds of a round that no data sheet states: launches, the host."""
PRESETS = {
    "a100": (2.04e12, 312e12), "h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12),
    "b200": (8.0e12, 2250e12), "l4": (0.30e12, 121e12), "l40s": (0.864e12, 362e12),
    "rtx4090": (1.008e12, 165e12), "gaudi2": (2.45e12, 432e12), "gaudi3": (3.7e12, 1835e12),
}  # fmt: skip
"""Dense bfloat16 figures of data sheets: bytes per second, operations per second."""
Curve = tuple[tuple[float, float], ...]


class RoundTiming(NamedTuple):
    """Seconds of rounds with these numbers of rows and drafted nodes per row. drafter: "" for whole
    rounds, otherwise the drafter whose draft lengthens a round by these seconds."""

    drafter: str
    sampled: bool
    rows: float
    nodes: float
    seconds: float


class Size(NamedTuple):
    """The sizes that decide a model's speed: bytes and parameters per step, cache per token."""

    bytes: float
    parameters: float
    position_bytes: float = 0.0


@dataclass(frozen=True)
class Machine:
    """The seconds of an engine's work with one model.

    timed: for empty texts; others take `per_context` more per row and token. prompts: tokens and
    seconds. per_unread: by draft model, for a token that it has not read. spread: relative
    standard error of a time. noise: for rounds of one size, seconds divided by their median.
    """

    name: str
    model: str
    timed: tuple[RoundTiming, ...]
    prompts: Curve = ((0, 0.0), (1, 0.0))
    per_context: float = 0.0
    per_unread: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    noise: tuple[float, ...] = (1.0,)
    measured: bool = True

    def round(self, sampled: bool, rows: float, nodes: float, context: float) -> float:
        """Seconds of a round without its draft, with `nodes` after the root of each row. Between
        timed numbers of rows, the time depends on the total number of tokens."""
        tokens, more = rows * (1 + nodes), self.per_context * rows * context
        curves = self._curves("", sampled)
        by_rows = tuple((count, interpolate(curve, tokens / count - 1)) for count, curve in curves)
        return max(0.0, interpolate(by_rows, rows) + more)

    def prompt(self, tokens: int) -> float:
        return interpolate(self.prompts, max(tokens, self.prompts[0][0]))

    def draft(self, drafter: str, sampled: bool, rows: float, nodes: float) -> float:
        """Seconds of a draft; 0 if it was not timed."""
        curves = self._curves(drafter, sampled)
        by_rows = [(count, interpolate(curve, nodes)) for count, curve in curves]
        return max(0.0, interpolate(by_rows, rows)) if by_rows else 0.0

    def times(self, drafter: str) -> bool:
        """Whether a drafter's drafts were timed; otherwise their seconds here are used."""
        return any(timing.drafter == drafter for timing in self.timed)

    def _curves(self, drafter: str, sampled: bool) -> list[tuple[float, Curve]]:
        """Seconds by nodes for each number of rows; of greedy rounds if no others were timed."""
        return self._tables.get((drafter, sampled)) or self._tables.get((drafter, False), [])

    @cached_property
    def _tables(self) -> dict[tuple[str, bool], list[tuple[float, Curve]]]:
        tables: dict[tuple[str, bool], list[tuple[float, Curve]]] = {}
        for (drafter, sampled, rows), timings in groupby(
            sorted(self.timed), lambda timing: timing[:3]
        ):
            curve = tuple((timing.nodes, timing.seconds) for timing in timings)
            tables.setdefault((drafter, sampled), []).append((rows, curve))
        return tables


def interpolate(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate on the straight line through the nearest points."""
    if len(curve) == 1:
        return curve[0][1]
    right = min(max(1, bisect_left([at for at, _ in curve], x)), len(curve) - 1)
    (low, first), (high, second) = curve[right - 1 : right + 1]
    return first + (second - first) * (x - low) / (high - low)


def by_figures(
    name: str, model: str, bandwidth: float, compute: float, target: Size,
    drafts: Mapping[str, Size],
) -> Machine:  # fmt: skip
    """A machine by its data sheet. Good kernels reach three quarters of its bandwidth (bytes/s) and
    half of its operations/s; a model takes the longer of reading and computing."""
    bandwidth, compute = 0.75 * bandwidth, 0.5 * compute

    def curve(size: Size, overhead: float) -> Curve:
        """Seconds by the number of tokens read at once."""
        read, each = size.bytes / bandwidth, 2 * size.parameters / compute
        knee = max(1.5, read / each)
        return tuple((tokens, overhead + max(read, each * tokens))
                     for tokens in (1, knee, 2 * knee))  # fmt: skip

    prompts = curve(target, OVERHEAD)
    timed = [RoundTiming("", False, 1, tokens - 1, seconds) for tokens, seconds in prompts]
    timed += [RoundTiming(draft, False, rows, nodes, nodes * seconds)
              for draft, size in drafts.items()
              for rows, seconds in curve(size, OVERHEAD / 4)    # steps do not wait for the host
              for nodes in (0, 1)]  # fmt: skip
    unread = {draft: 2 * size.parameters / compute for draft, size in drafts.items()}
    return Machine(name, model, tuple(timed), prompts,
                   target.position_bytes / bandwidth, unread, 0.1, measured=False)  # fmt: skip


def read_machine(source: str, model: str, target: Size, drafts: Mapping[str, Size]) -> Machine:
    """Read a preset by its name, or a file with the output of `plan --json` or a data sheet."""
    file, name = Path(source), source.lower()
    if name in PRESETS:
        return by_figures(name, model, *PRESETS[name], target, drafts)
    if not file.is_file():
        raise BadInput(f"machine was {source!r}; give a file, or one of {', '.join(PRESETS)}")
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        facts = facts.get("machine", facts)
        if "timed" not in facts:
            speeds = float(facts["bandwidth"]), float(facts["compute"])
            return by_figures(str(facts.get("name", file.stem)), model, *speeds, target, drafts)
        timed = tuple(RoundTiming(*row) for row in facts["timed"])
        prompts, noise = tuple(map(tuple, facts["prompts"])), tuple(facts["noise"])
        machine = Machine(**facts | {"timed": timed, "prompts": prompts, "noise": noise})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        wanted = 'what plan --json wrote, or {"bandwidth": bytes/s, "compute": operations/s}'
        raise BadInput(
            f"{file} is not a machine description ({error}); it must hold {wanted}"
        ) from error
    if machine.model != model:
        raise BadInput(f"{file} was timed with {machine.model}, not with {model}; time it there, "
                       "or give the machine's bandwidth and compute")  # fmt: skip
    return machine
