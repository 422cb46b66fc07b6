"""Requests: prompts and sampling parameters in, checked; rows to run out. Reads no model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from draftproof.core.params import LogitsProcessor, RuleRequest, Sampling, SamplingParams
from draftproof.engine.batch import Request
from draftproof.engine.sequence import SequenceState
from draftproof.errors import BadInput, ContextOverflow
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec, Messages

Prompt = str | Sequence[int] | Messages
"""Text, token ids, or a chat as ``[{"role": ..., "content": ...}, ...]``."""
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
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, dict))):
            prompts = [cast(Prompt, prompts)]
        several = cast(Sequence[Prompt], prompts)
        wanted = [sampling] * len(several) if isinstance(sampling, Sampling) else list(sampling)
        if len(wanted) != len(several):
            raise BadInput(f"{len(wanted)} samplings were given for {len(several)} prompts; give one, or one per prompt")
        requests = list[Request]()
        for index, (prompt, want) in enumerate(zip(several, wanted, strict=True)):
            tokens = self._tokens(prompt)
            limit = self._limit(tokens, max_new_tokens, want)
            params = self.params(want, tokens, limit)
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

    def _limit(self, tokens: list[int], asked: int | None, sampling: Sampling) -> int:
        """New tokens this row may have; the context bounds them."""
        if asked is None:
            asked = sampling.max_new_tokens
        if asked is None and sampling.max_length is not None:
            asked = sampling.max_length - len(tokens)
            if asked < 1:
                raise BadInput(
                    f"the prompt has {len(tokens)} tokens and max_length, of prompt and text together, "
                    f"is {sampling.max_length}; give max_new_tokens"
                )
        if asked is not None and asked < 1:
            raise BadInput(f"max_new_tokens was {asked}; ask for at least 1")
        room = self.target.context - len(tokens)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(tokens)} tokens and {self.target.name} reads at most {self.target.context}, "
                "one of them new; shorten the prompt"
            )
        return min(asked if asked is not None else NEW_TOKENS, room)

    def params(self, sampling: Sampling, prompt: Sequence[int], limit: int) -> SamplingParams:
        """Resolve strings to tokens, make the processors of rules, refuse what cannot be honoured."""
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
        request = RuleRequest(prompt, limit, ends, self.target.device)
        rules = tuple((rule, rule.make(request)) for rule in sampling.logits_rules)
        banned_words = tuple(sorted(banned))
        return SamplingParams(sampling, len(prompt), ends, banned_words, logits_rules=rules)

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
