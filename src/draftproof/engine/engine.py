"""The engine: prompts in, completions out. Owns target, drafter, rule and budget; the batch is the decoder's."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from draftproof.core.acceptance import RULES
from draftproof.core.params import LogitsProcessor, Sampling, SamplingParams
from draftproof.core.tree import CHUNKS
from draftproof.core.typical import Typical
from draftproof.drafters.base import Drafter
from draftproof.drafters.plain import Plain
from draftproof.engine.budget import Adaptive, Budget, Fixed
from draftproof.engine.decoder import Decoder
from draftproof.engine.ranks import Ranks
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.stats import Clock, RoundStats, State
from draftproof.errors import BadInput, ContextOverflow, DraftproofError
from draftproof.model.device import Device
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec, Messages

Prompt = str | Sequence[int] | Messages
"""Text, token ids, or a chat as ``[{"role": ..., "content": ...}, ...]``."""

ROWS = 8
"""Rows at a time when nobody says."""
NEW_TOKENS = 128
"""New tokens per prompt when neither the call, the sampling nor the model says."""


@dataclass(frozen=True)
class Completion:
    """What came of one prompt, or of one sample of it.

    tokens: the new tokens, an end token included. text: without special tokens and without the stop string.
    finish_reason: "stop" (an end token or a stop string), "length", or "error": there was no next token, and `error` says
    why; the text up to there is what it would have been. logprobs: natural logarithms under the
    unprocessed model, one per token, or None. prompt, sample: which of the prompts, which of its samples.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[float] | None
    stats: RoundStats
    prompt: int = 0
    sample: int = 0
    error: DraftproofError | None = None

    def checked(self) -> Completion:
        """Itself; raises the error that ended it, if one did."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True)
class Chunk:
    """New text of a stream: pieces, each with whether its token was drafted. The last carries the completion."""

    pieces: list[tuple[str, bool]]
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


class Engine:
    """Writes text with a target and a drafter; the text is what the target would have written alone.

    acceptance: "match" (default: the same text with any drafter), "rejection" or "block" (the same law).
    lossy: a `Typical`, or True for its defaults: text that is *not* what the target alone would write, in place of an
    exact rule; how far it strays is in `RoundStats.distance_per_token`. It depends on the drafts, so unless a budget is
    given as many are drafted in every round: the same seed gives the same text.
    budget: draft tokens per row and round, always so many, or a `Budget`; None measures what pays (`Adaptive`), up to the
    drafter's default. What it learns stays with the engine.
    codec: the tokenizer; needed for text prompts and stop strings, token ids do without.
    sampling, stop_tokens: defaults for calls that name none.
    shapes: `ShapePolicy(closed=True)` takes the sizes of a batch from a small set; None leaves it to the device.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        codec: Codec | None = None,
        acceptance: str = "match",
        lossy: Typical | bool = False,
        budget: Budget | int | None = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (),
        shapes: ShapePolicy | None = None,
    ) -> None:
        self.lossy = Typical() if lossy is True else lossy or None
        self.acceptance = _checked_rule(acceptance, self.lossy)
        self.target, self.codec = target, codec
        self.drafter = drafter or Plain()
        self.shapes = shapes or ShapePolicy(closed=Device(target.device).compiles)
        usual = usual_budget(self.drafter) if self.lossy is None else Fixed(self.drafter.default_budget)
        if self.shapes.closed and isinstance(usual, Adaptive):
            usual = Adaptive(usual.most, sizes=self.shapes.sizes(usual.most))
        self.budget = Fixed(budget) if isinstance(budget, int) else budget or usual
        self.sampling, self.stop_tokens = sampling or Sampling(), tuple(stop_tokens)
        self.clock = Clock()                            # where the seconds of the call went that began last
        if self.budget.most >= target.context:
            raise BadInput(f"{self.budget.most} draft tokens per round do not fit a context of {target.context}; draft fewer")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        n: int = 1,
        batch_size: int | None = None,
    ) -> list[Completion]:
        """Complete every prompt, `n` times each: completions in the order of prompts, samples side by side.

        sampling: one for all or one per prompt; None takes the model's own generation defaults. Sample i of a
        prompt is the same whatever `n` is. batch_size: rows at a time (default: all, up to 8).
        Raises BadInput, before anything runs, for a request that cannot be honoured.
        """
        done = self.as_completed(prompts, max_new_tokens=max_new_tokens, sampling=sampling, n=n, batch_size=batch_size)
        return sorted(done, key=lambda completion: (completion.prompt, completion.sample))

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        n: int = 1,
        batch_size: int | None = None,
    ) -> Iterator[Completion]:
        """As `generate`, but each completion comes as soon as it is finished."""
        rounds = self.rounds(prompts, max_new_tokens=max_new_tokens, sampling=sampling, n=n, batch_size=batch_size)
        return (self._completion(row) for rows in rounds for row in rows if row.finish_reason is not None)

    def rounds(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        n: int = 1,
        batch_size: int | None = None,
    ) -> Iterator[list[SequenceState]]:
        """As `generate`, a step at a time: after every prefill and every round the rows that had not ended before it.

        Those that wait are among them, and the first time all are. They are the engine's own: look, and change nothing.
        """
        if n < 1:
            raise BadInput(f"n was {n}; ask for at least 1 sample")
        if batch_size is not None and batch_size < 1:
            raise BadInput(f"batch_size was {batch_size}; it must be at least 1")
        requests = self._requests(prompts, max_new_tokens, sampling, n)
        rows = max(n, min(batch_size or ROWS, n * len(requests)))
        if self.shapes.closed and batch_size is not None:               # as many as were declared, needed or not
            rows = max(n, batch_size)
        return self._going(requests, rows)

    def check(self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None) -> None:
        """Raise BadInput if `generate` could not honour this request."""
        self._requests([prompt], max_new_tokens, sampling, 1)

    def _going(self, requests: list[list[SequenceState]], rows: int) -> Iterator[list[SequenceState]]:
        going = [row for request in requests for row in request]
        for _ in self._rounds(deque(requests), rows):
            yield going
            going = [row for row in going if row.finish_reason is None]

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, sampling: Sampling | None = None
    ) -> Iterator[Chunk]:
        """Complete one prompt, a chunk of text per round: whole characters, nothing that a stop string may take back."""
        return self._chunks(self._requests([prompt], max_new_tokens, sampling, 1))

    def _chunks(self, requests: list[list[SequenceState]]) -> Iterator[Chunk]:
        for (row,) in self._going(requests, 1):
            done = self._completion(row) if row.finish_reason is not None else None
            yield Chunk(row.pieces(), done)

    def _rounds(self, waiting: deque[list[SequenceState]], rows: int) -> Iterator[None]:
        """Run everything that waits, at most `rows` rows at a time; yields after every prefill and every round."""
        if not waiting:
            return
        longest = max(len(row.prompt) + row.limit for request in waiting for row in request)
        rows, capacity = self.shapes.rows(rows), self.shapes.capacity(longest + self.budget.most + 2)
        decoder = self._decoder(Ranks(self.target.group).budget(self.budget), rows, capacity)
        clock = self.clock = decoder.clock
        begun: list[tuple[SequenceState, dict[str, float]]] = []
        try:
            while waiting or decoder.running:
                admitted = [waiting.popleft() for _ in range(decoder.room_for(waiting))] if waiting else []
                begun += [(row, dict(clock.seconds)) for request in admitted for row in request]
                with self.target.group.intact():
                    if not admitted or decoder.takes(admitted):
                        decoder.step(admitted)
                    else:
                        with clock.part("prefill"):
                            decoder.admit(*admitted)
                if len(decoder.running) < len(begun):
                    begun = _clocked(begun, clock)
                yield
        finally:
            _clocked(begun, clock)                        # whoever stops listening is told as well

    def warm_up(self, tokens: int, *, batch_size: int = 1, sampling: Sampling | None = None) -> None:
        """Run once every shape that batches of so many rows, and texts of up to so many tokens, will take.

        For devices that compile what they meet, with closed shapes. sampling: what will be asked for; filters and penalties
        have shapes of their own.
        """
        rows, capacity = self.shapes.rows(batch_size), self.shapes.capacity(tokens + self.budget.most + 2)
        sizes = self.budget.sizes if isinstance(self.budget, Adaptive) else (self.budget.most,)
        pauses = (0, 2, 5) if len(sizes) > 1 else (0,)                  # a drafter catches up with what it missed
        scripts = [(size, *[0] * pause, size) for size in sizes for pause in pauses]
        longest = min(capacity, self.target.context) - self.budget.most - 3
        widths = [min(width, longest) for width in (*self.shapes.reads(capacity), CHUNKS[-1] + 1)]
        for length, script in [(1, script) for script in scripts] + [(width, (self.budget.most,)) for width in widths]:
            decoder = self._decoder(_Script(script), rows, capacity)
            decoder.admit([SequenceState([0] * length, self._params(sampling or self.sampling, length), capacity)])
            for _ in script:
                decoder.step()

    def _decoder(self, budget: Budget, rows: int, capacity: int) -> Decoder:
        rule = self.lossy.rule if self.lossy else RULES[self.acceptance]
        return Decoder(self.target, self.drafter, rule, budget, rows, capacity, self.shapes)

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int | None,
        sampling: Sampling | Sequence[Sampling] | None,
        n: int,
    ) -> list[list[SequenceState]]:
        """Per prompt its `n` rows to run, checked."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, dict))):
            prompts = [cast(Prompt, prompts)]
        several = cast(Sequence[Prompt], prompts)
        one = self.sampling if sampling is None else sampling
        wanted = [one] * len(several) if isinstance(one, Sampling) else list(one)
        if len(wanted) != len(several):
            raise BadInput(f"{len(wanted)} samplings were given for {len(several)} prompts; give one, or one per prompt")
        requests = []
        for index, (prompt, want) in enumerate(zip(several, wanted, strict=True)):
            tokens = self._tokens(prompt)
            limit = self._limit(tokens, max_new_tokens if max_new_tokens is not None else want.max_new_tokens)
            params = self._params(want, len(tokens))
            requests.append([self._running(tokens, replace(params, sample=sample), limit, index) for sample in range(n)])
        return requests

    def _running(self, tokens: list[int], params: SamplingParams, limit: int, prompt: int) -> SequenceState:
        return SequenceState(tokens, params, limit, self.codec.stream(tokens) if self.codec else None, request=prompt)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if len(prompt) == 0:
            raise BadInput("the prompt is empty; give at least one word or token")
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            tokens = [int(token) for token in cast(Sequence[int], prompt)]
        elif self.codec is None:
            raise BadInput("a text prompt was given but the model has no tokenizer; pass tokenizer=... to load, or token ids")
        elif isinstance(prompt, str):
            if any("\ud800" <= letter <= "\udfff" for letter in prompt):
                raise BadInput("the prompt has half of a surrogate pair, a cut emoji perhaps; give whole characters")
            tokens = self.codec.encode(prompt)
        else:
            tokens = self.codec.encode_chat(cast(Messages, prompt))
        if not tokens:
            raise BadInput("the prompt has no tokens; give at least one word")
        self._known(tokens, "the prompt")
        return tokens

    def _limit(self, tokens: list[int], asked: int | None) -> int:
        """New tokens this row may have; the context bounds them."""
        if asked is not None and asked < 1:
            raise BadInput(f"max_new_tokens was {asked}; ask for at least 1")
        room = self.target.context - len(tokens)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(tokens)} tokens and {self.target.name} reads at most {self.target.context}, "
                "one of them new; shorten the prompt"
            )
        return min(asked if asked is not None else NEW_TOKENS, room)

    def _params(self, sampling: Sampling, prompt_length: int) -> SamplingParams:
        """Resolve strings to tokens, and refuse what cannot be honoured exactly."""
        if sampling.stop and self.codec is None:
            raise BadInput("stop strings were given but the model has no tokenizer; use stop_tokens")
        ends = self.stop_tokens if sampling.stop_tokens is None else tuple(sampling.stop_tokens)
        banned: list[tuple[int, ...]] = []
        for word in sampling.banned_words:
            if not isinstance(word, str):
                banned.append(tuple(word))
            elif self.codec is None:
                raise BadInput("banned words were given as text but the model has no tokenizer; give token ids")
            else:
                banned += {tuple(self.codec.encode(space + word, special=False)) for space in ("", " ")}
        for word in banned:
            self._known(word, "banned_words")
        self._known(list(sampling.logit_bias), "logit_bias")
        for processor in sampling.processors:
            self._must_be_pure(processor)
        ends = tuple(end for end in ends if 0 <= end < self.target.vocab_size)
        return SamplingParams(sampling, prompt_length, ends, tuple(sorted(banned)))

    def _known(self, tokens: Sequence[int], where: str) -> None:
        strange = [token for token in tokens if not 0 <= token < self.target.vocab_size]
        if strange:
            raise BadInput(f"{where} has token id {strange[0]}; {self.target.name} knows 0 to {self.target.vocab_size - 1}")

    def _must_be_pure(self, processor: LogitsProcessor) -> None:
        """Ask twice, with another question in between; a function of the prefix gives the same answer."""
        name = getattr(processor, "__name__", type(processor).__name__)
        asked = copy.deepcopy(processor)
        device = self.target.device
        texts = [torch.arange(size, device=device)[None] % self.target.vocab_size for size in (3, 5)]
        scores = torch.linspace(-1, 1, self.target.vocab_size, device=device)[None]
        try:
            answers = [asked(texts[turn % 2], scores.clone()) for turn in range(6)]
        except Exception as error:
            raise BadInput(f"the logits processor {name} fails on a short text: {error}") from error
        if any(answer.shape != scores.shape for answer in answers):
            shape, wanted = tuple(answers[0].shape), tuple(scores.shape)
            raise BadInput(f"the logits processor {name} returns shape {shape}; it must return {wanted}")
        if not all(torch.equal(answer, answers[turn % 2]) for turn, answer in enumerate(answers)):
            raise BadInput(
                f"the logits processor {name} keeps state: asked twice about the same text it answers differently. "
                "Speculation needs a function of the text alone; rewrite it as one, or leave it out"
            )

    def _completion(self, row: SequenceState) -> Completion:
        logprobs = row.logprobs if row.params.sampling.logprobs else None
        reason = row.finish_reason or "length"
        return Completion(row.text, row.tokens, reason, logprobs, row.stats, row.request, row.params.sample, row.error)


class _Script(Budget):
    """Sizes that were written down, round by round."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.most, self._left = max(sizes), list(sizes)

    def choose(self, state: State) -> int:
        return self._left.pop(0)


