"""Hidden states on disk: the same ones, no more than allowed, and read once."""

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


def test_what_is_kept_is_what_was_read_and_is_read_once(tmp_path: Path) -> None:
    batches, streamed = Batches(written(), 4, 0), Counting(target(), (-1, 1), True)
    reader = Cached(streamed, tmp_path, 1.0)
    size = len(batches)
    first = [reader(batches[step]) for step in range(size)]
    again = [reader(batches[step]) for step in range(size)]
    later = Cached(streamed, tmp_path, 1.0)
    for step in range(size, 2 * size):                                   # other rows side by side
        later(batches[step])
    assert streamed.reads == size > 3
    for step, (one, other) in enumerate(zip(first, again, strict=True)):
        true, counts = streamed(batches[step]), batches[step].weights > 0
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.weights, other.weights)
        for mine in (one, other):
            assert torch.equal(mine.hidden[counts], true.hidden.bfloat16().double()[counts])
            assert mine.logits is not None and true.logits is not None
            assert torch.allclose(mine.logits[counts], true.logits[counts], rtol=0.05, atol=0.2)


@pytest.mark.parametrize(("allowed", "some"), [(20_000, True), (0, False)])
def test_it_never_takes_more_than_allowed(tmp_path: Path, allowed: int, some: bool) -> None:
    streamed, batches = Counting(target(), (-1, 1), False), Batches(written(), 1, 0)
    reader = Cached(streamed, tmp_path, allowed / 1e9)
    for step in range(2 * len(batches)):
        reader(batches[step])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= allowed
    assert len(batches) < streamed.reads <= 2 * len(batches)
    assert (streamed.reads < 2 * len(batches)) == some


def test_logits_that_do_not_follow_from_hidden_states_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = Target(fresh("cohere"))
    Cached(Streamed(scaled, (-1,), True), tmp_path, 1.0)                  # a factor that is known
    plain = lambda self, hidden: self.model.get_output_embeddings()(hidden)  # noqa: E731
    monkeypatch.setattr(Target, "unembed", plain)
    with pytest.raises(BadInput, match="cache"):
        Cached(Streamed(scaled, (-1,), True), tmp_path, 1.0)
    Cached(Streamed(scaled, (-1,), False), tmp_path, 1.0)
