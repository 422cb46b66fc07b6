"""Devices: what is not there is refused in one sentence, what is there answers the same verbs."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch

from draftproof.errors import BadInput
from draftproof.model import device as module
from draftproof.model.device import Device

CPU = Device(torch.device("cpu"))


def test_a_device_that_is_not_there_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    for there in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(there, "is_available", lambda: False)
    monkeypatch.setattr(module.util, "find_spec", lambda package: None)
    for name, output in (("hpu", "habana_frameworks"), ("cuda:77", "CUDA"), ("xpu", "Intel"),
                       ("mps", "Apple"), ("abacus", "choose one of"), ("meta", "choose one of")):
        with pytest.raises(BadInput, match=output) as refused:
            Device.from_name(name)
        assert repr(name) in str(refused.value) and "\n" not in str(refused.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Device.from_name("cuda:1").torch_device == torch.device("cuda:1")
    with pytest.raises(BadInput, match="2 of them"):
        Device.from_name("cuda:2")


@pytest.fixture
def gaudi(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A bridge with the names that Gaudi's has, which writes down what it is asked."""
    lines: list[str] = []
    package, bridge, core = (
        types.ModuleType(name) for name in ("habana_frameworks", "habana_frameworks.torch", "core")
    )
    package.__spec__ = importlib.machinery.ModuleSpec("habana_frameworks", None)
    core.mark_step = lambda: lines.append("mark_step")  # type: ignore[attr-defined]

    class Graph:
        def replay(self) -> None:
            lines.append("replay")

    class Recording:
        def __init__(self, graph: Graph) -> None:
            lines.append("record")

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None:
            lines.append("recorded")

    hpu = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1,
        synchronize=lambda: lines.append("synchronize"),
        HPUGraph=Graph, graph=Recording, get_device_name=lambda where: "GAUDI2",
        mem_get_info=lambda where: (1, 2),
    )  # fmt: skip
    for name, result in (("", package), (".torch", bridge), (".torch.core", core)):
        monkeypatch.setitem(sys.modules, f"habana_frameworks{name}", result)
    monkeypatch.setattr(torch, "hpu", hpu, raising=False)
    return lines


def test_gaudi_devices_use_their_own_module(
    gaudi: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Device.from_name("hpu")
    assert result.compiles and result.captures and result.widest == torch.float32
    assert result.name == "GAUDI2" and result.memory() == (1, 2)
    assert Device.from_name().kind == "hpu", "a Gaudi is the best there is"
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    result.flush()
    assert gaudi == [], "without lazy mode there is nothing to mark"
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    result.synchronize()
    assert gaudi == ["mark_step", "synchronize"]
    gaudi.clear()
    replay, results = result.record(lambda: gaudi.append("call") or 3)
    replay()
    assert results == 3 and gaudi == [
        "call", "mark_step", "synchronize", "record", "call", "recorded", "replay"
    ]
    with pytest.raises(BadInput, match="float64"):
        result.check_dtype(torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        assert result.dtype_for(dtype) == torch.bfloat16


def test_device_plugin_import_errors_name_the_plugin(
    gaudi: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.core", None)
    with pytest.raises(BadInput, match="cannot be imported"):
        Device.from_name("hpu")


def test_the_cpu_supports_every_device_operation() -> None:
    assert Device.from_name("cpu") == CPU and not CPU.compiles and not CPU.captures
    assert CPU.widest == torch.float64
    CPU.flush()
    CPU.synchronize()
    CPU.check_dtype(torch.float64)
    free, total = CPU.memory()
    assert 0 < free <= total and CPU.name
    assert CPU.dtype_for(torch.float32) == torch.float32
