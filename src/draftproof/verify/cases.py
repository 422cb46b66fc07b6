"""What is run to prove the engine: tiny models, ways to draft, options, and every combination."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES, Rule
from draftproof.core.params import LogitsProcessor, Sampling
from draftproof.core.tree import TreeShape
from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Budget, Fixed
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.stats import State
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec


@cache
def toy(
    seed: int, vocab: int, layers: int = 1, width: int = 8, dtype: torch.dtype = torch.float64
) -> Target:
    """A tiny random Llama whose logits really depend on the text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=512,
        initializer_range=0.7, bos_token_id=None, eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 0.2       # every token of the text counts
    model.config.name_or_path = f"toy {seed}"
    return Target(model)


@cache
@torch.inference_mode()
def logits_behind(target: Target, text: tuple[int, ...]) -> list[float]:
    """The logits behind a text, by the model's own forward."""
    logits: list[float] = target.model(torch.tensor([text])).logits[0, -1].tolist()
    return logits


class Letters(Codec):
    """A tokenizer for the toys. "é" shows only with the token after it, like half a character."""

    PIECES = ("a", "b", "é", "ba", "c")

    def __init__(self) -> None:
        self.late = ""

    def stream(self, prompt: Sequence[int]) -> Any:
        return Letters()

    def push(self, token: int) -> str:
        own, held = self.PIECES[token], self.late
        self.late = own if own == "é" else ""
        return held if own == "é" else held + own

    def special(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        piece, self.late = self.late, ""
        return piece


class Ask(NamedTuple):
    """What one row is asked: how to sample, a prompt, and how many new tokens at most."""

    sampling: Sampling
    prompt: Sequence[int] = (1,)
    limit: int = 3


@dataclass(frozen=True)
class Case:
    """An engine and what it is asked; the requests share a batch. `draft` makes the drafter.

    fan: how many children a drafted node has, by depth. itself: the draft is the target, so every
    token must be accepted. shapes: closed as on a device, or None.
    """

    name: str
    asks: Sequence[Ask]
    target: Target
    draft: Callable[[], Drafter] = Plain
    budget: Callable[[], Budget] = lambda: Fixed(0)
    rule: Rule = RULES["match"]
    fan: Sequence[int] = (1,) * 8
    itself: bool = False
    shapes: ShapePolicy | None = None

    def plain(self) -> Case:
        """The same requests without drafts."""
        return Case(f"{self.name}, plain", self.asks, self.target)

    def run(self, seeds: Sequence[int], n: int, batch_size: int | None = None) -> list[Completion]:
        """Every request `n` times, with the seed of its place."""
        asked = [
            replace(ask.sampling, seed=seed, max_new_tokens=ask.limit)
            for ask, seed in zip(self.asks, seeds, strict=True)
        ]
        with patch.dict(RULES, examined=self.rule):
            engine = Engine(
                self.target, self.draft(), codec=Letters(), acceptance="examined",
                budget=self.budget(), shapes=self.shapes,
            )
            prompts = [list(ask.prompt) for ask in self.asks]
            return engine.generate(prompts, sampling=asked, n=n, batch_size=batch_size)


OPTIONS = {
    "T 1": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=1.2, top_k=2),
    "repetition": Sampling(temperature=0.9, repetition_penalty=1.8),
    "top-p": Sampling(temperature=1.1, top_p=0.75),
    "presence": Sampling(temperature=1.0, presence_penalty=0.8),
    "no-repeat": Sampling(temperature=1.0, no_repeat_ngram=2),
    "greedy": Sampling(),
    "bias": Sampling(temperature=1.0, logit_bias={0: 1.5, 1: -0.7}),
    "min-p": Sampling(temperature=1.3, min_p=0.25),
    "frequency": Sampling(temperature=1.0, frequency_penalty=0.9),
    "banned": Sampling(temperature=1.0, banned_words=((0, 1), (1, 1, 2))),
    "T 0.5": Sampling(temperature=0.5),
    "repetition reward": Sampling(temperature=1.0, repetition_penalty=0.6),
    "greedy, penalised": Sampling(repetition_penalty=2.5, frequency_penalty=0.6, no_repeat_ngram=2),
    "all at once": Sampling(
        temperature=0.9, top_k=2, top_p=0.9, min_p=0.02, repetition_penalty=1.3,
        presence_penalty=0.3, frequency_penalty=-0.4, no_repeat_ngram=3, logit_bias={2: 0.6},
        banned_words=((1, 0, 2),),
    ),
}
ENDS: dict[str, dict[str, Any]] = {
    "": {},
    "end token": {"stop_tokens": (2,)},
    "stop string": {"stop": ("ab",)},
    "end token held back": {"stop_tokens": (0,), "min_new_tokens": 2},
    "two stop strings": {"stop": ("ba", "bé")},
    "both": {"stop_tokens": (1,), "stop": ("éa", "aa"), "min_new_tokens": 1},
}
LIMITS = (3, 2, 3, 1, 3)
PROMPTS = ((1,), (2, 0, 1, 2, 0), (1, 1), (0, 2, 0, 2))
TARGET, DRAFT = toy(38, 3), toy(18, 3)        # of middling entropy, 0.6 apart


class Setup(NamedTuple):
    """How to draft: the drafter, how many tokens, and its fan (see `Case`)."""

    draft: Callable[[], Drafter]
    most: int
    fan: Sequence[int] = (1,) * 8


def by_model(model: Target, most: int, *children: int, vocab: int = 3) -> Setup:
    """Drafting with a toy, a chain or a tree with so many children by depth."""
    shape = TreeShape.branching(children) if children else None
    return Setup(lambda: DraftModel(model, vocab, shape), most, (*children, *(1,) * 8))


