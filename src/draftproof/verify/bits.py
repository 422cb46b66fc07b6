"""Section "bits": on the model at hand, tokens and logits against plain decoding, bit for bit where the machine allows.

Where the machine has an exactness class, every bit must agree. Where it has not, the noise between the two shapes of
reading is measured on the same text, and every difference is attributed to it, or it is a failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.acceptance import Rule
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.noise import Role
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.plain import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
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
ROWS, JOINING = (1, 8), 3
"""Rows of the batches whose rows begin together, and of one where the first runs on while the others come and go."""
NEW_TOKENS, QUICK_NEW_TOKENS = 48, 10
SLACK = 4.0
"""Times the noise measured on a text that a logit may be off: shapes that were not measured may round a little worse."""

Text = tuple[int, ...]


class Shape(NamedTuple):
    """Rows and nodes of a forward."""

    rows: int
    nodes: int


@dataclass
class Run:
    """What came of all prompts, with the logits behind every text on the way."""

    tokens: list[list[int]]
    logits: dict[Text, Tensor]
    drafted: int = 0
    accepted: int = 0


@dataclass
class Findings:
    """What was compared so far. bound: the largest difference that noise explains, over all texts."""

    positions: int = 0
    identical: int = 0
    largest: float = 0.0
    noise: float = 0.0
    divergences: list[dict[str, object]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def prove_bits(
    engine: Engine,
    quick: bool = False,
    tick: Tick = silent,
    *,
    seed: int = 0,
    wants: Mapping[str, Sampling] | None = None,
    new_tokens: int | None = None,
    exact_nodes: int | None = None,
) -> Section:
    """Compare the engine's target with its drafter, and with prompt lookup, against plain decoding one row at a time.

    exact_nodes: the machine's exactness class, None to probe it. Passes if, inside the class, every token and every
    bit of every logit agree; outside it, if no difference exceeds the noise, and the control does.
    """
    start = time.perf_counter()
    if exact_nodes is None:
        tick(0.0, "probing the machine")
        exact_nodes = (probe(engine.target, (2, 8), 48) if quick else probe(engine.target)).exact_nodes
    prompts = _prompts(engine)
    new = min(new_tokens or (QUICK_NEW_TOKENS if quick else NEW_TOKENS), engine.target.context - max(map(len, prompts)))
    asked = wants or {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=seed)}
    drafters: dict[str, Drafter] = {engine.drafter.name: engine.drafter, "prompt-lookup": PromptLookup()}
    found, inside, outside, done = Findings(), 0, 0, 0
    stood: dict[str, float] = {}
    for name, want in asked.items():
        plain = _run(engine, Plain(), 0, prompts, want, [new] * len(prompts), rows=1)
        several = [(drafter, rows) for drafter in drafters if drafter != "none" for rows in (*ROWS, JOINING)]
        for drafter, rows in several:
            tick(done / (len(several) * len(asked)), f"{drafter}, {name}, batch {rows}")
            limits = [new, *[max(1, new // 4)] * (len(prompts) - 1)] if rows == JOINING else [new] * len(prompts)
            wished = engine.budget.most if drafters[drafter] is engine.drafter else drafters[drafter].default_budget
            budget = min(wished, exact_nodes // rows - 1)
            exact = budget >= 1
            inside, outside = inside + exact, outside + (not exact)
            shape = Shape(rows, (budget if exact else wished) + 1)
            run = _run(engine, drafters[drafter], shape.nodes - 1, prompts, want, limits, rows)
            case = f"{name}, {drafter}, batch {rows}, {shape.nodes - 1} drafted"
            wanted = replace(plain, tokens=[tokens[:limit] for tokens, limit in zip(plain.tokens, limits, strict=True)])
            _compare(case, engine, wanted, run, prompts, want, shape, exact, found)
            stood[case] = run.accepted / run.drafted if run.drafted else 0.0
            done += 1
    control = _anchor(engine.target, [*prompts[0], *plain.tokens[0]], found)
    here = "no exactness class here"
    if inside:
        here = f"{inside} set-ups inside the machine's exactness class of {exact_nodes} rows x nodes"
    beyond = ""
    if outside:
        beyond = f"; {outside} outside it, largest difference {found.largest:.2g}, noise measured {found.noise:.2g}"
    verdict = (
        f"{found.positions:,} positions compared with plain decoding, {found.identical:,} bit for bit; {here}{beyond}; "
        f"{len(found.divergences)} texts diverged at near-ties"
    )
    figures = {
        "positions": found.positions, "bit_identical": found.identical, "exact_nodes": exact_nodes, "set_ups_exact": inside,
        "set_ups_up_to_rounding": outside, "largest_difference": found.largest, "noise": found.noise, "slack": SLACK,
        "control_over_bound": control, "divergences": found.divergences, "accepted_share": stood, "seed": seed,
        "new_tokens": new,
    }
    return Section("bits", not found.failures, verdict, figures, found.failures[:20], time.perf_counter() - start)


def _prompts(engine: Engine) -> list[list[int]]:
    """Texts where there is a tokenizer, else numbers that repeat themselves."""
    longest = max(1, engine.target.context // 2)
    if engine.codec is not None:
        return [(engine.codec.encode(text) or [0])[-longest:] for text in TEXTS]
    dice = torch.Generator().manual_seed(0)
    texts = [torch.randint(engine.target.vocab_size, (size,), generator=dice).tolist() for size in (9, 5, 14, 7, 2, 11, 6, 3)]
    return [(text[:3] * 5 if index % 2 else text)[-longest:] for index, text in enumerate(texts)]


def _run(
    engine: Engine, drafter: Drafter, budget: int, prompts: list[list[int]], want: Sampling, limits: Sequence[int], rows: int
) -> Run:
    """Complete each prompt with at most so many tokens, writing down the logits behind every text that was committed."""
    logits: dict[Text, Tensor] = {}
    own = Engine(engine.target, drafter, budget=budget, stop_tokens=engine.stop_tokens)
    with patch.dict(acceptance.RULES, {"match": _recorded(acceptance.RULES["match"], logits)}):
        asked = [replace(want, max_new_tokens=limit) for limit in limits]
        done = [one.checked() for one in own.generate(prompts, sampling=asked, batch_size=rows)]
    stats = [one.stats for one in done]
    return Run([one.tokens for one in done], logits, sum(one.drafted for one in stats), sum(one.accepted for one in stats))


def _recorded(rule: Rule, logits: dict[Text, Tensor]) -> Rule:
    """`rule`, with the logits at every accepted node written down under the text that ends there."""
    def accept(tree: TokenTree, read: Tensor, frontier: Frontier) -> Accepted:
        accepted = rule.accept(tree, read, frontier)
        prefix = frontier.prefix
        for row, (place, count) in enumerate(zip(prefix.position.tolist(), accepted.count.tolist(), strict=True)):
            nodes = accepted.nodes[row, :count]
            text = prefix.tokens[row, :place].tolist()
            for node, token in zip(nodes.tolist(), tree.tokens[row, nodes].tolist(), strict=True):
                text.append(token)
                logits[tuple(text)] = read[row, node].clone()
        return accepted

    return Rule(accept, rule.drawn)


def _compare(
    case: str, engine: Engine, plain: Run, run: Run, prompts: list[list[int]], want: Sampling, shape: Shape, exact: bool,
    found: Findings,
) -> None:
    """Hold one run against plain decoding, prompt by prompt."""
    for prompt, ours, theirs in zip(prompts, plain.tokens, run.tokens, strict=True):
        split = next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if split is None and len(ours) != len(theirs):
            found.failures.append(f"{case}: {len(theirs)} tokens came where plain decoding gives {len(ours)}")
            continue
        whole = (*prompt, *ours)
        last = len(whole) - 1 if split is None else len(prompt) + split
        texts = [text for size in range(len(prompt) + 1, last + 1) if (text := whole[:size]) in plain.logits]
        missing = [text for text in texts if text not in run.logits]
        if missing:
            found.failures.append(f"{case}: the logits behind token {len(missing[0])} were never read")
            continue
        gaps = [_furthest(plain.logits[text].double(), run.logits[text].double()) for text in texts]
        found.positions, found.identical = found.positions + len(gaps), found.identical + sum(gap == 0 for gap in gaps)
        found.largest = max([found.largest, *gaps])
        if exact:
            _must_agree(case, gaps, split, ours, theirs, found)
            continue
        noise = _noise(engine.target, list(whole), len(prompt), shape)
        found.noise = max(found.noise, noise)
        for size, gap in zip((len(text) for text in texts), gaps, strict=True):
            if not gap <= SLACK * noise:
                why = f"logits are off by {gap:.2g}, noise between the shapes is {noise:.2g}"
                found.failures.append(f"{case}: behind token {size} {why}")
                break
        if split is not None:
            _attribute(case, engine, prompt, ours, theirs, split, want, shape, noise, found)


def _must_agree(
    case: str, gaps: Sequence[float], split: int | None, ours: Sequence[int], theirs: Sequence[int], found: Findings
) -> None:
    wrong = next((place for place, gap in enumerate(gaps) if gap != 0), None)
    if wrong is not None:
        why = f"logits are off by {gaps[wrong]:.2g} inside the exactness class"
        found.failures.append(f"{case}: behind new token {wrong + 1} {why}")
    elif split is not None:
        why = f"is {theirs[split]}, plain decoding gives {ours[split]}, from the same logits"
        found.failures.append(f"{case}: new token {split + 1} {why}")


def _attribute(
    case: str, engine: Engine, prompt: list[int], ours: list[int], theirs: list[int], split: int, want: Sampling, shape: Shape,
    noise: float, found: Findings,
) -> None:
    """Say why two texts part: a near-tie that the noise can turn, or a failure."""
    text = [*prompt, *ours[:split]]
    gaps = []
    for form in (Shape(1, 1), shape):
        logits = _forced(engine.target, [*text, ours[split]], len(prompt), form)[-2]
        gumbel_logits = _race(engine, text, len(prompt), want, logits)
        gaps.append(float(gumbel_logits[ours[split]] - gumbel_logits[theirs[split]]))
    scale = 1 / want.temperature if want.temperature else 1.0
    explained = abs(gaps[0]) <= 2 * SLACK * noise * scale
    found.divergences.append({
        "case": case, "prompt": list(prompt[-4:]), "position": split + 1, "plain": ours[split], "speculative": theirs[split],
        "gap_plain_shape": gaps[0], "gap_speculative_shape": gaps[1], "noise": noise, "explained": explained,
    })
    if not explained:
        found.failures.append(
            f"{case}: new token {split + 1} is {theirs[split]}, plain decoding gives {ours[split]}; "
            f"they are {gaps[0]:.3g} apart, noise of {noise:.2g} cannot turn that"
        )


def _race(engine: Engine, text: list[int], prompt: int, want: Sampling, logits: Tensor) -> Tensor:
    """[V] what the target's choice behind `text` maximises."""
    ends = engine.stop_tokens if want.stop_tokens is None else tuple(want.stop_tokens)
    ops = Device(engine.target.device).ops(engine.shapes.closed)
    sampler = Sampler([SamplingParams(want, prompt, ends)], engine.target.device, ops)
    tokens = torch.tensor([text], device=engine.target.device)
    prefix = Prefix(tokens, torch.tensor([len(text) - 1], device=engine.target.device))
    gumbel_logits = sampler.gumbel_logits(logits.to(engine.target.dtype)[None, None], Paths(prefix, TokenTree.root(prefix.root)), Role.TARGET)
    return gumbel_logits[0, 0].double()


