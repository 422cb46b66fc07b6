"""The decoder: where target, drafter, cache and sequences meet, once a round. Knows no drafting method by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftproof.core.acceptance import Rule
from draftproof.core.messages import Accepted, Commit, Frontier, Reading, append_tokens
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import NOTHING, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.budget import Budget
from draftproof.engine.prefill import Prompts
from draftproof.engine.ranks import Ranks
from draftproof.engine.row_output import logprobs, row_outputs
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import OPEN, ShapePolicy
from draftproof.engine.stats import Clock, Round, RoundStats, State
from draftproof.errors import BadInput, BrokenModel, DrafterMismatch, DraftproofError
from draftproof.model.device import Device
from draftproof.model.target import Target

PATIENCE = 128
"""Plain rounds that a drafter is told of together at most, where to look at the host's own memory is free."""
HELD = 1 << 24
"""Bytes of logits that may wait meanwhile."""
BEYOND = 2
"""Tokens by which a row of a batch may draft more than each does on average; or half of that, if it is more."""


class Decoder:
    """A running batch of at most `rows` rows of at most `capacity` tokens, scratch included.

    `admit` prefills new rows, `step` is one round for every running row, finished rows retire by themselves.
    In closed shapes there are always all `rows`: those behind the running ones do what the last of them does, unheard.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rule: Rule, budget: Budget, rows: int, capacity: int, shapes: ShapePolicy = OPEN,
        ops: Ops | None = None,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.rule, self.budget, self.shapes = target, drafter, rule, budget, shapes
        self.ops = ops or Device(target.device).ops(shapes.closed)
        self.cache = target.new_cache(rows, capacity)
        self.prompts = Prompts(target, drafter, self.cache, shapes, self.ops)
        self.text = torch.zeros(rows, capacity + 1, dtype=torch.int64, device=target.device)
        self.running: list[SequenceState] = []
        self.twins: Tensor | None = None                # [B] in closed shapes, the row that each row does as
        self.stats, self.clock, self.ranks = RoundStats(), Clock(), Ranks(target.group)
        self.accepted: list[int] = []                   # numbers of the nodes accepted in the last round, of all rows
        self._hidden_layers, self._top, self._has_kv_cache = drafter.hidden_layers, drafter.wants_top, drafter.has_kv_cache
        self._deepest, self._reads_trees = drafter.deepest, target.reads_trees
        self._roots: Tensor | None = None               # [B] of the last round, if the rows are still the same
        self._view, self._lines = self.cache, self.text  # of the rows that take part
        self._pending: list[Commit] = []                 # of plain rounds, which the drafter learns of when it is asked again
        self._pending_logits: list[Tensor] = []                 # logits of these, if it wants successors
        drafter.start(rows, capacity, self.ops)

    @torch.inference_mode()
    def step(self, joining: Sequence[Sequence[SequenceState]] = ()) -> None:
        """One round for every running row: draft, verify, commit.

        joining: requests that `takes` allows; they are admitted meanwhile, their prompts read beside what was drafted.
        """
        if self.shapes.closed and self.twins is None:
            self._fill()
        size = self._choose()
        rows, emitted, began = len(self.running), self.stats.emitted, self.clock.total
        with self.clock.part("decide"):
            frontier = self._frontier(size)
            with self.clock.part("draft"):
                tree = self.ranks.tree(self._draft(frontier))
            prompts = [samples[0].prompt for samples in joining]
            with self.clock.part("verify"):
                reading, beside = self.prompts.beside(tree, self._view, prompts)
            accepted = self._alike(self.ranks.accepted(self.rule.accept(tree, reading.logits, frontier)))
            self._view.keep(None if tree.is_chain else accepted.nodes, accepted.count)
            answers = frontier.budget > 0 and self._has_kv_cache                 # what it read of its proposal, if only the root
            later = self.ops.on_host and tree.tokens.shape[1] == 1 and not answers
            top = 0 if later else self._top
            commit = Commit.of(range(self.rows), tree, reading, accepted, top, self.ops)
            self._roots = accepted.root
            with self.clock.part("draft"):
                self._observe(commit, reading.logits if later else None)
            new = self.ops.run(append_tokens, self.text, frontier.prefix.position, commit.tokens, accepted)
            self._deliver(tree, reading, accepted, new)
        seconds = 0.0 if joining else self.clock.total - began
        chain = tree.is_chain and tree.turns is None
        with self.clock.part("draft"):
            self.budget.record(Round(size, rows, self.accepted, self.stats.emitted - emitted, seconds, chain))
        if joining:
            first = len(self.running)
            read = self.prompts.read(first, prompts) if beside is None else self.prompts.commit(first, prompts, beside)
            self._start(joining, read)
        self._retire()

    def _choose(self) -> int:
        """What the budget says to draft per row."""
        with self.clock.part("draft"):
            rows, longest = self.running, self._longest() + 1
            remaining = sum([row.limit - len(row.tokens) for row in rows]) / len(rows)
            return self.budget.choose(State(len(rows), longest, remaining, self.unread))

    def room_for(self, waiting: Iterable[Sequence[SequenceState]]) -> int:
        """How many of the first requests that wait may be admitted at once: those with short prompts are read side by side."""
        return self.prompts.room(len(self.text) - len(self.running), waiting)

    def takes(self, requests: Sequence[Sequence[SequenceState]]) -> bool:
        """Whether these, as few as `room_for` says, may join in a round: where padding costs nothing short prompts may."""
        return bool(self.running) and self.prompts.may_join(requests)

    @torch.inference_mode()
    def admit(self, *requests: Sequence[SequenceState]) -> None:
        """Prefill the prompt of each request and start its samples, each a row of its own behind the running ones.

        Several at once have to be as few as `room_for` says.
        """
        if self.twins is not None:
            self._arrange(range(len(self.running)))
        self._start(requests, self.prompts.read(len(self.running), [samples[0].prompt for samples in requests]))
        self._retire()

    def _start(self, requests: Sequence[Sequence[SequenceState]], logits: Tensor) -> None:
        """Start the samples of requests whose prompts were read, by the logits [b, 1, V] at their ends."""
        first, others = len(self.running), range(len(self.running))
        lines = [[*row.prompt, *[0] * (self.text.shape[1] - len(row.prompt))] for row, *_ in requests]
        places = torch.arange(first, first + len(requests), device=self.text.device)
        self.text.index_copy_(0, places, torch.tensor(lines, device=self.text.device))
        copies = [place for place, samples in enumerate(requests) for _ in samples]
        self.running += [row for samples in requests for row in samples]
        self._arrange([*others, *[first + place for place in copies]])
        self._choose_first(first, logits[copies] if len(requests) > 1 else logits.expand(len(copies), -1, -1))

    def _choose_first(self, first: int, logits: Tensor) -> None:
        """The target's choice behind the prompt, by these logits [b, 1, V], becomes the root of the rows from `first` on."""
        new = self.running[first:]
        sampler = self.sampler.select(range(first, len(self.running)))
        last = self._view.lengths[first:] - 1
        prefix = Prefix(self.text[first : first + len(new)], last)
        tree = TokenTree.root(prefix.root)
        target_tokens = self.ranks.target_tokens(sampler.pick(logits, Paths(prefix, tree)))
        prefix.tokens.scatter_(1, last[:, None] + 1, target_tokens.clamp(min=0))
        scores = logprobs(logits, torch.zeros_like(target_tokens), target_tokens, self.ops.exact) if self._wants_logprobs else None
        told = scores.tolist() if scores is not None else [None] * len(new)
        for place, (row, (token,), said) in enumerate(zip(new, target_tokens.tolist(), told, strict=True), first):
            if token == NOTHING:
                self._fail(place, logits)
            else:
                row.extend([token], said, drafted=0)

    def _frontier(self, budget: int) -> Frontier:
        deepest, looks = self._deepest, self.budget.floor > 0 and self.ops.on_host and not self.rule.drawn
        shares = budget > 0 and looks and len(self.running) > 1 and self.target.skips_absent
        most = min(budget + max(BEYOND, budget // 2), self.budget.most) if shares else 0
        ahead = max(budget, most) if deepest is None else min(max(budget, most), deepest)
        longest = None if self.shapes.closed else self._longest()
        self.cache.bound(self.cache.capacity if longest is None else longest)
        prefix = Prefix(self._lines, self._view.lengths.clone(), ahead, longest, self._roots)
        floor = self.budget.floor if looks else 0.0
        return Frontier(prefix, self.sampler, budget, self.rule.drawn, self._reads_trees, floor, most)

    def _draft(self, frontier: Frontier) -> TokenTree:
        """The drafter's proposal, if the target can read it and it keeps within the budget; without one it is not asked.

        Rows of a batch share what may be drafted: of a proposal with more nodes than that the likeliest are read.
        """
        if frontier.budget == 0:
            return TokenTree.root(frontier.prefix.root)
        self._flush()
        tree = self.drafter.propose(frontier)
        if not (tree.is_chain or self._reads_trees):
            raise DrafterMismatch(f"{self.target.name} cannot read trees exactly; draft chains for it")
        drafted, shares = tree.tokens.shape[1] - 1, tree.turns is not None or tree.confidence is not None
        allowed = frontier.room if shares else frontier.budget
        if drafted > allowed:
            raise DrafterMismatch(f"the drafter {self.drafter.name} proposed {drafted} nodes, {allowed} were allowed")
        return tree.shared(frontier.budget) if drafted > frontier.budget and tree.turns is None else tree

    def _observe(self, commit: Commit, logits: Tensor | None) -> None:
        """Let the drafter learn what became true; of plain rounds, whose logits are given, several at a time."""
        if logits is None:
            self._flush()
            self.drafter.observe(commit)
            return
        self._pending.append(commit)
        if self._top:
            self._pending_logits.append(logits)
        if len(self._pending) == PATIENCE or len(self._pending_logits) * logits.nbytes > HELD:
            self._flush()

    def _flush(self) -> None:
        """Nothing is kept from the drafter any more."""
        if self._pending:
            self.drafter.observe(Commit.joined(self._pending, self._pending_logits, self._top, self.ops))
            self._pending, self._pending_logits = [], []

    def _deliver(self, tree: TokenTree, reading: Reading, accepted: Accepted, new: Tensor) -> None:
        """Text, stop rules, statistics. new: [B, D] what was appended."""
        given = row_outputs(tree, accepted, new, reading.logits if self._wants_logprobs else None, self.ops)
        width = tree.tokens.shape[1] - 1
        turns = tree.turns.tolist() if tree.turns is not None else None
        self.accepted = []
        for place, (row, one) in enumerate(zip(self.running, given, strict=self.twins is None)):
            tokens, count = one.tokens, len(one.tokens)
            some = tokens[:-1] if tokens[-1] == NOTHING else tokens            # only the root can be NOTHING
            self.accepted += one.path[1:] if turns is None else [turns[place][node] for node in one.path[1:]]
            emitted = row.extend(some, one.logprobs, drafted=count - 1)
            strayed = sum(one.distance[:emitted]) if one.distance is not None else None
            if row.finish_reason is None and tokens[-1] == NOTHING:            # behind its end a text needs no token
                self._fail(place, reading.logits[place])
            for stats in (row.stats, self.stats):
                stats.record(
                    width=width, drafted=one.drafted, reach=one.reach, accepted=count - 1, emitted=emitted, distance=strayed
                )

    def _retire(self) -> None:
        """Let finished rows go; the last rows take their places."""
        rows = [row for row, state in enumerate(self.running) if state.finish_reason is None]
        if len(rows) == len(self.running):
            return
        low, high = {row for row in rows if row < len(rows)}, [row for row in rows if row >= len(rows)]
        order = [row if row in low else high.pop() for row in range(len(rows))]
        self.running = [self.running[row] for row in order]
        self._arrange(order)

    def _arrange(self, order: Sequence[int], twins: Tensor | None = None) -> None:
        """Keep these rows, in this order; `twins` if some are copies that nobody needs."""
        self._flush()
        self._roots = None
        self.text[: len(order)] = self.text[list(order)]
        self.cache.select(order)
        self.drafter.select(order)
        self.twins = twins
        self._line_up()

    def _fill(self) -> None:
        """All rows of the closed shape: those that nobody needs become copies of the last that runs."""
        last = len(self.running) - 1
        twins = [min(row, last) for row in range(len(self.text))]
        self._arrange(twins, torch.tensor(twins, device=self.text.device))

    def _alike(self, accepted: Accepted) -> Accepted:
        """With rows that do as another does."""
        return accepted if self.twins is None else accepted.select(self.twins)

    @property
    def rows(self) -> int:
        """Rows that take part in a round."""
        return len(self.running) if self.twins is None else len(self.twins)

    @property
    def unread(self) -> int:
        """Committed tokens that the drafter must read before it can propose."""
        return self.drafter.unread(len(self._pending))

    def _longest(self) -> int:
        """Committed tokens of the longest running row: all but the root."""
        return max((len(row.prompt) + len(row.tokens) - 1 for row in self.running), default=0)

    def _line_up(self) -> None:
        """What the rows that take part share: views of cache and text, and what they wish."""
        self._view, self._lines = self.cache.rows(0, self.rows), self.text[: self.rows]
        unheard = [row.params for row in self.running[-1:]] * (self.rows - len(self.running))
        params = [*(row.params for row in self.running), *unheard]
        self.sampler = Sampler(params, self.target.device, self.ops)
        if self.shapes.closed:
            exact = torch.promote_types(self.target.dtype, torch.float32)
            self.sampler.prepare(exact, self.target.vocab_size)
        self._wants_logprobs = any(row.params.sampling.logprobs for row in self.running)

    def _fail(self, place: int, logits: Tensor) -> None:
        """End a row for which the target chose nothing; what it left in the caches may be NaN, which passes masks."""
        if bool(logits.isnan().any()):
            why = f"{self.target.name} gave NaN logits; its weights are broken, or the dtype is too small for it"
            error: DraftproofError = BrokenModel(why)
        else:
            error = BadInput("every token is forbidden here (by banned words, logit bias or a processor); allow at least one")
        self.running[place].fail(error)
        nursery = self.prompts.nursery
        for cache in (self.cache.rows(place, place + 1), *([nursery] if nursery is not None else [])):
            for store in (store for layer in cache.layers for store in layer.stores):
                store.zero_()
