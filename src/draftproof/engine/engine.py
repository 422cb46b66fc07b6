"""The engine: prompts in, completions out. Owns target, drafter, rule and budget."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from threading import RLock
from typing import Unpack

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.core.tree_shape import CHUNKS
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
from draftproof.engine.prompts import without_padding
from draftproof.engine.ranks import LedBudget, LedDrafter, led_rule
from draftproof.engine.request import RequestReader
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.sources import SourceReader
from draftproof.engine.stats import Clock, RoundStats, State
from draftproof.errors import BadInput
from draftproof.model.device import Device
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec

ROWS = 8
"""Rows at a time when nobody says."""

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
    stats: of all calls together; `seconds` are wall time. As a context manager, an engine lets go
    of its models at the end.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, codec: Codec | None = None,
        acceptance: str = "match", lossy: Typical | bool = False,
        budget: Budget | int | None = None, sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (), shapes: ShapePolicy | None = None,
    ) -> None:  # fmt: skip
        self.lossy = Typical() if lossy is True else lossy or None
        self.acceptance = _checked_rule(acceptance, self.lossy)
        self.target, self.codec, self.drafter = target, codec, drafter or Plain()
        self.shapes = shapes or ShapePolicy(closed=Device(target.device).compiles)
        exact, most = self.lossy is None, self.drafter.default_budget
        usual = usual_budget(self.drafter) if exact else Fixed(most)
        if self.shapes.closed and isinstance(usual, Adaptive):
            usual = Adaptive(usual.most, sizes=self.shapes.sizes(usual.most))
        self.budget = Fixed(budget) if isinstance(budget, int) else budget or usual
        self.sampling, self.stop_tokens = sampling or Sampling(), tuple(stop_tokens)
        self.clock = Clock()            # where the seconds went of the call that began last
        self.prefixes: PrefixCache | None = None    # texts whose beginnings are not read again
        self.lock = RLock()             # held while a prompt is checked, and in each round
        self.stats, self._thread = RoundStats(), ThreadPoolExecutor(1, "draftproof")
        if self.budget.most >= target.context:
            asked = f"{self.budget.most} draft tokens per round"
            raise BadInput(f"{asked} do not fit a context of {target.context}; draft fewer")

    @property
    def requests(self) -> RequestReader:
        """What checks prompts and sampling parameters."""
        kind = SourceReader if self.target.encodes else RequestReader
        return kind(self.target, self.codec, self.stop_tokens)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the models and refuse later calls; what runs already may go on."""
        self.__dict__.pop("target", None)
        self.drafter = Plain()

    def _check_open(self) -> None:
        if "target" not in self.__dict__:
            raise BadInput("the engine was closed; load another one")

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> list[Completion]:
        """Complete every prompt, `n` times each: in the order of prompts, samples side by side.

        options: `max_new_tokens`, `sampling`, `n`, `batch_size`; see `Options`.
        Raises BadInput, before anything runs, for a request that cannot be honoured.
        """
        done = self.as_completed(prompts, **options)
        return sorted(done, key=lambda completion: (completion.prompt, completion.sample))

    def generate_ids(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Unpack[Options]
    ) -> Tensor:
        """Token ids [B, S], padded on the left, with what follows them: [B * n, S + new].

        As ``model.generate`` returns them: the samples of a prompt side by side, rows that end
        early filled with the tokenizer's padding (or end) token, or 0.
        """
        if self.target.encodes:
            raise BadInput(
                f"{self.target.name} is an encoder-decoder, whose text does not go on from its "
                "prompt; call generate"
            )
        ids = input_ids[None] if input_ids.dim() == 1 else input_ids
        done = self.generate(without_padding(ids, attention_mask), **options)
        new = [one.checked().tokens for one in done]
        longest, pad = max(map(len, new), default=0), self.codec.pad_token if self.codec else 0
        rows = [[*tokens, *[pad] * (longest - len(tokens))] for tokens in new]
        prompts = ids.repeat_interleave(options.get("n", 1), 0)
        return torch.cat([prompts, torch.tensor(rows).to(ids)], 1)

    def as_completed(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> Iterator[Completion]:
        """As `generate`, but each completion comes as soon as it is finished."""
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
        if n < 1:
            raise BadInput(f"n was {n}; ask for at least 1 sample")
        if batch_size is not None and batch_size < 1:
            raise BadInput(f"batch_size was {batch_size}; it must be at least 1")
        requests = self._read(prompts, max_new_tokens, sampling, n)
        rows = max(n, min(batch_size or ROWS, n * len(requests)))
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

    async def astream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None
    ) -> AsyncIterator[Chunk]:
        """As `stream`, for asyncio: the rounds run in a thread of the engine's.

        Several streams take turns there. One that is cancelled, or closed, ends with the round that
        runs, and its row is free.
        """
        loop = asyncio.get_running_loop()
        begin = self._thread.submit(self.stream, prompt, max_new_tokens=max_new_tokens,
                                    sampling=sampling)
        chunks = await asyncio.wrap_future(begin)
        try:
            step = partial(loop.run_in_executor, self._thread, next, chunks, None)
            while (chunk := await step()) is not None:
                yield chunk
        finally:
            self._thread.submit(chunks.close)

    def _read(
        self, prompts: Prompt | Sequence[Prompt], limit: int | None, sampling: Wanted, n: int = 1
    ) -> list[Request]:
        self._check_open()
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
        left = all_rows
        decoder = self.decoder(rows, max(len(row.prompt) + row.limit for row in left))
        batch, clock = decoder.batch, decoder.clock
        self.clock = clock
        started: list[tuple[SequenceState, dict[str, float]]] = []
        try:
            with decoder.target.group.intact():
                while waiting or batch.running:
                    count = decoder.admissible(waiting) if waiting else 0
                    joining = [waiting.popleft() for _ in range(count)]
                    if joining:
                        started += [(row, clock.seconds) for rows_ in joining for row in rows_]
                    with self.lock:
                        if joining and not decoder.takes(joining):
                            decoder.admit(*joining)
                        else:
                            decoder.step(joining)
                    yield left
                    batch.retire()                      # rows that the caller ended
                    if len(batch.running) < len(started):
                        left = [row for row in left if row.finish_reason is None]
                        started = _clocked(started, clock)
        finally:
            _clocked(started, clock)                    # also where nobody listens to the end
            with self.lock:
                for row in all_rows:
                    self.stats.add(replace(row.stats, seconds={}))
                self.stats.add(RoundStats(seconds=clock.seconds))

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
        sizes = self.budget.sizes if isinstance(self.budget, Adaptive) else (most,)
        pauses = (0, 2, 5) if len(sizes) > 1 else (0,)  # a drafter catches up with what it missed
        scripts = [(size, *[0] * pause, size) for size in sizes for pause in pauses]
        longest = min(capacity, self.target.context) - most - 3
        widths = [min(width, longest) for width in (*self.shapes.reads(capacity), CHUNKS[-1] + 1)]
        alone = product(widths, [(size,) for size in sizes])
        for length, script in [*product([1], scripts), *alone]:
            decoder, text = self._decoder(_Script(script), rows, capacity), [0] * length
            params = self.requests.params(sampling or self.sampling, text, capacity)
            decoder.admit([SequenceState(text, params, capacity)])
            for _ in script:
                decoder.step()

    def decoder(self, rows: int, tokens: int) -> Decoder:
        """For so many rows of texts of up to so many tokens; `lock` is to be held in its rounds."""
        self._check_open()
        capacity = self.shapes.capacity(tokens + self.budget.most + 2)
        with self.lock:
            return self._decoder(self.budget, self.shapes.rows(rows), capacity)

    def completion(self, row: SequenceState) -> Completion:
        """What came of a row that has ended."""
        sampling = row.params.sampling
        logprobs = row.logprobs if sampling.logprobs else None
        top = row.top_logprobs if sampling.top_logprobs else None
        reason, sample = row.finish_reason or "length", row.params.sample
        written = (row.text, row.tokens, reason, logprobs, row.stats)
        return Completion(*written, row.request, sample, row.error, top)

    def _decoder(self, budget: Budget, rows: int, capacity: int) -> Decoder:
        rule = self.lossy.rule if self.lossy else RULES[self.acceptance]
        drafter, group = self.drafter, self.target.group
        if not group.alone:
            drafter, rule = LedDrafter(drafter, group), led_rule(rule, group)
            budget = LedBudget(budget, group) if isinstance(budget, Adaptive) else budget
        return Decoder(self.target, drafter, rule, budget, rows, capacity, self.shapes, None,
                       self.prefixes)


