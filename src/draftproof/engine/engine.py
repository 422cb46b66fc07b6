"""The engine: prompts in, completions out. Owns target, drafter, rule and budget; the batch is the decoder's."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from threading import RLock

import torch

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.core.tree import CHUNKS
from draftproof.core.typical import Typical
from draftproof.drafters.base import Drafter
from draftproof.drafters.plain import Plain
from draftproof.engine.batch import Request
from draftproof.engine.budget import Adaptive, Budget, Fixed
from draftproof.engine.decoder import Decoder
from draftproof.engine.prompts import Prompt as Prompt
from draftproof.engine.ranks import LedBudget, LedDrafter, led_rule
from draftproof.engine.request import RequestReader
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.stats import Clock, RoundStats, State
from draftproof.errors import BadInput, DraftproofError
from draftproof.model.device import Device
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec

ROWS = 8
"""Rows at a time when nobody says."""

if hasattr(os, "register_at_fork"):     # a forked process has no threads, and OpenMP would wait for them
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@dataclass(frozen=True)
class Completion:
    """What came of one prompt, or of one sample of it.

    tokens: the new tokens, an end token included. text: without special tokens and without the stop string.
    finish_reason: "stop" (an end token or a stop string), "length", or "error": there was no next token, and `error` says
    why; the text up to there is what it would have been. logprobs: natural logarithms under the
    unprocessed model, one per token, or None. prompt, sample: which of the prompts, which of its samples.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[float] | None
    stats: RoundStats
    prompt: int = 0
    sample: int = 0
    error: DraftproofError | None = None

    def checked(self) -> Completion:
        """Itself; raises the error that ended it, if one did."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True)
class Chunk:
    """New text of a stream: pieces, each with whether its token was drafted. The last carries the completion."""

    pieces: list[tuple[str, bool]]
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


class Engine:
    """Writes text with a target and a drafter; the text is what the target would have written alone.

    acceptance: "match" (default: the same text with any drafter), "rejection" or "block" (the same law).
    lossy: a `Typical`, or True for its defaults: text that is *not* what the target alone would write, in place of an
    exact rule; how far it strays is in `RoundStats.distance_per_token`. It depends on the drafts, so unless a budget is
    given as many are drafted in every round: the same seed gives the same text.
    budget: draft tokens per row and round, always so many, or a `Budget`; None measures what pays (`Adaptive`), up to the
    drafter's default. What it learns stays with the engine.
    codec: the tokenizer; needed for text prompts and stop strings, token ids do without.
    sampling, stop_tokens: defaults for calls that name none.
    Calls may run at the same time, also from several threads: their rounds take turns.
    shapes: `ShapePolicy(closed=True)` takes the sizes of a batch from a small set; None leaves it to the device.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        codec: Codec | None = None,
        acceptance: str = "match",
        lossy: Typical | bool = False,
        budget: Budget | int | None = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (),
        shapes: ShapePolicy | None = None,
    ) -> None:
        self.lossy = Typical() if lossy is True else lossy or None
        self.acceptance = _checked_rule(acceptance, self.lossy)
        self.target, self.codec = target, codec
        self.drafter = drafter or Plain()
        self.shapes = shapes or ShapePolicy(closed=Device(target.device).compiles)
        usual = usual_budget(self.drafter) if self.lossy is None else Fixed(self.drafter.default_budget)
        if self.shapes.closed and isinstance(usual, Adaptive):
            usual = Adaptive(usual.most, sizes=self.shapes.sizes(usual.most))
        self.budget = Fixed(budget) if isinstance(budget, int) else budget or usual
        self.sampling, self.stop_tokens = sampling or Sampling(), tuple(stop_tokens)
        self.clock = Clock()                            # where the seconds of the call went that began last
        self.lock = RLock()                            # held while a prompt is checked, and in each round
        if self.budget.most >= target.context:
            raise BadInput(f"{self.budget.most} draft tokens per round do not fit a context of {target.context}; draft fewer")

    @property
    def requests(self) -> RequestReader:
        """What checks prompts and sampling parameters."""
        return RequestReader(self.target, self.codec, self.stop_tokens)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        n: int = 1,
        batch_size: int | None = None,
    ) -> list[Completion]:
        """Complete every prompt, `n` times each: completions in the order of prompts, samples side by side.

        sampling: one for all or one per prompt; None takes the model's own generation defaults. Sample i of a
        prompt is the same whatever `n` is. batch_size: rows at a time (default: all, up to 8).
        Raises BadInput, before anything runs, for a request that cannot be honoured.
        """
        done = self.as_completed(prompts, max_new_tokens=max_new_tokens, sampling=sampling, n=n, batch_size=batch_size)
        return sorted(done, key=lambda completion: (completion.prompt, completion.sample))

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        n: int = 1,
        batch_size: int | None = None,
    ) -> Iterator[Completion]:
        """As `generate`, but each completion comes as soon as it is finished."""
        rounds = self.rounds(prompts, max_new_tokens=max_new_tokens, sampling=sampling, n=n, batch_size=batch_size)
        return (self.completion(row) for rows in rounds for row in rows if row.finish_reason is not None)

    def rounds(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        n: int = 1,
        batch_size: int | None = None,
    ) -> Iterator[list[SequenceState]]:
        """As `generate`, a step at a time: after every prefill and every round the rows that had not ended before it.

        Those that wait are among them, and the first time all are. They are the engine's own: look, and change nothing.
        """
        if n < 1:
            raise BadInput(f"n was {n}; ask for at least 1 sample")
        if batch_size is not None and batch_size < 1:
            raise BadInput(f"batch_size was {batch_size}; it must be at least 1")
        with self.lock:
            requests = self.requests.read(prompts, max_new_tokens, self.sampling if sampling is None else sampling, n)
        rows = max(n, min(batch_size or ROWS, n * len(requests)))
        if self.shapes.closed and batch_size is not None:               # as many as were declared, needed or not
            rows = max(n, batch_size)
        return self._run(requests, rows)

    def check(self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None) -> None:
        """Raise BadInput if `generate` could not honour this request."""
        with self.lock:
            self.requests.read([prompt], max_new_tokens, sampling or self.sampling, 1)

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None
    ) -> Iterator[Chunk]:
        """Complete one prompt, a chunk of text per round: whole characters, nothing that a stop string may take back."""
        with self.lock:
            requests = self.requests.read([prompt], max_new_tokens, sampling or self.sampling, 1)
        return self._chunks(requests)

    def _chunks(self, requests: list[Request]) -> Iterator[Chunk]:
        for (row,) in self._run(requests, 1):
            yield Chunk(row.pieces(), self.completion(row) if row.finish_reason is not None else None)

    def _run(self, requests: list[Request], rows: int) -> Iterator[list[SequenceState]]:
        """Run all of them, at most `rows` rows at a time; see `rounds`."""
        waiting, left = deque(requests), [row for request in requests for row in request]
        if not waiting:
            return
        decoder = self.decoder(rows, max(len(row.prompt) + row.limit for row in left))
        batch, clock = decoder.batch, decoder.clock
        self.clock = clock
        begun: list[tuple[SequenceState, dict[str, float]]] = []
        try:
            with self.target.group.intact():
                while waiting or batch.running:
                    joining = [waiting.popleft() for _ in range(decoder.admissible(waiting))] if waiting else []
                    if joining:
                        begun += [(row, clock.seconds) for request in joining for row in request]
                    with self.lock:
                        if joining and not decoder.takes(joining):
                            decoder.admit(*joining)
                        else:
                            decoder.step(joining)
                    yield left
                    if len(batch.running) < len(begun):
                        left = [row for row in left if row.finish_reason is None]
                        begun = _clocked(begun, clock)
        finally:
            _clocked(begun, clock)                        # whoever stops listening is told as well

    def warm_up(self, tokens: int, *, batch_size: int = 1, sampling: Sampling | None = None) -> None:
        """Run once every shape that batches of so many rows, and texts of up to so many tokens, will take.

        For devices that compile what they meet, with closed shapes. sampling: what will be asked for; filters and penalties
        have shapes of their own.
        """
        rows, capacity = self.shapes.rows(batch_size), self.shapes.capacity(tokens + self.budget.most + 2)
        sizes = self.budget.sizes if isinstance(self.budget, Adaptive) else (self.budget.most,)
        pauses = (0, 2, 5) if len(sizes) > 1 else (0,)                  # a drafter catches up with what it missed
        scripts = [(size, *[0] * pause, size) for size in sizes for pause in pauses]
        longest = min(capacity, self.target.context) - self.budget.most - 3
        widths = [min(width, longest) for width in (*self.shapes.reads(capacity), CHUNKS[-1] + 1)]
        for length, script in [*product([1], scripts), *product(widths, [(size,) for size in sizes])]:
            decoder = self._decoder(_Script(script), rows, capacity)
            prompt = [0] * length
            params = self.requests.params(sampling or self.sampling, prompt, capacity)
            decoder.admit([SequenceState(prompt, params, capacity)])
            for _ in script:
                decoder.step()

    def decoder(self, rows: int, tokens: int) -> Decoder:
        """A decoder of so many rows, of texts of up to so many tokens; `lock` is to be held in its rounds."""
        capacity = self.shapes.capacity(tokens + self.budget.most + 2)
        with self.lock:
            return self._decoder(self.budget, self.shapes.rows(rows), capacity)

    def _decoder(self, budget: Budget, rows: int, capacity: int) -> Decoder:
        rule = self.lossy.rule if self.lossy else RULES[self.acceptance]
        drafter, group = self.drafter, self.target.group
        if not group.alone:
            drafter, rule = LedDrafter(drafter, group), led_rule(rule, group)
            budget = LedBudget(budget, group) if isinstance(budget, Adaptive) else budget
        return Decoder(self.target, drafter, rule, budget, rows, capacity, self.shapes)

    def completion(self, row: SequenceState) -> Completion:
        """What came of a row that has ended."""
        logprobs = row.logprobs if row.params.sampling.logprobs else None
        reason = row.finish_reason or "length"
        return Completion(row.text, row.tokens, reason, logprobs, row.stats, row.request, row.params.sample, row.error)


