"""Section "architectures": every causal language model and encoder–decoder of the installed
transformers, tiny and random, run exactly or refused. Whole texts are compared, longer than any
window."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.completion import first_difference
from draftproof.engine.engine import Engine
from draftproof.errors import DraftproofError
from draftproof.model.encoder_decoder import target_of
from draftproof.model.target import Target
from draftproof.verify.report import Section, Tick, failed, silent
from draftproof.verify.small_models import (
    VOCAB,
    architectures,
    encoder_decoders,
    prompts,
    tiny,
    variants,
)

QUICK = (
    "bloom", "gemma3_text", "gpt2", "gpt_oss", "llama", "mamba", "opt", "phi3", "qwen3",
    "qwen3_moe",
)
PROMPTS, NEW_TOKENS = (24, 3, 9), 20


LISTS = "## By type in `config.json`"
"""The heading in docs/models.md behind which everything is written by `listed`."""


class Kind(StrEnum):
    """What came of an architecture, the worst last: none may be broken; some find no small
    configuration."""

    exact = "exact"
    chains = "exact, chains alone"
    refused = "refused"
    unmade = "not made"
    broken = "broken"


WORDS = {Kind.exact: "Trees", Kind.chains: "Chains"}


class Finding(NamedTuple):
    """An architecture, what came of it, and why."""

    name: str
    kind: Kind
    why: str = ""


def prove_architectures(
    quick: bool = False, tick: Tick = silent, *, names: Sequence[str] | None = None
) -> Section:
    """Examine every architecture, or these; passes if none is broken."""
    known, found = list(architectures()), list[Finding]()
    names = names if names is not None else [n for n in QUICK if n in known] if quick else known
    for place, name in enumerate(names):
        tick(place / len(names), name)
        found.append(examine(name))
    of = {kind: {one.name: one.why for one in found if one.kind is kind} for kind in Kind}
    verdict = (
        f"of {len(found)} architectures of transformers {transformers.__version__}, tiny and "
        f"random, {len(of[Kind.exact])} are run exactly, {len(of[Kind.chains])} more by chains "
        f"alone, {len(of[Kind.refused])} are refused in a sentence, {len(of[Kind.broken])} are "
        f"broken; {len(of[Kind.unmade])} could not be made so small"
    )
    figures: dict[str, Any] = {kind: ", ".join(of[kind]) for kind in (Kind.exact, Kind.chains)}
    figures |= {kind: of[kind] for kind in (Kind.refused, Kind.unmade)}
    failures = [f"{name}: {why}" for name, why in of[Kind.broken].items()]
    return Section("architectures", verdict, figures, failures)


def write_lists(section: Section, page: Path) -> None:
    """Write the lists of docs/models.md anew, behind their heading."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    page.write_text(text.partition(LISTS)[0] + listed(section), encoding="utf-8")


def listed(section: Section) -> str:
    """What the section found, type by type, in Markdown: the end of docs/models.md."""
    found, lines, whole = section.figures, [LISTS], encoder_decoders()
    for kind, words in WORDS.items():
        names = found[kind].split(", ") if found[kind] else []
        parts = {words: [name for name in names if name not in whole],
                 f"{words}, encoder–decoders": [name for name in names if name in whole]}
        lines += [f"**{what}**: {', '.join(part)}." for what, part in parts.items() if part]
    for kind in (Kind.refused, Kind.unmade):
        reasons: dict[str, list[str]] = {}
        for name, why in sorted(found[kind].items()):
            reasons.setdefault(_without_name(why), []).append(name)
        title = "Refused, with this sentence" if kind is Kind.refused else "Not made so small"
        if not reasons:
            continue
        lines += ["\n".join([f"**{title}**:", *(
            f"- {', '.join(names)}: {why}" for why, names in sorted(reasons.items())
        )])]
    return "\n\n".join(lines) + "\n"


def _without_name(why: str) -> str:
    """A reason, of whichever class of model, and without what that said itself."""
    reason = re.sub(r"^\w+(?:For\w+|Model\w*) ", "", " ".join(why.split()))
    return re.sub(r" \(.*\);", ";", reason)


