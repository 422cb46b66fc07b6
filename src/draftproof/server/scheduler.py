"""Continuous batching: requests join and leave the running batch between rounds; one thread owns torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.sequence import SequenceState
from draftproof.errors import BadInput, DraftproofError, Unavailable


class Progress(NamedTuple):
    """What a round brought to one sample of a request. completion: with the last one."""

    sample: int
    pieces: list[tuple[str, bool]]      # new text, and whether its tokens were drafted
    new: list[int]                      # new tokens,
    logprobs: list[float]               # and what they had, if asked for
    completion: Completion | None


@dataclass(eq=False)
class Ticket:
    """A request that waits or runs. listener: called in the decoding thread, for each of its rows in each round."""

    rows: list[SequenceState]
    listener: Callable[[Progress], None]
    told: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False


class Scheduler:
    """Runs requests as they come, at most `rows` rows of `length` tokens at a time; as many more as `queue` may wait.

    A row's text is the one it has alone. `close` lets what runs finish. A request that cannot be run
    fails alone; if a whole round fails, what ran in it fails and the next one begins anew.
    """

    def __init__(self, engine: Engine, *, rows: int, queue: int, length: int) -> None:
        self.engine, self.rows, self.queue = engine, rows, queue
        self.length = min(length, engine.target.context)
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []
        self.closing = False
        self._awake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, rows: list[SequenceState], listener: Callable[[Progress], None]) -> Ticket:
        """Queue the samples of a prompt. Raises Unavailable if the queue is full or the server stops."""
        if len(rows) > self.rows:
            raise BadInput(f"n was {len(rows)}; this server runs at most {self.rows} rows")
        if len(rows[0].prompt) + 1 > self.length:
            raise BadInput(f"the prompt has {len(rows[0].prompt)} tokens and this server reads at most {self.length - 1}")
        for row in rows:
            row.limit = min(row.limit, self.length - len(row.prompt))
        with self._awake:
            if self.closing:
                raise Unavailable("the server is stopping; ask another one", 503)
            if len(self.waiting) >= self.queue:
                raise Unavailable(f"{len(self.waiting)} requests wait already; try again later", 429)
            ticket = Ticket(rows, listener)
            self.waiting.append(ticket)
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
        held = sum(len(row.prompt) + len(row.tokens) for one in list(self.running) for row in one.rows)
        return held / (self.rows * self.length)

    def _run(self) -> None:
        decoder = self._decoder()
        while True:
            with self._awake:
                while not (self.waiting or self.running or self.closing):
                    self._awake.wait()
                if not (self.waiting or self.running):
                    return
                for one in [one for one in self.waiting if one.cancelled]:
                    self.waiting.remove(one)
            try:
                self._round(decoder)
            except (DraftproofError, RuntimeError, MemoryError) as error:   # out of memory is a RuntimeError
                for one in self.running:
                    for row in one.rows:
                        if row.finish_reason is None:
                            row.fail(error if isinstance(error, DraftproofError) else Unavailable(
                                f"the round failed: {' '.join(str(error).split())[:200]}", 500))
                self._tell()
                decoder = self._decoder()

    def _round(self, decoder: Decoder) -> None:
        gone = [row for one in self.running if one.cancelled for row in one.rows if row.finish_reason is None]
        for row in gone:
            row.finish_reason = "cancelled"
        self.running = [one for one in self.running if not one.cancelled]
        if gone:
            decoder.batch.retire()
        with self._awake:
            count = decoder.admissible([one.rows for one in self.waiting]) if self.waiting else 0
            joining = [self.waiting.popleft() for _ in range(count)]
        self.running += joining
        requests: list[Sequence[SequenceState]] = [one.rows for one in joining]
        if not self.running:
            return
        with self.engine.lock:
            if requests and not decoder.takes(requests):
                decoder.admit(*requests)
            else:
                decoder.step(requests)
        self._tell()

    def _tell(self) -> None:
        """Hand out what is new; whoever has all of its rows' texts is done."""
        for one in self.running:
            for row in one.rows:
                sample, before = row.params.sample, one.told.get(row.params.sample, 0)
                ended = row.finish_reason is not None
                if before >= 0 and (ended or len(row.tokens) > before):
                    one.told[sample] = -1 if ended else len(row.tokens)
                    completion = self.engine.completion(row) if ended else None
                    new = slice(before, None)
                    one.listener(Progress(sample, row.pieces(), row.tokens[new], row.logprobs[new], completion))
        self.running = [one for one in self.running if any(row.finish_reason is None for row in one.rows)]

    def _decoder(self) -> Decoder:
        return self.engine.decoder(self.rows, self.length)
