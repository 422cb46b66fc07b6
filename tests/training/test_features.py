"""Hidden states on disk: the same ones, no more than allowed, and never those of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import fresh, target
from training_helpers import written

from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.training.features import Cached, Streamed
from draftproof.training.rows import Batches


class Counting(Streamed):
    """Counts how often the target reads."""

    reads = 0

    def __call__(self, batch):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__call__(batch)


def cached(folder: Path, gigabytes: float = 1.0, identity: str = "a", logits: bool = False) -> tuple[Cached, Counting]:
    streamed = Counting(target(), (-1, 1), logits)
    return Cached(streamed, written(), folder, gigabytes, identity), streamed


def test_what_is_kept_is_what_was_read_and_is_read_once(tmp_path: Path) -> None:
    batches = Batches(written(), 4, 0)
    reader, streamed = cached(tmp_path, logits=True)
    first = [reader(batches[step]) for step in range(len(batches))]
    again = [reader(batches[step]) for step in range(len(batches))]
    assert streamed.reads == len(batches) > 3
    for step, (one, other) in enumerate(zip(first, again, strict=True)):
        true, counts = streamed(batches[step]), batches[step].weights > 0
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.weights, other.weights)
        for mine in (one, other):
            assert torch.equal(mine.hidden[counts], true.hidden.bfloat16().double()[counts])
            assert mine.logits is not None and true.logits is not None
            assert torch.allclose(mine.logits[counts], true.logits[counts], rtol=0.05, atol=0.2)


def test_a_later_run_finds_it_and_another_target_does_not(tmp_path: Path) -> None:
    batches = Batches(written(), 4, 0)
    reader, _ = cached(tmp_path)
    for step in range(len(batches)):
        reader(batches[step])
    for identity, reads in (("a", 0), ("b", len(batches))):
        later, streamed = cached(tmp_path, identity=identity)
        for step in range(len(batches), 2 * len(batches)):                      # other rows side by side
            later(batches[step])
        assert streamed.reads == reads


def test_it_never_takes_more_than_allowed(tmp_path: Path) -> None:
    rows, bytes_per_token = written(), 2 * 2 * 32
    allowed = 100 * bytes_per_token
    reader, streamed = cached(tmp_path, gigabytes=allowed / 1e9)
    batches = Batches(rows, 1, 0)
    for step in range(2 * len(batches)):
        reader(batches[step])
    assert next(tmp_path.rglob("hidden.bf16")).stat().st_size <= allowed
    assert 0 < reader.kept < len(rows)
    assert len(batches) < streamed.reads < 2 * len(batches)


def test_no_room_at_all_is_no_cache(tmp_path: Path) -> None:
    reader, streamed = cached(tmp_path, gigabytes=1e-9)
    for _ in range(2):
        reader(Batches(written(), 4, 0)[0])
    assert streamed.reads == 2 and reader.kept == 0


def test_logits_that_are_not_the_heads_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Target(fresh("cohere"))
    Cached(Streamed(scaled, (-1,), True), written(), tmp_path, 1.0, "b")          # a factor that is known
    monkeypatch.setattr(Target, "unembed", lambda self, hidden: self.model.get_output_embeddings()(hidden))
    with pytest.raises(BadInput, match="cache"):
        Cached(Streamed(scaled, (-1,), True), written(), tmp_path, 1.0, "a")
    Cached(Streamed(scaled, (-1,), False), written(), tmp_path, 1.0, "a")
