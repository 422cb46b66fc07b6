"""Continuous batching: requests join and leave a running batch between rounds; one thread owns
torch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from draftproof.core.params import Likely
from draftproof.core.tree import TokenTree
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.row_output import RowOutput
from draftproof.engine.sequence import SequenceState
from draftproof.errors import BadInput, DraftproofError, Unavailable
from draftproof.native.kernels import release_workers
from draftproof.server.metrics import Metrics

Tree = list[tuple[int, int, bool, str]]
"""The nodes of a row's draft: token, parent, whether it was accepted, and who drafted it; node 0 is
the root."""


class Progress(NamedTuple):
    """What a round brought to one sample of a request.

    pieces: new text, and who drafted its tokens, or "". tokens: new ones, and the logprobs they had
    and the likeliest in their places, if asked for. completion: with the last one. tree: what the
    round verified, if asked for.
    """

    sample: int
    pieces: list[tuple[str, str]]
    tokens: list[int]
    logprobs: list[float]
    top: list[Likely]
    completion: Completion | None
    tree: Tree | None


@dataclass(eq=False)
class Ticket:
    """A request that waits or runs.

    hears: is called for each of its rows in each round; without `streams`, with the last alone.
    trees: it wants to see them. told: of each sample that still runs, how many tokens, and when.
    """

    rows: Sequence[SequenceState]
    hears: Callable[[Progress], None]
    streams: bool = False
    trees: bool = False
    cancelled: bool = False
    begun: float = field(default_factory=time.perf_counter)
    told: dict[int, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.told = {row.params.sample: (0, self.begun) for row in self.rows}

    @property
    def running(self) -> list[SequenceState]:
        """Its rows that have not ended."""
        return [row for row in self.rows if row.finish_reason is None]


News = list[tuple[Ticket, Progress]]


class Lane:
    """One engine's running batch of at most `rows` rows of `length` tokens, and what waits for it.

    A request that cannot be run fails alone; if a whole round fails, what ran in it fails and the
    next one begins anew. deliver: is given the news of each round.
    """

    def __init__(
        self, engine: Engine, rows: int, length: int, metrics: Metrics,
        deliver: Callable[[News], None],
    ) -> None:  # fmt: skip
        self.engine, self.rows, self.length = engine, rows, length
        self.metrics, self.deliver = metrics, deliver
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []
        self.decoder: Decoder | None = None
        self.reading: tuple[Ticket, Iterator[None]] | None = None       # its long prompt
        self._trees: dict[int, Tree] = {}

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def round(self, lock: threading.Condition) -> None:
        """Let who waits join, and run a round. lock: of what waits."""
        try:
            if self.decoder is None:
                self.decoder = self.engine.decoder(self.rows, self.length)
            for row in _rows(one for one in self.running if one.cancelled):
                row.finish_reason = "cancelled"
            self.decoder.retire()
            if self.reading and self.reading[0].cancelled:
                self.reading = None
            with lock:
                joining = self._next(self.decoder)
            self.running += joining
            self._step(self.decoder, joining)
            self._tell()
        except Exception as error:                      # whatever it is, others are served
            if self.decoder is None:                                    # there is no room for it
                self.running.append(self.waiting.popleft())
            self.decoder = self.reading = None
            why = f"the round failed: {' '.join(str(error).split())[:200]}"
            for row in _rows(self.running):
                row.fail(error if isinstance(error, DraftproofError) else Unavailable(why, 500))
            self._tell()

    def _next(self, decoder: Decoder) -> list[Ticket]:
        """Take from those that wait who may join now; of long prompts, one at a time is read."""
        waiting = [one for one in self.waiting if not one.cancelled]
        free = self.rows - len(_rows(self.running))
        sums = accumulate(len(one.rows) for one in waiting)
        fitting = [one.rows for one, rows in zip(waiting, sums, strict=True) if rows <= free]
        count = decoder.admissible(fitting) if fitting else 0
        if count == 1 and decoder.is_long(waiting[0].rows):
            if self.reading:
                count = 0
            else:
                self.reading = waiting[0], decoder.read_beside(waiting[0].rows)
        self.waiting = deque(waiting[count:])
        return waiting[:count]

    def _step(self, decoder: Decoder, joining: Sequence[Ticket]) -> None:
        """A round, a chunk of the long prompt, and the short ones of those who join."""
        requests = [one.rows for one in joining if not self.reading or one is not self.reading[0]]
        decoder.watch = self._see if any(one.trees for one in self.running) else None
        with self.engine.lock:
            if self.reading and next(self.reading[1], self) is self:
                self.reading = None                                     # it was the last chunk
            if requests:
                decoder.admit(*requests)
            elif decoder.running:
                decoder.step()

    def _see(self, tree: TokenTree, by: list[list[str]], rows: Sequence[SequenceState],
             outputs: Sequence[RowOutput]) -> None:  # fmt: skip
        columns = zip(rows, outputs, tree.tokens.tolist(), tree.parents.tolist(), by, strict=False)
        for row, out, tokens, parents, who in columns:
            accepted = [place in out.path for place in range(len(tokens))]
            self._trees[id(row)] = list(zip(tokens, parents, accepted, who, strict=True))

    def _tell(self) -> None:
        """Hand out what is new; whoever has all of its rows' texts is done."""
        now, news = time.perf_counter(), News()
        for ticket in self.running:
            for row in ticket.rows:
                if progress := self._progress(ticket, row, now):
                    news.append((ticket, progress))
        self._trees.clear()
        self.running = [one for one in self.running if one.running]
        if news:
            self.deliver(news)

    def _progress(self, ticket: Ticket, row: SequenceState, now: float) -> Progress | None:
        """What is new of a row, for those who want to hear of it."""
        sample, ended = row.params.sample, row.finish_reason is not None
        if sample not in ticket.told:
            return None
        before, last = ticket.told[sample]
        if new := len(row.tokens) - before:
            ticket.told[sample] = len(row.tokens), now
            seconds = self.metrics.between if before else self.metrics.first_token
            seconds.observe((now - last) / (new if before else 1))
        done = None
        if ended:
            del ticket.told[sample]
            done = self.engine.completion(row)
            self.metrics.ended(done, now - ticket.begun)
        if not (ended or (ticket.streams and new)):
            return None
        first = before if ticket.streams else 0
        tree = self._trees.get(id(row)) if ticket.trees else None
        return Progress(sample, row.pieces(), row.tokens[first:], row.logprobs[first:],
                        row.top_logprobs[first:], done, tree)


