"""A whole course: from files to a folder that decodes, killed and gone on with, and described."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lessons import Silent, saved_model

from draftproof.drafters.medusa import MedusaHead
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model.packed_linear import Whole
from draftproof.training import data
from draftproof.training.data import DataConfig, SelfGenerateConfig
from draftproof.training.joint import Together
from draftproof.training.lock import alone_in
from draftproof.training.self_generate import Progress
from draftproof.training.train_run import TrainRun, train
from draftproof.training.trainer import Plan


class Follower(Silent):
    """Hears everything of a course."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.progress: list[Progress] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def wrote(self, progress: Progress) -> None:
        self.progress.append(progress)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and texts."""
    folder = tmp_path_factory.mktemp("course")
    saved_model(folder / "tiny")
    words = ("cat", "dog", "fox", "hen", "owl", "pig", "cow", "ant")
    story = "Once upon a time there was a {} who met a {}. They played in the sun."
    rows = [{"text": story.format(one, two)} for one in words for two in words]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def course_of(ground: Path, out: Path, **changes: Any) -> TrainRun:
    given: dict[str, Any] = {
        "model": str(ground / "tiny"),
        "sources": DataConfig((ground / "texts.jsonl",)),
        "out": out,
        "form": {"heads": 2},
        "plan": Plan(steps=12, rate=3e-3),
        "length": 32,
        "batch": 4,
    }
    return TrainRun(**{**given, **changes})


def fresh_head(target: Any) -> MedusaHead:
    return MedusaHead.fresh(target, 2)


def followed(course: TrainRun) -> Follower:
    guide = Follower()
    train(course, fresh_head, guide)
    return guide


@pytest.fixture(scope="module")
def finished(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "heads"
    followed(course_of(ground, out))
    return out


def test_the_folder_decodes_and_the_text_is_the_targets(ground: Path, finished: Path) -> None:
    engine, plain = load(str(ground / "tiny"), drafter=str(finished)), load(str(ground / "tiny"), drafter="none")
    one, other = (e.generate("Once upon a time", max_new_tokens=24)[0] for e in (engine, plain))
    assert one.tokens == other.tokens and one.stats.drafted > 0


def test_the_folder_says_where_it_comes_from(ground: Path, finished: Path) -> None:
    card, record = (finished / "README.md").read_text(), json.loads((finished / "training.json").read_text())
    for words in ("`tiny`", "texts.jsonl", record["settings"]["data"]["texts.jsonl"], "licence", "12 steps", "torch", "CPU"):
        assert words in card
    assert f"{record['held_out']['tokens_per_round']:.2f}" in card and record["rows"] + record["held_out_rows"] == 64
    assert record["pairs"] == json.loads((finished / "config.json").read_text())["pairs"] > 0
    assert f"{record['pairs']:,} pairs" in card
    for file in ("README.md", "training.json", "config.json"):
        assert str(ground) not in (finished / file).read_text()           # nothing of this machine's folders
    for name in ("accuracy.png", "loss.png"):
        assert f"({name})" in card and (finished / name).read_bytes().startswith(b"\x89PNG")


def test_nothing_is_left_that_only_served_to_go_on(finished: Path) -> None:
    assert {file.name for file in finished.iterdir()} == {
        "README.md", "accuracy.png", "config.json", "log.jsonl", "loss.png", "model.safetensors", "training.json",
    }  # fmt: skip


def test_a_finished_course_is_not_followed_again_and_another_is_refused(ground: Path, finished: Path) -> None:
    before = (finished / "model.safetensors").read_bytes()
    guide = followed(course_of(ground, finished))
    assert guide.notes == [f"{finished} is complete"] and guide.losses == []
    with pytest.raises(BadInput, match=r"steps 12, now it is 13"):
        followed(course_of(ground, finished, plan=Plan(steps=13, rate=3e-3)))
    assert (finished / "model.safetensors").read_bytes() == before


def test_two_never_train_in_one_folder(ground: Path, tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(BadInput, match="another process"):
        followed(course_of(ground, tmp_path))


def test_changed_data_and_weights_are_refused_by_name(ground: Path, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text((ground / "texts.jsonl").read_text().replace("cat", "bat"))
    with pytest.raises(BadInput, match="data"):
        followed(course_of(ground, finished, sources=DataConfig((tmp_path / "texts.jsonl",))))
    other = saved_model(tmp_path / "tiny", seed=1)
    with pytest.raises(BadInput, match="weights"):
        followed(course_of(ground, finished, model=str(other)))


def test_features_on_disk_change_nothing_but_the_time(ground: Path, tmp_path: Path) -> None:
    """With a target in bfloat16 they are its very states; epochs after the first read no target."""
    plan = Plan(epochs=3, rate=3e-3)
    outs = [tmp_path / "cached", tmp_path / "streamed"]
    for out, gigabytes in zip(outs, (1.0, 0.0), strict=True):
        followed(course_of(ground, out, plan=plan, cache_gb=gigabytes, objective="kl", dtype="bfloat16"))
    losses = [[json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()] for out in outs]
    assert len(losses[0]) > 6 and losses[0] == pytest.approx(losses[1], rel=0.02)
    assert not (outs[0] / "cache").exists()


def test_the_target_writes_its_own_texts_for_several_heads(ground: Path, tmp_path: Path) -> None:
    writing = SelfGenerateConfig(tokens=800, rows_at_a_time=8, file=tmp_path / "own.jsonl")
    first = followed(course_of(ground, tmp_path / "one", writing=writing))
    second = followed(course_of(ground, tmp_path / "two", writing=writing, plan=Plan(steps=4)))
    assert first.progress and not second.progress and first.progress[-1].tokens == 800
    record = json.loads((tmp_path / "two" / "training.json").read_text())
    assert record["counted"] >= 750 and "target wrote" in (tmp_path / "two" / "README.md").read_text()


def test_on_a_cpu_the_target_writes_by_a_packed_copy(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What learns is not changed: training needs the layers as they were."""
    packed = []

    def seen(*args: Any, **options: Any) -> Any:
        engine = load(*args, **options)
        packed.append(sum(isinstance(module, Whole) for module in engine.target.model.modules()))
        return engine

    monkeypatch.setattr(data, "load", seen)
    writing = SelfGenerateConfig(tokens=200, rows_at_a_time=8)
    followed(course_of(ground, tmp_path, writing=writing, plan=Plan(steps=2), dtype="bfloat16"))
    assert len(packed) == 1 and packed[0] > 0


