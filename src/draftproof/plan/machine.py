"""What a round costs on a machine: as it was timed there, or by figures of its data sheet.

Knows seconds, bytes and floating-point operations; knows nothing of texts and drafters.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftproof.errors import BadInput

SHARE_OF_BANDWIDTH, SHARE_OF_COMPUTE = 0.75, 0.5
"""What good kernels reach of a data sheet's figures."""


ALLOWED, LIKELIEST = "", "likeliest"
"""Stand for a drafter that drafts nothing of what it may, and for one that costs nothing but to
find the likeliest successors of every node."""


class Timed(NamedTuple):
    """Seconds of rounds of so many rows and drafted nodes per row; draft: of the draft alone, 0 for
    the rest of a round. drafter: whose, "" in rounds, where that makes no difference."""

    drafter: str
    sampled: bool
    rows: int
    nodes: int
    seconds: float


@dataclass(frozen=True)
class Probe:
    """A machine as it was timed with one model.

    rounds: of empty texts; others take `per_context` more per row and token. prompts: tokens and
    seconds. per_unread: by draft model. spread: relative standard error of a time.
    noise: of rounds of one size, seconds over their median.
    """

    name: str
    model: str
    rounds: tuple[Timed, ...]
    drafts: tuple[Timed, ...] = ()
    prompts: tuple[tuple[float, float], ...] = ((0, 0.0), (1, 0.0))
    per_context: float = 0.0
    per_unread: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    noise: tuple[float, ...] = (1.0,)
    watts: float | None = None
    measured = True

    def round(self, sampled: bool, rows: float, nodes: float, context: float) -> float:
        """A round without its draft: `nodes` read behind the root of each row. Between numbers of
        rows that were timed, as many tokens in all take about as long."""
        more = self.per_context * rows * context
        tokens, curves = rows * (1 + nodes), self._rounds[sampled]
        by_rows = ((count, along(curve, tokens / count - 1)) for count, curve in curves)
        return max(0.0, along(tuple(by_rows), rows) + more)

    def prompt(self, tokens: int) -> float:
        return along(self.prompts, max(tokens, self.prompts[0][0]))

    def draft(self, drafter: str, sampled: bool, rows: float, nodes: float, own: float) -> float:
        """What a draft takes; own: seconds it took here, where it was really made."""
        table = self._drafts.get((drafter, sampled))
        if table is None:
            return own
        return along(tuple((count, along(curve, nodes)) for count, curve in table), rows)

    def allowed(self, sampled: bool, rows: float, most: float, nodes: float) -> float:
        """What a round takes that may draft more than it does: noise is made for the most."""
        more, less = (self.draft(ALLOWED, sampled, rows, some, 0.0) for some in (most, nodes))
        return max(0.0, more - less)

    def unread(self, drafter: str, tokens: float) -> float:
        """What a draft model takes to read tokens that it lacks."""
        return self.per_unread.get(drafter, 0.0) * tokens

    def times(self, drafter: str) -> bool:
        """Whether its drafts were timed; otherwise they take what they took here."""
        return any(one.drafter == drafter for one in self.drafts)

    @cached_property
    def _rounds(self) -> dict[bool, Table]:
        found = {one.sampled: _table([other for other in self.rounds
                                      if other.sampled == one.sampled]) for one in self.rounds}
        (first, *_), both = found.values(), (False, True)
        return {sampled: found.get(sampled, first) for sampled in both}

    @cached_property
    def _drafts(self) -> dict[tuple[str, bool], Table]:
        keys = {(one.drafter, one.sampled) for one in self.drafts}
        return {key: _table([one for one in self.drafts if (one.drafter, one.sampled) == key])
                for key in keys}  # fmt: skip


Curve = tuple[tuple[float, float], ...]
Table = tuple[tuple[int, Curve], ...]


def _table(timed: list[Timed]) -> Table:
    """Per number of rows its seconds by nodes, rows and nodes rising."""
    ordered = sorted(timed, key=lambda one: (one.rows, one.nodes))
    return tuple((rows, tuple((one.nodes, one.seconds) for one in some))
                 for rows, some in groupby(ordered, key=lambda one: one.rows))  # fmt: skip


def along(curve: Curve, x: float) -> float:
    """On the straight line through the nearest points."""
    if len(curve) == 1:
        return curve[0][1]
    right = min(max(1, bisect_left([at for at, _ in curve], x)), len(curve) - 1)
    (low, first), (high, second) = curve[right - 1 : right + 1]
    return first + (second - first) * (x - low) / (high - low)


class Size(NamedTuple):
    """What of a model decides its speed: bytes and parameters read in a step, cache per token."""

    bytes: float
    parameters: float
    position_bytes: float = 0.0


NOTHING = Size(0, 0)


