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
    reports: list[dict[str, Any]]


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
    folders = [script.parents[1], script.parents[2] / "src"]  # of this checkout
    paths = os.pathsep.join(map(str, folders))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
              "--master-port", "0", "--standalone"]
    with Path(folder, "out.txt").open("w") as out, Path(folder, "err.txt").open("w") as err:
        process = subprocess.Popen([*launch, str(script), engine, str(folder), dtype], stdout=out,
                                   stderr=err, text=True,
                                   env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                                        "PYTHONPATH": paths})  # fmt: skip
    pids, until = [Path(folder, f"pid{rank}") for rank in range(2)], time.monotonic() + patience
    while not all(pid.exists() for pid in pids):
        content = Path(folder, "err.txt").read_text()
        assert process.poll() is None and time.monotonic() < until, content[-3000:]
        time.sleep(0.1)
    return Run(process, folder,
               [json.loads(Path(folder, f"found{rank}.json").read_text()) for rank in range(2)])


@pytest.fixture(scope="module", params=["tensor", "deepspeed"])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    by_plan = request.param == "tensor"
    if not by_plan and (find_spec("deepspeed") is None or find_spec("ninja") is None):
        pytest.skip("DeepSpeed is not installed")
    folder = save(tmp_path_factory.mktemp(request.param))
    result = started(folder, request.param, *(("float64", 200) if by_plan else ("float32", 280)))
    yield result
    if result.process.poll() is None:
        result.process.terminate()
        result.process.wait(60)


@pytest.mark.timeout(400)
def test_the_text_of_a_sharded_target_is_its_own_with_any_drafter(run: Run) -> None:
    """On both ranks; some drafts were right about it, and cut by the plan it is the whole one's."""
    first, second = (result["texts"] for result in run.reports)
    for temperature in map(str, TEMPERATURES):
        plain = first["plain"][temperature]
        assert [len(tokens) for tokens in plain] == [NEW] * len(PROMPTS)
        for name in first:
            wanted = plain if name != "block" or temperature == "0.0" else first[name][temperature]
            for rank, texts in enumerate((first, second)):
                what = f"rank {rank} wrote another text with {name} at temperature {temperature}"
                assert texts[name][temperature] == wanted, what
    assert first["plain"]["0.0"] != first["plain"]["1.0"]
    for name in ("draft", "tree", "block"):
        assert first[name]["per_round"] > 2, f"{name} was never right: what stands was not tried"
    assert all(result["inside"]["heads"] == 1 for result in run.reports)
    if run.folder.name.startswith("tensor"):
        assert not any(result["inside"]["fast"] for result in run.reports)
        engine = dp.load(run.folder, drafter="none", dtype="float64")
        for temperature in TEMPERATURES:
            want = dp.Sampling(temperature=temperature, seed=2)
            done = engine.generate(PROMPTS, sampling=want, max_new_tokens=NEW)
            assert [completion.tokens for completion in done] == first["plain"][str(temperature)]


@pytest.mark.timeout(400)
def test_one_rank_writes_and_a_killed_one_ends_the_others(run: Run) -> None:
    """Rows are written once, in order; then the other rank ends by a sentence, or by torchrun."""
    rows = [json.loads(line) for line in Path(run.folder, "out.jsonl").read_text().splitlines()]
    assert [(row["index"], row["tokens"]) for row in rows] == [
        (index, 2 + index) for index in range(ROWS)
    ]
    assert Path(run.folder, "err.txt").read_text().count(f"{ROWS} rows · ") == 1
    until = time.monotonic() + PATIENCE
    while not Path(run.folder, "out.txt").read_text():                  # rank 0 is writing
        assert run.process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.kill(int(Path(run.folder, "pid1").read_text()), signal.SIGKILL)
    run.process.wait(ENDED)
    lines = [line for line in Path(run.folder, "err.txt").read_text().splitlines()
            if line.startswith("draftproof: ")]
    assert len(lines) <= 1 and all("rank" in line for line in lines), lines
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(run.folder, "pid0").read_text()), 0)


def test_single_process_groups_work() -> None:
    mine = torch.tensor([3, 1])
    assert ALONE.broadcast(mine)[0] is mine and ALONE.broadcast_int(4) == 4
    assert ALONE.from_rank_0(lambda: "x") == "x"
    with pytest.raises(RuntimeError, match="gloo"), ALONE.raise_on_rank_failure():
        raise RuntimeError("gloo is not to blame")


@pytest.mark.parametrize(("options", "sentence"), [
    ({"parallel": "tensor"}, "torchrun"),
    ({"parallel": "megatron"}, "choose one of tensor, deepspeed"),
    ({"parallel": "tensor", "quantize": "int8"}, "no quantisation"),
    ({"parallel": "tensor", "drafter": "self-layers:1"}, "no self-drafting"),
    ({"parallel": "deepspeed"}, "pip install deepspeed"),
])  # fmt: skip
def test_incorrect_usage_is_reported_in_one_sentence(
    options: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftproof.model.parallel.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=sentence) as told:
        dp.load("demo", **options)
    assert "\n" not in str(told.value)


def test_ranks_share_the_heads_of_a_model_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="4 attention heads and 2 of keys, which 3 ranks cannot"):
        load_sharded(save(tmp_path / "model"), None, None, "tensor", ProcessGroup(0, 3))
    with pytest.raises(BadInput, match="give its name"):
        dp.load(LlamaForCausalLM.from_pretrained(tmp_path / "model"), parallel="tensor")
