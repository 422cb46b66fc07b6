"""A budget that measures whether drafting pays, and drafts no more than it can afford to be wrong about.

Three parts: what a round costs (`pace`), what it gives (`estimate`), and what may be lost while finding out (`stake`).
docs/never_slower.md has the argument. Decisions depend on seconds alone through the cost table, so a
recorded table replays them; texts do not depend on them at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from draftproof.engine.budget import Ahead, Round
from draftproof.engine.estimate import FORGET, FORGET_PLAIN, Acceptance
from draftproof.engine.pace import ASKED, TOO_LONG, TURNED, CostTable, Doubt
from draftproof.engine.stake import SPARSE, UNLIMITED, Bank, Pauses
from draftproof.engine.stats import RoundStats
from draftproof.errors import BadInput

STAKE, RATE = 8.0, 0.01
"""Plain steps that may be lost, and the share of plain decoding's time that may be lost besides."""
FLOOR = 0.1
"""A path is not drafted further when it is less likely than this to stand: what another token costs it then hardly gives."""
BEGIN = 3
"""The first draft has about so many tokens: fewer would say little of what more cost, more would risk too much."""
MARGIN = 0.02
"""Drafting must promise so much more than plain decoding."""
SMALL = 8
"""Tokens per row that a drafter reads along with its first draft; more is a set-up."""
MOVED, PATIENCE = 0.2, 8
"""The plain step seems to have grown by this, in logarithms, in at least so many rounds: it is measured again."""
SETTLED, GLANCED, REST = 8, 2, 15
"""After so many plain rounds in a row (`GLANCED` where looks tell), decide and measure only now and then, at least once in
1 + `REST` rounds: thinking takes time as well."""
CALM = 3
"""Rounds of the rest that measures a plain step where it is due: thought about, or behind a draft, a round takes longer."""
TIRED, GUIDED = 8, 4
"""What part of the plain rounds in a row such a rest is: where only a draft can tell, and where looks do."""
HELD = 15
"""Rounds that a choice is kept for, at most, where drafting was chosen `SETTLED` times in a row; the bank must afford them
all, for nobody is asked or told meanwhile."""
THOUGHT, LONGEST, SOON = 0.0025, 256, 16
"""Share of plain decoding's time that thinking may take, looks included, once `SETTLED`; the longest rest that is to pay for
one thought; and the longest where a text begins."""
NOTABLE, HEEDED = 2, 3
"""So many tokens in a row that a proposal foretold end a rest, for one may be luck; and so many rests end like this before a
draft is made or a text begins."""
KEPT, AWAKE = 0.25, 1
"""What is left of the counts when a text begins while drafting seemed not to pay, and how many plain rounds are thought about
again before any rest: another text may repeat itself."""


def presets(most: int) -> tuple[int, ...]:
    """Draft sizes to choose from: 0, 1, 2, 3, 5, 7, 10, 14, 20, ... and `most`."""
    found, step = [0, 1, 2, 3], 0
    while found[-1] < most:
        found.append(round(5 * 2 ** (step / 2)))
        step += 1
    return (*(size for size in found if size < most), most)


