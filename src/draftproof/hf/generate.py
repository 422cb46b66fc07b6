"""``model.generate(**inputs, custom_generate=draftproof.generate)``: our decoding in their call.

transformers prepares everything (logits processors, stopping criteria, lengths, left padding) and
calls this function in place of its own loop. All of it is honoured, token by token within a round,
or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from draftproof.core.params import Sampling
from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.hf.arguments import encoded_rows, logits_of, reject_unsupported
from draftproof.hf.call import ending, find_call, keep_tokenizer
from draftproof.model.module_target import ModuleTarget
from draftproof.requests.prompts import Prompt, without_padding
from draftproof.requests.sequence import SequenceState

keep_tokenizer()

WARPERS = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k",
           TopPLogitsWarper: "top_p", MinPLogitsWarper: "min_p"}  # fmt: skip
"""Processors that are options of ours, in the order in which both apply them."""
ENGINES = 4
"""The attribute of a model that keeps its engines."""
ENCODED = ("encoder_outputs", "attention_mask", "decoder_attention_mask")
"""Arguments of an encoder-decoder's forward other than its text."""


class _Engines(dict[tuple[object, ...], Engine]):
    """Engines attached to a model, but not to its copies."""

    def __reduce__(self) -> tuple[object, ...]:
        return _Engines, ()


