"""The engine: prompts in, completions out. It owns target, drafter, rule and budget."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from functools import cached_property
from threading import RLock
from typing import Unpack

import torch
from torch import Tensor

from draftproof.core.acceptance import Rule
from draftproof.core.params import Sampling
from draftproof.core.sampling import Sampler
from draftproof.core.typical import Typical, rule_of
from draftproof.drafters.base import Drafter, Plain
from draftproof.engine.background import Background, updates_of
from draftproof.engine.budget import Adaptive, Budget, Fixed, usual_budget
from draftproof.engine.config import MAX_TREE_NODES
from draftproof.engine.decoder import Decoder
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.engine.scheduler import Scheduler as Scheduler
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.warm_up import warm_up
from draftproof.engine.wrappers import BroadcastBudget, BroadcastDrafter, broadcast_rule
from draftproof.errors import BadInput, reject_unknown_options
from draftproof.model.device import Device
from draftproof.model.target import Target
from draftproof.requests.completion import Completion as Completion
from draftproof.requests.completion import Options, Wanted, check_count
from draftproof.requests.prompts import Prompt as Prompt
from draftproof.requests.reader import RequestReader
from draftproof.requests.request import Request as Request
from draftproof.requests.request import Status as Status
from draftproof.requests.request import Update as Update
from draftproof.requests.stats import RoundStats
from draftproof.tokenizer.codec import Codec

Chunk = Update
"""The former name of what `stream` yields."""

if hasattr(os, "register_at_fork"):      # a forked process lacks threads that torch waits for
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class Engine:
    """Writes the text that the target would write alone, faster.

    Calls may run at the same time, also from several threads.

    Args:
        target: The model whose text is written.
        drafter: The drafter; None decodes plainly.
        codec: The tokenizer; needed for text prompts and stop strings, but not for token ids.
        acceptance: "match" (default: the same text with any drafter), "rejection" or "block" (the
            same distribution); or a `Rule` of your own.
        lossy: A `Typical`, or True for its defaults: text that is *not* what the target alone would
            write; `RoundStats.distance_per_token` measures the distance. The text depends on the
            drafts, so unless a budget is given, each round drafts the same number: one seed then
            gives one text.
        budget: A fixed number of draft tokens per row and round, or a `Budget`. None measures what
            pays (`Adaptive`), up to the drafter's `max_draft_tokens`; it belongs to the engine.
        sampling: Defaults for calls without `sampling`.
        stop_tokens: End tokens of requests without any.
        shapes: `ShapePolicy(closed=True)` takes all shapes from a small set; None: as the device
            needs it.
        sampler: The class that draws tokens: `Sampler`, or one derived from it with another source
            of random numbers.

    Attributes:
        stats: Statistics of all calls together.

    Example:
        >>> engine = dp.load("demo", assistant_model="demo-draft")
        >>> print(engine.generate("Once upon a time", max_new_tokens=100)[0].text)
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, codec: Codec | None = None,
        acceptance: str | Rule = "match", lossy: Typical | bool = False,
        budget: Budget | int | None = None, sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (), shapes: ShapePolicy | None = None,
        sampler: type[Sampler] = Sampler,
    ) -> None:  # fmt: skip
        self.lossy = Typical() if lossy is True else lossy or None
        self.acceptance, self.rule = rule_of(acceptance, self.lossy)
        self.target, self.codec, self.drafter = target, codec, drafter or Plain()
        self.shapes = shapes or ShapePolicy(closed=Device(target.device).compiles)
        usual = Fixed(self.drafter.max_draft_tokens) if self.lossy else usual_budget(self.drafter)
        if self.shapes.closed and isinstance(usual, Adaptive):
            most = usual.max_draft_tokens
            usual = Adaptive(most, sizes=self.shapes.sizes(most))
        self.budget = Fixed(budget) if isinstance(budget, int) else budget or usual
        self.sampling, self.stop_tokens = sampling or Sampling(), tuple(stop_tokens)
        self.sampler = sampler
        self.prefixes: PrefixCache | None = None    # texts whose beginnings are not read again
        self.lock = RLock()                         # held in each step
        self.stats = RoundStats()
        count = self.budget.max_draft_tokens
        if count >= target.context:
            raise BadInput(f"{count} draft tokens per round exceed the context of {target.context} "
                           "tokens; draft fewer")
        if count >= MAX_TREE_NODES:
            raise BadInput(f"{count} draft tokens per round were asked for; draft fewer than "
                           f"{MAX_TREE_NODES}")

    def __repr__(self) -> str:
        target, budget = self.target, self.budget
        most = budget.max_draft_tokens
        size = str(most) if isinstance(budget, Fixed) else f"up to {most}"
        return (f"Engine(model={target.name!r}, dtype={str(target.dtype).removeprefix('torch.')}, "
                f"device={target.device}, drafter={self.drafter.name!r}, draft tokens={size}, "
                f"acceptance={self.acceptance!r})")

    @cached_property
    def requests(self) -> RequestReader:
        """Checks prompts and sampling parameters."""
        if self.target.is_encoder_decoder:
            from draftproof.requests.source_reader import SourceReader

            return SourceReader(self.target, self.codec, self.stop_tokens)
        return RequestReader(self.target, self.codec, self.stop_tokens)

    @cached_property
    def scheduler(self) -> Scheduler:
        """Runs the requests of `add_request` and `astream`; may be set to one of
        `new_scheduler`."""
        return self.new_scheduler(interleave=True)

    @cached_property
    def _background(self) -> Background:
        return Background()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> list[Completion]:
        """Complete every prompt, `n` times each.

        Args:
            prompts: One prompt or many: text, token ids, a chat, or what a tokenizer returns.
            **options: `max_new_tokens`, `sampling`, `n` and `batch_size`; see `Options`.

        Returns:
            Completions in the order of the prompts, the samples of a prompt side by side.

        Raises:
            BadInput: A request cannot be honoured; nothing has run.
        """
        reject_unknown_options("Engine.generate", options, Options.__annotations__)
        done = self.as_completed(prompts, **options)
        return sorted(done, key=lambda completion: (completion.prompt, completion.sample))

    def as_completed(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> Iterator[Completion]:
        """Like `generate`, but yields each completion as soon as it is finished.

        Args:
            prompts: As for `generate`.
            **options: As for `generate`.

        Yields:
            Completions in the order in which they end.
        """
        reject_unknown_options("Engine.as_completed", options, Options.__annotations__)
        batch_size = options.get("batch_size")
        check_count("batch_size", 1 if batch_size is None else batch_size)
        requests = self.read(
            prompts, max_new_tokens=options.get("max_new_tokens"),
            sampling=options.get("sampling"), n=options.get("n", 1),
        )  # fmt: skip
        updates = self.run(requests, batch_size)
        return (update.completion for update in updates if update.completion is not None)

    def generate_ids(
        self, prompts: Tensor | Sequence[Sequence[int]], **options: Unpack[Options]
    ) -> list[list[int]]:
        """Complete prompts that are token ids.

        Args:
            prompts: A list of lists of token ids, or a tensor [B, S] without padding.
            **options: As for `generate`.

        Returns:
            The new token ids of each sample, without those of the prompt.
        """
        many = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
        if many and not isinstance(many[0], (list, tuple)):
            raise BadInput("generate_ids takes a list of prompts, each a list of token ids")
        return [done.checked().tokens for done in self.generate(many, **options)]

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None
    ) -> Generator[Update, None, None]:
        """Complete one prompt and yield an update per round; the last has the completion.

        Args:
            prompt: As for `generate`.
            max_new_tokens: At most so many; None leaves it to `sampling`.
            sampling: None takes the engine's defaults.

        Yields:
            The update of each step.

        Raises:
            BadInput: The request cannot be honoured; nothing has run.
        """
        requests = self.read([prompt], max_new_tokens=max_new_tokens, sampling=sampling)
        return self.run(requests, 1)

    async def astream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None
    ) -> AsyncIterator[Update]:
        """Like `stream`, for asyncio: any number run side by side, in a thread of the engine.

        Leaving the loop, or cancelling the task, aborts the request.

        Args:
            prompt: As for `generate`.
            max_new_tokens: At most so many; None leaves it to `sampling`.
            sampling: None takes the engine's defaults.

        Yields:
            The update of each step.
        """
        (request,) = await asyncio.to_thread(
            self.read, [prompt], max_new_tokens=max_new_tokens, sampling=sampling
        )
        async with aclosing(updates_of(request, self.scheduler, self._background)) as updates:
            async for update in updates:
                yield update

    def add_request(
        self, prompt: Prompt, *, max_new_tokens: int | None = None,
        sampling: Sampling | None = None, n: int = 1, request_id: str | None = None,
        on_update: Callable[[Update], None] | None = None,
    ) -> Request:  # fmt: skip
        """Queue one prompt for `step`.

        Example:
            ```python
            for prompt in prompts:
                engine.add_request(prompt, max_new_tokens=50)
            while engine.has_unfinished_requests():
                for update in engine.step():
                    print(update.request.id, update.text)
            ```

        Args:
            prompt: As for `generate`.
            max_new_tokens: At most so many; None leaves it to `sampling`.
            sampling: None takes the engine's defaults.
            n: The number of samples.
            request_id: An id for `abort`; None makes one.
            on_update: Called with every update, in the thread that runs `step`.

        Returns:
            The request; its `status` shows its progress.

        Raises:
            BadInput: The request cannot be honoured, or another request has this id.
        """
        if any(other.id == request_id for other in self.scheduler.requests()):
            raise BadInput(f"the request id {request_id!r:.60} is in use; choose another")
        (request,) = self.read([prompt], max_new_tokens=max_new_tokens, sampling=sampling, n=n)
        request.on_update, request.id = on_update, request_id or request.id
        return self.scheduler.add(request)

    def abort(self, request: Request | str) -> None:
        """End a request of `add_request` before the next step.

        Its last update has the completion so far, with the finish reason "abort". A request that
        has already ended is left as it is.

        Args:
            request: The request, or its id.
        """
        for other in self.scheduler.requests():
            if request in (other, other.id):
                self.scheduler.abort(other)

    def has_unfinished_requests(self) -> bool:
        """Whether requests of `add_request` are waiting or running."""
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[Update]:
        """Take the next step for all requests of `add_request`: read prompts, or run a round.

        Returns:
            An update of each sequence with news; its last update has its completion.

        Raises:
            Exception: The step failed. Every running request ends with the error. Waiting requests
                go on with the next step.
        """
        try:
            return self.scheduler.step()
        except Exception as error:
            self.scheduler.fail(error)
            raise

    def read(
        self, prompts: Prompt | Sequence[Prompt], *, max_new_tokens: int | None = None,
        sampling: Wanted = None, n: int = 1,
    ) -> list[Request]:  # fmt: skip
        """Tokenise prompts and check their options. Rounds may run at the same time.

        Args:
            prompts: As for `generate`.
            max_new_tokens: At most so many; None leaves it to `sampling`.
            sampling: One for all prompts, or one for each; None takes the engine's defaults.
            n: The number of samples of each prompt.

        Returns:
            A request for each prompt, to be given to a scheduler.

        Raises:
            BadInput: One of them cannot be honoured.
        """
        check_count("n", n)
        wanted = self.sampling if sampling is None else sampling
        # reading may run the encoder
        with self.lock if self.target.is_encoder_decoder else nullcontext():
            return self.requests.read(prompts, max_new_tokens, wanted, n)

    def check(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None
    ) -> None:
        """Raise BadInput if `generate` could not honour this request.

        Args:
            prompt: As for `generate`.
            max_new_tokens: At most so many; None leaves it to `sampling`.
            sampling: None takes the engine's defaults.
        """
        self.read([prompt], max_new_tokens=max_new_tokens, sampling=sampling)

    def new_scheduler(
        self, batch_size: int = 8, length: int = 4096, *, interleave: bool = False
    ) -> Scheduler:
        """A scheduler with a batch of its own; see `Scheduler`.

        Args:
            batch_size: Sequences that run side by side.
            length: Tokens of prompt and text per sequence that there is room for at first.
            interleave: Whether running texts go on while a long prompt is read.
        """
        return Scheduler(
            self.decoder, rows=batch_size, length=min(length, self.target.context),
            interleave=interleave, lock=self.lock, stats=self.stats,
        )  # fmt: skip

    @contextmanager
    def scheduled(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> Iterator[Scheduler]:
        """A scheduler for the requests of one `read`. Requests that have not ended are aborted at
        exit.

        Args:
            requests: What `read` returned.
            batch_size: Sequences that run side by side; None takes all, up to 8.

        Yields:
            The scheduler.
        """
        n = max((len(request.sequences) for request in requests), default=1)
        rows = max(n, min(batch_size or 8, sum(len(request.sequences) for request in requests)))
        if self.shapes.closed and batch_size is not None:       # as many as declared, needed or not
            rows = max(n, batch_size)
        length = max((request.max_length for request in requests), default=1)
        scheduler = self.new_scheduler(rows, length)
        for request in requests:
            scheduler.add(request)
        try:
            with self.target.group.raise_on_rank_failure():
                yield scheduler
        finally:
            if not sys.is_finalizing():     # a stream left open at exit, whose tensors are going
                scheduler.close()

    def run(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> Generator[Update, None, None]:
        """Complete requests of `read`; `generate` and `stream` are loops over this.

        Args:
            requests: What `read` returned.
            batch_size: Sequences that run side by side; None takes all, up to 8.

        Yields:
            Updates of each step; the last update of a sequence has its completion.
        """
        with self.scheduled(requests, batch_size) as scheduler:
            while scheduler.waiting or scheduler.running:
                yield from scheduler.step()

    def warm_up(
        self, tokens: int, *, batch_size: int = 1, sampling: Sampling | None = None
    ) -> None:
        """Run once every shape that such a batch will need, for devices that compile each new
        shape.

        It needs closed shapes. Give the sampling that will be used: filters and penalties have
        shapes of their own.

        Args:
            tokens: The length of the longest text, its prompt included.
            batch_size: Sequences that run side by side.
            sampling: None takes the engine's defaults.
        """
        warm_up(self, tokens, batch_size, sampling or self.sampling)

    def decoder(self, rows: int, tokens: int) -> Decoder:
        """A decoder for `rows` rows of up to `tokens` tokens. Hold `lock` during its rounds.

        Args:
            rows: Rows of the batch.
            tokens: The most tokens of prompt and text per row.
        """
        capacity = self.shapes.capacity(tokens + self.budget.max_draft_tokens + 2)
        return self.new_decoder(self.budget, self.shapes.rows(rows), capacity)

    def new_decoder(self, budget: Budget, rows: int, capacity: int) -> Decoder:
        """Like `decoder`, with another budget and exactly this capacity.

        Args:
            budget: How much to draft.
            rows: Rows of the batch.
            capacity: Tokens per row of the cache.
        """
        rule, drafter, group = self.rule, self.drafter, self.target.group
        if not group.is_single:
            drafter, rule = BroadcastDrafter(drafter, group), broadcast_rule(rule, group)
            if isinstance(budget, Adaptive):
                budget = BroadcastBudget(budget, group)
        return Decoder(self.target, drafter, rule, budget, rows, capacity, self.shapes, None,
                       self.prefixes, self.sampler)
