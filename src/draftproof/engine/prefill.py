"""Read prompts in chunks, several short ones side by side, and give them rows of the batch.

This knows caches and drafters' memories, but nothing of what is written after a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftproof.cache.kv_cache import CHUNKS, KVCache
from draftproof.core.messages import Commit, Reading
from draftproof.core.ops import Ops
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.batch import Samples
from draftproof.engine.prefix_cache import PrefixCache, States
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput
from draftproof.model.target import Target

SHORT, TOGETHER = 64, 256
"""The most tokens of a prompt that is read together with others, and the most tokens of all these
prompts, padded to the longest. Our fused layers read no wider passes. They read longer prompts in
chunks of this size, with the same bits as rounds."""


class Prompts:
    """Reads prompts into rows of `cache`, and reuses beginnings of earlier texts."""

    def __init__(
        self, target: Target, drafter: Drafter, cache: KVCache, shapes: ShapePolicy, ops: Ops,
        prefixes: PrefixCache | None = None,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.cache, self.shapes = target, drafter, cache, shapes
        if shapes.closed and (target.has_states or target.is_encoder_decoder):
            kept = "an encoder's output" if target.is_encoder_decoder else "states"
            raise BadInput(
                f"{target.name} keeps {kept}, which static shapes would pad; leave graphs, "
                "compilation and static shapes out"
            )
        # a decoder's cache depends on the encoder's input
        reads_all = target.is_encoder_decoder or drafter.needs_all_hidden
        self.prefixes = None if reads_all else prefixes
        if prefixes is not None:
            prefixes.belong_to(target.weights_version)
        self.prompt_cache = target.new_cache(1, cache.capacity) if shapes.closed else None
        self.several = ops.on_host and target.ragged_batches          # padding costs nothing
        # drafts and prompts are read by one path, so a text stores the same values either way
        self.alike = self.several and target.kv_cache in (None, "int8")
        self.grain, self.chunk = (1, SHORT) if self.alike else (CHUNKS[-1], CHUNKS[-1])
        if target.has_states:                   # which are known at the borders of chunks alone
            self.grain = self.chunk = CHUNKS[1]

    def admissible(
        self, prompts: Sequence[Sequence[int]], owners: Sequence[int] | None = None
    ) -> int:
        """How many of the first prompts are read together: several if they are short."""
        count = longest = 0
        for prompt, owner in zip(prompts, owners or [0] * len(prompts), strict=True):
            longest = max(longest, self._unread(prompt, owner))
            together = self.several and longest <= min(SHORT, TOGETHER // (count + 1))
            if count and not together:
                break
            count += 1
        return count

    def is_long(self, prompt: Sequence[int], owner: int = 0) -> bool:
        """Whether a prompt needs more than one chunk, with rounds in between."""
        in_one_read = self.shapes.closed or self.target.is_encoder_decoder
        return not in_one_read and self._unread(prompt, owner) > self.chunk

    def remember(
        self, row: KVCache, text: Sequence[int], prompt: int, owner: int, *, copy: bool = True,
        states: States | None = None,
    ) -> None:  # fmt: skip
        """Remember the only row of a cache for prompts that begin with the same text; only the
        first `prompt` tokens if drafts are not read like prompts.

        copy: whether the cache will still be written to. states: of a target that has them, at
        borders of chunks; without them nothing is remembered of it."""
        if self.prefixes is not None and (states or not self.target.has_states):
            count = len(text) if self.alike else prompt // self.grain * self.grain
            self.prefixes.keep(text[:count], row, owner, copy=copy, states=states or None)

    def padded(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        """[b, width] tokens, padded with ABSENT."""
        lines = [[*text, *[ABSENT] * (width - len(text))] for text in texts]
        return torch.tensor(lines, device=self.target.device)

    def _unread(self, prompt: Sequence[int], owner: int) -> int:
        """How many tokens of a prompt are still to be read."""
        if self.prefixes is None or len(prompt) <= SHORT:
            return len(prompt)
        return len(prompt) - self.prefixes.length(prompt, self.grain, owner)


class Prefill:
    """Prompts that are being read, a chunk at a time.

    groups: the samples of each prompt. first: the first row they get. None: it is not known before
    `join`, so they are read into a separate cache, as with static shapes, or into the last row of
    the batch, which must stay free, if a chunk can be read in one pass with a round
    (shares_cache).
    """

    def __init__(self, prompts: Prompts, groups: Sequence[Samples], first: int | None) -> None:
        self.prompts, self.groups = prompts, groups
        self.texts = [samples[0].prompt for samples in groups]
        self.sources = [samples[0].source for samples in groups]
        self.owners, self.apart = [samples[0].owner for samples in groups], first is None
        self.prompt_cache, self.commits, self.start = prompts.prompt_cache, list[Commit](), 0
        self.shares_cache = self.apart and prompts.alike and not prompts.shapes.closed
        if self.shares_cache:
            rows = len(prompts.cache.lengths)
            self.prompt_cache = prompts.cache.rows(rows - 1, rows)
        elif first is None:
            capacity = prompts.shapes.capacity(len(self.texts[0]))
            self.prompt_cache = prompts.target.new_cache(1, capacity)
        if self.prompt_cache is not None:
            self.view = self.prompt_cache
        else:
            assert first is not None
            self.view = prompts.cache.rows(first, first + len(groups))
        self.view.lengths.zero_()
        if prompts.target.is_encoder_decoder:
            prompts.target.begin(self.view, self.sources)
        self.states = States()
        self.known = [self._reuse(place) for place in range(len(groups))]
        self.rests = [text[known:] for text, known in zip(self.texts, self.known, strict=True)]

    def read(self, limit: int | None = None) -> bool:
        """Read the next chunk; return whether it was the last.

        limit: the most tokens of the chunk. Ignored where the size of a chunk would change bits."""
        shapes, target = self.prompts.shapes, self.prompts.target
        self.view.set_max_length(self.prompts.cache.capacity if shapes.closed else self.reach)
        tree, sizes = self.next_chunk(limit)
        layers = self.prompts.drafter.hidden_layers
        finished = self.start + tree.tokens.shape[1] >= self._longest
        alone = len(sizes) == 1 and not (finished and shapes.closed)           # nothing is padded
        reading = target.read(tree, self.view, last_only=alone, hidden_layers=layers)
        return self.commit(tree, reading, sizes)

    @property
    def reach(self) -> int:
        """Tokens of the longest prompt that have been read or were known."""
        return max(self.known) + self.start

    def next_chunk(self, limit: int | None = None) -> tuple[TokenTree, list[int]]:
        """The next chunk and how many tokens of it each prompt has, to be read and committed."""
        most = self.prompts.chunk if limit is None else min(limit, self.prompts.chunk)
        width = min(self.prompts.shapes.chunk(self._longest - self.start), most)
        texts = [rest[self.start : self.start + width] for rest in self.rests]
        if self.shares_cache:                           # moving rows empties all others
            self.view.lengths.fill_(self.reach)
        return TokenTree.chain(self.prompts.padded(texts, width)), [len(text) for text in texts]

    def commit(self, tree: TokenTree, reading: Reading, sizes: Sequence[int]) -> bool:
        """Commit a chunk that was read; return whether it was the last."""
        self.start += tree.tokens.shape[1]
        self._commit(tree, reading, sizes)
        if self.prompts.target.has_states and self.prompts.prefixes is not None:
            self._keep_states()
        if self.finished and self._longest > SHORT:
            text, copy = self.texts[0], self.shares_cache or not self.apart
            self.prompts.remember(self.view, text, len(text), self.owners[0], copy=copy,
                                  states=self.states)
        return self.finished

    def _keep_states(self) -> None:
        """Keep the states at the border of a chunk: at the last one, where the text's next turn
        goes on, and at each that is twice as far as one before, for texts that begin alike."""
        place, grain = self.known[0] + self.start, self.prompts.grain
        if place % grain or place > len(self.texts[0]):
            return
        states = self.view.copied_states()
        if states is not None:
            spread = {border: held for border, held in self.states.items()
                      if (border // grain).bit_count() == 1}
            self.states = {**spread, place: states}

    @property
    def finished(self) -> bool:
        """Whether the prompts were read to the end."""
        return self.start >= self._longest

    def join(self, first: int) -> Tensor:
        """Give the prompts the rows of the batch from `first` on, and let the drafter observe them.
        Return the logits at their ends, [b, 1, V]."""
        cache, drafter = self.prompts.cache, self.prompts.drafter
        if self.shares_cache:
            cache.move_row(len(cache.lengths) - 1, first, self.reach)
        elif self.prompt_cache is not None:
            cache.copy_row(torch.tensor([first], device=cache.lengths.device), self.prompt_cache)
        rows = range(first, first + len(self.texts))
        drafter.assign_owners(rows, self.owners)
        if self.prompts.target.is_encoder_decoder:
            drafter.begin(rows, self.sources)
        for commit in sorted(self.commits, key=lambda commit: commit.rows[0]):      # row by row
            drafter.observe(replace(commit, rows=[first + commit.rows[0]]))
        return self.logits

    @property
    def _longest(self) -> int:
        return max(map(len, self.rests))

    def _reuse(self, place: int) -> int:
        """How many tokens of a prompt need not be read. A drafter needs only the last hidden state,
        which comes with the rest of the prompt."""
        prefixes, text = self.prompts.prefixes, self.texts[place]
        if prefixes is None:
            return 0
        view, owner = self.view.rows(place, place + 1), self.owners[place]
        known, self.states = prefixes.reuse(text, view, self.prompts.grain, owner)
        if known:
            target, layers = self.prompts.target, len(self.prompts.drafter.hidden_layers)
            nothing = torch.zeros(1, 1, 1, 1, dtype=target.dtype, device=target.device)
            hidden = nothing.expand(1, known, layers, target.hidden_size) if layers else None
            tokens = self.prompts.padded([text[:known]], known)
            self._note(place, tokens, torch.tensor([known], device=target.device), hidden)
        return known

    def _commit(self, tree: TokenTree, reading: Reading, sizes: Sequence[int]) -> None:
        """Commit a chunk. Each row has `counts` tokens of it; the rest of the width is padding."""
        count = torch.tensor(sizes, device=self.prompts.target.device)
        self.view.keep(None, count)
        for place, size in enumerate(sizes):
            line, width = slice(place, place + 1), tree.tokens.shape[1] if len(sizes) == 1 else size
            hidden = reading.part(line, width).hidden
            self._note(place, tree.tokens[line, :width], count[line], hidden)
        self.logits = reading.logits
        if self.logits.shape[1] > 1:
            ends = (count - 1)[:, None, None].expand(-1, 1, self.logits.shape[-1])
            self.logits = self.logits.gather(1, ends)

    def _note(self, place: int, tokens: Tensor, count: Tensor, hidden: Tensor | None) -> None:
        """Collect what the drafter will observe: short chunks of a text become one commit."""
        last = self.commits[-1] if self.commits else None
        joined = last is not None and last.rows == [place]
        if last is not None and joined and last.tokens.shape[1] + tokens.shape[1] <= SHORT:
            self.commits.pop()
            tokens, count = torch.cat([last.tokens, tokens], 1), last.count + count
            if last.hidden is not None and hidden is not None:
                hidden = torch.cat([last.hidden, hidden], 1)
        nodes = torch.arange(tokens.shape[1], device=tokens.device)[None]
        self.commits.append(Commit([place], tokens, nodes, count, hidden))
