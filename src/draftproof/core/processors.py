"""Process logits with the options of each row, at every node of a tree.

The order is that of transformers' ``generate``: logit bias, penalties, no-repeat n-gram, banned
words, minimum length, the rules of the model's own generation_config, the user's processors; then
temperature, top-k, top-p, min-p. Everything that depends on the text so far sees the path of its
own tree node, so verifying a tree equals decoding each path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths

_NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "no_repeat_ngram",
)  # fmt: skip
_DEFAULTS = Sampling()
Process = Callable[["LogitsProcessors", Tensor, Paths], Tensor]
"""An unbound method. Bound ones would form a reference cycle with the object that lists them, so
that the noise of a sampler stayed in memory until the garbage collector runs."""


class LogitsProcessors:
    """The options of all running rows that change logits. Pure. Everything that belongs on the
    device is copied there at construction, nothing in a round. exact: the widest float type of the
    device."""

    def __init__(
        self, rows: Sequence[SamplingParams], device: torch.device | str = "cpu",
        exact: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        self.rows, self.device = tuple(rows), torch.device(device)
        self.some_greedy = any(row.sampling.temperature == 0 for row in rows)
        self.greedy_rows = self._column([row.sampling.temperature == 0 for row in rows])
        self._numbers = {
            name: self._column([getattr(row.sampling, name) for row in rows], exact)
            for name in _NUMBERS if self._any(name)
        }
        self._processes = [process for wanted, process in self._known(exact) if wanted]
        alone = type(self)._apply_temperature
        self.only_temperature = all(process is alone for process in self._processes)

    def _known(self, exact: torch.dtype) -> list[tuple[bool, Process]]:
        """The steps that some row needs, in the order of transformers' generate."""
        if any_bias := self._any("logit_bias"):
            self._bias = self._by_token([row.sampling.logit_bias for row in self.rows], exact)
        if any_banned := any(row.banned for row in self.rows):
            self._banned = _by_length(self.rows, self.device)
        if holds := any(row.sampling.min_new_tokens and row.stop_tokens for row in self.rows):
            ends = [dict.fromkeys(row.stop_tokens, True) for row in self.rows]
            self._ends = self._by_token(ends, torch.bool)
            least = [row.prompt_length + row.sampling.min_new_tokens for row in self.rows]
            self._first_end = self._column(least)
        if any_presence := self._any("presence_penalty", "frequency_penalty"):
            self._prompt_lengths = self._column([row.prompt_length for row in self.rows])
        kind = type(self)
        return [
            (any_bias, kind._add_bias),
            (self._any("repetition_penalty"), kind._penalise_repetition),
            (any_presence, kind._penalise_presence),
            (self._any("no_repeat_ngram"), kind._ban_ngrams),
            (any_banned, kind._ban_words),
            (holds, kind._hold_stop_tokens),
            (any(row.logits_rules for row in self.rows) or self._any("processors"), kind._ask),
            (self._any("temperature"), kind._apply_temperature),
            (self._any("top_k"), kind._keep_top_k),
            (self._any("top_p"), kind._keep_top_p),
            (self._any("min_p"), kind._keep_min_p),
        ]

    def filtered(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N, V] processed logits, -inf where a token may not be chosen."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for process in self._processes:
            scores = process(self, scores, paths)
        return scores

    @cached_property
    def reads_text(self) -> bool:
        """Whether a choice depends on the tokens before it in other ways than through the
        logits."""
        rules = [rule for row in self.rows for rule, _ in row.logits_rules]
        return any(row.banned for row in self.rows) or any(rule.reads_text for rule in rules) or (
            self._any("repetition_penalty", "presence_penalty", "frequency_penalty",
                      "no_repeat_ngram", "processors")
        )  # fmt: skip

    def _any(self, *names: str) -> bool:
        pairs = [(row.sampling, name) for row in self.rows for name in names]
        return any(getattr(sampling, name) != getattr(_DEFAULTS, name) for sampling, name in pairs)

    def _column(self, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
        """[B, 1, 1]"""
        return torch.tensor(values, dtype=dtype, device=self.device).view(-1, 1, 1)

    def _by_token(self, rows: Sequence[Mapping[int, float]], dtype: torch.dtype) -> Tensor:
        """[B, 1, highest id + 1] a value for the given tokens of each row, else 0."""
        width = 1 + max(token for row in rows for token in row)
        table = torch.zeros(len(rows), 1, width, dtype=dtype)
        for row, values in enumerate(rows):
            if values:
                table[row, 0, list(values)] = torch.tensor([*values.values()], dtype=dtype)
        return table.to(self.device)

    # What depends on the text so far --------------------------------------------------------------

    def _add_bias(self, scores: Tensor, paths: Paths) -> Tensor:
        width = self._bias.shape[-1]
        biased = scores[..., :width] + self._bias.to(scores.dtype)
        return torch.cat([biased, scores[..., width:]], -1)

    def _penalise_repetition(self, scores: Tensor, paths: Paths) -> Tensor:
        seen = self._counts(paths, scores.shape[-1], prompt=True) > 0
        penalty = self._numbers["repetition_penalty"].to(scores.dtype)
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        return torch.where(seen, penalised, scores)

    def _penalise_presence(self, scores: Tensor, paths: Paths) -> Tensor:
        counts = self._counts(paths, scores.shape[-1], prompt=False).to(scores.dtype)
        for name, times in (("presence_penalty", counts > 0), ("frequency_penalty", counts)):
            if name in self._numbers:
                scores = scores - self._numbers[name].to(scores.dtype) * times
        return scores

    def _counts(self, paths: Paths, vocab: int, prompt: bool) -> Tensor:
        """[B, N, V] how often each token occurs in each node's text, with or without the prompt."""
        sequences = paths.sequences
        place = torch.arange(sequences.shape[-1], device=self.device)
        counted = place < paths.lengths[..., None]
        if not prompt:
            counted = counted & (place >= self._prompt_lengths)
        shape = (*sequences.shape[:2], vocab)
        counts = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return counts.scatter_add_(2, sequences, counted.float())

    def _ban_ngrams(self, scores: Tensor, paths: Paths) -> Tensor:
        banned = torch.zeros_like(scores, dtype=torch.bool)
        sizes = self._numbers["no_repeat_ngram"]
        for size in sorted({row.sampling.no_repeat_ngram for row in self.rows} - {0}):
            if paths.sequences.shape[-1] < size:
                continue
            windows = paths.sequences.unfold(-1, size, 1)                           # [B, N, L, n]
            starts = torch.arange(windows.shape[2], device=self.device)
            tail = torch.arange(1 - size, 0, device=self.device) + paths.lengths[..., None]
            suffix = paths.sequences.gather(2, tail.clamp(min=0))                   # [B, N, n-1]
            hit = (windows[..., :-1] == suffix[:, :, None]).all(-1)                 # [B, N, L]
            hit &= (starts + size <= paths.lengths[..., None]) & (sizes == size)
            hit &= paths.lengths[..., None] >= size
            hits = hit.to(scores.dtype)
            banned |= torch.zeros_like(scores).scatter_add_(2, windows[..., -1], hits) > 0
        return scores.masked_fill(banned, -torch.inf)

    def _ban_words(self, scores: Tensor, paths: Paths) -> Tensor:
        hits = torch.zeros_like(scores)
        nodes = torch.arange(scores.shape[1], device=self.device)
        for words in self._banned:
            size = words.heads.shape[1]
            before = torch.arange(-size, 0, device=self.device)
            place = paths.lengths[words.rows][..., None] + before                   # [M, N, L]
            text = paths.sequences[words.rows].gather(2, place.clamp(min=0))
            same = (text == words.heads[:, None]) & (place >= 0)
            where = (words.rows[:, None], nodes[None], words.last[:, None])
            hits.index_put_(where, same.all(-1).to(scores.dtype), accumulate=True)  # [M, N]
        return scores.masked_fill(hits > 0, -torch.inf)

    def _hold_stop_tokens(self, scores: Tensor, paths: Paths) -> Tensor:
        ends = self._ends[..., : scores.shape[-1]]
        held = ends & (paths.lengths[..., None] < self._first_end)
        width = ends.shape[-1]
        kept = scores[..., :width].masked_fill(held, -torch.inf)
        return torch.cat([kept, scores[..., width:]], -1)

    def _ask(self, scores: Tensor, paths: Paths) -> Tensor:
        """Rules and the user's processors, called as transformers calls them: one unpadded prefix
        each.

        Those that read no text get the scores of all nodes at once.
        """
        scores, lengths = scores.clone(), paths.lengths.tolist()
        for row, params in enumerate(self.rows):
            rules = [(rule.reads_text, processor) for rule, processor in params.logits_rules]
            rules += [(True, processor) for processor in params.sampling.processors]
            for reads_text, processor in rules:
                if not reads_text:
                    scores[row] = processor(paths.sequences[row, :, :1], scores[row].clone())
                    continue
                for node, length in enumerate(lengths[row]):
                    text = paths.sequences[row, node, :length][None]
                    scores[row, node] = processor(text, scores[row, node][None].clone())[0]
        return scores

    # What depends on the logits alone -------------------------------------------------------------

    def _apply_temperature(self, scores: Tensor, paths: Paths) -> Tensor:
        temperature = self._numbers["temperature"].to(scores.dtype)
        return torch.where(temperature > 0, scores / temperature, scores)

    def _keep_top_k(self, scores: Tensor, paths: Paths) -> Tensor:
        vocab = scores.shape[-1]
        sizes = self._numbers["top_k"].long().masked_fill(self.greedy_rows, 0)
        largest = min(max(row.sampling.top_k for row in self.rows), vocab)
        best = scores.topk(largest, -1).values
        least = best.gather(-1, (sizes - 1).clamp(0, largest - 1).expand(*best.shape[:2], 1))
        return scores.masked_fill((scores < least) & (sizes > 0), -torch.inf)

    def _keep_top_p(self, scores: Tensor, paths: Paths) -> Tensor:
        mass = self._numbers["top_p"].to(scores.dtype)
        ordered, order = scores.sort(-1)
        likeliest = torch.arange(scores.shape[-1], device=self.device) == scores.shape[-1] - 1
        beyond = (ordered.softmax(-1).cumsum(-1) <= 1 - mass) & ~likeliest
        drop = beyond & (mass < 1) & ~self.greedy_rows
        return scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)

    def _keep_min_p(self, scores: Tensor, paths: Paths) -> Tensor:
        share = self._numbers["min_p"].to(scores.dtype)
        probs = scores.softmax(-1)
        drop = (probs < share * probs.amax(-1, keepdim=True)) & ~self.greedy_rows
        return scores.masked_fill(drop, -torch.inf)


class _BannedWords(NamedTuple):
    """Banned words of one length.

    Attributes:
        heads: The tokens before the last of each word, [M, length - 1].
        rows: The row that each word belongs to, [M].
        last: The last token of each word, [M].
    """

    heads: Tensor
    rows: Tensor
    last: Tensor


def _by_length(rows: Sequence[SamplingParams], device: torch.device) -> list[_BannedWords]:
    """The banned words of all rows, grouped by length, so that tables have no padding."""
    groups: dict[int, list[tuple[int, ...]]] = {}
    for row, params in enumerate(rows):
        for word in params.banned:
            groups.setdefault(len(word), []).append((row, *word))
    tables = (torch.tensor(words, device=device) for words in groups.values())
    return [_BannedWords(table[:, 1:-1], table[:, 0], table[:, -1]) for table in tables]
