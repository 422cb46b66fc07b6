"""The loop: it learns, stops anywhere, goes on to the same end, and refuses what would not be the same run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from lessons import Silent, head_of, ruled, subject_of, trainer_of, written
from torch import Tensor

from draftproof.drafters.base import DraftHead
from draftproof.errors import BadInput
from draftproof.training.rows import Batches
from draftproof.training.trainer import Plan

KINDS = ("medusa", "redrafter")


def weights(head: DraftHead) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in head.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_training_makes_a_head_foretell(tmp_path: Path, kind: str) -> None:
    watch = Silent()
    trainer_of(tmp_path, subject_of(head_of(kind)), watch, texts=ruled, steps=60, rate=1e-2).fit()
    first, last = watch.exams[0], watch.exams[-1]
    assert last.loss < 0.6 * first.loss and watch.losses[-1] < 0.6 * watch.losses[0]
    assert min(last.top1) > max(first.top1) + 0.2 and last.tokens_per_round > first.tokens_per_round + 0.5
    assert all(five >= one for exam in watch.exams for one, five in zip(exam.top1, exam.top5, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_dies_and_goes_on_ends_at_the_same_bits(tmp_path: Path, kind: str) -> None:
    whole, broken = head_of(kind), head_of(kind)
    trainer_of(tmp_path / "whole", subject_of(whole)).fit()
    with pytest.raises(SystemExit):
        trainer_of(tmp_path / "broken", subject_of(broken), Silent(stop_at=17), save_minutes=0).fit()
    resumed, watch = head_of(kind), Silent()
    trainer = trainer_of(tmp_path / "broken", subject_of(resumed), watch)
    trainer.fit()
    assert watch.begun == (16, 20) and same(weights(resumed), weights(whole)) and not same(weights(broken), weights(whole))
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "broken")]
    timeless = [[{**json.loads(line), "tokens_per_second": 0, "seconds": 0} for line in log] for log in logs]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 20


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    head = head_of("medusa")
    trainer_of(tmp_path, subject_of(head)).fit()
    before, watch = weights(head), Silent()
    trainer_of(tmp_path, subject_of(head), watch).fit()
    assert watch.losses == [] and same(weights(head), before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_behind_a_step_with_everything_kept(tmp_path: Path, number: signal.Signals) -> None:
    class Caller(Silent):
        def stepped(self, step: int, loss: float, speed: float) -> None:
            super().stepped(step, loss, speed)
            if step == 5:
                os.kill(os.getpid(), number)

    whole, resumed = head_of("medusa"), head_of("medusa")
    trainer_of(tmp_path / "whole", subject_of(whole)).fit()
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="step 5 of 20; the same command goes on"):
        trainer_of(tmp_path / "broken", subject_of(head_of("medusa")), Caller()).fit()
    assert signal.getsignal(number) is before
    watch = Silent()
    trainer_of(tmp_path / "broken", subject_of(resumed), watch).fit()
    assert watch.begun == (5, 20) and same(weights(resumed), weights(whole))


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    trainer_of(tmp_path, subject_of(head_of("medusa")), settings={"rate": 0.1, "rows": "abc"}).fit()
    with pytest.raises(BadInput, match=r"rate 0\.1, now it is 0\.2"):
        trainer_of(tmp_path, subject_of(head_of("medusa")), settings={"rate": 0.2, "rows": "abc"})
    with pytest.raises(BadInput, match="rows"):
        trainer_of(tmp_path, subject_of(head_of("medusa")), settings={"rate": 0.1, "rows": "abd"})


def test_a_checkpoint_that_is_torn_is_one_sentence(tmp_path: Path) -> None:
    trainer_of(tmp_path, subject_of(head_of("medusa")), steps=2).fit()
    state = tmp_path / "state.pt"
    state.write_bytes(state.read_bytes()[:2000])
    with pytest.raises(BadInput, match="remove it"):
        trainer_of(tmp_path, subject_of(head_of("medusa")), steps=2)


def test_minutes_become_steps_once_and_nothing_is_learnt_meanwhile(tmp_path: Path) -> None:
    head = head_of("medusa")
    before = weights(head)
    trainer = trainer_of(tmp_path, subject_of(head), Silent(stop_at=1), steps=None, minutes=0.05)
    with pytest.raises(SystemExit):
        trainer.fit()
    assert trainer.steps >= 12
    resumed = trainer_of(tmp_path, subject_of(head_of("medusa")), steps=None, minutes=0.05)
    assert resumed.steps == trainer.steps and resumed.step == 0 and same(weights(head_of("medusa")), before)


def test_several_batches_per_step_are_one_large_batch() -> None:
    """Each weighed by what counts in it, the gradient is that of all their tokens together."""
    rows = written()
    parts = [rows.batch(range(start, start + 4), 32) for start in (0, 4, 8)]
    whole, size = rows.batch(range(12), 32), sum(part.size for part in parts)
    one, several = head_of("medusa"), head_of("medusa")
    loss = subject_of(one).backward(whole, 1.0, 0.0)
    total = sum(subject_of(several).backward(part, part.size / size, 0.0) for part in parts)
    assert abs(float(loss) - float(total)) < 0.02 * float(loss)
    for mine, theirs in zip(one.parameters(), several.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.nn.functional.cosine_similarity(mine.grad.flatten(), theirs.grad.flatten(), 0) > 0.99


def test_slices_of_a_batch_give_the_gradient_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = written()
    full = [number for number in range(len(rows)) if rows.sizes()[number] == 32][:4] or [0, 1]
    batch = rows.batch(full, 32)
    even = type(batch)(batch.tokens, (torch.arange(32) > 8).float().expand(batch.tokens.shape), batch.rows, batch.read)
    one, sliced = head_of("medusa"), head_of("medusa")
    loss = subject_of(one).backward(even, 1.0, 0.0)
    monkeypatch.setattr("draftproof.training.heads.CACHED", 1)             # a row at a time
    assert torch.allclose(subject_of(sliced).backward(even, 1.0, 0.0), loss)
    for mine, theirs in zip(one.parameters(), sliced.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.allclose(mine.grad, theirs.grad, atol=1e-12)


def test_the_rate_rises_to_the_wanted_one_and_falls_to_zero() -> None:
    plan = Plan(rate=1.0, warmup=0.1)
    rates = [plan.factor(step, 200) for step in range(200)]
    assert max(rates) == pytest.approx(1.0) and rates.index(max(rates)) == 20
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[0] < 0.1 and 0 <= rates[-1] < 1e-3


def test_epochs_are_whole_readings_of_the_rows(tmp_path: Path) -> None:
    watch = Silent()
    trainer_of(tmp_path, subject_of(head_of("medusa")), watch, steps=None, epochs=2).fit()
    assert len(watch.losses) == 2 * len(Batches(written(), 4, 0)) and len(watch.losses) > 5
