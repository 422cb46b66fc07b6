"""The engine: prompts in, completions out. Owns target, drafter, rule and budget."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from threading import RLock
from typing import Unpack

import torch

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling, is_whole
from draftproof.core.typical import Typical
from draftproof.drafters.base import Drafter, Plain
from draftproof.engine.batch import Request
from draftproof.engine.budget import Adaptive, Budget, Fixed
from draftproof.engine.completion import Chunk as Chunk
from draftproof.engine.completion import Completion as Completion
from draftproof.engine.completion import Options, Wanted
from draftproof.engine.decoder import Decoder
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.engine.prompts import Prompt as Prompt
from draftproof.engine.request import RequestReader
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.stats import Clock, RoundStats, State
from draftproof.engine.wrappers import BroadcastBudget, BroadcastDrafter, broadcast_rule
from draftproof.errors import BadInput, reject_unknown_options
from draftproof.model.device import Device
from draftproof.model.kv_cache import CHUNKS
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec

if hasattr(os, "register_at_fork"):     # a forked process lacks the threads OpenMP would wait for
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class Engine:
    """Writes text with a target and a drafter: the text that the target would have written alone.

    acceptance: "match" (default: the same text with any drafter), "rejection" or "block" (the same
        distribution).
    lossy: a `Typical`, or True for its defaults: text that is *not* what the target alone would
        write; how far it strays is in `RoundStats.distance_per_token`. It depends on the drafts, so
        unless a budget is given as many are drafted in every round: one seed gives one text.
    budget: draft tokens per row and round, always so many, or a `Budget`; None measures what pays
        (`Adaptive`), up to the drafter's default. What it learns stays with the engine.
    codec: the tokenizer; needed for text prompts and stop strings, token ids do without.
    sampling, stop_tokens: defaults for calls that name none.
    shapes: `ShapePolicy(closed=True)` takes the sizes of a batch from a small set; None leaves it
        to the device.
    Calls may run at the same time, also from several threads: their rounds take turns.
    stats: of all calls together; `seconds` are wall time.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, codec: Codec | None = None,
        acceptance: str = "match", lossy: Typical | bool = False,
        budget: Budget | int | None = None, sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (), shapes: ShapePolicy | None = None,
    ) -> None:  # fmt: skip
        self.lossy = Typical() if lossy is True else lossy or None
        if acceptance not in (("match", "typical") if self.lossy else RULES):
            raise BadInput(
                f"acceptance was {acceptance!r}; choose one of {', '.join(RULES)}, or lossy=True, "
                "which is not what the target would write, and leave the other one out"
            )
        self.acceptance = "typical" if self.lossy else acceptance
        self.target, self.codec, self.drafter = target, codec, drafter or Plain()
        self.shapes = shapes or ShapePolicy(closed=Device(target.device).compiles)
        usual = Fixed(self.drafter.default_budget) if self.lossy else usual_budget(self.drafter)
        if self.shapes.closed and isinstance(usual, Adaptive):
            usual = Adaptive(usual.most, sizes=self.shapes.sizes(usual.most))
        self.budget = Fixed(budget) if isinstance(budget, int) else budget or usual
        self.sampling, self.stop_tokens = sampling or Sampling(), tuple(stop_tokens)
        self.clock = Clock()            # where the seconds went of the call that began last
        self.prefixes: PrefixCache | None = None    # texts whose beginnings are not read again
        self.lock = RLock()             # held while a prompt is checked, and in each round
        self.stats = RoundStats()
        if self.budget.most >= target.context:
            asked = f"{self.budget.most} draft tokens per round"
            raise BadInput(f"{asked} do not fit a context of {target.context}; draft fewer")

    def __repr__(self) -> str:
        target, budget = self.target, self.budget
        size = str(budget.most) if isinstance(budget, Fixed) else f"up to {budget.most}"
        return (f"Engine(model={target.name!r}, dtype={str(target.dtype).removeprefix('torch.')}, "
                f"device={target.device}, drafter={self.drafter.name!r}, draft tokens={size}, "
                f"acceptance={self.acceptance!r})")

    @property
    def requests(self) -> RequestReader:
        """What checks prompts and sampling parameters."""
        if self.target.encodes:
            from draftproof.engine.sources import SourceReader

            return SourceReader(self.target, self.codec, self.stop_tokens)
        return RequestReader(self.target, self.codec, self.stop_tokens)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> list[Completion]:
        """Complete every prompt, `n` times each: in the order of prompts, samples side by side.

        options: `max_new_tokens`, `sampling`, `n`, `batch_size`; see `Options`.
        Raises BadInput, before anything runs, for a request that cannot be honoured.
        """
        reject_unknown_options("Engine.generate", options, Options.__annotations__)
        done = self.as_completed(prompts, **options)
        return sorted(done, key=lambda completion: (completion.prompt, completion.sample))

    def as_completed(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> Iterator[Completion]:
        """As `generate`, but each completion comes as soon as it is finished."""
        reject_unknown_options("Engine.as_completed", options, Options.__annotations__)
        rounds = self.rounds(prompts, **options)
        return (self.completion(row) for rows in rounds for row in rows if row.finish_reason)

    def rounds(
        self, prompts: Prompt | Sequence[Prompt], *, max_new_tokens: int | None = None,
        sampling: Wanted = None, n: int = 1, batch_size: int | None = None,
    ) -> Generator[list[SequenceState], None, None]:  # fmt: skip
        """As `generate`, a step at a time: after every prefill and every round the rows that had
        not ended before it.

        Those that wait are among them, and the first time all are. They are the engine's own: look,
        and change nothing but a `finish_reason` that is None, which ends a row.
        """
        for name, given in (("n", n), ("batch_size", 1 if batch_size is None else batch_size)):
            if not is_whole(given) or given < 1:
                raise BadInput(f"{name} was {given!r:.60}; it must be a whole number, at least 1")
        requests = self._read(prompts, max_new_tokens, sampling, n)
        rows = max(n, min(batch_size or 8, n * len(requests)))
        if self.shapes.closed and batch_size is not None:       # as many as declared, needed or not
            rows = max(n, batch_size)
        return self._run(requests, rows)

    def check(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None
    ) -> None:
        """Raise BadInput if `generate` could not honour this request."""
        self._read([prompt], max_new_tokens, sampling)

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None
    ) -> Generator[Chunk, None, None]:
        """Complete one prompt, a chunk per round, of which no stop string takes anything back."""
        rounds = self._run(self._read([prompt], max_new_tokens, sampling), 1)
        return (Chunk(row.pieces(), self.completion(row) if row.finish_reason else None)
                for (row,) in rounds)

    def _read(
        self, prompts: Prompt | Sequence[Prompt], limit: int | None, sampling: Wanted, n: int = 1
    ) -> list[Request]:
        wanted = self.sampling if sampling is None else sampling
        with self.lock:
            return self.requests.read(prompts, limit, wanted, n)

    def _run(
        self, requests: list[Request], rows: int
    ) -> Generator[list[SequenceState], None, None]:
        """Run all of them, at most `rows` rows at a time; see `rounds`."""
        waiting, all_rows = deque(requests), [row for request in requests for row in request]
        if not waiting:
            return
        decoder = self.decoder(rows, max(len(row.prompt) + row.limit for row in all_rows))
        self.clock, batch, left, running = decoder.clock, decoder.batch, all_rows, 0
        try:
            with decoder.target.group.intact():
                while waiting or batch.running:
                    count = decoder.admissible(waiting) if waiting else 0
                    with self.lock:
                        if count:
                            joining = [waiting.popleft() for _ in range(count)]
                            running += sum(map(len, joining))
                            decoder.admit(*joining)
                        else:
                            decoder.step()
                    yield left
                    decoder.retire()                    # rows that the caller ended
                    if len(batch.running) < running:
                        running = len(batch.running)
                        left = [row for row in left if row.finish_reason is None]
        finally:
            with self.lock:
                for row in all_rows:
                    self.stats.add(replace(row.stats, seconds={}))
                self.stats.add(RoundStats(seconds=decoder.clock.seconds))

    def warm_up(
        self, tokens: int, *, batch_size: int = 1, sampling: Sampling | None = None
    ) -> None:
        """Run once every shape that batches of so many rows, and texts of up to so many tokens,
        will take.

        For devices that compile what they meet, with closed shapes. sampling: what will be asked
        for; filters and penalties have shapes of their own.
        """
        most, rows = self.budget.most, self.shapes.rows(batch_size)
        capacity = self.shapes.capacity(tokens + most + 2)
        longest = min(capacity, self.target.context) - most - 3
        sizes = self.budget.sizes if isinstance(self.budget, Adaptive) else (most,)
        pauses = (0, 2, 5) if len(sizes) > 1 else (0,)  # a drafter catches up with what it missed
        scripts = [(1, [size, *[0] * pause, size]) for size in sizes for pause in pauses]
        lengths = {min(width, longest) for width in (*CHUNKS, CHUNKS[-1] + 1)}
        scripts += [(length, [size]) for length in sorted(lengths) for size in sizes]
        wanted = replace(sampling or self.sampling, stop=(), stop_when=())      # nothing ends early
        if wanted.min_new_tokens:
            wanted = replace(wanted, min_new_tokens=capacity, max_new_tokens=None)
        else:
            wanted = replace(wanted, stop_tokens=(), stop_token_ids=())
        for length, script in scripts:
            decoder, text = self._decoder(_Script(script), rows, capacity), [0] * length
            params = self.requests.params(wanted, text, capacity)
            with self.lock:
                decoder.admit([SequenceState(text, params, capacity)])
                for _ in list(script):
                    decoder.step()

    def decoder(self, rows: int, tokens: int) -> Decoder:
        """For so many rows of texts of up to so many tokens; `lock` is to be held in its rounds."""
        capacity = self.shapes.capacity(tokens + self.budget.most + 2)
        with self.lock:
            return self._decoder(self.budget, self.shapes.rows(rows), capacity)

    def completion(self, row: SequenceState) -> Completion:
        """What came of a row that has ended."""
        sampling = row.params.sampling
        return Completion(
            row.text, row.tokens, row.finish_reason or "length",
            row.logprobs if sampling.logprobs else None, row.stats, row.request, row.params.sample,
            row.error, row.top_logprobs if sampling.top_logprobs else None,
        )  # fmt: skip

    def _decoder(self, budget: Budget, rows: int, capacity: int) -> Decoder:
        rule = self.lossy.rule if self.lossy else RULES[self.acceptance]
        drafter, group = self.drafter, self.target.group
        if not group.alone:
            drafter, rule = BroadcastDrafter(drafter, group), broadcast_rule(rule, group)
            if isinstance(budget, Adaptive):
                budget = BroadcastBudget(budget, group)
        return Decoder(self.target, drafter, rule, budget, rows, capacity, self.shapes, None,
                       self.prefixes)


class _Script(Budget):
    """Sizes that were written down, round by round."""

    def __init__(self, sizes: list[int]) -> None:
        self.most, self.sizes = max(sizes), sizes

    def choose(self, state: State) -> int:
        return self.sizes.pop(0)


def usual_budget(drafter: Drafter) -> Budget:
    """The budget when nobody says: one that measures, or none for a drafter that drafts nothing."""
    return Adaptive(drafter.default_budget) if drafter.default_budget else Fixed(0)
