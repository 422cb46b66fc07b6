"""Out of memory in a round: the youngest requests go, the texts of the others stay what they
are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from asking import PROMPTS, alone

import draftproof as dp
from draftproof.core.sampling import Sampler
from draftproof.errors import Unavailable
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target
from draftproof.server.scheduler import Lane, Progress, Ticket

CUDA, HOST = torch.OutOfMemoryError("out of memory"), MemoryError()
CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory")
WANTED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "logit_bias": {0: -100.0}}


@pytest.mark.parametrize(("error", "owner", "method", "late", "drafter"), [
    (CUDA, Target, "read", False, "demo-draft"), (CPU, Target, "read", True, "demo-draft"),
    (HOST, Target, "read", True, None), (HOST, Sampler, "sample", True, "demo-draft"),
    (CUDA, Sampler, "sample", False, None), (CPU, KVCache, "keep", True, None),
])  # fmt: skip
def test_the_youngest_are_shed_and_the_others_go_on(
    server: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, owner: Any, method: str,
    late: bool, drafter: str | None,
) -> None:  # fmt: skip
    """No more than two rows can be read; late: the memory goes while three run."""
    engine = dp.load("demo", assistant_model=drafter, budget=4)
    lane, news = Lane(engine, 4, 256), [list[Progress]() for _ in PROMPTS]
    tickets = []
    for prompt, told in zip(PROMPTS, news, strict=True):
        ((row,),) = engine.requests.read([prompt], 60, dp.Sampling(**WANTED), 1)
        tickets.append(Ticket([row], told.append))
    usual = getattr(owner, method)

    def full(self: Any, first: Any, /, *rest: Any, **more: Any) -> Any:
        if len(self.lengths if owner is KVCache else getattr(first, "tokens", first)) > 2:
            raise error
        return usual(self, first, *rest, **more)

    lane.waiting.extend(tickets[:3])
    for _ in range(3 if late else 0):
        lane.round(threading.Condition())
    assert len(lane.running) == (3 if late else 0)
    monkeypatch.setattr(owner, method, full)
    lane.waiting.append(tickets[3])
    while lane.busy:
        lane.round(threading.Condition())
    served = []
    for prompt, told in zip(PROMPTS, news, strict=True):
        done, text = told[-1].completion, "".join(piece for one in told for piece, _ in one.pieces)
        assert done is not None
        served.append(done.error is None)
        wanted = alone(server, prompt, 60, **WANTED)
        if done.error is None:
            assert done.text == text == wanted
        else:
            assert isinstance(done.error, Unavailable) and wanted.startswith(text)
            assert done.error.status == (500 if owner is KVCache else 503)
    committing = owner is KVCache               # half a round cannot be taken back: all fail
    assert served[:2] == [not committing] * 2 and not all(served)
