"""Random requests, batches, cancelled runs and threads: every row has the text it has alone.

`draftproof prove --fuzz MINUTES` runs for longer, on random models as well.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.native.kernels import kernels
from draftproof.verify import fuzz
from draftproof.verify.fuzz import EMBEDDED, Fuzzer, prove_fuzz, random_model

KEPT_MIB = 4
"""Of tensors that outlive their run."""


def tensor_mib() -> float:
    """What all tensors that are alive hold."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    held = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values()) / 2**20


@pytest.mark.parametrize(("dtype", "rounds"), [("float64", 2), ("bfloat16", 10)])
def test_every_row_matches_its_solo_text(dtype: str, rounds: int) -> None:
    if dtype == "bfloat16" and kernels() is None:
        pytest.skip("without kernels bfloat16 is exact up to rounding only")
    names = ("portfolio", "draft tree", "medusa")
    fuzzer = Fuzzer("demo", {name: EMBEDDED[name] for name in names}, dtype=dtype)
    for engine in fuzzer.engines.values():              # drafters keep what they learn of a model
        engine.generate("a", n=2, max_new_tokens=3)
    before = tensor_mib()
    for seed in range(rounds):
        fuzzer.round(seed)
    assert fuzzer.rows > rounds and tensor_mib() < before + KEPT_MIB


def test_differences_are_found_with_a_reproducer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fuzz, "EMBEDDED", {"portfolio": {}})
    monkeypatch.setattr(fuzz, "REQUEST_SIZES", (2,))
    section = prove_fuzz("demo", 0, seed=3, dtype="float32")
    assert not section.failures and section.figures["rounds"] == 1
    generate, calls = Engine.generate, list[int]()

    def wrong(self: Engine, *args: object, **options: object) -> object:
        done = generate(self, *args, **options)         # type: ignore[arg-type]
        calls.append(len(done))
        done[0].tokens.append(5)
        return done

    monkeypatch.setattr(Engine, "generate", wrong)
    (failure,) = prove_fuzz("demo", 0, seed=5, dtype="float32").failures
    assert calls and failure.endswith(
        "repeat it with: draftproof prove demo --fuzz 0 --seed 5 --dtype float32")


def test_random_models_are_those_of_their_seed(tmp_path: Path) -> None:
    paths = [random_model(tmp_path / str(run), 7) / "model.safetensors" for run in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
