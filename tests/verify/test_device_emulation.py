"""The rules of the device emulation, each broken on purpose: none may pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.device_emulation import DeviceEmulation, ForbiddenOnDevice

X = torch.arange(12.0).view(3, 4)
MANY = torch.arange(3)

READS: dict[str, Callable[[], object]] = {
    "item": lambda: X[0, 0].item(), "bool": lambda: bool(X[0, 0] > 0),
    "if": lambda: 1 if X.any() else 0, "int": lambda: int(MANY[1]), "float": lambda: float(X[0, 1]),
    "index": lambda: [1, 2, 3][MANY[1]], "tolist": lambda: X.tolist(), "cpu": lambda: X.cpu(),
    "to cpu": lambda: X.to("cpu"), "numpy": lambda: X.numpy(), "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X), "in": lambda: 3.0 in X,
}
FORBIDDEN: dict[str, dict[str, Callable[[], object]]] = {
    "back to the host": READS,
    "depends on data": {
        "nonzero": lambda: X.nonzero(), "where of one argument": lambda: torch.where(X > 3),
        "boolean index": lambda: X[X > 3],
        "boolean write": lambda: X.clone().index_put_((X > 3,), torch.zeros(8)),
        "masked_select": lambda: X.masked_select(X > 3), "unique": lambda: MANY.unique(),
        "unique_consecutive": lambda: MANY.unique_consecutive(),
        "bincount": lambda: MANY.bincount(),
        "repeat_interleave": lambda: X.repeat_interleave(MANY, 0),
    },
    "view": {
        "slice": lambda: X.clone()[:, 0].copy_(X[:, 1]),
        "part": lambda: torch.zeros(3, 4)[1].add_(1),
        "strided": lambda: torch.zeros(3, 4).t().index_put_(
            (MANY[:, None], MANY), torch.ones(3, 3)),
    },
    "32 bits": {
        "product": lambda: MANY * (1 << 40), "constant": lambda: torch.full((2,), -(1 << 33)),
        "shift": lambda: (MANY + 1) << 33,
    },
    "float64": {"double": lambda: X.double()},
    "host data": {
        "tensor": lambda: torch.tensor([1, 2]), "as_tensor": lambda: torch.as_tensor([1.0]),
    },
}
"""Calls by what they are refused for."""


class Everything(set[int]):
    """Any graph is known."""

    def __contains__(self, graph: object) -> bool:
        return True


def warm() -> DeviceEmulation:
    emulation = DeviceEmulation()
    emulation.warm, emulation.graphs["round"] = True, Everything()
    return emulation


def run(call: Callable[[], object], reads: int = 0) -> DeviceEmulation:
    emulation = warm()
    with emulation.running(), emulation.part("round", strict=True, reads=reads):
        call()
    return emulation


@pytest.fixture(params=[False, True], ids=["", "inference"], autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize(
    ("words", "name"), [(words, name) for words, calls in FORBIDDEN.items() for name in calls]
)
def test_operations_forbidden_on_the_device_are_refused(words: str, name: str) -> None:
    declared = 9 if words == "depends on data" else 0
    with pytest.raises(ForbiddenOnDevice, match=words):
        run(FORBIDDEN[words][name], reads=declared)


@pytest.mark.parametrize("name", READS)
def test_nothing_is_read_back_but_what_is_declared(name: str) -> None:
    assert run(READS[name], reads=1).read == 1
    with pytest.raises(ForbiddenOnDevice, match="host"):
        run(lambda: (READS[name](), READS[name]()), reads=1)


def test_what_is_allowed() -> None:
    whole = torch.zeros(3, 4)
    run(lambda: whole.view(-1, 2).index_copy_(0, MANY, torch.ones(3, 2)))
    assert whole.sum() == 6, "a whole tensor may be written under another form"
    run(lambda: MANY * 1000 + 7)


def test_new_shapes_after_warm_up_are_refused() -> None:
    emulation, sizes = DeviceEmulation(), (3, 4)
    with emulation.running():
        for size in (*sizes, *sizes):
            with emulation.part("round", strict=True):
                torch.zeros(size) + 1
        emulation.warm = True
        assert len(emulation.graphs["round"]) == 2 and emulation.calls["round"] == 4
        with emulation.part("round", strict=True):
            torch.zeros(3) + 1
        refused = pytest.raises(ForbiddenOnDevice, match="round met a shape")
        with refused, emulation.part("round", strict=True):
            torch.zeros(5) + 1


def test_parts_inside_parts_are_counted_apart() -> None:
    emulation = DeviceEmulation()
    with emulation.running():
        for size in (3, 4):
            with emulation.part("round"):
                with emulation.part("draft"):
                    torch.zeros(size)
                torch.ones(2)
    graphs = {name: len(known) for name, known in emulation.graphs.items()}
    assert graphs == {"draft": 2, "round": 1}


def test_emulation_rules_are_suspended_between_rounds() -> None:
    emulation = warm()
    with emulation.running(), emulation.part("round", strict=True):
        with emulation.free():
            assert X[0, 0].item() == 0 and len(X.nonzero()) == 11
        with pytest.raises(ForbiddenOnDevice):
            X[0, 0].item()
    cold = DeviceEmulation()                                # before it is warm, constants are made
    with cold.running(), cold.part("round", strict=True):
        assert torch.tensor([1.0]).item() == 1.0
