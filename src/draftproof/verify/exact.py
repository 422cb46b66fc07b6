"""Section "law": every random outcome of the whole engine enumerated, with drafts and without, on small vocabularies.

The target is a table in float64. Where the engine would draw a number, the enumeration decides what comes, and adds up what
that outcome costs: so the distribution of the text is known exactly, not estimated. With a drafter it must be the same.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES, Chance, Rule
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.noise import Role
from draftproof.core.params import LogitsProcessor, Sampling
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Sampler, argmax_token
from draftproof.core.tree import NOTHING, TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.plain import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Budget, Fixed
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.stats import State
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec
from draftproof.verify.report import Section, Tick, failed, silent

EXACT = 1e-12
"""Total variation that float64 rounding may leave."""
SEEN = 1e-3
"""What a negative control must show at least."""
WORLDS, DRAWS = 4096, 48
"""Outcomes that run side by side, and draws that one of them may ask for."""

End = tuple[tuple[int, ...], str, str]
"""How a run ends: its new tokens, its text, its finish reason."""
Distribution = dict[End, float]


# The model ------------------------------------------------------------------------------------------


class TableModel(PreTrainedModel):  # type: ignore[misc]
    """A causal language model that is a table in float64, with a KV cache as transformers knows it.

    Keys hold tokens and values hold positions; logits are a function of the (position, token) pairs
    that the mask lets a query see. `salt` tells tables apart.
    """

    config_class = PreTrainedConfig
    _supports_sdpa = True
    BASE = 7                    # more than any vocabulary here holds; 7 ** 20 fits 64 bits

    def __init__(self, vocab: int, salt: int, sharpness: float) -> None:
        sizes = {"hidden_size": 1, "num_hidden_layers": 1, "max_position_embeddings": 512}
        super().__init__(PreTrainedConfig(vocab_size=vocab, **sizes))
        self.nothing = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self.config.name_or_path = f"table {salt}"
        self._vocab, self._salt, self._sharpness = vocab, salt, sharpness
        self._known: dict[int, list[float]] = {}

    def scores(self, text: Sequence[int]) -> list[float]:
        """The logits behind a text."""
        return self._scores(sum((token + 1) * self.BASE**place for place, token in enumerate(text)))

    def _scores(self, code: int) -> list[float]:
        if code not in self._known:
            dice = random.Random(repr((self._salt, code)))
            self._known[code] = [dice.gauss(0, self._sharpness) for _ in range(self._vocab)]
        return self._known[code]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None, **_: Any,
    ) -> CausalLMOutput:
        places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        columns = (input_ids + 1, places.expand_as(input_ids))
        tokens, places = (column[:, None, :, None].double() for column in columns)
        if past_key_values is not None:
            tokens, places = past_key_values.update(tokens, places, 0)                 # [B, 1, S, 1]
        sees = torch.ones(input_ids.shape[1], tokens.shape[2], dtype=torch.bool).tril()
        sees = sees if attention_mask is None else attention_mask[:, 0] == 0           # [B, N, S]
        worth = tokens[..., 0].long() * self.BASE ** places[..., 0].long().clamp(0, 20)
        codes, which = torch.unique(torch.where(sees, worth, 0).sum(-1), return_inverse=True)
        rows = torch.tensor([self._scores(code) for code in codes.tolist()], dtype=torch.float64)
        return CausalLMOutput(logits=rows[which])


def table(vocab: int, salt: int, sharpness: float = 1.3) -> Target:
    """A table, read as any other target: through cache, mask and positions."""
    return Target(TableModel(vocab, salt, sharpness))


PIECES = ("a", "b", "é", "ba", "c")
"""The text of each token. "é" shows only with the token behind it, as half a character would."""


class Letters(Codec):
    """A tokenizer for the table's vocabulary."""

    def __init__(self) -> None:
        self.late = ""

    def stream(self, prompt: Sequence[int]) -> Any:
        return Letters()

    def push(self, token: int) -> str:
        piece, late = self.late + PIECES[token], ""
        if PIECES[token] == "é":
            piece, late = self.late, "é"
        self.late = late
        return piece

    def finish(self) -> str:
        piece, self.late = self.late, ""
        return piece


