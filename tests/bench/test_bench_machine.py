"""Counters of the machine: read where they are, and said to be missing where they are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from draftproof.bench.machine import Energy, facts, peak_of

CPU = torch.device("cpu")


def zone(folder: Path, name: str, kind: str, micro: int, span: int = 10_000_000) -> Path:
    place = folder / name
    place.mkdir()
    for file, value in (("name", kind), ("energy_uj", micro), ("max_energy_range_uj", span)):
        (place / file).write_text(f"{value}\n")
    return place


def test_packages_and_memory_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 9_500_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 5)
    whole = zone(tmp_path, "intel-rapl:2", "psys", 7)                  # counts the packages once more
    (tmp_path / "intel-rapl").mkdir()
    energy = Energy(CPU, tmp_path)
    before = energy.read()
    assert len(before) == 3 and energy.unreadable == ""
    (first / "energy_uj").write_text("3500000")
    (second / "energy_uj").write_text("500000")                        # wrapped round
    (memory / "energy_uj").write_text("250000")
    for other in (core, whole):
        (other / "energy_uj").write_text("9000000")
    assert energy.since(before) == pytest.approx(2.5 + 1.0 + 0.25)


def test_without_a_counter_it_says_why(tmp_path: Path) -> None:
    nothing = Energy(CPU, tmp_path)
    assert nothing.read() == [] and nothing.since([]) is None and "there is no counter" in nothing.unreadable
    (zone(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj").write_text("")      # as for who may not read it
    assert "may not be read" in Energy(CPU, tmp_path).unreadable


def test_a_board_is_asked_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml(ModuleType):
        NVMLError = OSError
        spent = 5_000

        def nvmlInit(self) -> None: ...

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            return uuid

        def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
            if handle != "GPU-abc":
                raise OSError("no such board")
            return self.spent

    nvml, board = Nvml("pynvml"), SimpleNamespace(uuid="abc")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: board)
    energy = Energy(torch.device("cuda", 0))
    before = energy.read()
    nvml.spent = 7_500
    assert energy.since(before) == pytest.approx(2.5)
    board.uuid = "other"
    assert "no such board" in Energy(torch.device("cuda", 0)).unreadable
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pynvml is not installed" in Energy(torch.device("cuda", 0)).unreadable


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_peak_memory_is_what_a_run_adds_and_gives_back() -> None:
    size = 64 * 2**20

    def run() -> None:
        held = torch.ones(size, dtype=torch.uint8)
        assert held[0] == 1

    found, little = peak_of(run, CPU), peak_of(lambda: None, CPU)
    if found is None or little is None:
        pytest.skip("this system does not let the peak be reset")
    assert 0.9 * size < found < 1.5 * size
    assert little < 0.1 * size


def test_facts_go_into_json() -> None:
    found = facts(CPU)
    assert {"device", "device_name", "cores", "threads", "memory_gib", "versions"} <= found.keys()
    assert json.loads(json.dumps(found))["versions"]["torch"] == torch.__version__
