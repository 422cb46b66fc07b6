"""What may be lost: a bank that lends and saves, and pauses behind drafts in vain."""

from __future__ import annotations

import pytest

from draftproof.engine.stake import SPARSE, VAIN, Bank, Pauses


def test_a_text_is_lent_another_stake_bit_by_bit_if_earlier_ones_saved_it() -> None:
    bank = Bank(stake=8, rate=0.0)
    bank.settle(1.0, 7.0)
    assert (bank.saved, bank.loan) == (6.0, 0.0)
    for saved, lent in ((0.0, 0.0), (6.0, 6.0), (50.0, 8.0)):
        bank.slack, bank.saved = 8.0, saved
        bank.renew()
        bank.settle(1.0, 31.0)                                  # what it gains itself it is not lent
        bank.settle(9.0, 1.0)                                   # all that was there is lost
        assert bank.slack == pytest.approx(min(lent, 0.05))
        for _ in range(400):
            bank.settle(1.0, 1.0)                               # plain rounds
        assert bank.slack == pytest.approx(lent) and bank.saved == pytest.approx(saved + 30 - lent)


def test_a_bank_saves_for_set_ups_alone() -> None:
    bank = Bank(stake=8, rate=0.02)
    bank.settle(1.0, 21.0)
    assert bank.slack == 8 and bank.saved == pytest.approx(20.42) and bank.debt == -20
    assert bank.affords(8.0, 20.0) and not bank.affords(8.1, 0.0) and not bank.affords(8.0, 20.5)
    bank.settle(5.0, 1.0, setup=15.0)
    assert bank.slack == pytest.approx(8 + 1.02 - 5) and bank.saved == pytest.approx(5.42)
    bank.settle(1.0, 1.0, setup=100.0, on_the_house=True)
    assert bank.slack == pytest.approx(8 + 1.02 - 5 + 0.02) and bank.debt == pytest.approx(-20 + 4 + 15 + 100)


def test_pauses_end_with_the_first_draft_that_pays() -> None:
    pauses = Pauses()
    for _ in range(int(VAIN)):
        pauses.drafted(-0.1)
    assert pauses.left == 0 and not pauses.needed
    for _ in range(3):
        pauses.drafted(-0.1)
    assert pauses.left == 32 and pauses.needed
    pauses.wait(24)
    assert pauses.left == 8
    pauses.begin(anew=False)
    assert pauses.left == 0 and pauses.needed, "half of it is enough where a text began"
    for _ in range(5000):
        pauses.drafted(-0.1)
    assert pauses.left == SPARSE
    pauses.begin(anew=True)
    assert pauses.left == 0 and not pauses.needed
    for _ in range(5000):
        pauses.drafted(-0.1)
    pauses.drafted(0.5)
    assert pauses.left == 0


def test_a_draft_that_loses_much_counts_for_several() -> None:
    cheap, dear = Pauses(), Pauses()
    for _ in range(5):
        cheap.drafted(-0.1)
        dear.drafted(-2.0)
    assert (cheap.left, dear.left) == (0, 64)
    for _ in range(5000):
        cheap.drafted(-0.1)
        dear.drafted(-2.0)
    assert (cheap.left, dear.left) == (SPARSE, 16 * SPARSE)
