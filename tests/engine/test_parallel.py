"""A target sharded over two processes writes its own text, whatever drafts or a rank rounds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from two_ranks import NEW, PROMPTS, TEMPERATURES

import draftproof as dp
from draftproof.errors import BadInput
from draftproof.model.parallel import ALONE, ProcessGroup, load_sharded

ROWS = 5
PATIENCE = 120
ENDED = 30
"""Seconds within which no rank may still wait for one that was killed."""


class Run(NamedTuple):
    """Two ranks under torchrun, still busy; what they found, and where they write."""

    process: subprocess.Popen[str]
    folder: Path
    found: list[dict[str, Any]]


def save(folder: Path) -> Path:
    """A random Llama whose heads two ranks can share, with the demo's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
                         bos_token_id=0, eos_token_id=None, initializer_range=0.4)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(dp.embedded("demo") / name, folder / name)
    rows = [json.dumps({"prompt": f"Once upon a time {count}", "max_new_tokens": 2 + count})
            for count in range(ROWS)]
    Path(folder, "rows.jsonl").write_text("\n".join(rows))
    return folder


def started(folder: Path, engine: str, dtype: str, patience: float) -> Run:
    script = Path(__file__).with_name("two_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
              "--master-port", "0", "--standalone"]
    with Path(folder, "out.txt").open("w") as out, Path(folder, "err.txt").open("w") as err:
        process = subprocess.Popen([*launch, str(script), engine, str(folder), dtype], stdout=out,
                                   stderr=err, text=True,
                                   env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                                        "PYTHONPATH": str(script.parents[1])})  # fmt: skip
    pids, until = [Path(folder, f"pid{rank}") for rank in range(2)], time.monotonic() + patience
    while not all(pid.exists() for pid in pids):
        said = Path(folder, "err.txt").read_text()
        assert process.poll() is None and time.monotonic() < until, said[-3000:]
        time.sleep(0.1)
    return Run(process, folder,
               [json.loads(Path(folder, f"found{rank}.json").read_text()) for rank in range(2)])


def ended(run: Run) -> None:
    if run.process.poll() is None:
        run.process.terminate()
        run.process.wait(60)


@pytest.fixture(scope="module")
def tensor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = started(save(tmp_path_factory.mktemp("tensor")), "tensor", "float64", 200)
    yield run
    ended(run)


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if find_spec("deepspeed") is None or find_spec("ninja") is None:
        pytest.skip("DeepSpeed is not installed")
    run = started(save(tmp_path_factory.mktemp("deepspeed")), "deepspeed", "float32", 280)
    yield run
    ended(run)


def assert_one_text(run: Run) -> None:
    """Every drafter gave the text of plain decoding on both ranks, and some were right about it."""
    ours, theirs = (found["texts"] for found in run.found)
    for temperature in map(str, TEMPERATURES):
        plain = ours["plain"][temperature]
        assert [len(tokens) for tokens in plain] == [NEW] * len(PROMPTS)
        for name in ours:
            wanted = plain if name != "block" or temperature == "0.0" else ours[name][temperature]
            assert ours[name][temperature] == wanted, (
                f"{name} wrote another text at temperature {temperature}"
            )
            assert theirs[name][temperature] == wanted, (
                f"rank 1 wrote another text with {name} at {temperature}"
            )
    assert ours["plain"]["0.0"] != ours["plain"]["1.0"]
    for name in ("draft", "tree", "block"):
        assert ours[name]["per_round"] > 2, f"{name} was never right: what stands was not tried"


def assert_one_voice(run: Run) -> None:
    """Rows are written once, in order; the text in the making comes once."""
    rows = [json.loads(line) for line in Path(run.folder, "out.jsonl").read_text().splitlines()]
    assert [(row["index"], row["tokens"]) for row in rows] == [
        (index, 2 + index) for index in range(ROWS)
    ]
    assert Path(run.folder, "err.txt").read_text().count(f"{ROWS} rows · ") == 1


def assert_both_end(run: Run) -> None:
    """One rank is killed; the other ends, by a sentence or by torchrun, which ends too."""
    until = time.monotonic() + PATIENCE
    while not Path(run.folder, "out.txt").read_text():                  # rank 0 is writing
        assert run.process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.kill(int(Path(run.folder, "pid1").read_text()), signal.SIGKILL)
    run.process.wait(ENDED)
    said = [line for line in Path(run.folder, "err.txt").read_text().splitlines()
            if line.startswith("draftproof: ")]
    assert len(said) <= 1 and all("rank" in line for line in said), said
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(run.folder, "pid0").read_text()), 0)


def test_the_text_of_a_sharded_target_is_its_own_with_any_drafter(tensor: Run) -> None:
    assert_one_text(tensor)


def test_a_sharded_target_writes_what_the_whole_one_does(tensor: Run) -> None:
    engine = dp.load(tensor.folder, drafter="none", dtype="float64")
    for temperature in TEMPERATURES:
        done = engine.generate(PROMPTS, sampling=dp.Sampling(temperature=temperature, seed=2),
                               max_new_tokens=NEW)
        assert [one.tokens for one in done] == tensor.found[0]["texts"]["plain"][str(temperature)]


def test_each_rank_holds_its_own_heads_and_reads_by_the_models_forward(tensor: Run) -> None:
    assert all(found["inside"] == {"heads": 1, "fast": False, "trees": True}
               for found in tensor.found)


def test_only_one_rank_writes(tensor: Run) -> None:
    assert_one_voice(tensor)


def test_a_killed_rank_ends_the_others(tensor: Run) -> None:
    assert_both_end(tensor)


@pytest.mark.timeout(400)
def test_deepspeed_shards_alike(deepspeed: Run) -> None:
    assert_one_text(deepspeed)
    assert all(found["inside"]["heads"] == 1 for found in deepspeed.found)
    assert_one_voice(deepspeed)
    assert_both_end(deepspeed)


def test_a_process_alone_agrees_with_itself() -> None:
    mine = torch.tensor([3, 1])
    assert ALONE.same(mine)[0] is mine and ALONE.number(4) == 4
    assert ALONE.from_rank_0(lambda: "x") == "x"
    with pytest.raises(RuntimeError, match="gloo"), ALONE.intact():
        raise RuntimeError("gloo is not to blame")


@pytest.mark.parametrize(("engine", "options", "sentence"),
                         [("tensor", {}, "torchrun"),
                          ("megatron", {}, "choose one of tensor, deepspeed"),
                          ("tensor", {"quantize": "int8"}, "leave quantisation out"),
                          ("tensor", {"drafter": "self-layers:1"}, "cannot draft for itself")])
def test_a_mistaken_use_is_one_sentence(
    engine: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence) as told:
        dp.load("demo", parallel=engine, **options)  # type: ignore[arg-type]
    assert "\n" not in str(told.value)


def test_deepspeed_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.model.parallel.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install 'draftproof\\[deepspeed\\]'"):
        dp.load("demo", parallel="deepspeed")


def test_ranks_must_share_the_heads_evenly(tmp_path: Path) -> None:
    with pytest.raises(BadInput,
                       match="4 attention heads, which 3 ranks cannot share evenly; start 2"):
        load_sharded(save(tmp_path / "model"), None, None, "tensor", ProcessGroup(0, 3))


def test_a_loaded_model_is_not_sharded_afterwards(tmp_path: Path) -> None:
    whole = LlamaForCausalLM.from_pretrained(save(tmp_path / "model"))
    with pytest.raises(BadInput, match="a loaded model was given"):
        dp.load(whole, parallel="tensor")
