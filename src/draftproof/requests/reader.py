"""Makes requests from prompts and sampling parameters, and checks them. Reads no model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from draftproof.core.params import (
    LogitsProcessor,
    RuleContext,
    Sampling,
    SamplingParams,
    is_whole,
)
from draftproof.errors import BadInput, ContextTooLong, first_line
from draftproof.model.target import Target
from draftproof.requests.prompts import Prompt, parse_prompt, split_prompts
from draftproof.requests.request import Request
from draftproof.requests.sequence import SequenceState
from draftproof.tokenizer.codec import Codec, Messages

log = logging.getLogger("draftproof")

NEW_TOKENS = 128
"""New tokens per prompt where neither the call nor the sampling nor the model limits them."""


def note_copies(requests: Sequence[Request]) -> None:
    """Note repeated prompts with the same seed, which give the same text."""
    drawn = [request for request in requests if request.sampling.temperature > 0]
    texts = {(tuple(request.prompt), request.sampling.seed) for request in drawn}
    if copies := len(drawn) - len(texts):
        log.warning("note: %d of %d prompts repeat an earlier one with the same seed, so that "
                    "they get the same text; give each a seed of its own, or ask for n samples",
                    copies, len(requests))


@dataclass(frozen=True)
class RequestReader:
    """Makes requests, and refuses those that cannot be honoured exactly before anything runs.

    stop_tokens: end tokens for sampling parameters without any.
    """

    target: Target
    codec: Codec | None
    stop_tokens: tuple[int, ...]

    split_prompts = staticmethod(split_prompts)

    def read(
        self, prompts: Prompt | Sequence[Prompt], max_new_tokens: int | None,
        sampling: Sampling | Sequence[Sampling], n: int,
    ) -> list[Request]:  # fmt: skip
        """Make and check a request of `n` samples for each prompt."""
        separate = self.split_prompts(prompts)
        wanted = [sampling] * len(separate) if isinstance(sampling, Sampling) else sampling
        sound = isinstance(wanted, Sequence) and all(isinstance(want, Sampling) for want in wanted)
        if not sound or len(wanted) != len(separate):
            raise BadInput(
                f"sampling was {sampling!r:.80} for {len(separate)} prompts; give one Sampling, or "
                "a list of as many as prompts"
            )
        requests = list[Request]()
        for index, (prompt, want) in enumerate(zip(separate, wanted, strict=True)):
            tokens, source = self.begun(prompt)
            limit = self._limit(tokens, max_new_tokens, want)
            params = self.params(want, tokens, limit, source)
            sequences = [SequenceState(tokens, replace(params, sample=sample), limit,
                                       self.codec.stream(tokens) if self.codec else None,
                                       source=source) for sample in range(n)]  # fmt: skip
            requests.append(Request(sequences, index=index))
        if len(requests) > 1:
            note_copies(requests)
        return requests

    def begun(self, prompt: Prompt) -> tuple[list[int], object]:
        """The checked tokens at the beginning of the text, and the encoder's input, if any."""
        parsed = parse_prompt(prompt)
        if isinstance(parsed, str):
            tokens = self._codec("a prompt").encode(parsed) if parsed else []
        elif parsed and not isinstance(parsed[0], int):
            tokens = self._codec("a prompt").encode_chat(cast(Messages, parsed))
        else:
            tokens = cast(list[int], parsed)
        if not tokens:
            raise BadInput("the prompt is empty; give at least one word or token")
        self._known(tokens, "the prompt")
        return tokens, None

    def tokens(self, prompt: Prompt) -> list[int]:
        """The checked token ids of a prompt."""
        return RequestReader.begun(self, prompt)[0]

    def _codec(self, what: str) -> Codec:
        if self.codec is None:
            raise BadInput(
                f"{what} was given as text but the model has no tokenizer; pass tokenizer=... to "
                "load, or give token ids"
            )
        return self.codec

    def _limit(self, tokens: list[int], limit: int | None, sampling: Sampling) -> int:
        """The limit of new tokens for a row, bounded by the context."""
        name, limit = "max_new_tokens", sampling.max_new_tokens if limit is None else limit
        if limit is None and sampling.max_length is not None:
            name = f"max_length, less the {len(tokens)} tokens of the prompt,"
            limit = sampling.max_length - len(tokens)
        if limit is not None and not (is_whole(limit) and limit >= 1):
            raise BadInput(f"{name} was {limit!r:.60}; ask for a whole number, at least 1")
        room = self.target.context - len(tokens)
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {len(tokens)} tokens and {self.target.name} reads at most "
                f"{self.target.context}, one of them new; shorten the prompt", len(tokens)
            )
        return min(limit if limit is not None else NEW_TOKENS, room)

    def params(
        self, sampling: Sampling, prompt: Sequence[int], limit: int, source: Any = None
    ) -> SamplingParams:
        """Resolve strings to tokens, make rules' processors, and refuse unsupported options."""
        if sampling.stop:
            self._codec("a stop string")
        ends = self.stop_tokens if sampling.stop_tokens is None else tuple(sampling.stop_tokens)
        ends = tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
        banned = set[tuple[int, ...]]()
        for word in sampling.banned_words:
            if isinstance(word, str):
                encode = self._codec("a banned word").encode
                forms = {tuple(encode(part, special=False)) for part in (word, " " + word)}
                if () in forms:
                    raise BadInput(f"banned_words has {word!r:.99}, which this tokenizer encodes "
                                   "to no tokens; leave it out")
                banned |= forms
            else:
                banned.add(tuple(word))
        for word in banned:
            self._known(word, "banned_words")
        self._known(list(sampling.logit_bias), "logit_bias")
        for processor in sampling.processors:
            self._must_be_pure(processor)
        ends = tuple(end for end in ends if 0 <= end < self.target.vocab_size)
        encoded = prompt if source is None else source.tokens
        request = RuleContext(prompt, limit, ends, self.target.device, encoded)
        rules = tuple((rule, rule.make(request)) for rule in sampling.logits_rules)
        words = tuple(sorted(banned))
        return SamplingParams(sampling, len(prompt), ends, words, logits_rules=rules)

    def _known(self, tokens: Sequence[int], where: str) -> None:
        strange = next((token for token in tokens if not 0 <= token < self.target.vocab_size), None)
        if strange is not None:
            last = self.target.vocab_size - 1
            raise BadInput(f"{where} has token id {strange}; {self.target.name} knows 0 to {last}")

    def _must_be_pure(self, processor: LogitsProcessor) -> None:
        """Check that a processor is a function of the prefix by repeating a call after another."""
        name = getattr(processor, "__name__", type(processor).__name__)
        vocab, device = self.target.vocab_size, self.target.device
        texts = [torch.arange(size, device=device)[None] % vocab for size in (3, 5)]
        scores = torch.linspace(-1, 1, vocab, dtype=torch.float32, device=device)[None]
        try:
            fresh = copy.deepcopy(processor)
            answers = [fresh(texts[turn % 2], scores.clone()) for turn in range(6)]
            pairs = zip(answers, answers[:2] * 3, strict=True)
            alike = all(torch.equal(answer, first) for answer, first in pairs)
        except Exception as error:
            why = f"returns no tensor, or fails on a short text: {first_line(error)}"
            raise BadInput(f"the logits processor {name} {why}") from error
        if not alike or answers[0].shape != scores.shape:
            raise BadInput(
                f"the logits processor {name} returns another shape than it was given, or keeps "
                "state: asked twice about the same text it answers differently; rewrite it as a "
                "function of the text alone, or leave it out"
            )
