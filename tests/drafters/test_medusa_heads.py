"""Medusa heads: they start as the target's own, and decoding runs what training trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import CPU, VOCAB, target
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.core.ops import Ops
from draftproof.drafters.checkpoints import read_head, write_head
from draftproof.drafters.medusa import Medusa, MedusaConfig, MedusaHead
from draftproof.errors import BadInput, DrafterMismatch


def noisy_head(heads: int = 3, layers: int = 2, share: bool = True, seed: int = 0) -> MedusaHead:
    head = MedusaHead.fresh(target(), heads, layers, share)
    torch.manual_seed(seed)
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head


def logits_of(drafter: Medusa, hidden: Tensor, heads: int, ops: Ops = CPU) -> Tensor:
    """[B, heads, V] what it says of hidden states [B, H]."""
    drafter.start(len(hidden), 64, ops)
    drafter.hidden[:] = hidden
    return drafter.logits(len(hidden), heads)


def features(length: int = 12) -> Features:
    tokens = torch.randint(VOCAB, (3, length), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return target().features(tokens, torch.ones(3, length))


@pytest.mark.parametrize("share", [True, False])
def test_fresh_heads_say_what_the_target_says(share: bool) -> None:
    head, given = MedusaHead.fresh(target(), 3, 2, share), features()
    own = target().unembed(given.hidden[:, :, 0])
    for step, logits in enumerate(head.predict(given, target())):
        torch.testing.assert_close(logits, own[:, : -2 - step], rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [True, False])
def test_decoding_runs_what_training_trains(share: bool) -> None:
    """Stacked heads after token t say what step i of the trained form says of t + 2 + i."""
    head, given = noisy_head(share=share), features()
    drafter = Medusa(head, target())
    with torch.no_grad():
        trained = list(head.predict(given, target()))
        assert [len(logits[0]) for logits in trained] == [10, 9, 8] and head.steps == 3
        for place in range(8):
            stacked = logits_of(drafter, given.hidden[:, place, 0], 3)
            for step in range(3):
                wanted = trained[step][:, place]
                torch.testing.assert_close(stacked[:, step], wanted, rtol=0, atol=1e-10)
    assert [logits.shape[1] for logits in head.predict(features(3), target())] == [1, 0, 0]


def test_unshared_heads_say_the_same() -> None:
    shared = noisy_head()
    shared.count(torch.tensor([1, 1, 1]), torch.tensor([2, 2, 2]))
    own = shared.unshared(target())
    assert not own.config.share_lm_head and own.unshared(target()) is own
    assert own.pairs is shared.pairs and own.config.pairs == shared.config.pairs == 1
    both = zip(own.predict(features(), target()), shared.predict(features(), target()), strict=True)
    for ours, theirs in both:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("share", [True, False])
def test_a_draft_vocabulary_leaves_the_logits_of_its_tokens(share: bool, tmp_path: Path) -> None:
    """In training, in decoding, by copies of the projection, and written and read again."""
    head, known = noisy_head(share=share), torch.tensor([7, 3, 30, 12])
    with torch.no_grad():
        before = list(head.predict(features(), target()))
        head.limit_vocabulary(known, target())
        write_head(head, tmp_path)
        read = read_head(tmp_path, target())
        assert isinstance(read, MedusaHead) and read.config == head.config
        for one in (head, read, head.unshared(target())):
            for old, new in zip(before, one.predict(features(), target()), strict=True):
                torch.testing.assert_close(new, old[..., known], rtol=0, atol=1e-10)
            hidden = features().hidden[:, 4, 0]
            logits = logits_of(Medusa(one, target()), hidden, 3)
            torch.testing.assert_close(logits[..., known], torch.stack(
                [old[:, 4] for old in before], 1)[..., known], rtol=0, atol=1e-10)  # fmt: skip
            assert int(logits.isfinite().sum()) == 3 * 3 * len(known)
    held = load_file(tmp_path / "model.safetensors")
    assert any("proj" in name for name in held) != share


def test_heads_of_another_target_are_refused() -> None:
    cases = ((16, VOCAB, "16 numbers.*has 32"), (32, 4096, "4096 tokens.*has 40"))
    for hidden, vocab, words in cases:
        with pytest.raises(DrafterMismatch, match=words):
            Medusa(MedusaHead(MedusaConfig(2, 1, hidden, vocab)), target())
    with pytest.raises(BadInput, match=r"num_heads.*0"):
        MedusaConfig(0, 1, 32, VOCAB)