def _noise(target: Target, text: list[int], prompt: int, shape: Shape) -> float:
    """The largest difference of any logit between reading `text` one token at a time and in other shapes."""
    one = _forced(target, text, prompt, Shape(1, 1))
    others = {Shape(1, shape.nodes), shape, Shape(shape.rows, 1)} - {Shape(1, 1)}
    return max((_furthest(one, _forced(target, text, prompt, other)) for other in others), default=0.0)


@torch.inference_mode()
def _forced(target: Target, text: list[int], prompt: int, shape: Shape) -> Tensor:
    """[L, V] logits behind the tokens of `text` from `prompt` on, forced, in the last of `shape.rows` equal rows."""
    tokens = torch.tensor(text, device=target.device)
    cache = target.new_cache(shape.rows, -(-(len(text) + shape.nodes + 2) // 128) * 128)
    view = cache.rows(0, 1)
    for start in range(0, prompt, 256):
        piece = tokens[None, start : min(start + 256, prompt)]
        target.read(TokenTree.chain(piece), view)
        view.keep(None, torch.full_like(view.lengths, piece.shape[1]))
    cache.select([0] * shape.rows)
    out = []
    for start in range(prompt, len(text), shape.nodes):
        piece = tokens[None, start : start + shape.nodes].expand(shape.rows, -1)
        out.append(target.read(TokenTree.chain(piece), cache).logits[-1])
        cache.keep(None, torch.full_like(cache.lengths, piece.shape[1]))
    return torch.cat(out).double()


def _anchor(target: Target, text: list[int], found: Findings) -> float:
    """Hold our reading against the model's own forward; return how far, in bounds, a forgotten token would show.

    The bound is the noise of the model itself, read whole and one token at a time by transformers alone; the noise
    measured between our shapes may not exceed it either, or it would explain anything.
    """
    whole, step = _own(target, text, len(text)), _own(target, text, 1)
    rounding = torch.finfo(target.dtype).eps * float(whole[whole.isfinite()].abs().max())
    bound = SLACK * max(_furthest(whole, step), rounding)
    off = max(_furthest(_forced(target, text, 1, Shape(1, 1)), own[1:]) for own in (whole, step))
    if not off <= bound:
        why = f"off by {off:.2g}, its noise allows {bound:.2g}"
        found.failures.append(f"plain decoding reads other logits than the model's own forward: {why}")
    if not found.noise <= SLACK * bound:
        why = f"more than the noise of the model itself ({bound:.2g})"
        found.failures.append(f"shapes of reading differ by {found.noise:.2g}, {why}")
    without = [*text[:-3], *text[-2:]]
    forgotten = _furthest(whole[-1], _own(target, without, len(without))[-1]) if len(text) > 3 else float("inf")
    control = forgotten / max(bound, SLACK * found.noise)
    if not control > 1:
        found.failures.append(f"a forgotten token moves logits by {forgotten:.2g}, within the noise: the examination is blind")
    return control


@torch.inference_mode()
def _own(target: Target, text: list[int], width: int) -> Tensor:
    """[L, V] logits by transformers alone, `width` tokens at a time."""
    tokens, past, out = torch.tensor([text], device=target.device), None, []
    for start in range(0, len(text), width):
        read = target.model(input_ids=tokens[:, start : start + width], past_key_values=past, use_cache=width < len(text))
        past = read.past_key_values if width < len(text) else None
        out.append(read.logits[0].double())
    return torch.cat(out)


def _furthest(one: Tensor, other: Tensor) -> float:
    return float((one - other).nan_to_num(0.0).abs().max())
