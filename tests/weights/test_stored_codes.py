"""Integer codes go into the smallest block format that holds them, and no value changes."""

from __future__ import annotations

import pytest
import torch

from draftproof.gguf.blocks import dequantize
from draftproof.weights.stored_codes import Codes, blocks_of_codes, why_no_blocks


def codes_between(low: int, high: int) -> Codes:
    numbers = torch.tensor([[low, high] * 32, [high, 0] * 32], dtype=torch.int16)
    return Codes(numbers, torch.tensor([[0.5, 0.25], [1.0, 3.0]]))


@pytest.mark.parametrize(("low", "high", "smallest"), [
    (-8, 7, "Q4_0"), (-8, 8, "Q5_0"), (-9, 7, "Q5_0"), (-16, 15, "Q5_0"), (-16, 16, "Q8_0"),
    (-17, 15, "Q8_0"), (-128, 127, "Q8_0"),
])  # fmt: skip
def test_codes_at_the_edges_of_a_format_keep_their_values(
    low: int, high: int, smallest: str
) -> None:
    """4-bit codes with the zero point 7 reach from -7 to 8, one further than Q4_0."""
    codes = codes_between(low, high)
    assert why_no_blocks(codes) is None
    blocks = blocks_of_codes(codes)
    assert blocks.type == smallest
    assert torch.equal(dequantize(blocks), codes.values())


@pytest.mark.parametrize(("low", "high"), [(-129, 0), (0, 128)])
def test_codes_beyond_8_bits_have_no_blocks(low: int, high: int) -> None:
    assert "beyond 8 bits" in str(why_no_blocks(codes_between(low, high)))