def setups(draft: Target, vocab: int) -> dict[str, Setup]:
    """Ways to draft for a target of so many tokens."""
    own = partial(by_model, vocab=vocab)
    return {
        "chain": own(draft, 2),
        "lookup": Setup(partial(PromptLookup, 2, 1), 2),
        "tree of 3": own(draft, 2, 2),
        "single": own(draft, 1),
        "tree of 4": own(draft, 3, 2, 1),
        "smaller draft": own(toy(5, vocab - 1), 3, 3),
        "larger draft": own(toy(6, vocab + 1), 2),
    }


SETUPS = setups(DRAFT, 3)


class Alternating(Budget):
    """A budget that comes and goes: K, 0, 1, K, ..."""

    def __init__(self, most: int) -> None:
        self.most, self.rounds = most, 0

    def choose(self, state: State) -> int:
        self.rounds += 1
        return (self.most, 0, min(1, self.most))[self.rounds % 3]


def case(
    name: str, rule: Rule, how: Setup, *asks: Ask, target: Target = TARGET, **more: Any
) -> Case:
    """A case that drafts so."""
    given = {"draft": how.draft, "budget": partial(Fixed, how.most), "fan": how.fan, **more}
    return Case(name, asks, target, rule=rule, **given)


def cases(rules: Mapping[str, Rule] = RULES, every: int = 1) -> Iterator[Case]:
    """Special cases; then rule x set-up x option x end, with limits and prompts in turn."""
    for name, rule in rules.items():
        yield from _special(name, rule)
    numbers = itertools.count()
    for setup, (option, asked), (end, stops) in itertools.product(
        SETUPS, OPTIONS.items(), ENDS.items()
    ):
        want = replace(asked, **stops)
        if setup == "tree of 4" and want.temperature:
            want = replace(want, top_k=2)                       # or a round has 3 ** 5 ends
        for name, rule in rules.items():
            number = next(numbers)
            if number % every == 0:
                ask = Ask(want, PROMPTS[number % len(PROMPTS)], LIMITS[number % len(LIMITS)])
                words = [f"{name}: {setup}", option, end, f"{ask.limit} tokens"]
                yield case(", ".join(filter(None, words)), rule, SETUPS[setup], ask)


def _special(name: str, rule: Rule) -> Iterator[Case]:
    """Different requests in one batch, a draft that is the target, a budget that comes and goes."""
    free = Sampling(temperature=1.0)
    mixed = (
        Ask(Sampling(temperature=1.3, stop_tokens=(0,)), (2, 0, 1)),
        Ask(Sampling(repetition_penalty=1.4), (1,), 4),
        Ask(Sampling(temperature=0.8, top_k=2, stop=("ab",)), (0, 2), 2),
        Ask(replace(free, no_repeat_ngram=2, min_new_tokens=2, stop_tokens=(1,)), (1, 2), 2),
    )
    for setup in ("chain", "tree of 3", "lookup"):
        one = case(f"{name}: {setup}, mixed batch", rule, SETUPS[setup], *mixed)
        yield one
        yield replace(one, name=f"{one.name} as on a device", shapes=ShapePolicy(closed=True))
    own = Sampling(temperature=float(rule.drawn), stop_tokens=(2,), repetition_penalty=1.3)
    at_times, itself = partial(Alternating, 2), by_model(TARGET, 2)
    one = case(f"{name}: drafts for itself", rule, itself, Ask(own, (1, 0), 4), itself=True)
    yield one
    yield replace(one, name=f"{one.name} at times", budget=at_times)
    fading = Ask(Sampling(temperature=2.2, top_p=0.6), (1, 0), 4 if rule.drawn else 3)
    yield case(f"{name}: budget comes and goes", rule, SETUPS["chain"], fading, budget=at_times)
    penalised = Sampling(temperature=1.0, top_k=2, repetition_penalty=2.0, frequency_penalty=0.7)
    asks = [Ask(penalised, (1, 0), 4)]
    if not rule.drawn:                          # every choice counts there: greedy, but many
        greedy = replace(penalised, temperature=0.0)
        asks = [Ask(greedy, prompt, 9) for prompt in ((1, 0), (0,), (2, 2), (1,), (0, 2))]
    yield case(f"{name}: penalties in a tree", rule, SETUPS["tree of 4"], *asks)
    for setup, grammar in itertools.product(("chain", "tree of 3"), GRAMMARS):
        bound = Sampling(temperature=1.0, stop_tokens=(2,), processors=(GRAMMARS[grammar],))
        yield case(f"{name}: {setup}, {grammar}", rule, SETUPS[setup], Ask(bound, (1, 0)))
    five = Ask(Sampling(temperature=1.1))
    how = by_model(toy(9, 5), 1, vocab=5)
    yield case(f"{name}: 5 tokens, 3 long", rule, how, five, target=toy(7, 5))


def _grammar(allowed: Callable[[Sequence[int]], set[int]]) -> LogitsProcessor:
    """A user's logits processor that allows only some tokens behind a text."""
    def processor(text: Tensor, scores: Tensor) -> Tensor:
        kept = allowed(text[0].tolist())
        scores[:, [token for token in range(scores.shape[1]) if token not in kept]] = -torch.inf
        return scores

    return processor


GRAMMARS = {
    "never twice": _grammar(lambda text: {0, 1, 2} - {text[-1]} if len(text) % 3 else {0, 1}),
    "nothing behind the end": _grammar(lambda text: set() if text[-1] == 2 else {0, 1, 2}),
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors are fastest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
