"""A rank that is gone, or an order to end, ends the process: even one whose main thread is deaf."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import pytest

ALONE = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from draftproof.model import watchdog
watchdog.BEAT, watchdog.LIFELESS, watchdog.COURTESY = 0.1, float(sys.argv[2]), 0.1
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))
if sys.argv[3] == "goodbye":
    store.add("draftproof/left/1", 1)
watch = watchdog.Watchdog(0, 2)
watch.begin()
print("watching", flush=True)
time.sleep(float(sys.argv[4]))
watch.end()
assert not watch._thread.is_alive()
"""
"""Rank 0 of two, of which the other never came."""


def watching(monkeypatch: pytest.MonkeyPatch, lifeless: float, word: str, sleep: float) -> subprocess.Popen[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    program = [sys.executable, "-c", ALONE, port, str(lifeless), word, str(sleep)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "watching\n"
    return process


def test_a_rank_that_stopped_counting_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = watching(monkeypatch, 1.0, "", 60).communicate(timeout=30)
    assert said == "draftproof: rank 1 has ended or hangs, and rank 0 cannot go on without it; start all again\n"


def test_an_order_to_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    process = watching(monkeypatch, 60, "", 60)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1 and "rank 0 was told to end" in said and said.count("\n") == 1


def test_what_the_main_thread_says_is_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has time to end by itself, and where it does not come to its end it is ended."""
    says = "watchdog.LAST_WORD.acquire()\nprint('because', file=sys.stderr, flush=True)\n"
    for sleep, ends in (("0.5", 0), ("60", 1)):
        script = ALONE.replace("time.sleep(float(sys.argv[4]))", f"{says}print('said', flush=True)\ntime.sleep({sleep})")
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "ALONE", script)
            process = watching(monkeypatch, 60, "", 0)
        assert process.stdout is not None and process.stdout.readline() == "said\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert said == "because\n" and process.returncode == ends


def test_a_rank_that_said_goodbye_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    process = watching(monkeypatch, 0.3, "goodbye", 1.5)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0 and said == "" and time.monotonic() - begun > 1.5


def test_behind_its_end_an_order_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends at once, as any other would."""
    monkeypatch.setattr(sys.modules[__name__], "ALONE", ALONE + "print('over', flush=True)\ntime.sleep(60)\n")
    process = watching(monkeypatch, 60, "goodbye", 0)
    assert process.stdout is not None and process.stdout.readline() == "over\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM and said == ""
