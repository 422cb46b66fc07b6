"""The decoder: where target, drafter, cache and sequences meet, once a round.

Knows no drafting method by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from draftproof.core.acceptance import Rule
from draftproof.core.messages import Accepted, Commit, Frontier, Reading, append_tokens
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.tree import NO_TOKEN, TokenTree, well_formed
from draftproof.drafters.base import Drafter
from draftproof.engine.batch import Batch, Request
from draftproof.engine.budget import Budget
from draftproof.engine.deferred import Deferred
from draftproof.engine.prefill import SHORT, LongPrompt, Prompts
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.engine.row_output import RowOutput, row_outputs
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import OPEN, ShapePolicy
from draftproof.engine.stats import Clock, Round, State
from draftproof.errors import DrafterMismatch
from draftproof.model.device import Device
from draftproof.model.target import Target

Watch = Callable[[TokenTree, list[list[str]], Sequence[SequenceState], Sequence[RowOutput]], None]
"""Told each round what was verified, who drafted each node, and what each row accepted of it."""
BEYOND = 2
"""Tokens by which a row may draft more than a batch's rows on average; or half, if that is more."""


class Decoder:
    """A running batch of at most `rows` rows of at most `capacity` tokens, scratch included.

    `admit` reads prompts, `step` is one round for every running row; finished rows leave by
    themselves. ops: None takes those of the target's device. prefixes: what prompts may begin
    with, unread. watch: may be set to see drafts.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rule: Rule, budget: Budget, rows: int,
        capacity: int, shapes: ShapePolicy = OPEN, ops: Ops | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:  # fmt: skip
        self.target, self.rule, self.budget = target, rule, budget
        self.ops = ops or Device(target.device).ops(shapes.closed)
        own = Deferred.around(drafter) if self.ops.on_host else drafter
        self.drafter = own.for_run(rows, capacity, self.ops)
        self.batch = Batch(target, self.drafter, rows, capacity, shapes, self.ops)
        cache = self.batch.cache
        self.prompts = Prompts(target, self.drafter, cache, shapes, self.ops, prefixes)
        self.clock, self.observes = Clock(), type(drafter).observe is not Drafter.observe
        self.watch: Watch | None = None
        self.ends_early = budget.floor > 0 and self.ops.on_host and not rule.drawn

    @property
    def running(self) -> list[SequenceState]:
        """The rows that have not ended."""
        return self.batch.running

    @torch.inference_mode()
    def step(self, joining: Sequence[Request] = ()) -> None:
        """One round for every running row: draft, verify, commit.

        joining: requests that `takes` allows; their prompts are read beside what was drafted.
        """
        with self.clock.decide:
            with self.clock.draft:
                frontier = self._frontier()
                tree = self._draft(frontier)
            with self.clock.verify:
                reading, prompts = self.prompts.beside(tree, self.batch.view, joining)
            accepted = self.batch.keep(tree, self.rule.accept(tree, reading.logits, frontier))
            top, places = self.drafter.wants_top * (not self.budget.rest), self.batch.places
            commit = Commit.of(places, tree, reading, accepted, top, self.ops)
            if self.observes and frontier.budget:
                with self.clock.draft:
                    self.drafter.observe(commit)
            elif self.observes:                     # kept for later: not worth a clock
                self.drafter.observe(commit)
            done = self._deliver(frontier, tree, reading, commit, accepted)
        self.budget.record(done if joining else done._replace(seconds=self.clock.decide.took))
        if joining:
            self._join(joining, prompts)
        self._retire()

    def admissible(self, waiting: Iterable[Request]) -> int:
        """How many of the first requests that wait may be admitted at once: short ones together."""
        return self.prompts.admissible(len(self.batch.text) - len(self.batch.running), waiting)

    def is_long(self, request: Request) -> bool:
        """Whether a prompt is to be read by `read_beside`."""
        return self.prompts.is_long(request[0].prompt)

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether these, as few as `admissible` says, may join in a round."""
        return bool(self.batch.running) and self.prompts.may_join(requests)

    @torch.inference_mode()
    def admit(self, *requests: Request) -> None:
        """Read the prompt of each request and start its samples, as few as `admissible` says."""
        with self.clock.prefill:
            self.batch.drop_padding()
            self._join(requests, None)
            self._retire()

    @torch.inference_mode()
    def read_beside(self, request: Request) -> Iterator[None]:
        """As `admit`, of a prompt that `is_long`: a chunk at each step, with rounds between."""
        prompt, whole = LongPrompt(self.prompts, request[0].prompt), False
        while not whole:
            with self.clock.prefill:
                whole = prompt.read()
            if not whole:
                yield
        self._start([request], prompt.join(len(self.batch.running)))
        self._retire()

    def _frontier(self) -> Frontier:
        """Where rows stand, and how much may be drafted.

        Where a draft may end early, rows of a batch share what they may draft together.
        """
        rows, nodes, most = self.batch.running, 0, 0
        longest = remaining = 0
        for row in rows:
            longest = max(longest, len(row.prompt) + len(row.tokens))
            remaining += row.limit - len(row.tokens)
        if self.budget.most and not self.budget.rest:
            state = State(len(rows), longest, remaining / len(rows), self.drafter.unread())
            nodes = self.budget.choose(state)
        if nodes and self.ends_early and len(rows) > 1 and self.target.skips_absent:
            most = min(nodes + max(BEYOND, nodes // 2), self.budget.most)
        ahead, deepest = max(nodes, most), self.drafter.deepest
        prefix = self.batch.prefix(longest - 1, ahead if deepest is None else min(ahead, deepest))
        floor = self.budget.floor if self.ends_early else 0.0
        trees, drawn = self.target.reads_trees, self.rule.drawn
        return Frontier(prefix, self.batch.sampler, nodes, drawn, trees, floor, most)

    def _draft(self, frontier: Frontier) -> TokenTree:
        """The drafter's proposal, of which no more is read than the budget says; checked."""
        if frontier.budget == 0:
            return TokenTree.root(frontier.prefix.root)
        tree = self.drafter.propose(frontier)
        self._check(tree, len(frontier.prefix.position))
        budget, ranked, drafted = frontier.budget, tree.budget_rank, tree.tokens.shape[1] - 1
        allowed = budget if ranked is None and tree.confidence is None else frontier.max_nodes
        if drafted > allowed:
            raise DrafterMismatch(
                f"the drafter {self.drafter.name} proposed {drafted} nodes, {allowed} were allowed"
            )
        tree = tree.within_budget(budget) if drafted > budget and ranked is None else tree
        return self.batch.view.fitted(tree)

    def _check(self, tree: TokenTree, rows: int) -> None:
        """Refuse what is no tree; where numbers cannot be looked at, by its form alone."""
        if not (tree.is_chain or self.target.reads_trees):
            raise DrafterMismatch(
                f"{self.target.name} cannot read trees exactly; draft chains for it"
            )
        tokens, parents, vocab = tree.tokens, tree.parents, self.target.vocab_size
        sound = tokens.dtype == parents.dtype == torch.int64 and len(tokens) == rows
        sound = sound and tokens.shape == parents.shape
        if not (sound and (not self.ops.on_host or self.ops.run(well_formed, tree, vocab))):
            raise DrafterMismatch(
                f"the drafter {self.drafter.name} proposed no tree for {rows} rows: tokens are "
                f"int64, below {vocab} or ABSENT, parents come before their children, and no path "
                "is longer than depth_limit"
            )

    def _deliver(
        self, frontier: Frontier, tree: TokenTree, reading: Reading, commit: Commit,
        accepted: Accepted,
    ) -> Round:  # fmt: skip
        """Text, stop rules and statistics of every row, from one copy to the host."""
        position = frontier.prefix.position
        new = self.ops.run(append_tokens, self.batch.text, position, commit.tokens, accepted)
        scored = reading.logits if self.batch.wants_logprobs else None
        shared = tree.budget_rank.tolist() if tree.budget_rank is not None else None
        total, rows, nodes = 0, self.batch.running, list[int]()
        top = self.batch.top_logprobs
        outputs = row_outputs(tree, accepted, new, scored, self.ops, top)       # padding behind
        drafter, by = self.drafter.name, list[list[str]]()
        if self.watch is not None:
            by = self.drafter.drafted_by(tree)
            self.watch(tree, by, rows, outputs)
        for place, (row, out) in enumerate(zip(rows, outputs, strict=False)):
            path = out.path[1:]
            nodes += path if shared is None else [shared[place][node] for node in path]
            tokens = out.tokens if out.tokens[-1] != NO_TOKEN else out.tokens[:-1]
            who = [by[place][node] for node in path] if by else [drafter] * len(path)
            emitted = row.extend(tokens, out.logprobs, who, out.top)
            if len(tokens) < len(out.tokens) and row.finish_reason is None:     # no next root
                self._fail(place, reading.logits[place])
            strayed = sum(out.distance[:emitted]) if out.distance is not None else None
            width, count = tree.tokens.shape[1] - 1, len(out.tokens) - 1
            row.stats.record(width, out.drafted, out.reach, count, emitted, strayed)
            total += emitted
        chain = tree.is_chain and shared is None
        return Round(frontier.budget, len(rows), nodes, total, 0.0, chain)

    def _join(self, requests: Sequence[Request], reading: Reading | None) -> None:
        """Start the samples of requests; reading: what was read of their prompts already, if so."""
        prompts = [samples[0].prompt for samples in requests]
        self.prompts.begin(len(self.batch.running), [samples[0].source for samples in requests])
        self._start(requests, self.prompts.join(len(self.batch.running), prompts, reading))

    def _start(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Start samples whose prompts were read, by the logits [b, 1, V] at their ends."""
        first = len(self.batch.running)
        self.batch.add(requests)
        copies = [place for place, samples in enumerate(requests) for _ in samples]
        several = len(requests) > 1
        self._choose_first(first, logits[copies] if several else logits.expand(len(copies), -1, -1))

    def _choose_first(self, first: int, logits: Tensor) -> None:
        """The roots of the rows from `first` on: the target's choice by [b, 1, V]."""
        batch, new = self.batch, self.batch.running[first:]
        last = batch.view.lengths[first:] - 1
        prefix = Prefix(batch.text[first : first + len(new)], last)
        sampler = batch.sampler.select(range(first, len(batch.running)))
        paths = Paths(prefix, TokenTree.root(prefix.root))
        (tokens,) = self.target.group.same(sampler.sample(logits, paths))
        prefix.tokens.scatter_(1, last[:, None] + 1, tokens.clamp(min=0))
        roots = Accepted(torch.zeros_like(tokens), torch.ones_like(last), tokens[:, 0])
        scored, top = logits if batch.wants_logprobs else None, batch.top_logprobs
        found = row_outputs(paths.tree, roots, tokens, scored, self.ops, top)
        for place, (row, out) in enumerate(zip(new, found, strict=True), first):
            if out.tokens[0] == NO_TOKEN:
                self._fail(place, logits)
            else:
                row.extend(out.tokens, out.logprobs, (), out.top)

    def _retire(self) -> None:
        """Let finished rows go; what they hold may be the beginning of a prompt to come."""
        if self.prompts.prefixes is not None:
            for place, row in enumerate(self.batch.running):
                if row.finish_reason is not None and row.error is None:
                    alike = self.budget.most < SHORT        # wider drafts are read otherwise
                    text = [*row.prompt, *(row.tokens[:-1] if alike else [])]
                    cache = self.batch.cache.rows(place, place + 1)
                    self.prompts.remember(cache, text, len(row.prompt))
        self.batch.retire()

    def _fail(self, place: int, logits: Tensor) -> None:
        """What broke a row may be NaN in the caches, which passes masks."""
        self.batch.fail(place, logits)
        self.prompts.forget()
