"""A thread that watches over the other ranks while the main one waits for them. Knows a store and signals, nothing else.

A collective with a rank that is gone may wait for ever, deaf to signals. This thread is not: every rank counts in the
launcher's store, and one that stopped counting, or an order to end, ends this process with a sentence.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from draftproof.errors import LAST_WORD

BEAT = 1.0
"""Seconds between looks."""
LIFELESS = 15.0
"""A rank that has not counted for so many seconds is gone: it counts in a thread, whatever else it does."""
OVER = 0
"""What the watching thread is told when there is nothing to watch any more: no signal has this number."""
COURTESY, PATIENCE = 1.0, 10
"""Seconds the main thread has to say it better; and how many times as long to end, once it does."""


class Watchdog:
    """Rank `rank` of `size`, watching the others from `begin` to `end`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._where = f"{host}:{port}"
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIFELESS))
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="vigil", daemon=True)

    def begin(self) -> None:
        """Watch; from the main thread, so that orders to end are heard as well."""
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        with suppress(ValueError):                                      # not the main thread
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._told)
                signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def end(self) -> None:
        """Nobody need miss this rank any more, nor does it watch: a thread that does when Python ends may abort it."""
        with suppress(Exception):
            self._store.add(f"draftproof/left/{self.rank}", 1)
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) == self._told:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._theirs.send(bytes([OVER]))
        self._thread.join(COURTESY)

    def _told(self, *_: object) -> None:
        """An order to end is heard by the thread."""

    def _watch(self) -> None:
        counts = [0] * self.size
        seen = [time.monotonic()] * self.size
        while True:
            ready, _, _ = select.select([self._ours], [], [], BEAT)
            told = self._ours.recv(64) if ready else b""
            if OVER in told:
                return None
            if signal.SIGTERM in told:
                return self._leave(f"rank {self.rank} was told to end, as torchrun does when another rank has failed")
            try:
                self._store.add(f"draftproof/alive/{self.rank}", 1)
                lost = [rank for rank in range(self.size) if self._is_lost(rank, counts, seen)]
            except Exception:                                           # the store raises what its transport raises
                where = f"{self._where} any more, where the ranks meet"
                return self._leave(f"rank {self.rank} cannot reach {where}: their launcher has ended")
            if lost:
                return self._leave(
                    f"rank {lost[0]} has ended or hangs, and rank {self.rank} cannot go on without it; start all again"
                )

    def _is_lost(self, rank: int, counts: list[int], seen: list[float]) -> bool:
        """Whether a rank has not counted for too long, and did not say goodbye."""
        count, now = self._store.add(f"draftproof/alive/{rank}", 0), time.monotonic()
        if count != counts[rank]:
            counts[rank], seen[rank] = count, now
        return now - seen[rank] > LIFELESS and not self._store.add(f"draftproof/left/{rank}", 0)

    def _leave(self, sentence: str) -> None:
        """End the process from this thread, for the main one may wait for ever; unless that says better why, and ends."""
        for _ in range(PATIENCE):
            time.sleep(COURTESY)
            if LAST_WORD.acquire(blocking=False):
                with suppress(OSError, ValueError):
                    print(f"draftproof: {sentence}", file=sys.__stderr__, flush=True)
                break
            with suppress(BlockingIOError):
                if OVER in self._ours.recv(64):
                    return
        os._exit(1)
