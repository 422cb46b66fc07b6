"""What is kept of a model between starts: the same engine, sooner, and never of other files."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import fresh

from draftproof.cache.kv_cache import KVCache
from draftproof.engine.load import load
from draftproof.forward import fused_forward
from draftproof.model import inspection, native_quantize
from draftproof.model.loading import load_model
from draftproof.native.kernels import kernels
from draftproof.weights import disk_cache as kept
from draftproof.weights import quantize
from draftproof.weights.block_linear import BlockLinear


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model on disk that transformers loads, and a cache folder that keeps everything."""
    monkeypatch.setenv("DRAFTPROOF_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "SLOW", -1.0)
    path = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    fresh("olmo2", tie_word_embeddings=True, **sizes).bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was found out or made, and not read."""
    done: list[str] = []

    def noted(where: Any, name: str) -> None:
        real = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, **k: (done.append(name), real(*a, **k))[1])

    noted(inspection, "verify_forward")
    noted(quantize, "_quantised")
    return done


def text(folder: Path, **options: Any) -> list[int]:
    engine = load(folder, dtype="bfloat16", drafter="none", **options)
    cost = engine.target.quantization
    assert cost is None or (cost.before > cost.after > 0 and cost.kind == options["quantize"])
    return engine.generate([[1, 2, 3]], max_new_tokens=16)[0].tokens


def files(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "draftproof").glob("*.pt"))


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"quantize": "int4"}])
def test_a_second_start_repeats_no_work_unless_the_cache_is_truncated(
    folder: Path, made: list[str], options: dict[str, Any]
) -> None:
    first = text(folder, **options)
    assert "verify_forward" in made and ("_quantised" in made) is bool(options)
    made.clear()
    assert text(folder, **options) == first and made == []
    for left in (-9, 0):
        for file in files(folder):
            content = file.read_bytes()[:left]
            file.unlink()               # a mapped one may not shrink
            file.write_bytes(content)
        assert text(folder, **options) == first and "verify_forward" in made
        made.clear()
        assert text(folder, **options) == first and made == []


@pytest.mark.skipif(kernels() is None, reason="nothing is read natively without kernels")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_native_model_is_packed_and_compared_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    done: list[str] = []
    real = native_quantize._compared
    monkeypatch.setattr(
        native_quantize, "_compared", lambda *asked: (done.append("compared"), real(*asked))[1]
    )
    fresh("qwen2", hidden_size=64, intermediate_size=128).bfloat16().save_pretrained(folder)
    first = text(folder, quantize=kind)
    assert done == ["compared"] and text(folder, quantize=kind) == first and len(done) == 1
    assert text(folder) and len(done) == 1
    fresh("qwen2", 1, hidden_size=64, intermediate_size=128).bfloat16().save_pretrained(folder)
    assert text(folder, quantize=kind) and len(done) == 2


def test_damaged_cached_weights_are_rebuilt(
    folder: Path, made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One bit, a page of zeros, or rubbish: the text is that of sound weights."""
    first = text(folder, quantize="int8")
    file = max(files(folder), key=lambda file: file.stat().st_size)
    sound = file.read_bytes()
    assert text(folder, quantize="int8") == first                       # and it is verified now
    middle = len(sound) // 2
    for damage in (bytes([sound[middle] ^ 1]), bytes(4096), b"rubbish" * 99):
        file.unlink()
        file.write_bytes(sound[:middle] + damage + sound[middle + len(damage) :])
        made.clear()
        caplog.clear()
        assert text(folder, quantize="int8") == first and "_quantised" in made
        assert "is damaged; it is made again" in caplog.text
        made.clear()
        assert text(folder, quantize="int8") == first and made == []


def test_a_file_is_verified_once_and_when_it_was_written_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text(folder, quantize="int8")
    text(folder, quantize="int8")
    verified: list[kept.Kept] = []
    monkeypatch.setattr(kept.Kept, "_verify", lambda ours: verified.append(ours))
    text(folder, quantize="int8")
    assert verified == []
    for file in files(folder):
        file.touch()
    text(folder, quantize="int8")
    assert len(verified) == len(files(folder)) > 0


def test_a_file_that_others_may_write_to_is_not_read(
    folder: Path, made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    text(folder, quantize="int8")
    for file in files(folder):
        file.chmod(0o666)
    made.clear()
    text(folder, quantize="int8")
    assert "_quantised" in made and "others may write to it" in caplog.text


def test_cache_misses_for_other_files_and_changed_weights(
    folder: Path, made: list[str]
) -> None:
    first, before = text(folder, quantize="int8"), files(folder)
    changed = load_model(folder, "bfloat16", "cpu")
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.mul_(2)
    made.clear()
    assert load(changed, quantize="int8").target.quantization is not None and "_quantised" in made
    fresh("olmo2", 1, hidden_size=64, intermediate_size=128).bfloat16().save_pretrained(folder)
    made.clear()
    assert text(folder, quantize="int8") != first and {"verify_forward", "_quantised"} <= set(made)
    assert not set(before) & set(files(folder))


def test_another_version_of_the_code_that_checks_and_packs_keeps_files_of_its_own() -> None:
    """Each function that makes what is kept is among the files whose digest names them."""
    makers = (inspection.verify_forward, quantize._quantised, native_quantize, BlockLinear, KVCache,
              fused_forward)
    assert {Path(inspect.getfile(maker)) for maker in makers} <= set(kept._sources())


def test_reads_wait_for_pending_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "SLOW", -1.0)
    write = kept.Kept.write

    def slowly(place: kept.Kept, facts: dict[str, Any]) -> None:
        time.sleep(0.2)
        write(place, facts)

    monkeypatch.setattr(kept.Kept, "write", slowly)
    with kept.Kept("model", "files", "key").save_if_slow(wait=False) as facts:
        facts["numbers"] = torch.arange(3)
    state = kept.Kept("model", "files", "key").read()
    assert state is not None and torch.equal(state["numbers"], torch.arange(3))
