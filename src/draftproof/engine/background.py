"""A thread that steps schedulers while they have work: for servers, and for `Engine.astream`."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from draftproof.engine.scheduler import Scheduler
from draftproof.requests.request import Request, Update

IDLE_SECONDS = 5.0
"""The thread ends when there was nothing to do for so long, and lets go of its engine."""


class Background:
    """Steps schedulers in turn, in one thread, which owns torch meanwhile.

    If a step fails, what ran in it ends with the error, and the next step goes on with the rest.

    Args:
        on_step: Called with the updates of each step, in that thread.
    """

    def __init__(self, on_step: Callable[[list[Update]], None] = lambda updates: None) -> None:
        self.on_step = on_step
        self._schedulers: list[Scheduler] = []
        self._awake = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, scheduler: Scheduler, request: Request) -> None:
        """Queue a request with a scheduler, which is stepped from now on.

        Raises:
            BadInput: The scheduler refuses the request.
        """
        with self._awake:
            scheduler.add(request)
            if scheduler not in self._schedulers:
                self._schedulers.append(scheduler)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
                self._thread.start()
            self._awake.notify()

    def remove(self, scheduler: Scheduler) -> None:
        """Step a scheduler no more, and let go of it."""
        with self._awake:
            if scheduler in self._schedulers:
                self._schedulers.remove(scheduler)

    def _has_work(self) -> bool:
        return any(scheduler.has_unfinished_requests() for scheduler in self._schedulers)

    def _run(self) -> None:
        while True:
            with self._awake:
                if not self._awake.wait_for(self._has_work, IDLE_SECONDS):
                    self._thread = None
                    return
                schedulers = list(map(weakref.ref, self._schedulers))
            for known in schedulers:
                self._step(known)

    def _step(self, known: weakref.ref[Scheduler]) -> None:
        """Step a scheduler, if it was not removed meanwhile and has work."""
        scheduler = known()
        if scheduler is None or not scheduler.has_unfinished_requests():
            return
        try:
            updates = scheduler.step()
        except Exception as error:                      # whatever it is, the other requests go on
            updates = scheduler.fail(error)
        if updates:
            self.on_step(updates)


async def updates_of(
    request: Request, scheduler: Scheduler, background: Background
) -> AsyncGenerator[Update, None]:
    """Run a request of one sample; its updates, as they come. Leaving aborts it."""
    updates: asyncio.Queue[Update] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def publish(update: Update) -> None:
        with suppress(RuntimeError):                            # the loop is closed
            loop.call_soon_threadsafe(updates.put_nowait, update)

    request.on_update = publish
    background.add(scheduler, request)
    try:
        finished = False
        while not finished:
            update = await updates.get()
            finished = update.finished
            yield update
    finally:
        scheduler.abort(request)
