"""Planted bugs: bugs that real engines shipped, planted one at a time in the running code.

Each is a patch of attributes while the examinations run small; some examination must see it. Numbers
are those of the list of known bugs in docs/lossless.md. Bugs inside the acceptance rules themselves
are in `mistakes`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager as Context
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from helpers.reference import distribution_of_run
from torch import Tensor

from draftproof.core import noise
from draftproof.core.acceptance import RULES, KeyedChance
from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.processors import LogitsProcessors
from draftproof.core.sampling import Sampler, argmax_token
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Engine
from draftproof.engine.sequence import SequenceState
from draftproof.verify import exact, sampling
from draftproof.verify.bits import prove_bits
from draftproof.verify.enumeration import Ask, Case, Distribution, enumerate_texts
from draftproof.verify.exact import GRAMMARS, WAYS, case, examine
from draftproof.verify.sampling import Trial
from draftproof.verify.statistics import g_test

# The examinations, small ----------------------------------------------------------------------------

ALL = Sampling(temperature=0.9, top_k=2, top_p=0.9, repetition_penalty=1.8, presence_penalty=0.3)
WORDS = {"stop": ("ab",), "stop_tokens": (2,), "min_new_tokens": 1}
MIXED = (
    Ask(Sampling(temperature=1.3, stop_tokens=(0,)), (2, 0, 1)),
    Ask(Sampling(repetition_penalty=1.4), (1,), 4),
    Ask(Sampling(temperature=0.8, top_k=2, stop=("ab",)), (0, 2), 2),
)


@cache
def law_cases() -> dict[str, Case]:
    """A few cases that see much, by name."""
    greedy = Sampling(repetition_penalty=2.0, frequency_penalty=0.7)
    free, own = Sampling(temperature=1.0), Sampling(temperature=0.9, repetition_penalty=1.3)
    bound = Sampling(temperature=1.0, stop_tokens=(2,), processors=(GRAMMARS["never twice"],))
    reject, match, block = RULES["rejection"], RULES["match"], RULES["block"]
    asks = [Ask(greedy, prompt, 9) for prompt in ((1, 0), (0,), (2, 2), (1,), (0, 2))]
    itself = exact.by_model(exact.TARGET, 2)
    cases = {
        "draft": case("", reject, WAYS["chain"], Ask(free)),
        "block": case("", block, WAYS["chain"], Ask(free)),
        "larger draft": case("", reject, WAYS["larger draft"], Ask(free, (1,), 2)),
        "tree": case("", match, WAYS["tree of 3"], Ask(free, (1,), 4)),
        "options": case("", reject, WAYS["tree of 4"], Ask(ALL, (0, 1, 2), 4)),
        "ends": case("", reject, WAYS["chain"], Ask(replace(free, **WORDS), (1,), 4)),
        "mixed": case("", reject, WAYS["chain"], *MIXED),
        "penalties in a tree": case("", match, WAYS["tree of 4"], *asks),
        "grammar": case("", match, WAYS["chain"], Ask(bound, (1, 0), 4)),
        "itself": case("", reject, itself, Ask(own, (1, 0), 4), drafts_itself=True),
    }
    return {name: replace(one, name=name) for name, one in cases.items()}


def reference(one: Case) -> list[Distribution]:
    """What plain Python says of a case; with a user's logits processor, plain decoding."""
    if any(ask.sampling.processors for ask in one.asks):
        return enumerate_texts(one.plain()).laws
    scores = one.target.model.scores
    return [distribution_of_run(scores, ask.prompt, ask.sampling, ask.limit) for ask in one.asks]


@cache
def wanted(name: str) -> list[Distribution]:
    return reference(law_cases()[name])


def by_law(*names: str) -> str:
    """What enumeration finds wrong in these cases (none: in all)."""
    for name in names or law_cases():
        laws = wanted(name)
        if wrong := examine(law_cases()[name], laws)[2]:
            return wrong
    return ""


def by_bits(*wants: Sampling) -> str:
    """What a comparison with plain decoding on a small model finds wrong."""
    target, draft = sampling.toy(11, 6, 2), sampling.toy(12, 6)
    engine = Engine(target, DraftModel(draft, 6, TreeShape.branching((3, 2))))
    section = prove_bits(engine, new_tokens=8, exact_nodes=0, wants=wants)
    return "; ".join(section.failures)


