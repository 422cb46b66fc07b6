"""The loop: it learns, stops anywhere, goes on to the same end, and refuses other runs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_helpers import (
    Recorder,
    deterministic_rows,
    head_of,
    target,
    trainable,
    trainer_of,
    written,
)

from draftproof.drafters.heads import DraftHead
from draftproof.drafters.losses import head_loss
from draftproof.errors import BadInput
from draftproof.training import heads, trainer
from draftproof.training.config import TrainConfig
from draftproof.training.heads import read, slices
from draftproof.training.rows import Batches

KINDS = ("medusa", "redrafter", "shared redrafter")


def same(head: DraftHead, other: DraftHead) -> bool:
    pairs = zip(head.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_training_makes_a_head_predict(tmp_path: Path, kind: str) -> None:
    recorder = Recorder()
    config = {"texts": deterministic_rows, "steps": 60, "learning_rate": 1e-2}
    trainer_of(tmp_path, trainable(head_of(kind)), recorder, **config).fit()
    first, last = recorder.evaluations[0], recorder.evaluations[-1]
    assert len(recorder.evaluations) == 12
    assert last.loss < 0.6 * first.loss and recorder.losses[-1] < 0.6 * recorder.losses[0]
    assert min(last.top1) > max(first.top1) + 0.2
    assert last.tokens_per_round > first.tokens_per_round + 0.5
    assert all(five >= item for item, five in zip(last.top1, last.top5, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_bit_identical(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SAVED", 0)
    whole, broken, resumed = (head_of(kind) for _ in range(3))
    trainer_of(tmp_path / "whole", trainable(whole)).fit()
    with pytest.raises(SystemExit):
        trainer_of(tmp_path / "broken", trainable(broken), Recorder(stop_at=17)).fit()
    recorder, again = Recorder(), Recorder()
    trainer_of(tmp_path / "broken", trainable(resumed), recorder).fit()
    assert recorder.begun == (16, 20) and same(resumed, whole) and not same(broken, whole)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines()
            for name in ("whole", "broken")]
    timeless = [[{**json.loads(line), "tokens_per_second": 0, "seconds": 0} for line in log]
                for log in logs]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 20
    seconds = [json.loads(line)["seconds"] for line in logs[1]]
    assert seconds == sorted(seconds), "they are those of the whole run"
    rates = [TrainConfig(learning_rate=3e-3).rate_at(step, 20) for step in range(20)]
    assert [row["rate"] for row in timeless[1]] == rates
    trainer_of(tmp_path / "broken", trainable(resumed), again).fit()        # nothing is done twice
    assert again.losses == [] and same(resumed, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_reads_each_text_once(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all epochs, evaluations and the first solution; where there is no room, as before."""
    head, recorder = head_of(kind), Recorder()
    subject, read = trainable(head), list[int]()
    features = subject.reader.features

    def counted(tokens: Tensor, *others: Any, **more: Any) -> Any:
        read.append(len(tokens))
        return features(tokens, *others, **more)

    monkeypatch.setattr(subject.reader, "features", counted)
    trainer_of(tmp_path / "kept", subject, recorder, steps=None, epochs=3).fit()
    texts = [*written().rows, *written(8, seed=99).rows]
    assert sum(read) == len({tuple(row.tolist()) for row, _ in texts})
    assert len(recorder.losses) == 3 * len(Batches(written(), 4, 0))        # whole readings
    if kind == "shared redrafter":
        assert recorder.bars["reading"][-1][0] == recorder.bars["reading"][-1][1] > 0
    else:
        assert recorder.bars["reading"] == []
    monkeypatch.setattr(heads, "KEPT", 0)
    again = head_of(kind)
    trainer_of(tmp_path / "again", trainable(again), steps=None, epochs=3).fit()
    assert same(head, again)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_a_step_with_everything_kept(
    tmp_path: Path, number: signal.Signals
) -> None:
    class Caller(Recorder):
        def stepped(self, step: int) -> None:
            if step == 5:
                os.kill(os.getpid(), number)

    whole, resumed, recorder = head_of("medusa"), head_of("medusa"), Recorder()
    trainer_of(tmp_path / "whole", trainable(whole)).fit()
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="step 5 of 20; the same command goes on"):
        trainer_of(tmp_path / "broken", trainable(head_of("medusa")), Caller()).fit()
    assert signal.getsignal(number) is before
    trainer_of(tmp_path / "broken", trainable(resumed), recorder).fit()
    assert recorder.begun == (5, 20) and same(resumed, whole)


def test_other_settings_and_torn_checkpoints_are_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, trainable(head_of("medusa")), settings={"rate": 0.1, "heads": 2},
               steps=2).fit()
    for settings, words in (({"rate": 0.2, "heads": 2}, r"rate 0\.1, now it is 0\.2"),
                            ({"rate": 0.1}, "heads")):
        with pytest.raises(BadInput, match=words):
            trainer_of(tmp_path, trainable(head_of("medusa")), settings=settings)
    state = tmp_path / "state.pt"
    state.write_bytes(state.read_bytes()[:2000])
    with pytest.raises(BadInput, match="remove it"):
        trainer_of(tmp_path, trainable(head_of("medusa")), steps=2)


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2 vs 1")

    monkeypatch.setattr(trainer.torch, "save", full)
    with pytest.raises(BadInput, match=r"state\.pt cannot be written .* disk full"):
        trainer_of(tmp_path, trainable(head_of("medusa"))).fit()


def gradients(head: DraftHead) -> Tensor:
    return torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", KINDS)
def test_slices_prompts_and_padding_change_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is that of the whole batch at once; what no step needs is not read."""
    batch, counted = written().batch(range(4), 32), torch.arange(32)
    sample = batch._replace(weights=((counted > 11) & (counted < 23)).float().expand(4, 32))
    whole, cut = head_of(kind), head_of(kind)
    with torch.no_grad():
        features = read(target(), sample, whole, logits=False)
    loss = head_loss(whole, features, target())
    loss.backward()  # type: ignore[no-untyped-call]
    ((part, share),) = slices(features, cut, target())
    assert share == 1 and part.tokens.shape[1] == 23 - (12 - cut.steps - 1)
    monkeypatch.setattr(heads, "CACHED", 1)                                 # a row at a time
    assert len(list(slices(features, cut, target()))) == 4
    assert torch.allclose(trainable(cut).backward(sample), loss)
    assert torch.allclose(gradients(whole), gradients(cut), atol=1e-12)


def test_the_rate_rises_to_the_wanted_one_and_falls_to_zero() -> None:
    config = TrainConfig(learning_rate=0.5)
    rates = [config.rate_at(step, 200) for step in range(200)]
    assert max(rates) == pytest.approx(0.5) and rates.index(max(rates)) == 20
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[0] < 0.05 and 0 <= rates[-1] < 1e-3


def test_default_settings_depend_on_the_target() -> None:
    """Published: a rate of 0.001 for a width of 4096; less for steps of few rows."""
    wide = TrainConfig(batch=32).for_target(4096, 256, 4096)
    assert (wide.learning_rate, wide.length, wide.draft_vocab) == (1e-3, 256, None)
    few = TrainConfig(batch=4).for_target(256, 8192, 49152)
    assert few.learning_rate == pytest.approx(4e-3 / 8**0.5)
    assert (few.length, few.draft_vocab) == (512, 8192)
    config = TrainConfig(learning_rate=0.1, length=64, draft_vocab=49152)
    assert config.for_target(256, 8192, 49152) == config
