"""Cases for proving the engine: tiny models, ways to draft, options, and all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES, Rule
from draftproof.core.params import LogitsProcessor, Sampling
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TreeShape
from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Budget, Fixed
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.model.target import Target
from draftproof.requests.stats import State
from draftproof.tokenizer.codec import Codec
from draftproof.verify.reference import LETTERS, TAGS, Alphabet


@cache
def toy(
    seed: int, vocab: int, layers: int = 1, width: int = 8, dtype: torch.dtype = torch.float64
) -> Target:
    """A tiny random Llama whose logits depend on the whole text."""
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
        layer.self_attn.q_proj.weight.data *= 0.2       # so that every token of the text counts
    model.config.name_or_path = f"toy {seed}"
    return Target(model)


@cache
@torch.inference_mode()
def logits_after(target: Target, text: tuple[int, ...]) -> list[float]:
    """The logits after a text, from the model's own forward."""
    logits: list[float] = target.model(torch.tensor([text])).logits[0, -1].tolist()
    return logits


class CharTokenizer(Codec):
    """A tokenizer for the toys. One token shows only with the next, like half a character, or
    one is special and never shown."""

    def __init__(self, alphabet: Alphabet = LETTERS) -> None:
        self.alphabet, self.late = alphabet, ""

    def stream(self, prompt: Sequence[int]) -> Any:
        return CharTokenizer(self.alphabet)

    def push(self, token: int) -> str:
        if token == self.alphabet.special:
            return ""
        piece, held = self.alphabet.pieces[token], self.late
        self.late = piece if token == self.alphabet.late else ""
        return held if self.late else held + piece

    def special(self, token: int) -> str:
        return self.alphabet.pieces[token] if token == self.alphabet.special else ""

    def finish(self) -> str:
        piece, self.late = self.late, ""
        return piece


TARGET, DRAFT = toy(38, 3), toy(18, 3)        # of medium entropy, 0.6 apart


class CaseRequest(NamedTuple):
    """The request of one row: a sampling, a prompt, and the limit of new tokens."""

    sampling: Sampling
    prompt: Sequence[int] = (1,)
    limit: int = 3


class Setup(NamedTuple):
    """A way to draft: the drafter, the number of tokens, and the children of a node by depth."""

    draft: Callable[[], Drafter]
    max_draft_tokens: int
    branching: Sequence[int] = (1,) * 8


PLAIN = Setup(Plain, 0)


@dataclass(frozen=True)
class Case:
    """An engine and its requests, which share a batch.

    budget: made with the set-up's number of draft tokens. itself: the draft is the target, so every
    token must be accepted. shapes: a fixed set as on a device, or None.
    alphabet: the texts of tokens.
    """

    name: str
    rule: Rule
    setup: Setup
    requests: Sequence[CaseRequest]
    target: Target = TARGET
    budget: Callable[[int], Budget] = Fixed
    self_draft: bool = False
    shapes: ShapePolicy | None = None
    alphabet: Alphabet = LETTERS

    def plain(self) -> Case:
        """The same requests without drafts."""
        return Case(f"{self.name}, plain", RULES["match"], PLAIN, self.requests, self.target,
                    alphabet=self.alphabet)

    def run(
        self, seeds: Sequence[int], n: int, batch_size: int | None = None,
        sampler: type[Sampler] = Sampler,
    ) -> list[Completion]:  # fmt: skip
        """Run every request `n` times, with a seed by its place."""
        sampling = [
            replace(request.sampling, seed=seed, max_new_tokens=request.limit)
            for request, seed in zip(self.requests, seeds, strict=True)
        ]
        engine = Engine(
            self.target, self.setup.draft(), codec=CharTokenizer(self.alphabet),
            acceptance=self.rule, budget=self.budget(self.setup.max_draft_tokens),
            shapes=self.shapes, sampler=sampler,
        )
        prompts = [list(request.prompt) for request in self.requests]
        return engine.generate(prompts, sampling=sampling, n=n, batch_size=batch_size)


