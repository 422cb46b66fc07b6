"""One thread, no network, no host-dependent defaults: the tests mean the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DRAFTPROOF_CACHE", "0")
if os.environ.get("DRAFTPROOF_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""     # also of the programs that tests start

import pytest
import torch
from devices import DEVICE, skip_elsewhere


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`needs_isa("avx2")`: the test needs the C library of that level, or of a higher one;
    `needs_kernels`: of any level, since torch rounds products of bfloat16 by their shape;
    `cpu_only(reason)`: it makes no sense on other devices (see devices.py)."""
    from draftproof.native.build import LEVELS
    from draftproof.native.kernels import library

    for item in items:
        skip_elsewhere(item, DEVICE)
        if item.get_closest_marker("needs_kernels") and not library().build:
            item.add_marker(pytest.mark.skip(reason=f"needs the C library; {library().reason}"))
        for mark in item.iter_markers("needs_isa"):
            have = library().build.partition("-")[0]
            known = have and mark.args[0] in LEVELS                 # of this architecture
            if not known or LEVELS.index(have) < LEVELS.index(mark.args[0]):
                why = library().reason or f"this is {have}"
                item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]}; {why}"))


@pytest.fixture(autouse=True, scope="session")
def _modest() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _shared_models_stay_as_they_are() -> Iterator[None]:
    """A test that changes a shared model fails itself, not the tests that come after it."""
    yield
    import tiny

    assert not tiny.changed_models(), "this test changed a shared model: take `fresh` instead"


@pytest.fixture(autouse=True)
def _budgets_that_need_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test names no budget, drafters draft their default, whatever the clock says."""
    from draftproof.engine import engine
    from draftproof.engine.budget import Fixed

    monkeypatch.setattr(engine, "usual_budget", lambda drafter: Fixed(drafter.max_draft_tokens))


@pytest.fixture(params=["kernels", "operators"])
def lookup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Drafters that need no model, by our kernels and by torch's operators, as on any device."""
    from drafting import without_lookup

    from draftproof.native.kernels import kernels

    if request.param == "operators":
        without_lookup(monkeypatch)
    elif kernels() is None:
        pytest.skip("no C compiler here")
    return str(request.param)
