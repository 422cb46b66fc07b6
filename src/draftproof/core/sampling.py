"""Sampling: a row's wishes, and the target's choice under them. Knows logits and prefixes; nothing of models.

The order of processing is that of transformers' ``generate``: logit bias, penalties, no-repeat n-gram, banned
words, minimum length, the user's processors; then temperature, top-k, top-p, min-p. Everything that depends on the
text so far sees the path of its own tree node, so verifying a tree equals decoding each path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.core.tree import NOTHING, TokenTree
from draftproof.errors import BadInput
from draftproof.native.kernels import Contest, Kernels, kernels

STOCK, STOCKED = 64, 1 << 20
"""Positions of all rows that noise is made for at once, and numbers, where a round does not ask for more."""

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``processor(input_ids [n, L], scores [n, V]) -> scores [n, V]``, a function of the prefix and nothing else."""


@dataclass(frozen=True)
class Sampling:
    """What one request wants. The default is greedy decoding with nothing added.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    repetition_penalty: over prompt and new tokens (CTRL, arXiv 1909.05858); 1 is off.
    presence_penalty, frequency_penalty: subtracted, over new tokens only (OpenAI's definition); 0 is off.
    no_repeat_ngram: no n-gram of this size occurs twice; 0 is off.
    logit_bias: added to the logits, by token id.
    banned_words: strings or token id sequences that must not appear.
    min_new_tokens: no end token before so many. max_new_tokens: None leaves it to the call.
    stop: strings that end the text; they are not part of it. stop_tokens: end tokens; None takes the model's own.
    seed: any integer; the same seed gives the same text whatever the drafter, tree or batch.
    logprobs: report the log-probability of each new token under the unprocessed model.
    processors: functions of the prefix, ``(input_ids [n, L], scores [n, V]) -> scores [n, V]``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_words: Sequence[str | Sequence[int]] = ()
    min_new_tokens: int = 0
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    seed: int = 0
    logprobs: bool = False
    processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "banned_words"):
            if isinstance(getattr(self, name), str):                # one string is a list of one, not of letters
                object.__setattr__(self, name, (getattr(self, name),))
        for name in ("temperature", "presence_penalty", "frequency_penalty"):
            _within(self, name, 0 if name == "temperature" else None)
        for name in ("top_k", "no_repeat_ngram", "min_new_tokens"):
            _within(self, name, 0, whole=True)
        if self.max_new_tokens is not None:
            _within(self, "max_new_tokens", 1, whole=True)
        _within(self, "seed", whole=True)
        _within(self, "top_p", 0, 1, open_low=True)
        _within(self, "min_p", 0, 1)
        _within(self, "repetition_penalty", 0, open_low=True)
        if any(not bias < _INF for bias in self.logit_bias.values()):
            raise BadInput(f"logit_bias was {dict(self.logit_bias)!r}; each bias must be a number below infinity")
        if any(word == "" for word in self.stop):
            raise BadInput("stop was given an empty string; every text contains it. Leave it out")
        if any(len(word) == 0 for word in self.banned_words):
            raise BadInput("banned_words was given an empty word; leave it out")


@dataclass(frozen=True)
class Wishes:
    """One running row as the sampler sees it: its sampling with strings resolved, and its place among samples."""

    sampling: Sampling
    prompt_length: int
    stop_tokens: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    sample: int = 0


@dataclass(frozen=True)
class Prefix:
    """What is true of each row: the committed tokens and, behind them, the root.

    tokens: [B, capacity] int64; ``tokens[b, position[b]]`` is the root, what lies beyond is scratch.
    position: [B] int64, the root's place: the number of committed tokens.
    ahead: how far a draft may reach beyond the root; the round's noise is made for all of it at once.
    longest: no row has more committed tokens; as far as the host knows, the capacity otherwise.
    """

    tokens: Tensor
    position: Tensor
    ahead: int = 0
    longest: int | None = None

    @cached_property
    def root(self) -> Tensor:
        """[B] the token the target has chosen but not yet read."""
        return self.tokens.gather(1, self.position[:, None])[:, 0]


@dataclass(frozen=True)
class Paths:
    """The text each of the nodes `first:` of a tree stands at the end of."""

    prefix: Prefix
    tree: TokenTree
    first: int = 0

    @cached_property
    def lengths(self) -> Tensor:
        """[B, N] tokens up to and including the node; also the position of the token chosen there."""
        return self.prefix.position[:, None] + self.tree.depths[:, self.first :] + 1

    @cached_property
    def sequences(self) -> Tensor:
        """[B, N, S] int64: the whole text of each node; what lies beyond its length is meaningless."""
        position, tokens = self.prefix.position, self.prefix.tokens
        length = tokens.shape[1] + self.tree.depth_limit + 1
        rows, nodes = self.tree.tokens.shape
        sees = self.tree.ancestors[:, self.first :]                                           # [B, n, N]
        text = torch.nn.functional.pad(tokens, (0, length - tokens.shape[1] + 1))
        text = text[:, None].repeat(1, sees.shape[1], 1)
        place = torch.where(sees, (position[:, None] + self.tree.depths)[:, None], length)    # unseen → dump
        drafted = self.tree.tokens.clamp(min=0)[:, None].expand(rows, sees.shape[1], nodes)
        return text.scatter_(2, place, drafted)[..., :length]


class Sampler:
    """The wishes of all running rows, as tensors. Pure: the same arguments give the same choice.

    at_hand: numbers may be looked at and calculated with on the host, since they lie there and shapes need not be static. False
    where each look would wait for a device, or where that is rehearsed.
    """

    def __init__(self, rows: Sequence[Wishes], device: torch.device | str = "cpu", at_hand: bool | None = None) -> None:
        self.rows = tuple(rows)
        self.device = torch.device(device)
        self.at_hand = self.device.type == "cpu" if at_hand is None else at_hand
        wants = [row.sampling for row in rows]
        self.keys = noise.row_keys([want.seed for want in wants], [row.sample for row in rows], device)
        self.greedy = all(want.temperature == 0 for want in wants)
        self._round: dict[tuple[Role, int], tuple[Tensor, Tensor]] = {}
        self._stocks = STOCK
        self._stock: _Stock | None = None
        self._columns: dict[tuple[str, torch.dtype], Tensor] = {}

    def select(self, rows: Sequence[int]) -> Sampler:
        """The sampler of these rows, in this order: to ask once, for it makes no noise for later rounds."""
        other = Sampler([self.rows[row] for row in rows], self.device, self.at_hand)
        other._stocks = 0
        return other

    def prepare(self, dtype: torch.dtype, vocab: int) -> None:
        """Copy to the device now, not in the round that comes, whatever scores of this dtype and width will need."""
        for name in _COLUMNS:
            if self._any(name):
                self._column(name, torch.int64 if name in ("top_k", "no_repeat_ngram") else dtype)
        _ = self._greedy_rows, self._prompt_lengths, self._processes, self._trust
        if self._any("logit_bias"):
            self._bias(dtype)
        if any(row.banned for row in self.rows):
            _ = self._banned
        if any(row.sampling.min_new_tokens and row.stop_tokens for row in self.rows):
            self._held(vocab)

    def pick(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N] the target's own choice at each node, from raw `logits` [B, N, V]; NOTHING where there is none."""
        found = self.kernels(logits)
        if found is None:
            return winner(self.race(logits, paths, Role.TARGET))
        return found.pick(logits, *self._noise_at(paths, *logits.shape[1:]), self._heats[0], NOTHING)

    def probs(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N, V] the law of the choice at each node (fp32, or fp64 for fp64 logits); one-hot where greedy."""
        scores = self.filtered(logits, paths)
        law = scores.softmax(-1)
        if all(row.sampling.temperature > 0 for row in self.rows):
            return law
        picks = winner(scores)[..., None]                                   # NOTHING has no law: NaN, as by softmax
        best = torch.zeros_like(law).scatter_(-1, picks.clamp(min=0), 1.0).masked_fill_(picks == NOTHING, torch.nan)
        return torch.where(self._greedy_rows, best, law)

    def race(self, logits: Tensor, paths: Paths, role: Role) -> Tensor:
        """[B, N, V] processed logits plus keyed Gumbel noise: argmax is a draw, top-k draws without replacement.

        With Role.TARGET the noise depends on (seed, position, token) alone; the other roles draw afresh each round.
        """
        scores = self.filtered(logits, paths)
        if self.greedy:
            return scores
        noises = self._noise(paths.prefix, paths.tree.depth_limit, role, scores.shape[-1])      # [B, D, V]
        if paths.tree.is_chain:
            return scores + noises[:, paths.first : paths.first + scores.shape[1]]
        depths = paths.tree.depths[:, paths.first :, None]
        return scores + noises.gather(1, depths.expand_as(scores))

    def odds(self, race: Tensor) -> Tensor:
        """[B, N, V] logarithms of what a drafter that races with the target's noise may think a token's chance to be chosen.

        Draft and target part only where their logits do, and a low temperature makes more of that: the softmax of the race
        itself is too sure. A high one would have it less sure than it is.
        """
        return (race if self.greedy else race * self._trust.to(race.dtype)).log_softmax(-1)

    def best(self, logits: Tensor, paths: Paths, count: int) -> tuple[Tensor, Tensor]:
        """The `count` tokens likeliest to be chosen at each node, and the logarithm of the chance of each, [B, N, count] both.

        For drafters that choose: by the target's own noise, from logits [B, N, V]. -inf: nothing may be chosen.
        """
        found = self.kernels(logits)
        if found is not None:
            rows, nodes, vocab = logits.shape
            heats, trusts = (_each(column, nodes) for column in self._heats)
            asked = (logits.reshape(-1, vocab), *self._noise_at(paths, nodes, vocab), heats, trusts, count)
            odds, tokens = found.best(*asked)
            return odds.view(rows, nodes, count), tokens.view(rows, nodes, count)
        best = self.odds(self.race(logits, paths, Role.TARGET)).topk(count, -1)
        return torch.where(best.values > -torch.inf, best.values, -torch.inf), best.indices

    def contest(self, prefix: Prefix, steps: int, vocab: int, floor: float) -> Contest | None:
        """What `best` goes by for `steps` tokens behind the root; None where it goes by more than our kernels know.

        floor: the chance to stand below which no row's draft goes on.
        """
        if not self._simple:
            return None
        noises, places = None, None
        if not self.greedy:
            noises, places = self._stocked(prefix, steps - 1, vocab)
        return Contest(noises, places, *self._heats, log(floor) if floor else -_INF)

    @cached_property
    def slope(self) -> Tensor:
        """[B] by how much `odds` part where logits part by 1, at a temperature."""
        heats, trusts = self._heats
        return (trusts / heats)[:, 0]

    def kernels(self, logits: Tensor) -> Kernels | None:
        """Our own, where they know all that these rows ask for and can read such logits."""
        return self._found if logits.dtype == torch.bfloat16 else None

    @cached_property
    def _found(self) -> Kernels | None:
        return kernels() if self._simple else None

    @cached_property
    def _simple(self) -> bool:
        """Whether numbers are at hand and nothing but a temperature is asked for."""
        at_hand = self.at_hand and self.device.type == "cpu"
        return at_hand and all(process == self._heat for process in self._processes)

    def _noise_at(self, paths: Paths, nodes: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
        """Noise [., V], and which of it each node's is [B, N]; None if all rows are greedy."""
        if self.greedy:
            return None, None
        noises, roots = self._stocked(paths.prefix, paths.tree.depth_limit, vocab)
        return noises, roots[:, None] + paths.tree.depths[:, paths.first : paths.first + nodes]

    def _stocked(self, prefix: Prefix, depth: int, vocab: int) -> tuple[Tensor, Tensor]:
        """The noise of the target's choices [B, D, V], and which of it, flat, is that behind each root [B].

        Where numbers are at hand it is made for more positions than a round asks for, and kept as long as it reaches.
        """
        ahead, positions, stock = max(prefix.ahead, depth), prefix.position.tolist(), self._stock
        if stock is None or not stock.reaches(positions, ahead, vocab):
            reach = max(1 + ahead, min(self._stocks, STOCKED // vocab) // len(positions))
            noises = self._made(prefix.position, reach, Role.TARGET, vocab)
            starts = reach * torch.arange(len(positions), device=self.device) - prefix.position
            stock = self._stock = _Stock(positions, noises, starts)
        return stock.noises, stock.starts + prefix.position

    @cached_property
    def _heats(self) -> tuple[Tensor, Tensor]:
        """[B, 1] what logits are divided by, and what scores are multiplied by to say a chance."""
        heats = [row.sampling.temperature or 1.0 for row in self.rows]
        return torch.tensor(heats, device=self.device).view(-1, 1), self._trust[:, 0]

    @cached_property
    def _trust(self) -> Tensor:
        """[B, 1, 1]"""
        heats = [min(row.sampling.temperature, 1.0) or 1.0 for row in self.rows]
        return torch.tensor(heats, device=self.device).view(-1, 1, 1)

    def _noise(self, prefix: Prefix, depth: int, role: Role, vocab: int) -> Tensor:
        """[B, D, V] noise by depth. A round asks many times: what was made for its position is kept until the next."""
        position, depth = prefix.position, max(prefix.ahead, depth)
        made_for, noises = self._round.get((role, vocab), (None, None))
        if noises is None or made_for is not position or noises.shape[1] <= depth:
            noises = self._made(position, depth + 1, role, vocab)
            self._round[role, vocab] = (position, noises)
        return noises

    def _made(self, position: Tensor, reach: int, role: Role, vocab: int) -> Tensor:
        """[B, reach, V] noise of the choices behind roots at `position` [B]."""
        places = position[:, None] + 1 + torch.arange(reach, device=self.device)
        origin = None if role is Role.TARGET else position[:, None].expand_as(places)
        streams = noise.stream(self.keys, role, places, origin, at_hand=self.at_hand)
        noises = noise.gumbel(streams, vocab, at_hand=self.at_hand)
        return noises.masked_fill_(self._greedy_rows, 0.0) if self._some_greedy else noises     # temperature 0 is noise 0

    def filtered(self, logits: Tensor, paths: Paths) -> Tensor:
        """[B, N, V] processed logits, -inf where a token may not be chosen."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for process in self._processes:
            scores = process(scores, paths)
        return scores

    @cached_property
    def _some_greedy(self) -> bool:
        return any(row.sampling.temperature == 0 for row in self.rows)

    @cached_property
    def _greedy_rows(self) -> Tensor:
        """[B, 1, 1] bool."""
        return torch.tensor([row.sampling.temperature == 0 for row in self.rows], device=self.device).view(-1, 1, 1)

    @cached_property
    def _processes(self) -> list[Callable[[Tensor, Paths], Tensor]]:
        """Only what some row asks for, in the order of transformers' generate."""
        asked: list[tuple[bool, Callable[[Tensor, Paths], Tensor]]] = [
            (self._any("logit_bias"), self._add_bias),
            (self._any("repetition_penalty"), self._penalise_repetition),
            (self._any("presence_penalty") or self._any("frequency_penalty"), self._penalise_presence),
            (self._any("no_repeat_ngram"), self._ban_ngrams),
            (any(row.banned for row in self.rows), self._ban_words),
            (any(row.sampling.min_new_tokens and row.stop_tokens for row in self.rows), self._hold_stop_tokens),
            (self._any("processors"), self._ask_user),
            (self._any("temperature"), self._heat),
            (self._any("top_k"), self._keep_top_k),
            (self._any("top_p"), self._keep_top_p),
            (self._any("min_p"), self._keep_min_p),
        ]
        return [process for wanted, process in asked if wanted]

    @cached_property
    def reads_text(self) -> bool:
        """Whether a choice depends on which tokens stand before it, beside what the logits say."""
        asked = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram", "processors")
        return any(self._any(name) for name in asked) or any(row.banned for row in self.rows)

    def _any(self, name: str) -> bool:
        return any(getattr(row.sampling, name) != _DEFAULTS[name] for row in self.rows)

    def _column(self, name: str, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1] one parameter of every row; made once, since a round should copy nothing to the device."""
        if (name, dtype) not in self._columns:
            values = [getattr(row.sampling, name) for row in self.rows]
            self._columns[name, dtype] = torch.tensor(values, dtype=dtype, device=self.device).view(-1, 1, 1)
        return self._columns[name, dtype]

    # What depends on the text so far ---------------------------------------------------------------------------

    def _bias(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, highest id + 1]"""
        if ("logit_bias", dtype) in self._columns:
            return self._columns["logit_bias", dtype]
        ids = [(row, token, bias) for row, w in enumerate(self.rows) for token, bias in w.sampling.logit_bias.items()]
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
        return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    def _penalise_presence(self, scores: Tensor, paths: Paths) -> Tensor:
        counts = self._counts(paths, scores.shape[-1], prompt=False).to(scores.dtype)
        presence = self._column("presence_penalty", scores.dtype)
        frequency = self._column("frequency_penalty", scores.dtype)
        return scores - presence * (counts > 0) - frequency * counts

    def _counts(self, paths: Paths, vocab: int, prompt: bool) -> Tensor:
        """[B, N, V] how often each token occurs in each node's text; without the prompt unless asked."""
        sequences = paths.sequences
        place = torch.arange(sequences.shape[-1], device=self.device)
        counted = place < paths.lengths[..., None]
        if not prompt:
            counted = counted & (place >= self._prompt_lengths)
        counts = torch.zeros(*sequences.shape[:2], vocab, device=self.device)
        return counts.scatter_add_(2, sequences, counted.float())

    @cached_property
    def _prompt_lengths(self) -> Tensor:
        return torch.tensor([row.prompt_length for row in self.rows], device=self.device).view(-1, 1, 1)

    def _ban_ngrams(self, scores: Tensor, paths: Paths) -> Tensor:
        banned = torch.zeros_like(scores, dtype=torch.bool)
        sizes = self._column("no_repeat_ngram", torch.int64)
        for size in sorted({row.sampling.no_repeat_ngram for row in self.rows} - {0}):
            if paths.sequences.shape[-1] < size:
                continue
            windows = paths.sequences.unfold(-1, size, 1)                                                # [B, N, L, n]
            starts = torch.arange(windows.shape[2], device=self.device)
            tail = paths.lengths[..., None] - size + 1 + torch.arange(size - 1, device=self.device)      # [B, N, n-1]
            suffix = paths.sequences.gather(2, tail.clamp(min=0))
            hit = (windows[..., :-1] == suffix[:, :, None]).all(-1)                                      # [B, N, L]
            hit &= (starts + size <= paths.lengths[..., None]) & (sizes == size)
            hit &= paths.lengths[..., None] >= size
            banned |= torch.zeros_like(scores).scatter_add_(2, windows[..., -1], hit.to(scores.dtype)) > 0
        return scores.masked_fill(banned, -torch.inf)

    def _ban_words(self, scores: Tensor, paths: Paths) -> Tensor:
        words = self._banned
        ahead = torch.arange(words.heads.shape[1], device=self.device) - words.sizes[:, None]               # [M, L]
        place = paths.lengths[words.rows][..., None] + ahead[:, None]                                       # [M, N, L]
        text = paths.sequences[words.rows].gather(2, place.clamp(0, paths.sequences.shape[-1] - 1))
        same = ((text == words.heads[:, None]) & (place >= 0)) | (ahead >= 0)[:, None]
        hit = same.all(-1).to(scores.dtype)                                                                 # [M, N]
        nodes = torch.arange(scores.shape[1], device=self.device)
        where = (words.rows[:, None], nodes[None], words.ends[:, None])
        return scores.masked_fill(torch.zeros_like(scores).index_put(where, hit, accumulate=True) > 0, -torch.inf)

    @cached_property
    def _banned(self) -> _Banned:
        words = [(row, word) for row, wishes in enumerate(self.rows) for word in wishes.banned]
        heads = torch.zeros(len(words), max(len(word) for _, word in words) - 1, dtype=torch.int64)
        for number, (_, word) in enumerate(words):
            heads[number, : len(word) - 1] = torch.tensor(word[:-1])
        sizes, rows, ends = torch.tensor([(len(word) - 1, row, word[-1]) for row, word in words]).unbind(1)
        return _Banned(*(part.to(self.device) for part in (heads, sizes, rows, ends)))

    def _hold_stop_tokens(self, scores: Tensor, paths: Paths) -> Tensor:
        ends, first = self._held(scores.shape[-1])
        return scores.masked_fill(ends & (paths.lengths[..., None] < first), -torch.inf)

    def _held(self, vocab: int) -> tuple[Tensor, Tensor]:
        """[B, 1, V] the end tokens, and [B, 1, 1] the position before which none may come."""
        if ("stop_tokens", torch.bool) not in self._columns:
            ends = torch.zeros(len(self.rows), 1, vocab, dtype=torch.bool)
            for row, wishes in enumerate(self.rows):
                ends[row, 0, list(wishes.stop_tokens)] = True
            first = [row.prompt_length + row.sampling.min_new_tokens for row in self.rows]
            self._columns["stop_tokens", torch.bool] = ends.to(self.device)
            self._columns["stop_tokens", torch.int64] = torch.tensor(first, device=self.device).view(-1, 1, 1)
        return self._columns["stop_tokens", torch.bool], self._columns["stop_tokens", torch.int64]

    def _ask_user(self, scores: Tensor, paths: Paths) -> Tensor:
        """The user's processors, called as transformers calls them: one unpadded prefix at a time."""
        scores = scores.clone()
        lengths = paths.lengths.tolist()
        for row, wishes in enumerate(self.rows):
            for node in range(scores.shape[1]) if wishes.sampling.processors else ():
                text = paths.sequences[row, node, : lengths[row][node]][None]
                for processor in wishes.sampling.processors:
                    scores[row, node] = processor(text, scores[row, node][None].clone())[0]
        return scores

    # What depends on the logits alone ---------------------------------------------------------------------------

    def _heat(self, scores: Tensor, paths: Paths) -> Tensor:
        temperature = self._column("temperature", scores.dtype)
        return torch.where(temperature > 0, scores / temperature, scores)

    def _keep_top_k(self, scores: Tensor, paths: Paths) -> Tensor:
        vocab = scores.shape[-1]
        sizes = self._column("top_k", torch.int64).masked_fill(self._greedy_rows, 0)
        largest = min(max(row.sampling.top_k for row in self.rows), vocab)
        best = scores.topk(largest, -1).values
        least = best.gather(-1, (sizes - 1).clamp(0, largest - 1).expand(*best.shape[:2], 1))
        return scores.masked_fill((scores < least) & (sizes > 0), -torch.inf)

    def _keep_top_p(self, scores: Tensor, paths: Paths) -> Tensor:
        mass = self._column("top_p", scores.dtype)
        ordered, order = scores.sort(-1)
        likeliest = torch.arange(scores.shape[-1], device=self.device) == scores.shape[-1] - 1
        drop = (ordered.softmax(-1).cumsum(-1) <= 1 - mass) & (mass < 1) & ~self._greedy_rows & ~likeliest
        return scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)

    def _keep_min_p(self, scores: Tensor, paths: Paths) -> Tensor:
        share = self._column("min_p", scores.dtype)
        law = scores.softmax(-1)
        drop = (law < share * law.amax(-1, keepdim=True)) & ~self._greedy_rows
        return scores.masked_fill(drop, -torch.inf)


class _Stock(NamedTuple):
    """Noise [B, D, V] made for roots at `positions` and as far as it reaches. starts: [B] which of it, flat, is that behind a
    root at position 0."""

    positions: list[int]
    noises: Tensor
    starts: Tensor

    def reaches(self, positions: list[int], ahead: int, vocab: int) -> bool:
        """Whether it holds what stands behind roots at these positions, and so far ahead of them."""
        room = self.noises.shape[1] - ahead
        moved = (now - then for now, then in zip(positions, self.positions, strict=True))
        return self.noises.shape[2] == vocab and all(0 <= far < room for far in moved)


class _Banned(NamedTuple):
    """Forbidden words: the tokens `heads` [M, L] before the last, `sizes` [M] of them; in which row; the last token."""

    heads: Tensor
    sizes: Tensor
    rows: Tensor
    ends: Tensor


def _each(column: Tensor, nodes: int) -> Tensor:
    """[B, nodes] a number per row, as many times."""
    return column if nodes == 1 else column.expand(-1, nodes).contiguous()


def winner(race: Tensor) -> Tensor:
    """[...] the token with the highest score of `race` [..., V]; NOTHING if all are -inf or one is NaN."""
    best = race.max(-1)
    return torch.where(best.values > -torch.inf, best.indices, NOTHING)


_INF = float("inf")
_COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram"
)
_DEFAULTS = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(Sampling)}


def _within(
    owner: object, name: str, low: float | None = None, high: float | None = None, open_low: bool = False, whole: bool = False
) -> None:
    value = getattr(owner, name)
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and -_INF < value < _INF
    if number and (low is None or (value > low if open_low else value >= low)) and (high is None or value <= high):
        return
    bounds = [] if low is None else [f"{'above' if open_low else 'at least'} {low}"]
    bounds += [] if high is None else [f"at most {high}"]
    wanted = " ".join(["a whole number" if whole else "a number", " and ".join(bounds)]).strip()
    raise BadInput(f"{name} was {value!r}; it must be {wanted}")