def usual_budget(drafter: Drafter) -> Budget:
    """The budget when nobody says: one that measures, and nothing at all for a drafter that drafts nothing."""
    return Adaptive(drafter.default_budget) if drafter.default_budget else Fixed(0)


def _clocked(begun: list[tuple[SequenceState, dict[str, float]]], clock: Clock) -> list[tuple[SequenceState, dict[str, float]]]:
    """Tell rows what the seconds were since they began; return those that still run."""
    for row, since in begun:
        row.stats.seconds = {part: clock.seconds[part] - since.get(part, 0.0) for part in row.stats.seconds}
    return [(row, since) for row, since in begun if row.finish_reason is None]


def _checked_rule(acceptance: str, lossy: Typical | None) -> str:
    """The name of the rule; lossy is only what says so."""
    if acceptance == "typical" and lossy is None:
        raise BadInput("typical acceptance is lossy: the text is not what the target would write; ask for it with lossy=True")
    if lossy is not None and acceptance not in ("match", "typical"):
        raise BadInput(f"both lossy acceptance and the exact rule {acceptance!r} were asked for; leave one of them out")
    if lossy is None and acceptance not in RULES:
        raise BadInput(f"acceptance was {acceptance!r}; choose one of {', '.join(RULES)}")
    return "typical" if lossy is not None else acceptance