def by_count(rule: str) -> str:
    """Whether 4,096 texts with the real noise are unlikely."""
    test = sampling.judged(sampling.run_trial(Trial(rule, "chain", 2), 4096, 0), toy_law())
    return "" if test.passed else f"p = {test.p_value}"


@cache
def toy_law() -> sampling.Law:
    return sampling.exact_law(sampling.WANTS["T 1"])


def by_noise() -> str:
    """What the noise, looked at by itself, does wrong."""
    return next((name for name, p in sampling.noise_tests(0) if p < 1e-6), "")


def by_streams() -> str:
    """Random numbers used twice, and drafts of the target's own that were not accepted."""
    return next(sampling.broken_streams(0), "")


def by_draws() -> str:
    """Whether single draws and coins have the distribution they are asked for."""
    count, law = 1 << 13, torch.tensor([0.5, 0.22, 0.15, 0.1, 0.03], dtype=torch.float64)
    want = Sampling(temperature=1.0, seed=1)
    sampler = Sampler([SamplingParams(want, 1, sample=row) for row in range(count)])
    prefix = Prefix(torch.zeros(count, 12, dtype=torch.int64), torch.full((count,), 3))
    chance, ones = KeyedChance(Frontier(prefix, sampler, 2, drawn=True)), torch.ones(count)
    draws = {"draw": (chance.draw((3 * law).expand(count, -1), 2 * ones.long()), law)}
    for heads in (0.05, 0.5, 0.93):
        odds = torch.tensor([1 - heads, heads], dtype=torch.float64)
        draws[f"coin {heads}"] = chance.flip(heads * ones, 1).long(), odds
    for name, (seen, odds) in draws.items():
        if not g_test(torch.bincount(seen, minlength=len(odds)), odds).passed:
            return name
    for number, heads in ((0.0, 0.0), (1 - 2.0**-24, 1.0)):                # the ends of the scale
        with patch.object(noise, "uniform", lambda keys, at=number: torch.full(keys.shape[:-1], at)):
            if not bool((chance.flip(heads * ones, 1).double() == heads).all()):
                return f"a coin of {heads}"
    return ""


class Script(Budget):
    """Draft tokens round by round, as written down; then none."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.most, self.left = max(sizes), list(sizes)

    def choose(self, state: Any) -> int:
        return self.left.pop(0) if self.left else 0


def accepted() -> list[int]:
    """How much of another model's drafts is accepted, by text: chains, trees, after pauses."""
    def count(budget: Any, *children: int) -> list[int]:
        shape = TreeShape.branching(children) if children else None
        target, draft = sampling.toy(11, 6, 2), sampling.toy(15, 6, 2)
        engine = Engine(target, DraftModel(draft, 6, shape), budget=budget)
        prompts, limits = [[3], [1, 2, 0, 1], [0, 0, 4]], (24, 9, 30)
        asked = [Sampling(max_new_tokens=limit) for limit in limits]
        return [one.stats.accepted for one in engine.generate(prompts, sampling=asked)]

    return [*count(3), *count(4, 2, 1), *count(Script([3, *[0] * 9, 3, 3, 0, 0, 3]))]


sound_accepted = cache(accepted)


def by_accepted() -> str:
    """Whether drafts are accepted as often as those of the sound code."""
    now, sound = accepted(), sound_accepted()
    return "" if now == sound else f"{now} accepted, {sound} before"


WATCHES: dict[str, Callable[..., str]] = {
    "law": by_law, "bits": by_bits, "count": by_count, "noise": by_noise, "streams": by_streams,
    "draws": by_draws, "accepted": by_accepted,
}


# Planting -------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """A bug, where it was seen, how it is planted, and the examination that must see it."""

    name: str
    seen_in: str
    plant: Callable[[], Context[Any]]
    watch: str
    options: tuple[Any, ...] = ()


def around(where: str, change: Callable[..., Any]) -> Callable[[], Context[Any]]:
    """Plants ``change(own, *args)`` in the place of the function or method at "module:name"."""
    def plant() -> Context[Any]:
        owner, name, own = found(where)
        return patch.object(owner, name, lambda *args, **how: change(own, *args, **how))

    return plant


