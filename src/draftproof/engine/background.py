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
"""Idle seconds after which the thread ends and releases its engine."""


class Background:
    """Steps schedulers in turn, in one thread that does all the computing.

    If a step fails, its running requests end with the error, and the next step continues with the
    others.

    Args:
        on_step: Called with the updates of each step, in that thread.
    """

    def __init__(self, on_step: Callable[[list[Update]], None] = lambda updates: None) -> None:
        self.on_step = on_step
        self._schedulers: list[Scheduler] = []
        self._awake = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, scheduler: Scheduler, request: Request) -> None:
        """Queue a request with a scheduler, and step this scheduler from now on.

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
        """Stop stepping a scheduler, and release it."""
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
        """Step a scheduler if it has work and was not removed in the meantime."""
        scheduler = known()
        if scheduler is None or not scheduler.has_unfinished_requests():
            return
        try:
            updates = scheduler.step()
        except Exception as error:                      # any error: the other requests go on
            updates = scheduler.fail(error)
        if updates:
            self.on_step(updates)


async def updates_of(
    request: Request, scheduler: Scheduler, background: Background
) -> AsyncGenerator[Update, None]:
    """Run a request of one sample and yield its updates. Leaving the loop aborts it."""
    updates: asyncio.Queue[Update] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def publish(update: Update) -> None:
        with suppress(RuntimeError):                            # the event loop is closed
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
