"""Requests: prompts and sampling parameters in, checked; rows to run out. Reads no model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from draftproof.core.params import LogitsProcessor, RuleRequest, Sampling, SamplingParams
from draftproof.engine.batch import Request
from draftproof.engine.prompts import Prompt, one, several
from draftproof.engine.sequence import SequenceState
from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec, Messages

NEW_TOKENS = 128
"""New tokens per prompt when neither the call, the sampling nor the model says."""


@dataclass(frozen=True)
class RequestReader:
    """Refuses, before anything runs, what cannot be honoured exactly.

    stop_tokens: end a text where its sampling parameters name none.
    """

    target: Target
    codec: Codec | None
    stop_tokens: tuple[int, ...]

    def read(
        self, prompts: Prompt | Sequence[Prompt], max_new_tokens: int | None,
        sampling: Sampling | Sequence[Sampling], n: int,
    ) -> list[Request]:  # fmt: skip
        """Per prompt its `n` samples, checked."""
        asked = self.several(prompts)
        wanted = [sampling] * len(asked) if isinstance(sampling, Sampling) else list(sampling)
        if not all(isinstance(want, Sampling) for want in wanted):
            raise BadInput(f"sampling was {sampling!r:.80}; give a Sampling, or one per prompt")
        if len(wanted) != len(asked):
            raise BadInput(
                f"{len(wanted)} samplings were given for {len(asked)} prompts; give one, or as many"
            )
        requests = list[Request]()
        for index, (prompt, want) in enumerate(zip(asked, wanted, strict=True)):
            tokens, source = self.begun(prompt)
            limit, rows = self._limit(tokens, max_new_tokens, want), list[SequenceState]()
            params = self.params(want, tokens, limit, source)
            for sample in range(n):
                text = self.codec.stream(tokens) if self.codec else None
                own = replace(params, sample=sample)
                rows.append(SequenceState(tokens, own, limit, text, request=index))
                rows[-1].source = source
            requests.append(rows)
        return requests

    def several(self, prompts: Any) -> list[Any]:
        """One prompt or many, as a list."""
        return several(prompts)

    def begun(self, prompt: Prompt) -> tuple[list[int], Any]:
        """The tokens that the text begins with, and what an encoder reads, if there is one."""
        return self.tokens(prompt), None

    def tokens(self, given: Prompt) -> list[int]:
        """Token ids of one prompt, checked."""
        prompt = one(given)
        if len(prompt) == 0:
            raise BadInput("the prompt is empty; give at least one word or token")
        if isinstance(prompt[0], int):
            tokens = cast(list[int], prompt)
        elif self.codec is None:
            raise BadInput(
                "a text prompt was given but the model has no tokenizer; pass tokenizer=... to "
                "load, or token ids"
            )
        elif isinstance(prompt, str):
            tokens = self.codec.encode(prompt)
        else:
            tokens = self.codec.encode_chat(cast(Messages, prompt))
        if not tokens:
            raise BadInput("the prompt has no tokens; give at least one word")
        self._known(tokens, "the prompt")
        return tokens

    def _limit(self, tokens: list[int], asked: int | None, sampling: Sampling) -> int:
        """New tokens this row may have; the context bounds them."""
        if asked is None:
            asked = sampling.max_new_tokens
        if asked is None and sampling.max_length is not None:
            asked = sampling.max_length - len(tokens)
            if asked < 1:
                raise BadInput(
                    f"the prompt has {len(tokens)} tokens and max_length, of prompt and text "
                    f"together, is {sampling.max_length}; give max_new_tokens"
                )
        if asked is not None and asked < 1:
            raise BadInput(f"max_new_tokens was {asked}; ask for at least 1")
        room = self.target.context - len(tokens)
        if room < 1:
            raise BadInput(
                f"the prompt has {len(tokens)} tokens and {self.target.name} reads at most "
                f"{self.target.context}, one of them new; shorten the prompt"
            )
        return min(asked if asked is not None else NEW_TOKENS, room)

    def params(
        self, sampling: Sampling, prompt: Sequence[int], limit: int, source: Any = None
    ) -> SamplingParams:
        """Resolve strings to tokens, make rules' processors, refuse what cannot be honoured."""
        if sampling.stop and self.codec is None:
            raise BadInput(
                "stop strings were given but the model has no tokenizer; use stop_tokens"
            )
        ends = self.stop_tokens if sampling.stop_tokens is None else tuple(sampling.stop_tokens)
        banned: list[tuple[int, ...]] = []
        for word in sampling.banned_words:
            if not isinstance(word, str):
                banned.append(tuple(word))
            elif self.codec is None:
                raise BadInput(
                    "banned words were given as text but the model has no tokenizer; give token ids"
                )
            else:
                both = word, " " + word
                banned += {tuple(self.codec.encode(part, special=False)) for part in both}
        for word in banned:
            self._known(word, "banned_words")
        self._known(list(sampling.logit_bias), "logit_bias")
        for processor in sampling.processors:
            self._must_be_pure(processor)
        ends = tuple(end for end in ends if 0 <= end < self.target.vocab_size)
        encoded = prompt if source is None else source.tokens
        request = RuleRequest(prompt, limit, ends, self.target.device, encoded)
        rules = tuple((rule, rule.make(request)) for rule in sampling.logits_rules)
        banned_words = tuple(sorted(banned))
        return SamplingParams(sampling, len(prompt), ends, banned_words, logits_rules=rules)

    def _known(self, tokens: Sequence[int], where: str) -> None:
        strange = [token for token in tokens if not 0 <= token < self.target.vocab_size]
        if strange:
            last = self.target.vocab_size - 1
            raise BadInput(
                f"{where} has token id {strange[0]}; {self.target.name} knows 0 to {last}"
            )

    def _must_be_pure(self, processor: LogitsProcessor) -> None:
        """Ask twice, another question in between: a function of the prefix answers the same."""
        name = getattr(processor, "__name__", type(processor).__name__)
        asked = copy.deepcopy(processor)
        device = self.target.device
        vocab = self.target.vocab_size
        texts = [torch.arange(size, device=device)[None] % vocab for size in (3, 5)]
        scores = torch.linspace(-1, 1, vocab, device=device)[None]
        try:
            answers = [asked(texts[turn % 2], scores.clone()) for turn in range(6)]
        except Exception as error:
            why = f"fails on a short text: {error}"
            raise BadInput(f"the logits processor {name} {why}") from error
        if any(answer.shape != scores.shape for answer in answers):
            shape, wanted = tuple(answers[0].shape), tuple(scores.shape)
            raise BadInput(
                f"the logits processor {name} returns shape {shape}; it must return {wanted}"
            )
        if not all(torch.equal(answer, answers[turn % 2]) for turn, answer in enumerate(answers)):
            raise BadInput(
                f"the logits processor {name} keeps state: asked twice about the same text it "
                "answers differently. Speculation needs a function of the text alone; rewrite it "
                "as one, or leave it out"
            )