def found(where: str) -> tuple[Any, str, Any]:
    """Owner, name and present value of "module:name" or "module:Class.name"."""
    module, _, path = where.partition(":")
    owner, *names = importlib.import_module(f"draftproof.{module}"), *path.split(".")
    for name in names[:-1]:
        owner = getattr(owner, name)
    return owner, names[-1], inspect.getattr_static(owner, names[-1])


def streams(of_role: Role | None, /, **change: Any) -> Callable[[], Context[Any]]:
    """Random streams of this role (None: all) with another role, position, origin or keys."""
    def changed(own: Any, keys: Tensor, of: Role, place: Tensor, origin: Any = None, **how: Any) -> Any:
        if of_role is None or of == of_role:
            keys = change.get("keys", lambda keys: keys)(keys)
            of, place, origin = (
                change.get("role", of), change.get("position", lambda p, o: p)(place, origin),
                None if "origin" in change else origin,
            )  # fmt: skip
        return own(keys, of, place, origin, **how)

    return around("core.noise:stream", changed)


def keys(seed: Callable[[int], int], sample: Callable[[int], int] = lambda sample: sample) -> Any:
    def changed(own: Any, seeds: list[int], samples: list[int], *rest: Any) -> Tensor:
        return own([seed(one) for one in seeds], [sample(one) for one in samples], *rest)

    return around("core.noise:row_keys", changed)


def drafts(change: Callable[[TokenTree], TokenTree]) -> Any:
    """A draft model whose drawn proposals are changed."""
    def proposed(own: Any, self: DraftModel, frontier: Any) -> TokenTree:
        tree = own(self, frontier)
        return change(tree) if tree.draft_probs is not None else tree

    return around(DRAFT + "propose", proposed)


def _softer(tree: TokenTree) -> TokenTree:
    law = tree.draft_probs.sqrt()
    return replace(tree, draft_probs=law / law.sum(-1, keepdim=True).clamp(min=1e-30))


def _likeliest(tree: TokenTree) -> TokenTree:
    return replace(tree, tokens=torch.cat([tree.tokens[:, :1], tree.draft_probs[:, 1:].argmax(-1)], 1))


def _likely_only(tree: TokenTree) -> TokenTree:
    chance = tree.draft_probs.gather(-1, tree.tokens.clamp(min=0)[..., None])[..., 0]
    keep = (chance > 0.3)[:, 1:].cummin(1).values
    tokens = torch.where(keep, tree.tokens[:, 1:], ABSENT)
    return replace(tree, tokens=torch.cat([tree.tokens[:, :1], tokens], 1))


def rows(change: Callable[[Sequence[Any]], list[Any]]) -> Any:
    """Logits processors that were told of other requests."""
    def init(own: Any, self: LogitsProcessors, given: Sequence[Any], *rest: Any) -> None:
        own(self, change(given), *rest)

    return around("core.processors:LogitsProcessors.__init__", init)


def ask(row: Any, **wants: Any) -> Any:
    return replace(row, sampling=replace(row.sampling, **wants))


def filtered(change: Callable[..., Tensor]) -> Any:
    """Other logits after the processors: ``change(own, self, logits, paths)``."""
    return around("core.processors:LogitsProcessors.filtered", change)


def _without(self: LogitsProcessors, **wants: Any) -> LogitsProcessors:
    return LogitsProcessors([ask(row, **wants) for row in self.rows], self.device)


def _unpenalised(own: Any, self: Any, logits: Tensor, paths: Paths) -> Tensor:
    bare = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return own(self if logits.shape[1] == 1 else _without(self, **bare), logits, paths)


def _heated_last(own: Any, self: Any, logits: Tensor, paths: Paths) -> Tensor:
    heat = torch.tensor([row.sampling.temperature or 1.0 for row in self.rows])[:, None, None]
    greedy = torch.tensor([row.sampling.temperature == 0 for row in self.rows])[:, None, None]
    cold = _without(self, temperature=1.0)
    return torch.where(greedy, own(self, logits, paths), own(cold, logits, paths) / heat)


def _last_escapes(own: Any, self: Any, logits: Tensor, paths: Paths) -> Tensor:
    scores = own(self, logits, paths)
    if logits.shape[1] > 1:
        scores = torch.cat([scores[:, :-1], own(_without(self, processors=()), logits, paths)[:, -1:]], 1)
    return scores