def test_a_run_that_is_killed_and_gone_on_with_ends_at_the_same_bits(ground: Path, tmp_path: Path) -> None:
    options = ["medusa", str(ground / "tiny"), "--data", str(ground / "texts.jsonl"), "--heads", "2", "--steps", "150"]
    options += ["--length", "32", "--batch", "4", "--lr", "0.003"]
    broken = tmp_path / "broken"
    script = "from draftproof.cli.app import main; main()"
    command = [sys.executable, "-c", script, "train", *options, "--out", str(broken), "--save-minutes", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _wait_for(broken / "log.jsonl", 20, running)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL and not (broken / "training.json").exists()

    plan = Plan(steps=150, rate=3e-3)
    resumed = followed(_as_the_command_line(course_of(ground, broken, plan=plan)))
    whole = followed(_as_the_command_line(course_of(ground, tmp_path / "whole", plan=plan)))
    assert 0 < len(resumed.losses) < 150 == len(whole.losses)
    assert resumed.losses[-1] == whole.losses[-1] and resumed.exams[-1] == whole.exams[-1]
    assert (broken / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def _as_the_command_line(course: TrainRun) -> TrainRun:
    """Its record of the form is more detailed; the bits are the same."""
    from dataclasses import replace

    return replace(course, form={"heads": 2, "layers": 1, "share_lm_head": True})


def _wait_for(log: Path, lines: int, running: subprocess.Popen[bytes]) -> None:
    for _ in range(2400):
        if log.exists() and log.read_text().count("\n") >= lines:
            return
        assert running.poll() is None, running.stderr and running.stderr.read().decode()
        time.sleep(0.05)
    raise AssertionError("it never began")


def test_a_joint_course_gives_a_model_and_its_heads(ground: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "both"
    course = course_of(ground, out, joint=Together(distil=True), plan=Plan(steps=8, rate=1e-2))
    guide = followed(course)
    assert guide.begun == (0, 8) and len(guide.losses) == 16                # heads alone, then both
    engine, plain = load(str(out / "model"), drafter=str(out / "heads")), load(str(out / "model"), drafter="none")
    one, other = (e.generate("Once upon a time", max_new_tokens=24)[0] for e in (engine, plain))
    assert one.tokens == other.tokens and one.stats.drafted > 0
    card = (out / "README.md").read_text()
    assert "another model" in card and "with respect to this new model" in card and re.search(r"KL \d\.\d{4} away", card)
    assert not list(out.rglob("*.pt")) and str(tmp_path) not in card
    assert followed(course).notes == [f"{out} is complete"]


def test_a_joint_course_that_dies_in_its_second_stage_ends_at_the_same_bits(ground: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")

    class Dying(Follower):
        def stepped(self, step: int, loss: float, speed: float) -> None:
            super().stepped(step, loss, speed)
            if len(self.losses) == 10:
                raise SystemExit

    def course(out: Path, save_minutes: float) -> TrainRun:
        return course_of(ground, out, joint=Together(), plan=Plan(steps=6, rate=1e-2, save_minutes=save_minutes))

    followed(course(tmp_path / "whole", 2.0))
    with pytest.raises(SystemExit):
        train(course(tmp_path / "broken", 0), fresh_head, Dying())
    resumed = followed(course(tmp_path / "broken", 2.0))
    assert len(resumed.losses) == 3
    for file in ("heads/model.safetensors", "model/model.safetensors"):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
