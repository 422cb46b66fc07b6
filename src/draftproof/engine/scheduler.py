"""The scheduler: requests join a running batch and leave it between rounds. The engine's one loop
is `Scheduler.step`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from threading import Lock

from draftproof.core.tree import TokenTree
from draftproof.engine.decoder import Decoder
from draftproof.engine.prefill import Prefill
from draftproof.engine.row_output import RowOutput
from draftproof.errors import BadInput, DraftproofError, Unavailable
from draftproof.requests.request import DraftTree, Request, Status, Update
from draftproof.requests.sequence import SequenceState
from draftproof.requests.stats import Clock, RoundStats


class Scheduler:
    """Waiting requests, and those that run side by side in one batch.

    `step` does all the work; `add` and `abort` may be called from any thread.

    Args:
        new_decoder: Makes the batch, for a number of rows and a number of tokens per row.
        rows: Sequences that run side by side.
        length: Tokens of prompt and text together that a row has room for. A longer request waits
            until nothing runs; then a larger batch is made.
        interleave: Read long prompts one chunk per step, with a round for the running texts in the
            same step. These go on in the meantime, but all texts together take longer. False: read
            prompts first, as long as rows are free.
        lock: Held in each step, for schedulers that share a target.
        stats: Counts the texts that have ended, and the seconds.
    """

    def __init__(
        self, new_decoder: Callable[[int, int], Decoder], *, rows: int, length: int,
        interleave: bool = False, lock: AbstractContextManager[object] | None = None,
        stats: RoundStats | None = None,
    ) -> None:  # fmt: skip
        self.new_decoder, self.rows, self.length = new_decoder, rows, length
        self.interleave, self.lock = interleave, lock or nullcontext()
        self.stats = RoundStats() if stats is None else stats
        self.waiting: deque[Request] = deque()
        self._queue = Lock()                        # held while `waiting` changes
        self.running: list[Request] = []            # including those being prefilled
        self.decoder: Decoder | None = None
        self._aborted: deque[Request] = deque()
        self._idle = False                          # since the last step
        self._counted: dict[str, float] = {}
        self._prefill: tuple[Request, Prefill] | None = None        # of the long prompt being read
        self._trees: dict[int, DraftTree] = {}

    def add(self, request: Request) -> Request:
        """Queue a request.

        Args:
            request: What `Engine.read` returned.

        Returns:
            The request.

        Raises:
            BadInput: It has more samples than rows.
        """
        if len(request.sequences) > self.rows:
            raise BadInput(f"n was {len(request.sequences)}; at most {self.rows} samples run here")
        with self._queue:
            place = len(self.waiting)
            while place and self.waiting[place - 1].priority > request.priority:
                place -= 1
            self.waiting.insert(place, request)
        return request

    def abort(self, request: Request) -> None:
        """End a request before the next step, unless it has ended already.

        Args:
            request: The request to end.
        """
        self._aborted.append(request)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.waiting or self.running)

    def step(self) -> list[Update]:
        """Take the next step: read prompts of requests that join, or run a round.

        Returns:
            Updates of the sequences that run or have ended.
        """
        with self.lock:
            if self._aborted:
                self._drop_aborted()
            joining = self._next() if self.waiting else []
            if joining or self._prefill is not None:
                self._read_prompts(joining)
            elif self.decoder is not None and self.decoder.batch.running:
                self.decoder.step()
            updates = self._updates()
        for update in updates:
            if update.request.on_update is not None:
                update.request.on_update(update)
        return updates

    def fail(self, error: Exception) -> list[Update]:
        """End all running requests with an error, after a failed step. Waiting requests stay.

        Args:
            error: What the step raised.

        Returns:
            The last update of each sequence.
        """
        with self._queue:
            if not self.running and self.waiting:                   # there was no room for it
                self.running.append(self.waiting.popleft())
        if not isinstance(error, DraftproofError):
            why = " ".join(str(error).split())[:200]
            error = Unavailable(f"the round failed: {why}", 500)
        with self.lock:
            self.decoder = self._prefill = None
            for sequence in _unfinished(self.running):
                sequence.fail(error)
            updates = self._updates()
        for update in updates:
            if update.request.on_update is not None:
                update.request.on_update(update)
        return updates

    def close(self) -> None:
        """Abort all requests, and release the batch."""
        for request in self.requests():
            self.abort(request)
        with self.lock:
            self._drop_aborted()
            self._updates()
            self._count_seconds()
            self.decoder = None

    def requests(self) -> list[Request]:
        """Waiting and running requests."""
        return [*self.waiting, *self.running]

    @property
    def clock(self) -> Clock:
        """The clock of the present batch."""
        return self.decoder.clock if self.decoder is not None else Clock()

    def _drop_aborted(self) -> None:
        """End the aborted requests."""
        while self._aborted:
            request = self._aborted.popleft()
            with self._queue:
                if request in self.waiting:
                    self.waiting.remove(request)
                    self.running.append(request)                    # for its last update
            if not request.finished:
                request.status = Status.ABORTED
                for sequence in request.sequences:
                    sequence.abort()
        if self._prefill is not None and self._prefill[0].finished:
            self._prefill = None
        if self.decoder is not None and self._may_move:
            self.decoder.retire()                   # otherwise they leave once the prompt was read

    @property
    def _may_move(self) -> bool:
        """Whether rows may join and leave: not while a prompt is read into the batch."""
        return self._prefill is None or self.interleave

    def _next(self) -> list[Request]:
        """Choose the waiting requests that join now. Only one long prompt is read at a time."""
        if not self._may_move:
            return []
        with self._queue:
            waiting, fitting = tuple(self.waiting), list[Request]()
        free = self.rows - len(_unfinished(self.running))
        if not free or not self._makes_room(waiting[0]):
            return []
        assert self.decoder is not None
        for request in waiting:
            free -= len(request.sequences)
            if free < 0 or request.max_length > self.length:
                break
            fitting.append(request)
        prompts = self.decoder.prompts
        owners = [request.owner for request in fitting]
        count = prompts.admissible([request.prompt for request in fitting], owners)
        if count == 1 and self._prefill and prompts.is_long(fitting[0].prompt, owners[0]):
            return []
        with self._queue:
            for request in fitting[:count]:
                request.status = Status.PREFILLING
                self.waiting.remove(request)
        self._set_running([*self.running, *fitting[:count]])
        return fitting[:count]

    def _makes_room(self, request: Request) -> bool:
        """Whether the batch has room for a request. If nothing runs, the batch is enlarged."""
        fits = request.max_length <= self.length
        if self.running and self.decoder is not None:
            return fits
        self.length = max(self.length, request.max_length)
        if self.decoder is None or not fits:
            self.decoder, self._counted = None, {}                  # free its memory first
            self.decoder = self.new_decoder(self.rows, self.length)
        elif self._idle:
            self.decoder.refresh()
        self._idle = False
        return True

    def _read_prompts(self, joining: list[Request]) -> None:
        """Read the next chunk of a long prompt, and the short prompts of joining requests. With
        `interleave`, also run a round."""
        decoder = self.decoder
        assert decoder is not None
        goes_on = bool(decoder.batch.running) or not joining
        waits = False                       # making its cache takes as long as a chunk
        if len(joining) == 1 and decoder.prompts.is_long(
            joining[0].prompt, joining[0].owner
        ):
            request = joining.pop()
            prefill = decoder.prefill([request.sequences], elsewhere=self.interleave)
            self._prefill = request, prefill
            waits = self.interleave and bool(decoder.batch.running)
        in_round: Prefill | None = None
        if self._prefill is not None and not waits:
            if decoder.reads_with_round(self._prefill[1]):
                in_round = self._prefill[1]
            elif decoder.read(self._prefill[1]):
                self._prefill[0].status, self._prefill = Status.RUNNING, None
        if joining:
            prefill = decoder.prefill([request.sequences for request in joining])
            while not decoder.read(prefill):
                pass
            for request in joining:
                request.status = Status.RUNNING
        if self.interleave and goes_on and decoder.batch.running:
            decoder.step(in_round)

    def _count_seconds(self) -> None:
        """Add the seconds since the last call."""
        seconds, before = self.clock.seconds, self._counted
        self.stats.add(RoundStats(seconds={
            part: value - before.get(part, 0.0) for part, value in seconds.items()
        }))  # fmt: skip
        self._counted = seconds

    def _set_running(self, requests: list[Request]) -> None:
        self.running = requests
        if self.decoder is not None:
            shown = any(request.draft_trees for request in requests)
            self.decoder.watch = self._keep_trees if shown else None

    def _keep_trees(
        self, tree: TokenTree, by: list[list[str]], rows: Sequence[SequenceState],
        outputs: Sequence[RowOutput],
    ) -> None:  # fmt: skip
        columns = zip(rows, outputs, tree.tokens.tolist(), tree.parents.tolist(), by, strict=False)
        for row, output, tokens, parents, who in columns:
            accepted = [node in output.path for node in range(len(tokens))]
            self._trees[id(row)] = list(zip(tokens, parents, accepted, who, strict=True))

    def _updates(self) -> list[Update]:
        """Updates since the last step. Requests whose sequences have all ended are removed."""
        now, updates, ended = time.perf_counter(), list[Update](), False
        for request in self.running:
            for sequence in request.sequences:
                if not sequence.is_reported and (
                    len(sequence.tokens) > sequence.reported or sequence.finish_reason is not None
                ):
                    updates.append(self._update(request, sequence, now))
                    ended = ended or sequence.is_reported
        if ended:
            left = [request for request in self.running if _unfinished([request])]
            for request in self.running:
                if request not in left and request.status is not Status.ABORTED:
                    request.status = Status.FINISHED
            self._set_running(left)
            self._idle = not (left or self.waiting)
            if self._idle:
                self._count_seconds()
        self._trees.clear()
        return updates

    def _update(self, request: Request, sequence: SequenceState, now: float) -> Update:
        start, completion = sequence.reported, None
        seconds = now - (sequence.reported_at or request.arrival)
        sequence.reported, sequence.reported_at = len(sequence.tokens), now
        if sequence.finish_reason is not None:
            sequence.is_reported = True
            self.stats.add(replace(sequence.stats, seconds={}))
            completion = request.completion(sequence)
        return Update(
            request, sequence.params.sample, sequence.pieces(), sequence.tokens[start:],
            sequence.logprobs[start:], sequence.top_logprobs[start:], completion,
            self._trees.get(id(sequence)) if request.draft_trees else None, seconds,
            now - request.arrival,
        )  # fmt: skip


def _unfinished(requests: Iterable[Request]) -> list[SequenceState]:
    """The sequences that have not ended."""
    return [sequence for request in requests for sequence in request.sequences
            if sequence.finish_reason is None]  # fmt: skip
