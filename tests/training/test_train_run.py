"""A whole run: from files to a folder that decodes, killed and gone on with, and described."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import Recorder, saved_model

from draftproof.drafters.medusa import MedusaHead
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model.device import processor
from draftproof.training import train_run, trainer
from draftproof.training.config import SelfGenerateConfig, TrainConfig, TrainRun
from draftproof.training.files import atomic_write, file_lock
from draftproof.training.self_generate import SelfGeneratedText
from draftproof.training.texts import DataConfig
from draftproof.training.train_run import train
from draftproof.weights.quantized_linear import slow_because


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and texts."""
    folder = tmp_path_factory.mktemp("source")
    saved_model(folder / "tiny")
    words = ("cat", "dog", "fox", "hen", "owl", "pig", "cow", "ant")
    story = "Once upon a time there was a {} who met a {}. They played in the sun."
    rows = [{"text": story.format(word, two)} for word in words for two in words]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def fresh_head(target: Any) -> MedusaHead:
    return MedusaHead.fresh(target, 2)


def run(source: Path, out: Path, recorder: Recorder | None = None, **changes: Any) -> Recorder:
    """Train; `changes` are of TrainRun where it has such a field, else of TrainConfig."""
    inputs: dict[str, Any] = {
        "model": str(source / "tiny"), "data": DataConfig((source / "texts.jsonl",)), "out": out,
        "head_config": {"heads": 2, "layers": 1, "share_lm_head": True},
    }  # fmt: skip
    inputs |= {name: changes.pop(name) for name in {*changes} & {*TrainRun.__dataclass_fields__}}
    usual = {"steps": 12, "learning_rate": 3e-3, "length": 32, "batch": 4}
    config = TrainConfig(**{**usual, **changes})
    recorder = recorder or Recorder()
    train(TrainRun(**inputs, config=config), fresh_head, recorder)
    return recorder


def same_text(model: str, heads: Path) -> bool:
    """Whether the heads draft, and the text is the one without them."""
    engine, plain = load(model, drafter=str(heads)), load(model, drafter="none")
    item, other = (e.generate("Once upon a time", max_new_tokens=24)[0] for e in (engine, plain))
    return item.tokens == other.tokens and item.stats.drafted > 0


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "heads"
    run(source, out)
    return out


def test_the_folder_decodes_and_says_where_it_comes_from(source: Path, finished: Path) -> None:
    assert same_text(str(source / "tiny"), finished)
    card = (finished / "README.md").read_text()
    record = json.loads((finished / "training.json").read_text())
    assert record["read_in"] == ("float32" if slow_because("int8", torch.float32) else "int8")
    digest = record["settings"]["data"]["texts.jsonl"]
    for words in ("base_model: tiny", "`tiny`", "texts.jsonl", digest, "licence", "12 steps",
                  "torch", processor()):
        assert words in card
    assert f"{record['held_out']['tokens_per_round']:.2f}" in card
    assert record["rows"] + record["held_out_rows"] == 64
    assert record["pairs"] == len(load_file(finished / "model.safetensors")["pairs.tokens"]) > 0
    assert f"{record['pairs']:,} pairs" in card and "{" not in card and "\n\n\n" not in card
    for file in ("README.md", "training.json", "config.json"):
        assert str(source) not in (finished / file).read_text()  # no folders of this machine
    assert {file.name for file in finished.iterdir()} == {      # nothing that only served to go on
        "README.md", "config.json", "log.jsonl", "model.safetensors", "training.json"}


