"""Continuous batching: requests join and leave a running batch between rounds; one thread owns
torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from draftproof.core.params import Likely
from draftproof.core.tree import TokenTree
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.row_output import RowOutput
from draftproof.engine.sequence import SequenceState
from draftproof.errors import BadInput, DraftproofError, Unavailable
from draftproof.native.kernels import release_workers

Tree = list[tuple[int, int, bool, str]]
"""The nodes of a row's draft: token, parent, whether it was accepted, and who drafted it; node 0 is
the root."""


class Progress(NamedTuple):
    """What a round brought to one sample of a request.

    pieces: new text, and who drafted its tokens, or "". new: tokens, and the logprobs they had
    and the likeliest in their places, if asked for. completion: with the last one. tree: what the
    round verified, if asked for. at: when, by the performance counter.
    """

    sample: int
    pieces: list[tuple[str, str]]
    new: list[int]
    logprobs: list[float]
    top: list[Likely]
    completion: Completion | None
    tree: Tree | None
    at: float


@dataclass(eq=False)
class Ticket:
    """A request that waits or runs. listener: called in the decoding thread, for each of its rows
    in each round. trees: it wants to see them."""

    rows: list[SequenceState]
    listener: Callable[[Progress], None]
    trees: bool = False
    told: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False


class Lane:
    """One engine's running batch of at most `rows` rows of `length` tokens, and what waits for it.

    A request that cannot be run fails alone; if a whole round fails, what ran in it fails and the
    next one begins anew. Where memory does not suffice, the youngest request is shed and the others
    go on; until none runs, no more rows than these are let in.
    """

    def __init__(self, engine: Engine, rows: int, length: int) -> None:
        self.engine, self.rows, self.length, self.fits = engine, rows, length, rows
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
            self._round(self.decoder, lock)
        except Exception as error:                      # whatever it is, others are served
            decoder, self.decoder, self.reading = self.decoder, None, None
            if decoder is None:                                         # there is no room for it
                self.running += [self.waiting.popleft()]
            elif decoder.batch.whole and _is_no_memory(error):
                with contextlib.suppress(Exception), lock:
                    self._shed(decoder)
                    self.decoder = decoder
            for row in _unfinished(self.running if self.decoder is None else ()):
                row.fail(error if isinstance(error, DraftproofError) else Unavailable(
                    f"the round failed: {' '.join(str(error).split())[:200]}", 500))
            self._tell()

    def _shed(self, decoder: Decoder) -> None:
        """Let the youngest request go; others that were about to join wait again."""
        for row in _unfinished([self.running[-1]]):
            row.fail(Unavailable(
                "the server has no memory for so many requests at once; try again later", 503))
        joining = [one for one in self.running[:-1] if not any(row.tokens for row in one.rows)]
        self.fits = len(_unfinished(self.running))
        self.running = [one for one in self.running if one not in joining]
        self.waiting.extendleft(reversed(joining))
        decoder.batch.recover()

    def _round(self, decoder: Decoder, lock: threading.Condition) -> None:
        gone = [row for one in self.running if one.cancelled for row in one.rows
                if row.finish_reason is None]
        for row in gone:
            row.finish_reason = "cancelled"
        self.running = [one for one in self.running if not one.cancelled]
        if self.reading and self.reading[0].cancelled:
            self.reading = None
        if gone:
            decoder.batch.retire()
        with lock:
            waiting = [one for one in self.waiting if not one.cancelled]
            if not self.running:
                self.fits = self.rows
            free = self.fits - len(_unfinished(self.running))
            rows = accumulate(len(one.rows) for one in waiting)
            fitting = [one.rows for one, sum_ in zip(waiting, rows, strict=True) if sum_ <= free]
            count = decoder.admissible(fitting) if fitting else 0
            long = count == 1 and decoder.is_long(waiting[0].rows)
            if long and self.reading:
                count = 0                                               # one at a time
            joining, self.waiting = waiting[:count], deque(waiting[count:])
        self.running += joining
        if long and joining:
            self.reading = joining[0], decoder.read_beside(joining.pop().rows)
        requests: list[Sequence[SequenceState]] = [one.rows for one in joining]
        if not self.running:
            return
        decoder.watch = self._see if any(one.trees for one in self.running) else None
        with self.engine.lock:
            if self.reading and next(self.reading[1], self) is self:
                self.reading = None                                     # it was the last chunk
            if requests and not decoder.takes(requests):
                decoder.admit(*requests)
            elif decoder.running:
                decoder.step(requests)
        self._tell()

    def _see(self, tree: TokenTree, by: list[list[str]], rows: Sequence[SequenceState],
             outputs: Sequence[RowOutput]) -> None:  # fmt: skip
        columns = zip(rows, outputs, tree.tokens.tolist(), tree.parents.tolist(), by, strict=False)
        for row, out, tokens, parents, who in columns:
            accepted = [place in out.path for place in range(len(tokens))]
            self._trees[id(row)] = list(zip(tokens, parents, accepted, who, strict=True))

    def _tell(self) -> None:
        """Hand out what is new; whoever has all of its rows' texts is done."""
        now = time.perf_counter()
        for one in self.running:
            for row in one.rows:
                sample, before = row.params.sample, one.told.get(row.params.sample, 0)
                ended = row.finish_reason is not None
                if before >= 0 and (ended or len(row.tokens) > before):
                    one.told[sample] = -1 if ended else len(row.tokens)
                    completion = self.engine.completion(row) if ended else None
                    tree = self._trees.get(id(row)) if one.trees else None
                    tokens, scores = row.tokens[before:], row.logprobs[before:]
                    top = row.top_logprobs[before:]
                    news = (sample, row.pieces(), tokens, scores, top, completion, tree, now)
                    one.listener(Progress(*news))
        self._trees.clear()
        self.running = [one for one in self.running
                        if any(row.finish_reason is None for row in one.rows)]


