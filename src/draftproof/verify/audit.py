"""Audit: whether an engine draws from the distribution of its model, and if not, its error.

The counts of short texts are compared with exact probabilities by a G-test; see docs/lossless.md.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.progress import doing
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput

Array = NDArray[np.float64]
Text = tuple[int, ...]
Distribution = Callable[[Sequence[Text]], Array]
"""Next-token probabilities [n, V] after `n` texts of one length, the prompt included."""
Draw = Callable[[list[int], int, int], list[list[int]]]
"""The engine: ``draw(prompt, n, seed)`` gives `n` continuations as new token ids."""

FALSE_ALARM, POWER = 1e-6, 0.999
"""How often a test accuses a correct engine; how often it catches one as wrong as `detects`."""
RARE, IMPOSSIBLE = (-1,), (-2,)
"""The cells of texts too rare for a cell of their own, and of those of probability zero."""
ROWS = 64
"""Texts per forward, and per request to a server."""


class Check(NamedTuple):
    """One test. control: whether the same test fails on deliberately wrong samples.

    tv: total variation between samples and distribution. detects: the total variation that this
    number of samples finds with probability `POWER`, in any direction.
    """

    name: str
    p_value: float
    control: bool = True
    detail: str = ""
    tv: float = 0.0
    detects: float = 1.0
    cells: int = 0

    @property
    def passed(self) -> bool:
        return self.p_value >= FALSE_ALARM


class Audit(NamedTuple):
    """The results of an audit. joint: the G-test of whole texts, one of the checks."""

    checks: list[Check]
    joint: Check

    @property
    def biased(self) -> bool:
        return not all(check.passed for check in self.checks)


def audit(
    draw: Draw, distribution: Distribution, prompt: Sequence[int], *, length: int = 3,
    samples: int = 4000, seed: int = 0, ends: Sequence[int] = (),
    opaque: frozenset[int] = frozenset(), at_once: int = 100,
) -> Audit:  # fmt: skip
    """Draw `samples` continuations of `length` tokens and test them against `distribution`.

    ends: end tokens, which count as one. opaque: tokens after which the probabilities are
    unknown (several share one name). at_once: samples per call. Raises BadInput if no verdict
    is possible.
    """
    if not prompt or length < 1 or samples < 200:
        values = f"{len(prompt)} tokens of prompt, a length of {length} and {samples} samples"
        raise BadInput(f"there were {values}; give at least 1, 1 and 200")
    texts = list[Text]()
    while len(texts) < samples:
        doing(f"drawing texts: {len(texts)} of {samples}")
        count = min(at_once, samples - len(texts))
        came = draw(list(prompt), count, seed + len(texts) // at_once)
        try:
            texts += [tuple(map(int, text)) for text in came]
        except (TypeError, ValueError) as error:
            kind = type(came).__name__
            raise BadInput(f"the sampler must return lists of token ids, not {kind}") from error
        if len(came) != count:
            raise BadInput(f"the sampler was asked for {count} texts and returned {len(came)}")
    masses, distributions = _masses(distribution, tuple(prompt), length, samples, ends, opaque)
    cut = [_cut(text, length, ends) for text in texts]
    tests = []
    for tokens in range(1, length + 1):
        expected = {
            text: mass for text, mass in masses.items()
            if len(text) == tokens or (0 < len(text) < tokens and text not in distributions)
        }
        expected[RARE] = max(0.0, 1 - sum(expected.values()))
        seen = Counter(_cell(text[:tokens], masses, distributions) for text in cut)
        name = f"first {tokens} tokens" if tokens > 1 else "first token"
        tests.append(_tested(name, seen, expected, seed))
    checks = [*tests, *_repeats(texts, at_once)]
    if blind := [check.name for check in checks if not check.control]:
        more = f"the control of {blind[0]!r} passes; take at least {4 * samples}"
        raise BadInput(f"{samples} samples are too few: {more}")
    return Audit(checks, tests[-1])


def _masses(
    distribution: Distribution,
    prompt: Text,
    length: int,
    samples: int,
    ends: Sequence[int],
    opaque: frozenset[int],
) -> tuple[dict[Text, float], dict[Text, Array]]:
    """The probabilities of texts expected 20 times, and of the tokens after unfinished ones."""
    masses: dict[Text, float] = {(): 1.0}
    distributions: dict[Text, Array] = {}
    level: list[Text] = [()]
    while level:
        rows, above, level = distribution([prompt + text for text in level]), level, []
        for text, row in zip(above, np.array(rows, float), strict=True):
            if abs(row.sum() - 1) > 1e-4:
                raise BadInput(f"probabilities after {text} sum to {row.sum():g}, not to 1")
            if ends:                                            # one end token represents all
                together = row[list(ends)].sum()
                row[list(ends)], row[ends[0]] = 0, together
            distributions[text] = row / row.sum()
            for token in np.flatnonzero(
                masses[text] * distributions[text] * samples >= 20
            ).tolist():
                masses[*text, token] = masses[text] * float(distributions[text][token])
                if len(text) + 1 < length and token not in {*ends, *opaque}:
                    level.append((*text, token))
    return masses, distributions


def _cut(text: Text, length: int, ends: Sequence[int]) -> Text:
    """A text up to its end or `length`; a text that continues after its end is impossible."""
    stop = next((place for place, token in enumerate(text) if token in ends), len(text))
    if any(token not in ends for token in text[stop:]):
        return IMPOSSIBLE
    if stop < length:
        return (*text[:stop], ends[0] if ends else IMPOSSIBLE[0])
    return text[:length]


def _cell(text: Text, masses: dict[Text, float], distributions: dict[Text, Array]) -> Text:
    for place, token in enumerate(text):
        if text[:place] not in distributions:
            return text[:place]
        row = distributions[text[:place]]
        if not 0 <= token < len(row) or row[token] == 0:
            return IMPOSSIBLE
        if text[: place + 1] not in masses:
            return RARE
    return text


def _tested(name: str, seen: Counter[Text], expected: dict[Text, float], seed: int) -> Check:
    """Run the G-test; its control is drawn from the smallest error that it detects."""
    cells = sorted(expected.keys() | seen.keys())
    probs = np.array([expected.get(cell, 0.0) for cell in cells])
    test = g_test([seen[cell] for cell in cells], probs, name)
    order, gains = np.argsort(probs), np.zeros(len(probs), bool)
    gains[order[np.cumsum(probs[order]) <= 0.5]] = True   # the smaller half: all stay positive
    mass = float(probs[gains].sum())
    if not 0 < mass < 1:
        return test
    moved = min(1.2 * test.detects, 1 - mass)
    wrong = np.where(gains, probs * (1 + moved / mass), probs * (1 - moved / (1 - mass)))
    drawn = np.random.default_rng(seed).multinomial(seen.total(), wrong / wrong.sum())
    return test._replace(control=not g_test(drawn, probs).passed)


def g_test(counts: ArrayLike, probs: ArrayLike, name: str = "") -> Check:
    """Test the `counts` of outcomes against their probabilities `probs` (likelihood ratio; cells
    expected fewer than five times are pooled). p is 0 if an impossible outcome occurs."""
    seen, expected = np.asarray(counts, float), np.asarray(probs, float)
    samples = seen.sum()
    tv = float(np.abs(seen / samples - expected).sum() / 2)
    rare, p_value = expected * samples < 5, float(seen[expected == 0].sum() == 0)
    pooled, shares = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    pooled, shares = pooled[shares > 0], shares[shares > 0]
    detects = detectable(samples, max(2, len(shares)))
    if p_value and len(shares) > 1:
        test = stats.power_divergence(pooled, shares * samples, lambda_="log-likelihood")
        p_value = float(test.pvalue)
    detail = f"{len(shares)} different texts or groups of rare ones"
    return Check(name, p_value, True, detail, tv, detects, len(shares))


def detectable(samples: float, cells: int) -> float:
    """The smallest total variation that a G-test finds in every direction: its noncentrality is
    samples * sum(d^2 / p) >= samples * (2 TV)^2 (Cauchy-Schwarz)."""
    needed = special.chndtrinc(stats.chi2.isf(FALSE_ALARM, cells - 1), cells - 1, 1 - POWER)
    return min(1.0, float(np.sqrt(needed / samples) / 2))


def too_equal(same: int, pairs: int, chance: float) -> float:
    """The p-value of `same` equal pairs if independent ones are equal with probability `chance`."""
    return float(stats.binom.sf(same - 1, pairs, chance))


def _repeats(texts: Sequence[Text], at_once: int) -> list[Check]:
    """Check whether neighbours, or calls with different seeds, repeat each other too often."""
    equal = sum(count * (count - 1) for count in Counter(texts).values())
    rate = equal / (len(texts) * (len(texts) - 1))
    if rate > 0.9:                                      # almost always the same text
        return []
    later = [place for place in range(at_once, len(texts)) if place // at_once % 2]
    pairs = {
        "neighbours": list(zip(texts[::2], texts[1::2], strict=False)),
        "calls with different seeds": [
            (texts[number - at_once], texts[number]) for number in later
        ],
    }
    control = too_equal(len(texts) // 2, len(texts) // 2, rate) < FALSE_ALARM
    checks = []
    for name, compared in pairs.items():
        same = sum(first == second for first, second in compared)
        detail = (
            f"{same} of {len(compared)} pairs are the same, {rate * len(compared):.1f} expected"
        )
        p_value = too_equal(same, len(compared), rate)
        checks.append(Check(f"independence of {name}", p_value, control, detail))
    return checks


# Models and engines -------------------------------------------------------------------------------


def model_distribution(model: PreTrainedModel, sampling: Sampling, prompt: int = 0) -> Distribution:
    """A model's distribution under a sampling. prompt: tokens that some penalties ignore."""
    params = SamplingParams(sampling, prompt)

    @torch.inference_mode()
    def next_token_probs(texts: Sequence[Text]) -> Array:
        ids, probs = torch.tensor(texts, device=model.device), []               # [n, L]
        for part in torch.split(ids, ROWS):
            logits = model(part, use_cache=False).logits[:, -1:].double()
            prefix = Prefix(part, part.new_full((len(part),), part.shape[1] - 1))
            sampler = Sampler([params] * len(part), part.device)
            probs.append(sampler.probs(logits, Paths(prefix, TokenTree.root(part[:, -1])))[:, 0])
        return np.asarray(torch.cat(probs).cpu().numpy())

    return next_token_probs


