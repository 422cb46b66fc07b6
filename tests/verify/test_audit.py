"""`draftproof audit`: right engines pass, every planted bug is found, what cannot be judged is one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from helpers import bug_catalog
from helpers.bug_catalog import RIGHT

from draftproof import embedded
from draftproof.core.params import Sampling
from draftproof.errors import BadInput
from draftproof.verify.audit import Audit, Law, Text, audit
from draftproof.verify.engines import ModelLaw, assisted
from draftproof.verify.sampling import toy

VOCAB, LENGTH, PROMPT = 6, 3, (1, 2)


def table(salt: int, sharp: float = 1.5, temperature: float = 1.0) -> Law:
    """A law that depends on the whole text."""

    @cache
    def row(text: Text) -> Any:
        odds = np.exp(np.random.default_rng([salt, *text]).normal(0, sharp, VOCAB) / temperature)
        return odds / odds.sum()

    return lambda texts: np.stack([row(tuple(text)) for text in texts])


TARGET, DRAFT = table(1), table(2)
Sampler = Callable[[list[int], int, int], list[list[int]]]


def drawn(dice: np.random.Generator, odds: Any) -> int:
    return min(int(np.searchsorted(odds.cumsum(), dice.random() * odds.sum(), side="right")), len(odds) - 1)


def speculative(
    mistake: bug_catalog.Mistake, draft: Law = DRAFT, raw: Law = DRAFT, tokens: int = 2, bonus: bool = True
) -> Sampler:
    """A draft-and-verify loop with a mistake in it."""

    @cache
    def odds(text: Text, place: int) -> Any:
        with np.errstate(all="ignore"):
            return np.concatenate(mistake(TARGET([text])[0], draft([text])[0], raw([text])[0], place))

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        dice = np.random.default_rng(seed)
        return [one(tuple(prompt), dice) for _ in range(n)]

    def one(text: Text, dice: np.random.Generator) -> list[int]:
        start = len(text)
        while len(text) < start + LENGTH:
            for place in range(tokens):
                came = drawn(dice, odds(text, place))
                text = (*text, came % VOCAB)
                if came >= VOCAB:
                    break
            else:
                text = (*text, drawn(dice, TARGET([text if bonus else text[:-1]])[0]))
        return list(text[start : start + LENGTH])

    return sample


def plain(law: Law, ends: Sequence[int] = (), beyond: bool = False) -> Sampler:
    """Token by token; `beyond`: the end token does not end it."""

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        dice, texts = np.random.default_rng(seed), []
        for _ in range(n):
            text: list[int] = []
            while len(text) < LENGTH and (beyond or not set(text) & set(ends)):
                text.append(drawn(dice, law([(*prompt, *text)])[0]))
            texts.append(text)
        return texts

    return sample


def judged(sampler: Any, **options: Any) -> Audit:
    return audit(sampler, TARGET, PROMPT, **{"samples": 2000, "length": LENGTH, **options})


class Whole:
    """The protocol as an object."""

    sample = staticmethod(plain(TARGET))


@pytest.mark.parametrize("sampler", [plain(TARGET), speculative(RIGHT), speculative(RIGHT, tokens=1), Whole()])
def test_right_engines_pass(sampler: Any) -> None:
    found = judged(sampler)
    assert not found.biased and all(check.control for check in found.checks)
    assert found.joint.low == 0 and found.joint.detects < 0.15 and found.false_alarm <= 1e-5
    json.dumps(found.as_dict())


@pytest.mark.parametrize("bug", bug_catalog.MISTAKES)
def test_every_bug_is_found(bug: str) -> None:
    draft = table(2, temperature=0.5) if " raw " in bug or "before warping" in bug else DRAFT
    found = judged(speculative(bug_catalog.MISTAKES[bug], draft), samples=3000)
    assert found.biased and all(check.control for check in found.checks)


def test_a_missing_bonus_position_and_a_wrong_temperature_are_found() -> None:
    assert judged(speculative(RIGHT, bonus=False, tokens=1), samples=3000).biased
    assert judged(plain(table(1, temperature=2.0))).biased


def test_repeating_samples_are_found_though_their_law_is_right() -> None:
    assert judged(lambda prompt, n, seed: plain(TARGET)(prompt, n, 0)).biased
    assert judged(lambda prompt, n, seed: plain(TARGET)(prompt, 1, 0) * n).biased
    twice = lambda prompt, n, seed: [text for text in plain(TARGET)(prompt, n // 2, seed) for _ in range(2)]  # noqa: E731
    assert judged(twice).biased


def test_the_end_of_a_text() -> None:
    assert not judged(plain(TARGET, ends=(2, 4)), ends=(2, 4)).biased
    hidden: Sampler = lambda *asked: [text[:-1] if text[-1] == 2 else text for text in plain(TARGET, (2,))(*asked)]  # noqa: E731
    assert not judged(hidden, ends=(2,)).biased
    assert judged(plain(TARGET, ends=(2,), beyond=True), ends=(2,)).biased
    assert judged(lambda prompt, n, seed: [[]] * n).biased, "a text may not end without an end token"


def test_impossible_tokens_fail_at_once() -> None:
    def narrow(texts: Sequence[Text]) -> Any:
        law = np.where(TARGET(texts) < 0.02, 0, TARGET(texts))
        return law / law.sum(-1, keepdims=True)

    assert audit(plain(TARGET), narrow, PROMPT, samples=2000).joint.p_value == 0
    assert not audit(plain(narrow), narrow, PROMPT, samples=2000).biased


def test_rare_outcomes_are_pooled_with_a_large_vocabulary() -> None:
    odds = 1 / np.arange(1, 2001)
    law: Law = lambda texts: np.stack([np.roll(odds / odds.sum(), text[-1]) for text in texts])  # noqa: E731

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        shift = np.random.default_rng(seed).choice(2000, size=(n, 2), p=odds / odds.sum())
        return ((prompt[-1] + shift.cumsum(1)) % 2000).tolist()                     # type: ignore[no-any-return]

    found = audit(sample, law, [5], length=2, samples=4000)
    assert not found.biased and found.joint.cells < 200
    assert audit(lambda p, n, s: [[a, a] for a, _ in sample(p, n, s)], law, [5], length=2, samples=4000).biased


@pytest.mark.parametrize(
    ("sampler", "options", "words"),
    [
        (plain(TARGET), {"samples": 10}, "at least 200"),
        (plain(TARGET), {"length": 0}, "length"),
        (lambda prompt, n, seed: [[1]], {}, "100 texts and returned 1"),
        (lambda prompt, n, seed: None, {}, "NoneType"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(sampler: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        judged(sampler, **options)


def test_no_prompt_and_no_law_are_one_sentence() -> None:
    with pytest.raises(BadInput, match="prompt is empty"):
        audit(plain(TARGET), TARGET, [])
    with pytest.raises(BadInput, match="sum to one"):
        audit(plain(TARGET), lambda texts: TARGET(texts) * 2, PROMPT)


def test_transformers_with_a_draft_model_is_unbiased() -> None:
    model, assistant = (toy(seed, 6, dtype=torch.float32).model for seed in (21, 22))
    want = Sampling(temperature=0.8, top_k=4)
    engine = assisted(model, assistant, want, LENGTH, 2)
    found = audit(engine, ModelLaw(model, want), [3], length=LENGTH, samples=300)
    assert not found.biased and found.joint.detects < 0.4


# A server and the command line ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo's tokenizer, sharp enough for a small sample."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0, initializer_range=0.8,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded("demo") / name, folder / name)
    return folder


class Server(NamedTuple):
    url: str
    sins: set[str]


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[Server]:
    """A right completions server; what is in `sins` makes it wrong."""
    model = transformers.LlamaForCausalLM.from_pretrained(served).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(served)
    sins: set[str] = set()

    @cache
    def row(text: Text, temperature: float) -> Any:
        return ModelLaw(model, Sampling(temperature=temperature))([text])[0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code = 404 if ask["model"] != "tiny" else 200
            answer = json.dumps({"choices": self.choices(ask)} if code == 200 else {"error": "no such model"}).encode()
            self.send_response(code)
            self.end_headers()
            self.wfile.write(b"<html>" if "no JSON" in sins else answer)

        def choices(self, ask: dict[str, Any]) -> list[dict[str, Any]]:
            dice = np.random.default_rng(0 if "constant seed" in sins else ask["seed"])
            temperature = 1.0 if "temperature ignored" in sins else ask["temperature"]
            choices = []
            for _ in range(ask["n"]):
                text: list[int] = []
                while len(text) < ask["max_tokens"] and 0 not in text:
                    text.append(drawn(dice, row((*ask["prompt"], *text), temperature)))
                strings = [tokenizer.decode([token]) for token in text]
                scores = None if "no logprobs" in sins else {"tokens": strings}
                choices.append({"text": "".join(strings), "logprobs": scores, "finish_reason": "length"})
            return choices

        def log_message(self, *said: Any) -> None:
            """Say nothing."""

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield Server(f"http://127.0.0.1:{httpd.server_port}", sins)
    httpd.shutdown()


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """``draftproof audit ARGS``, in this process."""
    from draftproof.cli.app import main

    def run(*args: str) -> Said:
        out, err, code = io.StringIO(), io.StringIO(), 0
        monkeypatch.setattr(sys, "argv", ["draftproof", "audit", *args])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as leaving:
                code = int(leaving.code or 0)
        return Said(code, out.getvalue(), err.getvalue())

    return run


@pytest.mark.parametrize(("sin", "code"), [("", 0), ("constant seed", 1), ("temperature ignored", 1)])
def test_a_server(
    server: Server, served: Path, call: Callable[..., Said], tmp_path: Path, sin: str, code: int
) -> None:
    server.sins.clear()
    server.sins.add(sin)
    report = tmp_path / "audit.json"
    said = call(
        "--endpoint", server.url, "--model", "tiny", "--reference", str(served), "--temperature", "0.6",
        "--prompt", "Once", "--samples", "2000", "--json", str(report),
    )  # fmt: skip
    assert said.code == code and said.out.startswith("BIASED" if code else "UNBIASED"), said
    figures = json.loads(report.read_text())
    assert figures["verdict"] == ("biased" if code else "unbiased") and figures["length"] == 2
    assert all(check["control"] for check in figures["checks"])


def test_a_server_without_logprobs_is_judged_by_one_token(server: Server, served: Path, call: Callable[..., Said]) -> None:
    server.sins.clear()
    server.sins.add("no logprobs")
    ask = ("--endpoint", server.url, "--model", "tiny", "--reference", str(served), "--prompt", "Once", "--samples", "1000")
    said = call(*ask)
    assert said.code == 2 and "--length 1" in said.err
    assert call(*ask, "--length", "1").code == 0


def test_the_command_line_with_a_function(
    served: Path, call: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_engine.py").write_text("def sample(prompt, n, seed):\n    return [[7, 7]] * n\n")
    monkeypatch.chdir(tmp_path)
    said = call("--python", "my_engine:sample", "--model", str(served), "--samples", "1000")
    assert said.code == 1 and said.out.startswith("BIASED")


FUNCTION = ("--python", "builtins:len", "--model", "SERVED")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "one engine"),
        (["--hf", "x", "--python", "y:z"], "one engine"),
        (["--hf", "demo"], "--assistant-model"),
        (["--endpoint", "http://127.0.0.1:9"], "--reference"),
        (["--endpoint", "http://127.0.0.1:9", "--model", "x", "--reference", "SERVED"], "cannot be reached"),
        (["--endpoint", "127.0.0.1", "--model", "x", "--reference", "SERVED"], "http://"),
        (["--endpoint", "SERVER", "--model", "x", "--reference", "SERVED"], "404"),
        (["--python", "no_such_module:f", "--model", "SERVED"], "no_such_module"),
        (["--python", "json:nothing", "--model", "SERVED"], "nothing"),
        (["--python", "json", "--model", "SERVED"], "module:attribute"),
        ([*FUNCTION, "--prompt-tokens", "1,9999"], "from 0 to 4095"),
        ([*FUNCTION, "--samples", "3"], "at least 200"),
        ([*FUNCTION, "--temperature", "-1"], "temperature"),
        (["--hf", "/no/where", "--assistant-model", "x"], "/no/where"),
    ],
)
def test_usage_is_one_sentence_and_exit_code_2(
    call: Callable[..., Said], served: Path, server: Server, options: list[str], words: str
) -> None:
    server.sins.clear()
    said = call(*({"SERVED": str(served), "SERVER": server.url}.get(option, option) for option in options))
    lines = said.err.splitlines()
    assert said.code == 2 and said.out == "" and words in said.err, said
    assert len(lines) == 1 and lines[0].startswith("draftproof: ")
