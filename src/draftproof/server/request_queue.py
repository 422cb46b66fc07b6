"""The requests of a model: limited, counted, and run by the engine's scheduler in the one thread
that decodes for all models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from draftproof.engine.background import Background
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, Unavailable
from draftproof.requests.request import Request, Update
from draftproof.server.metrics import Metrics

Listener = Callable[[Update], None]


class Worker:
    """The decoding thread, and the way of its updates to the event loop."""

    def __init__(self) -> None:
        self.background = Background(self._deliver)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._news = list[tuple[Listener, Update]]()

    def tell(self, listener: Listener, update: Update) -> None:
        """Keep an update for the listener until the step has ended."""
        self._news.append((listener, update))

    def _deliver(self, updates: list[Update]) -> None:
        """Once per step, since waking the event loop gives it the processor."""
        news, self._news = self._news, []

        def tell() -> None:
            for listener, update in news:
                listener(update)

        if news and self.loop is not None:
            with contextlib.suppress(RuntimeError):             # the loop is closed: all are gone
                self.loop.call_soon_threadsafe(tell)


class RequestQueue:
    """Runs requests as they arrive. Each has the text that it would have alone."""

    def __init__(
        self, engine: Engine, plain: Engine, metrics: Metrics, worker: Worker, *, rows: int,
        limit: int, length: int,
    ) -> None:  # fmt: skip
        """
        Args:
            engine: Runs the requests.
            plain: The same target without drafts, one sequence at a time, for requests with the
                drafter "none".
            metrics: Count the samples.
            worker: The decoding thread.
            rows: Sequences that run side by side.
            limit: Requests that may wait.
            length: Tokens of prompt and text together.
        """
        self.limit, self.length = limit, min(length, engine.target.context)
        self.schedulers = {
            "": engine.new_scheduler(rows, self.length, interleave=True),
            "none": plain.new_scheduler(1, self.length, interleave=True),
        }
        self.worker, self._metrics = worker, metrics
        metrics.watch("vllm:num_requests_running", "Running requests.",
                      lambda: len(self.running))
        metrics.watch("vllm:num_requests_waiting", "Waiting requests.",
                      lambda: len(self.waiting))
        metrics.watch("vllm:kv_cache_usage_perc", "Share of the KV cache's positions in use.",
                      lambda: self._tokens_held() / (rows * self.length))

    @property
    def running(self) -> list[Request]:
        """Running requests."""
        return [request for scheduler in self.schedulers.values() for request in scheduler.running]

    @property
    def waiting(self) -> list[Request]:
        """Waiting requests."""
        return [request for scheduler in self.schedulers.values()
                for request in tuple(scheduler.waiting)]

    def check(self, drafter: str, prompts: int, n: int) -> None:
        """Refuse requests that can never run, before they are parsed.

        Raises:
            BadInput: There is no such drafter, or there are too many samples or prompts.
        """
        scheduler = self.schedulers.get(drafter)
        if scheduler is None:
            raise BadInput(f"unknown drafter {drafter[:99]!r}; give \"none\", or leave it out")
        if n > scheduler.rows:
            raise BadInput(f"n was {n}; this server runs at most {scheduler.rows} rows")
        if prompts > self.limit:
            raise BadInput(f"{prompts} prompts were given; this server queues {self.limit} at most")

    def submit(self, request: Request, listener: Listener, stream: bool, drafter: str = "") -> None:
        """Queue a request.

        Args:
            request: What `Engine.read` returned.
            listener: Called with updates, in the current event loop.
            stream: Send every update; otherwise only the last of each sequence, which then has
                everything.
            drafter: Chooses the scheduler: "" or "none".

        Raises:
            BadInput: The prompt is too long for this server.
            Unavailable: Too many requests wait already.
        """
        size = len(request.prompt)
        if size >= self.length:
            raise BadInput(
                f"the prompt has {size} tokens; this server reads at most {self.length - 1}"
            )
        if len(self.waiting) >= self.limit:
            raise Unavailable(f"{self.limit} requests are already waiting; try again later", 429)
        for sequence in request.sequences:
            sequence.limit = min(sequence.limit, self.length - size)
        self.worker.loop = asyncio.get_running_loop()
        request.on_update = partial(self._note, listener, stream)
        self.worker.background.add(self.schedulers[drafter], request)
        self._metrics.prompt_tokens.inc(size)

    def abort(self, request: Request, drafter: str = "") -> None:
        """End a request before the next step."""
        self.schedulers[drafter].abort(request)

    def close(self) -> None:
        """Stop running requests, and release the engine."""
        for scheduler in self.schedulers.values():
            self.worker.background.remove(scheduler)
            scheduler.close()

    def _tokens_held(self) -> int:
        return sum(len(sequence.prompt) + len(sequence.tokens)
                   for request in self.running for sequence in request.sequences)  # fmt: skip

    def _note(self, listener: Listener, stream: bool, update: Update) -> None:
        """Count an update, in the decoding thread, and keep it for its listener."""
        if new := len(update.tokens):
            done = update.request.sequences[update.sample].reported
            first = done == new
            seconds = self._metrics.first_token if first else self._metrics.between
            seconds.observe(update.seconds / (1 if first else new))
        if update.completion is not None:
            self._metrics.ended(update.completion, update.latency)
        if stream:
            self.worker.tell(listener, update)
        elif update.completion is not None:
            self.worker.tell(listener, update.complete())