# Decided draws --------------------------------------------------------------------------------------


class Outcomes:
    """The draws of many worlds side by side: each follows its plan, then takes the likeliest outcome.

    plans: [W, DRAWS] outcomes decided, -1 beyond. probs: [W] what a world's outcomes cost. others:
    plans of the outcomes not taken, one per possible outcome of every draw beyond the plan; together
    they are everything that can happen.
    """

    def __init__(self, plans: Tensor) -> None:
        self.plans, self.taken = plans, torch.full_like(plans, -1)
        self.drawn = torch.zeros(len(plans), dtype=torch.int64)
        self.probs = torch.ones(len(plans), dtype=torch.float64)
        self.others: list[tuple[Tensor, Tensor]] = []

    def take(self, worlds: Tensor, law: Tensor) -> Tensor:
        """[B] one outcome per row of `law` [B, K], for the `worlds` [B]; equal worlds draw together."""
        once, copies = torch.unique(worlds, return_inverse=True)
        if len(once) == len(worlds):
            return self._take(worlds, law)
        first = torch.full_like(once, len(worlds)).scatter_reduce(
            0, copies, torch.arange(len(worlds)), "amin"
        )
        return self._take(once, law[first])[copies]

    def _take(self, worlds: Tensor, law: Tensor) -> Tensor:
        draw, rows = self.drawn[worlds], torch.arange(len(law))
        planned = self.plans[worlds, draw]
        taken = torch.where(planned < 0, law.argmax(-1), planned)
        left = (law > 0) & (planned < 0)[:, None]
        left[rows, taken] = False
        row, other = left.nonzero(as_tuple=True)
        plans = self.taken[worlds[row]]
        plans[torch.arange(len(row)), draw[row]] = other
        self.others.append((worlds[row], plans))
        self.taken[worlds, draw] = taken
        self.drawn[worlds] += 1
        self.probs[worlds] *= law[rows, taken]
        return taken