def examine(name: str, around: Callable[[Target], Target] = lambda target: target) -> Finding:
    """Write with a tiny model of this type, plainly and with drafts; compare with its own words.

    around: what stands between the model and the engine, to show that a mistake there is found.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        found = [_examined(name, own, around) for own in variants(name)]
        return max(found, key=lambda one: list(Kind).index(one.kind))
    finally:
        transformers_logging.set_verbosity(level)


def _examined(
    name: str, own: Mapping[str, Any], around: Callable[[Target], Target]
) -> Finding:
    """What came of one of its variants."""
    loaded = False
    try:
        try:
            model = tiny(name, own)
        except Exception as error:                  # a configuration that wants other sizes
            return Finding(name, Kind.unmade, failed(error))
        target = around(target_of(model))
        loaded, trees = True, target.reads_trees
        if wrong := _wrong(model, target):
            return Finding(name, Kind.broken, wrong)
        return Finding(name, Kind.exact if trees else Kind.chains)
    except DraftproofError as error:                # what was not refused has to write
        return Finding(name, Kind.broken if loaded else Kind.refused, str(error))
    except Exception as error:
        return Finding(name, Kind.broken, failed(error))


class _Knows(Drafter):
    """Knows what will be written and says it beside what will not: part of a tree is accepted."""

    name, default_budget = "knows", 7

    def __init__(self, texts: Sequence[Sequence[int]], trees: bool) -> None:
        self.texts, self.trees = texts, trees

    def propose(self, frontier: Frontier) -> TokenTree:
        roots, paths = frontier.prefix.position.tolist(), []
        for line, root in zip(frontier.prefix.tokens.tolist(), roots, strict=True):
            so_far = line[: root + 1]
            known = (text[root + 1 :] for text in self.texts if list(text[: root + 1]) == so_far)
            right = [*next(known, []), *[0] * 4][:4]
            mixed = [(token + (place == root % 5)) % VOCAB for place, token in enumerate(right)]
            astray = [right[0], *((token + 3) % VOCAB for token in right[1:3]), right[3]]
            paths.append([[so_far[-1], *astray], [so_far[-1], *mixed]])
        drafted = torch.tensor(paths)                           # [B, 2, 5]
        return TokenTree.from_paths(drafted, 8) if self.trees else TokenTree.chain(drafted[:, 1])


def _wrong(model: PreTrainedModel, target: Target) -> str:
    """Where plain text differs from the model's own, or drafted text from plain; "" if nowhere."""
    asked = prompts(model, PROMPTS)
    begun = [Engine(target).requests.begun(prompt)[0] for prompt in asked]
    # without a cache some decoders skip padding, or do not see it
    padding = getattr(model.config, "pad_token_id", None) if target.encodes else None
    never = {} if padding is None else {padding: -1e9}

    def written(engine: Engine, want: Sampling, rows: int) -> list[list[int]]:
        want = replace(want, logit_bias=never)
        done = engine.generate(asked, sampling=want, max_new_tokens=NEW_TOKENS, batch_size=rows)
        return [one.checked().tokens for one in done]

    for how, want in {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=3)}.items():
        plain = written(Engine(target), want, 1)
        if how == "greedy":
            own = [_own(model, *both, never) for both in zip(asked, begun, strict=True)]
            if at := _parted(plain, own):
                return f"greedy text parts from the model's own {at}"
        texts = [[*prompt, *tokens] for prompt, tokens in zip(begun, plain, strict=True)]
        for rows in (1, len(asked)):
            engine = Engine(target, _Knows(texts, target.reads_trees), budget=_Knows.default_budget)
            if at := _parted(written(engine, want, rows), plain):
                return f"drafted text ({how}, {rows} at a time) parts from plain text {at}"
    return ""


@torch.inference_mode()
def _own(
    model: PreTrainedModel, prompt: Any, begun: Sequence[int], never: Collection[int]
) -> list[int]:
    """What the model's own forward says, greedily, without any cache."""
    text, encoded = list(begun), dict[str, Any]()
    if model.config.is_encoder_decoder:
        encoded = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
    for _ in range(NEW_TOKENS):
        name = "decoder_input_ids" if encoded else "input_ids"
        logits = model(**{**encoded, name: torch.tensor([text])}, use_cache=False).logits[0, -1]
        logits[list(never)] = -torch.inf
        text.append(int(logits.argmax()))
    return text[len(begun) :]


def _parted(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str:
    """Where the first text differs, in words."""
    for number, (one, other) in enumerate(zip(some, others, strict=True), start=1):
        if at := first_difference(one, other):
            return f"at token {at} of text {number}"
    return ""
