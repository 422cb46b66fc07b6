"""Audit: does somebody else's engine draw from the distribution it should? If not, how far is it off?

Short texts are drawn and compared with the exact distribution of the model, prefix by prefix.

    found = audit(sample, law, prompt=[1, 2, 3])
    print(found.biased, found.joint.tv)
"""

from __future__ import annotations

import importlib
import json
import sys
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput
from draftproof.verify.statistics import FALSE_ALARM, POWER, Array, GTest, detectable, g_test

Text = tuple[int, ...]
Law = Callable[[Sequence[Text]], Array]
"""Next-token probabilities [n, V] behind `n` texts of one length, the prompt included."""
Draw = Callable[[list[int], int, int], list[list[int]]]
"""The engine: ``draw(prompt, n, seed)`` gives `n` continuations as new token ids."""
Progress = Callable[[int, int], None]

RARE, IMPOSSIBLE, CUT = -1, -2, -3
"""In the place of a token: a rare one, one of probability zero, none although nothing had ended."""
FEWEST, CHUNK, KEEP, CONTEXTS, ROWS = 200, 100, 20, 512, 64
"""Samples at least; samples per call; expected count from which an outcome has a cell of its own;
texts behind which the law is asked for; rows per forward and per request to a server."""


class Check(NamedTuple):
    """One test. control: the same test on samples made wrong on purpose, which must fail."""

    name: str
    p_value: float
    control: bool
    detail: str = ""
    test: GTest | None = None

    @property
    def passed(self) -> bool:
        return self.p_value >= FALSE_ALARM


