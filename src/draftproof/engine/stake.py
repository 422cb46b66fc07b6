"""What drafting may lose while nobody knows whether it pays: a bank, and pauses between drafts in vain. Knows no clock."""

from __future__ import annotations

import math

SAVINGS = 256.0
"""Plain steps of earlier gains that may be kept for the drafter's set-ups and for other texts."""
LENT = 0.05
"""Share of plain decoding's time that a text may get out of these while it is written, a stake at most."""
UNLIMITED = 1e9
VAIN, APART, SPARSE, DEAR = 16.0, 4.0, 128.0, 2.0
"""Drafts that may follow each other in vain. Then come 2 `APART` plain rounds, and twice as many behind each further one, up to
`SPARSE`. One that loses more than 1 / `DEAR` plain steps counts for several, and the longest pause grows with their
square."""


class Bank:
    """What speculation may still lose, in plain steps.

    `slack` begins at `stake`, grows by `rate` for every token (per row) and by what speculation gains, and never exceeds
    `stake`: so no stretch of decoding, wherever it begins, loses more than stake + rate x tokens. What overflows is saved
    for set-ups, which a prompt needs once, and for other texts: each begins with a full stake and is lent another one, bit by
    bit, if earlier texts saved it. The first set-up is on the house.
    """

    def __init__(self, stake: float, rate: float) -> None:
        self.stake, self.rate = stake, rate
        self.slack, self.saved, self.debt = stake, 0.0, 0.0
        self.gained = 0.0                                       # without the rate, less what was lost since
        self.loan = 0.0                                         # what this text may still be lent

    def affords(self, worst: float, setup: float) -> bool:
        """Whether a round may run that loses `worst` if all drafts are wrong, after a set-up."""
        return worst <= self.slack and worst + setup <= self.slack + self.saved

    def far(self, worst: float) -> float:
        """Plain rounds, at least, before it affords to lose `worst`."""
        missing, grows = worst - self.slack, self.rate + (LENT if self.loan > 0 else 0.0)
        return 0.0 if missing <= 0 else missing / grows if grows else UNLIMITED

    def renew(self) -> None:
        """A text begins: fill up from what was saved."""
        self._take(self.stake)
        self.loan = min(self.stake, self.saved)

    def settle(self, cost: float, tokens: float, setup: float = 0.0, on_the_house: bool = False) -> None:
        """A round cost so much, gave so many tokens per row."""
        self.debt += cost + setup - tokens
        self.gained = min(SAVINGS, max(0.0, self.gained + tokens - cost))
        if not on_the_house:
            paid = min(setup, self.saved)
            self.saved -= paid
            cost += setup - paid
        slack = self.slack + (1 + self.rate) * tokens - cost
        self.slack = min(self.stake, slack)
        self.saved = min(SAVINGS, self.saved + slack - self.slack)
        self.loan -= self._take(min(self.loan, LENT * tokens))

    def _take(self, most: float) -> float:
        """Out of what was saved, as far as there is room for it."""
        missing = max(0.0, min(self.stake - self.slack, self.saved, most))
        self.slack += missing
        self.saved -= missing
        return missing


class Pauses:
    """Between drafts of a drafter that is tried in vain again and again, ever longer ones.

    The bank says how much may be lost for good; a drafter that never was right in hundreds of rounds is not worth that much.
    """

    def __init__(self) -> None:
        self._vain = self._pause = 0.0                  # drafts in a row that did not pay, and rounds to wait behind the last
        self._since = 0                                 # that were waited
        self._begun = False                             # a text has, meanwhile

    @property
    def needed(self) -> bool:
        """Whether so many drafts were in vain that the drafter is left alone between them."""
        return self._pause > 0

    @property
    def left(self) -> int:
        """Plain rounds before the next draft; half the pause is enough where a text began."""
        return max(0, int(self._pause / 2 if self._begun else self._pause) - self._since)

    def begin(self, anew: bool) -> None:
        """A text begins; `anew`: as if nothing had been tried."""
        self._begun = True
        if anew:
            self._vain = self._pause = 0.0

    def wait(self, rounds: int) -> None:
        """So many plain rounds went by."""
        self._since += rounds

    def drafted(self, gain: float) -> None:
        """A draft gained so many plain steps. One that gains any is believed."""
        self._since, self._begun = 0, False
        weight = max(1.0, -DEAR * gain)
        most = SPARSE * weight * weight
        self._vain = self._vain / 4 if gain > 0 else min(self._vain + weight, VAIN + math.log2(most / APART))
        self._pause = min(APART * 2 ** (self._vain - VAIN), most) if self._vain > VAIN else 0.0
