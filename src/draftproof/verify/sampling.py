"""Section "sampling": whole texts through the real engine and its real noise, counted.

Enumeration cannot see two draws that share a random number; counting can. On a tiny random Llama
the texts must follow the distribution that enumeration gives. On one whose logits are all equal the
text *is* the noise, by the kernels at hand too: it may not repeat itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from draftproof.core import acceptance, noise
from draftproof.core.acceptance import RULES, Rule
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.core.tree import TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.plain import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.model.target import Target
from draftproof.verify.enumeration import Ask, Case, enumerate_texts, one_thread
from draftproof.verify.report import Section, Tick, failed, silent
from draftproof.verify.statistics import FALSE_ALARM, POWER, GTest, g_test, too_equal

VOCAB, LENGTH, PROMPT = 4, 4, (3,)
OURS, THEIRS = 4, 8
"""Seeds of target and draft: random, of middling entropy, about 0.6 apart in total variation."""
ROWS, SEQUENCES, QUICK_SEQUENCES = 1024, 57_344, 8_192
"""Sequences side by side, and per trial."""
TEXTS, TOKENS, WIDE = 32, 100, 32
"""Texts that are nothing but noise, their length, their vocabulary."""
WANTS = {
    "T 1": Sampling(temperature=1.0),
    "filtered": Sampling(temperature=1.3, top_k=3, top_p=0.95),
    "penalised, ending": Sampling(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, min_p=0.05, stop_tokens=(2,)
    ),
}
Law = dict[tuple[int, ...], float]


@lru_cache(maxsize=16)
def toy(
    seed: int, vocab: int = VOCAB, layers: int = 1, width: int = 8, flat: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Target:
    """A tiny random Llama whose logits really depend on the text, or (flat) are all equal."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=512,
        initializer_range=0.7, bos_token_id=None, eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype).eval()
    model.config.name_or_path = f"toy {seed}"
    target = Toy(model)
    target.flat = flat                          # after loading, which refuses such a model
    return target


class Toy(Target):
    """A model; flat: its logits are all equal."""

    flat = False

    def read(self, *args: Any, **how: Any) -> Any:
        reading = super().read(*args, **how)
        logits = reading.logits
        return reading._replace(logits=torch.zeros_like(logits)) if self.flat else reading


def exact_law(want: Sampling) -> Law:
    """The distribution of the toy's texts, by enumeration of plain decoding."""
    ask = Ask(want, PROMPT, LENGTH)
    (law,) = enumerate_texts(Case("toy", [ask], toy(OURS))).laws
    return {tokens: probability for (tokens, _, _), probability in law.items()}


# Texts that must follow a distribution


def _drafts(*children: int) -> Drafter:
    return DraftModel(toy(THEIRS), VOCAB, TreeShape.branching(children) if children else None)


DRAFTS: dict[str, Callable[[], Drafter]] = {
    "plain": Plain, "lookup": partial(PromptLookup, 2, 1), "chain": _drafts,
    "tree 2-1": partial(_drafts, 2, 1), "tree 3": partial(_drafts, 3),
    "tree 2-2": partial(_drafts, 2, 2),
}


class Trial(NamedTuple):
    """A way to run the engine: rule, draft, draft tokens, what is asked (a name in `WANTS`)."""

    rule: str
    draft: str
    budget: int
    want: str = "T 1"

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.draft}, {self.budget} drafted, {self.want}"


TRIALS = (
    Trial("rejection", "chain", 3), Trial("block", "chain", 3), Trial("match", "chain", 2),
    Trial("rejection", "tree 2-1", 4), Trial("rejection", "chain", 2, "filtered"),
    Trial("block", "chain", 2, "penalised, ending"),
    Trial("match", "tree 2-1", 4, "penalised, ending"),
    Trial("rejection", "lookup", 2, "filtered"),
    Trial("rejection", "chain", 1), Trial("match", "tree 2-2", 6), Trial("match", "lookup", 3),
    Trial("match", "plain", 0), Trial("rejection", "tree 3", 3), Trial("block", "chain", 2),
    Trial("block", "chain", 3, "filtered"), Trial("match", "chain", 3, "filtered"),
    Trial("rejection", "tree 2-1", 4, "filtered"),
    Trial("rejection", "chain", 2, "penalised, ending"),
)
QUICK_TRIALS = TRIALS[:8]