@dataclass(frozen=True)
class Audit:
    """What an examination found; `notes`: what is worth knowing and no bias."""

    checks: tuple[Check, ...]
    samples: int
    length: int
    prompt: Text
    notes: tuple[str, ...] = ()

    @property
    def biased(self) -> bool:
        return not all(check.passed for check in self.checks)

    @property
    def joint(self) -> GTest:
        """The G-test of the longest texts."""
        return [check.test for check in self.checks if check.test is not None][-1]

    @property
    def false_alarm(self) -> float:
        """How often a correct engine is accused by any of the checks, at most."""
        return FALSE_ALARM * len(self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        tests = [
            {**check._asdict(), "passed": check.passed, "test": check.test and check.test._asdict()}
            for check in self.checks
        ]
        joint = self.joint
        return {
            "verdict": "biased" if self.biased else "unbiased", "tv": joint.tv,
            "tv_interval_99": [joint.low, joint.high], "p_value": joint.p_value, "power": POWER,
            "detects": joint.detects, "false_alarm": self.false_alarm,
            **asdict(self), "checks": tests,
        }


def audit(
    sampler: Any, law: Law, prompt: Sequence[int], *, length: int = 3, samples: int = 4000, seed: int = 0,
    ends: Sequence[int] = (), opaque: frozenset[int] = frozenset(), progress: Progress | None = None,
) -> Audit:
    """Draw `samples` continuations of `length` tokens and test them against the law.

    sampler: a `Draw`, or an object with a method `sample` like it. ends: end tokens; all count as one.
    opaque: tokens behind which the law is not known (several share one name). Raises BadInput if the
    request cannot be judged, too few samples included.
    """
    if not prompt:
        raise BadInput("the prompt is empty; give at least one token")
    if length < 1:
        raise BadInput(f"length was {length}; test at least 1 token")
    if samples < FEWEST:
        least = f"take at least {FEWEST}, which see a distance of {detectable(FEWEST, 8):.2f}"
        raise BadInput(f"samples was {samples}; {least}")
    draw: Draw = getattr(sampler, "sample", sampler)
    outcomes = Outcomes(law, tuple(prompt), length, samples, tuple(ends), opaque)
    texts: list[Text] = []
    while len(texts) < samples:
        n = min(CHUNK, samples - len(texts))
        texts += _asked(draw, list(prompt), n, seed + len(texts) // CHUNK)
        if progress is not None:
            progress(len(texts), samples)
    clean = [outcomes.clean(text) for text in texts]
    checks = [outcomes.check(clean, tokens, seed) for tokens in range(1, length + 1)]
    checks += [*_repeats(texts), *([_after_the_end(texts, outcomes)] if ends else [])]
    for check in checks:
        if not check.control:
            more = f"the control of {check.name!r} passes; take at least {4 * samples}"
            raise BadInput(f"{samples} samples are too few: {more}")
    again = [_asked(draw, list(prompt), 8, seed + 10**6) for _ in range(2)]
    note = "the same seed gives another text: seeds are not honoured (which is no bias)"
    notes = () if again[0] == again[1] else (note,)
    return Audit(tuple(checks), samples, length, tuple(prompt), notes)


def _asked(draw: Draw, prompt: list[int], n: int, seed: int) -> list[Text]:
    """One call of the sampler, its answer checked."""
    came = draw(prompt, n, seed)
    try:
        texts = [tuple(int(token) for token in text) for text in came]
    except (TypeError, ValueError) as error:
        kind = type(came).__name__
        raise BadInput(f"the sampler must return lists of token ids; it returned {kind}") from error
    if len(texts) != n:
        raise BadInput(f"the sampler was asked for {n} texts and returned {len(texts)}")
    return texts


@dataclass
class Outcomes:
    """What may come behind a prompt, cut where it becomes rare. A cell is a text, or a text with RARE
    or IMPOSSIBLE in the place of its last token. laws: by text; own: tokens with cells of their own."""

    law: Law
    prompt: Text
    length: int
    samples: int
    ends: Text
    opaque: frozenset[int]
    laws: dict[Text, Array] = field(default_factory=dict)
    own: dict[Text, Any] = field(default_factory=dict)
    mass: dict[Text, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        level: dict[Text, float] = {(): 1.0}
        while level:
            rows = self._rows(list(level))
            below: dict[Text, float] = {}
            for (text, mass), row in zip(level.items(), rows, strict=True):
                if abs(row.sum() - 1) > 1e-4:
                    raise BadInput(f"the law must sum to one; behind {text} it sums to {row.sum():g}")
                self.laws[text], self.mass[text] = row / row.sum(), mass
                self.own[text] = np.flatnonzero(mass * row * self.samples >= KEEP)
                going = [token for token in self.own[text] if token not in (*self.ends, *self.opaque)]
                below |= {(*text, int(token)): mass * row[token] for token in going}
            likely = sorted(below, key=lambda text: -below[text])[: CONTEXTS - len(self.laws)]
            level = {text: below[text] for text in likely if len(text) < self.length}

    def _rows(self, texts: Sequence[Text]) -> Array:
        """[n, V] the law behind `texts`, all end tokens put together."""
        rows = np.asarray(self.law([self.prompt + text for text in texts]), float).copy()
        if len(self.ends) > 1:
            rows[:, self.ends[0]] = rows[:, list(self.ends)].sum(1)
            rows[:, list(self.ends[1:])] = 0
        return rows

    def clean(self, text: Text) -> Text:
        """A text up to its end or `length`; one end token stands for all, and for none."""
        stop = next((place for place, token in enumerate(text) if token in self.ends), None)
        if stop is not None:
            return (*text[:stop], self.ends[0])[: self.length]
        if len(text) < self.length:
            return (*text, self.ends[0] if self.ends else CUT)
        return text[: self.length]

    def cell(self, text: Text, tokens: int) -> Text:
        """The cell of the first `tokens` tokens of a text."""
        for place, token in enumerate(text[:tokens]):
            law = self.laws.get(text[:place])
            if law is None:
                return text[:place]
            if not 0 <= token < len(law) or law[token] == 0:
                return (*text[:place], IMPOSSIBLE)
            if token not in self.own[text[:place]]:
                return (*text[:place], RARE)
        return text[:tokens]

    def cells(self, tokens: int) -> dict[Text, float]:
        """Probability of every cell of the first `tokens` tokens."""
        cells: dict[Text, float] = defaultdict(float)
        for text, law in self.laws.items():
            if len(text) >= tokens:
                continue
            own = self.own[text]
            cells[(*text, RARE)] += max(0.0, self.mass[text] * (1 - float(law[own].sum())))
            for token in own.tolist():
                child = (*text, token)
                if len(child) == tokens or child not in self.laws:
                    cells[child] += self.mass[text] * float(law[token])
        return cells

    def check(self, texts: Sequence[Text], tokens: int, seed: int) -> Check:
        """The G-test of the first `tokens` tokens; its control is a law as wrong as it should see."""
        law, seen = self.cells(tokens), Counter(self.cell(text, tokens) for text in texts)
        cells = sorted(law.keys() | seen.keys())
        expected = np.array([law.get(cell, 0.0) for cell in cells])
        expected /= expected.sum()
        test = g_test([seen[cell] for cell in cells], expected)
        tilted = _tilted(expected, 1.2 * test.detects)
        wrong = np.random.default_rng(seed).multinomial(len(texts), tilted)
        seen_wrong = test.cells < 2 or not g_test(wrong, expected).passed
        name = "first token" if tokens == 1 else f"first {tokens} tokens"
        return Check(name, test.p_value, seen_wrong, f"{test.cells} cells", test)


def _tilted(law: Array, tv: float) -> Array:
    """A law at this distance: half of the mass gains what the other half loses, hardest to see."""
    order = np.argsort(law)                             # the smaller part gains: it stays positive
    gains = np.zeros(len(law), bool)
    gains[order[np.cumsum(law[order]) <= 0.5]] = True
    mass = float(law[gains & (law > 0)].sum())
    if not 0 < mass < 1:
        return law
    moved = min(tv, 1 - mass)
    tilted: Array = np.where(gains, law * (1 + moved / mass), law * (1 - moved / (1 - mass)))
    return np.asarray(tilted / tilted.sum())


def _repeats(texts: Sequence[Text]) -> list[Check]:
    """Do neighbours, or calls with different seeds, repeat each other more often than by chance?"""
    equal = sum(count * (count - 1) for count in Counter(texts).values())
    rate = equal / (len(texts) * (len(texts) - 1))
    if rate > 0.9:
        return []                                       # nearly always the same text: nothing to see
    calls = [texts[start : start + CHUNK] for start in range(0, len(texts) - CHUNK + 1, CHUNK)]
    between = [pair for one, two in zip(calls[::2], calls[1::2], strict=False)
               for pair in zip(one, two, strict=True)]  # fmt: skip
    pairs_of = {"neighbours": list(zip(texts[::2], texts[1::2], strict=False)),
                "calls with different seeds": between}  # fmt: skip
    control = float(stats.binom.sf(len(texts) // 2 - 1, len(texts) // 2, rate)) < FALSE_ALARM
    checks = []
    for name, pairs in pairs_of.items():
        same = sum(one == two for one, two in pairs)
        p_value = float(stats.binom.sf(same - 1, len(pairs), rate)) if same else 1.0
        detail = f"{same} of {len(pairs)} pairs are the same, {rate * len(pairs):.1f} expected"
        checks.append(Check(f"independence of {name}", p_value, control, detail))
    return checks


def _after_the_end(texts: Sequence[Text], outcomes: Outcomes) -> Check:
    """Nothing but end tokens may follow an end token."""
    def overruns(text: Text) -> bool:
        stops = (place for place, token in enumerate(text) if token in outcomes.ends)
        return any(token not in outcomes.ends for token in text[next(stops, len(text)) :])

    wrong = sum(map(overruns, texts))
    detail = f"{wrong} texts go on after their end token"
    return Check("end of text", 0.0 if wrong else 1.0, overruns((outcomes.ends[0], CUT)), detail)


# Other people's engines -----------------------------------------------------------------------------


class ModelLaw:
    """A model's distribution under a sampling: `law(texts)` is [n, V], behind texts of one length."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Text]) -> Array:
        ids = torch.tensor(texts, device=self.model.device)                             # [n, L]
        parts = [self._some(ids[start : start + ROWS]) for start in range(0, len(ids), ROWS)]
        return np.asarray(torch.cat(parts).cpu().numpy())

    def _some(self, ids: torch.Tensor) -> torch.Tensor:
        read = self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        place = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
        paths = Paths(Prefix(ids, place), TokenTree.root(ids[:, -1]))
        sampler = Sampler([SamplingParams(self.sampling, ids.shape[1])] * len(ids), ids.device)
        return sampler.probs(read.logits[:, -1:].double(), paths)[:, 0]


def assisted(
    model: PreTrainedModel, assistant: PreTrainedModel, sampling: Sampling, length: int,
    tokens: int | None = None, ends: Sequence[int] = (),
) -> Draw:
    """``generate(assistant_model=...)`` of the installed transformers, one row at a time."""
    drawn = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    config = GenerationConfig(
        do_sample=sampling.temperature > 0, max_new_tokens=length, eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0, **(drawn if sampling.temperature > 0 else {}),
    )
    schedule = {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant"}
    model.generation_config = GenerationConfig()            # no default of either checkpoint
    assistant.generation_config = GenerationConfig(**(schedule if tokens else {}))

    def draw(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=model.device)
        given = {"attention_mask": torch.ones_like(ids), "assistant_model": assistant}
        texts = [model.generate(ids, generation_config=config, **given) for _ in range(n)]
        return [text[0, ids.shape[1] :].tolist() for text in texts]

    return draw


class Vocabulary:
    """Token ids of the strings a server names them by. Ids with the same string count as one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        strings = [tokenizer.decode([token]) for token in range(size)]
        self.ids: dict[str, int] = {}
        same = [self.ids.setdefault(string, token) for token, string in enumerate(strings)]
        self.first = np.array(same)
        for token, string in enumerate(tokenizer.convert_ids_to_tokens(list(range(size)))):
            if isinstance(string, str):
                self.ids.setdefault(string, int(self.first[token]))
        counts = np.bincount(self.first, minlength=size)
        self.shared = frozenset(np.flatnonzero(counts > 1).tolist())

    def merged(self, law: Law) -> Law:
        """`law` with the ids of one string put together."""
        def row(own: Array) -> Array:
            mass = own[: len(self.first)]
            return np.bincount(self.first, weights=mass, minlength=len(own)).astype(float)

        return lambda texts: np.stack([row(own) for own in law(texts)])

    def id(self, string: str) -> int:
        if string.startswith("token_id:"):
            return int(self.first[int(string.removeprefix("token_id:"))])
        if string not in self.ids:
            raise BadInput(f"the server returned the token {string!r}, unknown to the reference's tokenizer")
        return self.ids[string]


class Endpoint:
    """Any server with OpenAI's POST /v1/completions. Prompts go as token ids."""

    def __init__(self, url: str, model: str, want: Sampling, length: int, words: Vocabulary) -> None:
        base = url.rstrip("/")
        if not base.startswith(("http://", "https://")):
            raise BadInput(f"endpoint was {url!r}; give an address such as http://127.0.0.1:8000")
        tail = "" if base.endswith("/completions") else "/completions"
        self.url = base + (tail if base.endswith(("/v1", "/completions")) else "/v1/completions")
        self.words, self.length = words, length
        fields = {"temperature": want.temperature, "top_p": want.top_p, "logprobs": 1}
        self.body = {"model": model, "max_tokens": length, **fields}
        self.body |= {"top_k": want.top_k} if want.top_k else {}

    def __call__(self, prompt: list[int], n: int, seed: int) -> list[list[int]]:
        """`n` texts, in as many requests as the server needs, each with its own seed."""
        texts: list[list[int]] = []
        while len(texts) < n:
            own = {"n": min(ROWS, n - len(texts)), "seed": (seed * 1009 + len(texts)) % 2**31}
            choices = self._post({**self.body, "prompt": prompt, **own}).get("choices")
            if not isinstance(choices, list) or not choices:
                raise BadInput(f"{self.url} answered without any choices; is it a completions server?")
            texts += [self._tokens(choice) for choice in choices][: n - len(texts)]
        return texts

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        header, data = {"Content-Type": "application/json"}, json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url, data, header)
            with urllib.request.urlopen(request, timeout=60) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(300).decode(errors="replace").split())
            raise BadInput(f"{self.url} answered {error.code}: {said or error.reason}") from error
        except OSError as error:
            why = getattr(error, "reason", error)
            raise BadInput(f"{self.url} cannot be reached ({why}); is the server running?") from error
        except ValueError as error:
            raise BadInput(f"{self.url} answered with no JSON; is it a completions server?") from error
        return answer if isinstance(answer, dict) else {}

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        """Token ids of a choice: as given, by the strings of its log-probabilities, or by its text."""
        ids, scores = choice.get("token_ids"), choice.get("logprobs") or {}
        if isinstance(ids, list) and ids:
            return [int(self.words.first[token]) for token in ids]
        strings = scores.get("tokens") or [entry["token"] for entry in scores.get("content") or []]
        if not strings and self.length > 1 and choice.get("text"):
            why = "neither token ids nor logprobs, so only one token can be told apart; add --length 1"
            raise BadInput(f"{self.url} returns {why}")
        return [self.words.id(string) for string in strings or [choice.get("text")] if string]


def from_module(name: str) -> Any:
    """The sampler behind ``module:attribute``; modules of the working directory are found."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise BadInput(f"python was {name!r}; give module:attribute, such as my_engine:sample")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise BadInput(f"there is no module {error.name}; run where it can be imported") from error
    except AttributeError as error:
        raise BadInput(f"module {module} has no {attribute}") from error
    if not callable(getattr(found, "sample", found)):
        raise BadInput(f"{name} is a {type(found).__name__}; it must be a function sample(prompt, n, seed)")
    return found
