"""Section "bits": compares a model's texts and log-probabilities with plain decoding.

Rows of every kind share a batch: greedy and sampled, seeds beyond 32 bits, ends at different times.
Each must equal the text of plain decoding for it alone. Within the machine's exactness class every
bit must agree; elsewhere the model's own rounding, measured by transformers alone, must explain
every difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftproof.cache.layout import cache_argument
from draftproof.core.noise import Role
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Completion, Engine
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


class Comparison:
    """Compares texts with plain decoding, and holds the results. bounds: per text, how far rounding
    alone may change a logit."""

    def __init__(
        self, engine: Engine, wants: Sequence[Sampling], new_tokens: int,
        prompts: Sequence[list[int]] = (),
    ) -> None:
        self.engine, self.target = engine, engine.target
        self.prompts = list(prompts) or _prompts(engine)
        new = min(new_tokens, engine.target.context - max(map(len, self.prompts)))
        self.asked = [                                      # rows end at different times
            replace(wants[row % len(wants)], logprobs=True,
                    max_new_tokens=max(1, new - row * 5 % new))
            for row in range(len(self.prompts))
        ]
        self.texts = self.identical = 0
        self.largest = self.noise = self.control = 0.0
        self.bounds: list[float] = []
        self.diverged: list[dict[str, object]] = []
        self.failures: list[str] = []
        self.plain = self.write(Plain(), 0, 1)
        for prompt, completion in zip(self.prompts, self.plain, strict=True):
            self._measure(prompt, completion)

    def write(self, drafter: Drafter, budget: int, rows: int) -> list[Completion]:
        stops = self.engine.stop_tokens
        engine = Engine(self.target, drafter, budget=budget, stop_tokens=stops)
        if budget:                              # plain decoding rereads every prompt
            engine.prefixes = self.engine.prefixes
        done = engine.generate(self.prompts, sampling=self.asked, batch_size=rows)
        return [completion.checked() for completion in done]

    def compare(self, case: str, drafter: Drafter, budget: int, rows: int, exact: bool) -> None:
        """Write every text in this way. exact: no bit may differ from plain decoding."""
        for row, theirs in enumerate(self.write(drafter, budget, rows)):
            self._compare(f"{case}, text {row + 1}", row, theirs, 0 if exact else self.bounds[row])

    def _measure(self, prompt: list[int], plain: Completion) -> None:
        """Compare plain decoding with the model's own forward in transformers; note rounding."""
        target, text = self.target, [*prompt, *plain.tokens]
        full, step = _full_logits(target, text, len(text)), _full_logits(target, text, 1)
        rounding = torch.finfo(target.dtype).eps * float(full[full.isfinite()].abs().max())
        noise = max(_furthest(full, step), rounding)
        after = full[len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = after.gather(1, torch.tensor(plain.tokens, device=after.device)[:, None])[:, 0]
        off = _furthest(
            logprobs, torch.tensor(plain.logprobs, dtype=logprobs.dtype, device=logprobs.device)
        )
        if target.kv_cache is not None:                 # transformers' own forward lacks it
            noise = max(noise, off)
        elif not off <= 2 * SLACK * noise:
            why = f"off by {off:.2g}, its rounding allows {2 * SLACK * noise:.2g}"
            self.failures.append(f"plain decoding is not the model's own forward: {why}")
        if len(text) > 3:
            without = _full_logits(target, [*text[:-3], *text[-2:]], len(text))[-1]
            self.control = max(self.control, _furthest(full[-1], without) / (SLACK * noise))
        self.bounds.append(SLACK * noise)
        self.noise = max(self.noise, noise)

    def _compare(self, case: str, row: int, theirs: Completion, bound: float) -> None:
        """Compare one text with plain decoding. bound: the tolerance for logits."""
        ours = self.plain[row]
        pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
        split = next((place for place, (a, b) in pairs if a != b), None)
        if split is None and len(ours.tokens) != len(theirs.tokens):
            self.failures.append(f"{case}: {len(theirs.tokens)} tokens, not {len(ours.tokens)}")
            return
        scores = zip(ours.logprobs or (), theirs.logprobs or (), strict=False)
        gaps = [abs(score - other) for score, other in list(scores)[:split]]
        gap, allowed = max(gaps, default=0.0), 2 * bound        # the logit and the logarithm's sum
        self.texts, self.identical = self.texts + 1, self.identical + (split is None and gap == 0)
        self.largest = max(self.largest, gap)
        wrong = next((place for place, gap in enumerate(gaps) if not gap <= allowed), None)
        if wrong is not None:
            why = f"off by {gaps[wrong]:.2g}, rounding explains {allowed:.2g}"
            self.failures.append(f"{case}: the log-probability of new token {wrong + 1} is {why}")
        elif split is not None:
            self._near_tie(case, row, theirs.tokens, split, bound)

    def _near_tie(self, case: str, row: int, theirs: list[int], split: int, bound: float) -> None:
        """Judge two diverging texts: a failure unless rounding can swap two nearly equal tokens."""
        prompt, ours, want = self.prompts[row], self.plain[row].tokens, self.asked[row]
        text, target, engine = [*prompt, *ours[:split]], self.target, self.engine
        logits = _full_logits(target, text, len(text))[-1:].to("cpu", target.dtype)
        ends = engine.stop_tokens if want.stop_tokens is None else tuple(want.stop_tokens)
        prefix = Prefix(torch.tensor([text]), torch.tensor([len(text) - 1]))
        paths = Paths(prefix, TokenTree.root(prefix.root))
        sampler = Sampler([SamplingParams(want, len(prompt), ends)])    # the same noise anywhere
        scores = sampler.gumbel_logits(logits[None], paths, Role.TARGET)[0, 0].double()
        apart = float(scores[ours[split]] - scores[theirs[split]])
        explained = abs(apart) <= 2 * bound / (want.temperature or 1.0)
        self.diverged.append({
            "case": case, "position": split + 1, "plain": ours[split],
            "speculative": theirs[split], "apart": apart, "explained": explained,
        })
        if not explained:
            self.failures.append(
                f"{case}: new token {split + 1} is {theirs[split]}, plain decoding gives "
                f"{ours[split]}; they are {apart:.3g} apart, rounding of {bound:.2g} cannot turn "
                "that"
            )


def prove_bits(
    engine: Engine, quick: bool = False, tick: Tick = silent, *, seed: int = 0,
    new_tokens: int | None = None, exact_nodes: int | None = None, wants: Sequence[Sampling] = (),
    prompts: Sequence[list[int]] = (), rows: Sequence[int] = ROWS,
) -> Section:
    """Compare the engine's drafter, prompt lookup and plain batches with plain decoding row by row.

    exact_nodes: the machine's exactness class (rows x nodes), of chains and trees; None to probe
    both. wants: samplings, in turn. prompts: token ids instead of the default ones. rows: sizes of
    batches. Passes if, inside the class, every token and every bit of every log-probability agrees;
    outside it, if no difference exceeds the rounding, but that of a forgotten token does.
    """
    chains = trees = exact_nodes or 0
    if exact_nodes is None:
        tick(0.0, "probing the machine")
        probed = probe(engine.target, (2, 8), 48) if quick else probe(engine.target)
        chains = trees = probed.exact_nodes
        if engine.target.reads_trees:               # sums over branches may round differently
            trees = min(chains, probed.exact_tree_nodes)
    new = new_tokens or (QUICK_NEW_TOKENS if quick else NEW_TOKENS)
    comparison, lookup = Comparison(engine, wants or _usual(seed), new, prompts), PromptLookup()
    drafters: dict[str, tuple[Drafter, int]] = {
        "none": (Plain(), 0), engine.drafter.name: (engine.drafter, engine.budget.max_draft_tokens),
        lookup.name: (lookup, lookup.max_draft_tokens),
    }
    cases = [(name, size) for name in drafters for size in rows if name != "none" or size > 1]
    exact_cases = 0
    for done, (name, size) in enumerate(cases):
        tick((done + 1) / (len(cases) + 1), f"{name}, batch {size}")
        drafter, most = drafters[name]
        fits = min(most, (trees if most else chains) // size - 1)
        exact = fits >= min(1, most)
        exact_cases += exact
        budget = fits if exact else most
        comparison.compare(f"{name}, batch {size}, {budget} drafted", drafter, budget, size, exact)
    if not comparison.control > 1:
        why = "a forgotten token changes logits no more than rounding: this is blind"
        comparison.failures.append(why)
    verdict = (
        f"{comparison.texts} texts compared with plain decoding, {comparison.identical} to the "
        f"last bit; {exact_cases} of {len(cases)} set-ups in the machine's exactness class of "
        f"{chains} nodes in chains, {trees} in trees; log-probabilities differ by at most "
        f"{comparison.largest:.2g}, the "
        f"model's own logits by {comparison.noise:.2g}; {len(comparison.diverged)} texts "
        "diverged at near-ties"
    )
    figures = {
        "texts": comparison.texts, "identical": comparison.identical, "exact_nodes": chains,
        "exact_tree_nodes": trees,
        "set_ups_exact": exact_cases, "set_ups": len(cases),
        "largest_difference": comparison.largest, "noise": comparison.noise,
        "slack": SLACK, "control_over_bound": comparison.control,
        "divergences": comparison.diverged, "seed": seed,
    }
    return Section("bits", verdict, figures, comparison.failures)


def _prompts(engine: Engine) -> list[list[int]]:
    """Texts if there is a tokenizer, otherwise repetitive numbers."""
    longest, vocab = max(1, engine.target.context // 2), engine.target.vocab_size
    if engine.codec is not None:
        return [(engine.codec.encode(text) or [0])[-longest:] for text in TEXTS]
    dice, sizes = torch.Generator().manual_seed(0), (9, 5, 14, 7, 2, 11, 6, 3)
    texts = [torch.randint(vocab, (size,), generator=dice).tolist() for size in sizes]
    return [(text[:3] * 5 if index % 2 else text)[-longest:] for index, text in enumerate(texts)]


def _usual(seed: int) -> list[Sampling]:
    """Alternate greedy and sampled rows, with seeds within and beyond 32 bits."""
    seeds, temperatures = (seed, seed + (1 << 33), seed + 7, seed - (1 << 40)), (1.0, 0.7, 1.0, 1.3)
    sampled = [Sampling(temperature=temperature, seed=row_seed)
               for temperature, row_seed in zip(temperatures, seeds, strict=True)]
    return [want for sampling in sampled for want in (Sampling(), sampling)]


@torch.inference_mode()
def _full_logits(target: Target, text: list[int], width: int) -> Tensor:
    """[L, V] logits by transformers alone, `width` tokens at a time."""
    module = target.module()
    name = cache_argument(inspect.signature(module.forward).parameters)
    tokens, cache, out = torch.tensor([text], device=target.device), None, []
    for part in torch.split(tokens, width, 1):
        read = module(input_ids=part, use_cache=width < len(text), **{name: cache})
        cache = getattr(read, name) if width < len(text) else None
        out.append(read.logits[0].double())
    return torch.cat(out)


def _furthest(logits: Tensor, other: Tensor) -> float:
    return float((logits - other).nan_to_num(0.0).abs().max())
