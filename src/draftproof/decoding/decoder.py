"""The decoder: where target, drafter, cache and sequences meet, once a round. Knows no drafting method by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.core.acceptance import Rule
from draftproof.core.messages import Accepted, Commit, Frontier, Reading
from draftproof.core.sampling import Paths, Prefix, Sampler
from draftproof.core.tree import ABSENT, NOTHING, TokenTree
from draftproof.decoding.budget import Budget
from draftproof.decoding.sequence import Running
from draftproof.decoding.stats import RoundStats
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput, BrokenModel, DrafterMismatch
from draftproof.target.cache import RowCache
from draftproof.target.target import Target

CHUNK = 256
"""Prompt tokens per read."""


class Decoder:
    """A running batch of at most `rows` rows of at most `capacity` tokens, scratch included.

    `admit` prefills new rows, `step` is one round for every running row, finished rows retire by themselves.
    """

    def __init__(self, target: Target, drafter: Drafter, rule: Rule, budget: Budget, rows: int, capacity: int) -> None:
        self.target, self.drafter, self.rule, self.budget = target, drafter, rule, budget
        self.cache = target.new_cache(rows, capacity)
        self.text = torch.zeros(rows, capacity + 1, dtype=torch.int64, device=target.device)
        self.running: list[Running] = []
        self.stats = RoundStats()
        drafter.start(rows, capacity)

    @torch.inference_mode()
    def step(self) -> None:
        """One round for every running row: draft, verify, commit."""
        frontier = self._frontier(self.budget.nodes(self.stats, len(self.running)))
        tree = self._draft(frontier)
        reading = self.target.read(tree, self._cache(), taps=self.drafter.taps)
        accepted = self.rule.accept(tree, reading.logits, frontier)
        self._cache().keep(None if tree.is_chain else accepted.nodes, accepted.count)
        commit = Commit.of(range(len(self.running)), tree, reading, accepted, top=self.drafter.wants_top)
        self.drafter.observe(commit)
        chosen = self._write(frontier.prefix.position, commit, accepted)
        self._deliver(tree, reading, accepted, chosen)

    @torch.inference_mode()
    def admit(self, samples: Sequence[Running]) -> None:
        """Prefill one prompt and start its `samples`, each a row of its own behind the running ones."""
        row, prompt = len(self.running), samples[0].prompt
        tokens = torch.tensor(prompt, device=self.text.device)
        self.text[row, : len(tokens)] = tokens
        logits = self._prefill(row, tokens)
        order = [*range(row), *[row] * len(samples)]
        self.cache.select(order)
        self.drafter.select(order)
        self.text[row : row + len(samples)] = self.text[row]
        self.running += samples
        self._resample()
        self._choose_first(row, logits)

    def _prefill(self, row: int, tokens: Tensor) -> Tensor:
        """Read a prompt in chunks into one row; return the logits [1, 1, V] at its end."""
        view = self.cache.rows(row, row + 1)
        for start in range(0, len(tokens), CHUNK):
            self.cache.bound(max(start, self._longest()))
            tree = TokenTree.chain(tokens[None, start : start + CHUNK])
            width = tree.tokens.shape[1]
            reading = self.target.read(tree, view, last_only=True, taps=self.drafter.taps)
            everything = Accepted(torch.arange(width, device=tokens.device)[None], view.lengths.new_full((1,), width), tokens)
            view.keep(None, everything.count)
            self.drafter.observe(Commit.of([row], tree, reading, everything))
        return reading.logits

    def _choose_first(self, first: int, logits: Tensor) -> None:
        """The target's choice behind the prompt becomes the root of the rows from `first` on."""
        new = self.running[first:]
        sampler = self.sampler.select(range(first, len(self.running)))
        last = self._cache().lengths[first:] - 1
        prefix = Prefix(self.text[first : first + len(new)], last)
        tree = TokenTree.root(prefix.root)
        logits = logits.expand(len(new), -1, -1)
        picks = sampler.pick(logits, Paths(prefix, tree))
        prefix.tokens.scatter_(1, last[:, None] + 1, picks.clamp(min=0))
        scores = _logprobs(logits, torch.zeros_like(picks), picks) if self._wants_logprobs else None
        told = scores.tolist() if scores is not None else [None] * len(new)
        for row, (token,), said in zip(new, picks.tolist(), told, strict=True):
            row.extend([self._checked(token, logits)], said, drafted=0)
        self._retire()

    @torch.inference_mode()
    def preview(self, nodes: int) -> TokenTree:
        """What the drafter would draft now, of at most so many nodes per row. For drafters that are `free`."""
        return self.drafter.propose(self._frontier(nodes))

    def _frontier(self, budget: int) -> Frontier:
        rows = len(self.running)
        deepest = self.drafter.deepest
        ahead = budget if deepest is None else min(budget, deepest)
        self.cache.bound(longest := self._longest())
        prefix = Prefix(self.text[:rows], self._cache().lengths.clone(), ahead, longest)
        return Frontier(prefix, self.sampler, budget, self.rule.drawn, self.target.reads_trees)

    def _draft(self, frontier: Frontier) -> TokenTree:
        """The drafter's proposal, if the target can read it and it keeps within the budget; without one it is not asked."""
        if frontier.budget == 0:
            return TokenTree.root(frontier.prefix.root)
        tree = self.drafter.propose(frontier)
        if not (tree.is_chain or self.target.reads_trees):
            raise DrafterMismatch(f"{self.target.name} cannot read trees exactly; draft chains for it")
        drafted = tree.tokens.shape[1] - 1
        if drafted > frontier.budget:
            raise DrafterMismatch(f"the drafter {self.drafter.name} proposed {drafted} nodes, {frontier.budget} were allowed")
        return tree

    def _write(self, position: Tensor, commit: Commit, accepted: Accepted) -> Tensor:
        """Write accepted tokens and the new root behind `position`; return them [B, D], the root at count - 1."""
        chosen = torch.cat([commit.tokens[:, 1:], accepted.root[:, None]], 1)
        chosen = chosen.scatter(1, accepted.count[:, None] - 1, accepted.root[:, None])
        places = position[:, None] + 1 + torch.arange(chosen.shape[1], device=chosen.device)
        self.text[: len(chosen)].scatter_(1, places, chosen.clamp(min=0))
        return chosen

    def _deliver(self, tree: TokenTree, reading: Reading, accepted: Accepted, chosen: Tensor) -> None:
        """The round's one copy to the host: text, stop rules, statistics, retiring rows."""
        there = tree.tokens != ABSENT
        reach = torch.where(there, tree.depths, 0).amax(1)
        columns = [accepted.count[:, None], there.sum(1, keepdim=True) - 1, reach[:, None], chosen]
        if self._wants_logprobs:
            columns.append(_logprobs(reading.logits, accepted.nodes, chosen))
        if accepted.distance is not None:
            columns.append(accepted.distance)
        host = torch.cat([column.double() for column in columns], 1).tolist()
        width = chosen.shape[1]
        for row, (count, drafted, reached, *rest) in zip(self.running, host, strict=True):
            tokens = [int(token) for token in rest[: int(count)]]
            some = tokens[:-1] if tokens[-1] == NOTHING else tokens            # only the root can be NOTHING
            told = rest[width : 2 * width] if self._wants_logprobs else None
            emitted = row.extend(some, told, drafted=int(count) - 1)
            strayed = sum(rest[-width:][:emitted]) if accepted.distance is not None else None
            if row.finish_reason is None:                                      # behind its end a text needs no token
                self._checked(tokens[-1], reading.logits)
            for stats in (row.stats, self.stats):
                stats.record(
                    width=tree.tokens.shape[1] - 1,
                    drafted=int(drafted), reach=int(reached), accepted=int(count) - 1, emitted=emitted, distance=strayed
                )
        self._retire()

    def _retire(self) -> None:
        """Let finished rows go; the last rows take their places."""
        rows = [row for row, state in enumerate(self.running) if state.finish_reason is None]
        if len(rows) == len(self.running):
            return
        low, high = {row for row in rows if row < len(rows)}, [row for row in rows if row >= len(rows)]
        order = [row if row in low else high.pop() for row in range(len(rows))]
        self.text[: len(order)] = self.text[order]
        self.cache.select(order)
        self.drafter.select(order)
        self.running = [self.running[row] for row in order]
        self._resample()

    def _longest(self) -> int:
        """Committed tokens of the longest running row: all but the root."""
        return max((len(row.prompt) + len(row.tokens) - 1 for row in self.running), default=0)

    def _resample(self) -> None:
        self.sampler = Sampler([row.wishes for row in self.running], self.target.device)
        self._wants_logprobs = any(row.wishes.sampling.logprobs for row in self.running)

    def _cache(self) -> RowCache:
        return self.cache.rows(0, len(self.running))

    def _checked(self, token: int, logits: Tensor) -> int:
        if token != NOTHING:
            return token
        if bool(logits.isnan().any()):
            raise BrokenModel(f"{self.target.name} gave NaN logits; its weights are broken, or the dtype is too small for it")
        raise BadInput("every token is forbidden here (by banned words, logit bias or a processor); allow at least one")


def _logprobs(logits: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """[B, D] log-probability of `tokens` [B, D] under the raw logits [B, N, V] at `nodes` [B, D]."""
    row = torch.arange(len(nodes), device=nodes.device)[:, None]
    chosen = logits[row, nodes].double()
    return chosen.log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
