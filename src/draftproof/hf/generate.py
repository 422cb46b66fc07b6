"""``model.generate(**inputs, custom_generate=draftproof.generate)``: transformers' call, our decoding.

transformers prepares everything (logits processors, stopping criteria, lengths, left padding) and
calls a function of this form in place of its own loop. Whatever it prepared is honoured, token by
token inside a round; what cannot be is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.engine.prompts import without_padding
from draftproof.errors import BadInput

WARPERS = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k",
           TopPLogitsWarper: "top_p", MinPLogitsWarper: "min_p"}
"""Processors that are options of ours, in the order in which both apply them."""
READ_HERE = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep",
             "cache_position", "token_type_ids"}
"""Model arguments that transformers makes for every model."""
ASSISTANT_TOKENS = 20
"""What transformers fills in where nobody says how many tokens to draft; it is measured then."""
ENGINES = 4
"""Engines kept with a model: one for each choice of drafter."""


class _Engines(dict[Any, Engine]):
    """Engines kept with a model; copies of the model do not take them along."""

    def __deepcopy__(self, memo: object) -> _Engines:
        return _Engines()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Engines, ()


def generate(
    model: Any, input_ids: Tensor, logits_processor: Any = None, stopping_criteria: Any = None,
    generation_config: Any = None, synced_gpus: bool = False, streamer: Any = None,
    assistant_model: Any = None, drafter: Any = None, num_assistant_tokens: int | None = None,
    acceptance: str | None = None, **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode for `model.generate`, which calls this: see ``custom_generate`` in transformers.

    input_ids: [B, S], left-padded where `attention_mask` is 0.
    acceptance: as for `draftproof.load`; with neither of the first two, the default drafter.
    `num_assistant_tokens` fixes the number of draft tokens; left out, it is measured.
    Returns [B, S + new] ids, or the output class if `return_dict_in_generate`. Greedy tokens are
    those of transformers; sampled ones have the same distribution, and depend on `torch.manual_seed`.
    Raises BadInput for what cannot be honoured.
    """
    if assistant_model is None and streamer is None:        # transformers 5.23 hands on neither
        caller = sys._getframe(1).f_locals
        assistant_model, streamer = caller.get("assistant_model"), caller.get("streamer")
    config = generation_config or model.generation_config
    _refuse(config, model_kwargs, synced_gpus)
    mask = model_kwargs.get("attention_mask")
    batch = _Batch.of(input_ids, mask, model_kwargs.get("position_ids"))
    processors = list(logits_processor or ())
    criteria = list(stopping_criteria or ())
    engine = _engine(model, assistant_model, drafter, num_assistant_tokens, acceptance, config)
    limit = batch.limit(criteria, config)
    asked = batch.sampling(processors, criteria, config.do_sample)
    texts = _decode(engine, batch.prompts, limit, asked, streamer)
    longest, pad = max(map(len, texts)), _pad_token(config)
    if min(map(len, texts)) < longest and not asked[0].stop_tokens:
        # without an end token transformers lets rows that a criterion ended go on beside the others
        asked = [replace(one, stop_when=()) for one in asked]
        texts = _decode(engine, batch.prompts, longest, asked)
    new = [[*tokens, *[pad] * (longest - len(tokens))] for tokens in texts]
    sequences = torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], 1)
    if not config.return_dict_in_generate:
        return sequences
    wanted = config.output_scores or config.output_logits
    logits = _logits(model, sequences, mask, longest) if wanted else None
    scores = None
    if logits is not None and config.output_scores:
        process, start = LogitsProcessorList(processors), input_ids.shape[1]
        scores = tuple(process(sequences[:, : start + step], one.clone()) for step, one in enumerate(logits))
    return GenerateDecoderOnlyOutput(
        sequences=sequences, scores=scores, logits=logits if config.output_logits else None)


def _decode(
    engine: Engine, prompts: list[list[int]], limit: int, asked: list[Sampling], streamer: Any = None
) -> list[list[int]]:
    """New tokens of each prompt; the streamer gets those of the first one as they come."""
    rows, told = list[Any](), 0
    for active in engine.rounds(prompts, max_new_tokens=limit, sampling=asked, batch_size=len(prompts)):
        rows = rows or list(active)
        if streamer is not None:
            for token in rows[0].tokens[told:]:
                streamer.put(torch.tensor([token]))
            told = len(rows[0].tokens)
    if streamer is not None:
        streamer.end()
    for row in rows:
        if row.error is not None:
            raise row.error
    return [row.tokens for row in sorted(rows, key=lambda row: row.request)]