@dataclass(frozen=True)
class Figures:
    """A machine by its data sheet, for a target and draft models of these sizes.

    bandwidth: bytes per second of memory. compute: operations per second in the model's dtype.
    overhead: seconds of a round that no figure says: launches, the host.
    """

    name: str
    bandwidth: float
    compute: float
    overhead: float = 1e-3
    watts: float | None = None
    spread, noise = 0.1, (1.0,)
    target: Size = NOTHING
    drafts: Mapping[str, Size] = field(default_factory=dict)
    measured = False

    def round(self, sampled: bool, rows: float, nodes: float, context: float) -> float:
        return self.overhead + self._read(self.target, rows * (1 + nodes), rows * context)

    def prompt(self, tokens: int) -> float:
        return self.overhead + self._read(self.target, tokens, tokens)

    def draft(self, drafter: str, sampled: bool, rows: float, nodes: float, own: float) -> float:
        size = self.drafts.get(drafter)
        if size is None:
            return own
        step = self.overhead / 4 + self._read(size, rows, 0)    # steps follow without the host
        return nodes * step

    def allowed(self, sampled: bool, rows: float, most: float, nodes: float) -> float:
        return 0.0

    def unread(self, drafter: str, tokens: float) -> float:
        size = self.drafts.get(drafter)
        return self._read(size, tokens, 0) if size and tokens else 0.0

    def times(self, drafter: str) -> bool:
        return drafter in self.drafts

    def _read(self, size: Size, tokens: float, cached: float) -> float:
        """The slower of reading memory and of computing."""
        moved = size.bytes + size.position_bytes * cached
        computed = 2 * size.parameters * tokens
        return max(moved / (SHARE_OF_BANDWIDTH * self.bandwidth),
                   computed / (SHARE_OF_COMPUTE * self.compute))  # fmt: skip


Machine = Probe | Figures
"""Seconds of what an engine does, for one model."""
PRESETS = {
    one.name: one for one in (
        Figures("a100", 2.04e12, 312e12, watts=400), Figures("h100", 3.35e12, 989e12, watts=700),
        Figures("h200", 4.8e12, 989e12, watts=700), Figures("b200", 8.0e12, 2250e12, watts=1000),
        Figures("l4", 0.30e12, 121e12, watts=72), Figures("l40s", 0.864e12, 362e12, watts=350),
        Figures("rtx4090", 1.008e12, 165e12, watts=450),
        Figures("gaudi2", 2.45e12, 432e12, overhead=2e-3, watts=600),
        Figures("gaudi3", 3.7e12, 1835e12, overhead=2e-3, watts=900),
    )
}  # fmt: skip
"""Dense bfloat16 figures of data sheets: bytes per second, operations per second, watts."""


def read_machine(given: str, model: str, target: Size, drafts: Mapping[str, Size]) -> Machine:
    """A preset by its name, or a file: what `plan --json` wrote, or figures of a data sheet."""
    if given.lower() in PRESETS:
        return replace(PRESETS[given.lower()], target=target, drafts=drafts)
    file = Path(given)
    if not file.is_file():
        raise BadInput(f"machine was {given!r}; give a file, or one of {', '.join(PRESETS)}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        found = found.get("machine", found)
        if "rounds" in found:
            timed = {name: tuple(Timed(*one) for one in found[name])
                     for name in ("rounds", "drafts")}
            prompts = tuple((float(tokens), float(seconds)) for tokens, seconds in found["prompts"])
            noise = tuple(found["noise"])
            probe = Probe(**{**found, **timed, "prompts": prompts, "noise": noise})
        else:
            known = {one: float(found[one]) for one in ("overhead", "watts") if found.get(one)}
            speeds = float(found["bandwidth"]), float(found["compute"])
            card = Figures(str(found.get("name", file.stem)), *speeds, target=target, drafts=drafts)
            return replace(card, **known)  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        wanted = 'what plan --json wrote, or {"bandwidth": bytes/s, "compute": operations/s}'
        raise BadInput(f"{file} says no machine ({error}); it must hold {wanted}") from error
    if probe.model != model:
        raise BadInput(f"{file} was timed with {probe.model}, not with {model}; time it there, or "
                       "give the machine's bandwidth and compute")  # fmt: skip
    return probe


def as_json(machine: Machine) -> dict[str, Any]:
    """Everything, for `read_machine`."""
    found = asdict(machine)
    return {name: found[name] for name in found if name not in ("target", "drafts")} | (
        {"drafts": machine.drafts} if isinstance(machine, Probe) else {})  # fmt: skip


def smoothed(seconds: Mapping[int, float]) -> Curve:
    """By size; where more nodes seem to cost less than fewer, it is noise."""
    from scipy.optimize import isotonic_regression

    sizes = sorted(seconds)
    rising = isotonic_regression(np.array([seconds[size] for size in sizes])).x
    return tuple(zip(sizes, rising.tolist(), strict=True))
