"""Section "sampling": whole sequences through the real engine and its real noise, counted against the exact law.

Enumeration cannot see two draws that share a stream; counting can. A tiny random Llama of four tokens writes, another
drafts; the law comes from the model's own forward and `plainly`. Every test has a known false-alarm rate and power.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from scipy import stats
from torch import Tensor

from draftproof.core import acceptance, noise
from draftproof.core.acceptance import Rule
from draftproof.core.messages import Commit, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import Ops
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.plain import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.model.target import Target
from draftproof.native.cpu_ops import CpuOps
from draftproof.verify.gtest import FALSE_ALARM, POWER, GTest, g_test
from draftproof.verify.reference import Wanted, distribution_of_run
from draftproof.verify.report import Section, Tick, silent

VOCAB, LENGTH, PROMPT = 4, 4, (3,)
OURS, THEIRS = 4, 8
"""Seeds of target and draft: random, of middling entropy, about 0.6 apart in total variation."""
ROWS = 1024
"""Sequences side by side."""
SEQUENCES, QUICK_SEQUENCES = 57_344, 8_192
"""Per trial."""


# The toy --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def toy(seed: int, vocab: int = VOCAB, layers: int = 1) -> Target:
    """A tiny random Llama in float64 whose logits really depend on the text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.7, bos_token_id=None, eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).double()
    model.config.name_or_path = f"toy {seed}"
    return Target(model)


Law = dict[tuple[int, ...], float]


def exact_law(target: Target, want: Wanted, prompt: Sequence[int] = PROMPT, length: int = LENGTH) -> Law:
    """The law of whole texts, from the model's own forward on every prefix and filters written in plain Python."""
    logits: dict[tuple[int, ...], list[float]] = {}
    for size in range(length):
        texts = [(*prompt, *new) for new in itertools.product(range(target.vocab_size), repeat=size)]
        with torch.inference_mode():
            ends = target.model(torch.tensor(texts), use_cache=False).logits[:, -1]
        logits |= dict(zip(texts, ends.double().tolist(), strict=True))
    law: Law = {}
    for end, odds in distribution_of_run(logits.__getitem__, prompt, want, length).items():
        law[end.tokens] = law.get(end.tokens, 0.0) + odds
    return law


# Trials ---------------------------------------------------------------------------------------------------------------


WANTS = {
    "T 1": Wanted(temperature=1.0),
    "filtered": Wanted(temperature=1.3, top_k=3, top_p=0.95),
    "penalised, ending": Wanted(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, min_p=0.05, stop_tokens=(2,)),
}


def _model(*children: int) -> Drafter:
    return DraftModel(toy(THEIRS), VOCAB, TreeShape.branching(children) if children else None)


DRAFTS: dict[str, Callable[[], Drafter]] = {
    "plain": Plain,
    "lookup": partial(PromptLookup, 2, 1),
    "chain": _model,
    "tree 2-1": partial(_model, 2, 1),
    "tree 3": partial(_model, 3),
    "tree 2-2": partial(_model, 2, 2),
}


class Trial(NamedTuple):
    """One way to run the engine: rule, draft and its budget, and what is asked (by its name in `WANTS`)."""

    rule: str
    draft: str
    budget: int
    want: str = "T 1"

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.draft}, {self.budget} drafted, {self.want}"


TRIALS = (
    Trial("rejection", "chain", 3), Trial("block", "chain", 3), Trial("match", "chain", 2), Trial("rejection", "tree 2-1", 4),
    Trial("rejection", "chain", 2, "filtered"), Trial("block", "chain", 2, "penalised, ending"),
    Trial("match", "tree 2-1", 4, "penalised, ending"), Trial("rejection", "lookup", 2, "filtered"),
    Trial("rejection", "chain", 1), Trial("match", "tree 2-2", 6), Trial("match", "lookup", 3), Trial("match", "plain", 0),
    Trial("rejection", "tree 3", 3), Trial("block", "chain", 2), Trial("block", "chain", 3, "filtered"),
    Trial("match", "chain", 3, "filtered"), Trial("rejection", "tree 2-1", 4, "filtered"),
    Trial("rejection", "chain", 2, "penalised, ending"),
)
QUICK_TRIALS = TRIALS[:8]