@dataclass(frozen=True)
class _Batch:
    """Rows without their padding. ids: [B, S] as given. prompts: of each row. """

    ids: Tensor
    prompts: list[list[int]]

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> _Batch:
        """Raises BadInput where a row is padded anywhere but before its text."""
        texts = without_padding(ids, mask)
        there = torch.ones_like(ids) if mask is None else mask.to(ids.device).long()
        counted = (there.cumsum(1) - 1).clamp(min=0)
        if positions is not None and not torch.equal(
            (positions * there).to(ids.device), counted * there
        ):
            raise BadInput(
                "position_ids other than those of the attention mask were given; leave them out"
            )
        return cls(ids, texts)

    def limit(self, criteria: list[Any], config: Any) -> int:
        """New tokens that the lengths among the criteria, taken out of them, allow."""
        lengths = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
        criteria[:] = [one for one in criteria if not isinstance(one, MaxLengthCriteria)]
        return int(min(lengths or [config.max_length])) - self.ids.shape[1]

    def sampling(self, processors: list[Any], criteria: list[Any], drawn: bool) -> list[Sampling]:
        """What each row asks for: warpers as options, the rest called as transformers calls it."""
        options: dict[str, Any] = {"temperature": 1.0 if drawn else 0.0}
        rest, order = list(processors), list(WARPERS)
        while drawn and rest and type(rest[-1]) in order:
            kind = order[: order.index(type(rest[-1])) + 1].pop()
            order = order[: order.index(kind)]
            name, one = WARPERS[kind], rest.pop()
            if getattr(one, "min_tokens_to_keep", 1) > 1 or getattr(one, "filter_value", -torch.inf) != -torch.inf:
                rest.append(one)
                break
            options[name] = getattr(one, name)
        ends = [token for one in criteria if isinstance(one, EosTokenCriteria)
                for token in one.eos_token_id.flatten().tolist()]
        others = StoppingCriteriaList(one for one in criteria if not isinstance(one, EosTokenCriteria))
        seeds = torch.randint(2**62, (len(self.prompts),)).tolist() if drawn else [0] * len(self.prompts)
        return [Sampling(
            **options, seed=seed, stop_tokens=ends,
            processors=[_Processor(one, self.ids, row, len(prompt)) for one in rest],
            stop_when=[_Criteria(others, self.ids, row, len(prompt))] if others else (),
        ) for row, (prompt, seed) in enumerate(zip(self.prompts, seeds, strict=True))]


@dataclass(frozen=True)
class _Row:
    """Gives a row's text [1, L] back its padding and its place in the batch [B, S]."""

    inner: Any
    ids: Tensor
    row: int
    length: int

    def padded(self, text: Tensor) -> Tensor:
        padding = self.ids[self.row : self.row + 1, : self.ids.shape[1] - self.length]
        return torch.cat([padding.to(text.device), text], 1).expand(len(self.ids), -1)


class _Processor(_Row):
    def __call__(self, text: Tensor, scores: Tensor) -> Tensor:
        processed: Tensor = self.inner(self.padded(text), scores.expand(len(self.ids), -1).clone())
        return processed[self.row : self.row + 1]


class _Criteria(_Row):
    def __call__(self, text: Tensor) -> bool:
        return bool(self.inner(self.padded(text), None)[self.row])


def _engine(
    model: Any, assistant: Any, drafter: Any, budget: int | None, acceptance: str | None, config: Any
) -> Engine:
    """The engine of this model and drafter; kept with the model."""
    if assistant is not None and drafter is not None:
        raise BadInput("both assistant_model and drafter were given; give one of them")
    if isinstance(drafter, torch.nn.Module):
        assistant, drafter = drafter, None
    if assistant is None and drafter is None and config.prompt_lookup_num_tokens:
        drafter = "prompt-lookup"
    if budget is None and config.num_assistant_tokens != ASSISTANT_TOKENS:
        budget = config.num_assistant_tokens
    budget = budget or config.prompt_lookup_num_tokens
    known = model.__dict__.setdefault("_draftproof", _Engines())
    named = drafter if isinstance(drafter, str) else id(drafter)
    key = (id(assistant), named, acceptance, budget)
    engine = known.pop(key, None) or load(
        model, assistant_model=assistant, drafter=drafter, acceptance=acceptance, budget=budget)
    known[key] = engine                                         # the last used is last
    for old in list(known)[:-ENGINES]:
        del known[old]
    return engine


def _refuse(config: Any, model_kwargs: Mapping[str, Any], synced: bool) -> None:
    """Raise BadInput, by name, for what would change the text, or is asked for and not made."""
    asked = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
    asked += [f"num_beams={config.num_beams}"] * ((config.num_beams or 1) > 1)
    asked += ["cache_implementation='quantized'"] * (config.cache_implementation == "quantized")
    asked += ["synced_gpus"] * bool(synced)
    asked += [name for name, value in model_kwargs.items() if name not in READ_HERE and value is not None]
    types = model_kwargs.get("token_type_ids")
    asked += ["token_type_ids"] * (types is not None and bool((types != 0).any()))
    if asked:
        raise BadInput(f"{asked[0]} was asked for, which draftproof.generate does not honour; leave it out")


def _pad_token(config: Any) -> int:
    """What transformers fills ended rows with."""
    found = config.pad_token_id
    if found is None:
        found = config.eos_token_id
    return int(found[0] if isinstance(found, Sequence) else found) if found is not None else 0


@torch.no_grad()
def _logits(model: Any, sequences: Tensor, mask: Tensor | None, new: int) -> tuple[Tensor, ...]:
    """Of each new token, the model's logits [B, V], by one forward over the whole text."""
    ids, extra = sequences[:, :-1], dict[str, Any]()
    if mask is not None:
        behind = torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=mask.dtype, device=mask.device)
        extra["attention_mask"] = torch.cat([mask, behind], 1)
        if "position_ids" in inspect.signature(model.forward).parameters:
            extra["position_ids"] = (extra["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = model(ids, **extra).logits[:, -new:].float()
    return tuple(logits.unbind(1))
