"""Linear layers by kernels: the product of the definition, and bits that do not depend on what is
read beside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.native.build import BUILDS, LEVELS, able, opened
from draftproof.native.kernels import Kernels
from draftproof.native.structures import Linear, interleaved, nibbles, rounded

SHAPES = [(32, 16), (33, 50), (70, 511), (288, 513), (40, 1040), (1200, 48), (32, 2100),
          (100, 4224)]  # fmt: skip


@pytest.fixture(scope="module", params=[build for build in BUILDS if build != "portable"])
def found(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of each build that this processor can run."""
    if request.param not in able(LEVELS[-1]):
        pytest.skip(f"needs {request.param}")
    try:
        kernels = Kernels(opened(request.param))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    if not kernels.linears:
        pytest.skip(f"no bfloat16 product by {request.param}")
    return kernels


def drawn(seed: int, outputs: int, size: int, rows: int) -> tuple[Tensor, Tensor]:
    """A weight, and inputs in bfloat16."""
    dice = torch.Generator().manual_seed(seed)
    weight, inputs = (torch.randn(many, size, generator=dice) for many in (outputs, rows))
    return weight, inputs.bfloat16()


def multiplied(found: Kernels, weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    outputs, size = weight.shape
    held = interleaved(weight.bfloat16(), 2)
    added = None if bias is None else rounded(bias.bfloat16())
    return found.multiply(Linear.of(held, None, added, size, outputs), inputs)


@pytest.mark.parametrize(("outputs", "size"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_sums_of_whole_numbers_are_exact(
    found: Kernels, outputs: int, size: int, biased: bool
) -> None:
    """Small whole numbers, whose sums single precision holds exactly in any order: only the
    last rounding is left."""
    dice = torch.Generator().manual_seed(0)
    weight = torch.randint(-4, 5, (outputs, size), generator=dice).float()
    bias = torch.randint(-9, 10, (outputs,), generator=dice).float() if biased else None
    for rows in (0, 1, 2, 11, 12, 13, 16, 17, 25, 60, 97, 121, 145):
        inputs = torch.randint(-4, 5, (rows, size), generator=dice).float()
        wanted = torch.nn.functional.linear(inputs, weight, bias).bfloat16()
        assert torch.equal(multiplied(found, weight, bias, inputs.bfloat16()), wanted), rows


@pytest.mark.parametrize(("outputs", "size"), SHAPES)
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(
    found: Kernels, outputs: int, size: int
) -> None:
    weight, inputs = drawn(1, outputs, size, 130)
    whole = multiplied(found, weight, None, inputs)
    wanted = inputs.float() @ weight.bfloat16().float().t()
    torch.testing.assert_close(whole.float(), wanted, rtol=0.01, atol=0.05)
    for start, many in ((0, 1), (5, 2), (3, 9), (17, 12), (40, 13), (1, 64), (20, 110)):
        some = slice(start, start + many)
        assert torch.equal(multiplied(found, weight, None, inputs[some]), whole[some]), many


def test_inputs_that_are_not_the_layers_are_refused(found: Kernels) -> None:
    weight = torch.zeros(32, 64)
    for inputs in (torch.zeros(2, 64), torch.zeros(2, 32, dtype=torch.bfloat16)):
        with pytest.raises(BadInput, match="64 inputs in bfloat16"):
            multiplied(found, weight, None, inputs)


def test_threads_change_no_bits(found: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = drawn(2, 310, 700, 30)
    wanted = multiplied(found, weight, None, inputs)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(multiplied(found, weight, None, inputs), wanted), threads


@pytest.mark.parametrize("rows", [1, 5])
def test_heads_are_the_same_whichever_thread_makes_them(
    found: Kernels, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole heads by one thread each or, where there are fewer than threads, each by all of
    them."""
    dice = torch.Generator().manual_seed(3)
    weights = [(torch.randn(160, 160, generator=dice) / 12).bfloat16() for _ in range(6)]
    held = [interleaved(weight, 2) for weight in weights]
    blocks = (Linear * 6)(*(Linear.of(one, None, None, 160, 160) for one in held))
    hidden, wanted = torch.randn(rows, 160, generator=dice).bfloat16(), list[Tensor]()
    for head in range(3):
        state = hidden
        for weight in weights[2 * head : 2 * head + 2]:
            state = state + torch.nn.functional.silu(state @ weight.t())
        wanted.append(state)
    first = found.residual_blocks(blocks, 3, 2, hidden)
    torch.testing.assert_close(first, torch.stack(wanted), rtol=0.02, atol=0.05)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(
            torch.equal(found.residual_blocks(blocks, 3, 2, hidden), first) for _ in range(50)
        ), threads


def in_8_bits(found: Kernels, codes: Tensor, scale: Tensor, inputs: Tensor) -> Tensor:
    held = interleaved(codes, 4).view(torch.uint8).bitwise_xor(128)
    outputs, size = codes.shape
    padded = rounded(scale)
    return found.multiply(Linear.of(held, padded, None, size, outputs), inputs)


@pytest.mark.parametrize(("outputs", "size"), SHAPES)
def test_8_bits_have_the_same_bits_on_every_level(found: Kernels, outputs: int, size: int) -> None:
    """As whole numbers say: weights and inputs up to the largest, where sums of 16 bits would
    not do."""
    dice = torch.Generator().manual_seed(4)
    codes = torch.randint(-128, 128, (outputs, size), generator=dice, dtype=torch.int8)
    scale = torch.rand(outputs, generator=dice) / 100
    inputs = torch.randn(21, size, generator=dice).bfloat16()
    inputs[3], codes[1], codes[2] = 1, 127, -128
    first = Kernels(opened(able(LEVELS[-1])[0]))
    whole = in_8_bits(found, codes, scale, inputs)
    assert torch.equal(whole, in_8_bits(first, codes, scale, inputs))
    largest = inputs.float().abs().amax(1, keepdim=True)
    numbers = (inputs.float() * (127 / largest) + 128.5).floor() - 128
    wanted = (numbers.double() @ codes.double().t()) * scale.double() * largest.double()
    torch.testing.assert_close(whole.double(), wanted, rtol=0.01, atol=0.02 * size**0.5)
    for start, many in ((0, 1), (5, 2), (3, 4), (7, 8), (2, 16)):
        some = slice(start, start + many)
        assert torch.equal(in_8_bits(found, codes, scale, inputs[some]), whole[some]), many


def in_4_bits(
    found: Kernels, weights: tuple[Tensor, Tensor], outputs: int, inputs: Tensor
) -> Tensor:
    return found.multiply(Linear.of_4_bits(*weights, None, inputs.shape[-1], outputs), inputs)


@pytest.mark.parametrize(
    ("outputs", "size"), [(32, 32), (33, 64), (70, 500), (288, 513), (1200, 48), (100, 4224)]
)
def test_4_bits_are_those_of_the_definition_on_every_level(
    found: Kernels, outputs: int, size: int
) -> None:
    """Scales of any sign; inputs of which one is loud; the largest sums there are."""
    dice = torch.Generator().manual_seed(5)
    groups, blocks = -(-size // 32), -(-size // 256)
    codes = torch.randint(0, 16, (outputs, size), generator=dice)
    inputs = torch.randn(21, size, generator=dice).bfloat16()
    inputs[4], inputs[5], codes[1], codes[2], inputs[6, size // 2] = 1, -1, 15, 0, 1000
    steps = torch.randint(1, 18, (outputs, groups), generator=dice)
    bases = (torch.rand(outputs, groups, generator=dice) * (256 - 15 * steps)).long()
    steps[1], bases[:3] = 17, 0
    scales = torch.randn(outputs, blocks, generator=dice).half()
    weights = nibbles(codes, steps, bases, scales)
    whole = in_4_bits(found, weights, outputs, inputs)
    first = Kernels(opened(able(LEVELS[-1])[0]))
    assert torch.equal(whole, in_4_bits(first, weights, outputs, inputs))
    step, base = (one.repeat_interleave(32, 1)[:, :size] for one in (steps, bases))
    scale = scales.double().repeat_interleave(256, 1)[:, :size]
    dense = (codes * step + base - 128) * scale
    padded = torch.nn.functional.pad(inputs.float(), (0, -size % 128)).view(21, -1, 128)
    largest = padded.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    numbers = (padded * (127 / largest) + 128.5).floor() - 128
    rounded_ = (numbers * (largest.double() / 127)).view(21, -1)[:, :size]
    wanted = rounded_ @ dense.t()
    spread = rounded_.norm(dim=1, keepdim=True) * dense.norm(dim=1)
    assert bool(((whole.double() - wanted).abs() <= wanted.abs() / 250 + spread / 1000).all())
    for start, many in ((0, 1), (5, 2), (3, 4), (7, 8), (2, 16)):
        some = slice(start, start + many)
        assert torch.equal(in_4_bits(found, weights, outputs, inputs[some]), whole[some]), many
