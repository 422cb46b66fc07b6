"""Recurrent drafter's heads: training form, loss, beginnings, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from test_redrafter import FORMS, Tables, asking, law_after, random, random_head
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.core.tree import ABSENT
from draftproof.drafters.base import Drafter, DraftHead, Vocabulary
from draftproof.drafters.losses import head_loss
from draftproof.drafters.redrafter import ReDrafter, ReDrafterConfig, ReDrafterHead
from draftproof.errors import BadInput, DrafterMismatch


@pytest.mark.parametrize("form", FORMS)
def test_training_unrolls_the_same_recurrence(form: str) -> None:
    """Row t of step i: the hidden state of token t, run over tokens t + 1 to t + 1 + i."""
    tables = Tables(vocab=30)
    head = random_head(tables, steps=3, **FORMS[form])
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(30, (2, 7), generator=dice)
    hidden = torch.randn(2, 7, 1, 8, generator=dice, dtype=torch.float64)
    found = list(head.predict(Features(tokens, hidden, torch.ones(2, 7)), tables))
    known = slice(None) if head.token_map is None else head.token_map
    size = 30 if head.token_map is None else len(head.token_map)
    assert [one.shape for one in found] == [(2, 5 - step, size) for step in range(3)]
    for step, logits in enumerate(found):
        for row in range(2):
            for t in range(5 - step):
                consumed = tokens[row, t + 1 : t + 2 + step].tolist()
                law = law_after(head, tables, hidden[row, t, 0], consumed)
                torch.testing.assert_close(logits[row, t].log_softmax(-1), law[known])


def test_the_loss_is_apples() -> None:
    """Their own test vector: two steps over four tokens."""
    logits = torch.tensor([-4.2755, -4.0159, -5.4326, -7.3534, -5.2731, -4.7144, -6.3034, -5.6929,
                           -4.1427, -4.4837, -4.3300, -6.1975, -5.6221, -2.1564, -5.9357, -2.7976,
                           -5.3193, -4.0888, -4.9951, -4.7358, -6.5123, -4.8608, -4.8744,
                           -6.2276]).view(2, 4, 3)  # fmt: skip

    class Said(DraftHead):
        kind: ClassVar[str] = "said"
        decay = ReDrafterHead.decay
        steps = 2

        def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
            return (logits[None, step, : 4 - 2 - step] for step in range(2))

        def drafter(self, vocabulary: Vocabulary) -> Drafter:
            raise NotImplementedError

    features = Features(torch.tensor([[0, 1, 2, 1]]), torch.zeros(1, 4, 1, 1), torch.ones(1, 4))
    loss = float(head_loss(Said(), features, Tables()))
    assert loss == pytest.approx(1.586109 + 0.052678, abs=1e-5)


def test_a_fresh_head_begins_near_the_target() -> None:
    """Without the recurrence's share, its first logits are the target's own."""
    tables = Tables()
    hidden = random(5, 8, seed=1)
    for form in ({}, {"exit_dim": 11}, {"share_lm_head": True}):
        head = ReDrafterHead.fresh(tables, **form)
        offset = 0.0 if form.get("share_lm_head") else 0.25
        found = head.logits(hidden, torch.zeros_like(hidden)) + offset
        torch.testing.assert_close(found, tables.unembed(hidden))
    narrow = ReDrafterHead.fresh(tables, share_lm_head=True)
    assert not narrow.projection.weight.requires_grad
    head = ReDrafterHead.fresh(tables)
    states = head.advance(tables.embed(torch.arange(90)), None)
    assert 0.1 < float(states.detach().square().mean().sqrt()) < 3
    again = ReDrafterHead.fresh(tables).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in head.state_dict().items())


def test_least_squares_find_a_law_between_hidden_states() -> None:
    """Texts whose every hidden state is P [h; s; 1] of the one before give P; else nothing moves.

    Of tokens that are not in the loss they may be anything."""
    tables, rng = Tables(), torch.Generator().manual_seed(0)
    head = ReDrafterHead.fresh(tables, steps=1, share_lm_head=True).double()
    law = ReDrafterHead.fresh(tables, steps=1, share_lm_head=True).double().input_proj
    torch.nn.init.normal_(law.weight, std=0.2, generator=rng)
    tokens = torch.randint(90, (20, 30), generator=rng)
    states = head.advance(tables.embed(tokens), None)
    hidden = [random(20, 8, seed=2)]
    for place in range(1, 30):
        hidden.append(law(torch.cat([hidden[-1], states[:, place]], -1)))
    weights = torch.ones(tokens.shape)
    hidden[12], weights[:, 13:15] = random(20, 8, seed=3), 0.0      # the law is broken around here
    features = Features(tokens, torch.stack(hidden, 1)[:, :, None].detach(), weights)
    head.solve(iter([features]), tables)
    torch.testing.assert_close(head.input_proj.weight, law.weight, atol=2e-2, rtol=0)
    torch.testing.assert_close(head.input_proj.bias, law.bias, atol=2e-2, rtol=0)
    fresh, wide = (ReDrafterHead.fresh(tables) for _ in range(2))
    wide.solve(iter([features]), tables)                            # as published: no projection
    pairs = zip(wide.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_the_head_that_was_given_stays_as_it_is() -> None:
    """Decoding copies, in half precision too: packing must not reach the user's weights."""
    tables = Tables(vocab=256, hidden=64, dtype=torch.bfloat16)
    head = ReDrafterHead.fresh(tables).bfloat16()
    given = {name: weight.clone() for name, weight in head.state_dict().items()}
    drafter = ReDrafter(head, tables)
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        assert bool(drafter.propose(asking(drafter, hidden, [3], budget=9)).present.all())
    assert all(torch.equal(given[name], weight) for name, weight in head.state_dict().items())


def test_a_few_rows_more_or_less_are_padding() -> None:
    """No token is drafted that the target lacks, nor one the head lacks."""
    hidden = random(1, 8, seed=6)
    for rows in (80, 100):
        tables = Tables()
        form = ReDrafterConfig(8, rows, 16)
        head = ReDrafterHead(form).double()
        drafter = ReDrafter(head, tables, width=90 if rows > 90 else 80, length=1)
        tokens = drafter.propose(asking(drafter, hidden, [3], budget=90)).tokens[0, 1:]
        assert set(tokens.tolist()) - {ABSENT} == set(range(min(rows, 90)))


def test_what_does_not_fit_is_refused() -> None:
    tables = Tables()
    with pytest.raises(DrafterMismatch, match="16 numbers, tables has 8"):
        ReDrafter(ReDrafterHead(ReDrafterConfig(16, 90, 32)), tables)
    with pytest.raises(DrafterMismatch, match="5000 tokens, tables has 90"):
        ReDrafter(ReDrafterHead(ReDrafterConfig(8, 5000, 16)), tables)
    head = ReDrafterHead.fresh(tables)
    for wrong in ({"width": 0}, {"length": 0}, {"width": 91}):
        with pytest.raises(BadInput):
            ReDrafter(head, tables, **wrong)
    for wrong in ({"exit_dim": 7}, {"exit_dim": 17}, {"share_lm_head": True, "exit_dim": 9},
                  {"steps": 0}):
        with pytest.raises(BadInput):
            ReDrafterHead.fresh(tables, **wrong)
    with pytest.raises(BadInput, match="rnn_activation"):
        ReDrafterConfig(8, 90, 16, rnn_activation="tanh")
    with pytest.raises(BadInput, match="bias"):
        ReDrafterHead.fresh(tables, share_lm_head=True).unshared()