def _rows(tickets: Iterable[Ticket]) -> list[SequenceState]:
    """The rows that have not ended."""
    return [row for one in tickets for row in one.running]


class Scheduler:
    """Runs requests as they come, at most `rows` rows of `length` tokens at a time; as many more
    as `queue` may wait.

    A row's text is the one it has alone. plain: the same target with nothing drafted, which runs
    one row at a time, for who asks for the drafter "none".
    """

    def __init__(
        self, engine: Engine, plain: Engine, metrics: Metrics, *, rows: int, queue: int, length: int
    ) -> None:
        self.queue, self.length = queue, min(length, engine.target.context)
        rest = (self.length, metrics, self._deliver)
        self.lanes = {"": Lane(engine, rows, *rest), "none": Lane(plain, 1, *rest)}
        self.loop: asyncio.AbstractEventLoop | None = None
        self._awake = threading.Condition()
        release_workers()
        metrics.watch("vllm:num_requests_running", "Requests that run.",
                      lambda: len(self.running))
        metrics.watch("vllm:num_requests_waiting", "Requests that wait.",
                      lambda: len(self.waiting))
        metrics.watch("vllm:kv_cache_usage_perc", "Share of the KV cache's positions in use.",
                      lambda: self._tokens_held() / (rows * self.length))
        self._metrics = metrics
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    @property
    def running(self) -> list[Ticket]:
        """Requests that run."""
        return [one for lane in self.lanes.values() for one in list(lane.running)]

    @property
    def waiting(self) -> list[Ticket]:
        """Requests that wait."""
        return [one for lane in self.lanes.values() for one in list(lane.waiting)]

    def check(self, drafter: str, prompts: int, n: int) -> None:
        """Refuse what can never run, before there is a row of it."""
        lane = self.lanes.get(drafter)
        if lane is None:
            raise BadInput(f"there is no drafter {drafter[:99]!r} here; give none, or no name")
        if n > lane.rows:
            raise BadInput(f"n was {n}; this server runs at most {lane.rows} rows")
        if prompts > self.queue:
            raise BadInput(f"{prompts} prompts were given; this server queues {self.queue} at most")

    def submit(self, ticket: Ticket, drafter: str = "") -> None:
        """Queue a request; it hears in the event loop that this is called in. Raises Unavailable if
        the queue is full."""
        prompt = ticket.rows[0].prompt
        if len(prompt) >= self.length:
            most = self.length - 1
            raise BadInput(f"the prompt has {len(prompt)} tokens; this server reads at most {most}")
        for row in ticket.rows:
            row.limit = min(row.limit, self.length - len(prompt))
        with self._awake:
            if len(self.waiting) >= self.queue:
                raise Unavailable(f"{self.queue} requests wait already; try again later", 429)
            self.loop = asyncio.get_running_loop()
            self.lanes[drafter].waiting.append(ticket)
            self._awake.notify()
        self._metrics.prompt_tokens.inc(len(prompt))

    def _tokens_held(self) -> int:
        return sum(len(row.prompt) + len(row.tokens) for one in self.running for row in one.rows)

    def _deliver(self, news: News) -> None:
        """Once a round: whoever wakes the event loop gives it the processor."""
        def tell() -> None:
            for ticket, progress in news:
                ticket.hears(progress)

        assert self.loop is not None
        with contextlib.suppress(RuntimeError):                 # the loop is closed: all are gone
            self.loop.call_soon_threadsafe(tell)

    def _run(self) -> None:
        lanes = self.lanes.values()
        while True:
            with self._awake:
                self._awake.wait_for(lambda: any(lane.busy for lane in lanes))
            for lane in lanes:
                if lane.busy:
                    lane.round(self._awake)
