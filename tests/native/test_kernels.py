"""What small kernels compute, against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import CPU

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.native.kernels import kernels
from draftproof.native.structures import interleaved, plain

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler here")


@pytest.mark.parametrize(("dtype", "fold"), [(torch.bfloat16, 2), (torch.int8, 4)])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 16), (33, 50), (288, 768)])
def test_what_is_interleaved_can_be_had_back(outputs: int, inputs: int, dtype: torch.dtype, fold: int) -> None:
    weight = (100 * torch.rand(outputs, inputs)).to(dtype)
    packed = interleaved(weight, fold)
    assert packed.shape[2:] == (32, fold) and packed.is_contiguous()
    assert torch.equal(plain(packed, inputs, outputs), weight)


@pytest.mark.parametrize("count", [1, 8, 16, 17])
def test_the_top_tokens_are_those_of_the_highest_logits(count: int) -> None:
    """Also of several logits side by side; of equals, of which bfloat16 has many, the first; NaN is none of them."""
    found, dice = kernels(), torch.Generator().manual_seed(count)
    assert found is not None
    for vocab in (17, 100, 4100):
        parts = [(4 * torch.randn(3, nodes, vocab, generator=dice)).bfloat16() for nodes in (2, 2, 2)]
        parts[0][1, 1, 3:9], parts[1][2, 0], parts[2][0, 1, 5] = -torch.inf, 1, torch.nan
        tokens, logits = found.top(parts, count)
        whole = torch.cat(parts, 1).float().nan_to_num(-torch.inf, neginf=-torch.inf)
        order = whole.sort(stable=True, dim=-1, descending=True)
        there = order.values[..., :count] > -torch.inf
        assert torch.equal(logits, order.values[..., :count])
        assert torch.equal(tokens[there], order.indices[..., :count][there])


def test_streams_have_the_very_bits_of_the_operators() -> None:
    keys, dice = noise.row_keys([0, -1, 2**63 - 1, 7], [0, 5, 1, 2]), torch.Generator().manual_seed(0)
    places = torch.randint(2**20, (4, 9), generator=dice)
    for role in Role:
        for origin in (None, torch.randint(2**20, (4, 9), generator=dice), torch.tensor([[3], [4], [5], [6]]).expand(4, 9)):
            ours = CPU.run(noise.stream, keys, role, places, origin)
            assert torch.equal(ours, noise.stream(keys, role, places, origin)) and ours.dtype == torch.int32


@pytest.mark.parametrize(
    ("gelu", "opened"),
    [(False, torch.nn.functional.silu), (True, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"))],
    ids=["silu", "gelu"],
)
def test_a_gate_of_any_size_lets_through_what_it_should(gelu: bool, opened: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Far below zero nothing, however far: exponentials there are beyond any number."""
    found = kernels()
    assert found is not None
    for sign in (-1, 1):
        gate = sign * torch.logspace(-2, 38, 1600).bfloat16()
        up, out = torch.full_like(gate, 2.0), torch.empty_like(gate)
        both = torch.cat([gate, up])
        found.gate(both.data_ptr(), out.data_ptr(), gelu, 1, len(gate), 1)
        torch.testing.assert_close(out, opened(gate.float()).bfloat16() * up, rtol=0.01, atol=1e-3 if gelu else 1e-30)
    broken = torch.cat([torch.full((16,), torch.nan), torch.ones(16)]).bfloat16()
    found.gate(broken.data_ptr(), out.data_ptr(), gelu, 1, 16, 1)
    assert out[:16].isnan().all()
