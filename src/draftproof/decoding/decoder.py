"""The decoder: where target, drafter, cache and sequences meet, once a round. Knows no drafting method by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.acceptance import Rule
from draftproof.core.messages import Accepted, Commit, Frontier, Reading
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, NOTHING, TokenTree
from draftproof.decoding.budget import Budget, Confident, room
from draftproof.decoding.ranks import Ranks
from draftproof.decoding.sequence import Running
from draftproof.decoding.shapes import OPEN, Shapes
from draftproof.decoding.stats import RoundStats
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput, BrokenModel, DrafterMismatch, DraftproofError
from draftproof.target.cache import RowCache
from draftproof.target.device import Device
from draftproof.target.target import Target

PATIENCE = 128
"""Plain rounds that a drafter is told of together at most, where to look at the host's own memory is free."""
REMEMBERED = 1 << 14
"""Tokens of a row among which is looked for what repeats itself."""
HELD = 1 << 24
"""Bytes of logits that may wait meanwhile."""
SHORT, TOGETHER = 64, 256
"""Tokens of a prompt that is read beside others, in one pass, and of all of these, each as long as the longest: longer ones
gain little, and fused layers, to which padding is nothing, read no wider."""


class _Given(NamedTuple):
    """What a round gave one row: the accepted tokens and the next root, and the nodes that stood, root first.

    drafted: nodes. reach: depth of the deepest. path: of a tree whose nodes have no ranks nobody needs it.
    logprobs, distance: of each token, if somebody asks; they may be longer.
    """

    drafted: int
    reach: int
    tokens: list[int]
    path: list[int]
    logprobs: list[float] | None = None
    distance: list[float] | None = None