def run_trial(trial: Trial, sequences: int, seed: int, drafter: Drafter | None = None) -> Counter[tuple[int, ...]]:
    """How often each text came; `ROWS` samples of every seed."""
    engine = Engine(toy(OURS), drafter or DRAFTS[trial.draft](), acceptance=trial.rule, budget=trial.budget)
    own = {name: value for name, value in vars(WANTS[trial.want]).items() if name != "banned_words"}
    seen: Counter[tuple[int, ...]] = Counter()
    for turn in range(-(-sequences // ROWS)):
        want = Sampling(**own, seed=seed + 7919 * turn)
        done = engine.generate([list(PROMPT)], max_new_tokens=LENGTH, sampling=want, n=min(ROWS, sequences - turn * ROWS))
        seen.update(tuple(one.tokens) for one in done)
    return seen


def judged(seen: Mapping[tuple[int, ...], int], law: Law) -> GTest:
    """Counts against the law; a text the law does not know is impossible."""
    texts = [*law, *(text for text in seen if text not in law)]
    return g_test([seen.get(text, 0) for text in texts], [law.get(text, 0.0) for text in texts])


def prove_sampling(
    quick: bool = False,
    tick: Tick = silent,
    *,
    seed: int = 0,
    sequences: int | None = None,
    rules: Mapping[str, Rule] | None = None,
    trials: Sequence[Trial] | None = None,
    controls: bool = True,
) -> Section:
    """Count whole sequences, test the streams, and run the controls through the same tests.

    rules: other rules to prove, by name; `trials` may name them. Passes if no test rejects at `FALSE_ALARM`, no draw is
    used twice, the target drafting for itself is accepted whole, and every control is rejected.
    """
    start = time.perf_counter()
    count = sequences or (QUICK_SEQUENCES if quick else SEQUENCES)
    trials = trials or (QUICK_TRIALS if quick else TRIALS)
    laws = {want: exact_law(toy(OURS), WANTS[want]) for want in {trial.want for trial in trials}}
    tests: dict[str, GTest] = {}
    pooled: dict[str, Counter[tuple[int, ...]]] = {want: Counter() for want in laws}
    failures: list[str] = []
    with patch.dict(acceptance.RULES, rules or {}):
        for done, trial in enumerate(trials):
            tick(0.85 * done / len(trials), trial.name)
            try:
                seen = run_trial(trial, count, seed + 1_000_003 * done)
            except Exception as error:                       # a broken algorithm may break anywhere
                failures.append(f"{trial.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            pooled[trial.want] += seen
            tests[trial.name] = judged(seen, laws[trial.want])
        if len(trials) > len(laws):
            tests |= {f"all together, {want}": judged(seen, laws[want]) for want, seen in pooled.items() if seen}
        tick(0.85, "streams")
        streams = stream_tests(1 << (15 if quick else 19), seed)
        dice = _unless_broken(dice_tests, 1 << (14 if quick else 18), seed)
        failures += [*paths_failures(seed)]
        tick(0.92, "controls")
        blind = _blindness(count, seed) if controls else {}
    failures += [_accusation(name, test) for name, test in tests.items() if not test.passed]
    failures += [f"{name}: the streams are not independent (p = {p:.2g})" for name, p in streams.items() if p < FALSE_ALARM]
    failures += [f"{name}: does not follow its law (p = {p:.2g})" for name, p in dice.items() if p < FALSE_ALARM]
    failures += [f"the control {name!r} passed (p = {p:.2g}): blind" for name, p in blind.items() if p >= FALSE_ALARM]
    total = sum(sum(seen.values()) for seen in pooled.values())
    finest = min((test.detects for test in tests.values()), default=1.0)
    alone = max((test.detects for name, test in tests.items() if not name.startswith("all together")), default=1.0)
    lowest = min((test.p_value for test in tests.values()), default=0.0)
    alarm = FALSE_ALARM * (len(tests) + len(streams) + len(dice))
    verdict = (
        f"{total:,} sequences through {len(trials)} set-ups, lowest p-value {lowest:.2g} of {len(tests)} tests; a total "
        f"variation of {alone:.3f} in any one set-up, or {finest:.3f} in all together, is found with probability {POWER}; "
        f"false alarms {alarm:.1g} per run; {len(streams)} tests of streams and {len(dice)} of single draws, "
        f"lowest p-value {min([*streams.values(), *dice.values()]):.2g}; "
        f"{sum(p < FALSE_ALARM for p in blind.values())} of {len(blind)} planted mistakes seen"
    )
    figures = {
        "sequences": total, "seed": seed, "tests": len(tests), "lowest_p_value": lowest, "false_alarm_per_test": FALSE_ALARM,
        "false_alarm_in_all": alarm, "power": POWER, "detects_in_one_set_up": alone, "detects_in_all_together": finest,
        "p_values": {name: test.p_value for name, test in tests.items()},
        "total_variation": {name: [test.tv, test.low, test.high] for name, test in tests.items()},
        "streams": streams, "single_draws": dice, "controls": blind,
    }
    return Section("sampling", not failures, verdict, figures, failures[:20], time.perf_counter() - start)


def _unless_broken(run: Callable[[int, int], dict[str, float]], rows: int, seed: int) -> dict[str, float]:
    """What `run` finds; what fails to run has no chance at all."""
    try:
        return run(rows, seed)
    except Exception as error:
        return {f"{type(error).__name__}: {' '.join(str(error).split())[:200]}": 0.0}


def _blindness(count: int, seed: int) -> dict[str, float]:
    """The controls' p-values, from as many sequences as a trial has."""
    law = exact_law(toy(OURS), WANTS["T 1"])
    return {name: judged(run(count, seed), law).p_value for name, run in CONTROLS.items()}


def _accusation(name: str, test: GTest) -> str:
    how = "impossible texts came" if test.p_value == 0 else f"p = {test.p_value:.2g}"
    return f"{name}: the texts do not follow the law ({how}; total variation {test.tv:.3f}, at least {test.low:.3f})"


# Streams --------------------------------------------------------------------------------------------------------------


def stream_tests(rows: int, seed: int) -> dict[str, float]:
    """p-values of chi-squared tests that pairs of draws are independent and uniform, over `rows` samples and seeds."""
    families = {
        "samples": noise.row_keys([seed] * rows, list(range(rows))),
        "seeds": noise.row_keys([seed + row for row in range(rows)], [0] * rows),
    }
    tests = {}
    for family, keys in families.items():
        for name, (one, other) in _pairs(partial(_draw, keys)).items():
            tests[f"{name} ({family})"] = _independent(one, other)
    return tests


def _pairs(draw: Callable[..., Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Draws that must have nothing to do with each other."""
    roles, place, origin = list(Role), 6, 5
    at = {role: draw(role, place, origin) for role in roles}
    pairs = {f"{one.name} and {other.name}": (at[one], at[other]) for one, other in itertools.combinations(roles, 2)}
    for role in roles:
        pairs[f"{role.name} at two positions"] = (at[role], draw(role, place + 1, origin))
        if role is not Role.TARGET:                                     # its draws are the same in every round, on purpose
            pairs[f"{role.name} in two rounds"] = (at[role], draw(role, place, origin + 1))
        pairs[f"{role.name} of two tokens"] = (at[role], draw(role, place, origin, token=1))
        pairs[f"{role.name} of neighbours"] = (at[role], at[role].roll(1))
    coin = draw(Role.ACCEPT, 1, origin, coin=True)
    pairs["a coin and the draft's draw"] = (coin, draw(Role.DRAFT, place, origin))
    pairs["a coin and the replacement"] = (coin, draw(Role.RECOVER, place, origin))
    pairs["two coins of a round"] = (coin, draw(Role.ACCEPT, 2, origin, coin=True))
    pairs["a coin and the next round's"] = (coin, draw(Role.ACCEPT, 1, origin + 1, coin=True))
    return pairs


def _draw(keys: Tensor, role: Role, place: int, origin: int, token: int = 0, coin: bool = False) -> Tensor:
    """[rows] one draw per row, as a uniform number."""
    where = torch.full((len(keys), 1), place)
    streams = noise.stream(keys, role, where, torch.full_like(where, origin) if role is not Role.TARGET else None)
    if coin:
        return noise.uniform(streams)[:, 0].double()
    return (-(-noise.gumbel(streams, 2)[:, 0, token].double()).exp()).exp()


def _independent(one: Tensor, other: Tensor, bins: int = 16) -> float:
    """p-value that a pair of uniform draws fills bins × bins cells evenly."""
    cells = (one * bins).long().clamp(0, bins - 1) * bins + (other * bins).long().clamp(0, bins - 1)
    return float(stats.chisquare(torch.bincount(cells, minlength=bins * bins).numpy()).pvalue)


# The dice -------------------------------------------------------------------------------------------------------------


def dice_tests(rows: int, seed: int) -> dict[str, float]:
    """p-values that the installed ways to draw one token or toss one coin have the law they are asked for."""
    law = torch.tensor([0.5, 0.22, 0.15, 0.1, 0.03], dtype=torch.float64)
    params = [SamplingParams(Sampling(temperature=1.0, seed=seed), 1, sample=row) for row in range(rows)]
    sampler = Sampler(params, ops=CpuOps())
    prefix = Prefix(torch.zeros(rows, 12, dtype=torch.int64), torch.full((rows,), 3), ahead=2)
    frontier = Frontier(prefix, sampler, 2, drawn=True)
    paths = Paths(prefix, TokenTree.root(prefix.root))
    logits, weights, same = law.log().expand(rows, 1, -1), (3 * law).expand(rows, -1), torch.ones(rows, dtype=torch.float64)
    chance = acceptance.KeyedChance(frontier)
    drawn = {
        "the target's pick": sampler.pick(logits, paths)[:, 0],
        "the draft's token": sampler.gumbel_logits(logits, paths, Role.DRAFT)[:, 0].argmax(-1),
        "the replacement": chance.draw(weights, torch.zeros(rows, dtype=torch.int64)),
        "the replacement at depth 2": chance.draw(weights, torch.full((rows,), 2)),
    }
    tests = {name: _fits(tokens, law) for name, tokens in drawn.items()}
    best = sampler.gumbel_logits(logits, paths, Role.DRAFT)[:, 0].topk(2).indices
    pairs = law[:, None] * law / (1 - law[:, None])
    tests["two siblings without replacement"] = _fits(best[:, 0] * 5 + best[:, 1], pairs.fill_diagonal_(0).flatten())
    for node, odds in ((1, 0.05), (1, 0.5), (2, 0.93)):
        tests[f"a coin of {odds:.2f}"] = _fits(chance.flip(odds * same, node).long(), torch.tensor([1 - odds, odds]))
    for name, number, odds in (("cannot fall", 0.0, 0.0), ("must fall", 1 - 2.0**-24, 1.0)):        # the ends of the scale
        with patch.object(noise, "uniform", lambda streams, number=number: torch.full(streams.shape[:-1], number)):
            tests[f"a coin that {name}"] = float(bool((chance.flip(odds * same, 1).double() == odds).all()))
    return tests


def _fits(outcomes: Tensor, law: Tensor) -> float:
    """p-value that outcomes (below 0: nothing came) follow a law."""
    if bool((outcomes < 0).any()):
        return 0.0
    return g_test(torch.bincount(outcomes, minlength=len(law)).numpy(), law.numpy()).p_value


# What must hold on every path -----------------------------------------------------------------------------------------


def paths_failures(seed: int) -> Iterator[str]:
    """Draws used twice, and drafts of the target's own that did not stand."""
    for rule, accept in acceptance.RULES.items():
        try:
            if accept.drawn and (again := draws_used_twice(rule, seed)):
                yield f"{rule}: {again} random numbers were drawn twice for different purposes"
            share = self_acceptance(rule, seed)
            if share < 1:
                yield f"{rule}: the target drafted for itself and only {share:.3f} of its tokens stood"
        except Exception as error:
            yield f"{rule}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def draws_used_twice(rule: str, seed: int) -> int:
    """How many streams a run with drawn drafts asks for more than once."""
    asked: list[Tensor] = []

    def recorded(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(streams: Tensor, *rest: Any, **how: Any) -> Tensor:
            asked.append(streams.reshape(-1, 2).clone())
            return call(streams, *rest, **how)

        return record

    engine = Engine(toy(OURS), _model(), acceptance=rule, budget=3)
    with patch.object(noise, "uniform", recorded(noise.uniform)), patch.object(noise, "gumbel", recorded(noise.gumbel)):
        engine.generate([[3]], max_new_tokens=12, sampling=Sampling(temperature=1.0, seed=seed), n=16)
    keys = torch.cat(asked)
    return len(keys) - len(torch.unique(keys, dim=0))


def self_acceptance(rule: str, seed: int) -> float:
    """Share of the target's own drafts that stood; 1 unless something is forgotten or misplaced."""
    tried = stood = 0
    for budget, want in ((3, Sampling(temperature=1.0, seed=seed)), (2, Sampling(temperature=0.8, top_k=3, seed=seed + 1))):
        engine = Engine(toy(OURS), DraftModel(toy(OURS), VOCAB), acceptance=rule, budget=budget)
        for one in engine.generate([[3], [1, 2, 0, 1], [0, 0]], max_new_tokens=11, sampling=want, n=4, batch_size=6):
            tried, stood = tried + sum(one.stats.tried_at), stood + sum(one.stats.accepted_at)
    return stood / tried if tried else 0.0


# Mistakes that must be seen -------------------------------------------------------------------------------------------


@dataclass
class Sure(Drafter):
    """Chooses the likeliest tokens and says they were drawn (known bug 2)."""

    inner: DraftModel
    name = "sure"

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        self.inner.start(rows, capacity, ops)

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)

    def propose(self, frontier: Frontier) -> TokenTree:
        tree = self.inner.propose(frontier)
        if tree.draft_probs is None:
            return tree
        best = tree.draft_probs[:, 1:].argmax(-1)
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], best], 1))


World = Callable[[], AbstractContextManager[Any]]


def _control(count: int, seed: int, drafter: Drafter | None = None, world: World = nullcontext) -> Counter[tuple[int, ...]]:
    with world():
        return run_trial(Trial("rejection", "chain", 3), count, seed, drafter)


def _shared_noise() -> AbstractContextManager[Any]:
    """The replacement of a rejected token is drawn with the draft's noise (known bug 4)."""
    roles = {role.name: role for role in Role} | {"RECOVER": Role.DRAFT}
    return patch.object(acceptance, "Role", SimpleNamespace(**roles))


CONTROLS: dict[str, Callable[[int, int], Counter[tuple[int, ...]]]] = {
    "the likeliest token, said to be drawn": lambda count, seed: _control(count, seed, Sure(DraftModel(toy(THEIRS), VOCAB))),
    "draft and replacement share their noise": partial(_control, world=_shared_noise),
}
