"""Section "sampling": audits whole texts of the real engine with its real noise.

Enumeration cannot see two draws that share a random number; counting can. The engine has to pass
the audit for other engines. At a temperature where all tokens are equally likely the text *is* the
noise, also from the machine's kernels: it must not repeat itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.core.sampling import Sampler
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Engine
from draftproof.verify.audit import (
    FALSE_ALARM,
    POWER,
    Audit,
    audit,
    g_test,
    model_distribution,
    too_equal,
)
from draftproof.verify.cases import PLAIN, Case, CaseRequest, by_model, one_thread, setups, toy
from draftproof.verify.report import Section, Tick, silent

SEQUENCES, QUICK_SEQUENCES = 57_344, 8_192
"""Texts per trial."""
TEXTS, TOKENS, WIDE, FLAT = 32, 100, 32, 1e9
"""Texts that are nothing but noise, their length, their vocabulary, and the temperature for it."""
WANTS = {
    "T 1": Sampling(temperature=1.0),
    "filtered": Sampling(temperature=1.3, top_k=3, top_p=0.95),
    "penalised, ending": Sampling(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, min_p=0.05, stop_tokens=(2,)
    ),
}
TRIALS = (
    "rejection; chain; T 1", "block; chain; T 1", "match; chain; T 1",
    "rejection; tree of 4; T 1", "rejection; chain; filtered", "block; chain; penalised, ending",
    "match; tree of 4; penalised, ending", "rejection; lookup; filtered",
    "rejection; single; T 1", "match; tree of 3; T 1", "match; lookup; T 1", "match; plain; T 1",
    "rejection; smaller draft; T 1", "block; larger draft; T 1", "block; chain; filtered",
    "match; chain; filtered", "rejection; tree of 4; filtered",
    "rejection; chain; penalised, ending",
)  # fmt: skip
"""Ways to run the engine: names in `RULES`, `SETUPS` and `WANTS`; the first eight if in a hurry."""
OURS, THEIRS = toy(18, 4), toy(32, 4)
SETUPS = setups(THEIRS, 4) | {"plain": PLAIN}
DEPTHS = (
    by_model(THEIRS, 3, vocab=4), by_model(THEIRS, 7, vocab=4),
    by_model(THEIRS, 10, 2, 2, 1, vocab=4),
)
"""Drafts, also deeper than any default, whose random numbers are looked at."""
"""Of middling entropy, 0.7 apart. Of three tokens, a residual would often hold but one."""


def trial(words: str) -> Case:
    """The case for a line of `TRIALS`."""
    rule, setup, want = words.split("; ")
    return Case(words, RULES[rule], SETUPS[setup], [CaseRequest(WANTS[want], (3,), 4)], OURS)


def audited(
    case: Case, samples: int, seed: int, sampler: type[Sampler] = Sampler
) -> Audit:  # fmt: skip
    """Audit the texts of a case with one request against the model's own distribution."""
    (request,) = case.requests

    def draw(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        return [completion.tokens for completion in case.run([seed], n, None, sampler)]

    probs = model_distribution(case.target.model, request.sampling, len(request.prompt))
    ends = tuple(request.sampling.stop_tokens or ())
    return audit(
        draw, probs, request.prompt, length=request.limit, samples=samples, seed=seed, at_once=1024,
        ends=ends,
    )


class SharedNoise(Sampler):
    """A planted mistake: the replacement of a rejected token is drawn with the draft's noise."""

    def streams(self, role: Role, position: Tensor, origin: Tensor | None = None) -> Tensor:
        return super().streams(Role.DRAFT if role is Role.RECOVER else role, position, origin)


def noise_texts(rule: str, drafted: int, dtype: torch.dtype, seeds: Sequence[int]) -> Tensor:
    """[len(seeds), TEXTS, TOKENS] texts, drafted by this rule, of equally likely tokens."""
    flat = toy(1, WIDE, 1, 32, dtype)
    draft = DraftModel(flat, WIDE) if drafted else None
    engine = Engine(flat, draft, acceptance=rule, budget=drafted)
    sampling = [Sampling(temperature=FLAT, seed=seed, max_new_tokens=TOKENS) for seed in seeds]
    done = engine.generate([[0]] * len(seeds), sampling=sampling, n=TEXTS)
    return torch.tensor([completion.tokens for completion in done]).view(len(seeds), TEXTS, TOKENS)


def noise_tests(seed: int) -> Iterator[tuple[str, float]]:
    """p-values for uniform noise of each rule without repetition: at a later position, in another
    sample, or under another seed, even one that differs only beyond 32 bits."""
    seeds = (seed, seed + 1, seed + (1 << 32), seed + (1 << 45))
    plain: list[Tensor] = []
    for rule, drafted in (("match", 0), ("rejection", 3), ("block", 2)):
        for dtype in (torch.float64, torch.bfloat16):
            name = f"{rule}, {drafted} drafted, {str(dtype).removeprefix('torch.')}"
            texts = noise_texts(rule, drafted, dtype, seeds)
            plain += [texts] if not drafted else []
            counts = torch.bincount(texts.flatten(), minlength=WIDE)
            yield f"{name}: tokens", g_test(counts, [1 / WIDE] * WIDE).p_value
            lags = [_equal(texts[..., lag:], texts[..., :-lag]) for lag in range(1, 80)]
            yield f"{name}: positions", min(1.0, min(lags) * len(lags))
            yield f"{name}: samples", _equal(texts[:, 1:], texts[:, :-1])
            others = [_equal(texts[0], texts[other]) for other in range(1, len(seeds))]
            yield f"{name}: seeds", min(1.0, min(others) * len(others))
    yield "the same noise in every dtype", float((plain[0] == plain[1]).double().mean() > 0.999)


def _equal(left: Tensor, other: Tensor) -> float:
    return too_equal(int((left == other).sum()), left.numel(), 1 / WIDE)


def draws_used_twice(rule: str, seed: int) -> int:
    """The number of random streams that a run with drawn drafts uses more than once."""
    drawn: list[Tensor] = []

    class Recorded(Sampler):
        def streams(self, role: Role, position: Tensor, origin: Tensor | None = None) -> Tensor:
            made = super().streams(role, position, origin)
            drawn.append(made.reshape(-1, 2).clone())
            return made

    again, sampling = 0, Sampling(temperature=1.0, seed=seed)
    for setup in DEPTHS:
        drawn.clear()
        engine = Engine(
            OURS, setup.draft(), acceptance=rule, budget=setup.max_draft_tokens, sampler=Recorded
        )
        engine.generate([[3]], max_new_tokens=3 * setup.max_draft_tokens, sampling=sampling, n=16)
        streams = torch.cat(drawn)
        again += len(streams) - len(torch.unique(streams, dim=0))
    return again


def prove_sampling(
    quick: bool = False, tick: Tick = silent, *, seed: int = 0, sequences: int | None = None,
    cases: Sequence[Case] | None = None,
) -> Section:  # fmt: skip
    """Audit the engine, test the noise, and audit a planted mistake in the same way.

    cases: replacements for `TRIALS`. Passes if no audit finds a bias, no random number is used
    twice, and the planted mistake is found.
    """
    count = sequences or (QUICK_SEQUENCES if quick else SEQUENCES)
    chosen = cases or [trial(words) for words in (TRIALS[:8] if quick else TRIALS)]
    audits: dict[str, Audit] = {}
    with one_thread():
        for done, case in enumerate(chosen):
            tick(0.8 * done / len(chosen), case.name)
            audits[case.name] = audited(case, count, seed + 1_000_003 * done)
        tick(0.8, "noise")
        streams = dict(noise_tests(seed))
        twice = {name: draws_used_twice(name, seed) for name, rule in RULES.items()
                 if rule.needs_draft_probs}
        tick(0.95, "a planted mistake")
        result = audited(trial(TRIALS[0]), count, seed, SharedNoise)
        planted = min(check.p_value for check in result.checks)
    failures = [
        f"{name}: {check.name}: the texts do not follow the distribution (p = {check.p_value:.2g}; "
        f"total variation {result.joint.tv:.3f})"
        for name, result in audits.items() for check in result.checks if not check.passed
    ]
    failures += [f"{name}: not independent (p = {p:.2g})"
                 for name, p in streams.items() if p < FALSE_ALARM]
    failures += [f"{name}: {again} random numbers were drawn twice for different purposes"
                 for name, again in twice.items() if again]
    if planted >= FALSE_ALARM:
        failures.append(f"the planted mistake was not seen (p = {planted:.2g}): this is blind")
    lowest = min(check.p_value for result in audits.values() for check in result.checks)
    detects = max(result.joint.detects for result in audits.values())
    verdict = (
        f"{count * len(audits):,} texts through {len(chosen)} set-ups, lowest p-value "
        f"{lowest:.2g}; a total variation of {detects:.3f} is found with probability {POWER}; "
        f"{len(streams)} tests of the noise, lowest p-value {min(streams.values()):.2g}"
    )
    figures = {
        "sequences": count * len(audits), "seed": seed, "false_alarm_per_test": FALSE_ALARM,
        "power": POWER, "detects": detects, "noise": streams, "planted_mistake": planted,
        "p_values": {name: result.joint.p_value for name, result in audits.items()},
        "total_variation": {name: result.joint.tv for name, result in audits.items()},
    }
    return Section("sampling", verdict, figures, failures)