@dataclass
class Decided:
    """What replaces the random source. A row's world is named by its seed (the request) and sample.

    fan: how many children a drafted node has, by depth: so many draws are decided there.
    """

    outcomes: Outcomes
    samples: int
    fan: Sequence[int]

    def worlds(self, sampler: Sampler) -> Tensor:
        rows = [row.sampling.seed * self.samples + row.sample for row in sampler.rows]
        return torch.tensor(rows, dtype=torch.int64)

    def pick(self, sampler: Sampler, logits: Tensor, paths: Paths) -> Tensor:
        """`Sampler.pick`: the target's token at each node."""
        return argmax_token(self._decided(sampler, logits, paths, 1))

    def gumbel_logits(self, sampler: Sampler, logits: Tensor, paths: Paths, role: Role) -> Tensor:
        """`Sampler.gumbel_logits`: drafted tokens, best first; a draft that is chosen, not drawn,
        takes its likeliest tokens."""
        if role is Role.TARGET or sampler.greedy:
            return sampler.filtered(logits, paths)
        return self._decided(sampler, logits, paths, self.fan[int(paths.tree.depths[0, paths.first])])

    def _decided(self, sampler: Sampler, logits: Tensor, paths: Paths, children: int) -> Tensor:
        scores, worlds = sampler.filtered(logits, paths), self.worlds(sampler)
        greedy = torch.tensor([row.sampling.temperature == 0 for row in sampler.rows])
        order = torch.full_like(scores, -torch.inf)
        for node in range(scores.shape[1]):                     # absent nodes draw nothing
            rows = paths.tree.present[:, paths.first + node].nonzero()[:, 0]
            left = scores[rows, node]
            for rank in range(children):                        # without replacement
                best = argmax_token(left)
                none = best == NOTHING
                sure = torch.nn.functional.one_hot(best.clamp(min=0), left.shape[1]).double()
                certain = (greedy[rows] | none)[:, None]
                law = torch.where(certain, sure, left.double().softmax(-1))
                taken = self.outcomes.take(worlds[rows], law)
                before = order[rows, node, taken]
                order[rows, node, taken] = torch.where(none, before, before.new_tensor(children - rank))
                left = left.scatter(1, taken[:, None], -torch.inf)
        return order

    def chance(self, frontier: Frontier) -> Chance:
        """`KeyedChance`: the coins and draws of a rule."""
        outcomes, worlds = self.outcomes, self.worlds(frontier.sampler)

        class DecidedChance:
            def flip(self, probability: Tensor, node: int) -> Tensor:
                heads = probability.double().nan_to_num(0.0).clamp(0, 1)    # u < NaN is never true
                return outcomes.take(worlds, torch.stack([1 - heads, heads], -1)) == 1

            def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
                weights = weights.double()
                broken = weights.isnan().any(-1) | (weights < 0).any(-1) | ~(weights.sum(-1) > 0)
                sure = torch.nn.functional.one_hot(torch.zeros_like(depth), weights.shape[1])
                law = weights / weights.sum(-1, keepdim=True)
                law = torch.where(broken[:, None], sure.double(), law)
                return torch.where(broken, NOTHING, outcomes.take(worlds, law))

        return DecidedChance()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this lasts, engines draw from `outcomes`."""
        with (
            patch.object(Sampler, "pick", lambda *args: self.pick(*args)),
            patch.object(Sampler, "gumbel_logits", lambda *args: self.gumbel_logits(*args)),
            patch.object(acceptance, "KeyedChance", self.chance),
        ):
            yield


# Enumeration ----------------------------------------------------------------------------------------


class Ask(NamedTuple):
    """What one row is asked: a prompt, how to sample, and how many new tokens at most."""

    sampling: Sampling
    prompt: Sequence[int] = (1,)
    limit: int = 3


@dataclass(frozen=True)
class Case:
    """An engine and what it is asked; the requests share a batch. `draft` makes the drafter."""

    name: str
    asks: Sequence[Ask]
    target: Target
    draft: Callable[[], Drafter] = Plain
    budget: Callable[[], Budget] = lambda: Fixed(0)
    rule: Rule = RULES["match"]
    fan: Sequence[int] = (1,) * 8
    drafts_itself: bool = False             # the draft is the target: every token must be accepted
    shapes: ShapePolicy | None = None       # closed: computed by torch's operators, as on a device

    def plain(self) -> Case:
        """The same requests without drafts."""
        return Case(f"{self.name}, plain", self.asks, self.target)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors are quickest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Enumerated(NamedTuple):
    """The distribution of each request's text, outcomes enumerated, and a count that does not add up."""

    laws: list[Distribution]
    worlds: int
    wrong: str = ""


