"""Section "architectures": every causal language model of the transformers at hand, tiny and random, run exactly or refused.

Reading trees asks much of a model: a cache that rolls back, positions and masks that it takes as they are given. Loading a
model checks a small tree; here whole texts are compared, longer than any window, for each architecture there is.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.errors import DraftproofError
from draftproof.model.target import Target
from draftproof.verify.report import Section, Tick, silent

VOCAB, CONTEXT, WINDOW, HEADS = 128, 256, 16, 4
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len"), CONTEXT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "swa_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("encoder_layers", "encoder_attention_heads"), 2),
    **dict.fromkeys(("pad_token_id", "eos_token_id"), None),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 64),
    "sliding_window": WINDOW, "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
"""What configurations call their sizes, whichever family they are of, and how small these are here."""
OF_ONE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "hrm_text": {"initializer_range": 0.1},     # reads its layers again and again, so that rounding would grow
    "moshi": {"sliding_window": CONTEXT},       # its cache crops what its forward sees; real ones have no shorter window either
}
"""Where an architecture wants something else."""
LARGE = 3e7
"""Parameters that a model is not made with."""
QUICK = ("bloom", "gemma3_text", "gpt2", "gpt_oss", "llama", "mamba", "opt", "phi3", "qwen3", "qwen3_moe")
"""Of a quick proof."""
PROMPTS, NEW_TOKENS = (24, 3, 9), 24


class Kind(StrEnum):
    """What came of an architecture."""

    exact = "exact"                     # trees and all
    chains = "exact, chains alone"
    refused = "refused"
    broken = "broken"                   # none may be
    unmade = "not made"                 # no small configuration was found, as for models that see or hear as well


class Finding(NamedTuple):
    """An architecture, what came of it, and what is to say about that."""

    name: str
    kind: Kind
    why: str = ""


def architectures() -> list[str]:
    """The model types that transformers has a causal language model for."""
    return sorted({config.model_type for config in AutoModelForCausalLM._model_mapping})


def prove_architectures(quick: bool = False, tick: Tick = silent, *, names: Sequence[str] | None = None) -> Section:
    """Examine every architecture, or these; passes if none is broken."""
    start, known = time.perf_counter(), architectures()
    asked = list(names) if names is not None else [name for name in QUICK if name in known] if quick else known
    found = []
    for place, name in enumerate(asked):
        tick(place / len(asked), name)
        found.append(examine(name))
    by_kind = {kind: [one for one in found if one.kind is kind] for kind in Kind}
    exact, chains, refused, broken, unmade = (len(by_kind[kind]) for kind in Kind)
    verdict = (
        f"of {len(found)} architectures of transformers {transformers.__version__}, tiny and random, {exact} are run exactly, "
        f"{chains} more by chains alone, {refused} are refused in a sentence"
        f"{f', {broken} are broken' if broken else ''}{f'; {unmade} could not be made so small' if unmade else ''}"
    )
    figures: dict[str, Any] = {kind: ", ".join(one.name for one in by_kind[kind]) for kind in (Kind.exact, Kind.chains)}
    figures |= {kind: {one.name: one.why for one in by_kind[kind]} for kind in (Kind.refused, Kind.unmade)}
    failures = [f"{one.name}: {one.why}" for one in by_kind[Kind.broken]]
    return Section("architectures", not broken, verdict, figures, failures, time.perf_counter() - start)


def examine(name: str, around: Callable[[Target], Target] = lambda target: target) -> Finding:
    """Write with a tiny model of this type, plainly and with drafts, and compare it with the model's own words.

    around: what stands between the model and the engine, for whoever wants to see that a mistake is found.
    """
    with _quiet():
        try:
            model = tiny(name)
        except Exception as error:                              # whatever a configuration raises that wants other sizes
            return Finding(name, Kind.unmade, _first_line(error))
        loaded = False
        try:
            target, loaded = around(Target(model)), True
            wrong = _wrong(model, target)
        except Exception as error:
            if isinstance(error, DraftproofError) and not loaded:               # what was not refused has to write
                return Finding(name, Kind.refused, str(error))
            return Finding(name, Kind.broken, f"{type(error).__name__}: {_first_line(error)}")
    if wrong:
        return Finding(name, Kind.broken, wrong)
    return Finding(name, Kind.exact if target.reads_trees else Kind.chains)


def tiny(name: str) -> PreTrainedModel:
    """A random model of this type, in float32, which all can do. Raises whatever its configuration or its making raises."""
    kind = next(config for config in AutoModelForCausalLM._model_mapping if config.model_type == name)
    config = _config(kind, OF_ONE.get(name, {}))
    with torch.device("meta"):
        if (size := sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())) > LARGE:
            raise ValueError(f"it has {size} parameters, however small its configuration is")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()
    return model


def _config(kind: Any, own: dict[str, Any]) -> Any:
    """A small configuration: by all of `SIZES` that this kind knows, or all but one."""
    usual = kind()
    known = {*usual.to_dict(), *kind.attribute_map, *inspect.signature(kind.__init__).parameters}
    sizes = {key: value for key, value in SIZES.items() if key in known or hasattr(usual, key)} | own
    if hasattr(usual, "kv_lora_rank"):                          # keys that are compressed have as many heads as queries
        sizes["num_key_value_heads"] = HEADS
    error: Exception | None = None
    for unwanted in (None, *sizes):
        try:
            return kind(**{key: value for key, value in sizes.items() if key != unwanted})
        except Exception as raised:                             # validators of all kinds
            error = error or raised
    assert error is not None
    raise error


class _Knows(Drafter):
    """Knows what will be written, and says it beside what will not: some of a tree stands, and most of it does not."""

    name, default_budget = "knows", 7

    def __init__(self, texts: Sequence[Sequence[int]], trees: bool) -> None:
        self.texts, self.trees = texts, trees

    def propose(self, frontier: Frontier) -> TokenTree:
        roots, paths = frontier.prefix.position.tolist(), []
        for line, root in zip(frontier.prefix.tokens.tolist(), roots, strict=True):
            so_far = line[: root + 1]
            ahead = next((text[root + 1 :] for text in self.texts if list(text[: root + 1]) == so_far), [])
            right = [*ahead, *[0] * 4][:4]
            stops = root % 5                                    # where the right path goes astray: anywhere, or nowhere
            mixed = [(token + (place == stops)) % VOCAB for place, token in enumerate(right)]
            astray = [right[0], *((token + 3) % VOCAB for token in right[1:3]), right[3]]
            paths.append([[so_far[-1], *astray], [so_far[-1], *mixed]])
        drafted = torch.tensor(paths)                           # [B, 2, 5]
        return TokenTree.from_paths(drafted, 8) if self.trees else TokenTree.chain(drafted[:, 1])


def _wrong(model: PreTrainedModel, target: Target) -> str:
    """What differs, in words; nothing if nothing does: the plain text from the model's own, and drafted ones from the plain."""
    dice = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCAB, (size,), generator=dice).tolist() for size in PROMPTS]
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        how = "sampled" if sampling.temperature else "greedy"

        def written(drafter: Drafter | None, budget: int, rows: int, sampling: Sampling = sampling) -> list[list[int]]:
            engine = Engine(target, drafter, budget=budget)
            done = engine.generate(prompts, max_new_tokens=NEW_TOKENS, sampling=sampling, batch_size=rows)
            return [one.checked().tokens for one in done]

        plain = written(None, 0, 1)
        if not sampling.temperature and (at := _parted(plain, [_own(model, prompt) for prompt in prompts])) is not None:
            return f"greedy text parts from the model's own {at}"
        texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
        for rows in (1, len(prompts)):
            at = _parted(written(_Knows(texts, target.reads_trees), _Knows.default_budget, rows), plain)
            if at is not None:
                return f"drafted text ({how}, {rows} at a time) parts from plain text {at}"
    return ""


def _own(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """What the model's own forward says, greedily, without any cache."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            logits: Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


def _parted(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str | None:
    """Where the first text differs, in words."""
    for number, (one, other) in enumerate(zip(some, others, strict=True), start=1):
        if list(one) != list(other):
            pairs = zip(one, other, strict=False)
            at = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(one), len(other)))
            return f"at token {at + 1} of text {number}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says about strange configurations."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
