"""What Python passes to C is compared with what the C sources declare."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.core.tree import ABSENT
from draftproof.errors import BadInput
from draftproof.gguf.types import BLOCK_SIZES
from draftproof.native.build import SOURCES
from draftproof.native.declarations import array_of, functions, structure
from draftproof.native.formats import FORMATS, STRIP
from draftproof.native.kernels import Stores, kernels
from draftproof.native.structures import QUANTIZED, block_linear, block_table, linear

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
def test_invalid_tensors_are_refused(name: str, kind: str) -> None:
    good: Tensor = accepting()[name]
    wrong: dict[str, Any] = {
        "one row less": good[1:], "empty": good[:0], "meta": good.to("meta"),
        "sparse": good.to_sparse(), "null": None, "a number": 1 << 40,
    }  # fmt: skip
    with pytest.raises(BadInput, match=f"the argument {name} of the C kernel accept"):
        call("accept", *accepting(**{name: wrong[kind]}).values())


def test_inputs_may_be_strided_and_outputs_may_not() -> None:
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


def test_numeric_arguments_are_checked() -> None:
    with pytest.raises(BadInput, match="rows of the C kernel accept: a number was wanted"):
        call("accept", *accepting(rows=torch.tensor(3)).values())


def test_every_tensor_that_python_passes_has_its_size_declared() -> None:
    """A function that does not say its sizes is none for Python: C alone calls these."""
    sources = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    defined = set(re.findall(r"^(?:void|int64_t) draftproof_(\w+)\([^;{]*\{", sources, re.M))
    inner = {"attention", "norm", "residual"}
    assert defined - set(functions()) == inner | {"usable"} & defined


def test_structures_reject_raw_addresses() -> None:
    numbers, positions = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for wrong in (numbers.data_ptr(), None):
        with pytest.raises(BadInput, match="tokens of the C kernel Texts: int64_t was wanted"):
            structure("Texts")(wrong, positions, 2, 9)
    bare = (ctypes.c_void_p * 1)(numbers.data_ptr())
    with pytest.raises(BadInput, match="stores of the C kernel keep"):
        call("keep", bare, (ctypes.c_int64 * 1)(1), (ctypes.c_int64 * 1)(8), 1, 9, 2, positions,
             positions[:, None], 1)


def test_noise_buffers_must_cover_their_positions() -> None:
    logits = torch.zeros(2, 16, dtype=torch.bfloat16)
    temperatures = torch.ones(2, dtype=torch.float32)
    noise, tokens = torch.zeros(3, 16, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)
    for places in ([0, 2], [0, 3], [-1, 0], None):
        where = None if places is None else torch.tensor(places)
        values = (logits, noise, where, temperatures, 1, 2, 16, -1, tokens)
        if places == [0, 2]:
            call("sample", *values)
        else:
            with pytest.raises(BadInput, match="noise"):
                call("sample", *values)


@pytest.mark.parametrize("weights, scales, bias", [
    (torch.zeros(32, 32), None, None),
    (torch.zeros(32, 32, dtype=torch.bfloat16), torch.zeros(32), None),
    (torch.zeros(32, 64, dtype=torch.uint8), None, None),
    (torch.zeros(31, 32, dtype=torch.bfloat16), None, None),
    (torch.zeros(32, 32, dtype=torch.bfloat16), None, torch.zeros(31, dtype=torch.bfloat16)),
    (torch.zeros(32, 32, dtype=torch.bfloat16), None, torch.zeros(32)),
    (torch.zeros(32, 64, dtype=torch.uint8), torch.zeros(31), None),
])  # fmt: skip
def test_layer_sizes_are_checked(
    weights: Tensor, scales: Tensor | None, bias: Tensor | None
) -> None:
    with pytest.raises(BadInput):
        linear(weights, scales, bias, 32, 20)
    assert linear(torch.zeros(32, 32, dtype=torch.bfloat16), None, None, 32, 20).outputs == 20


@pytest.mark.parametrize("format", FORMATS)
def test_block_counts_are_checked(format: str) -> None:
    """The sizes of blocks are those of the files, and packing checks both ends."""
    size = BLOCK_SIZES[format]
    records = torch.zeros(2, 1, STRIP * size.nbytes, dtype=torch.uint8)
    rows = torch.zeros(40, size.nbytes, dtype=torch.uint8)
    number = FORMATS.index(format) + 1
    call("pack", number, rows, 40, 1, records)
    assert block_linear(format, records, None, size.weights, 40).outputs == 40
    block_table(format, rows, size.weights)
    for wrong in (lambda: call("pack", number, rows[1:], 40, 1, records),
                  lambda: call("pack", number, rows, 40, 1, records[:1]),
                  lambda: block_linear(format, records, None, size.weights + 1, 40),
                  lambda: block_linear(format, records, None, size.weights, 65),
                  lambda: block_linear(format, records.float(), None, size.weights, 40),
                  lambda: block_table(format, rows.float(), size.weights)):  # fmt: skip
        with pytest.raises(BadInput):
            wrong()


def test_quantised_output_sizes_are_checked() -> None:
    weights = torch.zeros(3, 256, dtype=torch.float32)
    for number, format in enumerate(QUANTIZED):
        size = 256 // BLOCK_SIZES[format].weights * BLOCK_SIZES[format].nbytes
        call("quantize", number, weights, 3, 256, torch.zeros(3, size, dtype=torch.uint8))
        with pytest.raises(BadInput, match="blocks of the C kernel quantize"):
            call("quantize", number, weights, 3, 256, torch.zeros(3, size - 1, dtype=torch.uint8))


def test_cache_stores_must_have_equal_shapes() -> None:
    assert library is not None
    store = torch.zeros(2, 3, 8, 4, dtype=torch.bfloat16)
    Stores([store, store.clone()], library)
    for wrong in (store[:1], store[:, :, :7].contiguous(), store.transpose(1, 2), store[0, 0]):
        with pytest.raises(BadInput, match="the stores of a cache"):
            Stores([store, wrong], library)
    lengths, nodes = torch.tensor([7, 0]), torch.tensor([[1], [9]])
    Stores([store], library).keep(nodes, lengths)               # padding beyond the capacity