def _with_siblings(own: Any) -> property:
    def sequences(self: Paths) -> Tensor:
        tree = self.tree
        seen = torch.ones_like(tree.ancestors).tril()
        fake = {name: getattr(tree, name) for name in ("tokens", "depths", "depth_limit", "is_chain")}
        tree = SimpleNamespace(**fake, ancestors=seen)
        return own.func(SimpleNamespace(prefix=self.prefix, tree=tree, first=self.first))

    return property(sequences)


def committed_only() -> Context[Any]:
    lengths = property(lambda self: self.prefix.position[:, None] + 1 + 0 * self.tree.depths[:, self.first :])
    return patch.object(Paths, "lengths", lengths)


def siblings_seen() -> Context[Any]:
    return patch.object(Paths, "sequences", _with_siblings(found("core.prefix:Paths.sequences")[2]))


def by_slot(own: Any, self: Sampler, logits: Tensor, paths: Paths) -> Tensor:
    return own(self, logits, Paths(paths.prefix, TokenTree.chain(paths.tree.tokens), paths.first))


def smallest(self: KeyedChance, weights: Tensor, depth: Tensor) -> Tensor:
    place = noise.stream(self.keys, Role.RECOVER, self.position + depth[:, None] + 1, self.position)
    return argmax_token(weights.log() - noise.gumbel(place, weights.shape[-1])[:, 0])


def _falls_at_zero(own: Any, self: KeyedChance, probability: Tensor, node: int) -> Tensor:
    return own(self, torch.nextafter(probability, torch.ones_like(probability)), node)


def reordered(own: Any, self: Any, order: Sequence[int], *rest: Any) -> Any:
    """Rows rearranged wrongly when one retires."""
    order = list(order)
    return own(self, order[::-1] if len(order) > 1 and order != sorted(order) else order, *rest)


def _with_rest(own: Any, self: SequenceState, tokens: Sequence[int], *rest: Any, **how: Any) -> int:
    taken = own(self, tokens, *rest, **how)
    if self.finish_reason is not None:
        self.tokens += list(tokens[taken:])
    return int(taken)


def _one_more(own: Any, self: SequenceState, *args: Any, **how: Any) -> int:
    self.limit += 1
    try:
        return int(own(self, *args, **how))
    finally:
        self.limit -= 1


def _stop_kept(own: Any, self: SequenceState, piece: str, drafted: bool) -> None:
    before = self.text + "".join(text for text, _ in self._held)
    own(self, piece, drafted)
    if self.finish_reason == "stop" and self.params.sampling.stop:
        self.text = before + piece


def _last_piece(own: Any, self: SequenceState, piece: str, drafted: bool) -> None:
    own(self, piece, drafted)
    if self.finish_reason is None:
        self._release(sum(len(text) for text, _ in self._held))


def _forgetful(own: Any, self: DraftModel, commit: Any) -> None:
    if commit.tokens.shape[1] > 1 or self.scratch is not None:          # plain rounds are not heard of
        own(self, commit)


def _everything(own: Any, self: DraftModel, commit: Any) -> None:
    own(self, replace(commit, count=torch.full_like(commit.count, commit.tokens.shape[1])))


def _all_but_last(own: Any, self: DraftModel, prefix: Any, *rest: Any) -> Any:
    return own(self, replace(prefix, position=self._cache(len(prefix.position)).lengths.clone()), *rest)


def logprobs_elsewhere() -> Context[Any]:
    """Log-probabilities taken at the root, wherever the token stands in the draft."""
    def changed(own: Any, logits: Tensor, nodes: Tensor, *rest: Any) -> Tensor:
        return own(logits, torch.zeros_like(nodes), *rest)

    return around("engine.row_output:logprobs", changed)()


def mask(change: Callable[..., Tensor]) -> Any:
    return around("model.target:tree_mask", change)


def _blind_to_last(own: Any, tree: TokenTree, lengths: Tensor, span: int, dtype: Any, *rest: Any) -> Tensor:
    made = own(tree, lengths, span, dtype, *rest)
    last = torch.arange(span) == lengths[:, None, None, None] - 1
    return made.masked_fill(last & (lengths[:, None, None, None] > 1), torch.finfo(dtype).min)


def _sees_siblings(own: Any, tree: TokenTree, lengths: Tensor, span: int, dtype: Any, *rest: Any) -> Tensor:
    return own(TokenTree.chain(tree.tokens), lengths, span, dtype, *rest)