class Decoder:
    """A running batch of at most `rows` rows of at most `capacity` tokens, scratch included.

    `admit` prefills new rows, `step` is one round for every running row, finished rows retire by themselves.
    In closed shapes there are always all `rows`: those behind the running ones do what the last of them does, unheard.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rule: Rule, budget: Budget, rows: int, capacity: int, shapes: Shapes = OPEN
    ) -> None:
        self.target, self.drafter, self.rule, self.budget, self.shapes = target, drafter, rule, budget, shapes
        self.device = Device(target.device)
        self.at_hand = target.device.type == "cpu" and not shapes.closed             # to look at a number waits for nothing
        self.cache = target.new_cache(rows, capacity)
        self.nursery = target.new_cache(1, capacity) if shapes.closed else None      # prompts are read there: one shape
        self.text = torch.zeros(rows, capacity + 1, dtype=torch.int64, device=target.device)
        self._page = self.text.numpy() if self.at_hand else None        # the same memory
        self.running: list[Running] = []
        self.twins: Tensor | None = None                # [B] in closed shapes, the row that each row does as
        self.stats, self.ranks = RoundStats(), Ranks(target.group)
        self.stood: list[int] | None = []               # which nodes of the last round stood, of all rows, if nodes are ranked
        self.shared = False                             # whether rows shared what the last round drafted
        self.allowed = 0                                # nodes per row that it might draft
        self._floor = budget.floor if isinstance(budget, Confident) else 0.0
        self._taps, self._top, self._rereads = drafter.taps, drafter.wants_top, drafter.rereads
        self._deepest, self._reads_trees = drafter.deepest, target.reads_trees
        self._roots: Tensor | None = None               # [B] where they are at hand
        self._view, self._lines = self.cache, self.text  # of the rows that take part
        self._untold: list[Commit] = []                 # of plain rounds, which the drafter learns of when it is asked again
        self._unsaid: list[Tensor] = []                 # logits of these, if it wants successors
        drafter.start(rows, capacity)

    @torch.inference_mode()
    def step(self, nodes: int | None = None, joining: Sequence[Sequence[Running]] = ()) -> None:
        """One round for every running row: draft, verify, commit. nodes: so many are drafted, whatever the budget would say.

        joining: requests that `takes` allows; they are admitted meanwhile, their prompts read beside what was drafted.
        """
        if self.shapes.closed and self.twins is None:
            self._fill()
        self.allowed = self.budget.nodes(self.stats, len(self.running)) if nodes is None else nodes
        frontier = self._frontier(self.allowed)
        tree = self.ranks.tree(self._draft(frontier))
        prompts = [samples[0].prompt for samples in joining]
        reading, beside = self._read(tree, prompts)
        accepted = self._alike(self.ranks.accepted(self.rule.accept(tree, reading.logits, frontier)))
        self._view.keep(None if tree.is_chain else accepted.nodes, accepted.count)
        answers = frontier.budget > 0 and self._rereads                 # what it read of its proposal, if only the root
        later = self.at_hand and tree.tokens.shape[1] == 1 and not answers
        top = 0 if later else self._top
        commit = Commit.of(range(self.rows), tree, reading, accepted, top, at_hand=self.at_hand)
        self._roots = accepted.root if self.at_hand else None
        self._observe(commit, reading.logits if later else None)
        chosen = None if self.at_hand else self._write(frontier.prefix.position, commit, accepted)
        self._deliver(tree, reading, commit, accepted, chosen)
        if joining:
            first = len(self.running)
            self._start(joining, self._prefill(first, prompts) if beside is None else self._begun(first, prompts, beside))
        self._retire()

    def _read(self, tree: TokenTree, prompts: Sequence[Sequence[int]]) -> tuple[Reading, Reading | None]:
        """What the target says of a tree and, where there is room to read them beside it, of prompts."""
        rows, width, longest = *tree.tokens.shape, max(map(len, prompts), default=0)
        wide = max(width, longest)
        if not prompts or wide > SHORT or not self.cache.holds(wide):           # what is read otherwise has other bits
            return self.target.read(tree, self._view, taps=self._taps), None
        view = self.cache.rows(0, rows + len(prompts))
        view.lengths[rows:] = 0
        both = self.target.read(tree.above(self._padded(prompts, longest)), view, taps=self._taps)
        return both.part(slice(rows), width), both.part(slice(rows, None), longest)

    def room_for(self, waiting: Iterable[Sequence[Running]]) -> int:
        """How many of the first requests that wait may be admitted at once: those with short prompts are read side by side."""
        free, found, longest = len(self.text) - len(self.running), 0, 0
        several = self.at_hand and self.target.skips_absent
        for samples in waiting:
            free, longest = free - len(samples), max(longest, len(samples[0].prompt))
            beside = several and longest <= min(SHORT, TOGETHER // (found + 1))
            if free < 0 or (found and not beside):
                break
            found += 1
        return found

    @torch.inference_mode()
    def admit(self, *requests: Sequence[Running]) -> None:
        """Prefill the prompt of each request and start its samples, each a row of its own behind the running ones.

        Several at once have to be as few as `room_for` says.
        """
        if self.twins is not None:
            self._arrange(range(len(self.running)))
        self._start(requests, self._prefill(len(self.running), [samples[0].prompt for samples in requests]))
        self._retire()

    def takes(self, requests: Sequence[Sequence[Running]]) -> bool:
        """Whether these, as few as `room_for` says, may join in a round: where padding costs nothing short prompts may."""
        if not (self.running and self.at_hand and self.target.skips_absent):
            return False
        return all(len(samples[0].prompt) <= SHORT for samples in requests)

    def _start(self, requests: Sequence[Sequence[Running]], logits: Tensor) -> None:
        """Start the samples of requests whose prompts were read, by the logits [b, 1, V] at their ends."""
        first, others = len(self.running), range(len(self.running))
        lines = [[*row.prompt, *[0] * (self.text.shape[1] - len(row.prompt))] for row, *_ in requests]
        places = torch.arange(first, first + len(requests), device=self.text.device)
        self.text.index_copy_(0, places, torch.tensor(lines, device=self.text.device))
        copies = [place for place, samples in enumerate(requests) for _ in samples]
        self.running += [row for samples in requests for row in samples]
        self._arrange([*others, *[first + place for place in copies]])
        self._choose_first(first, logits[copies] if len(requests) > 1 else logits.expand(len(copies), -1, -1))

    def _prefill(self, first: int, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts in chunks into the rows from `first` on; return the logits [b, 1, V] at their ends."""
        view = self._nest(first, len(prompts))
        view.lengths.zero_()
        start, longest = 0, max(len(prompt) for prompt in prompts)
        while start < longest:
            view.bound(self.cache.capacity if self.shapes.closed else start)
            width = self.shapes.chunk(longest - start)
            texts = [prompt[start : start + width] for prompt in prompts]
            tree, start = TokenTree.chain(self._padded(texts, width)), start + width
            last_only = len(prompts) == 1 and (not self.shapes.closed or start < longest)   # behind padding lies no last one
            logits = self._begun(first, texts, self.target.read(tree, view, last_only=last_only, taps=self._taps))
        if self.nursery is not None:
            self.cache.take(torch.arange(first, first + 1, device=self.text.device), self.nursery)
        return logits

    def _nest(self, first: int, count: int) -> RowCache:
        """Where the prompts of so many rows from `first` on are read."""
        return self.nursery or self.cache.rows(first, first + count)

    def _padded(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        """[b, width] tokens, ABSENT behind the shorter texts."""
        return torch.tensor([[*text, *[ABSENT] * (width - len(text))] for text in texts], device=self.text.device)

    def _begun(self, first: int, texts: Sequence[Sequence[int]], reading: Reading) -> Tensor:
        """Commit parts of prompts that were read into the rows from `first` on; return the logits [b, 1, V] at their ends."""
        logits, device = reading.logits, self.text.device
        count = torch.tensor([len(text) for text in texts], device=device)
        self._nest(first, len(texts)).keep(None, count)
        for place, text in enumerate(texts):
            own, deep = slice(place, place + 1), self.shapes.chunk(len(text))
            chain = TokenTree.chain(self._padded([text], deep))
            everything = Accepted(torch.arange(deep, device=device)[None], count[own], chain.tokens[:, 0])
            commit = Commit.of([first + place], chain, reading.part(own, deep), everything, at_hand=self.at_hand)
            self.drafter.observe(commit)
        return logits if logits.shape[1] == 1 else logits.gather(1, (count - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))

    def _choose_first(self, first: int, logits: Tensor) -> None:
        """The target's choice behind the prompt, by these logits [b, 1, V], becomes the root of the rows from `first` on."""
        new = self.running[first:]
        sampler = self.sampler.select(range(first, len(self.running)))
        last = self._view.lengths[first:] - 1
        prefix = Prefix(self.text[first : first + len(new)], last)
        tree = TokenTree.root(prefix.root)
        picks = self.ranks.picks(sampler.pick(logits, Paths(prefix, tree)))
        prefix.tokens.scatter_(1, last[:, None] + 1, picks.clamp(min=0))
        scores = _logprobs(logits, torch.zeros_like(picks), picks, self.device.widest) if self._wants_logprobs else None
        told = scores.tolist() if scores is not None else [None] * len(new)
        for place, (row, (token,), said) in enumerate(zip(new, picks.tolist(), told, strict=True), first):
            if token == NOTHING:
                self._fail(place, logits)
            else:
                row.extend([token], said, drafted=0)

    @torch.inference_mode()
    def preview(self, nodes: int) -> TokenTree:
        """What the drafter would draft now, of at most so many nodes per row. For drafters that are `free`."""
        self._tell()
        tree, rows = self.drafter.propose(self._frontier(nodes)), len(self.running)
        tokens, parents = tree.tokens[:rows], tree.parents[:rows]
        return TokenTree(tokens, parents, tree.depth_limit, is_chain=tree.is_chain, ranked=tree.ranked)

    def repeating(self, length: int) -> int:
        """How many rows end with `length` tokens that stood side by side in their text before, as far as that is at hand."""
        if self._page is None:
            return 0
        found, wide = 0, self._page.itemsize
        for place, row in enumerate(self.running):
            end = len(row.prompt) + len(row.tokens)
            text = self._page[place, max(0, end - REMEMBERED) : end].tobytes()
            tail = text[-length * wide :]
            at = text.find(tail)
            while at % wide:                                # a number ends there, and another begins
                at = text.find(tail, at + 1)
            found += at < len(text) - len(tail)
        return found

    def _frontier(self, budget: int) -> Frontier:
        deepest, looks = self._deepest, self._floor > 0 and self.sampler.at_hand and not self.rule.drawn
        shares = budget > 0 and looks and len(self.running) > 1 and self.target.skips_absent
        most = min(room(budget), self.budget.most) if shares else 0
        ahead = max(budget, most) if deepest is None else min(max(budget, most), deepest)
        longest = None if self.shapes.closed else self._longest()
        self.cache.bound(self.cache.capacity if longest is None else longest)
        prefix = Prefix(self._lines, self._view.lengths.clone(), ahead, longest)
        if self._roots is not None:
            prefix.__dict__["root"] = self._roots                               # what lies in the text
        floor = self._floor if looks else 0.0
        return Frontier(prefix, self.sampler, budget, self.rule.drawn, self._reads_trees, floor, most)

    def _draft(self, frontier: Frontier) -> TokenTree:
        """The drafter's proposal, if the target can read it and it keeps within the budget; without one it is not asked.

        Rows of a batch share what may be drafted: of a proposal with more nodes than that the likeliest are read.
        """
        if frontier.budget == 0:
            return TokenTree.root(frontier.prefix.root)
        self._tell()
        tree = self.drafter.propose(frontier)
        if not (tree.is_chain or self._reads_trees):
            raise DrafterMismatch(f"{self.target.name} cannot read trees exactly; draft chains for it")
        drafted, shares = tree.tokens.shape[1] - 1, tree.turns is not None or tree.odds is not None
        allowed = frontier.room if shares else frontier.budget
        if drafted > allowed:
            raise DrafterMismatch(f"the drafter {self.drafter.name} proposed {drafted} nodes, {allowed} were allowed")
        return tree.shared(frontier.budget) if drafted > frontier.budget and tree.turns is None else tree

    def _observe(self, commit: Commit, logits: Tensor | None) -> None:
        """Let the drafter learn what became true; of plain rounds, whose logits are given, several at a time."""
        if logits is None:
            self._tell()
            self.drafter.observe(commit)
            return
        self._untold.append(commit)
        if self._top:
            self._unsaid.append(logits)
        if len(self._untold) == PATIENCE or len(self._unsaid) * logits.nbytes > HELD:
            self._tell()

    def _tell(self) -> None:
        """Nothing is kept from the drafter any more."""
        if self._untold:
            self.drafter.observe(Commit.joined(self._untold, self._unsaid, self._top))
            self._untold, self._unsaid = [], []

    def _write(self, position: Tensor, commit: Commit, accepted: Accepted) -> Tensor:
        """Write accepted tokens and the new root behind `position`; return them [B, D], the root at count - 1."""
        chosen = torch.cat([commit.tokens[:, 1:], accepted.root[:, None]], 1)
        chosen = chosen.scatter(1, accepted.count[:, None] - 1, accepted.root[:, None])
        places = position[:, None] + 1 + torch.arange(chosen.shape[1], device=chosen.device)
        self.text[: len(chosen)].scatter_(1, places, chosen.clamp(min=0))
        return chosen

    def _noted(self, tree: TokenTree, reading: Reading, commit: Commit, accepted: Accepted) -> list[_Given]:
        """What the round gave each row; its text is written on, number by number."""
        assert self._page is not None, "only numbers at hand are noted one by one"
        rows, sizes = [], zip(tree.sizes, tree.reach, strict=True)
        said = commit.tokens.tolist() if tree.tokens.shape[1] > 1 else [[]] * len(self.running)
        for row, (written, tokens, (path, root), (drafted, reach)) in enumerate(
            zip(self.running, said, accepted.on_host, sizes, strict=True)
        ):
            chosen = [*tokens[1 : len(path)], root]
            start = len(written.prompt) + len(written.tokens)
            self._page[row, start : start + len(path)] = chosen             # a row without a next root ends here
            rows.append(_Given(drafted, reach, chosen, path))
        if self._wants_logprobs:
            deep = accepted.nodes.shape[1]
            padded = torch.tensor([[*row.tokens, *[0] * (deep - len(row.tokens))] for row in rows])
            said = _logprobs(reading.logits, accepted.nodes, padded, self.device.widest).tolist()
            rows = [row._replace(logprobs=one) for row, one in zip(rows, said, strict=True)]
        if accepted.distance is not None:
            rows = [row._replace(distance=one) for row, one in zip(rows, accepted.distance.tolist(), strict=True)]
        return rows

    def _copied(self, tree: TokenTree, reading: Reading, accepted: Accepted, chosen: Tensor) -> list[_Given]:
        """What the round gave each row, in the round's one copy to the host; chosen: [B, D] as `_write` returns it."""
        there, deep = tree.tokens != ABSENT, chosen.shape[1]
        reach = torch.where(there, tree.depths, 0).amax(1)
        columns = [torch.stack([accepted.count, there.sum(1) - 1, reach], 1), chosen]
        if tree.ranked:
            columns.append(accepted.nodes)
        if self._wants_logprobs:
            columns.append(_logprobs(reading.logits, accepted.nodes, chosen, self.device.widest))
        if accepted.distance is not None:
            columns.append(accepted.distance)
        exact = self.device.widest if len(columns) > 2 else torch.int64             # token ids are far below 2**24
        self.device.flush()
        host: list[list[Any]] = torch.cat([column.to(exact) for column in columns], 1).tolist()
        rows = []
        for sizes in host:
            count, drafted, reached = (int(size) for size in sizes[:3])
            parts = iter([sizes[start : start + count] for start in range(3, len(sizes), deep)])
            tokens = [int(token) for token in next(parts)]
            path = [int(node) for node in next(parts)] if tree.ranked else list(range(count))
            logprobs = next(parts) if self._wants_logprobs else None
            rows.append(_Given(drafted, reached, tokens, path, logprobs, next(parts, None)))
        return rows

    def _deliver(self, tree: TokenTree, reading: Reading, commit: Commit, accepted: Accepted, chosen: Tensor | None) -> None:
        """Text, stop rules, statistics. chosen: [B, D] what `_write` wrote; None if that is still to do."""
        if chosen is None:
            given = self._noted(tree, reading, commit, accepted)
        else:
            given = self._copied(tree, reading, accepted, chosen)
        width = tree.tokens.shape[1] - 1
        turns = tree.turns.tolist() if tree.turns is not None else None
        self.shared, self.stood = turns is not None, [] if tree.ranked or tree.is_chain or turns is not None else None
        for place, (row, one) in enumerate(zip(self.running, given, strict=self.twins is None)):
            tokens, count = one.tokens, len(one.tokens)
            some = tokens[:-1] if tokens[-1] == NOTHING else tokens            # only the root can be NOTHING
            if self.stood is not None:
                self.stood += [turns[place][node] for node in one.path[1:]] if turns is not None else one.path[1:]
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
        self._tell()
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
        return self.drafter.unread(len(self._untold))

    def _longest(self) -> int:
        """Committed tokens of the longest running row: all but the root."""
        return max((len(row.prompt) + len(row.tokens) - 1 for row in self.running), default=0)

    def _line_up(self) -> None:
        """What the rows that take part share: views of cache and text, and what they wish."""
        self._view, self._lines = self.cache.rows(0, self.rows), self.text[: self.rows]
        unheard = [row.wishes for row in self.running[-1:]] * (self.rows - len(self.running))
        wishes = [*(row.wishes for row in self.running), *unheard]
        self.sampler = Sampler(wishes, self.target.device, self.at_hand)
        if self.shapes.closed:
            exact = torch.promote_types(self.target.dtype, torch.float32)
            self.sampler.prepare(exact, self.target.vocab_size)
        self._wants_logprobs = any(row.wishes.sampling.logprobs for row in self.running)

    def _fail(self, place: int, logits: Tensor) -> None:
        """End a row for which the target chose nothing; what it left in the caches may be NaN, which passes masks."""
        if bool(logits.isnan().any()):
            why = f"{self.target.name} gave NaN logits; its weights are broken, or the dtype is too small for it"
            error: DraftproofError = BrokenModel(why)
        else:
            error = BadInput("every token is forbidden here (by banned words, logit bias or a processor); allow at least one")
        self.running[place].fail(error)
        for cache in (self.cache.rows(place, place + 1), *([self.nursery] if self.nursery is not None else [])):
            for store in (store for layer in cache.layers for store in layer.stores):
                store.zero_()


def _logprobs(logits: Tensor, nodes: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, D] log-probability of `tokens` [B, D] under the raw logits [B, N, V] at `nodes` [B, D], in this dtype."""
    row = torch.arange(len(nodes), device=nodes.device)[:, None]
    chosen = logits[row, nodes].to(dtype)
    return chosen.log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