OPTIONS = {
    "T 1": Sampling(temperature=1.0),
    "T 0.5": Sampling(temperature=0.5),
    "repetition reward": Sampling(temperature=1.0, repetition_penalty=0.6),
    "greedy, penalised": Sampling(repetition_penalty=2.5, frequency_penalty=0.6, no_repeat_ngram=2),
    "all at once": Sampling(
        temperature=0.9, top_k=2, top_p=0.9, min_p=0.02, repetition_penalty=1.3,
        presence_penalty=0.3, frequency_penalty=-0.4, no_repeat_ngram=3, logit_bias={2: 0.6},
        banned_words=((1, 0, 2), (1, 1, 0), (1, 1, 1, 2)),
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
TAGGED = [
    CaseRequest(Sampling(temperature=1.0, stop=stops), (1,), 3)
    for stops in (("e>b",), (">a", "b<e"), ("<e>a", "aa"))
]
"""Stop strings that begin or end inside the special token of `TAGS`."""
LIMITS = (3, 2, 3, 1, 3)
PROMPTS = ((1,), (2, 0, 1, 2, 0), (1, 1), (0, 2, 0, 2))


def by_model(model: Target, most: int, *children: int, vocab: int = 3) -> Setup:
    """Draft with a toy: a chain, or a tree with these children by depth."""
    shape = TreeShape.branching(children) if children else None
    return Setup(lambda: DraftModel(model, vocab, shape), most, (*children, *(1,) * 8))


def setups(draft: Target, vocab: int) -> dict[str, Setup]:
    """Ways to draft for a target with a vocabulary of this size."""
    drafter = partial(by_model, vocab=vocab)
    return {
        "chain": drafter(draft, 2),
        "lookup": Setup(partial(PromptLookup, 2, 1), 2),
        "tree of 3": drafter(draft, 2, 2),
        "single": drafter(draft, 1),
        "tree of 4": drafter(draft, 3, 2, 1),
        "smaller draft": drafter(toy(5, vocab - 1), 3, 3),
        "larger draft": drafter(toy(6, vocab + 1), 2),
    }


SETUPS = setups(DRAFT, 3)


class Alternating(Budget):
    """A budget that changes: K, 0, 1, K, ..."""

    def __init__(self, most: int) -> None:
        self.max_draft_tokens, self.rounds = most, 0

    def choose(self, state: State) -> int:
        self.rounds += 1
        return (self.max_draft_tokens, 0, min(1, self.max_draft_tokens))[self.rounds % 3]


class Once(Budget):
    """Drafts only in the first round, so that all outcomes of a deep draft can be enumerated."""

    def __init__(self, most: int) -> None:
        self.max_draft_tokens, self.left = most, [most]

    def choose(self, state: State) -> int:
        return self.left.pop() if self.left else 0


def cases(rules: Mapping[str, Rule] = RULES, every: int = 1) -> Iterator[Case]:
    """Special cases, then rule x set-up x option x end, with limits and prompts in turn."""
    for name, rule in rules.items():
        for words, how, requests, more in _special(rule):
            yield Case(f"{name}: {words}", rule, how, requests, **more)
    numbers = itertools.count()
    for setup, option, end in itertools.product(SETUPS, OPTIONS, ENDS):
        want = replace(OPTIONS[option], **ENDS[end])
        if setup == "tree of 4" and want.temperature:
            want = replace(want, top_k=2)                       # otherwise a round has 3 ** 5 ends
        for name, rule in rules.items():
            number = next(numbers)
            if number % every == 0:
                prompt, limit = PROMPTS[number % len(PROMPTS)], LIMITS[number % len(LIMITS)]
                request = CaseRequest(want, prompt, limit)
                parts = [f"{name}: {setup}", option, end, f"{request.limit} tokens"]
                yield Case(", ".join(filter(None, parts)), rule, SETUPS[setup], [request])


def _special(rule: Rule) -> Iterator[tuple[str, Setup, Sequence[CaseRequest], dict[str, Any]]]:
    """Different requests in one batch, a draft that is the target, and a changing budget."""
    free, at_times = Sampling(temperature=1.0), {"budget": Alternating}
    mixed = (
        CaseRequest(Sampling(temperature=1.3, stop_tokens=(0,)), (2, 0, 1)),
        CaseRequest(Sampling(repetition_penalty=1.4), (1,), 4),
        CaseRequest(Sampling(temperature=0.8, top_k=2, stop=("ab",)), (0, 2), 2),
        CaseRequest(
            replace(free, no_repeat_ngram=2, min_new_tokens=2, stop_tokens=(1,)), (1, 2), 2),
    )
    for name in ("chain", "tree of 3", "lookup"):
        yield f"{name}, mixed batch", SETUPS[name], mixed, {}
        on_device = {"shapes": ShapePolicy(closed=True)}
        yield f"{name}, mixed batch as on a device", SETUPS[name], mixed, on_device
    temperature = float(rule.needs_draft_probs)
    sampling = Sampling(temperature=temperature, stop_tokens=(2,), repetition_penalty=1.3)
    itself = by_model(TARGET, 2), [CaseRequest(sampling, (1, 0), 4)]
    yield "drafts for itself", *itself, {"self_draft": True}
    yield "drafts for itself at times", *itself, {"self_draft": True, **at_times}
    limit = 4 if rule.needs_draft_probs else 3
    fading = CaseRequest(Sampling(temperature=2.2, top_p=0.6), (1, 0), limit)
    yield "budget comes and goes", SETUPS["chain"], [fading], at_times
    penalised = Sampling(temperature=1.0, top_k=2, repetition_penalty=2.0, frequency_penalty=0.7)
    requests = [CaseRequest(penalised, (1, 0), 4)]
    if not rule.needs_draft_probs:              # every choice counts there: greedy, but many
        greedy = replace(penalised, temperature=0.0)
        prompts = (1, 0), (0,), (2, 2), (1,), (0, 2)
        requests = [CaseRequest(greedy, prompt, 9) for prompt in prompts]
    yield "penalties in a tree", SETUPS["tree of 4"], requests, {}
    for name, grammar in itertools.product(("chain", "tree of 3"), GRAMMARS):
        bound = replace(free, stop_tokens=(2,), processors=(GRAMMARS[grammar],))
        yield f"{name}, {grammar}", SETUPS[name], [CaseRequest(bound, (1, 0))], {}
    yield "stop strings in a special token", SETUPS["chain"], TAGGED, {"alphabet": TAGS}
    if rule.needs_draft_probs:                  # nodes that shorter drafts lack
        deep = by_model(toy(22, 2), 6, vocab=2), [CaseRequest(Sampling(temperature=1.2), (1, 0), 7)]
        yield "a chain of 6", *deep, {"target": toy(21, 2), "budget": Once}
    wide = [CaseRequest(Sampling(temperature=1.3, top_k=2), (1, 0), 4)]
    yield "a tree of 6", by_model(DRAFT, 6, 2, 2), wide, {"budget": Once}
    five = [CaseRequest(Sampling(temperature=1.1))]
    yield "5 tokens, 3 long", by_model(toy(9, 5), 1, vocab=5), five, {"target": toy(7, 5)}


def _grammar(allowed: Callable[[Sequence[int]], set[int]]) -> LogitsProcessor:
    """A user's logits processor that allows only certain tokens after a text."""
    def processor(text: Tensor, scores: Tensor) -> Tensor:
        kept = allowed(text[0].tolist())
        scores[:, [token for token in range(scores.shape[1]) if token not in kept]] = -torch.inf
        return scores

    return processor


GRAMMARS = {
    "never twice": _grammar(lambda text: {0, 1, 2} - {text[-1]} if len(text) % 3 else {0, 1}),
    "nothing after the end": _grammar(lambda text: set() if text[-1] == 2 else {0, 1, 2}),
}


@contextmanager
def one_thread() -> Iterator[None]:
    """A block on one thread, which is fastest for tiny tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
