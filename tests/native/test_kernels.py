"""The kernels are compiled once, for whoever may, and done without where they cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.native import kernels as module
from draftproof.native.kernels import kernels
from draftproof.native.structures import interleaved, plain

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler here")


@pytest.mark.parametrize("fold", [2, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 16), (33, 50), (288, 768)])
def test_what_is_interleaved_can_be_had_back(outputs: int, inputs: int, fold: int) -> None:
    weight = torch.randn(outputs, inputs)
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
            ours = noise.stream(keys, role, places, origin, at_hand=True)
            assert torch.equal(ours, noise.stream(keys, role, places, origin)) and ours.dtype == torch.int32


def test_noise_is_that_of_the_operators() -> None:
    """Up to the last bits of two logarithms, everywhere from the likeliest token to the least."""
    found = kernels()
    assert found is not None
    streams = noise.stream(noise.row_keys([1, 2], [0, 5]), Role.TARGET, torch.arange(14).view(2, 7))
    for vocab in (1, 16, 50, 4096, 151_936):
        ours, wanted = found.gumbel(streams, vocab), noise.gumbel(streams, vocab)
        torch.testing.assert_close(ours, wanted, rtol=5e-7, atol=5e-7)
    assert float(wanted.max()) > 12 and float(wanted.min()) < -2.5


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


def test_kernels_are_optional(tmp_path: Path) -> None:
    """Without a compiler, or switched off, torch's operators serve."""
    code = "from draftproof.native.kernels import kernels; import torch; print(kernels())"
    for change in ({"DRAFTPROOF_KERNELS": "0"}, {"CC": "/bin/false", "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **change}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "None"


def test_kernels_are_kept_and_not_taken_from_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, owner = tmp_path / "kept", os.getuid()
    monkeypatch.setattr(module, "_folders", lambda: [folder])
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    built = module._built(compiler)
    assert module._built(compiler) == built and list(folder.iterdir()) == [built]
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(OSError, match="no folder"):
        module._built(compiler)
