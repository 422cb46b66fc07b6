"""The decoder: target, drafter, cache and sequences meet here, once per round.

It knows no drafting method by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftproof.core.acceptance import Rule
from draftproof.core.messages import Accepted, Commit, Frontier, Reading, append_tokens
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import NO_TOKEN, TokenTree, well_formed
from draftproof.drafters.base import Drafter
from draftproof.engine.batch import Batch, Samples
from draftproof.engine.budget import Budget
from draftproof.engine.chunk_budget import ChunkBudget
from draftproof.engine.forced_tokens import NAME, forced_tokens, with_forced
from draftproof.engine.prefill import SHORT, Prefill, Prompts
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.engine.row_output import RowOutput, row_outputs
from draftproof.engine.shape_policy import OPEN, ShapePolicy
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.model.device import Device
from draftproof.model.target import Target
from draftproof.requests.sequence import SequenceState
from draftproof.requests.stats import Clock, Round, State

Watch = Callable[[TokenTree, list[list[str]], Sequence[SequenceState], Sequence[RowOutput]], None]
"""Called in each round with the verified tree, who drafted each node, the rows, and what each
accepted."""


class Decoder:
    """A running batch of at most `rows` rows of at most `capacity` tokens, scratch included.

    `prefill` and `read` read prompts; `step` is one round for all running rows. Finished rows leave
    by themselves; `retire` removes rows that the caller has ended.

    ops: None takes those of the target's device. prefixes: beginnings of prompts that need not be
    read again. watch: set it to see drafts. sampler: the class that draws tokens for the running
    rows.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rule: Rule, budget: Budget, rows: int,
        capacity: int, shapes: ShapePolicy = OPEN, ops: Ops | None = None,
        prefixes: PrefixCache | None = None, sampler: type[Sampler] = Sampler,
    ) -> None:  # fmt: skip
        self.target, self.rule, self.budget = target, rule, budget
        self.ops = ops or Device(target.device).ops(shapes.closed)
        self.drafter = drafter.for_run(rows, capacity, self.ops)
        self.batch = Batch(target, self.drafter, rows, capacity, shapes, self.ops, sampler)
        cache = self.batch.cache
        self.prompts = Prompts(target, self.drafter, cache, shapes, self.ops, prefixes)
        self.clock, self.observes = Clock(), type(drafter).observe is not Drafter.observe
        self.chunks = ChunkBudget(self.prompts.chunk) if self.prompts.alike else None
        self.watch: Watch | None = None
        self.forced = list[list[int]]()         # what grammars force in this round
        self.peeking = False                    # the drafter is asked though the budget cools down
        early = budget.min_confidence > 0 and not rule.needs_draft_probs
        self.ends_early = early and self.ops.on_host

    @property
    def running(self) -> list[SequenceState]:
        """The rows that have not ended."""
        return self.batch.running

    @torch.inference_mode()
    def step(self, prefill: Prefill | None = None) -> None:
        """One round for every running row: draft, verify, commit.

        prefill: prompts of which a chunk is read in the same pass; `reads_with_round` says whether
        one can be."""
        batch, chunk, nodes = self.batch, 0, 0
        if prefill is not None and self.chunks is not None:
            self.chunks.pending = True
        start = time.perf_counter()
        self.forced = self._forced() if batch.has_rules else []
        frontier = self._frontier()
        frontier, tree = self._draft(frontier)
        drafted = time.perf_counter()
        if prefill is None:
            reading = self.target.read(tree, batch.view, hidden_layers=self.drafter.hidden_layers)
        else:
            reading, chunk, nodes = self._read_with_chunk(frontier, tree, prefill)
        verified = time.perf_counter()
        accepted = batch.keep(tree, self.rule.accept(tree, reading.logits, frontier))
        kept = time.perf_counter()
        commit = self._observe(frontier, tree, reading, accepted) if self.observes else None
        observed = time.perf_counter()
        done = self._deliver(frontier, tree, reading, commit, accepted)
        seconds = time.perf_counter() - start
        drafting = drafted - start + observed - kept
        self.clock.add_round(drafting, verified - drafted, seconds)
        # forced tokens say nothing about the drafter's own, and a chunk's seconds nothing about
        # their cost
        if not (self.forced or chunk):
            self.budget.record(done._replace(seconds=seconds, draft_seconds=drafting))
        if self.chunks is not None and chunk:
            self.chunks.pass_took(chunk, nodes, seconds)
        elif self.chunks is not None:
            self.chunks.round_took(seconds, frontier.max_draft_tokens)
        for row in batch.running:
            if row.finish_reason is not None:
                self.retire()
                break

    @torch.inference_mode()
    def prefill(self, groups: Sequence[Samples], *, elsewhere: bool = False) -> Prefill:
        """Begin to read the prompts of these samples; `read` continues.

        elsewhere: use a separate cache, so that rows may come and go in the meantime.
        """
        if not elsewhere:
            self.batch.drop_padding()
        for row in (row for samples in groups for row in samples):
            row.began = self.clock.seconds
        with self.clock.prefill:
            return Prefill(self.prompts, groups, None if elsewhere else len(self.batch.running))

    @torch.inference_mode()
    def read(self, prefill: Prefill) -> bool:
        """Read the next chunk of prompts. After the last one, start their samples and return True.

        While other texts run, a chunk takes about as long as a round, and a long prompt joins them
        in a step of its own."""
        evenly = self.chunks if prefill.apart and self.batch.running else None
        with self.clock.prefill:
            joins: bool = prefill.finished
            if not joins:
                joins = prefill.read(evenly.tokens if evenly is not None else None)
                joins = joins and evenly is None
            if joins:
                self._start(prefill.groups, prefill.join(len(self.batch.running)))
        if evenly is not None:
            evenly.pending = True
            if not prefill.finished:
                evenly.chunk_took(evenly.tokens, self.clock.prefill.took)
        if joins:
            self.retire()
        return joins

    def reads_with_round(self, prefill: Prefill) -> bool:
        """Whether the next chunk of these prompts can be read in the pass of a round."""
        if prefill.finished or not (prefill.shares_cache and self.batch.running):
            return False
        longest = max(len(row.prompt) + len(row.tokens) for row in self.batch.running)
        return max(longest, prefill.reach) + SHORT <= self.batch.cache.capacity

    def _read_with_chunk(
        self, frontier: Frontier, tree: TokenTree, prefill: Prefill
    ) -> tuple[Reading, int, int]:
        """Read trees and, in the same pass, a chunk of prompts. Returns the reading of the trees,
        the tokens of the chunk (0, and it was not read, where drafts are too wide), and nodes."""
        batch, layers = self.batch, self.drafter.hidden_layers
        nodes, longest = int(tree.present.sum()), frontier.prefix.longest
        assert self.chunks is not None and longest is not None
        chunk, sizes = prefill.next_chunk(self.chunks.chunk_size(nodes))
        batch.cache.set_max_length(max(longest, prefill.reach))
        both = self.target.read_with_chunk(tree, chunk.tokens, batch.cache, layers)
        batch.cache.set_max_length(longest)
        if both is None:
            return self.target.read(tree, batch.view, hidden_layers=layers), 0, nodes
        prefill.commit(chunk, both[1], sizes)
        return both[0], chunk.tokens.shape[1], nodes

    def refresh(self) -> None:
        """Use changed weights from now on. Call it only while nothing runs."""
        target, prefixes = self.target, self.prompts.prefixes
        if target.group.is_single:
            target.refresh()
        if prefixes is not None:
            prefixes.belong_to(target.weights_version)

    def _forced(self) -> list[list[int]]:
        """For each row, the tokens that its grammar forces; empty if no row has any."""
        if not self.budget.max_draft_tokens or self.batch.shapes.closed:
            return []
        return forced_tokens(self.batch.running, self.budget.max_draft_tokens)

    def _frontier(self) -> Frontier:
        """The state of each row, and how much may be drafted.

        If drafts may end early, rows share the draft tokens of the batch: a row may have two more
        than the average, or half as many again.
        """
        rows, nodes, row_limit = self.batch.running, 0, 0
        longest = remaining = 0
        for row in rows:
            longest = max(longest, len(row.prompt) + len(row.tokens))
            remaining += row.limit - len(row.tokens)
        # rows with forced tokens need no drafter; one with a KV cache reads only its own tokens
        forced = self.forced and (all(self.forced) or self.drafter.has_kv_cache)
        cools, self.peeking = self.budget.cooldown > 0, False
        peeks = cools and self._may_peek()
        if self.budget.max_draft_tokens and (peeks or not cools) and not forced:
            unread = self.drafter.unread(len(self.batch.pending))
            state = State(len(rows), longest, remaining / len(rows), unread)
            nodes = self.budget.peek(state) if peeks else self.budget.choose(state)
            if not 0 <= nodes <= self.budget.max_draft_tokens:
                raise BadInput(f"the budget chose {nodes} draft tokens; it may choose 0 to its "
                               f"max_draft_tokens, {self.budget.max_draft_tokens}")
            nodes, self.peeking = self._within_chunk(nodes), peeks and nodes > 0
        if nodes and self.ends_early and len(rows) > 1 and self.target.ragged_batches:
            row_limit = min(nodes + max(2, nodes // 2), self.budget.max_draft_tokens)
        ahead, deepest = max(nodes, row_limit), self.drafter.deepest
        ahead = ahead if deepest is None else min(ahead, deepest)
        ahead = max([ahead, *map(len, self.forced)])
        prefix = self.batch.prefix(longest - 1, ahead)
        min_confidence = self.budget.min_confidence if self.ends_early else 0.0
        return Frontier(
            prefix, self.batch.sampler, nodes, self.rule.needs_draft_probs,
            self.target.reads_trees, min_confidence, row_limit, self.batch.view)

    def _may_peek(self) -> bool:
        """Whether the drafter may be asked in a cooldown: only in a round that will be recorded,
        and if it keeps no KV cache, which a draft that nobody reads would confuse."""
        reads_chunk = self.chunks is not None and self.chunks.pending
        alone = not (self.forced or reads_chunk or self.drafter.has_kv_cache)
        return alone and self.ends_early

    def _within_chunk(self, nodes: int) -> int:
        """The number of nodes to draft: at most `nodes`, and fewer after a chunk of a prompt."""
        if self.chunks is None or not self.chunks.pending:
            return nodes
        most = self.chunks.most_drafts(len(self.batch.running))
        return self.budget.at_most(min(nodes, most))

    def _draft(self, frontier: Frontier) -> tuple[Frontier, TokenTree]:
        """Forced tokens and the drafter's proposal, checked and cut to the budget; and how much was
        drafted in the end."""
        if not (frontier.max_draft_tokens or self.forced):
            return frontier, TokenTree.chain(frontier.prefix.root[:, None])
        tree = self._proposal(frontier)
        if self.peeking:
            size, tree = self._worth_reading(tree)
            frontier = replace(frontier, max_draft_tokens=size)
        if self.forced:
            tree = with_forced(tree, self.forced, frontier, self.budget.max_draft_tokens)
        tree, prefix = self.batch.view.truncate_tree(tree), frontier.prefix
        if tree.depth_limit < prefix.ahead and self.ops.on_host and not frontier.sampler.greedy:
            # noise is made for no more tokens than were drafted
            frontier = replace(frontier, prefix=replace(prefix, ahead=tree.depth_limit))
        return frontier, tree

    def _worth_reading(self, tree: TokenTree) -> tuple[int, TokenTree]:
        """The part of a draft that is read though the budget cools down, and its size."""
        size, drafted = 0, tree.tokens.shape[1] - 1
        if tree.confidence is not None and drafted:
            size = self.budget.worth_reading(tree.confidence[:, 1:].mean(0).tolist())
        if size == 0:
            return 0, TokenTree.chain(tree.tokens[:, :1])
        return size, tree.within_budget(size) if drafted > size else tree

    def _proposal(self, frontier: Frontier) -> TokenTree:
        if frontier.max_draft_tokens == 0:
            return TokenTree.chain(frontier.prefix.root[:, None])
        self.batch.flush()
        tree = self.drafter.propose(frontier)
        self._check(tree, len(frontier.prefix.position))
        most, ranked = frontier.max_draft_tokens, tree.budget_rank
        drafted = tree.tokens.shape[1] - 1
        allowed = most if ranked is None and tree.confidence is None else frontier.max_nodes
        if drafted > allowed:
            raise DrafterMismatch(
                f"the drafter {self.drafter.name} proposed {drafted} nodes, {allowed} were allowed"
            )
        if drafted == 0:
            return TokenTree.chain(tree.tokens)                 # read as in plain decoding
        return tree.within_budget(most) if drafted > most and ranked is None else tree

    def _check(self, tree: TokenTree, rows: int) -> None:
        """Raise if this is not a valid tree. On devices only its form is checked."""
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

    def _observe(
        self, frontier: Frontier, tree: TokenTree, reading: Reading, accepted: Accepted
    ) -> Commit:
        """The commit of the round, which the drafter observes."""
        top = self.drafter.top_k_needed * (not self.budget.cooldown)
        commit = Commit.of(self.batch.row_ids, tree, reading, accepted, top, self.ops)
        self.batch.notify_drafter(commit, frontier.max_draft_tokens == 0 and not self.forced)
        return commit

    def _deliver(
        self, frontier: Frontier, tree: TokenTree, reading: Reading, commit: Commit | None,
        accepted: Accepted,
    ) -> Round:  # fmt: skip
        """Update text, stop rules and statistics of every row, with one copy to the host."""
        batch, position = self.batch, frontier.prefix.position
        tokens = commit.tokens if commit is not None else tree.tokens
        if commit is None and not tree.is_chain:
            tokens = tokens.gather(1, accepted.nodes)
        new = self.ops.run(append_tokens, batch.text, position, tokens, accepted)
        scored = reading.logits if batch.wants_logprobs else None
        outputs = row_outputs(tree, accepted, new, scored, self.ops, batch.top_logprobs)
        ranks = tree.budget_rank.tolist() if tree.budget_rank is not None else None
        by, nodes, total, drafted = list[list[str]](), list[int](), 0, 0
        if self.watch is not None:
            forced = [[NAME] * tree.tokens.shape[1]] * len(tree.tokens)
            alone = self.forced and not frontier.max_draft_tokens
            by = forced if alone else self.drafter.drafted_by(tree)
            self.watch(tree, by, batch.running, outputs)
        for place, (row, out) in enumerate(zip(batch.running, outputs, strict=False)):  # no padding
            path = out.path[1:]
            nodes += path if ranks is None else [ranks[place][node] for node in path]
            chosen = out.tokens if out.tokens[-1] != NO_TOKEN else out.tokens[:-1]
            who = [by[place][node] for node in path] if by else [self.drafter.name] * len(path)
            count = min(len(self.forced[place]), len(path)) if self.forced else 0
            who = [NAME] * count + who[count:]
            emitted = row.extend(chosen, out.logprobs, who, out.top)
            if len(chosen) < len(out.tokens) and row.finish_reason is None:     # no next root
                self._fail(place, reading.logits[place])
            strayed = sum(out.distance[:emitted]) if out.distance is not None else None
            width, count = tree.tokens.shape[1] - 1, len(out.tokens) - 1
            row.stats.record(width, out.drafted, out.reach, count, emitted, strayed)
            total += emitted
            drafted += out.drafted
        chain = tree.is_chain and ranks is None
        size, count = frontier.max_draft_tokens, len(batch.running)
        return Round(size, count, nodes, total, 0.0, chain, drafted)

    def _start(self, groups: Sequence[Samples], logits: Tensor) -> None:
        """Start samples whose prompts were read; logits [b, 1, V] follow the prompts."""
        first = len(self.batch.running)
        self.batch.add(groups)
        copies = [place for place, samples in enumerate(groups) for _ in samples]
        self._choose_first(first, logits[copies])

    def _choose_first(self, first: int, logits: Tensor) -> None:
        """Choose the roots of the rows from `first` on, by logits [b, 1, V]."""
        batch, new = self.batch, self.batch.running[first:]
        last = batch.view.lengths[first:] - 1
        prefix = Prefix(batch.text[first : first + len(new)], last)
        sampler = batch.sampler.select(range(first, len(batch.running)))
        paths = Paths(prefix, TokenTree.root(prefix.root))
        (tokens,) = self.target.group.broadcast(sampler.sample(logits, paths))
        prefix.tokens.scatter_(1, last[:, None] + 1, tokens.clamp(min=0))
        roots = Accepted(torch.zeros_like(tokens), torch.ones_like(last), tokens[:, 0])
        scored, top = logits if batch.wants_logprobs else None, batch.top_logprobs
        outputs = row_outputs(paths.tree, roots, tokens, scored, self.ops, top)
        for place, (row, out) in enumerate(zip(new, outputs, strict=True), first):
            if out.tokens[0] == NO_TOKEN:
                self._fail(place, logits[place - first])
            else:
                row.extend(out.tokens, out.logprobs, (), out.top)

    def retire(self) -> None:
        """Remove ended rows. Their text is kept as a possible beginning of later prompts."""
        ended = list[tuple[int, SequenceState]]()
        for place, row in enumerate(self.batch.running):
            if row.finish_reason is not None:
                ended.append((place, row))
        if not ended:
            return
        with torch.inference_mode():
            for place, row in ended:
                row.stats.seconds = {part: seconds - row.began.get(part, 0.0)
                                     for part, seconds in self.clock.seconds.items()}
                if self.prompts.prefixes is not None and row.error is None:
                    alike = self.budget.max_draft_tokens < SHORT    # wider drafts are read apart
                    text = [*row.prompt, *(row.tokens[:-1] if alike else [])]
                    cache = self.batch.cache.rows(place, place + 1)
                    self.prompts.remember(cache, text, len(row.prompt), row.owner)
            self.batch.retire()

    def _fail(self, place: int, logits: Tensor) -> None:
        """End a row that has no next token. NaN in caches would pass masks, so they are cleared."""
        self.batch.fail(place, logits)
        if self.prompts.prompt_cache is not None:
            self.prompts.prompt_cache.clear()