def _unfinished(tickets: Iterable[Ticket]) -> list[SequenceState]:
    return [row for one in tickets for row in one.rows if row.finish_reason is None]


def _is_no_memory(error: Exception) -> bool:
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator: can't allocate memory" in str(error)


class Scheduler:
    """Runs requests as they come, at most `rows` rows of `length` tokens at a time; as many more
    as `queue` may wait.

    A row's text is the one it has alone. plain: the same target with nothing drafted, which runs
    one row at a time, for who asks for the drafter "none". `close` lets what runs finish.
    """

    def __init__(
        self, engine: Engine, plain: Engine, *, rows: int, queue: int, length: int
    ) -> None:
        self.rows, self.queue, self.length = rows, queue, min(length, engine.target.context)
        self.lanes = {"": Lane(engine, rows, self.length), "none": Lane(plain, 1, self.length)}
        self.closing = False
        self._awake = threading.Condition()
        release_workers()
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

    def submit(
        self, rows: list[SequenceState], listener: Callable[[Progress], None], *,
        drafter: str = "", trees: bool = False,
    ) -> Ticket:  # fmt: skip
        """Queue the samples of a prompt. Raises Unavailable if the queue is full or the server
        stops."""
        lane = self.lanes.get(drafter)
        if lane is None:
            raise BadInput(f"there is no drafter {drafter[:99]!r} here; give none, or no name")
        if len(rows) > lane.rows:
            raise BadInput(f"n was {len(rows)}; this server runs at most {lane.rows} rows")
        if len(rows[0].prompt) + 1 > self.length:
            raise BadInput(
                f"the prompt has {len(rows[0].prompt)} tokens and this server reads at most "
                f"{self.length - 1}"
            )
        for row in rows:
            row.limit = min(row.limit, self.length - len(row.prompt))
        with self._awake:
            if self.closing:
                raise Unavailable("the server is stopping; ask another one", 503)
            if len(self.waiting) >= self.queue:
                raise Unavailable(f"{self.queue} requests wait already; try again later", 429)
            ticket = Ticket(rows, listener, trees)
            lane.waiting.append(ticket)
            self._awake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody listens any more: its rows are free before the next round."""
        ticket.cancelled = True

    def close(self) -> None:
        """Take no more requests; return when those that were taken are finished."""
        with self._awake:
            self.closing = True
            self._awake.notify()
        self._thread.join()

    @property
    def tokens_held(self) -> float:
        """Share of the KV cache's positions that running rows use."""
        rows = (row for one in self.running for row in one.rows)
        return sum(len(row.prompt) + len(row.tokens) for row in rows) / (self.rows * self.length)

    def _run(self) -> None:
        lanes = self.lanes.values()
        while True:
            with self._awake:
                while not (self.closing or any(lane.busy for lane in lanes)):
                    self._awake.wait()
                if not any(lane.busy for lane in lanes):
                    return
            for lane in lanes:
                if lane.busy:
                    lane.round(self._awake)