def run_trial(trial: Trial, sequences: int, seed: int) -> Counter[tuple[int, ...]]:
    """How often each text came; `ROWS` samples of every seed."""
    draft = DRAFTS[trial.draft]()
    engine = Engine(toy(OURS), draft, acceptance=trial.rule, budget=trial.budget)
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, sequences, ROWS):
        want = replace(WANTS[trial.want], seed=seed + 7919 * start, max_new_tokens=LENGTH)
        samples = min(ROWS, sequences - start)
        done = engine.generate([list(PROMPT)], sampling=want, n=samples)
        seen.update(tuple(one.tokens) for one in done)
    return seen


def judged(seen: Mapping[tuple[int, ...], int], law: Law) -> GTest:
    """Counts against the law; a text the law does not know is impossible."""
    texts = [*law, *(text for text in seen if text not in law)]
    return g_test([seen.get(text, 0) for text in texts], [law.get(text, 0.0) for text in texts])


def shared_noise() -> AbstractContextManager[Any]:
    """A planted mistake: the token that replaces a rejected one is drawn with the draft's noise."""
    roles = {role.name: role for role in Role} | {"RECOVER": Role.DRAFT}
    return patch.object(acceptance, "Role", SimpleNamespace(**roles))


# Texts that are nothing but noise


def noise_texts(rule: str, drafted: int, dtype: torch.dtype, seeds: Sequence[int]) -> Tensor:
    """[len(seeds), TEXTS, TOKENS] texts of a model whose logits are all equal, drafted so."""
    flat = toy(1, WIDE, 1, 32, True, dtype)
    draft = DraftModel(flat, WIDE) if drafted else None
    engine = Engine(flat, draft, acceptance=rule, budget=drafted)
    asked = [Sampling(temperature=1.0, seed=seed, max_new_tokens=TOKENS) for seed in seeds]
    done = engine.generate([[0]] * len(seeds), sampling=asked, n=TEXTS)
    return torch.tensor([one.tokens for one in done]).view(len(seeds), TEXTS, TOKENS)


def noise_tests(seed: int) -> Iterator[tuple[str, float]]:
    """p-values that the noise of each rule is even and repeats nowhere: not at a later position,
    not in another sample, not under another seed, even one that differs only beyond 32 bits."""
    seeds = (seed, seed + 1, seed + (1 << 32), seed + (1 << 45))
    plain: dict[torch.dtype, Tensor] = {}
    for rule, drafted in (("match", 0), ("rejection", 3), ("block", 2)):
        for dtype in (torch.float64, torch.bfloat16):
            name = f"{rule}, {drafted} drafted, {str(dtype).removeprefix('torch.')}"
            texts = noise_texts(rule, drafted, dtype, seeds)
            if not drafted:
                plain[dtype] = texts
            counts = torch.bincount(texts.flatten())
            yield f"{name}: tokens", g_test(counts, [1 / WIDE] * WIDE).p_value
            lags = [_equal(texts[..., lag:], texts[..., :-lag]) for lag in range(1, 80)]
            yield f"{name}: positions", min(1.0, min(lags) * len(lags))
            yield f"{name}: samples", _equal(texts[:, 1:], texts[:, :-1])
            others = [_equal(texts[0], texts[other]) for other in range(1, len(seeds))]
            yield f"{name}: seeds", min(1.0, min(others) * len(others))
    same = (plain[torch.float64] == plain[torch.bfloat16]).double().mean()
    yield "the same noise in every dtype", float(same > 0.999)


def _equal(one: Tensor, other: Tensor) -> float:
    return too_equal(int((one == other).sum()), one.numel(), 1 / WIDE)