def test_a_finished_run_is_not_repeated_and_another_is_refused_by_name(
    source: Path, finished: Path, tmp_path: Path
) -> None:
    before = (finished / "model.safetensors").read_bytes()
    again = run(source, finished)
    assert again.notes == [f"{finished} is complete"] and again.losses == []
    texts = (source / "texts.jsonl").read_text()
    (tmp_path / "texts.jsonl").write_text(texts.replace("cat", "bat"))
    saved_model(tmp_path / "tiny", seed=1)
    for words, changes in (
        (r"steps 12, now it is 13", {"steps": 13}),
        ("data", {"data": DataConfig((tmp_path / "texts.jsonl",))}),
        (r"dtype null, now it is .bfloat16", {"dtype": "bfloat16"}),
        ("weights", {"model": str(tmp_path / "tiny")}),
    ):
        with pytest.raises(BadInput, match=words):
            run(source, finished, **changes)
    with file_lock(finished), pytest.raises(BadInput, match="another process"):
        run(source, finished)
    assert (finished / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("quantised", [False, True])
def test_the_target_writes_its_own_texts_for_several_heads(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    """On a CPU a packed copy writes and reads, unless the target is quantised already."""
    if quantised:
        monkeypatch.setattr(train_run, "is_quantized", lambda model: True)
        monkeypatch.setattr(train_run.variants, "quantized", None)
    asked = dict[bool, set[str]]()

    class Watched(SelfGeneratedText):
        def write(self, *args: Any) -> None:
            asked[args[4]] = {document.text for document in args[3]}
            super().write(*args)

    monkeypatch.setattr(train_run, "SelfGeneratedText", Watched)
    config = SelfGenerateConfig(tokens=800, rows_at_a_time=8, file=tmp_path / "own.jsonl")
    first = run(source, tmp_path / "one", self_generate=config, dtype="bfloat16", steps=2)
    second = run(source, tmp_path / "two", self_generate=config, dtype="bfloat16", steps=4)
    assert not asked[True] & asked[False] and len(asked[True] | asked[False]) == 64
    assert first.bars["writing"][-1] == (800, 800) and not second.bars["writing"]
    record = json.loads((tmp_path / "two" / "training.json").read_text())
    packs = slow_because("int8", torch.bfloat16) is None and not quantised
    assert record["counted"] >= 750 and record["read_in"] == ("int8" if packs else "bfloat16")
    assert "target wrote" in (tmp_path / "two" / "README.md").read_text()


def test_chats_that_the_template_refuses_are_skipped(source: Path, tmp_path: Path) -> None:
    template = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system')"
                " }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    model, file = saved_model(tmp_path / "tiny"), tmp_path / "chats.jsonl"
    (model / "chat_template.jinja").write_text(template)
    system = {"role": "system", "content": "x"}
    for_each = [[{"role": "user", "content": f"Who is {n}?"},
                 {"role": "assistant", "content": f"It is {n}, a dog."}] for n in range(32)]
    rows = [{"messages": [system] * (n % 2) + chat} for n, chat in enumerate(for_each)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"model": str(model), "data": DataConfig((file,)), "steps": 2}
    recorder = run(source, tmp_path / "out", **settings)
    skipped = [re.findall(r"skipped (\d+) texts .* no system", note) for note in recorder.notes]
    assert sum(int(count) for (count,) in filter(None, skipped)) == 16 and len(recorder.losses) == 2
    config = SelfGenerateConfig(tokens=40, rows_at_a_time=2)
    generated = run(source, tmp_path / "own", self_generate=config, **settings)
    assert any("no system" in note for note in generated.notes) and generated.bars["writing"]


def test_prompts_without_an_answer_are_counted(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Who is {n}?", "answer": "A dog." * (n % 2)})
                            + "\n" for n in range(32)))
    notes = "".join(run(source, tmp_path / "out", data=DataConfig((file,)), steps=2).notes)
    assert sum(map(int, re.findall(r"skipped (\d+) texts .*?: there is no answer", notes))) == 16


def test_joint_training_killed_in_stage_two_resumes_to_the_same_result(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(trainer, "SAVED", 0)

    class Dying(Recorder):
        def stepped(self, step: int) -> None:
            if len(self.losses) == 10:
                raise SystemExit

    joint: dict[str, Any] = {"joint": True, "steps": 6, "learning_rate": 1e-2}
    out, broken = tmp_path / "whole", tmp_path / "broken"
    whole = run(source, out, **joint)
    assert whole.begun == (0, 6) and len(whole.losses) == 12                # heads alone, then both
    assert same_text(str(out / "model"), out / "heads")
    ends = [json.loads((out / stage / "log.jsonl").read_text().splitlines()[-1])
            for stage in ("first", "second")]
    record = json.loads((out / "training.json").read_text())
    assert (record["steps"], record["tokens"]) == (12, sum(end["tokens"] for end in ends))
    card = (out / "README.md").read_text()
    assert "with respect to this new model" in card and re.search(r"KL \d\.\d{4} away", card)
    assert not list(out.rglob("*.pt")) and str(tmp_path) not in card
    assert run(source, out, **joint).notes == [f"{out} is complete"]
    with pytest.raises(SystemExit):
        run(source, broken, Dying(), **joint)
    assert len(run(source, broken, **joint).losses) == 3
    for file in ("heads/model.safetensors", "model/model.safetensors"):
        assert (broken / file).read_bytes() == (out / file).read_bytes()


def test_full_disk_keeps_the_old_file_and_leaves_no_partial_file(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    file.write_bytes(b"old")
    for error in (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2 vs 1"),
                  OSError(28, "No space left on device")):
        with pytest.raises(BadInput, match=r"state\.pt cannot be .*the disk full") as told, \
                atomic_write(file) as part:
            part.write_bytes(b"half")
            raise error
        assert "enforce" not in str(told.value) and file.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [file]
