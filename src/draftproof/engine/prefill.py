"""Prompts: read in chunks, short ones side by side, or beside what a round drafted.

Knows caches and drafters' memories; knows nothing of what is written behind a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftproof.core.messages import Accepted, Commit, Reading
from draftproof.core.ops import Ops
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.core.tree_shape import CHUNKS
from draftproof.drafters.base import Drafter
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target

SHORT, TOGETHER = 64, 256
"""Tokens of a prompt that is read beside others, in one pass, and of all of these, each as long as
the longest. Longer ones gain little, and fused layers, which skip padding, read no wider: with them
longer prompts are read so many at a time, sooner than by operators and with the bits of a round."""
Tell = Callable[[Commit], None]


class Prompts:
    """Reads prompts into rows of a cache that nobody has yet, and lets the drafter observe them."""

    def __init__(
        self, target: Target, drafter: Drafter, cache: KVCache, shapes: ShapePolicy, ops: Ops,
        prefixes: PrefixCache | None = None,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.cache = target, drafter, cache
        self.shapes, self.ops = shapes, ops
        # states have no beginnings, and what a decoder keeps depends on what was encoded
        whole = target.has_states or target.encodes or drafter.reads_every_state
        self.prefixes = None if whole else prefixes
        if shapes.closed and (target.has_states or target.encodes):
            kept = "an encoder's output" if target.encodes else "states"
            raise BadInput(
                f"{target.name} keeps {kept}, which static shapes would pad; leave graphs, "
                "compilation and static shapes out"
            )
        self.prompt_cache = target.new_cache(1, cache.capacity) if shapes.closed else None
        self._hidden_layers = drafter.hidden_layers
        self._known: list[int] = []         # tokens that need no reading, of what was read last
        # one path reads drafts and prompts alike: what a text stores is the same however it came
        self._alike = self.several and target.kv_cache in (None, "int8")
        self._grain, self._chunk = (1, SHORT) if self._alike else (CHUNKS[-1], CHUNKS[-1])
        if prefixes is not None:
            prefixes.belong_to(target.weights)

    @property
    def several(self) -> bool:
        """Whether short ones may be read beside something else: where padding costs nothing."""
        return self.ops.on_host and self.target.skips_absent

    def admissible(self, free: int, waiting: Iterable[Sequence[SequenceState]]) -> int:
        """How many of the first requests that wait may have these free rows: several if short."""
        found, longest, several = 0, 0, self.several
        for samples in waiting:
            free -= len(samples)
            if free < 0:
                break
            longest = max(longest, self._unread(samples[0].prompt))
            if found and not (several and longest <= min(SHORT, TOGETHER // (found + 1))):
                break
            found += 1
        return found

    def may_join(self, requests: Sequence[Sequence[SequenceState]]) -> bool:
        """Whether these, as few as `admissible` says, may be read beside a round's draft."""
        return self.several and all(self._unread(one[0].prompt) <= SHORT for one in requests)

    def is_long(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is read in more than one chunk, between which rounds may come."""
        whole = self.shapes.closed or self.target.encodes
        return not whole and self._unread(prompt) > self._chunk

    def beside(
        self, tree: TokenTree, view: KVCache, joining: Sequence[Sequence[SequenceState]]
    ) -> tuple[Reading, Reading | None]:
        """What the target says of a tree and, where possible, of the prompts of requests."""
        rows, width = tree.tokens.shape
        prompts = [samples[0].prompt for samples in joining]
        rests = self._rests(self.cache.rows(rows, rows + len(prompts)), prompts) if prompts else []
        longest = max(map(len, rests), default=0)
        wide = max(width, longest)
        if not rests or wide > SHORT or not self.cache.holds(wide):     # read otherwise, it differs
            return self.target.read(tree, view, hidden_layers=self._hidden_layers), None
        all_rows = self.cache.rows(0, rows + len(prompts))
        rows_of_both = tree.stack(self._padded(rests, longest))
        both = self.target.read(rows_of_both, all_rows, hidden_layers=self._hidden_layers)
        return both.part(slice(rows), width), both.part(slice(rows, None), longest)

    def begin(self, first: int, sources: Sequence[Any]) -> None:
        """Let an encoder, and that of a draft model, read what rows from `first` on are about."""
        if self.target.encodes:
            self.target.begin(self._nest(first, len(sources)), sources)
            self.drafter.begin(range(first, first + len(sources)), sources)

    def join(
        self, first: int, prompts: Sequence[Sequence[int]], reading: Reading | None
    ) -> Tensor:
        """Let prompts have the rows from `first` on; return the logits at their ends, [b, 1, V].

        reading: what `beside` read of them; None reads them now, in chunks."""
        view, tell = self._nest(first, len(prompts)), self.drafter.observe
        if reading is not None:
            pairs = zip(prompts, self._known, strict=True)
            rests = [prompt[known:] for prompt, known in pairs]
            return self._commit(view, first, rests, reading, prompts, tell)
        for chunk, _ in self.chunks(view, first, prompts, tell):
            logits = chunk
        if self.prompt_cache is not None:
            self.cache.take(torch.tensor([first], device=logits.device), self.prompt_cache)
        return logits

    def chunks(
        self, view: KVCache, first: int, prompts: Sequence[Sequence[int]], tell: Tell
    ) -> Iterator[tuple[Tensor, bool]]:
        """Read prompts into the rows of `view`, a chunk at each step, and `tell` what was read, as
        of the rows from `first` on: the logits at its ends, [b, 1, V], and whether it is all."""
        rests = self._rests(view, prompts)
        start, longest, before = 0, max(map(len, rests)), max(self._known)
        while start < longest:
            view.bound(self.cache.capacity if self.shapes.closed else before + start)
            width = min(self.shapes.chunk(longest - start), self._chunk)
            texts = [rest[start : start + width] for rest in rests]
            tree, start = TokenTree.chain(self._padded(texts, width)), start + width
            alone = len(prompts) == 1 and (not self.shapes.closed or start < longest)   # no padding
            reading = self.target.read(tree, view, last_only=alone,
                                       hidden_layers=self._hidden_layers)
            begun = () if start > width else prompts
            logits, whole = self._commit(view, first, texts, reading, begun, tell), start >= longest
            if whole and longest > SHORT:
                self.remember(view, prompts[0], len(prompts[0]))
            yield logits, whole

    def remember(self, row: KVCache, text: Sequence[int], prompt: int) -> None:
        """Keep what the one row of a cache holds of a text for prompts that begin like it; where
        drafts are read in another way than prompts, of its prompt alone."""
        if self.prefixes is not None:
            count = len(text) if self._alike else prompt // self._grain * self._grain
            self.prefixes.keep(text[:count], row)

    def forget(self) -> None:
        """Something that was read may be broken."""
        if self.prompt_cache is not None:
            self.prompt_cache.clear()

    def _unread(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt must be read."""
        if self.prefixes is None or len(prompt) <= SHORT:
            return len(prompt)
        return len(prompt) - self.prefixes.length(prompt, self._grain)

    def _rests(self, view: KVCache, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """What must be read of prompts, behind what is known, which is put into their rows."""
        view.lengths.zero_()
        self._known = [0] * len(prompts)
        if self.prefixes is not None:
            for place, prompt in enumerate(prompts):
                row = view.rows(place, place + 1)
                self._known[place] = self.prefixes.reuse(prompt, row, self._grain)
            view.reach(max(self._known))
        return [prompt[known:] for prompt, known in zip(prompts, self._known, strict=True)]

    def _tell_known(self, row: int, tokens: Sequence[int], tell: Tell) -> None:
        """Tell of what was not read of a row's prompt. Of hidden states it needs the
        last one alone, which comes with the rest."""
        device, layers, known = self.cache.lengths.device, len(self._hidden_layers), len(tokens)
        nodes, count = torch.arange(known, device=device)[None], torch.tensor([known])
        hidden = None
        if layers:
            nothing = torch.zeros(1, 1, 1, 1, dtype=self.target.dtype, device=device)
            hidden = nothing.expand(1, known, layers, self.target.hidden_size)
        text = torch.tensor([tokens], device=device)
        tell(Commit([row], text, nodes, count.to(device), hidden))

    def _commit(
        self, view: KVCache, first: int, texts: Sequence[Sequence[int]], reading: Reading,
        prompts: Sequence[Sequence[int]], tell: Tell,
    ) -> Tensor:  # fmt: skip
        """Commit parts of prompts that were read into `view`; return the logits at their ends, [b,
        1, V]. prompts: of which `tell` hears what was known; row by row, as rows begin."""
        logits, device = reading.logits, self.cache.lengths.device
        count = torch.tensor([len(text) for text in texts], device=device)
        view.keep(None, count)
        for place, text in enumerate(texts):
            if prompts and (known := self._known[place]):
                self._tell_known(first + place, prompts[place][:known], tell)
            own, deep = slice(place, place + 1), self.shapes.chunk(len(text))
            chain = TokenTree.chain(self._padded([text], deep))
            nodes = torch.arange(deep, device=device)[None]
            everything = Accepted(nodes, count[own], chain.tokens[:, 0])
            commit = Commit.of([first + place], chain, reading.part(own, deep), everything)
            tell(commit)
        if logits.shape[1] == 1:
            return logits
        return logits.gather(1, (count - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))

    def _nest(self, first: int, count: int) -> KVCache:
        """Where the prompts of so many rows from `first` on are read."""
        return self.prompt_cache or self.cache.rows(first, first + count)

    def _padded(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        """[b, width] tokens, ABSENT behind the shorter texts."""
        device = self.cache.lengths.device
        lines = [[*text, *[ABSENT] * (width - len(text))] for text in texts]
        return torch.tensor(lines, device=device)


class LongPrompt:
    """A prompt that is read a chunk at a time, with rounds between, into a cache of its own. The
    drafter hears of it when it gets a row."""

    def __init__(self, prompts: Prompts, prompt: Sequence[int]) -> None:
        self.prompts, self._told = prompts, list[Commit]()
        self._cache = prompts.target.new_cache(1, prompts.shapes.capacity(len(prompt)))
        self._chunks = prompts.chunks(self._cache, 0, [prompt], self._told.append)
        self._logits: Tensor | None = None

    def read(self) -> bool:
        """Read the next chunk; whether it was the last."""
        self._logits, whole = next(self._chunks)
        return whole

    def join(self, row: int) -> Tensor:
        """Let it have this row of the batch; return the logits at its end, [1, 1, V]."""
        assert self._logits is not None
        self.prompts.cache.take(torch.tensor([row], device=self._logits.device), self._cache)
        for commit in self._told:
            self.prompts.drafter.observe(replace(commit, rows=[row]))
        return self._logits
