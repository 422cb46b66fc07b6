"""A loaded model: reads the requests for it, and runs them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, ContextTooLong
from draftproof.requests.openai_format import messages_of, refuse_unrecognized, sampling_of
from draftproof.requests.request import Request
from draftproof.server import constraints, schema
from draftproof.server.grammar import Grammars
from draftproof.server.metrics import Metrics
from draftproof.server.output_reader import OutputReader
from draftproof.server.reasoning import CHANNELS, is_open, marks_of
from draftproof.server.request_keys import check_messages, with_known_roles
from draftproof.server.request_queue import RequestQueue, Worker
from draftproof.server.tools import Form, call_grammar, call_messages, offered

RANGES = {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
          "seed": (-(2**63), 2**63 - 1)}
"""The smallest and largest value of each option of a request."""


@dataclass(frozen=True)
class Limits:
    """Limits of the requests of a model.

    Attributes:
        rows: Rows that run at a time.
        queue: Requests that may wait.
        length: Tokens of a prompt and its answer; the model's context bounds them.
        timeout: Seconds that a request may take, or None.
    """

    rows: int = 8
    queue: int = 256
    length: int = 4096
    timeout: float | None = None


class HostedModel:
    """An engine, its queue, and the name that clients use, also in errors."""

    def __init__(
        self, engine: Engine, name: str, limits: Limits, worker: Worker, metrics: Metrics
    ) -> None:
        self.engine, self.name, self.limits, self.metrics = engine, name, limits, metrics
        self.readings, self.used_at = 0, time.monotonic()
        engine.target.name = name
        if engine.codec is not None:
            engine.codec.name = name
        if engine.prefixes is not None:
            prefixes = engine.prefixes
            metrics.watch(
                "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.",
                lambda: prefixes.reused,
            )
            metrics.watch("draftproof:prefix_cache_bytes", "Bytes held by the prefix cache.",
                          lambda: prefixes.nbytes)
        exact = engine.acceptance if engine.lossy is None else "match"
        plain = Engine(engine.target, codec=engine.codec, acceptance=exact, shapes=engine.shapes)
        plain.lock, plain.prefixes = engine.lock, engine.prefixes
        self.queue = RequestQueue(engine, plain, metrics, worker, rows=limits.rows,
                                  limit=limits.queue, length=limits.length)
        self.grammars = Grammars(engine.codec, engine.target.vocab_size, engine.stop_tokens)
        self.marks, self.sampling = marks_of(engine.codec), default_sampling(engine)

    @property
    def busy(self) -> bool:
        """Whether a request is being read, waits or runs."""
        return bool(self.readings or self.queue.running or self.queue.waiting)

    def about(self) -> dict[str, object]:
        """The description for clients."""
        return {"max_model_len": self.queue.length, "drafter": self.engine.drafter.name,
                "drafters": list(self.queue.schedulers)}

    def close(self) -> None:
        """Release everything."""
        self.queue.close()
        self.metrics.close()

    def too_long(self, tokens: int) -> ContextTooLong:
        """The error for a prompt of this many tokens."""
        return ContextTooLong(
            f"the prompt has {tokens} tokens; this server takes {self.queue.length} tokens of "
            "prompt and answer together (--max-model-len)", tokens
        )  # fmt: skip

    def read(
        self, body: schema.GenerationBody, owner: int = 0
    ) -> tuple[list[Request], list[OutputReader]]:
        """Check a request, and convert it for the scheduler.

        Args:
            body: What the client sent.
            owner: Whose earlier texts may be used for it.

        Returns:
            A request for each prompt, and a reader for each sample, which splits its text; no
            readers if all of it is the answer.

        Raises:
            BadInput: Something in it cannot be honoured.
        """
        wanted, rest = constraints.split(body.model_extra or {})
        refuse_unrecognized(rest, self.engine.sampling)
        if body.stream_options is not None and not body.stream:
            raise BadInput("stream_options was given without stream; ask for both")
        sampling = sampling_of(self.sampling, rest)
        _check_ranges(sampling)
        if sampling.temperature and rest.get("seed") in (None, -1):  # a new text each time
            sampling = replace(sampling, seed=secrets.randbits(62))
        grammar = constraints.grammar_of(body.response_format, wanted)
        prompts, form, text = self._prompts(body)
        if isinstance(body, schema.Chat) and form is not None:
            grammar = call_grammar(body, form, self.engine.codec) or grammar
        if grammar is not None:
            rule = self.grammars.lark(grammar, owner)
            sampling = replace(sampling, logits_rules=(*sampling.logits_rules, rule))
        prompts, n = self.engine.requests.split_prompts(prompts), body.n or 1
        self.queue.check(body.draftproof.drafter, len(prompts), n)
        limited = sampling.max_new_tokens is not None or sampling.max_length is not None
        limit = None if limited else self.queue.length
        try:
            requests = self.engine.read(prompts, max_new_tokens=limit, sampling=sampling, n=n)
        except ContextTooLong as error:
            raise self.too_long(error.tokens) from None
        for request in requests:
            request.owner, request.priority = owner, body.priority or 0
            request.draft_trees = body.draftproof.trees
        if not isinstance(body, schema.Chat):
            return requests, []
        # a grammar applies from the first token on, which leaves no room for reasoning
        splits = body.splits_reasoning and grammar is None
        readers = self._readers(body, form, text, splits, len(requests) * n)
        self._show_marks(requests, readers)
        return requests, readers

    def _prompts(self, body: schema.GenerationBody) -> tuple[object, Form | None, str]:
        """The prompts, the form of calls if tools are offered, and the end of the chat's prompt."""
        if isinstance(body, schema.Completion):
            return body.prompt or "", None, ""
        assert isinstance(body, schema.Chat)
        codec = self.engine.codec
        template = str(codec.tokenizer.chat_template or "") if codec is not None else ""
        check_messages(body.messages, template)
        messages = with_known_roles(messages_of(body.messages), template)
        tools, form = offered(body, codec)
        messages, options = call_messages(messages, form), body.template_options()
        if codec is None or not (form is not None or options or self.marks is not None):
            return messages, form, ""
        text = codec.chat_text(messages, tools or None, options)
        return [codec.encode(text, special=False)], form, text

    def _readers(
        self, body: schema.Chat, form: Form | None, text: str, splits: bool, count: int
    ) -> list[OutputReader]:
        marks = self.marks if splits or self.marks == CHANNELS else None
        if marks is None and form is None:
            return []
        inside = marks is not None and is_open(text, marks)
        shown = body.include_reasoning is not False
        return [OutputReader(marks, inside, form, body.tools or (), shown=shown, splits=splits)
                for _ in range(count)]

    def _show_marks(self, requests: Sequence[Request], readers: Sequence[OutputReader]) -> None:
        """Show the special tokens that are marks in texts; others are left out."""
        codec = self.engine.codec
        if codec is None or not readers:
            return
        marks = readers[0].marks
        shown = {token: name for token, name in codec.special_tokens.items() if name in marks}
        for request in requests if shown else ():
            for sequence in request.sequences:
                sequence.detokenizer = codec.marked_stream(request.prompt, shown)


def _check_ranges(sampling: Sampling) -> None:
    """Refuse numbers that OpenAI's API and vLLM refuse but `Sampling` accepts."""
    for name, (low, high) in RANGES.items():
        if not low <= (value := getattr(sampling, name)) <= high:
            raise BadInput(f"{name} was {value!r:.60}; it must be from {low} to {high}")


def default_sampling(engine: Engine) -> Sampling:
    """The temperature of requests without one: 1, as OpenAI's clients expect, unless the model's
    own configuration says otherwise."""
    config = getattr(engine.target.model, "generation_config", None)
    says = engine.sampling.temperature > 0 or getattr(config, "do_sample", None) is False
    return engine.sampling if says else replace(engine.sampling, temperature=1.0)


