"""Logits processed as rows wish, at every node of a tree.

The order is that of transformers' ``generate``: logit bias, penalties, no-repeat n-gram, banned
words, minimum length, the rules of the model's own generation_config, the user's processors; then
temperature, top-k, top-p, min-p. Everything that depends on the text so far sees the path of its
own tree node, so verifying a tree equals decoding each path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths

_COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "no_repeat_ngram",
)  # fmt: skip
_DEFAULTS = {one.name: getattr(Sampling(), one.name) for one in fields(Sampling)}


class LogitsProcessors:
    """The wishes of all running rows that change logits, as tensors. Pure."""

    def __init__(
        self, rows: Sequence[SamplingParams], device: torch.device | str = "cpu"
    ) -> None:
        self.rows, self.device = tuple(rows), torch.device(device)
        self._columns: dict[tuple[str, torch.dtype], Tensor] = {}

    def prepare(self, dtype: torch.dtype, vocab: int) -> None:
        """Copy to the device now, not in the round that comes, what such scores will need."""
        for name in _COLUMNS:
            if self._any(name):
                self._column(name, torch.int64 if name in ("top_k", "no_repeat_ngram") else dtype)
        _ = self.greedy_rows, self._prompt_lengths, self._processes
        if self._any("logit_bias"):
            self._bias(dtype)
        if any(row.banned for row in self.rows):
            _ = self._banned
        if self._holds:
            self._held(vocab)

    def filtered(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N, V] processed logits, -inf where a token may not be chosen."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for process in self._processes:
            scores = process(scores, paths)
        return scores

    @cached_property
    def only_temperature(self) -> bool:
        """Whether nothing but a temperature is asked for."""
        return all(process == self._heat for process in self._processes)

    @cached_property
    def greedy_rows(self) -> Tensor:
        """[B, 1, 1] which take the likeliest token."""
        greedy = [row.sampling.temperature == 0 for row in self.rows]
        return torch.tensor(greedy, device=self.device).view(-1, 1, 1)

    @cached_property
    def _processes(self) -> list[Callable[[Tensor, Paths], Tensor]]:
        """Only what some row asks for, in the order of transformers' generate."""
        asked: list[tuple[bool, Callable[[Tensor, Paths], Tensor]]] = [
            (self._any("logit_bias"), self._add_bias),
            (self._any("repetition_penalty"), self._penalise_repetition),
            (self._any("presence_penalty", "frequency_penalty"), self._penalise_presence),
            (self._any("no_repeat_ngram"), self._ban_ngrams),
            (any(row.banned for row in self.rows), self._ban_words),
            (self._holds, self._hold_stop_tokens),
            (any(row.logits_rules for row in self.rows) or self._any("processors"), self._ask),
            (self._any("temperature"), self._heat),
            (self._any("top_k"), self._keep_top_k),
            (self._any("top_p"), self._keep_top_p),
            (self._any("min_p"), self._keep_min_p),
        ]
        return [process for wanted, process in asked if wanted]

    @cached_property
    def reads_text(self) -> bool:
        """Whether a choice depends on which tokens stand before it, beside what the logits say."""
        if self._any(
            "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram",
            "processors",
        ):  # fmt: skip
            return True
        rules = [rule for row in self.rows for rule, _ in row.logits_rules]
        return any(row.banned for row in self.rows) or any(rule.reads_text for rule in rules)

    @property
    def _holds(self) -> bool:
        return any(row.sampling.min_new_tokens and row.stop_tokens for row in self.rows)

    def _any(self, *names: str) -> bool:
        pairs = [(row.sampling, name) for row in self.rows for name in names]
        return any(getattr(sampling, name) != _DEFAULTS[name] for sampling, name in pairs)

    def _column(self, name: str, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1] one parameter of every row; made once: a round copies nothing to the device."""
        if (name, dtype) not in self._columns:
            values = [getattr(row.sampling, name) for row in self.rows]
            column = torch.tensor(values, dtype=dtype, device=self.device)
            self._columns[name, dtype] = column.view(-1, 1, 1)
        return self._columns[name, dtype]

    # What depends on the text so far --------------------------------------------------------------

    def _bias(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, highest id + 1]"""
        if ("logit_bias", dtype) in self._columns:
            return self._columns["logit_bias", dtype]
        ids = [(row, token, bias) for row, params in enumerate(self.rows)
               for token, bias in params.sampling.logit_bias.items()]
        rows, tokens, values = zip(*ids, strict=True)
        width = max(tokens) + 1
        bias = torch.zeros(len(self.rows), 1, width, dtype=torch.float64)
        bias[list(rows), 0, list(tokens)] = torch.tensor(values, dtype=torch.float64)
        return self._columns.setdefault(("logit_bias", dtype), bias.to(dtype).to(self.device))

    def _add_bias(self, scores: Tensor, paths: Paths) -> Tensor:
        bias = self._bias(scores.dtype)
        width = bias.shape[-1]
        return torch.cat([scores[..., :width] + bias, scores[..., width:]], -1)

    def _penalise_repetition(self, scores: Tensor, paths: Paths) -> Tensor:
        seen = self._counts(paths, scores.shape[-1], prompt=True) > 0
        penalty = self._column("repetition_penalty", scores.dtype)
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        return torch.where(seen, penalised, scores)

    def _penalise_presence(self, scores: Tensor, paths: Paths) -> Tensor:
        counts = self._counts(paths, scores.shape[-1], prompt=False).to(scores.dtype)
        presence = self._column("presence_penalty", scores.dtype)
        frequency = self._column("frequency_penalty", scores.dtype)
        return scores - presence * (counts > 0) - frequency * counts

    def _counts(self, paths: Paths, vocab: int, prompt: bool) -> Tensor:
        """[B, N, V] how often each token occurs in each node's text, with or without the prompt."""
        sequences = paths.sequences
        place = torch.arange(sequences.shape[-1], device=self.device)
        counted = place < paths.lengths[..., None]
        if not prompt:
            counted = counted & (place >= self._prompt_lengths)
        counts = torch.zeros(*sequences.shape[:2], vocab, device=self.device)
        return counts.scatter_add_(2, sequences, counted.float())

    @cached_property
    def _prompt_lengths(self) -> Tensor:
        lengths = [row.prompt_length for row in self.rows]
        return torch.tensor(lengths, device=self.device).view(-1, 1, 1)

    def _ban_ngrams(self, scores: Tensor, paths: Paths) -> Tensor:
        banned = torch.zeros_like(scores, dtype=torch.bool)
        sizes = self._column("no_repeat_ngram", torch.int64)
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
        words = self._banned
        length = words.heads.shape[1]
        ahead = torch.arange(length, device=self.device) - words.sizes[:, None]     # [M, L]
        place = paths.lengths[words.rows][..., None] + ahead[:, None]               # [M, N, L]
        text = paths.sequences[words.rows].gather(2, place.clamp(0, paths.sequences.shape[-1] - 1))
        same = ((text == words.heads[:, None]) & (place >= 0)) | (ahead >= 0)[:, None]
        hit = same.all(-1).to(scores.dtype)                                         # [M, N]
        nodes = torch.arange(scores.shape[1], device=self.device)
        where = (words.rows[:, None], nodes[None], words.ends[:, None])
        hits = torch.zeros_like(scores).index_put(where, hit, accumulate=True)
        return scores.masked_fill(hits > 0, -torch.inf)

    @cached_property
    def _banned(self) -> _Banned:
        words = [(row, word) for row, params in enumerate(self.rows) for word in params.banned]
        heads = torch.zeros(len(words), max(len(word) for _, word in words) - 1, dtype=torch.int64)
        for number, (_, word) in enumerate(words):
            heads[number, : len(word) - 1] = torch.tensor(word[:-1])
        columns = [(len(word) - 1, row, word[-1]) for row, word in words]
        sizes, rows, ends = torch.tensor(columns).unbind(1)
        return _Banned(*(part.to(self.device) for part in (heads, sizes, rows, ends)))

    def _hold_stop_tokens(self, scores: Tensor, paths: Paths) -> Tensor:
        ends, first = self._held(scores.shape[-1])
        return scores.masked_fill(ends & (paths.lengths[..., None] < first), -torch.inf)

    def _held(self, vocab: int) -> tuple[Tensor, Tensor]:
        """[B, 1, V] the end tokens, and [B, 1, 1] the position before which none may come."""
        if ("stop_tokens", torch.bool) not in self._columns:
            ends = torch.zeros(len(self.rows), 1, vocab, dtype=torch.bool)
            for row, params in enumerate(self.rows):
                ends[row, 0, list(params.stop_tokens)] = True
            first = [row.prompt_length + row.sampling.min_new_tokens for row in self.rows]
            self._columns["stop_tokens", torch.bool] = ends.to(self.device)
            place = torch.tensor(first, device=self.device).view(-1, 1, 1)
            self._columns["stop_tokens", torch.int64] = place
        return self._columns["stop_tokens", torch.bool], self._columns["stop_tokens", torch.int64]

    def _ask(self, scores: Tensor, paths: Paths) -> Tensor:
        """Rules and the user's processors, called as transformers calls them: one unpadded prefix
        each.

        Those that read no text see the scores of all nodes at once.
        """
        scores, lengths = scores.clone(), paths.lengths.tolist()
        for row, params in enumerate(self.rows):
            asked = [(rule.reads_text, processor) for rule, processor in params.logits_rules]
            asked += [(True, processor) for processor in params.sampling.processors]
            for reads_text, processor in asked:
                if not reads_text:
                    scores[row] = processor(paths.sequences[row, :, :1], scores[row].clone())
                    continue
                for node, length in enumerate(lengths[row]):
                    text = paths.sequences[row, node, :length][None]
                    scores[row, node] = processor(text, scores[row, node][None].clone())[0]
        return scores

    # What depends on the logits alone -------------------------------------------------------------

    def _heat(self, scores: Tensor, paths: Paths) -> Tensor:
        temperature = self._column("temperature", scores.dtype)
        return torch.where(temperature > 0, scores / temperature, scores)

    def _keep_top_k(self, scores: Tensor, paths: Paths) -> Tensor:
        vocab = scores.shape[-1]
        sizes = self._column("top_k", torch.int64).masked_fill(self.greedy_rows, 0)
        largest = min(max(row.sampling.top_k for row in self.rows), vocab)
        best = scores.topk(largest, -1).values
        least = best.gather(-1, (sizes - 1).clamp(0, largest - 1).expand(*best.shape[:2], 1))
        return scores.masked_fill((scores < least) & (sizes > 0), -torch.inf)

    def _keep_top_p(self, scores: Tensor, paths: Paths) -> Tensor:
        mass = self._column("top_p", scores.dtype)
        ordered, order = scores.sort(-1)
        likeliest = torch.arange(scores.shape[-1], device=self.device) == scores.shape[-1] - 1
        beyond = (ordered.softmax(-1).cumsum(-1) <= 1 - mass) & ~likeliest
        drop = beyond & (mass < 1) & ~self.greedy_rows
        return scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)

    def _keep_min_p(self, scores: Tensor, paths: Paths) -> Tensor:
        share = self._column("min_p", scores.dtype)
        law = scores.softmax(-1)
        drop = (law < share * law.amax(-1, keepdim=True)) & ~self.greedy_rows
        return scores.masked_fill(drop, -torch.inf)


class _Banned(NamedTuple):
    """Forbidden words: the tokens `heads` [M, L] before the last, `sizes` of them; row; last."""

    heads: Tensor
    sizes: Tensor
    rows: Tensor
    ends: Tensor