class Adaptive:
    """Drafts as much as pays, zero included, and never risks more than its bank holds.

    most: nodes per row it may draft. stake, rate: it may lose `stake` plain steps once and `rate` of plain decoding's time.
    floor: drafts end where no path has this chance to stand (see `Confidence`).
    costs: a recorded table to decide by, instead of measuring. seed: of its own dice; texts never depend on it.
    What it learns outlasts a call: one object belongs to one engine.
    """

    def __init__(
        self,
        most: int,
        *,
        stake: float = STAKE,
        rate: float = RATE,
        floor: float = FLOOR,
        costs: CostTable | None = None,
        seed: int = 0,
    ) -> None:
        if most < 0:
            raise BadInput(f"a budget of at most {most} draft tokens was given; it must be 0 or more")
        if stake < 0 or rate < 0:
            raise BadInput(f"a stake of {stake} and a rate of {rate} were given; neither may be negative")
        self.most, self.floor = most, floor
        self.costs = costs if costs is not None else CostTable(presets(most))
        self.sizes = self.costs.sizes
        if self.sizes[-1] > most:
            raise BadInput(f"the cost table knows drafts of {self.sizes[-1]} tokens, at most {most} were allowed")
        self.bank = Bank(stake, rate)
        self._dice = Random(seed)
        self.acceptance = Acceptance(self._dice, self.sizes)
        self.pauses = Pauses()
        self._ahead = Ahead(1, 0, UNLIMITED)
        self._pace = self.costs.pace(1, 1)
        self._nodes = self._plain_rounds = 0
        self._rest = self._rested = 0                   # rounds not to be thought about, and how many of them were made
        self._owed = self._stirred = 0                  # rounds still to pay for the last thought; rests that ended early
        self._streak = self._hold = 0                   # choices in a row that drafted, rounds that the last is kept for
        self._expected = 1.0                            # tokens that a round of it gives each row
        self._turned = self._looked = False
        self._unheld = False                            # whether the last hold was granted and not made use of
        self._unearned = 0.0                            # of what this text's set-ups took, by drafts since
        self._free = False                              # whether somebody asks for looks
        self._took = [0.0, 0.0]                         # besides the last round, in plain steps, without and with a look
        self._doubts = (Doubt(), Doubt())
        begin = sum(size <= BEGIN for size in self.sizes) - 1
        self._to_begin_with = range(begin, begin + 1) if begin else range(0)

    @property
    def plain_step(self) -> float:
        return self._pace.plain_step

    @property
    def resting(self) -> int:
        return self._rest

    def rested(self, rounds: int, seconds: float) -> None:
        if seconds:
            self._pace.rest(rounds, seconds)
        else:
            self._pace.skip(rounds)
        self._count_rest(rounds)
        self._nodes = 0                                 # were drafted in the last round

    @property
    def holding(self) -> int:
        return self._hold

    def held(self, done: Round, given: Sequence[int]) -> None:
        rows, index = done.rows / len(given), self.sizes.index(self._nodes)
        self.acceptance.fade(FORGET ** (len(given) - 1))
        self.acceptance.learn(self._nodes, done)
        self._pace.skip(len(given) - (done.seconds > 0))
        cost = self._pace.observe(index, done.seconds) if done.seconds else self._pace.cost[index]
        for tokens in given:
            self.bank.settle(cost, tokens / rows)
            self._drafted(tokens / rows - cost)
        self._plain_rounds = self._stirred = self._hold = 0
        self._unheld = False

    def steady(self, ahead: Ahead) -> int | None:
        self.expect(ahead)
        if self._rest:
            return 0
        kept = self._nodes and self._streak > SETTLED and not self._unread() and not self._pace.plain_is_due
        return self._nodes if kept and self.bank.affords(self._pace.high[self.sizes.index(self._nodes)] - 1, 0.0) else None

    def _count_rest(self, rounds: int) -> None:
        self._rest, self._owed = max(0, self._rest - rounds), max(0, self._owed - rounds)
        self._rested += rounds

    def begin(self) -> None:
        self._wake()
        self.bank.renew()
        if self._unearned:                              # a set-up in vain is a draft in vain, and a dear one
            self.pauses.drafted(-self._unearned)
            self._unearned = 0.0
        self.pauses.begin(anew=self.bank.gained > self.bank.stake)
        self._stirred = 0
        if self._plain_rounds >= 3 * SETTLED:
            self.acceptance.fade(KEPT)
            owed = min(self._owed, SOON)
            if self._free or not self.pauses.needed:
                self._plain_rounds, self._rest = self._enough - AWAKE, owed
            else:
                self._rest = max(owed, min(self._rest, self.pauses.left))

    def expect(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._pace = self.costs.pace(ahead.rows, ahead.context)

    def nodes(self, stats: RoundStats, rows: int) -> int:
        self._turned, self._nodes, self._hold = self._nodes > 0, 0, 0
        if self._rest:
            self._count_rest(1)
            return 0
        self._wake()
        self._nodes = self._choose()
        return self._nodes

    @property
    def _enough(self) -> int:
        """Plain rounds in a row that are thought about. Where looks tell as much as drafts, resting too soon costs little."""
        return GLANCED if self._free else SETTLED

    def _wake(self) -> None:
        """Count the plain rounds that were not thought about."""
        if self._rested:
            self._plain_rounds += self._rested
            self.pauses.wait(self._rested)
            self.bank.settle(self._rested, self._rested)
            self._rested = 0

    def _stretch(self, tokens: float) -> int:
        """Rounds that the last choice may be kept for, behind one that gave so many tokens: if nothing stands, the bank affords
        all of them, and if as much as expected does, there is so much to write. None where there is something to set up."""
        if self._streak <= SETTLED or self._unread():
            return 0
        high = self._pace.high[self.sizes.index(self._nodes)]
        rounds = (self._ahead.remaining - tokens) / self._expected
        slack = self.bank.slack - max(0.0, high - tokens)
        return max(0, int(min(HELD, (self._streak - SETTLED + 1) // 2, rounds, slack / (high - 1) if high > 1 else HELD)))

    def _choose(self) -> int:
        if self._pace.plain_is_due or self._ahead.remaining <= 1:
            return 0
        pace, remaining, setup = self._pace, self._ahead.remaining, self._setup()
        owed, high = setup if self.costs.knows_setups else 0.0, pace.high
        known = range(1, len(self.sizes)) if pace.started else self._to_begin_with
        affordable = [index for index in known if self.bank.affords(high[index] - 1, owed)]
        if not affordable or (self.pauses.left and not self._free):             # where looks tell, drafts need not
            self._streak = 0
            return 0
        tokens, costs = self.acceptance.draw(remaining), pace.draw(self._dice)
        best, least = 0, 1 / (1 + MARGIN)
        thought = 0.0 if self._streak > SETTLED else self._took[False]          # before every round, as long as none is held
        for index in affordable:
            price = (costs[index] + thought) / tokens[index] + setup / remaining
            if price < least:
                best, least, self._expected = self.sizes[index], price, tokens[index]
        self._streak = self._streak + 1 if best else 0
        return 0 if best and self._doubtful(least) else best

    def _doubtful(self, price: float) -> bool:
        """Whether what seems a slow machine may be a slow drafter, slow enough to matter: then a plain round will tell."""
        pace = self._pace
        return pace.since_plain >= PATIENCE and pace.risen > max(MOVED, -math.log(price) / 2) and not pace.frozen

    def learn(self, done: Round) -> None:
        tokens = done.emitted / done.rows
        took, spent = self._beside(done.drafting)
        if self._nodes == 0:
            self._plain_rounds += 1
            self.pauses.wait(1)
            cost = self._pace.observe(TURNED if self._turned else ASKED, done.seconds - done.drafting)
            self.bank.settle(cost + spent, tokens)
            self._owed = int(min(took / THOUGHT, LONGEST))
            calm = CALM if self._pace.plain_is_due else 0
            self._rest = max(self._pause(), self._owed) if self._plain_rounds >= self._enough else calm
            self.acceptance.fade(FORGET_PLAIN ** (1 + self._rest))
            return
        self.acceptance.learn(self._nodes, done)
        self._stirred = 0
        on_the_house, self._hold = not self.costs.knows_setups, self._stretch(tokens)
        cost, setup = self._learn_cost(self.sizes.index(self._nodes), done.seconds - done.drafting)
        self.bank.settle(cost + spent, tokens, setup, on_the_house)
        if tokens > cost and self.pauses.needed and not self._free:             # what was counted before holds no longer
            self.acceptance.fade(KEPT)
        self._unearned += 0.0 if on_the_house else setup
        self._drafted(tokens - cost)
        settled = self._plain_rounds > self._enough and tokens <= cost         # one vain draft is no reason to think more
        self._plain_rounds = min(self._plain_rounds, 2 * REST) if settled else 0
        pause = self._pause() if settled and self.pauses.needed and not self._free else 0
        self._rest = pause if pause > REST else 0                               # nor is the pause behind it
        if self._rest:                                                          # which ends what was chosen in a row
            self._streak = self._hold = 0

    def _drafted(self, gain: float) -> None:
        """A draft gained so many plain steps, its set-up aside."""
        self.pauses.drafted(gain)
        self._unearned = max(0.0, self._unearned - gain) if self._unearned else 0.0

    def _beside(self, seconds: float) -> tuple[float, float]:
        """What drafter and budget took besides a round, in plain steps, and what of that drafts have to pay: what is spent in
        any case they have not."""
        looked, self._looked = self._looked, False
        most = 1 + TOO_LONG * self._took[looked]
        took = self._took[looked] = self._doubts[looked].believed(self._in_steps(seconds), most)
        return took, took if looked else min(took, self.bank.rate)

    def _pause(self) -> int:
        """Plain rounds that need no thought: where there is nothing to look at, nearly all before another draft may be made."""
        if self._free:
            return min(REST, self._plain_rounds // GUIDED)
        short = min(REST, self._plain_rounds // TIRED)
        left = max(self.pauses.left, min(self.bank.far(min(self._pace.high[1:], default=1.0) - 1), SPARSE))
        return max(short, int(left))

    def curiosity(self) -> int:
        self._free = True
        due = self._plain_rounds >= GLANCED - 1
        self._looked = due and self.bank.affords(self._took[True] + self._pace.high[-1] - 1, 0.0)
        return self.most if self._looked else 0

    def glimpse(self, nodes: int, seen: Round) -> None:
        if seen.rows:
            self.acceptance.learn(nodes, seen)
        if self._rest and self._stirred < HEEDED and sum(stood > 0 for stood in seen.stood) >= NOTABLE:
            self._rest, self._stirred = 0, self._stirred + 1

    def _in_steps(self, seconds: float) -> float:
        return seconds / self._pace.plain_step if self._pace.plain_step else 0.0

    def _unread(self) -> int:
        """Tokens of a set-up before the coming round."""
        return self._ahead.unread if self._ahead.unread > SMALL * self._ahead.rows else 0

    def _setup(self) -> float:
        return self.costs.setup(self._unread())

    def _learn_cost(self, index: int, seconds: float) -> tuple[float, float]:
        """Learn from a round that drafted; return its cost and that of its set-up, in plain steps."""
        unread, pace = self._unread(), self._pace
        if self._hold and pace.seen[index] and not self._unheld:                # what rounds without a thought take tells more
            self._unheld = True
            pace.skip()
            return pace.cost[index], 0.0
        if not unread:
            return pace.observe(index, seconds), 0.0
        cost = pace.cost[index]
        if self.costs.frozen:
            return cost, self.costs.setup(unread)
        pace.skip()
        return cost, self.costs.observe_setup(unread, max(0.0, self._in_steps(seconds) - cost))
