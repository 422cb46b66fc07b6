"""What Python passes to C is compared with what the C sources declare."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.core.tree import ABSENT
from draftproof.errors import BadInput
from draftproof.native.declarations import array_of, functions, structure
from draftproof.native.kernels import kernels

library = kernels()
pytestmark = pytest.mark.skipif(library is None, reason="no library here")


def call(name: str, *args: Any) -> int:
    assert library is not None
    return library(name, *args)


def accepting(**changed: Any) -> dict[str, Any]:
    """Arguments of `accept`, of 3 rows of 4 nodes; some changed."""
    tree, rows = torch.zeros(3, 4, dtype=torch.int64), 3
    values: dict[str, Any] = {
        "tokens": tree, "parents": tree - 1, "picks": tree + 5, "rows": rows, "nodes": 4,
        "deep": 2, "absent": ABSENT, "path": torch.empty(3, 2, dtype=torch.int64),
        "found": torch.empty(4, 3, dtype=torch.int64),
    }  # fmt: skip
    return values | changed


@pytest.mark.parametrize("dtype", [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.uint8,
    torch.bool])  # fmt: skip
@pytest.mark.parametrize("name", ["tokens", "parents", "picks", "path", "found"])
def test_another_dtype_is_refused(name: str, dtype: torch.dtype) -> None:
    call("accept", *accepting().values())
    wrong = accepting(**{name: accepting()[name].to(dtype)})
    with pytest.raises(BadInput, match=f"{name} of the C kernel accept: torch.int64 was wanted"):
        call("accept", *wrong.values())


@pytest.mark.parametrize("name", ["tokens", "parents", "picks", "path", "found"])
@pytest.mark.parametrize("kind", ["one row less", "empty", "meta", "sparse", "null", "a number"])
def test_what_is_no_such_memory_is_refused(name: str, kind: str) -> None:
    good: Tensor = accepting()[name]
    wrong: dict[str, Any] = {
        "one row less": good[1:], "empty": good[:0], "meta": good.to("meta"),
        "sparse": good.to_sparse(), "null": None, "a number": 1 << 40,
    }  # fmt: skip
    with pytest.raises(BadInput, match=f"the argument {name} of the C kernel accept"):
        call("accept", *accepting(**{name: wrong[kind]}).values())


def test_what_is_read_may_have_gaps_and_what_is_written_may_not() -> None:
    gaps = torch.zeros(4, 3, dtype=torch.int64).T
    plain, spread = accepting(), accepting(tokens=gaps, picks=(gaps + 5))
    call("accept", *plain.values())
    call("accept", *spread.values())
    assert torch.equal(plain["path"], spread["path"])
    with pytest.raises(BadInput, match="path of the C kernel accept: C writes to it"):
        call("accept", *accepting(path=torch.empty(2, 3, dtype=torch.int64).T).values())


def test_structures_are_compared_too() -> None:
    starts, gains = torch.zeros(6, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)
    make = structure("Pairs")
    make(starts, starts, gains, torch.zeros(5, dtype=torch.float32), 5, 2)
    for wrong in (
        (starts.long(), starts, gains, gains.new_zeros(5), 5, 2),
        (starts, starts, gains[:1], gains.new_zeros(5), 5, 2),
        (starts, starts, gains.bfloat16(), gains.new_zeros(5), 5, 2),
        (starts[:5], starts, gains, gains.new_zeros(5), 5, 2),
        (starts, starts, gains, gains.new_zeros(4), 5, 2),
    ):
        with pytest.raises(BadInput, match="of the C kernel Pairs"):
            make(*wrong)


def test_a_structure_keeps_the_memory_it_points_to() -> None:
    text = structure("Texts")(torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2).long(), 2, 9)
    assert [value.data_ptr() for value in text.held[:2]] == [text.tokens, text.positions]


def test_structures_and_arrays_of_another_kind_are_refused() -> None:
    layer = structure("Linear")()
    inputs = torch.zeros(1, 16, dtype=torch.bfloat16)
    for wrong in (structure("Norm")(), inputs, array_of("Norm", [structure("Norm")()]), None):
        with pytest.raises(BadInput, match="layer of the C kernel linear: Linear was wanted"):
            call("linear", wrong, inputs, inputs.clone(), 1)
    with pytest.raises(BadInput, match="inputs of the C kernel linear: bf16 was wanted"):
        call("linear", layer, layer, inputs.clone(), 1)


def test_a_call_has_all_its_arguments() -> None:
    for values in (list(accepting().values())[:-1], [*accepting().values(), 1]):
        with pytest.raises(ValueError, match="argument"):
            call("accept", *values)


def test_numbers_are_numbers() -> None:
    with pytest.raises(BadInput, match="rows of the C kernel accept: a number was wanted"):
        call("accept", *accepting(rows=torch.tensor(3)).values())


def test_every_tensor_that_python_passes_has_its_size_declared() -> None:
    """But for noise, which the sampler makes, and what a forward writes, by its description."""
    inner = {"attention", "multiply", "norm", "gate", "residual"}               # called by C alone
    numbers = {"int64_t", "int32_t", "float", "bf16"}
    lacking = {
        f"{name}.{argument.name}" for name, function in functions().items()
        for argument in function.takes
        if name not in inner and argument.pointee in numbers and argument.size is None
    }
    assert {name for name in lacking if not re.search(r"\.noise$|^forward\.", name)} == {
        "chain.work"
    }
