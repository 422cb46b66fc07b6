"""How many calls a token takes, on which a small model's speed depends, and through how many
functions a prompt goes, on which a reader's patience does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import draftproof as dp
from draftproof.native.kernels import kernels
from draftproof.requests.sequence import SequenceState

ROOT = str(Path(dp.__file__).parent)
PROMPT = "Once upon a time there was a dog"


@pytest.mark.skipif(kernels() is None, reason="needs the C library")
@pytest.mark.parametrize(("drafter", "most"), [("none", 60), ("demo-draft", 120)])
def test_a_round_takes_few_calls(drafter: str, most: int) -> None:
    """From `Engine.stream` down, in files of ours, per round, in steady state."""
    engine = dp.load("demo", drafter=drafter, budget=0 if drafter == "none" else 5)
    stream = engine.stream("Once upon a time", max_new_tokens=120,
                           sampling=dp.Sampling(temperature=0.7, seed=1))
    rounds, calls = 10, 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(ROOT)

    for _ in range(6):
        next(stream)
    sys.setprofile(count)
    try:
        for _ in range(rounds):
            next(stream)
    finally:
        sys.setprofile(None)
    assert 10 * rounds < calls <= most * rounds


def is_handed_on(value: Any, ids: list[int], depth: int = 0) -> bool:
    """Whether a value is the prompt: its text, its token ids, or what holds these."""
    if isinstance(value, str):
        return PROMPT in value
    if isinstance(value, dp.Request | SequenceState):
        return True
    if isinstance(value, dp.TokenTree | dp.Commit):
        value = value.tokens
    if isinstance(value, torch.Tensor):
        whole = value.dtype in (torch.int32, torch.int64) and value.numel() >= len(ids)
        return whole and value.flatten()[: len(ids)].tolist() == ids
    if not isinstance(value, list | tuple) or depth > 1:
        return False
    return list(value) == ids or any(is_handed_on(part, ids, depth + 1) for part in value[:4])


@pytest.mark.skipif(kernels() is None, reason="needs the C library")
@pytest.mark.parametrize("drafter", ["none", "demo-draft"])
def test_a_prompt_goes_through_few_functions_to_its_first_token(drafter: str) -> None:
    """Functions and methods of ours between `Engine.generate` and the first token in the sequence,
    that take the prompt as an argument, or call one that does. Comprehensions are a part of the
    function they stand in; `self` is no argument."""
    engine = dp.load("demo", drafter=drafter)
    ids, through = engine.codec.encode(PROMPT), set[str]()

    def note(frame: FrameType | None, event: str, arg: Any) -> None:
        code = frame.f_code if frame is not None else None
        if code is None or not code.co_filename.startswith(ROOT):
            return
        if event == "return" and code is SequenceState.extend.__code__:
            sys.setprofile(None)                                # the first token has come
        if event != "call" or code.co_name.startswith("<"):
            return
        count = code.co_argcount + code.co_kwonlyargcount
        names = code.co_varnames[: count + bool(code.co_flags & 4) + bool(code.co_flags & 8)]
        sys.setprofile(None)                                    # looking calls no function of ours
        if any(is_handed_on(frame.f_locals[name], ids) for name in names
               if name not in ("self", "cls")):  # fmt: skip
            while frame is not None:
                code = frame.f_code
                if code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
                    through.add(f"{code.co_filename.removeprefix(ROOT)}: {code.co_qualname}")
                frame = frame.f_back
        sys.setprofile(note)

    sys.setprofile(note)
    try:
        engine.generate(PROMPT, max_new_tokens=3)
    finally:
        sys.setprofile(None)
    assert 20 < len(through) <= 50, sorted(through)