def assisted(
    model: PreTrainedModel, assistant: PreTrainedModel, sampling: Sampling, length: int,
    tokens: int | None = None, ends: Sequence[int] = (),
) -> Draw:  # fmt: skip
    """``generate(assistant_model=...)`` of the installed transformers, one row at a time."""
    sampled = sampling.temperature > 0
    names = ("temperature", "top_k", "top_p") if sampled else ()
    config = GenerationConfig(
        do_sample=sampled, max_new_tokens=length, eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0, **{name: getattr(sampling, name) for name in names},
    )
    schedule = {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant"}
    model.generation_config = GenerationConfig()            # no defaults from either checkpoint
    assistant.generation_config = GenerationConfig(**(schedule if tokens else {}))

    def draw(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=model.device)
        arguments = {"attention_mask": torch.ones_like(ids), "assistant_model": assistant}
        texts = [model.generate(ids, generation_config=config, **arguments) for _ in range(n)]
        return [text[0, ids.shape[1] :].tolist() for text in texts]

    return draw


class Endpoint:
    """Any server with OpenAI's POST /v1/completions. Prompts are sent as token ids.

    Its tokens are identified by their strings; ids with the same string count as the first.
    """

    def __init__(
        self, url: str, model: str, want: Sampling, length: int,
        tokenizer: PreTrainedTokenizerBase, vocab: int,
    ) -> None:  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise BadInput(f"endpoint was {url!r}; give an address such as http://127.0.0.1:8000")
        self.most = ROWS                                    # samples per request
        base = url.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self.url, self.length, self.ids = f"{base}/v1/completions", length, dict[str, int]()
        strings = [tokenizer.decode([token]) for token in range(vocab)]
        self.first = np.array(
            [self.ids.setdefault(string, id) for id, string in enumerate(strings)]
        )
        self.shared = frozenset(np.flatnonzero(np.bincount(self.first) > 1).tolist())
        self.body = {"model": model, "max_tokens": length, "temperature": want.temperature,
                     "top_p": want.top_p, "logprobs": 1}
        self.body |= {"top_k": want.top_k} if want.top_k else {}
        self.body |= {"min_p": want.min_p} if want.min_p else {}
        self.asked_defaults = False

    def merged(self, distribution: Distribution) -> Distribution:
        """`distribution` with the ids of each string combined."""
        count, first = len(self.first), self.first
        return lambda texts: np.stack(
            [
                np.bincount(first, weights=row[:count], minlength=len(row))
                for row in distribution(texts)
            ]
        )

    def __call__(self, prompt: list[int], n: int, seed: int) -> list[list[int]]:
        """Draw `n` texts, in as many requests as the server needs, each with its own seed."""
        if not self.asked_defaults:
            self.asked_defaults = True
            self.body |= self._neutral(prompt)
        texts: list[list[int]] = []
        while len(texts) < n:
            options = {
                "n": min(self.most, n - len(texts)),
                "seed": (seed * 1009 + len(texts)) % 2**31,
            }
            try:
                choices = self._post({**self.body, "prompt": prompt, **options}).get("choices")
            except BadInput as error:
                refused = getattr(error.__cause__, "code", None) in (400, 422)
                if not refused or options["n"] == 1:
                    raise
                self.most = options["n"] // 2  # llama.cpp allows as many as its slots
                continue
            if not choices:
                raise BadInput(f"{self.url} gave no choices; is it a completions server?")
            texts += [self._tokens(choice) for choice in choices][: n - len(texts)]
        return texts

    def _neutral(self, prompt: list[int]) -> dict[str, object]:
        """What turns off the server's own defaults, if it takes that: llama.cpp's server samples
        from 40 tokens unless told otherwise, and would seem biased."""
        neutral = {"top_k": -1, "min_p": 0.0} | self.body
        try:
            self._post({**neutral, "prompt": prompt, "max_tokens": 1, "n": 1, "seed": 0})
        except BadInput as error:
            if getattr(error.__cause__, "code", None) in (400, 422):
                return {}                       # it knows no such options
            raise
        return neutral

    def _post(self, body: dict[str, object]) -> Any:
        header = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.url, json.dumps(body).encode(), header)
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            answer = " ".join(error.read(300).decode(errors="replace").split())
            raise BadInput(f"{self.url} answered {error.code}: {answer or error.reason}") from error
        except (OSError, ValueError) as error:
            why = f"cannot be reached or gave no JSON ({error})"
            raise BadInput(f"{self.url} {why}; is a completions server running?") from error

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        """Token ids of a choice: as given, from its log-probabilities' strings, or from text."""
        if ids := choice.get("token_ids"):
            return [int(self.first[token]) for token in ids]
        scores = choice.get("logprobs") or {}
        strings = scores.get("tokens") or [entry["token"] for entry in scores.get("content") or []]
        if not strings and self.length > 1 and choice.get("text"):
            why = "neither token ids nor logprobs: only one token can be judged; add --length 1"
            raise BadInput(f"{self.url} returns {why}")
        strings = [string for string in strings or [choice.get("text")] if string]
        if unknown := [string for string in strings if string not in self.ids]:
            raise BadInput(f"the server's token {unknown[0]!r} is not one of the reference's")
        return [self.ids[string] for string in strings]