def counted(own: Any, self: Any, width: int, drafted: int, reach: int, accepted: int, *rest: Any) -> None:
    own(self, width, drafted, reach, accepted, accepted + 1, *rest[1:])


def only_first(own: Any, self: Any, keys: Tensor, role: Role, place: Tensor, *rest: Any) -> Tensor:
    """A kernel whose noise repeats: every position gets the first one's."""
    return own(self, keys, role, place[:, :1].expand_as(place), *rest)


def nothing(*args: Any, **how: Any) -> None:
    """Does not do it."""


def text_left(own: Any, self: Any, order: Sequence[int], *rest: Any) -> Any:
    """Rows of the text stay where they are when a row retires."""
    before = self.text.clone()
    done = own(self, order, *rest)
    self.text.copy_(before)
    return done


DRAFT, SAMPLER = "drafters.draft_model:DraftModel.", "core.sampling:Sampler."
CACHE, ROW = "model.kv_cache:KVCache.", "engine.sequence:SequenceState."
SLOW = "15: vLLM #6038, #13196"
REPEATED = {"position": lambda place, origin: place - origin, "origin": None}

MUTANTS = (
    # The draft's distribution
    Mutant("draft drawn from one law, weighed by another", "1: transformers #47932, DeepSpec #31",
           drafts(_softer), "law", ("draft",)),
    Mutant("the likeliest draft token said to be drawn", "2: transformers 5.23 (Gemma-4 assistant)",
           drafts(_likeliest), "count", ("rejection",)),
    Mutant("unlikely draft tokens dropped after they were drawn", "30: transformers threshold",
           drafts(_likely_only), "law", ("draft",)),
    Mutant("token ids beyond the target's vocabulary drafted", "32: padded vocabulary",
           around("drafters.draft_model:over_vocabulary", lambda own, logits, *rest: logits), "law",
           ("larger draft",)),
    # Noise
    Mutant("replacement drawn with the draft's noise", "4: vLLM #47386, #54282",
           streams(Role.RECOVER, role=Role.DRAFT), "streams"),
    Mutant("coins tossed with the draft's noise", "4: vLLM #47386",
           streams(Role.ACCEPT, role=Role.DRAFT), "streams"),
    Mutant("the same coins in every round", "4: fork #205", streams(Role.ACCEPT, origin=None), "streams"),
    Mutant("one coin for all drafted tokens", "4: shared uniform",
           streams(Role.ACCEPT, position=lambda place, origin: torch.ones_like(place)), "streams"),
    Mutant("the draft's noise repeats every round", "4: stale buffer", streams(Role.DRAFT, **REPEATED),
           "noise"),
    Mutant("the target's noise repeats", "4: stale buffer",
           streams(Role.TARGET, position=lambda place, origin: place % 4), "noise"),
    Mutant("the kernel's noise repeats", "4: stale buffer",
           around("native.cpu_ops:_Functions.stream", only_first), "noise"),
    Mutant("replacement drawn by the smallest noise", "6: exponential race upside down",
           lambda: patch.object(KeyedChance, "draw", smallest), "draws"),
    Mutant("a coin that cannot fall falls at zero", "6: transformers r_i <= probability_ratio",
           around("core.acceptance:KeyedChance.flip", _falls_at_zero), "draws"),
    Mutant("the request's seed ignored", SLOW, keys(lambda seed: 0), "noise"),
    Mutant("the high word of the seed dropped", SLOW, keys(lambda seed: seed & 0xFFFFFFFF), "noise"),
    Mutant("samples of a prompt share their noise", SLOW, keys(lambda seed: seed, lambda sample: 0),
           "noise"),
    Mutant("all rows draw with the first row's noise", "4: one generator per batch",
           streams(None, keys=lambda keys: keys[:1].expand_as(keys)), "noise"),
    Mutant("noise by slot in the tree, not by position", "24: call-order randomness",
           around(SAMPLER + "pick", by_slot), "bits"),
    Mutant("a greedy row in a mixed batch given noise", "16: batch leakage",
           lambda: patch.object(Sampler, "_some_greedy", False), "bits"),
    # Processors
    Mutant("penalties dropped on verified tokens", "12: vLLM #18902, TensorRT-LLM #17701",
           filtered(_unpenalised), "law", ("options",)),
    Mutant("penalties see the committed text only", "13: history-dependent processors", committed_only,
           "law", ("penalties in a tree",)),
    Mutant("penalties see siblings too", "13: flat draft list in a tree", siblings_seen,
           "law", ("options",)),
    Mutant("presence penalty counts the prompt", "12: vLLM #42802",
           rows(lambda given: [replace(row, prompt_length=0) for row in given]), "law", ("options",)),
    Mutant("minimum length held one token too long", "12: min_new_tokens",
           rows(lambda given: [ask(row, min_new_tokens=row.sampling.min_new_tokens + 1) for row in given]),
           "law", ("ends",)),
    Mutant("temperature after the filters", "12: order of processors", filtered(_heated_last),
           "law", ("options",)),
    Mutant("temperature of another row", "16: batch leakage",
           rows(lambda given: [ask(row, temperature=given[0].sampling.temperature) for row in given]),
           "law", ("mixed",)),
    Mutant("the row behind the draft escapes the grammar", "14: vLLM #44292, #36138",
           filtered(_last_escapes), "law", ("grammar",)),
    Mutant("the grammar sees the same text at every node", "14: vLLM #44297, #53777", committed_only,
           "law", ("grammar",)),
    # State
    Mutant("every row keeps as much as the luckiest", "16: ragged batches, arXiv 2510.22876",
           around(CACHE + "keep", lambda own, self, nodes, count: own(
               self, nodes, count.amax().expand_as(count).contiguous())), "bits"),
    Mutant("accepted branch not moved to its place", "16: KV left in tree order",
           around(CACHE + "keep", lambda own, self, nodes, count: own(self, None, count)), "law",
           ("tree",)),
    Mutant("positions by slot, not by depth", "20: stale position_ids, transformers #46936",
           around("core.tree:TokenTree.positions", lambda own, self, lengths, limit: own(
               TokenTree.chain(self.tokens), lengths, limit)), "law", ("tree",)),
    Mutant("mask forgets the last committed token", "16: mask off by one", mask(_blind_to_last),
           "law", ("draft",)),
    Mutant("nodes see their siblings", "27: tree mask", mask(_sees_siblings), "law", ("tree",)),
    Mutant("boolean mask added to the scores", "27: transformers eager attention",
           mask(lambda own, *args: own(*args).clamp(min=-1.0)), "bits"),
    Mutant("cache rows not moved when a row retires", "16: KV of another row",
           around(CACHE + "select", lambda own, self, order: own(self, range(len(order)))), "bits"),
    Mutant("cache rows rearranged wrongly when a row retires", "16: KV of another row",
           around(CACHE + "select", reordered), "bits"),
    Mutant("text rows not moved when a row retires", "16: another row's history",
           around("engine.batch:Batch.arrange", text_left), "bits",
           (Sampling(repetition_penalty=1.5), Sampling(temperature=1.0, frequency_penalty=1.0))),
    Mutant("draft cache keeps rejected tokens", "17, 18: vLLM #39273, #14649",
           around(DRAFT + "observe", _everything), "accepted"),
    Mutant("last accepted draft token never read by the draft", "18: SGLang #28771",
           around(DRAFT + "_read_root", _all_but_last), "accepted"),
    Mutant("draft memory stale after a pause", "33: K to 0 to K", around(DRAFT + "observe", _forgetful),
           "accepted"),
    Mutant("draft cache rows not moved when a row retires", "16: drafter state",
           around(DRAFT + "select", nothing), "accepted"),
    # Stopping and accounting
    Mutant("tokens behind an end token kept", "21: transformers #47912, SGLang #33758",
           around(ROW + "extend", _with_rest), "law", ("ends",)),
    Mutant("one token more than allowed", "21: SGLang #31599, openvino #1951",
           around(ROW + "extend", _one_more), "law", ("draft",)),
    Mutant("the stop string left in the text", "21: koboldcpp #1276", around(ROW + "_hold", _stop_kept),
           "law", ("ends",)),
    Mutant("stop strings searched in the last piece only", "21: SGLang #39826",
           around(ROW + "_hold", _last_piece), "law", ("ends",)),
    Mutant("tokens counted that were never emitted", "22: vLLM #56101",
           around("engine.stats:RoundStats.record", counted), "law", ("ends",)),
    Mutant("log-probabilities taken at the wrong node", "item of this project", logprobs_elsewhere,
           "bits"),
)
