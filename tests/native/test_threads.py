"""How many threads the kernels use, and that they share out work without changing it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from draftproof.core import noise
from draftproof.native import threads
from draftproof.native.cpu_ops import CpuOps
from draftproof.native.kernels import kernels
from draftproof.native.threads import limit, quotas, round_up, thread_count

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no library here")
STREAMS = torch.arange(4, dtype=torch.int32).view(2, 2)
VOCAB = 40_000


def drawn() -> torch.Tensor:
    """Noise that several threads compute."""
    return CpuOps(kernels()).run(noise.gumbel, STREAMS, VOCAB)


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")
    return folder


def test_cgroup_quotas_of_all_ancestors_apply(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/outer/inner\n")
    root = written(tmp_path / "fs")
    assert quotas(groups, root) == []
    written(root / "outer", cpu__max="150000 100000")
    written(root / "outer" / "inner", cpu__max="max 100000")
    assert quotas(groups, root) == [1.5]
    written(root, cpu__max="400000 100000")         # as a container sees its own group
    assert sorted(quotas(groups, root)) == [1.5, 4.0]


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_the_quota_of_version_1_counts(tmp_path: Path, mount: str) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/outer\n2:cpu,cpuacct:/outer\n0::/\n")
    root = tmp_path / "fs"
    written(root / mount, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert quotas(groups, root) == []
    written(root / mount / "outer", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    assert quotas(groups, root) == [2.5]


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quotas(tmp_path / "none", tmp_path) == []


def test_threads_are_those_of_torch_within_what_the_system_gives(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    for bounds, wanted in (([], 8), ([2.5, 3.0], 3), ([0.4], 1), ([64.0], 8)):
        monkeypatch.setattr(threads, "quotas", lambda bounds=bounds: bounds)
        limit.cache_clear()
        assert limit() == wanted and thread_count() == min(wanted, 6)
    limit.cache_clear()
    assert [round_up(quota) for quota in (0.1, 1.0, 1.01)] == [1, 1, 2]


@needs_kernels
def test_any_number_of_threads_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = drawn()
    for count in (2, 3, 16):
        monkeypatch.setattr("draftproof.native.kernels.thread_count", lambda count=count: count)
        assert all(torch.equal(drawn(), wanted) for _ in range(20))


@needs_kernels
def test_callers_at_the_same_time_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, wrong = drawn(), list[bool]()
    monkeypatch.setattr("draftproof.native.kernels.thread_count", lambda: 3)

    def call() -> None:
        wrong.extend(not torch.equal(drawn(), wanted) for _ in range(20))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == [False] * 60


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_makes_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.native.kernels.thread_count", lambda: 3)
    wanted = drawn()
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(drawn(), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
