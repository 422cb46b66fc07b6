"""Section "bits": on the model at hand, texts and log-probabilities against plain decoding.

Rows of every kind share a batch: greedy and sampled, seeds beyond 32 bits, ends at different times.
Each must be what plain decoding writes for it alone. Where the machine has an exactness class every
bit must agree; elsewhere the model's own rounding, measured by transformers alone, must explain
every difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.core.noise import Role
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.plain import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Completion, Engine
from draftproof.model.device import Device
from draftproof.model.exactness import probe
from draftproof.model.target import Target
from draftproof.verify.report import Section, Tick, silent

TEXTS = (
    "Once upon a time, there was a little girl named Lily. She loved to",
    "The cat sat on the mat. The cat sat on the",
    "One day, a dog and a bird went to the park. The dog said,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "It was a",
    "Tom had a red ball. The red ball was his favorite. He took the red",
    "1, 2, 3, 4, 5,",
    "The sun was",
)
ROWS = (1, 8, 3)
"""Rows of the batches; of the last, rows come while others go."""
NEW_TOKENS, QUICK_NEW_TOKENS = 48, 12
SLACK = 4.0
"""Times the model's own rounding that a logit may be off: other shapes may round a little worse."""


@dataclass
class Found:
    """What was compared so far. noise, bounds: the model's rounding, over all and by text."""

    texts: int = 0
    identical: int = 0
    largest: float = 0.0
    noise: float = 0.0
    control: float = 0.0
    bounds: list[float] = field(default_factory=list)
    diverged: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def prove_bits(
    engine: Engine, quick: bool = False, tick: Tick = silent, *, seed: int = 0,
    new_tokens: int | None = None, exact_nodes: int | None = None, wants: Sequence[Sampling] = (),
) -> Section:
    """Compare the engine's drafter, prompt lookup and plain batches with plain decoding row by row.

    exact_nodes: the machine's exactness class (rows x nodes), None to probe it. wants: how to
    sample, in turn. Passes if, inside the class, every token and every bit of every log-probability
    agrees; outside it, if no difference exceeds the rounding, and a forgotten token does.
    """
    if exact_nodes is None:
        tick(0.0, "probing the machine")
        probed = probe(engine.target, (2, 8), 48) if quick else probe(engine.target)
        exact_nodes = probed.exact_nodes
    prompts, found = _prompts(engine), Found()
    new = new_tokens or (QUICK_NEW_TOKENS if quick else NEW_TOKENS)
    asked = _asked(wants or _usual(seed), min(new, engine.target.context - max(map(len, prompts))))
    plain = _write(engine, Plain(), 0, prompts, asked, 1)
    for prompt, one in zip(prompts, plain, strict=True):
        _measure(engine.target, prompt, one, found)
    drafters: dict[str, Drafter] = {"none": Plain(), engine.drafter.name: engine.drafter}
    drafters["prompt-lookup"] = PromptLookup()
    cases = [(name, rows) for name in drafters for rows in ROWS if name != "none" or rows > 1]
    exact_cases = 0
    for done, (name, rows) in enumerate(cases):
        tick((done + 1) / (len(cases) + 1), f"{name}, batch {rows}")
        drafter, own = drafters[name], name == engine.drafter.name
        most = 0 if name == "none" else engine.budget.most if own else drafter.default_budget
        fits = min(most, exact_nodes // rows - 1)
        exact = fits >= min(1, most)
        exact_cases += exact
        budget = fits if exact else most
        wrote = _write(engine, drafter, budget, prompts, asked, rows)
        case = f"{name}, batch {rows}, {budget} drafted"
        for place, (one, ours) in enumerate(zip(wrote, plain, strict=True)):
            _compare(f"{case}, text {place + 1}", engine, prompts[place], asked[place], ours, one,
                     0.0 if exact else found.bounds[place], found)  # fmt: skip
    if not found.control > 1:
        why = "a forgotten token changes logits no more than rounding: this is blind"
        found.failures.append(why)
    here = f"{exact_cases} of {len(cases)} set-ups in the machine's exactness class"
    verdict = (
        f"{found.texts} texts compared with plain decoding, {found.identical} to the last bit; "
        f"{here} of {exact_nodes} nodes; "
        f"log-probabilities differ by at most {found.largest:.2g}, the model's own logits by "
        f"{found.noise:.2g}; {len(found.diverged)} texts diverged at near-ties"
    )
    figures = {
        "texts": found.texts, "identical": found.identical, "exact_nodes": exact_nodes,
        "set_ups_exact": exact_cases, "set_ups": len(cases), "largest_difference": found.largest,
        "noise": found.noise, "slack": SLACK, "control_over_bound": found.control,
        "divergences": found.diverged, "seed": seed,
    }
    return Section("bits", verdict, figures, found.failures)


def _prompts(engine: Engine) -> list[list[int]]:
    """Texts where there is a tokenizer, else numbers that repeat themselves."""
    longest, vocab = max(1, engine.target.context // 2), engine.target.vocab_size
    if engine.codec is not None:
        return [(engine.codec.encode(text) or [0])[-longest:] for text in TEXTS]
    dice = torch.Generator().manual_seed(0)
    sizes = (9, 5, 14, 7, 2, 11, 6, 3)
    texts = [torch.randint(vocab, (size,), generator=dice).tolist() for size in sizes]
    return [(text[:3] * 5 if index % 2 else text)[-longest:] for index, text in enumerate(texts)]


def _usual(seed: int) -> list[Sampling]:
    """Greedy and sampled rows in turn; seeds within and beyond 32 bits."""
    seeds, heats = (seed, seed + (1 << 33), seed + 7, seed - (1 << 40)), (1.0, 0.7, 1.0, 1.3)
    sampled = [Sampling(temperature=heat, seed=own) for heat, own in zip(heats, seeds, strict=True)]
    return [want for one in sampled for want in (Sampling(), one)]


def _asked(wants: Sequence[Sampling], new: int) -> list[Sampling]:
    """Per prompt what it is asked; the rows end at different times."""
    return [
        replace(wants[row % len(wants)], logprobs=True, max_new_tokens=max(1, new - row * 5 % new))
        for row in range(len(TEXTS))
    ]


def _write(
    engine: Engine, drafter: Drafter, budget: int, prompts: list[list[int]], asked: list[Sampling],
    rows: int,
) -> list[Completion]:
    own = Engine(engine.target, drafter, budget=budget, stop_tokens=engine.stop_tokens)
    return [one.checked() for one in own.generate(prompts, sampling=asked, batch_size=rows)]


def _measure(target: Target, prompt: list[int], plain: Completion, found: Found) -> None:
    """Compare plain decoding with the model's own forward, by transformers; note its rounding."""
    text = [*prompt, *plain.tokens]
    whole, step = _own(target, text, len(text)), _own(target, text, 1)
    rounding = torch.finfo(target.dtype).eps * float(whole[whole.isfinite()].abs().max())
    noise = max(_furthest(whole, step), rounding)
    behind = whole[len(prompt) - 1 : -1].log_softmax(-1)
    own = behind.gather(1, torch.tensor(plain.tokens, device=behind.device)[:, None])[:, 0]
    off = _furthest(own, torch.tensor(plain.logprobs, dtype=own.dtype, device=own.device))
    if target.kv_cache is not None:                     # which transformers' own forward has not
        noise = max(noise, off)
    elif not off <= 2 * SLACK * noise:
        why = f"off by {off:.2g}, its rounding allows {2 * SLACK * noise:.2g}"
        found.failures.append(f"plain decoding is not the model's own forward: {why}")
    if len(text) > 3:
        without = _own(target, [*text[:-3], *text[-2:]], len(text))[-1]
        found.control = max(found.control, _furthest(whole[-1], without) / (SLACK * noise))
    found.bounds.append(SLACK * noise)
    found.noise = max(found.noise, noise)


@torch.inference_mode()
def _own(target: Target, text: list[int], width: int) -> Tensor:
    """[L, V] logits by transformers alone, `width` tokens at a time."""
    tokens, past, out = torch.tensor([text], device=target.device), None, []
    for start in range(0, len(text), width):
        part, cached = tokens[:, start : start + width], width < len(text)
        read = target.model(input_ids=part, past_key_values=past, use_cache=cached)
        past = read.past_key_values if cached else None
        out.append(read.logits[0].double())
    return torch.cat(out)


def _compare(
    case: str, engine: Engine, prompt: list[int], want: Sampling, ours: Completion,
    theirs: Completion, bound: float, found: Found,
) -> None:
    """Hold one text against plain decoding. bound: how far logits may be off; 0: not a bit."""
    pairs = list(zip(ours.tokens, theirs.tokens, strict=False))
    split = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if split is None and len(ours.tokens) != len(theirs.tokens):
        counts = f"{len(theirs.tokens)} tokens where plain decoding gives {len(ours.tokens)}"
        found.failures.append(f"{case}: {counts}")
        return
    scores = zip(ours.logprobs or (), theirs.logprobs or (), strict=False)
    gaps = [abs(one - other) for one, other in list(scores)[:split]]
    gap = max(gaps, default=0.0)
    found.texts, found.identical = found.texts + 1, found.identical + (split is None and gap == 0)
    found.largest = max(found.largest, gap)
    if not gap <= 2 * bound:                                    # the logit and the logarithm's sum
        place = next(place for place, one in enumerate(gaps) if not one <= 2 * bound)
        why = f"off by {gaps[place]:.2g}, rounding explains {2 * bound:.2g}"
        found.failures.append(f"{case}: the log-probability of new token {place + 1} is {why}")
    elif split is not None:
        _near_tie(case, engine, prompt, want, ours.tokens, theirs.tokens, split, bound, found)


def _near_tie(
    case: str, engine: Engine, prompt: list[int], want: Sampling, ours: list[int],
    theirs: list[int], split: int, bound: float, found: Found,
) -> None:
    """Two texts part: rounding can turn what is nearly equal, or it is a failure."""
    text, target = [*prompt, *ours[:split]], engine.target
    logits = _own(target, text, len(text))[-1].to(target.dtype)
    ends = engine.stop_tokens if want.stop_tokens is None else tuple(want.stop_tokens)
    ops = Device(target.device).ops(engine.shapes.closed)
    sampler = Sampler([SamplingParams(want, len(prompt), ends)], target.device, ops)
    last = torch.tensor([len(text) - 1], device=target.device)
    prefix = Prefix(torch.tensor([text], device=target.device), last)
    paths = Paths(prefix, TokenTree.root(prefix.root))
    scores = sampler.gumbel_logits(logits[None, None], paths, Role.TARGET)[0, 0].double()
    apart = float(scores[ours[split]] - scores[theirs[split]])
    explained = abs(apart) <= 2 * bound / (want.temperature or 1.0)
    found.diverged.append({
        "case": case, "position": split + 1, "plain": ours[split], "speculative": theirs[split],
        "apart": apart, "explained": explained,
    })
    if not explained:
        found.failures.append(
            f"{case}: new token {split + 1} is {theirs[split]}, plain decoding gives "
            f"{ours[split]}; they are {apart:.3g} apart, rounding of {bound:.2g} cannot turn that"
        )


def _furthest(one: Tensor, other: Tensor) -> float:
    return float((one - other).nan_to_num(0.0).abs().max())