def enumerate_texts(case: Case) -> Enumerated:
    """Run a case through every outcome there is."""
    laws: list[Distribution] = [defaultdict(float) for _ in case.asks]
    waiting = [torch.full((1, DRAWS), -1) for _ in case.asks]
    worlds = 0
    while any(len(plans) for plans in waiting):
        now = [plans[: WORLDS // len(waiting)] for plans in waiting]
        samples = max(map(len, now))
        plans = torch.full((len(now), samples, DRAWS), -1)
        for owner, own in enumerate(now):
            plans[owner, : len(own)] = own
        outcomes = Outcomes(plans.flatten(0, 1))
        for done in _run(case, outcomes, samples):
            if done.sample >= len(now[done.prompt]):
                continue                                        # only there to fill the batch
            probability = float(outcomes.probs[done.prompt * samples + done.sample])
            laws[done.prompt][tuple(done.tokens), done.text, done.finish_reason] += probability
            if probability > 0 and (wrong := _wrong_counts(case, done)):
                return Enumerated(laws, worlds, wrong)
        left = [plans[len(own) :] for plans, own in zip(waiting, now, strict=True)]
        which = torch.cat([world for world, _ in outcomes.others])
        others = torch.cat([plan for _, plan in outcomes.others])
        for owner, own in enumerate(now):
            theirs = (which // samples == owner) & (which % samples < len(own))
            left[owner] = torch.cat([left[owner], others[theirs]])
        waiting, worlds = left, worlds + sum(map(len, now))
    return Enumerated(laws, worlds)


def _run(case: Case, outcomes: Outcomes, samples: int) -> list[Completion]:
    """Each request `samples` times, with the draws decided."""
    asked = [
        replace(ask.sampling, seed=owner, max_new_tokens=ask.limit)
        for owner, ask in enumerate(case.asks)
    ]
    prompts = [list(ask.prompt) for ask in case.asks]
    rules, decided = {"examined": case.rule}, Decided(outcomes, samples, case.fan)
    with patch.dict(RULES, rules), decided.installed():
        engine = Engine(
            case.target, case.draft(), codec=Letters(), acceptance="examined",
            budget=case.budget(), shapes=case.shapes,
        )
        rows = samples * len(prompts)
        return engine.generate(prompts, sampling=asked, n=samples, batch_size=rows)


def _wrong_counts(case: Case, done: Completion) -> str:
    """What the statistics of a finished row get wrong, in one sentence; empty if nothing."""
    stats, written = done.stats, len(done.tokens)
    if written > case.asks[done.prompt].limit:
        return f"{written} tokens were written, more than allowed"
    if stats.emitted != written - 1:
        return f"{stats.emitted} tokens were counted behind the first, {written - 1} were written"
    accepted, drafted = stats.accepted, stats.drafted
    if not accepted <= stats.emitted <= accepted + stats.rounds or accepted > drafted:
        return f"{accepted} accepted of {drafted} drafted do not fit {stats.emitted} tokens"
    if case.drafts_itself and stats.drafted and stats.acceptance < 1:
        return f"the target drafted for itself and only {stats.acceptance:.2f} were accepted"
    return ""


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Total variation."""
    return sum(abs(one.get(end, 0.0) - other.get(end, 0.0)) for end in one.keys() | other.keys()) / 2


def examine(case: Case, wanted: Sequence[Distribution] | None = None) -> tuple[float, int, str]:
    """The largest distance of a case's texts from those `wanted` (None: those of plain decoding),
    outcomes enumerated, and what is wrong in words."""
    try:
        with one_thread():
            wanted = enumerate_texts(case.plain()).laws if wanted is None else wanted
            found = enumerate_texts(case)
    except Exception as error:                                 # a broken algorithm may break anywhere
        return 1.0, 0, failed(error)
    if found.wrong:
        return 1.0, found.worlds, found.wrong
    apart = max(distance(law, own) for law, own in zip(found.laws, wanted, strict=True))
    wrong = "" if apart < EXACT else f"total variation {apart:.2g} to plain decoding"     # NaN too
    return apart, found.worlds, wrong


# Cases ----------------------------------------------------------------------------------------------

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
        temperature=0.9, top_k=2, top_p=0.9, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.3,
        frequency_penalty=-0.4, no_repeat_ngram=3, logit_bias={2: 0.6}, banned_words=((1, 0, 2),),
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
TARGET, DRAFT = table(3, 1), table(3, 2)


class Way(NamedTuple):
    """A way to draft: the drafter, how many tokens, and its fan (see `Case`)."""

    draft: Callable[[], Drafter]
    most: int
    fan: Sequence[int] = (1,) * 8


def by_model(model: Target, most: int, *children: int, vocab: int = 3) -> Way:
    """Drafting with a table, a chain or a tree with so many children by depth."""
    shape = TreeShape.branching(children) if children else None
    return Way(lambda: DraftModel(model, vocab, shape), most, (*children, *(1,) * 8))


WAYS = {
    "chain": by_model(DRAFT, 2),
    "lookup": Way(partial(PromptLookup, 2, 1), 2),
    "tree of 3": by_model(DRAFT, 2, 2),
    "single": by_model(DRAFT, 1),
    "tree of 4": by_model(DRAFT, 3, 2, 1),
    "smaller draft": by_model(table(2, 5), 3, 3),
    "larger draft": by_model(table(4, 6), 2),
}


class Alternating(Budget):
    """A budget that comes and goes: K, 0, 1, K, ..."""

    def __init__(self, most: int) -> None:
        self.most, self.rounds = most, 0

    def choose(self, state: State) -> int:
        self.rounds += 1
        return (self.most, 0, min(1, self.most))[self.rounds % 3]


def case(name: str, rule: Rule, how: Way, *asks: Ask, target: Target = TARGET, **more: Any) -> Case:
    """A case that drafts in this way."""
    given = {"draft": how.draft, "budget": partial(Fixed, how.most), "fan": how.fan, **more}
    return Case(name, asks, target, rule=rule, **given)


def cases(rules: Mapping[str, Rule] = RULES, every: int = 1) -> Iterator[Case]:
    """What needs a case of its own; then rule x way x option x end, limits and prompts in turn."""
    for name, rule in rules.items():
        yield from _special(name, rule)
    numbers = itertools.count()
    for (way, how), (option, asked), (end, stops) in itertools.product(
        WAYS.items(), OPTIONS.items(), ENDS.items()
    ):
        want = replace(asked, **stops)
        if way == "tree of 4" and want.temperature:
            want = replace(want, top_k=2)                       # or a round has 3 ** 5 ends
        for name, rule in rules.items():
            number = next(numbers)
            if number % every == 0:
                ask = Ask(want, PROMPTS[number % len(PROMPTS)], LIMITS[number % len(LIMITS)])
                words = [f"{name}: {way}", option, end, f"{ask.limit} tokens"]
                yield case(", ".join(filter(None, words)), rule, how, ask)


def _special(name: str, rule: Rule) -> Iterator[Case]:
    """Different requests in one batch, a draft that is the target, a budget that comes and goes."""
    mixed = (
        Ask(Sampling(temperature=1.3, stop_tokens=(0,)), (2, 0, 1)),
        Ask(Sampling(repetition_penalty=1.4), (1,), 4),
        Ask(Sampling(temperature=0.8, top_k=2, stop=("ab",)), (0, 2), 2),
        Ask(Sampling(temperature=1.0, no_repeat_ngram=2, min_new_tokens=2, stop_tokens=(1,)), (1, 2), 2),
    )
    for way in ("chain", "tree of 3", "lookup"):
        one = case(f"{name}: {way}, mixed batch", rule, WAYS[way], *mixed)
        yield one
        yield replace(one, name=f"{one.name} as on a device", shapes=ShapePolicy(closed=True))
    chain, drawn = WAYS["chain"], rule.drawn
    own = Sampling(temperature=1.0 if drawn else 0.0, stop_tokens=(2,), repetition_penalty=1.3)
    for when, budget in (("", partial(Fixed, 2)), (" at times", partial(Alternating, 2))):
        one = case(f"{name}: drafts for itself{when}", rule, by_model(TARGET, 2), Ask(own, (1, 0), 4))
        yield replace(one, budget=budget, drafts_itself=True)
    fading = Ask(Sampling(temperature=2.2, top_p=0.6), (1, 0), 4 if drawn else 3)
    yield case(f"{name}: budget comes and goes", rule, chain, fading, budget=partial(Alternating, 2))
    penalised = Sampling(temperature=1.0, top_k=2, repetition_penalty=2.0, frequency_penalty=0.7)
    asks = [Ask(penalised, (1, 0), 4)]
    if not drawn:                               # every choice counts there: greedy, but long and many
        greedy = replace(penalised, temperature=0.0)
        asks = [Ask(greedy, prompt, 9) for prompt in ((1, 0), (0,), (2, 2), (1,), (0, 2))]
    yield case(f"{name}: penalties in a tree", rule, WAYS["tree of 4"], *asks)
    for way, grammar in itertools.product(("chain", "tree of 3"), GRAMMARS):
        bound = Sampling(temperature=1.0, stop_tokens=(2,), processors=(GRAMMARS[grammar],))
        yield case(f"{name}: {way}, {grammar}", rule, WAYS[way], Ask(bound, (1, 0)))
    how = by_model(table(5, 8), 1, vocab=5)
    five = Ask(Sampling(temperature=1.1))
    yield case(f"{name}: 5 tokens, 3 long", rule, how, five, target=table(5, 7))


def grammar(allowed: Callable[[Sequence[int]], set[int]]) -> LogitsProcessor:
    """A user's logits processor that allows only some tokens behind a text."""
    def processor(text: Tensor, scores: Tensor) -> Tensor:
        kept = allowed(text[0].tolist())
        scores[:, [token for token in range(scores.shape[1]) if token not in kept]] = -torch.inf
        return scores

    return processor


GRAMMARS = {
    "never twice": grammar(lambda text: {0, 1, 2} - {text[-1]} if len(text) % 3 else {0, 1}),
    "nothing behind the end": grammar(lambda text: set() if text[-1] == 2 else {0, 1, 2}),
}


# Planted mistakes that must be seen, and the section ------------------------------------------------


def weighing(rule: Callable[[TokenTree, Tensor, Chance], Accepted]) -> Rule:
    """A rule that weighs drawn drafts, as the engine uses it; chosen tokens are matched."""
    def accept(tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        if tree.draft_probs is None:
            return acceptance.match(tree, logits, frontier)
        probs = frontier.sampler.probs(logits, Paths(frontier.prefix, tree))
        return rule(tree, probs, acceptance.KeyedChance(frontier))

    return Rule(accept, drawn=True)


def wrong_draft_law(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Rejection told another law than the one the draft was drawn from (known bug 1)."""
    assert tree.draft_probs is not None
    law = tree.draft_probs.sqrt()
    law = law / law.sum(-1, keepdim=True).clamp(min=1e-30)
    return acceptance.accept_by_rejection(replace(tree, draft_probs=law), probs, chance)


def target_for_residual(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Rejection that draws from the target where it should draw from the residual (known bug 5)."""
    accepted = acceptance.accept_by_rejection(tree, probs, chance)
    last = accepted.nodes.gather(1, accepted.count[:, None] - 1)
    law = probs.gather(1, last[..., None].expand(-1, 1, probs.shape[-1]))[:, 0]
    return replace(accepted, root=chance.draw(law, accepted.count - 1))


CONTROLS = {
    "a draft law that is not the one drawn from": wrong_draft_law,
    "the target in place of the residual": target_for_residual,
}


def prove_law(
    quick: bool = False, tick: Tick = silent, *, rules: Mapping[str, Rule] = RULES,
) -> Section:
    """Examine every rule in the whole engine; another rule can be passed to be proved.

    Passes if no case is further than `EXACT` from plain decoding, plain decoding has the table's own
    distribution, and every planted mistake is seen.
    """
    start, chosen = time.perf_counter(), list(cases(rules, every=67 if quick else 1))
    worst, outcomes, failures = plain_error(), 0, []
    if not worst < EXACT:
        failures.append(f"plain decoding is {worst:.2g} from the table's own distribution")
    for done, one in enumerate(chosen):
        tick(done / len(chosen), one.name)
        apart, worlds, wrong = examine(one)
        worst, outcomes = max(worst, apart), outcomes + worlds
        failures += [f"{one.name}: {wrong}"] if wrong else []
    ask = Ask(Sampling(temperature=1.0))
    planted = {
        name: examine(case(name, weighing(rule), WAYS["chain"], ask))[0]
        for name, rule in CONTROLS.items()
    }
    blind = [name for name, seen in planted.items() if not seen > SEEN]
    failures += [f"the planted mistake {name!r} was not seen: this is blind" for name in blind]
    verdict = (
        f"{len(chosen)} cases, {outcomes:,} outcomes enumerated, total variation to plain decoding "
        f"at most {worst:.1g} (allowed: {EXACT:g}); {len(planted) - len(blind)} of {len(planted)} "
        "planted mistakes seen"
    )
    figures = {
        "cases": len(chosen), "outcomes": outcomes, "max_total_variation": worst, "tolerance": EXACT,
        "controls": planted, "rules": sorted(rules),
    }
    seconds = time.perf_counter() - start
    return Section("law", not failures, verdict, figures, failures[:20], seconds)


def plain_error() -> float:
    """How far plain decoding at temperature 1 is from the product of the table's own softmaxes."""
    model, prompt, wanted = TARGET.model, (2, 1), dict[End, float]()
    for text in itertools.product(range(3), repeat=3):
        logits = [model.scores((*prompt, *text[:place])) for place in range(3)]
        laws = torch.tensor(logits, dtype=torch.float64).softmax(-1)
        letters = Letters()
        shown = "".join(letters.push(token) for token in text) + letters.finish()
        wanted[text, shown, "length"] = float(laws[range(3), text].prod())
    plain = enumerate_texts(Case("plain", [Ask(Sampling(temperature=1.0), prompt)], TARGET))
    return distance(plain.laws[0], wanted)