def generate(
    model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None, synced_gpus: bool = False,
    streamer: BaseStreamer | None = None, assistant_model: PreTrainedModel | None = None,
    drafter: str | Path | Drafter | None = None, num_assistant_tokens: int | None = None,
    acceptance: str | None = None, inputs_tensor: Tensor | None = None, **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:  # fmt: skip
    """Decode for `model.generate`, which calls this: see ``custom_generate`` in transformers.

    Greedy tokens are those of transformers; sampled ones have the same distribution, and depend on
    `torch.manual_seed`.

    Args:
        model: The model whose `generate` calls this.
        input_ids: int64 [B, S], left-padded where `attention_mask` is 0; of an encoder-decoder,
            what the decoder begins with.
        logits_processor: Processors and warpers that transformers made.
        stopping_criteria: Criteria that transformers made.
        generation_config: What the call asks for; None takes the model's own.
        synced_gpus: Refused unless False.
        streamer: Gets the tokens of all rows, one place at a time.
        assistant_model: A draft model.
        drafter: As for `draftproof.load`; without drafter and assistant, the default one.
        num_assistant_tokens: Draft tokens per round; None measures how many pay.
        acceptance: As for `draftproof.load`.
        inputs_tensor: What the encoder read.
        **model_kwargs: The model's own arguments, such as `attention_mask`.

    Returns:
        int64 [B, S + new] ids, or transformers' output class with `return_dict_in_generate`.

    Raises:
        BadInput: Something was asked for that cannot be honoured; its name is in the message.

    Example:
        >>> model.generate(**inputs, custom_generate=dp.generate, max_new_tokens=100)
    """
    call = find_call(generate.__code__)
    assistant_model = call.assistant_model if assistant_model is None else assistant_model
    streamer = call.streamer if streamer is None else streamer
    config = generation_config or model.generation_config
    is_encoder_decoder = model.config.is_encoder_decoder
    mask = model_kwargs.get("decoder_attention_mask" if is_encoder_decoder else "attention_mask")
    processors, criteria = list(logits_processor or ()), list(stopping_criteria or ())
    with ending(streamer), _evaluating(model):
        reject_unsupported(model, input_ids, config, model_kwargs, synced_gpus)
        engine = _engine(model, assistant_model, drafter, num_assistant_tokens, acceptance, config)
        prompts = without_padding(input_ids, mask)
        sampling = _sampling(input_ids, prompts, processors, criteria, bool(config.do_sample))
        rows: Sequence[Prompt] = prompts
        if is_encoder_decoder:
            rows = encoded_rows(model, prompts, inputs_tensor, model_kwargs)
        new = _decode(engine, input_ids, rows, criteria, sampling, config, streamer)
        sequences = torch.cat([input_ids, new.to(input_ids.device)], 1)
        if not config.return_dict_in_generate:
            return sequences
        encoded = {name: model_kwargs.get(name) for name in ENCODED} if is_encoder_decoder else {}
        return _output(model, sequences, new.shape[1], mask, encoded, processors, config)


def _output(
    model: PreTrainedModel, sequences: Tensor, new: int, mask: Tensor | None,
    encoded: dict[str, Any], processors: list[LogitsProcessor], config: GenerationConfig,
) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:  # fmt: skip
    """Transformers' output class for sequences that end with so many new tokens, with the logits
    and scores that the configuration asks for."""
    wanted = config.output_scores or config.output_logits
    logits = logits_of(model, sequences, mask, new, encoded) if wanted else None
    scores = None
    if logits is not None and config.output_scores:
        process, start = LogitsProcessorList(processors), sequences.shape[1] - new
        scores = tuple(
            process(sequences[:, : start + step], row.clone()) for step, row in enumerate(logits)
        )
    is_encoder_decoder = model.config.is_encoder_decoder
    kind = GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput
    return kind(
        sequences=sequences, scores=scores, logits=logits if config.output_logits else None
    )


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put the model in evaluation mode, without dropout, and restore training modes afterwards."""
    training = [part for part in model.modules() if part.training] if model.training else []
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _decode(
    engine: Engine, ids: Tensor, prompts: Sequence[Prompt], criteria: Sequence[StoppingCriteria],
    sampling: list[Sampling], config: GenerationConfig, streamer: BaseStreamer | None,
) -> Tensor:  # fmt: skip
    """Return the new tokens [B, new] after ids [B, S]; rows that end early are padded.

    Streamer and criteria receive one token of all rows at a time, as in transformers, however many
    a round brings, since a criterion may read the whole batch and keep state. Without an end token
    a row continues until all have ended.
    """
    lengths = [criterion.max_length for criterion in criteria
               if isinstance(criterion, MaxLengthCriteria)]
    limit, pads = min(lengths or [config.max_length]), any(map(_ends, criteria))
    others = [criterion for criterion in criteria
              if not (isinstance(criterion, MaxLengthCriteria) or _ends(criterion))]
    stops, filler = StoppingCriteriaList(others), getattr(config, "_pad_token_tensor", None)
    pad = 0 if filler is None else int(filler)
    new, going = list[list[int]](), [True] * len(prompts)
    most = int(limit) - ids.shape[1]
    requests = engine.read(prompts, max_new_tokens=most, sampling=sampling)
    rows = [request.sequences[0] for request in requests]
    with engine.scheduled(requests, len(prompts)) as scheduler:
        while any(going) and scheduler.has_unfinished_requests():
            for update in scheduler.step():
                if update.completion is not None:
                    update.completion.checked()
            while any(going):
                step = len(new)
                write = [(goes or not pads) and not _over(row, step)
                         for row, goes in zip(rows, going, strict=True)]  # fmt: skip
                pairs = list(zip(rows, write, strict=True))
                if any(writes and len(row.tokens) == step for row, writes in pairs):
                    break                                           # a row is not there yet
                new.append([row.tokens[step] if writes else pad for row, writes in pairs])
                if streamer is not None:
                    streamer.put(torch.tensor(new[-1]))
                stopped = [False] * len(rows)
                if others:
                    text = torch.cat([ids, torch.tensor(new).T.to(ids)], 1)
                    stopped = stops(text, None).tolist()
                going = [goes and not stop and not _over(row, step + 1)
                         for row, goes, stop in zip(rows, going, stopped, strict=True)]  # fmt: skip
                for request, goes in zip(requests, going, strict=True):
                    if pads and not goes:
                        scheduler.abort(request)
    return torch.tensor(new).T


def _ends(criterion: StoppingCriteria) -> bool:
    return isinstance(criterion, EosTokenCriteria)


def _over(row: SequenceState, step: int) -> bool:
    return bool(row.finish_reason) and len(row.tokens) <= step


def _sampling(
    ids: Tensor, prompts: list[list[int]], processors: Sequence[LogitsProcessor],
    criteria: Sequence[StoppingCriteria], drawn: bool,
) -> list[Sampling]:
    """The sampling of each row, with warpers as options and other processors called as they are."""
    options: dict[str, Any] = {"temperature": 1.0 if drawn else 0.0}
    rest, order = list(processors), list(WARPERS)
    while drawn and rest and (kind := type(rest[-1])) in order and _is_option(rest[-1]):
        order = order[: order.index(kind)]
        options[WARPERS[kind]] = getattr(rest.pop(), WARPERS[kind])
    ends = [token for criterion in criteria if isinstance(criterion, EosTokenCriteria)
            for token in criterion.eos_token_id.flatten().tolist()]  # fmt: skip
    seeds = torch.randint(2**62, (len(prompts),)).tolist() if drawn else [0] * len(prompts)
    return [
        Sampling(
            **options, seed=seed, stop_tokens=ends,
            processors=[_Processor(rule, ids, row, len(prompt)) for rule in rest],
        )
        for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]


def _is_option(warper: LogitsProcessor) -> bool:
    """Whether a warper sets removed tokens to -inf, and may leave a single token."""
    fills = getattr(warper, "filter_value", -torch.inf)
    return bool(fills == -torch.inf and getattr(warper, "min_tokens_to_keep", 1) <= 1)


class _Processor:
    """Calls a processor for a row's text [1, L], with its padding, at its place in the batch."""

    def __init__(self, inner: LogitsProcessor, ids: Tensor, row: int, length: int) -> None:
        self.inner, self.row, self.rows = inner, row, len(ids)
        self.padding = ids[row : row + 1, : ids.shape[1] - length]
        self.__name__ = getattr(inner, "__name__", type(inner).__name__)

    def __call__(self, text: Tensor, scores: Tensor) -> Tensor:
        padded = torch.cat([self.padding.to(text.device), text], 1).expand(self.rows, -1)
        processed: Tensor = self.inner(padded, scores.expand(self.rows, -1).clone())
        return processed[self.row : self.row + 1]


def _engine(
    model: PreTrainedModel, assistant: PreTrainedModel | None,
    drafter: str | Path | Drafter | None, budget: int | None, acceptance: str | None,
    config: GenerationConfig,
) -> Engine:
    """The engine of this model and drafter, which is kept with the model."""
    if assistant is not None and drafter is not None:
        raise BadInput("both assistant_model and drafter were given; give one of them")
    if isinstance(drafter, torch.nn.Module):
        assistant, drafter = drafter, None
    if assistant is None and drafter is None:
        if config.prompt_lookup_num_tokens:
            drafter = "prompt-lookup"
        elif config.assistant_early_exit:
            drafter = f"self-layers:{config.assistant_early_exit}"
    if budget is None and config.num_assistant_tokens != 20:    # transformers' default
        budget = config.num_assistant_tokens
    budget = budget or config.prompt_lookup_num_tokens
    known: _Engines = model.__dict__.setdefault("_draftproof", _Engines())
    named = str(drafter) if isinstance(drafter, (str, Path)) else id(drafter)
    size = model.config.get_text_config().vocab_size
    key = (id(assistant), named, acceptance, budget, model.dtype, model.device, size)
    if key not in known:
        while len(known) >= ENGINES:                    # remove the oldest
            del known[next(iter(known))]
        known[key] = engine = load(
            model, assistant_model=assistant, drafter=drafter, acceptance=acceptance, budget=budget
        )
        for target in (engine.target, getattr(engine.drafter, "model", None)):
            if isinstance(target, ModuleTarget) and target.model is model:
                target.hold_weakly()                    # since the model holds the engine
    return known[key]