class _Script(Budget):
    """Sizes that were written down, round by round."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.most, self._left = max(sizes), list(sizes)

    def choose(self, state: State) -> int:
        return self._left.pop(0)


def usual_budget(drafter: Drafter) -> Budget:
    """The budget when nobody says: one that measures, or none for a drafter that drafts nothing."""
    return Adaptive(drafter.default_budget) if drafter.default_budget else Fixed(0)


def _clocked(
    started: list[tuple[SequenceState, dict[str, float]]], clock: Clock
) -> list[tuple[SequenceState, dict[str, float]]]:
    """Tell rows what the seconds were since they began; return those that still run."""
    for row, since in started:
        row.stats.seconds = {part: clock.seconds[part] - since.get(part, 0.0)
                             for part in row.stats.seconds}
    return [(row, since) for row, since in started if row.finish_reason is None]


def _checked_rule(acceptance: str, lossy: Typical | None) -> str:
    """The name of the rule; lossy is only what says so."""
    if acceptance == "typical" and lossy is None:
        raise BadInput(
            "typical acceptance is lossy: the text is not what the target would write; ask for it "
            "with lossy=True"
        )
    if lossy is not None and acceptance not in ("match", "typical"):
        raise BadInput(
            f"both lossy acceptance and the exact rule {acceptance!r} were asked for; leave one of "
            "them out"
        )
    if lossy is None and acceptance not in RULES:
        raise BadInput(f"acceptance was {acceptance!r}; choose one of {', '.join(RULES)}")
    return "typical" if lossy is not None else acceptance
