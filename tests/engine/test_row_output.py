"""Log-probabilities of what a round wrote."""

from __future__ import annotations

import pytest
import torch
from tiny import random_logits

from draftproof.engine.row_output import logprobs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("exact", [torch.float32, torch.float64])
def test_log_probabilities_are_as_exact_as_the_logits(
    dtype: torch.dtype, exact: torch.dtype
) -> None:
    """Rounded once: those of logits in 16 bits have the precision that was asked for."""
    logits, nodes = random_logits(2, 3, 40).to(dtype), torch.tensor([[0, 2], [0, 1]])
    tokens = torch.tensor([[5, 7], [39, 0]])
    chosen, likely, scores = logprobs(logits, nodes, tokens, exact, top=3)
    wanted = logits.double().log_softmax(-1)[torch.arange(2)[:, None], nodes]
    close = {"rtol": 0, "atol": 1e-5 if exact == torch.float32 else 1e-12, "check_dtype": False}
    torch.testing.assert_close(chosen, wanted.gather(-1, tokens[..., None])[..., 0], **close)
    torch.testing.assert_close(scores, wanted.topk(3).values.flatten(1), **close)
    theirs = wanted.gather(-1, likely.view(2, 2, 3)).flatten(1)
    torch.testing.assert_close(theirs, scores, **close)
