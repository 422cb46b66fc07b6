"""Section "architectures": every causal language model and encoder–decoder of the installed
transformers, tiny and random, must run exactly or be refused. Whole texts, longer than any window,
are compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.errors import DraftproofError
from draftproof.model.target import Target, target_of
from draftproof.requests.completion import first_difference
from draftproof.requests.prompts import Prompt
from draftproof.verify.report import Section, Tick, failed, silent
from draftproof.verify.small_models import VOCAB, architectures, prompts, tiny, variants

QUICK = (
    "bloom", "gemma3_text", "gpt2", "gpt_oss", "llama", "mamba", "opt", "phi3", "qwen3",
    "qwen3_moe",
)  # fmt: skip
PROMPTS, NEW_TOKENS = (24, 3, 9), 20


class Kind(StrEnum):
    """The result for an architecture, with the worst last: none may be broken; some have no small
    configuration."""

    exact = "exact"
    chains = "exact, chains alone"
    refused = "refused"
    unmade = "not made"
    broken = "broken"


def prove_architectures(
    quick: bool = False, tick: Tick = silent, *, names: Sequence[str] | None = None
) -> Section:
    """Check every architecture, or these; passes if none is broken."""
    known, results = list(architectures()), dict[str, dict[str, str]]((kind, {}) for kind in Kind)
    names = names if names is not None else [n for n in QUICK if n in known] if quick else known
    for place, name in enumerate(names):
        tick(place / len(names), name)
        kind, why = check_architecture(name)
        results[kind][name] = why
    count = {kind: len(ones) for kind, ones in results.items()}
    verdict = (
        f"of {len(names)} architectures of transformers {transformers.__version__}, tiny and "
        f"random, {count[Kind.exact]} are run exactly, {count[Kind.chains]} more by chains "
        f"alone, {count[Kind.refused]} are refused in a sentence, {count[Kind.broken]} are "
        f"broken; {count[Kind.unmade]} could not be made so small"
    )
    failures = [f"{name}: {why}" for name, why in results.pop(Kind.broken).items()]
    return Section("architectures", verdict, results, failures)


def check_architecture(
    name: str, around: Callable[[Target], Target] = lambda target: target
) -> tuple[Kind, str]:
    """Write with a tiny model of this type, plainly and with drafts, and compare with its own text.
    Returns the result and its reason.

    around: wraps the model for the engine, to show that a mistake there is found.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        results = [_check_variant(name, settings, around) for settings in variants(name)]
        return max(results, key=lambda result: list(Kind).index(result[0]))
    finally:
        transformers_logging.set_verbosity(level)


def _check_variant(
    name: str, settings: Mapping[str, object], around: Callable[[Target], Target]
) -> tuple[Kind, str]:
    """The result for one of its variants."""
    try:
        model = tiny(name, settings)
    except Exception as error:                      # a configuration that needs other sizes
        return Kind.unmade, failed(error)
    try:
        target = around(target_of(model))
    except DraftproofError as error:
        return Kind.refused, str(error)
    except Exception as error:
        return Kind.broken, failed(error)
    trees = target.reads_trees
    try:
        wrong = _wrong(model, target)
    except Exception as error:                      # models that are not refused have to write
        wrong = failed(error)
    return Kind.broken if wrong else Kind.exact if trees else Kind.chains, wrong


class _Knows(Drafter):
    """Drafts trees with the text that will be written and another, so that a part is accepted."""

    name, max_draft_tokens = "knows", 7

    def __init__(self, texts: Sequence[Sequence[int]], trees: bool) -> None:
        self.texts, self.trees = texts, trees

    def propose(self, frontier: Frontier) -> TokenTree:
        roots, paths = frontier.prefix.position.tolist(), []
        for line, root in zip(frontier.prefix.tokens.tolist(), roots, strict=True):
            so_far = line[: root + 1]
            known = (text[root + 1 :] for text in self.texts if list(text[: root + 1]) == so_far)
            right = [*next(known, []), *[0] * 4][:4]
            mixed = [(token + (place == root % 5)) % VOCAB for place, token in enumerate(right)]
            rejected = [right[0], *((token + 3) % VOCAB for token in right[1:3]), right[3]]
            paths.append([[so_far[-1], *rejected], [so_far[-1], *mixed]])
        drafted = torch.tensor(paths)                           # [B, 2, 5]
        return TokenTree.from_paths(drafted, 8) if self.trees else TokenTree.chain(drafted[:, 1])


def _wrong(model: PreTrainedModel, target: Target) -> str:
    """The first difference of plain text from the model's own, or of drafted from plain; or ""."""
    inputs = prompts(model, PROMPTS)
    begun = [Engine(target).requests.begun(prompt)[0] for prompt in inputs]
    # without a cache some decoders skip padding, or do not see it
    padding = getattr(model.config, "pad_token_id", None) if target.is_encoder_decoder else None
    never = {} if padding is None else {padding: -1e9}

    def written(engine: Engine, want: Sampling, rows: int) -> list[list[int]]:
        want = replace(want, logit_bias=never)
        done = engine.generate(inputs, sampling=want, max_new_tokens=NEW_TOKENS, batch_size=rows)
        return [completion.checked().tokens for completion in done]

    for how, want in {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=3)}.items():
        plain = written(Engine(target), want, 1)
        if how == "greedy":
            reference = [
                _reference_text(model, *both, never) for both in zip(inputs, begun, strict=True)
            ]
            if at := _parted(plain, reference):
                return f"greedy text parts from the model's own {at}"
        texts = [[*prompt, *tokens] for prompt, tokens in zip(begun, plain, strict=True)]
        for rows in (1, len(inputs)):
            drafter = _Knows(texts, target.reads_trees)
            engine = Engine(target, drafter, budget=drafter.max_draft_tokens)
            if at := _parted(written(engine, want, rows), plain):
                return f"drafted text ({how}, {rows} at a time) parts from plain text {at}"
    return ""


@torch.inference_mode()
def _reference_text(
    model: PreTrainedModel, prompt: Prompt, begun: Sequence[int], never: Collection[int]
) -> list[int]:
    """The greedy text of the model's own forward, without any cache."""
    text, encoded = list(begun), dict[str, object]()
    if model.config.is_encoder_decoder:
        encoded = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
    for _ in range(NEW_TOKENS):
        name = "decoder_input_ids" if encoded else "input_ids"
        logits = model(**{**encoded, name: torch.tensor([text])}, use_cache=False).logits[0, -1]
        logits[list(never)] = -torch.inf
        text.append(int(logits.argmax()))
    return text[len(begun) :]


def _parted(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str:
    """The position of the first difference between texts, in words."""
    for number, (text, other) in enumerate(zip(texts, others, strict=True), start=1):
        if at := first_difference(text, other):
            return f"at token {at} of text {number}"
    return ""