def draws_used_twice(rule: str, seed: int) -> int:
    """How many random streams a run with drawn drafts asks for more than once."""
    asked: list[Tensor] = []

    def recorded(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(streams: Tensor, *rest: Any, **how: Any) -> Tensor:
            asked.append(streams.reshape(-1, 2).clone())
            return call(streams, *rest, **how)

        return record

    engine = Engine(toy(OURS), _drafts(), acceptance=rule, budget=3)
    want, coins, draws = Sampling(temperature=1.0, seed=seed), noise.uniform, noise.gumbel
    with (
        patch.object(noise, "uniform", recorded(coins)),
        patch.object(noise, "gumbel", recorded(draws)),
    ):
        engine.generate([[3]], max_new_tokens=12, sampling=want, n=16)
    streams = torch.cat(asked)
    return len(streams) - len(torch.unique(streams, dim=0))


def self_acceptance(rule: str, seed: int) -> float:
    """Share of the target's own drafts that were accepted; 1 unless something is misplaced."""
    reached = accepted = 0
    for budget, top_k in ((3, 0), (2, 3)):
        engine = Engine(toy(OURS), DraftModel(toy(OURS), VOCAB), acceptance=rule, budget=budget)
        want = Sampling(temperature=0.8, top_k=top_k, seed=seed)
        prompts = [[3], [1, 2, 0, 1], [0, 0]]
        for one in engine.generate(prompts, max_new_tokens=11, sampling=want, n=4, batch_size=6):
            reached += sum(one.stats.tried_at)
            accepted += sum(one.stats.accepted_at)
    return accepted / reached if reached else 0.0


def broken_streams(seed: int) -> Iterator[str]:
    """Draws used twice, and drafts of the target's own that were not accepted, in words."""
    for name, rule in RULES.items():
        try:
            if rule.drawn and (again := draws_used_twice(name, seed)):
                yield f"{name}: {again} random numbers were drawn twice for different purposes"
            if (share := self_acceptance(name, seed)) < 1:
                yield f"{name}: the target drafted for itself and only {share:.3f} were accepted"
        except Exception as error:                      # a broken algorithm may break anywhere
            yield f"{name}: {failed(error)}"


# The section


def prove_sampling(
    quick: bool = False, tick: Tick = silent, *, seed: int = 0, sequences: int | None = None,
    rules: Mapping[str, Rule] | None = None, trials: Sequence[Trial] | None = None,
) -> Section:
    """Count whole texts, examine the noise, and run a planted mistake through the same test.

    rules: other rules to prove, by name; `trials` may name them. Passes if no test rejects at
    `FALSE_ALARM`, no random number is used twice, the target drafting for itself is accepted whole,
    and the planted mistake is rejected.
    """
    count = sequences or (QUICK_SEQUENCES if quick else SEQUENCES)
    chosen = trials or (QUICK_TRIALS if quick else TRIALS)
    tests: dict[str, GTest] = {}
    pooled: dict[str, Counter[tuple[int, ...]]] = {trial.want: Counter() for trial in chosen}
    failures: list[str] = []
    with one_thread(), patch.dict(RULES, rules or {}):
        laws = {want: exact_law(WANTS[want]) for want in {*pooled, "T 1"}}
        for done, trial in enumerate(chosen):
            tick(0.8 * done / len(chosen), trial.name)
            try:
                seen = run_trial(trial, count, seed + 1_000_003 * done)
            except Exception as error:                  # a broken algorithm may break anywhere
                failures.append(f"{trial.name}: {failed(error)}")
                continue
            pooled[trial.want] += seen
            tests[trial.name] = judged(seen, laws[trial.want])
        for want, seen in pooled.items():
            if seen and len(chosen) > len(laws):
                tests[f"all together, {want}"] = judged(seen, laws[want])
        tick(0.8, "noise")
        try:
            streams = dict(noise_tests(seed))
        except Exception as error:                             # as above
            streams = {failed(error): 0.0}
        failures += broken_streams(seed)
        tick(0.95, "a planted mistake")
        with shared_noise() if trials is None else nullcontext():
            planted = judged(run_trial(TRIALS[0], count, seed), laws["T 1"]).p_value
    failures += [
        f"{name}: the texts do not follow the distribution (p = {test.p_value:.2g}; total "
        f"variation {test.tv:.3f}, at least {test.low:.3f})"
        for name, test in tests.items() if not test.passed
    ]
    dependent = {name: p for name, p in streams.items() if p < FALSE_ALARM}
    failures += [f"{name}: not independent (p = {p:.2g})" for name, p in dependent.items()]
    if trials is None and planted >= FALSE_ALARM:
        failures.append(f"the planted mistake was not seen (p = {planted:.2g}): this is blind")
    total, found = sum(sum(seen.values()) for seen in pooled.values()), tests.values()
    lowest = min((test.p_value for test in found), default=0.0)
    detects = min((test.detects for test in found), default=1.0)
    verdict = (
        f"{total:,} texts through {len(chosen)} set-ups, lowest p-value {lowest:.2g} of "
        f"{len(tests)} tests; a total variation of {detects:.3f} is found with probability {POWER};"
        f" {len(streams)} tests of the noise, lowest p-value {min(streams.values()):.2g}"
    )
    figures = {
        "sequences": total, "seed": seed, "false_alarm_per_test": FALSE_ALARM, "power": POWER,
        "detects": detects, "p_values": {name: test.p_value for name, test in tests.items()},
        "total_variation": {name: [test.tv, test.low, test.high] for name, test in tests.items()},
        "noise": streams, "planted_mistake": planted,
    }
    return Section("sampling", verdict, figures, failures)