class _Script(Budget):
    """Sizes that were written down, round by round."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.most, self._left = max(sizes), list(sizes)

    def choose(self, state: State) -> int:
        return self._left.pop(0)


def usual_budget(drafter: Drafter) -> Budget:
    """The budget when nobody says: one that measures, and nothing at all for a drafter that drafts nothing."""
    return Adaptive(drafter.default_budget) if drafter.default_budget else Fixed(0)


def _clocked(begun: list[tuple[SequenceState, dict[str, float]]], clock: Clock) -> list[tuple[SequenceState, dict[str, float]]]:
    """Tell rows what the seconds were since they began; return those that still run."""
    for row, since in begun:
        row.stats.seconds = {part: clock.seconds[part] - since.get(part, 0.0) for part in row.stats.seconds}
    return [(row, since) for row, since in begun if row.finish_reason is None]


def _checked_rule(acceptance: str, lossy: Typical | None) -> str:
    """The name of the rule; lossy is only what says so."""
    if acceptance == "typical" and lossy is None:
        raise BadInput("typical acceptance is lossy: the text is not what the target would write; ask for it with lossy=True")
    if lossy is not None and acceptance not in ("match", "typical"):
        raise BadInput(f"both lossy acceptance and the exact rule {acceptance!r} were asked for; leave one of them out")
    if lossy is None and acceptance not in RULES:
        raise BadInput(f"acceptance was {acceptance!r}; choose one of {', '.join(RULES)}")
    return "typical" if lossy is not None else acceptance
